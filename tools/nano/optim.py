"""Optimisers: Muon for the matrices (orthogonalised momentum, Jordan 2024; step size as in Moonlight 2025), AdamW for the rest."""
import torch

SMALL = ("embed_tokens", "lm_head", "ngram_embedding", "in_proj_a", "in_proj_b", "block_inject_weight", "gate.weight", "shared_expert_gate", "conv1d")


@torch.no_grad()
def orthogonal(G, steps=5):
    """nearest semi-orthogonal matrix, roughly, of every G [N,r,c], by a quintic Newton-Schulz iteration in bf16"""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.bfloat16()
    tall = X.shape[-2] > X.shape[-1]
    if tall:
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return (X.mT if tall else X).float()


class Muon:
    def __init__(self, params, momentum=0.95, decay=0.02):
        self.momentum, self.decay = momentum, decay
        self.groups = {}
        for p in params:
            self.groups.setdefault(tuple(p.shape[-2:]), []).append(p)
        self.buf = {}

    @torch.no_grad()
    def step(self, lr):
        """lr: a tensor on the device, so that a recorded step can be given another one"""
        for shape, ps in self.groups.items():
            g = torch.cat([p.grad.reshape(-1, *shape) for p in ps])
            if shape not in self.buf:
                self.buf[shape] = torch.zeros_like(g)
            m = self.buf[shape]
            m.lerp_(g, 1 - self.momentum)
            u = orthogonal(g.lerp(m, self.momentum)) * (0.2 * max(shape) ** 0.5)
            parts = (u * lr).split([p.numel() // (shape[0] * shape[1]) for p in ps])
            torch._foreach_mul_(ps, 1 - lr * self.decay)
            torch._foreach_sub_(ps, [x.view_as(p) for x, p in zip(parts, ps)])


class Both:
    """lr scales: Muon `lr`, AdamW 0.6 `lr`; the indexers have an AdamW of their own, since only distillation trains them"""

    def __init__(self, nano):
        muon, adam, index = [], [], []
        for name, p in nano.named_parameters():
            if ".visual." in name:
                p.requires_grad_(False)
            elif ".indexer." in name:
                index.append(p)
            elif p.dim() >= 2 and not any(s in name for s in SMALL):
                muon.append(p)
            else:
                adam.append(p)
        self.trained = muon + adam
        self.index = index
        self.muon = Muon(muon)
        self.adam = torch.optim.AdamW(adam, lr=torch.tensor(1e-3, device=adam[0].device), betas=(0.9, 0.97), eps=1e-10, weight_decay=0.0, fused=True, capturable=True)
        self.distill = torch.optim.AdamW(index, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, fused=True, capturable=True)

    def step(self, lr):
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0, foreach=True)
        for g in self.adam.param_groups:
            g["lr"] = lr * 0.6
        self.muon.step(lr)
        self.adam.step()

    def state(self):
        return dict(muon=self.muon.buf, adam=self.adam.state_dict(), distill=self.distill.state_dict())

    def load(self, s):
        self.muon.buf = s["muon"]; self.adam.load_state_dict(s["adam"]); self.distill.load_state_dict(s["distill"])
