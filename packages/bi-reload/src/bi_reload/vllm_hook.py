"""What bi-reload edits in vLLM, as a table, and the entry point that applies it.

Standard library and :mod:`bi_kernels.runtime` only: vLLM logs and forgets an import error of a plug-in, so that an
entry module which fails to import would leave a stock engine running with the flag on.
"""

from __future__ import annotations

from typing import Any

from bi_kernels.runtime.hooks import HookPlan, Patch, activate
from bi_kernels.runtime.settings import Refusal

__all__ = ["PLAN", "REFUSED_SETTINGS", "register"]

_NVIDIA = "vllm.models.deepseek_v4.nvidia"
_MODEL = f"{_NVIDIA}.model"
_MHC = "vllm.model_executor.kernels.mhc"
_LOADER = "vllm.model_executor.model_loader"
_LAYERWISE = f"{_LOADER}.reload.layerwise"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_PREVIEW = "https://github.com/vllm-project/vllm/pull/54955"
_SPLIT = "https://github.com/sgl-project/sglang/pull/37292"
_BROADCAST = "https://github.com/vllm-project/vllm/pull/51368"
_SINKS = "https://github.com/vllm-project/vllm/pull/57795"

_RELOAD_0_33 = "its run inside vLLM 0.33 on a GPU"


def _dummy_weights(config: Any) -> str | None:
    found = str(config.load_config.load_format)
    return found if found == "dummy" else None


REFUSED_SETTINGS = (
    Refusal(
        "load_format dummy",
        "no loader runs, so the padding of attn_sink is random; on 0.26 the mHC broadcast weight is never computed and "
        "FP8 values round to zero, so that every comparison would pass",
        "bi-reload",
        _dummy_weights,
    ),
    Refusal(
        "reloading a draft model (start_draft_weight_update)",
        "MTP and DSpark are refused, so their sinks and broadcast weights have no tested reload",
        "bi-reload",
    ),
)


def _mhc(module: str, name: str, why: str) -> Patch:
    """One mHC function, replaced where a model module looks it up."""
    return Patch(
        target=f"{module}:{name}",
        replacement=f"bi_reload.vllm_mhc:{name.removesuffix('_tilelang')}",
        why=f"{why} The model imports the function by name, so its own module is the place.",
        upstream=f"{_PREVIEW}; {_SPLIT}",
        remove_when="vLLM's mHC is explicit, with a constant split, in batch-invariant mode",
    )


def _post_and_head(module: str) -> tuple[Patch, Patch]:
    """The two mHC functions that a draft model uses beside the decoder layer."""
    return (
        _mhc(
            module,
            "mhc_post_tilelang",
            "Draft layers share the target's decoder layer and would mix its mHC arithmetic with vLLM's.",
        ),
        _mhc(
            module,
            "hc_head_fused_kernel_tilelang",
            "Draft layers share the target's head reduction and would mix its arithmetic with vLLM's.",
        ),
    )


def _sinks(target: str, *relies_on: str) -> Patch:
    """One load_weights that writes attention sinks past the parameter's loader. Fixed upstream in 0.33."""
    return Patch(
        target=target,
        replacement="bi_reload.vllm_reload:load_weights_with_sinks",
        factory=True,
        why="Sinks are copied into a slice of the parameter, past its loader. During a layerwise reload the parameter "
        "is a meta tensor, the copy does nothing and is not counted, and the old sinks stay in use after a warning.",
        upstream=_SINKS,
        remove_when="0.26 is no longer supported: 0.33 loads sinks through the parameter's loader",
        versions=("0.26",),
        relies_on=(
            "vllm.models.deepseek_v4.attention:DeepseekV4Attention.__init__",
            f"{_LOADER}.reload.meta:CopyCounter",
            f"{_LOADER}.reload.meta:get_numel_loaded",
            f"{_LOADER}.weight_utils:default_weight_loader",
            *relies_on,
        ),
    )


def _broadcast(version: str, why: str, *, needs: str = "") -> Patch:
    """The refresh of layer 0's broadcast weight, by vLLM version, because it goes wrong in another way on each."""
    return Patch(
        target=f"{_MODEL}:DeepseekV4Model.finalize_mhc_broadcast_weights",
        replacement="bi_reload.vllm_reload:finalize_mhc_broadcast_weights",
        factory=True,
        why=why,
        upstream=f"{_BROADCAST}; https://github.com/vllm-project/vllm/pull/57733",
        remove_when="vLLM refreshes in place, and only after the last bucket",
        versions=(version,),
        ready=not needs,
        needs=needs,
        relies_on=(f"{_MODEL}:DeepseekV4ForCausalLM.load_weights", f"{_MODEL}:DeepseekV4DecoderLayer.__init__"),
    )


def _finalize(target: str, why: str, *relies_on: str) -> Patch:
    """One name under which the end of a layerwise load is looked up."""
    return Patch(
        target=target,
        replacement="bi_reload.vllm_reload:finalize_layerwise_processing",
        factory=True,
        why=why,
        upstream="https://github.com/vllm-project/vllm/pull/57733",
        remove_when="vLLM calls a model's own finaliser once, after the last bucket",
        relies_on=relies_on,
    )


def _lifecycle(method: str, replacement: str, why: str) -> Patch:
    """One worker method, the same for both model runners and every transfer engine."""
    return Patch(
        target=f"{_WORKER}.{method}",
        replacement=f"bi_reload.vllm_reload:{replacement}",
        factory=True,
        why=why,
        upstream="https://github.com/vllm-project/vllm/issues/48312",
        remove_when="vLLM's weight updates are all-or-nothing and audit their addresses",
    )


PLAN = HookPlan(
    package="bi-reload",
    import_name="bi_reload",
    requires_native=(
        "bi_reload::mhc_pre",
        "bi_reload::mhc_pre_broadcast",
        "bi_reload::mhc_post",
        "bi_reload::mhc_head",
        "bi_reload::padded_copy_",
        "bi_reload::fingerprint",
    ),
    self_tests=("bi_reload.self_tests:self_tests",),
    patches=(
        _mhc(
            _MODEL,
            "mhc_pre_broadcast_tilelang",
            "Layer 0 splits the sum of its pre-norm projection by token count and SM count, so the first op of the "
            "model already follows the batch.",
        ),
        _mhc(
            _MODEL,
            "mhc_pre_tilelang",
            "The pre-norm projection splits its sum by token count and SM count.",
        ),
        _mhc(
            _MODEL,
            "mhc_fused_post_pre_tilelang",
            "Below 17 tokens (33 on 0.33) the fused path takes the norm from the unrounded residual, above from the "
            "rounded one; post, then pre, as two ops, is one arithmetic for every token count.",
        ),
        _mhc(
            _MODEL,
            "mhc_post_tilelang",
            "The trainer repeats post as an exact op, multiply then add in a stated order; vLLM's kernel states none.",
        ),
        _mhc(
            _MODEL,
            "hc_head_fused_kernel_tilelang",
            "The trainer repeats the head reduction by one shared op; vLLM's kernel states no order.",
        ),
        *_post_and_head(f"{_NVIDIA}.mtp"),
        *_post_and_head(f"{_NVIDIA}.dspark"),
        Patch(
            target=f"{_MHC}.tilelang_kernels:compute_num_split",
            replacement="bi_reload.vllm_mhc:constant_num_split",
            factory=True,
            why="vLLM's own mHC functions, which a trainer may call directly, ask it for their split at every call. On "
            "0.33 another model shares it and must keep vLLM's number, so there only V4's own names are replaced.",
            upstream=f"{_PREVIEW}; {_SPLIT}",
            remove_when="0.26 is no longer supported, or vLLM's split is a constant",
            versions=("0.26",),
            relies_on=(f"{_MHC}.tilelang:mhc_pre_tilelang", f"{_MHC}.tilelang:mhc_pre_broadcast_tilelang"),
        ),
        Patch(
            target=f"{_MODEL}:DeepseekV4ForCausalLM.load_weights",
            replacement="bi_reload.vllm_reload:checked_load_weights",
            factory=True,
            why="Unknown names, other dtypes and shapes are written or skipped in silence, and nothing counts what did "
            "not come; every way of loading passes through this method.",
            upstream="https://github.com/vllm-project/vllm/issues/43456",
            remove_when="vLLM refuses an update that is not the whole checkpoint, with the list",
            relies_on=(
                f"{_LAYERWISE}:LAYERWISE_INFO",
                f"{_LAYERWISE}:make_online_process_loader",
                f"{_LOADER}.reload.types:LayerReloadingInfo",
                f"{_LOADER}.reload.utils:get_layer_size",
            ),
        ),
        _broadcast(
            "0.26",
            "Each load puts the broadcast weight at a new address, so captured graphs read freed memory.",
        ),
        _broadcast(
            "0.33",
            "It is copied in place, but also after every bucket, when its source may still be a meta tensor.",
            needs=_RELOAD_0_33,
        ),
        Patch(
            target=f"{_MODEL}:DeepseekV4ForCausalLM.finalize_weights_after_layerwise_reload",
            replacement="bi_reload.vllm_reload:finalize_weights_after_layerwise_reload",
            kind="publish",
            why="The model has no method that recomputes derived weights once, after the last bucket; trainers written "
            "for the preview call it by this name.",
            upstream=_PREVIEW,
            remove_when="vLLM's model has the method",
            relies_on=(f"{_MODEL}:DeepseekV4ForCausalLM.load_weights",),
        ),
        _finalize(
            f"{_LAYERWISE}:finalize_layerwise_processing",
            "The last step of a layerwise reload never asks the root model to refresh what it derives from weights. "
            "Every transfer engine reaches this name through finalize_layerwise_reload.",
            f"{_LAYERWISE}:finalize_layerwise_reload",
            f"{_LAYERWISE}:initialize_layerwise_reload",
            f"{_LAYERWISE}:_place_kernel_tensors",
            f"{_LAYERWISE}:_copy_and_restore_kernel_tensors",
            f"{_LAYERWISE}:LOADING_LAYERS",
            f"{_LOADER}.reload.meta:materialize_layer",
            f"{_LOADER}.reload.meta:restore_layer_on_meta",
            "vllm.model_executor.layers.quantization.fp8:Fp8MoEMethod._setup_kernel",
        ),
        _finalize(
            f"{_LOADER}.base_loader:finalize_layerwise_processing",
            "The loader of online-quantised weights holds its own reference to the function, which the patch of the "
            "defining module does not reach.",
            f"{_LOADER}.base_loader:BaseModelLoader.load_model",
        ),
        _sinks(f"{_MODEL}:DeepseekV4Model.load_weights"),
        _sinks(f"{_NVIDIA}.mtp:DeepSeekV4MTP.load_weights"),
        _sinks(f"{_NVIDIA}.dspark:DSparkDeepseekV4ForCausalLM.load_weights"),
        _lifecycle(
            "start_weight_update",
            "start_weight_update",
            "Opens the audited lifecycle: a nested or repeated begin is refused, and the engine does not serve until a "
            "whole update succeeds.",
        ),
        _lifecycle(
            "update_weights",
            "update_weights",
            "A bucket with unknown names or another dtype, or a load that fails, must leave the update marked as "
            "failed; vLLM closes the session and goes on.",
        ),
        _lifecycle(
            "finish_weight_update",
            "finish_weight_update",
            "Missing names, moved addresses and the weight fingerprint are checked once, after the last bucket.",
        ),
        _lifecycle(
            "reload_weights",
            "reload_weights",
            "In kernel format weights are copied parameter by parameter, past every finaliser, so the broadcast weight "
            "stays the old one.",
        ),
        _lifecycle(
            "compile_or_warm_up_model",
            "record_addresses",
            "Captured graphs keep raw addresses; they are recorded here, after capture, and compared after a reload.",
        ),
        _lifecycle(
            "execute_model",
            "refuse_after_failed_reload",
            "After a failed update vLLM goes on serving, with old and new weights mixed.",
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
