"""Other functions in the place of a module's own, for as long as a block runs: precision policies and sabotages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["Package", "replaced"]


class Package:
    """A package as the small model sees it, with some of its functions replaced.

    Args:
        package: The package; it keeps its own functions.
        functions: What the model gets instead, by name.
    """

    def __init__(self, package: ModuleType, **functions: Callable[..., Any]) -> None:
        self._package, self._functions = package, functions

    def __getattr__(self, name: str) -> Any:
        return self._functions.get(name) or getattr(self._package, name)


@contextlib.contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of ``target`` inside the block, and put the old ones back after it.

    Raises:
        AttributeError: ``target`` has no such attribute: a replacement that replaces nothing would go unnoticed.
    """
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
