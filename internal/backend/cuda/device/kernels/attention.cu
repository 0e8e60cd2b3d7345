// Attention of few rows over selected tokens, for the shapes of real models: index heads of 128, heads of 256, up to sixteen queries a key.
//
//   attend_pairs   a row's attention for all queries of a key head, two units of 32 tokens a block, whose sums it joins: tensor instructions, scores and
//                  sums in FP32, weights as a BF16 part and what that leaves. attend_pairs_fp8: keys and values are E4M3 with a scale. Grid: key head,
//                  row, pair.
//   merge_pairs    all pairs of a head, times the output gate. Grid: head, row, half of the head.
//   select_shared  where the tokens are that a row attends to, ascending: best blocks, ties to the lower, and the tail. Any shape, up to 65,536 blocks, by
//                  a cluster of eight blocks. Grid: 8, row.
//   select_blocks  the same of kSegment blocks at most, by one block, for rows of which not all clusters would find room. Grid: 1, row.
//
// A row's sums depend on its own list only: company changes nothing.
#include "select.cuh"

// What a kernel reads before its wait: rows, page tables and whatever the kernel before the last has made. The one before this has waited
// before it let this one start.

// A selection runs through its code once: what takes its time is fetching instructions. Keys stay with the thread that has them, four next to each other.
static constexpr int kSelect = 1024;           // threads
static_assert(kSegment == 4 * kSelect);

struct SelectRoom {
  __align__(16) uint32_t key[kSegment];  // only where keys are chosen bit by bit
  __align__(16) uint32_t bins[kBins];
  uint32_t mask[kSegment / 32];  // of 32 keys: which are taken; the same
  uint32_t high[kSelect / 32], scan[kSelect / 32], found[3], n;
  uint2 near[kNear];  // key and place
};

// Which of this thread's four keys are among the best `most` of the block's, more than as many; ties to the lower place. Bins are zero before.
DEVICE uint32_t choose(SelectRoom& room, const uint32_t* key, uint32_t valid, uint32_t most) {
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32;
  const uint32_t high = __reduce_max_sync(~0u, max(max(key[0], key[1]), max(key[2], key[3])));
  if (lane == 0) room.high[warp] = high;
  __syncthreads();
  Window window(__reduce_max_sync(~0u, room.high[lane]));
  uint32_t need = most, count;
#pragma unroll 1
  for (;;) {
    const uint32_t base = window.base, width = window.top - base, shift = window.shift();
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t d = key[i] - base;
      count_in(room.bins + (d >> shift), d < width);
    }
    __syncthreads();
    // From the largest on, four bins a thread, as far as they go.
    const bool scans = t < kBins / 4;
    const uint32_t at = scans ? kBins - 4 * (t + 1) : 0;
    const uint4 v = scans ? *(const uint4*)(room.bins + at) : make_uint4(0, 0, 0, 0);
    const uint32_t own = v.x + v.y + (v.z + v.w), sum = warp_through(own);
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
    } else if (t == kBins / 4 - 1 && above + own < need) {
      room.found[1] = need - above - own, room.found[2] = 0;  // all of the window is taken
    }
    __syncthreads();
    if (!window.follow(room.found, need, count)) continue;
    if (need == count || count <= kNear) break;
    if (shift == 0) {
      *(uint4*)(room.key + 4 * t) = make_uint4(key[0], key[1], key[2], key[3]);
      __syncthreads();
      choose_slowly<kSelect / 32>(room, valid, most);
      __syncthreads();
      return 4 * t < valid ? room.mask[t / 8] >> t % 8 * 4 & 15 : 0;
    }
  }
  const uint32_t least = need == count ? window.base : window.top;  // to be taken in any case
  uint32_t taken = 0, close = 0;
#pragma unroll
  for (uint32_t i = 0; i < 4; i++) {
    if (key[i] >= least) {
      taken |= 1u << i;
    } else if (key[i] >= window.base) {
      room.near[atomicAdd(&room.n, 1u)] = make_uint2(key[i], 4 * t + i);
      close |= 1u << i;
    }
  }
  if (need == count) return taken;
  __syncthreads();
#pragma unroll 1
  for (; close; close &= close - 1) {
    const uint32_t i = __ffs(close) - 1, mine = i < 2 ? i == 0 ? key[0] : key[1] : i == 2 ? key[2] : key[3];
    uint32_t better = 0;
#pragma unroll 1
    for (uint32_t j = 0; j < count; j++) {
      const uint2 other = room.near[j];
      better += other.x > mine || other.x == mine && other.y < 4 * t + i;
    }
    if (better < need) taken |= 1u << i;
  }
  return taken;
}

NINFER_KERNEL(select_blocks, SelectParams, kSelect, 1) {
  __shared__ SelectRoom room;
  const uint32_t r = blockIdx.y, t = threadIdx.x;
  const Row row = p.rows[r];
  const uint32_t visible = row.at + 1, n = visible / p.ratio;
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  uint32_t* list = p.list + (uint64_t)r * p.list_ld;
  if (n <= p.most) {
    pdl();
    list_all<kSelect>(list, p, pages, r, visible, t);
    return;
  }
  const uint32_t tail = visible - n * p.ratio, end = t < tail ? token_row(pages, n * p.ratio + t) : 0;
  const uint32_t live = (1u << min(n - min(n, 4 * t), 4u)) - 1;
  uint32_t id = 0;
  if (p.ratio == 4 && live) id = pages[16 * t / kPage] * kPage + 16 * t % kPage;
  if (t < kBins / 4) *(uint4*)(room.bins + 4 * t) = make_uint4(0, 0, 0, 0);
  if (t == 0) room.n = 0;
  const float4* scores = (const float4*)(p.scores + (uint64_t)r * p.blocks) + t;
  pdl();
  if (t < tail) list[p.most * p.ratio + t] = end;
  if (t == 0) p.count[r] = p.most * p.ratio + tail;
  float4 score = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (live) score = __ldcg(scores);
  uint32_t key[4], all;
  keys_of(score, live, key);
  const uint32_t taken = choose(room, key, n, p.most);
  const uint32_t e = block_before<kSelect / 32>(room.scan, __popc(taken), all);
  list_taken(list, p, pages, taken, e, 4 * t, id);
}

// Eight blocks of a cluster share a row's scores. Of up to 8,192 keys kFewWarps warps of each take some.
static constexpr uint32_t kShareNear = 64, kFewWarps = 8;

// What is known of the last key to be taken: the window that it is in, a bin once it has been found in one, how many keys of that are to be taken, how many it
// has (0: it is in no bin), and of those of blocks before this one how many are in larger bins, and in this.
struct Found {
  Window window;
  uint32_t need, count, before, ahead;
};

template <uint32_t W>  // warps
struct ShareRoom {
  union {
    __align__(16) uint32_t key[256 * W];  // only where keys are chosen bit by bit
    uint2 id[32 * W];                     // of a thread's keys: the row of the first token of each four blocks
  };
  __align__(16) uint32_t bins[kBins];
  __align__(16) uint32_t groups[2][kShare][kBins / 32];  // keys in 32 bins each, of all blocks, of this pass and the one before
  uint32_t fine[kShare][32];                             // of the bins of one group, from the largest on
  Found found;
  uint2 near[kShareNear];            // key and place
  uint32_t mask[8 * W];              // of 32 keys: which are taken, where they are chosen bit by bit
  uint32_t late[8 * W];              // of a thread's keys, eight bits: which of the last bin's are taken
  __align__(8) uint2 range[kShare];  // of a block: the largest key, and a bound
  __align__(8) uint64_t came[5];     // what other blocks send: range, groups of two passes, fine, near
  uint32_t sums[2][kShare], scan[W], least[W], n, earlier, from, valid;
};

// Sums over the cluster's blocks of v of each thread: of all, and of those before this one. step: sums before this one.
template <uint32_t W>
DEVICE uint32_t share_sum(ShareRoom<W>& room, uint32_t rank, uint32_t v, uint32_t step, uint32_t& before) {
  v = __reduce_add_sync(~0u, v);
  if (threadIdx.x % 32 == 0) room.scan[threadIdx.x / 32] = v;
  meet<W>();
  if (threadIdx.x < 32) {
    v = __reduce_add_sync(~0u, threadIdx.x < W ? room.scan[threadIdx.x] : 0);
    if (threadIdx.x < kShare) put(there(&room.sums[step % 2][rank], threadIdx.x), v);
  }
  share_arrive();
  share_wait();
  uint32_t all = 0;
  before = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < kShare; i++) {
    if (i == rank) before = all;
    all += room.sums[step % 2][i];
  }
  return all;
}

// Marks which of this block's keys are among the best, and says how many of other blocks come before them: bit by bit, whatever keys these are.
template <uint32_t W>
__device__ __noinline__ uint32_t share_slowly(ShareRoom<W>& room, uint32_t rank, uint32_t valid, uint32_t most) {
  const uint32_t t = threadIdx.x;
  uint32_t threshold = 0, before, step = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t next = threshold | 1u << bit;
    uint32_t n = 0;
    for (uint32_t i = t; i < valid; i += 32 * W) n += room.key[i] >= next;
    if (share_sum<W>(room, rank, n, step++, before) >= most) threshold = next;
  }
  uint32_t larger = 0, equal = 0;
  for (uint32_t i = t; i - t % 32 < valid; i += 32 * W) {
    const bool more = i < valid && room.key[i] > threshold, same = i < valid && room.key[i] == threshold;
    const uint32_t votes = __ballot_sync(~0u, more), ties = __ballot_sync(~0u, same);
    if (t % 32 == 0) room.mask[i / 32] = votes, room.bins[i / 32] = ties;
    larger += more, equal += same;
  }
  uint32_t before_equal;
  const uint32_t all = share_sum<W>(room, rank, larger, step++, before);
  share_sum<W>(room, rank, equal, step++, before_equal);
  const uint32_t need = most - all, gone = min(need, before_equal);
  if (t == 0) {
    uint32_t left = need - gone;
    for (uint32_t w = 0; left && w * 32 < valid; w++)
      for (uint32_t ties = room.bins[w]; ties && left; ties &= ties - 1, left--) room.mask[w] |= ties & -ties;
  }
  return before + gone;
}

// Which of a thread's 4 G keys there are, of so many.
template <uint32_t W, uint32_t G>
DEVICE uint32_t live_of(uint32_t valid) {
  const uint32_t t = threadIdx.x;
  return (1u << min(valid - min(valid, 4 * t), 4u)) - 1 | (G > 1 ? (1u << min(valid - min(valid, 128 * W + 4 * t), 4u)) - 1 << 4 : 0);
}

// Rows of the first tokens of the four blocks of four tokens from block on, and, where G is 2, of the four 128 * W further on, as far as there are any.
template <uint32_t W, uint32_t G>
DEVICE uint2 first_rows(const SelectParams& p, const uint32_t* pages, uint32_t block, uint32_t live) {
  const uint32_t at = block * 4;
  uint2 id = make_uint2(0, 0);
  if (p.ratio == 4 && (live & 1)) id.x = pages[at / kPage] * kPage + at % kPage;
  if (G > 1 && p.ratio == 4 && (live >> 4 & 1)) id.y = pages[at / kPage + 512 * W / kPage] * kPage + at % kPage;
  return id;
}

extern "C" __global__ void __cluster_dims__(kShare, 1, 1) select_shared(const __grid_constant__ SelectParams p);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
static constexpr int kShareBlocks = 2;  // in few registers, so that a block finds room beside one of prep_score
#else
static constexpr int kShareBlocks = 1;
#endif

// A selection by the first W warps of a cluster's blocks, from `per` keys each: a thread has four next to each other, and four more 128 * W further on where G
// is 2. The others leave: warps without keys go through the code as well, which takes the SM's time.
template <uint32_t W, uint32_t G>
DEVICE void select_by(ShareRoom<W>& room, const SelectParams& p, const Row& row, uint32_t n, uint32_t per) {
  constexpr uint32_t kStep = 128 * W, kThreads = 32 * W;
  const uint32_t r = blockIdx.y, rank = blockIdx.x, t = threadIdx.x, warp = t / 32, lane = t % 32, visible = row.at + 1;
  if (t >= kThreads) return;
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  uint32_t* list = p.list + (uint64_t)r * p.list_ld;
  if (t == 0) {
#pragma unroll
    for (uint32_t i = 0; i < 5; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((uint32_t)__cvta_generic_to_shared(room.came + i)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    expect(room.came, kShare * 8), expect(room.came + 1, kShare * kBins / 32 * 4), expect(room.came + 3, kShare * 32 * 4);
  }
  __syncwarp();
  share_arrive();  // a block's shared memory is written once it has begun
  const uint32_t tail = visible - n * p.ratio, end = t < tail ? token_row(pages, n * p.ratio + t) : 0;
  const uint32_t from = min(n, rank * per), valid = min(n - from, per);
  const uint32_t live = live_of<W, G>(valid);
  room.id[t] = first_rows<W, G>(p, pages, from + 4 * t, live);
  auto clear = [&]() {
#pragma unroll
    for (uint32_t i = 0; i < kBins / 4; i += kThreads)
      if (kThreads <= kBins / 4 || t < kBins / 4) *(uint4*)(room.bins + 4 * (t + i)) = make_uint4(0, 0, 0, 0);
  };
  clear();
  if (t < kThreads / 4) room.late[t] = 0;
  if (t == 0) room.n = room.earlier = room.found.before = 0, room.from = from, room.valid = valid;
  const float4* scores = (const float4*)(p.scores + (uint64_t)r * p.blocks + from) + t;
  pdl();
  if (rank == 0 && t < tail) list[p.most * p.ratio + t] = end;
  if (rank == 0 && t == 0) p.count[r] = p.most * p.ratio + tail;
  uint32_t key[4 * G];
  {
    float4 score[2] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
    if (live & 1) score[0] = __ldcg(scores);
    if (G > 1 && (live >> 4 & 1)) score[1] = __ldcg(scores + 32 * W);
    keys_of(score[0], live, key);
    if (G > 1) keys_of(score[1], live >> 4, key + 4 * (G - 1));
  }
  uint32_t high = max(max(key[0], key[1]), max(key[2], key[3]));
#pragma unroll
  for (uint32_t i = 4; i < 4 * G; i++) high = max(high, key[i]);
  // Where eight threads next to each other are as many times as there are keys to take, none below the least of their largest is taken.
  uint32_t least = high;
#pragma unroll
  for (int o = 1; o < 8; o <<= 1) least = max(least, __shfl_xor_sync(~0u, least, o));
  if (t / 8 * 32 >= valid) least = ~0u;
  const uint32_t full = n / per, rest = n - full * per;
  if (full * (min(per, kStep) / 32) + (min(rest, kStep) + 31) / 32 < p.most) least = 0;
  high = __reduce_max_sync(~0u, high), least = __reduce_min_sync(~0u, least);
  if (lane == 0) room.scan[warp] = high, room.least[warp] = least;
  meet<W>();
  share_wait();
  if (warp == 0) {
    high = __reduce_max_sync(~0u, room.scan[lane % W]), least = __reduce_min_sync(~0u, room.least[lane % W]);
    if (lane < kShare) send(there(&room.range[rank], lane), high, least, there(room.came, lane));
  }
  await(room.came, 0);
  const uint2 range = room.range[lane % kShare];
  Window window(__reduce_max_sync(~0u, range.x));
  window.base = max(window.base, __reduce_min_sync(~0u, range.y));
  if (t == 0) room.found.window = window;
  uint32_t need = p.most, count, fines = 0;
  bool slow = false;
#pragma unroll 1
  for (uint32_t pass = 0;; pass++) {
    const uint32_t base = window.base, width = window.top - base, shift = window.shift();
#pragma unroll
    for (uint32_t i = 0; i < 4 * G; i++) {
      const uint32_t d = key[i] - base;
      count_in(room.bins + (d >> shift), d < width);
    }
    meet<W>();
    auto& groups = room.groups[pass & 1];
    uint64_t* came = room.came + 1 + (pass & 1);
#pragma unroll
    for (uint32_t of = 0; of < kBins / 64; of += W) {
      const uint32_t i = warp + of, a = __reduce_add_sync(~0u, room.bins[i * 64 + lane]), b = __reduce_add_sync(~0u, room.bins[i * 64 + 32 + lane]);
      if (lane < kShare) send(there(&groups[rank][i * 2], lane), a, b, there(came, lane));
    }
    // From the largest on, by as few warps as can be: the group, two a lane, whose bins each of eight warps sends to a block, then the bin of it.
    if (warp < kShare) {
      await(came, pass >> 1);
      const uint32_t at = 62 - 2 * lane;
      uint32_t own[2] = {0, 0}, mine[2] = {0, 0};  // of all blocks, of those before this one
#pragma unroll
      for (uint32_t i = 0; i < kShare; i++) {
        const uint2 v = *(const uint2*)&groups[i][at];
        own[0] += v.y, own[1] += v.x;
        if (i < rank) mine[0] += v.y, mine[1] += v.x;
      }
      const uint32_t sum = warp_through(own[0] + own[1]);
      uint32_t above = sum - own[0] - own[1];
      const uint32_t reach = __ballot_sync(~0u, sum >= need);
      if (reach) {
        const uint32_t who = __ffs(reach) - 1;
        const bool second = above + own[0] < need;
        const uint32_t group = __shfl_sync(~0u, second ? at : at + 1, who);
        send(there(&room.fine[rank][lane], warp), room.bins[group * 32 + 31 - lane], there(room.came + 3, warp));
        if (warp == 0) {
          above = __shfl_sync(~0u, second ? above + own[0] : above, who);
          uint32_t prior = __reduce_add_sync(~0u, (at + 1 > group ? mine[0] : 0) + (at > group ? mine[1] : 0));
          await(room.came + 3, fines);
          uint32_t total = 0, own_prior = 0;  // of bin 31 - lane of the group
#pragma unroll
          for (uint32_t i = 0; i < kShare; i++) {
            const uint32_t v = room.fine[i][lane];
            total += v;
            if (i < rank) own_prior += v;
          }
          const uint32_t through = warp_through(total);
          const uint32_t bin = __ffs(__ballot_sync(~0u, above + through >= need)) - 1;
          prior += __reduce_add_sync(~0u, lane < bin ? own_prior : 0);
          if (lane == bin) {
            room.found.window.narrow(group * 32 + 31 - bin);
            room.found.need = need - above - (through - total), room.found.count = total, room.found.before += prior, room.found.ahead = own_prior;
          }
        }
      } else if (warp == 0) {  // all of the window is taken
        const uint32_t prior = __reduce_add_sync(~0u, mine[0] + mine[1]);
        if (lane == 31) room.found.window.lower(), room.found.need = need - sum, room.found.count = 0, room.found.before += prior;
      }
    }
    meet<W>();
    window = room.found.window, need = room.found.need, count = room.found.count;
    if (count) {
      if (need == count || count <= kShareNear) break;
      slow = window.top - window.base == 1;
      if (slow) break;
      fines++;
    }
    if (t == 0) {
      expect(room.came + 1 + (~pass & 1), kShare * kBins / 32 * 4);
      if (count) expect(room.came + 3, kShare * 32 * 4);
    }
    clear();
    meet<W>();
  }
  uint32_t taken = 0, before;
  if (slow) {
    meet<W>();
    *(uint4*)(room.key + 4 * t) = make_uint4(key[0], key[1], key[2], key[3]);
    if (G > 1) *(uint4*)(room.key + kStep + 4 * t) = make_uint4(key[4 * G - 4], key[4 * G - 3], key[4 * G - 2], key[4 * G - 1]);
    share_arrive();
    share_wait();
    before = share_slowly<W>(room, rank, room.valid, p.most);
    share_arrive();
    share_wait();
    taken = (room.mask[t / 8] >> t % 8 * 4 & 15 | (room.mask[kStep / 32 + t / 8] >> t % 8 * 4 & 15) << 4) & live_of<W, G>(room.valid);
    room.id[t] = first_rows<W, G>(p, p.pages + (uint64_t)p.rows[r].slot * p.pages_ld, room.from + 4 * t, live_of<W, G>(room.valid));
  } else {
    const uint32_t sure = need == count ? window.base : window.top;  // to be taken in any case
    uint32_t close = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4 * G; i++) {
      if (key[i] >= sure) taken |= 1u << i;
      else if (key[i] >= window.base) close |= 1u << i;
    }
    before = room.found.before;
    if (need == count) {
      before += room.found.ahead;
    } else {
      if (t == 0) expect(room.came + 4, count * 8);
#pragma unroll 1
      for (; close; close &= close - 1) {
        const uint32_t i = __ffs(close) - 1, k = i & 3, e = room.found.ahead + atomicAdd(&room.n, 1u);
        const uint32_t a = i < 4 ? key[0] : key[4 * G - 4], b = i < 4 ? key[1] : key[4 * G - 3], c = i < 4 ? key[2] : key[4 * G - 2], d = i < 4 ? key[3] : key[4 * G - 1];
        const uint32_t own = k < 2 ? k == 0 ? a : b : k == 2 ? c : d;
#pragma unroll 1
        for (uint32_t j = 0; j < kShare; j++) send(there(room.near + e, j), own, room.from + i / 4 * kStep + 4 * t + k, there(room.came + 4, j));
      }
      __syncwarp();
      if (t < (count + 31) / 32 * 32) {
        await(room.came + 4, 0);
        if (t < count) {
          const uint2 own = room.near[t];
          uint32_t better = 0;
#pragma unroll 1
          for (uint32_t j = 0; j < count; j++) {
            const uint2 other = room.near[j];
            better += other.x > own.x || other.x == own.x && other.y < own.y;
          }
          if (better < need) {
            const uint32_t place = own.y - room.from;
            if (own.y < room.from) atomicAdd(&room.earlier, 1u);
            else if (place < room.valid) atomicOr(room.late + place % kStep / 16, 1u << (place % 16 / 4 * 8 + place / kStep * 4 + place % 4));
          }
        }
      }
      meet<W>();
      taken |= room.late[t / 4] >> t % 4 * 8 & 255;
    }
  }
  uint32_t all;
  const uint32_t places = block_before<W>(room.scan, __popc(taken & 15) | __popc(taken >> 4) << 16, all);
  before += room.earlier;
  const uint32_t* again = p.pages + (uint64_t)(p.ratio == 4 ? 0 : p.rows[r].slot) * p.pages_ld;
  const uint2 id = room.id[t];
  list_taken(p.list + (uint64_t)r * p.list_ld, p, again, taken & 15, before + (places & 0xffff), room.from + 4 * t, id.x);
  if (G > 1) list_taken(p.list + (uint64_t)r * p.list_ld, p, again, taken >> 4, before + (all & 0xffff) + (places >> 16), room.from + kStep + 4 * t, id.y);
}

NINFER_KERNEL(select_shared, SelectParams, kSelect, kShareBlocks) {
  const uint32_t r = blockIdx.y, rank = blockIdx.x, t = threadIdx.x;
  const Row row = p.rows[r];
  const uint32_t visible = row.at + 1, n = visible / p.ratio;
  if (n <= p.most) {
    pdl();
    if (rank) return;
    const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
    uint32_t* list = p.list + (uint64_t)r * p.list_ld;
    list_all<kSelect>(list, p, pages, r, visible, t);
    return;
  }
  const uint32_t per = (n + kShare * 128 - 1) / (kShare * 128) * 128;
  __shared__ union Room {
    ShareRoom<kSelect / 32> all;
    ShareRoom<kFewWarps> few;
  } room;
  if (per <= 128 * kFewWarps) select_by<kFewWarps, 1>(room.few, p, row, n, per);
  else select_by<kSelect / 32, 2>(room.all, p, row, n, per);
}

static constexpr int kGroup = 256;
static constexpr uint32_t kKeys = 32;            // tokens at a time
static constexpr uint32_t kPitch = 256 * 2 + 16;  // bytes of a query in shared memory
static constexpr uint32_t kTile = 2 * kKeys * 512;  // keys or values of a pair: a row's pieces of 16 bytes in another order in each of eight rows

// What the number of a piece of row i is changed by: eight rows' same pieces are in eight banks, and so are four next to each other of two rows.
DEVICE uint32_t turned_chunk(uint32_t i) { return (i & 1) << 2 | i >> 1; }

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
  __shared__ __align__(16) uint8_t query[16 * kPitch];
  typedef uint8_t Weights[2][16][kKeys * 2 + 16];
  Weights* weights = (Weights*)query;  // of both units, when the queries have been read
  static_assert(2 * sizeof(Weights) <= sizeof(query));
  __shared__ float most[2][4][16], total[2][4][16];
  extern __shared__ __align__(128) uint8_t value[];  // values, and of BF16 the keys behind them
  uint8_t* tile = value + kTile;
  const uint32_t kvh = blockIdx.x, r = blockIdx.y, t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, q4 = lane % 4, unit = warp / 4;
  const uint32_t group = p.heads / p.kv, begin = blockIdx.z * 2 * kKeys;
  const uint32_t* list = p.list + (uint64_t)r * p.list_ld;
  if (!p.late)
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
  if (p.late) {
#pragma unroll
    for (uint32_t i = t; i < 16 * 32; i += kGroup) {
      const uint32_t h = i / 32;
      copy16(query + h * kPitch + i % 32 * 16, p.q + ((uint64_t)r * p.heads + kvh * group + min(h, group - 1)) * 256 + i % 32 * 8, h < group);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  constexpr int kChunks = F8 ? 4 : 8, kRoll = F8 ? 4 : 2;  // of 64 bytes of a key
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
    // Keys, of which a warp reads its own only, then values: a row at a time, whole lines. In few instructions, since they are new to the SM.
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
      const uint8_t* plane = (const uint8_t*)(half ? p.values : p.keys) + lane * 16;
      uint8_t* to = (half ? value : tile) + warp * 8 * 512;
#pragma unroll 1
      for (int i = 0; i < 8; i++) {
        const uint32_t row = __shfl_sync(~0u, of_key, 4 * i);
        const bool on = begin + warp * 8 + i < n;
        copy16(to + i * 512 + (lane ^ turned_chunk(i)) * 16, plane + ((uint64_t)(on ? row : 0) * p.kv + kvh) * 512, on);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
  }
  if (p.late) asm volatile("cp.async.wait_group %0;" ::"n"(F8 ? 0 : 2) : "memory");
  __syncthreads();  // the queries are there
  if (!F8) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
  }
  float s[4][4];
#pragma unroll
  for (int c = 0; c < 4; c++) s[c][0] = s[c][1] = s[c][2] = s[c][3] = 0.0f;
#pragma unroll kRoll
  for (int c = 0; c < kChunks; c++) {
    const uint4 own = F8 ? key[F8 ? c : 0] : *(const uint4*)(tile + (warp * 8 + g) * 512 + (c * 4 + q4 ^ turned_chunk(g)) * 16);
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
      uint8_t* to = value + t / 4 * 512;
      const uint32_t chunk = (t % 4 + 4 * i) * 2 ^ turned_chunk(t / 4 % 8);
      *(uint4*)(to + chunk * 16) = make_uint4(w[0], w[1], w[2], w[3]);
      *(uint4*)(to + (chunk ^ 1) * 16) = make_uint4(w[4], w[5], w[6], w[7]);
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
#pragma unroll 1
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
            (uint32_t)__cvta_generic_to_shared(value) + (u * kKeys + kk * 16 + lane % 16) * 512 + (warp * 4 + j + lane / 16 ^ turned_chunk(lane % 8)) * 16;
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

NINFER_KERNEL(attend_pairs, AttendGroupParams, kGroup, 3) { attend_pairs_for<false>(p); }
NINFER_KERNEL(attend_pairs_fp8, AttendGroupParams, kGroup, 2) { attend_pairs_for<true>(p); }

static constexpr int kMerge = 256;       // 64 pairs of columns of a head, each by four threads
static constexpr uint32_t kPairs = 36;   // at most

NINFER_KERNEL(merge_pairs, MergeGroupParams, kMerge, 1) {
  __shared__ __align__(8) float part[4][128];
  if (p.trigger == 0) pdl_trigger();
  const uint32_t head = blockIdx.x, r = blockIdx.y, t = threadIdx.x, lane = t % 32, quarter = t / 64, half = blockIdx.z * 128, c = half + t % 64 * 2;
  const uint64_t at = (uint64_t)r * p.heads + head, from = at * p.pairs;
  const bf16 gate = p.qg[at * 512 + 256 + half + t % 128];
  constexpr int kMine = kPairs / 4;  // pairs of a thread
  float2 mine[kMine];                // asked for before their factors are known
  const uint32_t n = __ldcg(p.count + r), have = (n + 2 * kKeys - 1) / (2 * kKeys);
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
#pragma unroll
  for (int i = 0; i < kMine; i++) {
    const uint32_t pair = quarter + 4 * i;
    mine[i] = pair < have ? __ldcg((const float2*)(p.partial + (from + pair) * 256 + c)) : make_float2(0.0f, 0.0f);
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
  float2 v = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kMine; i++) {
    const uint32_t pair = quarter + 4 * i;
    const float by = __shfl_sync(~0u, e[i < 8 ? 0 : 1], pair % 32);
    v.x = fmaf(by, mine[i].x, v.x), v.y = fmaf(by, mine[i].y, v.y);
  }
  *(float2*)&part[quarter][t % 64 * 2] = v;
  // A warp has read 256 bytes of each of its pairs: nobody else will, so that they need not be written to memory when their place in L2 is wanted.
  __syncwarp();
  const uint32_t gone = quarter + lane / 2 * 4;
  if (lane < 2 * kMine && gone < have)
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(p.partial + (from + gone) * 256 + half + t % 64 / 32 * 64 + lane % 2 * 32) : "memory");
  if (p.trigger == 2) pdl_trigger();
  __syncthreads();
  if (t >= 128) return;
  p.out[at * 256 + half + t] = to_bf16((part[0][t] + part[1][t] + part[2][t] + part[3][t]) / weight * sigmoid(from_bf16(gate)));
}
