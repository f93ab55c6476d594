#!/usr/bin/env bash
# What to do first where a GPU can be had for minutes, in two calls of at most 330 seconds. Run it in the checkout:
#
#   scripts/first_gpu_session.sh tests OUT [WHEELS]       the tests marked `gpu`, compiled ones last
#   scripts/first_gpu_session.sh benchmark OUT [WHEELS]   the tests that have failed, and scripts/benchmark_gpu.py
#
# OUT is a folder for logs and results, which the second call reads. WHEELS is a folder with the wheels that the machine lacks
# (`pip download --no-deps`), where it reaches no package index. PRETENDED=1 runs the first call on the pretended device of the
# tests instead, to see whether it works and how long it takes.
set -uo pipefail
cd "$(dirname "$0")/.."
call=${1:?tests or benchmark} out=$(mkdir -p "${2:?folder for results}" && cd "$2" && pwd) wheels=${3:-}
python=${PYTHON:-python3}
export GIT_PYTHON_REFRESH=quiet XLA_PYTHON_CLIENT_PREALLOCATE=false OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$wheels" ]; then
    "$python" -m pip install -q --no-index --no-deps --target "$out/site" "$wheels"/*.whl
    export PYTHONPATH="$out/site:$PYTHONPATH"
fi
"$python" setup.py -q build_ext --inplace > "$out/build.log" 2>&1 || echo "the modules in C cannot be built"

plugins=() not_here=""
if [ -n "${PRETENDED:-}" ]; then
    plugins=(-p support.pretended_cuda.plugin -p support.bare_machine) not_here=" and not Lstm"
else
    { nvidia-smi; command -v gcc c++; } 2>&1 | tee "$out/machine.log"
fi

# Seconds, log, and arguments of pytest; a test that hangs is ended, and those that were not reached are told by the log.
run_tests() {
    local seconds=$1 log=$2; shift 2
    local jobs=() limit=()
    "$python" -c "import xdist" 2> /dev/null && jobs=(-n "${JOBS:-6}")
    "$python" -c "import pytest_timeout" 2> /dev/null && limit=(--timeout 100)
    timeout "$seconds" "$python" -m pytest -q --tb=short -rf -p no:cacheprovider "${plugins[@]}" "${jobs[@]}" "${limit[@]}" "$@" \
        > "$out/$log" 2>&1
    tail -n 25 "$out/$log"
}

start=$SECONDS
case $call in
tests)
    run_tests 170 tests.log -m gpu tests/engines -k "not compiled$not_here"
    [ -n "${PRETENDED:-}" ] || run_tests 120 compiled.log -m gpu tests/engines -k compiled
    ;;
benchmark)
    # All cases of a test, since names of cases have spaces
    failed=$(sed -n 's/^FAILED \([^[ ]*\).*/\1/p' "$out"/tests.log "$out"/compiled.log 2> /dev/null | sort -u)
    # shellcheck disable=SC2086
    [ -z "$failed" ] || run_tests 60 again.log $failed
    timeout 250 "$python" scripts/benchmark_gpu.py --parts waits iterations policies device --out "$out" 2>&1 | tee "$out/benchmark.log"
    ;;
*)
    echo "the first argument is tests or benchmark" >&2
    exit 2
    ;;
esac
echo "$((SECONDS - start)) seconds"
