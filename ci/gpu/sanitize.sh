#!/usr/bin/env bash
# compute-sanitizer over one small call of every kernel of a package: memcheck, racecheck, initcheck, synccheck.
#
#   ci/gpu/sanitize.sh PACKAGE [WHEEL...]
#
# Logs go to $OUT (default build/gpu). WHEEL: CUDA wheels of bi-kernels and of the package; without any the package must
# be importable. No vLLM. The tools run side by side, each in processes and a CUDA context of its own: none reads
# counters or clocks, and most of their time is the host's. $BI_LIMIT: seconds for each (default 300).
set -euo pipefail
cd "$(dirname "$0")/../.."
package=${1:?PACKAGE, e.g. bi-kernels}
shift
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ $# != 0 ]; then
    python3 -m pip install -q --no-deps --no-index --no-compile --target "$work/site" "$@"
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
fi
# Each torch allocation is then one of the driver's, whose bounds the tools know.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
tools=(memcheck racecheck initcheck synccheck)
running=()
for tool in "${tools[@]}"; do
    # torch's kernels are not under test; only initcheck must see what they write.
    kernels=(--kernel-name kernel_substring=_ZN2bi)
    [ "$tool" = initcheck ] && kernels=()
    timeout -k 5 "${BI_LIMIT:-300}" compute-sanitizer --tool "$tool" --error-exitcode 9 "${kernels[@]}" \
        python3 -m pytest -p no:cacheprovider -p no:benchmark -q --durations=5 -m gpu \
        "packages/$package/tests/test_sanitizer_cases.py" >"$OUT/sanitizer-$package-$tool.txt" 2>&1 &
    running+=($!)
done
status=0
for i in "${!tools[@]}"; do
    log="$OUT/sanitizer-$package-${tools[i]}.txt"
    code=0
    wait "${running[i]}" || code=$?
    echo "== ${tools[i]}: exit $code (124: past the limit)"
    if [ $code = 0 ]; then
        grep -E "passed|SUMMARY" "$log" || true
    else
        status=1
        tail -n 20 "$log"
    fi
done
exit $status
