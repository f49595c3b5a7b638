"""Expert parallelism over DeepEP's low-latency mode, with what its versions take for keyword arguments.

Tokens travel as bfloat16. DeepEP's own FP8 quantisation has other scales than the local path's (it rounds none up to a
power of two on Hopper, and multiplies where the specification divides), so it is never asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from bi_kernels.runtime.checks import check_tensor, check_value
from bi_kernels.runtime.errors import Blocker, ContractError

from .dispatch import DispatchedTokens, TransportError
from .transport_torch import TorchTransport

__all__ = ["DeepEPTransport"]

# What must be settable, because the default of some version would change bits or hide the result.
_NEEDED = {"low_latency_dispatch": ("use_fp8",), "low_latency_combine": ()}
_WANTED: dict[str, dict[str, Any]] = {
    "low_latency_dispatch": {"use_fp8": False, "async_finish": False, "return_recv_hook": False},
    # logfmt is lossy; zero copy wants the experts' result in the library's own buffer.
    "low_latency_combine": {
        "use_logfmt": False,
        "zero_copy": False,
        "async_finish": False,
        "return_recv_hook": False,
    },
}


class DeepEPTransport:
    """This process's end of an expert-parallel group over a DeepEP buffer; a :class:`Transport`.

    Args:
        buffer: ``deep_ep.Buffer`` with ``low_latency_mode=True``, for at least the capacity that is dispatched.
        numbers: The same ranks over ``torch.distributed``; carries whole numbers, never tokens.

    Raises:
        ContractError: The library's methods do not take what is needed, or torch fills new tensors by itself (with
            ``torch.use_deterministic_algorithms``): it does so on another stream than the library writes on, which
            has made NaN (DeepEP#589).

    Source: deepseek-ai/DeepEP ``Buffer.low_latency_dispatch`` and ``low_latency_combine``; vLLM
    ``prepare_finalize/deepep_ll.py``.

    Invariance:
        DeepEP places a token in any free row of its expert, which no expert's result depends on, and adds a token's
        rows in the order of its slots, fma in float32, rounded once: as :func:`combine_ordered` does.
    """

    def __init__(self, buffer: Any, numbers: TorchTransport) -> None:
        self.rank = numbers.rank
        self.world_size = numbers.world_size
        self._buffer = buffer
        self._numbers = numbers
        self._arguments = {name: _keywords(buffer, name) for name in _WANTED}
        filled = getattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        if torch.are_deterministic_algorithms_enabled() and filled:
            setting = "torch.utils.deterministic.fill_uninitialized_memory"
            blocker = Blocker(setting, "False beside DeepEP", "True", f"Set {setting} = False.")
            raise ContractError("this DeepEP cannot be used", [blocker])

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """See :meth:`TorchTransport.all_gather_ints`."""
        return self._numbers.all_gather_ints(values)

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int
    ) -> DispatchedTokens:
        """See :meth:`Transport.low_latency_dispatch`.

        Raises:
            ArgumentError: A dtype or shape does not fit, or there are more tokens than the capacity: the library would
                write past its buffer.
            TransportError: The library returned something else than bfloat16 tokens and their counts.
        """
        check_tensor("x", x, dtype=torch.bfloat16, shape=("num_tokens", "hidden"), contiguous=True)
        check_tensor("topk_idx", topk_idx, dtype=(torch.int32, torch.int64), shape=(x.shape[0], "top_k"))
        check_value(
            "num_tokens",
            x.shape[0] <= num_max_dispatch_tokens_per_rank,
            f"at most {num_max_dispatch_tokens_per_rank}",
            x.shape[0],
            "Use StagedDispatcher, which sends slices of the capacity.",
        )
        sent, ids = _not_empty(x, topk_idx.long())
        received, counts, handle, *_ = self._buffer.low_latency_dispatch(
            sent, ids, num_max_dispatch_tokens_per_rank, num_experts, **self._arguments["low_latency_dispatch"]
        )
        if not isinstance(received, torch.Tensor) or received.dtype != torch.bfloat16:
            found = "codes and scales" if isinstance(received, tuple) else str(received.dtype)
            raise TransportError(
                f"low_latency_dispatch: expected bfloat16 tokens, got {found}. The library quantised by itself, with "
                "other scales than the local path's: use a version that honours use_fp8=False."
            )
        return DispatchedTokens(received, counts.to(torch.int32), handle)

    def low_latency_combine(
        self, expert_out: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any
    ) -> torch.Tensor:
        """See :meth:`Transport.low_latency_combine`."""
        num_tokens = topk_idx.shape[0]
        weights, ids = _not_empty(topk_weights, topk_idx.long())
        combined, *_ = self._buffer.low_latency_combine(
            expert_out, ids, weights, handle, **self._arguments["low_latency_combine"]
        )
        result: torch.Tensor = combined[:num_tokens]
        return result


def _not_empty(rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row that goes nowhere in place of none: versions before DeepEP#374 stop at empty tensors."""
    if rows.shape[0]:
        return rows.contiguous(), ids.contiguous()
    return rows.new_zeros((1, rows.shape[1])), ids.new_full((1, ids.shape[1]), -1)


def _keywords(buffer: Any, name: str) -> dict[str, Any]:
    """Those of the wanted keyword arguments that this version of the method has."""
    method = getattr(buffer, name, None)
    parameters = inspect.signature(method).parameters if method is not None else {}
    missing = [argument for argument in _NEEDED[name] if argument not in parameters]
    if method is None or missing:
        found = "none" if method is None else f"one without {', '.join(missing)}"
        raise ContractError(
            "this DeepEP cannot be used",
            [Blocker(f"deep_ep.Buffer.{name}", "DeepEP's low-latency method", found, "Install DeepEP 1.2 or 2.x.")],
        )
    return {argument: value for argument, value in _WANTED[name].items() if argument in parameters}
