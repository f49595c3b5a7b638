"""A token's lists alone and among neighbours, bit for bit."""

from __future__ import annotations

import torch

from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, must_detect
from bi_sparse_attn import c128_indices, combine_topk_swa


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    positions = torch.tensor([-1, 0, 3, 130, 777, 1023], dtype=torch.int64)
    entries = torch.full((6, 10), -1, dtype=torch.int32)
    entries[2, :1] = 0
    entries[3, :10] = torch.arange(3, 33, 3, dtype=torch.int32)
    entries[4, :4] = torch.tensor([0, 7, 8, 193], dtype=torch.int32)
    entries[5, :10] = torch.arange(246, 256, dtype=torch.int32)
    return entries, positions, (positions - 200).clamp(min=0)


def combine(entries: torch.Tensor, positions: torch.Tensor, gather_starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    lists = combine_topk_swa(
        entries, positions, gather_starts, compress_ratio=4, window_size=128, compressed_rows=256, row_offset=64
    )
    return (*lists, c128_indices(positions, width=128))


def combine_by_batch(entries: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The area for compressed entries follows the longest sequence of the batch, as in a grouped prefill plan."""
    rows = max(1, int(positions.max() + 1) // 4)
    return combine_topk_swa(entries, positions, starts, compress_ratio=4, window_size=128, compressed_rows=rows)


def test_lists_are_batch_invariant() -> None:
    assert_batch_invariant(combine, rows(), batch_sizes=QUICK_BATCH_SIZES)


def test_the_driver_sees_an_area_that_follows_the_batch() -> None:
    must_detect(combine_by_batch, rows(), batch_sizes=QUICK_BATCH_SIZES)
