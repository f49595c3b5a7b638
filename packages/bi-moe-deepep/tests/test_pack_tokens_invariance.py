"""A token's row number depends on the others, on purpose; the bits that arrive there do not, nor do rows before it."""

from __future__ import annotations

import torch

from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, must_detect
from bi_moe_deepep import PackedTokens, pack_tokens

GENERATOR = torch.Generator().manual_seed(0)
NUM_EXPERTS, TOP_K = 8, 3
Q = torch.randint(0, 256, (6, 128), generator=GENERATOR, dtype=torch.uint8)
S = torch.randn(6, 1, generator=GENERATOR)
IDS = torch.stack([torch.randperm(NUM_EXPERTS, generator=GENERATOR)[:TOP_K] for _ in range(6)])
IDS[2, 1] = -1


def taken_back(packed: PackedTokens, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the row that each slot names, or zeros."""
    rows = packed.slots.clamp(min=0).long()
    codes = torch.where(kept.unsqueeze(-1), packed.q.view(torch.uint8)[rows], 0)
    return codes, torch.where(kept.unsqueeze(-1), packed.s[rows], 0.0)


def packed_and_taken_back(q: torch.Tensor, s: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    packed = pack_tokens(q.view(torch.float8_e4m3fn), s, ids, num_experts=NUM_EXPERTS)
    return taken_back(packed, packed.slots >= 0)


def rows_of_the_mean_load(q: torch.Tensor, s: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch-dependent on purpose: an expert's rows beyond a uniform load are dropped."""
    packed = pack_tokens(q.view(torch.float8_e4m3fn), s, ids, num_experts=NUM_EXPERTS)
    load = -(-len(q) * TOP_K // NUM_EXPERTS)
    return taken_back(packed, (packed.slots >= 0) & (packed.slots - packed.offsets[ids.clamp(min=0)] < load))


def test_every_token_arrives_unchanged_whatever_the_batch() -> None:
    assert_batch_invariant(packed_and_taken_back, (Q, S, IDS), batch_sizes=QUICK_BATCH_SIZES)


def test_rows_taken_from_the_batchs_load_are_noticed() -> None:
    must_detect(rows_of_the_mean_load, (Q, S, IDS), batch_sizes=QUICK_BATCH_SIZES)


def test_order_within_an_expert_does_not_see_later_tokens() -> None:
    def places(count: int) -> torch.Tensor:
        packed = pack_tokens(Q[:count].view(torch.float8_e4m3fn), S[:count], IDS[:count], num_experts=NUM_EXPERTS)
        return torch.where(packed.slots >= 0, packed.slots - packed.offsets[IDS[:count].clamp(min=0)], -1)

    for count in range(7):
        assert places(count).tolist() == places(6)[:count].tolist()
