// Streaming products with operands of more than BF16's precision: out[r][n] = sum_k W[n][k] x[r][k], r = 1..8.
//
//   project_bf16   W in BF16; x becomes a BF16 part and what that leaves, also in BF16: two tensor instructions a chunk.
//   project_e4m3   W in E4M3 with a scale a row; x becomes FP16, each share of k scaled by a power of two.
//   project_whole  the same where a block's weights fit into shared memory: all of them come by bulk copies, behind which no load of another
//                  block on the SM has to stand. x in BF16.
//   ..._rows       several rows, in clusters. x in BF16.
//   Grid: any, a multiple of the cluster; one block an SM.
//
// x is FP32, BF16, or BF16 times a factor that belongs to a head: 1 over the root of the mean of its squares, which four blocks of the delta
// rule have summed. K is cut into eight shares, each a warp's; sums meet in their order. In clusters a block has some of the shares for the
// rows of all its blocks, so that it reads only its part of the operand, and adds up the rows it would have had alone: all kernels of a format make the
// same sums, whatever the number of rows. On the side the window of the convolution that came before is brought forward, eight channels a
// thread: the delta rule's blocks share its channels, so none of them may write it.
#include "common.cuh"

extern __shared__ __align__(128) uint8_t room[];

static constexpr int kProject = 256;

DEVICE uint32_t shared_at(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEVICE uint4 shared_load(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
DEVICE void shared_store(uint32_t a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void multiply_bf16(float* acc, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void multiply_f16(float* acc, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE uint2 e4m3_to_f16(uint32_t w) {  // four codes, k ascending
  uint2 r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(r.x), "=r"(r.y) : "r"(w));
  return r;
}
DEVICE uint32_t two_bf16(float a, float b) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
DEVICE uint32_t two_f16(float a, float b) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
DEVICE uint32_t cut(uint32_t n, uint32_t m, uint32_t i) { return (uint32_t)((uint64_t)n * i / m); }

// Eight operand values from k on, as FP32.
DEVICE void operand8(const ProjectParams& p, uint32_t r, uint32_t k, float factor, float* v) {
  if (!p.x_f32) {
    const uint4 q = __ldcg((const uint4*)((const bf16*)p.x + (uint64_t)r * p.x_ld + k));
    v[0] = lo(q.x), v[1] = hi(q.x), v[2] = lo(q.y), v[3] = hi(q.y), v[4] = lo(q.z), v[5] = hi(q.z), v[6] = lo(q.w), v[7] = hi(q.w);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __fmul_rn(v[i], factor);
  } else {
    const float4* q = (const float4*)((const float*)p.x + (uint64_t)r * p.x_ld + k);
    const float4 a = __ldcg(q), b = __ldcg(q + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
}

// Eight channels of a lane's window are a piece. Window, records and new rows are one sequence.
DEVICE uint32_t pieces(const Shift& s) { return s.count * (s.c / 8); }
DEVICE uint32_t shift_of(const Lane& lane) { return lane.fold + (lane.record ? 0 : lane.rows); }
DEVICE const uint4* part_of(const Shift& s, const Lane& lane, uint32_t at, uint32_t c) {
  return (const uint4*)((at < s.depth               ? s.window + ((uint64_t)lane.slot * s.depth + at) * s.c
                         : at < s.depth + lane.fold ? s.records + ((uint64_t)lane.slot * s.verify + at - s.depth) * s.c
                                                    : s.x + (uint64_t)(lane.first + at - s.depth - lane.fold) * s.c) + c);
}
DEVICE void ask(const Shift& s, const Lane& lane, uint32_t piece, uint4* v) {
#pragma unroll
  for (uint32_t j = 0; j < 3; j++)
    if (shift_of(lane) && j < s.depth) v[j] = __ldcg(part_of(s, lane, shift_of(lane) + j, piece % (s.c / 8) * 8));
}
// Writes a piece that has come, of a window of at most three rows, and leaves records.
DEVICE void bring(const Shift& s, const Lane& lane, uint32_t piece, const uint4* v) {
  const uint32_t c = piece % (s.c / 8) * 8;
#pragma unroll
  for (uint32_t j = 0; j < 3; j++)
    if (shift_of(lane) && j < s.depth) *(uint4*)(s.window + ((uint64_t)lane.slot * s.depth + j) * s.c + c) = v[j];
#pragma unroll 1
  for (uint32_t r = 0; r < lane.rows && lane.record; r += 4) {  // four at a time
    uint4 x[4];
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
      if (r + j < lane.rows) x[j] = __ldcg((const uint4*)(s.x + (uint64_t)(lane.first + r + j) * s.c + c));
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
      if (r + j < lane.rows) *(uint4*)(s.records + ((uint64_t)lane.slot * s.verify + r + j) * s.c + c) = x[j];
  }
}

// At most 96 registers, which leave room for two blocks of the delta rule.
template <bool F8, int kDepth>
DEVICE void project(const ProjectParams& p) {
  constexpr int W = kProject / 32;
  constexpr uint32_t ks = F8 ? 64 : 32;  // k positions of a chunk: 64 bytes of a row
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t row_bytes = F8 ? p.k : 2 * p.k, pitch = 2 * p.k + 32;
  // shared memory: 128 bytes with a barrier a row, sums [2][warp][r][16], operand [r][pitch] (and again what it leaves), copies [warp][kDepth][row of a tile][64]
  float* sums = (float*)(room + 128);
  const uint32_t xs = shared_at(sums) + 2 * W * p.r * 64, rest = xs + p.r * pitch;
  uint32_t total = 0;
  for (uint32_t i = 0; i < p.parts; i++) total += p.part[i].rows;
  const uint32_t begin = cut(total, gridDim.x, blockIdx.x), end = cut(total, gridDim.x, blockIdx.x + 1);
  const uint32_t tiles = (end - begin + 15) / 16, tile = tiles ? (end - begin + tiles - 1) / tiles : 0;
  const uint32_t stride = tile * 64, ring = ((xs + (F8 ? 1 : 2) * p.r * pitch + 127) & ~127u) + warp * (kDepth * stride);
  const uint32_t at0 = ring + (g < tile ? g * 64 : 0) + t * 16, at1 = g + 8 < tile ? at0 + 512 : at0;  // a row beyond the tile is any row
  const uint32_t all = p.k / ks, chunk0 = cut(all, W, warp), chunks = cut(all, W, warp + 1) - chunk0;
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  // Copies run ahead of the work by kDepth chunks, across tiles.
  uint32_t ahead_tile = 0, ahead_chunk = chunks, ahead_slot = 0;
  const uint8_t *src0 = nullptr, *src1 = nullptr;
  auto row_at = [&](uint32_t n, bool live) -> const uint8_t* {
    if (!live) return nullptr;
    uint32_t i = 0;
    while (n >= p.part[i].rows) n -= p.part[i++].rows;
    return (const uint8_t*)p.part[i].w + (uint64_t)n * row_bytes + chunk0 * 64 + t * 16;
  };
  auto copy_next = [&]() {
    if (ahead_chunk == chunks) {
      const uint32_t first = begin + ahead_tile * tile, stop = min(end, first + tile);
      const bool live = ahead_tile < tiles && chunks > 0;
      src0 = row_at(first + g, live && first + g < stop), src1 = row_at(first + g + 8, live && first + g + 8 < stop);
      ahead_chunk = 0, ahead_tile++;
    }
    const uint32_t shift = ahead_slot * stride;
    if (src0) asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(at0 + shift), "l"(src0 + ahead_chunk * 64), "l"(policy) : "memory");
    if (src1) asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(at1 + shift), "l"(src1 + ahead_chunk * 64), "l"(policy) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    ahead_chunk++;
    if (++ahead_slot == kDepth) ahead_slot = 0;
  };
  if (chunks)
    for (int i = 0; i < kDepth; i++) copy_next();

  // The warp's own share of the operand. Where there are several rows, BF16 comes by bulk copies to where its operand will be, a row a copy: each
  // takes the SM some 40 ns whatever its size.
  const uint32_t units = chunks * ks / 8, k0 = chunk0 * ks, most_units = (all + W - 1) / W * ks / 8;
  const uint32_t head0 = k0 / p.dim, heads = units ? (k0 + units * 8 - 1) / p.dim - head0 + 1 : 0;
  const bool bulk = p.squares && p.r > 1 && p.r <= 8 && p.r * ((most_units * 8 - 1) / p.dim + 2) <= 64 && most_units <= 96;  // the same in all warps
  const uint32_t bars = shared_at(room);
  if (bulk) {
    if (threadIdx.x == 0) {
      for (uint32_t r = 0; r < p.r; r++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bars + 8 * r) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
  }

  // In the epilogue a thread is one row and weight row of a tile. Row scales are weights and far away: asked for two tiles ahead.
  auto scale_of = [&](uint32_t i) -> float {
    if constexpr (!F8) return 1.0f;
    uint32_t n = begin + i * tile + threadIdx.x % 16, j = 0;
    if (threadIdx.x / 16 >= p.r || threadIdx.x % 16 >= tile || n >= end) return 1.0f;
    while (n >= p.part[j].rows) n -= p.part[j++].rows;
    return p.part[j].scale_f32 ? __ldg((const float*)p.part[j].scale + n) : __uint_as_float((uint32_t)__ldg((const unsigned short*)p.part[j].scale + n) << 16);
  };
  float scales[2] = {scale_of(0), scale_of(1)};
  const uint32_t share = (pieces(p.shift) + gridDim.x - 1) / gridDim.x, last = min(pieces(p.shift), (blockIdx.x + 1) * share);
  uint32_t piece = blockIdx.x * share + threadIdx.x;
  uint4 forward[3];
  Lane ahead_of = {};
  if (piece < last) ahead_of = p.shift.lanes[piece / (p.shift.c / 8)];

  pdl_wait();
  if (bulk && threadIdx.x == 0)
    for (uint32_t r = 0; r < p.r; r++) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bars + 8 * r), "r"(2 * p.k) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(xs + r * pitch),
                   "l"((const bf16*)p.x + (uint64_t)r * p.x_ld), "r"(2 * p.k), "r"(bars + 8 * r)
                   : "memory");
    }
  float undo[2] = {1.0f, 1.0f};
  auto power_of = [&](uint32_t r, float most) {  // a power of two for a row whose largest magnitude in this lane is most
    const int shift = max(-100, min(100, 141 - (int)(__reduce_max_sync(~0u, __float_as_uint(most)) >> 23)));
    const float back = __uint_as_float((uint32_t)(127 - shift) << 23);
    if (r == 2 * t) undo[0] = back;
    if (r == 2 * t + 1) undo[1] = back;
    return __uint_as_float((uint32_t)(127 + shift) << 23);
  };
  auto put = [&](uint32_t r, uint32_t u, const float* v, float scale) {
    const uint32_t to = r * pitch + k0 * 2 + u * 16;
    if (F8) {
      shared_store(xs + to, make_uint4(two_f16(v[0] * scale, v[1] * scale), two_f16(v[2] * scale, v[3] * scale), two_f16(v[4] * scale, v[5] * scale),
                                       two_f16(v[6] * scale, v[7] * scale)));
      return;
    }
    const uint4 h = make_uint4(two_bf16(v[0], v[1]), two_bf16(v[2], v[3]), two_bf16(v[4], v[5]), two_bf16(v[6], v[7]));
    shared_store(xs + to, h);
    shared_store(rest + to, make_uint4(two_bf16(v[0] - lo(h.x), v[1] - hi(h.x)), two_bf16(v[2] - lo(h.y), v[3] - hi(h.y)),
                                       two_bf16(v[4] - lo(h.z), v[5] - hi(h.z)), two_bf16(v[6] - lo(h.w), v[7] - hi(h.w))));
  };
  auto factor_of = [&](float4 s) { return 1.0f / sqrtf((s.x + s.y + s.z + s.w) / p.dim + p.eps); };
  auto times = [&](uint4 q, float factor, float* v, float most) {
    const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[2 * i] = __fmul_rn(lo(w[i]), factor), v[2 * i + 1] = __fmul_rn(hi(w[i]), factor);
      most = fmaxf(most, fmaxf(fabsf(v[2 * i]), fabsf(v[2 * i + 1])));
    }
    return most;
  };
  if (bulk) {
    if (piece < last) ask(p.shift, ahead_of, piece, forward);
    float factor[2];  // of rows and heads in order, one a lane
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t q = lane + 32 * i;
      factor[i] = q < p.r * heads ? factor_of(__ldcg((const float4*)p.squares + (uint64_t)(q / heads) * (p.k / p.dim) + head0 + q % heads)) : 0.0f;
    }
    for (uint32_t r = 0; r < p.r; r++) {
      asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @p bra D; bra L; D: }" ::"r"(bars + 8 * r) : "memory");
      float v[3][8], most = 0.0f, scale = 1.0f;
#pragma unroll
      for (int j = 0; j < 3; j++) {
        const uint32_t u = lane + 32 * j, q = r * heads + (units ? (k0 + min(u, units - 1) * 8) / p.dim - head0 : 0);
        const float f0 = __shfl_sync(~0u, factor[0], q % 32), f1 = __shfl_sync(~0u, factor[1], q % 32);
        if (u < units) most = times(shared_load(xs + r * pitch + k0 * 2 + u * 16), q < 32 ? f0 : f1, v[j], most);
      }
      if (F8) scale = power_of(r, most);
#pragma unroll
      for (int j = 0; j < 3; j++)
        if (lane + 32 * j < units) put(r, lane + 32 * j, v[j], scale);
    }
  } else if (p.squares && p.r == 1 && units <= 96) {
    uint4 next[3];  // three units a lane
    float4 squares[3];
#pragma unroll
    for (int j = 0; j < 3; j++)
      if (lane + 32 * j < units) {
        const uint32_t k = k0 + (lane + 32 * j) * 8;
        next[j] = __ldcg((const uint4*)((const bf16*)p.x + k));
        squares[j] = __ldcg((const float4*)p.squares + k / p.dim);
      }
    if (piece < last) ask(p.shift, ahead_of, piece, forward);
    float v[3][8], most = 0.0f, scale = 1.0f;
#pragma unroll
    for (int j = 0; j < 3; j++)
      if (lane + 32 * j < units) most = times(next[j], factor_of(squares[j]), v[j], most);
    if (F8) scale = power_of(0, most);
#pragma unroll
    for (int j = 0; j < 3; j++)
      if (lane + 32 * j < units) put(0, lane + 32 * j, v[j], scale);
  } else {
    if (piece < last) ask(p.shift, ahead_of, piece, forward);
    for (uint32_t r = 0; r < p.r; r++) {
      auto get = [&](uint32_t u, float* v) {
        const uint32_t k = k0 + u * 8;
        float factor = 1.0f;
        if (p.squares) factor = factor_of(__ldcg((const float4*)p.squares + (uint64_t)r * (p.k / p.dim) + k / p.dim));
        operand8(p, r, k, factor, v);
      };
      float most = 0.0f, scale = 1.0f, v[8];
      if (F8) {
#pragma unroll 3
        for (uint32_t u = lane; u < units; u += 32) {
          get(u, v);
#pragma unroll
          for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
        }
        scale = power_of(r, most);
      }
#pragma unroll 3
      for (uint32_t u = lane; u < units; u += 32) {
        get(u, v);
        put(r, u, v, scale);
      }
    }
  }
  for (; piece < last; piece += kProject) {
    if (piece >= blockIdx.x * share + kProject) {
      ahead_of = p.shift.lanes[piece / (p.shift.c / 8)];
      ask(p.shift, ahead_of, piece, forward);
    }
    bring(p.shift, p.shift.lanes[piece / (p.shift.c / 8)], piece, forward);
  }
  __syncwarp();
  pdl_trigger();

  const bool live = g < p.r;
  uint32_t slot = 0;
  for (uint32_t i = 0; i < tiles; i++) {
    float acc[4][4] = {};  // independent sums: tensor instructions that wait for each other are slow
    uint32_t at_x = g * pitch + k0 * 2 + t * ks / 2;
#pragma unroll 4
    for (uint32_t c = 0; c < chunks; c++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 1) : "memory");
      const uint4 u = shared_load(at0 + slot * stride), v = shared_load(at1 + slot * stride);
      uint4 x0 = make_uint4(0, 0, 0, 0), x1 = x0;
      if (live) x0 = shared_load(xs + at_x), x1 = shared_load(F8 ? xs + at_x + 16 : rest + at_x);
      copy_next();
      if (F8) {
        uint2 a = e4m3_to_f16(u.x), b = e4m3_to_f16(v.x);
        multiply_f16(acc[0], a.x, b.x, a.y, b.y, x0.x, x0.y);
        a = e4m3_to_f16(u.y), b = e4m3_to_f16(v.y);
        multiply_f16(acc[1], a.x, b.x, a.y, b.y, x0.z, x0.w);
        a = e4m3_to_f16(u.z), b = e4m3_to_f16(v.z);
        multiply_f16(acc[2], a.x, b.x, a.y, b.y, x1.x, x1.y);
        a = e4m3_to_f16(u.w), b = e4m3_to_f16(v.w);
        multiply_f16(acc[3], a.x, b.x, a.y, b.y, x1.z, x1.w);
      } else {
        multiply_bf16(acc[0], u.x, v.x, u.y, v.y, x0.x, x0.y);
        multiply_bf16(acc[1], u.z, v.z, u.w, v.w, x0.z, x0.w);
        multiply_bf16(acc[2], u.x, v.x, u.y, v.y, x1.x, x1.y);
        multiply_bf16(acc[3], u.z, v.z, u.w, v.w, x1.z, x1.w);
      }
      at_x += ks * 2;
      if (++slot == kDepth) slot = 0;
    }
    float* mine = sums + (i % 2 * W + warp) * p.r * 16;
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (2 * t + j < p.r) {
        mine[(2 * t + j) * 16 + g] = ((acc[0][j] + acc[1][j]) + (acc[2][j] + acc[3][j])) * undo[j];
        mine[(2 * t + j) * 16 + g + 8] = ((acc[0][j + 2] + acc[1][j + 2]) + (acc[2][j + 2] + acc[3][j + 2])) * undo[j];
      }
    __syncthreads();  // the other buffer's readers have passed here too
    const uint32_t r = threadIdx.x / 16, first = begin + i * tile;
    uint32_t n = first + threadIdx.x % 16;
    if (r < p.r && threadIdx.x % 16 < tile && n < end) {
      float v = 0.0f;
#pragma unroll
      for (int w = 0; w < W; w++) v += sums[(i % 2 * W + w) * p.r * 16 + threadIdx.x];
      uint32_t j = 0;
      while (n >= p.part[j].rows) n -= p.part[j++].rows;
      const ProjectPart& q = p.part[j];
      if (F8) v *= scales[0];
      q.out[(uint64_t)r * q.out_ld + n] = to_bf16(v);
    }
    scales[0] = scales[1], scales[1] = scale_of(i + 2);
  }
}

NINFER_KERNEL(project_bf16, ProjectParams, kProject, 1) { project<false, 16>(p); }
NINFER_KERNEL(project_e4m3, ProjectParams, kProject, 1) { project<true, 16>(p); }
NINFER_KERNEL(project_bf16_deep, ProjectParams, kProject, 1) { project<false, 24>(p); }
NINFER_KERNEL(project_e4m3_deep, ProjectParams, kProject, 1) { project<true, 24>(p); }

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// As cut, of numbers whose product is one too: 64-bit divisions take a block longer than its copies.
DEVICE uint32_t part(uint32_t n, uint32_t m, uint32_t i) { return n * i / m; }

// kDepth: groups of 64 bytes of each row that a warp has on their way, through copies private to a lane; 0 for all of the block's weights at
// once by bulk copies, where a block has at most kPass rows. C: blocks of a cluster.
template <bool F8, int kDepth, uint32_t C>
DEVICE void project_wide(const ProjectParams& p) {
  constexpr bool kWhole = kDepth == 0;
  // SH: shares of a block; kPass: rows at a time; kTasks: rows and shares of the operand that a warp makes, where C = 1 takes one row
  constexpr uint32_t W = kProject / 32, SH = W / C, kPass = 24, kTasks = C == 1 ? 1 : SH;
  constexpr uint32_t ks = F8 ? 64 : 32;  // k positions of a chunk: 64 bytes of a row
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t rank = 0;
  if (C > 1) {
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    cluster_arrive();  // a block's shared memory is written once it has begun
  }
  const uint32_t all = p.k / ks, most_chunks = (all + W - 1) / W * SH, row_bytes = F8 ? p.k : 2 * p.k;
  const uint32_t pitch = most_chunks * ks * 2 + (F8 ? 16 : 64);  // of an operand's row: no bank twice
  const uint32_t piece_share = (pieces(p.shift) + gridDim.x - 1) / gridDim.x, last = min(pieces(p.shift), (blockIdx.x + 1) * piece_share);
  uint32_t piece = blockIdx.x * piece_share + threadIdx.x;
  // shared memory: powers of two [r][share], a barrier, factors [r][head], sums [share][r][32], pieces of windows [thread][48], operand [r][pitch] and
  // again what it leaves, weights [block's rows][row_pitch] or copies [warp][kDepth][row][64]
  float *undos = (float*)room, *factors = undos + 80, *sums = (float*)(room + 320 + 1024);
  const uint32_t bar = shared_at(room) + 256, windows = shared_at(sums) + W * p.r * 128, xs = windows + min(piece_share, kProject) * 48, rest = xs + p.r * pitch;
  const uint32_t weights = (xs + (F8 ? 1 : 2) * p.r * pitch + 127) & ~127u, row_pitch = (most_chunks * 64 + 127) / 128 * 128 + 64;
  uint32_t total = 0;
  for (uint32_t i = 0; i < p.parts; i++) total += p.part[i].rows;
  const uint32_t set = warp / SH, mine = warp % SH, share = rank * SH + mine;  // this warp's: rows of block set of the cluster, k
  const uint32_t home = blockIdx.x - rank, begin = part(total, gridDim.x, home + set), end = part(total, gridDim.x, home + set + 1);
  const uint32_t most = (total + gridDim.x - 1) / gridDim.x, passes = (most + kPass - 1) / kPass, tile = (most + passes - 1) / passes;
  const uint32_t first_chunk = part(all, W, rank * SH), last_chunk = part(all, W, rank * SH + SH), chunk0 = part(all, W, share), chunks = part(all, W, share + 1) - chunk0;
  auto row_at = [&](uint32_t n, uint32_t chunk) -> const uint8_t* {
    uint32_t i = 0;
    while (n >= p.part[i].rows) n -= p.part[i++].rows;
    return (const uint8_t*)p.part[i].w + (uint64_t)n * row_bytes + chunk * 64;
  };
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

  // In the epilogue a thread is one row and weight row of a pass. Scales are far away: asked for before everything else, looked at last.
  const uint32_t own = part(total, gridDim.x, blockIdx.x), stop = part(total, gridDim.x, blockIdx.x + 1), of_row = threadIdx.x / 32, of_place = threadIdx.x % 32;
  auto ask_scale = [&](uint32_t i) -> uint32_t {
    uint32_t n = own + i * tile + of_place, j = 0, v = 0;
    if (!F8 || of_row >= p.r || of_place >= tile || n >= stop) return 0;
    while (n >= p.part[j].rows) n -= p.part[j++].rows;
    if (p.part[j].scale_f32)
      asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"((const float*)p.part[j].scale + n));
    else
      asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(v) : "l"((const bf16*)p.part[j].scale + n));
    return v;
  };
  uint32_t scale_now = ask_scale(0);

  // Copies run ahead of the work by kDepth chunks, across passes.
  const uint32_t stride = tile * 64, ring = weights + warp * (kDepth * stride) + g * 64 + t * 16;
  uint32_t ahead_pass = 0, ahead_chunk = chunks, ahead_slot = 0;
  const uint8_t* src[3] = {};
  auto copy_next = [&]() {
    if (ahead_chunk == chunks) {
      const uint32_t first = begin + ahead_pass * tile, stop = min(end, first + tile);
#pragma unroll
      for (int j = 0; j < 3; j++) src[j] = ahead_pass < passes && first + g + 8 * j < stop ? row_at(first + g + 8 * j, chunk0) + t * 16 : nullptr;
      ahead_chunk = 0, ahead_pass++;
    }
    const uint32_t to = ring + ahead_slot * stride;
#pragma unroll
    for (int j = 0; j < 3; j++)
      if (src[j]) asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to + 512 * j), "l"(src[j] + ahead_chunk * 64), "l"(policy) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    ahead_chunk++;
    if (++ahead_slot == kDepth) ahead_slot = 0;
  };
  if constexpr (kWhole) {
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      const uint32_t rows = part(total, gridDim.x, home + C) - part(total, gridDim.x, home);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(rows * (last_chunk - first_chunk) * 64) : "memory");
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < C * tile && last_chunk > first_chunk; i += kProject) {
      const uint32_t n = part(total, gridDim.x, home + i / tile) + i % tile;
      if (n < part(total, gridDim.x, home + i / tile + 1))
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(weights + i * row_pitch),
                     "l"(row_at(n, first_chunk)), "r"((last_chunk - first_chunk) * 64), "r"(bar), "l"(policy)
                     : "memory");
    }
    __syncwarp();
  } else if (chunks) {
#pragma unroll 1
    for (int i = 0; i < kDepth; i++) copy_next();
  }

  const uint32_t wide = p.shift.c / 8;
  Lane of_piece = {};
  if (piece < last) of_piece = p.shift.lanes[piece / wide];
  __syncwarp();

  pdl_wait();
  // The block's shares of the operand, a warp a row and share, eight values a unit and at most three units a lane: asked for all at once.
  uint4 x[kTasks][3];
  auto of_task = [&](int i, uint32_t& r, uint32_t& k0, uint32_t& units) {
    const uint32_t q = warp + W * i, c0 = part(all, W, rank * SH + q % SH);
    r = q / SH, k0 = c0 * ks, units = q < p.r * SH ? (part(all, W, rank * SH + q % SH + 1) - c0) * ks / 8 : 0;
  };
#pragma unroll
  for (int i = 0; i < kTasks; i++) {
    uint32_t r, k0, units;
    of_task(i, r, k0, units);
#pragma unroll
    for (int j = 0; j < 3; j++) {
      x[i][j] = make_uint4(0, 0, 0, 0);
      if (lane + 32 * j < units) x[i][j] = __ldcg((const uint4*)((const bf16*)p.x + (uint64_t)r * p.x_ld + k0) + lane + 32 * j);
    }
  }
  const uint32_t dim = 31 - __clz(p.dim), head0 = first_chunk * ks >> dim, heads = last_chunk > first_chunk ? (last_chunk * ks - 1 >> dim) - head0 + 1 : 0;
  if (p.squares && threadIdx.x < p.r * heads) {
    const float4 s = __ldcg((const float4*)p.squares + (uint64_t)(threadIdx.x / heads) * (p.k >> dim) + head0 + threadIdx.x % heads);
    factors[threadIdx.x] = 1.0f / sqrtf((s.x + s.y + s.z + s.w) / p.dim + p.eps);
  }
  const uint32_t window = windows + threadIdx.x * 48;
  if (shift_of(of_piece))
#pragma unroll
    for (uint32_t j = 0; j < 3; j++)
      if (j < p.shift.depth)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(window + 16 * j), "l"(part_of(p.shift, of_piece, shift_of(of_piece) + j, piece % wide * 8)) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  __syncwarp();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTasks; i++) {
    uint32_t r, k0, units;
    of_task(i, r, k0, units);
    if (warp + W * i >= p.r * SH) break;  // the warp
    const uint32_t to0 = r * pitch + (k0 - first_chunk * ks) * 2;
    float largest = 0.0f, scale = 1.0f, factor[3];
#pragma unroll
    for (int j = 0; j < 3; j++) {
      factor[j] = p.squares && lane + 32 * j < units ? factors[r * heads + (k0 + (lane + 32 * j) * 8 >> dim) - head0] : 1.0f;
      const uint32_t w[4] = {x[i][j].x, x[i][j].y, x[i][j].z, x[i][j].w};
#pragma unroll
      for (int h = 0; h < 4; h++) largest = fmaxf(largest, fmaxf(fabsf(__fmul_rn(lo(w[h]), factor[j])), fabsf(__fmul_rn(hi(w[h]), factor[j]))));
    }
    if (F8) {
      __syncwarp();
      const int shift = max(-100, min(100, 141 - (int)(__reduce_max_sync(~0u, __float_as_uint(largest)) >> 23)));
      if (lane == 0) undos[warp + W * i] = __uint_as_float((uint32_t)(127 - shift) << 23);
      scale = __uint_as_float((uint32_t)(127 + shift) << 23);
      __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < 3; j++)
      if (lane + 32 * j < units) {
        const uint32_t to = to0 + (lane + 32 * j) * 16, w[4] = {x[i][j].x, x[i][j].y, x[i][j].z, x[i][j].w};
        uint32_t a[4], rest_of[4];
#pragma unroll
        for (int h = 0; h < 4; h++) {
          const float v0 = __fmul_rn(lo(w[h]), factor[j]), v1 = __fmul_rn(hi(w[h]), factor[j]);  // no fused operation: the same in all kernels
          if (F8) {
            a[h] = two_f16(v0 * scale, v1 * scale);
          } else {
            a[h] = two_bf16(v0, v1);
            rest_of[h] = two_bf16(v0 - lo(a[h]), v1 - hi(a[h]));
          }
        }
        shared_store(xs + to, make_uint4(a[0], a[1], a[2], a[3]));
        if (!F8) shared_store(rest + to, make_uint4(rest_of[0], rest_of[1], rest_of[2], rest_of[3]));
      }
  }
  __syncwarp();  // barriers of whole warps from here on
  __syncthreads();
  pdl_trigger();

  const bool live = g < p.r;
  float undo[2] = {1.0f, 1.0f};
  if (F8)
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (2 * t + j < p.r) undo[j] = undos[(2 * t + j) * SH + mine];
  uint32_t to_sums = shared_at(sums) + share * p.r * 128 + g * 4;
  if (C > 1) asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to_sums) : "r"(to_sums), "r"(set));
  __syncwarp();
  if (C > 1) cluster_wait();
  if (kWhole) asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @p bra D; bra L; D: }" ::"r"(bar) : "memory");
  __syncwarp();
  uint32_t slot = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < passes; i++) {
    float acc[4][4] = {}, more[4][4] = {};  // independent sums: tensor instructions that wait for each other are slow
    const uint32_t at = kWhole ? weights + (set * tile + g) * row_pitch + (chunk0 - first_chunk) * 64 + t * 16 : ring, step = kWhole ? row_pitch : 64;
    // Rows of a tile and a half; one beyond the pass is any row.
    const uint32_t at0 = g < tile ? at : at - g * step, at1 = g + 8 < tile ? at + 8 * step : at0, at2 = g + 16 < tile ? at + 16 * step : at0;
    uint32_t at_x = (live ? g : 0) * pitch + (chunk0 - first_chunk) * ks * 2 + t * ks / 2;
#pragma unroll 2
    for (uint32_t c = 0; c < chunks; c++) {
      if (!kWhole) asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 1) : "memory");  // the windows are a group too
      const uint32_t from = kWhole ? c * 64 : slot * stride;
      uint4 x0 = shared_load(xs + at_x), x1 = shared_load(F8 ? xs + at_x + 16 : rest + at_x);
      if (!live) x0 = x1 = make_uint4(0, 0, 0, 0);
      auto multiply = [&](float (*acc)[4], uint4 u, uint4 v, bool whole) {
        if (F8) {
          uint2 a = e4m3_to_f16(u.x), b = whole ? e4m3_to_f16(v.x) : make_uint2(0, 0);
          multiply_f16(acc[0], a.x, b.x, a.y, b.y, x0.x, x0.y);
          a = e4m3_to_f16(u.y), b = whole ? e4m3_to_f16(v.y) : make_uint2(0, 0);
          multiply_f16(acc[1], a.x, b.x, a.y, b.y, x0.z, x0.w);
          a = e4m3_to_f16(u.z), b = whole ? e4m3_to_f16(v.z) : make_uint2(0, 0);
          multiply_f16(acc[2], a.x, b.x, a.y, b.y, x1.x, x1.y);
          a = e4m3_to_f16(u.w), b = whole ? e4m3_to_f16(v.w) : make_uint2(0, 0);
          multiply_f16(acc[3], a.x, b.x, a.y, b.y, x1.z, x1.w);
        } else {
          multiply_bf16(acc[0], u.x, v.x, u.y, v.y, x0.x, x0.y);
          multiply_bf16(acc[1], u.z, v.z, u.w, v.w, x0.z, x0.w);
          multiply_bf16(acc[2], u.x, v.x, u.y, v.y, x1.x, x1.y);
          multiply_bf16(acc[3], u.z, v.z, u.w, v.w, x1.z, x1.w);
        }
      };
      multiply(acc, shared_load(at0 + from), shared_load(at1 + from), true);
      if (tile > 16) multiply(more, shared_load(at2 + from), make_uint4(0, 0, 0, 0), false);
      if (!kWhole) {
        copy_next();
        if (++slot == kDepth) slot = 0;
      }
      at_x += ks * 2;
    }
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (2 * t + j < p.r)
#pragma unroll
        for (uint32_t h = 0; h < 3; h++) {
          const float* a = h < 2 ? acc[0] + j + h * 2 : more[0] + j;
          const float v = ((a[0] + a[4]) + (a[8] + a[12])) * undo[j];
          const uint32_t to = to_sums + (2 * t + j) * 128 + 32 * h;
          if (g + 8 * h >= tile) continue;
          if (C > 1)
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
          else
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
        }
    auto meet = [&]() {
      __syncwarp();
      if (C > 1) {
        cluster_arrive();
        cluster_wait();
      } else {
        __syncthreads();
      }
    };
    meet();
    uint32_t n = own + i * tile + of_place;
    if (of_row < p.r && of_place < tile && n < stop) {
      float v = 0.0f;
#pragma unroll
      for (int w = 0; w < W; w++) v += sums[w * p.r * 32 + threadIdx.x];
      uint32_t j = 0;
      while (n >= p.part[j].rows) n -= p.part[j++].rows;
      const ProjectPart& q = p.part[j];
      if (F8) v *= __uint_as_float(q.scale_f32 ? scale_now : scale_now << 16);
      q.out[(uint64_t)of_row * q.out_ld + n] = to_bf16(v);
    }
    if (i + 1 == passes) break;
    scale_now = ask_scale(i + 1);
    meet();
  }
  // Windows are brought forward where nobody waits for it.
  asm volatile("cp.async.wait_all;" ::: "memory");
  if (piece < last) {
    uint4 v[3];
#pragma unroll
    for (uint32_t j = 0; j < 3; j++) v[j] = shared_load(window + 16 * j);
    bring(p.shift, of_piece, piece, v);
  }
#pragma unroll 1
  for (piece += kProject; piece < last; piece += kProject) {
    const Lane l = p.shift.lanes[piece / wide];
    uint4 v[3];
    ask(p.shift, l, piece, v);
    bring(p.shift, l, piece, v);
  }
}

// Here the last argument is a kernel's registers: 96 leave room for two blocks of the delta rule.
#undef NINFER_KERNEL
#define NINFER_KERNEL(name, Params, threads, registers) extern "C" __global__ void __maxnreg__(registers) name(const __grid_constant__ Params p)
#define CLUSTER(name, n) extern "C" __global__ void __cluster_dims__(n, 1, 1) name(const __grid_constant__ ProjectParams p);
CLUSTER(project_whole_rows, 2)
CLUSTER(project_bf16_rows, 8)

NINFER_KERNEL(project_whole, ProjectParams, kProject, 96) { project_wide<true, 0, 1>(p); }
NINFER_KERNEL(project_whole_rows, ProjectParams, kProject, 96) { project_wide<true, 0, 2>(p); }
NINFER_KERNEL(project_bf16_rows, ProjectParams, kProject, 112) { project_wide<false, 6, 8>(p); }
