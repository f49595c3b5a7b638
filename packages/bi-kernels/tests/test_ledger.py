"""The ledger command: one Markdown row per patch of every installed package, with its reason and its end."""

from __future__ import annotations

import pytest

from bi_kernels.runtime.anchors import load_plan
from bi_kernels.runtime.hooks import HookPlan, Patch
from bi_kernels.runtime.ledger import ledger, main
from bi_kernels.runtime.packages import PACKAGES
from bi_kernels.testing.hooks import run_python


def test_one_row_per_patch() -> None:
    patch = Patch(target="m:f", replacement="r:g", why="a | b", upstream="link", remove_when="then", versions=("0.26",))
    unready = Patch(target="m:h", replacement="r:i", why="w", upstream="u", remove_when="t", ready=False, needs="a GPU")
    header, rule, *rows = ledger(HookPlan(package="p", import_name="p", patches=(patch, unready))).splitlines()
    assert header.count("|") == rule.count("|") == 7
    assert rows == [
        r"| `m:f` (attribute) | 0.26 | a \| b | link | then | ready |",
        "| `m:h` (attribute) | 0.26, 0.33 | w | u | t | needs a GPU |",
    ]


def test_main_prints_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ledger"]) == 0
    printed = capsys.readouterr().out
    for package in PACKAGES:
        plan = load_plan(package)
        assert (f"## {package}\n" in printed) == (plan is not None)
        assert all(f"| `{patch.target}` ({patch.kind}) |" in printed for patch in (plan.patches if plan else ()))


def test_command_line() -> None:
    printed = run_python(
        """
        import runpy, sys
        sys.argv[1:] = ["--ledger", "--package", "bi-kernels"]
        runpy.run_module("bi_kernels.runtime.hooks", run_name="__main__")
        """
    )
    assert printed.startswith("## bi-kernels\n")
