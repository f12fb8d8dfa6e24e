#!/usr/bin/env bash
# Tests and benchmarks of the CUDA backend in one go; half an hour on a GPU is enough. Ends with a short table.
#
#   benchmarks/gpu.sh [OUT]        OUT: folder for logs and JSON, benchmarks/results if left out
#   PARTS="tests bench"            what to run: tests, sanitizer, bench
#   PYTHON=python3 SHARDS=12       interpreter; processes that run the tests side by side
#   COMMIT=abc123                 of the sources, where git does not know it
#   TESTS="tests/gpu"              files and folders of tests, in this order
#   LIMIT=900                      seconds after which the tests are stopped; the last one of each process is named
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
shards=${SHARDS:-12}
parts=${PARTS:-tests sanitizer bench}
logs=$(mktemp -d)
mkdir -p "$out"
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
unset TRITON_INTERPRET
failed=0
"$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null || { echo "gpu.sh: torch finds no GPU here"; exit 1; }

shard() { # NAME COMMAND…: the command once per shard, side by side; prints the failures and one line
  local name=$1 start=$SECONDS
  shift
  for ((i = 0; i < shards; i++)); do
    { SHARD=$i/$shards OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 timeout -k 10 -s INT "${LIMIT:-900}" "$@" || {
      echo "ended with $?, at $(grep -oE "tests/[^ ]+::[^ ]+" "$logs/$name.$i" | tail -1)"
    }; } >"$logs/$name.$i" 2>&1 &
  done
  wait
  grep -h "^ended with" "$logs/$name".*
  cat "$logs/$name".* | grep -E "^(FAILED|ERROR)|ERROR SUMMARY: [1-9]|Invalid|leaked" | sort | uniq | head -40
  grep -hE "terminate called|what\(\)|^Fatal Python error|CUDA error" "$logs/$name".* | cut -c1-300 | sort | uniq -c | head -10
  grep -hE "^(E  |FAILED|ERROR|ended with|terminate called|Fatal Python error)|what\(\)" "$logs/$name".* |
    cut -c1-300 >>"$out/gpu_failures.txt"
  local passed bad
  passed=$(cat "$logs/$name".* | grep -oE "[0-9]+ passed" | awk '{n += $1} END {print n + 0}')
  bad=$(cat "$logs/$name".* | grep -oE "[0-9]+ (failed|error)" | awk '{n += $1} END {print n + 0}')
  errors=$(cat "$logs/$name".* | grep -oE "ERROR SUMMARY: [0-9]+" | awk '{n += $3} END {print n + 0}')
  ended=$(cat "$logs/$name".* | grep -c "^ended with")
  echo "$name: $passed passed, $bad failed, $errors errors of memory, $ended of $shards processes ended badly," \
    "$((SECONDS - start)) s, $(date +%F)" | tee -a "$out/gpu_tests.txt"
  [ "$bad" = 0 ] && [ "$errors" = 0 ] && [ "$ended" = 0 ] || failed=1
}

"$python" benchmarks/gpu_evidence.py write "$out"
: >"$out/gpu_tests.txt"
: >"$out/gpu_failures.txt"
case " $parts " in *" tests "*)
  shard tests "$python" -m pytest -v -p no:cacheprovider --continue-on-collection-errors \
    -m "cuda and not slow" ${TESTS:-tests/gpu}
  ;; esac
case " $parts " in *" sanitizer "*)
  if command -v compute-sanitizer >/dev/null; then
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 shard sanitizer compute-sanitizer --tool memcheck "$python" -m pytest -v \
      -p no:cacheprovider -m cuda tests/gpu/test_cases.py -k "ragged or decode or pages or empty or slots"
  else
    echo "sanitizer: compute-sanitizer is not installed here" | tee -a "$out/gpu_tests.txt"
  fi
  ;; esac
case " $parts " in *" bench "*)
  for script in benchmarks/ops/gpu_*.py; do
    name=$(basename "$script" .py)
    [ "$name" = gpu_common ] && continue
    "$python" "$script" --json "$out/$name.json" || failed=1
  done
  "$python" benchmarks/gpu_table.py "$out" || failed=1
  ;; esac
[ -s "$out/gpu_failures.txt" ] || rm "$out/gpu_failures.txt"
cat "$out/gpu_tests.txt"
exit $failed
