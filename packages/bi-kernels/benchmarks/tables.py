"""Write the benchmark tables of README.md from ``benchmarks/results/*.jsonl``.

    python packages/bi-kernels/benchmarks/tables.py [--check]

``--check`` changes nothing and ends with 1 where README.md is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from readme_tables import equal, rewrite, row

PACKAGE = Path(__file__).resolve().parents[1]
GOAL_COPY, GOAL_RATIO, GOAL_DEFAULT = 85.0, 1.25, 1 / 1.15


def fused_table(records: list[dict[str, object]]) -> list[str]:
    """The fused op: every shape against vLLM's kernel and the copy."""
    lines = [
        "| input | shape | vLLM µs | ours µs | ratio | GB/s | of copy | bitwise |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for r in records:
        kind = "masked (E, T, I)" if str(r["op"]).endswith("masked") else "contiguous (M, I)"
        shape = ", ".join(map(str, r["shape"]))  # type: ignore[call-overload]
        ratio = None if r["ratio"] is None else f"{r['ratio']:.2f}"
        lines.append(
            row(
                kind,
                shape,
                r["stock_us"],
                r["ours_us"],
                ratio,
                f"{r['gb_s']:.0f}",
                f"{r['percent_of_copy']:.0f} %",
                equal(r),
            )
        )
    return lines


def mm_table(records: list[dict[str, object]]) -> list[str]:
    """fixed_order_mm: one line per (N, K), one column per M, ours / invariant cuBLAS / default cuBLAS."""
    rows = sorted({r["shape"][0] for r in records})  # type: ignore[index]
    shapes = list(dict.fromkeys(tuple(r["shape"][1:]) for r in records))  # type: ignore[index]
    by_shape = {tuple(r["shape"]): r for r in records}  # type: ignore[arg-type]
    lines = [row("N, K", *(f"M = {m}" for m in rows)), "|---|" + "--:|" * len(rows)]
    for n, k in shapes:
        cells = []
        for m in rows:
            r = by_shape[m, n, k]
            cells.append(f"{r['ours_us']:.1f} / {r['stock_us']:.1f} / {r['default_us']:.1f}")
        lines.append(row(f"{n}, {k}", *cells))
    return lines


def lm_head_table(records: list[dict[str, object]]) -> list[str]:
    """fixed_order_mm over vocabularies, in the form of :func:`mm_table`."""
    if not records:
        return []
    stock = records[0]["stock"]
    return [
        f"The same to bfloat16 for an `lm_head`: ours / {stock} / plain `torch.mm`. Every row equals the same row of a "
        "product with 1,024 rows.",
        "",
        *mm_table(records),
        "",
    ]


def log_softmax_table(records: list[dict[str, object]]) -> list[str]:
    """The log-softmax: every number of rows against vLLM's kernel and the copy."""
    if not records:
        return []
    lines = ["Log-softmax of 129,280 columns, against that of vLLM's batch-invariant mode.", ""]
    lines += ["| rows | vLLM µs | ours µs | GB/s | of copy | bitwise |", "|--:|--:|--:|--:|--:|---|"]
    for r in records:
        rows, _ = r["shape"]  # type: ignore[misc]
        lines.append(
            row(rows, r["stock_us"], r["ours_us"], f"{r['gb_s']:.0f}", f"{r['percent_of_copy']:.0f} %", equal(r))
        )
    return [*lines, ""]


def summary(fused: list[dict[str, object]], mm: list[dict[str, object]]) -> list[str]:
    """The goals, and which shapes miss them."""

    def names(records: list[dict[str, object]], value: str) -> str:
        found = (f"{tuple(r['shape'])} {r[value]}" for r in records)  # type: ignore[arg-type]
        return ", ".join(found) or "none"

    big = [r for r in fused if _rows(r) * r["shape"][-1] >= 49152 * 2048]  # type: ignore[index,operator]
    copy = [r for r in big if r["percent_of_copy"] < GOAL_COPY]  # type: ignore[operator]
    ratio = [r for r in fused if r["ratio"] is not None and r["ratio"] < GOAL_RATIO]  # type: ignore[operator]
    slow = [r for r in mm if r["ratio"] < 1]  # type: ignore[operator]
    default = [r for r in mm if r["default_ratio"] < GOAL_DEFAULT]  # type: ignore[operator]
    return [
        f"Below {GOAL_COPY:.0f} % of the copy, of the shapes with M·I >= 49152·2048: {names(copy, 'percent_of_copy')}.",
        f"Below {GOAL_RATIO}x of vLLM's kernel: {names(ratio, 'ratio')}.",
        "",
        f"`fixed_order_mm` is at least as fast as batch-invariant cuBLAS at {len(mm) - len(slow)} of {len(mm)} shapes, "
        f"and within 1.15x of default cuBLAS at {len(mm) - len(default)}. Slower than batch-invariant cuBLAS (M, N, K; "
        f"ratio): {names(slow, 'ratio')}. More than 1.15x of default cuBLAS: {names(default, 'default_ratio')}.",
    ]


def _rows(record: dict[str, object]) -> int:
    *rows, _ = record["shape"]  # type: ignore[misc]
    return rows[0] * (rows[1] if len(rows) == 2 else 1)  # type: ignore[no-any-return]


def tables() -> str:
    """Everything between the two marks of README.md."""
    parts = []
    for path in sorted((PACKAGE / "benchmarks" / "results").glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        fused = [r for r in records if str(r["op"]).startswith("silu_mul_quant")]
        mm = [r for r in records if r["op"] == "fixed_order_mm"]
        head = next(iter(records))
        results = f"[{path.stem}.txt](benchmarks/results/{path.stem}.txt)"
        parts += [
            f"{head['gpu']}, torch {head['torch']}; microseconds, medians of 25 graph replays by turns. Versions, date "
            f"and commands: {results}.",
            "",
            "Fused activation and quantisation, `FLOAT32_CEIL_UE8M0`, clamp 10; the copy is a device-to-device copy of "
            "1 GiB in the same run.",
            "",
            *fused_table(fused),
            "",
            "`fixed_order_mm` to float32: ours / `torch.mm` after vLLM's batch-invariant initialisation / plain "
            "`torch.mm`. Every row equals the same row of a product with 4,096 rows.",
            "",
            *mm_table(mm),
            "",
            *lm_head_table([r for r in records if r["op"] == "fixed_order_mm_lm_head"]),
            *log_softmax_table([r for r in records if r["op"] == "log_softmax"]),
            *summary(fused, mm),
            "",
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(rewrite(PACKAGE, tables, __doc__))
