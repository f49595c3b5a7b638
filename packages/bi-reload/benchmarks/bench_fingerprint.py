"""Time the fingerprint of one tensor on the GPU against a plain copy of as many bytes.

    python packages/bi-reload/benchmarks/bench_fingerprint.py --out results/h200.jsonl

One JSON line per size in bytes: ours_us, gb_s (bytes read), percent_of_copy (of the bytes that a device-to-device copy
reads and writes), bitwise (equal to the fingerprint on the CPU). vLLM has none, so stock is null.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bi-kernels" / "benchmarks"))
from timing import capture, medians, record, run_cases

from bi_reload import _ops, weight_fingerprint

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30)


def bench(size: int, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    out = torch.empty(1, dtype=torch.int64, device="cuda")
    data = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
    launches = max(4, min(100, (1 << 30) // size))
    ours_us, copy_us = medians(capture(lambda: _ops.fingerprint(data, out), launches), copy)
    equal = weight_fingerprint({"w": data}) == weight_fingerprint({"w": data.cpu()})
    return record("fingerprint", [size], moved=size, ours_us=ours_us, copy_us=copy_us, bitwise=equal)


if __name__ == "__main__":
    run_cases(__doc__, ((size,) for size in SIZES), bench)
