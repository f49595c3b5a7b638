from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Not "pytest_plugins", which only the outermost conftest.py may set: all four suites may run in one go.
    config.pluginmanager.import_plugin("bi_kernels.testing.pytest_plugin")
    config.addinivalue_line("markers", "two_gpus: needs two GPUs of one host (and fails without them)")
