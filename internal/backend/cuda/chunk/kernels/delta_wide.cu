// The gated delta rule, chunk after chunk (delta_run.cu), on the tensor instructions of sm_90a: four warps have the 64 columns of a block together, so
// that keys, queries, inverse and scores are read from shared memory once and not by every warp. Twelve warps in three roles: the state, the values before
// it, up to two chunks ahead, and the outputs behind it. Each role waits for what it needs only.
//
//   delta_wide  as delta_run, with its own share of shared memory (WideShared). Other architectures have no code for it and must not be asked.
#include "delta.cuh"
#include "wide.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// d [64 x N] += a [64 x 16] * b [16 x N]: columns by keys or tokens in registers times FP16 in shared memory.
DEVICE void wide64(float* d, const uint32_t* a, uint64_t b, uint32_t add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
      "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),
        "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
        "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
DEVICE void wide32(float* d, const uint32_t* a, uint64_t b, uint32_t add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
      "}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),
        "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
// The same with b's rows of k.
DEVICE void wide128(float* d, const uint32_t* a, uint64_t b, uint32_t add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
      "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),
        "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
        "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),
        "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// acc [64 columns x 64 tokens] = a * a square whose upper triangle is zero, turned: the first half of the tokens needs only half of the square.
DEVICE void wide_lower(float (&acc)[32], const uint32_t (*a)[4], uint32_t square) {
#pragma unroll
  for (uint32_t k = 0; k < 2; k++) wide32(acc, a[k], described(square + k * 32, 16, 1024), k > 0);
#pragma unroll
  for (uint32_t k = 0; k < 4; k++) wide32(acc + 16, a[k], described(square + 4096 + k * 32, 16, 1024), k > 0);
}

// acc [64 columns x 64 tokens] = a [64 columns x 128 keys] * tokens [64][128], turned.
DEVICE void wide_tokens(float (&acc)[32], const uint32_t (*a)[4], uint32_t tokens) {
#pragma unroll
  for (uint32_t k = 0; k < 8; k++) wide64(acc, a[k], described(tokens + k / 4 * (kTile / 2) + k % 4 * 32, 16, 1024), k > 0);
}

DEVICE float (*tiles(float* v))[4] { return (float (*)[4])v; }
#endif

static constexpr int kWideRun = 384;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What a warp of a role hands the same warp of another, a lane to the same lane: the state as operand and its scales, corrections as operand and theirs,
// values of two chunks.
struct Handed {
  uint4 A[8][32];
  uint4 B[4][32];
  float4 V[2][8][32];
  float2 scale_a[32];
  float4 scale_b[32];
};

static constexpr uint32_t kStages = 3, kTiles = 2 * kTile + 2 * kSquare, kDecay = 2 * kChunk * 4;

struct WideShared {
  uint8_t tiles[kStages][kTiles];  // keys, queries, inverse, scores
  uint8_t inputs[2][kInputs];      // of the columns' convolution
  Handed handed[4];
  float decay[kStages][2 * kChunk];
};
static_assert(sizeof(WideShared) == 226816, "delta.go reserves it");

DEVICE void arrive(uint32_t bar, uint32_t lane) {  // a warp's
  __syncwarp();
  warp_arrives(bar, lane);
}

// One thread fetches a chunk's tiles.
DEVICE void fetch_tiles(const DeltaRunParams& p, const Place& at, uint32_t chunk, const WideShared& w, uint32_t bars) {
  const uint32_t s = chunk % kStages, to = shared_at(w.tiles[s]), bar = bars + s * 8;
  barrier_expect(bar, kTiles + kDecay);
  const uint64_t k = (uint64_t)chunk * p.key_heads + at.kh, h = (uint64_t)chunk * p.heads + at.head;
  copy_bulk(to, (const uint8_t*)p.keys + k * kTile, kTile, bar);
  copy_bulk(to + kTile, (const uint8_t*)p.queries + k * kTile, kTile, bar);
  copy_bulk(to + 2 * kTile, (const uint8_t*)p.inverse + h * kSquare, kSquare, bar);
  copy_bulk(to + 2 * kTile + kSquare, (const uint8_t*)p.scores + h * kSquare, kSquare, bar);
  copy_bulk(shared_at(w.decay[s]), p.decay + h * 2 * kChunk, kDecay, bar);
}

// 128 threads ask for a chunk's inputs.
DEVICE void ask_inputs(const DeltaRunParams& p, const Place& at, uint32_t chunk, uint32_t to, uint32_t t) {
  if (chunk < at.chunks) {
#pragma unroll
    for (uint32_t i = 0; i < 5; i++) {
      const uint32_t r = i * 16 + t / 8, piece = t % 8;
      const int row = (int)(chunk * kChunk + r) - 3;
      if (r < 67) copy16(to + r * 128 + ((piece ^ (r & 7)) << 4), row < (int)p.rows ? input_row(p.x, p.window, row, p.x_ld, at.c) + at.channel + piece * 8 : p.x, row < (int)p.rows);
    }
  }
  copies_commit();
}
#endif

NINFER_KERNEL(delta_wide, DeltaRunParams, kWideRun, 1) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t barriers[14];
  const uint32_t t = threadIdx.x % 128, role = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = t / 32, lane = t % 32;
  WideShared& w = *(WideShared*)dynamic;
  Handed& x = w.handed[warp];
  const Place at(p);
  // Of a stage: it is there, has been used. Of operands from the state, of corrections, of values: they are there, have been read.
  const uint32_t full = shared_at(barriers), used = full + 24, full_a = full + 48, free_a = full + 56, full_b = full + 64, free_b = full + 72, full_v = full + 80, free_v = full + 96;
  if (threadIdx.x < 14) barrier_init(full + threadIdx.x * 8, threadIdx.x < 3 ? 1 : (threadIdx.x < 6 ? 8 : 4) * kWarp);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  pdl();
  if (role == 2) {  // values
    if (t == 0)
      for (uint32_t i = 0; i < min(kStages, at.chunks); i++) fetch_tiles(p, at, i, w, full);
    const Taps taps(p, at, warp, lane);
    const uint32_t inputs = shared_at(w.inputs);
    ask_inputs(p, at, 0, inputs, t);
    ask_inputs(p, at, 1, inputs + kInputs, t);
    for (uint32_t chunk = 0; chunk < at.chunks; chunk++) {
      const uint32_t slot = chunk & 1, in = inputs + slot * kInputs;
      copies_wait<1>();
      asm volatile("bar.sync 1, 128;" ::: "memory");
      if (chunk > 1) barrier_wait(free_v + slot * 8, (chunk / 2 - 1) & 1);
#pragma unroll
      for (uint32_t n = 0; n < 8; n += 2) {
        float v[2][4];
        taps.values(v, in, n, warp, lane);
#pragma unroll
        for (int m = 0; m < 2; m++) x.V[slot][n + m][lane] = make_float4(v[m][0], v[m][1], v[m][2], v[m][3]);
      }
      arrive(full_v + slot * 8, lane);
      asm volatile("bar.sync 1, 128;" ::: "memory");  // all have read the inputs
      ask_inputs(p, at, chunk + 2, in, t);
      const uint32_t next = chunk + 1;
      if (t == 0 && next >= kStages && next < at.chunks) {
        barrier_wait(used + next % kStages * 8, (next / kStages - 1) & 1);
        fetch_tiles(p, at, next, w, full);
      }
    }
    copies_wait<0>();
    return;
  }
  if (role == 1) {  // outputs
    for (uint32_t chunk = 0; chunk < at.chunks; chunk++) {
      const uint32_t s = chunk % kStages, queries = shared_at(w.tiles[s]) + kTile, scores = queries + kTile + kSquare;
      uint32_t A[8][4], B[4][4];
      barrier_wait(full_a, chunk & 1);
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const uint4 v = x.A[k][lane];
        A[k][0] = v.x, A[k][1] = v.y, A[k][2] = v.z, A[k][3] = v.w;
      }
      const float2 a = x.scale_a[lane];
      arrive(free_a, lane);
      barrier_wait(full + s * 8, chunk / kStages & 1);
      float O[32], W[32];
      wide_fence();
      wide_tokens(O, A, queries);
      wide_commit();
      barrier_wait(full_b, chunk & 1);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const uint4 v = x.B[k][lane];
        B[k][0] = v.x, B[k][1] = v.y, B[k][2] = v.z, B[k][3] = v.w;
      }
      const float4 b = x.scale_b[lane];
      arrive(free_b, lane);
      const float uS[2] = {a.x, a.y}, sV[2] = {b.x, b.y}, uV[2] = {b.z, b.w};
      wide_fence();
      wide_lower(W, B, scores);
      wide_commit();
      wide_wait<1>();
      held(O);
      decayed(tiles(O), w.decay[s], uS, sV, lane);
      wide_wait<0>();
      held(W);
      arrive(used + s * 8, lane);
#pragma unroll
      for (int i = 0; i < 32; i++) O[i] += W[i];
      write(p, at, tiles(O), uV, chunk, warp, lane);
    }
    return;
  }
  float S[64], sP[2] = {1.0f, 1.0f}, uP[2] = {1.0f, 1.0f};  // the state is kept times sP
  state<false>(p, at, tiles(S), warp, lane);
  for (uint32_t chunk = 0; chunk < at.chunks; chunk++) {
    const uint32_t s = chunk % kStages, keys = shared_at(w.tiles[s]), inverse = keys + 2 * kTile, slot = chunk & 1;
    const float* const decay = w.decay[s];
    float most[2], sS[2], uS[2], sR[2], uR[2], sV[2], uV[2];
    uint32_t A[8][4], B[4][4], D[4][4];
    largest<16>(most, tiles(S));
#pragma unroll
    for (int i = 0; i < 2; i++) scale_of(most[i], 30, sS[i], uS[i]);
    pack_rows<8>(A, tiles(S), sS);
#pragma unroll
    for (int i = 0; i < 2; i++) sS[i] *= sP[i], uS[i] *= uP[i];
    barrier_wait(full + s * 8, chunk / kStages & 1);
    float R[32], V[32];
    wide_fence();
    wide_tokens(R, A, keys);
    wide_commit();
    if (chunk) barrier_wait(free_a, (chunk - 1) & 1);
#pragma unroll
    for (int k = 0; k < 8; k++) x.A[k][lane] = make_uint4(A[k][0], A[k][1], A[k][2], A[k][3]);
    x.scale_a[lane] = make_float2(uS[0], uS[1]);
    arrive(full_a, lane);
    barrier_wait(full_v + slot * 8, chunk / 2 & 1);
    wide_wait<0>();
    held(R);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float4 v4 = x.V[slot][n][lane];
      const float v[4] = {v4.x, v4.y, v4.z, v4.w};
      const float2 f = *(const float2*)(decay + n * 8 + 2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < 4; i++) R[n * 4 + i] = v[i] - (i % 2 ? f.y : f.x) * uS[i / 2] * R[n * 4 + i];
    }
    arrive(free_v + slot * 8, lane);
    largest<8>(most, tiles(R));
#pragma unroll
    for (int i = 0; i < 2; i++) scale_of(most[i], 4, sR[i], uR[i]);
    pack_rows<4>(B, tiles(R), sR);
    wide_fence();
    wide_lower(V, B, inverse);
    wide_commit();
    wide_wait<0>();
    held(V);
#pragma unroll
    for (int i = 0; i < 32; i++) V[i] *= uR[i / 2 % 2];
    largest<8>(most, tiles(V));
    correction_scale(most, sS, sV, uV);
    corrections(B, D, tiles(V), sV, decay, lane);
    const float end = decay[kChunk - 1];
    float to[2];
#pragma unroll
    for (int i = 0; i < 2; i++) to[i] = fminf(end * uP[i] * sV[i], 1e30f), sP[i] = sV[i], uP[i] = uV[i];  // a state of zeros may stand for any size
#pragma unroll
    for (int i = 0; i < 64; i++) S[i] *= to[i / 2 % 2];
    wide_fence();
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) wide128(S, D[k], described(keys + k * 2048, kTile / 2, 1024), 1);
    wide_commit();
    if (chunk) barrier_wait(free_b, (chunk - 1) & 1);
#pragma unroll
    for (int k = 0; k < 4; k++) x.B[k][lane] = make_uint4(B[k][0], B[k][1], B[k][2], B[k][3]);
    x.scale_b[lane] = make_float4(sV[0], sV[1], uV[0], uV[1]);
    arrive(full_b, lane);
    wide_wait<0>();
    held(S);
    arrive(used + s * 8, lane);
  }
#pragma unroll
  for (int i = 0; i < 64; i++) S[i] *= uP[i / 2 % 2];
  state<true>(p, at, tiles(S), warp, lane);
#endif
}
