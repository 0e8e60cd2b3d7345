// Shared by the prefill kernels: memory, tensor instructions, exact conversions of stored formats.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef __nv_bfloat16 bf16;

#define NINFER_DEVICE __device__ __forceinline__

// A kernel takes exactly one parameter struct by value. tools/kernelgen finds kernels by this macro: name, parameter
// struct, threads a block, blocks an SM the register allocation must leave room for: on sm_90, elsewhere shared memory allows one only.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define NINFER_BLOCKS(n) 1
#else
#define NINFER_BLOCKS(n) n
#endif
//
// Every kernel lets the next one take places as they become free, and waits for all before it has read its first word: where the next is one of
// these too and was launched so (Run), its blocks are there when the last one of this ends.
#define NINFER_KERNEL(name, Params, threads, blocks_per_sm)                                                                  \
  static NINFER_DEVICE void name##_body(const Params& p);                                                                    \
  extern "C" __global__ void __launch_bounds__(threads, NINFER_BLOCKS(blocks_per_sm)) name(const __grid_constant__ Params p) { \
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");                                                          \
    asm volatile("griddepcontrol.wait;" ::: "memory");                                                                       \
    name##_body(p);                                                                                                          \
  }                                                                                                                          \
  static NINFER_DEVICE void name##_body(const Params& p)

extern __shared__ __align__(1024) uint8_t smem[];


// ---- memory ----

NINFER_DEVICE uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
NINFER_DEVICE void sts128(uint32_t a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Sixteen bytes, or zeros, asynchronously.
NINFER_DEVICE void copy16(uint32_t dst, const void* src, bool live) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(live ? 16 : 0) : "memory");
}
NINFER_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
NINFER_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
NINFER_DEVICE uint4 ldg128(const void* p) { return __ldg((const uint4*)p); }
NINFER_DEVICE void stg128(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
NINFER_DEVICE uint2 ldg64(const void* p) { return __ldg((const uint2*)p); }

// ---- tensor instruction ----

// Four 8x8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8.
NINFER_DEVICE void ldmatrix4(uint32_t* r, uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a));
}
// acc += A(16x16) * B(16x8). Lane (g = lane / 4, t = lane % 4): acc[0..1] are row g, columns 2t and 2t+1, acc[2..3] the same of row g + 8.
NINFER_DEVICE void mma(float* acc, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- exact conversions ----

NINFER_DEVICE float bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }
NINFER_DEVICE float bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
NINFER_DEVICE uint32_t pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
NINFER_DEVICE uint32_t mul_bf162(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Four E4M3 codes to FP32, which holds them exactly.
NINFER_DEVICE float4 e4m3x4_f32(uint32_t w) {
  uint32_t lo, hi;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(lo), "=r"(hi) : "r"(w));
  const float2 a = __half22float2(*(__half2*)&lo), b = __half22float2(*(__half2*)&hi);
  return make_float4(a.x, a.y, b.x, b.y);
}
// Eight E4M3 codes to BF16, exactly.
NINFER_DEVICE uint4 e4m3x8_bf16(uint32_t a, uint32_t b) {
  const float4 x = e4m3x4_f32(a), y = e4m3x4_f32(b);
  return make_uint4(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w), pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
}

// Sixteen E2M1 codes of a packed bank (cuda/kernels, expert_repack) to eight BF16 pairs times scale: (k, k+4) for k = 0..3, then the same
// from 8 on. The placed bits are the value times 2^-126, the scale carries 2^118, the remaining 2^8 is left to the epilogue (NVFP4_UNDO).
//
// In each 16-bit half three codes have magnitude and sign nine bits apart, where a shift and a mask put them in place; the bits of the
// fourth are split over both words.
#define NVFP4_UNDO 256.0f
NINFER_DEVICE void e2m1x16_bf16(uint2 w, uint32_t scale, uint4& lo, uint4& hi) {
  const uint32_t keep = 0x81c081c0u, low = 0x001b001bu, six = 0x003f003fu, a = w.x, b = w.y;
  uint32_t c = ((a >> 10) & low) | ((b >> 8) & ~low);
  c = (c & six) | ((b >> 2) & ~six);
  lo.x = mul_bf162(a & keep, scale);
  lo.y = mul_bf162((a << 3) & keep, scale);
  lo.z = mul_bf162((a << 6) & keep, scale);
  lo.w = mul_bf162((c << 6) & keep, scale);
  hi.x = mul_bf162(b & keep, scale);
  hi.y = mul_bf162((b << 3) & keep, scale);
  hi.z = mul_bf162((b << 6) & keep, scale);
  hi.w = mul_bf162((c << 3) & keep, scale);
}
// The layout's other side: sixteen codes, low nibble first, to two words.
NINFER_DEVICE uint2 pack_codes(uint32_t x, uint32_t y) {
  uint32_t w[2] = {0, 0};
#pragma unroll
  for (int k = 0; k < 16; k++) {
    const uint32_t code = (k < 8 ? x : y) >> (4 * (k & 7)) & 15, magnitude = code & 7, sign = code >> 3;
    const int half = 16 * ((k >> 2) & 1), j = k & 3, word = k >> 3;
    if (j < 3) {
      w[word] |= (magnitude << (6 - 3 * j) | sign << (15 - 3 * j)) << half;
    } else {
      const int at = (word ? 13 : 10) + half;
      w[0] |= (magnitude & 3) << at;
      w[1] |= (magnitude >> 2 | sign << 1) << at;
    }
  }
  return make_uint2(w[0], w[1]);
}
// Two E4M3 block scales, bytes 0 and 1, to two BF16 pairs, each the scale times 2^118 twice. Scales are never negative.
NINFER_DEVICE void block_scales(uint32_t two, uint32_t& first, uint32_t& second) {
  const uint32_t placed = ((two & 0x7fu) << 4) | ((two & 0x7f00u) << 12);
  const uint32_t s = mul_bf162(mul_bf162(placed, 0x7b807b80u), 0x7a807a80u);  // 2^-120 in place, times 2^120, times 2^118
  first = __byte_perm(s, 0, 0x1010);
  second = __byte_perm(s, 0, 0x3232);
}
// Eight BF16 numbers to the order of e2m1x16_bf16: (0,4)(1,5)(2,6)(3,7).
NINFER_DEVICE uint4 order8(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
}

// ---- small arithmetic ----

NINFER_DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
// One instruction for the special function unit instead of two; off by at most 2.5e-4.
NINFER_DEVICE float sigmoid_fast(float x) {
  float t;
  asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(0.5f * x));
  return fmaf(0.5f, t, 0.5f);
}
// Where exp(-x) overflows the quotient is 0, and 0 times x is 0.
NINFER_DEVICE float silu(float x) { return x * sigmoid(x); }
NINFER_DEVICE float row_scale(const void* scale, uint32_t f32, uint32_t row) {
  return f32 ? __ldg((const float*)scale + row) : __uint_as_float((uint32_t)__ldg((const uint16_t*)scale + row) << 16);
}
NINFER_DEVICE float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
__host__ __device__ constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Order-preserving key: larger float, larger key; NaN lowest; both zeros equal.
NINFER_DEVICE uint32_t float_key(float f) {
  if (!(f == f)) return 0;
  const uint32_t b = __float_as_uint(f + 0.0f);
  return b == 0x80000000u ? 0x80000000u : (b & 0x80000000u) ? ~b : (b | 0x80000000u);
}

// Functions of a product's epilogue; gemm.go numbers them alike.
#define EPILOGUE_PLAIN 0
#define EPILOGUE_SILU 1
#define EPILOGUE_SIGMOID2 2
NINFER_DEVICE float finish(float v, uint32_t epilogue, float factor) {
  v *= factor;
  if (epilogue == EPILOGUE_SILU) return silu(v);
  if (epilogue == EPILOGUE_SIGMOID2) return 2.0f * sigmoid(v);
  return v;
}
