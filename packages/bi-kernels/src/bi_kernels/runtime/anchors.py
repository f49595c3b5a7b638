"""Anchors: the fingerprint of the vLLM source text that a hook was written against.

A hook is right only for the code it was written against, so each package records, per vLLM version, the sha256 of the
exact text of every target. The text is read from a wheel or from the installed files, and nothing is imported.
Exact text, because what ``ast.dump`` prints differs between Python versions.

Command line::

    python -m bi_kernels.runtime.anchors --wheel vllm-X.whl [--package bi-reload ...] [--write]
"""

from __future__ import annotations

import abc
import argparse
import ast
import hashlib
import importlib
import importlib.metadata
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .errors import Blocker, HookError
from .packages import PACKAGES, package_directories, public_version, release_prefix

if TYPE_CHECKING:
    from .hooks import HookPlan

__all__ = [
    "AnchorCheck",
    "InstalledSource",
    "Source",
    "WheelSource",
    "anchored_targets",
    "check_plan",
    "defines",
    "fingerprint",
    "load_anchors",
    "load_plan",
    "main",
    "target_text",
    "write_anchors",
]

State = Literal["ok", "moved", "missing", "unrecorded", "occupied"]

_IMPORT_DEPTH = 8  # re-exports are followed this far; a longer chain would be a cycle

# What attaching by kind relies on, beside the target itself.
_MACHINERY = {
    "oot_custom_op": (
        "vllm.model_executor.custom_op:CustomOp.register_oot",
        "vllm.model_executor.custom_op:CustomOp.__new__",
        "vllm.model_executor.custom_op:op_registry_oot",
    ),
    "oot_pluggable_layer": (
        "vllm.model_executor.custom_op:PluggableLayer.register_oot",
        "vllm.model_executor.custom_op:PluggableLayer.__new__",
        "vllm.model_executor.custom_op:op_registry_oot",
    ),
    "env": ("vllm.envs:__getattr__",),
}


class Source(abc.ABC):
    """Source text of one vLLM release, by module. Parsed modules are kept."""

    version: str

    def __init__(self) -> None:
        self._parsed: dict[str, tuple[list[str], ast.Module] | None] = {}

    @abc.abstractmethod
    def read(self, path: str) -> str | None:
        """Text of a file, by its path below the import root; None if there is no such file."""

    def location(self, module: str) -> str | None:
        """Path of ``module`` below the import root, or None if there is no such module."""
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if self.read(path) is not None), None)

    def parse(self, module: str) -> tuple[list[str], ast.Module] | None:
        """Lines and syntax tree of ``module``, or None if there is no such module or it does not parse."""
        if module not in self._parsed:
            location = self.location(module)
            text = self.read(location) if location is not None else None
            try:
                self._parsed[module] = (text.split("\n"), ast.parse(text)) if text is not None else None
            except (SyntaxError, ValueError):
                self._parsed[module] = None
        return self._parsed[module]

    def is_package(self, module: str) -> bool:
        """Whether ``module`` is a package, which decides what its relative imports are relative to."""
        location = self.location(module)
        return location is not None and location.endswith("/__init__.py")


class WheelSource(Source):
    """Reads a wheel file without installing or importing it."""

    def __init__(self, wheel: str | Path) -> None:
        super().__init__()
        self._archive = zipfile.ZipFile(wheel)
        self._names = set(self._archive.namelist())
        metadata = [name for name in self._names if re.fullmatch(r"vllm-[^/]+\.dist-info/METADATA", name)]
        if len(metadata) != 1:
            raise ValueError(f"{wheel}: expected a vLLM wheel, found {len(metadata)} vllm-*.dist-info/METADATA in it")
        match = re.search(r"^Version: *(\S+)", self._archive.read(metadata[0]).decode(), re.MULTILINE)
        if match is None:
            raise ValueError(f"{wheel}: its METADATA names no version")
        self.version = public_version(match[1])

    def read(self, path: str) -> str | None:
        """Text of a file in the wheel."""
        return _decode(self._archive.read(path)) if path in self._names else None


class InstalledSource(Source):
    """Reads the files of the installed vLLM without importing it.

    Raises:
        importlib.metadata.PackageNotFoundError: vLLM is not installed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._distribution = importlib.metadata.distribution("vllm")
        self.version = public_version(self._distribution.version)

    def file(self, path: str) -> Path:
        """Absolute path of a file of the distribution, whether it exists or not."""
        return Path(str(self._distribution.locate_file(path)))

    def read(self, path: str) -> str | None:
        """Text of an installed file."""
        file = self.file(path)
        return _decode(file.read_bytes()) if file.is_file() else None


def target_text(source: Source, target: str) -> str | None:
    """Exact source text of ``"module.path:Name"`` or ``"module.path:Class.attribute"``, or None if it is not there.

    Decorators belong to the text, and so do all definitions of one name (overloads, a property and its setter,
    branches of an ``if``), in order. A name that the module imports from another vLLM module stands for its own
    import plus the text of what it names, so that a changed provider is noticed at the consumer.
    """
    module, _, path = target.partition(":")
    return _text(source, module, tuple(path.split(".")), _IMPORT_DEPTH)


def defines(text: str, name: str) -> bool:
    """Whether Python source ``text`` binds ``name`` at module level."""
    return any(True for _ in _bindings(ast.parse(text).body, name))


def fingerprint(text: str) -> str:
    """The anchor of a source text: its sha256."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class AnchorCheck:
    """How one target of a plan compares with its anchor.

    Attributes:
        target: The target.
        state: ``ok``; ``moved``: the text differs from the recorded one; ``missing``: the release has no such target;
            ``unrecorded``: no anchor is recorded; ``occupied``: a name that must not exist upstream exists.
        recorded: The anchor on file.
        found: The fingerprint of this release's text.
    """

    target: str
    state: State
    recorded: str | None
    found: str | None


def anchored_targets(plan: HookPlan, version: str) -> tuple[str, ...]:
    """Targets of ``plan`` whose text must be the recorded one on vLLM ``version``, sorted."""
    targets: set[str] = set()
    for patch in plan.patches:
        if release_prefix(version) in patch.versions:
            targets.update(patch.relies_on, _MACHINERY.get(patch.kind, ()))
            if patch.kind not in ("publish", "env"):
                targets.add(patch.target)
    return tuple(sorted(targets))


def check_plan(plan: HookPlan, source: Source, anchors: dict[str, str] | None = None) -> list[AnchorCheck]:
    """Compare every target of ``plan`` with its anchor.

    Args:
        plan: The plan.
        source: The release to look at.
        anchors: Target to fingerprint; None reads the package's file for this release.
    """
    recorded = load_anchors(plan.import_name, source.version) if anchors is None else anchors
    checks = []
    for target in anchored_targets(plan, source.version):
        text = target_text(source, target)
        found = fingerprint(text) if text is not None else None
        anchor = recorded.get(target)
        state: State = (
            "missing" if found is None else "unrecorded" if anchor is None else "ok" if anchor == found else "moved"
        )
        checks.append(AnchorCheck(target, state, anchor, found))
    for patch in plan.patches:
        if release_prefix(source.version) not in patch.versions:
            continue
        if patch.kind == "publish":
            checks.append(_must_be_free(source, patch.target))
        elif patch.kind == "env":
            checks.append(_must_be_unknown_variable(source, patch.target))
    return checks


def anchors_file(import_name: str, version: str) -> Path | None:
    """Where the anchors of a package for one vLLM release lie; None if the package is not installed."""
    directories = package_directories(import_name)
    paths = [directory / "anchors" / f"vllm-{version}.json" for directory in directories]
    return next((path for path in paths if path.is_file()), paths[0] if paths else None)


def load_anchors(import_name: str, version: str) -> dict[str, str]:
    """Recorded anchors of a package for one vLLM release; empty if none are recorded.

    Raises:
        HookError: The file is damaged. That is not the same as having no anchors: somebody changed the install.
    """
    path = anchors_file(import_name, version)
    if path is None or not path.is_file():
        return {}
    try:
        targets = json.loads(path.read_text(encoding="utf-8"))["targets"]
        if any(not isinstance(anchor, str) for anchor in targets.values()):
            raise ValueError("an anchor that is no text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"something else ({type(error).__name__}: {error})"
        blocker = Blocker(str(path), "recorded anchors", found, f"Reinstall {import_name.replace('_', '-')}.")
        raise HookError("anchors cannot be read", [blocker]) from error
    return dict(targets)


def write_anchors(plan: HookPlan, source: Source) -> Path:
    """Record the anchors of ``plan`` for the release in ``source``. Targets that it lacks are left out.

    Raises:
        ValueError: The package is not installed, so there is no place to write to.
    """
    path = anchors_file(plan.import_name, source.version)
    if path is None:
        raise ValueError(f"{plan.package}: not installed, so its anchors have no place")
    texts = {target: target_text(source, target) for target in anchored_targets(plan, source.version)}
    record = {
        "package": plan.package,
        "vllm": source.version,
        "targets": {target: fingerprint(text) for target, text in texts.items() if text is not None},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def load_plan(package: str) -> HookPlan | None:
    """``PLAN`` of a package's ``vllm_hook`` module, or None if the package is not installed."""
    import_name = PACKAGES.get(package, package.replace("-", "_"))
    if not package_directories(import_name):
        return None
    plan: HookPlan = importlib.import_module(f"{import_name}.vllm_hook").PLAN
    return plan


def main(argv: Sequence[str] | None = None) -> int:
    """Check (or record) the anchors of the packages. Returns 0 if every target is as recorded, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bi_kernels.runtime.anchors", description=main.__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--wheel", type=Path, help="a vLLM wheel file; it is read, not imported")
    where.add_argument("--installed", action="store_true", help="the vLLM of this environment; it is not imported")
    parser.add_argument("--package", action="append", choices=tuple(PACKAGES), help="repeatable; default: all four")
    parser.add_argument("--write", action="store_true", help="record what is found instead of comparing with it")
    arguments = parser.parse_args(argv)

    try:
        source: Source = InstalledSource() if arguments.installed else WheelSource(arguments.wheel)
    except importlib.metadata.PackageNotFoundError:
        parser.error("vLLM is not installed here. Name a wheel with --wheel.")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        parser.error(f"cannot read the wheel: {error}")

    from rich.console import Console
    from rich.table import Table

    table = Table("package", "target", "state", "recorded", "found", title=f"Anchors against vLLM {source.version}")
    failed = False
    for package in arguments.package or PACKAGES:
        plan = load_plan(package)
        if plan is None:
            table.add_row(package, "", "not installed", "", "")
            failed = True
            continue
        if arguments.write:
            write_anchors(plan, source)
        for check in check_plan(plan, source):
            failed |= check.state != "ok"
            table.add_row(package, check.target, check.state, (check.recorded or "")[:12], (check.found or "")[:12])
    # A fixed width keeps targets whole where the output is no terminal, as in CI.
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    return int(failed)


def _decode(data: bytes) -> str:
    return data.decode("utf-8").replace("\r\n", "\n")


def _must_be_free(source: Source, target: str) -> AnchorCheck:
    module, _, _ = target.partition(":")
    if source.parse(module) is None:
        return AnchorCheck(target, "missing", None, None)
    text = target_text(source, target)
    return AnchorCheck(target, "ok" if text is None else "occupied", None, fingerprint(text) if text else None)


def _must_be_unknown_variable(source: Source, target: str) -> AnchorCheck:
    module, _, name = target.partition(":")
    table = target_text(source, f"{module}:environment_variables")
    if table is None:
        return AnchorCheck(target, "missing", None, None)
    known = re.search(rf"^\s*[\"']{re.escape(name)}[\"']\s*:", table, re.MULTILINE) is not None
    return AnchorCheck(target, "occupied" if known else "ok", None, None)


def _text(source: Source, module: str, path: tuple[str, ...], depth: int) -> str | None:
    parsed = source.parse(module)
    if parsed is None or depth == 0:
        return None
    lines, tree = parsed
    head, *rest = path
    pieces: list[str] = []
    for node in _bindings(tree.body, head):
        if isinstance(node, ast.Import | ast.ImportFrom):
            piece = _imported_text(source, module, node, head, tuple(rest), depth)
            if piece is not None:
                pieces.append(piece)
        elif not rest:
            pieces.append(_segment(lines, node))
        elif isinstance(node, ast.ClassDef):
            nodes: list[ast.stmt] = [node]
            for name in rest:
                nodes = [
                    found for owner in nodes if isinstance(owner, ast.ClassDef) for found in _bindings(owner.body, name)
                ]
            pieces += [_segment(lines, found) for found in nodes]
    return "\n".join(pieces) if pieces else None


def _imported_text(
    source: Source, module: str, node: ast.Import | ast.ImportFrom, name: str, rest: tuple[str, ...], depth: int
) -> str | None:
    """Text that a name bound by an import stands for: the import itself, then what it names."""
    alias = next(alias for alias in node.names if _bound_name(node, alias) == name)
    if isinstance(node, ast.Import):
        return None if rest else f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
    provider = node.module or ""
    if node.level:
        base = module.split(".") if source.is_package(module) else module.split(".")[:-1]
        base = base[: len(base) - (node.level - 1)]
        provider = ".".join([*base, provider] if provider else base)
    line = f"from {provider} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
    behind = _text(source, provider, (alias.name, *rest), depth - 1)
    if rest:
        return behind  # an attribute of an imported class is the provider's text alone
    return line if behind is None else f"{line}\n{behind}"


def _bound_name(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    if alias.asname:
        return alias.asname
    return alias.name if isinstance(node, ast.ImportFrom) else alias.name.split(".", 1)[0]


def _bindings(body: Sequence[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Statements of ``body`` that bind ``name``, in order, looking into ``if``, ``try``, ``with`` and loops."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == name:
                yield node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any(_bound_name(node, alias) == name for alias in node.names):
                yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (leaf for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
            if any(leaf.id == name and isinstance(leaf.ctx, ast.Store) for leaf in names):
                yield node
        else:
            for field in ("body", "handlers", "orelse", "finalbody"):
                for child in getattr(node, field, ()):
                    yield from _bindings(child.body if isinstance(child, ast.ExceptHandler) else [child], name)


def _segment(lines: Sequence[str], node: ast.stmt) -> str:
    """Whole lines of a statement, from its first decorator on."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(lines[first - 1 : node.end_lineno])


if __name__ == "__main__":
    sys.exit(main())
