// Router and shared expert for R = 1..8 rows, one after the other, without tensor instructions:
//
//   router_shared   logits = Wr x (FP32);  hs = silu(Wg x) * (Wu x);  shared_logit = ws x.
//
// The block's rows (at most seven pairs, shared by two halves of the warps) are in shared memory before the dependency wait; a thread has
// eight k of them. FP32 arithmetic, fixed order of sums. K % 16 = 0 and at most 2560.
#include "common.cuh"
#include "vector.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

static constexpr int kHalf = 10;  // warps that cover K
static constexpr int kWarps = 20;  // each half of them has its own rows
static constexpr int kThreads = 32 * kWarps;
static constexpr int kRows = 14, kOwn = 8;  // rows of a block, of a half

// Unit u is a pair of rows: router rows 2u and 2u+1, or gate row j and up row j, or the shared gate vector alone.
template <bool FP8>
NINFER_DEVICE void router_rows(const RouterParams& p, uint32_t unit0, uint32_t n) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / kHalf, k = (threadIdx.x - half * kHalf * 32) * 8;
  const uint32_t routing = ceil_div(p.experts, 2), all = routing + p.inner;
  const bool mine = k < p.k;
  __shared__ float sums[8][kHalf][16];

  auto row_of = [&](uint32_t i, const void*& w, const void*& scale, uint32_t& row) -> bool {
    const uint32_t u = unit0 + i / 2, second = i % 2;
    if (i / 2 >= n) return false;
    if (u < routing) {
      w = p.router, scale = p.router_scale, row = 2 * u + second;
      return row < p.experts;
    }
    if (u < all) {
      row = u - routing;
      w = second ? p.up : p.gate, scale = second ? p.up_scale : p.gate_scale;
      return true;
    }
    w = p.shared, scale = nullptr, row = 0;
    return !second;
  };

  STAMP_BEGIN(140 + FP8)
  constexpr uint32_t bytes = FP8 ? 1 : 2;  // of a weight
  const uint32_t slice = bytes * p.k, bar = smem_addr(smem), weights = bar + 128;
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    mbar_fence_init();
  }
  __syncthreads();
  if (warp == 0) {
    const void *m, *s;
    uint32_t row;
    const bool have = lane < kRows && row_of(lane, m, s, row);
    const uint32_t count = __popc(__ballot_sync(~0u, have));
    if (lane == 0) mbar_expect(bar, count * slice);
  }
  {  // issuing a bulk copy takes a warp some 40 ns: every warp issues a row or two
    const void *m, *s;
    uint32_t row;
    const uint32_t i = warp + lane * kWarps;
    if (i < kRows && row_of(i, m, s, row)) bulk_load(weights + i * slice, (const uint8_t*)m + (uint64_t)row * slice, slice, bar, policy_evict_first());
  }
  float scale = 1.0f;
  if (FP8 && threadIdx.x % 16 < kRows) {
    const void *m, *s;
    uint32_t row;
    if (row_of(threadIdx.x % 16, m, s, row) && s) scale = row_scale(s, p.scale_f32, row);
  }
  if (p.trigger == 0) pdl_trigger();
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)
  uint4 next = make_uint4(0, 0, 0, 0);
  if (mine) next = ldg_l2(p.x + k);
  mbar_wait(bar, 0);
  if (p.trigger == 1) pdl_trigger();
  STAMP(3)
  // A row's sums have the same order whatever rows are beside it.
#pragma unroll 1
  for (uint32_t a = 0; a < p.r; a++) {
    float v[8], values[kOwn];
    unpack(next, v);
    if (mine && a + 1 < p.r) next = ldg_l2(p.x + (uint64_t)(a + 1) * p.x_ld + k);
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      Eight<FP8> w = {};
      const uint32_t r = half * kOwn + i, u = unit0 + r / 2;
      const bool there = r / 2 < n && (u < routing ? 2 * u + r % 2 < p.experts : u < all || r % 2 == 0);
      if (there && mine) w.read(weights + r * slice + k * bytes);
      values[i] = dot8(w.w, v);
    }
    const float sum = scatter_sum<kOwn>(values);
    const uint32_t own = scattered();
    if (lane % 2 == 0 && own < kOwn) sums[a][warp - half * kHalf][half * kOwn + own] = sum;
  }
  STAMP(4)
  __syncthreads();
  STAMP(5)
  const uint32_t a = threadIdx.x / 16, row = threadIdx.x % 16;
  float s = 0;
  if (a < p.r) {
#pragma unroll
    for (int i = 0; i < kHalf; i++) s += sums[a][i][row];
    s *= scale;
  }
  const float second = __shfl_down_sync(~0u, s, 1);
  const uint32_t u = unit0 + row / 2;
  if (a < p.r && row % 2 == 0 && row / 2 < n) {
    if (u < routing) {
      p.logits[a * p.experts + 2 * u] = s;
      if (2 * u + 1 < p.experts) p.logits[a * p.experts + 2 * u + 1] = second;
    } else if (u < all) {
      p.hidden[(uint64_t)a * p.inner + u - routing] = __float2bfloat16_rn(silu(s) * second);
    } else {
      p.shared_logit[a] = s;
    }
  }
  STAMP(6)
}

NINFER_KERNEL(router_shared_bf16, RouterParams, kThreads, 2) {
  const uint32_t units = ceil_div(p.experts, 2) + p.inner + 1, first = share_start(units, gridDim.x, blockIdx.x);
  router_rows<false>(p, first, share_start(units, gridDim.x, blockIdx.x + 1) - first);
}

// The last block does the shared gate vector, which stays BF16.
NINFER_KERNEL(router_shared_e4m3, RouterParams, kThreads, 2) {
  const uint32_t units = ceil_div(p.experts, 2) + p.inner;
  if (blockIdx.x == gridDim.x - 1) {
    router_rows<false>(p, units, 1);
  } else {
    const uint32_t first = share_start(units, gridDim.x - 1, blockIdx.x);
    router_rows<true>(p, first, share_start(units, gridDim.x - 1, blockIdx.x + 1) - first);
  }
}
