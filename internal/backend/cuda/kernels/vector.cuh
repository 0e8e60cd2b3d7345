// Shared by the kernels for one row that keep their weights in registers.
#pragma once
#include "common.cuh"

// Eight weights to FP32: BF16 from 16 bytes, E4M3 from 8.
NINFER_DEVICE void unpack(uint4 w, float* f) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t x = (&w.x)[i];
    f[2 * i] = bf16_lo(x), f[2 * i + 1] = bf16_hi(x);
  }
}
NINFER_DEVICE void unpack(uint2 w, float* f) {
  const float2 a = e4m3x2_f32(w.x), b = e4m3x2_f32(w.x >> 16), c = e4m3x2_f32(w.y), d = e4m3x2_f32(w.y >> 16);
  f[0] = a.x, f[1] = a.y, f[2] = b.x, f[3] = b.y, f[4] = c.x, f[5] = c.y, f[6] = d.x, f[7] = d.y;
}
// Eight weights of a row, as stored.
template <bool FP8>
struct Eight {
  uint4 w;
  NINFER_DEVICE void read(uint32_t at) { w = lds128(at); }
};
template <>
struct Eight<true> {
  uint2 w;
  NINFER_DEVICE void read(uint32_t at) { w = lds64(at); }
};

// The product of eight weights with eight activations.
template <typename W>
NINFER_DEVICE float dot8(W w, const float* v) {
  float f[8];
  unpack(w, f);
  float a = f[0] * v[0], b = f[1] * v[1];
#pragma unroll
  for (int j = 2; j < 8; j += 2) a = fmaf(f[j], v[j], a), b = fmaf(f[j + 1], v[j + 1], b);
  return a + b;
}

NINFER_DEVICE float row_scale(const void* scale, uint32_t f32, uint32_t row) {
  return f32 ? __ldg((const float*)scale + row) : __uint_as_float((uint32_t)__ldg((const uint16_t*)scale + row) << 16);
}

// Sums N values over a warp's lanes, each lane keeping one, the value scattered() names.
template <int N>
NINFER_DEVICE float scatter_sum(float* v) {
  const uint32_t lane = threadIdx.x % 32;
  int n = N;
#pragma unroll
  for (int mask = 16; mask > 1; mask /= 2) {
    const bool upper = lane & mask;
#pragma unroll
    for (int i = 0; 2 * i < n; i++) {
      const float a = v[2 * i], b = 2 * i + 1 < n ? v[2 * i + 1] : 0.0f;
      v[i] = (upper ? b : a) + __shfl_xor_sync(~0u, upper ? a : b, mask);
    }
    n = (n + 1) / 2;
  }
  return v[0] + __shfl_xor_sync(~0u, v[0], 1);
}
NINFER_DEVICE uint32_t scattered() {
  const uint32_t lane = threadIdx.x % 32;
  return (lane >> 4 & 1) + (lane >> 3 & 1) * 2 + (lane >> 2 & 1) * 4 + (lane >> 1 & 1) * 8;
}
