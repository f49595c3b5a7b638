#!/usr/bin/env bash
# Prove bi-reload inside a real vLLM 0.26 engine: mHC in its modules, the reload A, B, A with captured
# graphs, the speed of both against vLLM's own.
#
#   ci/gpu/run_bi_reload_vllm.sh BI_KERNELS_WHEEL BI_RELOAD_WHEEL     results go to $OUT (default build/gpu)
#
# Both are CUDA wheels; vLLM must be importable. Every part has a hard limit, and says where it stands when it meets it.
# Three engines share one GPU: about 4 minutes on a cold machine, most of it compiling. HEADS=32 pads the heads.
set -euo pipefail
wheels=$(realpath "$@")
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m pip install -q --no-deps --no-index --no-compile --target "$work/site" $wheels
export PYTHONPATH="$work/site:ci:packages/bi-kernels/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONFAULTHANDLER=1
export VLLM_BATCH_INVARIANT=1 BI_PARTIAL=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_DEEP_GEMM_WARMUP=skip

echo "== each mHC kernel once"  # a kernel that hangs is named here, and nothing else is started
timeout -s KILL 90 python3 packages/bi-reload/tests/reload_engine.py smoke 2>&1 | tee "$OUT/smoke.txt"

for seed in 1 2; do
    timeout 120 python3 -m aligned_e2e.vllm_checkpoint "$work/$seed" --size tiny --heads "${HEADS:-64}" --seed $seed --device cuda
done
status=0
pytest="python3 -m pytest -p no:cacheprovider -p no:benchmark -v --durations=10 -o faulthandler_timeout=60"
echo "== mHC in vLLM's modules"
timeout -s KILL 240 $pytest -m gpu packages/bi-reload/tests/test_vllm_mhc_layers.py 2>&1 | tee "$OUT/layers.txt" || status=$?
echo "== engines"
BI_RELOAD_A=$work/1 BI_RELOAD_B=$work/2 BI_RELOAD_LIMIT=400 timeout -s KILL 430 $pytest -o faulthandler_timeout=0 -m gpu \
    --basetemp "$work/pytest" packages/bi-reload/tests/test_vllm_engine.py 2>&1 | tee "$OUT/engine.txt" || status=$?
tar -C "$work/pytest" -czf "$OUT/records.tgz" . || status=$?
echo "== mHC against vLLM's"
benchmarks=packages/bi-reload/benchmarks
pids=() # vLLM compiles a kernel per shape, seconds each and one after another in one process
for hidden in 2048 4096 7168; do
    for tokens in "1 8" "16 32" 128 1024 4096; do
        for op in pre post head; do
            timeout -s KILL 240 python3 $benchmarks/bench_mhc_$op.py --compile --hidden $hidden --tokens $tokens \
                >"$work/compile.$op.$hidden.${tokens// /-}" 2>&1 || exit 1
        done &
        pids+=($!)
    done
done
for pid in "${pids[@]}"; do wait "$pid" || { tail -n 5 "$work"/compile.*; status=1; }; done
for op in pre post head; do
    timeout -s KILL 120 python3 $benchmarks/bench_mhc_$op.py --out "$OUT/h200.jsonl" 2>&1 | tee -a "$OUT/bench-mhc.txt" || status=$?
done
echo "== speed of a reload"
timeout -s KILL 400 python3 packages/bi-reload/benchmarks/bench_reload.py --checkpoint "$work/2" --out "$OUT/h200.jsonl" 2>&1 |
    tee "$OUT/bench-reload.txt" || status=$?
exit $status
