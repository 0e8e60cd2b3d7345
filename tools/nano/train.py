"""Trains nano against the clock.

usage: python train.py --out DIR --seconds N [--resume FROM] [--export-every S] [--workers W]

One run of N seconds is warm-up, a long stage, and a decay over the last part. The last third is done on the grid of the stored formats
and with more documentation. DIR gets log.txt lines on stdout, state.pt (exact weights and optimisers) and, at every export, checkpoint/.
--resume starts from the weights of a checkpoint folder or a .ninfer artifact, or goes on from state.pt in DIR if there is one. A number
in DIR/seconds replaces N; with a unix time in DIR/deadline the run ends then; a file DIR/stop ends it now, to be gone on with.
"""
import argparse, json, math, os, random, shutil, threading, time, queue as queues, traceback

import numpy as np
import torch
import torch.nn.functional as F

import config, data, export, model, optim

ROWS, LENGTH = 16, 2048
PEAK = 3e-3


@torch.no_grad()
def initialise(nano, seed=7):
    g = torch.Generator(device="cuda").manual_seed(seed)
    def normal(p, s):
        p.copy_(torch.randn(p.shape, generator=g, device="cuda") * s)
    for n, p in nano.named_parameters():
        if ".visual." in n:
            continue
        fan = p.shape[-1]
        if p.dim() == 1 and "norm" in n:
            p.fill_(1.0 if "linear_attn.norm" in n else 0.0)
            continue
        if n.endswith("A_log"):
            p.copy_(torch.log(torch.linspace(1, 4, p.numel(), device="cuda")))
        elif n.endswith("dt_bias"):
            dt = torch.exp(torch.linspace(math.log(0.002), math.log(0.1), p.numel(), device="cuda"))
            p.copy_(dt + torch.log(-torch.expm1(-dt)))                  # softplus(dt_bias) = dt: memories of different length
        elif "embed_tokens" in n:
            normal(p, 0.5); p[config.EOT] = 0
        elif "lm_head" in n or "gate.weight" in n or "block_inject" in n or "in_proj_a" in n or "in_proj_b" in n:
            normal(p, 0.02)
        elif "ngram_embedding" in n:
            normal(p, 0.3)
        elif n.endswith("conv1d.weight"):
            if ".ple." in n:
                p.zero_()
            else:
                normal(p, 0.2); p[..., -1] += 0.5
        elif "input_mix_weight_up" in n:
            normal(p, 0.1)
        elif p.dim() >= 2:
            normal(p, (0.5 if any(x in n for x in ("o_proj", "out_proj", "down_proj")) else 1.0) * fan ** -0.5)


def loader(stream, out, stop):
    while not stop.is_set():
        b = stream.next()
        out.put([torch.from_numpy(np.ascontiguousarray(x)).pin_memory() for x in b])


def widen(ids, weight, doc, kind):
    return ids.long(), weight, doc.long(), kind.long()


class Recorded:
    """f, which takes nothing and works on the device only, as a CUDA graph: a step has thousands of small kernels, and launching them one by
    one took three times as long as they run. The first calls run f as it is; if recording fails, so do all others."""

    def __init__(self, f, say, warm=3):
        self.f, self.say, self.warm, self.graph, self.out = f, say, warm, None, None
        self.side = torch.cuda.Stream()

    def __call__(self):
        if self.graph:
            self.graph.replay()
            return self.out
        if self.warm != 0:
            self.warm -= 1
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                out = self.f()
            torch.cuda.current_stream().wait_stream(self.side)
            return out
        torch.cuda.synchronize()
        t, graph = time.time(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.out = self.f()
            self.graph = graph
            self.say("recorded in", round(time.time() - t, 1), "s")
        except Exception:
            traceback.print_exc()
            self.warm = -1
            torch.cuda.synchronize()
        return self()


def losses(nano, ids, weight, doc, kind, deep=False):
    """main and drafting loss of a batch (deep: of the second chained draft too), balance loss, and sums for the report [kinds, 4]: answer tokens, loss, right, drafted right"""
    ctx = nano.context(ids, doc)
    state, balance = nano.trunk(ids, ctx)
    X, x = nano.final(state)
    follows = F.pad((doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0), (0, 1))
    nxt = F.pad(ids[:, 1:], (0, 1), value=config.EOT)
    w1 = F.pad(weight[:, 1:], (0, 1)).float() / 64 * follows
    per, right = nano.ops["head"](x, nano.ref.lm_head.weight, nxt, w1)
    main = per.sum() / w1.sum()
    state, more = nano.mtp_trunk(X, nxt, ctx)
    nxt2 = F.pad(ids[:, 2:], (0, 2), value=config.EOT)
    w2 = F.pad(weight[:, 2:], (0, 2)).float() / 64 * follows * F.pad(follows[:, 1:], (0, 1))
    Y, y = nano.final(state, True)
    per2, right2 = nano.ops["head"](y, nano.ref.lm_head.weight, nxt2, w2)
    draft = per2.sum() / w2.sum()
    if deep:                               # the draft after it comes from the head's own streams, as when drafts are chained
        state, again = nano.mtp_trunk(Y, nxt2, ctx)
        nxt3 = F.pad(ids[:, 3:], (0, 3), value=config.EOT)
        w3 = F.pad(weight[:, 3:], (0, 3)).float() / 64 * (w2 > 0) * F.pad(follows[:, 2:], (0, 2))
        per3, _ = nano.ops["head"](nano.final(state, True)[1], nano.ref.lm_head.weight, nxt3, w3)
        draft, more = draft + 0.5 * per3.sum() / w3.sum(), more + again
    with torch.no_grad():
        a = (w1 == 1).float(); a2 = (w2 == 1).float()
        k = kind.flatten()
        sums = torch.zeros(len(data.KINDS), 4, device="cuda")
        sums.index_add_(0, k, torch.stack([a, per * a, right * a, right2 * a2], -1).flatten(0, 1).float())
    return main, draft, balance + more, sums


@torch.no_grad()
def probes(nano, ids, doc):
    """inputs of the attention layers (main and drafting) for some rows, without gradients"""
    ctx, out = nano.context(ids, doc), []
    state, _ = nano.trunk(ids, ctx, plain=True, see=lambda m, x: out.append((m, x)))
    X, _ = nano.final(state, plain=True)
    l = nano.mtp["layer"]
    out.append((l.self_attn, model.mix(nano.stem(X, F.pad(ids[:, 1:], (0, 1), value=config.EOT)), None, None, *model.mix_of(l.attn_hyper_connection))[1]))
    return out, ctx


def distill_loss(m, x, ctx, picks):
    """the indexer m.indexer learns to score blocks of four keys as the attention of all heads weighs them; picks: query positions"""
    doc, cos, sin = ctx[0], ctx[3], ctx[4]
    B, T, _ = x.shape
    R, I = config.TEXT["indexer_compress_ratio"], config.TEXT["indexer_head_dim"]
    with torch.no_grad():
        q, k, _, _ = model.heads_of(x, cos, sin, *model.heads_args(m))
        q = q[:, picks].float(); k = k.float().repeat_interleave(q.shape[2] // k.shape[2], 2)
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) * m.head_dim ** -0.5
        ok = (doc[:, picks, None] == doc[:, None, :]) & (torch.arange(T, device=x.device)[None, :] <= picks[:, None])
        a = s.masked_fill(~ok[:, None], float("-inf")).softmax(-1).mean(1)
        target = a.view(B, len(picks), T // R, R).sum(-1)
        last = (torch.arange(T // R, device=x.device) * R + R - 1)[None, :] <= picks[:, None]
        use = ok.view(B, len(picks), T // R, R).all(-1) & last
        target = target * use
        target = target / target.sum(-1, keepdim=True).clamp_min(1e-6)
    ix = m.indexer
    qk = F.linear(x, ix.index_qk_proj.weight)
    n = config.TEXT["indexer_n_heads"]
    qi = model.rotate(model.rms(qk[..., :n * I].unflatten(-1, (n, I)), ix.q_layernorm.weight), cos, sin)[:, picks]
    ki = qk[..., n * I:].float().view(B, T // R, R, I).mean(2, keepdim=True)
    ki = model.rotate(model.rms(ki, ix.k_layernorm.weight), cos[::R], sin[::R])[:, :, 0]
    score = torch.relu(torch.einsum("bqhd,bkd->bhqk", qi, ki)).sum(1) / math.sqrt(I)
    logp = score.masked_fill(~use, -1e4).log_softmax(-1)
    return -(target * logp).sum(-1).mean()


def schedule(f):
    """learning rate against the finished fraction of the run"""
    if f < 0.02:
        return f / 0.02
    if f < 0.5:
        return 1.0
    return max(0.02, (1 - f) / 0.5)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True); ap.add_argument("--seconds", type=float, required=True); ap.add_argument("--resume"); ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--export-every", type=float, default=240); ap.add_argument("--workers", type=int, default=20); ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--peak", type=float, default=PEAK); ap.add_argument("--grid-from", type=float, default=0.66); ap.add_argument("--late-from", type=float, default=0.66)
    ap.add_argument("--deep-from", type=float, default=0.6); ap.add_argument("--index-from", type=float, default=0.3); ap.add_argument("--no-record", action="store_true")
    ap.add_argument("--cache", help="file with compiled code: read if it is there, else written after the first steps")
    ap.add_argument("--profile", action="store_true", help="print where the time of two steps goes")
    ap.add_argument("--steps", type=int, default=0, help="stop after so many steps and write nothing but --cache")
    ap.add_argument("--until", type=float, default=0, help="unix time at which to stop, whatever --seconds says")
    a = ap.parse_args()
    born = time.time()
    os.makedirs(a.out, exist_ok=True)
    ck = a.out + "/checkpoint"
    say = lambda *x: print(f"[{time.time() - born:7.1f}]", *x, flush=True)
    if not os.path.exists(ck + "/tokenizer.json"):
        if a.resume and a.resume.endswith(".ninfer"):
            import artifact
            os.makedirs(ck, exist_ok=True)
            for name, raw in artifact.read(a.resume)[1].items():
                if name != "chat_template.jinja":
                    open(f"{ck}/{name}", "wb").write(raw)
            shutil.copy(data.HERE + "/template.jinja", ck + "/chat_template.jinja")
        elif a.resume:
            os.makedirs(ck, exist_ok=True)
            for f in os.listdir(a.resume):
                if not f.endswith(".safetensors"):
                    shutil.copy(f"{a.resume}/{f}", ck)
        else:
            export.encoder()
            with open(a.out + "/corpus_tokenizer.txt", "w") as f:
                f.write("\n".join(data.corpus()))
            say("tokenizer ids", export.write_frontend(ck, a.out + "/corpus_tokenizer.txt"))
    state = a.out + "/state.pt"
    seed = a.seed + (int(os.path.getmtime(state)) if os.path.exists(state) else 0)       # other documents after a pause
    stream = data.Stream(ck + "/tokenizer.json", seed, a.workers, ROWS, LENGTH)     # before CUDA starts: the workers are forked
    torch.manual_seed(a.seed); torch.set_float32_matmul_precision("high")
    nano = model.Nano().cuda()
    initialise(nano)
    opt = optim.Both(nano)
    used = 0.0
    if os.path.exists(state):
        s = torch.load(state, map_location="cuda")
        with torch.no_grad():
            for n, p in nano.named_parameters():
                p.copy_(s["weights"][n])
        opt.load(s["optim"]); used = s["used"]
        say("resumed state, seconds used", used)
    elif a.resume:
        (export.read_artifact if a.resume.endswith(".ninfer") else export.read_checkpoint)(nano, a.resume); say("resumed weights of", a.resume)
    say("parameters", sum(p.numel() for n, p in nano.named_parameters() if ".visual." not in n), "trained", sum(p.numel() for p in opt.trained))
    if not a.no_compile:
        if a.cache and os.path.exists(a.cache):
            try:
                torch.compiler.load_cache_artifacts(open(a.cache, "rb").read()); say("compiled code read")
            except Exception:
                traceback.print_exc()
        nano.compile()
    grid = export.Grid(nano)
    ready, stop = queues.Queue(8), threading.Event()
    threading.Thread(target=loader, args=(stream, ready, stop), daemon=True).start()
    place = [torch.empty_like(x, device="cuda") for x in ready.get()]                # where a step finds its batch
    lr = torch.zeros((), device="cuda")

    def learn(on_grid, deep):
        for p in opt.trained:
            p.grad = None
        if on_grid:
            grid.__enter__()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            m, d, bal, s = losses(nano, *widen(*place), deep=deep)
            loss = m + 0.3 * d + 0.003 * bal
        loss.backward()
        if on_grid:
            grid.__exit__()
        opt.step(lr)
        return m.detach(), d.detach(), bal.detach(), s

    def attend():
        """a step of the indexers"""
        ids, _, doc, _ = (x[:4] for x in widen(*place))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            seen, ctx = probes(nano, ids, doc)
            picks = torch.randint(64, LENGTH, (192,), device="cuda")
            loss = sum(distill_loss(at, x, ctx, picks) for at, x in seen) / len(seen)
        loss.backward()
        opt.distill.step(); opt.distill.zero_grad(set_to_none=True)
        return loss.detach()

    recorded = {}

    def call(f, *args):
        key = (f.__name__, *args)
        if key not in recorded:
            recorded[key] = Recorded(lambda: f(*args), say, -1 if a.no_record else 3)
        return recorded[key]()

    def save(final=False):
        t = time.time()
        try:
            torch.save(dict(weights={n: p.detach() for n, p in nano.named_parameters()}, optim=opt.state(), used=used), a.out + "/state.tmp")
            os.replace(a.out + "/state.tmp", a.out + "/state.pt")
            tmp = a.out + "/checkpoint.tmp"
            shutil.rmtree(tmp, ignore_errors=True); shutil.copytree(ck, tmp)
            say("export", export.write_checkpoint(nano, tmp), "seconds", round(time.time() - t, 1))
            old = a.out + "/checkpoint.old"
            shutil.rmtree(old, ignore_errors=True); os.rename(ck, old); os.rename(tmp, ck)
        except Exception:
            traceback.print_exc()

    step, tokens, sums, t0, exported, last = 0, 0, 0, None, time.time(), time.time()
    begin = time.time()
    index_loss = None
    while True:
        now = time.time()
        if os.path.exists(a.out + "/seconds") and step % 50 == 0:          # the plan may change under way
            a.seconds = float(open(a.out + "/seconds").read() or a.seconds)
        spent = used + (now - begin if t0 is not None else 0)
        if t0 and step % 20 == 0 and os.path.exists(a.out + "/deadline"):
            a.seconds = spent + max(0.0, float(open(a.out + "/deadline").read() or 0) - now)
        f = min(1.0, spent / a.seconds)
        if f >= 1 or (a.until and now > a.until) or step % 20 == 0 and os.path.exists(a.out + "/stop"):
            break
        stream.late.value = int(f >= a.late_from)
        if a.profile and step in (12, 14):
            if step == 12:
                prof = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]); prof.__enter__()
            else:
                torch.cuda.synchronize(); prof.__exit__(None, None, None)

                for key in ("self_device_time_total", "self_cuda_time_total"):
                    try:
                        say("profile\n" + prof.key_averages().table(sort_by=key, row_limit=32, max_name_column_width=70)); break
                    except Exception as e:
                        say("no profile by", key, e)
                last = time.time(); tokens = 0; sums = 0
        for x, y in zip(place, ready.get()):
            x.copy_(y, non_blocking=True)
        lr.fill_(a.peak * schedule(f))
        on_grid = f >= a.grid_from
        m, d, bal, s = call(learn, on_grid, f >= a.deep_from)
        if f >= a.index_from and step % 16 == 0:
            index_loss = call(attend)
        if step % 4 == 0:                                                              # the clock must not run ahead of the device
            torch.cuda.synchronize()
        sums = sums + s
        step += 1; tokens += ROWS * LENGTH
        if a.steps and step >= a.steps:
            torch.cuda.synchronize(); say("step", step, "done; since the last report", round(time.time() - last, 2), "s", tokens, "tokens")
            stream.stop(); os._exit(0)
        if step < 3:
            torch.cuda.synchronize(); say("step", step)
        if step == 3:
            torch.cuda.synchronize()
            say("three steps done; memory GB", round(torch.cuda.max_memory_allocated() / 1e9, 1), "loss", float(m))
            if a.cache and not os.path.exists(a.cache):
                try:
                    blob, info = torch.compiler.save_cache_artifacts()
                    open(a.cache, "wb").write(blob); say("compiled code written", len(blob))
                except Exception:
                    traceback.print_exc()
            t0 = begin = last = time.time(); tokens = 0; sums = 0
        if t0 and time.time() - last > 10:
            x = sums.cpu().tolist(); dt = time.time() - last
            say(f"step {step} f {f:.3f} tok/s {tokens / dt:,.0f} lr {a.peak * schedule(f):.5f} main {float(m):.3f} draft {float(d):.3f} bal {float(bal):.3f} idx {float(index_loss) if index_loss is not None else 0:.3f} queue {ready.qsize()} grid {int(on_grid)} |",
                " ".join(f"{k}:{r[1] / max(1, r[0]):.3f}/{r[2] / max(1, r[0]):.3f}/{r[3] / max(1, r[0]):.2f}" for k, r in zip(data.KINDS, x) if r[0]))
            last = time.time(); tokens = 0; sums = 0
        if t0 and time.time() - exported > a.export_every:
            torch.cuda.synchronize()
            pause = time.time()
            used_before = used; used = spent
            save()
            used = used_before; begin += time.time() - pause
            exported = last = time.time(); tokens = 0; sums = 0
    used = min(spent, a.seconds)
    save(True)
    stop.set(); stream.stop()
    if not os.path.exists(a.out + "/stop"):
        open(a.out + "/done", "w").write("1")
    say("done; steps", step)
    os._exit(0)                                          # compilers' helpers may not want to end


if __name__ == "__main__":
    main()
