// Before the selection: queries and keys, and index scores.
//
//   prep        norms and rotation of queries and keys, append to the planes, index key of a block that a row completes. Any shape. Grid: unit,
//               row.
//   prep_score  the same but for index queries, a warp a unit, and beside it the index scores of complete blocks, for heads of 256 and four index
//               heads of 128, of which 64 values are rotated. Grid: some blocks for what was complete before the pass, one for what the pass itself
//               completes, then eight units each; row. Where blocks are of four tokens shared memory for a tile of 128 keys of those that were complete,
//               for two if a block has several.
//   prep_select  the same, and what the selection lists, of rows that are each the only one of their lane and have at most kFewKeys blocks of four tokens. The
//                first cluster scores a row's blocks of tokens, each of its blocks a part, and tells all others; each finds out what is taken of all of them,
//                and lists its own. The second has the units. Grid: 16, row; shared memory for the index keys of a part.
#include "select.cuh"

// The angle of pair i among the first rot values of a head.
struct Turn {
  float sin, cos;
};
DEVICE Turn turn_of(const float* inverse, uint32_t rot, const uint32_t* pos, uint32_t i) {
  Turn a = {0.0f, 1.0f};
  if (i < rot / 2) sincosf(__fmul_rn((float)(int)pos[((const uint32_t*)inverse)[rot / 2 + i]], inverse[i]), &a.sin, &a.cos);
  return a;
}
// What it takes to know one of 32: asked for before the wait, where nothing waits for it. The angle itself is made while activations come.
struct Angle {
  float inverse;
  uint32_t axis, pos[3];
};
DEVICE Angle angle_of(const float* inverse, const uint32_t* pos) {
  const uint32_t i = threadIdx.x % 32;
  return {inverse[i], ((const uint32_t*)inverse)[32 + i], {pos[0], pos[1], pos[2]}};
}
DEVICE Turn turn_of(const Angle& a) {
  Turn t;
  sincosf(__fmul_rn((float)(int)(a.axis == 0 ? a.pos[0] : a.axis == 1 ? a.pos[1] : a.pos[2]), a.inverse), &t.sin, &t.cos);
  return t;
}

// A pair of values, turned: always with the same roundings.
DEVICE float2 turned(float a, float b, Turn turn) {
  return make_float2(fmaf(a, turn.cos, -__fmul_rn(b, turn.sin)), fmaf(b, turn.cos, __fmul_rn(a, turn.sin)));
}

// Rotates pair i of the first rot values of v in shared memory; all threads of the block.
DEVICE void rotate(float* v, uint32_t rot, Turn turn, uint32_t i) {
  const uint32_t half = rot / 2;
  __syncthreads();
  if (i < half) {
    const float2 both = turned(v[i], v[i + half], turn);
    v[i] = both.x, v[i + half] = both.y;
  }
  __syncthreads();
}

// Normalised Hadamard transform of width values in shared memory, a power of two of them, thread a value; all threads of the block.
DEVICE void hadamard(float* v, uint32_t width) {
  const uint32_t t = threadIdx.x;
  float x = t < width ? v[t] : 0.0f;
  uint32_t h = 1;
  for (; h < width && h < 32; h <<= 1) {
    const float other = __shfl_xor_sync(~0u, x, h);
    x = t & h ? other - x : x + other;
  }
  for (; h < width; h <<= 1) {
    if (t < width) v[t] = x;
    __syncthreads();
    const float other = t < width ? v[t ^ h] : 0.0f;
    __syncthreads();
    x = t & h ? other - x : x + other;
  }
  if (t < width) v[t] = x * (1.0f / sqrtf((float)width));
}

// The scale of values of at most that magnitude, and the code of one.
DEVICE bf16 fp8_scale(float most) {
  return __ushort_as_bfloat16(most > 0.0f ? max(__bfloat16_as_ushort(to_bf16(most / 448.0f)), (unsigned short)1) : 0);
}
DEVICE uint8_t fp8_code(float x, bf16 scale) {
  const float s = from_bf16(scale);
  return s > 0.0f ? __nv_cvt_float_to_fp8(x / s, __NV_SATFINITE, __NV_E4M3) : 0;
}

// Keeps a head's values, thread a value, as E4M3 with a scale: their largest magnitude / 448 in BF16.
DEVICE void keep_fp8(float x, uint32_t width, uint8_t* codes, bf16* scale, float* shared) {
  const uint32_t t = threadIdx.x;
  float most = t < width ? fabsf(x) : 0.0f;
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  __syncthreads();
  if (t % 32 == 0) shared[t / 32] = most;
  __syncthreads();
  for (uint32_t i = 0; i < blockDim.x / 32; i++) most = fmaxf(most, shared[i]);
  const bf16 word = fp8_scale(most);
  if (t < width) codes[t] = fp8_code(x, word);
  if (t == 0) *scale = word;
}

// One unit of a row. Rows, pages, positions, weights and tokens of earlier passes are here before the wait, and with them all angles.
DEVICE void prepare(const PrepParams& p, uint32_t unit) {
  __shared__ float shared[33], v[256];
  const uint32_t r = blockIdx.y, t = threadIdx.x;
  const Row row = p.rows[r];
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  const uint64_t token = token_row(pages, row.at);
  const bf16* in;
  const float* w;
  bf16* out;
  uint32_t width = p.hd;
  uint64_t head = token * p.kv + unit;
  bool is_key = false, turned = p.key_scales != nullptr;
  if (unit < p.kv) {  // key
    in = p.key + ((uint64_t)r * p.kv + unit) * p.hd, w = p.k_norm, out = (bf16*)p.keys + head * p.hd, is_key = true;
  } else if ((unit -= p.kv) < p.kv) {  // value
    head = token * p.kv + unit;
    const bf16* from = p.value + ((uint64_t)r * p.kv + unit) * p.hd;
    pdl();
    if (turned) keep_fp8(t < p.hd ? from_bf16(from[t]) : 0.0f, p.hd, (uint8_t*)p.values + head * p.hd, p.value_scales + head, shared);
    else if (t < p.hd) ((bf16*)p.values)[head * p.hd + t] = from[t];
    return;
  } else if ((unit -= p.kv) == 0) {  // raw index key, positions
    const bool whole = (row.at + 1) % p.ratio == 0;
    const uint32_t back = p.ratio - 1;
    Turn turn = {0.0f, 1.0f};
    float norm = 0.0f;
    if (whole) {
      turn = turn_of(p.inverse, p.rot, back <= row.index ? p.rows[r - back].pos : p.positions + token_row(pages, row.at - back) * 3, t);
      if (t < p.id) norm = p.ik_norm[t];
    }
    pdl();
    for (uint32_t i = t; i < p.id; i += 256) p.raw[token * p.id + i] = p.index[((uint64_t)r * (p.ih + 1) + p.ih) * p.id + i];
    if (t < 3) p.positions[token * 3 + t] = p.rows[r].pos[t];
    if (!whole) return;
    // The block's older tokens are in the planes, or rows of this pass that another block is just writing there.
    float x = 0.0f;
    if (t < p.id) {
      for (uint32_t i = p.ratio; i-- > 0;)
        x += from_bf16(i <= row.index ? p.index[((uint64_t)(r - i) * (p.ih + 1) + p.ih) * p.id + t] : p.raw[token_row(pages, row.at - i) * p.id + t]);
      x = round_bf16(x / p.ratio);
    }
    const float scale = 1.0f / sqrtf(block_sum(x * x, shared) / p.id + p.eps);
    if (t < p.id) v[t] = x * scale * (1.0f + norm);
    rotate(v, p.rot, turn, t);
    if (t < p.id) p.block_keys[Blocks(p.ratio).row(pages[row.at / kPage], row.at / p.ratio) * p.id + t] = to_bf16(v[t]);
    return;
  } else if (--unit < p.heads) {  // query
    in = p.qg + ((uint64_t)r * p.heads + unit) * 2 * p.hd, w = p.q_norm, out = p.q + ((uint64_t)r * p.heads + unit) * p.hd;
  } else {  // index query
    unit -= p.heads, width = p.id, turned = false;
    in = p.index + ((uint64_t)r * (p.ih + 1) + unit) * p.id, w = p.iq_norm, out = p.iq + ((uint64_t)r * p.ih + unit) * p.id;
  }
  const Turn turn = turn_of(p.inverse, p.rot, p.rows[r].pos, t);
  const float norm = t < width ? w[t] : 0.0f;
  pdl();
  const float x = t < width ? from_bf16(in[t]) : 0.0f;
  const float scale = 1.0f / sqrtf(block_sum(x * x, shared) / width + p.eps);
  if (t < width) v[t] = x * scale * (1.0f + norm);
  rotate(v, p.rot, turn, t);
  if (turned) hadamard(v, width);
  if (turned && is_key) keep_fp8(t < width ? v[t] : 0.0f, width, (uint8_t*)p.keys + head * p.hd, p.key_scales + head, shared);
  else if (t < width) out[t] = to_bf16(v[t]);
}

NINFER_KERNEL(prep, PrepParams, 256, 1) { prepare(p, blockIdx.x); }

// A head of 256 values in a warp, or of 128: value 32 j + lane. All sums and transforms are those of a block of 256 threads.
DEVICE float head_sum(const float* x, int n) {
  float p[8];
#pragma unroll
  for (int j = 0; j < 8; j++) p[j] = j < n ? warp_sum(x[j] * x[j]) : 0.0f;
  return p[0] + p[4] + (p[2] + p[6]) + (p[1] + p[5] + (p[3] + p[7]));
}
DEVICE void head_turn(float* x, Turn turn) {
  const float2 v = turned(x[0], x[1], turn);
  x[0] = v.x, x[1] = v.y;
}
DEVICE void head_hadamard(float* x) {
#pragma unroll
  for (int h = 1; h < 32; h <<= 1)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float other = __shfl_xor_sync(~0u, x[j], h);
      x[j] = threadIdx.x & h ? other - x[j] : x[j] + other;
    }
#pragma unroll
  for (int h = 1; h < 8; h <<= 1)
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (!(j & h)) {
        const float a = x[j], b = x[j ^ h];
        x[j] = a + b, x[j ^ h] = a - b;
      }
#pragma unroll
  for (int j = 0; j < 8; j++) x[j] *= 1.0f / sqrtf(256.0f);
}
DEVICE void head_fp8(const float* x, uint8_t* codes, bf16* scale) {
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(x[j]));
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  const bf16 word = fp8_scale(most);
#pragma unroll
  for (int j = 0; j < 8; j++) codes[32 * j + threadIdx.x % 32] = fp8_code(x[j], word);
  if (threadIdx.x % 32 == 0) *scale = word;
}

// Raw index keys of a block of four tokens but for the last one's, which is of this pass: what a lane has of them, as they are stored. Asked for before the
// wait, those of tokens of this pass in vain.
struct RawKeys {
  uint16_t v[3][4];
};
DEVICE void ask_raw(RawKeys& raw, const PrepParams& p, const uint32_t* pages, uint32_t block) {
  if (p.ratio != 4) return;
  const uint16_t* from = (const uint16_t*)p.raw + token_row(pages, block * 4) * 128 + threadIdx.x % 32;
#pragma unroll
  for (uint32_t i = 0; i < 3; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) raw.v[i][j] = __ldcg(from + i * 128 + 32 * j);
}

// The index key of a complete block, its last token this row's or an older one's: x is what a lane has of it, from tokens in the planes or in rows of
// this pass.
DEVICE void block_key(const PrepParams& p, const Row& row, const uint32_t* pages, uint32_t block, const Angle& angle, const float* norm, RawKeys& raw, float* x) {
  const uint32_t r = blockIdx.y, lane = threadIdx.x % 32, four = p.ratio == 4 ? 4 : 0;
#pragma unroll
  for (int j = 0; j < 4; j++) x[j] = 0.0f;
  if (four) {
    uint16_t now[4][4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t back = row.at - block * 4 - i;
      if (i == 3 || back <= row.index)
#pragma unroll
        for (int j = 0; j < 4; j++) now[i][j] = ((const uint16_t*)p.index)[((uint64_t)(r - back) * 5 + 4) * 128 + 32 * j + lane];
      else
#pragma unroll
        for (int j = 0; j < 4; j++) now[i][j] = raw.v[i % 3][j];
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] += from_bf16(__ushort_as_bfloat16(now[i][j]));
  }
  for (uint32_t i = four; i < p.ratio; i++) {
    const uint32_t token = block * p.ratio + i, back = row.at - token;
    const bf16* from = back <= row.index ? p.index + ((uint64_t)(r - back) * 5 + 4) * 128 : p.raw + token_row(pages, token) * 128;
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] += from_bf16(from[32 * j + lane]);
  }
#pragma unroll
  for (int j = 0; j < 4; j++) x[j] = round_bf16(x[j] / p.ratio);
  const float scale = 1.0f / sqrtf(head_sum(x, 4) / 128 + p.eps);
#pragma unroll
  for (int j = 0; j < 4; j++) x[j] = x[j] * scale * (1.0f + norm[j]);
  head_turn(x, turn_of(angle));
}
DEVICE Angle block_angle(const PrepParams& p, const Row& row, const uint32_t* pages, uint32_t block) {
  const uint32_t token = block * p.ratio, back = row.at - token;
  return angle_of(p.inverse, back <= row.index ? p.rows[blockIdx.y - back].pos : p.positions + token_row(pages, token) * 3);
}

// A warp's unit of a row: queries, keys, values, and the raw index key.
DEVICE void prepare_warp(const PrepParams& p, uint32_t unit) {
  const uint32_t r = blockIdx.y, lane = threadIdx.x % 32;
  const Row row = p.rows[r];
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  const uint64_t token = token_row(pages, row.at);
  const bool fp8 = p.key_scales != nullptr;
  float x[8], norm[8];
  if (unit < p.heads + p.kv) {
    const bool is_key = unit >= p.heads;
    const float* w = is_key ? p.k_norm : p.q_norm;
    const bf16* in = is_key ? p.key + ((uint64_t)r * p.kv + unit - p.heads) * 256 : p.qg + ((uint64_t)r * p.heads + unit) * 512;
    const Angle angle = angle_of(p.inverse, p.rows[r].pos);
#pragma unroll
    for (int j = 0; j < 8; j++) norm[j] = w[32 * j + lane];
    pdl_wait();
    bf16 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = in[32 * j + lane];
    const Turn turn = turn_of(angle);
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = from_bf16(v[j]);
    const float scale = 1.0f / sqrtf(head_sum(x, 8) / 256 + p.eps);
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = x[j] * scale * (1.0f + norm[j]);
    head_turn(x, turn);
    if (fp8) head_hadamard(x);
    const uint64_t head = is_key ? token * p.kv + unit - p.heads : (uint64_t)r * p.heads + unit;
    if (fp8 && is_key) {
      head_fp8(x, (uint8_t*)p.keys + head * 256, p.key_scales + head);
      return;
    }
    bf16* out = (is_key ? (bf16*)p.keys : p.q) + head * 256;
#pragma unroll
    for (int j = 0; j < 8; j++) out[32 * j + lane] = to_bf16(x[j]);
  } else if (unit < p.heads + 2 * p.kv) {
    unit -= p.heads + p.kv;
    const bf16* in = p.value + ((uint64_t)r * p.kv + unit) * 256;
    const uint64_t head = token * p.kv + unit;
    pdl_wait();
    bf16 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = in[32 * j + lane], x[j] = from_bf16(v[j]);
    if (fp8) {
      head_fp8(x, (uint8_t*)p.values + head * 256, p.value_scales + head);
      return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) ((bf16*)p.values)[head * 256 + 32 * j + lane] = v[j];
  } else if (unit == p.heads + 2 * p.kv) {
    const bool whole = (row.at + 1) % p.ratio == 0;
    Angle angle = {};
    RawKeys raw;
    if (whole) {
      ask_raw(raw, p, pages, row.at / p.ratio);
      angle = block_angle(p, row, pages, row.at / p.ratio);
#pragma unroll
      for (int j = 0; j < 4; j++) norm[j] = p.ik_norm[32 * j + lane];
    }
    pdl_wait();
#pragma unroll
    for (int j = 0; j < 4; j++) p.raw[token * 128 + 32 * j + lane] = p.index[((uint64_t)r * 5 + 4) * 128 + 32 * j + lane];
    if (lane < 3) p.positions[token * 3 + lane] = p.rows[r].pos[lane];
    if (!whole) return;
    block_key(p, row, pages, row.at / p.ratio, angle, norm, raw, x);
    bf16* out = p.block_keys + Blocks(p.ratio).row(pages[row.at / kPage], row.at / p.ratio) * 128;
#pragma unroll
    for (int j = 0; j < 4; j++) out[32 * j + lane] = to_bf16(x[j]);
  } else {
    pdl_wait();
  }
}

// Index scores: a warp takes sixteen keys at a time, on tensor instructions. Each row of the instruction is a key of its own, so that a score is the
// same whatever stands beside it.
DEVICE void tensor_score(float* acc, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct IndexQueries {
  __align__(16) bf16 q[4][128];
};
// The index queries of a row, normalised and rotated, a warp each; rot is 64, so that a lane has both values of a pair. angle and norm are the
// lane's.
DEVICE void index_queries(IndexQueries& s, const PrepParams& p, uint32_t r, const Angle& angle, const float* norm) {
  const uint32_t h = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (h < 4) {
    const bf16* in = p.index + ((uint64_t)r * 5 + h) * 128 + lane;
    bf16 v[4];
    float x[4], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = in[32 * j];
    const Turn turn = turn_of(angle);
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = from_bf16(v[j]), sum = fmaf(x[j], x[j], sum);
    const float scale = 1.0f / sqrtf(warp_sum(sum) / 128 + p.eps);
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = x[j] * scale * (1.0f + norm[j]);
    head_turn(x, turn);
#pragma unroll
    for (int j = 0; j < 4; j++) s.q[h][lane + 32 * j] = to_bf16(x[j]);
  }
  __syncthreads();
}
// What a lane has of a key or a query: sixteen bytes of each quarter of it.
struct Fragment {
  uint4 c[4];
};
DEVICE Fragment query_fragment(const IndexQueries& s) {
  Fragment f;
  const uint32_t g = threadIdx.x % 32 / 4, q4 = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < 4; c++) f.c[c] = g < 4 ? *(const uint4*)(s.q[g] + c * 32 + q4 * 8) : make_uint4(0, 0, 0, 0);
  return f;
}
// Scores of the keys of a lane, a and b: those of rows g and g + 8 of the instruction.
DEVICE float2 score_of(const Fragment& a, const Fragment& b, const Fragment& q) {
  float s[2][4] = {};
#pragma unroll
  for (int c = 0; c < 4; c++) {
    tensor_score(s[0], a.c[c].x, b.c[c].x, a.c[c].y, b.c[c].y, q.c[c].x, q.c[c].y);
    tensor_score(s[1], a.c[c].z, b.c[c].z, a.c[c].w, b.c[c].w, q.c[c].z, q.c[c].w);
  }
  float2 v;
  v.x = fmaxf(s[0][0] + s[1][0], 0.0f) + fmaxf(s[0][1] + s[1][1], 0.0f);
  v.y = fmaxf(s[0][2] + s[1][2], 0.0f) + fmaxf(s[0][3] + s[1][3], 0.0f);
  v.x += __shfl_xor_sync(~0u, v.x, 1), v.y += __shfl_xor_sync(~0u, v.y, 1);
  v.x *= 1.0f / sqrtf(128.0f), v.y *= 1.0f / sqrtf(128.0f);
  return v;
}

// Scores of the blocks that earlier passes have completed, whatever their size.
DEVICE void score_old(const PrepParams& prep, const ScoreParams& p, uint32_t block, uint32_t blocks_of_grid, IndexQueries& queries) {
  const uint32_t r = blockIdx.y, t = threadIdx.x, g = t % 32 / 4, q4 = t % 4;
  const Row row = p.rows[r];
  const uint32_t ratio = p.ratio, n = (row.at + 1) / ratio, old = (row.at - row.index) / ratio;
  if (n <= p.most || block * 128 >= old) {
    pdl_wait();
    return;
  }
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  const Blocks blocks(ratio);
  auto row_of = [&](uint32_t b) { return b >= old ? 0 : (uint32_t)blocks.row(pages[blocks.last(b) / kPage], b); };
  auto fetch = [&](Fragment& f, uint32_t b, uint32_t row) {
#pragma unroll
    for (int c = 0; c < 4; c++) f.c[c] = b < old ? __ldcg((const uint4*)(p.keys + (uint64_t)row * 128 + c * 32 + q4 * 8)) : make_uint4(0, 0, 0, 0);
  };
  const uint32_t step = blocks_of_grid * 128;
  uint32_t at = block * 128 + t / 32 * 16 + g;
  Fragment a, b;
  fetch(a, at, row_of(at)), fetch(b, at + 8, row_of(at + 8));
  uint32_t later[2] = {row_of(at + step), row_of(at + step + 8)};
  const Angle angle = angle_of(prep.inverse, prep.rows[r].pos);
  float norm[4];
#pragma unroll
  for (int j = 0; j < 4; j++) norm[j] = prep.iq_norm[t % 32 + 32 * j];
  pdl_wait();
  index_queries(queries, prep, r, angle, norm);
  const Fragment q = query_fragment(queries);
  for (; at - g < old; at += step) {
    const Fragment x = a, y = b;
    fetch(a, at + step, later[0]), fetch(b, at + step + 8, later[1]);
    later[0] = row_of(at + 2 * step), later[1] = row_of(at + 2 * step + 8);
    const float2 v = score_of(x, y, q);
    float* to = p.scores + (uint64_t)r * p.blocks + at;
    if (q4 == 0 && at < old) to[0] = v.x;
    if (q4 == 1 && at + 8 < old) to[8] = v.y;
  }
}

static constexpr uint32_t kTilePages = 8;  // pages of a tile: eight warps' sixteen keys each, where blocks are of four tokens
static constexpr uint32_t kPageKeys = 16 * 128 * 2;  // bytes of a page's keys

// The same of blocks of four tokens, all keys of a page side by side. They are copied as they lie, which costs few instructions in front of the wait.
DEVICE void score_pages(const PrepParams& prep, const ScoreParams& p, uint32_t block, uint32_t blocks_of_grid, IndexQueries& queries) {
  extern __shared__ __align__(128) uint8_t tiles[];  // two in turn
  __shared__ __align__(8) uint64_t here[2];
  const uint32_t r = blockIdx.y, t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, q4 = t % 4;
  const Row row = p.rows[r];
  const uint32_t n = (row.at + 1) / 4, old = (row.at - row.index) / 4;
  if (n <= p.most || block * 128 >= old) {
    pdl_wait();
    return;
  }
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  const uint32_t to = (uint32_t)__cvta_generic_to_shared(tiles), bar = (uint32_t)__cvta_generic_to_shared(here), all = (old + 15) / 16;
  auto ask = [&](uint32_t k) {  // tile k of this block, by the first warp
    const uint32_t first = (block + k * blocks_of_grid) * kTilePages;
    if (first >= all) return;
    const uint32_t count = min(kTilePages, all - first), at = bar + k % 2 * 8;
    const uint32_t page = lane < count ? pages[first + lane] : 0;
    if (lane == 0) asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(count * kPageKeys) : "memory");
    __syncwarp();
    if (lane < count)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to + (k % 2 * kTilePages + lane) * kPageKeys),
                   "l"((const uint8_t*)p.keys + (uint64_t)page * kPageKeys), "r"(kPageKeys), "r"(at)
                   : "memory");
  };
  if (warp == 4) {
    if (lane < 2) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar + lane * 8) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
    ask(0);
    ask(1);
  }
  Angle angle = {};
  float norm[4];
  if (warp < 4) {
    angle = angle_of(prep.inverse, prep.rows[r].pos);
#pragma unroll
    for (int j = 0; j < 4; j++) norm[j] = prep.iq_norm[lane + 32 * j];
  }
  pdl_wait();
  index_queries(queries, prep, r, angle, norm);
  const Fragment q = query_fragment(queries);
  uint32_t at = block * 128 + warp * 16 + g;
#pragma unroll 1
  for (uint32_t k = 0; at - g < old; k++, at += blocks_of_grid * 128) {
    asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra D; bra L; D: }" ::"r"(bar + k % 2 * 8), "r"(k / 2 & 1) : "memory");
    Fragment a, b;
    const uint8_t* from = tiles + (k % 2 * kTilePages + warp) * kPageKeys + g * 256 + q4 * 16;
#pragma unroll
    for (int c = 0; c < 4; c++) a.c[c] = *(const uint4*)(from + c * 64), b.c[c] = *(const uint4*)(from + 8 * 256 + c * 64);
    const float2 v = score_of(a, b, q);
    float* out = p.scores + (uint64_t)r * p.blocks + at;
    if (q4 == 0 && at < old) out[0] = v.x;
    if (q4 == 1 && at + 8 < old) out[8] = v.y;
    if ((block + (k + 2) * blocks_of_grid) * kTilePages >= all) continue;
    __syncthreads();  // the tile is read
    if (warp == 4) ask(k + 2);
  }
}

// Scores of the blocks that this pass completes, for a row that sees them: four warps make their keys once more.
DEVICE void score_new(const PrepParams& p, const ScoreParams& score, IndexQueries& queries) {
  __shared__ __align__(16) bf16 key[4][128];
  const uint32_t r = blockIdx.y, t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4;
  const Row row = p.rows[r];
  const uint32_t n = (row.at + 1) / p.ratio, old = (row.at - row.index) / p.ratio;
  if (n <= score.most || n == old) {
    pdl_wait();
    return;
  }
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  float norm[4];
  Angle angle = {};
  RawKeys raw;
  if (warp >= 4 && old + warp - 4 < n) ask_raw(raw, p, pages, old + warp - 4);
#pragma unroll
  for (int j = 0; j < 4; j++) norm[j] = (warp < 4 ? p.iq_norm : p.ik_norm)[32 * j + lane];
  if (warp < 4) angle = angle_of(p.inverse, p.rows[r].pos);
  else if (old + warp - 4 < n) angle = block_angle(p, row, pages, old + warp - 4);
  pdl_wait();
  for (uint32_t first = old; first < n; first += 4) {
    if (warp >= 4 && first + warp - 4 < n) {
      if (first > old) angle = block_angle(p, row, pages, first + warp - 4), ask_raw(raw, p, pages, first + warp - 4);
      float x[4];
      block_key(p, row, pages, first + warp - 4, angle, norm, raw, x);
#pragma unroll
      for (int j = 0; j < 4; j++) key[warp - 4][32 * j + lane] = to_bf16(x[j]);
    }
    if (first == old) index_queries(queries, p, r, angle, norm);  // waits for the keys as well
    else __syncthreads();
    Fragment k;
#pragma unroll
    for (int c = 0; c < 4; c++) k.c[c] = *(const uint4*)(key[g % 4] + c * 32 + t % 4 * 8);
    const float2 s = score_of(k, k, query_fragment(queries));
    if (warp == 0 && t % 4 == 0 && g < 4 && first + g < n) score.scores[(uint64_t)r * score.blocks + first + g] = s.x;
    __syncthreads();
  }
}

NINFER_KERNEL(prep_score, PrepScoreParams, 256, 2) {
  __shared__ IndexQueries queries;
  pdl_trigger();  // the selection reads nothing early but what the step began with, and lets attention start after its own wait only
  // What takes longest to reach its wait comes first.
  const uint32_t scorers = gridDim.x - p.units - 1, unit = blockIdx.x;
  if (unit < scorers) {
    if (p.score.ratio == 4) score_pages(p.prep, p.score, unit, scorers, queries);
    else score_old(p.prep, p.score, unit, scorers, queries);
  } else if (unit == scorers) {
    score_new(p.prep, p.score, queries);
  } else {
    prepare_warp(p.prep, (unit - scorers - 1) * 8 + threadIdx.x / 32);
  }
}

static constexpr int kFew = 256;  // threads
static constexpr uint32_t kFewWarps = kFew / 32, kFewStep = 4 * kFew, kFewKeys = 3 * kFewStep;  // a thread has four keys next to each other of each kFewStep
struct FewRoom {
  __align__(16) uint32_t key[kFewKeys];  // scores at first
  __align__(16) uint32_t bins[kBins];
  uint32_t mask[kFewKeys / 32];              // of 32 keys: which are taken, where they are chosen bit by bit
  uint32_t late[kFew];                       // of a thread's keys: which of the last bin's are taken
  uint32_t high[kFewWarps], scan[kFewWarps], found[3], n;
  uint2 near[kNear];                         // key and place
  __align__(8) uint64_t old, scored;         // index keys are here; all scores are
};

// Which of a thread's keys, four bits for each kFewStep of them, are among the best `most` of valid, more than as many; ties to the lower place. high is the
// thread's largest, bins are zero before. Keys stay in shared memory: loops over them are short code.
DEVICE uint32_t choose_few(FewRoom& room, uint32_t high, uint32_t valid, uint32_t most) {
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32, steps = (valid + kFewStep - 1) / kFewStep;
  high = __reduce_max_sync(~0u, high);
  if (lane == 0) room.high[warp] = high;
  __syncthreads();
  Window window(__reduce_max_sync(~0u, room.high[lane % kFewWarps]));
  uint32_t need = most, count;
#pragma unroll 1
  for (;;) {
    const uint32_t base = window.base, width = window.top - base, shift = window.shift();
#pragma unroll 1
    for (uint32_t i = 0; i < steps; i++) {
      const uint4 k = *(const uint4*)(room.key + i * kFewStep + 4 * t);
      const uint32_t key[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint32_t d = key[j] - base;
        count_in(room.bins + (d >> shift), d < width);
      }
    }
    __syncthreads();
    // From the largest on, some bins a thread.
    constexpr uint32_t kOwn = kBins / kFew;
    const uint32_t at = kBins - kOwn * (t + 1);
    uint32_t v[kOwn], own = 0;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; i += 4) {
      const uint4 q = *(const uint4*)(room.bins + at + i);
      v[i] = q.x, v[i + 1] = q.y, v[i + 2] = q.z, v[i + 3] = q.w, own += q.x + q.y + (q.z + q.w);
      *(uint4*)(room.bins + at + i) = make_uint4(0, 0, 0, 0);
    }
    const uint32_t sum = warp_through(own);
    if (lane == 31) room.scan[warp] = sum;
    __syncthreads();
    const uint32_t above = sum - own + __reduce_add_sync(~0u, lane < warp ? room.scan[lane] : 0u);  // keys in larger bins
    if (above < need && need <= above + own) {
      uint32_t left = need - above, of = 0, has = 0;
#pragma unroll
      for (int i = kOwn - 1; i >= 0; i--) {
        if (has) continue;
        if (left > v[i]) left -= v[i];
        else of = i, has = v[i];
      }
      room.found[0] = at + of, room.found[1] = left, room.found[2] = has;
    } else if (t == kFew - 1 && above + own < need) {
      room.found[1] = need - above - own, room.found[2] = 0;  // all of the window is taken
    }
    __syncthreads();
    if (!window.follow(room.found, need, count)) continue;
    if (need == count || count <= kNear) break;
    if (shift == 0) {
      choose_slowly<kFewWarps>(room, valid, most);
      __syncthreads();
      uint32_t taken = 0;
      for (uint32_t i = 0, at = 4 * t; at < valid; i++, at += kFewStep) taken |= (room.mask[at / 32] >> at % 32 & 15) << 4 * i;
      return taken;
    }
  }
  const uint32_t least = need == count ? window.base : window.top;  // to be taken in any case
  uint32_t taken = 0;
#pragma unroll 1
  for (uint32_t i = steps; i-- > 0;) {
    const uint4 k = *(const uint4*)(room.key + i * kFewStep + 4 * t);
    const uint32_t key[4] = {k.x, k.y, k.z, k.w};
    taken <<= 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      taken |= (uint32_t)(key[j] >= least) << j;
      if (key[j] < least && key[j] >= window.base) room.near[atomicAdd(&room.n, 1u)] = make_uint2(key[j], i * kFewStep + 4 * t + j);
    }
  }
  if (need == count) return taken;
  __syncthreads();
  if (t < count) {
    const uint2 own = room.near[t];
    uint32_t better = 0;
#pragma unroll 1
    for (uint32_t j = 0; j < count; j++) {
      const uint2 other = room.near[j];
      better += other.x > own.x || other.x == own.x && other.y < own.y;
    }
    if (better < need) atomicOr(room.late + own.y % kFewStep / 4, 1u << (own.y / kFewStep * 4 + own.y % 4));
  }
  __syncthreads();
  return taken | room.late[t];
}

extern "C" __global__ void __cluster_dims__(kShare, 1, 1) prep_select(const __grid_constant__ PrepSelectParams p);
NINFER_KERNEL(prep_select, PrepSelectParams, kFew, 2) {
  extern __shared__ __align__(128) uint8_t tiles[];  // a part's index keys
  __shared__ FewRoom room;
  __shared__ IndexQueries queries;
  const uint32_t r = blockIdx.y, rank = blockIdx.x, t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, q4 = lane % 4;
  if (rank >= kShare) {
    pdl_trigger();  // the blocks that select do so after their wait
    if (warp < 4) prepare_warp(p.prep, (rank - kShare) * 4 + warp);
    else pdl_wait();
    return;
  }
  const Row row = p.prep.rows[r];
  const uint32_t visible = row.at + 1, n = visible / 4;
  const uint32_t* pages = p.prep.pages + (uint64_t)row.slot * p.prep.pages_ld;
  uint32_t* list = p.select.list + (uint64_t)r * p.select.list_ld;
  if (n <= p.select.most) {
    pdl();
    if (rank) return;
    list_all<kFew>(list, p.select, pages, r, visible, t);
    return;
  }
  // Whole pages of sixteen keys.
  const uint32_t per = (n + kShare * 16 - 1) / (kShare * 16) * 16, from = min(n, rank * per), valid = min(n - from, per);
  const uint32_t old = (uint32_t)__cvta_generic_to_shared(&room.old), scored = (uint32_t)__cvta_generic_to_shared(&room.scored);
  if (warp == 7) {
    const uint32_t count = (valid + 15) / 16;
    if (lane == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(old) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(scored) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      expect(&room.old, count * kPageKeys), expect(&room.scored, (n + 15) / 16 * 64);
    }
    __syncwarp();
#pragma unroll 1
    for (uint32_t i = lane; i < count; i += 32)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"((uint32_t)__cvta_generic_to_shared(tiles + i * kPageKeys)),
                   "l"((const uint8_t*)p.prep.block_keys + (uint64_t)pages[from / 16 + i] * kPageKeys), "r"(kPageKeys), "r"(old)
                   : "memory");
    __syncwarp();
  }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // a block's shared memory is written once it has begun
  const uint32_t tail = visible - n * 4, end = t < tail ? token_row(pages, n * 4 + t) : 0;
  // Of its block's part a thread lists the keys of one step at most.
  const uint32_t step = (from + kFewStep - 1 - 4 * t) / kFewStep, place = step * kFewStep + 4 * t;
  const bool lists = place < from + valid;
  const uint32_t id = lists ? pages[4 * place / kPage] * kPage + 4 * place % kPage : 0;
#pragma unroll
  for (uint32_t i = 0; i < kBins / 4; i += kFew) *(uint4*)(room.bins + 4 * (t + i)) = make_uint4(0, 0, 0, 0);
  room.late[t] = 0;
  if (t == 0) room.n = 0;
  // The last key is of a block that the row itself completes: made here once more.
  const bool makes = warp == 4 && visible == n * 4 && valid && from + valid == n;
  Angle angle = {};
  float norm[4];
  RawKeys raw;
  if (makes) ask_raw(raw, p.prep, pages, n - 1), angle = block_angle(p.prep, row, pages, n - 1);
  if (warp < 4) angle = angle_of(p.prep.inverse, p.prep.rows[r].pos);
  if (warp < 5)
#pragma unroll
    for (int j = 0; j < 4; j++) norm[j] = (warp < 4 ? p.prep.iq_norm : p.prep.ik_norm)[lane + 32 * j];
  pdl();
  if (makes) {
    float x[4];
    block_key(p.prep, row, pages, n - 1, angle, norm, raw, x);
    await(&room.old, 0);
#pragma unroll
    for (int j = 0; j < 4; j++) ((bf16*)(tiles + (valid - 1) * 256))[32 * j + lane] = to_bf16(x[j]);
  }
  index_queries(queries, p.prep, r, angle, norm);
  const Fragment q = query_fragment(queries);
  await(&room.old, 0);
  share_wait();
  // Sixteen scores at a time go to all blocks: a lane has four of them for one.
  const uint32_t to = there(room.key + from + lane % 4 * 4, lane / 4), to_scored = there(&room.scored, lane / 4);
#pragma unroll 1
  for (uint32_t at = warp * 16; at < valid; at += kFewWarps * 16) {
    Fragment a, b;
    const uint8_t* of = tiles + (at + g) * 256 + q4 * 16;
#pragma unroll
    for (int c = 0; c < 4; c++) a.c[c] = *(const uint4*)(of + c * 64), b.c[c] = *(const uint4*)(of + 8 * 256 + c * 64);
    const float2 v = score_of(a, b, q);
    float s[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      const float x = __shfl_sync(~0u, v.x, lane % 2 * 16 + i * 4), y = __shfl_sync(~0u, v.y, lane % 2 * 16 + i * 4);
      s[i] = lane & 2 ? y : x;
    }
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to + at * 4), "r"(__float_as_uint(s[0])),
                 "r"(__float_as_uint(s[1])), "r"(__float_as_uint(s[2])), "r"(__float_as_uint(s[3])), "r"(to_scored)
                 : "memory");
  }
  __syncwarp();
  await(&room.scored, 0);
  if (rank == 0 && t < tail) list[p.select.most * 4 + t] = end;
  if (rank == 0 && t == 0) p.select.count[r] = p.select.most * 4 + tail;
  uint32_t high = 0;
#pragma unroll 1
  for (uint32_t at = 4 * t; at < (n + kFewStep - 1) / kFewStep * kFewStep; at += kFewStep) {
    uint32_t key[4];
    keys_of(*(const float4*)(room.key + at), (1u << min(n - min(n, at), 4u)) - 1, key);
    *(uint4*)(room.key + at) = make_uint4(key[0], key[1], key[2], key[3]);
    high = max(high, max(max(key[0], key[1]), max(key[2], key[3])));
  }
  const uint32_t taken = choose_few(room, high, n, p.select.most);
  // Places of what is taken: ten bits for each step.
  uint32_t all, before = 0, own = 0;
#pragma unroll
  for (uint32_t i = 0; i < 3; i++) own |= __popc(taken >> 4 * i & 15) << 10 * i;
  const uint32_t places = block_before<kFewWarps>(room.scan, own, all);
#pragma unroll
  for (uint32_t i = 0; i < 2; i++)
    if (i < step) before += all >> 10 * i & 1023;
  if (lists) list_taken(list, p.select, pages, taken >> 4 * step & 15, before + (places >> 10 * step & 1023), place, id);
}
