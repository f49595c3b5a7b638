"""Where every tensor of a model lies: recorded when graphs are captured, verified after a reload.

A captured graph replays addresses, not Python. A tensor that was allocated anew is right for eager code and invisible
to the graph, which goes on reading the freed memory. The ledger looks at everything reachable, because what moved
was, each time, something that no list of parameters mentions.

``python -m bi_reload.addresses A.json B.json`` prints the difference of two saved ledgers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from bi_kernels.runtime.errors import ArgumentError, ReloadError

__all__ = [
    "AddressDifference",
    "AddressEntry",
    "AddressLedger",
    "AddressMovedError",
    "main",
    "reachable_tensors",
]

_FORMAT = "bi-reload address ledger 1"

# Not containers of a model's own tensors; entering modules and classes would lead through the whole process.
_CLOSED = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


@dataclass(frozen=True, slots=True)
class AddressEntry:
    """One tensor as a captured graph sees it.

    Attributes:
        data_ptr: Address of its first element; 0 on the meta device and for empty tensors.
        storage_ptr: Address of the storage it is a view of.
        shape: Its shape.
        stride: Its strides, in elements.
        dtype: Its dtype, e.g. ``"bfloat16"``.
        device: Its device, e.g. ``"cuda:0"``.
        is_meta: Whether it has no memory.
    """

    data_ptr: int
    storage_ptr: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    is_meta: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> AddressEntry:
        """The entry of ``tensor``."""
        return cls(
            data_ptr=tensor.data_ptr(),
            storage_ptr=tensor.untyped_storage().data_ptr(),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
            is_meta=tensor.is_meta,
        )


@dataclass(frozen=True, slots=True)
class AddressDifference:
    """One tensor that is not where, or not what, it was.

    Attributes:
        name: Path from the root, e.g. ``"layers.0.attn_sink"`` or ``"cache['c4'][1]"``.
        kind: ``"appeared"``, ``"disappeared"``, or the changes joined by ``" and "``: ``"moved"``, ``"shape"``,
            ``"stride"``, ``"dtype"``, ``"device"``, ``"meta"``.
        before: The recorded entry, or None.
        after: The present entry, or None.
    """

    name: str
    kind: str
    before: AddressEntry | None
    after: AddressEntry | None

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            return f"{self.name}: {self.kind} ({_describe(self.before or self.after)})"
        return f"{self.name}: {self.kind} ({_describe(self.before)} -> {_describe(self.after)})"


class AddressMovedError(ReloadError):
    """Tensors that captured graphs read are not where they were. ``differences`` has all of them."""

    def __init__(self, differences: Sequence[AddressDifference]) -> None:
        self.differences = tuple(differences)
        lines = "\n".join(f"  {difference}" for difference in self.differences)
        super().__init__(
            f"expected every tensor at its recorded address, got {len(self.differences)} differences:\n{lines}\n"
            "Write in place (copy_) instead of assigning; if the move was meant, capture the graphs again and record."
        )


class AddressLedger:
    """Addresses of all tensors reachable from an object.

    Reached are: parameters and buffers of modules (non-persistent ones too), plain attributes, dicts, lists, tuples,
    deques, dataclasses, slots, nested objects, ``functools.partial``, bound methods, and attributes set on tensors.
    Not looked into: sets, closures, ``lru_cache``, and gradients. Cycles are fine, a tensor with several names has
    several entries, and no property is evaluated. Nothing is kept alive.

    Attributes:
        entries: Name to :class:`AddressEntry`, in the order of discovery (nearest to the root first).
    """

    def __init__(self, entries: Mapping[str, AddressEntry] | None = None) -> None:
        self.entries: dict[str, AddressEntry] = dict(entries or {})

    def __len__(self) -> int:
        return len(self.entries)

    def record(self, root: object) -> AddressLedger:
        """Replace the entries by those of ``root`` now, and return the ledger.

        Args:
            root: A module, a mapping of names to tensors, or any other object.

        Raises:
            ArgumentError: A tensor has no single address (sparse, nested). The entries stay as they were.
        """
        self.entries = _entries(root)
        return self

    def diff(self, root: object) -> list[AddressDifference]:
        """Every difference between the entries and ``root`` now, by name."""
        return self.compare(AddressLedger(_entries(root)))

    def verify(self, root: object) -> None:
        """Raise unless every tensor is where, and what, it was.

        Raises:
            AddressMovedError: Names every tensor that moved, appeared, disappeared or changed its shape, strides,
                dtype or device.
        """
        differences = self.diff(root)
        if differences:
            raise AddressMovedError(differences)

    def compare(self, later: AddressLedger) -> list[AddressDifference]:
        """Every difference between this ledger and a later one, by name."""
        differences = []
        for name in sorted(self.entries.keys() | later.entries.keys()):
            before, after = self.entries.get(name), later.entries.get(name)
            if before != after:
                differences.append(AddressDifference(name, _kind(before, after), before, after))
        return differences

    def save(self, path: str | Path) -> None:
        """Write the ledger as JSON."""
        document = {"format": _FORMAT, "tensors": {name: asdict(entry) for name, entry in self.entries.items()}}
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> AddressLedger:
        """Read a ledger that :meth:`save` wrote.

        Raises:
            ReloadError: The file is missing or is no ledger.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if document["format"] != _FORMAT:
                raise ValueError(f"format {document['format']!r}")
            names = {field.name for field in fields(AddressEntry)}
            entries = {}
            for name, entry in document["tensors"].items():
                if set(entry) != names:
                    raise ValueError(f"entry {name!r} has fields {sorted(entry)}")
                entries[name] = AddressEntry(
                    **entry | {"shape": tuple(entry["shape"]), "stride": tuple(entry["stride"])}
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ReloadError(
                f"{path}: expected a file written by AddressLedger.save, got {type(error).__name__}: {error}. "
                "Save the ledger again with this version."
            ) from error
        return cls(entries)


def reachable_tensors(root: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` for every tensor that :class:`AddressLedger` reaches, breadth first."""
    queue: deque[tuple[str, object]] = deque([("", root)])
    entered: dict[int, object] = {}  # by id; the objects are held so that no id is reused during the walk
    while queue:
        name, value = queue.popleft()
        if isinstance(value, torch.Tensor):
            yield name, value
        if value is None or isinstance(value, _CLOSED) or id(value) in entered:
            continue
        entered[id(value)] = value
        queue.extend(_children(name, value))


def _children(name: str, value: object) -> Iterator[tuple[str, object]]:
    prefix = f"{name}." if name else ""
    if isinstance(value, torch.nn.Module):
        for group in (value._parameters, value._buffers, value._modules):
            yield from ((f"{prefix}{key}", child) for key, child in group.items())
    elif isinstance(value, Mapping):
        # At the root, names stay as they are: a mapping of named tensors is a model spelled out.
        yield from ((f"{name}[{key!r}]" if name else str(key), child) for key, child in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"{name}[{i}]", child) for i, child in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f"{prefix}{key}", getattr(value, key)) for key in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield f"{prefix}__self__", value.__self__
    module_groups = ("_parameters", "_buffers", "_modules") if isinstance(value, torch.nn.Module) else ()
    for key, child in _attributes(value):
        if key not in module_groups:
            yield f"{prefix}{key}", child


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    """Instance attributes, read past properties and ``__getattr__``."""
    if isinstance(value, torch.Tensor):
        yield from vars(value).items()
        return
    with contextlib.suppress(AttributeError):  # objects with slots only have no __dict__
        yield from list(object.__getattribute__(value, "__dict__").items())
    for cls in type(value).__mro__:
        for key, member in list(vars(cls).items()):
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield key, member.__get__(value, cls)
                except AttributeError:  # a slot that was never set
                    continue


def _entries(root: object) -> dict[str, AddressEntry]:
    entries: dict[str, AddressEntry] = {}
    for name, tensor in reachable_tensors(root):
        if tensor.layout != torch.strided or tensor.is_nested:
            raise ArgumentError(
                name or "root", "a strided tensor", str(tensor.layout), "Keep it out of what graphs can reach."
            )
        entries[name] = AddressEntry.of(tensor)
    return entries


def _kind(before: AddressEntry | None, after: AddressEntry | None) -> str:
    if before is None:
        return "appeared"
    if after is None:
        return "disappeared"
    moved = (before.data_ptr, before.storage_ptr) != (after.data_ptr, after.storage_ptr)
    changes = ["moved"] if moved else []
    changes += [
        what for what in ("shape", "stride", "dtype", "device") if getattr(before, what) != getattr(after, what)
    ]
    if before.is_meta != after.is_meta:
        changes.append("meta")
    return " and ".join(changes)


def _describe(entry: AddressEntry | None) -> str:
    if entry is None:
        return "absent"
    return f"{entry.dtype}{list(entry.shape)} stride {list(entry.stride)} at {entry.data_ptr:#x} on {entry.device}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two saved ledgers; 0 = equal, 1 = they differ, 2 = unreadable."""
    parser = argparse.ArgumentParser(
        prog="python -m bi_reload.addresses", description="Print the difference of two saved address ledgers."
    )
    parser.add_argument("before", type=Path, help="ledger saved at capture")
    parser.add_argument("after", type=Path, help="ledger saved later by the same process")
    arguments = parser.parse_args(argv)
    try:
        before, after = AddressLedger.load(arguments.before), AddressLedger.load(arguments.after)
    except ReloadError as error:
        print(error, file=sys.stderr)
        return 2
    differences = before.compare(after)
    for difference in differences:
        print(difference)
    print(f"{len(differences)} differences; {len(before)} tensors before, {len(after)} after")
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
