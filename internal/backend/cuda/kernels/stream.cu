// Streaming matrix-vector kernels: out[r][n] = sum_k W[n][k] x[r][k], for R = 1..8 activation rows.
//
//   W    up to eight matrices over the same x: BF16, or E4M3 with one scale a row (BF16 or FP32), or signed 4-bit codes with an
//        FP16 scale per 64; all row-major as stored, no repacking. Later parts of the E4M3 kernel may be BF16.
//   x    [R][x_ld] BF16; out [R][out_ld] BF16 (rounded once from FP32) or FP32; optionally the argmax of the BF16-rounded row.
//
// Plan of a block (BF16, E4M3): a block owns a contiguous slab of rows (shares differ by at most one row). Each warp owns a run of k in
// all rows and streams it through a FIFO of 1 KB asynchronous copies that are private to a lane, filled before the dependency wait:
// no barrier while streaming. Weights are the A operand of m16n8k16, the activation rows its columns; the warps' sums are added in warp
// order once a window of rows: no atomics, the same bits at every launch. Blocks of ten warps keep activations in registers; whole.cuh has a leaner way for
// BF16 rows of the model's width. Q4: each warp owns rows, with all of k.
//
// What p.piece and p.stages mean for BF16 and E4M3: rows that each block of the first parts has, times 65,536, plus how many blocks have one more; and
// the windows whose sums have places, one where a block has no more rows than that. What was measured: docs/kernels.md; the way there: docs/ladders.md.
#include "common.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

enum { FORMAT_BF16 = 0, FORMAT_E4M3 = 1, FORMAT_Q4 = 2 };
enum { PART_OUT_F32 = 1, PART_SCALE_F32 = 2 };

static constexpr int kTileRows = 16;

#include "whole.cuh"

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

// A warp's activations of one to eight rows as operands of the tensor instruction: lane (g, t) has row g and, of each chunk, the k of the weights that it
// copies. Rows from p.r on are zero.
template <int F>
struct Kept {
  static constexpr int most = F == FORMAT_E4M3 ? 4 : 8;  // chunks
  uint4 v[8];
  NINFER_DEVICE uint4 low(int c) const { return v[F == FORMAT_E4M3 ? 2 * c : c]; }
  NINFER_DEVICE uint4 high(int c) const { return v[F == FORMAT_E4M3 ? 2 * c + 1 : c]; }

  // x is row g from the warp's first k on.
  NINFER_DEVICE void ask(const bf16* x, bool have, uint32_t chunks, uint32_t t) {
    const uint8_t* at = (const uint8_t*)x + (F == FORMAT_E4M3 ? t / 2 * 64 + t % 2 * 16 : t * 16);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      v[i] = make_uint4(0, 0, 0, 0);
      if (have && (F == FORMAT_E4M3 ? i / 2 : i) < chunks) v[i] = ldg_l2(at + (F == FORMAT_E4M3 ? i / 2 * 128 + i % 2 * 32 : i * 64));
    }
  }
  // For E4M3 they become FP16, each row scaled by a power of two, exactly, that brings the slice's largest magnitude near 2^15; undo: of columns 2t
  // and 2t + 1.
  NINFER_DEVICE void convert(uint32_t t, float* undo) {
    if constexpr (F == FORMAT_E4M3) {
      uint32_t m = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) m = max(m, magnitude8(v[i]));
      m = max(m, __shfl_xor_sync(~0u, m, 1));
      m = max(m, __shfl_xor_sync(~0u, m, 2));
      const int shift = f16_shift(m);
      const float f = power_of_two(shift);
      undo[0] = power_of_two(-__shfl_sync(~0u, shift, 8 * t)), undo[1] = power_of_two(-__shfl_sync(~0u, shift, 8 * t + 4));
      // Of a lane's 32 bytes in a chunk one half came to its neighbour, so that two lanes asked for whole sectors.
#pragma unroll
      for (int c = 0; c < most; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          uint32_t &lo = (&v[2 * c].x)[i], &hi = (&v[2 * c + 1].x)[i];
          const uint32_t a = bf16_to_f16(lo, f), b = bf16_to_f16(hi, f), other = __shfl_xor_sync(~0u, t % 2 ? a : b, 1);
          lo = t % 2 ? other : a, hi = t % 2 ? b : other;
        }
    }
  }
};

// Ten warps keep their activations in registers, and their FIFO holds whole tiles of their run of k: kDepth KB, of which the blocks of the grid's second
// half, which come to an SM last, ask for kEarly KB before the wait and for the rest when they have asked for activations, which would come behind it.
// With kAhead the first half, which waits 2 to 4 us for activations while memory has little to do, asks L2 for the tile behind its FIFO, a tenth a warp. That is for
// three rows and more: with fewer it gains nothing.
template <int F, int kWarps, int kDepth, int kEarly = kDepth, bool kAhead = false>
NINFER_DEVICE void run_slab(const GemvParams& p, uint32_t part0, uint32_t part1, uint32_t block, uint32_t blocks) {
  constexpr int chunk = Format<F>::chunk, ks = Format<F>::ks;
  constexpr bool kept = kWarps == 10;  // activations in registers
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // two rows' loads of activations share no bank: a lane takes 32 bytes of each in E4M3, else 16
  const uint32_t row_bytes = p.k / ks * chunk, x_pitch = kept ? 0 : p.k * 2 + (F == FORMAT_E4M3 ? 16 : 64);
  const uint32_t window = p.window;  // rows whose partial sums are kept before they are added up

  // shared memory: partial sums [1 or 2][warp][column][window row], activations [R][x_pitch], FIFO [warp][depth][2][lane][16]
  float* sums = (float*)smem;
  const uint32_t sum_pitch = window + 4, sum_stride = p.r * sum_pitch;
  const uint32_t xs = smem_addr(smem) + p.stages * kWarps * sum_stride * 4;
  uint32_t fifo = ((xs + p.r * x_pitch + 127) & ~127u) + warp * (kDepth * 1024) + lane * 16;
  // Nothing that ptxas may take apart: of nvcc 13.0 a copy to a register plus a uniform register is an illegal instruction.
  fifo = __shfl_sync(~0u, fifo, lane);

  STAMP_BEGIN(F)
  // The block's rows. Of the first parts without divisions, which come before everything else.
  uint32_t each = p.piece >> 16, more_have = p.piece & 0xffff, first_base = 0;
  if (part0) {
    uint32_t total = 0;
    for (uint32_t i = part0; i < part1; i++) total += p.part[i].rows;
    each = total / blocks, more_have = total % blocks;
    for (uint32_t i = 0; i < part0; i++) first_base += p.part[i].rows;
  }
  const uint32_t slab0 = block * each + min(block, more_have);
  TileWalk ahead;
  ahead.row = slab0, ahead.end = slab0 + each + (block < more_have), ahead.tile = kTileRows;
  ahead.part = part0, ahead.base = 0, ahead.stop = 0;
  TileWalk walk = ahead;

  if (p.trigger == 0) pdl_trigger();

  // This warp's run of chunks, the same in every row, and the copies ahead of its work.
  // Whole 128-byte lines where they divide evenly.
  const uint32_t all_chunks = row_bytes / chunk, grain = all_chunks % (2 * kWarps) == 0 ? 2 : 1;
  const uint32_t chunk0 = grain * share_start(all_chunks / grain, kWarps, warp);
  const uint32_t chunks = grain * share_start(all_chunks / grain, kWarps, warp + 1) - chunk0;
  const uint64_t policy = policy_evict_first();
  const uint8_t* src = nullptr;
  // Kept: a tile's chunks have places of their own, and a place that was read takes the same chunk of a later tile.
  constexpr int per = Kept<F>::most, tiles = kept ? kDepth / per : 1;
  static_assert(!kept || kDepth % per == 0 && kEarly % per == 0);
  auto next_tile = [&]() -> uint32_t {
    uint32_t first, n;
    if (!ahead.next(p, first, n)) return 0;
    src = (const uint8_t*)p.part[ahead.part].w + (uint64_t)(first + g) * row_bytes + chunk0 * chunk + t * 16;
    return n;
  };
  auto copy_chunk = [&](uint32_t at, uint32_t n, int c) {
    if (c < chunks) {
      if (g < n) copy16(at + c * 1024, src + c * chunk, policy);
      if (g + 8 < n) copy16(at + c * 1024 + 512, src + c * chunk + 8 * (uint64_t)row_bytes, policy);
    }
    copy_commit();
  };
  auto copy_tile = [&](uint32_t i) {
    const uint32_t n = next_tile();
#pragma unroll
    for (int c = 0; c < per; c++) copy_chunk(fifo + i * per * 1024, n, c);
  };
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
  const int early = !kept || blockIdx.x < gridDim.x / 2 ? kDepth : kEarly;
#pragma unroll 1
  for (int i = 0; i < early; i += kept ? per : 1)
    if constexpr (kept)
      copy_tile(i / per);
    else
      copy_next();

  // In the epilogue a thread is one window row and one or two columns. Row scales are weights and far away: asked for a window ahead, and kept as they are stored,
  // since whatever were made of them here would be waited for here.
  const uint32_t places = 31 - __clz(window), cols = kWarps * 32 >> places, col = threadIdx.x >> places, wrow = threadIdx.x & (window - 1);
  uint32_t own_part = part0, own_base = 0;  // of the thread's row
  auto scale_of = [&](uint32_t row) -> uint32_t {
    if (col >= p.r || row >= walk.end) return 0;
    while (row >= own_base + p.part[own_part].rows) own_base += p.part[own_part].rows, ++own_part;
    if (F != FORMAT_E4M3) return 0;
    if (p.part[own_part].flags & PART_SCALE_F32) return __ldg((const uint32_t*)p.part[own_part].scale + row - own_base);
    return __ldg((const uint16_t*)p.part[own_part].scale + row - own_base);
  };
  uint32_t scale = scale_of(slab0 + wrow);

  if constexpr (kAhead) {
    constexpr uint32_t kPace = 320;  // clocks from a warp's request to the next warp's
    TileWalk peek = ahead;
    uint32_t first, n;
    if (early == kDepth && peek.next(p, first, n)) {
      const uint32_t begin = clock(), bytes = n * row_bytes / kWarps & ~15u;
      const uint8_t* at = (const uint8_t*)p.part[peek.part].w + (uint64_t)first * row_bytes + warp * bytes;
      while ((uint32_t)clock() - begin < warp * kPace);
      if (lane == 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
    }
  }

  STAMP(1)
  pdl_wait();
  STAMP(2)
  if (p.trigger == 1) pdl_trigger();

  // The warp's own slice of the activations; nobody else reads it. In shared memory they are the same as in Kept.
  float undo[2] = {1.0f, 1.0f};
  Kept<F> own;
  if constexpr (kept) {
    own.ask(p.x + (uint64_t)g * p.x_ld + chunk0 * ks, g < p.r, chunks, t);
#pragma unroll 1
    for (int i = early; i < kDepth; i += per) copy_tile(i / per);
    own.convert(t, undo);
  } else {
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
          if (r == 2 * t) undo[0] = power_of_two(-shift);
          if (r == 2 * t + 1) undo[1] = power_of_two(-shift);
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
          if (r == 2 * t) undo[0] = power_of_two(-shift);
          if (r == 2 * t + 1) undo[1] = power_of_two(-shift);
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
  uint64_t best[2] = {};
  uint32_t slot = 0, buffer = 0, start = slab0, filled = 0, first, n;  // window: rows [start, start + filled) are summed
  bool more = walk.next(p, first, n);
  while (more) {
    float acc[2][4] = {};
    auto multiply = [&](uint4 u, uint4 v, uint4 x0, uint4 x1) {
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
    };
    if constexpr (kept) {
      const uint32_t at = fifo + slot * per * 1024, coming = next_tile();
#pragma unroll
      for (int c = 0; c < per; c++) {
        uint4 u, v;
        if (c < chunks) {
          copy_wait<kDepth - 1>();
          u = lds128(at + c * 1024), v = lds128(at + c * 1024 + 512);
        }
        copy_chunk(at, coming, c);
        if (c < chunks) multiply(u, v, own.low(c), own.high(c));
      }
      if (++slot == tiles) slot = 0;
    } else {
      uint32_t from = xlane;
#pragma unroll 4
      for (uint32_t c = 0; c < chunks; c++) {
        copy_wait<kDepth - 1>();
        const uint32_t at = fifo + slot * 1024;
        const uint4 u = lds128(at), v = lds128(at + 512);
        uint4 x0 = make_uint4(0, 0, 0, 0), x1 = x0;
        if (live) {
          x0 = lds128(from);
          if (F == FORMAT_E4M3) x1 = lds128(from + 16);
        }
        copy_next();
        multiply(u, v, x0, x1);
        from += ks * 2;
        if (++slot == kDepth) slot = 0;
      }
    }
    float* mine = sums + (buffer * kWarps + warp) * sum_stride + filled;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (2 * t + i < p.r) {
        if (g < n) mine[(2 * t + i) * sum_pitch + g] = (acc[0][i] + acc[1][i]) * undo[i];
        if (g + 8 < n) mine[(2 * t + i) * sum_pitch + g + 8] = (acc[0][i + 2] + acc[1][i + 2]) * undo[i];
      }
    filled += n;
    more = walk.next(p, first, n);
    if (more && filled + n <= window) continue;

    __syncthreads();  // all warps' sums of the window are there; the other buffer is free, its readers have passed here too
    if (col < p.r && wrow < filled) {
      const Part& part = p.part[own_part];
      uint32_t c = col;
#pragma unroll 1
      do {
        const float* from = sums + buffer * kWarps * sum_stride + c * sum_pitch + wrow;
        float v = 0;
#pragma unroll
        for (int w = 0; w < kWarps; w++) v += from[w * sum_stride];
        const uint32_t row = start + wrow;
        if (F == FORMAT_E4M3) v *= __uint_as_float(part.flags & PART_SCALE_F32 ? scale : scale << 16);
        if (part.out) {
          uint64_t o = (uint64_t)c * part.out_ld + row - own_base;
          if (part.flags & PART_OUT_F32)
            ((float*)part.out)[o] = v;
          else
            ((bf16*)part.out)[o] = __float2bfloat16_rn(v);
        }
        if (p.best && first_base + row < p.valid_rows) {
          const uint64_t key = (uint64_t)float_key(__bfloat162float(__float2bfloat16_rn(v))) << 32 | (0xffffffffu - (first_base + row));
          best[0] = c == col ? max((unsigned long long)key, (unsigned long long)best[0]) : best[0];
          best[1] = c == col ? best[1] : max((unsigned long long)key, (unsigned long long)best[1]);
        }
      } while ((c += cols) < p.r);
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
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (col + i * cols < p.r) keys[i * kWarps * 32 + threadIdx.x] = best[i];
    __syncthreads();
    if (threadIdx.x < p.r) {
      const uint64_t* from = keys + threadIdx.x / cols * kWarps * 32 + threadIdx.x % cols * window;
      uint64_t most = 0;
      for (uint32_t i = 0; i < window; i++) most = max((unsigned long long)most, (unsigned long long)from[i]);
      p.best[threadIdx.x * gridDim.x + blockIdx.x] = most;
    }
  }
}

// Eight signed 4-bit codes to four FP16 pairs (k+i, k+4+i): code xor 8 times 2^-24, of odd pairs 16 times that.
NINFER_DEVICE void s4x8_f16(uint32_t w, uint32_t* out) {
  // and, then exclusive or, in one instruction
  auto place = [](uint32_t v, uint32_t mask, uint32_t eight) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(v), "r"(mask), "r"(eight));
    return r;
  };
  const uint32_t far = w >> 8;
  out[0] = place(w, 0x000f000fu, 0x00080008u), out[1] = place(w, 0x00f000f0u, 0x00800080u);
  out[2] = place(far, 0x000f000fu, 0x00080008u), out[3] = place(far, 0x00f000f0u, 0x00800080u);
}

// Q4. A warp has rows of its own, in tiles of at most 16, and all of their codes pass through the FIFO, whose copies are private to a lane and hold two
// chunks of 128 codes. A tile's scales lie together and come in one piece beside its first codes; sixteen bytes before them say which tile it is.
//
// A code xor 8 in the lowest bits of an FP16 number, or four bits further up, is a subnormal: its value times 2^-24, or 16 times that, which activations
// make up for. No magic numbers, so what is too much, eight for each code, is hardly more than the codes themselves: the products begin with minus eight
// times the sum of the group's activations. Lanes 0 and 1 of a row have one group of a chunk, 2 and 3 the other, and each group has a column
// of its own for each activation row, so that a scale multiplies a sum of 64 products; a pass has four activation rows, kPasses of them are made.
template <int kWarps, int kDepth, int kPasses>
NINFER_DEVICE void run_groups(const GemvParams& p, uint32_t block, uint32_t blocks) {
  constexpr int kRow = 128, kCodes = 256;  // bytes and codes of a row in one copy
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t scale_bytes = p.k / 32, x_pitch = p.k * 2 + 64, runs = p.k / kCodes;

  // shared memory: activations [R][x_pitch], first values [R][k / 64], largest magnitudes [8][16], FIFO [warp][depth][2][2][lane][16], and of p.piece
  // tiles a warp what they are and their scales
  const uint32_t xs = smem_addr(smem), begin = xs + p.r * x_pitch, largest = begin + p.r * (p.k / 16);
  const uint32_t fifos = (largest + 8 * 16 * 4 + 127) & ~127u, fifo = fifos + warp * (kDepth * 2048) + lane * 16;
  const uint32_t tile_bytes = 16 + kTileRows * scale_bytes, tiles = fifos + kWarps * kDepth * 2048 + warp * p.piece * tile_bytes;

  STAMP_BEGIN(FORMAT_Q4)
  uint32_t total = 0;
  for (uint32_t i = 0; i < p.parts; i++) total += p.part[i].rows;
  TileWalk ahead;
  ahead.row = share_start(total, blocks * kWarps, block * kWarps + warp);
  ahead.end = share_start(total, blocks * kWarps, block * kWarps + warp + 1);
  ahead.part = 0, ahead.base = 0, ahead.stop = 0;
  const uint32_t slab = ahead.end - ahead.row;
  ahead.tile = slab ? ceil_div(slab, ceil_div(slab, kTileRows)) : kTileRows;

  if (p.trigger == 0) pdl_trigger();

  const uint64_t policy = policy_evict_first();
  const uint8_t* src = nullptr;
  uint32_t ahead_run = runs, ahead_n = 0, ahead_tile = tiles;
  auto copy_next = [&](uint32_t dst) {
    if (ahead_run == runs) {
      uint32_t first = 0;
      const uint32_t row = ahead.row;
      ahead_run = 0;
      if (ahead.row >= ahead.end || !ahead.next(p, first, ahead_n)) ahead_n = 0;
      src = (const uint8_t*)p.part[ahead.part].w + (uint64_t)(first + g) * (p.k / 2) + t * 16;
      const uint8_t* from = (const uint8_t*)p.part[ahead.part].scale + (uint64_t)first * scale_bytes;
      for (uint32_t i = lane * 16; i < ahead_n * scale_bytes; i += 512) copy16(ahead_tile + 16 + i, from + i, policy);
      if (lane == 0) sts128(ahead_tile, make_uint4(row, ahead_n, ahead.part, first));
      ahead_tile += tile_bytes;
      if (ahead_tile == tiles + p.piece * tile_bytes) ahead_tile = tiles;
    }
    if (g < ahead_n) copy16(dst, src, policy), copy16(dst + 1024, src + 64, policy);
    if (g + 8 < ahead_n) {
      const uint8_t* far = src + 4 * (uint64_t)p.k;
      copy16(dst + 512, far, policy), copy16(dst + 1536, far + 64, policy);
    }
    copy_commit();
    src += kRow, ++ahead_run;
  };
#pragma unroll 1
  for (int i = 0; i < kDepth; i++) copy_next(fifo + i * 2048);

  STAMP(1)
  pdl_wait();
  STAMP(2)
  if (p.trigger == 1) pdl_trigger();

  // Activations in FP16, each row scaled by a power of two that brings its largest magnitude near 2^15. Eight values are a unit: of a lane's four units
  // of a chunk the first of all lanes come first. A warp does the runs that are its own by number, four rows at a time.
  const uint32_t unit = lane / 16 * 256 + lane % 4 * 64 + lane / 4 % 4 * 16;
#pragma unroll 1
  for (uint32_t r = 0; r < p.r; r += 4) {
    uint32_t m[4] = {};
#pragma unroll 1
    for (uint32_t c = warp; c < runs; c += kWarps) {
      uint4 v[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (r + i < p.r) v[i] = ldg_l2(p.x + (uint64_t)(r + i) * p.x_ld + c * kCodes + lane * 8);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (r + i < p.r) {
          m[i] = max(m[i], magnitude8(v[i]));
          sts128(xs + (r + i) * x_pitch + c * (kCodes * 2) + unit, order_pairs_by4(v[i]));
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t most = __reduce_max_sync(~0u, m[i]);
      if (lane == 0) ((uint32_t*)smem)[(largest - xs) / 4 + (r + i) * 16 + warp] = most;
    }
  }
  __syncthreads();
  float undo[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; i++) undo[i] = 0.0f;
#pragma unroll 1
  for (uint32_t r = 0; r < p.r; r++) {
    const int shift = f16_shift(__reduce_max_sync(~0u, lane < kWarps ? lds32(largest + (r * 16 + lane) * 4) : 0u));
    const float f = power_of_two(shift);
#pragma unroll
    for (int i = 0; i < kPasses; i++)
      if (r == t + 4 * i) undo[i] = power_of_two(24 - shift);
#pragma unroll 1
    for (uint32_t c = warp; c < runs; c += kWarps) {
      const uint32_t at = xs + r * x_pitch + c * (kCodes * 2) + unit;
      uint4 w = lds128(at);
      w.x = bf16_to_f16(w.x, f), w.z = bf16_to_f16(w.z, f);
      w.y = bf16_to_f16(w.y, f * 0.0625f), w.w = bf16_to_f16(w.w, f * 0.0625f);
      sts128(at, w);
    }
  }
  __syncwarp();
  if (p.trigger == 2) pdl_trigger();

  // This lane's column: activation row g / 2 of a pass, if the lane's group is the column's.
  bool live[kPasses];
  uint32_t xlane[kPasses], first_value[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; i++) {
    const uint32_t row = g / 2 + 4 * i;
    live[i] = row < p.r && t / 2 == g % 2;
    xlane[i] = xs + row * x_pitch + t * 16;
    first_value[i] = begin + min(t + 4 * i, p.r - 1) * (p.k / 16);
  }
  // The products of a chunk, whose number c is; codes come as they are stored. Two sums shorten the chain.
  auto multiply = [&](float (*acc)[2][4], uint4 u, uint4 v, uint32_t c) {
    const uint32_t a[4] = {u.x, u.y, u.z, u.w}, b[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t lo[4], hi[4];
      s4x8_f16(a[j], lo), s4x8_f16(b[j], hi);
#pragma unroll
      for (int i = 0; i < kPasses; i++) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (live[i]) x = lds128(xlane[i] + c * 256 + j * 64);
        mma_f16(acc[i][0], lo[0], hi[0], lo[1], hi[1], x.x, x.y);
        mma_f16(acc[i][1], lo[2], hi[2], lo[3], hi[3], x.z, x.w);
      }
    }
  };
  const uint4 zero = make_uint4(0, 0, 0, 0);  // code 0 is stored as 8
#pragma unroll 1
  for (uint32_t c = warp; c < runs; c += kWarps)
#pragma unroll 1
    for (uint32_t d = 2 * c; d < 2 * c + 2; d++) {
      float acc[kPasses][2][4] = {};
      multiply(acc, zero, zero, d);
#pragma unroll
      for (int i = 0; i < kPasses; i++)
        if (g == 0 && t + 4 * i < p.r)
          sts64(first_value[i] + d * 8, make_uint2(__float_as_uint(-acc[i][0][0] - acc[i][1][0]), __float_as_uint(-acc[i][0][1] - acc[i][1][1])));
    }
  __syncthreads();
  STAMP(3)

  uint64_t best[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; i++) best[i] = 0;
  uint32_t at = fifo, tile = tiles;
  while (true) {
    copy_wait<kDepth - 1>();
    __syncwarp();  // what lies beside the codes was copied by other lanes too
    if (lds32(tile + 4) == 0) break;
    float sum[kPasses][2] = {};
    uint32_t scales = tile + 16 + g * scale_bytes;
#pragma unroll 1
    for (uint32_t c = 0; c < 2 * runs; c += 2) {
      uint4 u[2], v[2];
      float acc[2][kPasses][2][4];
      if (c) copy_wait<kDepth - 1>();
#pragma unroll
      for (int d = 0; d < 2; d++) u[d] = lds128(at + d * 1024), v[d] = lds128(at + d * 1024 + 512);
      const uint2 s0 = lds64(scales), s1 = lds64(scales + 8 * scale_bytes);
      scales += 8;
#pragma unroll
      for (int d = 0; d < 2; d++)
#pragma unroll
        for (int i = 0; i < kPasses; i++) {
          const uint2 b = lds64(first_value[i] + (c + d) * 8);
          acc[d][i][0][0] = acc[d][i][0][2] = __uint_as_float(b.x), acc[d][i][0][1] = acc[d][i][0][3] = __uint_as_float(b.y);
          acc[d][i][1][0] = acc[d][i][1][1] = acc[d][i][1][2] = acc[d][i][1][3] = 0.0f;
        }
      copy_next(at);
      at += 2048;
      if (at == fifo + kDepth * 2048) at = fifo;
#pragma unroll
      for (int d = 0; d < 2; d++) multiply(acc[d], u[d], v[d], c + d);
#pragma unroll
      for (int d = 0; d < 2; d++) {
        const uint32_t h0 = d ? s0.y : s0.x, h1 = d ? s1.y : s1.x;
        const float2 f0 = __half22float2(*(const __half2*)&h0), f1 = __half22float2(*(const __half2*)&h1);
#pragma unroll
        for (int i = 0; i < kPasses; i++) {
          const float(*a)[4] = acc[d][i];
          sum[i][0] = fmaf(f0.y, a[0][1] + a[1][1], fmaf(f0.x, a[0][0] + a[1][0], sum[i][0]));
          sum[i][1] = fmaf(f1.y, a[0][3] + a[1][3], fmaf(f1.x, a[0][2] + a[1][2], sum[i][1]));
        }
      }
    }
    const uint4 what = lds128(tile);
    tile += tile_bytes;
    if (tile == tiles + p.piece * tile_bytes) tile = tiles;
    const Part& part = p.part[what.z];
#pragma unroll
    for (int i = 0; i < kPasses; i++) {
      const uint32_t col = t + 4 * i;
      if (col >= p.r) continue;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint32_t row = g + 8 * j;
        if (row >= what.y) continue;
        const float v = sum[i][j] * undo[i];
        if (part.out) {
          const uint64_t o = (uint64_t)col * part.out_ld + what.w + row;
          if (part.flags & PART_OUT_F32)
            ((float*)part.out)[o] = v;
          else
            ((bf16*)part.out)[o] = __float2bfloat16_rn(v);
        }
        if (p.best && what.x + row < p.valid_rows) {
          const uint64_t key = (uint64_t)float_key(__bfloat162float(__float2bfloat16_rn(v))) << 32 | (0xffffffffu - (what.x + row));
          if (key > best[i]) best[i] = key;
        }
      }
    }
  }
  STAMP(4)
  if (!p.best) return;
  uint64_t* keys = (uint64_t*)smem;
  __syncthreads();  // the activations have been read
#pragma unroll
  for (int i = 0; i < kPasses; i++) {
#pragma unroll
    for (int o = 4; o < 32; o *= 2) best[i] = max((unsigned long long)best[i], __shfl_xor_sync(~0u, (unsigned long long)best[i], o));
    if (g == 0 && t + 4 * i < p.r) keys[(t + 4 * i) * kWarps + warp] = best[i];
  }
  __syncthreads();
  if (threadIdx.x < p.r) {
    uint64_t most = 0;
    for (uint32_t i = 0; i < kWarps; i++) most = max((unsigned long long)most, (unsigned long long)keys[threadIdx.x * kWarps + i]);
    p.best[threadIdx.x * gridDim.x + blockIdx.x] = most;
  }
}

// Variants by warps and copies on their way: 8 x 12 and 10 x 8 KB leave room for a neighbour on the SM, 10 x 16 does not: that is for long
// matrices, where a second block of the same launch on an SM would leave another SM without one. 8 x 4 is for GPUs with little shared memory and for
// rows too long for the others.
static constexpr int kThreads8 = 256;
static constexpr int kThreads10 = 320;

NINFER_KERNEL(gemv_bf16, GemvParams, kThreads10, 2) {
  if (__builtin_expect(p.k == 2560 && p.stages == 1 && p.window == 64 && !p.best, 1))
    run_whole_bf16(p);
  else
    run_slab<FORMAT_BF16, 10, 8>(p, 0, p.parts, blockIdx.x, gridDim.x);
}

NINFER_KERNEL(gemv_e4m3, GemvParams, kThreads10, 2) {
  if (blockIdx.x < p.first_blocks && p.r < 3)
    run_slab<FORMAT_E4M3, 10, 8, 4>(p, 0, p.first_parts, blockIdx.x, p.first_blocks);
  else if (blockIdx.x < p.first_blocks)
    run_slab<FORMAT_E4M3, 10, 8, 4, true>(p, 0, p.first_parts, blockIdx.x, p.first_blocks);
  else
    run_slab<FORMAT_BF16, 10, 8>(p, p.first_parts, p.parts, blockIdx.x - p.first_blocks, gridDim.x - p.first_blocks);
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

NINFER_KERNEL(gemv_bf16_deep, GemvParams, kThreads10, 1) { run_slab<FORMAT_BF16, 10, 16>(p, 0, p.parts, blockIdx.x, gridDim.x); }

NINFER_KERNEL(gemv_e4m3_deep, GemvParams, kThreads10, 1) {
  if (blockIdx.x < p.first_blocks)
    run_slab<FORMAT_E4M3, 10, 16>(p, 0, p.first_parts, blockIdx.x, p.first_blocks);
  else
    run_slab<FORMAT_BF16, 10, 16>(p, p.first_parts, p.parts, blockIdx.x - p.first_blocks, gridDim.x - p.first_blocks);
}

static constexpr int kThreadsQ4 = 256;
static constexpr int kThreadsQ4Rows = 256;
// p.stages is the depth: 2 is for little shared memory. More than four activation rows cost a second pass.
NINFER_KERNEL(gemv_q4, GemvParams, kThreadsQ4, 2) {
  if (p.stages == 2)
    run_groups<8, 2, 1>(p, blockIdx.x, gridDim.x);
  else
    run_groups<8, 4, 1>(p, blockIdx.x, gridDim.x);
}

NINFER_KERNEL(gemv_q4_rows, GemvParams, kThreadsQ4Rows, 2) {
  if (p.stages == 2)
    run_groups<8, 2, 2>(p, blockIdx.x, gridDim.x);
  else
    run_groups<8, 3, 2>(p, blockIdx.x, gridDim.x);
}

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
