"""What hooks ask vLLM about the model that is being built."""

from __future__ import annotations

__all__ = ["is_deepseek_v4"]


def is_deepseek_v4() -> bool:
    """Whether it is a DeepSeek-V4. Layers that V4 shares with other models are vLLM's own in those."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    model = getattr(config, "model_config", None)
    return getattr(getattr(model, "hf_config", None), "model_type", None) == "deepseek_v4"
