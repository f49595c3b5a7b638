"""Profile ``cpu``: the whole stack on the exact references, on any machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import bi_kernels as bk

from .config import Deployment, ModelConfig
from .faults import FaultStages, require_transformers
from .prompts import Request, load_book, make_requests
from .report import Report, compare
from .rollout import Plan, Schedule
from .sides import NEW_SEED, OLD_SEED, Sides, recompute, reload_and_serve, serve
from .workers import Workers

__all__ = ["run"]

PACKAGES = ("bi-kernels", "bi-sparse-attn", "bi-moe-deepep", "bi-reload")

# Many short prompts and a few long ones, around every boundary: pages of 64, the window of 128, blocks of 256, and
# 4 * index_topk = 256, past which top-k selects.
SHORT = (*range(1, 10), 11, 13, 15, 16, 17, 19, 21, 23, 27, 31, 33, 39, 45, 51, 63, 64, 65, 80, 100, 127, 128, 129, 140)
LONG = (255, 256, 257, 380, 400, 411, 420, 430, 440, 447, 455, 470)
PROMPT_LENGTHS = (*SHORT, *LONG)
MAX_TOKENS = 46

SCHEDULES = (
    Schedule("all together", max_num_seqs=44, max_num_batched_tokens=512),
    Schedule("small chunks", max_num_seqs=20, max_num_batched_tokens=64, order_seed=1),
    Schedule("few at once, EP 2", max_num_seqs=22, max_num_batched_tokens=400, order_seed=2, ep_ranks=2),
    Schedule("preempted", max_num_seqs=26, max_num_batched_tokens=256, order_seed=3, blocks=22),
)


def run(console: Console) -> Report:
    """Run every schedule, recompute with the actor, reload there and back; compare everything bit by bit.

    Each run has its own process with one thread, as many at a time as there are cores; actors have two threads. None
    of it may show in the bits.
    """
    require_transformers()
    started = time.monotonic()
    vocabulary, book = load_book()
    config, deployment = ModelConfig(vocab_size=vocabulary.size), Deployment()
    requests = make_requests(book, PROMPT_LENGTHS, MAX_TOKENS)
    report = Report(
        profile="cpu",
        packages={p: importlib.metadata.version(p) for p in PACKAGES},
        environment={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
        },
        model=_describe(config, deployment),
        attestation=json.loads(bk.attest(required=PACKAGES).to_json()),
    )
    sides = Sides(config, deployment, requests)
    with Progress(console=console) as progress, Workers(progress) as workers:
        workers.track("rollout and reload", (len(SCHEDULES) + 2) * len(requests) * MAX_TOKENS)
        reloading = workers.submit(
            "reload to new weights and back", reload_and_serve, sides, (SCHEDULES[0], SCHEDULES[2])
        )
        serving = [workers.submit(f"rollout, {schedule.name}", serve, sides, schedule) for schedule in SCHEDULES]
        faults = FaultStages.start(workers, config, deployment, book)
        first = workers.result(serving[0])
        recomputing = workers.submit("actor", recompute, sides, OLD_SEED, first.tokens)
        reloaded = workers.result(reloading)
        rechecking = workers.submit("actor, new weights", recompute, sides, NEW_SEED, reloaded.new.tokens)
        runs = [workers.result(future) for future in serving]
        expected = workers.result(recomputing).logprobs
        actor = workers.result(rechecking)
        faults.write_to(report, workers)
    report.schedules = [
        compare(schedule.name, run, first.tokens, expected) for schedule, run in zip(SCHEDULES, runs, strict=True)
    ]
    comparisons = [
        compare("new weights", reloaded.new, reloaded.new.tokens, actor.logprobs),
        compare("old weights again", reloaded.old, first.tokens, expected),
    ]
    problems = list(reloaded.problems)
    if reloaded.fingerprints != actor.fingerprints:
        problems.append("weight fingerprints of rollout and actor differ after the reload")
    report.reload = {
        "ok": not problems and not any(c.tokens_different for c in comparisons),
        "comparisons": comparisons,
        "tokens_changed_by_new_weights": sum(
            a != b for name, row in first.tokens.items() for a, b in zip(row, reloaded.new.tokens[name], strict=True)
        ),
        "problems": problems,
    }
    report.coverage |= _coverage(config, requests, first.tokens, [run.plan for run in runs], report)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def _coverage(
    config: ModelConfig,
    requests: Sequence[Request],
    tokens: Mapping[str, Sequence[int]],
    plans: Sequence[Plan],
    report: Report,
) -> dict[str, Any]:
    """Numbers that would be zero in a vacuous run. A zero fails the run."""
    threshold = 4 * config.index_topk
    lengths = [len(r.prompt) + len(tokens[r.name]) for r in requests]
    past = sum(max(0, length - threshold) for length in lengths)
    return {
        "generated_tokens_per_schedule": sum(map(len, tokens.values())),
        "total_tokens": sum(lengths),
        "tokens_past_topk_threshold": past,
        "a_quarter_past_topk_threshold": 4 * past >= sum(lengths),
        "two_thousand_tokens_compared": min(c.tokens_compared for c in report.schedules) >= 2000,
        "prefill_splits": sum(p.prefill_splits for p in plans),
        "mixed_steps": sum(p.mixed_steps for p in plans),
        "preemptions": sum(p.preemptions for p in plans),
        "largest_decode": max(p.largest_decode for p in plans),
        "tokens_changed_by_new_weights": report.reload["tokens_changed_by_new_weights"],
    }


def _describe(config: ModelConfig, deployment: Deployment) -> dict[str, Any]:
    described = asdict(config) | {"arch": config.arch.name, "num_layers": config.num_layers}
    return {"config": described, "deployment": asdict(deployment)}
