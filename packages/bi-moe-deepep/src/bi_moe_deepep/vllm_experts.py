"""DeepSeek-V4's experts in vLLM: DeepGEMM with constants of the deployment, or a refusal that says why.

Imported only after vLLM has imported the module that is edited.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bi_kernels import Arch, detect_arch, fused_silu_mul_per_token_group_quant
from bi_kernels.runtime.checks import check_value
from bi_kernels.runtime.errors import Blocker, ContractError, UnsupportedArchError
from bi_kernels.vllm_experts import batched_apply, check_router_weights, clamp_limit, deep_gemm_scale_format

from .combine_ordered import combine_ordered
from .deep_gemm_proof import DeepGemmShapes, load_products, prove_deep_gemm
from .fp8_gemm import m_grouped_fp8_gemm_nt_offsets
from .pack_tokens import PackedTokens, pack_tokens
from .vllm_model import is_deepseek_v4

__all__ = ["PACKED_TOKENS", "STAGED", "TRANSPORT", "expert_classes", "select_fp8_backend", "select_mxfp4_backend"]

PACKED_TOKENS = 2304
"""Up to this many tokens the experts on this rank have no padding rows. Reading weights takes longest there, and
filling each expert to 128 rows adds to that; where most experts have more than 64 rows, the weights are read twice and
DeepGEMM's larger tiles win. Which side a batch is on cannot be seen in its bits: :func:`prove_deep_gemm` has compared
the two."""
TRANSPORT = "BI_EP_TRANSPORT"
STAGED = "bi_moe_deepep_staged"
"""Attribute of a ``FusedMoEConfig`` whose layer has staged experts. A reload makes the layer's kernel again at a time
when vLLM has no current configuration, and nothing else would say then that the model is a DeepSeek-V4."""
_TRANSPORTS = (("", "deepep_low_latency"), ("nccl", "allgather_reducescatter"))  # the user names one, never both
_ROWS = 128  # of one block in DeepGEMM's contiguous layout
_MODULE = "vllm.model_executor.layers.fused_moe"

Function = Callable[..., Any]


class Operands(NamedTuple):
    """What the experts of one layer are called with: quantised tokens, their choice, weights with scales, memory."""

    output: torch.Tensor
    q: torch.Tensor
    s: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    w1: torch.Tensor
    s1: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor
    limit: float | None
    workspace13: torch.Tensor
    workspace2: torch.Tensor


def select_fp8_backend(original: Function) -> Function:
    """``select_fp8_moe_backend``: DeepGEMM for DeepSeek-V4, vLLM's choice for every other model.

    Raises (the new function, for DeepSeek-V4):
        ContractError: Lists everything that stands against DeepGEMM: settings, what vLLM's own class says, and the
            bitwise proof of the library on this model's shapes, which runs here, once per shape.

    Source: preview-pr.txt, *MoE backend selection requires a batch-invariant implementation*; vLLM ``oracle/fp8.py``.
    """

    @functools.wraps(original)
    def select_fp8_moe_backend(
        config: Any, weight_key: Any, activation_key: Any, allow_vllm_cutlass: bool = False
    ) -> tuple[Any, Any]:
        if not is_deepseek_v4():
            return original(config, weight_key, activation_key, allow_vllm_cutlass)  # type: ignore[no-any-return]
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
        from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

        blockers = _setting_blockers(config)
        contiguous, batched = expert_classes()
        staged = config.moe_parallel_config.use_all2all_kernels
        cls = batched if staged else contiguous
        wanted = FusedMoEActivationFormat.BatchedExperts if staged else FusedMoEActivationFormat.Standard
        supported, reason = cls.is_supported_config(cls, config, weight_key, activation_key, wanted)
        if not supported:
            blockers.append(_blocker("DeepGEMM experts", "a layer that they take", str(reason), "Use FP8 experts."))
        if not blockers:
            blockers += _proof(config.hidden_dim, config.intermediate_size_per_partition)
        if blockers:
            raise ContractError("the experts of DeepSeek-V4 cannot be batch-invariant here", blockers)
        setattr(config, STAGED, staged)
        return (Fp8MoeBackend.BATCHED_DEEPGEMM if staged else Fp8MoeBackend.DEEPGEMM), cls

    return select_fp8_moe_backend


def select_mxfp4_backend(original: Function) -> Function:
    """``select_deepseek_v4_mxfp4_moe_backend``: refused for DeepSeek-V4, vLLM's choice for every other model.

    Raises (the new function, for DeepSeek-V4):
        UnsupportedArchError: Always.

    Source: design.md, *Refused for now*.
    """

    @functools.wraps(original)
    def select_deepseek_v4_mxfp4_moe_backend(config: Any) -> Any:
        if not is_deepseek_v4():
            return original(config)
        raise UnsupportedArchError(
            "FP4 experts: expected expert_dtype fp8, got fp4. DeepGEMM has no FP4 kernel on Hopper, Marlin and Humming "
            "are other arithmetic than a trainer's, and on Blackwell nothing here has been validated. Use a checkpoint "
            "with FP8 experts on Hopper."
        )

    return select_deepseek_v4_mxfp4_moe_backend


@functools.cache
def expert_classes() -> tuple[type[Any], type[Any]]:
    """Batch-invariant subclasses of vLLM's contiguous and batched DeepGEMM experts."""
    from vllm.model_executor.layers.fused_moe.deep_gemm_utils import (
        compute_aligned_M_and_alignment,
        deepgemm_moe_permute,
    )
    from vllm.model_executor.layers.fused_moe.experts.batched_deep_gemm_moe import BatchedDeepGemmExperts
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
    from vllm.model_executor.layers.fused_moe.utils import _resize_cache
    from vllm.utils.deep_gemm import m_grouped_fp8_gemm_nt_contiguous, mk_alignment_scope

    def packed(of: Operands) -> None:
        """A row per routed slot and no others. What is not in a workspace is small."""
        experts, wide, hidden = of.w1.shape
        rows, fp8 = of.topk_ids.numel(), of.workspace13.view(dtype=of.q.dtype)
        packed_q = _resize_cache(fp8, (rows, hidden))
        memory = PackedTokens.empty(of.q, of.topk_ids, num_experts=experts, packed_q=packed_q)
        packed = pack_tokens(of.q, of.s, of.topk_ids, num_experts=experts, out=memory)
        gate_up = _resize_cache(of.workspace2, (rows, wide))
        m_grouped_fp8_gemm_nt_offsets(packed.q, packed.s, of.w1, of.s1, packed.offsets, out=gate_up)
        quantised, scales = fused_silu_mul_per_token_group_quant(
            gate_up,
            m_indices=packed.m_indices,
            clamp_limit=of.limit,
            scale_format=deep_gemm_scale_format(gate_up.device),
            out_q=_resize_cache(fp8, (rows, wide // 2)),
        )
        expert_out = _resize_cache(of.workspace2, (rows, hidden))
        m_grouped_fp8_gemm_nt_offsets(quantised, scales, of.w2, of.s2, packed.offsets, out=expert_out)
        combine_ordered(expert_out.unsqueeze(0), packed.slots, of.topk_weights, out=of.output)

    def contiguous(of: Operands, expert_tokens_meta: Any) -> None:
        """DeepGEMM's layout. Rows that are nobody's are not activated, quantised or added."""
        experts, wide, hidden = of.w1.shape
        fp8 = of.workspace13.view(dtype=of.q.dtype)
        with mk_alignment_scope(_ROWS):
            rows, _ = compute_aligned_M_and_alignment(
                M=of.topk_ids.size(0),
                num_topk=of.topk_ids.size(1),
                local_num_experts=experts,
                alignment=_ROWS,
                expert_tokens_meta=expert_tokens_meta,
            )
            q, s, owners, places, alignment = deepgemm_moe_permute(
                aq=of.q,
                aq_scale=of.s,
                topk_ids=of.topk_ids,
                local_num_experts=experts,
                expert_map=None,
                expert_tokens_meta=expert_tokens_meta,
                aq_out=_resize_cache(fp8, (rows, hidden)),
            )
            check_value("alignment", alignment == _ROWS, f"{_ROWS} rows", alignment, "Do not change DeepGEMM's.")
            gate_up = _resize_cache(of.workspace2, (rows, wide))
            m_grouped_fp8_gemm_nt_contiguous((q, s), (of.w1, of.s1), gate_up, owners)

            scales = torch.empty((wide // 2 // _ROWS, rows), dtype=torch.float32, device=q.device).mT
            quantised = _resize_cache(fp8, (rows, wide // 2))
            # Both ops look at owners and ids themselves: for few tokens a step is made of launches, and counting
            # the rows of each block and clearing the slots of negative ids beforehand would be two more each.
            fused_silu_mul_per_token_group_quant(
                gate_up,
                m_indices=owners,
                clamp_limit=of.limit,
                scale_format=deep_gemm_scale_format(q.device),
                out_q=quantised,
                out_s=scales,
            )
            expert_out = _resize_cache(of.workspace2, (rows, hidden))
            m_grouped_fp8_gemm_nt_contiguous((quantised, scales), (of.w2, of.s2), expert_out, owners)
        # Ids are negative where vLLM skips padding tokens (VLLM_MOE_SKIP_PADDING) and where a hash layer's table
        # has no such token; nothing was written to `places` there.
        ids = of.topk_ids.int().contiguous()
        combine_ordered(expert_out.unsqueeze(0), places, of.topk_weights, topk_ids=ids, out=of.output)

    class BatchInvariantDeepGemmExperts(DeepGemmExperts):  # type: ignore[misc]
        """All experts on this rank: rows packed for few tokens, DeepGEMM's contiguous layout for more."""

        @staticmethod
        def _supports_batch_invariance() -> bool:
            return True

        def apply(
            self,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            global_num_experts: int,
            expert_map: torch.Tensor | None,
            a1q_scale: torch.Tensor,
            a2_scale: torch.Tensor | None,
            workspace13: torch.Tensor,
            workspace2: torch.Tensor,
            expert_tokens_meta: Any,
            apply_router_weight_on_input: bool,
        ) -> None:
            limit = clamp_limit(self, activation)
            check_router_weights(apply_router_weight_on_input)
            check_value("expert_map", expert_map is None, "all experts on this rank", "a map", "Use staged dispatch.")
            operands = Operands(
                output=output,
                q=hidden_states,
                s=a1q_scale,
                topk_ids=topk_ids,
                topk_weights=topk_weights.float().contiguous(),
                w1=w1,
                s1=self.w1_scale,
                w2=w2,
                s2=self.w2_scale,
                limit=limit,
                workspace13=workspace13,
                workspace2=workspace2,
            )
            if len(hidden_states) <= PACKED_TOKENS:
                packed(operands)
            else:
                contiguous(operands, expert_tokens_meta)

    class BatchInvariantBatchedDeepGemmExperts(BatchedDeepGemmExperts):  # type: ignore[misc]
        """Masked layout, with a capacity and an ``expected_m`` that no batch moves."""

        apply = batched_apply(BatchedDeepGemmExperts.apply)

        @staticmethod
        def _supports_batch_invariance() -> bool:
            return True

        def estimate_expected_m(self, global_num_experts: int, max_tokens_per_expert: int, topk: int) -> int:
            # Rows per expert of a full slice under uniform routing. max_tokens_per_expert is the capacity.
            return -(-max_tokens_per_expert * topk // global_num_experts)

    return BatchInvariantDeepGemmExperts, BatchInvariantBatchedDeepGemmExperts


def _setting_blockers(config: Any) -> list[Blocker]:
    """What this deployment asks for and the experts cannot give."""
    parallel = config.moe_parallel_config
    asked = os.environ.get(TRANSPORT, "")
    checks = (
        ("moe_backend", config.moe_backend in ("auto", "deep_gemm"), "auto or deep_gemm", config.moe_backend),
        ("tensor parallel size", parallel.tp_size == 1, "1", parallel.tp_size),
        ("context parallel size", parallel.pcp_size == 1, "1", parallel.pcp_size),
        ("sequence parallel size", parallel.sp_size == 1, "1", parallel.sp_size),
        ("enable_eplb", not parallel.enable_eplb, "False", parallel.enable_eplb),
        ("enable_lora", not config.is_lora_enabled, "False", config.is_lora_enabled),
        (TRANSPORT, asked in ("", "nccl"), "nccl, or unset for DeepEP", asked),
        (
            "expert parallel size",
            parallel.use_all2all_kernels or parallel.ep_size == 1,
            "data parallel = expert parallel",
            parallel.ep_size,
        ),
        (
            "all2all_backend",
            not parallel.use_all2all_kernels or (asked, parallel.all2all_backend) in _TRANSPORTS,
            f"deepep_low_latency, or {TRANSPORT}=nccl with allgather_reducescatter",
            f"{parallel.all2all_backend} with {TRANSPORT} {asked or 'unset'}",
        ),
        ("width of an expert", config.intermediate_size_per_partition % _ROWS == 0, "a multiple of 128",
         config.intermediate_size_per_partition),
        ("hidden_size", config.hidden_dim % _ROWS == 0, "a multiple of 128", config.hidden_dim),
    )  # fmt: skip
    remedy = "Change the setting, or unset VLLM_BATCH_INVARIANT."
    blockers = [_blocker(name, expected, str(found), remedy) for name, ok, expected, found in checks if not ok]
    if detect_arch(torch.device("cuda", torch.cuda.current_device())) is not Arch.SM90:
        blockers.append(_blocker("GPU", "Hopper", "another GPU", "The experts were validated on Hopper only."))
    return blockers


@functools.cache
def _proof(hidden: int, intermediate: int) -> list[Blocker]:
    """What the bitwise proof of DeepGEMM on this layer's shapes has found against it."""
    try:
        with torch.device("cpu"):  # vLLM builds layers under a default device
            prove_deep_gemm(
                DeepGemmShapes.from_model(hidden=hidden, intermediate=intermediate), products=load_products()
            )
    except ContractError as error:
        return list(error.blockers)
    return []


def _blocker(subject: str, expected: str, found: str, remedy: str) -> Blocker:
    return Blocker(f"{_MODULE}: {subject}", expected, found, remedy)
