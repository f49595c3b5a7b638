"""Profile ``cpu``: the whole stack on the exact references, on any machine."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import bi_kernels as bk
import bi_reload as reload

from .actor import recompute_logprobs
from .checkpoint import make_checkpoint, perturb
from .config import Deployment, ModelConfig
from .model import DeepseekV4
from .prompts import Request, load_book, make_requests
from .report import Comparison, Report, compare
from .rollout import Completion, Plan, RolloutEngine, Schedule

__all__ = ["run"]

PACKAGES = ("bi-kernels", "bi-sparse-attn", "bi-moe-deepep", "bi-reload")

# Lengths around every boundary: pages of 64, the window of 128, blocks of 256, 4 * index_topk = 256.
PROMPT_LENGTHS = (1, 3, 17, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 331, 350, 384, 400, 411, 430, 447)
MAX_TOKENS = 92

SCHEDULES = (
    Schedule("all together", max_num_seqs=22, max_num_batched_tokens=512),
    Schedule("small chunks", max_num_seqs=9, max_num_batched_tokens=56, order_seed=1),
    Schedule("shuffled, EP 2", max_num_seqs=16, max_num_batched_tokens=300, order_seed=2, ep_ranks=2),
    Schedule("few at once", max_num_seqs=4, max_num_batched_tokens=512, order_seed=3),
    Schedule("preempted", max_num_seqs=16, max_num_batched_tokens=256, order_seed=4, blocks=14),
)


def run(console: Console) -> Report:
    """Run every schedule, recompute with the actor, reload there and back; compare everything bit by bit."""
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
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        },
        model=_describe(config, deployment),
        attestation=json.loads(bk.attest().to_json()),
    )
    runs = len(SCHEDULES) + 2  # the reload generates twice
    with Progress(console=console) as progress:
        bar = progress.add_task("rollout", total=runs * len(requests) * MAX_TOKENS)

        def serve(model: DeepseekV4, schedule: Schedule, title: str) -> tuple[dict[str, Completion], Plan, float]:
            progress.update(bar, description=title)
            before = time.monotonic()
            model.set_expert_ranks(schedule.ep_ranks)
            engine = RolloutEngine(model, schedule, deployment, pool_seed=7 + len(schedule.name))
            completions = engine.generate(requests, on_token=lambda: progress.advance(bar))
            return completions, engine.plan, time.monotonic() - before

        old = make_checkpoint(config, seed=0)
        rollout = DeepseekV4(config, deployment, old)
        served = [serve(rollout, s, s.name) for s in SCHEDULES]
        first = served[0][0]
        tokens = {name: list(c.tokens) for name, c in first.items()}
        progress.update(bar, description="actor")
        expected = _actor(DeepseekV4(config, deployment, old), deployment, requests, first)
        report.schedules = [
            compare(s.name, completions, tokens, expected, seconds, plan)
            for s, (completions, plan, seconds) in zip(SCHEDULES, served, strict=True)
        ]
        report.reload = _reload(config, deployment, requests, rollout, old, expected, tokens, serve, progress, bar)
    plans = [plan for _, plan, _ in served]
    report.coverage = _coverage(config, requests, tokens, plans, report)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def _actor(
    model: DeepseekV4, deployment: Deployment, requests: Sequence[Request], completions: Mapping[str, Completion]
) -> dict[str, torch.Tensor]:
    """The actor's logprobs of what the rollout drew, by request name."""
    sequences = [(r.prompt, completions[r.name].tokens) for r in requests]
    logprobs = recompute_logprobs(model, deployment, sequences)
    return {r.name: row for r, row in zip(requests, logprobs, strict=True)}


def _reload(
    config: ModelConfig,
    deployment: Deployment,
    requests: Sequence[Request],
    rollout: DeepseekV4,
    old: dict[str, torch.Tensor],
    old_logprobs: Mapping[str, torch.Tensor],
    old_tokens: Mapping[str, Sequence[int]],
    serve: Callable[[DeepseekV4, Schedule, str], tuple[dict[str, Completion], Plan, float]],
    progress: Progress,
    bar: Any,
) -> dict[str, Any]:
    """Another checkpoint and back, in place: its bits must be a cold actor's, and then the old bits again."""
    problems: list[str] = []
    comparisons: list[Comparison] = []
    ledger = reload.AddressLedger().record(rollout)
    new = perturb(config, old, seed=1)
    actor = DeepseekV4(config, deployment, new)

    _send(rollout, new, bucket_seed=11)
    completions, plan, seconds = serve(rollout, SCHEDULES[1], "new weights")
    progress.update(bar, description="actor, new weights")
    tokens = {name: list(c.tokens) for name, c in completions.items()}
    logprobs = _actor(actor, deployment, requests, completions)
    comparisons.append(compare("new weights", completions, tokens, logprobs, seconds, plan))
    if reload.weight_fingerprint(dict(rollout.named_parameters())) != reload.weight_fingerprint(
        dict(actor.named_parameters())
    ):
        problems.append("fingerprints of rollout and actor differ")
    changed = sum(a != b for name, row in tokens.items() for a, b in zip(row, old_tokens[name], strict=True))

    _send(rollout, old, bucket_seed=12)
    completions, plan, seconds = serve(rollout, SCHEDULES[0], "old weights again")
    comparisons.append(compare("old weights again", completions, old_tokens, old_logprobs, seconds, plan))
    moved = [str(change) for change in ledger.diff(rollout)]
    problems += [f"address: {change}" for change in moved]
    return {
        "ok": not problems and not any(c.tokens_different for c in comparisons),
        "comparisons": comparisons,
        "tokens_changed_by_new_weights": changed,
        "addresses_moved": len(moved),
        "problems": problems,
    }


def _send(rollout: DeepseekV4, checkpoint: Mapping[str, torch.Tensor], *, bucket_seed: int) -> None:
    """A weight update as a trainer sends it: buckets of uneven size, tensors in no particular order."""
    names = sorted(checkpoint)
    generator = torch.Generator().manual_seed(bucket_seed)
    names = [names[i] for i in torch.randperm(len(names), generator=generator).tolist()]
    manifest = {name: reload.TensorSpec.of(checkpoint[name]) for name in names}
    update = reload.LayerwiseReload(rollout, manifest)
    update.begin()
    while names:
        size = int(torch.randint(1, 24, (), generator=generator))
        update.load_bucket({name: checkpoint[name] for name in names[:size]})
        names = names[size:]
    update.finish()


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
