"""bi-moe-deepep: batch-invariant router, expert capacity, FP8 experts and staged expert-parallel dispatch.

Importing this package imports neither torch nor vLLM; names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bi_kernels.runtime.lazy import attach as _attach

from ._version import __version__

if TYPE_CHECKING:
    from ._native import native_available
    from .capacity import ExpertCapacity
    from .combine_ordered import combine_ordered
    from .deep_gemm import (
        enable_deep_gemm_batch_invariance,
        probe_deep_gemm,
        supports_deep_gemm_batch_invariance,
    )
    from .deep_gemm_proof import DeepGemmShapes, prove_deep_gemm
    from .dispatch import (
        DispatchedTokens,
        InProcessTransport,
        SlicePlan,
        StagedDispatcher,
        Transport,
        TransportError,
        plan_slices,
    )
    from .experts import expert_mlp, expert_mlp_contiguous
    from .fp8_gemm import (
        fp8_gemm_nt,
        m_grouped_fp8_gemm_nt_contiguous,
        m_grouped_fp8_gemm_nt_masked,
        m_grouped_fp8_gemm_nt_offsets,
    )
    from .pack_tokens import PackedTokens, pack_tokens
    from .router import router_gate_logits, select_experts
    from .stage_tokens import StagedTokens, stage_tokens
    from .transport_deepep import DeepEPTransport
    from .transport_torch import TorchTransport

__all__ = [
    "DeepEPTransport",
    "DeepGemmShapes",
    "DispatchedTokens",
    "ExpertCapacity",
    "InProcessTransport",
    "PackedTokens",
    "SlicePlan",
    "StagedDispatcher",
    "StagedTokens",
    "TorchTransport",
    "Transport",
    "TransportError",
    "__version__",
    "combine_ordered",
    "enable_deep_gemm_batch_invariance",
    "expert_mlp",
    "expert_mlp_contiguous",
    "fp8_gemm_nt",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_offsets",
    "native_available",
    "pack_tokens",
    "plan_slices",
    "probe_deep_gemm",
    "prove_deep_gemm",
    "router_gate_logits",
    "select_experts",
    "stage_tokens",
    "supports_deep_gemm_batch_invariance",
]

_attach(
    __name__,
    {
        "native_available": "_native",
        "ExpertCapacity": "capacity",
        "combine_ordered": "combine_ordered",
        "enable_deep_gemm_batch_invariance": "deep_gemm",
        "probe_deep_gemm": "deep_gemm",
        "supports_deep_gemm_batch_invariance": "deep_gemm",
        "DeepGemmShapes": "deep_gemm_proof",
        "prove_deep_gemm": "deep_gemm_proof",
        "DispatchedTokens": "dispatch",
        "InProcessTransport": "dispatch",
        "SlicePlan": "dispatch",
        "StagedDispatcher": "dispatch",
        "Transport": "dispatch",
        "TransportError": "dispatch",
        "plan_slices": "dispatch",
        "expert_mlp": "experts",
        "expert_mlp_contiguous": "experts",
        "fp8_gemm_nt": "fp8_gemm",
        "m_grouped_fp8_gemm_nt_contiguous": "fp8_gemm",
        "m_grouped_fp8_gemm_nt_masked": "fp8_gemm",
        "m_grouped_fp8_gemm_nt_offsets": "fp8_gemm",
        "PackedTokens": "pack_tokens",
        "pack_tokens": "pack_tokens",
        "router_gate_logits": "router",
        "select_experts": "router",
        "StagedTokens": "stage_tokens",
        "stage_tokens": "stage_tokens",
        "DeepEPTransport": "transport_deepep",
        "TorchTransport": "transport_torch",
    },
)
