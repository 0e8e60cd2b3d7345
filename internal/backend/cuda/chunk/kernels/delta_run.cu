// The gated delta rule, chunk after chunk, with the state in registers:
//
//   v' = inverse*beta*(v - decay*k*S),  o = decay*q*S + scores*v',  S = decay*S + k'*v'
//
// A block has half of a head's columns, a warp sixteen of them: S turned, columns by keys, is at once sum and operand of tensor instructions.
//
//   delta_run   one warp does all for its columns. Grid: head and half of its columns.
//   delta_pair  two warps: one has the state, the other the convolution of the values before and the outputs behind it. Needs more shared memory.
//
// delta_wide.cu does the same on the tensor instructions of sm_90a.
//
// Products use FP16 operands: keys and queries have length one, entries of the inverse and the scores are at most one, and state,
// corrections and what is left of the values are brought to that range by a power of two a column. So every operand has eleven significant bits, as
// TF32 has, at twice its speed. Sums and the state itself are FP32.
#include "delta.cuh"

static constexpr int kRun = 128;

NINFER_KERNEL(delta_run, DeltaRunParams, kRun, 1) {
  __shared__ __align__(8) uint64_t full[4];
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32, stages = shared_at(dynamic), bars = shared_at(full);
  const Place at(p);
  if (t < p.stages) barrier_init(bars + t * 8, kRun + 1);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  pdl();
  for (uint32_t i = 0; i < min(p.stages, at.chunks); i++) fetch(p, at, i, stages, bars, t);
  float S[16][4];
  state<false>(p, at, S, warp, lane);
  const Taps taps(p, at, warp, lane);
  for (uint32_t chunk = 0; chunk < at.chunks; chunk++) {
    const uint32_t s = chunk % p.stages, keys = stages + s * kStage, queries = keys + kTile, inverse = queries + kTile, scores = inverse + kSquare;
    const float* decay = (const float*)(dynamic + s * kStage + 2 * kTile + 2 * kSquare);
    const uint32_t in = scores + kSquare + 2 * kChunk * 4;
    barrier_wait(bars + s * 8, chunk / p.stages & 1);
    float most[2], sS[2], uS[2], sR[2], uR[2], sV[2], uV[2];
    uint32_t A[8][4], B[4][4], D[4][4];
    largest<16>(most, S);
#pragma unroll
    for (int i = 0; i < 2; i++) scale_of(most[i], 30, sS[i], uS[i]);
    pack_rows<8>(A, S, sS);
    float R[8][4] = {}, O[8][4] = {}, V[8][4] = {};
    by_tokens(R, A, keys, lane);
    by_tokens(O, A, queries, lane);
#pragma unroll
    for (uint32_t n = 0; n < 8; n += 2) {
      float v[2][4];
      taps.values(v, in, n, warp, lane);
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const float2 f = *(const float2*)(decay + (n + m) * 8 + 2 * (lane % 4));
#pragma unroll
        for (int i = 0; i < 4; i++) R[n + m][i] = v[m][i] - (i % 2 ? f.y : f.x) * uS[i / 2] * R[n + m][i];
      }
    }
    largest<8>(most, R);
#pragma unroll
    for (int i = 0; i < 2; i++) scale_of(most[i], 4, sR[i], uR[i]);
    pack_rows<4>(B, R, sR);
    lower(V, B, inverse, lane);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) V[n][i] *= uR[i / 2];
    largest<8>(most, V);
    correction_scale(most, sS, sV, uV);
    corrections(B, D, V, sV, decay, lane);
    forward(S, D, keys, decay[kChunk - 1], sV, uV, lane);
    decayed(O, decay, uS, sV, lane);
    lower(O, B, scores, lane);
    __syncthreads();  // all have used this stage
    if (chunk + p.stages < at.chunks) fetch(p, at, chunk + p.stages, stages, bars, t);
    write(p, at, O, uV, chunk, warp, lane);
  }
  state<true>(p, at, S, warp, lane);
}

static constexpr int kPair = 256;

// What the two warps of a pair hand each other, a lane to the same lane: the state as operand and its scales, corrections as operand and theirs, values.
struct Exchange {
  uint4 A[8][32];
  uint4 B[4][32];
  float4 V[8][32];
  float2 scale_a[32];
  float4 scale_b[32];
};

DEVICE void meet(uint32_t id) { asm volatile("bar.sync %0, 64;" ::"r"(id) : "memory"); }

NINFER_KERNEL(delta_pair, DeltaRunParams, kPair, 1) {
  __shared__ __align__(8) uint64_t barriers[8];  // a stage is there, has been used
  const uint32_t t = threadIdx.x, warp = t / 32 % 4, lane = t % 32, stages = shared_at(dynamic), full = shared_at(barriers), used = full + 32;
  const Place at(p);
  Exchange& x = ((Exchange*)(dynamic + p.stages * kStage))[warp];
  if (t < p.stages) barrier_init(full + t * 8, 128 + 1), barrier_init(used + t * 8, 8 * kWarp);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  pdl();
  if (t >= 128) {
    for (uint32_t i = 0; i < min(p.stages, at.chunks); i++) fetch(p, at, i, stages, full, t - 128);
    const Taps taps(p, at, warp, lane);
    for (uint32_t chunk = 0; chunk < at.chunks; chunk++) {
      const uint32_t s = chunk % p.stages, queries = stages + s * kStage + kTile, scores = queries + kTile + kSquare;
      const float* decay = (const float*)(dynamic + s * kStage + 2 * kTile + 2 * kSquare);
      const uint32_t in = scores + kSquare + 2 * kChunk * 4;
      barrier_wait(full + s * 8, chunk / p.stages & 1);
#pragma unroll
      for (uint32_t n = 0; n < 8; n += 2) {
        float v[2][4];
        taps.values(v, in, n, warp, lane);
#pragma unroll
        for (int m = 0; m < 2; m++) x.V[n + m][lane] = make_float4(v[m][0], v[m][1], v[m][2], v[m][3]);
      }
      meet(1 + warp);  // values are there, and so is the state
      if (chunk && chunk - 1 + p.stages < at.chunks) {  // the stage of the chunk before
        barrier_wait(used + (chunk - 1) % p.stages * 8, (chunk - 1) / p.stages & 1);
        fetch(p, at, chunk - 1 + p.stages, stages, full, t - 128);
      }
      uint32_t A[8][4], B[4][4];
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const uint4 v = x.A[k][lane];
        A[k][0] = v.x, A[k][1] = v.y, A[k][2] = v.z, A[k][3] = v.w;
      }
      const float2 a = x.scale_a[lane];
      float O[8][4] = {};
      by_tokens(O, A, queries, lane);
      meet(5 + warp);  // corrections are there, and the state has been read
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const uint4 v = x.B[k][lane];
        B[k][0] = v.x, B[k][1] = v.y, B[k][2] = v.z, B[k][3] = v.w;
      }
      const float4 b = x.scale_b[lane];
      const float uS[2] = {a.x, a.y}, sV[2] = {b.x, b.y}, uV[2] = {b.z, b.w};
      decayed(O, decay, uS, sV, lane);
      lower(O, B, scores, lane);
      __syncwarp();
      warp_arrives(used + s * 8, lane);
      write(p, at, O, uV, chunk, warp, lane);
    }
    return;
  }
  float S[16][4];
  state<false>(p, at, S, warp, lane);
  for (uint32_t chunk = 0; chunk < at.chunks; chunk++) {
    const uint32_t s = chunk % p.stages, keys = stages + s * kStage, inverse = keys + 2 * kTile;
    const float* decay = (const float*)(dynamic + s * kStage + 2 * kTile + 2 * kSquare);
    float most[2], sS[2], uS[2], sR[2], uR[2], sV[2], uV[2];
    uint32_t A[8][4], B[4][4], D[4][4];
    largest<16>(most, S);
#pragma unroll
    for (int i = 0; i < 2; i++) scale_of(most[i], 30, sS[i], uS[i]);
    pack_rows<8>(A, S, sS);
#pragma unroll
    for (int k = 0; k < 8; k++) x.A[k][lane] = make_uint4(A[k][0], A[k][1], A[k][2], A[k][3]);
    x.scale_a[lane] = make_float2(uS[0], uS[1]);
    barrier_wait(full + s * 8, chunk / p.stages & 1);
    float R[8][4] = {}, V[8][4] = {};
    by_tokens(R, A, keys, lane);
    meet(1 + warp);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float4 v4 = x.V[n][lane];
      const float v[4] = {v4.x, v4.y, v4.z, v4.w};
      const float2 f = *(const float2*)(decay + n * 8 + 2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < 4; i++) R[n][i] = v[i] - (i % 2 ? f.y : f.x) * uS[i / 2] * R[n][i];
    }
    largest<8>(most, R);
#pragma unroll
    for (int i = 0; i < 2; i++) scale_of(most[i], 4, sR[i], uR[i]);
    pack_rows<4>(B, R, sR);
    lower(V, B, inverse, lane);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) V[n][i] *= uR[i / 2];
    largest<8>(most, V);
    correction_scale(most, sS, sV, uV);
    corrections(B, D, V, sV, decay, lane);
#pragma unroll
    for (int k = 0; k < 4; k++) x.B[k][lane] = make_uint4(B[k][0], B[k][1], B[k][2], B[k][3]);
    x.scale_b[lane] = make_float4(sV[0], sV[1], uV[0], uV[1]);
    meet(5 + warp);
    forward(S, D, keys, decay[kChunk - 1], sV, uV, lane);
    __syncwarp();
    warp_arrives(used + s * 8, lane);
  }
  state<true>(p, at, S, warp, lane);
}
