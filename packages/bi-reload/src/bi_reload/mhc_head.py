"""mHC after the last layer: mix the four residual streams into one."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_tensor, check_value
from bi_kernels.runtime.native import require_native

from . import _ops
from .reference.mhc_pre import HC_MULT, mhc_num_splits

__all__ = ["mhc_head"]


def mhc_head(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Collapse the streams before the final norm. A *bounded op*.

    ``pre = sigmoid((fn @ x) * (1 / sqrt(sum(x**2) / (4 H) + rms_eps)) * scale + base) + hc_eps``, over the same split
    of K as :func:`bi_reload.mhc_pre`; then the sum of ``pre[j] * residual[j]``, stream ascending, multiply then add in
    float32, rounded once to bfloat16.

    Args:
        residual: ``(T, 4, H)`` bfloat16, contiguous; ``H`` a multiple of 64, on a GPU at most 16,384. T may be 0.
        fn: ``(4, 4 H)`` float32, contiguous.
        scale: ``(1,)`` float32.
        base: ``(4,)`` float32, contiguous.
        rms_eps: Added to the mean square of the ``4 H`` values.
        hc_eps: Added to the gates.
        out: ``(T, H)`` bfloat16, contiguous, apart from the inputs; None allocates.

    Returns:
        ``(T, H)`` bfloat16. A token with NaN gets NaN (0x7fc0); other tokens are untouched.

    There is no backward: results never require a gradient.

    Raises:
        ArgumentError: An argument is not as described. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel for them.
        RuntimeError: As for :func:`bi_reload.mhc_pre`.

    Source:
        vLLM's ``hc_head_fused_kernel_tilelang``.

    Invariance:
        Row ``i`` is a function of ``residual[i]`` and the weights alone, bit for bit.
    """
    check_tensor("residual", residual, dtype=torch.bfloat16, shape=("T", HC_MULT, "H"), contiguous=True)
    num_tokens, _, hidden = residual.shape
    device, float32 = residual.device, torch.float32
    check_tensor("fn", fn, dtype=float32, shape=(HC_MULT, HC_MULT * hidden), device=device, contiguous=True)
    check_tensor("scale", scale, dtype=float32, shape=(1,), device=device)
    check_tensor("base", base, dtype=float32, shape=(HC_MULT,), device=device, contiguous=True)
    for name, eps in (("rms_eps", rms_eps), ("hc_eps", hc_eps)):
        check_value(name, 0.0 <= eps < 1.0, "a number in [0, 1)", eps, "Take it from the model's configuration.")
    mhc_num_splits(HC_MULT * hidden)  # raises if H does not fit
    if out is None:
        out = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=device)
    else:
        check_tensor("out", out, dtype=torch.bfloat16, shape=(num_tokens, hidden), device=device, contiguous=True)
    if device.type == "cuda":
        require_native("bi_reload::mhc_head")
    _ops.mhc_head(residual, fn, scale, base, rms_eps, hc_eps, out)
    return out
