from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bi_moe_deepep
from bi_kernels import ArgumentError, NativeLibraryError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import _ops
from bi_moe_deepep._native import NATIVE

OPS = torch.ops.bi_moe_deepep
Q, S = torch.ones(4, 256).to(torch.float8_e4m3fn), torch.ones(4, 2)
WQ, WS = torch.ones(2, 128, 256).to(torch.float8_e4m3fn), torch.ones(2, 1, 2)
INT32 = torch.int32


def arguments() -> dict[str, tuple[Any, ...]]:
    return {
        "fp8_gemm_nt": (torch.empty(4, 128), Q, S, WQ[0], WS[0]),
        "m_grouped_fp8_gemm_nt_contiguous": (
            torch.empty(4, 128),
            Q,
            S,
            WQ,
            WS,
            torch.tensor([0, 1, -1, 0], dtype=INT32),
        ),
        "m_grouped_fp8_gemm_nt_masked": (
            torch.empty(2, 2, 128),
            Q.view(2, 2, 256),
            S.view(2, 2, 2),
            WQ,
            WS,
            torch.tensor([2, 1], dtype=INT32),
        ),
        "m_grouped_fp8_gemm_nt_offsets": (
            torch.empty(4, 128, dtype=torch.bfloat16),
            Q,
            S,
            WQ,
            WS,
            torch.tensor([0, 3, 4], dtype=INT32),
        ),
        "select_experts": (
            torch.empty(3, 2),
            torch.empty(3, 2, dtype=INT32),
            torch.arange(12.0).view(3, 4),
            torch.zeros(4),
            None,
            None,
            True,
            1.5,
        ),
        "stage_tokens": (
            torch.zeros(4, 3, 8, dtype=torch.bfloat16),
            torch.empty(4, dtype=INT32),
            torch.empty(3, 2, dtype=INT32),
            torch.ones(3, 8, dtype=torch.bfloat16),
            torch.tensor([[0, 1], [1, 2], [-1, 3]]),
            4,
            0,
        ),
        "pack_tokens": (
            torch.zeros(6, 128).to(torch.float8_e4m3fn),
            torch.empty(6, 1),
            torch.empty(5, dtype=INT32),
            torch.empty(6, dtype=INT32),
            torch.empty(3, 2, dtype=INT32),
            torch.ones(3, 128).to(torch.float8_e4m3fn),
            torch.ones(3, 1),
            torch.tensor([[0, 1], [1, 2], [-1, 3]]),
        ),
        "combine_ordered": (
            torch.empty(3, 8, dtype=torch.bfloat16),
            torch.ones(4, 3, 8, dtype=torch.bfloat16),
            torch.tensor([[0, 4], [-1, 2], [11, 3]], dtype=INT32),
            torch.ones(3, 2),
            torch.tensor([[0, 1], [2, -1], [3, 0]], dtype=INT32),
        ),
    }


# What opcheck calls test_schema compares arguments with allclose, which torch lacks for float8; the test below does it.
FP8_UTILS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", list(arguments()))
def test_opcheck(name: str) -> None:
    op = getattr(OPS, name).default
    if any(isinstance(value, torch.Tensor) and value.dtype == Q.dtype for value in arguments()[name]):
        torch.library.opcheck(op, arguments()[name], test_utils=FP8_UTILS)
    else:
        torch.library.opcheck(op, arguments()[name])


@pytest.mark.parametrize("name", list(arguments()))
def test_only_outputs_are_written(name: str) -> None:
    op, used = getattr(OPS, name).default, arguments()[name]
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in used]
    assert op(*used) is None
    for parameter, have, want in zip(op._schema.arguments, used, before, strict=True):
        if isinstance(have, torch.Tensor) and not (parameter.alias_info and parameter.alias_info.is_write):
            assert_bitwise_equal(have, want, parameter.name)


def test_every_op_is_checked() -> None:
    declared = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("bi_moe_deepep::")
    }
    assert declared == set(arguments())
    assert {op.split("::")[1] for op in NATIVE.ops} <= declared


@pytest.mark.parametrize("name", list(arguments()))
def test_cuda_tensors_need_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def require_native(op: str) -> None:
        raise NativeLibraryError(f"asked for {op}", [])

    monkeypatch.setattr(_ops, "require_native", require_native)
    with FakeTensorMode():
        out = torch.empty(3, 8, device="cuda")
    with pytest.raises(NativeLibraryError, match=f"asked for bi_moe_deepep::{name} "):
        _ops.launch(name, out, *arguments()[name][1:])


def test_errors_of_the_reference_keep_their_type_through_the_dispatcher() -> None:
    bad = list(arguments()["combine_ordered"])
    bad[2] = bad[2] + 12
    with pytest.raises(ArgumentError, match=r"^slots: "):
        OPS.combine_ordered.default(*bad)


def test_every_public_name_resolves() -> None:
    for name in bi_moe_deepep.__all__:
        assert getattr(bi_moe_deepep, name) is not None
    assert set(bi_moe_deepep.__all__) <= set(dir(bi_moe_deepep))
    # Modules and the ops that they are named after: the op wins.
    assert callable(bi_moe_deepep.stage_tokens)
    assert callable(bi_moe_deepep.combine_ordered)


def test_import_is_light() -> None:
    code = "import sys, bi_moe_deepep; sys.exit(any(name in sys.modules for name in ('torch', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reference_wheel_has_no_kernels_and_says_so() -> None:
    if not (Path(bi_moe_deepep.__file__).with_name("_C.so")).exists():
        assert not bi_moe_deepep.native_available()
