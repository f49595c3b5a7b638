"""Paged FP8 caches: quantise and insert, gather and dequantise.

A page (*block*) is ``[block_size entries of data][block_size entries of scales][padding]``, bytes:

=================  ==============================================  ===========================================
cache              data of an entry                                scales of an entry
=================  ==============================================  ===========================================
main, fp8_ds_mla   576: 448 e4m3 codes, then 64 bfloat16 (RoPE)    8: 7 UE8M0 bytes (groups of 64 codes), one 0
indexer keys       128: 128 e4m3 codes                             4: one float32
=================  ==============================================  ===========================================

Scales are powers of two: ``2**ceil(log2(max(amax, 1e-4) / 448))``, from the float's bits. A slot is
``block * block_size + entry``.
"""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_output, check_tensor, check_value

from ._ops import launch
from .capacity import combined_width
from .reference.gather_kv import DecodeKv

__all__ = [
    "DecodeKv",
    "gather_decode_kv",
    "gather_index_k",
    "gather_kv",
    "index_k_block_bytes",
    "kv_block_bytes",
    "quantize_and_insert_index_k_",
    "quantize_and_insert_kv_",
]

HEAD_DIM = 512
_INTEGERS = (torch.int32, torch.int64)
INDEX_DIM = 128
_KV_ENTRY_BYTES = 584
_INDEX_ENTRY_BYTES = 132
_KV_ALIGNMENT = 576
# What the kernels' vector accesses need of addresses, in bytes: of a page, and of a row of output.
_KV_PAGE_START, _INDEX_PAGE_START, _KV_ROW_START, _INDEX_ROW_START = 8, 4, 16, 4


def kv_block_bytes(block_size: int) -> int:
    """Bytes of a main-cache page of ``block_size`` entries, padded to a multiple of 576."""
    return -(-block_size * _KV_ENTRY_BYTES // _KV_ALIGNMENT) * _KV_ALIGNMENT


def index_k_block_bytes(block_size: int) -> int:
    """Bytes of an indexer-key page of ``block_size`` entries, without padding."""
    return block_size * _INDEX_ENTRY_BYTES


def quantize_and_insert_kv_(
    cache: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, *, block_size: int
) -> torch.Tensor:
    """Quantise K rows and write them to their slots of the main cache, in place.

    *Exact op.* A group with NaN or an infinity gets the scale byte 255 (NaN) and NaN codes; the other groups are as
    ever.

    Source: the last step of vLLM's ``fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert``, and its Triton twin
    ``quantize_and_insert_k_cache``; the exponent comes from the float's bits here, not from log2.

    Args:
        cache: ``(blocks, at least block_size * 584)`` uint8, last dimension contiguous.
        kv: ``(tokens, 512)`` bfloat16: 448 channels to quantise, 64 rotated ones to store as they are.
        slots: ``(tokens,)`` int64; -1 skips the token.
        block_size: Entries per page.

    Returns:
        ``cache``. Bytes of slots that are not named, and the page's padding, keep their value.

    Raises:
        ArgumentError: A dtype, shape, stride, device or value is wrong, or (CPU only: it needs the data) a slot is out
            of range or occurs twice. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel.

    Invariance:
        The 584 bytes of a slot depend on the token's row of ``kv`` alone.
    """
    _check_cache("cache", cache, block_size, _KV_ENTRY_BYTES)
    check_output("cache", cache, torch.uint8, cache.shape, cache.device)
    check_tensor("kv", kv, dtype=torch.bfloat16, shape=("tokens", HEAD_DIM), device=cache.device)
    check_tensor("slots", slots, dtype=torch.int64, shape=(kv.shape[0],), device=cache.device)
    _check_starts("cache", cache, _KV_PAGE_START)
    launch("quantize_and_insert_kv", cache.device, cache, kv, slots, block_size)
    return cache


def gather_kv(
    cache: torch.Tensor, slots: torch.Tensor, *, block_size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Read and dequantise slots of the main cache.

    *Exact op.* Each code is multiplied by ``2**(byte - 127)`` and rounded to bfloat16. The result is the exact
    product unless it lies below 2**-126, where the rounding to a multiple of 2**-133 (to even) may drop bits, or
    above bfloat16's range, where it is infinite; byte 255 and NaN codes give NaN (0x7fc0).

    Source: ``dequantize_and_gather_k_cache`` of vLLM's DeepSeek-V4 cache utilities.

    Args:
        cache: ``(blocks, at least block_size * 584)`` uint8, last dimension contiguous.
        slots: ``(n,)`` int64; -1 gives a row of zeros.
        block_size: Entries per page.
        out: ``(n, 512)`` bfloat16 to write to, or None.

    Returns:
        ``out``, or a new ``(n, 512)`` bfloat16.

    Raises:
        ArgumentError: A dtype, shape, stride, device or value is wrong, or (CPU only: it needs the data) a slot is out
            of range. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel.

    Invariance:
        Row ``i`` depends on the 584 bytes of ``slots[i]`` alone.
    """
    _check_cache("cache", cache, block_size, _KV_ENTRY_BYTES)
    check_tensor("slots", slots, dtype=torch.int64, shape=("n",), device=cache.device)
    shape = (slots.shape[0], HEAD_DIM)
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=cache.device)
    check_output("out", out, torch.bfloat16, shape, cache.device)
    _check_starts("cache", cache, _KV_PAGE_START)
    _check_starts("out", out, _KV_ROW_START)
    launch("gather_kv", cache.device, cache, slots, out, block_size)
    return out


def quantize_and_insert_index_k_(
    cache: torch.Tensor, k: torch.Tensor, slots: torch.Tensor, *, block_size: int
) -> torch.Tensor:
    """Quantise indexer keys and write them to their slots of the indexer's cache, in place.

    *Exact op.* A key with NaN or an infinity gets a NaN scale and NaN codes.

    Source: the store half of vLLM's DeepSeek-V4 indexer compressor (``indexer_k_quant_and_cache`` with UE8M0 scales).

    Args:
        cache: ``(blocks, at least block_size * 132)`` uint8, last dimension contiguous.
        k: ``(tokens, 128)`` bfloat16.
        slots: ``(tokens,)`` int64; -1 skips the token.
        block_size: Entries per page.

    Returns:
        ``cache``. Bytes of slots that are not named keep their value.

    Raises:
        ArgumentError: As :func:`quantize_and_insert_kv_`.
        NativeLibraryError: CUDA tensors, and no kernel.

    Invariance:
        The 132 bytes of a slot depend on the token's row of ``k`` alone.
    """
    _check_cache("cache", cache, block_size, _INDEX_ENTRY_BYTES)
    check_output("cache", cache, torch.uint8, cache.shape, cache.device)
    check_tensor("k", k, dtype=torch.bfloat16, shape=("tokens", INDEX_DIM), device=cache.device)
    check_tensor("slots", slots, dtype=torch.int64, shape=(k.shape[0],), device=cache.device)
    _check_starts("cache", cache, _INDEX_PAGE_START)
    launch("quantize_and_insert_index_k", cache.device, cache, k, slots, block_size)
    return cache


def gather_index_k(
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    block_size: int,
    out_q: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read slots of the indexer's cache, still quantised.

    *Exact op.* Source: ``cp_gather_indexer_k_quant_cache`` of vLLM.

    Args:
        cache: ``(blocks, at least block_size * 132)`` uint8, last dimension contiguous.
        slots: ``(n,)`` int64; -1 gives zero codes and scale 0.
        block_size: Entries per page.
        out_q: ``(n, 128)`` float8_e4m3fn to write to, or None.
        out_scale: ``(n,)`` float32 to write to, or None.

    Returns:
        ``(q, scale)``: the outputs given, or new ones.

    Raises:
        ArgumentError: As :func:`gather_kv`.
        NativeLibraryError: CUDA tensors, and no kernel.

    Invariance:
        Row ``i`` of both depends on the 132 bytes of ``slots[i]`` alone.
    """
    _check_cache("cache", cache, block_size, _INDEX_ENTRY_BYTES)
    check_tensor("slots", slots, dtype=torch.int64, shape=("n",), device=cache.device)
    shape = (slots.shape[0], INDEX_DIM)
    if out_q is None:
        out_q = torch.empty(shape, dtype=torch.float8_e4m3fn, device=cache.device)
    if out_scale is None:
        out_scale = torch.empty(slots.shape, dtype=torch.float32, device=cache.device)
    check_output("out_q", out_q, torch.float8_e4m3fn, shape, cache.device)
    check_output("out_scale", out_scale, torch.float32, slots.shape, cache.device)
    _check_starts("cache", cache, _INDEX_PAGE_START)
    _check_starts("out_q", out_q, _INDEX_ROW_START)
    launch("gather_index_k", cache.device, cache, slots, out_q, out_scale, block_size)
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
    """Gather each decode token's own K rows, in the order in which prefill would list them.

    *Exact op.* Attention over the result runs through the prefill kernel: it sees the same rows in the same order,
    at other addresses, and addresses do not enter its arithmetic.

    Source: design.md "Attention"; replaces the paged decode path of vLLM's ``DeepseekV4FlashMLAAttention``.

    Args:
        compressed_cache: ``(blocks, at least block_size * 584)`` uint8; None if ``compressed_slots`` has no columns.
        window_cache: Likewise, of the sliding-window rows.
        compressed_slots: ``(tokens, k)`` int32 or int64, slots of the compressed entries, ascending by entry, -1 at the
            end.
        window_slots: ``(tokens, window)`` of the same dtype, slots of the window from oldest to newest, -1 at the end.
            A padding token has -1 everywhere.
        compressed_block_size: Entries per page of ``compressed_cache``.
        window_block_size: Entries per page of ``window_cache``.
        out: ``(tokens, at least k + window, 512)`` bfloat16, contiguous, or None for a width rounded up to 128. Rows
            past a token's length are left as they are.
        out_indices: ``(tokens, width of out)`` int32 to write to, or None.
        out_lengths: ``(tokens,)`` int32 to write to, or None.

    Returns:
        :class:`DecodeKv` ``(workspace, indices, lengths)``; ``indices`` are rows of ``workspace.flatten(0, 1)``.

    Raises:
        ArgumentError: A dtype, shape, stride, device or value is wrong, or (CPU only: it needs the data) a slot is out
            of range or a -1 precedes a slot. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel.

    Invariance:
        A token's rows and length depend on the bytes of its slots alone. Its indices also depend on its place in the
        batch, being addresses.
    """
    _check_cache("window_cache", window_cache, window_block_size, _KV_ENTRY_BYTES)
    device = window_cache.device
    check_tensor("compressed_slots", compressed_slots, dtype=_INTEGERS, shape=("tokens", "k"), device=device)
    tokens, top_k = compressed_slots.shape
    slot_type = compressed_slots.dtype
    check_tensor("window_slots", window_slots, dtype=slot_type, shape=(tokens, "window"), device=device)
    if compressed_cache is not None:
        _check_cache("compressed_cache", compressed_cache, compressed_block_size, _KV_ENTRY_BYTES, device)
    else:
        check_value("compressed_cache", top_k == 0, "a cache", None, "Only compressed_slots without columns need none.")
    entries = top_k + window_slots.shape[1]
    if out is None:
        width = combined_width(top_k, window_slots.shape[1])
        out = torch.zeros((tokens, width, HEAD_DIM), dtype=torch.bfloat16, device=device)
    check_tensor("out", out, dtype=torch.bfloat16, shape=(tokens, "width", HEAD_DIM), device=device, contiguous=True)
    check_value("out", out.shape[1] >= entries, f"a width of {entries} or more", out.shape[1], "Allocate it wider.")
    if out_indices is None:
        out_indices = torch.empty(out.shape[:2], dtype=torch.int32, device=device)
    if out_lengths is None:
        out_lengths = torch.empty((tokens,), dtype=torch.int32, device=device)
    check_output("out_indices", out_indices, torch.int32, out.shape[:2], device)
    check_output("out_lengths", out_lengths, torch.int32, (tokens,), device)
    for name, tensor, start in (
        ("window_cache", window_cache, _KV_PAGE_START),
        ("compressed_cache", compressed_cache, _KV_PAGE_START),
        ("out", out, _KV_ROW_START),
    ):
        if tensor is not None:
            _check_starts(name, tensor, start)
    outputs = (out, out_indices, out_lengths)
    inputs = (compressed_cache, window_cache, compressed_slots, window_slots)
    launch("gather_decode_kv", device, *inputs, *outputs, compressed_block_size, window_block_size)
    return DecodeKv(*outputs)


def _check_cache(
    name: str, cache: torch.Tensor, block_size: int, entry_bytes: int, device: torch.device | None = None
) -> None:
    check_value("block_size", block_size > 0, "a positive int", block_size, "Pass the page's number of entries.")
    check_tensor(name, cache, dtype=torch.uint8, shape=("blocks", "bytes"), device=device, last_dim_contiguous=True)
    need = block_size * entry_bytes
    check_value(name, cache.shape[1] >= need, f"pages of {need} bytes or more", cache.shape[1], "Check block_size.")


def _check_starts(name: str, tensor: torch.Tensor, multiple: int) -> None:
    """On a GPU, where vectors are moved: contiguous rows that start at multiples of ``multiple`` bytes."""
    if not tensor.is_cuda or not tensor.numel():
        return
    check_tensor(name, tensor, last_dim_contiguous=True)
    strides = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    aligned = all(s * tensor.element_size() % multiple == 0 for s in strides) and tensor.data_ptr() % multiple == 0
    check_value(name, aligned, f"rows that start at multiples of {multiple} bytes", "others", "Make it contiguous.")
