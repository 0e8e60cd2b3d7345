#!/usr/bin/env python3
"""perf.py [--to docs/perf/h200.json] [--alone] RESULTS... COMMIT: puts the rows that rows.sh measured into docs/perf/h200.json, in place
of those of the same what, name, variant, context and batch. One lane at 8 K is that of the device opened for three lengths, as so far; with --alone that opened
for 8 K only. Rows of tables (few runs) do not count."""
import json, os, re, subprocess, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import results

args, to, alone = sys.argv[1:], "docs/perf/h200.json", False
if "--to" in args:
    i = args.index("--to"); to = args[i + 1]; del args[i:i + 2]
if "--alone" in args:
    args.remove("--alone"); alone = True
if len(args) < 2 or not re.fullmatch(r"[0-9a-f]{7,40}", args[-1]):
    sys.exit(__doc__)
commit, rows = args[-1][:7], results.load(args[:-1])
for at in args[:-1]:
    for d, _, files in os.walk(at):
        if "commit" in files:
            text = open(os.path.join(d, "commit")).read().split("\n")
            if not text[0].startswith(commit):
                print(f"{d}: programs are of {text[0][:9]}, not {commit}", file=sys.stderr)
            if len([l for l in text[1:] if l.strip()]):
                print(f"{d}: programs of a tree with changes: {text[1:4]}", file=sys.stderr)
old = json.load(open(to))
key = lambda r: (r["what"], r["name"], r["variant"], r["context"], r["batch"])
new = {}
for r in rows:
    if r.tag == "table":
        continue
    if not r.rounds and r.batch == 1 and r.context == 8192 and (r.tag == "long") == alone and not (r.kind == "small"):
        if results.find(rows, r.kind, 8192, 1, "8k" if alone else "long"):
            continue
    if len(r.row["us_run"]) < 3:
        print(f"{r.path}: {len(r.row['us_run'])} runs only, left out", file=sys.stderr)
        continue
    if r.spread > 0.02:
        print(f"{r.path}: {r.context} tokens, {r.batch} lanes: runs differ by {100 * r.spread:.1f} %", file=sys.stderr)
    p = r.perf(commit)
    new[key(p)] = p
def off(p, what, got, want, most):
    if abs(got / want - 1) > most:
        sys.exit(f"{p}: {what} is {got}, others give {want}")
for p in new.values():
    off(p, "ratio", p["ratio"], p["floor_ms"] * 1e3 / p["us"], 1e-3)
    off(p, "floor_ms", p["floor_ms"], p["bytes"] / p["read_gbps"] / 1e6, 1e-3)
out, used = [], set()
for r in old:
    if key(r) in new and key(r) not in used:
        used.add(key(r))
        r = new[key(r)]
    out.append(r)
for k, p in new.items():
    if k not in used:
        print(f"new: {k}")
        last = max((i for i, r in enumerate(out) if (r["what"], r["name"], r["variant"]) == k[:3]), default=max(i for i, r in enumerate(out) if r["what"] == k[0]))
        out.insert(last + 1, p)
with open(to, "w") as f:
    f.write("[\n" + ",\n".join("  " + json.dumps(r, separators=(",", ":"), ensure_ascii=False) for r in out) + "\n]\n")
print(f"{len(new)} rows of {commit} in {to}")
