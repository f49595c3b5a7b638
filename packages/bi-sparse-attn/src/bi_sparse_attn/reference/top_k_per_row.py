"""Reference of deterministic top-k per row."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_value

__all__ = ["top_k_per_row_prefill"]

# Elements of the int64 key matrix that are alive at a time. Bounds memory; the result of a row does not depend on it.
_TILE_ELEMENTS = 2**22

_INT64_MIN = -(2**63)
_LOW_32 = 2**32 - 1
_PAST_END = 2**62


def top_k_per_row_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    top_k: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`bi_sparse_attn.top_k_per_row_prefill`: exact op, this is its specification."""
    rows, columns = logits.shape
    lowest = int(row_starts.min()) if rows else 0
    highest = int(row_ends.max()) if rows else 0
    check_value("row_starts", lowest >= 0, "at least 0", lowest, "Pass the first column of each row's range.")
    check_value("row_ends", highest <= columns, f"at most {columns}", highest, "Pass ranges within the columns.")
    if out is None:
        out = logits.new_empty((rows, top_k), dtype=torch.int32)
    tile = max(1, _TILE_ELEMENTS // max(columns, 1))
    for first in range(0, rows, tile):
        part = slice(first, first + tile)
        out[part] = _top_k(logits[part], row_starts[part], row_ends[part], top_k, out.shape[1])
    return out


def _top_k(
    logits: torch.Tensor, row_starts: torch.Tensor, row_ends: torch.Tensor, top_k: int, width: int
) -> torch.Tensor:
    start, end = row_starts.long().unsqueeze(1), row_ends.long().unsqueeze(1)
    column = torch.arange(logits.shape[1], device=logits.device)
    # -0 + 0 = +0. Flipping the magnitude bits of negative floats makes their bits ordered as signed integers.
    bits = (logits + 0.0).view(torch.int32)
    score = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    # The lower index has the greater low word, so keys are unique and their order is total.
    key = (score << 32) | (_LOW_32 - column)
    allowed = (column >= start) & (column < end) & ~torch.isnan(logits)
    key = torch.where(allowed, key, _INT64_MIN)  # below the key of -inf, which is an ordinary lowest score
    best = torch.topk(key, min(top_k, logits.shape[1]), dim=1).values
    index = torch.where(best == _INT64_MIN, _PAST_END, (_LOW_32 - (best & _LOW_32)) - start)
    index = torch.sort(index, dim=1, stable=True).values
    index = torch.where(index == _PAST_END, -1, index)
    return torch.nn.functional.pad(index, (0, width - index.shape[1]), value=-1).to(torch.int32)
