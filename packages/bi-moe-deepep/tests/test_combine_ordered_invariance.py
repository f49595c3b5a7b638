from __future__ import annotations

import torch

from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, must_detect
from bi_moe_deepep import combine_ordered

GENERATOR = torch.Generator().manual_seed(0)
EXPERT_OUT = torch.randn(8, 16, 48, generator=GENERATOR).bfloat16()
SLOTS = torch.stack([torch.randperm(128, generator=GENERATOR)[:6] for _ in range(5)]).int()
SLOTS[3, 2] = -1
WEIGHTS = torch.rand(5, 6, generator=GENERATOR)


def combined(slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return combine_ordered(EXPERT_OUT, slots, weights, out_dtype=torch.float32)


def test_rows_do_not_depend_on_the_batch_with_ids() -> None:
    ids = torch.where(SLOTS % 3 == 0, -1, 7).int()
    assert_batch_invariant(
        lambda s, w, i: combine_ordered(EXPERT_OUT, s, w, topk_ids=i, out_dtype=torch.float32),
        (SLOTS, WEIGHTS, ids),
        batch_sizes=QUICK_BATCH_SIZES,
    )


def in_order_of_arrival(slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Batch-dependent on purpose: atomics add whichever expert is done first, and that depends on the load."""
    turn = len(slots) % slots.shape[1]
    return combined(slots.roll(turn, 1), weights.roll(turn, 1))


def test_rows_do_not_depend_on_the_batch() -> None:
    assert_batch_invariant(combined, (SLOTS, WEIGHTS), batch_sizes=(*QUICK_BATCH_SIZES, 257, 513))


def test_an_order_that_depends_on_the_batch_is_noticed() -> None:
    must_detect(in_order_of_arrival, (SLOTS, WEIGHTS))
