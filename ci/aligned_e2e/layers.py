"""The parts of the small model that no package owns, made of the packages' exact arithmetic.

They stand where vLLM has kernels that are row-local already (norms, RoPE, the compressor's pooling), so that the
whole model's bits are a function of weights and prefix on any machine.
"""

from __future__ import annotations

import math

import torch

from bi_kernels.reference import numerics

from .config import ModelConfig

__all__ = ["pool_entries", "rms_norm", "rope", "rope_table", "rounded"]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as they are kept between ops: bfloat16. The one place that a precision policy replaces."""
    return x.bfloat16()


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in float32, rounded once to bfloat16.

    Args:
        x: ``(..., n)`` bfloat16 or float32.
        weight: ``(n,)`` bfloat16, or None for no weight.
        eps: Added to the mean square.
    """
    wide = x.float()
    mean = numerics.tree_sum(wide * wide) / x.shape[-1]
    scaled = wide * (1.0 / numerics.sqrt(mean + eps)).unsqueeze(-1)
    return rounded(scaled if weight is None else scaled * weight.float())


def rope_table(config: ModelConfig, ratio: int, positions: int) -> torch.Tensor:
    """Cosines and sines, ``(positions, rope_dim / 2, 2)`` float32.

    Layers with a compressor use YaRN with ``compress_rope_theta``; window-only layers use plain RoPE, as vLLM 0.33
    and transformers do (vLLM 0.26 applies YaRN there too).
    """
    dim = config.rope_dim
    theta = config.compress_rope_theta if ratio else config.rope_theta
    inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if ratio:

        def turns_dim(turns: float) -> float:
            return dim * math.log(config.yarn_original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(turns_dim(config.yarn_beta_fast)), 0)
        high = min(math.ceil(turns_dim(config.yarn_beta_slow)), dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
        keep = 1.0 - ramp.clamp(0.0, 1.0)
        inv_freq = inv_freq * keep + inv_freq / config.yarn_factor * (1.0 - keep)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inv_freq
    return torch.stack([angles.cos(), angles.sin()], -1).float()


def rope(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Rotate the interleaved pairs of the last ``rope_dim`` channels; the others pass through unrounded.

    Args:
        x: ``(T, n)`` or ``(T, heads, n)``, bfloat16 or float32.
        table: From :func:`rope_table`.
        positions: ``(T,)`` int64.
        inverse: Rotate back.

    Returns:
        bfloat16, each rotated channel rounded once.
    """
    pairs = table.shape[1]
    cos, sin = table[positions].unbind(-1)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if inverse:
        sin = -sin
    even, odd = x[..., -2 * pairs :].float().unflatten(-1, (pairs, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([rounded(x[..., : -2 * pairs]), rounded(turned)], -1)


def pool_entries(values: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Softmax-weighted mean over a compressor window, channel by channel.

    Args:
        values: ``(entries, window, dim)`` float32.
        scores: Likewise; -inf leaves a row out.

    Returns:
        ``(entries, dim)`` float32.
    """
    top = scores.amax(1, keepdim=True)
    weights = numerics.exp_f64((scores - top).double()).float()
    total = numerics.tree_sum(weights.transpose(1, 2))
    weighted = torch.where(scores == -math.inf, 0.0, weights * values)
    return numerics.tree_sum(weighted.transpose(1, 2)) / total
