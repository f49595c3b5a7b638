"""The four packages: their names, and where and in which version they are installed, without importing them."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

__all__ = [
    "PACKAGES",
    "distribution_version",
    "installed_version",
    "missing_packages",
    "module_file",
    "package_directories",
    "public_version",
    "release_prefix",
    "resolve",
]

PACKAGES = {
    "bi-kernels": "bi_kernels",
    "bi-sparse-attn": "bi_sparse_attn",
    "bi-moe-deepep": "bi_moe_deepep",
    "bi-reload": "bi_reload",
}
"""Distribution name to import name, in dependency order. The entry point in ``vllm.general_plugins`` is the latter."""


def package_directories(import_name: str) -> tuple[Path, ...]:
    """Directories of a top-level package, found without importing it; empty if it is not installed."""
    try:
        spec = importlib.util.find_spec(import_name)
    except (ImportError, ValueError):
        return ()
    locations = spec.submodule_search_locations if spec is not None else None
    return tuple(Path(location) for location in locations or ())


def module_file(module: str) -> Path | None:
    """File of ``module`` found from its top-level package, without importing either; None if there is none."""
    top, *rest = module.split(".")
    for directory in package_directories(top):
        stem = directory.joinpath(*rest)
        for candidate in (stem.with_name(stem.name + ".py"), stem / "__init__.py"):
            if rest and candidate.is_file():
                return candidate
        if not rest and (directory / "__init__.py").is_file():
            return directory / "__init__.py"
    return None


def installed_version(package: str) -> str | None:
    """Version of one of the four packages, from its ``_version.py``, or None if it is not installed."""
    import_name = PACKAGES.get(package, package.replace("-", "_"))
    path = module_file(f"{import_name}._version")
    if path is None:
        return None
    return str(importlib.import_module(f"{import_name}._version").__version__)


def distribution_version(name: str) -> str | None:
    """Version of any installed distribution from its metadata, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_packages() -> tuple[str, ...]:
    """Those of the four packages that are not installed."""
    return tuple(package for package in PACKAGES if installed_version(package) is None)


def public_version(version: str) -> str:
    """``version`` without its local part: ``"0.26.0+cu130"`` is ``"0.26.0"``."""
    return version.split("+", 1)[0]


@functools.cache
def release_prefix(version: str) -> str:
    """The first two numbers of a version (``"0.26"``), or the whole text if it does not start like one."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return f"{match[1]}.{match[2]}" if match else version


def resolve(reference: str) -> Any:
    """Import the object named by ``"package.module:attribute"``."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
