"""Time packing against vLLM's ``deepgemm_moe_permute`` and against a plain copy.

    PYTHONPATH=packages/bi-kernels/benchmarks python packages/bi-moe-deepep/benchmarks/bench_pack_tokens.py --out F

One JSON line per number of tokens, in the format of bi-kernels' ``h200.jsonl``: stock_us is null without vLLM. vLLM
pads experts to 128 rows and takes rows from atomics; what it writes is another layout, and only its time is compared.
``bitwise`` compares all with the reference. Replayed from CUDA graphs, by turns; medians.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from timing import capture, medians, record, run_cases

from bi_kernels.testing import first_difference
from bi_moe_deepep import pack_tokens
from bi_moe_deepep.reference import pack_tokens as reference

HIDDEN, TOP_K, EXPERTS = 4096, 6, 256
TOKENS = (1, 8, 32, 128, 512, 1024, 2048)


def stock(q: torch.Tensor, s: torch.Tensor, ids: torch.Tensor) -> Callable[[], object] | None:
    """VLLM's way to the contiguous layout; None without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from vllm.model_executor.layers.fused_moe.deep_gemm_utils import deepgemm_moe_permute
    from vllm.utils.deep_gemm import _lazy_init

    _lazy_init()
    return lambda: deepgemm_moe_permute(q, s, ids, EXPERTS, None, None)


def bench(tokens: int, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    q = torch.randn(tokens, HIDDEN, device="cuda").to(torch.float8_e4m3fn)
    s = torch.randn(tokens, HIDDEN // 128, device="cuda")
    ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].int()
    out = pack_tokens(q, s, ids, num_experts=EXPERTS)
    moved = tokens * (TOP_K + 1) * (HIDDEN + HIDDEN // 128 * 4)
    launches = max(2, min(200, (1 << 31) // moved))
    timers = [capture(lambda: pack_tokens(q, s, ids, num_experts=EXPERTS, out=out), launches), copy]
    theirs = stock(q, s, ids)
    timers += [capture(theirs, 10)] if theirs is not None else []
    ours_us, copy_us, *stock_us = medians(*timers)
    want = reference.pack_tokens(q.cpu(), s.cpu(), ids.cpu(), num_experts=EXPERTS)
    return record(
        "pack_tokens",
        [tokens, TOP_K, HIDDEN],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=all(first_difference(a.cpu(), b) is None for a, b in zip(out, want, strict=True)),
        stock="deepgemm_moe_permute" if stock_us else None,
        stock_us=stock_us[0] if stock_us else None,
        experts=EXPERTS,
    )


if __name__ == "__main__":
    run_cases(__doc__, ((tokens,) for tokens in TOKENS), bench)
