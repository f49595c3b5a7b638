"""The page that people read: complete, self-contained, and never better than the report it was made from."""

from __future__ import annotations

import copy
import json
import pathlib
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from aligned_e2e.html_markup import Column, bar, table, tag
from aligned_e2e.html_report import main, render
from aligned_e2e.readme_table import END, START, block, rewritten
from aligned_e2e.report import ReportError
from aligned_e2e.report_view import load_report, with_baselines

# Numbers of no run: they have the shape of a report and are nobody's measurement.
_SCHEDULES = (
    ("together, shuffled", "graphs"), ("alone", "graphs"), ("five at a time", "graphs"),
    ("small budget, eager", "eager, small budget"), ("piecewise graphs", "piecewise"),
    ("prefix cache, cold", "prefix cache"), ("prefix cache, warm", "prefix cache"), ("preempted", "preempted"),
)  # fmt: skip
_OPS = ("compressor kv_score", "indexer top-k", "attention", "mhc_pre", "router logits", "experts")


def _attestation(digest: str, *, aligned: bool = True) -> dict[str, Any]:
    spaces = ("bi_kernels", "ds4_bi", "bi_moe_deepep", "bi_reload")
    native = {space: {"loaded": aligned, "sha256": space[0] * 64} for space in spaces}
    hooks = {"bi-kernels": {"version": "0.1.0", "patches": ["vllm.some.module:Layer"]}} if aligned else {}
    arithmetic = {"arch": "SM90", "scale_format": "FLOAT32_CEIL_UE8M0"}
    return {"digest": digest, "aligned": aligned, "hooks": hooks, "native": native, **arithmetic}


@pytest.fixture
def full() -> dict[str, Any]:
    """A report of profile h200 with every part, aligned."""
    return {
        "profile": "h200",
        "date": "2000-01-01",
        "gpu": {"name": "an invented GPU", "count": 2},
        "versions": {"vllm": "0.26.0", "torch": "2.11.0+cu130", "machine": "x86_64"},
        "reference": {"schedule": "together", "engine": "graphs", "seconds": 11.0, "did": {"steps": 299}},
        "runs": [
            {"schedule": s, "engine": e, "tokens_compared": 2496, "tokens_different": 0, "first_difference": None,
             "seconds": 12.5, "did": {"steps": 301, "preemptions": 9 * (s == "preempted")}}
            for s, e in _SCHEDULES
        ],
        "tokens_compared": 8 * 2496,
        "tokens_different": 0,
        "failures": [],
        "actors": [{"name": n, "tokens_compared": 2496, "tokens_different": 0} for n in "ab"],
        "coverage": {"preemptions": 9, "cached_tokens": 5120, "prefill_splits": 88, "graph_full": 410,
                     "graph_piecewise": 96, "graph_none": 301, "tokens_past_top_k": 15021},
        "stock": {"tokens": 2496, "tokens_different": 2433, "share_different": 0.9748, "max_abs_logprob_diff": 0.291,
                  "divergence": [[i % 5, op, (7 - i) / 22] for i, op in enumerate(_OPS)]},
        "reload": {
            "tokens_compared": 4992, "tokens_different": 0, "addresses_moved": 0, "seconds": 3.4, "steps": [
                {"name": "A before", "tokens_compared": 1248, "tokens_different": 0, "first_difference": None},
                {"name": "B after A against B cold", "tokens_compared": 2496, "tokens_different": 0},
                {"name": "A after B", "tokens_compared": 1248, "tokens_different": 0},
            ],
        },
        "heads": {"heads": 32, "tokens_compared": 1536, "tokens_different": 0, "steps": [
            {"name": name, "tokens_compared": 768, "tokens_different": 0, "first_difference": None}
            for name in ("32 heads, five at a time", "32 heads, recomputed")
        ]},
        "two_gpus": [
            {"name": "expert parallel 2, NCCL", "tokens_compared": 1248, "tokens_different": 0, "reason": None},
            {"name": "expert parallel 2, DeepEP", "tokens_compared": 1248, "tokens_different": 0, "reason": None},
            {"name": "data parallel 2, one rank idle", "tokens_compared": 1248, "tokens_different": 0, "reason": None},
        ],
        "sabotages": [
            {"name": f"{op} of stock vLLM", "hook": f"vllm.some.module:{op.title()}", "expected": "bits",
             "caught": True, "by": "bits", "located_layer": i % 4, "located_op": op}
            for i, op in enumerate(_OPS)
        ] + [{"name": "attention sinks not loaded again", "hook": "vllm.some.module:Loader", "expected": "attestation",
              "caught": True, "by": "attestation", "located_layer": None, "located_op": None}],
        "off": {"equal": True, "compared": 2496},
        "cost": [
            {"workload": w, "batch": b, "stock_tok_s": 100.0 * b, "aligned_tok_s": 100.0 * b / (1 + o / 100),
             "overhead_percent": o, "stock_baseline": "deep_gemm"}
            for w, b, o in (("decode", 1, -3.2), ("decode", 8, 1.1), ("decode", 32, 4.4), ("decode", 128, 4.9),
                            ("prefill 1k", 1, 2.0), ("prefill 8k", 1, 3.7), ("mixed", 64, 0.4))
        ],
        "layers": [{"layer_type": t, "stock_us": s, "aligned_us": a}
                   for t, s, a in (("window", 210.0, 214.4), ("C4", 318.2, 322.9), ("C128", 288.0, 290.1),
                                   ("head and log-softmax", 96.0, 88.5))],
        "ops": [{"op": op, "stock_us": 20.0 + i, "aligned_us": 22.5 - i, "calls": 3} for i, op in enumerate(_OPS)],
        "cost_model": {"layers": 43, "shared": True, "ratios": [0, 4], "vocabulary": 129280, "weights_gib": 26.5},
        "attestations": {e: _attestation("ab" * 32) for _, e in _SCHEDULES}
        | {"stock": _attestation("cd" * 32, aligned=False)},
        "parts": [{"part": "graphs", "seconds": 88.1, "date": "2000-01-01", "command": "python -m something graphs"}],
        "suites": [{"package": p, "passed": 100, "failed": 0}
                   for p in ("bi-kernels", "bi-sparse-attn", "bi-moe-deepep", "bi-reload")],
        "not_run": [{"what": "profile gb200", "why": "no such GPU"}],
    }  # fmt: skip


@pytest.fixture
def cpu() -> dict[str, Any]:
    """A report of profile cpu, aligned."""
    comparison = {"name": "all together", "tokens_compared": 4032, "tokens_different": 0, "first_difference": None,
                  "seconds": 70.0, "plan": {"steps": 58}}  # fmt: skip
    return {
        "profile": "cpu",
        "packages": {"bi-kernels": "0.1.0"},
        "environment": {"machine": "x86_64"},
        "model": {"config": {"hidden_size": 256}},
        "attestation": {"digest": "cd" * 32, "native": {"bi_kernels": {"loaded": False, "sha256": None}}},
        "schedules": [comparison],
        "reload": {"ok": True, "comparisons": [{**comparison, "name": "new weights"}], "problems": []},
        "coverage": {"preemptions": 39, "eight_schedules": True},
        "sabotages": [{"name": "router: logits in bfloat16", "caught": True, "caught_by": "bits", "located_layer": 0,
                       "located_op": "router logits", "detail": "r00[0]"}],
        "oracle": {"mean_abs_logprob_diff": 1e-6, "tokens": 958},
        "cases": {},
        "failures": [],
        "seconds": 600.0,
    }  # fmt: skip


class _Page(HTMLParser):
    """Elements, attributes and texts of a page; fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attrs)))
        if name != "meta":
            self._open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, text: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append(text)

    @property
    def text(self) -> str:
        return re.sub(r" ([;,.:])", r"\1", " ".join(" ".join(self.texts).split()))

    def by_class(self, name: str) -> list[dict[str, str | None]]:
        return [a for _, a in self.tags if name in (a.get("class") or "").split()]


def _page(report: dict[str, Any]) -> _Page:
    return _Page(render(report, source="report.json"))


def test_aligned_report_says_so_and_is_green(full: dict[str, Any], cpu: dict[str, Any]) -> None:
    for report, total in ((full, 8 * 2496 + 2 * 2496 + 4992 + 2 * 768 + 3 * 1248), (cpu, 2 * 4032)):
        page = _page(report)
        assert f"0 of {total:,} compared tokens different" in page.text
        assert page.by_class("verdict")[0]["class"] == "verdict good"
        assert not page.by_class("bad")
        assert not page.by_class("bad-text")


@pytest.mark.parametrize("report", ["full", "cpu"])
def test_nothing_is_loaded_from_elsewhere(report: str, request: pytest.FixtureRequest) -> None:
    text = render(request.getfixturevalue(report), source="report.json")
    page = _Page(text)
    assert not {name for name, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert all((a.get("href") or "#").startswith("#") for _, a in page.tags)
    assert not any(key in a for _, a in page.tags for key in ("src", "srcset", "xlink:href", "style", "background"))
    assert not re.search(r"https?:|//|url\(|@import|data:image", text.replace("//-->", ""))


def test_links_lead_to_sections(full: dict[str, Any]) -> None:
    page = _page(full)
    ids = {a["id"] for _, a in page.tags if "id" in a}
    links = [(a.get("href") or "")[1:] for name, a in page.tags if name == "a"]
    assert sorted(links) == sorted(ids)
    assert links


def _strings(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, str):
        return [path]
    return [found for key, item in items for found in _strings(item, (*path, key))]


@pytest.mark.parametrize("report", ["full", "cpu"])
def test_every_text_is_escaped(report: str, request: pytest.FixtureRequest) -> None:
    hostile = '"><script>alert(1)</script>&<b x=\'"'
    poisoned = copy.deepcopy(request.getfixturevalue(report))
    for path in _strings(poisoned):
        if path == ("profile",):
            continue
        owner = poisoned
        for key in path[:-1]:
            owner = owner[key]
        owner[path[-1]] += hostile
    poisoned["coverage"][hostile] = 1
    page = _page(poisoned)
    assert not {"script", "b"} & {name for name, a in page.tags if "x" in a or name == "script"}
    assert hostile in page.text


def test_whatever_is_missing_is_named_and_nothing_is_green(full: dict[str, Any]) -> None:
    names = {"runs": "rollout schedules", "actors": "actors", "reload": "weight reload", "two_gpus": "two GPUs",
             "sabotages": "faults on purpose", "off": "flag unset", "coverage": "coverage of the run",
             "stock": "stock vLLM", "cost": "tokens per second", "layers": "layer type", "ops": "GPU time by op",
             "heads": "32 heads", "failures": "the list of failures"}  # fmt: skip
    full["not_run"].append({"what": "cost", "why": "the clock ran out"})
    for key, name in names.items():
        page = _page({k: v for k, v in full.items() if k != key})
        (verdict,) = page.by_class("verdict")
        assert verdict["class"] == "verdict open", key
        assert name in page.text.split("of the profile:")[1].split("schedules of the same")[0], key
        if key in ("cost", "layers", "ops"):  # one part records them all
            assert page.text.count("the clock ran out") == 1, key


def test_a_report_with_nothing_in_it_is_all_not_run() -> None:
    for profile in ("h200", "h100", "gb200", "cpu"):
        page = _page({"profile": profile})
        assert "Nothing was compared" in page.text
        assert page.by_class("verdict")[0]["class"] == "verdict bad"
        assert not re.search(r"\b0 of 0\b", page.text)
        assert len(page.by_class("not-run")) > 10


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (("actors", 1), "actor (b)"),
        (("coverage", "graph_full"), "replays of full CUDA graphs"),
        (("stock", "divergence"), "where stock vLLM parts first"),
        (("two_gpus", 0, "tokens_compared"), "expert parallel 2, NCCL"),
        (("runs", 3, "tokens_different"), "small budget, eager"),
    ],
)
def test_missing_pieces_are_named(full: dict[str, Any], place: tuple[Any, ...], name: str) -> None:
    owner = full
    for key in place[:-1]:
        owner = owner[key]
    del owner[place[-1]]
    page = _page(full)
    assert page.by_class("verdict")[0]["class"] == "verdict open"
    assert name in page.text.split("of the profile:")[1]
    assert "not run" in page.text


def test_the_reason_for_a_skip_is_shown(full: dict[str, Any]) -> None:
    reason = "this machine has one GPU"
    for numbers in ({}, {"tokens_compared": 0, "tokens_different": 0}):
        full["two_gpus"] = [{"name": "expert parallel 2", "reason": reason, **numbers}]
        page = _page(full)
        assert page.text.count(reason) == 1
        assert page.by_class("verdict")[0]["class"] == "verdict open"


def test_quick_tests_are_no_full_success(full: dict[str, Any]) -> None:
    quick = {key: full[key] for key in ("profile", "attestations", "failures")} | {
        "quick": True,
        "runs": full["runs"][:1],
    }
    page = _page(quick)
    assert page.by_class("verdict")[0]["class"] == "verdict good"
    assert "The quick test: one engine against its own recomputation, and nothing else" in page.text
    assert "of this repository: profile h200: 0 of 2,496 compared tokens different" in page.text


@pytest.mark.parametrize(
    "place", [("runs", 4), ("actors", 0), ("reload", "steps", 1), ("two_gpus", 2)], ids=lambda place: str(place[0])
)
def test_differences_are_red_and_counted(full: dict[str, Any], place: tuple[Any, ...]) -> None:
    row: Any = full
    for key in place:
        row = row[key]
    row["tokens_different"], row["first_difference"] = 3, "r07[11]: 5 against 6"
    page = _page(full)  # the report's own failures and sum still claim that all is well
    assert "3 of 35,232 compared tokens different" in page.text
    assert page.by_class("verdict")[0]["class"] == "verdict bad"
    assert [a for a in page.by_class("cell") if "bad" in (a["class"] or "")]
    assert "r07[11]: 5 against 6" in page.text


def test_failures_and_red_rows_make_the_page_red(full: dict[str, Any]) -> None:
    def broken(change: Any) -> _Page:
        report = copy.deepcopy(full)
        change(report)
        return _page(report)

    changes = (
        lambda r: r["failures"].append("graphs: not run"),
        lambda r: r["sabotages"][2].update(caught=False, by=None),
        lambda r: r["coverage"].update(preemptions=0),
        lambda r: r["off"].update(equal=False),
        lambda r: r["off"].update(equal=2495),
        lambda r: r["reload"].update(addresses_moved=2),
        lambda r: r.update(tokens_different=1),
        lambda r: r["runs"][0].update(tokens_compared=0),
    )
    for number, change in enumerate(changes):
        page = broken(change)
        assert page.by_class("verdict")[0]["class"] == "verdict bad", number
    assert "graphs: not run" in broken(changes[0]).text


def test_cost_above_the_goal_is_red(full: dict[str, Any]) -> None:
    assert "0 of 7 workloads are more than 5 % slower" in _page(full).text
    full["cost"][2]["overhead_percent"] = 7.3
    page = _page(full)
    assert "1 of 7 workloads are more than 5 % slower" in page.text
    assert [a for a in page.by_class("tile") if "bad" in (a["class"] or "")]
    assert "+7.3 %" in page.text
    assert page.by_class("verdict")[0]["class"] == "verdict good"  # slow is not unequal


def test_every_profile_has_its_tables(full: dict[str, Any]) -> None:
    """One step in each: GPU time, by part, against the host, layer types and ops; and how far turns were apart."""
    page = _page(full)  # a report with one profile and no list of them
    assert "one step: layer types, and what each op adds or saves" in page.text
    names = ("layers", "lm_head", "final norm", "log_softmax", "sampling", "other")
    parts = [{"part": name, "stock_us": 1200.0 + i, "aligned_us": 1300.0 + i} for i, name in enumerate(names)]
    full["profiles"] = [
        {"workload": "decode", "batch": batch, "stock_forward_us": 1000.0, "aligned_forward_us": 1000.0 + 10 * batch,
         "layers": full["layers"], "ops": full["ops"], "parts": parts, "sides": {
             "stock": {"forward_us": 1000.0, "busy_us": 912.0, "busy_percent": 91.2, "launches": 2718.0,
                       "host_us": None, "experts": 43.6}}}
        for batch in (1, 8)
    ]  # fmt: skip
    full["profiles"][1]["sides"]["aligned"] = full["profiles"][1]["sides"]["stock"] | {"host_us": 7654.3}
    full["profiles"][1]["ops"] = [row | {"stock_host_us": 3.0, "aligned_host_us": 1111.0} for row in full["ops"]]
    for row in full["cost"]:
        row |= {"stock_spread": [7.0, 8.0, 9.0], "aligned_spread": [6.0, 7.0, 8.0], "overhead_spread": [-1.0, 0.5, 2.0]}
    page = _page(full)
    for batch, percent in ((1, "+1.0 %"), (8, "+8.0 %")):
        assert f"decode, batch {batch}: layer types, and what each op adds or saves" in page.text
        assert percent in page.text
    for shown in ("7 to 9", "6 to 8", "-1.0 to +2.0", "1,201 → 1,301", "1,203 → 1,303", "91 %", "2,718",
                  "graph", "7,654", "44", "3 → 1,111", "with 43 layers, which share", "26.5 GiB"):  # fmt: skip
        assert shown in page.text
    assert page.text.count("lm_head") == 1  # the head of its column
    del full["profiles"][0]["parts"][1]
    assert "not run" in _page(full).text.split("The same by part")[1].split("GPU and host")[0]


def test_a_gpu_time_names_its_stock_side_and_says_when_it_had_no_rival(full: dict[str, Any]) -> None:
    """Older records profiled the side with most tokens/s alone, and had the overhead of two medians."""
    times = {"stock_baseline": "stock deep_gemm", "stock_forward_us": 1000.0, "aligned_forward_us": 640.0}
    full["cost"][2] |= times | {"forward_overhead_percent": -36.0, "overhead_spread": [-16.0, 9.73, 45.5]}
    full["profiles"] = [{"workload": "decode", "batch": 32, **times}]
    old = with_baselines(full)
    assert with_baselines(old) == old
    assert old["cost"][2]["overhead_percent"] == 9.73
    assert "| decode | 32 | 3,200 | 3,065 | +9.7 % (-16 to +46) | -36.0 % against stock deep_gemm |" in block(old)
    for shown in (block(old), _page(old).text):
        assert shown.count("the other stock side was not profiled in this run") == 1
    assert _page(old).text.count("decode, batch 32, against stock deep_gemm") == 3
    both = {"forward_baseline": "stock", "forward_us": {"stock": 1000.0, "stock deep_gemm": 1800.0, "aligned": 640.0}}
    for row in (full["cost"][2], full["profiles"][0]):
        row |= both
    new = with_baselines(full)
    assert "-36.0 % against stock |" in block(new)
    for shown in (block(new), _page(new).text):
        assert "not profiled in this run" not in shown
        assert "forward is shorter" in shown


def test_a_step_that_waits_for_the_host_is_told_from_one_that_costs_the_gpu(full: dict[str, Any]) -> None:
    """Tokens/s of a step without graphs say how the host was, unless the GPU was busy all the time."""
    row = full["cost"][2]
    row["overhead_percent"] = 18.0
    sides = {"stock": {"busy_us": 900.0}, "stock deep_gemm": {"busy_us": 800.0}}
    sides["aligned"] = {"busy_us": 780.0, "busy_percent": 63.4}
    full["profiles"] = [{"workload": row["workload"], "batch": row["batch"], "sides": sides}]
    assert "| -2.5 % | 63 % |" in block(full)  # against the lesser of the two
    assert "more than 5 % slower, 1 of them where the GPU waits for the host." in _page(full).text
    sides["aligned"]["busy_percent"] = 98.0
    assert "more than 5 % slower." in _page(full).text
    row["overhead_percent"], sides["aligned"]["busy_percent"] = 1.0, 63.4
    assert "more than 5 % slower." in _page(full).text
    del sides["aligned"]
    assert "| not profiled | not profiled |\n" in block(full)


def test_other_libraries_in_one_part_are_red(full: dict[str, Any]) -> None:
    page = _page(full)
    assert "cd" * 32 in page.text  # stock differs on purpose
    full["attestations"]["preempted"]["native"]["ds4_bi"]["sha256"] = "9" * 64
    page = _page(full)
    assert f"2 different ones: {'d' * 64}, {'9' * 64}" in page.text
    assert page.by_class("bad-text")


def test_the_quick_test_is_shown_where_it_ran(full: dict[str, Any]) -> None:
    full["quick_test"] = {"name": "quick, recomputed", "tokens_compared": 192, "tokens_different": 0}
    assert "of this repository: 0 of 192 compared tokens different" in _page(full).text
    full["quick_test"]["tokens_different"] = 1
    page = _page(full)
    assert page.by_class("verdict")[0]["class"] == "verdict bad"
    assert "1 of 192" in page.text


def test_the_previews_lists_are_there_and_stay_not_run(full: dict[str, Any]) -> None:
    text = _page(full).text
    for point in (
        "image digest no image; attestation abab",
        "verl recipe PR not run",
        "quick alignment test verl's: not run; of this repository: not run",
        "H100 64-GPU aligned run not run; here one machine",
        "GB200 32-GPU aligned run not run",
        "H100: not run; H200: profile h200: 0 of 35,232",
        "GB200: not run",
        "arm64: not run",
    ):
        assert point in text, point


def test_markup_escapes_and_bars_stay_on_their_axis() -> None:
    assert tag("p", "<&>", title='"') == '<p title="&quot;">&lt;&amp;&gt;</p>'
    assert '<th scope="row">x&lt;y</th>' in table([Column("a<b")], [(None, ("x<y",))])
    assert "a&lt;b" in table([Column("a<b")], [])
    for value in (-9.0, -1.0, 0.0, 2.0, 9.0):
        drawn = re.search(r'x="([\d.]+)%" y="3" width="([\d.]+)%"', bar(value, -2.0, 4.0, class_="good", label="a"))
        assert drawn is not None
        left, width = map(float, drawn.groups())
        assert left >= 0
        assert width > 0
        assert left + width <= 100.5


def test_command_line(full: dict[str, Any], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, page = tmp_path / "report.json", tmp_path / "out" / "report.html"
    report.write_text(json.dumps(full), encoding="utf-8")
    assert main([str(report), str(page)]) == 0
    first = page.read_bytes()
    assert main([str(report), str(page)]) == 0
    assert page.read_bytes() == first
    assert b"sha256" in first
    assert str(tmp_path).encode() not in first
    for damage in ("", "[]", "{}", '{"profile": 3}', '{"profile": null}'):
        report.write_text(damage, encoding="utf-8")
        with pytest.raises(ReportError):
            load_report(report)
        assert main([str(report), str(page)]) == 2
    assert "expected a report" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json"), str(page)]) == 2


def test_readme_table_counts_and_names_what_is_missing(full: dict[str, Any]) -> None:
    assert "| schedules of the same requests | 8 | 19,968 | 0 |" in block(full)
    assert "| decode | 32 | 3,200 | 3,065 | +4.4 % | not run | not profiled | not profiled |" in block(full)
    assert "Faults on purpose caught: 7 of 7; failures: 0." in block(full)
    assert "with 43 layers, which share the weights of a few.\nTokens/s are against" in block(full)
    full["runs"][2]["tokens_different"] = 5
    full["two_gpus"][0] = {
        "name": "expert parallel 2",
        "tokens_compared": 0,
        "tokens_different": 0,
        "reason": "one GPU",
    }
    assert "| schedules of the same requests | 8 | 19,968 | 5 |" in block(full)
    assert "| two GPUs | 2 of 3 | 2,496 | 0 |" in block(full)
    empty = block({"profile": "h200"})
    assert empty.count("not run") == 10
    for report in (None, full, {"profile": "h200"}):
        readme = rewritten(f"before\n{START}old\n{END}after\n", report)
        assert readme == f"before\n{START}\n{block(report)}\n{END}after\n"
        assert rewritten(readme, report) == readme


def test_what_is_no_number_is_said_and_not_drawn(full: dict[str, Any], tmp_path: pathlib.Path) -> None:
    full["stock"]["max_abs_logprob_diff"] = float("nan")
    full["cost"][0]["overhead_percent"] = float("inf")
    (tmp_path / "report.json").write_text(json.dumps(full))
    page = _page(load_report(tmp_path / "report.json"))
    assert "nan nat" in page.text
    assert "+inf %" in page.text
    assert page.by_class("verdict")[0]["class"] == "verdict good"


@pytest.mark.parametrize(
    "odd",
    [None, "text", -1.5, float("nan"), float("inf"), True, [1], {"a": 1}, [["a", "b", 0.0], {"a": [None]}]],
    ids=repr,
)
def test_odd_values_do_not_break_the_page(full: dict[str, Any], odd: Any) -> None:
    places: list[tuple[str, ...]] = [(key,) for key in full if key != "profile"]
    places += [(key, inner) for key, value in full.items() if isinstance(value, dict) for inner in value]
    for key, *inner in places:
        _page({**full, key: {**full[key], inner[0]: odd} if inner else odd})
    for key, value in full.items():  # all fields of a row at once
        if isinstance(value, list) and value:
            _page({**full, key: [dict.fromkeys(value[0], odd)]})
