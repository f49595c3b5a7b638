"""Reference of the matrix product whose order of summation is a function of K alone."""

from __future__ import annotations

import itertools

import torch

from .numerics import canonical_nan, mm_rn, to_bf16

__all__ = ["error_bound", "fixed_order_mm", "split_bounds", "split_k"]

_BLOCK_K = 64
_MAX_SPLITS = 8  # thread blocks in a portable cluster


def split_k(k: int) -> int:
    """See :func:`bi_kernels.split_k`."""
    return max(1, min(_MAX_SPLITS, k // 256))


def split_bounds(k: int) -> tuple[tuple[int, int], ...]:
    """The pieces of K, ``(start, stop)`` each, ascending: multiples of 64, their lengths at most 64 apart."""
    blocks, splits = k // _BLOCK_K, split_k(k)
    edges = [i * blocks // splits * _BLOCK_K for i in range(splits + 1)]
    return tuple(itertools.pairwise(edges))


def fixed_order_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`bi_kernels.fixed_order_mm`."""
    pieces = (mm_rn(x[:, start:stop], weight[:, start:stop]) for start, stop in split_bounds(x.shape[-1]))
    total = next(pieces)
    for piece in pieces:
        total = total + piece
    result = to_bf16(total) if out_dtype == torch.bfloat16 else canonical_nan(total)
    return result if out is None else out.copy_(result)


def error_bound(x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """How far any implementation may be from the exact product, elementwise.

    A sum of K products in K additions, each rounded or truncated to float32, errs by at most ``K 2**-23`` of the sum
    of magnitudes, in whatever order; adding S pieces errs by S more. A matrix unit that aligns a few products and
    drops the bits below does no worse, as it keeps at least as many bits as float32. Rounding the result to bfloat16
    adds half a unit in the last place, at most ``2**-8`` of it.

    Args:
        x: ``(M, K)``, bfloat16.
        weight: ``(N, K)``, bfloat16.
        out_dtype: float32 or bfloat16.

    Returns:
        ``(M, N)`` float64.
    """
    magnitudes = x.double().abs() @ weight.double().abs().mT
    k = x.shape[-1]
    bound = (k + split_k(k)) * 2.0**-23 * magnitudes + k * 2.0**-149
    if out_dtype == torch.bfloat16:
        bound = bound + 2.0**-8 * (magnitudes + bound) + 2.0**-134
    return bound
