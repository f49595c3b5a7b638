"""Lazy package namespaces: ``import bi_kernels`` must import neither torch nor vLLM (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

__all__ = ["attach"]


class _LazyPackage(ModuleType):
    """A package whose exported names win over submodules of the same name.

    The import system binds a submodule on its package after importing it. Where an op and its module share a name
    (``bi_kernels.fixed_order_mm``), the op would turn into the module as soon as anybody imports the module.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_own_submodule = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if is_own_submodule and name in self.__dict__.get("_EXPORTS", ()):
            return
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        exports: Mapping[str, str] = self.__dict__.get("_EXPORTS", {})
        if name not in exports:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{self.__name__}.{exports[name]}"), name)
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__dict__.get("_EXPORTS", ())})


def attach(package: str, exports: Mapping[str, str]) -> None:
    """Make ``package`` resolve ``exports`` (name to submodule) on first use.

    Args:
        package: ``__name__`` of the calling ``__init__.py``.
        exports: Exported name to the submodule, relative to the package, that defines it.
    """
    module = sys.modules[package]
    module.__dict__["_EXPORTS"] = dict(exports)
    module.__class__ = _LazyPackage
