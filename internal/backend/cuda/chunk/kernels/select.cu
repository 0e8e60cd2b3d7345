// Which blocks of four tokens a row attends to.
//
//   score_rows   index scores of the blocks that each row sees, 64 rows by 64 blocks at a time on tensor instructions. Grid: share of the blocks, 64 rows.
//   select_rows  the best blocks of a row, ties to the lower, and its tail, as bits. Grid: row.
//   unite_rows   the blocks that any row of a tile sees, in order. Grid: tile.
#include "common.cuh"

extern __shared__ __align__(128) uint8_t dynamic[];

static constexpr int kScore = 128;
static constexpr uint32_t kScoreRows = 64, kScoreKeys = 64;

NINFER_KERNEL(score_rows, ScoreRowsParams, kScore, 2) {
  __shared__ __align__(128) uint8_t buffer[2][kScoreKeys * 256];
  pdl();
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, q4 = lane % 4, first = blockIdx.y * kScoreRows;
  const uint32_t last = min(first + kScoreRows, p.rows) - 1, n = (p.base + last + 1) / 4;  // blocks that the last of these rows sees
  if (n <= p.most) return;
  const uint32_t tiles = (n + kScoreKeys - 1) / kScoreKeys;
  auto fetch = [&](uint32_t tile) {
    if (tile < tiles) {
      const uint32_t to = shared_at(buffer[tile / gridDim.x & 1]);
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        const uint32_t k = i * 8 + t / 16, b = tile * kScoreKeys + k, piece = t % 16;
        copy16(to + k * 256 + ((piece ^ (k & 7)) << 4), b < n ? p.keys + block_row(p.pages, b) * 128 + piece * 8 : p.keys, b < n);
      }
    }
    copies_commit();
  };
  fetch(blockIdx.x);
  // Queries of the warp's sixteen rows: rows g and g + 8 in this lane.
  const uint32_t r0 = first + warp * 16 + g, r1 = r0 + 8;
  uint32_t a[4][8][4];
#pragma unroll
  for (int h = 0; h < 4; h++)
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t r = i % 2 ? r1 : r0;
        a[h][k][i] = r < p.rows ? *(const uint32_t*)(p.iq + ((uint64_t)r * 4 + h) * 128 + k * 16 + i / 2 * 8 + 2 * q4) : 0;
      }
  const uint32_t n0 = r0 < p.rows ? (p.base + r0 + 1) / 4 : 0, n1 = r1 < p.rows ? (p.base + r1 + 1) / 4 : 0;
  const float scale = 1.0f / sqrtf(128.0f);
  const uint32_t rowB = (lane / 16 * 8 + lane % 8) * 256, cB = lane / 8 % 2, x7 = lane & 7;
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    fetch(tile + gridDim.x);
    copies_wait<1>();
    __syncthreads();
    const uint32_t keys = shared_at(buffer[tile / gridDim.x & 1]);
#pragma unroll 1
    for (uint32_t j = 0; j < kScoreKeys / 8; j += 2) {
      float acc[4][2][4] = {};
#pragma unroll
      for (uint32_t k = 0; k < 8; k++) {
        uint32_t b[4];
        matrices(b, keys + rowB + j * 8 * 256 + (((2 * k + cB) ^ x7) << 4));
#pragma unroll
        for (int h = 0; h < 4; h++) {
          tensor_bf16(acc[h][0], a[h][k], b[0], b[1]);
          tensor_bf16(acc[h][1], a[h][k], b[2], b[3]);
        }
      }
#pragma unroll
      for (uint32_t m = 0; m < 2; m++) {
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] = (fmaxf(acc[0][m][i], 0.0f) + fmaxf(acc[1][m][i], 0.0f) + fmaxf(acc[2][m][i], 0.0f) + fmaxf(acc[3][m][i], 0.0f)) * scale;
        const uint32_t b = tile * kScoreKeys + (j + m) * 8 + 2 * q4;  // the pitch is even
        if (b < n0) *(float2*)(p.scores + (uint64_t)r0 * p.ld + b) = make_float2(s[0], s[1]);
        if (b < n1) *(float2*)(p.scores + (uint64_t)r1 * p.ld + b) = make_float2(s[2], s[3]);
      }
    }
    __syncthreads();
  }
  copies_wait<0>();
}

static constexpr int kSelect = 256;
static constexpr uint32_t kBins = 2048, kTileRows = 15, kListed = 2048, kSampled = 8192;

// Scores are sums of what is not negative: their bits have the order of their values. A NaN is below all, and never taken before a number.
DEVICE uint32_t score_key(float f) { return f == f ? (__float_as_uint(f) & 0x7fffffffu) + 1 : 0; }

// Sum over the block of a value a thread, exclusive and in all. shared: a word a warp.
DEVICE uint32_t scan(uint32_t v, uint32_t* shared, uint32_t& all) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t s = v;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const uint32_t other = __shfl_up_sync(~0u, s, o);
    if (lane >= o) s += other;
  }
  __syncthreads();
  if (lane == 31) shared[warp] = s;
  __syncthreads();
  uint32_t before = 0;
  all = 0;
#pragma unroll
  for (uint32_t i = 0; i < kSelect / 32; i++) {
    if (i < warp) before += shared[i];
    all += shared[i];
  }
  return before + s - v;
}

// Thirty-two bins for every factor of two from 2^-40 to 2^24; what is smaller is in the lowest.
DEVICE uint32_t bin_of(uint32_t key) { return min(kBins - 1, max(key >> 18, 87u << 5) - (87u << 5)); }

// The bin in which the need-th largest is: how many are above it and in it. ~0 if all bins together have fewer; above is all of them then.
DEVICE uint32_t reach(const uint32_t* bins, uint32_t need, uint32_t* shared, uint32_t* found, uint32_t& above, uint32_t& inside) {
  const uint32_t top = kBins - 1 - threadIdx.x * 8;  // eight a thread, from the top
  uint32_t sum = 0, whole;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += bins[top - i];
  uint32_t before = scan(sum, shared, whole);
  if (threadIdx.x == 0) found[0] = ~0u, found[1] = whole, found[2] = 0;
  __syncthreads();
  if (before < need && before + sum >= need) {
    for (int i = 0; i < 8; i++) {
      const uint32_t in = bins[top - i];
      if (before + in >= need) {
        found[0] = top - i, found[1] = before, found[2] = in;
        break;
      }
      before += in;
    }
  }
  __syncthreads();
  above = found[1], inside = found[2];
  const uint32_t bin = found[0];
  __syncthreads();
  return bin;
}

// Adds the first need of the marked to what is taken.
DEVICE void first_of(uint32_t* taken, const uint32_t* marked, uint32_t* shared, uint32_t words, uint32_t need) {
  for (uint32_t from = 0; from < words && need; from += kSelect) {
    const uint32_t w = from + threadIdx.x;
    uint32_t tie = w < words ? marked[w] : 0, whole;
    uint32_t before = scan(__popc(tie), shared, whole), add = 0;
    while (tie && before < need) {
      add |= tie & -tie;
      tie &= tie - 1;
      before++;
    }
    if (add) taken[w] |= add;
    need -= min(need, whole);
    __syncthreads();
  }
}

// The best by eleven, eleven and ten bits of the keys, whatever they are.
DEVICE void radix(uint32_t* mine, uint32_t* ties, uint32_t* bins, uint32_t* shared, uint32_t* found, const float* scores, uint32_t n, uint32_t need) {
  const uint32_t t = threadIdx.x, lane = t % 32, words = (n + 31) / 32;
  uint32_t prefix = 0, known = 0;  // keys whose known bits are above prefix are taken, and need of those that have them equal
#pragma unroll 1
  for (int turn = 0; turn < 3; turn++) {
    const uint32_t shift = turn == 0 ? 21 : turn == 1 ? 10 : 0, width = turn == 2 ? 1024 : 2048;
    __syncthreads();
    for (uint32_t i = t; i < kBins; i += kSelect) bins[i] = 0;
    __syncthreads();
    for (uint32_t i = t; i < n; i += kSelect) {
      const uint32_t key = score_key(__ldcg(scores + i));
      if (key > 1 && (key & known) == prefix) atomicAdd(bins + (key >> shift & (width - 1)), 1);
    }
    __syncthreads();
    uint32_t above, inside;
    const uint32_t bin = reach(bins, need, shared, found, above, inside);  // there are enough: reached only so
    need -= above;
    prefix |= bin << shift, known |= (width - 1) << shift;
  }
  for (uint32_t w = t / 32; w < words; w += kSelect / 32) {
    const uint32_t i = w * 32 + lane, key = i < n ? score_key(__ldcg(scores + i)) : 0;
    const uint32_t taken = __ballot_sync(~0u, key > prefix), tie = __ballot_sync(~0u, key == prefix);
    if (lane == 0) mine[w] = taken, ties[w] = tie;
  }
  __syncthreads();
  first_of(mine, ties, shared, words, need);
}

// The best by bins of all scores: twice a look at all of them.
DEVICE void by_bins(uint32_t* mine, uint32_t* ties, uint2* list, uint32_t* bins, uint32_t* shared, uint32_t* found, uint32_t* listed, const float* scores, uint32_t n, uint32_t need) {
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32, words = (n + 31) / 32;
  for (uint32_t i = t; i < kBins; i += kSelect) bins[i] = 0;
  if (t == 0) *listed = 0;
  __syncthreads();
#pragma unroll 2
  for (uint32_t i = t * 4; i < n; i += kSelect * 4) {
    const float4 f = __ldcg((const float4*)(scores + i));
    const float v[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
      const uint32_t key = score_key(v[j]);
      if (i + j < n && key > 1) atomicAdd(bins + bin_of(key), 1);  // zeros and NaN are many and last
    }
  }
  __syncthreads();
  uint32_t above, inside;
  const uint32_t bin = reach(bins, need, shared, found, above, inside);
  if (inside > kListed) {
    radix(mine, ties, bins, shared, found, scores, n, need);  // many alike, or of no ordinary size
  } else {
    // What is in a higher bin is taken, what is in this one is listed. No bin: fewer than enough above zero, and zeros are listed.
    need -= above;
#pragma unroll 4
    for (uint32_t w = warp; w < words; w += kSelect / 32) {
      const uint32_t i = w * 32 + lane, key = i < n ? score_key(__ldcg(scores + i)) : 0;
      const bool higher = key > 1 && (bin == ~0u || bin_of(key) > bin), here = bin == ~0u ? key == 1 : key > 1 && bin_of(key) == bin;
      const uint32_t taken = __ballot_sync(~0u, higher), equal = __ballot_sync(~0u, here);
      if (lane == 0) mine[w] = taken, ties[w] = equal;
      if (bin != ~0u && here) {
        const uint32_t to = atomicAdd(listed, 1);
        list[to] = make_uint2(key, i);
      }
    }
    __syncthreads();
    if (bin == ~0u) {
      first_of(mine, ties, shared, words, need);
    } else {
      for (uint32_t i = t; i < inside; i += kSelect) {
        const uint2 own = list[i];
        uint32_t better = 0;
        for (uint32_t j = 0; j < inside; j++) {
          const uint2 other = list[j];
          better += other.x > own.x || (other.x == own.x && other.y < own.y);
        }
        if (better < need) atomicOr(mine + own.y / 32, 1u << own.y % 32);
      }
    }
  }
}

// A sample of 2,048 scores says about where the need-th largest is; what is not below is listed in one look at all of them, and the best of the list are
// taken. False, and nothing taken, where the list is too short or too long for that.
DEVICE bool by_sample(uint32_t* mine, uint2* list, uint32_t* bins, uint32_t* shared, uint32_t* found, uint32_t* listed, const float* scores, uint32_t n, uint32_t need) {
  const uint32_t t = threadIdx.x, apart = n / 1024 & ~1u;
  for (uint32_t i = t; i < kBins; i += kSelect) bins[i] = 0;
  if (t == 0) *listed = 0;
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < 1024 / kSelect; i++) {
    const float2 f = __ldcg((const float2*)(scores + (i * kSelect + t) * apart));
    const uint32_t a = score_key(f.x), b = score_key(f.y);
    if (a > 1) atomicAdd(bins + bin_of(a), 1);
    if (b > 1) atomicAdd(bins + bin_of(b), 1);
  }
  __syncthreads();
  const float expected = need * 2048.0f / n;
  uint32_t above, inside, bin = reach(bins, (uint32_t)(expected + 4.0f * sqrtf(expected)) + 1, shared, found, above, inside);
  if (bin == ~0u || bin == 0) return false;
  const float least = __uint_as_float(((bin + (87u << 5)) << 18) - 1);  // the smallest that is in this bin
#pragma unroll 4
  for (uint32_t i = t * 4; i < n; i += kSelect * 4) {
    const float4 f = __ldcg((const float4*)(scores + i));
    const float v[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
      if (v[j] >= least && i + j < n) {
        const uint32_t to = atomicAdd(listed, 1);
        if (to < kListed) list[to] = make_uint2(score_key(v[j]), i + j);
      }
  }
  for (uint32_t i = t; i < kBins; i += kSelect) bins[i] = 0;
  __syncthreads();
  const uint32_t m = *listed;
  __syncthreads();
  if (m < need || m > kListed) return false;
  for (uint32_t i = t; i < m; i += kSelect) atomicAdd(bins + bin_of(list[i].x), 1);
  __syncthreads();
  bin = reach(bins, need, shared, found, above, inside);
  if (inside > kBins / 2) return false;
  need -= above;
  uint2* const same = (uint2*)bins;  // what is in that bin
  if (t == 0) *listed = 0;
  __syncthreads();
  for (uint32_t i = t; i < m; i += kSelect) {
    const uint2 own = list[i];
    const uint32_t b = bin_of(own.x);
    if (b > bin) atomicOr(mine + own.y / 32, 1u << own.y % 32);
    else if (b == bin) same[atomicAdd(listed, 1)] = own;
  }
  __syncthreads();
  for (uint32_t i = t; i < inside; i += kSelect) {
    const uint2 own = same[i];
    uint32_t better = 0;
    for (uint32_t j = 0; j < inside; j++) {
      const uint2 other = same[j];
      better += other.x > own.x || (other.x == own.x && other.y < own.y);
    }
    if (better < need) atomicOr(mine + own.y / 32, 1u << own.y % 32);
  }
  return true;
}

NINFER_KERNEL(select_rows, SelectRowsParams, kSelect, 6) {
  __shared__ __align__(8) uint32_t bins[kBins], shared[kSelect / 32], found[3], listed;
  __shared__ uint2 list[kListed];
  uint32_t* const mine = (uint32_t*)dynamic;  // [words]
  uint32_t* const ties = mine + p.words;
  pdl();
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32, r = blockIdx.x, visible = p.base + r + 1, n = visible / 4;
  for (uint32_t i = t; i < p.words; i += kSelect) mine[i] = 0;
  __syncthreads();
  if (p.forced && p.forced_count[r] != ~0u) {
    for (uint32_t i = t; i < p.forced_count[r]; i += kSelect) {
      const uint32_t b = p.forced[(uint64_t)r * p.forced_ld + i] / 4;
      if (b < p.words * 32) atomicOr(mine + b / 32, 1u << b % 32);
    }
  } else if (n <= p.most) {
    for (uint32_t i = t; i < (visible + 3) / 4; i += kSelect) atomicOr(mine + i / 32, 1u << i % 32);
  } else {
    const float* scores = p.scores + (uint64_t)r * p.ld;
    if (n < kSampled || !by_sample(mine, list, bins, shared, found, &listed, scores, n, p.most)) by_bins(mine, ties, list, bins, shared, found, &listed, scores, n, p.most);
    __syncthreads();
    if (t == 0 && visible % 4) mine[n / 32] |= 1u << n % 32;  // the tail
  }
  __syncthreads();
  for (uint32_t i = t; i < p.words; i += kSelect) p.bits[(uint64_t)r * p.words + i] = mine[i];
  if (!p.seen) return;
  uint32_t base = 0;
  for (uint32_t from = 0; from < p.words; from += kSelect) {
    const uint32_t w = from + t;
    uint32_t word = w < p.words ? mine[w] : 0, whole, count = 0;
    for (uint32_t v = word; v; v &= v - 1) count += min(4u, visible - min(visible, (w * 32 + __ffs(v) - 1) * 4));
    uint32_t to = base + scan(count, shared, whole);
    for (; word; word &= word - 1) {
      const uint32_t b = w * 32 + __ffs(word) - 1;
      for (uint32_t i = b * 4; i < min(b * 4 + 4, visible); i++, to++)
        if (to < p.seen_ld) p.seen[(uint64_t)r * p.seen_ld + to] = i;
    }
    base += whole;
    __syncthreads();
  }
  if (t == 0) p.seen_count[r] = base;
}

NINFER_KERNEL(unite_rows, UniteRowsParams, kSelect, 6) {
  __shared__ uint32_t shared[kSelect / 32];
  pdl();
  const uint32_t first = blockIdx.x * p.tile, rows = min(p.tile, p.rows - first);
  const uint32_t* bits = p.bits + (uint64_t)first * p.words;
  uint32_t base = 0;
  for (uint32_t from = 0; from < p.words; from += kSelect) {
    const uint32_t w = from + threadIdx.x;
    uint32_t word[kTileRows], any = 0, whole;
#pragma unroll
    for (uint32_t row = 0; row < kTileRows; row++) {
      word[row] = row < rows && w < p.words ? __ldcg(bits + (uint64_t)row * p.words + w) : 0;
      any |= word[row];
    }
    uint32_t to = base + scan(__popc(any), shared, whole);
    for (; any; any &= any - 1) {
      const uint32_t i = __ffs(any) - 1;
      uint32_t mask = 0;
#pragma unroll
      for (uint32_t row = 0; row < kTileRows; row++) mask |= (word[row] >> i & 1) << row;
      if (to < p.list_ld) p.list[(uint64_t)blockIdx.x * p.list_ld + to] = (w * 32 + i) | mask << kMaskShift;
      to++;
    }
    base += whole;
    __syncthreads();
  }
  if (threadIdx.x == 0) p.count[blockIdx.x] = min(base, p.list_ld);
}
