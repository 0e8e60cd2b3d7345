// Products with stored matrices, one warp a weight row, in every format.
//
//   gemv         up to six matrices that share up to eight rows of x; epilogues silu(scale*v) and 2*sigmoid(scale*v).
//   hc_up        mix[r][c] = mean over streams of sigmoid(Up[s*h+c]·low[r]) * n[r][s*h+c], BF16.
//   expert_up    hidden = silu(gate·x) * (up·x) of the chosen experts and the shared one, BF16. Grid: tiles, choice, row.
//   expert_down  out = sum over choices of weight * down·hidden, plus sigmoid(gate) * shared. Grid: tiles, row.
//   pick         largest BF16-rounded logit, lowest id on ties. Grid: row.
#include "common.cuh"

NINFER_KERNEL(gemv, GemvParams, 256, 1) {
  pdl();
  uint32_t n = blockIdx.x * 8 + threadIdx.x / 32, i = 0;
  while (i < p.parts && n >= p.part[i].m.rows) n -= p.part[i++].m.rows;
  if (i == p.parts) return;
  const Part& q = p.part[i];
  float acc[8];
  if (p.r == 1) {
    if (p.x_f32) dot<true, 1>(q.m, n, p.x, p.x_ld, 1, acc);
    else dot<false, 1>(q.m, n, p.x, p.x_ld, 1, acc);
  } else {
    if (p.x_f32) dot<true, 8>(q.m, n, p.x, p.x_ld, p.r, acc);
    else dot<false, 8>(q.m, n, p.x, p.x_ld, p.r, acc);
  }
  if (threadIdx.x % 32) return;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    if (j >= p.r) break;
    float v = acc[j];
    if (q.flags & PART_SILU) v = silu(v * q.scale);
    if (q.flags & PART_SIGMOID2) v = 2.0f * sigmoid(v * q.scale);
    const uint64_t at = (uint64_t)j * q.out_ld + n;
    if (q.flags & PART_F32) ((float*)q.out)[at] = v;
    else ((bf16*)q.out)[at] = to_bf16(v);
  }
}

NINFER_KERNEL(hc_up, HcUpParams, 256, 1) {
  pdl();
  const uint32_t c = blockIdx.x * 8 + threadIdx.x / 32;
  if (c >= p.h) return;
  float sum[8];
#pragma unroll
  for (int j = 0; j < 8; j++) sum[j] = 0.0f;
#pragma unroll 1
  for (uint32_t s = 0; s < p.s; s++) {
    float acc[8];
    dot<true, 8>(p.up, s * p.h + c, p.low, p.l, p.r, acc);
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (j < p.r) sum[j] += sigmoid(acc[j]) * p.n[((uint64_t)j * p.s + s) * p.h + c];
  }
  if (threadIdx.x % 32) return;
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (j < p.r) p.out[(uint64_t)j * p.h + c] = to_bf16(sum[j] / p.s);
}

NINFER_KERNEL(expert_up, ExpertUpParams, 256, 1) {
  pdl();
  const uint32_t n = blockIdx.x * 8 + threadIdx.x / 32, choice = blockIdx.y, r = blockIdx.z;
  const bool shared = choice == p.topk;
  const uint32_t inter = shared ? p.shared_inter : p.inter;
  if (n >= inter) return;
  const bf16* x = p.x + (uint64_t)r * p.h;
  float gu[2];
  const uint32_t e = shared ? 0 : p.chosen[r * p.topk + choice];
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    float v;
    if (shared) dot<false, 1>(i ? p.up : p.gate, n, x, p.h, 1, &v);
    else dot<false, 1>(p.bank, (e * 2 + i) * p.inter + n, x, p.h, 1, &v);
    if (i) gu[1] = v;
    else gu[0] = v;
  }
  if (threadIdx.x % 32) return;
  bf16* out = shared ? p.shared + (uint64_t)r * p.shared_inter : p.hidden + ((uint64_t)r * p.topk + choice) * p.inter;
  out[n] = to_bf16(silu(gu[0]) * gu[1]);
}

NINFER_KERNEL(expert_down, ExpertDownParams, 256, 1) {
  pdl();
  const uint32_t c = blockIdx.x * 8 + threadIdx.x / 32, r = blockIdx.y;
  if (c >= p.h) return;
  float sum = 0.0f;
#pragma unroll 1
  for (uint32_t i = 0; i < p.topk; i++) {
    float v;
    dot<false, 1>(p.bank, p.chosen[r * p.topk + i] * p.h + c, p.hidden + ((uint64_t)r * p.topk + i) * p.inter, p.inter, 1, &v);
    sum += p.weight[r * p.topk + i] * v;
  }
  float v;
  dot<false, 1>(p.down, c, p.shared + (uint64_t)r * p.shared_inter, p.shared_inter, 1, &v);
  sum += sigmoid(p.gate[r]) * v;
  if (threadIdx.x % 32 == 0) p.out[(uint64_t)r * p.h + c] = to_bf16(sum);
}

NINFER_KERNEL(pick, PickParams, 1024, 1) {
  __shared__ uint64_t best[32];
  pdl();
  const float* line = p.logits + (uint64_t)blockIdx.x * p.rows;
  uint64_t top = 0;
  for (uint32_t i = threadIdx.x; i < p.rows; i += 1024) {
    const uint32_t id = p.map ? p.map[i] : i;
    if (id >= p.ids) continue;
    const uint64_t key = (uint64_t)float_key(round_bf16(line[i])) << 32 | (uint32_t)~id;
    top = max(top, key);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) top = max(top, (uint64_t)__shfl_xor_sync(~0u, (unsigned long long)top, o));
  if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = top;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < 32; i++) top = max(top, best[i]);
  p.out[blockIdx.x] = top ? ~(uint32_t)top : ~0u;
}
