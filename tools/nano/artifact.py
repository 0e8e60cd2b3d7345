"""A finished .ninfer artifact of nano back to training weights, so that a run can start from the committed file alone.

usage: python artifact.py FILE.ninfer DIR    writes the frontend files into DIR and lists what was read

Container version 3, one file: magic, directory length, id; directory (JSON); payload from the next multiple of 4096 on. Tensors are
contiguous little-endian words, except NVFP4 banks: all codes, then block scales in tiles of 128 rows by 4 groups, then one divisor an expert.
"""
import json, os, sys

import numpy as np

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float32)


def e4m3(b):
    """values of FP8 E4M3 words"""
    s, e, m = np.where(b & 0x80, -1.0, 1.0), (b >> 3 & 15).astype(np.int32), (b & 7).astype(np.float64)
    return (s * np.where(e == 0, m / 8 * 2.0 ** -6, (1 + m / 8) * np.exp2(e - 7.0))).astype(np.float32)


def bank(raw, shape):
    """values [E,N,K] of an NVFP4 bank"""
    E, N, K = shape
    codes = np.frombuffer(raw, np.uint8, E * N * K // 2).reshape(E, N, K // 2)
    code = np.stack([codes & 15, codes >> 4], -1).reshape(E, N, K)
    at = (E * N * K // 2 + 255) // 256 * 256
    words = np.frombuffer(raw, np.uint8, E * N * K // 16, at).reshape(E, N * K // 16)
    d = np.frombuffer(raw, np.float32, E, at + E * N * K // 16)
    n, g = np.arange(N)[:, None], np.arange(K // 16)[None]
    place = (n // 128 * (K // 64) + g // 4) * 512 + n % 32 * 16 + n % 128 // 32 * 4 + g % 4
    scale = np.repeat(e4m3(words[:, place]), 16, -1)
    return E2M1[code & 7] * np.where(code & 8, -1, 1).astype(np.float32) * scale / d[:, None, None]


def read(path):
    """tensors by object id (float32; quantised vision matrices are left out) and the embedded files"""
    b = open(path, "rb").read()
    if b[:8] != b"NINFER\0\3":
        raise ValueError(f"{path} is not a .ninfer file of version 3")
    n = int.from_bytes(b[8:16], "little")
    d = json.loads(b[32:32 + n])
    start, tensors, files = (32 + n + 4095) // 4096 * 4096, {}, {}
    for o in d["objects"]:
        raw = b[start + o["offset"]:start + o["offset"] + o["bytes"]]
        if o["kind"] == "resource":
            files[o["id"].removeprefix("frontend/")] = raw
        elif o["format"] == "nvfp4":
            tensors[o["id"]] = bank(raw, o["shape"])
        elif o["format"] == "bf16":
            tensors[o["id"]] = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(o["shape"])
        elif o["format"] == "fp32":
            tensors[o["id"]] = np.frombuffer(raw, np.float32).reshape(o["shape"])
        elif o["format"] == "fp8_e4m3fn":
            tensors[o["id"]] = e4m3(np.frombuffer(raw, np.uint8)).reshape(o["shape"])
    return tensors, files


def value(tensors, name):
    """the weight that a checkpoint calls `name` (experts: ...experts.gate_up_proj, as the reference's modules have them)"""
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return tensors.get(name.removesuffix("_proj"), tensors.get(name))          # the drafter's experts are plain BF16
    x = tensors[name]
    if name.endswith("ngram_embedding.weight"):
        return x * tensors[name + "_scale"]
    return x.T[:, None] if name.endswith("conv1d.weight") else x


if __name__ == "__main__":
    tensors, files = read(sys.argv[1])
    os.makedirs(sys.argv[2], exist_ok=True)
    for name, raw in files.items():
        open(os.path.join(sys.argv[2], name), "wb").write(raw)
    print(len(tensors), "tensors,", sum(t.size for t in tensors.values()), "values;", " ".join(sorted(files)))
