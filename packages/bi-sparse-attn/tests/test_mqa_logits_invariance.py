"""A token's scores alone and among neighbours, bit for bit."""

from __future__ import annotations

import torch

from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, must_detect
from bi_sparse_attn import mqa_logits

HEADS, KEYS = 4, 70
GENERATOR = torch.Generator().manual_seed(0)
K = torch.randn(KEYS, 128, generator=GENERATOR).to(torch.float8_e4m3fn)
K_SCALE = torch.rand(KEYS, generator=GENERATOR)


def rows() -> tuple[torch.Tensor, ...]:
    """Queries as raw codes: what a neighbour holds, NaN codes included, is then up to the driver's float rows."""
    q = torch.randn(4, HEADS, 128, generator=GENERATOR)
    weights = torch.randn(4, HEADS, generator=GENERATOR)
    starts = torch.tensor([0, 3, 30, 70], dtype=torch.int32)
    ends = torch.tensor([70, 60, 31, 70], dtype=torch.int32)
    return q, weights, starts, ends


def score(q: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return mqa_logits(q.to(torch.float8_e4m3fn), K, K_SCALE, weights, starts, ends)


def score_split_by_tokens(q: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> object:
    """Heads summed from the other end for larger batches."""
    if len(q) > 16:
        q, weights = q.flip(1), weights.flip(1)
    return score(q, weights, starts, ends)


def test_scores_are_batch_invariant() -> None:
    assert_batch_invariant(score, rows(), batch_sizes=QUICK_BATCH_SIZES)


def test_the_driver_sees_an_order_of_heads_that_follows_the_batch() -> None:
    must_detect(score_split_by_tokens, rows(), batch_sizes=QUICK_BATCH_SIZES)
