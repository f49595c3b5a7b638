"""HTML as nested calls. Every text is escaped, unless a call of this module made it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["NOT_RUN", "Column", "Markup", "bar", "details", "join", "pairs", "table", "tag", "value_or_not_run"]


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


_VOID = frozenset({"meta"})


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """One element. A child that is None is left out, an attribute that is None too; ``class_`` is ``class``."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>" if name in _VOID else f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    """Elements one after the other."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(str(c)) for c in children if c is not None))


NOT_RUN = tag("span", "not run", class_="not-run")
"""What stands wherever a report says nothing."""


def value_or_not_run(value: object, form: str = "{}") -> Markup:
    """``value`` for people, by ``form`` if it is a number; NOT_RUN for None, so that nothing is ever made up."""
    if value is None:
        return NOT_RUN
    if isinstance(value, bool):
        return join(["yes" if value else "no"])
    if isinstance(value, int | float):
        return join([form.format(value) if form != "{}" else f"{value:,}"])
    return join([value])


@dataclass(frozen=True, slots=True)
class Column:
    """A column of :func:`table`.

    Attributes:
        title: Its header, repeated before each cell on a narrow screen.
        number: Whether its cells are numbers, set to the right.
        wide: Whether it takes what room there is.
    """

    title: str
    number: bool = False
    wide: bool = False


def table(
    columns: Sequence[Column], rows: Iterable[tuple[str | None, Sequence[object]]], *, class_: str = ""
) -> Markup:
    """A table that a narrow screen shows as one block for each row.

    Args:
        columns: Of every row.
        rows: A class for the row, or None, and its cells. A cell that is None is empty.
        class_: Further classes of the table.
    """
    classes = [" ".join(c for c in ("number" * x.number, "wide" * x.wide) if c) or None for x in columns]
    head = [tag("th", c.title, scope="col", class_=k) for c, k in zip(columns, classes, strict=True)]
    body = [
        tag("tr", *(_cell(i, columns[i], classes[i], cell) for i, cell in enumerate(cells)), class_=row)
        for row, cells in rows
    ]
    whole = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body), class_=f"stack {class_}".strip())
    return tag("div", whole, class_="scroll", tabindex="0")


def _cell(index: int, column: Column, class_: str | None, cell: object) -> Markup:
    if index == 0:
        return tag("th", cell, scope="row", class_=class_)
    empty = "empty" if cell is None else None
    return tag("td", cell, data_label=column.title, class_=" ".join(c for c in (class_, empty) if c) or None)


def pairs(entries: Iterable[tuple[str, object]]) -> Markup:
    """Names and what is known of each."""
    return tag("dl", *(join([tag("dt", name), tag("dd", value_or_not_run(value))]) for name, value in entries))


def details(summary: str, body: Markup) -> Markup:
    """Something that opens when its summary is clicked."""
    return tag("details", tag("summary", summary), body)


def bar(
    value: float, low: float, high: float, *, class_: str, label: str, marks: Mapping[str, float] | None = None
) -> Markup:
    """A bar from zero to ``value`` on an axis from ``low`` to ``high``, as wide as there is room.

    Args:
        value: Where it ends.
        low: Left end of the axis, at most 0.
        high: Right end, greater than ``low``.
        class_: Its colour.
        label: Read out in its place.
        marks: Class to place of further lines on the axis.
    """

    def at(x: float) -> float:
        return round(100 * (min(max(x, low), high) - low) / (high - low), 3)

    left, right = sorted((at(0.0), at(value)))
    lines: dict[str, Any] = {"zero": 0.0, **(marks or {})}
    return tag(
        "svg",
        tag("title", label),
        tag("rect", x=f"{left}%", y="3", width=f"{max(right - left, 0.4)}%", height="12", class_=class_),
        *(tag("line", x1=f"{at(x)}%", x2=f"{at(x)}%", y1="0", y2="18", class_=name) for name, x in lines.items()),
        class_="bar", role="img", aria_label=label, width="100%", height="18",
    )  # fmt: skip
