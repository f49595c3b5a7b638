"""Staged expert-parallel dispatch: slices of fixed capacity over a transport with DeepEP's low-latency shape.

Every rank runs the same number of slices, whatever it holds, so that no rank waits for a collective that another
never makes. Nothing that a token's result depends on is a function of the live batch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from bi_kernels.runtime.checks import check_tensor, check_value
from bi_kernels.runtime.errors import BatchInvarianceError, CapacityError

from .combine_ordered import combine_ordered
from .stage_tokens import stage_tokens

__all__ = [
    "DispatchedTokens",
    "InProcessTransport",
    "SlicePlan",
    "StagedDispatcher",
    "Transport",
    "TransportError",
    "plan_slices",
]

R = TypeVar("R")


class TransportError(BatchInvarianceError):
    """A collective failed, was not joined by every rank, or brought something that cannot be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """How the tokens of a padded batch bucket are cut. Build it with :func:`plan_slices`.

    Attributes:
        capacity: Tokens per slice and rank.
        num_slices: Slices that every rank runs.
    """

    capacity: int
    num_slices: int

    def bounds(self, num_tokens: int) -> list[tuple[int, int]]:
        """``(start, stop)`` of each slice of a rank with ``num_tokens`` tokens; later slices may be empty.

        Raises:
            CapacityError: The tokens do not fit ``num_slices`` slices.
        """
        if num_tokens > self.num_slices * self.capacity:
            raise CapacityError(
                f"num_tokens: expected at most {self.num_slices} slices of {self.capacity} tokens, got {num_tokens}. "
                "Plan the slices from the largest padded batch of any rank."
            )
        edges = [min(index * self.capacity, num_tokens) for index in range(self.num_slices + 1)]
        return list(itertools.pairwise(edges))


def plan_slices(bucket_tokens: int, *, capacity: int) -> SlicePlan:
    """Slices for a padded batch bucket.

    Args:
        bucket_tokens: Tokens of the bucket, the same on every rank. Never the live number of tokens, which differs
            between ranks and moves from step to step.
        capacity: Tokens per slice and rank, the same on every rank.

    Raises:
        ArgumentError: ``bucket_tokens`` is negative or ``capacity`` is not positive.
    """
    check_value("bucket_tokens", bucket_tokens >= 0, "not negative", bucket_tokens, "Use the padded batch size.")
    check_value("capacity", capacity >= 1, "a positive number", capacity, "Use ExpertCapacity.tokens_per_rank.")
    return SlicePlan(capacity=capacity, num_slices=-(-bucket_tokens // capacity))


class DispatchedTokens(NamedTuple):
    """What a rank receives in one slice.

    Attributes:
        x: ``(num_local_experts, world_size * capacity, hidden)``, bfloat16: tokens of all ranks for this rank's
            experts, masked layout.
        counts: ``(num_local_experts,)``, int32: rows of each expert that are tokens.
        handle: The transport's own record, for the combine of the same slice.
    """

    x: torch.Tensor
    counts: torch.Tensor
    handle: Any


class Transport(Protocol):
    """One rank's end of an expert-parallel group; the shape of DeepEP's low-latency mode.

    Every method is a collective: all ranks call it, the same number of times, in the same order. Expert ``e`` lives
    on rank ``e // (num_experts / world_size)``.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Ranks of the group."""

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's ``values``, by rank. Ranks may bring different lengths."""

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int
    ) -> DispatchedTokens:
        """Send each of at most ``num_max_dispatch_tokens_per_rank`` tokens to the ranks of its experts, as bfloat16.

        Args:
            x: ``(num_tokens, hidden)``, bfloat16. ``num_tokens`` may be 0.
            topk_idx: ``(num_tokens, top_k)``, int32 or int64; -1 is not routed.
            num_max_dispatch_tokens_per_rank: Capacity, the same on every rank.
            num_experts: Experts of the whole group.
        """

    def low_latency_combine(
        self, expert_out: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any
    ) -> torch.Tensor:
        """Bring the experts' rows back and add them as :func:`bi_moe_deepep.combine_ordered` does.

        Args:
            expert_out: ``(num_local_experts, world_size * capacity, hidden)``, bfloat16, rows as dispatched.
            topk_idx: As given to the dispatch.
            topk_weights: ``(num_tokens, top_k)``, float32.
            handle: From the dispatch.

        Returns:
            ``(num_tokens, hidden)``, bfloat16.
        """


class InProcessTransport:
    """Simulated ranks in one process: :meth:`run` gives every rank a thread and its own :class:`Transport`.

    Rank 0 has the caller's thread; the others keep theirs for the next run. Only one rank computes at a time; the turn
    passes where a rank waits for the others. So the threads neither compete for cores nor have an order that could
    show in a result, and nobody can wait for ever: when all that are left wait, a rank has ended early, and that is an
    error.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        check_value("world_size", world_size >= 1, "a positive number", world_size, "Pass the number of ranks.")
        self.world_size = world_size
        self._turn = threading.Condition()
        self._threads = ThreadPoolExecutor(max(1, world_size - 1), thread_name_prefix="rank")
        self._reset()

    def run(self, program: Callable[[Transport], R]) -> list[R]:
        """Run ``program`` once per rank and return the results by rank.

        Args:
            program: Called with the rank's transport.

        Raises:
            TransportError: A rank ended while others waited for it in a collective.
            BaseException: What ``program`` raised, on the lowest rank where that is not the consequence of another's.
        """
        results: list[Any] = [None] * self.world_size
        errors: dict[int, BaseException] = {}
        # torch keeps these per thread. On another stream a rank would race with the caller's.
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def work(rank: int) -> None:
            with self._turn, torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.cuda.stream(stream):
                try:
                    results[rank] = program(_Endpoint(self, rank))
                except BaseException as error:  # carried to the caller's thread
                    errors[rank] = error
                finally:
                    self._left.add(rank)
                    self._turn.notify_all()

        others = [self._threads.submit(work, rank) for rank in range(1, self.world_size)]
        work(0)
        wait(others)
        self._reset()  # no rank's tensors outlive the call
        if errors:
            # A rank that fails leaves the others waiting: their TransportError is a consequence, not the cause.
            raise min(errors.items(), key=lambda item: (isinstance(item[1], TransportError), item[0]))[1]
        return results

    def _reset(self) -> None:
        self._posted: dict[int, Any] = {}
        self._gathered: list[Any] = []
        self._round = 0
        self._left: set[int] = set()
        self._early: list[int] = []

    def _all_gather(self, rank: int, call: str, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank; ``call`` says for which collective it is."""
        with self._turn:
            this_round = self._round
            self._posted[rank] = call, value
            if len(self._posted) == self.world_size:
                # No rank posts to the next round before it has returned from this one, so nothing is overwritten.
                self._gathered = [self._posted[r] for r in range(self.world_size)]
                self._posted = {}
                self._round += 1
                self._turn.notify_all()
            else:
                self._turn.wait_for(lambda: self._round != this_round or bool(self._left))
            if self._round == this_round:
                # Ranks that stop because of this one have ended too by then, but they are not to blame.
                self._early = self._early or sorted(self._left)
                raise TransportError(
                    f"collective: expected all {self.world_size} ranks, but rank "
                    f"{', '.join(map(str, self._early))} has ended. Every rank must make the same calls in the same "
                    "order, with no tokens too."
                )
            calls = [name for name, _ in self._gathered]
            if len(set(calls)) > 1:
                found = ", ".join(f"{name} on rank {r}" for r, name in enumerate(calls))
                raise TransportError(
                    f"collective: expected the same call on every rank, got {found}. Every rank must make the same "
                    "calls in the same order."
                )
            return [value for _, value in self._gathered]


@dataclass(frozen=True, slots=True)
class _Handle:
    """Placement of one slice: this rank's staged rows of all ranks' tokens, and which tokens are its own."""

    slots: torch.Tensor
    own: slice


class _Endpoint:
    """One simulated rank's :class:`Transport`."""

    def __init__(self, group: InProcessTransport, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.world_size = group.world_size

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        return self._group._all_gather(self.rank, "all_gather_ints", tuple(values))

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int
    ) -> DispatchedTokens:
        sent = self._group._all_gather(self.rank, "low_latency_dispatch", (x, topk_idx))
        num_local_experts = num_experts // self.world_size
        staged = stage_tokens(
            torch.cat([tokens for tokens, _ in sent]),
            torch.cat([ids for _, ids in sent]),
            num_experts=num_experts,
            capacity=self.world_size * num_max_dispatch_tokens_per_rank,
            first_expert=self.rank * num_local_experts,
            num_local_experts=num_local_experts,
        )
        start = sum(tokens.shape[0] for tokens, _ in sent[: self.rank])
        return DispatchedTokens(staged.x, staged.counts, _Handle(staged.slots, slice(start, start + x.shape[0])))

    def low_latency_combine(
        self, expert_out: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle
    ) -> torch.Tensor:
        returned = self._group._all_gather(self.rank, "low_latency_combine", (expert_out, handle.slots))
        # A slot is -1 on every rank but the one that has its expert.
        slots = torch.full(topk_idx.shape, -1, dtype=torch.int32, device=topk_idx.device)
        for rank, (rows, placed) in enumerate(returned):
            own = placed[handle.own]
            slots = torch.where(own >= 0, own + rank * rows.shape[0] * rows.shape[1], slots)
        return combine_ordered(torch.cat([rows for rows, _ in returned]), slots, topk_weights)


class StagedDispatcher:
    """Dispatch, experts and combine in slices of fixed capacity, on one rank of a group.

    Args:
        transport: This rank's end of the group.
        num_experts: Experts of the whole group, a multiple of its ranks.
        capacity: Tokens per slice and rank (:attr:`ExpertCapacity.tokens_per_rank`), equal on every rank.
        num_slices: Slices of every call (:func:`plan_slices` of the padded batch bucket), equal on every rank.
        verify: Look at the data: experts exist, and the received counts are what the ranks sent. That reads them on
            the host and costs a collective per slice; switch it off where the host must not wait, as under CUDA graph
            capture.

    Raises:
        ArgumentError: A number is out of range, or the experts do not divide among the ranks.
    """

    def __init__(
        self, transport: Transport, *, num_experts: int, capacity: int, num_slices: int, verify: bool = True
    ) -> None:
        check_value(
            "num_experts",
            num_experts >= 1 and num_experts % transport.world_size == 0,
            f"a multiple of {transport.world_size} ranks",
            num_experts,
            "Choose a number of ranks that divides the experts.",
        )
        check_value("capacity", capacity >= 1, "a positive number", capacity, "Use ExpertCapacity.tokens_per_rank.")
        check_value("num_slices", num_slices >= 0, "not negative", num_slices, "Use plan_slices.")
        self._transport = transport
        self._num_experts = num_experts
        self._plan = SlicePlan(capacity=capacity, num_slices=num_slices)
        self._verify = verify
        self._agreed = False

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        shared_experts: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One expert layer. A collective: every rank of the group calls it, with no tokens too.

        Args:
            x: ``(num_tokens, hidden)``, bfloat16: this rank's tokens.
            topk_ids: ``(num_tokens, top_k)``, int32 or int64; -1 is not routed.
            topk_weights: ``(num_tokens, top_k)``, float32.
            experts: This rank's routed experts, called once per slice with ``(num_local_experts, world_size *
                capacity, hidden)`` tokens and ``(num_local_experts,)`` counts; returns the tokens' shape in bfloat16
                (:func:`bi_moe_deepep.expert_mlp`).
            shared_experts: Called exactly once, with the whole of ``x``.

        Returns:
            ``(routed, shared)``: ``(num_tokens, hidden)`` bfloat16, and what ``shared_experts`` returned or None.

        Raises:
            ArgumentError: A dtype, shape or device does not fit, or an expert does not exist. This rank has then
                joined no collective of this call, and the others learn it from their transport. Also: the transport
                or ``experts`` returned another dtype or shape than asked for.
            CapacityError: The tokens do not fit the slices (as above), or the ranks disagree about capacity, slices or
                shapes, found before the first dispatch, on every rank.
            TransportError: The received counts are not what the ranks sent, found on every rank.

        Source: the seam is ``vllm...fused_moe.modular_kernel.FusedMoEKernelModularImpl.apply``.

        Invariance:
            Row ``i`` of both results depends on row ``i`` of the arguments and on the weights alone, bit for bit, if
            ``experts`` and ``shared_experts`` are row-invariant: not on capacity, on the number of slices, on the
            ranks, nor on what other ranks hold. ``experts`` sees one shape only, whatever the number of tokens.
        """
        check_tensor("x", x, dtype=torch.bfloat16, shape=("num_tokens", "hidden"))
        shape = (x.shape[0], "top_k")
        check_tensor("topk_ids", topk_ids, dtype=(torch.int32, torch.int64), shape=shape, device=x.device)
        check_tensor("topk_weights", topk_weights, dtype=torch.float32, shape=tuple(topk_ids.shape), device=x.device)
        if self._verify and topk_ids.numel():
            low, high = int(topk_ids.min()), int(topk_ids.max())
            check_value(
                "topk_ids",
                low >= -1 and high < self._num_experts,
                f"-1 or an expert below {self._num_experts}",
                f"{low}..{high}",
                "Pass the router's choice for the same number of experts.",
            )
        bounds = self._plan.bounds(x.shape[0])
        self._agree(x.shape[1], topk_ids.shape[1])
        shared = shared_experts(x) if shared_experts is not None else None
        routed = [
            self._run_slice(x[start:stop], topk_ids[start:stop], topk_weights[start:stop], experts)
            for start, stop in bounds
        ]
        return torch.cat([x[:0], *routed]), shared

    def _run_slice(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        received = self._transport.low_latency_dispatch(x, topk_ids, self._plan.capacity, self._num_experts)
        num_local_experts = self._num_experts // self._transport.world_size
        rows = self._transport.world_size * self._plan.capacity
        # FP8 with scales of the library's own rounding would be other inputs than the local path's: bfloat16 only.
        check_tensor("received x", received.x, dtype=torch.bfloat16, shape=(num_local_experts, rows, x.shape[1]))
        check_tensor("received counts", received.counts, dtype=torch.int32, shape=(num_local_experts,))
        if self._verify:
            self._check_counts(topk_ids, received.counts)
        expert_out = experts(received.x, received.counts)
        check_tensor("experts' result", expert_out, dtype=torch.bfloat16, shape=tuple(received.x.shape))
        return self._transport.low_latency_combine(expert_out, topk_ids, topk_weights, received.handle)

    def _agree(self, hidden: int, top_k: int) -> None:
        """Compare the ranks' constants once: libraries do not, and hang or mix up tokens where they differ."""
        if self._agreed:
            return
        ours = {
            "capacity": self._plan.capacity,
            "num_slices": self._plan.num_slices,
            "num_experts": self._num_experts,
            "hidden": hidden,
            "top_k": top_k,
            "verify": int(self._verify),
        }
        ranks = self._transport.all_gather_ints(list(ours.values()))
        different = [
            f"{name} {', '.join(f'{value} on rank {rank}' for rank, value in enumerate(values))}"
            for name, values in zip(ours, zip(*ranks, strict=True), strict=True)
            if len(set(values)) > 1
        ]
        if different:
            raise CapacityError(
                f"dispatch: expected the same constants on every rank, got {'; '.join(different)}. Nothing was "
                "dispatched. Derive them from the model and the deployment with ExpertCapacity.from_model and "
                "plan_slices."
            )
        self._agreed = True

    def _check_counts(self, topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
        """Every rank compares what all ranks sent with what all ranks received, so that all of them stop."""
        routed = topk_ids[topk_ids >= 0].long()
        sent = torch.bincount(routed, minlength=self._num_experts).tolist()
        ranks = self._transport.all_gather_ints([*sent, *counts.tolist()])
        expected = [sum(rank[expert] for rank in ranks) for expert in range(self._num_experts)]
        received = [count for rank in ranks for count in rank[self._num_experts :]]
        for expert, (want, have) in enumerate(zip(expected, received, strict=True)):
            if want != have:
                owner = expert // (self._num_experts // self._transport.world_size)
                raise TransportError(
                    f"received counts: expected {want} tokens for expert {expert} on rank {owner}, got {have}. "
                    "Nothing was computed from them. The transport lost or invented tokens: check its version."
                )
