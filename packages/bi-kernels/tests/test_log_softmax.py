"""Log-softmax: values, the one implementation behind both functions, non-finite rows, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bi_kernels.log_softmax import log_softmax, selected_logprobs
from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.testing import assert_bitwise_equal, bit_view
from bi_kernels.testing.strategies import tied_scores


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("columns", [1, 2, 1000, 4097])
def test_error_against_float64(columns: int, scale: float) -> None:
    logits = torch.randn(5, columns) * scale
    got = log_softmax(logits).double()
    truth = torch.log_softmax(logits.double(), -1)
    # Relative error of the sum: one ulp per exponential, one rounding per level of the tree; its logarithm then adds
    # 3 ulp, and so do two subtractions, of numbers no larger than the result or the logarithm.
    levels = math.ceil(math.log2(columns)) + 2
    largest = logits.double().amax(-1, keepdim=True)
    log_sum = (logits.double() - largest).exp().sum(-1, keepdim=True).log()
    bound = 2.0**-24 * levels + 2.0**-22 * log_sum + 2.0**-23 * ((logits - largest).abs() + truth.abs())
    assert ((got - truth).abs() <= bound).all()


def test_selected_is_the_gather_of_all() -> None:
    logits = torch.randn(40, 5000) * 5
    ids = torch.randint(5000, (40,))
    want = log_softmax(logits).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    assert_bitwise_equal(selected_logprobs(logits, ids), want)
    assert_bitwise_equal(selected_logprobs(logits, ids.int()), want)


def test_raw_logprobs_are_not_renormalised() -> None:
    # B24: after a top-2 cut the first would be -0.3133, 0.1269 nat above the model's own number.
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert abs(selected_logprobs(logits, torch.tensor([0])).item() - -0.440190) < 1e-6


def test_non_finite_rows() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor(
        [[1.0, 2.0, -inf], [1.0, nan, 2.0], [1.0, inf, 2.0], [-inf, -inf, -inf], [-inf, 0.0, -inf], [inf, inf, 0.0]]
    )
    got = log_softmax(logits)
    assert got[0, 2] == -inf
    assert torch.isfinite(got[0, :2]).all()
    assert (bit_view(got[[1, 2, 3, 5]]) == 0x7FC00000).all()
    assert got[4].tolist() == [-inf, 0.0, -inf]
    ids = torch.tensor([2, 0, 1, 0, 1, 2])
    assert_bitwise_equal(selected_logprobs(logits, ids), got[torch.arange(6), ids])


@given(st.tuples(st.integers(1, 4), st.integers(1, 7)).flatmap(lambda shape: tied_scores(shape)))
def test_selected_equals_all_on_ties_and_specials(logits: torch.Tensor) -> None:
    whole = log_softmax(logits)
    for column in range(logits.shape[1]):
        ids = torch.full((len(logits),), column)
        assert_bitwise_equal(selected_logprobs(logits, ids), whole[:, column])
    assert (whole[~whole.isnan()] <= 0).all()


def test_extreme_spread() -> None:
    logits = torch.tensor([[0.0, -1000.0, 3e38], [-3e38, -3e38, -3e38]])
    got = log_softmax(logits)
    assert got[0, 2] == 0.0
    assert got[0, 0] == -3e38
    assert (got[1] - -math.log(3)).abs().max() < 1e-6


def test_empty_and_strided() -> None:
    assert log_softmax(torch.empty(0, 7)).shape == (0, 7)
    assert selected_logprobs(torch.empty(0, 7), torch.empty(0, dtype=torch.long)).shape == (0,)
    logits = torch.randn(30, 6)
    assert_bitwise_equal(log_softmax(logits.T[:, ::2]), log_softmax(logits.T[:, ::2].contiguous()))


LOGITS, IDS = torch.zeros(3, 5), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("logits", "ids", "message"),
    [
        (LOGITS.bfloat16(), IDS, "logits: expected dtype float32"),
        (LOGITS[0], IDS, "logits: expected shape"),
        (LOGITS[:, :0], IDS, "logits: expected at least one column"),
        (LOGITS, IDS.float(), "token_ids: expected dtype int32 or int64"),
        (LOGITS, IDS.unsqueeze(-1), r"token_ids: expected shape \(3\)"),
        (LOGITS, IDS[:2], r"token_ids: expected shape \(3\)"),
        (LOGITS, IDS + 5, "token_ids: expected ids from 0 to 4, got ids from 5 to 5"),
        (LOGITS, IDS - 1, "got ids from -1 to -1"),
        (LOGITS, torch.empty_like(IDS, device="meta"), "token_ids: expected device cpu"),
    ],
)
def test_bad_arguments(logits: torch.Tensor, ids: torch.Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        selected_logprobs(logits, ids)
    if message.startswith("logits"):
        with pytest.raises(ArgumentError, match=message):
            log_softmax(logits)
