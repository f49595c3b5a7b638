"""The check of caller-owned output tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .runtime.checks import check_tensor, check_value

__all__ = ["check_output"]


def check_output(
    name: str,
    out: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    device: torch.device,
    *,
    last_dim_contiguous: bool = False,
) -> None:
    """Raise :class:`ArgumentError` unless ``out`` can take the result: also its elements must not share memory."""
    check_tensor(name, out, dtype=dtype, shape=shape, device=device, last_dim_contiguous=last_dim_contiguous)
    reach = 0  # of all dimensions with a smaller stride
    disjoint = True
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1:
            disjoint = disjoint and stride > reach
            reach += (size - 1) * stride
    check_value(
        name, disjoint or not out.numel(), "elements that do not overlap", f"strides {out.stride()}", "Allocate it."
    )
