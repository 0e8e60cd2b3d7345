// Streaming products with operands of more than BF16's precision: out[r][n] = sum_k W[n][k] x[r][k], r = 1..8.
//
//   project_bf16   W in BF16; x becomes a BF16 part and what that leaves, also in BF16: two tensor instructions a chunk.
//   project_e4m3   W in E4M3 with a scale a row; x becomes FP16, each warp's share scaled by a power of two.
//   Grid: any; one block an SM.
//
// x is FP32, or BF16 times a factor that belongs to a head: 1 over the root of the mean of its squares, which four blocks of the delta
// rule have summed. Each of eight warps owns a run of k in all of the block's rows and streams it through copies that are private to a
// lane, in flight before the dependency wait; sums meet in warp order once a tile of 16 rows. On the side the window of the convolution that
// came before is brought forward, eight channels a thread: the delta rule's blocks share its channels, so none of them may write it.
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
  if (p.squares) {
    const uint4 q = __ldcg((const uint4*)((const bf16*)p.x + (uint64_t)r * p.x_ld + k));
    v[0] = lo(q.x), v[1] = hi(q.x), v[2] = lo(q.y), v[3] = hi(q.y), v[4] = lo(q.z), v[5] = hi(q.z), v[6] = lo(q.w), v[7] = hi(q.w);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= factor;
  } else {
    const float4* q = (const float4*)((const float*)p.x + (uint64_t)r * p.x_ld + k);
    const float4 a = __ldcg(q), b = __ldcg(q + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
}

// Eight channels of a lane's window: asked for as soon as the kernel before this one, which reads the window, is over, and written when they
// have come. Window, records and new rows are one sequence.
struct Forward {
  uint4 v[3];
  uint32_t shift;
};
DEVICE uint32_t pieces(const Shift& s) { return s.count * (s.c / 8); }
DEVICE uint4 part_of(const Shift& s, const Lane& lane, uint32_t at, uint32_t c) {
  return __ldcg((const uint4*)((at < s.depth               ? s.window + ((uint64_t)lane.slot * s.depth + at) * s.c
                                : at < s.depth + lane.fold ? s.records + ((uint64_t)lane.slot * s.verify + at - s.depth) * s.c
                                                           : s.x + (uint64_t)(lane.first + at - s.depth - lane.fold) * s.c) + c));
}
DEVICE void ask(const Shift& s, const Lane& lane, uint32_t i, Forward& f) {
  f.shift = lane.fold + (lane.record ? 0 : lane.rows);
#pragma unroll
  for (uint32_t j = 0; j < 3; j++)
    if (f.shift && j < s.depth) f.v[j] = part_of(s, lane, f.shift + j, i % (s.c / 8) * 8);
}
DEVICE void bring(const Shift& s, uint32_t i, const Forward& f) {
  const Lane lane = s.lanes[i / (s.c / 8)];
  const uint32_t c = i % (s.c / 8) * 8;
#pragma unroll
  for (uint32_t j = 0; j < 3; j++)
    if (f.shift && j < s.depth) *(uint4*)(s.window + ((uint64_t)lane.slot * s.depth + j) * s.c + c) = f.v[j];
  for (uint32_t r = 0; r < lane.rows && lane.record; r += 4) {  // four at a time
    uint4 v[4];
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
      if (r + j < lane.rows) v[j] = __ldcg((const uint4*)(s.x + (uint64_t)(lane.first + r + j) * s.c + c));
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
      if (r + j < lane.rows) *(uint4*)(s.records + ((uint64_t)lane.slot * s.verify + r + j) * s.c + c) = v[j];
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
  Forward forward;
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
      v[2 * i] = lo(w[i]) * factor, v[2 * i + 1] = hi(w[i]) * factor;
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
    bring(p.shift, piece, forward);
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
