// What verify and draft passes do besides the blocks of the model, with as many requests for memory on their way at once as there is to read: of a
// row or two the plain versions in streams.cu take the time of ten loads in a row.
//
//   stem_wide   as stem_norm, for rows of up to 4,096 values: of the carried streams each block has the sum of squares of all and the norm of
//               one of them. Grid: 1 + streams, row.
//   carry_wide  as carry, for widths that are multiples of eight. Grid: every 2,048 values, row.
//   route_wide  as route, of up to 512 experts, which a warp has in registers. Grid: row.
//   drafted_tokens  of a pass that verifies, the tokens of rows after a lane's first: picks of a chain's passes, which are in the host's memory, width
//               from one pass to the next, a lane's at its number. Grid: 1.
//   expert_up_wide, expert_down_wide  as expert_up and expert_down, of experts in BF16 with rows of up to 2,560 and the shared one's first half done:
//               a warp has all of a row on its way at once. Grid: any, row; enough blocks for a warp an output, row.
#include "common.cuh"

static constexpr int kThreads = 512;

NINFER_KERNEL(stem_wide, StemParams, kThreads, 1) {
  __shared__ float shared[33];
  constexpr uint32_t most = 8;  // values of a row that a thread has
  const uint32_t r = blockIdx.y, s = blockIdx.x, width = p.s * p.h;
  float norm[most], v[most], square = 0.0f;
  const float* weights = s == 0 ? p.norm_embed : p.norm_hidden + (s - 1) * p.h;
#pragma unroll
  for (uint32_t i = 0; i < most; i++) norm[i] = threadIdx.x + i * kThreads < p.h ? 1.0f + weights[threadIdx.x + i * kThreads] : 0.0f;
  pdl();
  const Row row = p.rows[r];
  if (s == 0) {
#pragma unroll
    for (uint32_t i = 0; i < most; i++) {
      v[i] = threadIdx.x + i * kThreads < p.h ? value(p.w, row.token, threadIdx.x + i * kThreads) : 0.0f;
      square += v[i] * v[i];
    }
    const float scale = 1.0f / sqrtf(block_sum(square, shared) / p.h + p.eps);
#pragma unroll
    for (uint32_t i = 0; i < most; i++)
      if (threadIdx.x + i * kThreads < p.h) p.e[(uint64_t)r * p.h + threadIdx.x + i * kThreads] = to_bf16(v[i] * scale * norm[i]);
    return;
  }
  const Lane lane = p.lanes[row.lane];
  const bf16* in = lane.chain ? p.chain + (uint64_t)row.slot * width : p.carried + ((uint64_t)row.slot * p.carry + lane.carry + row.index) * width;
#pragma unroll
  for (uint32_t i = 0; i < most; i++) v[i] = threadIdx.x + i * kThreads < p.h ? from_bf16(in[(s - 1) * p.h + threadIdx.x + i * kThreads]) : 0.0f;
#pragma unroll 4
  for (uint32_t u = threadIdx.x; u < width / 8; u += kThreads) {
    const uint4 q = __ldcg((const uint4*)in + u);
    const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) square += lo(w[i]) * lo(w[i]) + hi(w[i]) * hi(w[i]);
  }
  const float scale = 1.0f / sqrtf(block_sum(square, shared) / width + p.eps);
#pragma unroll
  for (uint32_t i = 0; i < most; i++)
    if (threadIdx.x + i * kThreads < p.h) p.hidden[(uint64_t)r * width + (s - 1) * p.h + threadIdx.x + i * kThreads] = to_bf16(v[i] * scale * norm[i]);
}

NINFER_KERNEL(carry_wide, CarryParams, 256, 1) {
  pdl();
  const uint32_t r = blockIdx.y, u = blockIdx.x * 256 + threadIdx.x;
  if (u >= p.width / 8) return;
  const uint4 v = __ldcg((const uint4*)(p.x + (uint64_t)r * p.width) + u);
  const Row row = p.rows[r];
  const Lane lane = p.lanes[row.lane];
  if (p.draft && row.index + 1 != lane.rows) return;
  bf16* out = p.draft ? p.chain + (uint64_t)row.slot * p.width : p.carried + ((uint64_t)row.slot * p.carry + lane.carry + row.index) * p.width;
  ((uint4*)out)[u] = v;
}

NINFER_KERNEL(drafted_tokens, GatherParams, 128, 1) {
  pdl();
  Row* rows = (Row*)p.out;
  for (uint32_t r = threadIdx.x; r < p.n; r += 128) {
    const uint32_t index = __ldcg(&rows[r].index), lane = __ldcg(&rows[r].lane);
    if (index) rows[r].token = *(const volatile uint32_t*)((const uint32_t*)p.x + (uint64_t)(index - 1) * p.width + lane);
  }
}

NINFER_KERNEL(route_wide, RouteParams, 32, 1) {
  constexpr int most = 16;
  pdl();
  const uint32_t r = blockIdx.x, t = threadIdx.x;
  const float* logits = p.logits + (uint64_t)r * p.experts;
  // Lane t has experts t, t + 32, ...: of equal keys the lowest id is in the first of a lane's that has it, then in the lowest lane.
  uint32_t key[most];
#pragma unroll
  for (int i = 0; i < most; i++) key[i] = t + 32 * i < p.experts ? max(1u, float_key(__ldcg(logits + t + 32 * i))) : 0;
  const bool forced = p.forced && p.forced[(uint64_t)r * p.topk] != ~0u;
  uint32_t mine = 0;   // lane i has the i-th choice
  float value = 0.0f;  // and its logit
  for (uint32_t c = 0; c < p.topk; c++) {
    uint32_t best = 0, at = 0;
    if (forced) {
      at = p.forced[(uint64_t)r * p.topk + c];
    } else {
#pragma unroll
      for (int i = 0; i < most; i++) best = max(best, key[i]);
      best = __reduce_max_sync(~0u, best);
      uint32_t id = ~0u;
#pragma unroll
      for (int i = most - 1; i >= 0; i--)
        if (key[i] == best) id = t + 32 * i;
      at = __reduce_min_sync(~0u, id);
#pragma unroll
      for (int i = 0; i < most; i++)
        if (t + 32 * i == at) key[i] = 0;
    }
    if (t == c) mine = at, value = __ldcg(logits + at);
  }
  // Weights are of the soft-max over all experts: without normalising over the chosen ones the others count.
  float top = t < p.topk ? value : -INFINITY, all = 0.0f;
#pragma unroll
  for (int i = 0; i < most; i++) {
    const float v = t + 32 * i < p.experts ? __ldcg(logits + t + 32 * i) : -INFINITY;
    top = fmaxf(top, v);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
  for (int i = 0; i < most; i++)
    if (t + 32 * i < p.experts) all += expf(__ldcg(logits + t + 32 * i) - top);
  all = warp_sum(all);
  const float e = t < p.topk ? expf(value - top) / all : 0.0f, sum = warp_sum(e);
  if (t < p.topk) p.chosen[(uint64_t)r * p.topk + t] = mine, p.weight[(uint64_t)r * p.topk + t] = p.normalize ? e / sum : e;
}

// Weights are read once.
DEVICE uint4 stream16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE float dot16(uint4 a, uint4 b) {
  float s = lo(a.x) * lo(b.x);
  s = fmaf(hi(a.x), hi(b.x), s), s = fmaf(lo(a.y), lo(b.y), s), s = fmaf(hi(a.y), hi(b.y), s), s = fmaf(lo(a.z), lo(b.z), s);
  s = fmaf(hi(a.z), hi(b.z), s), s = fmaf(lo(a.w), lo(b.w), s), s = fmaf(hi(a.w), hi(b.w), s);
  return s;
}

NINFER_KERNEL(expert_up_wide, ExpertUpParams, 256, 2) {
  constexpr int most = 10;         // pieces of 16 bytes of a row that a lane has: 2,560 values
  __shared__ uint4 x[32 * most];
  pdl();
  const uint32_t r = blockIdx.y, lane = threadIdx.x % 32, pieces = p.h / 8;
  for (uint32_t i = threadIdx.x; i < pieces; i += 256) x[i] = __ldcg((const uint4*)(p.x + (uint64_t)r * p.h) + i);
  __syncthreads();
  for (uint32_t unit = blockIdx.x * 8 + threadIdx.x / 32; unit < p.topk * p.inter; unit += gridDim.x * 8) {
    const uint32_t choice = unit / p.inter, j = unit % p.inter, e = __ldcg(p.chosen + r * p.topk + choice);
    const uint4* gate = (const uint4*)((const bf16*)p.bank.codes + ((uint64_t)e * 2 * p.inter + j) * p.h);
    const uint4* up = gate + (uint64_t)p.inter * pieces;
    uint4 g[most], u[most];
#pragma unroll
    for (int i = 0; i < most; i++)
      if (lane + 32 * i < pieces) g[i] = stream16(gate + lane + 32 * i);
#pragma unroll
    for (int i = 0; i < most; i++)
      if (lane + 32 * i < pieces) u[i] = stream16(up + lane + 32 * i);
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int i = 0; i < most; i++)
      if (lane + 32 * i < pieces) {
        const uint4 v = x[lane + 32 * i];
        a += dot16(g[i], v), b += dot16(u[i], v);
      }
    a = warp_sum(a), b = warp_sum(b);
    if (lane == 0) p.hidden[((uint64_t)r * p.topk + choice) * p.inter + j] = to_bf16(silu(a) * b);
  }
}

NINFER_KERNEL(expert_down_wide, ExpertDownParams, 640, 1) {
  constexpr int batch = 10;
  extern __shared__ __align__(16) uint8_t room[];  // hidden values [topk + 1][inter], the shared ones last
  __shared__ float factor[17];
  __shared__ const uint4* rows[17];
  uint4* hidden = (uint4*)room;
  pdl();
  const uint32_t r = blockIdx.y, lane = threadIdx.x % 32, pieces = p.inter / 8, routed = p.topk * pieces, all = routed + pieces;
  for (uint32_t i = threadIdx.x; i < all; i += 640)
    hidden[i] = i < routed ? __ldcg((const uint4*)(p.hidden + (uint64_t)r * p.topk * p.inter) + i) : __ldcg((const uint4*)(p.shared + (uint64_t)r * p.inter) + i - routed);
  if (threadIdx.x <= p.topk) {
    const uint32_t i = threadIdx.x;
    factor[i] = i < p.topk ? __ldcg(p.weight + r * p.topk + i) : sigmoid(__ldcg(p.gate + r));
    rows[i] = i < p.topk ? (const uint4*)((const bf16*)p.bank.codes + (uint64_t)__ldcg(p.chosen + r * p.topk + i) * p.h * p.inter) : (const uint4*)p.down.codes;
  }
  __syncthreads();
  const uint32_t c = blockIdx.x * 20 + threadIdx.x / 32;
  if (c >= p.h) return;
  float sum = 0.0f;
  for (uint32_t first = lane; first < all; first += 32 * batch) {
    uint4 w[batch];
#pragma unroll
    for (int i = 0; i < batch; i++) {
      const uint32_t at = first + 32 * i, e = at / pieces;
      if (at < all) w[i] = stream16(rows[e] + (uint64_t)c * pieces + at - e * pieces);
    }
#pragma unroll
    for (int i = 0; i < batch; i++) {
      const uint32_t at = first + 32 * i;
      if (at < all) sum = fmaf(factor[at / pieces], dot16(w[i], hidden[at]), sum);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) p.out[(uint64_t)r * p.h + c] = to_bf16(sum);
}
