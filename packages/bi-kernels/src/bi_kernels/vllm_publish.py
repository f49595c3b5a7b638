"""Callables that a trainer written for the preview imports from vLLM's ``fp8_utils``."""

from __future__ import annotations

import torch

from .arch import detect_arch
from .runtime import mode
from .runtime.checks import check_value
from .runtime.native import op_blockers, require_native
from .scale_format import ScaleFormat, scale_format_for
from .silu_mul_quant import fused_silu_mul_per_token_group_quant

__all__ = [
    "fused_silu_mul_per_token_group_quant_fp8",
    "is_batch_invariant_quant_kernel_enabled",
    "require_batch_invariant_quant_kernel",
]

_OP = "bi_kernels::fused_silu_mul_per_token_group_quant"


def fused_silu_mul_per_token_group_quant_fp8(
    gate_up: torch.Tensor,
    output_q: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
    round_scale: bool | None = None,
    clamp_limit: float | None = None,
    swiglu_limit: float | None = None,
    masked_m: torch.Tensor | None = None,
    group_size: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`bi_kernels.fused_silu_mul_per_token_group_quant` under the trainer's name and arguments.

    *Exact op*, on a GPU.

    Args:
        gate_up: ``(M, 2 I)`` or ``(E, T, 2 I)``, bfloat16, gate half first.
        output_q: ``(M, I)`` or ``(E, T, I)``, float8_e4m3fn, or None to allocate.
        use_ue8m0: True: powers of two in the form that this GPU's GEMMs read (float32 on Hopper, packed int32 on
            Blackwell). False: not that. None: True, unless ``round_scale`` is given.
        round_scale: True: powers of two, in float32. False: float32 scales as they come.
        clamp_limit: The model's ``swiglu_limit``, or None for no clamp.
        swiglu_limit: Another name for ``clamp_limit``.
        masked_m: ``(E,)``, int32: rows in use by expert.
        group_size: 128.

    Returns:
        ``(q, s)``: codes, and scales in the GEMMs' column-major layout.

    Raises:
        ArgumentError: Arguments that contradict each other, or that the op refuses.
        NativeLibraryError: The compiled kernel is missing.

    Invariance:
        Row ``i`` of both outputs depends on row ``i`` of ``gate_up`` alone.

    Source: design.md, *Hooks*, published callables.
    """
    check_value(
        "clamp_limit",
        None in (clamp_limit, swiglu_limit) or clamp_limit == swiglu_limit,
        "one limit",
        f"clamp_limit={clamp_limit} and swiglu_limit={swiglu_limit}",
        "Pass one of them.",
    )
    check_value(
        "use_ue8m0",
        not (use_ue8m0 and round_scale is False),
        "scales that are either rounded or not",
        "use_ue8m0=True with round_scale=False",
        "Drop round_scale.",
    )
    if use_ue8m0 or (use_ue8m0 is None and round_scale is None):
        scale_format = scale_format_for(detect_arch(gate_up.device))
    else:
        scale_format = ScaleFormat.FLOAT32_CEIL_UE8M0 if round_scale else ScaleFormat.FLOAT32
    return fused_silu_mul_per_token_group_quant(
        gate_up,
        masked_m=masked_m,
        clamp_limit=swiglu_limit if clamp_limit is None else clamp_limit,
        group_size=group_size,
        scale_format=scale_format,
        out_q=output_q,
    )


def is_batch_invariant_quant_kernel_enabled() -> bool:
    """Whether aligned mode is on and the fused op has a CUDA kernel here.

    Source: design.md, *Hooks*, published callables.
    """
    return mode.is_enabled() and not op_blockers((_OP,))


def require_batch_invariant_quant_kernel() -> None:
    """Raise unless the fused op has a CUDA kernel for this GPU.

    Raises:
        NativeLibraryError: Lists what is missing, with the remedy.

    Source: design.md, *Hooks*, published callables.
    """
    require_native(_OP)
