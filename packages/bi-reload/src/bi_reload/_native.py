"""The compiled library of bi-reload."""

from __future__ import annotations

from bi_kernels.runtime.native import NativeLibrary

__all__ = ["NATIVE", "native_available"]

NATIVE = NativeLibrary(
    package="bi-reload",
    import_name="bi_reload",
    namespace="bi_reload",
    ops=("fingerprint", "mhc_head", "mhc_post", "mhc_pre", "mhc_pre_broadcast", "padded_copy_"),
)


def native_available() -> bool:
    """Whether the compiled library of bi-reload is loaded and complete."""
    return NATIVE.available()
