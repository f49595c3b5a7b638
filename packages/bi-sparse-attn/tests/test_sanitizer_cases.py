"""One small call of every kernel, for compute-sanitizer: ``ci/gpu/sanitize.sh bi-sparse-attn``. Needs a GPU.

What the results are equal to is computed on the CPU, so that the tool sees little but our kernels.
"""

from __future__ import annotations

import pytest
import torch

from bi_kernels.testing import assert_bitwise_equal
from bi_sparse_attn import (
    c128_indices,
    combine_topk_swa,
    gather_decode_kv,
    gather_index_k,
    gather_kv,
    index_k_block_bytes,
    kv_block_bytes,
    quantize_and_insert_index_k_,
    quantize_and_insert_kv_,
    top_k_per_row_prefill,
)

pytestmark = pytest.mark.gpu


# One shape for each way: written out whole, from registers of either size, through a list, with blocks that share a
# row, and from slices that do not fit on chip; values that a list holds, and plateaus that it does not hold.
@pytest.mark.parametrize(
    ("rows", "columns", "top_k"),
    [(3, 100, 128), (3, 3001, 64), (3, 6001, 512), (70, 9001, 64), (2, 20_003, 512), (1, 400_001, 64),
     (2, 20_003, 3000)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("levels", [0, 3], ids=["normal", "plateaus"])
def test_top_k(rows: int, columns: int, top_k: int, levels: int) -> None:
    logits = torch.randint(levels, (rows, columns)).float() if levels else torch.randn(rows, columns)
    starts = torch.arange(rows, dtype=torch.int32) % 5
    ends = columns - torch.arange(rows, dtype=torch.int32) % 7
    want = top_k_per_row_prefill(logits, starts, ends, top_k)
    got = top_k_per_row_prefill(logits.cuda(), starts.cuda(), ends.cuda(), top_k)
    assert_bitwise_equal(got.cpu(), want)


def test_caches() -> None:
    kv, slots = torch.randn(11, 512).bfloat16(), torch.randperm(24)[:11]
    slots[3] = -1
    for insert, gather, page, rows in (
        (quantize_and_insert_kv_, gather_kv, kv_block_bytes(8), kv),
        (quantize_and_insert_index_k_, gather_index_k, index_k_block_bytes(8), kv[:, :128].contiguous()),
    ):
        here, there = torch.zeros(3, page, dtype=torch.uint8), torch.zeros(3, page, dtype=torch.uint8).cuda()
        insert(here, rows, slots, block_size=8)
        insert(there, rows.cuda(), slots.cuda(), block_size=8)
        assert_bitwise_equal(there.cpu(), here)
        want, got = gather(here, slots, block_size=8), gather(there, slots.cuda(), block_size=8)
        for a, b in zip(
            (got,) if torch.is_tensor(got) else got, (want,) if torch.is_tensor(want) else want, strict=True
        ):
            assert_bitwise_equal(a.cpu(), b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode_gather(dtype: torch.dtype) -> None:
    cache = torch.randint(256, (3, kv_block_bytes(8)), dtype=torch.int32).byte()
    compressed, window = torch.randint(24, (4, 40)), torch.randint(24, (4, 20))
    compressed[1, 7:], window[2, 3:], compressed[3], window[3] = -1, -1, -1, -1
    slots = compressed.to(dtype), window.to(dtype)
    sizes = {"compressed_block_size": 8, "window_block_size": 8}
    want = gather_decode_kv(cache, cache, *slots, **sizes)
    there = cache.cuda()
    got = gather_decode_kv(there, there, *(s.cuda() for s in slots), **sizes)
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a.cpu(), b)


def test_index_lists() -> None:
    positions = torch.tensor([700, -1, 5])
    topk = torch.tensor([[0, 4, 100], [7, 7, 7], [0, -1, -1]], dtype=torch.int32)
    constants = {"compress_ratio": 4, "window_size": 128, "compressed_rows": 300}
    want = combine_topk_swa(topk, positions, positions * 0, **constants)
    got = combine_topk_swa(topk.cuda(), positions.cuda(), positions.cuda() * 0, **constants)
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a.cpu(), b)
    assert_bitwise_equal(c128_indices(positions.cuda(), width=128).cpu(), c128_indices(positions, width=128))
