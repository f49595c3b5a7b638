"""Time ``fixed_order_mm`` against ``torch.mm``, as cuBLAS comes and after vLLM's batch-invariant initialisation.

    python packages/bi-kernels/benchmarks/bench_fixed_order_mm.py --out results/h200.jsonl

cuBLAS keeps the workspace it first got, so each of the two runs in a process of its own, alternating with ours
there. One JSON line per shape (M, N, K): stock is ``torch.mm`` after ``init_batch_invariance`` (or, without vLLM, after
the same settings), ratio is stock / ours; default_us and default_ratio are the plain ``torch.mm``. Everything is
replayed from CUDA graphs; weights and inputs up to some tens of MB then stay in the L2 cache, for all alike. A launch
of ours may begin while the one before it ends, here as behind any kernel of a forward. bitwise: every row equals the
same row of the product with most rows, compared in this run; within_bound: against float64.

``fixed_order_mm_lm_head`` is the same to bfloat16 for vocabularies; there stock is what vLLM's batch-invariant mode
calls for an lm_head, ``matmul_persistent``, where vLLM can be imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHAPES = (
    (64, 4096), (256, 4096), (512, 4096), (1024, 4096), (2048, 4096), (1024, 2048), (2048, 2048), (64, 7168),
    (256, 7168), (384, 7168), (1024, 7168),
)  # fmt: skip
ROWS = (1, 16, 64, 128, 256, 1024, 4096)
VOCABULARIES = ((32_768, 4096), (32_768, 7168), (129_280, 4096), (129_280, 7168))
HEAD_ROWS = (1, 8, 32, 128, 1024)


def starve_cublas() -> str:
    """Do what vLLM's batch-invariant mode does before the first cuBLAS handle exists."""
    import torch

    if importlib.util.find_spec("vllm") is not None:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        from vllm.model_executor.layers.batch_invariant import init_batch_invariance

        init_batch_invariance()
        return "torch.mm after vLLM's init_batch_invariance"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library(backend="cublaslt")
    return "torch.mm with the settings of vLLM's init_batch_invariance"


def vllm_head() -> Callable[..., object] | None:
    """What vLLM 0.26 computes an lm_head with in batch-invariant mode; None without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from vllm.model_executor.layers.batch_invariant import matmul_persistent

    return lambda rows, weight: matmul_persistent(rows, weight.T)


def measure(starved: bool) -> list[dict[str, object]]:
    """Everything one process measures."""
    name = starve_cublas() if starved else "torch.mm"
    import torch

    def product(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        if out.dtype == rows.dtype:
            torch.mm(rows, weight.T, out=out)
        else:
            torch.mm(rows, weight.T, out_dtype=out.dtype, out=out)

    records = []
    for n, k in SHAPES:
        records += measure_shape("fixed_order_mm", n, k, ROWS, torch.float32, name, product, check=starved)
    head = vllm_head() if starved else None
    if head is not None:
        name = "matmul_persistent of vLLM's batch-invariant mode"
    for n, k in VOCABULARIES:
        stock = product if head is None else lambda rows, weight, out: head(rows, weight)
        records += measure_shape("fixed_order_mm_lm_head", n, k, HEAD_ROWS, torch.bfloat16, name, stock, check=starved)
    return records


def measure_shape(
    op: str,
    n: int,
    k: int,
    rows_of: Sequence[int],
    dtype: torch.dtype,
    name: str,
    stock: Callable[..., object],
    *,
    check: bool,
) -> list[dict[str, object]]:
    """One weight against all numbers of rows."""
    import torch
    from timing import capture, machine, medians

    from bi_kernels import fixed_order_mm
    from bi_kernels.reference.fixed_order_mm import error_bound
    from bi_kernels.testing import first_difference

    records = []
    x = torch.randn(max(rows_of), k, device="cuda").bfloat16()
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    every = fixed_order_mm(x, weight, out_dtype=dtype)
    for m in rows_of:
        rows, out, other = x[:m], *(torch.empty(m, n, dtype=dtype, device="cuda") for _ in range(2))

        def ours(rows: torch.Tensor = rows, out: torch.Tensor = out) -> None:
            fixed_order_mm(rows, weight, out_dtype=dtype, out=out)

        def theirs(rows: torch.Tensor = rows, other: torch.Tensor = other) -> None:
            stock(rows, weight, other)

        launches = 8 if op == "fixed_order_mm_lm_head" else 20 if m >= 1024 else 100
        stock_us, ours_us = medians(capture(theirs, launches), capture(ours, launches))
        record: dict[str, object] = {"op": op, "shape": [m, n, k], "stock": name}
        record |= {"stock_us": stock_us, "ours_us": ours_us}
        if check:
            out.fill_(torch.nan)
            ours()
            some, columns = rows[:256], weight[:2048]
            error = (out[:256, :2048].double() - some.double() @ columns.double().T).abs()
            record["bitwise"] = first_difference(out, every[:m]) is None
            record["within_bound"] = bool((error <= error_bound(some, columns, out_dtype=dtype)).all())
            record |= machine()
        records.append(record)
    return records


def child(mode: str) -> list[dict[str, object]]:
    done = subprocess.run([sys.executable, __file__, "--measure", mode], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Measure in two processes, merge, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of this op")
    parser.add_argument("--measure", choices=("default", "invariant"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        for record in measure(args.measure == "invariant"):
            print(json.dumps(record))
        return
    records = []
    for stock, default in zip(child("invariant"), child("default"), strict=True):
        m, n, k = stock["shape"]
        moved = (m * k + n * k) * 2 + m * n * (4 if stock["op"] == "fixed_order_mm" else 2)
        ours = stock["ours_us"]
        records.append(
            {
                **stock,
                "stock_us": round(stock["stock_us"], 2),
                "ours_us": round(ours, 2),
                "ratio": round(stock["stock_us"] / ours, 3),
                "default_us": round(default["stock_us"], 2),
                "default_ratio": round(default["stock_us"] / default["ours_us"], 3),
                "gb_s": round(moved / ours / 1e3, 1),
                "tflop_s": round(2 * m * n * k / ours / 1e6, 1),
                "percent_of_copy": None,
            }
        )
        print(json.dumps(records[-1]), flush=True)
    from timing import write_records

    write_records(args.out, records)


if __name__ == "__main__":
    main()
