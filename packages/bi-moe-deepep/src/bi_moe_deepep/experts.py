"""The experts' feed-forward network: quantise, first product, fused activation and quantisation, second product."""

from __future__ import annotations

import torch

from bi_kernels import (
    Arch,
    detect_arch,
    fused_silu_mul_per_token_group_quant,
    per_token_group_quant_fp8,
    scale_format_for,
)
from bi_kernels.runtime.checks import check_tensor, check_value

from .fp8_gemm import m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked

__all__ = ["expert_mlp", "expert_mlp_contiguous"]


def expert_mlp(
    x: torch.Tensor,
    counts: torch.Tensor,
    w13: torch.Tensor,
    s13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    *,
    arch: Arch | None = None,
    clamp_limit: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Expert network on staged tokens (masked layout). Bounded op, for its two products.

    Args:
        x: ``(E, T, hidden)``, bfloat16, contiguous: staged tokens.
        counts: ``(E,)``, int32: rows of each expert that are tokens.
        w13: ``(E, 2 * intermediate, hidden)``, float8_e4m3fn, gate half first.
        s13: ``(E, ceil(2 * intermediate / 128), hidden / 128)``, float32.
        w2: ``(E, hidden, intermediate)``, float8_e4m3fn.
        s2: ``(E, ceil(hidden / 128), intermediate / 128)``, float32.
        arch: Whose activation and scale format to follow; None asks the GPU.
        clamp_limit: The model's ``swiglu_limit``, or None.
        out: ``(E, T, hidden)``, bfloat16, written and returned.

    Returns:
        ``(E, T, hidden)``, bfloat16. Rows at or past ``counts[e]`` are left untouched; without ``out`` they are zero.

    Raises:
        ArgumentError: A dtype, shape, stride, device or count does not fit. ``out`` was not written.
        UnsupportedArchError: ``arch`` is None and there is no supported GPU to ask.
        NativeLibraryError: CUDA tensors, and a kernel is missing.

    Source: ``vllm...fused_moe.experts.batched_deep_gemm_moe.BatchedDeepGemmExperts.apply``.

    Invariance:
        Row ``(e, i)`` depends on row ``(e, i)`` of ``x`` and on expert ``e``'s weights alone, bit for bit, and is the
        row that :func:`expert_mlp_contiguous` gives for the same token and expert.
    """
    check_tensor("x", x, dtype=torch.bfloat16, shape=("E", "T", "hidden"), contiguous=True)
    _check_weights(x.shape[-1], w13, w2)
    check_tensor("counts", counts, dtype=torch.int32, shape=(w13.shape[0],), device=x.device)
    if out is not None:
        check_tensor("out", out, dtype=torch.bfloat16, shape=tuple(x.shape), device=x.device, disjoint=True)
    arch = arch or detect_arch(x.device)
    q, s = per_token_group_quant_fp8(x, masked_m=counts, scale_format=scale_format_for(arch))
    hidden = m_grouped_fp8_gemm_nt_masked(q, s, w13, s13, counts)
    q, s = fused_silu_mul_per_token_group_quant(hidden, masked_m=counts, clamp_limit=clamp_limit, arch=arch)
    return m_grouped_fp8_gemm_nt_masked(q, s, w2, s2, counts, out=out)


def expert_mlp_contiguous(
    x: torch.Tensor,
    m_indices: torch.Tensor,
    w13: torch.Tensor,
    s13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    *,
    arch: Arch | None = None,
    clamp_limit: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Expert network on rows that name their expert (contiguous layout). Bounded op, for its two products.

    Args:
        x: ``(M, hidden)``, bfloat16, contiguous.
        m_indices: ``(M,)``, int32: each row's expert, or -1 for a padding row.
        w13: As in :func:`expert_mlp`, like the other weights and keywords.
        s13: See there.
        w2: See there.
        s2: See there.
        arch: See there.
        clamp_limit: See there.
        out: ``(M, hidden)``, bfloat16, written and returned.

    Returns:
        ``(M, hidden)``, bfloat16; padding rows are +0.

    Raises:
        ArgumentError: A dtype, shape, stride or device does not fit, or an expert does not exist. ``out`` was not
            written.
        UnsupportedArchError: ``arch`` is None and there is no supported GPU to ask.
        NativeLibraryError: CUDA tensors, and a kernel is missing.

    Source: ``vllm...fused_moe.experts.deep_gemm_moe.DeepGemmExperts.apply``.

    Invariance:
        Row ``i`` depends on row ``i`` of ``x`` and ``m_indices`` and on that expert's weights alone, bit for bit.
    """
    check_tensor("x", x, dtype=torch.bfloat16, shape=("M", "hidden"), contiguous=True)
    _check_weights(x.shape[-1], w13, w2)
    check_tensor("m_indices", m_indices, dtype=torch.int32, shape=(x.shape[0],), device=x.device)
    if out is not None:
        check_tensor("out", out, dtype=torch.bfloat16, shape=tuple(x.shape), device=x.device, disjoint=True)
    arch = arch or detect_arch(x.device)
    q, s = per_token_group_quant_fp8(x, scale_format=scale_format_for(arch))
    hidden = m_grouped_fp8_gemm_nt_contiguous(q, s, w13, s13, m_indices)
    q, s = fused_silu_mul_per_token_group_quant(hidden, clamp_limit=clamp_limit, arch=arch)
    return m_grouped_fp8_gemm_nt_contiguous(q, s, w2, s2, m_indices, out=out)


def _check_weights(hidden: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """The two products check dtypes and scales; that the weights belong together only shows here."""
    check_tensor("w13", w13, shape=("E", "2 * intermediate", hidden))
    num_experts, rows, _ = w13.shape
    check_value("w13", rows % 2 == 0, "an even number of rows", rows, "Stack the gate's rows and the up rows.")
    check_tensor("w2", w2, shape=(num_experts, hidden, rows // 2))
