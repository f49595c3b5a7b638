from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bi_kernels.runtime.errors import ArgumentError, ReloadError
from bi_kernels.testing import assert_bitwise_equal
from bi_reload import padded_copy_

DTYPES = {
    torch.float32: -math.inf,
    torch.float64: 0.1,
    torch.bfloat16: -math.inf,
    torch.float16: math.nan,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: math.inf,
    torch.float8_e8m0fnu: 0.5,
    torch.int8: -128,
    torch.uint8: 255,
    torch.int32: -1,
    torch.int64: -(2**63),
    torch.bool: 1,
    torch.complex64: 2.0,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    src = torch.randint(256, (3, 5 * size), dtype=torch.uint8)
    src = (src & 1).bool() if dtype == torch.bool else src.view(dtype)
    dst = torch.zeros(7, 5, dtype=dtype)
    address = dst.data_ptr()
    padded_copy_(dst, src, pad_value=DTYPES[dtype])
    assert dst.data_ptr() == address
    assert_bitwise_equal(dst[:3], src)
    assert_bitwise_equal(dst[3:], torch.tensor(DTYPES[dtype], dtype=torch.float64).to(dtype).expand(4, 5))


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_any_shape_and_stride(rows: int, extra: int, columns: int, transposed: bool) -> None:
    src = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    memory = torch.full((columns, rows + extra) if transposed else (rows + extra, columns), -7, dtype=torch.int32)
    dst = memory.t() if transposed else memory
    padded_copy_(dst, src, pad_value=9)
    assert_bitwise_equal(dst[:rows], src)
    assert (dst[rows:] == 9).all()


def test_nan_payloads_survive() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC12345, -1], dtype=torch.int32)
    dst = torch.zeros(4)
    padded_copy_(dst, bits.view(torch.float32), pad_value=-0.0)
    assert dst.view(torch.int32).tolist() == [*bits.tolist(), -(2**31)]


def test_parameters_can_be_destinations() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    padded_copy_(parameter, torch.ones(2), pad_value=-math.inf)
    assert parameter.tolist() == [1.0, 1.0, -math.inf]


BAD: dict[str, dict[str, Any]] = {
    "src too long": {"src": torch.ones(5, 3)},
    "src dtype": {"src": torch.ones(2, 3).bfloat16()},
    "src trailing shape": {"src": torch.ones(2, 4)},
    "src rank": {"src": torch.ones(2)},
    "src no tensor": {"src": [1.0]},
    "scalar": {"dst": torch.tensor(-7.0), "src": torch.tensor(1.0)},
    "expanded dst": {"dst": torch.full((1, 3), -7.0).expand(4, 3)},
    "16 bytes": {"dst": torch.full((4, 3), -7.0).cdouble(), "src": torch.ones(2, 3).cdouble()},
    "no infinity": {
        "dst": torch.full((4, 3), -7.0).to(torch.float8_e4m3fn),
        "src": torch.ones(2, 3).to(torch.float8_e4m3fn),
    },
    "two numbers per byte": {
        "dst": torch.full((4, 3), 7, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "src": torch.ones(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "pad_value": 0.0,
    },
    "sparse src": {"src": torch.ones(2, 3).to_sparse()},
    "no fraction": {"dst": torch.full((4, 3), -7), "src": torch.ones(2, 3).long(), "pad_value": 0.5},
    "integer range": {"dst": torch.full((4, 3), -7).char(), "src": torch.ones(2, 3).char(), "pad_value": 128},
    "bool": {"dst": torch.ones(4, 3).bool(), "src": torch.ones(2, 3).bool(), "pad_value": 2},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_writes_nothing(case: str) -> None:
    arguments: dict[str, Any] = {"dst": torch.full((4, 3), -7.0), "src": torch.ones(2, 3), "pad_value": -math.inf}
    arguments |= BAD[case]
    dst = arguments["dst"]
    data = dst.view(torch.uint8) if dst.element_size() == 1 else dst
    before = data.clone()
    with pytest.raises(ArgumentError):
        padded_copy_(dst, arguments["src"], pad_value=arguments["pad_value"])
    assert_bitwise_equal(data, before)


def test_overlap_is_refused() -> None:
    memory = torch.arange(12.0)
    before = memory.clone()
    for dst, src in (
        (memory[:8], memory[4:10]),
        (memory[4:], memory[:6]),
        (memory, memory[:3]),
        (memory[::2], memory[1::2]),
    ):
        with pytest.raises(ArgumentError, match="memory apart from src"):
            padded_copy_(dst, src, pad_value=0.0)
    assert_bitwise_equal(memory, before)
    padded_copy_(memory[:6], memory[6:10], pad_value=0.0)
    assert memory[:6].tolist() == [6.0, 7.0, 8.0, 9.0, 0.0, 0.0]


@pytest.mark.parametrize("which", ["dst", "src"])
def test_meta_tensors_are_refused(which: str) -> None:
    tensors = {"dst": torch.full((4,), -7.0), "src": torch.ones(2)}
    tensors[which] = tensors[which].to("meta")
    with pytest.raises(ReloadError, match=f"{which}.*meta"):
        padded_copy_(tensors["dst"], tensors["src"], pad_value=0.0)
    assert which == "dst" or (tensors["dst"] == -7.0).all()
