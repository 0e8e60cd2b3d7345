// The gated delta rule of decoding and verifying.
//
// A lane's matrices are brought forward by its records before anything else (fold). A verify pass records its rows instead of writing matrices, and most decoding
// steps do: a matrix is written in every fourth one. With no rows delta folds only.
//
//   delta           behind the convolution, with the norm; S in shared memory. Grid: head, lane.
//   delta_quarters  convolution of four taps and the rule for heads of 128, a quarter of a head's columns a block, S in registers and there before the wait; the
//                   norm's factor is left to the next product (project.cu). Rows one after the other. Grid: head, lane, quarter.
//   delta_one       the same for lanes of a row each, in so few registers that the next kernel finds room on an SM beside three blocks.
//   delta_halves    the same with half of a head a block: what is done for every channel of query and key, or once a block, counts half. Grid: head, lane, half.
//   delta_heads     the same with a whole head a block, half of it in shared memory, so that all of eight lanes' states are asked for at once. Grid: head, lane.
//   delta_rows      the same for a lane of several rows: what does not depend on the row before is done for eight at once. Grid: head, lane, quarter.
//
// All but the first make the same sums: a row has the same bits in each.
#include "common.cuh"

extern __shared__ __align__(16) float dynamic[];

static constexpr int kDelta = 512;

// Matrices are written in every kEvery-th step, of other layers in other ones: p.turn says in which.
static constexpr uint32_t kEvery = 4;

// A lane's records of a head, which are a ring: key, correction, decay, and room that makes it a multiple of 16 bytes. Lane.from has the place behind the last one
// of a step; from bit 16 how many steps in a row may have left some, above 7 less a multiple of kEvery; and in bit 31 whether this step may.
struct Records {
  float* at;
  uint32_t first, size, ld, late, count;  // late are of steps; those of a verify pass lie behind them
  bool leave;                             // one instead of writing the matrix

  DEVICE Records(const DeltaParams& p, const Lane& lane, uint32_t head) {
    const uint32_t steps = lane.from >> 16 & 7, turn = (steps + p.turn) % kEvery, record = 2 * p.dim + 4, place = lane.from & 0xffff;
    late = min(steps, turn), count = late + lane.fold, leave = lane.from >> 31 && turn + 1 < kEvery;
    first = place - late + (place < late ? p.ring : 0), size = p.ring, ld = p.heads * record;
    at = p.records + (lane.slot * size * ld + head * record);
  }
  // Record i, counted from the first to be brought forward by: behind them a pass leaves its own.
  DEVICE float* operator()(uint32_t i) const { return at + (first + i < size ? first + i : first + i - size) * ld; }
  // Whether a matrix is rounded behind record i, as if it had been kept and read again: behind each step and behind a pass.
  DEVICE bool rounded(const DeltaParams& p, uint32_t i) const { return p.half_state && (i < late || i + 1 == count); }
};

NINFER_KERNEL(delta, DeltaParams, kDelta, 1) {
  __shared__ float shared[33];
  pdl();
  const uint32_t dim = p.dim, head = blockIdx.x, group = p.heads / p.key_heads, c = (2 * p.key_heads + p.heads) * dim;
  const Lane lane = p.lanes[blockIdx.y];
  float *S = dynamic, *q = S + dim * dim, *k = q + dim, *d = k + dim, *sums = d + dim;  // sums: 4 * dim
  const uint32_t t = threadIdx.x, j = t % dim, part = t / dim;
  const bool on = part < 4;
  const uint32_t i0 = dim * part / 4, i1 = dim * (part + 1) / 4;  // keys of this part
  const uint64_t state = ((uint64_t)lane.slot * p.heads + head) * dim * dim;
  auto put = [&](uint32_t i, float v) {
    if (p.half_state) ((bf16*)p.state)[state + i] = to_bf16(v);
    else ((float*)p.state)[state + i] = v;
  };
  const Records record(p, lane, head);
  for (uint32_t i = t; i < dim * dim; i += kDelta) S[i] = p.half_state ? from_bf16(((const bf16*)p.state)[state + i]) : ((const float*)p.state)[state + i];
  __syncthreads();
  for (uint32_t f = 0; f < record.count; f++) {
    const float* rec = record(f);
    const bool round = record.rounded(p, f);
    if (on)
      for (uint32_t i = i0; i < i1; i++) {
        const float s = fmaf(rec[i], rec[dim + j], __fmul_rn(S[i * dim + j], rec[2 * dim]));
        S[i * dim + j] = round ? round_bf16(s) : s;
      }
    __syncthreads();
  }
  if (record.count && lane.record)
    for (uint32_t i = t; i < dim * dim; i += kDelta) put(i, S[i]);
  const float rate = -expf(p.alog[head]);
  for (uint32_t row = lane.first; row < lane.first + lane.rows; row++) {
    const float* line = p.qkv + (uint64_t)row * c;
    const float qv = t < dim ? line[head / group * dim + t] : 0.0f, kv = t < dim ? line[(p.key_heads + head / group) * dim + t] : 0.0f;
    const float qs = 1.0f / sqrtf(block_sum(qv * qv, shared) + 1e-6f) / sqrtf((float)dim);
    const float ks = 1.0f / sqrtf(block_sum(kv * kv, shared) + 1e-6f);
    if (t < dim) q[t] = qv * qs, k[t] = kv * ks;
    const float decay = expf(rate * softplus(from_bf16(p.a[(uint64_t)row * p.heads + head]) + p.dt[head]));
    const float beta = sigmoid(from_bf16(p.b[(uint64_t)row * p.heads + head]));
    __syncthreads();
    if (on) {
      float u = 0.0f;
      for (uint32_t i = i0; i < i1; i++) {
        const float s = __fmul_rn(S[i * dim + j], decay);
        S[i * dim + j] = s;
        u = fmaf(s, k[i], u);
      }
      sums[part * dim + j] = u;
    }
    __syncthreads();
    if (t < dim) d[t] = beta * (line[(2 * p.key_heads + head) * dim + t] - (sums[t] + sums[dim + t] + sums[2 * dim + t] + sums[3 * dim + t]));
    __syncthreads();
    if (on) {
      float o = 0.0f;
      for (uint32_t i = i0; i < i1; i++) {
        const float s = fmaf(k[i], d[j], S[i * dim + j]);
        S[i * dim + j] = s;
        o = fmaf(s, q[i], o);
      }
      sums[part * dim + j] = o;
    }
    if (lane.record || record.leave) {
      float* rec = record(record.count + row - lane.first);
      if (t == 0) rec[2 * dim] = decay;
      if (t < dim) rec[t] = k[t], rec[dim + t] = d[t];
    }
    __syncthreads();
    const float o = t < dim ? sums[t] + sums[dim + t] + sums[2 * dim + t] + sums[3 * dim + t] : 0.0f;
    const float scale = 1.0f / sqrtf(block_sum(o * o, shared) / dim + p.eps);
    if (t < dim) {
      const uint64_t at = ((uint64_t)row * p.heads + head) * dim + t;
      p.out[at] = round_bf16(o * p.norm[t] * sigmoid(from_bf16(p.z[at]))) * scale;
    }
  }
  if (!lane.record && !record.leave) {
    __syncthreads();
    for (uint32_t i = t; i < dim * dim; i += kDelta) put(i, S[i]);
  }
}

static constexpr int kQuarter = 128;    // threads of a block that has a quarter of a head's columns
static constexpr int kRows = 288;       // of delta_rows: one for each channel of a quarter
static constexpr uint32_t kAtOnce = 8;  // rows of a lane that delta_rows makes ready together
static constexpr uint32_t kHeld = 8;    // records that shared memory has room for

DEVICE void copy16(float* to, const float* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// The bits of a BF16 value, from L2. What is loaded before the wait is converted behind it: nvcc converts right behind the load, so that a warp would stand
// there instead of waiting.
DEVICE float late(unsigned short bits) {
  asm volatile("" : "+h"(bits));
  return lo(bits);
}
// An address that is worked out where it stands, and not behind a wait that follows.
template <class T>
DEVICE T* ready(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}
DEVICE uint32_t fresh(const bf16* from) { return __ldcg((const unsigned short*)from); }
// Within two steps of the last place: few instructions, which an SM that has not fetched them for long waits for.
DEVICE float exp_of(float v) {  // too small ones are 0, which 1 is added to
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fmul_rn(v, 1.4426950408889634f)));
  return r;
}
DEVICE float gate(float v) { return __fdividef(1.0f, 1.0f + exp_of(-v)); }
DEVICE float swish(float v) { return __fdividef(v, 1.0f + exp_of(-v)); }
DEVICE float root_of(float v) {  // 1 over the root of a normal number
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
DEVICE uint32_t key_head_of(const DeltaParams& p, uint32_t head) { return (uint32_t)__fdividef((float)(head * p.key_heads) + 0.5f, (float)p.heads); }
DEVICE uint32_t pair(float a, float b) { return (uint32_t)__bfloat16_as_ushort(to_bf16(a)) | (uint32_t)__bfloat16_as_ushort(to_bf16(b)) << 16; }

// What the delta rule needs of a lane, asked for before all else.
DEVICE Lane lane_of(const Lane* from) {
  Lane lane;
#define FIELD(name) asm volatile("ld.global.u32 %0, [%1];" : "=r"(lane.name) : "l"(&from->name))
  FIELD(slot);
  FIELD(fold);
  FIELD(from);
  FIELD(first);
  FIELD(rows);
  FIELD(record);
#undef FIELD
  return lane;
}

// What a thread of 128 has of a quarter's state: eight keys from i0 on, four columns from 4 * c4 on. Of the four columns it finishes one, own.
template <bool kHalf>
struct Piece {
  static constexpr uint32_t D = 128;
  uint32_t c4, g, i0, own, quarter;
  uint64_t at;  // in the states
  float S[8][4];

  Piece() = default;
  DEVICE Piece(const DeltaParams& p, const Lane& lane, uint32_t head, uint32_t quarter) : quarter(quarter) {
    c4 = threadIdx.x % 8, g = threadIdx.x % 32 / 8, i0 = threadIdx.x / 8 * 8, own = c4 * 4 + g;
    at = ((uint64_t)(lane.slot * p.heads + head) * D + i0) * D + quarter * 32 + c4 * 4;
  }
  // Asks for it. Of BF16 it has the bits until it is opened, which waits for them.
  DEVICE void ask(const DeltaParams& p) {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if constexpr (kHalf) *(float2*)S[i] = *(const float2*)((const bf16*)p.state + at + i * D);
      else *(float4*)S[i] = *(const float4*)((const float*)p.state + at + i * D);
  }
  DEVICE void open() {
    if constexpr (kHalf)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        uint32_t a = __float_as_uint(S[i][0]), b = __float_as_uint(S[i][1]);
        asm volatile("" : "+r"(a), "+r"(b));  // no earlier
        S[i][0] = lo(a), S[i][1] = hi(a), S[i][2] = lo(b), S[i][3] = hi(b);
      }
  }
  DEVICE void put(const DeltaParams& p) const {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if constexpr (kHalf) __stwb((uint2*)((bf16*)p.state + at + i * D), make_uint2(pair(S[i][0], S[i][1]), pair(S[i][2], S[i][3])));
      else __stwb((float4*)((float*)p.state + at + i * D), *(const float4*)S[i]);
  }
  // Brings it forward by a record: decay, the thread's keys, and the corrections of its columns.
  DEVICE void fold(float decay, const float* k, const float* d, bool round) {
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) S[i][j] = fmaf(k[i], d[j], __fmul_rn(S[i][j], decay));
    if (kHalf && round)
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) S[i][j] = round_bf16(S[i][j]);
  }
  // Sums of the columns times k and times q over the keys of a warp: the lanes that share four columns add up in pairs and have one column each in the end.
  DEVICE float2 along(const float* k, const float* q) const {
    float u[4] = {0, 0, 0, 0}, w[4] = {0, 0, 0, 0}, a[2], b[2];
#pragma unroll
    for (int h = 0; h < 8; h += 4) {  // where they lie in shared memory, few of them in registers at a time
      float k4[4], q4[4];
      *(float4*)k4 = *(const float4*)(k + h), *(float4*)q4 = *(const float4*)(q + h);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) u[j] = fmaf(S[h + i][j], k4[i], u[j]), w[j] = fmaf(S[h + i][j], q4[i], w[j]);
    }
    const bool odd = g & 1, high = g & 2;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      a[j] = (odd ? u[2 * j + 1] : u[2 * j]) + __shfl_xor_sync(~0u, odd ? u[2 * j] : u[2 * j + 1], 8);
      b[j] = (odd ? w[2 * j + 1] : w[2 * j]) + __shfl_xor_sync(~0u, odd ? w[2 * j] : w[2 * j + 1], 8);
    }
    return make_float2((high ? a[1] : a[0]) + __shfl_xor_sync(~0u, high ? a[0] : a[1], 16), (high ? b[1] : b[0]) + __shfl_xor_sync(~0u, high ? b[0] : b[1], 16));
  }
  DEVICE void decay(float by) {
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) S[i][j] = __fmul_rn(S[i][j], by);
  }
  // Adds the keys times the corrections, of which d is that of the thread's own column.
  DEVICE void correct(const float* k, float d) {
    float d4[4];
#pragma unroll
    for (int j = 0; j < 4; j++) d4[j] = __shfl_sync(~0u, d, c4 + 8 * j);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) S[i][j] = fmaf(k[i], d4[j], S[i][j]);
  }
};

// What a row does to a column, whose sums of the matrix times key and query are u and w. Keys and queries are as the convolution leaves them: their norms are in the
// factors, so that sums need not wait for them.
struct Rule {
  float decay, beta, query, key, dot;
  Rule() = default;
  DEVICE Rule(float decay, float beta, float qq, float kk, float qk) : decay(decay), beta(beta) {  // the sums of squares and of query times key
    query = __fmul_rn(root_of(qq + 1e-6f), 0.08838834764831845f), key = root_of(kk + 1e-6f), dot = __fmul_rn(__fmul_rn(qk, query), key);
  }
  // Output and correction, by which times the key the column changes.
  DEVICE float2 operator()(float u, float w, float value) const {
    const float d = __fmul_rn(beta, fmaf(-__fmul_rn(decay, key), u, value));
    return make_float2(fmaf(__fmul_rn(decay, query), w, __fmul_rn(dot, d)), __fmul_rn(d, key));
  }
};
// The sums over a warp of a query's squares, a key's, and their products, by the pairs of warp_sum: each of these and a 0 in eight lanes, in this order.
DEVICE float products(float q, float k) {
  const bool odd = threadIdx.x & 8, high = threadIdx.x & 16;
  const float qq = q * q, kk = k * k, qk = q * k;
  const float a = (high ? qk : qq) + __shfl_xor_sync(~0u, high ? qq : qk, 16), b = (high ? 0.0f : kk) + __shfl_xor_sync(~0u, high ? kk : 0.0f, 16);
  float v = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, 8);
#pragma unroll
  for (int o = 4; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
DEVICE float decay_of(float a, float alog, float dt) { return expf(-expf(alog) * softplus(a + dt)); }

// The records of kQ quarters of a head that shared memory has room for: of each key, corrections, decay.
template <int kQ>
struct Held {
  static constexpr uint32_t D = 128, lines = 33 + 8 * kQ;  // 16-byte pieces of one
  __align__(16) float at[kHeld][D + 32 * kQ + 4];
  DEVICE void ask(const Records& record, uint32_t quarter) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < min(record.count, kHeld) * lines; i += blockDim.x) {
      const uint32_t f = i / lines, x = i % lines * 4;
      copy16(&at[f][x], record(f) + (x < D ? x : x < D + 32 * kQ ? quarter * 32 + x : 2 * D));
    }
  }
  // Brings a thread's N pieces forward by all of them.
  template <int N = kQ, bool kHalf>
  DEVICE void fold(const DeltaParams& p, const Records& record, Piece<kHalf>* of) const {
#pragma unroll 1
    for (uint32_t f = 0; f < record.count; f++) {
      float k[8], d[N][4], decay;
      const uint32_t i0 = of->i0, c = of->c4 * 4;
      if (f < kHeld) {
        *(float4*)k = *(const float4*)&at[f][i0], *(float4*)(k + 4) = *(const float4*)&at[f][i0 + 4], decay = at[f][D + 32 * kQ];
#pragma unroll
        for (int q = 0; q < N; q++) *(float4*)d[q] = *(const float4*)&at[f][D + of[q].quarter % kQ * 32 + c];
      } else {
        const float* rec = record(f);
        decay = rec[2 * D];
        *(float4*)k = *(const float4*)(rec + i0), *(float4*)(k + 4) = *(const float4*)(rec + i0 + 4);
#pragma unroll
        for (int q = 0; q < N; q++) *(float4*)d[q] = *(const float4*)(rec + D + of[q].quarter * 32 + c);
      }
#pragma unroll
      for (int q = 0; q < N; q++) of[q].fold(decay, k, d[q], kHalf && record.rounded(p, f));
    }
  }
};

// Row j of the three before a lane's first: window and recorded rows are one sequence.
DEVICE const bf16* before(const DeltaParams& p, const Lane& lane, uint32_t j, uint32_t c) {
  const uint32_t at = lane.fold + j;
  return at < 3 ? p.window + (uint64_t)(lane.slot * 3 + at) * c : p.inputs + (uint64_t)(lane.slot * p.verify + at - 3) * c;
}

// A channel's convolution: the taps, and the bits of the three values before.
struct Channel {
  float tap[4], past[3];
  DEVICE float operator()(float now) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 3; j++) sum = fmaf(tap[j], past[j], sum);
    past[0] = past[1], past[1] = past[2], past[2] = now;
    return swish(fmaf(tap[3], now, sum));
  }
};

// Ends a row of a quarter in one warp, a column a lane: o is that of the lane's own column. The squares add up in fours of columns, then in pairs.
DEVICE void end_row(float* squares, bf16* gated, float o, float norm, float open) {
  float square = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float v = __shfl_sync(~0u, o, threadIdx.x % 8 + 8 * j);
    square = fmaf(v, v, square);
  }
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  square += __shfl_xor_sync(~0u, square, 4);
  if (threadIdx.x % 32 == 0) *squares = square;
  *gated = to_bf16(o * norm * open);
}
DEVICE void end_row(const DeltaParams& p, uint32_t row, uint32_t head, uint32_t quarter, uint32_t own, float o, float norm, uint32_t z) {
  const uint64_t at = (uint64_t)row * p.heads + head;
  end_row(p.squares + at * 4 + quarter, p.gated + at * 128 + quarter * 32 + own, o, norm, gate(lo(z)));
}

// With kOne lanes have a row each, so that nothing is kept for another.
struct QuartersShared {
  static constexpr uint32_t D = 128;
  __align__(16) float raw[2 * D + 32], parts[4][4];  // query, key, value; a warp's sums
  Held<1> held;
  float2 sums[4][32], scalars;
};
template <bool kHalf, bool kOne>
DEVICE void quarters(const DeltaParams& p, QuartersShared& m) {
  constexpr uint32_t D = 128;
  auto& raw = m.raw;
  auto& held = m.held;
  auto& parts = m.parts;
  auto& sums = m.sums;
  const Lane lane = lane_of(p.lanes + blockIdx.y);
  if (p.trigger == 0) pdl_trigger();
  const uint32_t head = blockIdx.x, quarter = blockIdx.z, key_head = key_head_of(p, head), c = (2 * p.key_heads + p.heads) * D;
  const uint32_t t = threadIdx.x, warp = t / 32, l = t % 32;
  // The convolution's channels of this thread: of query, key, and for the first warp of value.
  const uint32_t channel[3] = {key_head * D + t, (p.key_heads + key_head) * D + t, (2 * p.key_heads + head) * D + quarter * 32 + l};
  Channel of[3];
#pragma unroll
  for (uint32_t j = 0; j < 4; j++)
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (i < 2 || t < 32) of[i].tap[j] = __ldg(p.conv + j * c + channel[i]);
  // State and records are a step old, the rest constant: all asked for before the wait, and before anything is done.
  Piece<kHalf> state(p, lane, head, quarter);
  const float factor = __ldg(t < 32 ? p.norm + quarter * 32 + state.own : p.alog + head), dt = __ldg(p.dt + head);  // of all warps but the first the rate
  state.ask(p);
  const Records record(p, lane, head);
  held.ask(record, quarter);
  unsigned short old[3][3];
  if (lane.fold == 0) {  // as a rule
    const bf16* line = p.window + (uint64_t)(lane.slot * 3) * c;
#pragma unroll
    for (uint32_t j = 0; j < 3; j++)
#pragma unroll
      for (int i = 0; i < 3; i++)
        if (i < 2 || t < 32) old[i][j] = __bfloat16_as_ushort(line[j * c + channel[i]]);
  } else {
#pragma unroll
    for (uint32_t j = 0; j < 3; j++) {
      const bf16* line = before(p, lane, j, c);
#pragma unroll
      for (int i = 0; i < 3; i++)
        if (i < 2 || t < 32) old[i][j] = __bfloat16_as_ushort(line[channel[i]]);
    }
  }
  const uint64_t at = (uint64_t)lane.first * p.heads + head;
  const bf16* line = p.x + (uint64_t)lane.first * c;
  // Of a row: query and key, and of the first warp value and z, of the second a and b.
  const bf16 *at0 = ready(line + channel[0]), *at1 = ready(line + channel[1]);
  const bf16 *at2 = ready(t < 32 ? line + channel[2] : p.a + at), *at3 = ready(t < 32 ? p.z + at * D + quarter * 32 + state.own : p.b + at);
  auto pasts = [&]() {
#pragma unroll
    for (int i = 0; i < 3; i++)
#pragma unroll
      for (int j = 0; j < 3; j++) of[i].past[j] = late(old[i][j]);
  };
  if (record.count) {
    copies_wait();
    __syncthreads();
    state.open();
    held.fold(p, record, &state);
    if (kOne) pasts();  // have come with the state
    if (!kOne && lane.record) state.put(p);  // long before the kernel ends, which waits for it
  }
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
  const bool keep = (kOne || !lane.record) && !record.leave;  // of what becomes of the matrices: they are written, or each row leaves a record
  uint32_t x[4];
  auto ask = [&]() {
    x[0] = fresh(at0), x[1] = fresh(at1);
    if (t < 64) x[2] = fresh(at2), x[3] = fresh(at3);
    at0 += c, at1 += c, at2 += t < 32 ? c : p.heads, at3 += t < 32 ? p.heads * D : p.heads;
  };
  const uint32_t rows = kOne ? 1 : lane.rows;
  if (rows > 0) ask();
  if (!record.count) state.open();
  if (!kOne || !record.count) pasts();
  // A lane's only row that leaves a record is ended by one warp: where it writes is worked out while the row comes.
  const bool brief = kOne && record.leave;
  float *rec = nullptr, *squares = nullptr;
  bf16* gated = nullptr;
  if constexpr (kOne) rec = ready(record(record.count)), squares = ready(p.squares + at * 4 + quarter), gated = ready(p.gated + at * D + quarter * 32 + state.own);
#pragma unroll 1
  for (uint32_t r = 0; r < rows; r++) {
    if (r > 0) {
      ask();
      __syncthreads();  // the row before is no longer looked at
    }
    const float qv = of[0](lo(x[0])), kv = of[1](lo(x[1]));
    raw[t] = qv, raw[D + t] = kv;  // of the keys whose rows of the matrix this warp has
    __syncwarp();
    float opened = 0.0f;
    if (t < 32) {
      raw[2 * D + t] = of[2](lo(x[2]));
      if constexpr (kOne) opened = gate(lo(x[3]));
    } else if (warp == 1) {
      const float decay = decay_of(lo(x[2]), factor, dt), beta = gate(lo(x[3]));
      if (t == 32) m.scalars = make_float2(decay, beta);
    }
    float q[8], k[8];
    *(float4*)q = *(const float4*)&raw[state.i0], *(float4*)(q + 4) = *(const float4*)&raw[state.i0 + 4];
    *(float4*)k = *(const float4*)&raw[D + state.i0], *(float4*)(k + 4) = *(const float4*)&raw[D + state.i0 + 4];
    const float2 mine = state.along(k, q);
    const float sum = products(qv, kv);  // beside it: nothing in shared memory lies between
    sums[warp][state.own] = mine;
    if (t % 8 == 0) parts[0][t / 8] = sum;
    if (brief) {
      if (quarter == 0) rec[t] = kv;
      if (warp) {
        asm volatile("bar.arrive 1, 128;" ::: "memory");
        return;
      }
      asm volatile("bar.sync 1, 128;" ::: "memory");
    } else {
      __syncthreads();
    }
    float part[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) *(float4*)part[i] = *(const float4*)parts[i];
    const Rule rule(m.scalars.x, m.scalars.y, part[0][0] + part[1][0] + part[2][0] + part[3][0], part[0][1] + part[1][1] + part[2][1] + part[3][1],
                    part[0][2] + part[1][2] + part[2][2] + part[3][2]);
    const float2 s0 = sums[0][state.own], s1 = sums[1][state.own], s2 = sums[2][state.own], s3 = sums[3][state.own];
    const float2 made = rule(s0.x + s1.x + s2.x + s3.x, s0.y + s1.y + s2.y + s3.y, raw[2 * D + state.own]);
    const uint32_t row = lane.first + r;
    const bool last = r + 1 == rows;
    if (warp == 0) {
      if constexpr (kOne) end_row(squares, gated, made.x, factor, opened);
      else end_row(p, row, head, quarter, state.own, made.x, factor, x[3]);
    }
    if (brief) {
      rec[D + quarter * 32 + state.own] = made.y;
      if (quarter == 0 && t == 0) rec[2 * D] = rule.decay;
      return;
    }
    if (kOne || keep || !last) {
      state.decay(rule.decay);
      state.correct(k, made.y);
      if (kOne || keep && last) state.put(p);
    }
    if (!kOne && !keep) {
      float* rec = record(record.count + r);
      if (warp == 1) rec[D + quarter * 32 + state.own] = made.y;
      if (quarter == 0) {
        rec[t] = kv;
        if (t == 0) rec[2 * D] = rule.decay;
      }
    }
  }
}

// The convolution of a head's query and key and V channels of its value from value on, of which a block's threads have one row: taps and the values before come by
// copies of 16 bytes, so that no registers wait for them.
template <uint32_t V>
struct Channels {
  static constexpr uint32_t D = 128, C = 2 * D + V;
  __align__(16) float tap[4][C], raw[C];  // raw: as the convolution leaves them
  __align__(16) unsigned short past[3][C];
  DEVICE void ask(const DeltaParams& p, const Lane& lane, uint32_t c, uint32_t query, uint32_t key, uint32_t value) {
    auto channel = [&](uint32_t i) { return i < D ? query + i : i < 2 * D ? key - D + i : value - 2 * D + i; };
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < C; i += kQuarter) {
      const uint32_t j = i / (C / 4), x = i % (C / 4) * 4;
      copy16(&tap[j][x], p.conv + j * c + channel(x));
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < 3 * C / 8; i += kQuarter) {
      const uint32_t j = i / (C / 8), x = i % (C / 8) * 8;
      copy16((float*)&past[j][x], (const float*)(before(p, lane, j, c) + channel(x)));
    }
  }
  DEVICE float convolve(uint32_t i, uint32_t now) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 3; j++) sum = fmaf(tap[j][i], lo(past[j][i]), sum);
    return raw[i] = swish(fmaf(tap[3][i], lo(now), sum));
  }
  DEVICE const float* query(uint32_t i) const { return &raw[i]; }
  DEVICE const float* key(uint32_t i) const { return &raw[D + i]; }
  DEVICE float value(uint32_t i) const { return raw[2 * D + i]; }
};

// What the warps of a block tell each other of a row: sums over their keys of squares and products, and of each quarter of a head of its columns.
template <int kQ>
struct Meeting {
  __align__(16) float parts[4][4];
  float2 sums[kQ][4][32], scalars;
  DEVICE void put(float sum) {  // of products
    if (threadIdx.x % 8 == 0) parts[0][threadIdx.x / 8] = sum;
  }
  DEVICE Rule rule() const {
    float part[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) *(float4*)part[i] = *(const float4*)parts[i];
    return Rule(scalars.x, scalars.y, part[0][0] + part[1][0] + part[2][0] + part[3][0], part[0][1] + part[1][1] + part[2][1] + part[3][1],
                part[0][2] + part[1][2] + part[2][2] + part[3][2]);
  }
  DEVICE float2 made(const Rule& rule, uint32_t q, uint32_t own, float value) const {
    const float2 s0 = sums[q][0][own], s1 = sums[q][1][own], s2 = sums[q][2][own], s3 = sums[q][3][own];
    return rule(s0.x + s1.x + s2.x + s3.x, s0.y + s1.y + s2.y + s3.y, value);
  }
};

// One row a lane, half of a head a block, of which a thread has eight keys of four columns of either quarter.
struct HalvesShared {
  Channels<64> channels;
  Held<2> held;
  Meeting<2> meeting;
};
template <bool kHalf>
DEVICE void halves(const DeltaParams& p, HalvesShared& m) {
  constexpr uint32_t D = 128;
  const Lane lane = lane_of(p.lanes + blockIdx.y);
  if (p.trigger == 0) pdl_trigger();
  const uint32_t head = blockIdx.x, quarter = blockIdx.z * 2, key_head = key_head_of(p, head), c = (2 * p.key_heads + p.heads) * D;
  const uint32_t t = threadIdx.x, warp = t / 32, l = t % 32;
  const uint32_t query0 = key_head * D, key0 = (p.key_heads + key_head) * D, value0 = (2 * p.key_heads + head) * D + quarter * 32;
  // State and records are a step old, the rest constant: all asked for before the wait, and before anything is done.
  Piece<kHalf> state[2];
#pragma unroll
  for (int q = 0; q < 2; q++) state[q] = Piece<kHalf>(p, lane, head, quarter + q), state[q].ask(p);
  const uint32_t own = state[0].own, i0 = state[0].i0;
  // Of a row: query and key, of the first warps, which end one quarter each, value and z, of the next one a and b.
  const bool ends = warp < 2;
  const float factor = __ldg(ends ? p.norm + (quarter + warp) * 32 + own : p.alog + head), dt = __ldg(p.dt + head);
  const Records record(p, lane, head);
  m.held.ask(record, quarter);
  m.channels.ask(p, lane, c, query0, key0, value0);
  const uint64_t at = (uint64_t)lane.first * p.heads + head;
  const bf16* line = p.x + (uint64_t)lane.first * c;
  const bf16 *at0 = ready(line + query0 + t), *at1 = ready(line + key0 + t);
  const bf16 *at2 = ready(ends ? line + value0 + t : p.a + at), *at3 = ready(ends ? p.z + at * D + (quarter + warp) * 32 + own : p.b + at);
  auto open = [&]() {
    copies_wait();
    __syncthreads();
#pragma unroll
    for (int q = 0; q < 2; q++) state[q].open();
  };
  if (record.count) {
    open();
    m.held.fold(p, record, state);
  }
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
  uint32_t x[4];
  x[0] = fresh(at0), x[1] = fresh(at1);
  if (warp <= 2) x[2] = fresh(at2), x[3] = fresh(at3);
  if (!record.count) open();
  const float qv = m.channels.convolve(t, x[0]), kv = m.channels.convolve(D + t, x[1]);  // of the keys whose rows of the matrix this warp has
  __syncwarp();
  if (ends) {
    m.channels.convolve(2 * D + t, x[2]);
  } else if (warp == 2) {
    const float decay = decay_of(lo(x[2]), factor, dt), beta = gate(lo(x[3]));
    if (l == 0) m.meeting.scalars = make_float2(decay, beta);
  }
  const float2 first = state[0].along(m.channels.key(i0), m.channels.query(i0));
  const float sum = products(qv, kv);
  m.meeting.sums[0][warp][own] = first, m.meeting.put(sum);
  m.meeting.sums[1][warp][own] = state[1].along(m.channels.key(i0), m.channels.query(i0));
  if (record.leave) {
    if (quarter == 0) record(record.count)[t] = kv;
    if (warp > 1) {  // the others end a quarter each
      asm volatile("bar.arrive 1, 128;" ::: "memory");
      return;
    }
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    __syncthreads();
  }
  const Rule rule = m.meeting.rule();
#pragma unroll
  for (int q = 0; q < 2; q++) {
    if (record.leave && warp != q) continue;  // the matrix is not written: a record is
    const float2 made = m.meeting.made(rule, q, own, m.channels.value(q * 32 + own));
    if (warp == q) end_row(p, lane.first, head, quarter + q, own, made.x, factor, x[3]);
    if (record.leave) {
      record(record.count)[D + (quarter + q) * 32 + own] = made.y;
    } else {
      float k[8];
      *(float4*)k = *(const float4*)m.channels.key(i0), *(float4*)(k + 4) = *(const float4*)m.channels.key(i0 + 4);
      state[q].decay(rule.decay);
      state[q].correct(k, made.y);
      state[q].put(p);
    }
  }
  if (record.leave && quarter == 0 && t == 0) record(record.count)[2 * D] = rule.decay;
}

// One row a lane, a whole head a block: of two quarters a thread has its pieces in registers, of two in shared memory, where it has put them itself.
struct HeadsShared {
  __align__(16) float rest[2][8][kQuarter][4];
  Channels<128> channels;
  Held<4> held;
  Meeting<4> meeting;
};
template <bool kHalf>
DEVICE void whole_heads(const DeltaParams& p, HeadsShared& m) {
  constexpr uint32_t D = 128;
  const Lane lane = lane_of(p.lanes + blockIdx.y);
  if (p.trigger == 0) pdl_trigger();
  const uint32_t head = blockIdx.x, key_head = key_head_of(p, head), c = (2 * p.key_heads + p.heads) * D;
  const uint32_t t = threadIdx.x, warp = t / 32, l = t % 32;
  const uint32_t query0 = key_head * D, key0 = (p.key_heads + key_head) * D, value0 = (2 * p.key_heads + head) * D;
  // State and records are a step old, the rest constant: all asked for before the wait, and before anything is done.
  Piece<kHalf> state[2];
#pragma unroll
  for (int q = 0; q < 2; q++) state[q] = Piece<kHalf>(p, lane, head, q), state[q].ask(p);
  const uint32_t own = state[0].own, c4 = state[0].c4, i0 = state[0].i0;
  const uint64_t at_rest = state[0].at + 64;
  const Records record(p, lane, head);
  m.held.ask(record, 0);
  m.channels.ask(p, lane, c, query0, key0, value0);
  asm volatile("cp.async.commit_group;" ::: "memory");
#pragma unroll
  for (int q = 0; q < 2; q++)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t to = (uint32_t)__cvta_generic_to_shared(m.rest[q][i][t]);
      if constexpr (kHalf) asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"((const bf16*)p.state + at_rest + q * 32 + i * D) : "memory");
      else asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"((const float*)p.state + at_rest + q * 32 + i * D) : "memory");
    }
  const float norm = __ldg(p.norm + warp * 32 + own), alog = __ldg(p.alog + head), dt = __ldg(p.dt + head);
  const uint64_t at = (uint64_t)lane.first * p.heads + head;
  const bf16* line = p.x + (uint64_t)lane.first * c;
  const bf16 *at0 = ready(line + query0 + t), *at1 = ready(line + key0 + t), *at2 = ready(line + value0 + t), *at3 = ready(p.z + at * D + warp * 32 + own);
  const bf16 *at4 = ready(p.a + at), *at5 = ready(p.b + at);
  if (record.count) {
    asm volatile("cp.async.commit_group; cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
#pragma unroll
    for (int q = 0; q < 2; q++) state[q].open();
    m.held.fold<2>(p, record, state);
  }
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
  uint32_t x[4], xa = 0, xb = 0;
  x[0] = fresh(at0), x[1] = fresh(at1), x[2] = fresh(at2), x[3] = fresh(at3);
  if (warp == 3) xa = fresh(at4), xb = fresh(at5);
  __syncwarp();  // all are asked for before anything else is waited for
  copies_wait();
  if (!record.count) {
    __syncthreads();
#pragma unroll
    for (int q = 0; q < 2; q++) state[q].open();
  }
  // A piece in shared memory passes through registers, half of its keys at a time.
  if (kHalf || record.count) {
#pragma unroll 1
    for (int n = 0; n < 4; n++) {
      float S[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* from = m.rest[n / 2][n % 2 * 4 + i][t];
        if constexpr (kHalf) {
          const uint2 v = *(const uint2*)from;
          S[i][0] = lo(v.x), S[i][1] = hi(v.x), S[i][2] = lo(v.y), S[i][3] = hi(v.y);
        } else {
          *(float4*)S[i] = *(const float4*)from;
        }
      }
#pragma unroll 1
      for (uint32_t f = 0; f < record.count; f++) {
        float k[4], d[4], decay;
        auto read = [&](const float* rec) { decay = rec[2 * D], *(float4*)k = *(const float4*)(rec + i0 + n % 2 * 4), *(float4*)d = *(const float4*)(rec + D + 64 + n / 2 * 32 + c4 * 4); };
        if (f < kHeld) read(m.held.at[f]);
        else read(record(f));
        const bool round = kHalf && record.rounded(p, f);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            S[i][j] = fmaf(k[i], d[j], __fmul_rn(S[i][j], decay));
            if (round) S[i][j] = round_bf16(S[i][j]);
          }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) *(float4*)m.rest[n / 2][n % 2 * 4 + i][t] = *(const float4*)S[i];
    }
  }
  const float qv = m.channels.convolve(t, x[0]), kv = m.channels.convolve(D + t, x[1]);  // of the keys whose rows of the matrix this warp has
  __syncwarp();
  m.channels.convolve(2 * D + t, x[2]);
  if (warp == 3) {
    const float decay = decay_of(late(xa), alog, dt), beta = gate(late(xb));
    if (l == 0) m.meeting.scalars = make_float2(decay, beta);
  }
  auto other = [&](int q) {
    Piece<kHalf> s;
    s.c4 = c4, s.g = state[0].g, s.at = at_rest + q * 32;
#pragma unroll
    for (int i = 0; i < 8; i++) *(float4*)s.S[i] = *(const float4*)m.rest[q][i][t];
    return s;
  };
  const float2 first = state[0].along(m.channels.key(i0), m.channels.query(i0));
  const float sum = products(qv, kv);
  m.meeting.sums[0][warp][own] = first, m.meeting.put(sum);
  m.meeting.sums[1][warp][own] = state[1].along(m.channels.key(i0), m.channels.query(i0));
#pragma unroll 1
  for (int q = 0; q < 2; q++) m.meeting.sums[2 + q][warp][own] = other(q).along(m.channels.key(i0), m.channels.query(i0));
  if (record.leave) record(record.count)[t] = kv;
  __syncthreads();
  const Rule rule = m.meeting.rule();
  auto made = [&](uint32_t q) { return m.meeting.made(rule, q, own, m.channels.value(q * 32 + own)); };
  const float2 mine = made(warp);  // a warp ends one quarter
  end_row(p, lane.first, head, warp, own, mine.x, norm, x[3]);
  if (record.leave) {
    float* rec = record(record.count);
    rec[D + warp * 32 + own] = mine.y;
    if (t == 0) rec[2 * D] = rule.decay;
    return;
  }
  float k[8];
  *(float4*)k = *(const float4*)m.channels.key(i0), *(float4*)(k + 4) = *(const float4*)m.channels.key(i0 + 4);
  auto put = [&](Piece<kHalf>& s, uint32_t q) { s.decay(rule.decay), s.correct(k, made(q).y), s.put(p); };
#pragma unroll
  for (int q = 0; q < 2; q++) put(state[q], q);
#pragma unroll 1
  for (int q = 0; q < 2; q++) {
    Piece<kHalf> s = other(q);
    put(s, 2 + q);
  }
}

// In 288 threads: each convolves a channel of all rows, eight warps make a row ready each, the ninth has the rows' decays, and four have the state.
struct RowsShared {
  static constexpr uint32_t D = 128;
  __align__(16) float raw[kAtOnce][kRows], made[kAtOnce][32];  // raw: of each row query, key, value
  Held<1> held;
  float2 sums[2][4][32];
  Rule rules[kAtOnce];
  unsigned short gates[kAtOnce][32];
};
template <bool kHalf>
DEVICE void rows(const DeltaParams& p, RowsShared& m) {
  constexpr uint32_t D = 128;
  auto& raw = m.raw;
  auto& made = m.made;
  auto& held = m.held;
  auto& sums = m.sums;
  auto& rules = m.rules;
  auto& gates = m.gates;
  const Lane lane = lane_of(p.lanes + blockIdx.y);
  if (p.trigger == 0) pdl_trigger();
  const uint32_t head = blockIdx.x, quarter = blockIdx.z, key_head = key_head_of(p, head), c = (2 * p.key_heads + p.heads) * D;
  const uint32_t t = threadIdx.x, warp = t / 32, l = t % 32;
  const bool stateful = t < kQuarter;
  const uint32_t channel = t < 2 * D ? (t < D ? key_head : p.key_heads + key_head - 1) * D + t : (2 * p.key_heads + head) * D + quarter * 32 + l;
  Channel convolved;
#pragma unroll
  for (uint32_t j = 0; j < 4; j++) convolved.tap[j] = __ldg(p.conv + j * c + channel);
  // State and records are a step old, the rest constant: all asked for before the wait, and before anything is done.
  Piece<kHalf> state(p, lane, head, quarter);
  if (stateful) state.ask(p);
  const Records record(p, lane, head);
  held.ask(record, quarter);
  unsigned short old[3];
#pragma unroll
  for (uint32_t j = 0; j < 3; j++) old[j] = __bfloat16_as_ushort(before(p, lane, j, c)[channel]);
  const float alog = __ldg(p.alog + head), dt = __ldg(p.dt + head), norm = __ldg(p.norm + quarter * 32 + state.own);
  if (record.count) {
    copies_wait();
    __syncthreads();
    if (stateful) {
      state.open();
      held.fold(p, record, &state);
      if (lane.record) state.put(p);  // long before the kernel ends, which waits for it
    }
  }
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
  if (stateful && !record.count) state.open();
#pragma unroll
  for (int j = 0; j < 3; j++) convolved.past[j] = late(old[j]);
#pragma unroll 1
  for (uint32_t first = lane.first, end = lane.first + lane.rows; first < end; first += kAtOnce) {
    const uint32_t n = min(kAtOnce, end - first), row = first + min(warp, n - 1);
    if (first > lane.first) __syncthreads();  // the rows before are no longer looked at
    const bf16* line = p.x + (uint64_t)first * c + channel;
    uint32_t x[kAtOnce], z = 0, a = 0, b = 0;
#pragma unroll
    for (uint32_t r = 0; r < kAtOnce; r++) x[r] = r < n ? fresh(line + r * c) : 0;
    const uint64_t scalar = (uint64_t)(first + min(l, n - 1)) * p.heads + head;
    if (warp < kAtOnce) z = fresh(p.z + ((uint64_t)row * p.heads + head) * D + quarter * 32 + l);
    else a = fresh(p.a + scalar), b = fresh(p.b + scalar);
#pragma unroll
    for (uint32_t r = 0; r < kAtOnce; r++)  // a thread's own values, so that the next loop is a short one
      if (r < n) raw[r][t] = lo(x[r]);
#pragma unroll 2
    for (uint32_t r = 0; r < n; r++) raw[r][t] = convolved(raw[r][t]);
    __syncthreads();
    if (warp == kAtOnce) {
      const float decay = decay_of(lo(a), alog, dt), beta = gate(lo(b));
      if (l < n) {
        rules[l].decay = decay, rules[l].beta = beta;
        if (lane.record && quarter == 0) record(record.count + first + l - lane.first)[2 * D] = decay;
      }
    } else if (warp < n) {
      float q[4], k[4], v[4][3], all[3];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        q[i] = raw[warp][i * 32 + l], k[i] = raw[warp][D + i * 32 + l];
        v[i][0] = q[i] * q[i], v[i][1] = k[i] * k[i], v[i][2] = q[i] * k[i];
      }
      // Sums over the warp, the same pairs as in warp_sum: lane 8 * i has those of v[i] in the end.
#pragma unroll
      for (int o = 16, m = 2; m; o /= 2, m /= 2)
#pragma unroll
        for (int i = 0; i < m; i++)
#pragma unroll
          for (int j = 0; j < 3; j++) {
            const float keep = l & o ? v[i + m][j] : v[i][j], give = l & o ? v[i][j] : v[i + m][j];
            v[i][j] = keep + __shfl_xor_sync(~0u, give, o);
          }
#pragma unroll
      for (int j = 0; j < 3; j++) {
#pragma unroll
        for (int o = 4; o; o >>= 1) v[0][j] += __shfl_xor_sync(~0u, v[0][j], o);
        all[j] = __shfl_sync(~0u, v[0][j], 0) + __shfl_sync(~0u, v[0][j], 8) + __shfl_sync(~0u, v[0][j], 16) + __shfl_sync(~0u, v[0][j], 24);
      }
      const Rule rule(0.0f, 0.0f, all[0], all[1], all[2]);
      if (l == 0) rules[warp].query = rule.query, rules[warp].key = rule.key, rules[warp].dot = rule.dot;
      gates[warp][l] = z;
      if (lane.record && quarter == 0) {
        float* rec = record(record.count + row - lane.first);
#pragma unroll
        for (int i = 0; i < 4; i++) rec[i * 32 + l] = k[i];
      }
    }
    __syncthreads();
    if (stateful) {
#pragma unroll 1
      for (uint32_t r = 0; r < n; r++) {
        float q[8], k[8];
        *(float4*)q = *(const float4*)&raw[r][state.i0], *(float4*)(q + 4) = *(const float4*)&raw[r][state.i0 + 4];
        *(float4*)k = *(const float4*)&raw[r][D + state.i0], *(float4*)(k + 4) = *(const float4*)&raw[r][D + state.i0 + 4];
        sums[r % 2][warp][state.own] = state.along(k, q);
        state.decay(rules[r].decay);
        asm volatile("bar.sync 1, 128;" ::: "memory");  // of the warps that have the state
        const float2 s0 = sums[r % 2][0][state.own], s1 = sums[r % 2][1][state.own], s2 = sums[r % 2][2][state.own], s3 = sums[r % 2][3][state.own];
        const float2 both = rules[r](s0.x + s1.x + s2.x + s3.x, s0.y + s1.y + s2.y + s3.y, raw[r][2 * D + state.own]);
        if (warp == r % 4) {
          made[r][state.own] = both.x;
          if (lane.record) record(record.count + first + r - lane.first)[D + quarter * 32 + state.own] = both.y;
        }
        if (lane.record && first + r + 1 == end) break;  // nobody needs what follows
        state.correct(k, both.y);
      }
      if (!lane.record && first + n == end) state.put(p);
      __syncwarp();
#pragma unroll 1
      for (uint32_t r = warp; r < n; r += 4) end_row(p, first + r, head, quarter, state.own, made[r][state.own], norm, gates[r][state.own]);
    }
  }
}

// Of delta_one's blocks on an SM: the compiler spills in as few registers on sm_120a.
#if __CUDA_ARCH__ >= 1200
static constexpr int kOneBlocks = 4;
#else
static constexpr int kOneBlocks = 5;
#endif

// The two forms of a matrix have code of their own.
NINFER_KERNEL(delta_one, DeltaParams, kQuarter, kOneBlocks) {
  __shared__ QuartersShared shared;
  if (p.half_state) quarters<true, true>(p, shared);
  else quarters<false, true>(p, shared);
}
NINFER_KERNEL(delta_halves, DeltaParams, kQuarter, 4) {
  __shared__ HalvesShared shared;
  if (p.half_state) halves<true>(p, shared);
  else halves<false>(p, shared);
}
static_assert(sizeof(HeadsShared) <= 54 << 10);  // DeltaHeadsShared
NINFER_KERNEL(delta_heads, DeltaParams, kQuarter, 4) {  // three are on an SM, in so few registers that the next kernel finds room beside two
  HeadsShared& shared = *(HeadsShared*)dynamic;
  if (p.half_state) whole_heads<true>(p, shared);
  else whole_heads<false>(p, shared);
}
NINFER_KERNEL(delta_quarters, DeltaParams, kQuarter, 1) {
  __shared__ QuartersShared shared;
  if (p.half_state) quarters<true, false>(p, shared);
  else quarters<false, false>(p, shared);
}
NINFER_KERNEL(delta_rows, DeltaParams, kRows, 2) {
  __shared__ RowsShared shared;
  if (p.half_state) rows<true>(p, shared);
  else rows<false>(p, shared);
}
