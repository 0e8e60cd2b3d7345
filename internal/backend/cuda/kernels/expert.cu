// Routed experts for R = 1..8 rows: top-k and gate/up, then down with the weighted sum; the shared expert's second half beside them.
//
//   expert_gate_up  top-k of the logits (soft-max over the k, lowest id on ties), then for each of a row's experts
//                   h = silu(Wg x) * (Wu x), BF16 [R][topk][I].
//   expert_down     out = sum_e p_e We h_e + sigmoid(shared_logit) Ws hs, BF16 [R][H]. Redoes the top-k in its prologue.
//
//   NVFP4 banks are repacked once (expert_repack) in the order the lanes of a tensor instruction read them. A lane (g, t) = (lane / 4, lane
//   % 4) has 16 codes of a row in 64 k: k = 16 t .., eight bytes, bits rearranged as e2m1x16 wants them.
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
// expert_down of one row owns two or three tiles of eight rows over all experts: one bulk copy an expert, of which six are on their way before the
// dependency wait where the kernel before it triggered after its own (R3), the others behind what it reads there. Rows g and g + 8 of its tensor instruction are two
// (tile, pair) units of one expert, told apart by columns 2 t and 2 t + 1. Fixed order of sums, no atomics on floats.
#include "choose.cuh"
#include "common.cuh"
#include "expert.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

// Something that is to be in registers here, not to be made where it is used.
template <typename T>
NINFER_DEVICE void made(const T*& p) {
  asm volatile("" : "+l"(p));
}
NINFER_DEVICE void made(uint32_t& v) { asm volatile("" : "+r"(v)); }

// Share i of n rows cut into m shares that differ by at most one: first row, number.
NINFER_DEVICE uint2 share_of(uint32_t n, uint32_t m, uint32_t i) {
  const uint32_t each = quotient(n, m), more = n - each * m;
  return make_uint2(i * each + min(i, more), each + (i < more));
}

NINFER_DEVICE uint32_t ldg_l2_u32(const void* p) {
  uint32_t v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Key of a logit: larger logit, larger key; 0: no expert; a NaN counts as the smallest number.
NINFER_DEVICE uint32_t key_of(float f, bool have) {
  f += 0.0f;
  const uint32_t b = __float_as_uint(f), k = f == f ? b ^ ((uint32_t)((int)b >> 31) | 0x80000000u) : 1;
  return have ? k : 0;
}

// ---- gate/up ----

static constexpr uint32_t kUpPairs = 20;                  // of a tile: K <= 2,560
static constexpr uint32_t kUpParts = 5;                   // a tile comes in parts of four pairs
static constexpr uint32_t kUpFixed = 640 + sizeof(Choice);  // barriers, choice

static constexpr int kOwn = kUpPairs / kUpWarps;                 // pairs of every tile each has
static constexpr uint32_t kTeam = 4 / kOwn;                      // warps of a part
static constexpr int kUpThreads = 32 * 11;                       // one more warp fetches
static constexpr int kChosen = 4;                                // barrier of the choosers, who only arrive, and of the warp that fetches

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

  if (warp < kChoosers) {
    choose(p.logits, load_keys(p.logits, p.experts), p.experts, p.topk, choice, id, 32 * kChoosers, (uint32_t*)sums);
    named_arrive(kChosen, 32 * kChoosers + 32);
  }
  const uint32_t pair0 = kOwn * warp;
  const bool two = pair0 + 1 < pairs;
  // Activations only now: all blocks read the same logits, and one place in L2 answers one at a time. The four lanes of a row have columns of
  // their own: lane t's activations of the warp's two pairs are in columns 2 t and 2 t + 1.
  uint4 x[4];
  const bool mine = warp < used && (g == 2 * t || (g == 2 * t + 1 && two));
#pragma unroll
  for (int j = 0; j < 4; j++) {
    x[j] = make_uint4(0, 0, 0, 0);
    if (mine) x[j] = ldg_l2(p.x + (pair0 + g % 2) * 128 + t * 16 + j / 2 * 64 + j % 2 * 8);
  }

  if (warp == kUpWarps) {
    STAMP_BEGIN_IN(221, kUpThreads - 32)
    STAMP(3)
    const uint64_t policy = policy_evict_first();
    const uint32_t bytes = min(4u, pairs - 4 * min(lane, parts - 1)) * kPairBytes, into = ring + lane * 4 * kPairBytes;
    uint32_t slot = 0, parity = 1, d = d0, tile = tile0;
#pragma unroll 1
    for (uint32_t n = 0; n < items; n++) {
      if (n && n == p.trigger) pdl_trigger();  // after the wait, so the next kernel may read the logits in its prologue (R3)
      if (lane < parts) {
        const uint32_t at = 8 * (slot * kUpParts + lane);
        mbar_wait(empty + at, parity);
        mbar_expect(full + at, bytes);
      }
      if (n == 0) {  // here, since code behind a jump comes late: what stands before has been fetched when the experts are known
        named_sync(kChosen, 32 * kChoosers + 32);
        if (p.trigger == 0) pdl_trigger();
      }
      if (lane < parts) {
        const uint32_t at = 8 * (slot * kUpParts + lane);
        const uint8_t* src = (const uint8_t*)p.bank + ((uint64_t)id[d] * tiles + tile) * tile_bytes + lane * 4 * kPairBytes;
        bulk_load(into + slot * tile_bytes, src, bytes, full + at, policy);
      }
      __syncwarp();
      if (++tile == tiles) tile = 0, ++d;
      if (++slot == p.slots) slot = 0, parity ^= 1;
    }
    if (!items) named_sync(kChosen, 32 * kChoosers + 32);
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
  const uint2 run = share_of(p.r * of_row, gridDim.x, blockIdx.x);
  const uint32_t item0 = run.x, items = run.y, row0 = min(quotient(item0, of_row), p.r - 1), q0 = item0 - row0 * of_row;
  const bool both = q0 + items > of_row;  // a run reaches into one more row at most
  const uint32_t full = smem_addr(smem), empty = full + 8 * kUpParts * p.slots, shared_bar = full + 640, summed = full + 648, added = full + 664;
  Choice& choice = *(Choice*)(smem + 688);
  float* sums = (float*)(smem + kUpRowsFixed);  // [2][tile][warp][t][16 rows]
  const uint32_t ring = (smem_addr(sums) + 2 * kUpSums + 127) & ~127u;
  // the shared expert's rows, in slots whose first use they are
  const uint2 half = share_of(p.k, gridDim.x, blockIdx.x);
  const uint32_t own0 = half.x, own = half.y, pitch = 2 * p.inner + 64, taken = quotient(own * pitch + tile_bytes - 1, tile_bytes);

  STAMP_BEGIN(220)
  const uint32_t part0 = threadIdx.x % kUpParts;
  if (threadIdx.x < kUpParts * p.slots) {
    mbar_init(full + 8 * threadIdx.x, 1);
    mbar_init(empty + 8 * threadIdx.x, part0 < parts ? min(kTeam, used - kTeam * part0) : 1);
    mbar_fence_init();
  }
  const uint32_t other = threadIdx.x - 32 * (kUpRowsThreads / 32 - 1);  // of the last warp
  if (other < 5) {  // shared_bar, summed, added
    mbar_init(shared_bar + 8 * other, other == 1 || other == 2 ? used : 1);
    mbar_fence_init();
    if (other == 0) mbar_expect(shared_bar, own * 2 * p.inner);
  }
  __syncthreads();
  if (lane == 0)
    for (uint32_t r = warp; r < own; r += kUpRowsThreads / 32)
      bulk_load(ring + r * pitch, p.shared_w + (uint64_t)(own0 + r) * p.inner, 2 * p.inner, shared_bar, policy_evict_first());
  if (threadIdx.x < kUpParts * taken) mbar_arrive(full + 8 * threadIdx.x);
  const float* logits = p.logits + row0 * p.experts;
  const float *key0 = logits + min(threadIdx.x % 256, p.experts - 1), *key1 = logits + min(threadIdx.x % 256 + 256, p.experts - 1);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const uint32_t chunks = p.inner / 32, out_row = quotient(threadIdx.x, max(own, 1u)), out_at = threadIdx.x - out_row * own;
  const bool hides = warp < kUpWarps && g < p.r;
  const bf16* h = p.shared_hidden + (uint64_t)(hides ? g : 0) * p.inner + t * 8;
  const float* logit_at = p.shared_logit + min(out_row, p.r - 1);
  made(key0), made(key1), made(logits), made(h), made(logit_at);
  STAMP(1)
  pdl_wait();
  STAMP(2)
  // Experts are chosen while all that does not depend on them is on its way.
  const float f0 = ldg_l2_f32(key0), f1 = ldg_l2_f32(key1);
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
  auto hidden = [&](uint32_t c) { return hides && c < chunks ? ldg_l2(h + c * 32) : zero; };
  uint4 h0 = hidden(warp), h1 = hidden(warp + kUpWarps);
  const uint32_t logit_bits = ldg_l2_u32(logit_at);
  const bool chooses = threadIdx.x < 256;
  choose(logits, make_uint2(key_of(f0, chooses && threadIdx.x < p.experts), key_of(f1, chooses && threadIdx.x + 256 < p.experts)), p.experts, p.topk, choice, choice.id[0],
         kUpRowsThreads, (uint32_t*)sums);
  STAMP(3)

  if (warp == kUpWarps) {
    STAMP_BEGIN_IN(221, 32 * kUpWarps)
    const uint64_t policy = policy_evict_first();
    const uint32_t bytes = min(4u, pairs - 4 * min(lane, parts - 1)) * kPairBytes, into = ring + lane * 4 * kPairBytes;
    uint32_t slot = taken, parity = 1, d = quotient(q0, tiles), tile = q0 - d * tiles, of = 0;
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
    for (uint32_t i = 0; i < kUpWarps; i++) v += part[(i * p.r + out_row) * 24 + out_at];
    p.shared_out[(uint64_t)out_row * p.k + own0 + out_at] = sigmoid(__uint_as_float(logit_bits)) * v;
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
