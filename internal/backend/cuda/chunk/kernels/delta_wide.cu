// The gated delta rule, chunk after chunk (delta_run.cu), on the tensor instructions of sm_90a: four warps have the 64 columns of a block together, so
// that keys, queries, inverse and scores are read from shared memory once and not by every warp.
//
//   delta_wide  as delta_run. Other architectures have no code for it and must not be asked.
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

static constexpr int kWideRun = 128;

NINFER_KERNEL(delta_wide, DeltaRunParams, kWideRun, 1) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(8) uint64_t full[4];
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32, stages = shared_at(dynamic), bars = shared_at(full);
  const Place at(p);
  if (t < p.stages) barrier_init(bars + t * 8, kWideRun + 1);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  pdl();
  for (uint32_t i = 0; i < min(p.stages, at.chunks); i++) fetch(p, at, i, stages, bars, t);
  float S[64];
  state<false>(p, at, tiles(S), warp, lane);
  const Taps taps(p, at, warp, lane);
  for (uint32_t chunk = 0; chunk < at.chunks; chunk++) {
    const uint32_t s = chunk % p.stages, keys = stages + s * kStage, queries = keys + kTile, inverse = queries + kTile, scores = inverse + kSquare;
    const float* decay = (const float*)(dynamic + s * kStage + 2 * kTile + 2 * kSquare);
    const uint32_t in = scores + kSquare + 2 * kChunk * 4;
    float most[2], sS[2], uS[2], sR[2], uR[2], sV[2], uV[2];
    uint32_t A[8][4], B[4][4], D[4][4];
    largest<16>(most, tiles(S));
#pragma unroll
    for (int i = 0; i < 2; i++) scale_of(most[i], 30, sS[i], uS[i]);
    pack_rows<8>(A, tiles(S), sS);
    barrier_wait(bars + s * 8, chunk / p.stages & 1);
    float R[32], O[32], V[32], v[32];
    wide_fence();
    wide_tokens(R, A, keys);
    wide_commit();
#pragma unroll
    for (uint32_t n = 0; n < 8; n += 2) taps.values(tiles(v) + n, in, n, warp, lane);
    wide_wait<0>();
    held(R);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float2 f = *(const float2*)(decay + n * 8 + 2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < 4; i++) R[n * 4 + i] = v[n * 4 + i] - (i % 2 ? f.y : f.x) * uS[i / 2] * R[n * 4 + i];
    }
    largest<8>(most, tiles(R));
#pragma unroll
    for (int i = 0; i < 2; i++) scale_of(most[i], 4, sR[i], uR[i]);
    pack_rows<4>(B, tiles(R), sR);
    wide_fence();
    wide_lower(V, B, inverse);
    wide_commit();
    wide_tokens(O, A, queries);
    wide_commit();
    wide_wait<1>();
    held(V);
#pragma unroll
    for (int i = 0; i < 32; i++) V[i] *= uR[i / 2 % 2];
    largest<8>(most, tiles(V));
    correction_scale(most, sS, sV, uV);
    corrections(B, D, tiles(V), sV, decay, lane);
    const float end = decay[kChunk - 1];
#pragma unroll
    for (int i = 0; i < 64; i++) S[i] *= end * sV[i / 2 % 2];
    wide_wait<0>();
    held(O);
    wide_fence();
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) wide128(S, D[k], described(keys + k * 2048, kTile / 2, 1024), 1);
    wide_commit();
    wide_lower(V, B, scores);
    wide_commit();
    decayed(tiles(O), decay, uS, sV, lane);
    wide_wait<0>();
    held(S);
    held(V);
#pragma unroll
    for (int i = 0; i < 32; i++) O[i] += V[i];
#pragma unroll
    for (int i = 0; i < 64; i++) S[i] *= uV[i / 2 % 2];
    __syncthreads();  // all have used this stage
    if (chunk + p.stages < at.chunks) fetch(p, at, chunk + p.stages, stages, bars, t);
    write(p, at, tiles(O), uV, chunk, warp, lane);
  }
  state<true>(p, at, tiles(S), warp, lane);
#endif
}
