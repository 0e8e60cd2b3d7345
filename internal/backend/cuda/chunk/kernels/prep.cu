// What goes before attention, and the n-gram embedding's convolution.
//
//   prep_rows    norms and rotation of queries and keys, append to the planes, index keys of blocks that a row completes. A warp a head. Grid: row.
//   conv_rows    depthwise causal convolution with its window, added to the streams. Thread a channel. Grid: channels, runs of rows.
//   conv_window  the window after the pass. Grid: channels.
#include "common.cuh"

static constexpr int kPrep = 256;

// Norm of values held N a lane, times 1 + w.
template <int N>
DEVICE void norm(float* v, const float* w, float eps) {
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i++) square += v[i] * v[i];
  const float scale = 1.0f / sqrtf(warp_sum(square) / (32 * N) + eps);
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = v[i] * scale * (1.0f + w[threadIdx.x % 32 * N + i]);
}

// Rotates the first 64 of values held N a lane: value i goes with value i + 32.
template <int N>
DEVICE void rotate(float* v, const float2* angles) {
  constexpr uint32_t kHalf = 32 / N;  // lanes
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float other = __shfl_xor_sync(~0u, v[i], kHalf);
    const float2 a = angles[lane % kHalf * N + i];  // sine, cosine
    if (lane < kHalf) v[i] = v[i] * a.y - other * a.x;
    else if (lane < 2 * kHalf) v[i] = v[i] * a.y + other * a.x;
  }
}

// Normalised Hadamard transform of 256 values, eight a lane.
DEVICE void hadamard(float* v) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 1; h < 8; h <<= 1)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (!(i & h)) {
        const float a = v[i], b = v[i | h];
        v[i] = a + b, v[i | h] = a - b;
      }
#pragma unroll
  for (int h = 1; h < 32; h <<= 1)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float other = __shfl_xor_sync(~0u, v[i], h);
      v[i] = lane & h ? other - v[i] : v[i] + other;
    }
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= 0.0625f;
}

// Keeps 256 values, eight a lane, as E4M3 with a scale: their largest magnitude / 448 in BF16.
DEVICE void keep_fp8(const float* v, uint8_t* codes, bf16* scale) {
  const uint32_t lane = threadIdx.x % 32;
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  const uint16_t word = most > 0.0f ? max(__bfloat16_as_ushort(to_bf16(most / 448.0f)), (unsigned short)1) : 0;
  const float s = __uint_as_float((uint32_t)word << 16);
  uint32_t w[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (word) w[i / 4] |= (uint32_t)__nv_cvt_float_to_fp8(v[i] / s, __NV_SATFINITE, __NV_E4M3) << (8 * (i % 4));
  *(uint2*)(codes + lane * 8) = make_uint2(w[0], w[1]);
  if (lane == 0) *scale = __ushort_as_bfloat16(word);
}

DEVICE void read8(const bf16* from, float* v) {
  const uint4 q = *(const uint4*)(from + threadIdx.x % 32 * 8);
  v[0] = lo(q.x), v[1] = hi(q.x), v[2] = lo(q.y), v[3] = hi(q.y), v[4] = lo(q.z), v[5] = hi(q.z), v[6] = lo(q.w), v[7] = hi(q.w);
}
DEVICE void write8(bf16* to, const float* v) {
  *(uint4*)(to + threadIdx.x % 32 * 8) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}
DEVICE void read4(const bf16* from, float* v) {
  const uint2 q = *(const uint2*)(from + threadIdx.x % 32 * 4);
  v[0] = lo(q.x), v[1] = hi(q.x), v[2] = lo(q.y), v[3] = hi(q.y);
}

NINFER_KERNEL(prep_rows, PrepRowsParams, kPrep, 4) {
  __shared__ float2 angles[2][32];  // of the row, of the block that it completes
  pdl();
  const uint32_t r = blockIdx.x, at = p.base + r, t = threadIdx.x, warp = t / 32, lane = t % 32;
  const uint64_t token = token_row(p.pages, at);
  const bool completes = at % 4 == 3, turned = p.key_scales != nullptr;
  if (t < 64 && (t < 32 || completes)) {
    const uint32_t axis = ((const uint32_t*)p.inverse)[32 + lane];
    // The block's first token may have been before this pass.
    const uint32_t pos = t < 32 ? p.rows[r].pos[axis] : r >= 3 ? p.rows[r - 3].pos[axis] : p.positions[token_row(p.pages, at - 3) * 3 + axis];
    sincosf(__fmul_rn((float)(int)pos, p.inverse[lane]), &angles[t / 32][lane].x, &angles[t / 32][lane].y);
  }
  if (t < 3) p.positions[token * 3 + t] = p.rows[r].pos[t];
  __syncthreads();
  const uint32_t units = 2 * p.kv + 1 + (p.qg ? p.heads + 4 : 0);
  for (uint32_t i = warp; i < units; i += kPrep / 32) {
    uint32_t unit = i;
    float v[8];
    if (unit < p.kv) {  // key
      read8(p.key + (uint64_t)r * p.key_ld + unit * 256, v);
      norm<8>(v, p.k_norm, p.eps);
      rotate<8>(v, angles[0]);
      const uint64_t head = token * p.kv + unit;
      if (turned) {
        hadamard(v);
        keep_fp8(v, (uint8_t*)p.keys + head * 256, p.key_scales + head);
      } else {
        write8((bf16*)p.keys + head * 256, v);
      }
    } else if ((unit -= p.kv) < p.kv) {  // value
      read8(p.value + (uint64_t)r * p.value_ld + unit * 256, v);
      const uint64_t head = token * p.kv + unit;
      if (turned) keep_fp8(v, (uint8_t*)p.values + head * 256, p.value_scales + head);
      else write8((bf16*)p.values + head * 256, v);
    } else if ((unit -= p.kv) == 0) {  // raw index key, and that of a block
      const uint2 own = *(const uint2*)(p.index + (uint64_t)r * p.index_ld + 512 + lane * 4);
      *(uint2*)(p.raw + token * 128 + lane * 4) = own;
      if (!completes) continue;
      float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (uint32_t back = 4; back-- > 0;) {
        read4(back <= r ? p.index + (uint64_t)(r - back) * p.index_ld + 512 : p.raw + token_row(p.pages, at - back) * 128, v);
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] += v[j];
      }
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = round_bf16(x[j] * 0.25f);
      norm<4>(x, p.ik_norm, p.eps);
      rotate<4>(x, angles[1]);
      *(uint2*)(p.block_keys + block_row(p.pages, at / 4) * 128 + lane * 4) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
    } else if (--unit < p.heads) {  // query
      read8(p.qg + (uint64_t)r * p.qg_ld + unit * 512, v);
      norm<8>(v, p.q_norm, p.eps);
      rotate<8>(v, angles[0]);
      if (turned) hadamard(v);
      write8(p.q + ((uint64_t)r * p.heads + unit) * 256, v);
    } else {  // index query
      unit -= p.heads;
      read4(p.index + (uint64_t)r * p.index_ld + unit * 128, v);
      norm<4>(v, p.iq_norm, p.eps);
      rotate<4>(v, angles[0]);
      *(uint2*)(p.iq + ((uint64_t)r * 4 + unit) * 128 + lane * 4) = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
    }
  }
}

static constexpr int kConv = 256;
static constexpr uint32_t kRunRows = 64;  // rows of a block

// Row i of a convolution's inputs, before the pass or in it.
DEVICE float input_at(const ConvRowsParams& p, int i, uint32_t depth, uint32_t ch) {
  return from_bf16(i < 0 ? p.window[(uint64_t)(i + (int)depth) * p.c + ch] : p.x[(uint64_t)i * p.c + ch]);
}

NINFER_KERNEL(conv_rows, ConvRowsParams, kConv, 4) {
  pdl();
  const uint32_t ch = blockIdx.x * kConv + threadIdx.x, first = blockIdx.y * kRunRows;
  if (ch >= p.c) return;
  const uint32_t depth = (p.taps - 1) * p.dilation;
  float w[8];
#pragma unroll
  for (uint32_t j = 0; j < 8; j++) w[j] = j < p.taps ? p.w[(uint64_t)j * p.c + ch] : 0.0f;
  for (uint32_t r = first; r < min(first + kRunRows, p.rows); r++) {
    float sum = 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < 8; j++)
      if (j < p.taps) sum = fmaf(w[j], input_at(p, (int)(r + j * p.dilation) - (int)depth, depth, ch), sum);
    const uint64_t at = (uint64_t)r * p.c + ch;
    p.streams[at] = to_bf16(from_bf16(p.streams[at]) + p.v[at] + silu(sum));
  }
}

NINFER_KERNEL(conv_window, ConvRowsParams, kConv, 4) {
  pdl();
  const uint32_t ch = blockIdx.x * kConv + threadIdx.x;
  if (ch >= p.c) return;
  const uint32_t depth = (p.taps - 1) * p.dilation;
  for (uint32_t i = 0; i < depth; i++) p.window[(uint64_t)i * p.c + ch] = to_bf16(input_at(p, (int)(p.rows + i) - (int)depth, depth, ch));
}
