"""The end-to-end part of README.md: ``python -m aligned_e2e.readme_table``, with ``--check`` to compare only.

It stands between two marks and is made from the committed report of profile h200; without one it says that there is
none.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from .report_view import (
    Compared,
    Record,
    at,
    comparisons,
    items,
    load_report,
    mapping,
    number,
    profile_of,
    rows_of,
    text,
)

__all__ = ["END", "REPORT", "START", "block", "main", "rewritten"]

ROOT = pathlib.Path(__file__).parents[2]
REPORT = ROOT / "ci" / "aligned_e2e" / "results" / "h200" / "report.json"
START, END = "<!-- python -m aligned_e2e.readme_table -->\n", "<!-- end of aligned_e2e -->\n"
_KINDS = {
    "rollout": "schedules of the same requests",
    "actor": "actors",
    "reload": "weight reload",
    "32 heads": "checkpoint with 32 heads",
    "two GPUs": "two GPUs",
}


def block(report: Record | None) -> str:
    """What stands between the marks.

    Args:
        report: The report, or None if there is none.
    """
    if report is None:
        return "Profile `h200`: not run in this form.\n"
    compared = list(comparisons(report))
    lines = [_row("compared", "runs", "tokens", "different"), _row("---", "--:", "--:", "--:")]
    lines += [_counted(name, [c for c in compared if c.kind == kind]) for kind, name in _KINDS.items()]
    stock, other = number(report, "stock", "tokens"), number(report, "stock", "tokens_different")
    lines += [_row("stock vLLM, for comparison", 1, _shown(stock), _shown(other)), ""]
    faults = rows_of(report, "sabotages")
    caught = f"{sum(row.get('caught') is True for row in faults)} of {len(faults)}" if faults else "not run"
    failures = report.get("failures")
    ending = f"failures: {len(failures) if isinstance(failures, list) else 'not run'}"
    lines += [f"Faults on purpose caught: {caught}; {ending}.", ""]
    cost = rows_of(report, "cost")
    if not cost:
        return "\n".join([*lines, "Speed against stock vLLM: not run.", ""])
    note = text(report, "cost_note") or (
        "A forward's time, from first kernel to last, is against the stock side named, whose forward is shorter."
    )
    note += (
        "\nGPU work is the time in which kernels ran, under a profiler, against the stock side with less of it. Where "
        "the GPU was busy\nfor a part of the forward only, the host decided how long it took, and turns are far apart."
    )
    by = "by the median over pairs of neighbouring turns (least to most)" if any(map(_ends, cost)) else "of two medians"
    if (layers := number(report, "cost_model", "layers")) is not None:
        shared = ", which share the weights of a few" if at(report, "cost_model", "shared") is True else ""
        lines.append(f"Speed of a model as wide as DeepSeek-V4-Flash with {layers:g} layers{shared}.")
    lines += [f"Tokens/s are against the stock side with more of them, slower {by}.", note, ""]
    lines += [_row("tokens/s", "batch", "stock", "aligned", "slower by", "forward", "GPU work", "busy")]
    lines += [_row("---", "--:", "--:", "--:", "--:", "--:", "--:", "--:")]
    for row in cost:
        rates = (_shown(number(row, key)) for key in ("batch", "stock_tok_s", "aligned_tok_s"))
        slower, gpu = (_percent(number(row, key)) for key in ("overhead_percent", "forward_overhead_percent"))
        side = text(row, "forward_baseline")
        gpu += f" against {side}" if side else ""
        work = _work(profile_of(rows_of(report, "profiles"), row))
        lines.append(_row(text(row, "workload") or "-", *rates, slower + _ends(row), gpu, *work))
    return "\n".join([*lines, ""])


def rewritten(readme: str, report: Record | None) -> str:
    """README.md's text with the block made anew."""
    before, rest = readme.split(START)
    return before + START + "\n" + block(report) + "\n" + END + rest.split(END)[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the block anew, or with ``--check`` return 1 if it is another one than that."""
    parser = argparse.ArgumentParser(prog="aligned_e2e.readme_table", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args(argv)
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = rewritten(old, load_report(REPORT) if REPORT.is_file() else None)
    if not arguments.check:
        readme.write_text(new, encoding="utf-8")
    return int(arguments.check and new != old)


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _counted(name: str, found: Sequence[Compared]) -> str:
    ran = [c for c in found if c.state != "open"]
    if not ran:
        return _row(name, "not run", "", "")
    runs = f"{len(ran)} of {len(found)}" if len(ran) < len(found) else len(ran)
    return _row(name, runs, _shown(sum(c.compared or 0 for c in ran)), _shown(sum(c.different or 0 for c in ran)))


def _shown(value: float | None) -> str:
    return "not run" if value is None else f"{value:,.0f}"


def _ends(row: Record) -> str:
    """The least and the most of all pairs of turns."""
    spread = [number({"x": x}, "x") for x in items(row, "overhead_spread")]
    if len(spread) != 3 or spread[0] is None or spread[2] is None:
        return ""
    return f" ({spread[0]:+.0f} to {spread[2]:+.0f})"


def _work(profile: Record) -> tuple[str, str]:
    """How much more work the GPU has than stock's, and for what share of the aligned forward it is busy with it."""
    sides = mapping(profile, "sides")
    busy = {name: us for name in sides if (us := number(sides, name, "busy_us"))}
    stock = [us for name, us in busy.items() if name != "aligned"]
    if "aligned" not in busy or not stock:
        return "not profiled", "not profiled"
    percent = number(sides, "aligned", "busy_percent")
    return _percent(100 * (busy["aligned"] / min(stock) - 1)), "not profiled" if percent is None else f"{percent:.0f} %"


def _percent(value: float | None) -> str:
    return "not run" if value is None else f"{value:+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
