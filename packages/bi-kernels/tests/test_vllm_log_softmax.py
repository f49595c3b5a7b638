"""Which calls of vLLM's log-softmax become ours. What that computes: test_log_softmax_exact, test_vllm_layers."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bi_kernels import vllm_log_softmax
from bi_kernels.log_softmax import CUDA_COLUMNS


@pytest.fixture
def calls(monkeypatch):
    calls = []

    def ours(rows):
        calls.append(("ours", tuple(rows.shape)))
        return torch.empty_like(rows)

    def original(input, dim=-1):
        calls.append(("vLLM's", dim))
        return torch.empty_like(input)

    monkeypatch.setattr(vllm_log_softmax, "log_softmax_of_rows", ours)
    calls.append(vllm_log_softmax.log_softmax(original))
    return calls


@pytest.mark.parametrize(("shape", "dim"), [((3, 50), -1), ((3, 50), 1), ((2, 3, 50), 2), ((50,), -1), ((0, 50), -1)])
def test_float32_rows_on_a_gpu_are_ours(calls, shape, dim):
    with FakeTensorMode():
        assert calls[0](torch.empty(shape, device="cuda"), dim=dim).shape == shape
    assert calls[1:] == [("ours", (torch.Size(shape).numel() // 50, 50))]


@pytest.mark.parametrize(
    ("change", "dim"),
    [({"device": "cpu"}, -1), ({"dtype": torch.bfloat16}, -1), ({}, 0), ({"size": (3, 0)}, -1),
     ({"size": (1, CUDA_COLUMNS + 1)}, -1)],
    ids=str,
)  # fmt: skip
def test_everything_else_is_vllms(calls, change, dim):
    with FakeTensorMode():
        calls[0](torch.empty(**({"size": (3, 50), "device": "cuda"} | change)), dim)
    assert calls[1:] == [("vLLM's", dim)]
