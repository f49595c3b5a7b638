"""FP8 quantisation by groups of 128 along a token, and by 128 x 128 blocks of a weight."""

from __future__ import annotations

import torch

from . import _ops
from ._masked_m import check_masked_m
from .reference import group_quant as reference
from .runtime.checks import check_output, check_tensor, check_value
from .runtime.native import require_native
from .scale_format import ScaleFormat, allocate_scales

__all__ = ["dequantize", "dequantize_blocks", "per_block_quant_fp8", "per_token_group_quant_fp8"]


def per_token_group_quant_fp8(
    x: torch.Tensor,
    *,
    masked_m: torch.Tensor | None = None,
    group_size: int = 128,
    scale_format: ScaleFormat,
    out_q: torch.Tensor | None = None,
    out_s: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each token to float8_e4m3fn, with one scale per 128 elements.

    *Exact op*: the kernel equals the reference bit for bit on every input. Per group: ``amax`` in float32, at least
    1e-10; scale ``amax / 448`` by IEEE division; in the ceil formats then at least 1e-10 and rounded up to a power of
    two on its bits; codes ``x / scale`` by IEEE division, clamped to +-448, rounded to nearest even. A zero group thus
    gives codes 0 and scale 2.2e-13 (FLOAT32) or 2**-33.

    A NaN or an infinity in a group gives this group a NaN scale (0x7fc00000, byte 0xff) and NaN codes (0x7f);
    other groups do not notice.

    Args:
        x: ``(..., H)``, bfloat16, last dim contiguous; ``H`` a multiple of ``group_size``.
        masked_m: ``(E,)``, int32, contiguous, values 0 to T; only with ``(E, T, H)``. Rows at or past ``masked_m[e]``
            of expert ``e`` are left untouched: neither read nor written. None: all rows.
        group_size: 128.
        scale_format: How scales are rounded and stored.
        out_q: ``(..., H)``, float8_e4m3fn, last dim contiguous, or None to allocate.
        out_s: ``(..., C)``, float32 with ``C = H / 128``, or for UE8M0 int32 with ``C = ceil(H / 512)``; any strides
            without overlap; None for :func:`allocate_scales`.

    Returns:
        ``(q, s)``: ``out_q`` and ``out_s``. Rows that ``masked_m`` excludes are uninitialised if allocated here.

    Raises:
        ArgumentError: Wrong dtype, shape, stride, device or value. Nothing was written. (``masked_m``'s values are
            checked on the CPU only.)
        NativeLibraryError: ``x`` is on a GPU and the compiled kernel is missing.

    Invariance:
        Row ``i`` of both outputs depends on row ``i`` of ``x`` alone, bit for bit.

    Source: vLLM ``fp8_utils.py: per_token_group_quant_fp8``; design.md, settled numerics, *Quantiser*.
    """
    _check_format(group_size, scale_format)
    check_tensor("x", x, dtype=torch.bfloat16, last_dim_contiguous=True)
    _check_groups("x", x, group_size)
    num_groups = x.shape[-1] // group_size
    if masked_m is not None:
        check_masked_m(masked_m, x, "H")
    if out_q is not None:
        check_output("out_q", out_q, torch.float8_e4m3fn, x.shape, x.device, last_dim_contiguous=True)
    if out_s is not None:
        shape = (*x.shape[:-1], scale_format.columns(num_groups))
        check_output("out_s", out_s, scale_format.dtype, shape, x.device)
    if x.is_cuda:
        require_native("bi_kernels::per_token_group_quant")
    if out_q is None:
        out_q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if out_s is None:
        # A single token without a token dimension has one row of scales.
        out_s = allocate_scales(x.shape[:-1] or (1,), num_groups, scale_format, device=x.device)
        out_s = out_s if x.dim() > 1 else out_s[0]
    _ops.per_token_group_quant(x, masked_m, group_size, scale_format.value, out_q, out_s)
    return out_q, out_s


def per_block_quant_fp8(
    w: torch.Tensor, *, block: int = 128, scale_format: ScaleFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight to float8_e4m3fn, with one scale per 128 x 128 block.

    *Exact op*; any device (it runs once, when weights are loaded, so it has no kernel). The arithmetic is that of
    :func:`per_token_group_quant_fp8`, a block taking the place of a group.

    Args:
        w: ``(N, K)``, float32 or bfloat16. Blocks at the lower and right edge may be incomplete.
        block: 128.
        scale_format: FLOAT32 leaves scales as they come; the other two round them up to powers of two.

    Returns:
        ``(q, s)``: ``(N, K)`` float8_e4m3fn and ``(ceil(N / 128), ceil(K / 128))`` float32, both contiguous. Scales
        are float32 in every format: GEMM libraries bring weight scales into their own layout.

    Raises:
        ArgumentError: Wrong dtype, shape or block.

    Invariance:
        A block of both outputs depends on that block of ``w`` alone.

    Source: vLLM ``utils/deep_gemm.py: per_block_cast_to_fp8``, with the quantiser of design.md (floor 1e-10 where
    vLLM has 1e-4, division where vLLM multiplies by the reciprocal).
    """
    _check_format(block, scale_format, name="block")
    check_tensor("w", w, dtype=(torch.float32, torch.bfloat16), shape=("N", "K"))
    return reference.per_block_quant_fp8(w, block=block, scale_format=scale_format)


def dequantize(q: torch.Tensor, s: torch.Tensor, group_size: int = 128) -> torch.Tensor:
    """Multiply codes by their group's scale.

    *Exact op*; any device. One IEEE multiplication, which is exact for power-of-two scales unless it underflows.

    Args:
        q: ``(..., H)``, float8_e4m3fn.
        s: ``(..., H / group_size)`` float32, or ``(..., ceil(H / group_size / 4))`` int32, packed UE8M0; any strides.
        group_size: Elements per scale.

    Returns:
        ``(..., H)`` float32. NaN is 0x7fc00000.

    Raises:
        ArgumentError: Wrong dtype, shape or device.

    Invariance:
        Row ``i`` of the result depends on row ``i`` of ``q`` and ``s`` alone.

    Source: the inverse of :func:`per_token_group_quant_fp8`.
    """
    check_value("group_size", group_size > 0, "a positive number", group_size, "Pass the quantiser's group size.")
    check_tensor("q", q, dtype=torch.float8_e4m3fn)
    _check_groups("q", q, group_size)
    check_tensor("s", s, dtype=(torch.float32, torch.int32))
    num_groups = q.shape[-1] // group_size
    columns = ScaleFormat.UE8M0.columns(num_groups) if s.dtype == torch.int32 else num_groups
    check_tensor("s", s, shape=(*q.shape[:-1], columns), device=q.device)
    return reference.dequantize(q, s, group_size)


def dequantize_blocks(q: torch.Tensor, s: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Multiply codes by their block's scale: the inverse of :func:`per_block_quant_fp8`.

    *Exact op*; any device. One IEEE multiplication.

    Args:
        q: ``(N, K)``, float8_e4m3fn.
        s: ``(ceil(N / block), ceil(K / block))``, float32.
        block: Rows and columns per scale.

    Returns:
        ``(N, K)`` float32. NaN is 0x7fc00000.

    Raises:
        ArgumentError: Wrong dtype, shape or device.

    Invariance:
        A block of the result depends on that block of ``q`` and ``s`` alone.

    Source: vLLM ``fp8_utils.py: requant_weight_ue8m0_inplace``, its first step.
    """
    check_value("block", block > 0, "a positive number", block, "Pass the quantiser's block.")
    check_tensor("q", q, dtype=torch.float8_e4m3fn, shape=("N", "K"))
    shape = (-(-q.shape[0] // block), -(-q.shape[1] // block))
    check_tensor("s", s, dtype=torch.float32, shape=shape, device=q.device)
    return reference.dequantize_blocks(q, s, block)


def _check_format(group_size: int, scale_format: ScaleFormat, name: str = "group_size") -> None:
    check_value(name, group_size == 128, "128", group_size, "No other size is specified for DeepSeek-V4.")
    check_value(
        "scale_format",
        isinstance(scale_format, ScaleFormat),
        "a ScaleFormat",
        repr(scale_format),
        "Use scale_format_for(arch).",
    )


def _check_groups(name: str, x: torch.Tensor, group_size: int) -> None:
    check_value(
        name,
        x.dim() > 0 and x.shape[-1] % group_size == 0,
        f"a last dimension that is a multiple of {group_size}",
        tuple(x.shape),
        "Pad the hidden size.",
    )
