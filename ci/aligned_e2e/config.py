"""Sizes of the small DeepSeek-V4 and of the deployment that serves it. Nothing here depends on a batch."""

from __future__ import annotations

from dataclasses import dataclass

from bi_kernels import Arch

__all__ = ["Deployment", "ModelConfig"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A DeepSeek-V4 with every architectural part and small dimensions.

    What the byte formats and kernels fix is as in the real model: head_dim 512 with a 64-wide RoPE part, window 128,
    four residual streams, index_head_dim 128, blocks of 128 in every FP8 tensor. ``index_topk`` is small, so that
    prompts of a few hundred tokens lie past ``4 * index_topk``, where top-k really selects.
    """

    vocab_size: int
    hidden_size: int = 256
    compress_ratios: tuple[int, ...] = (0, 4, 128, 4)
    num_hash_layers: int = 1
    num_heads: int = 4
    padded_heads: int = 8
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 128
    window: int = 128
    index_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 64
    num_experts: int = 8
    experts_per_token: int = 3
    moe_intermediate: int = 128
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn_factor: float = 4.0
    yarn_original_positions: int = 256
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    arch: Arch = Arch.SM90

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.compress_ratios)

    def overlap(self, layer: int) -> int:
        """Series per compressed entry: C4 entries also see the window before (2), C128 entries do not (1)."""
        return 2 if self.compress_ratios[layer] == 4 else 1


@dataclass(frozen=True, slots=True)
class Deployment:
    """Capacities that rollout and actor agree on before the first token."""

    max_model_len: int = 1024
    max_num_batched_tokens: int = 512
    window_page: int = 64
    block: int = 256
    prefill_chunk: int = 512
    expert_capacity: int = 256
    temperature: float = 1.0
