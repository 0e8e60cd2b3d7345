// First step of a hyper-connection site for many rows, in one pass over the streams:
//
//   X <- BF16(X + inject_s y);  N = X rstd_s (1 + w), BF16;  inject_i = 2 sigmoid(sum_s rstd_s sum_c X (1 + w) W_inject[i] / 4), FP32.
//
// X [M][4][H] in place, N [M][4][H]; H % 8 = 0 and at most 4,096 (site: 2,560). rstd_s over a stream's H values. A block does a row: 64 threads a
// stream, whose values stay in registers between the sums and the second use. The norm and inject weights (100 KB) live in L1.
#include "common.cuh"
#include "params.h"

// kMost: chunks of eight values of a thread.
template <int kMost>
NINFER_DEVICE void begin(const SiteParams& p) {
  __shared__ float sums[8][5];
  const uint32_t stream = threadIdx.x / 64, at = threadIdx.x % 64, chunks = p.h / 8, warp = threadIdx.x / 32, row = blockIdx.x;
  bf16* x = p.x + ((uint64_t)row * 4 + stream) * p.h;
  const float weight = p.y ? p.inject[row * 4 + stream] : 0.0f;
  uint4 kept[kMost], y[kMost];  // all asked for at once
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    const uint32_t c = at + 64 * i;
    if (c >= chunks) break;
    kept[i] = *((const uint4*)x + c);
    if (p.y) y[i] = ldg128((const uint4*)(p.y + (uint64_t)row * p.h) + c);
  }
  float v[5] = {0, 0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    const uint32_t c = at + 64 * i;
    if (c >= chunks) break;
    if (p.y)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t& k = (&kept[i].x)[j];
        const uint32_t w = (&y[i].x)[j];
        k = pack_bf16(fmaf(weight, bf16_lo(w), bf16_lo(k)), fmaf(weight, bf16_hi(w), bf16_hi(k)));
      }
    const uint4 n = ldg128((const uint4*)(p.norm + stream * p.h) + c);
    float f[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t k = (&kept[i].x)[j], w = (&n.x)[j];
      v[4] = fmaf(bf16_lo(k), bf16_lo(k), v[4]), v[4] = fmaf(bf16_hi(k), bf16_hi(k), v[4]);
      f[2 * j] = fmaf(bf16_lo(k), bf16_lo(w), bf16_lo(k)), f[2 * j + 1] = fmaf(bf16_hi(k), bf16_hi(w), bf16_hi(k));
    }
    if (p.inject_w) {
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const uint4 w = ldg128((const uint4*)(p.inject_w + (q * 4 + stream) * p.h) + c);
#pragma unroll
        for (int j = 0; j < 4; j++) v[q] = fmaf(f[2 * j], bf16_lo((&w.x)[j]), v[q]), v[q] = fmaf(f[2 * j + 1], bf16_hi((&w.x)[j]), v[q]);
      }
    }
  }
#pragma unroll
  for (int q = 0; q < 5; q++) v[q] = warp_sum(v[q]);
  if (threadIdx.x % 32 == 0)
#pragma unroll
    for (int q = 0; q < 5; q++) sums[warp][q] = v[q];
  __syncthreads();
  const float rstd = rsqrtf((sums[2 * stream][4] + sums[2 * stream + 1][4]) / p.h + p.eps);
  if (p.inject_w && threadIdx.x < 4) {
    float d = 0;
    for (int s = 0; s < 4; s++)
      d += rsqrtf((sums[2 * s][4] + sums[2 * s + 1][4]) / p.h + p.eps) * (sums[2 * s][threadIdx.x] + sums[2 * s + 1][threadIdx.x]);
    p.inject[row * 4 + threadIdx.x] = 2.0f * sigmoid(0.25f * d);
  }
  bf16* out = p.normed + ((uint64_t)row * 4 + stream) * p.h;
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    const uint32_t c = at + 64 * i;
    if (c >= chunks) break;
    const uint4 n = ldg128((const uint4*)(p.norm + stream * p.h) + c);
    uint4 o;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t k = (&kept[i].x)[j], w = (&n.x)[j];
      (&o.x)[j] = pack_bf16(fmaf(bf16_lo(k), bf16_lo(w), bf16_lo(k)) * rstd, fmaf(bf16_hi(k), bf16_hi(w), bf16_hi(k)) * rstd);
    }
    *((uint4*)out + c) = o;
    if (p.y) *((uint4*)x + c) = kept[i];
  }
}

NINFER_KERNEL(site, SiteParams, 256, 3) { begin<5>(p); }
NINFER_KERNEL(site_long, SiteParams, 256, 2) { begin<8>(p); }
