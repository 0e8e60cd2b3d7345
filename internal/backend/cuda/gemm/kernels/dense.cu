// Dense products for prompts: Y = f(X W^T) for any number of rows, BF16 or row-scaled E4M3 weights, FP32 sums.
//
//   dense_*_128, dense_*_64   tiles of 128 or 64 activation rows times 128 weight rows; K may be cut into `splits` shares of whole k64 tiles,
//                             then FP32 partial sums go to memory and dense_sum adds them in order.
//   mix_*                     the second half of a hyper-connection site: a tile is 32 columns times 4 streams in groups of eight, so a lane
//                             holds all streams of its columns and writes their gated mean; the 4H-wide gate never exists.
//   narrow_*                  fewer than sixteen weight rows: a warp an activation row
//   widen                     E4M3 matrix to BF16, for the library's product, rounded once.
//
// X [M][x_ld] BF16, W [N][K] row-major, Y [M][out_ld]; K % 8 = 0 (E4M3: 16), x_ld % 8 = 0. E4M3 codes become BF16 exactly and the row's
// scale multiplies the sum, so FP32 accumulation is the only error before the result's rounding.
#include "tile.cuh"
#include "params.h"

// Tile (m, n) of a block: columns of eight m tiles, so that neighbours in time share weights and activations in L2.
NINFER_DEVICE void place(uint32_t tiles_m, uint32_t tiles_n, uint32_t& m, uint32_t& n) {
  const uint32_t wide = 8, group = blockIdx.x / (wide * tiles_n), in = blockIdx.x - group * wide * tiles_n;
  const uint32_t high = min(wide, tiles_m - group * wide);
  m = group * wide + in % high, n = in / high;
}

template <int BM, template <class> class Weights, bool SCALED>
NINFER_DEVICE void dense(const DenseParams& p) {
  uint32_t mt, nt;
  place(ceil_div(p.m, BM), ceil_div(p.n, kRows), mt, nt);
  const uint32_t m0 = mt * BM, n0 = nt * kRows, rows = min((uint32_t)BM, p.m - m0);
  const uint32_t all = ceil_div(p.k, kK), first = all * blockIdx.y / p.splits, last = all * (blockIdx.y + 1) / p.splits;
  const auto row_of = [&](uint32_t r) { return n0 + r < p.n ? n0 + r : ~0u; };
  Weights<decltype(row_of)> w(p.w, p.k, row_of);
  Tile<BM> tile;
  tile.run(p.x, p.k, first, last, rows, w, [&](uint32_t r) { return r < rows ? (m0 + r) * p.x_ld : ~0u; });
  const bool odd = p.out_ld & 1;
#pragma unroll
  for (int j = 0; j < Tile<BM>::kGroups; j++) {
    const uint32_t col = n0 + tile.col(j);
    if (col >= p.n) continue;
    const bool two = col + 1 < p.n;
    float s0 = 1.0f, s1 = 1.0f;
    if (SCALED && p.splits == 1) s0 = row_scale(p.scale, p.scale_f32, col), s1 = two ? row_scale(p.scale, p.scale_f32, col + 1) : 0.0f;
#pragma unroll
    for (int i = 0; i < tile.kM; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t row = tile.row(i) + 8 * h;
        if (row >= rows) continue;
        float a = tile.acc[i][j][2 * h], b = tile.acc[i][j][2 * h + 1];
        if (p.splits > 1) {
          float* to = p.partial + ((uint64_t)blockIdx.y * p.m + m0 + row) * p.n + col;
          to[0] = a;
          if (two) to[1] = b;
          continue;
        }
        a = finish(a * s0, p.epilogue, p.factor), b = finish(b * s1, p.epilogue, p.factor);
        const uint64_t at = (uint64_t)(m0 + row) * p.out_ld + col;
        if (p.out_f32) {
          float* to = (float*)p.out + at;
          if (two && !odd) {
            *(float2*)to = make_float2(a, b);
          } else {
            to[0] = a;
            if (two) to[1] = b;
          }
        } else {
          bf16* to = (bf16*)p.out + at;
          if (two && !odd) {
            *(uint32_t*)to = pack_bf16(a, b);
          } else {
            to[0] = __float2bfloat16_rn(a);
            if (two) to[1] = __float2bfloat16_rn(b);
          }
        }
      }
  }
}

NINFER_KERNEL(dense_bf16_128, DenseParams, 256, 2) { dense<128, Bf16Rows, false>(p); }
NINFER_KERNEL(dense_bf16_64, DenseParams, 256, 2) { dense<64, Bf16Rows, false>(p); }
NINFER_KERNEL(dense_e4m3_128, DenseParams, 256, 2) { dense<128, E4m3Rows, true>(p); }
NINFER_KERNEL(dense_e4m3_64, DenseParams, 256, 2) { dense<64, E4m3Rows, true>(p); }

// Few weight rows: a warp an activation row, sums in the order of its lanes.
template <bool SCALED>
NINFER_DEVICE void narrow(const DenseParams& p) {
  const uint32_t row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.m) return;
  const bf16* x = p.x + (uint64_t)row * p.x_ld;
  for (uint32_t n = 0; n < p.n; n++) {
    float v = 0;
#pragma unroll 5
    for (uint32_t c = lane * 8; c < p.k; c += 256) {
      const uint4 a = ldg128(x + c);
      uint4 w;
      if (SCALED) {
        const uint2 q = ldg64((const uint8_t*)p.w + (uint64_t)n * p.k + c);
        w = e4m3x8_bf16(q.x, q.y);
      } else {
        w = ldg128((const bf16*)p.w + (uint64_t)n * p.k + c);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) v = fmaf(bf16_lo((&a.x)[j]), bf16_lo((&w.x)[j]), v), v = fmaf(bf16_hi((&a.x)[j]), bf16_hi((&w.x)[j]), v);
    }
    v = warp_sum(v);
    if (lane) continue;
    v = finish(SCALED ? v * row_scale(p.scale, p.scale_f32, n) : v, p.epilogue, p.factor);
    const uint64_t at = (uint64_t)row * p.out_ld + n;
    if (p.out_f32)
      ((float*)p.out)[at] = v;
    else
      ((bf16*)p.out)[at] = __float2bfloat16_rn(v);
  }
}

NINFER_KERNEL(narrow_bf16, DenseParams, 256, 2) { narrow<false>(p); }
NINFER_KERNEL(narrow_e4m3, DenseParams, 256, 2) { narrow<true>(p); }

NINFER_KERNEL(dense_sum, SumParams, 256, 2) {
  const uint32_t all = p.m * p.n;
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < all; i += gridDim.x * 256) {
    const uint32_t row = i / p.n, col = i - row * p.n;
    float v = 0;
#pragma unroll 8
    for (uint32_t s = 0; s < p.splits; s++) v += p.partial[(uint64_t)s * all + i];
    if (p.scale) v *= row_scale(p.scale, p.scale_f32, col);
    v = finish(v, p.epilogue, p.factor);
    const uint64_t at = (uint64_t)row * p.out_ld + col;
    if (p.out_f32)
      ((float*)p.out)[at] = v;
    else
      ((bf16*)p.out)[at] = __float2bfloat16_rn(v);
  }
}

template <template <class> class Weights, bool SCALED>
NINFER_DEVICE void mix(const MixParams& p) {
  uint32_t mt, nt;
  place(ceil_div(p.m, 128), ceil_div(p.h, 32), mt, nt);
  const uint32_t m0 = mt * 128, c0 = nt * 32, rows = min(128u, p.m - m0);
  // tile row r: stream r / 8 % 4, column c0 + r / 32 * 8 + r % 8
  const auto row_of = [&](uint32_t r) {
    const uint32_t c = c0 + r / 32 * 8 + r % 8;
    return c < p.h ? r / 8 % 4 * p.h + c : ~0u;
  };
  Weights<decltype(row_of)> w(p.up, p.l, row_of);
  Tile<128> tile;
  // The gated streams' part comes to the first free stage: a row's 32 columns of 4 streams are 16 chunks, exchanged by row % 8.
  const uint32_t steps = ceil_div(p.l, kK), streams = tile.run(
      p.low, p.l, 0, steps, rows, w, [&](uint32_t r) { return r < rows ? (m0 + r) * p.l : ~0u; },
      [&](uint32_t to) {
        if (steps < 3) return;
        for (uint32_t i = threadIdx.x; i < rows * 16; i += kThreads) {
          const uint32_t r = i / 16, c = i % 16, col = c0 + c % 4 * 8;
          const bool live = col < p.h;
          copy16(to + r * 256 + ((c ^ (r & 7)) << 4), p.normed + (live ? ((uint64_t)(m0 + r) * 4 + c / 4) * p.h + col : 0), live);
        }
      });
  copy_wait<0>();
  __syncthreads();
#pragma unroll
  for (int q = 0; q < tile.kGroups / 4; q++) {
    const uint32_t cq = tile.warp_n * (tile.kCols / 4) / 8 + q, t = threadIdx.x % 4, c = c0 + cq * 8 + t * 2;
    if (c >= p.h) continue;
    float s[4][2];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      s[j][0] = SCALED ? row_scale(p.scale, p.scale_f32, j * p.h + c) : 1.0f;
      s[j][1] = SCALED ? row_scale(p.scale, p.scale_f32, j * p.h + c + 1) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < tile.kM; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t row = tile.row(i) + 8 * h;
        if (row >= rows) continue;
        float a = 0, b = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          uint32_t n;
          if (steps < 3)
            n = __ldg((const uint32_t*)(p.normed + ((uint64_t)(m0 + row) * 4 + j) * p.h + c));
          else
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(n) : "r"(streams + row * 256 + (((j * 4 + cq) ^ (row & 7)) << 4) + t * 4));
          a = fmaf(sigmoid_fast(tile.acc[i][4 * q + j][2 * h] * s[j][0]), bf16_lo(n), a);
          b = fmaf(sigmoid_fast(tile.acc[i][4 * q + j][2 * h + 1] * s[j][1]), bf16_hi(n), b);
        }
        *(uint32_t*)(p.mix + (uint64_t)(m0 + row) * p.h + c) = pack_bf16(0.25f * a, 0.25f * b);
      }
  }
}

NINFER_KERNEL(mix_bf16, MixParams, 256, 2) { mix<Bf16Rows, false>(p); }
NINFER_KERNEL(mix_e4m3, MixParams, 256, 2) { mix<E4m3Rows, true>(p); }

NINFER_KERNEL(widen, WidenParams, 256, 4) {
  constexpr int kAhead = 4;  // pieces of sixteen a thread asks for at once
  const uint32_t row = p.k / 16, all = p.n * row;
  for (uint32_t first = blockIdx.x * 256 * kAhead + threadIdx.x; first < all; first += gridDim.x * 256 * kAhead) {
    uint4 c[kAhead];
    float s[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      const uint32_t i = min(first + a * 256, all - 1);
      c[a] = ldg128((const uint4*)p.w + i), s[a] = row_scale(p.scale, p.scale_f32, i / row);
    }
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      const uint32_t i = first + a * 256;
      if (i >= all) break;
      uint4 out[2];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float4 v = e4m3x4_f32((&c[a].x)[j]);
        (&out[j / 2].x)[j % 2 * 2] = pack_bf16(v.x * s[a], v.y * s[a]), (&out[j / 2].x)[j % 2 * 2 + 1] = pack_bf16(v.z * s[a], v.w * s[a]);
      }
      *((uint4*)p.out + 2 * (uint64_t)i) = out[0], *((uint4*)p.out + 2 * (uint64_t)i + 1) = out[1];
    }
  }
}

NINFER_KERNEL(activate, ActivateParams, 256, 2) {
  const uint32_t all = p.m * p.n;
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < all; i += gridDim.x * 256) {
    const float v = finish(p.in[i], p.epilogue, p.factor);
    const uint32_t row = i / p.n;
    const uint64_t at = (uint64_t)row * p.out_ld + (i - row * p.n);
    if (p.out_f32)
      ((float*)p.out)[at] = v;
    else
      ((bf16*)p.out)[at] = __float2bfloat16_rn(v);
  }
}

NINFER_KERNEL(gate, GateParams, 256, 2) {
  const uint32_t half = p.n / 2, all = p.m * half;  // n is even
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < all; i += gridDim.x * 256) {
    const uint32_t row = i / half;
    const uint64_t at = (uint64_t)row * p.ld + 2 * (i - row * half);
    const float2 g = *(const float2*)(p.gate + at), u = *(const float2*)(p.up + at);
    *((uint32_t*)p.out + i) = pack_bf16(silu(g.x) * u.x, silu(g.y) * u.y);
  }
}
