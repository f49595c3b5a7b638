"""bi-kernels: batch-invariant activation, quantisation and projection ops, and the runtime of the four packages.

Importing this package imports neither torch nor vLLM; names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._version import __version__
from .runtime.lazy import attach as _attach

if TYPE_CHECKING:
    from ._native import native_available
    from .arch import Arch, detect_arch
    from .fixed_order_mm import fixed_order_mm, split_k
    from .group_quant import dequantize, per_block_quant_fp8, per_token_group_quant_fp8
    from .log_softmax import log_softmax, selected_logprobs
    from .runtime.attest import Attestation, attest
    from .runtime.errors import (
        ArgumentError,
        AttestationError,
        BatchInvarianceError,
        BlockedError,
        Blocker,
        CapacityError,
        ContractError,
        HookError,
        NativeLibraryError,
        ReloadError,
        UnsupportedArchError,
    )
    from .runtime.mode import is_enabled, is_partial
    from .runtime.native import require_native
    from .scale_format import ScaleFormat, ceil_to_ue8m0, pack_ue8m0, scale_format_for, unpack_ue8m0
    from .silu_mul_quant import fused_silu_mul_per_token_group_quant, silu_and_mul

__all__ = [
    "Arch",
    "ArgumentError",
    "Attestation",
    "AttestationError",
    "BatchInvarianceError",
    "BlockedError",
    "Blocker",
    "CapacityError",
    "ContractError",
    "HookError",
    "NativeLibraryError",
    "ReloadError",
    "ScaleFormat",
    "UnsupportedArchError",
    "__version__",
    "attest",
    "ceil_to_ue8m0",
    "dequantize",
    "detect_arch",
    "fixed_order_mm",
    "fused_silu_mul_per_token_group_quant",
    "is_enabled",
    "is_partial",
    "log_softmax",
    "native_available",
    "pack_ue8m0",
    "per_block_quant_fp8",
    "per_token_group_quant_fp8",
    "require_native",
    "scale_format_for",
    "selected_logprobs",
    "silu_and_mul",
    "split_k",
    "unpack_ue8m0",
]

_attach(
    __name__,
    {
        "native_available": "_native",
        "Arch": "arch",
        "detect_arch": "arch",
        "fixed_order_mm": "fixed_order_mm",
        "split_k": "fixed_order_mm",
        "dequantize": "group_quant",
        "per_block_quant_fp8": "group_quant",
        "per_token_group_quant_fp8": "group_quant",
        "log_softmax": "log_softmax",
        "selected_logprobs": "log_softmax",
        "Attestation": "runtime.attest",
        "attest": "runtime.attest",
        "ArgumentError": "runtime.errors",
        "AttestationError": "runtime.errors",
        "BatchInvarianceError": "runtime.errors",
        "BlockedError": "runtime.errors",
        "Blocker": "runtime.errors",
        "CapacityError": "runtime.errors",
        "ContractError": "runtime.errors",
        "HookError": "runtime.errors",
        "NativeLibraryError": "runtime.errors",
        "ReloadError": "runtime.errors",
        "UnsupportedArchError": "runtime.errors",
        "is_enabled": "runtime.mode",
        "is_partial": "runtime.mode",
        "require_native": "runtime.native",
        "ScaleFormat": "scale_format",
        "ceil_to_ue8m0": "scale_format",
        "pack_ue8m0": "scale_format",
        "scale_format_for": "scale_format",
        "unpack_ue8m0": "scale_format",
        "fused_silu_mul_per_token_group_quant": "silu_mul_quant",
        "silu_and_mul": "silu_mul_quant",
    },
)
