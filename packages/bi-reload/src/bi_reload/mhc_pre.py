"""mHC before a layer: mix the four residual streams into the layer's input, and make the gates for after it."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_tensor, check_value
from bi_kernels.runtime.native import require_native

from . import _ops
from .reference.mhc_pre import HC_MULT, MhcPre, MhcPreBroadcast, mhc_num_splits

__all__ = ["MhcPre", "MhcPreBroadcast", "mhc_num_splits", "mhc_pre", "mhc_pre_broadcast"]

_NUM_MIXES = 2 * HC_MULT + HC_MULT * HC_MULT


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    sinkhorn_iters: int = 20,
    post_mult: float = 2.0,
    out: MhcPre | None = None,
) -> MhcPre:
    """Mix the residual streams into the layer's input, on one path at every token count. A *bounded op*.

    With ``x`` the ``4 H`` values of a token, all in float32, each step rounded once:

    1. ``mixes = (fn @ x) * (1 / sqrt(sum(x**2) / (4 H) + rms_eps))``. Both sums run over :func:`mhc_num_splits` pieces
       of K, added ascending; in the reference each piece of the product is the exact sum rounded once, in the CUDA
       kernel it is a fixed order of matrix-unit steps, within ``reference.mhc_pre.projection_error_bound``.
    2. ``pre = sigmoid(mixes[0:4] * scale[0] + base[0:4]) + hc_eps``,
       ``post = sigmoid(mixes[4:8] * scale[1] + base[4:8]) * post_mult``.
    3. ``comb`` ``[old stream, new stream]``: softmax of ``mixes[8:] * scale[2] + base[8:]`` over the new stream, plus
       ``hc_eps``; then columns divided by their sum plus ``hc_eps``; then ``sinkhorn_iters - 1`` times rows, then
       columns, likewise. Sums of four are added ascending.
    4. ``y = pre[0] * x[0] + pre[1] * x[1] + ...``, stream ascending, multiply then add, rounded to bfloat16.
    5. With ``norm_weight``: RMSNorm of that *rounded* ``y``: ``y * (1 / sqrt(sum(y**2) / H + norm_eps))``, times the
       weight, rounded to bfloat16. (vLLM's kernel takes the sum from the unrounded ``y`` and scales the
       rounded one; with both from the rounded value, the fused norm equals the separate one.)

    Args:
        residual: ``(T, 4, H)`` bfloat16, contiguous; ``H`` a multiple of 64, on a GPU at most 16,384. T may be 0.
        fn: ``(24, 4 H)`` float32, contiguous, finite. Rows 0-3 pre, 4-7 post, 8-23 comb (row-major).
        scale: ``(3,)`` float32, contiguous: pre, post, comb.
        base: ``(24,)`` float32, contiguous.
        norm_weight: ``(H,)`` bfloat16, contiguous: the attention's or feed-forward's RMSNorm weight; None for no norm.
        rms_eps: Added to the mean square of the ``4 H`` values.
        hc_eps: Added to the pre gates, to the softmax and to every Sinkhorn sum.
        norm_eps: Added to the mean square of ``y``.
        sinkhorn_iters: Iterations, at least 1.
        post_mult: Factor of the post gates.
        out: Buffers to write to, of the result's shapes and dtypes, contiguous, apart from the inputs; None allocates.

    Returns:
        :class:`MhcPre`: ``layer_input`` ``(T, H)`` bfloat16, ``post_mix`` ``(T, 4)`` and ``comb_mix`` ``(T, 4, 4)``
        float32. A token with NaN, or with infinities of both signs, gets NaN; other tokens are untouched.

    There is no backward: results never require a gradient.

    Raises:
        ArgumentError: An argument is not as described. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel for them.
        RuntimeError: What only the kernel checks, before it writes: overlapping memory, or memory that does not start
            at a multiple of 16 bytes.

    Source:
        vLLM's ``mhc_pre_tilelang``; design.md, "Settled numerics", mHC.

    Invariance:
        Row ``i`` of every result is a function of ``residual[i]`` and the weights alone, bit for bit: the split is a
        function of ``4 H``, and no other arithmetic is chosen for few tokens.
    """
    check_tensor("residual", residual, dtype=torch.bfloat16, shape=("T", HC_MULT, "H"), contiguous=True)
    num_tokens, _, hidden = residual.shape
    _check_weights("fn", fn, scale, base, norm_weight, HC_MULT * hidden, hidden, residual.device)
    _check_settings(rms_eps, hc_eps, norm_eps, sinkhorn_iters, post_mult)
    mhc_num_splits(HC_MULT * hidden)  # raises if H does not fit
    out = MhcPre(*_outputs(out, MhcPre, num_tokens, hidden, residual.device))
    if residual.device.type == "cuda":
        require_native("bi_reload::mhc_pre")
    _ops.mhc_pre(residual, fn, scale, base, norm_weight, rms_eps, hc_eps, norm_eps, sinkhorn_iters, post_mult, *out)
    return out


def mhc_pre_broadcast(
    x: torch.Tensor,
    fn_broadcast: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    sinkhorn_iters: int = 20,
    post_mult: float = 2.0,
    out: MhcPreBroadcast | None = None,
) -> MhcPreBroadcast:
    """As :func:`mhc_pre`, for layer 0, whose four streams are all the embedding. A *bounded op*.

    The arithmetic is :func:`mhc_pre`'s on ``x`` repeated four times, but the projection is ``fn_broadcast @ x``, a
    quarter of the work, and the mean square is taken over ``x`` once. In real numbers that is the same; its bits are
    its own, so a model uses one of the two for layer 0, always.

    Args:
        x: ``(T, H)`` bfloat16, contiguous; ``H`` a multiple of 64, at least 128, on a GPU at most 16,384. T may be 0.
        fn_broadcast: ``(24, H)`` float32, contiguous, kept up to date by :func:`bi_reload.refresh_mhc_broadcast_`.
        scale: As for :func:`mhc_pre`.
        base: As for :func:`mhc_pre`.
        norm_weight: As for :func:`mhc_pre`.
        rms_eps: As for :func:`mhc_pre`.
        hc_eps: As for :func:`mhc_pre`.
        norm_eps: As for :func:`mhc_pre`.
        sinkhorn_iters: As for :func:`mhc_pre`.
        post_mult: As for :func:`mhc_pre`.
        out: As for :func:`mhc_pre`.

    Returns:
        :class:`MhcPreBroadcast`: as :class:`MhcPre`, and ``residual`` ``(T, 4, H)`` bfloat16, ``x`` in every stream.

    There is no backward: results never require a gradient.

    Raises:
        ArgumentError: An argument is not as described. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel for them.
        RuntimeError: As for :func:`mhc_pre`.

    Source:
        vLLM's ``mhc_pre_broadcast_tilelang``; design.md, "Settled numerics", mHC.

    Invariance:
        Row ``i`` of every result is a function of ``x[i]`` and the weights alone, bit for bit.
    """
    check_tensor("x", x, dtype=torch.bfloat16, shape=("T", "H"), contiguous=True)
    num_tokens, hidden = x.shape
    _check_weights("fn_broadcast", fn_broadcast, scale, base, norm_weight, hidden, hidden, x.device)
    _check_settings(rms_eps, hc_eps, norm_eps, sinkhorn_iters, post_mult)
    mhc_num_splits(hidden)  # raises if H does not fit
    out = MhcPreBroadcast(*_outputs(out, MhcPreBroadcast, num_tokens, hidden, x.device))
    if x.device.type == "cuda":
        require_native("bi_reload::mhc_pre_broadcast")
    _ops.mhc_pre_broadcast(
        x, fn_broadcast, scale, base, norm_weight, rms_eps, hc_eps, norm_eps, sinkhorn_iters, post_mult, *out
    )
    return out


def _check_weights(
    name: str,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    k: int,
    hidden: int,
    device: torch.device,
) -> None:
    float32 = torch.float32
    check_tensor(name, fn, dtype=float32, shape=(_NUM_MIXES, k), device=device, contiguous=True)
    check_tensor("scale", scale, dtype=float32, shape=(3,), device=device, contiguous=True)
    check_tensor("base", base, dtype=float32, shape=(_NUM_MIXES,), device=device, contiguous=True)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, dtype=torch.bfloat16, shape=(hidden,), device=device, contiguous=True)


def _check_settings(rms_eps: float, hc_eps: float, norm_eps: float, sinkhorn_iters: int, post_mult: float) -> None:
    for name, eps in (("rms_eps", rms_eps), ("hc_eps", hc_eps), ("norm_eps", norm_eps)):
        check_value(name, 0.0 <= eps < 1.0, "a number in [0, 1)", eps, "Take it from the model's configuration.")
    check_value("sinkhorn_iters", sinkhorn_iters >= 1, "at least 1", sinkhorn_iters, "Take it from the model.")
    check_value("post_mult", 0.0 < post_mult < float("inf"), "a positive number", post_mult, "DeepSeek-V4 has 2.")


def _outputs(
    out: MhcPre | MhcPreBroadcast | None,
    kind: type[MhcPre | MhcPreBroadcast],
    num_tokens: int,
    hidden: int,
    device: torch.device,
) -> list[torch.Tensor]:
    """Allocate the results, or check the caller's."""
    specs = {
        "layer_input": (torch.bfloat16, (num_tokens, hidden)),
        "post_mix": (torch.float32, (num_tokens, HC_MULT)),
        "comb_mix": (torch.float32, (num_tokens, HC_MULT, HC_MULT)),
        "residual": (torch.bfloat16, (num_tokens, HC_MULT, hidden)),
    }
    if out is None:
        return [
            torch.empty(shape, dtype=dtype, device=device) for dtype, shape in (specs[field] for field in kind._fields)
        ]
    check_value("out", isinstance(out, kind), kind.__name__, type(out).__name__, "Build it from your buffers.")
    for field, tensor in out._asdict().items():
        dtype, shape = specs[field]
        check_tensor(f"out.{field}", tensor, dtype=dtype, shape=shape, device=device, contiguous=True)
    return list(out)
