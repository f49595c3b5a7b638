"""Where a decode token's K rows lie in the paged caches, in the order in which attention adds them up."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_output, check_tensor, check_value

from .capacity import check_compress_ratio
from .reference import decode_slots as reference

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
    """Fill the two slot lists that :func:`bi_sparse_attn.gather_decode_kv` reads, through the requests' block tables.

    *Exact op*, in Triton on a GPU. It allocates nothing and does not synchronise with the host, so a CUDA graph
    replays it on the same addresses.

    Source: ``compute_global_topk_indices_and_lens``, the C128 metadata kernel and the window-index kernel of vLLM's
    DeepSeek-V4 backends, in one launch.

    Args:
        compressed_slots: ``(tokens, k)`` int64, written: slots of the compressed entries in list order, then -1.
        window_slots: ``(tokens, window)`` int64, written: slots of the window from oldest to newest, then -1.
        topk_indices: ``(tokens, k)`` int32, the selected entries of a C4 layer, ascending, -1 at the end. None for
            every complete group, as in a C128 layer.
        positions: ``(tokens,)`` int64, the token's position in its request.
        requests: ``(tokens,)`` int32, the token's row of the block tables.
        is_token: ``(tokens,)`` bool, False for a padding token: its lists are all -1, whatever else it is given.
        compressed_table: ``(requests, pages)`` int32; None if ``compressed_slots`` has no columns.
        window_table: ``(requests, pages)`` int32.
        compress_ratio: Tokens per compressed entry; 0 or 1 for none.
        compressed_block_size: Entries per page of the compressed cache.
        window_block_size: Entries per page of the window cache.

    Raises:
        ArgumentError: A dtype, shape, stride, device or value is wrong, or (CPU only: it needs the data) an entry has
            no page in the tables. Nothing was written.

    Invariance:
        Row ``i`` of both lists depends on row ``i`` of the inputs and on its request's row of the tables alone.
    """
    check_tensor("positions", positions, dtype=torch.int64, shape=("tokens",), contiguous=True)
    device = positions.device
    tokens = positions.shape[0]
    check_tensor("requests", requests, dtype=torch.int32, shape=(tokens,), device=device, contiguous=True)
    check_tensor("is_token", is_token, dtype=torch.bool, shape=(tokens,), device=device, contiguous=True)
    for name, slots, width in (("compressed_slots", compressed_slots, "k"), ("window_slots", window_slots, "window")):
        check_output(name, slots, torch.int64, (tokens, width), device, last_dim_contiguous=True)
    top_k, window = compressed_slots.shape[1], window_slots.shape[1]
    power_of_two = window > 0 and window & (window - 1) == 0
    check_value("window_slots", power_of_two, "a power of two of columns", window, "Pass the model's sliding window.")
    check_compress_ratio(compress_ratio)
    check_value(
        "compressed_slots",
        top_k == 0 or compress_ratio > 1,
        "no columns for a layer without compressed entries",
        top_k,
        "Take the width from SparseCapacity.topk_width.",
    )
    if topk_indices is not None:
        check_tensor(
            "topk_indices",
            topk_indices,
            dtype=torch.int32,
            shape=(tokens, top_k),
            device=device,
            last_dim_contiguous=True,
        )
    tables = [("window_table", window_table)]
    if compressed_table is not None:
        tables.append(("compressed_table", compressed_table))
    else:
        check_value("compressed_table", top_k == 0, "a block table", None, "Only lists without columns need none.")
    for name, table in tables:
        check_tensor(
            name, table, dtype=torch.int32, shape=("requests", "pages"), device=device, last_dim_contiguous=True
        )
    for name, size in (("compressed_block_size", compressed_block_size), ("window_block_size", window_block_size)):
        check_value(
            name, isinstance(size, int) and size > 0, "a positive int", size, "Pass the page's number of entries."
        )
    fill = reference.fill_decode_slots_
    if device.type == "cuda":
        from ._decode_slots_triton import fill_decode_slots_ as fill  # torch's CPU builds come without Triton
    fill(
        compressed_slots,
        window_slots,
        topk_indices,
        positions,
        requests,
        is_token,
        compressed_table,
        window_table,
        compress_ratio=compress_ratio,
        compressed_block_size=compressed_block_size,
        window_block_size=window_block_size,
    )
