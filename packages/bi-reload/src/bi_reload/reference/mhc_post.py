"""Specification of ``bi_reload::mhc_post``."""

from __future__ import annotations

import torch

from bi_kernels.reference.numerics import to_bf16

__all__ = ["mhc_post"]

_ROWS = 64  # rows per tile: keeps the float32 streams of a tile in cache. Rows are independent, so it moves no bit.


def mhc_post(x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb_mix: torch.Tensor) -> torch.Tensor:
    """As :func:`bi_reload.mhc_post`, which says what each argument is.

    Invariance:
        Row ``i`` is a function of row ``i`` of the arguments alone.
    """
    out = torch.empty_like(residual)
    for start in range(0, len(x), _ROWS):
        tile = slice(start, start + _ROWS)
        total = post_mix[tile, :, None] * x[tile, None].float()
        for j, stream in enumerate(residual[tile].unbind(1)):
            total += comb_mix[tile, j, :, None] * stream[:, None].float()
        out[tile] = to_bf16(total)
    return out
