"""Profiles ``h100`` and ``h200``: real vLLM, real kernels, a generated checkpoint. One subprocess for each engine.

Without nox the same steps are plain commands, ``python -m aligned_e2e.vllm_engine ...`` for each engine and then
``python -m aligned_e2e --profile h200 --merge``: a GPU host may only lend itself for minutes at a time.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from .vllm_engine import ENGINES

__all__ = ["ENVIRONMENT", "compare_records", "load_records", "merge", "run_engines"]

ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}
"""What every engine's process gets. A warm-up of DeepGEMM compiles for minutes what a run of this size never calls."""

_FIRST = "graphs"  # whose tokens the actor recomputes, and whose first schedule everything is compared with


def run_engines(checkpoint: pathlib.Path, parts: pathlib.Path, *, arguments: tuple[str, ...] = ()) -> list[str]:
    """Run every engine whose record is not in ``parts`` yet. Returns the names of those that failed."""
    failed = []
    for name, engine in ENGINES.items():
        record = _record(parts, name)
        if record.is_file():
            continue
        command = [sys.executable, "-m", "aligned_e2e.vllm_engine", name]
        command += ["--checkpoint", str(checkpoint), "--output", str(record), *arguments]
        if any(schedule.recompute for schedule in engine.schedules):
            command += ["--drawn", str(_record(parts, _FIRST))]
        with record.with_suffix(".log").open("w") as log:
            done = subprocess.run(
                command,
                env=os.environ | ENVIRONMENT | engine.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=600,
                check=False,
            )
        if done.returncode:
            failed.append(name)
    return failed


def load_records(parts: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Records by engine, in the order of :data:`ENGINES`; engines that were not run are left out."""
    return {name: json.loads(_record(parts, name).read_text()) for name in ENGINES if _record(parts, name).is_file()}


def compare_records(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every schedule against the first one: token ids, logprob bits and, where it drew tokens, full-logit digests."""
    expected = records[_FIRST]["schedules"][0]["requests"]
    return [
        _compare(schedule, expected) | {"engine": engine}
        for engine, record in records.items()
        for schedule in record["schedules"]
    ]


def merge(parts: pathlib.Path, console: Console) -> dict[str, Any]:
    """Put the records together; refuses parts whose attestations differ, because they ran other code."""
    records = load_records(parts)
    digests = {name: record["attestation"]["digest"] for name, record in records.items()}
    failures = [f"{name}: not run" for name in ENGINES if name not in records]
    if len(set(digests.values())) > 1:
        failures.append(f"parts of different installations: {digests}")
    runs = compare_records(records) if _FIRST in records else []
    failures += [f"{run['schedule']}: {run['tokens_different']} differ, first {run['first_difference']}"
                 for run in runs if run["tokens_different"] or not run["tokens_compared"]]  # fmt: skip
    for run in runs:
        console.print(f"{run['schedule']:28} {run['tokens_compared']:7} compared {run['tokens_different']:7} different")
    return {
        "runs": runs,
        "tokens_compared": sum(run["tokens_compared"] for run in runs),
        "tokens_different": sum(run["tokens_different"] for run in runs),
        "failures": failures,
    }


def _compare(schedule: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    different = compared = 0
    first = None
    for request, index, mine, theirs in _pairs(schedule["requests"], expected):
        compared += 1
        if mine != theirs:
            different += 1
            first = first or f"{request}[{index}]: (token, logprob bits, digest) {mine} against {theirs}"
    return {
        "schedule": schedule["schedule"],
        "tokens_compared": compared,
        "tokens_different": different,
        "first_difference": first,
        "seconds": schedule["seconds"],
        "did": schedule["did"],
    }


def _pairs(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, int, Any, Any]]:
    """Token by token; a token that one side lacks is a difference, a digest that an actor has none of is not."""
    for request, want in theirs.items():
        got = mine[request]
        with_digests = got["digests"] is not None
        for i in range(max(len(want["tokens"]), len(got["tokens"]))):
            yield request, i, _at(got, i, with_digests), _at(want, i, with_digests)


def _at(row: Mapping[str, Any], i: int, with_digests: bool) -> tuple[Any, ...] | None:
    if i >= len(row["tokens"]):
        return None
    return (row["tokens"][i], row["logprobs"][i], *((row["digests"][i],) if with_digests else ()))


def _record(parts: pathlib.Path, engine: str) -> pathlib.Path:
    return parts / f"{engine.replace(' ', '-').replace(',', '')}.json"
