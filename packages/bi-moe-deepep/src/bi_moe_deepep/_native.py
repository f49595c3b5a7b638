"""The compiled library of this package."""

from __future__ import annotations

from bi_kernels.runtime.native import NativeLibrary

__all__ = ["NATIVE", "native_available"]

# Three of the GEMMs are declared in _ops but are not here: on a GPU they are DeepGEMM's, held to a contract.
NATIVE = NativeLibrary(
    package="bi-moe-deepep",
    import_name="bi_moe_deepep",
    namespace="bi_moe_deepep",
    ops=("select_experts", "stage_tokens", "pack_tokens", "combine_ordered", "m_grouped_fp8_gemm_nt_offsets"),
)


def native_available() -> bool:
    """Whether the compiled library is loaded, or loads now, with all its kernels."""
    return NATIVE.available()
