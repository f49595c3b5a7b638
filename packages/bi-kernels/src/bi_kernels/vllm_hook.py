"""What bi-kernels edits in vLLM, as a table, and the entry point that applies it.

Standard library and :mod:`bi_kernels.runtime` only: vLLM logs and forgets an import error of a plug-in, so that an
entry module which fails to import would leave a stock engine running with the flag on.
"""

from __future__ import annotations

from typing import Any

from bi_kernels.runtime.hooks import HookPlan, Patch, activate
from bi_kernels.runtime.settings import Refusal

__all__ = ["GPU_REFUSAL", "PLAN", "REFUSED_SETTINGS", "register"]

_EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
_LAYERS = "vllm.model_executor.layers"
_FP8_UTILS = "vllm.model_executor.layers.quantization.utils.fp8_utils"
_MODEL = "vllm.models.deepseek_v4.nvidia.model"
_PREVIEW = "https://github.com/vllm-project/vllm/pull/54955"


def _lora(config: Any) -> str | None:
    return None if config.lora_config is None else f"max_lora_rank {config.lora_config.max_lora_rank}"


def _other_gpu(config: Any) -> str | None:
    from bi_kernels.arch import detect_arch
    from bi_kernels.runtime.errors import UnsupportedArchError

    try:
        detect_arch()
    except UnsupportedArchError as error:
        return str(error)
    return None


def _float32_head(config: Any) -> str | None:
    head = str(config.model_config.head_dtype)
    return head if head == "torch.float32" else None


def _odd_vocabulary(config: Any) -> str | None:
    columns = getattr(config.model_config.hf_config, "vocab_size", 0)
    ranks = config.parallel_config.tensor_parallel_size
    # vLLM pads the whole vocabulary to a multiple of 64, and then divides it.
    return f"{columns} columns over {ranks} ranks" if -(-columns // 64) % ranks else None


GPU_REFUSAL = Refusal(
    "a GPU other than SM90, SM100 or SM103 (SM120 among them)",
    "arithmetic, scale formats and third-party contracts are written per architecture, and none is for these",
    "bi-kernels",
    _other_gpu,
)
REFUSED_SETTINGS = (
    Refusal(
        "LoRA (enable_lora)",
        "vLLM has no batch-invariant kernels for adapters on experts, and no op here takes one",
        "bi-kernels",
        _lora,
    ),
    GPU_REFUSAL,
    Refusal(
        "float32 head (head_dtype)",
        "its logits are a torch.mm with out_dtype, which vLLM's batch-invariant mode does not cover",
        "bi-kernels",
        _float32_head,
    ),
    Refusal(
        "vocabulary of no multiple of 64 columns per rank (vocab_size)",
        "the fixed-order product under the lm_head has tiles of 64 columns",
        "bi-kernels",
        _odd_vocabulary,
    ),
)


def _model_check(version: str, batch_invariant: str) -> Patch:
    """The check before a V4 model's first forward, with vLLM's own batch-invariant mode, which moved in 0.33."""
    return Patch(
        target=f"{_MODEL}:DeepseekV4ForCausalLM.__init__",
        replacement="bi_kernels.vllm_model_check:checked_init",
        factory=True,
        why="Architecture, settings, missing packages and self-tests can only be judged once the model is known, and "
        "must be judged before its first forward; vLLM offers plug-ins no callback there.",
        upstream="none: aligned mode's own check",
        remove_when="vLLM lets a plug-in veto a model configuration",
        versions=(version,),
        relies_on=(
            f"{batch_invariant}:init_batch_invariance",
            f"{batch_invariant}:enable_batch_invariant_mode",
            f"{batch_invariant}:override_envs_for_invariance",
            f"{batch_invariant}:linear_batch_invariant",
            f"{batch_invariant}:rms_norm_batch_invariant",
        ),
    )


def _log_softmax(version: str, batch_invariant: str) -> Patch:
    """The log-softmax of vLLM's batch-invariant mode, which moved in 0.33."""
    return Patch(
        target=f"{batch_invariant}:log_softmax",
        replacement="bi_kernels.vllm_log_softmax:log_softmax",
        factory=True,
        why="It is batch-invariant, but walks a row in one block, three times and 1024 columns after 1024: at V4's "
        "129,280 a step with few rows waits for it longer than for a layer. vLLM's registration looks the name up in "
        "this module, so all models and a trainer in the process get the same one.",
        upstream="none yet: vLLM's batch-invariant mode is the place",
        remove_when="vLLM shares a row's log-softmax among blocks",
        versions=(version,),
        relies_on=(
            f"{batch_invariant}:_log_softmax_batch_invariant",
            "vllm.v1.sample.sampler:Sampler.compute_logprobs",
        ),
    )


PLAN = HookPlan(
    package="bi-kernels",
    import_name="bi_kernels",
    requires_native=(
        "bi_kernels::fused_silu_mul_per_token_group_quant",
        "bi_kernels::fixed_order_mm",
        "bi_kernels::log_softmax",
    ),
    self_tests=("bi_kernels.vllm_model_check:self_tests",),
    patches=(
        _model_check("0.26", "vllm.model_executor.layers.batch_invariant"),
        _model_check("0.33", "vllm.model_executor.determinism.batch_invariant"),
        _log_softmax("0.26", "vllm.model_executor.layers.batch_invariant"),
        _log_softmax("0.33", "vllm.model_executor.determinism.batch_invariant"),
        Patch(
            target=f"{_LAYERS}.logits_processor:LogitsProcessor",
            replacement="bi_kernels.vllm_lm_head:logits_processor_class",
            factory=True,
            kind="oot_pluggable_layer",
            why="vLLM's batch-invariant linear computes few rows of the lm_head in tiles of 128, and reads its weights "
            "at a third of the memory's speed: 150 us of a decode step on an H200. The registry replaces the class; "
            "the linear under it is other layers' too.",
            upstream="none yet: vLLM's batch-invariant mode is the place",
            remove_when="vLLM's batch-invariant linear reads the weights of few rows as fast as cuBLAS does",
            relies_on=(
                f"{_LAYERS}.logits_processor:LogitsProcessor._apply_head",
                f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply",
                f"{_LAYERS}.vocab_parallel_embedding:pad_vocab_size",
                f"{_MODEL}:DeepseekV4ForCausalLM.compute_logits",
            ),
        ),
        Patch(
            target=f"{_EXPERTS}.deep_gemm_moe:DeepGemmExperts._act_mul_quant",
            replacement="bi_kernels.vllm_experts:act_mul_quant",
            factory=True,
            why="Contiguous experts use one of two kernels whose rounding differs from the masked one and whose grid "
            "follows M, so the same row has other FP8 codes in another expert layout. No registry covers a method.",
            upstream=_PREVIEW,
            remove_when="vLLM calls the fused op from DeepGemmExperts in batch-invariant mode",
            relies_on=(
                f"{_EXPERTS}.deep_gemm_moe:DeepGemmExperts.apply",
                "vllm.utils.deep_gemm:DeepGemmQuantScaleFMT",
                "vllm.model_executor.layers.activation:SiluAndMulWithClamp",
                f"{_MODEL}:DeepseekV4MLP",
            ),
        ),
        Patch(
            target=f"{_EXPERTS}.deep_gemm_moe:DeepGemmFP4Experts._act_mul_quant",
            replacement="bi_kernels.vllm_experts:act_mul_quant_fp4",
            factory=True,
            why="FP4 experts on Blackwell quantise through the packed Triton kernel, whose rows per program switch at "
            "512 tokens; they must share one arithmetic with dense and shared experts. Refused until the op has been "
            "run on Blackwell.",
            upstream=_PREVIEW,
            remove_when="vLLM calls the fused op from DeepGemmFP4Experts in batch-invariant mode",
            relies_on=(f"{_EXPERTS}.deep_gemm_moe:DeepGemmFP4Experts.apply",),
        ),
        Patch(
            target=f"{_EXPERTS}.batched_deep_gemm_moe:BatchedDeepGemmExperts.apply",
            replacement="bi_kernels.vllm_experts:batched_apply",
            factory=True,
            why="The masked kernel forms the scale in bf16, partitions tokens by the sum over all experts, and drops "
            "V4's swiglu_limit; its call is inline, so that the method is the smallest unit to replace.",
            upstream=_PREVIEW,
            remove_when="vLLM calls the fused op, with the clamp, from BatchedDeepGemmExperts",
            relies_on=(
                f"{_EXPERTS}.batched_deep_gemm_moe:persistent_masked_m_silu_mul_quant",
                f"{_EXPERTS}.batched_deep_gemm_moe:scales_shape_stride_dtype",
                "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExpertsModular.moe_problem_size",
                "vllm.model_executor.layers.fused_moe.utils:_resize_cache",
                "vllm.utils.deep_gemm:fp8_m_grouped_gemm_nt_masked",
            ),
        ),
        Patch(
            target=f"{_FP8_UTILS}:fused_silu_mul_per_token_group_quant_fp8",
            replacement="bi_kernels.vllm_publish:fused_silu_mul_per_token_group_quant_fp8",
            kind="publish",
            why="A trainer written for the preview quantises activations through this name; vLLM does not have it.",
            upstream=_PREVIEW,
            remove_when="vLLM ships the function",
            relies_on=(
                f"{_FP8_UTILS}:per_token_group_quant_fp8",
                f"{_FP8_UTILS}:per_token_group_quant_fp8_packed_for_deepgemm",
            ),
        ),
        Patch(
            target=f"{_FP8_UTILS}:is_batch_invariant_quant_kernel_enabled",
            replacement="bi_kernels.vllm_publish:is_batch_invariant_quant_kernel_enabled",
            kind="publish",
            why="The trainer asks by this name whether it may use the fused quantiser; vLLM does not have it.",
            upstream=_PREVIEW,
            remove_when="vLLM ships the function",
        ),
        Patch(
            target=f"{_FP8_UTILS}:require_batch_invariant_quant_kernel",
            replacement="bi_kernels.vllm_publish:require_batch_invariant_quant_kernel",
            kind="publish",
            why="The trainer demands the fused quantiser by this name before a run; vLLM does not have it.",
            upstream=_PREVIEW,
            remove_when="vLLM ships the function",
        ),
    ),
)


def register() -> None:
    """Apply :data:`PLAN`; the ``vllm.general_plugins`` entry point.

    vLLM calls this in the front end, the engine core, every worker and the model-inspection process, some of which
    must not initialise CUDA and none of which knows the model yet. So only static facts are checked here: versions,
    anchors, native libraries, environment. Architecture and settings are checked when a V4 model is built, and only
    there does ``BI_PARTIAL=1`` (fewer than four packages, for work on one of them) make a difference.

    With ``VLLM_BATCH_INVARIANT`` unset or 0 nothing is imported and nothing changes. A second call does nothing.

    Raises:
        HookError: The flag is on and something is missing. Lists every blocker with its remedy; vLLM is untouched.
    """
    activate(PLAN)
