// Streaming products with operands of more than BF16's precision: out[r][n] = sum_k W[n][k] x[r][k], r = 1..8.
//
//   project_bf16   W in BF16. x in BF16 stays as it is, since products of both are exact, and a head's factor multiplies the sum of its k; FP32, or factors of
//                  uneven heads, becomes a BF16 part and what that leaves, also in BF16: two tensor instructions a chunk.
//   project_e4m3   W in E4M3 with a scale a row; x becomes FP16, each share of k scaled by a power of two.
//   project_whole  the same where a block's weights fit into shared memory: all of them come by bulk copies, behind which no load of another
//                  block on the SM has to stand. At most four rows, x in BF16.
//   ..._rows       several rows, in clusters. x in BF16. project_whole_lanes: the same with more registers.
//   ..._deep       more on its way. x in BF16.
//   Grid: any, a multiple of the cluster; one block an SM.
//
// x is FP32, BF16, or BF16 times a factor that belongs to a head: 1 over the root of the mean of its squares, which four blocks of the delta
// rule have summed. K is cut into shares, each a warp's, whose sums meet in an order of their own. In clusters a block has some of the shares for the
// rows of all its blocks, so that it reads only its part of the operand, and adds up the rows it would have had alone: all kernels of a format make the
// same sums, whatever the number of rows and wherever a weight row is. On the side the window of the convolution that came before is brought
// forward: the delta rule's blocks share its channels, so none of them may write it.
#include "common.cuh"

extern __shared__ __align__(128) uint8_t room[];

static constexpr int kWarps = 12;  // which share K
static constexpr int kProject = 32 * kWarps;

DEVICE uint32_t shared_at(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEVICE uint4 shared_load(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
// As it was where there is nothing to load.
DEVICE void shared_load_if(bool live, uint4& v, uint32_t a) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];}" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "r"(a), "r"((uint32_t)live));
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
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE uint32_t part(uint32_t n, uint32_t m, uint32_t i) { return n * i / m; }  // the first of n things that the i-th of m has

// Eight operand values from k on, times a factor.
DEVICE void operand8(const ProjectParams& p, uint32_t r, uint32_t k, float factor, float* v) {
  if (!p.x_f32) {
    const uint4 q = __ldcg((const uint4*)((const bf16*)p.x + (uint64_t)r * p.x_ld + k));
    v[0] = lo(q.x), v[1] = hi(q.x), v[2] = lo(q.y), v[3] = hi(q.y), v[4] = lo(q.z), v[5] = hi(q.z), v[6] = lo(q.w), v[7] = hi(q.w);
  } else {
    const float4* q = (const float4*)((const float*)p.x + (uint64_t)r * p.x_ld + k);
    const float4 a = __ldcg(q), b = __ldcg(q + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = __fmul_rn(v[i], factor);
}

// Eight channels of a lane's window are a piece, which a thread brings forward. Window, records and new rows are one sequence. In shared memory a
// piece has three rows of the window, then how many there are and how many new rows are to be recorded, image, first new row and channel, then so many
// of the new rows.
static constexpr uint32_t kPieces = 96;  // of a block at a time
DEVICE uint32_t pieces(const Shift& s) { return s.count * (s.c / 8); }
DEVICE uint32_t fresh_of(const ProjectParams& p) { return p.r > p.shift.count ? p.r - p.shift.count + 1 : 0; }  // a lane's rows at most, where not each has one
// Before the wait: where the rows are.
DEVICE void find(const Shift& s, uint32_t piece, uint32_t at) {
  const Lane lane = s.lanes[piece / (s.c / 8)];
  const uint32_t c = piece % (s.c / 8) * 8, shift = lane.fold + (lane.record ? 0 : lane.rows), depth = shift ? s.depth : 0;
#pragma unroll
  for (uint32_t j = 0; j < 3; j++) {
    const uint32_t i = shift + j;
    const bf16* from = i < s.depth               ? s.window + ((uint64_t)lane.slot * s.depth + i) * s.c
                       : i < s.depth + lane.fold ? s.records + ((uint64_t)lane.slot * s.verify + i - s.depth) * s.c
                                                 : s.x + (uint64_t)(lane.first + i - s.depth - lane.fold) * s.c;
    if (j < depth) asm volatile("st.shared.u64 [%0], %1;" ::"r"(at + 16 * j), "l"(from + c) : "memory");
  }
  shared_store(at + 48, make_uint4(depth | (lane.record ? lane.rows << 8 : 0), lane.slot, lane.first, c));
}
// After it: asks for them.
DEVICE void ask(const Shift& s, uint32_t at, uint32_t fresh) {
  const uint4 l = shared_load(at + 48);
#pragma unroll
  for (uint32_t j = 0; j < 3; j++)
    if (j < l.x % 256) asm volatile("{.reg .u64 a; ld.shared.u64 a, [%0]; cp.async.cg.shared.global [%0], [a], 16;}" ::"r"(at + 16 * j) : "memory");
  const bf16* x = s.x + (uint64_t)l.z * s.c + l.w;
#pragma unroll 1
  for (uint32_t r = 0; r < min(l.x / 256, fresh); r++, x += s.c) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + 64 + 16 * r), "l"(x) : "memory");
}
// When they have come: writes them.
DEVICE void bring(const Shift& s, uint32_t at, uint32_t fresh) {
  const uint4 l = shared_load(at + 48);
#pragma unroll
  for (uint32_t j = 0; j < 3; j++)
    if (j < l.x % 256) *(uint4*)(s.window + ((uint64_t)l.y * s.depth + j) * s.c + l.w) = shared_load(at + 16 * j);
  bf16* to = s.records + (uint64_t)l.y * s.verify * s.c + l.w;
#pragma unroll 1
  for (uint32_t r = 0; r < l.x / 256; r++, to += s.c)
    *(uint4*)to = r < fresh ? shared_load(at + 64 + 16 * r) : __ldcg((const uint4*)(s.x + (uint64_t)(l.z + r) * s.c + l.w));
}

// What a block brings forward: one of its warps, some pieces at a time.
struct Windows {
  uint32_t piece = 0, last = 0, fresh = 0, bytes = 0, at = 0;  // bytes of a piece, the lane's first place
  Windows() = default;
  DEVICE Windows(const ProjectParams& p, bool mine, uint32_t room_at, uint32_t lane) {
    const uint32_t share = (pieces(p.shift) + gridDim.x - 1) / gridDim.x;
    piece = blockIdx.x * share + lane, last = mine ? min(pieces(p.shift), (blockIdx.x + 1) * share) : 0;
    fresh = fresh_of(p), bytes = 64 + 16 * fresh, at = room_at + lane * bytes;
  }
  template <class F>
  DEVICE void each(F&& f) const {
#pragma unroll 1
    for (uint32_t i = 0; i < kPieces && piece + i < last; i += 32) f(piece + i, at + i * bytes);
  }
  DEVICE void find_all(const Shift& s) const {
    each([&](uint32_t i, uint32_t to) { find(s, i, to); });
  }
  DEVICE void ask_all(const Shift& s) const {
    each([&](uint32_t, uint32_t to) { ask(s, to, fresh); });
  }
  DEVICE void finish(const Shift& s) {
#pragma unroll 1
    while (piece < last) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      each([&](uint32_t, uint32_t to) { bring(s, to, fresh); });
      piece += kPieces;
      each([&](uint32_t i, uint32_t to) { find(s, i, to), ask(s, to, fresh); });
    }
  }
};

// At most 64 registers, in 16 bits 88, which leave room for three or two blocks of the delta rule; 80 of several lanes, beside whose delta rule there is
// room for nothing.
//
// Warps share K. The last one asks for weights that come by bulk copies, the one before it brings windows forward. What a block does before its wait is
// short, as instructions come from far: it may begin late.
//
// kDepth: groups of 64 bytes of each row that a warp has on their way, through copies private to a lane; 0 for all of the block's weights at
// once by bulk copies, where a block has at most kPass rows. C: blocks of a cluster.
template <bool F8, int kDepth, uint32_t C>
DEVICE void project(const ProjectParams& p) {
  // SH: shares of a block; kPass: rows at a time; kHeld: units of a row's share that a lane makes at most
  constexpr bool kWhole = kDepth == 0;
  constexpr uint32_t W = kWarps, SH = W / C, kPass = 24, kHeld = 2;
  constexpr uint32_t ks = F8 ? 64 : 32;  // k positions of a chunk: 64 bytes of a row
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t rank = 0;
  if (C > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  // shared memory: powers of two [r][share], barriers, sums [share][r][32] (of two passes in turn), operand [r][pitch] and again what it leaves, weights
  // [block's rows][row_pitch] or copies [warp][kDepth][row][64], pieces of windows
  const uint32_t all = p.k / ks, most_chunks = (all + W - 1) / W * SH, row_bytes = F8 ? p.k : 2 * p.k;
  const uint32_t pitch = most_chunks * ks * 2 + (F8 ? 16 : 64);  // of an operand's row: no bank twice
  const uint32_t few = p.shares & 0xffff, over = p.shares >> 16;  // weight rows of a block, and how many blocks have one more: the first
  auto first_of = [&](uint32_t block) { return block * few + min(block, over); };
  const uint32_t most = few + min(over, 1), passes = kWhole ? 1 : (most + kPass - 1) / kPass, tile = kWhole ? most : (most + passes - 1) / passes;
  const uint32_t bar = shared_at(room) + 512, met = bar + 8;  // of the weights; of sums that come from all blocks of a cluster, for two passes in turn
  float *undos = (float*)room, *sums = (float*)(room + 640);
  const uint32_t xs = shared_at(sums) + min(passes, 2) * W * p.r * 128, rest = p.r * pitch;
  const uint32_t weights = (xs + (F8 ? 1 : 2) * rest + 127) & ~127u, row_pitch = (most_chunks * 64 + 127) / 128 * 128 + 64;
  const uint32_t home = blockIdx.x - rank, first_chunk = part(all, W, rank * SH), last_chunk = part(all, W, rank * SH + SH);
  auto row_at = [&](uint32_t n, uint32_t chunk) -> const uint8_t* {
    uint32_t i = 0;
#pragma unroll 1
    while (n >= p.part[i].rows) n -= p.part[i++].rows;
    return (const uint8_t*)p.part[i].w + (uint64_t)n * row_bytes + chunk * 64;
  };
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const bool aside = warp == W - 1;
  auto expect = [&](uint32_t at, uint32_t bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory"); };
  const uint32_t sum_bytes = W * p.r * tile * 4;
  if ((kWhole || C > 1) && aside) {
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < (C > 1 ? 3 : 1); i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar + 8 * i) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      if (kWhole) expect(bar, (first_of(home + C) - first_of(home)) * (last_chunk - first_chunk) * 64);
    }
    __syncwarp();
    if (kWhole) {
      if (C == 1) asm volatile("bar.arrive 1, %0;" ::"n"(32 * W) : "memory");
#pragma unroll 1
      for (uint32_t i = lane; i < C * tile && last_chunk > first_chunk; i += 32) {
        const uint32_t of = i < tile ? 0 : 1, n = first_of(home + of) + i - of * tile;  // of at most two blocks
        if (n < first_of(home + of + 1))
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(weights + i * row_pitch),
                       "l"(row_at(n, first_chunk)), "r"((last_chunk - first_chunk) * 64), "r"(bar), "l"(policy)
                       : "memory");
      }
      __syncwarp();
    }
    if (C > 1 && lane == 0) {
      expect(met, sum_bytes);
      if (passes > 1) expect(met + 8, sum_bytes);
    }
    __syncwarp();
  }
  if (C > 1) cluster_arrive();  // a block's shared memory is written once it has begun
  const uint32_t set = warp / SH, mine = warp % SH, share = rank * SH + mine;  // this warp's: rows of block set of the cluster, k
  const uint32_t begin = first_of(home + set), end = first_of(home + set + 1);
  const uint32_t chunk0 = part(all, W, share), chunks = part(all, W, share + 1) - chunk0;

  // In the epilogue a thread is one row and weight row of a pass. Scales are far away: asked for now, looked at last.
  const uint32_t own = first_of(blockIdx.x), stop = first_of(blockIdx.x + 1), of_row = threadIdx.x / 32, of_place = threadIdx.x % 32;
  uint32_t scale_high = 0;
  auto ask_scale = [&](uint32_t i) -> uint32_t {
    if (!F8) return 0;
    // Every thread asks for something: what has to be merged with another value would be waited for here.
    uint32_t n = min(own + i * tile + of_place, max(stop, 1u) - 1), j = 0, low;
#pragma unroll 1
    while (j + 1 < p.parts && n >= p.part[j].rows) n -= p.part[j++].rows;
    const uint32_t f32 = p.part[j].scale_f32;
    const uint8_t* at = (const uint8_t*)p.part[j].scale + ((uint64_t)n << (f32 ? 2 : 1));
    asm volatile("ld.global.nc.u16 %0, [%2]; ld.global.nc.u16 %1, [%3];" : "=r"(low), "=r"(scale_high) : "l"(at), "l"(at + (f32 ? 2 : 0)));
    return low;
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
  if (!kWhole && chunks) {
#pragma unroll 1
    for (int i = 0; i < kDepth; i++) copy_next();
  }
  Windows windows(p, warp == W - 2, weights + (kWhole ? C * tile * row_pitch : W * kDepth * tile * 64), lane);
  windows.find_all(p.shift);

  // The operand of a warp's share of k, of every C-th row: a lane makes what it fetches, eight values a unit.
  const uint32_t units = chunks * ks / 8, k0 = chunk0 * ks, mine_x = xs + (chunk0 - first_chunk) * ks * 2 + lane * 16;
  const uint32_t dim = 31 - __clz(p.dim), head0 = k0 >> dim, heads = units ? (k0 + units * 8 - 1 >> dim) - head0 + 1 : 0;  // where p.dim is a power of two
  const uint32_t of_lane = heads > 1 ? 32 - __clz(heads - 1) : 0;  // lane: of head lane % 2^of_lane of the warp's row lane >> of_lane
  const bf16* x_from = (const bf16*)p.x + k0 + lane * 8;
  auto factor_of = [&](uint32_t r, uint32_t head, uint32_t heads, float mean) {
    const float4 s = __ldcg((const float4*)p.squares + r * heads + head);
    return rsqrtf(__fmaf_rn((s.x + s.y) + (s.z + s.w), mean, p.eps));
  };
  float undo[2] = {1.0f, 1.0f};
  auto power_of = [&](uint32_t r, float most) {  // a power of two for a row whose largest magnitude in this lane is most
    const int shift = max(-100, min(100, 141 - (int)(__reduce_max_sync(~0u, __float_as_uint(most)) >> 23)));
    const float back = __uint_as_float((uint32_t)(127 - shift) << 23);
    if (C > 1 && lane == 0) undos[r * SH + mine] = back;
    if (r == 2 * t) undo[0] = back;
    if (r == 2 * t + 1) undo[1] = back;
    return __uint_as_float((uint32_t)(127 + shift) << 23);
  };
  auto put = [&](uint32_t to, const float* v) {
    uint32_t a[4], left[4];
#pragma unroll
    for (int h = 0; h < 4; h++) {
      a[h] = F8 ? two_f16(v[2 * h], v[2 * h + 1]) : two_bf16(v[2 * h], v[2 * h + 1]);
      if (!F8) left[h] = two_bf16(v[2 * h] - lo(a[h]), v[2 * h + 1] - hi(a[h]));
    }
    shared_store(to, make_uint4(a[0], a[1], a[2], a[3]));
    if (!F8) shared_store(to + rest, make_uint4(left[0], left[1], left[2], left[3]));
  };
  if (kWhole && C == 1 && !aside) asm volatile("bar.sync 1, %0;" ::"n"(32 * W) : "memory");  // there is a barrier for weights
  __syncwarp();
  pdl_wait();

  if (kWhole) {  // to where the operand will be
#pragma unroll 1
    for (uint32_t r = set; r < p.r; r += C)
#pragma unroll
      for (uint32_t j = 0; j < kHeld; j++)
        if (lane + 32 * j < units)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(mine_x + r * pitch + 512 * j), "l"(x_from + r * p.x_ld + 256 * j) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  float factor = 1.0f;
  const uint32_t of_factor = set + C * (lane >> of_lane), of_head = lane & (1u << of_lane) - 1;
  if (kWhole && p.squares && of_factor < p.r && of_head < heads) factor = factor_of(of_factor, head0 + of_head, p.k >> dim, __uint_as_float(127 - dim << 23));
  windows.ask_all(p.shift);
  asm volatile("cp.async.commit_group;" ::: "memory");
  __syncwarp();
  auto make = [&](uint32_t i) {  // of the warp's i-th row
    const uint32_t r = set + C * i;
    float most = 0.0f, f[kHeld], scale = 1.0f;
    uint4 x[kHeld];
#pragma unroll
    for (uint32_t j = 0; j < kHeld; j++) {
      f[j] = p.squares ? __shfl_sync(~0u, factor, i << of_lane | (min(k0 + (lane + 32 * j) * 8 >> dim, head0 + heads - 1) - head0)) : 1.0f;
      x[j] = make_uint4(0, 0, 0, 0);
      if (lane + 32 * j < units) x[j] = shared_load(mine_x + r * pitch + 512 * j);
      const uint32_t m = __vmaxu2(__vmaxu2(x[j].x & 0x7fff7fff, x[j].y & 0x7fff7fff), __vmaxu2(x[j].z & 0x7fff7fff, x[j].w & 0x7fff7fff));
      most = fmaxf(most, __fmul_rn(fmaxf(lo(m), hi(m)), f[j]));
    }
    if (F8) scale = power_of(r, most);
#pragma unroll
    for (uint32_t j = 0; j < kHeld; j++)
      if (lane + 32 * j < units) {
        const float by = f[j] * scale;
        const uint32_t w[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
        float v[8];
#pragma unroll
        for (int h = 0; h < 4; h++) v[2 * h] = __fmul_rn(lo(w[h]), by), v[2 * h + 1] = __fmul_rn(hi(w[h]), by);  // no fused operation: the same in all kernels
        put(mine_x + r * pitch + 512 * j, v);
      }
  };
  if (kWhole) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#pragma unroll 1
    for (uint32_t i = 0; set + C * i < p.r; i++) make(i);
  } else {  // any operand, two rows and two units at a time
#pragma unroll 1
    for (uint32_t r = 0; r < p.r; r += 2) {
      float most[2] = {}, scale[2] = {1.0f, 1.0f};
      auto each = [&](auto&& f) {
#pragma unroll 1
        for (uint32_t u = lane; u < units; u += 64) {
          float v[4][8];
#pragma unroll
          for (uint32_t q = 0; q < 4; q++) {
            const uint32_t row = r + q / 2, k = k0 + (u + q % 2 * 32) * 8;
            if (row < p.r && u + q % 2 * 32 < units) operand8(p, row, k, p.squares ? factor_of(row, k / p.dim, p.k / p.dim, 1.0f / p.dim) * scale[q / 2] : scale[q / 2], v[q]);
          }
#pragma unroll
          for (uint32_t q = 0; q < 4; q++)
            if (r + q / 2 < p.r && u + q % 2 * 32 < units) f(q / 2, mine_x + (r + q / 2) * pitch + (u - lane + q % 2 * 32) * 16, v[q]);
        }
        __syncwarp();
      };
      if (F8) {
        each([&](uint32_t i, uint32_t, const float* v) {
#pragma unroll
          for (int j = 0; j < 8; j++) most[i] = fmaxf(most[i], fabsf(v[j]));
        });
        scale[0] = power_of(r, most[0]);
        if (r + 1 < p.r) scale[1] = power_of(r + 1, most[1]);
      }
      each([&](uint32_t, uint32_t to, const float* v) { put(to, v); });
    }
  }
  __syncwarp();  // operations of whole warps from here on
  pdl_trigger();
  if (C > 1) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + mine), "n"(32 * C) : "memory");  // the warps of a share
    if (F8)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (2 * t + j < p.r) undo[j] = undos[(2 * t + j) * SH + mine];
  }

  uint32_t to_sums = shared_at(sums) + share * p.r * 128 + g * 4;
  uint32_t there = met;
  if (C > 1) asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to_sums) : "r"(to_sums), "r"(set));
  if (C > 1) asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(there), "r"(set));
  __syncwarp();
  if (C > 1) cluster_wait();
  if (kWhole) asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @p bra D; bra L; D: }" ::"r"(bar) : "memory");
  __syncwarp();
  uint32_t slot = 0;
  auto meet = [&](uint32_t i) {
    __syncwarp();
    if (C > 1) {
      asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; @p bra D; bra L; D: }" ::"r"(met + i % 2 * 8), "r"(i / 2 & 1) : "memory");
      __syncwarp();
      if (i + 2 < passes && aside && lane == 0) expect(met + i % 2 * 8, sum_bytes);
    } else {
      __syncthreads();
    }
  };
  auto pass = [&](uint32_t i) {
    // Sixteen bytes of a weight row are four words, in two sums, as tensor instructions that wait for each other are slow. A pass is a tile of sixteen
    // rows and half a one. In a block alone, of at most four activation rows, the columns beyond them have the words in another order, so
    // that an instruction does two words of the half tile; else what they hold is never looked at.
    constexpr bool kPairs = kWhole && C == 1;
    float acc[2][4] = {}, more[kPairs ? 1 : 2][4] = {};
    const uint32_t at = kWhole ? weights + (set * tile + g) * row_pitch + (chunk0 - first_chunk) * 64 + t * 16 : ring, step = kWhole ? row_pitch : 64;
    const uint32_t x_row = kPairs ? g % 4 : g, swap = kPairs && g >= 4 ? 16 : 0;
    uint32_t at_x = xs + x_row * pitch + (chunk0 - first_chunk) * ks * 2 + t * ks / 2;
    uint4 x0 = {}, x1 = {}, u[3] = {};  // where there is no row they stay zero
#pragma unroll 1
    for (uint32_t c = 0; c < chunks; c++) {
      if (!kWhole) asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 1) : "memory");
      const uint32_t from = at + (kWhole ? c * 64 : slot * stride);
      shared_load_if(x_row < p.r, x0, at_x + swap), shared_load_if(x_row < p.r, x1, at_x + (F8 ? 16 - swap : rest));
#pragma unroll
      for (uint32_t h = 0; h < 3; h++) shared_load_if(g + 8 * h < tile, u[h], from + 8 * h * step);
      const uint32_t y[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w}, w[3][4] = {{u[0].x, u[0].y, u[0].z, u[0].w}, {u[1].x, u[1].y, u[1].z, u[1].w}, {u[2].x, u[2].y, u[2].z, u[2].w}};
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int i = n % 2 * 2 + n / 2;  // words 0, 2, 1, 3
        if (F8) {
          const uint2 a = e4m3_to_f16(w[0][i]), b = e4m3_to_f16(w[1][i]);
          multiply_f16(acc[i / 2], a.x, b.x, a.y, b.y, y[2 * i], y[2 * i + 1]);
          if (kPairs && i >= 2) continue;
          const uint2 c = e4m3_to_f16(w[2][i]), d = kPairs ? e4m3_to_f16(w[2][i + 2]) : make_uint2(0, 0);
          multiply_f16(more[kPairs ? 0 : i / 2], c.x, d.x, c.y, d.y, y[2 * i], y[2 * i + 1]);
        } else {  // two words of the operand's high part, two of what it leaves
          const int k = i % 2 * 2;
          multiply_bf16(acc[i / 2], w[0][k], w[1][k], w[0][k + 1], w[1][k + 1], y[2 * i], y[2 * i + 1]);
          multiply_bf16(more[kPairs ? 0 : i / 2], w[2][k], 0, w[2][k + 1], 0, y[2 * i], y[2 * i + 1]);
        }
      }
      if (!kWhole) {
        copy_next();
        if (++slot == kDepth) slot = 0;
      }
      at_x += ks * 2;
    }
    float half[2];
#pragma unroll
    for (int j = 0; j < 2; j++) half[j] = more[0][j] + (kPairs ? __shfl_xor_sync(~0u, more[0][j + 2], 2) : more[kPairs ? 0 : 1][j]);
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (2 * t + j < p.r)
#pragma unroll
        for (uint32_t h = 0; h < 3; h++) {
          const float v = (h < 2 ? acc[0][j + 2 * h] + acc[1][j + 2 * h] : half[j]) * undo[j];
          const uint32_t to = to_sums + (i % 2 * W * p.r + 2 * t + j) * 128 + 32 * h;
          if (g + 8 * h >= tile) continue;
          if (C > 1)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(__float_as_uint(v)), "r"(there + i % 2 * 8) : "memory");
          else
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
        }
    meet(i);
    uint32_t n = own + i * tile + of_place;
    if (of_row < p.r && of_place < tile && n < stop) {
      float v[W];
#pragma unroll
      for (uint32_t w = 0; w < W; w++) v[w] = sums[(i % 2 * W + w) * p.r * 32 + threadIdx.x];
#pragma unroll
      for (uint32_t w = 0; w < W; w += 4) v[w] = (v[w] + v[w + 1]) + (v[w + 2] + v[w + 3]);
      float sum = v[0];
#pragma unroll
      for (uint32_t w = 4; w < W; w += 4) sum += v[w];
      uint32_t j = 0;
#pragma unroll 1
      while (n >= p.part[j].rows) n -= p.part[j++].rows;
      const ProjectPart& q = p.part[j];
      if (F8) sum *= __uint_as_float(scale_high << 16 | (q.scale_f32 ? scale_now : 0));
      q.out[(uint64_t)of_row * q.out_ld + n] = to_bf16(sum);
    }
    if (!kWhole && i + 1 < passes) scale_now = ask_scale(i + 1);
  };
  if constexpr (kWhole) {
    pass(0);
  } else {
#pragma unroll 1
    for (uint32_t i = 0; i < passes; i++) pass(i);
  }
  windows.finish(p.shift);
}

// BF16 rows and weights, of one part: products of both are exact, nothing is made of a row, and a head of a multiple of 64 values has its factor multiply
// its sum. A warp has kDepth whole lines of 128 bytes of each weight row on their way, which its lanes copy and read for each other. Rows of at most
// 512 values times the warps.
template <int kDepth, uint32_t C>
DEVICE void lines(const ProjectParams& p) {
  constexpr uint32_t W = kWarps, SH = W / C, kPass = 24, ks = 64, kHeld = 2, kRows = 2;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t rank = 0;
  if (C > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const uint32_t few = p.shares & 0xffff, over = p.shares >> 16;
  auto first_of = [&](uint32_t block) { return block * few + min(block, over); };
  const uint32_t most = few + min(over, 1), passes = (most + kPass - 1) / kPass, tile = passes == 1 ? most : (most + passes - 1) / passes;
  const uint32_t all = p.k / ks, row_bytes = 2 * p.k, most_lines = (all + W - 1) / W * SH, pitch = most_lines * 128 + 64;
  const uint32_t dim = 31 - __clz(p.dim), head_places = p.squares ? ((all + W - 1) / W * ks >> dim) + 2 : 0;
  float* sums = (float*)(room + 640);
  const uint32_t met = shared_at(room) + 512, xs = shared_at(sums) + min(passes, 2) * W * p.r * 128, factors = xs + p.r * pitch;
  const uint32_t stride = tile * 128, ring = ((factors + SH * head_places * 32 + 127) & ~127u) + warp * (kDepth * stride);
  const uint32_t home = blockIdx.x - rank, set = warp / SH, mine = warp % SH, share = rank * SH + mine;
  const uint32_t first_line = part(all, W, rank * SH), line0 = part(all, W, share), n_lines = part(all, W, share + 1) - line0;
  const uint32_t begin = first_of(home + set), end = first_of(home + set + 1);
  const bool aside = warp == W - 1;
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  auto expect = [&](uint32_t at, uint32_t bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory"); };
  const uint32_t sum_bytes = W * p.r * tile * 4;
  // Copies: eight lanes have a line of a row, four rows at once; a row's second half and the next one's first lie in the same banks otherwise.
  uint32_t ahead_pass = 0, ahead_line = n_lines, ahead_rows = 0, lines_left = kDepth;
  const uint8_t* src = nullptr;
  const uint32_t from_row = lane / 8;
  // Nothing that ptxas may take apart: of nvcc 13.0 a copy to a register plus a uniform register is an illegal instruction.
  uint32_t to = ring + from_row * 128 + ((lane % 8 ^ (from_row & 1) * 4) * 16), four = __shfl_sync(~0u, 4 * row_bytes, lane);
  auto copy_next = [&]() {
    if (ahead_line == n_lines) {
      const uint32_t first = begin + ahead_pass * tile, stop = min(end, first + tile);
      ahead_rows = ahead_pass < passes && first + from_row < stop ? stop - first - from_row : 0;
      src = (const uint8_t*)p.part[0].w + (uint64_t)(first + from_row) * row_bytes + line0 * 128 + lane % 8 * 16;
      ahead_line = 0, ahead_pass++;
    }
    to = __shfl_sync(~0u, to, lane);
#pragma unroll
    for (uint32_t j = 0; j < kPass / 4; j++)
      if (4 * j < ahead_rows)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to + 512 * j), "l"(src + j * four), "l"(policy) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    src += 128, to += stride, ahead_line++;
    if (--lines_left == 0) lines_left = kDepth, to -= kDepth * stride;
  };
  if (C > 1) {
    if (aside && lane == 0) {
#pragma unroll
      for (int i = 0; i < 2; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(met + 8 * i) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      expect(met, sum_bytes);
      if (passes > 1) expect(met + 8, sum_bytes);
    }
    __syncwarp();
    cluster_arrive();
  }
  if (n_lines) {
    // No faster than is wished: what the delta rule still reads waits behind all that has been asked for.
    const uint32_t clocks = p.part[0].paced;
    uint32_t begun, now;
    asm volatile("mov.u32 %0, %clock;" : "=r"(begun)::"memory");
#pragma unroll 1
    for (uint32_t i = 0; i < kDepth; i++) {
      do asm volatile("mov.u32 %0, %clock;" : "=r"(now)::"memory");
      while (now - begun < i * clocks);
      __syncwarp();
      copy_next();
    }
  }
  Windows windows(p, warp == W - 2, ring + (W - warp) * (kDepth * stride), lane);
  windows.find_all(p.shift);
  const uint32_t units = n_lines * 8, k0 = line0 * ks, mine_x = xs + (line0 - first_line) * 128 + lane * 16, head0 = k0 >> dim, heads = units ? (k0 + n_lines * ks - 1 >> dim) - head0 + 1 : 0;
  const bf16* x_from = (const bf16*)p.x + k0 + lane * 8;
  __syncwarp();
  pdl_wait();
  // the operand's and the factors' part of a warp: every C-th row
#pragma unroll 1
  for (uint32_t r0 = set; r0 < p.r; r0 += C * kRows) {
    uint4 held[kRows][kHeld];
#pragma unroll
    for (uint32_t i = 0; i < kRows; i++)
#pragma unroll
      for (uint32_t j = 0; j < kHeld; j++)
        if (r0 + C * i < p.r && lane + 32 * j < units) held[i][j] = __ldcg((const uint4*)(x_from + (r0 + C * i) * p.x_ld) + 32 * j);
    if (r0 == set && p.squares) {
#pragma unroll 1
      for (uint32_t h = lane % 8; h < heads; h += 8)
#pragma unroll 1
        for (uint32_t r = set + C * (lane / 8); r < p.r; r += 4 * C) {
          const float4 s = __ldcg((const float4*)p.squares + r * (p.k >> dim) + head0 + h);
          const float f = rsqrtf(__fmaf_rn((s.x + s.y) + (s.z + s.w), __uint_as_float(127 - dim << 23), p.eps));
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(factors + (mine * head_places + h) * 32 + r * 4), "f"(f) : "memory");
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < kRows; i++)
#pragma unroll
      for (uint32_t j = 0; j < kHeld; j++)
        if (r0 + C * i < p.r && lane + 32 * j < units) shared_store(mine_x + (r0 + C * i) * pitch + 512 * j, held[i][j]);
  }
  windows.ask_all(p.shift);  // with the next copies
  __syncwarp();
  pdl_trigger();
  uint32_t to_sums = shared_at(sums) + share * p.r * 128 + g * 4, there = met;
  if (C > 1) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + mine), "n"(32 * C) : "memory");  // the warps of a share
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to_sums) : "r"(to_sums), "r"(set));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(there), "r"(set));
    __syncwarp();
    cluster_wait();
  }
  __syncwarp();
  const uint32_t own = first_of(blockIdx.x), stop = first_of(blockIdx.x + 1), of_row = threadIdx.x / 32, of_place = threadIdx.x % 32;
  uint32_t slot = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < passes; i++) {
    float acc[4] = {}, more[4] = {}, all_acc[4] = {}, all_more[2] = {};
    uint32_t at_factor = factors + mine * head_places * 32 + t * 8, at_x = xs + g * pitch + (line0 - first_line) * 128 + t * 16;
    const uint32_t at = ring + g * 128 + (t ^ (g & 1) * 4) * 16;
    uint32_t to_head = p.squares ? p.dim - (k0 & p.dim - 1) : ~0u;  // k until the factor is the next head's
    uint4 x[2] = {}, u[3][2] = {};
#pragma unroll 1
    for (uint32_t c = 0; c < n_lines; c++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 1) : "memory");
      __syncwarp();
      const uint32_t from = at + slot;
#pragma unroll
      for (uint32_t e = 0; e < 2; e++) {
        shared_load_if(g < p.r, x[e], at_x + 64 * e);
#pragma unroll
        for (uint32_t h = 0; h < 3; h++) shared_load_if(g + 8 * h < tile, u[h][e], (from ^ 64 * e) + 1024 * h);
      }
#pragma unroll
      for (uint32_t e = 0; e < 2; e++) {
        multiply_bf16(acc, u[0][e].x, u[1][e].x, u[0][e].y, u[1][e].y, x[e].x, x[e].y);
        multiply_bf16(more, u[2][e].x, 0, u[2][e].y, 0, x[e].x, x[e].y);
        multiply_bf16(acc, u[0][e].z, u[1][e].z, u[0][e].w, u[1][e].w, x[e].z, x[e].w);
        multiply_bf16(more, u[2][e].z, 0, u[2][e].w, 0, x[e].z, x[e].w);
      }
      __syncwarp();
      copy_next();
      slot += stride;
      if (slot == kDepth * stride) slot = 0;
      at_x += 128, to_head -= ks;
      if (to_head == 0 || p.squares && c + 1 == n_lines) {
        float2 f;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(f.x), "=f"(f.y) : "r"(at_factor));
        at_factor += 32, to_head = p.dim;
#pragma unroll
        for (int j = 0; j < 4; j++) all_acc[j] = __fmaf_rn(acc[j], j % 2 ? f.y : f.x, all_acc[j]), acc[j] = 0.0f;
#pragma unroll
        for (int j = 0; j < 2; j++) all_more[j] = __fmaf_rn(more[j], j % 2 ? f.y : f.x, all_more[j]), more[j] = 0.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (2 * t + j < p.r)
#pragma unroll
        for (uint32_t h = 0; h < 3; h++) {
          const float v = h < 2 ? acc[j + 2 * h] + all_acc[j + 2 * h] : more[j] + all_more[j];
          const uint32_t to = to_sums + (i % 2 * W * p.r + 2 * t + j) * 128 + 32 * h;
          if (g + 8 * h >= tile) continue;
          if (C > 1)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(__float_as_uint(v)), "r"(there + i % 2 * 8) : "memory");
          else
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
        }
    __syncwarp();
    if (C > 1) {
      asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1; @p bra D; bra L; D: }" ::"r"(met + i % 2 * 8), "r"(i / 2 & 1) : "memory");
      __syncwarp();
      if (i + 2 < passes && aside && lane == 0) expect(met + i % 2 * 8, sum_bytes);
    } else {
      __syncthreads();
    }
    uint32_t n = own + i * tile + of_place;
    if (of_row < p.r && of_place < tile && n < stop) {
      float v[W];
#pragma unroll
      for (uint32_t w = 0; w < W; w++) v[w] = sums[(i % 2 * W + w) * p.r * 32 + threadIdx.x];
#pragma unroll
      for (uint32_t w = 0; w < W; w += 4) v[w] = (v[w] + v[w + 1]) + (v[w + 2] + v[w + 3]);
      float sum = v[0];
#pragma unroll
      for (uint32_t w = 4; w < W; w += 4) sum += v[w];
      p.part[0].out[(uint64_t)of_row * p.part[0].out_ld + n] = to_bf16(sum);
    }
  }
  windows.finish(p.shift);
}

// One part of E4M3 rows of K values, of which a block has 16 to 24, times R BF16 rows one behind the other (0: three to eight, by pairs of blocks), without factors or with one for
// each 128 values: what project does there, in few instructions, since those that an SM has not fetched for long take longer than what they do.
DEVICE bool brief_takes(const ProjectParams& p, uint32_t k) {
  return p.k == k && p.x_ld == k && p.parts == 1 && (p.shares & 0xffff) >= 16 && (!p.squares || p.dim == 128);
}
template <uint32_t K, uint32_t R>
DEVICE void brief(const ProjectParams& p) {
  constexpr uint32_t C = R ? 1 : 2, W = kWarps, SH = W / C, kPart = K / C, kShare = K / W, pitch = kPart * 2 + 16, row_pitch = kPart + 64, kHeads = kShare / 128, kMine = R ? R : 4;
  constexpr int kBegun = C > 1 ? 1 + SH : 2;  // barrier of the last warp, which says that the wait is not over, and the first, which says later that it is
  static_assert(kShare == 512 && R <= 2);
  const uint32_t rows = R ? R : p.r, even = R ? R : (rows + 1) / 2 * 2;  // even: for how many there is room in the sums
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t rank = 0;
  if (C > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const uint32_t few = p.shares & 0xffff, over = p.shares >> 16, home = blockIdx.x - rank;
  const uint32_t first = home * few + min(home, over), n0 = few + (home < over), n = n0 + (C > 1 ? few + (home + 1 < over) : 0);  // the cluster's weight rows, those of its first block
  // shared memory: powers of two [row][share], barriers of the weights and of the sums, whether the wait is over, sums [share][24][even], operand [row][pitch], weights [cluster's
  // rows][row_pitch], pieces of windows
  const uint32_t base = shared_at(room), bar = base + 512, met = bar + 8, over_at = bar + 24, sums = base + 640;
  const uint32_t xs = sums + W * rows * 128, weights = R ? base + (640 + W * R * 128 + R * pitch + 127) / 128 * 128 : (xs + rows * pitch + 127) & ~127u;
  if (warp == W - 1) {
    if (lane == 0) {
#pragma unroll
      for (uint32_t i = 0; i < C; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar + 8 * i) : "memory");
      asm volatile("st.volatile.shared.u32 [%0], 0;" ::"r"(over_at) : "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(n * kPart) : "memory");
    }
    __syncwarp();
    asm volatile("bar.arrive %0, 64;" ::"n"(kBegun) : "memory");
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const uint8_t* from = (const uint8_t*)p.part[0].w + (uint64_t)first * K + rank * kPart;
    const uint32_t clocks = p.part[0].paced;
    uint32_t due, now, at_once = !clocks;
    asm volatile("mov.u32 %0, %clock;" : "=r"(due)::"memory");
    __syncwarp();
    // Until the wait is over no faster than is wished, 12 KB at a time: what the delta rule still reads and writes waits behind all that has been asked for.
#pragma unroll 1
    for (uint32_t at = 0, stop; at < n; at = stop) {
      stop = n;
      if (!at_once) {
        do {
          asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(at_once) : "r"(over_at) : "memory");
          asm volatile("mov.u32 %0, %clock;" : "=r"(now)::"memory");
        } while ((int)(now - due) < 0 && !at_once);
        at_once = __any_sync(~0u, at_once), due += clocks;
        if (!at_once) stop = min(n, at + 2 * C);
      }
#pragma unroll 1
      for (uint32_t i = at + lane; i < stop; i += 32)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(weights + i * row_pitch),
                     "l"(from + (uint64_t)i * K), "r"(kPart), "r"(bar), "l"(policy)
                     : "memory");
      __syncwarp();
    }
    if (C > 1 && lane == 0) {
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(met), "r"(W * 4 * even * (few + min(over, 1))) : "memory");
    }
    __syncwarp();
  }
  if (C > 1) cluster_arrive();
  else if (warp == W - 1) asm volatile("bar.arrive 1, %0;" ::"n"(32 * W) : "memory");
  const uint32_t set = C > 1 && warp >= SH, mine = warp - set * SH, share = rank * SH + mine, tile = few + min(over, 1);
  const uint32_t own = first + (rank ? n0 : 0), count = rank ? n - n0 : n0;  // this block's weight rows
  const uint32_t place = R ? lane : threadIdx.x / 8;                         // whose results this thread finishes
  uint32_t scale_low, scale_high;
  {
    const uint32_t f32 = p.part[0].scale_f32;
    const uint8_t* at = (const uint8_t*)p.part[0].scale + ((uint64_t)(own + min(place, count - 1)) << (f32 ? 2 : 1));
    asm volatile("ld.global.nc.u16 %0, [%2]; ld.global.nc.u16 %1, [%3];" : "=r"(scale_low), "=r"(scale_high) : "l"(at), "l"(at + (f32 ? 2 : 0)));
  }
  Windows windows;
  if (warp == W - 2) windows = Windows(p, true, weights + C * tile * row_pitch, lane), windows.find_all(p.shift);
  // A warp makes every C-th row ready. Where they are is worked out in front of the wait: shared memory keeps the compiler from doing it behind.
  const bool scaled = p.squares;
  const uint32_t n_mine = R ? R : (rows - set + 1) / 2, of = min(lane / kHeads, n_mine - 1) * C + set;  // of: a row whose factor of one of the share's heads this lane makes
  const bf16* x_from = (const bf16*)p.x + set * K + share * kShare + lane * 8;
  const float* square = scaled ? p.squares + (of * (K / 128) + share * kHeads + lane % kHeads) * 4 : (const float*)p.x;
  const uint32_t mine_x = xs + set * pitch + mine * (kShare * 2) + lane * 16;
  asm volatile("st.shared.v2.u64 [%2], {%0, %1}; ld.volatile.shared.v2.u64 {%0, %1}, [%2];" : "+l"(x_from), "+l"(square) : "r"(mine_x) : "memory");
  __syncwarp();
  if (warp == 0) asm volatile("bar.sync %0, 64;" ::"n"(kBegun) : "memory");
  pdl_wait();
  if (threadIdx.x == 0) asm volatile("st.volatile.shared.u32 [%0], 1;" ::"r"(over_at) : "memory");
  const float4 s = __ldcg((const float4*)square);
  uint4 held[R ? R : 1][2];
#pragma unroll
  for (uint32_t i = 0; i < kMine; i++)
#pragma unroll
    for (uint32_t j = 0; j < 2; j++)
      if (R) held[i][j] = __ldcg((const uint4*)(x_from + i * K) + 32 * j);
      else if (i < n_mine) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(mine_x + i * C * pitch + 512 * j), "l"(x_from + i * C * K + 256 * j) : "memory");
  float factor;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(__fmaf_rn((s.x + s.y) + (s.z + s.w), 1.0f / 128, p.eps)));
  if (!scaled) factor = 1.0f;
  float *undos = (float*)room, undo[2] = {};
  auto make = [&](uint32_t i, uint32_t at, const uint4* x) {
    float most = 0.0f, f[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
      f[j] = __shfl_sync(~0u, factor, i * kHeads + j * 2 + lane / 16);
      const uint32_t m = __vmaxu2(__vmaxu2(x[j].x & 0x7fff7fff, x[j].y & 0x7fff7fff), __vmaxu2(x[j].z & 0x7fff7fff, x[j].w & 0x7fff7fff));
      most = fmaxf(most, __fmul_rn(fmaxf(lo(m), hi(m)), f[j]));
    }
    const int shift = max(-100, min(100, 141 - (int)(__reduce_max_sync(~0u, __float_as_uint(most)) >> 23)));
    const float scale = __uint_as_float((uint32_t)(127 + shift) << 23), back = __uint_as_float((uint32_t)(127 - shift) << 23);
    if (C > 1 && lane == 0) undos[(set + C * i) * SH + mine] = back;
    if (C == 1) undo[i % 2] = back;
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
      const float by = f[j] * scale;
      const uint32_t w[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
      uint32_t a[4];
#pragma unroll
      for (int h = 0; h < 4; h++) a[h] = two_f16(__fmul_rn(lo(w[h]), by), __fmul_rn(hi(w[h]), by));
      shared_store(at + 512 * j, make_uint4(a[0], a[1], a[2], a[3]));
    }
  };
  if constexpr (R > 0) {
#pragma unroll
    for (uint32_t i = 0; i < R; i++) make(i, mine_x + i * pitch, held[i]);
  } else {
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 1
    for (uint32_t i = 0, at = mine_x; i < n_mine; i++, at += C * pitch) {
      const uint4 x[2] = {shared_load(at), shared_load(at + 512)};
      make(i, at, x);
    }
  }
  __syncwarp();
  pdl_trigger();
  windows.ask_all(p.shift);
  if (C > 1) asm volatile("bar.sync %0, 64;" ::"r"(1 + mine) : "memory");  // the two warps of a share
  else if (warp < W - 1) asm volatile("bar.sync 1, %0;" ::"n"(32 * W) : "memory");  // there is a barrier for weights
  const uint32_t row0 = R ? 0 : 2 * t;
  if (C > 1) undo[0] = undos[row0 * SH + mine], undo[1] = undos[(row0 + 1) * SH + mine];
  uint32_t at_w = weights + ((set ? n0 : 0) + g) * row_pitch + mine * kShare + t * 16;
  // Of one or two rows columns from the fifth on have the words in another order, so that an instruction does two words of the half tile. What columns without a row hold is never
  // looked at.
  const uint32_t x_row = R ? g % 4 : g, swap = R && g >= 4 ? ~15u : 16;
  uint32_t at_x = xs + x_row * pitch + mine * (kShare * 2) + t * 32 + (R && g >= 4 ? 16 : 0);
  float acc[2][4] = {}, more[2][4] = {};
  uint4 u[3] = {}, x0 = {}, x1 = {};
  __syncwarp();
  if (C > 1) cluster_wait();
  asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @p bra D; bra L; D: }" ::"r"(bar) : "memory");
  __syncwarp();
#pragma unroll 1
  for (uint32_t c = 0; c < kShare / 64; c++, at_w += 64, at_x += 128) {
    shared_load_if(x_row < rows, x0, at_x), u[0] = shared_load(at_w), u[1] = shared_load(at_w + 8 * row_pitch);
    shared_load_if(g + 16 < tile, u[2], at_w + 16 * row_pitch), shared_load_if(x_row < rows, x1, at_x + swap);
    const uint32_t y[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w}, w[3][4] = {{u[0].x, u[0].y, u[0].z, u[0].w}, {u[1].x, u[1].y, u[1].z, u[1].w}, {u[2].x, u[2].y, u[2].z, u[2].w}};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int i = k % 2 * 2 + k / 2;  // words 0, 2, 1, 3
      const uint2 a = e4m3_to_f16(w[0][i]), b = e4m3_to_f16(w[1][i]);
      multiply_f16(acc[i / 2], a.x, b.x, a.y, b.y, y[2 * i], y[2 * i + 1]);
      if (R && i >= 2) continue;
      const uint2 c = e4m3_to_f16(w[2][i]), d = R ? e4m3_to_f16(w[2][i + 2]) : make_uint2(0, 0);
      multiply_f16(more[R ? 0 : i / 2], c.x, d.x, c.y, d.y, y[2 * i], y[2 * i + 1]);
    }
  }
  float half[2];
#pragma unroll
  for (int j = 0; j < 2; j++) half[j] = more[0][j] + (R ? __shfl_xor_sync(~0u, more[0][j + 2], 2) : more[1][j]);
  if (row0 < rows && (R == 0 || t == 0)) {
    uint32_t to = sums + (share * 24 + g) * (even * 4) + row0 * 4, there = met;
    if (C > 1) {
      asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(set));
      asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(there) : "r"(set));
    }
    auto send = [&](uint32_t h, float a, float b) {
      const uint32_t at = to + 8 * h * (even * 4), v = __float_as_uint(a * undo[0]), w = __float_as_uint(b * undo[1]);
      if (C > 1) asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(at), "r"(v), "r"(w), "r"(there) : "memory");
      else if (R == 2) asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v), "r"(w) : "memory");
      else asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
    };
    send(0, acc[0][0] + acc[1][0], acc[0][1] + acc[1][1]);
    send(1, acc[0][2] + acc[1][2], acc[0][3] + acc[1][3]);
    if (g + 16 < tile) send(2, half[0], half[1]);
  }
  __syncwarp();
  const float by = __uint_as_float(scale_high << 16 | (p.part[0].scale_f32 ? scale_low : 0));
  if (C == 1) __syncthreads();
  if (warp < (R ? 1 : 6)) {
    if (C > 1)
      asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0; @p bra D; bra L; D: }" ::"r"(met) : "memory");
    float v[2][W];
    const uint32_t row = R ? 0 : lane % 8, from = sums + (place * even + row) * 4;
#pragma unroll
    for (uint32_t w = 0; w < W; w++) {
      const uint32_t at = from + w * 24 * (even * 4);
      if (R == 2) asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0][w]), "=f"(v[1][w]) : "r"(at));
      else asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[0][w]) : "r"(at));
    }
#pragma unroll
    for (uint32_t r = 0; r < (R == 2 ? 2 : 1); r++) {
#pragma unroll
      for (uint32_t w = 0; w < W; w += 4) v[r][w] = (v[r][w] + v[r][w + 1]) + (v[r][w + 2] + v[r][w + 3]);
      float sum = v[r][0];
#pragma unroll
      for (uint32_t w = 4; w < W; w += 4) sum += v[r][w];
      if (place < count && row < rows) p.part[0].out[(uint64_t)(row + r) * p.part[0].out_ld + own + place] = to_bf16(sum * by);
    }
  }
  windows.finish(p.shift);
}

// Here the last argument is a kernel's registers.
#undef NINFER_KERNEL
#define NINFER_KERNEL(name, Params, threads, registers) extern "C" __global__ void __maxnreg__(registers) name(const __grid_constant__ Params p)
#define CLUSTER(name, n) extern "C" __global__ void __cluster_dims__(n, 1, 1) name(const __grid_constant__ ProjectParams p);
CLUSTER(project_whole_rows, 2)
CLUSTER(project_whole_lanes, 2)
CLUSTER(project_bf16_rows, 4)

static constexpr uint32_t kValues = 6144;  // of a row of the real model
NINFER_KERNEL(project_whole, ProjectParams, kProject, 64) {
  if (p.r > 2 || !brief_takes(p, kValues)) project<true, 0, 1>(p);
  else if (p.r == 1) brief<kValues, 1>(p);
  else brief<kValues, 2>(p);
}
NINFER_KERNEL(project_whole_rows, ProjectParams, kProject, 64) {
  if (brief_takes(p, kValues)) brief<kValues, 0>(p);
  else project<true, 0, 2>(p);
}
NINFER_KERNEL(project_whole_lanes, ProjectParams, kProject, 80) {
  if (brief_takes(p, kValues)) brief<kValues, 0>(p);
  else project<true, 0, 2>(p);
}
NINFER_KERNEL(project_e4m3, ProjectParams, kProject, 128) { project<true, 4, 1>(p); }
// As Projector.Shared of the host chooses.
NINFER_KERNEL(project_bf16, ProjectParams, kProject, 88) {
  if (p.x_f32 || p.parts > 1 || p.squares && (p.dim % 64 || p.dim & p.dim - 1)) project<false, 4, 1>(p);
  else lines<2, 1>(p);
}
NINFER_KERNEL(project_bf16_deep, ProjectParams, kProject, 88) { lines<4, 1>(p); }
NINFER_KERNEL(project_bf16_rows, ProjectParams, kProject, 88) { lines<5, 4>(p); }
