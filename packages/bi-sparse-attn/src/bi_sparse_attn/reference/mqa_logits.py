"""Reference of the indexer's scores."""

from __future__ import annotations

import torch

from bi_kernels.reference.numerics import canonical_nan

__all__ = ["mqa_logits"]


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`bi_sparse_attn.mqa_logits`: this is the specification of the reference's own bits."""
    keys = k.double().mT
    scores = torch.zeros((q.shape[0], k.shape[0]), dtype=torch.float32, device=q.device)
    for head in range(q.shape[1]):
        # e4m3 products are multiples of 2**-18 and 128 of them stay below 2**25, so every partial sum is exact in
        # float64, in any order. The dot product is rounded once, here.
        dots = (q[:, head].double() @ keys).float()
        scores = scores + torch.clamp(dots, min=0.0) * weights[:, head : head + 1]
    scores = canonical_nan(scores * k_scale)
    column = torch.arange(k.shape[0], device=q.device)
    inside = (column >= row_starts.unsqueeze(1)) & (column < row_ends.unsqueeze(1))
    scores = torch.where(inside, scores, -torch.inf)
    return scores if out is None else out.copy_(scores)
