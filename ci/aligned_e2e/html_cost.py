"""What aligned mode costs, as a section of the page: tokens per second, time of a forward, and where it goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .html_markup import NOT_RUN, Column, Markup, bar, details, join, table, tag, value_or_not_run
from .report_view import Record, items, mapping, number, profile_of, rows_of, text

__all__ = ["GOAL_PERCENT", "cost"]

GOAL_PERCENT = 5.0
"""How much slower than stock vLLM aligned mode may be."""

_BUSY_PERCENT = 90.0
"""A GPU that is busy for less of a forward has waited for the host."""

_APART = (("layers", "all layers"), ("lm_head", "lm_head"), ("final norm", "final norm"),
          ("log_softmax", "log-softmax"), ("sampling", "sampling"))  # fmt: skip
"""Parts of a step, and what they are called; the rest is small."""


def cost(report: Record) -> Markup:
    """The section. Whatever the report does not have is shown as not run."""
    rows = rows_of(report, "cost")
    overheads = [x for row in rows if (x := _finite(row, "overhead_percent")) is not None]
    above = sum(x > GOAL_PERCENT for x in overheads)
    profiles = rows_of(report, "profiles") or _only_profile(report)
    slow = [row for row in rows if (_finite(row, "overhead_percent") or 0) > GOAL_PERCENT]
    waited = sum(_host_bound(profile_of(profiles, row)) for row in slow)
    because = f", {waited} of them where the GPU waits for the host" if waited else ""
    summary = tag("span", f"{above} of {len(overheads)} workloads are more than {GOAL_PERCENT:g} % slower{because}.",
                  class_="bad-text" if above else "good-text") if overheads else None  # fmt: skip
    hosts = [profile for profile in profiles if mapping(profile, "sides")]
    note = text(report, "cost_note")
    return join([
        tag("p", _model(report), "Stock with the flag off, with its own experts and with DeepGEMM's, and aligned, by "
            "turns in one run. Tokens/s against the stock side that has more of them: medians, and below them how far "
            "turns were apart; slower by the median over pairs of neighbouring turns. Bars to the right are slower, to "
            "the left faster; the dashed line is the goal. ", summary, class_="lead"),
        _workloads(rows, overheads) if rows else tag("p", NOT_RUN),
        tag("h3", "The forward of one step"),
        tag("p", tag("strong", note)) if note else tag(
            "p", "From its first kernel to its last, by the GPU's clock, against the stock side whose forward is "
            "shorter, which may be another one than above. Where the GPU waits for the host, that counts.",
            class_="lead"),
        _steps(profiles) if profiles else tag("p", NOT_RUN),
        tag("h3", "The same by part"),
        tag("p", "Time in which the GPU was busy, under a profiler. Stock → aligned, in microseconds.", class_="lead"),
        _whole(profiles) if profiles else tag("p", NOT_RUN),
        tag("h3", "GPU and host"),
        tag("p", "A forward that takes longer than the GPU is busy has waited for the host, which launches each kernel "
            "itself where no graph is replayed. Host time is that of the forward under the profiler, which slows it "
            "down. Experts: how many different ones the tokens of a step chose in a layer.", class_="lead"),
        _hosts(hosts) if hosts else tag("p", NOT_RUN),
        tag("h3", "Time by layer type and by op, of one step", tag("span", "stock", class_="key stock"),
            tag("span", "aligned", class_="key ours")),
        *([details(f"{_name(profile)}: layer types, and what each op adds or saves", _profile(profile))
           for profile in profiles] or [tag("p", NOT_RUN)]),
    ])  # fmt: skip


def _model(report: Record) -> str:
    """What was measured, as a sentence."""
    layers, weights = (number(report, "cost_model", key) for key in ("layers", "weights_gib"))
    if layers is None:
        return ""
    held = "" if weights is None else f", {weights:g} GiB of weights"
    shared = ", which share the weights of a few" if mapping(report, "cost_model").get("shared") is True else ""
    return f"A model as wide as DeepSeek-V4-Flash with {layers:g} layers{shared}{held}. "


def _host_bound(profile: Record) -> bool:
    """Whether the GPU waited for the host in the aligned forward."""
    busy = number(profile, "sides", "aligned", "busy_percent")
    return busy is not None and busy < _BUSY_PERCENT


def _only_profile(report: Record) -> list[Record]:
    """A report's one profile, where it has no list of them."""
    found = {key: report.get(key) for key in ("layers", "ops")}
    return [found] if any(found.values()) else []


def _step(profile: Record) -> str:
    batch = number(profile, "batch")
    return f"{text(profile, 'workload') or 'one step'}{'' if batch is None else f', batch {batch:,}'}"


def _name(profile: Record) -> str:
    side = text(profile, "forward_baseline")
    return _step(profile) + (f", against {side}" if side else "")


def _finite(row: Record, key: str) -> float | None:
    """A number that can be drawn."""
    value = number(row, key)
    return value if value is not None and math.isfinite(value) else None


def _state(overhead: float | None) -> str | None:
    return None if overhead is None else "good" if overhead <= GOAL_PERCENT else "bad"  # NaN is bad


def _slower(overhead: float | None) -> Markup:
    said = value_or_not_run(overhead, "{:+.1f} %")
    return tag("span", said, class_="bad-text") if _state(overhead) == "bad" else said


def _apart(value: Markup, row: Record, key: str, form: str) -> Markup:
    """A median, and the least and the most of all turns."""
    spread = items(row, key)
    if len(spread) != 3 or not all(isinstance(x, int | float) for x in spread):
        return value
    ends = " to ".join(form.format(x) for x in (spread[0], spread[2]))
    return tag("span", value, tag("small", ends), class_="spread")


def _workloads(rows: Sequence[Record], overheads: Sequence[float]) -> Markup:
    low = min([*overheads, 0.0]) * 1.1
    high = max([*overheads, GOAL_PERCENT]) * 1.1
    columns = (Column("workload"), Column("batch", number=True), Column("stock tok/s", number=True),
               Column("aligned tok/s", number=True), Column("slower by", number=True), Column("", wide=True),
               Column("stock of tokens/s"))  # fmt: skip
    made = []
    for row in rows:
        overhead = number(row, "overhead_percent")
        state, ends = _state(overhead), _finite(row, "overhead_percent")
        chart = None
        if state is not None and ends is not None:
            chart = bar(ends, low, high, class_=state, label=f"{overhead:+.1f} %", marks={"goal": GOAL_PERCENT})
        stock, aligned = (value_or_not_run(number(row, f"{side}_tok_s"), "{:,.0f}") for side in ("stock", "aligned"))
        cells = (
            value_or_not_run(text(row, "workload")),
            value_or_not_run(number(row, "batch")),
            _apart(stock, row, "stock_spread", "{:,.0f}"),
            _apart(aligned, row, "aligned_spread", "{:,.0f}"),
            _apart(_slower(overhead), row, "overhead_spread", "{:+.1f}"),
            chart,
            value_or_not_run(text(row, "stock_baseline")),
        )
        made.append((None, cells))
    return table(columns, made)


def _steps(profiles: Sequence[Record]) -> Markup:
    """The model's forward, of both sides."""
    columns = (Column("step"), Column("stock µs", number=True), Column("aligned µs", number=True),
               Column("slower by", number=True))  # fmt: skip
    rows = []
    for profile in profiles:
        stock, aligned = (number(profile, f"{side}_forward_us") for side in ("stock", "aligned"))
        overhead = 100 * (aligned / stock - 1) if stock and aligned is not None else None
        cells = (
            _name(profile),
            *(value_or_not_run(us, "{:,.0f}") for us in (stock, aligned)),
            _slower(overhead),
        )
        rows.append((None, cells))
    return table(columns, rows)


def _whole(profiles: Sequence[Record]) -> Markup:
    columns = (Column("step"), *(Column(title, number=True) for _, title in _APART))
    rows = []
    for profile in profiles:
        parts = {text(part, "part"): part for part in rows_of(profile, "parts")}
        rows.append((None, (_name(profile), *(_pair(parts.get(name, {})) for name, _ in _APART))))
    return table(columns, rows)


def _hosts(profiles: Sequence[Record]) -> Markup:
    """Whether a forward was bound by the GPU or by the host, for every side that was profiled."""
    columns = (Column("step"), Column("side"), *(Column(title, number=True) for title in (
        "forward µs", "GPU busy µs", "busy", "kernels", "host µs", "experts")))  # fmt: skip
    forms = {"forward_us": "{:,.0f}", "busy_us": "{:,.0f}", "busy_percent": "{:.0f} %", "launches": "{:,.0f}"}
    rows = []
    for profile in profiles:
        for name, side in mapping(profile, "sides").items():
            host = number(side, "host_us")
            cells = (
                _step(profile),
                str(name),
                *(value_or_not_run(number(side, key), form) for key, form in forms.items()),
                "graph" if host is None else f"{host:,.0f}",
                value_or_not_run(number(side, "experts"), "{:,.0f}"),
            )
            rows.append((None, cells))
    return table(columns, rows)


def _pair(row: Record, key: str = "us") -> Markup:
    stock, aligned = (number(row, f"{side}_{key}") for side in ("stock", "aligned"))
    if stock is None or aligned is None:
        return NOT_RUN
    return join([f"{stock:,.0f} → {aligned:,.0f}"])


def _profile(profile: Record) -> Markup:
    layers, ops = rows_of(profile, "layers"), rows_of(profile, "ops")
    return join([
        _paired(layers) if layers else tag("p", NOT_RUN),
        _op_table(ops) if ops else tag("p", NOT_RUN),
    ])  # fmt: skip


def _paired(layers: Sequence[Record]) -> Markup:
    times = [x for row in layers for key in ("stock_us", "aligned_us") if (x := _finite(row, key)) is not None]
    most = max([*times, 0.0]) or 1.0
    columns = (Column("layer type"), Column("stock µs", number=True), Column("aligned µs", number=True),
               Column("", wide=True))  # fmt: skip
    rows = []
    for row in layers:
        stock, aligned = number(row, "stock_us"), number(row, "aligned_us")
        bars = [
            bar(x, 0.0, most, class_=class_, label=f"{x:,.1f} µs")
            for x, class_ in ((stock, "stock"), (aligned, "ours"))
            if x is not None and math.isfinite(x)
        ]
        name = value_or_not_run(text(row, "layer_type"))
        rows.append(
            (None, (name, value_or_not_run(stock, "{:,.1f}"), value_or_not_run(aligned, "{:,.1f}"), join(bars)))
        )
    return table(columns, rows)


def _op_table(ops: Sequence[Record]) -> Markup:
    def adds(row: Record) -> float | None:
        stock, aligned = (_finite(row, key) for key in ("stock_us", "aligned_us"))
        return None if stock is None or aligned is None else aligned - stock

    added = [x for row in ops if (x := adds(row)) is not None]
    low, high = min([*added, 0.0]) * 1.1, max([*added, 0.0]) * 1.1
    hosted = any(number(row, "stock_host_us") is not None for row in ops)
    columns = (Column("op"), Column("calls", number=True), Column("stock µs", number=True),
               Column("aligned µs", number=True), Column("adds µs", number=True), Column("", wide=True),
               *((Column("host µs", number=True),) if hosted else ()))  # fmt: skip
    rows = []
    for row in sorted(ops, key=lambda row: -abs(adds(row) or 0.0)):
        more = adds(row)
        chart = None
        if more is not None and high > low:
            chart = bar(more, low, high, class_="more" if more > 0 else "less", label=f"{more:+,.1f} µs")
        cells = (
            value_or_not_run(text(row, "op")),
            value_or_not_run(number(row, "calls")),
            value_or_not_run(number(row, "stock_us"), "{:,.1f}"),
            value_or_not_run(number(row, "aligned_us"), "{:,.1f}"),
            value_or_not_run(more, "{:+,.1f}"),
            chart,
            *((_pair(row, "host_us"),) if hosted else ()),
        )
        rows.append((None, cells))
    return table(columns, rows)
