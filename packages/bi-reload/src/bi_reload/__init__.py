"""bi-reload: explicit mHC ops, stable addresses, and weight reload that keeps addresses and bits.

Importing this package imports neither torch nor vLLM; names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bi_kernels.runtime.lazy import attach as _attach

from ._version import __version__

if TYPE_CHECKING:
    from ._native import native_available
    from .addresses import AddressDifference, AddressEntry, AddressLedger, AddressMovedError
    from .attn_sink import load_attn_sink_
    from .finalize import (
        LayerwiseReload,
        ReloadReport,
        TensorSpec,
        finalize_weights_after_layerwise_reload,
        require_servable,
    )
    from .fingerprint import weight_fingerprint
    from .mhc_broadcast import refresh_mhc_broadcast_
    from .mhc_head import mhc_head
    from .mhc_post import mhc_post
    from .mhc_pre import MhcPre, MhcPreBroadcast, mhc_num_splits, mhc_pre, mhc_pre_broadcast
    from .padded_copy import padded_copy_

__all__ = [
    "AddressDifference",
    "AddressEntry",
    "AddressLedger",
    "AddressMovedError",
    "LayerwiseReload",
    "MhcPre",
    "MhcPreBroadcast",
    "ReloadReport",
    "TensorSpec",
    "__version__",
    "finalize_weights_after_layerwise_reload",
    "load_attn_sink_",
    "mhc_head",
    "mhc_num_splits",
    "mhc_post",
    "mhc_pre",
    "mhc_pre_broadcast",
    "native_available",
    "padded_copy_",
    "refresh_mhc_broadcast_",
    "require_servable",
    "weight_fingerprint",
]

_attach(
    __name__,
    {
        "native_available": "_native",
        "AddressDifference": "addresses",
        "AddressEntry": "addresses",
        "AddressLedger": "addresses",
        "AddressMovedError": "addresses",
        "load_attn_sink_": "attn_sink",
        "LayerwiseReload": "finalize",
        "ReloadReport": "finalize",
        "TensorSpec": "finalize",
        "finalize_weights_after_layerwise_reload": "finalize",
        "require_servable": "finalize",
        "weight_fingerprint": "fingerprint",
        "refresh_mhc_broadcast_": "mhc_broadcast",
        "mhc_head": "mhc_head",
        "mhc_post": "mhc_post",
        "MhcPre": "mhc_pre",
        "MhcPreBroadcast": "mhc_pre",
        "mhc_num_splits": "mhc_pre",
        "mhc_pre": "mhc_pre",
        "mhc_pre_broadcast": "mhc_pre",
        "padded_copy_": "padded_copy",
    },
)
