"""Schedules that share blocks, cut prompts, lack pages or use several processes: same bits; faults must show."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import bi_reload as reload
from aligned_e2e import cpu, paged
from aligned_e2e.config import Deployment, ModelConfig
from aligned_e2e.model import DeepseekV4
from aligned_e2e.paged import BlockManager, BlockTables
from aligned_e2e.prompts import load_book, make_requests
from aligned_e2e.ranks import serve_ranks
from aligned_e2e.report import Report
from aligned_e2e.rollout import Schedule
from aligned_e2e.sides import (
    NEW_SEED,
    OLD_SEED,
    Served,
    Sides,
    make_engine,
    send_weights,
    serve,
    serve_again,
    serve_on,
)

CACHED = Schedule("cached", max_num_seqs=2, max_num_batched_tokens=300, prefix_caching=True, blocks=12)
BLOCK = Deployment().block


@pytest.fixture(scope="module")
def sides() -> Sides:
    """Two samples of one prompt that is longer than a block, one that parts from it inside the block, a short one."""
    vocabulary, book = load_book()
    requests = make_requests(book, (40, 265), 3, families=[(300, 300)])
    first = requests[2].prompt
    requests[1] = dataclasses.replace(requests[1], prompt=(*first[:100], *requests[1].prompt[100:]))
    return Sides(ModelConfig(vocab_size=vocabulary.size), Deployment(), requests)


@pytest.fixture(scope="module")
def together(sides: Sides) -> Served:
    return serve(sides, Schedule("together", max_num_seqs=4, max_num_batched_tokens=512, blocks=12))


def assert_same(run: Served, expected: Served) -> None:
    assert run.tokens == expected.tokens
    assert run.logprobs == expected.logprobs
    assert run.digests == expected.digests


def test_reused_blocks_give_the_same_bits_cold_and_warm(sides: Sides, together: Served) -> None:
    cold, warm = serve_again(sides, CACHED, sides.requests)
    assert_same(cold, together)
    assert_same(warm, together)
    assert cold.plan.cached_tokens == BLOCK  # the second sample of the long prompt
    assert warm.plan.cached_tokens == 3 * BLOCK
    assert warm.plan.rows == cold.plan.rows - 2 * BLOCK
    assert cold.plan.blocks_checked == 2
    assert warm.plan.blocks_changed == 0


def test_twin_that_knows_a_block_by_less_than_its_prefix_differs(
    sides: Sides, together: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beginning(tokens: Sequence[int], block: int, end: int) -> tuple[int, ...]:
        return (*tokens[:64], end)

    monkeypatch.setattr(paged, "prefix_key", beginning)
    cold, _ = serve_again(sides, CACHED, sides.requests[1:2])
    assert cold.digests["r01"] == together.digests["r01"]
    _, wrong = serve_again(sides, CACHED, sides.requests[1:2])
    assert wrong.digests["r02"] != together.digests["r02"]


def test_evicted_and_preempted_requests_give_the_same_bits(sides: Sides, together: Served) -> None:
    # Four requests want seven blocks.
    run = serve(sides, Schedule("preempted", max_num_seqs=4, max_num_batched_tokens=200, blocks=4))
    assert_same(run, together)
    assert run.plan.preemptions > 0
    tight = dataclasses.replace(CACHED, max_num_seqs=1, blocks=2, order_seed=1)
    run = serve(sides, tight)
    assert_same(run, together)
    assert run.plan.evictions > 0


def test_chunks_and_requests_alone_give_the_same_bits(sides: Sides, together: Served) -> None:
    run = serve(sides, Schedule("chunks", 4, 200, chunks=(1, 3, 127), alone=1, ep_ranks=4, blocks=12))
    assert_same(run, together)
    assert run.plan.prefill_splits >= 3 * 6  # 1, 3, 127, 1, 3, 127, and the rest
    assert run.plan.single_steps >= 3


def test_a_shared_block_whose_bytes_change_is_counted(sides: Sides) -> None:
    engine = make_engine(sides, sides.model(OLD_SEED), CACHED)
    assert serve_on(engine, sides.requests[2:3]).plan.blocks_changed == 0
    for part in ("window", "compressed", "index_k", "state"):
        memory = getattr(engine.caches.layers[1], part).view(torch.uint8)
        memory ^= 1
        before = engine.storage.blocks_changed
        engine.storage.check()
        assert engine.storage.blocks_changed == before + 1, part
        memory ^= 1
    engine.storage.check()
    assert engine.storage.blocks_changed == 4


def test_blocks_of_the_old_weights_must_be_forgotten(sides: Sides) -> None:
    some = sides.requests[2:3]
    new = serve_on(make_engine(sides, sides.model(NEW_SEED), CACHED), some)
    model = sides.model(OLD_SEED)
    engine = make_engine(sides, model, CACHED)
    serve_on(engine, some)
    ledger = reload.AddressLedger().record(model)
    send_weights(model, sides.checkpoint(NEW_SEED), bucket_seed=3, ledger=ledger)
    stale = serve_on(engine, some)  # the twin
    assert stale.digests != new.digests
    engine.reset_prefix_cache()
    fresh = serve_on(engine, some)
    assert_same(fresh, new)
    assert fresh.plan.cached_tokens == 0


@pytest.mark.parametrize("shares", [(1,), (2, 0, 1, 1)], ids=str)
def test_ranks_in_processes_give_the_same_bits(sides: Sides, together: Served, shares: tuple[int, ...]) -> None:
    run = serve_ranks(sides, Schedule("ranks", 4, 256, blocks=12), shares)
    assert_same(run, together)
    assert run.plan.ranks == len(shares)
    assert run.plan.empty_ranks == shares.count(0)


def test_a_rank_cannot_use_experts_that_are_not_its_own(sides: Sides) -> None:
    class Second:
        rank, world_size = 1, 2

    model = sides.model(OLD_SEED)
    before = {n: p.clone() for n, p in model.named_parameters()}
    model.join_group(Second())  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        same = parameter.view(torch.uint8) == before[name].view(torch.uint8)
        if ".experts." in name and name.endswith("weight"):
            assert bool(parameter[:4].float().isnan().all())
            assert bool(same[4:].all())
        else:
            assert bool(same.all())


def test_model_of_a_group_asks_it_for_the_largest_batch(sides: Sides) -> None:
    class Group:
        rank, world_size = 0, 1

        def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
            return [tuple(values), (70,), (0,)]

    model = DeepseekV4(sides.config, sides.deployment, sides.checkpoint(OLD_SEED))
    assert model.largest_batch(8) == 8
    model.join_group(Group())  # type: ignore[arg-type]
    assert model.largest_batch(8) == 70


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=150, derandomize=True)
def test_no_page_has_two_owners_and_none_is_lost(data: st.DataObject) -> None:
    """Requests over two texts come, grow and go; pages belong to one request, or to all with the same prefix."""
    deployment, blocks = Deployment(), 7
    pages_per_block = BLOCK // deployment.window_page
    manager = BlockManager(deployment, blocks, seed=1, digest=lambda block, pages: block)
    running: list[tuple[BlockTables, list[int], int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(("come", "grow", "go")))
        if action == "come":
            text, length = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 3 * BLOCK))
            tables, tokens = BlockTables(), [text] * length
            known = manager.share(tables, tokens)
            assert known < length
            running.append((tables, tokens, known))
        elif running:
            n = data.draw(st.integers(0, len(running) - 1))
            tables, tokens, computed = running[n]
            target = data.draw(st.integers(computed, len(tokens)))
            if action == "go":
                manager.release(tables)
                del running[n]
            elif manager.reserve(tables, target):
                manager.publish(tables, tokens, target)
                running[n] = tables, tokens, target
        owners: dict[int, set[tuple[int, ...]]] = {}
        private: list[int] = []
        for tables, tokens, _ in running:
            for i, block in enumerate(tables.blocks):
                if i < len(tables.shared):
                    owners.setdefault(block, set()).add(tuple(tokens[: (i + 1) * BLOCK]))
                    assert tables.window[i * pages_per_block : (i + 1) * pages_per_block] == list(
                        tables.shared[i].pages
                    )
                else:
                    private.append(block)
        assert all(len(prefixes) == 1 for prefixes in owners.values())
        assert len(private) == len(set(private))
        assert not owners.keys() & set(private)
        window = [set(tables.window[len(tables.shared) * pages_per_block :]) for tables, _, _ in running]
        assert all(not a & b for a, b in itertools.combinations(window, 2))
    for tables, _, _ in running:
        manager.release(tables)
    manager.forget()
    assert manager.describe_free() == f"{blocks * pages_per_block} pages and {blocks} blocks"


def test_requests_of_the_profile_are_whole_and_a_quarter_of_their_tokens_lies_past_the_topk_threshold() -> None:
    vocabulary, book = load_book()
    requests = make_requests(book, cpu.PROMPT_LENGTHS, cpu.MAX_TOKENS, cpu.FAMILIES)
    lengths = [*cpu.PROMPT_LENGTHS, *(length for family in cpu.FAMILIES for length in family)]
    assert [len(request.prompt) for request in requests] == lengths
    assert len(requests) * cpu.MAX_TOKENS >= 4000
    assert len(requests[::2]) * cpu.MAX_TOKENS >= 2000
    totals = [length + cpu.MAX_TOKENS for length in lengths]
    threshold = 4 * ModelConfig(vocab_size=vocabulary.size).index_topk
    assert 4 * sum(max(0, total - threshold) for total in totals) >= sum(totals)


def test_a_counter_of_zero_fails_the_report() -> None:
    report = Report("cpu", {}, {}, {}, {}, coverage={"preemptions": 3, "empty_ranks": 0, "unchanged": True})
    assert report.failures == ["vacuous: empty_ranks is 0"]
