from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_reload import mhc_head

Weights = Callable[..., Any]
EPS = {"rms_eps": 1e-6, "hc_eps": 1e-6}


@pytest.mark.parametrize("hidden", [128, 320, 1024])
def test_within_bound_of_float64(oracle: ModuleType, mhc_weights: Weights, hidden: int) -> None:
    residual = torch.randn(21, 4, hidden).bfloat16()
    fn, scale, base = mhc_weights(4 * hidden, 4, 1)
    flat = residual.flatten(1)
    result = mhc_head(residual, fn, scale, base, **EPS)
    oracle.check_head(result, residual, fn, scale, base, oracle.reference_error(flat, fn))


def test_empty_batch_and_buffer(mhc_weights: Weights) -> None:
    weights = mhc_weights(512, 4, 1)
    assert tuple(mhc_head(torch.empty(0, 4, 128).bfloat16(), *weights, **EPS).shape) == (0, 128)
    residual = torch.randn(3, 4, 128).bfloat16()
    out = torch.empty(3, 128).bfloat16()
    assert mhc_head(residual, *weights, out=out, **EPS) is out
    assert_bitwise_equal(out, mhc_head(residual, *weights, **EPS))


BAD: dict[str, dict[str, Any]] = {
    "residual": {"residual": torch.zeros(3, 4, 128)},
    "streams": {"residual": torch.zeros(3, 3, 128).bfloat16()},
    "hidden": {"residual": torch.zeros(3, 4, 24).bfloat16(), "fn": torch.zeros(4, 96)},
    "fn": {"fn": torch.zeros(24, 512)},
    "scale": {"scale": torch.zeros(3)},
    "base": {"base": torch.zeros(4).double()},
    "rms_eps": {"rms_eps": math.nan},
    "hc_eps": {"hc_eps": -1.0},
    "out": {"out": torch.full((3, 127), -7.0).bfloat16()},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_writes_nothing(mhc_weights: Weights, case: str) -> None:
    fn, scale, base = mhc_weights(512, 4, 1)
    arguments: dict[str, Any] = {"residual": torch.randn(3, 4, 128).bfloat16(), "fn": fn, "scale": scale, "base": base}
    arguments |= {"out": torch.full((3, 128), -7.0).bfloat16(), **EPS} | BAD[case]
    with pytest.raises(ArgumentError):
        mhc_head(**arguments)
    assert (arguments["out"] == -7.0).all()


def test_output_may_not_overlap(mhc_weights: Weights) -> None:
    residual = torch.randn(3, 4, 128).bfloat16()
    with pytest.raises(ArgumentError, match="memory apart from residual"):
        mhc_head(residual, *mhc_weights(512, 4, 1), out=residual.view(12, 128)[:3], **EPS)
