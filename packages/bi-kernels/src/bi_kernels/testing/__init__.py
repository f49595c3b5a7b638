"""Test tools of the four packages: bitwise comparison, invariance driver, first-divergence tracer, strategies."""

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
    from .multiprocessors import few_multiprocessors
    from .trace import (
        Divergence,
        Rows,
        Trace,
        TraceError,
        first_divergence,
        note_plan,
        plan_differences,
        probe,
        recording,
    )

__all__ = [
    "BATCH_SIZES",
    "NEIGHBOURS",
    "QUICK_BATCH_SIZES",
    "BatchVarianceError",
    "Difference",
    "Divergence",
    "Rows",
    "Trace",
    "TraceError",
    "assert_batch_invariant",
    "assert_bitwise_equal",
    "bit_view",
    "few_multiprocessors",
    "first_difference",
    "first_divergence",
    "must_detect",
    "note_plan",
    "num_threads",
    "plan_differences",
    "position_classes",
    "probe",
    "recording",
]

_MODULES = (
    dict.fromkeys(__all__, "invariance")
    | dict.fromkeys(("Difference", "assert_bitwise_equal", "bit_view", "first_difference"), "bitwise")
    | {"few_multiprocessors": "multiprocessors"}
    | dict.fromkeys(
        (
            "Divergence",
            "Rows",
            "Trace",
            "TraceError",
            "first_divergence",
            "note_plan",
            "plan_differences",
            "probe",
            "recording",
        ),
        "trace",
    )
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
