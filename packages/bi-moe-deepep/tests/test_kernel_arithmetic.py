"""The CUDA sources' arithmetic against the references, without a GPU: the headers compile for the host too."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep.reference.router import _sqrtsoftplus

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "bi-kernels" / "csrc" / "include"
COMPILER = shutil.which("g++") or shutil.which("c++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler; test_router_exact.py needs none")


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("host") / "arithmetic.so"
    command = [str(COMPILER), "-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{HEADERS}"]
    subprocess.run([*command, str(HERE / "host_arithmetic.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def values() -> torch.Tensor:
    """All bfloat16, random bit patterns, and random logits."""
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    patterns = torch.randint(-(1 << 31), 1 << 31, (1 << 20,)).to(torch.int32).view(torch.float32)
    return torch.cat([every, patterns, torch.randn(1 << 20) * 6, -torch.rand(1 << 18) * 110])


def test_scores_have_the_reference_bits(lib: ctypes.CDLL) -> None:
    x = values()
    y = torch.empty_like(x)
    lib.sqrt_softplus(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(len(x)))
    want = _sqrtsoftplus(x)
    assert_bitwise_equal(y, torch.where(torch.isnan(want), torch.nan, want))


def test_order_is_that_of_floats(lib: ctypes.CDLL) -> None:
    x = values()[: 1 << 18]
    order = torch.empty(len(x), dtype=torch.int32)
    lib.float_order(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(order.data_ptr()), ctypes.c_int64(len(x)))
    nan = torch.isnan(x)
    assert (order[nan] < order[~nan].min()).all()
    a, b = x[~nan], x[~nan].roll(1)
    oa, ob = order[~nan], order[~nan].roll(1)
    assert ((a < b) == (oa < ob)).all()
    assert ((a == b) == (oa == ob)).all()
