"""The end-to-end comparison in small: it finds nothing where nothing is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import bi_kernels as bk
import bi_reload as reload
from aligned_e2e.config import Deployment, ModelConfig
from aligned_e2e.model import DeepseekV4
from aligned_e2e.prompts import load_book, make_requests
from aligned_e2e.report import compare
from aligned_e2e.rollout import Schedule
from aligned_e2e.sides import NEW_SEED, OLD_SEED, Served, Sides, recompute, send_weights, serve
from bi_kernels.testing.trace import Trace, first_divergence, recording

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
    assert chunked.digests == together.digests
    actor = recompute(sides, OLD_SEED, together.tokens)
    assert actor.logprobs == together.logprobs
    assert actor.digests == together.digests


def test_traces_of_other_batchings_and_of_the_actor_agree(sides: Sides, together: Served) -> None:
    with recording(Trace()) as ours:
        serve(sides, TOGETHER)
    for run in (lambda: serve(sides, CHUNKED), lambda: recompute(sides, OLD_SEED, together.tokens)):
        with recording(Trace()) as theirs:
            run()
        assert first_divergence(ours, theirs) is None
        assert not theirs.contradictions
    assert len(ours.ops) > 40


def test_compare_sees_one_bit_one_digest_one_token_and_one_missing_token(together: Served) -> None:
    def row(**changes: Any) -> int:
        run = dataclasses.replace(together, **changes)
        return compare("x", run, together.tokens, together.logprobs, together.digests).tokens_different

    assert row() == 0
    name = next(iter(together.tokens))
    bits = {**together.logprobs, name: [together.logprobs[name][0] ^ 1, *together.logprobs[name][1:]]}
    assert row(logprobs=bits) == 1
    digests = {**together.digests, name: [together.digests[name][0] ^ 1, *together.digests[name][1:]]}
    assert row(digests=digests) == 1
    tokens = {**together.tokens, name: [together.tokens[name][0] ^ 1, *together.tokens[name][1:]]}
    assert row(tokens=tokens) == 1
    shorter = [of_all | {name: of_all[name][:-1]} for of_all in (together.tokens, together.logprobs, together.digests)]
    assert row(tokens=shorter[0], logprobs=shorter[1], digests=shorter[2]) == 1


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
