// Routed experts for R = 1..8 rows: top-k and gate/up, then down with the weighted sum; the shared expert's second half beside them.
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
// Rows are worked on one by one: they seldom share experts, what they share is in L2, and a row keeps its bits whatever rows are beside it:
// the kernels named _rows take several rows, in other places and at other times, but add up alike. A lane's 16 codes of a row have one scale,
// and one activation row leaves seven of the tensor instruction's columns idle. So the four lanes of a row put their activations into columns
// of their own (2 t, and 2 t + 1 for other weights at the same time): then a lane's result is the sum over its own 16 k, the scale multiplies
// that sum, and a weight costs nothing but its place in a BF16 number.
//
// Plan of a block for one row: expert_gate_up owns a run of (expert, tile) items; eight warps choose the experts, one fetches tiles, a few ahead,
// by bulk copies; ten warps have two pairs (128 k) each in every tile, their activations in registers; sums meet once at the end.
// expert_down of one row owns two or three tiles of eight rows over all experts: one bulk copy an expert, all on their way before the
// dependency wait where the kernel before it triggered after its own (R3). Rows g and g + 8 of its tensor instruction are two
// (tile, pair) units of one expert, told apart by columns 2 t and 2 t + 1. Fixed order of sums, no atomics on floats.
#include "choose.cuh"
#include "common.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

static constexpr uint32_t kPairBytes = 1152;  // 128 k of a gate/up tile
static constexpr uint32_t kHalfBytes = 576;   // 128 k of a down tile

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
static constexpr uint32_t kUpFixed = 640 + sizeof(Choice);  // barriers, choice

static constexpr int kUpWarps = 10;                              // consumers
static constexpr int kOwn = kUpPairs / kUpWarps;                 // pairs of every tile each has
static constexpr uint32_t kTeam = 4 / kOwn;                      // warps of a part
static constexpr int kUpThreads = 32 * 11;                       // one more warp fetches

// 128 k of a tile: the lane's own sums of rows g and g + 8, its activations in column 2 t + c.
NINFER_DEVICE void tile_pair(uint4 u, uint4 v, uint32_t s, const uint4* x, int c, float& a, float& b) {
  float acc[4];
  float2 f = e4m3x2_f32(s);  // row g, row g + 8
  multiply_plain(acc, make_uint2(u.x, u.y), make_uint2(u.z, u.w), x[0], x[1]);
  a = fmaf(f.x, acc[c], a), b = fmaf(f.y, acc[2 + c], b);
  f = e4m3x2_f32(s >> 16);
  multiply_plain(acc, make_uint2(v.x, v.y), make_uint2(v.z, v.w), x[2], x[3]);
  a = fmaf(f.x, acc[c], a), b = fmaf(f.y, acc[2 + c], b);
}

// Adds up the sums of a tile and writes its hidden values: four lanes an output, each its own t of all warps.
NINFER_DEVICE void finish_tile(const ExpertUpParams& p, const float* sums, float factor, uint32_t of_row, uint32_t d, uint32_t tile, uint32_t row, uint32_t used) {
  const uint32_t t = threadIdx.x % 4;
  const float *from = sums + t * 16 + (row ^ (t & 2) * 4), *from_up = from + (t & 2 ? -8 : 8);
  float gate = 0, up = 0;
#pragma unroll
  for (uint32_t w = 0; w < kUpWarps; w++)
    if (w < used) gate += from[w * 64], up += from_up[w * 64];
  gate = quad_sum(gate) * factor, up = quad_sum(up) * factor;
  if (t == 0) p.hidden[((uint64_t)of_row * p.topk + d) * p.inner + tile * 8 + row] = __float2bfloat16_rn(silu(gate) * up);
}

// The same of a single row's run of items.
NINFER_DEVICE void finish_up(const ExpertUpParams& p, const float* sums, const float* factor, uint32_t items, uint32_t d0, uint32_t tile0, uint32_t tiles,
                             uint32_t used, uint32_t threads) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 4; i < items * 8; i += threads / 4) {  // whole warps
    const uint32_t n = i / 8;
    uint32_t d = d0, tile = tile0 + n;
    while (tile >= tiles) tile -= tiles, ++d;
    finish_tile(p, sums + n * kUpWarps * 64, factor[d], 0, d, tile, i % 8, used);
  }
}

NINFER_KERNEL(expert_gate_up, ExpertUpParams, kUpThreads, 2) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.k / 128, tile_bytes = pairs * kPairBytes, tiles = p.inner / 8, parts = ceil_div(pairs, 4), used = ceil_div(pairs, kOwn);
  const uint32_t blocks = gridDim.x, block = blockIdx.x;
  // neighbouring items are one expert's, so that a block touches one or two pages of the bank
  const uint32_t item0 = share_start(p.topk * tiles, blocks, block), items = share_start(p.topk * tiles, blocks, block + 1) - item0;
  const uint32_t d0 = item0 / tiles, tile0 = item0 - d0 * tiles;
  const uint32_t full = smem_addr(smem), empty = full + 8 * kUpParts * p.slots;
  Choice& choice = *(Choice*)(smem + 640);
  uint16_t* id = choice.id[0];
  float *factor = choice.factor[0], *sums = (float*)(smem + kUpFixed);  // [item][warp][t][16 rows]
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

  const uint2 key = load_keys(p.logits, p.experts);
  const uint32_t pair0 = kOwn * warp;
  const bool two = pair0 + 1 < pairs;
  // the four lanes of a row have columns of their own: lane t's activations of the warp's two pairs are in columns 2 t and 2 t + 1
  uint4 x[4];
  const bool mine = warp < used && (g == 2 * t || (g == 2 * t + 1 && two));
#pragma unroll
  for (int j = 0; j < 4; j++) {
    x[j] = make_uint4(0, 0, 0, 0);
    if (mine) x[j] = ldg_l2(p.x + (pair0 + g % 2) * 128 + t * 16 + j / 2 * 64 + j % 2 * 8);
  }
  choose(p.logits, key, p.experts, p.topk, choice, id, kUpThreads, (uint32_t*)sums);

  if (warp == kUpWarps) {
    STAMP_BEGIN_IN(221, kUpThreads - 32)
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
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = operand(x[j]);
    uint32_t slot = 0, parity = 0;
    float* to = sums + (warp * 4 + t) * 16 + (g ^ (t & 2) * 4);  // the two rows' places swapped for half the lanes, against bank conflicts
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
        if (i == 0 || two) tile_pair(u[i], v[i], s[i], x, i, a, b);
      to[0] = a, to[t & 2 ? -8 : 8] = b;
      to += kUpWarps * 64;
      if (++slot == p.slots) slot = 0, parity ^= 1;
    }
    STAMP(5)
  }
  __syncthreads();
  STAMP(6)
  finish_up(p, sums, factor, items, d0, tile0, tiles, used, kUpThreads);
  STAMP(7)
}

// Several rows: the tiles of all rows' experts are one list, row after row, of which every block has a run, and the shared expert's second half
// is made here while experts are chosen. The sums are those of expert_gate_up and expert_down.
static constexpr int kUpRowsThreads = 32 * 12;  // one more warp fetches, one adds up
static constexpr uint32_t kUpWindow = 4;        // tiles whose sums are kept before they are added up
static constexpr uint32_t kUpSums = kUpWindow * kUpWarps * 256;
static constexpr uint32_t kUpRowsFixed = 688 + sizeof(Choice);  // barriers, choice
static_assert(sizeof(Choice) == 848 && kUpWarps * 8 * 24 * 4 <= kUpSums && 64 + 8 * 512 <= kUpSums);

// A window of a run: which of the run's rows, its first tile of the row, number of tiles.
struct UpWindow {
  uint32_t row, q, n;
  NINFER_DEVICE void next(uint32_t of_row, uint32_t& left) {
    left -= n, q += n;
    if (q == of_row) q = 0, row++;
    n = min(min(left, kUpWindow), of_row - q);
  }
};

NINFER_KERNEL(expert_gate_up_rows, ExpertUpParams, kUpRowsThreads, 2) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.k / 128, tile_bytes = pairs * kPairBytes, tiles = p.inner / 8, parts = ceil_div(pairs, 4), used = ceil_div(pairs, kOwn);
  const uint32_t of_row = p.topk * tiles;  // tiles of a row
  const uint32_t item0 = share_start(p.r * of_row, gridDim.x, blockIdx.x), items = share_start(p.r * of_row, gridDim.x, blockIdx.x + 1) - item0;
  const uint32_t row0 = min(item0 / of_row, p.r - 1), q0 = item0 - row0 * of_row;
  const bool both = q0 + items > of_row;  // a run reaches into one more row at most
  const uint32_t full = smem_addr(smem), empty = full + 8 * kUpParts * p.slots, shared_bar = full + 640, summed = full + 648, added = full + 664;
  Choice& choice = *(Choice*)(smem + 688);
  float* sums = (float*)(smem + kUpRowsFixed);  // [2][tile][warp][t][16 rows]
  const uint32_t ring = (smem_addr(sums) + 2 * kUpSums + 127) & ~127u;
  // the shared expert's rows, in slots whose first use they are
  const uint32_t own0 = share_start(p.k, gridDim.x, blockIdx.x), own = share_start(p.k, gridDim.x, blockIdx.x + 1) - own0, pitch = 2 * p.inner + 64;
  const uint32_t taken = ceil_div(own * pitch, tile_bytes);

  STAMP_BEGIN(220)
  const uint32_t part0 = threadIdx.x % parts, slot0 = threadIdx.x / parts;
  if (slot0 < p.slots) {
    mbar_init(full + 8 * (slot0 * kUpParts + part0), 1);
    mbar_init(empty + 8 * (slot0 * kUpParts + part0), min(kTeam, used - kTeam * part0));
    mbar_fence_init();
  }
  if (threadIdx.x == kUpRowsThreads - 1) {
    mbar_init(shared_bar, 1);
    mbar_init(summed, used), mbar_init(summed + 8, used);
    mbar_init(added, 1), mbar_init(added + 8, 1);
    mbar_fence_init();
    mbar_expect(shared_bar, own * 2 * p.inner);
  }
  __syncthreads();
  if (lane == 0)
    for (uint32_t r = warp; r < own; r += kUpRowsThreads / 32)
      bulk_load(ring + r * pitch, p.shared_w + (uint64_t)(own0 + r) * p.inner, 2 * p.inner, shared_bar, policy_evict_first());
  if (slot0 < taken) mbar_arrive(full + 8 * (slot0 * kUpParts + part0));
  STAMP(1)
  pdl_wait();
  STAMP(2)
  // Experts are chosen while all that does not depend on them is on its way.
  const uint2 key = load_keys(p.logits + row0 * p.experts, p.experts);
  const uint32_t pair0 = kOwn * warp;
  const bool two = pair0 + 1 < pairs;
  // the four lanes of a row have columns of their own: lane t's activations of the warp's two pairs are in columns 2 t and 2 t + 1
  uint4 x[4];
  auto ask = [&](uint32_t row) {
    const bool mine = warp < used && (g == 2 * t || (g == 2 * t + 1 && two));
    const bf16* from = p.x + (uint64_t)row * p.x_ld + (pair0 + g % 2) * 128 + t * 16;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      x[j] = make_uint4(0, 0, 0, 0);
      if (mine) x[j] = ldg_l2(from + j / 2 * 64 + j % 2 * 8);
    }
  };
  auto order = [&]() {
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = operand(x[j]);
  };
  static_assert(kOwn == 2);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const bf16* h = p.shared_hidden + (uint64_t)g * p.inner + t * 8;
  const uint32_t chunks = p.inner / 32, out_row = threadIdx.x / max(own, 1u);
  auto hidden = [&](uint32_t c) { return warp < kUpWarps && g < p.r && c < chunks ? ldg_l2(h + c * 32) : zero; };
  uint4 h0 = hidden(warp), h1 = hidden(warp + kUpWarps);
  const float logit = warp < kUpWarps && out_row < p.r ? ldg_l2_f32(p.shared_logit + out_row) : 0.0f;
  choose(p.logits + row0 * p.experts, key, p.experts, p.topk, choice, choice.id[0], kUpRowsThreads, (uint32_t*)sums);
  STAMP(3)

  if (warp == kUpWarps) {
    STAMP_BEGIN_IN(221, 32 * kUpWarps)
    const uint64_t policy = policy_evict_first();
    const uint32_t bytes = min(4u, pairs - 4 * min(lane, parts - 1)) * kPairBytes, into = ring + lane * 4 * kPairBytes;
    uint32_t slot = taken, parity = 1, d = q0 / tiles, tile = q0 % tiles, of = 0;
    if (p.trigger == 0) pdl_trigger();
#pragma unroll 1
    for (uint32_t n = 0; n < items; n++) {
      if (n && n == p.trigger) pdl_trigger();  // after the wait, so the next kernel may read the logits in its prologue (R3)
      if (lane < parts) {
        const uint32_t at = 8 * (slot * kUpParts + lane);
        const uint8_t* src = (const uint8_t*)p.bank + ((uint64_t)choice.id[of][d] * tiles + tile) * tile_bytes + lane * 4 * kPairBytes;
        mbar_wait(empty + at, parity);
        mbar_expect(full + at, bytes);
        bulk_load(into + slot * tile_bytes, src, bytes, full + at, policy);
      }
      __syncwarp();
      if (++tile == tiles) {
        tile = 0;
        if (++d == p.topk && n + 1 < items) {
          d = 0, of = 1;
          named_sync(3, 64);  // the second row's experts are known
        }
      }
      if (++slot == p.slots) slot = 0, parity ^= 1;
    }
    if (p.trigger && items <= p.trigger) pdl_trigger();
    STAMP(4)
    return;
  }
  uint32_t left = items;
  UpWindow w = {row0, q0, min(min(left, kUpWindow), of_row - q0)};
  if (warp > kUpWarps) {  // all windows but the last; the second row's experts, while the first row's tiles come
    if (both) {
      top_of_row(p.logits + (row0 + 1) * p.experts, p.experts, p.topk, choice.id[1], choice.key, (uint32_t*)choice.list);
      if (lane < p.topk) choice.factor[1][lane] = __fdividef(E2M1_UNDO, __ldg(p.divisor + choice.id[1][lane]));
      __syncwarp();
      named_arrive(3, 64);
    }
#pragma unroll 1
    for (uint32_t turn = 0; w.n < left; turn++) {
      mbar_wait(summed + 8 * (turn & 1), turn >> 1 & 1);
#pragma unroll 1
      for (uint32_t i = 0; i < w.n; i++)
        finish_tile(p, sums + (turn & 1) * (kUpSums / 4) + i * kUpWarps * 64, choice.factor[w.row - row0][(w.q + i) / tiles], w.row, (w.q + i) / tiles,
                    (w.q + i) % tiles, lane / 4, used);
      __syncwarp();
      if (lane == 0) mbar_arrive(added + 8 * (turn & 1));
      w.next(of_row, left);
    }
    return;
  }
  ask(row0);
  // The shared expert's second half: eight rows of activations are the columns of the tensor instruction.
  float* part = sums + kUpSums / 4;  // [warp][row of activations][24]
  const bool scales = warp == 0 && lane < p.topk;
  const float divisor = scales ? __ldg(p.divisor + choice.id[0][lane]) : 1.0f;
  {
    float acc[2][4] = {};
    mbar_wait(shared_bar, 0);
#pragma unroll 1
    for (uint32_t c = warp; c < chunks; c += kUpWarps) {
      const uint32_t at = ring + g * pitch + c * 64 + t * 16;
      const uint4 u = g < own ? lds128(at) : zero, v = g + 8 < own ? lds128(at + 8 * pitch) : zero, e = g + 16 < own ? lds128(at + 16 * pitch) : zero;
      mma_bf16(acc[0], u.x, v.x, u.y, v.y, h0.x, h0.y);
      mma_bf16(acc[0], u.z, v.z, u.w, v.w, h0.z, h0.w);
      mma_bf16(acc[1], e.x, 0, e.y, 0, h0.x, h0.y);
      mma_bf16(acc[1], e.z, 0, e.w, 0, h0.z, h0.w);
      h0 = h1, h1 = hidden(c + 2 * kUpWarps);
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
      if (2 * t + i < p.r) {
        float* to = part + (warp * p.r + 2 * t + i) * 24 + g;
        to[0] = acc[0][i], to[8] = acc[0][2 + i], to[16] = acc[1][i];
      }
    if (scales) choice.factor[0][lane] = __fdividef(E2M1_UNDO, divisor);
  }
  named_sync(1, 32 * kUpWarps);
  if (warp < used && lane == 0)
    for (uint32_t s = 0; s < taken; s++) mbar_arrive(empty + 8 * (s * kUpParts + warp / kTeam));
  if (out_row < p.r && own) {
    float v = 0;
#pragma unroll
    for (uint32_t i = 0; i < kUpWarps; i++) v += part[(i * p.r + out_row) * 24 + threadIdx.x % own];
    p.shared_out[(uint64_t)out_row * p.k + own0 + threadIdx.x % own] = sigmoid(logit) * v;
  }
  STAMP(4)
  named_sync(1, 32 * kUpWarps);  // sums take these places
  if (warp >= used) return;
  order();
  STAMP(5)
  uint32_t slot = taken, parity = 0;
#pragma unroll 1
  for (uint32_t turn = 0; left; turn++) {
    float* now = sums + (turn & 1) * (kUpSums / 4);
    if (turn > 1) mbar_wait(added + 8 * (turn & 1), (turn >> 1 & 1) ^ 1);
    float* to = now + (warp * 4 + t) * 16 + (g ^ (t & 2) * 4);  // the two rows' places swapped for half the lanes, against bank conflicts
#pragma unroll 1
    for (uint32_t i = 0; i < w.n; i++) {
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
        if (i == 0 || two) tile_pair(u[i], v[i], s[i], x, i, a, b);
      to[0] = a, to[t & 2 ? -8 : 8] = b;
      to += kUpWarps * 64;
      if (++slot == p.slots) slot = 0, parity ^= 1;
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(summed + 8 * (turn & 1));
    if (w.n == left) {  // the last window
      mbar_wait(summed + 8 * (turn & 1), turn >> 1 & 1);
      for (uint32_t i = warp; i < w.n; i += used)
        finish_tile(p, now + i * kUpWarps * 64, choice.factor[w.row - row0][(w.q + i) / tiles], w.row, (w.q + i) / tiles, (w.q + i) % tiles, lane / 4, used);
    }
    const uint32_t row = w.row;
    w.next(of_row, left);
    if (left && w.row != row) ask(w.row), order();
  }
  STAMP(6)
}

// ---- down ----

static constexpr uint32_t kDownTiles = 3;  // of eight rows a block at most
static constexpr uint32_t kDownFixed = 144 + sizeof(Choice) + 16 * kDownTiles * 8 * 4 + 96;

static constexpr int kDownWarps = 16;
static constexpr int kDownThreads = 32 * kDownWarps;

NINFER_KERNEL(expert_down, ExpertDownParams, kDownThreads, 2) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.inner / 128, tile_bytes = pairs * kHalfBytes, tiles = p.h / 8;
  const uint32_t blocks = gridDim.x, block = blockIdx.x;
  const uint32_t tile0 = share_start(tiles, blocks, block), nt = share_start(tiles, blocks, block + 1) - tile0;
  const uint32_t bars = smem_addr(smem), shared_bar = bars + 8 * kMaxTop;
  Choice& choice = *(Choice*)(smem + 144);
  float *factor = choice.factor[0], *sums = (float*)(smem + 144 + sizeof(Choice));  // [every other expert's][pair][tile][8]
  float* shared = sums + 16 * kDownTiles * 8;
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
  choose(p.logits, load_keys(p.logits, p.experts), p.experts, p.topk, choice, choice.id[0], kDownThreads, (uint32_t*)sums);
  STAMP(2)
  if (warp < p.topk && lane == 0) {
    mbar_expect(bars + 8 * warp, nt * tile_bytes);
    bulk_load(routed_at + warp * nt * tile_bytes, (const uint8_t*)p.bank + ((uint64_t)choice.id[0][warp] * tiles + tile0) * tile_bytes, nt * tile_bytes,
              bars + 8 * warp, policy);
  }
  if (warp == kDownWarps - 1) {
    const float weight = weight_of(choice.key, p.topk);
    if (lane < p.topk) factor[lane] = weight * (E2M1_UNDO / __ldg(p.divisor + choice.id[0][lane]));
  }
  STAMP(3)
  // The shared expert, whose hidden vector is as old as the logits (R3): BF16, column 0, rows g of the first and third tile, rows g + 8 of
  // the second.
  const uint4 zero = make_uint4(0, 0, 0, 0);
  if (warp < kUpWarps) {  // the sums of expert_gate_up_rows
    const float f = sigmoid(ldg_l2_f32(p.shared_logit));
    float acc[2][4] = {};
    mbar_wait(shared_bar, 0);
#pragma unroll 1
    for (uint32_t c = warp; c < p.inner / 32; c += kUpWarps) {
      const uint32_t at = shared_at + g * pitch + c * 64 + t * 16;
      const uint4 x = g == 0 ? ldg_l2(p.shared_hidden + c * 32 + t * 8) : zero, u = lds128(at), v = nt > 1 ? lds128(at + 8 * pitch) : zero;
      mma_bf16(acc[0], u.x, v.x, u.y, v.y, x.x, x.y);
      mma_bf16(acc[0], u.z, v.z, u.w, v.w, x.z, x.w);
      if (nt > 2) {
        const uint4 w = lds128(at + 16 * pitch);
        mma_bf16(acc[1], w.x, 0, w.y, 0, x.x, x.y);
        mma_bf16(acc[1], w.z, 0, w.w, 0, x.z, x.w);
      }
    }
    if (t == 0) {
      float* to = sums + warp * 24 + g;
      to[0] = acc[0][0], to[8] = acc[0][2], to[16] = acc[1][0];
    }
    named_sync(1, 32 * kUpWarps);
    if (threadIdx.x < nt * 8) {
      float v = 0;
#pragma unroll
      for (uint32_t i = 0; i < kUpWarps; i++) v += sums[i * 24 + threadIdx.x];
      shared[threadIdx.x] = f * v;
    }
  }
  if (p.early) pdl_wait();
  STAMP(4)
  const uint32_t all = p.topk * p.inner / 8;
  const bf16* hidden = p.hidden;
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
  if (p.distinct && blockIdx.x == 0 && threadIdx.x == 0) *p.distinct = p.topk;
  STAMP(5)
  STAMP(6)
  // An expert's units are the pairs of its tiles, in order; the second half of them goes to rows g + 8. A warp has the same two units of
  // every other expert, so that a unit's sum is the same whatever tiles are beside it, and all but the experts' own addresses stays the same.
  const uint32_t units = nt * pairs, both = ceil_div(units, 2);
  if (warp < 2 * both) {
    const uint32_t odd = warp >= both, a = warp - odd * both, b = a + both;
    const bool second = b < units, live = g == 2 * t || (g == 2 * t + 1 && second);
    const uint32_t ta = a / pairs, tb = b / pairs;
    uint32_t d = odd, from = routed_at + (d * units + a) * kHalfBytes + lane * 16;
    uint32_t xp = hs + (d * p.inner + (g == 2 * t ? a - ta * pairs : b - tb * pairs) * 128 + t * 16) * 2;
    const uint32_t other = second ? both * kHalfBytes : 0, from_step = 2 * units * kHalfBytes, xp_step = 4 * p.inner;
    float suma = 0, sumb = 0;
#pragma unroll 1
    for (; d < p.topk; d += 2) {
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
    suma = quad_sum(suma), sumb = quad_sum(sumb);
    float* to = sums + odd * units * 8 + g;
    if (t == 0) to[((a - ta * pairs) * nt + ta) * 8] = suma;
    if (t == 0 && second) to[((b - tb * pairs) * nt + tb) * 8] = sumb;
  }
  STAMP(7)
  __syncthreads();
  STAMP(8)
  if (threadIdx.x < nt * 64) {  // eight lanes an output
    const uint32_t row = threadIdx.x / 8;
    float v = 0;
    for (uint32_t i = lane % 8; i < 2 * pairs; i += 8) v += sums[i * nt * 8 + row];
    v = quad_sum(v);
    v += __shfl_xor_sync(~0u, v, 4);
    if (lane % 8 == 0) p.out[tile0 * 8 + row] = __float2bfloat16_rn(v + shared[row]);
  }
  STAMP(9)
}

// Several rows: each row has blocks of its own, each of them a run of the row's tiles, worked on in windows of at most p.window tiles. A window's
// weights of an expert have a slot. Every other expert is one group's of eight warps, one of which asks for the slot's next weights when all have
// read; a window's sums are added up when the next one's have been made, so that nothing stops the block as a whole. The sums are those of expert_down.
static constexpr uint32_t kDownGroup = kDownWarps / 2;     // warps
static constexpr uint32_t kDownSums = 4 * kDownWarps * 8;  // of a window: at most four units a warp
static constexpr uint32_t kDownMost = 8;                   // tiles of a window
static constexpr uint32_t kDownSlots = 6;                  // an even number, so that a slot is always the same group's
static constexpr uint32_t kDownZero = 160;                 // bytes of zeros
static_assert(8 * 512 <= 2 * kDownSums * 4);  // eight rows' scratch
static constexpr uint32_t kDownRowsFixed = 128 + sizeof(Choice) + 2 * kDownSums * 4 + 4 * kDownMost * 8 * 4 + kDownZero + 64;

// Keeps a value in a register, instead of what it is computed from.
NINFER_DEVICE void hold(uint32_t& v) { asm volatile("" : "+r"(v)); }

NINFER_KERNEL(expert_down_rows, ExpertDownParams, kDownThreads, 2) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.inner / 128, tile_bytes = pairs * kHalfBytes, tiles = p.h / 8;
  const uint32_t bars = smem_addr(smem), empty = bars + 8 * kDownSlots, summed = empty + 8 * kDownSlots, run = bars + 112;
  Choice& choice = *(Choice*)(smem + 128);
  float* sums = (float*)(&choice + 1);            // [2][every other expert's][pair][tile][8]
  float* shared = sums + 2 * kDownSums;           // [4][tile][8]
  const uint32_t zeros = smem_addr(shared + 4 * kDownMost * 8), hs = bars + kDownRowsFixed;
  const uint32_t routed_at = (hs + p.topk * p.inner * 2 + 127) & ~127u, slot_bytes = p.window * tile_bytes;

  STAMP_BEGIN(240)
  if (threadIdx.x < kDownSlots) {
    mbar_init(bars + 8 * threadIdx.x, 1);
    mbar_init(empty + 8 * threadIdx.x, kDownGroup);
    if (threadIdx.x < 2) mbar_init(summed + 8 * threadIdx.x, kDownWarps);
    mbar_fence_init();
  }
  if (threadIdx.x == 0) {  // the block's first tile, number of tiles and of windows, row: in shared memory, since registers are few
    const uint32_t of_row = gridDim.x / p.r, row = blockIdx.x % p.r, block = blockIdx.x / p.r;
    const uint32_t tile0 = share_start(tiles, of_row, block), n = share_start(tiles, of_row, block + 1) - tile0;
    sts128(run, make_uint4(tile0, n, ceil_div(n, p.window), row));
  }
  if (threadIdx.x < kDownZero / 4) *(float*)(smem + (zeros - bars) + 4 * threadIdx.x) = 0;
  __syncthreads();
  if (!p.early) pdl_wait();
  STAMP(1)
  auto row = [&]() { return lds32(run + 12); };
  choose(p.logits + row() * p.experts, load_keys(p.logits + row() * p.experts, p.experts), p.experts, p.topk, choice, choice.id[0], kDownThreads, (uint32_t*)sums);
  STAMP(2)
  // a window's first tile in the bank, and number of them
  auto window = [&](uint32_t w) {
    const uint4 v = lds128(run);
    const uint32_t first = share_start(v.y, v.z, w);
    return make_uint2(v.x + first, share_start(v.y, v.z, w + 1) - first);
  };
  // the q-th slot's worth of weights, window after window, expert after expert
  auto fetch = [&](uint32_t q) {
    const uint32_t w = q / p.topk, d = q - w * p.topk, slot = q % kDownSlots;
    if (w >= lds32(run + 8)) return;
    const uint2 at = window(w);
    const uint32_t bytes = at.y * tile_bytes;
    mbar_expect(bars + 8 * slot, bytes);
    bulk_load(routed_at + slot * slot_bytes, (const uint8_t*)p.bank + ((uint64_t)choice.id[0][d] * tiles + at.x) * tile_bytes, bytes, bars + 8 * slot,
              policy_evict_first());
  };
  if (lane == 0 && warp < min(p.early, kDownSlots)) fetch(warp);
  if (warp == kDownWarps - 1) {
    const float weight = weight_of(choice.key, p.topk);
    if (lane < p.topk) choice.factor[0][lane] = weight * (E2M1_UNDO / __ldg(p.divisor + choice.id[0][lane]));
  }
  if (p.distinct && blockIdx.x == gridDim.x - 1) {  // nobody has fewer tiles
    uint32_t* seen = (uint32_t*)(smem + (zeros - bars) + kDownZero);
    uint8_t* room = (uint8_t*)sums + warp * 512;
    if (threadIdx.x < kMaxExperts / 32) seen[threadIdx.x] = 0;
    __syncthreads();
    if (warp < p.r) {
      top_of_row(p.logits + warp * p.experts, p.experts, p.topk, (uint16_t*)room, (uint32_t*)(room + 32), (uint32_t*)(room + 96));
      if (lane < p.topk) atomicOr(seen + ((uint16_t*)room)[lane] / 32, 1u << ((uint16_t*)room)[lane] % 32);
    }
    __syncthreads();
    const uint32_t sum = __reduce_add_sync(~0u, lane < kMaxExperts / 32 ? __popc(seen[lane]) : 0);
    if (threadIdx.x == 0) choice.distinct = sum;
  }
  STAMP(3)
  if (p.early) pdl_wait();
  STAMP(4)
  // Weights that were asked for earlier would have come instead of the last tiles of gate/up, which everything waits for.
  if (lane == 0 && warp >= p.early && warp < kDownSlots) fetch(warp);
  if (p.distinct && blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) *p.distinct = choice.distinct;
  {
    const uint32_t all = p.topk * p.inner / 8;
    const bf16* hidden = p.hidden + (uint64_t)row() * p.topk * p.inner;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < all; i += 2 * kDownThreads) {
      const uint32_t j = i + kDownThreads;
      uint4 a = ldg_l2(hidden + i * 8), b = a;
      if (j < all) b = ldg_l2(hidden + j * 8);
      sts128(hs + i * 16, operand(a));
      if (j < all) sts128(hs + j * 16, operand(b));
    }
  }
  __syncthreads();
  pdl_trigger();
  STAMP(5)
  auto add = [&](uint32_t w) {
    const uint2 at = window(w);
    const uint32_t nt = at.y;
    mbar_wait(summed + 8 * (w & 1), w >> 1 & 1);
    if (threadIdx.x < nt * 64) {  // eight lanes an output
      const float* now = sums + (w & 1) * kDownSums;
      float v = 0;
#pragma unroll 1
      for (uint32_t i = lane % 8; i < 2 * pairs; i += 8) v += now[i * nt * 8 + threadIdx.x / 8];
      v = quad_sum(v);
      v += __shfl_xor_sync(~0u, v, 4);
      if (lane % 8 == 0)
        p.out[(uint64_t)row() * p.h + at.x * 8 + threadIdx.x / 8] = __float2bfloat16_rn(v + shared[(w & 3) * kDownMost * 8 + threadIdx.x / 8]);
    }
  };
  // A group's pieces, two units (128 k of a tile) each, go to its warps in turn; the warps that have two of them are on other schedulers in the other.
  const uint32_t group = warp / kDownGroup, own = group ? (warp + 6) % kDownGroup : warp;
  const bool live = g / 2 == t;  // lanes whose columns are nobody's read zeros
#pragma unroll 1
  for (uint32_t w = 0; w < lds32(run + 8); w++) {
    const uint2 place = window(w);
    const uint32_t nt = place.y, units = nt * pairs, pieces = ceil_div(units, 2);
    if (threadIdx.x < 2 * nt)
      copy16(smem_addr(shared + (w & 3) * kDownMost * 8 + threadIdx.x * 4), p.shared_out + (uint64_t)row() * p.h + place.x * 8 + threadIdx.x * 4,
             policy_evict_first());
    copy_commit();
    float sum[4] = {0, 0, 0, 0};
    {
      const uint32_t odd = (group ^ (w & p.topk)) & 1, a = 2 * own, b = a + 2 * kDownGroup;
      uint32_t other_a = a + 1 < units ? kHalfBytes : 0, other_b = b + 1 < units ? kHalfBytes : 0;
      auto operand_of = [&](uint32_t unit) { return live ? hs + (odd * p.inner + (unit + (g & 1)) % pairs * 128 + t * 16) * 2 : zeros; };
      uint32_t xa = operand_of(a), xb = operand_of(b), step = live ? 4 * p.inner : 0;
      const uint32_t q = w * p.topk + odd, slot = q % kDownSlots;
      uint32_t bar = bars + 8 * slot, phase = q / kDownSlots & 1, factor = smem_addr(choice.factor[0] + odd), back = 512 - 14 * lane;
      uint32_t at = routed_at + slot * slot_bytes + a * kHalfBytes + 16 * lane, mine = (own < pieces) + (own + kDownGroup < pieces);
      hold(at), hold(back), hold(other_a), hold(other_b), hold(xa), hold(xb), hold(step), hold(mine), hold(factor);
      const uint32_t end = smem_addr(choice.factor[0] + p.topk);
#pragma unroll 1
      for (; factor < end; factor += 8) {
        mbar_wait(bar, phase);
        auto release = [&]() {
          __syncwarp();
          if (lane == 0) mbar_arrive(bar + 8 * kDownSlots);
        };
        auto piece = [&](uint32_t from, uint32_t other, uint32_t x, bool last, float& suma, float& sumb) {
          const uint4 u = lds128(from), v = lds128(from + other);
          from += back;
          const uint32_t su = lds16(from), sv = lds16(from + other);
          if (last) release();
          uint4 x0 = lds128(x), x1 = lds128(x + 16);
          float acc[4], va, vb;
          multiply_plain(acc, make_uint2(u.x, u.y), make_uint2(v.x, v.y), x0, x1);
          const float2 fa = e4m3x2_f32(su), fb = e4m3x2_f32(sv);
          va = fa.x * acc[0], vb = fb.x * acc[3];
          x0 = lds128(x + 128), x1 = lds128(x + 144);
          multiply_plain(acc, make_uint2(u.z, u.w), make_uint2(v.z, v.w), x0, x1);
          va = fmaf(fa.y, acc[0], va), vb = fmaf(fb.y, acc[3], vb);
          const float f = __uint_as_float(lds32(factor));
          suma = fmaf(f, va, suma), sumb = fmaf(f, vb, sumb);
        };
        if (mine) piece(at, other_a, xa, mine == 1, sum[0], sum[1]);
        else release();
        if (mine > 1) piece(at + 2 * kDownGroup * kHalfBytes, other_b, xb, true, sum[2], sum[3]);
        if (own == kDownGroup - 1 && lane == 0) {  // the warp with the fewest pieces
          const uint32_t next = w * p.topk + (factor - smem_addr(choice.factor[0])) / 4 + kDownSlots;
          if (next < lds32(run + 8) * p.topk) {
            mbar_wait(bar + 8 * kDownSlots, phase);
            fetch(next);
          }
        }
        xa += step, xb += step, at += 2 * slot_bytes, bar += 16;
        if (bar >= bars + 8 * kDownSlots) bar -= 8 * kDownSlots, at -= kDownSlots * slot_bytes, phase ^= 1;
      }
    }
    if (w) add(w - 1);
    {  // computed anew: no registers for it in the loop
      const uint32_t n1 = window(w).y, all = n1 * pairs, unit = 2 * own;
      float* to = sums + (w & 1) * kDownSums + ((group ^ (w & p.topk)) & 1) * all * 8 + g;
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
        const uint32_t u = unit + i / 2 * 2 * kDownGroup + i % 2;
        const float v = quad_sum(sum[i]);
        if (t == 0 && u < all) to[(u % pairs * n1 + u / pairs) * 8] = v;
      }
    }
    copy_wait<0>();
    __syncwarp();
    if (lane == 0) mbar_arrive(summed + 8 * (w & 1));
  }
  add(lds32(run + 8) - 1);
  STAMP(6)
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
