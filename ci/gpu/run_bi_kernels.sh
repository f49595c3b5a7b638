#!/usr/bin/env bash
# Prove bi-kernels on a GPU host: bits against the reference, then speed. No network, no nox.
#
#   ci/gpu/run_bi_kernels.sh [WHEEL]     results go to $OUT (default build/gpu)
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
export PYTHONPATH="$work/site"

echo "== library"
python3 ci/checks/abi.py --require-library "$wheel"
python3 - <<'PY' | tee "$OUT/library.json"
import json
from bi_kernels._native import NATIVE
from bi_kernels.runtime.native import require_native

require_native("bi_kernels::fused_silu_mul_per_token_group_quant")
print(json.dumps(NATIVE.describe(), indent=2))
PY
if command -v cuobjdump >/dev/null; then
    cuobjdump -res-usage "$work/site/bi_kernels/_C.so" >"$OUT/resources.txt" 2>&1 || true
fi

status=0
echo "== tests"
python3 -m pytest -p bi_kernels.testing.pytest_plugin -p no:cacheprovider -q -m gpu --durations=10 \
    packages/bi-kernels/tests 2>&1 | tee "$OUT/tests.txt" || status=$?

echo "== benchmark"
python3 packages/bi-kernels/benchmarks/bench_silu_mul_quant.py --out "$OUT/h200.jsonl" 2>&1 | tee "$OUT/bench.txt" || status=$?
exit $status
