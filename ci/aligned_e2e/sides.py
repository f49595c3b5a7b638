"""The work of one process: a rollout, an actor, or a rollout that reloads. Everything crosses processes as values."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

import bi_reload as reload

from .actor import recompute_logprobs
from .checkpoint import make_checkpoint, perturb
from .config import Deployment, ModelConfig
from .model import DeepseekV4
from .prompts import Request
from .rollout import Plan, RolloutEngine, Schedule
from .workers import advance

__all__ = [
    "NEW_SEED",
    "OLD_SEED",
    "Recomputed",
    "Reloaded",
    "Served",
    "Sides",
    "make_engine",
    "recompute",
    "reload_and_serve",
    "send_weights",
    "serve",
    "serve_again",
    "serve_on",
]

OLD_SEED, NEW_SEED = 0, 1


@dataclass(frozen=True, slots=True)
class Sides:
    """What rollout and actor agree on."""

    config: ModelConfig
    deployment: Deployment
    requests: Sequence[Request]

    def checkpoint(self, seed: int) -> dict[str, torch.Tensor]:
        """The old weights, or the new ones: the same after one training step."""
        old = make_checkpoint(self.config, OLD_SEED)
        return old if seed == OLD_SEED else perturb(self.config, old, seed)

    def model(self, seed: int) -> DeepseekV4:
        """A model with the weights of :meth:`checkpoint`."""
        return DeepseekV4(self.config, self.deployment, self.checkpoint(seed))


@dataclass(frozen=True, slots=True)
class Served:
    """What a rollout drew, by request, and how it was batched.

    Attributes:
        tokens: Token ids.
        logprobs: Bits of their logprobs.
        digests: Digests of the logits of the whole vocabulary that they were drawn from.
        plan: What the run did.
        seconds: Wall-clock time.
    """

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[int]]
    digests: dict[str, list[int]]
    plan: Plan
    seconds: float


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What an actor computed for the same tokens: as in :class:`Served`, and the weights' fingerprints."""

    logprobs: dict[str, list[int]]
    digests: dict[str, list[int]]
    fingerprints: dict[str, int]


@dataclass(frozen=True, slots=True)
class Reloaded:
    """A rollout that went to new weights and back."""

    new: Served
    old: Served
    fingerprints: dict[str, int]
    problems: list[str]


def serve(sides: Sides, schedule: Schedule) -> Served:
    """Serve every request with the old weights."""
    torch.set_num_threads(1)
    engine = make_engine(sides, sides.model(OLD_SEED), schedule)
    return serve_on(engine, sides.requests)


def serve_again(sides: Sides, schedule: Schedule, first: Sequence[Request]) -> tuple[Served, Served]:
    """Serve some requests, then every request on the same engine, which still knows the blocks of the first."""
    torch.set_num_threads(1)
    engine = make_engine(sides, sides.model(OLD_SEED), schedule)
    return serve_on(engine, first), serve_on(engine, sides.requests)


def recompute(sides: Sides, seed: int, responses: Mapping[str, Sequence[int]], *, num_threads: int = 1) -> Recomputed:
    """The actor's logprobs of given responses."""
    torch.set_num_threads(num_threads)
    model = sides.model(seed)
    sequences = {request.name: (request.prompt, responses[request.name]) for request in sides.requests}
    rows = dict(zip(sequences, recompute_logprobs(model, sides.deployment, sequences), strict=True))
    return Recomputed(
        {name: _bits(logprobs) for name, (logprobs, _) in rows.items()},
        {name: digests.tolist() for name, (_, digests) in rows.items()},
        _fingerprints(model),
    )


def reload_and_serve(sides: Sides, schedules: tuple[Schedule, Schedule]) -> Reloaded:
    """Another checkpoint and back, in place, in a rollout that has served before."""
    torch.set_num_threads(1)
    model = sides.model(OLD_SEED)
    ledger = reload.AddressLedger().record(model)
    problems: list[str] = []

    send_weights(model, sides.checkpoint(NEW_SEED), bucket_seed=11, ledger=ledger)
    new = serve_on(make_engine(sides, model, schedules[0]), sides.requests)
    fingerprints = _fingerprints(model)
    send_weights(model, sides.checkpoint(OLD_SEED), bucket_seed=12, ledger=ledger)
    old = serve_on(make_engine(sides, model, schedules[1]), sides.requests)
    problems += [f"address: {difference}" for difference in ledger.diff(model)]
    return Reloaded(new, old, fingerprints, problems)


def send_weights(
    model: DeepseekV4, checkpoint: Mapping[str, torch.Tensor], *, bucket_seed: int, ledger: reload.AddressLedger
) -> None:
    """A weight update as a trainer sends it: buckets of uneven size, tensors in no particular order."""
    names = sorted(checkpoint)
    generator = torch.Generator().manual_seed(bucket_seed)
    names = [names[i] for i in torch.randperm(len(names), generator=generator).tolist()]
    prints = reload.weight_fingerprint(checkpoint)
    manifest = {name: reload.TensorSpec.of(checkpoint[name], fingerprint=prints[name]) for name in names}
    update = reload.LayerwiseReload(model, manifest, ledger=ledger)
    update.begin()
    while names:
        size = int(torch.randint(1, 24, (), generator=generator))
        update.load_bucket({name: checkpoint[name] for name in names[:size]})
        names = names[size:]
    update.finish()


def make_engine(sides: Sides, model: DeepseekV4, schedule: Schedule) -> RolloutEngine:
    """A rollout engine on a model; simulates the schedule's ranks unless the model has joined a group."""
    if model.group is None:
        model.set_expert_ranks(schedule.ep_ranks)
    return RolloutEngine(model, schedule, sides.deployment, pool_seed=7 + len(schedule.name))


def serve_on(engine: RolloutEngine, requests: Sequence[Request]) -> Served:
    """Serve requests on an engine, as values that can cross processes."""
    started = time.monotonic()
    completions = engine.generate(requests, on_token=advance)
    return Served(
        {name: completion.tokens for name, completion in completions.items()},
        {name: _bits(torch.stack(completion.logprobs)) for name, completion in completions.items()},
        {name: completion.digests for name, completion in completions.items()},
        engine.plan,
        round(time.monotonic() - started, 2),
    )


def _bits(logprobs: torch.Tensor) -> list[int]:
    """float32 as its bits: what is compared, and what cannot change on its way between processes."""
    return [int(bits) for bits in logprobs.view(torch.int32).tolist()]


def _fingerprints(model: DeepseekV4) -> dict[str, int]:
    return reload.weight_fingerprint(dict(model.named_parameters()))
