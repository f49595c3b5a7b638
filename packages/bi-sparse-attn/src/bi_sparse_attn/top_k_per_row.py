"""Deterministic top-k per row: the one selector of prefill and decode."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_output, check_tensor, check_value

from ._ops import launch
from .capacity import check_compress_ratio

__all__ = ["fill_row_ranges_", "top_k_per_row_prefill"]


def top_k_per_row_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    top_k: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select the ``top_k`` best columns of each row's range, and return them in ascending order.

    *Exact op.* The order is total: the higher score first, then the lower index. +0.0 equals -0.0; -inf is an
    ordinary lowest score; NaN is never selected. So the set is unique, whatever the ties, and its order is
    canonical.

    Source: ``top_k_per_row_prefill``, ``top_k_per_row_decode``, ``persistent_topk`` and ``cooperative_topk`` of vLLM's
    sparse attention indexer, all of which this op replaces.

    Args:
        logits: ``(rows, columns)`` float32, any strides, any number of columns up to 2**31 - 1. Columns outside a row's
            range are not looked at.
        row_starts: ``(rows,)`` int32, first column of each row's range, at least 0.
        row_ends: ``(rows,)`` int32, one past its last column, at most ``columns``. An end at or before the start is an
            empty range.
        top_k: How many to select; a row with fewer candidates yields all of them.
        out: ``(rows, at least top_k)`` int32 to write to, or None. Columns past ``top_k`` are filled with -1.

    Returns:
        ``out``, or a new ``(rows, top_k)`` int32: indices relative to the row's start, ascending, then -1.

    Raises:
        ArgumentError: A dtype, shape or device is wrong, ``out`` is narrower than ``top_k``, or (CPU only: it needs
            the data) a range leaves the columns. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel.

    Invariance:
        Row ``i`` of the result depends on ``top_k`` and on the scores within row ``i``'s range alone: not on the other
        rows, on their number, on the number of columns or strides, or on where in the row the range starts.
    """
    check_tensor("logits", logits, dtype=torch.float32, shape=("rows", "columns"))
    rows = logits.shape[0]
    check_tensor("row_starts", row_starts, dtype=torch.int32, shape=(rows,), device=logits.device)
    check_tensor("row_ends", row_ends, dtype=torch.int32, shape=(rows,), device=logits.device)
    check_value("top_k", top_k >= 0, "at least 0", top_k, "Pass the model's index_topk.")
    if out is None:
        out = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    check_tensor("out", out, dtype=torch.int32, shape=(rows, "top_k"), device=logits.device)
    check_output("out", out, torch.int32, out.shape, logits.device)
    check_value("out", out.shape[1] >= top_k, f"{top_k} columns or more", out.shape[1], "Allocate it wider.")
    launch("top_k_per_row_prefill", logits.device, logits, row_starts, row_ends, out, top_k)
    return out


def fill_row_ranges_(
    row_starts: torch.Tensor, row_ends: torch.Tensor, positions: torch.Tensor, *, compress_ratio: int
) -> None:
    """Fill persistent buffers with the ranges of decode rows: ``[0, (position + 1) // compress_ratio)``.

    Neither allocates outputs nor synchronises with the host, so a CUDA graph replays it on the same addresses.

    Source: ``seq_lens`` as the row lengths of vLLM's decode selectors; design.md's persistent row-start buffers.

    Args:
        row_starts: ``(capacity,)`` int32, written whole.
        row_ends: ``(capacity,)`` int32, written whole.
        positions: ``(tokens,)`` int32 or int64, ``tokens <= capacity``; -1 marks a padding token, which gets an empty
            range, as do the rows past the last token.
        compress_ratio: Tokens per compressed entry.

    Raises:
        ArgumentError: A dtype, shape, device or ratio is wrong, or there are more tokens than capacity. Nothing was
            written.

    Invariance:
        Element ``i`` depends on ``positions[i]`` alone.
    """
    check_tensor("row_starts", row_starts, shape=("capacity",))
    for name, buffer in (("row_starts", row_starts), ("row_ends", row_ends)):
        check_output(name, buffer, torch.int32, row_starts.shape, row_starts.device)
    check_tensor("positions", positions, dtype=(torch.int32, torch.int64), shape=("tokens",), device=row_starts.device)
    check_compress_ratio(compress_ratio)
    tokens = positions.shape[0]
    check_value(
        "positions", tokens <= row_ends.shape[0], f"at most {row_ends.shape[0]} tokens", tokens, "Enlarge the buffers."
    )
    row_starts.zero_()
    row_ends[tokens:].zero_()
    if compress_ratio > 1:
        row_ends[:tokens].copy_((positions + 1).clamp(min=0) // compress_ratio)
    else:
        row_ends[:tokens].zero_()
