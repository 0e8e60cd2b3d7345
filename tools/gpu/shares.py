#!/usr/bin/env python3
"""shares.py RESULTS...: shares of the read stream against what is wanted, long contexts against 8 K, waited against the GPU, rounds, sums of the tables of kernels."""
import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import results
if len(sys.argv) < 2:
    sys.exit(__doc__)
rows = results.load(sys.argv[1:])
names = {"bf16": "16 bits", "fp8": "8 bits", "mixed": "mixed", "small": "FP8 cache, BF16 state"}
print("rows at 8 K                    us   wanted  share   (plan's D)  on the GPU  waited-GPU  share of GPU time  read GB/s  spread  W  MHz   tokens/s")
for kind in ("bf16", "fp8", "mixed"):
    for n in (1, 2, 4, 8):
        for tag in ("8k", "long"):
            r = results.find(rows, kind, 8192, n, tag)
            if not r:
                continue
            want = results.WANTED.get((kind, n))
            mark = "" if want is None else "met" if r.ratio >= want else f"{r.us - r.bytes / r.rate / want / 1e3:+.0f} us"
            print(f"{names[kind]:8} {n} lanes {'' if tag == '8k' else '(long)':6} {r.us:8.1f}   {want or 0:.2f}  {r.ratio:.4f} ({r.plan_ratio:.3f}) {mark:9} {r.gpu:8.1f} {r.us - r.gpu:8.1f}"
                  f"   {r.bytes / r.rate / r.gpu / 1e3:.4f}  {r.rate:8.1f}  {100 * r.spread:4.1f} %  {r.power or 0:.0f}  {r.clock or 0}  {n * 1e6 / r.us:7.1f}")
print("\none lane, longer contexts (0.96 and 0.92 of the 8 K rate wanted)")
for kind in ("bf16", "fp8", "mixed", "small"):
    base = results.find(rows, kind, 8192, 1, "long")
    if not base:
        continue
    alone = results.find(rows, kind, 8192, 1, "8k")
    line = f"{names[kind]:22} 8 K {base.us:.1f}"
    if alone:
        line += f" (alone {alone.us:.1f})"
    for c, want in ((65536, 0.96), (261632, 0.92)):
        r = results.find(rows, kind, c, 1, "long")
        if r:
            line += f"; {round(c / 1022)} K {r.us:.1f} ({r.gpu:.1f} on the GPU), share {r.ratio:.3f}, {base.us / r.us:.3f}"
            if alone:
                line += f" (of alone {alone.us / r.us:.3f})"
            line += "" if base.us / r.us >= want else " MISSED"
    print(line)
b, s = results.find(rows, "bf16", 8192, 1, "long"), results.find(rows, "small", 8192, 1, "long")
if b and s:
    print("FP8 cache and BF16 state less BF16 and FP32:", ", ".join(
        f"{round(c / 1022)} K {results.find(rows, 'small', c, 1).us - results.find(rows, 'bf16', c, 1, 'long').us:+.1f} us" for c in (8192, 65536, 261632)
        if results.find(rows, "small", c, 1) and results.find(rows, "bf16", c, 1, "long")))
rounds = [r for r in rows if r.rounds]
if rounds:
    print("\nrounds, reduced head, NVFP4 drafter: us; share; verify and drafts on the GPU")
    for kind in ("fp8", "bf16"):
        print(f"{names[kind]:8}", "; ".join(f"T={r.row['drafts'] + 1} {r.us:.0f}, {r.ratio:.3f} ({r.row['us_verify_gpu']:.0f} + {r.row['drafts']} x {r.row['us_draft_gpu']:.0f})" for r in rounds if r.kind == kind))
tables = [r for r in rows if r.kernels]
if tables:
    print("\ntables of kernels: charged and less without each, of a replay")
for r in sorted(tables, key=lambda r: (r.kind, r.batch)):
    total, less = sum(k["us"] for k in r.kernels), sum(k["us_less_without"] for k in r.kernels)
    print(f"{names[r.kind]:8} {r.batch} lanes: replay {r.gpu:.1f}, charged {total:.1f} ({total / r.gpu:.3f}), without {less:.1f} ({less / r.gpu:.3f})")
