// Routed experts' second half with the weighted sum, R = 1..8 rows; for a single row the shared expert's as well. Bank, products and the first half: expert.cu.
#include <cstddef>
#include "choose.cuh"
#include "common.cuh"
#include "expert.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

// A warp's arrival at a barrier behind what its lanes, now together, did in shared memory. racecheck takes a barrier to order only those threads that
// arrive at it, so that it wants code compiled with -DNINFER_CHECKED.
#ifdef NINFER_CHECKED
static constexpr uint32_t kWarp = 32;
#else
static constexpr uint32_t kWarp = 1;
#endif
NINFER_DEVICE void warp_arrives(uint32_t bar) {
  if (kWarp > 1 || threadIdx.x % 32 == 0) mbar_arrive(bar);
}

// Keeps a value in a register, instead of what it is computed from.
NINFER_DEVICE void hold(uint32_t& v) { asm volatile("" : "+r"(v)); }

static constexpr uint32_t kDownTiles = 3;  // of eight rows a block at most
static constexpr uint32_t kDownFixed = 144 + sizeof(Choice) + 16 * kDownTiles * 8 * 4 + 96;

static constexpr int kDownWarps = 16;
static constexpr int kDownThreads = 32 * kDownWarps;

// So many of a single row's experts are asked for before the wait, the others behind it: their weights would have come instead of gate/up's last
// tiles, and come while the first are multiplied.
static constexpr uint32_t kDownEarly = 6;
static_assert(kDownEarly <= kChoosers);

// A row's hidden values, all of its experts', become operands in shared memory: all times eight of them, of which a thread has every 512th. It asks for
// two at once, both before anything waits for the first.
struct Hidden {
  const bf16* from;  // of this thread
  uint32_t all;
  uint4 a, b;
  NINFER_DEVICE Hidden(const bf16* hidden, uint32_t all) : from(hidden + threadIdx.x * 8), all(all) { asm volatile("" : "+l"(from)); }
  NINFER_DEVICE void ask(uint32_t i) {
    a = b = make_uint4(0, 0, 0, 0);
    if (i < all) a = ldg_l2(from);
    if (i + kDownThreads < all) b = ldg_l2(from + kDownThreads * 8);
  }
  NINFER_DEVICE void put(uint32_t hs) {  // behind ask(threadIdx.x)
    uint32_t i = threadIdx.x;
#pragma unroll 1
    while (true) {
      if (i < all) sts128(hs + i * 16, operand(a));
      if (i + kDownThreads < all) sts128(hs + (i + kDownThreads) * 16, operand(b));
      i += 2 * kDownThreads, from += 2 * kDownThreads * 8;
      if (i >= all) break;
      ask(i);
    }
  }
};

// The sum of an output's parts, stride apart, by eight lanes.
NINFER_DEVICE float add_parts(const float* from, uint32_t stride, uint32_t parts) {
  const uint32_t k = threadIdx.x % 8;
  float v = k < parts ? from[k * stride] : 0.0f;
  if (k + 8 < parts) v += from[(k + 8) * stride];
#pragma unroll 1
  for (uint32_t i = k + 16; i < parts; i += 8) v += from[i * stride];
  v = quad_sum(v);
  return v + __shfl_xor_sync(~0u, v, 4);
}

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
  // Eight warps choose, the other eight make the shared expert's second half, whose hidden vector is as old as the logits (R3): it is asked for with
  // them, before all else.
  constexpr uint32_t kOthers = kDownWarps - kChoosers;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const bool chooses = warp < kChoosers;
  const uint32_t other = warp - kChoosers, chunks = p.inner / 32;
  auto shared_x = [&](uint32_t c) {
    uint4 v = zero;
    if (!chooses && g == 0 && c < chunks) v = ldg_l2(p.shared_hidden + c * 32 + t * 8);
    return v;
  };
  if (threadIdx.x - 32 * (kDownWarps - 1) <= kMaxTop) {  // ahead of loads, for which the fence would wait
    mbar_init(bars + 8 * (threadIdx.x % 32), 1);
    mbar_fence_init();
  }
  if (!p.early) pdl_wait();
  float l0 = 0, l1 = 0, logit = 0;
  if (chooses) l0 = ldg_l2_f32(p.logits + min(threadIdx.x, p.experts - 1)), l1 = ldg_l2_f32(p.logits + min(threadIdx.x + 256, p.experts - 1));
  uint4 h0 = shared_x(other), h1 = shared_x(other + kUpWarps);
  if (!chooses && threadIdx.x - 32 * kChoosers < kDownTiles * 8) logit = ldg_l2_f32(p.shared_logit);
  __syncthreads();
  const uint64_t policy = policy_evict_first();
  if (threadIdx.x == 0) mbar_expect(shared_bar, nt * 8 * 2 * p.inner);
  if (lane == 0)
    for (uint32_t r = warp; r < nt * 8; r += kDownWarps)
      bulk_load(shared_at + r * pitch, p.shared_w + (uint64_t)(tile0 * 8 + r) * p.inner, 2 * p.inner, shared_bar, policy);
  STAMP(1)
  auto fetch = [&](uint32_t e) {
    mbar_expect(bars + 8 * e, nt * tile_bytes);
    bulk_load(routed_at + e * nt * tile_bytes, (const uint8_t*)p.bank + ((uint64_t)choice.id[0][e] * tiles + tile0) * tile_bytes, nt * tile_bytes, bars + 8 * e,
              policy);
  };
  if (chooses) {
    auto key_of = [&](float f, uint32_t at) {  // as load_keys has it
      f += 0.0f;
      const uint32_t b = __float_as_uint(f), k = f == f ? b ^ ((uint32_t)((int)b >> 31) | 0x80000000u) : 1;
      return at < p.experts ? k : 0;
    };
    choose(p.logits, make_uint2(key_of(l0, threadIdx.x), key_of(l1, threadIdx.x + 256)), p.experts, p.topk, choice, choice.id[0], 32 * kChoosers,
           (uint32_t*)(smem + kDownFixed));
    if (lane == 0 && warp < min(p.topk, kDownEarly)) fetch(warp);
    if (warp == kChoosers - 1) {
      const float weight = weight_of(choice.key, p.topk);
      if (lane < p.topk) factor[lane] = weight * (E2M1_UNDO / __ldg(p.divisor + choice.id[0][lane]));
    }
  } else {  // the sums of expert_gate_up_rows: BF16, column 0, rows g of the first and third tile, rows g + 8 of the second
    mbar_wait(shared_bar, 0);
#pragma unroll 1
    for (uint32_t w = other; w < kUpWarps; w += kOthers) {
      float acc[2][4] = {};
#pragma unroll 1
      for (uint32_t c = w; c < chunks; c += kUpWarps) {
        const uint32_t at = shared_at + g * pitch + c * 64 + t * 16;
        const uint4 u = lds128(at), v = nt > 1 ? lds128(at + 8 * pitch) : zero;
        mma_bf16(acc[0], u.x, v.x, u.y, v.y, h0.x, h0.y);
        mma_bf16(acc[0], u.z, v.z, u.w, v.w, h0.z, h0.w);
        if (nt > 2) {
          const uint4 w = lds128(at + 16 * pitch);
          mma_bf16(acc[1], w.x, 0, w.y, 0, h0.x, h0.y);
          mma_bf16(acc[1], w.z, 0, w.w, 0, h0.z, h0.w);
        }
        h0 = h1, h1 = shared_x(c + 2 * kUpWarps);
      }
      h0 = shared_x(w + kOthers), h1 = shared_x(w + kOthers + kUpWarps);
      if (t == 0) {
        float* to = sums + w * 24 + g;
        to[0] = acc[0][0], to[8] = acc[0][2], to[16] = acc[1][0];
      }
    }
    named_sync(1, 32 * kOthers);
    const uint32_t r = threadIdx.x - 32 * kChoosers;
    if (r < nt * 8) {
      float v = 0;
#pragma unroll
      for (uint32_t i = 0; i < kUpWarps; i++) v += sums[i * 24 + r];
      shared[r] = sigmoid(logit) * v;
    }
  }
  STAMP(3)
  // An expert's units are the pairs of its tiles, in order; the second half of them goes to rows g + 8. A warp has the same two units of
  // every other expert, so that a unit's sum is the same whatever tiles are beside it, and all but the experts' own addresses stays the same.
  const uint32_t units = nt * pairs, both = ceil_div(units, 2);
  const bool mine = warp < 2 * both;
  const uint32_t odd = warp >= both, a = warp - odd * both, b = a + both;
  const bool second = b < units, live = g == 2 * t || (g == 2 * t + 1 && second);
  const uint32_t ta = a / pairs, tb = b / pairs;
  uint32_t from = routed_at + (odd * units + a) * kHalfBytes + lane * 16;
  uint32_t xp = hs + (odd * p.inner + t * 16) * 2 + (g == 2 * t ? a - ta * pairs : b - tb * pairs) * 256;
  uint32_t beside = second ? both * kHalfBytes : 0;
  const uint32_t from_step = 2 * units * kHalfBytes;
  hold(from), hold(xp), hold(beside);
  Hidden hidden(p.hidden, p.topk * p.inner / 8);
  if (p.early) pdl_wait();
  STAMP(4)
  hidden.ask(threadIdx.x);
  if (chooses && lane == 0)
    for (uint32_t e = warp < kDownEarly ? warp + kChoosers : warp; e < p.topk; e += kChoosers) fetch(e);
  hidden.put(hs);
  __syncthreads();
  pdl_trigger();
  if (p.distinct && blockIdx.x == 0 && threadIdx.x == 0) *p.distinct = p.topk;
  STAMP(5)
  STAMP(6)
  if (mine) {
    float suma = 0, sumb = 0;
    uint4 x0 = zero, x1 = zero, x2 = zero, x3 = zero;  // stay zero in idle lanes
#pragma unroll 1
    for (uint32_t d = odd; d < p.topk; d += 2) {
      mbar_wait(bars + 8 * d, 0);
      const uint4 u = lds128(from), v = lds128(from + beside);
      const float2 fa = e4m3x2_f32(lds16(from + 512 - 14 * lane)), fb = e4m3x2_f32(lds16(from + beside + 512 - 14 * lane));
      const float f = factor[d];
      if (live) x0 = lds128(xp), x1 = lds128(xp + 16), x2 = lds128(xp + 128), x3 = lds128(xp + 144);
      float acc[4], va, vb;
      multiply_plain(acc, make_uint2(u.x, u.y), make_uint2(v.x, v.y), x0, x1);
      va = fa.x * acc[0], vb = fb.x * acc[3];
      multiply_plain(acc, make_uint2(u.z, u.w), make_uint2(v.z, v.w), x2, x3);
      va = fmaf(fa.y, acc[0], va), vb = fmaf(fb.y, acc[3], vb);  // zero where there is no second unit, whose activations are
      suma = fmaf(f, va, suma), sumb = fmaf(f, vb, sumb);
      from += from_step, xp += 4 * p.inner;
    }
    suma = quad_sum(suma), sumb = quad_sum(sumb);
    float* to = sums + odd * units * 8 + g;
    if (t == 0) to[((a - ta * pairs) * nt + ta) * 8] = suma;
    if (t == 0 && second) to[((b - tb * pairs) * nt + tb) * 8] = sumb;
  }
  STAMP(7)
  const uint32_t row = threadIdx.x / 8;  // eight lanes an output
  bf16* to = p.out + tile0 * 8 + row;
  float more = 0;
  if (row < nt * 8) more = shared[row];
  asm volatile("" : "+l"(to), "+f"(more));  // before the barrier
  __syncthreads();
  STAMP(8)
  if (row < nt * 8) {
    const float v = add_parts(sums + row, nt * 8, 2 * pairs);
    if (lane % 8 == 0) *to = __float2bfloat16_rn(v + more);
  }
  STAMP(9)
}

// Several rows: each row has blocks of its own, each of them a run of the row's tiles, worked on in windows of at most p.window tiles. A window's
// weights of an expert have a slot. Each of fifteen warps has the same 128 k of two of the window's tiles in every expert, or of the one that is
// left, and the last warp asks for weights as slots become free. A window's sums are added up when the next one's have been made, so that nothing
// stops the block as a whole. The sums are those of expert_down.
//
// A scheduler has four warps, and of a window of five tiles some have three shares of two tiles and one of one, others two and two. So shares go round
// from window to window, but for the three warps beside the one that asks for weights, which have two tiles in all windows, and the first outputs to
// add up.
static constexpr uint32_t kDownWorkers = kDownWarps - 1;
static constexpr uint32_t kDownSums = 4 * kDownWarps * 8;  // of a window: two units a warp, of even and odd experts
static constexpr uint32_t kDownSlots = 6;
static constexpr uint32_t kDownMost = 64;                  // tiles of a block
static constexpr uint32_t kDownWindows = 32;               // windows of a block
static constexpr uint32_t kDownZero = 256;                 // bytes of zeros, in hidden values' banks
static constexpr uint32_t kDownIdle = kDownZero + 128;     // with the experts that rows have seen
static_assert(8 * 512 <= 2 * kDownSums * 4);  // eight rows' scratch
static constexpr uint32_t kDownRowsFixed = 160 + sizeof(Choice) + 2 * kDownSums * 4 + kDownMost * 8 * 4 + kDownIdle;
static_assert(sizeof(Choice::list) == 16 * kDownWindows);

NINFER_KERNEL(expert_down_rows, ExpertDownParams, kDownThreads, 2) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.inner / 128, tile_bytes = pairs * kHalfBytes, tiles = p.h / 8;
  uint32_t bars = smem_addr(smem);
  hold(bars);  // what it is made of comes late
  const uint32_t empty = bars + 8 * kDownSlots, summed = empty + 8 * kDownSlots, run = bars + 128;
  Choice& choice = *(Choice*)(smem + 160);
  float* sums = (float*)(&choice + 1);  // [2][every other expert's][pair][tile][8]
  const uint32_t sums_at = bars + 160 + sizeof(Choice), shared_at = sums_at + 8 * kDownSums;  // shared expert's results: [tile][8]
  const uint32_t hs = bars + kDownRowsFixed, zeros = hs - kDownIdle;
  const uint32_t routed_at = (hs + p.topk * p.inner * 2 + 127) & ~127u, slot_room = p.window * tile_bytes;
  // of each window, once experts are chosen: its first result there, number of tiles, bytes into an expert, first output
  const uint32_t windows_at = bars + 160 + offsetof(Choice, list);

  STAMP_BEGIN(240)
  if (threadIdx.x < kDownSlots) {
    mbar_init(bars + 8 * threadIdx.x, 1);
    mbar_init(empty + 8 * threadIdx.x, kDownWorkers * kWarp);
    if (threadIdx.x < 2) mbar_init(summed + 8 * threadIdx.x, kDownWorkers * kWarp);
    mbar_fence_init();
  }
  if (threadIdx.x == 0) {  // the block's first tile, number of tiles and of windows, row: in shared memory, since registers are few
    const uint32_t of_row = gridDim.x / p.r, row = blockIdx.x % p.r, block = blockIdx.x / p.r;
    const uint32_t tile0 = share_start(tiles, of_row, block), n = share_start(tiles, of_row, block + 1) - tile0;
    const uint32_t windows = ceil_div(n, p.window), each = n / windows;
    sts128(run, make_uint4(tile0, n, windows, row));
    const uint32_t first = quotient(3, pairs);
    sts64(run + 16, make_uint2(each, n - each * windows));
    sts64(run + 24, make_uint2(2 * first, 3 - first * pairs));  // tile and pair of the first share that goes round
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
    const uint2 each = lds64(run + 16);
    return make_uint2(lds32(run) + w * each.x + min(w, each.y), each.x + (w < each.y));
  };
  // the q-th slot's worth of weights, window after window, expert after expert
  auto fetch = [&](uint32_t q) {
    const uint32_t w = q / p.topk, d = q - w * p.topk, slot = q % kDownSlots;
    if (w >= lds32(run + 8)) return;
    const uint2 at = window(w);
    const uint32_t bytes = at.y * tile_bytes;
    mbar_expect(bars + 8 * slot, bytes);
    bulk_load(routed_at + slot * slot_room, (const uint8_t*)p.bank + ((uint64_t)choice.id[0][d] * tiles + at.x) * tile_bytes, bytes, bars + 8 * slot,
              policy_evict_first());
  };
  if (lane == 0 && warp < min(p.early, kDownSlots)) fetch(warp);
  if (warp == kDownWarps - 1) {
    const float weight = weight_of(choice.key, p.topk);
    if (lane < p.topk) choice.factor[0][kMaxTop - p.topk + lane] = weight * (E2M1_UNDO / __ldg(p.divisor + choice.id[0][lane]));  // where they end is known
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
  const bool live = g == 2 * t;
  const bool turns = warp % 4 < 3;
  const uint32_t mine = turns ? 3 + warp - warp / 4 : warp / 4;
  uint32_t ta = quotient(mine, pairs), pair = mine - ta * pairs;
  ta *= 2;
  uint32_t x_first = live ? hs + (pair * 128 + t * 16) * 2 : zeros + 32 * ((g / 2 + 2) & 3), x_step = live ? 2 * p.inner : 0, slot_bytes = slot_room;
  hold(slot_bytes);
  uint32_t bar = bars, phase = 0, at = routed_at + (ta * pairs + pair) * kHalfBytes + 16 * lane;
  hold(x_step), hold(x_first), hold(at), hold(ta), hold(pair);
  Hidden hidden(p.hidden + (uint64_t)row() * p.topk * p.inner, p.topk * p.inner / 8);
  if (threadIdx.x < lds32(run + 8)) {
    const uint2 at = window(threadIdx.x);
    sts128(windows_at + 16 * threadIdx.x, make_uint4((at.x - lds32(run)) * 8, at.y, at.x * tile_bytes, row() * p.h + at.x * 8));
  }
  STAMP(3)
  if (p.early) pdl_wait();
  STAMP(4)
  hidden.ask(threadIdx.x);
  // Weights that were asked for earlier would have come instead of the last tiles of gate/up, which everything waits for.
  if (lane == 0 && warp >= p.early && warp < kDownSlots) {
    uint32_t q = warp;
    hold(q);  // or its quotient is made by everybody
    fetch(q);
  }
  if (threadIdx.x < 2 * lds32(run + 4))  // while those are on their way
    copy16(shared_at + threadIdx.x * 16, p.shared_out + row() * p.h + lds32(run) * 8 + threadIdx.x * 4, policy_evict_first());
  copy_commit();
  hidden.put(hs);
  copy_wait<0>();
  __syncthreads();
  pdl_trigger();
  if (p.distinct && blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) *p.distinct = choice.distinct;
  STAMP(5)
  auto add = [&](uint32_t w) {
    uint32_t self = threadIdx.x / 32;
    hold(self);  // or its place is kept in a register
    const uint4 at = lds128(windows_at + 16 * w);
    const uint32_t nt = at.y, stride = nt * 32, parts = 2 * pairs, k = threadIdx.x % 8;  // eight lanes an output
    const uint32_t r = (self % 4 < 3 ? 3 + self - self / 4 : self / 4) * 4 + threadIdx.x % 32 / 8;
    bf16* to = p.out + at.w + r;
    uint32_t from = sums_at + ((w & 1) * kDownSums + r) * 4 + k * stride;
    asm volatile("" : "+l"(to), "+r"(from));  // before the wait
    mbar_wait(summed + 8 * (w & 1), w >> 1 & 1);
    if (r < nt * 8) {
      const float more = __uint_as_float(lds32(shared_at + (at.x + r) * 4));
      float v = k < parts ? __uint_as_float(lds32(from)) : 0.0f;
      if (k + 8 < parts) v += __uint_as_float(lds32(from + 8 * stride));
#pragma unroll 1
      for (uint32_t i = k + 16; i < parts; i += 8) v += __uint_as_float(lds32(from + (i - k) * stride));
      v = quad_sum(v);
      v += __shfl_xor_sync(~0u, v, 4);
      if (k == 0) *to = __float2bfloat16_rn(v + more);
    }
  };
  if (warp == kDownWorkers) {
    if (lane == 0) {
      const uint32_t nw = lds32(run + 8);
      uint32_t slot = 0, phase = 0, d = kDownSlots, w = 0;
      while (d >= p.topk) d -= p.topk, w++;
      const uint64_t policy = policy_evict_first();
#pragma unroll 1
      for (; w < nw; w++) {
        const uint4 at = lds128(windows_at + 16 * w);
        const uint32_t bytes = at.y * tile_bytes;
        const uint8_t* from = (const uint8_t*)p.bank + at.z;
#pragma unroll 1
        for (; d < p.topk; d++) {
          mbar_wait(empty + 8 * slot, phase);
          mbar_expect(bars + 8 * slot, bytes);
          bulk_load(routed_at + slot * slot_room, from + (uint64_t)choice.id[0][d] * tiles * tile_bytes, bytes, bars + 8 * slot, policy);
          if (++slot == kDownSlots) slot = 0, phase ^= 1;
        }
        d = 0;
      }
    }
    return;
  }
  uint32_t w = 0;
#pragma unroll 1
  while (true) {
    const uint32_t nt = lds32(windows_at + 16 * w + 4);
    float sa = 0, sb = 0, oa = 0, ob = 0;  // of this one's and of the other experts
    const uint32_t end = bars + 160 + offsetof(Choice, factor) + 4 * kMaxTop;
    uint32_t factor = end - 4 * p.topk;
    auto next = [&]() {
      at += slot_bytes, bar += 8, factor += 4;
      if (bar == bars + 8 * kDownSlots) bar = bars, at -= kDownSlots * slot_bytes, phase ^= 1;
    };
    auto release = [&]() {
      __syncwarp();
      warp_arrives(bar + 8 * kDownSlots);
    };
    if (ta + 1 < nt) {
      uint32_t xp = x_first;
      hold(xp), hold(factor);
#pragma unroll 1
      do {
        mbar_wait(bar, phase);
        const uint32_t back = at + 512 - 14 * lane;
        const uint4 u = lds128(at), v = lds128(at + tile_bytes);
        const uint32_t su = lds16(back), sv = lds16(back + tile_bytes);
        const uint4 x0 = lds128(xp), x1 = lds128(xp + 16);
        release();
        float acc[4], va, vb;
        multiply_plain(acc, make_uint2(u.x, u.y), make_uint2(v.x, v.y), x0, x1);
        const uint4 x2 = lds128(xp + 128), x3 = lds128(xp + 144);
        const float2 fa = e4m3x2_f32(su), fb = e4m3x2_f32(sv);
        va = fa.x * acc[0], vb = fb.x * acc[2];
        multiply_plain(acc, make_uint2(u.z, u.w), make_uint2(v.z, v.w), x2, x3);
        va = fmaf(fa.y, acc[0], va), vb = fmaf(fb.y, acc[2], vb);
        const float f = __uint_as_float(lds32(factor));
        const float na = fmaf(f, va, sa), nb = fmaf(f, vb, sb);
        sa = oa, sb = ob, oa = na, ob = nb;
        xp += x_step;
        next();
      } while (factor < end);
    } else if (ta < nt) {  // one tile is left: its two times 64 k are the rows g and g + 8
      const bool live2 = g / 2 == t;
      uint32_t xp = live2 ? hs + (pair * 128 + g % 2 * 64 + t * 16) * 2 : x_first, step = live2 ? 2 * p.inner : 0;
      hold(xp), hold(step), hold(factor);
#pragma unroll 1
      do {
        mbar_wait(bar, phase);
        const uint4 u = lds128(at);
        const uint32_t su = lds16(at + 512 - 14 * lane);
        const uint4 x0 = lds128(xp), x1 = lds128(xp + 16);
        release();
        float acc[4];
        multiply_plain(acc, make_uint2(u.x, u.y), make_uint2(u.z, u.w), x0, x1);
        const float2 fa = e4m3x2_f32(su);
        const float na = fmaf(__uint_as_float(lds32(factor)), fmaf(fa.y, acc[3], fa.x * acc[0]), sa);
        sa = oa, oa = na;
        xp += step;
        next();
      } while (factor < end);
    } else {
#pragma unroll 1
      do {
        mbar_wait(bar, phase);
        release();
        next();
      } while (factor < end);
    }
    const uint32_t windows = lds32(run + 8);
    if (w) add(w - 1);
    if (ta < nt) {
      const bool odd = p.topk & 1;
      const float ea = quad_sum(odd ? oa : sa), eb = quad_sum(odd ? ob : sb), da = quad_sum(odd ? sa : oa), db = quad_sum(odd ? sb : ob);
      const uint32_t to = sums_at + ((w & 1) * kDownSums + (pair * nt + ta) * 8 + g) * 4, too = to + pairs * nt * 32;
      const bool first = t == 0, second = first && ta + 1 < nt;
      sts32_if(first, to, ea), sts32_if(first, too, da);
      sts32_if(second, to + 32, eb), sts32_if(second, too + 32, db);
    }
    __syncwarp();
    warp_arrives(summed + 8 * (w & 1));
    if (++w == windows) break;
    if (turns) {  // to the next share
      const uint32_t old = ta * pairs + pair, last = pair;
      const bool wrap = ta / 2 * pairs + pair == kDownWorkers - 1;
      if (++pair == pairs) pair = 0, ta += 2;
      if (wrap) {
        const uint2 share = lds64(run + 24);
        ta = share.x, pair = share.y;
      }
      at += (ta * pairs + pair - old) * kHalfBytes;
      if (live) x_first += (pair - last) * 256;
    }
    hold(x_first), hold(at), hold(ta), hold(pair);
  }
  add(w - 1);
  STAMP(6)
}
