"""vLLM's expert layers on the fused op: what the hook installs in place of their activation and quantisation.

Imported only after vLLM has imported the module that is edited. Each factory takes the original method and returns the
new one; the original is not called, because it would be another arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .arch import detect_arch
from .runtime.checks import check_value
from .runtime.errors import UnsupportedArchError
from .scale_format import ScaleFormat, scale_format_for
from .silu_mul_quant import fused_silu_mul_per_token_group_quant

__all__ = [
    "act_mul_quant",
    "act_mul_quant_fp4",
    "batched_apply",
    "check_router_weights",
    "clamp_limit",
    "deep_gemm_scale_format",
]

Method = Callable[..., Any]


def deep_gemm_scale_format(device: torch.device) -> ScaleFormat:
    """The scale format of the GPU, if vLLM's DeepGEMM wrappers have chosen the same.

    Raises:
        ArgumentError: vLLM reads other scales, e.g. because ``VLLM_USE_DEEP_GEMM_E8M0`` is 0.
    """
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT

    ours = scale_format_for(detect_arch(device))
    theirs = DeepGemmQuantScaleFMT.from_oracle().name
    check_value("DeepGEMM's scale format", theirs == ours.name, ours.name, theirs, "Unset VLLM_USE_DEEP_GEMM_E8M0.")
    return ours


def act_mul_quant(original: Method) -> Method:
    """``DeepGemmExperts._act_mul_quant`` on the fused op.

    vLLM 0.33 also passes where each expert's rows end, to skip the padding between them; here the padding is computed
    like any row, and like before nothing reads it.

    Raises (the new method):
        ArgumentError: An activation, a block shape or gate parameters that the op does not have.
        NativeLibraryError: The compiled kernel is missing.

    Invariance:
        Row ``i`` of both outputs depends on row ``i`` of ``input`` alone.

    Source: preview-pr.txt, *Is wired into deep_gemm_moe.py and batched_deep_gemm_moe.py*; vLLM
    ``experts/deep_gemm_moe.py``.
    """

    def _act_mul_quant(
        self: Any,
        input: torch.Tensor,
        output: torch.Tensor,
        activation: Any,
        expert_ends: torch.Tensor | None = None,
        expert_alignment: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_value("mxfp8", not self.mxfp8, "scales of 128 elements", "MXFP8 experts", "Use block-scaled FP8 experts.")
        limit = clamp_limit(self, activation)
        return fused_silu_mul_per_token_group_quant(
            input, clamp_limit=limit, scale_format=deep_gemm_scale_format(input.device), out_q=output
        )

    return _act_mul_quant


def act_mul_quant_fp4(original: Method) -> Method:
    """``DeepGemmFP4Experts._act_mul_quant``, refused: these experts need Blackwell, where the op was never run.

    Raises (the new method):
        UnsupportedArchError: Always.

    Source: design.md, *Refused for now*.
    """

    def _act_mul_quant(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise UnsupportedArchError(
            "FP4 experts: expected FP8 experts, got DeepGemmFP4Experts, which run on Blackwell alone. The fused op "
            "compiles for Blackwell and has not been validated there. Use a checkpoint with FP8 experts on Hopper."
        )

    return _act_mul_quant


def batched_apply(original: Method) -> Method:
    """``BatchedDeepGemmExperts.apply`` on the fused op: GEMM, activation and quantisation, GEMM, on masked rows.

    Upstream's own masked kernel has no clamp: a model with ``swiglu_limit`` gets one here.

    Raises (the new method):
        ArgumentError: As :func:`act_mul_quant`.
        NativeLibraryError: The compiled kernel is missing.

    Invariance:
        Activation and quantisation: as :func:`act_mul_quant`. The GEMMs and ``expected_m`` are bi-moe-deepep's.

    Source: as :func:`act_mul_quant`; vLLM ``experts/batched_deep_gemm_moe.py``.
    """

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        from vllm.model_executor.layers.fused_moe.utils import _resize_cache
        from vllm.utils.deep_gemm import fp8_m_grouped_gemm_nt_masked

        limit = clamp_limit(self, activation)
        check_router_weights(apply_router_weight_on_input)
        check_value(
            "expert_tokens_meta",
            expert_tokens_meta is not None,
            "counts of tokens by expert",
            "None",
            "Dispatch first.",
        )
        counts = expert_tokens_meta.expert_num_tokens
        experts, capacity, wide, _, top_k = self.moe_problem_size(hidden_states, w1, w2, topk_ids)
        expected_m = self.estimate_expected_m(
            global_num_experts=global_num_experts, max_tokens_per_expert=capacity, topk=top_k
        )
        gate_up = _resize_cache(workspace13, (experts, capacity, wide))
        fp8_m_grouped_gemm_nt_masked((hidden_states, a1q_scale), (w1, self.w1_scale), gate_up, counts, expected_m)
        quantised = fused_silu_mul_per_token_group_quant(
            gate_up,
            masked_m=counts.to(dtype=torch.int32, device=gate_up.device),
            clamp_limit=limit,
            scale_format=deep_gemm_scale_format(gate_up.device),
        )
        fp8_m_grouped_gemm_nt_masked(quantised, (w2, self.w2_scale), output, counts, expected_m)

    return apply


def check_router_weights(apply_router_weight_on_input: bool) -> None:
    """Refuse router weights that would be multiplied before the experts: the combine step rounds once, after them."""
    check_value(
        "apply_router_weight_on_input",
        not apply_router_weight_on_input,
        "False",
        apply_router_weight_on_input,
        "Let the combine step apply the router's weights.",
    )


def clamp_limit(experts: Any, activation: Any) -> float | None:
    """The experts' ``swiglu_limit``; refuses everything that the op does not compute."""
    config = experts.quant_config
    name = getattr(activation, "name", str(activation))
    check_value("activation", name == "SILU", "MoEActivation.SILU", name, "No other activation is specified.")
    block = list(experts.block_shape or ())
    check_value("block_shape", block == [128, 128], "[128, 128]", block, "Use a checkpoint with 128 x 128 blocks.")
    alpha, beta = config.gemm1_alpha, config.gemm1_beta
    check_value("gemm1_alpha", alpha in (None, 1.0), "1", alpha, "The op's gate is plain SiLU.")
    check_value("gemm1_beta", beta in (None, 0.0), "0", beta, "The op's up half has no bias.")
    limit = config.gemm1_clamp_limit
    return None if limit is None else float(limit)
