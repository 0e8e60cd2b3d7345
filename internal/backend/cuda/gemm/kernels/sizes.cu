// What the compiler thinks of the parameter structs, for Load to compare.
#include "common.cuh"
#include "sizes_gen.cuh"

NINFER_KERNEL(sizes, SizesParams, 32, 1) {
  for (uint32_t i = threadIdx.x; i < p.n && i < kSizeCount; i += 32) p.out[i] = kSizes[i];
}
