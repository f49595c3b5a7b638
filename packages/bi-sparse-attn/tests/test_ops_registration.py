"""Every op of namespace ds4_bi: schema, fake and functionalisation, by torch's own checker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bi_kernels import NativeLibraryError
from bi_kernels.runtime import native
from bi_kernels.testing import assert_bitwise_equal
from bi_sparse_attn import _native, _ops, index_k_block_bytes, kv_block_bytes


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


SLOTS = torch.tensor([3, -1, 0])
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "top_k_per_row_prefill": lambda: (torch.randn(2, 9), ints(0, 3), ints(9, 5), zeros(2, 4), 4),
    "combine_topk_swa": lambda: (
        *(ints(0, -1).view(1, 2), ints(5), ints(4), None, zeros(1, 128), zeros(1)),
        *(4, 2, 3, 0),
    ),
    "c128_indices": lambda: (ints(300, -1), zeros(2, 128)),
    "quantize_and_insert_kv": lambda: (zeros(1, kv_block_bytes(4), dtype=torch.uint8), randn(3, 512), SLOTS, 4),
    "gather_kv": lambda: (zeros(1, kv_block_bytes(4), dtype=torch.uint8), SLOTS, randn(3, 512), 4),
    "quantize_and_insert_index_k": lambda: (
        *(zeros(1, index_k_block_bytes(4), dtype=torch.uint8), randn(3, 128), SLOTS),
        4,
    ),
    "gather_index_k": lambda: (
        *(zeros(1, index_k_block_bytes(4), dtype=torch.uint8), SLOTS),
        *(zeros(3, 128, dtype=torch.float8_e4m3fn), torch.zeros(3), 4),
    ),
    "gather_decode_kv": lambda: (
        *(None, zeros(1, kv_block_bytes(4), dtype=torch.uint8), SLOTS[:0].view(1, 0), SLOTS[2:].view(1, 1)),
        *(randn(1, 128, 512), zeros(1, 128), zeros(1), 4, 4),
    ),
    "mqa_logits": lambda: (
        *(randn(2, 3, 128).to(torch.float8_e4m3fn), randn(5, 128).to(torch.float8_e4m3fn)),
        *(torch.rand(5), torch.rand(2, 3), ints(0, 1), ints(5, 4), torch.zeros(2, 5)),
    ),
    "sparse_mla_fwd": lambda: (
        *(randn(2, 3, 512), randn(5, 512), zeros(2, 128), torch.randn(3), ints(1, 0)),
        *(randn(2, 3, 512), torch.zeros(2, 3), torch.zeros(2, 3), 0.1),
    ),
}


def test_every_op_is_checked_here() -> None:
    assert set(ARGUMENTS) == set(_ops._OPS)


# What opcheck calls test_schema compares with allclose, which torch lacks for float8; the test after this one does it.
FLOAT8_UTILS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name: str) -> None:
    arguments = ARGUMENTS[name]()
    float8 = any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments)
    options = {"test_utils": FLOAT8_UTILS} if float8 else {}
    torch.library.opcheck(_ops._OPS[name], arguments, **options)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_only_arguments_that_the_schema_marks_are_written(name: str) -> None:
    op, arguments = _ops._OPS[name], ARGUMENTS[name]()
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    assert op(*arguments) is None
    for declared, now, then in zip(op._schema.arguments, arguments, before, strict=True):
        if isinstance(now, torch.Tensor) and not (declared.alias_info and declared.alias_info.is_write):
            assert_bitwise_equal(now, then, declared.name)


def test_the_library_claims_what_is_not_third_party() -> None:
    declared = {f"ds4_bi::{name}" for name in _ops._OPS}
    assert set(_native.NATIVE.ops) == declared - {"ds4_bi::mqa_logits", "ds4_bi::sparse_mla_fwd"}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_cuda_tensors_without_a_kernel_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_READY", set())
    monkeypatch.setattr(native, "_has_cuda_kernel", lambda op: False)
    with pytest.raises(NativeLibraryError, match=f"ds4_bi::{name}"):
        _ops.launch(name, torch.device("cuda"))
