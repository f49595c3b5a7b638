"""A deep model out of few layers' weights: vLLM's DeepSeek-V4 layers that read the weights of others, for measuring.

A step of DeepSeek-V4-Flash's 43 layers is bound by the GPU, one of four layers by the host; but three engines with 43
layers of experts do not fit on a GPU. So layers share: the modules that hold weights are one object for all layers that
share them, which leaves nothing to keep in step while weights are loaded, processed for their kernels and captured in
graphs. What has a cache is each layer's own, caches included. A layer that shares its experts never constructs any.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["Sharing", "SharingError", "check_memory", "check_shared", "share", "weight_bytes"]

_FFN = "ffn"
_SLACK = int(5.9 * 2**30)
"""Bytes that an engine may hold beside weights and caches: workspaces and graphs. A layer's experts are 6.0 GiB."""


class SharingError(RuntimeError):
    """Layers do not share as they should: a layer is of another kind than its owner, or has weights of its own."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which layer has whose weights.

    Attributes:
        attention_of: For each layer the one whose attention, norms and mHC weights it has.
        ffn_of: For each layer the one whose router and experts it has.
    """

    attention_of: tuple[int, ...]
    ffn_of: tuple[int, ...]

    @classmethod
    def of(cls, checkpoint: str | Path) -> Sharing | None:
        """What the checkpoint's config.json asks for; None if its layers have their own weights."""
        config = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
        if "attention_of" not in config:
            return None
        return cls(tuple(config["attention_of"]), tuple(config["ffn_of"]))

    @contextlib.contextmanager
    def installed(self, module: Any) -> Iterator[None]:
        """Decoder layers that are constructed meanwhile share.

        Args:
            module: vLLM's ``models.deepseek_v4.nvidia.model``.
        """
        layer_class, experts_class = module.DeepseekV4DecoderLayer, module.DeepseekV4MoE
        construct = layer_class.__init__
        layers: dict[int, Any] = {}

        @functools.wraps(construct)
        def __init__(layer: Any, *args: Any, prefix: str, **kwargs: Any) -> None:
            index = int(prefix.rsplit(".", 1)[1])
            owner = self.ffn_of[index]
            if owner != index:  # where the layer looks its experts' class up
                module.DeepseekV4MoE = lambda *args, **kwargs: layers[owner].ffn
            try:
                construct(layer, *args, prefix=prefix, **kwargs)
            finally:
                module.DeepseekV4MoE = experts_class
            if self.attention_of[index] != index:
                share(layer, layers[self.attention_of[index]])
            layers[index] = layer

        layer_class.__init__ = __init__
        try:
            yield
        finally:
            layer_class.__init__ = construct


def share(layer: nn.Module, owner: nn.Module) -> None:
    """Give ``layer`` all weights of ``owner`` but the experts'; its own are freed.

    Raises:
        SharingError: They have other parameters. Nothing was changed.
    """
    mine, theirs = _shapes(layer), _shapes(owner)
    if differences := sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)):
        shown = ", ".join(f"{name} {mine.get(name)} for {theirs.get(name)}" for name in differences[:4])
        raise SharingError(f"expected two layers of one kind, got other parameters: {shown}")
    _share(layer, owner)


def _shapes(layer: nn.Module) -> dict[str, tuple[Any, ...]]:
    parameters = layer.named_parameters(remove_duplicate=False)
    return {name: (tuple(p.shape), p.dtype) for name, p in parameters if not name.startswith(f"{_FFN}.")}


def _share(part: nn.Module, owner: nn.Module) -> None:
    for name in part._parameters:
        setattr(part, name, getattr(owner, name))
    for name, child in list(part.named_children()):
        theirs = getattr(owner, name)
        if name == _FFN or child is theirs:
            continue
        if any(hasattr(module, "kv_cache") for module in child.modules()):
            _share(child, theirs)
            continue
        for parameter in child.parameters():  # at once: its loader refers to the module, a cycle that would wait for gc
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        setattr(part, name, theirs)


def check_shared(layers: Sequence[nn.Module], sharing: Sharing) -> None:
    """Check that each layer's weights are where its owner's are, and that neighbours have none in common.

    Raises:
        SharingError: Lists what is private or common.
    """
    problems = []
    storages: list[dict[int, str]] = []
    for index, layer in enumerate(layers):
        storages.append({})
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            owner = (sharing.ffn_of if name.startswith(f"{_FFN}.") else sharing.attention_of)[index]
            storage = parameter.untyped_storage()
            if storage.data_ptr() != layers[owner].get_parameter(name).untyped_storage().data_ptr():
                problems.append(f"layer {index} has {name} for itself, expected that of layer {owner}")
            if storage.nbytes():
                storages[-1][storage.data_ptr()] = name
    for index, (one, other) in enumerate(itertools.pairwise(storages)):
        if common := [name for pointer, name in one.items() if pointer in other]:
            problems.append(f"layers {index} and {index + 1} have weights in common: {', '.join(common[:4])}")
    if problems:
        raise SharingError(f"{len(problems)} problems: " + "; ".join(problems[:8]))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters, each counted once."""
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check_memory(allocated: int, weights: int, caches: int) -> None:
    """Check that no layer's experts are held a second time, in whatever form: an owner's kernels may keep copies.

    Args:
        allocated: Bytes that torch has allocated on the GPU.
        weights: Bytes of the model's weights, each counted once.
        caches: Bytes of the KV caches.

    Raises:
        SharingError: More is allocated than weights, caches, workspaces and graphs account for.
    """
    more = allocated - weights - caches
    if more > _SLACK:
        gib = [f"{size / 2**30:.1f} GiB" for size in (allocated, weights, caches, more)]
        raise SharingError(
            "expected {1} of weights, {2} of caches, and of all else less than a layer's experts; got {0}, that is {3} "
            "of all else: something keeps a copy of a layer's experts".format(*gib)
        )
