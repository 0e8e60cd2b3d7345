// The tile all products share: BM activation rows times 128 weight rows, 64 k at a time, FP32 accumulators.
//
// Activations come by 16-byte asynchronous copies, two stages ahead of their use. A weight source puts its part of a stage there in BF16,
// whatever it is stored as: BF16 by asynchronous copies, E4M3 and NVFP4 through registers, read one stage ahead of their conversion.
// A stage's rows are 128 bytes, whose 16-byte chunks are exchanged by row % 8: neither copies nor ldmatrix meet in a bank, and it is
// the 128-byte swizzle of sm_90's warpgroup instructions.
//
// 256 threads. sm_90, BM = 128: two warpgroups of 64 x 128 on wgmma, which works on a stage while the threads convert weights for another.
// Elsewhere mma.sync m16n8k16: BM = 128: 4 x 2 warps of 32 x 64; BM = 64: 2 x 4 warps of 32 x 32. 96 KB, so that two blocks fit on an SM of
// sm_90 and one on sm_120. The order of the sums over k is the same for every row and tile: k16 after k16.
#pragma once
#include "common.cuh"

static constexpr int kThreads = 256;
static constexpr int kK = 64;        // k of a stage
static constexpr int kRows = 128;    // weight rows of a tile
static constexpr int kStages = 3;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(NINFER_PORTABLE)
static constexpr bool kWarpgroups = true;
#else
static constexpr bool kWarpgroups = false;
#endif

NINFER_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
NINFER_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
NINFER_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Rows of 128 bytes in groups of eight, swizzled; 1,024-byte aligned. Adding 2 goes on by 16 k.
NINFER_DEVICE uint64_t wgmma_operand(uint32_t a) { return (uint64_t)((a & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
// acc (64 x 128) += A (64 x 16) * B (128 x 16) transposed, both in shared memory.
NINFER_DEVICE void wgmma(float (&d)[16][4], uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
      " %64, %65, 1, 1, 1, 0, 0;"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15)
      : "l"(a), "l"(b));
#undef D4
#endif
}

template <int BM>
struct Tile {
  static constexpr bool kWide = kWarpgroups && BM == 128;
  static constexpr int kM = kWide ? 1 : 2;  // groups of 16 rows of a warp
  static constexpr int kWarpsM = BM / (16 * kM), kWarpsN = 8 / kWarpsM, kCols = kRows / kWarpsN, kGroups = kCols / 8;
  static constexpr uint32_t kA = BM * 128, kStage = kA + kRows * 128;
  float acc[kM][kGroups][4];
  uint32_t warp_m, warp_n;  // of this warp: 16 kM rows, kCols columns

  NINFER_DEVICE Tile() {
    const uint32_t warp = threadIdx.x / 32;
    warp_n = warp % kWarpsN, warp_m = warp / kWarpsN;  // so that rows that are not there free all four schedulers alike
#pragma unroll
    for (int i = 0; i < kM; i++)
#pragma unroll
      for (int j = 0; j < kGroups; j++)
#pragma unroll
        for (int l = 0; l < 4; l++) acc[i][j][l] = 0;
  }
  // Row and column in the tile of acc[i][j][0]; [2] is eight rows on, [1] and [3] one column.
  NINFER_DEVICE uint32_t row(int i) const { return (warp_m * kM + i) * 16 + threadIdx.x % 32 / 4; }
  NINFER_DEVICE uint32_t col(int j) const { return warp_n * kCols + j * 8 + threadIdx.x % 4 * 2; }

  // Adds a stage; with warpgroups only begins to.
  NINFER_DEVICE void step(uint32_t stage) {
    if constexpr (kWide) {
      const uint64_t a = wgmma_operand(stage + threadIdx.x / 128 * 64 * 128), b = wgmma_operand(stage + kA);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < kK / 16; kk++) wgmma(acc[0], a + 2 * kk, b + 2 * kk);
      wgmma_commit();
    } else {
      const uint32_t lane = threadIdx.x % 32, turn = lane & 7;
      const uint32_t a = stage + (warp_m * 32 + (lane & 15)) * 128, b = stage + kA + (warp_n * kCols + turn + (lane >> 4) * 8) * 128;
#pragma unroll
      for (int kk = 0; kk < kK / 16; kk++) {
        const uint32_t ca = ((kk * 2 + (lane >> 4)) ^ turn) * 16, cb = ((kk * 2 + ((lane >> 3) & 1)) ^ turn) * 16;
        uint32_t fa[2][4], fb[kGroups / 2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) ldmatrix4(fa[i], a + i * 16 * 128 + ca);
#pragma unroll
        for (int j = 0; j < kGroups / 2; j++) ldmatrix4(fb[j], b + j * 16 * 128 + cb);
#pragma unroll
        for (int j = 0; j < kGroups / 2; j++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            mma(acc[i][2 * j], fa[i], fb[j][0], fb[j][1]);
            mma(acc[i][2 * j + 1], fa[i], fb[j][2], fb[j][3]);
          }
      }
    }
  }

  // As below, with nothing to read beside.
  template <class Weights, class At>
  NINFER_DEVICE void run(const bf16* x, uint32_t k, uint32_t first, uint32_t last, uint32_t rows, Weights& w, At at) {
    run(x, k, first, last, rows, w, at, [](uint32_t) {});
  }
  // Adds k tiles first..last-1. beside(to) may ask for kStage more bytes by asynchronous copies, which the caller waits for; at least three
  // k tiles must come before them. Returns where they went. at(r) is the element offset in x of the tile's row r, ~0 for none; rows is how many of the tile's rows there are.
  template <class Weights, class At, class Beside>
  NINFER_DEVICE uint32_t run(const bf16* x, uint32_t k, uint32_t first, uint32_t last, uint32_t rows, Weights& w, At at, Beside beside) {
    uint32_t extra = 0;
    const uint32_t base = smem_addr(smem), chunk = threadIdx.x % 8, r0 = threadIdx.x / 8;
    const uint32_t into = r0 * 128 + ((chunk ^ (r0 & 7)) << 4);
    uint32_t from[BM / 32];
#pragma unroll
    for (int j = 0; j < BM / 32; j++) from[j] = at(r0 + 32 * j);
    const bool busy = (kWide ? threadIdx.x / 128 * 64 : warp_m * 32) < rows;  // the same for a warpgroup
    auto copy = [&](uint32_t kt, uint32_t stage) {
      const uint32_t kc = kt * kK + chunk * 8;
#pragma unroll
      for (int j = 0; j < BM / 32; j++) {
        const bool live = from[j] != ~0u && kc < k;
        copy16(stage + into + j * 32 * 128, x + (live ? (uint64_t)from[j] + kc : 0), live);
      }
    };
    uint32_t stage = base, ahead = base;
    auto next = [&](uint32_t& s) { s = s == base + (kStages - 1) * kStage ? base : s + kStage; };
#pragma unroll
    for (int s = 0; s < kStages - 1; s++) {
      if (first + s < last) {
        w.fetch(first + s);
        copy(first + s, ahead);
        w.put(first + s, ahead + kA);
      }
      copy_commit();
      next(ahead);
    }
    if (first + kStages - 1 < last) w.fetch(first + kStages - 1);
#pragma unroll 1
    for (uint32_t kt = first; kt < last; kt++) {
      copy_wait<kStages - 2>();
      if (kWide) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what this thread wrote is for the tensor unit to read
      __syncthreads();
      if (kWide && busy) step(stage);
      if (kt + kStages - 1 < last) {
        copy(kt + kStages - 1, ahead);
        w.put(kt + kStages - 1, ahead + kA);
      } else if (kt + kStages - 1 == last) {
        beside(extra = ahead);
      }
      copy_commit();
      next(ahead);
      if (kt + kStages < last) w.fetch(kt + kStages);
      if (!kWide && busy) step(stage);
      if (kWide) wgmma_wait();
      next(stage);
    }
    return extra;
  }
};

// ---- weight sources: fetch(kt) reads tile kt's part into registers, put(kt, to) writes it to the stage ----

// BF16 rows; row_of(r) is the matrix row of tile row r, ~0 for none.
template <class RowOf>
struct Bf16Rows {
  const bf16* w;
  uint32_t k;
  RowOf row_of;
  NINFER_DEVICE Bf16Rows(const void* w, uint32_t k, RowOf row_of) : w((const bf16*)w), k(k), row_of(row_of) {}
  NINFER_DEVICE void fetch(uint32_t) {}
  NINFER_DEVICE void put(uint32_t kt, uint32_t to) {
    const uint32_t chunk = threadIdx.x % 8, r0 = threadIdx.x / 8, kc = kt * kK + chunk * 8;
    to += r0 * 128 + ((chunk ^ (r0 & 7)) << 4);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t row = row_of(r0 + 32 * j);
      const bool live = row != ~0u && kc < k;
      copy16(to + j * 32 * 128, w + (live ? (uint64_t)row * k + kc : 0), live);
    }
  }
};

// Where a thread that converts half a stage row (32 k) writes chunk c of it.
NINFER_DEVICE uint32_t half_row(uint32_t to, uint32_t c) {
  const uint32_t r = threadIdx.x / 2, half = threadIdx.x % 2;
  return to + r * 128 + (((half * 4 + c) ^ (r & 7)) << 4);
}

// E4M3 rows, without their scales.
template <class RowOf>
struct E4m3Rows {
  const uint8_t* w;  // of this thread's row, null for none
  uint32_t k;
  uint4 code[2];
  NINFER_DEVICE E4m3Rows(const void* base, uint32_t k, RowOf row_of) : k(k) {
    const uint32_t row = row_of(threadIdx.x / 2);
    w = row == ~0u ? nullptr : (const uint8_t*)base + (uint64_t)row * k + threadIdx.x % 2 * 32;
  }
  NINFER_DEVICE void fetch(uint32_t kt) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      code[i] = make_uint4(0, 0, 0, 0);
      if (w && kt * kK + threadIdx.x % 2 * 32 + i * 16 < k) code[i] = ldg128(w + kt * kK + i * 16);
    }
  }
  NINFER_DEVICE void put(uint32_t, uint32_t to) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sts128(half_row(to, 2 * i), e4m3x8_bf16(code[i].x, code[i].y));
      sts128(half_row(to, 2 * i + 1), e4m3x8_bf16(code[i].z, code[i].w));
    }
  }
};
