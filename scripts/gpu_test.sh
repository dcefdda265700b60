#!/usr/bin/env bash
# Runs everything that needs a GPU: the gtest programs, the Python tests and compute-sanitizer's four
# tools on a small set of shapes; prints one closing line and returns 0 if all passed.
#
#   scripts/gpu_test.sh [options]
#     --build DIR       build folder (default: build/cuda, else build/release)
#     --library FILE    libefla_ops.so (default: DIR/efla/ops/libefla_ops.so; or EFLA_LIBRARY)
#     --gtest FILE      a gtest program, repeatable (default: DIR/efla/kernels/cuda/*_test)
#     --only PARTS      of gtest,python,sanitizer; comma-separated
#     --out DIR         logs (default: a temporary folder)
#     --pytest ARGS     further arguments of pytest, as one word
# A build that was carried here needs --library and --gtest only; shared libraries that this machine
# lacks are looked for beside the two. PYTHON names the interpreter (default .venv/bin/python, else
# python3), EFLA_TEST_REPEATS the number of bitwise repeats (1000), EFLA_TEST_LIMIT the seconds after
# which a part that does not come back is ended and counts as failed (600).
set -uo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT" || exit 1

build=
library=${EFLA_LIBRARY:-}
gtests=()
only=gtest,python,sanitizer
out=
pytest_arguments=
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || die "$1: needs a value (options: --build --library --gtest --only --out --pytest)"
  case $1 in
    --build) build=$2 ;;
    --library) library=$2 ;;
    --gtest) gtests+=("$2") ;;
    --only) only=$2 ;;
    --out) out=$2 ;;
    --pytest) pytest_arguments=$2 ;;
    *) die "unknown option $1 (options: --build --library --gtest --only --out --pytest)" ;;
  esac
  shift 2
done
if [ -z "$build" ]; then
  build=build/cuda
  [ -d "$build" ] || build=build/release
fi
[ -n "$library" ] || library=$build/efla/ops/libefla_ops.so
[ ${#gtests[@]} -gt 0 ] || gtests=("$build"/efla/kernels/cuda/*_test)
out=${out:-$(mktemp -d)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ] && python=$PWD/.venv/bin/python
wants() { [[ ,$only, == *,$1,* ]]; }

device=$("$python" -c 'import torch
print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")' 2>"$out/device.log") ||
  die "$python cannot import torch (see $out/device.log); set PYTHON"
if [ -z "$device" ]; then
  echo "gpu tests: skipped, no CUDA device here"
  exit 0
fi
[ -f "$library" ] || die "$library is not there: build with scripts/build.sh cuda, or pass --library"
library=$(realpath "$library")
for program in "${gtests[@]}"; do
  [ -x "$program" ] || die "$program is no program: build with scripts/build.sh cuda, or pass --gtest"
done

# Only what is missing: the machine's own copies of other libraries come first.
extra=$(dirname "$library"):$(dirname "$(realpath "${gtests[0]}")")
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$extra:/usr/local/cuda/lib64
export EFLA_LIBRARY=$library PYTHONPATH=$ROOT/python${PYTHONPATH:+:$PYTHONPATH}
export PYTHONDONTWRITEBYTECODE=1
# Most of the time goes into the float64 references on the CPU, so the parts run side by side.
cores=$(nproc)
start=$(date +%s)
jobs=()

# name, command...: its output goes to $out/name.log, its exit code to $out/name.rc.
launch() {
  local name=$1
  shift
  (
    timeout --kill-after=10 "${EFLA_TEST_LIMIT:-600}" "$@" >"$out/$name.log" 2>&1
    echo $? >"$out/$name.rc"
  ) &
  jobs+=($!)
}

shards=$((cores >= 12 ? 4 : 1))
if wants gtest; then
  for program in "${gtests[@]}"; do
    for ((i = 0; i < shards; ++i)); do
      name=gtest_$(basename "$program")_$i
      launch "$name" env GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i \
        "$program" "--gtest_output=json:$out/$name.json"
    done
  done
fi

# Some processes at once, in any order: what memory and other copies take then varies, so
# that roles of a kernel come to wait for each other where they hardly do alone.
if wants gtest && [ "$shards" -gt 1 ]; then
  for program in "${gtests[@]}"; do
    for ((i = 0; i < shards; ++i)); do
      launch "shared_$(basename "$program")_$i" "$program" --gtest_brief=1 --gtest_shuffle \
        --gtest_repeat=2 "--gtest_filter=*Scan.Whole*:*Scan.NarrowTiles*:*Scan.Gradients*"
    done
  done
fi

if wants python; then
  workers=()
  if [ "$cores" -ge 8 ] && "$python" -c 'import xdist' 2>/dev/null; then
    workers=(-n 4)
    threads=$((cores / 4))
  fi
  # shellcheck disable=SC2086
  launch python env ${threads:+OMP_NUM_THREADS=$threads} "$python" -m pytest -q -rs \
    -p no:cacheprovider "${workers[@]}" "--junitxml=$out/python.xml" $pytest_arguments \
    tests/python/test_cuda_*.py
fi

# The portable kernels, where others would have run.
if wants python; then
  # shellcheck disable=SC2086
  launch portable env EFLA_CUDA_KERNELS=portable ${threads:+OMP_NUM_THREADS=$threads} "$python" \
    -m pytest -q -rs -p no:cacheprovider "${workers[@]}" "--junitxml=$out/portable.xml" \
    $pytest_arguments -m "not huge" tests/python/test_cuda_accuracy.py \
    tests/python/test_cuda_behaviour.py
fi

tools=(memcheck racecheck initcheck synccheck)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
small=${EFLA_SANITIZER_FILTER:-*/Short:*/PartChunk:*/OneMore:*/NoState:*/Grouped:*/Packed:*/PackedDecay:*/OddSizes-*LongBackward*}
if wants sanitizer && [ -x "$sanitizer" ]; then
  for program in "${gtests[@]}"; do
    for tool in "${tools[@]}"; do
      launch "sanitizer_$(basename "$program")_$tool" "$sanitizer" --tool "$tool" \
        --error-exitcode 99 --print-limit 20 "$program" --gtest_brief=1 "--gtest_filter=$small"
    done
  done
fi
for job in "${jobs[@]}"; do wait "$job"; done

"$python" scripts/gpu_summary.py "$out" "$device" $(($(date +%s) - start))
