"""Time the choice of experts from given logits against a plain copy.

    PYTHONPATH=packages/bi-kernels/benchmarks python packages/bi-moe-deepep/benchmarks/bench_router.py --out F

One JSON line per number of tokens, in the format of bi-kernels' ``h200.jsonl``. vLLM's whole router, gate included, is
compared in ``bench_vllm_layers.py``. ``bitwise`` compares all rows with the reference. Replayed from CUDA graphs, by
turns with the copy; medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from timing import COPY_BYTES, capture, copy_timer, machine, medians, write_records

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
    gb_s = moved / ours_us / 1e3
    return {
        "op": "select_experts",
        "shape": [tokens, EXPERTS, TOP_K],
        "stock": None,
        "stock_us": None,
        "ours_us": round(ours_us, 2),
        "ratio": None,
        "gb_s": round(gb_s, 1),
        "percent_of_copy": round(100 * gb_s / (2 * COPY_BYTES / copy_us / 1e3), 1),
        "bitwise": all(first_difference(a.cpu(), b) is None for a, b in zip((weights, ids), want, strict=True)),
        **machine(),
    }


def main() -> None:
    """Bench every number of tokens and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of this op")
    args = parser.parse_args()
    copy = copy_timer()
    records = []
    for tokens in TOKENS:
        records.append(bench(tokens, copy))
        print(json.dumps(records[-1]), flush=True)
    write_records(args.out, records)


if __name__ == "__main__":
    main()
