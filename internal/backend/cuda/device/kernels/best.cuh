// The best of many keys, by a block of 1,024 threads: bisection of the key that so many reach.
#pragma once
#include "common.cuh"

static constexpr uint32_t kSegment = 4096;  // scores a block holds, four a thread

// Which of a block's keys, K a thread in order, are among the best `most`: one bit each. Keys beyond `valid` do not count. before is how
// many are taken by the threads before this one.
template <uint32_t K>
DEVICE uint32_t best_of(const uint32_t* key, uint32_t valid, uint32_t most, uint32_t& before, uint32_t& taken) {
  __shared__ uint32_t counts[2][2][32], scan[32];
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32, own = min(K, valid > t * K ? valid - t * K : 0u);
  const uint32_t warps = (valid + 32 * K - 1) / (32 * K);  // that have keys
  uint32_t threshold = 0, need = valid;  // keys above the threshold are taken, and so many of those that equal it
  __syncthreads();
  if (t < 32) counts[0][0][t] = counts[0][1][t] = counts[1][0][t] = counts[1][1][t] = scan[t] = 0;
  __syncthreads();
  if (valid > most && warp < warps) {
    // The largest threshold that most keys reach, two bits at a time; where exactly most reach it the rest does not matter.
    for (int shift = 30, turn = 0; shift >= 0; shift -= 2, turn ^= 1) {
      uint32_t a = 0, b = 0;
#pragma unroll
      for (uint32_t i = 0; i < K; i++)
        if (i < own) {
          a += (key[i] >= (threshold | 1u << shift) ? 1u : 0u) + (key[i] >= (threshold | 2u << shift) ? 1u << 16 : 0u);
          b += key[i] >= (threshold | 3u << shift) ? 1u : 0u;
        }
      a = __reduce_add_sync(~0u, a), b = __reduce_add_sync(~0u, b);
      if (lane == 0) counts[turn][0][warp] = a, counts[turn][1][warp] = b;
      asm volatile("bar.sync 1, %0;" ::"r"(warps * 32) : "memory");
      a = __reduce_add_sync(~0u, counts[turn][0][lane]), b = __reduce_add_sync(~0u, counts[turn][1][lane]);
      uint32_t reach = most + 1;
      if (b >= most) threshold |= 3u << shift, reach = b;
      else if (a >> 16 >= most) threshold |= 2u << shift, reach = a >> 16;
      else if ((a & 0xffff) >= most) threshold |= 1u << shift, reach = a & 0xffff;
      if (reach == most) {
        threshold--;
        break;
      }
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
  if (lane == 31) scan[warp] = sum;
  __syncthreads();
  uint32_t rest = scan[lane];
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const uint32_t other = __shfl_up_sync(~0u, rest, o);
    if (lane >= o) rest += other;
  }
  const uint32_t total = __shfl_sync(~0u, rest, 31), ahead = __shfl_sync(~0u, rest, warp ? warp - 1 : 0);
  sum += (warp ? ahead : 0) - mine;
  if (valid > most) need = most - (total >> 16);
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
