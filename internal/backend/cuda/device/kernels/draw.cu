// What a draw looks at: the most likely ids of a row of logits.
//
//   likely  the kLikely best of each row's logits, rounded to BF16, ties to the lower id, to the host. Grid: segment, row.
#include "best.cuh"

static constexpr uint32_t kLikely = 128;

// The float that has this key.
DEVICE float key_float(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

NINFER_KERNEL(likely, LikelyParams, 1024, 1) {
  __shared__ bool last;
  __shared__ BestRoom room;
  pdl();
  const uint32_t r = blockIdx.y, segment = blockIdx.x, segments = gridDim.x, t = threadIdx.x;
  const float* logits = p.logits + (uint64_t)r * p.rows + segment * kSegment;
  uint32_t* best = p.best + (uint64_t)r * segments * kLikely * 2;
  uint32_t key[8], id[8], before, taken, valid = min(kSegment, p.ids - segment * kSegment);
#pragma unroll
  for (uint32_t i = 0; i < 8; i++) {
    id[i] = segment * kSegment + t * 4 + i;
    key[i] = i < 4 && t * 4 + i < valid ? float_key(round_bf16(__ldcg(logits + t * 4 + i))) : 0;
  }
  uint32_t bits = best_of<4>(room, key, valid, kLikely, before, taken);
  if (segments > 1) {
    // As in select_blocks: each segment leaves its best in order; the last one to arrive chooses among them.
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
      if (bits >> i & 1) {
        *(uint2*)(best + ((uint64_t)segment * kLikely + before) * 2) = make_uint2(key[i], id[i]);
        before++;
      }
    __threadfence();
    __syncthreads();
    if (t == 0) {
      last = atomicAdd(p.arrived + r, 1) == segments - 1;
      if (last) p.arrived[r] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    valid = (segments - 1) * kLikely + min(kLikely, p.ids - (segments - 1) * kSegment);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      key[i] = id[i] = 0;
      if (t * 8 + i < valid) {
        const uint2 v = __ldcg((const uint2*)(best + (uint64_t)(t * 8 + i) * 2));
        key[i] = v.x, id[i] = v.y;
      }
    }
    bits = best_of<8>(room, key, valid, kLikely, before, taken);
  }
#pragma unroll
  for (uint32_t i = 0; i < 8; i++)
    if (bits >> i & 1) {
      *(uint2*)(p.host + ((uint64_t)r * kLikely + before) * 2) = make_uint2(__float_as_uint(key_float(key[i])), id[i]);
      before++;
    }
  __threadfence_system();
}
