"""Typed errors of the four packages, and the blocker record that start-up errors are made of.

Everything raised on purpose derives from :class:`BatchInvarianceError`. Each message says what was expected, what
came, and what to do about it; start-up errors carry every blocker at once, because users who clear one blocker only
to meet the next one lose days.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "ArgumentError",
    "AttestationError",
    "BatchInvarianceError",
    "BlockedError",
    "Blocker",
    "CapacityError",
    "ContractError",
    "HookError",
    "NativeLibraryError",
    "ReloadError",
    "UnsupportedArchError",
]


@dataclass(frozen=True, slots=True)
class Blocker:
    """One reason why aligned mode cannot run.

    Attributes:
        subject: What was checked, e.g. ``"vllm"`` or ``"bi_kernels::fixed_order_mm"``.
        expected: The requirement.
        found: What is there instead.
        remedy: What the user can do about it.
    """

    subject: str
    expected: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.subject}: expected {self.expected}; found {self.found}. {self.remedy}"


class BatchInvarianceError(RuntimeError):
    """Base of every error that these packages raise on purpose."""


class ArgumentError(BatchInvarianceError, ValueError):
    """An argument has the wrong dtype, shape, stride, device or value. Nothing was written."""

    def __init__(self, name: str, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{name}: expected {expected}, got {found}. {remedy}")
        self.name = name
        self.expected = expected
        self.found = found
        self.remedy = remedy


class CapacityError(BatchInvarianceError):
    """Live data does not fit a capacity that was fixed from the model. Nothing was written."""


class UnsupportedArchError(BatchInvarianceError):
    """The GPU architecture is unknown, unsupported, or there is no GPU to ask."""


class ReloadError(BatchInvarianceError):
    """A weight reload was incomplete, repeated, or brought something that does not fit the model."""


class AttestationError(BatchInvarianceError):
    """Two processes that must run the same arithmetic do not."""


class BlockedError(BatchInvarianceError):
    """Start-up is refused. ``blockers`` holds every reason, not only the first one found."""

    def __init__(self, title: str, blockers: Sequence[Blocker]) -> None:
        self.blockers = tuple(blockers)
        lines = [f"{title} ({len(self.blockers)} blocker{'s' if len(self.blockers) != 1 else ''}):"]
        lines += [f"  {number}. {blocker}" for number, blocker in enumerate(self.blockers, 1)]
        super().__init__("\n".join(lines))


class HookError(BlockedError):
    """A vLLM hook cannot be applied. vLLM was left untouched."""


class NativeLibraryError(BlockedError):
    """A compiled library is missing, does not load, or was built from another version."""


class ContractError(BlockedError):
    """A third-party library does not provide what aligned mode needs from it."""
