// The gated delta rule over many rows of one lane, in chunks of 64 (transformers, Qwen4ExpTextGatedDeltaNet): what is before and after the pass over the chunks (delta_run.cu).
//
//   delta_prepare  all chunks at once: convolution, gates, norms of q and k; the inverse of each chunk's triangle; decayed scores. Grid: chunk, key head.
//   delta_finish   norm and gate of eight rows of a head a warp; the convolution's window. Grid: any.
//   sizes          sizes and offsets of every parameter struct, compared with Go's at start.
#include "delta.cuh"
#include "sizes_gen.cuh"

static constexpr int kPrepare = 256;

NINFER_KERNEL(delta_prepare, DeltaPrepareParams, kPrepare, 3) {
  // Keys and queries; then of three heads what is below the diagonal blocks of the triangles, and the inverses of those blocks. Diagonal blocks; gates.
  uint8_t* const operands = dynamic;
  uint8_t* const below = dynamic;                                           // FP16 [3][64][64], turned
  uint8_t* const corner = below + kBatch * kSquare;                         // FP16 [3][64][16]
  float* const diagonal = (float*)(dynamic + 2 * kTile);                    // [3][64][16]
  float* const sum = diagonal + kBatch * kChunk * 16;                       // [3][64]
  float* const beta = sum + kBatch * kChunk;
  float* const own = beta + kBatch * kChunk;                                // [64]: q.k of a token with itself, the only term of a first token
  pdl();
  const uint32_t chunk = blockIdx.x, kh = blockIdx.y, t = threadIdx.x, warp = t / 32, lane = t % 32, group = p.heads / p.key_heads;
  const uint32_t c = (2 * p.key_heads + p.heads) * kDim;
  // Eight tokens a warp, four at a time; four channels of queries and of keys a lane.
#pragma unroll 1
  for (uint32_t four = 0; four < 8; four += 4) {
    const uint32_t channel[2] = {kh * kDim + lane * 4, (p.key_heads + kh) * kDim + lane * 4};
    uint2 in[2][7];
    const int first = (int)(chunk * kChunk + warp * 8 + four) - 3;
#pragma unroll
    for (int i = 0; i < 7; i++)
#pragma unroll
      for (int part = 0; part < 2; part++)
        in[part][i] = first + i < (int)p.rows ? *(const uint2*)(input_row(p.x, p.window, first + i, p.x_ld, c) + channel[part]) : make_uint2(0, 0);
    float v[2][4][4];
#pragma unroll
    for (int part = 0; part < 2; part++) {
      float w[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float4 f = *(const float4*)(p.conv + (uint64_t)i * c + channel[part]);
        w[i][0] = f.x, w[i][1] = f.y, w[i][2] = f.z, w[i][3] = f.w;
      }
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float s = 0.0f;
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const uint32_t word = j < 2 ? in[part][i + k].x : in[part][i + k].y;
            s = fmaf(w[k][j], j % 2 ? hi(word) : lo(word), s);
          }
          v[part][i][j] = silu(s);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float square[2], scale[2];
#pragma unroll
      for (int part = 0; part < 2; part++)
        square[part] = v[part][i][0] * v[part][i][0] + v[part][i][1] * v[part][i][1] + v[part][i][2] * v[part][i][2] + v[part][i][3] * v[part][i][3];
      float dot = v[0][i][0] * v[1][i][0] + v[0][i][1] * v[1][i][1] + v[0][i][2] * v[1][i][2] + v[0][i][3] * v[1][i][3];
#pragma unroll
      for (int o = 16; o; o >>= 1) {
        square[0] += __shfl_xor_sync(~0u, square[0], o);
        square[1] += __shfl_xor_sync(~0u, square[1], o);
        dot += __shfl_xor_sync(~0u, dot, o);
      }
      const uint32_t r = warp * 8 + four + i, at = tile_at(r, lane / 2) + lane % 2 * 8;
#pragma unroll
      for (int part = 0; part < 2; part++) {
        scale[part] = first + 3 + i < (int)p.rows ? rsqrtf(square[part] + 1e-6f) : 0.0f;
        const uint2 packed = make_uint2(pack_half(v[part][i][0] * scale[part], v[part][i][1] * scale[part]), pack_half(v[part][i][2] * scale[part], v[part][i][3] * scale[part]));
        *(uint2*)(operands + part * kTile + at) = packed;
        *(uint2*)((uint8_t*)(part ? p.keys : p.queries) + ((uint64_t)chunk * p.key_heads + kh) * kTile + at) = packed;
      }
      if (lane == 0) own[r] = dot * scale[0] * scale[1];
    }
  }
  __syncthreads();
  // k.k and q.k: sixteen rows and half of the columns a warp, as far as the diagonal blocks of sixteen.
  float acc[2][4][4] = {};
  const uint32_t m = warp % 4 * 16, n = warp / 4 * 32;
  if (n <= m) {
    const uint32_t queries = shared_at(operands), keys = queries + kTile;
    const uint32_t ra = m + lane % 16, ca = lane / 16, rb = n + lane / 16 * 8 + lane % 8, cb = lane / 8 % 2;
#pragma unroll
    for (uint32_t ks = 0; ks < 8; ks++) {
      uint32_t a[2][4], b[2][4];
      const uint32_t at = tile_at(ra, 2 * ks + ca);
      matrices(a[0], keys + at);
      matrices(a[1], queries + at);
#pragma unroll
      for (uint32_t i = 0; i < 2; i++) matrices(b[i], keys + tile_at(rb + i * 16, 2 * ks + cb));
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < 4; j++) tensor_half(acc[h][j], a[h], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
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
    // Triangles and scores, from the products in this lane: rows m + lane/4 and eight more, columns n + 8j + 2*(lane%4) and one more.
    if (n <= m) {
#pragma unroll 1
      for (uint32_t h = 0; h < count; h++) {
        uint8_t* const scores = (uint8_t*)p.scores + ((uint64_t)chunk * p.heads + head0 + h) * kSquare;
        uint8_t* const inverse = (uint8_t*)p.inverse + ((uint64_t)chunk * p.heads + head0 + h) * kSquare;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
          const uint32_t r = m + i * 8 + lane / 4;
          const float cr = sum[h * kChunk + r], be = beta[h * kChunk + r], exact = own[r];
#pragma unroll
          for (uint32_t k = 0; k < 4; k++) {
            const uint32_t j = n + k * 8 + lane % 4 * 2;
            const uint32_t at = r * 128 + ((j / 8) ^ (r & 7)) * 16 + j % 8 * 2;
            if (n + k / 2 * 16 > m) {  // what is right of a diagonal block with an even number is zero, the rest is never looked at
              if (n + k / 2 * 16 == m + 16 && m % 32 == 0) *(uint32_t*)(scores + at) = *(uint32_t*)(inverse + at) = 0;
              continue;
            }
            const float2 cj = *(const float2*)(sum + h * kChunk + j);
            const float e0 = j <= r ? __expf(cr - cj.x) : 0.0f, e1 = j + 1 <= r ? __expf(cr - cj.y) : 0.0f;
            const float a0 = j < r ? be * e0 * acc[0][k][2 * i] : 0.0f, a1 = j + 1 < r ? be * e1 * acc[0][k][2 * i + 1] : 0.0f;
            const float q0 = j == r ? exact : acc[1][k][2 * i], q1 = j + 1 == r ? exact : acc[1][k][2 * i + 1];
            if (n + k / 2 * 16 == m) *(float2*)(diagonal + (h * kChunk + r) * 16 + j % 16) = make_float2(a0, a1);
            else *(uint32_t*)(below + h * kSquare + at) = pack_half(a0, a1);
            *(uint32_t*)(scores + at) = pack_half(e0 * q0 * 0.08838834764831845f, e1 * q1 * 0.08838834764831845f);
          }
        }
      }
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
