"""What the reference implementation answers, predicts and drafts with the represented weights, in float32."""
import json, os

import torch
import torch.nn.functional as F

import config, data, judge, model

GOLD = dict(
    chat_think=([dict(role="user", content="What does ninfer verify do?")], True),
    chat_plain=([dict(role="user", content="Copy this: three green apples, 42")], False))


def precise(f):
    def g(*a, **k):
        old = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.no_grad(), torch.autocast("cuda", enabled=False):
                return f(*a, **k)
        finally:
            torch.set_float32_matmul_precision(old)
    return g


def padded(rows, extra=0):
    n = (max(map(len, rows)) + extra + 127) // 128 * 128
    ids = torch.full((len(rows), n), config.EOT, device="cuda")
    for i, r in enumerate(rows):
        ids[i, :len(r)] = torch.tensor(r, device="cuda")
    return ids


def streams(nano, ids):
    doc = torch.zeros_like(ids)
    ctx = nano.context(ids, doc)
    return nano.final(nano.trunk(ids, ctx, plain=True)[0], plain=True)[0], ctx


@precise
def decode(nano, prompts, limits, size=64):
    """greedy continuations of prompts (lists of ids), each up to its limit, the end token included"""
    out = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for at in range(0, len(order), size):
        live = order[at:at + size]
        seqs = {i: list(prompts[i]) for i in live}
        new = {i: [] for i in live}
        step = 0
        while live:
            ids = padded([seqs[i] for i in live])
            X, _ = streams(nano, ids)
            last = torch.tensor([len(seqs[i]) - 1 for i in live], device="cuda")
            best = nano.logits(X[torch.arange(len(live), device="cuda"), last]).argmax(-1).tolist()
            for i, t in zip(live, best):
                seqs[i].append(t); new[i].append(t)
            live = [i for i in live if new[i][-1] not in (config.IM_END, config.EOT) and len(new[i]) < limits[i]]
            step += 1
        for i, t in new.items():
            out[i] = t
    return out


@precise
def reference_logits(nano, ids):
    with model.dense_reference():
        return nano.ref(input_ids=ids, use_cache=False).logits


@precise
def verify(nano, prompts, answers, size=16):
    """positions where the reference's own forward pass prefers another token, and each answer's smallest margin"""
    wrong, margins = [], [0.0] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
    for at in range(0, len(order), size):
        part = order[at:at + size]
        lg = reference_logits(nano, padded([prompts[i] + answers[i] for i in part]))
        for r, i in enumerate(part):
            n = len(prompts[i])
            x = lg[r, n - 1:n - 1 + len(answers[i])]
            top = torch.topk(x, 2, -1)
            margins[i] = float((top.values[:, 0] - top.values[:, 1]).min())
            bad = (top.indices[:, 0] != torch.tensor(answers[i], device="cuda")).nonzero().flatten().tolist()
            if bad:
                wrong.append((i, bad[0], int(top.indices[bad[0], 0])))
    return wrong, margins


@precise
def drafts(nano, prompts, answers, k=3):
    """tokens per round (accepted + 1) when k chained drafts are tried; greedy text known beforehand"""
    rounds = tokens = 0
    for p, a in zip(prompts, answers):
        if len(a) < 2:
            continue
        seq = p + a
        ids = padded([seq])
        X, ctx = streams(nano, ids)
        n, N = len(p), len(a)
        # a round starts after token a[s]; one row a start, all tried at once
        starts = list(range(0, N - 1))
        L = ids.shape[1] + 128
        rows = torch.zeros(len(starts), L, model.S, model.H, device="cuda")
        nxt = torch.cat([ids[0, 1:], ids[0, :1]])
        base = nano.stem(X, nxt[None])[0]
        for r, s in enumerate(starts):
            rows[r, :n + s] = base[:n + s]              # positions 0 .. n+s-1 with the token after each, the last being a[s]
        doc = torch.zeros(len(starts), L, device="cuda", dtype=torch.long)
        c2 = nano.context(doc, doc)
        ok = torch.ones(len(starts), dtype=torch.bool, device="cuda"); count = torch.zeros(len(starts), dtype=torch.long, device="cuda")
        at = torch.tensor([n + s - 1 for s in starts], device="cuda"); ar = torch.arange(len(starts), device="cuda")
        for j in range(k):
            Y, y, inj, _ = model.block(model.PLAIN, nano.mtp["layer"], rows, None, None, c2)
            h = nano.final((Y, y, inj), True, True)[0][ar, at]
            d = nano.logits(h, True).argmax(-1)
            want = torch.tensor([a[s + 1 + j] if s + 1 + j < N else -1 for s in starts], device="cuda")
            ok = ok & (d == want); count += ok
            at = at + 1
            rows[ar, at] = nano.stem(h[:, None], d[:, None])[:, 0]
        s, count = 0, count.tolist()
        while s < N - 1:
            rounds += 1; tokens += count[s] + 1; s += count[s] + 1
    return dict(rounds=rounds, tokens=tokens, per_round=tokens / max(1, rounds))


@precise
def perplexity(nano, ids):
    lg = reference_logits(nano, torch.tensor([ids], device="cuda"))[0] if len(ids) <= 2048 else None
    nll = F.cross_entropy(lg[:-1].double(), torch.tensor(ids[1:], device="cuda"), reduction="none")
    return dict(tokens=len(ids), scored=len(ids) - 1, mean_nll=float(nll.mean()), ppl=float(nll.mean().exp()))


def run(nano, encode, decode_text, rows, verify_all=True, log=print):
    """answers to rows of the held-out set; returns reference rows and totals by skill"""
    prompts = [encode(data.prompt(r)) for r in rows]
    limits = [r["max_new"] for r in rows]
    got = decode(nano, prompts, limits)
    margins = [None] * len(rows)
    if verify_all:
        for turn in range(6):
            wrong, margins = verify(nano, prompts, got)
            log("verify: answers where the reference differs:", len(wrong))
            if not wrong:
                break
            for i, at, t in wrong:      # take the reference's token and go on from there
                head = got[i][:at] + [t]
                if t in (config.IM_END, config.EOT) or len(head) >= limits[i]:
                    got[i] = head
                else:
                    got[i] = head + decode(nano, [prompts[i] + head], [limits[i] - len(head)])[0]
    out, total = [], {}
    for r, p, a, m in zip(rows, prompts, got, margins):
        ended = a[-1] in (config.IM_END, config.EOT)
        text = decode_text(a)
        good = judge.passes(r, text, ended)
        t = total.setdefault(r["skill"], dict(n=0, **{"pass": 0})); t["n"] += 1; t["pass"] += good
        out.append({"id": r["id"], "prompt_tokens": p, "tokens": a, "text": text, "pass": good, "margin": m})
    return out, total


@precise
def golden(nano, encode, decode_text, out):
    """golden.json and golden.safetensors in the form of tools/reference/make_golden.py, a few short cases"""
    from safetensors.torch import save_file
    tensors, meta = {}, {"preset": "nano", "profile": "radixark", "cases": {}, "note": "float32 reference from represented weights"}

    def best(row):
        v, i = torch.topk(row[:config.IDS], 2)
        return int(i[0]), float(v[0] - v[1])

    def target(ids):
        cap = {}
        hook = nano.text.hyper_connection_mixer.register_forward_pre_hook(lambda m, i: cap.__setitem__("H", i[0].detach()))
        lg = nano.ref(input_ids=torch.tensor([ids], device="cuda"), use_cache=False).logits[0]
        hook.remove()
        return lg, cap["H"][0]

    def mtp(x):                                        # [T, 4H]; the reference's own layer
        T = x.shape[0]
        pos = torch.arange(T, device="cuda").view(1, 1, -1).expand(3, 1, -1)
        pe = nano.text.rotary_emb(x[None, :, :model.H], pos)
        mask = torch.zeros(1, 1, T, T, device="cuda").masked_fill(torch.ones(T, T, device="cuda").triu(1).bool(), torch.finfo(torch.float32).min)
        y = nano.mtp["layer"](x[None], position_embeddings=pe, attention_mask=mask)
        y = y[0] if isinstance(y, tuple) else y
        return y[0], nano.ref.lm_head(nano.mtp["mixer"](y)[0])

    def stem(h, tok):
        return nano.stem(h.view(1, -1, model.S, model.H), tok[None])[0].flatten(-2)

    def case(name, ids, greedy, **more):
        lg, h = target(ids)
        tok = torch.tensor(ids, device="cuda")
        tensors[name + ".logits"] = lg
        _, ml = mtp(stem(h[:-1], tok[1:]))
        tensors[name + ".mtp_logits"] = ml
        y, ym = best(lg[-1])
        x, ds, dm, dl = stem(h, torch.cat([tok[1:], torch.tensor([y], device="cuda")])), [], [], []
        for _ in range(3):
            mh, ml = mtp(x); d, m = best(ml[-1]); ds.append(d); dm.append(m); dl.append(ml[-1])
            x = torch.cat([x, stem(mh[-1:], torch.tensor([d], device="cuda"))])
        tensors[name + ".draft_logits"] = torch.stack(dl)
        seq, gen, margin = list(ids), [], []
        for _ in range(greedy):
            t, m = best(target(seq)[0][-1]); gen.append(t); margin.append(m); seq.append(t)
        meta["cases"][name] = dict(tokens=ids, next=y, next_margin=ym, drafts=ds, drafts_margin=dm, **(dict(greedy=gen, margin=margin) if greedy else {}), **more)
        if more:
            meta["cases"][name]["text"] = decode_text(gen)

    case("short", encode("ninfer runs on a"), 12)
    case("one", encode("Hello")[:1] + encode(" port"), 0)
    ids = encode("one two")[:6] + [config.EOT] + encode("one two")[:6] + [config.EOT, config.EOT] + encode("three four")[:6]
    case("eos", ids, 8)
    for name, (messages, thinks) in GOLD.items():
        prompt = data.prompt(dict(messages=messages, thinking=thinks))
        case(name, encode(prompt), 24, messages=messages, enable_thinking=thinks, prompt=prompt)
    save_file({k: v.float().cpu().contiguous() for k, v in tensors.items()}, out + "/golden.safetensors")
    json.dump(meta, open(out + "/golden.json", "w"), indent=1)
    return {k: v.get("text") for k, v in meta["cases"].items()}
