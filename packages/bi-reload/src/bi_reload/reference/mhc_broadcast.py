"""Specification of the broadcast form of layer 0's mHC projection."""

from __future__ import annotations

import torch

from bi_kernels.reference.numerics import canonical_nan

from .mhc_pre import HC_MULT

__all__ = ["mhc_broadcast"]


def mhc_broadcast(fn: torch.Tensor) -> torch.Tensor:
    """Sum the projection over the streams, stream ascending, in float32.

    Args:
        fn: ``(24, 4 * H)`` float32.

    Returns:
        ``(24, H)`` float32, ``((fn0 + fn1) + fn2) + fn3``.
    """
    streams = fn.reshape(fn.shape[0], HC_MULT, fn.shape[1] // HC_MULT).unbind(1)
    return canonical_nan(((streams[0] + streams[1]) + streams[2]) + streams[3])
