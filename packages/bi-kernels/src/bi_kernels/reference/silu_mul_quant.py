"""Reference of SiLU, multiply and FP8 quantisation in one op, and of the activation alone."""

from __future__ import annotations

import torch

from ..arch import Arch
from ..scale_format import ScaleFormat
from .group_quant import masked_rows, write_quantized
from .numerics import exp, to_bf16

__all__ = ["fused_silu_mul_per_token_group_quant", "silu_and_mul"]


def silu_and_mul(x: torch.Tensor, *, clamp_limit: float | None = None, arch: Arch) -> torch.Tensor:
    """See :func:`bi_kernels.silu_and_mul`."""
    gate, up = x.float().chunk(2, -1)
    finite = torch.isfinite(gate) & torch.isfinite(up)
    if clamp_limit is not None:
        gate = gate.clamp(max=clamp_limit)  # from above only: a very negative gate is already nothing
        up = up.clamp(-clamp_limit, clamp_limit)
    up = up + 0.0  # -0 becomes +0: vLLM's kernels add the bias of the up half, which is 0
    if arch is Arch.SM90:
        if clamp_limit is not None:
            # Only a limit that bfloat16 cannot hold is changed by this.
            gate, up = to_bf16(gate).float(), to_bf16(up).float()
        silu = to_bf16(gate / (1.0 + exp(-gate))).float()
    else:
        silu = gate / (1.0 + exp(-gate))
    # An infinity must not vanish in the clamp: see the note on non-finite input in the public docstring.
    return to_bf16(torch.where(finite, silu * up, torch.nan))


def fused_silu_mul_per_token_group_quant(
    x: torch.Tensor,
    *,
    masked_m: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
    clamp_limit: float | None = None,
    group_size: int = 128,
    scale_format: ScaleFormat,
    arch: Arch,
    out_q: torch.Tensor,
    out_s: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`bi_kernels.fused_silu_mul_per_token_group_quant`; the outputs are the caller's."""
    # Rows are picked before any arithmetic, so that the others are neither read nor written.
    rows: slice | torch.Tensor = slice(None)
    if masked_m is not None:
        rows = masked_rows(masked_m, x.shape[1])
    elif m_indices is not None:
        rows = m_indices >= 0
    values = silu_and_mul(x[rows], clamp_limit=clamp_limit, arch=arch).float()
    write_quantized(
        values.unflatten(-1, (values.shape[-1] // group_size, group_size)), scale_format, rows, out_q, out_s
    )
    return out_q, out_s
