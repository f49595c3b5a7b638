"""The invariance driver: it accepts what is invariant, and finds each way not to be."""

from __future__ import annotations

import pytest
import torch

from bi_kernels.testing import (
    BATCH_SIZES,
    NEIGHBOURS,
    QUICK_BATCH_SIZES,
    BatchVarianceError,
    assert_batch_invariant,
    must_detect,
    num_threads,
    position_classes,
)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_accepts_row_functions_of_several_tensors_and_outputs() -> None:
    rows = (torch.randn(4, 8), torch.tensor([3, 0, 8, 1], dtype=torch.int32), torch.randn(4, 2).bfloat16())

    def fn(x: torch.Tensor, length: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert length.min() >= 0
        assert length.max() <= 8  # neighbours must be valid lengths
        cut = torch.where(torch.arange(8) < length.unsqueeze(-1), x, 0.0)
        return cut, None, y.to(torch.float8_e4m3fn), length + 1

    assert_batch_invariant(fn, rows, repeats=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_accepts_every_float_dtype(dtype: torch.dtype) -> None:
    assert_batch_invariant(lambda x: x.float() * 2, torch.randn(2, 5).to(dtype), batch_sizes=(1, 2, 9))


@pytest.mark.parametrize("threshold", BATCH_SIZES[1:])
def test_finds_every_threshold(threshold: int) -> None:
    error = must_detect(lambda x: x * (2 if len(x) < threshold else 3), torch.ones(1, 3))
    assert error.batch_size == threshold


@pytest.mark.parametrize("edge", [1, 8, 16, 32, 64, 128, 256, 512])
def test_finds_a_position(edge: int) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[edge : edge + 1] *= 3
        return y

    error = must_detect(fn, torch.ones(1, 3))
    assert error.position == edge
    assert "of a batch of" in str(error)


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_finds_a_dependence_on_one_kind_of_neighbour(kind: str) -> None:
    # One row is given, so that rows given together cannot betray it first.
    def touched(x: torch.Tensor) -> torch.Tensor:
        seen = {
            "random": ((x != 1) & (x != 0) & torch.isfinite(x) & (x.abs() < 1e30)).any(),
            "zero": (x == 0).any(),
            "huge": (x.abs() > 1e30).any(),
            "nan": x.isnan().any(),
        }
        return x * (3 if bool(seen[kind]) else 2)

    error = must_detect(touched, torch.ones(1, 3), batch_sizes=(1, 2, 3))
    assert error.neighbours == kind
    others = [k for k in NEIGHBOURS if k != kind]
    assert_batch_invariant(touched, torch.ones(1, 3), batch_sizes=(1, 2, 3), neighbours=others)


def test_finds_rows_that_depend_on_one_another_and_says_where() -> None:
    rows = torch.ones(3, 4)
    rows[2, 1] = 7.0

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x / x.abs().amax()

    error = must_detect(fn, rows)
    assert (error.batch_size, error.position, error.neighbours, error.output, error.row) == (3, 0, "given", 1, 0)
    assert "row 0 at position 0 of a batch of 3 (given neighbours), output 1: 4 of 4 elements differ" in str(error)
    assert "0x3e124925" in str(error)
    assert "0x3f800000" in str(error)


def test_finds_unequal_repeats() -> None:
    calls = iter(range(10_000))
    error = must_detect(lambda x: x + next(calls), torch.ones(1, 3))
    assert error.neighbours == "alone"
    assert isinstance(error, BatchVarianceError)
    assert isinstance(error, AssertionError)


def test_sees_a_changed_sign_of_zero() -> None:
    must_detect(lambda x: x * (0.0 if len(x) == 1 else -0.0), torch.ones(1, 3), batch_sizes=(1, 2))


def test_a_function_may_write_to_its_arguments() -> None:
    rows = torch.ones(2, 3)
    assert_batch_invariant(lambda x: x.mul_(2), rows, batch_sizes=(1, 2, 3), repeats=3)
    assert (rows == 1).all()


def test_twin_without_teeth_is_refused() -> None:
    with pytest.raises(AssertionError, match="no teeth"):
        must_detect(double, torch.ones(2, 3), batch_sizes=(1, 2))
    with pytest.raises(ZeroDivisionError):  # a twin that breaks proves nothing either
        must_detect(lambda x: 1 // 0, torch.ones(2, 3))


def test_bad_requests() -> None:
    with pytest.raises(ValueError, match="neighbours"):
        assert_batch_invariant(double, torch.ones(2, 3), neighbours=("noise",))
    with pytest.raises(ValueError, match="common first dimension"):
        assert_batch_invariant(torch.add, (torch.ones(2, 3), torch.ones(3, 3)))
    with pytest.raises(ValueError, match="common first dimension"):
        assert_batch_invariant(double, torch.ones(0, 3))
    with pytest.raises(ValueError, match="expected 1 rows"):
        assert_batch_invariant(lambda x: x.sum(), torch.ones(2, 3))
    with pytest.raises(ValueError, match="expected 1 rows"):
        assert_batch_invariant(lambda x: torch.zeros(2, 3), torch.ones(2, 3))


def test_positions_and_sizes() -> None:
    assert position_classes(1) == (0,)
    assert position_classes(2) == (0, 1)
    assert position_classes(129) == (0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128)
    assert set(QUICK_BATCH_SIZES) < set(BATCH_SIZES)
    seen: set[int] = set()

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(x))
        return x

    assert_batch_invariant(fn, torch.ones(1, 2), batch_sizes=(5, 9), positions=(0, 7))
    assert seen == {1, 5, 9}


def test_num_threads_restores() -> None:
    before = torch.get_num_threads()
    with num_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
