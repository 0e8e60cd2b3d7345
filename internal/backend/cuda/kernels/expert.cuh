// What both halves of the experts share: sizes of a repacked bank's tiles (expert.cu describes them), and the product of sixteen codes a lane.
#pragma once
#include "common.cuh"

static constexpr uint32_t kPairBytes = 1152;  // 128 k of a gate/up tile
static constexpr uint32_t kHalfBytes = 576;   // 128 k of a down tile
static constexpr int kUpWarps = 10;           // consumers in gate/up; as many add up the shared expert's second half, whichever kernel makes it

// a where the mask has bits, b elsewhere: one instruction, of which the compiler makes two.
NINFER_DEVICE uint32_t pick(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
  return r;
}

// e2m1x16_plain (common.cuh) with fewer instructions: unpacking is bound by the pipe of shifts and masks.
NINFER_DEVICE void e2m1x16(uint32_t a, uint32_t b, uint32_t* out) {
  const uint32_t keep = 0x81c081c0u;
  const uint32_t c = pick(0x003f003fu, pick(0x001b001bu, a >> 10, b >> 8), b >> 2);
  out[0] = a & keep, out[1] = (a << 3) & keep, out[2] = (a << 6) & keep, out[3] = (c << 6) & keep;
  out[4] = b & keep, out[5] = (b << 3) & keep, out[6] = (b << 6) & keep, out[7] = (c << 3) & keep;
}

// Sixteen codes of row g and of row g + 8 times their operand: the lane's own sums are out[0] and, of columns 2 t + 1, out[3].
NINFER_DEVICE void multiply_plain(float* out, uint2 row_g, uint2 row_g8, uint4 x0, uint4 x1) {
  uint32_t lo[8], hi[8];
  out[0] = out[1] = out[2] = out[3] = 0;
  e2m1x16(row_g.x, row_g.y, lo), e2m1x16(row_g8.x, row_g8.y, hi);
  mma_bf16(out, lo[0], hi[0], lo[1], hi[1], x0.x, x0.y);
  mma_bf16(out, lo[2], hi[2], lo[3], hi[3], x0.z, x0.w);
  mma_bf16(out, lo[4], hi[4], lo[5], hi[5], x1.x, x1.y);
  mma_bf16(out, lo[6], hi[6], lo[7], hi[7], x1.z, x1.w);
}

// Eight activations in the codes' order, times 2^60.
NINFER_DEVICE uint4 operand(uint4 v) {
  v = order_pairs_by4(v);
  return make_uint4(scale_e4m3_x(v.x), scale_e4m3_x(v.y), scale_e4m3_x(v.z), scale_e4m3_x(v.w));
}

NINFER_DEVICE float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
