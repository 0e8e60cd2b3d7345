// Parameter structs: one per kernel, passed by value. tools/kernelgen reads this file and writes the Go mirrors, so it keeps to
// flat structs of uint32_t, float, pointers, and arrays of those or of an earlier struct. Pointers come first where possible;
// every struct is a multiple of eight bytes.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

// One matrix of a launch that runs over several matrices with the same input.
struct Part {
  const void* w;          // rows x K, row-major: BF16, E4M3, or 4-bit codes
  const void* scale;      // E4M3: one scale a row, as in all structs read by words of four bytes; Q4: FP16 per 64 codes; BF16: null
  void* out;              // [R][out_ld], or null when only the argmax is wanted
  uint32_t rows;          // rows of this part
  uint32_t out_ld;        // elements between two activation rows of out
  uint32_t flags;         // PART_*
  uint32_t reserved;
};

struct GemvParams {
  const __nv_bfloat16* x;  // [R][x_ld] activations
  uint64_t* best;          // [R][blocks] argmax keys, or null
  uint32_t r, x_ld, k;     // activation rows (1..8), their stride, K
  uint32_t piece;          // Q4: tiles of a warp whose scales have a place; else rows of a block, see stream.cu
  uint32_t stages;         // Q4: copies on their way to a warp; else windows of sums
  uint32_t parts;          // parts used
  uint32_t first_parts;    // the first so many are in the kernel's own format, the rest BF16
  uint32_t first_blocks;   // blocks that work on the first parts
  uint32_t valid_rows;     // rows >= this never win the argmax
  uint32_t trigger;        // next kernel may start: 0 at once, 1 after the own wait (R3), 2 when the activations have been read
  uint32_t window;         // rows whose sums are kept before they are added up: 16 to 64
  uint32_t reserved;
  Part part[8];
};

struct BestParams {
  const uint64_t* best;    // [R][n]
  const uint32_t* ids;     // row -> token id, or null for the row itself
  uint32_t* out;           // [R] token ids
  uint32_t n, r;
};

struct NaiveParams {
  const __nv_bfloat16* x;
  const void* w;
  const void* scale;
  void* out;
  uint32_t r, x_ld, k, rows, out_ld, format, flags, reserved;
};

struct HcDownParams {
  const __nv_bfloat16* x;        // [R][4][H] streams; with y they and inject are read before the wait: the kernels between them and y have waited (R3)
  const __nv_bfloat16* y;        // [R][H] block output still to be injected, or null
  const float* inject;           // [R][4] its weights
  const __nv_bfloat16* norm;     // [4][H], used as 1 + w
  const void* down;              // [L][4H]
  const void* down_scale;        // [L] or null
  const __nv_bfloat16* inj_w;    // [4][4H], or null (mixers)
  __nv_bfloat16* x_out;          // [R][4][H] streams after injection; never x itself
  float* partial;                // [R][4][2][L+4], of both halves of a stream; with three rows and more [R][4][4][L+4], of its quarters
  float* square;                 // [R][4][2] or [R][4][4] sums of squares of the new streams
  uint32_t r, h, l, groups;      // groups of weight rows; grid = 8 * (groups + 1), or 16 * (groups + 1) of quarters
  uint32_t scale_f32;
  uint32_t trigger;              // the next kernel may start: 0 at once, 1 when the activations have been read, 2 after the wait
};

struct HcUpParams {
  const __nv_bfloat16* x;        // [R][4][H] the new streams
  const __nv_bfloat16* norm;     // [4][H]
  const float* partial;          // of hc_down
  const float* square;
  const void* up;                // [4H][L]
  const void* up_scale;          // [4H] or null
  __nv_bfloat16* mix;            // [R][H]
  float* inject;                 // [R][4], or null
  uint32_t r, h, l, scale_f32;
  uint32_t trigger, reserved;
};

// What a kernel brings into L2 for a later one, while memory has little to do: n pieces of bytes, pitch apart, the first so many from at[0] on and
// the others from at[1] on. bytes is a multiple of 16.
struct Ahead {
  const void* at[2];
  uint32_t bytes, pitch, first, n;
};

struct RouterParams {
  const __nv_bfloat16* x;        // [R][x_ld]
  const void* router;            // [E][K]
  const void* router_scale;
  const void* gate;              // [I][K] shared expert
  const void* gate_scale;
  const void* up;                // [I][K]
  const void* up_scale;
  const __nv_bfloat16* shared;   // [K] shared gate vector, always BF16
  float* logits;                 // [R][E]
  __nv_bfloat16* hidden;         // [R][I] silu(gate x) * (up x)
  float* shared_logit;           // [R]
  Ahead ahead;                   // of the next layer's first matrix
  uint32_t r, x_ld, k, experts, inner, scale_f32;
  uint32_t trigger;
  uint32_t shares;               // pairs of rows of each block in the upper half, how many blocks have one more in the lower
};

struct ExpertUpParams {
  const __nv_bfloat16* x;        // [R][x_ld]
  const float* logits;           // [R][E]
  const void* bank;              // packed tiles, see expert.cu
  const float* divisor;          // [E]
  __nv_bfloat16* hidden;         // [R][topk][I]
  const __nv_bfloat16* shared_w; // [K][I]: the shared expert's second half, which several rows have here
  const __nv_bfloat16* shared_hidden;  // [R][I]
  const float* shared_logit;     // [R]
  float* shared_out;             // [R][K]
  uint32_t r, x_ld, k, experts, topk, inner;
  uint32_t slots;                // tiles of weights a block has on their way
  uint32_t trigger;              // the next kernel may start when so many of a block's tiles have been asked for
};

struct ExpertDownParams {
  const float* logits;           // [R][E]
  const __nv_bfloat16* hidden;   // [R][topk][I]
  const void* bank;              // packed tiles
  const float* divisor;          // [E]
  const __nv_bfloat16* shared_w; // [H][I]: of a single row
  const __nv_bfloat16* shared_hidden;  // [R][I]
  const float* shared_logit;     // [R]
  const float* shared_out;       // [R][H]: of several rows, from expert_gate_up_rows
  __nv_bfloat16* out;            // [R][H]
  uint32_t* distinct;            // number of distinct experts, for reports; may be null
  uint32_t r, experts, topk, inner, h;
  uint32_t early;                // 0: nothing is read before the wait; else so many of several rows' experts are asked for before it
  uint32_t window, reserved;     // of several rows: tiles of eight rows that a block works on at a time
};

struct RepackParams {
  const uint8_t* codes;          // [E][N][K/2]
  const uint8_t* scales;         // expert_block_scale_k16_m128x4
  uint8_t* bank;                 // packed tiles
  uint32_t n, k, first_expert, count, paired, reserved;  // paired: gate/up, 8 rows of the first half with 8 of the second; else down
};

struct ReadParams {
  const void* src;
  uint64_t bytes;
  uint32_t* sink;
  uint32_t stages, stage_bytes;
};

struct CopyParams {
  const void* src;
  void* dst;
  uint64_t bytes;
};

struct EmptyParams {
  uint32_t* out;
  uint32_t value, wait;
};

struct FillParams {
  void* dst;
  uint64_t count;                // elements: BF16, E4M3 codes, FP32, or bytes
  uint32_t kind, seed;
  float scale;
  uint32_t reserved;
};

struct SizesParams {
  uint32_t* out;
  uint32_t n, reserved;
};
