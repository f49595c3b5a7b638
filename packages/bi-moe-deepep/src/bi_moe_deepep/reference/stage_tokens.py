"""Staging: tokens laid out per expert, in token order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bi_kernels.runtime.errors import ArgumentError, CapacityError

__all__ = ["StagedTokens", "stage_tokens"]


class StagedTokens(NamedTuple):
    """Tokens in the masked layout.

    Attributes:
        x: ``(num_local_experts, capacity, hidden)``, dtype of the tokens. The first ``counts[e]`` rows of expert
            ``e`` are its tokens in token order.
        counts: ``(num_local_experts,)``, int32.
        slots: ``(num_tokens, top_k)``, int32. The row ``e * capacity + r`` of each top-k slot, ``e`` counted from
            the first local expert; -1 where the slot's expert is not local or the slot is not routed.
    """

    x: torch.Tensor
    counts: torch.Tensor
    slots: torch.Tensor


def stage_tokens(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    capacity: int,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    out: StagedTokens | None = None,
) -> StagedTokens:
    """Specification of :func:`bi_moe_deepep.stage_tokens`."""
    if num_local_experts is None:
        num_local_experts = num_experts - first_expert
    ids = topk_ids.long()
    _check_ids(ids, num_experts)
    local = ids - first_expert
    # Every slot that is not ours goes to one extra bin behind the local experts.
    bins = torch.where((local >= 0) & (local < num_local_experts), local, num_local_experts).flatten()
    totals = torch.bincount(bins, minlength=num_local_experts + 1)
    counts = totals[:num_local_experts]
    if bool((counts > capacity).any()):
        expert = int((counts > capacity).nonzero()[0])
        raise CapacityError(
            f"capacity: expert {first_expert + expert} got {int(counts[expert])} tokens, its capacity is {capacity}. "
            "Dispatch in slices of at most the capacity agreed at start-up, or raise the capacity on every rank."
        )
    # A stable sort of integers: within an expert the order stays that of the tokens.
    order = bins.sort(stable=True).indices
    row = torch.empty_like(order)
    row[order] = torch.arange(bins.numel(), device=x.device) - (totals.cumsum(0) - totals)[bins[order]]
    slots = torch.where(bins < num_local_experts, bins * capacity + row, -1)
    if out is None:
        out = StagedTokens(
            x.new_zeros((num_local_experts, capacity, x.shape[1])),
            torch.empty(num_local_experts, dtype=torch.int32, device=x.device),
            torch.empty(ids.shape, dtype=torch.int32, device=x.device),
        )
    used = (slots >= 0).nonzero()[:, 0]
    out.x[bins[used], row[used]] = x[used // max(ids.shape[1], 1)]
    out.counts.copy_(counts)
    out.slots.copy_(slots.view(ids.shape))
    return out


def _check_ids(ids: torch.Tensor, num_experts: int) -> None:
    """Refuse experts that do not exist and tokens that name one expert twice."""
    outside = (ids < -1) | (ids >= num_experts)
    if bool(outside.any()):
        token, slot = outside.nonzero()[0].tolist()
        raise ArgumentError(
            "topk_ids",
            f"-1 or an expert below {num_experts}",
            f"{int(ids[token, slot])} for token {token}",
            "Pass the router's choice for the same number of experts.",
        )
    ordered = ids.sort(dim=1, stable=True).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        token, slot = twice.nonzero()[0].tolist()
        raise ArgumentError(
            "topk_ids",
            "each expert at most once per token",
            f"expert {int(ordered[token, slot])} twice for token {token}",
            "Add the weights of equal experts into one slot and set the other to -1.",
        )
