// Attention of many rows as attend.cu does it, on the tensor instructions of sm_90a that four warps give together: 64 rows of queries, of which a warp
// owns sixteen, so that soft-max needs no other warp; scores and weights stay in registers. BF16 keys and values.
//
//   attend_wide  as attend_rows. Other architectures have no code for it and must not be asked.
#include "common.cuh"

extern __shared__ __align__(1024) uint8_t dynamic[];

static constexpr int kWide = 128;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
static constexpr uint32_t kQueries = 64, kTokens = 64, kPart = kTokens * 128;  // bytes of 64 columns of a tile of 64 rows

struct Meta {
  uint32_t id[16], mask[16], row[16];  // block, which rows see it, where its first token is
};

// Tiles are four parts of 64 columns; a part is rows of 128 bytes, pieces of sixteen of them turned by the row.
DEVICE uint32_t place(uint32_t r, uint32_t piece) { return piece / 8 * kPart + r * 128 + (((piece ^ r) & 7) << 4); }

DEVICE uint64_t described(uint32_t at, uint32_t lead, uint32_t stride) {
  return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)(lead >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}
DEVICE void wide_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wide_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wide_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// 64 x 64 += 64 x 16 times 16 x 64, both in shared memory with k contiguous.
DEVICE void wide_scores(float (&d)[32], uint64_t a, uint64_t b, uint32_t add) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "%32, %33, p, 1, 1, 0, 0;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
        "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),
        "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(add));
}
// 64 x 256 += 64 x 16 in registers times 16 x 256 in shared memory with columns contiguous.
DEVICE void wide_values(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{.reg .pred p; setp.eq.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
      "{%128,%129,%130,%131}, %132, p, 1, 1, 1;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
        "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
        "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]),
        "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]),
        "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]),
        "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]),
        "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]),
        "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]),
        "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

NINFER_KERNEL(attend_wide, AttendParams, kWide, 2) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const uint32_t query = shared_at(dynamic), key = query + 4 * kPart, value = key + 4 * kPart;
  Meta* const meta = (Meta*)(dynamic + 12 * kPart);  // [2]
  const uint32_t tile = blockIdx.x, kvh = blockIdx.y, t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, q4 = lane % 4;
  const uint32_t group = p.heads / p.kv, first = tile * p.tile, rows = min(p.tile, p.rows - first);
  pdl();
  const uint32_t blocks = p.list ? p.count[tile] : (p.base + first + rows - 1) / 4 + 1, steps = (blocks + 15) / 16;
  const uint32_t last = p.base + first + rows - 1;  // tokens after it may never have been written
  const uint32_t* list = p.list ? p.list + (uint64_t)tile * p.list_ld : nullptr;
  auto find = [&](uint32_t step) {  // sixteen threads
    const uint32_t at = step * 16 + t;
    Meta& m = meta[step & 1];
    uint32_t id = at, mask = 0;
    if (at < blocks) {
      const uint32_t word = list ? list[at] : 0xff000000u | at;
      id = word & 0xffffffu, mask = word >> 24;
    }
    m.id[t] = id, m.mask[t] = mask;
    m.row[t] = mask ? (uint32_t)(block_row(p.pages, id) * 4) : 0;
  };
  auto fetch = [&](uint32_t step, bool values) {
    const Meta& m = meta[step & 1];
    const uint8_t* from = (const uint8_t*)(values ? p.values : p.keys) + lane * 16;
    const uint32_t to = values ? value : key;
#pragma unroll 4
    for (uint32_t i = 0; i < 16; i++) copy16(to + place(i * 4 + warp, lane), from + (((uint64_t)m.row[i] + warp) * p.kv + kvh) * 512, m.mask[i] != 0 && m.id[i] * 4 + warp <= last);
    copies_commit();
  };
  for (uint32_t i = t; i < kQueries * 32; i += kWide) {
    const uint32_t r = i / 32, row = r / group;
    const bool there = row < rows;
    copy16(query + place(r, i % 32), there ? p.q + ((uint64_t)(first + row) * p.heads + kvh * group + r % group) * 256 + i % 32 * 8 : p.q, there);
  }
  if (t < 16) find(0);
  __syncthreads();
  fetch(0, false);
  fetch(0, true);
  uint32_t bit[2], limit[2];  // of rows 16*warp + g + 8*i of queries
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t row = (warp * 16 + i * 8 + g) / group;
    bit[i] = row < rows ? 1u << row : 0, limit[i] = p.base + first + row;
  }
  float acc[128], most[2] = {-1e30f, -1e30f}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 128; i++) acc[i] = 0.0f;
  const float scale = 0.0625f * 1.4426950408889634f;
  for (uint32_t step = 0; step < steps; step++) {
    copies_wait<1>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();  // keys are there
    if (t < 16 && step + 1 < steps) find(step + 1);
    float s[32];
    wide_fence();
#pragma unroll
    for (uint32_t k = 0; k < 16; k++) wide_scores(s, described(query + k / 4 * kPart + k % 4 * 32, 16, 1024), described(key + k / 4 * kPart + k % 4 * 32, 16, 1024), k > 0);
    wide_commit();
    wide_wait();
    const Meta& now = meta[step & 1];
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const uint32_t block = n * 2 + q4 / 2, mask = now.mask[block], token = now.id[block] * 4 + q4 % 2 * 2;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const bool seen = (mask & bit[i / 2]) && token + i % 2 <= limit[i / 2];
        s[n * 4 + i] = seen ? s[n * 4 + i] : -INFINITY;
        top[i / 2] = fmaxf(top[i / 2], s[n * 4 + i]);
      }
    }
    __syncthreads();  // keys have been used, the next blocks are known
    if (step + 1 < steps) fetch(step + 1, false);
    else copies_commit();
    uint32_t w[4][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float v = fmaxf(most[i], quad_max(top[i])), old = power2((most[i] - v) * scale);
      most[i] = v;
      float e = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float e0 = power2((s[n * 4 + 2 * i] - v) * scale), e1 = power2((s[n * 4 + 2 * i + 1] - v) * scale);
        e += e0 + e1;
        w[n / 2][n % 2 * 2 + i] = pack_bf16(e0, e1);
      }
      sum[i] = sum[i] * old + e;
#pragma unroll
      for (int n = 0; n < 32; n++) acc[n * 4 + 2 * i] *= old, acc[n * 4 + 2 * i + 1] *= old;
    }
    copies_wait<1>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();  // values are there
    wide_fence();
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) wide_values(acc, w[k], described(value + k * 2048, kPart, 1024));
    wide_commit();
    wide_wait();
    __syncthreads();  // values have been used
    if (step + 1 < steps) fetch(step + 1, true);
    else copies_commit();
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float inverse = 1.0f / quad_sum(sum[i]);
    if (!bit[i]) continue;
    const uint32_t r = warp * 16 + i * 8 + g;
    const uint64_t row = first + r / group, head = kvh * group + r % group;
    const bf16* gate = p.qg + row * p.qg_ld + head * 512 + 256 + 2 * q4;
    bf16* out = p.out + row * p.out_ld + head * 256 + 2 * q4;
#pragma unroll
    for (int n = 0; n < 32; n++) {
      const uint32_t z = *(const uint32_t*)(gate + n * 8);
      *(uint32_t*)(out + n * 8) = pack_bf16(acc[n * 4 + 2 * i] * inverse * sigmoid(lo(z)), acc[n * 4 + 2 * i + 1] * inverse * sigmoid(hi(z)));
    }
  }
#endif
}
