"""A report as one HTML file that needs nothing beside it: ``python -m aligned_e2e.html_report report.json out.html``.

Takes the report of any profile. Whatever a report does not say is shown as *not run*, and what differs is shown in red
and counted here from the rows, not copied from the report's own sum.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .html_cost import GOAL_PERCENT, cost
from .html_markup import NOT_RUN, Column, Markup, details, join, pairs, table, tag, value_or_not_run
from .report import ReportError
from .report_view import (
    COUNTERS,
    PART_OF,
    PARTS,
    Compared,
    Record,
    at,
    comparisons,
    empty_counters,
    flat,
    items,
    load_report,
    mapping,
    missing_parts,
    number,
    off_equal,
    problems_of,
    reasons,
    rows_of,
    text,
)

__all__ = ["main", "render"]

_STYLE = pathlib.Path(__file__).with_name("html_report.css")

_ELSEWHERE = (
    ("companion verl run", "another project's recipe; nobody has run it with these packages"),
    ("64 GPUs", "needs a cluster"),
    ("profile gb200", "no kernel of these packages has run on Blackwell"),
    ("aarch64", "the recipe is docs/aarch64.md; nothing was built or run there"),
)


def render(report: Record, *, source: str) -> str:
    """The page of a report.

    Args:
        report: As :func:`load_report` returns it.
        source: What it was read from, for the footer.
    """
    cpu = report.get("profile") == "cpu"
    compared = list(comparisons(report))
    missing = missing_parts(report, compared, cpu)
    sections = [
        ("compared", "What ran, and on what", _provenance(report)),
        ("difference", "Zero difference", _difference(report, compared)),
        ("coverage", "Not vacuous", _coverage(report, cpu)),
    ]
    if not cpu:
        sections += [("stock", "Where stock vLLM parts", _stock(report)), ("cost", "What it costs", cost(report))]
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


# --- top of the page --------------------------------------------------------------------------------------------------


def _verdict(report: Record, compared: Sequence[Compared], missing: Sequence[tuple[str, str]]) -> Markup:
    total, different = sum(c.compared or 0 for c in compared), sum(c.different or 0 for c in compared)
    problems = [str(failure) for failure in items(report, "failures")] or problems_of(report, compared)
    state = "bad" if problems or different or not total else "open" if missing else "good"
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
    return tag("div", tag("strong", headline), *detail, class_=f"verdict {state}")


def _tile(value: object, what: str, state: str | None = None) -> Markup:
    return tag("div", tag("b", value), tag("span", what, class_="what"), class_=f"tile {state or ''}".strip())


def _tiles(report: Record, compared: Sequence[Compared]) -> Markup:
    rollout = [c for c in compared if c.kind == "rollout"]
    faults = rows_of(report, "sabotages")
    caught = sum(row.get("caught") is True for row in faults)
    slowest = max((x for row in rows_of(report, "cost") if (x := number(row, "overhead_percent")) is not None),
                  default=None)  # fmt: skip
    share = _stock_share(report)
    schedules = len(rollout) + bool(mapping(report, "reference"))  # which is not compared with itself
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


def _provenance(report: Record) -> Markup:
    first = [
        ("profile", text(report, "profile")),
        ("date", text(report, "date")),
        *flat(report.get("gpu"), "GPU"),
    ]
    versions = mapping(report, "versions") or {**mapping(report, "packages"), **mapping(report, "environment")}
    attestations = dict(_attestations(report))
    record = _attested_record(report)
    return join([
        tag("p", "The same requests, served in different ways, and recomputed by an actor. Compared are token ids, the "
            "bits of the logprobs and digests of the logits of the whole vocabulary.", class_="lead"),
        pairs(first),
        tag("h3", "Versions"),
        pairs(flat(versions)) if versions else tag("p", NOT_RUN),
        tag("h3", "Attestation"),
        pairs([("digest", _hash(text(record, "digest"))), ("architecture", text(record, "arch")),
               ("scale format", text(record, "scale_format")), *_libraries(attestations.values())]),
        details("Attestation by part", _attested(attestations)) if len(attestations) > 1 else None,
        details("Whole attestation", pairs(flat(record))) if record else None,
        details("Model", pairs(flat(report.get("model")))) if report.get("model") else None,
        _commands(report),
    ])  # fmt: skip


def _hash(digest: str | None) -> Markup:
    return NOT_RUN if digest is None else tag("code", digest)


def _attested_record(report: Record) -> Record:
    """The attestation that stands for the run: the first that says aligned, or the first."""
    found = [record for _, record in _attestations(report)]
    return next((record for record in found if record.get("aligned") is True), found[0] if found else {})


def _libraries(attestations: Iterable[Record]) -> Iterator[tuple[str, Markup]]:
    """The libraries that were attested; all parts must have used the same ones."""
    digests: dict[str, dict[str | None, None]] = {}
    for record in attestations:
        for name, library in mapping(record, "native").items():
            digests.setdefault(str(name), {})[text(library, "sha256")] = None
    for name, found in digests.items():
        several = f"{len(found)} different ones: {', '.join(map(str, found))}"
        yield f"{name} library", tag("span", several, class_="bad-text") if len(found) > 1 else _hash(next(iter(found)))


def _attested(attestations: Record) -> Markup:
    columns = (Column("part"), Column("aligned"), Column("packages with active hooks"), Column("digest"))
    lead = tag("p", "Parts without hooks, or over another transport, differ on purpose.", class_="lead")
    rows = []
    for name, record in attestations.items():
        hooks = len(mapping(record, "hooks")) if "hooks" in record else None
        cells = (value_or_not_run(record.get("aligned")), value_or_not_run(hooks), _hash(text(record, "digest")))
        rows.append((None, (name, *cells)))
    return join([lead, table(columns, rows)])


def _attestations(report: Record) -> Iterator[tuple[str, Record]]:
    """Attestations by part; of each at least its digest."""
    if mapping(report, "attestation"):
        yield "run", mapping(report, "attestation")
    for name, value in mapping(report, "attestations").items() or enumerate(items(report, "attestations"), 1):
        if isinstance(value, Mapping):
            yield str(value.get("part", name)), value
        elif value is not None:
            yield str(name), {"digest": value}


def _commands(report: Record) -> Markup | None:
    parts = rows_of(report, "parts")
    if not parts:
        return None
    columns = (Column("part"), Column("seconds", number=True), Column("command"))
    rows = [
        (None, (value_or_not_run(text(p, "part")), value_or_not_run(number(p, "seconds")),
                tag("code", _command(p)) if p.get("command") else NOT_RUN))
        for p in parts
    ]  # fmt: skip
    return details("Commands", table(columns, rows))


def _command(part: Record) -> str:
    command = part["command"]
    return " ".join(map(str, command)) if isinstance(command, list) else str(command)


def _count(c: Compared) -> Markup:
    if c.state == "open":
        return tag("span", NOT_RUN, class_="cell open")
    numbers = [f"{c.different:,} ", tag("small", f"of {c.compared:,}")]
    return tag("span", *numbers, class_=f"cell {c.state}")


def _difference(report: Record, compared: Sequence[Compared]) -> Markup:
    rollout = [c for c in compared if c.kind == "rollout"]
    cells = {(c.name, c.engine): _count(c) for c in rollout}
    if (first := mapping(report, "reference")) and rollout:
        place = (text(first, "schedule") or "unnamed", text(first, "engine") or "unnamed")
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
    did = [(c.name, ", ".join(f"{key} {value}" for key, value in flat(c.doing))) for c in rollout if c.doing]
    return join([
        tag("p", lead, class_="lead"),
        table((Column("schedule"), *map(Column, engines)), rows, class_="matrix grid") if rows else tag("p", NOT_RUN),
        tag("h3", "Actors, reload, 32 heads, quick test, two GPUs"),
        table((Column("comparison"), Column("kind"), Column("different")), others, class_="matrix")
        if others else tag("p", NOT_RUN),
        tag("h3", "First differences") if firsts else None,
        pairs((name, tag("code", first) if first else None) for name, first in firsts) if firsts else None,
        details("What each schedule did", pairs(did)) if did else None,
    ])  # fmt: skip


def _coverage(report: Record, cpu: bool) -> Markup:
    coverage = mapping(report, "coverage")
    names = [*coverage] if cpu else [*COUNTERS, *(key for key in coverage if key not in COUNTERS)]
    empty = {key for key, _ in empty_counters(report)}
    tiles = [
        _tile(value_or_not_run(coverage.get(key)), COUNTERS.get(key, key.replace("_", " ")),
              "bad" if key in empty else None)
        for key in names
    ]  # fmt: skip
    lead = "A run in which one of these is zero shows nothing, and fails."
    if not cpu:
        equal = off_equal(report)
        tiles.append(_tile(value_or_not_run(equal), "flag unset: logits of an install without us",
                           None if equal is None else "good" if equal else "bad"))  # fmt: skip
    return join([tag("p", lead, class_="lead"), tag("div", *tiles, class_="tiles") if tiles else tag("p", NOT_RUN)])


def _stock_share(report: Record) -> float | None:
    tokens, different = number(report, "stock", "tokens"), number(report, "stock", "tokens_different")
    return None if not tokens or different is None else 100 * different / tokens


def _stock(report: Record) -> Markup:
    places = [
        (str(place[0]), str(place[1]), float(place[2]))
        for place in items(report, "stock", "divergence")
        if isinstance(place, list) and len(place) == 3 and isinstance(place[2], int | float) and math.isfinite(place[2])
    ]
    largest = value_or_not_run(number(report, "stock", "max_abs_logprob_diff"), "{:.3g} nat")
    facts = pairs([
        ("tokens compared", number(report, "stock", "tokens")),
        ("different", number(report, "stock", "tokens_different")),
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


def _sabotages(report: Record, cpu: bool) -> Markup:
    faults = rows_of(report, "sabotages")
    lead = tag("p", "One fault at a time, on the rollout's side only; each must be caught in the way that was said "
               "beforehand, and located.", class_="lead")  # fmt: skip
    if not faults:
        return join([lead, tag("p", NOT_RUN)])
    told = () if cpu else ("hook", "expected")
    columns = (Column("fault"), *(Column({"expected": "to be caught by"}.get(key, key)) for key in told),
               Column("caught"), Column("by"), Column("layer"), Column("op"))  # fmt: skip
    rows = []
    for row in faults:
        caught, place = row.get("caught") is True, [text(row, f"located_{part}") for part in ("layer", "op")]
        by = text(row, "by") or text(row, "caught_by")
        rows.append((
            None if caught else "bad",
            (value_or_not_run(text(row, "name")), *(value_or_not_run(text(row, key)) for key in told),
             "yes" if caught else tag("span", "no", class_="bad-text"), by or "nobody",
             # A fault that changes no bits has no place.
             *(value_or_not_run(x) if by == "bits" else x for x in place)),
        ))  # fmt: skip
    return join([lead, table(columns, rows)])


def _oracle(report: Record) -> Markup:
    lead = tag("p", "transformers' own DeepSeek-V4 with the same weights: rollout and actor share one model and would "
               "share a mistake in it.", class_="lead")  # fmt: skip
    oracle = report.get("oracle")
    return join([lead, pairs((name.replace("_", " "), x) for name, x in flat(oracle)) if oracle else tag("p", NOT_RUN)])


def _not_run(report: Record, missing: Sequence[tuple[str, str]]) -> Markup:
    names = dict(missing)
    taken = {PART_OF.get(key, key) for key, name in PARTS.items() if name in names}
    taken |= {PART_OF[name] for name in names if name in PART_OF}
    said = {what: why for what, why in reasons(report).items() if what not in taken}
    rows = [(None, (what, why or "no reason given")) for what, why in (dict(_ELSEWHERE) | names | said).items()]
    return table((Column("what"), Column("why")), rows)


# --- the preview's lists ----------------------------------------------------------------------------------------------


def _preview(report: Record, compared: Sequence[Compared], cpu: bool) -> Markup:
    """The preview's own two lists, word for word, with what this report can say to each point."""
    suites = {str(row.get("package")): row for row in rows_of(report, "suites")}
    total, different = sum(c.compared or 0 for c in compared), sum(c.different or 0 for c in compared)
    run = f"profile {report.get('profile')}: {different:,} of {total:,} compared tokens different"
    reload = [c for c in compared if c.kind == "reload"]
    record = _attested_record(report)

    def suite(*packages: str) -> Markup:
        return join(
            part
            for package in packages
            for part in (f"{package}: ", _suite(suites.get(package)), "; " if package != packages[-1] else None)
        )

    def profile(name: str) -> object:
        return run if report.get("profile") == name and total else NOT_RUN

    single = join([NOT_RUN, "; here one machine, ", run]) if total and not cpu else NOT_RUN
    quick = next((c for c in compared if c.kind == "quick test" and c.state != "open"), None)
    tested = run if report.get("quick") and total else NOT_RUN
    if quick is not None:
        tested = f"{quick.different:,} of {quick.compared:,} compared tokens different"
    plan = (
        ("Run the batch-invariant kernel contract and large-tensor offset tests.", suite("bi-kernels")),
        ("Run deterministic sparse top-k tie/order tests.", suite("bi-sparse-attn")),
        ("Run sparse FlashMLA and DeepSeek-V4 sparse decode tests.", suite("bi-sparse-attn")),
        ("Run batch-invariant DeepGEMM/MoE and router gate tests.", suite("bi-moe-deepep")),
        ("Run MHC graph/refit and layerwise reload tests.",
         join([suite("bi-reload"), "; reload in this run: ", *(map(_reloaded, reload) if reload else [NOT_RUN])])),
        ("Load both custom libraries on x86_64 and arm64 images.",
         join(["here four libraries; ", _loaded(report, record), "; arm64: ", NOT_RUN])),
        ("Run the companion verl quick_alignment_test, H100 aligned profile, and GB200 aligned profile.",
         join(["verl: ", NOT_RUN, "; H100: ", profile("h100"), "; H200: ", profile("h200"), "; GB200: ",
               profile("gb200")])),
    )  # fmt: skip
    results = (
        ("image digest", join(["no image; attestation ", _hash(text(record, "digest"))])),
        ("verl recipe PR", NOT_RUN),
        ("quick alignment test", join(["verl's: ", NOT_RUN, "; of this repository: ", tested])),
        ("H100 64-GPU aligned run", single),
        ("GB200 32-GPU aligned run", NOT_RUN),
    )  # fmt: skip
    return join([
        tag("p", "The preview's own lists; a suite counts only if this report has a record of it.", class_="lead"),
        tag("h3", "Test plan"), _points(plan), tag("h3", "Test result"), _points(results),
    ])  # fmt: skip


def _points(points: Sequence[tuple[str, object]]) -> Markup:
    return tag("ul", *(tag("li", point, tag("div", found)) for point, found in points), class_="plan")


def _suite(row: Record | None) -> Markup:
    passed, failed = number(row, "passed"), number(row, "failed")
    if passed is None or failed is None:
        return NOT_RUN
    return tag("span", f"{passed:,} passed, {failed:,} failed", class_="bad-text" if failed or not passed else None)


def _reloaded(c: Compared) -> Markup:
    return join([f"{c.name}, ", NOT_RUN if c.state == "open" else f"{c.different:,} of {c.compared:,} different", ". "])


def _loaded(report: Record, record: Record) -> Markup:
    """Which libraries the attested process had loaded, and on what kind of host."""
    machine = text(report, "versions", "machine") or text(report, "environment", "machine") or "host not named"
    loaded = [str(name) for name, library in mapping(record, "native").items() if at(library, "loaded") is True]
    return join([f"{machine}: ", f"{len(loaded)} loaded ({', '.join(loaded)})" if loaded else NOT_RUN])


if __name__ == "__main__":
    sys.exit(main())
