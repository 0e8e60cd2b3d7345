"""Whether an answer is right, by rule (README.md, Formats)."""
import json
import re

CALL = re.compile(r"<tool_call>\n<function=([^>\n]+)>\n((?:<parameter=[^>\n]+>\n.*?\n</parameter>\n)*)</function>\n</tool_call>$", re.S)
PARAM = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", re.S)


def content_of(text):
    """the answer proper: after the last </think>, without the end token"""
    text = text.rsplit("</think>", 1)[-1]
    return text.removesuffix("<|im_end|>").strip()


def equal(a, b):
    """JSON equality: 1 equals 1.0, true does not equal 1"""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def arguments(name, body, tools):
    props = next((t["function"]["parameters"]["properties"] for t in tools or [] if t["function"]["name"] == name), {})
    out = {}
    for key, value in PARAM.findall(body):
        if key in out:
            return None
        if props.get(key, {}).get("type") != "string":
            try:
                value = json.loads(value)
            except ValueError:
                pass
        out[key] = value
    return out


def passes(row, text, ended):
    """row of the held-out set, output text (end token optional), and whether the output ended by itself"""
    if not ended:
        return False
    e, c = row["expect"], content_of(text)
    if e["kind"] == "exact":
        return c == e["text"].strip()
    if e["kind"] == "contains":
        return all(x.lower() in c.lower() for x in e["all"])
    if e["kind"] == "json":
        try:
            return equal(json.loads(c), e["value"])
        except ValueError:
            return False
    if e["kind"] == "tool":
        m = CALL.search(c)
        if not m or c.count("<tool_call>") != 1 or m.group(1) != e["name"]:
            return False
        got = arguments(m.group(1), m.group(2), row.get("tools"))
        return got is not None and equal(got, e["arguments"])
    raise ValueError("unknown rule " + e["kind"])
