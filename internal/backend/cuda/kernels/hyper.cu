// Hyper-connection site: mixes four residual streams into a block's input and makes the weights that put its output back.
//
//   hc_down    X' = X + inject * y (BF16);  d[i] = sum_k Wdown[i][k] X'[k] (1 + w[k]) per stream, four inject rows likewise, and
//              the streams' sums of squares. The norm is a scalar per stream, so it is applied to the partial sums later.
//   hc_up_mix  low = silu(sum_s rstd_s d_s / 4);  M = sigmoid(Wup low);  mix[c] = mean_s M[s][c] rstd_s X'[s][c] (1 + w[s][c]);
//              inject = 2 sigmoid(sum_s rstd_s d_s / 4) from the inject rows.
//
// With few rows what counts is the time from the activations' arrival to the result. So a block's weights come before the dependency wait,
// and what a thread needs of them is on its way to registers while its activations come. hc_down works without tensor instructions: a thread
// has eight k of the block's rows (at most ten), FP32 arithmetic. hc_up_mix uses them. Sums have a fixed order that does not
// depend on the number of rows.
//
// With several rows L2 bounds: what every block reads, only one of a block's warps asks for, and hc_up_mix's blocks work in clusters.
//
//   Shapes: H % 16 = 0 and at most 2560, L % 16 = 0 and at most 320, R = 1..8.
//
// Weights loaded straight into registers were slower: loads that wait for a place in L1 hold up the neighbour's shared memory.
#include "common.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

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
NINFER_DEVICE float dot8(const float* f, const float* v) {
  float a = f[0] * v[0], b = f[1] * v[1];
#pragma unroll
  for (int j = 2; j < 8; j += 2) a = fmaf(f[j], v[j], a), b = fmaf(f[j + 1], v[j + 1], b);
  return a + b;
}

// The streams after injection, as stored: x + inject * y.
NINFER_DEVICE uint4 injected(uint4 x, uint4 y, float inject) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t& a = (&x.x)[i];
    const uint32_t c = (&y.x)[i];
    a = pack_bf16(fmaf(inject, bf16_lo(c), bf16_lo(a)), fmaf(inject, bf16_hi(c), bf16_hi(a)));
  }
  return x;
}
// v = x (1 + norm); the result is the sum of squares of x.
NINFER_DEVICE float normalise(uint4 x, uint4 norm, float* v) {
  float nf[8], square = 0;
  unpack(x, v), unpack(norm, nf);
#pragma unroll
  for (int i = 0; i < 8; i++) square = fmaf(v[i], v[i], square), v[i] = fmaf(v[i], nf[i], v[i]);
  return square;
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
  __shared__ float injects[kMaxRows];  // of several rows

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
  constexpr uint32_t kBatch = ONE ? 1 : 2;  // rows that a weight is read and unpacked for
  uint4 next_x[kBatch], next_y[kBatch];
  float next_inject[kBatch];
  auto fetch = [&](uint32_t r0) {
#pragma unroll
    for (uint32_t b = 0; b < kBatch; b++) {
      const uint32_t r = min(r0 + b, p.r - 1);  // the last row twice where there is no other
      next_x[b] = next_y[b] = make_uint4(0, 0, 0, 0);
      if (mine) next_x[b] = ldg_l2(p.x + ((uint64_t)r * 4 + stream) * p.h + k);
      if (mine && p.y) next_y[b] = ldg_l2(p.y + (uint64_t)r * p.h + k);
      if (ONE && mine && p.y) next_inject[b] = ldg_l2_f32(p.inject + r * 4 + stream);
    }
  };
  fetch(0);
  // One place in L2 answers one warp at a time: what all blocks read, only one of a block's warps may ask for.
  if (!ONE && warp == kDownWarps - 1 && lane < p.r) injects[lane] = p.y ? ldg_l2_f32(p.inject + lane * 4 + stream) : 0.0f;
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
  if (!ONE) __syncthreads();
  // A row's sums have the same order whatever rows are beside it.
#pragma unroll 1
  for (uint32_t r0 = 0; r0 < (ONE ? 1 : p.r); r0 += kBatch) {
    float v[kBatch][8] = {}, values[kBatch][kValues] = {};
#pragma unroll
    for (uint32_t b = 0; b < kBatch; b++) {
      uint4 x = next_x[b];
      const uint4 y = next_y[b];
      const float inject = ONE ? next_inject[b] : injects[min(r0 + b, p.r - 1)];
      if (mine) {
        if (p.y) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            uint32_t &a = (&x.x)[i], c = (&y.x)[i];
            a = pack_bf16(fmaf(inject, bf16_lo(c), bf16_lo(a)), fmaf(inject, bf16_hi(c), bf16_hi(a)));
          }
        }
        // the blocks of a stream share the writing of the rows
        const uint32_t r = r0 + b;
        if (!INJECT && r < p.r && (r < p.groups ? r : 0) == group) *(uint4*)(p.x_out + ((uint64_t)r * 4 + stream) * p.h + k) = x;
        float nf[8], square = 0;
        unpack(x, v[b]), unpack(norm, nf);
#pragma unroll
        for (int i = 0; i < 8; i++) square = fmaf(v[b][i], v[b][i], square), v[b][i] = fmaf(v[b][i], nf[i], v[b][i]);
        if (INJECT) values[b][4] = square;
      }
    }
    if (!ONE && r0 + kBatch < p.r) fetch(r0 + kBatch);
    if (mine)
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        Eight<FP8 && !INJECT> now = {};
        if (ONE)
          now = w[i];
        else if (i < (int)n)
          now.read(weights + i * slice + k * bytes);
        float f[8];
        unpack(now.w, f);
#pragma unroll
        for (uint32_t b = 0; b < kBatch; b++) values[b][i] = dot8(f, v[b]);
      }
#pragma unroll
    for (uint32_t b = 0; b < kBatch; b++) {
      const float sum = scatter_sum<kValues>(values[b]);
      const uint32_t own = scattered();
      if (lane % 2 == 0 && own < kValues && r0 + b < p.r) sums[r0 + b][warp][own] = sum;
    }
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

// ---- hc_down of more than two rows ----

static constexpr int kTileWarps = 10;
static constexpr int kTileThreads = 32 * kTileWarps;
static constexpr uint32_t kPitch = 2560;  // elements from a row in shared memory to the next: a constant, so that addresses cost nothing

// Past L1 (R7); a thread reads only what it copied itself.
NINFER_DEVICE void copy_activations(uint32_t dst, const bf16* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory"); }

// Sums N values over a warp's lanes in scatter_sum's order; a lane keeps those that kept() + 32 i names.
template <int N, int MASK = 16>
NINFER_DEVICE void scatter_sums(float* v) {
  const bool upper = threadIdx.x & MASK;
#pragma unroll
  for (int i = 0; 2 * i < N; i++) {
    const float a = v[2 * i], b = 2 * i + 1 < N ? v[2 * i + 1] : 0.0f;
    v[i] = (upper ? b : a) + __shfl_xor_sync(~0u, upper ? a : b, MASK);
  }
  if constexpr (MASK > 1) scatter_sums<(N + 1) / 2, MASK / 2>(v);
}
NINFER_DEVICE uint32_t kept() { return __brev(threadIdx.x) >> 27; }

struct TileShared {
  float sums[kMaxRows][kDownWarps - 2][12];  // by what a warp of down_rows has of k; its last two have nothing
  float injects[kMaxRows];
};
// What a thread knows of its block.
struct Tile {
  uint32_t stream, group;
  uint32_t writes;                    // bits of the rows whose new streams the block writes
  uint32_t bar, norm, weights, rows;  // in shared memory; rows: x and y of each row
};

// N activation rows from r0 on times the block's weight rows; a thread has the k that it has in down_rowss.
template <bool FP8, bool INJECT, int N>
NINFER_DEVICE void tile_rows(const HcDownParams& p, const Tile& t, uint32_t r0, TileShared& sh) {
  constexpr int kRows = INJECT ? 4 : kDownRows, kValues = INJECT ? 5 : kDownRows;  // the fifth: the sum of squares
  constexpr uint32_t bytes = FP8 && !INJECT ? 1 : 2;                              // of a weight
  const uint32_t k = threadIdx.x * 8;
  float acc[N * kValues] = {};
  if (k < p.h) {
    const uint4 norm = lds128(t.norm + 2 * k);
    float v[N][8];
#pragma unroll
    for (uint32_t b = 0; b < N; b++) {
      const uint32_t at = t.rows + (r0 + b) * 4 * kPitch + 2 * k;
      uint4 x = lds128(at);
      if (p.y) x = injected(x, lds128(at + 2 * kPitch), sh.injects[r0 + b]);
      if (!INJECT && t.writes >> (r0 + b) & 1) *(uint4*)(p.x_out + ((uint64_t)(r0 + b) * 4 + t.stream) * p.h + k) = x;
      const float square = normalise(x, norm, v[b]);
      if (INJECT) acc[b * kValues + 4] = square;
    }
#pragma unroll
    for (int i = 0; i < kRows; i++) {  // where a weight row is missing nobody reads its sums
      Eight<FP8 && !INJECT> w;
      w.read(t.weights + (i * kPitch + k) * bytes);
      float f[8];
      unpack(w.w, f);
#pragma unroll
      for (int b = 0; b < N; b++) acc[b * kValues + i] = dot8(f, v[b]);
    }
  }
  scatter_sums<N * kValues>(acc);
#pragma unroll
  for (int i = 0; 32 * i < N * kValues; i++) {
    const uint32_t at = kept() + 32 * i, b = at / kValues;
    if (b < N) sh.sums[r0 + b][threadIdx.x / 32][at % kValues] = acc[i];
  }
}

template <bool FP8, bool INJECT>
NINFER_DEVICE void down_tiles(const HcDownParams& p, uint32_t stream, uint32_t group, TileShared& sh) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t row0 = INJECT ? 0 : share_start(p.l, p.groups, group);
  const uint32_t n = INJECT ? (p.inj_w ? 4 : 0) : share_start(p.l, p.groups, group + 1) - row0;
  constexpr uint32_t bytes = FP8 && !INJECT ? 1 : 2;
  const uint32_t slice = bytes * p.h;
  Tile t{stream, group};
  t.writes = ((group == 0 && p.groups < p.r ? ~0u << p.groups : 0) | (group < p.r ? 1u << group : 0)) & ((1u << p.r) - 1);
  t.bar = smem_addr(smem), t.norm = t.bar + 128, t.weights = t.norm + 2 * kPitch, t.rows = t.weights + kDownRows * (FP8 ? 1 : 2) * kPitch;

  STAMP_BEGIN(122 + FP8)
  if (threadIdx.x == 0) {
    mbar_init(t.bar, 1);
    mbar_fence_init();
    mbar_expect(t.bar, n * slice + 2 * p.h);
  }
  __syncthreads();
  if (lane == 0) {
    if (warp < n)
      bulk_load(t.weights + warp * bytes * kPitch, (const uint8_t*)(INJECT ? (const void*)p.inj_w : p.down) + ((uint64_t)(row0 + warp) * 4 + stream) * slice, slice,
                t.bar, policy_evict_first());
    if (warp == kTileWarps - 1) bulk_load(t.norm, p.norm + (uint64_t)stream * p.h, 2 * p.h, t.bar, policy_evict_first());
  }
  float scale = 1.0f;
  if (FP8 && !INJECT && threadIdx.x % 16 < n) scale = row_scale(p.down_scale, p.scale_f32, row0 + threadIdx.x % 16);
  if (p.trigger == 0) pdl_trigger();
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)
  // One place in L2 answers one warp at a time: what all blocks read, only one of a block's warps may ask for.
  if (warp == kTileWarps - 1 && lane < p.r) sh.injects[lane] = p.y ? ldg_l2_f32(p.inject + lane * 4 + stream) : 0.0f;
  const uint32_t k = threadIdx.x * 8;
  const uint32_t half = p.r > 4 ? (p.r + 1) / 2 : p.r;  // rows at a time
  for (uint32_t r = 0; r < p.r; r++) {
    if (k < p.h) {
      const uint32_t at = t.rows + r * 4 * kPitch + 2 * k;
      copy_activations(at, p.x + ((uint64_t)r * 4 + stream) * p.h + k);
      if (p.y) copy_activations(at + 2 * kPitch, p.y + (uint64_t)r * p.h + k);
    }
    if (r + 1 == half) copy_commit();
  }
  copy_commit();
  mbar_wait(t.bar, 0);
  __syncthreads();
  if (p.trigger == 1) pdl_trigger();
#pragma unroll 1
  for (uint32_t r0 = 0; r0 < p.r; r0 += half) {
    if (r0 == 0)
      copy_wait<1>();
    else
      copy_wait<0>();
    switch (min(half, p.r - r0)) {
      case 1: tile_rows<FP8, INJECT, 1>(p, t, r0, sh); break;
      case 2: tile_rows<FP8, INJECT, 2>(p, t, r0, sh); break;
      case 3: tile_rows<FP8, INJECT, 3>(p, t, r0, sh); break;
      default: tile_rows<FP8, INJECT, 4>(p, t, r0, sh); break;
    }
  }
  STAMP(3)
  __syncthreads();
  STAMP(4)
  constexpr uint32_t kValues = INJECT ? 5 : kDownRows;
  const uint32_t r = threadIdx.x / 16, value = threadIdx.x % 16;
  if (r < p.r && value < kValues) {
    float s = 0;
#pragma unroll
    for (int i = 0; i < kDownWarps - 2; i++) s += sh.sums[r][i][value];
    if (value < n) p.partial[((uint64_t)r * 4 + stream) * (p.l + 4) + (INJECT ? p.l : 0) + row0 + value] = s * scale;
    if (INJECT && value == 4) p.square[r * 4 + stream] = s;
  }
  STAMP(5)
}

NINFER_KERNEL(hc_down_tiles_bf16, HcDownParams, kTileThreads, 2) {
  __shared__ TileShared sh;
  const uint32_t stream = blockIdx.x / (p.groups + 1), group = blockIdx.x % (p.groups + 1);
  if (group < p.groups)
    down_tiles<false, false>(p, stream, group, sh);
  else
    down_tiles<false, true>(p, stream, group, sh);
}
NINFER_KERNEL(hc_down_tiles_e4m3, HcDownParams, kTileThreads, 1) {
  __shared__ TileShared sh;
  const uint32_t stream = blockIdx.x / (p.groups + 1), group = blockIdx.x % (p.groups + 1);
  if (group < p.groups)
    down_tiles<true, false>(p, stream, group, sh);
  else
    down_tiles<true, true>(p, stream, group, sh);
}

// Sixteen weight rows of a tile: four columns times four streams. Two warps a tile, five chunks of the rank each. The operand is no BF16 number but
// two of them, whose sums are added; E4M3 weights are BF16 numbers times 2^-120, and their operands carry 2^60.
static constexpr int kUpTiles = 6;
static constexpr int kChunks = 5;
static constexpr int kUpThreads = 384;
static_assert(kUpThreads == 64 * kUpTiles);
static constexpr int kBlocks = 8;  // of a cluster, with several rows

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
// Rows g (lo) and g + 8 (hi) of a chunk times its operand, in two sums that shorten the chain.
NINFER_DEVICE void multiply_chunk(float* a, float* b, uint4 lo, uint4 hi, uint4 x) {
  mma_bf16(a, lo.x, hi.x, lo.y, hi.y, x.x, x.y);
  mma_bf16(b, lo.z, hi.z, lo.w, hi.w, x.z, x.w);
}

// A warp's chunks of sixteen rows and of the operand, 32 k each: lane (g, t) = (lane / 4, lane % 4) has k = 8 t .. of rows g and g + 8 as the first
// operand of the tensor instruction and of column g as the second; a dot product does not care about the order of k. Nothing here branches:
// where a row is missing another is read, whose sums nobody reads; where k ends the operand is zero.
template <bool FP8>
struct Rows {
  uint32_t lo_at, hi_at;  // rows g and g + 8 at the lane's first k
  uint32_t first, room;   // that k, and how far from it the last eight of K are
  int left;               // k from the lane's first to the end of K
  // A warp whose k begin at k0; lo and hi are rows g and g + 8.
  NINFER_DEVICE Rows(uint32_t lo, uint32_t hi, uint32_t k0, uint32_t size) {
    const uint32_t k = k0 + threadIdx.x % 4 * 8;
    left = (int)size - (int)k, first = min(k, size - 8), room = size - 8 - first;
    lo_at = lo + first * (FP8 ? 1 : 2), hi_at = hi + first * (FP8 ? 1 : 2);
  }
  NINFER_DEVICE void read(int c, uint4& lo, uint4& hi) const {
    const uint32_t step = min(c * 32u, room) * (FP8 ? 1 : 2);
    lo = eight_weights<FP8>(lo_at + step), hi = eight_weights<FP8>(hi_at + step);
  }
  // Column g of n, at the start of a row of operands.
  NINFER_DEVICE uint4 operand(int c, uint32_t at) const {
    uint4 v = lds128(at + (first + min(c * 32u, room)) * 2);
    if (c * 32 >= left) v = make_uint4(0, 0, 0, 0);
    return v;
  }
};

// ---- clusters ----

NINFER_DEVICE uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// The same place of another block's shared memory.
NINFER_DEVICE uint32_t in_block(uint32_t at, uint32_t rank) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
  return r;
}
// Stores a word in a block of the cluster and counts its bytes in that block's barrier.
NINFER_DEVICE void send(uint32_t at, uint32_t v, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at), "r"(v), "r"(bar) : "memory");
}
// Waits for what send announces.
NINFER_DEVICE void mbar_wait_cluster(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(bar), "r"(parity) : "memory");
}

// MOST: rows at most, 1 or 8; the arithmetic is the same. With several rows each of the eight blocks of a cluster makes the operand of one row and
// sends it to the others, since the partial sums of all rows are too much for each block to read.
template <bool FP8, uint32_t MOST>
NINFER_DEVICE void up_columns(const HcUpParams& p) {
  constexpr bool ONE = MOST == 1;
  constexpr uint32_t kPasses = (MOST + 3) / 4;  // four rows' high and low parts are the eight columns of the tensor instruction
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t first = share_start(p.h, gridDim.x, blockIdx.x), columns = share_start(p.h, gridDim.x, blockIdx.x + 1) - first;
  const uint32_t row_bytes = (FP8 ? 1 : 2) * p.l, run = columns * row_bytes, run_pitch = ((run + 127) & ~127u) + (FP8 ? 32 : 64);
  const uint32_t bar = smem_addr(smem), arrived = bar + 8, weights = bar + 128, opitch = 2 * p.l + 64, operand = weights + 4 * run_pitch;
  const uint32_t rank = ONE ? 0 : cluster_rank();
  __shared__ float sums[2][MOST][kUpTiles * 16];
  __shared__ float squares[4 * MOST];  // of several rows

  STAMP_BEGIN(130 + FP8)
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    if (!ONE) mbar_init(arrived, 1);
    mbar_fence_init();
    if (!ONE) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    mbar_expect(bar, 4 * run);
    if (!ONE) mbar_expect(arrived, p.r * p.l * 4);
  }
  __syncthreads();
  if (!ONE) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  if (warp < 4 && lane == 0) bulk_load(weights + warp * run_pitch, (const uint8_t*)p.up + ((uint64_t)warp * p.h + first) * row_bytes, run, bar, policy_evict_first());
  // In the end thread 96 i + 4 c + s has rows i and i + 4, column c, stream s.
  const uint32_t of = threadIdx.x / (kUpTiles * 16), place = threadIdx.x % (kUpTiles * 16), own = place % 4;
  const bool mine = place / 4 < columns && of < p.r;
  const uint64_t row = (uint64_t)own * p.h + first + place / 4;
  float norm = 0, scale = 1;
  if (mine) {
    norm = 1.0f + __bfloat162float(p.norm[row]);
    if (FP8) scale = E4M3_UNDO * row_scale(p.up_scale, p.scale_f32, row);
  }
  if (p.trigger == 0) pdl_trigger();
  if (!ONE) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)

  // Thread 4 u + s adds values 4 u + s of the streams' partial sums, of which it loads those of stream s.
  const uint32_t u = threadIdx.x / 4, s = threadIdx.x % 4, width = p.l + 4;
  const bool inject = 4 * u >= p.l;
  const float per_h = __fdividef(1.0f, (float)p.h);
  // the warp's rows of the tile: column g / 4 and two more, stream g % 4
  const uint32_t tile = warp / 2, column = tile * 4 + g / 4;
  const uint32_t lo_at = weights + g % 4 * run_pitch + (column < columns ? column : 0) * row_bytes;
  const Rows<FP8> rows(lo_at, lo_at + (column + 2 < columns ? 2 * row_bytes : 0), warp % 2 * kChunks * 32, p.l);
  // The row whose operand this block makes.
  const bool makes = ONE || rank < p.r;
  uint4 part = make_uint4(0, 0, 0, 0);
  float square = 0, own_square[kPasses] = {}, own_x[kPasses] = {};
  if (makes) {
    if (4 * u < width) part = ldg_l2(p.partial + ((uint64_t)rank * 4 + s) * width + 4 * u);
    if (ONE) square = ldg_l2_f32(p.square + s);
  }
  if (!ONE && warp == kUpThreads / 32 - 1 && lane < 4 * p.r) squares[lane] = ldg_l2_f32(p.square + lane);
#pragma unroll
  for (uint32_t j = 0; j < kPasses; j++)
    if (mine && of + 4 * j < p.r) {
      if (ONE) own_square[j] = ldg_l2_f32(p.square + own);
      own_x[j] = ldg_l2_bf16(p.x + (uint64_t)(of + 4 * j) * 4 * p.h + row);
    }
  mbar_wait(bar, 0);
  uint4 lo[kChunks], hi[kChunks];
  if (ONE)
#pragma unroll
    for (int c = 0; c < kChunks; c++) rows.read(c, lo[c], hi[c]);
  if (!ONE) __syncthreads();
  if (makes) {
    if (!ONE) square = squares[4 * rank + s];
    const float f = rsqrtf(fmaf(square, per_h, kEps));
    const uint4 v = part;
    float a = __uint_as_float(s & 1 ? v.y : v.x), b = __uint_as_float(s & 1 ? v.w : v.z);
    a = fmaf(f, a, __shfl_xor_sync(~0u, f * __uint_as_float(s & 1 ? v.x : v.y), 1));
    b = fmaf(f, b, __shfl_xor_sync(~0u, f * __uint_as_float(s & 1 ? v.z : v.w), 1));
    float d = s & 2 ? b : a;
    d = 0.25f * (d + __shfl_xor_sync(~0u, s & 2 ? a : b, 2));
    const float e = sigmoid(d);
    const float low = (FP8 ? E4M3_UNDO : 1.0f) * (d * e), high = __bfloat162float(__float2bfloat16_rn(low));
    if (ONE) {
      if (!inject) {
        bf16* to = (bf16*)(smem + (operand - bar)) + 4 * u + s;
        to[0] = __float2bfloat16_rn(low);
        to[opitch / 2] = __float2bfloat16_rn(low - high);
      }
    } else {
      // even threads send the high parts of two values, odd ones the low parts
      const float other = __shfl_xor_sync(~0u, s & 1 ? low : low - high, 1);
      if (!inject) {
        const uint32_t word = s & 1 ? pack_bf16(other, low - high) : pack_bf16(low, other);
        const uint32_t to = operand + (2 * rank + (s & 1)) * opitch + (4 * u + (s & 2)) * 2;
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; i++) send(in_block(to, i), word, in_block(arrived, i));
      }
    }
    if (inject && 4 * u < width && p.inject && blockIdx.x / kBlocks == 0 && (!ONE || blockIdx.x == 0)) p.inject[rank * 4 + s] = 2.0f * e;
  }
  if (p.trigger == 1) pdl_trigger();
  STAMP(3)
  if (ONE)
    __syncthreads();
  else
    mbar_wait_cluster(arrived, 0);
  STAMP(4)
  if (tile * 4 < columns) {
    float a[kPasses][4] = {}, b[kPasses][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
      if (!ONE) rows.read(c, lo[c], hi[c]);
#pragma unroll
      for (uint32_t j = 0; j < kPasses; j++)
        if (4 * j < p.r) {
          const uint4 v = rows.operand(c, operand + (8 * j + g < 2 * p.r ? 8 * j + g : 0) * opitch);
          multiply_chunk(a[j], b[j], lo[c], hi[c], v);
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < kPasses; j++)
      if (4 * j + t < MOST) {
        float* to = &sums[warp % 2][4 * j + t][tile * 16 + g];
        to[0] = (a[j][0] + b[j][0]) + (a[j][1] + b[j][1]), to[8] = (a[j][2] + b[j][2]) + (a[j][3] + b[j][3]);
      }
  }
  __syncthreads();
#pragma unroll
  for (uint32_t j = 0; j < kPasses; j++) {
    const uint32_t r = of + 4 * j;
    if (r >= p.r) break;  // whole warps
    const float sum = mine ? sums[0][r][place] + sums[1][r][place] : 0.0f;
    const float normed = rsqrtf(fmaf(ONE ? own_square[j] : squares[mine ? 4 * r + own : 0], per_h, kEps)) * own_x[j] * norm;
    float v = __fmul_rn(sigmoid(scale * sum), normed);
    v += __shfl_xor_sync(~0u, v, 1);
    v += __shfl_xor_sync(~0u, v, 2);
    if (mine && own == 0) p.mix[(uint64_t)r * p.h + first + place / 4] = __float2bfloat16_rn(0.25f * v);
  }
  STAMP(5)
}

NINFER_KERNEL(hc_up_mix_bf16, HcUpParams, kUpThreads, 2) { up_columns<false, 1>(p); }
NINFER_KERNEL(hc_up_mix_e4m3, HcUpParams, kUpThreads, 2) { up_columns<true, 1>(p); }
#define CLUSTER(name) extern "C" __global__ void __cluster_dims__(kBlocks, 1, 1) name(const __grid_constant__ HcUpParams p);
CLUSTER(hc_up_mix_rows_bf16)
CLUSTER(hc_up_mix_rows_e4m3)
NINFER_KERNEL(hc_up_mix_rows_bf16, HcUpParams, kUpThreads, 2) { up_columns<false, 8>(p); }
NINFER_KERNEL(hc_up_mix_rows_e4m3, HcUpParams, kUpThreads, 2) { up_columns<true, 8>(p); }
