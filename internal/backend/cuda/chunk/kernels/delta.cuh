// What the kernels of the delta rule share.
#pragma once
#include "common.cuh"

extern __shared__ __align__(1024) uint8_t dynamic[];

static constexpr uint32_t kChunk = 64, kDim = 128, kTile = kChunk * kDim * 2, kSquare = kChunk * kChunk * 2;
static constexpr uint32_t kBatch = 3;       // heads of a key head at a time

// Where a piece (eight values) of a row of keys or queries is: parts of 64 values, rows of 128 bytes whose pieces are turned by the row.
DEVICE uint32_t tile_at(uint32_t r, uint32_t piece) { return piece / 8 * (kTile / 2) + r * 128 + (((piece ^ r) & 7) << 4); }

// Row i of a convolution's inputs, channel on: what the window holds before the pass, zeros after it.
DEVICE const bf16* input_row(const bf16* x, const bf16* window, int i, uint32_t ld, uint32_t c) {
  return i < 0 ? window + (uint64_t)(i + 3) * c : x + (uint64_t)i * ld;
}

static constexpr uint32_t kInputs = 68 * 128;  // bytes of 67 rows of a block's columns before the convolution
static constexpr uint32_t kStage = 2 * kTile + 2 * kSquare + 2 * kChunk * 4 + kInputs;

// The power of two that brings a magnitude to 1..2, and what undoes it.
DEVICE void scale_of(float most, uint32_t least, float& scale, float& undo) {
  const uint32_t e = min(max(__float_as_uint(most) >> 23, least), 250u);
  scale = __uint_as_float((254 - e) << 23), undo = __uint_as_float(e << 23);
}

// acc += a * a square whose upper triangle is zero, turned: tokens in steps of sixteen as far as the diagonal.
DEVICE void lower(float (*acc)[4], const uint32_t (*a)[4], uint32_t square, uint32_t lane) {
#pragma unroll
  for (uint32_t k = 0; k < 4; k += 2)
#pragma unroll
    for (uint32_t n = 2 * k; n < 8; n++) {
      uint32_t b[4];
      matrices(b, square + (n * 8 + lane % 8) * 128 + (((2 * k + lane / 8) ^ (lane & 7)) << 4));
      tensor_half(acc[n], a[k], b[0], b[1]);
      if (n / 2 > k) tensor_half(acc[n], a[k + 1], b[2], b[3]);
    }
}

// acc += a [16 columns x 128 keys] * tokens [64][128], turned.
DEVICE void by_tokens(float (*acc)[4], const uint32_t (*a)[4], uint32_t tokens, uint32_t lane) {
  const uint32_t row = (lane / 16 * 8 + lane % 8) * 128, c = lane / 8 % 2;
#pragma unroll
  for (uint32_t k = 0; k < 8; k++)
#pragma unroll
    for (uint32_t n = 0; n < 8; n += 2) {
      uint32_t b[4];
      matrices(b, tokens + k / 4 * (kTile / 2) + row + n * 8 * 128 + (((2 * k + c) ^ lane) & 7) * 16);
      tensor_half(acc[n], a[k], b[0], b[1]);
      tensor_half(acc[n + 1], a[k], b[2], b[3]);
    }
}

// acc += a [16 columns x 64 tokens] * tokens [64][128].
DEVICE void by_keys(float (*acc)[4], const uint32_t (*a)[4], uint32_t tokens, uint32_t lane) {
  const uint32_t row = (lane / 8 % 2 * 8 + lane % 8) * 128, c = lane / 16;
#pragma unroll
  for (uint32_t k = 0; k < 4; k++)
#pragma unroll
    for (uint32_t n = 0; n < 16; n += 2) {
      uint32_t b[4];
      matrices_turned(b, tokens + n / 8 * (kTile / 2) + row + k * 16 * 128 + (((n + c) ^ lane) & 7) * 16);
      tensor_half(acc[n], a[k], b[0], b[1]);
      tensor_half(acc[n + 1], a[k], b[2], b[3]);
    }
}

// Two FP32 fragments as an operand in FP16, each row times its scale.
template <int K>
DEVICE void pack_rows(uint32_t (*a)[4], const float (*v)[4], const float* scale) {
#pragma unroll
  for (int k = 0; k < K; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) a[k][i] = pack_half(v[2 * k + i / 2][i % 2 * 2] * scale[i % 2], v[2 * k + i / 2][i % 2 * 2 + 1] * scale[i % 2]);
}

// The largest magnitude of each of the two rows of N fragments, in the lanes that share them.
template <int N>
DEVICE void largest(float* most, const float (*v)[4]) {
  most[0] = most[1] = 0.0f;
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) most[i / 2] = fmaxf(most[i / 2], fabsf(v[n][i]));
  most[0] = quad_max(most[0]), most[1] = quad_max(most[1]);
}

// What a block knows of its place.
struct Place {
  uint32_t head, half, kh, c, channel, chunks;  // channel: the first of its columns among the inputs

  DEVICE explicit Place(const DeltaRunParams& p) {
    head = blockIdx.x / 2, half = blockIdx.x % 2, kh = head / (p.heads / p.key_heads), c = (2 * p.key_heads + p.heads) * kDim;
    channel = (2 * p.key_heads + head) * kDim + half * 64, chunks = (p.rows + kChunk - 1) / kChunk;
  }
};

// Has 128 threads fetch a chunk: keys, queries, inverse, scores, decays, and the inputs of the columns.
DEVICE void fetch(const DeltaRunParams& p, const Place& at, uint32_t chunk, uint32_t stages, uint32_t bars, uint32_t t) {
  const uint32_t s = chunk % p.stages, to = stages + s * kStage, bar = bars + s * 8;
  if (t == 0) {
    barrier_expect(bar, 2 * kTile + 2 * kSquare + 2 * kChunk * 4);
    const uint64_t k = (uint64_t)chunk * p.key_heads + at.kh, h = (uint64_t)chunk * p.heads + at.head;
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
    if (r < 67) copy16(in + r * 128 + ((piece ^ (r & 7)) << 4), row < (int)p.rows ? input_row(p.x, p.window, row, p.x_ld, at.c) + at.channel + piece * 8 : p.x, row < (int)p.rows);
  }
  barrier_copies(bar);
}

// The state of a warp's columns: columns g and g+8, keys 8n + 2*q4 and one more in this lane.
template <bool Write>
DEVICE void state(const DeltaRunParams& p, const Place& at, float (*S)[4], uint32_t warp, uint32_t lane) {
  const uint64_t first = (uint64_t)at.head * kDim * kDim + at.half * 64 + warp * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint64_t k = first + (n * 8 + 2 * (lane % 4) + i % 2) * kDim + i / 2 * 8;
      if (!Write) S[n][i] = p.half_state ? from_bf16(((const bf16*)p.state)[k]) : ((const float*)p.state)[k];
      else if (p.half_state) ((bf16*)p.state)[k] = to_bf16(S[n][i]);
      else ((float*)p.state)[k] = S[n][i];
    }
}

struct Taps {
  float w[4][2];

  DEVICE Taps(const DeltaRunParams& p, const Place& at, uint32_t warp, uint32_t lane) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) w[i][j] = p.conv[(uint64_t)i * at.c + at.channel + warp * 16 + lane / 4 + 8 * j];
  }

  // Values of tokens 8n.. and 8n+8.. after the convolution, turned: two fragments.
  DEVICE void values(float (*v)[4], uint32_t in, uint32_t n, uint32_t warp, uint32_t lane) const {
#pragma unroll
    for (int i = 0; i < 4; i++) v[0][i] = v[1][i] = 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
      uint32_t x[4];
      const uint32_t r = n * 8 + j + lane / 16 * 8 + lane % 8;
      matrices_turned(x, in + r * 128 + (((warp * 2 + lane / 8 % 2) ^ (r & 7)) << 4));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float* to = v[i / 2] + i % 2 * 2;
        to[0] = fmaf(w[j][i % 2], lo(x[i]), to[0]), to[1] = fmaf(w[j][i % 2], hi(x[i]), to[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) v[0][i] = silu(v[0][i]), v[1][i] = silu(v[1][i]);
  }
};

// The scale of corrections: never so large that the state would leave its range; where they are 2^-24 of it they count for nothing.
DEVICE void correction_scale(const float* most, const float* sS, float* sV, float* uV) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    scale_of(most[i], 4, sV[i], uV[i]);
    const uint32_t bound = __float_as_uint(sS[i]) + (24u << 23);
    if (__float_as_uint(sV[i]) > bound) sV[i] = __uint_as_float(bound), uV[i] = __uint_as_float((254u << 23) - bound);
  }
}

// Corrections V, already of their own size, as operand, and as the operand that brings the state forward.
DEVICE void corrections(uint32_t (*B)[4], uint32_t (*D)[4], const float (*V)[4], const float* sV, const float* decay, uint32_t lane) {
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float v0 = V[2 * k + i / 2][i % 2 * 2] * sV[i % 2], v1 = V[2 * k + i / 2][i % 2 * 2 + 1] * sV[i % 2];
      const float2 f = *(const float2*)(decay + kChunk + (2 * k + i / 2) * 8 + 2 * (lane % 4));
      B[k][i] = pack_half(v0, v1);
      D[k][i] = pack_half(v0 * f.x, v1 * f.y);
    }
}

// S = decay*S + k'*v'
DEVICE void forward(float (*S)[4], const uint32_t (*D)[4], uint32_t keys, float end, const float* sV, const float* uV, uint32_t lane) {
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) S[n][i] *= end * sV[i / 2];
  by_keys(S, D, keys, lane);
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) S[n][i] *= uV[i / 2];
}

// Brings products of queries and state to the scale of the corrections.
DEVICE void decayed(float (*O)[4], const float* decay, const float* uS, const float* sV, uint32_t lane) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const float2 f = *(const float2*)(decay + n * 8 + 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; i++) O[n][i] *= (i % 2 ? f.y : f.x) * 0.08838834764831845f * (uS[i / 2] * sV[i / 2]);
  }
}

DEVICE void write(const DeltaRunParams& p, const Place& at, const float (*O)[4], const float* uV, uint32_t chunk, uint32_t warp, uint32_t lane) {
  float most[2], sO[2], uO[2];
  largest<8>(most, O);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    scale_of(most[i], 4, sO[i], uO[i]);
    if (lane % 4 == 0) p.scales[((uint64_t)chunk * p.heads + at.head) * kDim + at.half * 64 + warp * 16 + lane / 4 + 8 * i] = uO[i] * uV[i];
  }
  __half* const out = (__half*)p.out + at.head * kDim + at.half * 64 + warp * 16 + 2 * (lane % 4);
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const uint32_t row = chunk * kChunk + n * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t v = turn(pack_half(O[n][2 * i] * sO[i], O[n][2 * i + 1] * sO[i]));
      if (row < p.rows) *(uint32_t*)(out + (uint64_t)row * p.heads * kDim + i * 8) = v;
    }
  }
}
