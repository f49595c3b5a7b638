"""The bits of an expert layer do not depend on how many ranks share it, nor on the slices, nor on other ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bi_kernels import Arch, ScaleFormat, per_block_quant_fp8
from bi_kernels.testing import assert_bitwise_equal, first_difference
from bi_moe_deepep import (
    InProcessTransport,
    StagedDispatcher,
    Transport,
    combine_ordered,
    expert_mlp,
    plan_slices,
    select_experts,
    stage_tokens,
)

GENERATOR = torch.Generator().manual_seed(0)
NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, NUM_TOKENS = 8, 3, 128, 128, 29


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [
        per_block_quant_fp8(torch.randn(n, k, generator=GENERATOR) / 11, scale_format=ScaleFormat.FLOAT32_CEIL_UE8M0)
        for _ in range(NUM_EXPERTS)
    ]
    return torch.stack([q for q, _ in parts]), torch.stack([s for _, s in parts])


W = (*weight(2 * INTERMEDIATE, HIDDEN), *weight(HIDDEN, INTERMEDIATE))
X = torch.randn(NUM_TOKENS, HIDDEN, generator=GENERATOR).bfloat16()
WEIGHTS, IDS = select_experts(torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=GENERATOR), top_k=TOP_K)


def without_dispatch() -> torch.Tensor:
    staged = stage_tokens(X, IDS, num_experts=NUM_EXPERTS, capacity=NUM_TOKENS)
    expert_out = expert_mlp(staged.x, staged.counts, *W, arch=Arch.SM90, clamp_limit=10.0)
    return combine_ordered(expert_out, staged.slots, WEIGHTS)


WANT = without_dispatch()


def local_experts(transport: Transport) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    count = NUM_EXPERTS // transport.world_size
    mine = [part[transport.rank * count : (transport.rank + 1) * count] for part in W]
    return lambda x, counts: expert_mlp(x, counts, *mine, arch=Arch.SM90, clamp_limit=10.0)


def layer(shares: list[int], capacity: int) -> torch.Tensor:
    """The layer with the tokens dealt out to ``len(shares)`` ranks; the result in the tokens' order."""
    num_slices = plan_slices(max(shares), capacity=capacity).num_slices

    def program(transport: Transport) -> torch.Tensor:
        mine = [part.split(shares)[transport.rank] for part in (X, IDS, WEIGHTS)]
        dispatcher = StagedDispatcher(transport, num_experts=NUM_EXPERTS, capacity=capacity, num_slices=num_slices)
        routed, _ = dispatcher.run(*mine, experts=local_experts(transport))
        return routed

    return torch.cat(InProcessTransport(len(shares)).run(program))


@pytest.mark.parametrize("capacity", [1, 4, 7, 29, 64])
@pytest.mark.parametrize(
    "shares",
    [[29], [15, 14], [29, 0], [0, 29], [8, 7, 7, 7], [1, 0, 28, 0]],
    ids=lambda shares: "-".join(map(str, shares)),
)
def test_b64_result_is_independent_of_ep_size_capacity_and_empty_ranks(shares: list[int], capacity: int) -> None:
    if capacity == 1 and max(shares) > 8:
        capacity = 2  # as many slices as tokens is a matter of patience, not of another path
    assert_bitwise_equal(layer(shares, capacity), WANT)


def test_what_other_ranks_hold_does_not_matter() -> None:
    """Rank 0 keeps its tokens; rank 1 brings nothing, zeros, or NaN."""
    others = [X[:0], torch.zeros_like(X), torch.full_like(X, torch.nan), torch.full_like(X, 3e38)]
    for other in others:

        def program(transport: Transport, other: torch.Tensor = other) -> torch.Tensor:
            x = X if transport.rank == 0 else other
            dispatcher = StagedDispatcher(transport, num_experts=NUM_EXPERTS, capacity=16, num_slices=2)
            return dispatcher.run(x, IDS[: len(x)], WEIGHTS[: len(x)], experts=local_experts(transport))[0]

        assert_bitwise_equal(InProcessTransport(2).run(program)[0], WANT)


def test_a_combine_that_rounds_per_rank_is_noticed() -> None:
    """The twin: as a reduce-scatter of bfloat16 partial sums does it, the result depends on the number of ranks."""

    def by_ranks(world_size: int) -> torch.Tensor:
        count = NUM_EXPERTS // world_size
        total = torch.zeros_like(X)
        for rank in range(world_size):
            staged = stage_tokens(
                X,
                IDS,
                num_experts=NUM_EXPERTS,
                capacity=NUM_TOKENS,
                first_expert=rank * count,
                num_local_experts=count,
            )
            mine = [part[rank * count : (rank + 1) * count] for part in W]
            expert_out = expert_mlp(staged.x, staged.counts, *mine, arch=Arch.SM90, clamp_limit=10.0)
            total = total + combine_ordered(expert_out, staged.slots, WEIGHTS)
        return total

    assert_bitwise_equal(by_ranks(1), WANT)
    for world_size in (2, 4):
        assert first_difference(by_ranks(world_size), WANT) is not None
