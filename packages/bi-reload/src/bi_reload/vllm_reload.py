"""vLLM's weight reload with a lifecycle: what the hook installs around loading, finalising and serving.

Imported only after vLLM has imported the module that is edited. The first load of a model teaches what a whole
checkpoint is (names, dtypes, shapes). From then on every update, whether from disk, in buckets from a transfer engine,
or in kernel format, is begun once, checked tensor by tensor before it is written, finished once, and then refreshed,
put back on the addresses that captured graphs know, and verified. A model whose update did not end well is not served.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bi_kernels.runtime.errors import ReloadError

from . import finalize
from .addresses import AddressLedger, AddressMovedError, reachable_tensors
from .attn_sink import load_attn_sink_
from .finalize import ReloadReport, TensorSpec
from .fingerprint import weight_fingerprint
from .mhc_broadcast import refresh_mhc_broadcast_

__all__ = [
    "announce_fingerprints",
    "checked_load_weights",
    "finalize_layerwise_processing",
    "finalize_mhc_broadcast_weights",
    "finalize_weights_after_layerwise_reload",
    "finish_weight_update",
    "live_fingerprints",
    "load_weights_with_sinks",
    "record_addresses",
    "refuse_after_failed_reload",
    "reload_report",
    "reload_weights",
    "save_addresses",
    "start_weight_update",
    "update_weights",
]

Method = Callable[..., Any]
Weights = Iterable[tuple[str, torch.Tensor]]

_FINALIZER = "finalize_weights_after_layerwise_reload"
_DRAFT = "mtp."  # vLLM's target model skips these names


@dataclass(slots=True)
class _Update:
    """One update between its begin and its end.

    Attributes:
        live: In kernel format: every parameter by name. In checkpoint format None, and the manifest counts.
        announced: Fingerprints that the sender took, by name.
        seen: Names that were handed to vLLM.
    """

    live: dict[str, torch.Tensor] | None
    announced: dict[str, int]
    seen: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Served:
    """What is known about one model that vLLM serves.

    Attributes:
        manifest: Every tensor of the checkpoint that was loaded first; None before that.
        update: The open update.
        captured: Addresses recorded after graphs were captured.
        helpers: Objects that quantised layers hold beside their parameters, as they were then, by owner and name.
        report: What the last whole update found.
        announced: Fingerprints that the sender announced for the next update.
    """

    manifest: dict[str, TensorSpec] | None = None
    update: _Update | None = None
    captured: AddressLedger | None = None
    helpers: dict[str, tuple[object, str, object]] = field(default_factory=dict)
    report: ReloadReport | None = None
    announced: dict[str, int] = field(default_factory=dict)


_STATE = "_bi_reload_served"


def _served(model: nn.Module) -> _Served:
    held = vars(model).get(_STATE)
    if held is None:
        served = _Served()
        # On the model, so that it ends with it; behind a function, into which an address ledger does not look.
        held = vars(model)[_STATE] = lambda: served
    found: _Served = held()
    return found


def _is_ours(model: object) -> bool:
    """Whether the published method marks the model as DeepSeek-V4; every other model keeps vLLM's own lifecycle."""
    return isinstance(model, nn.Module) and hasattr(model, _FINALIZER)


# --- loading ----------------------------------------------------------------------------------------------------


def checked_load_weights(original: Method) -> Method:
    """``DeepseekV4ForCausalLM.load_weights`` that knows what a whole checkpoint is.

    The first load records names, dtypes and shapes. A later one must run inside a layerwise reload, because the
    parameters then have the kernels' layout, and its tensors are checked one by one. After the first problem nothing
    more is written, and the rest is still read, so that the error lists everything.

    Args:
        original: vLLM's method.

    Raises (the new method):
        ReloadError: No layerwise reload is open; or names that are unknown or came before, another dtype or shape, or
            a meta tensor. The update has then failed, see :func:`refuse_after_failed_reload`.

    Source: design.md, "The contract"; vLLM's ``DeepseekV4ForCausalLM.load_weights``.

    Invariance:
        Bits are moved, never computed.
    """

    def load_weights(self: nn.Module, weights: Weights) -> Any:
        served = _served(self)
        if served.manifest is None and served.update is None:
            manifest: dict[str, TensorSpec] = {}
            loaded = original(self, _recording(weights, manifest))
            served.manifest = manifest
            return loaded
        if not _layerwise_is_open(self):
            raise ReloadError(
                "load_weights: expected an open layerwise reload, got a model whose parameters have the kernels' "
                "layout. Use reload_weights(), or start_weight_update() first."
            )
        if served.update is None:  # somebody drives vLLM's reload functions without the worker
            _begin(self)
        with _failing(self, "load_weights"):
            return original(self, _checked(self, weights))

    return load_weights


def load_weights_with_sinks(original: Method) -> Method:
    """``load_weights`` of a V4 model whose attention sinks take the way of all parameters: through their loader.

    vLLM 0.26 copies sinks into a slice of the parameter. On a meta tensor, which it is during a layerwise reload, that
    does nothing, and nobody counts it. Here a rank's heads are padded with -inf to the parameter's whole length first,
    so that the plain loader takes them, counts every element, and no stale tail survives.

    Args:
        original: vLLM's method of the target, MTP or DSpark model.

    Raises (the new method):
        ArgumentError: Sinks of another dtype or number than the model's.
        ReloadError: The model has no such parameter.

    Source: vLLM's ``attn_sink`` branch of ``load_weights``; preview-pr.txt, *attn_sink loading preserves -inf padding*.

    Invariance:
        Bits are moved, never computed.
    """

    def load_weights(self: Any, weights: Weights) -> Any:
        sinks: set[str] = set()

        def without_sinks() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                target = _sink_parameter(self, name) if name.endswith("attn_sink") else None
                if target is None:
                    yield name, tensor
                else:
                    _load_sink(self, target, tensor)
                    sinks.add(target)

        loaded = original(self, without_sinks())
        return loaded if loaded is None else loaded | sinks

    return load_weights


def finalize_mhc_broadcast_weights(original: Method) -> Method:
    """``DeepseekV4Model.finalize_mhc_broadcast_weights``: one address for ever, and never between two buckets.

    vLLM calls it at the end of every ``load_weights``, which is once per bucket, when the source may still be a meta
    tensor. During a layerwise reload this does nothing; the refresh comes once, after the last bucket.

    Args:
        original: vLLM's method; not called, because it allocates.

    Raises (the new method):
        ArgumentError: ``hc_attn_fn`` is not of the model's shape.

    Source: preview-pr.txt, *to refresh MHC broadcast weights*; vLLM's method of this name.

    Invariance:
        The broadcast is a function of ``hc_attn_fn`` alone, by :func:`bi_reload.refresh_mhc_broadcast_`.
    """

    def finalize_mhc_broadcast_weights(self: Any) -> None:
        if self.start_layer >= self.end_layer:
            return
        layer = self.layers[self.start_layer]
        if not hasattr(layer, "hc_attn_fn_broadcast") or layer.hc_attn_fn.is_meta or _layerwise_is_open(self):
            return
        fn = layer.hc_attn_fn.detach()
        if layer.hc_attn_fn_broadcast is None:
            layer.hc_attn_fn_broadcast = torch.empty((fn.shape[0], layer.hidden_size), dtype=fn.dtype, device=fn.device)
        refresh_mhc_broadcast_(layer.hc_attn_fn_broadcast, fn)

    return finalize_mhc_broadcast_weights


# --- the end of an update ---------------------------------------------------------------------------------------


def finalize_layerwise_processing(original: Method) -> Method:
    """The last step of a layerwise load, under both names that vLLM calls it by.

    Before it: every name of the checkpoint must have come, and every layer must be complete, because vLLM fills what is
    missing with uninitialised memory or leaves it old. After it, once: the model's own finaliser.

    Args:
        original: vLLM's function.

    Raises (the new function):
        ReloadError: Names or elements are missing: all of them are listed. The update has then failed.
        AddressMovedError: A tensor is not where captured graphs read it. The update has then failed.

    Source: preview-pr.txt, *Layerwise actor-to-rollout reload calls finalize_weights_after_layerwise_reload()*.

    Invariance:
        A reload of the same weights leaves every byte; no address changes.
    """

    def finalize_layerwise_processing(model: nn.Module, model_config: Any) -> Any:
        update = _served(model).update if _is_ours(model) else None
        if update is None:  # the first load, of weights that are quantised as they come; or nothing came at all
            return original(model, model_config)
        with _failing(model, "the end of the reload"):
            _raise_missing(model)
            result = original(model, model_config)
            if (
                _served(model).update is update
            ):  # not yet: vLLM holds this function under two names, one inside the other
                _finish(model)
        return result

    return finalize_layerwise_processing


def finalize_weights_after_layerwise_reload(self: nn.Module) -> ReloadReport:
    """Recompute derived weights in place, after the last bucket of a reload; published as a method of the V4 model.

    The hook calls it once per update. A trainer that drives vLLM's reload functions itself may call it again: it
    changes nothing then.

    Args:
        self: The model, all of whose weights have been loaded.

    Returns:
        :class:`bi_reload.ReloadReport`.

    Raises:
        ReloadError: Tensors are on the meta device: the last bucket has not come. Nothing was written.
        AddressMovedError: A tensor is not where it was when graphs were captured.

    Source: preview-pr.txt names it.

    Invariance:
        Derived tensors are functions of the loaded weights alone; no address changes.
    """
    captured = _served(self).captured
    return finalize.finalize_in_place(self, captured if captured is not None else AddressLedger().record(self))


# --- the worker's lifecycle ---------------------------------------------------------------------------------------


def start_weight_update(original: Method) -> Method:
    """``Worker.start_weight_update``: opens the audited lifecycle.

    Raises (the new method):
        ReloadError: An update is open; or the transfer engine writes past the layerwise reload, so that nothing could
            be checked. Nothing was written.

    Source: design.md, "The contract".

    Invariance:
        Nothing is computed.
    """

    def start_weight_update(self: Any) -> None:
        model = self.get_model()
        if not _is_ours(model):
            original(self)
            return
        _begin(model)
        with _failing(model, "start_weight_update"):
            original(self)
            if not _layerwise_is_open(model):
                self._weight_update_active = False
                self.weight_transfer_engine.reset_weight_update_target()
                raise ReloadError(
                    f"{type(self.weight_transfer_engine).__name__}: expected a transfer engine that reloads layer by "
                    "layer in checkpoint format, got one that writes weights past it. Use the NCCL or IPC engine."
                )

    return start_weight_update


def update_weights(original: Method) -> Method:
    """``Worker.update_weights``: a bucket that is refused, or fails, ends the update as failed.

    Raises (the new method):
        ReloadError: As :func:`checked_load_weights`.

    Source: design.md, "The contract".

    Invariance:
        Bits are moved, never computed.
    """

    def update_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.get_model()
        if not _is_ours(model) or _served(model).update is None:
            return original(self, *args, **kwargs)
        with _failing(model, "update_weights"):
            return original(self, *args, **kwargs)

    return update_weights


def finish_weight_update(original: Method) -> Method:
    """``Worker.finish_weight_update``: the update succeeds as a whole, or has failed and can be started again.

    Raises (the new method):
        ReloadError: As :func:`finalize_layerwise_processing`.

    Source: design.md, "The contract".

    Invariance:
        As :func:`finalize_layerwise_processing`.
    """

    def finish_weight_update(self: Any) -> None:
        model = self.get_model()
        if not _is_ours(model) or _served(model).update is None:
            original(self)
            return
        try:
            with _failing(model, "finish_weight_update"):
                original(self)
                _must_be_finished(model, "finish_weight_update")
        except BaseException:
            # vLLM would keep the session open, and nobody could start the whole update that is needed now.
            self._weight_update_active = False
            self.weight_transfer_engine.reset_weight_update_target()
            raise

    return finish_weight_update


def reload_weights(original: Method) -> Method:
    """``Worker.reload_weights``, from disk or an iterator, in checkpoint or kernel format.

    vLLM copies kernel-format weights parameter by parameter, past every finaliser; here they are checked, counted and
    finalised like the others.

    Raises (the new method):
        ReloadError: An update is open, or as :func:`checked_load_weights` and :func:`finalize_layerwise_processing`.

    Source: design.md, "The contract"; vLLM's ``reload_weights``.

    Invariance:
        As :func:`finalize_layerwise_processing`.
    """

    def reload_weights(
        self: Any,
        weights_iterator: Weights | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        model = self.get_model()
        passed: dict[str, Any] = {
            "weights_iterator": weights_iterator,
            "weights_path": weights_path,
            "is_checkpoint_format": is_checkpoint_format,
        }
        if not _is_ours(model):
            original(self, **passed)
            return
        if not is_checkpoint_format and weights_iterator is None:
            raise ReloadError(
                "reload_weights: expected an iterator of kernel-format weights, got none. Files on disk are in "
                "checkpoint format: pass is_checkpoint_format=True."
            )
        _begin(model, kernel_format=not is_checkpoint_format)
        with _failing(model, "reload_weights"):
            if is_checkpoint_format:
                original(self, **passed)
            else:
                with torch.no_grad():
                    original(self, **passed | {"weights_iterator": _checked(model, weights_iterator or ())})
                _raise_missing(model)
                _finish(model)
            _must_be_finished(model, "reload_weights")

    return reload_weights


def record_addresses(original: Method) -> Method:
    """``Worker.compile_or_warm_up_model``: after graphs are captured, every address that they may read is recorded.

    Source: preview-pr.txt, *keep stable addresses across CUDA graph capture and replay*.

    Invariance:
        Nothing is computed.
    """

    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        model = self.get_model()
        if _is_ours(model):
            served = _served(model)
            served.helpers = _helpers(model)
            served.captured = AddressLedger().record(model)
        return result

    return compile_or_warm_up_model


def refuse_after_failed_reload(original: Method) -> Method:
    """``Worker.execute_model``: no token from a model that may hold parts of two updates.

    Raises (the new method):
        ReloadError: An update is open, or the last one failed after it had changed weights.

    Source: design.md, "The contract".

    Invariance:
        Nothing is computed.
    """

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.get_model()
        if _is_ours(model):
            if _served(model).update is not None:
                raise ReloadError(
                    "the model must not be served: expected no weight update in progress, got an open one. Finish it "
                    "first."
                )
            finalize.require_servable(model)
        return original(self, *args, **kwargs)

    return execute_model


# --- what a trainer asks for ---------------------------------------------------------------------------------------


def reload_report(worker: Any) -> ReloadReport | None:
    """What the last whole update found; for ``collective_rpc``. None before the first one.

    Args:
        worker: vLLM's worker.
    """
    return _served(worker.get_model()).report


def announce_fingerprints(worker: Any, fingerprints: Mapping[str, int]) -> None:
    """Hold the next update to these fingerprints of its tensors; for ``collective_rpc``, before the update begins.

    The sender takes them by :func:`bi_reload.weight_fingerprint` where the weights are. Each tensor that comes is
    fingerprinted where it arrives, before it is written, and one whose bytes changed on the way is refused.

    Args:
        worker: vLLM's worker.
        fingerprints: By checkpoint name, or by parameter name for an update in kernel format.
    """
    _served(worker.get_model()).announced = dict(fingerprints)


def save_addresses(worker: Any, path: str, *, captured: bool = False) -> None:
    """Write an address ledger of the model, for ``python -m bi_reload.addresses``; for ``collective_rpc``.

    Args:
        worker: vLLM's worker.
        path: The file.
        captured: The addresses that were recorded after graph capture, instead of those of now.

    Raises:
        ReloadError: None were recorded.
    """
    model = worker.get_model()
    ledger = _served(model).captured if captured else AddressLedger().record(model)
    if ledger is None:
        raise ReloadError("save_addresses: expected addresses recorded after graph capture, got none. Warm up first.")
    ledger.save(path)


def live_fingerprints(worker: Any) -> dict[str, int]:
    """Fingerprint of every weight as the kernels read it, computed on the device; for ``collective_rpc``.

    Equal between ranks that hold the same weights, and between a warm engine and a cold one.

    Args:
        worker: vLLM's worker.
    """
    model = worker.get_model()
    weights = finalize.destinations(model)
    for path, module in model.named_modules():
        broadcast = getattr(module, "hc_attn_fn_broadcast", None)
        if broadcast is not None:
            weights[f"{path}.hc_attn_fn_broadcast"] = broadcast
    return weight_fingerprint(weights)


# --- lifecycle ----------------------------------------------------------------------------------------------------


def _begin(model: nn.Module, *, kernel_format: bool = False) -> None:
    served = _served(model)
    if served.update is not None:
        raise ReloadError(
            "begin: expected no open update of this model, got one that was not finished. Begin once per update, not "
            "once per bucket."
        )
    served.update = _Update(dict(model.named_parameters()) if kernel_format else None, served.announced)
    served.announced = {}


@contextlib.contextmanager
def _failing(model: nn.Module, what: str) -> Iterator[None]:
    """End the open update as failed when the body raises. Every tensor is back on its address then."""
    try:
        yield
    except BaseException as error:
        served = _served(model)
        update, served.update = served.update, None
        if update is not None:
            _abandon_layerwise(model)
            for owner, name, helper in served.helpers.values():
                setattr(owner, name, helper)
            if update.seen:
                finalize.mark_broken(model, f"a reload failed in {what}: {error}")
        raise


def _finish(model: nn.Module) -> None:
    """Derived weights, addresses, report; the only place where an update ends well."""
    served = _served(model)
    _keep_helpers(served)
    served.report = getattr(model, _FINALIZER)()
    served.update = None
    finalize.mark_whole(model)


def _must_be_finished(model: nn.Module, what: str) -> None:
    if _served(model).update is not None:
        raise ReloadError(
            f"{what}: expected vLLM to finalise the model, got an update that is still open. This vLLM ends updates by "
            "another way than the one that is hooked."
        )


def _recording(weights: Weights, manifest: dict[str, TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if _DRAFT not in name:
            manifest[name] = TensorSpec.of(tensor)
        yield name, tensor


def _checked(model: nn.Module, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass on what fits. After the first problem pass on nothing, and raise all of them at the end."""
    served = _served(model)
    update = served.update
    if update is None:
        raise ReloadError("a bucket came outside of an update. Begin one first.")
    expected: Mapping[str, TensorSpec] = served.manifest or {}
    if update.live is not None:
        expected = {name: TensorSpec.of(tensor) for name, tensor in update.live.items()}
    problems: list[str] = []
    came: set[str] = set()
    for name, tensor in weights:
        if update.live is None and _DRAFT in name:
            yield name, tensor
            continue
        found = _tensor_problems(name, tensor, expected.get(name))
        if name in update.seen or name in came:
            found.append(f"{name}: came before in this update")
        if update.live is not None and (target := update.live.get(name)) is not None:
            if target.is_meta:
                found.append(f"{name}: the live tensor is on the meta device, a copy into it would be lost")
            elif not target.numel() and tensor.numel():
                found.append(f"{name}: the live tensor has 0 elements, its memory was given away")
        if not found and (sent := update.announced.get(name)) is not None:
            arrived = weight_fingerprint({name: tensor})[name]
            if arrived != sent:
                found.append(
                    f"{name}: expected fingerprint {sent:#018x}, got {arrived:#018x}; bytes changed on the way"
                )
        problems += found
        came.add(name)
        if not problems:
            update.seen.add(name)
            yield name, tensor
    finalize.raise_all("the bucket was refused, and nothing of it was written after the first problem", problems)


def _tensor_problems(name: str, tensor: torch.Tensor, spec: TensorSpec | None) -> list[str]:
    if spec is None:
        return [f"{name}: unknown, the model was not loaded with such a tensor"]
    problems = []
    if TensorSpec.of(tensor) != TensorSpec(spec.dtype, spec.shape):
        problems.append(f"{name}: expected {spec}, got {TensorSpec.of(tensor)}")
    if tensor.is_meta:
        problems.append(f"{name}: is on the meta device, so it has no values")
    return problems


def _raise_missing(model: nn.Module) -> None:
    """Raise if a name did not come or a layer is incomplete, with the number of elements that are missing."""
    served = _served(model)
    update = served.update
    if update is None:
        return
    expected = served.manifest or {}
    if update.live is not None:
        expected = {name: TensorSpec.of(tensor) for name, tensor in update.live.items()}
    problems = [
        f"{name}: missing, {torch.Size(spec.shape).numel()} elements"
        for name, spec in expected.items()
        if name not in update.seen
    ]
    if update.live is None and not problems:
        problems = list(_incomplete_layers(model))
    finalize.raise_all("the update is not whole", problems)


def _incomplete_layers(model: nn.Module) -> Iterator[str]:
    """Layers that vLLM still waits for although every name came, e.g. because the reload was begun again half-way."""
    infos = _layerwise().LAYERWISE_INFO
    for path, module in model.named_modules():
        info = infos.get(module)
        if info is None or not info.can_load():
            continue
        # vLLM does not count the few that it leaves in place, and those are never on the meta device.
        waiting = {name: p for name, p in module._parameters.items() if p is not None and p.is_meta}
        total = sum(parameter.numel() for parameter in waiting.values())
        # Rows of a vocabulary that is padded to a multiple are filled by the loader, not loaded.
        padding = getattr(module, "num_embeddings_padded", 0) - getattr(module, "org_vocab_size", 0)
        if total - padding * getattr(module, "embedding_dim", 0) > info.load_numel:
            yield f"{path}: {total - info.load_numel} of {total} elements did not come ({', '.join(waiting)})"


# --- vLLM's layerwise reload ----------------------------------------------------------------------------------------


def _layerwise() -> Any:
    from vllm.model_executor.model_loader.reload import layerwise

    return layerwise


def _layerwise_is_open(model: nn.Module) -> bool:
    """Whether vLLM has put any layer of the model on the meta device and waits for its weights."""
    infos = _layerwise().LAYERWISE_INFO
    return any(info is not None and info.can_load() for info in map(infos.get, model.modules()))


def _abandon_layerwise(model: nn.Module) -> None:
    """Give every layer that is still waiting its own tensors back, at their addresses."""
    layerwise = _layerwise()
    for module in model.modules():
        info = layerwise.LAYERWISE_INFO.get(module)
        if info is not None and info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(module, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()


def _helpers(model: nn.Module) -> dict[str, tuple[object, str, object]]:
    """Objects that a layer's quantisation method keeps beside the parameters, e.g. the experts' kernel and its scales.

    vLLM builds them anew for every reload, around tensors that it then copies to the old addresses and drops.
    """
    found: dict[str, tuple[object, str, object]] = {}
    for path, module in model.named_modules():
        owner = getattr(module, "quant_method", None)
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if hasattr(value, "__dict__") and not isinstance(value, type | nn.Module | torch.Tensor):
                found[f"{path}.quant_method.{name}"] = (owner, name, value)
    return found


def _keep_helpers(served: _Served) -> None:
    """Put the recorded helpers back, with the values of the new ones: captured graphs know the old addresses.

    Raises:
        AddressMovedError: A new helper has other tensors than the old one. The old ones were put back.
    """
    changed = {
        path: (owner, name, helper)
        for path, (owner, name, helper) in served.helpers.items()
        if getattr(owner, name, None) is not helper
    }
    if not changed:
        return
    new = {path: getattr(owner, name, None) for path, (owner, name, _) in changed.items()}
    for owner, name, helper in changed.values():
        setattr(owner, name, helper)
    old = {path: helper for path, (_, _, helper) in changed.items()}
    sources, targets = dict(reachable_tensors(new)), dict(reachable_tensors(old))
    differences = [
        difference
        for difference in AddressLedger().record(targets).compare(AddressLedger().record(sources))
        if difference.kind != "moved"
    ]
    if differences:
        raise AddressMovedError(differences)
    with torch.no_grad():
        for path, target in targets.items():
            if target.data_ptr() != sources[path].data_ptr():
                target.copy_(sources[path])


# --- attention sinks --------------------------------------------------------------------------------------------------


def _sink_parameter(model: Any, name: str) -> str | None:
    """The parameter's name inside ``model``; None for a sink of another model, which vLLM's own code then skips."""
    if hasattr(model, "_remap_dspark_name"):
        mapped: str | None = model._remap_dspark_name(name)
        return mapped
    if hasattr(model, "_rewrite_spec_layer_name"):
        if (found := re.match(r"mtp\.(\d+)\.(.*)", name)) is None:
            return None
        layer = model.config.num_hidden_layers + int(found[1])
        rewritten: str = model._rewrite_spec_layer_name(layer, f"model.layers.{layer}.{found[2]}")
        return rewritten
    return name


def _load_sink(model: Any, name: str, loaded: torch.Tensor) -> None:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    # Looked up now, not when the load began: layers change between meta and real tensors while weights come in.
    parameter = dict(model.named_parameters()).get(name)
    if parameter is None:
        raise ReloadError(f"{name}: expected a parameter of {type(model).__name__}, got none of this name.")
    heads = model.config.num_attention_heads // get_tensor_model_parallel_world_size()
    padded = torch.empty(parameter.shape, dtype=parameter.dtype, device=loaded.device)
    load_attn_sink_(padded, loaded, first_head=heads * get_tensor_model_parallel_rank(), num_heads=heads)
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, padded)
