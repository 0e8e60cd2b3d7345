// Attention of few rows over selected tokens, for the shapes of real models: index heads of 128, heads of 256, up to sixteen queries a key.
//
//   attend_pairs   a row's attention for all queries of a key head, two units of 32 tokens a block, whose sums it joins: tensor instructions, scores and
//                  sums in FP32, weights as a BF16 part and what that leaves. attend_pairs_fp8: keys and values are E4M3 with a scale. Grid: key head,
//                  row, pair.
//   merge_pairs    all pairs of a head, times the output gate. Grid: head, row, quarter of the head.
//   select_blocks  where the tokens are that a row attends to, ascending: best blocks, ties to the lower, and the tail. Any shape. Grid: segment,
//                  row.
//
// A row's sums depend on its own list only: company changes nothing.
#include "best.cuh"

// What a kernel reads before its wait: rows, page tables and whatever the kernel before the last has made. The one before this has waited
// before it let this one start.

// A selection is one block, alone on its SM and once a launch: what takes its time is fetching instructions, so that its loops are not unrolled.
static constexpr int kSelect = 1024;           // threads
static constexpr uint32_t kCandidates = 8192;  // keys that it can choose from
static constexpr uint32_t kNear = 32;          // keys of a bin that are ranked

struct SelectRoom {
  __align__(16) uint32_t key[kCandidates];
  __align__(16) uint32_t bins[kBins];
  uint32_t mask[kCandidates / 32], first[kCandidates / 32];  // of 32 keys: which are taken, and how many are before them
  uint32_t range[2][kSelect / 32], scan[kSelect / 32], found[3], n, near[kNear];
  uint32_t pages[kSegment * 4 / kPage + 1];  // of a segment's blocks of four tokens
};

// The float that has this key.
DEVICE float float_of(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Sum over the block, to all threads.
DEVICE uint32_t select_sum(SelectRoom& room, uint32_t v) {
  v = __reduce_add_sync(~0u, v);
  if (threadIdx.x % 32 == 0) room.scan[threadIdx.x / 32] = v;
  __syncthreads();
  v = __reduce_add_sync(~0u, threadIdx.x % 32 < kSelect / 32 ? room.scan[threadIdx.x % 32] : 0u);
  __syncthreads();
  return v;
}

// Marks the best `most` of room.key, ties to the lower place, whatever keys these are: bit by bit.
__device__ __noinline__ void choose_slowly(SelectRoom& room, uint32_t valid, uint32_t most) {
  const uint32_t t = threadIdx.x;
  uint32_t threshold = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t next = threshold | 1u << bit;
    uint32_t n = 0;
    for (uint32_t i = t; i < valid; i += kSelect) n += room.key[i] >= next;
    if (select_sum(room, n) >= most) threshold = next;
  }
  uint32_t n = 0;
  for (uint32_t i = t; i - t % 32 < valid; i += kSelect) {
    const bool larger = i < valid && room.key[i] > threshold, equal = i < valid && room.key[i] == threshold;
    const uint32_t votes = __ballot_sync(~0u, larger), ties = __ballot_sync(~0u, equal);
    if (t % 32 == 0) room.mask[i / 32] = votes, room.bins[i / 32] = ties;
    n += larger;
  }
  uint32_t need = most - select_sum(room, n);
  if (t == 0)
    for (uint32_t w = 0; need; w++)
      for (uint32_t ties = room.bins[w]; ties && need; ties &= ties - 1, need--) room.mask[w] |= ties & -ties;
}

// Marks the best `most` of room.key, ties to the lower place, and counts them. low and high: the least and the largest of this thread's keys.
//
// The keys are counted in bins of equal width in value, then, if the bin that holds the last to be taken is not taken as a whole and holds many,
// those of it in narrower ones; what is in the bin then is ranked against each other.
DEVICE void choose(SelectRoom& room, uint32_t valid, uint32_t most, uint32_t low, uint32_t high) {
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32;
  low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
  if (lane == 0) room.range[0][warp] = low, room.range[1][warp] = high;
  if (t < kBins / 4) *(uint4*)(room.bins + 4 * t) = make_uint4(0, 0, 0, 0);
  if (t == 0) room.n = 0;
  __syncthreads();
  low = __reduce_min_sync(~0u, room.range[0][lane % (kSelect / 32)]), high = __reduce_max_sync(~0u, room.range[1][lane % (kSelect / 32)]);
  const float least = float_of(low), spread = float_of(high) - least;
  const bool all = valid <= most, spreads = low && spread > 1e-30f && spread < 1e30f;
  const float scale = __fdividef(kBins - 2, spread);
  uint32_t need = most, count = most, last = 0, upper = 0, level = 0;
  bool slow = !all && !spreads;
  // The bin of a key, or of one in bin `upper` a part of it.
  auto place = [&](uint32_t key) { return (float_of(key) - least) * scale; };
  auto part = [&](float x) { return (uint32_t)((x - (float)upper) * (kBins - 1)); };
#pragma unroll 1
  for (; !all && !slow; level++) {
#pragma unroll 1
    for (uint32_t i = t; i < valid; i += kSelect) {
      const float x = place(room.key[i]);
      uint32_t b = (uint32_t)x;
      if (level) {
        if (b != upper) continue;
        b = part(x);
      }
      atomicAdd(room.bins + b, 1u);
    }
    __syncthreads();
    // From the largest on, four bins a thread, as far as they go.
    const bool scans = t < kBins / 4;
    const uint32_t at = scans ? kBins - 4 * (t + 1) : 0;
    const uint4 v = scans ? *(const uint4*)(room.bins + at) : make_uint4(0, 0, 0, 0);
    const uint32_t own = v.x + v.y + (v.z + v.w);
    uint32_t sum = own;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const uint32_t other = __shfl_up_sync(~0u, sum, o);
      if (lane >= o) sum += other;
    }
    if (lane == 31) room.scan[warp] = sum;
    __syncthreads();
    if (scans) *(uint4*)(room.bins + at) = make_uint4(0, 0, 0, 0);
    const uint32_t above = sum - own + __reduce_add_sync(~0u, lane < warp ? room.scan[lane] : 0u);  // keys in larger bins
    if (above < need && need <= above + own) {
      const uint32_t w = v.w, z = w + v.z, y = z + v.y, left = need - above;
      const uint32_t k = left <= w ? 3 : left <= z ? 2 : left <= y ? 1 : 0;
      room.found[0] = at + k;
      room.found[1] = left - (k == 3 ? 0 : k == 2 ? w : k == 1 ? z : y);
      room.found[2] = k == 3 ? v.w : k == 2 ? v.z : k == 1 ? v.y : v.x;
    }
    __syncthreads();
    last = room.found[0], need = room.found[1], count = room.found[2];
    if (need == count || count <= kNear) break;
    slow = level == 1;
    upper = last;
  }
  if (slow) {
    __syncthreads();
    choose_slowly(room, valid, most);
  } else {
#pragma unroll 1
    for (uint32_t i = t; i - lane < valid; i += kSelect) {
      bool larger = i < valid, equal = false;
      if (larger && !all) {
        const float x = place(room.key[i]);
        const uint32_t b = (uint32_t)x;
        const int over = level && b == upper ? (int)part(x) - (int)last : (int)b - (int)(level ? upper : last);
        larger = over > 0 || over == 0 && need == count, equal = over == 0 && need < count;
      }
      if (equal) room.near[atomicAdd(&room.n, 1u)] = i;
      const uint32_t votes = __ballot_sync(~0u, larger);
      if (lane == 0) room.mask[i / 32] = votes;
    }
    if (need < count) {
      __syncthreads();
      if (t < count) {
        const uint32_t mine = room.near[t], key = room.key[mine];
        uint32_t better = 0;
#pragma unroll 1
        for (uint32_t j = 0; j < count; j++) {
          const uint32_t other = room.near[j], k = room.key[other];
          better += k > key || k == key && other < mine;
        }
        if (better < need) atomicOr(room.mask + mine / 32, 1u << mine % 32);
      }
    }
  }
  __syncthreads();
  if (warp == 0) {
    const uint32_t words = (valid + 31) / 32, each = (words + 31) / 32, from = lane * each, to = min(words, from + each);
    uint32_t n = 0;
#pragma unroll 1
    for (uint32_t w = from; w < to; w++) n += __popc(room.mask[w]);
    uint32_t sum = n;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const uint32_t other = __shfl_up_sync(~0u, sum, o);
      if (lane >= o) sum += other;
    }
    sum -= n;
#pragma unroll 1
    for (uint32_t w = from; w < to; w++) room.first[w] = sum, sum += __popc(room.mask[w]);
  }
  __syncthreads();
}

NINFER_KERNEL(select_blocks, SelectParams, kSelect, 1) {
  __shared__ bool final;
  __shared__ SelectRoom room;
  const uint32_t r = blockIdx.y, segment = blockIdx.x, t = threadIdx.x;
  const Row row = p.rows[r];
  const uint32_t visible = row.at + 1, n = visible / p.ratio, segments = (n + kSegment - 1) / kSegment;
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  uint32_t* list = p.list + (uint64_t)r * p.list_ld;
  if (n <= p.most) {
    pdl();
    if (segment) return;
#pragma unroll 1
    for (uint32_t i = t; i < visible; i += kSelect) list[i] = token_row(pages, i);
    if (t == 0) p.count[r] = visible;
    return;
  }
  if (segment >= segments) {
    pdl();
    return;
  }
  // A block is known by the row of its first token where it lies in one page, and by its number elsewhere.
  const bool four = p.ratio == 4, whole = kPage % p.ratio == 0;
  const uint32_t tail = visible - n * p.ratio, end = t < tail ? token_row(pages, n * p.ratio + t) : 0;
  uint32_t valid = min(kSegment, n - segment * kSegment);
  if (four && t <= (valid * 4 - 1) / kPage) room.pages[t] = pages[segment * (kSegment * 4 / kPage) + t];
  const float* scores = p.scores + (uint64_t)r * p.blocks + segment * kSegment;
  pdl();
  uint32_t low = ~0u, high = 0;
  const float4 four_scores = t * 4 < valid ? __ldcg((const float4*)scores + t) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float score[4] = {four_scores.x, four_scores.y, four_scores.z, four_scores.w};
#pragma unroll
  for (uint32_t i = 0; i < 4; i++)
    if (t * 4 + i < valid) {
      const uint32_t key = float_key(score[i]);
      room.key[t * 4 + i] = key, low = min(low, key), high = max(high, key);
    }
  uint32_t* best = p.best + (uint64_t)r * gridDim.x * p.most * 2;
  bool joined = false;  // the segments' best
#pragma unroll 1
  for (;;) {
    choose(room, valid, p.most, low, high);
    const bool over = joined || segments == 1;
#pragma unroll 1
    for (uint32_t i = t; i < valid; i += kSelect) {
      const uint32_t votes = room.mask[i / 32];
      if (!(votes >> i % 32 & 1)) continue;
      const uint32_t e = room.first[i / 32] + __popc(votes & ((1u << i % 32) - 1));
      uint32_t id = segment * kSegment + i;
      if (joined) id = __ldcg(best + (uint64_t)i * 2 + 1);
      else if (four) id = room.pages[i * 4 / kPage] * kPage + i * 4 % kPage;
      else if (whole) id = token_row(pages, id * p.ratio);
      if (!over) {
        *(uint2*)(best + ((uint64_t)segment * p.most + e) * 2) = make_uint2(room.key[i], id);
      } else if (four) {
        *(uint4*)(list + e * 4) = make_uint4(id, id + 1, id + 2, id + 3);
      } else {
#pragma unroll 1
        for (uint32_t j = 0; j < p.ratio; j++) list[e * p.ratio + j] = whole ? id + j : token_row(pages, id * p.ratio + j);
      }
    }
    if (over) break;
    // Each segment leaves its best in order; the last one to arrive chooses among them.
    __threadfence();
    __syncthreads();
    if (t == 0) {
      final = atomicAdd(p.arrived + r, 1) == segments - 1;
      if (final) p.arrived[r] = 0;
    }
    __syncthreads();
    if (!final) return;
    __threadfence();
    valid = (segments - 1) * p.most + min(p.most, n - (segments - 1) * kSegment), low = ~0u, high = 0, joined = true;
#pragma unroll 4
    for (uint32_t i = t; i < valid; i += kSelect) {
      const uint32_t key = __ldcg(best + (uint64_t)i * 2);
      room.key[i] = key, low = min(low, key), high = max(high, key);
    }
  }
  const uint32_t taken = min(valid, p.most) * p.ratio;
  if (t < tail) list[taken + t] = end;
  if (t == 0) p.count[r] = taken + tail;
}

static constexpr int kGroup = 256;
static constexpr uint32_t kKeys = 32;            // tokens at a time
static constexpr uint32_t kPitch = 256 * 2 + 16;     // bytes of a row in shared memory
static constexpr uint32_t kKeyPitch = 256 * 2 + 64;  // of a key: two next to each other are in other banks

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

// Sixteen bytes to shared memory, or zeros.
DEVICE void copy16(void* to, const void* from, bool on) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from), "r"(on ? 16 : 0) : "memory");
}

// What joining two units multiplies them by.
struct Join {
  float top, a, b;
};
DEVICE Join join_of(float a, float b) {
  Join j;
  j.top = fmaxf(a, b);
  j.a = a == -INFINITY ? 0.0f : expf(a - j.top), j.b = b == -INFINITY ? 0.0f : expf(b - j.top);
  return j;
}
DEVICE float joined(const Join& j, float a, float b) { return fmaf(j.b, b, __fmul_rn(j.a, a)); }

// Scores and weights of a unit are the work of four warps; of the values every warp has columns of both units.
template <bool F8>
DEVICE void attend_pairs_for(const AttendGroupParams& p) {
  constexpr int kTiles = 4;  // of eight columns, of a warp
  __shared__ __align__(16) uint8_t query[16 * kPitch], value[2 * kKeys * kPitch], weights[2][2][16][kKeys * 2 + 16];
  __shared__ float most[2][4][16], total[2][4][16];
  extern __shared__ __align__(16) uint8_t tile[];  // of BF16: keys
  const uint32_t kvh = blockIdx.x, r = blockIdx.y, t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, q4 = lane % 4, unit = warp / 4;
  const uint32_t group = p.heads / p.kv, begin = blockIdx.z * 2 * kKeys;
  const uint32_t* list = p.list + (uint64_t)r * p.list_ld;
  for (uint32_t i = t; i < 16 * 32; i += kGroup) {
    const uint32_t h = i / 32;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (h < group) v = __ldcg((const uint4*)(p.q + ((uint64_t)r * p.heads + kvh * group + h) * 256) + i % 32);
    *(uint4*)(query + h * kPitch + i % 32 * 16) = v;
  }
  pdl();
  const uint32_t n = __ldcg(p.count + r);
  const uint32_t of_key = __ldcg(list + min(begin + warp * 8 + g, p.list_ld - 1));
  const uint32_t of_value = F8 ? __ldcg(list + min(begin + t / 4, p.list_ld - 1)) : 0;
  if (begin >= n) return;  // the merge knows as well
  constexpr int kChunks = F8 ? 4 : 8;  // of 64 bytes of a key
  uint4 key[F8 ? kChunks : 1], v8[kChunks];
  float ks = 0.0f, vs = 0.0f;
  if (F8) {
    const bool live = begin + warp * 8 + g < n, on = begin + t / 4 < n;
    const uint64_t line = (uint64_t)of_key * p.kv + kvh;
    const uint8_t* from = (const uint8_t*)p.values + ((uint64_t)of_value * p.kv + kvh) * 256 + t % 4 * 16;
#pragma unroll
    for (int c = 0; c < kChunks; c++) key[F8 ? c : 0] = live ? *((const uint4*)((const uint8_t*)p.keys + line * 256) + q4 + c * 4) : make_uint4(0, 0, 0, 0);
    ks = live ? from_bf16(p.key_scales[line]) : 0.0f, vs = live ? from_bf16(p.value_scales[line]) : 0.0f;
#pragma unroll
    for (int i = 0; i < kChunks; i++) v8[i] = on ? *(const uint4*)(from + 64 * i) : make_uint4(0, 0, 0, 0);
  } else {
    // Keys, of which a warp reads its own only, then values: a row at a time, whole lines.
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint64_t line = (uint64_t)__shfl_sync(~0u, of_key, 4 * i) * p.kv + kvh;
      const bool on = begin + warp * 8 + i < n;
      copy16(tile + (warp * 8 + i) * kKeyPitch + lane * 16, (const uint8_t*)p.keys + (on ? line * 512 + lane * 16 : 0), on);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint64_t line = (uint64_t)__shfl_sync(~0u, of_key, 4 * i) * p.kv + kvh;
      const bool on = begin + warp * 8 + i < n;
      copy16(value + (warp * 8 + i) * kPitch + lane * 16, (const uint8_t*)p.values + (on ? line * 512 + lane * 16 : 0), on);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __syncthreads();  // the queries are there
  if (!F8) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
  }
  float s[4][4];
#pragma unroll
  for (int c = 0; c < 4; c++) s[c][0] = s[c][1] = s[c][2] = s[c][3] = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    const uint4 own = F8 ? key[F8 ? c : 0] : *(const uint4*)(tile + (warp * 8 + g) * kKeyPitch + c * 64 + q4 * 16);
    uint32_t k[8] = {own.x, own.y, own.z, own.w, 0, 0, 0, 0};
    if (F8) codes_to_bf16(own, k);
#pragma unroll
    for (int i = 0; i < (F8 ? 2 : 1); i++) {
      const uint32_t from = F8 ? c * 128 + q4 * 32 + i * 16 : c * 64 + q4 * 16;
      const uint4 a = *(const uint4*)(query + g * kPitch + from), b = *(const uint4*)(query + (g + 8) * kPitch + from);
      float* to = s[(F8 ? i : c % 2) * 2];
      tensor_bf16(to, a.x, b.x, a.y, b.y, k[4 * i], k[4 * i + 1]);
      tensor_bf16(to + 4, a.z, b.z, a.w, b.w, k[4 * i + 2], k[4 * i + 3]);
    }
  }
  float key_scale[2] = {1.0f, 1.0f}, value_scale[2] = {1.0f, 1.0f};  // of keys 2*q4 and one more of the warp's eight
  if (F8) {
#pragma unroll
    for (int i = 0; i < 2; i++) key_scale[i] = __shfl_sync(~0u, ks, (2 * q4 + i) * 4), value_scale[i] = __shfl_sync(~0u, vs, (2 * q4 + i) * 4);
  }
  // s[0..1]: query g, keys 2*q4 and one more of the warp's eight; s[2..3]: query g+8.
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[i] = s[0][i] + s[1][i] + (s[2][i] + s[3][i]);
    x[i] = begin + warp * 8 + 2 * q4 + i % 2 < n ? x[i] * key_scale[i % 2] * 0.0625f : -INFINITY;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float m = fmaxf(x[2 * i], x[2 * i + 1]);
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
    if (q4 == 0) most[unit][warp % 4][g + 8 * i] = m;
  }
  if (F8) {
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      uint32_t w[8];
      codes_to_bf16(v8[i], w);
      uint8_t* to = value + t / 4 * kPitch + (t % 4 + 4 * i) * 32;
      *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
      *(uint4*)(to + 16) = make_uint4(w[4], w[5], w[6], w[7]);
    }
  }
  __syncthreads();
  float top[2][2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t h = g + 8 * i;
#pragma unroll
    for (int u = 0; u < 2; u++) top[u][i] = fmaxf(fmaxf(most[u][0][h], most[u][1][h]), fmaxf(most[u][2][h], most[u][3][h]));
    const float now = unit == 0 ? top[0][i] : top[1][i];
    const float less = now == -INFINITY ? 0.0f : now;  // nothing in this unit
    const float e0 = expf(x[2 * i] - less), e1 = expf(x[2 * i + 1] - less);
    float e = e0 + e1;
    e += __shfl_xor_sync(~0u, e, 1);
    e += __shfl_xor_sync(~0u, e, 2);
    if (q4 == 0) total[unit][warp % 4][h] = e;  // of this warp's keys
    const float w0 = e0 * value_scale[0], w1 = e1 * value_scale[1];
    const __nv_bfloat162 high = __floats2bfloat162_rn(w0, w1);
    *(__nv_bfloat162*)((bf16*)weights[unit][0][h] + warp % 4 * 8 + 2 * q4) = high;
    *(__nv_bfloat162*)((bf16*)weights[unit][1][h] + warp % 4 * 8 + 2 * q4) = __floats2bfloat162_rn(w0 - __low2float(high), w1 - __high2float(high));
  }
  if (!F8) asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  // This warp's columns of weights times values.
  float acc[2][kTiles][4];
#pragma unroll
  for (int u = 0; u < 2; u++) {
#pragma unroll
    for (int i = 0; i < kTiles; i++) acc[u][i][0] = acc[u][i][1] = acc[u][i][2] = acc[u][i][3] = 0.0f;
#pragma unroll
    for (int kk = 0; kk < 2; kk++) {
      uint32_t a[2][4];
#pragma unroll
      for (int part = 0; part < 2; part++) {
        a[part][0] = *(const uint32_t*)(weights[u][part][g] + (kk * 16 + 2 * q4) * 2);
        a[part][1] = *(const uint32_t*)(weights[u][part][g + 8] + (kk * 16 + 2 * q4) * 2);
        a[part][2] = *(const uint32_t*)(weights[u][part][g] + (kk * 16 + 2 * q4 + 8) * 2);
        a[part][3] = *(const uint32_t*)(weights[u][part][g + 8] + (kk * 16 + 2 * q4 + 8) * 2);
      }
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        const uint32_t from =
            (uint32_t)__cvta_generic_to_shared(value) + (u * kKeys + kk * 16 + lane / 8 % 2 * 8 + lane % 8) * kPitch + (warp * 32 + j * 8 + lane / 16 * 8) * 2;
        uint32_t b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from) : "memory");
#pragma unroll
        for (int part = 0; part < 2; part++) {
          tensor_bf16(acc[u][j], a[part][0], a[part][1], a[part][2], a[part][3], b[0], b[1]);
          tensor_bf16(acc[u][j + 1], a[part][0], a[part][1], a[part][2], a[part][3], b[2], b[3]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t h = g + 8 * i;
    if (h >= group) continue;
    const uint64_t to = ((uint64_t)r * p.heads + kvh * group + h) * p.pairs + blockIdx.z;
    float sum[2];
#pragma unroll
    for (int u = 0; u < 2; u++) sum[u] = total[u][0][h] + total[u][1][h] + total[u][2][h] + total[u][3][h];
    float* out = p.partial + to * 256 + warp * 32 + 2 * q4;
    const Join two = join_of(top[0][i], top[1][i]);
#pragma unroll
    for (int j = 0; j < kTiles; j++)
      *(float2*)(out + j * 8) = make_float2(joined(two, acc[0][j][2 * i], acc[1][j][2 * i]), joined(two, acc[0][j][2 * i + 1], acc[1][j][2 * i + 1]));
    if (warp == 0 && q4 == 0) *(float2*)(p.sums + to * 2) = make_float2(two.top, joined(two, sum[0], sum[1]));
  }
}

NINFER_KERNEL(attend_pairs, AttendGroupParams, kGroup, 2) { attend_pairs_for<false>(p); }
NINFER_KERNEL(attend_pairs_fp8, AttendGroupParams, kGroup, 2) { attend_pairs_for<true>(p); }

static constexpr int kMerge = 256;       // 64 columns of a head, each by four threads
static constexpr uint32_t kPairs = 36;   // at most

NINFER_KERNEL(merge_pairs, MergeGroupParams, kMerge, 1) {
  __shared__ float part[4][64];
  if (p.trigger == 0) pdl_trigger();
  const uint32_t head = blockIdx.x, r = blockIdx.y, t = threadIdx.x, lane = t % 32, quarter = t / 64, c = blockIdx.z * 64 + t % 64;
  const uint64_t at = (uint64_t)r * p.heads + head, from = at * p.pairs;
  const float gate = quarter ? 0.0f : from_bf16(p.qg[at * 512 + 256 + c]);
  constexpr int kMine = kPairs / 4;  // pairs of a thread
  float mine[kMine];                 // asked for before their factors are known
  const uint32_t n = __ldcg(p.count + r), have = (n + 2 * kKeys - 1) / (2 * kKeys);
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
#pragma unroll
  for (int i = 0; i < kMine; i++) {
    const uint32_t pair = quarter + 4 * i;
    mine[i] = pair < have ? __ldcg(p.partial + (from + pair) * 256 + c) : 0.0f;
  }
  // Every warp looks at all pairs: lane l at pairs l and l + 32.
  float top[2], sum[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const uint32_t pair = lane + 32 * k;
    top[k] = -INFINITY, sum[k] = 0.0f;
    if (pair >= have) continue;
    const float2 q = __ldcg((const float2*)p.sums + from + pair);
    top[k] = q.x, sum[k] = q.y;
  }
  float all = fmaxf(top[0], top[1]);
#pragma unroll
  for (int o = 16; o; o >>= 1) all = fmaxf(all, __shfl_xor_sync(~0u, all, o));
  float e[2];
#pragma unroll
  for (int k = 0; k < 2; k++) e[k] = lane + 32 * k < have ? expf(top[k] - all) : 0.0f;
  const float weight = warp_sum(fmaf(e[1], sum[1], __fmul_rn(e[0], sum[0])));
  float v = 0.0f;
#pragma unroll
  for (int i = 0; i < kMine; i++) {
    const uint32_t pair = quarter + 4 * i;
    const int k = i < 8 ? 0 : 1;
    v = fmaf(__shfl_sync(~0u, e[k], pair % 32), mine[i], v);
  }
  part[quarter][t % 64] = v;
  if (p.trigger == 2) pdl_trigger();
  __syncthreads();
  if (quarter) return;
  p.out[at * 256 + c] = to_bf16((part[0][t] + part[1][t] + part[2][t] + part[3][t]) / weight * sigmoid(gate));
}
