"""A token's codes and scales do not depend on the other tokens."""

from __future__ import annotations

import pytest
import torch

from bi_kernels.group_quant import per_token_group_quant_fp8
from bi_kernels.scale_format import ScaleFormat
from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect, num_threads

FORMATS = pytest.mark.parametrize("scale_format", ScaleFormat)


def rows() -> torch.Tensor:
    x = torch.randn(3, 384).bfloat16()
    x[1, 200] = torch.inf
    return x


@FORMATS
def test_rows_are_independent(scale_format: ScaleFormat) -> None:
    assert_batch_invariant(lambda x: per_token_group_quant_fp8(x, scale_format=scale_format), rows())


def test_twin_with_a_scale_per_tensor_is_caught() -> None:
    # B21: a scale over the whole tensor couples requests.
    def per_tensor(x: torch.Tensor) -> torch.Tensor:
        return (x.float() / (x.float().abs().amax() / 448)).to(torch.float8_e4m3fn)

    must_detect(per_tensor, rows())


@FORMATS
def test_threads(scale_format: ScaleFormat) -> None:
    x = torch.randn(300, 1024).bfloat16()
    q, s = per_token_group_quant_fp8(x, scale_format=scale_format)
    for count in (1, 2):
        with num_threads(count):
            again_q, again_s = per_token_group_quant_fp8(x, scale_format=scale_format)
        assert_bitwise_equal(again_q, q)
        assert_bitwise_equal(again_s, s)
