"""The hook table of bi-sparse-attn: inert when off, one complete refusal when on, an anchor for every target."""

from __future__ import annotations

from bi_kernels.testing.hooks import HookTableTests
from bi_sparse_attn import vllm_hook


class TestVllmHook(HookTableTests):
    hook = vllm_hook
