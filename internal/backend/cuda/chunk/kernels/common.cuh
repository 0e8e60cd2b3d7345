// What the kernels of wide passes share: dependent launch, tensor instructions, copies to shared memory, pages.
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
DEVICE void pdl() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

DEVICE float lo(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float hi(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float from_bf16(bf16 v) { return __bfloat162float(v); }
DEVICE bf16 to_bf16(float v) { return __float2bfloat16_rn(v); }
DEVICE float round_bf16(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }
DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
DEVICE uint32_t pack_half(float low, float high) {
  uint32_t v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
// Exponentials and quotients within a few units of the last place, without the branches that exact ones bring.
DEVICE float inverse_of(float x) {
  float v;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
DEVICE float sigmoid(float x) { return inverse_of(1.0f + __expf(-x)); }
DEVICE float silu(float x) { return x * sigmoid(x); }
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
DEVICE float power2(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
DEVICE float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
// Sum and largest over the four lanes that share a row of a tensor fragment.
DEVICE float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
DEVICE float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

DEVICE uint32_t shared_at(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

DEVICE void tensor_half(float* acc, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void tensor_bf16(float* acc, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void matrices(uint32_t* r, uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
DEVICE void matrices_turned(uint32_t* r, uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// Transposes an 8x8 matrix of 16-bit values held by a warp, a pair of a row's values a lane.
DEVICE uint32_t turn(uint32_t v) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// Sixteen bytes, or zeros where there is nothing.
DEVICE void copy16(uint32_t to, const void* from, bool there) {
  const uint32_t n = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

DEVICE void barrier_init(uint32_t at, uint32_t count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
DEVICE void barrier_expect(uint32_t at, uint32_t bytes) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory"); }
// This thread's arrival, once its copies so far have landed.
DEVICE void barrier_copies(uint32_t at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory"); }
// A warp's arrival at a barrier: one lane's, for what all have done before they met. compute-sanitizer's racecheck takes a barrier to order only those
// threads that arrive at it, so that it wants code compiled with -DNINFER_CHECKED.
#ifdef NINFER_CHECKED
static constexpr uint32_t kWarp = 32;
#else
static constexpr uint32_t kWarp = 1;
#endif
DEVICE void warp_arrives(uint32_t bar, uint32_t lane) {
  if (kWarp > 1 || lane == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}
DEVICE void barrier_wait(uint32_t at, uint32_t parity) {
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @done bra over; bra again; over:}" ::"r"(at), "r"(parity) : "memory");
}
DEVICE void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// An entry of a tile's list: a block, and above it which rows of the tile see it.
static constexpr uint32_t kMaskShift = 17, kIdMask = (1u << kMaskShift) - 1;

// Tokens of a page, and the row of a token or of a block of four in planes that consist of pages.
static constexpr uint32_t kPage = 64;
DEVICE uint64_t token_row(const uint32_t* pages, uint32_t t) { return (uint64_t)pages[t / kPage] * kPage + t % kPage; }
DEVICE uint64_t block_row(const uint32_t* pages, uint32_t b) { return (uint64_t)pages[b / (kPage / 4)] * (kPage / 4) + b % (kPage / 4); }
