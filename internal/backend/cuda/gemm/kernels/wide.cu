// Mixture of experts for prompts on sm_90's warpgroups: both halves of the experts' network for packed banks, as experts.cu has them for every GPU
// and every layout. Empty elsewhere.
//
//   panel          X into panels (wide.cuh), every row once for each of its experts, ordered by order64
//   expert_up_*    h = silu(g) u, in panels again
//   expert_down_*  y, BF16 [pairs][H]
//
// few: items of up to 40 rows, three blocks an SM; some: up to 96, two; many: up to 192, one. A block does `group` times 128 stored rows.
#include "wide.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <class Bank, bool UP, int N, int ROWS>
NINFER_DEVICE void multiply(const GroupParams& p, const Item& item, uint32_t first, uint32_t count) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float f = NVFP4_UNDO / __ldg(p.divisor + item.expert);
  // A warpgroup's part of every row in shared memory of its own: 32 hidden values, or 64 outputs whose 16-byte chunks are exchanged by row % 8.
  constexpr uint32_t kRow = UP ? 64 : 128, kChunks = kRow / 16;
  const uint32_t team = warp / 4, out = smem_addr(smem) + Wide<ROWS>::kOut + team * ROWS * kRow, chunk = threadIdx.x % kChunks;
  const auto together = [&]() { asm volatile("bar.sync %0, 128;" ::"r"(1 + team) : "memory"); };
  const auto store = [&](uint32_t at, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(out + at), "r"(v) : "memory"); };
  const auto finish = [&](uint32_t nt, float (&acc)[N / 8][4]) {
    together();  // the tile before has been written
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      if constexpr (UP) {
        // rows g and g + 8 are gate and up of hidden value 8 n + g, n = 2 (warp % 4) + team, whose neighbour in the order is g + 4
        const float h0 = silu(acc[j][0] * f) * (acc[j][2] * f), h1 = silu(acc[j][1] * f) * (acc[j][3] * f);
        const float other = __shfl_xor_sync(~0u, g < 4 ? h1 : h0, 16);
        store((8 * j + 2 * t + (g >> 2)) * kRow + (g & 3) * 16 + warp % 4 * 4, g < 4 ? pack_bf16(h0, other) : pack_bf16(other, h1));
      } else {
        const uint32_t row = 8 * j + 2 * t + (g & 1);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float y0 = acc[j][2 * h] * f, y1 = acc[j][2 * h + 1] * f;
          const float other = __shfl_xor_sync(~0u, g & 1 ? y0 : y1, 4);
          store(row * kRow + (((warp % 4 * 2 + h) ^ (row & 7)) << 4) + (g >> 1) * 4, g & 1 ? pack_bf16(other, y1) : pack_bf16(y0, other));
        }
      }
    }
    together();
    if constexpr (UP) {
      bf16* to = p.out + ((uint64_t)nt * p.capacity + item.first) * kK;
      for (uint32_t row = threadIdx.x % 128 / kChunks; row < item.rows; row += 128 / kChunks)
        stg128(to + row * kK + (((team * 4 + chunk) ^ (row & 7)) << 3), lds128(out + row * kRow + chunk * 16));
    } else {
      const uint32_t col = nt * 128 + team * 64 + chunk * 8;
      if (col < p.n)
        for (uint32_t row = threadIdx.x % 128 / kChunks; row < item.rows; row += 128 / kChunks)
          stg128(p.out + (uint64_t)(item.first + row) * p.n + col, lds128(out + row * kRow + ((chunk ^ (row & 7)) << 4)));
    }
  };
  if constexpr (Wide<ROWS>::kFew)
    few_run<Bank, N, ROWS>(p, item, first, count, finish);
  else
    wide_run<Bank, N, ROWS>(p, item, first, count, finish);
}
#endif

template <class Bank, bool UP, int ROWS>
NINFER_DEVICE void wide(const GroupParams& p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const uint32_t blocks = ceil_div(p.tiles, p.group), index = blockIdx.x / blocks, first = (blockIdx.x - index * blocks) * p.group;
  if (index >= *p.item_count) return;
  const Item item = p.items[index];
  const uint32_t count = min(p.group, p.tiles - first);
  if constexpr (ROWS == 40) {
    switch ((item.rows + 15) / 16) {
      case 1: multiply<Bank, UP, 16, ROWS>(p, item, first, count); break;
      case 2: multiply<Bank, UP, 32, ROWS>(p, item, first, count); break;
      default: multiply<Bank, UP, 40, ROWS>(p, item, first, count);
    }
  } else if constexpr (ROWS == 96) {
    switch ((item.rows + 15) / 16) {
      case 1:
      case 2: multiply<Bank, UP, 32, ROWS>(p, item, first, count); break;
      case 3: multiply<Bank, UP, 48, ROWS>(p, item, first, count); break;
      case 4: multiply<Bank, UP, 64, ROWS>(p, item, first, count); break;
      case 5: multiply<Bank, UP, 80, ROWS>(p, item, first, count); break;
      default: multiply<Bank, UP, 96, ROWS>(p, item, first, count);
    }
  } else {
    switch ((item.rows + 31) / 32) {
      case 1: multiply<Bank, UP, 32, ROWS>(p, item, first, count); break;
      case 2: multiply<Bank, UP, 64, ROWS>(p, item, first, count); break;
      case 3: multiply<Bank, UP, 96, ROWS>(p, item, first, count); break;
      case 4: multiply<Bank, UP, 128, ROWS>(p, item, first, count); break;
      case 5:
        if (item.rows <= 144)
          multiply<Bank, UP, 144, ROWS>(p, item, first, count);
        else
          multiply<Bank, UP, 160, ROWS>(p, item, first, count);
        break;
      default:
        if (item.rows <= 176)
          multiply<Bank, UP, 176, ROWS>(p, item, first, count);
        else
          multiply<Bank, UP, 192, ROWS>(p, item, first, count);
    }
  }
#endif
}

NINFER_KERNEL(expert_up_few, GroupParams, 256, 3) { wide<Tiles16, true, 40>(p); }
NINFER_KERNEL(expert_down_few, GroupParams, 256, 3) { wide<Tiles8, false, 40>(p); }
NINFER_KERNEL(expert_up_some, GroupParams, 256, 2) { wide<Tiles16, true, 96>(p); }
NINFER_KERNEL(expert_down_some, GroupParams, 256, 2) { wide<Tiles8, false, 96>(p); }
NINFER_KERNEL(expert_up_many, GroupParams, 256, 1) { wide<Tiles16, true, 192>(p); }
NINFER_KERNEL(expert_down_many, GroupParams, 256, 1) { wide<Tiles8, false, 192>(p); }

NINFER_KERNEL(panel, SortParams, 256, 4) {
  const uint32_t panels = p.h / kK;
  const uint32_t all = p.m * panels * 8;
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < all; i += gridDim.x * 256) {
    // Eight lanes do 64 k of a row: lane c = 2 j + h has words 0..3 of chunk c in E2M1's order and wants word j of chunks h, h + 2, h + 4, h + 6.
    const uint32_t c = i % 8, j = c / 2, row = i / 8 / panels, kt = i / 8 - row * panels, mask = 0xffu << (threadIdx.x & 24);
    const uint4 v = order8(ldg128(p.x + (uint64_t)row * p.h + kt * kK + c * 8));
    const bool high = j & 2, odd = j & 1;
    const uint32_t p0 = high ? v.z : v.x, p1 = high ? v.w : v.y;  // words of this half of this chunk, and of the one two on
    const uint32_t q0 = __shfl_xor_sync(mask, high ? v.x : v.z, 4), q1 = __shfl_xor_sync(mask, high ? v.y : v.w, 4);
    const uint32_t s = __shfl_xor_sync(mask, odd ? p0 : p1, 2), t = __shfl_xor_sync(mask, odd ? q0 : q1, 2);
    const uint32_t a0 = odd ? s : p0, a1 = odd ? p1 : s, b0 = odd ? t : q0, b1 = odd ? q1 : t;
    const uint4 q = high ? make_uint4(b0, b1, a0, a1) : make_uint4(a0, a1, b0, b1);
    const uint32_t chunk = (c & 1) * 4 + j;
    for (uint32_t k = 0; k < p.topk; k++) {
      const uint32_t at = __ldg(p.place + row * p.topk + k);
      stg128(p.ordered + ((uint64_t)kt * p.capacity + at) * kK + ((chunk ^ (at & 7)) << 3), q);
    }
  }
}
