from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bi_reload

ROOT = Path(__file__).parents[1]


def test_import_is_light() -> None:
    code = "import bi_reload, sys; assert not {'torch', 'vllm'} & set(sys.modules), 'not light'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_export_resolves() -> None:
    for name in bi_reload.__all__:
        assert getattr(bi_reload, name) is not None
    assert set(bi_reload.__all__) <= set(dir(bi_reload))


@pytest.mark.parametrize("name", ["mhc_pre", "mhc_post", "mhc_head"])
def test_op_wins_over_its_module(name: str) -> None:
    module = importlib.import_module(f"bi_reload.{name}")
    assert getattr(bi_reload, name) is getattr(module, name)


def test_changelog_names_this_version() -> None:
    heading = re.search(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heading is not None
    assert heading[1] == bi_reload.__version__


def test_readme_example_runs_as_written() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(example.strip().splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})


def test_tables_are_generated_from_the_results() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"])
    assert done.returncode == 0, "run python packages/bi-reload/benchmarks/tables.py"
