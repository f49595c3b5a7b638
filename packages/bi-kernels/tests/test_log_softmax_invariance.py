"""A row's log-probabilities do not depend on the other rows, whatever the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bi_kernels.log_softmax import log_softmax, selected_logprobs
from bi_kernels.reference.numerics import exp, log, tree_sum
from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, assert_bitwise_equal, must_detect, num_threads


def rows() -> torch.Tensor:
    return torch.randn(3, 500) * 4


def test_rows_are_independent() -> None:
    assert_batch_invariant(log_softmax, rows())


def test_selected_rows_are_independent() -> None:
    ids = torch.tensor([7, 499, 0])
    assert_batch_invariant(selected_logprobs, (rows(), ids), batch_sizes=QUICK_BATCH_SIZES)


def tree_from_batch(logits: torch.Tensor) -> torch.Tensor:
    # What a reduction does that gives a long row to more threads when there are few rows.
    shifted = logits - logits.amax(-1, keepdim=True)
    terms = exp(shifted)
    if len(logits) > 16:
        terms = torch.stack([tree_sum(part) for part in terms.chunk(4, -1)], -1)
    return shifted - log(tree_sum(terms)).unsqueeze(-1)


def padded_to_the_longest(logits: torch.Tensor) -> torch.Tensor:
    # A maximum over the batch instead of the row: mathematically a softmax's shift is free.
    shifted = logits - logits.nan_to_num(0.0, 0.0, 0.0).amax()
    return shifted - log(tree_sum(exp(shifted))).unsqueeze(-1)


@pytest.mark.parametrize("twin", [tree_from_batch, padded_to_the_longest])
def test_twins_are_caught(twin: Callable[[torch.Tensor], torch.Tensor]) -> None:
    must_detect(twin, rows(), batch_sizes=QUICK_BATCH_SIZES)


def test_one_or_seventeen_rows_of_the_real_vocabulary() -> None:
    # B23: 17 positions against each alone, on either thread count.
    logits = torch.randn(17, 129_280) * 3
    ids = torch.randint(129_280, (17,))
    whole = selected_logprobs(logits, ids)
    for count in (1, 2):
        with num_threads(count):
            for i in (0, 9, 16):
                assert_bitwise_equal(selected_logprobs(logits[i : i + 1], ids[i : i + 1]), whole[i : i + 1])
    assert_bitwise_equal(log_softmax(logits[4:6]).gather(-1, ids[4:6, None])[:, 0], whole[4:6])
