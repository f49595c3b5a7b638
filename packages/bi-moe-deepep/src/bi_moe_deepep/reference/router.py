"""Expert selection from given logits."""

from __future__ import annotations

import torch

from bi_kernels.reference.numerics import canonical_nan, exp, log1p, sqrt
from bi_kernels.runtime.errors import ArgumentError

__all__ = ["select_experts"]

_TAKEN = -(2**63)
_NAN = 1 - 2**31  # below the order of -inf, and its keys stay above _TAKEN


def select_experts(
    logits: torch.Tensor,
    *,
    top_k: int,
    bias: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    out_weights: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specification of :func:`bi_moe_deepep.select_experts`."""
    scores = _sqrtsoftplus(logits)
    if token_ids is None or tid2eid is None:
        ids = _top_k(scores if bias is None else scores + bias, top_k)
    else:
        ids = _look_up(token_ids, tid2eid, logits.shape[1])
    weights = scores.gather(1, ids)
    if renormalize:
        total = torch.zeros_like(weights[:, :1])
        for slot in range(top_k):
            total = total + weights[:, slot, None]
        weights = weights / (total + 1e-20)
    weights = canonical_nan(weights * routed_scaling_factor)
    if out_weights is None:
        out_weights = torch.empty_like(weights)
    if out_ids is None:
        out_ids = torch.empty_like(ids, dtype=torch.int32)
    return out_weights.copy_(weights), out_ids.copy_(ids)


def _sqrtsoftplus(x: torch.Tensor) -> torch.Tensor:
    """``sqrt(ln(1 + exp(x)))``, written so that the exponential cannot overflow."""
    return sqrt(torch.clamp(x, min=0.0) + log1p(exp(-x.abs())))


def _top_k(score: torch.Tensor, top_k: int) -> torch.Tensor:
    """Indices of the ``top_k`` greatest by (score, then lower index), in that order."""
    # An integer that orders as the float does: for negative floats the magnitude bits are flipped. -0 joins +0, and
    # NaN goes below -inf. With the expert in the low half every key is different, so there are no ties to break.
    bits = (score + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    order = torch.where(torch.isnan(score), _NAN, order)
    num_experts = score.shape[1]
    key = (order << 32) + (num_experts - 1 - torch.arange(num_experts, device=score.device))
    slots = []
    for _ in range(top_k):
        best = key.amax(1, keepdim=True)
        slots.append(num_experts - 1 - (best & 0xFFFFFFFF))
        key = torch.where(key == best, _TAKEN, key)
    return torch.cat(slots, 1)


def _look_up(token_ids: torch.Tensor, tid2eid: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The table's experts for each token, checked."""
    outside = (token_ids < 0) | (token_ids >= tid2eid.shape[0])
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise ArgumentError(
            "token_ids", f"ids below {tid2eid.shape[0]}", f"{int(token_ids[at])} at {at}", "Pass the table's tokens."
        )
    ids = tid2eid[token_ids.long()].long()
    outside = (ids < 0) | (ids >= num_experts)
    if bool(outside.any()):
        at, slot = outside.nonzero()[0].tolist()
        raise ArgumentError(
            "tid2eid",
            f"experts from 0 to {num_experts - 1}",
            f"{int(ids[at, slot])} for token id {int(token_ids[at])}",
            "Load the checkpoint's table.",
        )
    return ids
