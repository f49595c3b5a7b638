"""Reference of the slot lists of decode tokens."""

from __future__ import annotations

import torch

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
    if compressed_table is not None:
        column = torch.arange(compressed_slots.shape[1], device=positions.device)
        if topk_indices is None:
            entry = torch.where(column < (position + 1) // max(compress_ratio, 1), column, -1)
        else:
            entry = topk_indices.long()
        _fill(compressed_slots, entry, entry >= 0, is_token, requests, compressed_table, compressed_block_size)
    first = (position - window_slots.shape[1] + 1).clamp(min=0)
    entry = first + torch.arange(window_slots.shape[1], device=positions.device)
    _fill(window_slots, entry, entry <= position, is_token, requests, window_table, window_block_size)


def _fill(
    slots: torch.Tensor,
    entry: torch.Tensor,
    listed: torch.Tensor,
    is_token: torch.Tensor,
    requests: torch.Tensor,
    table: torch.Tensor,
    block_size: int,
) -> None:
    listed = listed & is_token.unsqueeze(1)
    entry = torch.where(listed, entry, 0)  # what is not listed may point past the table
    row = torch.where(is_token, requests, 0).long().unsqueeze(1)
    page = table[row, entry // block_size].long()
    slots.copy_(torch.where(listed, page * block_size + entry % block_size, -1))
