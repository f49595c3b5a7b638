#!/usr/bin/env bash
# compute-sanitizer over one small call of every kernel of a package: memcheck, racecheck, initcheck, synccheck.
#
#   ci/gpu/sanitize.sh PACKAGE       the package must be importable; logs go to $OUT (default build/gpu)
set -euo pipefail
cd "$(dirname "$0")/../.."
package=${1:?PACKAGE, e.g. bi-kernels}
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
# Each torch allocation is then one of the driver's, whose bounds the tools know.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
status=0
for tool in memcheck racecheck initcheck synccheck; do
    log="$OUT/sanitizer-$package-$tool.txt"
    echo "== $tool"
    # torch's kernels are not under test; only initcheck must see what they write.
    kernels=(--kernel-name kernel_substring=_ZN2bi)
    [ "$tool" = initcheck ] && kernels=()
    if compute-sanitizer --tool "$tool" --error-exitcode 9 "${kernels[@]}" \
        python3 -m pytest -p no:cacheprovider -p no:benchmark -q -m gpu \
        "packages/$package/tests/test_sanitizer_cases.py" >"$log" 2>&1; then
        tail -n 1 "$log"
    else
        status=1
        tail -n 20 "$log"
    fi
done
exit $status
