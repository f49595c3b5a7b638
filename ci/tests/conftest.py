"""Fixtures of the repository's own tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """An actor leaves two threads behind, which on tensors this small mostly wait for each other."""
    torch.set_num_threads(1)
