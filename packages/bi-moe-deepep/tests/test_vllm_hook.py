"""The hook table of bi-moe-deepep: inert when off, one complete refusal when on, an anchor for every target."""

from __future__ import annotations

from bi_kernels.testing.hooks import HookTableTests
from bi_moe_deepep import vllm_hook


class TestVllmHook(HookTableTests):
    hook = vllm_hook
