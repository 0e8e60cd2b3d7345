// Building blocks shared by all kernels: programmatic dependent launch, mbarriers and bulk copies, the m16n8k16 tensor
// instruction with BF16 operands, and exact conversions of stored weight formats to BF16 pairs.
//
// Portable between sm_90a and sm_120a: nothing here needs wgmma, clusters or multicast.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef __nv_bfloat16 bf16;

#define NINFER_DEVICE __device__ __forceinline__

// A kernel takes exactly one parameter struct by value. tools/kernelgen finds kernels by this macro: name, parameter
// struct, threads a block, blocks an SM the register allocation must leave room for (R5: two kernels share an SM).
#define NINFER_KERNEL(name, Params, threads, blocks_per_sm) \
  extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm) name(const __grid_constant__ Params p)

// ---- programmatic dependent launch (rules R1..R7 of docs/kernels.md) ----

// Blocks until every kernel this one depends on has finished and its writes are visible. Every block runs it.
NINFER_DEVICE void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel's blocks start, once all blocks of this one have said so.
NINFER_DEVICE void pdl_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- memory ----

NINFER_DEVICE uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

NINFER_DEVICE uint4 lds128(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
NINFER_DEVICE uint2 lds64(uint32_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
NINFER_DEVICE uint32_t lds32(uint32_t a) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
NINFER_DEVICE uint32_t lds16(uint32_t a) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
  return v;
}
NINFER_DEVICE void sts64(uint32_t a, uint2 v) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(v.x), "r"(v.y) : "memory"); }
// Stores without a branch.
NINFER_DEVICE void sts32_if(bool yes, uint32_t a, float v) {
  asm volatile("{.reg .pred q; setp.ne.u32 q, %2, 0; @q st.shared.f32 [%0], %1;}" ::"r"(a), "f"(v), "r"((uint32_t)yes) : "memory");
}
NINFER_DEVICE void sts64_if(bool yes, uint32_t a, uint2 v) {
  asm volatile("{.reg .pred q; setp.ne.u32 q, %3, 0; @q st.shared.v2.u32 [%0], {%1,%2};}" ::"r"(a), "r"(v.x), "r"(v.y), "r"((uint32_t)yes) : "memory");
}
NINFER_DEVICE void sts128(uint32_t a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Activations are read from L2: a line pulled into L1 before the dependency wait would be stale (R7).
NINFER_DEVICE uint4 ldg_l2(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
NINFER_DEVICE float ldg_l2_f32(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
NINFER_DEVICE float ldg_l2_bf16(const bf16* p) {
  uint16_t v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return __uint_as_float((uint32_t)v << 16);
}

// ---- mbarriers and bulk copies ----

NINFER_DEVICE void mbar_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to others and to the copy engine; a block barrier must follow. A fence of the proxies is a MEMBAR besides.
NINFER_DEVICE void mbar_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
NINFER_DEVICE void mbar_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
NINFER_DEVICE void mbar_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
NINFER_DEVICE void mbar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(bar), "r"(parity) : "memory");
}
// Bulk copy global to shared; addresses and size are multiples of 16. Weights are read once: evict first.
NINFER_DEVICE void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
NINFER_DEVICE uint64_t policy_evict_first() {
  uint64_t p;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
// 16-byte asynchronous copy past L1, in groups that complete in order for the issuing thread. A thread that reads only what it copied
// itself needs no barrier: its own wait is enough.
NINFER_DEVICE void copy16(uint32_t dst, const void* src, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy) : "memory");
}
NINFER_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
NINFER_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Barrier among the first n threads of named barrier id (1..15); n is a multiple of 32.
NINFER_DEVICE void named_sync(int id, int n) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory"); }
// Counts towards the same barrier without waiting for it.
NINFER_DEVICE void named_arrive(int id, int n) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory"); }

// Debug builds (-DNINFER_STAMPS) note SM clocks of block 0: where inside a kernel the time goes. Slot layout: kernel tag, then clocks.
#ifdef NINFER_STAMPS
__device__ unsigned long long stamps[1 << 16];
__device__ unsigned int stamp_next;
#define STAMP_BEGIN(tag) STAMP_BEGIN_IN(tag, 0)
// Noted by the given thread.
#define STAMP_BEGIN_IN(tag, thread)                                                         \
  unsigned long long* stamp_at = nullptr;                                                   \
  if (threadIdx.x == (thread) && blockIdx.x == 0) {                                         \
    stamp_at = stamps + 16 * (atomicAdd(&stamp_next, 1u) % (1u << 12));                     \
    stamp_at[0] = tag;                                                                      \
    stamp_at[1] = clock64();                                                                \
  }
#define STAMP(i) \
  if (stamp_at) stamp_at[1 + i] = clock64();
#else
#define STAMP_BEGIN(tag)
#define STAMP_BEGIN_IN(tag, thread)
#define STAMP(i)
#endif

// ---- tensor instruction ----

// acc += A(16x16) * B(16x8). Lane (g = lane/4, t = lane%4) holds a0,a2 of row g, a1,a3 of row g+8, b of column g; acc[0..1] are
// row g, columns 2t and 2t+1, acc[2..3] the same of row g+8. A dot product does not care about the order of k, so callers
// let a lane's k positions be whatever 16 bytes it loaded, the same in A and B.
NINFER_DEVICE void mma_bf16(float* acc, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same with FP16 operands.
NINFER_DEVICE void mma_f16(float* acc, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- exact conversions ----

// Four E4M3 codes (k..k+3) to two FP16 pairs (k, k+1), (k+2, k+3): one instruction each, a third of the bit placement's cost.
NINFER_DEVICE void e4m3x4_f16(uint32_t w, uint32_t& lo, uint32_t& hi) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(lo), "=r"(hi) : "r"(w));
}
NINFER_DEVICE uint32_t pack_f16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
NINFER_DEVICE uint32_t max_bf162(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Largest magnitude among eight BF16 numbers, as its 15 bits.
NINFER_DEVICE uint32_t magnitude8(uint4 v) {
  const uint32_t m = 0x7fff7fffu;
  uint32_t r = max_bf162(max_bf162(v.x & m, v.y & m), max_bf162(v.z & m, v.w & m));
  return max(r & 0xffffu, r >> 16);
}
// Power of two that brings a row with this largest magnitude into [2^14, 2^15), as its exponent.
NINFER_DEVICE int f16_shift(uint32_t magnitude) { return max(-100, min(100, 141 - (int)(magnitude >> 7))); }
NINFER_DEVICE float power_of_two(int e) { return __uint_as_float((uint32_t)(127 + e) << 23); }
NINFER_DEVICE uint32_t bf16_to_f16(uint32_t pair, float scale) {
  return pack_f16(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
}

NINFER_DEVICE uint32_t mul_bf162(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
NINFER_DEVICE uint32_t sub_bf162(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Four E4M3 codes (k..k+3) to two BF16 pairs: (k, k+2) and (k+1, k+3). Sign and the seven other bits are placed so that the BF16
// number is the value times 2^-120 (subnormals too, as BF16 subnormals, which the tensor instruction honours). Activations carry
// 2^60 (scale_e4m3_x) and the epilogue multiplies by E4M3_UNDO, so nothing is multiplied per weight: products stand 60 binary
// orders below their value, far from FP32's own subnormals.
#define E4M3_UNDO 1152921504606846976.0f  // 2^60
NINFER_DEVICE void e4m3x4_bf16(uint32_t w, uint32_t& even, uint32_t& odd) {
  even = ((w << 4) & 0x07f007f0u) | ((w << 8) & 0x80008000u);
  odd = ((w >> 4) & 0x07f007f0u) | (w & 0x80008000u);
}
NINFER_DEVICE uint32_t scale_e4m3_x(uint32_t pair) { return mul_bf162(pair, 0x5d805d80u); }  // times 2^60

// Two E4M3 codes to FP32.
NINFER_DEVICE float2 e4m3x2_f32(uint32_t two) {
  uint32_t h;
  asm("{.reg .b16 l, u; mov.b32 {l, u}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(h) : "r"(two));
  return __half22float2(*(__half2*)&h);
}
// Reorders eight BF16 activations (k..k+7) to the pair order of the weight format.
NINFER_DEVICE uint4 order_pairs_by4(uint4 v) {  // (0,4)(1,5)(2,6)(3,7): 4-bit codes
  uint4 r;
  r.x = __byte_perm(v.x, v.z, 0x5410);
  r.y = __byte_perm(v.x, v.z, 0x7632);
  r.z = __byte_perm(v.y, v.w, 0x5410);
  r.w = __byte_perm(v.y, v.w, 0x7632);
  return r;
}

// ---- small arithmetic ----

NINFER_DEVICE float bf16_lo(uint32_t pair) { return __uint_as_float(pair << 16); }
NINFER_DEVICE float bf16_hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
NINFER_DEVICE uint32_t pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
NINFER_DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
NINFER_DEVICE float silu(float x) { return x * sigmoid(x); }
NINFER_DEVICE float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
NINFER_DEVICE uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
// a / b for a below 2^21, in six instructions: the reciprocal and the product are off by less than the half that is added.
NINFER_DEVICE uint32_t quotient(uint32_t a, uint32_t b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"((float)b));
  return (uint32_t)(((float)a + 0.5f) * r);
}

// First row of share i of n rows cut into m shares that differ by at most one.
NINFER_DEVICE uint32_t share_start(uint32_t n, uint32_t m, uint32_t i) {
  uint32_t q = n / m, r = n % m;
  return i * q + (i < r ? i : r);
}

// Order-preserving key: larger float, larger key; NaN lowest; equal floats (and both zeros) equal keys.
NINFER_DEVICE uint32_t float_key(float f) {
  if (!(f == f)) return 0;
  uint32_t b = __float_as_uint(f + 0.0f);
  if (b == 0x80000000u) b = 0;
  return (b & 0x80000000u) ? ~b : (b | 0x80000000u);
}
