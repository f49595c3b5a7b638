#!/usr/bin/env bash
# Prove a package on a GPU host: bits against the reference, then speed. No network, no nox.
#
#   ci/gpu/run_package.sh PACKAGE [WHEEL ...]
#
# Results go to $OUT (default build/gpu); $BI_PYTEST: more arguments, e.g. "-n 8". WHEEL: CUDA wheels of the package and
# of bi-kernels; without any they are built here from the sources. One small call of every kernel comes first: a kernel
# that hangs ends the run after a minute. $BI_LIMIT: seconds for the tests (default 600), and for each benchmark.
set -euo pipefail
cd "$(dirname "$0")/../.."
package=${1:?PACKAGE, e.g. bi-kernels}
shift
import_name=${package//-/_}
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$work/site:$PWD/packages/bi-kernels/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # references are small; a thread per core in each of -n processes starves the host

unpack() { python3 -m pip install -q --no-deps --no-index --no-compile --upgrade --target "$work/site" "$@"; }
if [ $# = 0 ]; then
    echo "== build"
    for name in $(printf '%s\n' bi-kernels "$package" | uniq); do
        time BI_BUILD_CUDA=on python3 -m pip wheel -q --no-build-isolation --no-deps --no-index -w "$work/wheels" "packages/$name"
        unpack "$work/wheels/${name//-/_}"-*.whl # the other packages are compiled with bi-kernels' headers
    done
    set -- "$work"/wheels/*.whl
else
    unpack "$@"
fi

echo "== library"
for wheel in "$@"; do
    case $(basename "$wheel") in "$import_name"-*) python3 ci/checks/abi.py --require-library "$wheel" ;; esac
done
python3 - "$import_name" <<'PY' | tee "$OUT/library.json"
import importlib
import json
import sys

native = importlib.import_module(f"{sys.argv[1]}._native").NATIVE
from bi_kernels.runtime.native import require_native

require_native(*native.ops)
print(json.dumps(native.describe(), indent=2))
PY
if command -v cuobjdump >/dev/null; then
    cuobjdump -res-usage "$work/site/$import_name/_C.so" >"$OUT/resources.txt" 2>&1 || true
fi

{
    date -u +%F
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    python3 -c 'import sys, torch, triton; print("python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)'
    python3 -c 'import importlib.metadata as m; print("vllm", m.version("vllm"))' 2>/dev/null || echo "vllm not installed"
    echo "command: bash ci/gpu/run_package.sh $package$(printf ' %s' "${@##*/}")"
} | tee "$OUT/h200.txt"

limit=${BI_LIMIT:-600}
pytest=(python3 -X faulthandler -m pytest -p no:cacheprovider -p no:benchmark -q)
echo "== every kernel once"
timeout -k 5 60 "${pytest[@]}" -m gpu -o faulthandler_timeout=20 "packages/$package/tests/test_sanitizer_cases.py" 2>&1 |
    tee "$OUT/smoke.txt"

status=0
echo "== tests"
marker="gpu and not vllm"
python3 -c 'import vllm' 2>/dev/null && marker=gpu
timeout -k 5 "$limit" "${pytest[@]}" -m "$marker" -o faulthandler_timeout=120 --durations=10 ${BI_PYTEST:-} \
    "packages/$package/tests" 2>&1 | tee "$OUT/tests.txt" || status=$?

echo "== benchmarks"
for source in "packages/$package"/csrc/*.cu; do # other benchmarks need vLLM or several GPUs
    script=packages/$package/benchmarks/bench_$(basename "$source" .cu).py
    timeout -k 5 "$limit" python3 -X faulthandler "$script" --out "$OUT/h200.jsonl" 2>&1 | tee -a "$OUT/bench.txt" || status=$?
done
exit $status
