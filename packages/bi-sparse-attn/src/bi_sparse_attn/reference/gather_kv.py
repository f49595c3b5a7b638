"""Reference of the paged FP8 caches: quantise and insert, gather and dequantise.

A page is ``[block_size entries of data][block_size entries of scales][padding]``. Main cache (``fp8_ds_mla``): 576 B of
data (448 e4m3 codes, then 64 bfloat16) and 8 B of scales (one UE8M0 byte per 64 codes, and a zero byte). Indexer keys:
128 B of data (e4m3) and 4 B of scale (float32).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from bi_kernels.reference.numerics import to_bf16, to_e4m3
from bi_kernels.runtime.checks import check_value
from bi_kernels.scale_format import ceil_to_ue8m0, pack_ue8m0, unpack_ue8m0

from ..capacity import combined_width
from .combine_indices import prefix_lengths

__all__ = [
    "DecodeKv",
    "gather_decode_kv",
    "gather_index_k",
    "gather_kv",
    "quantize_and_insert_index_k_",
    "quantize_and_insert_kv_",
]

_NOPE, _GROUP, _KV_DATA, _KV_SCALES = 448, 64, 576, 8
_INDEX_DATA, _INDEX_SCALES = 128, 4
_E4M3_MAX = 448.0
_AMAX_FLOOR = 1e-4


class DecodeKv(NamedTuple):
    """What :func:`bi_sparse_attn.gather_decode_kv` returns.

    Attributes:
        workspace: ``(tokens, width, 512)`` bfloat16. Rows at or past a token's length are left as they were.
        indices: ``(tokens, width)`` int32 rows of the flattened workspace, -1 past the length.
        lengths: ``(tokens,)`` int32.
    """

    workspace: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor


def quantize_and_insert_kv_(
    cache: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, *, block_size: int
) -> torch.Tensor:
    """See :func:`bi_sparse_attn.quantize_and_insert_kv_`: exact op, this is its specification."""
    data, scales = _page(cache, block_size, _KV_DATA, _KV_SCALES)
    kept = _check_insert(slots, cache.shape[0] * block_size)
    block, entry = _split(slots[kept], block_size)
    rows = kv[kept]
    codes, scale = _quantize(rows[:, :_NOPE].float().reshape(-1, _NOPE // _GROUP, _GROUP))
    _put(data, block, entry, torch.cat([codes.flatten(1), rows[:, _NOPE:].contiguous().view(torch.uint8)], dim=1))
    _put(scales, block, entry, pack_ue8m0(scale).view(torch.uint8))  # 7 bytes, and the 0 that fills the second word
    return cache


def gather_kv(
    cache: torch.Tensor, slots: torch.Tensor, *, block_size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`bi_sparse_attn.gather_kv`: exact op, this is its specification."""
    data, scales = _page(cache, block_size, _KV_DATA, _KV_SCALES)
    _check_slots("slots", slots, cache.shape[0] * block_size)
    kept = slots >= 0
    block, entry = _split(slots[kept], block_size)
    page_rows = _words(data)[block, entry].view(torch.uint8)
    codes = page_rows[:, :_NOPE].int().view(-1, _NOPE // _GROUP, _GROUP)
    exponents = _words(scales)[block, entry].view(torch.uint8)[:, :-1].int().unsqueeze(-1)
    nope = torch.index_select(_dequantized(cache.device), 0, ((exponents << 8) | codes).flatten()).view(-1, _NOPE)
    rope = page_rows[:, _NOPE:].contiguous().view(torch.bfloat16)
    if out is None:
        out = torch.empty((slots.shape[0], 512), dtype=torch.bfloat16, device=cache.device)
    rows = torch.cat([nope, rope], dim=1)
    if len(rows) == len(out):
        return out.copy_(rows)
    out.zero_()
    out[kept] = rows
    return out


def quantize_and_insert_index_k_(
    cache: torch.Tensor, k: torch.Tensor, slots: torch.Tensor, *, block_size: int
) -> torch.Tensor:
    """See :func:`bi_sparse_attn.quantize_and_insert_index_k_`: exact op, this is its specification."""
    data, scales = _page(cache, block_size, _INDEX_DATA, _INDEX_SCALES)
    kept = _check_insert(slots, cache.shape[0] * block_size)
    block, entry = _split(slots[kept], block_size)
    codes, scale = _quantize(k[kept].float().unsqueeze(1))
    _put(data, block, entry, codes.squeeze(1))
    scales[block, entry] = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return cache


def gather_index_k(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    block_size: int,
    out_q: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`bi_sparse_attn.gather_index_k`: exact op, this is its specification."""
    data, scales = _page(cache, block_size, _INDEX_DATA, _INDEX_SCALES)
    _check_slots("slots", slots, cache.shape[0] * block_size)
    kept = slots >= 0
    block, entry = _split(slots[kept], block_size)
    if out_q is None:
        out_q = torch.empty((slots.shape[0], _INDEX_DATA), dtype=torch.float8_e4m3fn, device=cache.device)
    if out_scale is None:
        out_scale = torch.empty(slots.shape, dtype=torch.float32, device=cache.device)
    q = out_q.view(torch.uint8)
    q.zero_()
    q[kept] = _words(data)[block, entry].view(torch.uint8)
    out_scale.zero_()
    out_scale[kept] = scales[block, entry].view(torch.float32).squeeze(1)
    return out_q, out_scale


def gather_decode_kv(
    compressed_cache: torch.Tensor | None,
    window_cache: torch.Tensor,
    compressed_slots: torch.Tensor,
    window_slots: torch.Tensor,
    *,
    compressed_block_size: int,
    window_block_size: int,
    out: torch.Tensor | None = None,
    out_indices: torch.Tensor | None = None,
    out_lengths: torch.Tensor | None = None,
) -> DecodeKv:
    """See :func:`bi_sparse_attn.gather_decode_kv`: exact op, this is its specification."""
    tokens, top_k = compressed_slots.shape
    num_compressed = prefix_lengths("compressed_slots", compressed_slots)
    num_window = prefix_lengths("window_slots", window_slots)
    window_token, window_column = torch.nonzero(window_slots >= 0, as_tuple=True)
    window_rows = gather_kv(window_cache, window_slots[window_token, window_column], block_size=window_block_size)
    if compressed_cache is not None:
        token, column = torch.nonzero(compressed_slots >= 0, as_tuple=True)
        compressed = gather_kv(compressed_cache, compressed_slots[token, column], block_size=compressed_block_size)

    if out is None:
        width = combined_width(top_k, window_slots.shape[1])
        out = torch.zeros((tokens, width, 512), dtype=torch.bfloat16, device=window_cache.device)
    if out_indices is None:
        out_indices = torch.empty(out.shape[:2], dtype=torch.int32, device=out.device)
    if out_lengths is None:
        out_lengths = torch.empty((tokens,), dtype=torch.int32, device=out.device)
    if compressed_cache is not None:
        _put(out, token, column, compressed)
    _put(out, window_token, num_compressed[window_token] + window_column, window_rows)
    length = num_compressed + num_window
    column = torch.arange(out.shape[1], device=out.device)
    row = torch.arange(tokens, device=out.device).unsqueeze(1) * out.shape[1] + column
    out_indices.copy_(torch.where(column < length.unsqueeze(1), row, -1))
    out_lengths.copy_(length)
    return DecodeKv(out, out_indices, out_lengths)


def _page(cache: torch.Tensor, block_size: int, data_bytes: int, scale_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a cache: data ``[blocks, block_size, data_bytes]`` and scales ``[blocks, block_size, scale_bytes]``."""
    data = cache[:, : block_size * data_bytes]
    scales = cache[:, block_size * data_bytes : block_size * (data_bytes + scale_bytes)]
    return data.view(-1, block_size, data_bytes), scales.view(-1, block_size, scale_bytes)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """A view of the last dimension's bytes as int64 where they are aligned: fewer elements to index."""
    steps = (*rows.stride()[:-1], rows.shape[-1], rows.storage_offset())
    misaligned = rows.data_ptr() % 8 or any(step * rows.element_size() % 8 for step in steps)
    return rows if misaligned or rows.stride(-1) != 1 else rows.view(torch.int64)


def _put(target: torch.Tensor, first: torch.Tensor, second: torch.Tensor, rows: torch.Tensor) -> None:
    """``target[first, second] = rows`` for ``rows`` ``(n, columns)`` of the same dtype."""
    words = _words(target)
    words[first, second] = rows.contiguous().view(words.dtype)


def _split(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return slots // block_size, slots % block_size


def _check_slots(name: str, slots: torch.Tensor, num_slots: int) -> None:
    low, high = (int(slots.min()), int(slots.max())) if slots.numel() else (-1, -1)
    check_value(
        name,
        low >= -1 and high < num_slots,
        f"-1 or a slot below {num_slots}",
        f"slots from {low} to {high}",
        "Pass block * block_size + entry, or -1 for none.",
    )


def _check_insert(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Mask of the rows to insert. Two rows for one slot are refused: which one stays would be a race on a GPU."""
    _check_slots("slots", slots, num_slots)
    kept = slots >= 0
    used = torch.sort(slots[kept], stable=True).values
    check_value(
        "slots",
        not bool((used[1:] == used[:-1]).any()),
        "every slot once",
        "a slot that occurs twice",
        "Give every token its own slot; -1 skips a token.",
    )
    return kept


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8, shape of ``x``) and power-of-two scales (float32, without the last dimension) of float32 ``x``."""
    scale = ceil_to_ue8m0(x.abs().amax(-1).clamp(min=_AMAX_FLOOR) / _E4M3_MAX)  # NaN for a maximum of inf or NaN
    return to_e4m3(x / scale.unsqueeze(-1)).view(torch.uint8), scale


@functools.cache
def _dequantized(device: torch.device) -> torch.Tensor:
    """Table of all products: entry ``256 * byte + code`` is the code times ``2**(byte - 127)``, as bfloat16."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=device)
    codes = every_byte.view(torch.float8_e4m3fn).float()
    scales = unpack_ue8m0(every_byte.view(torch.int32), 256)
    # Exact in float32: codes are multiples of 2**-9, scales at least 2**-127, and subnormals reach down to 2**-149.
    # The one rounding is the conversion to bfloat16, and it drops bits below 2**-133 only.
    return to_bf16((scales.unsqueeze(1) * codes).flatten())
