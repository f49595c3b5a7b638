"""The hook tables of the installed packages as Markdown: what is edited in vLLM, why, and when the edit goes.

Command line: ``python -m bi_kernels.runtime.hooks --ledger [--package bi-reload ...]``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .anchors import load_plan
from .packages import PACKAGES

if TYPE_CHECKING:
    from .hooks import HookPlan

__all__ = ["ledger", "main"]


def ledger(plan: HookPlan) -> str:
    """One Markdown table of ``plan``, one row per patch, in the plan's order."""
    rows = [("edit", "vLLM", "why", "upstream", "remove when", "state"), ("---",) * 6]
    for patch in plan.patches:
        state = "ready" if patch.ready else f"needs {patch.needs}"
        edit = f"`{patch.target}` ({patch.kind})"
        rows.append((edit, ", ".join(patch.versions), patch.why, patch.upstream, patch.remove_when, state))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ledgers of the packages that are installed."""
    parser = argparse.ArgumentParser(prog="python -m bi_kernels.runtime.hooks", description=main.__doc__)
    parser.add_argument("--ledger", action="store_true", required=True, help="print the tables as Markdown")
    parser.add_argument("--package", action="append", choices=tuple(PACKAGES), help="repeatable; default: all four")
    for package in parser.parse_args(argv).package or PACKAGES:
        plan = load_plan(package)
        if plan is not None:
            print(f"## {package}\n\n{ledger(plan)}\n")
    return 0
