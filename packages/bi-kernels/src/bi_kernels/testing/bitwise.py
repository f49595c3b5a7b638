"""Comparison of tensors by their bytes.

``torch.equal`` is wrong here twice: it says that NaN differs from itself, and that -0.0 equals 0.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Difference", "assert_bitwise_equal", "bit_view", "first_difference"]

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two tensors of one dtype and shape part.

    Attributes:
        count: Number of elements whose bytes differ.
        total: Number of elements compared.
        index: Coordinate of the first one, in row-major order.
        actual: Its value in the tensor under test.
        expected: Its value in the other tensor.
        actual_bits: The bit pattern of ``actual``, as hexadecimal digits.
        expected_bits: The bit pattern of ``expected``.
    """

    count: int
    total: int
    index: tuple[int, ...]
    actual: float | int | bool | complex
    expected: float | int | bool | complex
    actual_bits: str
    expected_bits: str

    def __str__(self) -> str:
        return (
            f"{self.count} of {self.total} elements differ, first at {self.index}: "
            f"got {self.actual!r} ({self.actual_bits}), expected {self.expected!r} ({self.expected_bits})"
        )


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers of the same width and shape (complex: one more dimension, of two)."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().resolve_neg().view(_INT_OF_SIZE[tensor.element_size()])


def first_difference(actual: torch.Tensor, expected: torch.Tensor) -> Difference | None:
    """The first element whose bytes differ, or None.

    Args:
        actual: The tensor under test; any dtype, any strides.
        expected: What it should be; same dtype, shape and device.

    Raises:
        AssertionError: Dtype, shape or device differ, so that elements cannot be paired.
    """
    for what in ("dtype", "shape", "device"):
        have, want = getattr(actual, what), getattr(expected, what)
        if have != want:
            raise AssertionError(f"{what}: got {have}, expected {want}")
    different = bit_view(actual) != bit_view(expected)
    if actual.is_complex():
        different = different.any(-1)
    # Checked as one bool first: listing coordinates costs far more than comparing, and nearly always there are none.
    if not bool(different.any()):
        return None
    where = different.nonzero()
    index = tuple(int(i) for i in where[0])
    return Difference(
        count=len(where),
        total=different.numel(),
        index=index,
        actual=actual[index].item(),
        expected=expected[index].item(),
        actual_bits=_hex(actual[index]),
        expected_bits=_hex(expected[index]),
    )


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, label: str = "") -> None:
    """Raise unless two tensors hold the same bytes.

    Args:
        actual: The tensor under test; any dtype.
        expected: What it should be. Strides may differ: layout is not a value.
        label: Says in the message what was compared.

    Raises:
        AssertionError: Another dtype, shape or device, or different bytes. The message has the number of differing
            elements, the first coordinate, both values and both bit patterns.
    """
    prefix = f"{label}: " if label else ""
    try:
        difference = first_difference(actual, expected)
    except AssertionError as error:
        raise AssertionError(f"{prefix}{error}") from None
    if difference is not None:
        raise AssertionError(f"{prefix}{difference}")


def _hex(element: torch.Tensor) -> str:
    digits = 2 * element.element_size()
    if element.is_complex():
        return " ".join(_hex(part) for part in torch.view_as_real(element.resolve_conj()))
    return f"0x{int(bit_view(element).item()) & (16**digits - 1):0{digits}x}"
