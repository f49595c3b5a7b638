"""Declarations of the ops: schema, and the reference as their CPU implementation. The library adds CUDA kernels."""

from __future__ import annotations

import torch

from bi_kernels.runtime.library import define_op

from . import _native  # noqa: F401  (registers the library, so that a missing kernel is reported with its reason)
from ._memory import refuse_overlap
from .reference.fingerprint import word_sum
from .reference.mhc_head import mhc_head as _mhc_head_reference
from .reference.mhc_post import mhc_post as _mhc_post_reference
from .reference.mhc_pre import mhc_pre as _mhc_pre_reference
from .reference.mhc_pre import mhc_pre_broadcast as _mhc_pre_broadcast_reference
from .reference.padded_copy import padded_copy_ as _padded_copy_reference

__all__ = ["fingerprint", "mhc_head", "mhc_post", "mhc_pre", "mhc_pre_broadcast", "padded_copy_"]


def _mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    sinkhorn_iters: int,
    post_mult: float,
    layer_input: torch.Tensor,
    post_mix: torch.Tensor,
    comb_mix: torch.Tensor,
) -> None:
    outputs = {"layer_input": layer_input, "post_mix": post_mix, "comb_mix": comb_mix}
    refuse_overlap(outputs, _present(residual=residual, fn=fn, scale=scale, base=base, norm_weight=norm_weight))
    result = _mhc_pre_reference(
        residual,
        fn,
        scale,
        base,
        norm_weight=norm_weight,
        rms_eps=rms_eps,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
        sinkhorn_iters=sinkhorn_iters,
        post_mult=post_mult,
    )
    for name, out in outputs.items():
        out.copy_(getattr(result, name))


def _mhc_pre_broadcast(
    x: torch.Tensor,
    fn_broadcast: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    sinkhorn_iters: int,
    post_mult: float,
    layer_input: torch.Tensor,
    post_mix: torch.Tensor,
    comb_mix: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    outputs = {"layer_input": layer_input, "post_mix": post_mix, "comb_mix": comb_mix, "residual": residual}
    refuse_overlap(outputs, _present(x=x, fn=fn_broadcast, scale=scale, base=base, norm_weight=norm_weight))
    result = _mhc_pre_broadcast_reference(
        x,
        fn_broadcast,
        scale,
        base,
        norm_weight=norm_weight,
        rms_eps=rms_eps,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
        sinkhorn_iters=sinkhorn_iters,
        post_mult=post_mult,
    )
    for name, out in outputs.items():
        out.copy_(getattr(result, name))


def _mhc_post(
    x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb_mix: torch.Tensor, out: torch.Tensor
) -> None:
    refuse_overlap({"out": out}, {"x": x, "residual": residual, "post_mix": post_mix, "comb_mix": comb_mix})
    out.copy_(_mhc_post_reference(x, residual, post_mix, comb_mix))


def _mhc_head(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    rms_eps: float,
    hc_eps: float,
    out: torch.Tensor,
) -> None:
    refuse_overlap({"out": out}, {"residual": residual, "fn": fn, "scale": scale, "base": base})
    out.copy_(_mhc_head_reference(residual, fn, scale, base, rms_eps=rms_eps, hc_eps=hc_eps))


def _padded_copy(dst: torch.Tensor, src: torch.Tensor, pad_bits: int) -> None:
    refuse_overlap({"dst": dst}, {"src": src})
    _padded_copy_reference(dst, src, pad_bits=pad_bits)


def _fingerprint(data: torch.Tensor, out: torch.Tensor) -> None:
    refuse_overlap({"out": out}, {"data": data})
    out.copy_(word_sum(data))


def _present(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


_PRE_SETTINGS = (
    "Tensor scale, Tensor base, Tensor? norm_weight, float rms_eps, float hc_eps, float norm_eps, int sinkhorn_iters, "
    "float post_mult, Tensor(a!) layer_input, Tensor(b!) post_mix, Tensor(c!) comb_mix"
)

mhc_pre = define_op("bi_reload", f"mhc_pre(Tensor residual, Tensor fn, {_PRE_SETTINGS}) -> ()", cpu=_mhc_pre)
mhc_pre_broadcast = define_op(
    "bi_reload",
    f"mhc_pre_broadcast(Tensor x, Tensor fn_broadcast, {_PRE_SETTINGS}, Tensor(d!) residual) -> ()",
    cpu=_mhc_pre_broadcast,
)
mhc_post = define_op(
    "bi_reload",
    "mhc_post(Tensor x, Tensor residual, Tensor post_mix, Tensor comb_mix, Tensor(a!) out) -> ()",
    cpu=_mhc_post,
)
mhc_head = define_op(
    "bi_reload",
    "mhc_head(Tensor residual, Tensor fn, Tensor scale, Tensor base, float rms_eps, float hc_eps, Tensor(a!) out) "
    "-> ()",
    cpu=_mhc_head,
)
padded_copy_ = define_op("bi_reload", "padded_copy_(Tensor(a!) dst, Tensor src, int pad_bits) -> ()", cpu=_padded_copy)
fingerprint = define_op("bi_reload", "fingerprint(Tensor data, Tensor(a!) out) -> ()", cpu=_fingerprint)
