"""The matrix product with an order that K alone decides: values, bounds, splits, bad input."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from bi_kernels.fixed_order_mm import fixed_order_mm, split_k
from bi_kernels.reference.fixed_order_mm import error_bound, split_bounds
from bi_kernels.reference.numerics import mm_rn
from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.testing import assert_bitwise_equal, bit_view


def test_split_depends_on_k_alone_and_is_above_one_for_long_k() -> None:
    assert {k: split_k(k) for k in (64, 256, 448, 512, 1024, 2048, 4096, 7168, 16_384, 28_672)} == {
        64: 1,
        256: 1,
        448: 1,
        512: 2,
        1024: 4,
        2048: 8,
        4096: 8,
        7168: 8,
        16_384: 8,
        28_672: 8,
    }
    for k in (0, -64, 63, 100):
        with pytest.raises(ArgumentError, match="multiple of 64"):
            split_k(k)


@pytest.mark.parametrize("k", range(64, 8192, 192))
def test_pieces_cover_k_at_multiples_of_64_and_are_about_equal(k: int) -> None:
    bounds = split_bounds(k)
    assert len(bounds) == split_k(k)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == k
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    lengths = [stop - start for start, stop in bounds]
    assert all(length % 64 == 0 and length > 0 for length in lengths)
    assert max(lengths) - min(lengths) <= 64


@pytest.mark.parametrize(("n", "k"), [(256, 64), (24, 1024), (64, 4096), (7, 2112), (192, 2048), (8192, 256)])
def test_is_the_documented_sum_and_within_the_bounds(n: int, k: int) -> None:
    x, weight = torch.randn(9, k).bfloat16(), torch.randn(n, k).bfloat16()
    got = fixed_order_mm(x, weight)
    pieces = [mm_rn(x[:, a:b].contiguous(), weight[:, a:b].contiguous()) for a, b in split_bounds(k)]
    total = torch.zeros(9, n)
    for piece in pieces:
        total = total + piece
    assert_bitwise_equal(got, total)
    exact = x.double() @ weight.double().mT
    error = (got.double() - exact).abs()
    # The reference: S pieces rounded once, S - 1 additions. (The float64 oracle is off by K 2**-53.)
    partial = sum(piece.double().abs() for piece in pieces)
    splits = len(pieces)
    magnitudes = x.double().abs() @ weight.double().abs().mT
    assert (error <= ((1 + 2.0**-24) ** splits - 1) * partial * (1 + 2.0**-23) + k * 2.0**-53 * magnitudes).all()
    assert (error <= error_bound(x, weight)).all()
    rounded = fixed_order_mm(x, weight, out_dtype=torch.bfloat16)
    assert_bitwise_equal(rounded, got.bfloat16())
    assert ((rounded.double() - exact).abs() <= error_bound(x, weight, out_dtype=torch.bfloat16)).all()


def test_columns_have_the_bits_that_they_have_among_others() -> None:
    x, weight = torch.randn(5, 512).bfloat16(), torch.randn(2048, 512).bfloat16()
    every = fixed_order_mm(x, weight)
    for n in (64, 192, 320, 1024):
        for first in (0, 2048 - n):
            assert_bitwise_equal(fixed_order_mm(x, weight[first : first + n]), every[:, first : first + n].contiguous())


def test_bound_is_met_where_sums_cancel() -> None:
    x = torch.randn(6, 2048).bfloat16()
    weight = torch.randn(5, 2048).bfloat16()
    x[:, 1024:] = x[:, :1024]
    weight[:, 1024:] = -weight[:, :1024]
    got = fixed_order_mm(x, weight).double()
    assert (got.abs() <= error_bound(x, weight)).all()
    assert (got.abs() <= 1e-6 * (x.double().abs() @ weight.double().abs().mT)).all()


def test_non_finite_and_zero() -> None:
    x = torch.zeros(5, 512).bfloat16()
    x[1, 3] = math.nan
    x[2, 3] = math.inf
    x[3, 3], x[3, 400] = math.inf, -math.inf  # in different pieces: inf - inf in the last addition
    x[4, 3], x[4, 400] = -0.0, -0.0
    for dtype, nan in ((torch.float32, 0x7FC00000), (torch.bfloat16, 0x7FC0)):
        got = fixed_order_mm(x, torch.ones(1, 512).bfloat16(), out_dtype=dtype)
        assert bit_view(got[[0, 1, 3, 4], 0]).tolist() == [0, nan, nan, 0]
        assert got[2, 0] == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_strides_and_empty(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 128).bfloat16(), torch.randn(3, 128).bfloat16()
    want = fixed_order_mm(x, weight, out_dtype=dtype)
    out = torch.full((4, 9), 5.0, dtype=dtype)
    got = fixed_order_mm(x, weight, out_dtype=dtype, out=out[:, 2:5])
    assert got.data_ptr() == out[:, 2:5].data_ptr()
    assert_bitwise_equal(out[:, 2:5], want)
    assert (out[:, [0, 1, 5, 6, 7, 8]] == 5.0).all()
    wide = torch.zeros(4, 300).bfloat16()
    wide[:, 7:135] = x
    assert_bitwise_equal(fixed_order_mm(wide[:, 7:135], weight, out_dtype=dtype), want)
    assert fixed_order_mm(x[:0], weight, out_dtype=dtype).shape == (0, 3)
    assert fixed_order_mm(x, weight[:0], out_dtype=dtype).shape == (4, 0)


X, W = torch.ones(4, 128).bfloat16(), torch.ones(3, 128).bfloat16()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": X.float()}, "x: expected dtype bfloat16"),
        ({"x": X[0]}, "x: expected shape"),
        ({"x": X.T.contiguous().T}, "x: expected stride 1"),
        ({"x": X[:, :100], "weight": W[:, :100]}, "x: expected K a positive multiple of 64, got K = 100"),
        ({"x": X[:, :0], "weight": W[:, :0]}, "got K = 0"),
        ({"weight": W.half()}, "weight: expected dtype bfloat16, got float16"),
        ({"weight": W[:, :64]}, r"weight: expected shape \(N, 128\)"),
        ({"weight": W.T.contiguous().T}, "weight: expected stride 1"),
        ({"weight": torch.empty_like(W, device="meta")}, "weight: expected device cpu"),
        ({"out_dtype": torch.float16}, "out_dtype: expected torch.float32 or torch.bfloat16"),
        ({"out_dtype": torch.bfloat16}, "out: expected dtype bfloat16, got float32"),
        ({"out": torch.zeros(4, 4)}, r"out: expected shape \(4, 3\)"),
        ({"out": torch.zeros(1, 3).expand(4, 3)}, "out: expected elements that do not overlap"),
        ({"out": torch.zeros(3, 4).T}, "out: expected stride 1"),
    ],
)
def test_bad_arguments_write_nothing(changes: dict[str, object], message: str) -> None:
    out = torch.full((4, 3), 5.0)
    arguments: dict[str, object] = {"x": X, "weight": W, "out": out} | changes
    with pytest.raises(ArgumentError, match=message):
        fixed_order_mm(arguments.pop("x"), arguments.pop("weight"), **arguments)
    assert (out == 5.0).all()
