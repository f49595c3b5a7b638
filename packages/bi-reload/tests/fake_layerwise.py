"""What bi-reload's hook meets in vLLM, in small and on a CPU: a layerwise reload, a V4-like model, a worker.

Written from the facts that the hook relies on: a reload puts parameters on the meta device; loaders keep what comes and
count the elements that they copied; a layer that is whole is materialised, loaded, processed into the kernels' layout
and copied to its old addresses; what never came is left as it was.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bi_kernels.runtime.packages import resolve
from bi_reload.vllm_hook import PLAN

HEADS, PADDED, HIDDEN, VOCAB = 12, 16, 4, 6
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"

LAYERWISE_INFO: weakref.WeakKeyDictionary[nn.Module, Info] = weakref.WeakKeyDictionary()
LOADING_LAYERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Info:
    def __init__(self) -> None:
        self.checkpoint: dict[str, torch.Tensor] = {}  # meta tensors of the checkpoint's layout
        self.reset()

    def reset(self) -> None:
        self.load_numel = 0
        self.load_numel_total: int | None = None
        self.buffered: list[tuple[str, torch.Tensor]] = []
        self.kernel_tensors: dict[str, nn.Parameter] | None = None

    def can_load(self) -> bool:
        return self.load_numel_total is not None


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copied += args[0].numel()
        return func(*args, **(kwargs or {}))


def default_weight_loader(param: torch.Tensor, loaded: torch.Tensor) -> None:
    if param.shape != loaded.shape:
        raise ValueError(f"shape {tuple(loaded.shape)} does not fit {tuple(param.shape)}")
    param.data.copy_(loaded)


def _place_kernel_tensors(layer: nn.Module, info: Info) -> None:
    for name in list(layer._parameters):
        delattr(layer, name)
    for name, tensor in (info.kernel_tensors or {}).items():
        layer.register_parameter(name, tensor)


def _process(layer: nn.Module, info: Info) -> None:
    for name, meta in info.checkpoint.items():
        empty = torch.full(meta.shape, 77.0).to(meta.dtype)  # what vLLM calls empty
        setattr(layer, name, nn.Parameter(empty, requires_grad=False))
    for name, tensor in info.buffered:
        default_weight_loader(getattr(layer, name), tensor)
    if hasattr(layer, "quant_method"):
        layer.quant_method.process(layer)
    for name, tensor in (info.kernel_tensors or {}).items():
        tensor.data.copy_(getattr(layer, name))
    _place_kernel_tensors(layer, info)
    info.reset()


def record(model: nn.Module) -> None:
    for layer in model.modules():
        info = LAYERWISE_INFO.setdefault(layer, Info())
        info.checkpoint = {name: p.data.to("meta") for name, p in layer._parameters.items() if p is not None}


def initialize(model: nn.Module) -> None:
    for layer in model.modules():
        info = LAYERWISE_INFO[layer]
        if info.can_load():
            continue
        info.kernel_tensors = {name: p for name, p in layer._parameters.items() if p is not None}
        for name, meta in info.checkpoint.items():
            delattr(layer, name)
            parameter = nn.Parameter(meta, requires_grad=False)
            parameter.weight_loader = functools.partial(_deferred, layer, name)  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)
        info.load_numel_total = sum(meta.numel() for meta in info.checkpoint.values())


def _deferred(layer: nn.Module, name: str, param: torch.Tensor, loaded: torch.Tensor) -> None:
    info = LAYERWISE_INFO[layer]
    if not info.can_load():
        return
    info.buffered.append((name, loaded))
    with _Counter() as counter:
        default_weight_loader(param, loaded)
    info.load_numel += counter.copied
    if info.load_numel >= (info.load_numel_total or 0):
        _process(layer, info)


def finalize_layerwise_processing(model: nn.Module, model_config: object) -> None:
    for layer in model.modules():
        info = LAYERWISE_INFO[layer]
        if not info.can_load():
            continue
        if info.load_numel:
            _process(layer, info)
        else:
            _place_kernel_tensors(layer, info)
            info.reset()


class Kernel:
    """Helper object around parameters, as the experts of vLLM have it."""

    def __init__(self, layer: nn.Module) -> None:
        self.scale = layer.scale
        self.derived = layer.weight.float() + 1.0


class QuantMethod:
    def __init__(self) -> None:
        self.kernel: Kernel | None = None
        self.block = 128

    def process(self, layer: nn.Module) -> None:
        """The kernels' layout is another one than the checkpoint's."""
        layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        layer.scale = nn.Parameter(layer.scale.data * 2.0, requires_grad=False)
        self.kernel = Kernel(layer)


def frozen(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = frozen(3, HIDDEN, dtype=torch.bfloat16)
        self.scale = frozen(3)
        self.quant_method = QuantMethod()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_sink = nn.Parameter(torch.full((PADDED,), -math.inf), requires_grad=False)
        self.register_buffer("table", torch.tensor([0.018798828125]), persistent=False)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden_size = HIDDEN
        self.hc_attn_fn = frozen(24, 4 * HIDDEN)
        self.hc_attn_fn_broadcast: torch.Tensor | None = None
        self.attn = Attention()
        self.experts = Experts()


class Head(nn.Module):
    """A vocabulary that is padded to eight rows; the loader fills the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_dim, self.org_vocab_size, self.num_embeddings_padded = HIDDEN, VOCAB, VOCAB
        self.weight = frozen(VOCAB, HIDDEN, dtype=torch.bfloat16)


class InnerModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"num_attention_heads": HEADS, "num_hidden_layers": 2})()
        self.start_layer, self.end_layer = 0, 2
        self.layers = nn.ModuleList([Layer(), Layer()])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if "attn_sink" in name:
                parameters[name][: tensor.shape[0]].copy_(tensor)
            else:
                parameter = parameters[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
            loaded.add(name)
        return loaded

    def finalize_mhc_broadcast_weights(self) -> None:
        layer = self.layers[self.start_layer]
        layer.hc_attn_fn_broadcast = layer.hc_attn_fn.detach().view(24, 4, HIDDEN).sum(dim=1)


class ForCausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = InnerModel()
        self.lm_head = Head()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:  # one at a time, as a stream
            if name.startswith("mtp."):
                continue
            if name.startswith("layers."):
                loaded |= {f"model.{n}" for n in self.model.load_weights([(name, tensor)])}
            else:
                parameter = self.lm_head.weight
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
                loaded.add("lm_head.weight")
        self.model.finalize_mhc_broadcast_weights()
        return loaded


class Engine:
    """A transfer engine in checkpoint format; buckets are handed over as they are."""

    layerwise = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.resets = 0

    def start_weight_update(self) -> None:
        if self.layerwise:
            initialize(self.model)

    def update_weights(self, bucket: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(bucket)  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        sys.modules[RELOAD].finalize_layerwise_processing(self.model, None)

    def reset_weight_update_target(self) -> None:
        self.resets += 1


class Worker:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weight_transfer_engine = Engine(model)
        self._weight_update_active = False
        self.steps = 0

    def get_model(self) -> nn.Module:
        return self.model

    def compile_or_warm_up_model(self) -> str:
        return "times"

    def execute_model(self, scheduled: object) -> str:
        self.steps += 1
        return "tokens"

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("already active")
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info: Any) -> None:
        if not self._weight_update_active:
            raise RuntimeError("not active")
        try:
            self.weight_transfer_engine.update_weights(update_info)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("not active")
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def reload_weights(
        self, weights_iterator: Any = None, weights_path: Any = None, is_checkpoint_format: bool = True
    ) -> None:
        if is_checkpoint_format:
            initialize(self.model)
            self.model.load_weights(weights_iterator)  # type: ignore[operator]
            sys.modules[RELOAD].finalize_layerwise_processing(self.model, None)
        else:
            for name, tensor in weights_iterator:
                self.model.get_parameter(name).copy_(tensor)


OWNERS: dict[str, Any] = {
    "DeepseekV4ForCausalLM": ForCausalLM,
    "DeepseekV4Model": InnerModel,
    "Worker": Worker,
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the modules that the hook imports in place, and apply the table's reload patches to the classes above."""
    layerwise, utils, distributed = ModuleType(RELOAD), ModuleType("weight_utils"), ModuleType("distributed")
    for name in ("LAYERWISE_INFO", "LOADING_LAYERS", "_place_kernel_tensors", "finalize_layerwise_processing"):
        setattr(layerwise, name, globals()[name])
    utils.default_weight_loader = default_weight_loader  # type: ignore[attr-defined]
    distributed.get_tensor_model_parallel_rank = lambda: 0  # type: ignore[attr-defined]
    distributed.get_tensor_model_parallel_world_size = lambda: 1  # type: ignore[attr-defined]
    loader = "vllm.model_executor.model_loader"
    reload = ModuleType(f"{loader}.reload")
    reload.layerwise = layerwise  # type: ignore[attr-defined]
    modules = {f"{loader}.reload": reload, RELOAD: layerwise, f"{loader}.weight_utils": utils}
    modules |= {name: ModuleType(name) for name in ("vllm", "vllm.model_executor", loader)}
    modules["vllm.distributed"] = distributed
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    for patch in PLAN.patches:
        if not patch.replacement.startswith("bi_reload.vllm_reload:"):
            continue
        owner: Any = OWNERS.get(patch.path[0], layerwise if patch.module == RELOAD else None)
        if owner is None:
            continue
        name = patch.path[-1]
        replacement: Callable[..., Any] = resolve(patch.replacement)
        if patch.kind == "publish":
            monkeypatch.setattr(owner, name, replacement, raising=False)
        else:
            monkeypatch.setattr(owner, name, replacement(getattr(owner, name)))


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    tensors = {"head.weight": torch.randn(VOCAB, HIDDEN, generator=g).bfloat16()}
    for i in range(2):
        tensors |= {
            f"layers.{i}.hc_attn_fn": torch.randn(24, 4 * HIDDEN, generator=g),
            f"layers.{i}.attn.attn_sink": torch.randn(HEADS, generator=g),
            f"layers.{i}.experts.weight": torch.randn(3, HIDDEN, generator=g).bfloat16(),
            f"layers.{i}.experts.scale": torch.rand(3, generator=g),
        }
    return tensors


def start(seed: int) -> Worker:
    """An engine as vLLM starts it: built, loaded, processed, captured."""
    model = ForCausalLM()
    record(model)
    model.load_weights(checkpoint(seed).items())
    for layer in model.model.layers:
        layer.experts.quant_method.process(layer.experts)
    worker = Worker(model)
    assert worker.compile_or_warm_up_model() == "times"
    return worker
