"""What the packages' ``tables.py`` share: rows of a table, and the part of README.md between two marks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

__all__ = ["equal", "rewrite", "row"]

START, END = "<!-- tables: python benchmarks/tables.py -->\n", "<!-- end of tables -->\n"


def row(*cells: object) -> str:
    """One line of a table."""
    return "| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |"


def equal(record: dict[str, object]) -> str:
    """What the comparison in the same run gave."""
    return "equal" if record["bitwise"] else "DIFFERENT"


def rewrite(package: Path, tables: Callable[[], str], description: str | None) -> int:
    """The command line: put ``tables()`` between the marks of ``package/README.md``, or with ``--check`` compare."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    readme = package / "README.md"
    text = readme.read_text()
    before, rest = text.split(START)
    after = rest.split(END)[1]
    new = before + START + "\n" + tables() + "\n" + END + after
    if args.check:
        return int(new != text)
    readme.write_text(new)
    return 0
