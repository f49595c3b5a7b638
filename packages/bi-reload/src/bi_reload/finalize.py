"""Reload of a whole set of weights, bucket by bucket, that keeps addresses and ends in refreshed derived weights.

The rules, each bought with a fault that somebody met: a reload is opened once and closed once; a bucket is checked
before its first byte is written; writes go in place; derived weights are refreshed once, after the last bucket; a
model whose reload did not end well is not served.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from bi_kernels.runtime.errors import ReloadError

from .addresses import AddressLedger, reachable_tensors
from .fingerprint import weight_fingerprint
from .mhc_broadcast import refresh_mhc_broadcast_

__all__ = [
    "DerivedWeights",
    "LayerwiseReload",
    "ReloadReport",
    "TensorSpec",
    "finalize_weights_after_layerwise_reload",
    "require_servable",
]


@runtime_checkable
class DerivedWeights(Protocol):
    """A module that computes some of its tensors from its loaded weights."""

    def refresh_derived_weights_(self) -> Iterable[str]:
        """Recompute them in place, keeping their addresses, and return their names relative to the module."""
        ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of an update will be.

    Attributes:
        dtype: Its dtype; must be that of the live tensor, because a cast on the wire loses bits.
        shape: Its shape on the wire.
        layout: ``"checkpoint"``: goes through the parameter's ``weight_loader`` if it has one. ``"kernel"``: already
            has the live tensor's shape and is copied as it is.
        fingerprint: The sender's :func:`bi_reload.weight_fingerprint` of it. Where it is given, a tensor with other
            bytes is refused before anything is written.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Literal["checkpoint", "kernel"] = "checkpoint"
    fingerprint: int | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        layout: Literal["checkpoint", "kernel"] = "checkpoint",
        *,
        fingerprint: int | None = None,
    ) -> TensorSpec:
        """The spec of a tensor that will be sent."""
        return cls(tensor.dtype, tuple(tensor.shape), layout, fingerprint)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ReloadReport:
    """What finalising found and did.

    Attributes:
        refreshed: Names of the derived tensors that were recomputed in place.
        tensors_checked: How many tensors were checked for memory and address.
        moved: Names of tensors that changed address. Empty: a move raises.
        fingerprints: Name to fingerprint of every parameter, persistent buffer and derived tensor, if asked for.
    """

    refreshed: tuple[str, ...]
    tensors_checked: int
    moved: tuple[str, ...] = ()
    fingerprints: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    """What is known about a model between the first begin and the end of its life."""

    owner: weakref.ref[LayerwiseReload] | None = None  # of the open reload
    wrote: bool = False  # whether the open reload has changed a byte
    broken: str = ""  # why the model must not be served; survives until a whole reload

    def open_owner(self) -> LayerwiseReload | None:
        """The open reload, if there is one. One whose object is gone can never be finished, so it counts as aborted."""
        owner = self.owner() if self.owner is not None else None
        if owner is None and self.owner is not None:
            self.close("a reload was dropped half-way, after it had changed weights" if self.wrote else "")
        return owner

    def close(self, broken: str) -> None:
        """End the open reload; ``broken`` empty: without harm."""
        self.owner, self.wrote = None, False
        self.broken = broken or self.broken


_STATES: weakref.WeakKeyDictionary[nn.Module, _State] = weakref.WeakKeyDictionary()


def require_servable(model: nn.Module) -> None:
    """Raise while the model's weights may be a mixture of two updates.

    Call it before serving after a reload. Models that were never reloaded pass.

    Raises:
        ReloadError: A reload is open, or the last one failed after it had changed weights, and no whole reload has
            succeeded since.
    """
    state = _STATES.get(model)
    if state is None:
        return
    if state.open_owner() is not None:
        raise ReloadError(
            "the model must not be served: expected no reload in progress, got an open one. Finish it first."
        )
    if state.broken:
        raise ReloadError(
            f"the model must not be served: {state.broken.rstrip('.')}. Run a whole reload to the end first."
        )


class LayerwiseReload:
    """One whole update of a model's weights: ``begin``, ``load_bucket`` for each bucket, ``finish``.

    Buckets may come in any order and cut the update anywhere between tensors. Non-persistent buffers are never
    touched. The same object can be used for the next update.

    Args:
        model: The live model.
        manifest: The whole update: name of a parameter or persistent buffer to :class:`TensorSpec` or
            ``(dtype, shape)``. It must name every parameter and persistent buffer once.
        keep: Names that this update leaves as they are, on purpose. Not allowed after a failed reload, which may have
            changed them.
        ledger: Addresses recorded when graphs were captured: ``begin`` and ``finish`` hold the model to them. None
            records at ``begin``, which finds what this reload moves, but not what moved before it.
    """

    def __init__(
        self,
        model: nn.Module,
        manifest: Mapping[str, TensorSpec | tuple[torch.dtype, tuple[int, ...]]],
        *,
        keep: Iterable[str] = (),
        ledger: AddressLedger | None = None,
    ) -> None:
        self._model = model
        self._manifest = {
            name: spec if isinstance(spec, TensorSpec) else TensorSpec(spec[0], tuple(spec[1]))
            for name, spec in manifest.items()
        }
        self._keep = frozenset(keep)
        self._loaded: set[str] = set()
        self._captured = ledger
        self._ledger = AddressLedger()

    def begin(self) -> None:
        """Open the update. Nothing is written.

        Raises:
            ReloadError: This or another reload of the model is open, or manifest and model do not fit: unknown names,
                weights that neither manifest nor ``keep`` names, another dtype, shape or layout, destinations without
                elements or on the meta device, tensors that are not where the ledger has them. All of it in one list;
                nothing was changed.
        """
        state = _STATES.setdefault(self._model, _State())
        if state.open_owner() is not None:
            raise ReloadError(
                "begin: expected no open reload of this model, got one that was neither finished nor aborted. "
                "Begin once per update, not once per bucket; abort() the old one to start over."
            )
        problems = self._manifest_problems()
        if state.broken:
            problems += [f"{name}: may not be kept after a reload that failed half-way" for name in sorted(self._keep)]
        if self._captured is not None:
            problems += [str(difference) for difference in self._captured.diff(self._model)]
        raise_all("the update does not fit the model", problems)
        self._ledger = self._captured if self._captured is not None else AddressLedger().record(self._model)
        self._loaded.clear()
        state.owner = weakref.ref(self)

    def load_bucket(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write some of the update's tensors in place.

        Args:
            tensors: Name to whole tensor, on any device with memory; not a view of the model's own weights.

        Raises:
            ReloadError: The reload is not open; or the bucket has unknown names, names that came before, or tensors of
                another dtype, shape, layout or fingerprint than the manifest's, or on the meta device. All of
                it in one list, nothing of the bucket is written, and the reload stays open. If a ``weight_loader``
                fails half-way, the reload ends and the model is not servable until a whole one succeeds.
        """
        state = self._open_state("load_bucket")
        live = destinations(self._model)
        raise_all("the bucket was refused, and nothing of it was written", self._bucket_problems(tensors, live))
        for name, tensor in tensors.items():
            target = live[name]
            address = target.data_ptr()
            state.wrote = True
            try:
                with torch.no_grad():
                    if (loader := self._loader(name, target)) is not None:
                        loader(target, tensor)
                    else:
                        target.copy_(tensor)
            except Exception as error:
                raise self._failure(state, f"{name} could not be written: {error}") from error
            if target.data_ptr() != address:
                raise self._failure(state, f"the weight_loader of {name} moved it instead of writing in place")
            self._loaded.add(name)
        now = destinations(self._model)
        replaced = [name for name in tensors if now.get(name) is not live[name]]
        if replaced:
            raise self._failure(state, f"weight_loaders replaced {', '.join(replaced)} instead of writing in place")

    def finish(self, *, fingerprints: bool = False) -> ReloadReport:
        """Close the update: refresh derived weights, once, and check that no tensor of the model moved.

        Args:
            fingerprints: Also compute the fingerprint of every weight.

        Raises:
            ReloadError: Tensors of the manifest did not come: listed per module, with the number of tensors and
                elements. The reload stays open: send the rest, or abort. Or finalising failed: the reload ends and the
                model is not servable.
            AddressMovedError: A tensor moved, appeared or disappeared since ``begin``. The reload ends and the model
                is not servable: captured graphs would read stale memory.
        """
        state = self._open_state("finish")
        missing = [name for name in self._manifest if name not in self._loaded]
        if missing:
            raise ReloadError(self._describe_missing(missing))
        state.wrote = True
        try:
            report = finalize_in_place(self._model, self._ledger, fingerprints=fingerprints)
        except Exception as error:
            state.close(f"a reload failed in finish: {error}")
            raise
        state.close("")
        state.broken = ""
        return report

    def abort(self) -> None:
        """Give the update up. If it has written nothing, the model is as servable as before; otherwise it is not.

        Raises:
            ReloadError: The reload is not open.
        """
        state = self._open_state("abort")
        state.close("a reload was aborted half-way, after it had changed weights" if state.wrote else "")

    def _open_state(self, call: str) -> _State:
        state = _STATES.get(self._model)
        if state is None or state.open_owner() is not self:
            raise ReloadError(f"{call}: expected an open reload, got a closed one. Call begin() first.")
        return state

    @staticmethod
    def _failure(state: _State, reason: str) -> ReloadError:
        """End the reload with the model unservable, and return the error that says so."""
        state.close(f"a reload failed: {reason}")
        return ReloadError(
            f"the reload failed: {reason}. Some weights have changed already, so the model is not servable until a "
            "whole reload succeeds."
        )

    def _loader(self, name: str, target: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], object] | None:
        if self._manifest[name].layout == "kernel":
            return None
        return getattr(target, "weight_loader", None)

    def _manifest_problems(self) -> list[str]:
        live = destinations(self._model)
        problems = []
        for name in (name for name in (*self._manifest, *self._keep) if name not in live):
            problems.append(f"{name}: unknown, the model has no such parameter or persistent buffer")
        names_of: dict[int, list[str]] = {}
        for name in self._manifest:
            if name in live:
                problems += self._target_problems(name, live[name])
                names_of.setdefault(id(live[name]), []).append(name)
        problems += [f"{' and '.join(names)}: one tensor under two names" for names in names_of.values() if names[1:]]
        covered = {*names_of, *(id(live[name]) for name in self._keep if name in live)}
        for name, target in live.items():
            if id(target) not in covered:
                problems.append(f"{name}: missing from the manifest ({target.numel()} elements would stay old)")
                covered.add(id(target))
        return problems

    def _target_problems(self, name: str, target: torch.Tensor) -> list[str]:
        """What stands against writing the manifest's tensor to the live one."""
        spec = self._manifest[name]
        have = TensorSpec.of(target)
        problems = []
        if target.is_meta:
            problems.append(f"{name}: the live tensor is on the meta device, a copy into it would be lost")
        if target.dtype != spec.dtype:
            problems.append(f"{name}: expected the live tensor's dtype ({have}), got {spec}")
        if self._loader(name, target) is None and have.shape != spec.shape:
            problems.append(
                f"{name}: expected the live tensor's shape ({have}), got {spec}, and it has no weight_loader"
            )
        if not target.numel() and (torch.Size(spec.shape).numel() or self._loader(name, target) is not None):
            problems.append(f"{name}: the live tensor has 0 elements, its memory was given away")
        return problems

    def _bucket_problems(self, tensors: Mapping[str, object], live: Mapping[str, torch.Tensor]) -> list[str]:
        problems = []
        owners = {t.untyped_storage().data_ptr(): name for name, t in live.items() if t.numel() and not t.is_meta}
        for name, tensor in tensors.items():
            spec = self._manifest.get(name)
            if spec is None:
                problems.append(f"{name}: unknown, not in the manifest")
                continue
            if name in self._loaded:
                problems.append(f"{name}: came before in this reload")
            if not isinstance(tensor, torch.Tensor):
                problems.append(f"{name}: expected a tensor, got {type(tensor).__name__}")
                continue
            if TensorSpec.of(tensor, spec.layout) != spec or tensor.layout != torch.strided:
                have = f"{TensorSpec.of(tensor)}" + ("" if tensor.layout == torch.strided else f" ({tensor.layout})")
                problems.append(f"{name}: expected {spec}, got {have}")
            if tensor.is_meta:
                problems.append(f"{name}: is on the meta device, so it has no values")
            elif not self._is_what_was_sent(name, tensor, spec):
                problems.append(f"{name}: its bytes changed on their way (the manifest has another fingerprint)")
            elif tensor.layout == torch.strided and (owner := owners.get(tensor.untyped_storage().data_ptr())):
                problems.append(f"{name}: shares memory with the model's own {owner}")
            if name not in live:
                problems.append(f"{name}: is gone from the model since begin")
                continue
            problems += self._target_problems(name, live[name])
            recorded = self._ledger.entries.get(name)
            if recorded is not None and not live[name].is_meta and recorded.data_ptr != live[name].data_ptr():
                problems.append(f"{name}: the live tensor moved since begin")
        return problems

    @staticmethod
    def _is_what_was_sent(name: str, tensor: torch.Tensor, spec: TensorSpec) -> bool:
        """False only where a tensor of the right kind has other bytes than the sender's."""
        if spec.fingerprint is None or TensorSpec.of(tensor, spec.layout) != spec or tensor.layout != torch.strided:
            return True
        return weight_fingerprint({name: tensor})[name] == spec.fingerprint

    def _describe_missing(self, missing: list[str]) -> str:
        by_module: dict[str, list[str]] = {}
        for name in missing:
            module, _, leaf = name.rpartition(".")
            by_module.setdefault(module or "(root)", []).append(leaf)
        lines = []
        for module, leaves in by_module.items():
            prefix = "" if module == "(root)" else f"{module}."
            elements = sum(torch.Size(self._manifest[prefix + leaf].shape).numel() for leaf in leaves)
            lines.append(f"  {module}: {len(leaves)} tensors, {elements} elements: {', '.join(leaves)}")
        return (
            f"finish: expected all {len(self._manifest)} tensors of the manifest, {len(missing)} did not come:\n"
            + "\n".join(lines)
            + "\nSend them and finish again, or abort(). Until a whole reload succeeds the model is not servable."
        )


def finalize_weights_after_layerwise_reload(model: nn.Module, *, fingerprints: bool = False) -> ReloadReport:
    """Refresh every derived weight in place, after the last bucket of a reload. Calling it again changes nothing.

    Derived weights are those of modules with a ``refresh_derived_weights_`` method (:class:`DerivedWeights`), and the
    pair ``hc_attn_fn`` / ``hc_attn_fn_broadcast`` of modules where the latter is a tensor.
    :meth:`LayerwiseReload.finish` calls it; call it yourself only where something else drives the reload.

    Args:
        model: The live model, all of whose weights have been loaded.
        fingerprints: Also compute the fingerprint of every parameter, persistent buffer and derived tensor.

    Returns:
        :class:`ReloadReport`.

    Raises:
        ReloadError: A :class:`LayerwiseReload` of the model is still open, or tensors are on the meta device (all of
            them are listed): the weights are not complete yet. Nothing was written.
        AddressMovedError: Refreshing moved a tensor.

    Source:
        The name is the specification's. vLLM calls ``finalize_mhc_broadcast_weights`` at the end of every
        ``load_weights``, which is once per bucket, and allocates there.

    Invariance:
        Derived tensors are functions of the loaded weights alone; no address changes.
    """
    state = _STATES.get(model)
    if state is not None and state.open_owner() is not None:
        raise ReloadError(
            "finalize_weights_after_layerwise_reload: expected a finished reload, got one that is still open. "
            "Send the last bucket and call finish(), which calls this."
        )
    return finalize_in_place(model, AddressLedger().record(model), fingerprints=fingerprints)


def mark_broken(model: nn.Module, reason: str) -> None:
    """Have :func:`require_servable` refuse the model until :func:`mark_whole`. For whoever else drives a reload."""
    _STATES.setdefault(model, _State()).broken = reason


def mark_whole(model: nn.Module) -> None:
    """A whole reload of the model has succeeded."""
    if (state := _STATES.get(model)) is not None:
        state.broken = ""


def finalize_in_place(model: nn.Module, ledger: AddressLedger, *, fingerprints: bool = False) -> ReloadReport:
    """Refresh derived weights and verify addresses; :func:`finalize_weights_after_layerwise_reload` without its check.

    Raises:
        ReloadError: Tensors are on the meta device. Nothing was written.
        AddressMovedError: A tensor is not where ``ledger`` has it.
    """
    meta = [f"{name}: on the meta device" for name, tensor in reachable_tensors(model) if tensor.is_meta]
    raise_all("the weights are not complete", meta)
    refreshed: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            if isinstance(module, DerivedWeights):
                names = list(module.refresh_derived_weights_())
                refreshed |= {prefix + name: _attribute(module, name) for name in names}
            broadcast = getattr(module, "hc_attn_fn_broadcast", None)
            if broadcast is not None and f"{prefix}hc_attn_fn_broadcast" not in refreshed:
                fn: Any = getattr(module, "hc_attn_fn", None)  # None is refused there, by name
                refresh_mhc_broadcast_(broadcast, fn)
                refreshed[f"{prefix}hc_attn_fn_broadcast"] = broadcast
    ledger.verify(model)
    prints = weight_fingerprint({**destinations(model), **refreshed}) if fingerprints else {}
    return ReloadReport(tuple(refreshed), len(ledger), fingerprints=prints)


def _attribute(module: object, name: str) -> torch.Tensor:
    value: object = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, torch.Tensor):
        raise ReloadError(
            f"{type(module).__name__}.refresh_derived_weights_: expected names of tensors, got {name!r}. "
            "Return the names, relative to the module, of the tensors it wrote."
        )
    return value


def destinations(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer under all its names: what an update may write."""
    live: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                live[f"{path}.{name}" if path else name] = buffer
    return live


def raise_all(title: str, problems: list[str]) -> None:
    """Raise a ReloadError that lists all problems, if there are any."""
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ReloadError(f"{title} ({len(problems)}):\n{lines}\nCorrect all of them and send it again.")
