"""The hook table of bi-reload: inert when off, one complete refusal when on, an anchor for every target."""

from __future__ import annotations

from typing import ClassVar

from bi_kernels.testing.hooks import HookTableTests
from bi_reload import vllm_hook


class TestVllmHook(HookTableTests):
    hook = vllm_hook
    asks: ClassVar = {"load_format dummy": {"load_config__load_format": "dummy"}}
