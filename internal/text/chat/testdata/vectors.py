"""Writes official.json and jinja.json: what the Python reference renders.

official.json: conversations and what Jinja2, set up as Hugging Face transformers sets it up for chat
templates, makes of them with the official Qwen3.8 template. The product's departures (later system turns, no
user query, continuing) come from the same template with the two refusals replaced in its source.
jinja.json: small templates of our own, on the parts of Jinja that chat templates use.

usage: python3 vectors.py PATH/qwen3.8_chat_template.jinja      (needs jinja2 3.1)
"""
import hashlib
import json, os, random, sys
from jinja2 import Environment
from jinja2.sandbox import ImmutableSandboxedEnvironment

def env():
    e = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    e.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    def raise_exception(m):
        from jinja2.exceptions import TemplateError
        raise TemplateError(m)
    e.globals["raise_exception"] = raise_exception
    return e

source = open(sys.argv[1], encoding="utf-8").read()
LATER = "{{- raise_exception('System message must be at the beginning.') }}"
QUERY = "{{- raise_exception('No user query found in messages.') }}"
assert LATER in source and QUERY in source
official = env().from_string(source)
product = env().from_string(source.replace(LATER, r"{{- '<|im_start|>system\n' + content + '<|im_end|>\n' }}")
                                  .replace(QUERY, "{%- set ns.last_query_index = -1 %}"))
ARGS = ["enable_thinking", "reasoning_effort", "preserve_thinking", "add_vision_id", "add_generation_prompt"]
cases = []

def case(name, messages, tools=None, template=None, cont=False, args=None, **kw):
    kw.setdefault("preserve_thinking", False)   # the product always hands it over
    kw.setdefault("add_generation_prompt", True)
    c = dict(name=name, messages=messages, **kw)
    if tools is not None: c["tools"] = tools
    if cont: c["continue"] = True
    if args: c["args"] = args
    rendered, tail = [], ""
    for m in messages:
        m = json.loads(json.dumps(m))
        if m["role"] == "developer": m["role"] = "system"
        for t in m.get("tool_calls") or []:
            if isinstance(t["function"]["arguments"], str): t["function"]["arguments"] = json.loads(t["function"]["arguments"])
        rendered.append(m)
    if cont:
        tail = rendered.pop()["content"]
    lead = rendered and rendered[0]["role"] == "tool"
    if lead: rendered.insert(0, {"role": "system", "content": ""})   # so that the user turn is opened
    try:
        c["text"] = (template or official).render(messages=rendered, tools=tools, documents=None, **kw, **(args or {})) + tail
    except Exception as e:
        c["error"] = str(e)
    cases.append(c)

U = lambda c: dict(role="user", content=c)
S = lambda c: dict(role="system", content=c)
T = lambda c: dict(role="tool", content=c, tool_call_id="t1")
def A(c=None, r=None, calls=None):
    m = dict(role="assistant", content=c)
    if r is not None: m["reasoning_content"] = r
    if calls: m["tool_calls"] = [dict(id=f"t{i}", type="function", function=dict(name=n, arguments=a)) for i, (n, a) in enumerate(calls)]
    return m
text = lambda s: dict(type="text", text=s)
IMG, VID = dict(type="image"), dict(type="video")
W = {"type": "function", "function": {"name": "get_weather", "description": "Wéather <b>&'\"\\ \u2028 😀\t\n", "parameters": {
    "type": "object", "properties": {"zeta": {"type": "number", "minimum": 0.5, "maximum": 1.0}, "alpha": {"type": ["string", "null"], "enum": ["a", None, True, 1, -2.5]}},
    "required": ["zeta"], "additionalProperties": False}, "strict": True}}
F = {"type": "function", "function": {"name": "f", "parameters": {}}}

B1 = [S(" S "), U("Hi\n"), A("A", "\nR\n"), U("Q")]
case("B.1 not preserved", B1, reasoning_effort="medium")
case("B.1 preserved", B1, reasoning_effort="medium", preserve_thinking=True)
case("B.1 not thinking", B1, reasoning_effort="medium", enable_thinking=False)
B2 = [U("Q"), A(None, "R", [("f", {"x": 1, "y": "a b", "z": {"k": [True, None, "é"]}}), ("g", {})]), T("one "), T("two")]
case("B.2", B2, reasoning_effort="medium")
case("B.3", [U("Q")], reasoning_effort="high")
for effort in [None, "low", "medium", "xhigh", "minimal", "none", ""]:
    for think in [None, True, False]:
        kw = {}
        if effort: kw["reasoning_effort"] = effort
        if think is not None: kw["enable_thinking"] = think
        for name, messages, tools in [("user", [U("Q")], None), ("system", [S("sys"), U("Q")], None), ("blank system", [S(" \n\t"), U("Q")], None),
                                      ("tools", [U("Q")], [W]), ("tools system", [S(" sys "), U("Q")], [W, F]), ("tools blank system", [S(""), U("Q")], [F])]:
            case(f"{name} effort {effort} think {think}", messages, tools, **kw)
m = dict(reasoning_effort="medium")
case("no generation prompt", [U("Q"), A("A")], add_generation_prompt=False, **m)
case("empty tools", [U("Q")], [], **m)
case("trim", [U(" \u3000\u00a0\u0085\x1c\x1d\x1e\x1f\x0b\x0c x \u2029\x1c\n")], **m)
case("zero width is no space", [U("\u200bx\ufeff")], **m)
case("empty user", [U("")], **m)
case("no messages", [], **m)
case("unknown role", [U("Q"), dict(role="critic", content="x")], **m)
case("later system refused", [U("Q"), S("x")], **m)
case("no query refused", [A("A")], **m)
case("parts", [S([text(" a"), text("b ")]), U([text("c "), text("d"), text(" ")]), A([text("e"), text("f")]), U("q")], **m)
case("media", [U([text("see "), IMG, text(" and "), VID, IMG]), A("ok"), U([IMG, text("again")])], **m)
case("media ids", [U([text("see "), IMG, text(" and "), VID, IMG]), A("ok"), U([IMG, VID, text("again")])], add_vision_id=True, **m)
case("media in tool result", [U("q"), A("", None, [("f", {})]), T([text("r"), IMG])], add_vision_id=True, **m)
case("media in system", [S([text("a"), IMG]), U("q")], **m)
case("video in system", [S([VID]), U("q")], **m)
case("media in system with tools", [S([IMG]), U("q")], [F], **m)
case("null content", [U("q"), A(None), U("r")], **m)
for keep in [False, True]:
    case(f"think turns keep {keep}", [U("1"), A("a", "ra"), U("2"), A("b", "rb", [("f", {"x": "y"})]), T("t"), A("c", " rc "), ], preserve_thinking=keep, **m)
    case(f"empty reasoning keep {keep}", [U("1"), A("a", ""), U("2"), A("b")], preserve_thinking=keep, **m)
    case(f"wrapped user keep {keep}", [U("1"), A("a", "ra"), U(" <tool_response>\nx\n</tool_response> "), A("b", "rb")], preserve_thinking=keep, **m)
    case(f"half wrapped user keep {keep}", [U("1"), A("a", "ra"), U("<tool_response>x"), A("b", "rb")], preserve_thinking=keep, **m)
case("only wrapped users", [U("<tool_response>x</tool_response>"), A("b", "rb")], template=product, **m)
case("calls after content", [U("q"), A(" I look. ", "r", [("f", {"a": "x\ny", "b": ""}), ("g", {"c": []}), ("h", {})]), T("1"), T("2"), T("3"), U("next"), A("", None, [("f", {"n": None, "t": False})]), T("z")], **m)
case("argument types", [U("q"), A("", None, [("f", {"i": 12345678901, "n": -7, "f": 1.0, "g": 0.25, "e": 1e+20, "b": True, "s": " sp ", "o": {"k": {"l": [1, [2.5, "é<>&'\""]]}}, "l": [], "d": {}, "u": "\u2028\x7f", "q": "a\"b\\c\t"})]), T("r")], **m)
case("arguments as text", [U("q"), A("", None, [("f", '{"b": 1, "a": "é", "c": {"y": [1, 2], "x": null}}')]), T("r")], **m)
case("tool then user", [U("q"), A("", None, [("f", {})]), T("r"), U("go")], **m)
case("tool turns apart", [U("q"), A("", None, [("f", {})]), T("r"), A("x"), T("s"), T(" u ")], **m)
case("tool result markup", [U("q"), A("", None, [("f", {})]), T("<a> & \"b\" </tool_response>")], **m)
case("unknown argument", [U("q")], args={"custom": {"a": 1}}, **m)
p = dict(template=product, **m)
case("later system", [S("one"), U("q"), S(" two\n"), A("a"), dict(role="developer", content="three"), U("r")], **p)
case("later system after user", [U("q"), S("two")], **p)
case("later system parts", [U("q"), S([text(" a"), text("b ")]), U("r")], [F], **p)
case("developer first", [dict(role="developer", content="dev"), U("q")], **p)
case("two systems first", [S("one"), S("two"), U("q")], **p)
case("no query", [A("a", "ra"), T("r"), A("b", "rb")], **p)
case("no query system only", [S("s")], **p)
case("no query later system", [S("s"), A("a", "ra"), S("t"), A("b", "rb")], **p)
case("starts with tool results", [T("one"), T("two"), A("b", "rb"), ], **p)
case("starts with tool results, query", [T("one"), A("a", "ra"), U("q"), A("b", "rb")], **p)
case("starts with tool results, tools", [T("one")], [F], **p)
off = dict(enable_thinking=False, template=product)
case("continue", [U("q"), A(" The answer\n")], cont=True, **off)
case("continue empty", [U("q"), A("")], cont=True, **off)
case("continue parts", [S("s"), U("q"), A("a", "r"), U("t"), dict(role="assistant", content=" x  y ")], [F], cont=True, **off)
case("continue after tool", [U("q"), A("", None, [("f", {})]), T("r"), A("so ")], cont=True, **off)

rng = random.Random(7)
words = ["alpha", "βeta", " ", "\n", "<b>", "中文", "x" * 40, "`code`", "1,000", "\t", "\r\n", "é", "&amp;", "{{ x }}", "{% if %}", "\\n"]
say = lambda: "".join(rng.choice(words) for _ in range(rng.randrange(6)))
def value(d=0):
    k = rng.randrange(9 if d < 3 else 6)
    if k == 0: return rng.randrange(-10**6, 10**6)
    if k == 1: return rng.choice([0.5, 1.0, -2.25, 1e+16, 1e-05, 3.14])
    if k in (2, 3): return say()
    if k == 4: return rng.choice([True, False])
    if k == 5: return None
    if k == 6: return [value(d + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(["a", "b", "Zé", "x y", "q\"", "items", "keys", "name"]) + str(i): value(d + 1) for i in range(rng.randrange(4))}
for i in range(60):
    messages = [S(say())] if rng.randrange(2) else []
    while len(messages) < 2 or rng.randrange(5):
        k = rng.randrange(4)
        if k == 0: messages.append(U(say()) if rng.randrange(4) else U([text(say()), IMG, text(say())]))
        elif k == 1: messages.append(A(say(), say() if rng.randrange(2) else None))
        elif k == 2:
            messages.append(A(say(), say() if rng.randrange(2) else None, [("fn%d" % j, {f"p{n}": value() for n in range(rng.randrange(3))}) for j in range(1 + rng.randrange(2))]))
            messages += [T(say()) for _ in range(rng.randrange(3))]
        elif rng.randrange(4) == 0: messages.append(S(say()))
    if messages[-1]["role"] == "assistant" and rng.randrange(2): messages.append(U(say()))
    kw = dict(preserve_thinking=rng.random() < .5, add_generation_prompt=rng.random() < .8)
    if rng.randrange(3): kw["enable_thinking"] = rng.random() < .5
    if rng.randrange(3): kw["reasoning_effort"] = rng.choice(["low", "medium", "xhigh"])
    if rng.randrange(3) == 0: kw["add_vision_id"] = True
    tools = [{"type": "function", "function": {"name": "t", "parameters": value(0) if rng.randrange(2) else {"p": value(1)}}}] if rng.randrange(4) == 0 else None
    case(f"random {i}", messages, tools, template=product, **kw)

own = env().from_string(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "own.jinja")).read())
ours = []
for c in cases:
    if "text" not in c or c["name"].startswith(("later", "no query", "continue", "two systems", "only wrapped", "starts with", "random", "developer")) or "effort" in c["name"]: continue
    messages = json.loads(json.dumps(c["messages"]))
    for m in messages:
        if m["content"] is None: m["content"] = ""
        for t in m.get("tool_calls") or []:
            if isinstance(t["function"]["arguments"], str): t["function"]["arguments"] = json.loads(t["function"]["arguments"])
    try: ours.append(dict(c, text=own.render(dict(c, messages=messages))))
    except Exception as e: pass

here = os.path.dirname(os.path.abspath(__file__))
def dump(name, rows):
    with open(os.path.join(here, name), "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(r, ensure_ascii=True) for r in rows) + "\n]\n")
for c in cases:  # the official template's wording stays out of the repository: its renderings are kept as digests
    if "text" in c: c["sha256"] = hashlib.sha256(c.pop("text").encode()).hexdigest()
dump("official.json", cases)
dump("own.json", ours)
print(len(ours), "conversations with our own template")
print(len(cases), "conversations,", sum("error" in c for c in cases), "refused")

# Small templates. Data is given to both sides as JSON; each row is what Jinja2 renders.
D = {"s": " Ab c ", "t": "x", "n": 3, "f": 1.5, "z": 1.0, "b": True, "no": False, "nil": None, "l": [1, 2, 3], "e": [], "d": {"b": 1, "a": [None, "é<&'\""]},
     "m": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>r</think>a"}], "ws": "\x1c\x1f\u00a0x\u2003\n"}
templates = [
    "a\n", "a\n\n", "a\r\nb\r\n", "{{ s }}|{{ n }}|{{ f }}|{{ z }}|{{ b }}|{{ nil }}|{{ undef }}|", "{{ l }}{{ d }}{{ e }}",
    "  {% if b %}\n  x\n  {% endif %}\ny", "  {%- if b -%}\n  x\n  {%- endif -%}\n y", "a {% if b %}b{% endif %} c\n {{ n }}\n", "{#- c -#} x {# y #}\nz", "{% raw %}{{ x }}{% endraw %}",
    "  {%+ if b %}x{% endif +%}\ny", "{%- for x in l %}\n{{ x }}{% if not loop.last %}, {% endif %}\n{%- endfor %}", "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{% endfor %}",
    "{% for x in l %}{{ loop.previtem is defined }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}", "{% for x in l[::-1] %}{{ x }}{% endfor %}", "{{ l[1:] }}{{ l[:-1] }}{{ l[-1] }}{{ s[1:3] }}{{ s[::-1] }}", "{% for x in l if x > 1 %}{{ x }}{{ loop.index }}{% else %}none{% endfor %}", "{% for x in e %}x{% else %}none{% endfor %}",
    "{% for k, v in d|items %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d.items() %}{{ k }}={{ v|tojson }};{% endfor %}", "{% for k in d %}{{ k }}{% endfor %}", "{% for c in t %}{{ c }}{% endfor %}",
    "{% set x = 1 %}{% for i in l %}{% set x = i %}{% endfor %}{{ x }}", "{% set ns = namespace(x=1, y='q') %}{% for i in l %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.y }}", "{% set x %}a{{ n }}b{% endset %}{{ x }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% macro f(a, b=2, c='z') %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(1, c='y') }}", "{% macro f(x) %}{% set ns.v = ns.v + x %}{% endmacro %}{% set ns = namespace(v=0) %}{{ f(2) }}{{ f(3) }}{{ ns.v }}", "{% macro f(x) -%}\n  {{ x }} \n{%- endmacro %}<{{ f('a')|trim }}>",
    "{{ 'a' if b else 'c' }}{{ 'a' if no }}{{ ('x' if no else 'y') + 'z' }}", "{{ 'a' ~ 1 ~ none ~ true }}", "{{ 1 + 2 * 3 - 4 // 3 % 2 ** 2 }}{{ 7 / 2 }}", "{{ 1 == 1.0 }}{{ 'a' != 'b' }}{{ 1 < 2 <= 2 }}{{ not b }}{{ b and no or t }}",
    "{{ 'A' in s }}{{ 'q' not in s }}{{ 2 in l }}{{ 'b' in d }}{{ 'z' in d }}{{ t in ('x', 'y') }}{{ t not in ['x'] }}", "{{ undef is defined }}{{ s is defined }}{{ nil is none }}{{ undef is none }}{{ undef is undefined }}", "{{ s is string }}{{ l is iterable }}{{ d is mapping }}{{ l is mapping }}{{ s is iterable }}{{ n is number }}{{ b is boolean }}{{ b is true }}{{ no is false }}{{ n is true }}{{ l is sequence }}{{ n is integer }}{{ f is float }}", "{{ s is not string }}{{ n is not none }}",
    "{{ undef|default('d') }}{{ nil|default('d') }}{{ ''|default('d', true) }}{{ s|default('d')|trim }}", "{{ s|trim }}|{{ ws|trim }}|{{ ws.strip() }}|{{ 'xxaxx'|trim('x') }}|{{ s.lstrip() }}|{{ s.rstrip() }}|{{ 'xya'.strip('xy') }}", "{{ s|length }}{{ l|length }}{{ d|length }}{{ 'é中😀'|length }}", "{{ s|upper }}{{ s|lower }}{{ 'hello world'|title }}{{ 'hELLO'|capitalize }}", "{{ l|join(', ') }}{{ l|first }}{{ l|last }}{{ l|sum }}{{ l|max }}{{ l|min }}", "{{ n|string + 'x' }}{{ '3'|int + 1 }}{{ 'q'|int }}{{ '1.5'|float }}{{ 'a'|safe }}", "{{ 'a-b-c'|replace('-', '+') }}{{ 'a-b-c'.replace('-', '') }}{{ 'a,b,c'.split(',') }}{{ 'a,b,c'.split(',', 1)[1] }}{{ ' a  b '.split() }}",
    "{{ t.startswith('x') }}{{ s.endswith('q') }}{{ 'abc'.find('c') }}{{ 'aXa'.lower() }}{{ 'aba'.count('a') }}", "{{ d|tojson }}", "{{ l|tojson }}{{ s|tojson }}{{ nil|tojson }}{{ b|tojson }}{{ z|tojson }}{{ f|tojson }}", "{{ d|tojson(indent=2) }}", "{{ d|tojson(separators=(',', ':')) }}", "{{ (d|dictsort)[0][0] }}{{ l|reverse|list }}{{ [3,1,2]|sort }}{{ [1,1,2]|unique|list }}",
    "{{ m|map(attribute='role')|list }}{{ m|selectattr('role', 'equalto', 'user')|list|length }}{{ m|rejectattr('role', 'equalto', 'user')|map(attribute='content')|first }}", "{{ m[0].role }}{{ m[0]['role'] }}{{ m[-1]['content'] }}{{ m[0].get('x', 'none') }}{{ m[0].get('x') }}", "{{ m[1].content.split('</think>')[-1] }}{{ m[1].content.split('</think>')[0].split('<think>')[-1] }}", "{% if '</think>' in m[1].content %}yes{% else %}no{% endif %}",
    "{{ range(3)|list }}{{ range(1, 7, 2)|list }}", "{{ 'a' 'b' }}", "{{ \"q\\\"u\" }}{{ 'n\\nt\\tu\\u00e9' }}{{ 'a\\\\b' }}", "{{ ['a', 1, true, none] }}{{ {'k': 'v', 'n': 1} }}{{ (1, 2) }}", "{% filter upper %}abc {{ t }}{% endfilter %}", "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "{% for r in m %}{% for x in l %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{{ -n }}{{ +n }}{{ n - 1 }}{{ 2 ** 3 }}", "{{ 'a\nb'|indent(2) }}|{{ 'a\nb'|indent(2, true) }}", "{{ '%s-%d' % ('a', 3) }}", "{% if n > 2 and (b or undef.x) %}1{% elif n %}2{% else %}3{% endif %}", "{{ joiner }}" if False else "{{ cycler('a', 'b').next() }}", "{{- '  x  ' -}}  \n y", "x{{- ' y' }}\n{{ 'z' -}}\n\n w", "{{ s.strip()|length }}{{ (s|trim)[0] }}{{ l[5] }}{{ d.nope }}{{ d['b'] }}", 
    "{% if b %}{{ n }}\nx{% endif %}", "a {{ n }}{%- if b %}x{% endif %}", "{% if b -%}{{ n }}  y{% endif %}", "{% if b %}{# c #}\nx{% endif %}", "x {# c #}{%- if b %} y{% endif %}", "{% set q = 1 %}{{ n }}\n{{ n }}\n",
    "a\n  {# c #}\n  {{ n }}\n  {% if b %}\n    z\n  {% else %}\n  {% endif %}\n  w\n", "\t{% if b %}\n\t\t{% if b %}\n\n x {% endif %} y\n{%- endif %}\n", "{% raw %}\n {{ q }} {% endraw %}\n z", "x\n  {%- raw -%}\n {% q %} \n {%- endraw -%} \n z", "  {% raw %} a\n  {% endraw %}b", "{{ n }}  {% if b %}x{% endif %}", "{% if b %}  {% if b %}x{% endif %}{% endif %}", "{% if b %}\n  {% if b %}x{% endif %}{% endif %}",
    "a\x0b\u2003{%- if b -%}\u00a0\x1c c {% endif %}", "a {{- n -}} b {{+ n }} c", "{% if b +%}\n x{% endif %}", "{%- set x = 'a' -%}\n\n  {{- x -}}  \n", "{% for x in l -%}\n {{ x }},\n{%- endfor %}|", "x{#- c -#} y {#+ d +#}\nz",
    "{{ [1, 2] + [3] }}{{ 'ab' * 2 }}", "{% set x = {'a': [1, {'b': none}]} %}{{ x.a[1].b }}{{ x['a'][0] }}",
]
rows = []
for t in templates:
    r = dict(template=t)
    try: r["text"] = env().from_string(t).render(**D)
    except Exception as e: r["error"] = str(e)
    rows.append(r)
dump("jinja.json", [dict(data=D)] + rows)
print(len(rows), "templates,", sum("error" in r for r in rows), "refused", [r["template"] for r in rows if "error" in r])
