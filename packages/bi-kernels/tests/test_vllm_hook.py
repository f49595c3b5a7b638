"""The hook table of bi-kernels: inert when off, one complete refusal when on, an anchor for every target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from bi_kernels import vllm_hook
from bi_kernels.testing.hooks import HookTableTests


class TestVllmHook(HookTableTests):
    hook = vllm_hook
    asks: ClassVar = {
        "LoRA (enable_lora)": {"lora_config": SimpleNamespace(max_lora_rank=16)},
        vllm_hook.GPU_REFUSAL.feature: {"capability": (12, 0)},
        "float32 head (head_dtype)": {"model_config__head_dtype": "torch.float32"},
        "vocabulary of no multiple of 64 columns per rank (vocab_size)": {
            "model_config__hf_config": SimpleNamespace(vocab_size=129_280),  # 2020 times 64
            "parallel_config__tensor_parallel_size": 8,
        },
    }
