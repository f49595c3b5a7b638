"""Time ``padded_copy_`` on the GPU against torch's copy and fill, which are two kernels.

    python packages/bi-reload/benchmarks/bench_padded_copy.py --out results/h200.jsonl

One JSON line per shape (rows of dst, rows of src, columns): ours_us, stock_us (``copy_`` and ``fill_``), ratio (stock /
ours), gb_s (bytes read and written), percent_of_copy, bitwise (equal to torch's result).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bi-kernels" / "benchmarks"))
from timing import capture, medians, record, run_cases

from bi_kernels.testing import bit_view
from bi_reload import padded_copy_

SHAPES = ((64, 32, 1), (128, 128, 1), (1024, 1000, 4096), (8192, 4096, 8192))


def bench(total: int, rows: int, columns: int, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    src = torch.randn(rows, columns, device="cuda")
    dst, other = (torch.empty(total, columns, device="cuda") for _ in range(2))

    def stock() -> None:
        other[:rows].copy_(src)
        other[rows:].fill_(float("-inf"))

    moved = (rows + total) * columns * 4
    launches = max(4, min(100, (1 << 30) // moved))
    ours_us, copy_us, stock_us = medians(
        capture(lambda: padded_copy_(dst, src, pad_value=float("-inf")), launches), copy, capture(stock, launches)
    )
    return record(
        "padded_copy",
        [total, rows, columns],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=torch.equal(bit_view(dst), bit_view(other)),
        stock="torch copy_ and fill_",
        stock_us=stock_us,
    )


if __name__ == "__main__":
    run_cases(__doc__, SHAPES, bench)
