#!/usr/bin/env bash
# Prove bi-kernels on a GPU host: bits against the reference, then speed. No network, no nox.
#
#   ci/gpu/run_bi_kernels.sh [WHEEL]     results go to $OUT (default build/gpu); $BI_PYTEST: more arguments, e.g. "-n 8"
#
# WHEEL is a CUDA wheel of bi-kernels; without it one is built here from the sources.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

wheel=${1:-}
if [ -z "$wheel" ]; then
    echo "== build"
    time BI_BUILD_CUDA=on python3 -m pip wheel -q --no-build-isolation --no-deps --no-index -w "$work/wheels" packages/bi-kernels
    wheel=$(echo "$work"/wheels/*.whl)
fi
python3 -m pip install -q --no-deps --no-index --no-compile --target "$work/site" "$wheel"
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"

echo "== library"
python3 ci/checks/abi.py --require-library "$wheel"
python3 - <<'PY' | tee "$OUT/library.json"
import json
from bi_kernels._native import NATIVE
from bi_kernels.runtime.native import require_native

require_native("bi_kernels::fused_silu_mul_per_token_group_quant", "bi_kernels::fixed_order_mm")
print(json.dumps(NATIVE.describe(), indent=2))
PY
if command -v cuobjdump >/dev/null; then
    cuobjdump -res-usage "$work/site/bi_kernels/_C.so" >"$OUT/resources.txt" 2>&1 || true
fi

{
    date -u +%F
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    python3 -c 'import sys, torch, triton; print("python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)'
    python3 -c 'import importlib.metadata as m; print("vllm", m.version("vllm"))' 2>/dev/null || echo "vllm not installed"
    echo "command: bash ci/gpu/run_bi_kernels.sh $(basename "$wheel")"
} | tee "$OUT/h200.txt"

status=0
echo "== tests"
marker="gpu and not vllm"
python3 -c 'import vllm' 2>/dev/null && marker=gpu
python3 -m pytest -p no:cacheprovider -p no:benchmark -q -m "$marker" --durations=10 ${BI_PYTEST:-} \
    packages/bi-kernels/tests 2>&1 | tee "$OUT/tests.txt" || status=$?

echo "== benchmarks"
python3 packages/bi-kernels/benchmarks/bench_silu_mul_quant.py --out "$OUT/h200.jsonl" 2>&1 | tee "$OUT/bench.txt" || status=$?
python3 packages/bi-kernels/benchmarks/bench_fixed_order_mm.py --out "$OUT/h200.jsonl" 2>&1 | tee -a "$OUT/bench.txt" || status=$?
exit $status
