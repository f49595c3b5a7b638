"""The index of reported faults: which tests show each on a CPU, and what the rest needs."""

from __future__ import annotations

import pathlib
import tomllib
from typing import Any

__all__ = ["load_cases"]

_INDEX = pathlib.Path(__file__).parents[1] / "cases.toml"


def load_cases() -> dict[str, dict[str, Any]]:
    """By number: ``fault``, ``tests`` (node ids of pytest) and, where a CPU cannot show all of it, ``needs``."""
    return tomllib.loads(_INDEX.read_text(encoding="utf-8"))
