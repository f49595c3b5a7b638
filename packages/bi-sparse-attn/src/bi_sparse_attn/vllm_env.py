"""The environment variable that the package adds to vLLM's table of known names."""

from __future__ import annotations

import os

__all__ = ["ds4_decode_kernel"]


def ds4_decode_kernel() -> str:
    """Value of ``VLLM_DS4_DECODE_KERNEL``; ``"sparse"`` when unset.

    Any other value is refused before the variable is ever read through vLLM (``vllm_hook.REFUSED_SETTINGS``), so this
    function only reports. Nothing reads it with the flag off.
    """
    return os.environ.get("VLLM_DS4_DECODE_KERNEL", "sparse")
