// Hyper-connection site: mixes four residual streams into a block's input and makes the weights that put its output back.
//
//   hc_down    X' = X + inject * y (BF16);  d[i] = sum_k Wdown[i][k] X'[k] (1 + w[k]) per stream, four inject rows likewise, and
//              the streams' sums of squares. The norm is a scalar per stream, so it is applied to the partial sums later.
//   hc_up_mix  low = silu(sum_s rstd_s d_s / 4);  M = sigmoid(Wup low);  mix[c] = mean_s M[s][c] rstd_s X'[s][c] (1 + w[s][c]);
//              inject = 2 sigmoid(sum_s rstd_s d_s / 4) from the inject rows.
//
// What counts is the time from the activations' arrival to the result, and before that whether a block finds room beside the kernel before, so that
// its weights come while it waits. Products are the tensor instruction's; what little precision its operands lack of FP32 is said where they are made.
// Sums have a fixed order that does not depend on the number of rows, nor on how many weight rows a block has.
//
// L2 bounds: what every block reads, only one of a block's warps asks for, and hc_up_mix's blocks of several rows make a row's operand for each
// other.
//
//   Shapes: H % 16 = 0 and at most 2560, L % 16 = 0 and at most 320, R = 1..8.
//
// Weights loaded straight into registers were slower: loads that wait for a place in L1 hold up the neighbour's shared memory.
#include "common.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

// What is made of a value that was loaded before the wait would be made right behind its load, for which a warp would wait there; made of what this
// gives it is made here at the earliest.
NINFER_DEVICE void looked_at(uint32_t& v) { asm volatile("" : "+r"(v)::"memory"); }
// An address that is to be in registers here, not to be made where it is used.
template <typename T>
NINFER_DEVICE void made(const T*& p) { asm volatile("" : "+l"(p)); }
NINFER_DEVICE void made(uint32_t& p) { asm volatile("" : "+r"(p)); }

// A row's scale, BF16 or FP32: the word that it is in, by one load without a choice, and its value from that.
NINFER_DEVICE uint64_t scale_at(const void* scale, uint32_t f32, uint32_t row) { return (uint64_t)scale + (f32 ? 4 * row : 2 * row); }
NINFER_DEVICE uint32_t scale_word(const void* scale, uint32_t f32, uint32_t row) { return __ldg((const uint32_t*)(scale_at(scale, f32, row) & ~(uint64_t)3)); }
NINFER_DEVICE float scale_value(uint32_t word, const void* scale, uint32_t f32, uint32_t row) {
  return __uint_as_float(f32 ? word : scale_at(scale, f32, row) & 2 ? word & 0xffff0000u : word << 16);
}
// A BF16 number's bits, past L1.
NINFER_DEVICE uint32_t ldg_l2_u16(const bf16* p) {
  uint16_t v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}

// Two values of the streams after injection, as stored: x + inject * y.
NINFER_DEVICE uint32_t injected(uint32_t x, uint32_t y, float inject) { return pack_bf16(fmaf(inject, bf16_lo(y), bf16_lo(x)), fmaf(inject, bf16_hi(y), bf16_hi(x))); }

static constexpr float kEps = 1e-6f;

// ---- clusters ----

NINFER_DEVICE uint32_t cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// The same place of another block's shared memory.
NINFER_DEVICE uint32_t in_block(uint32_t at, uint32_t rank) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
  return r;
}
// Stores a word in a block of the cluster and counts its bytes in that block's barrier.
NINFER_DEVICE void send(uint32_t at, uint32_t v, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at), "r"(v), "r"(bar) : "memory");
}
// Waits for what send announces.
NINFER_DEVICE void mbar_wait_cluster(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(bar), "r"(parity) : "memory");
}
// ---- hc_down ----

static constexpr int kDownWarps = 10;
static constexpr int kDownThreads = 32 * kDownWarps;

// The larger magnitude of each half; the signs mean nothing.
NINFER_DEVICE uint32_t max_magnitude(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
NINFER_DEVICE uint2 ldg_l2_64(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
// The thread's arrival at a barrier when the copies that it has asked for are there.
NINFER_DEVICE void mbar_arrive_copies(uint32_t bar) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory"); }

// Adds up what all slices of a half gave, times the scale, as hc_up_mix does with its quarters.
NINFER_DEVICE float add_up(const float* v, uint32_t step, float scale) {
  float s[2];
#pragma unroll
  for (uint32_t i = 0; i < 10; i++) s[i / 5] = i % 5 ? s[i / 5] + v[i * step] : v[i * step];
  return __fadd_rn(__fmul_rn(s[0], scale), __fmul_rn(s[1], scale));
}
NINFER_DEVICE float squares_of(uint32_t a, uint32_t b) {
  const float f[4] = {bf16_lo(a), bf16_hi(a), bf16_lo(b), bf16_hi(b)};
  return fmaf(f[3], f[3], fmaf(f[2], f[2], fmaf(f[1], f[1], f[0] * f[0])));
}
// The sum of 128 k, four a lane; every other 32 of them by themselves, which down_many has in two warps.
NINFER_DEVICE float sum_of_slice(float v) {
  v += __shfl_xor_sync(~0u, v, 16);
#pragma unroll
  for (int o = 4; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v + __shfl_xor_sync(~0u, v, 8);
}
static constexpr uint32_t kNone = 0x80008000;  // where there is no block output its values are -0, which change nothing, and its weight is 0

// What a block of either has to do.
struct DownShare {
  uint32_t stream, k0, size;  // its k
  uint32_t row0, n, most;     // its first weight row, how many it has, how many a block has at most
};
// PARTS: halves or quarters of a stream. The halves are multiples of sixteen k; of a short one there is no second quarter.
template <uint32_t PARTS, bool INJECT>
NINFER_DEVICE DownShare down_share(const HcDownParams& p, uint32_t part, uint32_t group) {
  constexpr uint32_t kPart = 2560 / PARTS;
  const uint32_t each = quotient(p.l, p.groups), more = p.l - each * p.groups;  // the shares of share_start
  const uint32_t longer = (p.h / 2 + 15) & ~15u, half = part / (PARTS / 2) % 2, whole = half ? p.h - longer : longer, skip = PARTS == 4 ? part % 2 * kPart : 0;
  DownShare s;
  s.stream = part / PARTS, s.k0 = (half ? longer : 0) + skip, s.size = min(whole - min(skip, whole), kPart);
  s.row0 = INJECT ? 0 : group * each + min(group, more), s.n = INJECT ? (p.inj_w ? 4 : 0) : each + (group < more), s.most = each + (more > 0);
  return s;
}

// One or two activation rows (MOST).
template <uint32_t MOST>
struct DownShared {
  float sums[kDownWarps][MOST][36];  // of a slice; 32 are used
  float undo[kDownWarps][MOST];      // what takes a slice's power of two back
  float squares[kDownWarps][MOST];
};

// Half of a stream's k of up to 32 weight rows, or of its inject rows (INJECT). A warp has 128 k; its threads make the operands of four k each, in shared memory, of
// all activation rows; it multiplies all weight rows. The block of the inject rows, which has least to do, writes the rows and their squares, also where there are
// no inject rows (a mixer that injects nothing).
//
// E4M3 weights are FP16 numbers, and so is their operand, times a power of two that brings the largest of the warp's below 2^15: 2^-11 of each value
// is lost at most, where its BF16 result loses 2^-8. BF16 weights have two BF16 operands, high and low part, of which 2^-16 is lost.
template <bool FP8, bool INJECT, uint32_t MOST>
NINFER_DEVICE void down_rows(const HcDownParams& p, uint32_t part, uint32_t group, DownShared<MOST>& sh) {
  constexpr bool HALF = FP8 && !INJECT;
  constexpr uint32_t kPart = 1280;
  constexpr uint32_t kHalf = kPart + 32, kWhole = 2 * kPart + 64;  // bytes from a weight row to the next, apart in banks
  constexpr uint32_t bytes = HALF ? 1 : 2, pitch = HALF ? kHalf : kWhole, cell = 256 + 64;
  constexpr int kTiles = INJECT ? 1 : 2;  // of sixteen weight rows
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto [stream, k0, size, row0, n, most] = down_share<2, INJECT>(p, part, group);
  const uint32_t bar = smem_addr(smem), weights = bar + 128;
  STAMP_BEGIN(120 + FP8)
  // The copies first: an instruction that is new to the SM takes some six clocks.
  const uint8_t* const stored = (const uint8_t*)(INJECT ? (const void*)p.inj_w : p.down) + (((uint64_t)row0 * 4 + stream) * p.h + k0) * bytes;
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    mbar_fence_init();
    mbar_expect(bar, n * bytes * size);
  }
  __syncthreads();
  if (lane == 0)
    for (uint32_t i = warp; i < n; i += kDownWarps) bulk_load(weights + i * pitch, stored + (uint64_t)i * 4 * p.h * bytes, bytes * size, bar, policy_evict_first());
  const uint32_t k = warp * 128 + lane * 4;
  const bool mine = k < size;
  // Behind the weights each slice of k has a cell for a row's operand, or its high part, and one for the low part.
  const uint32_t second = p.r * cell + (p.r % 2 ? 0 : 64), per_slice = HALF ? p.r * cell : second + p.r * cell;
  const uint32_t cells = weights + (INJECT && FP8 ? 4 * kWhole : FP8 ? max(most * kHalf, 4 * kWhole) : max(most, 4) * kWhole) + warp * per_slice;
  uint2 norm = make_uint2(0, 0);
  if (mine) norm = __ldg((const uint2*)(p.norm + (uint64_t)stream * p.h + k0 + k));
  uint32_t scale = 0;  // of the weight row whose sum the lane adds up
  if (HALF && lane < n) scale = scale_word(p.down_scale, p.scale_f32, row0 + lane);
  const bf16 *xs = p.x + (uint64_t)stream * p.h + k0 + k, *ys = p.y + k0 + k;
  made(xs), made(ys);
  const bool pending = p.y != nullptr;
  // As the first operand of the tensor instruction: rows g and g + 8 of a tile, eight k. Where a row is missing another is read, whose sums nobody reads; where k
  // ends the operand is zero.
  const uint32_t first = min(warp * 128 + 8 * t, size - 8), room = size - 8 - first;
  uint32_t at[2 * kTiles];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; i++) at[i] = weights + min(g + 8 * i, max(n, 1) - 1) * pitch + first * bytes, made(at[i]);
  uint2 x[MOST], y[MOST];
  uint32_t inject_bits[MOST];
#pragma unroll
  for (uint32_t r = 0; r < MOST; r++) {
    x[r] = y[r] = make_uint2(kNone, kNone), inject_bits[r] = 0;
    if (pending) {  // the streams and the weights are older than the block output, see HcDownParams
      inject_bits[r] = __float_as_uint(ldg_l2_f32(p.inject + r * 4 + stream));
      if (mine) x[r] = ldg_l2_64(xs + r * 4 * p.h);
    }
  }
  if (p.trigger == 0) pdl_trigger();
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)
#pragma unroll
  for (uint32_t r = 0; r < MOST; r++) {
    if (mine && pending) y[r] = ldg_l2_64(ys + r * p.h);
    if (mine && !pending) x[r] = ldg_l2_64(xs + r * 4 * p.h);
  }
  mbar_wait(bar, 0);
  // The first kEarly chunks of 32 k of a tile are in registers as operands before the activations come, and all others of E4M3 as stored.
  constexpr int kAll = 4 * kTiles;
  constexpr int kEarly = HALF ? (MOST == 1 ? 6 : 4) : INJECT || MOST == 1 ? 4 : 5;
  uint4 lo[kAll], hi[kAll];
  uint2 raw_lo[kAll], raw_hi[kAll];
  auto fetch = [&](int c) {
    const uint32_t step = min(c % 4 * 32u, room) * bytes;
    if (HALF)
      raw_lo[c] = lds64(at[c / 4 * 2] + step), raw_hi[c] = lds64(at[c / 4 * 2 + 1] + step);
    else
      lo[c] = lds128(at[c / 4 * 2] + step), hi[c] = lds128(at[c / 4 * 2 + 1] + step);
  };
  auto convert = [&](int c) {
    if (!HALF) return;
    e4m3x4_f16(raw_lo[c].x, lo[c].x, lo[c].y), e4m3x4_f16(raw_lo[c].y, lo[c].z, lo[c].w);
    e4m3x4_f16(raw_hi[c].x, hi[c].x, hi[c].y), e4m3x4_f16(raw_hi[c].y, hi[c].z, hi[c].w);
  };
#pragma unroll
  for (int c = 0; c < (HALF ? kAll : kEarly); c++) {
    fetch(c);
    if (c < kEarly) convert(c);
  }
  looked_at(norm.x), looked_at(norm.y), looked_at(scale);
  const float nf[4] = {bf16_lo(norm.x), bf16_hi(norm.x), bf16_lo(norm.y), bf16_hi(norm.y)};
  uint32_t highest = 0;  // less the exponent of a row's largest activation it is that of its power of two
  if (HALF) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(1.0f + nf[i]));
    highest = 394 - max(27u, __reduce_max_sync(~0u, __float_as_uint(largest)) >> 23);  // what the norm takes away must not make the others overflow
  }
  STAMP(3)
#pragma unroll
  for (uint32_t r = 0; r < MOST; r++) looked_at(inject_bits[r]), looked_at(x[r].x), looked_at(x[r].y);
  if (p.trigger == 1) pdl_trigger();

  // The rows side by side: the operand. x becomes what the streams are then.
  float v[MOST][4];
  uint32_t power[MOST];
#pragma unroll
  for (uint32_t r = 0; r < MOST; r++) {
    const float inject = __uint_as_float(inject_bits[r]);
    x[r] = make_uint2(injected(x[r].x, y[r].x, inject), injected(x[r].y, y[r].y, inject));
    const uint32_t m = max_magnitude(x[r].x, x[r].y);
    power[r] = max(m & 0x7fffu, m >> 16 & 0x7fffu);
  }
  if (HALF)
#pragma unroll
    for (uint32_t r = 0; r < MOST; r++) power[r] = max(1, min(253, (int)highest - (int)(__reduce_max_sync(~0u, power[r]) >> 7)));
#pragma unroll
  for (uint32_t r = 0; r < MOST; r++) {
    uint2 z = x[r];
    if (HALF) z.x = mul_bf162(z.x, power[r] * 0x00800080u), z.y = mul_bf162(z.y, power[r] * 0x00800080u);
    v[r][0] = bf16_lo(z.x), v[r][1] = bf16_hi(z.x), v[r][2] = bf16_lo(z.y), v[r][3] = bf16_hi(z.y);
#pragma unroll
    for (int i = 0; i < 4; i++) v[r][i] = fmaf(v[r][i], nf[i], v[r][i]);
  }
#pragma unroll
  for (uint32_t r = 0; r < MOST; r++) {
    const uint32_t to = cells + r * cell + 8 * lane;
    const float* f = v[r];
    if (HALF) {
      sts64(to, make_uint2(pack_f16(f[0], f[1]), pack_f16(f[2], f[3])));
      if (lane == 0) sh.undo[warp][r] = __uint_as_float((254 - power[r]) << 23);
    } else {
      const uint32_t h0 = pack_bf16(f[0], f[1]), h1 = pack_bf16(f[2], f[3]);
      sts64(to, make_uint2(h0, h1));
      sts64(to + second, make_uint2(pack_bf16(f[0] - bf16_lo(h0), f[1] - bf16_hi(h0)), pack_bf16(f[2] - bf16_lo(h1), f[3] - bf16_hi(h1))));
    }
  }
  float square[MOST];
#pragma unroll
  for (uint32_t r = 0; r < MOST; r++)
    if (INJECT && mine) *(uint2*)(p.x_out + ((uint64_t)r * 4 + stream) * p.h + k0 + k) = x[r];
  __syncwarp();
  if (INJECT)  // beside the product
#pragma unroll
    for (uint32_t r = 0; r < MOST; r++) square[r] = sum_of_slice(squares_of(x[r].x, x[r].y));
  STAMP(4)
  float undo[2] = {1, 1};  // of the lane's columns
  if (HALF)
#pragma unroll
    for (uint32_t i = 0; i < 2 && i < MOST; i++) undo[i] = sh.undo[warp][2 * t + i < MOST ? 2 * t + i : 0];
  // a column's row: of BF16 each has two, high and low part
  const uint32_t of = HALF ? (g < MOST ? g : 0) : min(g / 2, MOST - 1), from = cells + of * cell + (HALF || g % 2 == 0 ? 0 : second) + 16 * t;
  uint4 b[4];
#pragma unroll
  for (int c = 0; c < 4; c++) b[c] = lds128(from + 64 * c);
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) {
    float acc[4][4] = {};  // of every other 32 k, two each
#pragma unroll
    for (int c = 4 * tile; c < 4 * tile + 4; c++) {
      if (!HALF && c >= kEarly) fetch(c);
      if (c >= kEarly) convert(c);
      float *even = acc[c % 2 * 2], *odd = acc[c % 2 * 2 + 1];
      const uint4 v = b[c % 4];
      if (HALF)
        mma_f16(even, lo[c].x, hi[c].x, lo[c].y, hi[c].y, v.x, v.y), mma_f16(odd, lo[c].z, hi[c].z, lo[c].w, hi[c].w, v.z, v.w);
      else
        mma_bf16(even, lo[c].x, hi[c].x, lo[c].y, hi[c].y, v.x, v.y), mma_bf16(odd, lo[c].z, hi[c].z, lo[c].w, hi[c].w, v.z, v.w);
    }
    float(*to)[36] = sh.sums[warp];
    const uint32_t i = 16 * tile + g;
    if (HALF) {
      float s[4];
#pragma unroll
      for (int j = 0; j < 4; j++) s[j] = (acc[0][j] + acc[1][j]) + (acc[2][j] + acc[3][j]);
      if (2 * t < MOST) to[2 * t][i] = s[0] * undo[0], to[2 * t][i + 8] = s[2] * undo[0];
      if (2 * t + 1 < MOST) to[2 * t + 1][i] = s[1] * undo[1], to[2 * t + 1][i + 8] = s[3] * undo[1];
    } else if (t < MOST) {
#pragma unroll
      for (int j = 0; j < 4; j += 2)  // high and low part's
        to[t][i + 4 * j] = ((acc[0][j] + acc[1][j]) + (acc[0][j + 1] + acc[1][j + 1])) + ((acc[2][j] + acc[3][j]) + (acc[2][j + 1] + acc[3][j + 1]));
    }
  }
  if (INJECT && lane == 0)
#pragma unroll
    for (uint32_t r = 0; r < MOST; r++) sh.squares[warp][r] = square[r];
  STAMP(5)
  __syncthreads();
  STAMP(6)
  if (warp < MOST && lane < n) {
    const float s = HALF ? scale_value(scale, p.down_scale, p.scale_f32, row0 + lane) : 1.0f;
    p.partial[(uint64_t)(8 * warp + part) * (p.l + 4) + (INJECT ? p.l : row0) + lane] = add_up(&sh.sums[0][warp][lane], MOST * 36, s);
  }
  const uint32_t q = kDownThreads - 1 - threadIdx.x;  // a row whose squares are here
  if (INJECT && q < MOST) p.square[8 * q + part] = add_up(&sh.squares[0][q], MOST, 1.0f);
  STAMP(7)
}

// Three activation rows and more: up to four (FEW), or eight.
struct ManyShared {
  float undo[kDownWarps / 2][8];  // what takes a row's power of two back
  float squares[kDownWarps][8];
  uint32_t most[kDownWarps][8];   // exponent of a row's largest magnitude
  uint32_t highest[kDownWarps];   // and of 1 + w
};

// A quarter of a stream's k of up to 64 weight rows, or of its inject rows (INJECT). Two warps have 128 k, each every other 32 of them, of all rows. Lane (g, t) makes
// row g's operand of eight k where the tensor instruction wants it, in registers. The sums are those of down_rows. The block of the inject rows, which has least to
// do, writes the rows and their squares.
//
// Of few rows (FEW, BF16) it is half of a stream's k of up to 32 weight rows, and a warp has 128 k. Columns 2 i and 2 i + 1 are row i's high and low parts; a lane of
// either makes both of every other 32 k and gives one away.
template <bool FP8, bool INJECT, bool FEW>
NINFER_DEVICE void down_many(const HcDownParams& p, uint32_t part, uint32_t group, ManyShared& sh) {
  static_assert(!FP8 || !FEW);
  constexpr bool HALF = FP8 && !INJECT;
  constexpr uint32_t kParts = FEW ? 2 : 4, kSlices = FEW ? 10 : 5, kPart = 128 * kSlices, kRows = INJECT ? 16 : FEW ? 32 : 64, kMost = FEW ? 4 : 8;
  constexpr uint32_t bytes = HALF ? 1 : 2, pitch = bytes * kPart + 32 * bytes;
  constexpr int kTiles = INJECT ? 1 : kRows / 16;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t odd = FEW ? g % 2 : warp % 2, slice = FEW ? warp : warp / 2;
  const auto [stream, k0, size, row0, n, most] = down_share<kParts, INJECT>(p, part, group);
  const uint32_t bar = smem_addr(smem), weights = bar + 128;
  STAMP_BEGIN(120 + FP8)
  const uint8_t* const stored = (const uint8_t*)(INJECT ? (const void*)p.inj_w : p.down) + (((uint64_t)row0 * 4 + stream) * p.h + k0) * bytes;
  if (threadIdx.x == 0) {
    mbar_init(bar, HALF ? kDownThreads : 1);
    mbar_fence_init();
    if (!HALF) mbar_expect(bar, n * bytes * size);
  }
  if (HALF && size) {  // many short pieces: bulk copies would take longer to ask for
    constexpr uint32_t kPieces = bytes * kPart / 16, kAtOnce = kDownThreads / kPieces;
    const uint64_t policy = policy_evict_first();
    const uint32_t piece = threadIdx.x % kPieces * 16;
    if (piece < bytes * size)
      for (uint32_t i = threadIdx.x / kPieces; i < n; i += kAtOnce) copy16(weights + i * pitch + piece, stored + (uint64_t)i * 4 * p.h * bytes + piece, policy);
  }
  __syncthreads();
  if (HALF) {
    mbar_arrive_copies(bar);
  } else if (lane == 0 && size) {
    for (uint32_t i = warp; i < n; i += kDownWarps) bulk_load(weights + i * pitch, stored + (uint64_t)i * 4 * p.h * bytes, bytes * size, bar, policy_evict_first());
  }
  float* const partial = p.partial + part * (p.l + 4) + (INJECT ? p.l : row0);  // of the first activation row
  if (size == 0) {
    if (p.trigger == 0) pdl_trigger();
    pdl_wait();
    if (p.trigger != 0) pdl_trigger();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n * p.r; i += kDownThreads) partial[(uint64_t)(i / n) * (4 * kParts) * (p.l + 4) + i % n] = 0;
    if (INJECT && threadIdx.x < p.r) p.square[threadIdx.x * (4 * kParts) + part] = 0;
    return;
  }
  const uint32_t k = slice * 128 + odd * 32 + t * 8;  // and 64 more
  const bool mine[2] = {k < size, k + 64 < size};
  uint4 norm[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}, x[2], y[2];
  const bf16* const norms = p.norm + (uint64_t)stream * p.h + k0 + k;
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (mine[j]) norm[j] = __ldg((const uint4*)(norms + 64 * j));
  // The weight rows and the activation row whose sums the thread adds up: of E4M3 weights two and one.
  const uint32_t result = HALF ? threadIdx.x / 8 : FEW ? lane : 32 * odd + lane;
  uint32_t scale[2] = {0, 0};
  if (HALF)
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (threadIdx.x < 256 && result + 32 * i < n) scale[i] = scale_word(p.down_scale, p.scale_f32, row0 + result + 32 * i);
  const uint32_t column = FEW ? g / 2 : g, row = column < p.r ? column : 0;  // a row that is not there is another one, whose sums nobody reads
  const bool pending = p.y != nullptr;
  const bf16 *xs = p.x + ((uint64_t)row * 4 + stream) * p.h + k0 + k, *ys = p.y + (uint64_t)row * p.h + k0 + k;
  made(xs), made(ys);
  const uint32_t first = min(slice * 128 + 8 * t, size - 8), room = size - 8 - first, last = max(n, 1) - 1;
  uint32_t steps[FEW ? 4 : 2];  // from a weight row's first k to the chunks
#pragma unroll
  for (uint32_t j = 0; j < (FEW ? 4 : 2); j++) steps[j] = min(FEW ? 32 * j : odd * 32 + 64 * j, room) * bytes;
  uint32_t at[2 * kTiles];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; i++) at[i] = weights + min(g + 8 * i, last) * pitch + first * bytes, made(at[i]);
#pragma unroll
  for (int j = 0; j < 2; j++) x[j] = y[j] = make_uint4(kNone, kNone, kNone, kNone);
  float inject = 0;
  if (pending) {  // the streams and the weights are older than the block output, see HcDownParams
    inject = ldg_l2_f32(p.inject + row * 4 + stream);
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (mine[j]) x[j] = ldg_l2(xs + 64 * j);
  }
  if (p.trigger == 0) pdl_trigger();
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)
#pragma unroll
  for (int j = 0; j < 2; j++) {
    if (mine[j] && pending) y[j] = ldg_l2(ys + 64 * j);
    if (mine[j] && !pending) x[j] = ldg_l2(xs + 64 * j);
  }
  mbar_wait(bar, 0);
  // E4M3 weights are in registers before the activations come. A slice without k has none: its place may be another's, which gets sums.
  uint2 raw[kTiles][2][2];
  if (HALF)
#pragma unroll
    for (int i = 0; i < kTiles; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        raw[i][j][0] = raw[i][j][1] = make_uint2(0, 0);
        if (slice * 128 < size) raw[i][j][0] = lds64(at[2 * i] + steps[j]), raw[i][j][1] = lds64(at[2 * i + 1] + steps[j]);
      }
#pragma unroll
  for (int j = 0; j < 2; j++) looked_at(norm[j].x), looked_at(norm[j].y), looked_at(norm[j].z), looked_at(norm[j].w);
  looked_at(scale[0]), looked_at(scale[1]);
  uint32_t highest = 0;
  if (HALF) {
    float largest = 0;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t w = (&norm[j].x)[i];
        largest = fmaxf(largest, fmaxf(fabsf(1.0f + bf16_lo(w)), fabsf(1.0f + bf16_hi(w))));
      }
    highest = __reduce_max_sync(~0u, __float_as_uint(largest)) >> 23;
    if (lane == 0) sh.highest[warp] = highest;
  }
  STAMP(3)
  if (p.trigger == 1) pdl_trigger();
  uint32_t inject_bits = __float_as_uint(inject);
  looked_at(inject_bits);
#pragma unroll
  for (int j = 0; j < 2; j++) looked_at(x[j].x), looked_at(x[j].y), looked_at(x[j].z), looked_at(x[j].w);
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) (&x[j].x)[i] = injected((&x[j].x)[i], (&y[j].x)[i], __uint_as_float(inject_bits));
  uint32_t power = 0;
  if (HALF) {
    uint32_t m = max_magnitude(max_magnitude(max_magnitude(x[0].x, x[0].y), max_magnitude(x[0].z, x[0].w)), max_magnitude(max_magnitude(x[1].x, x[1].y), max_magnitude(x[1].z, x[1].w)));
    m = max(m & 0x7fffu, m >> 16 & 0x7fffu);
    m = max(m, __shfl_xor_sync(~0u, m, 1));
    m = max(m, __shfl_xor_sync(~0u, m, 2));
    if (t == 0) sh.most[warp][g] = m;
    named_sync(1 + slice, 64);
    // less the exponent of a row's largest activation it is that of its power of two; what the norm takes away must not make the others overflow
    highest = 394 - max(27u, max(highest, sh.highest[warp ^ 1]));
    power = max(1, min(253, (int)highest - (int)(max(m, sh.most[warp ^ 1][g]) >> 7)));
    if (odd == 0 && t == 0) sh.undo[slice][g] = __uint_as_float((254 - power) << 23);
    power *= 0x00800080u;
  }
  if (INJECT && column < p.r) {
    bf16* const to = p.x_out + ((uint64_t)column * 4 + stream) * p.h + k0 + k;
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (mine[j]) *(uint4*)(to + 64 * j) = x[j];
  }
  uint4 b[2], low[2];
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t z = (&x[j].x)[i];
      const uint32_t w = (&norm[j].x)[i];
      if (HALF) z = mul_bf162(z, power);
      const float v0 = fmaf(bf16_lo(z), bf16_lo(w), bf16_lo(z)), v1 = fmaf(bf16_hi(z), bf16_hi(w), bf16_hi(z));
      if (HALF) {
        (&b[j].x)[i] = pack_f16(v0, v1);
      } else {
        const uint32_t h = pack_bf16(v0, v1);
        (&b[j].x)[i] = h, (&low[j].x)[i] = pack_bf16(v0 - bf16_lo(h), v1 - bf16_hi(h));
      }
    }
  uint4 parts[FEW ? 4 : 1];  // the column's, of all k
  if (FEW)
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t h = (&b[j].x)[i], l = (&low[j].x)[i], other = __shfl_xor_sync(~0u, odd ? h : l, 4);
        (&parts[FEW ? 2 * j : 0].x)[i] = odd ? other : h, (&parts[FEW ? 2 * j + 1 : 0].x)[i] = odd ? l : other;
      }
  STAMP(4)
  constexpr uint32_t kRow = kRows + 4, kWarp = kMost * kRow;
  // Sums: behind BF16 weights [warp][activation row][weight row]; E4M3 weights are in registers of both of a slice's warps, and a weight row's
  // 128 k of it become theirs: [warp][activation row].
  float* const sums = (float*)(smem + 128 + (HALF ? 0 : (INJECT ? 4 : most) * pitch));
  float* const to = HALF ? sums + (g * pitch + slice * 128) / 4 + odd * 8 + 2 * t : sums + warp * kWarp + (FEW ? 1 : 2) * t * kRow + g;
#pragma unroll(HALF ? 4 : 1)
  for (int i = 0; i < kTiles; i++) {
    if (!HALF && !INJECT && 16 * i >= n) break;
    const uint32_t from = weights + min(g + 16 * i, last) * pitch + first * bytes, from8 = weights + min(g + 16 * i + 8, last) * pitch + first * bytes;
    float s[4];
    if (HALF) {
      float even[4] = {}, odds[4] = {};
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint4 lo, hi;
        e4m3x4_f16(raw[i][j][0].x, lo.x, lo.y), e4m3x4_f16(raw[i][j][0].y, lo.z, lo.w);
        e4m3x4_f16(raw[i][j][1].x, hi.x, hi.y), e4m3x4_f16(raw[i][j][1].y, hi.z, hi.w);
        mma_f16(even, lo.x, hi.x, lo.y, hi.y, b[j].x, b[j].y), mma_f16(odds, lo.z, hi.z, lo.w, hi.w, b[j].z, b[j].w);
      }
#pragma unroll
      for (int c = 0; c < 4; c++) s[c] = even[c] + odds[c];
    } else if (FEW) {
      float even[2][4] = {}, odds[2][4] = {};  // of every other 32 k
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint4 lo = lds128(from + steps[j]), hi = lds128(from8 + steps[j]), v = parts[j];
        mma_bf16(even[j % 2], lo.x, hi.x, lo.y, hi.y, v.x, v.y), mma_bf16(odds[j % 2], lo.z, hi.z, lo.w, hi.w, v.z, v.w);
      }
#pragma unroll
      for (int c = 0; c < 4; c += 2)
        s[c] = ((even[0][c] + odds[0][c]) + (even[0][c + 1] + odds[0][c + 1])) + ((even[1][c] + odds[1][c]) + (even[1][c + 1] + odds[1][c + 1]));
    } else {
      float even[2][4] = {}, odds[2][4] = {};  // of high and low parts
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint4 lo = lds128(from + steps[j]), hi = lds128(from8 + steps[j]);
        mma_bf16(even[0], lo.x, hi.x, lo.y, hi.y, b[j].x, b[j].y), mma_bf16(odds[0], lo.z, hi.z, lo.w, hi.w, b[j].z, b[j].w);
        mma_bf16(even[1], lo.x, hi.x, lo.y, hi.y, low[j].x, low[j].y), mma_bf16(odds[1], lo.z, hi.z, lo.w, hi.w, low[j].z, low[j].w);
      }
#pragma unroll
      for (int c = 0; c < 4; c++) s[c] = (even[0][c] + odds[0][c]) + (even[1][c] + odds[1][c]);
    }
    if (HALF) {
      if (16 * i + g < most) *(float2*)(to + 16 * i * (pitch / 4)) = make_float2(s[0], s[1]);
      if (16 * i + g + 8 < most) *(float2*)(to + (16 * i + 8) * (pitch / 4)) = make_float2(s[2], s[3]);
    } else {
      to[16 * i] = s[0], to[16 * i + 8] = s[2];
      if (!FEW) to[16 * i + kRow] = s[1], to[16 * i + 8 + kRow] = s[3];
    }
  }
  if (INJECT) {
    float q[2];  // of eight k as sum_of_slice has them
#pragma unroll
    for (int i = 0; i < 2; i++) {
      q[i] = squares_of((&x[0].x)[2 * i], (&x[0].x)[2 * i + 1]) + squares_of((&x[1].x)[2 * i], (&x[1].x)[2 * i + 1]);
      q[i] += __shfl_xor_sync(~0u, q[i], 2), q[i] += __shfl_xor_sync(~0u, q[i], 1);
    }
    float sum = q[0] + q[1];
    if (FEW) sum += __shfl_xor_sync(~0u, sum, 4);
    if (t == 0) sh.squares[warp][column] = sum;
  }
  STAMP(5)
  __syncthreads();
  STAMP(6)
  // What two warps have of a slice, in order of the slices.
  auto slices = [&](const float* v, uint32_t other, uint32_t step, const float* undo) {
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < 5; i++) {
      float s = v[i * step] + v[i * step + other];
      if (undo) s *= undo[i * 8];
      sum = i ? sum + s : s;
    }
    return sum;
  };
  if (HALF) {
    const uint32_t r = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (threadIdx.x < 256 && r < p.r && result + 32 * i < n)
        partial[(uint64_t)r * (4 * kParts) * (p.l + 4) + result + 32 * i] =
            slices(sums + (result + 32 * i) * (pitch / 4) + r, 8, 32, &sh.undo[0][r]) * scale_value(scale[i], p.down_scale, p.scale_f32, row0 + result + 32 * i);
  } else if (result < n) {
#pragma unroll 1
    for (uint32_t r = slice; r < p.r; r += kSlices)
      partial[(uint64_t)r * (4 * kParts) * (p.l + 4) + result] = FEW ? add_up(sums + r * kRow + result, kWarp, 1.0f) : slices(sums + r * kRow + result, kWarp, 2 * kWarp, nullptr);
  }
  const uint32_t q = kDownThreads - 1 - threadIdx.x;  // a row whose squares are here
  if (INJECT && q < p.r) p.square[q * (4 * kParts) + part] = FEW ? add_up(&sh.squares[0][q], 8, 1.0f) : slices(&sh.squares[0][q], 8, 16, nullptr);
  STAMP(7)
}

// The grid is the parts of four streams, two halves or four quarters each, times (groups of rows, then one block for injection rows).
#define DOWN(FP8, MOST)                                           \
  __shared__ DownShared<MOST> sh;                                 \
  const uint32_t part = blockIdx.x % 8, group = blockIdx.x / 8;   \
  if (group < p.groups)                                           \
    down_rows<FP8, false, MOST>(p, part, group, sh);              \
  else                                                            \
    down_rows<FP8, true, MOST>(p, part, group, sh);
#define DOWN_MANY(FP8, FEW)                                                             \
  __shared__ ManyShared sh;                                                             \
  const uint32_t part = blockIdx.x % (FEW ? 8 : 16), group = blockIdx.x / (FEW ? 8 : 16); \
  if (group < p.groups)                                                                 \
    down_many<FP8, false, FEW>(p, part, group, sh);                                     \
  else                                                                                  \
    down_many<FP8, true, FEW>(p, part, group, sh);
// Here the last argument is a kernel's registers: 80 leave room for the kernel before it. sm_120a, which is tuned for nothing yet, needs more not to spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define MORE +16
#else
#define MORE
#endif
#pragma push_macro("NINFER_KERNEL")
#undef NINFER_KERNEL
#define NINFER_KERNEL(name, Params, threads, registers) extern "C" __global__ void __maxnreg__(registers MORE) name(const __grid_constant__ Params p)
NINFER_KERNEL(hc_down_bf16, HcDownParams, kDownThreads, 80) { DOWN(false, 1) }
NINFER_KERNEL(hc_down_e4m3, HcDownParams, kDownThreads, 80) { DOWN(true, 1) }
NINFER_KERNEL(hc_down_two_bf16, HcDownParams, kDownThreads, 80) { DOWN(false, 2) }
NINFER_KERNEL(hc_down_two_e4m3, HcDownParams, kDownThreads, 80) { DOWN(true, 2) }
NINFER_KERNEL(hc_down_few_bf16, HcDownParams, kDownThreads, 80) { DOWN_MANY(false, true) }
NINFER_KERNEL(hc_down_rows_bf16, HcDownParams, kDownThreads, 80) { DOWN_MANY(false, false) }
NINFER_KERNEL(hc_down_rows_e4m3, HcDownParams, kDownThreads, 80) { DOWN_MANY(true, false) }
#pragma pop_macro("NINFER_KERNEL")

// ---- hc_up_mix ----

// Sixteen weight rows of a tile: four columns times four streams. Two warps a tile, five chunks of the rank each. E4M3 weights are FP16 numbers, and so
// is their operand, of which 2^-11 is lost at most, or 2^-25 where it is less than 2^-14. The operand of BF16 weights is no BF16 number but two of them, whose sums are added.
static constexpr int kUpTiles = 6;
static constexpr int kChunks = 5;
static constexpr int kUpThreads = 384;
static constexpr uint32_t kUpRank = 64 * kChunks, kUpPitch = 2 * kUpRank + 64;  // k of an operand's row and bytes from one to the next
static_assert(kUpThreads == 64 * kUpTiles);

// Eight weights as pairs in order of k, E4M3 as FP16 and BF16 as they are.
template <bool FP8>
NINFER_DEVICE uint4 eight_weights(uint32_t at) {
  if constexpr (FP8) {
    const uint2 w = lds64(at);
    uint4 r;
    e4m3x4_f16(w.x, r.x, r.y), e4m3x4_f16(w.y, r.z, r.w);
    return r;
  } else {
    return lds128(at);
  }
}
// The same of an operand's numbers.
template <bool FP8>
NINFER_DEVICE float rounded(float v) {
  return FP8 ? __half2float(__float2half_rn(v)) : __bfloat162float(__float2bfloat16_rn(v));
}
template <bool FP8>
NINFER_DEVICE uint32_t pack_pair(float lo, float hi) {
  return FP8 ? pack_f16(lo, hi) : pack_bf16(lo, hi);
}
// Rows g (lo) and g + 8 (hi) of a chunk times its operand, in two sums that shorten the chain.
template <bool FP8>
NINFER_DEVICE void multiply_chunk(float* a, float* b, uint4 lo, uint4 hi, uint4 x) {
  if (FP8) {
    mma_f16(a, lo.x, hi.x, lo.y, hi.y, x.x, x.y);
    mma_f16(b, lo.z, hi.z, lo.w, hi.w, x.z, x.w);
  } else {
    mma_bf16(a, lo.x, hi.x, lo.y, hi.y, x.x, x.y);
    mma_bf16(b, lo.z, hi.z, lo.w, hi.w, x.z, x.w);
  }
}

NINFER_DEVICE float both(uint32_t a, uint32_t b) { return __uint_as_float(a) + __uint_as_float(b); }
// The sum of a stream's halves, or of the halves of both.
NINFER_DEVICE float whole(bool quarters, uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return quarters ? both(a, b) + both(c, d) : both(a, b); }

// The same as rsqrtf and sigmoid for what is never as small as a subnormal number, or as good as zero then.
NINFER_DEVICE float rsqrt_fast(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
NINFER_DEVICE float sigmoid_fast(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return r;
}
NINFER_DEVICE void sts32(uint32_t a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }
NINFER_DEVICE void sts16(uint32_t a, uint32_t v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"((uint16_t)v) : "memory"); }

NINFER_DEVICE void send2(uint32_t at, uint32_t a, uint32_t b, uint32_t bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(at), "r"(a), "r"(b), "r"(bar) : "memory");
}

// MOST: rows at most, 1, 2, 4 or 8; the arithmetic is the same. With several rows each of as many blocks of a cluster makes the operand of one row and
// sends it to the others, since the partial sums of all rows are too much for each block to read.
//
// The kernel is as long as its instructions behind the wait, most of which run once: addresses and factors are made before it.
//
// A warp's chunks of sixteen rows and of the operand are 32 k each: lane (g, t) = (lane / 4, lane % 4) has k = 8 t .. of rows g and g + 8 as the first
// operand of the tensor instruction and of column g as the second; a dot product does not care about the order of k. Nothing here branches: where a
// row of weights is missing another is read, whose sums nobody reads; where the rank ends weights are read again, and the operand is zero.
template <bool FP8, uint32_t MOST>
NINFER_DEVICE void up_columns(const HcUpParams& p) {
  constexpr bool ONE = MOST == 1;
  constexpr uint32_t kOf = FP8 ? 1 : 2;               // numbers that an operand's value is
  constexpr uint32_t kPasses = (MOST * kOf + 7) / 8;  // of eight columns
  constexpr uint32_t kBytes = FP8 ? 1 : 2;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t each = quotient(p.h, gridDim.x), more = p.h - each * gridDim.x;
  const uint32_t first = blockIdx.x * each + min(blockIdx.x, more), columns = each + (blockIdx.x < more);
  const uint32_t row_bytes = kBytes * p.l, run = columns * row_bytes, run_pitch = ((run + 127) & ~127u) + 32 * kBytes;
  const uint32_t bar = smem_addr(smem), arrived = bar + 8, weights = bar + 128, operand = weights + 4 * run_pitch;
  const uint32_t rank = ONE ? 0 : cluster_rank();
  __shared__ float sums[2][MOST][kUpTiles * 16 + 8];
  __shared__ float squares[4 * MOST];

  STAMP_BEGIN(130 + FP8)
  const bool first_of_all = FP8 && MOST <= 2;  // 200 instructions sooner, which costs more rows and BF16
  if (first_of_all && p.trigger == 0) pdl_trigger();
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    if (!ONE) mbar_init(arrived, 1);
    mbar_fence_init();
    if (!ONE) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    mbar_expect(bar, 4 * run);
    if (!ONE) mbar_expect(arrived, p.r * p.l * 2 * kOf);
  }
  __syncthreads();
  if (!ONE) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  if (warp < 4 && lane == 0) bulk_load(weights + warp * run_pitch, (const uint8_t*)p.up + ((uint64_t)warp * p.h + first) * row_bytes, run, bar, policy_evict_first());
  // In the end thread 96 i + 4 c + s has rows i and i + 4, column c, stream s.
  const uint32_t of = threadIdx.x / (kUpTiles * 16), place = threadIdx.x % (kUpTiles * 16), own = place % 4;
  const bool mine = place / 4 < columns && of < p.r;
  const uint64_t row = (uint64_t)own * p.h + first + place / 4;
  uint32_t norm_bits = 0, scale_bits = 0;
  if (mine) {
    norm_bits = __ldg((const uint16_t*)p.norm + row);
    if (FP8) scale_bits = scale_word(p.up_scale, p.scale_f32, row);
  }
  if (p.l < kUpRank)
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < kOf * p.r * (kUpRank / 8); i += kUpThreads)
      if (i % (kUpRank / 8) * 8 >= p.l) sts128(operand + i / (kUpRank / 8) * kUpPitch + i % (kUpRank / 8) * 16, make_uint4(0, 0, 0, 0));
  // Thread 4 u + s adds values 4 u + s of the streams' partial sums, of which it loads those of stream s.
  const uint32_t u = threadIdx.x / 4, s = threadIdx.x % 4, width = p.l + 4;
  const bool quarters = MOST == 8 || MOST == 4 && FP8 && p.r > 2;  // of the sums' k
  const float *parts = p.partial + ((uint64_t)rank * 4 + s) * (quarters ? 4 : 2) * width + 4 * u, *all = p.square + (quarters ? 4 : 2) * (ONE ? s : lane);
  const bf16* xs = p.x + (uint64_t)of * 4 * p.h + row;
  const bf16* out = p.mix + (uint64_t)of * p.h + first + place / 4;
  // the warp's rows of the tile: column g / 4 and two more, stream g % 4
  const uint32_t tile = warp / 2, column = tile * 4 + g / 4;
  const uint32_t k = warp % 2 * kChunks * 32 + t * 8, first_k = min(k, p.l - 8), room = p.l - 8 - first_k;
  const uint32_t lo_at = weights + g % 4 * run_pitch + (column < columns ? column : 0) * row_bytes + first_k * kBytes;
  uint32_t at[kChunks], hi = column + 2 < columns ? 2 * row_bytes : 0, from[kPasses];
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    at[c] = lo_at + min(c * 32u, room) * kBytes;
    if (!ONE) made(at[c]);
  }
#pragma unroll
  for (uint32_t j = 0; j < kPasses; j++) from[j] = operand + (8 * j + g < kOf * p.r ? 8 * j + g : 0) * kUpPitch + k * 2, made(from[j]);
  uint32_t sum_to = smem_addr(&sums[warp % 2][(3 - kOf) * t < MOST ? (3 - kOf) * t : 0][tile * 16 + g]), sum_from = smem_addr(&sums[0][of][place]), low_to = operand + 2 * (4 * u + s);
  // a BF16 scale is one half of its word
  uint32_t half = FP8 && !p.scale_f32 && !((uint64_t)p.up_scale + 2 * row & 2) ? 16 : 0, half_mask = FP8 && !p.scale_f32 ? 0xffff0000u : ~0u;
  float per_h;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(per_h) : "f"((float)p.h));
  made(parts), made(all), made(xs);
  if (!ONE) made(out), made(hi), made(sum_to), made(sum_from), made(low_to), made(half), made(half_mask);
  if (!first_of_all && p.trigger == 0) pdl_trigger();
  if (!ONE) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (MOST == 2) pdl_trigger();  // so that a router is at its wait in time, without weights that delay what is read behind this one
  STAMP(1)
  pdl_wait();
  if (MOST != 2 && p.trigger == 2) pdl_trigger();
  STAMP(2)

  const bool inject = 4 * u >= p.l;
  // The row whose operand this block makes.
  const bool makes = ONE || rank < p.r;
  uint4 part[4] = {}, square = make_uint4(0, 0, 0, 0);
  uint32_t own_x[(MOST + 3) / 4] = {};
  // One place in L2 answers one warp at a time: what all blocks read, only one of a block's warps asks for.
  const bool asks = ONE || warp == kUpThreads / 32 - 1 && lane < 4 * p.r;
  if (asks) {
    const uint2 v = ldg_l2_64(all);
    square.x = v.x, square.y = v.y;
    if (quarters) {
      const uint2 w = ldg_l2_64(all + 2);
      square.z = w.x, square.w = w.y;
    }
  }
  if (makes && 4 * u < width)
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
      if (i < 2 || quarters) part[i] = ldg_l2(parts + i * width);
#pragma unroll
  for (uint32_t j = 0; j < (MOST + 3) / 4; j++)
    if (mine && of + 4 * j < p.r) own_x[j] = ldg_l2_u16(xs + j * 16 * p.h);
  looked_at(norm_bits), looked_at(scale_bits);
  const float norm = 1.0f + __uint_as_float(norm_bits << 16), scale = FP8 ? __uint_as_float(scale_bits << half & half_mask) : 1.0f;
  mbar_wait(bar, 0);
  uint4 lo[kChunks], up[kChunks];  // rows g and g + 8
  auto read = [&](int c) { lo[c] = eight_weights<FP8>(at[c]), up[c] = eight_weights<FP8>(at[c] + hi); };
  if (ONE)
#pragma unroll
    for (int c = 0; c < kChunks; c++) read(c);
  const float sum_of_squares = whole(quarters, square.x, square.y, square.z, square.w);
  if (!ONE) {
    if (asks) squares[lane] = sum_of_squares;
    __syncthreads();
  }
  if (makes) {
    const float f = rsqrt_fast(fmaf(ONE ? sum_of_squares : squares[4 * rank + s], per_h, kEps));
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = whole(quarters, (&part[0].x)[i], (&part[1].x)[i], (&part[2].x)[i], (&part[3].x)[i]);
    float a = s & 1 ? v[1] : v[0], b = s & 1 ? v[3] : v[2];
    a = fmaf(f, a, __shfl_xor_sync(~0u, f * (s & 1 ? v[0] : v[1]), 1));
    b = fmaf(f, b, __shfl_xor_sync(~0u, f * (s & 1 ? v[2] : v[3]), 1));
    float d = s & 2 ? b : a;
    d = 0.25f * (d + __shfl_xor_sync(~0u, s & 2 ? a : b, 2));
    const float e = sigmoid_fast(d);
    const float exact = d * e, low = FP8 && exact > 65504.0f ? 65504.0f : exact, high = rounded<FP8>(low);
    if (ONE) {
      if (!inject) {
        sts16(low_to, pack_pair<FP8>(low, 0));
        if (kOf > 1) sts16(low_to + kUpPitch, pack_pair<FP8>(low - high, 0));
      }
    } else {
      // All of the quad's values in each of its threads, which send them to a quarter of the blocks each.
      uint32_t w[kOf][2];
#pragma unroll
      for (uint32_t i = 0; i < kOf; i++) {
        const float value = i ? low - high : low, other = __shfl_xor_sync(~0u, value, 1);
        const uint32_t pair = s & 1 ? pack_pair<FP8>(other, value) : pack_pair<FP8>(value, other), pair2 = __shfl_xor_sync(~0u, pair, 2);
        w[i][0] = s & 2 ? pair2 : pair, w[i][1] = s & 2 ? pair : pair2;
      }
      if (!inject) {
#pragma unroll
        for (uint32_t i = 0; i < (MOST + 3) / 4; i++) {
          if (MOST < 4 && s >= MOST) break;
          const uint32_t to = in_block(operand + kOf * rank * kUpPitch + 8 * u, s + 4 * i), bar_to = in_block(arrived, s + 4 * i);
#pragma unroll
          for (uint32_t o = 0; o < kOf; o++) send2(to + o * kUpPitch, w[o][0], w[o][1], bar_to);
        }
      }
    }
    if (inject && 4 * u < width && p.inject && blockIdx.x / MOST == 0) p.inject[rank * 4 + s] = 2.0f * e;
  }
  if (p.trigger == 1) pdl_trigger();
#pragma unroll
  for (uint32_t j = 0; j < (MOST + 3) / 4; j++) looked_at(own_x[j]);
  STAMP(3)
  if (ONE)
    __syncthreads();
  else
    mbar_wait_cluster(arrived, 0);
  STAMP(4)
  constexpr uint32_t kStep = 4 * (16 * kUpTiles + 8), kOther = kStep * MOST;  // bytes from a row's sums to the next, and to those of the other half of K
  if (tile * 4 < columns) {
    float a[kPasses][4] = {}, b[kPasses][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
      if (!ONE) read(c);
#pragma unroll
      for (uint32_t j = 0; j < kPasses; j++) multiply_chunk<FP8>(a[j], b[j], lo[c], up[c], lds128(from[j] + c * 64));
    }
#pragma unroll
    for (uint32_t j = 0; j < kPasses; j++)
      if (kOf == 1) {
#pragma unroll
        for (uint32_t i = 0; i < 2 && i < MOST; i++)
          if (2 * t + i < MOST) sts32(sum_to + i * kStep, a[j][i] + b[j][i]), sts32(sum_to + i * kStep + 32, a[j][2 + i] + b[j][2 + i]);
      } else if (4 * j + t < MOST) {
        sts32(sum_to + 4 * j * kStep, (a[j][0] + b[j][0]) + (a[j][1] + b[j][1]));
        sts32(sum_to + 4 * j * kStep + 32, (a[j][2] + b[j][2]) + (a[j][3] + b[j][3]));
      }
  }
  STAMP(5)
  __syncthreads();
  STAMP(6)
#pragma unroll
  for (uint32_t j = 0; j < (MOST + 3) / 4; j++) {
    const uint32_t r = of + 4 * j;
    if (r >= p.r) break;  // whole warps
    const float sum = __uint_as_float(lds32(sum_from + 4 * j * kStep)) + __uint_as_float(lds32(sum_from + 4 * j * kStep + kOther));
    const float normed = rsqrt_fast(fmaf(ONE ? sum_of_squares : squares[4 * r + own], per_h, kEps)) * __uint_as_float(own_x[j] << 16) * norm;
    float v = __fmul_rn(sigmoid_fast(scale * sum), normed);
    v += __shfl_xor_sync(~0u, v, 1);
    v += __shfl_xor_sync(~0u, v, 2);
    if (mine && own == 0) ((bf16*)out)[j * 4 * p.h] = __float2bfloat16_rn(0.25f * v);
  }
  STAMP(7)
}

NINFER_KERNEL(hc_up_mix_bf16, HcUpParams, kUpThreads, 2) { up_columns<false, 1>(p); }
NINFER_KERNEL(hc_up_mix_e4m3, HcUpParams, kUpThreads, 2) { up_columns<true, 1>(p); }
#define CLUSTER(name, n) extern "C" __global__ void __cluster_dims__(n, 1, 1) name(const __grid_constant__ HcUpParams p);
CLUSTER(hc_up_mix_two_e4m3, 2)
CLUSTER(hc_up_mix_few_bf16, 4)
CLUSTER(hc_up_mix_few_e4m3, 4)
CLUSTER(hc_up_mix_rows_bf16, 8)
CLUSTER(hc_up_mix_rows_e4m3, 8)
// Registers here too: with 48 two blocks fit beside one of hc_down.
#pragma push_macro("NINFER_KERNEL")
#undef NINFER_KERNEL
#define NINFER_KERNEL(name, Params, threads, registers) extern "C" __global__ void __maxnreg__(registers MORE) name(const __grid_constant__ Params p)
NINFER_KERNEL(hc_up_mix_two_e4m3, HcUpParams, kUpThreads, 48) { up_columns<true, 2>(p); }
NINFER_KERNEL(hc_up_mix_few_bf16, HcUpParams, kUpThreads, 56) { up_columns<false, 4>(p); }
NINFER_KERNEL(hc_up_mix_few_e4m3, HcUpParams, kUpThreads, 48) { up_columns<true, 4>(p); }
NINFER_KERNEL(hc_up_mix_rows_bf16, HcUpParams, kUpThreads, 72) { up_columns<false, 8>(p); }
NINFER_KERNEL(hc_up_mix_rows_e4m3, HcUpParams, kUpThreads, 72) { up_columns<true, 8>(p); }
#pragma pop_macro("NINFER_KERNEL")
