"""Scores of a checkpoint by the reference: answers to the held-out set, perplexity, drafts, golden data.

usage: python evaluate.py --checkpoint DIR --out DIR [--share F] [--parity]
"""
import argparse, json, os, random, time, traceback

import torch


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--checkpoint", required=True); ap.add_argument("--out", required=True); ap.add_argument("--share", type=float, default=1.0); ap.add_argument("--parity", action="store_true")
    ap.add_argument("--no-familiar", action="store_true"); ap.add_argument("--no-verify", action="store_true"); ap.add_argument("--no-golden", action="store_true")
    a = ap.parse_args()
    born = time.time()
    say = lambda *x: print(f"[{time.time() - born:7.1f}] eval:", *x, flush=True)
    from tokenizers import Tokenizer
    import data, export, model, score
    export.encoder()
    os.makedirs(a.out + "/golden", exist_ok=True)
    tk = Tokenizer.from_file(a.checkpoint + "/tokenizer.json")
    encode = lambda s: tk.encode(s, add_special_tokens=False).ids
    text_of = lambda ids: tk.decode(ids, skip_special_tokens=False)
    nano = model.Nano().cuda().eval()
    export.read_checkpoint(nano, a.checkpoint)
    def attempt(name, f):
        try:
            t = time.time(); r = f(); say(name, r, f"({time.time() - t:.1f} s)"); return r
        except Exception:
            say(name, "FAILED"); traceback.print_exc()
    if a.parity:
        attempt("parity", lambda: model.check_parity(nano, encode(data.prompt(data.held_out()[0]) + " The ninfer server listens on port 8080.")[:90]))
    if not a.no_golden:
        attempt("golden", lambda: score.golden(nano, encode, text_of, a.out + "/golden"))
    def ppl():
        path = os.path.join(data.HERE, "corpus.txt")
        ids = encode(open(path).read())
        return score.perplexity(nano, ids)
    report = {"perplexity": attempt("perplexity", ppl)}
    rows = data.held_out()
    with open(a.out + "/heldout.jsonl", "w") as f:
        for r in rows:
            f.write(json.dumps(r, ensure_ascii=False) + "\n")
    rows = [r for r in rows if r["skill"] not in ("needle4k", "needle8k")]
    if a.share < 1:
        rows = [r for r in rows if random.Random(r["id"]).random() < a.share]
    got = attempt_rows = None
    def answers():
        nonlocal got
        got, total = score.run(nano, encode, text_of, rows, not a.no_verify, say)
        report["skills"] = total
        with open(a.out + "/reference.jsonl", "w") as f:
            for g in got:
                f.write(json.dumps(g, ensure_ascii=False) + "\n")
        return {k: f"{v['pass']}/{v['n']}" for k, v in total.items()}
    attempt("skills", answers)
    if got:
        shown = {}
        for r, g in zip(rows, got):
            if not g["pass"] and shown.setdefault(r["skill"], 0) < 4:
                shown[r["skill"]] += 1
                say("WRONG", r["id"], repr(r["messages"][-1]["content"][-160:]), "->", repr(g["text"][:200]), "want", json.dumps(r["expect"])[:160])
        part = [(g["prompt_tokens"], g["tokens"]) for r, g in zip(rows, got) if r["skill"] in ("chat", "docs")][:60]
        report["drafts"] = attempt("drafts", lambda: score.drafts(nano, [p for p, _ in part], [t for _, t in part]))
    def familiar():
        for name, known in (("familiar", data.familiar()), ("fresh", data.fresh())):
            report[name] = score.run(nano, encode, text_of, known, False, say)[1]
        return {n: {k: f"{v['pass']}/{v['n']}" for k, v in report[n].items()} for n in ("familiar", "fresh")}
    if not a.no_familiar:
        attempt("familiar forms with new contents, fresh forms", familiar)
    json.dump(report, open(a.out + "/reference.json", "w"), indent=1)
    attempt("tokenizer", lambda: tokenizer(a, export))


def tokenizer(a, export):
    import make_frontend as mf
    from tokenizers import Tokenizer
    t = Tokenizer.from_file(a.checkpoint + "/tokenizer.json")
    gold = []
    for s in mf.TEXTS:
        ids = t.encode(s, add_special_tokens=False).ids
        gold.append(dict(text=s, ids=ids, decoded=t.decode(ids, skip_special_tokens=False)))
    json.dump(gold, open(a.out + "/golden/tokenizer_golden.json", "w"), ensure_ascii=True, indent=0)
    return len(gold)


if __name__ == "__main__":
    main()
