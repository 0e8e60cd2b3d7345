// Parameter structs: one per kernel, passed by value. tools/kernelgen reads this file and writes the Go mirrors, so it keeps to
// flat structs of uint32_t, uint64_t, float, pointers, and arrays of those or of an earlier struct. Every struct is a multiple of
// eight bytes. M is the number of activation rows.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

// Y = f(X W^T).
struct DenseParams {
  const __nv_bfloat16* x;  // [M][x_ld]
  const void* w;           // [N][K]: BF16 or E4M3
  const void* scale;       // [N] of E4M3: BF16, or FP32 with scale_f32
  void* out;               // [M][out_ld]: BF16, or FP32 with out_f32
  float* partial;          // [splits][M][N], only with more than one split
  uint32_t m, n, k, x_ld, out_ld;
  uint32_t out_f32, scale_f32;
  uint32_t epilogue;       // EPILOGUE_*
  uint32_t splits;         // shares of K
  float factor;            // of the argument of the epilogue's function
};

// Sums of a Dense launch with splits: in order, then the epilogue.
struct SumParams {
  const float* partial;
  const void* scale;
  void* out;
  uint32_t m, n, out_ld, splits, out_f32, scale_f32, epilogue;
  float factor;
};

// BF16 weights from E4M3 codes and row scales, rounded once.
struct WidenParams {
  const void* w;           // [N][K]
  const void* scale;       // [N]
  __nv_bfloat16* out;      // [N][K]
  uint32_t n, k, scale_f32, reserved;
};

// out = f(factor * in), BF16 or FP32.
struct ActivateParams {
  const float* in;         // [M][n]
  void* out;               // [M][out_ld]
  uint32_t m, n, out_ld, out_f32, epilogue;
  float factor;
};

// out = silu(gate) * up.
struct GateParams {
  const float* gate;       // [M][ld]
  const float* up;         // [M][ld]
  __nv_bfloat16* out;      // [M][n]
  uint32_t m, n, ld, reserved;
};

// Top-k of soft-max over the logits.
struct RouteParams {
  const float* logits;     // [M][E]
  uint32_t* chosen;        // [M][topk], largest first, of equal ones the lower id
  float* weight;           // [M][topk]
  uint32_t m, experts, topk, normalize;
};

// A run of rows of one expert.
struct Item {
  uint32_t expert, first, rows, reserved;
};

// Counting sort of (row, rank) pairs by expert, inside an expert by row.
struct SortParams {
  const uint32_t* chosen;  // [M][topk]
  uint32_t* counts;        // [blocks][E]
  uint32_t* start;         // [E]
  uint32_t* row;           // [M * topk] activation row of each sorted pair
  uint32_t* place;         // [M][topk] where each pair went
  Item* items;             // tiles of at most `tile` rows
  uint32_t* item_count;
  const __nv_bfloat16* x;  // [M][h]
  __nv_bfloat16* ordered;  // [M][h] the same in the order in which E2M1 codes are unpacked, or panels (wide.cuh)
  uint32_t m, experts, topk, blocks, h;
  uint32_t tile, unit;     // rows of an item: at most tile, and a multiple of unit but for an expert's last; both multiples of align
  uint32_t align;          // an expert's pairs begin at a multiple of it
  uint32_t capacity;       // pairs of a panel
  uint32_t reserved;
};

// One half of the experts' network over all items.
struct GroupParams {
  const __nv_bfloat16* x;  // rows of k, ordered; or panels
  const uint32_t* row;     // sorted pair -> row of x, or null for the pair itself; not with panels
  const void* bank;        // LAYOUT_* of the kernel
  const void* scales;      // of stored banks
  const float* divisor;    // [E] of NVFP4
  const Item* items;
  const uint32_t* item_count;
  __nv_bfloat16* out;      // one row a sorted pair: [inter], ordered, or [h]; with panels [inter] is in panels
  uint32_t n, k;           // n: stored rows of an expert
  uint32_t tiles, group;   // tiles of 128 stored rows, and how many of them a block does: 1 but with panels
  uint32_t capacity, reserved;  // pairs of a panel
};

// out = sum over ranks of weight * y + sigmoid(logit) * shared.
struct CombineParams {
  const __nv_bfloat16* y;  // [pairs][h]
  const uint32_t* place;   // [M][topk]
  const float* weight;     // [M][topk]
  const float* shared;     // [M][h], or null
  const float* logit;      // [M]
  __nv_bfloat16* out;      // [M][h]
  uint32_t m, h, topk, reserved;
};

// First step of a hyper-connection site.
struct SiteParams {
  __nv_bfloat16* x;              // [M][4][H] streams
  const __nv_bfloat16* y;        // [M][H] block output still to be injected, or null
  float* inject;                 // [M][4] its weights; then the new ones
  const __nv_bfloat16* norm;     // [4][H], used as 1 + w
  const __nv_bfloat16* inject_w; // [4][4H], or null
  __nv_bfloat16* normed;         // [M][4][H]
  uint32_t m, h;
  float eps;
  uint32_t reserved;
};

// Last step: mix = mean over streams of sigmoid(Wup low) * normed.
struct MixParams {
  const __nv_bfloat16* low;      // [M][L]
  const void* up;                // [4H][L]
  const void* scale;             // [4H]
  const __nv_bfloat16* normed;   // [M][4][H]
  __nv_bfloat16* mix;            // [M][H]
  uint32_t m, h, l, scale_f32;
};

struct FillParams {
  void* dst;
  uint64_t count;
  uint32_t kind, seed;
  float scale;
  uint32_t reserved;
};

struct SizesParams {
  uint32_t* out;
  uint32_t n, reserved;
};
