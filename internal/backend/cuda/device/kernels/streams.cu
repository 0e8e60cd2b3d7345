// Residual streams: embedding, injection and norm, the drafter's stem, carried rows, the n-gram embedding's gate.
//
//   begin      copies the control block from the host. One block; kernels after the next may read the block before their wait.
//   begin_chained  as begin for a pass of a chain, whose rows have the picks of the pass before for tokens. list: the control block in the host's
//              memory, width of 16 bytes; out: its place here; n rows; x: picks, 32 bits each. One block.
//   embed      every stream of a row is its token's embedding, or its media vector. Grid: 256 values, row.
//   inject     x = bf16(x + inject*y), then n = x/rms(x) * (1 + w) a stream, FP32. Grid: stream, row.
//   stem_norm  e = norm(embedding), hidden = norm over all carried streams, BF16. Grid: 2, row.
//   stem_add   x[s] = hidden[s] + e.
//   carry      streams to the carried rows, or to the chain buffer. Grid: row.
//   table      waits for the host to have gathered the rows of the n-gram table and decodes them to FP32. Grid: some rows.
//   ple_join   ple_gate after a pending injection, for streams of up to 3,072 values, a multiple of four; where lanes have a row each, which is not
//              recorded, the convolution too, so that only streams and windows are written. Grid: stream, row.
//   ple_gate   gate of key and stream, v = gate*value (FP32), vn = its norm (BF16). Grid: stream, row.
//   gather     copies the listed rows. Grid: list.
//   report     picks and the launch's number to the host, which waits for the number. One block.
//   report_best  the same where the picks are still keys of the streaming kernels' blocks. One block.
//   words      random words: made-up weights and images. Grid: any.
//   sizes      sizes and offsets of every parameter struct, compared with Go's at start.
#include "common.cuh"
#include "sizes_gen.cuh"

// The host's words as they are now: it writes them anew for every launch.
DEVICE uint4 host16(const void* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// Copies n times 16 bytes of the host's.
DEVICE void from_host(const void* host, void* device, uint32_t n) {
  for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) ((uint4*)device)[i] = host16((const uint4*)host + i);
}

NINFER_KERNEL(begin, BeginParams, 256, 1) {
  pdl_trigger();  // the next kernel waits before it reads the block, and lets none begin before that
  pdl_wait();
  from_host(p.host, p.device, p.n);
}

// What is brought into L2: kernels.Ahead of Go's.
struct Bring {
  const uint8_t* at[2];
  uint32_t bytes, pitch, first, n;
};

// begin of a launch that the host has not asked for yet. Behind the control block before it waits for the next number, or to be told that it does not come;
// then it leaves the block as it is. Meanwhile the other blocks ask for what x describes. A host that is stopped says neither: after a while the kernel writes
// the number to the third word, looks once more, since either it sees what the host has written or the host sees that, and says in the fourth word whether
// the launch has come (the number) or not (its complement).
NINFER_KERNEL(begin_armed, GatherParams, 256, 1) {
  bool comes = false;
  pdl_trigger();  // as in begin
  pdl_wait();
  if (blockIdx.x > 0) {
    const Bring& b = *(const Bring*)p.x;
    if (threadIdx.x == 0)
      for (uint32_t i = blockIdx.x - 1; i < b.n; i += gridDim.x - 1) {
        const bool second = i >= b.first;
        const uint8_t* at = b.at[second] + (uint64_t)(second ? i - b.first : i) * b.pitch;
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(b.bytes) : "memory");
      }
    return;
  }
  if (threadIdx.x == 0) {
    const uint32_t number = __ldcg((const uint32_t*)p.out) + 1;
    uint64_t begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    uint64_t v;  // the number of a launch, behind which the host has written all else, and of one that does not come
    for (;;) {
      asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p.list) : "memory");
      if ((uint32_t)v == number || v >> 32 == number) break;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (now - begun < 250000000ull) continue;
      volatile uint32_t* words = (volatile uint32_t*)p.list;
      words[2] = number;
      __threadfence_system();
      asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p.list) : "memory");
      words[3] = (uint32_t)v == number ? number : ~number;
      break;
    }
    comes = (uint32_t)v == number && v >> 32 != number;
  }
  if (__syncthreads_or(comes)) from_host(p.list, p.out, p.width);
}

NINFER_KERNEL(begin_chained, GatherParams, 256, 1) {
  pdl_trigger();  // as in begin
  pdl_wait();
  from_host(p.list, p.out, p.width);
  __syncthreads();
  Row* rows = (Row*)((uint8_t*)p.out + 16);
  for (uint32_t r = threadIdx.x; r < p.n; r += 256) rows[r].token = __ldcg((const uint32_t*)p.x + r);
}

NINFER_KERNEL(embed, EmbedParams, 256, 1) {
  pdl();
  const Row row = p.rows[blockIdx.y];
  const uint32_t c = blockIdx.x * 256 + threadIdx.x;
  if (c >= p.h) return;
  bf16* x = p.x + (uint64_t)blockIdx.y * p.s * p.h + c;
  const float v = row.media ? p.media[(uint64_t)(row.media - 1) * p.h + c] : value(p.w, row.token, c);
  for (uint32_t s = 0; s < p.s; s++) x[s * p.h] = to_bf16(v);
}

NINFER_KERNEL(inject, InjectParams, 256, 1) {
  __shared__ float shared[33];
  pdl();
  const uint32_t s = blockIdx.x, r = blockIdx.y;
  const uint64_t at = ((uint64_t)r * p.s + s) * p.h;
  const float f = p.y ? p.inject[r * p.s + s] : 0.0f;
  float square = 0.0f;
  for (uint32_t c = threadIdx.x; c < p.h; c += 256) {
    float v = from_bf16(p.x[at + c]);
    if (p.y) v = round_bf16(fmaf(f, from_bf16(p.y[(uint64_t)r * p.h + c]), v));
    if (p.copy) p.copy[at + c] = v;
    else if (p.y) p.x[at + c] = to_bf16(v);
    square += v * v;
  }
  if (!p.norm) return;
  const float scale = 1.0f / sqrtf(block_sum(square, shared) / p.h + p.eps);
  for (uint32_t c = threadIdx.x; c < p.h; c += 256) p.n[at + c] = from_bf16(p.x[at + c]) * scale * (1.0f + p.norm[s * p.h + c]);
}

NINFER_KERNEL(stem_norm, StemParams, 256, 1) {
  __shared__ float shared[33];
  pdl();
  const uint32_t r = blockIdx.y;
  const Row row = p.rows[r];
  const Lane lane = p.lanes[row.lane];
  const uint32_t width = p.s * p.h;
  if (blockIdx.x == 0) {
    float square = 0.0f;
    for (uint32_t c = threadIdx.x; c < p.h; c += 256) {
      const float v = value(p.w, row.token, c);
      square += v * v;
    }
    const float scale = 1.0f / sqrtf(block_sum(square, shared) / p.h + p.eps);
    for (uint32_t c = threadIdx.x; c < p.h; c += 256)
      p.e[(uint64_t)r * p.h + c] = to_bf16(value(p.w, row.token, c) * scale * (1.0f + p.norm_embed[c]));
    return;
  }
  const bf16* in = lane.chain ? p.chain + (uint64_t)row.slot * width : p.carried + ((uint64_t)row.slot * p.carry + lane.carry + row.index) * width;
  float square = 0.0f;
  for (uint32_t c = threadIdx.x; c < width; c += 256) {
    const float v = from_bf16(in[c]);
    square += v * v;
  }
  const float scale = 1.0f / sqrtf(block_sum(square, shared) / width + p.eps);
  for (uint32_t c = threadIdx.x; c < width; c += 256)
    p.hidden[(uint64_t)r * width + c] = to_bf16(from_bf16(in[c]) * scale * (1.0f + p.norm_hidden[c]));
}

NINFER_KERNEL(stem_add, StemAddParams, 256, 1) {
  pdl();
  const uint32_t i = blockIdx.x * 256 + threadIdx.x, width = p.s * p.h;
  if (i >= p.r * width) return;
  p.x[i] = to_bf16(from_bf16(p.hidden[i]) + from_bf16(p.e[i / width * p.h + i % p.h]));
}

NINFER_KERNEL(carry, CarryParams, 256, 1) {
  pdl();
  const Row row = p.rows[blockIdx.x];
  const Lane lane = p.lanes[row.lane];
  if (p.draft && row.index + 1 != lane.rows) return;
  bf16* out = p.draft ? p.chain + (uint64_t)row.slot * p.width : p.carried + ((uint64_t)row.slot * p.carry + lane.carry + row.index) * p.width;
  for (uint32_t c = threadIdx.x; c < p.width; c += 256) out[c] = p.x[(uint64_t)blockIdx.x * p.width + c];
}

NINFER_KERNEL(table, TableParams, 256, 1) {
  // No kernel of the step writes what the host does, and the number was there two kernels ago: the wait is for the results only.
  if (threadIdx.x == 0) {
    const uint32_t number = __ldcg(p.number);
    uint64_t start = 0, now;
    for (;;) {
      uint32_t ready;
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(ready) : "l"(p.ready) : "memory");
      if (ready == number) break;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      if (!start) start = now;
      if (now - start > 20000000000ull) __trap();  // the host has died, or hangs
    }
  }
  __syncthreads();
  // Whole rows, 16 bytes a request: the host's memory is far away. The host writes it anew for every launch.
  extern __shared__ __align__(16) uint8_t raw[];
  const uint32_t first = blockIdx.x * p.rows, rows = min(p.rows, p.n - first), bytes = rows * p.row_bytes;
  const uint8_t* from = p.raw + (uint64_t)first * p.row_bytes;
  for (uint32_t i = threadIdx.x * 16; i < bytes; i += 256 * 16) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (i + 16 <= bytes) asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from + i) : "memory");
    else
      for (uint32_t j = i; j < bytes; j++) ((uint8_t*)&v)[j - i] = *(const volatile uint8_t*)(from + j);
    *(uint4*)(raw + i) = v;
  }
  pdl();
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < rows * p.width; i += 256) {
    const uint8_t* row = raw + i / p.width * p.row_bytes;
    const uint32_t k = i % p.width;
    float v;
    if (p.halves) {
      const bf16 h = p.format == FMT_BF16 ? *(const bf16*)(row + 2 * k) : to_bf16(e4m3(row[k]));
      ((bf16*)p.out)[(uint64_t)first * p.width + i] = h;
      continue;
    }
    if (p.format == FMT_BF16) v = __uint_as_float((uint32_t)*(const uint16_t*)(row + 2 * k) << 16);
    else if (p.format == FMT_FP8) v = e4m3(row[k]) * p.multiplier;
    else {
      const uint8_t* s = row + p.width / 2 + k / 16 * 2;
      v = (float)((int)(row[k / 2] >> (k % 2 * 4) & 15) - 8) * __half2float(__ushort_as_half((unsigned short)(s[0] | s[1] << 8)));
    }
    p.out[(uint64_t)first * p.width + i] = v;
  }
}

NINFER_KERNEL(ple_gate, PleGateParams, 256, 1) {
  __shared__ float shared[33];
  pdl();
  const uint32_t s = blockIdx.x, r = blockIdx.y;
  const uint64_t at = ((uint64_t)r * p.s + s) * p.h;
  float kk = 0.0f, qq = 0.0f, kq = 0.0f, vv = 0.0f;
  for (uint32_t c = threadIdx.x; c < p.h; c += 256) {
    const float k = from_bf16(p.key[at + c]), q = from_bf16(p.x[at + c]), v = from_bf16(p.value[(uint64_t)r * p.h + c]);
    kk += k * k;
    qq += q * q;
    vv += v * v;
    kq += k * (1.0f + p.norm_key[s * p.h + c]) * (q * (1.0f + p.norm_query[s * p.h + c]));
  }
  kk = block_sum(kk, shared);
  qq = block_sum(qq, shared);
  kq = block_sum(kq, shared);
  vv = block_sum(vv, shared);
  const float h = p.h;
  const float g = kq / sqrtf(kk / h + p.eps) / sqrtf(qq / h + p.eps) / sqrtf(h);
  float root = sqrtf(fmaxf(fabsf(g), 1e-6f));
  root = g < 0.0f ? -root : g == 0.0f ? 0.0f : root;
  const float gate = sigmoid(root);
  const float scale = 1.0f / sqrtf(gate * gate * vv / h + p.eps);
  for (uint32_t c = threadIdx.x; c < p.h; c += 256) {
    const float v = gate * from_bf16(p.value[(uint64_t)r * p.h + c]);
    p.v[at + c] = v;
    p.vn[at + c] = to_bf16(v * scale * (1.0f + p.norm_conv[s * p.h + c]));
  }
}

static constexpr int kWide = 768;  // threads, with four neighbouring values each

DEVICE uint2 load8(const void* p) { return __ldcg((const uint2*)p); }
DEVICE float4 load16(const float* p) { return __ldg((const float4*)p); }
DEVICE void unpack(uint2 q, float (&v)[4]) { v[0] = lo(q.x), v[1] = hi(q.x), v[2] = lo(q.y), v[3] = hi(q.y); }
DEVICE uint2 pack(const float (&v)[4]) {
  const __nv_bfloat162 a = __floats2bfloat162_rn(v[0], v[1]), b = __floats2bfloat162_rn(v[2], v[3]);
  return make_uint2(*(const uint32_t*)&a, *(const uint32_t*)&b);
}

NINFER_KERNEL(ple_join, PleJoinParams, kWide, 1) {
  constexpr uint32_t depth = 9, taps = 4;
  __shared__ float sums[4][kWide / 32];
  const PleGateParams& g = p.gate;
  const uint32_t s = blockIdx.x, r = blockIdx.y, t = threadIdx.x, lane = t % 32, c = 4 * t, of_row = s * g.h + c, width = g.s * g.h;
  const bool live = c < g.h, convolves = live && p.conv.lanes;
  const uint64_t at = (uint64_t)r * width + of_row;
  // The window and its records are a step old, weights are constant: all are here before the wait, as they are stored.
  float4 raw[3] = {}, tap[taps] = {};
  uint2 old[depth] = {};
  bf16* window = nullptr;
  if (live) raw[0] = load16(g.norm_key + of_row), raw[1] = load16(g.norm_query + of_row), raw[2] = load16(g.norm_conv + of_row);
  if (convolves) {
    const Lane own = p.conv.lanes[r];
    window = p.conv.window + (uint64_t)own.slot * depth * width + of_row;
    const bf16* records = p.conv.records + (uint64_t)own.slot * p.conv.verify * width + of_row;
#pragma unroll
    for (uint32_t i = 0; i < depth; i++) {
      const uint32_t j = own.fold + i;
      old[i] = load8(j < depth ? window + (uint64_t)j * width : records + (uint64_t)(j - depth) * width);
    }
#pragma unroll
    for (uint32_t i = 0; i < taps; i++) tap[i] = load16(p.conv.w + (uint64_t)i * width + of_row);
  }
  pdl();
  float k[4] = {}, q[4] = {}, v[4] = {}, sum[4] = {};  // sums: kk, qq, vv, kq
  if (live) {
    const uint2 in_q = load8(g.x + at);
    if (p.key) {
      const float4 a = __ldcg((const float4*)(p.key + at)), b = __ldcg((const float4*)(p.value + (uint64_t)r * g.h + c));
      k[0] = a.x, k[1] = a.y, k[2] = a.z, k[3] = a.w, v[0] = b.x, v[1] = b.y, v[2] = b.z, v[3] = b.w;
    } else {
      const uint2 in_k = load8(g.key + at), in_v = load8(g.value + (uint64_t)r * g.h + c);
      unpack(in_k, k), unpack(in_v, v);
    }
    if (g.y) {
      const uint2 in_y = load8(g.y + (uint64_t)r * g.h + c);
      const float f = __ldcg(g.inject + r * g.s + s);
      float y[4];
      unpack(in_y, y), unpack(in_q, q);
#pragma unroll
      for (int i = 0; i < 4; i++) q[i] = round_bf16(fmaf(f, y[i], q[i]));
    } else {
      unpack(in_q, q);
    }
    if (p.key)
#pragma unroll
      for (int i = 0; i < 4; i++) k[i] = round_bf16(k[i] * p.factor), v[i] = round_bf16(v[i] * p.factor);
  }
  const float nk[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w}, nq[4] = {raw[1].x, raw[1].y, raw[1].z, raw[1].w}, nc[4] = {raw[2].x, raw[2].y, raw[2].z, raw[2].w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    sum[0] += k[i] * k[i], sum[1] += q[i] * q[i], sum[2] += v[i] * v[i], sum[3] += k[i] * (1.0f + nk[i]) * (q[i] * (1.0f + nq[i]));
#pragma unroll
  for (int j = 0; j < 4; j++) {
    sum[j] = warp_sum(sum[j]);
    if (lane == 0) sums[j][t / 32] = sum[j];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 4; j++) sum[j] = warp_sum(lane < kWide / 32 ? sums[j][lane] : 0.0f);
  const float h = g.h;
  const float score = sum[3] / sqrtf(sum[0] / h + g.eps) / sqrtf(sum[1] / h + g.eps) / sqrtf(h);
  float root = sqrtf(fmaxf(fabsf(score), 1e-6f));
  root = score < 0.0f ? -root : score == 0.0f ? 0.0f : root;
  const float gate = sigmoid(root), scale = 1.0f / sqrtf(gate * gate * sum[2] / h + g.eps);
  if (!live) return;
  float normed[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] *= gate, normed[i] = v[i] * scale * (1.0f + nc[i]);
  const uint2 fresh = pack(normed);
  if (!convolves) {
    if (g.y) *(uint2*)(g.x + at) = pack(q);
    *(float4*)(g.v + at) = make_float4(v[0], v[1], v[2], v[3]);
    *(uint2*)(g.vn + at) = fresh;
    return;
  }
  float out[4], x[4], w[4], all[4] = {};
#pragma unroll
  for (uint32_t i = 0; i < taps; i++) {
    unpack(i + 1 < taps ? old[3 * i] : fresh, x);
    w[0] = tap[i].x, w[1] = tap[i].y, w[2] = tap[i].z, w[3] = tap[i].w;
#pragma unroll
    for (int j = 0; j < 4; j++) all[j] = fmaf(w[j], x[j], all[j]);
  }
#pragma unroll
  for (int j = 0; j < 4; j++) out[j] = q[j] + v[j] + silu(all[j]);
  *(uint2*)(g.x + at) = pack(out);
#pragma unroll
  for (uint32_t i = 0; i < depth; i++) *(uint2*)(window + (uint64_t)i * width) = i + 1 < depth ? old[i + 1] : fresh;
}

NINFER_KERNEL(gather, GatherParams, 256, 1) {
  pdl();
  const uint64_t from = (uint64_t)p.list[blockIdx.x] * p.width, to = (uint64_t)blockIdx.x * p.width;
  for (uint32_t c = threadIdx.x; c < p.width; c += 256) p.out[to + c] = p.x[from + c];
}

DEVICE uint64_t mixed(uint64_t i, uint32_t seed) {
  uint64_t z = i * 0x9e3779b97f4a7c15ull + seed * 0xd1b54a32d192ed03ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

NINFER_KERNEL(words, WordsParams, 256, 1) {
  pdl();
  const uint64_t stride = (uint64_t)gridDim.x * 256;
  if (p.kind == 12) {
    for (uint64_t i = (uint64_t)blockIdx.x * 256 + threadIdx.x; i < p.bytes / 4; i += stride) ((uint32_t*)p.dst)[i] = i / 3;
    return;
  }
  for (uint64_t i = (uint64_t)blockIdx.x * 256 + threadIdx.x; i < (p.bytes + 7) / 8; i += stride) {
    uint64_t w = 0;
    if (p.kind == 8) {
      w = (mixed(i, p.seed) & p.mask) | p.fixed;
    } else {
      const uint32_t n = 8 / p.kind;
      for (uint32_t j = 0; j < n; j++) {  // the sum of four uniform values is close to normal; its variance is 4/12
        const uint64_t h = mixed(i * n + j, p.seed);
        const float u = ((h & 0xffff) + (h >> 16 & 0xffff) + (h >> 32 & 0xffff) + (h >> 48)) * (1.0f / 65536.0f) - 2.0f;
        const float v = fmaf(u, p.deviation * 1.7320508f, p.mean);
        if (p.kind == 4) w |= (uint64_t)__float_as_uint(v) << (32 * j);
        else w |= (uint64_t)__bfloat16_as_ushort(to_bf16(v)) << (16 * j);
      }
    }
    if (8 * i + 8 <= p.bytes && ((uint64_t)p.dst & 7) == 0) ((uint64_t*)p.dst)[i] = w;
    else
      for (uint32_t k = 0; k < 8 && 8 * i + k < p.bytes; k++) ((uint8_t*)p.dst)[8 * i + k] = w >> (8 * k);
  }
}

// Picks go to the host as words of eight bytes, the launch's number behind each: no fence lies between the two.
DEVICE void tell(uint32_t* host, uint32_t i, uint32_t pick, uint32_t number) {
  *((volatile unsigned long long*)host + i) = (unsigned long long)number << 32 | pick;
}

NINFER_KERNEL(report, ReportParams, 32, 1) {
  pdl();
  const uint32_t number = __ldcg(p.number);
  for (uint32_t i = threadIdx.x; i < p.n; i += 32) tell(p.host, i, __ldcg(p.picked + i), number);
  if (p.n || threadIdx.x) return;
  __threadfence_system();  // others have written what the host then looks at
  *(volatile uint32_t*)p.done = number;
}

NINFER_KERNEL(report_best, ReportBestParams, 256, 1) {
  pdl();
  const uint32_t r = threadIdx.x / 32, lane = threadIdx.x % 32, number = __ldcg(p.number);
  if (r >= p.r) return;
  uint64_t best = 0;
#pragma unroll 5
  for (uint32_t i = lane; i < p.n; i += 32) best = max(best, (uint64_t)__ldcg((const unsigned long long*)p.best + (uint64_t)r * p.n + i));
#pragma unroll
  for (int o = 16; o; o >>= 1) best = max(best, (uint64_t)__shfl_xor_sync(~0u, (unsigned long long)best, o));
  if (lane) return;
  const uint32_t row = ~(uint32_t)best, id = best == 0 ? ~0u : p.ids ? p.ids[row] : row;
  tell(p.host, r, id, number);
  p.picked[r] = id;
}

NINFER_KERNEL(sizes, SizesParams, 32, 1) {
  pdl();
  for (uint32_t i = threadIdx.x; i < p.n; i += 32) p.out[i] = i < kSizeCount ? kSizes[i] : ~0u;
}
