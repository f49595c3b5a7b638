"""What hooks ask vLLM about the model that is being built."""

from __future__ import annotations

import sys
from typing import Any

from .deep_gemm_proof import V4_FLASH, DeepGemmShapes

__all__ = ["deep_gemm_shapes", "is_deepseek_v4"]


def is_deepseek_v4() -> bool:
    """Whether it is a DeepSeek-V4. Layers that V4 shares with other models are vLLM's own in those."""
    return getattr(_hf_config(), "model_type", None) == "deepseek_v4"


def deep_gemm_shapes() -> DeepGemmShapes:
    """Shapes of its FP8 weights on one rank; those of DeepSeek-V4-Flash where vLLM is not building a V4."""
    if "vllm.config" not in sys.modules or not is_deepseek_v4():
        return V4_FLASH
    config = _hf_config()
    return DeepGemmShapes.from_model(
        hidden=config.hidden_size,
        intermediate=config.moe_intermediate_size,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        q_lora=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora=config.o_lora_rank,
        index_heads=config.index_n_heads,
        index_head_dim=config.index_head_dim,
    )


def _hf_config() -> Any:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return getattr(getattr(config, "model_config", None), "hf_config", None)
