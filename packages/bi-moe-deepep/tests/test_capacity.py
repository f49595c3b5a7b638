from __future__ import annotations

import dataclasses
import inspect

import pytest

from bi_kernels import ArgumentError
from bi_moe_deepep import ExpertCapacity


def test_sizes() -> None:
    capacity = ExpertCapacity.from_model(num_experts=256, top_k=6, max_tokens_per_rank=128, world_size=8)
    assert capacity.tokens_per_rank == 128
    assert capacity.num_local_experts == 32
    assert capacity.rows_per_expert == 1024
    assert capacity.expected_m == 24  # 8 ranks x 128 tokens x 6 slots / 256 experts
    assert [capacity.first_expert(rank) for rank in (0, 1, 7)] == [0, 32, 224]


@pytest.mark.parametrize(("asked", "given"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_b56_capacity_is_never_below_the_rows_that_deepgemm_gets_right(asked: int, given: int) -> None:
    assert ExpertCapacity.from_model(num_experts=4, top_k=2, max_tokens_per_rank=asked).rows_per_expert == given


def test_b55_nothing_follows_live_traffic() -> None:
    asked_for = set(inspect.signature(ExpertCapacity.from_model).parameters)
    assert asked_for == {"num_experts", "top_k", "max_tokens_per_rank", "world_size"}
    capacity = ExpertCapacity.from_model(num_experts=4, top_k=2, max_tokens_per_rank=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        capacity.tokens_per_rank = 128  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 9}, "top_k"),
        ({"max_tokens_per_rank": -1}, "max_tokens_per_rank"),
        ({"world_size": 3}, "world_size"),
    ],
)
def test_bad_input(change: dict[str, int], name: str) -> None:
    model = {"num_experts": 8, "top_k": 2, "max_tokens_per_rank": 64, "world_size": 2}
    with pytest.raises(ArgumentError, match=f"^{name}: expected .* got "):
        ExpertCapacity.from_model(**(model | change))


def test_no_such_rank() -> None:
    with pytest.raises(ArgumentError, match=r"^rank: "):
        ExpertCapacity.from_model(num_experts=8, top_k=2, max_tokens_per_rank=64, world_size=2).first_expert(2)
