"""Loader of the compiled libraries. A library adds CUDA kernels to ops that Python has declared, and nothing else.

Importing a package never fails for want of its library; *using* an op on CUDA tensors without its kernel always does.
Loading checks what the library was built from, because a library of another version is another arithmetic.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .errors import Blocker, NativeLibraryError
from .packages import PACKAGES, installed_version, module_file, package_directories

__all__ = ["BUILD_INFO_KEYS", "NativeLibrary", "libraries", "op_blockers", "require_native"]

BUILD_INFO_KEYS = (
    "package",
    "version",
    "torch_target",
    "archs",
    "nvcc",
    "compiler",
    "flags",
    "sources_sha256",
)
"""Keys of ``build_info.json``, which the build writes beside ``_C.so``."""

_ARCH_CODES = {9: "90a", 10: "100f"}

_LIBRARIES: dict[str, NativeLibrary] = {}
_READY: set[str] = set()
_LOCK = threading.RLock()


def libraries() -> dict[str, NativeLibrary]:
    """Every library that its package has declared in this process, by op namespace."""
    return dict(_LIBRARIES)


class NativeLibrary:
    """The compiled library of one package.

    Attributes:
        package: Distribution name.
        import_name: Import name; ``_C.so`` and ``build_info.json`` lie in that package.
        namespace: Namespace of its ops.
        ops: Names (``"namespace::name"``) of the ops for which it has CUDA kernels.
    """

    def __init__(self, *, package: str, import_name: str, namespace: str, ops: Sequence[str] = ()) -> None:
        self.package = package
        self.import_name = import_name
        self.namespace = namespace
        self.ops = tuple(op if "::" in op else f"{namespace}::{op}" for op in ops)
        self._loaded_from: Path | None = None
        with _LOCK:
            _LIBRARIES[namespace] = self

    def __repr__(self) -> str:
        return f"NativeLibrary({self.package!r}, loaded={self._loaded_from is not None})"

    @property
    def override(self) -> str | None:
        """Value of ``<IMPORT_NAME>_LIBRARY``: the path of another library to load, for debugging."""
        return os.environ.get(f"{self.import_name.upper()}_LIBRARY") or None

    @property
    def path(self) -> Path | None:
        """The library's file, or None if this install has none."""
        if self._loaded_from is not None:
            return self._loaded_from
        if self.override is not None:
            return Path(self.override)
        found = (directory / "_C.so" for directory in package_directories(self.import_name))
        return next((path for path in found if path.is_file()), None)

    def load(self) -> None:
        """Load the library, once per process.

        Raises:
            NativeLibraryError: Everything that stands against it.
        """
        blockers = self.blockers()
        if blockers:
            raise NativeLibraryError(f"the native library of {self.package} cannot be used", blockers)

    def available(self) -> bool:
        """Whether the library is loaded (it is loaded if need be) and has all its kernels."""
        return not self.blockers()

    def blockers(self) -> list[Blocker]:
        """Why the library cannot be used; empty once it is loaded and has a kernel for each of ``ops``.

        Loading a library initialises no GPU.
        """
        with _LOCK:
            if self._loaded_from is None:
                blockers = self._try_load()
                if blockers:
                    return blockers
            return [self._missing_kernel(op) for op in self.ops if not _has_cuda_kernel(op)]

    def arch_blockers(self) -> list[Blocker]:
        """Whether the library was compiled for the current GPU. Call it only where CUDA may be initialised."""
        import torch

        if not torch.cuda.is_available():
            return []
        major, minor = torch.cuda.get_device_capability()
        built = [str(arch) for arch in self._read_build_info().get("archs", [])]
        if _ARCH_CODES.get(major) in built:
            return []
        return [
            Blocker(
                f"GPU of {self.package}",
                f"one of the architectures the library was built for ({', '.join(built) or 'none'})",
                f"compute capability {major}.{minor}",
                f"Build {self.package} for this GPU (BI_CUDA_ARCHS), or run on another one.",
            )
        ]

    def describe(self) -> dict[str, Any]:
        """What the library is: path, sha256, and its build information. Loads nothing."""
        path = self.path
        exists = path is not None and path.is_file()
        info = self._read_build_info() if exists else {}
        return {
            "package": self.package,
            "namespace": self.namespace,
            "loaded": self._loaded_from is not None,
            "override": self.override is not None,
            "path": str(path) if path is not None else None,
            "sha256": _file_sha256(str(path), path.stat().st_mtime_ns) if exists and path is not None else None,
            **{key: info.get(key) for key in BUILD_INFO_KEYS if key != "package"},
        }

    def _missing_kernel(self, op: str) -> Blocker:
        return Blocker(
            op,
            "a CUDA kernel",
            f"none in {self._loaded_from}",
            f"Reinstall {self.package}: this library was not built from this version's sources.",
        )

    def _read_build_info(self) -> dict[str, Any]:
        path = self.path
        if path is None:
            return {}
        try:
            info = json.loads(path.with_name("build_info.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return info if isinstance(info, dict) else {}

    def _try_load(self) -> list[Blocker]:
        subject = f"native library of {self.package}"
        rebuild = f"Install a CUDA build of {self.package} {installed_version(self.package) or ''}".rstrip() + "."
        path = self.path
        blockers = []
        if path is None or not path.is_file():
            found = "no _C.so in the package: a reference-only install" if path is None else f"no file {path}"
            blockers.append(
                Blocker(subject, "a compiled library", found, f"{rebuild} To build it here: BI_BUILD_CUDA=on and nvcc.")
            )
        else:
            blockers += self._build_info_blockers(subject, path, rebuild)
        blockers += self._torch_blockers(subject)
        if blockers or path is None:
            return blockers

        import torch

        _import_ops(self.import_name)
        try:
            torch.ops.load_library(str(path))
        except Exception as error:  # the dynamic loader's reason arrives as OSError, torch adds context around it
            return [Blocker(subject, f"{path} to load", _reason(error), f"{rebuild} Then compare the torch versions.")]
        self._loaded_from = path
        return []

    def _build_info_blockers(self, subject: str, path: Path, rebuild: str) -> list[Blocker]:
        info = self._read_build_info()
        absent = [key for key in BUILD_INFO_KEYS if not info.get(key)]
        if absent:
            where = path.with_name("build_info.json")
            found = f"{where} without {', '.join(absent)}" if info else f"no readable {where}"
            return [Blocker(subject, "a record of how it was built", found, rebuild)]
        blockers = []
        if info["package"] != self.package:
            blockers.append(Blocker(subject, f"a library of {self.package}", f"one of {info['package']}", rebuild))
        version = installed_version(self.package)
        if version is not None and info["version"] != version:
            blockers.append(Blocker(subject, f"a build of {version}", f"a build of {info['version']}", rebuild))
        flags = info["flags"] if isinstance(info["flags"], str) else " ".join(map(str, info["flags"]))
        if re.search(r"use[_-]fast[_-]math|ffast-math", flags):
            blockers.append(
                Blocker(
                    subject,
                    "a build with IEEE arithmetic",
                    f"flags {flags!r}",
                    "Rebuild it without fast math: it changes division, square root and denormals.",
                )
            )
        return blockers

    def _torch_blockers(self, subject: str) -> list[Blocker]:
        try:
            import torch
        except ImportError as error:
            return [Blocker("torch", "a CUDA build of torch", f"torch does not import: {error}", "Install torch.")]
        if torch.version.cuda is None:
            return [
                Blocker(
                    subject,
                    "a CUDA build of torch",
                    f"CPU build of torch {torch.__version__}",
                    "Run on a machine with a CUDA build of torch. The references work here.",
                )
            ]
        target = str(self._read_build_info().get("torch_target") or "")
        if _numbers(str(torch.__version__)) < _numbers(target):
            return [Blocker("torch", f"torch {target} or newer", str(torch.__version__), "Upgrade torch.")]
        return []


def op_blockers(ops: Iterable[str]) -> list[Blocker]:
    """Why any of ``ops`` (``"namespace::name"``) has no CUDA kernel here; empty if all have one.

    A library's own blockers come once, however many of its ops are asked for.
    """
    blockers: list[Blocker] = []
    by_namespace: dict[str, list[str]] = {}
    for op in ops:
        by_namespace.setdefault(op.split("::", 1)[0], []).append(op)
    for namespace, names in by_namespace.items():
        library = _library_of(namespace)
        if library is None:
            blockers += [
                Blocker(
                    name,
                    "a CUDA kernel",
                    f"no installed package provides the namespace {namespace!r}",
                    "Install the package that owns this op.",
                )
                for name in names
            ]
            continue
        reasons = library.blockers()
        blockers += reasons
        named = {blocker.subject for blocker in reasons}
        for name in names:
            if name in named or _has_cuda_kernel(name):
                continue
            loaded = library._loaded_from is not None
            found = f"none in the library of {library.package}" if loaded else "its library is not loaded (see above)"
            blockers.append(Blocker(name, "a CUDA kernel", found, f"Install a build of {library.package} that has it."))
    return blockers


def require_native(*ops: str) -> None:
    """Raise unless every op has a CUDA kernel for the current GPU. Cheap once it has succeeded.

    Args:
        *ops: ``"namespace::name"``.

    Raises:
        NativeLibraryError: Lists every op without a kernel, and why.
    """
    if _READY.issuperset(ops):
        return
    blockers = op_blockers(ops)
    if not blockers:
        for namespace in {op.split("::", 1)[0] for op in ops}:
            blockers += _LIBRARIES[namespace].arch_blockers()
    if blockers:
        raise NativeLibraryError("CUDA kernels are missing, and there is no fallback", blockers)
    _READY.update(ops)


def _library_of(namespace: str) -> NativeLibrary | None:
    """The library that has the namespace. The packages' ``_native`` modules are imported until one declares it."""
    for import_name in PACKAGES.values():
        if namespace in _LIBRARIES:
            break
        if module_file(f"{import_name}._native") is not None:
            importlib.import_module(f"{import_name}._native")
    return _LIBRARIES.get(namespace)


def _import_ops(import_name: str) -> None:
    """Import the module that declares the ops, so that a kernel never meets an undeclared op."""
    name = f"{import_name}._ops"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, import_name):
            raise


def _has_cuda_kernel(op: str) -> bool:
    try:
        from .library import has_cuda_kernel

        return has_cuda_kernel(op)
    except (ImportError, RuntimeError):  # no torch; or the dispatcher's answer for an op that nobody has declared
        return False


def _reason(error: BaseException) -> str:
    """The error with its causes: the dynamic loader's own words are in ``OSError.__cause__``."""
    parts = []
    current: BaseException | None = error
    while current is not None:
        text = " ".join(str(current).split())
        parts.append(f"{type(current).__name__}: {text}" if text else type(current).__name__)
        current = current.__cause__
    return "; caused by ".join(parts)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+", 1)[0])[:2])


@functools.lru_cache(maxsize=16)
def _file_sha256(path: str, mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
