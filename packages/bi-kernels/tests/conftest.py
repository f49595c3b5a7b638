from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bi_kernels import _native  # noqa: F401  declares the library before a test copies the registry
from bi_kernels.runtime import hooks, native, probe


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fake_vllm = _load("fake_vllm")


def pytest_configure(config: pytest.Config) -> None:
    # Not "pytest_plugins", which only the outermost conftest.py may set: all four suites may run in one go.
    config.pluginmanager.import_plugin("bi_kernels.testing.pytest_plugin")


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """The module ``_quant_oracle.py``: with pytest's importlib mode, tests cannot import their neighbours."""
    return _load("_quant_oracle")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No switch set, and the registries as they were before the test."""
    for name in [name for name in os.environ if name.startswith(("VLLM_", "BI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(native, "_LIBRARIES", dict(native._LIBRARIES))
    monkeypatch.setattr(native, "_READY", set())
    monkeypatch.setattr(probe, "_REPORTS", {})


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> Iterator[fake_vllm.FakeWorld]:
    """vLLM 0.26.0 and the package bi_fake, importable, with the switch on."""
    assert "vllm" not in sys.modules
    world = fake_vllm.FakeWorld(tmp_path / "site")
    world.install_vllm()
    world.write(fake_vllm.PACKAGE)
    monkeypatch.syspath_prepend(str(world.root))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    yield world
    for active in list(hooks._ACTIVE.values()):
        hooks.deactivate(active.plan)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "bi_fake")]:
        del sys.modules[name]
