"""Which bytes a tensor occupies. Reads addresses and strides only, never data."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bi_kernels.runtime.errors import ArgumentError

__all__ = ["has_internal_overlap", "overlaps", "refuse_overlap"]


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory (an expanded tensor, a sliding window)."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors, gaps between strided elements included, have a byte in common."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def refuse_overlap(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Raise unless every output has memory of its own.

    Raises:
        ArgumentError: An output overlaps itself, an input or another output.
    """
    seen = dict(inputs)
    for name, tensor in outputs.items():
        if has_internal_overlap(tensor):
            raise ArgumentError(
                name, "one address per element", f"strides {tensor.stride()}", "Pass memory of its own, not a view."
            )
        for other, have in seen.items():
            if overlaps(tensor, have):
                raise ArgumentError(
                    name, f"memory apart from {other}", "overlapping addresses", "Pass memory of its own, not a view."
                )
        seen[name] = tensor


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
