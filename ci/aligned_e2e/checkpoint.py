"""Random checkpoints of the small model, as a trainer would hand them over.

Names are those of DeepSeek-V4 checkpoints, except that the experts of a layer are stacked. Magnitudes are chosen so
that nothing saturates and the router, the indexer and mHC all discriminate.
"""

from __future__ import annotations

import torch

from bi_kernels import ScaleFormat, per_block_quant_fp8

from .config import ModelConfig

__all__ = ["make_checkpoint", "perturb"]

_WEIGHT_SCALES = ScaleFormat.FLOAT32_CEIL_UE8M0  # powers of two in float32: what both sides requantise to


def make_checkpoint(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """All tensors of a model, by name. Deterministic in ``seed``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    tensors: dict[str, torch.Tensor] = {}

    def fp8(name: str, rows: int, cols: int, experts: int = 0) -> None:
        weights = [normal(rows, cols, std=cols**-0.5) for _ in range(max(experts, 1))]
        pairs = [per_block_quant_fp8(w, scale_format=_WEIGHT_SCALES) for w in weights]
        values, scales = (torch.stack(list(part)) if experts else part[0] for part in zip(*pairs, strict=True))
        tensors[f"{name}.weight"], tensors[f"{name}.scale"] = values, scales

    def bf16(name: str, *shape: int, std: float) -> None:
        tensors[name] = normal(*shape, std=std).bfloat16()

    def norm(name: str, size: int) -> None:
        tensors[name] = (1.0 + normal(size, std=0.1)).bfloat16()

    c, h = config, config.hidden_size
    mixes = (2 + c.hc_mult) * c.hc_mult
    bf16("embed.weight", c.vocab_size, h, std=1.0)
    bf16("head.weight", c.vocab_size, h, std=2.0 * h**-0.5)
    norm("norm.weight", h)
    tensors["hc_head_fn"] = normal(c.hc_mult, c.hc_mult * h, std=0.02)
    tensors["hc_head_base"] = normal(c.hc_mult, std=0.5)
    tensors["hc_head_scale"] = torch.ones(1)
    for n, ratio in enumerate(c.compress_ratios):
        layer, attn, ffn = f"layers.{n}", f"layers.{n}.attn", f"layers.{n}.ffn"
        norm(f"{layer}.attn_norm.weight", h)
        norm(f"{layer}.ffn_norm.weight", h)
        for site in ("attn", "ffn"):
            tensors[f"{layer}.hc_{site}_fn"] = normal(mixes, c.hc_mult * h, std=0.02)
            tensors[f"{layer}.hc_{site}_base"] = normal(mixes, std=0.5)
            tensors[f"{layer}.hc_{site}_scale"] = torch.ones(3)
        fp8(f"{attn}.wq_a", c.q_lora_rank, h)
        fp8(f"{attn}.wkv", c.head_dim, h)
        norm(f"{attn}.q_norm.weight", c.q_lora_rank)
        norm(f"{attn}.kv_norm.weight", c.head_dim)
        fp8(f"{attn}.wq_b", c.num_heads * c.head_dim, c.q_lora_rank)
        fp8(f"{attn}.wo_a", c.o_groups * c.o_lora_rank, c.num_heads * c.head_dim // c.o_groups)
        fp8(f"{attn}.wo_b", h, c.o_groups * c.o_lora_rank)
        tensors[f"{attn}.attn_sink"] = normal(c.num_heads, std=1.0)
        if ratio:
            width = c.overlap(n) * c.head_dim
            tensors[f"{attn}.compressor.ape"] = normal(ratio, width, std=0.5)
            bf16(f"{attn}.compressor.wkv_gate.weight", 2 * width, h, std=h**-0.5)
            norm(f"{attn}.compressor.norm.weight", c.head_dim)
        if ratio == 4:
            index = f"{attn}.indexer"
            fp8(f"{index}.wq_b", c.index_heads * c.index_head_dim, c.q_lora_rank)
            bf16(f"{index}.weights_proj.weight", c.index_heads, h, std=h**-0.5)
            tensors[f"{index}.compressor.ape"] = normal(ratio, 2 * c.index_head_dim, std=0.5)
            bf16(f"{index}.compressor.wkv_gate.weight", 4 * c.index_head_dim, h, std=h**-0.5)
            norm(f"{index}.compressor.norm.weight", c.index_head_dim)
        bf16(f"{ffn}.gate.weight", c.num_experts, h, std=h**-0.5)
        if n < c.num_hash_layers:
            draws = torch.rand(c.vocab_size, c.num_experts, generator=generator).argsort(dim=1, stable=True)
            tensors[f"{ffn}.gate.tid2eid"] = draws[:, : c.experts_per_token].to(torch.int32)
        else:
            tensors[f"{ffn}.gate.bias"] = normal(c.num_experts, std=0.05)
        fp8(f"{ffn}.experts.w13", 2 * c.moe_intermediate, h, experts=c.num_experts)
        fp8(f"{ffn}.experts.w2", h, c.moe_intermediate, experts=c.num_experts)
        fp8(f"{ffn}.shared_experts.w13", 2 * c.moe_intermediate, h)
        fp8(f"{ffn}.shared_experts.w2", h, c.moe_intermediate)
    return tensors


def perturb(config: ModelConfig, checkpoint: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint one training step away: every floating-point tensor moves, integer tables stay.

    Block-quantised weights are replaced by those of another seed where they are routed experts, and keep their
    codes with other scales elsewhere, so that both kinds of update travel.
    """
    other = make_checkpoint(config, seed)
    changed = {}
    for name, tensor in checkpoint.items():
        if not tensor.is_floating_point():
            changed[name] = tensor.clone()
        elif tensor.dtype == torch.float8_e4m3fn:
            changed[name] = (other[name] if ".experts." in name else tensor).clone()
        elif name.endswith(".scale"):
            changed[name] = (other[name] if ".experts." in name else tensor * 2.0).clone()
        else:
            mixed = tensor.float() + 0.05 * other[name].float()
            changed[name] = mixed.to(tensor.dtype)
    return changed
