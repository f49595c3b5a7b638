"""The README's example runs as written, and says what it prints."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import bi_moe_deepep

PACKAGE = Path(__file__).parents[1]


def test_example() -> None:
    readme = (PACKAGE / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (promised,) = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    assert printed.getvalue() == promised


def test_every_public_op_is_in_the_readme() -> None:
    readme = (PACKAGE / "README.md").read_text(encoding="utf-8")
    ops = [name for name in bi_moe_deepep.__all__ if name.islower() and not name.startswith(("_", "native"))]
    assert [name for name in ops if f"`{name}`" not in readme] == []


def test_tables_are_generated_from_the_results() -> None:
    done = subprocess.run([sys.executable, str(PACKAGE / "benchmarks" / "tables.py"), "--check"])
    assert done.returncode == 0, "run python packages/bi-moe-deepep/benchmarks/tables.py"


def test_changelog_begins_with_this_version() -> None:
    changelog = (PACKAGE / "CHANGELOG.md").read_text(encoding="utf-8")
    (first, *_) = re.findall(r"^## \[?(\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert first == bi_moe_deepep.__version__
