"""The package as a user meets it: a light import, its exports, and the README's example."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bi_sparse_attn

README = Path(__file__).parents[1] / "README.md"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_is_light_and_names_resolve_whatever_was_imported_first() -> None:
    """Several ops share their module's name; the op must win even when the module is imported before."""
    code = """
import sys
import bi_sparse_attn
import bi_sparse_attn.vllm_hook
assert not {"torch", "vllm"} & set(sys.modules)
import bi_sparse_attn.gather_kv, bi_sparse_attn.mqa_logits
from bi_sparse_attn import gather_kv, mqa_logits
print(callable(gather_kv), callable(mqa_logits), callable(bi_sparse_attn.gather_kv))
"""
    assert python(code) == "True True True\n"


def test_every_export_exists() -> None:
    for name in bi_sparse_attn.__all__:
        assert getattr(bi_sparse_attn, name) is not None
    assert set(bi_sparse_attn.__all__) <= set(dir(bi_sparse_attn))


@pytest.mark.parametrize("stem", ["combine_indices", "gather_kv", "mqa_logits", "sparse_mla", "top_k_per_row"])
def test_references_have_the_signature_of_their_op(stem: str) -> None:
    reference = importlib.import_module(f"bi_sparse_attn.reference.{stem}")
    ops = [name for name in reference.__all__ if name in bi_sparse_attn.__all__ and name.islower()]
    assert ops
    for name in ops:
        assert inspect.signature(getattr(reference, name)) == inspect.signature(getattr(bi_sparse_attn, name)), name


def test_the_readme_example_runs_and_prints_what_it_says() -> None:
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README.read_text("utf-8"), re.S).groups()
    assert len(code.splitlines()) <= 15
    assert python(code) == printed


def test_the_readme_tables_are_generated_from_the_results() -> None:
    done = subprocess.run([sys.executable, str(README.parent / "benchmarks" / "tables.py"), "--check"], check=False)
    assert done.returncode == 0, "run python packages/bi-sparse-attn/benchmarks/tables.py"
