// Weight sources of the experts: 128 stored rows of one expert, unpacked into a stage. See experts.cu for the layouts.
#pragma once
#include "tile.cuh"
#include "params.h"

NINFER_DEVICE uint4 lds128(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
NINFER_DEVICE uint32_t lds16(uint32_t a) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
  return v;
}
NINFER_DEVICE uint32_t lds32(uint32_t a) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}

struct Tiles16 {
  static constexpr bool kScaled = true;
  // A warp's tiles of the stored tiles a block does one after the other, 128 k at a time as they lie: 512 bytes of codes for each k64, 16 each of
  // rows g and g + 8 a lane, then scales. Tiles that are not there read as the last one. Even tiles go to the first warpgroup, odd ones to the
  // second, so that each has whole chunks of order64.
  struct Lane {
    const uint8_t *base, *w;
    uint32_t tile, tiles, bytes;
    NINFER_DEVICE Lane(const GroupParams& p, uint32_t expert, uint32_t nt) : tile(nt * 8 + threadIdx.x / 32 % 4 * 2 + threadIdx.x / 128), tiles(p.n / 16), bytes(p.k / 128 * 1152) {
      base = (const uint8_t*)p.bank + (uint64_t)expert * tiles * bytes + threadIdx.x % 32 * 16;
      w = base + (uint64_t)min(tile, tiles - 1) * bytes;
    }
    NINFER_DEVICE void next() {
      tile += 8;
      w = base + (uint64_t)min(tile, tiles - 1) * bytes;
    }
    NINFER_DEVICE void copy(uint32_t to) {
      const uint32_t lane = threadIdx.x % 32;
      to += lane * 16;
      copy16(to, w, true);
      copy16(to + 512, w + 512, true);
      if (lane < 8) copy16(to + 1024, w + 1024, true);
      w += 1152;
    }
  };
  struct Piece {
    uint4 code[2];
    uint32_t scale;
    NINFER_DEVICE void load(uint32_t at) {
      const uint32_t lane = threadIdx.x % 32;
      code[0] = lds128(at + lane * 16), code[1] = lds128(at + 512 + lane * 16), scale = lds32(at + 1024 + lane * 4);
    }
    NINFER_DEVICE uint4 codes(int half) const { return code[half]; }
    NINFER_DEVICE uint32_t scales(int half) const { return half ? scale >> 16 : scale; }
  };
  const uint8_t* w;  // this warp's tile of 16 rows, at this lane's codes; null for none
  uint4 code;
  uint32_t scale;
  NINFER_DEVICE Tiles16(const GroupParams& p, uint32_t expert, uint32_t nt, bool) {
    const uint32_t tiles = p.n / 16, tile = nt * 8 + threadIdx.x / 32;
    w = tile < tiles ? (const uint8_t*)p.bank + ((uint64_t)expert * tiles + tile) * (p.k / 128) * 1152 + threadIdx.x % 32 * 16 : nullptr;
    code = make_uint4(0, 0, 0, 0), scale = 0;
  }
  NINFER_DEVICE void fetch(uint32_t kt) {
    if (!w) return;
    const uint8_t* from = w + kt / 2 * 1152;
    code = ldg128(from + kt % 2 * 512);
    scale = __ldg((const uint16_t*)(from + 1024 - threadIdx.x % 32 * 12 + kt % 2 * 2));
  }
  NINFER_DEVICE void put(uint32_t, uint32_t to) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t s0, s1;
    block_scales(scale, s0, s1);
    uint4 lo, hi;
    to += (threadIdx.x / 32 * 16 + g) * 128;
    const uint32_t c0 = ((2 * t) ^ g) * 16, c1 = ((2 * t + 1) ^ g) * 16;
    e2m1x16_bf16(make_uint2(code.x, code.y), s0, lo, hi);
    sts128(to + c0, lo), sts128(to + c1, hi);
    e2m1x16_bf16(make_uint2(code.z, code.w), s1, lo, hi);
    sts128(to + 1024 + c0, lo), sts128(to + 1024 + c1, hi);
  }
};

struct Tiles8 {
  static constexpr bool kScaled = true;
  // As above; a warp has two tiles, 576 bytes each: a lane's sixteen bytes are both k64 of its row.
  struct Lane {
    const uint8_t *base, *w;
    uint32_t tile, tiles, bytes;
    NINFER_DEVICE Lane(const GroupParams& p, uint32_t expert, uint32_t nt) : tile(nt * 16 + threadIdx.x / 32 * 2), tiles(p.n / 8), bytes(p.k / 128 * 576) {
      base = (const uint8_t*)p.bank + (uint64_t)expert * tiles * bytes + threadIdx.x % 32 * 16;
      w = base + (uint64_t)min(tile, tiles - 2) * bytes;
    }
    NINFER_DEVICE void next() {
      tile += 16;
      w = base + (uint64_t)min(tile, tiles - 2) * bytes;
    }
    NINFER_DEVICE void copy(uint32_t to) {
      const uint32_t lane = threadIdx.x % 32;
      to += lane * 16;
      copy16(to, w, true);
      copy16(to + 576, w + bytes, true);
      if (lane < 8) {  // scales: four lanes a tile
        const uint32_t second = lane / 4;
        copy16(to + 512 + second * (576 - 64), w + 512 + (second ? bytes - 64 : 0), true);
      }
      w += 576;
    }
  };
  struct Piece {
    uint4 code[2];
    uint32_t scale[2];
    NINFER_DEVICE void load(uint32_t at) {
      const uint32_t lane = threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < 2; i++) code[i] = lds128(at + i * 576 + lane * 16), scale[i] = lds16(at + i * 576 + 512 + lane * 2);
    }
    NINFER_DEVICE uint4 codes(int half) const {
      return half ? make_uint4(code[0].z, code[0].w, code[1].z, code[1].w) : make_uint4(code[0].x, code[0].y, code[1].x, code[1].y);
    }
    NINFER_DEVICE uint32_t scales(int half) const { return __byte_perm(scale[0], scale[1], half ? 0x51 : 0x40); }
  };
  const uint8_t* w;  // this warp's first tile of 8 rows; the second follows
  uint32_t row_bytes;
  uint2 code[2];
  uint32_t scale;
  bool live[2];
  NINFER_DEVICE Tiles8(const GroupParams& p, uint32_t expert, uint32_t nt, bool) {
    const uint32_t tiles = p.n / 8, tile = nt * 16 + threadIdx.x / 32 * 2;
    row_bytes = p.k / 128 * 576;
    live[0] = tile < tiles, live[1] = tile + 1 < tiles;
    w = (const uint8_t*)p.bank + ((uint64_t)expert * tiles + tile) * row_bytes + threadIdx.x % 32 * 16;
    code[0] = code[1] = make_uint2(0, 0), scale = 0;
  }
  NINFER_DEVICE void fetch(uint32_t kt) {
    uint32_t s[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (live[i]) {
        const uint8_t* from = w + i * row_bytes + kt / 2 * 576;
        code[i] = ldg64(from + kt % 2 * 8);
        s[i] = __ldg(from + 512 - threadIdx.x % 32 * 14 + kt % 2);
      }
    scale = s[0] | s[1] << 8;
  }
  NINFER_DEVICE void put(uint32_t, uint32_t to) {
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t s[2];
    block_scales(scale, s[0], s[1]);
    to += (threadIdx.x / 32 * 16 + g) * 128;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint4 lo, hi;
      e2m1x16_bf16(code[i], s[i], lo, hi);
      sts128(to + i * 1024 + ((2 * t) ^ g) * 16, lo), sts128(to + i * 1024 + ((2 * t + 1) ^ g) * 16, hi);
    }
  }
};

// The expert's row at tile row r: gate/up rows are paired by eight as in Tiles16.
NINFER_DEVICE uint32_t paired_row(uint32_t n, uint32_t nt, uint32_t r, bool up) {
  const uint32_t at = nt * kRows + r;
  if (at >= n) return ~0u;
  return up ? at / 16 * 8 + at % 8 + (at % 16 < 8 ? 0 : n / 2) : at;
}

struct StoredRows {
  static constexpr bool kScaled = true;
  const uint8_t *w, *s;  // this thread's row, at its half of a k64; the scales of its expert; null for none
  uint32_t k, row;
  uint4 code;
  uint32_t scale;
  NINFER_DEVICE StoredRows(const GroupParams& p, uint32_t expert, uint32_t nt, bool up) : k(p.k) {
    row = paired_row(p.n, nt, threadIdx.x / 2, up);
    w = row == ~0u ? nullptr : (const uint8_t*)p.bank + ((uint64_t)expert * p.n + row) * (p.k / 2) + threadIdx.x % 2 * 16;
    s = (const uint8_t*)p.scales + (uint64_t)expert * p.n * (p.k / 16);
    code = make_uint4(0, 0, 0, 0), scale = 0;
  }
  NINFER_DEVICE void fetch(uint32_t kt) {
    if (!w) return;
    code = ldg128(w + kt * 32);
    scale = __ldg((const uint16_t*)(s + ((uint64_t)(row / 128) * (k / 64) + kt) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + threadIdx.x % 2 * 2));
  }
  NINFER_DEVICE void put(uint32_t, uint32_t to) {
    uint32_t s0, s1;
    block_scales(scale, s0, s1);
    uint4 lo, hi;
    e2m1x16_bf16(pack_codes(code.x, code.y), s0, lo, hi);
    sts128(half_row(to, 0), lo), sts128(half_row(to, 1), hi);
    e2m1x16_bf16(pack_codes(code.z, code.w), s1, lo, hi);
    sts128(half_row(to, 2), lo), sts128(half_row(to, 3), hi);
  }
};

struct PlainRows {
  static constexpr bool kScaled = false;
  const bf16* w;
  uint4 v[4];
  NINFER_DEVICE PlainRows(const GroupParams& p, uint32_t expert, uint32_t nt, bool up) {
    const uint32_t row = paired_row(p.n, nt, threadIdx.x / 2, up);
    w = row == ~0u ? nullptr : (const bf16*)p.bank + ((uint64_t)expert * p.n + row) * p.k + threadIdx.x % 2 * 32;
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = make_uint4(0, 0, 0, 0);
  }
  NINFER_DEVICE void fetch(uint32_t kt) {
    if (w)
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = ldg128(w + kt * kK + i * 8);
  }
  NINFER_DEVICE void put(uint32_t, uint32_t to) {
#pragma unroll
    for (int i = 0; i < 4; i++) sts128(half_row(to, i), order8(v[i]));
  }
};
