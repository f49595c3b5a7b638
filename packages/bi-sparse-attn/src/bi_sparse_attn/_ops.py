"""The ops of namespace ``ds4_bi``: schemas, and the references as CPU implementations.

Every op writes to outputs that its caller provides and returns nothing, so its fake has nothing to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bi_kernels.runtime.library import define_op
from bi_kernels.runtime.native import require_native

from . import _native
from .reference import combine_indices, gather_kv, mqa_logits, sparse_mla, top_k_per_row

__all__ = ["launch"]


def _top_k_per_row_prefill(logits: Any, row_starts: Any, row_ends: Any, indices: Any, top_k: int) -> None:
    top_k_per_row.top_k_per_row_prefill(logits, row_starts, row_ends, top_k, out=indices)


def _combine_topk_swa(
    topk_indices: Any,
    positions: Any,
    gather_starts: Any,
    row_offsets: Any,
    indices: Any,
    lengths: Any,
    compress_ratio: int,
    window_size: int,
    compressed_rows: int,
    row_offset: int,
) -> None:
    combine_indices.combine_topk_swa(
        topk_indices,
        positions,
        gather_starts,
        compress_ratio=compress_ratio,
        window_size=window_size,
        compressed_rows=compressed_rows,
        row_offset=row_offset if row_offsets is None else row_offsets,
        out_indices=indices,
        out_lengths=lengths,
    )


def _c128_indices(positions: Any, indices: Any) -> None:
    combine_indices.c128_indices(positions, width=indices.shape[1], out=indices)


def _quantize_and_insert_kv(cache: Any, kv: Any, slots: Any, block_size: int) -> None:
    gather_kv.quantize_and_insert_kv_(cache, kv, slots, block_size=block_size)


def _gather_kv(cache: Any, slots: Any, out: Any, block_size: int) -> None:
    gather_kv.gather_kv(cache, slots, block_size=block_size, out=out)


def _quantize_and_insert_index_k(cache: Any, k: Any, slots: Any, block_size: int) -> None:
    gather_kv.quantize_and_insert_index_k_(cache, k, slots, block_size=block_size)


def _gather_index_k(cache: Any, slots: Any, q: Any, scale: Any, block_size: int) -> None:
    gather_kv.gather_index_k(cache, slots, block_size=block_size, out_q=q, out_scale=scale)


def _gather_decode_kv(
    compressed_cache: Any,
    window_cache: Any,
    compressed_slots: Any,
    window_slots: Any,
    workspace: Any,
    indices: Any,
    lengths: Any,
    compressed_block_size: int,
    window_block_size: int,
) -> None:
    gather_kv.gather_decode_kv(
        compressed_cache,
        window_cache,
        compressed_slots,
        window_slots,
        compressed_block_size=compressed_block_size,
        window_block_size=window_block_size,
        out=workspace,
        out_indices=indices,
        out_lengths=lengths,
    )


def _mqa_logits(q: Any, k: Any, k_scale: Any, weights: Any, row_starts: Any, row_ends: Any, logits: Any) -> None:
    mqa_logits.mqa_logits(q, k, k_scale, weights, row_starts, row_ends, out=logits)


def _sparse_mla_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    attn_sink: Any,
    topk_length: Any,
    out: Any,
    max_logits: Any,
    lse: Any,
    sm_scale: float,
) -> None:
    result = sparse_mla.sparse_mla_fwd(
        q, kv, indices, sm_scale=sm_scale, attn_sink=attn_sink, topk_length=topk_length, out=out
    )
    max_logits.copy_(result.max_logits)
    lse.copy_(result.lse)


_SCHEMAS: dict[str, Callable[..., None]] = {
    "top_k_per_row_prefill(Tensor logits, Tensor row_starts, Tensor row_ends, Tensor(a!) indices, int top_k) -> ()": (
        _top_k_per_row_prefill
    ),
    "combine_topk_swa(Tensor topk_indices, Tensor positions, Tensor gather_starts, Tensor? row_offsets, "
    "Tensor(a!) indices, Tensor(b!) lengths, int compress_ratio, int window_size, int compressed_rows, "
    "int row_offset) -> ()": (_combine_topk_swa),
    "c128_indices(Tensor positions, Tensor(a!) indices) -> ()": _c128_indices,
    "quantize_and_insert_kv(Tensor(a!) cache, Tensor kv, Tensor slots, int block_size) -> ()": _quantize_and_insert_kv,
    "gather_kv(Tensor cache, Tensor slots, Tensor(a!) out, int block_size) -> ()": _gather_kv,
    "quantize_and_insert_index_k(Tensor(a!) cache, Tensor k, Tensor slots, int block_size) -> ()": (
        _quantize_and_insert_index_k
    ),
    "gather_index_k(Tensor cache, Tensor slots, Tensor(a!) q, Tensor(b!) scale, int block_size) -> ()": _gather_index_k,
    "gather_decode_kv(Tensor? compressed_cache, Tensor window_cache, Tensor compressed_slots, Tensor window_slots, "
    "Tensor(a!) workspace, Tensor(b!) indices, Tensor(c!) lengths, int compressed_block_size, "
    "int window_block_size) -> ()": _gather_decode_kv,
    "mqa_logits(Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor row_starts, Tensor row_ends, "
    "Tensor(a!) logits) -> ()": _mqa_logits,
    "sparse_mla_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? attn_sink, Tensor? topk_length, Tensor(a!) out, "
    "Tensor(b!) max_logits, Tensor(c!) lse, float sm_scale) -> ()": _sparse_mla_fwd,
}
_OPS = {
    schema.split("(", 1)[0]: define_op(_native.NATIVE.namespace, schema, cpu=cpu) for schema, cpu in _SCHEMAS.items()
}


def launch(name: str, device: torch.device, *args: Any) -> None:
    """Run op ``name``: the reference on CPU tensors, the kernel on CUDA tensors.

    Raises:
        NativeLibraryError: CUDA tensors, and no kernel.
    """
    if device.type == "cuda":
        require_native(f"{_native.NATIVE.namespace}::{name}")
    _OPS[name](*args)
