"""The registered ops: schemas, opcheck, mutation of exactly the declared outputs, meta tensors, no CUDA kernel here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bi_kernels import _ops
from bi_kernels.arch import Arch
from bi_kernels.runtime.library import has_cuda_kernel
from bi_kernels.scale_format import ScaleFormat, allocate_scales
from bi_kernels.testing import assert_bitwise_equal

SCHEMAS = {
    "fused_silu_mul_per_token_group_quant": (
        "(Tensor x, Tensor? masked_m, Tensor? m_indices, float? clamp_limit, int group_size, int scale_format, "
        "int arch, Tensor(a!) out_q, Tensor(b!) out_s) -> ()"
    ),
    "per_token_group_quant": (
        "(Tensor x, Tensor? masked_m, int group_size, int scale_format, Tensor(a!) out_q, Tensor(b!) out_s) -> ()"
    ),
    "fixed_order_mm": "(Tensor x, Tensor weight, Tensor(a!) out) -> ()",
    "log_softmax": "(Tensor logits, Tensor(a!) scratch, Tensor(b!) out) -> ()",
}


def silu_arguments(scale_format: ScaleFormat, arch: Arch, *, masked: bool, clamp: float | None) -> tuple[object, ...]:
    tokens = (2, 3) if masked else (5,)
    x = torch.randn(*tokens, 512).bfloat16()
    masked_m = torch.tensor([1, 3], dtype=torch.int32) if masked else None
    m_indices = None if masked else torch.tensor([0, 1, -1, 1, -1], dtype=torch.int32)
    out_q = torch.zeros(*tokens, 256).to(torch.float8_e4m3fn)
    out_s = allocate_scales(tokens, 2, scale_format).zero_()
    return x, masked_m, m_indices, clamp, 128, scale_format.value, arch.value, out_q, out_s


def quant_arguments(scale_format: ScaleFormat) -> tuple[object, ...]:
    out_s = allocate_scales((5,), 2, scale_format).zero_()
    codes = torch.zeros(5, 256).to(torch.float8_e4m3fn)
    return torch.randn(5, 256).bfloat16(), None, 128, scale_format.value, codes, out_s


def mm_arguments(dtype: torch.dtype) -> tuple[object, ...]:
    return torch.randn(4, 128).bfloat16(), torch.randn(3, 128).bfloat16(), torch.zeros(4, 3, dtype=dtype)


def log_softmax_arguments() -> tuple[object, ...]:
    return torch.randn(4, 70), torch.zeros(4, 35), torch.zeros(4, 70)


CASES = [
    pytest.param(_ops.log_softmax, log_softmax_arguments, id="log_softmax"),
    *(
        pytest.param(
            _ops.fused_silu_mul_per_token_group_quant,
            lambda f=f, a=a, m=m, c=c: silu_arguments(f, a, masked=m, clamp=c),
            id=f"silu_mul_quant-{f.name}-{a.name}-masked={m}-clamp={c}",
        )
        for f, a, m, c in (
            (ScaleFormat.FLOAT32, Arch.SM90, False, None),
            (ScaleFormat.FLOAT32_CEIL_UE8M0, Arch.SM90, True, 10.0),
            (ScaleFormat.UE8M0, Arch.SM100, True, None),
        )
    ),
    *(
        pytest.param(_ops.per_token_group_quant, lambda f=f: quant_arguments(f), id=f"group_quant-{f.name}")
        for f in ScaleFormat
    ),
    *(
        pytest.param(_ops.fixed_order_mm, lambda d=d: mm_arguments(d), id=f"fixed_order_mm-{d}")
        for d in (torch.float32, torch.bfloat16)
    ),
]


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name: str) -> None:
    assert str(getattr(torch.ops.bi_kernels, name).default._schema) == f"bi_kernels::{name}{SCHEMAS[name]}"


@pytest.mark.parametrize(("op", "arguments"), CASES)
def test_opcheck(op: Callable[..., None], arguments: Callable[[], tuple[object, ...]]) -> None:
    given = arguments()
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in given):
        # torch compares values for this one, and cannot for float8; test_writes_outputs_and_nothing_else can.
        tests.append("test_schema")
    result = torch.library.opcheck(op, given, test_utils=tests)
    assert result == dict.fromkeys(tests, "SUCCESS")


@pytest.mark.parametrize(("op", "arguments"), CASES)
def test_writes_outputs_and_nothing_else(op: Callable[..., None], arguments: Callable[[], tuple[object, ...]]) -> None:
    given = arguments()
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in given]
    assert op(*given) is None
    for argument, old, described in zip(given, before, op._schema.arguments, strict=True):  # type: ignore[attr-defined]
        if isinstance(argument, torch.Tensor):
            if described.name == "scratch":
                continue  # what a kernel leaves there is nobody's
            if described.alias_info is not None:
                assert bool((argument.float() != old.float()).any()), f"{described.name} was not written"
            else:
                assert_bitwise_equal(argument, old, described.name)


@pytest.mark.parametrize(("op", "arguments"), CASES)
def test_meta_tensors_run_the_fake(op: Callable[..., None], arguments: Callable[[], tuple[object, ...]]) -> None:
    given = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments()]
    assert op(*given) is None


@pytest.mark.parametrize("name", SCHEMAS)
def test_no_cuda_kernel_without_the_library(name: str) -> None:
    # On a machine with CUDA torch the native loader may have brought one; CPU torch cannot.
    assert torch.version.cuda is not None or not has_cuda_kernel(f"bi_kernels::{name}")
