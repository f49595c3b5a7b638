"""An independent implementation of the architecture: Hugging Face transformers' own ``DeepseekV4ForCausalLM``.

Rollout and actor are one model, so they would share a mistake in the architecture. transformers' model shares no
code with it. Given the same weights, dequantised, and with our rounding off, the two agree to float32; with the real
rounding on, what remains is FP8 and bfloat16. vLLM 0.26 applies YaRN to window-only layers too, where transformers and
vLLM 0.33 do not; the small model follows the latter two (:func:`aligned_e2e.layers.rope_table`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bi_kernels.group_quant import dequantize_blocks

from . import layers, model, precision
from .actor import recompute_logprobs
from .config import Deployment, ModelConfig
from .findings import Agreement
from .model import DeepseekV4
from .replaced import replaced

__all__ = ["compare_with_transformers", "transformers_logprobs"]


def compare_with_transformers(
    config: ModelConfig, deployment: Deployment, checkpoint: dict[str, torch.Tensor], texts: list[list[int]]
) -> Agreement:
    """Logprobs of every token of ``texts`` but the first ones, here and there.

    Args:
        config: Sizes.
        deployment: Capacities.
        checkpoint: Weights of both.
        texts: Token ids of real text, each longer than the top-k threshold.
    """
    torch.set_num_threads(1)
    theirs = torch.cat(transformers_logprobs(config, deployment, checkpoint, texts))

    def distance(texts: list[list[int]]) -> float:
        sequences = {f"t{i}": (ids[:1], ids[1:]) for i, ids in enumerate(texts)}
        rows = recompute_logprobs(DeepseekV4(config, deployment, checkpoint), deployment, sequences)
        ours = torch.cat([logprobs for logprobs, _ in rows])
        return float((ours - theirs[: len(ours)]).abs().mean())

    with precision.float32():
        exact = distance(texts)
        with replaced(model, rope=_not_turned_back):
            control = distance(texts[:1])
    threshold = 4 * config.index_topk
    past = sum(max(0, len(ids) - 1 - threshold) for ids in texts)
    return Agreement(exact, distance(texts), control, theirs.numel(), past)


def _not_turned_back(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """RoPE without the rotation back after attention: the planted mistake."""
    return x if inverse else layers.rope(x, table, positions)


@torch.no_grad()
def transformers_logprobs(
    config: ModelConfig, deployment: Deployment, checkpoint: dict[str, torch.Tensor], texts: list[list[int]]
) -> list[torch.Tensor]:
    """Per text, the float32 logprobs of its tokens but the first, ``(len(text) - 1,)``."""
    reference = _build(config, deployment, checkpoint)
    logprobs = []
    for text in texts:
        ids = torch.tensor(text)
        logits = reference(ids[None], use_cache=False).logits[0]
        logprobs.append(torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0])
    return logprobs


def _build(c: ModelConfig, deployment: Deployment, checkpoint: dict[str, torch.Tensor]) -> nn.Module:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4IndexerScorer

    yarn = {
        "rope_type": "yarn",
        "factor": c.yarn_factor,
        "original_max_position_embeddings": c.yarn_original_positions,
        "beta_fast": c.yarn_beta_fast,
        "beta_slow": c.yarn_beta_slow,
    }
    config = DeepseekV4Config(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=1,
        head_dim=c.head_dim,
        qk_rope_head_dim=c.rope_dim,
        q_lora_rank=c.q_lora_rank,
        o_groups=c.o_groups,
        o_lora_rank=c.o_lora_rank,
        sliding_window=c.window,
        compress_ratios=list(c.compress_ratios),
        index_n_heads=c.index_heads,
        index_head_dim=c.index_head_dim,
        index_topk=c.index_topk,
        n_routed_experts=c.num_experts,
        num_experts_per_tok=c.experts_per_token,
        moe_intermediate_size=c.moe_intermediate,
        routed_scaling_factor=c.routed_scaling_factor,
        swiglu_limit=c.swiglu_limit,
        num_hash_layers=c.num_hash_layers,
        hc_mult=c.hc_mult,
        hc_sinkhorn_iters=c.hc_sinkhorn_iters,
        hc_eps=c.hc_eps,
        rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_theta,
        compress_rope_theta=c.compress_rope_theta,
        rope_parameters=yarn,
        max_position_embeddings=deployment.max_model_len,
        attn_implementation="eager",
    )
    theirs: nn.Module = DeepseekV4ForCausalLM(config).float().eval()
    missing, unexpected = theirs.load_state_dict(_renamed(c, checkpoint), strict=False)
    missing = [name for name in missing if "inv_freq" not in name]
    if missing or unexpected:
        raise ValueError(
            f"weights: expected transformers' names, but {missing} got none and {unexpected} do not exist. Adapt "
            "the table to this release of transformers."
        )
    for module in theirs.modules():
        if isinstance(module, DeepseekV4IndexerScorer):
            module.register_forward_hook(_lower_index_first)
    return theirs


def _lower_index_first(_module: nn.Module, _inputs: Any, scores: torch.Tensor) -> torch.Tensor:
    """Give ``torch.topk``, which leaves open who wins a tie, scores of the same order without ties.

    Ties are common: an entry whose dot products are all negative scores exactly 0, and so do its like.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(scores.shape[-1]).expand_as(order)
    return torch.empty_like(scores).scatter_(-1, order, -ranks.to(scores.dtype))


_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{site}_{part}": f"{site}_hc.{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.experts.w13.weight": "mlp.experts.gate_up_proj",
    "ffn.experts.w2.weight": "mlp.experts.down_proj",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}  # of a layer, ours to theirs
_HALVES = {
    "attn.compressor.wkv_gate.weight": ("self_attn.compressor.kv_proj", "self_attn.compressor.gate_proj"),
    "attn.indexer.compressor.wkv_gate.weight": (
        "self_attn.compressor.indexer.kv_proj",
        "self_attn.compressor.indexer.gate_proj",
    ),
    "ffn.shared_experts.w13.weight": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
}  # stacked here, two tensors there
_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    **{f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}


def _renamed(config: ModelConfig, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint dequantised, under transformers' names."""
    theirs = {}
    for name, tensor in checkpoint.items():
        if name.endswith(".scale"):
            continue  # of the weight beside it
        value = _dequantised(tensor, checkpoint.get(name.removesuffix("weight") + "scale"))
        if name in _OUTSIDE:
            theirs[_OUTSIDE[name]] = value
            continue
        _, number, ours = name.split(".", 2)
        layer = f"model.layers.{number}."
        if ours in _HALVES:
            theirs.update(zip((f"{layer}{half}.weight" for half in _HALVES[ours]), value.chunk(2), strict=True))
        else:
            theirs[layer + _NAMES[ours]] = value
    return theirs


def _dequantised(tensor: torch.Tensor, scale: torch.Tensor | None) -> Any:
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.float() if tensor.is_floating_point() else tensor.long()
    if scale is None:
        raise ValueError("weights: expected a scale beside every FP8 tensor, got none. Pass a whole checkpoint.")
    if tensor.dim() == 3:
        return torch.stack([dequantize_blocks(w, s) for w, s in zip(tensor, scale, strict=True)])
    return dequantize_blocks(tensor, scale)
