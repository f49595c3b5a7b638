"""The hook table of bi-moe-deepep: inert when off, one complete refusal when on, an anchor for every target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from bi_kernels.testing.hooks import HookTableTests, plain_config
from bi_moe_deepep import vllm_hook


class TestVllmHook(HookTableTests):
    hook = vllm_hook
    asks: ClassVar = {
        "tensor parallel size > 1": {"parallel_config__tensor_parallel_size": 2},
        "pipeline parallel size > 1": {"parallel_config__pipeline_parallel_size": 2},
        "all-to-all backends other than DeepEP low latency and BI_EP_TRANSPORT=nccl": {
            "parallel_config__data_parallel_size": 2,
            "parallel_config__enable_expert_parallel": True,
        },
        "EPLB (enable_eplb)": {"parallel_config__enable_eplb": True},
        "DBO (enable_dbo)": {"parallel_config__use_ubatching": True},
        "mega-MoE (moe_backend deep_gemm_mega_moe and other fused dispatch backends)": {
            "kernel_config__moe_backend": "deep_gemm_mega_moe"
        },
        "FP4 experts on Hopper (expert_dtype fp4)": {"model_config__hf_config": SimpleNamespace()},
    }

    def test_every_patch_is_ready_where_it_has_run(self):
        assert all(patch.ready for patch in vllm_hook.PLAN.patches_for("0.26.0"))
        assert not all(patch.ready for patch in vllm_hook.PLAN.patches_for("0.33.0"))

    def test_expert_parallelism_over_a_known_transport_is_not_refused(self, monkeypatch):
        refused = {entry.feature: entry.found for entry in vllm_hook.REFUSED_SETTINGS}
        found = next(found for feature, found in refused.items() if feature.startswith("all-to-all"))
        two = {"parallel_config__data_parallel_size": 2, "parallel_config__enable_expert_parallel": True}
        assert found(plain_config(**two, parallel_config__all2all_backend="deepep_low_latency")) is None
        assert "without" in found(plain_config(parallel_config__data_parallel_size=2))
        monkeypatch.setenv("BI_EP_TRANSPORT", "nccl")
        assert found(plain_config(**two)) is None
