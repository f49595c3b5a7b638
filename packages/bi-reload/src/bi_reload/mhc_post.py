"""mHC after a layer: write the layer's output back into the four residual streams."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_tensor
from bi_kernels.runtime.native import require_native

from . import _ops
from .reference.mhc_pre import HC_MULT

__all__ = ["mhc_post"]


def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    comb_mix: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write a layer's output into the residual streams, at every token count by itself. An *exact op*.

    ``out[k] = post_mix[k] * x + comb_mix[0, k] * residual[0] + ... + comb_mix[3, k] * residual[3]``, in this order, in
    float32, each product and each sum rounded (no fma), and once more to bfloat16 at the end. The next
    :func:`bi_reload.mhc_pre` reads these rounded values; vLLM's fused path takes unrounded ones up to 16 tokens.

    Args:
        x: ``(T, H)`` bfloat16, contiguous: the layer's output. T may be 0.
        residual: ``(T, 4, H)`` bfloat16, contiguous: the streams before the layer.
        post_mix: ``(T, 4)`` float32, contiguous, from :func:`bi_reload.mhc_pre`.
        comb_mix: ``(T, 4, 4)`` float32, contiguous, ``[old stream, new stream]``, from :func:`bi_reload.mhc_pre`.
        out: ``(T, 4, H)`` bfloat16, contiguous, apart from the inputs; None allocates.

    Returns:
        ``(T, 4, H)`` bfloat16: the streams after the layer. NaN is always 0x7fc0.

    There is no backward: results never require a gradient.

    Raises:
        ArgumentError: An argument is not as described. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel for them.
        RuntimeError: What only the kernel checks, before it writes: overlapping memory.

    Source:
        vLLM's ``mhc_post_tilelang``; design.md, "Settled numerics", mHC.

    Invariance:
        Row ``i`` is a function of row ``i`` of the arguments alone, bit for bit.
    """
    check_tensor("x", x, dtype=torch.bfloat16, shape=("T", "H"), contiguous=True)
    num_tokens, hidden = x.shape
    device = x.device
    streams = (num_tokens, HC_MULT, hidden)
    check_tensor("residual", residual, dtype=torch.bfloat16, shape=streams, device=device, contiguous=True)
    check_tensor("post_mix", post_mix, dtype=torch.float32, shape=(num_tokens, HC_MULT), device=device, contiguous=True)
    check_tensor(
        "comb_mix", comb_mix, dtype=torch.float32, shape=(num_tokens, HC_MULT, HC_MULT), device=device, contiguous=True
    )
    if out is None:
        out = torch.empty_like(residual)
    else:
        check_tensor("out", out, dtype=torch.bfloat16, shape=streams, device=device, contiguous=True)
    if device.type == "cuda":
        require_native("bi_reload::mhc_post")
    _ops.mhc_post(x, residual, post_mix, comb_mix, out)
    return out
