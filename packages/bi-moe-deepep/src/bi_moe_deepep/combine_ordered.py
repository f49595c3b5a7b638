"""Ordered combine: a token's expert outputs added in the order of its top-k slots."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_tensor, check_value

from ._ops import check_vectors, launch

__all__ = ["combine_ordered"]

_OUT_DTYPES = (torch.bfloat16, torch.float32)


def combine_ordered(
    expert_out: torch.Tensor,
    slots: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    topk_ids: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum of each token's expert rows. Exact op.

    ``acc = fma(weight, row, acc)`` in float32 from +0, slots ascending, slots of -1 skipped, one rounding at the end.

    Args:
        expert_out: ``(num_local_experts, capacity, hidden)``, bfloat16. On a GPU contiguous, like the next two, and
            ``hidden`` a multiple of 8.
        slots: ``(num_tokens, top_k)``, int32: rows ``e * capacity + r``, or -1 (see :func:`stage_tokens`).
        topk_weights: ``(num_tokens, top_k)``, float32. The weight of a skipped slot is not looked at.
        topk_ids: ``(num_tokens, top_k)``, int32, contiguous on a GPU, or None: a slot with a negative id is skipped
            whatever ``slots`` has there. For dispatchers that write no slot for such an id.
        out_dtype: bfloat16, or float32 to see the sum before its rounding; ignored when ``out`` is given.
        out: ``(num_tokens, hidden)``, bfloat16 or float32, written and returned.

    Returns:
        ``(num_tokens, hidden)``. A token without slots is +0; NaN results are the one NaN 0x7fc00000 (0x7fc0).

    Raises:
        ArgumentError: A dtype, shape or device does not fit, or a slot lies outside ``expert_out`` (data is looked
            at on the CPU only; a GPU skips such a slot). Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel provides the op.

    Source: DeepEP's ``low_latency_combine`` does the same in the same order; design.md, "MoE".

    Invariance:
        Row ``i`` depends on row ``i`` of ``slots``, ``topk_weights`` and ``topk_ids`` and on the rows they name alone,
        bit for bit.
    """
    check_tensor("expert_out", expert_out, dtype=torch.bfloat16, shape=("num_local_experts", "capacity", "hidden"))
    check_tensor("slots", slots, dtype=torch.int32, shape=("num_tokens", "top_k"), device=expert_out.device)
    check_tensor("topk_weights", topk_weights, dtype=torch.float32, shape=tuple(slots.shape), device=expert_out.device)
    if topk_ids is not None:
        check_tensor("topk_ids", topk_ids, dtype=torch.int32, shape=tuple(slots.shape), device=expert_out.device)
    shape = (slots.shape[0], expert_out.shape[2])
    if out is None:
        check_value("out_dtype", out_dtype in _OUT_DTYPES, "bfloat16 or float32", out_dtype, "Convert afterwards.")
        out = torch.empty(shape, dtype=out_dtype, device=expert_out.device)
    check_tensor("out", out, dtype=_OUT_DTYPES, shape=shape, device=expert_out.device, disjoint=True)
    if out.is_cuda:
        inputs = {"expert_out": expert_out, "slots": slots, "topk_weights": topk_weights, "topk_ids": topk_ids}
        for name, tensor in inputs.items():
            if tensor is not None:
                check_tensor(name, tensor, contiguous=True)
        check_vectors("expert_out", expert_out)
        check_vectors("out", out)
    launch("combine_ordered", out, expert_out, slots, topk_weights, topk_ids)
    return out
