"""Time ``padded_copy_`` on the GPU against torch's copy and fill, which are two kernels.

    python packages/bi-reload/benchmarks/bench_padded_copy.py --out results/h200.jsonl

One JSON line per shape (rows of dst, rows of src, columns): ours_us, stock_us (``copy_`` and ``fill_``), ratio (stock /
ours), gb_s (bytes read and written), percent_of_copy, bitwise (equal to torch's result).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bi-kernels" / "benchmarks"))
from timing import COPY_BYTES, capture, copy_timer, machine, medians, write_records

from bi_kernels.testing import bit_view
from bi_reload import padded_copy_

SHAPES = ((64, 32, 1), (128, 128, 1), (1024, 1000, 4096), (8192, 4096, 8192))


def main() -> None:
    """Bench every shape and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of this op")
    args = parser.parse_args()
    copy = copy_timer()
    records = []
    for total, rows, columns in SHAPES:
        src = torch.randn(rows, columns, device="cuda")
        dst, other = (torch.empty(total, columns, device="cuda") for _ in range(2))

        def ours(dst: torch.Tensor = dst, src: torch.Tensor = src) -> None:
            padded_copy_(dst, src, pad_value=float("-inf"))

        def stock(dst: torch.Tensor = other, src: torch.Tensor = src) -> None:
            dst[: len(src)].copy_(src)
            dst[len(src) :].fill_(float("-inf"))

        moved = (rows + total) * columns * 4
        launches = max(4, min(100, (1 << 30) // moved))
        ours_us, copy_us, stock_us = medians(capture(ours, launches), copy, capture(stock, launches))
        gb_s = moved / ours_us / 1e3
        records.append(
            {
                "op": "padded_copy",
                "shape": [total, rows, columns],
                "stock": "torch copy_ and fill_",
                "stock_us": round(stock_us, 2),
                "ours_us": round(ours_us, 2),
                "ratio": round(stock_us / ours_us, 3),
                "gb_s": round(gb_s, 1),
                "percent_of_copy": round(100 * gb_s / (2 * COPY_BYTES / copy_us / 1e3), 1),
                "bitwise": torch.equal(bit_view(dst), bit_view(other)),
                **machine(),
            }
        )
        print(json.dumps(records[-1]), flush=True)
    write_records(args.out, records)


if __name__ == "__main__":
    main()
