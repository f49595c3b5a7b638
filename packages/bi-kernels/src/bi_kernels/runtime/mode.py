"""The switch. Import-light: hooks ask it in processes that must import neither torch nor vLLM."""

from __future__ import annotations

import os

__all__ = ["PARTIAL", "SWITCH", "is_enabled", "is_partial"]

SWITCH = "VLLM_BATCH_INVARIANT"
"""vLLM's own switch, and the only one."""

PARTIAL = "BI_PARTIAL"
"""Allows aligned mode with some of the four packages missing, for work on one of them. Never counts as aligned."""


def is_enabled() -> bool:
    """Whether batch-invariant mode is asked for, read the way vLLM reads it: ``bool(int(value))``.

    Raises:
        ValueError: The variable holds something that is not an integer. vLLM raises the same.
    """
    return bool(int(os.environ.get(SWITCH, "0")))


def is_partial() -> bool:
    """Whether a run with fewer than four packages is allowed (``BI_PARTIAL=1``)."""
    return os.environ.get(PARTIAL, "0") == "1"
