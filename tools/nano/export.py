"""Grids of the stored formats, the radixark checkpoint and the golden data of nano.

The encoder is the one of tools/reference/make_golden.py. `represented` gives the same values on the GPU for training on the grid.
"""
import json, math, os, sys

import torch
from safetensors.torch import load_file, save_file

import config

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "reference"))
TABLE_SCALE = 1 / 128
TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.weight"


def encoder():
    keep = torch.Tensor.topk
    import make_golden                     # replaces Tensor.topk for its own purposes
    torch.Tensor.topk = keep
    return make_golden.nvfp4


def nvfp4_values(w):
    """values of w [E,n,k] after NVFP4 with one scale_2 for each of the E matrices"""
    E, n, k = w.shape
    s2 = w.abs().amax((1, 2)).div(6 * 448).view(E, 1, 1)
    blk = w.view(E, n, k // 16, 16)
    sc = ((blk.abs().amax(-1) / 6 / s2).clamp(max=448).to(torch.float8_e4m3fn).float() * s2).unsqueeze(-1)
    q = torch.where(sc > 0, blk / sc, torch.zeros_like(blk))
    a = q.abs().clamp(max=6)
    a = torch.where(a < 2, (a * 2).round() / 2, torch.where(a < 4, a.round(), (a / 2).round() * 2))
    return (torch.copysign(a, q) * sc).view(E, n, k)


def is_fp4(name):
    return ".mlp.experts." in name and not name.startswith("mtp")


@torch.no_grad()
def represented(name, p):
    """the value that the checkpoint will hold for parameter `name` (name as in Nano)"""
    if name.startswith("ref.") and is_fp4(name):
        return nvfp4_values(p)
    if name.endswith(TABLE):
        return (p / TABLE_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).float() * TABLE_SCALE
    return p.to(torch.bfloat16).float()


class Grid:
    """with grid: the parameters have their represented values; after it the exact ones again. Gradients taken inside are those of
    the straight-through estimator for the exact values."""

    def __init__(self, nano):
        items = [(n, p) for n, p in nano.named_parameters() if ".visual." not in n]
        special = lambda n: n.startswith("ref.") and is_fp4(n) or n.endswith(TABLE)
        self.special = [(n, p) for n, p in items if special(n)]
        self.plain = [p for n, p in items if not special(n)]
        self.all = self.plain + [p for _, p in self.special]

        self.exact = [torch.empty_like(p) for p in self.all]
        self.short = [torch.empty_like(p, dtype=torch.bfloat16) for p in self.plain]

    @torch.no_grad()
    def __enter__(self):
        torch._foreach_copy_(self.exact, self.all)
        torch._foreach_copy_(self.short, self.plain)
        torch._foreach_copy_(self.plain, self.short)
        for n, p in self.special:
            p.copy_(represented(n, p))

    @torch.no_grad()
    def __exit__(self, *a):
        torch._foreach_copy_(self.all, self.exact)


MTP_NAMES = {"mtp.norm_e": "mtp.pre_fc_norm_embedding.weight", "mtp.norm_h": "mtp.pre_fc_norm_hidden.weight"}


def published_name(n):
    if n in MTP_NAMES:
        return MTP_NAMES[n]
    if n.startswith("mtp.layer."):
        return "mtp.layers.0." + n[len("mtp.layer."):]
    if n.startswith("mtp.mixer."):
        return "mtp.hyper_connection_mixer." + n[len("mtp.mixer."):]
    return n.removeprefix("ref.")


@torch.no_grad()
def write_checkpoint(nano, out):
    """radixark checkpoint of the exact parameters in two shards; the frontend files must be there already"""
    nvfp4 = encoder()
    os.makedirs(out, exist_ok=True)
    ck, worst = {}, 0.0
    I = config.TEXT["moe_intermediate_size"]
    for n, p in nano.named_parameters():
        w, name = p.detach().float().cpu(), published_name(n)
        if n.startswith("ref.") and is_fp4(n):
            pre = name[:name.index(".experts.") + 9]
            want = nvfp4_values(w)
            for e in range(w.shape[0]):
                pk, sc, s2, dq = nvfp4(w[e])
                worst = max(worst, float((dq - want[e]).abs().max()))
                parts = (("gate_proj", slice(0, I)), ("up_proj", slice(I, 2 * I))) if "gate_up" in n else (("down_proj", slice(None)),)
                for nm, sl in parts:
                    q = f"{pre}{e}.{nm}."
                    ck.update({q + "weight": pk[sl].clone(), q + "weight_scale": sc[sl].clone(), q + "weight_scale_2": s2.clone(), q + "input_scale": torch.tensor(1.0)})
        elif n.endswith(TABLE):
            q = (w / TABLE_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
            parts = config.TEXT["split_ngram_parts"]
            per = w.shape[0] // parts
            stem = name.removesuffix("weight")
            ck[stem + "weight_scale"] = torch.tensor([TABLE_SCALE]).to(torch.bfloat16)
            for i in range(parts):
                ck[f"{stem}shard_{i}.weight"] = q[i * per:(i + 1) * per].clone()
        else:
            ck[name] = w.to(torch.bfloat16)
    emb = nano.text.layers[1].ple.ple_embedding
    for b in ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes"):
        ck["model.language_model.layers.1.ple.ple_embedding." + b] = getattr(emb, b).cpu().clone()
    names = sorted(ck)
    first, size, total = [], 0, sum(t.numel() * t.element_size() for t in ck.values())
    for n in names:
        if size > total / 2:
            break
        first.append(n); size += ck[n].numel() * ck[n].element_size()
    where = {}
    for i, part in enumerate((first, names[len(first):])):
        fn = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({n: ck[n].contiguous() for n in part}, f"{out}/{fn}", metadata={"format": "pt"})
        where.update({n: fn for n in part})
    json.dump({"metadata": {"total_size": total}, "weight_map": where}, open(out + "/model.safetensors.index.json", "w"))
    json.dump(config.published(), open(out + "/config.json", "w"), indent=1)
    return dict(bytes=total, grid_difference=worst, tensors=len(ck))


@torch.no_grad()
def read_checkpoint(nano, folder):
    """parameters from a checkpoint that write_checkpoint made"""
    ck = {}
    for fn in sorted(os.listdir(folder)):
        if fn.endswith(".safetensors"):
            ck.update(load_file(f"{folder}/{fn}"))
    values = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])
    def fp4(q):
        b = ck[q + "weight"]
        code = torch.stack([b & 15, b >> 4], -1).flatten(1).long()
        v = values[code & 7] * torch.where(code >= 8, -1.0, 1.0)
        return (v.view(v.shape[0], -1, 16) * ck[q + "weight_scale"].float().unsqueeze(-1) * ck[q + "weight_scale_2"]).flatten(1)
    for n, p in nano.named_parameters():
        name = published_name(n)
        if n.startswith("ref.") and is_fp4(n):
            pre = name[:name.index(".experts.") + 9]
            nm = ("gate_proj", "up_proj") if "gate_up" in n else ("down_proj",)
            w = torch.stack([torch.cat([fp4(f"{pre}{e}.{x}.") for x in nm]) for e in range(p.shape[0])])
        elif n.endswith(TABLE):
            stem = name.removesuffix("weight")
            w = torch.cat([ck[f"{stem}shard_{i}.weight"].float() for i in range(config.TEXT["split_ngram_parts"])]) * ck[stem + "weight_scale"].float()
        else:
            w = ck[name].float()
        p.copy_(w.view_as(p).to(p.device))


@torch.no_grad()
def read_artifact(nano, path):
    """parameters from a finished artifact; the vision tower, which is not trained, keeps its random weights"""
    import artifact
    tensors, _ = artifact.read(path)
    for n, p in nano.named_parameters():
        if ".visual." not in n:
            p.copy_(torch.from_numpy(artifact.value(tensors, published_name(n)).copy()).view_as(p).to(p.device))


def write_frontend(out, corpus_file):
    """tokenizer trained on the corpus, and the other five files"""
    from tokenizers import Tokenizer, Regex, decoders, models, normalizers, pre_tokenizers, trainers, AddedToken
    import make_frontend as mf
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC(); t.decoder = decoders.ByteLevel()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(mf.PRETOKENIZE_REGEX), behavior="isolated", invert=False), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    added = [AddedToken(s, special=s not in mf.NOT_SPECIAL, normalized=False) for s in mf.SPECIAL]
    t.train([corpus_file], trainers.BpeTrainer(vocab_size=config.IDS, special_tokens=added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    os.makedirs(out, exist_ok=True)
    t.save(out + "/tokenizer.json")
    w = lambda f, o: open(f"{out}/{f}", "w").write(json.dumps(o, indent=1, ensure_ascii=False))
    w("tokenizer_config.json", dict(tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=config.TEXT["max_position_embeddings"], add_prefix_space=False))
    w("generation_config.json", dict(do_sample=True, eos_token_id=[config.IM_END, config.EOT], pad_token_id=config.EOT, temperature=0.6, top_k=20, top_p=0.95))
    pp = dict(patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[.5] * 3, image_std=[.5] * 3, size=dict(shortest_edge=4096, longest_edge=65536))
    w("preprocessor_config.json", dict(pp, image_processor_type="Qwen2VLImageProcessorFast", processor_class="Qwen3VLProcessor"))
    w("video_preprocessor_config.json", dict(pp, size=dict(shortest_edge=4096, longest_edge=262144), video_processor_type="Qwen3VLVideoProcessor", fps=2, min_frames=4, max_frames=768))
    open(out + "/chat_template.jinja", "w").write(open(os.path.join(HERE, "template.jinja")).read())
    return t.get_vocab_size()

