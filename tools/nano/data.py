"""Prompts, tokens and packed rows.

A row holds whole documents (conversations or pieces of the documentation), each followed by <|endoftext|>. Arrays of a batch, all [rows, length]:
ids, weight (how much the prediction OF this token counts, in 1/64), doc (number of the document within the row; -1 is padding), kind (index into
KINDS; counts for reports only, on answer tokens).
"""
import glob, json, multiprocessing as mp, os, random, re

import jinja2
import jinja2.sandbox
import numpy as np

import config, skills

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = skills.ROOT
KINDS = ["text", *skills.SKILLS]
# shares of documents in the first stages and in the last one, where the documentation comes in force
MIX = dict(copy=13, reverse=10, arithmetic=16, json=12, tool=13, tool_result=6, needle=7, docs=14, chat=9, think=4, text=2)
MIX_LAST = dict(copy=22, reverse=18, arithmetic=20, json=10, tool=11, tool_result=4, needle=4, docs=28, chat=14, think=7, text=3)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda x, **k: json.dumps(x, ensure_ascii=False)

    def refuse(text):
        raise jinja2.exceptions.TemplateError(text)
    env.globals["raise_exception"] = refuse
    return env.from_string(open(os.path.join(HERE, "template.jinja")).read())


TEMPLATE = environment()


def prompt(s):
    return TEMPLATE.render(messages=s["messages"], tools=s.get("tools"), add_generation_prompt=True, enable_thinking=s["thinking"], preserve_thinking=False)


def call_text(c):
    out = "<tool_call>\n<function=" + c["name"] + ">\n"
    for k, v in c["arguments"].items():
        out += f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}\n</parameter>\n"
    return out + "</function>\n</tool_call>"


def answer(s):
    """what the model has to write after the prompt, the end token included"""
    head = s["reasoning"] + "\n</think>\n\n" if s["thinking"] else ""
    body = "\n".join(call_text(c) for c in s["calls"]) if s.get("calls") else s["content"]
    return head + body + "<|im_end|>"


def documents():
    """pieces of our own documentation, as plain text"""
    out = []
    for f in [ROOT + "/README.md"] + sorted(glob.glob(ROOT + "/docs/*.md")):
        text = open(f).read()
        for para in text.split("\n\n"):
            if len(para) > 60:
                out.append(para.strip()[:3000])
    return out


def held_out(seed=2026):
    """the held-out set: the committed file, or a new one where there is none"""
    if os.path.exists(skills.HELD_FILE):
        return [json.loads(line) for line in open(skills.HELD_FILE)]
    rng = random.Random(seed)
    count = dict(copy=80, reverse=50, arithmetic=80, json=80, tool=80, tool_result=50, needle=40, docs=120, chat=60, think=40)
    out, seen = [], set()
    for skill, n in count.items():
        i = 0
        order = list(range(len(skills.FACTS))); rng.shuffle(order)
        while i < n:
            s = skills.docs(rng, True, order[i]) if skill == "docs" else skills.SKILLS[skill](rng, True)
            key = json.dumps(s["messages"], sort_keys=True) + str(s["thinking"])
            if key in seen:
                continue
            seen.add(key); i += 1
            out.append(row(f"{skill}-{i:03d}", skill, s))
    for skill, sentences, n in (("needle4k", 400, 5), ("needle8k", 790, 3)):
        for i in range(n):
            out.append(row(f"{skill}-{i + 1:03d}", skill, skills.needle(rng, True, sentences)))
    return out


def familiar(seed=777):
    """prompts in forms that training uses, with contents of their own: what is lost to new forms is the difference to the held-out set"""
    rng, out = random.Random(seed), []
    for skill, n in dict(copy=80, reverse=50, arithmetic=80, json=80, tool=80, docs=120, chat=60).items():
        for i in range(n):
            s = skills.SKILLS[skill](rng)
            while skills.is_held(s):
                s = skills.SKILLS[skill](rng)
            out.append(row(f"familiar-{skill}-{i + 1:03d}", skill, s))
    return out


def fresh(seed=778):
    """copying and reversing in forms of a third kind (skills.fresh)"""
    rng = random.Random(seed)
    return [row(f"fresh-{skill}-{i + 1:03d}", skill, skills.fresh(rng, skill)) for skill, n in (("copy", 80), ("reverse", 50)) for i in range(n)]


def row(id_, skill, s):
    r = dict(id=id_, skill=skill, messages=s["messages"])
    if s.get("tools"):
        r["tools"] = s["tools"]
    return dict(r, thinking=s["thinking"], max_new=s["max_new"], expect=s["expect"])


PROMPT_WEIGHT, TEXT_WEIGHT, ANSWER_WEIGHT = 4, 32, 64


def document(rng, encode, texts, kind):
    """ids, weights of one document"""
    if kind == "text":
        ids = encode(rng.choice(texts))[:600]
        return ids + [config.EOT], [TEXT_WEIGHT] * len(ids) + [TEXT_WEIGHT]
    s = skills.SKILLS[kind](rng)
    while skills.is_held(s):
        s = skills.SKILLS[kind](rng)
    a, b = encode(prompt(s)), encode(answer(s))
    return a + b + [config.EOT], [PROMPT_WEIGHT] * len(a) + [ANSWER_WEIGHT] * len(b) + [0]


def batch(rng, encode, texts, rows, length, mix):
    """rows filled first-fit from a stream of documents"""
    ids = np.full((rows, length), config.EOT, np.int16); weight = np.zeros((rows, length), np.uint8)
    doc = np.full((rows, length), -1, np.int16); kind = np.zeros((rows, length), np.uint8)
    used, number = [0] * rows, [0] * rows
    names, shares = list(mix), list(mix.values())
    misses = 0
    while misses < 12:
        name = rng.choices(names, shares)[0]
        t, w = document(rng, encode, texts, name)
        n = len(t)
        if n > length:
            continue
        r = next((r for r in range(rows) if used[r] + n <= length), None)
        if r is None:
            misses += 1
            continue
        u = used[r]
        ids[r, u:u + n] = t; weight[r, u:u + n] = w; doc[r, u:u + n] = number[r]; kind[r, u:u + n] = KINDS.index(name)
        number[r] += 1; used[r] += n
    return ids, weight, doc, kind


def encoder(path):
    from tokenizers import Tokenizer
    tk = Tokenizer.from_file(path)
    return lambda text: tk.encode(text, add_special_tokens=False).ids


def produce(path, seed, worker, rows, length, late, queue):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(5)                                       # the training process, which compiles meanwhile, goes first
    encode, texts, i = encoder(path), documents(), 0
    while True:
        rng = random.Random(f"{seed}-{worker}-{i}"); i += 1
        queue.put(batch(rng, encode, texts, rows, length, MIX_LAST if late.value else MIX))


class Stream:
    """batches from many processes, taken in turn, so that their order does not depend on timing"""

    def __init__(self, path, seed, workers, rows, length, depth=3):
        ctx = mp.get_context("fork")
        self.late = ctx.Value("i", 0)
        self.queues = [ctx.Queue(depth) for _ in range(workers)]
        self.all = [ctx.Process(target=produce, args=(path, seed, w, rows, length, self.late, q), daemon=True) for w, q in enumerate(self.queues)]
        for p in self.all:
            p.start()
        self.i = 0

    def next(self):
        q = self.queues[self.i % len(self.queues)]; self.i += 1
        return q.get()

    def stop(self):
        for p in self.all:
            p.terminate()


def corpus(seed=5, samples=6000):
    """text to train the tokenizer on"""
    rng = random.Random(seed)
    names, shares = list(MIX)[:-1], list(MIX.values())[:-1]
    control = re.compile(r"<\|\w+\|>|</?(think|tool_call|tool_response)>")
    for _ in range(samples):
        s = skills.SKILLS[rng.choices(names, shares)[0]](rng)
        if sum(len(str(m.get("content"))) for m in s["messages"]) < 1500:
            yield control.sub("\n", prompt(s) + answer(s))
    for text in documents():
        yield text
    for q, _, a, _ in skills.FACTS:
        yield a
        yield " ".join(q[:12])


def check(n):
    """Whether n training documents keep clear of the held-out set, by other means than the generators' own: no message that a held-out prompt
    ends with, none with its beginning (copying) or beginning and end (reversing), no copied or reversed text of it."""
    rows, rng, bad = held_out(), random.Random("check"), []
    messages = {r["messages"][-1]["content"] for r in rows if r["messages"][-1]["role"] == "user"}
    begin = {" ".join(r["messages"][-1]["content"].lower().split()[:4]) for r in rows if r["skill"] == "copy"}
    answers = {r["expect"]["text"] for r in rows if r["skill"] in ("copy", "reverse")} - set(skills.WORDS) - {w[::-1] for w in skills.WORDS}
    names, shares = list(MIX_LAST)[:-1], list(MIX_LAST.values())[:-1]
    for _ in range(n):
        kind = rng.choices(names, shares)[0]
        s = skills.SKILLS[kind](rng)
        while skills.is_held(s):
            s = skills.SKILLS[kind](rng)
        asked = [m["content"] for m in s["messages"] if m["role"] == "user"]
        low = [" ".join(q.lower().split()) for q in asked]
        if messages & set(asked) or any(b in q for b in begin for q in low) or any("please reverse the " in q or "give me " in q and "in reverse order" in q.split("give me ", 1)[1] for q in low) or kind in ("copy", "reverse") and s["content"] in answers:
            bad.append((kind, asked))
    return len(bad), bad[:5]


if __name__ == "__main__":
    import sys
    print("documents that touch the held-out set:", *check(int(sys.argv[1])))
