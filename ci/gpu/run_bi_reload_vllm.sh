#!/usr/bin/env bash
# Prove bi-reload inside a real vLLM 0.26 engine: mHC in its modules, the reload A, B, A with captured graphs, its speed.
#
#   ci/gpu/run_bi_reload_vllm.sh WHEEL...   CUDA wheels of bi-kernels and bi-reload; results go to $OUT (default build/gpu)
#
# vLLM must be importable. Three engines share one GPU; about 4 minutes on a cold machine, most of it compiling.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m pip install -q --no-deps --no-index --no-compile --target "$work/site" "$@"
export PYTHONPATH="$work/site:ci:packages/bi-kernels/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
export VLLM_BATCH_INVARIANT=1 BI_PARTIAL=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_DEEP_GEMM_WARMUP=skip

for seed in 1 2; do
    python3 -m aligned_e2e.vllm_checkpoint "$work/$seed" --size tiny --heads "${HEADS:-64}" --seed $seed --device cuda
done
status=0
BI_RELOAD_A=$work/1 BI_RELOAD_B=$work/2 python3 -m pytest -p no:cacheprovider -p no:benchmark -q -m "gpu and vllm" \
    --durations=10 packages/bi-reload/tests 2>&1 | tee "$OUT/bi-reload-vllm.txt" || status=$?
python3 packages/bi-reload/benchmarks/bench_reload.py --checkpoint "$work/2" --out "$OUT/h200.jsonl" 2>&1 |
    tee "$OUT/bench-reload.txt" || status=$?
exit $status
