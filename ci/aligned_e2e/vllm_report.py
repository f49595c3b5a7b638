"""Records of the parts of a vLLM profile, put together: what was compared with what, and everything against the run.

Records are only put together if they ran the same code on the same weights and GPU model. Settings that differ between
engines on purpose are left out of that comparison, and nothing else is.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import pathlib
import struct
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from .report import digest_of
from .report_view import with_baselines
from .vllm_engine import ENGINES, FIRST, QUICK, Engine

__all__ = [
    "COUNTERS",
    "EXTRA_PARTS",
    "REQUIRED",
    "ExtraPart",
    "code_of",
    "compare_rows",
    "merge",
    "merge_quick",
    "print_report",
    "record_of",
    "write_page",
    "write_report",
]

Record = Mapping[str, Any]

TOKENS_REQUIRED = 20_000
STOCK_SHARE_REQUIRED = 0.9
REQUIRED = ("preemptions", "cached_tokens", "prefill_splits", "graph_full", "graph_piecewise", "tokens_past_top_k")
"""Counters that must be above zero, or the run has shown nothing."""
COUNTERS = (*REQUIRED, "graph_none")

_FREE = ("BI_EP_TRANSPORT", "VLLM_PLUGINS")
"""Variables that differ between the parts of one run on purpose."""

_NEVER = (
    ("profile gb200", "no Blackwell machine; its kernels compile and have not been run"),
    ("companion verl run", "no verl installation"),
    ("64 GPUs", "at most two GPUs of one host"),
    ("aarch64", "no such machine"),
)


@dataclass(frozen=True, slots=True)
class ExtraPart:
    """A part that a module of its own runs and records.

    Attributes:
        module: Inside this package.
        arguments: Of its command, given the folder of checkpoints, that of records, jobs at a time, and seconds.
        hooks: As of :class:`Engine`; ``inert`` for a module that sets the flag itself.
        keys: Of its record, taken over into the report as they are.
        required: Without it the run has failed.
        alone: It must not share the GPU with other parts.
        many: It starts engines itself, as many at a time as it is told.
        weights: Checkpoints of :data:`aligned_e2e.h200.CHECKPOINTS` that it needs.
    """

    module: str
    arguments: Callable[[pathlib.Path, pathlib.Path, int, float], tuple[str, ...]]
    hooks: Literal["ours", "inert"] = "ours"
    keys: tuple[str, ...] = ()
    required: bool = True
    alone: bool = False
    many: bool = False
    weights: tuple[str, ...] = ("a",)


def record_of(parts: pathlib.Path, name: str, rank: int = 0) -> pathlib.Path:
    """Where a part's record is."""
    stem = name.replace(",", "").replace(" ", "-")
    return parts / (f"{stem}.rank{rank}.json" if rank else f"{stem}.json")


DRAWN = f"{FIRST}.drawn.json"
"""The record of the first schedule alone, for those who recompute its tokens while the engine goes on."""

EXTRA_PARTS: dict[str, ExtraPart] = {
    "actor b": ExtraPart(
        "vllm_trainer",
        lambda weights, parts, jobs, limit: (
            *("--checkpoint", str(weights / "a"), "--drawn", str(parts / DRAWN)),
            *("--output", str(record_of(parts, "actor b"))),
        ),
    ),
    "sabotage": ExtraPart(
        "vllm_sabotage",
        lambda weights, parts, jobs, limit: (
            *("--checkpoint", str(weights / "a"), "--parts", str(parts), "--jobs", str(jobs)),
            *("--seconds", f"{limit / 2:.0f}"),
        ),
        keys=("sabotages", "healthy_problem"),
        many=True,
    ),
    "cost": ExtraPart(
        "vllm_cost",
        lambda weights, parts, jobs, limit: (
            *("--checkpoint", str(weights / "flash"), "--parts", str(parts), "--limit", f"{limit - 20:.0f}"),
        ),
        hooks="inert",
        keys=("cost", "cost_model", "layers", "ops", "profiles", "copy_gb_s", "sides", "waited"),
        required=False,
        alone=True,
        weights=(),
    ),
}


def load_records(
    parts: pathlib.Path, engines: Mapping[str, Engine], extra: Iterable[str] = ()
) -> dict[str, list[Record]]:
    """Records by part, one for each rank; parts without all of their records are left out."""
    ranks = {name: engine.ranks for name, engine in engines.items()} | dict.fromkeys(extra, 1)
    found = {}
    for name, count in ranks.items():
        paths = [record_of(parts, name, rank) for rank in range(count)]
        if all(path.is_file() for path in paths):
            found[name] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return found


# --- tokens -----------------------------------------------------------------------------------------------------------


def compare_rows(
    mine: Mapping[str, Record],
    theirs: Mapping[str, Record],
    *,
    requests: Sequence[str] | None = None,
    count: int | None = None,
) -> dict[str, Any]:
    """Token by token: id, bits of the logprob, digest of the logits of the whole vocabulary.

    Args:
        mine: Rows by request.
        theirs: What is expected. A request or token that one side lacks is a difference.
        requests: Those that ``mine`` was to serve; None all of ``theirs``.
        count: Tokens that ``mine`` was to draw after each; None as many as ``theirs``.
    """
    compared = different = 0
    first = None
    for request in theirs if requests is None else requests:
        got, want = mine.get(request, _NOTHING), theirs[request]
        for i in range(max(len(got["tokens"]), len(want["tokens"]) if count is None else count)):
            compared += 1
            left, right = _token(got, i), _token(want, i)
            if left != right:
                different += 1
                first = first or f"{request}[{i}]: (token, logprob bits, digest) {left} against {right}"
    return {"tokens_compared": compared, "tokens_different": different, "first_difference": first}


_NOTHING: Record = {"tokens": []}


def _token(row: Record, i: int) -> tuple[int, int, int] | None:
    if i >= len(row["tokens"]):
        return None
    return row["tokens"][i], row["logprobs"][i], row["digests"][i]


def _schedules(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Schedules of one part, the requests of its ranks together."""
    for ranks in zip(*(record["schedules"] for record in records), strict=True):
        did: Counter[str] = Counter()
        for schedule in ranks:
            did.update(schedule["did"])
        yield {
            "schedule": ranks[0]["schedule"],
            "seconds": max(schedule["seconds"] for schedule in ranks),
            "did": dict(did),
            "contradictions": [text for schedule in ranks for text in schedule.get("contradictions", [])],
            "requests": {name: row for schedule in ranks for name, row in schedule["requests"].items()},
        }


def _row(name: str, schedule: Record, expected: Mapping[str, Record], engine: Engine | None = None) -> dict[str, Any]:
    """One line of the report. ``engine``: one that serves the first requests only, or draws fewer tokens."""
    asked: dict[str, Any] = {}
    if engine is not None:
        asked = {"requests": list(expected)[: engine.requests], "count": engine.max_tokens}
    compared = compare_rows(schedule["requests"], expected, **asked)
    return {"name": name} | compared | {"seconds": schedule["seconds"], "did": schedule["did"]}


# --- same code --------------------------------------------------------------------------------------------------------


def code_of(attestation: Record) -> dict[str, Any]:
    """An attestation without its own digest and without what differs between the parts of a run on purpose."""
    kept = {name: value for name, value in attestation["environment"].items() if name not in _FREE}
    return {key: value for key, value in attestation.items() if key != "digest"} | {"environment": kept}


def _library_of(attestation: Record) -> dict[str, Any]:
    """What of an attestation a part without hooks shares with the others: what is installed, not what is active."""
    native = {name: {k: v for k, v in library.items() if k != "loaded"}
              for name, library in attestation["native"].items()}  # fmt: skip
    return {"packages": attestation["packages"], "native": native}


def _installation_problems(records: Mapping[str, Sequence[Record]], engines: Mapping[str, Engine]) -> list[str]:
    """Parts that must not be put together, or did not run what they were to run."""
    problems = []
    code: dict[str, list[str]] = {}
    library: dict[str, list[str]] = {}
    common: dict[str, list[str]] = {}
    for name, record in ((name, record) for name, ranks in records.items() for record in ranks):
        hooks = engines[name].hooks if name in engines else "ours"
        if "versions" not in record:  # it failed before it could say
            problems.append(f"{name}: its record does not say what ran")
            continue
        versions = {key: record["versions"].get(key) for key in ("torch", "vllm", "triton")}
        common.setdefault(digest_of([versions, record["gpu"]]), []).append(name)
        attestation = record["attestation"]
        if attestation is None or hooks == "absent":
            if (attestation is None) != (hooks == "absent"):
                problems.append(f"{name}: expected {'no' if hooks == 'absent' else 'an'} attestation")
            continue
        library.setdefault(digest_of(_library_of(attestation)), []).append(name)
        if hooks == "ours":
            code.setdefault(digest_of(code_of(attestation)), []).append(name)
            if not attestation["aligned"] or attestation["partial"]:
                problems.append(f"{name}: its attestation does not say aligned")
        if hooks in ("none", "inert") and attestation["hooks"]:
            problems.append(f"{name}: expected no hooks, found {', '.join(attestation['hooks'])}")
    for what, groups in (("attestations", code), ("libraries", library), ("versions or GPUs", common)):
        if len(groups) > 1:
            named = "; ".join(f"{digest[:12]}: {', '.join(dict.fromkeys(group))}" for digest, group in groups.items())
            problems.append(f"parts of different installations, by their {what}: {named}")
    return problems


# --- parts ------------------------------------------------------------------------------------------------------------


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


def _stock(records: Sequence[Record]) -> dict[str, Any]:
    """How far vLLM without the hooks is from its own recomputation."""
    drawn, again = (schedule["requests"] for schedule in _schedules(records))
    compared = compare_rows(again, drawn)
    gaps = [abs(_float(a) - _float(b)) for name, row in drawn.items()
            for a, b in zip(row["logprobs"], again[name]["logprobs"], strict=True)]  # fmt: skip
    tokens, different = compared["tokens_compared"], compared["tokens_different"]
    return {
        "tokens": tokens,
        "tokens_different": different,
        "share_different": different / max(1, tokens),
        "logprobs_different": sum(gap != 0 for gap in gaps),
        "max_abs_logprob_diff": max(filter(math.isfinite, gaps), default=0.0),
    }


def _off(inert: Sequence[Record], absent: Sequence[Record]) -> dict[str, Any]:
    """Whether the packages, installed and switched off, change a bit.

    vLLM without the flag need not repeat itself; requests that differ from run to run in one process say nothing, and
    are counted.
    """
    here, without = ([s["requests"] for s in _schedules(records)] for records in (inert, absent))
    names = [name for name in here[0] if all(run[0][name] == run[1][name] for run in (here, without))]
    compared = compare_rows(here[0], without[0], requests=names)
    tokens = compared["tokens_compared"]
    return {
        "compared": tokens,
        "equal": bool(tokens) and not compared["tokens_different"],
        "first_difference": compared["first_difference"],
        "requests": len(names),
        "requests_that_do_not_repeat": len(here[0]) - len(names),
    }


def _reload(warm: Sequence[Record], cold: Sequence[Record], expected: Mapping[str, Record]) -> dict[str, Any]:
    """A, B, A in one engine with its graphs kept: A is what A always was, B what an engine is that began with it."""
    before, other, again = _schedules(warm)
    (began,) = _schedules(cold)
    engine = ENGINES["reload"]
    rows = [
        _row("A before", before, expected, engine),
        _row("B after A against B cold", other, began["requests"]),
        _row("A after B", again, expected, engine),
    ]
    facts, fresh = warm[0]["reload"], dict(cold[0]["reload"]["fingerprints"])
    prints = [(weights, value) for weights, value in facts["fingerprints"]]
    unequal = [weights for weights, value in prints if weights == "b" and value != fresh["b"]]
    unequal += ["a"] * (len({value for weights, value in prints if weights == "a"}) > 1)
    changed = compare_rows(other["requests"], before["requests"])["tokens_different"]
    return {
        "tokens_compared": sum(row["tokens_compared"] for row in rows),
        "tokens_different": sum(row["tokens_different"] for row in rows),
        "first_difference": next((row["first_difference"] for row in rows if row["first_difference"]), None),
        "addresses_moved": len(facts["moved"]),
        "moved": facts["moved"],
        "tensors": facts["tensors"],
        "fingerprints_unequal": unequal,
        "tokens_changed_by_new_weights": changed,
        "seconds": max(facts["seconds"], default=None),
        "steps": rows,
    }


def _heads(records: Sequence[Record]) -> dict[str, Any]:
    """A checkpoint of another shape: everything against its own first schedule, and counted by itself."""
    first, *others = _schedules(records)
    rows = [_row(schedule["schedule"], schedule, first["requests"]) for schedule in others]
    return {
        "heads": 32,
        "tokens_compared": sum(row["tokens_compared"] for row in rows),
        "tokens_different": sum(row["tokens_different"] for row in rows),
        "steps": rows,
    }


def _two_gpus(
    records: Mapping[str, Sequence[Record]], expected: Mapping[str, Record], gpus: int
) -> tuple[list[dict[str, Any]], list[dict[str, str]], list[str]]:
    rows, not_run, failures = [], [], []
    for name, engine in ENGINES.items():
        if engine.ranks == 1:
            continue
        if name in records:
            rows += [_row(s["schedule"], s, expected, engine) for s in _schedules(records[name])]
        elif gpus == 1:
            reason = f"this machine has one GPU, and {engine.ranks} are needed"
            rows += [{"name": s.name, "tokens_compared": 0, "tokens_different": 0, "reason": reason}
                     for s in engine.schedules]  # fmt: skip
            not_run += [{"what": s.name, "why": reason} for s in engine.schedules]
        else:
            failures.append(f"{name}: not run")
    return rows, not_run, failures


def _differences(kind: str, rows: Iterable[Record]) -> list[str]:
    return [
        f"{kind}{row['name']}: {row['tokens_different']} of {row['tokens_compared']} differ, "
        f"first {row['first_difference']}"
        for row in rows
        if row["tokens_different"] or not row["tokens_compared"]
    ]


# --- the whole --------------------------------------------------------------------------------------------------------


def merge(parts: pathlib.Path, *, profile: str, gpus: int) -> dict[str, Any]:
    """The report of a profile from the records in ``parts``. Everything that is missing or differs is a failure.

    Args:
        parts: Folder of the records.
        profile: Its name.
        gpus: Of the machine that ran them; 0 if unknown.
    """
    records = load_records(parts, ENGINES | QUICK, EXTRA_PARTS)
    gpus = max([gpus, *(record.get("gpus", 0) for ranks in records.values() for record in ranks)])
    whole = _Whole({"profile": profile}, [], [])
    whole.add_missing(records, parts)
    whole.failures += _installation_problems(records, ENGINES | QUICK)
    if FIRST in records:
        whole.add_tokens(records, gpus)
    whole.add_controls(records)
    whole.add_extra(records)
    if "32 heads" in records:
        whole.report["heads"] = _heads(records["32 heads"])
        whole.failures += _differences("", whole.report["heads"]["steps"])
    for name in QUICK.keys() & records.keys():  # a test for users, which has run here as well
        whole.report["quick_test"] = _quick_row(records[name])
        whole.failures += _differences("", [whole.report["quick_test"]])
    whole.report["suites"] = _suites(parts)
    whole.failures += [
        f"suite of {row['package']}: {row['failed']} tests failed" for row in whole.report["suites"] if row["failed"]
    ]
    # Every token that the rollouts drew counts once: those of the first schedule against actor a.
    counted = [*whole.report.get("runs", []), *(a for a in whole.report.get("actors", []) if a["name"] == "a")]
    sums = {key: sum(row[key] for row in counted) for key in ("tokens_compared", "tokens_different")}
    if sums["tokens_compared"] < TOKENS_REQUIRED:
        whole.failures.append(f"expected {TOKENS_REQUIRED} tokens, compared {sums['tokens_compared']}")
    never = [{"what": what, "why": why} for what, why in _NEVER if what != f"profile {profile}"]
    report = {**whole.report, **sums, **_about(records), "not_run": whole.not_run + never, "failures": whole.failures}
    return with_baselines(report)


@dataclass(slots=True)
class _Whole:
    """A report as it grows."""

    report: dict[str, Any]
    failures: list[str]
    not_run: list[dict[str, str]]

    def add_missing(self, records: Mapping[str, Sequence[Record]], parts: pathlib.Path) -> None:
        """Parts without a record; those that need two GPUs are judged by :func:`_two_gpus`."""
        single = [name for name, engine in ENGINES.items() if engine.ranks == 1]
        for name in (*single, *EXTRA_PARTS):
            if name not in records:
                self.not_run.append({"what": name, "why": _why(parts, name)})
                if name in ENGINES or EXTRA_PARTS[name].required:
                    self.failures.append(f"{name}: not run")

    def add_tokens(self, records: Mapping[str, Sequence[Record]], gpus: int) -> None:
        """Everything that is held against the first schedule."""
        reference = next(_schedules(records[FIRST]))
        expected = reference["requests"]
        two_gpus, skipped, missing = _two_gpus(records, expected, gpus)
        self.report |= {
            "reference": {key: reference[key] for key in ("schedule", "seconds", "did")} | {"engine": FIRST},
            "runs": _runs(records, expected),
            "actors": _actors(records, expected),
            "two_gpus": two_gpus,
            **_coverage(records),
        }
        self.not_run += skipped
        self.failures += missing
        self.failures += _differences("", [row | {"name": row["schedule"]} for row in self.report["runs"]])
        self.failures += _differences("actor ", self.report["actors"])
        self.failures += _differences("", [row for row in two_gpus if not row.get("reason")])
        self.failures += [f"vacuous: {name} is 0" for name in REQUIRED if not self.report["coverage"][name]]
        self.failures += [f"the same row twice, with other bits: {text}" for text in self.report["contradictions"]]
        if {"reload", "reload, cold"} <= records.keys():
            self.report["reload"] = _reload(records["reload"], records["reload, cold"], expected)
            self.failures += _reload_failures(self.report["reload"])

    def add_controls(self, records: Mapping[str, Sequence[Record]]) -> None:
        """What vLLM does without the hooks."""
        if "stock" in records:
            traced = records["sabotage"][0].get("stock") if "sabotage" in records else None
            stock = _stock(records["stock"]) | {"divergence": (traced or {}).get("divergence") or []}
            self.report["stock"] = stock
            if stock["share_different"] < STOCK_SHARE_REQUIRED:
                self.failures.append(f"vacuous: without the hooks only {stock['share_different']:.1%} differ")
        if {"off", "off, without us"} <= records.keys():
            self.report["off"] = _off(records["off"], records["off, without us"])
            if not self.report["off"]["equal"]:
                self.failures.append(f"flag unset: {self.report['off']}")

    def add_extra(self, records: Mapping[str, Sequence[Record]]) -> None:
        """What other modules have recorded."""
        for name in (name for name in EXTRA_PARTS if name in records):  # a set has another order every time
            (record,) = records[name]
            self.report |= {key: record[key] for key in EXTRA_PARTS[name].keys if key in record}
            self.not_run += record.get("not_run", [])
        if self.report.get("healthy_problem"):
            problem = self.report["healthy_problem"]
            self.failures.append(f"sabotage: the engine without one is not sound: {problem}")
        for row in self.report.get("sabotages", []):
            if not row["caught"]:
                self.failures.append(f"sabotage {row['name']}: not caught as declared, {row['detail']}")


def _quick_row(records: Sequence[Record]) -> dict[str, Any]:
    """One engine against its own recomputation."""
    drawn, again = _schedules(records)
    return _row(again["schedule"], again, drawn["requests"])


def merge_quick(parts: pathlib.Path, *, profile: str) -> dict[str, Any]:
    """The report of the quick test: one engine against its own recomputation."""
    records = load_records(parts, QUICK)
    failures = _installation_problems(records, QUICK)
    runs: list[dict[str, Any]] = []
    (name,) = QUICK
    if name in records:
        row = _quick_row(records[name])
        runs.append({"schedule": row["name"], "engine": name} | row)
        failures += _differences("", runs)
    else:
        failures.append(f"{name}: not run")
    return {
        "profile": profile,
        "quick": True,
        "runs": runs,
        "tokens_compared": sum(row["tokens_compared"] for row in runs),
        "tokens_different": sum(row["tokens_different"] for row in runs),
        **_about(records),
        "not_run": [{"what": "everything else of the profile", "why": "the quick test was asked for"}],
        "failures": failures,
    }


def _runs(records: Mapping[str, Sequence[Record]], expected: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Every schedule of rollouts but the first one, against that."""
    rows = []
    for name, engine in ENGINES.items():
        special = name.startswith("reload") or engine.hooks != "ours" or engine.ranks > 1
        if special or name not in records or any(schedule.recompute for schedule in engine.schedules):
            continue
        for number, schedule in enumerate(_schedules(records[name])):
            if (name, number) != (FIRST, 0):
                row = _row(schedule["schedule"], schedule, expected)
                rows.append({"schedule": row.pop("name"), "engine": name} | row)
    return rows


def _actors(records: Mapping[str, Sequence[Record]], expected: Mapping[str, Record]) -> list[dict[str, Any]]:
    parts = (("a", "actor"), ("b", "actor b"))
    return [_row(name, next(_schedules(records[part])), expected) for name, part in parts if part in records]


def _coverage(records: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    total: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
    contradictions = []
    for name, ranks in records.items():
        if name in ENGINES and ENGINES[name].hooks == "ours":
            for schedule in _schedules(ranks):
                total.update({key: schedule["did"].get(key, 0) for key in COUNTERS})
                contradictions += [f"{schedule['schedule']}, {text}" for text in schedule["contradictions"]]
    return {"coverage": {key: total[key] for key in COUNTERS}, "contradictions": contradictions}


def _reload_failures(found: Record) -> list[str]:
    failures = _differences("reload: ", found["steps"])
    if found["addresses_moved"]:
        failures.append(f"reload: {found['addresses_moved']} tensors moved, first {found['moved'][0]}")
    if found["fingerprints_unequal"]:
        failures.append(f"reload: fingerprints of {', '.join(found['fingerprints_unequal'])} differ")
    if not found["tokens_changed_by_new_weights"]:
        failures.append("vacuous: the new weights changed no token")
    return failures


def _about(records: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    """What ran: versions, GPU, attestations, commands."""
    ranks = [(name, record) for name, group in records.items() for record in group]
    first = next((record for name, record in ranks if name == FIRST), ranks[0][1] if ranks else {})
    told = ("part", "seconds", "start_seconds", "date", "command")
    return {
        "versions": first.get("versions", {}),
        "gpu": first.get("gpu"),
        "date": max((record["date"] for _, record in ranks), default=None),
        "attestations": {name: record["attestation"] for name, record in ranks if record.get("attestation")},
        "parts": [{key: record.get(key) for key in told} for _, record in ranks],
    }


def _suites(parts: pathlib.Path) -> list[dict[str, Any]]:
    """What the packages' own suites said on the same machine, where pytest left its record."""
    rows = []
    for path in sorted(parts.glob("suite-*.xml")):
        suite = ElementTree.parse(path).getroot().find("testsuite")
        if suite is not None:
            tests, errors, failures, skipped = (
                int(suite.get(name, "0")) for name in ("tests", "errors", "failures", "skipped")
            )
            rows.append(
                {
                    "package": path.stem.removeprefix("suite-"),
                    "passed": tests - errors - failures - skipped,
                    "failed": errors + failures,
                    "skipped": skipped,
                }
            )
    return rows


def _why(parts: pathlib.Path, name: str) -> str:
    record = record_of(parts, name)
    if record.with_suffix(".failed").is_file():
        return f"failed, see {record.with_suffix('.log').name}"
    part = EXTRA_PARTS.get(name)
    if part is not None and importlib.util.find_spec(f"{__package__}.{part.module}") is None:
        return f"{part.module} is not in this version"
    return "no record"


def write_report(path: pathlib.Path, report: Mapping[str, Any]) -> None:
    """Write the report with a digest of its contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**report, "digest": digest_of(report)}, indent=1) + "\n", encoding="utf-8")


def write_page(path: pathlib.Path) -> None:
    """Write a report's page beside it, where its module is there."""
    if importlib.util.find_spec(f"{__package__}.html_report") is not None:
        importlib.import_module(f"{__package__}.html_report").main([str(path), str(path.with_suffix(".html"))])


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print the comparison and every failure."""
    table = Table(title=f"aligned_e2e, profile {report['profile']}")
    for column in ("run", "compared", "different", "seconds"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    actors = [row | {"schedule": f"actor {row['name']}"} for row in report.get("actors", [])]
    others = [row | {"schedule": row["name"]} for row in report.get("two_gpus", [])]
    others += [row | {"schedule": f"reload: {row['name']}"} for row in report.get("reload", {}).get("steps", [])]
    others += [row | {"schedule": row["name"]} for row in report.get("heads", {}).get("steps", [])]
    for row in [*report.get("runs", []), *actors, *others]:
        cells = (row["schedule"], row["tokens_compared"], row["tokens_different"], row.get("seconds", "-"))
        table.add_row(*map(str, cells), style="red" if row["tokens_different"] else None)
    console.print(table)
    for key in ("coverage", "stock", "off"):
        if key in report:
            console.print(f"{key}: {report[key]}", markup=False, soft_wrap=True)
    for failure in report["failures"]:
        console.print(f"FAILED {failure[:600]}", markup=False, soft_wrap=True)
    if not report["failures"]:
        console.print(f"{report['tokens_compared']} generated tokens compared, 0 different")
