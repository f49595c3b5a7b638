"""Reference of the FP8 quantiser: one arithmetic for activations, experts and weights."""

from __future__ import annotations

import torch

from ..scale_format import ScaleFormat
from .numerics import canonical_nan, to_e4m3
from .scale_format import ceil_to_ue8m0, pack_ue8m0, unpack_ue8m0

__all__ = ["dequantize", "dequantize_blocks", "per_block_quant_fp8", "per_token_group_quant_fp8", "quantize_groups"]

_FLOOR = 1e-10  # float32 0x2edbe6ff; of amax, and again of the scale in the ceil formats
_E4M3_MAX = 448.0


def quantize_groups(values: torch.Tensor, scale_format: ScaleFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantiser itself, on groups that lie along the last dimension.

    Args:
        values: ``(..., n)``, float32: one group per row.
        scale_format: FLOAT32, or one of the two that round the scale up to a power of two.

    Returns:
        ``(codes, scales)``: ``(..., n)`` float8_e4m3fn and ``(...)`` float32 (UE8M0 scales are packed by the caller).

    Invariance:
        Each group is quantised from its own values: max and abs have no rounding, hence no order.
    """
    amax = values.abs().amax(-1)  # amax keeps NaN; a CUDA fmaxf would drop it
    finite = torch.isfinite(amax)
    # Divisors are tensors: by a Python number, torch multiplies by the reciprocal on some devices.
    scales = amax.clamp(min=_FLOOR) / torch.full((), _E4M3_MAX, device=values.device)
    if scale_format is not ScaleFormat.FLOAT32:
        # The second floor is reached by amax < 448e-10: a zero group gets 2**-33, as in vLLM's unfused quantiser.
        scales = ceil_to_ue8m0(scales.clamp(min=_FLOOR))
    scales = torch.where(finite, scales, torch.nan)
    # A NaN scale makes every quotient NaN: the whole group says so, none of its numbers survives by luck.
    return to_e4m3(values / scales.unsqueeze(-1)), scales


def per_token_group_quant_fp8(
    x: torch.Tensor,
    *,
    masked_m: torch.Tensor | None = None,
    group_size: int = 128,
    scale_format: ScaleFormat,
    out_q: torch.Tensor,
    out_s: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`bi_kernels.per_token_group_quant_fp8`; the outputs are the caller's."""
    rows = slice(None) if masked_m is None else masked_rows(masked_m, x.shape[1])
    values = x[rows].float()
    write_quantized(
        values.unflatten(-1, (values.shape[-1] // group_size, group_size)), scale_format, rows, out_q, out_s
    )
    return out_q, out_s


def masked_rows(masked_m: torch.Tensor, capacity: int) -> torch.Tensor:
    """``(E, capacity)`` bool: the first ``masked_m[e]`` rows of each expert."""
    return torch.arange(capacity, device=masked_m.device) < masked_m.unsqueeze(-1)


def write_quantized(
    groups: torch.Tensor,
    scale_format: ScaleFormat,
    rows: torch.Tensor | slice,
    out_q: torch.Tensor,
    out_s: torch.Tensor,
) -> None:
    """Quantise ``(..., groups, n)`` float32 and write codes and scales to the given rows of the outputs."""
    codes, scales = quantize_groups(groups, scale_format)
    # As bytes: indexed writes are not implemented for float8 in every torch release.
    out_q.view(torch.uint8)[rows] = codes.flatten(-2).view(torch.uint8)
    out_s[rows] = pack_ue8m0(scales) if scale_format is ScaleFormat.UE8M0 else scales


def per_block_quant_fp8(
    w: torch.Tensor, *, block: int = 128, scale_format: ScaleFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`bi_kernels.per_block_quant_fp8`."""
    rows, columns = w.shape
    # Zeros do not move an amax, so that ragged edge blocks can be filled up with them.
    padded = w.new_zeros((-(-rows // block) * block, -(-columns // block) * block), dtype=torch.float32)
    padded[:rows, :columns] = w
    blocks = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block).transpose(1, 2)
    codes, scales = quantize_groups(blocks.flatten(2), scale_format)
    codes = codes.view(blocks.shape).transpose(1, 2).reshape(padded.shape)
    return codes[:rows, :columns].contiguous(), scales


def dequantize(q: torch.Tensor, s: torch.Tensor, group_size: int = 128) -> torch.Tensor:
    """See :func:`bi_kernels.dequantize`."""
    num_groups = q.shape[-1] // group_size
    scales = unpack_ue8m0(s, num_groups) if s.dtype == torch.int32 else s
    groups = q.float().reshape(*q.shape[:-1], num_groups, group_size)
    return canonical_nan(groups * scales.unsqueeze(-1)).flatten(-2)


def dequantize_blocks(q: torch.Tensor, s: torch.Tensor, block: int = 128) -> torch.Tensor:
    """See :func:`bi_kernels.dequantize_blocks`."""
    scales = s.repeat_interleave(block, 0)[: q.shape[0]].repeat_interleave(block, 1)[:, : q.shape[1]]
    return canonical_nan(q.float() * scales)
