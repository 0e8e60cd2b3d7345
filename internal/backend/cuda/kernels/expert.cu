// Routed experts for R = 1..8 rows: top-k and gate/up, then down with the shared expert's second half and the weighted sum.
//
//   expert_gate_up  top-k of the logits (soft-max over the k, lowest id on ties), then for each of a row's experts
//                   h = silu(Wg x) * (Wu x), BF16 [R][topk][I].
//   expert_down     out = sum_e p_e We h_e + sigmoid(shared_logit) Ws hs, BF16 [R][H]. Redoes the top-k in its prologue.
//
//   NVFP4 banks are repacked once (expert_repack) in the order the lanes of a tensor instruction read them. A lane (g, t) = (lane / 4, lane
//   % 4) has 16 codes of a row in 64 k: k = 16 t .., eight bytes, bits rearranged as e2m1x16_plain wants them.
//   Gate/up: tiles of 16 rows, 8 gate rows and the 8 matching up rows, so the product is in one lane. Per 128 k 512 bytes of the first 64 k
//   (lane: row g, row g + 8), 512 of the second, then four scales a lane (first 64 k: row g, row g + 8; second likewise).
//   Down: tiles of 8 rows. Per 128 k 512 bytes of codes (lane: first 64 k, second 64 k of row g), then two scales a lane.
//   K <= 2,560, E <= 512, topk <= 16, K % 128 = 0, I % 128 = 0, H % 16 = 0.
//
// Rows are worked on one by one: they seldom share experts, what they share is in L2, and a row keeps its bits whatever rows are beside it.
// The kernels named _rows take several rows in a block's turn, so that copies go on from row to row; those for one row take several as
// rows of blocks, for GPUs with less shared memory. A lane's 16 codes of a row have one scale, and one activation row leaves seven of the tensor
// instruction's columns idle. So the four lanes of a row put their activations into a column each (2 t): then a lane's result is the
// sum over its own 16 k, the scale multiplies that sum, and a weight costs nothing but its place in a BF16 number.
//
// Plan of a block for one row: expert_gate_up owns a run of (expert, tile) items; one warp chooses the experts and then fetches tiles, a few ahead,
// by bulk copies; ten warps have two pairs (128 k) each in every tile, their activations in registers; sums meet once at the end.
// expert_down owns two or three tiles of eight rows over all experts: one bulk copy an expert, all on their way before the
// dependency wait where the kernel before it triggered after its own (R3). Rows g and g + 8 of its tensor instruction are two
// (tile, pair) units of one expert, told apart by columns 2 t and 2 t + 1. Fixed order of sums, no atomics on floats.
#include "common.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

static constexpr int kMaxExperts = 512;
static constexpr int kMaxTop = 16;
static constexpr uint32_t kPairBytes = 1152;  // 128 k of a gate/up tile
static constexpr uint32_t kHalfBytes = 576;   // 128 k of a down tile

// ---- routing ----

// Number of lanes with a larger key, or an equal one and a lower lane. All keys go through shared memory: 32 words at scratch.
NINFER_DEVICE uint32_t place_of(uint32_t key, uint32_t* scratch) {
  const uint32_t lane = threadIdx.x % 32;
  __syncwarp();
  scratch[lane] = key;
  __syncwarp();
  uint32_t place = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint4 v = lds128(smem_addr(scratch + 4 * i));
    place += (v.x > key) + (v.y > key) + (v.z > key) + (v.w > key);
  }
  __syncwarp();  // the words may be written again
  return place + __popc(__match_any_sync(~0u, key) & ((1u << lane) - 1));
}

// One warp: top-k of a row. Lane l holds a run of c experts, so of equal keys the one in the lowest lane, then first in its lane, has
// the lowest id. The k-th largest of the lanes' maxima is a bound that k keys reach; only keys of the k lanes with the largest
// maxima can win, usually a dozen, and those are ranked by counting. More than 32 of them take the plain way, one winner a round.
__device__ __noinline__ void top_of_row(const float* logits, uint32_t experts, uint32_t topk, uint16_t* id, float* weight, uint32_t* scratch) {
  STAMP_BEGIN(300)
  const uint32_t lane = threadIdx.x % 32, c = ceil_div(experts, 32), first = lane * c;
  uint32_t key[16];  // 0: no expert; a NaN logit counts as the smallest number
  if (experts == kMaxExperts) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = ldg_l2(logits + first + 4 * i);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float f = __uint_as_float((&v[i / 4].x)[i % 4]) + 0.0f;
      const uint32_t b = __float_as_uint(f);
      key[i] = f == f ? b ^ ((uint32_t)((int)b >> 31) | 0x80000000u) : 1;
    }
  } else {
    for (int i = 0; i < 16; i++) key[i] = 0;
    for (uint32_t n = 0; n < c && first + n < experts; n++) {
      const uint32_t k = max(1u, float_key(ldg_l2_f32(logits + first + n)));
#pragma unroll
      for (int i = 0; i < 16; i++)
        if (i == (int)n) key[i] = k;
    }
  }
  STAMP(1)
  uint32_t best = 0;
#pragma unroll
  for (int i = 0; i < 16; i += 4) best = max(best, max(max(key[i], key[i + 1]), max(key[i + 2], key[i + 3])));
  const uint32_t place = place_of(best, scratch);
  STAMP(2)
  const uint32_t bound = max(1u, __shfl_sync(~0u, best, __ffs(__ballot_sync(~0u, place == topk - 1)) - 1));
  uint32_t mine = 0;
  if (place < topk)
#pragma unroll
    for (int i = 0; i < 16; i++) mine += key[i] >= bound;
  uint32_t upto = mine;  // inclusive sum over lanes
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    uint32_t v = __shfl_up_sync(~0u, upto, o);
    if ((int)lane >= o) upto += v;
  }
  const uint32_t count = __shfl_sync(~0u, upto, 31);
  STAMP(3)
  uint32_t won = 0, won_id = 0;  // lane j: the j-th winner
  if (count <= 32) {
    uint32_t at = upto - mine;  // candidates in order of id
    if (mine)
#pragma unroll
      for (int i = 0; i < 16; i++)
        if (key[i] >= bound) scratch[at] = key[i], scratch[32 + at] = first + i, ++at;
    __syncwarp();
    STAMP(4)
    const uint32_t k = lane < count ? scratch[lane] : 0, e = scratch[32 + lane];
    const uint32_t rank = place_of(k, scratch + 64);
    __syncwarp();
    if (lane < count && rank < topk) scratch[rank] = k, scratch[32 + rank] = e;
    __syncwarp();
    won = scratch[lane], won_id = scratch[32 + lane];
    STAMP(5)
  } else {
    for (uint32_t j = 0; j < topk; j++) {
      best = 0;
#pragma unroll
      for (int i = 0; i < 16; i++) best = max(best, key[i]);
      const uint32_t top = __reduce_max_sync(~0u, best);
      const uint32_t owner = __ffs(__ballot_sync(~0u, best == top)) - 1;
      uint32_t where = 0;
      if (lane == owner) {
        bool gone = false;
#pragma unroll
        for (int i = 0; i < 16; i++)
          if (!gone && key[i] == top) key[i] = 0, gone = true, where = first + i;
      }
      where = __shfl_sync(~0u, where, owner);
      if (lane == j) won = top, won_id = where;
    }
  }
  auto value = [](uint32_t k) { return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k); };
  const float largest = value(__shfl_sync(~0u, won, 0));
  float e = lane < topk ? __expf(value(won) - largest) : 0.0f;
  float sum = warp_sum(e);
  if (lane < topk) id[lane] = (uint16_t)won_id, weight[lane] = __fdividef(e, sum);
  STAMP(6)
}

// Lanes with a larger value; 32 words at scratch.
NINFER_DEVICE uint32_t larger_lanes(float v, float* scratch) {
  __syncwarp();
  scratch[threadIdx.x % 32] = v;
  __syncwarp();
  uint32_t n = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint4 w = lds128(smem_addr(scratch + 4 * i));
    n += (__uint_as_float(w.x) > v) + (__uint_as_float(w.y) > v) + (__uint_as_float(w.z) > v) + (__uint_as_float(w.w) > v);
  }
  return n;
}

// top_of_row for the usual case, no equal logits among the candidates and no more than 32 of them; leaves the others to it. The weights
// may be left out.
template <bool WEIGHTS>
NINFER_DEVICE void choose(const float* logits, uint32_t experts, uint32_t topk, uint16_t* id, float* weight, uint32_t* scratch) {
  STAMP_BEGIN_IN(WEIGHTS ? 310 : 311, WEIGHTS ? 0 : blockDim.x - 32)
  const uint32_t lane = threadIdx.x % 32, c = ceil_div(experts, 32), first = lane * c;
  const float none = __uint_as_float(0xff800000u);
  float v[16];
  if (experts == kMaxExperts) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 w = ldg_l2(logits + first + 4 * i);
      v[4 * i] = __uint_as_float(w.x), v[4 * i + 1] = __uint_as_float(w.y), v[4 * i + 2] = __uint_as_float(w.z), v[4 * i + 3] = __uint_as_float(w.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = i < (int)c && first + i < experts ? ldg_l2_f32(logits + first + i) : none;
  }
  STAMP(1)
  float best = none;  // NaN never wins a maximum
#pragma unroll
  for (int i = 0; i < 16; i += 4) best = fmaxf(best, fmaxf(fmaxf(v[i], v[i + 1]), fmaxf(v[i + 2], v[i + 3])));
  float* words = (float*)scratch;
  const bool high = larger_lanes(best, words) < topk;
  const uint32_t bits = __float_as_uint(best), least = __reduce_min_sync(~0u, high ? bits ^ ((uint32_t)((int)bits >> 31) | 0x80000000u) : ~0u);
  const float bound = __uint_as_float(least & 0x80000000u ? least & 0x7fffffffu : ~least);  // topk logits reach it
  STAMP(2)
  const uint32_t pairs = smem_addr(scratch + 32);  // candidates: logit, expert
  sts64(pairs + 8 * lane, make_uint2(0xff800000u, 0));
  __syncwarp();
  if (lane == 0) scratch[0] = 0;
  __syncwarp();
  uint32_t own = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) own += v[i] >= bound;
  uint32_t at = 0;  // candidates stand in any order: where that would matter, ranks are not unique
  if (own) at = atomicAdd(scratch, own);
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const bool in = v[i] >= bound;
    sts64_if(in && at < 32, pairs + 8 * at, make_uint2(__float_as_uint(v[i]), first + i));
    at += in;
  }
  __syncwarp();
  const uint32_t count = *(volatile uint32_t*)scratch;
  bool done = false;
  if (count <= 32 && bound > none) {
    const uint2 mine = lds64(pairs + 8 * lane);
    const float k = __uint_as_float(mine.x);
    const uint32_t e = mine.y, rank = larger_lanes(k, words);
    const bool won = lane < count && rank < topk;
    if (__reduce_or_sync(~0u, won ? 1u << rank : 0) == (1u << topk) - 1 && __popc(__ballot_sync(~0u, won)) == (int)topk) {
      done = true;
      if (won) id[rank] = (uint16_t)e;
      if (WEIGHTS) {
        const float largest = __shfl_sync(~0u, k, __ffs(__ballot_sync(~0u, won && rank == 0)) - 1);
        const float x = won ? __expf(k - largest) : 0.0f, sum = warp_sum(x);
        if (won) weight[rank] = __fdividef(x, sum);
      }
    }
  }
  STAMP(3)
  if (!done) {
    __syncwarp();
    top_of_row(logits, experts, topk, id, weight, scratch);
  }
  __syncwarp();
  STAMP(4)
}

// Called where it is out of the way of the registers.
__device__ __noinline__ void choose_weighted(const float* logits, uint32_t experts, uint32_t topk, uint16_t* id, float* weight, uint32_t* scratch) {
  choose<true>(logits, experts, topk, id, weight, scratch);
}

// ---- products ----

// Sixteen codes of row g and of row g + 8 times their operand: the lane's own sums are out[0] and, of columns 2 t + 1, out[3].
NINFER_DEVICE void multiply_plain(float* out, uint2 row_g, uint2 row_g8, uint4 x0, uint4 x1) {
  uint32_t lo[8], hi[8];
  float more[4] = {0, 0, 0, 0};
  out[0] = out[1] = out[2] = out[3] = 0;
  e2m1x16_plain(row_g.x, row_g.y, lo), e2m1x16_plain(row_g8.x, row_g8.y, hi);
  mma_bf16(out, lo[0], hi[0], lo[1], hi[1], x0.x, x0.y);
  mma_bf16(more, lo[2], hi[2], lo[3], hi[3], x0.z, x0.w);
  mma_bf16(out, lo[4], hi[4], lo[5], hi[5], x1.x, x1.y);
  mma_bf16(more, lo[6], hi[6], lo[7], hi[7], x1.z, x1.w);
#pragma unroll
  for (int i = 0; i < 4; i++) out[i] += more[i];
}

// Eight activations in the codes' order, times 2^60.
NINFER_DEVICE uint4 operand(uint4 v) {
  v = order_pairs_by4(v);
  return make_uint4(scale_e4m3_x(v.x), scale_e4m3_x(v.y), scale_e4m3_x(v.z), scale_e4m3_x(v.w));
}

NINFER_DEVICE float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

// ---- gate/up ----

static constexpr uint32_t kUpPairs = 20;                  // of a tile: K <= 2,560
static constexpr uint32_t kUpParts = 5;                   // a tile comes in parts of four pairs
static constexpr uint32_t kUpFixed = 640 + 32 + 128 + 384;  // barriers, experts, factors and weights, scratch

static constexpr int kUpWarps = 10;                              // consumers
static constexpr int kOwn = kUpPairs / kUpWarps;                 // pairs of every tile each has
static constexpr uint32_t kTeam = 4 / kOwn;                      // warps of a part
static constexpr int kUpThreads = 32 * 11;                       // one more warp chooses and fetches

// 128 k of a tile: the lane's own sums of rows g and g + 8.
NINFER_DEVICE void tile_pair(uint4 u, uint4 v, uint32_t s, const uint4* x, float& a, float& b) {
  float acc[4];
  float2 f = e4m3x2_f32(s);  // row g, row g + 8
  multiply_plain(acc, make_uint2(u.x, u.y), make_uint2(u.z, u.w), x[0], x[1]);
  a = fmaf(f.x, acc[0], a), b = fmaf(f.y, acc[2], b);
  f = e4m3x2_f32(s >> 16);
  multiply_plain(acc, make_uint2(v.x, v.y), make_uint2(v.z, v.w), x[2], x[3]);
  a = fmaf(f.x, acc[0], a), b = fmaf(f.y, acc[2], b);
}

// Adds up the sums of a row's items and writes their hidden values.
NINFER_DEVICE void finish_up(const ExpertUpParams& p, const float* sums, const float* factor, uint32_t of_row, uint32_t items, uint32_t d0, uint32_t tile0,
                             uint32_t tiles, uint32_t used, uint32_t threads) {
  const uint32_t t = threadIdx.x % 4;
  // four lanes an output: each adds its own t of all warps
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 4; i < items * 8; i += threads / 4) {  // whole warps
    const uint32_t n = i / 8, row = i % 8;
    uint32_t d = d0, tile = tile0 + n;
    while (tile >= tiles) tile -= tiles, ++d;
    const float *from = sums + (n * kUpWarps * 4 + t) * 16 + (row ^ (t & 2) * 4), *from_up = from + (t & 2 ? -8 : 8);
    float gate = 0, up = 0;
#pragma unroll
    for (uint32_t w = 0; w < kUpWarps; w++)
      if (w < used) gate += from[w * 64], up += from_up[w * 64];
    const float f = factor[d];
    gate = quad_sum(gate) * f, up = quad_sum(up) * f;
    if (t == 0) p.hidden[((uint64_t)of_row * p.topk + d) * p.inner + tile * 8 + row] = __float2bfloat16_rn(silu(gate) * up);
  }
}

NINFER_KERNEL(expert_gate_up, ExpertUpParams, kUpThreads, 2) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.k / 128, tile_bytes = pairs * kPairBytes, tiles = p.inner / 8, parts = ceil_div(pairs, 4), used = ceil_div(pairs, kOwn);
  const uint32_t of_row = blockIdx.y, blocks = gridDim.x, block = blockIdx.x;
  // neighbouring items are one expert's, so that a block touches one or two pages of the bank
  const uint32_t item0 = share_start(p.topk * tiles, blocks, block), items = of_row == p.r ? 0 : share_start(p.topk * tiles, blocks, block + 1) - item0;
  const uint32_t d0 = item0 / tiles, tile0 = item0 - d0 * tiles;
  const uint32_t full = smem_addr(smem), empty = full + 8 * kUpParts * p.slots;
  uint16_t* id = (uint16_t*)(smem + 640);
  float* factor = (float*)(smem + 672);  // [16], then weights, which nobody needs here
  uint32_t* scratch = (uint32_t*)(smem + 800);
  float* sums = (float*)(smem + kUpFixed);  // [item][warp][t][16 rows]
  const uint32_t ring = (smem_addr(sums) + items * kUpWarps * 256 + 127) & ~127u;

  STAMP_BEGIN(220)
  if (threadIdx.x < parts * p.slots) {
    const uint32_t part = threadIdx.x % parts, at = 8 * (threadIdx.x / parts * kUpParts + part);
    mbar_init(full + at, 1);
    mbar_init(empty + at, min(kTeam, used - kTeam * part));
    mbar_fence_init();
  }
  __syncthreads();
  STAMP(1)
  pdl_wait();
  STAMP(2)

  if (of_row == p.r) {  // one row of blocks more where several rows want their distinct experts counted
    if (!p.distinct || blockIdx.x) return;
    uint32_t* seen = (uint32_t*)sums;
    uint8_t* own = smem + kUpFixed + 64 + warp * 512;
    if (threadIdx.x < kMaxExperts / 32) seen[threadIdx.x] = 0;
    __syncthreads();
    if (warp < p.r) {
      choose_weighted(p.logits + warp * p.experts, p.experts, p.topk, (uint16_t*)own, (float*)(own + 32), (uint32_t*)(own + 96));
      if (lane < p.topk) atomicOr(seen + ((uint16_t*)own)[lane] / 32, 1u << ((uint16_t*)own)[lane] % 32);
    }
    __syncthreads();
    if (warp == 0) {
      const uint32_t n = __reduce_add_sync(~0u, lane < kMaxExperts / 32 ? __popc(seen[lane]) : 0);
      if (lane == 0) *p.distinct = n;
    }
    return;
  }
  if (p.distinct && p.r == 1 && blockIdx.x == 0 && threadIdx.x == 0) *p.distinct = p.topk;

  if (warp == kUpWarps) {
    STAMP_BEGIN_IN(221, kUpThreads - 32)
    choose<false>(p.logits + of_row * p.experts, p.experts, p.topk, id, factor + 16, scratch);
    STAMP(3)
    const uint64_t policy = policy_evict_first();
    const uint32_t bytes = min(4u, pairs - 4 * min(lane, parts - 1)) * kPairBytes, into = ring + lane * 4 * kPairBytes;
    uint32_t slot = 0, parity = 1, d = d0, tile = tile0;
    if (p.trigger == 0) pdl_trigger();
#pragma unroll 1
    for (uint32_t n = 0; n < items; n++) {
      if (n && n == p.trigger) pdl_trigger();  // after the wait, so the next kernel may read the logits in its prologue (R3)
      if (lane < parts) {
        const uint32_t at = 8 * (slot * kUpParts + lane);
        const uint8_t* src = (const uint8_t*)p.bank + ((uint64_t)id[d] * tiles + tile) * tile_bytes + lane * 4 * kPairBytes;
        mbar_wait(empty + at, parity);
        mbar_expect(full + at, bytes);
        bulk_load(into + slot * tile_bytes, src, bytes, full + at, policy);
      }
      __syncwarp();
      if (++tile == tiles) tile = 0, ++d;
      if (++slot == p.slots) slot = 0, parity ^= 1;
    }
    if (p.trigger && items <= p.trigger) pdl_trigger();
    STAMP(4)
    if (lane < p.topk) factor[lane] = __fdividef(E2M1_UNDO, __ldg(p.divisor + id[lane]));
  } else if (warp < used) {
    const uint32_t pair0 = kOwn * warp;
    const bool two = pair0 + 1 < pairs;
    // the four lanes of a row have a column each: lane t's activations are in column 2 t
    uint4 x[kOwn][4];
#pragma unroll
    for (int i = 0; i < kOwn; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        x[i][j] = make_uint4(0, 0, 0, 0);
        if (g == 2 * t && (i == 0 || two)) x[i][j] = ldg_l2(p.x + (uint64_t)of_row * p.x_ld + (pair0 + i) * 128 + j / 2 * 64 + t * 16 + j % 2 * 8);
      }
#pragma unroll
    for (int i = 0; i < kOwn; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) x[i][j] = operand(x[i][j]);
    uint32_t slot = 0, parity = 0;
    float* mine = sums + (warp * 4 + t) * 16 + (g ^ (t & 2) * 4);  // the two rows' places swapped for half the lanes, against bank conflicts
#pragma unroll 1
    for (uint32_t n = 0; n < items; n++) {
      const uint32_t at = 8 * (slot * kUpParts + warp / kTeam), from = ring + slot * tile_bytes + pair0 * kPairBytes + lane * 16;
      mbar_wait(full + at, parity);
      float a = 0, b = 0;
      uint4 u[kOwn], v[kOwn];
      uint32_t s[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; i++)
        if (i == 0 || two) {
          u[i] = lds128(from + i * kPairBytes), v[i] = lds128(from + i * kPairBytes + 512);
          s[i] = lds32(from + i * kPairBytes + 1024 - 12 * lane);
        }
      __syncwarp();
      if (lane == 0) mbar_arrive(empty + at);
#pragma unroll
      for (int i = 0; i < kOwn; i++)
        if (i == 0 || two) {
          tile_pair(u[i], v[i], s[i], x[i], a, b);
        }
      mine[0] = a, mine[t & 2 ? -8 : 8] = b;
      mine += kUpWarps * 64;
      if (++slot == p.slots) slot = 0, parity ^= 1;
    }
    STAMP(5)
  }
  __syncthreads();
  STAMP(6)
  finish_up(p, sums, factor, of_row, items, d0, tile0, tiles, used, kUpThreads);
  STAMP(7)
}

// Several rows: a block has its run of every row, one after the other, and tiles go on coming from row to row. The sums are those of
// expert_gate_up. Rows' experts are chosen by a warp each, their activations are in shared memory.
static constexpr uint32_t kUpRowsFixed = 1536;  // barriers 640, experts 8 x 32, factors 8 x 64

NINFER_KERNEL(expert_gate_up_rows, ExpertUpParams, kUpThreads, 1) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.k / 128, tile_bytes = pairs * kPairBytes, tiles = p.inner / 8, parts = ceil_div(pairs, 4), used = ceil_div(pairs, kOwn);
  const uint32_t item0 = share_start(p.topk * tiles, gridDim.x, blockIdx.x), items = share_start(p.topk * tiles, gridDim.x, blockIdx.x + 1) - item0;
  const uint32_t d0 = item0 / tiles, tile0 = item0 - d0 * tiles;
  const uint32_t full = smem_addr(smem), empty = full + 8 * kUpParts * p.slots;
  uint16_t* id = (uint16_t*)(smem + 640);
  float* factor = (float*)(smem + 896);  // [8][16]
  uint8_t* after = smem + kUpRowsFixed;
  const uint32_t xs = smem_addr(after), sum_floats = items * kUpWarps * 64;
  float* sums = (float*)(after + p.r * 2 * p.k);  // [2][item][warp][t][16 rows]
  uint32_t* scratch = (uint32_t*)sums;            // of the choice: [8][96], weights [8][32], bits
  const uint32_t ring = (smem_addr(sums) + max(8 * sum_floats, 8u * 512 + 64) + 127) & ~127u;

  if (threadIdx.x < parts * p.slots) {
    const uint32_t part = threadIdx.x % parts, at = 8 * (threadIdx.x / parts * kUpParts + part);
    mbar_init(full + at, 1);
    mbar_init(empty + at, min(kTeam, used - kTeam * part));
    mbar_fence_init();
  }
  pdl_wait();
  for (uint32_t i = threadIdx.x; i < p.r * p.k / 8; i += kUpThreads) {
    const uint32_t a = i / (p.k / 8), k = i % (p.k / 8) * 8;
    copy16(xs + (a * p.k + k) * 2, p.x + (uint64_t)a * p.x_ld + k, policy_evict_first());
  }
  copy_commit();
  uint32_t* seen = scratch + 8 * 128;
  if (threadIdx.x < kMaxExperts / 32) seen[threadIdx.x] = 0;
  if (warp < p.r) {
    choose<false>(p.logits + warp * p.experts, p.experts, p.topk, id + warp * 16, (float*)(scratch + warp * 128 + 96), scratch + warp * 128);
    if (lane < p.topk) factor[warp * 16 + lane] = __fdividef(E2M1_UNDO, __ldg(p.divisor + id[warp * 16 + lane]));
  }
  copy_wait<0>();
  __syncthreads();
  if (blockIdx.x == 0 && p.distinct) {
    if (threadIdx.x < p.r * 16 && threadIdx.x % 16 < p.topk) atomicOr(seen + id[threadIdx.x] / 32, 1u << id[threadIdx.x] % 32);
    __syncthreads();
    if (warp == 0) {
      const uint32_t n = __reduce_add_sync(~0u, lane < kMaxExperts / 32 ? __popc(seen[lane]) : 0);
      if (lane == 0) *p.distinct = n;
    }
    __syncthreads();  // sums take the place of the bits
  }

  if (warp == kUpWarps) {
    const uint64_t policy = policy_evict_first();
    const uint32_t bytes = min(4u, pairs - 4 * min(lane, parts - 1)) * kPairBytes, into = ring + lane * 4 * kPairBytes;
    uint32_t slot = 0, parity = 1;
    pdl_trigger();
#pragma unroll 1
    for (uint32_t r = 0; r < p.r; r++) {
      uint32_t d = d0, tile = tile0;
#pragma unroll 1
      for (uint32_t n = 0; n < items; n++) {
        if (lane < parts) {
          const uint32_t at = 8 * (slot * kUpParts + lane);
          const uint8_t* src = (const uint8_t*)p.bank + ((uint64_t)id[r * 16 + d] * tiles + tile) * tile_bytes + lane * 4 * kPairBytes;
          mbar_wait(empty + at, parity);
          mbar_expect(full + at, bytes);
          bulk_load(into + slot * tile_bytes, src, bytes, full + at, policy);
        }
        __syncwarp();
        if (++tile == tiles) tile = 0, ++d;
        if (++slot == p.slots) slot = 0, parity ^= 1;
      }
    }
    return;
  }
  uint32_t slot = 0, parity = 0;
  const uint32_t pair0 = kOwn * warp;
  const bool two = pair0 + 1 < pairs;
#pragma unroll 1
  for (uint32_t r = 0; r < p.r; r++) {
    float* now = sums + (r & 1) * sum_floats;
    if (warp < used) {
      uint4 x[kOwn][4];
#pragma unroll
      for (int i = 0; i < kOwn; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          x[i][j] = make_uint4(0, 0, 0, 0);
          if (g == 2 * t && (i == 0 || two)) x[i][j] = operand(lds128(xs + (r * p.k + (pair0 + i) * 128 + j / 2 * 64 + t * 16 + j % 2 * 8) * 2));
        }
      float* mine = now + (warp * 4 + t) * 16 + (g ^ (t & 2) * 4);
#pragma unroll 1
      for (uint32_t n = 0; n < items; n++) {
        const uint32_t at = 8 * (slot * kUpParts + warp / kTeam), from = ring + slot * tile_bytes + pair0 * kPairBytes + lane * 16;
        mbar_wait(full + at, parity);
        float a = 0, b = 0;
        uint4 u[kOwn], v[kOwn];
        uint32_t s[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; i++)
          if (i == 0 || two) {
            u[i] = lds128(from + i * kPairBytes), v[i] = lds128(from + i * kPairBytes + 512);
            s[i] = lds32(from + i * kPairBytes + 1024 - 12 * lane);
          }
        __syncwarp();
        if (lane == 0) mbar_arrive(empty + at);
#pragma unroll
        for (int i = 0; i < kOwn; i++)
          if (i == 0 || two) tile_pair(u[i], v[i], s[i], x[i], a, b);
        mine[0] = a, mine[t & 2 ? -8 : 8] = b;
        mine += kUpWarps * 64;
        if (++slot == p.slots) slot = 0, parity ^= 1;
      }
    }
    named_sync(1, 32 * kUpWarps);
    finish_up(p, now, factor + r * 16, r, items, d0, tile0, tiles, used, 32 * kUpWarps);
  }
}

// ---- down ----

static constexpr uint32_t kDownTiles = 3;  // of eight rows a block at most
static constexpr uint32_t kDownFixed = 144 + 32 + 64 + 64 + 384 + 16 * kDownTiles * 8 * 4;

static constexpr int kDownWarps = 16;
static constexpr int kDownThreads = 32 * kDownWarps;

NINFER_KERNEL(expert_down, ExpertDownParams, kDownThreads, 2) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.inner / 128, tile_bytes = pairs * kHalfBytes, tiles = p.h / 8;
  const uint32_t of_row = blockIdx.y, blocks = gridDim.x, block = blockIdx.x;
  const uint32_t tile0 = share_start(tiles, blocks, block), nt = share_start(tiles, blocks, block + 1) - tile0;
  const uint32_t bars = smem_addr(smem), shared_bar = bars + 8 * kMaxTop;
  uint16_t* id = (uint16_t*)(smem + 144);
  float *factor = (float*)(smem + 176), *weight = (float*)(smem + 240);
  uint32_t* scratch = (uint32_t*)(smem + 304);
  float* sums = (float*)(smem + 688);  // [warp][tile][8]
  const uint32_t hs = bars + kDownFixed, pitch = 2 * p.inner + 64;
  const uint32_t shared_at = (hs + p.topk * p.inner * 2 + 127) & ~127u, routed_at = shared_at + nt * 8 * pitch;

  STAMP_BEGIN(230)
  if (threadIdx.x <= kMaxTop) {
    mbar_init(bars + 8 * threadIdx.x, 1);
    mbar_fence_init();
  }
  __syncthreads();
  const uint64_t policy = policy_evict_first();
  if (threadIdx.x == 0) mbar_expect(shared_bar, nt * 8 * 2 * p.inner);
  if (lane == 0)
    for (uint32_t r = warp; r < nt * 8; r += kDownWarps)
      bulk_load(shared_at + r * pitch, p.shared_w + (uint64_t)(tile0 * 8 + r) * p.inner, 2 * p.inner, shared_bar, policy);
  if (!p.early) pdl_wait();
  STAMP(1)
  if (warp == 0) choose_weighted(p.logits + of_row * p.experts, p.experts, p.topk, id, weight, scratch);
  __syncthreads();
  STAMP(2)
  if (warp < p.topk && lane == 0) {
    mbar_expect(bars + 8 * warp, nt * tile_bytes);
    bulk_load(routed_at + warp * nt * tile_bytes, (const uint8_t*)p.bank + ((uint64_t)id[warp] * tiles + tile0) * tile_bytes, nt * tile_bytes,
              bars + 8 * warp, policy);
    factor[warp] = weight[warp] * (E2M1_UNDO / __ldg(p.divisor + id[warp]));
  }
  STAMP(3)
  // The shared expert, whose hidden vector is as old as the logits (R3): BF16, column 0, rows g of the first and third tile, rows g + 8 of
  // the second.
  const uint4 zero = make_uint4(0, 0, 0, 0);
  float tot[kDownTiles];
  {
    const float f = sigmoid(ldg_l2_f32(p.shared_logit + of_row));
    float acc[2][4] = {};
    mbar_wait(shared_bar, 0);
#pragma unroll 1
    for (uint32_t c = kDownWarps - 1 - warp; c < p.inner / 32; c += kDownWarps) {
      const uint32_t at = shared_at + g * pitch + c * 64 + t * 16;
      const uint4 x = g == 0 ? ldg_l2(p.shared_hidden + (uint64_t)of_row * p.inner + c * 32 + t * 8) : zero, u = lds128(at), v = nt > 1 ? lds128(at + 8 * pitch) : zero;
      mma_bf16(acc[0], u.x, v.x, u.y, v.y, x.x, x.y);
      mma_bf16(acc[0], u.z, v.z, u.w, v.w, x.z, x.w);
      if (nt > 2) {
        const uint4 w = lds128(at + 16 * pitch);
        mma_bf16(acc[1], w.x, 0, w.y, 0, x.x, x.y);
        mma_bf16(acc[1], w.z, 0, w.w, 0, x.z, x.w);
      }
    }
    tot[0] = f * acc[0][0], tot[1] = f * acc[0][2], tot[2] = f * acc[1][0];
  }
  if (p.early) pdl_wait();
  STAMP(4)
  const uint32_t all = p.topk * p.inner / 8;
  const bf16* hidden = p.hidden + (uint64_t)of_row * p.topk * p.inner;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < all; i += 2 * kDownThreads) {
    const uint32_t j = i + kDownThreads;
    uint4 a = ldg_l2(hidden + i * 8), b = a;
    if (j < all) b = ldg_l2(hidden + j * 8);
    sts128(hs + i * 16, operand(a));
    if (j < all) sts128(hs + j * 16, operand(b));
  }
  __syncthreads();
  pdl_trigger();
  STAMP(5)
  STAMP(6)
  // An expert's units are the pairs of its tiles, in order; the second half of them goes to rows g + 8. A warp has the same two units of
  // every step-th expert, so that all but the experts' own addresses stays the same.
  const uint32_t units = nt * pairs, both = ceil_div(units, 2), step = kDownWarps / both;
  if (warp < step * both) {
    uint32_t d = warp / both;
    const uint32_t a = warp - d * both, b = a + both;
    const bool second = b < units, live = g == 2 * t || (g == 2 * t + 1 && second);
    const uint32_t ta = (a >= pairs) + (a >= 2 * pairs), tb = (b >= pairs) + (b >= 2 * pairs);
    uint32_t from = routed_at + (d * units + a) * kHalfBytes + lane * 16, xp = hs + (d * p.inner + (g == 2 * t ? a - ta * pairs : b - tb * pairs) * 128 + t * 16) * 2;
    const uint32_t other = second ? both * kHalfBytes : 0, from_step = step * units * kHalfBytes, xp_step = step * p.inner * 2;
    float suma = 0, sumb = 0;
#pragma unroll 1
    for (; d < p.topk; d += step) {
      mbar_wait(bars + 8 * d, 0);
      const uint4 u = lds128(from), v = lds128(from + other);
      const float2 fa = e4m3x2_f32(lds16(from + 512 - 14 * lane)), fb = e4m3x2_f32(lds16(from + other + 512 - 14 * lane));
      const float f = factor[d];
      uint4 x0 = zero, x1 = zero, x2 = zero, x3 = zero;
      if (live) x0 = lds128(xp), x1 = lds128(xp + 16), x2 = lds128(xp + 128), x3 = lds128(xp + 144);
      float acc[4], va, vb;
      multiply_plain(acc, make_uint2(u.x, u.y), make_uint2(v.x, v.y), x0, x1);
      va = fa.x * acc[0], vb = fb.x * acc[3];
      multiply_plain(acc, make_uint2(u.z, u.w), make_uint2(v.z, v.w), x2, x3);
      va = fmaf(fa.y, acc[0], va), vb = fmaf(fb.y, acc[3], vb);  // zero where there is no second unit, whose activations are
      suma = fmaf(f, va, suma), sumb = fmaf(f, vb, sumb);
      from += from_step, xp += xp_step;
    }
#pragma unroll
    for (uint32_t i = 0; i < kDownTiles; i++) {
      if (ta == i) tot[i] += suma;
      if (tb == i && second) tot[i] += sumb;
    }
  }
  STAMP(7)
#pragma unroll
  for (uint32_t i = 0; i < kDownTiles; i++) {
    const float v = quad_sum(tot[i]);
    if (t == 0) sums[(warp * kDownTiles + i) * 8 + g] = v;
  }
  __syncthreads();
  STAMP(8)
  if (threadIdx.x < nt * 64) {  // eight lanes an output
    const uint32_t row = threadIdx.x / 8;
    float v = 0;
    for (uint32_t w = lane % 8; w < kDownWarps; w += 8) v += sums[w * kDownTiles * 8 + row];
    v = quad_sum(v);
    v += __shfl_xor_sync(~0u, v, 4);
    if (lane % 8 == 0) p.out[(uint64_t)of_row * p.h + tile0 * 8 + row] = __float2bfloat16_rn(v);
  }
  STAMP(9)
}

// Several rows: a block has its tiles for every row, one after the other; an expert's weights for the next row come as soon as this row's have
// been read. The sums are those of expert_down.
static constexpr uint32_t kDownRowsFixed = 4624 + (2 + 8) * 16 * kDownTiles * 8 * 4;

NINFER_KERNEL(expert_down_rows, ExpertDownParams, kDownThreads, 1) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.inner / 128, tile_bytes = pairs * kHalfBytes, tiles = p.h / 8;
  const uint32_t tile0 = share_start(tiles, gridDim.x, blockIdx.x), nt = share_start(tiles, gridDim.x, blockIdx.x + 1) - tile0;
  const uint32_t bars = smem_addr(smem), shared_bar = bars + 8 * kMaxTop, empty = shared_bar + 8;
  static_assert(8 * (2 * kMaxTop + 1) <= 272);
  uint16_t* id = (uint16_t*)(smem + 272);                // [8][16]
  float* factor = (float*)(smem + 528);                  // [8][16]
  float* weight = (float*)(smem + 1040);                 // [8][16]
  uint32_t* scratch = (uint32_t*)(smem + 1552);          // [8][96]
  float* sums = (float*)(smem + 4624);                   // [2][warp][tile][8]
  float* first = sums + 2 * kDownWarps * kDownTiles * 8;  // [row][warp][tile][8]: of the shared expert
  const uint32_t hs = smem_addr(smem) + kDownRowsFixed, pitch = 2 * p.inner + 64, hs_bytes = p.topk * p.inner * 2;
  const uint32_t shared_at = (hs + 2 * hs_bytes + 127) & ~127u, routed_at = shared_at + nt * 8 * pitch;

  if (threadIdx.x <= kMaxTop) mbar_init(bars + 8 * threadIdx.x, 1);
  const uint32_t units = nt * pairs, both = ceil_div(units, 2), step = kDownWarps / both;
  if (threadIdx.x < kMaxTop) mbar_init(empty + 8 * threadIdx.x, both);
  mbar_fence_init();
  __syncthreads();
  const uint64_t policy = policy_evict_first();
  if (threadIdx.x == 0) mbar_expect(shared_bar, nt * 8 * 2 * p.inner);
  if (lane == 0)
    for (uint32_t r = warp; r < nt * 8; r += kDownWarps)
      bulk_load(shared_at + r * pitch, p.shared_w + (uint64_t)(tile0 * 8 + r) * p.inner, 2 * p.inner, shared_bar, policy);
  if (!p.early) pdl_wait();
  if (warp < p.r) {
    choose_weighted(p.logits + warp * p.experts, p.experts, p.topk, id + warp * 16, weight + warp * 16, scratch + warp * 96);
    if (lane < p.topk) factor[warp * 16 + lane] = weight[warp * 16 + lane] * (E2M1_UNDO / __ldg(p.divisor + id[warp * 16 + lane]));
  }
  __syncthreads();
  auto fetch = [&](uint32_t r, uint32_t d) {
    mbar_expect(bars + 8 * d, nt * tile_bytes);
    bulk_load(routed_at + d * nt * tile_bytes, (const uint8_t*)p.bank + ((uint64_t)id[r * 16 + d] * tiles + tile0) * tile_bytes, nt * tile_bytes, bars + 8 * d, policy);
  };
  if (warp < p.topk && lane == 0) fetch(0, warp);
  // the shared expert, all rows at once: column g is row g
  const uint4 zero = make_uint4(0, 0, 0, 0);
  {
    float acc[2][4] = {};
    mbar_wait(shared_bar, 0);
#pragma unroll 1
    for (uint32_t c = kDownWarps - 1 - warp; c < p.inner / 32; c += kDownWarps) {
      const uint32_t at = shared_at + g * pitch + c * 64 + t * 16;
      const uint4 x = g < p.r ? ldg_l2(p.shared_hidden + (uint64_t)g * p.inner + c * 32 + t * 8) : zero, u = lds128(at), v = nt > 1 ? lds128(at + 8 * pitch) : zero;
      mma_bf16(acc[0], u.x, v.x, u.y, v.y, x.x, x.y);
      mma_bf16(acc[0], u.z, v.z, u.w, v.w, x.z, x.w);
      if (nt > 2) {
        const uint4 w = lds128(at + 16 * pitch);
        mma_bf16(acc[1], w.x, 0, w.y, 0, x.x, x.y);
        mma_bf16(acc[1], w.z, 0, w.w, 0, x.z, x.w);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
      if (2 * t + i < p.r) {
        const float f = sigmoid(ldg_l2_f32(p.shared_logit + 2 * t + i));
        float* to = first + ((2 * t + i) * kDownWarps + warp) * kDownTiles * 8 + g;
        to[0] = f * acc[0][i], to[8] = f * acc[0][2 + i], to[16] = f * acc[1][i];
      }
  }
  if (p.early) pdl_wait();
  const uint32_t all = p.topk * p.inner / 8;  // at most 1280
  auto put = [&](uint32_t r, uint32_t i, uint4 v) {
    if (i < all) sts128(hs + (r & 1) * hs_bytes + i * 16, operand(v));
  };
  auto get = [&](uint32_t r, uint32_t i) { return i < all ? ldg_l2(p.hidden + (uint64_t)r * p.topk * p.inner + i * 8) : zero; };
  for (uint32_t i = threadIdx.x; i < all; i += kDownThreads) put(0, i, get(0, i));
  __syncthreads();
  pdl_trigger();
  uint32_t d0 = warp / both;
  const bool works = warp < step * both;
  const uint32_t a = warp - d0 * both, b = a + both;
  const bool second = b < units, live = g == 2 * t || (g == 2 * t + 1 && second);
  const uint32_t ta = (a >= pairs) + (a >= 2 * pairs), tb = (b >= pairs) + (b >= 2 * pairs);
  const uint32_t other = second ? both * kHalfBytes : 0, from_step = step * units * kHalfBytes, xp_step = step * p.inner * 2;
#pragma unroll 1
  for (uint32_t r = 0; r < p.r; r++) {
    uint4 more[3];
    const bool next = r + 1 < p.r;
    if (next)
#pragma unroll
      for (int i = 0; i < 3; i++) more[i] = get(r + 1, threadIdx.x + i * kDownThreads);
    float tot[kDownTiles];
#pragma unroll
    for (uint32_t i = 0; i < kDownTiles; i++) tot[i] = t == 0 ? first[(r * kDownWarps + warp) * kDownTiles * 8 + i * 8 + g] : 0.0f;
    if (works) {
      uint32_t from = routed_at + (d0 * units + a) * kHalfBytes + lane * 16;
      uint32_t xp = hs + (r & 1) * hs_bytes + (d0 * p.inner + (g == 2 * t ? a - ta * pairs : b - tb * pairs) * 128 + t * 16) * 2;
      float suma = 0, sumb = 0;
#pragma unroll 1
      for (uint32_t d = d0; d < p.topk; d += step) {
        mbar_wait(bars + 8 * d, r & 1);
        const uint4 u = lds128(from), v = lds128(from + other);
        const float2 fa = e4m3x2_f32(lds16(from + 512 - 14 * lane)), fb = e4m3x2_f32(lds16(from + other + 512 - 14 * lane));
        __syncwarp();
        if (lane == 0) {
          mbar_arrive(empty + 8 * d);
          if (next && a == 0) {
            mbar_wait(empty + 8 * d, r & 1);
            fetch(r + 1, d);
          }
        }
        const float f = factor[r * 16 + d];
        uint4 x0 = zero, x1 = zero, x2 = zero, x3 = zero;
        if (live) x0 = lds128(xp), x1 = lds128(xp + 16), x2 = lds128(xp + 128), x3 = lds128(xp + 144);
        float acc[4], va, vb;
        multiply_plain(acc, make_uint2(u.x, u.y), make_uint2(v.x, v.y), x0, x1);
        va = fa.x * acc[0], vb = fb.x * acc[3];
        multiply_plain(acc, make_uint2(u.z, u.w), make_uint2(v.z, v.w), x2, x3);
        va = fmaf(fa.y, acc[0], va), vb = fmaf(fb.y, acc[3], vb);
        suma = fmaf(f, va, suma), sumb = fmaf(f, vb, sumb);
        from += from_step, xp += xp_step;
      }
#pragma unroll
      for (uint32_t i = 0; i < kDownTiles; i++) {
        if (ta == i) tot[i] += suma;
        if (tb == i && second) tot[i] += sumb;
      }
    }
    float* now = sums + (r & 1) * kDownWarps * kDownTiles * 8;
#pragma unroll
    for (uint32_t i = 0; i < kDownTiles; i++) {
      const float v = quad_sum(tot[i]);
      if (t == 0) now[(warp * kDownTiles + i) * 8 + g] = v;
    }
    if (next)
#pragma unroll
      for (int i = 0; i < 3; i++) put(r + 1, threadIdx.x + i * kDownThreads, more[i]);
    __syncthreads();
    if (threadIdx.x < nt * 64) {  // eight lanes an output
      const uint32_t row = threadIdx.x / 8;
      float v = 0;
      for (uint32_t w = lane % 8; w < kDownWarps; w += 8) v += now[w * kDownTiles * 8 + row];
      v = quad_sum(v);
      v += __shfl_xor_sync(~0u, v, 4);
      if (lane % 8 == 0) p.out[(uint64_t)r * p.h + tile0 * 8 + row] = __float2bfloat16_rn(v);
    }
  }
}

// ---- repacking ----

// One thread a lane's 16 bytes of codes. grid.x covers (expert, tile of 16 or 8 rows, 64 or 128 k, lane).
NINFER_KERNEL(expert_repack, RepackParams, 256, 1) {
  const uint32_t chunks = p.k / 64, per_row = p.paired ? chunks : chunks / 2, tiles = p.paired ? p.n / 16 : p.n / 8;
  uint64_t i = (uint64_t)blockIdx.x * 256 + threadIdx.x;
  if (i >= (uint64_t)p.count * tiles * per_row * 32) return;
  const uint32_t lane = i % 32, at = i / 32 % per_row, tile = i / 32 / per_row % tiles;
  const uint64_t expert = p.first_expert + i / 32 / per_row / tiles;
  const uint32_t g = lane / 4, t = lane % 4;
  const uint32_t r0 = tile * 8 + g, r1 = p.paired ? p.n / 2 + r0 : r0, c0 = p.paired ? at : 2 * at, c1 = p.paired ? at : c0 + 1;
  const uint8_t* codes = p.codes + expert * p.n * (p.k / 2);
  const uint8_t* scales = p.scales + expert * p.n * (p.k / 16);
  uint8_t* out = p.bank + (expert * tiles + tile) * (p.paired ? chunks / 2 * kPairBytes : chunks / 2 * kHalfBytes);
  const uint2 a = pack_codes(*(const uint2*)(codes + (uint64_t)r0 * (p.k / 2) + c0 * 32 + t * 8));
  const uint2 b = pack_codes(*(const uint2*)(codes + (uint64_t)r1 * (p.k / 2) + c1 * 32 + t * 8));
  auto swizzle = [&](uint32_t row, uint32_t group) {
    return (row / 128 * (p.k / 64) + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
  };
  const uint8_t s0 = scales[swizzle(r0, c0 * 4 + t)], s1 = scales[swizzle(r1, c1 * 4 + t)];
  out += p.paired ? at / 2 * kPairBytes : at * kHalfBytes;
  *(uint4*)(out + (p.paired ? at % 2 * 512 : 0) + lane * 16) = make_uint4(a.x, a.y, b.x, b.y);
  uint8_t* to = out + (p.paired ? 1024 + lane * 4 + at % 2 * 2 : 512 + lane * 2);
  to[0] = s0, to[1] = s1;
}
