"""What the oracle needs, without transformers: the float32 policy, and a name for every tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from aligned_e2e import model, oracle, precision
from aligned_e2e.actor import recompute_logprobs
from aligned_e2e.checkpoint import make_checkpoint
from aligned_e2e.config import Deployment, ModelConfig
from aligned_e2e.findings import Agreement
from aligned_e2e.model import DeepseekV4
from aligned_e2e.prompts import load_book

SMALL = ModelConfig(vocab_size=2560, index_topk=16)


def test_every_tensor_has_a_name_there_and_none_is_lost() -> None:
    ours = make_checkpoint(SMALL, 0)
    theirs = oracle._renamed(SMALL, ours)
    count = sum(t.numel() for name, t in ours.items() if not name.endswith(".scale"))
    assert sum(t.numel() for t in theirs.values()) == count
    assert {t.dtype for t in theirs.values()} == {torch.float32, torch.int64}


def test_float32_policy_rounds_less_and_leaves_nothing_behind() -> None:
    vocabulary, book = load_book()
    config, deployment = replace(SMALL, vocab_size=vocabulary.size), Deployment()
    weights = make_checkpoint(config, 0)

    def logprobs() -> torch.Tensor:
        small = DeepseekV4(config, deployment, weights)
        return recompute_logprobs(small, deployment, {"t": (book[:1], book[1:150])})[0][0]

    real = logprobs()
    with precision.float32():
        exact = logprobs()
        assert torch.equal(exact, logprobs())
    distance = float((real - exact).abs().mean())
    assert 0.01 < distance < 0.5  # FP8's noise, and not another function
    assert torch.equal(real, logprobs())
    assert model.bk is precision.bk


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"mean_abs_logprob_diff": 2e-3}, ["limit"]),
        ({"mean_abs_logprob_diff": math.nan}, ["limit"]),
        ({"control_mean_abs_logprob_diff": 1e-6}, ["planted mistake"]),
        ({"tokens_past_topk_threshold": 0}, ["threshold"]),
    ],
)
def test_only_a_close_and_sensitive_comparison_counts(changes: dict[str, float], said: list[str]) -> None:
    agreement = replace(Agreement(1e-6, 0.1, 0.4, 900, 400), **changes)
    assert [next(w for w in said if w in problem) for problem in agreement.problems] == said
