// Mixture of experts for prompts: both halves of the experts' network over rows sorted by expert, and their weighted sum.
//
//   expert_up_*    h = silu(g) u with g, u = (W x) * 256 / divisor for every sorted pair, BF16 [pairs][I], ordered
//   expert_down_*  y = (W h) * 256 / divisor, BF16 [pairs][H]
//   combine        out = sum over ranks of weight * y + sigmoid(logit) * shared, in the order of the ranks; FP32, then BF16 [M][H]
//
// Weights are taken as they lie for decoding:
//   tiles16  expert_repack's tiles of 16 rows (cuda/kernels/expert.cu): gate/up tiles hold 8 gate rows and their 8 up rows
//   tiles8   its tiles of 8 rows, where down is packed so
//   stored   the artifact's NVFP4: rows of K/2 bytes of codes, scales in tiles of 128 rows x 4 groups; N % 128 = 0, K % 64 = 0
//   plain    BF16 [E][N][K]
// In stored and plain banks the first half of an expert's gate/up rows is gate. Activations are ordered: inside every eight k the order is
// 0 4 1 5 2 6 3 7, which is how codes come out of a word; `order` makes X so and expert_up writes its result so.
//
// A block does one item (at most 128 rows of one expert) times 128 stored rows, codes unpacked exactly while they move to shared memory. On sm_90
// packed banks have a path of their own: wide.cu.
#include "tile.cuh"
#include "params.h"
#include "bank.cuh"

template <class Bank, bool UP>
NINFER_DEVICE void group(const GroupParams& p) {
  const uint32_t index = blockIdx.x / p.tiles, nt = blockIdx.x - index * p.tiles;
  if (index >= *p.item_count) return;
  const Item item = p.items[index];
  Bank w(p, item.expert, nt, UP);
  Tile<128> tile;
  tile.run(p.x, p.k, 0, ceil_div(p.k, kK), item.rows, w,
           [&](uint32_t r) { return r < item.rows ? (p.row ? __ldg(p.row + item.first + r) : item.first + r) * p.k : ~0u; });
  const float f = Bank::kScaled ? NVFP4_UNDO / __ldg(p.divisor + item.expert) : 1.0f;
  const uint32_t t = threadIdx.x % 4;
  if constexpr (UP) {
    // groups of eight columns: gate, up, gate, up ...; column c of a pair of groups is hidden value nt * 64 + ...
    const uint32_t inner = p.n / 2, place = (t & 1) * 4 + (t >> 1) * 2;
#pragma unroll
    for (int j = 0; j < Tile<128>::kGroups; j += 2) {
      const uint32_t c = nt * 64 + tile.warp_n * (tile.kCols / 2) + j * 4;
#pragma unroll
      for (int i = 0; i < tile.kM; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float a = silu(tile.acc[i][j][2 * h] * f) * (tile.acc[i][j + 1][2 * h] * f);
          const float b = silu(tile.acc[i][j][2 * h + 1] * f) * (tile.acc[i][j + 1][2 * h + 1] * f);
          // columns 2t, 2t + 1 to the order 0 4 1 5 2 6 3 7: lanes two apart exchange one
          const float other = __shfl_xor_sync(~0u, t < 2 ? b : a, 2);
          const uint32_t row = tile.row(i) + 8 * h;
          if (row < item.rows && c < inner)
            *(uint32_t*)(p.out + (uint64_t)(item.first + row) * inner + c + place) = t < 2 ? pack_bf16(a, other) : pack_bf16(other, b);
        }
    }
  } else {
#pragma unroll
    for (int j = 0; j < Tile<128>::kGroups; j++) {
      const uint32_t col = nt * kRows + tile.col(j);
#pragma unroll
      for (int i = 0; i < tile.kM; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint32_t row = tile.row(i) + 8 * h;
          if (row < item.rows && col < p.n)
            *(uint32_t*)(p.out + (uint64_t)(item.first + row) * p.n + col) = pack_bf16(tile.acc[i][j][2 * h] * f, tile.acc[i][j][2 * h + 1] * f);
        }
    }
  }
}

NINFER_KERNEL(expert_up_tiles16, GroupParams, 256, 2) { group<Tiles16, true>(p); }
NINFER_KERNEL(expert_up_stored, GroupParams, 256, 2) { group<StoredRows, true>(p); }
NINFER_KERNEL(expert_up_plain, GroupParams, 256, 2) { group<PlainRows, true>(p); }
NINFER_KERNEL(expert_down_tiles8, GroupParams, 256, 2) { group<Tiles8, false>(p); }
NINFER_KERNEL(expert_down_stored, GroupParams, 256, 2) { group<StoredRows, false>(p); }
NINFER_KERNEL(expert_down_plain, GroupParams, 256, 2) { group<PlainRows, false>(p); }

NINFER_KERNEL(combine, CombineParams, 256, 4) {
  const uint32_t chunks = p.h / 8, all = p.m * chunks;
  for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < all; i += gridDim.x * 256) {
    const uint32_t row = i / chunks, c = i - row * chunks;
    float v[8] = {};
    for (uint32_t k = 0; k < p.topk; k++) {
      const uint4 y = ldg128(p.y + (uint64_t)__ldg(p.place + row * p.topk + k) * p.h + c * 8);
      const float w = __ldg(p.weight + row * p.topk + k);
#pragma unroll
      for (int j = 0; j < 4; j++) v[2 * j] = fmaf(w, bf16_lo((&y.x)[j]), v[2 * j]), v[2 * j + 1] = fmaf(w, bf16_hi((&y.x)[j]), v[2 * j + 1]);
    }
    if (p.shared) {
      const float w = sigmoid(__ldg(p.logit + row));
      const float4 a = *((const float4*)(p.shared + (uint64_t)row * p.h) + 2 * c), b = *((const float4*)(p.shared + (uint64_t)row * p.h) + 2 * c + 1);
#pragma unroll
      for (int j = 0; j < 4; j++) v[j] = fmaf(w, (&a.x)[j], v[j]), v[4 + j] = fmaf(w, (&b.x)[j], v[4 + j]);
    }
    *((uint4*)(p.out + (uint64_t)row * p.h) + c) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  }
}
