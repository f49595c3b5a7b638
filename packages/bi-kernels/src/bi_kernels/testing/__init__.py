"""Test tools of the four packages: bitwise comparison, the invariance driver, hypothesis strategies, pytest plugin."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bitwise import Difference, assert_bitwise_equal, bit_view, first_difference
    from .invariance import (
        BATCH_SIZES,
        NEIGHBOURS,
        QUICK_BATCH_SIZES,
        BatchVarianceError,
        assert_batch_invariant,
        must_detect,
        num_threads,
        position_classes,
    )

__all__ = [
    "BATCH_SIZES",
    "NEIGHBOURS",
    "QUICK_BATCH_SIZES",
    "BatchVarianceError",
    "Difference",
    "assert_batch_invariant",
    "assert_bitwise_equal",
    "bit_view",
    "first_difference",
    "must_detect",
    "num_threads",
    "position_classes",
]

_MODULES = dict.fromkeys(__all__, "invariance") | dict.fromkeys(
    ("Difference", "assert_bitwise_equal", "bit_view", "first_difference"), "bitwise"
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
