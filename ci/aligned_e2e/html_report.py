"""A report as one HTML file that needs nothing beside it: ``python -m aligned_e2e.html_report report.json out.html``.

Takes the report of any profile. Whatever a report does not say is shown as *not run*, and what differs is shown in red
and counted here from the rows, not copied from the report's own sum.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .html_markup import NOT_RUN, Column, Markup, bar, join, pairs, table, tag, value_or_not_run
from .report import ReportError

__all__ = ["load_report", "main", "render"]

GOAL_PERCENT = 5.0
"""How much slower than stock vLLM aligned mode may be."""

_STYLE = pathlib.Path(__file__).with_name("html_report.css")
_Record = Mapping[str, Any]

_COUNTERS = {
    "preemptions": "requests preempted and recomputed",
    "cached_tokens": "prompt tokens taken from the prefix cache",
    "prefill_splits": "prompts cut into chunks",
    "graph_full": "replays of full CUDA graphs",
    "graph_piecewise": "replays of piecewise CUDA graphs",
    "graph_none": "steps without a graph",
    "tokens_past_top_k": "tokens past the top-k threshold",
}
_PARTS = {
    "runs": "rollout schedules",
    "actors": "actors",
    "reload": "weight reload",
    "two_gpus": "two GPUs: expert parallelism, an idle rank",
    "sabotages": "faults on purpose",
    "off": "flag unset: logits of an install without us",
    "coverage": "coverage of the run",
    "stock": "stock vLLM on the same requests",
    "cost": "tokens per second against stock",
    "layers": "GPU time by layer type",
    "ops": "GPU time by op",
    "extrapolated": "GPU time extrapolated to 43 layers",
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
_PART_OF = {"layers": "cost", "ops": "cost", "extrapolated": "cost"}  # what of a report's list of parts these belong to
_NOTHING = "no record in this report"
_ELSEWHERE = (
    ("companion verl run", "another project's recipe; nobody has run it with these packages"),
    ("64 GPUs", "needs a cluster"),
    ("profile gb200", "no kernel of these packages has run on Blackwell"),
    ("aarch64", "the recipe is docs/aarch64.md; nothing was built or run there"),
)


@dataclass(frozen=True, slots=True)
class _Compared:
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
    def doing(self) -> _Record:
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
        report = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
        if not isinstance(report["profile"], str):
            raise TypeError("its profile is no text")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReportError(f"{path}: expected a report, got something else ({error}). Run the profile again.") from error
    return dict(report)


def render(report: _Record, *, source: str) -> str:
    """The page of a report.

    Args:
        report: As :func:`load_report` returns it.
        source: What it was read from, for the footer.
    """
    cpu = report.get("profile") == "cpu"
    compared = list(_compared(report))
    missing = _missing(report, compared, cpu)
    sections = [
        ("compared", "What ran, and on what", _provenance(report)),
        ("difference", "Zero difference", _difference(report, compared)),
        ("coverage", "Not vacuous", _coverage(report, cpu)),
    ]
    if not cpu:
        sections += [("stock", "Where stock vLLM parts", _stock(report)), ("cost", "What it costs", _cost(report))]
    sections.append(("faults", "Faults on purpose", _sabotages(report, cpu)))
    if cpu:
        sections.append(("oracle", "A second implementation", _oracle(report)))
    sections += [
        ("not-run", "What was not run", _not_run(report, missing)),
        ("preview", "The preview's test plan and results", _preview(report, compared, cpu)),
    ]
    title = f"aligned_e2e, profile {report.get('profile')}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(_STYLE.read_text(encoding="utf-8"))),
    )
    nav = tag("nav", *(tag("a", name, href=f"#{id_}") for id_, name, _ in sections), aria_label="Sections")
    top = tag(
        "header", tag("h1", title), _verdict(report, compared, missing), _tiles(report, compared), nav, class_="top"
    )
    main = tag("main", *(tag("section", tag("h2", name), body, id=id_) for id_, name, body in sections))
    foot = tag("footer", tag("p", f"Made by aligned_e2e.html_report from {source}."))
    return f"<!doctype html>\n{tag('html', head, tag('body', top, main, foot), lang='en')}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page of a report. Exit code 2: no report."""
    parser = argparse.ArgumentParser(prog="aligned_e2e.html_report", description=main.__doc__)
    parser.add_argument("report", type=pathlib.Path, metavar="REPORT", help="report.json of any profile")
    parser.add_argument("output", type=pathlib.Path, metavar="OUTPUT", help="the HTML file to write")
    arguments = parser.parse_args(argv)
    try:
        report = load_report(arguments.report)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    digest = hashlib.sha256(arguments.report.read_bytes()).hexdigest()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    page = render(report, source=f"{arguments.report.name}, sha256 {digest}")
    arguments.output.write_text(page, encoding="utf-8")
    return 0


# --- reading ----------------------------------------------------------------------------------------------------------


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"a number that is {constant}")


def _at(record: object, *path: str) -> Any:
    for key in path:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def _number(record: object, *path: str) -> float | None:
    value = _at(record, *path)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _text(record: object, *path: str) -> str | None:
    value = _at(record, *path)
    return None if value is None or isinstance(value, Mapping | list) else str(value)


def _mapping(record: object, *path: str) -> _Record:
    value = _at(record, *path)
    return value if isinstance(value, Mapping) else {}


def _list(record: object, *path: str) -> list[Any]:
    value = _at(record, *path)
    return value if isinstance(value, list) else []


def _rows(record: object, *path: str) -> list[_Record]:
    return [row for row in _list(record, *path) if isinstance(row, Mapping)]


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name} {key}".strip())
    elif isinstance(value, list) and value:
        yield name, ", ".join(map(str, value))
    else:
        yield name, None if value in (None, []) else value


def _compared(report: _Record) -> Iterator[_Compared]:
    """Every comparison of a report, of profile ``cpu`` or of the others."""

    def read(kind: str, name: str, row: _Record, engine: str = "") -> _Compared:
        return _Compared(
            kind=kind,
            name=name,
            engine=engine,
            compared=_number(row, "tokens_compared"),
            different=_number(row, "tokens_different"),
            first=_text(row, "first_difference"),
            seconds=_number(row, "seconds"),
            did=dict(_mapping(row, "did") or _mapping(row, "plan")),
            skipped=_text(row, "reason"),
        )

    for row in _rows(report, "schedules"):
        yield read("rollout", _text(row, "name") or "unnamed", row, "reference model")
    for row in _rows(report, "runs"):
        yield read("rollout", _text(row, "schedule") or "unnamed", row, _text(row, "engine") or "unnamed")
    for row in _rows(report, "actors"):
        name = _text(row, "name") or "unnamed"
        yield read("actor", _ACTORS.get(name, name), row)
    steps = _rows(report, "reload", "comparisons") or _rows(report, "reload", "steps")
    for row in steps:
        yield read("reload", _text(row, "name") or "unnamed", row)
    if not steps and _at(report, "reload", "tokens_compared") is not None:
        yield read("reload", "new weights and the old ones again, graphs kept", _mapping(report, "reload"))
    for row in _rows(report, "two_gpus"):
        yield read("two GPUs", _text(row, "name") or "unnamed", row)


def _missing(report: _Record, compared: Sequence[_Compared], cpu: bool) -> list[tuple[str, str]]:
    """Parts of the profile that the report has nothing of, and why."""
    parts = _CPU_PARTS if cpu else _QUICK_PARTS if report.get("quick") else _PARTS
    said = _reasons(report)
    missing = [
        (name, said.get(_PART_OF.get(key, key)) or _NOTHING)
        for key, name in parts.items()
        if report.get(key) is None or (report[key] in ([], {}) and key != "failures")
    ]
    if _rows(report, "actors"):
        there = {c.name for c in compared if c.kind == "actor"}
        missing += [(name, _NOTHING) for name in _ACTORS.values() if name not in there]
    missing += [(f"{c.kind}: {c.name}", c.skipped or _NOTHING) for c in compared if c.state == "open"]
    if not cpu and report.get("coverage"):
        absent = [text for key, text in _COUNTERS.items() if _number(report, "coverage", key) is None]
        missing += [(f"coverage: {text}", _NOTHING) for text in absent]
    return missing


def _reasons(report: _Record) -> dict[str, str | None]:
    """What the report itself says was not run, and why."""
    return {_text(row, "what") or "unnamed": _text(row, "why") for row in _rows(report, "not_run")}


def _problems(report: _Record, compared: Sequence[_Compared]) -> list[str]:
    """What the rows say against the run, whether or not the report lists it as a failure."""
    found = [
        f"{c.name}: {c.different:,} of {c.compared:,} tokens differ" if c.different else f"{c.name}: nothing compared"
        for c in compared
        if c.state == "bad"
    ]
    counted = sum(c.different or 0 for c in compared)
    claimed = _number(report, "tokens_different")
    if claimed is not None and claimed > counted:
        found.append(f"the report counts {claimed:,} different tokens, its rows {counted:,}")
    found += [
        f"fault not caught: {_text(row, 'name')}" for row in _rows(report, "sabotages") if row.get("caught") is not True
    ]
    if _off_equal(report) is False:
        found.append("with the flag unset, logits differ from those of an install without us")
    if _number(report, "reload", "addresses_moved"):
        found.append(f"reload: {_number(report, 'reload', 'addresses_moved'):,} tensors moved")
    found += [f"vacuous: {name} is {value}" for name, value in _empty_counters(report)]
    return found


def _empty_counters(report: _Record) -> list[tuple[str, object]]:
    return [(key, value) for key, value in _mapping(report, "coverage").items() if value in (0, False)]


def _off_equal(report: _Record) -> bool | None:
    equal, compared = _at(report, "off", "equal"), _number(report, "off", "compared")
    if equal is None or not compared:
        return None
    return equal if isinstance(equal, bool) else equal == compared


# --- top of the page --------------------------------------------------------------------------------------------------


def _verdict(report: _Record, compared: Sequence[_Compared], missing: Sequence[tuple[str, str]]) -> Markup:
    total, different = sum(c.compared or 0 for c in compared), sum(c.different or 0 for c in compared)
    problems = [str(failure) for failure in _list(report, "failures")] or _problems(report, compared)
    assumed = _list(report, "assumed_ready")
    state = "bad" if problems or different or not total else "open" if missing or assumed else "good"
    headline = f"{different:,} of {total:,} compared tokens different" if total else "Nothing was compared"
    if state == "bad":
        count = f"{len(problems)} failure{'s' * (len(problems) != 1)}. " if problems else ""
        detail = [
            tag("p", f"{count}The run does not count as aligned."),
            tag("ul", *(tag("li", problem) for problem in problems)) if problems else None,
        ]
    elif missing:
        names = "; ".join(name for name, _ in missing)
        detail = [tag("p", f"No failure in what ran. Not run, {len(missing)} of the profile: {names}.")]
    else:
        detail = [tag("p", "Token ids, bits of the logprobs and digests of full-vocabulary logits; no tolerance.")]
    if report.get("quick"):
        detail.append(tag("p", "The quick test: one engine against its own recomputation, and nothing else."))
    if assumed:
        detail.append(
            tag("p", f"Edits of vLLM that were run though their packages refuse them as not ready: {len(assumed)}.")
        )
    return tag("div", tag("strong", headline), *detail, class_=f"verdict {state}")


def _tile(value: object, what: str, state: str | None = None) -> Markup:
    return tag("div", tag("b", value), tag("span", what, class_="what"), class_=f"tile {state or ''}".strip())


def _tiles(report: _Record, compared: Sequence[_Compared]) -> Markup:
    rollout = [c for c in compared if c.kind == "rollout"]
    faults = _rows(report, "sabotages")
    caught = sum(row.get("caught") is True for row in faults)
    slowest = max((x for row in _rows(report, "cost") if (x := _number(row, "overhead_percent")) is not None),
                  default=None)  # fmt: skip
    share = _stock_share(report)
    schedules = len(rollout) + bool(_mapping(report, "reference"))  # which is not compared with itself
    tiles = [
        _tile(schedules if rollout else NOT_RUN, "schedules of the same requests"),
        _tile(len({c.engine for c in rollout}) if rollout else NOT_RUN, "engines that served them"),
        _tile(f"{caught} of {len(faults)}" if faults else NOT_RUN, "faults on purpose caught",
              None if not faults else "good" if caught == len(faults) else "bad"),
    ]  # fmt: skip
    if report.get("profile") != "cpu":
        tiles += [
            _tile(value_or_not_run(share, "{:.1f} %"), "of the same tokens differ without the packages"),
            _tile(value_or_not_run(slowest, "{:+.1f} %"), f"slower than stock at worst; goal {GOAL_PERCENT:g} %",
                  None if slowest is None else "good" if slowest <= GOAL_PERCENT else "bad"),
        ]  # fmt: skip
    return tag("div", *tiles, class_="tiles")


# --- sections ---------------------------------------------------------------------------------------------------------


def _provenance(report: _Record) -> Markup:
    first = [
        ("profile", _text(report, "profile")),
        ("date", _text(report, "date")),
        *_flat(report.get("gpu"), "GPU"),
    ]
    versions = _mapping(report, "versions") or {**_mapping(report, "packages"), **_mapping(report, "environment")}
    attestations = dict(_attestations(report))
    record = next((r for r in attestations.values() if r.get("aligned")), next(iter(attestations.values()), {}))
    return join([
        tag("p", "The same requests, served in different ways, and recomputed by an actor. Compared are token ids, the "
            "bits of the logprobs and digests of the logits of the whole vocabulary.", class_="lead"),
        pairs(first),
        tag("h3", "Versions"),
        pairs(_flat(versions)) if versions else tag("p", NOT_RUN),
        tag("h3", "Attestation"),
        pairs([("digest", _hash(_text(record, "digest"))), ("architecture", _text(record, "arch")),
               ("scale format", _text(record, "scale_format")), *_libraries(attestations.values())]),
        _details("Attestation by part", _attested(attestations)) if len(attestations) > 1 else None,
        _details("Whole attestation", pairs(_flat(record))) if record else None,
        _details("Edits that were run though not ready", tag("ul", *(tag("li", tag("code", t)) for t in assumed)))
        if (assumed := _list(report, "assumed_ready")) else None,
        _details("Model", pairs(_flat(report.get("model")))) if report.get("model") else None,
        _commands(report),
    ])  # fmt: skip


def _hash(digest: str | None) -> Markup:
    return NOT_RUN if digest is None else tag("code", digest)


def _libraries(attestations: Iterable[_Record]) -> Iterator[tuple[str, Markup]]:
    """The libraries that were attested; all parts must have used the same ones."""
    digests: dict[str, dict[str | None, None]] = {}
    for record in attestations:
        for name, library in _mapping(record, "native").items():
            digests.setdefault(str(name), {})[_text(library, "sha256")] = None
    for name, found in digests.items():
        several = f"{len(found)} different ones: {', '.join(map(str, found))}"
        yield f"{name} library", tag("span", several, class_="bad-text") if len(found) > 1 else _hash(next(iter(found)))


def _attested(attestations: _Record) -> Markup:
    columns = (Column("part"), Column("aligned"), Column("packages with active hooks"), Column("digest"))
    lead = tag("p", "Parts without hooks, or over another transport, differ on purpose.", class_="lead")
    rows = []
    for name, record in attestations.items():
        hooks = len(_mapping(record, "hooks")) if "hooks" in record else None
        cells = (value_or_not_run(record.get("aligned")), value_or_not_run(hooks), _hash(_text(record, "digest")))
        rows.append((None, (name, *cells)))
    return join([lead, table(columns, rows)])


def _attestations(report: _Record) -> Iterator[tuple[str, _Record]]:
    """Attestations by part; of each at least its digest."""
    if _mapping(report, "attestation"):
        yield "run", _mapping(report, "attestation")
    for name, value in _mapping(report, "attestations").items() or enumerate(_list(report, "attestations"), 1):
        if isinstance(value, Mapping):
            yield str(value.get("part", name)), value
        elif value is not None:
            yield str(name), {"digest": value}


def _commands(report: _Record) -> Markup | None:
    parts = _rows(report, "parts")
    if not parts:
        return None
    columns = (Column("part"), Column("seconds", number=True), Column("command"))
    rows = [
        (None, (value_or_not_run(_text(p, "part")), value_or_not_run(_number(p, "seconds")),
                tag("code", _command(p)) if p.get("command") else NOT_RUN))
        for p in parts
    ]  # fmt: skip
    return _details("Commands", table(columns, rows))


def _command(part: _Record) -> str:
    command = part["command"]
    return " ".join(map(str, command)) if isinstance(command, list) else str(command)


def _details(summary: str, body: Markup) -> Markup:
    return tag("details", tag("summary", summary), body)


def _count(c: _Compared) -> Markup:
    if c.state == "open":
        return tag("span", NOT_RUN, class_="cell open")
    numbers = [f"{c.different:,} ", tag("small", f"of {c.compared:,}")]
    return tag("span", *numbers, class_=f"cell {c.state}")


def _difference(report: _Record, compared: Sequence[_Compared]) -> Markup:
    rollout = [c for c in compared if c.kind == "rollout"]
    cells = {(c.name, c.engine): _count(c) for c in rollout}
    if (first := _mapping(report, "reference")) and rollout:
        place = (_text(first, "schedule") or "unnamed", _text(first, "engine") or "unnamed")
        cells = {place: tag("span", "reference", class_="cell")} | cells
    engines = list(dict.fromkeys(engine for _, engine in cells))
    names = dict.fromkeys(name for name, _ in cells)
    rows = [(None, (name, *(cells.get((name, engine)) for engine in engines))) for name in names]
    total, different = sum(c.compared or 0 for c in compared), sum(c.different or 0 for c in compared)
    others = [
        ("bad" if c.state == "bad" else None, (c.name, c.kind, _count(c))) for c in compared if c.kind != "rollout"
    ]
    counted = tag("strong", f"{different:,} of {total:,}", class_="bad-text" if different else "good-text")
    lead = join(["Different tokens, by schedule and engine; in all ", counted if total else NOT_RUN, "."])
    firsts = [(c.name, c.first) for c in compared if c.different]
    did = [(c.name, ", ".join(f"{key} {value}" for key, value in _flat(c.doing))) for c in rollout if c.doing]
    return join([
        tag("p", lead, class_="lead"),
        table((Column("schedule"), *map(Column, engines)), rows, class_="matrix") if rows else tag("p", NOT_RUN),
        tag("h3", "Actors, reload, two GPUs"),
        table((Column("comparison"), Column("kind"), Column("different")), others, class_="matrix")
        if others else tag("p", NOT_RUN),
        tag("h3", "First differences") if firsts else None,
        pairs((name, tag("code", first) if first else None) for name, first in firsts) if firsts else None,
        _details("What each schedule did", pairs(did)) if did else None,
    ])  # fmt: skip


def _coverage(report: _Record, cpu: bool) -> Markup:
    coverage = _mapping(report, "coverage")
    names = [*coverage] if cpu else [*_COUNTERS, *(key for key in coverage if key not in _COUNTERS)]
    empty = {key for key, _ in _empty_counters(report)}
    tiles = [
        _tile(value_or_not_run(coverage.get(key)), _COUNTERS.get(key, key.replace("_", " ")),
              "bad" if key in empty else None)
        for key in names
    ]  # fmt: skip
    lead = "A run in which one of these is zero shows nothing, and fails."
    if not cpu:
        equal = _off_equal(report)
        tiles.append(_tile(value_or_not_run(equal), "flag unset: logits of an install without us",
                           None if equal is None else "good" if equal else "bad"))  # fmt: skip
    return join([tag("p", lead, class_="lead"), tag("div", *tiles, class_="tiles") if tiles else tag("p", NOT_RUN)])


def _stock_share(report: _Record) -> float | None:
    tokens, different = _number(report, "stock", "tokens"), _number(report, "stock", "tokens_different")
    return None if not tokens or different is None else 100 * different / tokens


def _stock(report: _Record) -> Markup:
    places = [
        (str(place[0]), str(place[1]), float(place[2]))
        for place in _list(report, "stock", "divergence")
        if isinstance(place, list) and len(place) == 3 and isinstance(place[2], int | float)
    ]
    largest = value_or_not_run(_number(report, "stock", "max_abs_logprob_diff"), "{:.3g} nat")
    facts = pairs([
        ("tokens compared", _number(report, "stock", "tokens")),
        ("different", _number(report, "stock", "tokens_different")),
        ("share", value_or_not_run(_stock_share(report), "{:.1f} %")),
        ("largest difference of a logprob", largest),
    ])  # fmt: skip
    return join([
        tag("p", "The same requests and the same flag, VLLM_BATCH_INVARIANT=1, without the packages.", class_="lead"),
        facts,
        tag("h3", "First op that differs, by layer, in percent of the differing tokens"),
        _heat(places) if places else tag("p", NOT_RUN),
    ])  # fmt: skip


def _heat(places: Sequence[tuple[str, str, float]]) -> Markup:
    """Ops down, in the order of the report; layers across."""
    layers = sorted({layer for layer, _, _ in places}, key=lambda x: (not x.isdigit(), int(x) if x.isdigit() else 0, x))
    shares: dict[tuple[str, str], float] = {}
    for layer, op, share in places:
        shares[layer, op] = shares.get((layer, op), 0.0) + share
    most = max(shares.values()) or 1.0
    head = [tag("th", "op", scope="col"), *(tag("th", f"layer {x}" if x.isdigit() else x, scope="col") for x in layers)]
    body = [
        tag("tr", tag("th", op, scope="row"), *(_heat_cell(shares.get((x, op), 0.0), most) for x in layers))
        for op in dict.fromkeys(op for _, op, _ in places)
    ]
    whole = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body), class_="heat")
    return tag("div", whole, class_="scroll", tabindex="0")


def _heat_cell(share: float, most: float) -> Markup:
    strength = math.sqrt(max(share, 0.0) / most)  # so that a few percent can still be seen
    ground = tag("rect", width="100%", height="100%", rx="4", class_="ground")
    colour = tag("rect", width="100%", height="100%", rx="4", class_="share", fill_opacity=round(strength, 3))
    number = f"{100 * share:.3g}" if share else "·"
    class_ = "none" if not share else "strong" if strength > 0.55 else None
    return tag("td", tag("svg", ground, colour, aria_hidden="true"), tag("span", number), class_=class_)


def _cost(report: _Record) -> Markup:
    cost = _rows(report, "cost")
    overheads = [x for row in cost if (x := _number(row, "overhead_percent")) is not None]
    above = sum(x > GOAL_PERCENT for x in overheads)
    summary = tag("span", f"{above} of {len(overheads)} workloads are more than {GOAL_PERCENT:g} % slower.",
                  class_="bad-text" if above else "good-text") if overheads else None  # fmt: skip
    return join([
        tag("p", "Stock with the flag off and its faster choice of experts, and aligned, by turns in one run. Bars to "
            "the right are slower, to the left faster; the dashed line is the goal. ", summary, class_="lead"),
        _workloads(cost, overheads) if cost else tag("p", NOT_RUN),
        tag("h3", "GPU time by layer type", tag("span", "stock", class_="key stock"),
            tag("span", "aligned", class_="key ours")),
        _paired(_rows(report, "layers")) if _rows(report, "layers") else tag("p", NOT_RUN),
        tag("h3", "Extrapolated to the whole model"),
        pairs([
            ("layers", _number(report, "extrapolated", "layers")),
            ("stock", value_or_not_run(_number(report, "extrapolated", "stock_us"), "{:,.0f} µs")),
            ("aligned", value_or_not_run(_number(report, "extrapolated", "aligned_us"), "{:,.0f} µs")),
            ("slower by", value_or_not_run(_number(report, "extrapolated", "overhead_percent"), "{:+.1f} %")),
        ]),
        tag("h3", "What each op adds or saves, all its calls in one step"),
        _op_table(_rows(report, "ops")) if _rows(report, "ops") else tag("p", NOT_RUN),
    ])  # fmt: skip


def _workloads(cost: Sequence[_Record], overheads: Sequence[float]) -> Markup:
    low = min([*overheads, 0.0]) * 1.1
    high = max([*overheads, GOAL_PERCENT]) * 1.1
    columns = (Column("workload"), Column("batch", number=True), Column("stock tok/s", number=True),
               Column("aligned tok/s", number=True), Column("slower by", number=True), Column("", wide=True),
               Column("stock's experts"))  # fmt: skip
    rows = []
    for row in cost:
        overhead = _number(row, "overhead_percent")
        state = None if overhead is None else "good" if overhead <= GOAL_PERCENT else "bad"
        name = value_or_not_run(_text(row, "workload"))
        said = value_or_not_run(overhead, "{:+.1f} %")
        cells = (
            name, value_or_not_run(_number(row, "batch")), value_or_not_run(_number(row, "stock_tok_s"), "{:,.0f}"),
            value_or_not_run(_number(row, "aligned_tok_s"), "{:,.0f}"),
            tag("span", said, class_="bad-text") if state == "bad" else said,
            None if overhead is None or state is None else
            bar(overhead, low, high, class_=state, label=f"{overhead:+.1f} %", marks={"goal": GOAL_PERCENT}),
            value_or_not_run(_text(row, "stock_baseline")),
        )  # fmt: skip
        rows.append((None, cells))
    return table(columns, rows)


def _paired(layers: Sequence[_Record]) -> Markup:
    times = [x for row in layers for key in ("stock_us", "aligned_us") if (x := _number(row, key)) is not None]
    most = max([*times, 0.0]) or 1.0
    columns = (Column("layer type"), Column("stock µs", number=True), Column("aligned µs", number=True),
               Column("", wide=True))  # fmt: skip
    rows = []
    for row in layers:
        stock, aligned = _number(row, "stock_us"), _number(row, "aligned_us")
        bars = [
            bar(x, 0.0, most, class_=class_, label=f"{x:,.1f} µs")
            for x, class_ in ((stock, "stock"), (aligned, "ours"))
            if x is not None
        ]
        name = value_or_not_run(_text(row, "layer_type"))
        rows.append(
            (None, (name, value_or_not_run(stock, "{:,.1f}"), value_or_not_run(aligned, "{:,.1f}"), join(bars)))
        )
    return table(columns, rows)


def _op_table(ops: Sequence[_Record]) -> Markup:
    def adds(row: _Record) -> float | None:
        stock, aligned = (_number(row, key) for key in ("stock_us", "aligned_us"))
        return None if stock is None or aligned is None else aligned - stock

    added = [x for row in ops if (x := adds(row)) is not None]
    low, high = min([*added, 0.0]) * 1.1, max([*added, 0.0]) * 1.1
    columns = (Column("op"), Column("calls", number=True), Column("stock µs", number=True),
               Column("aligned µs", number=True), Column("adds µs", number=True), Column("", wide=True))  # fmt: skip
    rows = []
    for row in sorted(ops, key=lambda row: -abs(adds(row) or 0.0)):
        more = adds(row)
        chart = None
        if more is not None and high > low:
            chart = bar(more, low, high, class_="more" if more > 0 else "less", label=f"{more:+,.1f} µs")
        cells = (
            value_or_not_run(_text(row, "op")),
            value_or_not_run(_number(row, "calls")),
            value_or_not_run(_number(row, "stock_us"), "{:,.1f}"),
            value_or_not_run(_number(row, "aligned_us"), "{:,.1f}"),
            value_or_not_run(more, "{:+,.1f}"),
            chart,
        )
        rows.append((None, cells))  # fmt: skip
    return table(columns, rows)


def _sabotages(report: _Record, cpu: bool) -> Markup:
    faults = _rows(report, "sabotages")
    lead = tag("p", "One fault at a time, on the rollout's side only; each must be caught in the way that was said "
               "beforehand, and located.", class_="lead")  # fmt: skip
    if not faults:
        return join([lead, tag("p", NOT_RUN)])
    told = () if cpu else ("hook", "expected")
    columns = (Column("fault"), *(Column({"expected": "to be caught by"}.get(key, key)) for key in told),
               Column("caught"), Column("by"), Column("layer"), Column("op"))  # fmt: skip
    rows = []
    for row in faults:
        caught, place = row.get("caught") is True, [_text(row, f"located_{part}") for part in ("layer", "op")]
        by = _text(row, "by") or _text(row, "caught_by")
        rows.append((
            None if caught else "bad",
            (value_or_not_run(_text(row, "name")), *(value_or_not_run(_text(row, key)) for key in told),
             "yes" if caught else tag("span", "no", class_="bad-text"), by or "nobody",
             # A fault that changes no bits has no place.
             *(value_or_not_run(x) if by == "bits" else x for x in place)),
        ))  # fmt: skip
    return join([lead, table(columns, rows)])


def _oracle(report: _Record) -> Markup:
    lead = tag("p", "transformers' own DeepSeek-V4 with the same weights: rollout and actor share one model and would "
               "share a mistake in it.", class_="lead")  # fmt: skip
    oracle = report.get("oracle")
    return join(
        [lead, pairs((name.replace("_", " "), x) for name, x in _flat(oracle)) if oracle else tag("p", NOT_RUN)]
    )


def _not_run(report: _Record, missing: Sequence[tuple[str, str]]) -> Markup:
    taken = {_PART_OF.get(key, key) for key, name in _PARTS.items() if name in dict(missing)}
    said = {what: why for what, why in _reasons(report).items() if what not in taken}
    rows = [(None, (what, why or "no reason given")) for what, why in (dict(_ELSEWHERE) | dict(missing) | said).items()]
    return table((Column("what"), Column("why")), rows)


# --- the preview's lists ----------------------------------------------------------------------------------------------


def _preview(report: _Record, compared: Sequence[_Compared], cpu: bool) -> Markup:
    """The preview's own two lists, word for word, with what this report can say to each point."""
    suites = {str(row.get("package")): row for row in _rows(report, "suites")}
    total, different = sum(c.compared or 0 for c in compared), sum(c.different or 0 for c in compared)
    run = f"profile {report.get('profile')}: {different:,} of {total:,} compared tokens different"
    reload = [c for c in compared if c.kind == "reload"]
    digests = sorted({str(d) for _, record in _attestations(report) if (d := _text(record, "digest"))})

    def suite(*packages: str) -> Markup:
        return join(
            part
            for package in packages
            for part in (f"{package}: ", _suite(suites.get(package)), "; " if package != packages[-1] else None)
        )

    def profile(name: str) -> object:
        return run if report.get("profile") == name and total else NOT_RUN

    single = join([NOT_RUN, "; here one machine, ", run]) if total and not cpu else NOT_RUN
    plan = (
        ("Run the batch-invariant kernel contract and large-tensor offset tests.", suite("bi-kernels")),
        ("Run deterministic sparse top-k tie/order tests.", suite("bi-sparse-attn")),
        ("Run sparse FlashMLA and DeepSeek-V4 sparse decode tests.", suite("bi-sparse-attn")),
        ("Run batch-invariant DeepGEMM/MoE and router gate tests.", suite("bi-moe-deepep")),
        ("Run MHC graph/refit and layerwise reload tests.",
         join([suite("bi-reload"), "; reload in this run: ", *(map(_reloaded, reload) if reload else [NOT_RUN])])),
        ("Load both custom libraries on x86_64 and arm64 images.",
         join(["here four libraries; x86_64: ", _loaded(report), "; arm64: ", NOT_RUN])),
        ("Run the companion verl quick_alignment_test, H100 aligned profile, and GB200 aligned profile.",
         join(["verl: ", NOT_RUN, "; H100: ", profile("h100"), "; H200: ", profile("h200"), "; GB200: ",
               profile("gb200")])),
    )  # fmt: skip
    results = (
        ("image digest", join(["no image; attestation ", tag("code", ", ".join(digests)) if digests else NOT_RUN])),
        ("verl recipe PR", NOT_RUN),
        ("quick alignment test", join(["verl's: ", NOT_RUN, "; of this repository: ",
                                       run if report.get("quick") and total else NOT_RUN])),
        ("H100 64-GPU aligned run", single),
        ("GB200 32-GPU aligned run", NOT_RUN),
    )  # fmt: skip
    return join([
        tag("p", "The preview's own lists; a suite counts only if this report has a record of it.", class_="lead"),
        tag("h3", "Test plan"), _points(plan), tag("h3", "Test result"), _points(results),
    ])  # fmt: skip


def _points(points: Sequence[tuple[str, object]]) -> Markup:
    return tag("ul", *(tag("li", point, tag("div", found)) for point, found in points), class_="plan")


def _suite(row: _Record | None) -> Markup:
    passed, failed = _number(row, "passed"), _number(row, "failed")
    if passed is None or failed is None:
        return NOT_RUN
    return tag("span", f"{passed:,} passed, {failed:,} failed", class_="bad-text" if failed or not passed else None)


def _reloaded(c: _Compared) -> Markup:
    return join([f"{c.name}, ", NOT_RUN if c.state == "open" else f"{c.different:,} of {c.compared:,} different", ". "])


def _loaded(report: _Record) -> object:
    """Whether the attested process had the four libraries loaded."""
    native = next((found for _, record in _attestations(report) if (found := _mapping(record, "native"))), {})
    loaded = [space for space, library in native.items() if _at(library, "loaded") is True]
    return f"{len(loaded)} loaded ({', '.join(loaded)})" if loaded else NOT_RUN


if __name__ == "__main__":
    sys.exit(main())
