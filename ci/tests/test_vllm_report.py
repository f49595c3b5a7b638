"""Records of profile h200, put together: everything that differs, is missing or shows nothing must be found."""

from __future__ import annotations

import copy
import dataclasses
import html
import io
import pathlib

import pytest
from rich.console import Console

from aligned_e2e import vllm_engine, vllm_report
from aligned_e2e.html_report import render
from aligned_e2e.report import check_report
from aligned_e2e.vllm_engine import ENGINES, FIRST, Engine, Schedule
from aligned_e2e.vllm_report import EXTRA_PARTS

CI = pathlib.Path(__file__).parents[1]

REQUESTS = [f"r{i:02d}" for i in range(8)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The same engines with fewer requests and tokens, which are the same to a merge."""
    for name, engine in ENGINES.items():
        fewer = {"requests": engine.requests // 6, "max_tokens": engine.max_tokens // 6}
        monkeypatch.setitem(ENGINES, name, dataclasses.replace(engine, **fewer))
    monkeypatch.setattr(vllm_report, "TOKENS_REQUIRED", 9 * 8 * 8)


def attestation(hooks="ours"):
    return {
        "digest": "d",
        "aligned": hooks == "ours",
        "partial": False,
        "packages": dict.fromkeys(vllm_engine.PACKAGES, "0.1.0"),
        "hooks": {name: {"patches": []} for name in vllm_engine.PACKAGES} if hooks == "ours" else {},
        "native": {"bi_kernels": {"sha256": "1", "loaded": hooks == "ours"}},
        "environment": {"VLLM_BATCH_INVARIANT": "1"} if hooks in ("ours", "none") else {},
    }


def record(name):
    """What the process of one engine writes, as a list of its ranks."""
    engine = ENGINES.get(name, Engine({}, (Schedule("packed"),), requests=8, max_tokens=8))
    ranks = []
    for rank in range(engine.ranks):
        schedules = []
        for number, schedule in enumerate(engine.schedules):
            names = REQUESTS[: engine.requests]
            names = names[rank :: engine.ranks] if not schedule.idle else names * (rank == 0)
            shift = number if engine.hooks == "none" else 10 * (schedule.weights == "b")
            shift += 20 * (schedule.weights == "heads32")
            row = {
                key: [value + i + shift for i in range(engine.max_tokens)]
                for key, value in (("tokens", 5), ("logprobs", -99), ("digests", 7))
            }
            schedules.append(
                {
                    "schedule": schedule.name,
                    "seconds": 1.0,
                    "did": dict.fromkeys(vllm_report.COUNTERS, 1),
                    "contradictions": [],
                    "requests": {name: copy.deepcopy(row) for name in names},
                }
            )
        found = None if engine.hooks == "absent" else attestation(engine.hooks)
        if engine.hooks == "ours":
            found["environment"] |= engine.environment
        ranks.append(
            {
                "part": name,
                "gpu": "H200",
                "gpus": 2,
                "date": "2026-01-01",
                "versions": {"torch": "2", "vllm": "0.26.0", "triton": "3"},
                "attestation": found,
                "schedules": schedules,
            }
        )
        if name.startswith("reload"):
            fingerprints = [[schedule.weights, f"of {schedule.weights}"] for schedule in engine.schedules]
            ranks[-1]["reload"] = {"tensors": 9, "moved": [], "seconds": [2.0], "fingerprints": fingerprints}
    return ranks


def sound():
    """Records of a run without a fault, by part."""
    extra = {"actor b": record("actor b"), "sabotage": record("sabotage")}
    extra["sabotage"][0]["sabotages"] = [{"name": "a hook off", "caught": True, "detail": "by nobody"}]
    return {name: record(name) for name in ENGINES} | extra


def merged(folder, records, **options):
    for name, ranks in records.items():
        for rank, content in enumerate(ranks):
            vllm_engine.write_json(vllm_report.record_of(folder, name, rank), content)
    report = vllm_report.merge(folder, **({"profile": "h200", "gpus": 2} | options))
    vllm_report.print_report(report, Console(file=io.StringIO()))
    return report


def row_of(records, engine, schedule=0, request="r01", rank=0):
    return records[engine][rank]["schedules"][schedule]["requests"][request]


def test_equal_records_are_aligned(tmp_path):
    report = merged(tmp_path, sound())
    assert report["failures"] == []
    assert (report["tokens_compared"], report["tokens_different"]) == (9 * 8 * 8, 0)
    assert len(report["runs"]) == 8
    assert [actor["tokens_compared"] for actor in report["actors"]] == [8 * 8, 8 * 8]
    assert report["stock"]["share_different"] == 1
    assert report["off"]["equal"]
    assert report["reload"]["tokens_compared"] == 3 * 4 * 5
    assert report["reload"]["tokens_changed_by_new_weights"] == 4 * 5
    assert [row["tokens_compared"] for row in report["two_gpus"]] == [4 * 8] * 4
    assert (report["heads"]["tokens_compared"], report["heads"]["tokens_different"]) == (2 * 4 * 5, 0)
    path = tmp_path / "report.json"
    vllm_report.write_report(path, report)
    assert check_report(path) == []


@pytest.mark.parametrize(("field", "value"), [("tokens", 7), ("logprobs", 0), ("digests", 0), (None, None)], ids=str)
@pytest.mark.parametrize(
    ("engine", "schedule", "says"),
    [
        ("preempted", 0, "preempted: 1 of"),
        (FIRST, 3, "alone: 1 of"),
        ("prefix cache", 1, "prefix cache, warm: 1 of"),
        ("actor", 0, "actor a: 1 of"),
        ("actor b", 0, "actor b: 1 of"),
        ("reload", 0, "reload: A before: 1 of"),
        ("reload", 1, "reload: B after A against B cold: 1 of"),
        ("reload", 2, "reload: A after B: 1 of"),
        ("two GPUs, DeepEP", 0, "EP 2, DeepEP low latency: 1 of"),
        ("32 heads", 1, "32 heads, five at a time: 1 of"),
        ("32 heads", 2, "32 heads, recomputed: 1 of"),
    ],
)
def test_one_changed_value_is_found(tmp_path, engine, schedule, says, field, value):
    records = sound()
    row = row_of(records, engine, schedule, rank=int(engine.startswith("two")))
    if field is not None:
        row[field][1] = value
    else:  # a token too few
        for values in row.values():
            del values[-1]
    (failure,) = merged(tmp_path, records)["failures"]
    assert failure.startswith(says)
    assert "first r01[" in failure


@pytest.mark.parametrize("part", ["preempted", "actor", "reload", "two GPUs, NCCL"])
def test_a_request_that_was_not_served_is_found(tmp_path, part):
    records = sound()
    rank = len(records[part]) - 1
    del records[part][rank]["schedules"][0]["requests"]["r03"]
    (failure,) = merged(tmp_path, records)["failures"]
    assert f"{ENGINES[part].max_tokens} of" in failure
    assert "against" in failure


def test_one_difference_where_nothing_may_differ_is_found_with_the_flag_off(tmp_path):
    records = sound()
    for schedule in (0, 1):
        row_of(records, "off", schedule)["digests"][1] = 0
    (failure,) = merged(tmp_path, records)["failures"]
    assert failure.startswith("flag unset")
    assert "r01[1]" in failure


def test_requests_that_stock_does_not_repeat_say_nothing(tmp_path):
    records = sound()
    row_of(records, "off", 1)["digests"][1] = 0
    report = merged(tmp_path, records)
    assert (report["failures"], report["off"]["requests_that_do_not_repeat"]) == ([], 1)
    for request in REQUESTS[: ENGINES["off"].requests]:
        row_of(records, "off", 1, request)["digests"][1] = 0
    assert "flag unset" in merged(tmp_path / "none repeats", records)["failures"][0]


@pytest.mark.parametrize("counter", vllm_report.REQUIRED)
def test_a_counter_of_zero_is_a_failure(tmp_path, counter):
    records = sound()
    for ranks in records.values():
        for schedule in (schedule for record in ranks for schedule in record["schedules"]):
            schedule["did"][counter] = 0
    assert merged(tmp_path, records)["failures"] == [f"vacuous: {counter} is 0"]


def break_stock(records):
    records["stock"][0]["schedules"][1]["requests"] = copy.deepcopy(records["stock"][0]["schedules"][0]["requests"])


def break_reload_addresses(records):
    records["reload"][0]["reload"]["moved"] = ["layers.0 moved"]


def break_reload_fingerprints(records):
    records["reload"][0]["reload"]["fingerprints"][1][1] = "of another"


def break_reload_weights(records):
    for part, schedule in (("reload", 1), ("reload, cold", 0)):
        records[part][0]["schedules"][schedule]["requests"] = records["reload"][0]["schedules"][0]["requests"]


def break_rows(records):
    records["preempted"][0]["schedules"][0]["contradictions"] = ["request 3, after 9 tokens"]


def break_sabotage(records):
    records["sabotage"][0]["sabotages"][0]["caught"] = False


def break_attestation(records):
    records["piecewise"][0]["attestation"]["packages"] = {}


def break_stock_hooks(records):
    records["stock"][0]["attestation"]["hooks"] = {"bi-kernels": {}}


def break_aligned(records):
    for ranks in records.values():
        for content in ranks:
            if content["attestation"] and content["attestation"]["aligned"]:
                content["attestation"]["aligned"] = False


def break_absent(records):
    records["off, without us"][0]["attestation"] = attestation("inert")


def break_gpu(records):
    records["actor"][0]["gpu"] = "another"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (break_stock, "vacuous: without the hooks only 0.0% differ"),
        (break_reload_addresses, "reload: 1 tensors moved, first layers.0 moved"),
        (break_reload_fingerprints, "reload: fingerprints of b differ"),
        (break_reload_weights, "vacuous: the new weights changed no token"),
        (break_rows, "the same row twice, with other bits: preempted, request 3, after 9 tokens"),
        (break_sabotage, "sabotage a hook off: not caught"),
        (break_attestation, "parts of different installations, by their attestations"),
        (break_stock_hooks, "stock: expected no hooks, found bi-kernels"),
        (break_aligned, "graphs: its attestation does not say aligned"),
        (break_absent, "off, without us: expected no attestation"),
        (break_gpu, "parts of different installations, by their versions or GPUs"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_other_fault_is_found(tmp_path, fault, says):
    records = sound()
    fault(records)
    assert any(failure.startswith(says) for failure in merged(tmp_path, records)["failures"])


@pytest.mark.parametrize("part", [*ENGINES, "actor b", "sabotage"])
def test_a_part_that_is_missing_is_a_failure(tmp_path, part):
    records = sound()
    del records[part]
    assert f"{part}: not run" in merged(tmp_path, records)["failures"]


def test_on_one_gpu_pairs_are_skipped_and_the_report_says_why(tmp_path):
    records = {name: ranks for name, ranks in sound().items() if len(ranks) == 1}
    for ranks in records.values():
        ranks[0]["gpus"] = 1
    report = merged(tmp_path, records, gpus=0)
    assert report["failures"] == []
    assert {row["reason"] for row in report["two_gpus"]} == {"this machine has one GPU, and 2 are needed"}
    assert "EP 2, NCCL" in [row["what"] for row in report["not_run"]]


def test_pairs_of_an_older_build_are_refused(tmp_path):
    """Records that a machine with two GPUs left earlier do not stand in for those that one GPU cannot make."""
    records = sound()
    for ranks in records.values():
        for content in ranks:
            if len(ranks) == 1:
                content["gpus"] = 1
            else:
                content["attestation"]["native"]["bi_kernels"]["sha256"] = "of the build before"
    failures = merged(tmp_path, records, gpus=1)["failures"]
    assert len(failures) == 2
    for what, failure in zip(("attestations", "libraries"), failures, strict=True):
        assert failure.startswith(f"parts of different installations, by their {what}")
        assert "two GPUs, NCCL, two GPUs, DeepEP" in failure


def test_the_transport_may_differ_between_parts_and_nothing_else(tmp_path):
    records = sound()
    records["two GPUs, NCCL"][0]["attestation"]["environment"]["VLLM_DS4_DECODE_KERNEL"] = "sparse"
    (failure,) = merged(tmp_path, records)["failures"]
    assert "two GPUs, NCCL" in failure


def test_suites_that_ran_beside_it_are_reported(tmp_path):
    (tmp_path / "suite-bi-reload.xml").write_text(
        '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10"/></testsuites>'
    )
    report = merged(tmp_path, sound())
    assert report["suites"] == [{"package": "bi-reload", "passed": 4, "failed": 3, "skipped": 3}]
    assert report["failures"] == ["suite of bi-reload: 3 tests failed"]


def test_every_part_has_its_place_in_report_page_and_readme(tmp_path):
    records = sound() | {"cost": record("cost")}
    records["cost"][0]["cost"] = [{"workload": "decode", "batch": 8, "overhead_percent": 1.0}]
    report = merged(tmp_path, records)
    parts = [*ENGINES, *EXTRA_PARTS]
    assert {part["part"] for part in report["parts"]} == set(parts)
    page = html.unescape(render(report, source="report.json"))
    readme = (CI / "README.md").read_text()
    for part in parts:
        assert f">{part}<" in page
        assert f"`{part}`" in readme
        without = merged(tmp_path / part, {name: ranks for name, ranks in records.items() if name != part})
        reasons = {row["what"] for row in without["not_run"]} | {text.partition(":")[0] for text in without["failures"]}
        assert part in reasons
    shown = [row["name"] for key in ("two_gpus", "actors") for row in report[key]]
    shown += [row["name"] for key in ("reload", "heads") for row in report[key]["steps"]]
    shown += [row["schedule"] for row in report["runs"]]
    assert len(shown) == len(set(shown))
    schedules = {schedule.name for engine in ENGINES.values() for schedule in engine.schedules}
    told = {"together", "actor a", "32 heads", "stock", "stock, recomputed", "off", "off, again", "without us",
            "without us, again", "reload: A", "reload: B after A", "reload: A again", "reload: B cold"}  # fmt: skip
    assert schedules - set(shown) == told  # the references, and what has rows or numbers of other names


def test_nothing_at_all(tmp_path):
    report = merged(tmp_path, {})
    assert report["failures"]
    assert report["tokens_compared"] == 0


def test_quick(tmp_path):
    row = {"tokens": [1], "logprobs": [2], "digests": [3]}
    first, again = (
        {"schedule": name, "seconds": 1.0, "did": {}, "contradictions": [], "requests": {"r00": dict(row)}}
        for name in ("quick", "quick, recomputed")
    )
    content = record("preempted")[0] | {"part": "quick", "schedules": [first, again]}
    vllm_engine.write_json(vllm_report.record_of(tmp_path, "quick"), content)
    stale = record("sabotage")[0]
    stale["attestation"]["packages"] = {}
    vllm_engine.write_json(
        vllm_report.record_of(tmp_path, "sabotage"), stale
    )  # of the whole profile, and another build
    report = vllm_report.merge_quick(tmp_path, profile="h200")
    assert (report["failures"], report["tokens_compared"], report["quick"]) == ([], 1, True)
    assert list(report["attestations"]) == ["quick"]
    whole = merged(tmp_path / "whole", sound() | {"quick": [content]})
    assert (whole["failures"], whole["tokens_compared"]) == ([], 9 * 8 * 8)
    assert whole["quick_test"]["tokens_compared"] == 1
    again["requests"]["r00"]["logprobs"] = [4]
    vllm_engine.write_json(vllm_report.record_of(tmp_path, "quick"), content)
    failures = merged(tmp_path / "and differs", sound() | {"quick": [content]})["failures"]
    assert [failure.partition(":")[0] for failure in failures] == ["quick, recomputed"]
    assert len(vllm_report.merge_quick(tmp_path, profile="h200")["failures"]) == 1
    assert vllm_report.merge_quick(tmp_path / "nothing", profile="h200")["failures"] == ["quick: not run"]
