"""Specification of ``bi_reload::mhc_head``."""

from __future__ import annotations

import torch

from bi_kernels.reference.numerics import sigmoid

from .mhc_pre import collapse_streams, mhc_num_splits, prenorm_projection, reciprocal_rms

__all__ = ["mhc_head"]


def mhc_head(
    residual: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, rms_eps: float, hc_eps: float
) -> torch.Tensor:
    """As :func:`bi_reload.mhc_head`, which says what each argument is.

    Invariance:
        Row ``i`` is a function of ``residual[i]`` and the weights alone.
    """
    k = residual.shape[1] * residual.shape[2]
    projection, sum_squares = prenorm_projection(residual.reshape(-1, k), fn, mhc_num_splits(k))
    mixes = projection * reciprocal_rms(sum_squares, k, rms_eps)[:, None]
    pre = sigmoid(mixes * scale + base) + hc_eps
    return collapse_streams(pre.t(), list(residual.unbind(1)))
