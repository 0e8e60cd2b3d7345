// What selections of blocks of tokens by their scores share.
#pragma once
#include "best.cuh"

static constexpr uint32_t kNear = 32;  // keys of a bin that are ranked by one block
static constexpr uint32_t kShare = 8;  // blocks of a cluster that share a row

// The first W warps of a block meet.
template <uint32_t W>
DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * W) : "memory"); }

// Sum over the warp's lanes up to this one.
DEVICE uint32_t warp_through(uint32_t v) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const uint32_t other = __shfl_up_sync(~0u, v, o);
    if (threadIdx.x % 32 >= o) v += other;
  }
  return v;
}

// Sum over the threads of the first W warps before this one, and over all of them; scan is of this sum alone.
template <uint32_t W>
DEVICE uint32_t block_before(uint32_t* scan, uint32_t v, uint32_t& all) {
  const uint32_t through = warp_through(v), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 31) scan[warp] = through;
  meet<W>();
  const uint32_t of = lane < W ? scan[lane] : 0;
  all = __reduce_add_sync(~0u, of);
  return through - v + __reduce_add_sync(~0u, lane < warp ? of : 0u);
}

// Four scores as keys from 1 on; those that are not live, a bit each, are 0.
DEVICE void keys_of(float4 v, uint32_t live, uint32_t* key) {
  const float score[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (uint32_t i = 0; i < 4; i++) {  // float_key without jumps
    const uint32_t b = __float_as_uint(__fadd_rn(score[i], 0.0f)), k = b ^ ((uint32_t)((int32_t)b >> 31) | 0x80000000u);
    key[i] = (live >> i & 1) && score[i] == score[i] ? k : live >> i & 1;
  }
}

// One more in a bin, if `on`: without a jump.
DEVICE void count_in(uint32_t* bin, bool on) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p red.shared.add.u32 [%0], 1;}" ::"r"((uint32_t)__cvta_generic_to_shared(bin)), "r"((uint32_t)on)
               : "memory");
}

// Sum over the block, to all threads.
template <uint32_t W, class Room>
DEVICE uint32_t select_sum(Room& room, uint32_t v) {
  v = __reduce_add_sync(~0u, v);
  if (threadIdx.x % 32 == 0) room.scan[threadIdx.x / 32] = v;
  __syncthreads();
  v = __reduce_add_sync(~0u, threadIdx.x % 32 < W ? room.scan[threadIdx.x % 32] : 0u);
  __syncthreads();
  return v;
}

// Marks the best `most` of room.key in room.mask, ties to the lower place, whatever keys these are: bit by bit. A block of W warps.
template <uint32_t W, class Room>
__device__ __noinline__ void choose_slowly(Room& room, uint32_t valid, uint32_t most) {
  const uint32_t t = threadIdx.x;
  uint32_t threshold = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t next = threshold | 1u << bit;
    uint32_t n = 0;
    for (uint32_t i = t; i < valid; i += 32 * W) n += room.key[i] >= next;
    if (select_sum<W>(room, n) >= most) threshold = next;
  }
  uint32_t n = 0;
  for (uint32_t i = t; i - t % 32 < valid; i += 32 * W) {
    const bool larger = i < valid && room.key[i] > threshold, equal = i < valid && room.key[i] == threshold;
    const uint32_t votes = __ballot_sync(~0u, larger), ties = __ballot_sync(~0u, equal);
    if (t % 32 == 0) room.mask[i / 32] = votes, room.bins[i / 32] = ties;
    n += larger;
  }
  uint32_t need = most - select_sum<W>(room, n);
  if (t == 0)
    for (uint32_t w = 0; need; w++)
      for (uint32_t ties = room.bins[w]; ties && need; ties &= ties - 1, need--) room.mask[w] |= ties & -ties;
}

// Keys from the largest on in windows of kWindow, four powers of two of what they stand for: in bins of equal width, until the last key to be taken is in
// one that is taken as a whole or holds few. Below a window there is the next, since some keys may be far larger than others, and within a bin another.
static constexpr uint32_t kWindow = 1 << 25;
struct Window {
  uint32_t base, top;  // keys from base on and below top
  Window() = default;
  DEVICE explicit Window(uint32_t high) : base(high > kWindow ? high - kWindow + 1 : 1), top(high + 1) {}
  DEVICE uint32_t shift() const { return max(0, 21 - __clz(top - base - 1)); }  // kBins of 2^shift keys hold it
  DEVICE void lower() { top = base, base = base > kWindow ? base - kWindow : 1; }
  DEVICE void narrow(uint32_t bin) {
    const uint32_t wide = 1u << shift();
    base += bin * wide, top = min(top, base + wide);
  }
  // To where a pass over one block's keys has found the last one to be taken: its bin, how many keys of that are to be taken, and how many it has; 0: it lies
  // below, and nothing is known yet.
  DEVICE bool follow(const uint32_t* found, uint32_t& need, uint32_t& count) {
    need = found[1], count = found[2];
    if (count) narrow(found[0]);
    else lower();
    return count != 0;
  }
};

// Lists all visible tokens of row r, if these are few: thread t of a block of T.
template <uint32_t T>
DEVICE void list_all(uint32_t* list, const SelectParams& p, const uint32_t* pages, uint32_t r, uint32_t visible, uint32_t t) {
#pragma unroll 1
  for (uint32_t i = t; i < visible; i += T) list[i] = token_row(pages, i);
  if (t == 0) p.count[r] = visible;
}

// What a block of tokens is written with: rows of its tokens, which lie in one page or not.
DEVICE void list_block(uint32_t* list, const SelectParams& p, const uint32_t* pages, uint32_t block) {
  const bool whole = kPage % p.ratio == 0;
  const uint32_t id = whole ? token_row(pages, block * p.ratio) : 0;
#pragma unroll 1
  for (uint32_t j = 0; j < p.ratio; j++) list[j] = whole ? id + j : token_row(pages, block * p.ratio + j);
}

// Writes those of four blocks of tokens, from block on, that are taken: e is the number of the first. id is the row of their first token, if blocks are of
// four tokens.
DEVICE void list_taken(uint32_t* list, const SelectParams& p, const uint32_t* pages, uint32_t taken, uint32_t e, uint32_t block, uint32_t id) {
  if (p.ratio == 4) {
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
      if (taken >> i & 1) {
        *(uint4*)(list + e * 4) = make_uint4(id + 4 * i, id + 4 * i + 1, id + 4 * i + 2, id + 4 * i + 3);
        e++;
      }
    return;
  }
#pragma unroll 1
  for (; taken; taken &= taken - 1) list_block(list + e++ * p.ratio, p, pages, block + __ffs(taken) - 1);
}

DEVICE void share_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void share_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE uint32_t there(const void* mine, uint32_t rank) {
  uint32_t a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"((uint32_t)__cvta_generic_to_shared(mine)), "r"(rank));
  return a;
}
DEVICE void put(uint32_t at, uint32_t v) { asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }

// What blocks send each other brings its own word of having come: a barrier of the cluster that orders stores waits for all memory.
DEVICE void send(uint32_t at, uint32_t v, uint32_t came) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at), "r"(v), "r"(came) : "memory");
}
DEVICE void send(uint32_t at, uint32_t v, uint32_t w, uint32_t came) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(at), "l"((uint64_t)w << 32 | v), "r"(came) : "memory");
}
DEVICE void expect(uint64_t* came, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"((uint32_t)__cvta_generic_to_shared(came)), "r"(bytes) : "memory");
}
DEVICE void await(uint64_t* came, uint32_t phase) {
  asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; @p bra D; bra L; D: }" ::"r"(
                   (uint32_t)__cvta_generic_to_shared(came)),
               "r"(phase & 1)
               : "memory");
  __syncwarp();
}
