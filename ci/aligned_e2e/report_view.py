"""What a report says, of whichever profile, for those who show it: nothing that it lacks is made up."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .report import ReportError

__all__ = [
    "COUNTERS",
    "PARTS",
    "PART_OF",
    "Compared",
    "Record",
    "at",
    "comparisons",
    "empty_counters",
    "flat",
    "items",
    "load_report",
    "mapping",
    "missing_parts",
    "number",
    "off_equal",
    "problems_of",
    "profile_of",
    "reasons",
    "rows_of",
    "text",
    "with_baselines",
]

Record = Mapping[str, Any]

COUNTERS = {
    "preemptions": "requests preempted and recomputed",
    "cached_tokens": "prompt tokens taken from the prefix cache",
    "prefill_splits": "prompts cut into chunks",
    "graph_full": "replays of full CUDA graphs",
    "graph_piecewise": "replays of piecewise CUDA graphs",
    "graph_none": "steps without a graph",
    "tokens_past_top_k": "tokens past the top-k threshold",
}
PARTS = {
    "runs": "rollout schedules",
    "actors": "actors",
    "reload": "weight reload",
    "heads": "a checkpoint with 32 heads",
    "two_gpus": "two GPUs: expert parallelism, an idle rank",
    "sabotages": "faults on purpose",
    "off": "flag unset: logits of an install without us",
    "coverage": "coverage of the run",
    "stock": "stock vLLM on the same requests",
    "cost": "tokens per second against stock",
    "layers": "GPU time by layer type",
    "ops": "GPU time by op",
    "failures": "the list of failures",
}
_CPU_PARTS = {
    "schedules": "rollout schedules",
    "reload": "weight reload",
    "coverage": "coverage of the run",
    "sabotages": "faults on purpose",
    "oracle": "comparison with transformers",
    "failures": "the list of failures",
}
_ACTORS = {
    "a": "actor (a): prompt logprobs of the finished sequences in another engine, with another budget",
    "b": "actor (b): the model's modules called on packed sequences, without an engine, as a trainer does",
}
_QUICK_PARTS = {"runs": "an engine against its own recomputation", "failures": "the list of failures"}
PART_OF = {
    **{"layers": "cost", "ops": "cost", "sabotages": "sabotage", "heads": "32 heads"},
    **{_ACTORS["a"]: "actor", _ACTORS["b"]: "actor b"},
}
"""What a report's own list of what was not run calls the part that these belong to, where that is another name."""
_NOTHING = "no record in this report"
_ONE_SIDE = (
    "GPU times are against the stock side named in the row alone: the other stock side was not profiled in this run, "
    "and at small batches stock with its own experts is likely faster than stock deep_gemm."
)
"""Said of a report of which a GPU time has no other stock side beside it."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One comparison, whatever the report calls it."""

    kind: str
    name: str
    engine: str
    compared: float | None
    different: float | None
    first: str | None = None
    seconds: float | None = None
    did: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def doing(self) -> Record:
        """What it did, and in how many seconds."""
        return self.did | ({} if self.seconds is None else {"seconds": self.seconds})

    @property
    def state(self) -> str:
        """``bad``: tokens differ, or none were compared; ``open``: it was not run."""
        if self.compared is None or self.different is None or (self.skipped and not self.compared):
            return "open"
        return "good" if self.compared and not self.different else "bad"


def load_report(path: pathlib.Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        ReportError: The file is missing, or is no report.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(report["profile"], str):
            raise TypeError("its profile is no text")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReportError(f"{path}: expected a report, got something else ({error}). Run the profile again.") from error
    return with_baselines(report)


def with_baselines(report: Record) -> dict[str, Any]:
    """The report, with the stock side of each GPU time in ``forward_baseline`` and ``cost_note`` where it had no rival.

    Older records timed and profiled the GPU for the stock side with most tokens/s alone, and their overhead was that of
    two medians; here it becomes, as in newer ones, the median over pairs of neighbouring turns.

    Args:
        report: Of any profile and age.
    """
    made = dict(report)
    alone = False
    for key in ("cost", "profiles"):
        if not isinstance(made.get(key), list):
            continue
        made[key] = [_with_baseline(row) if isinstance(row, Mapping) else row for row in made[key]]
        timed = [row for row in rows_of(made, key) if number(row, "stock_forward_us") is not None]
        alone = alone or any(len(set(mapping(row, "forward_us")) - {"aligned"}) < 2 for row in timed)
    made.pop("cost_note", None)
    return made | {"cost_note": _ONE_SIDE} if alone else made


def _with_baseline(row: Record) -> Record:
    spread = items(row, "overhead_spread")
    changed: dict[str, Any] = {}
    if len(spread) == 3 and number({"median": spread[1]}, "median") is not None:
        changed["overhead_percent"] = spread[1]
    if "forward_baseline" not in row and number(row, "stock_forward_us") is not None:
        changed["forward_baseline"] = text(row, "stock_baseline")
    return {**row, **changed}


def profile_of(profiles: Sequence[Record], row: Record) -> Record:
    """The profile of a row of ``cost``; an empty one where its workload was not profiled."""
    same = (p for p in profiles if (p.get("workload"), p.get("batch")) == (row.get("workload"), row.get("batch")))
    return next(same, {})


def at(record: object, *path: str) -> Any:
    """Whatever is at the end of ``path``; None if a step of it is missing."""
    for key in path:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def number(record: object, *path: str) -> float | None:
    """A number there, or None."""
    value = at(record, *path)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def text(record: object, *path: str) -> str | None:
    """What is there as text, or None."""
    value = at(record, *path)
    return None if value is None or isinstance(value, Mapping | list) else str(value)


def mapping(record: object, *path: str) -> Record:
    """A mapping there, or an empty one."""
    value = at(record, *path)
    return value if isinstance(value, Mapping) else {}


def items(record: object, *path: str) -> list[Any]:
    """A list there, or an empty one."""
    value = at(record, *path)
    return value if isinstance(value, list) else []


def rows_of(record: object, *path: str) -> list[Record]:
    """The mappings of a list there."""
    return [row for row in items(record, *path) if isinstance(row, Mapping)]


def flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Names and values of nested mappings, one by one; None for nothing."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name} {key}".strip())
    elif isinstance(value, list) and value:
        yield name, ", ".join(map(str, value))
    else:
        yield name, None if value in (None, []) else value


def comparisons(report: Record) -> Iterator[Compared]:
    """Every comparison of a report, of profile ``cpu`` or of the others."""

    def read(kind: str, name: str, row: Record, engine: str = "") -> Compared:
        return Compared(
            kind=kind,
            name=name,
            engine=engine,
            compared=number(row, "tokens_compared"),
            different=number(row, "tokens_different"),
            first=text(row, "first_difference"),
            seconds=number(row, "seconds"),
            did=dict(mapping(row, "did") or mapping(row, "plan")),
            skipped=text(row, "reason"),
        )

    for row in rows_of(report, "schedules"):
        yield read("rollout", text(row, "name") or "unnamed", row, "reference model")
    for row in rows_of(report, "runs"):
        yield read("rollout", text(row, "schedule") or "unnamed", row, text(row, "engine") or "unnamed")
    for row in rows_of(report, "actors"):
        name = text(row, "name") or "unnamed"
        yield read("actor", _ACTORS.get(name, name), row)
    steps = rows_of(report, "reload", "comparisons") or rows_of(report, "reload", "steps")
    for row in steps:
        yield read("reload", text(row, "name") or "unnamed", row)
    if not steps and at(report, "reload", "tokens_compared") is not None:
        yield read("reload", "new weights and the old ones again, graphs kept", mapping(report, "reload"))
    for row in rows_of(report, "heads", "steps"):
        yield read("32 heads", text(row, "name") or "unnamed", row)
    if quick := mapping(report, "quick_test"):
        yield read("quick test", text(quick, "name") or "unnamed", quick)
    for row in rows_of(report, "two_gpus"):
        yield read("two GPUs", text(row, "name") or "unnamed", row)


def missing_parts(report: Record, compared: Sequence[Compared], cpu: bool) -> list[tuple[str, str]]:
    """Parts of the profile that the report has nothing of, and why."""
    parts = _CPU_PARTS if cpu else _QUICK_PARTS if report.get("quick") else PARTS
    said = reasons(report)
    missing = [
        (name, said.get(PART_OF.get(key, key)) or _NOTHING)
        for key, name in parts.items()
        if report.get(key) is None or (report[key] in ([], {}) and key != "failures")
    ]
    if rows_of(report, "actors"):
        there = {c.name for c in compared if c.kind == "actor"}
        missing += [(name, said.get(PART_OF[name]) or _NOTHING) for name in _ACTORS.values() if name not in there]
    missing += [(f"{c.kind}: {c.name}", c.skipped or _NOTHING) for c in compared if c.state == "open"]
    if mapping(report, "stock") and not items(report, "stock", "divergence"):
        missing.append(("where stock vLLM parts first", said.get("sabotage") or _NOTHING))  # the part that traces it
    if not cpu and report.get("coverage"):
        absent = [text for key, text in COUNTERS.items() if number(report, "coverage", key) is None]
        missing += [(f"coverage: {text}", _NOTHING) for text in absent]
    return missing


def reasons(report: Record) -> dict[str, str | None]:
    """What the report itself says was not run, and why."""
    return {text(row, "what") or "unnamed": text(row, "why") for row in rows_of(report, "not_run")}


def problems_of(report: Record, compared: Sequence[Compared]) -> list[str]:
    """What the rows say against the run, whether or not the report lists it as a failure."""
    found = [
        f"{c.name}: {c.different:,} of {c.compared:,} tokens differ" if c.different else f"{c.name}: nothing compared"
        for c in compared
        if c.state == "bad"
    ]
    counted = sum(c.different or 0 for c in compared)
    claimed = number(report, "tokens_different")
    if claimed is not None and claimed > counted:
        found.append(f"the report counts {claimed:,} different tokens, its rows {counted:,}")
    missed = [row for row in rows_of(report, "sabotages") if row.get("caught") is not True]
    found += [f"fault not caught: {text(row, 'name')}" for row in missed]
    if off_equal(report) is False:
        found.append("with the flag unset, logits differ from those of an install without us")
    if number(report, "reload", "addresses_moved"):
        found.append(f"reload: {number(report, 'reload', 'addresses_moved'):,} tensors moved")
    found += [f"vacuous: {name} is {value}" for name, value in empty_counters(report)]
    return found


def empty_counters(report: Record) -> list[tuple[str, object]]:
    """Counters of the coverage that are zero or false: such a run shows nothing."""
    return [(key, value) for key, value in mapping(report, "coverage").items() if value in (0, False)]


def off_equal(report: Record) -> bool | None:
    """Whether logits without the flag equal those of an install without the packages; None if nobody looked."""
    equal, compared = at(report, "off", "equal"), number(report, "off", "compared")
    if equal is None or not compared:
        return None
    return equal if isinstance(equal, bool) else equal == compared
