"""Expert parallelism over ``torch.distributed``: for machines without DeepEP, and for tests with real processes.

One collective brings a slice's tokens to every rank, one brings the experts' rows back to the tokens' owners. Both
have one size for given constants, so the bytes on the wire do not follow the routing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from bi_kernels.runtime.checks import check_tensor, check_value
from bi_kernels.runtime.errors import CapacityError

from .combine_ordered import combine_ordered
from .dispatch import DispatchedTokens, TransportError
from .stage_tokens import StagedTokens, stage_tokens

__all__ = ["TorchTransport"]

_CALLS = ("all_gather_ints", "low_latency_dispatch", "low_latency_combine")
# Its name since torch 2.13, where the old one warns.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_ALIGN = 16  # bytes; rows of a message start where a kernel may load vectors


@dataclass(frozen=True, slots=True)
class _Handle:
    """One slice: where every rank's tokens were staged here, and the constants it was dispatched with."""

    slots: torch.Tensor
    capacity: int
    num_local_experts: int


class TorchTransport:
    """This process's end of an expert-parallel group over ``torch.distributed``; a :class:`Transport`.

    NCCL moves CUDA tensors, gloo CPU tensors: whatever ``group`` has for the tensors' device. Whole numbers always
    travel over CPU tensors, so that a rank that is late or gone is noticed by the host, before a kernel waits for it.

    Args:
        group: Ranks of the expert-parallel group; None means all.
        control_group: The same ranks in the same order with a backend for CPU tensors; None means ``group``, which
            then needs one (``init_process_group("cpu:gloo,cuda:nccl")``).
        timeout: Seconds that the host waits for the other ranks, at most. What NCCL has queued on a GPU is under the
            timeout of ``group`` instead.
        verify: Announce each dispatch and combine and compare the ranks' numbers on the host before data moves.
            Equal on every rank. Switch it off where the host must not wait, as under CUDA graph capture; the constants
            must have been compared before then (:class:`StagedDispatcher` does).

    Raises:
        ArgumentError: ``timeout`` is not positive, or no backend can carry the numbers.

    Source: the call shape is DeepEP's low-latency mode; ``BI_EP_TRANSPORT=nccl`` asks for it in vLLM.

    Invariance:
        Tokens are staged by rank, then by token. A token's expert rows return to it unrounded and unsummed, and
        :func:`combine_ordered` adds them, so the number of ranks cannot show in a bit.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        control_group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        verify: bool = True,
    ) -> None:
        check_value("timeout", timeout > 0, "a positive number of seconds", timeout, "Wait for the slowest rank.")
        control = control_group if control_group is not None else group
        backends = dist.get_backend_config(control)
        check_value(
            "control_group",
            "cpu:" in backends,
            "a backend for CPU tensors",
            backends,
            'Pass a gloo group of the same ranks, or initialise with "cpu:gloo,cuda:nccl".',
        )
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        same_ranks = control is group or dist.get_process_group_ranks(control) == dist.get_process_group_ranks(group)
        check_value(
            "control_group", same_ranks, "the ranks of group in their order", control, "Make it of these ranks."
        )
        self._group = group
        self._control = control
        self._timeout = timeout
        self._verify = verify
        self._broken: str | None = None

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's ``values``, by rank; the host waits for them.

        Raises:
            TransportError: A rank is gone, late, or makes another call.
        """
        lengths = self._announce("all_gather_ints", len(values))
        mine = torch.zeros(max(length for (length,) in lengths), dtype=torch.int64, device="cpu")
        mine[: len(values)] = torch.tensor(values, dtype=torch.int64, device="cpu")
        return [
            tuple(row[:length]) for row, (length,) in zip(self._gather("all_gather_ints", mine), lengths, strict=True)
        ]

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int
    ) -> DispatchedTokens:
        """See :meth:`Transport.low_latency_dispatch`. Sends ``capacity`` rows to every rank, however few are tokens.

        Raises:
            ArgumentError: A dtype, shape or device does not fit, or the experts do not divide among the ranks. On the
                CPU also: an expert does not exist.
            CapacityError: A rank has more tokens than the capacity, or the ranks' constants differ; with ``verify``
                found on every rank.
            TransportError: A rank is gone, late, or makes another call.
        """
        check_tensor("x", x, dtype=torch.bfloat16, shape=("num_tokens", "hidden"))
        shape = (x.shape[0], "top_k")
        check_tensor("topk_idx", topk_idx, dtype=(torch.int32, torch.int64), shape=shape, device=x.device)
        divides = num_experts >= 1 and num_experts % self.world_size == 0
        check_value(
            "num_experts", divides, f"a multiple of {self.world_size} ranks", num_experts, "Choose fitting ranks."
        )
        capacity, (num_tokens, hidden), top_k = num_max_dispatch_tokens_per_rank, x.shape, topk_idx.shape[1]
        check_value("capacity", capacity >= 1, "a positive number", capacity, "Use ExpertCapacity.tokens_per_rank.")
        self._compare(num_tokens, capacity, num_experts, hidden, top_k)

        # A row is a token and its experts, so that one collective carries both.
        width, ids_width = _round_up(2 * hidden), _round_up(4 * top_k)
        sent = torch.empty((capacity, width + ids_width), dtype=torch.uint8, device=x.device)
        sent[:num_tokens, : 2 * hidden] = x.detach().contiguous().view(torch.uint8)
        ids = sent[:, width : width + 4 * top_k].view(torch.int32)
        ids[:num_tokens] = topk_idx
        ids[num_tokens:] = -1
        received = sent.new_empty((self.world_size * capacity, width + ids_width))
        self._wait("low_latency_dispatch", x.is_cuda, lambda: _all_gather(received, sent, self._group, True))

        num_local_experts, rows = num_experts // self.world_size, self.world_size * capacity
        staged = stage_tokens(
            received[:, : 2 * hidden].view(torch.bfloat16),
            received[:, width : width + 4 * top_k].view(torch.int32),
            num_experts=num_experts,
            capacity=rows,
            first_expert=self.rank * num_local_experts,
            num_local_experts=num_local_experts,
            # Rows past the counts stay as they are: clearing them would take longer than staging.
            out=StagedTokens(
                x.new_empty((num_local_experts, rows, hidden)),
                torch.empty(num_local_experts, dtype=torch.int32, device=x.device),
                torch.empty((rows, top_k), dtype=torch.int32, device=x.device),
            ),
        )
        return DispatchedTokens(staged.x, staged.counts, _Handle(staged.slots, capacity, num_local_experts))

    def low_latency_combine(
        self, expert_out: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: _Handle
    ) -> torch.Tensor:
        """See :meth:`Transport.low_latency_combine`. Sends a row per token and slot to every rank, local or not.

        Raises:
            ArgumentError: A dtype, shape or device does not fit what was dispatched.
            TransportError: A rank is gone, late, or makes another call.
        """
        rows, hidden = self.world_size * handle.capacity, expert_out.shape[-1]
        check_tensor("expert_out", expert_out, dtype=torch.bfloat16, shape=(handle.num_local_experts, rows, "hidden"))
        top_k = handle.slots.shape[1]
        check_tensor("topk_idx", topk_idx, shape=("num_tokens", top_k), device=expert_out.device)
        check_tensor("topk_weights", topk_weights, dtype=torch.float32, shape=tuple(topk_idx.shape))
        if self._verify:
            self._announce("low_latency_combine", top_k)

        # Slots whose expert lives elsewhere send some row that nobody reads: a fixed size leaves no better choice.
        index = handle.slots.clamp(min=0).flatten()
        sent = expert_out.detach().flatten(0, 1).index_select(0, index)
        received = torch.empty_like(sent)
        self._wait(
            "low_latency_combine",
            sent.is_cuda,
            lambda: dist.all_to_all_single(
                received.view(torch.uint8), sent.view(torch.uint8), group=self._group, async_op=True
            ),
        )
        # Rank r sent row t * top_k + i for slot i of token t; the one of the expert's rank counts.
        per_rank = handle.capacity * top_k
        place = torch.arange(topk_idx.numel(), device=topk_idx.device).view(topk_idx.shape)
        owner = torch.div(topk_idx, handle.num_local_experts, rounding_mode="floor")
        slots = torch.where(topk_idx >= 0, owner * per_rank + place, -1).to(torch.int32)
        return combine_ordered(received.view(self.world_size, per_rank, hidden), slots, topk_weights)

    def _compare(self, num_tokens: int, capacity: int, num_experts: int, hidden: int, top_k: int) -> None:
        """Refuse what does not fit before data moves; with ``verify``, on every rank and for every rank's numbers."""
        ours = {"capacity": capacity, "num_experts": num_experts, "hidden": hidden, "top_k": top_k}
        ranks = [(num_tokens, *ours.values())]
        if self._verify:
            ranks = self._announce("low_latency_dispatch", *ranks[0])
        different = [
            f"{name} {', '.join(f'{value} on rank {rank}' for rank, value in enumerate(values))}"
            for name, values in zip(ours, list(zip(*ranks, strict=True))[1:], strict=True)
            if len(set(values)) > 1
        ]
        if different:
            raise CapacityError(
                f"dispatch: expected the same constants on every rank, got {'; '.join(different)}. Nothing was "
                "dispatched. Derive them from the model and the deployment with ExpertCapacity.from_model."
            )
        for rank, (tokens, *_) in enumerate(ranks):
            if tokens > capacity:
                raise CapacityError(
                    f"num_tokens: expected at most the capacity of {capacity}, got {tokens} on rank "
                    f"{rank if self._verify else self.rank}. Nothing was dispatched. Use StagedDispatcher, which "
                    "sends slices of the capacity."
                )

    def _announce(self, call: str, *numbers: int) -> list[tuple[int, ...]]:
        """Every rank's ``numbers``, by rank, once all ranks make the same call."""
        mine = torch.zeros(1 + 5, dtype=torch.int64, device="cpu")
        mine[: 1 + len(numbers)] = torch.tensor([_CALLS.index(call), *numbers], device="cpu")
        ranks = self._gather(call, mine)
        calls = [_CALLS[code] if 0 <= code < len(_CALLS) else f"call {code}" for code, *_ in ranks]
        if len(set(calls)) > 1:
            found = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(calls))
            self._fail(
                f"collective: expected the same call on every rank, got {found}. Every rank must make the same calls "
                "in the same order."
            )
        return [tuple(row[1 : 1 + len(numbers)]) for row in ranks]

    def _gather(self, call: str, mine: torch.Tensor) -> list[list[int]]:
        """A host tensor of every rank, by rank."""
        everyone = torch.empty((self.world_size, mine.numel()), dtype=torch.int64, device="cpu")
        self._wait(call, False, lambda: _all_gather(everyone.flatten(), mine, self._control, True))
        found: list[list[int]] = everyone.tolist()
        return found

    def _wait(self, call: str, on_gpu: bool, start: Callable[[], dist.Work | None]) -> None:
        """Start a collective and wait for it: the current stream for CUDA tensors, the host for others."""
        if self._broken is not None:
            raise TransportError(f"{call}: the group failed before ({self._broken}) Make a new group.")
        try:
            work = start()
            if work is not None and on_gpu:
                work.wait()  # with a timeout the host would wait too
            elif work is not None:
                work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            self._fail(
                f"{call}: expected all {self.world_size} ranks within {self._timeout:g} s, got {error} on rank "
                f"{self.rank}. Every rank must make the same calls in the same order, with no tokens too; see whether "
                "one has died.",
                error,
            )

    def _fail(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Raise, and for good: the ranks are no longer at the same point, so nothing more may come from this group."""
        self._broken = reason
        raise TransportError(reason) from cause


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
