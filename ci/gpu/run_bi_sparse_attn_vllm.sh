#!/usr/bin/env bash
# Prove the attention hooks of bi-sparse-attn inside vLLM 0.26.0, on one Hopper GPU. No network, no nox.
#
#   ci/gpu/run_bi_sparse_attn_vllm.sh WHEEL ...       CUDA wheels of bi-kernels and bi-sparse-attn
#
# vLLM is importable already; its environment is set here. Results go to $OUT (default build/gpu). Each step has a hard
# limit in seconds, $SECONDS_ENGINE (default 420) that of the engine, of which about 150 are compiling on a machine without
# caches. A kernel that does not answer in ten seconds ends the run before the engine waits for it; a test that hangs
# prints every thread's stack.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --no-deps --no-index --no-compile --target "$work/site" "$@" || exit 1
export PYTHONPATH="$work/site:ci${PYTHONPATH:+:$PYTHONPATH}"
export BI_PARTIAL=1 VLLM_BATCH_INVARIANT=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_DEEP_GEMM_WARMUP=skip
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_BREAKABLE_CUDAGRAPH=1
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

tests=packages/bi-sparse-attn/tests
pytest="python3 -X faulthandler -m pytest -p no:cacheprovider -p no:benchmark -v -s --tb=short --durations=15 -o faulthandler_timeout=90"
status=0
{ date -u '+%F %T'; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; } | tee "$OUT/vllm-attention.txt"

echo "== every kernel answers"
for op in top_k combine gather slots mm; do
    timeout 30 python3 - "$op" <<'PY' || { echo "$op does not answer"; exit 1; }
import sys

import torch

import bi_kernels
import bi_sparse_attn as ours

ints = lambda *values: torch.tensor(values, dtype=torch.int32)
cache = torch.zeros(4, ours.kv_block_bytes(64), dtype=torch.uint8)
slots = torch.arange(4 * 128).view(4, 128) % 256
dead = torch.full((4, 128), -1)


def decode_slots(positions, requests, alive, table):
    out = [torch.full((4, 128), 7, device=table.device) for _ in range(2)]
    ours.fill_decode_slots_(*out, None, positions, requests, alive, table, table, compress_ratio=128,
                            compressed_block_size=2, window_block_size=64)  # fmt: skip
    return out


CALLS = {
    "top_k": lambda x, s, e: [ours.top_k_per_row_prefill(x, s, e, 512)],
    "combine": lambda k, p, g, o: ours.combine_topk_swa(
        k, p, g, compress_ratio=4, window_size=128, compressed_rows=500, row_offset=o
    ),
    "gather": lambda c, w, d: [
        ours.gather_decode_kv(c, c, s, s, compressed_block_size=64, window_block_size=64).lengths for s in (w, d)
    ],
    "slots": decode_slots,
    "mm": lambda x, w: [bi_kernels.fixed_order_mm(x, w) * 0],
}
INPUTS = {
    "top_k": (torch.randn(5, 20000).relu(), ints(0, 0, 0, 3, 0), ints(20000, 0, 700, 515, 9000)),
    "combine": (ints(0, 4, -1).view(3, 1), ints(700, 40, 3), ints(500, 0, 0), ints(0, 5000, 10000)),
    "gather": (cache, slots, dead),
    "slots": (torch.tensor([0, 127, 300, 9]), ints(0, 1, 1, 0), torch.tensor([True, True, True, False]), ints(*range(12)).view(2, 6)),
    "mm": (torch.randn(3, 2048).bfloat16(), torch.randn(512, 2048).bfloat16()),
}
inputs = INPUTS[sys.argv[1]]
want = CALLS[sys.argv[1]](*inputs)
got = CALLS[sys.argv[1]](*(t.cuda() for t in inputs))
assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True)), sys.argv[1]
print(sys.argv[1], "equal")
PY
done
timeout 60 python3 - <<'PY' || { echo "FlashMLA does not answer"; exit 1; }
import torch
from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

kv = torch.randn(1000, 1, 512, device="cuda").bfloat16()
lengths = torch.tensor([0, 1, 64, 65, 640, 0], dtype=torch.int32, device="cuda")
column = torch.arange(640, device="cuda", dtype=torch.int32)
indices = torch.where(column < lengths.unsqueeze(1), column, -1).unsqueeze(1)
q = torch.randn(6, 64, 512, device="cuda").bfloat16()
out = torch.full_like(q, 7)
flash_mla_sparse_fwd(q=q, kv=kv, indices=indices, sm_scale=512**-0.5, topk_length=lengths, out=out)
assert not out[lengths == 0].any(), "a padding token's output is not zero"
assert torch.equal(out[1], kv[0].expand(64, 512)), "one row, weight one"
print("flash_mla equal")
PY

echo "== engine"
timeout -k 5 "${SECONDS_ENGINE:-420}" $pytest "$tests/test_vllm_layers.py" -k "not self_tests and not contracts" \
    >"$OUT/vllm-engine.txt" 2>&1 || status=$?
grep -E "PASSED|FAILED|ERROR|^E  |digests compared|passed|failed|Timeout" "$OUT/vllm-engine.txt" | cut -c1-250

echo "== self-tests and contracts"
timeout -k 5 90 $pytest "$tests/test_vllm_layers.py" -k "self_tests or contracts" >"$OUT/vllm-self-tests.txt" 2>&1 || status=$?
grep -E "PASSED|FAILED|^E  |equal bytes|scores differ|passed|failed" "$OUT/vllm-self-tests.txt" | cut -c1-250

echo "== benchmark"
timeout -k 5 90 python3 packages/bi-sparse-attn/benchmarks/vllm_attention.py --out "$OUT/vllm/h200.jsonl" \
    >"$OUT/vllm-bench.txt" 2>&1 || status=$?
python3 packages/bi-sparse-attn/benchmarks/vllm_attention.py --table "$OUT/vllm/h200.jsonl"
exit $status
