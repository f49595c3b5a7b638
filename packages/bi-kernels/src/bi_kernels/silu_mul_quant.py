"""SiLU, multiply and FP8 quantisation in one op, for contiguous and for expert-masked input."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from . import _ops
from ._masked_m import check_masked_m
from .arch import Arch, detect_arch
from .reference import silu_mul_quant as reference
from .runtime.checks import check_output, check_rows_aligned, check_tensor, check_value
from .runtime.native import require_native
from .scale_format import ScaleFormat, allocate_scales, scale_format_for

__all__ = ["GroupOffsets", "fused_silu_mul_per_token_group_quant", "group_offsets", "silu_and_mul"]


def fused_silu_mul_per_token_group_quant(
    x: torch.Tensor,
    *,
    masked_m: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
    clamp_limit: float | None = None,
    group_size: int = 128,
    scale_format: ScaleFormat | None = None,
    arch: Arch | None = None,
    out_q: torch.Tensor | None = None,
    out_s: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu(gate) * up``, quantised to float8_e4m3fn with one scale per 128 elements.

    *Exact op*: the kernel equals the reference bit for bit on every input, and both equal :func:`silu_and_mul`
    followed by :func:`per_token_group_quant_fp8`, which have the arithmetic.

    A group with a NaN or an infinity in its gate or up elements, or whose product overflows bfloat16, gets a NaN
    scale (0x7fc00000, byte 0xff) and NaN codes (0x7f), in every variant; other groups do not notice.

    Args:
        x: ``(M, 2 I)`` contiguous tokens or ``(E, T, 2 I)`` tokens by expert, bfloat16, last dim contiguous; on a
            GPU rows start at multiples of 16 bytes. Gate half first. ``I`` is a multiple of ``group_size``; M, E and
            T may be 0.
        masked_m: ``(E,)``, int32, contiguous, values 0 to T; only with ``(E, T, 2 I)``. Rows at or past
            ``masked_m[e]`` of expert ``e`` are left untouched: neither read nor written. None: all rows.
        m_indices: ``(M,)``, int32, contiguous; only with ``(M, 2 I)``: each row's expert in a grouped product. Rows
            with a negative one are nobody's and left untouched. None: all rows.
        clamp_limit: DeepSeek-V4's ``swiglu_limit``, positive: before SiLU, up is clamped to +-limit and gate from
            above only. None: no clamp.
        group_size: 128.
        scale_format: How scales are rounded and stored; None for ``scale_format_for(arch)``.
        arch: Whose arithmetic; None for that of the GPU that holds ``x``. Required for CPU tensors.
        out_q: ``(M, I)`` or ``(E, T, I)``, float8_e4m3fn, last dim contiguous, on a GPU rows at multiples of 8 bytes,
            or None to allocate.
        out_s: ``(M, C)`` or ``(E, T, C)``, float32 with ``C = I / 128``, or for UE8M0 int32 with ``C = ceil(I /
            512)``; any strides without overlap; None for :func:`allocate_scales`. Must not overlap ``x``.

    Returns:
        ``(q, s)``: ``out_q`` and ``out_s``. Rows that are left untouched are uninitialised if allocated here.

    Raises:
        ArgumentError: Wrong dtype, shape, stride, device or value. Nothing was written. (``masked_m``'s values are
            looked at on the CPU only: on a GPU that would be a sync. The kernel takes them as limits up to T.)
        UnsupportedArchError: ``arch`` is None and ``x`` is not on a supported GPU.
        NativeLibraryError: ``x`` is on a GPU and the compiled kernel is missing.

    Invariance:
        Row ``i`` of both outputs depends on row ``i`` of ``x`` (and on whether it is left out) alone, bit for bit.

    Source: preview-pr.txt, *Fused activation and FP8 quantization*; vLLM ``fp8_utils.py:
    silu_mul_per_token_group_quant_fp8_colmajor`` (Hopper) and ``silu_mul_quant_fp8_packed_triton`` (Blackwell),
    ``batched_deep_gemm_moe.py: persistent_masked_m_silu_mul_quant`` for the masked layout; design.md for the rest.
    """
    check_tensor("x", x, dtype=torch.bfloat16, last_dim_contiguous=True)
    check_value("group_size", group_size == 128, "128", group_size, "No other size is specified for DeepSeek-V4.")
    check_value(
        "x",
        x.dim() in (2, 3) and x.shape[-1] % (2 * group_size) == 0,
        f"shape (M, 2 I) or (E, T, 2 I), I a multiple of {group_size}",
        tuple(x.shape),
        "Pass gate and up halves side by side.",
    )
    _check_limit(clamp_limit)
    if masked_m is not None:
        check_masked_m(masked_m, x, "2 I")
    if m_indices is not None:
        check_value("m_indices", x.dim() == 2, "None, as x is (E, T, 2 I)", "a tensor", "Pass x as (M, 2 I).")
        check_tensor("m_indices", m_indices, dtype=torch.int32, shape=(x.shape[0],), device=x.device, contiguous=True)
    if arch is None:
        arch = detect_arch(x.device)
    _check_arch(arch)
    if scale_format is None:
        scale_format = scale_format_for(arch)
    check_value(
        "scale_format", isinstance(scale_format, ScaleFormat), "a ScaleFormat", repr(scale_format), "Or pass None."
    )
    tokens, hidden = x.shape[:-1], x.shape[-1] // 2
    num_groups = hidden // group_size
    if out_q is not None:
        check_output("out_q", out_q, torch.float8_e4m3fn, (*tokens, hidden), x.device, last_dim_contiguous=True)
    if out_s is not None:
        check_output("out_s", out_s, scale_format.dtype, (*tokens, scale_format.columns(num_groups)), x.device)
    if x.is_cuda:
        require_native("bi_kernels::fused_silu_mul_per_token_group_quant")
        check_rows_aligned("x", x, 16)
        if out_q is not None:
            check_rows_aligned("out_q", out_q, 8)
    if out_q is None:
        out_q = torch.empty((*tokens, hidden), dtype=torch.float8_e4m3fn, device=x.device)
    if out_s is None:
        out_s = allocate_scales(tokens, num_groups, scale_format, device=x.device)
    _ops.fused_silu_mul_per_token_group_quant(
        x, masked_m, m_indices, clamp_limit, group_size, scale_format.value, arch.value, out_q, out_s
    )
    return out_q, out_s


def silu_and_mul(x: torch.Tensor, *, clamp_limit: float | None = None, arch: Arch) -> torch.Tensor:
    """``silu(gate) * up`` in bfloat16: the activation of the fused op, for callers that quantise later.

    *Exact op*; any device. SiLU is ``gate / (1 + exp(-gate))`` in float32, with the exponential of
    :mod:`bi_kernels.reference.numerics`. On SM90 the clamped gate and up, SiLU, and the product are each rounded to
    bfloat16, as vLLM's unfused Hopper chain does; on SM100 everything is float32 until the product is rounded. Below
    a gate of -88.73 ``exp`` overflows and SiLU is -0 (the true value is above -2.7e-37).

    An up of -0 counts as +0: vLLM's kernels add up's bias, which is 0 here.

    Where gate or up is NaN or infinite the result is NaN (0x7fc0), with or without a clamp; that is the only
    difference to vLLM's chain, whose clamp turns an infinity into an ordinary number.

    Args:
        x: ``(..., 2 I)``, bfloat16; gate half first; any strides.
        clamp_limit: As in :func:`fused_silu_mul_per_token_group_quant`.
        arch: Whose arithmetic.

    Returns:
        ``(..., I)`` bfloat16, contiguous.

    Raises:
        ArgumentError: Wrong dtype, shape or value.

    Invariance:
        Elementwise in pairs of gate and up.

    Source: vLLM ``layers/activation.py: SiluAndMulWithClamp``; design.md, *Activation*.
    """
    check_tensor("x", x, dtype=torch.bfloat16)
    check_value(
        "x",
        x.dim() > 0 and x.shape[-1] % 2 == 0,
        "an even last dimension",
        tuple(x.shape),
        "Pass gate and up halves side by side.",
    )
    check_value("x", not x.is_meta, "a tensor with memory", "a meta tensor", "Materialise it.")
    _check_limit(clamp_limit)
    _check_arch(arch)
    return reference.silu_and_mul(x, clamp_limit=clamp_limit, arch=arch)


class GroupOffsets(NamedTuple):
    """Where one group lies, counted in elements from each tensor's first element.

    Attributes:
        gate: In ``x``.
        up: In ``x``.
        code: In ``out_q``.
        scale: In ``out_s``.
        scale_byte: Byte within that scale element; 0 unless packed.
    """

    gate: int
    up: int
    code: int
    scale: int
    scale_byte: int


def group_offsets(
    x: torch.Tensor, out_q: torch.Tensor, out_s: torch.Tensor, *, token: int, group: int, expert: int = 0
) -> GroupOffsets:
    """The index arithmetic of the fused op, which a kernel must do in 64 bits.

    Every product here passes ``2**31`` in real runs: ``token * 2 I`` from 61,682 tokens on for ``I = 17408``, and
    the number of codes and of groups in long-response batches. Only metadata is read: ``device="meta"`` will do.

    Args:
        x: As in :func:`fused_silu_mul_per_token_group_quant`, like ``out_q`` and ``out_s``.
        out_q: Codes.
        out_s: Scales: int32 means packed, four groups to an element.
        token: Row within the expert, or within all rows of contiguous input.
        group: Group within the row.
        expert: 0 for contiguous input.
    """
    hidden = out_q.shape[-1]
    group_size = 128
    packed = out_s.dtype == torch.int32
    column, byte = divmod(group, 4) if packed else (group, 0)
    start = group * group_size

    def row(t: torch.Tensor) -> int:
        return token * t.stride(-2) + (expert * t.stride(0) if t.dim() == 3 else 0)

    return GroupOffsets(
        gate=row(x) + start,
        up=row(x) + hidden + start,
        code=row(out_q) + start,
        scale=row(out_s) + column * out_s.stride(-1),
        scale_byte=byte,
    )


def _check_limit(clamp_limit: float | None) -> None:
    check_value(
        "clamp_limit",
        clamp_limit is None or (math.isfinite(clamp_limit) and clamp_limit > 0),
        "a positive number or None",
        clamp_limit,
        "Pass the model's swiglu_limit, or None when it has none.",
    )


def _check_arch(arch: Arch) -> None:
    check_value("arch", isinstance(arch, Arch), "Arch.SM90 or Arch.SM100", repr(arch), "Use detect_arch(device).")
