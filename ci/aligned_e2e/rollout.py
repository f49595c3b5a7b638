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
from bi_kernels.testing.trace import row_digests

from .config import Deployment
from .model import DeepseekV4
from .paged import Batch, BlockManager, BlockTables, Caches
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
        alone: So many requests are served before any other starts, one after the other.
        chunks: Rows of a prompt in one step at most, taken in turn by each request; () sets no limit of its own.
        ep_ranks: Simulated expert-parallel ranks.
        blocks: Blocks in the pool; few enough to force preemption or eviction, or None for plenty.
        prefix_caching: Full blocks of equal prefixes are computed once.
    """

    name: str
    max_num_seqs: int
    max_num_batched_tokens: int
    order_seed: int | None = None
    alone: int = 0
    chunks: tuple[int, ...] = ()
    ep_ranks: int = 1
    blocks: int | None = None
    prefix_caching: bool = False


@dataclass(slots=True)
class Completion:
    """Generated tokens with the rollout's logprob of each, float32, and the digest of the logits it came from."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """What a run did, so that the report can show it was not vacuous.

    Attributes:
        steps: Forward calls with rows.
        rows: Rows of all of them.
        prefill_splits: Chunks after which a prompt was not complete.
        mixed_steps: Steps with decode rows and chunks.
        largest_decode: Most requests that decoded together.
        single_steps: Steps with one request only.
        preemptions: Requests that lost their pages.
        cached_tokens: Tokens that were not computed because a request before had the same prefix.
        evictions: Shared blocks that made room.
        blocks_checked: Shared blocks whose bytes were compared with what they were when they were published.
        blocks_changed: Those that had changed: a fault.
        ranks: Expert-parallel ranks, each a process.
        empty_ranks: Those that served no request and only lent their experts.
    """

    steps: int = 0
    rows: int = 0
    prefill_splits: int = 0
    mixed_steps: int = 0
    largest_decode: int = 0
    single_steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    blocks_checked: int = 0
    blocks_changed: int = 0
    ranks: int = 0
    empty_ranks: int = 0


@dataclass(slots=True)
class _Running:
    request: Request
    tokens: list[int]
    completion: Completion
    tables: BlockTables = field(default_factory=BlockTables)
    computed: int = 0
    chunks: int = 0  # prompt chunks so far


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
        digest = self.caches.digest if schedule.prefix_caching else None
        self.storage = BlockManager(deployment, blocks, pool_seed, digest)
        self.plan = Plan()

    def generate(
        self, requests: Sequence[Request], on_token: Callable[[], None] = lambda: None
    ) -> dict[str, Completion]:
        """Serve ``requests`` to the end. Blocks shared in an earlier call are found again.

        On a model that is one rank of an expert-parallel group this is a collective: every rank calls it, with no
        requests too, and returns when all are done.

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
        self.plan = Plan()
        self._finished = 0
        evictions, checked = self.storage.evictions, self.storage.blocks_checked
        while True:
            parts = self._schedule_step(waiting, running) if waiting or running else []
            bucket = self.model.largest_batch(sum(rows for _, rows in parts))
            if not bucket:
                break
            if parts:
                self._step(parts, bucket, running, on_token)
            else:
                self.model.lend_experts(bucket)
        self.storage.check()
        self.plan.evictions = self.storage.evictions - evictions
        self.plan.blocks_checked = self.storage.blocks_checked - checked
        self.plan.blocks_changed = self.storage.blocks_changed
        return done

    def reset_prefix_cache(self) -> None:
        """Forget what was computed: to be called after every change of the weights."""
        self.storage.forget()

    def _schedule_step(self, waiting: deque[_Running], running: list[_Running]) -> list[tuple[_Running, int]]:
        """Rows of the next step: running requests first, oldest first, then new ones, within the budget."""
        budget = self.schedule.max_num_batched_tokens
        parts: list[tuple[_Running, int]] = []
        for run in list(running):
            if run not in running or not budget:  # preempted by an older one in this loop
                continue
            rows = min(self._rows_wanted(run), budget)
            while not self.storage.reserve(run.tables, run.computed + rows):
                victim = running[-1]
                self._preempt(victim, waiting, running)
                parts = [part for part in parts if part[0] is not victim]
                if victim is run:
                    break
            else:
                parts.append((run, rows))
                budget -= rows
        together = 1 if self._finished < self.schedule.alone else self.schedule.max_num_seqs
        while waiting and budget and len(running) < together:
            run = waiting[0]
            run.computed = self.storage.share(run.tables, run.tokens)
            rows = min(self._rows_wanted(run), budget)
            if not self.storage.reserve(run.tables, run.computed + rows):
                self.storage.release(run.tables)
                break
            self.plan.cached_tokens += run.computed
            running.append(waiting.popleft())
            parts.append((run, rows))
            budget -= rows
        if not parts:
            raise CapacityError(
                f"KV pages: expected room for the next request, got {self.storage.describe_free()} with nothing "
                "running. Give the engine more blocks."
            )
        # Single rows first: they take the decode path, whether drawn or the tail of a prompt, as in vLLM.
        parts.sort(key=lambda part: part[1] != 1)
        return parts

    def _rows_wanted(self, run: _Running) -> int:
        rows, chunks = len(run.tokens) - run.computed, self.schedule.chunks
        return min(rows, chunks[run.chunks % len(chunks)]) if chunks else rows

    def _preempt(self, run: _Running, waiting: deque[_Running], running: list[_Running]) -> None:
        """Drop a request's pages; it is recomputed from its tokens later, generated ones included."""
        self.storage.release(run.tables)
        run.computed = 0
        running.remove(run)
        waiting.appendleft(run)
        self.plan.preemptions += 1

    def _step(
        self, parts: list[tuple[_Running, int]], bucket: int, running: list[_Running], on_token: Callable[[], None]
    ) -> None:
        decodes = sum(rows == 1 for _, rows in parts)
        batch = Batch(
            [(run.tables, run.computed, rows) for run, rows in parts],
            self.deployment,
            names=[run.request.name for run, _ in parts],
            decode_requests=decodes,
            bucket=bucket,
        )
        token_ids = torch.tensor([t for run, rows in parts for t in run.tokens[run.computed : run.computed + rows]])
        hidden = self.model(token_ids, batch, self.caches)
        ready = []
        for (run, rows), segment in zip(parts, batch.segments, strict=True):
            run.computed += rows
            self.storage.publish(run.tables, run.tokens, run.computed)
            if run.computed == len(run.tokens):
                ready.append((run, segment.first_row + rows - 1))
            else:
                self.plan.prefill_splits += 1
                run.chunks += 1
        if ready:
            logits = self.model.logits(hidden, torch.tensor([row for _, row in ready]), batch)
            draws = [(run.request.seed, len(run.completion.tokens)) for run, _ in ready]
            drawn = draw(logits, draws, self.deployment.temperature)
            logprobs = bk.selected_logprobs(logits, drawn)
            digests = row_digests(logits).tolist()
            for (run, _), token, logprob, digest in zip(ready, drawn.tolist(), logprobs, digests, strict=True):
                run.tokens.append(token)
                run.completion.tokens.append(token)
                run.completion.logprobs.append(logprob)
                run.completion.digests.append(digest)
                on_token()
                if len(run.completion.tokens) == run.request.max_tokens:
                    self.storage.release(run.tables)
                    running.remove(run)
                    self._finished += 1
        plan = self.plan
        plan.steps += 1
        plan.rows += batch.num_rows
        plan.mixed_steps += 0 < decodes < len(parts)
        plan.largest_decode = max(plan.largest_decode, decodes)
        plan.single_steps += len(parts) == 1


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
