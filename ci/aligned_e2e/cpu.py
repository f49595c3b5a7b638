"""Profile ``cpu``: the whole stack on the exact references, on any machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import bi_kernels as bk

from .config import Deployment, ModelConfig
from .faults import FaultStages, require_transformers
from .prompts import Request, load_book, make_requests
from .ranks import serve_ranks
from .report import Comparison, Report, compare
from .rollout import Plan, Schedule
from .sides import NEW_SEED, OLD_SEED, Recomputed, Served, Sides, recompute, reload_and_serve, serve, serve_again
from .workers import Workers

__all__ = ["run"]

PACKAGES = ("bi-kernels", "bi-sparse-attn", "bi-moe-deepep", "bi-reload")

# Many short prompts and some long ones, around every boundary: pages of 64, the window of 128, blocks of 256, and
# 4 * index_topk = 256, past which top-k selects.
SHORT = (*range(1, 21), 21, 27, 31, 32, 33, 39, 45, 51, 63, 64, 65, 100, 127, 128, 129)
LONG = (255, 256, 257, 300, 385, 411, 447, 470)
PROMPT_LENGTHS = (*SHORT, *LONG)
FAMILIES = ((400, 440), (430, 430, 430))  # a conversation that grows, and three samples of one prompt
MAX_TOKENS = 84

TOGETHER = Schedule("all together", max_num_seqs=48, max_num_batched_tokens=512, blocks=80)
ALONE = Schedule("alone, then others", 47, 384, order_seed=1, alone=1, blocks=64)
CHUNKS = Schedule("chunks of 1, 3, 127; 1 rank", 48, 224, order_seed=2, chunks=(1, 3, 127), blocks=80)
PREEMPTED = Schedule("preempted; 2 ranks", 30, 320, order_seed=3, blocks=38)
REUSE = Schedule("prefix reuse", 48, 400, order_seed=4, blocks=80, prefix_caching=True)
PARTLY = Schedule("prefix reuse, partly warm", 48, 448, order_seed=5, blocks=60, prefix_caching=True)
RANKS = Schedule("4 ranks, one empty", 32, 256, order_seed=6, blocks=64)
COLD, WARM = f"{REUSE.name}, cold", f"{REUSE.name}, warm"
# Expert-parallel ranks, each a process, and their shares of the requests.
SHARES = {CHUNKS.name: (CHUNKS, (1,)), PREEMPTED.name: (PREEMPTED, (3, 2)), RANKS.name: (RANKS, (2, 1, 0, 2))}
# Weights there and back: every other request. Simulated ranks, so that these are under test too.
RELOADS = (
    Schedule("new weights", 24, 512, blocks=48),
    Schedule("old weights again", 24, 448, order_seed=7, ep_ranks=2, blocks=48),
)


def run(console: Console) -> Report:
    """Run every schedule, recompute with the actor, reload there and back; compare everything bit by bit.

    Each run has its own process with one thread, as many at a time as there are cores; the actor with the new weights
    has two threads. None of it may show in the bits.
    """
    require_transformers()
    started = time.monotonic()
    vocabulary, book = load_book()
    config, deployment = ModelConfig(vocab_size=vocabulary.size), Deployment()
    requests = make_requests(book, PROMPT_LENGTHS, MAX_TOKENS, FAMILIES)
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
    half = Sides(config, deployment, requests[::2])
    some = [replace(request, max_tokens=1) for request in half.requests]
    runs: dict[str, Served] = {}
    with Progress(console=console) as progress, Workers(progress) as workers:
        # Six runs of all requests and those on ranks; the reload serves half of them twice.
        workers.track("rollout and reload", (5 + len(SHARES) + 1) * len(requests) * MAX_TOKENS)
        # The actor waits for the first, and the longest should not come last.
        serving = workers.submit(f"rollout, {TOGETHER.name}", serve, sides, TOGETHER)
        alone = workers.submit(f"rollout, {ALONE.name}", serve, sides, ALONE)
        reloading = workers.submit("reload to new weights and back", reload_and_serve, half, RELOADS)
        sharing = {
            name: workers.submit(f"rollout, {name}", serve_ranks, sides, schedule, shares)
            for name, (schedule, shares) in SHARES.items()
        }
        reusing = workers.submit(f"rollout, {REUSE.name}, cold and warm", serve_again, sides, REUSE, requests)
        partly = workers.submit(f"rollout, {PARTLY.name}", serve_again, sides, PARTLY, some)
        faults = FaultStages.start(workers, config, deployment, book)
        first: Served = workers.result(serving)
        recomputing = workers.submit("actor", recompute, sides, OLD_SEED, first.tokens)
        reloaded = workers.result(reloading)
        rechecking = workers.submit("actor, new weights", recompute, half, NEW_SEED, reloaded.new.tokens, num_threads=2)
        runs[TOGETHER.name] = first
        runs[ALONE.name] = workers.result(alone)
        runs[COLD], runs[WARM] = workers.result(reusing)
        runs[PARTLY.name] = workers.result(partly)[1]
        runs |= {name: workers.result(future) for name, future in sharing.items()}
        actor: Recomputed = workers.result(recomputing)
        actor_new: Recomputed = workers.result(rechecking)
        faults.write_to(report, workers)

    def against(name: str, run: Served, tokens: Mapping[str, Sequence[int]], expected: Recomputed) -> Comparison:
        return compare(name, run, tokens, expected.logprobs, expected.digests)

    report.schedules = [against(name, run, first.tokens, actor) for name, run in runs.items()]
    comparisons = [
        against(RELOADS[0].name, reloaded.new, reloaded.new.tokens, actor_new),
        against(RELOADS[1].name, reloaded.old, {name: first.tokens[name] for name in reloaded.old.tokens}, actor),
    ]
    problems = list(reloaded.problems)
    if reloaded.fingerprints != actor_new.fingerprints:
        problems.append("weight fingerprints of rollout and actor differ after the reload")
    report.reload = {
        "ok": not problems and not any(c.tokens_different for c in comparisons),
        "comparisons": comparisons,
        "tokens_changed_by_new_weights": sum(
            a != b for name, row in reloaded.new.tokens.items() for a, b in zip(row, first.tokens[name], strict=True)
        ),
        "problems": problems,
    }
    report.coverage |= _coverage(config, requests, first.tokens, {name: run.plan for name, run in runs.items()}, report)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def _coverage(
    config: ModelConfig,
    requests: Sequence[Request],
    tokens: Mapping[str, Sequence[int]],
    plans: Mapping[str, Plan],
    report: Report,
) -> dict[str, Any]:
    """Numbers that would be zero in a vacuous run. A zero fails the run."""
    threshold = 4 * config.index_topk
    reloads: Sequence[Comparison] = report.reload["comparisons"]
    lengths = [len(r.prompt) + len(tokens[r.name]) for r in requests]
    past = sum(max(0, length - threshold) for length in lengths)
    return {
        "generated_tokens_per_schedule": sum(map(len, tokens.values())),
        "total_tokens": sum(lengths),
        "tokens_past_topk_threshold": past,
        "a_quarter_past_topk_threshold": 4 * past >= sum(lengths),
        "eight_schedules": len(report.schedules) >= 8,
        "four_thousand_tokens_compared": min(c.tokens_compared for c in report.schedules) >= 4000,
        "two_thousand_tokens_compared_after_each_reload": min(c.tokens_compared for c in reloads) >= 2000,
        "prefill_splits": sum(p.prefill_splits for p in plans.values()),
        "mixed_steps": sum(p.mixed_steps for p in plans.values()),
        "steps_with_one_request": sum(p.single_steps for p in plans.values()),
        "largest_decode": max(p.largest_decode for p in plans.values()),
        "preemptions": sum(p.preemptions for p in plans.values()),
        "cached_tokens_cold": plans[COLD].cached_tokens,
        "cached_tokens_warm": plans[WARM].cached_tokens,
        "cached_tokens_partly_warm": plans[PARTLY.name].cached_tokens,
        "cached_blocks_evicted": sum(p.evictions for p in plans.values()),
        "cached_blocks_checked": sum(p.blocks_checked for p in plans.values()),
        "cached_blocks_unchanged": not any(p.blocks_changed for p in plans.values()),
        "expert_ranks": max(p.ranks for p in plans.values()),
        "empty_ranks": max(p.empty_ranks for p in plans.values()),
        "tokens_changed_by_new_weights": report.reload["tokens_changed_by_new_weights"],
    }


def _describe(config: ModelConfig, deployment: Deployment) -> dict[str, Any]:
    described = asdict(config) | {"arch": config.arch.name, "num_layers": config.num_layers}
    return {"config": described, "deployment": asdict(deployment)}
