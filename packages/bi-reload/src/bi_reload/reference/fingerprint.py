"""Specification of ``bi_reload::fingerprint``."""

from __future__ import annotations

import torch

__all__ = ["finish", "word_sum"]

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: every position gets its own key
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # SplitMix64's finaliser, a bijection of 64-bit words
_LAST_SHIFT = 31
_CHUNK = 1 << 16  # words per pass: two buffers of 512 KiB stay in cache. Addition wraps, so it moves no bit.


def word_sum(data: torch.Tensor) -> torch.Tensor:
    """Sum, modulo 2**64, of ``mix(word[i] + (i + 1) * WEYL)`` over the little-endian 64-bit words of a byte string.

    ``mix`` is a bijection, so a change within one word always changes the sum. The last word is padded with zero
    bytes. Integer addition has no order: any number of threads, chunks or blocks gives the same sum.

    Args:
        data: ``(n,)`` uint8, contiguous.

    Returns:
        ``(1,)`` int64, the sum as two's complement.
    """
    whole = data.numel() // 8 * 8
    words = data[:whole]
    if words.data_ptr() % 8 or words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    keys = torch.arange(min(len(words), _CHUNK), dtype=torch.int64).mul_(_signed(_WEYL))
    total = torch.zeros(1, dtype=torch.int64)
    for first, chunk in enumerate(torch.split(words, _CHUNK)):
        total += _mixed(chunk + keys[: chunk.numel()], first * _CHUNK)
    if whole < data.numel():
        last = torch.zeros(8, dtype=torch.uint8)
        last[: data.numel() - whole] = data[whole:]
        total += _mixed(last.view(torch.int64), whole // 8)
    return total


def finish(word_sum: int, header: int) -> int:
    """Bind a sum of words to a header (a hash of name, dtype and shape).

    A bijection of the sum for any given header, so it hides no difference.

    Returns:
        An int in [0, 2**64).
    """
    z = (word_sum + header) & _MASK
    for shift, factor in _ROUNDS:
        z = ((z ^ (z >> shift)) * factor) & _MASK
    return z ^ (z >> _LAST_SHIFT)


def _mixed(z: torch.Tensor, first: int) -> torch.Tensor:
    """Mix words whose position keys are relative to word ``first``, in place, and add them up."""
    z += _signed((first + 1) * _WEYL & _MASK)
    for shift, factor in _ROUNDS:
        z ^= _shift_right(z, shift)
        z *= _signed(factor)
    z ^= _shift_right(z, _LAST_SHIFT)
    return z.sum()


def _shift_right(z: torch.Tensor, shift: int) -> torch.Tensor:
    """Logical shift: torch's ``>>`` on int64 copies the sign, so those bits are cleared."""
    return (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
