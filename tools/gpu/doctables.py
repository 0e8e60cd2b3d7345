#!/usr/bin/env python3
"""doctables.py [docs/perf/h200.json] [RESULTS...]: the tables of docs/kernels.md, Where things stand (steps, lanes, rounds), of the file's rows, and, given results of
rows.sh, that of kernels in docs/ladders.md. Its stderr says which kernel goes into which row."""
import json, os, re, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import results
args = sys.argv[1:]
path = args.pop(0) if args and args[0].endswith(".json") else "docs/perf/h200.json"
rows = {(r["what"], r["name"], r["variant"], r["context"], r["batch"]): r for r in json.load(open(path))}
cell = lambda r: f"{r['us']:,.0f}; {r['ratio']:.2f}"
print("| Tokens before it | 8 K | 64 K | 256 K |\n|---|---|---|---|")
for title, name, variant in (("16-bit projections", "step", "bf16"), ("8-bit", "step", "fp8"), ("mixed artifact", "step", "mixed"), ("16-bit, FP8 cache, BF16 state", "step_fp8_cache_bf16_state", "bf16")):
    print(f"| {title} | " + " | ".join(cell(rows["decode", name, variant, c, 1]) for c in (8192, 65536, 261632)) + " |")
print("\n| Lanes at 8 K | 1 | 2 | 4 | 8 |\n|---|---|---|---|---|")
for title, variant in (("16-bit", "bf16"), ("8-bit", "fp8")):
    print(f"| {title} | " + " | ".join(f"{cell(r)}; {r['tokens_per_s']:,.0f} tokens/s" for r in (rows["decode", "step", variant, 8192, n] for n in (1, 2, 4, 8))) + " |")
print("\n| T | 2 | 3 | 4 | 5 | 6 |\n|---|---|---|---|---|---|")
for bits, variant in (("16 bits", "bf16"), ("8 bits", "fp8")):
    for head, drafter, title in (("proposal", "nvfp4", "reduced head, NVFP4 experts"), ("proposal", "bf16", "reduced head, BF16 experts"), ("full", "nvfp4", "full head, NVFP4 experts")):
        print(f"| {bits}, {title} | " + " | ".join(cell(rows["round", f"rows_{t}_{head}_head_{drafter}_drafter", variant, 8192, 1]) for t in range(2, 7)) + " |")
commits = {}
for (what, name, variant, context, batch), r in rows.items():
    if what in ("decode", "round"):
        commits.setdefault(r["commit"], []).append(f"{name.replace('_proposal_head_nvfp4_drafter', '')} {variant} {context // 1024}K x{batch}")
print("\nof commits:", "; ".join(f"{c}: {len(l)} rows" for c, l in commits.items()))

tables = {(r.kind, r.batch): r for r in results.load(args) if r.kernels} if args else {}
if tables:
    # Kind of a row, the operation and the kernel that make it up, whether it is a launch's time.
    kinds = [("hc_down", "", "hc_down", 1), ("hc_up_mix", "", "hc_up_mix", 1), ("gdn_in", "gdn", "gemv", 1), ("delta rule", "gdn", "delta_", 1), ("delta output", "gdn", "project", 1),
             ("router", "moe", "router", 1), ("experts up", "moe", "expert_gate_up", 1), ("experts down", "moe", "expert_down", 1), ("qsa_in", "qsa", "gemv", 1),
             ("prep, scores and selection", "qsa", "prep_select", 1), ("prep and score", "qsa", "prep", 1), ("select", "qsa", "select", 1), ("attend", "qsa", "attend", 1), ("merge", "qsa", "merge", 1), ("attention output", "qsa", "project", 1),
             ("n-gram embedding, all", "ple|table|ngram", "", 0), ("head, argmax, all", "head|argmax|pick", "", 0), ("begin, embed, carry, report, all", "", "", 0)]
    order = [("bf16", n) for n in (1, 2, 4, 8)] + [("fp8", n) for n in (1, 2, 4, 8)]
    cells, launches = {}, {}
    for at, r in tables.items():
        for k in r.kernels:
            op, kernel = re.match(r"(.*) \d+ (\S+)$", k["name"]).groups()
            for i, (title, ops, kernels, each) in enumerate(kinds):
                if re.match(f"({ops})", op) and kernel.startswith(kernels):
                    break
            us, n = cells.get((i, at), (0.0, 0))
            cells[i, at] = us + k["us"], n + k["launches"]
            launches[i] = n + k["launches"]
            print(f"{at[0]} {at[1]}: {k['name']} -> {kinds[i][0]}", file=sys.stderr)
    print("\n| Kernel | Launches | 16, one | two | four | eight | 8, one | two | four | eight |\n|---|---|---|---|---|---|---|---|---|---|")
    for i, (title, _, _, each) in enumerate(kinds):
        if i not in launches:
            continue
        row = []
        for at in order:
            us, n = cells.get((i, at), (0, 0))
            row.append(f"{us / n if each else us:.1f}" if n else "")
        print(f"| {title} | {launches[i] if each else ''} | " + " | ".join(row) + " |")
    line = lambda title, f: print(f"| {title} | | " + " | ".join(f"{f(tables[at]):,.0f}" if at in tables else "" for at in order) + " |")
    line("Sum", lambda r: sum(k["us"] for k in r.kernels))
    line("Whole", lambda r: r.gpu)
    line("Step less without each kind, summed", lambda r: sum(k["us_less_without"] for k in r.kernels))
