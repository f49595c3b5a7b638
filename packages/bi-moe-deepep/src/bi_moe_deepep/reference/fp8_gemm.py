"""Block-scaled FP8 matrix products: the arithmetic that a DeepGEMM build must have, written down.

A dot product of one K block of 128 e4m3 pairs is exact in float64: e4m3 values are multiples of ``2**-9`` below
``2**18`` such units, so the 128 products sum to less than ``2**43`` multiples of ``2**-18``. Every order of
summation, hence every BLAS, tile and thread count, gives the same bits, and a plain float64 product will do.
"""

from __future__ import annotations

import torch

from bi_kernels.reference.numerics import canonical_nan, to_bf16
from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.scale_format import unpack_ue8m0

__all__ = ["fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"]

_BLOCK = 128
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # of every code


def fp8_gemm_nt(
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specification of :func:`bi_moe_deepep.fp8_gemm_nt`."""
    if out is None:
        out = torch.empty((q.shape[0], wq.shape[0]), dtype=out_dtype, device=q.device)
    return out.copy_(_product(q, s, wq, ws, out.dtype))


def m_grouped_fp8_gemm_nt_contiguous(
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    m_indices: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specification of :func:`bi_moe_deepep.m_grouped_fp8_gemm_nt_contiguous`."""
    experts = sorted(set(m_indices.tolist()))
    if experts and not (experts[0] >= -1 and experts[-1] < wq.shape[0]):
        raise ArgumentError(
            "m_indices", f"-1 or an expert below {wq.shape[0]}", f"{experts[0]}..{experts[-1]}", "Fix the row map."
        )
    if out is None:
        out = torch.empty((q.shape[0], wq.shape[1]), dtype=out_dtype, device=q.device)
    out[m_indices == -1] = 0.0
    for expert in experts:
        if expert >= 0:
            rows = (m_indices == expert).nonzero()[:, 0]
            out[rows] = _product(q[rows], s[rows], wq[expert], ws[expert], out.dtype)
    return out


def m_grouped_fp8_gemm_nt_masked(
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specification of :func:`bi_moe_deepep.m_grouped_fp8_gemm_nt_masked`."""
    counts = masked_m.tolist()
    if any(not 0 <= count <= q.shape[1] for count in counts):
        raise ArgumentError("masked_m", f"counts from 0 to {q.shape[1]}", str(counts), "Fix the counts.")
    if out is None:
        out = torch.zeros((*q.shape[:2], wq.shape[1]), dtype=out_dtype, device=q.device)
    for expert, count in enumerate(counts):
        if count:
            rows = q[expert, :count], s[expert, :count]
            out[expert, :count] = _product(*rows, wq[expert], ws[expert], out.dtype)
    return out


def _product(q: torch.Tensor, s: torch.Tensor, wq: torch.Tensor, ws: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``(M, N)``, bfloat16 or float32: the one arithmetic of all three layouts."""
    (m, k), n = q.shape, wq.shape[0]
    groups = k // _BLOCK
    q64, w64 = _decode(q), _decode(wq)
    act_scale = unpack_ue8m0(s, groups) if s.dtype == torch.int32 else s
    # One scale per output column and K block, [G, N].
    weight_scale = ws.mT.repeat_interleave(_BLOCK, dim=1)[:, :n]
    acc = torch.zeros((m, n), dtype=torch.float32, device=q.device)
    for group in range(groups):
        block = slice(group * _BLOCK, (group + 1) * _BLOCK)
        part = (q64[:, block] @ w64[:, block].mT).float()  # exact sum, rounded once
        scale = act_scale[:, group, None] * weight_scale[group]
        acc += part * scale
    return to_bf16(acc) if dtype == torch.bfloat16 else canonical_nan(acc)


def _decode(codes: torch.Tensor) -> torch.Tensor:
    """``codes.double()``, which takes five times as long as looking the values up."""
    index = codes.view(torch.uint8).reshape(-1).int()
    return _VALUES.to(codes.device).index_select(0, index).view(codes.shape)
