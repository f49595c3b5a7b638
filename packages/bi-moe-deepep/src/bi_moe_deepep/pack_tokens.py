"""Packing: lay quantised tokens out by expert, without padding, for a grouped product that takes offsets."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_tensor, check_value

from ._ops import check_vectors, launch
from .reference.pack_tokens import PackedTokens

__all__ = ["PackedTokens", "pack_tokens"]

_BLOCK = 128


def pack_tokens(
    q: torch.Tensor, s: torch.Tensor, topk_ids: torch.Tensor, *, num_experts: int, out: PackedTokens | None = None
) -> PackedTokens:
    """Copy each quantised token to one row per routed slot, sorted by expert, then token, then slot. Exact op.

    Args:
        q: ``(num_tokens, hidden)``, float8_e4m3fn, ``hidden`` a multiple of 128. On a GPU rows start at multiples of 16
            bytes.
        s: ``(num_tokens, hidden / 128)``, float32, any strides: its scales.
        topk_ids: ``(num_tokens, top_k)``, int32 or int64; a negative one is a slot that is not routed. A token that
            names an expert twice has two rows.
        num_experts: Experts of the layer.
        out: Buffers of the shapes of :class:`PackedTokens`, written and returned; None for
            :meth:`PackedTokens.empty`.

    Returns:
        :class:`PackedTokens` ``(q, s, offsets, m_indices, slots)``. Rows of ``q`` and ``s`` that are nobody's, from
        ``offsets[num_experts]`` on, are left untouched.

    Raises:
        ArgumentError: A dtype, shape, stride or device does not fit, or an id names no expert (data is looked at on
            the CPU only; a GPU takes such a slot as not routed). Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel provides the op.

    Source: takes the place of vLLM's ``deepgemm_moe_permute``, whose ``ep_scatter`` pads each expert to 128 rows and
    takes rows from atomics.

    Invariance:
        No atomics: a slot's row is the number of slots before it in the order above. The bits of a row are those of its
        token, whatever the others hold.
    """
    check_tensor("q", q, dtype=torch.float8_e4m3fn, shape=("num_tokens", "hidden"))
    tokens, hidden = q.shape
    check_value("q", hidden % _BLOCK == 0, f"hidden in multiples of {_BLOCK}", hidden, "Pad the last dimension.")
    check_tensor("s", s, dtype=torch.float32, shape=(tokens, hidden // _BLOCK), device=q.device)
    check_tensor("topk_ids", topk_ids, dtype=(torch.int32, torch.int64), shape=(tokens, "top_k"), device=q.device)
    check_value("num_experts", num_experts >= 1, "a positive number", num_experts, "Pass the layer's experts.")
    if out is None:
        out = PackedTokens.empty(q, topk_ids, num_experts=num_experts)
    rows = topk_ids.numel()
    described = {
        "q": (q.dtype, (rows, hidden)),
        "s": (torch.float32, (rows, hidden // _BLOCK)),
        "offsets": (torch.int32, (num_experts + 1,)),
        "m_indices": (torch.int32, (rows,)),
        "slots": (torch.int32, tuple(topk_ids.shape)),
    }
    for (name, (dtype, shape)), tensor in zip(described.items(), out, strict=True):
        check_tensor(f"out.{name}", tensor, dtype=dtype, shape=shape, device=q.device, disjoint=True)
    if q.is_cuda:
        check_tensor("topk_ids", topk_ids, last_dim_contiguous=True)
        for name in ("offsets", "m_indices", "slots"):
            check_tensor(f"out.{name}", getattr(out, name), contiguous=True)
        check_vectors("q", q)
        check_vectors("out.q", out.q)
    launch("pack_tokens", *out, q, s, topk_ids)
    return out
