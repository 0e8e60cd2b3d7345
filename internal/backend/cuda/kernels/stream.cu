// Streaming matrix-vector kernels: out[r][n] = sum_k W[n][k] x[r][k], for R = 1..8 activation rows.
//
//   W    up to eight matrices over the same x: BF16, or E4M3 with one scale a row (BF16 or FP32), or signed 4-bit codes with an
//        FP16 scale per 64; all row-major as stored, no repacking. Later parts of the E4M3 kernel may be BF16.
//   x    [R][x_ld] BF16; out [R][out_ld] BF16 (rounded once from FP32) or FP32; optionally the argmax of the BF16-rounded row.
//
// Plan of a block (BF16, E4M3): a block owns a contiguous slab of rows (shares differ by at most one row). Each warp owns a run of k in
// all rows and streams it through a FIFO of 1 KB asynchronous copies that are private to a lane, filled before the dependency wait:
// no barrier while streaming. Weights are the A operand of m16n8k16, the activation rows its columns; the warps' sums are added in warp
// order once a window of rows: no atomics, the same bits at every launch. Q4 keeps a ring of stages filled by bulk copies.
//
// Measured on one H200, R = 1, in-chain, share of the same run's read stream (4.62 TB/s), 16 / 8-bit: gdn_in 0.92 / 0.78, gdn_out
// 0.78 / 0.63, qsa_in 0.89 / 0.73, head 0.95 / 0.91; proposal head (Q4) 0.49. The way there: docs/ladders.md.
#include "common.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

enum { FORMAT_BF16 = 0, FORMAT_E4M3 = 1, FORMAT_Q4 = 2 };
enum { PART_OUT_F32 = 1, PART_SCALE_F32 = 2 };

static constexpr int kWarps = 10;              // consumer warps: rows of 2,560 split evenly into whole 128-byte lines
static constexpr int kProducers = 2;           // producer warps: issuing a bulk copy takes one about 40 ns
static constexpr int kThreads = 32 * kWarps + 32 * kProducers;
static constexpr int kTileRows = 16;
static constexpr int kMaxStages = 16;

// Bytes of a row that the four lanes of a row take at once, and the k positions in them.
template <int F>
struct Format;
template <>
struct Format<FORMAT_BF16> {
  static constexpr int chunk = 64, ks = 32;
};
template <>
struct Format<FORMAT_E4M3> {
  static constexpr int chunk = 64, ks = 64;
};
template <>
struct Format<FORMAT_Q4> {
  static constexpr int chunk = 32, ks = 64;
};

// One chunk of 16 rows, loaded from shared memory first and multiplied later, so that two chunks' loads are on their way together.
template <int F>
struct Chunk {
  uint4 x0, x1, u, v;  // activations; this lane's bytes of rows g and g + 8
  float s0, s1;        // group scales (Q4)

  NINFER_DEVICE void load(uint32_t a0, uint32_t a1, uint32_t b, bool live, uint32_t q0, uint32_t q1) {
    if constexpr (F == FORMAT_Q4) {
      uint2 lo = lds64(a0), hi = lds64(a1);
      u.x = lo.x, u.y = lo.y, v.x = hi.x, v.y = hi.y;
      s0 = __half2float(__ushort_as_half((uint16_t)lds16(q0)));
      s1 = __half2float(__ushort_as_half((uint16_t)lds16(q1)));
    } else {
      u = lds128(a0), v = lds128(a1);
    }
    x0 = x1 = make_uint4(0, 0, 0, 0);
    if (live) {
      x0 = lds128(b);
      if constexpr (F != FORMAT_BF16) x1 = lds128(b + 16);
    }
  }

  NINFER_DEVICE void multiply(float (*acc)[4]) const {
    if constexpr (F == FORMAT_BF16) {
      mma_bf16(acc[0], u.x, v.x, u.y, v.y, x0.x, x0.y);
      mma_bf16(acc[1], u.z, v.z, u.w, v.w, x0.z, x0.w);
    } else if constexpr (F == FORMAT_E4M3) {
      uint32_t ul, uh, vl, vh;
      e4m3x4_f16(u.x, ul, uh), e4m3x4_f16(v.x, vl, vh);
      mma_f16(acc[0], ul, vl, uh, vh, x0.x, x0.y);
      e4m3x4_f16(u.y, ul, uh), e4m3x4_f16(v.y, vl, vh);
      mma_f16(acc[1], ul, vl, uh, vh, x0.z, x0.w);
      e4m3x4_f16(u.z, ul, uh), e4m3x4_f16(v.z, vl, vh);
      mma_f16(acc[0], ul, vl, uh, vh, x1.x, x1.y);
      e4m3x4_f16(u.w, ul, uh), e4m3x4_f16(v.w, vl, vh);
      mma_f16(acc[1], ul, vl, uh, vh, x1.z, x1.w);
    } else {
      uint32_t l[4], h[4];
      float part[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
      s4x8_bf16(u.x, l), s4x8_bf16(v.x, h);
      mma_bf16(part[0], l[0], h[0], l[1], h[1], x0.x, x0.y);
      mma_bf16(part[0], l[2], h[2], l[3], h[3], x0.z, x0.w);
      s4x8_bf16(u.y, l), s4x8_bf16(v.y, h);
      mma_bf16(part[1], l[0], h[0], l[1], h[1], x1.x, x1.y);
      mma_bf16(part[1], l[2], h[2], l[3], h[3], x1.z, x1.w);
      acc[0][0] = fmaf(s0, part[0][0] + part[1][0], acc[0][0]);
      acc[0][1] = fmaf(s0, part[0][1] + part[1][1], acc[0][1]);
      acc[0][2] = fmaf(s1, part[0][2] + part[1][2], acc[0][2]);
      acc[0][3] = fmaf(s1, part[0][3] + part[1][3], acc[0][3]);
    }
  }
};

// Walks a slab [row, end) of the concatenated rows of parts: tiles of at most `tile` rows inside one part.
struct TileWalk {
  uint32_t row, end, stop, part, base, tile;  // base: first row of the current part; stop: where part or slab ends
  NINFER_DEVICE bool next(const GemvParams& p, uint32_t& first, uint32_t& n) {
    if (row >= end) return false;
    if (row >= stop) {
      uint32_t rows;
      while (row >= base + (rows = p.part[part].rows)) base += rows, ++part;
      stop = min(end, base + rows);
    }
    first = row - base;
    n = min(tile, stop - row);
    row += n;
    return true;
  }
};

template <int F, int kWarps, int kDepth>
NINFER_DEVICE void run_slab(const GemvParams& p, uint32_t part0, uint32_t part1, uint32_t block, uint32_t blocks) {
  constexpr int chunk = Format<F>::chunk, ks = Format<F>::ks;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // two rows' loads of activations share no bank: a lane takes 32 bytes of each in E4M3, else 16
  const uint32_t row_bytes = p.k / ks * chunk, x_pitch = p.k * 2 + (F == FORMAT_E4M3 ? 16 : 64);
  const uint32_t window = p.window;  // rows whose partial sums are kept before they are added up

  // shared memory: partial sums [2][warp][column][window row], activations [R][x_pitch], FIFO [warp][depth][2][lane][16]
  float* sums = (float*)smem;
  const uint32_t sum_stride = p.r * window;
  const uint32_t xs = smem_addr(smem) + 2 * kWarps * sum_stride * 4;
  const uint32_t fifo = ((xs + p.r * x_pitch + 127) & ~127u) + warp * (kDepth * 1024) + lane * 16;

  STAMP_BEGIN(F)
  uint32_t total = 0, first_base = 0;
  for (uint32_t i = part0; i < part1; i++) total += p.part[i].rows;
  for (uint32_t i = 0; i < part0; i++) first_base += p.part[i].rows;
  TileWalk ahead;
  const uint32_t slab0 = share_start(total, blocks, block);
  ahead.row = slab0;
  ahead.end = share_start(total, blocks, block + 1);
  ahead.part = part0, ahead.base = 0, ahead.stop = 0;
  const uint32_t slab = ahead.end - slab0;
  ahead.tile = slab ? ceil_div(slab, ceil_div(slab, kTileRows)) : kTileRows;
  TileWalk walk = ahead;

  if (p.trigger == 0) pdl_trigger();

  // This warp's run of chunks, the same in every row, and the copies ahead of its work.
  // Whole 128-byte lines where they divide evenly.
  const uint32_t all_chunks = row_bytes / chunk, grain = all_chunks % (2 * kWarps) == 0 ? 2 : 1;
  const uint32_t chunk0 = grain * share_start(all_chunks / grain, kWarps, warp);
  const uint32_t chunks = grain * share_start(all_chunks / grain, kWarps, warp + 1) - chunk0;
  const uint64_t policy = policy_evict_first();
  const uint8_t* src = nullptr;
  uint32_t ahead_chunk = chunks, ahead_n = 0, ahead_slot = 0;
  auto copy_next = [&]() {
    if (ahead_chunk == chunks) {
      uint32_t first;
      ahead_chunk = 0;
      if (chunks == 0 || !ahead.next(p, first, ahead_n)) ahead_n = 0, ahead.row = ahead.end;
      else src = (const uint8_t*)p.part[ahead.part].w + (uint64_t)(first + g) * row_bytes + chunk0 * chunk + t * 16;
    }
    const uint32_t dst = fifo + ahead_slot * 1024;
    if (g < ahead_n) copy16(dst, src, policy);
    if (g + 8 < ahead_n) copy16(dst + 512, src + 8 * (uint64_t)row_bytes, policy);
    copy_commit();
    src += chunk, ++ahead_chunk;
    if (++ahead_slot == kDepth) ahead_slot = 0;
  };
#pragma unroll 1
  for (int i = 0; i < kDepth; i++) copy_next();

  // In the epilogue a thread is one (column, window row). Row scales are weights and far away: asked for a window ahead.
  const uint32_t col = threadIdx.x / window, wrow = threadIdx.x % window;
  auto scale_of = [&](uint32_t row) -> float {
    if (F != FORMAT_E4M3 || col >= p.r || row >= walk.end) return 1.0f;
    uint32_t i = part0, base = 0;
    while (row >= base + p.part[i].rows) base += p.part[i].rows, ++i;
    if (p.part[i].flags & PART_SCALE_F32) return __ldg((const float*)p.part[i].scale + row - base);
    return __uint_as_float((uint32_t)__ldg((const uint16_t*)p.part[i].scale + row - base) << 16);
  };
  float scale = scale_of(slab0 + wrow);

  STAMP(1)
  pdl_wait();
  STAMP(2)
  if (p.trigger == 1) pdl_trigger();

  // The warp's own slice of the activations; nobody else reads it. For E4M3 they become FP16, each row scaled by a power of two,
  // exactly, that brings the slice's largest magnitude near 2^15.
  float undo0 = 1.0f, undo1 = 1.0f;
  {
    const uint32_t units = chunks * ks / 8, xw = xs + chunk0 * ks * 2;
    const bf16* x = p.x + chunk0 * ks;
    uint4 v[4];
    auto fetch = [&](uint32_t r) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        v[j] = make_uint4(0, 0, 0, 0);
        if (lane + 32 * j < units) v[j] = ldg_l2(x + (uint64_t)r * p.x_ld + (lane + 32 * j) * 8);
      }
    };
    if (units <= 128) {
      fetch(0);
#pragma unroll 1
      for (uint32_t r = 0; r < p.r; r++) {
        uint4 w[4] = {v[0], v[1], v[2], v[3]};
        if (r + 1 < p.r) fetch(r + 1);
        float f = 1.0f;
        if (F == FORMAT_E4M3) {
          uint32_t m = max(max(magnitude8(w[0]), magnitude8(w[1])), max(magnitude8(w[2]), magnitude8(w[3])));
          const int shift = f16_shift(__reduce_max_sync(~0u, m));
          f = power_of_two(shift);
          if (r == 2 * t) undo0 = power_of_two(-shift);
          if (r == 2 * t + 1) undo1 = power_of_two(-shift);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (lane + 32 * j < units) {
            if (F == FORMAT_E4M3)
              w[j].x = bf16_to_f16(w[j].x, f), w[j].y = bf16_to_f16(w[j].y, f), w[j].z = bf16_to_f16(w[j].z, f), w[j].w = bf16_to_f16(w[j].w, f);
            sts128(xw + r * x_pitch + (lane + 32 * j) * 16, w[j]);
          }
      }
    } else {  // longer rows than any of the model's
      for (uint32_t r = 0; r < p.r; r++) {
        float f = 1.0f;
        if (F == FORMAT_E4M3) {
          uint32_t m = 0;
          for (uint32_t u = lane; u < units; u += 32) m = max(m, magnitude8(ldg_l2(x + (uint64_t)r * p.x_ld + u * 8)));
          const int shift = f16_shift(__reduce_max_sync(~0u, m));
          f = power_of_two(shift);
          if (r == 2 * t) undo0 = power_of_two(-shift);
          if (r == 2 * t + 1) undo1 = power_of_two(-shift);
        }
        for (uint32_t u = lane; u < units; u += 32) {
          uint4 w = ldg_l2(x + (uint64_t)r * p.x_ld + u * 8);
          if (F == FORMAT_E4M3) w.x = bf16_to_f16(w.x, f), w.y = bf16_to_f16(w.y, f), w.z = bf16_to_f16(w.z, f), w.w = bf16_to_f16(w.w, f);
          sts128(xw + r * x_pitch + u * 16, w);
        }
      }
    }
  }
  __syncwarp();
  if (p.trigger == 2) pdl_trigger();
  STAMP(3)

  const bool live = g < p.r;
  const uint32_t xlane = xs + g * x_pitch + chunk0 * ks * 2 + t * (ks / 2);
  uint64_t best = 0;
  uint32_t slot = 0, buffer = 0, start = slab0, filled = 0, first, n;  // window: rows [start, start + filled) are summed
  bool more = walk.next(p, first, n);
  while (more) {
    float acc[2][4] = {};
    uint32_t b = xlane;
#pragma unroll 4
    for (uint32_t c = 0; c < chunks; c++) {
      copy_wait<kDepth - 1>();
      const uint32_t at = fifo + slot * 1024;
      const uint4 u = lds128(at), v = lds128(at + 512);
      uint4 x0 = make_uint4(0, 0, 0, 0), x1 = x0;
      if (live) {
        x0 = lds128(b);
        if (F == FORMAT_E4M3) x1 = lds128(b + 16);
      }
      copy_next();
      if constexpr (F == FORMAT_BF16) {
        mma_bf16(acc[0], u.x, v.x, u.y, v.y, x0.x, x0.y);
        mma_bf16(acc[1], u.z, v.z, u.w, v.w, x0.z, x0.w);
      } else {
        uint32_t ul, uh, vl, vh;
        e4m3x4_f16(u.x, ul, uh), e4m3x4_f16(v.x, vl, vh);
        mma_f16(acc[0], ul, vl, uh, vh, x0.x, x0.y);
        e4m3x4_f16(u.y, ul, uh), e4m3x4_f16(v.y, vl, vh);
        mma_f16(acc[1], ul, vl, uh, vh, x0.z, x0.w);
        e4m3x4_f16(u.z, ul, uh), e4m3x4_f16(v.z, vl, vh);
        mma_f16(acc[0], ul, vl, uh, vh, x1.x, x1.y);
        e4m3x4_f16(u.w, ul, uh), e4m3x4_f16(v.w, vl, vh);
        mma_f16(acc[1], ul, vl, uh, vh, x1.z, x1.w);
      }
      b += ks * 2;
      if (++slot == kDepth) slot = 0;
    }
    float* mine = sums + (buffer * kWarps + warp) * sum_stride + filled;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (2 * t + i < p.r) {
        const float undo = i ? undo1 : undo0;
        if (g < n) mine[(2 * t + i) * window + g] = (acc[0][i] + acc[1][i]) * undo;
        if (g + 8 < n) mine[(2 * t + i) * window + g + 8] = (acc[0][i + 2] + acc[1][i + 2]) * undo;
      }
    filled += n;
    more = walk.next(p, first, n);
    if (more && filled + n <= window) continue;

    __syncthreads();  // all warps' sums of the window are there; the other buffer is free, its readers have passed here too
    if (col < p.r && wrow < filled) {
      const float* from = sums + buffer * kWarps * sum_stride + threadIdx.x;
      float v = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w++) v += from[w * sum_stride];
      v *= scale;
      const uint32_t row = start + wrow;
      uint32_t i = part0, base = 0;
      while (row >= base + p.part[i].rows) base += p.part[i].rows, ++i;
      const Part& part = p.part[i];
      if (part.out) {
        uint64_t o = (uint64_t)col * part.out_ld + row - base;
        if (part.flags & PART_OUT_F32)
          ((float*)part.out)[o] = v;
        else
          ((bf16*)part.out)[o] = __float2bfloat16_rn(v);
      }
      if (p.best && first_base + row < p.valid_rows) {
        uint64_t key = (uint64_t)float_key(__bfloat162float(__float2bfloat16_rn(v))) << 32 | (0xffffffffu - (first_base + row));
        if (key > best) best = key;
      }
    }
    start += filled, filled = 0, buffer ^= 1;
    if (more) scale = scale_of(start + wrow);
    if (start - slab0 <= window) {
      STAMP(4)
    }
  }
  STAMP(5)
  if (p.best) {
    __syncthreads();
    uint64_t* keys = (uint64_t*)smem;
    if (col < p.r) keys[threadIdx.x] = best;
    __syncthreads();
    if (threadIdx.x < p.r) {
      best = 0;
      for (uint32_t i = 0; i < window; i++) best = max((unsigned long long)best, (unsigned long long)keys[threadIdx.x * window + i]);
      p.best[threadIdx.x * gridDim.x + blockIdx.x] = best;
    }
  }
}

// Q4: a ring of stages filled by bulk copies, because a row's group scales have to travel with its codes.
template <int F>
NINFER_DEVICE void run_ring(const GemvParams& p, uint32_t part0, uint32_t part1, uint32_t block, uint32_t blocks) {
  constexpr int chunk = Format<F>::chunk, ks = Format<F>::ks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t row_bytes = p.k / ks * chunk, pieces = row_bytes / p.piece, pitch = p.piece + (F == FORMAT_Q4 ? 32 : 64);
  const uint32_t x_pitch = p.k * 2 + 32;
  const uint32_t scale_pitch = F == FORMAT_Q4 ? p.k / 64 * 2 : 0;  // a row's group scales travel in the same stage

  // shared memory: barriers (2 x 16 x 8), rows' largest magnitudes, partial sums (2 buffers), activations, ring
  uint32_t base = smem_addr(smem);
  uint32_t full = base, empty = base + 8 * kMaxStages;
  uint32_t* magnitude = (uint32_t*)(smem + 16 * kMaxStages);  // [8]
  float* sums = (float*)(smem + 16 * kMaxStages + 32);
  const uint32_t sum_stride = kWarps * p.r * kTileRows;
  uint32_t xs = base + 16 * kMaxStages + 32 + 2 * sum_stride * 4;
  uint32_t ring = (xs + p.r * x_pitch + 127) & ~127u;
  const uint32_t stage_bytes = kTileRows * (pitch + scale_pitch);

  uint32_t total = 0, first_base = 0;
  for (uint32_t i = part0; i < part1; i++) total += p.part[i].rows;
  for (uint32_t i = 0; i < part0; i++) first_base += p.part[i].rows;
  TileWalk walk;
  walk.row = share_start(total, blocks, block);
  walk.end = share_start(total, blocks, block + 1);
  walk.part = part0, walk.base = 0, walk.stop = 0;
  uint32_t slab = walk.end - walk.row;
  walk.tile = slab ? ceil_div(slab, ceil_div(slab, kTileRows)) : kTileRows;

  STAMP_BEGIN(F)
  if (threadIdx.x == 0) {
    for (uint32_t s = 0; s < p.stages; s++) mbar_init(full + 8 * s, 1), mbar_init(empty + 8 * s, kWarps);
    mbar_fence_init();
  }
  if (threadIdx.x < 8) magnitude[threadIdx.x] = 0;
  __syncthreads();
  if (p.trigger == 0) pdl_trigger();

  if (warp >= kWarps) {  // producers: each copies its share of a stage's rows
    constexpr uint32_t share = kTileRows / kProducers;
    const uint64_t policy = policy_evict_first();
    const uint32_t row = (warp - kWarps) * share + lane;
    uint32_t s = 0, phase = 1, first, n;
    while (walk.next(p, first, n)) {
      const uint8_t* src = (const uint8_t*)p.part[walk.part].w + (uint64_t)(first + row) * row_bytes;
      for (uint32_t j = 0; j < pieces; j++) {
        mbar_wait(empty + 8 * s, phase);
        // copies may complete before the expectation is posted: the phase still waits for its one arrival
        if (row == 0) mbar_expect(full + 8 * s, n * (p.piece + scale_pitch));
        if (lane < share && row < n) {
          bulk_load(ring + s * stage_bytes + row * pitch, src + j * p.piece, p.piece, full + 8 * s, policy);
          if (F == FORMAT_Q4)
            bulk_load(ring + s * stage_bytes + kTileRows * pitch + row * scale_pitch,
                      (const uint8_t*)p.part[walk.part].scale + (uint64_t)(first + row) * scale_pitch, scale_pitch, full + 8 * s,
                      policy);
        }
        if (++s == p.stages) s = 0, phase ^= 1;
      }
    }
    pdl_wait();
    if (p.trigger) pdl_trigger();
    return;
  }

  // Thread = column * 16 + row in the epilogue. Row scales are weights and far away: asked for one tile ahead, the first
  // before the wait.
  const uint32_t col = threadIdx.x / kTileRows, trow = threadIdx.x % kTileRows;
  uint32_t first, n;
  TileWalk ahead = walk;
  auto scale_ahead = [&]() -> float {
    uint32_t f, m;
    if (F != FORMAT_E4M3 || col >= p.r || !ahead.next(p, f, m) || trow >= m) return 1.0f;
    const Part& part = p.part[ahead.part];
    if (part.flags & PART_SCALE_F32) return __ldg((const float*)part.scale + f + trow);
    return __uint_as_float((uint32_t)__ldg((const uint16_t*)part.scale + f + trow) << 16);
  };
  float next_scale = scale_ahead();

  STAMP(1)
  pdl_wait();
  STAMP(2)
  if (p.trigger) pdl_trigger();

  // E4M3 weights become FP16, so the activations must: each row is scaled by a power of two, exactly, that brings its largest
  // magnitude near 2^15. First pass stores what came and finds the largest, second converts in place.
  const uint32_t units = p.k / 8, all_units = units * p.r;
  for (uint32_t i = threadIdx.x; i < ((all_units + 31) & ~31u); i += 2 * 32 * kWarps) {
    uint4 v[2];
    uint32_t row[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint32_t c = i + j * 32 * kWarps;
      row[j] = c / units;
      v[j] = make_uint4(0, 0, 0, 0);
      if (c < all_units) v[j] = ldg_l2(p.x + (uint64_t)row[j] * p.x_ld + (c - row[j] * units) * 8);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint32_t c = i + j * 32 * kWarps;
      if (F == FORMAT_Q4) v[j] = order_pairs_by4(v[j]);
      if (c < all_units) sts128(xs + row[j] * x_pitch + (c - row[j] * units) * 16, v[j]);
      if (F == FORMAT_E4M3) {
        uint32_t m = magnitude8(v[j]);
        if (__all_sync(~0u, row[j] == __shfl_sync(~0u, row[j], 0))) {
          m = __reduce_max_sync(~0u, m);
          if (lane == 0 && c < all_units) atomicMax(&magnitude[row[j]], m);
        } else if (c < all_units) {
          atomicMax(&magnitude[row[j]], m);
        }
      }
    }
  }
  float x_undo = 1.0f;
  if (F == FORMAT_E4M3) {
    named_sync(1, 32 * kWarps);
    for (uint32_t c = threadIdx.x; c < all_units; c += 32 * kWarps) {
      const uint32_t row = c / units, at = xs + row * x_pitch + (c - row * units) * 16;
      const float f = power_of_two(f16_shift(magnitude[row]));
      uint4 v = lds128(at);
      v.x = bf16_to_f16(v.x, f), v.y = bf16_to_f16(v.y, f), v.z = bf16_to_f16(v.z, f), v.w = bf16_to_f16(v.w, f);
      sts128(at, v);
    }
    if (col < p.r) x_undo = power_of_two(-f16_shift(magnitude[col]));
  }
  named_sync(1, 32 * kWarps);
  STAMP(3)

  const bool live = g < p.r;
  const uint32_t xlane = xs + g * x_pitch + t * (ks / 2);
  const uint32_t chunks = p.piece / chunk;
  uint64_t best = 0;
  const bool reducer = warp * 32 < (int)(kTileRows * p.r);  // the first warps; the others only leave their sums and go on
  uint32_t s = 0, phase = 0, buffer = 0, done = 0, row0 = first_base + walk.row;
  while (walk.next(p, first, n)) {
    const Part& part = p.part[walk.part];
    const float scale = next_scale;
    next_scale = scale_ahead();
    float acc[2][4] = {};
    uint32_t kchunk = 0;
    for (uint32_t j = 0; j < pieces; j++) {
      uint32_t at = ring + s * stage_bytes + g * pitch + t * (chunk / 4);
      mbar_wait(full + 8 * s, phase);
      const uint32_t q0 = ring + s * stage_bytes + kTileRows * pitch + g * scale_pitch, q1 = q0 + 8 * scale_pitch;
      auto load = [&](Chunk<F>& k, uint32_t c) {
        k.load(at + c * chunk, at + c * chunk + 8 * pitch, xlane + (kchunk + c) * (ks * 2), live, q0 + c * 2, q1 + c * 2);
      };
      for (uint32_t c = warp; c < chunks; c += kWarps) {
        Chunk<F> a;
        load(a, c);
        a.multiply(acc);
      }
      kchunk += chunks;
      __syncwarp();
      if (lane == 0) mbar_arrive(empty + 8 * s);
      if (++s == p.stages) s = 0, phase ^= 1;
    }
    // sums are [warp][column][row], two buffers: full (barriers 2, 3) when all warps have written, free (4, 5) when read
    if (!reducer && done >= 2) named_sync(4 + buffer, 32 * kWarps);
    float* mine = sums + buffer * sum_stride + warp * p.r * kTileRows;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (2 * t + i < (int)p.r) {
        mine[(2 * t + i) * kTileRows + g] = acc[0][i] + acc[1][i];
        mine[(2 * t + i) * kTileRows + g + 8] = acc[0][i + 2] + acc[1][i + 2];
      }
    if (reducer)
      named_sync(2 + buffer, 32 * kWarps);
    else
      named_arrive(2 + buffer, 32 * kWarps);
    if (col < p.r && trow < n) {
      const float* from = sums + buffer * sum_stride + threadIdx.x;
      float v = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w++) v += from[w * p.r * kTileRows];
      if (F == FORMAT_E4M3) v *= x_undo * scale;
      if (part.out) {
        uint64_t o = (uint64_t)col * part.out_ld + first + trow;
        if (part.flags & PART_OUT_F32)
          ((float*)part.out)[o] = v;
        else
          ((bf16*)part.out)[o] = __float2bfloat16_rn(v);
      }
      if (p.best && row0 + trow < p.valid_rows) {
        uint64_t key = (uint64_t)float_key(__bfloat162float(__float2bfloat16_rn(v))) << 32 | (0xffffffffu - (row0 + trow));
        if (key > best) best = key;
      }
    }
    if (reducer) named_arrive(4 + buffer, 32 * kWarps);
    row0 += n;
    buffer ^= 1;
    ++done;
    if (done == 1) {
      STAMP(4)
    }
    if (done == 2) {
      STAMP(5)
    }
  }
  STAMP(6)
  if (p.best) {
#pragma unroll
    for (int o = 8; o; o >>= 1) {
      uint64_t other = __shfl_xor_sync(~0u, best, o);
      if (other > best) best = other;
    }
    if (trow == 0 && col < p.r) p.best[col * gridDim.x + blockIdx.x] = best;
  }
}

// Variants by warps and copies on their way: 8 x 12 and 10 x 9 KB leave room for a neighbour on the SM, 10 x 18 does not: that is for long
// matrices, where a second block of the same launch on an SM would leave another SM without one. 8 x 4 is for GPUs with little shared memory and for
// rows too long for the others.
static constexpr int kThreads8 = 256;
static constexpr int kThreads10 = 320;

NINFER_KERNEL(gemv_bf16, GemvParams, kThreads10, 2) { run_slab<FORMAT_BF16, 10, 9>(p, 0, p.parts, blockIdx.x, gridDim.x); }

NINFER_KERNEL(gemv_e4m3, GemvParams, kThreads10, 2) {
  if (blockIdx.x < p.first_blocks)
    run_slab<FORMAT_E4M3, 10, 9>(p, 0, p.first_parts, blockIdx.x, p.first_blocks);
  else
    run_slab<FORMAT_BF16, 10, 9>(p, p.first_parts, p.parts, blockIdx.x - p.first_blocks, gridDim.x - p.first_blocks);
}

NINFER_KERNEL(gemv_bf16_w8, GemvParams, kThreads8, 2) { run_slab<FORMAT_BF16, 8, 12>(p, 0, p.parts, blockIdx.x, gridDim.x); }

NINFER_KERNEL(gemv_e4m3_w8, GemvParams, kThreads8, 2) {
  if (blockIdx.x < p.first_blocks)
    run_slab<FORMAT_E4M3, 8, 12>(p, 0, p.first_parts, blockIdx.x, p.first_blocks);
  else
    run_slab<FORMAT_BF16, 8, 12>(p, p.first_parts, p.parts, blockIdx.x - p.first_blocks, gridDim.x - p.first_blocks);
}

NINFER_KERNEL(gemv_bf16_small, GemvParams, kThreads8, 2) { run_slab<FORMAT_BF16, 8, 4>(p, 0, p.parts, blockIdx.x, gridDim.x); }

NINFER_KERNEL(gemv_e4m3_small, GemvParams, kThreads8, 2) {
  if (blockIdx.x < p.first_blocks)
    run_slab<FORMAT_E4M3, 8, 4>(p, 0, p.first_parts, blockIdx.x, p.first_blocks);
  else
    run_slab<FORMAT_BF16, 8, 4>(p, p.first_parts, p.parts, blockIdx.x - p.first_blocks, gridDim.x - p.first_blocks);
}

NINFER_KERNEL(gemv_bf16_shallow, GemvParams, kThreads10, 2) { run_slab<FORMAT_BF16, 10, 6>(p, 0, p.parts, blockIdx.x, gridDim.x); }

NINFER_KERNEL(gemv_e4m3_shallow, GemvParams, kThreads10, 2) {
  if (blockIdx.x < p.first_blocks)
    run_slab<FORMAT_E4M3, 10, 6>(p, 0, p.first_parts, blockIdx.x, p.first_blocks);
  else
    run_slab<FORMAT_BF16, 10, 6>(p, p.first_parts, p.parts, blockIdx.x - p.first_blocks, gridDim.x - p.first_blocks);
}

NINFER_KERNEL(gemv_bf16_deep, GemvParams, kThreads10, 1) { run_slab<FORMAT_BF16, 10, 18>(p, 0, p.parts, blockIdx.x, gridDim.x); }

NINFER_KERNEL(gemv_e4m3_deep, GemvParams, kThreads10, 1) {
  if (blockIdx.x < p.first_blocks)
    run_slab<FORMAT_E4M3, 10, 18>(p, 0, p.first_parts, blockIdx.x, p.first_blocks);
  else
    run_slab<FORMAT_BF16, 10, 18>(p, p.first_parts, p.parts, blockIdx.x - p.first_blocks, gridDim.x - p.first_blocks);
}

NINFER_KERNEL(gemv_q4, GemvParams, kThreads, 2) { run_ring<FORMAT_Q4>(p, 0, p.parts, blockIdx.x, gridDim.x); }

// Largest key of each row; the row with it is the smallest of equals, because keys hold the row's complement.
NINFER_KERNEL(best_merge, BestParams, 256, 2) {
  __shared__ uint64_t top[8];
  pdl_trigger();
  pdl_wait();
  uint32_t r = blockIdx.x;
  uint64_t best = 0;
  for (uint32_t i = threadIdx.x; i < p.n; i += 256) {
    uint64_t v = __ldcg((const unsigned long long*)p.best + (uint64_t)r * p.n + i);
    if (v > best) best = v;
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    uint64_t other = __shfl_xor_sync(~0u, best, o);
    if (other > best) best = other;
  }
  if (threadIdx.x % 32 == 0) top[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < 8; i++)
      if (top[i] > best) best = top[i];
    uint32_t row = 0xffffffffu - (uint32_t)best;
    p.out[r] = best == 0 ? 0xffffffffu : (p.ids ? p.ids[row] : row);
  }
}

// The plainest version, for shapes the streaming kernel does not take and as its reference on the device: one warp a row.
NINFER_KERNEL(gemv_naive, NaiveParams, 256, 2) {
  pdl_trigger();
  pdl_wait();
  uint32_t row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  for (uint32_t r = 0; r < p.r; r++) {
    float sum = 0;
    for (uint32_t k = lane; k < p.k; k += 32) {
      float w;
      if (p.format == FORMAT_BF16) {
        w = __bfloat162float(((const bf16*)p.w)[(uint64_t)row * p.k + k]);
      } else if (p.format == FORMAT_E4M3) {
        uint32_t even, odd;
        e4m3x4_bf16(((const uint8_t*)p.w)[(uint64_t)row * p.k + k], even, odd);
        w = bf16_lo(even) * E4M3_UNDO * E4M3_UNDO;
      } else {
        uint32_t kp = ceil_div(p.k, 128) * 128;
        uint8_t b = ((const uint8_t*)p.w)[((uint64_t)row * kp + k) / 2];
        int code = (int)((k & 1 ? b >> 4 : b & 15) ^ 8) - 8;
        w = code * __half2float(__ushort_as_half(((const uint16_t*)p.scale)[(uint64_t)row * (kp / 64) + k / 64]));
      }
      sum = fmaf(w, ldg_l2_bf16(p.x + (uint64_t)r * p.x_ld + k), sum);
    }
    sum = warp_sum(sum);
    if (p.format == FORMAT_E4M3)
      sum *= p.flags & PART_SCALE_F32 ? ((const float*)p.scale)[row] : __bfloat162float(((const bf16*)p.scale)[row]);
    if (lane == 0) {
      uint64_t o = (uint64_t)r * p.out_ld + row;
      if (p.flags & PART_OUT_F32)
        ((float*)p.out)[o] = sum;
      else
        ((bf16*)p.out)[o] = __float2bfloat16_rn(sum);
    }
  }
}
