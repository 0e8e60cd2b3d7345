// Parameter structs: one per kernel, passed by value. tools/kernelgen reads this file and writes the Go mirrors, so it keeps to
// flat structs of uint32_t, uint64_t, float, pointers, and arrays of those or of an earlier struct. Every struct is a multiple of
// eight bytes. R is the number of rows of a pass, all of one lane; a chunk is 64 of them.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

// One row of a pass, as in the decode device's control block.
struct Row {
  uint32_t lane, index, at, token;
  uint32_t pos[3];
  uint32_t slot, media;
  uint32_t reserved[3];
};

struct DeltaPrepareParams {
  const __nv_bfloat16* x;       // [R][x_ld]: q, k, v before the convolution
  const __nv_bfloat16* window;  // [3][c]
  const __nv_bfloat16* a;       // [R][a_ld]
  const __nv_bfloat16* b;       // [R][a_ld]
  const float* conv;            // [4][c]
  const float* alog;            // [heads]
  const float* dt;              // [heads]
  void* keys;                   // FP16 [chunks][key_heads][2][64][64]: parts of 64 values, rows of pieces of 16 bytes: piece p of row r is at p^(r%8)
  void* queries;                // the same
  void* inverse;                // FP16 [chunks][heads][64][64]: (1 + A)^-1 times beta, turned; garbage right of column 32 in the rows above
  void* scores;                 // FP16 [chunks][heads][64][64]: decay*(q.k)/sqrt(128) on and below the diagonal, turned
  float* decay;                 // [chunks][heads][2][64]: from the start to a token, and from it to the end
  uint32_t rows, x_ld, a_ld, key_heads, heads, reserved;
};

struct DeltaRunParams {
  const __nv_bfloat16* x;
  const __nv_bfloat16* window;
  const float* conv;
  const void* keys;
  const void* queries;
  const void* inverse;
  const void* scores;
  const float* decay;
  void* state;                  // [heads][128][128], FP32 or BF16
  void* out;                    // FP16 [R][heads*128]: o without the scale
  float* scales;                // [chunks][heads][128] of o, a power of two a column
  uint32_t rows, x_ld, key_heads, heads, half_state, stages;
};

struct DeltaFinishParams {
  const __nv_bfloat16* x;
  const __nv_bfloat16* z;       // [R][z_ld]
  const float* norm;            // [128]
  const float* scales;
  const void* o;                // FP16 [R][heads*128]
  __nv_bfloat16* window;
  __nv_bfloat16* out;           // [R][out_ld]: o/rms(o)*norm*sigmoid(z); may be z
  uint32_t rows, x_ld, z_ld, out_ld, heads, c;
  float eps;
  uint32_t reserved;
};

struct AttendParams {
  const __nv_bfloat16* q;       // [R][heads*256]
  const void* keys;             // [pages][64][kv][256]: BF16, or E4M3 with scales
  const void* values;
  const __nv_bfloat16* key_scales;    // [pages][64][kv], or null
  const __nv_bfloat16* value_scales;
  const uint32_t* pages;        // of this lane
  const uint32_t* list;         // [tiles][list_ld]: block, and from bit 17 on which rows of the tile see it; null: all blocks
  const uint32_t* count;        // [tiles]
  const __nv_bfloat16* qg;      // [R][qg_ld], gates 256 after the queries of each head
  __nv_bfloat16* out;           // [R][out_ld]
  uint32_t rows, base, heads, kv, tile, list_ld, qg_ld, out_ld;  // base: position of the first row; tile: rows of a block, at most 15
};

struct PrepRowsParams {
  const Row* rows;              // [R]; positions only
  const __nv_bfloat16* qg;      // [R][qg_ld], 512 a head, or null: append only
  const __nv_bfloat16* key;     // [R][key_ld]
  const __nv_bfloat16* value;   // [R][value_ld]
  const __nv_bfloat16* index;   // [R][index_ld]: four queries and a key of 128
  const float* q_norm;          // [256]
  const float* k_norm;          // [256]
  const float* iq_norm;         // [128]
  const float* ik_norm;         // [128]
  const float* inverse;         // [32] inverse frequencies, then the axis of each as uint32_t
  __nv_bfloat16* q;             // [R][heads*256]
  __nv_bfloat16* iq;            // [R][4*128]
  void* keys;                   // [pages][64][kv][256]: BF16, or E4M3 with scales; keys and queries are turned by a Hadamard transform then
  void* values;
  __nv_bfloat16* key_scales;    // [pages][64][kv], or null
  __nv_bfloat16* value_scales;
  __nv_bfloat16* raw;           // [pages][64][128]
  uint32_t* positions;          // [pages][64][3]
  __nv_bfloat16* block_keys;    // [pages][16][128]
  const uint32_t* pages;
  uint32_t base, heads, kv, qg_ld, key_ld, value_ld, index_ld;
  float eps;
};

struct ScoreRowsParams {
  const __nv_bfloat16* iq;      // [R][4*128]
  const __nv_bfloat16* keys;    // [pages][16][128]
  const uint32_t* pages;
  float* scores;                // [R][ld], blocks that a row sees
  uint32_t rows, base, most, ld;  // most: that a row selects; rows that see no more have no scores
};

struct SelectRowsParams {
  const float* scores;          // [R][ld]
  const uint32_t* forced;       // [R][forced_ld] tokens, or null
  const uint32_t* forced_count; // [R], ~0: the row selects itself
  uint32_t* bits;               // [R][words]: blocks that the row sees
  uint32_t* seen;               // [R][seen_ld] tokens attended to, ascending, or null
  uint32_t* seen_count;         // [R]
  uint32_t base, most, ld, forced_ld, seen_ld, words;  // words: at least as many as the last row's blocks need
};

struct UniteRowsParams {
  const uint32_t* bits;         // [R][words]
  uint32_t* list;               // [tiles][list_ld]: blocks that any row of the tile sees, ascending, and which rows from bit 17 on
  uint32_t* count;              // [tiles]
  uint32_t rows, tile, list_ld, words;
};

struct ConvRowsParams {
  const __nv_bfloat16* x;       // [R][c]
  const float* w;               // [taps][c]
  __nv_bfloat16* window;        // [(taps-1)*dilation][c]
  const float* v;               // [R][c]
  __nv_bfloat16* streams;       // [R][c]: += v + silu(conv)
  uint32_t rows, c, taps, dilation;
};

struct SizesParams {
  uint32_t* out;
  uint32_t n, reserved;
};
