"""Time the choice of experts from given logits against a plain copy.

    PYTHONPATH=packages/bi-kernels/benchmarks python packages/bi-moe-deepep/benchmarks/bench_router.py --out F

One JSON line per number of tokens, in the format of bi-kernels' ``h200.jsonl``. vLLM's whole router, gate included, is
compared in ``bench_vllm_layers.py``. ``bitwise`` compares all rows with the reference. Replayed from CUDA graphs, by
turns with the copy; medians.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import capture, medians, record, run_cases

from bi_kernels.testing import first_difference
from bi_moe_deepep import select_experts
from bi_moe_deepep.reference import router as reference

TOP_K, EXPERTS = 6, 256
TOKENS = (1, 16, 64, 256, 1024, 4096)


def bench(tokens: int, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    logits = torch.randn(tokens, EXPERTS, device="cuda")
    bias = torch.randn(EXPERTS, device="cuda")
    arguments = {"top_k": TOP_K, "routed_scaling_factor": 1.5}
    weights, ids = select_experts(logits, bias=bias, **arguments)
    moved = tokens * (EXPERTS + 2 * TOP_K) * 4
    ours_us, copy_us = medians(
        capture(lambda: select_experts(logits, bias=bias, out_weights=weights, out_ids=ids, **arguments), 200), copy
    )
    want = reference.select_experts(logits.cpu(), bias=bias.cpu(), **arguments)
    return record(
        "select_experts",
        [tokens, EXPERTS, TOP_K],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=all(first_difference(a.cpu(), b) is None for a, b in zip((weights, ids), want, strict=True)),
    )


if __name__ == "__main__":
    run_cases(__doc__, ((tokens,) for tokens in TOKENS), bench)
