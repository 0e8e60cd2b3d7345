// Mixture of experts for R = 1..8 rows: router with the shared expert's first half, routed gate/up, routed down with the shared
// second half and the weighted sum.
//
//   router_shared   logits = Wr x (FP32);  hs = silu(Wg x) * (Wu x);  shared_logit = ws x.
//   expert_gate_up  top-k of the logits (soft-max over the k, lowest id on ties), then for each distinct expert and its rows
//                   h = silu(Wg x) * (Wu x), BF16 [R][topk][I].
//   expert_down     out = sum_e p_e We h_e + sigmoid(shared_logit) Ws hs, BF16 [R][H]. Redoes the top-k in its prologue.
//
//   NVFP4 banks are repacked once (expert_repack) to tiles of 16 rows in the order the lanes read them: per 128 k 1,024 bytes of codes
//   (two runs of 64 k; lane (g, t): eight bytes of row g, eight of row g + 8, k = 16 t .., bits rearranged as e2m1x16_bf16 wants
//   them), then 128 bytes of scales (lane: first run row g, row g + 8, second run likewise). A gate/up tile holds 8 gate rows and the
//   8 matching up rows, so the product is in one lane. E <= 512, topk <= 16, H % 128 = 0, I % 128 = 0.
//
// Plan of a block: router_shared holds its whole slice (pairs of rows) in shared memory, loaded before the wait. In gate_up a
// team of four warps, one on each scheduler, shares a (distinct expert, tile) item, each a quarter of k; in down a block owns tiles of 16 output rows over all experts, its warps take
// (expert, 128 k) units in turn. Both stream through FIFOs of asynchronous copies private to a lane. Where the kernel before it triggered after
// its own wait (R3), down finds the experts and asks for its weights before the wait. Fixed order of sums, no atomics on floats.
//
// Measured on one H200, R = 1, in-chain, 16 / 8-bit: router_shared 3.8 / 3.2 us, the triple of a layer 21.3 / 21.5 us: 0.41 / 0.36 of the same
// run's read stream. Unpacking FP4 on the integer pipe and routing before the first byte bound it; see docs/kernels.md.
#include "common.cuh"
#include "params.h"
#include <cstddef>

extern __shared__ __align__(128) uint8_t smem[];

static constexpr int kWarps = 8;
static constexpr int kThreads = 32 * kWarps;
static constexpr int kMaxExperts = 512;
static constexpr int kMaxTop = 16;
static constexpr int kMaxRows = 8;

// ---- router and shared expert ----

// Unit u is a pair of rows: router rows 2u and 2u+1, or gate row j and up row j, or the shared gate vector alone.
template <bool FP8>
NINFER_DEVICE void router_units(const RouterParams& p, uint32_t unit0, uint32_t n) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t row_bytes = FP8 ? p.k : 2 * p.k, pitch = row_bytes + 64, x_pitch = 2 * p.k + 32;
  const uint32_t routing = ceil_div(p.experts, 2), all = routing + p.inner;
  uint32_t base = smem_addr(smem), bar = base;
  float* sums = (float*)(smem + 16);
  uint32_t xs = base + 16 + kWarps * p.r * 16 * 4, weights = (xs + p.r * x_pitch + 127) & ~127u;

  // row i (0..15) of the tile: unit unit0 + i % 8, first or second of the pair
  auto row_of = [&](uint32_t i, const void*& w, const void*& scale, uint32_t& row) -> bool {
    uint32_t u = unit0 + i % 8, second = i / 8;
    if (i % 8 >= n) return false;
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

  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    mbar_fence_init();
  }
  __syncthreads();
  if (warp == 0) {
    const void *w, *scale;
    uint32_t row = 0;
    bool have = lane < 16 && row_of(lane, w, scale, row);
    uint32_t count = __popc(__ballot_sync(~0u, have));
    if (lane == 0) mbar_expect(bar, count * row_bytes);
    __syncwarp();
    if (have) bulk_load(weights + lane * pitch, (const uint8_t*)w + (uint64_t)row * row_bytes, row_bytes, bar, policy_evict_first());
  }
  if (p.trigger == 0) pdl_trigger();
  const uint32_t col = threadIdx.x / 8, unit = threadIdx.x % 8;
  float f0 = 1.0f, f1 = 1.0f;
  if (FP8 && col < p.r) {
    const void *w, *scale;
    uint32_t row;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (row_of(unit + 8 * i, w, scale, row) && scale) {
        float f = p.scale_f32 ? __ldg((const float*)scale + row) : __uint_as_float((uint32_t)__ldg((const uint16_t*)scale + row) << 16);
        if (i) f1 = f; else f0 = f;
      }
  }

  pdl_wait();

  const uint32_t units = p.k / 8;
  for (uint32_t i = threadIdx.x; i < units * p.r; i += 2 * kThreads) {
    uint4 v[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint32_t c = i + j * kThreads;
      if (c < units * p.r) v[j] = ldg_l2(p.x + (uint64_t)(c / units) * p.x_ld + c % units * 8);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint32_t c = i + j * kThreads;
      if (c < units * p.r) sts128(xs + c / units * x_pitch + c % units * 16, FP8 ? order_pairs_by2(v[j]) : v[j]);
    }
  }
  if (p.trigger) pdl_trigger();
  __syncthreads();
  mbar_wait(bar, 0);

  float acc[4][4] = {};
  const bool live = g < p.r;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const uint32_t chunks = row_bytes / 64;
#pragma unroll 2
  for (uint32_t c = warp; c < chunks; c += kWarps) {
    uint32_t a = weights + (g < (int)n ? g : 0) * pitch + t * 16 + c * 64, b = xs + g * x_pitch + c * (FP8 ? 128 : 64) + t * (FP8 ? 32 : 16);
    uint4 u = lds128(a), v = lds128(a + 8 * pitch), x0 = live ? lds128(b) : zero;
    if constexpr (!FP8) {
      mma_bf16(acc[0], u.x, v.x, u.y, v.y, x0.x, x0.y);
      mma_bf16(acc[1], u.z, v.z, u.w, v.w, x0.z, x0.w);
    } else {
      uint4 x1 = live ? lds128(b + 16) : zero;
      uint32_t ue, uo, ve, vo;
      e4m3x4_bf16(u.x, ue, uo), e4m3x4_bf16(v.x, ve, vo);
      mma_bf16(acc[0], ue, ve, uo, vo, x0.x, x0.y);
      e4m3x4_bf16(u.y, ue, uo), e4m3x4_bf16(v.y, ve, vo);
      mma_bf16(acc[1], ue, ve, uo, vo, x0.z, x0.w);
      e4m3x4_bf16(u.z, ue, uo), e4m3x4_bf16(v.z, ve, vo);
      mma_bf16(acc[2], ue, ve, uo, vo, x1.x, x1.y);
      e4m3x4_bf16(u.w, ue, uo), e4m3x4_bf16(v.w, ve, vo);
      mma_bf16(acc[3], ue, ve, uo, vo, x1.z, x1.w);
    }
  }
  float* mine = sums + warp * p.r * 16;
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (2 * t + i < (int)p.r) {
      mine[(2 * t + i) * 16 + g] = (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
      mine[(2 * t + i) * 16 + g + 8] = (acc[0][i + 2] + acc[1][i + 2]) + (acc[2][i + 2] + acc[3][i + 2]);
    }
  __syncthreads();
  if (col < p.r && unit < n) {
    float a = 0, b = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) a += sums[(w * p.r + col) * 16 + unit], b += sums[(w * p.r + col) * 16 + unit + 8];
    if (FP8) a *= f0 * E4M3_UNDO, b *= f1 * E4M3_UNDO;
    const uint32_t u = unit0 + unit;
    if (u < routing) {
      p.logits[col * p.experts + 2 * u] = a;
      if (2 * u + 1 < p.experts) p.logits[col * p.experts + 2 * u + 1] = b;
    } else if (u < all) {
      p.hidden[col * p.inner + u - routing] = __float2bfloat16_rn(silu(a) * b);
    } else {
      p.shared_logit[col] = a;
    }
  }
}

NINFER_KERNEL(router_shared_bf16, RouterParams, kThreads, 2) {
  const uint32_t units = ceil_div(p.experts, 2) + p.inner + 1, first = share_start(units, gridDim.x, blockIdx.x);
  router_units<false>(p, first, share_start(units, gridDim.x, blockIdx.x + 1) - first);
}

// The last block does the shared gate vector, which stays BF16.
NINFER_KERNEL(router_shared_e4m3, RouterParams, kThreads, 2) {
  const uint32_t units = ceil_div(p.experts, 2) + p.inner;
  if (blockIdx.x == gridDim.x - 1) {
    router_units<false>(p, units, 1);
  } else {
    const uint32_t first = share_start(units, gridDim.x - 1, blockIdx.x);
    router_units<true>(p, first, share_start(units, gridDim.x - 1, blockIdx.x + 1) - first);
  }
}

// ---- routing ----

struct Routing {
  uint32_t distinct;
  uint16_t id[kMaxRows * kMaxTop];        // distinct experts
  float factor[kMaxRows * kMaxTop];       // of each distinct expert: what its products are multiplied by
  float weight[kMaxRows][kMaxTop];        // soft-max weights by rank
  uint16_t top[kMaxRows][kMaxTop];
  uint16_t count[kWarps];
  alignas(16) uint32_t scratch[kMaxRows][96];
  alignas(8) int8_t rank[kMaxExperts][kMaxRows];  // rank of the expert in that row, or -1; not there for R = 1, like the other rows' scratch
};
NINFER_DEVICE uint32_t routing_bytes(uint32_t r) { return r == 1 ? offsetof(Routing, scratch) + sizeof(Routing::scratch[0]) : sizeof(Routing); }

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
NINFER_DEVICE void top_of_row(const float* logits, uint32_t experts, uint32_t topk, uint16_t* id, float* weight, uint32_t* scratch) {
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

// All threads of the block (256). R = 1: distinct experts in rank order, found by warp 0; else in order of id. Ends with a block barrier.
NINFER_DEVICE void route(Routing& s, const float* logits, uint32_t r, uint32_t experts, uint32_t topk) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (r == 1) {
    if (warp == 0) {
      top_of_row(logits, experts, topk, s.id, s.weight[0], s.scratch[0]);
      if (lane == 0) s.distinct = topk;
    }
    __syncthreads();
    return;
  }
  for (uint32_t e = threadIdx.x; e < kMaxExperts; e += blockDim.x) *(uint64_t*)s.rank[e] = ~0ull;
  if (warp < r) top_of_row(logits + warp * experts, experts, topk, s.top[warp], s.weight[warp], s.scratch[warp]);
  __syncthreads();
  if (warp < r && lane < topk) s.rank[s.top[warp][lane] % kMaxExperts][warp] = (int8_t)lane;
  __syncthreads();
  // thread i looks at experts 2i and 2i+1
  const uint32_t e = 2 * threadIdx.x;
  const bool u = warp < kWarps && *(uint64_t*)s.rank[e] != ~0ull, v = warp < kWarps && *(uint64_t*)s.rank[e + 1] != ~0ull;
  const uint32_t mu = __ballot_sync(~0u, u), mv = __ballot_sync(~0u, v), below = (1u << lane) - 1;
  if (lane == 0 && warp < kWarps) s.count[warp] = __popc(mu) + __popc(mv);
  __syncthreads();
  uint32_t at = __popc(mu & below) + __popc(mv & below);
  for (uint32_t w = 0; w < min(warp, (uint32_t)kWarps); w++) at += s.count[w];
  if (u) s.id[at++] = e;
  if (v) s.id[at++] = e + 1;
  if (threadIdx.x == 32 * kWarps - 1) s.distinct = at;
  __syncthreads();
}

NINFER_DEVICE int rank_of(const Routing& s, uint32_t r, uint32_t d, uint32_t row) {
  return r == 1 ? (int)d : s.rank[s.id[d]][row];
}

// A packed tile is a run of pairs of chunks, 128 k each: 512 bytes of codes of the first chunk, 512 of the second, then four scales a
// lane (first chunk: row g, row g + 8; second chunk likewise). Every lane copies just what it will read itself, so a warp streams
// tiles through a private FIFO without barriers.
static constexpr uint32_t kPairBytes = 1152;

// A lane's position in a FIFO slot or a packed pair: its codes at 16 lane, its scales 12 lane before that, plus 1,024.
NINFER_DEVICE void copy_pair(uint32_t slot, const uint8_t* src, uint32_t lane, uint64_t policy) {
  copy16(slot, src, policy);
  copy16(slot + 512, src + 512, policy);
  copy4(slot + 1024 - 12 * lane, src + 1024 - 12 * lane);
}

// acc[0] + acc[1] += one chunk: 16 bytes of codes, two scales, 16 activations a lane.
NINFER_DEVICE void multiply_chunk(float (*acc)[4], uint4 codes, uint32_t scales, uint4 x0, uint4 x1) {
  uint32_t sg, sh, lo[8], hi[8];
  block_scales(scales, sg, sh);
  e2m1x16_bf16(codes.x, codes.y, sg, lo), e2m1x16_bf16(codes.z, codes.w, sh, hi);
  mma_bf16(acc[0], lo[0], hi[0], lo[1], hi[1], x0.x, x0.y);
  mma_bf16(acc[1], lo[2], hi[2], lo[3], hi[3], x0.z, x0.w);
  mma_bf16(acc[0], lo[4], hi[4], lo[5], hi[5], x1.x, x1.y);
  mma_bf16(acc[1], lo[6], hi[6], lo[7], hi[7], x1.z, x1.w);
}

// ---- routed gate/up ----

static constexpr int kUpWarps = 16;
static constexpr int kUpThreads = 32 * kUpWarps;
static constexpr int kUpDepth = 4;  // pairs of chunks a warp has on their way

NINFER_KERNEL(expert_gate_up, ExpertUpParams, kUpThreads, 2) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.k / 128, tile_bytes = pairs * kPairBytes, tiles = p.inner / 8, x_pitch = 2 * p.k + 32;
  Routing& route_to = *(Routing*)smem;
  const uint32_t xs = (smem_addr(smem) + routing_bytes(p.r) + 15) & ~15u;
  const uint32_t sum_at = (xs + p.r * x_pitch + 15) & ~15u;  // sums of all but the first warp of a team: [2][team][3][column][row]
  const uint32_t fifo = ((sum_at + 2 * (kUpWarps / 4) * 3 * p.r * 64 + 127) & ~127u) + warp * (kUpDepth * kPairBytes) + lane * 16;
  const uint32_t fifo_end = fifo + kUpDepth * kPairBytes;
  float* sums = (float*)(smem + (sum_at - smem_addr(smem)));
  // a team of four warps, one on each scheduler, shares an item, each a quarter of k
  const uint32_t team = warp / 4, part = warp % 4, pair0 = share_start(pairs, 4, part), mine = share_start(pairs, 4, part + 1) - pair0;

  STAMP_BEGIN(200)
  STAMP(1)
  pdl_wait();
  STAMP(2)

  const uint32_t units = p.k / 8;
  if (p.r > 1 || warp > 0) {  // for one row warp 0 finds the experts meanwhile
    const uint32_t skip = p.r > 1 ? 0 : 32, stride = kUpThreads - skip;
#pragma unroll 1
    for (uint32_t i = threadIdx.x - skip; i < units * p.r; i += 2 * stride) {
      const uint32_t j = i + stride, r0 = i / units, r1 = j / units;
      uint4 a = ldg_l2(p.x + (uint64_t)r0 * p.x_ld + (i - r0 * units) * 8), b = a;
      if (j < units * p.r) b = ldg_l2(p.x + (uint64_t)r1 * p.x_ld + (j - r1 * units) * 8);
      sts128(xs + r0 * x_pitch + (i - r0 * units) * 16, order_pairs_by4(a));
      if (j < units * p.r) sts128(xs + r1 * x_pitch + (j - r1 * units) * 16, order_pairs_by4(b));
    }
  }
  route(route_to, p.logits, p.r, p.experts, p.topk);
  pdl_trigger();  // after the wait, so the next kernel may read the logits in its prologue (R3), and after the activations have come
  const uint32_t distinct = route_to.distinct;
  if (p.distinct && blockIdx.x == 0 && threadIdx.x == 0) *p.distinct = distinct;
  STAMP(3)

  // Items are (distinct expert d, tile). Item i is done by block i mod grid, team i / grid mod 4.
  struct Items {
    uint32_t d, tile;
    NINFER_DEVICE void settle(uint32_t tiles) {
#pragma unroll 1
      while (tile >= tiles) tile -= tiles, ++d;
    }
  };
  Items ahead = {0, blockIdx.x + team * gridDim.x};
  ahead.settle(tiles);
  Items at = ahead;
  const uint32_t stride = gridDim.x * (kUpWarps / 4);
  const uint64_t policy = policy_evict_first();
  const uint8_t* src = nullptr;
  uint32_t left = 0, into = fifo;  // pairs of the item still to be asked for; the slot they go to
  auto copy_next = [&]() {
    if (left == 0 && ahead.d < distinct && mine > 0) {
      src = (const uint8_t*)p.bank + ((uint64_t)route_to.id[ahead.d] * tiles + ahead.tile) * tile_bytes + pair0 * kPairBytes + lane * 16;
      left = mine;
      ahead.tile += stride;
      ahead.settle(tiles);
    }
    if (left) {
      copy_pair(into, src, lane, policy);
      src += kPairBytes, --left;
    }
    copy_commit();
    into += kPairBytes;
    if (into == fifo_end) into = fifo;
  };
#pragma unroll 1
  for (int i = 0; i < kUpDepth; i++) copy_next();

  const bool live = g < p.r;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const uint32_t xlane = xs + g * x_pitch + pair0 * 256 + t * 32;
  uint32_t from = fifo, buffer = 0;
#pragma unroll 1
  for (; at.d < distinct; at.tile += stride, at.settle(tiles)) {
    const float divisor = __ldg(p.divisor + route_to.id[at.d]);
    float acc[2][4] = {};
    uint32_t b = xlane;
#pragma unroll 1
    for (uint32_t c = 0; c < mine; c++) {
      copy_wait<kUpDepth - 1>();
      const uint4 u = lds128(from), v = lds128(from + 512);
      const uint32_t scales = lds32(from + 1024 - 12 * lane);
      copy_next();
      uint4 x0 = zero, x1 = zero;
      if (live) x0 = lds128(b), x1 = lds128(b + 16);
      multiply_chunk(acc, u, scales, x0, x1);
      if (live) x0 = lds128(b + 128), x1 = lds128(b + 144);
      multiply_chunk(acc, v, scales >> 16, x0, x1);
      b += 256;
      from += kPairBytes;
      if (from == fifo_end) from = fifo;
    }
    float* team_sums = sums + (buffer * (kUpWarps / 4) + team) * 3 * p.r * 16;
    if (part) {
      float* own = team_sums + (part - 1) * p.r * 16;
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (2 * t + i < p.r) {
          own[(2 * t + i) * 16 + g] = acc[0][i] + acc[1][i];
          own[(2 * t + i) * 16 + g + 8] = acc[0][i + 2] + acc[1][i + 2];
        }
    }
    named_sync(1 + team, 128);  // the next item's sums go to the other buffer
    buffer ^= 1;
    if (part) continue;
    const float f = __fdividef(NVFP4_UNDO, divisor);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t r = 2 * t + i;
      if (r >= p.r) continue;
      const int rank = rank_of(route_to, p.r, at.d, r);
      const float *s1 = team_sums + r * 16 + g, *s2 = s1 + p.r * 16, *s3 = s2 + p.r * 16;
      const float gate = (((acc[0][i] + acc[1][i]) + s1[0]) + (s2[0] + s3[0])) * f;
      const float up = (((acc[0][i + 2] + acc[1][i + 2]) + s1[8]) + (s2[8] + s3[8])) * f;
      if (rank >= 0) p.hidden[((uint64_t)r * p.topk + rank) * p.inner + at.tile * 8 + g] = __float2bfloat16_rn(silu(gate) * up);
    }
  }
  STAMP(4)
}

// ---- routed and shared down ----

static constexpr int kDownWarps = 16;
static constexpr int kDownThreads = 32 * kDownWarps;
static constexpr int kDownDepth = 4;  // units a warp has on their way

template <bool ONE>  // R = 1
NINFER_DEVICE void down_tiles(const ExpertDownParams& p) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t pairs = p.inner / 128, tile_bytes = pairs * kPairBytes, tiles = p.h / 16, shared_units = p.inner / 32;
  Routing& route_to = *(Routing*)smem;
  float* sums = (float*)(smem + ((routing_bytes(ONE ? 1 : p.r) + 15) & ~15));  // [2][warp][column][row]
  const uint32_t sum_stride = kDownWarps * p.r * 16;
  const uint32_t hs = smem_addr(sums + 2 * sum_stride);  // R = 1: the hidden vectors, routed then shared
  const uint32_t fifo = ((hs + (ONE ? (p.topk + 1) * p.inner * 2 : 0) + 127) & ~127u) + warp * (kDownDepth * kPairBytes) + lane * 16;
  const uint32_t fifo_end = fifo + kDownDepth * kPairBytes;

  STAMP_BEGIN(210)
  // A tile's units: first the shared expert's chunks of 32 k (BF16, one KB), then (distinct expert, 128 k) pairs. Warp w takes
  // units w, w + 16, ... of its tile, then of the block's next tile.
  struct Unit {
    uint32_t tile, u, d, pair;
  };
  const uint64_t policy = policy_evict_first();
  uint32_t per_tile = shared_units;  // until the experts are known
  uint32_t distinct = 0;
  auto step = [&](Unit& x) {
    x.u += kDownWarps;
    if (x.u >= per_tile) {
      x.u = warp, x.tile += gridDim.x;
    }
    if (x.u >= shared_units) {
      const uint32_t n = x.u - shared_units;
      x.d = n / pairs, x.pair = n - x.d * pairs;
    }
  };
  Unit ahead = {blockIdx.x, warp, 0, 0};
  uint32_t into = fifo;
  auto copy_shared = [&]() {
    const uint8_t* src = (const uint8_t*)(p.shared_w + (uint64_t)(ahead.tile * 16 + g) * p.inner + ahead.u * 32 + t * 8);
    copy16(into, src, policy);
    copy16(into + 512, src + 16 * (uint64_t)p.inner, policy);
  };
  auto copy_next = [&]() {
    if (ahead.tile < tiles) {
      if (ahead.u < shared_units)
        copy_shared();
      else
        copy_pair(into,
                  (const uint8_t*)p.bank + ((uint64_t)route_to.id[ahead.d] * tiles + ahead.tile) * tile_bytes + ahead.pair * kPairBytes + lane * 16,
                  lane, policy);
      step(ahead);
    }
    copy_commit();
    into += kPairBytes;
    if (into == fifo_end) into = fifo;
  };
  const bool early_unit = ahead.u < shared_units;  // a first shared unit needs no routing
  if (early_unit) {
    copy_shared();
    copy_commit();
    into += kPairBytes;
  }
  if (!p.early) pdl_wait();
  STAMP(1)
  route(route_to, p.logits, ONE ? 1 : p.r, p.experts, p.topk);
  STAMP(2)
  distinct = route_to.distinct;
  per_tile = shared_units + distinct * pairs;
  Unit at = {blockIdx.x, warp, 0, 0};
  if (warp >= shared_units) at.d = (warp - shared_units) / pairs, at.pair = warp - shared_units - at.d * pairs;
  if (warp >= per_tile) at.tile = tiles;  // more warps than work
  ahead = at;
  if (early_unit) step(ahead);
#pragma unroll 1
  for (int i = early_unit; i < kDownDepth; i++) copy_next();
  for (uint32_t d = threadIdx.x; d < distinct; d += kDownThreads) route_to.factor[d] = __fdividef(NVFP4_UNDO, __ldg(p.divisor + route_to.id[d]));
  __syncthreads();
  STAMP(3)
  if (p.early) pdl_wait();
  STAMP(4)

  const uint32_t col0 = 2 * t, col1 = 2 * t + 1;
  const float shared0 = col0 < p.r ? sigmoid(ldg_l2_f32(p.shared_logit + col0)) : 0.0f;
  const float shared1 = !ONE && col1 < p.r ? sigmoid(ldg_l2_f32(p.shared_logit + col1)) : 0.0f;  // ONE has no second column
  const uint32_t row_units = p.inner / 8;
  if (ONE) {
    const uint32_t routed = p.topk * row_units, n = routed + row_units;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n; i += 2 * kDownThreads) {
      const uint32_t j = i + kDownThreads;
      uint4 a = ldg_l2(i < routed ? p.hidden + i * 8 : p.shared_hidden + (i - routed) * 8), b = a;
      if (j < n) b = ldg_l2(j < routed ? p.hidden + j * 8 : p.shared_hidden + (j - routed) * 8);
      sts128(hs + i * 16, i < routed ? order_pairs_by4(a) : a);
      if (j < n) sts128(hs + j * 16, j < routed ? order_pairs_by4(b) : b);
    }
    __syncthreads();
  }
  pdl_trigger();
  STAMP(5)

  const uint4 zero = make_uint4(0, 0, 0, 0);
  // R > 1: a unit's activations come from L2, asked for one unit ahead
  uint4 h[4] = {zero, zero, zero, zero};
  auto fetch = [&](const Unit& u) {
    h[0] = h[1] = h[2] = h[3] = zero;
    if (u.tile >= tiles || g >= p.r) return;
    if (u.u < shared_units) {
      h[0] = ldg_l2(p.shared_hidden + (uint64_t)g * p.inner + u.u * 32 + t * 8);
      return;
    }
    const int rank = rank_of(route_to, ONE ? 1 : p.r, u.d, g);
    if (rank < 0) return;
    const bf16* from = p.hidden + ((uint64_t)g * p.topk + rank) * p.inner + u.pair * 128 + t * 16;
    h[0] = ldg_l2(from), h[1] = ldg_l2(from + 8), h[2] = ldg_l2(from + 64), h[3] = ldg_l2(from + 72);
  };
  if (!ONE) fetch(at);
  uint32_t from = fifo, buffer = 0;
#pragma unroll 1
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float total[4] = {0, 0, 0, 0};
#pragma unroll 1
    while (at.tile == tile) {
      const Unit now = at;
      uint4 x[4] = {h[0], h[1], h[2], h[3]};
      step(at);
      if (!ONE) fetch(at);
      copy_wait<kDownDepth - 1>();
      const uint4 a = lds128(from), b = lds128(from + 512);
      const uint32_t scales = lds32(from + 1024 - 12 * lane);
      copy_next();
      from += kPairBytes;
      if (from == fifo_end) from = fifo;
      float acc[2][4] = {}, f0, f1;
      if (now.u < shared_units) {
        if (ONE) x[0] = g == 0 ? lds128(hs + (p.topk * row_units + now.u * 4 + t) * 16) : zero;
        mma_bf16(acc[0], a.x, b.x, a.y, b.y, x[0].x, x[0].y);
        mma_bf16(acc[1], a.z, b.z, a.w, b.w, x[0].z, x[0].w);
        f0 = shared0, f1 = shared1;
      } else {
        const int r0 = col0 < p.r ? rank_of(route_to, ONE ? 1 : p.r, now.d, col0) : -1, r1 = !ONE && col1 < p.r ? rank_of(route_to, p.r, now.d, col1) : -1;
        const float f = route_to.factor[now.d];
        f0 = r0 >= 0 ? f * route_to.weight[col0][r0] : 0.0f, f1 = r1 >= 0 ? f * route_to.weight[col1][r1] : 0.0f;
        if (ONE) {
          const uint32_t c = hs + (now.d * row_units + now.pair * 16 + t * 2) * 16;
          x[0] = x[1] = x[2] = x[3] = zero;
          if (g == 0) x[0] = lds128(c), x[1] = lds128(c + 16), x[2] = lds128(c + 128), x[3] = lds128(c + 144);
        } else {
#pragma unroll
          for (int i = 0; i < 4; i++) x[i] = order_pairs_by4(x[i]);
        }
        multiply_chunk(acc, a, scales, x[0], x[1]);
        multiply_chunk(acc, b, scales >> 16, x[2], x[3]);
      }
      total[0] = fmaf(f0, acc[0][0] + acc[1][0], total[0]), total[2] = fmaf(f0, acc[0][2] + acc[1][2], total[2]);
      if (!ONE) total[1] = fmaf(f1, acc[0][1] + acc[1][1], total[1]), total[3] = fmaf(f1, acc[0][3] + acc[1][3], total[3]);
    }
    float* mine = sums + buffer * sum_stride + warp * p.r * 16;
    if (col0 < p.r) mine[col0 * 16 + g] = total[0], mine[col0 * 16 + g + 8] = total[2];
    if (!ONE && col1 < p.r) mine[col1 * 16 + g] = total[1], mine[col1 * 16 + g + 8] = total[3];
    __syncthreads();  // the next tile's sums go to the other buffer
    const uint32_t col = threadIdx.x / 16, row = threadIdx.x % 16;
    if (col < p.r) {
      float v = 0;
#pragma unroll
      for (int w = 0; w < kDownWarps; w++) v += sums[buffer * sum_stride + w * p.r * 16 + threadIdx.x];
      p.out[(uint64_t)col * p.h + tile * 16 + row] = __float2bfloat16_rn(v);
    }
    buffer ^= 1;
    STAMP(6)
  }
  STAMP(7)
}

NINFER_KERNEL(expert_down, ExpertDownParams, kDownThreads, 2) { down_tiles<true>(p); }
NINFER_KERNEL(expert_down_rows, ExpertDownParams, kDownThreads, 1) { down_tiles<false>(p); }

// ---- repacking ----

// One thread a lane's 16 bytes of codes. grid.x covers (expert, tile, chunk, lane).
NINFER_KERNEL(expert_repack, RepackParams, 256, 1) {
  const uint32_t chunks = p.k / 64, tiles = p.n / 16;
  uint64_t i = (uint64_t)blockIdx.x * 256 + threadIdx.x;
  if (i >= (uint64_t)p.count * tiles * chunks * 32) return;
  const uint32_t lane = i % 32, chunk = i / 32 % chunks, tile = i / 32 / chunks % tiles;
  const uint64_t expert = p.first_expert + i / 32 / chunks / tiles;
  const uint32_t g = lane / 4, t = lane % 4;
  const uint32_t r0 = p.paired ? tile * 8 + g : tile * 16 + g, r1 = p.paired ? p.n / 2 + tile * 8 + g : r0 + 8;
  const uint8_t* codes = p.codes + expert * p.n * (p.k / 2);
  const uint8_t* scales = p.scales + expert * p.n * (p.k / 16);
  uint8_t* out = p.bank + (expert * tiles + tile) * chunks * 576;
  const uint2 a = pack_codes(*(const uint2*)(codes + (uint64_t)r0 * (p.k / 2) + chunk * 32 + t * 8));
  const uint2 b = pack_codes(*(const uint2*)(codes + (uint64_t)r1 * (p.k / 2) + chunk * 32 + t * 8));
  out += chunk / 2 * kPairBytes;
  *(uint4*)(out + chunk % 2 * 512 + lane * 16) = make_uint4(a.x, a.y, b.x, b.y);
  auto swizzle = [&](uint32_t row, uint32_t group) {
    return (row / 128 * (p.k / 64) + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
  };
  out[1024 + lane * 4 + chunk % 2 * 2] = scales[swizzle(r0, chunk * 4 + t)];
  out[1024 + lane * 4 + chunk % 2 * 2 + 1] = scales[swizzle(r1, chunk * 4 + t)];
}
