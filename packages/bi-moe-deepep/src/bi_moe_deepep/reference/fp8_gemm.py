"""Block-scaled FP8 matrix products: the arithmetic that a DeepGEMM build must have, written down.

A dot product of one K block of 128 e4m3 pairs is exact in float64: e4m3 values are multiples of ``2**-9`` below
``2**18`` such units, so the 128 products sum to less than ``2**43`` multiples of ``2**-18``. Every order of
summation, hence every BLAS, tile and thread count, gives the same bits, and a plain float64 product will do.
"""

from __future__ import annotations

import itertools

import torch

from bi_kernels.reference.numerics import canonical_nan, to_bf16
from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.scale_format import unpack_ue8m0

__all__ = [
    "fp8_gemm_nt",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_offsets",
    "offsets_error_bound",
]

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


def m_grouped_fp8_gemm_nt_offsets(
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specification of :func:`bi_moe_deepep.m_grouped_fp8_gemm_nt_offsets`."""
    places = offsets.tolist()
    if places[0] != 0 or places[-1] > len(q) or places != sorted(places):
        raise ArgumentError(
            "offsets", f"ascending numbers from 0 to at most {len(q)}", str(places), "Count each expert's rows."
        )
    if out is None:
        out = torch.empty((q.shape[0], wq.shape[1]), dtype=torch.bfloat16, device=q.device)
    for expert, (start, stop) in enumerate(itertools.pairwise(places)):
        if start < stop:
            rows = slice(start, stop)
            out[rows] = _product(q[rows], s[rows], wq[expert], ws[expert], out.dtype)
    return out


def offsets_error_bound(q: torch.Tensor, s: torch.Tensor, wq: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
    """How far a bfloat16 element of any of the products may be from the exact one: one expert, any device.

    Within a block of 128 a Hopper tensor core adds the 32 products of a step to its accumulator aligned to the largest
    of them and drops what lies below 13 bits under it: a step errs by at most ``33 * 2**-13`` of the largest magnitude
    on the way, itself at most the block's sum of magnitudes. Four steps, the scales' product, and a float32 addition
    per block follow, then one rounding to bfloat16.

    Args:
        q: ``(M, K)``, float8_e4m3fn.
        s: ``(M, K / 128)``, float32.
        wq: ``(N, K)``, float8_e4m3fn.
        ws: ``(ceil(N / 128), K / 128)``, float32.

    Returns:
        ``(M, N)`` float64.
    """
    groups = q.shape[1] // _BLOCK
    a = q.double().abs() * s.double().abs().repeat_interleave(_BLOCK, 1)
    b = wq.double().abs() * ws.double().abs().repeat_interleave(_BLOCK, 0)[: len(wq)].repeat_interleave(_BLOCK, 1)
    magnitude = a @ b.mT
    bound = (4 * 33 * 2.0**-13 + (groups + 2) * 2.0**-23) * magnitude + groups * 2.0**-149
    return bound + 2.0**-8 * (magnitude + bound) + 2.0**-134


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
