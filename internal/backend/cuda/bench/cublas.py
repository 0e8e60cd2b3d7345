"""cuBLAS yardstick: BF16 products of few rows and of many, through PyTorch, in graphs of launches over rotated weights."""
import torch


def timed(n, k, m, launches):
    copies = max(2, (256 << 20) // (2 * n * k) + 1)
    ws = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(min(copies, 16))]
    x = torch.randn(m, k, device="cuda").bfloat16()
    f = lambda i: torch.nn.functional.linear(x, ws[i % len(ws)])
    for i in range(3):
        f(i)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(launches):
            f(i)
    ts = []
    for _ in range(11):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) * 1000 / launches)
    t = sorted(ts[2:])[4]
    print(f"cublas bf16 {m}x{n}x{k}: {t:.2f} us, {2 * n * k / t / 1e6:.3f} TB/s of weights, {2 * m * n * k / t / 1e6:.1f} TFLOP/s", flush=True)


for n, k in ((16480, 2560), (2560, 6144), (10240, 320)):
    for m in (1, 8):
        timed(n, k, m, 60)
timed(248320, 2560, 1, 6)
timed(16384, 2560, 8192, 6)
