from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Not "pytest_plugins", which only the outermost conftest.py may set: all four suites may run in one go.
    config.pluginmanager.import_plugin("bi_kernels.testing.pytest_plugin")


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """The module ``_quant_oracle.py``: with pytest's importlib mode, tests cannot import their neighbours."""
    spec = importlib.util.spec_from_file_location("_quant_oracle", Path(__file__).with_name("_quant_oracle.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
