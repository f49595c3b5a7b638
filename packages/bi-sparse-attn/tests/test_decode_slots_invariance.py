"""A token's slot lists alone and among neighbours, bit for bit."""

from __future__ import annotations

import torch

from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, must_detect
from bi_sparse_attn import fill_decode_slots_

TABLE = torch.randperm(600, generator=torch.Generator().manual_seed(0)).int().view(6, 100)


def rows() -> tuple[torch.Tensor, ...]:
    positions = torch.tensor([0, 3, 127, 130, 777, 6000], dtype=torch.int64)
    topk = torch.full((6, 8), -1, dtype=torch.int32)
    topk[1, :1] = 0
    topk[3:, :8] = torch.arange(0, 32, 4, dtype=torch.int32)
    alive = torch.tensor([True, True, False, True, True, True])
    return topk, positions, torch.arange(6, dtype=torch.int32), alive


def fill(topk: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor, alive: torch.Tensor):
    tokens = len(positions)
    found = []
    for selected, ratio, width, block in ((topk, 4, 8, 64), (None, 128, 64, 2)):
        compressed = torch.empty((tokens, width), dtype=torch.int64, device=topk.device)
        recent = torch.empty((tokens, 128), dtype=torch.int64, device=topk.device)
        table = TABLE.to(topk.device)
        fill_decode_slots_(
            compressed, recent, selected, positions, requests, alive, table, table,
            compress_ratio=ratio, compressed_block_size=block, window_block_size=64,
        )  # fmt: skip
        found += [compressed, recent]
    return tuple(found)


def fill_by_place(topk: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor, alive: torch.Tensor):
    """Block tables by place in the batch, which is right only while requests stay where they are."""
    return fill(topk, positions, torch.arange(len(requests), dtype=torch.int32) % 6, alive)


def test_lists_are_batch_invariant() -> None:
    assert_batch_invariant(fill, rows(), batch_sizes=QUICK_BATCH_SIZES)


def test_the_driver_sees_tables_by_place() -> None:
    must_detect(fill_by_place, rows(), batch_sizes=QUICK_BATCH_SIZES)
