"""Reads what rows.sh has left below a folder (or several)."""
import json, os, sys

ROOT = "ninfer bench --synthetic official --device cuda "
F8 = "--projection-format fp8_e4m3fn_row_bf16 "
FLAGS = {"fp8": F8, "bf16": "", "mixed": "--source-profile mixed ", "small": "--kv-dtype fp8 --gdn-state-dtype bf16 "}
WANTED = {("bf16", 1): 0.70, ("bf16", 2): 0.70, ("bf16", 4): 0.71, ("bf16", 8): 0.70, ("fp8", 1): 0.58, ("fp8", 2): 0.60, ("fp8", 4): 0.62, ("fp8", 8): 0.65, ("mixed", 1): 0.60}
DELTA_LAYERS, MATRIX, RECORD = 36, 48 * 128 * 128, 4 * 48 * 257  # of a lane: values of a matrix, bytes of a record


def plan_bytes(kind, batch):
    """What the plan's D has more than what is moved: a matrix is written in each step there, in every fourth here, with records."""
    m = MATRIX * (2 if kind == "small" else 4)
    return batch * DELTA_LAYERS * (0.75 * m - 2.25 * RECORD)


def num(v):
    return int(v) if isinstance(v, float) and v == int(v) else v


class Row:
    """A row of a report: kind fp8, bf16, mixed or small (FP8 cache, BF16 states), of which job and file it is."""

    def __init__(self, path, kind, tag, report, row):
        self.path, self.kind, self.tag, self.report, self.row = path, kind, tag, report, row
        self.context, self.batch = row["context"], row["batch"]
        self.rounds = "drafts" in row
        self.kernels = row.get("kernels")
        self.spread = (max(row["us_run"]) - min(row["us_run"])) / row["us"] if row.get("us_run") else 0.0
        self.us = row["us"]
        self.gpu = row.get("us_gpu") if not self.rounds else row["us_verify_gpu"] + row["drafts"] * row["us_draft_gpu"]
        roof = row if self.rounds else row["roofline"]
        self.bytes, self.rate, self.floor, self.ratio, self.distinct = (roof[k] for k in ("bytes", "read_gbps", "floor_ms", "ratio", "distinct_experts"))
        self.power, self.clock = (None, None) if self.rounds else (roof.get("power_watts"), roof.get("sm_clock_mhz"))

    @property
    def plan_ratio(self):
        return (self.bytes + plan_bytes(self.kind, self.batch)) / self.rate / self.us / 1e3

    def command(self):
        runs, flags = len(self.row["us_run"]), FLAGS[self.kind]
        if self.rounds:
            return f"{ROOT}--depth {self.context} --spec mtp --draft-tokens 5 -r {runs} {flags}--mtp-expert-format nvfp4 --lm-head-draft"
        depth = "8192,65536,261632" if self.tag == "long" else str(self.context)
        batches = list(dict.fromkeys(str(r["batch"]) for r in self.report["decode"]))
        return f"{ROOT}--steps 256 {flags}-r {runs} --depth {depth} --batch {','.join(batches)}"

    def perf(self, commit):
        """The row as docs/perf has it."""
        variant = "bf16" if self.kind == "small" else self.kind
        if self.rounds:
            r = {"what": "round", "name": f"rows_{self.row['drafts'] + 1}_proposal_head_nvfp4_drafter", "variant": variant, "context": self.context, "batch": self.batch, "us": self.us,
                 "bytes": self.bytes, "floor_ms": self.floor, "ratio": self.ratio, "read_gbps": self.rate, "distinct_experts": self.distinct, "us_gpu": self.gpu}
        else:
            name = "step_fp8_cache_bf16_state" if self.kind == "small" else "step"
            r = {"what": "decode", "name": name, "variant": variant, "context": self.context, "batch": self.batch, "us": self.us, "bytes": self.bytes, "floor_ms": self.floor,
                 "ratio": self.ratio, "us_gpu": self.gpu, "read_gbps": self.rate, "distinct_experts": self.distinct, "tokens_per_s": self.row["tokens_per_s"]}
        r |= {"commit": commit, "command": self.command()}
        return {k: num(v) for k, v in r.items()}


def load(folders):
    """All rows below the folders; files are named KIND-TAG[-...].json."""
    rows = []
    for folder in folders:
        if not os.path.isdir(folder):
            sys.exit(f"{folder} is no folder")
        for at, dirs, files in os.walk(folder):
            dirs.sort()
            for f in sorted(files):
                part = f[:-5].split("-")
                if not f.endswith(".json") or part[0] not in FLAGS:
                    continue
                path = os.path.join(at, f)
                try:
                    report = json.load(open(path))
                except ValueError as e:
                    print(f"{path}: {e}", file=sys.stderr)
                    continue
                for row in (report.get("decode") or []) + (report.get("rounds") or []):
                    rows.append(Row(path, part[0], part[1], report, row))
    return rows


def find(rows, kind, context, batch, tag=None):
    """The last of such rows, without tables of kernels, whose runs are few."""
    found = [r for r in rows if (r.kind, r.context, r.batch) == (kind, context, batch) and not r.rounds and r.tag != "table" and (tag is None or r.tag == tag)]
    return found[-1] if found else None
