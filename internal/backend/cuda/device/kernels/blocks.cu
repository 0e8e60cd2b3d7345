// Sequence blocks: convolution windows, attention with its indexer, routing. The delta rule is in delta.cu.
//
// A lane's window is brought forward by the recorded rows of its last verify pass before anything else (fold), and a verify pass records its
// rows instead of writing the window. With no rows conv folds only.
//
//   conv       depthwise causal convolution, thread a channel. Grid: channels/256, lane.
//   score      index scores of complete blocks. Grid: any, row.
//   attend     part of a row's attention. Grid: head, row, split. merge: all of it, times the output gate. Grid: head, row.
//   route      best experts, ties to the lower, and their weights; one warp. Grid: row.
#include "common.cuh"

NINFER_KERNEL(conv, ConvParams, 256, 1) {
  const uint32_t c = blockIdx.x * 256 + threadIdx.x;
  const Lane lane = p.lanes[blockIdx.y];
  const uint32_t depth = (p.taps - 1) * p.dilation, fold = lane.fold;
  bf16* window = p.window + (uint64_t)lane.slot * depth * p.c + c;
  constexpr uint32_t kShort = 9;
  if (fold == 0 && lane.rows == 1 && !lane.record && depth <= kShort) {
    // One row, as decoding has it: the window is a step old and the weights are constant, so both are here before the wait.
    float v[kShort], w[kShort], last = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kShort; i++) {
      v[i] = w[i] = 0.0f;
      if (c < p.c && i < depth) {
        v[i] = from_bf16(window[(uint64_t)i * p.c]);
        if (i % p.dilation == 0) w[i] = p.w[(uint64_t)(i / p.dilation) * p.c + c];
      }
    }
    if (c < p.c) last = p.w[(uint64_t)(p.taps - 1) * p.c + c];
    pdl_wait();
    if (c >= p.c) return;
    const uint64_t at = (uint64_t)lane.first * p.c + c;
    const bf16 x = p.x[at];
    pdl_trigger();
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kShort; i++) sum = fmaf(w[i], v[i], sum);
    sum = fmaf(last, from_bf16(x), sum);
    if (p.out) p.out[at] = silu(sum);
    if (p.streams) p.streams[at] = to_bf16(from_bf16(p.streams[at]) + p.v[at] + silu(sum));
#pragma unroll
    for (uint32_t i = 0; i < kShort; i++)
      if (i < depth) window[(uint64_t)i * p.c] = i + 1 < depth ? to_bf16(v[i + 1 < kShort ? i + 1 : i]) : x;
    return;
  }
  pdl();
  if (c >= p.c) return;
  bf16* records = p.records + (uint64_t)lane.slot * p.verify * p.c + c;
  const bf16* x = p.x + (uint64_t)lane.first * p.c + c;
  // Window, recorded rows and new rows are one sequence.
  auto get = [&](uint32_t i) {
    return i < depth ? window[(uint64_t)i * p.c] : i < depth + fold ? records[(uint64_t)(i - depth) * p.c] : x[(uint64_t)(i - depth - fold) * p.c];
  };
  for (uint32_t t = 0; t < lane.rows; t++) {
    float sum = 0.0f;
    for (uint32_t j = 0; j < p.taps; j++) sum = fmaf(p.w[(uint64_t)j * p.c + c], from_bf16(get(fold + t + j * p.dilation)), sum);
    const uint64_t at = (uint64_t)(lane.first + t) * p.c + c;
    if (p.out) p.out[at] = silu(sum);
    if (p.streams) p.streams[at] = to_bf16(from_bf16(p.streams[at]) + p.v[at] + silu(sum));
  }
  const uint32_t shift = fold + (lane.record ? 0 : lane.rows);
  if (shift)
    for (uint32_t i = 0; i < depth; i++) window[(uint64_t)i * p.c] = get(shift + i);
  if (lane.record)
    for (uint32_t t = 0; t < lane.rows; t++) records[(uint64_t)t * p.c] = x[(uint64_t)t * p.c];
}

NINFER_KERNEL(score, ScoreParams, 256, 1) {
  pdl();
  const uint32_t r = blockIdx.y, t = threadIdx.x % 32;
  const Row row = p.rows[r];
  const uint32_t n = (row.at + 1) / p.ratio;
  if (n <= p.most) return;
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  const Blocks blocks(p.ratio);
  const bf16* q = p.iq + (uint64_t)r * p.ih * p.id;
  const float scale = 1.0f / sqrtf((float)p.id);
  for (uint32_t b = blockIdx.x * 8 + threadIdx.x / 32; b < n; b += gridDim.x * 8) {
    const bf16* key = p.keys + blocks.row(pages[blocks.last(b) / kPage], b) * p.id;
    float k[8], sum = 0.0f;  // id <= 256
#pragma unroll
    for (int i = 0; i < 8; i++) k[i] = t + 32 * i < p.id ? from_bf16(key[t + 32 * i]) : 0.0f;
    for (uint32_t h = 0; h < p.ih; h++) {
      float s = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (t + 32 * i < p.id) s = fmaf(k[i], from_bf16(q[h * p.id + t + 32 * i]), s);
      sum += fmaxf(warp_sum(s), 0.0f);
    }
    if (t == 0) p.scores[(uint64_t)r * p.blocks + b] = sum * scale;
  }
}

static constexpr int kAttend = 128;

NINFER_KERNEL(attend, AttendParams, kAttend, 1) {
  __shared__ float part[kAttend / 32][258];
  pdl();
  const uint32_t head = blockIdx.x, r = blockIdx.y, split = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t hd = p.hd, kw = p.kv * hd, n = p.count[r], share = (n + p.splits - 1) / p.splits;
  const uint32_t first = min(n, split * share), end = min(n, first + share);
  const uint32_t kvh = head / (p.heads / p.kv);
  const uint32_t* list = p.list + (uint64_t)r * p.list_ld;
  const float scale = 1.0f / sqrtf((float)hd);
  const bf16* query = p.q + ((uint64_t)r * p.heads + head) * hd;
  const bool fast = hd == 256 && !p.key_scales;
  auto load = [&](const bf16* src, float* v) {  // value i of a lane is lane*8+i of 256, else lane+32*i
    if (fast) {
      const uint4 q = *(const uint4*)(src + lane * 8);
      v[0] = lo(q.x), v[1] = hi(q.x), v[2] = lo(q.y), v[3] = hi(q.y), v[4] = lo(q.z), v[5] = hi(q.z), v[6] = lo(q.w), v[7] = hi(q.w);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = lane + 32 * i < hd ? from_bf16(src[lane + 32 * i]) : 0.0f;
    }
  };
  float q[8], acc[8], most = -INFINITY, sum = 0.0f;
  load(query, q);
#pragma unroll
  for (int i = 0; i < 8; i++) acc[i] = 0.0f;
  for (uint32_t a = first + warp; a < end; a += kAttend / 32) {
    const uint64_t at = (uint64_t)list[a] * kw + kvh * hd;
    float k[8], v[8], s = 0.0f;
    if (p.key_scales) {
      const uint64_t scale = (uint64_t)list[a] * p.kv + kvh;
      const float ks = from_bf16(p.key_scales[scale]), vs = from_bf16(p.value_scales[scale]);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        k[i] = lane + 32 * i < hd ? e4m3(((const uint8_t*)p.keys)[at + lane + 32 * i]) * ks : 0.0f;
        v[i] = lane + 32 * i < hd ? e4m3(((const uint8_t*)p.values)[at + lane + 32 * i]) * vs : 0.0f;
      }
    } else {
      load((const bf16*)p.keys + at, k);
      load((const bf16*)p.values + at, v);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) s = fmaf(q[i], k[i], s);
    s = warp_sum(s) * scale;
    const float top = fmaxf(most, s), old = expf(most - top), e = expf(s - top);
    sum = sum * old + e;
#pragma unroll
    for (int i = 0; i < 8; i++) acc[i] = acc[i] * old + e * v[i];
    most = top;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t c = fast ? lane * 8 + i : lane + 32 * i;
    if (c < hd) part[warp][2 + c] = acc[i];
  }
  if (lane == 0) part[warp][0] = most, part[warp][1] = sum;
  __syncthreads();
  float top = -INFINITY;
  for (int w = 0; w < kAttend / 32; w++) top = fmaxf(top, part[w][0]);
  float* out = p.partial + (((uint64_t)r * p.heads + head) * p.splits + split) * (hd + 2);
  for (uint32_t c = threadIdx.x; c < hd + 1; c += kAttend) {
    float s = 0.0f;
    for (int w = 0; w < kAttend / 32; w++)
      if (part[w][1] > 0.0f) s += expf(part[w][0] - top) * part[w][1 + c];
    out[1 + c] = s;
  }
  if (threadIdx.x == 0) out[0] = top;
}

NINFER_KERNEL(merge, MergeParams, 256, 1) {
  pdl();
  const uint32_t head = blockIdx.x, r = blockIdx.y, c = threadIdx.x;
  if (c >= p.hd) return;
  const float* in = p.partial + ((uint64_t)r * p.heads + head) * p.splits * (p.hd + 2);
  float top = -INFINITY, sum = 0.0f, v = 0.0f;
  for (uint32_t i = 0; i < p.splits; i++) top = fmaxf(top, in[i * (p.hd + 2)]);
  for (uint32_t i = 0; i < p.splits; i++) {
    const float* part = in + i * (p.hd + 2);
    if (!(part[1] > 0.0f)) continue;
    const float e = expf(part[0] - top);
    sum += e * part[1];
    v += e * part[2 + c];
  }
  const float gate = from_bf16(p.qg[((uint64_t)r * p.heads + head) * 2 * p.hd + p.hd + c]);
  p.out[((uint64_t)r * p.heads + head) * p.hd + c] = to_bf16(v / sum * sigmoid(gate));
}

NINFER_KERNEL(route, RouteParams, 32, 1) {
  pdl();
  const uint32_t r = blockIdx.x, t = threadIdx.x;
  const float* logits = p.logits + (uint64_t)r * p.experts;
  uint32_t* chosen = p.chosen + (uint64_t)r * p.topk;
  float* weight = p.weight + (uint64_t)r * p.topk;
  float most = -INFINITY;
  for (uint32_t e = t; e < p.experts; e += 32) most = fmaxf(most, logits[e]);
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  float all = 0.0f;
  for (uint32_t e = t; e < p.experts; e += 32) all += expf(logits[e] - most);
  all = warp_sum(all);
  if (p.forced && p.forced[(uint64_t)r * p.topk] != ~0u) {
    for (uint32_t i = t; i < p.topk; i += 32) chosen[i] = p.forced[(uint64_t)r * p.topk + i];
  } else {
    uint64_t last = ~0ull;  // the choice before: keys are distinct
    for (uint32_t i = 0; i < p.topk; i++) {
      uint64_t best = 0;
      for (uint32_t e = t; e < p.experts; e += 32) {
        const uint64_t key = (uint64_t)float_key(logits[e]) << 32 | (uint32_t)~e;
        if (key < last) best = max(best, key);
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) best = max(best, (uint64_t)__shfl_xor_sync(~0u, (unsigned long long)best, o));
      if (t == 0) chosen[i] = ~(uint32_t)best;
      last = best;
    }
  }
  __syncwarp();
  if (t) return;
  float sum = 0.0f;
  for (uint32_t i = 0; i < p.topk; i++) sum += expf(logits[chosen[i]] - most) / all;
  for (uint32_t i = 0; i < p.topk; i++) weight[i] = expf(logits[chosen[i]] - most) / all / (p.normalize ? sum : 1.0f);
}
