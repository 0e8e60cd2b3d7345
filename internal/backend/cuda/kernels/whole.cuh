// gemv_bf16 where a warp has 256 whole k of rows of 2,560 and a block's rows lie in one window: one way for all of it, without a branch that skips code.
#pragma once
#include "common.cuh"
#include "params.h"

// Sixteen bytes past L1 (R7) and a store of a result, without branches.
NINFER_DEVICE void ldg_l2_if(bool yes, uint4& v, uint64_t at) {
  asm volatile("{.reg .pred q; setp.ne.u32 q, %5, 0; @q ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(at), "r"((uint32_t)yes)
               : "memory");
}
NINFER_DEVICE void store_result(uint64_t at, float v, uint32_t f32) {
  asm volatile("{.reg .pred q; setp.ne.u32 q, %3, 0; @q st.global.f32 [%0], %1; @!q st.global.u16 [%0], %2;}" ::"l"(at), "f"(v),
               "h"(__bfloat16_as_ushort(__float2bfloat16_rn(v))), "r"(f32)
               : "memory");
}

// Ten warps. Each has a tile's 16 rows on their way, 8 KB in four groups of one line of 128 bytes of each row, and asks for the same line of the next tile as soon
// as it has read one, which other lanes copied. Sums are those of run_slab: the same k in the same order.
//
// An instruction that an SM has not fetched for long takes some ten clocks, one behind a jump several hundred while weights come: what is not to be done is
// predicated, what would be done seldom stands behind everything else, and nothing that could be made before the wait stands behind it.
NINFER_DEVICE void run_whole_bf16(const GemvParams& p) {
  constexpr uint32_t kWarps = 10, kLines = 4, kSlice = kLines * 128, kRow = kWarps * kSlice, kRows = 16, kGroup = kRows * 128, kPitch = 64 + 4;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  STAMP_BEGIN(0)
  const uint32_t each = p.piece >> 16, more = p.piece & 0xffff, slab = blockIdx.x * each + min(blockIdx.x, more), end = slab + each + (blockIdx.x < more);
  if (p.trigger == 0) pdl_trigger();

  // A row's 128 bytes lie together, its halves the other way round in odd rows, so that neither copies nor reads of eight lanes share a bank.
  const uint32_t fifo = smem_addr(smem) + warp * (kLines * kGroup);
  uint32_t to = fifo + lane / 8 * 128 + (lane % 8 ^ (lane / 8 % 2) << 2) * 16;
  // Nothing that ptxas may take apart: of nvcc 13.0 a copy to a register plus a uniform register is an illegal instruction.
  to = __shfl_sync(~0u, to, lane);
  const uint32_t first_half = fifo + g * 128 + (t ^ (g % 2) << 2) * 16, second_half = first_half ^ 64;
  const uint64_t policy = policy_evict_first();
  const uint8_t* src = nullptr;
  uint32_t row = slab, stop = slab, part = 0, base = 0;  // stop: where part or block ends
  auto next_tile = [&]() -> uint32_t {
    src += kRows * kRow;
    if (__builtin_expect(row >= stop, 0)) {
      if (row >= end) return 0;
      uint32_t rows;
      while (row >= base + (rows = p.part[part].rows)) base += rows, ++part;
      stop = min(end, base + rows);
      src = (const uint8_t*)p.part[part].w + (uint64_t)(row - base + lane / 8) * kRow + warp * kSlice + lane % 8 * 16;
    }
    const uint32_t n = min(kRows, stop - row);
    row += n;
    return n;
  };
  auto copy_line = [&](uint32_t line, uint32_t n) {
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
      if (4 * j + lane / 8 < n) copy16(to + line * kGroup + j * 512, src + line * 128 + 4 * j * kRow, policy);
    copy_commit();
  };
  uint32_t n = next_tile();
#pragma unroll
  for (uint32_t i = 0; i < kLines; i++) copy_line(i, n);

  // In the end a thread is a row of the block and one or two columns.
  const uint32_t col = threadIdx.x / 64, own = threadIdx.x % 64;
  const uint32_t area = p.r * kPitch * 4, sums = smem_addr(smem) + kWarps * kLines * kGroup;
  uint32_t f32 = 0, out_ld = 0;
  uint64_t out = 0;
  if (col < p.r && slab + own < end) {
    uint32_t i = 0, before = 0, rows;
    while (slab + own >= before + (rows = p.part[i].rows)) before += rows, ++i;
    const Part& q = p.part[i];
    f32 = q.flags & PART_OUT_F32, out_ld = q.out_ld;
    out = (uint64_t)q.out + (((uint64_t)col * out_ld + slab + own - before) << (f32 ? 2 : 1));
  }
  uint64_t x = (uint64_t)(p.x + g * p.x_ld + warp * (kSlice / 2) + t * 8);
  uint32_t have = g < p.r;
  asm volatile("" : "+l"(x), "+r"(have), "+l"(out), "+r"(out_ld));

  STAMP(1)
  pdl_wait();
  STAMP(2)
  uint4 v[2 * kLines];  // of activation row g, zeros if there is none
#pragma unroll
  for (uint32_t i = 0; i < 2 * kLines; i++) {
    v[i] = make_uint4(0, 0, 0, 0);
    ldg_l2_if(have, v[i], x + i * 64);
  }
  if (p.trigger != 0) pdl_trigger();
  STAMP(3)

  uint32_t at = sums + warp * area + (2 * t * kPitch + g) * 4, filled = 0;
#pragma unroll 1
  while (n) {
    float acc[2][4] = {};
    const uint32_t coming = next_tile();
#pragma unroll
    for (uint32_t i = 0; i < kLines; i++) {
      copy_wait<kLines - 1>();
      __syncwarp();
      const uint4 a = lds128(first_half + i * kGroup), b = lds128(first_half + i * kGroup + 1024), c = lds128(second_half + i * kGroup), d = lds128(second_half + i * kGroup + 1024);
      __syncwarp();
      copy_line(i, coming);
      mma_bf16(acc[0], a.x, b.x, a.y, b.y, v[2 * i].x, v[2 * i].y);
      mma_bf16(acc[1], a.z, b.z, a.w, b.w, v[2 * i].z, v[2 * i].w);
      mma_bf16(acc[0], c.x, d.x, c.y, d.y, v[2 * i + 1].x, v[2 * i + 1].y);
      mma_bf16(acc[1], c.z, d.z, c.w, d.w, v[2 * i + 1].z, v[2 * i + 1].w);
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      sts32_if(2 * t + i < p.r && g < n, at + i * kPitch * 4, acc[0][i] + acc[1][i]);
      sts32_if(2 * t + i < p.r && g + 8 < n, at + i * kPitch * 4 + 32, acc[0][i + 2] + acc[1][i + 2]);
    }
    at += 4 * n, filled += n, n = coming;
  }
  __syncthreads();
  STAMP(4)
  if (col >= p.r || own >= filled) return;
  uint32_t from = sums + (col * kPitch + own) * 4;
#pragma unroll 1
  for (uint32_t c = col;; from += 5 * kPitch * 4) {
    float s[kWarps], sum = 0;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; w++) s[w] = __uint_as_float(lds32(from + w * area));
#pragma unroll
    for (uint32_t w = 0; w < kWarps; w++) sum += s[w];
    store_result(out, sum, f32);
    if ((c += 5) >= p.r) break;
    out += (uint64_t)(5 * out_ld) << (f32 ? 2 : 1);
  }
  STAMP(5)
}
