// Packed experts on sm_90's warpgroup instructions: weights as the A operand from registers, rows of activations as the B operand from
// shared memory.
//
// A lane of the decode kernels' tiles has 16 codes each of rows g and g + 8 in 64 k, which is just the A fragment of four k16 steps if the
// activations' k order is made to suit (order64): unpacked weights never see shared memory. Two warpgroups of 64 stored rows each share up to
// 192 activation rows, so that an expert's weights are mostly unpacked once; the instruction's width is the rows' number rounded up to 32.
// One block an SM, which does a few tiles of stored rows one after the other. A k64 step is issued before the step before it has ended, while
// the threads unpack the next one: fragments are double buffered; codes and activations come by asynchronous copies, six stages, four steps
// ahead and on into the next tile. Results go through shared memory of their own to whole rows.
#pragma once
#include "bank.cuh"

static constexpr int kWideRows = 192;
static constexpr int kWideStages = 6;
static constexpr uint32_t kWideCodes = kWideRows * 128;           // of a stage, then 640 bytes a warp: 512 of codes, 128 of scales
static constexpr uint32_t kWideStage = kWideCodes + 8 * 640;
static constexpr uint32_t kWideOut = kWideStages * kWideStage;    // then the results: kWideRows rows of 128 columns

// Position of k in its 64: chunk 2s + h of eight holds, for t = 0..3 and i = 0..1, k = 16 t + 8 (w / 4) + w % 4 + 4 i with w = 2s + h.
NINFER_DEVICE uint32_t order64(uint32_t k) {
  const uint32_t n = k / 8, e = k % 8;
  return 8 * ((n & 1) * 4 + (e & 3)) + (n >> 1) * 2 + (e >> 2);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// d (64 x N) += A (64 x 16, registers) * B (N x 16) transposed, in shared memory.
template <int N>
NINFER_DEVICE void wgmma_rs(float (&d)[N / 8][4], const uint32_t* a, uint64_t b);
#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
template <>
NINFER_DEVICE void wgmma_rs<32>(float (&d)[4][4], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
      "}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
      : D4(0), D4(1), D4(2), D4(3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<64>(float (&d)[8][4], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
      "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<96>(float (&d)[12][4], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
      "}, {%48,%49,%50,%51}, %52, 1, 1, 1, 0;"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<128>(float (&d)[16][4], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<160>(float (&d)[20][4], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
      "}, {%80,%81,%82,%83}, %84, 1, 1, 1, 0;"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15), D4(16), D4(17), D4(18), D4(19)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
NINFER_DEVICE void wgmma_rs<192>(float (&d)[24][4], const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
      "}, {%96,%97,%98,%99}, %100, 1, 1, 1, 0;"
      : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7), D4(8), D4(9), D4(10), D4(11), D4(12), D4(13), D4(14), D4(15), D4(16), D4(17), D4(18), D4(19), D4(20), D4(21), D4(22), D4(23)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
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
// stored rows g, g + 8 of this warp's sixteen for activation rows 8 j + 2 t and one more. k is a multiple of 128. row(r) is the element offset
// of activation row r in x.
template <class Bank, int N, class Row, class Finish>
NINFER_DEVICE void wide_run(const GroupParams& p, const Item& item, uint32_t first, uint32_t count, Row row, Finish finish) {
  const uint32_t base = smem_addr(smem), chunk = threadIdx.x % 8, r0 = threadIdx.x / 8, steps = p.k / kK, total = steps * count;
  const uint32_t into = r0 * 128 + ((chunk ^ (r0 & 7)) << 4), mine = kWideCodes + threadIdx.x / 32 * 640;
  const uint32_t end = base + kWideOut;
  typename Bank::Lane lane(p, item.expert, first);
  const bf16* from[N / 32];
  uint32_t live = 0;
#pragma unroll
  for (int j = 0; j < N / 32; j++) {
    const bool yes = r0 + 32 * j < item.rows;
    from[j] = p.x + (yes ? (uint64_t)row(r0 + 32 * j) : 0) + chunk * 8;
    live |= yes << j;
  }
  uint32_t asked = 0, asked_kt = 0, asked_stage = base;
  auto ask = [&]() {
    if (asked < total) {
#pragma unroll
      for (int j = 0; j < N / 32; j++) copy16(asked_stage + into + j * 32 * 128, from[j] + asked_kt * kK, live >> j & 1);
      lane.copy(asked_kt, asked_stage + mine);
      asked++, asked_stage += kWideStage;
      if (asked_stage == end) asked_stage = base;
      if (++asked_kt == steps) asked_kt = 0, lane.next();
    }
    copy_commit();
  };
#pragma unroll
  for (int s = 0; s < kWideStages - 2; s++) ask();
  uint32_t even[16], odd[16], stage = base;
  copy_wait<kWideStages - 3>();
  __syncthreads();
  unpack(Bank::Lane::codes(stage + mine), Bank::Lane::scales(stage + mine, 0), even);
  float acc[N / 8][4];
  auto step = [&](uint32_t half, uint32_t (&now)[16], uint32_t (&next)[16]) {
    copy_wait<kWideStages - 4>();  // this step's activations and the next one's codes
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint64_t b = wgmma_operand(stage);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; kk++) wgmma_rs<N>(acc, now + 4 * kk, b + 2 * kk);
    wgmma_commit();
    ask();  // into the stage of two steps ago, which all have finished
    stage += kWideStage;
    if (stage == end) stage = base;
    const uint4 code = Bank::Lane::codes(stage + mine);
    const uint32_t scales = Bank::Lane::scales(stage + mine, half ^ 1);
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // the step before: `next` is free
    unpack(code, scales, next);
  };
#pragma unroll 1
  for (uint32_t tile = first; tile < first + count; tile++) {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int l = 0; l < 4; l++) acc[j][l] = 0;
#pragma unroll 1
    for (uint32_t kt = 0; kt < steps; kt += 2) {
      step(0, even, odd);
      step(1, odd, even);
    }
    wgmma_wait();
    finish(tile, acc);
  }
  copy_wait<0>();
}
#endif
