// Router and shared expert for R = 1..8 rows:
//
//   router_shared   logits = Wr x (FP32);  hs = silu(Wg x) * (Wu x);  shared_logit = ws x.
//
// The block's rows (at most seven pairs) are in shared memory before the dependency wait and in registers before the activations come; the
// rows of activations are the columns of the tensor instruction. Fixed order of sums. K % 16 = 0 and at most 2560.
//
// Memory idles here and while the experts are chosen, so the beginning of what is certain to be read after them is brought into L2.
#include "common.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

static constexpr int kRows = 14;  // of a block
static constexpr int kThreads = 512;
static constexpr int kWarps = kThreads / 32;
static constexpr int kChunks = 5;  // of 32 k that a warp has: K <= 2,560

// In a chunk lane (g, t) = (lane / 4, lane % 4) has k = 8 t .. of rows g and g + 8 as the first operand of the tensor instruction and of
// activation row g as the second: a dot product does not care about the order of k.

// Bytes from one weight row to the next in shared memory, without bank conflicts.
NINFER_DEVICE uint32_t weight_pitch(bool fp8, uint32_t k) { return fp8 ? k + 32 : 2 * k + 64; }
// The same for rows of the second operand.
NINFER_DEVICE uint32_t operand_pitch(uint32_t k) { return 2 * k + 64; }

// Eight weights as BF16 pairs in order of k; E4M3 as their value times 2^-120 (see e4m3x4_bf16).
template <bool FP8>
NINFER_DEVICE uint4 eight_weights(uint32_t at) {
  if constexpr (FP8) {
    const uint2 w = lds64(at);
    uint4 r;
    e4m3x4_bf16(__byte_perm(w.x, 0, 0x3120), r.x, r.y);
    e4m3x4_bf16(__byte_perm(w.y, 0, 0x3120), r.z, r.w);
    return r;
  } else {
    return lds128(at);
  }
}
NINFER_DEVICE uint4 scale_e4m3_x(uint4 v) { return make_uint4(scale_e4m3_x(v.x), scale_e4m3_x(v.y), scale_e4m3_x(v.z), scale_e4m3_x(v.w)); }

// Rows g (lo) and g + 8 (hi) of a chunk times its operand, in two sums that shorten the chain.
NINFER_DEVICE void multiply_chunk(float* a, float* b, uint4 lo, uint4 hi, uint4 x) {
  mma_bf16(a, lo.x, hi.x, lo.y, hi.y, x.x, x.y);
  mma_bf16(b, lo.z, hi.z, lo.w, hi.w, x.z, x.w);
}

// A warp's chunks of the block's rows, n of them present.
template <bool FP8>
struct Rows {
  uint32_t at;  // of row g at the lane's k of the warp's first chunk
  uint32_t k, n, size;
  uint32_t down;  // from row g to row g + 8
  NINFER_DEVICE Rows(uint32_t weights, uint32_t pitch, uint32_t rows, uint32_t width) {
    const uint32_t lane = threadIdx.x % 32;
    k = threadIdx.x / 32 * kChunks * 32 + lane % 4 * 8, n = rows, size = width, down = 8 * pitch;
    at = weights + lane / 4 * pitch + k * (FP8 ? 1 : 2);
  }
  NINFER_DEVICE void read(int c, uint4& lo, uint4& hi) const {
    const uint32_t g = threadIdx.x % 32 / 4;
    const bool in = k + c * 32 < size;
    lo = hi = make_uint4(0, 0, 0, 0);
    if (in && g < n) lo = eight_weights<FP8>(at + c * (FP8 ? 32 : 64));
    if (in && g + 8 < n) hi = eight_weights<FP8>(at + down + c * (FP8 ? 32 : 64));
  }
};

// Asks for the block's pieces. One thread does, whose work comes later: an instruction is some 40 ns, whatever its size.
NINFER_DEVICE void bring_ahead(const Ahead& a) {
#pragma unroll 1
  for (uint32_t i = blockIdx.x; i < a.n; i += gridDim.x) {
    const bool second = i >= a.first;
    const uint8_t* at = (const uint8_t*)a.at[second] + (uint64_t)(second ? i - a.first : i) * a.pitch;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(a.bytes) : "memory");
  }
}

// Unit u is a pair of rows: router rows 2u and 2u+1, or gate row j and up row j, or the shared gate vector alone.
template <bool FP8>
NINFER_DEVICE void router_rows(const RouterParams& p, uint32_t unit0, uint32_t n) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t routing = ceil_div(p.experts, 2), all = routing + p.inner;
  __shared__ float sums[kWarps][8][16];

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
  const uint32_t slice = bytes * p.k, pitch = weight_pitch(FP8, p.k), opitch = operand_pitch(p.k);
  const uint32_t bar = smem_addr(smem), operand = bar + 128, weights = operand + p.r * opitch;
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
  if (warp < kRows && lane == 0) {  // issuing a bulk copy takes a warp some 40 ns: every warp issues a row
    const void *m, *s;
    uint32_t row;
    if (row_of(warp, m, s, row)) bulk_load(weights + warp * pitch, (const uint8_t*)m + (uint64_t)row * slice, slice, bar, policy_evict_first());
  }
  float scale = 1.0f;
  if (FP8 && threadIdx.x % 16 < kRows) {
    const void *m, *s;
    uint32_t row;
    if (row_of(threadIdx.x % 16, m, s, row) && s) scale = E4M3_UNDO * row_scale(s, p.scale_f32, row);
  }
  if (p.trigger == 0) pdl_trigger();
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  // Not before the wait, where the kernels ahead need memory themselves.
  if (threadIdx.x == kThreads - 32) bring_ahead(p.ahead);
  STAMP(2)
  const uint64_t policy = policy_evict_first();
  for (uint32_t i = threadIdx.x; i < p.k / 8 * p.r; i += kThreads) {
    const uint32_t a = i / (p.k / 8), k = i % (p.k / 8) * 8;
    copy16(operand + a * opitch + k * 2, p.x + (uint64_t)a * p.x_ld + k, policy);
  }
  copy_commit();
  mbar_wait(bar, 0);
  if (p.trigger == 1) pdl_trigger();
  // rows that are not there hold what they will: nobody reads their sums
  const Rows<FP8> rows(weights, pitch, 2 * n, p.k);
  uint4 lo[kChunks], hi[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; c++) rows.read(c, lo[c], hi[c]);
  copy_wait<0>();
  STAMP(3)
  __syncthreads();
  STAMP(4)
  float a[4] = {0, 0, 0, 0}, b[4] = {0, 0, 0, 0};
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (g < p.r && rows.k + c * 32 < p.k) v = lds128(operand + g * opitch + (rows.k + c * 32) * 2);
    if (FP8) v = scale_e4m3_x(v);
    multiply_chunk(a, b, lo[c], hi[c], v);
  }
#pragma unroll
  for (uint32_t i = 0; i < 2; i++)
    if (2 * t + i < p.r) sums[warp][2 * t + i][g] = a[i] + b[i], sums[warp][2 * t + i][g + 8] = a[i + 2] + b[i + 2];
  __syncthreads();
  STAMP(5)
  const uint32_t of = threadIdx.x / 16, row = threadIdx.x % 16;
  float s = 0;
  if (of < p.r) {
#pragma unroll
    for (int i = 0; i < kWarps; i++) s += sums[i][of][row];
    s *= scale;
  }
  const float second = __shfl_down_sync(~0u, s, 1);
  const uint32_t u = unit0 + row / 2;
  if (of < p.r && row % 2 == 0 && row / 2 < n) {
    if (u < routing) {
      p.logits[of * p.experts + 2 * u] = s;
      if (2 * u + 1 < p.experts) p.logits[of * p.experts + 2 * u + 1] = second;
    } else if (u < all) {
      p.hidden[(uint64_t)of * p.inner + u - routing] = __float2bfloat16_rn(silu(s) * second);
    } else {
      p.shared_logit[of] = s;
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
