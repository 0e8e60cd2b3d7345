// The gated delta rule over many rows of one lane, in chunks of 64 (kernels.md 5.4).
//
//   delta_prepare  all chunks at once: convolution, gates, norms of q and k; the inverse of each chunk's triangle; decayed scores. Grid: chunk, key head.
//   delta_run      chunk after chunk, the state in registers: v' = inverse*beta*(v - decay*k*S), o = decay*q*S + scores*v', S = decay*S + k'*v'. Grid: head and half of its columns.
//   delta_finish   norm and gate of eight rows of a head a warp; the convolution's window. Grid: any.
//   sizes          sizes and offsets of every parameter struct, compared with Go's at start.
//
// Products use FP16 operands: keys and queries have length one, entries of the inverse and the scores are at most one, and state,
// corrections and what is left of the values are brought to that range by a power of two a column. So every operand has eleven significant bits, as
// TF32 has, at twice its speed. Sums and the state itself are FP32.
#include "common.cuh"
#include "sizes_gen.cuh"

extern __shared__ __align__(128) uint8_t dynamic[];

static constexpr uint32_t kChunk = 64, kDim = 128, kTile = kChunk * kDim * 2, kSquare = kChunk * kChunk * 2;
static constexpr uint32_t kBatch = 3;       // heads of a key head at a time
static constexpr uint32_t kSums = 68;       // pitch of products

// Row i of a convolution's inputs, channel on: what the window holds before the pass, zeros after it.
DEVICE const bf16* input_row(const bf16* x, const bf16* window, int i, uint32_t ld, uint32_t c) {
  return i < 0 ? window + (uint64_t)(i + 3) * c : x + (uint64_t)i * ld;
}

static constexpr int kPrepare = 256;

NINFER_KERNEL(delta_prepare, DeltaPrepareParams, kPrepare, 2) {
  // Keys and queries; then of three heads what is below the diagonal blocks of the triangles, and the inverses of those blocks. Products; diagonal blocks; gates.
  uint8_t* const operands = dynamic;
  uint8_t* const below = dynamic;                                           // FP16 [3][64][64], turned
  uint8_t* const corner = below + kBatch * kSquare;                         // FP16 [3][64][16]
  float* const kk = (float*)(dynamic + 2 * kTile);                          // [64][kSums]
  float* const qk = kk + kChunk * kSums;
  float* const diagonal = qk + kChunk * kSums;                              // [3][64][16]
  float* const sum = diagonal + kBatch * kChunk * 16;                       // [3][64]
  float* const beta = sum + kBatch * kChunk;
  float* const own = beta + kBatch * kChunk;                                // [64]: q.k of a token with itself, the only term of a first token
  pdl();
  const uint32_t chunk = blockIdx.x, kh = blockIdx.y, t = threadIdx.x, warp = t / 32, lane = t % 32, group = p.heads / p.key_heads;
  const uint32_t c = (2 * p.key_heads + p.heads) * kDim;
  {  // eight tokens a warp, four channels of queries and of keys a lane
    const uint32_t channel[2] = {kh * kDim + lane * 4, (p.key_heads + kh) * kDim + lane * 4};
    uint2 in[2][11];
    const int first = (int)(chunk * kChunk + warp * 8) - 3;
#pragma unroll
    for (int i = 0; i < 11; i++)
#pragma unroll
      for (int part = 0; part < 2; part++)
        in[part][i] = first + i < (int)p.rows ? *(const uint2*)(input_row(p.x, p.window, first + i, p.x_ld, c) + channel[part]) : make_uint2(0, 0);
    float w[2][4][4];
#pragma unroll
    for (int part = 0; part < 2; part++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float4 v = *(const float4*)(p.conv + (uint64_t)i * c + channel[part]);
        w[part][i][0] = v.x, w[part][i][1] = v.y, w[part][i][2] = v.z, w[part][i][3] = v.w;
      }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float v[2][4];
#pragma unroll
      for (int part = 0; part < 2; part++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float s = 0.0f;
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const uint32_t word = j < 2 ? in[part][i + k].x : in[part][i + k].y;
            s = fmaf(w[part][k][j], j % 2 ? hi(word) : lo(word), s);
          }
          v[part][j] = silu(s);
        }
      float square[2], scale[2];
#pragma unroll
      for (int part = 0; part < 2; part++) square[part] = v[part][0] * v[part][0] + v[part][1] * v[part][1] + v[part][2] * v[part][2] + v[part][3] * v[part][3];
      float dot = v[0][0] * v[1][0] + v[0][1] * v[1][1] + v[0][2] * v[1][2] + v[0][3] * v[1][3];
#pragma unroll
      for (int o = 16; o; o >>= 1) {
        square[0] += __shfl_xor_sync(~0u, square[0], o);
        square[1] += __shfl_xor_sync(~0u, square[1], o);
        dot += __shfl_xor_sync(~0u, dot, o);
      }
      const uint32_t r = warp * 8 + i, at = r * 256 + ((lane / 2) ^ (r & 7)) * 16 + lane % 2 * 8;
#pragma unroll
      for (int part = 0; part < 2; part++) {
        scale[part] = first + 3 + i < (int)p.rows ? rsqrtf(square[part] + 1e-6f) : 0.0f;
        const uint2 packed = make_uint2(pack_half(v[part][0] * scale[part], v[part][1] * scale[part]), pack_half(v[part][2] * scale[part], v[part][3] * scale[part]));
        *(uint2*)(operands + part * kTile + at) = packed;
        *(uint2*)((uint8_t*)(part ? p.keys : p.queries) + ((uint64_t)chunk * p.key_heads + kh) * kTile + at) = packed;
      }
      if (lane == 0) own[r] = dot * scale[0] * scale[1];
    }
  }
  __syncthreads();
  {  // k.k and q.k: sixteen rows and half of the columns a warp
    float acc[2][4][4] = {};
    const uint32_t m = warp % 4 * 16, n = warp / 4 * 32;
    const uint32_t queries = shared_at(operands), keys = queries + kTile;
    const uint32_t ra = m + lane % 16, ca = lane / 16, rb = n + lane / 16 * 8 + lane % 8, cb = lane / 8 % 2;
#pragma unroll
    for (uint32_t ks = 0; ks < 8; ks++) {
      uint32_t a[2][4], b[2][4];
      const uint32_t at = ra * 256 + (((2 * ks + ca) ^ (ra & 7)) << 4);
      matrices(a[0], keys + at);
      matrices(a[1], queries + at);
#pragma unroll
      for (uint32_t i = 0; i < 2; i++) matrices(b[i], keys + (rb + i * 16) * 256 + (((2 * ks + cb) ^ (rb & 7)) << 4));
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < 4; j++) tensor_half(acc[h][j], a[h], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float* to = (h ? qk : kk) + (m + lane / 4) * kSums + n + j * 8 + lane % 4 * 2;
        *(float2*)to = make_float2(acc[h][j][0], acc[h][j][1]);
        *(float2*)(to + 8 * kSums) = make_float2(acc[h][j][2], acc[h][j][3]);
      }
  }
  for (uint32_t from = 0; from < group; from += kBatch) {
    const uint32_t count = min(kBatch, group - from), head0 = kh * group + from;
    __syncthreads();  // products are there; operands and the triangles of the heads before have been used
    if (warp < count) {
      const uint32_t head = head0 + warp;
      const float rate = -expf(p.alog[head]), dt = p.dt[head];
      float g[2], be[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t row = chunk * kChunk + lane * 2 + i;
        g[i] = row < p.rows ? rate * softplus(from_bf16(p.a[(uint64_t)row * p.a_ld + head]) + dt) : 0.0f;
        be[i] = row < p.rows ? sigmoid(from_bf16(p.b[(uint64_t)row * p.a_ld + head])) : 0.0f;
      }
      float s = g[0] + g[1];
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        const float other = __shfl_up_sync(~0u, s, o);
        if (lane >= o) s += other;
      }
      const float all = __shfl_sync(~0u, s, 31), c0 = s - g[1];
      *(float2*)(sum + warp * kChunk + lane * 2) = make_float2(c0, s);
      *(float2*)(beta + warp * kChunk + lane * 2) = make_float2(be[0], be[1]);
      float* to = p.decay + ((uint64_t)chunk * p.heads + head) * 2 * kChunk + lane * 2;
      *(float2*)to = make_float2(expf(c0), expf(s));
      *(float2*)(to + kChunk) = make_float2(expf(all - c0), expf(all - s));
    }
    __syncthreads();
    // Triangles and scores as far as the diagonal blocks of sixteen, two neighbours a thread: ten blocks a head.
    for (uint32_t i = t; i < count * 10 * 128; i += kPrepare) {
      const uint32_t h = i / 1280, block = i / 128 % 10, bi = (block > 0) + (block > 2) + (block > 5), bj = block - bi * (bi + 1) / 2;
      const uint32_t r = bi * 16 + i / 8 % 16, j = bj * 16 + i % 8 * 2;
      const float cr = sum[h * kChunk + r];
      const float2 cj = *(const float2*)(sum + h * kChunk + j);
      const float e0 = j <= r ? __expf(cr - cj.x) : 0.0f, e1 = j + 1 <= r ? __expf(cr - cj.y) : 0.0f;
      const float2 k2 = *(const float2*)(kk + r * kSums + j);
      float2 q2 = *(const float2*)(qk + r * kSums + j);
      if (j == r) q2.x = own[r];
      if (j + 1 == r) q2.y = own[r];
      const float be = beta[h * kChunk + r], a0 = j < r ? be * e0 * k2.x : 0.0f, a1 = j + 1 < r ? be * e1 * k2.y : 0.0f;
      const uint32_t at = r * 128 + ((j / 8) ^ (r & 7)) * 16 + j % 8 * 2;
      if (bi == bj) *(float2*)(diagonal + (h * kChunk + r) * 16 + j % 16) = make_float2(a0, a1);
      else *(uint32_t*)(below + h * kSquare + at) = pack_half(a0, a1);
      *(uint32_t*)((uint8_t*)p.scores + ((uint64_t)chunk * p.heads + head0 + h) * kSquare + at) = pack_half(e0 * q2.x * 0.08838834764831845f, e1 * q2.y * 0.08838834764831845f);
    }
    __syncthreads();
    if (t < count * kChunk) {  // a column of a diagonal block's inverse a thread
      const uint32_t h = t / kChunk, block = t / 16 % 4, j = t % 16;
      const float* a = diagonal + (h * kChunk + block * 16) * 16;
      float x[16];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        float s[2] = {(uint32_t)i == j ? 1.0f : 0.0f, 0.0f};
#pragma unroll
        for (int m = 0; m < i; m++) s[m % 2] = fmaf(-a[i * 16 + m], x[m], s[m % 2]);
        x[i] = s[0] + s[1];
      }
      const float be = beta[h * kChunk + block * 16 + j];
      uint8_t* to = (uint8_t*)p.inverse + ((uint64_t)chunk * p.heads + head0 + h) * kSquare;
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const uint32_t r = block * 16 + i;
        *(__half*)(corner + (h * kChunk + r) * 32 + j * 2) = __float2half_rn(x[i]);
        *(__half*)(to + r * 128 + ((block * 2 + j / 8) ^ (r & 7)) * 16 + j % 8 * 2) = __float2half_rn(x[i] * be);
      }
    }
    __syncthreads();
    if (warp < 2 * count) {
      // What is below the diagonal blocks, a column of blocks after the other: X(i,j) = -X(i,i) * sum over k of A(i,k) X(k,j), all turned, so that a
      // product is an operand of the next one. Column 0 in one warp, columns 1 and 2 in the other.
      const uint32_t h = warp / 2, rows = lane / 16 * 8 + lane % 8, piece = lane / 8 % 2;
      const uint32_t a = shared_at(below + h * kSquare), x = shared_at(corner + h * kChunk * 32);
      uint8_t* to = (uint8_t*)p.inverse + ((uint64_t)chunk * p.heads + head0 + h) * kSquare;
      for (uint32_t j = warp % 2; j < (warp % 2 ? 3u : 1u); j++) {
        const float be[2] = {beta[h * kChunk + j * 16 + lane / 4], beta[h * kChunk + j * 16 + lane / 4 + 8]};
        uint32_t X[4][4];
        uint32_t first[4];
        matrices_turned(first, x + (j * 16 + rows) * 32 + piece * 16);
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
#pragma unroll
          for (int i = 0; i < 4; i++) X[k][i] = first[i];
#pragma unroll
        for (uint32_t i = 1; i < 4; i++) {
          if (i <= j) continue;
          float sums[2][4] = {}, next[2][4] = {};
#pragma unroll
          for (uint32_t k = 0; k < i; k++) {
            if (k < j) continue;
            uint32_t b[4];
            const uint32_t r = i * 16 + rows;
            matrices(b, a + r * 128 + (((2 * k + piece) ^ (r & 7)) << 4));
            tensor_half(sums[0], X[k], b[0], b[1]);
            tensor_half(sums[1], X[k], b[2], b[3]);
          }
          const uint32_t operand[4] = {pack_half(-sums[0][0], -sums[0][1]), pack_half(-sums[0][2], -sums[0][3]), pack_half(-sums[1][0], -sums[1][1]), pack_half(-sums[1][2], -sums[1][3])};
          uint32_t b[4];
          matrices(b, x + (i * 16 + rows) * 32 + piece * 16);
          tensor_half(next[0], operand, b[0], b[1]);
          tensor_half(next[1], operand, b[2], b[3]);
#pragma unroll
          for (int m = 0; m < 4; m++) {
            const float v0 = next[m / 2][m % 2 * 2], v1 = next[m / 2][m % 2 * 2 + 1];
            X[i][m] = pack_half(v0, v1);
            const uint32_t r = i * 16 + m / 2 * 8 + lane / 4;
            *(uint32_t*)(to + r * 128 + ((j * 2 + m % 2) ^ (r & 7)) * 16 + lane % 4 * 4) = turn(pack_half(v0 * be[m % 2], v1 * be[m % 2]));
          }
        }
      }
    }
  }
}

static constexpr int kRun = 128;
static constexpr uint32_t kInputs = 68 * 128;  // bytes of 67 rows of a block's columns before the convolution
static constexpr uint32_t kStage = 2 * kTile + 2 * kSquare + 2 * kChunk * 4 + kInputs;

// The power of two that brings a magnitude to 1..2, and what undoes it.
DEVICE void scale_of(float most, uint32_t least, float& scale, float& undo) {
  const uint32_t e = min(max(__float_as_uint(most) >> 23, least), 250u);
  scale = __uint_as_float((254 - e) << 23), undo = __uint_as_float(e << 23);
}

NINFER_KERNEL(delta_run, DeltaRunParams, kRun, 1) {
  __shared__ __align__(8) uint64_t full[4];
  const uint32_t head = blockIdx.x / 2, half = blockIdx.x % 2, t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, q4 = lane % 4;
  const uint32_t kh = head / (p.heads / p.key_heads), c = (2 * p.key_heads + p.heads) * kDim, chunks = (p.rows + kChunk - 1) / kChunk;
  const uint32_t channel = (2 * p.key_heads + head) * kDim + half * 64;  // the block's first
  const uint32_t stages = shared_at(dynamic), bars = shared_at(full);
  if (t < p.stages) barrier_init(bars + t * 8, kRun + 1);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  pdl();
  auto fetch = [&](uint32_t chunk) {
    const uint32_t s = chunk % p.stages, to = stages + s * kStage, bar = bars + s * 8;
    if (t == 0) {
      barrier_expect(bar, 2 * kTile + 2 * kSquare + 2 * kChunk * 4);
      const uint64_t k = (uint64_t)chunk * p.key_heads + kh, h = (uint64_t)chunk * p.heads + head;
      copy_bulk(to, (const uint8_t*)p.keys + k * kTile, kTile, bar);
      copy_bulk(to + kTile, (const uint8_t*)p.queries + k * kTile, kTile, bar);
      copy_bulk(to + 2 * kTile, (const uint8_t*)p.inverse + h * kSquare, kSquare, bar);
      copy_bulk(to + 2 * kTile + kSquare, (const uint8_t*)p.scores + h * kSquare, kSquare, bar);
      copy_bulk(to + 2 * kTile + 2 * kSquare, p.decay + h * 2 * kChunk, 2 * kChunk * 4, bar);
    }
    const uint32_t in = to + 2 * kTile + 2 * kSquare + 2 * kChunk * 4;
#pragma unroll
    for (uint32_t i = 0; i < 5; i++) {
      const uint32_t r = i * 16 + t / 8, piece = t % 8;
      const int row = (int)(chunk * kChunk + r) - 3;
      if (r < 67) copy16(in + r * 128 + ((piece ^ (r & 7)) << 4), row < (int)p.rows ? input_row(p.x, p.window, row, p.x_ld, c) + channel + piece * 8 : p.x, row < (int)p.rows);
    }
    barrier_copies(bar);
  };
  for (uint32_t i = 0; i < min(p.stages, chunks); i++) fetch(i);
  // The state, columns by keys: this warp's sixteen columns, columns g and g+8 of them and keys 8n + 2*q4 and one more in this lane.
  const uint32_t column = half * 64 + warp * 16 + g;
  float S[16][4];
  const uint64_t state = (uint64_t)head * kDim * kDim + column;
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint64_t at = state + (n * 8 + 2 * q4 + i % 2) * kDim + i / 2 * 8;
      S[n][i] = p.half_state ? from_bf16(((const bf16*)p.state)[at]) : ((const float*)p.state)[at];
    }
  float tap[4][2];
#pragma unroll
  for (int i = 0; i < 4; i++) tap[i][0] = p.conv[(uint64_t)i * c + channel + warp * 16 + g], tap[i][1] = p.conv[(uint64_t)i * c + channel + warp * 16 + g + 8];
  const uint32_t x7 = lane & 7, rowB = (lane / 16 * 8 + lane % 8) * 256, cB = lane / 8 % 2;  // rows of tokens, pieces of keys
  const uint32_t rowT = (lane / 8 % 2 * 8 + lane % 8) * 256, cT = lane / 16;                 // the same turned
  const uint32_t rowS = lane % 8 * 128, cS = lane / 8;                                      // squares
  __half* const out = (__half*)p.out + head * kDim + half * 64 + warp * 16 + 2 * q4;
  for (uint32_t chunk = 0; chunk < chunks; chunk++) {
    const uint32_t s = chunk % p.stages, keys = stages + s * kStage, queries = keys + kTile, inverse = queries + kTile, scores = inverse + kSquare;
    const float* decay = (const float*)(dynamic + s * kStage + 2 * kTile + 2 * kSquare);
    const uint32_t in = scores + kSquare + 2 * kChunk * 4;
    barrier_wait(bars + s * 8, chunk / p.stages & 1);
    float sS[2], uS[2];
    uint32_t A[8][4];
    {
      float most[2] = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) most[i / 2] = fmaxf(most[i / 2], fabsf(S[n][i]));
#pragma unroll
      for (int i = 0; i < 2; i++) scale_of(quad_max(most[i]), 30, sS[i], uS[i]);
#pragma unroll
      for (int k = 0; k < 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) A[k][i] = pack_half(S[2 * k + i / 2][i % 2 * 2] * sS[i % 2], S[2 * k + i / 2][i % 2 * 2 + 1] * sS[i % 2]);
    }
    float R[8][4] = {}, O[8][4] = {};
#pragma unroll
    for (uint32_t k = 0; k < 8; k++)
#pragma unroll
      for (uint32_t n = 0; n < 8; n += 2) {
        uint32_t b[4];
        matrices(b, keys + rowB + n * 8 * 256 + (((2 * k + cB) ^ x7) << 4));
        tensor_half(R[n], A[k], b[0], b[1]);
        tensor_half(R[n + 1], A[k], b[2], b[3]);
      }
#pragma unroll
    for (uint32_t k = 0; k < 8; k++)
#pragma unroll
      for (uint32_t n = 0; n < 8; n += 2) {
        uint32_t b[4];
        matrices(b, queries + rowB + n * 8 * 256 + (((2 * k + cB) ^ x7) << 4));
        tensor_half(O[n], A[k], b[0], b[1]);
        tensor_half(O[n + 1], A[k], b[2], b[3]);
      }
    // What is left of the values: convolution here, decayed product of key and state taken off.
    uint32_t B[4][4];
    float uR[2], sV[2], uV[2];
    {
      float most[2] = {0.0f, 0.0f};
#pragma unroll
      for (uint32_t n = 0; n < 8; n += 2) {
        float v[8] = {};
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
          uint32_t x[4];
          const uint32_t r = n * 8 + j + lane / 16 * 8 + lane % 8;
          matrices_turned(x, in + r * 128 + (((warp * 2 + lane / 8 % 2) ^ (r & 7)) << 4));
#pragma unroll
          for (int i = 0; i < 4; i++) v[2 * i] = fmaf(tap[j][i % 2], lo(x[i]), v[2 * i]), v[2 * i + 1] = fmaf(tap[j][i % 2], hi(x[i]), v[2 * i + 1]);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const float2 f = *(const float2*)(decay + (n + m) * 8 + 2 * q4);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float& r = R[n + m][i];
            r = silu(v[4 * m + i]) - (i % 2 ? f.y : f.x) * uS[i / 2] * r;
            most[i / 2] = fmaxf(most[i / 2], fabsf(r));
          }
        }
      }
      float sR[2];
#pragma unroll
      for (int i = 0; i < 2; i++) scale_of(quad_max(most[i]), 4, sR[i], uR[i]);
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) B[k][i] = pack_half(R[2 * k + i / 2][i % 2 * 2] * sR[i % 2], R[2 * k + i / 2][i % 2 * 2 + 1] * sR[i % 2]);
    }
    // Products with a square whose upper triangle is zero, tokens in steps of sixteen as far as the diagonal.
    auto lower = [&](float (*acc)[4], const uint32_t (*a)[4], uint32_t square) {
#pragma unroll
      for (uint32_t k = 0; k < 4; k += 2)
#pragma unroll
        for (uint32_t n = 2 * k; n < 8; n++) {
          uint32_t b[4];
          matrices(b, square + rowS + n * 8 * 128 + (((2 * k + cS) ^ x7) << 4));
          tensor_half(acc[n], a[k], b[0], b[1]);
          if (n / 2 > k) tensor_half(acc[n], a[k + 1], b[2], b[3]);
        }
    };
    float V[8][4] = {};
    lower(V, B, inverse);
    uint32_t D[4][4];
    {
      float most[2] = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) most[i / 2] = fmaxf(most[i / 2], fabsf(V[n][i] *= uR[i / 2]));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        // Never so large that the state would leave its range: where corrections are 2^-24 of it they count for nothing.
        scale_of(quad_max(most[i]), 4, sV[i], uV[i]);
        const uint32_t bound = __float_as_uint(sS[i]) + (24u << 23);
        if (__float_as_uint(sV[i]) > bound) sV[i] = __uint_as_float(bound), uV[i] = __uint_as_float((254u << 23) - bound);
      }
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float v0 = V[2 * k + i / 2][i % 2 * 2] * sV[i % 2], v1 = V[2 * k + i / 2][i % 2 * 2 + 1] * sV[i % 2];
          const float2 f = *(const float2*)(decay + kChunk + (2 * k + i / 2) * 8 + 2 * q4);
          B[k][i] = pack_half(v0, v1);
          D[k][i] = pack_half(v0 * f.x, v1 * f.y);
        }
    }
    const float end = decay[kChunk - 1];
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) S[n][i] *= end * sV[i / 2];
#pragma unroll
    for (uint32_t k = 0; k < 4; k++)
#pragma unroll
      for (uint32_t n = 0; n < 16; n += 2) {
        uint32_t b[4];
        matrices_turned(b, keys + rowT + k * 16 * 256 + (((n + cT) ^ x7) << 4));
        tensor_half(S[n], D[k], b[0], b[1]);
        tensor_half(S[n + 1], D[k], b[2], b[3]);
      }
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) S[n][i] *= uV[i / 2];
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float2 f = *(const float2*)(decay + n * 8 + 2 * q4);
#pragma unroll
      for (int i = 0; i < 4; i++) O[n][i] *= (i % 2 ? f.y : f.x) * 0.08838834764831845f * (uS[i / 2] * sV[i / 2]);
    }
    lower(O, B, scores);
    __syncthreads();  // all have used this stage
    if (chunk + p.stages < chunks) fetch(chunk + p.stages);
    float sO[2], uO[2];
    {
      float most[2] = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) most[i / 2] = fmaxf(most[i / 2], fabsf(O[n][i]));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        scale_of(quad_max(most[i]), 4, sO[i], uO[i]);
        if (q4 == 0) p.scales[((uint64_t)chunk * p.heads + head) * kDim + column + 8 * i] = uO[i] * uV[i];
      }
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const uint32_t row = chunk * kChunk + n * 8 + g;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t v = turn(pack_half(O[n][2 * i] * sO[i], O[n][2 * i + 1] * sO[i]));
        if (row < p.rows) *(uint32_t*)(out + (uint64_t)row * p.heads * kDim + i * 8) = v;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint64_t at = state + (n * 8 + 2 * q4 + i % 2) * kDim + i / 2 * 8;
      if (p.half_state) ((bf16*)p.state)[at] = to_bf16(S[n][i]);
      else ((float*)p.state)[at] = S[n][i];
    }
}

static constexpr int kFinish = 256;
static constexpr uint32_t kTogether = 8;  // rows of a warp, of one chunk

NINFER_KERNEL(delta_finish, DeltaFinishParams, kFinish, 4) {
  pdl();
  const uint32_t t = threadIdx.x, lane = t % 32, unit = blockIdx.x * (kFinish / 32) + t / 32, head = unit % p.heads, first = unit / p.heads * kTogether;
  if (first < p.rows) {
    const float4 w = *(const float4*)(p.norm + lane * 4);
    const float4 f = __ldcg((const float4*)(p.scales + ((uint64_t)(first / kChunk) * p.heads + head) * kDim + lane * 4));
    uint2 o[kTogether], z[kTogether];
#pragma unroll
    for (uint32_t i = 0; i < kTogether; i++) {
      const uint64_t row = min(first + i, p.rows - 1);
      o[i] = __ldcg((const uint2*)((const __half*)p.o + (row * p.heads + head) * kDim + lane * 4));
      z[i] = __ldcg((const uint2*)(p.z + row * p.z_ld + head * kDim + lane * 4));
    }
#pragma unroll
    for (uint32_t i = 0; i < kTogether; i++) {
      const float2 a = __half22float2(*(const __half2*)&o[i].x), b = __half22float2(*(const __half2*)&o[i].y);
      const float v[4] = {a.x * f.x, a.y * f.y, b.x * f.z, b.y * f.w};
      const float scale = rsqrtf(warp_sum(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / kDim + p.eps);
      if (first + i < p.rows)
        *(uint2*)(p.out + (uint64_t)(first + i) * p.out_ld + head * kDim + lane * 4) =
            make_uint2(pack_bf16(v[0] * scale * w.x * sigmoid(lo(z[i].x)), v[1] * scale * w.y * sigmoid(hi(z[i].x))),
                       pack_bf16(v[2] * scale * w.z * sigmoid(lo(z[i].y)), v[3] * scale * w.w * sigmoid(hi(z[i].y))));
    }
  }
  for (uint32_t ch = blockIdx.x * kFinish + t; ch < p.c; ch += gridDim.x * kFinish)
    for (uint32_t i = 0; i < 3; i++) p.window[(uint64_t)i * p.c + ch] = input_row(p.x, p.window, (int)(p.rows + i) - 3, p.x_ld, p.c)[ch];
}

NINFER_KERNEL(sizes, SizesParams, 32, 1) {
  pdl();
  for (uint32_t i = threadIdx.x; i < p.n; i += 32) p.out[i] = i < kSizeCount ? kSizes[i] : ~0u;
}
