"""The quantiser once more, from its definition, in Python numbers and float64: shares nothing with the package.

float32 division of float32 numbers may be done in float64 and rounded: 53 bits are more than twice 24 plus two.
"""

from __future__ import annotations

import math
import struct

import torch

TABLE = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
MIDDLES = (TABLE[1:] + TABLE[:-1]) / 2


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def scale_of(amax: float, *, ceil: bool) -> float:
    if not math.isfinite(amax):
        return math.nan
    scale = float32(max(amax, float32(1e-10)) / 448.0)
    if not ceil:
        return scale
    fraction, exponent = math.frexp(max(scale, float32(1e-10)))
    return math.ldexp(1.0, exponent - (fraction == 0.5))


def code_of(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes of float32 values, by table: nearest, ties to the even code, saturating."""
    quotient = (values.double() / scale.double()).float().double()
    magnitude = quotient.abs()
    below = torch.bucketize(magnitude, MIDDLES, right=False)  # middles strictly below the value
    above = torch.bucketize(magnitude, MIDDLES, right=True)  # and those equal to it
    even = torch.where(below % 2 == 0, below, above)
    codes = even + 128 * torch.signbit(quotient)
    return torch.where(torch.isnan(quotient), 0x7F, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def quantise_rows(groups: torch.Tensor, *, ceil: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``(..., 128)`` float32 -> codes and ``(...)`` scales."""
    amax = groups.double().abs().amax(-1)
    scales = torch.tensor([scale_of(v, ceil=ceil) for v in amax.flatten().tolist()]).reshape(amax.shape)
    return code_of(groups, scales.unsqueeze(-1)), scales


def bfloat16(values: torch.Tensor) -> torch.Tensor:
    """float64 to bfloat16, nearest even, for finite results: on the grid of units in the last place."""
    unit = torch.exp2((torch.frexp(values).exponent.clamp(min=-125) - 8).double())
    return (torch.round(values / unit) * unit).bfloat16()
