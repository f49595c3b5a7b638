"""Generated checkpoints: every name and shape that vLLM's loader asks for, the same bits from the same seed."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from aligned_e2e.vllm_checkpoint import (
    SIZES,
    CheckpointSize,
    config_json,
    iter_tensors,
    main,
    make_tensor,
    tensor_specs,
    write_checkpoint,
)
from bi_kernels.testing import assert_bitwise_equal

SMALL = CheckpointSize(
    vocab_size=96,
    hidden_size=512,
    compress_ratios=(0, 4, 128),
    num_heads=4,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=128,
    moe_intermediate=128,
    num_experts=12,
    index_heads=2,
)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return dict(iter_tensors(SMALL, seed=1))


def test_names_and_shapes_of_every_kind_of_layer(tensors: dict[str, torch.Tensor]) -> None:
    specs = tensor_specs(SMALL) | {k: v for n in range(3) for k, v in tensor_specs(SMALL, n).items()}
    assert list(tensors) == list(specs)
    for name, tensor in tensors.items():
        assert (tuple(tensor.shape), tensor.dtype) == (specs[name].shape, specs[name].dtype), name
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    f8, f32, bf16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
    for name, shape, dtype in [
        ("embed.weight", [96, 512], bf16),
        ("head.weight", [96, 512], bf16),
        ("hc_head_fn", [4, 2048], f32),
        ("hc_head_scale", [1], f32),
        ("layers.0.hc_attn_fn", [24, 2048], f32),
        ("layers.0.hc_ffn_scale", [3], f32),
        ("layers.0.attn.wq_a.weight", [128, 512], f8),
        ("layers.0.attn.wq_a.scale", [1, 4], f32),
        ("layers.0.attn.wkv.weight", [512, 512], f8),
        ("layers.0.attn.wq_b.weight", [2048, 128], f8),
        ("layers.0.attn.wo_a.weight", [256, 1024], f8),
        ("layers.0.attn.wo_b.scale", [4, 2], f32),
        ("layers.0.attn.attn_sink", [4], f32),
        ("layers.0.ffn.gate.tid2eid", [96, 6], torch.int32),
        ("layers.1.ffn.gate.bias", [12], f32),
        ("layers.1.attn.compressor.ape", [4, 1024], f32),
        ("layers.1.attn.compressor.wgate.weight", [1024, 512], bf16),
        ("layers.1.attn.indexer.wq_b.weight", [256, 128], f8),
        ("layers.1.attn.indexer.weights_proj.weight", [2, 512], bf16),
        ("layers.1.attn.indexer.compressor.wkv.weight", [256, 512], bf16),
        ("layers.1.attn.indexer.compressor.norm.weight", [128], bf16),
        ("layers.2.attn.compressor.ape", [128, 512], f32),
        ("layers.2.ffn.experts.11.w2.weight", [512, 128], f8),
        ("layers.2.ffn.shared_experts.w3.scale", [1, 4], f32),
    ]:
        assert (shapes[name], tensors[name].dtype) == (shape, dtype), name
    assert "layers.0.ffn.gate.bias" not in shapes
    assert not [name for name in shapes if name.startswith(("layers.0.attn.compressor", "layers.2.attn.indexer"))]


def test_real_sizes_name_what_the_real_model_has() -> None:
    for size in SIZES.values():
        names = [name for n in (None, *range(len(size.compress_ratios))) for name in tensor_specs(size, n)]
        assert len(names) == len(set(names))
        config = config_json(size)
        assert config["num_hidden_layers"] < len(config["compress_ratios"])
        assert 4 in config["compress_ratios"]


def test_layers_that_share_are_in_the_checkpoint_once(tmp_path: Path) -> None:
    size = dataclasses.replace(SMALL, compress_ratios=(0, 0, 4, 128, 4, 128), num_hash_layers=3, shared=True)
    write_checkpoint(tmp_path, size, seed=1)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(size.stored) == 6
    parts = {tuple(name.split(".")[1:3]) for name in index["weight_map"] if name.startswith("layers.")}
    assert {layer for layer, part in parts if part == "ffn"} == {"0", "1", "3", "4"}
    assert {layer for layer, part in parts if part == "attn"} == {"0", "1", "2", "3"}
    assert {layer for layer, part in parts if part == "ffn_norm"} == {"0", "1", "2", "3"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_hash_layers"]) == (6, 3)
    assert (config["attention_of"], config["ffn_of"]) == ([0, 1, 2, 3, 2, 3], [0, 1, 0, 3, 4, 3])
    alone = dict(iter_tensors(SMALL, seed=1))
    for name, tensor in iter_tensors(size, seed=1):  # the same bits, whoever shares them
        if name in alone and alone[name].shape == tensor.shape and alone[name].dtype == tensor.dtype:
            assert_bitwise_equal(tensor, alone[name], name)
    assert "attention_of" not in config_json(SMALL)


def test_the_whole_model_is_that_of_flash_and_takes_the_memory_of_four_layers() -> None:
    flash = SIZES["flash"]
    config = config_json(flash)
    assert (config["num_hidden_layers"], config["num_hash_layers"], config["vocab_size"]) == (43, 3, 129280)
    count = sum(math.prod(spec.shape) * spec.dtype.itemsize for n in flash.stored
                for spec in tensor_specs(flash, n).values())  # fmt: skip
    assert 28e9 < count < 29e9


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tensors: dict[str, torch.Tensor]) -> None:
    for (name, again), (_, other) in zip(iter_tensors(SMALL, seed=1), iter_tensors(SMALL, seed=2), strict=True):
        assert_bitwise_equal(again, tensors[name], name)
        assert not torch.equal(other.view(torch.uint8), again.view(torch.uint8)), name


def test_bits_are_pinned(tensors: dict[str, torch.Tensor]) -> None:
    """Two machines that make the same checkpoint must not have to compare gigabytes to know it."""
    assert tensors["layers.1.attn.wq_a.weight"].view(torch.uint8)[0, :6].tolist() == [93, 227, 254, 104, 244, 233]
    assert tensors["layers.0.hc_attn_fn"][0, :2].view(torch.int32).tolist() == [-1128011318, 994904730]
    assert tensors["layers.0.ffn.gate.tid2eid"][:2].tolist() == [[3, 10, 5, 0, 7, 2], [1, 2, 3, 4, 5, 6]]


def test_magnitudes_do_not_degenerate(tensors: dict[str, torch.Tensor]) -> None:
    for name, weight in tensors.items():
        if weight.dtype == torch.float8_e4m3fn:
            scale = tensors[name.removesuffix("weight") + "scale"]
            full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
            gain = float((weight.float() * full).square().mean().sqrt()) * weight.shape[1] ** 0.5
            assert 0.7 < gain < 2.9, name  # 1 or 2, times what a single block may add
            blocks = weight.float().abs().unfold(0, 128, 128).unfold(1, 128, 128)
            assert (blocks.amax((-1, -2)) == 448).all(), f"{name}: a block that its scale does not fit"
            assert (torch.frexp(scale).mantissa != 0.5).any(), f"{name}: scales that need no requantisation"
    table = tensors["layers.0.ffn.gate.tid2eid"].sort(dim=1).values
    assert (table[:, 1:] > table[:, :-1]).all()
    assert int(table.min()) >= 0
    assert int(table.max()) < SMALL.num_experts


def test_files_and_index(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    total = write_checkpoint(tmp_path, SMALL, seed=1)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total == sum(tensor.nbytes for tensor in tensors.values())
    assert set(index["weight_map"]) == set(tensors)
    assert json.loads((tmp_path / "config.json").read_text()) == config_json(SMALL)
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                assert index["weight_map"][name] == file
                assert_bitwise_equal(stored.get_tensor(name), tensors[name], name)


def test_processes_that_write_a_file_each_write_the_same(tmp_path: Path) -> None:
    totals = [write_checkpoint(tmp_path / str(jobs), SMALL, seed=1, jobs=jobs) for jobs in (1, 2)]
    assert totals[0] == totals[1]
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "2").iterdir())
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_command_writes_a_checkpoint_with_other_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", SMALL)
    assert main([str(tmp_path), "--heads", "2", "--seed", "3"]) == 0
    assert json.loads((tmp_path / "config.json").read_text())["num_attention_heads"] == 2
    two = dataclasses.replace(SMALL, num_heads=2)
    name = "layers.0.attn.attn_sink"
    with safe_open(tmp_path / "model-00002-of-00004.safetensors", "pt") as stored:
        assert_bitwise_equal(stored.get_tensor(name), make_tensor(name, tensor_specs(two, 0)[name], 3), name)


def test_sizes_that_no_kernel_takes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_size.*q_lora_rank"):
        CheckpointSize(hidden_size=500, q_lora_rank=100)


def test_does_not_import_vllm() -> None:
    code = "import sys, aligned_e2e.vllm_checkpoint; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
