// Yardsticks and helpers of the harness: what the machine can do at best in the same run, and inputs made on the device.
//
//   empty        waits for its predecessor and ends: the price of a kernel in a chain.
//   read_loads   reads `bytes` once with 16-byte loads, sixteen in flight a thread.
//   read_bulk    the same through bulk copies into a ring in shared memory.
//   copy         reads and writes `bytes`.
//   fill         random contents by counter: kind 0 BF16, 1 E4M3 codes, 2 bytes, 3 NVFP4 scale words, 4 FP32 (constant scale), 5 positive BF16, 6 positive FP16.
//   sizes        one thread: size and offsets of every parameter struct, compared with the Go side at start.
//
// Measured on one H200: a chain of dependent empty kernels 0.41 / 0.52 / 1.54 us each at 1 / 132 / 1,056 blocks; read_bulk 4.62 to 4.72 TB/s on
// the two machines seen, read_loads 4.39 to 4.49, copy 3.84 (read and write counted).
#include "common.cuh"
#include "params.h"
#include "sizes_gen.cuh"

extern __shared__ __align__(128) uint8_t smem[];

NINFER_KERNEL(empty, EmptyParams, 256, 2) {
  pdl_trigger();
  if (p.wait) pdl_wait();
  if (p.out && threadIdx.x == 0 && blockIdx.x == 0) *p.out = p.value;
}

NINFER_KERNEL(read_loads, ReadParams, 512, 2) {
  pdl_trigger();
  pdl_wait();
  const uint4* src = (const uint4*)p.src;
  const uint64_t n = p.bytes / 16, stride = (uint64_t)gridDim.x * 512;
  uint32_t x = 0;
  uint64_t i = (uint64_t)blockIdx.x * 512 + threadIdx.x;
  for (; i + 15 * stride < n; i += 16 * stride) {
    uint4 v[16];
#pragma unroll
    for (int j = 0; j < 16; j++) {
      const uint4* a = src + i + j * stride;
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(a));
    }
#pragma unroll
    for (int j = 0; j < 16; j++) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < n; i += stride) x ^= src[i].x;
  if (x == 0x9e3779b9u) *p.sink = x;
}

NINFER_KERNEL(read_bulk, ReadParams, 128, 1) {
  const uint32_t bar = smem_addr(smem), ring = bar + 128;
  if (threadIdx.x == 0) {
    for (uint32_t s = 0; s < p.stages; s++) mbar_init(bar + 8 * s, 1);
    mbar_fence_init();
  }
  __syncthreads();
  pdl_trigger();
  if (threadIdx.x == 0) {
    const uint64_t policy = policy_evict_first();
    const uint64_t n = p.bytes / p.stage_bytes;
    uint64_t ask = blockIdx.x;
    uint32_t s = 0, phase = 0;
    for (uint32_t i = 0; i < p.stages && ask < n; i++, ask += gridDim.x) {
      mbar_expect(bar + 8 * i, p.stage_bytes);
      bulk_load(ring + i * p.stage_bytes, (const uint8_t*)p.src + ask * p.stage_bytes, p.stage_bytes, bar + 8 * i, policy);
    }
    for (uint64_t i = blockIdx.x; i < n; i += gridDim.x) {
      mbar_wait(bar + 8 * s, phase);
      if (ask < n) {
        mbar_expect(bar + 8 * s, p.stage_bytes);
        bulk_load(ring + s * p.stage_bytes, (const uint8_t*)p.src + ask * p.stage_bytes, p.stage_bytes, bar + 8 * s, policy);
        ask += gridDim.x;
      }
      if (++s == p.stages) s = 0, phase ^= 1;
    }
  }
  pdl_wait();
}

NINFER_KERNEL(copy, CopyParams, 512, 2) {
  pdl_trigger();
  pdl_wait();
  const uint4* src = (const uint4*)p.src;
  uint4* dst = (uint4*)p.dst;
  const uint64_t n = p.bytes / 16, stride = (uint64_t)gridDim.x * 512;
  uint64_t i = (uint64_t)blockIdx.x * 512 + threadIdx.x;
  for (; i + 7 * stride < n; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = __ldcs(src + i + j * stride);
#pragma unroll
    for (int j = 0; j < 8; j++) __stcs(dst + i + j * stride, v[j]);
  }
  for (; i < n; i += stride) dst[i] = src[i];
}

NINFER_DEVICE uint32_t hash(uint64_t i, uint32_t seed) {
  uint64_t z = i * 0x9e3779b97f4a7c15ull + seed * 0xd1b54a32d192ed03ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (uint32_t)(z >> 32);
}

NINFER_KERNEL(fill, FillParams, 256, 2) {
  for (uint64_t i = (uint64_t)blockIdx.x * 256 + threadIdx.x; i < p.count; i += (uint64_t)gridDim.x * 256) {
    uint32_t h = hash(i, p.seed);
    // triangular on (-1, 1), standard deviation 0.41
    float v = ((int)(h & 0xffff) + (int)(h >> 16) - 65535) * (1.0f / 65536.0f) * p.scale;
    switch (p.kind) {
      case 0: ((bf16*)p.dst)[i] = __float2bfloat16_rn(v); break;
      case 1: {  // any code but the two NaN
        uint8_t c = h & 0xff;
        ((uint8_t*)p.dst)[i] = (c & 0x7f) == 0x7f ? c ^ 1 : c;
        break;
      }
      case 2: ((uint8_t*)p.dst)[i] = h & 0xff; break;
      case 5: ((bf16*)p.dst)[i] = __float2bfloat16_rn(0.5f * fabsf(v) + p.scale); break;
      case 6: ((uint16_t*)p.dst)[i] = 0x1c00 + (h & 0x3ff); break;
      case 3: ((uint8_t*)p.dst)[i] = 0x28 + (h & 0x1f); break;  // 0.25 .. 3.75
      default: ((float*)p.dst)[i] = p.scale; break;
    }
  }
}

NINFER_KERNEL(sizes, SizesParams, 32, 1) {
  if (threadIdx.x == 0)
    for (uint32_t i = 0; i < p.n && i < kSizeCount; i++) p.out[i] = kSizes[i];
}
