// What kernels on the tensor instructions of four warps together share. sm_90a only.
#pragma once
#include "common.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A matrix in shared memory: rows of 128 bytes whose pieces are turned by the row, eight rows stride bytes from the next eight; where rows are of k, lead
// is between columns of 64.
DEVICE uint64_t described(uint32_t at, uint32_t lead, uint32_t stride) {
  return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)(lead >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}
DEVICE void wide_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups are on their way.
template <int N>
DEVICE void wide_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Sums are not looked at before this.
template <int N>
DEVICE void held(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
#endif
