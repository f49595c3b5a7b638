"""Reference of the index lists that sparse attention walks."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_value
from bi_kernels.runtime.errors import CapacityError

from ..capacity import combined_width

__all__ = ["c128_indices", "combine_topk_swa", "prefix_lengths"]


def combine_topk_swa(
    topk_indices: torch.Tensor,
    positions: torch.Tensor,
    gather_starts: torch.Tensor,
    *,
    compress_ratio: int,
    window_size: int,
    compressed_rows: int,
    row_offset: int | torch.Tensor = 0,
    out_indices: torch.Tensor | None = None,
    out_lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`bi_sparse_attn.combine_topk_swa`: exact op, this is its specification."""
    tokens, top_k = topk_indices.shape
    position = positions.long().unsqueeze(1)
    is_token = position >= 0
    # A padding token's row may hold whatever an earlier step left there.
    topk = torch.where(is_token, topk_indices.long(), -1)
    num_compressed = prefix_lengths("topk_indices", topk).unsqueeze(1)
    _check_entries(topk, num_compressed, position, compress_ratio, compressed_rows)

    window_start = (position - window_size + 1).clamp(min=0)
    gather_start = gather_starts.long().unsqueeze(1)
    late = is_token & (gather_start > window_start)
    check_value(
        "gather_starts",
        not bool(late.any()),
        "at most the first position of the token's window",
        f"a later one for {int(late.sum())} tokens",
        "Gather the request's rows from the first window position of its first token.",
    )

    length = torch.where(is_token, num_compressed + position - window_start + 1, 0)
    if out_indices is None:
        out_indices = topk_indices.new_empty((tokens, combined_width(top_k, window_size)))
    if out_lengths is None:
        out_lengths = topk_indices.new_empty((tokens,))
    column = torch.arange(out_indices.shape[1], device=topk_indices.device)
    compressed = torch.nn.functional.pad(topk, (0, out_indices.shape[1] - top_k), value=-1)
    window = compressed_rows + window_start - gather_start + column - num_compressed
    offset = row_offset.long().unsqueeze(1) if isinstance(row_offset, torch.Tensor) else row_offset
    index = offset + torch.where(column < num_compressed, compressed, window)
    out_indices.copy_(torch.where(column < length, index, -1))
    out_lengths.copy_(length.squeeze(1))
    return out_indices, out_lengths


def c128_indices(positions: torch.Tensor, *, width: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """See :func:`bi_sparse_attn.c128_indices`: exact op, this is its specification."""
    count = (positions.long().unsqueeze(1) + 1).clamp(min=0) // 128
    most = int(count.max()) if count.numel() else 0
    if most > width:
        raise CapacityError(
            f"c128_indices: expected at most {width} compressed entries per token (width), got {most}. "
            "Take the width from SparseCapacity.from_model(max_model_len=...).c128_width."
        )
    column = torch.arange(width, device=positions.device)
    index = torch.where(column < count, column, -1).to(torch.int32)
    return index if out is None else out.copy_(index)


def prefix_lengths(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Number of entries that are not -1 in every row of ``rows``, which must all come before the first -1."""
    valid = rows >= 0
    count = valid.sum(1)
    column = torch.arange(rows.shape[1], device=rows.device)
    check_value(
        name,
        bool((valid == (column < count.unsqueeze(1))).all()) and not bool((rows < -1).any()),
        "-1 at the end of a row only",
        "-1 before a valid entry, or an entry below -1",
        "Pass lists whose valid entries come first.",
    )
    return count


def _check_entries(
    topk: torch.Tensor,
    num_compressed: torch.Tensor,
    position: torch.Tensor,
    compress_ratio: int,
    compressed_rows: int,
) -> None:
    """Entries ascend (reduction order is part of the contract), and none lies in the token's future."""
    steps = topk[:, 1:] - topk[:, :-1]
    inside = torch.arange(1, steps.shape[1] + 1, device=topk.device) < num_compressed
    check_value(
        "topk_indices",
        not bool((inside & (steps <= 0)).any()),
        "ascending entries",
        "entries out of order or repeated",
        "Pass what top_k_per_row_prefill or c128_indices returns.",
    )
    complete = (position + 1) // compress_ratio if compress_ratio > 1 else torch.zeros_like(position)
    check_value(
        "topk_indices",
        not bool((topk >= complete.clamp(max=compressed_rows)).logical_and(topk >= 0).any()),
        f"entries below (position + 1) // {compress_ratio} and below compressed_rows={compressed_rows}",
        "an entry that the token cannot see",
        "Pass row_ends = (position + 1) // compress_ratio to the selector, and compressed_rows from SparseCapacity.",
    )
