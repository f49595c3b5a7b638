from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch


def _load(name: str) -> ModuleType:
    """A module beside this one: with pytest's importlib mode, tests cannot import their neighbours by themselves."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_load("fake_layerwise")


def pytest_configure(config: pytest.Config) -> None:
    # Not "pytest_plugins", which only the outermost conftest.py may set: all four suites may run in one go.
    config.pluginmanager.import_plugin("bi_kernels.testing.pytest_plugin")


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """The module ``_mhc_oracle.py``."""
    return _load("_mhc_oracle")


class MhcWeights(NamedTuple):
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor


@pytest.fixture
def mhc_weights() -> Callable[..., MhcWeights]:
    """Weights of one mHC site, of the size that a trained model has: gates neither shut nor saturated."""

    def make(k: int, rows: int = 24, scales: int = 3) -> MhcWeights:
        g = torch.Generator().manual_seed(k)
        return MhcWeights(
            torch.randn(rows, k, generator=g) * k**-0.5,
            torch.rand(scales, generator=g) + 0.5,
            torch.randn(rows, generator=g),
        )

    return make


@pytest.fixture
def mhc_settings() -> dict[str, float]:
    return {"rms_eps": 1e-6, "hc_eps": 1e-6, "norm_eps": 1e-6}
