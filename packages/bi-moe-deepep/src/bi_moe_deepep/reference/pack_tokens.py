"""Packing: quantised tokens in rows sorted by expert, without padding."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bi_kernels import ScaleFormat
from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.scale_format import allocate_scales

__all__ = ["PackedTokens", "pack_tokens"]


class PackedTokens(NamedTuple):
    """Quantised tokens in the packed layout: one row per routed slot, by expert, then token, then slot.

    Attributes:
        q: ``(num_tokens * top_k, hidden)``, float8_e4m3fn.
        s: ``(num_tokens * top_k, hidden / 128)``, float32.
        offsets: ``(num_experts + 1,)``, int32: expert ``e`` has the rows from ``offsets[e]`` to ``offsets[e + 1]``;
            rows from ``offsets[num_experts]`` on are nobody's.
        m_indices: ``(num_tokens * top_k,)``, int32: each row's expert, -1 for nobody's.
        slots: ``(num_tokens, top_k)``, int32: the row of each top-k slot, -1 where it is not routed.
    """

    q: torch.Tensor
    s: torch.Tensor
    offsets: torch.Tensor
    m_indices: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def empty(
        cls, q: torch.Tensor, topk_ids: torch.Tensor, *, num_experts: int, packed_q: torch.Tensor | None = None
    ) -> PackedTokens:
        """Memory for the packed form of ``q``; scales column-major, their columns at multiples of 16 bytes.

        Args:
            q: ``(num_tokens, hidden)``, the codes to be packed.
            topk_ids: ``(num_tokens, top_k)``.
            num_experts: Experts of the layer.
            packed_q: Memory for the codes; None allocates it.
        """
        rows, device = topk_ids.numel(), q.device
        return cls(
            torch.empty((rows, q.shape[1]), dtype=q.dtype, device=device) if packed_q is None else packed_q,
            allocate_scales((rows,), q.shape[1] // 128, ScaleFormat.FLOAT32, device=device),
            torch.empty(num_experts + 1, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
            torch.empty(topk_ids.shape, dtype=torch.int32, device=device),
        )


def pack_tokens(
    q: torch.Tensor, s: torch.Tensor, topk_ids: torch.Tensor, *, num_experts: int, out: PackedTokens | None = None
) -> PackedTokens:
    """Specification of :func:`bi_moe_deepep.pack_tokens`."""
    ids = topk_ids.flatten().long()
    outside = ids >= num_experts
    if bool(outside.any()):
        slot = int(outside.nonzero()[0])
        raise ArgumentError(
            "topk_ids",
            f"experts below {num_experts}, or a negative number",
            f"{int(ids[slot])} for token {slot // topk_ids.shape[1]}",
            "Pass the router's choice for the same number of experts.",
        )
    if out is None:
        out = PackedTokens.empty(q, topk_ids, num_experts=num_experts)
    # Slots of no expert count as one expert more, behind all rows.
    owner = torch.where(ids < 0, num_experts, ids)
    counts = torch.bincount(owner, minlength=num_experts + 1)
    # A stable sort of integers: within an expert the order stays that of tokens and slots.
    order = owner.sort(stable=True).indices
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=q.device)
    out.offsets.copy_(counts.cumsum(0) - counts)
    out.m_indices.copy_(torch.where(owner[order] < num_experts, owner[order], -1))
    out.slots.copy_(torch.where(owner < num_experts, row, -1).view(topk_ids.shape))
    used = int(out.offsets[-1])
    token = order[:used] // max(topk_ids.shape[1], 1)
    out.q.view(torch.uint8)[:used] = q.view(torch.uint8)[token]
    out.s[:used] = s[token]
    return out
