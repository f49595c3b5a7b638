from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_kernels import ArgumentError, CapacityError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import StagedTokens, stage_tokens


def tokens(count: int, hidden: int = 8) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count)).bfloat16()


def one_by_one(x: torch.Tensor, ids: list[list[int]], first: int, count: int, capacity: int) -> StagedTokens:
    """Staging as a loop over tokens."""
    staged = torch.zeros(count, capacity, x.shape[1], dtype=x.dtype)
    counts = [0] * count
    slots = [[-1] * len(row) for row in ids]
    for token, row in enumerate(ids):
        for slot, expert in enumerate(row):
            local = expert - first
            if expert >= 0 and 0 <= local < count:
                staged[local, counts[local]] = x[token]
                slots[token][slot] = local * capacity + counts[local]
                counts[local] += 1
    return StagedTokens(staged, torch.tensor(counts, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32))


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, list[list[int]], int, int]:
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, num_experts))
    expert = st.permutations(range(num_experts)).map(lambda order: list(order[:top_k]))
    ids = draw(st.lists(expert, max_size=40))
    for row in ids:
        for slot in range(top_k):
            if draw(st.integers(0, 5)) == 0:
                row[slot] = -1
    first = draw(st.integers(0, num_experts - 1))
    return num_experts, ids, first, draw(st.integers(1, num_experts - first))


@settings(max_examples=60)
@given(routings())
def test_is_a_loop_over_tokens(routing: tuple[int, list[list[int]], int, int]) -> None:
    num_experts, ids, first, count = routing
    x, capacity = tokens(len(ids)), max(1, len(ids))
    topk_ids = torch.tensor(ids, dtype=torch.int64).view(len(ids), len(ids[0]) if ids else 1)
    staged = stage_tokens(
        x, topk_ids, num_experts=num_experts, capacity=capacity, first_expert=first, num_local_experts=count
    )
    want = one_by_one(x, ids, first, count, capacity)
    for name, have, expected in zip(StagedTokens._fields, staged, want, strict=True):
        assert_bitwise_equal(have, expected.view(have.shape), name)


def test_int32_and_int64_ids_agree_and_all_experts_are_local_by_default() -> None:
    x, ids = tokens(5), torch.tensor([[0, 3], [3, 1], [-1, -1], [2, 3], [3, 0]])
    for have, want in zip(
        stage_tokens(x, ids, num_experts=4, capacity=4),
        stage_tokens(x, ids.int(), num_experts=4, capacity=4, first_expert=0, num_local_experts=4),
        strict=True,
    ):
        assert_bitwise_equal(have, want)


def test_rows_past_the_counts_are_left_untouched() -> None:
    x, ids = tokens(3), torch.tensor([[0], [1], [0]])
    out = StagedTokens(
        torch.full((2, 4, 8), 7.0, dtype=torch.bfloat16),
        torch.empty(2, dtype=torch.int32),
        torch.empty(3, 1, dtype=torch.int32),
    )
    staged = stage_tokens(x, ids, num_experts=2, capacity=4, out=out)
    assert staged.x is out.x
    assert_bitwise_equal(staged.x[0, :2], x[::2])
    assert_bitwise_equal(staged.x[0, 2:], torch.full((2, 8), 7.0, dtype=torch.bfloat16))
    assert staged.counts.tolist() == [2, 1]
    assert staged.slots.tolist() == [[0], [4], [1]]


def test_empty() -> None:
    staged = stage_tokens(tokens(0), torch.zeros(0, 2, dtype=torch.int32), num_experts=2, capacity=1)
    assert staged.x.shape == (2, 1, 8)
    assert staged.counts.tolist() == [0, 0]
    assert staged.slots.shape == (0, 2)


def poisoned(num_experts: int, capacity: int, num_tokens: int, top_k: int) -> StagedTokens:
    return StagedTokens(
        torch.full((num_experts, capacity, 8), 7.0, dtype=torch.bfloat16),
        torch.full((num_experts,), 77, dtype=torch.int32),
        torch.full((num_tokens, top_k), 77, dtype=torch.int32),
    )


def test_over_capacity_names_expert_count_and_capacity() -> None:
    ids, out = torch.tensor([[4, 5], [5, 6], [0, 5]]), poisoned(3, 2, 3, 2)
    with pytest.raises(CapacityError, match="expert 5 got 3 tokens, its capacity is 2"):
        stage_tokens(tokens(3), ids, num_experts=7, capacity=2, first_expert=4, out=out)
    for have, want in zip(out, poisoned(3, 2, 3, 2), strict=True):
        assert_bitwise_equal(have, want)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1], [1, 1]], "expert 1 twice for token 1"),
        ([[0, 4], [0, 1]], "got 4 for token 0"),
        ([[0, -2], [0, 1]], "got -2 for token 0"),
    ],
)
def test_bad_ids_write_nothing(ids: list[list[int]], message: str) -> None:
    out = poisoned(4, 2, 2, 2)
    with pytest.raises(ArgumentError, match=f"^topk_ids: .*{message}"):
        stage_tokens(tokens(2), torch.tensor(ids), num_experts=4, capacity=2, out=out)
    for have, want in zip(out, poisoned(4, 2, 2, 2), strict=True):
        assert_bitwise_equal(have, want)


def test_bad_arguments() -> None:
    x, ids = tokens(2), torch.zeros(2, 1, dtype=torch.int32)
    for name, arguments in {
        "x": (x.float(), ids),
        "topk_ids": (x, ids.float()),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            stage_tokens(*arguments, num_experts=4, capacity=2)
    with pytest.raises(ArgumentError, match=r"^topk_ids: "):
        stage_tokens(x, ids[:1], num_experts=4, capacity=2)
    with pytest.raises(ArgumentError, match=r"^capacity: "):
        stage_tokens(x, ids, num_experts=4, capacity=0)
    for first, count in ((-1, 2), (4, None), (2, 3), (0, 0)):
        with pytest.raises(ArgumentError, match=r"^first_expert: "):
            stage_tokens(x, ids, num_experts=4, capacity=2, first_expert=first, num_local_experts=count)
    good = poisoned(4, 2, 2, 1)
    for name, out in {
        "out.x": good._replace(x=good.x[:3]),
        "out.counts": good._replace(counts=good.counts.long()),
        "out.slots": good._replace(slots=good.slots.T),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            stage_tokens(x, ids, num_experts=4, capacity=2, out=out)
    assert_bitwise_equal(good.x, poisoned(4, 2, 2, 1).x)
