#!/usr/bin/env bash
# Prove the hooks of a package inside vLLM 0.26 on a GPU host, or time them there. No network, no nox.
#
#   ci/gpu/run_vllm.sh PACKAGE tests|bench|dispatch WHEEL...      results go to $OUT (default build/gpu)
#
# tests     every kernel once, then the package's tests in vLLM's layers and engines: minutes on a machine without
#           compile caches. $LIMIT: seconds for them (default 540); $BI_PYTEST: more arguments, e.g. "-k padded"
# bench     against vLLM's own kernels and reload; nothing else may use the GPU
# dispatch  bi-moe-deepep on two GPUs of one host: NCCL, and DeepEP if its wheel is among WHEEL...; first alone, then
#           inside vLLM, for which WHEEL... has all four packages. $LIMIT: seconds for vLLM (default 420). With one GPU
#           only NCCL, alone: what a slice costs a rank that exchanges with itself
#
# WHEEL... are CUDA wheels of bi-kernels and PACKAGE; vLLM must be importable. Every step has a hard limit and a log.
set -uo pipefail
cd "$(dirname "$0")/../.."
package=${1:?PACKAGE, e.g. bi-reload}
stage=${2:?tests, bench or dispatch}
shift 2
OUT=$(realpath -m "${OUT:-build/gpu}")
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --no-deps --no-index --no-compile --target "$work/site" "$@" || exit 1
export PYTHONPATH="$work/site:$PWD/ci:$PWD/packages/bi-kernels/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
export BI_PARTIAL=1 VLLM_BATCH_INVARIANT=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_DEEP_GEMM_WARMUP=skip VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_BREAKABLE_CUDAGRAPH=1
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 # multicast stays off
tests=packages/$package/tests
benchmarks=packages/$package/benchmarks
pytest=(python3 -m pytest -p no:cacheprovider -p no:benchmark -v --tb=short --durations=10)
status=0

# step SECONDS LOG COMMAND...: stops a step that hangs, keeps what it printed, and goes on.
step() {
    local limit=$1 log=$OUT/$2
    shift 2
    echo "== $(date +%T) $*"
    timeout --kill-after=5 "$limit" "$@" >>"$log" 2>&1
    local code=$?
    grep -E "PASSED|FAILED|ERROR|^E  |passed|failed|Timeout" "$log" | cut -c1-250 | tail -n 100
    [ "$code" = 0 ] || { status=$code && tail -n 5 "$log" && echo "-- exit $code (124: over $limit s)"; }
    return "$code"
}

# What vLLM compiles for mHC depends on the hidden size and on how it splits the sum for T tokens; T itself is no part of
# a kernel. One process for each kernel or two: they take seconds each, and in one process they come one after another.
compile_mhc() (
    for hidden in 4096 2048 7168; do
        for work in "mhc_pre:1 128" mhc_pre:1024 mhc_pre:4096 mhc_post_pre:1 mhc_post_pre:8 \
            "mhc_pre_broadcast:1 1024" "mhc_pre_broadcast mhc_post mhc_head:4096"; do
            # shellcheck disable=SC2086  # words are arguments: ops, then tokens
            VLLM_PLUGINS=none timeout 150 python3 "$benchmarks/mhc.py" --compile --hidden $hidden \
                --ops ${work%:*} --tokens ${work#*:} &
        done
    done >"$OUT/compile.txt" 2>&1
    wait
)

case $package:$stage in
*:tests)
    step 90 smoke.txt "${pytest[@]}" -m gpu -o faulthandler_timeout=20 "$tests/test_sanitizer_cases.py" || exit 1
    step "${LIMIT:-540}" tests.txt "${pytest[@]}" -m "vllm and not two_gpus" -s -o faulthandler_timeout=120 \
        ${BI_PYTEST:-} "$tests"
    ;;
bi-sparse-attn:bench)
    step 120 bench.txt python3 "$benchmarks/vllm_attention.py" --out "$OUT/vllm/h200.jsonl"
    ;;
bi-moe-deepep:bench)
    step 180 bench.txt env -u VLLM_BATCH_INVARIANT python3 "$benchmarks/bench_vllm_layers.py" --out "$OUT/h200.jsonl"
    ;;
bi-reload:bench)
    # The engines start while kernels are compiled; they stand idle while mHC is timed, and are timed when it is done.
    touch "$work/hold"
    : >"$OUT/reload.txt"
    {
        step 60 checkpoint.txt python3 -m aligned_e2e.vllm_checkpoint "$work/checkpoint" --seed 2 --device cuda &&
            step 400 reload.txt python3 "$benchmarks/bench_reload.py" --checkpoint "$work/checkpoint" \
                --hold "$work/hold" --out "$OUT/h200.jsonl"
    } &
    reload=$!
    compile_mhc
    grep -E "^[A-Za-z.]*(Error|Exception)\b" "$OUT/compile.txt" | sort | uniq -c | cut -c1-250
    for ((i = 0; i < 120; i++)); do # past that, better disturbed than not timed at all
        grep -q "engines stand" "$OUT/reload.txt" || ! kill -0 "$reload" 2>/dev/null && break
        sleep 1
    done
    step 150 bench.txt env VLLM_PLUGINS=none python3 "$benchmarks/mhc.py" --out "$OUT/h200.jsonl"
    rm -f "$work/hold"
    wait "$reload" || status=$?
    ;;
bi-moe-deepep:dispatch)
    ranks=$(nvidia-smi --list-gpus | wc -l)
    [ "$ranks" -le 2 ] || ranks=2
    step 150 dispatch.txt python3 "$benchmarks/bench_dispatch.py" --ranks "$ranks" --out "$OUT/h200.jsonl"
    [ "$ranks" = 2 ] || { echo "one GPU: expert parallelism inside vLLM needs two, and was not run" && exit "$status"; }
    export BI_EP_LIMIT=$((${LIMIT:-420} - 30)) # for the engines, the rest for the checkpoint
    step "${LIMIT:-420}" engines.txt "${pytest[@]}" -m two_gpus -s "$tests/test_vllm_expert_parallel.py"
    ;;
*)
    echo "PACKAGE STAGE: $package has no $stage" >&2
    exit 2
    ;;
esac
exit $status
