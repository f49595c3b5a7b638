"""Random DeepSeek-V4 checkpoints that vLLM loads: config.json and safetensors, no tokenizer.

``python -m aligned_e2e.vllm_checkpoint OUT --size tiny --seed 1``. Needs torch and safetensors, not vLLM.

Every tensor is a function of the seed, its name and its shape alone, by integer arithmetic and one table, so that any
part of a checkpoint can be made anywhere, on CPU or GPU, with the same bits. Magnitudes are those of a trained model:
every projection keeps a root mean square near one, so that activations neither vanish nor explode, and the router, the
indexer, the gates of mHC and the logits all discriminate.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import math
import multiprocessing
import statistics
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from .kernel_times import FLASH_RATIOS, FLASH_VOCABULARY

__all__ = [
    "SIZES",
    "CheckpointSize",
    "TensorSpec",
    "config_json",
    "iter_tensors",
    "main",
    "make_tensor",
    "sharing",
    "tensor_specs",
    "write_checkpoint",
]

_BLOCK = 128
_E4M3_MAX = 448.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSize:
    """Dimensions of a generated model.

    What the kernels fix is fixed here: head_dim 512 with a 64-wide RoPE part, window 128, four residual streams,
    index_head_dim 128, six experts per token, blocks of 128 in every FP8 tensor.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: A multiple of 512.
        compress_ratios: One of 0, 4 and 128 per layer; vLLM's cache needs at least one 4.
        num_heads: At most 128; vLLM pads it to 64 or 128.
        q_lora_rank: A multiple of 128.
        o_groups: Divides ``num_heads``.
        o_lora_rank: A multiple of 128.
        moe_intermediate: A multiple of 128.
        num_experts: vLLM's fast expert selection knows 256 and 384.
        num_hash_layers: Layers, from the first, that route by token id.
        index_heads: Heads of the indexer.
        index_topk: Compressed entries that a query selects: 512, 1024 or 2048.
        shared: Layers take the weights of others, see :func:`sharing`, and the checkpoint has those of the others only.
            Whoever loads it has to see to that: config.json says ``attention_of`` and ``ffn_of`` of every layer.
    """

    vocab_size: int = 8192
    hidden_size: int = 2048
    compress_ratios: tuple[int, ...] = (0, 4, 128, 4)
    num_heads: int = 64
    q_lora_rank: int = 512
    o_groups: int = 8
    o_lora_rank: int = 256
    moe_intermediate: int = 256
    num_experts: int = 256
    num_hash_layers: int = 1
    index_heads: int = 64
    index_topk: int = 512
    shared: bool = False

    def __post_init__(self) -> None:
        whole = {"hidden_size": 512, "q_lora_rank": 128, "o_lora_rank": 128, "moe_intermediate": 128}
        problems = [f"{name}: expected a multiple of {n}" for name, n in whole.items() if getattr(self, name) % n]
        if self.num_heads % self.o_groups or self.num_heads * 512 // self.o_groups % _BLOCK:
            problems.append("num_heads: expected a multiple of o_groups")
        if not set(self.compress_ratios) <= {0, 4, 128}:
            problems.append("compress_ratios: expected 0, 4 and 128 only")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def attention_of(self) -> tuple[int, ...]:
        """For each layer the one whose attention, norms and mHC weights it has."""
        return sharing(self.compress_ratios) if self.shared else tuple(range(len(self.compress_ratios)))

    @property
    def ffn_of(self) -> tuple[int, ...]:
        """For each layer the one whose router and experts it has."""
        hashed = [layer < self.num_hash_layers for layer in range(len(self.compress_ratios))]
        return sharing(hashed) if self.shared else tuple(range(len(hashed)))

    @property
    def stored(self) -> tuple[int | None, ...]:
        """Layers that have weights of their own, after None for what is outside of the layers."""
        return (None, *sorted({*self.attention_of, *self.ffn_of}))


def sharing(kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """For each layer the one whose weights it takes: the first of its kind whose weights its neighbour does not have.

    Neighbours never share, so that whatever a layer reads was last read before a whole other layer, whose weights are
    many times a cache, as in a model that shares nothing.

    Args:
        kinds: Of each layer. Layers of one kind have weights of the same names and shapes.
    """
    owners: list[int] = []
    for layer, kind in enumerate(kinds):
        known = (owner for owner in dict.fromkeys(owners) if kinds[owner] == kind and owner != owners[-1])
        owners.append(next(known, layer))
    return tuple(owners)


_SLICE = CheckpointSize(
    vocab_size=FLASH_VOCABULARY,
    hidden_size=4096,
    q_lora_rank=1024,
    o_lora_rank=1024,
    moe_intermediate=2048,
)
SIZES = {
    "tiny": CheckpointSize(),
    "slice": _SLICE,
    "flash": dataclasses.replace(_SLICE, compress_ratios=FLASH_RATIOS, num_hash_layers=3, shared=True),
}
"""``tiny``: four layers, 1.8 GB. ``slice``: four layers as wide as DeepSeek-V4-Flash, 28 GB. ``flash``: all its 43
layers, which share the weights of four of each: 28 GB too."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a checkpoint is.

    Attributes:
        kind: ``normal``: around ``mean``. ``fp8``: e4m3 codes, whose scale tensor is the next spec. ``scale``: block
            scales. ``hash``: distinct experts per token id.
        shape: Its shape.
        dtype: Its dtype.
        std: Standard deviation of the values; for ``fp8`` and ``scale`` that of the product of the two.
        mean: Mean of the values.
        bound: For ``hash``: the number of experts.
    """

    kind: Literal["normal", "fp8", "scale", "hash"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    std: float = 1.0
    mean: float = 0.0
    bound: int = 0


def config_json(size: CheckpointSize) -> dict[str, Any]:
    """The config.json of a checkpoint."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": len(size.compress_ratios),
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": size.q_lora_rank,
        "o_groups": size.o_groups,
        "o_lora_rank": size.o_lora_rank,
        "sliding_window": 128,
        "compress_ratios": [*size.compress_ratios, 0],
        "index_n_heads": size.index_heads,
        "index_head_dim": 128,
        "index_topk": size.index_topk,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "n_routed_experts": size.num_experts,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": size.moe_intermediate,
        "num_hash_layers": size.num_hash_layers,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "expert_dtype": "fp8",
        "max_position_embeddings": 65536,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        },
    }
    if size.shared:
        config |= {"attention_of": [*size.attention_of], "ffn_of": [*size.ffn_of]}
    return config


def tensor_specs(size: CheckpointSize, layer: int | None = None) -> dict[str, TensorSpec]:
    """Name to spec of every tensor of one layer, or of those outside of the layers (None), that is its own.

    Args:
        size: The model.
        layer: Index of the layer.
    """
    specs: dict[str, TensorSpec] = {}
    h = size.hidden_size

    def normal(name: str, *shape: int, std: float, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> None:
        specs[name] = TensorSpec("normal", shape, dtype, std, mean)

    def bf16(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        normal(name, *shape, std=std, dtype=torch.bfloat16, mean=mean)

    def fp8(name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        std = gain * cols**-0.5  # a row of unit inputs gives outputs of size gain
        specs[f"{name}.weight"] = TensorSpec("fp8", (rows, cols), torch.float8_e4m3fn, std)
        blocks = (-(-rows // _BLOCK), -(-cols // _BLOCK))
        specs[f"{name}.scale"] = TensorSpec("scale", blocks, torch.float32, std)

    if layer is None:
        bf16("embed.weight", size.vocab_size, h, std=1.0)
        bf16("head.weight", size.vocab_size, h, std=2.0 * h**-0.5)
        bf16("norm.weight", h, std=0.1, mean=1.0)
        normal("hc_head_fn", 4, 4 * h, std=(4 * h) ** -0.5)
        normal("hc_head_base", 4, std=0.5)
        normal("hc_head_scale", 1, std=0.1, mean=1.0)
        return specs

    ratio = size.compress_ratios[layer]
    prefix, attn, ffn = f"layers.{layer}", f"layers.{layer}.attn", f"layers.{layer}.ffn"
    bf16(f"{prefix}.attn_norm.weight", h, std=0.1, mean=1.0)
    bf16(f"{prefix}.ffn_norm.weight", h, std=0.1, mean=1.0)
    for site in ("attn", "ffn"):
        normal(f"{prefix}.hc_{site}_fn", 24, 4 * h, std=(4 * h) ** -0.5)
        normal(f"{prefix}.hc_{site}_base", 24, std=0.5)
        normal(f"{prefix}.hc_{site}_scale", 3, std=0.1, mean=1.0)
    fp8(f"{attn}.wq_a", size.q_lora_rank, h)
    fp8(f"{attn}.wkv", 512, h)
    bf16(f"{attn}.q_norm.weight", size.q_lora_rank, std=0.1, mean=1.0)
    bf16(f"{attn}.kv_norm.weight", 512, std=0.1, mean=1.0)
    fp8(f"{attn}.wq_b", size.num_heads * 512, size.q_lora_rank)
    # Attention averages many values, which shrinks them; the gain gives the residual streams something to see.
    fp8(f"{attn}.wo_a", size.o_groups * size.o_lora_rank, size.num_heads * 512 // size.o_groups, gain=2.0)
    fp8(f"{attn}.wo_b", h, size.o_groups * size.o_lora_rank)
    normal(f"{attn}.attn_sink", size.num_heads, std=1.0)
    if ratio:
        series = 2 if ratio == 4 else 1  # a C4 entry also sees the window before its own
        _compressor(specs, f"{attn}.compressor", ratio, series, 512, h)
    if ratio == 4:
        fp8(f"{attn}.indexer.wq_b", size.index_heads * 128, size.q_lora_rank)
        bf16(f"{attn}.indexer.weights_proj.weight", size.index_heads, h, std=h**-0.5)
        _compressor(specs, f"{attn}.indexer.compressor", 4, 2, 128, h)
    bf16(f"{ffn}.gate.weight", size.num_experts, h, std=h**-0.5)
    if layer < size.num_hash_layers:
        table = (size.vocab_size, 6)
        specs[f"{ffn}.gate.tid2eid"] = TensorSpec("hash", table, torch.int32, bound=size.num_experts)
    else:
        normal(f"{ffn}.gate.bias", size.num_experts, std=0.01)
    names = [f"{ffn}.experts.{e}" for e in range(size.num_experts)]
    for name in (*names, f"{ffn}.shared_experts"):
        fp8(f"{name}.w1", size.moe_intermediate, h)
        fp8(f"{name}.w3", size.moe_intermediate, h)
        fp8(f"{name}.w2", h, size.moe_intermediate, gain=2.0)  # silu(gate) * up is about 0.4
    own = {True: size.ffn_of[layer] == layer, False: size.attention_of[layer] == layer}
    return {name: spec for name, spec in specs.items() if own[name.startswith(f"{ffn}.")]}


def _compressor(specs: dict[str, TensorSpec], name: str, ratio: int, series: int, dim: int, hidden: int) -> None:
    bf16 = torch.bfloat16
    specs[f"{name}.ape"] = TensorSpec("normal", (ratio, series * dim), torch.float32, 0.5)
    specs[f"{name}.wkv.weight"] = TensorSpec("normal", (series * dim, hidden), bf16, hidden**-0.5)
    specs[f"{name}.wgate.weight"] = TensorSpec("normal", (series * dim, hidden), bf16, hidden**-0.5)
    specs[f"{name}.norm.weight"] = TensorSpec("normal", (dim,), bf16, 0.1, 1.0)


def make_tensor(name: str, spec: TensorSpec, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """One tensor of a checkpoint: a function of ``name``, ``spec`` and ``seed``, the same on every device."""
    count = math.prod(spec.shape)
    if spec.kind == "fp8":
        codes = _table_of_codes().to(device)[_random_bytes(name, seed, count, device).int()]
        return codes.view(torch.float8_e4m3fn).reshape(spec.shape)
    if spec.kind == "hash":
        return _hash_table(name, spec, seed, device)
    draws = _random_bytes(name, seed, 2 * count, device).view(torch.int16).int() & 0xFFFF
    if spec.kind == "scale":
        # Between 0.71 and 1.41 times the mean, and no powers of two: a serving side that requantises has work to do.
        spread = torch.exp2(torch.arange(1 << 10, dtype=torch.float64) / (1 << 10) - 0.5) * (spec.std / _code_std())
        return spread.float().to(device)[draws >> 6].reshape(spec.shape)
    return (_normal_table().to(device)[draws] * spec.std + spec.mean).to(spec.dtype).reshape(spec.shape)


def iter_tensors(
    size: CheckpointSize, seed: int, *, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every ``(name, tensor)`` of a checkpoint, in the order of its files, made one at a time."""
    for layer in size.stored:
        for name, spec in tensor_specs(size, layer).items():
            yield name, make_tensor(name, spec, seed, device)


def write_checkpoint(
    directory: str | Path, size: CheckpointSize, seed: int, *, device: torch.device | str = "cpu", jobs: int = 1
) -> int:
    """Write config.json, one safetensors file per layer, and their index.

    Args:
        directory: Created if it is not there.
        size: The model.
        seed: Of the weights. Checkpoints of two seeds differ in every tensor.
        device: Where the tensors are made; the files are the same.
        jobs: Processes that write a file each: a layer of V4-Flash takes one ten seconds, most of it copies.

    Returns:
        Number of bytes of all tensors.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config_json(size), indent=1) + "\n", encoding="utf-8")
    layers = size.stored
    write = functools.partial(_write_layer, root, size, seed, device)
    if jobs > 1:
        spawn = multiprocessing.get_context("spawn")  # CUDA cannot be used after a fork
        with concurrent.futures.ProcessPoolExecutor(min(jobs, len(layers)), mp_context=spawn) as pool:
            written = list(pool.map(write, layers))
    else:
        written = list(map(write, layers))
    files = {name: file for file, names, _ in written for name in names}
    total = sum(size for _, _, size in written)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def _write_layer(
    root: Path, size: CheckpointSize, seed: int, device: torch.device | str, layer: int | None
) -> tuple[str, list[str], int]:
    """One file: its name, the names of its tensors, their bytes."""
    file = f"model-{size.stored.index(layer) + 1:05d}-of-{len(size.stored):05d}.safetensors"
    tensors = {name: make_tensor(name, spec, seed, device).cpu() for name, spec in tensor_specs(size, layer).items()}
    save_file(tensors, root / file, metadata={"format": "pt"})
    return file, list(tensors), sum(tensor.nbytes for tensor in tensors.values())


def _signed(value: int) -> int:
    """A 64-bit word as torch's int64 holds it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _random_bytes(name: str, seed: int, count: int, device: torch.device | str) -> torch.Tensor:
    """``count`` uniform bytes: a counter, mixed by multiplications and shifts of 64-bit integers that wrap around."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    words = torch.arange(-(-count // 8), dtype=torch.int64, device=device)
    words.mul_(_signed(0x9E3779B97F4A7C15)).add_(_signed(int.from_bytes(digest, "little")))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words.bitwise_xor_((words >> shift) & ((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    words.bitwise_xor_((words >> 31) & ((1 << 33) - 1))
    return words.view(torch.uint8)[:count]


def _quantiles(count: int) -> list[float]:
    """Middles of ``count`` equally likely slices of the standard normal, symmetric to the bit."""
    inverse = statistics.NormalDist().inv_cdf
    upper = [-inverse((i + 0.5) / count) for i in range(count // 2)]
    return [-value for value in upper] + upper[::-1]


@functools.cache
def _normal_table() -> torch.Tensor:
    return torch.tensor(_quantiles(1 << 16), dtype=torch.float64).float()


@functools.cache
def _table_of_codes() -> torch.Tensor:
    """256 e4m3 codes, normal, the largest at 448: a block of 128 by 128 uses the whole range, as a quantiser's does."""
    values = torch.tensor(_quantiles(256), dtype=torch.float64)
    return (values * (_E4M3_MAX / values.max())).float().to(torch.float8_e4m3fn).view(torch.uint8)


@functools.cache
def _code_std() -> float:
    return float(_table_of_codes().view(torch.float8_e4m3fn).double().square().mean().sqrt())


def _hash_table(name: str, spec: TensorSpec, seed: int, device: torch.device | str) -> torch.Tensor:
    """Distinct experts per token: an arithmetic progression whose step has no divisor in common with their number."""
    rows, slots = spec.shape
    draws = _random_bytes(name, seed, 4 * rows, device).view(torch.int16).reshape(rows, 2).long() & 0xFFFF
    units = torch.tensor([n for n in range(1, spec.bound) if math.gcd(n, spec.bound) == 1], device=device)
    steps = torch.arange(slots, device=device) * units[draws[:, 1:] % len(units)]
    return ((draws[:, :1] + steps) % spec.bound).to(spec.dtype)


def main(argv: Sequence[str] | None = None) -> int:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m aligned_e2e.vllm_checkpoint", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the checkpoint goes")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--heads", type=int, default=64, help="attention heads; 32 makes vLLM pad them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where the tensors are made; the files are the same")
    parser.add_argument("--jobs", type=int, default=1, help="processes that write a file each")
    arguments = parser.parse_args(argv)
    size = dataclasses.replace(SIZES[arguments.size], num_heads=arguments.heads)
    total = write_checkpoint(arguments.directory, size, arguments.seed, device=arguments.device, jobs=arguments.jobs)
    print(f"{arguments.directory}: {total / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
