"""The compiled library of bi-sparse-attn."""

from __future__ import annotations

from bi_kernels.runtime.native import NativeLibrary

__all__ = ["NATIVE", "native_available"]

# In vLLM the caches are filled by vLLM's own fused kernels; quantize_and_insert_* are here for those who have none, and
# to compare with. mqa_logits and sparse_mla_fwd are declared in _ops but are not here: on a GPU they are DeepGEMM's and
# FlashMLA's.
NATIVE = NativeLibrary(
    package="bi-sparse-attn",
    import_name="bi_sparse_attn",
    namespace="ds4_bi",
    ops=(
        "top_k_per_row_prefill",
        "combine_topk_swa",
        "c128_indices",
        "quantize_and_insert_kv",
        "gather_kv",
        "quantize_and_insert_index_k",
        "gather_index_k",
        "gather_decode_kv",
    ),
)


def native_available() -> bool:
    """Whether the compiled library of bi-sparse-attn is loaded and complete."""
    return NATIVE.available()
