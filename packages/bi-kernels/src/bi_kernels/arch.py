"""GPU architectures whose arithmetic the packages specify."""

from __future__ import annotations

import enum
import functools

import torch

from .runtime.errors import UnsupportedArchError

__all__ = ["Arch", "detect_arch"]


class Arch(enum.Enum):
    """An architecture with its own arithmetic. The value is the compute capability times ten."""

    SM90 = 90
    SM100 = 100

    @classmethod
    def from_capability(cls, major: int, minor: int) -> Arch:
        """Map a compute capability to an architecture.

        Raises:
            UnsupportedArchError: Anything but 9.0 and 10.x. Nothing is guessed from a neighbour.
        """
        if (major, minor) == (9, 0):
            return cls.SM90
        if major == 10:
            return cls.SM100
        raise UnsupportedArchError(
            f"compute capability: expected 9.0 (Hopper) or 10.x (Blackwell), got {major}.{minor}. "
            "Run on one of these GPUs, or unset VLLM_BATCH_INVARIANT."
        )


def detect_arch(device: torch.device | None = None) -> Arch:
    """Architecture of ``device``, or of the current CUDA device.

    Raises:
        UnsupportedArchError: The device is not a CUDA device, no GPU is visible (a driver process on a GPU-less node
            must not pick the arithmetic for everyone), or the GPU is not supported.
    """
    if device is not None and device.type != "cuda":
        raise UnsupportedArchError(
            f"arch: a {device.type} tensor has no GPU architecture. Pass arch=Arch.SM90 or arch=Arch.SM100 to say "
            "whose arithmetic the reference shall follow."
        )
    if device is not None and device.index is not None:
        return _arch_of(device.index)
    return _current_arch()


@functools.cache
def _arch_of(index: int) -> Arch:
    """Every call of an op asks, and a device's answer does not change; an error is not kept."""
    return _current_arch(index)


def _current_arch(index: int | None = None) -> Arch:
    if not torch.cuda.is_available():
        raise UnsupportedArchError(
            "arch: no GPU is visible to this process, so there is none to ask. Call this in the worker that owns "
            "the GPU, or pass arch= explicitly."
        )
    return Arch.from_capability(*torch.cuda.get_device_capability(index))
