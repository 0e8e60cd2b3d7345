// Sequence blocks: convolution windows, the delta rule, attention with its indexer, routing.
//
// A lane's fixed states (windows, delta matrices) are brought forward by the recorded rows of its last verify pass before anything
// else (fold), and a verify pass records its rows instead of writing the states. With no rows these kernels fold only.
//
//   conv       depthwise causal convolution, thread a channel. Grid: channels/256, lane.
//   delta      gated delta rule and gated norm, block a value head; S in shared memory. Grid: head, lane.
//   delta_quarters  convolution of four taps and the same for heads of 128, a quarter of a head's columns a block, S in registers and there before the wait; the norm's
//              factor is left to the next product (project.cu). Grid: head, lane, quarter.
//   delta_turns  the same for many lanes of a row each. Grid: head, lanes at a time, quarter.
//   score      index scores of complete blocks. Grid: any, row.
//   attend     part of a row's attention. Grid: head, row, split. merge: all of it, times the output gate. Grid: head, row.
//   route      best experts, ties to the lower, and their weights; one warp. Grid: row.
#include "common.cuh"

extern __shared__ __align__(16) float dynamic[];

NINFER_KERNEL(conv, ConvParams, 256, 1) {
  const uint32_t c = blockIdx.x * 256 + threadIdx.x;
  const Lane lane = p.lanes[blockIdx.y];
  const uint32_t depth = (p.taps - 1) * p.dilation, fold = lane.fold;
  bf16* window = p.window + (uint64_t)lane.slot * depth * p.c + c;
  constexpr uint32_t kShort = 9;
  if (fold == 0 && lane.rows == 1 && !lane.record && depth <= kShort) {
    // One row, as decoding has it: the window is a step old and the weights are constant, so both are here before the wait.
    float v[kShort], w[kShort], last = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kShort; i++) {
      v[i] = w[i] = 0.0f;
      if (c < p.c && i < depth) {
        v[i] = from_bf16(window[(uint64_t)i * p.c]);
        if (i % p.dilation == 0) w[i] = p.w[(uint64_t)(i / p.dilation) * p.c + c];
      }
    }
    if (c < p.c) last = p.w[(uint64_t)(p.taps - 1) * p.c + c];
    pdl_wait();
    if (c >= p.c) return;
    const uint64_t at = (uint64_t)lane.first * p.c + c;
    const bf16 x = p.x[at];
    pdl_trigger();
    float sum = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kShort; i++) sum = fmaf(w[i], v[i], sum);
    sum = fmaf(last, from_bf16(x), sum);
    if (p.out) p.out[at] = silu(sum);
    if (p.streams) p.streams[at] = to_bf16(from_bf16(p.streams[at]) + p.v[at] + silu(sum));
#pragma unroll
    for (uint32_t i = 0; i < kShort; i++)
      if (i < depth) window[(uint64_t)i * p.c] = i + 1 < depth ? to_bf16(v[i + 1 < kShort ? i + 1 : i]) : x;
    return;
  }
  pdl();
  if (c >= p.c) return;
  bf16* records = p.records + (uint64_t)lane.slot * p.verify * p.c + c;
  const bf16* x = p.x + (uint64_t)lane.first * p.c + c;
  // Window, recorded rows and new rows are one sequence.
  auto get = [&](uint32_t i) {
    return i < depth ? window[(uint64_t)i * p.c] : i < depth + fold ? records[(uint64_t)(i - depth) * p.c] : x[(uint64_t)(i - depth - fold) * p.c];
  };
  for (uint32_t t = 0; t < lane.rows; t++) {
    float sum = 0.0f;
    for (uint32_t j = 0; j < p.taps; j++) sum = fmaf(p.w[(uint64_t)j * p.c + c], from_bf16(get(fold + t + j * p.dilation)), sum);
    const uint64_t at = (uint64_t)(lane.first + t) * p.c + c;
    if (p.out) p.out[at] = silu(sum);
    if (p.streams) p.streams[at] = to_bf16(from_bf16(p.streams[at]) + p.v[at] + silu(sum));
  }
  const uint32_t shift = fold + (lane.record ? 0 : lane.rows);
  if (shift)
    for (uint32_t i = 0; i < depth; i++) window[(uint64_t)i * p.c] = get(shift + i);
  if (lane.record)
    for (uint32_t t = 0; t < lane.rows; t++) records[(uint64_t)t * p.c] = x[(uint64_t)t * p.c];
}

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

static constexpr int kQuarter = 128;

// What the kernels of a quarter share, so that a lane has the same bits in each: corrections and outputs of four columns from the sums of
// four warps, and the sum of the outputs' squares.
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

NINFER_KERNEL(delta_quarters, DeltaParams, kQuarter, 1) {
  constexpr uint32_t D = 128;
  __shared__ float raw[3][D], parts[4][3], sums[4][8][8];
  const uint32_t head = blockIdx.x, quarter = blockIdx.z, group = p.heads / p.key_heads, c = (2 * p.key_heads + p.heads) * D;
  const uint32_t t = threadIdx.x, warp = t / 32, c4 = t % 8, i0 = t / 8 * 8, j0 = quarter * 32 + c4 * 4;  // keys i0..i0+7, columns j0..j0+3
  const Lane lane = p.lanes[blockIdx.y];
  const uint64_t state = ((uint64_t)lane.slot * p.heads + head) * D * D + i0 * D + j0;
  if (p.trigger == 0) pdl_trigger();
  // State and records are a step old, the rest constant: here before the wait.
  float S[8][4];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (p.half_state) {
      const uint2 v = *(const uint2*)((const bf16*)p.state + state + i * D);
      S[i][0] = lo(v.x), S[i][1] = hi(v.x), S[i][2] = lo(v.y), S[i][3] = hi(v.y);
    } else {
      const float4 v = *(const float4*)((const float*)p.state + state + i * D);
      S[i][0] = v.x, S[i][1] = v.y, S[i][2] = v.z, S[i][3] = v.w;
    }
  }
  auto put = [&]() {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (p.half_state) {
        __nv_bfloat162 v[2] = {__floats2bfloat162_rn(S[i][0], S[i][1]), __floats2bfloat162_rn(S[i][2], S[i][3])};
        *(uint2*)((bf16*)p.state + state + i * D) = *(const uint2*)v;
      } else {
        *(float4*)((float*)p.state + state + i * D) = make_float4(S[i][0], S[i][1], S[i][2], S[i][3]);
      }
    }
  };
  // Records of a verify pass, what a quarter needs of them, all of them at once.
  constexpr uint32_t kHeld = 8, kPart = 1 + D + 32;
  __shared__ float held[kHeld][kPart];
  if (lane.fold) {
    for (uint32_t i = t; i < min(lane.fold, kHeld) * kPart; i += kQuarter) {
      const uint32_t f = i / kPart, at = i % kPart;
      held[f][at] = record_of(p, lane, head, f)[at + (at > D ? quarter * 32 : 0)];
    }
    __syncthreads();
  }
  for (uint32_t f = 0; f < lane.fold; f++) {
    const float* rec = f < kHeld ? held[f] : record_of(p, lane, head, f);
    const uint32_t column = f < kHeld ? c4 * 4 : j0;
    const float decay = rec[0];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float k = rec[1 + i0 + i];
#pragma unroll
      for (int j = 0; j < 4; j++) S[i][j] = fmaf(k, rec[1 + D + column + j], __fmul_rn(S[i][j], decay));
    }
  }
  if (lane.fold && p.half_state)  // as if it had been kept and read again
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) S[i][j] = round_bf16(S[i][j]);
  if (lane.fold && lane.record) put();  // long before the kernel ends, which waits for it
  // The convolution's channels of this thread: of query, key, and for the first warp of value.
  const uint32_t channel[3] = {head / group * D + t, (p.key_heads + head / group) * D + t, (2 * p.key_heads + head) * D + quarter * 32 + t % 32};
  float past[3][3], tap[3][4];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    if (i == 2 && t >= 32) continue;
#pragma unroll
    for (uint32_t j = 0; j < 3; j++) {
      const uint32_t at = lane.fold + j;  // window and records are one sequence
      past[i][j] = from_bf16(at < 3 ? p.window[((uint64_t)lane.slot * 3 + at) * c + channel[i]]
                                    : p.inputs[((uint64_t)lane.slot * p.verify + at - 3) * c + channel[i]]);
    }
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) tap[i][j] = p.conv[j * c + channel[i]];
  }
  const float rate = -expf(p.alog[head]), dt = p.dt[head];
  float norm[4];
#pragma unroll
  for (int j = 0; j < 4; j++) norm[j] = p.norm[j0 + j];
  pdl_wait();
  if (p.trigger == 1) pdl_trigger();
  bf16 next[3], next_a, next_b;  // of the row to come, asked for while the one before is worked on
  uint2 next_z;
  auto ask = [&](uint32_t row) {
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (i < 2 || t < 32) next[i] = __ushort_as_bfloat16(__ldcg((const unsigned short*)p.x + (uint64_t)row * c + channel[i]));
    next_z = __ldcg((const uint2*)(p.z + ((uint64_t)row * p.heads + head) * D + j0));
    next_a = p.a[(uint64_t)row * p.heads + head], next_b = p.b[(uint64_t)row * p.heads + head];
  };
  if (lane.rows) ask(lane.first);
  for (uint32_t row = lane.first; row < lane.first + lane.rows; row++) {
    float convolved[3];
#pragma unroll
    for (int i = 0; i < 3; i++) {
      if (i == 2 && t >= 32) continue;
      const float now = from_bf16(next[i]);
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 3; j++) sum = fmaf(tap[i][j], past[i][j], sum);
      convolved[i] = silu(fmaf(tap[i][3], now, sum));
      past[i][0] = past[i][1], past[i][1] = past[i][2], past[i][2] = now;
    }
    const float qv = convolved[0], kv = convolved[1];
    const uint64_t out = ((uint64_t)row * p.heads + head) * D + j0;
    const uint2 z2 = next_z;
    const float decay = expf(rate * softplus(from_bf16(next_a) + dt));
    const float beta = sigmoid(from_bf16(next_b));
    if (row + 1 < lane.first + lane.rows) ask(row + 1);
    raw[0][t] = qv, raw[1][t] = kv;
    if (t < 32) raw[2][t] = convolved[2];
    const float qq = warp_sum(qv * qv), kk = warp_sum(kv * kv), qk = warp_sum(qv * kv);
    if (t % 32 == 0) parts[warp][0] = qq, parts[warp][1] = kk, parts[warp][2] = qk;
    __syncthreads();
    if (p.trigger == 2 && row == lane.first) pdl_trigger();
    const float qs = 1.0f / sqrtf(parts[0][0] + parts[1][0] + parts[2][0] + parts[3][0] + 1e-6f) / sqrtf((float)D);
    const float ks = 1.0f / sqrtf(parts[0][1] + parts[1][1] + parts[2][1] + parts[3][1] + 1e-6f);
    const float dot = (parts[0][2] + parts[1][2] + parts[2][2] + parts[3][2]) * qs * ks;
    float k[8], u[4] = {0, 0, 0, 0}, w[4] = {0, 0, 0, 0};
    const float value[4] = {raw[2][c4 * 4], raw[2][c4 * 4 + 1], raw[2][c4 * 4 + 2], raw[2][c4 * 4 + 3]};  // now: a faster warp's next row follows the second barrier
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
    float* rec = record_of(p, lane, head, lane.fold + row - lane.first);
    if (lane.record && quarter == 0) {
      rec[1 + t] = kv * ks;
      if (t == 0) rec[0] = decay;
    }
    __syncthreads();
    float d[4], o[4];
    float square = corrected(sums, c4, value, beta, decay, dot, d, o);
    if (!lane.record || row + 1 < lane.first + lane.rows)
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) S[i][j] = fmaf(k[i], d[j], __fmul_rn(S[i][j], decay));
    if (t < 8) {
      square += __shfl_xor_sync(0xffu, square, 1);
      square += __shfl_xor_sync(0xffu, square, 2);
      square += __shfl_xor_sync(0xffu, square, 4);
      if (t == 0) p.squares[((uint64_t)row * p.heads + head) * 4 + quarter] = square;
      *(uint2*)(p.gated + out) = gate4(o, norm, z2);
      if (lane.record)
#pragma unroll
        for (int j = 0; j < 4; j++) rec[1 + D + j0 + j] = d[j];
    }
  }
  if (!lane.record) put();
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

NINFER_KERNEL(score, ScoreParams, 256, 1) {
  pdl();
  const uint32_t r = blockIdx.y, t = threadIdx.x % 32;
  const Row row = p.rows[r];
  const uint32_t n = (row.at + 1) / p.ratio;
  if (n <= p.most) return;
  const uint32_t* pages = p.pages + (uint64_t)row.slot * p.pages_ld;
  const Blocks blocks(p.ratio);
  const bf16* q = p.iq + (uint64_t)r * p.ih * p.id;
  const float scale = 1.0f / sqrtf((float)p.id);
  for (uint32_t b = blockIdx.x * 8 + threadIdx.x / 32; b < n; b += gridDim.x * 8) {
    const bf16* key = p.keys + blocks.row(pages[blocks.last(b) / kPage], b) * p.id;
    float k[8], sum = 0.0f;  // id <= 256
#pragma unroll
    for (int i = 0; i < 8; i++) k[i] = t + 32 * i < p.id ? from_bf16(key[t + 32 * i]) : 0.0f;
    for (uint32_t h = 0; h < p.ih; h++) {
      float s = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (t + 32 * i < p.id) s = fmaf(k[i], from_bf16(q[h * p.id + t + 32 * i]), s);
      sum += fmaxf(warp_sum(s), 0.0f);
    }
    if (t == 0) p.scores[(uint64_t)r * p.blocks + b] = sum * scale;
  }
}

static constexpr int kAttend = 128;

NINFER_KERNEL(attend, AttendParams, kAttend, 1) {
  __shared__ float part[kAttend / 32][258];
  pdl();
  const uint32_t head = blockIdx.x, r = blockIdx.y, split = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t hd = p.hd, kw = p.kv * hd, n = p.count[r], share = (n + p.splits - 1) / p.splits;
  const uint32_t first = min(n, split * share), end = min(n, first + share);
  const uint32_t kvh = head / (p.heads / p.kv);
  const uint32_t* list = p.list + (uint64_t)r * p.list_ld;
  const float scale = 1.0f / sqrtf((float)hd);
  const bf16* query = p.q + ((uint64_t)r * p.heads + head) * hd;
  const bool fast = hd == 256 && !p.key_scales;
  auto load = [&](const bf16* src, float* v) {  // value i of a lane is lane*8+i of 256, else lane+32*i
    if (fast) {
      const uint4 q = *(const uint4*)(src + lane * 8);
      v[0] = lo(q.x), v[1] = hi(q.x), v[2] = lo(q.y), v[3] = hi(q.y), v[4] = lo(q.z), v[5] = hi(q.z), v[6] = lo(q.w), v[7] = hi(q.w);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = lane + 32 * i < hd ? from_bf16(src[lane + 32 * i]) : 0.0f;
    }
  };
  float q[8], acc[8], most = -INFINITY, sum = 0.0f;
  load(query, q);
#pragma unroll
  for (int i = 0; i < 8; i++) acc[i] = 0.0f;
  for (uint32_t a = first + warp; a < end; a += kAttend / 32) {
    const uint64_t at = (uint64_t)list[a] * kw + kvh * hd;
    float k[8], v[8], s = 0.0f;
    if (p.key_scales) {
      const uint64_t scale = (uint64_t)list[a] * p.kv + kvh;
      const float ks = from_bf16(p.key_scales[scale]), vs = from_bf16(p.value_scales[scale]);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        k[i] = lane + 32 * i < hd ? e4m3(((const uint8_t*)p.keys)[at + lane + 32 * i]) * ks : 0.0f;
        v[i] = lane + 32 * i < hd ? e4m3(((const uint8_t*)p.values)[at + lane + 32 * i]) * vs : 0.0f;
      }
    } else {
      load((const bf16*)p.keys + at, k);
      load((const bf16*)p.values + at, v);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) s = fmaf(q[i], k[i], s);
    s = warp_sum(s) * scale;
    const float top = fmaxf(most, s), old = expf(most - top), e = expf(s - top);
    sum = sum * old + e;
#pragma unroll
    for (int i = 0; i < 8; i++) acc[i] = acc[i] * old + e * v[i];
    most = top;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t c = fast ? lane * 8 + i : lane + 32 * i;
    if (c < hd) part[warp][2 + c] = acc[i];
  }
  if (lane == 0) part[warp][0] = most, part[warp][1] = sum;
  __syncthreads();
  float top = -INFINITY;
  for (int w = 0; w < kAttend / 32; w++) top = fmaxf(top, part[w][0]);
  float* out = p.partial + (((uint64_t)r * p.heads + head) * p.splits + split) * (hd + 2);
  for (uint32_t c = threadIdx.x; c < hd + 1; c += kAttend) {
    float s = 0.0f;
    for (int w = 0; w < kAttend / 32; w++)
      if (part[w][1] > 0.0f) s += expf(part[w][0] - top) * part[w][1 + c];
    out[1 + c] = s;
  }
  if (threadIdx.x == 0) out[0] = top;
}

NINFER_KERNEL(merge, MergeParams, 256, 1) {
  pdl();
  const uint32_t head = blockIdx.x, r = blockIdx.y, c = threadIdx.x;
  if (c >= p.hd) return;
  const float* in = p.partial + ((uint64_t)r * p.heads + head) * p.splits * (p.hd + 2);
  float top = -INFINITY, sum = 0.0f, v = 0.0f;
  for (uint32_t i = 0; i < p.splits; i++) top = fmaxf(top, in[i * (p.hd + 2)]);
  for (uint32_t i = 0; i < p.splits; i++) {
    const float* part = in + i * (p.hd + 2);
    if (!(part[1] > 0.0f)) continue;
    const float e = expf(part[0] - top);
    sum += e * part[1];
    v += e * part[2 + c];
  }
  const float gate = from_bf16(p.qg[((uint64_t)r * p.heads + head) * 2 * p.hd + p.hd + c]);
  p.out[((uint64_t)r * p.heads + head) * p.hd + c] = to_bf16(v / sum * sigmoid(gate));
}

NINFER_KERNEL(route, RouteParams, 32, 1) {
  pdl();
  const uint32_t r = blockIdx.x, t = threadIdx.x;
  const float* logits = p.logits + (uint64_t)r * p.experts;
  uint32_t* chosen = p.chosen + (uint64_t)r * p.topk;
  float* weight = p.weight + (uint64_t)r * p.topk;
  float most = -INFINITY;
  for (uint32_t e = t; e < p.experts; e += 32) most = fmaxf(most, logits[e]);
#pragma unroll
  for (int o = 16; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  float all = 0.0f;
  for (uint32_t e = t; e < p.experts; e += 32) all += expf(logits[e] - most);
  all = warp_sum(all);
  if (p.forced && p.forced[(uint64_t)r * p.topk] != ~0u) {
    for (uint32_t i = t; i < p.topk; i += 32) chosen[i] = p.forced[(uint64_t)r * p.topk + i];
  } else {
    uint64_t last = ~0ull;  // the choice before: keys are distinct
    for (uint32_t i = 0; i < p.topk; i++) {
      uint64_t best = 0;
      for (uint32_t e = t; e < p.experts; e += 32) {
        const uint64_t key = (uint64_t)float_key(logits[e]) << 32 | (uint32_t)~e;
        if (key < last) best = max(best, key);
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) best = max(best, (uint64_t)__shfl_xor_sync(~0u, (unsigned long long)best, o));
      if (t == 0) chosen[i] = ~(uint32_t)best;
      last = best;
    }
  }
  __syncwarp();
  if (t) return;
  float sum = 0.0f;
  for (uint32_t i = 0; i < p.topk; i++) sum += expf(logits[chosen[i]] - most) / all;
  for (uint32_t i = 0; i < p.topk; i++) weight[i] = expf(logits[chosen[i]] - most) / all / (p.normalize ? sum : 1.0f);
}
