"""vLLM's mHC functions on the explicit ops: what the hook installs where the model modules look them up.

Imported only after vLLM has imported the module that is edited. Arguments and results are vLLM's, in vLLM's order, so
that its decoder layer stays as it is. ``n_splits`` and ``tile_n`` are accepted and ignored, as vLLM ignores them: the
split of a sum is a function of its length (:func:`bi_reload.mhc_num_splits`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bi_kernels.runtime.checks import check_value
from bi_kernels.runtime.errors import ArgumentError

from . import mhc_head, mhc_num_splits
from . import mhc_post as post_op
from . import mhc_pre as pre_op
from . import mhc_pre_broadcast as pre_broadcast_op

__all__ = [
    "constant_num_split",
    "hc_head_fused_kernel",
    "mhc_fused_post_pre",
    "mhc_post",
    "mhc_pre",
    "mhc_pre_broadcast",
]


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``mhc_pre_tilelang`` by :func:`bi_reload.mhc_pre`, for every token count.

    Args:
        residual: ``(..., 4, H)`` bfloat16.
        fn: ``(24, 4 H)`` float32.
        hc_scale: ``(3,)`` float32.
        hc_base: ``(24,)`` float32.
        rms_eps: Of the ``4 H`` values.
        hc_pre_eps: Must equal ``hc_sinkhorn_eps``; the op has one.
        hc_sinkhorn_eps: See ``hc_pre_eps``.
        hc_post_mult_value: Factor of the post gates.
        sinkhorn_repeat: Iterations.
        n_splits: Ignored.
        norm_weight: ``(H,)`` bfloat16, or None for no norm.
        norm_eps: Of the norm.

    Returns:
        ``post_mix`` ``(..., 4, 1)``, ``comb_mix`` ``(..., 4, 4)``, ``layer_input`` ``(..., H)``.

    Raises:
        ArgumentError: As :func:`bi_reload.mhc_pre`, and for two different eps.

    Source: vLLM's ``mhc_pre_tilelang``.

    Invariance:
        Row ``i`` of every result is a function of row ``i`` and the weights alone, bit for bit.
    """
    eps = _one_eps(hc_pre_eps, hc_sinkhorn_eps)
    outer = residual.shape[:-2]
    flat = residual.reshape(-1, *residual.shape[-2:])
    made = pre_op(
        flat,
        fn,
        hc_scale,
        hc_base,
        norm_weight=norm_weight,
        rms_eps=rms_eps,
        hc_eps=eps,
        norm_eps=norm_eps,
        sinkhorn_iters=sinkhorn_repeat,
        post_mult=hc_post_mult_value,
    )
    streams, hidden = residual.shape[-2:]
    return (
        made.post_mix.view(*outer, streams, 1),
        made.comb_mix.view(*outer, streams, streams),
        made.layer_input.view(*outer, hidden),
    )


def mhc_pre_broadcast(
    residual: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    fn_broadcast: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``mhc_pre_broadcast_tilelang`` by :func:`bi_reload.mhc_pre_broadcast`.

    Args:
        residual: ``(T, H)`` bfloat16, the embedding.
        fn: ``(24, 4 H)`` float32; not read, its sum over the streams is.
        hc_scale: As for :func:`mhc_pre`, and so are all arguments up to ``norm_eps``.
        hc_base: See there.
        rms_eps: See there.
        hc_pre_eps: See there.
        hc_sinkhorn_eps: See there.
        hc_post_mult_value: See there.
        sinkhorn_repeat: See there.
        n_splits: Ignored.
        norm_weight: See there.
        norm_eps: See there.
        fn_broadcast: ``(24, H)`` float32, the sum over the streams.

    Returns:
        ``residual`` ``(T, 4, H)``, ``post_mix`` ``(T, 4, 1)``, ``comb_mix`` ``(T, 4, 4)``, ``layer_input`` ``(T, H)``.

    Raises:
        ArgumentError: As :func:`bi_reload.mhc_pre_broadcast`, for two different eps, and without ``fn_broadcast``.

    Source: vLLM's ``mhc_pre_broadcast_tilelang``.

    Invariance:
        As :func:`mhc_pre`.
    """
    eps = _one_eps(hc_pre_eps, hc_sinkhorn_eps)
    if fn_broadcast is None:
        raise ArgumentError("fn_broadcast", "hc_attn_fn summed over the streams", "None", "Load weights first.")
    made = pre_broadcast_op(
        residual,
        fn_broadcast,
        hc_scale,
        hc_base,
        norm_weight=norm_weight,
        rms_eps=rms_eps,
        hc_eps=eps,
        norm_eps=norm_eps,
        sinkhorn_iters=sinkhorn_repeat,
        post_mult=hc_post_mult_value,
    )
    return made.residual, made.post_mix.unsqueeze(-1), made.comb_mix, made.layer_input


def mhc_post(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """``mhc_post_tilelang`` by :func:`bi_reload.mhc_post`, an *exact op*.

    Args:
        x: ``(..., H)`` bfloat16.
        residual: ``(..., 4, H)`` bfloat16.
        post_layer_mix: ``(..., 4, 1)`` float32.
        comb_res_mix: ``(..., 4, 4)`` float32.

    Returns:
        ``(..., 4, H)`` bfloat16.

    Raises:
        ArgumentError: As :func:`bi_reload.mhc_post`.

    Source: vLLM's ``mhc_post_tilelang``.

    Invariance:
        Row ``i`` is a function of row ``i`` of the arguments alone, bit for bit.
    """
    streams, hidden = residual.shape[-2:]
    out = post_op(
        x.reshape(-1, hidden),
        residual.reshape(-1, streams, hidden),
        post_layer_mix.reshape(-1, streams),
        comb_res_mix.reshape(-1, streams, streams),
    )
    return out.view(residual.shape)


def mhc_fused_post_pre(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``mhc_fused_post_pre_tilelang`` as post, then pre: one arithmetic for every token count.

    vLLM's fused path takes the mean square from residuals before their rounding to bfloat16 for few tokens, and after
    it for many. Here pre reads what post has rounded, always.

    Args:
        x: As for :func:`mhc_post`.
        residual: As for :func:`mhc_post`.
        post_layer_mix: As for :func:`mhc_post`.
        comb_res_mix: As for :func:`mhc_post`.
        fn: As for :func:`mhc_pre`, and so are the rest.
        hc_scale: See there.
        hc_base: See there.
        rms_eps: See there.
        hc_pre_eps: See there.
        hc_sinkhorn_eps: See there.
        hc_post_mult_value: See there.
        sinkhorn_repeat: See there.
        n_splits: Ignored.
        tile_n: Ignored.
        norm_weight: See there.
        norm_eps: See there.

    Returns:
        The new residual ``(..., 4, H)``, and what :func:`mhc_pre` returns.

    Raises:
        ArgumentError: As :func:`mhc_post` and :func:`mhc_pre`.

    Source: vLLM's ``mhc_fused_post_pre_tilelang``; design.md, "Settled numerics", mHC.

    Invariance:
        As :func:`mhc_pre`.
    """
    _one_eps(hc_pre_eps, hc_sinkhorn_eps)
    streams = mhc_post(x, residual, post_layer_mix, comb_res_mix)
    mixed = mhc_pre(
        streams,
        fn,
        hc_scale,
        hc_base,
        rms_eps,
        hc_pre_eps,
        hc_sinkhorn_eps,
        hc_post_mult_value,
        sinkhorn_repeat,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
    )
    return streams, *mixed


def hc_head_fused_kernel(
    hs_flat: torch.Tensor,
    fn: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """``hc_head_fused_kernel_tilelang`` by :func:`bi_reload.mhc_head`.

    Args:
        hs_flat: ``(T, 4, H)`` bfloat16.
        fn: ``(4, 4 H)`` float32.
        hc_scale: ``(1,)`` float32.
        hc_base: ``(4,)`` float32.
        rms_eps: Of the ``4 H`` values.
        hc_eps: Added to the gates.

    Returns:
        ``(T, H)`` bfloat16.

    Raises:
        ArgumentError: As :func:`bi_reload.mhc_head`.

    Source: vLLM's ``hc_head_fused_kernel_tilelang``.

    Invariance:
        Row ``i`` is a function of row ``i`` and the weights alone, bit for bit.
    """
    return mhc_head(hs_flat, fn, hc_scale, hc_base, rms_eps=rms_eps, hc_eps=hc_eps)


def constant_num_split(original: Callable[..., int]) -> Callable[..., int]:
    """``compute_num_split``, asked by vLLM's own mHC functions: a function of the sum's length alone.

    Args:
        original: vLLM's, which divides the multiprocessors by the blocks of tokens; not called.

    Returns:
        The new ``compute_num_split(block_k, k, grid_size)``. Without ``k`` it raises ArgumentError.

    Source: vLLM's ``tilelang_kernels.compute_num_split``; design.md, "Settled numerics", mHC.

    Invariance:
        Neither tokens (``grid_size``) nor multiprocessors are asked.
    """

    def compute_num_split(block_k: int, k: int | None, grid_size: int) -> int:
        if k is None:
            raise ArgumentError("k", "the length of the sum", "None", "Pass K; a split cannot follow the grid.")
        return mhc_num_splits(k)

    return compute_num_split


def _one_eps(pre: float, sinkhorn: float) -> float:
    check_value("hc_sinkhorn_eps", pre == sinkhorn, f"hc_pre_eps ({pre})", sinkhorn, "DeepSeek-V4 has one hc_eps.")
    return pre
