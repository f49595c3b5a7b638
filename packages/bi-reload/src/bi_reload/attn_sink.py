"""Attention sinks: a rank's heads from the checkpoint, -inf in the padding heads."""

from __future__ import annotations

import math

import torch

from bi_kernels.runtime.checks import check_tensor, check_value
from bi_kernels.runtime.errors import ReloadError

from .padded_copy import padded_copy_

__all__ = ["load_attn_sink_"]


def load_attn_sink_(param: torch.Tensor, loaded: torch.Tensor, *, first_head: int = 0, num_heads: int) -> None:
    """Load one rank's attention sinks in place and keep the padding at -inf. An *exact op*, by ``padded_copy_``.

    A sink of -inf adds exp(-inf) = 0 to the softmax of a padding head. Every element of ``param`` is written, so a
    stale or random tail cannot survive, and loaders that count elements see all of them.

    Args:
        param: ``(padded_heads,)`` float32. Keeps its address.
        loaded: ``(heads,)`` float32, the checkpoint's sinks of all ranks.
        first_head: This rank's first head.
        num_heads: This rank's number of heads.

    Raises:
        ArgumentError: Wrong dtype (a sink that crossed the wire in bfloat16 has lost its bits), wrong shape, or heads
            outside of ``loaded`` or ``param``. Nothing was written.
        ReloadError: ``param`` or ``loaded`` is on the meta device: a copy into it would be silently lost.

    Source:
        vLLM's ``attn_sink`` branch of ``DeepseekV4Model.load_weights``, as a loader of the parameter.

    Invariance:
        Bits are moved, never computed.
    """
    check_tensor("param", param, dtype=torch.float32, shape=("padded_heads",))
    check_tensor("loaded", loaded, dtype=torch.float32, shape=("heads",))
    if loaded.is_meta or param.is_meta:  # before the slice below, which a meta tensor would pass
        name = "param" if param.is_meta else "loaded"
        raise ReloadError(f"{name}: expected real memory, got a meta tensor. Materialise it before loading.")
    heads, padded_heads = loaded.shape[0], param.shape[0]
    check_value(
        "num_heads",
        0 < num_heads <= padded_heads,
        f"1 to {padded_heads}, the padded heads of param",
        num_heads,
        "Check the tensor-parallel size.",
    )
    check_value(
        "first_head",
        first_head >= 0 and first_head + num_heads <= heads,
        f"heads within the checkpoint's {heads}",
        f"{first_head} to {first_head + num_heads - 1}",
        "Check rank and tensor-parallel size.",
    )
    padded_copy_(param, loaded[first_head : first_head + num_heads].to(param.device), pad_value=-math.inf)
