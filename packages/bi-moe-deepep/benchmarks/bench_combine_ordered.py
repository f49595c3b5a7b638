"""Time the ordered combine against vLLM's ``ep_gather`` and against a plain copy.

    PYTHONPATH=packages/bi-kernels/benchmarks python packages/bi-moe-deepep/benchmarks/bench_combine_ordered.py --out F

One JSON line per number of tokens, in the format of bi-kernels' ``h200.jsonl``: stock_us is null without vLLM,
``bitwise`` compares every row with the reference. Everything is replayed from CUDA graphs, by turns; medians.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from timing import capture, medians, record, run_cases

from bi_kernels.testing import first_difference
from bi_moe_deepep import combine_ordered
from bi_moe_deepep.reference import combine_ordered as reference

HIDDEN, TOP_K = 4096, 6
TOKENS = (1, 16, 64, 256, 1024, 4096)


def stock(
    rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> Callable[[], object] | None:
    """Kernel of vLLM for the contiguous layout; None without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from vllm.model_executor.layers.fused_moe.deep_gemm_utils import ep_gather

    return lambda: ep_gather(rows, slots, weights, slots, None, out)


def bench(tokens: int, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    rows = torch.randn(1, tokens * TOP_K + 256, HIDDEN, device="cuda").bfloat16()
    slots = torch.randperm(tokens * TOP_K, device="cuda").view(tokens, TOP_K).int()
    weights = torch.rand(tokens, TOP_K, device="cuda")
    out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    moved = tokens * (TOP_K + 1) * HIDDEN * 2
    launches = max(2, min(200, (1 << 31) // moved))
    timers = [capture(lambda: combine_ordered(rows, slots, weights, out=out), launches), copy]
    theirs = stock(rows[0], slots, weights, torch.empty_like(out))
    timers += [capture(theirs, launches)] if theirs is not None else []
    ours_us, copy_us, *stock_us = medians(*timers)
    some = torch.arange(0, tokens, max(1, tokens // 64))
    want = reference.combine_ordered(rows.cpu(), slots[some].cpu(), weights[some].cpu())
    return record(
        "combine_ordered",
        [tokens, TOP_K, HIDDEN],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=first_difference(out[some].cpu(), want) is None,
        stock="ep_gather" if stock_us else None,
        stock_us=stock_us[0] if stock_us else None,
    )


if __name__ == "__main__":
    run_cases(__doc__, ((tokens,) for tokens in TOKENS), bench)
