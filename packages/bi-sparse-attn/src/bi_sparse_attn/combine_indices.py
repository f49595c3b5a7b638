"""The index list of sparse attention: compressed entries ascending, then the window from oldest to newest."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_output, check_tensor, check_value

from ._ops import launch
from .capacity import check_compress_ratio, combined_width

__all__ = ["c128_indices", "combine_topk_swa"]

_INTEGERS = (torch.int32, torch.int64)


def combine_topk_swa(
    topk_indices: torch.Tensor,
    positions: torch.Tensor,
    gather_starts: torch.Tensor,
    *,
    compress_ratio: int,
    window_size: int,
    compressed_rows: int,
    row_offset: int | torch.Tensor = 0,
    out_indices: torch.Tensor | None = None,
    out_lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Build every token's list of workspace rows, in the order in which attention adds them up.

    *Exact op.* A request's workspace holds its compressed entries (row ``row_offset + entry``) and, from row
    ``row_offset + compressed_rows`` on, its uncompressed rows from position ``gather_start``.

    Source: ``combine_topk_swa_indices`` of vLLM's DeepSeek-V4 cache utilities, which derives position and gather start
    from batch-wide prefix sums.

    Args:
        topk_indices: ``(tokens, k)`` int32, compressed entries of the token's request, ascending, -1 at the end. ``k``
            is 0 for a layer with the window only.
        positions: ``(tokens,)`` int32 or int64, the token's position in its request; -1 marks a padding token.
        gather_starts: ``(tokens,)`` int32 or int64, position of the first uncompressed row in the workspace.
        compress_ratio: Tokens per compressed entry; 0 or 1 for none.
        window_size: Sliding window, in tokens, the token itself included.
        compressed_rows: Workspace rows set aside for compressed entries.
        row_offset: First workspace row of the request; or ``(tokens,)`` int32 or int64, that of each token's request.
        out_indices: ``(tokens, at least k + window_size)`` int32 to write to, or None for ``(tokens, k + window_size
            rounded up to 128)``.
        out_lengths: ``(tokens,)`` int32 to write to, or None.

    Returns:
        ``(indices, lengths)``: rows, contiguous from the first column and -1 after ``lengths`` of them; both int32. A
        padding token has length 0, whatever its row of ``topk_indices`` holds.

    Raises:
        ArgumentError: A dtype, shape, device or value is wrong, an output is too narrow, or (CPU only: it needs the
            data) entries do not ascend, lie in the token's future, or the window starts before the gathered rows.
            Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel.

    Invariance:
        Row ``i`` of both results depends on row ``i`` of the inputs and on the keyword constants alone. In particular
        it does not matter which tokens are decode and which prefill, nor in which order they come.
    """
    check_tensor("topk_indices", topk_indices, dtype=torch.int32, shape=("tokens", "k"))
    device = topk_indices.device
    tokens, top_k = topk_indices.shape
    check_tensor("positions", positions, dtype=_INTEGERS, shape=(tokens,), device=device)
    check_tensor("gather_starts", gather_starts, dtype=_INTEGERS, shape=(tokens,), device=device)
    check_compress_ratio(compress_ratio)
    check_value("window_size", window_size > 0, "a positive int", window_size, "Pass the model's sliding window.")
    check_value(
        "compressed_rows",
        compressed_rows >= 0,
        "at least 0",
        compressed_rows,
        "Take it from SparseCapacity.from_model.",
    )
    row_offsets = row_offset if isinstance(row_offset, torch.Tensor) else None
    constant = row_offset if isinstance(row_offset, int) else 0
    if row_offsets is not None:
        check_tensor("row_offset", row_offsets, dtype=_INTEGERS, shape=(tokens,), device=device)
    check_value("row_offset", constant >= 0, "at least 0", constant, "Pass the request's first workspace row.")
    if out_indices is None:
        width = combined_width(top_k, window_size)
        out_indices = torch.empty((tokens, width), dtype=torch.int32, device=device)
    if out_lengths is None:
        out_lengths = torch.empty((tokens,), dtype=torch.int32, device=device)
    check_output("out_indices", out_indices, torch.int32, (tokens, "width"), device)
    check_value(
        "out_indices",
        out_indices.shape[1] >= top_k + window_size,
        f"{top_k + window_size} columns or more",
        out_indices.shape[1],
        "Allocate SparseCapacity.combined_width columns.",
    )
    check_output("out_lengths", out_lengths, torch.int32, (tokens,), device)
    constants = (compress_ratio, window_size, compressed_rows, constant)
    inputs = (topk_indices, positions, gather_starts, row_offsets)
    launch("combine_topk_swa", device, *inputs, out_indices, out_lengths, *constants)
    return out_indices, out_lengths


def c128_indices(positions: torch.Tensor, *, width: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compressed entries of a C128 layer: every complete group of 128 tokens, ascending.

    *Exact op.* Source: the C128 metadata kernel of vLLM's DeepSeek-V4 sparse MLA builder; in vLLM 0.33 its width
    follows the batch.

    Args:
        positions: ``(tokens,)`` int32 or int64, the token's position in its request; -1 marks a padding token.
        width: ``SparseCapacity.c128_width``.
        out: ``(tokens, width)`` int32 to write to, or None.

    Returns:
        ``out``, or a new ``(tokens, width)`` int32: ``0, 1, ..., (position + 1) // 128 - 1``, then -1.

    Raises:
        ArgumentError: A dtype, shape, device or ``width`` is wrong. Nothing was written.
        CapacityError: (CPU only: it needs the data) A token has more entries than ``width``. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel.

    Invariance:
        Row ``i`` depends on ``positions[i]`` and ``width`` alone.
    """
    check_tensor("positions", positions, dtype=_INTEGERS, shape=("tokens",))
    check_value("width", width >= 0, "at least 0", width, "Take it from SparseCapacity.from_model.")
    shape = (positions.shape[0], width)
    if out is None:
        out = torch.empty(shape, dtype=torch.int32, device=positions.device)
    check_output("out", out, torch.int32, shape, positions.device)
    launch("c128_indices", positions.device, positions, out)
    return out
