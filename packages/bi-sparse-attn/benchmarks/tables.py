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
GOALS = {"decode_attention": 1 / 1.25, "prefill_attention": 1 / 1.05}  # least ratio to vLLM's


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


def attention_table(records: list[dict[str, object]]) -> list[str]:
    """Attention of vLLM's layers: a line per layer and context, a column per batch."""
    cells = {tuple(r["shape"]): r for r in records}  # type: ignore[arg-type]
    if not cells:
        return []
    prefill = records[0]["op"] == "prefill_attention"
    # The tokens of all prefilled requests together are the same everywhere: a column has a number and a length.
    columns = list(dict.fromkeys((n, size if prefill else 0) for _, n, size in cells))
    places = list(dict.fromkeys((kind, 0 if prefill else size) for kind, _, size in cells))
    heads = (f"{n} x {size}" if prefill else f"batch {n}" for n, size in columns)
    lines = [row("layer, requests x tokens" if prefill else "layer, context", *heads), "|---|" + "--:|" * len(columns)]
    for kind, context in places:
        found = [cells.get((kind, n, size or context)) for n, size in columns]
        times = [r and f"{r['stock_us']:.1f} / {r['ours_us']:.1f} = {r['ratio']:.2f}" for r in found]
        lines.append(row(kind if prefill else f"{kind}, {context}", *times))
    goal = GOALS[str(records[0]["op"])]
    good = sum(r["ratio"] >= goal for r in cells.values())  # type: ignore[operator]
    different = [shape for shape, r in cells.items() if not r["bitwise"]]
    return [
        *lines,
        "",
        f"At least {goal:.2f} (the goal) at {good} of {len(cells)} shapes. Bits alone and in the batch: different at "
        f"{different or 'none of them'}.",
        "",
    ]


def attention(records: list[dict[str, object]]) -> list[str]:
    """Decode and prefill in vLLM's layers."""
    head = records[0]
    lines = [
        "Attention of one DeepSeek-V4 layer with 64 heads in vLLM 0.26: vLLM's / ours in microseconds = ratio (1 is as "
        f"fast). {head['gpu']}, torch {head['torch']}; [what was run](benchmarks/results/vllm/h200.txt).",
        "",
        "Decode, against `flash_mla_with_kvcache`:",
        "",
        *attention_table([r for r in records if r["op"] == "decode_attention"]),
    ]
    prefill = attention_table([r for r in records if r["op"] == "prefill_attention"])
    if not prefill:
        return lines
    idle = [r["stock_idle_us"] / r["ours_idle_us"] for r in records if "ours_idle_us" in r]  # type: ignore[operator]
    return [
        *lines,
        "Prefill per request, against vLLM's grouped plan, on a stream that is still busy while the host launches:",
        "",
        *prefill,
        f"On an idle stream, the host's time included, ratios from {min(idle):.2f} to {max(idle):.2f}.",
        "",
    ]


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
    for path in sorted((PACKAGE / "benchmarks" / "results" / "vllm").glob("*.jsonl")):
        parts += attention([json.loads(line) for line in path.read_text().splitlines()])
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(rewrite(PACKAGE, tables, __doc__))
