#!/usr/bin/env bash
# rows.sh PROGRAMS RESULTS [PART...]: the rows of docs/perf/h200.json, a report of each command in RESULTS. Parts: 8 and 16 (bits), mixed, rounds, tables (of kernels).
# Nothing else may run on the GPU. On an H200 the first three took 45, 75 and 25 s; five runs of 256 steps each, or REPS of STEPS.
set -o pipefail
. "$(dirname "$0")/lib.sh"
[ $# -gt 0 ] || set -- 8 16 mixed rounds tables
STEPS=${STEPS:-256} REPS=${REPS:-5}
F8="--projection-format fp8_e4m3fn_row_bf16"

# row NAME ARGUMENTS...: a report in $OUT/NAME.json.
row() {
  local name=$1; shift
  go $name 300 $P/ninfer bench --synthetic official --device cuda "$@" -o json --output-file $OUT/$name.json
  grep -h -E 'us a step|us a round' $OUT/$name
}
steps() { local name=$1; shift; row $name --steps $STEPS -r $REPS "$@"; }

for part in "$@"; do
  case $part in
  8)
    steps fp8-8k $F8 --depth 8192 --batch 2,8,4,1
    steps fp8-long $F8 --depth 8192,65536,261632 --batch 1 ;;
  16)
    steps bf16-8k --depth 8192 --batch 1,2,4,8
    steps bf16-long --depth 8192,65536,261632 --batch 1
    REPS=3 steps small-long --kv-dtype fp8 --gdn-state-dtype bf16 --depth 8192,65536,261632 --batch 1 ;;
  mixed)
    steps mixed-long --source-profile mixed --depth 8192,65536,261632 --batch 1
    steps mixed-8k --source-profile mixed --depth 8192 --batch 1 ;;
  rounds)
    for f in fp8 bf16; do
      formats=; [ $f = bf16 ] || formats=$F8
      REPS=3 steps $f-rounds --depth 8192 --spec mtp --draft-tokens 5 $formats --mtp-expert-format nvfp4 --lm-head-draft
    done ;;
  tables) # of replays, so that few steps will do
    for n in 1,4 2,8; do
      STEPS=24 REPS=1 steps fp8-table-$n $F8 --depth 8192 --batch $n --kernels
      STEPS=24 REPS=1 steps bf16-table-$n --depth 8192 --batch $n --kernels
    done ;;
  *) echo "rows.sh: no part $part"; exit 2 ;;
  esac
done
verdict
