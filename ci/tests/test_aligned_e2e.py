"""The end-to-end comparison in small: it finds nothing where nothing is wrong, and what is wrong where something is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import bi_kernels as bk
import bi_reload as reload
from aligned_e2e import model as model_module
from aligned_e2e.config import Deployment, ModelConfig
from aligned_e2e.model import DeepseekV4
from aligned_e2e.prompts import load_book, make_requests
from aligned_e2e.report import compare
from aligned_e2e.rollout import Schedule
from aligned_e2e.sides import NEW_SEED, OLD_SEED, Served, Sides, recompute, send_weights, serve

TOGETHER = Schedule("together", max_num_seqs=4, max_num_batched_tokens=512)
CHUNKED = Schedule("chunked", max_num_seqs=2, max_num_batched_tokens=120, order_seed=1, ep_ranks=2)


@pytest.fixture(scope="module")
def sides() -> Sides:
    vocabulary, book = load_book()
    config = ModelConfig(vocab_size=vocabulary.size)
    return Sides(config, Deployment(), make_requests(book, (1, 40, 129, 290), 3))


@pytest.fixture(scope="module")
def together(sides: Sides) -> Served:
    return serve(sides, TOGETHER)


def test_book_is_real_text_and_prompts_reach_past_the_topk_threshold(sides: Sides) -> None:
    threshold = 4 * sides.config.index_topk
    assert max(len(r.prompt) for r in sides.requests) > threshold
    assert len({t for r in sides.requests for t in r.prompt}) > 100
    assert len({r.seed for r in sides.requests}) == len(sides.requests)


def test_other_schedules_and_the_actor_give_the_same_bits(sides: Sides, together: Served) -> None:
    chunked = serve(sides, CHUNKED)
    assert chunked.plan.prefill_splits > 0
    assert chunked.plan.mixed_steps > 0
    assert chunked.tokens == together.tokens
    assert chunked.logprobs == together.logprobs
    assert recompute(sides, OLD_SEED, together.tokens).logprobs == together.logprobs


def test_a_product_that_follows_the_batch_is_found(
    sides: Sides, together: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        pieces = 2 if x.shape[0] < 8 else 1  # logits of one step against those of the actor's pack
        parts = [bk.fixed_order_mm(a, b) for a, b in zip(x.chunk(pieces, 1), weight.chunk(pieces, 1), strict=True)]
        return parts[0] if pieces == 1 else parts[0] + parts[1]

    fake = type("FakeKernels", (), {"__getattr__": lambda self, name: getattr(bk, name)})()
    fake.fixed_order_mm = split_by_rows
    monkeypatch.setattr(model_module, "bk", fake)
    served = serve(sides, TOGETHER)
    row = compare("sabotaged", served, served.tokens, recompute(sides, OLD_SEED, served.tokens).logprobs)
    assert row.tokens_different > 0
    assert row.first_difference is not None


def test_compare_sees_one_bit_one_token_and_one_missing_token(together: Served) -> None:
    def row(**changes: object) -> int:
        return compare(
            "x", dataclasses.replace(together, **changes), together.tokens, together.logprobs
        ).tokens_different

    assert row() == 0
    name = next(iter(together.tokens))
    bits = {**together.logprobs, name: [together.logprobs[name][0] ^ 1, *together.logprobs[name][1:]]}
    assert row(logprobs=bits) == 1
    tokens = {**together.tokens, name: [together.tokens[name][0] ^ 1, *together.tokens[name][1:]]}
    assert row(tokens=tokens) == 1
    shorter = {name: together.tokens[name][:-1]}, {name: together.logprobs[name][:-1]}
    assert row(tokens=together.tokens | shorter[0], logprobs=together.logprobs | shorter[1]) == 1


def test_half_finished_reload_is_not_served(sides: Sides) -> None:
    model = DeepseekV4(sides.config, sides.deployment, sides.checkpoint(OLD_SEED))
    before = reload.weight_fingerprint(dict(model.named_parameters()))
    new = sides.checkpoint(NEW_SEED)
    update = reload.LayerwiseReload(model, {name: reload.TensorSpec.of(t) for name, t in new.items()})
    update.begin()
    update.load_bucket({"norm.weight": new["norm.weight"]})
    with pytest.raises(bk.ReloadError, match="did not come"):
        update.finish()
    update.abort()
    with pytest.raises(bk.ReloadError, match="must not be served"):
        reload.require_servable(model)
    send_weights(model, sides.checkpoint(OLD_SEED), bucket_seed=5, ledger=reload.AddressLedger().record(model))
    reload.require_servable(model)
    assert reload.weight_fingerprint(dict(model.named_parameters())) == before
