"""Rounding to bfloat16, and NaN, with one bit pattern on every machine."""

from __future__ import annotations

import math

import torch

__all__ = ["canonical_nan", "to_bfloat16"]


def canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """``x`` with every NaN replaced by the positive quiet NaN without payload (0x7fc00000 or 0x7fc0).

    Which operand's NaN an addition passes on differs between vector lanes, scalar tails and GPUs.
    """
    return torch.where(torch.isnan(x), torch.full_like(x, math.nan), x)


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16, nearest even; NaN becomes 0x7fc0.

    Left to the cast, a NaN would be 0xffff in a vector lane, 0x7fc0 in a scalar one and 0x7fff on a GPU.
    """
    return canonical_nan(x.to(torch.bfloat16))
