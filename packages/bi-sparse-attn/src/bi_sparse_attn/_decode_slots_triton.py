"""The Triton kernel behind ``fill_decode_slots_``. Imported for CUDA tensors only, and under Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["fill_decode_slots_"]

_COLUMNS = 512


# One compiled variant per layer type: a variant more would be compiled while a graph is captured.
# Parameters have no annotations but constexpr: Triton resolves them.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["top_k"],
    do_not_specialize_on_alignment=["compressed", "window", "topk", "positions", "requests", "is_token"],
)
def _fill(  # type: ignore[no-untyped-def]
    compressed,
    compressed_stride,
    window,
    window_stride,
    topk,
    topk_stride,
    positions,
    requests,
    is_token,
    compressed_table,
    compressed_table_stride,
    window_table,
    window_table_stride,
    top_k,
    RATIO: tl.constexpr,
    HAS_TOPK: tl.constexpr,
    COMPRESSED_BLOCK: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    alive = tl.load(is_token + token) != 0
    request = tl.load(requests + token, mask=alive, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=alive, other=-1)
    if piece == 0:
        place = tl.arange(0, WINDOW)
        row = tl.maximum(position - WINDOW + 1, 0) + place
        seen = row <= position
        row_page = tl.load(window_table + request * window_table_stride + row // WINDOW_BLOCK, mask=seen, other=0)
        row_slot = row_page.to(tl.int64) * WINDOW_BLOCK + row % WINDOW_BLOCK
        tl.store(window + token * window_stride + place, tl.where(seen, row_slot, -1))
    else:
        column = (piece - 1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < top_k
        if HAS_TOPK:
            entry = tl.load(topk + token * topk_stride + column, mask=inside & alive, other=-1).to(tl.int64)
        else:
            entry = tl.where(column < (position + 1) // RATIO, column, -1).to(tl.int64)
        listed = inside & (entry >= 0)
        pages = compressed_table + request * compressed_table_stride
        page = tl.load(pages + entry // COMPRESSED_BLOCK, mask=listed, other=0)
        slot = page.to(tl.int64) * COMPRESSED_BLOCK + entry % COMPRESSED_BLOCK
        tl.store(compressed + token * compressed_stride + column, tl.where(listed, slot, -1), mask=inside)


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
    """See :func:`bi_sparse_attn.fill_decode_slots_`, which has checked the arguments."""
    tokens, top_k = compressed_slots.shape
    if not tokens:
        return
    topk = positions if topk_indices is None else topk_indices
    table = window_table if compressed_table is None else compressed_table
    _fill[(tokens, 1 + triton.cdiv(top_k, _COLUMNS))](
        compressed_slots,
        compressed_slots.stride(0),
        window_slots,
        window_slots.stride(0),
        topk,
        topk.stride(0),
        positions,
        requests,
        is_token,
        table,
        table.stride(0),
        window_table,
        window_table.stride(0),
        top_k,
        RATIO=max(compress_ratio, 1),
        HAS_TOPK=topk_indices is not None,
        COMPRESSED_BLOCK=compressed_block_size,
        WINDOW_BLOCK=window_block_size,
        WINDOW=window_slots.shape[1],
        COLUMNS=_COLUMNS,
    )
