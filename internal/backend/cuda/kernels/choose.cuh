// A row's top-k experts by a whole block, or by one warp where many logits are equal: the largest logits, lower id first among equals.
#pragma once
#include "common.cuh"

static constexpr int kMaxExperts = 512;
static constexpr int kMaxTop = 16;

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

// One warp: the ids and keys of a row's top-k, best first, lower id first among equals. Lane l holds a run of c experts, so of equal keys the one
// in the lowest lane, then first in its lane, has the lowest id. The k-th largest of the lanes' maxima is a bound that k keys reach; only keys of
// the k lanes with the largest maxima can win, usually a dozen, and those are ranked by counting. More than 32 of them take the plain way, one
// winner a round.
__device__ __noinline__ void top_of_row(const float* logits, uint32_t experts, uint32_t topk, uint16_t* id, uint32_t* chosen, uint32_t* scratch) {
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
  uint32_t best = 0;
#pragma unroll
  for (int i = 0; i < 16; i += 4) best = max(best, max(max(key[i], key[i + 1]), max(key[i + 2], key[i + 3])));
  const uint32_t place = place_of(best, scratch);
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
  uint32_t won = 0, won_id = 0;  // lane j: the j-th winner
  if (count <= 32) {
    uint32_t at = upto - mine;  // candidates in order of id
    if (mine)
#pragma unroll
      for (int i = 0; i < 16; i++)
        if (key[i] >= bound) scratch[at] = key[i], scratch[32 + at] = first + i, ++at;
    __syncwarp();
    const uint32_t k = lane < count ? scratch[lane] : 0, e = scratch[32 + lane];
    const uint32_t rank = place_of(k, scratch + 64);
    __syncwarp();
    if (lane < count && rank < topk) scratch[rank] = k, scratch[32 + rank] = e;
    __syncwarp();
    won = scratch[lane], won_id = scratch[32 + lane];
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
  if (lane < topk) id[lane] = (uint16_t)won_id, chosen[lane] = won;
  __syncwarp();
}

// What the first eight warps of a block choose a row's experts with.
struct Choice {
  uint32_t most[16];  // of groups of 32 experts
  uint32_t key[16];   // of the chosen
  uint2 list[64];     // candidates: key, id; eight a warp
  uint16_t id[2][16]; // the chosen of two rows
  float factor[2][16];
  uint32_t over;      // too many candidates in a warp
  uint32_t distinct;  // experts of all rows
  uint32_t pad[2];
};
static constexpr int kChoosers = 8;  // warps

// Keys of experts thread and thread + 256 of a row: larger logit, larger key; 0: no expert; a NaN counts as the smallest number.
NINFER_DEVICE uint2 load_keys(const float* logits, uint32_t experts) {
  const bool chooses = threadIdx.x < 32 * kChoosers;
  const uint32_t at = threadIdx.x % (32 * kChoosers);
  const float f[2] = {ldg_l2_f32(logits + min(at, experts - 1)) + 0.0f, ldg_l2_f32(logits + min(at + 256, experts - 1)) + 0.0f};
  uint32_t k[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t b = __float_as_uint(f[i]);
    k[i] = f[i] == f[i] ? b ^ ((uint32_t)((int)b >> 31) | 0x80000000u) : 1;
    if (!chooses || at + 256 * i >= experts) k[i] = 0;
  }
  return make_uint2(k[0], k[1]);
}

// n threads of a block, the choosers among them: the row's top-k, best first, lower id first among equals, into id and s.key. The k-th
// largest of the groups' maxima is a bound that k keys reach; what reaches it, usually some 16, is ranked by counting, a warp its own.
// scratch: 96 words for the rest.
NINFER_DEVICE void choose(const float* logits, uint2 key, uint32_t experts, uint32_t topk, Choice& s, uint16_t* id, uint32_t n, uint32_t* scratch) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < kChoosers) {
    const uint32_t a = __reduce_max_sync(~0u, key.x), b = __reduce_max_sync(~0u, key.y);
    if (lane == 0) *(uint2*)(s.most + 2 * warp) = make_uint2(a, b);
    if (lane < 8) s.list[8 * warp + lane] = make_uint2(0, 0);
    if (threadIdx.x == 0) s.over = 0;
  }
  named_sync(2, n);
  uint32_t own = 0;
  if (warp < kChoosers) {
    const uint32_t most = s.most[lane % 16];  // compared with eight of them here, with the others sixteen lanes on
    const uint4 v = lds128(smem_addr(s.most + lane / 16 * 8)), w = lds128(smem_addr(s.most + lane / 16 * 8 + 4));
    uint32_t place = ((v.x > most) + (v.y > most)) + ((v.z > most) + (v.w > most)), more = ((w.x > most) + (w.y > most)) + ((w.z > most) + (w.w > most));
    place += more;
    place += __shfl_xor_sync(~0u, place, 16);
    const uint32_t bound = max(1u, __reduce_min_sync(~0u, place < topk ? most : ~0u));
    const uint32_t in_a = __ballot_sync(~0u, key.x >= bound), in_b = __ballot_sync(~0u, key.y >= bound), below = (1u << lane) - 1, count = __popc(in_a);
    own = count + __popc(in_b);
    const uint32_t at_a = __popc(in_a & below), at_b = count + __popc(in_b & below), list = smem_addr(s.list + 8 * warp);
    sts64_if(key.x >= bound && at_a < 8, list + 8 * at_a, make_uint2(key.x, threadIdx.x));
    sts64_if(key.y >= bound && at_b < 8, list + 8 * at_b, make_uint2(key.y, threadIdx.x + 256));
    if (own > 8 && lane == 0) s.over = 1;
  }
  named_sync(2, n);
  if (*(volatile uint32_t*)&s.over) {
    if (warp == 0) top_of_row(logits, experts, topk, id, s.key, scratch);
  } else if (warp < kChoosers) {
    const uint2 a = lds64(smem_addr(s.list + lane)), b = lds64(smem_addr(s.list + 32 + lane));
#pragma unroll 2
    for (uint32_t i = 0; i < own; i++) {
      const uint2 c = lds64(smem_addr(s.list + 8 * warp + i));
      const uint32_t rank = __popc(__ballot_sync(~0u, a.x > c.x || (a.x == c.x && a.y < c.y))) + __popc(__ballot_sync(~0u, b.x > c.x || (b.x == c.x && b.y < c.y)));
      if (lane == 0 && rank < topk) id[rank] = (uint16_t)c.y, s.key[rank] = c.x;
    }
  }
  named_sync(2, n);
}

// Soft-max weight of the chosen expert of this lane's rank, from its key.
NINFER_DEVICE float weight_of(const uint32_t* key, uint32_t topk) {
  const uint32_t lane = threadIdx.x % 32;
  auto value = [](uint32_t k) { return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k); };
  const float e = lane < topk ? __expf(value(key[lane]) - value(key[0])) : 0.0f;
  return __fdividef(e, warp_sum(e));
}
