#!/usr/bin/env bash
# Build the C extension modules with AddressSanitizer and UBSan, by each compiler that is installed, and run their tests:
#
#     scripts/sanitize.sh .venv/bin
#
# The build is a copy of the package in `build/sanitize`, which the tests import in place of the checkout. A mistake that a
# sanitizer finds ends the process, and the report is printed. Linux only.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "${1:-.venv/bin}" && pwd)
tests=(tests/engines tests/envs/test_flags.py tests/distributed/test_shared_sum.py tests/memory/test_linear_rnns.py -k "not compile and not gpu" -m "not slow" -n "${JOBS:-2}" --dist loadgroup -x -q -p no:cacheprovider)
found=0

build() { # compiler, folder, further flags
    rm -rf "$2"
    CC=$1 CFLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer ${3:-}" \
        "$bin/python" setup.py -q build --build-base "$2" --build-lib "$2/lib"
}

run_tests() { # folder, runtime library of AddressSanitizer
    # The interpreter allocates by malloc and leaks on purpose: the tests count what the module does not give back. torch
    # throws C++ exceptions, which AddressSanitizer looks for in libstdc++ when it starts.
    export LD_PRELOAD="$2 libstdc++.so.6" PYTHONPATH="$PWD/$1/lib" PYTHONMALLOC=malloc OMP_NUM_THREADS=1
    export ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:log_path=$PWD/$1/report"
    export UBSAN_OPTIONS="print_stacktrace=1:log_path=$PWD/$1/report"
    # Without the module, the tests would be skipped. `python -m pytest` would import the checkout.
    (cd / && "$bin/python" -c "import sb3_ppo_ext.engines.native._mlp as m; assert '$1' in m.__file__, m.__file__") &&
        "$bin/pytest" "${tests[@]}"
}

for compiler in gcc clang; do
    command -v "$compiler" > /dev/null || continue
    found=1 folder=build/sanitize/$compiler
    if [ "$compiler" = gcc ]; then
        build gcc "$folder"
        library=$(gcc -print-file-name=libasan.so)
    else
        build clang "$folder" -shared-libasan
        library=$(clang -print-file-name="libclang_rt.asan-$(uname -m).so")
    fi
    echo "Tests of the extension module by $compiler with sanitizers"
    (run_tests "$folder" "$library") || { cat "$folder"/report* >&2 || true; exit 1; }
done
[ "$found" = 1 ] || { echo "Install gcc or clang" >&2; exit 1; }
