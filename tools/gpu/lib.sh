# For check.sh and rows.sh: PROGRAMS RESULTS are their first arguments; commands that end with the script.
[ $# -ge 2 ] || { sed -n '2,/^[^#]/s/^# //p' "$0"; exit 2; }
nvidia-smi -L 2>/dev/null | grep -q GPU || { echo "$(basename "$0"): no NVIDIA GPU here: tests would only skip"; exit 1; }
P=$(cd "$1" && pwd)
mkdir -p "$2"
OUT=$(cd "$2" && pwd)
shift 2
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cat "$P/commit" > "$OUT/commit"
declare -A RUNS BEGAN
NAMES=() BAD=()
# Each command has a process group of its own, which its limit, or a signal to the script, ends as a whole.
end() {
  trap - EXIT INT TERM HUP
  local p
  for p in "${!RUNS[@]}"; do kill -TERM -- -$p 2>/dev/null; done
  [ ${#RUNS[@]} -eq 0 ] || { sleep 0.5; for p in "${!RUNS[@]}"; do kill -KILL -- -$p 2>/dev/null; done; }
  exit ${1:-143}
}
trap 'end 143' INT TERM HUP
trap 'end $?' EXIT
now() { date +%s.%N; }
since() { awk -v a=$1 -v b=$(now) 'BEGIN{printf "%.1f", b-a}'; }
# start NAME LIMIT COMMAND...: in the background, what it prints in $OUT/NAME.
start() {
  local name=$1 limit=$2; shift 2
  NAMES+=($name)
  set -m
  timeout -k 1 $limit "$@" > $OUT/$name 2>&1 < /dev/null &
  set +m
  RUNS[$!]=$name; BEGAN[$!]=$(now)
}
# finish: waits for one of them and says how it ended, those that did not end well in BAD too; 1 if none is left.
finish() {
  [ ${#RUNS[@]} -gt 0 ] || return 1
  local pid rc=0
  wait -n -p pid "${!RUNS[@]}" || rc=$?
  [ -n "$pid" ] || return 1
  local name=${RUNS[$pid]}
  [ $rc = 0 ] || BAD+=($name)
  tell $name $rc $(since ${BEGAN[$pid]})
  unset "RUNS[$pid]" "BEGAN[$pid]"
}
all() { while finish; do :; done; }
# go NAME LIMIT COMMAND...: and waits for it.
go() { start "$@"; all; }
tell() {  # name rc seconds
  local f=$OUT/$1 passed failed skipped
  if grep -q -m1 -E '^ *--- |^PASS|^FAIL' $f; then
    passed=$(grep -c -E '^ *--- PASS' $f); failed=$(grep -c -E '^ *--- FAIL' $f); skipped=$(grep -c -E '^ *--- SKIP' $f)
    printf '%-14s rc %d, %6.1f s: %d passed, %d failed, %d skipped\n' $1 $2 $3 $passed $failed $skipped
    [ $failed = 0 ] || grep -E -A3 '^ *--- FAIL|^panic|: off by|other bits' $f | head -12
    [ $2 = 0 ] || tail -2 $f | cut -c1-200
  else
    printf '%-14s rc %d, %6.1f s: %s\n' $1 $2 $3 "$(tail -1 $f | cut -c1-160)"
  fi
}
# artifact NAME...: micro artifacts in $ART: micro16, micro8 (projections and drafter in fewer bits), and of what NINFER_GOLDEN has, mixed and swift.
ART=$OUT/artifacts; mkdir -p $ART
artifact() {
  local n d base=qwen3_8_flash_next_125b_a6b_nvfp4 ninfer=$P/ninfer
  for n in "$@"; do
    [ -s $ART/$n.ninfer ] && continue
    d=$(mktemp -d $ART/x.XXXX)
    case $n in
    micro16) $ninfer convert --quiet --model $REPO/testdata/micro-radixark/checkpoint --out $d/$base.ninfer ;;
    micro8) $ninfer convert --quiet --model $REPO/testdata/micro-radixark/checkpoint --projection-format fp8_e4m3fn_row_bf16 --mtp-expert-format nvfp4 --out $d/${base}_fp8proj_nvfp4mtp.ninfer ;;
    mixed) $ninfer convert --quiet --source-profile mixed --ple $NINFER_GOLDEN/micro-mixed/ples_int4 --model $NINFER_GOLDEN/micro-mixed/checkpoint --out $d/qwen3_8_flash_next_mixed.ninfer ;;
    swift) $ninfer convert --quiet --source-profile swift --model $NINFER_GOLDEN/micro-swift/checkpoint --out $d/swift_1_5_qwen3_8_flash_next_nvfp4.ninfer ;;
    esac > $OUT/convert.$n 2>&1
    mv $d/*.ninfer $ART/$n.ninfer; rm -rf $d
  done
}
# sums: of all tests so far, and what failed or was skipped.
sums() {
  (cd $OUT
   local of; for of in PASS FAIL SKIP; do printf '%d %s, ' $(cat "${NAMES[@]}" | grep -c -E "^ *--- $of") $of; done; echo
   grep -h -E '^ *--- (FAIL|SKIP)' "${NAMES[@]}" | sort | uniq -c | head -30)
}
# verdict: the end of a script, which fails if a command did.
verdict() {
  [ ${#BAD[@]} -eq 0 ] || { printf 'did not end well: %s\n' "${BAD[*]}"; exit 1; }
}
