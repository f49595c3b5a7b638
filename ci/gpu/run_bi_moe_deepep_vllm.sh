#!/usr/bin/env bash
# Prove the hooks and transports of bi-moe-deepep on a GPU host, in two stages; every step has a time limit.
#
#   ci/gpu/run_bi_moe_deepep_vllm.sh vllm|dispatch WHEEL...     results go to $OUT (default build/gpu)
#
# vllm      one GPU and vLLM 0.26 on the import path: the hooks in vLLM's layers, then their benchmark. Cold, DeepGEMM
#           compiles some fifty kernels, of a few seconds each; its cache is packed into $OUT for the next machine.
# dispatch  two GPUs of one host: NCCL, and DeepEP if its wheel is among WHEEL...
#
# WHEEL... are CUDA wheels of bi-kernels and bi-moe-deepep.
set -uo pipefail
cd "$(dirname "$0")/../.."
stage=${1:?vllm or dispatch}
shift
OUT=$(realpath -m "${OUT:-build/gpu}")
mkdir -p "$OUT"
site=$(mktemp -d)
python3 -m pip install -q --no-deps --no-index --no-compile --target "$site" "$@" || exit 1
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}:$PWD/packages/bi-kernels/benchmarks" PYTHONFAULTHANDLER=1
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 # multicast stays off
package=packages/bi-moe-deepep
status=0

# step SECONDS LOG COMMAND...: stops a step that hangs, keeps what it printed, and goes on.
step() {
    local limit=$1 log=$OUT/$2
    shift 2
    echo "== $(date +%T) $*"
    timeout --kill-after=5 "$limit" "$@" >"$log" 2>&1
    local code=$?
    tail -n 25 "$log"
    [ "$code" = 0 ] || { status=$code && echo "-- exit $code (124: over $limit s)"; }
    return "$code"
}
# A test that is still running after a minute prints where.
run_tests=(python3 -m pytest -p no:cacheprovider -p no:benchmark -q -o faulthandler_timeout=60 --durations=8)

case $stage in
vllm)
    export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_DEEP_GEMM_WARMUP=skip VLLM_ENABLE_V1_MULTIPROCESSING=0
    layers=("${run_tests[@]}" -s -m vllm "$package/tests/test_vllm_layers.py")
    step 90 smoke.txt "${layers[@]}" -k "patches or smoke or gate" || exit 1
    step "${LIMIT:-420}" layers.txt "${layers[@]}" -k "not patches and not smoke and not gate"
    step 120 bench.txt env -u VLLM_BATCH_INVARIANT python3 "$package/benchmarks/bench_vllm_layers.py" --out "$OUT/h200.jsonl"
    tar -C "${VLLM_CACHE_ROOT:-$HOME/.cache/vllm}" -cJf "$OUT/deep_gemm_cache.tar.xz" deep_gemm
    ;;
dispatch)
    step 150 dispatch.txt python3 "$package/benchmarks/bench_dispatch.py" --ranks 2 --out "$OUT/h200.jsonl"
    ;;
*)
    echo "stage: expected vllm or dispatch, got $stage" >&2
    exit 2
    ;;
esac
exit $status
