"""Find the first layer and op where two forward passes part, token by token, however either of them was batched.

A forward pass calls :func:`probe` after each op. While a :class:`Trace` records, that keeps a 64-bit digest of every
row, under the row's request and position; otherwise it returns at once. Two traces of the same tokens are compared by
:func:`first_divergence`, or by ``bi-bisect A B`` from files. What decides geometry (a capacity, a chunk, a split) is
recorded by :func:`note_plan`, because a plan that follows the batch need not show in the bits of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..runtime.errors import BatchInvarianceError
from .bitwise import bit_view

__all__ = [
    "Divergence",
    "Rows",
    "Trace",
    "TraceError",
    "first_divergence",
    "main",
    "note_plan",
    "plan_differences",
    "probe",
    "recording",
    "row_digests",
]

_FORMAT = 2
_AT_ONCE = 1 << 24  # elements of a part of row_digests: their integers take 128 MB
_SHOWN = 8  # values
_AROUND = 3  # ops


class TraceError(BatchInvarianceError):
    """A trace file is not one, or two traces have nothing to compare."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Whose rows a tensor has.

    Attributes:
        requests: Names of the requests in the batch.
        request: ``(rows,)`` int64, index into ``requests``.
        position: ``(rows,)`` int64, the token's position in its request.
    """

    requests: Sequence[str]
    request: torch.Tensor
    position: torch.Tensor

    def take(self, which: torch.Tensor) -> Rows:
        """The rows of a tensor that holds only some of these."""
        return Rows(self.requests, self.request[which], self.position[which])


class Trace:
    """Digests of every op's rows. Ops are ordered as they were first called.

    Args:
        keep: Called with layer and op; where true, the rows' bits are kept as well, so that a comparison can show
            them. None keeps none: values take as much memory as the activations.
    """

    def __init__(self, keep: Callable[[int, str], bool] | None = None) -> None:
        self._keep = keep
        self._requests: dict[str, int] = {}
        self._digests: dict[tuple[int, str], dict[tuple[int, int], int]] = {}
        self._values: dict[tuple[int, str], dict[tuple[int, int], list[int]]] = {}
        self.contradictions: list[tuple[int, str, str, int]] = []
        self.plan: dict[str, set[str]] = {}

    def record(self, op: str, tensor: torch.Tensor, *, layer: int, rows: Rows) -> None:
        """Keep the digest of each row of ``tensor``, ``(rows, ...)``.

        A row that comes twice (recomputed after preemption, say) must come with the same bits; where it does not,
        ``contradictions`` gets the layer, op, request and position.
        """
        ids = [self._requests.setdefault(name, len(self._requests)) for name in rows.requests]
        keys = [(ids[r], p) for r, p in zip(rows.request.tolist(), rows.position.tolist(), strict=True)]
        digests = self._digests.setdefault((layer, op), {})
        for key, digest in zip(keys, row_digests(tensor).tolist(), strict=True):
            if digests.setdefault(key, digest) != digest:
                self.contradictions.append((layer, op, list(self._requests)[key[0]], key[1]))
        if self._keep is not None and self._keep(layer, op):
            bits = bit_view(tensor.flatten(1))
            mask = 2 ** (8 * bits.element_size()) - 1  # bits are no negative numbers
            kept = ([value & mask for value in row] for row in bits.tolist())
            self._values.setdefault((layer, op), {}).update(zip(keys, kept, strict=True))

    @property
    def ops(self) -> list[tuple[int, str]]:
        """Layer and op of every probe, in the order of the forward pass."""
        return list(self._digests)

    def digests(self, layer: int, op: str) -> dict[tuple[str, int], int]:
        """Digest by request and position."""
        names = list(self._requests)
        return {(names[r], p): digest for (r, p), digest in self._digests.get((layer, op), {}).items()}

    def values(self, layer: int, op: str, request: str, position: int) -> list[int] | None:
        """Bits of one row as integers, where they were kept."""
        key = self._requests.get(request, -1), position
        return self._values.get((layer, op), {}).get(key)

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        record = {
            "format": _FORMAT,
            "requests": list(self._requests),
            "ops": [[layer, op, [[*key, digest] for key, digest in rows.items()]]
                    for (layer, op), rows in self._digests.items()],
            "values": [[layer, op, [[*key, bits] for key, bits in rows.items()]]
                       for (layer, op), rows in self._values.items()],
            "contradictions": self.contradictions,
            "plan": {name: sorted(values) for name, values in self.plan.items()},
        }  # fmt: skip
        Path(path).write_text(json.dumps(record), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace back.

        Raises:
            TraceError: The file is missing, damaged or something else.
        """
        trace = cls()
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            if record["format"] != _FORMAT:
                raise TraceError(
                    f"{path}: expected a trace of format {_FORMAT}, got {record['format']}. Record it anew."
                )
            trace._requests = {str(name): i for i, name in enumerate(record["requests"])}
            for field, target in (("ops", trace._digests), ("values", trace._values)):
                for layer, op, rows in record[field]:
                    target[int(layer), str(op)] = {(int(r), int(p)): value for r, p, value in rows}
            trace.contradictions = [tuple(entry) for entry in record["contradictions"]]
            trace.plan = {str(name): {str(value) for value in values} for name, values in record["plan"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TraceError(
                f"{path}: expected a trace written by Trace.save, got something else ({error}). Record it anew."
            ) from error
        return trace


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two traces part first: the earliest token, and the first op of its forward pass.

    Attributes:
        layer: Decoder layer; -1 before the first, the number of layers after the last.
        op: Name given to the probe.
        request: Name of the request.
        position: Position of the token in it.
        tokens_different: Tokens of this op with different digests, of ``tokens_compared``.
        tokens_compared: Tokens of this op that both traces have.
        values: The first differing elements, ``(index, bits in A, bits in B)``, where both traces kept values.
    """

    layer: int
    op: str
    request: str
    position: int
    tokens_different: int
    tokens_compared: int
    values: tuple[tuple[int, int, int], ...]


_active: Trace | None = None


@contextlib.contextmanager
def recording(trace: Trace) -> Iterator[Trace]:
    """Let probes write to ``trace`` inside the block."""
    global _active
    before, _active = _active, trace
    try:
        yield trace
    finally:
        _active = before


def probe(op: str, tensor: torch.Tensor, *, layer: int, rows: Callable[[], Rows]) -> None:
    """Record what an op returned, if a trace is recording; otherwise one comparison, and nothing else.

    Args:
        op: Name of the op, unique within a layer.
        tensor: ``(rows, ...)``, any dtype.
        layer: Decoder layer.
        rows: Called only while recording: whose rows these are.
    """
    if _active is not None:
        _active.record(op, tensor, layer=layer, rows=rows())


def note_plan(name: str, value: object) -> None:
    """Record what geometry was chosen, if a trace is recording; otherwise one comparison, and nothing else.

    Args:
        name: What was chosen. Where it may depend on something (a chunk on its own request's length), that is part of
            the name: under one name no batch may change the value.
        value: Anything whose ``str`` says what was chosen.
    """
    if _active is not None:
        _active.plan.setdefault(name, set()).add(str(value))


def plan_differences(a: Trace, b: Trace) -> list[str]:
    """Plans that differ between two traces, or within one of them; one line each. Names of one trace only are fine."""
    lines = []
    for name in sorted(a.plan.keys() & b.plan.keys()):
        mine, theirs = a.plan[name], b.plan[name]
        if mine != theirs or len(mine) > 1:
            lines.append(f"{name}: {', '.join(sorted(mine))} against {', '.join(sorted(theirs))}")
    return lines


def row_digests(tensor: torch.Tensor) -> torch.Tensor:
    """64-bit digest of each row's bits, ``(rows,)`` int64.

    The sum of (element bits + 1) times an odd constant of its index, modulo 2**64: integer, so of no order, and a
    change of a single element always shows. Sign of zero and NaN payloads count.

    Args:
        tensor: ``(rows, ...)``, any dtype, on any device, where the digests are then too.
    """
    bits = bit_view(tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1))
    width = bits.shape[1]
    keys = _keys(width, bits.device)
    digests = torch.empty(len(bits), dtype=torch.int64, device=bits.device)
    rows = max(1, _AT_ONCE // max(1, width))
    for start in range(0, len(bits), rows):
        part = bits[start : start + rows].long() + 1
        torch.sum(part.mul_(keys), 1, out=digests[start : start + rows])
    return digests


@functools.lru_cache(maxsize=64)
def _keys(width: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(width, dtype=torch.int64, device=device)
    # A few rounds of multiply and xor-shift spread neighbouring indices over all 64 bits.
    mixed = (index + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    return (mixed ^ (mixed >> 29)) | 1


def first_divergence(a: Trace, b: Trace) -> Divergence | None:
    """Compare two traces of the same tokens.

    Tokens are matched by request and position, whatever the batches were. Since a token depends on its prefix alone,
    the cause lies in the forward pass of the earliest differing token, at the first op that differs there.

    Returns:
        The divergence, or None if every digest that both have is equal.

    Raises:
        TraceError: The traces share no row, so that nothing was compared.
    """
    differing: dict[tuple[int, str], tuple[list[tuple[str, int]], int]] = {}
    compared = 0
    for layer, op in a.ops:
        mine, theirs = a.digests(layer, op), b.digests(layer, op)
        common = mine.keys() & theirs.keys()
        compared += len(common)
        keys = [key for key in common if mine[key] != theirs[key]]
        if keys:
            differing[layer, op] = (keys, len(common))
    if not compared:
        raise TraceError("traces: expected rows of the same requests, got none in common. Trace the same requests.")
    if not differing:
        return None
    token = min((key for keys, _ in differing.values() for key in keys), key=lambda key: (key[1], key[0]))
    layer, op = next(name for name, (keys, _) in differing.items() if token in keys)
    keys, common_count = differing[layer, op]
    bits = a.values(layer, op, *token), b.values(layer, op, *token)
    values: tuple[tuple[int, int, int], ...] = ()
    if bits[0] is not None and bits[1] is not None:
        pairs = enumerate(zip(bits[0], bits[1], strict=True))
        values = tuple((i, x, y) for i, (x, y) in pairs if x != y)[:_SHOWN]
    return Divergence(layer, op, token[0], token[1], len(keys), common_count, values)


def main(argv: Sequence[str] | None = None) -> int:
    """``bi-bisect A B``: print the first divergence as a table. Exit code 0: none, 1: found, 2: cannot compare."""
    parser = argparse.ArgumentParser(prog="bi-bisect", description="First layer and op where two traces part.")
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--all", action="store_true", help="show every op, not only those around the divergence")
    arguments = parser.parse_args(argv)
    from rich.console import Console

    console = Console()
    try:
        a, b = Trace.load(arguments.a), Trace.load(arguments.b)
        divergence = first_divergence(a, b)
    except TraceError as error:
        console.print(f"bi-bisect: {error}", markup=False)
        return 2
    contradictions = {"a": a.contradictions, "b": b.contradictions}
    plans = plan_differences(a, b)
    if arguments.json is not None:
        found = asdict(divergence) if divergence is not None else None
        record: dict[str, Any] = {"divergence": found, "contradictions": contradictions, "plan": plans}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    console.print(_table(a, b, divergence, every_op=arguments.all))
    for name, entries in contradictions.items():
        for layer, op, request, position in entries[:_SHOWN]:
            console.print(f"{name} contradicts itself: layer {layer}, {op}, {request} at {position}", markup=False)
    for line in plans:
        console.print(f"plan differs: {line}", markup=False)
    return 1 if divergence is not None or plans or any(contradictions.values()) else 0


def _table(a: Trace, b: Trace, divergence: Divergence | None, *, every_op: bool) -> Any:
    """One row an op, in the order of the forward pass: compared, different, and where it starts."""
    from rich.table import Table

    ops = a.ops
    if divergence is None:
        title, centre = "no divergence", len(ops)
    else:
        where = f"layer {divergence.layer}, {divergence.op}"
        title = f"first divergence: {where}, request {divergence.request}, position {divergence.position}"
        centre = ops.index((divergence.layer, divergence.op))
    first, last = (0, len(ops)) if every_op else (max(0, centre - _AROUND), centre + _AROUND + 1)
    table = Table(title=title)
    for column in ("layer", "op", "tokens", "different", "first token"):
        table.add_column(column, justify="left" if column == "op" else "right")
    if first:
        table.add_row("", f"({first} ops before)")
    for layer, op in ops[first:last]:
        mine, theirs = a.digests(layer, op), b.digests(layer, op)
        common = mine.keys() & theirs.keys()
        keys = sorted((key for key in common if mine[key] != theirs[key]), key=lambda key: (key[1], key[0]))
        start = f"{keys[0][0]}[{keys[0][1]}]" if keys else ""
        here = divergence is not None and (layer, op) == (divergence.layer, divergence.op)
        style = "bold red" if here else "red" if keys else None
        table.add_row(str(layer), op, str(len(common)), str(len(keys)), start, style=style)
        for index, x, y in divergence.values if divergence is not None and here else ():
            table.add_row("", f"  element {index}", "", f"{x:#x}", f"{y:#x}")
    if ops[last:]:
        table.add_row("", f"({len(ops[last:])} ops after)")
    return table


if __name__ == "__main__":
    sys.exit(main())
