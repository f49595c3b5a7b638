"""The callables published for trainers, as far as they go without a GPU: their names, and what they refuse."""

from __future__ import annotations

import inspect

import pytest
import torch

from bi_kernels import vllm_publish
from bi_kernels.runtime.errors import ArgumentError, NativeLibraryError, UnsupportedArchError

X = torch.zeros(4, 512, dtype=torch.bfloat16)
fused = vllm_publish.fused_silu_mul_per_token_group_quant_fp8


def test_arguments_are_the_trainers():
    assert list(inspect.signature(fused).parameters) == [
        "gate_up",
        "output_q",
        "use_ue8m0",
        "round_scale",
        "clamp_limit",
        "swiglu_limit",
        "masked_m",
        "group_size",
    ]


def test_contradictions_are_refused():
    with pytest.raises(ArgumentError, match="clamp_limit: expected one limit"):
        fused(X, clamp_limit=10.0, swiglu_limit=7.0)
    with pytest.raises(ArgumentError, match="use_ue8m0: expected"):
        fused(X, use_ue8m0=True, round_scale=False)


def test_there_is_no_cpu_path_and_no_guess():
    for arguments in ({}, {"use_ue8m0": True}, {"round_scale": True}, {"use_ue8m0": False}):
        with pytest.raises(UnsupportedArchError):
            fused(X, **arguments)


def test_the_kernel_is_not_enabled_here(monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert not vllm_publish.is_batch_invariant_quant_kernel_enabled()
    if torch.version.cuda is None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert not vllm_publish.is_batch_invariant_quant_kernel_enabled()
        with pytest.raises(NativeLibraryError, match="fused_silu_mul_per_token_group_quant"):
            vllm_publish.require_batch_invariant_quant_kernel()
