"""Profile h200 without a GPU: its requests, and a comparison of records that finds what it must find."""

from __future__ import annotations

import copy
import io
import json

import pytest
from rich.console import Console

from aligned_e2e import h200
from aligned_e2e.vllm_engine import ENGINES, MAX_MODEL_LEN, make_prompts

ROW = {"tokens": [5, 6], "logprobs": [-1, -2], "digests": [11, 12]}


def record(engine, *, attestation="same"):
    """What the process of one engine writes."""
    schedules = []
    for schedule in ENGINES[engine].schedules:
        row = ROW | ({"digests": None} if schedule.recompute else {})
        requests = {"r00": copy.deepcopy(row), "r01": copy.deepcopy(row)}
        schedules.append({"schedule": schedule.name, "seconds": 1.0, "did": {}, "requests": requests})
    return {"engine": engine, "attestation": {"digest": attestation}, "schedules": schedules}


def merged(tmp_path, records):
    for engine, content in records.items():
        h200._record(tmp_path, engine).write_text(json.dumps(content))
    return h200.merge(tmp_path, Console(file=io.StringIO()))


def test_equal_records_are_equal(tmp_path):
    result = merged(tmp_path, {engine: record(engine) for engine in ENGINES})
    schedules = sum(len(engine.schedules) for engine in ENGINES.values())
    assert schedules >= 8
    assert (result["failures"], result["tokens_different"]) == ([], 0)
    assert result["tokens_compared"] == 4 * schedules


@pytest.mark.parametrize(("field", "value"), [("tokens", 7), ("logprobs", 0), ("digests", 0), (None, None)], ids=str)
def test_one_changed_value_is_found(tmp_path, field, value):
    records = {engine: record(engine) for engine in ENGINES}
    row = records["preempted"]["schedules"][0]["requests"]["r01"]
    if field is None:  # a token too few
        for values in row.values():
            del values[1]
    else:
        row[field][1] = value
    result = merged(tmp_path, records)
    assert result["tokens_different"] == 1
    (failure,) = result["failures"]
    assert failure.startswith("preempted: 1 differ, first r01[1]")


def test_an_actor_has_no_digests_of_its_own(tmp_path):
    records = {engine: record(engine) for engine in ENGINES}
    records["actor"]["schedules"][0]["requests"]["r00"]["logprobs"][0] = 9
    assert merged(tmp_path, records)["tokens_different"] == 1


def test_parts_of_two_installations_are_refused(tmp_path):
    records = {engine: record(engine) for engine in ENGINES} | {"piecewise": record("piecewise", attestation="other")}
    (failure,) = merged(tmp_path, records)["failures"]
    assert "different installations" in failure


def test_a_part_that_is_missing_is_a_failure(tmp_path):
    records = {engine: record(engine) for engine in ENGINES if engine != "preempted"}
    assert merged(tmp_path, records)["failures"] == ["preempted: not run"]
    assert "graphs: not run" in merged(tmp_path / "nothing", {})["failures"]


def test_prompts_cross_the_boundaries_and_share_what_a_cache_can_share():
    prompts = make_prompts(8192, count=48, max_tokens=52)
    assert prompts == make_prompts(8192, count=48, max_tokens=52)
    lengths = [len(prompt.tokens) for prompt in prompts]
    assert max(lengths) + 52 < MAX_MODEL_LEN
    assert sum(length > 2048 for length in lengths) >= 10  # past 4 * index_topk
    assert {1, 127, 128, 129, 2047, 2048, 2049} <= set(lengths)
    assert sum(p.tokens[:512] == prompts[5].tokens[:512] for p in prompts) == 12
    halves = [(p.tokens[: len(p.tokens) // 2], p.tokens[(len(p.tokens) + 1) // 2 :]) for p in prompts]
    assert sum(len(left) >= 1300 and left == right for left, right in halves) == 6
    assert all(2 <= token < 8192 for prompt in prompts for token in prompt.tokens)
