"""Time the selector against vLLM's selectors, ``torch.topk``, and a plain copy.

    python packages/bi-sparse-attn/benchmarks/bench_top_k_per_row.py --out results/h200.jsonl

One JSON line per shape (rows, columns): op, shape, top_k, scores, stock (the fastest of vLLM's), stock_us, ours_us,
ratio (stock / ours), others_us (every other selector), gb_s (bytes read and written by ours), percent_of_copy, bitwise
(compared with the reference in this run). All are replayed from CUDA graphs by turns, and the median is taken; scores
up to some tens of MB then stay in the L2 cache, for all alike. Without vLLM stock is null. Scores "relu" are 95 %
zeros: a plateau at the k-th score wherever rows are short.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bi-kernels" / "benchmarks"))
from timing import capture, copy_timer, medians, record, write_records

from bi_kernels.testing import first_difference
from bi_sparse_attn import top_k_per_row_prefill
from bi_sparse_attn.reference import top_k_per_row as reference

TOP_K = 512
SHAPES = (
    (1, 4096), (64, 4096), (256, 4096), (1, 8192), (32, 8192), (64, 8192), (256, 8192), (1, 32768), (8, 32768),
    (64, 32768), (256, 32768), (1, 131072), (8, 131072), (32, 131072), (64, 131072), (256, 131072),
)  # fmt: skip
RELU_SHAPES = ((64, 4096), (64, 8192), (8, 32768), (8, 131072))
WORKSPACE_BYTES = 1 << 20  # RADIX_TOPK_WORKSPACE_SIZE of vLLM's sparse_attn_indexer


def load_stock(library: Path | None) -> None:
    """Register ``torch.ops._C`` of vLLM, if there is one."""
    if library is not None:
        torch.ops.load_library(str(library))
    elif importlib.util.find_spec("vllm") is not None:
        importlib.import_module("vllm._C_stable_libtorch")


def stock_selectors(logits: torch.Tensor, ends: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Selectors of vLLM that take this shape; none without vLLM."""
    if not hasattr(torch.ops._C, "persistent_topk"):
        return {}
    rows, columns = logits.shape
    starts = torch.zeros_like(ends)
    out = torch.empty(rows, TOP_K, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    ops = torch.ops._C
    found: dict[str, Callable[[], object]] = {
        "top_k_per_row_prefill": lambda: ops.top_k_per_row_prefill(
            logits, starts, ends, out, rows, *logits.stride(), TOP_K
        ),
        "persistent_topk": lambda: ops.persistent_topk(logits, ends, out, workspace, TOP_K, columns),
    }
    if rows <= 32:
        found["cooperative_topk"] = lambda: ops.cooperative_topk(logits, ends, out, workspace, TOP_K, columns)
    return found


def bench(rows: int, columns: int, scores: str, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    logits = torch.randn(rows, columns, device="cuda")
    if scores == "relu":
        logits = torch.where(torch.rand_like(logits) < 0.05, logits.abs(), 0.0)
    starts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    ends = torch.full_like(starts, columns)
    out = torch.empty(rows, TOP_K, dtype=torch.int32, device="cuda")

    def ours() -> None:
        top_k_per_row_prefill(logits, starts, ends, TOP_K, out=out)

    moved = rows * (columns + TOP_K) * 4
    launches = max(5, min(50, (1 << 30) // moved))
    selectors = stock_selectors(logits, ends) | {"torch.topk": lambda: torch.topk(logits, TOP_K, dim=1)}
    ours_us, copy_us, *others_us = medians(
        capture(ours, launches), copy, *(capture(run, launches) for run in selectors.values())
    )
    others = dict(zip(selectors, (round(us, 2) for us in others_us), strict=True))
    stock = min((name for name in others if name != "torch.topk"), key=lambda name: others[name], default=None)
    out.fill_(-7)
    ours()
    equal = first_difference(out, reference.top_k_per_row_prefill(logits, starts, ends, TOP_K)) is None
    return record(
        "top_k",
        [rows, columns],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=equal,
        stock=stock,
        stock_us=None if stock is None else others[stock],
        top_k=TOP_K,
        scores=scores,
        others_us={name: us for name, us in others.items() if name != stock},
    )


def main() -> None:
    """Bench every shape and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of this op")
    parser.add_argument("--stock-library", type=Path, help="_C_stable_libtorch.abi3.so of a vLLM that is not installed")
    args = parser.parse_args()
    load_stock(args.stock_library)
    copy = copy_timer()
    cases = [(*shape, "normal") for shape in SHAPES] + [(*shape, "relu") for shape in RELU_SHAPES]
    records = []
    for case in cases:
        records.append(bench(*case, copy))
        print(json.dumps(records[-1]), flush=True)
    write_records(args.out, records)


if __name__ == "__main__":
    main()
