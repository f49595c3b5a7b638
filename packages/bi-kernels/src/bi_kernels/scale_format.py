"""Formats of the FP8 quantiser's scales, their memory layout, and the UE8M0 packing."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from .arch import Arch
from .reference import scale_format as reference
from .runtime.checks import check_tensor, check_value

__all__ = [
    "ScaleFormat",
    "allocate_scales",
    "ceil_to_ue8m0",
    "pack_ue8m0",
    "scale_format_for",
    "unpack_ue8m0",
]

_TMA_ALIGNMENT = 4  # tokens: 16 bytes, the granularity of a TMA descriptor, in 4-byte scales


class ScaleFormat(enum.Enum):
    """How the scale of a 128-element group is stored; names as in vLLM, values as in the op schemas."""

    FLOAT32 = 0
    """float32, ``amax / 448`` as it comes."""
    FLOAT32_CEIL_UE8M0 = 1
    """float32 that holds a power of two: ``amax / 448`` rounded up."""
    UE8M0 = 2
    """The exponent byte of that power of two, four groups to an int32, the lowest group in the lowest byte."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a scale tensor in this format."""
        return torch.int32 if self is ScaleFormat.UE8M0 else torch.float32

    def columns(self, num_groups: int) -> int:
        """Length of a scale tensor's last dimension for ``num_groups`` groups."""
        return (num_groups + 3) // 4 if self is ScaleFormat.UE8M0 else num_groups


def scale_format_for(arch: Arch) -> ScaleFormat:
    """The scale format of an architecture's GEMMs: Hopper reads float32, Blackwell packed UE8M0.

    Args:
        arch: The architecture. There is no default: a driver without a GPU must not choose for its workers.
    """
    check_value("arch", isinstance(arch, Arch), "Arch.SM90 or Arch.SM100", repr(arch), "Use detect_arch(device).")
    return ScaleFormat.UE8M0 if arch is Arch.SM100 else ScaleFormat.FLOAT32_CEIL_UE8M0


def allocate_scales(
    tokens: Sequence[int], num_groups: int, scale_format: ScaleFormat, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Allocate a scale tensor in the layout that the GEMMs read: column-major, each column aligned for TMA.

    Args:
        tokens: The token dimensions: ``(M,)`` for contiguous, ``(E, T)`` for masked input.
        num_groups: Groups per token, G.
        scale_format: Decides dtype and last dimension, ``C = G`` or ``ceil(G / 4)``.
        device: Where.

    Returns:
        ``(*tokens, C)``, uninitialised, with strides ``(1, round_up(M, 4))`` or ``(round_up(T, 4) * C, 1,
        round_up(T, 4))``. Nothing reads the padding between columns.

    Invariance:
        Layout only: the padding depends on the number of tokens, no value does.
    """
    *batch, length = tokens
    aligned = -(-length // _TMA_ALIGNMENT) * _TMA_ALIGNMENT
    memory = torch.empty((*batch, scale_format.columns(num_groups), aligned), dtype=scale_format.dtype, device=device)
    return memory.mT[..., :length, :]


def ceil_to_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """Round up to a power of two that UE8M0 can hold; exact powers of two stay.

    *Exact op*; any device. The rule works on the float's bits: through ``log2``, ``ceil`` and ``exp2`` the numbers
    just above a power of two would be rounded down to it.

    Args:
        scale: float32, any shape.

    Returns:
        float32, same shape, in ``2**-127 .. 2**127``; zero gives ``2**-127``. NaN where there is no such power: for
        negative numbers, NaN, and everything above ``2**127``.

    Raises:
        ArgumentError: Another dtype.

    Invariance:
        Elementwise.

    Source: design.md, settled numerics; vLLM ``utils/deep_gemm.py: _ceil_to_ue8m0`` on finite input, without log2.
    """
    check_tensor("scale", scale, dtype=torch.float32)
    return reference.ceil_to_ue8m0(scale)


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Pack powers of two into UE8M0 bytes, four to an int32.

    *Exact op*; any device.

    Args:
        scales: ``(..., G)``, float32 powers of two in ``2**-127 .. 2**127``, or NaN.

    Returns:
        ``(..., ceil(G / 4))`` int32, contiguous. Byte ``j`` of word ``w``, the lowest first, belongs to group
        ``4 w + j``; it is the exponent plus 127, or 0xff for NaN. Pad bytes of the last word are 0.

    Raises:
        ArgumentError: Another dtype, no dimension, or (on the CPU, where looking is free of a device sync) a number
            that is not such a power. On a GPU these become 0xff: NaN scales, which cannot be overlooked.

    Invariance:
        Row ``i`` of the result depends on row ``i`` of ``scales`` alone.

    Source: vLLM ``fp8_utils.py: _silu_mul_quant_fp8_packed_kernel``, the layout of its packed scales.
    """
    check_tensor("scales", scales, dtype=torch.float32)
    check_value("scales", scales.dim() > 0, "at least one dimension", "a scalar", "Add the dimension of groups.")
    if scales.device.type == "cpu":
        lost = (reference.ue8m0_bytes(scales) == 0xFF) & ~torch.isnan(scales)
        if bool(lost.any()):
            index = tuple(int(i) for i in lost.nonzero()[0])
            check_value(
                "scales",
                False,
                "powers of two in 2**-127 .. 2**127",
                f"{scales[index].item()!r} at {index}",
                "Round with ceil_to_ue8m0 first, and quantise with the rounded scale.",
            )
    return reference.pack_ue8m0(scales)


def unpack_ue8m0(packed: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Undo :func:`pack_ue8m0`.

    *Exact op*; any device.

    Args:
        packed: ``(..., ceil(G / 4))``, int32, any strides.
        num_groups: G; the bytes past it are dropped.

    Returns:
        ``(..., G)`` float32 powers of two; NaN (0x7fc00000) for byte 0xff.

    Raises:
        ArgumentError: Another dtype, or ``num_groups`` does not belong to this number of words.

    Invariance:
        Row ``i`` of the result depends on row ``i`` of ``packed`` alone.

    Source: as :func:`pack_ue8m0`.
    """
    check_tensor("packed", packed, dtype=torch.int32)
    check_value("packed", packed.dim() > 0, "at least one dimension", "a scalar", "Add the dimension of words.")
    words = ScaleFormat.UE8M0.columns(num_groups)
    check_value(
        "num_groups",
        num_groups >= 0 and words == packed.shape[-1],
        f"a number of groups that fills {packed.shape[-1]} words",
        num_groups,
        "Pass the hidden size divided by the group size.",
    )
    return reference.unpack_ue8m0(packed, num_groups)
