"""The reference implementation's modules, run fast over packed rows.

All parameters live in modules of transformers' qwen4_exp. Its forward pass treats one sequence at a time, loops over experts and
queries, and cannot pack. Blocks below compute the same function of the same parameters (check_parity compares) for rows of several
documents: no document sees another, through attention, convolutions, delta-rule state or n-grams. Inside the indexer's budget every
key is selected, so attention is dense here.
"""
import copy, math

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen4_exp import configuration_qwen4_exp as C
from transformers.models.qwen4_exp import modeling_qwen4_exp as M

import config

EPS, H, S = 1e-6, config.TEXT["hidden_size"], config.TEXT["hc_count"]


def rms(x, w):
    """x * (1 + w) / rms in float32"""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1 + w.float())


def mix(m, X):
    """hyper-connection: streams [B,T,S,H] to the block's input and, unless it is the last mixer, injection weights [B,T,S]"""
    n = rms(X, m.hc_norm.weight.view(S, H))
    flat = n.flatten(-2)
    up = torch.sigmoid(F.linear(F.silu(F.linear(flat, m.input_mix_weight_down.weight) / S), m.input_mix_weight_up.weight))
    x = (up.unflatten(-1, (S, H)) * n).mean(-2)
    if m.block_inject_weight is None:
        return x
    return x, 2 * torch.sigmoid(F.linear(flat, m.block_inject_weight.weight) / S)


def same(doc, j):
    """[B,T]: position t-j belongs to t's document"""
    return F.pad(doc[:, :-j] == doc[:, j:], (j, 0))


def conv(x, w, doc, dilation=1):
    """causal depthwise convolution of x [B,T,C] by w [C,1,K] within documents"""
    K = w.shape[-1]
    y = x * w[:, 0, K - 1]
    for j in range(1, K):
        d = j * dilation
        y = y + F.pad(x[:, :-d], (0, 0, d, 0)) * same(doc, d).unsqueeze(-1) * w[:, 0, K - 1 - j]
    return y


def unit_lower_inverse(A):
    """(I + A)^-1 for strictly lower triangular A [..., n, n], n a power of two from 8: powers inside blocks of 8, block substitution above.
    Powers of larger blocks would grow before they cancel."""
    n, b = A.shape[-1], 8
    D = torch.stack([A[..., i:i + b, i:i + b] for i in range(0, n, b)], -3)
    P = -D
    inv = P + torch.eye(b, device=A.device, dtype=A.dtype)
    for _ in range(2):
        P = P @ P
        inv = inv + inv @ P
    while b < n:
        X, Y = inv[..., 0::2, :, :], inv[..., 1::2, :, :]
        low = torch.stack([A[..., i + b:i + 2 * b, i:i + b] for i in range(0, n, 2 * b)], -3)
        top = torch.cat([X, torch.zeros_like(X)], -1)
        inv = torch.cat([top, torch.cat([-(Y @ low @ X), Y], -1)], -2)
        b *= 2
    return inv.squeeze(-3)


def delta(q, k, v, g, beta, chunk=128):
    """gated delta rule. q, k [B,T,h,dk], v [B,T,n,dv], g, beta [B,T,n]; the value heads share the key heads in groups.
    A chunk maps the state S to A S + B; a scan over the chunks in log2 steps finds the state before each"""
    B, T, h, dk = k.shape
    n = v.shape[2]
    N = T // chunk
    cut = lambda x: x.reshape(B, N, chunk, *x.shape[2:]).transpose(2, 3)         # [B,N,heads,chunk,...]
    unit = lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
    q, k = cut(unit(q) * dk ** -0.5), cut(unit(k))
    q, k = (x.repeat_interleave(n // h, 2) for x in (q, k))
    v, g, beta = cut(v), cut(g), cut(beta).unsqueeze(-1)
    c = g.cumsum(-1)
    upper = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(upper, float("-inf")).exp()
    kb = k * beta
    inv = unit_lower_inverse((kb @ k.transpose(-1, -2) * decay).tril(-1))
    u, w = inv @ (v * beta), inv @ (kb * c.exp().unsqueeze(-1))
    inner = q @ k.transpose(-1, -2) * decay
    q = q * c.exp().unsqueeze(-1)
    k = (k * (c[..., -1:] - c).exp().unsqueeze(-1)).transpose(-1, -2)
    M_ = c[..., -1].exp()[..., None, None] * torch.eye(dk, device=q.device) - k @ w
    S_ = k @ u
    d = 1
    while d < N:
        S_ = torch.cat([S_[:, :d], M_[:, d:] @ S_[:, :-d] + S_[:, d:]], 1)
        M_ = torch.cat([M_[:, :d], M_[:, d:] @ M_[:, :-d]], 1)
        d *= 2
    before = torch.cat([torch.zeros_like(S_[:, :1]), S_[:, :-1]], 1)
    fresh = u - w @ before
    return (q @ before + inner @ fresh).transpose(2, 3).reshape(B, T, n, -1)


def gdn(m, x, doc, fresh):
    """x [B,T,H]; fresh [B,T] is true at the first token of a document"""
    B, T, _ = x.shape
    z, b, a = F.linear(x, m.in_proj_z.weight), F.linear(x, m.in_proj_b.weight), F.linear(x, m.in_proj_a.weight)
    qkv = F.silu(conv(F.linear(x, m.in_proj_qkv.weight), m.conv1d.weight, doc))
    q, k, v = qkv.float().split([m.key_dim, m.key_dim, m.value_dim], -1)
    g = -m.A_log.float().exp() * F.softplus(a.float() + m.dt_bias)
    g = torch.where(fresh.unsqueeze(-1), g - 60, g)                              # e^-60: the state of the last document is gone
    with torch.autocast("cuda", enabled=False):
        o = delta(q.view(B, T, -1, m.head_k_dim), k.view(B, T, -1, m.head_k_dim), v.view(B, T, -1, m.head_v_dim), g, b.float().sigmoid())
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + EPS) * m.norm.weight
    o = o * torch.sigmoid(z.float()).view(B, T, -1, m.head_v_dim)
    return F.linear(o.flatten(-2), m.out_proj.weight)


def rotate(x, cos, sin):
    """x [B,T,h,d], cos and sin [T,r]"""
    r = cos.shape[-1]
    a, rest = x[..., :r], x[..., r:]
    half = torch.cat([-a[..., r // 2:], a[..., :r // 2]], -1)
    return torch.cat([a * cos[:, None] + half * sin[:, None], rest], -1)


def qkv_of(m, x, cos, sin):
    B, T, _ = x.shape
    q, gate = F.linear(x, m.q_proj.weight).view(B, T, -1, 2 * m.head_dim).chunk(2, -1)
    q = rotate(rms(q, m.q_norm.weight), cos, sin)
    k = rotate(rms(F.linear(x, m.k_proj.weight).view(B, T, -1, m.head_dim), m.k_norm.weight), cos, sin)
    return q, k, F.linear(x, m.v_proj.weight).view(B, T, -1, m.head_dim), gate


def attention(m, x, mask, cos, sin):
    B, T, _ = x.shape
    q, k, v, gate = qkv_of(m, x, cos, sin)
    rep = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(rep, 2), v.repeat_interleave(rep, 2)
    dt = v.dtype
    o = F.scaled_dot_product_attention(q.to(dt).transpose(1, 2), k.to(dt).transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    o = o.transpose(1, 2).reshape(B, T, -1) * torch.sigmoid(gate.reshape(B, T, -1))
    return F.linear(o, m.o_proj.weight)


def moe(m, x):
    """x [B,T,H]; also the balance loss. Every expert runs on every token: with so few of them that is the fastest way"""
    E, I, K = config.TEXT["num_experts"], config.TEXT["moe_intermediate_size"], config.TEXT["num_experts_per_tok"]
    p = F.linear(x, m.gate.weight).float().softmax(-1)
    top, idx = torch.topk(p, K, -1)
    sel = torch.zeros_like(p).scatter(-1, idx, 1.0)
    w = p * sel
    w = w / w.sum(-1, keepdim=True)
    gu = F.linear(x, m.experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (E, 2 * I))
    h = F.silu(gu[..., :I]) * gu[..., I:] * w.unsqueeze(-1).to(gu.dtype)
    y = F.linear(h.flatten(-2), m.experts.down_proj.transpose(0, 1).flatten(1))
    s = m.shared_expert
    y = y + torch.sigmoid(F.linear(x, m.shared_expert_gate.weight)) * F.linear(F.silu(F.linear(x, s.gate_proj.weight)) * F.linear(x, s.up_proj.weight), s.down_proj.weight)
    balance = E / K * (sel.mean((0, 1)) * p.mean((0, 1))).sum()
    return y, balance


def ngram_rows(m, ids, doc):
    """table rows [B,T,16] of every token: hashes of the last two and three tokens of its document"""
    ids = ids.long()
    back = lambda j: torch.where(same(doc, j), F.pad(ids[:, :-j], (j, 0)), config.EOT)
    mul, out = m.layer_multipliers, []
    two = (ids * mul[0]) ^ (back(1) * mul[1])
    three = two ^ (back(2) * mul[2])
    n = config.TEXT["heads_per_ngram"]
    for i, x in enumerate((two, three)):
        sl = slice(i * n, (i + 1) * n)
        out.append(torch.remainder(x.unsqueeze(-1), m.ngram_heads_vocab_sizes[sl]) + m.ngram_heads_offsets[sl])
    return torch.cat(out, -1)


def ple(m, X, rows, doc):
    e = F.embedding(rows, m.ple_embedding.ngram_embedding.weight).flatten(-2)
    key = rms(F.linear(e, m.key_proj.weight).unflatten(-1, (S, H)), m.norm_key.weight.view(S, H))
    value = F.linear(e, m.value_proj.weight)
    query = rms(X, m.norm_query.weight.view(S, H))
    gate = (key * query).sum(-1, keepdim=True) / math.sqrt(H)
    gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
    v = torch.sigmoid(gate) * value.unsqueeze(-2).float()
    c = F.silu(conv(rms(v, m.norm_conv.weight.view(S, H)).flatten(-2), m.conv1d.weight, doc, config.TEXT["ngram_size"]))
    return v + c.unflatten(-1, (S, H))


class Block(nn.Module):
    """one decoder layer over streams [B,T,S,H] in float32"""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.linear = hasattr(layer, "linear_attn")
        self.has_ple = layer.ple is not None

    def forward(self, X, doc, fresh, mask, cos, sin, rows):
        l = self.layer
        if self.has_ple:
            X = X + ple(l.ple, X, rows, doc)
        x, inj = mix(l.attn_hyper_connection, X)
        y = gdn(l.linear_attn, x, doc, fresh) if self.linear else attention(l.self_attn, x, mask, cos, sin)
        X = X + y.float().unsqueeze(-2) * inj.float().unsqueeze(-1)
        x, inj = mix(l.mlp_hyper_connection, X)
        y, balance = moe(l.mlp, x)
        return X + y.float().unsqueeze(-2) * inj.float().unsqueeze(-1), balance


def make_config():
    return C.Qwen4ExpConfig(text_config=config.TEXT, vision_config=config.VISION, **config.TOP)


class Nano(nn.Module):
    """the whole model: the reference's modules and the MTP head made of them"""

    def __init__(self):
        super().__init__()
        cfg = make_config()
        self.ref = M.Qwen4ExpForConditionalGeneration._from_config(cfg, attn_implementation="eager", dtype=torch.float32)
        full = next(t for t in cfg.text_config.layer_types if t != "linear_attention")
        mt = copy.deepcopy(cfg.text_config)
        mt.num_hidden_layers, mt.layer_types, mt.ple_layer_ids = 1, [full], []
        mt._attn_implementation = "eager"
        self.mtp = nn.ModuleDict(dict(layer=M.Qwen4ExpTextDecoderLayer(mt, 0), mixer=M.Qwen4ExpTextGatedResidual(mt, use_combine=False),
                                      fc_embedding=nn.Linear(H, H, bias=False), fc_hidden=nn.Linear(H, H, bias=False)))
        self.mtp.norm_e, self.mtp.norm_h = nn.Parameter(torch.zeros(H)), nn.Parameter(torch.zeros(S * H))
        self.text = self.ref.model.language_model
        for c in (cfg.text_config, mt):
            c._experts_implementation = "eager"
        self.blocks = [Block(l) for l in self.text.layers]           # plain lists: the parameters are registered above
        self.mtp_block = [Block(self.mtp["layer"])]
        r = int(config.TEXT["head_dim"] * config.TEXT["partial_rotary_factor"])
        self.inv = 1.0 / (config.TEXT["rope_parameters"]["rope_theta"] ** (torch.arange(0, r, 2).float() / r))

    def compile(self):
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.accumulated_recompile_limit = 1024
        for b in self.blocks + self.mtp_block:
            b.compile(dynamic=False)
        self.head_loss = torch.compile(self.head_loss, dynamic=False)

    def context(self, ids, doc):
        B, T = ids.shape
        fresh = ~same(doc, 1)
        mask = (doc[:, :, None] == doc[:, None, :]) & torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        ang = torch.arange(T, device=ids.device).float()[:, None] * self.inv.to(ids.device)
        ang = torch.cat([ang, ang], -1)
        rows = ngram_rows(self.text.layers[config.TEXT["ple_layer_ids"][0] - 1].ple.ple_embedding, ids, doc)
        return doc, fresh, mask[:, None], ang.cos(), ang.sin(), rows

    def trunk(self, ids, ctx, plain=False):
        """streams before the last mixer, balance loss; plain: never the compiled code"""
        X = self.text.embed_tokens(ids).float().unsqueeze(2).expand(-1, -1, S, -1).contiguous()
        total = 0.0
        for b in self.blocks:
            X, balance = (b.forward if plain else b)(X, *ctx)
            total = total + balance
        return X, total

    def logits(self, X, mixer=None):
        return F.linear(mix(mixer or self.text.hyper_connection_mixer, X), self.ref.lm_head.weight)

    def stem(self, X, nxt):
        """MTP input [B,T,S,H]: streams X at t and the token after it"""
        e = F.linear(rms(self.text.embed_tokens(nxt), self.mtp.norm_e), self.mtp["fc_embedding"].weight)
        h = rms(X.flatten(-2), self.mtp.norm_h).unflatten(-1, (S, H))
        return (F.linear(h, self.mtp["fc_hidden"].weight) + e.unsqueeze(2)).float()

    def mtp_trunk(self, X, nxt, ctx):
        return self.mtp_block[0](self.stem(X, nxt), *ctx)

    def head_loss(self, X, target, weight, which):
        """loss of every position [B,T] times its weight, and whether the best guess is right"""
        lg = self.logits(X, self.mtp["mixer"] if which else None).float()
        loss = F.cross_entropy(lg.flatten(0, 1), target.flatten(), reduction="none").view_as(weight)
        return loss * weight, lg.detach().argmax(-1) == target


def visible(self, hidden_states, position_embeddings, attention_mask, past_key_values):
    """the indexer when the budget holds every key: nothing is masked"""
    return torch.ones_like(attention_mask) if attention_mask.dtype == torch.bool else torch.zeros_like(attention_mask)


class dense_reference:
    """the reference's forward pass without the search for keys that are all selected anyway"""

    def __enter__(self):
        self.old = M.Qwen4ExpTextQSAIndexer.forward
        M.Qwen4ExpTextQSAIndexer.forward = visible

    def __exit__(self, *a):
        M.Qwen4ExpTextQSAIndexer.forward = self.old


@torch.no_grad()
def check_parity(nano, ids):
    """largest difference of logits between the reference (its own indexer included) and the blocks above, for one sequence"""
    old = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    ids = torch.as_tensor(ids, device="cuda")[None]
    want = nano.ref(input_ids=ids, use_cache=False).logits[0]
    with dense_reference():
        dense = nano.ref(input_ids=ids, use_cache=False).logits[0]
    T = ids.shape[1]
    pad = (T + 127) // 128 * 128
    # the same sequence twice in a row, behind another document
    two = torch.full((1, 2 * pad), config.EOT, device="cuda"); doc = torch.full((1, 2 * pad), -1, device="cuda")
    two[0, :T] = ids; doc[0, :T] = 0; two[0, T:2 * T] = ids; doc[0, T:2 * T] = 1
    got = nano.logits(nano.trunk(two, nano.context(two, doc), plain=True)[0])[0]
    torch.set_float32_matmul_precision(old)
    return dict(dense=float((dense - want).abs().max()), first=float((got[:T] - want).abs().max()), second=float((got[T:2 * T] - want).abs().max()), scale=float(want.abs().max()))
