"""The ops of namespace ``bi_moe_deepep``: schemas, and the references as CPU implementations.

Every op writes to outputs that its caller provides and returns nothing, so its fake has nothing to compute.
"""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_value
from bi_kernels.runtime.library import define_op
from bi_kernels.runtime.native import require_native

from ._native import NATIVE
from .reference import combine_ordered, fp8_gemm, pack_tokens, router, stage_tokens

__all__ = ["check_vectors", "launch"]


def _fp8_gemm_nt(out: torch.Tensor, q: torch.Tensor, s: torch.Tensor, wq: torch.Tensor, ws: torch.Tensor) -> None:
    fp8_gemm.fp8_gemm_nt(q, s, wq, ws, out=out)


def _contiguous(
    out: torch.Tensor,
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    m_indices: torch.Tensor,
) -> None:
    fp8_gemm.m_grouped_fp8_gemm_nt_contiguous(q, s, wq, ws, m_indices, out=out)


def _masked(
    out: torch.Tensor,
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    masked_m: torch.Tensor,
) -> None:
    fp8_gemm.m_grouped_fp8_gemm_nt_masked(q, s, wq, ws, masked_m, out=out)


def _offsets(
    out: torch.Tensor,
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    fp8_gemm.m_grouped_fp8_gemm_nt_offsets(q, s, wq, ws, offsets, out=out)


def _select_experts(
    weights: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    tid2eid: torch.Tensor | None,
    renormalize: bool,
    routed_scaling_factor: float,
) -> None:
    router.select_experts(
        logits,
        top_k=weights.shape[1],
        bias=bias,
        token_ids=token_ids,
        tid2eid=tid2eid,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        out_weights=weights,
        out_ids=ids,
    )


def _stage_tokens(
    staged_x: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    first_expert: int,
) -> None:
    num_local_experts, capacity = staged_x.shape[:2]
    stage_tokens.stage_tokens(
        x,
        topk_ids,
        num_experts=num_experts,
        capacity=capacity,
        first_expert=first_expert,
        num_local_experts=num_local_experts,
        out=stage_tokens.StagedTokens(staged_x, counts, slots),
    )


def _pack_tokens(
    packed_q: torch.Tensor,
    packed_s: torch.Tensor,
    offsets: torch.Tensor,
    m_indices: torch.Tensor,
    slots: torch.Tensor,
    q: torch.Tensor,
    s: torch.Tensor,
    topk_ids: torch.Tensor,
) -> None:
    out = pack_tokens.PackedTokens(packed_q, packed_s, offsets, m_indices, slots)
    pack_tokens.pack_tokens(q, s, topk_ids, num_experts=len(offsets) - 1, out=out)


def _combine_ordered(
    out: torch.Tensor,
    expert_out: torch.Tensor,
    slots: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor | None,
) -> None:
    combine_ordered.combine_ordered(expert_out, slots, topk_weights, topk_ids=topk_ids, out=out)


_GEMM = "Tensor(a!) out, Tensor q, Tensor s, Tensor wq, Tensor ws"
_OPS = {
    schema.split("(", 1)[0]: define_op(NATIVE.namespace, schema, cpu=cpu)
    for schema, cpu in (
        (f"fp8_gemm_nt({_GEMM}) -> ()", _fp8_gemm_nt),
        (f"m_grouped_fp8_gemm_nt_contiguous({_GEMM}, Tensor m_indices) -> ()", _contiguous),
        (f"m_grouped_fp8_gemm_nt_masked({_GEMM}, Tensor masked_m) -> ()", _masked),
        (f"m_grouped_fp8_gemm_nt_offsets({_GEMM}, Tensor offsets) -> ()", _offsets),
        (
            "select_experts(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, Tensor? bias, Tensor? token_ids, "
            "Tensor? tid2eid, bool renormalize, float routed_scaling_factor) -> ()",
            _select_experts,
        ),
        (
            "stage_tokens(Tensor(a!) staged_x, Tensor(b!) counts, Tensor(c!) slots, Tensor x, Tensor topk_ids, "
            "int num_experts, int first_expert) -> ()",
            _stage_tokens,
        ),
        (
            "pack_tokens(Tensor(a!) packed_q, Tensor(b!) packed_s, Tensor(c!) offsets, Tensor(d!) m_indices, "
            "Tensor(e!) slots, Tensor q, Tensor s, Tensor topk_ids) -> ()",
            _pack_tokens,
        ),
        (
            "combine_ordered(Tensor(a!) out, Tensor expert_out, Tensor slots, Tensor topk_weights, "
            "Tensor? topk_ids) -> ()",
            _combine_ordered,
        ),
    )
}


def launch(name: str, out: torch.Tensor, *args: torch.Tensor | float | None) -> None:
    """Run op ``name`` on the device of ``out``.

    Raises:
        NativeLibraryError: ``out`` is a CUDA tensor and the op has no kernel there.
    """
    if out.is_cuda:
        require_native(f"{NATIVE.namespace}::{name}")
    _OPS[name](out, *args)


def check_vectors(name: str, tensor: torch.Tensor) -> None:
    """Raise unless a kernel may move the rows of ``tensor`` in pieces of 16 bytes.

    Raises:
        ArgumentError: The rows have gaps, another length or another start.
    """
    size = tensor.element_size()
    aligned = tensor.shape[-1] % 8 == 0 and (tensor.numel() == 0 or tensor.data_ptr() % 16 == 0)
    for length, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
        aligned = aligned and (length <= 1 or stride * size % 16 == 0)
    aligned = aligned and (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1)
    check_value(
        name,
        aligned,
        "rows of a multiple of 8 elements that start at multiples of 16 bytes",
        f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
        "Make it contiguous.",
    )
