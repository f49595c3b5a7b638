"""Time the fingerprint of one tensor on the GPU against a plain copy of as many bytes.

    python packages/bi-reload/benchmarks/bench_fingerprint.py --out results/h200.jsonl

One JSON line per size in bytes: ours_us, gb_s (bytes read), percent_of_copy (of the bytes that a device-to-device copy
reads and writes), bitwise (equal to the fingerprint on the CPU). vLLM has none, so stock is null.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bi-kernels" / "benchmarks"))
from timing import COPY_BYTES, capture, copy_timer, machine, medians, write_records

from bi_reload import _ops, weight_fingerprint

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30)


def main() -> None:
    """Bench every size and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of this op")
    args = parser.parse_args()
    copy = copy_timer()
    out = torch.empty(1, dtype=torch.int64, device="cuda")
    records = []
    for size in SIZES:
        data = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
        launches = max(4, min(100, (1 << 30) // size))
        ours_us, copy_us = medians(capture(lambda data=data: _ops.fingerprint(data, out), launches), copy)
        gb_s = size / ours_us / 1e3
        records.append(
            {
                "op": "fingerprint",
                "shape": [size],
                "stock": None,
                "stock_us": None,
                "ours_us": round(ours_us, 2),
                "ratio": None,
                "gb_s": round(gb_s, 1),
                "percent_of_copy": round(100 * gb_s / (2 * COPY_BYTES / copy_us / 1e3), 1),
                "bitwise": weight_fingerprint({"w": data}) == weight_fingerprint({"w": data.cpu()}),
                **machine(),
            }
        )
        print(json.dumps(records[-1]), flush=True)
    write_records(args.out, records)


if __name__ == "__main__":
    main()
