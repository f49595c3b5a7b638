"""What a run found, as JSON and as tables."""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from bi_kernels.runtime.errors import BatchInvarianceError

from .findings import Agreement, Finding
from .sides import Served

__all__ = ["Comparison", "Report", "ReportError", "check_report", "compare", "digest_of"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run against one recomputation.

    Attributes:
        name: Schedule, or step of the reload.
        tokens_compared: Generated tokens whose logprob was compared, each counted once.
        tokens_different: Those whose token id, logprob bits, or logits of the whole vocabulary differ.
        first_difference: Request, index and both bit patterns of the first one, or None.
        seconds: Wall-clock time of the run.
        plan: What the run did.
    """

    name: str
    tokens_compared: int
    tokens_different: int
    first_difference: str | None
    seconds: float
    plan: Mapping[str, int]


def compare(
    name: str,
    run: Served,
    tokens: Mapping[str, Sequence[int]],
    logprobs: Mapping[str, Sequence[int]],
    digests: Mapping[str, Sequence[int]],
) -> Comparison:
    """Compare a run's tokens, logprob bits and digests of all logits with the expected ones, token by token."""
    compared = different = 0
    first = None
    for request, expected in tokens.items():
        mine = list(zip(run.tokens[request], run.logprobs[request], run.digests[request], strict=True))
        theirs = list(zip(expected, logprobs[request], digests[request], strict=True))
        # A run that drew fewer or more tokens differs in every token it lacks or has too many.
        for i, (a, b) in enumerate(itertools.zip_longest(mine, theirs)):
            compared += 1
            if a != b:
                different += 1
                first = first or f"{request}[{i}]: (token, logprob bits, digest of the logits) {a} against {b}"
    return Comparison(name, compared, different, first, run.seconds, asdict(run.plan))


@dataclass(slots=True)
class Report:
    """Everything a run has to say. Written as it is to build/aligned_e2e/report.json."""

    profile: str
    packages: dict[str, str]
    environment: dict[str, Any]
    model: dict[str, Any]
    attestation: dict[str, Any]
    schedules: list[Comparison] = field(default_factory=list)
    reload: dict[str, Any] = field(default_factory=dict)
    coverage: dict[str, Any] = field(default_factory=dict)
    sabotages: list[Finding] = field(default_factory=list)
    oracle: Agreement | None = None
    cases: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """Why the run does not count as aligned; empty if it does."""
        found = []
        for row in [*self.schedules, *self.reload.get("comparisons", [])]:
            if row.tokens_different:
                found.append(f"{row.name}: {row.tokens_different} tokens differ, first {row.first_difference}")
            if not row.tokens_compared:
                found.append(f"{row.name}: nothing was compared")
        found += [f"vacuous: {name} is {value}" for name, value in self.coverage.items() if not value]
        if self.reload and not self.reload["ok"]:
            found.append(f"reload: {self.reload['problems']}")
        found += [f"sabotage, {s.name}: caught by {s.caught_by}, {s.detail}" for s in self.sabotages if not s.caught]
        if self.oracle is not None:
            found += self.oracle.problems
        return found

    def write(self, path: pathlib.Path) -> None:
        """Write the report as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        record = asdict(self) | {"failures": self.failures}
        path.write_text(json.dumps(record | {"digest": digest_of(record)}, indent=2) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        """Print the comparison and what the runs covered."""
        table = Table(title=f"aligned_e2e, profile {self.profile}")
        for column in ("run", "compared", "different", "seconds", "steps", "splits", "mixed", "preempted"):
            table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
        for row in [*self.schedules, *self.reload.get("comparisons", [])]:
            shown = (row.tokens_compared, row.tokens_different, row.seconds)
            did = (row.plan[k] for k in ("steps", "prefill_splits", "mixed_steps", "preemptions"))
            table.add_row(row.name, *map(str, (*shown, *did)), style="red" if row.tokens_different else None)
        console.print(table)
        if self.sabotages:
            table = Table(title="sabotages")
            for column in ("fault", "caught by", "layer", "op"):
                table.add_column(column)
            for fault in self.sabotages:
                where = (fault.located_layer, fault.located_op)
                cells = (fault.name, fault.caught_by or "nobody", *("" if w is None else str(w) for w in where))
                table.add_row(*cells, style=None if fault.caught else "red")
            console.print(table)
        if self.oracle is not None:
            console.print(self.oracle.summary)
        for failure in self.failures:
            console.print(f"[red]FAILED[/red] {failure}")
        if not self.failures:
            total = sum(r.tokens_compared for r in [*self.schedules, *self.reload.get("comparisons", [])])
            console.print(f"{total} generated tokens compared, 0 different, in {self.seconds:.0f} s")


class ReportError(BatchInvarianceError):
    """A report file is damaged, incomplete, or something else."""


def check_report(path: pathlib.Path) -> list[str]:
    """Read a report back and return its failures; empty if the run was aligned.

    Raises:
        ReportError: The file is missing, was changed after it was written, or is no report.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        digest = record.pop("digest")
        failures = [str(failure) for failure in record["failures"]]
        compared = [row["tokens_compared"] for row in record["runs" if "runs" in record else "schedules"]]
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ReportError(f"{path}: expected a report, got something else ({error}). Run the profile again.") from error
    if digest != digest_of(record):
        raise ReportError(f"{path}: expected the digest that it was written with, got other contents. Run it again.")
    return failures if compared else [*failures, "nothing was compared"]


def digest_of(record: object) -> str:
    """sha256 of the canonical JSON, as it reads after a round trip."""
    plain = json.loads(json.dumps(record))
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
