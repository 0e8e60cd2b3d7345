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
// With several rows L2 bounds: what every block reads, only one of a block's warps asks for, and hc_up_mix's blocks work in clusters.
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

// n / m for n below 2^20, in fewer instructions than a division of whole numbers.
NINFER_DEVICE uint32_t quotient(uint32_t n, uint32_t m) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"((float)m));
  return (uint32_t)(((float)n + 0.5f) * r);
}

// Two values of the streams after injection, as stored: x + inject * y.
NINFER_DEVICE uint32_t injected(uint32_t x, uint32_t y, float inject) { return pack_bf16(fmaf(inject, bf16_lo(y), bf16_lo(x)), fmaf(inject, bf16_hi(y), bf16_hi(x))); }

static constexpr float kEps = 1e-6f;

// ---- hc_down ----

static constexpr int kDownWarps = 10;
static constexpr int kDownThreads = 32 * kDownWarps;

// For MOST activation rows at most: 1, 2, 4 or 8. A block has half of a stream's k of 32 weight rows, or with more activation rows a quarter of 64, of which each
// slice of 128 k has a warp in either of two teams, that make its operand for each other; of up to four rows 16-bit weights gain nothing by that.
template <bool FP8, uint32_t MOST>
static constexpr uint32_t kTeams = MOST > (FP8 ? 2 : 4) ? 2 : 1;
// APART: the sums have a place of their own, not one that weights had.
template <uint32_t MOST, uint32_t TEAMS, bool APART>
struct DownShared {
  static constexpr uint32_t kSlices = kDownWarps / TEAMS;
  float sums[APART ? kSlices : 1][MOST][32 * TEAMS + 4];  // of a slice; the last four are not used
  float undo[kSlices][MOST];                              // what takes a slice's power of two back
  float squares[kSlices][MOST];
  float injects[MOST];
};

// The larger magnitude of each half; the signs mean nothing.
NINFER_DEVICE uint32_t max_magnitude(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Past L1 (R7).
NINFER_DEVICE void copy_activations(uint32_t dst, const bf16* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory"); }
NINFER_DEVICE uint2 ldg_l2_64(const void* p) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
// The thread's arrival at a barrier when the copies that it has asked for are there.
NINFER_DEVICE void mbar_arrive_copies(uint32_t bar) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory"); }
// Adds up what all slices gave, five of them first, which are all of a quarter, times the scale.
template <uint32_t SLICES>
NINFER_DEVICE float add_up(const float* v, uint32_t step, float scale) {
  float s[SLICES / 5];
#pragma unroll
  for (uint32_t i = 0; i < SLICES; i++) s[i / 5] = i % 5 ? s[i / 5] + v[i * step] : v[i * step];
  return SLICES > 5 ? __fadd_rn(__fmul_rn(s[0], scale), __fmul_rn(s[SLICES / 5 - 1], scale)) : s[0] * scale;
}

// A number as a type, for a parameter.
template <int N>
struct Count {
  static constexpr int value = N;
};

// Part of a stream's k of up to 32 weight rows, or 64 of two teams, or of its inject rows (INJECT). A warp's threads make the operands of four k each, in
// shared memory, of all activation rows, or its team's; it multiplies 32 weight rows.
//
// E4M3 weights are FP16 numbers, and so is their operand, times a power of two that brings the largest of the warp's below 2^15: 2^-11 of each value
// is lost at most, where its BF16 result loses 2^-8. BF16 weights have two BF16 operands, high and low part, of which 2^-16 is lost.
template <bool FP8, bool INJECT, uint32_t MOST>
NINFER_DEVICE void down_rows(const HcDownParams& p, uint32_t part, uint32_t group, DownShared<MOST, kTeams<FP8, MOST>, !FP8 || MOST <= 2>& sh) {
  constexpr bool HALF = FP8 && !INJECT, MANY = MOST > 2, SHORT = HALF && kTeams<FP8, MOST> > 1;
  constexpr uint32_t TEAMS = kTeams<FP8, MOST>, kSlices = kDownWarps / TEAMS, kPart = 128 * kSlices, kRows = 32 * TEAMS;
  constexpr uint32_t kHalf = kPart + 32, kWhole = 2 * kPart + 64;  // bytes from a weight row to the next, apart in banks
  constexpr uint32_t bytes = HALF ? 1 : 2, pitch = HALF ? kHalf : kWhole, cell = 256 + 64;
  constexpr uint32_t kPasses = HALF ? 1 : (MOST + 3) / 4;
  constexpr int kTiles = INJECT ? 1 : 2;  // of sixteen weight rows
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, team = warp % TEAMS, slice = warp / TEAMS;
  const uint32_t stream = part / (2 * TEAMS), of_half = part % TEAMS * kPart;
  // the shares of share_start
  const uint32_t each = quotient(p.l, p.groups), more = p.l - each * p.groups;
  const uint32_t row0 = INJECT ? 0 : group * each + min(group, more), n = INJECT ? (p.inj_w ? 4 : 0) : each + (group < more);
  // The halves are multiples of sixteen k; of a short one there is no second quarter.
  const uint32_t longer = (p.h / 2 + 15) & ~15u, second_half = part / TEAMS % 2, whole = second_half ? p.h - longer : longer;
  const uint32_t k0 = (second_half ? longer : 0) + of_half, size = min(whole - min(of_half, whole), kPart);
  constexpr uint32_t kParts = 8 * TEAMS;
  const uint32_t bar = smem_addr(smem), weights = bar + 128;
  STAMP_BEGIN(120 + FP8)
  const bool idle = n == 0 || MANY && size == 0;  // a mixer, which injects nothing, or no k
  // The copies first: an instruction that is new to the SM takes some six clocks.
  const uint8_t* const stored = (const uint8_t*)(INJECT ? (const void*)p.inj_w : p.down) + (((uint64_t)row0 * 4 + stream) * p.h + k0) * bytes;
  if (threadIdx.x == 0) {
    mbar_init(bar, SHORT ? kDownThreads : 1);
    mbar_fence_init();
    if (!SHORT) mbar_expect(bar, n * bytes * size);
  }
  if (SHORT && !idle) {  // many short pieces: bulk copies would take longer to ask for
    constexpr uint32_t kPieces = bytes * kPart / 16, kAtOnce = kDownThreads / kPieces;
    const uint64_t policy = policy_evict_first();
    const uint32_t piece = threadIdx.x % kPieces * 16;
    if (piece < bytes * size)
      for (uint32_t i = threadIdx.x / kPieces; i < n; i += kAtOnce) copy16(weights + i * pitch + piece, stored + (uint64_t)i * 4 * p.h * bytes + piece, policy);
  }
  __syncthreads();
  if (SHORT) {
    mbar_arrive_copies(bar);
  } else if (lane == 0 && !idle) {
    for (uint32_t i = warp; i < n; i += kDownWarps) bulk_load(weights + i * pitch, stored + (uint64_t)i * 4 * p.h * bytes, bytes * size, bar, policy_evict_first());
  }
  const uint32_t k = slice * 128 + lane * 4;
  const bool mine = k < size;
  // Behind the weights each slice of k has a cell for a row's streams, which becomes its operand or that one's high part, and one for its block
  // output, which becomes the low part. Sums have the place of E4M3 weights that are in registers, behind the inject rows.
  constexpr uint32_t kSums = 4 * kWhole, kWithSums = kSums + (MANY ? kSlices * MOST * (kRows + 4) * 4 : 0);
  const uint32_t second = p.r * cell + (p.r % 2 ? 0 : 64), per_slice = HALF && !MANY ? p.r * cell : second + p.r * cell;
  const uint32_t room_for = INJECT && FP8 ? kWithSums : FP8 ? max((each + (more > 0)) * pitch, kWithSums) : max((each + (more > 0)), 4) * pitch;
  const uint32_t cells = weights + room_for + slice * per_slice;
  float(*sums)[MOST][kRows + 4] = FP8 && MANY ? (float(*)[MOST][kRows + 4])(smem + 128 + kSums) : sh.sums;
  // The blocks of a part share the writing of the rows, TEAMS each, and the first has what is left.
  const uint32_t all = (1u << p.r) - 1, own = TEAMS * group, rest = TEAMS * p.groups;
  const uint32_t writes = INJECT ? 0 : ((own < 8 ? ((1u << TEAMS) - 1) << own : 0) | (group == 0 && rest < p.r ? ~0u << rest : 0)) & all;
  float* const partial = p.partial + part * (p.l + 4) + (INJECT ? p.l : 0) + row0;  // of the first activation row

  if (idle) {
    if (p.trigger == 0) pdl_trigger();
    pdl_wait();
    if (p.trigger != 0) pdl_trigger();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n * p.r; i += kDownThreads) partial[(uint64_t)(i / n) * kParts * (p.l + 4) + i % n] = 0;
    if (threadIdx.x < MOST && writes >> threadIdx.x & 1) p.square[threadIdx.x * kParts + part] = 0;
    return;
  }
  uint2 norm = make_uint2(0, 0);
  if (mine) norm = __ldg((const uint2*)(p.norm + (uint64_t)stream * p.h + k0 + k));
  uint32_t scale = 0;
  const uint32_t result = 32 * team + lane;  // the weight row whose sum the lane adds up
  if (HALF && result < n) scale = scale_word(p.down_scale, p.scale_f32, row0 + result);
  // With copies half of a warp's lanes ask for eight k of the streams, the others for those of the block output.
  const uint32_t k8 = slice * 128 + lane % 16 * 8;
  const bf16 *xs = p.x + (uint64_t)stream * p.h + k0 + k, *ys = p.y + k0 + k;
  if (MANY) xs = (lane < 16 ? p.x + (uint64_t)stream * p.h : p.y) + k0 + k8;
  const float* weight = p.inject + (MOST > 1 ? lane * 4 : 0) + stream;
  made(xs), made(ys), made(weight);
  const bool pending = p.y != nullptr;
  // As the first operand of the tensor instruction: rows g and g + 8 of a tile, eight k. Where a row is missing another is read, whose sums nobody reads; where k
  // ends the operand is zero.
  const uint32_t first = min(slice * 128 + 8 * t, size - 8), room = size - 8 - first;
  uint32_t at[2 * kTiles];
#pragma unroll
  for (int i = 0; i < 2 * kTiles; i++) at[i] = weights + min((INJECT ? 0 : 32 * team) + g + 8 * i, n - 1) * pitch + first * bytes, made(at[i]);
  if (p.trigger == 0) pdl_trigger();
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)
  constexpr uint32_t kNone = 0x80008000;  // where there is no block output its values are -0, which change nothing, and its weight is 0
  constexpr uint32_t kAhead = MANY ? 1 : MOST;
  uint2 ahead_x[kAhead], ahead_y[kAhead];
  float inject1 = 0;
  if (MANY) {
    const bool ask = k8 < size && (lane < 16 || pending);
    const uint32_t to = cells + (lane < 16 ? 0 : second) + lane % 16 * 16, step = (lane < 16 ? 4 : 1) * p.h;
    for (uint32_t r = team; r < p.r; r += TEAMS) {
      if (ask)
        copy_activations(to + r * cell, xs + r * step);
      else
        sts128(to + r * cell, make_uint4(kNone, kNone, kNone, kNone));
      if (r == team + TEAMS || r == team && r + TEAMS >= p.r) copy_commit();
    }
    copy_commit();
  } else {
#pragma unroll
    for (uint32_t r = 0; r < kAhead; r++) {
      ahead_x[r] = ahead_y[r] = make_uint2(kNone, kNone);
      if (mine) ahead_x[r] = ldg_l2_64(xs + r * 4 * p.h);
      if (mine && pending) ahead_y[r] = ldg_l2_64(ys + r * p.h);
    }
    if (MOST == 1 && pending) inject1 = ldg_l2_f32(weight);
  }
  // One place in L2 answers one warp at a time: what all blocks read, only one of a block's warps may ask for.
  const bool asks = MOST > 1 && warp == kDownWarps - 1 && lane < p.r;
  if (asks && pending) inject1 = ldg_l2_f32(weight);
  mbar_wait(bar, 0);
  // The first kEarly chunks of 32 k of a tile are in registers as operands before the activations come, and all others of E4M3 as stored.
  constexpr int kAll = 4 * kTiles;
  constexpr int kEarly = HALF ? (MOST == 1 ? 3 : 1) : INJECT || MOST != 2 ? 4 : 5;
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
    float most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) most = fmaxf(most, fabsf(1.0f + nf[i]));
    highest = 394 - max(27u, __reduce_max_sync(~0u, __float_as_uint(most)) >> 23);  // what the norm takes away must not make the others overflow
  }
  STAMP(3)
  if (asks) sh.injects[lane] = inject1;
  if (MOST > 1) __syncthreads();
  STAMP(4)
  if (p.trigger == 1) pdl_trigger();

  // N of the warp's rows from r on side by side: the operand. x becomes what the streams are then.
  auto make = [&](uint32_t r, uint2* x, const uint2* y, const float* inject, auto count) {
    constexpr int N = decltype(count)::value;
    float v[N][4];
    uint32_t power[N];
#pragma unroll
    for (int b = 0; b < N; b++) {
      x[b] = make_uint2(injected(x[b].x, y[b].x, inject[b]), injected(x[b].y, y[b].y, inject[b]));
      const uint32_t m = max_magnitude(x[b].x, x[b].y);
      power[b] = max(m & 0x7fffu, m >> 16 & 0x7fffu);
    }
    if (HALF)
#pragma unroll
      for (int b = 0; b < N; b++) power[b] = max(1, min(253, (int)highest - (int)(__reduce_max_sync(~0u, power[b]) >> 7)));
#pragma unroll
    for (int b = 0; b < N; b++) {
      uint2 z = x[b];
      if (HALF) z.x = mul_bf162(z.x, power[b] * 0x00800080u), z.y = mul_bf162(z.y, power[b] * 0x00800080u);
      v[b][0] = bf16_lo(z.x), v[b][1] = bf16_hi(z.x), v[b][2] = bf16_lo(z.y), v[b][3] = bf16_hi(z.y);
#pragma unroll
      for (int i = 0; i < 4; i++) v[b][i] = fmaf(v[b][i], nf[i], v[b][i]);
    }
#pragma unroll
    for (int b = 0; b < N; b++) {
      const uint32_t to = cells + (r + TEAMS * b) * cell + 8 * lane;
      const float* f = v[b];
      if (HALF) {
        sts64(to, make_uint2(pack_f16(f[0], f[1]), pack_f16(f[2], f[3])));
        if (lane == 0) sh.undo[slice][r + TEAMS * b] = __uint_as_float((254 - power[b]) << 23);
      } else {
        const uint32_t h0 = pack_bf16(f[0], f[1]), h1 = pack_bf16(f[2], f[3]);
        sts64(to, make_uint2(h0, h1));
        sts64(to + second, make_uint2(pack_bf16(f[0] - bf16_lo(h0), f[1] - bf16_hi(h0)), pack_bf16(f[2] - bf16_lo(h1), f[3] - bf16_hi(h1))));
      }
    }
  };
  auto write = [&](uint32_t r, uint2 x) {
    if (mine && writes >> r & 1) *(uint2*)(p.x_out + ((uint64_t)r * 4 + stream) * p.h + k0 + k) = x;
  };
  auto squared = [&](uint2 x) {
    const float f[4] = {bf16_lo(x.x), bf16_hi(x.x), bf16_lo(x.y), bf16_hi(x.y)};
    return warp_sum(fmaf(f[3], f[3], fmaf(f[2], f[2], fmaf(f[1], f[1], f[0] * f[0]))));
  };
  float square[kAhead];
  if (MANY) {
    auto copied = [&](uint32_t r, auto count) {
      constexpr int N = decltype(count)::value;
      uint2 x[N], y[N];
      float inject[N];
#pragma unroll
      for (int b = 0; b < N; b++) {
        const uint32_t from = cells + (r + TEAMS * b) * cell + 8 * lane;
        x[b] = lds64(from), y[b] = lds64(from + second), inject[b] = sh.injects[r + TEAMS * b];
      }
      __syncwarp();
      make(r, x, y, inject, count);
#pragma unroll
      for (int b = 0; b < N; b++)
        if (!INJECT && writes >> (r + TEAMS * b) & 1) {
          write(r + TEAMS * b, x[b]);
          const float sum = squared(x[b]);
          if (lane == 0) sh.squares[slice][r + TEAMS * b] = sum;
        }
    };
    copy_wait<1>(), __syncwarp();
#pragma unroll 1
    for (uint32_t r = team; r < p.r; r += 2 * TEAMS) {
      if (r >= 2 * TEAMS) copy_wait<0>(), __syncwarp();
      if (r + TEAMS < p.r)
        copied(r, Count<2>{});
      else
        copied(r, Count<1>{});
    }
    if (TEAMS > 1)
      named_sync(1 + slice, 32 * TEAMS);
    else
      __syncwarp();
  } else {
    float inject[kAhead];
#pragma unroll
    for (uint32_t r = 0; r < kAhead; r++) inject[r] = MOST == 1 ? inject1 : sh.injects[r];
    make(0, ahead_x, ahead_y, inject, Count<kAhead>{});
    if (!INJECT)
#pragma unroll
      for (uint32_t r = 0; r < kAhead; r++) write(r, ahead_x[r]);
    __syncwarp();
    if (!INJECT)  // beside the product, whoever writes
#pragma unroll
      for (uint32_t r = 0; r < kAhead; r++) square[r] = squared(ahead_x[r]);
  }
  STAMP(5)
  float undo[2] = {1, 1};  // of the lane's columns
  if (HALF)
#pragma unroll
    for (uint32_t i = 0; i < 2 && i < MOST; i++) undo[i] = sh.undo[slice][2 * t + i < MOST ? 2 * t + i : 0];
#pragma unroll 1
  for (uint32_t j = 0; j < kPasses; j++) {
    if (!HALF && 4 * j >= p.r || INJECT && team > 0) break;
    // a column's row: of BF16 each has two, high and low part
    const uint32_t of = HALF ? (g < p.r ? g : 0) : min(4 * j + g / 2, p.r - 1), from = cells + of * cell + (HALF || g % 2 == 0 ? 0 : second) + 16 * t;
    uint4 v[4];
#pragma unroll
    for (int c = 0; c < 4; c++) v[c] = lds128(from + 64 * c);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
      float acc[4][4] = {};
#pragma unroll
      for (int c = 4 * tile; c < 4 * tile + 4; c++) {
        if (!HALF && c >= kEarly) fetch(c);
        if (c >= kEarly) convert(c);
        float *even = acc[c % 2 * 2], *odd = acc[c % 2 * 2 + 1];
        const uint4 b = v[c % 4];
        if (HALF)
          mma_f16(even, lo[c].x, hi[c].x, lo[c].y, hi[c].y, b.x, b.y), mma_f16(odd, lo[c].z, hi[c].z, lo[c].w, hi[c].w, b.z, b.w);
        else
          mma_bf16(even, lo[c].x, hi[c].x, lo[c].y, hi[c].y, b.x, b.y), mma_bf16(odd, lo[c].z, hi[c].z, lo[c].w, hi[c].w, b.z, b.w);
      }
      float s[4];
#pragma unroll
      for (int i = 0; i < 4; i++) s[i] = (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
      float(*to)[kRows + 4] = sums[slice];
      const uint32_t i = 32 * team + 16 * tile + g;
      if (HALF) {
        if (2 * t < MOST) to[2 * t][i] = s[0] * undo[0], to[2 * t][i + 8] = s[2] * undo[0];
        if (2 * t + 1 < MOST) to[2 * t + 1][i] = s[1] * undo[1], to[2 * t + 1][i + 8] = s[3] * undo[1];
      } else if (4 * j + t < MOST) {
        to[4 * j + t][i] = s[0] + s[1], to[4 * j + t][i + 8] = s[2] + s[3];
      }
    }
  }
  if (!MANY && !INJECT && lane == 0)
#pragma unroll
    for (uint32_t r = 0; r < kAhead; r++) sh.squares[warp][r] = square[r];
  STAMP(6)
  __syncthreads();
  STAMP(7)
  constexpr uint32_t kRow = kRows + 4;
#pragma unroll
  for (uint32_t r = slice; r < MOST; r += kSlices)
    if (r < p.r && result < n) {
      const float s = HALF ? scale_value(scale, p.down_scale, p.scale_f32, row0 + result) : 1.0f;
      partial[(uint64_t)r * kParts * (p.l + 4) + result] = add_up<kSlices>(&sums[0][r][result], MOST * kRow, s);
    }
  const uint32_t q = kDownThreads - 1 - threadIdx.x;  // a row whose squares are here
  if (!INJECT && q < p.r && writes >> q & 1) p.square[q * kParts + part] = add_up<kSlices>(&sh.squares[0][q], MOST, 1.0f);
  STAMP(8)
}

// The grid is the parts of four streams, two halves or four quarters each, times (groups of rows, then one block for injection rows).
#define DOWN(FP8, MOST)                                                                                         \
  __shared__ DownShared<MOST, kTeams<FP8, MOST>, !FP8 || MOST <= 2> sh;                                         \
  const uint32_t part = blockIdx.x % (8 * kTeams<FP8, MOST>), group = blockIdx.x / (8 * kTeams<FP8, MOST>);     \
  if (group < p.groups)                                                                                         \
    down_rows<FP8, false, MOST>(p, part, group, sh);                                                            \
  else                                                                                                          \
    down_rows<FP8, true, MOST>(p, part, group, sh);

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
NINFER_KERNEL(hc_down_few_bf16, HcDownParams, kDownThreads, 80) { DOWN(false, 4) }
NINFER_KERNEL(hc_down_rows_bf16, HcDownParams, kDownThreads, 80) { DOWN(false, 8) }
NINFER_KERNEL(hc_down_rows_e4m3, HcDownParams, kDownThreads, 80) { DOWN(true, 8) }
#pragma pop_macro("NINFER_KERNEL")

// ---- hc_up_mix ----

// Sixteen weight rows of a tile: four columns times four streams. Two warps a tile, five chunks of the rank each. The operand is no BF16 number but
// two of them, whose sums are added. E4M3 weights are FP16 numbers, and so are their operands, of which 2^-22 is lost at most, or 2^-25 where they are less than 2^-14.
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

// MOST: rows at most, 1, 4 or 8; the arithmetic is the same. With several rows each of as many blocks of a cluster makes the operand of one row and
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
  constexpr uint32_t kPasses = (MOST + 3) / 4;  // four rows' high and low parts are the eight columns of the tensor instruction
  constexpr uint32_t kBytes = FP8 ? 1 : 2;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t each = quotient(p.h, gridDim.x), more = p.h - each * gridDim.x;
  const uint32_t first = blockIdx.x * each + min(blockIdx.x, more), columns = each + (blockIdx.x < more);
  const uint32_t row_bytes = kBytes * p.l, run = columns * row_bytes, run_pitch = ((run + 127) & ~127u) + 32 * kBytes;
  const uint32_t bar = smem_addr(smem), arrived = bar + 8, weights = bar + 128, operand = weights + 4 * run_pitch;
  const uint32_t rank = ONE ? 0 : cluster_rank();
  __shared__ float sums[2][MOST][kUpTiles * 16];
  __shared__ float squares[4 * MOST];

  STAMP_BEGIN(130 + FP8)
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    if (!ONE) mbar_init(arrived, 1);
    mbar_fence_init();
    if (!ONE) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    mbar_expect(bar, 4 * run);
    if (!ONE) mbar_expect(arrived, p.r * p.l * 4);
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
    for (uint32_t i = threadIdx.x; i < 2 * p.r * (kUpRank / 8); i += kUpThreads)
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
  for (uint32_t j = 0; j < kPasses; j++) from[j] = operand + (8 * j + g < 2 * p.r ? 8 * j + g : 0) * kUpPitch + k * 2, made(from[j]);
  uint32_t sum_to = smem_addr(&sums[warp % 2][t][tile * 16 + g]), sum_from = smem_addr(&sums[0][of][place]), low_to = operand + 2 * (4 * u + s);
  // a BF16 scale is one half of its word
  uint32_t half = FP8 && !p.scale_f32 && !((uint64_t)p.up_scale + 2 * row & 2) ? 16 : 0, half_mask = FP8 && !p.scale_f32 ? 0xffff0000u : ~0u;
  float per_h;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(per_h) : "f"((float)p.h));
  made(parts), made(all), made(xs);
  if (!ONE) made(out), made(hi), made(sum_to), made(sum_from), made(low_to), made(half), made(half_mask);
  if (p.trigger == 0) pdl_trigger();
  if (!ONE) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)

  const bool inject = 4 * u >= p.l;
  // The row whose operand this block makes.
  const bool makes = ONE || rank < p.r;
  uint4 part[4] = {}, square = make_uint4(0, 0, 0, 0);
  uint32_t own_x[kPasses] = {};
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
  for (uint32_t j = 0; j < kPasses; j++)
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
      if (!inject) sts16(low_to, pack_pair<FP8>(low, 0)), sts16(low_to + kUpPitch, pack_pair<FP8>(low - high, 0));
    } else {
      // even threads send the high parts of two values, odd ones the low parts
      const float other = __shfl_xor_sync(~0u, s & 1 ? low : low - high, 1);
      if (!inject) {
        const uint32_t word = s & 1 ? pack_pair<FP8>(other, low - high) : pack_pair<FP8>(low, other);
        const uint32_t to = operand + (2 * rank + (s & 1)) * kUpPitch + (4 * u + (s & 2)) * 2;
#pragma unroll
        for (uint32_t i = 0; i < MOST; i++) send(in_block(to, i), word, in_block(arrived, i));
      }
    }
    if (inject && 4 * u < width && p.inject && blockIdx.x / MOST == 0) p.inject[rank * 4 + s] = 2.0f * e;
  }
  if (p.trigger == 1) pdl_trigger();
#pragma unroll
  for (uint32_t j = 0; j < kPasses; j++) looked_at(own_x[j]);
  STAMP(3)
  if (ONE)
    __syncthreads();
  else
    mbar_wait_cluster(arrived, 0);
  STAMP(4)
  constexpr uint32_t kStep = 4 * 16 * kUpTiles, kOther = kStep * MOST;  // bytes from a row's sums to the next, and to those of the other half of K
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
      if (4 * j + t < MOST) {
        sts32(sum_to + 4 * j * kStep, (a[j][0] + b[j][0]) + (a[j][1] + b[j][1]));
        sts32(sum_to + 4 * j * kStep + 32, (a[j][2] + b[j][2]) + (a[j][3] + b[j][3]));
      }
  }
  __syncthreads();
#pragma unroll
  for (uint32_t j = 0; j < kPasses; j++) {
    const uint32_t r = of + 4 * j;
    if (r >= p.r) break;  // whole warps
    const float sum = __uint_as_float(lds32(sum_from + 4 * j * kStep)) + __uint_as_float(lds32(sum_from + 4 * j * kStep + kOther));
    const float normed = rsqrt_fast(fmaf(ONE ? sum_of_squares : squares[4 * r + own], per_h, kEps)) * __uint_as_float(own_x[j] << 16) * norm;
    float v = __fmul_rn(sigmoid_fast(scale * sum), normed);
    v += __shfl_xor_sync(~0u, v, 1);
    v += __shfl_xor_sync(~0u, v, 2);
    if (mine && own == 0) ((bf16*)out)[j * 4 * p.h] = __float2bfloat16_rn(0.25f * v);
  }
  STAMP(5)
}

NINFER_KERNEL(hc_up_mix_bf16, HcUpParams, kUpThreads, 2) { up_columns<false, 1>(p); }
NINFER_KERNEL(hc_up_mix_e4m3, HcUpParams, kUpThreads, 2) { up_columns<true, 1>(p); }
#define CLUSTER(name, n) extern "C" __global__ void __cluster_dims__(n, 1, 1) name(const __grid_constant__ HcUpParams p);
CLUSTER(hc_up_mix_few_bf16, 4)
CLUSTER(hc_up_mix_few_e4m3, 4)
CLUSTER(hc_up_mix_rows_bf16, 8)
CLUSTER(hc_up_mix_rows_e4m3, 8)
// Registers here too: with 48 two blocks fit beside one of hc_down.
#pragma push_macro("NINFER_KERNEL")
#undef NINFER_KERNEL
#define NINFER_KERNEL(name, Params, threads, registers) extern "C" __global__ void __maxnreg__(registers) name(const __grid_constant__ Params p)
NINFER_KERNEL(hc_up_mix_few_bf16, HcUpParams, kUpThreads, 56) { up_columns<false, 4>(p); }
NINFER_KERNEL(hc_up_mix_few_e4m3, HcUpParams, kUpThreads, 48) { up_columns<true, 4>(p); }
NINFER_KERNEL(hc_up_mix_rows_bf16, HcUpParams, kUpThreads, 72) { up_columns<false, 8>(p); }
NINFER_KERNEL(hc_up_mix_rows_e4m3, HcUpParams, kUpThreads, 72) { up_columns<true, 8>(p); }
#pragma pop_macro("NINFER_KERNEL")
