"""Write the benchmark tables of README.md from ``benchmarks/results/*.jsonl``.

    python packages/bi-reload/benchmarks/tables.py [--check]

``--check`` changes nothing and ends with 1 where README.md is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bi-kernels" / "benchmarks"))
from readme_tables import equal, rewrite, row

PACKAGE = Path(__file__).resolve().parents[1]
GOAL = 1 / 1.15
NAMES = {
    "mhc_post_pre": "post, then pre",
    "mhc_post": "post",
    "mhc_pre": "pre",
    "mhc_pre_broadcast": "pre, layer 0",
    "mhc_head": "head",
}


def table(records: list[dict[str, object]]) -> list[str]:
    """One line per op and hidden size, one column per T: ours, and vLLM's where it was measured."""
    tokens = sorted({r["shape"][0] for r in records})  # type: ignore[index]
    hidden = sorted({r["shape"][1] for r in records})  # type: ignore[index]
    found = {(r["op"], *r["shape"]): r for r in records}  # type: ignore[misc]
    lines = [row("op", "H", *(f"T = {t}" for t in tokens)), "|---|--:|" + "--:|" * len(tokens)]
    for op, name in NAMES.items():
        for h in hidden:
            cells = []
            for t in tokens:
                r = found.get((op, t, h))
                stock = "-" if r is None or r["stock_us"] is None else f"{r['stock_us']:.1f}"
                cells.append(None if r is None else f"{r['ours_us']:.1f} / {stock}")
            lines.append(row(name, h, *cells))
    return lines


def summary(records: list[dict[str, object]]) -> list[str]:
    """The goal, which shapes miss it, and the precision."""
    explicit = [r for r in records if r["op"] == "mhc_post_pre"]
    timed = [r for r in explicit if r["ratio"] is not None]
    if not timed:
        return ["vLLM's kernels were not measured in this run."]
    slow = [f"{tuple(r['shape'])} {1 / r['ratio']:.2f}x" for r in timed if r["ratio"] < GOAL]  # type: ignore
    faster = sum(r["ratio"] >= 1 for r in timed)  # type: ignore[operator]
    mine, theirs = (max(r[key] for r in timed) for key in ("precision", "stock_precision"))  # type: ignore[type-var]
    return [
        f"Explicit post and pre take at most as long as vLLM's fused kernels at {faster} of {len(timed)} shapes; more "
        f"than 1.15x as long (the goal) at: {', '.join(slow) or 'none'}.",
        "",
        f"Largest difference of `post_mix` to float64: ours {mine:.1e}, vLLM's {theirs:.1e}.",
    ]


def constant_split_table(records: list[dict[str, object]]) -> list[str]:
    """``mhc_pre`` against what the hook could have called instead: vLLM's function with a constant split."""
    compared = [r for r in records if r.get("constant_split_us")]
    if not compared:
        return []
    tokens = sorted({r["shape"][0] for r in compared})  # type: ignore[index]
    found = {tuple(r["shape"]): r for r in compared}  # type: ignore[arg-type]
    lines = [
        "`mhc_pre`, ours / vLLM's function whose TF32 product is cut into as many pieces as ours, whatever T is / into "
        "as many as vLLM cuts that of one token.",
        "",
        row("H", "pieces", *(f"T = {t}" for t in tokens)),
        "|--:|--:|" + "--:|" * len(tokens),
    ]
    for h in sorted({r["shape"][1] for r in compared}):  # type: ignore[index]
        pieces = found[tokens[0], h]["constant_split_us"]
        cells = []
        for t in tokens:
            r = found[t, h]
            cells.append(" / ".join(f"{us:.1f}" for us in (r["ours_us"], *r["constant_split_us"].values())))  # type: ignore
        lines.append(row(h, ", ".join(pieces), *cells))  # type: ignore[arg-type]
    return [*lines, ""]


def reload_table(records: list[dict[str, object]]) -> list[str]:
    """Whole reloads, by where the weights come from."""
    if not records:
        return []
    size, tensors = records[0]["bytes"], records[0]["tensors"]
    lines = [
        f"Reload of {size / 1e9:.2f} GB in {tensors:,} tensors inside vLLM 0.26 engines, with the hooks and without, "  # type: ignore[operator]
        "seconds; medians of three by turns.",
        "",
        "| weights from | vLLM's | ours | ratio | ours GB/s | fingerprints |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for r in records:
        stock_s, ours_s = (r[key] / 1e6 for key in ("stock_us", "ours_us"))  # type: ignore[operator]
        lines.append(row(r["source"], f"{stock_s:.2f}", f"{ours_s:.2f}", r["ratio"], r["gb_s"], equal(r)))
    return [*lines, ""]


def tables() -> str:
    """Everything between the two marks of README.md."""
    parts = []
    for path in sorted((PACKAGE / "benchmarks" / "results").glob("*.jsonl")):
        every = [json.loads(line) for line in path.read_text().splitlines()]
        records = [r for r in every if r["op"] in NAMES]
        head = records[0]
        different = [(r["op"], *r["shape"]) for r in records if not r["bitwise"]]
        parts += [
            f"{head['gpu']}, torch {head['torch']}; microseconds, ours / vLLM's, medians of 25 graph replays by turns. "
            f"Versions, date and commands: [{path.stem}.txt](benchmarks/results/{path.stem}.txt). Rows that differ "
            f"from the same row of a call with 4,096 tokens: {different or 'none'}.",
            "",
            *table(records),
            "",
            *summary(records),
            "",
            *constant_split_table(records),
            *reload_table([r for r in every if r["op"] == "reload"]),
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(rewrite(PACKAGE, tables, __doc__))
