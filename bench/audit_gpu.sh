#!/usr/bin/env bash
# The audits that a card owes, side by side: the default one eagerly and from captured graphs, three and eight uneven rows in both.
#
#   OUT=DIR bash bench/audit_gpu.sh [SECONDS]      # default 560: what still runs then is told to stop, and writes what it has
#
# The eager run of a pair computes the reference; its replayed twin starts once that is in the cache. Only the first run has the
# operations judged alone: they do not depend on rows or on decode. Writes OUT/audits.txt (verdicts, times, what was red), a
# report.html of the first run and a run.jsonl.gz of each: 8 files. Exit 0: every verdict is pass.
# DEVICE=cpu LONG=2 SHORT=2 ARGS="--layers 0" tries the script without a card.
set -u
cd "$(dirname "$0")/.."
LIMIT=${1:-560} DEVICE=${DEVICE:-cuda} LONG=${LONG:-130} SHORT=${SHORT:-24} ARGS=${ARGS:-} OUT=${OUT:-reports/runs/audits}
PYTHON=${PYTHON:-python3} WORK=$(mktemp -d) BEGAN=$SECONDS
export OMP_NUM_THREADS=2 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT"

REST=() THREE=() EIGHT=()
for file in parity/test_operations_*.py; do
  case $file in *_blocks.py | *_whole.py) ;; *) REST+=(--ignore "$file") ;; esac
done
for rows in medium.txt:0:129 medium.txt:200:328 medium.txt:400:407; do THREE+=(--prompt "$rows"); done
for count in 1 3 4 5 64 127 128 129; do EIGHT+=(--prompt "medium.txt:$((count * 3)):$((count * 4))"); done

left() { echo $((LIMIT - SECONDS + BEGAN)); }

# Kernels once, for the card and for the CPU device beside it.
$PYTHON -c "
from production.launch import open_device
for name in dict.fromkeys(['$DEVICE', 'cpu']):
    open_device(name).prebuild()
" >"$WORK/build.log" 2>&1 || cat "$WORK/build.log"
echo "kernels built: $((SECONDS - BEGAN)) s"

# audit NAME STEPS [options]: one run; its wall time goes to NAME.seconds
audit() {
  local name=$1 steps=$2 began=$SECONDS
  shift 2
  timeout -s TERM -k 20 "$(left)" $PYTHON -m pytest parity/ --device "$DEVICE" --steps "$steps" --report "$WORK/$name" --durations 12 $ARGS "$@" >"$WORK/$name.log" 2>&1
  echo "exit $? after $((SECONDS - began)) s, begun at $((began - BEGAN)) s" >"$WORK/$name.seconds"
}

# pair NAME STEPS [options]: eager; replayed as soon as the reference is known
pair() {
  local name=$1 steps=$2
  shift 2
  local own=("$@") again=("$@")
  if [ "$name" = default ]; then again+=("${REST[@]}"); else own+=("${REST[@]}") again+=("${REST[@]}"); fi
  audit "$name-eager" "$steps" --decode eager "${own[@]}" &
  local first=$!
  while kill -0 $first 2>/dev/null && ! grep -q "decode: step $steps of $steps" "$WORK/$name-eager.log" 2>/dev/null && [ "$(left)" -gt $((LIMIT / 2)) ]; do sleep 1; done
  audit "$name-replay" "$steps" --decode replay "${again[@]}"
  wait $first
}

pair default "$LONG" &
pair three "$SHORT" "${THREE[@]}" &
pair eight "$SHORT" "${EIGHT[@]}" &
wait

BAD=0
{
  for name in {default,three,eight}-{eager,replay}; do
    verdict=$(grep '^verdict:' "$WORK/$name.log" | tail -1)
    [ "$verdict" = "verdict: pass" ] || BAD=1
    echo "== $name: ${verdict:-no verdict}; $(cat "$WORK/$name.seconds" 2>/dev/null); $(grep -E '[0-9]+ (passed|failed)' "$WORK/$name.log" | tail -1)"
    grep -E '^(first divergence|because|replay it alone|production does not run)' "$WORK/$name.log"
    grep -E '^  (prefill|decode|greedy):' "$WORK/$name.log" | grep -v 'step .*0 of' | head -12
    grep -E '^(FAILED|ERROR)' "$WORK/$name.log" | head -20
  done
  for name in {default,three,eight}-{eager,replay}; do
    echo "#### $name"
    tail -c 6000 "$WORK/$name.log"
  done
} >"$OUT/audits.txt"
for name in {default,three,eight}-{eager,replay}; do
  [ -f "$WORK/$name/run.jsonl" ] && gzip -c "$WORK/$name/run.jsonl" >"$OUT/$name.jsonl.gz"
done
[ -f "$WORK/default-eager/report.html" ] && cp "$WORK/default-eager/report.html" "$OUT/report.html"
grep -B1 -A40 '^== ' "$OUT/audits.txt" | sed '/^####/,$d'
echo "all: $((SECONDS - BEGAN)) s"
rm -rf "$WORK"
exit $BAD
