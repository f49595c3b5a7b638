"""A token's bytes and rows alone and among neighbours, bit for bit."""

from __future__ import annotations

import math

import torch

from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, must_detect
from bi_sparse_attn import (
    gather_decode_kv,
    gather_index_k,
    gather_kv,
    index_k_block_bytes,
    kv_block_bytes,
    quantize_and_insert_index_k_,
    quantize_and_insert_kv_,
)

BLOCK = 16


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def kv_rows() -> torch.Tensor:
    rows = randn(5, 512, seed=1) * torch.tensor([1.0, 2.0**-9, 700.0, 0.0, 1.0]).bfloat16().unsqueeze(1)
    rows[4, 70] = math.nan
    return rows


def through_the_cache(kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Insert in reverse order, so that a token's slot has nothing to do with its row."""
    tokens = kv.shape[0]
    slots = torch.arange(tokens).flip(0)
    blocks = -(-tokens // BLOCK)
    cache = torch.zeros(blocks, kv_block_bytes(BLOCK), dtype=torch.uint8)
    quantize_and_insert_kv_(cache, kv, slots, block_size=BLOCK)
    page = cache[slots // BLOCK]
    offset = (slots % BLOCK).unsqueeze(1)
    data = torch.gather(page, 1, offset * 576 + torch.arange(576))
    scales = torch.gather(page, 1, BLOCK * 576 + offset * 8 + torch.arange(8))
    index_cache = torch.zeros(blocks, index_k_block_bytes(BLOCK), dtype=torch.uint8)
    quantize_and_insert_index_k_(index_cache, kv[:, :128].contiguous(), slots, block_size=BLOCK)
    index_keys = gather_index_k(index_cache, slots, block_size=BLOCK)
    return data, scales, gather_kv(cache, slots, block_size=BLOCK), *index_keys


def scaled_by_the_batch(kv: torch.Tensor) -> torch.Tensor:
    """Per-tensor scaling: the batch's greatest element decides everybody's rounding."""
    shared = torch.nan_to_num(kv.float()).abs().amax().clamp(min=1.0)
    return through_the_cache((kv.float() / shared).bfloat16())[2]


def test_bytes_and_rows_are_batch_invariant() -> None:
    assert_batch_invariant(through_the_cache, kv_rows(), batch_sizes=QUICK_BATCH_SIZES)


def test_the_driver_sees_a_scale_of_the_whole_batch() -> None:
    must_detect(scaled_by_the_batch, kv_rows(), batch_sizes=QUICK_BATCH_SIZES)


CACHE = torch.zeros(8, kv_block_bytes(BLOCK), dtype=torch.uint8)
quantize_and_insert_kv_(CACHE, randn(8 * BLOCK, 512, seed=2), torch.arange(8 * BLOCK), block_size=BLOCK)


def decode_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    compressed = torch.stack([torch.randperm(8 * BLOCK, generator=generator)[:12] for _ in range(4)])
    window = torch.stack([torch.randperm(8 * BLOCK, generator=generator)[:20] for _ in range(4)])
    compressed[1, 5:], compressed[2] = -1, -1
    window[1, 3:], window[3] = -1, -1
    return compressed, window


def decode(compressed: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sizes = {"compressed_block_size": BLOCK, "window_block_size": BLOCK}
    found = gather_decode_kv(CACHE, CACHE, compressed, window, **sizes)
    own = torch.arange(len(compressed)).unsqueeze(1) * found.workspace.shape[1]
    return found.workspace, torch.where(found.indices >= 0, found.indices - own, -1), found.lengths


def decode_packed_by_the_batch(compressed: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """The window starts after the batch's longest compressed part instead of right after the token's own."""
    found = gather_decode_kv(CACHE, CACHE, compressed, window, compressed_block_size=BLOCK, window_block_size=BLOCK)
    longest = int((compressed >= 0).sum(1).max())
    shift = longest - (compressed >= 0).sum(1)
    place = (torch.arange(found.workspace.shape[1]) - shift.unsqueeze(1)).clamp(min=0)
    return found.workspace[torch.arange(len(compressed)).unsqueeze(1), place]


def test_decode_rows_are_batch_invariant() -> None:
    assert_batch_invariant(decode, decode_rows(), batch_sizes=QUICK_BATCH_SIZES, neighbours=("random",))


def test_the_driver_sees_segments_aligned_over_the_batch() -> None:
    must_detect(decode_packed_by_the_batch, decode_rows(), batch_sizes=QUICK_BATCH_SIZES, neighbours=("random",))
