from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    """A neighbour of the tests: with pytest's importlib mode they cannot import each other."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fake_vllm = _load("fake_attention").fake_vllm
_load("vllm_engine")


def pytest_configure(config: pytest.Config) -> None:
    # Not "pytest_plugins", which only the outermost conftest.py may set: all four suites may run in one go.
    config.pluginmanager.import_plugin("bi_kernels.testing.pytest_plugin")
