// The gated delta rule of decoding and verifying.
//
// A lane's matrices are brought forward by the recorded rows of its last verify pass before anything else (fold), and a verify pass records its rows instead of
// writing them. With no rows delta folds only.
//
//   delta           behind the convolution, with the norm; S in shared memory. Grid: head, lane.
//   delta_quarters  convolution of four taps and the rule for heads of 128, a quarter of a head's columns a block, S in registers and there before the wait; the
//                   norm's factor is left to the next product (project.cu). Rows one after the other. Grid: head, lane, quarter.
//   delta_rows      the same for a lane of several rows: what does not depend on the row before is done for eight at once. Grid: head, lane, quarter.
//   delta_turns     the same for many lanes of a row each. Grid: head, lanes at a time, quarter.
//
// The last three make the same sums: a row has the same bits in each.
#include "common.cuh"

extern __shared__ __align__(16) float dynamic[];

static constexpr int kDelta = 512;

// A lane's record of a head: i counts from the first to be brought forward, behind which a pass leaves its own.
DEVICE float* record_of(const DeltaParams& p, const Lane& lane, uint32_t head, uint32_t i) {
  return p.records + (((uint64_t)lane.slot * p.ring + (lane.from + i) % p.ring) * p.heads + head) * (1 + 2 * p.dim);
}

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
  auto record = [&](uint32_t i) { return record_of(p, lane, head, i); };
  for (uint32_t i = t; i < dim * dim; i += kDelta) S[i] = p.half_state ? from_bf16(((const bf16*)p.state)[state + i]) : ((const float*)p.state)[state + i];
  __syncthreads();
  for (uint32_t f = 0; f < lane.fold; f++) {
    const float* rec = record(f);
    if (on)
      for (uint32_t i = i0; i < i1; i++) S[i * dim + j] = fmaf(rec[1 + i], rec[1 + dim + j], __fmul_rn(S[i * dim + j], rec[0]));
    __syncthreads();
  }
  if (lane.fold && p.half_state) {  // as if it had been kept and read again
    for (uint32_t i = t; i < dim * dim; i += kDelta) S[i] = round_bf16(S[i]);
    __syncthreads();
  }
  if (lane.fold && lane.record)
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
    if (lane.record) {
      float* rec = record(lane.fold + row - lane.first);
      if (t == 0) rec[0] = decay;
      if (t < dim) rec[1 + t] = k[t], rec[1 + dim + t] = d[t];
    }
    __syncthreads();
    const float o = t < dim ? sums[t] + sums[dim + t] + sums[2 * dim + t] + sums[3 * dim + t] : 0.0f;
    const float scale = 1.0f / sqrtf(block_sum(o * o, shared) / dim + p.eps);
    if (t < dim) {
      const uint64_t at = ((uint64_t)row * p.heads + head) * dim + t;
      p.out[at] = round_bf16(o * p.norm[t] * sigmoid(from_bf16(p.z[at]))) * scale;
    }
  }
  if (!lane.record) {
    __syncthreads();
    for (uint32_t i = t; i < dim * dim; i += kDelta) put(i, S[i]);
  }
}

static constexpr int kQuarter = 128;    // threads of a block that has a quarter of a head's columns
static constexpr int kRows = 288;       // of delta_rows: one for each channel of a quarter
static constexpr uint32_t kAtOnce = 8;  // rows of a lane that delta_rows makes ready together
static constexpr uint32_t kHeld = 8;    // records that shared memory has room for

DEVICE void copy4(float* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// The bits of a BF16 value, from L2. What is loaded before the wait is converted behind it: nvcc converts right behind the load, so that a warp would stand
// there instead of waiting.
DEVICE uint32_t fresh(const bf16* from) { return __ldcg((const unsigned short*)from); }
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

// A lane's records of a head, which are a ring; i counts from the first to be brought forward.
struct Ring {
  float* at;
  uint32_t from, size, ld;
  DEVICE Ring(const DeltaParams& p, const Lane& lane, uint32_t head) : from(lane.from % p.ring), size(p.ring), ld(p.heads * (1 + 2 * p.dim)) {
    at = p.records + (uint64_t)lane.slot * p.ring * ld + head * (1 + 2 * p.dim);
  }
  DEVICE float* operator()(uint32_t i) const { return at + (uint64_t)(from + i < size ? from + i : from + i - size) * ld; }
};

// What a thread of 128 has of a quarter's state: eight keys from i0 on, four columns from 4 * c4 on. Of the four columns it finishes one, own.
struct Piece {
  static constexpr uint32_t D = 128;
  uint32_t c4, g, i0, own, quarter;
  uint64_t at;  // in the states
  float S[8][4];

  DEVICE Piece(const DeltaParams& p, const Lane& lane, uint32_t head, uint32_t quarter) : quarter(quarter) {
    c4 = threadIdx.x % 8, g = threadIdx.x % 32 / 8, i0 = threadIdx.x / 8 * 8, own = c4 * 4 + g;
    at = ((uint64_t)(lane.slot * p.heads + head) * D + i0) * D + quarter * 32 + c4 * 4;
  }
  DEVICE void ask(const DeltaParams& p) {
    if (p.half_state) {
      const uint2* from = (const uint2*)((const bf16*)p.state + at);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const uint2 v = from[i * (D / 4)];
        S[i][0] = lo(v.x), S[i][1] = hi(v.x), S[i][2] = lo(v.y), S[i][3] = hi(v.y);
      }
    } else {
      const float4* from = (const float4*)((const float*)p.state + at);
#pragma unroll
      for (int i = 0; i < 8; i++) *(float4*)S[i] = from[i * (D / 4)];
    }
  }
  // __stwb, because nvcc makes four stores of one of 16 bytes where both forms of a state are stored in a branch each.
  DEVICE void put(const DeltaParams& p) const {
    if (p.half_state) {
      uint2* to = (uint2*)((bf16*)p.state + at);
#pragma unroll
      for (int i = 0; i < 8; i++) __stwb(to + i * (D / 4), make_uint2(pair(S[i][0], S[i][1]), pair(S[i][2], S[i][3])));
    } else {
      float4* to = (float4*)((float*)p.state + at);
#pragma unroll
      for (int i = 0; i < 8; i++) __stwb(to + i * (D / 4), make_float4(S[i][0], S[i][1], S[i][2], S[i][3]));
    }
  }
  // Brings it forward by records, of which the first lie in held.
  DEVICE void fold(const DeltaParams& p, const Ring& record, uint32_t records, const float (*held)[D + 36]) {
#pragma unroll 1
    for (uint32_t f = 0; f < records; f++) {
      float k[8], d[4], decay;
      if (f < kHeld) {
        *(float4*)k = *(const float4*)&held[f][i0], *(float4*)(k + 4) = *(const float4*)&held[f][i0 + 4], *(float4*)d = *(const float4*)&held[f][D + c4 * 4];
        decay = held[f][D + 32];
      } else {
        const float* rec = record(f);
        decay = rec[0];
#pragma unroll
        for (int i = 0; i < 8; i++) k[i] = rec[1 + i0 + i];
#pragma unroll
        for (int j = 0; j < 4; j++) d[j] = rec[1 + D + quarter * 32 + c4 * 4 + j];
      }
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) S[i][j] = fmaf(k[i], d[j], __fmul_rn(S[i][j], decay));
    }
    if (p.half_state)  // as if it had been kept and read again
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) S[i][j] = round_bf16(S[i][j]);
  }
  // Sums of the columns times k and times q over the keys of a warp: the lanes that share four columns add up in pairs and have one column each in the end.
  DEVICE float2 along(const float* k, const float* q) const {
    float u[4] = {0, 0, 0, 0}, w[4] = {0, 0, 0, 0}, a[2], b[2];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) u[j] = fmaf(S[i][j], k[i], u[j]), w[j] = fmaf(S[i][j], q[i], w[j]);
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

// Asks for the records of a quarter: of each key, correction, decay.
DEVICE void ask_records(float (*held)[128 + 36], const Ring& record, uint32_t records, uint32_t quarter) {
  for (uint32_t f = 0; f < min(records, kHeld); f++) {
    const float* rec = record(f);
    for (uint32_t i = threadIdx.x; i <= 160; i += blockDim.x) copy4(&held[f][i], rec + (i < 128 ? 1 + i : i < 160 ? 1 + quarter * 32 + i : 0));
  }
}

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
    return silu(fmaf(tap[3], now, sum));
  }
};

// Ends a row of a quarter in one warp, a column a lane: o is that of the lane's own column. The squares add up in fours of columns, then in pairs.
DEVICE void end_row(const DeltaParams& p, uint32_t row, uint32_t head, uint32_t quarter, uint32_t own, float o, float norm, uint32_t z) {
  float square = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float v = __shfl_sync(~0u, o, threadIdx.x % 8 + 8 * j);
    square = fmaf(v, v, square);
  }
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  square += __shfl_xor_sync(~0u, square, 4);
  const uint64_t at = (uint64_t)row * p.heads + head;
  if (threadIdx.x % 32 == 0) p.squares[at * 4 + quarter] = square;
  p.gated[at * 128 + quarter * 32 + own] = to_bf16(o * norm * sigmoid(lo(z)));
}

NINFER_KERNEL(delta_quarters, DeltaParams, kQuarter, 1) {
  constexpr uint32_t D = 128;
  __shared__ __align__(16) float raw[2 * D + 32], parts[4][4], held[kHeld][D + 36];  // query, key, value; a warp's sums; records
  __shared__ __align__(16) float2 sums[4][32];
  const Lane lane = lane_of(p.lanes + blockIdx.y);
  if (p.trigger == 0) pdl_trigger();
  const uint32_t head = blockIdx.x, quarter = blockIdx.z, key_head = head * p.key_heads / p.heads, c = (2 * p.key_heads + p.heads) * D;
  const uint32_t t = threadIdx.x, warp = t / 32, l = t % 32;
  // The convolution's channels of this thread: of query, key, and for the first warp of value.
  const uint32_t channel[3] = {key_head * D + t, (p.key_heads + key_head) * D + t, (2 * p.key_heads + head) * D + quarter * 32 + l};
  Channel of[3];
#pragma unroll
  for (uint32_t j = 0; j < 4; j++)
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (i < 2 || t < 32) of[i].tap[j] = __ldg(p.conv + j * c + channel[i]);
  const float alog = __ldg(p.alog + head), dt = __ldg(p.dt + head);
  // State and records are a step old, the rest constant: all asked for before the wait, and before anything is done.
  Piece state(p, lane, head, quarter);
  const float norm = __ldg(p.norm + quarter * 32 + state.own);
  state.ask(p);
  const Ring record(p, lane, head);
  ask_records(held, record, lane.fold, quarter);
  unsigned short old[3][3];
#pragma unroll
  for (uint32_t j = 0; j < 3; j++) {
    const bf16* line = before(p, lane, j, c);
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (i < 2 || t < 32) old[i][j] = __bfloat16_as_ushort(line[channel[i]]);
  }
  if (lane.fold) {
    copies_wait();
    __syncthreads();
    state.fold(p, record, lane.fold, held);
    if (lane.record) state.put(p);  // long before the kernel ends, which waits for it
  }
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
#pragma unroll
  for (int i = 0; i < 3; i++)
#pragma unroll
    for (int j = 0; j < 3; j++) of[i].past[j] = lo(old[i][j]);
#pragma unroll 1
  for (uint32_t row = lane.first, end = lane.first + lane.rows; row < end; row++) {
    if (row > lane.first) __syncthreads();  // the row before is no longer looked at
    const bf16* line = p.x + (uint64_t)row * c;
    uint32_t x[3], z = 0;
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (i < 2 || t < 32) x[i] = fresh(line + channel[i]);
    const uint64_t at = (uint64_t)row * p.heads + head;
    const uint32_t a = fresh(p.a + at), b = fresh(p.b + at);
    if (warp == 0) z = fresh(p.z + at * D + quarter * 32 + state.own);
    const float qv = of[0](lo(x[0])), kv = of[1](lo(x[1]));
    raw[t] = qv, raw[D + t] = kv;
    if (t < 32) raw[2 * D + t] = of[2](lo(x[2]));
    const float qq = warp_sum(qv * qv), kk = warp_sum(kv * kv), qk = warp_sum(qv * kv);
    if (l == 0) *(float4*)parts[warp] = make_float4(qq, kk, qk, 0.0f);
    const float decay = expf(-expf(alog) * softplus(lo(a) + dt)), beta = sigmoid(lo(b));
    __syncthreads();
    if (p.trigger == 2 && row == lane.first) pdl_trigger();
    float part[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) *(float4*)part[i] = *(const float4*)parts[i];
    // Odd lanes work out the keys' factor, even ones the queries'.
    const float sum = l % 2 ? part[0][1] + part[1][1] + part[2][1] + part[3][1] : part[0][0] + part[1][0] + part[2][0] + part[3][0];
    const float factor = 1.0f / sqrtf(sum + 1e-6f), ks = __shfl_sync(~0u, factor, 1), qs = __shfl_sync(~0u, factor, 0) / sqrtf((float)D);
    const float dot = (part[0][2] + part[1][2] + part[2][2] + part[3][2]) * qs * ks;
    float q[8], k[8];
    *(float4*)q = *(const float4*)&raw[state.i0], *(float4*)(q + 4) = *(const float4*)&raw[state.i0 + 4];
    *(float4*)k = *(const float4*)&raw[D + state.i0], *(float4*)(k + 4) = *(const float4*)&raw[D + state.i0 + 4];
#pragma unroll
    for (int i = 0; i < 8; i++) k[i] *= ks, q[i] *= qs;
    sums[warp][state.own] = state.along(k, q);
    state.decay(decay);
    __syncthreads();
    const float2 s0 = sums[0][state.own], s1 = sums[1][state.own], s2 = sums[2][state.own], s3 = sums[3][state.own];
    const float d = __fmul_rn(beta, fmaf(-decay, s0.x + s1.x + s2.x + s3.x, raw[2 * D + state.own]));
    const float o = fmaf(decay, s0.y + s1.y + s2.y + s3.y, __fmul_rn(dot, d));
    if (!lane.record || row + 1 < end) state.correct(k, d);
    if (!lane.record && row + 1 == end) state.put(p);
    if (warp == 0) end_row(p, row, head, quarter, state.own, o, norm, z);
    if (lane.record) {
      float* rec = record(lane.fold + row - lane.first);
      if (warp == 1) rec[1 + D + quarter * 32 + state.own] = d;
      if (quarter == 0) {
        rec[1 + t] = kv * ks;
        if (t == 0) rec[0] = decay;
      }
    }
  }
}

// In 288 threads: each convolves a channel of all rows, eight warps make a row ready each, the ninth has the rows' decays, and four have the state.
NINFER_KERNEL(delta_rows, DeltaParams, kRows, 2) {
  constexpr uint32_t D = 128;
  __shared__ __align__(16) float raw[kAtOnce][kRows];  // of each row: query, key, value; then query and key of norm 1
  __shared__ __align__(16) float scalars[kAtOnce][4], made[kAtOnce][32], held[kHeld][D + 36];
  __shared__ __align__(16) float2 sums[2][4][32];
  __shared__ unsigned short gates[kAtOnce][32];
  const Lane lane = lane_of(p.lanes + blockIdx.y);
  if (p.trigger == 0) pdl_trigger();
  const uint32_t head = blockIdx.x, quarter = blockIdx.z, key_head = head * p.key_heads / p.heads, c = (2 * p.key_heads + p.heads) * D;
  const uint32_t t = threadIdx.x, warp = t / 32, l = t % 32;
  const bool stateful = t < kQuarter;
  const uint32_t channel = t < 2 * D ? (t < D ? key_head : p.key_heads + key_head - 1) * D + t : (2 * p.key_heads + head) * D + quarter * 32 + l;
  Channel convolved;
#pragma unroll
  for (uint32_t j = 0; j < 4; j++) convolved.tap[j] = __ldg(p.conv + j * c + channel);
  // State and records are a step old, the rest constant: all asked for before the wait, and before anything is done.
  Piece state(p, lane, head, quarter);
  if (stateful) state.ask(p);
  const Ring record(p, lane, head);
  ask_records(held, record, lane.fold, quarter);
  unsigned short old[3];
#pragma unroll
  for (uint32_t j = 0; j < 3; j++) old[j] = __bfloat16_as_ushort(before(p, lane, j, c)[channel]);
  const float alog = __ldg(p.alog + head), dt = __ldg(p.dt + head), norm = __ldg(p.norm + quarter * 32 + state.own);
  if (lane.fold) {
    copies_wait();
    __syncthreads();
    if (stateful) {
      state.fold(p, record, lane.fold, held);
      if (lane.record) state.put(p);  // long before the kernel ends, which waits for it
    }
  }
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
#pragma unroll
  for (int j = 0; j < 3; j++) convolved.past[j] = lo(old[j]);
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
    if (p.trigger == 2 && first == lane.first) pdl_trigger();
    if (warp == kAtOnce) {
      const float decay = expf(-expf(alog) * softplus(lo(a) + dt)), beta = sigmoid(lo(b));
      if (l < n) {
        scalars[l][0] = decay, scalars[l][1] = beta;
        if (lane.record && quarter == 0) record(lane.fold + first + l - lane.first)[0] = decay;
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
      // Odd lanes work out the keys' factor, even ones the queries'.
      const float factor = 1.0f / sqrtf((l % 2 ? all[1] : all[0]) + 1e-6f), ks = __shfl_sync(~0u, factor, 1), qs = __shfl_sync(~0u, factor, 0) / sqrtf((float)D);
#pragma unroll
      for (int i = 0; i < 4; i++) raw[warp][i * 32 + l] = q[i] * qs, raw[warp][D + i * 32 + l] = k[i] * ks;
      if (l == 0) scalars[warp][2] = all[2] * qs * ks;
      gates[warp][l] = z;
      if (lane.record && quarter == 0) {
        float* rec = record(lane.fold + row - lane.first);
#pragma unroll
        for (int i = 0; i < 4; i++) rec[1 + i * 32 + l] = k[i] * ks;
      }
    }
    __syncthreads();
    if (stateful) {
#pragma unroll 1
      for (uint32_t r = 0; r < n; r++) {
        float q[8], k[8];
        const float4 s = *(const float4*)scalars[r];  // decay, beta, query times key
        *(float4*)q = *(const float4*)&raw[r][state.i0], *(float4*)(q + 4) = *(const float4*)&raw[r][state.i0 + 4];
        *(float4*)k = *(const float4*)&raw[r][D + state.i0], *(float4*)(k + 4) = *(const float4*)&raw[r][D + state.i0 + 4];
        const float value = raw[r][2 * D + state.own];
        sums[r % 2][warp][state.own] = state.along(k, q);
        state.decay(s.x);
        asm volatile("bar.sync 1, 128;" ::: "memory");  // of the warps that have the state
        const float2 s0 = sums[r % 2][0][state.own], s1 = sums[r % 2][1][state.own], s2 = sums[r % 2][2][state.own], s3 = sums[r % 2][3][state.own];
        const float d = __fmul_rn(s.y, fmaf(-s.x, s0.x + s1.x + s2.x + s3.x, value));
        if (warp == r % 4) {
          made[r][state.own] = fmaf(s.x, s0.y + s1.y + s2.y + s3.y, __fmul_rn(s.z, d));
          if (lane.record) record(lane.fold + first + r - lane.first)[1 + D + quarter * 32 + state.own] = d;
        }
        if (lane.record && first + r + 1 == end) break;  // nobody needs what follows
        state.correct(k, d);
      }
      if (!lane.record && first + n == end) state.put(p);
      __syncwarp();
#pragma unroll 1
      for (uint32_t r = warp; r < n; r += 4) end_row(p, first + r, head, quarter, state.own, made[r][state.own], norm, gates[r][state.own]);
    }
  }
}

// Of delta_turns: corrections and outputs of four columns from the sums of four warps, and the sum of the outputs' squares.
DEVICE float corrected(const float (*sums)[8][8], uint32_t c4, const float* value, float beta, float decay, float dot, float* d, float* o) {
  float square = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float u = sums[0][c4][j] + sums[1][c4][j] + sums[2][c4][j] + sums[3][c4][j];
    const float w = sums[0][c4][4 + j] + sums[1][c4][4 + j] + sums[2][c4][4 + j] + sums[3][c4][4 + j];
    d[j] = __fmul_rn(beta, fmaf(-decay, u, value[j]));
    o[j] = fmaf(decay, w, __fmul_rn(dot, d[j]));
    square = fmaf(o[j], o[j], square);
  }
  return square;
}
DEVICE uint2 gate4(const float* o, const float* norm, uint2 z2) {
  const float z[4] = {lo(z2.x), hi(z2.x), lo(z2.y), hi(z2.y)};
  uint32_t a[2];
#pragma unroll
  for (int j = 0; j < 2; j++)
    a[j] = (uint32_t)__bfloat16_as_ushort(to_bf16(o[2 * j] * norm[2 * j] * sigmoid(z[2 * j]))) |
           (uint32_t)__bfloat16_as_ushort(to_bf16(o[2 * j + 1] * norm[2 * j + 1] * sigmoid(z[2 * j + 1]))) << 16;
  return make_uint2(a[0], a[1]);
}

// The same for lanes of one row each that are not recorded, more of them than fit on the GPU at once. A block keeps head and quarter and goes
// through every turn-th lane; the next lane's state and inputs are on their way while it works.
NINFER_KERNEL(delta_turns, DeltaParams, kQuarter, 3) {
  constexpr uint32_t D = 128, W = 288;  // channels of a quarter: of query, key and value
  __shared__ __align__(16) uint8_t kept[D * 32 * 4];
  __shared__ __align__(16) bf16 inputs[2][4 * W + 32];  // three rows of the window, the new one; z
  __shared__ float raw[3][D], parts[4][3], sums[4][8][8], held[2][1 + D + 32];  // the lanes' first records
  const uint32_t head = blockIdx.x, quarter = blockIdx.z, group = p.heads / p.key_heads, c = (2 * p.key_heads + p.heads) * D;
  const uint32_t t = threadIdx.x, warp = t / 32, c4 = t % 8, i0 = t / 8 * 8, j0 = quarter * 32 + c4 * 4;
  const uint32_t element = p.half_state ? 2 : 4;
  const uint32_t slots = (uint32_t)__cvta_generic_to_shared(kept), ins = (uint32_t)__cvta_generic_to_shared(inputs);
  auto state_of = [&](const Lane& lane) { return (uint8_t*)p.state + (((uint64_t)lane.slot * p.heads + head) * D * D + i0 * D + j0) * element; };
  auto ask_state = [&](const Lane& lane, uint32_t buffer) {
    const uint8_t* from = state_of(lane);
    for (uint32_t i = t; i < 1 + D + 32 && lane.fold; i += kQuarter)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(&held[buffer][i])),
                   "l"(record_of(p, lane, head, 0) + i + (i > D ? quarter * 32 : 0))
                   : "memory");
#pragma unroll
    for (int i = 0; i < 8; i++) {  // a thread's own values, which nobody else reads
      const uint32_t to = slots + (i * kQuarter + t) * 16;
      if (element == 4) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from + i * D * 4) : "memory");
      else asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from + i * D * 2) : "memory");
    }
  };
  auto ask_inputs = [&](const Lane& lane, uint32_t buffer, bool old, bool now) {
    for (uint32_t i = t; i < 4 * 36 + 4; i += kQuarter) {
      const uint32_t tap = i / 36, x = i % 36, at = lane.fold + tap;
      const bf16* from;
      if (tap == 4) {
        from = p.z + ((uint64_t)lane.first * p.heads + head) * D + quarter * 32 + x * 8;
      } else {
        const uint32_t channel = x < 16 ? head / group * D + x * 8 : x < 32 ? (p.key_heads + head / group) * D + (x - 16) * 8 : (2 * p.key_heads + head) * D + quarter * 32 + (x - 32) * 8;
        from = (tap == 3 ? p.x + (uint64_t)lane.first * c : at < 3 ? p.window + ((uint64_t)lane.slot * 3 + at) * c : p.inputs + ((uint64_t)lane.slot * p.verify + at - 3) * c) + channel;
      }
      if (tap < 3 ? old : now) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(ins + (buffer * (4 * W + 32) + i * 8) * 2), "l"(from) : "memory");
    }
  };
  uint32_t n = blockIdx.y, buffer = 0;
  Lane lane = p.lanes[n];
  if (p.trigger == 0) pdl_trigger();
  ask_state(lane, 0);
  ask_inputs(lane, 0, true, false);
  float tap[3][4];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const uint32_t channel = i == 0 ? head / group * D + t : i == 1 ? (p.key_heads + head / group) * D + t : (2 * p.key_heads + head) * D + quarter * 32 + t % 32;
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) tap[i][j] = p.conv[j * c + channel];
  }
  const float rate = -expf(p.alog[head]), dt = p.dt[head];
  float norm[4];
#pragma unroll
  for (int j = 0; j < 4; j++) norm[j] = p.norm[j0 + j];
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
  ask_inputs(lane, 0, false, true);
  bf16 a = p.a[(uint64_t)lane.first * p.heads + head], b = p.b[(uint64_t)lane.first * p.heads + head];
  for (;;) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float S[8][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (element == 4) {
        const float4 v = *(const float4*)(kept + (i * kQuarter + t) * 16);
        S[i][0] = v.x, S[i][1] = v.y, S[i][2] = v.z, S[i][3] = v.w;
      } else {
        const uint2 v = *(const uint2*)(kept + (i * kQuarter + t) * 16);
        S[i][0] = lo(v.x), S[i][1] = hi(v.x), S[i][2] = lo(v.y), S[i][3] = hi(v.y);
      }
    }
    const float decay = expf(rate * softplus(from_bf16(a) + dt)), beta = sigmoid(from_bf16(b));
    const bf16* in = inputs[buffer];
    float convolved[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
      if (i == 2 && t >= 32) continue;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 3; j++) sum = fmaf(tap[i][j], from_bf16(in[j * W + i * D + t]), sum);
      convolved[i] = silu(fmaf(tap[i][3], from_bf16(in[3 * W + i * D + t]), sum));
    }
    const float qv = convolved[0], kv = convolved[1];
    const uint2 z2 = *(const uint2*)(in + 4 * W + c4 * 4);
    raw[0][t] = qv, raw[1][t] = kv;
    if (t < 32) raw[2][t] = convolved[2];
    const float qq = warp_sum(qv * qv), kk = warp_sum(kv * kv), qk = warp_sum(qv * kv);
    if (t % 32 == 0) parts[warp][0] = qq, parts[warp][1] = kk, parts[warp][2] = qk;
    for (uint32_t f = 0; f < lane.fold; f++) {
      const float* rec = f == 0 ? held[buffer] : record_of(p, lane, head, f);
      const uint32_t column = f == 0 ? c4 * 4 : j0;
      const float past = rec[0];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float k = rec[1 + i0 + i];
#pragma unroll
        for (int j = 0; j < 4; j++) S[i][j] = fmaf(k, rec[1 + D + column + j], __fmul_rn(S[i][j], past));
      }
    }
    if (lane.fold && p.half_state)  // as if it had been kept and read again
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) S[i][j] = round_bf16(S[i][j]);
    uint8_t* to = state_of(lane);
    auto put = [&]() {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (element == 2) {
          __nv_bfloat162 v[2] = {__floats2bfloat162_rn(S[i][0], S[i][1]), __floats2bfloat162_rn(S[i][2], S[i][3])};
          *(uint2*)(to + i * D * 2) = *(const uint2*)v;
        } else {
          *(float4*)(to + i * D * 4) = make_float4(S[i][0], S[i][1], S[i][2], S[i][3]);
        }
      }
    };
    __syncthreads();
    const uint64_t out = ((uint64_t)lane.first * p.heads + head) * D + j0, squares = ((uint64_t)lane.first * p.heads + head) * 4 + quarter;
    const bool more = n + gridDim.y < p.count;
    if (more) {
      n += gridDim.y, buffer ^= 1;
      lane = p.lanes[n];
      ask_state(lane, buffer);
      ask_inputs(lane, buffer, true, true);
      a = p.a[(uint64_t)lane.first * p.heads + head], b = p.b[(uint64_t)lane.first * p.heads + head];
    }
    const float qs = 1.0f / sqrtf(parts[0][0] + parts[1][0] + parts[2][0] + parts[3][0] + 1e-6f) / sqrtf((float)D);
    const float ks = 1.0f / sqrtf(parts[0][1] + parts[1][1] + parts[2][1] + parts[3][1] + 1e-6f);
    const float dot = (parts[0][2] + parts[1][2] + parts[2][2] + parts[3][2]) * qs * ks;
    float k[8], u[4] = {0, 0, 0, 0}, w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      k[i] = raw[1][i0 + i] * ks;
      const float q = raw[0][i0 + i] * qs;
#pragma unroll
      for (int j = 0; j < 4; j++) u[j] = fmaf(S[i][j], k[i], u[j]), w[j] = fmaf(S[i][j], q, w[j]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u[j] += __shfl_xor_sync(~0u, u[j], 8), w[j] += __shfl_xor_sync(~0u, w[j], 8);
      u[j] += __shfl_xor_sync(~0u, u[j], 16), w[j] += __shfl_xor_sync(~0u, w[j], 16);
    }
    if (t % 32 < 8)
#pragma unroll
      for (int j = 0; j < 4; j++) sums[warp][c4][j] = u[j], sums[warp][c4][4 + j] = w[j];
    __syncthreads();
    float d[4], o[4];
    float square = corrected(sums, c4, raw[2] + c4 * 4, beta, decay, dot, d, o);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) S[i][j] = fmaf(k[i], d[j], __fmul_rn(S[i][j], decay));
    put();
    if (t < 8) {
      square += __shfl_xor_sync(0xffu, square, 1);
      square += __shfl_xor_sync(0xffu, square, 2);
      square += __shfl_xor_sync(0xffu, square, 4);
      if (t == 0) p.squares[squares] = square;
      *(uint2*)(p.gated + out) = gate4(o, norm, z2);
    }
    if (!more) return;
  }
}
