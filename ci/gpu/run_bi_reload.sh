#!/usr/bin/env bash
# Prove bi-reload on a GPU host: bits against the reference, then speed. No network, no nox.
#
#   ci/gpu/run_bi_reload.sh BI_KERNELS_WHEEL BI_RELOAD_WHEEL     results go to $OUT (default build/gpu)
#
# Both are CUDA wheels. With vLLM importable the benchmark times its mHC too. $BI_PYTEST: more arguments, e.g. "-n 8".
set -euo pipefail
kernels=$(realpath "$1") reload=$(realpath "$2")
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --no-deps --no-index --no-compile --target "$work/site" "$kernels" "$reload"
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"

echo "== library"
python3 ci/checks/abi.py --require-library "$reload"
python3 - <<'PY' | tee "$OUT/library.json"
import json
from bi_reload import _ops
from bi_reload._native import NATIVE
from bi_kernels.runtime.native import require_native

require_native(*(f"bi_reload::{name}" for name in _ops.__all__))
print(json.dumps(NATIVE.describe(), indent=2))
PY

{
    date -u +%F
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    python3 -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'
    python3 -c 'import importlib.metadata as m; print("vllm", m.version("vllm"))' 2>/dev/null || echo "vllm not installed"
    echo "command: bash ci/gpu/run_bi_reload.sh $(basename "$kernels") $(basename "$reload")"
} | tee "$OUT/h200.txt"

status=0
echo "== tests"
python3 -m pytest -p no:cacheprovider -p no:benchmark -q -m "gpu and not vllm" --durations=10 ${BI_PYTEST:-} \
    packages/bi-reload/tests 2>&1 | tee "$OUT/tests.txt" || status=$?

echo "== benchmarks"
benchmarks=packages/bi-reload/benchmarks
if python3 -c 'import vllm' 2>/dev/null; then
    # vLLM compiles a kernel per shape, seconds each and one after another in one process.
    pids=()
    for hidden in 2048 4096 7168; do
        for tokens in "1 8" "16 32" 128 1024 4096; do
            for op in pre post head; do
                python3 $benchmarks/bench_mhc_$op.py --compile --hidden $hidden --tokens $tokens \
                    >"$work/compile.$op.$hidden.${tokens// /-}" 2>&1 || exit 1
            done &
            pids+=($!)
        done
    done
    for pid in "${pids[@]}"; do wait "$pid" || { tail -n 5 "$work"/compile.*; status=1; }; done
fi
for op in mhc_pre mhc_post mhc_head fingerprint padded_copy; do
    python3 $benchmarks/bench_$op.py --out "$OUT/h200.jsonl" 2>&1 | tee -a "$OUT/bench.txt" || status=$?
done
exit $status
