"""Reference of the slot lists of decode tokens."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_value

__all__ = ["fill_decode_slots_"]


def fill_decode_slots_(
    compressed_slots: torch.Tensor,
    window_slots: torch.Tensor,
    topk_indices: torch.Tensor | None,
    positions: torch.Tensor,
    requests: torch.Tensor,
    is_token: torch.Tensor,
    compressed_table: torch.Tensor | None,
    window_table: torch.Tensor,
    *,
    compress_ratio: int,
    compressed_block_size: int,
    window_block_size: int,
) -> None:
    """See :func:`bi_sparse_attn.fill_decode_slots_`: exact op, this is its specification."""
    position = positions.unsqueeze(1)
    first = (position - window_slots.shape[1] + 1).clamp(min=0)
    entry = first + torch.arange(window_slots.shape[1], device=positions.device)
    window = _slots("window_table", window_table, entry, entry <= position, is_token, requests, window_block_size)
    if compressed_table is not None:
        column = torch.arange(compressed_slots.shape[1], device=positions.device)
        if topk_indices is None:
            entry = torch.where(column < (position + 1) // max(compress_ratio, 1), column, -1)
        else:
            entry = topk_indices.long()
        name, size = "compressed_table", compressed_block_size
        compressed_slots.copy_(_slots(name, compressed_table, entry, entry >= 0, is_token, requests, size))
    window_slots.copy_(window)


def _slots(
    name: str,
    table: torch.Tensor,
    entry: torch.Tensor,
    listed: torch.Tensor,
    is_token: torch.Tensor,
    requests: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """The slot of each listed entry, and -1. A page that the table does not have is refused."""
    listed = listed & is_token.unsqueeze(1)
    entry = torch.where(listed, entry, 0)  # what is not listed may point past the table
    row = torch.where(is_token, requests, 0).long().unsqueeze(1)
    column = entry // block_size
    outside = listed & ((row < 0) | (row >= table.shape[0]) | (column < 0) | (column >= table.shape[1]))
    check_value(
        name,
        not bool(outside.any()),
        "a page for every entry of the lists",
        f"a table of {tuple(table.shape)} without pages for {int(outside.any(1).sum())} tokens",
        "Pass the block tables of these requests, and positions and entries within them.",
    )
    if not table.numel():
        return torch.full_like(entry, -1)
    page = table[row.clamp(0, table.shape[0] - 1), column].long()
    return torch.where(listed, page * block_size + entry % block_size, -1)
