"""Hypothesis strategies and the pytest plugin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_kernels.scale_format import ceil_to_ue8m0
from bi_kernels.testing import assert_bitwise_equal
from bi_kernels.testing.pytest_plugin import MARKERS, seed_of
from bi_kernels.testing.strategies import float_tensors, partitions, shapes, tied_scores, ue8m0_scales

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])


@DTYPES
def test_float_tensors(dtype: torch.dtype) -> None:
    @settings(max_examples=30)
    @given(shapes(2, max_side=4).flatmap(lambda shape: float_tensors(shape, dtype)))
    def finite(x: torch.Tensor) -> None:
        assert x.dtype == dtype
        assert torch.isfinite(x.float()).all()

    finite()
    seen: set[str] = set()

    @settings(max_examples=100)
    @given(float_tensors((4,), dtype, finite=False))
    def anything(x: torch.Tensor) -> None:
        values = x.float()
        seen.update("nan" for _ in values[values.isnan()])
        seen.update("negative" for _ in values[values < 0])
        seen.update("zero" for _ in values[values == 0])

    anything()
    assert seen == {"nan", "negative", "zero"}


@given(tied_scores((3, 6)), tied_scores((2, 2), levels=1, special=False))
def test_tied_scores(x: torch.Tensor, y: torch.Tensor) -> None:
    assert x.shape == (3, 6)
    assert set(x.flatten().nan_to_num(9.0, 8.0, -8.0).tolist()) <= {1.0, 2.0, 3.0, 4.0, 9.0, 8.0, -8.0, 0.0}
    assert (y == 1).all()


@given(ue8m0_scales((5,)))
def test_ue8m0_scales(scales: torch.Tensor) -> None:
    assert_bitwise_equal(ceil_to_ue8m0(scales), scales)


@given(st.integers(0, 40).flatmap(lambda n: st.tuples(st.just(n), partitions(n), partitions(n, allow_empty=True))))
def test_partitions(drawn: tuple[int, list[int], list[int]]) -> None:
    total, lengths, with_empty = drawn
    assert sum(lengths) == sum(with_empty) == total
    assert all(length > 0 for length in lengths)


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_has_its_own_seed(request: pytest.FixtureRequest, number: int) -> None:
    drawn = torch.rand(())
    torch.manual_seed(seed_of(request.node.nodeid))
    assert_bitwise_equal(drawn, torch.rand(()))
    assert seed_of("a::b[1]") != seed_of("a::b[2]")


def test_markers_are_registered(pytestconfig: pytest.Config) -> None:
    registered = {line.split(":")[0] for line in pytestconfig.getini("markers")}
    assert set(MARKERS) <= registered


def test_hypothesis_draws_the_same_examples_every_time() -> None:
    assert settings.default.derandomize
    assert settings.default.deadline is None
