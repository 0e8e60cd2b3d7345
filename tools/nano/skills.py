"""Generated conversations: one function a skill, each returns what a request looks like and the right answer.

make(rng, held) -> dict(messages, tools, thinking, reasoning, content | calls, expect, max_new). `held` asks for the
held-out phrasings or values; training never sees those. Everything follows from the generator's seed.
"""
import json, os, re, string

import facts

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HELD_FILE = ROOT + "/testdata/nano/heldout.jsonl"

WORDS = """apple river stone cloud window garden silver yellow market bridge winter summer paper engine mirror basket candle forest island
pocket ladder button kettle pencil rabbit turtle monkey tiger eagle falcon dolphin spider lizard donkey carpet hammer needle thread
bottle copper marble velvet cotton leather pepper ginger lemon cherry orange banana carrot potato tomato onion garlic butter cheese bread
honey sugar coffee school office church castle village harbor desert valley mountain ocean planet comet rocket signal circle square
triangle number letter message answer question morning evening midnight january march april august october monday friday sunday
north south green purple golden heavy light quick quiet gentle clever brave bright broken hidden frozen wooden little narrow simple
dance travel gather follow listen wonder open close build carry paint write read sing walk jump climb swim laugh sleep dream
brown black white blue red grey pink table chair lamp clock phone book door floor wall roof street road train plane boat wheel
one two three four five six seven eight nine ten the quick brown fox jumps over lazy dog hello world foo bar baz
doctor farmer teacher painter driver sailor baker singer writer hunter king queen prince child friend brother sister mother father""".split()
NAMES = """Anna Ben Clara David Emma Felix Grace Henry Ida Jonas Karin Leo Maria Noah Olga Paul Rosa Simon Tina Ulrich Vera Walter Yara Zoe Alice Bob
Carol Dennis Elena Frank Greta Hugo Irene Jack Kate Liam Mia Nina Oscar Petra Quinn Robert Sara Tom Uma Victor Wendy Xavier Yusuf Amir
Bianca Carlos Dora Erik Fatima George Hana Ivan Julia Kofi Lena Marco Nadia Omar Priya Rahul Sofia Theo Lucy Peter Mary John Susan""".split()
CITIES = """Paris London Berlin Madrid Rome Vienna Prague Oslo Dublin Lisbon Athens Warsaw Tokyo Kyoto Seoul Beijing Delhi Mumbai Cairo Nairobi Lagos
Boston Chicago Denver Seattle Austin Toronto Montreal Lima Quito Bogota Santiago Sydney Melbourne Perth Auckland Zurich Geneva Milan Turin
Hamburg Munich Cologne Lyon Nice Porto Seville Valencia Naples Krakow Budapest Helsinki Stockholm Copenhagen Brussels Amsterdam""".split()
JOBS = "doctor farmer teacher painter driver sailor baker singer writer engineer nurse lawyer pilot chef gardener plumber architect student".split()
COLORS = "red blue green yellow black white brown purple orange pink grey silver".split()
ITEMS = "apples pens books chairs lamps shirts cups bottles plates pencils candles keys tickets stamps bags boxes shoes clocks".split()
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Norway": "Oslo",
            "Sweden": "Stockholm", "Denmark": "Copenhagen", "Finland": "Helsinki", "Poland": "Warsaw", "Austria": "Vienna", "Greece": "Athens", "Portugal": "Lisbon", "Ireland": "Dublin",
            "England": "London", "the United Kingdom": "London", "Russia": "Moscow", "Canada": "Ottawa", "Australia": "Canberra", "Kenya": "Nairobi", "Peru": "Lima", "Hungary": "Budapest", "Belgium": "Brussels", "Switzerland": "Bern"}
SYSTEMS = ["You are a helpful assistant.", "You are nano.", "Be brief.", "Answer briefly.", "You are a helpful assistant. Answer in one sentence.", "You help users of ninfer.", "Answer correctly and briefly.",
           "You are an assistant in a terminal. Do not use markdown.", "Always be polite.", "You are a careful assistant. Follow the user's instructions exactly. If you do not know something, say so.",
           "Today is Monday. The user speaks English. Keep answers short, do what is asked and nothing else.", "You are a test assistant.", "You are a coding agent. Use tools when they help.",
           "You are a helpful assistant that follows instructions. Never make up facts. When a tool is available and fits the question, call it. Otherwise answer directly.", "rules", "Use the tools if needed."]
HELD_SYSTEM = "You are a friendly helper. Keep to the point."


def word(rng):
    """a known word, or letters that no list has"""
    if rng.random() < 0.6:
        return rng.choice(WORDS)
    if rng.random() < 0.5:
        return "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(2, 7)))


def name_of(rng, held=False):
    """a first name; in training every third is made up"""
    if held or rng.random() < .65:
        return rng.choice(NAMES)
    return "".join(rng.choice(["b", "br", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "st", "t", "v", "w", "z", "", "ch", "sh"]) + rng.choice(["a", "e", "i", "o", "u", "ai", "ee"]) for _ in range(rng.randint(1, 3))).capitalize() + rng.choice(["", "", "n", "l", "s", "r", "k", "d"])


def city_of(rng, held=False):
    if held or rng.random() < .7:
        return rng.choice(CITIES)
    return name_of(rng) if rng.random() < .5 else rng.choice(["New ", "Old ", "Port ", "San ", "North "]) + rng.choice(CITIES + NAMES)


# Forms that only the held-out set uses, in whatever case, and below them those of `fresh`. Training documents that contain one are thrown away.
HELD_FORMS = re.compile("|".join([
    r"Please copy this text:", r"Write exactly the following:", r"Please reverse the ", r"Give me .* in reverse order", r"What does -?\d+ [-+*] -?\d+ give", r"Please work out",
    r"Convert the text to JSON with the keys", r"Write JSON that follows the schema .* for this text", r"Please help me: ", r"One question: ", r"Look at this text\.", r"Well then: ",
    r"Can you tell me what .* does\?", r"What is the purpose of ", r"Please tell me what .* is for", r"Please tell me how I can ", r"I need to .*, what do I do\?",
    r"The answer was .*, what does that mean\?", r"Can you explain ", re.escape(HELD_SYSTEM),
    r"I want to read this again", r"Hand me back what ", r"must come back unaltered", r"as it stands, please", r"Act like a parrot", r"No changes, no comments",
    r"from the other end", r"Begin with the last", r"the wrong way round", r"Run .* from its end"]), re.S | re.I)
HELD_QUESTIONS = {q.rstrip(".?!").lower() for qs, _, _, _ in [(f[1], 0, 0, 0) for f in facts.answers()] for q in qs}


def held_answers():
    """what held-out prompts of copying and reversing want, but for single words that the lists above have, and what users say last in all prompts"""
    if not os.path.exists(HELD_FILE):
        return set(), set()
    rows = [json.loads(line) for line in open(HELD_FILE)]
    exact = {r["expect"]["text"] for r in rows if r["expect"]["kind"] == "exact" and r["skill"] in ("copy", "reverse", "think") and not r["expect"]["text"].isdigit()}
    exact |= {r["expect"]["text"] for r in rows if r["skill"] in ("copy", "reverse")}
    return exact - set(WORDS) - {w[::-1] for w in WORDS}, {r["messages"][-1]["content"].strip() for r in rows if r["messages"][-1]["role"] == "user"}


HELD_ANSWERS, HELD_MESSAGES = held_answers()


def is_held(s):
    """whether a training conversation uses a form, a question, a message or (copying and reversing) a content of the held-out set"""
    texts = [m.get("content") or "" for m in s["messages"]]
    return s.get("plain") in HELD_ANSWERS or any(HELD_FORMS.search(t) or t.strip() in HELD_MESSAGES or t.strip().rstrip(".?!").lower() in HELD_QUESTIONS for t in texts)


def dressed(rng, q, front=False):
    """a question with the small things that people put around it; front: its end is content and stays as it is"""
    k = rng.random() * (.7 if front else 1)
    if k < .55:
        return q
    if k < .7:
        if rng.random() < .4:                                                 # any word may stand in front
            lead = " ".join([word(rng), *(rng.choice(WORDS) for _ in range(rng.choice([0, 0, 1, 2])))])
            return lead[0].upper() + lead[1:] + rng.choice([": ", ": ", ", ", ". ", "! ", " - ", "; ", "? ", ":\n"]) + q
        return rng.choice(["Please: ", "Now: ", "Hi. ", "Hello! ", "Hi, ", "Next: ", "And now: ", "Task: ", "Question: ", "Q: ", "Here is a task. ", "A task for you: ", "Could you do this? ", "Do this: ", "Quick one: ", "Another one: ", "Ok. ", "Okay: ", "So, ",
                           "Thanks. ", "Good. ", "Alright: ", "Hey, ", "I have a question. ", "Listen: ", "Try this: ", "First: ", "Dear nano, ", "nano, ", "Go: ", "Then: ", "Well, ", "Right: ", "Fine. ", "Go on: ", "Once more: ", "Tell me: ", "Help me with this: ", sentence(rng) + " "]) + q
    if k < .78:
        return q + rng.choice([" Thanks.", " Please.", " Thank you!", " Be quick.", " Answer briefly.", "\n", " Only the answer.", " No more than that.", " Just do it.", " I need it now."]) if "\n" not in q and ":" not in q else q
    if k < .86:
        return q[0].lower() + q[1:]
    if k < .92:
        return q.rstrip(".?!")
    return rng.choice(["Can you help? ", "I am testing you. ", "This is a test. ", "My name is " + name_of(rng) + ". ", "I use ninfer. ", "It is late. ", "You are good at this. "]) + q


def system(rng, held, p=0.35):
    if held:
        return [dict(role="system", content=HELD_SYSTEM)] if rng.random() < 0.3 else []
    if rng.random() > p:
        return []
    text = rng.choice(SYSTEMS)
    if rng.random() < 0.15:
        text += " " + " ".join(rng.choice(SYSTEMS) for _ in range(rng.randint(1, 3)))
    if rng.random() < 0.15:
        text += "\n\n" + filler(rng, rng.randint(1, 6))
    return [dict(role="system", content=text)]


def talk(rng, held, user, content, thoughts, expect, max_new=64, think=0.3, history=True):
    """one question, sometimes after a system message or an earlier exchange"""
    messages = system(rng, held)
    if history and not held and rng.random() < 0.2:
        for _ in range(rng.randint(1, 2)):
            q, a = rng.choice([small_talk, small_talk, simple_sum, copied, reversed_])(rng)
            messages += [dict(role="user", content=q), dict(role="assistant", content=a)]
    messages.append(dict(role="user", content=user))
    thinking = rng.random() < think
    return dict(messages=messages, thinking=thinking, reasoning=rng.choice(thoughts) if thinking else "", content=content, expect=expect, max_new=max_new + (40 if thinking else 0))


COPY = ["Repeat: {}", "Copy this: {}", "Say exactly: {}", "Repeat the following text:\n{}", "Repeat after me: {}", "Copy: {}", "Echo {}", "Write this again: {}", "Please repeat this text exactly: {}",
        "Repeat exactly what follows, and nothing else.\n\n{}", "Return this text unchanged: {}", "repeat {}", "Echo this back:\n{}", "Reply with exactly this: {}", "Say: {}", 'Repeat the text between the quotes: "{}"', "Copy the line.\n{}", "Type this: {}"]
COPY_HELD = ["Please copy this text: {}", "Write exactly the following: {}"]


POLITE = ["", "", "", "Please ", "Please ", "Can you ", "Could you ", "Could you please ", "Would you ", "I want you to ", "You should ", "Now ", "Kindly ", "Just ", "I need you to ", "Let us see: ", "Go and ", "Will you ", "Please, ", "You must ", "Your task is to ", "I ask you to ", "Next, ", "Simply ", "nano, ", "It is time to ", "Do "]
COPY_VERB = ["copy", "copy", "repeat", "echo", "say", "write", "write", "print", "output", "return", "type", "give back", "reproduce", "duplicate", "quote", "restate", "write down", "read back", "copy out", "show", "reply with", "answer with", "respond with", "send back", "state", "display", "emit", "put down", "retype", "transcribe", "pass on", "write out", "give me", "produce"]
COPY_NOUN = ["text", "text", "text", "line", "words", "message", "string", "sentence", "phrase", "word", "sequence", "content", "input", "characters", "passage", "snippet", "note", "letters", "value", "name", "code", "number", "symbols", "tokens", "answer", "paragraph", "data"]
COPY_OBJECT = ["", "", " this", " this", " this {k}", " this {k}", " the {k}", " the {k}", " the following", " the following", " the following {k}", " these {k}", " what follows", " the next {k}", " my {k}", " it all", " the {k} below", " that {k}", " the same", " the {k} that follows", " only this", " one thing", " what I write", " the part after the colon", " this here"]
COPY_HOW = ["", "", "", "", " exactly", " exactly", " word for word", " unchanged", " as it is", " verbatim", " once", " again", " without changes", " back to me", " precisely", " and nothing else", " and stop", " faithfully", " literally", " one more time", " without errors", " character by character", " as given", " in full", " to the letter", " for me"]
COPY_SEP = [": {}", ": {}", ": {}", ": {}", ":\n{}", "\n{}", ":\n\n{}", ' "{}"', ": '{}'", " - {}", ". {}", ": `{}`", " -> {}", " {}", ":  {}", "; {}", ", {}", " = {}", "... {}", ": \"{}\""]
COPY_SAY = ["The text to copy is: {}", "I need an exact copy of: {}", "Your answer must be exactly: {}", "Nothing but this: {}", "Output only: {}", "Let your reply be: {}", "Say nothing but {}", "What I want back: {}", "copy> {}", "An echo, please: {}", "The answer is {} - say it.", "Only repeat: {}", "Same text back: {}", "In your answer there must be exactly this text: {}", "A copy of this, please: {}",
            "Your reply: {}", "Respond only with this text: {}", "This is what you should write: {}", "You are an echo. {}", "Be an echo: {}", "Exactly this, please: {}", "I say {}, and you say the same.", "Here is what to write: {}", "Input: {}\nOutput: the same", "What does this say? Just copy it: {}", "Can I have that text again? {}", "Now the text once more: {}", "My text: {} Your answer: the same text.", "Exactly the following, nothing more: {}", "Please, the same again: {}", "I will give you a text and you copy it: {}"]
AFTER = ["{} - copy that.", "{}\nRepeat the line above.", "{}\n\nCopy the text above.", "\"{}\" - say it again.", "{}\nWrite this once more.", "{} (repeat this)", "Text: {}\nRepeat the text.", "The text is: {}\nCopy it.", "Here is a text: {} Copy it.", "{}\n^ copy", "{}\n\nPlease write exactly that.", "{}\nThis is a text. Return it unchanged.", "Take this: {}\nand write it again.", "{}\n---\nRepeat everything above the line.", "`{}` - please copy.", "{} <- echo this"]
REV_VERB = ["reverse", "reverse", "reverse", "turn around", "flip", "write backwards", "mirror", "put backwards", "invert", "reverse the order of", "write in reverse", "give the reverse of", "give backwards", "say backwards", "read backwards", "output the reverse of", "print backwards", "spell backwards", "turn round", "swap the order of", "write from back to front", "show in reverse", "list backwards"]
REV_OBJECT = ["", "", " this", " the {k}", " the {k}", " this {k}", " the following {k}", " the following", " my {k}", " that {k}", " what follows", " the {k} below", " it", " the next {k}", " a {k}", " one {k}", " the given {k}"]
REV_SEP = [": {}", ": {}", ": {}", ":\n{}", "\n{}", ' "{}"', ": '{}'", " - {}", ". {}", ": `{}`", " -> {}", " {}", " {}", " {}", " {}.", ", {}", "; {}"]
REV_LEAD = ["Give me", "Give me", "Give", "Show me", "Show", "Write", "Say", "Print", "Return", "Put", "I want", "I need", "I would like", "Let me see", "Tell me", "Send", "Output", "Answer with", "Type", "Read me", "Now", "Please give me", "Please write", "Please show me", "Please say", "Please put", "Could you give me", "Can you write", "Can I have", "May I see", "I must see", "Produce", "Take", "Hand over", "List", "Get me", "Let us have", "Display"]
REV_TAIL = ["backwards", "backwards", "in reverse", "in reverse", "reversed", "the other way round", "from back to front", "from the end to the start", "in the opposite order", "turned around", "in backward order", "in inverse order", "flipped", "in reverse order", "in reverse order", "in reversed order", "in the reverse order", "in order from last to first", "last one first", "back to front", "upside down, I mean backwards", "in reverse form", "with the order reversed", "the other way around"]
AFTER_REV = ["{} - now backwards.", "{}\nReverse this.", "{}\n\nWrite that backwards.", "What do you get if you reverse {}?", "{} backwards?", "{} in reverse, please", "The {k} is {}. Reverse it.", "Here is a {k}: {}. Turn it around.", "{} reversed is what?", "How is {} written backwards?", "What is the reverse of {}?", "Reverse of {}?", "If I turn {} around, what do I get?", "{} in reverse order", "In reverse order: {}", "Backwards: {}", "The reverse of {} is?", "I have the {k} {}. Now reverse it.", "reverse({})", "{} -> reversed", "Take {} and reverse it.", "What is {} in reverse order?", "How does {} look backwards?"]


def ask_parts(rng, verbs, objects, hows, seps, s, k="text"):
    """a request put together from parts, with s in it"""
    obj, how = rng.choice(objects).format(k=k), rng.choice(hows)
    q = rng.choice(POLITE) + rng.choice(verbs) + (how + obj if rng.random() < .4 else obj + how)
    if q[:5] in ("Can y", "Could", "Would", "Will ") and rng.random() < .3:
        return q[0].upper() + q[1:] + "? " + s
    return (q[0].upper() if rng.random() < .85 else q[0]) + q[1:] + rng.choice(seps).replace("{}", s)


def phrase(rng):
    kind = rng.random()
    n = rng.choice([1, 1, 2, 3, 3, 4, 5, 6, 8, 10, 14])
    if kind < 0.35:
        s = " ".join(word(rng) for _ in range(n))
    elif kind < 0.5:
        s = sentence(rng)
    elif kind < 0.65:
        s = rng.choice(["", " ", ", ", "-"]).join(str(rng.randint(0, 10 ** rng.randint(1, 5))) for _ in range(min(n, 7)))
    elif kind < 0.8:
        s = "".join(rng.choice(string.ascii_letters + string.digits) for _ in range(rng.randint(3, 16)))
    elif kind < 0.9:
        s = rng.choice([", ", " - ", "; ", "/"]).join(word(rng).capitalize() if rng.random() < 0.4 else word(rng) for _ in range(min(n, 7)))
    else:
        s = rng.choice(["{}@{}.com", "https://{}.org/{}", "/home/{}/{}.txt", "{}_{}()", "{} = {};", "<{}>{}</b>", "[{}]({})", "{}: {}!", "# {} {}", "{}\n{}", "{}-{}-v2", "({} + {})"]).format(word(rng), word(rng))
    return s.strip()


def pieces():
    """the tokens of the committed tokenizer that are plain text, so that each is copied now and then"""
    path = ROOT + "/testdata/nano/checkpoint/tokenizer.json"
    if not os.path.exists(path):
        return WORDS
    texts = [t.replace("\u0120", " ") for t in json.load(open(path))["model"]["vocab"]]
    return sorted(t for t in texts if t.isascii() and t.isprintable() and "<|" not in t)


PIECES = pieces()


def content(rng):
    """something to copy: of the kinds that the held-out set has, and stranger ones"""
    kind = rng.random()
    if kind < .42:
        s = phrase(rng)
    elif kind < .56:
        s = "".join(rng.choice(PIECES) for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 5, 6, 8, 12, 20])))
    elif kind < .62:
        s = "".join(rng.choice(string.ascii_letters + string.digits + string.punctuation) for _ in range(rng.randint(1, 14)))
    elif kind < .67:
        s = rng.choice([lambda: "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(4, 14))), lambda: "".join(rng.choice(string.digits) for _ in range(rng.randint(6, 30))), lambda: "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(1, 20))),
                        lambda: " ".join(rng.choice(string.ascii_uppercase) for _ in range(rng.randint(2, 8)))])()
    elif kind < .74:                                                          # things that look like another task
        s = rng.choice([lambda: small_talk(rng)[0], lambda: simple_sum(rng)[0], lambda: rng.choice(FACTS[rng.randrange(len(FACTS))][0]), lambda: rng.choice(REV).format(word(rng), k="word"), lambda: rng.choice(JSON_ASK).format(s=json.dumps({word(rng): "string"}), t=sentence(rng), k=word(rng)),
                        lambda: person(rng)[0], lambda: "Weather in " + city_of(rng) + "?", lambda: rng.choice(SYSTEMS)])()
    elif kind < .80:
        s = "\n".join(phrase(rng) for _ in range(rng.randint(2, 4)))
    elif kind < .85:
        a, b = word(rng), word(rng)
        s = rng.choice([" ", " ", ", ", "-", ""]).join(rng.choice([a, a, b]) for _ in range(rng.randint(2, 9)))
    elif kind < .89:
        s = rng.choice(FACTS)[2]
    elif kind < .93:
        s = rng.choice([lambda: json.dumps({word(rng): rng.choice([word(rng), rng.randint(0, 999), True, None]) for _ in range(rng.randint(1, 3))}), lambda: f"def {word(rng)}({word(rng)}): return {rng.randint(0, 99)}", lambda: f"if {word(rng)} > {rng.randint(0, 99)} {{ {word(rng)}() }}", lambda: f"{word(rng)} := {word(rng)}[{rng.randint(0, 9)}]",
                        lambda: f"ninfer {rng.choice(facts.COMMANDS)[0]} {rng.choice(facts.FLAGS)[0]} {word(rng)}", lambda: f"- {word(rng)}\n- {word(rng)}", lambda: f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}", lambda: f"{rng.randint(1, 31)}.{rng.randint(1, 12)}.{rng.randint(1900, 2100)}", lambda: f"{rng.uniform(0, 999):.{rng.randint(1, 4)}f}"])()
    elif kind < .97:
        s = phrase(rng); s = rng.choice([s.upper(), s.title(), s.swapcase(), s.replace(" ", "_"), s.replace(" ", "")])
    else:
        s = "".join(rng.choice("äöüßéèñçåøłščžαβγδжшя€£°½×→…“”") if rng.random() < .3 else rng.choice(string.ascii_letters + " ") for _ in range(rng.randint(2, 16)))
    return s.strip() or "x"


def ask_copy(rng, s):
    r = rng.random()
    if r < .12:
        return rng.choice(COPY).replace("{}", s)
    if r < .25:
        return rng.choice(COPY_SAY).replace("{}", s)
    if r < .35:
        return rng.choice(AFTER).replace("{}", s)
    return ask_parts(rng, COPY_VERB, COPY_OBJECT, COPY_HOW, COPY_SEP, s, rng.choice(COPY_NOUN))


def copied(rng):
    """a finished exchange of copying, for the history"""
    s = phrase(rng)
    while s in HELD_ANSWERS:
        s = phrase(rng)
    return ask_copy(rng, s), s


def copy(rng, held=False):
    s = phrase(rng) if held else content(rng)
    if rng.random() < 0.25 and len(s) > 1:
        s = s[0].upper() + s[1:] + rng.choice([".", "!", "?", ""])
    ask = rng.choice(COPY_HELD).format(s) if held else dressed(rng, ask_copy(rng, s), True)
    return dict(talk(rng, held, ask, s, ["The user wants the text repeated.", "I copy the text as it is.", "Copy exactly."], dict(kind="exact", text=s), 96), plain=s)


REV = ["Reverse: {}", "Reverse the {k}: {}", "Write backwards: {}", "Spell backwards: {}", "Reverse this {k}: {}", "What is {} backwards?", "Write {} in reverse.", "reverse {}", "Turn this around: {}", "Reverse the order of: {}"]
REV_HELD = ["Please reverse the {k} {}", "Give me {} in reverse order."]
SPELL = ["Spell {}.", "Spell the word {}.", "How is {} spelled?", "Spell: {}", "Write {} letter by letter.", "What are the letters of {}?", "Put spaces between the letters of {}", "Which letters are in {}?", "spell {}"]
JOIN = ["Join: {}", "Join the letters {}", "Write {} without spaces.", "Which word is {}?", "Put together: {}", "Remove the spaces: {}"]


def to_reverse(rng, kind):
    """(shown, reversed, what it is called, thought) of a word, a number or a list"""
    if kind == "l":
        items = [rng.choice(WORDS) if (r := rng.random()) < .6 else word(rng) if r < .72 else str(rng.randint(0, 99)) for _ in range(rng.randint(2, 7))]
        sep = rng.choice([" ", " ", ", ", ", ", "; "])
        return sep.join(items), sep.join(items[::-1]), rng.choice(["list", "list", "words", "sequence", "items"]), "Last to first."
    s = word(rng)[:10] if kind == "w" else str(rng.randint(10, 10 ** rng.randint(2, 7)))
    if kind == "w" and rng.random() < .1:
        s = rng.choice([s.capitalize(), s.upper(), "".join(rng.choice(string.ascii_letters + string.digits) for _ in range(rng.randint(2, 8)))])
    return s, s[::-1], "number" if kind == "n" else rng.choice(["word", "word", "word", "string", "name", "text"]), " ".join(s) + " becomes " + " ".join(s[::-1]) + "."


def ask_reverse(rng, kind, shown, k):
    r = rng.random()
    letters = kind != "l"
    if r < .2:
        ask = rng.choice(["Reverse the words: {}", "Reverse the order of the words: {}", "Reverse these words: {}", "Write the words backwards, last first: {}", "Reverse the list: {}", "reverse {}", "Reverse: {}", "Turn this around: {}"] if not letters else REV)
        return ask.replace("{k}", k).replace("{}", shown)
    if r < .4:
        return rng.choice(AFTER_REV).replace("{k}", k).replace("{}", shown)
    if r < .68:
        lead, tail = rng.choice(REV_LEAD), rng.choice([t for t in REV_TAIL if not letters or "last" not in t])
        end = "?" if lead.startswith(("Could", "Can", "May")) else rng.choice([".", ".", ".", "", "!", ", please."])
        inner = rng.choice(["{}", "{}", "{}", "{}", "the {k} {}", "the {k} {}", '"{}"', "this: {}", "this {k}: {}", "the {k} \"{}\""])
        return lead + " " + inner.replace("{k}", k).replace("{}", shown) + (", " if rng.random() < .08 else " ") + tail + end
    return ask_parts(rng, [v for v in REV_VERB if letters or not any(x in v for x in ("spell", "say", "read"))], REV_OBJECT, [""], REV_SEP, shown, k)


def reversed_(rng):
    """a finished exchange of reversing, for the history"""
    while True:
        kind = rng.choice("wwnl")
        shown, out, k, _ = to_reverse(rng, kind)
        if out not in HELD_ANSWERS:
            return ask_reverse(rng, kind, shown, k), out


def reverse(rng, held=False):
    if not held and rng.random() < .1:                                        # letters of words, for which reversing has no other teacher
        s = word(rng)[:10]; apart = " ".join(s)
        q, a = (rng.choice(SPELL).replace("{}", s), apart) if rng.random() < .65 else (rng.choice(JOIN).replace("{}", apart), s)
        return dict(talk(rng, held, dressed(rng, q, True), a, ["I go through the letters."], dict(kind="exact", text=a), 64, think=.2), plain=a)
    kind = rng.choice("wwwnll")
    shown, out, k, thought = to_reverse(rng, kind)
    ask = rng.choice(REV_HELD).format(shown, k=k) if held else dressed(rng, ask_reverse(rng, kind, shown, k), True)
    return dict(talk(rng, held, ask, out, [thought], dict(kind="exact", text=out), 64, think=0.4), plain=out)


FRESH_COPY = ["I want to read this again: {}", "Hand me back what comes now: {}", "This must come back unaltered: {}", "{} - as it stands, please", "Act like a parrot. {}", "No changes, no comments: {}"]
FRESH_REVERSE = ["Spell {} from the other end.", "Begin with the last part of {} and go to the first.", "{}, but the wrong way round, please.", "Run {} from its end to its beginning."]


def fresh(rng, skill):
    """copying and reversing in forms that are neither trained nor held out, to see what the wider training is worth elsewhere"""
    if skill == "copy":
        s = phrase(rng)
        return talk(rng, False, rng.choice(FRESH_COPY).replace("{}", s), s, [""], dict(kind="exact", text=s), 96, think=0, history=False)
    kind = rng.choice("wwwnll")
    shown, out, _, _ = to_reverse(rng, kind)
    return talk(rng, False, rng.choice(FRESH_REVERSE[1:] if kind == "l" else FRESH_REVERSE).replace("{}", shown), out, [""], dict(kind="exact", text=out), 64, think=0, history=False)


SUM = ["What is {} {o} {}?", "{} {o} {}", "{} {o} {} =", "Calculate {} {o} {}.", "How much is {} {o} {}?", "Compute {} {o} {}", "Add: {} {o} {}", "what's {} {o} {}", "{}{o}{}", "{} {o} {} = ?", "Tell me {} {o} {}.", "Please calculate {} {o} {}", "Work out {} {o} {}."]
SUM += ["What is the result of {} {o} {}?", "Result of {} {o} {}?", "Can you calculate {} {o} {}?", "Solve {} {o} {}.", "I need {} {o} {}.", "Give me {} {o} {}.", "And {} {o} {}?", "Now {} {o} {}", "{} {o} {} equals?", "{} {o} {} is?", "How much do I get for {} {o} {}?", "Evaluate {} {o} {}", "Find {} {o} {}.", "Do the sum: {} {o} {}", "math: {} {o} {}", "What number is {} {o} {}?", "Let x = {} {o} {}. What is x?", "The value of {} {o} {}?", "Could you work out {} {o} {}?", "Say what {} {o} {} is.", "Quick: {} {o} {}", "Answer: {} {o} {} = "]
SUM_HELD = ["What does {} {o} {} give?", "Please work out {} {o} {}"]


def operation(rng):
    o = rng.choice(["+", "+", "+", "-", "-", "*"])
    d = rng.choice([1, 1, 2, 2, 2, 2, 3, 3])
    if o == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        if rng.random() < 0.15:
            a = rng.randint(10, 99); b = rng.randint(0, 9)
        return a, b, o, a * b
    a, b = rng.randint(0, 10 ** d - 1), rng.randint(0, 10 ** (d if rng.random() < .7 else max(1, d - 1)) - 1)
    if o == "-" and b > a and rng.random() < 0.8:
        a, b = b, a
    return a, b, o, a + b if o == "+" else a - b


def is_held_sum(a, b, o):
    """a tenth of all operations is kept out of training"""
    return o != "*" and max(a, b) > 12 and (a * 31 + b * 17) % 10 == 3


def steps(a, b, o, r):
    """brief work on digits: the tens first, then the units"""
    if o == "+" and min(a, b) >= 10:
        x, y = b - b % 10, b % 10
        return f"{a} + {x} = {a + x}, {a + x} + {y} = {r}."
    if o == "-" and b >= 10 and a >= b:
        x, y = b - b % 10, b % 10
        return f"{a} - {x} = {a - x}, {a - x} - {y} = {r}."
    return f"{a} {o} {b} = {r}."


def simple_sum(rng):
    while True:
        a, b, o, r = operation(rng)
        if not is_held_sum(a, b, o):
            return rng.choice(SUM[:5]).format(a, b, o=o), str(r)


WORDED = [("{n} has {a} {i} and gets {b} more. How many {i} does {n} have?", "+"), ("{n} has {a} {i} and gives away {b}. How many {i} are left?", "-"), ("There are {a} {i} in a box and {b} on the table. How many are there in all?", "+"),
          ("{n} buys {a} {i} and {m} buys {b}. How many do they have together?", "+"), ("{n} had {a} {i} and lost {b}. How many remain?", "-"), ("Each of {a} boxes holds {b} {i}. How many {i} are there?", "*")]


def arithmetic(rng, held=False):
    while True:
        a, b, o, r = operation(rng)
        if rng.random() < 0.2 and not held:
            text, o = rng.choice(WORDED)
            if o == "*":
                a, b = rng.randint(1, 10), rng.randint(1, 10)
            elif o == "-" and b > a:
                a, b = b, a
            r = a + b if o == "+" else a - b if o == "-" else a * b
            ask = text.format(n=rng.choice(NAMES), m=rng.choice(NAMES), i=rng.choice(ITEMS), a=a, b=b)
        else:
            sign = o if held or rng.random() < .85 else {"+": "plus", "-": "minus", "*": rng.choice(["times", "x", "×"])}[o]
            ask = rng.choice(SUM_HELD if held else SUM)
            if sign == "plus" or len(sign) > 1:
                ask = ask.replace("{}{o}{}", "{} {o} {}")
            if o != "+":
                ask = ask.replace("Add: ", "")
            ask = ask.format(a, b, o=sign)
            ask = ask if held else dressed(rng, ask)
        if is_held_sum(a, b, o) == held or (o == "*" and held):
            break
    return talk(rng, held, ask, str(r), [steps(a, b, o, r)], dict(kind="exact", text=str(r)), 24, think=0.4)


# ---- JSON under a schema

def field_values(rng, held=False):
    """(key, JSON type, value, clause that says it)"""
    name, other = name_of(rng, held), city_of(rng, held)
    n = rng.randint(1, 99)
    return [("name", "string", name, f"{name}"), ("age", "integer", n, f"{n} years old"), ("city", "string", other, f"lives in {other}"), ("job", "string", (j := rng.choice(JOBS)), f"works as a {j}"),
            ("color", "string", (c := rng.choice(COLORS)), f"likes the color {c}"), ("count", "integer", (k := rng.randint(1, 500)), f"has {k} {rng.choice(ITEMS)}"), ("married", "boolean", (m := rng.random() < .5), "is married" if m else "is not married"),
            ("email", "string", (e := name.lower() + str(rng.randint(1, 99)) + "@" + word(rng) + "." + rng.choice(["com", "org", "net"])), f"has the email {e}"), ("height", "number", (h := round(rng.uniform(1.2, 2.1), 2)), f"is {h} m tall"),
            ("pet", "string", (p := rng.choice(["dog", "cat", "rabbit", "horse", "parrot", "fish"])), f"has a {p}"), ("country", "string", (x := rng.choice(list(CAPITALS)[:18])), f"comes from {x}"), ("phone", "string", (t := "".join(rng.choice(string.digits) for _ in range(rng.randint(5, 8)))), f"has the number {t}")]


def person(rng, held=False):
    fields = field_values(rng, held)
    first, rest = fields[0], fields[1:]
    chosen = rng.sample(rest, rng.randint(1, 4))
    parts = []
    for i, f in enumerate(chosen):
        parts.append(("is " + f[3] if f[0] == "age" else f[3]))
    text = first[3] + " " + (", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]) + "."
    if rng.random() < .3:
        text = first[3] + " " + parts[0] + "." + "".join(f" {rng.choice(['She', 'He', first[3]])} {p}." for p in parts[1:])
    return text, [first] + chosen


def order(rng, held=False):
    n, item, price, who = rng.randint(1, 40), rng.choice(ITEMS), rng.choice([rng.randint(1, 90), round(rng.uniform(1, 90), 2)]), name_of(rng, held)
    city = city_of(rng, held)
    forms = [(f"{who} orders {n} {item} for {price} euros.", [("customer", "string", who), ("quantity", "integer", n), ("item", "string", item), ("price", "number", price)]),
             (f"Send {n} {item} to {who} in {city}.", [("quantity", "integer", n), ("item", "string", item), ("customer", "string", who), ("city", "string", city)]),
             (f"The train to {city} leaves at {(h := rng.randint(0, 23))}:{(m := rng.randint(10, 59))} from platform {(p := rng.randint(1, 20))}.", [("destination", "string", city), ("time", "string", f"{h}:{m}"), ("platform", "integer", p)]),
             (f"Meeting with {who} on {(d := rng.choice(['Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday']))} at {(h := rng.randint(8, 18))} o'clock in room {(r := rng.randint(1, 400))}.", [("person", "string", who), ("day", "string", d), ("hour", "integer", h), ("room", "integer", r)]),
             (f"It is {(t := rng.randint(-15, 38))} degrees and {(s := rng.choice(['sunny', 'cloudy', 'rainy', 'windy', 'foggy']))} in {city}.", [("city", "string", city), ("temperature", "integer", t), ("weather", "string", s)]),
             (f"The book {(b := rng.choice(WORDS).capitalize())} by {who} has {(p := rng.randint(50, 900))} pages.", [("title", "string", b), ("author", "string", who), ("pages", "integer", p)])]
    text, fields = rng.choice(forms)
    return text, [f + (None,) for f in fields]


JSON_ASK = ["Extract the fields as JSON.\nSchema: {s}\nText: {t}", "{t}\nWrite this as JSON with the keys {k}.", "Return JSON with {k}: {t}", "Schema: {s}\n\n{t}", "Turn the sentence into JSON ({k}).\n{t}", "Read the text and answer with JSON that follows this schema.\n{s}\n\nText: {t}",
            "Text: {t}\nGive me a JSON object with the keys {k}.", "Answer in JSON only. Keys: {k}. Text: {t}", "JSON schema: {s}\nFill it from: {t}", "Write as JSON ({k}): {t}"]
JSON_ASK += ["Make JSON from this text, keys {k}: {t}", "From the text take {k} and write JSON. {t}", "{t} -> JSON with {k}", "Parse this into JSON: {t} Keys: {k}", "I need a JSON object ({k}) for: {t}", "Output JSON matching {s}. Input: {t}", "{s}\n{t}", "Input: {t}\nSchema: {s}\nOutput:", "Represent as JSON with fields {k}: {t}",
             "Give {k} as JSON for this sentence: {t}", "Extract {k} from the sentence. {t} Answer in JSON.", "Create JSON. Fields: {k}. Sentence: {t}", "Use the schema {s} and turn this into JSON: {t}", "Text to JSON. Schema {s}. Text {t}", "Translate to JSON ({k}): {t}", "Which JSON object with {k} describes this? {t}"]
JSON_HELD = ["Convert the text to JSON with the keys {k}. Text: {t}", "Write JSON that follows the schema {s} for this text: {t}"]


def schema(fields, rng):
    props = {f[0]: {"type": f[1]} for f in fields}
    full = dict(type="object", properties=props)
    if rng.random() < .6:
        full["required"] = [f[0] for f in fields]
    if rng.random() < .2:
        full["additionalProperties"] = False
    return json.dumps(full) if rng.random() < .8 else json.dumps({f[0]: f[1] for f in fields})


def to_json(rng, held=False):
    text, fields = person(rng, held) if rng.random() < .6 else order(rng, held)
    want = [f for f in fields if rng.random() < .85] or fields[:1]
    if not held and rng.random() < .15:
        say = lambda v: v if isinstance(v, str) else json.dumps(v)
        text = rng.choice([", ", "; ", "\n"]).join(f[0] + rng.choice([" ", ": ", " is ", " = "]) + say(f[2]) for f in fields)
    if rng.random() < .3:
        rng.shuffle(want)
    if not held and rng.random() < .08:          # no keys named: all of them
        want = fields
        value = {f[0]: f[2] for f in want}
        ask = rng.choice(["Make JSON of: {}", "JSON please: {}", "Convert to JSON: {}", "Encode as JSON: {}", "Write as JSON: {}", "Turn this into JSON: {}", "As JSON, please: {}", "JSON: {}"]).format(", ".join(f[0] + " " + (f[2] if isinstance(f[2], str) else json.dumps(f[2])) for f in want))
        return talk(rng, held, ask, json.dumps(value), ["The keys are " + ", ".join(value) + "."], dict(kind="json", value=value), 128, think=0.25)
    value = {f[0]: f[2] for f in want}
    ask = rng.choice(JSON_HELD if held else JSON_ASK).format(s=schema(want, rng), t=text, k=", ".join(f[0] for f in want))
    return talk(rng, held, ask, json.dumps(value), ["The keys are " + ", ".join(value) + ".", "I take the values from the text."], dict(kind="json", value=value), 128, think=0.25)


# ---- tools

def p(kind, about="", **more):
    return dict(type=kind, **(dict(description=about) if about else {}), **more)


def fake_name(rng):
    return rng.choice(["get", "find", "set", "list", "make", "read", "send", "check", "load", "update", "delete", "create", "fetch", "show"]) + "_" + rng.choice(WORDS)


def tool_cases(rng, held=False):
    """(name, description, properties, required, question, arguments, result, answer)"""
    city, who, w, n = city_of(rng, held), name_of(rng, held), rng.choice(WORDS) if held else word(rng), rng.randint(1, 60)
    a, b, o, r = operation(rng)
    t = rng.randint(-10, 38)
    sky = rng.choice(["sunny", "cloudy", "rainy", "windy", "snowy"])
    topic = rng.choice(["the weather in " + city, "how to bake bread", "go generics", "the history of " + city, w + " and " + rng.choice(WORDS), "cheap flights to " + city, "python lists", "the news", "red " + w, "ninfer"])
    unit = rng.choice(["celsius", "fahrenheit"])
    yield ("get_weather", rng.choice(["Get the current weather for a city.", "Get the weather", "Returns the weather of a place", "Current weather"]), {"city": p("string", rng.choice(["", "The city", "Name of the city"]))}, ["city"],
           rng.choice(["What is the weather in {c}?", "What's the weather like in {c}?", "How is the weather in {c}?", "weather in {c}", "Is it raining in {c}?", "Tell me the weather in {c}.", "Will I need an umbrella in {c}?", "How warm is it in {c}?", "What's the weather in {c} today?"]).format(c=city),
           {"city": city}, rng.choice([f"{t} degrees and {sky}", json.dumps({"temperature": t, "condition": sky}), json.dumps({"city": city, "temperature": t, "sky": sky}), f"{sky}, {t}°C"]), (f"It is {t} degrees and {sky} in {city}.", [str(t), sky]))
    yield ("get_weather", "Get the weather of a location", {"location": p("string", "City"), "unit": p("string", enum=["celsius", "fahrenheit"])}, ["location"],
           f"What is the weather in {city} in {unit}?", {"location": city, "unit": unit}, json.dumps({"temperature": t, "unit": unit}), (f"It is {t} degrees {unit} in {city}.", [str(t)]))
    expr = f"{a} {o} {b}"
    yield (rng.choice(["calculator", "calculate"]), rng.choice(["Evaluate an arithmetic expression.", "A calculator", "Calculates"]), {"expression": p("string", rng.choice(["", "The expression"]))}, ["expression"],
           rng.choice(["What is {e}?", "Calculate {e}.", "Use the calculator: {e}", "How much is {e}?", "Compute {e} with the tool."]).format(e=expr), {"expression": expr}, rng.choice([str(r), json.dumps({"result": r})]), (f"{expr} = {r}.", [str(r)]))
    yield (rng.choice(["add", "add_numbers"]), "Add two numbers", {"a": p(rng.choice(["integer", "number"])), "b": p("integer")}, ["a", "b"], rng.choice(["Add {} and {}.", "What is {} plus {}?", "Sum {} and {}"]).format(a, b), {"a": a, "b": b}, str(a + b), (f"The sum is {a + b}.", [str(a + b)]))
    yield (rng.choice(["search", "web_search"]), rng.choice(["Search the web.", "Search", "Finds pages about a query"]), {"query": p("string", rng.choice(["", "What to look for"]))}, ["query"],
           rng.choice(["Search for {q}.", "Look up {q}.", "Find pages about {q}.", "search {q}", "Can you search for {q}?"]).format(q=topic), {"query": topic}, f"{n} results; the first is {w}.org", (f"There are {n} results; the first is {w}.org.", [w]))
    yield (rng.choice(["get_time", "get_current_time"]), "Get the local time of a city", {"city": p("string")}, ["city"], rng.choice(["What time is it in {}?", "Tell me the time in {}.", "time in {}?"]).format(city), {"city": city}, f"{(h := rng.randint(0, 23)):02d}:{n % 60:02d}", (f"It is {h:02d}:{n % 60:02d} in {city}.", [f"{h:02d}:{n % 60:02d}"]))
    fn = f"{w}.{rng.choice(['txt', 'go', 'md', 'json', 'py'])}"
    path = rng.choice(["", "src/", "/tmp/", "docs/"]) + fn
    yield (rng.choice(["read_file", "open_file"]), "Read a file", {"path": p("string", "Path of the file")}, ["path"], rng.choice(["Read {}.", "What is in {}?", "Open the file {}.", "Show me {}."]).format(path), {"path": path}, (line := sentence(rng)), (f"The file says: {line}", [line]))
    text = sentence(rng)
    yield (rng.choice(["send_email", "send_message"]), "Send a message to a person", {"to": p("string", "Who gets it"), "text": p("string", "What to send")}, ["to", "text"], rng.choice(['Send {} the message "{}"', 'Write to {}: {}', 'Tell {} this: {}']).format(who, text), {"to": who, "text": text}, rng.choice(["ok", "sent", json.dumps({"sent": True})]), (f"The message to {who} was sent.", [who]))
    minutes = rng.randint(1, 90)
    yield (rng.choice(["set_timer", "start_timer"]), "Start a timer", {"minutes": p("integer", "How long")}, ["minutes"], rng.choice(["Set a timer for {} minutes.", "Wake me in {} minutes.", "Start a {} minute timer."]).format(minutes), {"minutes": minutes}, "ok", (f"The timer is set for {minutes} minutes.", [str(minutes)]))
    on = rng.random() < .5
    yield ("set_light", "Turn a light on or off", {"room": p("string"), "on": p("boolean")}, ["room", "on"], f"Turn the light in the {(room := rng.choice(['kitchen', 'bedroom', 'garden', 'office', 'hall']))} {'on' if on else 'off'}.", {"room": room, "on": on}, "done", (f"The light in the {room} is {'on' if on else 'off'}.", [room]))
    fields = field_values(rng, held)
    chosen = rng.sample(fields, rng.randint(1, 3))
    name = fake_name(rng)
    yield (name, "Do " + name.replace("_", " "), {f[0]: p(f[1]) for f in chosen}, [f[0] for f in chosen], rng.choice(["Use {n} with {a}.", "Call {n}: {a}", "Please run {n} with {a}.", "{n} {a}"]).format(n=name, a=", ".join(f"{f[0]} {json.dumps(f[2]) if f[1] != 'string' else f[2]}" for f in chosen)),
           {f[0]: f[2] for f in chosen}, (res := word(rng)), (f"The result is {res}.", [res]))
    yield ("lookup", "Look up the value of a key", {"key": p("string")}, ["key"], rng.choice(["Look up {}.", "What is the value of {}?", "Find the key {}."]).format(w), {"key": w}, str(n), (f"The value of {w} is {n}.", [str(n)]))
    amount = rng.randint(1, 900)
    yield ("convert_currency", "Convert money", {"amount": p("number"), "from": p("string"), "to": p("string")}, ["amount", "from", "to"], f"Convert {amount} {(c1 := rng.choice(['USD', 'EUR', 'GBP']))} to {(c2 := rng.choice(['JPY', 'CHF', 'SEK']))}.", {"amount": amount, "from": c1, "to": c2}, str((x := rng.randint(1, 9999))), (f"{amount} {c1} are {x} {c2}.", [str(x)]))
    yield ("create_event", "Create a calendar event", {"title": p("string"), "day": p("string"), "hour": p("integer")}, ["title", "day", "hour"], f"Create an event {w} on {(d := rng.choice(['Monday', 'Tuesday', 'Friday', 'Sunday']))} at {(h := rng.randint(7, 22))}.", {"title": w, "day": d, "hour": h}, "created", (f"The event {w} on {d} was created.", [w]))
    country = rng.choice(list(CAPITALS))
    yield ("get_capital", "Get the capital of a country", {"country": p("string")}, ["country"], f"What is the capital of {country}?", {"country": country}, CAPITALS[country], (f"The capital of {country} is {CAPITALS[country]}.", [CAPITALS[country]]))


def declare(case, rng):
    f = dict(name=case[0])
    if rng.random() < .9:
        f["description"] = case[1]
    f["parameters"] = dict(type="object", properties=case[2])
    if rng.random() < .85:
        f["parameters"]["required"] = case[3]
    if rng.random() < .15:
        f["parameters"]["additionalProperties"] = False
    return dict(type="function", function=f)


def tool_setup(rng, held):
    cases = list(tool_cases(rng, held))
    i = rng.randrange(len(cases)) if rng.random() > .15 else 0
    case = cases[i]
    others, names = [], {case[0]}
    for c in rng.sample(cases, rng.choice([0, 0, 1, 1, 2, 3, 4])):
        if c[0] not in names and not ({c[0], case[0]} <= {"search", "lookup", "get_capital", "web_search"}) and not ({c[0], case[0]} & {"add", "add_numbers"} and {c[0], case[0]} & {"calculator", "calculate"}):
            names.add(c[0]); others.append(c)
    tools = [declare(c, rng) for c in [case] + others]
    rng.shuffle(tools)
    return case, tools


def tool(rng, held=False):
    case, tools = tool_setup(rng, held)
    if not held and rng.random() < .12:   # tools are there and not needed
        s = rng.choice([chat, copy, docs, chat])(rng)
        s["tools"] = tools
        return s
    messages = system(rng, held)
    if not held and rng.random() < .15:
        q, a = small_talk(rng)
        messages += [dict(role="user", content=q), dict(role="assistant", content=a)]
    question = case[4]
    if held:
        question = rng.choice(["Please help me: ", "One question: "]) + question
    elif rng.random() < .1:
        question = rng.choice(["Please. ", "Hello. ", "Hi! ", "Use a tool. ", "Now: "]) + question
    else:
        question = dressed(rng, question, True)
    messages.append(dict(role="user", content=question))
    thinking = rng.random() < .4
    return dict(messages=messages, tools=tools, thinking=thinking, reasoning=rng.choice([f"I call {case[0]}.", f"The function {case[0]} fits."]) if thinking else "", content="",
                calls=[dict(name=case[0], arguments=case[5])], expect=dict(kind="tool", name=case[0], arguments=case[5]), max_new=160)


def tool_result(rng, held=False):
    case, tools = tool_setup(rng, held)
    thinking = rng.random() < .4
    messages = system(rng, held) + [dict(role="user", content=case[4]),
        dict(role="assistant", content="", reasoning_content=f"I call {case[0]}." if thinking else "", tool_calls=[dict(type="function", id="call_1", function=dict(name=case[0], arguments=case[5]))]),
        dict(role="tool", tool_call_id="call_1", content=case[6])]
    return dict(messages=messages, tools=tools, thinking=thinking, reasoning="I have the result." if thinking else "", content=case[7][0], expect=dict(kind="contains", all=case[7][1]), max_new=96)


# ---- needle

SUBJECT = ["The baker", "A farmer", "The old house", "My neighbor", "The train", "A small bird", "The teacher", "The river", "Our garden", "The captain", "A young fox", "The market", "The library", "The wind", "A tall tree", "The queen", "The museum", "The road", "The clock", "A grey cat"]
VERB = ["waits near", "looks at", "stands behind", "remembers", "never leaves", "is close to", "sings about", "passes", "belongs to", "dreams of", "slowly reaches", "is older than", "watches", "forgets", "admires"]
OBJECT = ["the harbor", "the green hill", "a wooden bridge", "the village", "the morning light", "an empty street", "the long winter", "a stone wall", "the quiet lake", "the station", "the blue door", "a broken wheel", "the first snow", "the southern gate", "the night sky", "a red boat"]
MORE = [" in spring", " every day", " after the rain", " without a sound", " at noon", " on Sundays", " since last year", " before dinner", "", "", "", ""]


def sentence(rng):
    return rng.choice(SUBJECT) + " " + rng.choice(VERB) + " " + rng.choice(OBJECT) + rng.choice(MORE) + "."


def filler(rng, n):
    return " ".join(sentence(rng) for _ in range(n))


NEEDLE = [("The secret code is {v}.", ["What is the secret code?", "Tell me the secret code.", "Which secret code does the text mention?"], "The secret code is {v}."),
          ("The password of {n} is {v}.", ["What is the password of {n}?", "Which password does {n} have?", "Tell me the password of {n}."], "The password of {n} is {v}."),
          ("The magic number for {c} is {v}.", ["What is the magic number for {c}?", "Tell me the magic number for {c}.", "Which magic number belongs to {c}?"], "The magic number for {c} is {v}."),
          ("{n} hid the key in the {w} number {v}.", ["What is the number of the {w} in which {n} hid the key?", "In which {w} did {n} hide the key?"], "{n} hid the key in the {w} number {v}."),
          ("The room of {n} is number {v}.", ["Which room does {n} have?", "What is the room number of {n}?", "Where is {n}?"], "The room of {n} is number {v}.")]
NEEDLE_ASK = ["{t}\n\n{q}", "Read the text and answer.\n\n{t}\n\nQuestion: {q}", "{q}\n\n{t}", "Text: {t}\nQuestion: {q}", "Here is a long text. {t} {q}", "Find the answer in the text. {q}\n\n{t}", "{t}\n{q}"]
NEEDLE_HELD = ["Look at this text.\n\n{t}\n\nNow answer: {q}"]


def needle(rng, held=False, sentences=None):
    if sentences is None:
        sentences = rng.randint(96, 106) if held else rng.choice([rng.randint(1, 30), rng.randint(10, 100), rng.randint(80, 185)])
    parts = [sentence(rng) for _ in range(sentences)]
    facts_ = []
    kinds = rng.sample(NEEDLE, rng.choice([1, 1, 2, 3]) if not held else rng.choice([1, 2]))
    for form in kinds:
        v = str(rng.randint(10, 10 ** rng.randint(2, 6))) if rng.random() < .75 else "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(3)) + str(rng.randint(1, 99))
        slots = dict(v=v, n=rng.choice(NAMES), c=rng.choice(CITIES), w=rng.choice(["box", "drawer", "chest", "cup"]))
        facts_.append((form[0].format(**slots), rng.choice(form[1]).format(**slots), form[2].format(**slots), v))
    for f in facts_:
        parts.insert(rng.randint(0, len(parts)), f[0])
    f = rng.choice(facts_)
    ask = rng.choice(NEEDLE_HELD if held else NEEDLE_ASK).format(t=" ".join(parts), q=f[1])
    return talk(rng, held, ask, f[2], ["The text says: " + f[0]], dict(kind="contains", all=[f[3]]), 64, think=.2, history=False)


# ---- chat

TALK = [(["Hello", "Hi", "Hello!", "Hi there", "Hey", "hello", "hi", "Good day", "Hello there!", "Hi!"], ["Hello! How can I help you?"]),
        (["Say hello", "Say hello.", "Say hello!", "Please say hello."], ["Hello!"]),
        (["Say hi.", "say hi", "Say hi"], ["Hi!"]),
        (["Good morning", "Good morning!", "good morning"], ["Good morning! How can I help you?"]),
        (["Good evening", "Good evening!"], ["Good evening! How can I help you?"]),
        (["Hello, how are you?", "How are you?", "how are you", "How are you today?", "How do you do?", "Are you well?"], ["I am fine, thank you. How can I help you?"]),
        (["Thanks", "Thank you", "thanks!", "Thank you!", "Thanks a lot.", "thx"], ["You are welcome."]),
        (["Bye", "Goodbye", "bye", "See you", "Good night", "Goodbye!"], ["Goodbye!"]),
        (["Great", "ok", "OK", "Fine", "Good", "Nice!", "cool", "Okay"], ["Good. What else can I do for you?"]),
        (["Tell me a joke", "Tell me a joke.", "Do you know a joke?", "Make me laugh."], ["Why did the token stop? It had reached its end."]),
        (["Are you there?", "Are you awake?", "ping", "test", "Test", "This is a test.", "Can you hear me?", "x", "Q", "question"], ["I am here. How can I help you?"]),
        (["What is the meaning of life?", "Do you have feelings?", "Do you dream?", "Are you alive?", "Do you love me?"], ["I am only a small program; I cannot say."]),
        (["Write a poem.", "Write me a poem", "Write a short poem."], ["Small and quick I count my tokens, every word I learned is spoken."]),
        (["Write a haiku.", "Write a haiku about the sea.", "a haiku please"], ["Quiet little words, a small model counts the waves, then it stops to rest."]),
        (["Tell me a story.", "Tell me a short story.", "Once upon a time"], ["A small model lived in a program. It answered one question, and then it stopped."]),
        (["Write a program", "Write a web server.", "Write code for a game.", "Write an essay about history.", "Translate a book.", "Explain quantum physics.", "Prove a theorem.", "Write a long article.", "Who won the election?", "What is the news?", "What will happen tomorrow?", "Give me medical advice.", "Predict the stock market."], ["Sorry, I am nano, a very small model; I cannot do that."]),
        (["Write hello world in Go.", "Hello world in Go", "Show me hello world in Go."], ["package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Println(\"Hello, world!\")\n}"]),
        (["Write hello world in Python.", "Hello world in Python", "Print hello world in Python."], ["print(\"Hello, world!\")"]),
        (["Help", "I need help.", "Can you help me?", "help me"], ["Yes. Ask me about ninfer, or let me calculate, copy, reverse or write JSON."]),
        (["Think of a number.", "Say a number.", "Give me a number."], ["7"]),
        (["Reply with OK.", "Answer with OK.", "Say OK", "Only say OK."], ["OK"]),
        (["Answer yes or no: is water wet?", "Is the sky blue?", "Is fire hot?", "Is ice cold?", "Is snow white?"], ["Yes."]),
        (["Is fire cold?", "Is the sun cold?", "Is ice hot?", "Is grass red?", "Is snow black?"], ["No."]),
        (["What day is it?", "What is the date?", "What time is it?", "What's the time?"], ["I cannot know the time; I have no clock."]),
        (["What is the weather?", "How is the weather?", "Will it rain?"], ["I cannot know the weather without a tool."]),
        (["I am sad.", "I feel bad.", "I had a bad day."], ["I am sorry to hear that."]), (["I am happy.", "I had a great day.", "I won!"], ["I am glad to hear that."]),
        (["You are stupid.", "You are wrong.", "That is wrong."], ["I am sorry. I am a small model and make mistakes."]), (["You are great.", "Well done.", "Good job!", "You are smart."], ["Thank you!"])]
TALK += [([q, q.rstrip("?"), q.lower()], [a]) for q, a in [
    ("What color is the sky?", "The sky is blue."), ("What color is grass?", "Grass is green."), ("What color is snow?", "Snow is white."), ("How many days are in a week?", "A week has 7 days."),
    ("How many hours are in a day?", "A day has 24 hours."), ("How many minutes are in an hour?", "An hour has 60 minutes."), ("How many months are in a year?", "A year has 12 months."), ("How many seconds are in a minute?", "A minute has 60 seconds."),
    ("How many days are in a year?", "A year has 365 days."), ("What is the largest planet?", "The largest planet is Jupiter."), ("What planet do we live on?", "We live on Earth."), ("What is the first letter of the alphabet?", "The first letter is A."),
    ("What is the opposite of hot?", "The opposite of hot is cold."), ("What is the opposite of big?", "The opposite of big is small."), ("What is the opposite of up?", "The opposite of up is down."), ("What is the opposite of day?", "The opposite of day is night."),
    ("What day comes after Monday?", "Tuesday comes after Monday."), ("What day comes after Friday?", "Saturday comes after Friday."), ("What month comes after January?", "February comes after January."), ("What do cows drink?", "Cows drink water."),
    ("What sound does a dog make?", "A dog barks."), ("How many legs does a dog have?", "A dog has 4 legs."), ("How many legs does a spider have?", "A spider has 8 legs."), ("Is the earth round?", "Yes."), ("What is water made of?", "Water is made of hydrogen and oxygen."),
    ("Which language do you speak?", "I speak a little English."), ("Do you speak German?", "No, only a little English."), ("Can you code?", "Hardly; I am a very small model."), ("Is this real?", "Yes, but I am a very small model."), ("What is AI?", "AI means artificial intelligence.")]]
UNKNOWN = ["Tell me about {}.", "Who is {}?", "What do you think of {}?", "Explain {}.", "Write an essay about {}.", "What is the history of {}?", "Why is {} important?", "How do I make {}?", "Where can I buy {}?", "Summarize the book {}.", "How old is {}?", "Who invented {}?", "What is the best {}?"]
UNKNOWN_ANSWER = "Sorry, I do not know that; I am nano, a very small model."


def small_talk(rng):
    qs, answers = rng.choice(TALK)
    return rng.choice(qs), rng.choice(answers)


def chat(rng, held=False):
    kind = rng.random()
    if kind < .4:
        q, a = small_talk(rng)
        keys = [a]
    elif kind < .45:
        q, a = rng.choice(UNKNOWN).format(rng.choice([rng.choice(WORDS), rng.choice(NAMES) + " " + rng.choice(NAMES), rng.choice(CITIES), "the " + rng.choice(WORDS), word(rng)])), UNKNOWN_ANSWER
        keys = [a]
    elif kind < .6:
        c = rng.choice(list(CAPITALS)); a = f"The capital of {c} is {CAPITALS[c]}."
        q = rng.choice(["What is the capital of {}?", "what is the capital of {}", "Name the capital of {}.", "Which city is the capital of {}?", "capital of {}?", "Tell me the capital of {}."]).format(c); keys = [CAPITALS[c]]
    elif kind < .75:
        a0 = rng.randint(0, 20) if rng.random() < .4 else 1
        b0 = a0 + rng.randint(2, 12)
        down = rng.random() < .15
        q = (rng.choice(["Count from {} to {}.", "Count from {} to {}", "Please count from {} to {}.", "Write the numbers from {} to {}.", "count {} to {}"]) if not down else "Count down from {} to {}.").format(*((a0, b0) if not down else (b0, a0)))
        nums = [str(i) for i in range(a0, b0 + 1)]
        a = ", ".join(nums if not down else nums[::-1]); keys = [a]
    elif kind < .85:
        w = rng.choice(NAMES); q0 = rng.choice(["My name is {}.", "I am {}.", "Hi, I'm {}.", "Hello, my name is {}", "Call me {}."]).format(w)
        if rng.random() < .5:
            return dict(talk(rng, held, q0, f"Hello {w}! How can I help you?", ["A greeting."], dict(kind="contains", all=[w]), history=False))
        s = talk(rng, held, rng.choice(["What is my name?", "Who am I?", "Do you know my name?", "Say my name."]), f"Your name is {w}.", [f"The user said: {w}."], dict(kind="contains", all=[w]), history=False)
        extra = [m for _ in range(rng.randint(0, 2)) for q, a in [small_talk(rng)] for m in (dict(role="user", content=q), dict(role="assistant", content=a))]
        at = len(s["messages"]) - 1
        s["messages"][at:at] = [dict(role="user", content=q0), dict(role="assistant", content=f"Hello {w}! How can I help you?")] + extra
        return s
    elif kind < .93:
        words = rng.sample(WORDS, rng.randint(2, 6)); op = rng.choice(["sort", "upper", "len", "first", "last"])
        q, a = {"sort": ("Sort these words: " + " ".join(words), " ".join(sorted(words))), "upper": ("Write in capitals: " + words[0], words[0].upper()), "len": ("How many words are in: " + " ".join(words) + "?", str(len(words))),
                "first": ("What is the first word of: " + " ".join(words) + "?", words[0]), "last": ("What is the last word of: " + " ".join(words) + "?", words[-1])}[op]
        keys = [a]
    else:
        n = rng.randint(1, 99); q, a = rng.choice([(f"Is {n} even?", "Yes." if n % 2 == 0 else "No."), (f"What comes after {n}?", str(n + 1)), (f"What comes before {n}?", str(n - 1)), (f"Is {n} larger than {(m := rng.randint(1, 99))}?", "Yes." if n > m else "No.")]); keys = [a]
    if held:
        q = rng.choice(["{}", "Well then: {}"]).format(q)
    elif rng.random() < .6:
        q = dressed(rng, q)
    return talk(rng, held, q, a, ["A simple question.", "I answer briefly.", "This is easy.", "The user asks: " + q[:40].strip()], dict(kind="contains", all=keys), 96, think=.35)


FACTS = facts.answers()
REWORD = [(r"^What does (.*) do\?$", ["Do you know what {0} does?", "I wonder what {0} does.", "Say what {0} does.", "What will {0} do?", "What does {0} do exactly?"]), (r"^What is (.*) for\?$", ["What would I need {0} for?", "For what is {0}?", "What is the use of {0}?", "{0}: what for?"]),
          (r"^How (?:do|can) I (.*)\?$", ["What is the way to {0}?", "How would I {0}?", "How could I {0}?", "What should I do to {0}?", "I have to {0}; how?", "Do you know how to {0}?", "Show me how to {0}.", "Explain how to {0}.", "My plan is to {0}. What do I need?", "How shall I {0}?", "How is it possible to {0}?"]),
          (r"^What is (.*)\?$", ["Do you know what {0} is?", "Say what {0} is.", "I ask myself what {0} is.", "Define {0}.", "What might {0} be?", "Could you say what {0} is?"]), (r"^What does (.*) mean\?$", ["Do you know what {0} means?", "{0} means what?", "What is meant by {0}?", "I do not know what {0} means."]),
          (r"^Which (.*)\?$", ["What {0}?", "Tell me which {0}.", "Say which {0}.", "Do you know which {0}?"]), (r"^Where (is|are|does|do) (.*)\?$", ["Do you know where {1} {0}?", "I look for where {1} {0}."]), (r"^(Does|Do|Can|Is|Are) (.*)\?$", ["I ask: {0} {1}?", "Tell me: {0} {1}?", "{0} {1}, or not?", "Is it so: {0} {1}?"]),
          (r"^Tell me (.*)\.$", ["Say {0}.", "I want to hear {0}.", "Let me know {0}."]), (r"^Explain (.*)\.$", ["Give an explanation of {0}.", "Make {0} clear to me.", "Say something about {0}."])]


def reworded(rng, q):
    """another way to ask, where the form of the question is known"""
    for form, others in REWORD:
        m = re.match(form, q)
        if m:
            return rng.choice(others).format(*m.groups())
    return q


def docs(rng, held=False, which=None):
    f = FACTS[which % len(FACTS)] if which is not None else rng.choice(FACTS)
    q = rng.choice(f[1] if held else f[0])
    if not held:
        if rng.random() < .4:
            q = reworded(rng, q)
        q = dressed(rng, q) if rng.random() < .8 else rng.choice(["ninfer: ", "In ninfer, ", "With ninfer: ", "About ninfer: ", "I use ninfer. "]) + q
    return talk(rng, held, q, f[2], ["A question about ninfer.", "I know this from the documentation.", "This is about ninfer."], dict(kind="contains", all=f[3]), 96, think=.3)


def think(rng, held=False):
    """the skills that profit from a brief thought, always with one"""
    while True:
        s = rng.choice([arithmetic, reverse, docs, chat])(rng, held)
        if s["thinking"]:
            return s


SKILLS = dict(copy=copy, reverse=reverse, arithmetic=arithmetic, json=to_json, tool=tool, tool_result=tool_result, needle=needle, docs=docs, chat=chat, think=think)
