"""The hook table of bi-sparse-attn: inert when off, one complete refusal when on, an anchor for every target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from bi_kernels.testing.hooks import HookTableTests
from bi_sparse_attn import vllm_hook


class TestVllmHook(HookTableTests):
    hook = vllm_hook
    asks: ClassVar = {
        "MTP and DSpark speculation": {"speculative_config": SimpleNamespace(method="mtp")},
        "DCP and PCP (context parallel size > 1)": {"parallel_config__prefill_context_parallel_size": 2},
        "FP4 indexer cache (use_fp4_indexer_cache)": {"attention_config__use_fp4_indexer_cache": True},
        "FlashInfer DSv4 attention (FLASHINFER_MLA_SPARSE_DSV4)": {
            "attention_config__backend": SimpleNamespace(name="FLASHINFER_MLA_SPARSE_DSV4")
        },
        "kv_cache_dtype other than fp8 (fp8_ds_mla)": {"cache_config__cache_dtype": "auto"},
        "disable_hybrid_kv_cache_manager": {"scheduler_config__disable_hybrid_kv_cache_manager": True},
    }
