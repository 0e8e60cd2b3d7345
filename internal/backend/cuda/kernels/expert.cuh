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

// Sixteen E2M1 codes of a packed bank to eight BF16 pairs (k, k+4) for k = 0..3, then the same from 8 on, each the value times 2^-126.
// Activations carry 2^60 (scale_e4m3_x), and a scale multiplies sums instead of weights.
//
// Packed codes (expert_repack) are laid out for this: in each 16-bit half three codes have magnitude and sign nine bits apart, where a
// shift and a mask put them in place; the bits of the fourth are split over both words.
//   word 0, bits 8..6 and 15: pair 0; 5..3 and 12: pair 1; 2..0 and 9: pair 2; word 1 likewise pairs 4, 5, 6
//   pair 3: low two magnitude bits in word 0 at 10, 11, the third and the sign in word 1 at 10, 11; pair 7 at 13, 14
#define E2M1_UNDO 73786976294838206464.0f  // 2^66
NINFER_DEVICE void e2m1x16(uint32_t a, uint32_t b, uint32_t* out) {
  const uint32_t keep = 0x81c081c0u;
  const uint32_t c = pick(0x003f003fu, pick(0x001b001bu, a >> 10, b >> 8), b >> 2);
  out[0] = a & keep, out[1] = (a << 3) & keep, out[2] = (a << 6) & keep, out[3] = (c << 6) & keep;
  out[4] = b & keep, out[5] = (b << 3) & keep, out[6] = (b << 6) & keep, out[7] = (c << 3) & keep;
}

// The layout's other side: sixteen codes, low nibble first, to two words.
NINFER_DEVICE uint2 pack_codes(uint2 raw) {
  uint32_t w[2] = {0, 0};
#pragma unroll
  for (int k = 0; k < 16; k++) {
    const uint32_t code = (k < 8 ? raw.x : raw.y) >> (4 * (k & 7)) & 15, magnitude = code & 7, sign = code >> 3;
    const int half = 16 * ((k >> 2) & 1), j = k & 3, word = k >> 3;
    if (j < 3) {
      w[word] |= (magnitude << (6 - 3 * j) | sign << (15 - 3 * j)) << half;
    } else {
      const int at = (word ? 13 : 10) + half;
      w[0] |= (magnitude & 3) << at;
      w[1] |= (magnitude >> 2 | sign << 1) << at;
    }
  }
  return make_uint2(w[0], w[1]);
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
