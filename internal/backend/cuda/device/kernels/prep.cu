// Before the selection: queries and keys, and index scores.
//
//   prep        norms and rotation of queries and keys, append to the planes, index key of a block that a row completes. Any shape. Grid: unit,
//               row.
//   prep_score  the same but for index queries, and beside it the index scores of complete blocks, for index heads of 128 and four of them. A
//               block that the pass completes is scored for all rows that see it where its key is made. Grid: unit or some blocks, row.
#include "common.cuh"

// The angle of pair i among the first rot values of a head.
struct Turn {
  float sin, cos;
};
DEVICE Turn turn_of(const float* inverse, uint32_t rot, const uint32_t* pos, uint32_t i) {
  Turn a = {0.0f, 1.0f};
  if (i < rot / 2) sincosf(__fmul_rn((float)(int)pos[((const uint32_t*)inverse)[rot / 2 + i]], inverse[i]), &a.sin, &a.cos);
  return a;
}

// Rotates pair i of the first rot values of v in shared memory; all threads of the block.
DEVICE void rotate(float* v, uint32_t rot, Turn turn, uint32_t i) {
  const uint32_t half = rot / 2;
  __syncthreads();
  if (i < half) {
    const float a = v[i], b = v[i + half];
    v[i] = a * turn.cos - b * turn.sin;
    v[i + half] = b * turn.cos + a * turn.sin;
  }
  __syncthreads();
}

// Normalised Hadamard transform of width values in shared memory, a power of two of them, thread a value; all threads of the block.
DEVICE void hadamard(float* v, uint32_t width) {
  const uint32_t t = threadIdx.x;
  for (uint32_t h = 1; h < width; h <<= 1) {
    float a = 0.0f, b = 0.0f;
    if (t < width) a = v[t], b = v[t ^ h];
    __syncthreads();
    if (t < width) v[t] = t & h ? b - a : a + b;
    __syncthreads();
  }
  if (t < width) v[t] *= 1.0f / sqrtf((float)width);
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
  uint16_t word = most > 0.0f ? max(__bfloat16_as_ushort(to_bf16(most / 448.0f)), (unsigned short)1) : 0;
  const float s = __uint_as_float((uint32_t)word << 16);
  if (t < width) codes[t] = word ? __nv_cvt_float_to_fp8(x / s, __NV_SATFINITE, __NV_E4M3) : 0;
  if (t == 0) *scale = __ushort_as_bfloat16(word);
}

// The four index queries of a row, normalised and rotated, two values a thread.
struct IndexQueries {
  float part[8], v[4][128];
  __align__(16) bf16 q[4][128];
};
DEVICE void index_queries(IndexQueries& s, const PrepParams& p, uint32_t r, Turn turn, const float* norm) {
  const uint32_t t = threadIdx.x, h = t / 64, i = t % 64;
  const bf16* in = p.index + ((uint64_t)r * 5 + h) * 128;
  const float a = from_bf16(in[i]), b = from_bf16(in[i + 64]);
  const float sum = warp_sum(fmaf(a, a, b * b));
  if (t % 32 == 0) s.part[t / 32] = sum;
  __syncthreads();
  const float scale = 1.0f / sqrtf((s.part[2 * h] + s.part[2 * h + 1]) / 128 + p.eps);
  s.v[h][i] = a * scale * (1.0f + norm[0]);
  s.v[h][i + 64] = b * scale * (1.0f + norm[1]);
  rotate(s.v[h], p.rot, turn, i);
  s.q[h][i] = to_bf16(s.v[h][i]), s.q[h][i + 64] = to_bf16(s.v[h][i + 64]);
  __syncthreads();
}

// A lane's eight values of each query, and what half a warp makes of a key.
struct Eighths {
  float q[4][8];
};
DEVICE void values8(uint4 v, float* k) {
  k[0] = lo(v.x), k[1] = hi(v.x), k[2] = lo(v.y), k[3] = hi(v.y), k[4] = lo(v.z), k[5] = hi(v.z), k[6] = lo(v.w), k[7] = hi(v.w);
}
DEVICE Eighths eighths(const IndexQueries& s) {
  Eighths e;
#pragma unroll
  for (int h = 0; h < 4; h++) values8(*(const uint4*)(s.q[h] + threadIdx.x % 16 * 8), e.q[h]);
  return e;
}
DEVICE float score8(const Eighths& e, uint4 key) {
  float k[8], sum = 0.0f;
  values8(key, k);
#pragma unroll
  for (int h = 0; h < 4; h++) {
    float s = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) s = fmaf(k[i], e.q[h][i], s);
#pragma unroll
    for (int o = 8; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    sum += fmaxf(s, 0.0f);
  }
  return sum * (1.0f / sqrtf(128.0f));
}

// One unit of a row. Rows, pages, positions, weights and tokens of earlier passes are here before the wait, and with them all angles.
template <bool SCORE>
DEVICE void prepare(const PrepParams& p, uint32_t unit, const ScoreParams* score, IndexQueries* queries) {
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
    if (!SCORE) return;
    __shared__ __align__(16) bf16 key[128];
    const float queries_norm[2] = {p.iq_norm[t % 64], p.iq_norm[t % 64 + 64]};
    if (t < 128) key[t] = to_bf16(v[t]);
    for (uint32_t i = r; i < gridDim.y; i++) {
      const Row later = p.rows[i];
      if (later.lane != row.lane) return;
      if ((later.at + 1) / p.ratio <= score->most) continue;
      index_queries(*queries, p, i, turn_of(p.inverse, p.rot, p.rows[i].pos, t % 64), queries_norm);
      const float s = score8(eighths(*queries), *(const uint4*)(key + t % 16 * 8));
      if (t == 0) score->scores[(uint64_t)i * score->blocks + row.at / p.ratio] = s;
      __syncthreads();
    }
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

NINFER_KERNEL(prep, PrepParams, 256, 1) { prepare<false>(p, blockIdx.x, nullptr, nullptr); }

// Scores of the blocks that earlier passes have completed, half a warp a key. FOUR: blocks of four tokens, so that the sixteen keys of a turn
// are those of one page.
template <bool FOUR>
DEVICE void score_old(const PrepParams& prep, const ScoreParams& p, uint32_t block, uint32_t blocks_of_grid, IndexQueries& queries) {
  const uint32_t r = blockIdx.y, t = threadIdx.x, half = t % 32 / 16;
  const Row row = p.rows[r];
  const uint32_t n = (row.at + 1) / p.ratio, old = (row.at - row.index) / p.ratio;
  uint32_t first = block * 16 + t / 32 * 2;  // the same in both halves of a warp
  if (n <= p.most || block * 16 >= old) {
    pdl();
    return;
  }
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  const Blocks blocks(p.ratio);
  const bf16* keys = p.keys + t % 16 * 8;
  const uint32_t step = blocks_of_grid * 16;
  // A block's page is asked for a turn before its key.
  auto page_of = [&](uint32_t b) { return b < old ? pages[FOUR ? b / 16 : blocks.last(b) / kPage] : 0; };
  auto fetch = [&](uint32_t b, uint32_t page) {
    return b < old ? __ldcg((const uint4*)(keys + (FOUR ? (uint64_t)page * 16 + t / 16 : blocks.row(page, b)) * 128)) : make_uint4(0, 0, 0, 0);
  };
  uint32_t page = page_of(first + half), later = page_of(first + step + half);
  uint4 next = fetch(first + half, page);
  const Turn turn = turn_of(prep.inverse, prep.rot, prep.rows[r].pos, t % 64);
  const float norm[2] = {prep.iq_norm[t % 64], prep.iq_norm[t % 64 + 64]};
  pdl();
  index_queries(queries, prep, r, turn, norm);
  const Eighths e = eighths(queries);
  for (; first < old; first += step) {
    const uint4 key = next;
    page = later, later = page_of(first + 2 * step + half);
    next = fetch(first + step + half, page);
    const float s = score8(e, key);
    if (t % 16 == 0 && first + half < old) p.scores[(uint64_t)r * p.blocks + first + half] = s;
  }
}

NINFER_KERNEL(prep_score, PrepScoreParams, 256, 2) {
  __shared__ IndexQueries queries;
  if (blockIdx.x < p.units) prepare<true>(p.prep, blockIdx.x, &p.score, &queries);
  else if (p.score.ratio == 4) score_old<true>(p.prep, p.score, blockIdx.x - p.units, gridDim.x - p.units, queries);
  else score_old<false>(p.prep, p.score, blockIdx.x - p.units, gridDim.x - p.units, queries);
}
