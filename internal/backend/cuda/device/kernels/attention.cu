// Attention of few rows over selected tokens, for the shapes of real models: index heads of 128, heads of 256, up to sixteen queries a key.
//
//   attend_group   a split of a row's attention for all queries of a key head: tensor instructions, scores and sums in FP32, weights as a
//                  BF16 part and what that leaves. attend_group_fp8: keys and values are E4M3 with a scale. Grid: key head, row, split.
//   merge_group    all splits of a head, times the output gate. Grid: head, row, quarter of the head.
//   select_blocks  where the tokens are that a row attends to, ascending: best blocks, ties to the lower, and the tail. Any shape. Grid: segment,
//                  row.
//
// Splits depend on a row's own length only: company changes nothing.
#include "best.cuh"

// What a kernel reads before its wait: rows, page tables and whatever the kernel before the last has made. The one before this has waited
// before it let this one start.

// How many tokens a row attends to that chooses for itself.
DEVICE uint32_t attended(const Row& row, uint32_t ratio, uint32_t most) {
  const uint32_t visible = row.at + 1, n = visible / ratio;
  return n <= most ? visible : most * ratio + visible % ratio;
}

NINFER_KERNEL(select_blocks, SelectParams, 1024, 1) {
  __shared__ bool last;
  __shared__ BestRoom room;
  const uint32_t r = blockIdx.y, segment = blockIdx.x, t = threadIdx.x;
  const Row row = p.rows[r];
  const uint32_t visible = row.at + 1, n = visible / p.ratio, segments = (n + kSegment - 1) / kSegment;
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  uint32_t* list = p.list + (uint64_t)r * p.list_ld;
  if (n <= p.most) {
    pdl();
    if (segment) return;
    for (uint32_t i = t; i < visible; i += 1024) list[i] = token_row(pages, i);
    if (t == 0) p.count[r] = visible;
    return;
  }
  if (segment >= segments) {
    pdl();
    return;
  }
  // A block is known by the row of its first token where it lies in one page, and by its number elsewhere.
  const bool whole = kPage % p.ratio == 0;
  uint32_t key[8], id[8], before, taken, page = 0;
  const uint32_t tail = visible - n * p.ratio, end = t < tail ? token_row(pages, n * p.ratio + t) : 0;
  uint32_t valid = min(kSegment, n - segment * kSegment);
  const float* scores = p.scores + (uint64_t)r * p.blocks + segment * kSegment;
#pragma unroll
  for (uint32_t i = 0; i < 8; i++) {
    id[i] = segment * kSegment + t * 4 + i;
    if (whole && i < 4 && t * 4 + i < valid) {
      const uint32_t token = id[i] * p.ratio;
      if (i == 0 || token % kPage == 0) page = pages[token / kPage];
      id[i] = page * kPage + token % kPage;
    }
  }
  pdl();
#pragma unroll
  for (uint32_t i = 0; i < 8; i++) key[i] = i < 4 && t * 4 + i < valid ? float_key(__ldcg(scores + t * 4 + i)) : 0;
  uint32_t bits = best_of<4>(room, key, valid, p.most, before, taken);
  if (segments > 1) {
    // Each segment leaves its best in order; the last one to arrive chooses among them.
    uint32_t* best = p.best + (uint64_t)r * gridDim.x * p.most * 2;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
      if (bits >> i & 1) {
        *(uint2*)(best + ((uint64_t)segment * p.most + before) * 2) = make_uint2(key[i], id[i]);
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
    valid = (segments - 1) * p.most + min(p.most, n - (segments - 1) * kSegment);
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
      key[i] = id[i] = 0;
      if (t * 8 + i < valid) {
        const uint2 v = __ldcg((const uint2*)(best + (uint64_t)(t * 8 + i) * 2));
        key[i] = v.x, id[i] = v.y;
      }
    }
    bits = best_of<8>(room, key, valid, p.most, before, taken);
  }
#pragma unroll
  for (uint32_t i = 0; i < 8; i++)
    if (bits >> i & 1) {
      for (uint32_t j = 0; j < p.ratio; j++) list[before * p.ratio + j] = whole ? id[i] + j : token_row(pages, id[i] * p.ratio + j);
      before++;
    }
  if (t < tail) list[taken * p.ratio + t] = end;
  if (t == 0) p.count[r] = taken * p.ratio + tail;
}

static constexpr int kGroup = 128;
static constexpr uint32_t kKeys = 32;            // tokens at a time
static constexpr uint32_t kPitch = 256 * 2 + 16;  // bytes of a row in shared memory

// Tokens of one split: as few as make all splits suffice, in whole groups of kKeys.
DEVICE uint32_t share_of(uint32_t n, uint32_t splits) { return ((n + splits - 1) / splits + kKeys - 1) / kKeys * kKeys; }

DEVICE void tensor_bf16(float* acc, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Sixteen E4M3 codes to BF16 pairs, exactly.
DEVICE void codes_to_bf16(uint4 c, uint32_t* out) {
  const uint32_t w[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t h[2];
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(h[0]), "=r"(h[1]) : "r"(w[i]));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float2 f = __half22float2(*(const __half2*)&h[j]);
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out[2 * i + j]) : "f"(f.y), "f"(f.x));
    }
  }
}

template <bool F8>
DEVICE void attend_for(const AttendGroupParams& p) {
  __shared__ __align__(16) uint8_t query[16 * kPitch], value[kKeys * kPitch], weights[2][16][kKeys * 2 + 16];
  __shared__ float most[4][16], total[4][16];
  const uint32_t kvh = blockIdx.x, r = blockIdx.y, split = blockIdx.z, t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, q4 = lane % 4;
  const uint32_t group = p.heads / p.kv;
  const uint32_t* list = p.list + (uint64_t)r * p.list_ld;
  for (uint32_t i = t; i < 16 * 32; i += kGroup) {
    const uint32_t h = i / 32;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (h < group) v = __ldcg((const uint4*)(p.q + ((uint64_t)r * p.heads + kvh * group + h) * 256) + i % 32);
    *(uint4*)(query + h * kPitch + i % 32 * 16) = v;
  }
  uint32_t n = attended(p.rows[r], p.ratio, p.most), begin, end, of_key, of_value;  // tokens of a round: whose key and whose value this thread fetches
  auto look = [&](uint32_t at) {
    of_key = at + warp * 8 + g < end ? __ldcg(list + at + warp * 8 + g) : 0;
    of_value = at + t / 4 < end ? __ldcg(list + at + t / 4) : 0;
  };
  auto cut = [&]() {
    const uint32_t share = share_of(n, p.splits);
    begin = min(n, split * share), end = min(n, begin + share);
  };
  cut();
  pdl();
  const uint32_t count = __ldcg(p.count + r);
  look(begin);
  if (count != n) {  // a selection from outside
    n = count;
    cut();
    look(begin);
  }
  if (begin == end) return;  // the merge knows as well
  float acc[8][4], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 8; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
  for (uint32_t at = begin; at < end; at += kKeys) {
    const bool live = at + warp * 8 + g < end;
    constexpr int kChunks = F8 ? 4 : 8;  // of 64 bytes of a key
    uint4 key[kChunks];
    float key_scale[2] = {1.0f, 1.0f}, value_scale[2] = {1.0f, 1.0f};  // of keys 2*q4 and one more of the warp's eight
    {
      const uint64_t line = (uint64_t)of_key * p.kv + kvh;  // heads of 256 values
      const uint4* from = (const uint4*)((const uint8_t*)p.keys + line * (F8 ? 256 : 512)) + q4;
#pragma unroll
      for (int c = 0; c < kChunks; c++) key[c] = live ? from[c * 4] : make_uint4(0, 0, 0, 0);
      if (F8) {
        const float ks = live ? from_bf16(p.key_scales[line]) : 0.0f, vs = live ? from_bf16(p.value_scales[line]) : 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) key_scale[i] = __shfl_sync(~0u, ks, (2 * q4 + i) * 4), value_scale[i] = __shfl_sync(~0u, vs, (2 * q4 + i) * 4);
      }
    }
    __syncthreads();  // the values of the round before have been used
    {
      const uint32_t k = t / 4;
      const bool on = at + k < end;
      const uint4* from = (const uint4*)((const uint8_t*)p.values + ((uint64_t)of_value * p.kv + kvh) * (F8 ? 256 : 512)) + t % 4;
      uint4 v[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; i++) v[i] = on ? from[4 * i] : make_uint4(0, 0, 0, 0);
      look(at + kKeys);
#pragma unroll
      for (int i = 0; i < kChunks; i++) {
        uint8_t* to = value + k * kPitch + (t % 4 + 4 * i) * (F8 ? 32 : 16);
        if (F8) {
          uint32_t w[8];
          codes_to_bf16(v[i], w);
          *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
          *(uint4*)(to + 16) = make_uint4(w[4], w[5], w[6], w[7]);
        } else {
          *(uint4*)to = v[i];
        }
      }
    }
    if (at == begin) __syncthreads();  // the queries are there
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
      uint32_t k[8] = {key[c].x, key[c].y, key[c].z, key[c].w, 0, 0, 0, 0};
      if (F8) codes_to_bf16(key[c], k);
#pragma unroll
      for (int i = 0; i < (F8 ? 2 : 1); i++) {
        const uint32_t from = F8 ? c * 128 + q4 * 32 + i * 16 : c * 64 + q4 * 16;
        const uint4 a = *(const uint4*)(query + g * kPitch + from), b = *(const uint4*)(query + (g + 8) * kPitch + from);
        tensor_bf16(s, a.x, b.x, a.y, b.y, k[4 * i], k[4 * i + 1]);
        tensor_bf16(s, a.z, b.z, a.w, b.w, k[4 * i + 2], k[4 * i + 3]);
      }
    }
    // s[0..1]: query g, keys 2*q4 and one more of the warp's eight; s[2..3]: query g+8.
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] = at + warp * 8 + 2 * q4 + i % 2 < end ? s[i] * key_scale[i % 2] * 0.0625f : -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float m = fmaxf(s[2 * i], s[2 * i + 1]);
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      if (q4 == 0) most[warp][g + 8 * i] = m;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t h = g + 8 * i;
      const float now = fmaxf(top[i], fmaxf(fmaxf(most[0][h], most[1][h]), fmaxf(most[2][h], most[3][h])));
      const float old = expf(top[i] - now), e0 = expf(s[2 * i] - now), e1 = expf(s[2 * i + 1] - now);
      top[i] = now;
      float e = e0 + e1;
      e += __shfl_xor_sync(~0u, e, 1);
      e += __shfl_xor_sync(~0u, e, 2);
      sum[i] = sum[i] * old + e;  // of this warp's keys
#pragma unroll
      for (int j = 0; j < 8; j++) acc[j][2 * i] *= old, acc[j][2 * i + 1] *= old;
      const float w0 = e0 * value_scale[0], w1 = e1 * value_scale[1];
      const bf16 h0 = to_bf16(w0), h1 = to_bf16(w1);
      bf16* w = (bf16*)weights[0][h] + warp * 8 + 2 * q4;
      w[0] = h0, w[1] = h1;
      w = (bf16*)weights[1][h] + warp * 8 + 2 * q4;
      w[0] = to_bf16(w0 - from_bf16(h0)), w[1] = to_bf16(w1 - from_bf16(h1));
    }
    __syncthreads();
    // This warp's 64 columns of weights times values.
#pragma unroll
    for (int kk = 0; kk < 2; kk++) {
      uint32_t a[2][4];
#pragma unroll
      for (int part = 0; part < 2; part++) {
        a[part][0] = *(const uint32_t*)(weights[part][g] + (kk * 16 + 2 * q4) * 2);
        a[part][1] = *(const uint32_t*)(weights[part][g + 8] + (kk * 16 + 2 * q4) * 2);
        a[part][2] = *(const uint32_t*)(weights[part][g] + (kk * 16 + 2 * q4 + 8) * 2);
        a[part][3] = *(const uint32_t*)(weights[part][g + 8] + (kk * 16 + 2 * q4 + 8) * 2);
      }
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const uint32_t from = (uint32_t)__cvta_generic_to_shared(value) + (kk * 16 + lane / 8 % 2 * 8 + lane % 8) * kPitch + (warp * 64 + j * 8 + lane / 16 * 8) * 2;
        uint32_t b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from) : "memory");
#pragma unroll
        for (int part = 0; part < 2; part++) {
          tensor_bf16(acc[j], a[part][0], a[part][1], a[part][2], a[part][3], b[0], b[1]);
          tensor_bf16(acc[j + 1], a[part][0], a[part][1], a[part][2], a[part][3], b[2], b[3]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (q4 == 0) total[warp][g + 8 * i] = sum[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t h = g + 8 * i;
    if (h >= group) continue;
    const uint64_t to = ((uint64_t)r * p.heads + kvh * group + h) * p.splits + split;
#pragma unroll
    for (int j = 0; j < 8; j++) *(float2*)(p.partial + to * 256 + warp * 64 + j * 8 + 2 * q4) = make_float2(acc[j][2 * i], acc[j][2 * i + 1]);
    if (warp == 0 && q4 == 0) *(float2*)(p.sums + to * 2) = make_float2(top[i], total[0][h] + total[1][h] + total[2][h] + total[3][h]);
  }
}

NINFER_KERNEL(attend_group, AttendGroupParams, kGroup, 4) { attend_for<false>(p); }
NINFER_KERNEL(attend_group_fp8, AttendGroupParams, kGroup, 4) { attend_for<true>(p); }

static constexpr int kMerge = 256;       // 64 columns of a head, each by four threads
static constexpr uint32_t kSplits = 72;  // at most

NINFER_KERNEL(merge_group, MergeGroupParams, kMerge, 1) {
  __shared__ float factor[kSplits], part[4][64], shared[33];
  if (p.trigger == 0) pdl_trigger();
  const uint32_t head = blockIdx.x, r = blockIdx.y, t = threadIdx.x, c = blockIdx.z * 64 + t % 64, quarter = t / 64;
  uint32_t n = attended(p.rows[r], p.ratio, p.most), used;
  const float gate = from_bf16(p.qg[((uint64_t)r * p.heads + head) * 512 + 256 + c]);
  const uint64_t from = ((uint64_t)r * p.heads + head) * p.splits;
  constexpr int kMine = kSplits / 4;
  float mine[kMine];  // asked for before their factors are known
  float2 s = make_float2(-INFINITY, 0.0f);
  auto ask = [&]() {
    const uint32_t share = share_of(n, p.splits);
    used = (n + share - 1) / share;
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      const uint32_t split = quarter + 4 * i;
      mine[i] = split < used ? __ldcg(p.partial + (from + split) * 256 + c) : 0.0f;
    }
    s = t < 128 && t < used ? __ldcg((const float2*)p.sums + from + t) : make_float2(-INFINITY, 0.0f);
  };
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
  const uint32_t count = __ldcg(p.count + r);
  ask();
  if (count != n) {  // a selection from outside
    n = count;
    ask();
  }
  if (t < 128) {
    float top = s.x;
#pragma unroll
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    if (t % 32 == 0) shared[t / 32] = top;
    asm volatile("bar.sync 1, 128;" ::: "memory");
    top = fmaxf(fmaxf(shared[0], shared[1]), fmaxf(shared[2], shared[3]));
    const float e = t < used ? expf(s.x - top) : 0.0f;
    if (t < kSplits) factor[t] = e;
    const float sum = warp_sum(e * s.y);
    if (t % 32 == 0) shared[8 + t / 32] = sum;
  }
  __syncthreads();
  float v = 0.0f;
#pragma unroll
  for (int i = 0; i < kMine; i++) v = fmaf(factor[quarter + 4 * i], mine[i], v);
  part[quarter][t % 64] = v;
  if (p.trigger == 2) pdl_trigger();
  __syncthreads();
  if (quarter) return;
  v = part[0][t] + part[1][t] + part[2][t] + part[3][t];
  p.out[((uint64_t)r * p.heads + head) * 256 + c] = to_bf16(v / (shared[8] + shared[9] + shared[10] + shared[11]) * sigmoid(gate));
}
