#!/usr/bin/env bash
# check.sh PROGRAMS RESULTS [PART...]: all checks of accuracy on a GPU. Parts, one after the other: steps (operations against the oracle, steps), kernels (each
# kernel, prompts, replays, faults, selftest), sequences (1,000 random ones). SECONDS_EACH (300) is how long a
# command may take, REPLAYS and SEQUENCES how many. With NINFER_GOLDEN the checkpoints there are tested too.
set -o pipefail
. "$(dirname "$0")/lib.sh"
[ $# -gt 0 ] || set -- steps kernels sequences
export GOMAXPROCS=4
T=${SECONDS_EACH:-300} D="$P/device.test -test.v" K="$P/kernels.test -test.v" A8="-artifact $ART/micro8.ninfer" A16="-artifact $ART/micro16.ninfer"
artifact micro8 micro16
cd "$REPO/internal/backend/cuda/device"

steps() {
  # What waits on the GPU or fills it runs alone.
  start armed8  $T $D $A8 -test.run 'TestArmed$|TestArmedGivesUp$'; all
  start armed16 $T $D $A16 -test.run 'TestArmed$'; all
  start memory  $T $D -test.run 'TestMemory$'; all
  start little  $T $P/kernels.test -test.v -test.run 'TestTooLittleMemory$'; all
  start plain-ops   $T $D -test.run 'TestConformance$/^Operations$'
  start plain-rest  $T $D -test.run 'TestConformance$' -test.skip 'TestConformance/Operations'
  start tuned-ops   $T $D -test.run 'TestTunedConformance$/^Operations$'
  start tuned-rest  $T $D -test.run 'TestTunedConformance$' -test.skip 'TestTunedConformance/Operations'
  start heads       $T $D -test.run 'TestTunedHeads$'
  start packed-kv   $T $D -test.run 'TestConformancePacked$/^kv'
  start packed-st   $T $D -test.run 'TestConformancePacked$/^state'
  start wide        $T $D -test.run 'TestWideConformance$'
  start wide-packed $T $D -test.run 'TestWideConformancePacked$'
  start behind8     $T $D $A8 -test.run 'TestStepsBehind$'
  start behind16    $T $D $A16 -test.run 'TestStepsBehind$'
  start together8   $T $D $A8 -test.run 'TestStepsTogether$|TestBatchRows$|TestChain$|TestFetchedAhead$|TestNothingSlow$'
  start together16  $T $D $A16 -test.run 'TestStepsTogether$|TestBatchRows$|TestChain$|TestFetchedAhead$|TestNothingSlow$'
  start steps-plain $T $D -test.run 'TestStepsBehind$|TestStepsTogether$'
  start rest        $T $D -test.skip 'Conformance|TunedHeads|PrefillIsDecode|LongChunks|PlantedKey|TestSteps|Replays|RandomSequences|Armed|Trap|Lost|TestMemory|Projectors|Attended|Selected|TestSpeed|TestStem'
  all
}

kernels() {
  start k-replay    $T $K -test.run 'TestReplay$' -replays ${REPLAYS:-50000}
  start d-replay8   $T $D $A8 -test.run 'TestReplays$' -replays $((${REPLAYS:-50000} * 2 / 5))
  start d-replay16  $T $D $A16 -test.run 'TestReplays$' -replays $((${REPLAYS:-50000} * 2 / 5))
  start planted-far $T $D -test.run 'TestPlantedKey$/^200000'
  start planted     $T $D -test.run 'TestPlantedKey$/^(31000|lanes)'
  start k-gemv      $T $K -test.run 'TestGemv$|TestArgmax$'
  start k-hyper     $T $K -test.run 'TestHyper|TestRoutingTies$|TestMicroChain$'
  start k-experts   $T $K -test.run 'TestExperts$'
  start k-alone     $T $K -test.run 'RowsAlone$'
  start prefill8    $T $D $A8 -test.run 'TestPrefillIsDecode$'
  start prefill16   $T $D $A16 -test.run 'TestPrefillIsDecode$'
  start prefill     $T $D -test.run 'TestPrefillIsDecode$'
  start long        $T $D -test.run 'TestLongChunks$'
  start long8       $T $D $A8 -test.run 'TestLongChunks$'
  start places      $T $D -test.run 'TestProjectors$|TestAttended$|TestSelected$|TestStem$'
  start faults      $T $D -test.run 'TestTrap$|TestLost$'
  start gemm        $T $P/gemm.test -test.v -test.skip TestFresh
  start chunk-sel   $T $P/chunk.test -test.v -test.run 'TestSelect$|TestAttendSelected$'
  start chunk       $T $P/chunk.test -test.v -test.skip 'TestFresh|TestSelect$|TestAttendSelected$'
  start self-micro  $T $P/ninfer selftest $ART/micro16.ninfer --golden $REPO/testdata/micro-radixark --device cuda
  if [ -d "${NINFER_GOLDEN:-}/micro-mixed" ]; then
    artifact mixed swift
    for g in mixed swift; do start self-$g $T $P/ninfer selftest $ART/$g.ninfer --golden $NINFER_GOLDEN/micro-$g --device cuda; done
  fi
  all
}

sequences() {
  for a in micro8 micro16; do start sequences-$a $T $P/device.test -test.v -artifact $ART/$a.ninfer -test.run 'TestRandomSequences$' -sequences ${SEQUENCES:-1000}; done
  all
}

for part in "$@"; do
  case $part in
  steps | kernels | sequences) $part ;;
  *) echo "check.sh: no part $part"; exit 2 ;;
  esac
done
sums
verdict
