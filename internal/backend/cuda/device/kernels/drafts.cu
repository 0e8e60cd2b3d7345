// What verify and draft passes do besides the blocks of the model, with as many requests for memory on their way at once as there is to read: of a
// row or two the plain versions in streams.cu take the time of ten loads in a row.
//
//   stem_wide   as stem_norm, for rows of up to 4,096 values: of the carried streams each block has the sum of squares of all and the norm of
//               one of them. Grid: 1 + streams, row.
//   stem_project_bf16, stem_project_e4m3  x[s] = bf16(hidden[s] * part[0]) + bf16(e * part[1]), of matrices of k columns and rows and four streams
//               s, which is gemv twice and stem_add: k a multiple of 16 up to 2,560. x: hidden rows [R * s][k], r of them; part[0].out:
//               the streams [R][4 * k]; part[1].out: e [R][k]. Grid: every 24 columns of x.
//   conv_rows   as conv into streams, of four taps three rows apart, for up to eight rows of a lane after as many kept ones. Grid: every 128 channels, lane.
//   carry_wide  as carry, for widths that are multiples of eight. Grid: every 2,048 values, row.
//   route_wide  as route, of up to 512 experts, which a warp has in registers. Grid: row.
//   drafted_tokens  of a pass that verifies, the tokens of rows after a lane's first: picks of a chain's passes, which are in the host's memory, width
//               words from one pass to the next, a lane's at twice its number. Grid: 1.
//   expert_up_wide, expert_down_wide  as expert_up and expert_down, of experts in BF16 with rows of up to 2,560 and the shared one's first half done:
//               a warp has all of a row on its way at once. Grid: any, row; enough blocks for a warp an output, row.
#include "common.cuh"

static constexpr int kThreads = 512;

NINFER_KERNEL(stem_wide, StemParams, kThreads, 1) {
  __shared__ float shared[33];
  constexpr uint32_t most = 8;  // values of a row that a thread has
  const uint32_t r = blockIdx.y, s = blockIdx.x, width = p.s * p.h;
  float norm[most], v[most], square = 0.0f;
  const float* weights = s == 0 ? p.norm_embed : p.norm_hidden + (s - 1) * p.h;
#pragma unroll
  for (uint32_t i = 0; i < most; i++) norm[i] = threadIdx.x + i * kThreads < p.h ? weights[threadIdx.x + i * kThreads] : 0.0f;
  // The next kernel's weights may come while this one waits for the row: it reads nothing of the pass before its own wait. One is added to these later, or
  // the wait would be for them too.
  pdl_trigger();
  pdl_wait();
  const Row row = p.rows[r];
  if (s == 0) {
    if (p.w.format == FMT_BF16) {  // all at once: a look at the format at each value would have them one after the other
      const bf16* in = (const bf16*)line_of<FMT_BF16>(p.w, row.token).codes;
#pragma unroll
      for (uint32_t i = 0; i < most; i++) v[i] = threadIdx.x + i * kThreads < p.h ? from_bf16(in[threadIdx.x + i * kThreads]) : 0.0f;
    } else {
#pragma unroll
      for (uint32_t i = 0; i < most; i++) v[i] = threadIdx.x + i * kThreads < p.h ? value(p.w, row.token, threadIdx.x + i * kThreads) : 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < most; i++) square += v[i] * v[i];
    const float scale = 1.0f / sqrtf(block_sum(square, shared) / p.h + p.eps);
#pragma unroll
    for (uint32_t i = 0; i < most; i++)
      if (threadIdx.x + i * kThreads < p.h) p.e[(uint64_t)r * p.h + threadIdx.x + i * kThreads] = to_bf16(v[i] * scale * (1.0f + norm[i]));
    return;
  }
  const Lane lane = p.lanes[row.lane];
  const bf16* in = lane.chain ? p.chain + (uint64_t)row.slot * width : p.carried + ((uint64_t)row.slot * p.carry + lane.carry + row.index) * width;
#pragma unroll
  for (uint32_t i = 0; i < most; i++) v[i] = threadIdx.x + i * kThreads < p.h ? from_bf16(in[(s - 1) * p.h + threadIdx.x + i * kThreads]) : 0.0f;
#pragma unroll 4
  for (uint32_t u = threadIdx.x; u < width / 8; u += kThreads) {
    const uint4 q = __ldcg((const uint4*)in + u);
    const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) square += lo(w[i]) * lo(w[i]) + hi(w[i]) * hi(w[i]);
  }
  const float scale = 1.0f / sqrtf(block_sum(square, shared) / width + p.eps);
#pragma unroll
  for (uint32_t i = 0; i < most; i++)
    if (threadIdx.x + i * kThreads < p.h) p.hidden[(uint64_t)r * width + (s - 1) * p.h + threadIdx.x + i * kThreads] = to_bf16(v[i] * scale * (1.0f + norm[i]));
}

// Weights are read once.
DEVICE uint4 stream16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// c += a * b on tensor instructions, of which rows 8 to 15 of a are zero. FP8: a and b in FP16, else in BF16.
template <bool FP8>
DEVICE void multiply(float (&c)[4], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  if (FP8)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1));
}
DEVICE uint32_t halves(uint32_t pair) {  // two E4M3 as FP16
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pair, __NV_E4M3);
  return (uint32_t)h.y << 16 | h.x;
}
DEVICE uint32_t halves_of(uint32_t pair) {  // two BF16 as FP16: normalised values, far from its ends
  const __half2 h = __floats2half2_rn(lo(pair), hi(pair));
  return *(const uint32_t*)&h;
}

// A block has 24 columns of x. A warp has a tenth of k of them, of both matrices: groups of eight columns, whose weights are on their way before the wait, a
// lane 16 bytes of a column at a time. k runs through the tensor instructions in the order in which lanes have it. In FP8 all groups are
// done at once, in BF16 those of one matrix after those of the other. Activation rows of an instruction: e, then the streams of hidden.
template <bool FP8>
DEVICE void stem_project(const GemvParams& p) {
  constexpr uint32_t warps = 10, streams = 4, columns = 24, values = FP8 ? 16 : 8, units = FP8 ? 2 : 1;
  constexpr int groups = FP8 ? 6 : 3, chunks = 2560 / (4 * values) / warps;  // chunks: runs of k that four lanes have, of a warp
  __shared__ uint4 x[(1 + streams) * 321];                                  // rows shifted by 16 bytes, so that eight lanes read all banks
  __shared__ float sums[warps][6][1 + streams][8];
  const uint32_t k = p.part[0].m.k, pieces = k / 8, t = threadIdx.x, warp = t / 32, column = t % 32 / 4, run = t % 4;
  uint4 w[groups][chunks];
  const auto fetch = [&](int half) {
#pragma unroll
    for (int g = 0; g < groups; g++) {
      const Mat& m = p.part[FP8 ? g / 3 : half].m;
      const uint64_t row = m.first + min(blockIdx.x * columns + g % 3 * 8 + column, k - 1);
#pragma unroll
      for (int c = 0; c < chunks; c++) {
        const uint32_t at = ((warp * chunks + c) * 4 + run) * values;
        w[g][c] = at < k ? stream16((const uint8_t*)m.codes + row * m.stride + at * 16 / values) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  fetch(0);
  const uint32_t n = blockIdx.x * columns + t % columns;  // of the results this thread has one a stream
  uint32_t scale[2] = {};                                 // as it is stored
  if (FP8 && t < columns * streams && n < k) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const Mat& a = p.part[m].m;
      const uint8_t* at = (const uint8_t*)a.scales + (a.first + (uint64_t)n) * a.scale_stride;
      scale[m] = a.format == FMT_FP8_FP32 ? __ldg((const uint32_t*)at) : __ldg((const uint16_t*)at);
    }
  }
  pdl();
  for (uint32_t r = 0; r < p.r; r += streams) {
    if (t < pieces) {
      uint4 v[1 + streams];
#pragma unroll
      for (uint32_t s = 0; s <= streams; s++) v[s] = __ldcg((s == 0 ? (const uint4*)p.part[1].out + r / streams * pieces : (const uint4*)p.x + (r + s - 1) * pieces) + t);
#pragma unroll
      for (uint32_t s = 0; s <= streams; s++) x[s * 321 + t] = FP8 ? make_uint4(halves_of(v[s].x), halves_of(v[s].y), halves_of(v[s].z), halves_of(v[s].w)) : v[s];
    }
    __syncthreads();
    const uint4* row = x + (column <= streams ? column : 0) * 321;  // results of rows beyond are not used
    for (int half = 0; half < 6 / groups; half++) {
      if (!FP8 && (half || r)) fetch(half);
      float sum[groups][4] = {};
#pragma unroll
      for (int c = 0; c < chunks; c++) {
        const uint32_t at = ((warp * chunks + c) * 4 + run) * units;
        uint4 v[units];
#pragma unroll
        for (int i = 0; i < units; i++) v[i] = at < pieces ? row[at + i] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int g = 0; g < groups; g++) {
          uint4& q = w[g][c];
          if (FP8) {
            asm volatile("" : "+r"(q.x), "+r"(q.y), "+r"(q.z), "+r"(q.w));  // not converted ahead for all rows, which takes all registers
            multiply<true>(sum[g], v[0].x, v[0].y, halves(q.x & 0xffff), halves(q.x >> 16));
            multiply<true>(sum[g], v[0].z, v[0].w, halves(q.y & 0xffff), halves(q.y >> 16));
            multiply<true>(sum[g], v[units - 1].x, v[units - 1].y, halves(q.z & 0xffff), halves(q.z >> 16));
            multiply<true>(sum[g], v[units - 1].z, v[units - 1].w, halves(q.w & 0xffff), halves(q.w >> 16));
          } else {
            multiply<false>(sum[g], v[0].x, v[0].y, q.x, q.y);
            multiply<false>(sum[g], v[0].z, v[0].w, q.z, q.w);
          }
        }
      }
      if (column <= streams)
#pragma unroll
        for (int g = 0; g < groups; g++) *(float2*)&sums[warp][half * groups + g][column][2 * run] = make_float2(sum[g][0], sum[g][1]);
    }
    __syncthreads();
    const uint32_t s = t / columns;
    if (s < streams && n < k) {
      float out = 0.0f;
#pragma unroll
      for (int m = 0; m < 2; m++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < warps; i++) sum += sums[i][3 * m + t % columns / 8][m == 0 ? 1 + s : 0][t % 8];
        out += round_bf16(FP8 ? sum * __uint_as_float(p.part[m].m.format == FMT_FP8_FP32 ? scale[m] : scale[m] << 16) : sum);
      }
      ((bf16*)p.part[0].out)[(uint64_t)(r + s) * k + n] = to_bf16(out);
    }
    __syncthreads();
  }
}

NINFER_KERNEL(stem_project_bf16, GemvParams, 320, 1) { stem_project<false>(p); }
NINFER_KERNEL(stem_project_e4m3, GemvParams, 320, 1) { stem_project<true>(p); }

NINFER_KERNEL(conv_rows, ConvParams, 128, 1) {
  constexpr uint32_t depth = 9, most = 8;  // of the window; rows that a lane has, and that are kept of the pass before
  const uint32_t c = blockIdx.x * 128 + threadIdx.x;
  const Lane lane = p.lanes[blockIdx.y];
  const uint32_t fold = lane.fold;
  bf16* window = p.window + (uint64_t)lane.slot * depth * p.c + c;
  bf16* records = p.records + (uint64_t)lane.slot * p.verify * p.c + c;
  const bool on = c < p.c;
  // Window, recorded rows and new rows are one sequence, of which the first two were written by the step before.
  bf16 seq[depth + 2 * most];
  float w[4];
#pragma unroll
  for (uint32_t i = 0; i < depth + most; i++)
    if (on && i < depth + fold) seq[i] = i < depth ? window[(uint64_t)i * p.c] : records[(uint64_t)(i - depth) * p.c];
#pragma unroll
  for (int j = 0; j < 4; j++) w[j] = on ? p.w[(uint64_t)j * p.c + c] : 0.0f;
  pdl_wait();
  if (!on) return;
  const uint64_t first = (uint64_t)lane.first * p.c + c;
  float add[2 * most];
  bf16 old[2 * most];
#pragma unroll
  for (uint32_t i = 0; i < 2 * most; i++)
    if (i >= fold && i < fold + lane.rows) {
      const uint64_t at = first + (uint64_t)(i - fold) * p.c;
      seq[depth + i] = p.x[at], add[i] = p.v[at], old[i] = p.streams[at];
    }
  pdl_trigger();
#pragma unroll
  for (uint32_t i = 0; i < 2 * most; i++)
    if (i >= fold && i < fold + lane.rows) {
      float sum = 0.0f;
#pragma unroll
      for (uint32_t j = 0; j < 4; j++) sum = fmaf(w[j], from_bf16(seq[i + 3 * j]), sum);
      p.streams[first + (uint64_t)(i - fold) * p.c] = to_bf16(from_bf16(old[i]) + add[i] + silu(sum));
      if (lane.record) records[(uint64_t)(i - fold) * p.c] = seq[depth + i];
    }
  const uint32_t shift = fold + (lane.record ? 0 : lane.rows);
  if (shift)
#pragma unroll
    for (uint32_t i = 0; i < depth + 2 * most; i++)
      if (i >= shift && i < shift + depth) window[(uint64_t)(i - shift) * p.c] = seq[i];
}

NINFER_KERNEL(carry_wide, CarryParams, 256, 1) {
  pdl();
  const uint32_t r = blockIdx.y, u = blockIdx.x * 256 + threadIdx.x;
  if (u >= p.width / 8) return;
  const uint4 v = __ldcg((const uint4*)(p.x + (uint64_t)r * p.width) + u);
  const Row row = p.rows[r];
  const Lane lane = p.lanes[row.lane];
  if (p.draft && row.index + 1 != lane.rows) return;
  bf16* out = p.draft ? p.chain + (uint64_t)row.slot * p.width : p.carried + ((uint64_t)row.slot * p.carry + lane.carry + row.index) * p.width;
  ((uint4*)out)[u] = v;
}

NINFER_KERNEL(drafted_tokens, GatherParams, 128, 1) {
  pdl();
  Row* rows = (Row*)p.out;
  for (uint32_t r = threadIdx.x; r < p.n; r += 128) {
    const uint32_t index = __ldcg(&rows[r].index), lane = __ldcg(&rows[r].lane);
    if (index) rows[r].token = *(const volatile uint32_t*)((const uint32_t*)p.x + (uint64_t)(index - 1) * p.width + 2 * lane);
  }
}

NINFER_KERNEL(route_wide, RouteParams, 32, 1) {
  constexpr int most = 16;
  pdl();
  const uint32_t r = blockIdx.x, t = threadIdx.x;
  const float* logits = p.logits + (uint64_t)r * p.experts;
  // Lane t has experts t, t + 32, ...: of equal keys the lowest id is in the first of a lane's that has it, then in the lowest lane.
  uint32_t key[most];
#pragma unroll
  for (int i = 0; i < most; i++) key[i] = t + 32 * i < p.experts ? max(1u, float_key(__ldcg(logits + t + 32 * i))) : 0;
  const bool forced = p.forced && p.forced[(uint64_t)r * p.topk] != ~0u;
  uint32_t mine = 0;   // lane i has the i-th choice
  float value = 0.0f;  // and its logit
  for (uint32_t c = 0; c < p.topk; c++) {
    uint32_t best = 0, at = 0;
    if (forced) {
      at = p.forced[(uint64_t)r * p.topk + c];
    } else {
#pragma unroll
      for (int i = 0; i < most; i++) best = max(best, key[i]);
      best = __reduce_max_sync(~0u, best);
      uint32_t id = ~0u;
#pragma unroll
      for (int i = most - 1; i >= 0; i--)
        if (key[i] == best) id = t + 32 * i;
      at = __reduce_min_sync(~0u, id);
#pragma unroll
      for (int i = 0; i < most; i++)
        if (t + 32 * i == at) key[i] = 0;
    }
    if (t == c) mine = at, value = __ldcg(logits + at);
  }
  // Weights are of the soft-max over all experts: without normalising over the chosen ones the others count.
  float top = t < p.topk ? value : -INFINITY, all = 0.0f;
#pragma unroll
  for (int i = 0; i < most; i++) {
    const float v = t + 32 * i < p.experts ? __ldcg(logits + t + 32 * i) : -INFINITY;
    top = fmaxf(top, v);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
  for (int i = 0; i < most; i++)
    if (t + 32 * i < p.experts) all += expf(__ldcg(logits + t + 32 * i) - top);
  all = warp_sum(all);
  const float e = t < p.topk ? expf(value - top) / all : 0.0f, sum = warp_sum(e);
  if (t < p.topk) p.chosen[(uint64_t)r * p.topk + t] = mine, p.weight[(uint64_t)r * p.topk + t] = p.normalize ? e / sum : e;
}

DEVICE float dot16(uint4 a, uint4 b) {
  float s = lo(a.x) * lo(b.x);
  s = fmaf(hi(a.x), hi(b.x), s), s = fmaf(lo(a.y), lo(b.y), s), s = fmaf(hi(a.y), hi(b.y), s), s = fmaf(lo(a.z), lo(b.z), s);
  s = fmaf(hi(a.z), hi(b.z), s), s = fmaf(lo(a.w), lo(b.w), s), s = fmaf(hi(a.w), hi(b.w), s);
  return s;
}

NINFER_KERNEL(expert_up_wide, ExpertUpParams, 256, 2) {
  constexpr uint32_t most = 10;    // pieces of 16 bytes of a row that a lane has: 2,560 values
  __shared__ uint4 x[32 * most];
  pdl();
  const uint32_t r = blockIdx.y, lane = threadIdx.x % 32, pieces = p.h / 8, mine = (pieces + 31 - lane) / 32;
  for (uint32_t i = threadIdx.x; i < pieces; i += 256) x[i] = __ldcg((const uint4*)(p.x + (uint64_t)r * p.h) + i);
  __syncthreads();
  for (uint32_t unit = blockIdx.x * 8 + threadIdx.x / 32; unit < p.topk * p.inter; unit += gridDim.x * 8) {
    const uint32_t choice = unit / p.inter, j = unit % p.inter, e = __ldcg(p.chosen + r * p.topk + choice);
    const uint4* gate = (const uint4*)((const bf16*)p.bank.codes + ((uint64_t)e * 2 * p.inter + j) * p.h);
    const uint4* up = gate + (uint64_t)p.inter * pieces;
    uint4 g[most], u[most];
#pragma unroll
    for (uint32_t i = 0; i < most; i++)
      if (i < mine) g[i] = stream16(gate + lane + 32 * i);
#pragma unroll
    for (uint32_t i = 0; i < most; i++)
      if (i < mine) u[i] = stream16(up + lane + 32 * i);
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < most; i++)
      if (i < mine) {
        const uint4 v = x[lane + 32 * i];
        a += dot16(g[i], v), b += dot16(u[i], v);
      }
    a = warp_sum(a), b = warp_sum(b);
    if (lane == 0) p.hidden[((uint64_t)r * p.topk + choice) * p.inter + j] = to_bf16(silu(a) * b);
  }
}

NINFER_KERNEL(expert_down_wide, ExpertDownParams, 640, 1) {
  constexpr int batch = 10;
  extern __shared__ __align__(16) uint8_t room[];  // hidden values [topk + 1][inter], the shared ones last
  __shared__ float factor[17];
  __shared__ const uint4* rows[17];
  uint4* hidden = (uint4*)room;
  pdl();
  const uint32_t r = blockIdx.y, lane = threadIdx.x % 32, pieces = p.inter / 8, routed = p.topk * pieces, all = routed + pieces;
  for (uint32_t i = threadIdx.x; i < all; i += 640)
    hidden[i] = i < routed ? __ldcg((const uint4*)(p.hidden + (uint64_t)r * p.topk * p.inter) + i) : __ldcg((const uint4*)(p.shared + (uint64_t)r * p.inter) + i - routed);
  if (threadIdx.x <= p.topk) {
    const uint32_t i = threadIdx.x;
    factor[i] = i < p.topk ? __ldcg(p.weight + r * p.topk + i) : sigmoid(__ldcg(p.gate + r));
    rows[i] = i < p.topk ? (const uint4*)((const bf16*)p.bank.codes + (uint64_t)__ldcg(p.chosen + r * p.topk + i) * p.h * p.inter) : (const uint4*)p.down.codes;
  }
  __syncthreads();
  const uint32_t c = blockIdx.x * 20 + threadIdx.x / 32;
  if (c >= p.h) return;
  float sum = 0.0f;
  for (uint32_t first = lane; first < all; first += 32 * batch) {
    uint4 w[batch];
#pragma unroll
    for (int i = 0; i < batch; i++) {
      const uint32_t at = first + 32 * i, e = at / pieces;
      if (at < all) w[i] = stream16(rows[e] + (uint64_t)c * pieces + at - e * pieces);
    }
#pragma unroll
    for (int i = 0; i < batch; i++) {
      const uint32_t at = first + 32 * i;
      if (at < all) sum = fmaf(factor[at / pieces], dot16(w[i], hidden[at]), sum);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) p.out[(uint64_t)r * p.h + c] = to_bf16(sum);
}
