"""Sparse MLA: attention of each token over its own ordered list of K rows."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_output, check_tensor, check_value

from ._ops import launch
from .reference.sparse_mla import SparseMlaOutput

__all__ = ["SparseMlaOutput", "sparse_mla_fwd"]

_HEAD_DIM = 512
_WIDTH_MULTIPLE = 128  # what FlashMLA's kernels ask for; refused on a CPU too, so that CPU tests find it


def sparse_mla_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> SparseMlaOutput:
    """Attention over listed rows, with an optional sink; the one path of prefill and decode.

    *Bounded op.* The list is walked in blocks of 64 entries, in order, with a running maximum against which P is
    rounded to bfloat16; :func:`bi_sparse_attn.reference.sparse_mla.sparse_mla_fwd` writes out the reference's
    arithmetic. On a GPU the op is FlashMLA's; its contract is invariance and the bound, not these bits. The order
    of the list is part of the result.

    Source: ``flash_mla_sparse_fwd`` of FlashMLA.

    Args:
        q: ``(tokens, heads, 512)`` bfloat16.
        kv: ``(rows, 512)`` bfloat16, keys and values at once.
        indices: ``(tokens, width)`` int32 rows of ``kv``; width a multiple of 128. -1, anything not below ``rows`` and
            anything at or past ``topk_length`` is invalid and contributes exactly nothing, wherever it stands.
        sm_scale: Factor of the scores.
        attn_sink: ``(heads,)`` float32, a logit that joins the softmax's denominator only, or None; -inf means none.
        topk_length: ``(tokens,)`` int32, how many leading entries count, or None for all.
        out: ``(tokens, heads, 512)`` bfloat16 to write to, or None.

    Returns:
        :class:`SparseMlaOutput` ``(out, max_logits, lse)``. A token without a valid entry has out 0, max_logits -inf
        and lse +inf.

    Raises:
        ArgumentError: A dtype, shape, stride or device is wrong. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel.

    Invariance:
        Token ``t``'s results depend on its ``q``, the sink, ``sm_scale`` and the values of its valid rows in their
        places in the list: not on other tokens, on where in ``kv`` the rows lie, on rows that it does not list, or on
        the width past its last valid entry.
    """
    check_tensor("q", q, dtype=torch.bfloat16, shape=("tokens", "heads", _HEAD_DIM), last_dim_contiguous=True)
    device = q.device
    tokens, heads, _ = q.shape
    check_tensor("kv", kv, dtype=torch.bfloat16, shape=("rows", _HEAD_DIM), device=device, last_dim_contiguous=True)
    check_tensor("indices", indices, dtype=torch.int32, shape=(tokens, "width"), device=device)
    width = indices.shape[1]
    check_value(
        "indices",
        width % _WIDTH_MULTIPLE == 0,
        f"a width that is a multiple of {_WIDTH_MULTIPLE}",
        width,
        "Pad the lists with -1 to SparseCapacity.combined_width.",
    )
    if attn_sink is not None:
        check_tensor("attn_sink", attn_sink, dtype=torch.float32, shape=(heads,), device=device)
    if topk_length is not None:
        check_tensor("topk_length", topk_length, dtype=torch.int32, shape=(tokens,), device=device)
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=device)
    check_output("out", out, torch.bfloat16, q.shape, device, last_dim_contiguous=True)
    max_logits = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    lse = torch.empty_like(max_logits)
    result = SparseMlaOutput(out, max_logits, lse)
    launch("sparse_mla_fwd", device, q, kv, indices, attn_sink, topk_length, *result, sm_scale)
    return result
