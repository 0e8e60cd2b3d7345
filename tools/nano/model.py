"""The reference implementation's modules, run fast over packed rows.

All parameters live in modules of transformers' qwen4_exp. Its forward pass treats one sequence at a time, loops over experts and
queries, and cannot pack. The functions below compute the same function of the same parameters (check_parity compares) for rows of several
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


def mix(X, y, inj, norm, down, up, inject):
    """hyper-connection. X [B,T,S,H] streams, to which the last block's output y [B,T,H] is first added with weights inj [B,T,S]
    (both may be None); returns the streams, the next block's input and, unless inject is None, its weights"""
    if y is not None:
        X = X + y.float().unsqueeze(-2) * inj.float().unsqueeze(-1)
    n = rms(X, norm.view(S, H))
    flat = n.flatten(-2)
    u = torch.sigmoid(F.linear(F.silu(F.linear(flat, down) / S), up))
    x = (u.unflatten(-1, (S, H)) * n).mean(-2)
    return X, x, None if inject is None else 2 * torch.sigmoid(F.linear(flat, inject) / S)


def mix_of(m):
    """arguments of mix from a module"""
    return m.hc_norm.weight, m.input_mix_weight_down.weight, m.input_mix_weight_up.weight, None if m.block_inject_weight is None else m.block_inject_weight.weight


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
    """(I + A)^-1 for strictly lower triangular A [..., n, n], n a power of two from 16: powers inside blocks of 16, block substitution above.
    Powers of larger blocks would grow before they cancel."""
    n, b = A.shape[-1], 16
    P = -torch.stack([A[..., i:i + b, i:i + b] for i in range(0, n, b)], -3)
    inv = P + torch.eye(b, device=A.device, dtype=A.dtype)
    for _ in range(3):
        P = P @ P
        inv = inv + inv @ P
    while b < n:
        X, Y = inv[..., 0::2, :, :], inv[..., 1::2, :, :]
        low = torch.stack([A[..., i + b:i + 2 * b, i:i + b] for i in range(0, n, 2 * b)], -3)
        inv = torch.cat([torch.cat([X, torch.zeros_like(X)], -1), torch.cat([-(Y @ low @ X), Y], -1)], -2)
        b *= 2
    return inv.squeeze(-3)


CHUNK = 128


def gdn_pre(x, doc, fresh, w_qkv, w_b, w_a, w_conv, A_log, dt_bias):
    """the parts of the gated delta rule that need no order, in chunks [B*N*n, CHUNK, ...]: system matrix, attention inside chunks, and
    keys, values and queries with their decays; last: decay over a whole chunk. fresh [B,T] is true at a document's first token"""
    B, T, _ = x.shape
    d, n = config.TEXT["linear_key_head_dim"], config.TEXT["linear_num_value_heads"]
    h, N = config.TEXT["linear_num_key_heads"], T // CHUNK
    qkv = F.silu(conv(F.linear(x, w_qkv), w_conv, doc)).float()
    q, k, v = qkv.split([h * d, h * d, n * d], -1)
    g = -A_log.float().exp() * F.softplus(F.linear(x, w_a).float() + dt_bias)
    g = torch.where(fresh.unsqueeze(-1), g - 60, g)                              # e^-60: the state of the last document is gone
    beta = F.linear(x, w_b).float().sigmoid()
    unit = lambda z: z * torch.rsqrt(z.pow(2).sum(-1, keepdim=True) + 1e-6)
    cut = lambda z: z.reshape(B, N, CHUNK, *z.shape[2:]).transpose(2, 3)         # [B,N,heads,CHUNK,...]
    q, k = (cut(unit(z.reshape(B, T, h, d))).repeat_interleave(n // h, 2).flatten(0, 2) for z in (q, k))
    q = q * d ** -0.5
    v, g, beta = cut(v.reshape(B, T, n, d)).flatten(0, 2), cut(g).flatten(0, 2), cut(beta).flatten(0, 2).unsqueeze(-1)
    with torch.autocast("cuda", enabled=False):
        c = g.cumsum(-1)
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
        decay = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
        kb, e = k * beta, c.exp().unsqueeze(-1)
        kt = k.transpose(-1, -2)
        system = torch.bmm(kb, kt) * decay * lower.tril(-1)
        inner = torch.bmm(q, kt) * decay
        return system, inner, v * beta, kb * e, q * e, k * (c[..., -1:] - c).exp().unsqueeze(-1), c[..., -1].exp()[:, None, None]


def gdn_scan(B, system, inner, vb, kb, q, k, last):
    """delta rule over chunks: a chunk maps the state S to M S + U; then what each chunk adds, given the state before it"""
    inv = unit_lower_inverse(system)
    u, w = torch.bmm(inv, vb), torch.bmm(inv, kb)
    kt = k.transpose(-1, -2)
    M_ = (last * torch.eye(k.shape[-1], device=k.device)).baddbmm(kt, w, alpha=-1).unflatten(0, (B, -1, config.TEXT["linear_num_value_heads"]))
    U_ = torch.bmm(kt, u).unflatten(0, (B, -1, config.TEXT["linear_num_value_heads"]))
    N = M_.shape[1]
    M_, U_ = (z.transpose(0, 1).flatten(1, 2).unbind(0) for z in (M_, U_))
    state, before = torch.zeros_like(U_[0]), []
    for i in range(N):
        before.append(state)
        state = torch.baddbmm(U_[i], M_[i], state)
    before = torch.stack(before).unflatten(1, (B, -1)).transpose(0, 1).flatten(0, 2)
    fresh = torch.baddbmm(u, w, before, alpha=-1)
    return torch.baddbmm(torch.bmm(q, before), inner, fresh)


def gdn_post(o, x, w_z, norm, w_out):
    """o [B*N*n, CHUNK, d] to the block's output [B,T,H]"""
    B, T, _ = x.shape
    n = config.TEXT["linear_num_value_heads"]
    o = o.unflatten(0, (B, -1, n)).transpose(2, 3).reshape(B, T, n, -1)
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + EPS) * norm
    o = o * torch.sigmoid(F.linear(x, w_z).float()).view(B, T, n, -1)
    return F.linear(o.flatten(-2), w_out)


def rotate(x, cos, sin):
    """x [B,T,h,d], cos and sin [T,r]"""
    r = cos.shape[-1]
    a, rest = x[..., :r], x[..., r:]
    half = torch.cat([-a[..., r // 2:], a[..., :r // 2]], -1)
    return torch.cat([a * cos[:, None] + half * sin[:, None], rest], -1)


def heads_of(x, cos, sin, w_q, w_k, w_v, q_norm, k_norm):
    B, T, _ = x.shape
    D = config.TEXT["head_dim"]
    q, gate = F.linear(x, w_q).view(B, T, -1, 2 * D).chunk(2, -1)
    q = rotate(rms(q, q_norm), cos, sin)
    k = rotate(rms(F.linear(x, w_k).view(B, T, -1, D), k_norm), cos, sin)
    return q, k, F.linear(x, w_v).view(B, T, -1, D), gate


def attention(x, mask, cos, sin, w_q, w_k, w_v, q_norm, k_norm, w_o):
    B, T, _ = x.shape
    q, k, v, gate = heads_of(x, cos, sin, w_q, w_k, w_v, q_norm, k_norm)
    rep = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(rep, 2), v.repeat_interleave(rep, 2)
    dt = v.dtype
    o = F.scaled_dot_product_attention(q.to(dt).transpose(1, 2), k.to(dt).transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    o = o.transpose(1, 2).reshape(B, T, -1) * torch.sigmoid(gate.reshape(B, T, -1))
    return F.linear(o, w_o)


def heads_args(m):
    return m.q_proj.weight, m.k_proj.weight, m.v_proj.weight, m.q_norm.weight, m.k_norm.weight


def moe(x, w_gate, gate_up, down, s_gate, s_up, s_down, s_weight):
    """x [B,T,H]; also the balance loss. Every expert runs on every token: with so few of them that is the fastest way"""
    E, I, K = config.TEXT["num_experts"], config.TEXT["moe_intermediate_size"], config.TEXT["num_experts_per_tok"]
    p = F.linear(x, w_gate).float().softmax(-1)
    top, idx = torch.topk(p, K, -1)
    sel = torch.zeros_like(p).scatter(-1, idx, 1.0)
    w = p * sel
    w = w / w.sum(-1, keepdim=True)
    gu = F.linear(x, gate_up.flatten(0, 1)).unflatten(-1, (E, 2 * I))
    h = F.silu(gu[..., :I]) * gu[..., I:] * w.unsqueeze(-1).to(gu.dtype)
    y = F.linear(h.flatten(-2), down.transpose(0, 1).flatten(1))
    y = y + torch.sigmoid(F.linear(x, s_weight)) * F.linear(F.silu(F.linear(x, s_gate)) * F.linear(x, s_up), s_down)
    balance = E / K * (sel.mean((0, 1)) * p.mean((0, 1))).sum()
    return y, balance


def moe_args(m):
    s = m.shared_expert
    return m.gate.weight, m.experts.gate_up_proj, m.experts.down_proj, s.gate_proj.weight, s.up_proj.weight, s.down_proj.weight, m.shared_expert_gate.weight


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


def ple(X, y, inj, rows, doc, table, w_key, w_value, norm_key, norm_query, norm_conv, w_conv):
    """n-gram features added to the streams, after the last block's output"""
    X = X + y.float().unsqueeze(-2) * inj.float().unsqueeze(-1)
    e = F.embedding(rows, table).flatten(-2)
    key = rms(F.linear(e, w_key).unflatten(-1, (S, H)), norm_key.view(S, H))
    value = F.linear(e, w_value)
    query = rms(X, norm_query.view(S, H))
    gate = (key * query).sum(-1, keepdim=True) / math.sqrt(H)
    gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
    v = torch.sigmoid(gate) * value.unsqueeze(-2).float()
    c = F.silu(conv(rms(v, norm_conv.view(S, H)).flatten(-2), w_conv, doc, config.TEXT["ngram_size"]))
    return X + v + c.unflatten(-1, (S, H))


def ple_args(m):
    return m.ple_embedding.ngram_embedding.weight, m.key_proj.weight, m.value_proj.weight, m.norm_key.weight, m.norm_query.weight, m.norm_conv.weight, m.conv1d.weight


def stem(X, emb, norm_e, norm_h, w_e, w_h):
    """MTP input: streams X at t and the embedding of the token after it"""
    e = F.linear(rms(emb, norm_e), w_e)
    h = rms(X.flatten(-2), norm_h).unflatten(-1, (S, H))
    return (F.linear(h, w_h) + e.unsqueeze(2)).float()


def head(x, w, target, weight):
    """loss of every position times its weight, and whether the best guess is right"""
    lg = F.linear(x, w).float()
    loss = F.cross_entropy(lg.flatten(0, 1), target.flatten(), reduction="none").view_as(weight)
    return loss * weight, lg.detach().argmax(-1) == target


PLAIN = dict(mix=mix, gdn_pre=gdn_pre, gdn_post=gdn_post, attention=attention, moe=moe, ple=ple, stem=stem, head=head)


def block(f, l, X, y, inj, ctx):
    """one decoder layer l with the functions f; the last block's output comes and goes unadded"""
    doc, fresh, mask, cos, sin, rows = ctx
    if l.ple is not None:
        X, y, inj = f["ple"](X, y, inj, rows, doc, *ple_args(l.ple)), None, None
    X, x, inj = f["mix"](X, y, inj, *mix_of(l.attn_hyper_connection))
    if hasattr(l, "linear_attn"):
        m = l.linear_attn
        parts = f["gdn_pre"](x, doc, fresh, m.in_proj_qkv.weight, m.in_proj_b.weight, m.in_proj_a.weight, m.conv1d.weight, m.A_log, m.dt_bias)
        with torch.autocast("cuda", enabled=False):
            o = gdn_scan(x.shape[0], *parts)
        y = f["gdn_post"](o, x, m.in_proj_z.weight, m.norm.weight, m.out_proj.weight)
    else:
        m = l.self_attn
        y = f["attention"](x, mask, cos, sin, *heads_args(m), m.o_proj.weight)
    X, x, inj = f["mix"](X, y, inj, *mix_of(l.mlp_hyper_connection))
    y, balance = f["moe"](x, *moe_args(l.mlp))
    return X, y, inj, balance


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
        self.ops = PLAIN
        r = int(config.TEXT["head_dim"] * config.TEXT["partial_rotary_factor"])
        self.register_buffer("inv", 1.0 / (config.TEXT["rope_parameters"]["rope_theta"] ** (torch.arange(0, r, 2).float() / r)), persistent=False)

    def compile(self):
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.accumulated_recompile_limit = 1024
        self.ops = {k: torch.compile(f, dynamic=False) for k, f in PLAIN.items()}

    def context(self, ids, doc):
        B, T = ids.shape
        fresh = ~same(doc, 1)
        mask = (doc[:, :, None] == doc[:, None, :]) & torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        ang = torch.arange(T, device=ids.device).float()[:, None] * self.inv
        ang = torch.cat([ang, ang], -1)
        rows = ngram_rows(self.text.layers[config.TEXT["ple_layer_ids"][0] - 1].ple.ple_embedding, ids, doc)
        return doc, fresh, mask[:, None], ang.cos(), ang.sin(), rows

    def trunk(self, ids, ctx, plain=False, see=None):
        """streams before the last mixer as (streams, last output, its weights), balance loss. plain: never the compiled code; see: called with
        each attention module and its input"""
        f = PLAIN if plain else self.ops
        X, y, inj, total = self.text.embed_tokens(ids).float().unsqueeze(2).expand(-1, -1, S, -1).contiguous(), None, None, 0.0
        for l in self.text.layers:
            if see and not hasattr(l, "linear_attn"):
                see(l.self_attn, mix(X, y, inj, *mix_of(l.attn_hyper_connection))[1])
            X, y, inj, balance = block(f, l, X, y, inj, ctx)
            total = total + balance
        return (X, y, inj), total

    def mtp_trunk(self, X, nxt, ctx, plain=False):
        f = PLAIN if plain else self.ops
        X, y, inj, balance = block(f, self.mtp["layer"], self.stem(X, nxt, plain), None, None, ctx)
        return (X, y, inj), balance

    def stem(self, X, nxt, plain=True):
        """MTP input [B,T,S,H] from complete streams X [B,T,S,H] and next tokens [B,T]"""
        return (PLAIN if plain else self.ops)["stem"](X, self.text.embed_tokens(nxt), self.mtp.norm_e, self.mtp.norm_h, self.mtp["fc_embedding"].weight, self.mtp["fc_hidden"].weight)

    def final(self, state, drafting=False, plain=False):
        """complete streams and the vector that the head sees"""
        X, x, _ = (PLAIN if plain else self.ops)["mix"](*state, *mix_of(self.mtp["mixer"] if drafting else self.text.hyper_connection_mixer))
        return X, x

    def logits(self, X, drafting=False):
        """of complete streams"""
        return F.linear(self.final((X, None, None), drafting, True)[1], self.ref.lm_head.weight)


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
    got = nano.logits(nano.final(nano.trunk(two, nano.context(two, doc), plain=True)[0], plain=True)[0])[0]
    torch.set_float32_matmul_precision(old)
    return dict(dense=float((dense - want).abs().max()), first=float((got[:T] - want).abs().max()), second=float((got[T:2 * T] - want).abs().max()), scale=float(want.abs().max()))
