"""Staged dispatch over simulated ranks: what it refuses, and what it never does twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bi_kernels import ArgumentError, CapacityError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import (
    DispatchedTokens,
    InProcessTransport,
    StagedDispatcher,
    Transport,
    TransportError,
    plan_slices,
)

NUM_EXPERTS, TOP_K, HIDDEN = 4, 2, 16
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tokens(count: int, seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(count, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    return x, ids, torch.rand(count, TOP_K, generator=generator)


def experts_of(transport: Transport) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Row-invariant stand-ins: expert ``e`` multiplies by ``e + 1.5``."""
    local = NUM_EXPERTS // transport.world_size
    first = transport.rank * local
    factor = (torch.arange(first, first + local) + 1.5).bfloat16().view(-1, 1, 1)
    return lambda x, counts: x * factor


def layer(
    batches: Sequence[Tokens], *, capacity: int, num_slices: int, shared: Callable[..., torch.Tensor] | None = None
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """One expert layer on as many simulated ranks as there are batches."""

    def program(transport: Transport) -> tuple[torch.Tensor, torch.Tensor | None]:
        dispatcher = StagedDispatcher(transport, num_experts=NUM_EXPERTS, capacity=capacity, num_slices=num_slices)
        return dispatcher.run(*batches[transport.rank], experts=experts_of(transport), shared_experts=shared)

    return InProcessTransport(len(batches)).run(program)


class Counting:
    """A transport that counts its collectives, and can be made to lie."""

    def __init__(self, transport: Transport, change: Callable[[DispatchedTokens], Any] = lambda received: received):
        self.transport, self.change = transport, change
        self.rank, self.world_size = transport.rank, transport.world_size
        self.calls: list[str] = []

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        self.calls.append("all_gather_ints")
        return self.transport.all_gather_ints(values)

    def low_latency_dispatch(self, *arguments: Any) -> Any:
        self.calls.append("dispatch")
        return self.change(self.transport.low_latency_dispatch(*arguments))

    def low_latency_combine(self, *arguments: Any) -> torch.Tensor:
        self.calls.append("combine")
        return self.transport.low_latency_combine(*arguments)


def test_plan() -> None:
    plan = plan_slices(2500, capacity=1024)
    assert plan.num_slices == 3
    assert plan.bounds(2500) == [(0, 1024), (1024, 2048), (2048, 2500)]
    assert plan.bounds(10) == [(0, 10), (10, 10), (10, 10)]
    assert plan.bounds(0) == [(0, 0)] * 3
    assert plan_slices(0, capacity=8).bounds(0) == []
    assert plan_slices(8, capacity=8).num_slices == 1
    with pytest.raises(CapacityError, match="at most 3 slices of 1024 tokens, got 3073"):
        plan.bounds(3073)
    with pytest.raises(ArgumentError, match=r"^capacity: "):
        plan_slices(8, capacity=0)
    with pytest.raises(ArgumentError, match=r"^bucket_tokens: "):
        plan_slices(-1, capacity=8)


def test_b47_an_empty_rank_joins_every_collective() -> None:
    batches = [tokens(5), tokens(0)]

    def program(transport: Transport) -> tuple[list[str], torch.Tensor]:
        counting = Counting(transport)
        dispatcher = StagedDispatcher(counting, num_experts=NUM_EXPERTS, capacity=2, num_slices=3)
        routed, _ = dispatcher.run(*batches[transport.rank], experts=experts_of(transport))
        return counting.calls, routed

    (calls, routed), (calls_of_empty, nothing) = InProcessTransport(2).run(program)
    assert calls == calls_of_empty
    assert calls.count("dispatch") == calls.count("combine") == 3
    assert routed.shape == (5, HIDDEN)
    assert nothing.shape == (0, HIDDEN)


def test_b48_ranks_that_disagree_about_capacity_are_refused_before_the_first_dispatch() -> None:
    calls: dict[int, list[str]] = {}
    errors: dict[int, str] = {}

    def program(transport: Transport) -> None:
        counting = Counting(transport)
        calls[transport.rank] = counting.calls
        dispatcher = StagedDispatcher(
            counting, num_experts=NUM_EXPERTS, capacity=(128, 256)[transport.rank], num_slices=1
        )
        try:
            dispatcher.run(*tokens(3), experts=experts_of(transport))
        except CapacityError as error:
            errors[transport.rank] = str(error)

    InProcessTransport(2).run(program)
    assert calls == {0: ["all_gather_ints"], 1: ["all_gather_ints"]}
    assert errors[0] == errors[1]
    assert "capacity 128 on rank 0, 256 on rank 1." in errors[0]


def test_ranks_that_disagree_about_anything_else_are_refused() -> None:
    def program(transport: Transport) -> None:
        x, ids, weights = tokens(3)
        even = transport.rank == 0
        dispatcher = StagedDispatcher(
            transport, num_experts=(4, 8)[even], capacity=8, num_slices=(1, 2)[even], verify=even
        )
        width = HIDDEN if even else HIDDEN // 2
        dispatcher.run(x[:, :width], ids[:, : 1 + even], weights[:, : 1 + even], experts=experts_of(transport))

    with pytest.raises(CapacityError) as caught:
        InProcessTransport(2).run(program)
    assert (
        "got num_slices 2 on rank 0, 1 on rank 1; num_experts 8 on rank 0, 4 on rank 1; hidden 16 on rank 0, 8 on "
        "rank 1; top_k 2 on rank 0, 1 on rank 1; verify 1 on rank 0, 0 on rank 1."
    ) in str(caught.value)


def test_ranks_that_make_different_calls_are_told() -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            transport.all_gather_ints([1])
        else:
            transport.low_latency_dispatch(*tokens(1)[:2], 8, NUM_EXPERTS)

    with pytest.raises(TransportError, match="got all_gather_ints on rank 0, low_latency_dispatch on rank 1"):
        InProcessTransport(2).run(program)


def test_b49_more_tokens_than_capacity() -> None:
    batches = [tokens(2500), tokens(10, seed=1)]
    calls: list[torch.Size] = []

    def shared(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return x * 2

    slices = plan_slices(2500, capacity=1024).num_slices
    assert slices == 3
    staged = layer(batches, capacity=1024, num_slices=slices, shared=shared)
    assert sorted(calls) == [(10, HIDDEN), (2500, HIDDEN)]  # once per rank, with all its tokens
    whole = layer(batches, capacity=4096, num_slices=1, shared=shared)
    for rank in range(2):
        for name, have, want in zip(("routed", "shared"), staged[rank], whole[rank], strict=True):
            assert have is not None
            assert want is not None
            assert_bitwise_equal(have, want, f"{name}, rank {rank}")


def test_b53_a_transport_that_quantises_by_itself_is_refused() -> None:
    def as_fp8(received: DispatchedTokens) -> DispatchedTokens:
        return received._replace(x=received.x.to(torch.float8_e4m3fn))

    def program(transport: Transport) -> None:
        dispatcher = StagedDispatcher(Counting(transport, as_fp8), num_experts=NUM_EXPERTS, capacity=8, num_slices=1)
        dispatcher.run(*tokens(3), experts=experts_of(transport))

    with pytest.raises(ArgumentError, match=r"^received x: expected dtype bfloat16, got float8_e4m3fn"):
        InProcessTransport(2).run(program)


def test_b55_b65_experts_see_one_shape_whatever_the_load() -> None:
    shapes = set()

    def program(transport: Transport) -> None:
        inner = experts_of(transport)

        def experts(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            shapes.add(x.shape)
            return inner(x, counts)

        dispatcher = StagedDispatcher(transport, num_experts=NUM_EXPERTS, capacity=16, num_slices=4)
        for count in (0, 1, 16, 17, 64):
            dispatcher.run(*tokens(count), experts=experts)

    InProcessTransport(2).run(program)
    assert shapes == {(NUM_EXPERTS // 2, 2 * 16, HIDDEN)}


@pytest.mark.parametrize("wrong", [1, -1, 10**6])
def test_a_corrupt_count_stops_every_rank_before_anything_is_computed(wrong: int) -> None:
    computed: list[int] = []
    errors: dict[int, str] = {}

    def program(transport: Transport) -> None:
        def corrupt(received: DispatchedTokens) -> DispatchedTokens:
            if transport.rank == 1:
                received.counts[1] += wrong
            return received

        def experts(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            computed.append(transport.rank)
            return x

        dispatcher = StagedDispatcher(Counting(transport, corrupt), num_experts=NUM_EXPERTS, capacity=8, num_slices=1)
        try:
            dispatcher.run(*tokens(8), experts=experts)
        except TransportError as error:
            errors[transport.rank] = str(error)

    InProcessTransport(2).run(program)
    assert computed == []
    assert errors[0] == errors[1]
    assert "for expert 3 on rank 1" in errors[0]


def test_a_rank_that_ends_early_does_not_leave_the_others_waiting() -> None:
    def program(transport: Transport) -> None:
        if transport.rank != 1:
            layer_on(transport)

    def layer_on(transport: Transport) -> None:
        dispatcher = StagedDispatcher(transport, num_experts=6, capacity=8, num_slices=1)
        dispatcher.run(*tokens(2), experts=lambda x, counts: x)

    with pytest.raises(TransportError, match="expected all 3 ranks, but rank 1 has ended"):
        InProcessTransport(3).run(program)


def test_the_cause_is_reported_not_its_consequences() -> None:
    with pytest.raises(CapacityError, match="at most 1 slices of 8 tokens, got 9"):
        layer([tokens(2), tokens(9)], capacity=8, num_slices=1)


def test_the_transport_works_again_after_an_error() -> None:
    transport = InProcessTransport(2)
    with pytest.raises(ZeroDivisionError):
        transport.run(lambda end: 1 // end.rank)
    assert transport.run(lambda end: end.all_gather_ints([end.rank])) == [[(0,), (1,)]] * 2


def test_threads_keep_the_callers_modes() -> None:
    with torch.inference_mode():
        assert InProcessTransport(2).run(lambda end: torch.is_inference_mode_enabled()) == [True, True]
    with torch.no_grad():
        assert InProcessTransport(2).run(lambda end: torch.is_grad_enabled()) == [False, False]


def test_padding_tokens_use_no_capacity() -> None:
    x, ids, weights = tokens(4)
    ids[1:3] = -1
    ((routed, shared),) = layer([(x, ids, weights)], capacity=4, num_slices=1)
    assert shared is None
    assert_bitwise_equal(routed[1:3], torch.zeros(2, HIDDEN, dtype=torch.bfloat16))


def test_bad_arguments() -> None:
    x, ids, weights = tokens(3)
    for name, batch in {
        "x": (x.float(), ids, weights),
        "topk_ids": (x, ids[:2], weights),
        "topk_weights": (x, ids, weights[:, :1]),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name}: expected .* got "):
            layer([batch], capacity=8, num_slices=1)
    for expert in (-2, NUM_EXPERTS):
        bad = ids.clone()
        bad[0, 0] = expert
        with pytest.raises(ArgumentError, match=r"^topk_ids: "):
            layer([(x, bad, weights)], capacity=8, num_slices=1)
    twice = ids.clone()
    twice[2] = 1
    with pytest.raises(ArgumentError, match=r"^topk_ids: .*expert 1 twice for token 2"):
        layer([(x, twice, weights)], capacity=8, num_slices=1)
    with pytest.raises(ArgumentError, match=r"^world_size: "):
        InProcessTransport(0)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"num_experts": 5}, "num_experts"), ({"capacity": 0}, "capacity"), ({"num_slices": -1}, "num_slices")],
)
def test_bad_settings(change: dict[str, int], name: str) -> None:
    settings = {"num_experts": NUM_EXPERTS, "capacity": 8, "num_slices": 1} | change
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        InProcessTransport(2).run(lambda transport: StagedDispatcher(transport, **settings))


def test_experts_must_keep_the_shape() -> None:
    def program(transport: Transport) -> None:
        dispatcher = StagedDispatcher(transport, num_experts=NUM_EXPERTS, capacity=8, num_slices=1)
        dispatcher.run(*tokens(2), experts=lambda x, counts: x[:, :1])

    with pytest.raises(ArgumentError, match=r"^experts' result: "):
        InProcessTransport(1).run(program)


def test_simulated_ranks_keep_no_tensors_between_calls() -> None:
    transport = InProcessTransport(2)
    kept: list[weakref.ref[torch.Tensor]] = []

    def program(endpoint: Transport) -> None:
        x = torch.zeros(3, 128, dtype=torch.bfloat16)
        kept.append(weakref.ref(x))
        endpoint.low_latency_dispatch(x, torch.zeros(3, 1, dtype=torch.int32), 4, 2)

    transport.run(program)
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
