"""Ordered combine: a token's expert outputs added in the order of its top-k slots."""

from __future__ import annotations

import torch

from bi_kernels.reference.numerics import canonical_nan, fma, to_bf16
from bi_kernels.runtime.errors import ArgumentError

__all__ = ["combine_ordered"]


def combine_ordered(
    expert_out: torch.Tensor,
    slots: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    topk_ids: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specification of :func:`bi_moe_deepep.combine_ordered`."""
    rows = expert_out.flatten(0, 1)
    if topk_ids is not None:
        slots = torch.where(topk_ids >= 0, slots, -1)
    outside = (slots < -1) | (slots >= rows.shape[0])
    if bool(outside.any()):
        token, slot = outside.nonzero()[0].tolist()
        raise ArgumentError(
            "slots",
            f"-1 or a row below {rows.shape[0]}",
            f"{int(slots[token, slot])} for token {token}, slot {slot}",
            "Pass the slots that stage_tokens returned for this capacity.",
        )
    acc = torch.zeros((slots.shape[0], rows.shape[1]), dtype=torch.float32, device=rows.device)
    for slot in range(slots.shape[1]):
        token = (slots[:, slot] >= 0).nonzero()[:, 0]
        row = rows[slots[token, slot].long()].float()
        acc[token] = fma(row, topk_weights[token, slot, None], acc[token])
    if out is None:
        out = torch.empty(acc.shape, dtype=out_dtype, device=acc.device)
    return out.copy_(to_bf16(acc) if out.dtype == torch.bfloat16 else canonical_nan(acc))
