// Routing for prompts: the best experts of every row, and a counting sort of (row, rank) pairs by expert.
//
//   route         chosen [M][topk] and weight [M][topk] from logits [M][E], E <= 512, topk <= 16: a warp a row, lane l holds experts l, l + 32 ..;
//                 topk rounds of taking the largest, of equal ones the lowest id. Weights: soft-max over all logits, or over the chosen.
//   sort_count    how often each expert occurs in each run of 256 rows
//   sort_scan     (one block) where each run's pairs of each expert begin, and the list of items of at most `tile` rows
//   sort_small    all of this for up to 1,024 rows: one block
//   sort_scatter  the pairs to their places: inside an expert by row, so the order depends on nothing but the choice
//   order         X in the order in which E2M1 codes come out of a word, (0,4)(1,5)(2,6)(3,7) in every eight
#include "common.cuh"
#include "params.h"

static constexpr int kMaxExperts = 512;
static constexpr int kRun = 256;  // rows of a run
static constexpr int kWords = kRun / 32;

NINFER_KERNEL(route, RouteParams, 256, 2) {
  const uint32_t row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.m) return;
  float v[16];
  uint32_t key[16];  // 0: no expert, or taken
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const uint32_t e = lane + 32 * i;
    v[i] = e < p.experts ? p.logits[(uint64_t)row * p.experts + e] : -INFINITY;
    key[i] = e < p.experts ? max(1u, float_key(v[i])) : 0;
    top = fmaxf(top, v[i]);
  }
  float sum = 0;
  if (!p.normalize) {
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
    for (int i = 0; i < 16; i++) sum += __expf(v[i] - top);
    sum = warp_sum(sum);
  }
  uint32_t id = 0;
  float won = -INFINITY;
  for (uint32_t j = 0; j < p.topk; j++) {
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) best = max(best, key[i]);
    const uint32_t most = __reduce_max_sync(~0u, best);
    uint32_t e = ~0u;
    if (best == most)
#pragma unroll
      for (int i = 15; i >= 0; i--)
        if (key[i] == most) e = lane + 32 * i;
    e = __reduce_min_sync(~0u, e);
    float x = -INFINITY;
#pragma unroll
    for (int i = 0; i < 16; i++)
      if (e == lane + 32 * i) key[i] = 0, x = v[i];
    x = __shfl_sync(~0u, x, e % 32);
    if (lane == j) id = e, won = x;
  }
  const float largest = p.normalize ? __shfl_sync(~0u, won, 0) : top;
  const float e = lane < p.topk ? __expf(won - largest) : 0.0f;
  if (p.normalize) sum = warp_sum(e);
  if (lane < p.topk) p.chosen[row * p.topk + lane] = id, p.weight[row * p.topk + lane] = __fdividef(e, sum);
}

// Bit r of mask[e]: row r of the run has chosen e.
NINFER_DEVICE void mark(const SortParams& p, uint32_t (*mask)[kWords]) {
  for (uint32_t i = threadIdx.x; i < kMaxExperts * kWords; i += blockDim.x) ((uint32_t*)mask)[i] = 0;
  __syncthreads();
  const uint32_t first = blockIdx.x * kRun, pairs = min((uint32_t)kRun, p.m - first) * p.topk;
  for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    const uint32_t r = i / p.topk, e = min(p.chosen[first * p.topk + i], kMaxExperts - 1u);
    atomicOr(&mask[e][r / 32], 1u << (r % 32));
  }
  __syncthreads();
}

NINFER_KERNEL(sort_count, SortParams, 512, 1) {
  __shared__ uint32_t mask[kMaxExperts][kWords];
  mark(p, mask);
  if (threadIdx.x < p.experts) {
    uint32_t n = 0;
#pragma unroll
    for (int w = 0; w < kWords; w++) n += __popc(mask[threadIdx.x][w]);
    p.counts[blockIdx.x * p.experts + threadIdx.x] = n;
  }
}

// Exclusive sum over a block; scratch has a word for each warp.
NINFER_DEVICE uint32_t before(uint32_t v, uint32_t* scratch) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = v;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const uint32_t u = __shfl_up_sync(~0u, sum, o);
    if ((int)lane >= o) sum += u;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  uint32_t base = 0;
  for (uint32_t w = 0; w < warp; w++) base += scratch[w];
  __syncthreads();
  return base + sum - v;
}

// The items of expert e, which has `total` pairs; returns where these begin. All threads of a block together, those without an expert with 0.
NINFER_DEVICE uint32_t list(const SortParams& p, uint32_t e, uint32_t total, uint32_t* scratch) {
  const uint32_t start = before(ceil_div(total, p.align) * p.align, scratch), tiles = ceil_div(total, p.tile), at = before(tiles, scratch);
  const uint32_t size = tiles ? ceil_div(ceil_div(total, tiles), p.unit) * p.unit : 0;  // of about the same size
  for (uint32_t i = 0; i < tiles; i++) p.items[at + i] = {e, start + i * size, i * size < total ? min(size, total - i * size) : 0, 0};
  if (e == kMaxExperts - 1) *p.item_count = at + tiles;
  return start;
}

NINFER_KERNEL(sort_scan, SortParams, 512, 1) {
  __shared__ uint32_t scratch[16];
  const uint32_t e = threadIdx.x;
  uint32_t total = 0;
  if (e < p.experts)
#pragma unroll 4
    for (uint32_t b = 0; b < p.blocks; b++) {
      const uint32_t n = p.counts[b * p.experts + e];
      p.counts[b * p.experts + e] = total;
      total += n;
    }
  const uint32_t start = list(p, e, total, scratch);
  if (e < p.experts) p.start[e] = start;
}

NINFER_KERNEL(sort_scatter, SortParams, 512, 1) {
  __shared__ uint32_t mask[kMaxExperts][kWords];
  mark(p, mask);
  const uint32_t first = blockIdx.x * kRun, pairs = min((uint32_t)kRun, p.m - first) * p.topk;
  for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    const uint32_t r = i / p.topk, e = min(p.chosen[first * p.topk + i], kMaxExperts - 1u);
    uint32_t at = p.start[e] + p.counts[blockIdx.x * p.experts + e] + __popc(mask[e][r / 32] & ((1u << (r % 32)) - 1));
    for (uint32_t w = 0; w < r / 32; w++) at += __popc(mask[e][w]);
    if (p.row) p.row[at] = first + r;
    p.place[first * p.topk + i] = at;
  }
}

static constexpr int kSmallWords = 32, kSmallPairs = 16;  // 1,024 rows; pairs of a thread

NINFER_KERNEL(sort_small, SortParams, 1024, 1) {
  // [kSmallWords][kMaxExperts]: bit r % 32 of word r / 32 of an expert says that row r has chosen it; how many rows before the word have; then starts
  uint32_t* const mask = (uint32_t*)smem;
  uint16_t* const ahead = (uint16_t*)(mask + kSmallWords * kMaxExperts);
  uint32_t* const starts = (uint32_t*)(ahead + kSmallWords * kMaxExperts);
  __shared__ uint32_t scratch[32];
  const uint32_t pairs = p.m * p.topk, words = ceil_div(p.m, 32), t = threadIdx.x;
  uint32_t e[kSmallPairs];
#pragma unroll
  for (int j = 0; j < kSmallPairs; j++) e[j] = t + 1024 * j < pairs ? min(p.chosen[t + 1024 * j], kMaxExperts - 1u) : ~0u;
  for (uint32_t i = t; i < words * kMaxExperts; i += 1024) mask[i] = 0;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kSmallPairs; j++) {
    const uint32_t r = (t + 1024 * j) / p.topk;
    if (e[j] != ~0u) atomicOr(&mask[r / 32 * kMaxExperts + e[j]], 1u << (r % 32));
  }
  __syncthreads();
  uint32_t total = 0;
  if (t < p.experts)
    for (uint32_t w = 0; w < words; w++) ahead[w * kMaxExperts + t] = total, total += __popc(mask[w * kMaxExperts + t]);
  const uint32_t start = list(p, t, total, scratch);
  if (t < kMaxExperts) starts[t] = start;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kSmallPairs; j++) {
    if (e[j] == ~0u) continue;
    const uint32_t i = t + 1024 * j, r = i / p.topk, w = r / 32 * kMaxExperts + e[j];
    const uint32_t at = starts[e[j]] + ahead[w] + __popc(mask[w] & ((1u << (r % 32)) - 1));
    if (p.row) p.row[at] = r;
    p.place[i] = at;
  }
}

NINFER_KERNEL(order, SortParams, 256, 4) {
  const uint32_t all = p.m * (p.h / 8);
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < all; i += gridDim.x * 256) *((uint4*)p.ordered + i) = order8(*((const uint4*)p.x + i));
}

// Random contents for the benchmark: BF16 (0: normal-like times scale), bytes (1), E4M3 without NaN (2), FP32 about one (3), scales of E4M3 blocks (4).
NINFER_KERNEL(fill, FillParams, 256, 4) {
  for (uint64_t i = (uint64_t)blockIdx.x * 256 + threadIdx.x; i < p.count; i += (uint64_t)gridDim.x * 256) {
    uint64_t z = (i + ((uint64_t)p.seed << 40)) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull, z = (z ^ (z >> 27)) * 0x94d049bb133111ebull, z ^= z >> 31;
    const float u = (float)((int)(z & 0xffff) + (int)(z >> 16 & 0xffff) + (int)(z >> 32 & 0xffff) - 98302) * (1.0f / 32768);
    switch (p.kind) {
      case 0: ((bf16*)p.dst)[i] = __float2bfloat16_rn(u * p.scale); break;
      case 1: ((uint8_t*)p.dst)[i] = (uint8_t)z; break;
      case 2: ((uint8_t*)p.dst)[i] = (uint8_t)z == 0x7f || (uint8_t)z == 0xff ? 0 : (uint8_t)z; break;
      case 3: ((float*)p.dst)[i] = p.scale * (1.0f + 0.25f * u); break;
      default: ((uint8_t*)p.dst)[i] = 40 + (z & 31); break;
    }
  }
}
