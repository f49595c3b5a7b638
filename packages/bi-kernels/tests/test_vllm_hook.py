"""The hook table of bi-kernels: inert when off, one complete refusal when on, an anchor for every target."""

from __future__ import annotations

from bi_kernels import vllm_hook
from bi_kernels.testing.hooks import HookTableTests


class TestVllmHook(HookTableTests):
    hook = vllm_hook
