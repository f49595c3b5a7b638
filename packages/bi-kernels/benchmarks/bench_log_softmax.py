"""Time the log-softmax of V4's vocabulary against that of vLLM's batch-invariant mode and against a plain copy.

    python packages/bi-kernels/benchmarks/bench_log_softmax.py --out results/h200.jsonl

One JSON line per number of rows: stock_us is null without vLLM, ``bitwise`` compares some rows with the reference.
Everything is replayed from CUDA graphs, by turns; medians.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from timing import capture, medians, record, run_cases

from bi_kernels import log_softmax
from bi_kernels.reference import log_softmax as reference
from bi_kernels.testing import first_difference

COLUMNS = 129_280
ROWS = (1, 8, 32, 128, 256, 1024)


def bench(rows: int, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    logits = torch.randn(rows, COLUMNS, device="cuda") * 3
    moved = 2 * logits.numel() * 4
    launches = max(2, min(100, (1 << 31) // moved))
    timers = [capture(lambda: log_softmax(logits), launches), copy]
    has_vllm = importlib.util.find_spec("vllm") is not None
    if has_vllm:
        from vllm.model_executor.layers.batch_invariant import log_softmax as stock

        timers.append(capture(lambda: stock(logits), launches))
    ours_us, copy_us, *stock_us = medians(*timers)
    some = torch.arange(0, rows, max(1, rows // 4))
    want = reference.log_softmax(logits[some].cpu())
    return record(
        "log_softmax",
        [rows, COLUMNS],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=first_difference(log_softmax(logits)[some].cpu(), want) is None,
        stock="vLLM's batch-invariant log_softmax" if has_vllm else None,
        stock_us=stock_us[0] if has_vllm else None,
    )


if __name__ == "__main__":
    run_cases(__doc__, ((rows,) for rows in ROWS), bench)
