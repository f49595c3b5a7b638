"""Time staging, for the experts of one of two ranks, against a plain copy.

    PYTHONPATH=packages/bi-kernels/benchmarks python packages/bi-moe-deepep/benchmarks/bench_stage_tokens.py --out F

One JSON line per number of tokens, in the format of bi-kernels' ``h200.jsonl``. There is no stock kernel with this
result: vLLM's ``ep_scatter`` takes rows from atomics and pads experts to 128. ``bitwise`` compares all with the
reference. Replayed from CUDA graphs, by turns with the copy; medians.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import capture, medians, record, run_cases

from bi_kernels.testing import first_difference
from bi_moe_deepep import stage_tokens
from bi_moe_deepep.reference import stage_tokens as reference

HIDDEN, TOP_K, EXPERTS, LOCAL = 4096, 6, 256, 128
TOKENS = (2, 32, 128, 512, 2048)


def bench(tokens: int, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].int()
    arguments = {"num_experts": EXPERTS, "capacity": tokens, "first_expert": 0, "num_local_experts": LOCAL}
    out = stage_tokens(x, ids, **arguments)
    staged = int(out.counts.sum())
    moved = (tokens + staged) * HIDDEN * 2
    launches = max(2, min(200, (1 << 31) // moved))
    ours_us, copy_us = medians(capture(lambda: stage_tokens(x, ids, out=out, **arguments), launches), copy)
    want = reference.stage_tokens(x.cpu(), ids.cpu(), **arguments)
    return record(
        "stage_tokens",
        [tokens, TOP_K, HIDDEN],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=all(first_difference(a.cpu(), b) is None for a, b in zip(out, want, strict=True)),
        experts=f"{LOCAL} of {EXPERTS}",
    )


if __name__ == "__main__":
    run_cases(__doc__, ((tokens,) for tokens in TOKENS), bench)
