"""The compiled library of bi-kernels."""

from __future__ import annotations

from .runtime.native import NativeLibrary

__all__ = ["NATIVE", "native_available"]

NATIVE = NativeLibrary(
    package="bi-kernels",
    import_name="bi_kernels",
    namespace="bi_kernels",
    ops=("fixed_order_mm", "fused_silu_mul_per_token_group_quant", "log_softmax"),
)


def native_available() -> bool:
    """Whether the compiled library of bi-kernels is loaded and complete."""
    return NATIVE.available()
