// Attention of many rows as attend.cu does it, on the tensor instructions of sm_90a that four warps give together: twice 64 rows of queries, of which a
// warp owns sixteen, so that soft-max needs no other warp; scores and weights stay in registers. Four more warps only fetch, two tiles of 64 tokens ahead.
// Those that fetch E4M3 codes make FP16 of them: keys exactly, their scales multiply scores; values times their scales.
//
//   attend_wide      as attend_rows.
//   attend_wide_fp8  as attend_rows_fp8.
//   score_wide       as score_rows. Grid: share of the blocks, 64 rows.
//
// Other architectures have no code for them and must not be asked.
#include "wide.cuh"

extern __shared__ __align__(1024) uint8_t dynamic[];

static constexpr int kWide = 384;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
static constexpr uint32_t kQueries = 64, kTokens = 64, kPart = kTokens * 128;  // bytes of 64 columns of a tile of 64 rows

// Tiles are four parts of 64 columns; a part is rows of 128 bytes, pieces of sixteen of them turned by the row.
DEVICE uint32_t place(uint32_t r, uint32_t piece) { return piece / 8 * kPart + r * 128 + (((piece ^ r) & 7) << 4); }

// 64 x 64 += 64 x 16 times 16 x 64, both in shared memory with k contiguous; 64 x 256 += 64 x 16 in registers times 16 x 256 in shared memory with columns contiguous.
#define WIDE(NAME_S, NAME_V, TYPE) \
DEVICE void NAME_S(float (&d)[32], uint64_t a, uint64_t b, uint32_t add) { \
  asm volatile( \
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, " \
      "%32, %33, p, 1, 1, 0, 0;}\n" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), \
        "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), \
        "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) \
      : "l"(a), "l"(b), "r"(add)); \
} \
DEVICE void NAME_V(float (&d)[128], const uint32_t (&a)[4], uint64_t b) { \
  asm volatile( \
      "{.reg .pred p; setp.eq.b32 p, 0, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, " \
      "{%128,%129,%130,%131}, %132, p, 1, 1, 1;}\n" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), \
        "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), \
        "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), \
        "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), \
        "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), \
        "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), \
        "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), \
        "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), \
        "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127]) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
}
WIDE(wide_scores, wide_values, "bf16")
WIDE(half_scores, half_values, "f16")

// Values in FP16 are held in units of a power of two: the one in the largest of their scales so far, over 2^kRoom, so that codes times scales stay below
// 65,504. Bits are lost by values a million times smaller than the largest before them. Powers are exponents of FP32 where they stand, at least kLeast.
static constexpr uint32_t kRoom = 6u << 23, kLeast = 16u << 23, kOne = 127u << 23;

template <bool F8>
DEVICE void attend_for(const AttendParams& p) {
  __shared__ __align__(8) uint64_t barriers[8];  // keys are there, have been used; values: two stages each
  __shared__ uint32_t words[4][16];              // block, and above kMaskShift which rows see it
  __shared__ __align__(16) float key_scales[F8 ? 4 : 1][64];
  __shared__ uint32_t units[4];                  // of values
  const uint32_t query = shared_at(dynamic), key = query + 8 * kPart, value = key + 8 * kPart, bars = shared_at(barriers);
  const uint32_t tile = gridDim.x - 1 - blockIdx.x, kvh = blockIdx.y, t = threadIdx.x % 128, who = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = t / 32, lane = t % 32;  // long tiles first
  const uint32_t group = p.heads / p.kv, first = tile * p.tile, rows = min(p.tile, p.rows - first);
  if (threadIdx.x < 8) barrier_init(bars + threadIdx.x * 8, threadIdx.x % 4 >= 2 ? 8 * kWarp : threadIdx.x < 4 ? 128 + kWarp : 128);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  pdl();
  const uint32_t full_k = bars, free_k = bars + 16, full_v = bars + 32, free_v = bars + 48;
  const uint32_t last = p.base + first + rows - 1;  // tokens after it may never have been written
  const uint32_t blocks = p.list ? p.count[tile] : last / 4 + 1, steps = (blocks + 15) / 16;
  if (who == 0) {
    if constexpr (F8) asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const uint32_t* list = p.list ? p.list + (uint64_t)tile * p.list_ld : nullptr;
    // Sixteen lanes look up a block each.
    auto find = [&](uint32_t step, uint32_t& word, uint32_t& row) {
      const uint32_t at = step * 16 + lane;
      word = row = 0;
      if (lane < 16 && at < blocks) {
        word = list ? list[at] : ~0u << kMaskShift | at;
        row = (uint32_t)(block_row(p.pages, word & kIdMask) * 4);
      }
    };
    if constexpr (F8) {
      // Keys and values in turn, a unit each: codes of one are on their way while those of another are converted, by the lane that asked for them.
      uint32_t word, row;
      float scales[2], next[2], now[2];  // of keys, of the values that go with them, of values that are converted: tokens lane and lane + 32
      auto ask = [&](uint32_t unit) {
        const uint32_t raw = value + 8 * kPart + (unit & 1) * (4 * kPart / 2) + t * 16;
        if (unit < 2 * steps) {
          const bool values = unit & 1;
          if (!values) find(unit / 2, word, row);
          const uint8_t* from = (const uint8_t*)(values ? p.values : p.keys) + t % 16 * 16;
#pragma unroll
          for (uint32_t i = 0; i < 8; i++) {
            const uint32_t w = __shfl_sync(~0u, word, 2 * i + warp / 2), r = __shfl_sync(~0u, row, 2 * i + warp / 2) + t / 16 % 4;
            copy16(raw + i * 2048, from + ((uint64_t)r * p.kv + kvh) * 256, w >> kMaskShift != 0 && (w & kIdMask) * 4 + t / 16 % 4 <= last);
          }
          if (!values) {
#pragma unroll
            for (uint32_t i = 0; i < 2; i++) {
              const uint32_t w = __shfl_sync(~0u, word, 8 * i + lane / 4), r = __shfl_sync(~0u, row, 8 * i + lane / 4) + lane % 4;
              const bool there = w >> kMaskShift != 0 && (w & kIdMask) * 4 + lane % 4 <= last;
              const uint64_t at = (uint64_t)r * p.kv + kvh;
              scales[i] = there ? from_bf16(p.key_scales[at]) : 0.0f, next[i] = there ? from_bf16(p.value_scales[at]) : 0.0f;
            }
          }
        }
        copies_commit();
      };
      ask(0);
      uint32_t words_now = word, largest = kLeast;
      ask(1);
      for (uint32_t unit = 0; unit < 2 * steps; unit += 2) {
#pragma unroll
        for (uint32_t v = 0; v < 2; v++) {
          const uint32_t step = unit / 2, s = step & 1, to = (v ? value : key) + s * 4 * kPart, raw = value + 8 * kPart + v * (4 * kPart / 2) + t * 16;
          copies_wait<1>();
          if (step > 1) barrier_wait((v ? free_v : free_k) + s * 8, (step / 2 - 1) & 1);
          if (!v) {
            largest = max(largest, __reduce_max_sync(~0u, __float_as_uint(fmaxf(next[0], next[1])) & 0x7f800000u));
            const float power = __uint_as_float(2 * kOne + kRoom - largest);
            now[0] = next[0] * power, now[1] = next[1] * power;
          }
#pragma unroll 2
          for (uint32_t i = 0; i < 8; i++) {
            uint32_t c[4], h[8];
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(raw + i * 2048) : "memory");
#pragma unroll
            for (int j = 0; j < 4; j++)
              asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(h[2 * j]), "=r"(h[2 * j + 1]) : "r"(c[j]));
            if (v) {
              const uint32_t row = i * 8 + t / 16;
              const __half2 f = __float2half2_rn(__shfl_sync(~0u, i < 4 ? now[0] : now[1], row % 32));
#pragma unroll
              for (int j = 0; j < 8; j++) {
                const __half2 x = __hmul2(*(const __half2*)&h[j], f);
                h[j] = *(const uint32_t*)&x;
              }
            }
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
              asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + place(i * 8 + t / 16, t % 16 * 2 + j)), "r"(h[4 * j]), "r"(h[4 * j + 1]), "r"(h[4 * j + 2]), "r"(h[4 * j + 3]) : "memory");
          }
          if (!v && warp == 0) {
            if (lane < 16) words[step & 3][lane] = words_now;
            key_scales[step & 3][lane] = scales[0], key_scales[step & 3][lane + 32] = scales[1];
            if (lane == 0) units[step & 3] = largest;
            __syncwarp();
            warp_arrives(full_k + s * 8, lane);
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"((v ? full_v : full_k) + s * 8) : "memory");
          ask(unit + v + 2);
          if (!v) words_now = word;
        }
      }
      copies_wait<0>();
      return;
    }
    auto fetch = [&](uint32_t to, const void* from, uint32_t word, uint32_t row) {
#pragma unroll 4
      for (uint32_t i = 0; i < 16; i++) {
        const uint32_t w = __shfl_sync(~0u, word, i), r = __shfl_sync(~0u, row, i);
        copy16(to + place(i * 4 + warp, lane), (const uint8_t*)from + (((uint64_t)r + warp) * p.kv + kvh) * 512 + lane * 16, w >> kMaskShift != 0 && (w & kIdMask) * 4 + warp <= last);
      }
    };
    uint32_t word, row, next_word, next_row;
    find(0, next_word, next_row);
    for (uint32_t step = 0; step < steps; step++) {
      const uint32_t s = step & 1;
      word = next_word, row = next_row;
      find(step + 1, next_word, next_row);
      if (step > 1) barrier_wait(free_k + s * 8, (step / 2 - 1) & 1);
      if (warp == 0) {
        if (lane < 16) words[step & 3][lane] = word;
        __syncwarp();
        warp_arrives(full_k + s * 8, lane);
      }
      fetch(key + s * 4 * kPart, p.keys, word, row);
      barrier_copies(full_k + s * 8);
      if (step > 1) barrier_wait(free_v + s * 8, (step / 2 - 1) & 1);
      fetch(value + s * 4 * kPart, p.values, word, row);
      barrier_copies(full_v + s * 8);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }
  if constexpr (F8) asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const uint32_t g = lane / 4, q4 = lane % 4, half = p.tile / 2, from = (who - 1) * half;  // this side's first row of the tile
  const uint32_t mine = query + (who - 1) * 4 * kPart;
  for (uint32_t i = t; i < kQueries * 32; i += 128) {
    const uint32_t r = i / 32, row = from + r / group;
    const bool there = r / group < half && row < rows;
    copy16(mine + place(r, i % 32), there ? p.q + ((uint64_t)(first + row) * p.heads + kvh * group + r % group) * 256 + i % 32 * 8 : p.q, there);
  }
  copies_commit();
  copies_wait<0>();
  if constexpr (F8) {  // own pieces
    for (uint32_t i = t; i < kQueries * 32; i += 128) {
      const uint32_t at = mine + place(i / 32, i % 32);
      uint32_t c[4];
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]) : "r"(at) : "memory");
#pragma unroll
      for (int j = 0; j < 4; j++) c[j] = pack_half(lo(c[j]), hi(c[j]));
      asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]) : "memory");
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(who) : "memory");
  uint32_t bit[2], limit[2];  // of rows 16*warp + g + 8*i of queries
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t row = (warp * 16 + i * 8 + g) / group;
    bit[i] = row < half && from + row < rows ? 1u << (kMaskShift + from + row) : 0, limit[i] = p.base + first + from + row;
  }
  float acc[128], s[32], most[2] = {-1e30f, -1e30f}, sum[2] = {0.0f, 0.0f}, old[2];
#pragma unroll
  for (int i = 0; i < 128; i++) acc[i] = 0.0f;
  const float scale = 0.0625f * 1.4426950408889634f;
  const uint32_t low = p.base + first + from;  // tokens up to here no row of this side is too early for
  uint32_t w[4][4];
  // Asks for the scores of a step's tokens.
  auto score = [&](uint32_t step) {
    const uint32_t st = step & 1;
    const uint64_t a = described(mine, 16, 1024), b = described(key + st * 4 * kPart, 16, 1024);
    barrier_wait(full_k + st * 8, step / 2 & 1);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // copies of other threads, for the tensor instructions
    wide_fence();
#pragma unroll
    for (uint32_t k = 0; k < 16; k++) {
      const uint32_t at = (k / 4 * kPart + k % 4 * 32) / 16;
      if constexpr (F8) half_scores(s, a + at, b + at, k > 0);
      else wide_scores(s, a + at, b + at, k > 0);
    }
    wide_commit();
  };
  // Makes weights of scores, in their place; old is what earlier sums are to be multiplied by.
  auto soften = [&](uint32_t step) {
    held(s);
    warp_arrives(free_k + (step & 1) * 8, lane);
    const uint32_t* const word = words[step & 3];
    if constexpr (F8) {
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float2 f = *(const float2*)(key_scales[step & 3] + n * 8 + 2 * q4);
#pragma unroll
        for (int i = 0; i < 4; i++) s[n * 4 + i] *= i % 2 ? f.y : f.x;
      }
    }
    float top[2] = {-INFINITY, -INFINITY};
    if (step + 1 < steps && (word[15] & kIdMask) * 4 + 3 <= low) {
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const uint32_t v = word[n * 2 + q4 / 2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          s[n * 4 + i] = v & bit[i / 2] ? s[n * 4 + i] : -INFINITY;
          top[i / 2] = fmaxf(top[i / 2], s[n * 4 + i]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const uint32_t v = word[n * 2 + q4 / 2], token = (v & kIdMask) * 4 + q4 % 2 * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          s[n * 4 + i] = (v & bit[i / 2]) && token + i % 2 <= limit[i / 2] ? s[n * 4 + i] : -INFINITY;
          top[i / 2] = fmaxf(top[i / 2], s[n * 4 + i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // Weights in FP16 may be up to 2^8, so that most steps leave the sums as they are. In BF16 it tells that the largest is 1, without a rounding.
      const float seen = quad_max(top[i]), v = (seen - most[i]) * scale > (F8 ? 8.0f : 0.0f) ? seen : most[i], zero = v * scale;
      old[i] = power2((most[i] - v) * scale), most[i] = v;
      float e = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) e += s[n * 4 + 2 * i + j] = power2(fmaf(s[n * 4 + 2 * i + j], scale, -zero));
      sum[i] = sum[i] * old[i] + e;
    }
  };
  auto pack = [&] {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) w[n / 2][n % 2 * 2 + i] = F8 ? pack_half(s[n * 4 + 2 * i], s[n * 4 + 2 * i + 1]) : pack_bf16(s[n * 4 + 2 * i], s[n * 4 + 2 * i + 1]);
  };
  // Asks for the values of a step's tokens to be added.
  auto add = [&](uint32_t step) {
    const uint32_t st = step & 1;
    const uint64_t b = described(value + st * 4 * kPart, kPart, 1024);
    barrier_wait(full_v + st * 8, step / 2 & 1);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    wide_fence();
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
      if constexpr (F8) half_values(acc, w[k], b + k * 128);
      else wide_values(acc, w[k], b + k * 128);
    }
    wide_commit();
  };
  auto added = [&](uint32_t step) {
    wide_wait<0>();
    held(acc);
    warp_arrives(free_v + (step & 1) * 8, lane);
  };
  score(0);
  wide_wait<0>();
  soften(0);
  pack();
  // While the tensor instructions add a step's values, weights of the next one are made.
  for (uint32_t step = 0; step + 1 < steps; step++) {
    score(step + 1);
    add(step);
    wide_wait<1>();
    soften(step + 1);
    added(step);
    if constexpr (F8) {
      if (const uint32_t grown = units[(step + 1) & 3] - units[step & 3]) {
        const float less = grown < kOne ? __uint_as_float(kOne - grown) : 0.0f;
        old[0] *= less, old[1] *= less;
      }
    }
    if (__any_sync(~0u, old[0] != 1.0f || old[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; i++) acc[i] *= old[i / 2 % 2];
    }
    pack();
  }
  add(steps - 1);
  added(steps - 1);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float inverse = (F8 ? __uint_as_float(units[(steps - 1) & 3] - kRoom) : 1.0f) / quad_sum(sum[i]);
    if (!bit[i]) continue;
    const uint32_t r = warp * 16 + i * 8 + g;
    const uint64_t row = first + from + r / group, head = kvh * group + r % group;
    const bf16* gate = p.qg + row * p.qg_ld + head * 512 + 256 + 2 * q4;
    bf16* out = p.out + row * p.out_ld + head * 256 + 2 * q4;
#pragma unroll
    for (int n = 0; n < 32; n++) {
      const uint32_t z = *(const uint32_t*)(gate + n * 8);
      *(uint32_t*)(out + n * 8) = pack_bf16(acc[n * 4 + 2 * i] * inverse * sigmoid(lo(z)), acc[n * 4 + 2 * i + 1] * inverse * sigmoid(hi(z)));
    }
  }
}
#endif

NINFER_KERNEL(attend_wide, AttendParams, kWide, 1) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  attend_for<false>(p);
#endif
}
NINFER_KERNEL(attend_wide_fp8, AttendParams, kWide, 1) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  attend_for<true>(p);
#endif
}

static constexpr int kScore = 128;

NINFER_KERNEL(score_wide, ScoreRowsParams, kScore, 2) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr uint32_t kStages = 3, kKeys = 2 * kPart;  // bytes of a stage: two parts of 64 of the 128 values
  const uint32_t t = threadIdx.x, warp = t / 32, lane = t % 32, g = lane / 4, q4 = lane % 4, first = blockIdx.y * kQueries;
  const uint32_t query = shared_at(dynamic), key = query + 8 * kPart;
  pdl();
  const uint32_t last = min(first + kQueries, p.rows) - 1, n = (p.base + last + 1) / 4;  // blocks that the last of these rows sees
  if (n <= p.most) return;
  const uint32_t tiles = (n + kTokens - 1) / kTokens;
  uint32_t pages[4];  // of the tile to be fetched next
  auto look = [&](uint32_t tile) {
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) pages[i] = (tile * 4 + i) * (kPage / 4) < n ? p.pages[tile * 4 + i] : 0;
  };
  auto fetch = [&](uint32_t tile, uint32_t stage) {
    if (tile < tiles) {
      const uint32_t piece = t % 16;
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        const uint32_t k = i * 8 + t / 16;
        copy16(key + stage * kKeys + place(k, piece), p.keys + ((uint64_t)pages[i / 2] * 16 + k % 16) * 128 + piece * 8, tile * kTokens + k < n);
      }
    }
    copies_commit();
  };
  look(blockIdx.x);
  for (uint32_t i = t; i < kQueries * 64; i += kScore) {
    const uint32_t r = i / 64, head = i / 16 % 4, piece = i % 16;
    copy16(query + head * 2 * kPart + place(r, piece), first + r < p.rows ? p.iq + ((uint64_t)(first + r) * 4 + head) * 128 + piece * 8 : p.iq, first + r < p.rows);
  }
  fetch(blockIdx.x, 0);
  look(blockIdx.x + gridDim.x);
  fetch(blockIdx.x + gridDim.x, 1);
  look(blockIdx.x + 2 * gridDim.x);
  const uint32_t r0 = first + warp * 16 + g, r1 = r0 + 8;
  const uint32_t n0 = r0 < p.rows ? (p.base + r0 + 1) / 4 : 0, n1 = r1 < p.rows ? (p.base + r1 + 1) / 4 : 0;
  const float scale = 1.0f / sqrtf(128.0f);
  const uint64_t a = described(query, 16, 1024);
  uint32_t stage = 0;
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    copies_wait<1>();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();  // this tile is there, and the one before has been used
    float acc[4][32];
    wide_fence();
#pragma unroll
    for (uint32_t h = 0; h < 4; h++) {
#pragma unroll
      for (uint32_t k = 0; k < 8; k++) {
        const uint32_t at = (k / 4 * kPart + k % 4 * 32) / 16;
        wide_scores(acc[h], a + h * 2 * kPart / 16 + at, described(key + stage * kKeys, 16, 1024) + at, k > 0);
      }
      wide_commit();
    }
    fetch(tile + 2 * gridDim.x, (stage + 2) % kStages);
    look(tile + 3 * gridDim.x);
    wide_wait<3>();
    held(acc[0]);
#pragma unroll
    for (int i = 0; i < 32; i++) acc[0][i] = fmaxf(acc[0][i], 0.0f);
    wide_wait<2>();
    held(acc[1]);
#pragma unroll
    for (int i = 0; i < 32; i++) acc[0][i] += fmaxf(acc[1][i], 0.0f);
    wide_wait<1>();
    held(acc[2]);
#pragma unroll
    for (int i = 0; i < 32; i++) acc[0][i] += fmaxf(acc[2][i], 0.0f);
    wide_wait<0>();
    held(acc[3]);
#pragma unroll
    for (uint32_t j = 0; j < 8; j++) {
      float s[4];
#pragma unroll
      for (int i = 0; i < 4; i++) s[i] = (acc[0][j * 4 + i] + fmaxf(acc[3][j * 4 + i], 0.0f)) * scale;
      const uint32_t b = tile * kTokens + j * 8 + 2 * q4;  // the pitch is even
      if (b < n0) *(float2*)(p.scores + (uint64_t)r0 * p.ld + b) = make_float2(s[0], s[1]);
      if (b < n1) *(float2*)(p.scores + (uint64_t)r1 * p.ld + b) = make_float2(s[2], s[3]);
    }
    stage = (stage + 1) % kStages;
  }
  copies_wait<0>();
#endif
}
