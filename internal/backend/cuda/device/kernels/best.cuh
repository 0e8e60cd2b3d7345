// The best of many keys, by a block of 1,024 threads.
#pragma once
#include "common.cuh"

static constexpr uint32_t kSegment = 4096;  // scores a block holds, four a thread

static constexpr uint32_t kBins = 2048;

struct BestRoom {
  uint32_t bins[kBins], range[2][32], scan[32], found[3];
};

// Which of a block's keys, K a thread in order, are among the best `most`: one bit each. Keys beyond `valid` do not count. before is how
// many are taken by the threads before this one.
//
// The keys are counted in bins of equal width between the least and the largest, then those of the bin that holds the last to be taken in
// narrower ones, until that bin is taken as a whole or all its keys are equal: twice for scores, three times at most.
template <uint32_t K>
DEVICE uint32_t best_of(BestRoom& room, const uint32_t* key, uint32_t valid, uint32_t most, uint32_t& before, uint32_t& taken) {
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32, own = min(K, valid > t * K ? valid - t * K : 0u);
  uint32_t threshold = 0, need = valid;  // keys above the threshold are taken, and so many of those that equal it
  if (valid > most) {
    uint32_t least = ~0u, largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < K; i++)
      if (i < own) least = min(least, key[i]), largest = max(largest, key[i]);
    least = __reduce_min_sync(~0u, least), largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) room.range[0][warp] = least, room.range[1][warp] = largest;
    room.bins[t] = room.bins[t + 1024] = 0;
    __syncthreads();
    uint32_t low = __reduce_min_sync(~0u, room.range[0][lane]), wide = __reduce_max_sync(~0u, room.range[1][lane]) - low;  // keys low..low+wide
    need = most;
    for (;;) {
      const uint32_t shift = max(0, 21 - __clz(wide));  // bins of 2^shift keys: wide >> shift < kBins
#pragma unroll
      for (uint32_t i = 0; i < K; i++)
        if (i < own && key[i] >= low && key[i] - low <= wide) atomicAdd(room.bins + ((key[i] - low) >> shift), 1u);
      __syncthreads();
      // From the largest on, two bins a thread.
      const uint32_t at = kBins - 1 - 2 * t, first = room.bins[at], both = first + room.bins[at - 1];
      uint32_t sum = both;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        const uint32_t other = __shfl_up_sync(~0u, sum, o);
        if (lane >= o) sum += other;
      }
      if (lane == 31) room.scan[warp] = sum;
      __syncthreads();
      room.bins[at] = room.bins[at - 1] = 0;
      sum += __reduce_add_sync(~0u, lane < warp ? room.scan[lane] : 0u) - both;  // keys in larger bins
      if (sum < need && need <= sum + both) {
        const bool upper = need <= sum + first;
        room.found[0] = upper ? at : at - 1, room.found[1] = need - sum - (upper ? 0 : first), room.found[2] = upper ? first : both - first;
      }
      __syncthreads();
      const uint32_t bin = room.found[0], count = room.found[2];
      need = room.found[1];
      low += bin << shift;
      if (shift == 0) {
        threshold = low;
        break;
      }
      if (need == count) {
        threshold = low - 1, need = 0;  // not below 0: more than one bin, or this one would hold more than `most`
        break;
      }
      wide = (1u << shift) - 1;
    }
  }
  uint32_t larger = 0, equal = 0;
#pragma unroll
  for (uint32_t i = 0; i < K; i++)
    if (i < own) larger += key[i] > threshold, equal += key[i] == threshold;
  // Counts of both before this thread, in one scan.
  const uint32_t mine = larger << 16 | equal;
  uint32_t sum = mine;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const uint32_t other = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += other;
  }
  __syncthreads();
  if (lane == 31) room.scan[warp] = sum;
  __syncthreads();
  uint32_t rest = room.scan[lane];
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const uint32_t other = __shfl_up_sync(~0u, rest, o);
    if (lane >= o) rest += other;
  }
  const uint32_t total = __shfl_sync(~0u, rest, 31), ahead = __shfl_sync(~0u, rest, warp ? warp - 1 : 0);
  sum += (warp ? ahead : 0) - mine;
  uint32_t ties = sum & 0xffff, bits = 0;
  before = (sum >> 16) + min(ties, need);
  taken = min(valid, most);
#pragma unroll
  for (uint32_t i = 0; i < K; i++)
    if (i < own) {
      const bool tie = key[i] == threshold;
      if (key[i] > threshold || (tie && ties < need)) bits |= 1u << i;
      ties += tie;
    }
  return bits;
}
