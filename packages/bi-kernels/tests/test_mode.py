from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bi_kernels
from bi_kernels.runtime import mode


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("1", True), ("2", True), ("-1", True)])
def test_the_switch_is_read_as_vllm_reads_it(monkeypatch, value, expected):
    monkeypatch.delenv(mode.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(mode.SWITCH, value)
    assert mode.is_enabled() is expected


@pytest.mark.parametrize("value", ["", "on", "true"])
def test_a_switch_that_is_no_integer_raises_as_in_vllm(monkeypatch, value):
    monkeypatch.setenv(mode.SWITCH, value)
    with pytest.raises(ValueError, match="invalid literal"):
        mode.is_enabled()


def test_partial_is_exactly_one(monkeypatch):
    monkeypatch.delenv(mode.PARTIAL, raising=False)
    assert not mode.is_partial()
    monkeypatch.setenv(mode.PARTIAL, "1")
    assert mode.is_partial()
    monkeypatch.setenv(mode.PARTIAL, "yes")
    assert not mode.is_partial()


def test_importing_the_package_and_the_runtime_is_light():
    code = """
import sys, bi_kernels
from bi_kernels.runtime import anchors, attest, doctor, errors, hooks, mode, native, probe, settings
assert bi_kernels.is_enabled() is False
heavy = {"torch", "vllm", "rich", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_lazy_table_the_typed_imports_and_all_name_the_same_things():
    tree = ast.parse(Path(bi_kernels.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in guarded.body for alias in node.names}
    assert typed == vars(bi_kernels)["_EXPORTS"]
    assert set(bi_kernels.__all__) == {*typed, "__version__"}


def test_an_op_wins_over_the_module_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "lazy_demo").mkdir()
    (tmp_path / "lazy_demo" / "__init__.py").write_text(
        "from bi_kernels.runtime.lazy import attach\nattach(__name__, {'same': 'same', 'other': 'same'})\n"
    )
    (tmp_path / "lazy_demo" / "same.py").write_text("def same():\n    return 1\n\n\ndef other():\n    return 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import lazy_demo
    from lazy_demo.same import other  # binds the submodule on the package, were it not refused

    assert lazy_demo.same() == 1
    assert lazy_demo.other is other
    assert {"same", "other"} <= set(dir(lazy_demo))
    with pytest.raises(AttributeError, match="no attribute 'third'"):
        _ = lazy_demo.third
    for name in ("lazy_demo", "lazy_demo.same"):
        monkeypatch.delitem(sys.modules, name)
