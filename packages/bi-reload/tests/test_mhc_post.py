from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch

from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_reload import mhc_post


def _f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]  # type: ignore[no-any-return]


def _bf16_bits(value: float) -> int:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _inputs(tokens: int, hidden: int) -> tuple[torch.Tensor, ...]:
    x, residual = torch.randn(tokens, hidden).bfloat16(), torch.randn(tokens, 4, hidden).bfloat16()
    return x, residual, torch.rand(tokens, 4) * 2, torch.softmax(torch.randn(tokens, 4, 4), -1)


def test_every_rounding_against_scalar_arithmetic() -> None:
    x, residual, post, comb = _inputs(3, 17)
    result = mhc_post(x, residual, post, comb).view(torch.int16).tolist()
    for t in range(3):
        for k in range(4):
            for h in range(17):
                # Products of float32 are exact in float64, and float64 sums of two float32 round innocuously.
                total = _f32(post[t, k].item() * x[t, h].item())
                for j in range(4):
                    total = _f32(total + _f32(comb[t, j, k].item() * residual[t, j, h].item()))
                assert result[t][k][h] & 0xFFFF == _bf16_bits(total)


def test_comb_rows_are_old_streams() -> None:
    residual = torch.arange(1, 5).view(1, 4, 1).expand(1, 4, 8).bfloat16().contiguous()
    comb = torch.zeros(1, 4, 4)
    comb[0, 2, 1] = 1.0  # old stream 2 into new stream 1
    result = mhc_post(torch.zeros(1, 8).bfloat16(), residual, torch.zeros(1, 4), comb)
    assert result[0, :, 0].tolist() == [0.0, 3.0, 0.0, 0.0]


def test_products_are_rounded_before_they_are_added() -> None:
    one = 1.0 + 2.0**-7  # its square needs 15 bits, so an fma would keep what a float32 product of these loses
    factor = torch.tensor(1.0 + 2.0**-23)
    x = torch.full((1, 1), one).bfloat16()
    comb = torch.zeros(1, 4, 4)
    comb[0, 0, 0] = -one
    residual = torch.zeros(1, 4, 1).bfloat16()
    residual[0, 0, 0] = 1.0
    result = mhc_post(x, residual, factor.expand(1, 4).contiguous(), comb)
    rounded_product = _f32(one * factor.item())
    assert result[0, 0, 0].item() == _f32(rounded_product - one)


def test_empty_batch() -> None:
    assert tuple(mhc_post(*_inputs(0, 64)).shape) == (0, 4, 64)


@pytest.mark.parametrize("hidden", [1, 37, 64])
def test_nan_has_one_pattern(hidden: int) -> None:
    x, residual, post, comb = _inputs(2, hidden)
    x[1] = math.nan
    residual[0, 1, 0] = math.inf
    comb[0, 1] = 0.0
    result = mhc_post(x, residual, post, comb)
    canonical = torch.full((4, hidden), math.nan, dtype=torch.bfloat16)
    assert_bitwise_equal(result[1], canonical)
    assert_bitwise_equal(result[0, :, 0], canonical[:, 0])


def test_writes_to_the_callers_buffer() -> None:
    arguments = _inputs(3, 64)
    out = torch.empty_like(arguments[1])
    assert mhc_post(*arguments, out=out) is out
    assert_bitwise_equal(out, mhc_post(*arguments))


BAD: dict[str, dict[str, Any]] = {
    "x dtype": {"x": torch.zeros(3, 64)},
    "x rank": {"x": torch.zeros(3, 1, 64).bfloat16()},
    "residual tokens": {"residual": torch.zeros(2, 4, 64).bfloat16()},
    "residual stride": {"residual": torch.zeros(3, 64, 4).bfloat16().transpose(1, 2)},
    "post_mix dtype": {"post_mix": torch.zeros(3, 4).bfloat16()},
    "post_mix shape": {"post_mix": torch.zeros(3, 4, 1)},
    "comb_mix shape": {"comb_mix": torch.zeros(3, 16)},
    "comb_mix device": {"comb_mix": torch.zeros(3, 4, 4, device="meta")},
    "out shape": {"out": torch.full((3, 4, 65), -7.0).bfloat16()},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_writes_nothing(case: str) -> None:
    names = ("x", "residual", "post_mix", "comb_mix")
    arguments: dict[str, Any] = dict(zip(names, _inputs(3, 64), strict=True))
    arguments |= {"out": torch.full((3, 4, 64), -7.0).bfloat16()} | BAD[case]
    with pytest.raises(ArgumentError):
        mhc_post(**arguments)
    assert (arguments["out"] == -7.0).all()


def test_output_may_not_overlap() -> None:
    x, residual, post, comb = _inputs(3, 64)
    before = residual.clone()
    with pytest.raises(ArgumentError, match="memory apart from residual"):
        mhc_post(x, residual, post, comb, out=residual)
    assert_bitwise_equal(residual, before)
