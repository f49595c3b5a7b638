"""A token's row number depends on earlier tokens, on purpose; its bits, and every count up to it, do not on later."""

from __future__ import annotations

import torch

from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, must_detect
from bi_moe_deepep import StagedTokens, stage_tokens

GENERATOR = torch.Generator().manual_seed(0)
NUM_EXPERTS, TOP_K = 8, 3
X = torch.randn(6, 16, generator=GENERATOR).bfloat16()
IDS = torch.stack([torch.randperm(NUM_EXPERTS, generator=GENERATOR)[:TOP_K] for _ in range(6)])
IDS[2, 1] = -1


def taken_back(staged: StagedTokens, kept: torch.Tensor) -> torch.Tensor:
    """``(num_tokens, top_k, hidden)``: the row that each slot names, or zeros."""
    return torch.where(kept.unsqueeze(-1), staged.x.flatten(0, 1)[staged.slots.clamp(min=0).long()], 0.0)


def staged_and_taken_back(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    staged = stage_tokens(x, ids, num_experts=NUM_EXPERTS, capacity=len(x))
    return taken_back(staged, staged.slots >= 0)


def capacity_of_the_mean_load(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Batch-dependent on purpose: tokens beyond the capacity of a uniform load are dropped."""
    capacity = -(-len(x) * TOP_K // NUM_EXPERTS)
    staged = stage_tokens(x, ids, num_experts=NUM_EXPERTS, capacity=len(x))
    kept = (staged.slots >= 0) & (staged.slots % len(x) < capacity)
    return taken_back(staged, kept)


def test_every_token_arrives_unchanged_whatever_the_batch() -> None:
    assert_batch_invariant(staged_and_taken_back, (X, IDS), batch_sizes=QUICK_BATCH_SIZES)


def test_a_capacity_taken_from_the_batch_is_noticed() -> None:
    must_detect(capacity_of_the_mean_load, (X, IDS), batch_sizes=QUICK_BATCH_SIZES)


def test_earlier_tokens_do_not_see_later_ones() -> None:
    whole = stage_tokens(X, IDS, num_experts=NUM_EXPERTS, capacity=6)
    for count in range(7):
        part = stage_tokens(X[:count], IDS[:count], num_experts=NUM_EXPERTS, capacity=6)
        assert part.slots.tolist() == whole.slots[:count].tolist()
