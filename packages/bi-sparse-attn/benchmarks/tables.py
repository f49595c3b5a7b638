"""Write the benchmark tables of README.md from ``benchmarks/results/*.jsonl``.

    python packages/bi-sparse-attn/benchmarks/tables.py [--check]

``--check`` changes nothing and ends with 1 where README.md is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bi-kernels" / "benchmarks"))
from readme_tables import equal, rewrite, row

PACKAGE = Path(__file__).resolve().parents[1]


def top_k_table(records: list[dict[str, object]]) -> list[str]:
    """The selector: every shape against the fastest selector of vLLM and torch.topk."""
    lines = [
        "| rows x columns | scores | fastest of vLLM | its µs | ours µs | ratio | torch.topk µs | GB/s | bitwise |",
        "|---|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for r in records:
        shape = " x ".join(map(str, r["shape"]))  # type: ignore[call-overload]
        ratio = None if r["ratio"] is None else f"{r['ratio']:.2f}"
        torch_us = r["others_us"]["torch.topk"]  # type: ignore[index]
        name = None if r["stock"] is None else f"`{r['stock']}`"
        times = (r["stock_us"], r["ours_us"], ratio, torch_us)
        lines.append(row(shape, r["scores"], name, *times, f"{r['gb_s']:.0f}", equal(r)))
    return lines


def gather_table(records: list[dict[str, object]]) -> list[str]:
    """The decode gather against the copy."""
    lines = ["| tokens | compressed entries | ours µs | GB/s | of copy | bitwise |", "|--:|--:|--:|--:|--:|---|"]
    for r in records:
        speed = (f"{r['gb_s']:.0f}", f"{r['percent_of_copy']:.0f} %")
        lines.append(row(*r["shape"], r["ours_us"], *speed, equal(r)))  # type: ignore[misc]
    return lines


def summary(records: list[dict[str, object]]) -> str:
    """The goal of the selector, and how far from it the shapes are."""
    ratios = [float(r["ratio"]) for r in records if r["ratio"] is not None]  # type: ignore[arg-type]
    good = sum(ratio >= 1 for ratio in ratios)
    return (
        f"No slower than the fastest selector of vLLM at {good} of {len(ratios)} shapes; ratios from {min(ratios):.2f} "
        f"to {max(ratios):.2f}. None of those orders its output, or decides ties by index."
    )


def tables() -> str:
    """Everything between the two marks of README.md."""
    parts = []
    for path in sorted((PACKAGE / "benchmarks" / "results").glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        top_k = [r for r in records if r["op"] == "top_k"]
        gather = [r for r in records if r["op"] == "gather_decode_kv"]
        head = top_k[0]
        parts += [
            f"{head['gpu']}, torch {head['torch']}; microseconds, medians of 25 graph replays by turns. Versions, date "
            f"and commands: [{path.stem}.txt](benchmarks/results/{path.stem}.txt).",
            "",
            f"`top_k_per_row_prefill`, k = {head['top_k']}; scores up to some tens of MB stay in the L2 cache:",
            "",
            *top_k_table(top_k),
            "",
            summary(top_k),
            "",
            "`gather_decode_kv` with a window of 128; the copy is a device-to-device copy of 1 GiB in the same run:",
            "",
            *gather_table(gather),
            "",
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(rewrite(PACKAGE, tables, __doc__))
