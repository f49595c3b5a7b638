"""Scores of the C4 indexer."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_output, check_tensor

from ._ops import launch

__all__ = ["mqa_logits"]


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score every key for every token: ``k_scale * sum_h weights[h] * relu(q[h] . k)``.

    *Bounded op.* The reference: the dot product exact, rounded once to float32; heads in ascending order, multiply,
    then add, in float32; then the scale. On a GPU the op is DeepGEMM's; its contract is invariance and the bound,
    not these bits.

    Source: ``fp8_mqa_logits`` of DeepGEMM, as vLLM's sparse attention indexer calls it.

    Args:
        q: ``(tokens, heads, 128)`` float8_e4m3fn; its scale is folded into ``weights``.
        k: ``(keys, 128)`` float8_e4m3fn.
        k_scale: ``(keys,)`` float32.
        weights: ``(tokens, heads)`` float32.
        row_starts: ``(tokens,)`` int32, first key that the token may see.
        row_ends: ``(tokens,)`` int32, one past the last.
        out: ``(tokens, keys)`` float32 to write to, or None.

    Returns:
        ``out``, or a new ``(tokens, keys)`` float32; -inf outside a token's range. NaN operands give NaN.

    Raises:
        ArgumentError: A dtype, shape or device is wrong. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel.

    Invariance:
        Element ``(t, n)`` depends on row ``t`` of ``q`` and ``weights``, row ``n`` of ``k`` and ``k_scale``, and on
        whether ``n`` lies in the token's range.
    """
    check_tensor("q", q, dtype=torch.float8_e4m3fn, shape=("tokens", "heads", 128))
    device = q.device
    check_tensor("k", k, dtype=torch.float8_e4m3fn, shape=("keys", 128), device=device)
    tokens, heads, keys = q.shape[0], q.shape[1], k.shape[0]
    check_tensor("k_scale", k_scale, dtype=torch.float32, shape=(keys,), device=device)
    check_tensor("weights", weights, dtype=torch.float32, shape=(tokens, heads), device=device)
    check_tensor("row_starts", row_starts, dtype=torch.int32, shape=(tokens,), device=device)
    check_tensor("row_ends", row_ends, dtype=torch.int32, shape=(tokens,), device=device)
    if out is None:
        out = torch.empty((tokens, keys), dtype=torch.float32, device=device)
    check_output("out", out, torch.float32, (tokens, keys), device)
    launch("mqa_logits", device, q, k, k_scale, weights, row_starts, row_ends, out)
    return out
