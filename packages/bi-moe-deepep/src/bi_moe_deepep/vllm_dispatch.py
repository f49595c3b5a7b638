"""Staged expert parallelism in vLLM: dispatch, experts and combine in slices of a fixed capacity.

Imported only after vLLM has imported the module that is edited.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from bi_kernels.runtime.checks import check_value
from bi_kernels.runtime.errors import Blocker, HookError

from .capacity import ExpertCapacity
from .dispatch import StagedDispatcher, Transport, plan_slices
from .transport_deepep import DeepEPTransport
from .transport_torch import TorchTransport
from .vllm_experts import STAGED, TRANSPORT

__all__ = ["Staging", "make_fp8_prepare_finalize", "make_mxfp4_prepare_finalize", "staged_apply"]

# Tokens per rank and slice. Room for them is kept on every expert of every rank, whatever the routing: at 256 and two
# ranks, 0.5 GiB for the tokens of DeepSeek-V4-Flash.
_TOKENS_PER_SLICE = 256
# Seconds until a rank counts as gone. In its first step one that compiles its kernels is late by tens of seconds.
_TIMEOUT = 300.0

Function = Callable[..., Any]


class Staging:
    """What a layer needs to run its slices: the transport, and constants that are equal on every rank.

    Args:
        transport: This rank's end of the expert-parallel group.
        capacity: Sizes of the masked layout.
    """

    def __init__(self, transport: Transport, capacity: ExpertCapacity) -> None:
        self.transport = transport
        self.capacity = capacity
        self._dispatchers: dict[int, StagedDispatcher] = {}

    def dispatcher(self, bucket_tokens: int, *, capturing: bool) -> StagedDispatcher:
        """The dispatcher for a batch bucket, which is equal on every rank.

        The first one for a number of slices compares the ranks' constants and looks at what arrives. Later ones, and
        those under graph capture, do not make the host wait.
        """
        slices = max(1, plan_slices(bucket_tokens, capacity=self.capacity.tokens_per_rank).num_slices)
        first = slices not in self._dispatchers
        if first:
            self._dispatchers[slices] = self._make(slices, verify=False)
            if not capturing:
                return self._make(slices, verify=True)
        return self._dispatchers[slices]

    def _make(self, num_slices: int, *, verify: bool) -> StagedDispatcher:
        return StagedDispatcher(
            self.transport,
            num_experts=self.capacity.num_experts,
            capacity=self.capacity.tokens_per_rank,
            num_slices=num_slices,
            verify=verify,
        )


def _not_staged() -> HookError:
    """For two methods that vLLM's base class wants and the staged ``apply`` never calls."""
    blocker = Blocker(
        "expert-parallel layer",
        "the staged FusedMoEKernelModularImpl.apply of bi-moe-deepep",
        "vLLM's own, which prepares and finalises by itself",
        "Remove the other plugin that edits it.",
    )
    return HookError("an expert layer went past the staged dispatch", [blocker])


def make_fp8_prepare_finalize(original: Function) -> Function:
    """``maybe_make_prepare_finalize``: staged for a DeepSeek-V4 with expert parallelism, vLLM's own otherwise.

    ``BI_EP_TRANSPORT=nccl`` takes the expert-parallel group's own NCCL communicator, ``deepep_low_latency`` DeepEP's
    buffer for the slices' capacity. Nothing else gets here: the experts' selection has refused it.

    Raises (the new function):
        ArgumentError: Experts are not in their natural order on the ranks.
        ContractError: DeepEP's methods do not take what is needed.

    Source: preview-pr.txt, *DeepEP low-latency dispatch is staged at fixed capacity*; vLLM ``all2all_utils.py``.
    """

    @functools.wraps(original)
    def maybe_make_prepare_finalize(moe: Any, quant_config: Any, routing_tables: Any = None, **others: Any) -> Any:
        if not getattr(moe, STAGED, False):
            return original(moe, quant_config, routing_tables, **others)
        for table in (routing_tables or ())[:2]:
            natural = torch.equal(table.cpu().long(), torch.arange(len(table), device="cpu"))
            check_value("expert placement", natural, "linear", "other", "Do not set an expert placement strategy.")
        from vllm.distributed import get_ep_group

        group = get_ep_group()
        capacity = ExpertCapacity.from_model(
            num_experts=moe.num_experts,
            top_k=moe.experts_per_token,
            max_tokens_per_rank=min(moe.max_num_tokens, _TOKENS_PER_SLICE),
            world_size=group.world_size,
        )
        if os.environ.get(TRANSPORT) == "nccl":
            transport: Transport = TorchTransport(
                group.device_group, control_group=group.cpu_group, timeout=_TIMEOUT, verify=False
            )
        else:
            numbers = TorchTransport(group.cpu_group, timeout=_TIMEOUT)
            transport = DeepEPTransport(_deepep_buffer(moe, capacity), numbers)
        return _prepare_finalize_class()(Staging(transport, capacity))

    return maybe_make_prepare_finalize


make_mxfp4_prepare_finalize = make_fp8_prepare_finalize
"""The same name in the FP4 oracle; FP4 experts of DeepSeek-V4 are refused before."""


def staged_apply(original: Function) -> Function:
    """``FusedMoEKernelModularImpl.apply``: slices where the layer was made for them, vLLM's own otherwise.

    Shared experts are not touched here: a kernel that cannot overlap them leaves them to the layer's runner, which
    launches them once, on all tokens.

    Raises (the new method, in a staged layer):
        ArgumentError: Router weights are to be applied on the input.
        CapacityError: The ranks' constants differ.
        TransportError: A rank is gone, or tokens were lost.

    Invariance:
        As :meth:`StagedDispatcher.run`.

    Source: preview-pr.txt, *empty ranks still join collectives*; vLLM ``modular_kernel.py``.
    """

    @functools.wraps(original)
    def apply(
        self: Any,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *arguments: Any,
        **keywords: Any,
    ) -> torch.Tensor:
        staging: Staging | None = getattr(self.prepare_finalize, "staging", None)
        if staging is None:
            result: torch.Tensor = original(self, hidden_states, w1, w2, topk_ids, topk_weights, *arguments, **keywords)
            return result
        names = ("activation", "global_num_experts", "expert_map", "apply_router_weight_on_input")
        given = dict(zip(names, arguments, strict=False)) | keywords
        on_input = given.get("apply_router_weight_on_input", False)
        check_value("apply_router_weight_on_input", not on_input, "False", on_input, "Leave it to the combine.")

        def experts(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata

            codes, scales = _quantise(x, self.fused_experts.quant_config)
            expert_out: torch.Tensor = self._fused_experts(
                in_dtype=x.dtype,
                a1q=codes,
                a1q_scale=scales,
                w1=w1,
                w2=w2,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                activation=given["activation"],
                global_num_experts=staging.capacity.num_experts,
                local_num_experts=w1.shape[0],
                expert_map=None,
                apply_router_weight_on_input=False,
                expert_tokens_meta=ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None),
            )
            return expert_out

        capturing = hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()
        dispatcher = staging.dispatcher(_bucket_tokens(hidden_states), capturing=capturing)
        routed, _ = dispatcher.run(
            hidden_states.contiguous(), topk_ids.contiguous(), topk_weights.float().contiguous(), experts=experts
        )
        return routed

    return apply


def _quantise(x: torch.Tensor, quant_config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of ``(E, T, H)`` tokens, by the quantiser of every other path. Rows past the counts too."""
    from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input, normalize_batched_scales_shape

    codes, scales = moe_kernel_quantize_input(
        x.flatten(0, 1), None, quant_config.quant_dtype, quant_config.per_act_token_quant, quant_config.block_shape
    )
    return codes.view(x.shape), normalize_batched_scales_shape(scales, x.shape[0])


def _bucket_tokens(hidden_states: torch.Tensor) -> int:
    """Tokens of the largest rank, as every rank knows them from the step's own agreement."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    if metadata is None:
        return int(hidden_states.shape[0])
    return int(metadata.num_tokens_across_dp_cpu.max())


def _deepep_buffer(moe: Any, capacity: ExpertCapacity) -> Any:
    """DeepEP's buffer as vLLM makes it, but for the capacity of a slice."""
    from vllm.model_executor.layers.fused_moe.all2all_utils import get_ep_all2all_manager

    return get_ep_all2all_manager().get_handle(
        {
            "max_num_tokens_per_dp_rank": capacity.tokens_per_rank,
            "token_hidden_size": moe.hidden_dim,
            "num_ep_ranks": capacity.world_size,
            "num_global_experts": capacity.num_experts,
            "num_local_experts": capacity.num_local_experts,
        }
    )


@functools.cache
def _prepare_finalize_class() -> type[Any]:
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    class StagedPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
        """Says how the layer is fed. The work is done by the patched ``apply``, slice by slice."""

        def __init__(self, staging: Staging) -> None:
            super().__init__()
            self.staging = staging

        @property
        def activation_format(self) -> Any:
            return mk.FusedMoEActivationFormat.BatchedExperts

        def topk_indices_dtype(self) -> torch.dtype | None:
            return None

        def max_num_tokens_per_rank(self) -> int:
            return self.staging.capacity.tokens_per_rank

        def num_dispatchers(self) -> int:
            return self.staging.capacity.world_size

        def output_is_reduced(self) -> bool:
            return True

        def supports_async(self) -> bool:
            return False  # so that the runner launches the shared experts, once

        def prepare(self, *arguments: Any, **keywords: Any) -> Any:
            raise _not_staged()

        def finalize(self, *arguments: Any, **keywords: Any) -> None:
            raise _not_staged()

    return StagedPrepareAndFinalize
