"""Rows of the product do not depend on the other rows, on their number, or on threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bi_kernels.fixed_order_mm import fixed_order_mm
from bi_kernels.testing import BATCH_SIZES, assert_batch_invariant, assert_bitwise_equal, must_detect, num_threads

WEIGHT = torch.randn(24, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()


def rows() -> torch.Tensor:
    return torch.randn(3, 1024).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_independent(dtype: torch.dtype) -> None:
    sizes = BATCH_SIZES if dtype == torch.float32 else (1, 2, 17, 65)
    assert_batch_invariant(lambda x: fixed_order_mm(x, WEIGHT, out_dtype=dtype), rows(), batch_sizes=sizes)


def split_from_batch(x: torch.Tensor) -> torch.Tensor:
    # As split-K heuristics do: few rows leave cores idle, so K is cut into more pieces.
    splits = 8 if len(x) <= 16 else 2
    pieces = [a.float() @ b.float().mT for a, b in zip(x.chunk(splits, 1), WEIGHT.chunk(splits, 1), strict=True)]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total


def product_of_a_blas(x: torch.Tensor) -> torch.Tensor:
    # B16: a float32 product picks its kernel from M, and adds in another order for one row.
    return torch.mm(x.float(), WEIGHT.float().mT)


@pytest.mark.parametrize("twin", [split_from_batch, product_of_a_blas])
def test_twins_are_caught(twin: Callable[[torch.Tensor], torch.Tensor]) -> None:
    must_detect(twin, rows(), batch_sizes=(1, 2, 15, 16, 17, 33))


def test_threads() -> None:
    x = torch.randn(70, 1024).bfloat16()
    whole = fixed_order_mm(x, WEIGHT)
    for count in (1, 2):
        with num_threads(count):
            assert_bitwise_equal(fixed_order_mm(x, WEIGHT), whole)
            assert_bitwise_equal(fixed_order_mm(x[3:4], WEIGHT), whole[3:4])
