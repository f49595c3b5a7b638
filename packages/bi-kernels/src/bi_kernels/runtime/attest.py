"""Attestation: which arithmetic this process runs, as a record with a digest.

Trainer and rollout compare the digest before a step. Paths and process details are left out of it: two machines with
the same builds must agree.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import hooks, mode
from .errors import AttestationError
from .native import libraries
from .packages import PACKAGES, distribution_version, installed_version, missing_packages, module_file
from .settings import SETTINGS

__all__ = ["Attestation", "attest", "compare"]

_SCHEMA = 1

_NATIVE_FIELDS = ("loaded", "override", "sha256", "version", "torch_target", "archs", "nvcc", "flags", "sources_sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """What decides the bits in one process.

    Attributes:
        schema: Version of this record's layout.
        aligned: False if one of the four packages is missing, ``BI_PARTIAL=1`` is set, or vLLM runs in this process
            without their hooks.
        partial: Whether ``BI_PARTIAL=1`` is set.
        packages: Version by package; None for a missing one.
        versions: Versions of torch, vLLM and triton; None where absent.
        hooks: Record of each active plan, by package.
        native: Each compiled library: hash, version and how it was built, by op namespace.
        arch: ``"SM90"``, ``"SM100"``, or None without a GPU.
        scale_format: Name of the scale format of that arch, or None.
        environment: The environment variables that aligned mode looks at; unset ones are left out.
    """

    schema: int = _SCHEMA
    aligned: bool
    partial: bool
    packages: Mapping[str, str | None]
    versions: Mapping[str, str | None]
    hooks: Mapping[str, Mapping[str, Any]]
    native: Mapping[str, Mapping[str, Any]]
    arch: str | None
    scale_format: str | None
    environment: Mapping[str, str]

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON of every field."""
        return hashlib.sha256(_canonical(asdict(self)).encode()).hexdigest()

    def to_json(self) -> str:
        """The record and its digest as canonical JSON."""
        return _canonical({**asdict(self), "digest": self.digest})

    @classmethod
    def from_json(cls, text: str) -> Attestation:
        """Read back :meth:`to_json`.

        Raises:
            AttestationError: It is not such a record, has another layout, or does not match its digest.
        """
        try:
            record = json.loads(text)
            digest = record.pop("digest")
            attestation = cls(**record)
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise AttestationError(
                f"attestation: expected a record of layout {_SCHEMA}, got something else ({error}). "
                "Run the same version of bi-kernels in both processes."
            ) from error
        if attestation.digest != digest:
            raise AttestationError(
                f"attestation: expected digest {digest}, got {attestation.digest}. The record was changed on its way."
            )
        return attestation


def attest(*, required: Sequence[str] = ()) -> Attestation:
    """Record what decides the bits in this process.

    Works without a GPU. With one it asks that GPU for its architecture, so call it in the worker that owns it.

    Args:
        required: Packages that must be installed and, where this process has imported vLLM, have active hooks.

    Raises:
        AttestationError: A required package is missing or inactive, or somebody has overwritten a hook's edit.
    """
    versions = {package: installed_version(package) for package in PACKAGES}
    records = hooks.active_records()
    inactive = [package for package in PACKAGES if package not in records] if "vllm" in sys.modules else []
    problems = [f"{package} is not installed" for package in required if versions.get(package) is None]
    problems += [
        f"the hooks of {package} are not active in this process"
        for package in required
        if package in inactive and versions.get(package) is not None
    ]
    problems += [f"{target} no longer holds its replacement" for target in hooks.overwritten()]
    if problems:
        raise AttestationError(
            f"attestation: expected {', '.join(required) or 'the active hooks'} in place, got: {'; '.join(problems)}. "
            "Look in vLLM's log for a plugin that failed to load, and at VLLM_PLUGINS."
        )
    _declare_libraries()
    arch, scale_format = _arch_and_scale_format()
    return Attestation(
        aligned=not (missing_packages() or mode.is_partial() or inactive),
        partial=mode.is_partial(),
        packages=versions,
        versions={name: distribution_version(name) for name in ("torch", "vllm", "triton")},
        hooks={
            package: {"version": record.version, "vllm": record.vllm, "patches": list(record.patches)}
            for package, record in records.items()
        },
        native={
            namespace: {name: description[name] for name in _NATIVE_FIELDS}
            for namespace, library in sorted(libraries().items())
            for description in (library.describe(),)
        },
        arch=arch,
        scale_format=scale_format,
        environment={name: os.environ[name] for name in sorted(SETTINGS) if name in os.environ},
    )


def compare(mine: Attestation, theirs: Attestation) -> None:
    """Raise unless two processes run the same arithmetic.

    Raises:
        AttestationError: Lists every field that differs, with both values.
    """
    ours, others = _flatten(asdict(mine)), _flatten(asdict(theirs))
    absent = "absent"
    different = [
        f"{name}: {ours.get(name, absent)} here, {others.get(name, absent)} there"
        for name in sorted(ours.keys() | others.keys())
        if ours.get(name, absent) != others.get(name, absent)
    ]
    if different:
        raise AttestationError(
            "attestation: expected the same record in both processes, got differences in "
            + "; ".join(different)
            + ". Install the same builds and settings in both before the next step."
        )


def _declare_libraries() -> None:
    """Import the ``_native`` module of each installed package, so that its library is known."""
    import importlib

    for import_name in PACKAGES.values():
        if module_file(f"{import_name}._native") is not None:
            importlib.import_module(f"{import_name}._native")


def _arch_and_scale_format() -> tuple[str | None, str | None]:
    try:
        import torch
    except ImportError:
        return None, None
    if not torch.cuda.is_available():
        return None, None
    from ..arch import detect_arch
    from ..scale_format import scale_format_for

    arch = detect_arch()
    return arch.name, scale_format_for(arch).name


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        flat: dict[str, str] = {}
        for key, item in value.items():
            flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: json.dumps(value, sort_keys=True)}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
