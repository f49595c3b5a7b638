"""What bi-sparse-attn edits in vLLM, as a table, and the entry point that applies it.

Standard library and :mod:`bi_kernels.runtime` only: vLLM logs and forgets an import error of a plug-in, so that an
entry module which fails to import would leave a stock engine running with the flag on.
"""

from __future__ import annotations

from typing import Any

from bi_kernels.runtime.hooks import HookPlan, Patch, activate
from bi_kernels.runtime.settings import Refusal

__all__ = ["PLAN", "REFUSED_SETTINGS", "register"]

_V4 = "vllm.models.deepseek_v4"
_ATTENTION = f"{_V4}.attention"
_FLASHMLA = f"{_V4}.nvidia.flashmla:DeepseekV4FlashMLAAttention"
_INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
_SWA = "vllm.v1.attention.backends.mla.sparse_swa"
_PREVIEW = "https://github.com/vllm-project/vllm/pull/54955"
_REFUSALS = "https://github.com/vllm-project/vllm/pull/57815"

_INDEXER_0_33 = (
    "the SparseAttnIndexer subclass for 0.33: compressed logits (max_seqlen_k), the decode selector in a class of its "
    "own, and the short-context branch that skips the indexer"
)
_ATTN_0_33 = (
    "the attention subclass for 0.33: projections, cache insert and attention are split over other methods, the C128 "
    "width follows the batch, and four backends must answer supports_batch_invariance()"
)


def _speculation(config: Any) -> str | None:
    return None if config.speculative_config is None else f"method {config.speculative_config.method}"


def _context_parallel(config: Any) -> str | None:
    decode, prefill = (getattr(config.parallel_config, f"{k}_context_parallel_size") for k in ("decode", "prefill"))
    return f"sizes {decode} and {prefill}" if max(decode, prefill) > 1 else None


def _fp4_indexer(config: Any) -> str | None:
    return "use_fp4_indexer_cache" if config.attention_config.use_fp4_indexer_cache else None


def _flashinfer(config: Any) -> str | None:
    backend = getattr(config.attention_config.backend, "name", "")
    return backend if "FLASHINFER" in backend else None


def _other_kv_cache(config: Any) -> str | None:
    found = config.cache_config.cache_dtype
    return None if found in ("fp8", "fp8_ds_mla") else found


def _no_hybrid_manager(config: Any) -> str | None:
    return "True" if config.scheduler_config.disable_hybrid_kv_cache_manager else None


REFUSED_SETTINGS = (
    Refusal(
        "MTP and DSpark speculation",
        "drafts are verified in rows of several queries, for DSpark over a non-causal window: selection and gather are "
        "not written for those shapes",
        "bi-sparse-attn",
        _speculation,
    ),
    Refusal(
        "DCP and PCP (context parallel size > 1)",
        "a token's keys are reduced per rank and then merged, so its bits follow the number of ranks",
        "bi-sparse-attn",
        _context_parallel,
    ),
    Refusal(
        "FP4 indexer cache (use_fp4_indexer_cache)",
        "FP4 keys are scored by other kernels, whose prefill and decode scores were never proven equal",
        "bi-sparse-attn",
        _fp4_indexer,
    ),
    Refusal(
        "FlashInfer DSv4 attention (FLASHINFER_MLA_SPARSE_DSV4)",
        "another kernel than the one that these hooks let decode, prefill and trainer share",
        "bi-sparse-attn",
        _flashinfer,
    ),
    Refusal(
        "kv_cache_dtype other than fp8 (fp8_ds_mla)",
        "gather and dequantisation are written for the 584-byte page of that format",
        "bi-sparse-attn",
        _other_kv_cache,
    ),
    Refusal(
        "disable_hybrid_kv_cache_manager",
        "compressed, window and compressor-state caches have page sizes of their own, which need the hybrid manager",
        "bi-sparse-attn",
        _no_hybrid_manager,
    ),
)


def _attention_class(version: str, *relies_on: str, needs: str = "") -> Patch:
    """The attention class of V4, by vLLM version, because the methods that the subclass overrides differ."""
    return Patch(
        target=f"{_V4}.nvidia.model:_select_dsv4_attn_cls",
        replacement="bi_sparse_attn.vllm_attention:select_attention_class",
        factory=True,
        why="Stock decode runs another kernel than prefill, in another index order, with splits planned from the whole "
        "batch; stock prefill groups requests; compressor and indexer kv_score are torch.mm calls that cuBLAS tiles by "
        "M, and its weights_proj is slow in vLLM's batch-invariant linear; the o-projection must fix its scale format "
        "by arch. Layers take their class from this function alone, so one subclass covers all of it and other models "
        "keep theirs.",
        upstream=f"{_PREVIEW}; https://github.com/deepseek-ai/FlashMLA/issues/212",
        remove_when="vLLM's DeepSeek-V4 attention has a batch-invariant path that decode and prefill share",
        versions=(version,),
        ready=not needs,
        needs=needs,
        relies_on=(
            _FLASHMLA,
            f"{_ATTENTION}:DeepseekV4Attention._fused_qnorm_rope_kv_insert",
            f"{_ATTENTION}:DeepseekV4Attention.forward",
            f"{_ATTENTION}:DeepseekV4Indexer",
            f"{_V4}.common.ops.cache_utils:combine_topk_swa_indices",
            f"{_V4}.common.ops.cache_utils:dequantize_and_gather_k_cache",
            f"{_V4}.common.ops.fused_indexer_q:fused_indexer_q_rope_quant",
            f"{_V4}.common.ops.fused_inv_rope_fp8_quant:fused_inv_rope_fp8_quant",
            f"{_V4}.compressor:DeepseekCompressor.forward",
            f"{_V4}.nvidia.ops.o_proj:compute_fp8_einsum_recipe",
            f"{_V4}.nvidia.ops.o_proj:deep_gemm_fp8_o_proj",
            f"{_V4}.sparse_mla:build_c128a_topk_metadata",
            f"{_SWA}:DeepseekSparseSWAMetadata",
            f"{_SWA}:DeepseekSparseSWAMetadataBuilder",
            "vllm.utils.deep_gemm:fp8_einsum",
            "vllm.v1.attention.backends.utils:split_decodes_and_prefills",
            "vllm.v1.worker.workspace:WorkspaceManager",
            *relies_on,
        ),
    )


def _indexer(version: str, *relies_on: str, needs: str = "") -> Patch:
    """The sparse indexer, by vLLM version, because its caller moved and decode selection became a class in 0.33."""
    return Patch(
        target=f"{_INDEXER}:SparseAttnIndexer",
        replacement="bi_sparse_attn.vllm_indexer:sparse_attn_indexer_class",
        factory=True,
        kind="oot_custom_op",
        why="Four selectors, chosen by row count and longest neighbour, emit in the order in which atomics arrive and "
        "break ties by it, so equal scores give another set or order from run to run.",
        upstream=f"{_PREVIEW}; {_REFUSALS}; https://github.com/vllm-project/vllm/pull/55872",
        remove_when="vLLM selects by a total order on score and index, for prefill and decode alike",
        versions=(version,),
        ready=not needs,
        needs=needs,
        relies_on=(
            f"{_INDEXER}:sparse_attn_indexer",
            f"{_ATTENTION}:DeepseekV4Indexer",
            "vllm.utils.deep_gemm:fp8_fp4_mqa_logits",
            "vllm.utils.deep_gemm:fp8_fp4_paged_mqa_logits",
            "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadataBuilder",
            "vllm.v1.attention.backends.mla.indexer:build_prefill_chunk_metadata",
            *relies_on,
        ),
    )


def _backend_0_33(target: str, replacement: str, relies_on: str) -> Patch:
    """A V4 cache layer's backend on 0.33, whose runner refuses backends that do not claim invariance."""
    return Patch(
        target=target,
        replacement=replacement,
        factory=True,
        why="On 0.33 the engine does not start while any of the four backends of a V4 layer inherits False from "
        "supports_batch_invariance(). The attention subclass answers for two of them; this cache layer names its own, "
        "and may say True only after every other check has passed.",
        upstream=_REFUSALS,
        remove_when="vLLM's own backend returns True from supports_batch_invariance()",
        versions=("0.33",),
        ready=False,
        needs=_ATTN_0_33,
        relies_on=(
            relies_on,
            "vllm.v1.attention.backend:AttentionBackend.supports_batch_invariance",
            "vllm.v1.worker.gpu.attn_utils:init_attn_backend",
        ),
    )


PLAN = HookPlan(
    package="bi-sparse-attn",
    import_name="bi_sparse_attn",
    requires_native=(
        "ds4_bi::top_k_per_row_prefill",
        "ds4_bi::combine_topk_swa",
        "ds4_bi::gather_decode_kv",
        "bi_kernels::fixed_order_mm",
    ),
    contracts=("bi_sparse_attn.vllm_contracts:FLASH_MLA", "bi_sparse_attn.vllm_contracts:INDEXER_SCORES"),
    self_tests=("bi_sparse_attn.vllm_contracts:self_tests",),
    patches=(
        Patch(
            target="vllm.envs:VLLM_DS4_DECODE_KERNEL",
            replacement="bi_sparse_attn.vllm_env:ds4_decode_kernel",
            kind="env",
            why="vLLM warns about, and in strict mode refuses, every VLLM_* variable that it does not know.",
            upstream=_PREVIEW,
            remove_when="vLLM knows the variable",
        ),
        _indexer(
            "0.26",
            "vllm._custom_ops:cp_gather_indexer_k_quant_cache",
            "vllm.model_executor.custom_op:CustomOp",
            "vllm.v1.attention.backends.mla.indexer:DeepSeekV32IndexerDecodeMetadata",
            "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadata",
            "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerPrefillChunkMetadata",
        ),
        _indexer(
            "0.33",
            "vllm.model_executor.layers.indexer_topk:SparseIndexerTopk",
            f"{_ATTENTION}:_fill_short_context_topk_indices",
            f"{_ATTENTION}:DeepseekV4Attention._sparse_indexer_and_attn",
            needs=_INDEXER_0_33,
        ),
        _attention_class(
            "0.26",
            f"{_ATTENTION}:DeepseekV4Attention.attn_gemm_parallel_execute",
            f"{_ATTENTION}:DeepseekV4Attention.attention_impl",
            f"{_V4}.nvidia.ops.dequant_gather_k_cutedsl:dequantize_and_gather_k_cache_cutedsl",
            f"{_V4}.nvidia.ops.fused_indexer_q_cutedsl:fused_indexer_q_rope_quant_fp8_cutedsl",
            f"{_V4}.sparse_mla:DeepseekV4FlashMLAMetadata",
            f"{_V4}.sparse_mla:DeepseekV4FlashMLAMetadataBuilder",
            "vllm.compilation.breakable_cudagraph:eager_break_during_capture",
            "vllm.third_party.flashmla.flash_mla_interface:flash_mla_sparse_fwd",
            "vllm.utils.multi_stream_utils:execute_in_parallel",
            "vllm.v1.attention.backend:CommonAttentionMetadata",
        ),
        _attention_class(
            "0.33",
            f"{_ATTENTION}:DeepseekV4Attention._prepare_and_attn",
            f"{_ATTENTION}:DeepseekV4Attention._run_parallel_input_projections",
            f"{_ATTENTION}:DeepseekV4Attention._sparse_indexer_and_attn",
            f"{_V4}.nvidia.flashmla:DeepseekSparseSWAFlashMLABackend",
            f"{_V4}.nvidia.flashmla:DeepseekSparseSWAFlashMLAMetadataBuilder",
            f"{_V4}.nvidia.ops.dequant_gather_k_cutedsl:DequantGatherKCacheKernel",
            f"{_V4}.nvidia.ops.fused_indexer_q_cutedsl:IndexerQFp8Kernel",
            f"{_V4}.sparse_mla:DeepseekV4FlashMLABackend",
            f"{_V4}.sparse_mla:DeepseekV4FlashMLAMetadataBuilder",
            f"{_V4}.sparse_mla:DeepseekV4SparseMLAMetadataBuilder",
            needs=_ATTN_0_33,
        ),
        _backend_0_33(
            f"{_ATTENTION}:DeepseekV4IndexerCache.get_attn_backend",
            "bi_sparse_attn.vllm_attention:indexer_cache_backend",
            "vllm.v1.attention.backends.mla.indexer:DeepseekV4IndexerBackend",
        ),
        _backend_0_33(
            f"{_V4}.compressor:CompressorStateCache.get_attn_backend",
            "bi_sparse_attn.vllm_attention:compressor_state_backend",
            f"{_V4}.compressor:CompressorBackend",
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
