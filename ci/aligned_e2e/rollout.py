"""The rollout side: a serving loop with paged KV, continuous batching, chunked prefill and preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import bi_kernels as bk
import bi_reload as reload
from bi_kernels.reference import numerics
from bi_kernels.runtime.errors import ArgumentError, CapacityError

from .config import Deployment
from .model import DeepseekV4
from .paged import Batch, BlockPool, BlockTables, Caches
from .prompts import Request

__all__ = ["Completion", "Plan", "RolloutEngine", "Schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one run batches the same requests. None of it may show in the bits.

    Attributes:
        name: For the report.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Rows of one step at most; smaller than the longest prompt, so that prefill splits.
        order_seed: Requests arrive in an order drawn from this seed; None keeps the given order.
        ep_ranks: Simulated expert-parallel ranks.
        blocks: Blocks in the pool; few enough to force preemption, or None for plenty.
    """

    name: str
    max_num_seqs: int
    max_num_batched_tokens: int
    order_seed: int | None = None
    ep_ranks: int = 1
    blocks: int | None = None


@dataclass(slots=True)
class Completion:
    """Generated tokens with the rollout's logprob of each, float32."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """What a run did, so that the report can show it was not vacuous."""

    steps: int = 0
    prefill_splits: int = 0
    mixed_steps: int = 0
    preemptions: int = 0
    largest_decode: int = 0
    rows: int = 0


@dataclass(slots=True)
class _Running:
    request: Request
    tokens: list[int]
    completion: Completion
    tables: BlockTables = field(default_factory=BlockTables)
    computed: int = 0


class RolloutEngine:
    """Serves requests on one model. Its pages are its own; weights are changed through bi-reload only.

    Args:
        model: The model.
        schedule: Batching limits.
        deployment: Page sizes and capacities.
        pool_seed: Order in which physical pages are handed out.
    """

    def __init__(self, model: DeepseekV4, schedule: Schedule, deployment: Deployment, *, pool_seed: int) -> None:
        self.model, self.schedule, self.deployment = model, schedule, deployment
        per_request = -(-deployment.max_model_len // deployment.block)
        blocks = schedule.blocks or schedule.max_num_seqs * per_request
        pages = blocks * deployment.block // deployment.window_page
        self.caches = Caches(model.config, deployment, window_pages=pages, blocks=blocks)
        self._blocks, self._pages = BlockPool(blocks, pool_seed), BlockPool(pages, pool_seed + 1)
        self.plan = Plan()

    def generate(
        self, requests: Sequence[Request], on_token: Callable[[], None] = lambda: None
    ) -> dict[str, Completion]:
        """Serve ``requests`` to the end.

        Args:
            requests: What to serve; all arrive at once.
            on_token: Called after every generated token.

        Returns:
            Completion by request name.

        Raises:
            ReloadError: The last weight reload did not succeed.
        """
        reload.require_servable(self.model)
        order = list(range(len(requests)))
        if self.schedule.order_seed is not None:
            generator = torch.Generator().manual_seed(self.schedule.order_seed)
            order = torch.randperm(len(requests), generator=generator).tolist()
        waiting = deque(_Running(requests[i], list(requests[i].prompt), Completion()) for i in order)
        done = {r.request.name: r.completion for r in waiting}
        running: list[_Running] = []
        while waiting or running:
            parts = self._schedule_step(waiting, running)
            self._step(parts, running, on_token)
        return done

    def _schedule_step(self, waiting: deque[_Running], running: list[_Running]) -> list[tuple[_Running, int]]:
        """Rows of the next step: running requests first, oldest first, then new ones, within the budget."""
        budget = self.schedule.max_num_batched_tokens
        parts: list[tuple[_Running, int]] = []
        for run in list(running):
            if run not in running or not budget:  # preempted by an older one in this loop
                continue
            rows = min(len(run.tokens) - run.computed, budget)
            while not self._reserve(run, run.computed + rows):
                victim = running[-1]
                self._preempt(victim, waiting, running)
                parts = [part for part in parts if part[0] is not victim]
                if victim is run:
                    break
            else:
                parts.append((run, rows))
                budget -= rows
        while waiting and budget and len(running) < self.schedule.max_num_seqs:
            rows = min(len(waiting[0].tokens), budget)
            if not self._reserve(waiting[0], rows):
                break
            run = waiting.popleft()
            running.append(run)
            parts.append((run, rows))
            budget -= rows
        if not parts:
            raise CapacityError(
                f"KV pages: expected room for the next request, got {len(self._pages)} pages and {len(self._blocks)} "
                "blocks with nothing running. Give the engine more blocks."
            )
        # Single rows first: they take the decode path, whether drawn or the tail of a prompt, as in vLLM.
        parts.sort(key=lambda part: part[1] != 1)
        return parts

    def _reserve(self, run: _Running, tokens: int) -> bool:
        pages, blocks = run.tables.missing(tokens, self.deployment)
        if pages > len(self._pages) or blocks > len(self._blocks):
            return False
        run.tables.window += self._pages.take(pages)
        run.tables.blocks += self._blocks.take(blocks)
        return True

    def _release(self, run: _Running) -> None:
        self._pages.give_back(run.tables.window)
        self._blocks.give_back(run.tables.blocks)
        run.tables = BlockTables()

    def _preempt(self, run: _Running, waiting: deque[_Running], running: list[_Running]) -> None:
        """Drop a request's pages; it is recomputed from its tokens later, generated ones included."""
        self._release(run)
        run.computed = 0
        running.remove(run)
        waiting.appendleft(run)
        self.plan.preemptions += 1

    def _step(self, parts: list[tuple[_Running, int]], running: list[_Running], on_token: Callable[[], None]) -> None:
        decodes = sum(rows == 1 for _, rows in parts)
        batch = Batch(
            [(run.tables, run.computed, rows) for run, rows in parts],
            self.deployment,
            names=[run.request.name for run, _ in parts],
            decode_requests=decodes,
        )
        token_ids = torch.tensor([t for run, rows in parts for t in run.tokens[run.computed : run.computed + rows]])
        hidden = self.model(token_ids, batch, self.caches)
        ready = []
        for (run, rows), segment in zip(parts, batch.segments, strict=True):
            run.computed += rows
            if run.computed == len(run.tokens):
                ready.append((run, segment.first_row + rows - 1))
            else:
                self.plan.prefill_splits += 1
        if ready:
            logits = self.model.logits(hidden, torch.tensor([row for _, row in ready]), batch)
            draws = [(run.request.seed, len(run.completion.tokens)) for run, _ in ready]
            drawn = draw(logits, draws, self.deployment.temperature)
            logprobs = bk.selected_logprobs(logits, drawn)
            for (run, _), token, logprob in zip(ready, drawn.tolist(), logprobs, strict=True):
                run.tokens.append(token)
                run.completion.tokens.append(token)
                run.completion.logprobs.append(logprob)
                on_token()
                if len(run.completion.tokens) == run.request.max_tokens:
                    self._release(run)
                    running.remove(run)
        plan = self.plan
        plan.steps += 1
        plan.rows += batch.num_rows
        plan.mixed_steps += 0 < decodes < len(parts)
        plan.largest_decode = max(plan.largest_decode, decodes)


def draw(logits: torch.Tensor, draws: Sequence[tuple[int, int]], temperature: float) -> torch.Tensor:
    """Draw one token for each row by the Gumbel-max trick.

    Args:
        logits: ``(rows, vocab)`` float32.
        draws: Per row, the request's seed and how many tokens it has drawn before. The noise depends on these alone.
        temperature: Above 0.

    Returns:
        ``(rows,)`` int64. Ties go to the lower token id.

    Raises:
        ArgumentError: A logit is NaN or infinite. Nothing was drawn.
    """
    finite = torch.isfinite(logits).all(1)
    if not bool(finite.all()):
        seed, index = draws[int((~finite).nonzero()[0])]
        raise ArgumentError(
            "logits",
            "finite numbers",
            f"NaN or infinity for draw {index} of seed {seed}",
            "A page was read that nobody wrote, or weights are damaged: trace the run and bisect it.",
        )
    uniform = torch.stack(
        [
            torch.rand(logits.shape[1], generator=torch.Generator().manual_seed(seed * 1_000_003 + index))
            for seed, index in draws
        ]
    )
    noise = -numerics.log(-numerics.log(uniform.clamp(min=2.0**-24)))
    keys = logits / temperature + noise
    ids = torch.arange(logits.shape[1])
    return torch.where(keys == keys.amax(1, keepdim=True), ids, logits.shape[1]).amin(1)
