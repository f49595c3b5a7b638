"""The end-to-end comparison in small: it finds nothing where nothing is wrong, and what is wrong where something is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import bi_kernels as bk
import bi_moe_deepep as moe
import bi_reload as reload
import bi_sparse_attn as sparse
from aligned_e2e import model as model_module
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


class Sabotaged:
    """A package as the model sees it, with some functions replaced."""

    def __init__(self, package: ModuleType, **replaced: Callable[..., Any]) -> None:
        self._package, self._replaced = package, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._package, name)


def split_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """K in one piece or two, by the number of rows."""
    if x.shape[0] >= 8:
        return bk.fixed_order_mm(x, weight)
    first, second = (bk.fixed_order_mm(a, b) for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True))
    return first + second


def descending_in_decode(
    logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, top_k: int, *, out: torch.Tensor
) -> torch.Tensor:
    """The right set of entries in another order, for few rows only."""
    sparse.top_k_per_row_prefill(logits, starts, ends, top_k, out=out)
    if out.shape[0] < 8:
        for row in out:
            row[row >= 0] = row[row >= 0].flip(0)
    return out


def bf16_in_decode(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Router logits stored in bfloat16, for few rows only."""
    logits = moe.router_gate_logits(x, weight)
    return logits.bfloat16().float() if x.shape[0] < 8 else logits


def stale(dst: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """The broadcast weight of another update."""
    return reload.refresh_mhc_broadcast_(dst, fn * 1.01)


SABOTAGES = {
    "K split by rows": ("bk", Sabotaged(bk, fixed_order_mm=split_by_rows), (4, "logits")),
    "unsorted indices": ("sparse", Sabotaged(sparse, top_k_per_row_prefill=descending_in_decode), (1, "top_k")),
    "bf16 router logits": ("moe", Sabotaged(moe, router_gate_logits=bf16_in_decode), (0, "router logits")),
    "stale mHC broadcast": ("reload", Sabotaged(reload, refresh_mhc_broadcast_=stale), (0, "mhc_pre, attention")),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_found_and_located(
    name: str, sides: Sides, together: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, sabotaged, expected = SABOTAGES[name]
    with monkeypatch.context() as patch, recording(Trace()) as rollout:
        patch.setattr(model_module, package, sabotaged)
        served = serve(sides, TOGETHER)
    with recording(Trace()) as actor:
        found_there = recompute(sides, OLD_SEED, served.tokens)
    # Order inside a block of 64 entries cannot show in correctly rounded sums: that fault only the trace can see.
    compared = compare(name, served, served.tokens, found_there.logprobs, found_there.digests)
    assert (compared.tokens_different > 0) == (name != "unsorted indices")
    found = first_divergence(actor, rollout)
    assert found is not None
    assert (found.layer, found.op) == expected


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
