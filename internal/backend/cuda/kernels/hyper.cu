// Hyper-connection site: mixes four residual streams into a block's input and makes the weights that put its output back.
//
//   hc_down    X' = X + inject * y (BF16);  d[i] = sum_k Wdown[i][k] X'[k] (1 + w[k]) per stream, four inject rows likewise, and
//              the streams' sums of squares. The norm is a scalar per stream, so it is applied to the partial sums later.
//   hc_up_mix  low = silu(sum_s rstd_s d_s / 4);  M = sigmoid(Wup low);  mix[c] = mean_s M[s][c] rstd_s X'[s][c] (1 + w[s][c]);
//              inject = 2 sigmoid(sum_s rstd_s d_s / 4) from the inject rows.
//
// With few rows what counts is the time from the activations' arrival to the result. So a block's weights come before the dependency wait,
// a thread keeps its share in registers and needs nothing but its own few activations: hc_down has eight k of the block's rows
// (at most ten) in a thread, hc_up_mix a quarter of a row in each of four lanes. All arithmetic is FP32; sums have a fixed order that does
// not depend on the number of rows.
//
//   Shapes: H % 16 = 0 and at most 2560, L % 16 = 0 and at most 320, R = 1..8.
//
// Weights loaded straight into registers were slower: loads that wait for a place in L1 hold up the neighbour's shared memory.
#include "common.cuh"
#include "vector.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

static constexpr float kEps = 1e-6f;
static constexpr int kMaxRows = 8;

static constexpr int kDownWarps = 12;  // ten of them have work at H = 2560; twelve bring the register allocation to 80
static constexpr int kDownThreads = 32 * kDownWarps;
static constexpr int kDownRows = 10;

// ONE: a single row, whose weights stay in registers while its activations come; the arithmetic is the same.
template <bool FP8, bool INJECT, bool ONE>
NINFER_DEVICE void down_rows(const HcDownParams& p, uint32_t stream, uint32_t group) {
  constexpr int kRows = INJECT ? 4 : kDownRows, kValues = INJECT ? 5 : kDownRows;  // the fifth: the sum of squares
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t row0 = INJECT ? 0 : share_start(p.l, p.groups, group);
  const uint32_t n = INJECT ? (p.inj_w ? 4 : 0) : share_start(p.l, p.groups, group + 1) - row0;
  const uint32_t k = threadIdx.x * 8;
  const bool mine = k < p.h;
  constexpr uint32_t bytes = FP8 && !INJECT ? 1 : 2;  // of a weight
  const uint32_t slice = bytes * p.h, bar = smem_addr(smem), weights = bar + 128;
  __shared__ float sums[ONE ? 1 : kMaxRows][kDownWarps][12];

  STAMP_BEGIN(120 + FP8)
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    mbar_fence_init();
    mbar_expect(bar, n * slice);
  }
  __syncthreads();
  if (warp < n && lane == 0)
    bulk_load(weights + warp * slice, (const uint8_t*)(INJECT ? (const void*)p.inj_w : p.down) + ((uint64_t)(row0 + warp) * 4 + stream) * slice, slice, bar,
              policy_evict_first());
  uint4 norm = make_uint4(0, 0, 0, 0);
  if (mine) norm = __ldg((const uint4*)(p.norm + (uint64_t)stream * p.h + k));
  float scale = 1.0f;
  if (FP8 && !INJECT && threadIdx.x % 16 < n) scale = row_scale(p.down_scale, p.scale_f32, row0 + threadIdx.x % 16);
  if (p.trigger == 0) pdl_trigger();
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)
  uint4 next_x = make_uint4(0, 0, 0, 0), next_y = next_x;
  float next_inject = 0;
  auto fetch = [&](uint32_t r) {
    if (mine) next_x = ldg_l2(p.x + ((uint64_t)r * 4 + stream) * p.h + k);
    if (mine && p.y) next_y = ldg_l2(p.y + (uint64_t)r * p.h + k), next_inject = ldg_l2_f32(p.inject + r * 4 + stream);
  };
  fetch(0);
  mbar_wait(bar, 0);
  Eight<FP8 && !INJECT> w[kRows];
  if (ONE)
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      w[i] = {};
      if (i < (int)n && mine) w[i].read(weights + i * slice + k * bytes);
    }
  if (p.trigger == 1) pdl_trigger();
  STAMP(3)
  // A row's sums have the same order whatever rows are beside it.
#pragma unroll 1
  for (uint32_t r = 0; r < (ONE ? 1 : p.r); r++) {
    uint4 x = next_x;
    const uint4 y = next_y;
    const float inject = next_inject;
    if (!ONE && r + 1 < p.r) fetch(r + 1);
    float v[8] = {}, square = 0, values[kValues] = {};
    if (mine) {
      if (p.y) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          uint32_t &a = (&x.x)[i], b = (&y.x)[i];
          a = pack_bf16(fmaf(inject, bf16_lo(b), bf16_lo(a)), fmaf(inject, bf16_hi(b), bf16_hi(a)));
        }
      }
      // the blocks of a stream share the writing of the rows
      if (!INJECT && (r < p.groups ? r : 0) == group) *(uint4*)(p.x_out + ((uint64_t)r * 4 + stream) * p.h + k) = x;
      float nf[8];
      unpack(x, v), unpack(norm, nf);
#pragma unroll
      for (int i = 0; i < 8; i++) square = fmaf(v[i], v[i], square), v[i] = fmaf(v[i], nf[i], v[i]);
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        Eight<FP8 && !INJECT> now = {};
        if (ONE)
          now = w[i];
        else if (i < (int)n)
          now.read(weights + i * slice + k * bytes);
        values[i] = dot8(now.w, v);
      }
    }
    if (INJECT) values[4] = square;
    const float sum = scatter_sum<kValues>(values);
    const uint32_t own = scattered();
    if (lane % 2 == 0 && own < kValues) sums[r][warp][own] = sum;
  }
  STAMP(4)
  __syncthreads();
  STAMP(5)
  const uint32_t r = threadIdx.x / 16, value = threadIdx.x % 16;
  if (r < p.r && value < kValues) {
    float s = 0;
#pragma unroll
    for (int i = 0; i < kDownWarps; i++) s += sums[r][i][value];
    if (value < n) p.partial[((uint64_t)r * 4 + stream) * (p.l + 4) + (INJECT ? p.l : 0) + row0 + value] = s * scale;
    if (INJECT && value == 4) p.square[r * 4 + stream] = s;
  }
  STAMP(6)
}

// The grid is four streams times (groups of rows, then one block for injection rows and squares).
NINFER_KERNEL(hc_down_bf16, HcDownParams, kDownThreads, 2) {
  const uint32_t stream = blockIdx.x / (p.groups + 1), group = blockIdx.x % (p.groups + 1);
  if (group < p.groups)
    down_rows<false, false, true>(p, stream, group);
  else
    down_rows<false, true, true>(p, stream, group);
}
NINFER_KERNEL(hc_down_e4m3, HcDownParams, kDownThreads, 2) {
  const uint32_t stream = blockIdx.x / (p.groups + 1), group = blockIdx.x % (p.groups + 1);
  if (group < p.groups)
    down_rows<true, false, true>(p, stream, group);
  else
    down_rows<true, true, true>(p, stream, group);
}
NINFER_KERNEL(hc_down_rows_bf16, HcDownParams, kDownThreads, 2) {
  const uint32_t stream = blockIdx.x / (p.groups + 1), group = blockIdx.x % (p.groups + 1);
  if (group < p.groups)
    down_rows<false, false, false>(p, stream, group);
  else
    down_rows<false, true, false>(p, stream, group);
}
NINFER_KERNEL(hc_down_rows_e4m3, HcDownParams, kDownThreads, 2) {
  const uint32_t stream = blockIdx.x / (p.groups + 1), group = blockIdx.x % (p.groups + 1);
  if (group < p.groups)
    down_rows<true, false, false>(p, stream, group);
  else
    down_rows<true, true, false>(p, stream, group);
}

// A warp has two columns: lane = column * 16 + stream * 4 + quarter, quarter q taking units q, q + 4, ... of its row: 8 k in BF16, 16 in E4M3.
static constexpr int kUpWarps = 11;
static constexpr int kUpThreads = 32 * kUpWarps;
static constexpr uint32_t kMaxRank = 320;

template <bool FP8, bool ONE>
NINFER_DEVICE void up_columns(const HcUpParams& p) {
  constexpr int kUnit = FP8 ? 16 : 8, kUnits = kMaxRank / kUnit / 4;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane % 4, stream = lane / 4 % 4;
  const uint32_t first = share_start(p.h, gridDim.x, blockIdx.x), columns = share_start(p.h, gridDim.x, blockIdx.x + 1) - first;
  const uint32_t column = 2 * warp + lane / 16, units = p.l / kUnit;
  const bool mine = column < columns;
  const uint64_t row = (uint64_t)stream * p.h + first + column;

  STAMP_BEGIN(130 + FP8)
  const uint32_t row_bytes = units * 16, run = columns * row_bytes, run_pitch = ((run + 127) & ~127u) + 64, bar = smem_addr(smem);
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    mbar_fence_init();
    mbar_expect(bar, 4 * run);
  }
  __syncthreads();
  if (warp < 4 && lane == 0) bulk_load(bar + 128 + p.r * kUpThreads * 8 + warp * run_pitch, (const uint8_t*)p.up + ((uint64_t)warp * p.h + first) * row_bytes, run, bar, policy_evict_first());
  float norm = 0, scale = 1;
  if (mine) {
    norm = 1.0f + __bfloat162float(p.norm[row]);
    if (FP8) scale = row_scale(p.up_scale, p.scale_f32, row);
  }
  if (p.trigger == 0) pdl_trigger();
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)

  // Thread 4 u + s adds values 4 u + s of the streams' partial sums, of which it loads those of stream s.
  const uint32_t u = threadIdx.x / 4, s = threadIdx.x % 4, width = p.l + 4;
  const bool inject = 4 * u >= p.l;
  const float per_h = __fdividef(1.0f, (float)p.h);
  float* low = (float*)(smem + 128);                             // [R][kUpThreads], zeros where a quarter has no unit
  float* normed = low + p.r * kUpThreads + threadIdx.x;          // [R][kUpThreads]: this lane's stream, normalised
  const uint32_t weights = smem_addr(low) + p.r * kUpThreads * 8;
  uint4 next_part = make_uint4(0, 0, 0, 0);
  float next_square = 0, next_own = 0, next_x = 0;
  auto fetch = [&](uint32_t r) {
    if (4 * u < width) next_part = ldg_l2(p.partial + ((uint64_t)r * 4 + s) * width + 4 * u);
    next_square = ldg_l2_f32(p.square + r * 4 + s), next_own = ldg_l2_f32(p.square + r * 4 + stream);
    if (mine) next_x = ldg_l2_bf16(p.x + (uint64_t)r * 4 * p.h + row);
  };
  fetch(0);
  mbar_wait(bar, 0);
  uint4 w[kUnits];
  auto weight = [&](int i) { return mine && q + 4 * i < units ? lds128(weights + stream * run_pitch + column * row_bytes + (q + 4 * i) * 16) : make_uint4(0, 0, 0, 0); };
  if (ONE)
#pragma unroll
    for (int i = 0; i < kUnits; i++) w[i] = weight(i);
#pragma unroll 1
  for (uint32_t r = 0; r < (ONE ? 1 : p.r); r++) {
    const uint4 part = next_part;
    const float square = next_square, own = next_own, x = next_x;
    if (!ONE && r + 1 < p.r) fetch(r + 1);
    const float f = rsqrtf(fmaf(square, per_h, kEps));
    float a = __uint_as_float(s & 1 ? part.y : part.x), b = __uint_as_float(s & 1 ? part.w : part.z);
    a = fmaf(f, a, __shfl_xor_sync(~0u, f * __uint_as_float(s & 1 ? part.x : part.y), 1));
    b = fmaf(f, b, __shfl_xor_sync(~0u, f * __uint_as_float(s & 1 ? part.z : part.w), 1));
    float d = s & 2 ? b : a;
    d = 0.25f * (d + __shfl_xor_sync(~0u, s & 2 ? a : b, 2));
    const float e = sigmoid(d);
    low[r * kUpThreads + threadIdx.x] = inject ? 0.0f : d * e;
    if (inject && 4 * u < width && p.inject && blockIdx.x == 0) p.inject[r * 4 + s] = 2.0f * e;
    normed[r * kUpThreads] = rsqrtf(fmaf(own, per_h, kEps)) * x * norm;
  }
  if (p.trigger == 1) pdl_trigger();
  STAMP(3)
  __syncthreads();
  STAMP(4)
  if (warp * 2 >= columns) return;

#pragma unroll 1
  for (uint32_t r = 0; r < (ONE ? 1 : p.r); r++) {
    float dot[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kUnits; i++) {
      if (4 * i >= (int)units) break;
      const uint32_t at = smem_addr(low) + (r * kUpThreads + (q + 4 * i) * kUnit) * 4;
      float g[kUnit];
      const uint4 now = ONE ? w[i] : weight(i);
      if constexpr (FP8) {
        unpack(make_uint2(now.x, now.y), g), unpack(make_uint2(now.z, now.w), g + 8);
      } else {
        unpack(now, g);
      }
#pragma unroll
      for (int j = 0; j < kUnit / 4; j++) {
        const uint4 l = lds128(at + 16 * j);
        dot[0] = fmaf(g[4 * j], __uint_as_float(l.x), dot[0]), dot[1] = fmaf(g[4 * j + 1], __uint_as_float(l.y), dot[1]);
        dot[2] = fmaf(g[4 * j + 2], __uint_as_float(l.z), dot[2]), dot[3] = fmaf(g[4 * j + 3], __uint_as_float(l.w), dot[3]);
      }
    }
    float sum = (dot[0] + dot[1]) + (dot[2] + dot[3]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    float m = __fmul_rn(sigmoid(scale * sum), normed[r * kUpThreads]);
    m += __shfl_xor_sync(~0u, m, 4);
    m += __shfl_xor_sync(~0u, m, 8);
    if (mine && lane % 16 == 0) p.mix[(uint64_t)r * p.h + first + column] = __float2bfloat16_rn(0.25f * m);
  }
  STAMP(5)
}

NINFER_KERNEL(hc_up_mix_bf16, HcUpParams, kUpThreads, 2) { up_columns<false, true>(p); }
NINFER_KERNEL(hc_up_mix_e4m3, HcUpParams, kUpThreads, 2) { up_columns<true, true>(p); }
NINFER_KERNEL(hc_up_mix_rows_bf16, HcUpParams, kUpThreads, 2) { up_columns<false, false>(p); }
NINFER_KERNEL(hc_up_mix_rows_e4m3, HcUpParams, kUpThreads, 2) { up_columns<true, false>(p); }
