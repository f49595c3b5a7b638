"""The DeepEP transport over a stand-in of the library: what it asks for, and what it takes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bi_kernels import ArgumentError, ContractError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import (
    DeepEPTransport,
    StagedDispatcher,
    TorchTransport,
    TransportError,
    combine_ordered,
    stage_tokens,
)


class Buffer:
    """One rank with DeepEP's shapes: rows of an expert in an order that says nothing (here: reversed)."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max: int,
        num_experts: int,
        use_fp8: bool = True,
        round_scale: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:
        assert len(x) > 0
        assert topk_idx.dtype == torch.int64
        self.asked.append({"use_fp8": use_fp8, "return_recv_hook": return_recv_hook})
        staged = stage_tokens(x.flip(0), topk_idx.flip(0), num_experts=num_experts, capacity=num_max)
        return staged.x, staged.counts, staged.slots.flip(0), None, None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        zero_copy: bool = True,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:
        self.asked.append({"zero_copy": zero_copy})
        return combine_ordered(x, handle, topk_weights), None, None


@pytest.fixture
def numbers(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", world_size=1, rank=0)
    yield TorchTransport()
    dist.destroy_process_group()


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.rand(count, 6).argsort(1)[:, :2].int()
    return torch.randn(count, 16).bfloat16(), ids, torch.rand(count, 2)


def experts(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return x * (torch.arange(len(x)) + 1.5).bfloat16().view(-1, 1, 1)


@pytest.mark.parametrize("count", [0, 1, 9, 20], ids=lambda n: f"T={n}")
def test_the_same_bits_as_over_torch_distributed(numbers: TorchTransport, count: int) -> None:
    buffer = Buffer()
    tokens = batch(count)
    results = []
    for transport in (DeepEPTransport(buffer, numbers), numbers):
        dispatcher = StagedDispatcher(transport, num_experts=6, capacity=8, num_slices=3)
        results.append(dispatcher.run(*tokens, experts=experts)[0])
    assert results[0].shape == (count, 16)
    assert_bitwise_equal(*results)
    # Bfloat16 on the wire, results at once, and no keyword that this version lacks (use_logfmt).
    assert buffer.asked == [{"use_fp8": False, "return_recv_hook": False}, {"zero_copy": False}] * 3


def test_a_library_that_quantises_all_the_same_is_refused(numbers: TorchTransport) -> None:
    class Stubborn(Buffer):
        def low_latency_dispatch(self, *arguments: Any, use_fp8: bool = True, **others: Any) -> tuple[Any, ...]:
            x, *rest = super().low_latency_dispatch(*arguments)
            return (x.to(torch.float8_e4m3fn), torch.ones(1)), *rest

    x, ids, _ = batch(3)
    with pytest.raises(TransportError, match="expected bfloat16 tokens, got codes and scales"):
        DeepEPTransport(Stubborn(), numbers).low_latency_dispatch(x, ids, 8, 6)


def test_more_tokens_than_capacity_never_reach_the_library(numbers: TorchTransport) -> None:
    x, ids, _ = batch(9)
    buffer = Buffer()
    with pytest.raises(ArgumentError, match="num_tokens: expected at most 8, got 9"):
        DeepEPTransport(buffer, numbers).low_latency_dispatch(x, ids, 8, 6)
    assert buffer.asked == []


def test_other_libraries_are_refused(numbers: TorchTransport) -> None:
    class Old:
        def low_latency_dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor) -> None: ...

    with pytest.raises(ContractError, match="one without use_fp8"):
        DeepEPTransport(Old(), numbers)
    with pytest.raises(ContractError, match="found none"):
        DeepEPTransport(object(), numbers)


def test_b51_filled_tensors_are_refused(numbers: TorchTransport) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ContractError, match="fill_uninitialized_memory: expected False beside DeepEP"):
            DeepEPTransport(Buffer(), numbers)
    finally:
        torch.use_deterministic_algorithms(False)
    DeepEPTransport(Buffer(), numbers)


def test_numbers_stay_on_the_host_under_another_default_device(numbers: TorchTransport) -> None:
    """vLLM builds layers under one, and gloo would be given its tensors."""
    with torch.device("meta"):
        assert numbers.all_gather_ints([3, 1]) == [(3, 1)]
