"""Staging: lay tokens out per expert in the masked layout that grouped GEMMs and expert parallelism use."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_tensor, check_value
from bi_kernels.runtime.errors import CapacityError

from ._ops import check_vectors, launch
from .reference.stage_tokens import StagedTokens

__all__ = ["StagedTokens", "stage_tokens"]


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
    """Copy each token to the rows of its local experts, in token order. Exact op.

    Args:
        x: ``(num_tokens, hidden)``, bfloat16. On a GPU ``hidden`` is a multiple of 8, and rows start at multiples of
            16 bytes.
        topk_ids: ``(num_tokens, top_k)``, int32 or int64: experts of the whole model, each at most once per token;
            -1 is a slot that is not routed (a padding token has only those).
        num_experts: Experts of the whole model.
        capacity: Rows per expert.
        first_expert: First expert of this rank.
        num_local_experts: Experts of this rank; None means all from ``first_expert`` on.
        out: Buffers of the shapes below, written and returned.

    Returns:
        :class:`StagedTokens` ``(x, counts, slots)``. Rows of ``x`` at or past ``counts[e]`` are left untouched;
        without ``out`` they are zero.

    Raises:
        ArgumentError: A dtype, shape, device or value does not fit, or a token names an expert twice or one that
            does not exist (data is looked at on the CPU only; a GPU gives such slots the token's one row, or -1).
            Nothing was written.
        CapacityError: An expert got more tokens than ``capacity``; names the expert and both numbers. On a GPU, where
            nobody looks: ``capacity`` is less than the number of tokens. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel provides the op.

    Source: design.md, csrc/stage_tokens; the row order of vLLM's ``ep_scatter`` comes from atomics instead.

    Invariance:
        No atomics: the row of a token within its expert is the number of earlier tokens that chose the expert. The
        bits of a row are those of its token.
    """
    check_tensor("x", x, dtype=torch.bfloat16, shape=("num_tokens", "hidden"))
    check_tensor("topk_ids", topk_ids, dtype=(torch.int32, torch.int64), shape=(x.shape[0], "top_k"), device=x.device)
    check_value("capacity", capacity >= 1, "a positive number", capacity, "Use ExpertCapacity.rows_per_expert.")
    if num_local_experts is None:
        num_local_experts = num_experts - first_expert
    check_value(
        "first_expert",
        first_expert >= 0 and num_local_experts >= 1 and first_expert + num_local_experts <= num_experts,
        f"a range of experts within 0..{num_experts - 1}",
        f"{num_local_experts} from {first_expert} on",
        "Use ExpertCapacity.first_expert and num_local_experts.",
    )
    shape = (num_local_experts, capacity, x.shape[1])
    if out is None:
        out = StagedTokens(
            x.new_zeros(shape),
            torch.empty(num_local_experts, dtype=torch.int32, device=x.device),
            torch.empty(topk_ids.shape, dtype=torch.int32, device=x.device),
        )
    check_tensor("out.x", out.x, dtype=x.dtype, shape=shape, device=x.device, disjoint=True)
    check_tensor(
        "out.counts", out.counts, dtype=torch.int32, shape=(num_local_experts,), device=x.device, disjoint=True
    )
    check_tensor("out.slots", out.slots, dtype=torch.int32, shape=tuple(topk_ids.shape), device=x.device, disjoint=True)
    if x.is_cuda:
        if x.shape[0] > capacity:
            raise CapacityError(
                f"capacity: expected room for all {x.shape[0]} tokens in one expert, got {capacity} rows. The routing "
                "lies on the GPU, so that no smaller capacity is known to suffice. Dispatch in smaller slices."
            )
        check_tensor("topk_ids", topk_ids, last_dim_contiguous=True)
        for name, tensor in (("out.counts", out.counts), ("out.slots", out.slots)):
            check_tensor(name, tensor, contiguous=True)
        check_vectors("x", x)
        check_vectors("out.x", out.x)
    launch("stage_tokens", out.x, out.counts, out.slots, x, topk_ids, num_experts, first_expert)
    return out
