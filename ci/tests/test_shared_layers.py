"""Layers that share weights, on modules built as vLLM's are: who has whose, what is freed, what is noticed."""

from __future__ import annotations

import itertools
import json
import types

import pytest
import torch
from torch import nn

from aligned_e2e.shared_layers import Sharing, SharingError, check_memory, check_shared, share, weight_bytes
from aligned_e2e.vllm_checkpoint import SIZES, sharing

RATIOS = (0, 0, 4, 128, 4, 128, 4)
HASHED = 3


def weight(*shape):
    return nn.Parameter(torch.randn(shape), requires_grad=False)


class Linear(nn.Module):
    """A module with a weight, whose loader refers back to it."""

    def __init__(self, rows):
        super().__init__()
        self.weight = weight(rows, 8)
        self.weight.weight_loader = self.load
        self.bias = None

    def load(self, loaded):
        self.weight.data.copy_(loaded)

    def process(self):
        """As a quantisation method does: another parameter, in the kernel's layout."""
        self.weight = nn.Parameter(self.weight.data.T.contiguous(), requires_grad=False)


class Cache(nn.Module):
    def __init__(self, prefix):
        super().__init__()
        self.prefix, self.kv_cache = prefix, torch.tensor([])


class Compressor(nn.Module):
    def __init__(self, prefix, ratio):
        super().__init__()
        self.ape, self.fused = weight(ratio, 4), Linear(4)
        self.state_cache = Cache(f"{prefix}.state_cache")


class Indexer(nn.Module):
    def __init__(self, prefix):
        super().__init__()
        self.wq_b, self.k_cache = Linear(6), Cache(f"{prefix}.k_cache")
        self.indexer_op = nn.Module()
        self.indexer_op.k_cache = self.k_cache  # no other module, as there


class Attention(nn.Module):
    def __init__(self, prefix, ratio):
        super().__init__()
        self.prefix, self.kv_cache = prefix, torch.tensor([])
        self.attn_sink, self.wq_a, self.window = weight(4), Linear(16), Cache(f"{prefix}.window")
        self.compressor = Compressor(prefix, ratio) if ratio else None
        self.indexer = Indexer(prefix) if ratio == 4 else None


class Experts(nn.Module):
    made = 0

    def __init__(self, prefix):
        super().__init__()
        Experts.made += 1
        self.w13, self.gate = weight(64, 8), Linear(3)
        self.gate.tid2eid = weight(5, 2) if int(prefix.split(".")[-2]) < HASHED else None


class Layer(nn.Module):
    """A decoder layer, which looks its experts' class up in its module."""

    def __init__(self, config, prefix, buffer=None):
        super().__init__()
        self.attn = Attention(f"{prefix}.attn", config[int(prefix.split(".")[-1])])
        self.ffn = model_module.DeepseekV4MoE(config, prefix=f"{prefix}.ffn")
        self.norm, self.hc_fn = Linear(1), weight(3)
        self.broadcast = None


class MoE(Experts):
    def __init__(self, config, prefix):
        super().__init__(prefix)


model_module = types.SimpleNamespace(DeepseekV4DecoderLayer=Layer, DeepseekV4MoE=MoE)
SHARING = Sharing(sharing(RATIOS), sharing([layer < HASHED for layer in range(len(RATIOS))]))


@pytest.fixture
def model():
    Experts.made = 0
    with SHARING.installed(model_module):
        layers = [Layer(RATIOS, prefix=f"model.layers.{index}") for index in range(len(RATIOS))]
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    return model


def test_neighbours_never_share_and_an_owner_is_of_the_same_kind():
    assert SHARING.attention_of == (0, 1, 2, 3, 2, 3, 2)
    assert SHARING.ffn_of == (0, 1, 0, 3, 4, 3, 4)
    flash = SIZES["flash"]
    for owners, kinds in ((flash.attention_of, flash.compress_ratios), (flash.ffn_of, [i < 3 for i in range(43)])):
        assert len(owners) == 43
        assert all(one != other for one, other in itertools.pairwise(owners))
        assert all(kinds[owner] == kinds[layer] and owner <= layer for layer, owner in enumerate(owners))
        assert all(owners[owner] == owner for owner in owners)
        assert len(set(owners)) == 4


def test_layers_have_the_weights_of_their_owners_and_caches_of_their_own(model):
    check_shared(model.layers, SHARING)
    assert Experts.made == 4  # no others were ever allocated
    second, sixth = model.layers[2], model.layers[6]
    assert sixth.attn.wq_a is second.attn.wq_a
    assert sixth.attn.attn_sink is second.attn.attn_sink
    assert sixth.attn.indexer.wq_b is second.attn.indexer.wq_b
    assert sixth.attn.compressor.ape is second.attn.compressor.ape
    assert (sixth.norm, sixth.hc_fn) == (second.norm, second.hc_fn)
    assert sixth.ffn is model.layers[4].ffn
    for name in ("attn", "attn.window", "attn.compressor.state_cache", "attn.indexer.k_cache"):
        assert model.get_submodule(f"layers.6.{name}") is not model.get_submodule(f"layers.2.{name}")
        assert model.get_submodule(f"layers.6.{name}").prefix.startswith("model.layers.6.")
    assert sixth.attn.indexer.indexer_op.k_cache is sixth.attn.indexer.k_cache


def test_the_loader_sees_each_weight_once_under_its_owners_name(model):
    names = dict(model.named_parameters())
    owners = {"ffn": set(SHARING.ffn_of), "other": set(SHARING.attention_of)}
    seen = {"ffn": set(), "other": set()}
    for name in names:
        _, layer, part, *_ = name.split(".")
        seen["ffn" if part == "ffn" else "other"].add(int(layer))
    assert seen == owners
    assert len({parameter.data_ptr() for parameter in names.values()}) == len(names)


def test_a_layers_own_weights_are_freed_at_once(monkeypatch):
    mine, owner = (Layer(RATIOS, prefix=f"layers.{index}") for index in (4, 6))
    own = mine.attn.wq_a.weight  # as a reference cycle would hold it
    share(mine, owner)
    assert own.numel() == 0
    assert own.untyped_storage().nbytes() == 0
    assert owner.attn.wq_a.weight.numel() == 16 * 8
    assert mine.ffn is not owner.ffn  # these are shared before they are made


def test_processing_reaches_all_that_share(model):
    """Weights are replaced when they are processed; the module is one, so that nobody keeps the old ones."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.process()
    check_shared(model.layers, SHARING)
    assert model.layers[6].attn.wq_a.weight.shape == (8, 16)


@pytest.mark.parametrize("name", ["attn.wq_a.weight", "ffn.w13", "hc_fn", "attn.compressor.ape"])
def test_a_private_copy_is_noticed_by_name(model, name):
    """A twin that lays weights out anew for one layer."""
    path, _, attribute = name.rpartition(".")
    layer, other = model.layers[6], model.layers[4 if name.startswith("ffn") else 2]
    if path:  # a module of its own, as a processing that copies would leave it
        parent, _, child = path.rpartition(".")
        copy = type(other.get_submodule(path)).__new__(type(other.get_submodule(path)))
        copy.__dict__.update(other.get_submodule(path).__dict__)
        copy._parameters = dict(other.get_submodule(path)._parameters)
        (layer.get_submodule(parent) if parent else layer)._modules[child] = copy
    owner = layer.get_submodule(path) if path else layer
    setattr(owner, attribute, nn.Parameter(other.get_parameter(name).clone(), requires_grad=False))
    with pytest.raises(SharingError, match=rf"layer 6 has {name.replace('.', '[.]')} for itself"):
        check_shared(model.layers, SHARING)


def test_neighbours_with_a_weight_in_common_are_noticed(model):
    """Its second reading might come from a cache."""
    model.layers[5].ffn = model.layers[4].ffn
    with pytest.raises(SharingError, match=r"layers 4 and 5 have weights in common: ffn\.w13"):
        check_shared(model.layers, Sharing(SHARING.attention_of, (0, 1, 0, 3, 4, 4, 4)))


def test_layers_of_two_kinds_do_not_share_and_nothing_is_changed():
    one, other = (Layer(RATIOS, prefix=f"layers.{index}") for index in (3, 4))
    before = dict(one.named_parameters())
    with pytest.raises(SharingError, match=r"attn.compressor.ape \(\(128, 4\), torch.float32\) for \(\(4, 4\)"):
        share(one, other)
    assert all(parameter is before[name] for name, parameter in one.named_parameters())
    with SHARING.installed(model_module):
        for index in range(4):
            Layer(RATIOS, prefix=f"layers.{index}")
        with pytest.raises(SharingError):  # its config says C128, and who shares was said for C4
            Layer((0, 0, 4, 128, 128), prefix="layers.4")
    assert (model_module.DeepseekV4DecoderLayer, model_module.DeepseekV4MoE) == (Layer, MoE)
    assert Layer(RATIOS, prefix="layers.5").attn.wq_a.weight.numel()  # constructed as ever


def test_experts_that_are_held_twice_are_noticed_by_the_memory(model):
    gib = 1 << 30
    check_memory(allocated=40 * gib, weights=27 * gib, caches=10 * gib)
    with pytest.raises(SharingError, match=r"43\.0 GiB, that is 6\.0 GiB of all else"):
        check_memory(allocated=43 * gib, weights=27 * gib, caches=10 * gib)
    assert weight_bytes(model) == sum(p.untyped_storage().nbytes() for p in model.parameters())


def test_the_checkpoint_says_who_shares(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    assert Sharing.of(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"attention_of": [0, 0], "ffn_of": [0, 1]}))
    assert Sharing.of(str(tmp_path)) == Sharing((0, 0), (0, 1))
