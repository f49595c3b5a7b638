"""Specification of ``bi_reload::padded_copy_``."""

from __future__ import annotations

import torch

__all__ = ["BITS_DTYPE", "padded_copy_"]

BITS_DTYPE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype that carries an element's bits, by element size in bytes."""


def padded_copy_(dst: torch.Tensor, src: torch.Tensor, *, pad_bits: int) -> None:
    """Copy the bits of ``src`` into the first rows of ``dst`` and ``pad_bits`` into every element of the rest.

    Elements move as integers, so NaN payloads survive on every device.

    Args:
        dst: ``(N, ...)``, any dtype of 1, 2, 4 or 8 bytes.
        src: ``(n, ...)``, same dtype and trailing shape, ``n <= N``.
        pad_bits: The padding element's bits as a signed integer of the element's size.
    """
    bits = BITS_DTYPE[dst.element_size()]
    rows = src.shape[0]
    dst.view(bits)[:rows] = src.view(bits)
    dst.view(bits)[rows:] = pad_bits
