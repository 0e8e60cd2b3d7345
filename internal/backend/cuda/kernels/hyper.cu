// Hyper-connection site: mixes four residual streams into a block's input and makes the weights that put its output back.
//
//   hc_down    X' = X + inject * y (BF16);  d[i] = sum_k Wdown[i][k] X'[k] (1 + w[k]) per stream, four inject rows likewise, and
//              the streams' sums of squares. The norm is a scalar per stream, so it is applied to the partial sums later.
//   hc_up_mix  low = silu(sum_s rstd_s d_s / 4);  M = sigmoid(Wup low);  mix[c] = mean_s M[s][c] rstd_s X'[s][c] (1 + w[s][c]);
//              inject = 2 sigmoid(sum_s rstd_s d_s / 4) from the inject rows.
//
//   Shapes: 4 streams, H % 64 = 0 and at most 3072, L % 32 = 0 (E4M3: 64), R = 1..8. Streams, mix BF16; partial sums and inject FP32.
//
// Plan of a block: hc_down takes one stream's slice of 5..16 rows, hc_up_mix a run of columns, four streams each, as 16-row tiles
// (4 columns x 4 streams), so the mean stays inside a warp. All weights of a block fit in shared memory and are asked for before
// the wait. Activations that are not BF16 (X'(1+w), low) keep FP32's accuracy: with BF16 weights as a high and a low BF16 part, with
// E4M3 weights as FP16.
//
// Measured on one H200, R = 1, in-chain, 16 / 8-bit: hc_down 3.4 / 2.7 us, hc_up_mix 3.0 / 2.4 us, the pair 6.1 / 5.0 us: 0.47 / 0.29 of the
// same run's read stream. Latency, not bytes, bounds them; see docs/kernels.md.
#include "common.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

static constexpr int kWarps = 12;
static constexpr int kThreads = 32 * kWarps;
static constexpr float kEps = 1e-6f;

// acc[0..3] += A * operand for one chunk of 16 rows, to be added up. BF16: 32 k, operand as a high and a low BF16 part; E4M3: 64 k,
// operand FP16.
// Up to four rows' low parts ride in columns 4..7 (wide): then the tensor instruction, whose rate bounds these kernels, runs once.
template <bool FP8>
NINFER_DEVICE void multiply(float (*acc)[4], uint32_t a0, uint32_t a1, uint32_t hi, uint32_t lo, bool live, bool wide) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const uint4 u = lds128(a0), v = lds128(a1);
  if constexpr (!FP8) {
    const uint4 h = live ? lds128(hi) : zero;
    mma_bf16(acc[0], u.x, v.x, u.y, v.y, h.x, h.y);
    mma_bf16(acc[2], u.z, v.z, u.w, v.w, h.z, h.w);
    if (!wide) {
      const uint4 l = live ? lds128(lo) : zero;
      mma_bf16(acc[1], u.x, v.x, u.y, v.y, l.x, l.y);
      mma_bf16(acc[3], u.z, v.z, u.w, v.w, l.z, l.w);
    }
  } else {
    const uint4 h0 = live ? lds128(hi) : zero, h1 = live ? lds128(hi + 16) : zero;
    uint32_t ul, uh, vl, vh;
    e4m3x4_f16(u.x, ul, uh), e4m3x4_f16(v.x, vl, vh);
    mma_f16(acc[0], ul, vl, uh, vh, h0.x, h0.y);
    e4m3x4_f16(u.y, ul, uh), e4m3x4_f16(v.y, vl, vh);
    mma_f16(acc[1], ul, vl, uh, vh, h0.z, h0.w);
    e4m3x4_f16(u.z, ul, uh), e4m3x4_f16(v.z, vl, vh);
    mma_f16(acc[2], ul, vl, uh, vh, h1.x, h1.y);
    e4m3x4_f16(u.w, ul, uh), e4m3x4_f16(v.w, vl, vh);
    mma_f16(acc[3], ul, vl, uh, vh, h1.z, h1.w);
  }
}

// INJECT: the block makes the four injection rows, BF16 in every variant.
template <bool FP8, bool INJECT>
NINFER_DEVICE void down_rows(const HcDownParams& p, uint32_t stream, uint32_t group) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t row0 = INJECT ? 0 : share_start(p.l, p.groups, group);
  const uint32_t n = INJECT ? 4 : share_start(p.l, p.groups, group + 1) - row0;
  const uint32_t slice = FP8 ? p.h : 2 * p.h, pitch = slice + 64, x_pitch = 2 * p.h + 32;
  constexpr uint32_t ks = FP8 ? 64 : 32;

  uint32_t base = smem_addr(smem), bar = base;
  float* sums = (float*)(smem + 16);                 // [warp][column][row]
  const bool wide = !FP8 && p.r <= 4;                // columns 4..7 hold the low parts
  const uint32_t columns = wide ? 8 : p.r;
  float* squares = sums + kWarps * columns * 16;     // [warp][R]
  uint32_t hi = (smem_addr(squares + kWarps * p.r) + 15) & ~15u, lo = hi + p.r * x_pitch;
  uint32_t weights = (lo + (FP8 ? 0 : p.r * x_pitch) + 127) & ~127u;

  STAMP_BEGIN(100 + FP8)
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    mbar_fence_init();
  }
  __syncthreads();
  {  // issuing a bulk copy takes a warp some 40 ns: every warp issues a row or two
    const uint8_t* w = (const uint8_t*)(INJECT ? (const void*)p.inj_w : p.down);
    if (threadIdx.x == 0) mbar_expect(bar, w ? n * slice : 0);
    if (lane == 0 && w)
      for (uint32_t i = warp; i < n; i += kWarps)
        bulk_load(weights + i * pitch, w + ((uint64_t)(row0 + i) * 4 + stream) * slice, slice, bar, policy_evict_first());
  }
  if (p.trigger == 0) pdl_trigger();
  const uint32_t col = threadIdx.x / 16, trow = threadIdx.x % 16;
  float scale = 1.0f;
  if (FP8 && trow < n)
    scale = p.scale_f32 ? __ldg((const float*)p.down_scale + row0 + trow)
                        : __uint_as_float((uint32_t)__ldg((const uint16_t*)p.down_scale + row0 + trow) << 16);
  // A warp owns a run of chunks of k: it makes the operand there and multiplies it, so warps meet only at the end. A lane takes
  // eight k at a time.
  const uint32_t chunk0 = share_start(p.h / ks, kWarps, warp), chunk1 = share_start(p.h / ks, kWarps, warp + 1);
  const uint32_t unit0 = chunk0 * (ks / 8) + lane, units = chunk1 * (ks / 8);
  const bf16* norm = p.norm + (uint64_t)stream * p.h;
  uint4 first_norm = make_uint4(0, 0, 0, 0);
  if (unit0 < units) first_norm = __ldg((const uint4*)norm + unit0);

  const bool mine = unit0 < units;
  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)
  float undo0 = 1.0f, undo1 = 1.0f;
  uint4 next_x = make_uint4(0, 0, 0, 0), next_y = next_x;
  float next_inject = 0;
  auto fetch = [&](uint32_t r) {
    if (p.y) next_inject = ldg_l2_f32(p.inject + r * 4 + stream);
    if (mine) {
      next_x = ldg_l2(p.x + ((uint64_t)r * 4 + stream) * p.h + unit0 * 8);
      if (p.y) next_y = ldg_l2(p.y + (uint64_t)r * p.h + unit0 * 8);
    }
  };
  fetch(0);
#pragma unroll 1
  for (uint32_t r = 0; r < p.r; r++) {
    uint32_t x4[4] = {next_x.x, next_x.y, next_x.z, next_x.w};
    const uint32_t y4[4] = {next_y.x, next_y.y, next_y.z, next_y.w}, w4[4] = {first_norm.x, first_norm.y, first_norm.z, first_norm.w};
    const float inject = next_inject;
    if (r + 1 < p.r) fetch(r + 1);
    float v[8], square = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (p.y) x4[i] = pack_bf16(fmaf(inject, bf16_lo(y4[i]), bf16_lo(x4[i])), fmaf(inject, bf16_hi(y4[i]), bf16_hi(x4[i])));
      const float a = bf16_lo(x4[i]), b = bf16_hi(x4[i]);
      square = fmaf(a, a, fmaf(b, b, square));
      v[2 * i] = fmaf(a, bf16_lo(w4[i]), a);
      v[2 * i + 1] = fmaf(b, bf16_hi(w4[i]), b);
    }
    const uint32_t at = r * x_pitch + unit0 * 16;
    uint4 h, l;
    uint32_t *hp = &h.x, *lp = &l.x;
    if (FP8) {
      float m = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) m = fmaxf(m, fabsf(v[i]));
      // a power of two brings the warp's largest value near 2^15, so that FP16 holds what BF16 would and more
      const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(m));
      const int shift = max(-100, min(100, 141 - (int)(bits >> 23)));
      const float f = power_of_two(shift);
#pragma unroll
      for (int i = 0; i < 4; i++) hp[i] = pack_f16(v[2 * i] * f, v[2 * i + 1] * f);
      if (r == 2 * t) undo0 = power_of_two(-shift);
      if (r == 2 * t + 1) undo1 = power_of_two(-shift);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        hp[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
        lp[i] = pack_bf16(v[2 * i] - bf16_lo(hp[i]), v[2 * i + 1] - bf16_hi(hp[i]));
      }
      if (mine) sts128(lo + at, l);
    }
    if (mine) {
      sts128(hi + at, h);
      // the blocks of a stream share the writing of the rows
      if (!INJECT && (r < p.groups ? r : 0) == group)
        *(uint4*)(p.x_out + ((uint64_t)r * 4 + stream) * p.h + unit0 * 8) = make_uint4(x4[0], x4[1], x4[2], x4[3]);
    }
    if (INJECT) {
      square = warp_sum(square);
      if (lane == 0) squares[warp * p.r + r] = square;
    }
  }
  __syncwarp();
  if (p.trigger == 1) pdl_trigger();
  STAMP(3)
  mbar_wait(bar, 0);
  STAMP(4)

  float acc[4][4] = {};
  const bool live = wide ? g % 4 < p.r : g < p.r;
  const uint32_t operand = wide ? (g < 4 ? hi : lo) + g % 4 * x_pitch : hi + g * x_pitch;
  // rows the block does not have read its last one; their results are not stored
  const uint32_t a0 = weights + min(g, n - 1) * pitch + t * 16, a1 = weights + min(g + 8, n - 1) * pitch + t * 16;
  const uint32_t b0 = operand + t * (ks / 2);
#pragma unroll 2
  for (uint32_t c = chunk0; c < chunk1; c++)
    multiply<FP8>(acc, a0 + c * 64, a1 + c * 64, b0 + c * ks * 2, b0 + (lo - hi) + c * ks * 2, live, wide);
  STAMP(5)
  float* sum = sums + warp * columns * 16;
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (2 * t + i < columns) {
      const float undo = i ? undo1 : undo0;
      sum[(2 * t + i) * 16 + g] = ((acc[0][i] + acc[2][i]) + (acc[1][i] + acc[3][i])) * undo;
      sum[(2 * t + i) * 16 + g + 8] = ((acc[0][i + 2] + acc[2][i + 2]) + (acc[1][i + 2] + acc[3][i + 2])) * undo;
    }
  __syncthreads();
  STAMP(6)
  if (col < p.r && trow < n && !(INJECT && !p.inj_w)) {
    float v = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) v += sums[w * columns * 16 + threadIdx.x];
    if (wide) {
      float low = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w++) low += sums[w * columns * 16 + 64 + threadIdx.x];
      v += low;
    }
    p.partial[((uint64_t)col * 4 + stream) * (p.l + 4) + (INJECT ? p.l : 0) + row0 + trow] = v * scale;
  }
  if (INJECT && threadIdx.x < p.r) {
    float s = 0;
    for (int w = 0; w < kWarps; w++) s += squares[w * p.r + threadIdx.x];
    p.square[threadIdx.x * 4 + stream] = s;
  }
  STAMP(7)
}

// The grid is four streams times (groups of rows, then one block for injection rows and squares).
NINFER_KERNEL(hc_down_bf16, HcDownParams, kThreads, 2) {
  const uint32_t stream = blockIdx.x / (p.groups + 1), group = blockIdx.x % (p.groups + 1);
  if (group < p.groups)
    down_rows<false, false>(p, stream, group);
  else
    down_rows<false, true>(p, stream, group);
}

NINFER_KERNEL(hc_down_e4m3, HcDownParams, kThreads, 2) {
  const uint32_t stream = blockIdx.x / (p.groups + 1), group = blockIdx.x % (p.groups + 1);
  if (group < p.groups)
    down_rows<true, false>(p, stream, group);
  else
    down_rows<false, true>(p, stream, group);
}

template <bool FP8>
NINFER_DEVICE void up_columns(const HcUpParams& p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t tile0 = share_start(p.h / 4, gridDim.x, blockIdx.x);
  const uint32_t tiles = share_start(p.h / 4, gridDim.x, blockIdx.x + 1) - tile0;
  const uint32_t pitch = FP8 ? p.l : 2 * p.l, x_pitch = 2 * p.l + 32, run = tiles * 4 * pitch;

  uint32_t base = smem_addr(smem), bar = base;
  float* rstd = (float*)(smem + 16);  // [R][4]
  uint32_t hi = base + 16 + 16 * p.r, lo = hi + (FP8 ? 0 : p.r * x_pitch), weights = (lo + p.r * x_pitch + 127) & ~127u;

  STAMP_BEGIN(110 + FP8)
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    mbar_fence_init();
    mbar_expect(bar, 4 * run);
    const uint64_t policy = policy_evict_first();
    if (run)
      for (uint32_t s = 0; s < 4; s++)
        bulk_load(weights + s * run, (const uint8_t*)p.up + ((uint64_t)s * p.h + tile0 * 4) * pitch, run, bar, policy);
  }
  if (p.trigger == 0) pdl_trigger();
  const uint32_t mytile = warp;  // a warp has at most one tile
  // this lane's two rows of a tile: streams g/4 and g/4 + 2, column g%4
  const uint32_t s0 = g / 4, s1 = s0 + 2;
  float w0 = 0, w1 = 0, f0 = 1, f1 = 1;
  auto constants = [&](uint32_t tile) {
    uint64_t i0 = (uint64_t)s0 * p.h + (tile0 + tile) * 4 + g % 4, i1 = i0 + 2 * (uint64_t)p.h;
    w0 = 1.0f + __bfloat162float(p.norm[i0]), w1 = 1.0f + __bfloat162float(p.norm[i1]);
    if (FP8) {
      f0 = p.scale_f32 ? ((const float*)p.up_scale)[i0] : __bfloat162float(((const bf16*)p.up_scale)[i0]);
      f1 = p.scale_f32 ? ((const float*)p.up_scale)[i1] : __bfloat162float(((const bf16*)p.up_scale)[i1]);
    }
  };
  if (mytile < tiles) constants(mytile);

  STAMP(1)
  pdl_wait();
  if (p.trigger == 2) pdl_trigger();
  STAMP(2)

  float xa[2] = {0, 0}, xb[2] = {0, 0};
  auto streams = [&](uint32_t tile) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t r = 2 * t + i;
      if (r >= p.r) continue;
      const bf16* x = p.x + (uint64_t)r * 4 * p.h + (tile0 + tile) * 4 + g % 4;
      xa[i] = ldg_l2_bf16(x + (uint64_t)s0 * p.h);
      xb[i] = ldg_l2_bf16(x + (uint64_t)s1 * p.h);
    }
  };
  if (mytile < tiles) streams(mytile);

  // Thread i makes two values of a row's low-rank operand; the last two of a row's threads make its four injection weights.
  const uint32_t width = p.l + 4;
  const float per_h = 1.0f / (float)p.h;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < p.r * (width / 2); i += kThreads) {
    const uint32_t r = p.r == 1 ? 0 : i / (width / 2), k = 2 * (i - r * (width / 2));  // a division costs as much as a load
    const float* part = p.partial + (uint64_t)r * 4 * width + k;
    const uint4 squares = ldg_l2(p.square + r * 4);
    float a[4], b[4];
#pragma unroll
    for (int s = 0; s < 4; s++) a[s] = ldg_l2_f32(part + s * width), b[s] = ldg_l2_f32(part + s * width + 1);
    float da = 0, db = 0;
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const float f = rsqrtf(fmaf(__uint_as_float((&squares.x)[s]), per_h, kEps));
      da = fmaf(f, a[s], da), db = fmaf(f, b[s], db);
      if (k == 0) rstd[r * 4 + s] = f;
    }
    da *= 0.25f, db *= 0.25f;
    const float ea = sigmoid(da), eb = sigmoid(db);
    if (k >= p.l) {
      if (p.inject && blockIdx.x == 0) p.inject[r * 4 + k - p.l] = 2.0f * ea, p.inject[r * 4 + k + 1 - p.l] = 2.0f * eb;
      continue;
    }
    da *= ea, db *= eb;
    uint8_t* at = smem + (hi - base) + r * x_pitch + k * 2;
    if (FP8) {  // the result goes through a sigmoid, so FP16's range is enough
      *(uint32_t*)at = pack_f16(fminf(fmaxf(da, -65504.0f), 65504.0f), fminf(fmaxf(db, -65504.0f), 65504.0f));
    } else {
      const uint32_t h = pack_bf16(da, db);
      *(uint32_t*)at = h;
      *(uint32_t*)(at + (lo - hi)) = pack_bf16(da - bf16_lo(h), db - bf16_hi(h));
    }
  }
  if (p.trigger == 1) pdl_trigger();
  STAMP(3)
  __syncthreads();
  STAMP(4)
  mbar_wait(bar, 0);
  STAMP(5)

  const bool wide = !FP8 && p.r <= 4, live = wide ? g % 4 < p.r : g < p.r;
  const uint32_t operand = wide ? (g < 4 ? hi : lo) + g % 4 * x_pitch : hi + g * x_pitch;
  const uint32_t chunks = pitch / 64, ks2 = FP8 ? 128 : 64;
  if (mytile < tiles) {
    const uint32_t tile = mytile;
    float acc[4][4] = {};
    const uint32_t a0 = weights + s0 * run + (tile * 4 + g % 4) * pitch + t * 16, a1 = a0 + 2 * run;
#pragma unroll 2
    for (uint32_t c = 0; c < chunks; c++) {
      const uint32_t b = operand + c * ks2 + t * (ks2 / 4);
      multiply<FP8>(acc, a0 + c * 64, a1 + c * 64, b, b + (lo - hi), live, wide);
    }
    float dot[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      dot[i] = (acc[0][i] + acc[2][i]) + (acc[1][i] + acc[3][i]);
      if (wide) dot[i] += __shfl_xor_sync(~0u, dot[i], 2);  // columns r and r + 4
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t r = 2 * t + i;
      float v = 0;
      if (r < p.r) {
        float m0 = sigmoid(f0 * dot[i]);
        float m1 = sigmoid(f1 * dot[i + 2]);
        v = m0 * (rstd[r * 4 + s0] * xa[i] * w0) + m1 * (rstd[r * 4 + s1] * xb[i] * w1);
      }
      v += __shfl_xor_sync(~0u, v, 16);
      if (g < 4 && r < p.r) p.mix[(uint64_t)r * p.h + (tile0 + tile) * 4 + g] = __float2bfloat16_rn(0.25f * v);
    }
  }
  STAMP(6)
}

NINFER_KERNEL(hc_up_mix_bf16, HcUpParams, kThreads, 2) { up_columns<false>(p); }
NINFER_KERNEL(hc_up_mix_e4m3, HcUpParams, kThreads, 2) { up_columns<true>(p); }
