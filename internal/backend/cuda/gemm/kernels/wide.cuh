// Packed experts on sm_90's warpgroup instructions: weights as the A operand from registers, rows of activations as the B operand from
// shared memory.
//
// A lane of the decode kernels' tiles has 16 codes each of rows g and g + 8 in 64 k, which is just the A fragment of four k16 steps if the
// activations' k order is made to suit (order64): unpacked weights never see shared memory. Two warpgroups of 64 stored rows each share an item's
// rows; the instruction's width is their number rounded up. A block does a few tiles of stored rows one after the other.
//
// Activations lie in panels: [k / 64][sorted pair][64], a pair's 128 bytes already exchanged as the instruction wants them (16-byte chunks by
// row % 8; an expert's pairs begin at a multiple of eight), so that an item's 64 k are one piece of memory and one bulk copy, which the warps ask for
// in turn.
// A warp's codes come by asynchronous copies into a ring of its own, 128 k of its sixteen rows at a time. Nothing but the copies' barriers holds
// the two warpgroups together, and a tile's results go through shared memory of their own to whole rows.
//
#pragma once
#include "bank.cuh"

// Shared memory of a block with items of up to ROWS activation rows: stages of 64 k of activations, each warp's ring of pieces of 128 k of codes,
// results, barriers (full and empty of every stage, one that nobody waits for).
template <int ROWS>
struct Wide {
  static constexpr bool kFew = ROWS <= 96;
  static constexpr uint32_t kActs = kFew ? 4 : 6, kLag = kFew ? 1 : 3;  // stages; how many steps after its use one is filled again
  static constexpr uint32_t kRing = kFew ? 4 : 3, kAct = ROWS * 128, kPiece = 1152;
  static constexpr uint32_t kCodes = kActs * kAct, kOut = kCodes + 8 * kRing * kPiece, kBars = kOut + ROWS * 256;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// ---- barriers of copies ----

NINFER_DEVICE void bar_init(uint32_t bar, uint32_t arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory"); }
NINFER_DEVICE void bar_arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
NINFER_DEVICE void bar_expect(uint32_t bar, uint32_t bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
NINFER_DEVICE void bar_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nW%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D%=;\nbra W%=;\nD%=:\n}" ::"r"(bar), "r"(parity) : "memory");
}
NINFER_DEVICE void bulk_copy(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
// d (64 x N) += A (64 x 16, registers) * B (N x 16) transposed, in shared memory: the low word of wgmma_operand.
template <int N>
NINFER_DEVICE void wgmma_rs(float (&d)[N / 8][4], const uint32_t* a, uint32_t b);
#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
template <>
NINFER_DEVICE void wgmma_rs<16>(float (&d)[2][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%12, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7"
      "}, {%8,%9,%10,%11}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<32>(float (&d)[4][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%20, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
      "}, {%16,%17,%18,%19}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<40>(float (&d)[5][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%24, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19"
      "}, {%20,%21,%22,%23}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<48>(float (&d)[6][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%28, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
      "}, {%24,%25,%26,%27}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<64>(float (&d)[8][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%36, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
      "}, {%32,%33,%34,%35}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<80>(float (&d)[10][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%44, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39"
      "}, {%40,%41,%42,%43}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<96>(float (&d)[12][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%52, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
      "}, {%48,%49,%50,%51}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<128>(float (&d)[16][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%68, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, {%64,%65,%66,%67}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<144>(float (&d)[18][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%76, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71"
      "}, {%72,%73,%74,%75}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15), D4(16), D4(17)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<160>(float (&d)[20][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%84, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
      "}, {%80,%81,%82,%83}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15), D4(16), D4(17), D4(18), D4(19)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<176>(float (&d)[22][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%92, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"
      "}, {%88,%89,%90,%91}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15), D4(16), D4(17), D4(18), D4(19), D4(20), D4(21)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<192>(float (&d)[24][4], const uint32_t* a, uint32_t b) {
  asm volatile(
      "{.reg .b64 b; mov.b64 b, {%100, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
      "}, {%96,%97,%98,%99}, b, 1, 1, 1, 0;}"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15), D4(16), D4(17), D4(18), D4(19), D4(20), D4(21), D4(22), D4(23)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
#undef D4

// Sixteen registers: four k16 steps of a fragment, from this lane's sixteen codes each of two rows and their scales.
NINFER_DEVICE void unpack(uint4 code, uint32_t scales, uint32_t* a) {
  uint32_t s0, s1;
  block_scales(scales, s0, s1);
  uint4 lo, hi, lo8, hi8;
  e2m1x16_bf16(make_uint2(code.x, code.y), s0, lo, hi);
  e2m1x16_bf16(make_uint2(code.z, code.w), s1, lo8, hi8);
  a[0] = lo.x, a[1] = lo8.x, a[2] = lo.y, a[3] = lo8.y;
  a[4] = lo.z, a[5] = lo8.z, a[6] = lo.w, a[7] = lo8.w;
  a[8] = hi.x, a[9] = hi8.x, a[10] = hi.y, a[11] = hi8.y;
  a[12] = hi.z, a[13] = hi8.z, a[14] = hi.w, a[15] = hi8.w;
}

// The products of one item's rows with stored tiles first..first+count-1 of its expert; finish(tile, acc) takes each tile's sums: acc[j] holds
// stored rows g, g + 8 of this warp's sixteen for activation rows 8 j + 2 t and one more. k is a multiple of 128.
//
// Of many rows: a step is issued before the step before it has ended, while the threads unpack the next one.
template <class Bank, int N, int ROWS, class Finish>
NINFER_DEVICE void wide_run(const GroupParams& p, const Item& item, uint32_t first, uint32_t count, Finish finish) {
  using W = Wide<ROWS>;
  const uint32_t base = smem_addr(smem), bars = base + W::kBars, lane = threadIdx.x % 32, warp = threadIdx.x / 32, pieces = p.k / 128;
  const uint32_t ring = base + W::kCodes + warp * W::kRing * W::kPiece, end = ring + W::kRing * W::kPiece;
  const uint32_t bytes = (item.rows + 7) / 8 * 1024;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i <= 2 * W::kActs; i++) bar_init(bars + i * 8, i < W::kActs ? 1 : 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  typename Bank::Lane from(p, item.expert, first);
  uint32_t left = pieces * count, piece = 0, slot = ring;
  auto ask = [&](uint32_t to) {
    if (left) {
      from.copy(to), left--;
      if (++piece == pieces) piece = 0, from.next();
    }
    copy_commit();
  };
#pragma unroll
  for (uint32_t s = 0; s < W::kRing; s++) ask(ring + s * W::kPiece);
  typename Bank::Piece raw;
  auto load = [&]() {
    copy_wait<W::kRing - 1>();
    __syncwarp();
    raw.load(slot);
    __syncwarp();
    ask(slot);
    if ((slot += W::kPiece) == end) slot = ring;
  };
  uint32_t even[16], odd[16];
  load();
  unpack(raw.codes(0), raw.scales(0), even);
  __syncthreads();  // barriers have been made
  // Step s asks for the activations of step s - kLag + kActs, which go where those of step s - kLag were: warp s % 8 does. A warpgroup can be about
  // kLag steps ahead of the other, so that one multiplies while the other writes results.
  const bf16* const x = p.x + (uint64_t)item.first * kK;
  const uint32_t steps = 2 * pieces, total = steps * count;
  auto fetch = [&](uint32_t bar, uint32_t kt) {
    bar_expect(bar, bytes);
    bulk_copy(base + (bar - bars) / 8 * W::kAct, x + (uint64_t)kt * p.capacity * kK, bytes, bar);
  };
  if (lane == 0 && warp < W::kActs - W::kLag && warp < total) fetch(bars + warp * 8, warp % steps);
  uint32_t asked = warp + W::kActs - W::kLag, asked_kt = asked % steps, turn = warp;
  float acc[N / 8][4];
  const uint32_t first_stage = (uint32_t)wgmma_operand(base);
  uint32_t stage = first_stage, full = bars, parity = 0, before = bars + 2 * W::kActs * 8;
  auto step = [&](int half, uint32_t (&now)[16], uint32_t (&next)[16]) {
    bar_wait(full, parity);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; kk++) wgmma_rs<N>(acc, now + 4 * kk, stage + 2 * kk);
    wgmma_commit();
    if (half) load();
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the step before: `next` and its stage are free
    if (lane == 0) bar_arrive(before);
    if (turn-- == 0) {
      turn = 7;
      if (asked < total && lane == 0) {
        const bool same = full >= bars + W::kLag * 8;  // the same round of the stages
        const uint32_t bar = full + (same ? 0 : W::kActs * 8) - W::kLag * 8;
        bar_wait(bar + W::kActs * 8, same ? parity : parity ^ 1);
        fetch(bar, asked_kt);
      }
      __syncwarp();
      asked += 8, asked_kt += 8;
      while (asked_kt >= steps) asked_kt -= steps;
    }
    before = full + W::kActs * 8;
    stage += W::kAct / 16, full += 8;
    if (full == bars + W::kActs * 8) stage = first_stage, full = bars, parity ^= 1;
    unpack(raw.codes(half ^ 1), raw.scales(half ^ 1), next);
  };
#pragma unroll 1
  for (uint32_t tile = first; tile < first + count; tile++) {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int l = 0; l < 4; l++) acc[j][l] = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < pieces; k++) {
      step(0, even, odd);
      step(1, odd, even);
    }
    wgmma_wait();
    finish(tile, acc);
  }
  copy_wait<0>();
}

// The same of few rows, two or three blocks an SM: what one of them waits for the others hide, so that a step needs one fragment. Rings
// have four places, and the main loop goes around the stages once, so that addresses are constants.
template <class Bank, int N, int ROWS, class Finish>
NINFER_DEVICE void few_run(const GroupParams& p, const Item& item, uint32_t first, uint32_t count, Finish finish) {
  using W = Wide<ROWS>;
  const uint32_t base = smem_addr(smem), full = base + W::kBars, empty = full + W::kActs * 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t pieces = p.k / 128, total = pieces * count, ring = base + W::kCodes + warp * 4 * W::kPiece;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < 2 * W::kActs; i++) bar_init(full + i * 8, i < W::kActs ? 1 : 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Codes: piece i of all tiles' goes to place i % 4.
  typename Bank::Lane from(p, item.expert, first);
  uint32_t asked = 0;
  auto ask = [&](uint32_t i) {
    if (i < total) {
      from.copy(ring + i % 4 * W::kPiece);
      if (++asked == pieces) asked = 0, from.next();
    }
    copy_commit();
  };
#pragma unroll
  for (uint32_t i = 0; i < 4; i++) ask(i);
  typename Bank::Piece raw;
  auto load = [&](uint32_t i) {
    copy_wait<3>();
    __syncwarp();
    raw.load(ring + i % 4 * W::kPiece);
    __syncwarp();
    ask(i + 4);
  };
  uint32_t weights[16];
  load(0);
  __syncthreads();  // barriers have been made
  // Activations: step s asks for those of step s + kEarly, which go where those of step s - kLag were. The warps take turns.
  const bf16* const x = p.x + (uint64_t)item.first * kK;
  const uint32_t bytes = (item.rows + 7) / 8 * 1024, steps = 2 * pieces, all = steps * count;
  auto fetch = [&](uint32_t s, uint32_t kt) {
    bar_expect(full + s % 4 * 8, bytes);
    bulk_copy(base + s % 4 * W::kAct, x + (uint64_t)kt * p.capacity * kK, bytes, full + s % 4 * 8);
  };
  constexpr uint32_t kEarly = 4 - W::kLag;
  if (lane == 0 && warp < kEarly && warp < all) fetch(warp, warp % steps);
  float acc[N / 8][4];
  const auto clear = [&]() {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int l = 0; l < 4; l++) acc[j][l] = 0;
  };
  clear();
  const uint32_t operand = (uint32_t)wgmma_operand(base);
  uint32_t tile = first, k = 0, parity = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < total; i += 2, parity ^= 1) {  // two pieces are four steps
#pragma unroll
    for (int u = 0; u < 2; u++) {
      if (u && i + u >= total) break;
      auto step = [&](int half) {
        const uint32_t place = 2 * u + half, s = 2 * (i + u) + half;
        unpack(raw.codes(half), raw.scales(half), weights);
        bar_wait(full + place * 8, parity);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; kk++) wgmma_rs<N>(acc, weights + 4 * kk, operand + place * (W::kAct / 16) + 2 * kk);
        wgmma_commit();
        if (half) load(i + u + 1);
        wgmma_wait();
        if (lane == 0) bar_arrive(empty + place * 8);
        if ((s ^ warp) % 8 == 0) {
          if (lane == 0 && s + kEarly < all) {
            bar_wait(empty + (place + kEarly) % 4 * 8, place < W::kLag ? parity ^ 1 : parity);
            uint32_t kt = 2 * k + half + kEarly;
            while (kt >= steps) kt -= steps;
            fetch(s + kEarly, kt);
          }
          __syncwarp();
        }
      };
      step(0);
      step(1);
      if (++k < pieces) continue;
      finish(tile++, acc);
      clear();
      k = 0;
    }
  }
  copy_wait<0>();
}
#endif
