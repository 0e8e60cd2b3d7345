// Attention of many rows of one lane, heads of 256, up to sixteen queries a key head.
//
//   attend_rows      a few neighbouring rows with all queries of a key head against the blocks of four tokens that any of them sees, in order. A block's
//                    mask says which rows see it; a row sees no token after its own. Without a list all blocks are looked at. Grid: tile of rows, key head.
//   attend_rows_fp8  the same where keys and values are E4M3 with a scale.
//
// 48 rows of queries (rows of the pass times heads) by 64 tokens at a time; four warps share the tokens for the scores and the columns for the values.
#include "common.cuh"

extern __shared__ __align__(128) uint8_t dynamic[];

static constexpr int kAttend = 128;
static constexpr uint32_t kQueries = 48, kTokens = 64, kLine = 512;  // bytes of a head

struct Meta {
  uint32_t id[16], mask[16], row[16];  // block, which rows see it, where its first token is
};

// Piece (sixteen bytes) of a head of a row in shared memory.
DEVICE uint32_t piece_at(uint32_t r, uint32_t piece) { return r * kLine + ((piece ^ (r & 7)) << 4); }

// Sixteen E4M3 codes to BF16 pairs, exactly.
DEVICE void codes_to_bf16(uint4 c, uint32_t* out) {
  const uint32_t w[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t h[2];
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(h[0]), "=r"(h[1]) : "r"(w[i]));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float2 f = __half22float2(*(const __half2*)&h[j]);
      out[2 * i + j] = pack_bf16(f.x, f.y);
    }
  }
}

template <bool F8>
DEVICE void attend_for(const AttendParams& p) {
  uint8_t* const smem = dynamic;
  const uint32_t query = shared_at(smem), key = query + kQueries * kLine, value = key + kTokens * kLine, weight = value + kTokens * kLine;
  float* const top = (float*)(smem + kQueries * kLine + 2 * kTokens * kLine + kQueries * 128);  // [4][48]
  Meta* const meta = (Meta*)(top + 4 * kQueries);                                                // [2]
  float* const scales = (float*)(meta + 2);                                                      // [2][64]: of keys, values
  const uint32_t tile = blockIdx.x, kvh = blockIdx.y, t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, q4 = lane % 4;
  const uint32_t group = p.heads / p.kv, first = tile * p.tile, rows = min(p.tile, p.rows - first);
  pdl();
  const uint32_t blocks = p.list ? p.count[tile] : (p.base + first + rows - 1) / 4 + 1, steps = (blocks + 15) / 16;
  const uint32_t last = p.base + first + rows - 1;  // tokens after it may never have been written
  const uint32_t* list = p.list ? p.list + (uint64_t)tile * p.list_ld : nullptr;
  auto find = [&](uint32_t step) {  // sixteen threads
    const uint32_t at = step * 16 + t;
    Meta& m = meta[step & 1];
    uint32_t id = at, mask = 0;
    if (at < blocks) {
      const uint32_t word = list ? list[at] : ~0u << kMaskShift | at;
      id = word & kIdMask, mask = word >> kMaskShift;
    }
    m.id[t] = id, m.mask[t] = mask;
    m.row[t] = mask ? (uint32_t)(block_row(p.pages, id) * 4) : 0;
  };
  auto fetch = [&](uint32_t step, bool values) {
    const Meta& m = meta[step & 1];
    const uint8_t* from = (const uint8_t*)(values ? p.values : p.keys);
    const uint32_t to = values ? value : key;
    if (!F8) {
#pragma unroll 4
      for (uint32_t i = 0; i < 16; i++) {
        const uint32_t r = i * 4 + warp;
        copy16(to + piece_at(r, lane), from + (((uint64_t)m.row[i] + warp) * p.kv + kvh) * 512 + lane * 16, m.mask[i] != 0 && m.id[i] * 4 + warp <= last);
      }
      copies_commit();
    } else {
      uint4 v[8];
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        const uint32_t r = i * 8 + t / 16;
        v[i] = m.mask[r / 4] && m.id[r / 4] * 4 + r % 4 <= last ? *(const uint4*)(from + (((uint64_t)m.row[r / 4] + r % 4) * p.kv + kvh) * 256 + t % 16 * 16) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        const uint32_t r = i * 8 + t / 16;
        uint32_t w[8];
        codes_to_bf16(v[i], w);
        *(uint4*)(smem + (to - query) + piece_at(r, t % 16 * 2)) = make_uint4(w[0], w[1], w[2], w[3]);
        *(uint4*)(smem + (to - query) + piece_at(r, t % 16 * 2 + 1)) = make_uint4(w[4], w[5], w[6], w[7]);
      }
      if (t < 64) scales[(values ? 64 : 0) + t] = m.mask[t / 4] && m.id[t / 4] * 4 + t % 4 <= last ? from_bf16((values ? p.value_scales : p.key_scales)[((uint64_t)m.row[t / 4] + t % 4) * p.kv + kvh]) : 0.0f;
    }
  };
  for (uint32_t i = t; i < kQueries * 32; i += kAttend) {
    const uint32_t r = i / 32, row = r / group;
    const bool there = row < rows;
    copy16(query + piece_at(r, i % 32), there ? p.q + ((uint64_t)(first + row) * p.heads + kvh * group + r % group) * 256 + i % 32 * 8 : p.q, there);
  }
  if (t < 16) find(0);
  if (F8) {
    copies_commit();
    copies_wait<0>();
  }
  __syncthreads();
  fetch(0, false);
  fetch(0, true);
  // Rows of queries of this lane: 16*m + g + 8*i.
  uint32_t bit[3][2], limit[3][2];
#pragma unroll
  for (int m = 0; m < 3; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t row = (m * 16 + i * 8 + g) / group;
      bit[m][i] = row < rows ? 1u << row : 0, limit[m][i] = p.base + first + row;
    }
  float acc[3][8][4] = {}, most[3][2], sum[3][2] = {};
#pragma unroll
  for (int m = 0; m < 3; m++) most[m][0] = most[m][1] = -1e30f;
  const float scale = 0.0625f * 1.4426950408889634f;
  const uint32_t rowA = lane % 16, cA = lane / 16, rowB = warp * 16 + lane / 16 * 8 + lane % 8, cB = lane / 8 % 2, x7 = lane & 7;
  const uint32_t rowV = lane / 8 % 2 * 8 + lane % 8, cV = warp * 8 + lane / 16;
  for (uint32_t step = 0; step < steps; step++) {
    if (!F8) copies_wait<1>();
    __syncthreads();  // keys are there
    if (t < 16 && step + 1 < steps) find(step + 1);
    float s[3][2][4] = {};
#pragma unroll
    for (uint32_t k = 0; k < 16; k++) {
      uint32_t b[4];
      matrices(b, key + rowB * kLine + (((2 * k + cB) ^ x7) << 4));
#pragma unroll
      for (uint32_t m = 0; m < 3; m++) {
        uint32_t a[4];
        matrices(a, query + (m * 16 + rowA) * kLine + (((2 * k + cA) ^ x7) << 4));
        tensor_bf16(s[m][0], a, b[0], b[1]);
        tensor_bf16(s[m][1], a, b[2], b[3]);
      }
    }
    const Meta& now = meta[step & 1];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const uint32_t block = warp * 4 + n * 2 + q4 / 2, mask = now.mask[block], token = now.id[block] * 4 + q4 % 2 * 2;
      const float2 f = F8 ? *(const float2*)(scales + warp * 16 + n * 8 + 2 * q4) : make_float2(1.0f, 1.0f);
#pragma unroll
      for (int m = 0; m < 3; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const bool seen = (mask & bit[m][i / 2]) && token + i % 2 <= limit[m][i / 2];
          s[m][n][i] = seen ? (F8 ? s[m][n][i] * (i % 2 ? f.y : f.x) : s[m][n][i]) : -INFINITY;
        }
    }
#pragma unroll
    for (int m = 0; m < 3; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float v = quad_max(fmaxf(fmaxf(s[m][0][2 * i], s[m][0][2 * i + 1]), fmaxf(s[m][1][2 * i], s[m][1][2 * i + 1])));
        if (q4 == 0) top[warp * kQueries + m * 16 + i * 8 + g] = v;
      }
    float2 vf[2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
    if (F8)
      for (int n = 0; n < 2; n++) vf[n] = *(const float2*)(scales + 64 + warp * 16 + n * 8 + 2 * q4);
    __syncthreads();  // keys have been used
    if (step + 1 < steps) fetch(step + 1, false);
    else if (!F8) copies_commit();
#pragma unroll
    for (int m = 0; m < 3; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t r = m * 16 + i * 8 + g;
        const float v = fmaxf(most[m][i], fmaxf(fmaxf(top[r], top[kQueries + r]), fmaxf(top[2 * kQueries + r], top[3 * kQueries + r])));
        const float old = power2((most[m][i] - v) * scale);
        most[m][i] = v;
        float e[4];
#pragma unroll
        for (int n = 0; n < 2; n++) e[2 * n] = power2((s[m][n][2 * i] - v) * scale), e[2 * n + 1] = power2((s[m][n][2 * i + 1] - v) * scale);
        sum[m][i] = sum[m][i] * old + quad_sum((e[0] + e[1]) + (e[2] + e[3]));
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const uint32_t at = r * 128 + (((warp * 2 + n) ^ (r & 7)) << 4) + q4 * 4;
          *(uint32_t*)(smem + (weight - query) + at) = F8 ? pack_bf16(e[2 * n] * vf[n].x, e[2 * n + 1] * vf[n].y) : pack_bf16(e[2 * n], e[2 * n + 1]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) acc[m][j][2 * i] *= old, acc[m][j][2 * i + 1] *= old;
      }
    if (!F8) copies_wait<1>();
    __syncthreads();  // weights and values are there
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
      uint32_t a[3][4];
#pragma unroll
      for (uint32_t m = 0; m < 3; m++) matrices(a[m], weight + (m * 16 + rowA) * 128 + (((2 * k + cA) ^ x7) << 4));
#pragma unroll
      for (uint32_t j = 0; j < 8; j += 2) {
        uint32_t b[4];
        matrices_turned(b, value + (k * 16 + rowV) * kLine + (((cV + j) ^ x7) << 4));
#pragma unroll
        for (int m = 0; m < 3; m++) {
          tensor_bf16(acc[m][j], a[m], b[0], b[1]);
          tensor_bf16(acc[m][j + 1], a[m], b[2], b[3]);
        }
      }
    }
    __syncthreads();  // values and weights have been used
    if (step + 1 < steps) fetch(step + 1, true);
    else if (!F8) copies_commit();
  }
#pragma unroll
  for (int m = 0; m < 3; m++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (q4 == 0) top[warp * kQueries + m * 16 + i * 8 + g] = sum[m][i];
  __syncthreads();
#pragma unroll
  for (int m = 0; m < 3; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (!bit[m][i]) continue;
      const uint32_t r = m * 16 + i * 8 + g;
      const float inverse = 1.0f / (top[r] + top[kQueries + r] + top[2 * kQueries + r] + top[3 * kQueries + r]);
      const uint64_t row = first + r / group, head = kvh * group + r % group;
      const bf16* gate = p.qg + row * p.qg_ld + head * 512 + 256 + warp * 64 + 2 * q4;
      bf16* out = p.out + row * p.out_ld + head * 256 + warp * 64 + 2 * q4;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const uint32_t w = *(const uint32_t*)(gate + j * 8);
        *(uint32_t*)(out + j * 8) = pack_bf16(acc[m][j][2 * i] * inverse * sigmoid(lo(w)), acc[m][j][2 * i + 1] * inverse * sigmoid(hi(w)));
      }
    }
}

NINFER_KERNEL(attend_rows, AttendParams, kAttend, 2) { attend_for<false>(p); }
NINFER_KERNEL(attend_rows_fp8, AttendParams, kAttend, 2) { attend_for<true>(p); }
