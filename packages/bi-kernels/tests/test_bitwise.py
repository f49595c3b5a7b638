"""The comparison itself: what it sees that torch.equal does not, and what it says."""

from __future__ import annotations

import math

import pytest
import torch

from bi_kernels.testing import Difference, assert_bitwise_equal, bit_view, first_difference


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_nan_equals_itself_and_zeros_differ(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, math.nan, -0.0]).to(dtype)
    assert_bitwise_equal(x, x.clone())
    with pytest.raises(AssertionError, match=r"1 of 3 elements differ, first at \(2,\): got -0.0 .*expected 0.0"):
        assert_bitwise_equal(x, torch.tensor([1.0, math.nan, 0.0]).to(dtype))


def test_payload_of_a_nan_counts() -> None:
    x = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    with pytest.raises(AssertionError, match=r"0x7fc00001.*0x7fc00000"):
        assert_bitwise_equal(x[1:], x[:1])


def test_difference_in_full() -> None:
    a, b = torch.zeros(3, 4), torch.zeros(3, 4)
    a[1, 2], a[2, 0] = 1.5, 1.0
    assert first_difference(a, b) == Difference(2, 12, (1, 2), 1.5, 0.0, "0x3fc00000", "0x00000000")
    assert first_difference(b, b) is None
    with pytest.raises(AssertionError, match=r"^scores: 2 of 12"):
        assert_bitwise_equal(a, b, "scores")


@pytest.mark.parametrize(
    ("a", "b", "bits"),
    [
        (torch.tensor(True), torch.tensor(False), ("0x01", "0x00")),
        (torch.tensor(-1), torch.tensor(7), ("0xffffffffffffffff", "0x0000000000000007")),
        (torch.tensor(-2, dtype=torch.int32), torch.tensor(0, dtype=torch.int32), ("0xfffffffe", "0x00000000")),
        (torch.tensor(200, dtype=torch.uint8), torch.tensor(1, dtype=torch.uint8), ("0xc8", "0x01")),
        (torch.tensor(1 + 2j), torch.tensor(1 - 2j), ("0x3f800000 0x40000000", "0x3f800000 0xc0000000")),
    ],
)
def test_other_dtypes(a: torch.Tensor, b: torch.Tensor, bits: tuple[str, str]) -> None:
    assert_bitwise_equal(a, a.clone())
    difference = first_difference(a, b)
    assert difference is not None
    assert (difference.actual_bits, difference.expected_bits) == bits


def test_strides_are_not_values_but_dtype_shape_and_device_are() -> None:
    x = torch.randn(3, 4)
    assert_bitwise_equal(x.T.contiguous().T, x)
    assert_bitwise_equal(x.expand(2, 3, 4)[1, ::2], x[::2])
    assert_bitwise_equal(torch.empty(0, 3), torch.empty(0, 3))
    for other, message in (
        (x.double(), "dtype: got torch.float32, expected torch.float64"),
        (x[:2], "shape"),
        (x.view(12), "shape"),
        (torch.empty_like(x, device="meta"), "device"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_bitwise_equal(x, other)


def test_bit_view() -> None:
    assert bit_view(torch.tensor([-0.0])).tolist() == [-(2**31)]
    assert bit_view(torch.ones(2, 3, dtype=torch.complex64)).shape == (2, 3, 2)
