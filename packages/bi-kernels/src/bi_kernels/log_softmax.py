"""Log-probabilities: one implementation for rollout and trainer."""

from __future__ import annotations

import torch

from . import _ops
from .reference import log_softmax as reference
from .runtime.checks import check_tensor, check_value
from .runtime.native import require_native

__all__ = ["CUDA_COLUMNS", "log_softmax", "selected_logprobs"]

CUDA_COLUMNS = 262_144
"""The longest row that the CUDA kernel takes."""
_TREE_LEVELS = 5
_MAXIMA = 32  # blocks of the longest row


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the full vocabulary.

    *Exact op*. ``(x - max) - log(sum(exp(x - max)))`` in float32, with the exponential, the logarithm and the sum's
    fixed tree of :mod:`bi_kernels.reference.numerics`; the kernel equals the reference bit for bit.

    An entry of -inf gets -inf. A row with a NaN, with +inf, or of nothing but -inf is NaN (0x7fc00000) throughout.

    Args:
        logits: ``(T, V)``, float32; raw, neither scaled by a temperature nor truncated. V is at least 1;
            on a GPU at most :data:`CUDA_COLUMNS`. For bits that a trainer shares with vLLM they must be
            :func:`bi_kernels.fixed_order_mm` of the hidden state and the ``lm_head`` to bfloat16, cast to float32.

    Returns:
        ``(T, V)`` float32.

    Raises:
        ArgumentError: Wrong dtype or shape.
        NativeLibraryError: ``logits`` is on a GPU and the compiled kernel is missing.

    Invariance:
        Row ``i`` of the result depends on row ``i`` of ``logits`` alone, bit for bit.

    Source: design.md, *Logprobs*; vLLM ``v1/sample/sampler.py: compute_logprobs``.
    """
    _check_logits(logits)
    rows, columns = logits.shape
    if logits.is_cuda:
        check_value(
            "logits", columns <= CUDA_COLUMNS, f"at most {CUDA_COLUMNS} columns on a GPU", columns, "Use the CPU."
        )
        require_native("bi_kernels::log_softmax")
        if logits.stride(1) != 1:
            logits = logits.contiguous()
    out = torch.empty((rows, columns), dtype=torch.float32, device=logits.device)
    nodes = -(-columns >> _TREE_LEVELS)  # halved and rounded up five times
    _ops.log_softmax(logits, out.new_empty((rows, _MAXIMA + nodes)), out)
    return out


def selected_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of one token per row: the bits of :func:`log_softmax` at that token.

    *Exact op*; any device.

    Args:
        logits: As in :func:`log_softmax`.
        token_ids: ``(T,)``, int32 or int64, in ``[0, V)``.

    Returns:
        ``(T,)`` float32.

    Raises:
        ArgumentError: Wrong dtype, shape or device, or (on the CPU, where looking is free of a device sync) an id
            outside the vocabulary. On a GPU torch's gather stops the kernel.

    Invariance:
        Element ``i`` depends on row ``i`` of ``logits`` and on ``token_ids[i]`` alone, bit for bit.

    Source: as :func:`log_softmax`.
    """
    _check_logits(logits)
    check_tensor(
        "token_ids", token_ids, dtype=(torch.int32, torch.int64), shape=(logits.shape[0],), device=logits.device
    )
    if token_ids.device.type == "cpu" and token_ids.numel():
        low, high = (int(v) for v in token_ids.aminmax())
        check_value(
            "token_ids",
            low >= 0 and high < logits.shape[1],
            f"ids from 0 to {logits.shape[1] - 1}",
            f"ids from {low} to {high}",
            "Check which tokenizer made them.",
        )
    return reference.selected_logprobs(logits, token_ids)


def _check_logits(logits: torch.Tensor) -> None:
    check_tensor("logits", logits, dtype=torch.float32, shape=("T", "V"))
    check_value("logits", not logits.is_meta, "a tensor with memory", "a meta tensor", "Materialise it.")
    check_value("logits", logits.shape[1] > 0, "at least one column", tuple(logits.shape), "Pass the vocabulary.")
