"""Every public op under bad dtypes, shapes, strides, devices and values: a typed error, and nothing written.

A call that is valid is taken apart: one or two of its arguments are replaced by something near. The op may accept
that, or refuse it with an error of ours; whatever else comes out of it (torch's own errors, an index error, a changed
input) is a defect. After a refusal every byte of every argument is as before, outputs included.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bi_kernels as bk
import bi_moe_deepep as moe
import bi_reload as reload
import bi_sparse_attn as sparse
from bi_kernels.runtime.errors import BatchInvarianceError

Arguments = dict[str, Any]

F32, BF16, F8, I32, I64, U8 = (
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64, torch.uint8,
)  # fmt: skip


def values(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*numbers: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def scales(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5)


def expert_weights() -> Arguments:
    return {"w13": values(2, 256, 128, dtype=F8), "s13": scales(2, 2, 1), "w2": values(2, 128, 128, dtype=F8),
            "s2": scales(2, 1, 1), "arch": bk.Arch.SM90, "clamp_limit": 10.0}  # fmt: skip


MHC: Arguments = {"rms_eps": 1e-6, "hc_eps": 1e-6, "norm_eps": 1e-6, "sinkhorn_iters": 2, "post_mult": 2.0}


def mhc_weights(k: int, name: str) -> Arguments:
    return {name: values(24, k, dtype=F32), "scale": torch.ones(3), "base": torch.zeros(24),
            "norm_weight": values(128), **MHC}  # fmt: skip


CALLS: dict[Callable[..., Any], Callable[[], Arguments]] = {
    bk.per_token_group_quant_fp8: lambda: {
        "x": values(3, 256), "scale_format": bk.ScaleFormat.FLOAT32, "group_size": 128,
        "out_q": torch.zeros(3, 256, dtype=F8), "out_s": torch.zeros(3, 2)},
    bk.per_block_quant_fp8: lambda: {"w": values(130, 256, dtype=F32), "scale_format": bk.ScaleFormat.FLOAT32},
    bk.dequantize: lambda: {"q": values(3, 256, dtype=F8), "s": scales(3, 2), "group_size": 128},
    bk.fused_silu_mul_per_token_group_quant: lambda: {
        "x": values(2, 3, 512), "masked_m": ints(3, 1), "clamp_limit": 10.0, "arch": bk.Arch.SM90,
        "out_q": torch.zeros(2, 3, 256, dtype=F8), "out_s": torch.zeros(2, 3, 2)},
    bk.silu_and_mul: lambda: {"x": values(3, 256), "clamp_limit": 10.0, "arch": bk.Arch.SM100},
    bk.fixed_order_mm: lambda: {"x": values(3, 128), "weight": values(8, 128), "out": torch.zeros(3, 8)},
    bk.log_softmax: lambda: {"logits": values(3, 50, dtype=F32)},
    bk.selected_logprobs: lambda: {"logits": values(3, 50, dtype=F32), "token_ids": ints(1, 49, 0, dtype=I64)},
    bk.ceil_to_ue8m0: lambda: {"scale": scales(3, 5)},
    bk.pack_ue8m0: lambda: {"scales": scales(3, 5)},
    bk.unpack_ue8m0: lambda: {"packed": ints(5, 6, 7).view(3, 1), "num_groups": 3},
    sparse.top_k_per_row_prefill: lambda: {
        "logits": values(3, 20, dtype=F32), "row_starts": ints(0, 2, 5), "row_ends": ints(20, 9, 5), "top_k": 4,
        "out": ints(*[7] * 12).view(3, 4)},
    sparse.fill_row_ranges_: lambda: {
        "row_starts": ints(9, 9, 9), "row_ends": ints(9, 9, 9), "positions": ints(0, 5, dtype=I64),
        "compress_ratio": 4},
    sparse.c128_indices: lambda: {"positions": ints(0, 300, 127, dtype=I64), "width": 128},
    sparse.combine_topk_swa: lambda: {
        "topk_indices": ints(0, 1, -1, 0, -1, -1).view(2, 3), "positions": ints(9, 7, dtype=I64),
        "gather_starts": ints(0, 0, dtype=I64), "compress_ratio": 4, "window_size": 128, "compressed_rows": 3,
        "out_indices": torch.full((2, 256), 7, dtype=I32), "out_lengths": ints(7, 7)},
    sparse.quantize_and_insert_kv_: lambda: {
        "cache": torch.zeros(2, sparse.kv_block_bytes(4), dtype=U8), "kv": values(3, 512),
        "slots": ints(0, 7, -1, dtype=I64), "block_size": 4},
    sparse.gather_kv: lambda: {
        "cache": torch.zeros(2, sparse.kv_block_bytes(4), dtype=U8), "slots": ints(0, 7, -1, dtype=I64),
        "block_size": 4, "out": values(3, 512)},
    sparse.quantize_and_insert_index_k_: lambda: {
        "cache": torch.zeros(2, sparse.index_k_block_bytes(4), dtype=U8), "k": values(3, 128),
        "slots": ints(0, 7, -1, dtype=I64), "block_size": 4},
    sparse.gather_index_k: lambda: {
        "cache": torch.zeros(2, sparse.index_k_block_bytes(4), dtype=U8), "slots": ints(0, 7, -1, dtype=I64),
        "block_size": 4, "out_q": values(3, 128, dtype=F8), "out_scale": scales(3)},
    sparse.gather_decode_kv: lambda: {
        "compressed_cache": torch.zeros(2, sparse.kv_block_bytes(4), dtype=U8),
        "window_cache": torch.zeros(2, sparse.kv_block_bytes(8), dtype=U8),
        "compressed_slots": ints(0, -1, 1, 2, dtype=I64).view(2, 2),
        "window_slots": ints(0, 1, -1, 3, -1, -1, dtype=I64).view(2, 3),
        "compressed_block_size": 4, "window_block_size": 8},
    sparse.fill_decode_slots_: lambda: {
        "compressed_slots": torch.full((2, 3), 7), "window_slots": torch.full((2, 8), 7),
        "topk_indices": ints(0, 2, -1, 0, -1, -1).view(2, 3), "positions": ints(12, 5, dtype=I64),
        "requests": ints(1, 0), "is_token": torch.tensor([True, True]), "compressed_table": ints(0, 1, 2, 3).view(2, 2),
        "window_table": ints(0, 1, 2, 3).view(2, 2), "compress_ratio": 4, "compressed_block_size": 4,
        "window_block_size": 8},
    sparse.mqa_logits: lambda: {
        "q": values(3, 2, 128, dtype=F8), "k": values(5, 128, dtype=F8), "k_scale": scales(5),
        "weights": values(3, 2, dtype=F32), "row_starts": ints(0, 0, 2), "row_ends": ints(5, 1, 2),
        "out": torch.zeros(3, 5)},
    sparse.sparse_mla_fwd: lambda: {
        "q": values(2, 2, 512), "kv": values(5, 512), "indices": ints(*([0, 1, 4] + [-1] * 125) * 2).view(2, 128),
        "sm_scale": 0.1, "attn_sink": values(2, dtype=F32), "topk_length": ints(2, 3), "out": values(2, 2, 512)},
    moe.fp8_gemm_nt: lambda: {
        "q": values(3, 128, dtype=F8), "s": scales(3, 1), "wq": values(8, 128, dtype=F8), "ws": scales(1, 1),
        "out": values(3, 8)},
    moe.m_grouped_fp8_gemm_nt_contiguous: lambda: {
        "q": values(3, 128, dtype=F8), "s": scales(3, 1), "wq": values(2, 8, 128, dtype=F8), "ws": scales(2, 1, 1),
        "m_indices": ints(0, -1, 1), "out": values(3, 8)},
    moe.m_grouped_fp8_gemm_nt_masked: lambda: {
        "q": values(2, 3, 128, dtype=F8), "s": scales(2, 3, 1), "wq": values(2, 8, 128, dtype=F8),
        "ws": scales(2, 1, 1), "masked_m": ints(3, 1), "out": values(2, 3, 8)},
    moe.m_grouped_fp8_gemm_nt_offsets: lambda: {
        "q": values(3, 128, dtype=F8), "s": scales(3, 1), "wq": values(2, 8, 128, dtype=F8), "ws": scales(2, 1, 1),
        "offsets": ints(0, 1, 3), "out": values(3, 8)},
    moe.router_gate_logits: lambda: {"x": values(3, 128), "weight": values(8, 128), "out": torch.zeros(3, 8)},
    moe.select_experts: lambda: {
        "logits": values(3, 8, dtype=F32), "top_k": 2, "bias": values(8, dtype=F32), "renormalize": True,
        "routed_scaling_factor": 1.5, "out_weights": torch.zeros(3, 2), "out_ids": torch.zeros(3, 2, dtype=I32)},
    moe.stage_tokens: lambda: {
        "x": values(3, 8), "topk_ids": ints(0, 1, 2, -1, 3, 0).view(3, 2), "num_experts": 4, "capacity": 3},
    moe.pack_tokens: lambda: {
        "q": values(3, 128, dtype=F8), "s": scales(3, 1), "topk_ids": ints(0, 1, 2, -1, 3, 0).view(3, 2),
        "num_experts": 4},
    moe.combine_ordered: lambda: {
        "expert_out": values(2, 3, 8), "slots": ints(0, 5, -1, 2).view(2, 2), "topk_weights": values(2, 2, dtype=F32),
        "out": values(2, 8)},
    moe.expert_mlp: lambda: {
        "x": values(2, 3, 128), "counts": ints(3, 1), **expert_weights(), "out": values(2, 3, 128)},
    moe.expert_mlp_contiguous: lambda: {
        "x": values(3, 128), "m_indices": ints(0, -1, 1), **expert_weights(), "out": values(3, 128)},
    reload.mhc_pre: lambda: {"residual": values(2, 4, 128), **mhc_weights(512, "fn")},
    reload.mhc_pre_broadcast: lambda: {"x": values(2, 128), **mhc_weights(128, "fn_broadcast")},
    reload.mhc_post: lambda: {
        "x": values(2, 8), "residual": values(2, 4, 8), "post_mix": values(2, 4, dtype=F32),
        "comb_mix": values(2, 4, 4, dtype=F32), "out": values(2, 4, 8)},
    reload.mhc_head: lambda: {
        "residual": values(2, 4, 128), "fn": values(4, 512, dtype=F32), "scale": torch.ones(1), "base": torch.zeros(4),
        "rms_eps": 1e-6, "hc_eps": 1e-6, "out": values(2, 128)},
    reload.padded_copy_: lambda: {"dst": torch.zeros(4, 5), "src": values(3, 5, dtype=F32), "pad_value": -math.inf},
    reload.load_attn_sink_: lambda: {
        "param": torch.zeros(4), "loaded": values(3, dtype=F32), "first_head": 0, "num_heads": 3},
    reload.refresh_mhc_broadcast_: lambda: {"dst": torch.zeros(24, 8), "fn": values(24, 32, dtype=F32)},
}  # fmt: skip

DTYPES = (F32, torch.float64, BF16, torch.float16, F8, torch.int8, U8, I32, I64, torch.bool, torch.complex64)


def cast(dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
    return lambda t: torch.zeros(t.shape, dtype=dtype)


def same_bytes(dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
    """Another dtype of the same width where there is one: checks that look at bytes would miss it."""
    return lambda t: t.view(dtype) if t.element_size() == dtype.itemsize else t


def filled(value: float) -> Callable[[torch.Tensor], Any]:
    def fill(t: torch.Tensor) -> torch.Tensor:
        if t.dtype.is_floating_point:
            return torch.full(t.shape, value).to(t.dtype)
        if t.dtype == torch.bool:
            return torch.full(t.shape, value > 0)
        info = torch.iinfo(t.dtype)
        whole = 0 if math.isnan(value) else int(max(info.min, min(info.max, value)))
        return torch.full(t.shape, whole, dtype=t.dtype)

    return fill


def strided(t: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*t.shape, 2, dtype=t.dtype)
    wide[..., 0] = t
    return wide[..., 0]


TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    **{f"to {dtype}": cast(dtype) for dtype in DTYPES},
    **{f"bytes as {dtype}": same_bytes(dtype) for dtype in (I32, F32, torch.int16, BF16, U8, F8)},
    **{f"all {value}": filled(value) for value in (-2.0, -1.0, 1.0, 100.0, 1e30, -1e30, math.inf, math.nan)},
    "another dimension": lambda t: t.clone().unsqueeze(0),
    "one dimension less": lambda t: t.clone()[0] if t.dim() else t,
    "no elements": lambda t: t.new_empty([0] * t.dim()),
    "no rows": lambda t: t[:0].clone(),
    "one row less": lambda t: t[:-1].clone(),
    "one row more": lambda t: torch.cat([t, t[:1]]),
    "narrower": lambda t: t[..., :-1].clone(),
    "wider": lambda t: torch.cat([t, t[..., :1]], -1),
    "flat": lambda t: t.flatten().clone(),
    "scalar": lambda t: t.new_zeros(()),
    "strided": strided,
    "turned": lambda t: t.mT.clone().mT if t.dim() > 1 else strided(t),
    "one row for all": lambda t: t[:1].clone().expand(t.shape) if t.dim() else t,
    "backwards": lambda t: t.flip(0),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: torch.zeros(t.shape).to_sparse(),
    "None": lambda t: None,
    "list": lambda t: [1.0, 2.0],
    "number": lambda t: 3,
}
OTHER_CHANGES: tuple[Any, ...] = (-1, 0, 1, 2, 3, 7, 5000, 0.5, -0.5, math.nan, math.inf, None, "x", True, F32, I64)


def changes_of(value: Any) -> list[Any]:
    return list(TENSOR_CHANGES) if isinstance(value, torch.Tensor) else list(OTHER_CHANGES)


def changed(value: Any, change: Any) -> Any:
    return TENSOR_CHANGES[change](value) if isinstance(value, torch.Tensor) else change


def content(value: Any) -> Any:
    """Something that compares equal exactly if a tensor's dtype, shape, strides and bytes are the same."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout != torch.strided:
        return None
    plain = value.clone(memory_format=torch.contiguous_format).flatten()
    return value.dtype, value.shape, value.stride(), plain.view(U8).tolist() if plain.numel() else []


WRITTEN = ("dst", "param", "cache", "row_starts", "row_ends", "compressed_slots", "window_slots")


def is_output(op: Callable[..., Any], name: str) -> bool:
    in_place = op.__name__.endswith("_") and name in WRITTEN
    return in_place or name.startswith("out")


def wrong_number(error: Exception, arguments: Arguments) -> bool:
    """Python's or torch's word for an argument that is no number or flag; for a tensor it is no excuse."""
    others = [a for a in arguments.values() if not isinstance(a, torch.Tensor)]
    return bool(others) and (isinstance(error, TypeError | ValueError) or "Expected a value of type" in str(error))


def check(op: Callable[..., Any], arguments: Arguments) -> None:
    before = {name: content(value) for name, value in arguments.items()}
    refused = False
    try:
        op(**arguments)
    except Exception as error:
        if not isinstance(error, BatchInvarianceError) and not wrong_number(error, arguments):
            raise
        refused = True
    for name, value in arguments.items():
        if refused or not is_output(op, name):
            assert content(value) == before[name], f"{name} was changed"


by_name = pytest.mark.parametrize("op", CALLS, ids=lambda op: f"{op.__module__.split('.')[0]}.{op.__name__}")


def test_every_public_op_is_fuzzed() -> None:
    ops = {
        function
        for package in (bk, sparse, moe, reload)
        for name in package.__all__
        if inspect.isfunction(function := getattr(package, name))
        and any(kind in (function.__doc__ or "").lower() for kind in ("exact op", "bounded op"))
    }
    assert ops - CALLS.keys() <= {reload.weight_fingerprint}  # takes a mapping: see tests/test_fingerprint.py


@by_name
def test_the_call_itself_is_valid(op: Callable[..., Any]) -> None:
    op(**CALLS[op]())


@by_name
def test_one_bad_argument(op: Callable[..., Any]) -> None:
    for name, value in CALLS[op]().items():
        for change in changes_of(value):
            arguments = CALLS[op]()
            arguments[name] = changed(arguments[name], change)
            try:
                check(op, arguments)
            except Exception as error:
                pytest.fail(f"{name} {change}: {type(error).__name__}: {error}")


@by_name
def test_an_output_whose_elements_share_memory_is_refused(op: Callable[..., Any]) -> None:
    for name, value in CALLS[op]().items():
        if is_output(op, name) and isinstance(value, torch.Tensor) and value.shape[0] > 1:
            arguments = CALLS[op]()
            arguments[name] = value[:1].expand(value.shape)
            with pytest.raises(BatchInvarianceError):
                op(**arguments)


@by_name
@settings(max_examples=25)
@given(data=st.data())
def test_several_bad_arguments(op: Callable[..., Any], data: st.DataObject) -> None:
    arguments = CALLS[op]()
    names = st.lists(st.sampled_from(sorted(arguments)), min_size=min(2, len(arguments)), max_size=3, unique=True)
    for name in data.draw(names):
        arguments[name] = changed(arguments[name], data.draw(st.sampled_from(changes_of(arguments[name]))))
    check(op, arguments)
