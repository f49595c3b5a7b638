"""Reference of the UE8M0 scale arithmetic: all of it is done on the bits of the float."""

from __future__ import annotations

import torch

__all__ = ["ceil_to_ue8m0", "pack_ue8m0", "unpack_ue8m0"]

_ONE_EXPONENT = 1 << 23
_SMALLEST_BITS = 0x00400000  # 2**-127, which float32 holds as a subnormal
_LARGEST_BITS = 0x7F000000  # 2**127
_NAN_BYTE = 0xFF


def ceil_to_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """See :func:`bi_kernels.ceil_to_ue8m0`."""
    bits = scale.view(torch.int32)
    # Adding all ones below the exponent carries into it unless the mantissa is zero: exact powers of two stay.
    raised = (bits + (_ONE_EXPONENT - 1)) & ~(_ONE_EXPONENT - 1)
    # The same on subnormals would answer 2**-126 to everything; -0 (bits < 0) counts as zero.
    raised = torch.where((bits <= _SMALLEST_BITS) & (scale == scale.abs()), _SMALLEST_BITS, raised)
    representable = (scale >= 0) & (bits <= _LARGEST_BITS)
    return torch.where(representable, raised.view(torch.float32), torch.nan)


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """See :func:`bi_kernels.pack_ue8m0`; whatever UE8M0 cannot hold becomes the NaN byte."""
    exponents = ue8m0_bytes(scales)
    num_groups = exponents.shape[-1]
    words = (num_groups + 3) // 4
    # New memory, zeroed: the pad bytes of the last word are 0, and groups line up in words at any num_groups.
    padded = exponents.new_zeros((*exponents.shape[:-1], words * 4))
    padded[..., :num_groups] = exponents
    b = padded.view(*exponents.shape[:-1], words, 4)
    # int32 shifts wrap, so that byte 3 lands in the sign bit as it must.
    return b[..., 0] | (b[..., 1] << 8) | (b[..., 2] << 16) | (b[..., 3] << 24)


def ue8m0_bytes(scales: torch.Tensor) -> torch.Tensor:
    """The UE8M0 byte of each float32, as int32; 0xff where UE8M0 has no such number."""
    bits = scales.view(torch.int32)
    power_of_two = (bits >= _ONE_EXPONENT) & (bits <= _LARGEST_BITS) & ((bits & (_ONE_EXPONENT - 1)) == 0)
    exponent = torch.where(bits == _SMALLEST_BITS, 0, bits >> 23)
    return torch.where(power_of_two | (bits == _SMALLEST_BITS), exponent, _NAN_BYTE)


def unpack_ue8m0(packed: torch.Tensor, num_groups: int) -> torch.Tensor:
    """See :func:`bi_kernels.unpack_ue8m0`."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=packed.device)
    exponents = ((packed.unsqueeze(-1) >> shifts) & 0xFF).flatten(-2)[..., :num_groups]
    powers = torch.where(exponents == 0, _SMALLEST_BITS, exponents << 23).view(torch.float32)
    return torch.where(exponents == _NAN_BYTE, torch.nan, powers)
