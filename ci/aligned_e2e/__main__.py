"""``python -m aligned_e2e --profile cpu``: rollout, actor and reload on this machine; exit 1 on any difference."""

from __future__ import annotations

import argparse
import pathlib
import sys

from rich.console import Console

from . import cpu, h200
from .report import Report, ReportError, check_report

_OUTPUT = pathlib.Path("build") / "aligned_e2e" / "report.json"


def main(argv: list[str] | None = None) -> int:
    """Run a profile, print its table and write its report."""
    parser = argparse.ArgumentParser(prog="aligned_e2e", description=__doc__)
    parser.add_argument("--profile", choices=("cpu", "h100", "h200", "gb200"), default="cpu")
    parser.add_argument("--output", type=pathlib.Path, default=_OUTPUT, help="where the report goes")
    parser.add_argument("--check", type=pathlib.Path, metavar="REPORT", help="only read a report and say what it says")
    h200.add_arguments(parser)
    arguments = parser.parse_args(argv)
    console = Console()
    if arguments.check is not None:
        return _check(console, arguments.check)
    if arguments.profile in ("h100", "h200"):
        return h200.run(arguments, console)
    if arguments.profile == "gb200":
        console.print(
            "profile gb200: declared and not run. It expects Blackwell, where no kernel of the four packages has been "
            "run and their hooks refuse. Run --profile h100 or h200 on Hopper, or --profile cpu."
        )
        return 2
    report: Report = cpu.run(console)
    report.write(arguments.output)
    report.print(console)
    console.print(f"report: {arguments.output}")
    return 1 if report.failures else 0


def _check(console: Console, path: pathlib.Path) -> int:
    """Exit code 0: unchanged and aligned, 1: not aligned, 2: no report, or changed."""
    try:
        failures = check_report(path)
    except ReportError as error:
        console.print(str(error), markup=False)
        return 2
    for failure in failures:
        console.print(f"FAILED {failure}", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
