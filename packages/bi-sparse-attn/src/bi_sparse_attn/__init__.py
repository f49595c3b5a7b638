"""bi-sparse-attn: batch-invariant top-k selection, index lists, KV gather and sparse MLA for DeepSeek-V4.

Importing this package imports neither torch nor vLLM; names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bi_kernels.runtime.lazy import attach as _attach

from ._version import __version__

if TYPE_CHECKING:
    from ._native import native_available
    from .capacity import SparseCapacity
    from .combine_indices import c128_indices, combine_topk_swa
    from .decode_slots import fill_decode_slots_
    from .gather_kv import (
        DecodeKv,
        gather_decode_kv,
        gather_index_k,
        gather_kv,
        index_k_block_bytes,
        kv_block_bytes,
        quantize_and_insert_index_k_,
        quantize_and_insert_kv_,
    )
    from .mqa_logits import mqa_logits
    from .prefill_plan import Chunk, plan_prefill_chunks
    from .sparse_mla import SparseMlaOutput, sparse_mla_fwd
    from .top_k_per_row import fill_row_ranges_, top_k_per_row_prefill

__all__ = [
    "Chunk",
    "DecodeKv",
    "SparseCapacity",
    "SparseMlaOutput",
    "__version__",
    "c128_indices",
    "combine_topk_swa",
    "fill_decode_slots_",
    "fill_row_ranges_",
    "gather_decode_kv",
    "gather_index_k",
    "gather_kv",
    "index_k_block_bytes",
    "kv_block_bytes",
    "mqa_logits",
    "native_available",
    "plan_prefill_chunks",
    "quantize_and_insert_index_k_",
    "quantize_and_insert_kv_",
    "sparse_mla_fwd",
    "top_k_per_row_prefill",
]

_attach(
    __name__,
    {
        "native_available": "_native",
        "SparseCapacity": "capacity",
        "c128_indices": "combine_indices",
        "combine_topk_swa": "combine_indices",
        "fill_decode_slots_": "decode_slots",
        "DecodeKv": "gather_kv",
        "gather_decode_kv": "gather_kv",
        "gather_index_k": "gather_kv",
        "gather_kv": "gather_kv",
        "index_k_block_bytes": "gather_kv",
        "kv_block_bytes": "gather_kv",
        "quantize_and_insert_index_k_": "gather_kv",
        "quantize_and_insert_kv_": "gather_kv",
        "mqa_logits": "mqa_logits",
        "Chunk": "prefill_plan",
        "plan_prefill_chunks": "prefill_plan",
        "SparseMlaOutput": "sparse_mla",
        "sparse_mla_fwd": "sparse_mla",
        "fill_row_ranges_": "top_k_per_row",
        "top_k_per_row_prefill": "top_k_per_row",
    },
)
