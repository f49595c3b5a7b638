"""Stands in for vLLM: has no plug-ins, or with ``STAND_IN_HOOKS`` four that say they are active and edit nothing."""

from __future__ import annotations

import os


def load_general_plugins() -> None:
    """There are none, or all of them."""
    if os.environ.get("STAND_IN_HOOKS"):
        from bi_kernels.runtime import hooks
        from bi_kernels.runtime.packages import PACKAGES

        records = {
            package: hooks.HookRecord(package=package, version="0.1.0", vllm="0.26.0", patches=())
            for package in PACKAGES
        }
        hooks.active_records = lambda: records
