// Parameter structs: one per kernel, passed by value. tools/kernelgen reads this file and writes the Go mirrors, so it keeps to
// flat structs of uint32_t, uint64_t, float, pointers, and arrays of those or of an earlier struct. Every struct is a multiple of
// eight bytes. R is the number of rows of a pass; activations are BF16 unless a pointer says float.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

// One row of a pass, in the control block.
struct Row {
  uint32_t lane;      // index into the lanes of the pass
  uint32_t index;     // among the lane's rows
  uint32_t at;        // index in its sequence, on the clock of the pass
  uint32_t token;
  uint32_t pos[3];    // rotary positions, signed
  uint32_t slot;      // image
  uint32_t media;     // 1 + row of the media buffer, 0 for a token
  uint32_t reserved[3];
};

// One lane of a pass.
struct Lane {
  uint32_t first, rows;  // its rows
  uint32_t slot;         // image
  uint32_t fold;         // recorded rows to bring fixed states forward by, before anything else
  uint32_t record;       // 1: leave fixed states (folded) alone and record the rows
  uint32_t carry;        // where carried rows are read or appended
  uint32_t chain;        // 1: carried streams come from the chain buffer
  uint32_t from;         // of delta matrices: where their records lie, and whether a step may leave one (Records of delta.cu)
};

// A stored matrix: rows first..first+rows of an encoded tensor with k columns.
struct Mat {
  const void* codes;
  const void* high;          // high bits of Q5 and Q6
  const void* scales;
  const float* divisors;     // NVFP4
  uint32_t format;           // FMT_*
  uint32_t first, rows, k;
  uint32_t stride, high_stride, scale_stride;  // bytes a row
  uint32_t expert_rows;      // NVFP4: rows of one matrix of a bank
};

struct Part {
  Mat m;
  void* out;                 // [R][out_ld], BF16, or FP32 with PART_F32
  uint32_t out_ld, flags;
  float scale;               // of the argument of an epilogue function
  uint32_t reserved;
};

struct GemvParams {
  const void* x;             // [r][x_ld], BF16 or FP32
  uint32_t r, x_ld, x_f32, parts;  // r: 1..8
  Part part[6];
};

struct ProjectPart {
  const void* w;             // [rows][k]: BF16 or E4M3
  const void* scale;         // of an E4M3 row: BF16, or FP32 with scale_f32
  __nv_bfloat16* out;        // [r][out_ld]
  uint32_t rows, out_ld, scale_f32;
  uint32_t paced;            // of the first part: kernels.Paced
};

// A convolution's window still to be brought forward by the rows of a pass, or their records to be left.
struct Shift {
  const Lane* lanes;
  const __nv_bfloat16* x;    // [R][c] inputs
  __nv_bfloat16* window;     // [slots][depth][c]
  __nv_bfloat16* records;    // [lanes][verify][c]
  uint32_t count, c, depth, verify;  // count: of lanes, 0 for nothing to do
};

struct ProjectParams {
  const void* x;             // [r][x_ld]: BF16, or FP32 with x_f32
  const float* squares;      // [r][k/dim][4]: parts of the sum of squares of each dim values, or null
  uint32_t r, x_ld, k, dim, parts;  // r: 1..8
  float eps;
  uint32_t x_f32;
  uint32_t shares;           // weight rows of each block: kernels.Shares
  ProjectPart part[4];
  Shift shift;
};

struct BeginParams {
  const void* host;          // n times 16 bytes
  void* device;
  uint32_t n, reserved;
};

struct EmbedParams {
  const Row* rows;
  const float* media;        // [n][h]
  __nv_bfloat16* x;          // [R][s*h]
  Mat w;
  uint32_t h, s;
};

struct InjectParams {
  __nv_bfloat16* x;          // [R][s*h], updated
  const __nv_bfloat16* y;    // [R][h], or null
  const float* inject;       // [R][s]
  const float* norm;         // [s*h], used as 1 + w; null: no norm wanted
  float* n;                  // [R][s*h]
  float* copy;               // [R][s*h]: the new streams as FP32 and x left alone, or null
  uint32_t h, s;
  float eps;
  uint32_t reserved;
};

struct HcUpParams {
  const float* low;          // [r][l]
  const float* n;            // [r][s*h]
  __nv_bfloat16* out;        // [r][h]
  Mat up;
  uint32_t r, h, s, l;       // r: 1..8
};

struct ConvParams {
  const Lane* lanes;
  const __nv_bfloat16* x;    // [R][c] inputs
  const float* w;            // [taps][c]
  __nv_bfloat16* window;     // [slots][(taps-1)*dilation][c]
  __nv_bfloat16* records;    // [lanes][verify][c]
  float* out;                // [R][c]: silu(conv), or null
  const float* v;            // [R][c], or null
  __nv_bfloat16* streams;    // [R][c]: += v + silu(conv), or null
  uint32_t c, taps, dilation, verify;
};

struct DeltaParams {
  const Lane* lanes;
  const float* qkv;          // [R][c]: after convolution; of delta
  const __nv_bfloat16* x;    // [R][c]: before it; of the others, which leave window and records alone
  const float* conv;         // [4][c] taps
  const __nv_bfloat16* window;   // [slots][3][c]
  const __nv_bfloat16* inputs;   // [lanes][verify][c] records of the window
  const __nv_bfloat16* z;    // [R][heads*dim]
  const __nv_bfloat16* a;    // [R][heads]
  const __nv_bfloat16* b;    // [R][heads]
  const float* alog;         // [heads]
  const float* dt;           // [heads]
  const float* norm;         // [dim]
  void* state;               // [slots][heads][dim][dim]: FP32, or BF16 with half_state
  float* records;            // [lanes][ring][heads][2*dim+4]: key, correction, decay
  float* out;                // [R][heads*dim]: of delta
  __nv_bfloat16* gated;      // [R][heads*dim], without the norm's factor: of the others
  float* squares;            // [R][heads][4]: of each quarter of a head
  uint32_t key_heads, heads, dim, verify;
  float eps;
  uint32_t half_state;
  uint32_t ring, turn;         // rows of records; in which of every four steps the matrices are written
  uint32_t trigger, reserved;  // the next kernel may start 0 at once, 1 after the wait; of delta always the latter
};

struct PrepParams {
  const Row* rows;
  const __nv_bfloat16* qg;     // [R][heads*2*hd]
  const __nv_bfloat16* key;    // [R][kv*hd]
  const __nv_bfloat16* value;  // [R][kv*hd]
  const __nv_bfloat16* index;  // [R][(ih+1)*id]
  const float* q_norm;         // [hd]
  const float* k_norm;         // [hd]
  const float* iq_norm;        // [id]
  const float* inverse;        // [rot/2]: inverse frequencies, then the axis of each as uint32_t
  __nv_bfloat16* q;            // [R][heads*hd]
  __nv_bfloat16* iq;           // [R][ih*id]; not of prep_score
  const uint32_t* pages;       // [lanes][pages_ld] page numbers
  void* keys;                  // [pages][64][kv*hd]: BF16, or E4M3 with scales
  void* values;
  __nv_bfloat16* key_scales;   // [pages][64][kv], or null; keys and queries are turned by a Hadamard transform then
  __nv_bfloat16* value_scales;
  __nv_bfloat16* raw;          // [pages][64][id]
  uint32_t* positions;         // [pages][64][3]
  const float* ik_norm;        // [id]
  __nv_bfloat16* block_keys;   // [pages][63/ratio+1][id]
  uint32_t heads, kv, hd, ih, id, rot, pages_ld;
  uint32_t ratio, reserved;
  float eps;
};

struct ScoreParams {
  const Row* rows;
  const __nv_bfloat16* iq;     // [R][ih*id]
  const uint32_t* pages;       // [lanes][pages_ld] page numbers
  const __nv_bfloat16* keys;   // [pages][63/ratio+1][id]
  float* scores;               // [R][blocks]
  uint32_t ih, id, ratio, blocks, most, pages_ld;  // blocks: of an image; most: that a row selects
};

struct PrepScoreParams {
  PrepParams prep;
  ScoreParams score;           // iq is not used
  uint32_t units, reserved;    // units: of prep
};

struct SelectParams {
  const Row* rows;
  const uint32_t* pages;       // [lanes][pages_ld] page numbers
  const float* scores;         // [R][blocks]
  uint32_t* list;              // [R][list_ld] rows of the tokens in their pages, ascending by token
  uint32_t* count;             // [R]
  uint32_t ratio, blocks, most, list_ld, pages_ld, reserved;
};

struct PrepSelectParams {
  PrepParams prep;
  SelectParams select;         // scores are not used
};

struct AttendParams {
  const __nv_bfloat16* q;      // [R][heads*hd]
  const void* keys;            // [pages][64][kv*hd]: BF16, or E4M3 with scales
  const void* values;
  const __nv_bfloat16* key_scales;  // [pages][64][kv], or null
  const __nv_bfloat16* value_scales;
  const uint32_t* list;        // [R][list_ld]
  const uint32_t* count;       // [R]
  float* partial;              // [R][heads][splits][hd+2]: largest score, sum, values
  uint32_t heads, kv, hd, list_ld, splits, reserved;
};

struct AttendGroupParams {
  const __nv_bfloat16* q;      // [R][heads*256]
  const void* keys;            // [pages][64][kv*256]: BF16, or E4M3 with scales
  const void* values;
  const __nv_bfloat16* key_scales;  // [pages][64][kv], or null
  const __nv_bfloat16* value_scales;
  const uint32_t* list;        // [R][list_ld]
  const uint32_t* count;       // [R]
  float* partial;              // [R][heads][pairs][256]
  float* sums;                 // [R][heads][pairs][2]: largest score, sum of weights
  uint32_t heads, kv, list_ld, pairs;
  uint32_t late, reserved;     // late: queries are of the kernel before, not of the one before that
};

struct MergeGroupParams {
  const float* partial;
  const float* sums;
  const uint32_t* count;       // [R]
  const __nv_bfloat16* qg;     // [R][heads*512]
  __nv_bfloat16* out;          // [R][heads*256]
  uint32_t heads, pairs;       // at most 36 pairs
  uint32_t trigger, reserved;  // as in DeltaParams
};

struct MergeParams {
  const float* partial;
  const __nv_bfloat16* qg;     // [R][heads*2*hd]
  __nv_bfloat16* out;          // [R][heads*hd]
  uint32_t heads, hd, splits, reserved;
};

struct RouteParams {
  const float* logits;         // [R][experts]
  const uint32_t* forced;      // [R][topk], ~0 in the first for rows that choose themselves; or null
  uint32_t* chosen;            // [R][topk]
  float* weight;               // [R][topk]
  uint32_t experts, topk, normalize, reserved;
};

struct ExpertUpParams {
  const __nv_bfloat16* x;      // [R][h]
  const uint32_t* chosen;      // [R][topk]
  __nv_bfloat16* hidden;       // [R][topk][inter]
  __nv_bfloat16* shared;       // [R][shared_inter]
  Mat bank;                    // [experts*2*inter][h]
  Mat gate, up;                // [shared_inter][h]
  uint32_t topk, inter, shared_inter, h;
};

struct ExpertDownParams {
  const uint32_t* chosen;
  const float* weight;
  const float* gate;           // [R] logit of the shared expert
  const __nv_bfloat16* hidden;
  const __nv_bfloat16* shared;
  __nv_bfloat16* out;          // [R][h]
  Mat bank;                    // [experts*h][inter]
  Mat down;                    // [h][shared_inter]
  uint32_t topk, inter, shared_inter, h;
};

struct StemParams {
  const Row* rows;
  const Lane* lanes;
  const __nv_bfloat16* carried;  // [slots][carry][s*h]
  const __nv_bfloat16* chain;    // [lanes][s*h]
  const float* norm_embed;       // [h]
  const float* norm_hidden;      // [s*h]
  __nv_bfloat16* e;              // [R][h]
  __nv_bfloat16* hidden;         // [R][s*h]
  Mat w;
  uint32_t h, s, carry;
  float eps;
};

struct StemAddParams {
  const __nv_bfloat16* hidden;   // [R][s*h]
  const __nv_bfloat16* e;        // [R][h]
  __nv_bfloat16* x;              // [R][s*h]
  uint32_t h, s, r, reserved;
};

struct CarryParams {
  const Row* rows;
  const Lane* lanes;
  const __nv_bfloat16* x;        // [R][width]
  __nv_bfloat16* carried;        // [slots][carry][width]
  __nv_bfloat16* chain;          // [lanes][width]
  uint32_t width, carry, draft, reserved;  // draft: the last row of a lane goes to chain, others nowhere
};

struct TableParams {
  const uint8_t* raw;            // [R*heads][row_bytes], in memory of the host
  const uint32_t* ready;         // there too: rows are those of the launch of this number
  const uint32_t* number;        // of this launch
  float* out;                    // [R*heads][width]
  uint32_t n, width, row_bytes, format;  // n: R*heads
  float multiplier;
  uint32_t rows;                 // of a block, whose bytes together are a multiple of 16
  uint32_t halves, reserved;     // halves: out is BF16, of BF16 and FP8 rows without the multiplier
};

struct PleGateParams {
  const __nv_bfloat16* key;      // [R][s*h]
  const __nv_bfloat16* value;    // [R][h]
  __nv_bfloat16* x;              // [R][s*h], updated where an injection is pending
  const __nv_bfloat16* y;        // [R][h], or null: of ple_gate_wide
  const float* inject;           // [R][s]
  const float* norm_key;         // [s*h]
  const float* norm_query;
  const float* norm_conv;
  float* v;                      // [R][s*h]
  __nv_bfloat16* vn;             // [R][s*h]
  uint32_t h, s;
  float eps;
  uint32_t reserved;
};

struct GatherParams {
  const uint32_t* list;          // [n] rows
  const __nv_bfloat16* x;
  __nv_bfloat16* out;            // [n][width]
  uint32_t width, n;
};

struct PickParams {
  const float* logits;           // [n][rows]
  const uint32_t* map;           // [rows] or null
  uint32_t* out;                 // [n]
  uint32_t rows, ids;
};

struct LikelyParams {
  const float* logits;           // [n][rows]
  uint32_t* best;                // [n][segments][128][2]: keys and ids of each segment's best
  uint32_t* arrived;             // [n], zero between launches
  uint32_t* host;                // [n][128][2]: values and ids, in memory of the host
  uint32_t rows, ids;            // ids: the first of them count
};

struct ReportParams {
  const uint32_t* picked;        // [n]
  uint32_t* host;                // [n], memory of the host
  uint32_t* done;                // there too
  const uint32_t* number;        // of the launch, in the control block
  uint32_t n, reserved;
};

struct PleJoinParams {
  PleGateParams gate;
  const float* key;              // [R][s*h] and
  const float* value;            // [R][h], which times factor become the gate's; or null
  float factor;
  uint32_t reserved;
  ConvParams conv;               // of four taps three rows apart; without lanes for nothing to convolve
};

struct ReportBestParams {
  const uint64_t* best;          // [r][n] keys: a value, then ~its row
  const uint32_t* ids;           // of each row, or null
  uint32_t* picked;              // [r]
  uint32_t* host;                // [r], memory of the host
  uint32_t* done;                // there too
  const uint32_t* number;        // of the launch, in the control block
  uint32_t n, r;                 // r: 1..8
};

struct WordsParams {
  void* dst;
  uint64_t bytes;
  uint64_t mask, fixed;          // kind 8: random bits under mask, and fixed ones
  float mean, deviation;
  uint32_t kind, seed;           // kind 2: BF16, 4: FP32, both normal; 8: bits; 12: positions, three axes a token
};

struct SizesParams {
  uint32_t* out;
  uint32_t n, reserved;
};
