"""What bi-moe-deepep edits in vLLM, as a table, and the entry point that applies it.

Standard library and :mod:`bi_kernels.runtime` only: vLLM logs and forgets an import error of a plug-in, so that an
entry module which fails to import would leave a stock engine running with the flag on.
"""

from __future__ import annotations

import os
from typing import Any

from bi_kernels.runtime.hooks import HookPlan, Patch, activate
from bi_kernels.runtime.settings import Refusal

__all__ = ["PLAN", "REFUSED_SETTINGS", "register"]

_MOE = "vllm.model_executor.layers.fused_moe"
_KERNEL = f"{_MOE}.modular_kernel:FusedMoEKernelModularImpl"
_DEEP_GEMM = "vllm.utils.deep_gemm"
_PREVIEW = "https://github.com/vllm-project/vllm/pull/54955"

_RUN_0_33 = "its run inside vLLM 0.33 on a GPU"


def _tensor_parallel(config: Any) -> str | None:
    size = config.parallel_config.tensor_parallel_size
    return f"size {size}" if size > 1 else None


def _pipeline_parallel(config: Any) -> str | None:
    size = config.parallel_config.pipeline_parallel_size
    return f"size {size}" if size > 1 else None


def _other_all_to_all(config: Any) -> str | None:
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1:
        return None
    if not parallel.enable_expert_parallel:  # vLLM then shards each expert over the data-parallel ranks
        return f"data parallel size {parallel.data_parallel_size} without enable_expert_parallel"
    ours = os.environ.get("BI_EP_TRANSPORT") == "nccl" or parallel.all2all_backend == "deepep_low_latency"
    return None if ours else str(parallel.all2all_backend)


def _eplb(config: Any) -> str | None:
    return "enable_eplb" if config.parallel_config.enable_eplb else None


def _dbo(config: Any) -> str | None:
    return "microbatches" if config.parallel_config.use_ubatching else None


def _mega_moe(config: Any) -> str | None:
    backend = str(config.kernel_config.moe_backend)
    return backend if "mega" in backend else None


def _fp4_experts(config: Any) -> str | None:
    from bi_kernels.arch import Arch, detect_arch
    from bi_kernels.runtime.errors import UnsupportedArchError

    experts = getattr(config.model_config.hf_config, "expert_dtype", "fp4")  # what vLLM takes without the key
    try:
        hopper = detect_arch() is Arch.SM90
    except UnsupportedArchError:
        return None  # refused as a GPU
    return experts if hopper and experts == "fp4" else None


REFUSED_SETTINGS = (
    Refusal(
        "tensor parallel size > 1",
        "its all-reduce rounds per-rank partial sums to bf16, so bits follow the number of ranks; use DP = EP, TP 1",
        "bi-moe-deepep",
        _tensor_parallel,
    ),
    Refusal(
        "pipeline parallel size > 1",
        "equal bits across a stage boundary were never shown; use DP = EP, PP 1",
        "bi-moe-deepep",
        _pipeline_parallel,
    ),
    Refusal(
        "all-to-all backends other than DeepEP low latency and BI_EP_TRANSPORT=nccl",
        "vLLM's all-gather/reduce-scatter rounds per-rank partial sums to bf16, and no other backend promises an order "
        "of combination",
        "bi-moe-deepep",
        _other_all_to_all,
    ),
    Refusal(
        "EPLB (enable_eplb)",
        "experts change their slots while requests run, so receive slots and capacities are no constants",
        "bi-moe-deepep",
        _eplb,
    ),
    Refusal(
        "DBO (enable_dbo)",
        "it cuts the batch in two by its size, and the second half needs a second dispatch handle",
        "bi-moe-deepep",
        _dbo,
    ),
    Refusal(
        "mega-MoE (moe_backend deep_gemm_mega_moe and other fused dispatch backends)",
        "its gate changes kernels with the number of tokens, and its capacity, quantiser and order of combination are "
        "out of reach",
        "bi-moe-deepep",
        _mega_moe,
    ),
    Refusal(
        "FP4 experts on Hopper (expert_dtype fp4)",
        "DeepGEMM has no FP4 kernel there, and Marlin and Humming are other arithmetic than a trainer's",
        "bi-moe-deepep",
        _fp4_experts,
    ),
)


def _selection(target: str, replacement: str, *relies_on: str) -> Patch:
    """The choice of an expert backend, where the quantisation method looks it up."""
    return Patch(
        target=target,
        replacement=replacement,
        factory=True,
        why="With the flag on vLLM takes whatever claims invariance: Triton on 0.26, Humming too on 0.33. Both are "
        "other arithmetic than a trainer's DeepGEMM, whose classes claim nothing, and the masked one sizes its GEMM "
        "from the tokens of the live batch. So V4 gets subclasses of DeepGEMM's with constants, or stops. V4's "
        "quantisation method imports the function by name, so its module is the place.",
        upstream=_PREVIEW,
        remove_when="vLLM's DeepGEMM experts claim batch invariance themselves, and are chosen by name",
        relies_on=(
            f"{_MOE}.modular_kernel:FusedMoEExperts.is_supported_config",
            f"{_MOE}.modular_kernel:FusedMoEExperts._supports_batch_invariance",
            *relies_on,
        ),
    )


def _gate(version: str, why: str, *, needs: str = "") -> Patch:
    """The router's gate, by vLLM version, because it is wrong in another way on each."""
    return Patch(
        target=f"{_MOE}.router.gate_linear:GateLinear",
        replacement="bi_moe_deepep.vllm_router:gate_linear_class",
        factory=True,
        kind="oot_pluggable_layer",
        why=why,
        upstream=f"{_PREVIEW}; https://github.com/vllm-project/vllm/pull/47410",
        remove_when="GateLinear gives fp32 logits with one reduction order for every M",
        versions=(version,),
        ready=not needs,
        needs=needs,
        relies_on=(
            f"{_MOE}.router.dsv4_topk:can_use_dsv4_topk",
            f"{_MOE}.router.dsv4_topk:dsv4_topk",
            f"{_MOE}.router.fused_topk_bias_router:fused_topk_bias",
        ),
    )


def _prepare_finalize(oracle: str, replacement: str) -> Patch:
    """The maker of dispatch and combine, where an oracle looks it up."""
    return Patch(
        target=f"{_MOE}.oracle.{oracle}:maybe_make_prepare_finalize",
        replacement=replacement,
        factory=True,
        why="On Hopper DeepEP's low-latency dispatch quantises by other scales than the local path, and a chunk beyond "
        "its capacity cannot be sent; every other backend rounds per rank and is refused, or replaced where "
        "BI_EP_TRANSPORT=nccl asks for it. vLLM binds the class DeepEPLLPrepareAndFinalize only where DeepEP is "
        "installed, so its maker is the place.",
        upstream=f"{_PREVIEW}; https://github.com/deepseek-ai/DeepEP/pull/743",
        remove_when="vLLM dispatches at a fixed capacity, with scales equal to the local path's",
        relies_on=(
            f"{_MOE}.all2all_utils:get_ep_all2all_manager",
            f"{_MOE}.prepare_finalize.deepep_ll:DeepEPLLPrepareAndFinalize",
        ),
    )


PLAN = HookPlan(
    package="bi-moe-deepep",
    import_name="bi_moe_deepep",
    requires_native=(
        "bi_kernels::fixed_order_mm",
        "bi_kernels::fused_silu_mul_per_token_group_quant",
        "bi_moe_deepep::combine_ordered",
        "bi_moe_deepep::m_grouped_fp8_gemm_nt_offsets",
        "bi_moe_deepep::pack_tokens",
        "bi_moe_deepep::stage_tokens",
    ),
    contracts=("bi_moe_deepep.deep_gemm:DEEP_GEMM",),
    patches=(
        Patch(
            target=f"{_DEEP_GEMM}:supports_deep_gemm_batch_invariance",
            replacement="bi_moe_deepep.deep_gemm:supports_deep_gemm_batch_invariance",
            kind="publish",
            why="A trainer written for the preview asks by this name whether DeepGEMM may be used; vLLM lacks it.",
            upstream=f"{_PREVIEW}; https://github.com/sgl-project/DeepGEMM/pull/73",
            remove_when="vLLM ships the function",
            relies_on=(
                f"{_DEEP_GEMM}:_import_deep_gemm",
                f"{_DEEP_GEMM}:_lazy_init",
                f"{_DEEP_GEMM}:fp8_gemm_nt",
                f"{_DEEP_GEMM}:fp8_m_grouped_gemm_nt_masked",
                f"{_DEEP_GEMM}:m_grouped_fp8_gemm_nt_contiguous",
                f"{_DEEP_GEMM}:mk_alignment_scope",
            ),
        ),
        Patch(
            target=f"{_DEEP_GEMM}:enable_deep_gemm_batch_invariance",
            replacement="bi_moe_deepep.deep_gemm:enable_deep_gemm_batch_invariance",
            kind="publish",
            why="The trainer turns the contract on by this name, or expects an error; vLLM lacks it.",
            upstream=f"{_PREVIEW}; https://github.com/sgl-project/DeepGEMM/pull/73",
            remove_when="vLLM ships the function",
        ),
        _selection(
            "vllm.model_executor.layers.quantization.fp8:select_fp8_moe_backend",
            "bi_moe_deepep.vllm_experts:select_fp8_backend",
            f"{_MOE}.oracle.fp8:backend_to_kernel_cls",
            f"{_MOE}.deep_gemm_utils:compute_aligned_M_and_alignment",
            f"{_MOE}.deep_gemm_utils:deepgemm_moe_permute",
            f"{_MOE}.deep_gemm_utils:ep_gather",
            f"{_MOE}.deep_gemm_utils:ep_scatter",
            f"{_MOE}.experts.batched_deep_gemm_moe:BatchedDeepGemmExperts",
            f"{_MOE}.experts.deep_gemm_moe:DeepGemmExperts",
            f"{_MOE}.experts.triton_deep_gemm_moe:TritonOrDeepGemmExperts",
        ),
        _selection(
            "vllm.model_executor.layers.quantization.mxfp4:select_deepseek_v4_mxfp4_moe_backend",
            "bi_moe_deepep.vllm_experts:select_mxfp4_backend",
            f"{_MOE}.experts.deep_gemm_moe:DeepGemmFP4Experts",
        ),
        _gate("0.26", "The router's GEMM is another kernel up to 16 tokens and a cuBLAS choice by M above."),
        _gate(
            "0.33",
            "The router's GEMM is invariant, but rounds the logits to bf16, where ties between experts become common.",
            needs=_RUN_0_33,
        ),
        _prepare_finalize("fp8", "bi_moe_deepep.vllm_dispatch:make_fp8_prepare_finalize"),
        _prepare_finalize("mxfp4", "bi_moe_deepep.vllm_dispatch:make_mxfp4_prepare_finalize"),
        Patch(
            target=f"{_KERNEL}.apply",
            replacement="bi_moe_deepep.vllm_dispatch:staged_apply",
            factory=True,
            why="Slices of fixed capacity need dispatch, experts and combine together in one loop of constant length, "
            "with the shared experts launched once on the whole input; only this method spans all three. The stock "
            "finalize would run the shared experts once per slice, and its own assertion stops the second.",
            upstream=_PREVIEW,
            remove_when="vLLM stages low-latency dispatch at a fixed capacity",
            relies_on=(
                f"{_KERNEL}._allocate_buffers",
                f"{_KERNEL}._finalize",
                f"{_KERNEL}._fused_experts",
                f"{_KERNEL}._maybe_apply_shared_experts",
                f"{_KERNEL}._prepare",
                f"{_MOE}.runner.moe_runner:MoERunner._forward_impl",
                f"{_MOE}.runner.shared_experts:SharedExperts",
            ),
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
