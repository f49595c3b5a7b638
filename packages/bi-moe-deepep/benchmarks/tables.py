"""Write the tables of README.md from ``benchmarks/results/*.jsonl``.

    python packages/bi-moe-deepep/benchmarks/tables.py [--check]

``--check`` changes nothing and ends with 1 where README.md is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bi-kernels" / "benchmarks"))
from readme_tables import equal, rewrite, row

PACKAGE = Path(__file__).resolve().parents[1]
GOAL = 1 / 1.05  # of the expert layer, against the faster of vLLM's
KERNELS = ("pack_tokens", "stage_tokens", "combine_ordered")
Record = dict[str, object]


def kernel_table(records: list[Record]) -> list[str]:
    """Staging and combine: time, bandwidth, and vLLM's kernel where it has one."""
    lines = [
        "| op | tokens | vLLM µs | ours µs | ratio | GB/s | of copy | bitwise |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for r in records:
        tokens = r["shape"][0]  # type: ignore[index]
        cells = r["stock_us"], r["ours_us"], r["ratio"], f"{r['gb_s']:.0f}", f"{r['percent_of_copy']:.0f} %"
        lines.append(row(f"`{r['op']}`", tokens, *cells, equal(r)))
    return lines


def product_table(records: list[Record]) -> list[str]:
    """The grouped product without padding against DeepGEMM's contiguous one."""
    lines = [
        "| tokens | N, K | experts with rows | DeepGEMM µs | ours µs | ratio | weights, of copy | bitwise |",
        "|--:|---|--:|--:|--:|--:|--:|---|",
    ]
    for r in records:
        tokens, n, k = r["shape"]  # type: ignore[misc]
        share = f"{100 * r['weights_gb_s'] / r['copy_gb_s']:.0f} %"  # type: ignore[operator]
        active = f"{r['active']:.0f}"
        lines.append(row(tokens, f"{n}, {k}", active, r["stock_us"], r["ours_us"], r["ratio"], share, equal(r)))
    return lines


def expert_table(records: list[Record]) -> list[str]:
    """Expert layer against both of vLLM's."""
    lines = [
        "| tokens | Triton µs | DeepGEMM µs | packed µs | contiguous µs | layout | faster of vLLM's / ours | layouts |",
        "|--:|--:|--:|--:|--:|---|--:|---|",
    ]
    for r in records:
        times = (r[f"{name}_us"] for name in ("triton", "deep_gemm", "packed", "contiguous"))
        same = equal({"bitwise": r["layouts_equal"]})
        lines.append(row(r["shape"][0], *times, r["layout"], r["ratio"], same))  # type: ignore[index]
    return lines


def router_table(records: list[Record]) -> list[str]:
    """The gate's product against vLLM's."""
    lines = ["| tokens | vLLM's | µs | ours µs | ratio |", "|--:|---|--:|--:|--:|"]
    for r in records:
        tokens = r["shape"][0]  # type: ignore[index]
        lines.append(row(tokens, f"`{r['stock']}`", r["stock_us"], r["ours_us"], r["ratio"]))
    return lines


def short_of_goal(records: list[Record]) -> str:
    """What is slower than it should be."""
    slow = [r for r in records if r["ratio"] < (GOAL if r["op"] == "experts" else 1.0)]  # type: ignore[operator]
    names = ", ".join(f"{r['op']} at {r['shape'][0]} ({r['ratio']})" for r in slow)  # type: ignore[index]
    return f"Short of the goal (experts within 1.05x of the faster of vLLM's, router no slower): {names or 'none'}."


def dispatch_table(records: list[Record]) -> list[str]:
    """One slice over each transport."""
    lines = [
        "| transport | ranks | tokens per rank | dispatch µs | combine µs | MB received | bits of one rank |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for r in records:
        name = "DeepEP" if r["op"] == "dispatch_deepep" else "NCCL"
        tokens = r["shape"][0]  # type: ignore[index]
        size = f"{r['received_bytes'] / 1e6:.2f}"  # type: ignore[operator]
        lines.append(row(name, r["ranks"], tokens, r["dispatch_us"], r["combine_us"], size, equal(r)))
    return lines


def tables() -> str:
    """Everything between the two marks of README.md."""
    parts = []
    for path in sorted((PACKAGE / "benchmarks" / "results").glob("*.jsonl")):
        records: list[Record] = [json.loads(line) for line in path.read_text().splitlines()]
        head = records[0]
        parts += [
            f"{head['gpu']}, torch {head['torch']}; microseconds, medians. Versions, date and commands: "
            "[h200.txt](benchmarks/results/h200.txt).",
            "",
        ]
        kernels = [r for r in records if r["op"] in KERNELS]
        products = [r for r in records if r["op"] == "m_grouped_fp8_gemm_nt_offsets"]
        layers = [r for r in records if r["op"] in ("experts", "router")]
        slices = [r for r in records if str(r["op"]).startswith("dispatch_")]
        if kernels:
            parts += ["Kernels, hidden 4096, top 6 (staging: the 128 experts of one of two ranks).", ""]
            parts += [*kernel_table(kernels), ""]
        if products:
            parts += [
                "`m_grouped_fp8_gemm_nt_offsets` against DeepGEMM's contiguous product (256 experts, top 6, random "
                "routing). Of copy: bytes of the weights of experts with rows, per second, against a copy.",
                "",
                *product_table(products),
                "",
            ]
        if layers:
            parts += [
                "Layers of DeepSeek-V4-Flash (256 experts, top 6, hidden 4096, intermediate 2048) in vLLM 0.26: the "
                "modular kernel with stock Triton and DeepGEMM experts and with the aligned ones in either layout.",
                "",
                *expert_table([r for r in layers if r["op"] == "experts"]),
                "",
                "The gate's product.",
                "",
                *router_table([r for r in layers if r["op"] == "router"]),
                "",
                short_of_goal(layers),
                "",
            ]
        if slices:
            parts += ["One slice of capacity 128 (256 experts, top 6, hidden 4096, bfloat16).", ""]
            parts += [*dispatch_table(slices), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(rewrite(PACKAGE, tables, __doc__))
