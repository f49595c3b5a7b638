from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bi_kernels.runtime.errors import ArgumentError, ReloadError
from bi_kernels.testing import assert_bitwise_equal
from bi_reload import load_attn_sink_


def test_second_load_changes_values_and_keeps_padding_and_address() -> None:
    """B66: 12 heads padded to 16."""
    param = torch.nn.Parameter(torch.full((16,), -math.inf))
    a, b = torch.randn(12), torch.randn(12)
    load_attn_sink_(param, a, num_heads=12)
    address = param.data_ptr()
    load_attn_sink_(param, b, num_heads=12)
    assert param.data_ptr() == address
    assert_bitwise_equal(param[:12], b)
    assert_bitwise_equal(param[12:], torch.full((4,), -math.inf))


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_rank_gets_its_heads(rank: int) -> None:
    loaded = torch.randn(48)
    param = torch.randn(64)  # as a dummy load leaves it: random in the padding too
    load_attn_sink_(param, loaded, first_head=12 * rank, num_heads=12)
    assert_bitwise_equal(param[:12], loaded[12 * rank : 12 * rank + 12])
    assert (param[12:] == -math.inf).all()


def test_no_padding() -> None:
    loaded = torch.randn(64)
    param = torch.empty(64)
    load_attn_sink_(param, loaded, num_heads=64)
    assert_bitwise_equal(param, loaded)


BAD: dict[str, dict[str, Any]] = {
    "bfloat16 on the wire": {"loaded": torch.randn(12).bfloat16()},
    "param dtype": {"param": torch.full((16,), -7.0).bfloat16()},
    "param rank": {"param": torch.full((16, 1), -7.0)},
    "loaded rank": {"loaded": torch.randn(12, 1)},
    "more heads than padded": {"num_heads": 17, "loaded": torch.randn(20)},
    "no heads": {"num_heads": 0},
    "more heads than loaded": {"num_heads": 13},
    "past the end": {"first_head": 1},
    "before the start": {"first_head": -1},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_writes_nothing(case: str) -> None:
    good: dict[str, Any] = {
        "param": torch.full((16,), -7.0),
        "loaded": torch.randn(12),
        "first_head": 0,
        "num_heads": 12,
    }
    arguments = good | BAD[case]
    with pytest.raises(ArgumentError):
        load_attn_sink_(**arguments)
    assert (arguments["param"] == -7.0).all()


def test_meta_tensors_are_refused() -> None:
    param = torch.full((16,), -7.0)
    with pytest.raises(ReloadError, match=r"loaded.*meta"):
        load_attn_sink_(param, torch.randn(12, device="meta"), num_heads=12)
    assert (param == -7.0).all()
    with pytest.raises(ReloadError, match=r"param.*meta"):
        load_attn_sink_(param.to("meta"), torch.randn(12), num_heads=12)
