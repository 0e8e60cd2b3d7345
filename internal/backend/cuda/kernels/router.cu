// Router and shared expert for R = 1..8 rows:
//
//   router_shared   logits = Wr x (FP32);  hs = silu(Wg x) * (Wu x);  shared_logit = ws x.
//
// A block has up to seven pairs of weight rows in shared memory and a warp 160 k of them, of which it brings the activations itself, so that no barrier of
// the block stands before the product. The weights become operands of the tensor instruction while the activations are waited for; their rows are its
// columns. Sums have a fixed order. Sixteen warps have four turns at an instruction, and a new one comes in some six clocks: what counts is how many stand
// before the copies of the weights and behind the wait.
//
// Memory idles here and while the experts are chosen, so the beginning of what is certain to be read after them is brought into L2.
//
//   Shapes: K % 16 = 0 and at most 2560, R = 1..8.
#include "common.cuh"
#include "params.h"

extern __shared__ __align__(128) uint8_t smem[];

static constexpr int kThreads = 512;
static constexpr int kWarps = kThreads / 32;
static constexpr uint32_t kPace = 100, kNow = 400;  // clocks between a block's rows of E4M3, and until when a row is asked for at once
static constexpr int kChunks = 5;  // of 32 k that a warp has
static constexpr uint32_t kMine = 32 * kChunks, kMost = kWarps * kMine;  // k of a warp; at most

// Past L1 (R7); of bytes 0 sixteen zeros are stored.
NINFER_DEVICE void copy_activations(uint32_t dst, const bf16* src, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
// A word, if yes, into its register, in which nothing is made of it here.
NINFER_DEVICE void load_word(bool yes, uint32_t& v, uint64_t at) {
  asm volatile("{.reg .pred q; setp.ne.u32 q, %2, 0; @q ld.global.nc.u32 %0, [%1];}" : "+r"(v) : "l"(at), "r"((uint32_t)yes));
}
NINFER_DEVICE void store(uint64_t at, float v) { asm volatile("st.global.f32 [%0], %1;" ::"l"(at), "f"(v) : "memory"); }
NINFER_DEVICE void store(uint64_t at, uint16_t v) { asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(v) : "memory"); }
// Something that is to be in registers here, not to be made where it is used.
template <typename T>
NINFER_DEVICE void made(const T*& p) {
  asm volatile("" : "+l"(p));
}
NINFER_DEVICE void made(uint32_t& v) { asm volatile("" : "+r"(v)); }

// Two E4M3 codes of a word, from byte FIRST on, as a BF16 pair. Placed by bits they are 2^-120 of their value, subnormals as BF16 subnormals.
template <int FIRST>
NINFER_DEVICE uint32_t e4m3x2_bf16(uint32_t w) {
  uint32_t v;  // each code behind eight of its sign
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(v) : "r"(w), "n"(FIRST ? 0xb3a2 : 0x9180));
  return mul_bf162(v << 4 & 0x87f087f0u, 0x7b807b80u);
}

// Asks for the block's pieces. One thread does: an instruction is some 40 ns, whatever its size.
NINFER_DEVICE void bring_ahead(const Ahead& a) {
#pragma unroll 1
  for (uint32_t i = blockIdx.x; i < a.n; i += gridDim.x) {
    const bool second = i >= a.first;
    const uint8_t* at = (const uint8_t*)a.at[second] + (uint64_t)(second ? i - a.first : i) * a.pitch;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(a.bytes) : "memory");
  }
}

// Unit u is a pair of rows: router rows 2u and 2u+1, or gate row j and up row j. The last block, which has not more of them than any other, has the
// shared gate vector too, always BF16, as row 15 of its tile.
template <bool FP8>
NINFER_DEVICE void router_rows(const RouterParams& p) {
  constexpr uint32_t bytes = FP8 ? 1 : 2;  // of a weight
  // Bytes from a row to the next in shared memory, apart in banks.
  constexpr uint32_t opitch = 2 * kMost + 64;
  const uint32_t pitch = FP8 ? p.k + 32 : 2 * p.k + 64;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t routing = ceil_div(p.experts, 2);
  const uint32_t each = p.shares >> 16, more = p.shares & 0xffff, unit0 = blockIdx.x * each + min(blockIdx.x, more), n = each + (blockIdx.x < more);
  const bool last = blockIdx.x == gridDim.x - 1;
  __shared__ float sums[kWarps][8][20];  // of a warp's k; 16 are used

  // The weights of tile row i and its scale's row; false if there is none.
  auto row_of = [&](uint32_t i, const void*& w, const void*& scale, uint32_t& row) -> bool {
    const uint32_t u = unit0 + i / 2, second = i % 2;
    const bool routes = u < routing;
    w = routes ? p.router : second ? p.up : p.gate, scale = routes ? p.router_scale : second ? p.up_scale : p.gate_scale;
    row = routes ? 2 * u + second : u - routing;
    return i / 2 < n && (!routes || row < p.experts);
  };

  STAMP_BEGIN(140 + FP8)
  const uint32_t bar = smem_addr(smem), operand = bar + 128, weights = operand + p.r * opitch, vector = weights + 2 * n * pitch;
  // Issuing a bulk copy takes a warp some 40 ns: every warp issues a row, which is known before the barrier.
  uint32_t copied, into;
  const uint8_t* source;
  {
    const bool own = warp == kWarps - 1;
    const void *w, *scale;
    uint32_t row;
    bool have = row_of(warp, w, scale, row);
    if (own) w = p.shared, row = 0, have = last;
    copied = (own ? 2 : bytes) * p.k, into = own ? vector : weights + warp * pitch, source = (const uint8_t*)w + (uint64_t)row * copied;
    if (!have) copied = 0;
    made(copied), made(into), made(source);
  }
  if (threadIdx.x == 0) {
    mbar_init(bar, kWarps);
    mbar_fence_init();
  }
  __syncthreads();
  // For a single row, whose block stands long before its wait is over, weight rows are asked for about as fast as memory gives them: what the kernel ahead reads
  // would wait behind a burst.
  const uint32_t start = clock(), after = p.r == 1 ? warp * (FP8 ? kPace : 2 * kPace) : 0;
  if (lane == 0) {
    mbar_expect(bar, copied);
    if (copied && after < kNow) bulk_load(into, source, copied, bar, policy_evict_first());
  }
  // In the end thread 16 r + i has tile row i of activation row r: its scale as stored (the word that it is in), and where its result goes, or nothing.
  const uint32_t of = threadIdx.x / 16, i = threadIdx.x % 16, u = unit0 + i / 2;
  uint32_t word = 0x3f80, high = 0;  // 1
  uint64_t out;
  {
    const void *w, *scale;
    uint32_t row;
    const bool have = row_of(i, w, scale, row);
    if (FP8) load_word(have && warp < 4, word, ((uint64_t)scale + (p.scale_f32 ? 4 * row : 2 * row)) & ~(uint64_t)3);
    high = !have ? 0 : p.scale_f32 ? 2 : row % 2;
    out = u < routing ? (uint64_t)(p.logits + of * p.experts + row) : (uint64_t)(p.hidden + (uint64_t)of * p.inner + row);
    if (!have) out = last && i == 15 ? (uint64_t)(p.shared_logit + of) : 0;
    if (of >= p.r || have && u >= routing && i % 2) out = 0;
  }
  const bool hides = u >= routing && i != 15;
  // In a chunk lane (g, t) = (lane / 4, lane % 4) has k = 8 t .. of rows g and g + 8 as the first operand of the tensor instruction and of activation row g as the
  // second: a dot product does not care about the order of k. Nothing here branches: where a row is missing another is read, whose sums nobody reads; where
  // k ends the activations are zero.
  const uint32_t k0 = warp * kMine, first = min(k0 + 8 * t, p.k - 8), room = p.k - 8 - first, most = max(2 * n, 1u) - 1;
  uint32_t lo_at = weights + min(g, most) * pitch + first * bytes, hi_at = weights + min(g + 8, most) * pitch + first * bytes, vector_at = vector + 2 * first;
  made(lo_at), made(hi_at), made(vector_at);
  const bool own = last && g == 7;
  uint32_t w[2 * kChunks][4];
  auto read = [&](int c) {
    uint32_t(&a)[4] = w[2 * c], (&b)[4] = w[2 * c + 1];
    const uint32_t step = min(32u * c, room);
    if (FP8) {
      const uint2 lo = lds64(lo_at + step), hi = lds64(hi_at + step);
      a[0] = e4m3x2_bf16<0>(lo.x), a[2] = e4m3x2_bf16<2>(lo.x), b[0] = e4m3x2_bf16<0>(lo.y), b[2] = e4m3x2_bf16<2>(lo.y);
      a[1] = e4m3x2_bf16<0>(hi.x), a[3] = e4m3x2_bf16<2>(hi.x), b[1] = e4m3x2_bf16<0>(hi.y), b[3] = e4m3x2_bf16<2>(hi.y);
      const uint32_t at = vector_at + 2 * step;
      if (own) a[1] = lds32(at), a[3] = lds32(at + 4), b[1] = lds32(at + 8), b[3] = lds32(at + 12);
    } else {
      const uint4 lo = lds128(lo_at + 2 * step), hi = lds128((own ? vector_at : hi_at) + 2 * step);
      a[0] = lo.x, a[1] = hi.x, a[2] = lo.y, a[3] = hi.y, b[0] = lo.z, b[1] = hi.z, b[2] = lo.w, b[3] = hi.w;
    }
  };
  uint32_t x_at = operand + min(g, p.r - 1) * opitch + 2 * (k0 + 8 * t);
  const uint32_t k8 = k0 + 8 * lane;
  uint32_t to = operand + 2 * k8, size = k8 < p.k ? 16 : 0, copies = lane < kMine / 8 ? p.r : 0;
  const bf16* from = p.x + (k8 < p.k ? k8 : 0);
  made(x_at), made(to), made(size), made(copies), made(from), made(high);
  asm volatile("" : "+l"(out));
  if (p.trigger == 0) pdl_trigger();
  if (lane == 0 && copied && after >= kNow) {
    while (clock() - start < after) {}
    bulk_load(into, source, copied, bar, policy_evict_first());
  }
  STAMP(1)
  pdl_wait();
  STAMP(2)
#pragma unroll 1
  for (; copies; copies--, to += opitch, from += p.x_ld) copy_activations(to, from, size);
  copy_commit();
  if (p.trigger == 2) pdl_trigger();
  // Not before the wait, where the kernels ahead need memory themselves.
  if (threadIdx.x == 32 * (kWarps - 1)) bring_ahead(p.ahead);
  mbar_wait(bar, 0);
#pragma unroll
  for (int c = 0; c < kChunks; c++) read(c);
  if (FP8)  // before the activations come
#pragma unroll
    for (int c = 0; c < 2 * kChunks; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) made(w[c][i]);
  STAMP(3)
  copy_wait<0>();
  __syncwarp();
  if (p.trigger == 1) pdl_trigger();
  STAMP(4)
  float a[2][4] = {};  // two sums, which shorten the chain
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    const uint4 x = lds128(x_at + 64 * c);
    mma_bf16(a[0], w[2 * c][0], w[2 * c][1], w[2 * c][2], w[2 * c][3], x.x, x.y);
    mma_bf16(a[1], w[2 * c + 1][0], w[2 * c + 1][1], w[2 * c + 1][2], w[2 * c + 1][3], x.z, x.w);
  }
#pragma unroll
  for (uint32_t i = 0; i < 2; i++)
    if (2 * t + i < p.r) sums[warp][2 * t + i][g] = a[0][i] + a[1][i], sums[warp][2 * t + i][g + 8] = a[0][i + 2] + a[1][i + 2];
  STAMP(5)
  __syncthreads();
  STAMP(6)
  if (2 * warp >= p.r) return;
  float s[kWarps];
#pragma unroll
  for (int j = 0; j < kWarps; j++) s[j] = sums[j][of][i];
#pragma unroll
  for (int d = 1; d < kWarps; d *= 2)
#pragma unroll
    for (int j = 0; j < kWarps; j += 2 * d) s[j] += s[j + d];
  float v = s[0];
  if (FP8) {
    made(word);
    v *= __uint_as_float(high == 0 ? word << 16 : high == 1 ? word & 0xffff0000u : word);
  }
  const float second = __shfl_down_sync(~0u, v, 1);
  if (!out) return;
  if (hides)
    store(out, __bfloat16_as_ushort(__float2bfloat16_rn(silu(v) * second)));
  else
    store(out, v);
  STAMP(7)
}

NINFER_KERNEL(router_shared_bf16, RouterParams, kThreads, 2) { router_rows<false>(p); }
NINFER_KERNEL(router_shared_e4m3, RouterParams, kThreads, 2) { router_rows<true>(p); }
