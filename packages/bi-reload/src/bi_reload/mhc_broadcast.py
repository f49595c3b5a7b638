"""Layer 0's mHC projection, summed over the streams that are all alike there, refreshed in place."""

from __future__ import annotations

import torch

from bi_kernels.runtime.checks import check_tensor
from bi_kernels.runtime.errors import ReloadError

from ._memory import refuse_overlap
from .reference.mhc_broadcast import mhc_broadcast
from .reference.mhc_pre import HC_MULT

__all__ = ["refresh_mhc_broadcast_"]


def refresh_mhc_broadcast_(dst: torch.Tensor, fn: torch.Tensor) -> None:
    """Recompute ``hc_attn_fn_broadcast`` from ``hc_attn_fn`` at its old address. An *exact op*.

    Three float32 additions per element, ``((fn0 + fn1) + fn2) + fn3``: IEEE gives them the same bits on every device,
    so torch's own kernels are used everywhere. A captured graph keeps reading ``dst``; a new tensor it would never see.

    Args:
        dst: ``(24, H)`` float32, apart from ``fn`` in memory. Keeps its address.
        fn: ``(24, 4 * H)`` float32, same device.

    Raises:
        ArgumentError: Wrong dtype, shape, device, or overlapping memory. Nothing was written.
        ReloadError: ``dst`` or ``fn`` is on the meta device: refresh after the last bucket, not before.

    Source:
        vLLM's ``DeepseekV4Model.finalize_mhc_broadcast_weights``, which allocates instead.

    Invariance:
        A function of ``fn`` alone.
    """
    check_tensor("dst", dst, dtype=torch.float32, shape=("rows", "H"))
    rows, hidden = dst.shape
    for name, tensor in (("dst", dst), ("fn", fn)):
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise ReloadError(
                f"{name}: expected real memory, got a meta tensor. Refresh the broadcast after the last bucket."
            )
    check_tensor("fn", fn, dtype=torch.float32, shape=(rows, HC_MULT * hidden), device=dst.device)
    refuse_overlap({"dst": dst}, {"fn": fn})
    with torch.no_grad():
        dst.copy_(mhc_broadcast(fn))
