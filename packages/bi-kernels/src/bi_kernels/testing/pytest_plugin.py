"""Pytest plugin of the four packages' test suites: markers, one seed per test, hypothesis without randomness.

A suite loads it from its ``conftest.py``; installing bi-kernels does not change anyone's pytest.
"""

from __future__ import annotations

import random
import zlib

import hypothesis
import pytest
import torch

__all__ = ["MARKERS", "seed_of"]

MARKERS = {
    "gpu": "needs a CUDA GPU (and fails without one: deselect with -m 'not gpu')",
    "sm90": "needs a Hopper GPU",
    "sm100": "needs a Blackwell GPU",
    "large": "needs tens of GiB of GPU memory",
    "vllm": "needs an installed vLLM",
}


def seed_of(node_id: str) -> int:
    """The seed of a test: a function of its name, so that neither order nor selection of tests changes its data."""
    return zlib.crc32(node_id.encode())


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and a hypothesis profile that draws the same examples on every run."""
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    hypothesis.settings.register_profile("batch_invariance", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("batch_invariance")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch and random, before fixtures draw from them."""
    seed = seed_of(item.nodeid)
    random.seed(seed)
    torch.manual_seed(seed)
