// What the plain kernels share: dependent launch, stored formats, dot products of stored rows, reductions in a fixed order.
//
// These kernels put correctness first: one warp a weight row, FP32 sums in an order that depends on the row only. All memory that
// an earlier kernel of the pass wrote is read after pdl_wait.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include "params.h"

typedef __nv_bfloat16 bf16;

#define DEVICE __device__ __forceinline__

// A kernel takes exactly one parameter struct by value. tools/kernelgen finds kernels by this macro.
#define NINFER_KERNEL(name, Params, threads, blocks_per_sm) \
  extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm) name(const __grid_constant__ Params p)

// Every block waits before it touches memory, so a kernel that has ended means that all before it have. The next one may start its
// blocks at once: they wait in turn.
DEVICE void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void pdl_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void pdl() {
  pdl_wait();
  pdl_trigger();
}

enum { FMT_BF16, FMT_FP32, FMT_FP8_BF16, FMT_FP8_FP32, FMT_NVFP4, FMT_Q4, FMT_Q5, FMT_Q6, FMT_Q8, FMT_FP8, FMT_U4 };
enum { PART_F32 = 1, PART_SILU = 2, PART_SIGMOID2 = 4 };

DEVICE float lo(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float from_bf16(bf16 v) { return __bfloat162float(v); }
DEVICE bf16 to_bf16(float v) { return __float2bfloat16_rn(v); }
DEVICE float round_bf16(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }
DEVICE float half_at(const void* p, uint64_t i) { return __half2float(((const __half*)p)[i]); }
DEVICE float e4m3(uint8_t v) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(v, __NV_E4M3)));
}
DEVICE float e2m1(uint32_t c) {
  const uint32_t m = c & 7;
  const float v = m < 4 ? 0.5f * m : (m < 6 ? m - 2.0f : 2.0f * m - 8.0f);  // 0 .5 1 1.5 2 3 4 6
  return c & 8 ? -v : v;
}
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

DEVICE float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
// Sum over all threads of a block, to all of them. shared: 33 floats.
DEVICE float block_sum(float v, float* shared) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    float s = threadIdx.x < blockDim.x / 32 ? shared[threadIdx.x] : 0.0f;
    s = warp_sum(s);
    if (threadIdx.x == 0) shared[32] = s;
  }
  __syncthreads();
  return shared[32];
}

// Order-preserving key: larger float, larger key; NaN lowest; both zeros equal.
DEVICE uint32_t float_key(float f) {
  if (!(f == f)) return 0;
  uint32_t b = __float_as_uint(f);
  if (b == 0x80000000u) b = 0;
  return (b & 0x80000000u) ? ~b : (b | 0x80000000u);
}

// States that grow with a sequence lie in pages of 64 tokens, those of all sequences in one pool: a lane's table has the page of each 64 of
// its tokens. Rows of a state are counted over all pages.
static constexpr uint32_t kPage = 64;

// The row of token t.
DEVICE uint64_t token_row(const uint32_t* pages, uint32_t t) { return (uint64_t)pages[t / kPage] * kPage + t % kPage; }

// Blocks of ratio tokens have a row each, in the page of their last token.
struct Blocks {
  uint32_t ratio, rows, inverse;
  DEVICE explicit Blocks(uint32_t ratio) : ratio(ratio), rows((kPage - 1) / ratio + 1), inverse((65535 + ratio) / ratio) {}
  DEVICE uint32_t last(uint32_t b) const { return (b + 1) * ratio - 1; }
  // The row of block b, whose last token is in that page. A division by ratio, exact for less than 64.
  DEVICE uint64_t row(uint32_t page, uint32_t b) const { return (uint64_t)page * rows + (last(b) % kPage * inverse >> 16); }
};

DEVICE uint32_t swizzle(uint32_t n, uint32_t g, uint32_t k) {
  return (n / 128 * (k / 64) + g / 4) * 512 + n % 32 * 16 + n % 128 / 32 * 4 + g % 4;
}

// Where a row's words are.
struct Line {
  const uint8_t *codes, *high, *scales;
};
template <int F>
DEVICE Line line_of(const Mat& m, uint32_t n) {
  const uint64_t row = (uint64_t)m.first + n;
  Line l;
  l.codes = (const uint8_t*)m.codes + row * m.stride;
  l.high = (const uint8_t*)m.high + row * m.high_stride;
  if (F == FMT_NVFP4) {
    const uint32_t e = row / m.expert_rows, in = row % m.expert_rows;
    l.scales = (const uint8_t*)m.scales + (uint64_t)e * m.expert_rows * (m.k / 16) + swizzle(in, 0, m.k);
  } else {
    l.scales = (const uint8_t*)m.scales + row * m.scale_stride;
  }
  return l;
}

// The value of one code, without the row's factor.
template <int F>
DEVICE float weight(const Line& l, uint32_t k) {
  if (F == FMT_BF16) return from_bf16(((const bf16*)l.codes)[k]);
  if (F == FMT_FP32) return ((const float*)l.codes)[k];
  if (F == FMT_FP8_BF16 || F == FMT_FP8_FP32) return e4m3(l.codes[k]);
  if (F == FMT_NVFP4) {
    const uint32_t g = k / 16;
    return e2m1(l.codes[k / 2] >> (k % 2 * 4) & 15) * e4m3(l.scales[g / 4 * 512 + g % 4]);
  }
  if (F == FMT_Q8) return (float)(int8_t)l.codes[k] * half_at(l.scales, k / 32);
  const uint32_t nibble = l.codes[k / 2] >> (k % 2 * 4) & 15;
  int v;
  if (F == FMT_Q4) v = (int)(nibble << 28) >> 28;
  if (F == FMT_Q5) v = (int)((nibble | (l.high[k / 8] >> (k % 8) & 1) << 4) << 27) >> 27;
  if (F == FMT_Q6) v = (int)((nibble | (l.high[k / 4] >> (k % 4 * 2) & 3) << 4) << 26) >> 26;
  return (float)v * half_at(l.scales, k / 64);
}

// Eight values from k on, which is a multiple of eight; beyond the end they are zero.
template <int F>
DEVICE void weight8(const Line& l, uint32_t k, uint32_t cols, bool fast, float* w) {
  if (!fast) {
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = k + i < cols ? weight<F>(l, k + i) : 0.0f;
    return;
  }
  if (F == FMT_BF16) {
    const uint4 v = __ldg((const uint4*)(l.codes + 2 * k));
    w[0] = lo(v.x), w[1] = hi(v.x), w[2] = lo(v.y), w[3] = hi(v.y);
    w[4] = lo(v.z), w[5] = hi(v.z), w[6] = lo(v.w), w[7] = hi(v.w);
  } else if (F == FMT_FP32) {
    const float4 a = __ldg((const float4*)(l.codes + 4 * k)), b = __ldg((const float4*)(l.codes + 4 * k + 16));
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  } else if (F == FMT_FP8_BF16 || F == FMT_FP8_FP32) {
    const uint2 v = __ldg((const uint2*)(l.codes + k));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      w[i] = e4m3(v.x >> (8 * i) & 255);
      w[4 + i] = e4m3(v.y >> (8 * i) & 255);
    }
  } else if (F == FMT_NVFP4) {
    const uint32_t v = __ldg((const uint32_t*)(l.codes + k / 2)), g = k / 16;
    const float s = e4m3(l.scales[g / 4 * 512 + g % 4]);
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = e2m1(v >> (4 * i) & 15) * s;
  } else if (F == FMT_Q4) {
    const uint32_t v = __ldg((const uint32_t*)(l.codes + k / 2));
    const float s = half_at(l.scales, k / 64);
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = (float)((int)(v << (28 - 4 * i)) >> 28) * s;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) w[i] = weight<F>(l, k + i);
  }
}

// What the sum over codes is multiplied with.
template <int F>
DEVICE float finish(const Mat& m, uint32_t n, const Line& l, float sum) {
  if (F == FMT_FP8_BF16) return sum * from_bf16(*(const bf16*)l.scales);
  if (F == FMT_FP8_FP32) return sum * *(const float*)l.scales;
  if (F == FMT_NVFP4) return sum / m.divisors[(m.first + n) / m.expert_rows];
  return sum;
}

template <bool XF>
DEVICE void x8(const void* x, uint64_t at, uint32_t k, uint32_t cols, bool fast, float* v) {
  if (!fast) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = k + i >= cols ? 0.0f : XF ? ((const float*)x)[at + k + i] : from_bf16(((const bf16*)x)[at + k + i]);
  } else if (XF) {
    const float4* q = (const float4*)((const float*)x + at + k);
    const float4 a = q[0], b = q[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
    const uint4 q = *(const uint4*)((const bf16*)x + at + k);
    v[0] = lo(q.x), v[1] = hi(q.x), v[2] = lo(q.y), v[3] = hi(q.y);
    v[4] = lo(q.z), v[5] = hi(q.z), v[6] = lo(q.w), v[7] = hi(q.w);
  }
}

template <int F, bool XF, int RM>
DEVICE void dot_of(const Mat& m, uint32_t n, const void* x, uint32_t ld, uint32_t r, float* acc) {
  const Line l = line_of<F>(m, n);
  const bool fast = m.k % 8 == 0 && ld % 8 == 0;
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll 2
  for (uint32_t k = lane * 8; k < m.k; k += 256) {
    float w[8];
    weight8<F>(l, k, m.k, fast, w);
#pragma unroll
    for (int j = 0; j < RM; j++) {
      if (RM == 1 || j < r) {
        float v[8];
        x8<XF>(x, (uint64_t)j * ld, k, m.k, fast, v);
        float s = acc[j];
#pragma unroll
        for (int i = 0; i < 8; i++) s = fmaf(w[i], v[i], s);
        acc[j] = s;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < RM; j++) acc[j] = finish<F>(m, n, l, warp_sum(acc[j]));
}

// acc[j] = row n of m times row j of x, in all lanes of the warp.
template <bool XF, int RM>
DEVICE void dot(const Mat& m, uint32_t n, const void* x, uint32_t ld, uint32_t r, float* acc) {
#pragma unroll
  for (int j = 0; j < RM; j++) acc[j] = 0.0f;
  switch (m.format) {
    case FMT_BF16: dot_of<FMT_BF16, XF, RM>(m, n, x, ld, r, acc); break;
    case FMT_FP32: dot_of<FMT_FP32, XF, RM>(m, n, x, ld, r, acc); break;
    case FMT_FP8_BF16: dot_of<FMT_FP8_BF16, XF, RM>(m, n, x, ld, r, acc); break;
    case FMT_FP8_FP32: dot_of<FMT_FP8_FP32, XF, RM>(m, n, x, ld, r, acc); break;
    case FMT_NVFP4: dot_of<FMT_NVFP4, XF, RM>(m, n, x, ld, r, acc); break;
    case FMT_Q4: dot_of<FMT_Q4, XF, RM>(m, n, x, ld, r, acc); break;
    case FMT_Q5: dot_of<FMT_Q5, XF, RM>(m, n, x, ld, r, acc); break;
    case FMT_Q6: dot_of<FMT_Q6, XF, RM>(m, n, x, ld, r, acc); break;
    case FMT_Q8: dot_of<FMT_Q8, XF, RM>(m, n, x, ld, r, acc); break;
  }
}

template <int F>
DEVICE float value_of(const Mat& m, uint32_t n, uint32_t k) {
  const Line l = line_of<F>(m, n);
  return finish<F>(m, n, l, weight<F>(l, k));
}
// One value of a stored matrix.
DEVICE float value(const Mat& m, uint32_t n, uint32_t k) {
  switch (m.format) {
    case FMT_BF16: return value_of<FMT_BF16>(m, n, k);
    case FMT_FP32: return value_of<FMT_FP32>(m, n, k);
    case FMT_FP8_BF16: return value_of<FMT_FP8_BF16>(m, n, k);
    case FMT_FP8_FP32: return value_of<FMT_FP8_FP32>(m, n, k);
    case FMT_NVFP4: return value_of<FMT_NVFP4>(m, n, k);
    case FMT_Q4: return value_of<FMT_Q4>(m, n, k);
    case FMT_Q5: return value_of<FMT_Q5>(m, n, k);
    case FMT_Q6: return value_of<FMT_Q6>(m, n, k);
    case FMT_Q8: return value_of<FMT_Q8>(m, n, k);
  }
  return 0.0f;
}
