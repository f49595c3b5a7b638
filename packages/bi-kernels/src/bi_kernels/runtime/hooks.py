"""Hook engine: verify everything, report every failure together, then edit vLLM, or leave it as it was.

A package describes its edits as data (:class:`HookPlan`) and its entry point calls :func:`activate`. Import-light:
nothing here imports torch or vLLM until the switch is on.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, get_args

from . import anchors, mode
from .errors import Blocker, HookError
from .native import op_blockers
from .packages import (
    PACKAGES,
    distribution_version,
    installed_version,
    missing_packages,
    module_file,
    public_version,
    release_prefix,
    resolve,
)
from .settings import environment_blockers

__all__ = [
    "SUPPORTED_VLLM",
    "HookPlan",
    "HookRecord",
    "Patch",
    "activate",
    "active_plans",
    "active_records",
    "deactivate",
    "model_hook_blockers",
    "overwritten",
    "patch_blockers",
    "require_all_packages",
    "verify",
]

SUPPORTED_VLLM = ("0.26", "0.33")
"""Release prefixes of vLLM that hooks are written for."""

PatchKind = Literal["attribute", "oot_custom_op", "oot_pluggable_layer", "env", "publish"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One edit of vLLM, and the ledger entry that says why it exists and when it goes.

    Attributes:
        target: ``"module.path:Name"`` or ``"module.path:Class.attribute"``. By kind:

            * ``attribute``: an existing function, class, method or module-level name, replaced where its *consumer*
              looks it up.
            * ``oot_custom_op``, ``oot_pluggable_layer``: the in-tree class, registered out of tree by its name.
            * ``env``: ``"vllm.envs:NAME"``, a variable that vLLM does not know yet.
            * ``publish``: a name that must not exist upstream and that a trainer looks for there.
        replacement: ``"package.module:attribute"``, imported only after vLLM has imported the target's module. For
            ``env`` a callable without arguments that returns the value.
        why: What goes wrong without it, and why no higher rung (registry, subclass) serves.
        upstream: Link or section that says where it belongs.
        remove_when: When this patch can go.
        kind: How it is attached.
        versions: Release prefixes of vLLM on which this patch applies; on others it is left out.
        ready: False while the kernel behind it does not exist: :func:`activate` then refuses, naming ``needs``.
        needs: What is missing while ``ready`` is False.
        factory: ``replacement`` is called with the original and returns what to install. For wrappers that call
            the original, and for subclasses of the in-tree class.
        relies_on: Further vLLM targets, not edited, that the replacement was written against. Anchored like
            ``target``.
    """

    target: str
    replacement: str
    why: str
    upstream: str
    remove_when: str
    kind: PatchKind = "attribute"
    versions: tuple[str, ...] = SUPPORTED_VLLM
    ready: bool = True
    needs: str = ""
    factory: bool = False
    relies_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("target", self.target), ("replacement", self.replacement)):
            if value.count(":") != 1 or not all(value.split(":")):
                raise ValueError(f"{name}: expected 'package.module:attribute', got {value!r}")
        if self.kind not in get_args(PatchKind):
            raise ValueError(f"kind: expected one of {', '.join(get_args(PatchKind))}, got {self.kind!r}")
        if not self.ready and not self.needs:
            raise ValueError(f"{self.target}: a patch that is not ready must say what it needs")

    @property
    def module(self) -> str:
        """The vLLM module that is edited."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """Attribute path inside the module."""
        return tuple(self.target.partition(":")[2].split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class HookPlan:
    """Everything one package changes in vLLM, and what that needs.

    Attributes:
        package: Distribution name, e.g. ``"bi-sparse-attn"``.
        import_name: Import name, e.g. ``"bi_sparse_attn"``; ``anchors/vllm-<version>.json`` lies in it.
        patches: The edits.
        vllm: Supported release prefixes of vLLM.
        requires_native: Ops (``"namespace::name"``) that must have a CUDA kernel.
        contracts: ``"package.module:NAME"`` of :class:`bi_kernels.runtime.probe.Contract` objects.
        self_tests: ``"package.module:function"``: given the model's ``hf_config``, the
            :class:`bi_kernels.runtime.probe.SelfTest` objects of its real shapes, run before its first forward.
    """

    package: str
    import_name: str
    patches: tuple[Patch, ...]
    vllm: tuple[str, ...] = SUPPORTED_VLLM
    requires_native: tuple[str, ...] = ()
    contracts: tuple[str, ...] = ()
    self_tests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for prefix in self.vllm:
            targets = [patch.target for patch in self.patches if prefix in patch.versions]
            if len(targets) != len(set(targets)):
                twice = sorted({target for target in targets if targets.count(target) > 1})
                raise ValueError(f"{self.package}: patched twice on vLLM {prefix}: {', '.join(twice)}")

    def patches_for(self, version: str) -> tuple[Patch, ...]:
        """Patches that apply on vLLM ``version``."""
        return tuple(patch for patch in self.patches if release_prefix(version) in patch.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRecord:
    """What :func:`activate` did, for the attestation.

    Attributes:
        package: Distribution name.
        version: Its version.
        vllm: Version of vLLM that was edited.
        patches: Targets of the applied patches, sorted.
    """

    package: str
    version: str
    vllm: str
    patches: tuple[str, ...]


@dataclass(slots=True)
class _Edit:
    """One applied patch: how to see whether it still stands, and how to take it back."""

    patch: Patch
    stands: Callable[[], bool]
    undo: Callable[[], None]


@dataclass(slots=True)
class _Active:
    """An activated plan. ``edits`` holds what has landed, by module; the rest lands when vLLM imports its module."""

    plan: HookPlan
    record: HookRecord
    source: anchors.InstalledSource
    patches: tuple[Patch, ...]
    modules: frozenset[str]
    edits: dict[str, list[_Edit]] = field(default_factory=dict)

    def land(self, module: ModuleType) -> None:
        """Apply the patches of one imported module: all of them, or none."""
        mine = [patch for patch in self.patches if patch.module == module.__name__]
        self._must_be_verified_file(module)
        done: list[_Edit] = []
        try:
            writes = [_prepare(patch, module) for patch in mine]
            for write in writes:
                done.append(write())
        except BaseException:
            for edit in reversed(done):
                edit.undo()
            raise
        self.edits[module.__name__] = done

    def take_back(self, module: str) -> None:
        for edit in reversed(self.edits.pop(module, [])):
            edit.undo()

    def _must_be_verified_file(self, module: ModuleType) -> None:
        location = self.source.location(module.__name__)
        file = getattr(module, "__file__", None)
        if location is None or file is None or not os.path.samefile(file, self.source.file(location)):
            raise HookError(
                f"{self.plan.package} cannot edit {module.__name__}",
                [
                    Blocker(
                        module.__name__,
                        f"the file whose anchors were verified, in vLLM {self.record.vllm} as installed",
                        str(file),
                        "Remove the other copy of vLLM from the import path.",
                    )
                ],
            )


_LOCK = threading.RLock()
_ACTIVE: dict[str, _Active] = {}


class _PatchingLoader(importlib.abc.Loader):
    """Runs a module's own loader, then lands the patches of that module. An error there fails the import."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module must look as if it had been loaded without us: inspect and pickle look at these.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        owners = [active for active in list(_ACTIVE.values()) if module.__name__ in active.modules]
        for active in owners:
            active.take_back(module.__name__)  # only a reload has any: its code runs on the originals again
        self._loader.exec_module(module)
        for active in owners:
            active.land(module)


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """The one post-import hook of all plans: finds nothing itself, only wraps the loader that others find."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname in active.modules for active in list(_ACTIVE.values())):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader)
                return spec
        return None


_FINDER = _PatchingFinder()


def activate(plan: HookPlan) -> HookRecord | None:
    """Apply ``plan`` to vLLM, or do nothing when the switch is off.

    Patches of modules that are imported already are applied at once, the others when vLLM imports their module.
    Off, this imports neither vLLM nor torch. A second call does nothing.

    Args:
        plan: The package's plan.

    Returns:
        The record, or None when the switch is off.

    Raises:
        HookError: Lists everything that stands against the plan, and against the other installed packages' plans.
            vLLM is as it was.
    """
    if not mode.is_enabled():
        return None
    with _LOCK:
        if plan.package in _ACTIVE:
            return _ACTIVE[plan.package].record
        blockers = verify(plan)
        if blockers:
            blockers += [blocker for blocker in _other_plans_blockers(plan) if blocker not in blockers]
            raise HookError(f"{plan.package}: aligned mode cannot start, vLLM was not changed", blockers)
        source = anchors.InstalledSource()
        patches = plan.patches_for(source.version)
        record = HookRecord(
            package=plan.package,
            version=installed_version(plan.package) or "unknown",
            vllm=source.version,
            patches=tuple(sorted(patch.target for patch in patches)),
        )
        active = _Active(plan, record, source, patches, frozenset(patch.module for patch in patches))
        modules_before = _v4_modules()
        _ACTIVE[plan.package] = active
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        try:
            # A replacement may import further targets; the finder above lands those, so they are skipped here.
            for name in dict.fromkeys(patch.module for patch in active.patches):
                module = sys.modules.get(name)
                if module is not None and name not in active.edits:
                    active.land(module)
            if _v4_modules() != modules_before:
                raise HookError(
                    f"{plan.package}: vLLM was not changed",
                    [
                        Blocker(
                            f"{plan.package}: replacements",
                            "not to import vllm.models.deepseek_v4 before a model is built",
                            ", ".join(sorted(_v4_modules() - modules_before)),
                            "This is a bug in the package: imported this early, the model loses its graph breaks.",
                        )
                    ],
                )
        except BaseException:
            deactivate(plan)
            raise
        return record


def deactivate(plan: HookPlan) -> None:
    """Undo :func:`activate`: every name gets its original object back. Does nothing for a plan that is not active."""
    with _LOCK:
        active = _ACTIVE.pop(plan.package, None)
        if active is not None:
            for module in reversed(list(active.edits)):
                active.take_back(module)
        if not _ACTIVE and _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)


def active_records() -> dict[str, HookRecord]:
    """Records of the active plans by package."""
    return {package: active.record for package, active in sorted(_ACTIVE.items())}


def overwritten() -> tuple[str, ...]:
    """Targets where somebody put another object after a patch had landed."""
    edits = (edit for active in _ACTIVE.values() for module in active.edits.values() for edit in module)
    return tuple(sorted(edit.patch.target for edit in edits if not edit.stands()))


def require_all_packages() -> list[Blocker]:
    """One blocker per package of the four that is not installed; none when ``BI_PARTIAL=1``."""
    if mode.is_partial():
        return []
    return [
        Blocker(
            package,
            "all four packages, because DeepSeek-V4 is aligned as a whole or not at all",
            "not installed",
            f"pip install {package}. For work on one package set {mode.PARTIAL}=1; such a run never counts as aligned.",
        )
        for package in missing_packages()
    ]


def active_plans() -> tuple[HookPlan, ...]:
    """The active plans, in the order of their packages' names."""
    return tuple(active.plan for _, active in sorted(_ACTIVE.items()))


def model_hook_blockers() -> list[Blocker]:
    """What is missing when a DeepSeek-V4 model is built: packages, active hooks, edits that somebody overwrote.

    vLLM drops a plugin that ``VLLM_PLUGINS`` leaves out, or whose module does not import, without stopping; this is
    where that is noticed.
    """
    blockers = require_all_packages()
    blockers += [
        Blocker(
            package,
            "its hooks to be active in this process",
            "installed, but not activated",
            "Look in vLLM's log for a plugin that failed to load, and at VLLM_PLUGINS.",
        )
        for package in PACKAGES
        if installed_version(package) is not None and package not in _ACTIVE
    ]
    blockers += [
        Blocker(
            target, "the replacement that was installed", "another object", "Remove the other plugin that edits it."
        )
        for target in overwritten()
    ]
    return blockers


def verify(plan: HookPlan) -> list[Blocker]:
    """Everything that stands against ``plan``, found without importing vLLM; empty if it can be activated."""
    for import_name in dict.fromkeys(("bi_kernels", plan.import_name)):
        if module_file(f"{import_name}._native") is not None:
            importlib.import_module(f"{import_name}._native")  # declares the package's library
    blockers = environment_blockers() + patch_blockers(plan) + op_blockers(plan.requires_native)
    for contract in plan.contracts:
        blockers += _contract_blockers(plan, contract)
    return blockers


def patch_blockers(plan: HookPlan) -> list[Blocker]:
    """What stands against the edits themselves: vLLM's version, anchors, other plans, and replacements."""
    version = public_version(distribution_version("vllm") or "")
    supported = " or ".join(f"{prefix}.x" for prefix in plan.vllm)
    blockers: list[Blocker] = []
    patches = plan.patches_for(plan.vllm[0])  # without a known vLLM, those of the first supported release
    if not version:
        blockers.append(Blocker("vllm", supported, "not installed", "Install vllm 0.26.0."))
    elif release_prefix(version) not in plan.vllm:
        blockers.append(
            Blocker("vllm", supported, version, "Install a supported release, or unset VLLM_BATCH_INVARIANT.")
        )
    else:
        patches = plan.patches_for(version)
        blockers += _anchor_blockers(plan, version)
    for patch in patches:
        blockers += _collision_blockers(plan, patch)
        if patch.ready:
            blockers += _replacement_blockers(plan, patch)
        else:
            blockers.append(
                Blocker(
                    f"{plan.package}: {patch.target}",
                    patch.needs,
                    "not in this version of the package",
                    "Upgrade the package once it has it, or unset VLLM_BATCH_INVARIANT.",
                )
            )
    return blockers


def _v4_modules() -> set[str]:
    return {name for name in sys.modules if name.startswith("vllm.models.deepseek_v4")}


def _other_plans_blockers(plan: HookPlan) -> list[Blocker]:
    """Blockers of the other installed packages, so that one error names everything at once."""
    blockers: list[Blocker] = []
    for package in PACKAGES if plan.package in PACKAGES else ():
        if package == plan.package or package in _ACTIVE or installed_version(package) is None:
            continue
        try:
            other = anchors.load_plan(package)
            found = verify(other) if other is not None else []
        except Exception as error:  # its own registration would fail with it, so it is a blocker like any other
            found = [
                Blocker(package, "a hook module that imports", f"{type(error).__name__}: {error}", "Reinstall it.")
            ]
        blockers += [blocker for blocker in found if blocker not in blockers]
    return blockers


def _anchor_blockers(plan: HookPlan, version: str) -> list[Blocker]:
    recorded = anchors.load_anchors(plan.import_name, version)
    if not recorded and anchors.anchored_targets(plan, version):
        path = anchors.anchors_file(plan.import_name, version)
        if path is None or not path.is_file():
            remedy = "Install a release that this package was written against, or a newer version of the package."
            return [Blocker(f"{plan.package}: anchors", f"a record for vLLM {version}", "none", remedy)]
    found = {
        "moved": "text that differs from what this hook was written against",
        "missing": "no such name in this vLLM",
        "unrecorded": "no anchor on record",
        "occupied": "a name that vLLM now defines itself",
    }
    return [
        Blocker(
            f"{plan.package}: {check.target}",
            "a name that is free" if check.state == "occupied" else f"the source text of vLLM {version} as released",
            found[check.state],
            "Reinstall vLLM if its files were edited; otherwise this package does not know this build.",
        )
        for check in anchors.check_plan(plan, anchors.InstalledSource(), recorded)
        if check.state != "ok"
    ]


def _collision_blockers(plan: HookPlan, patch: Patch) -> list[Blocker]:
    blockers = []
    for package, active in _ACTIVE.items():
        for other in active.patches if package != plan.package else ():
            shorter = min(len(patch.path), len(other.path))
            if patch.module == other.module and patch.path[:shorter] == other.path[:shorter]:
                blockers.append(
                    Blocker(
                        f"{plan.package}: {patch.target}",
                        "a target that no other package edits",
                        f"{package} edits {other.target}",
                        f"Install versions of {plan.package} and {package} that belong together.",
                    )
                )
    return blockers


def _replacement_blockers(plan: HookPlan, patch: Patch) -> list[Blocker]:
    module, _, name = patch.replacement.partition(":")
    path = module_file(module)
    if path is None:
        found = f"no module {module}"
    elif not anchors.defines(path.read_text(encoding="utf-8"), name):
        found = f"no {name} in {path}"
    else:
        return []
    remedy = f"Reinstall {plan.package}."
    return [Blocker(f"{plan.package}: {patch.target}", f"its replacement {patch.replacement}", found, remedy)]


def _contract_blockers(plan: HookPlan, contract: str) -> list[Blocker]:
    try:
        return list(resolve(contract).static_blockers())
    except Exception as error:  # a probe that breaks has not shown what it must show
        reason = f"{type(error).__name__}: {error}"
        return [Blocker(f"{plan.package}: {contract}", "a probe that runs", reason, f"Reinstall {plan.package}.")]


def _prepare(patch: Patch, module: ModuleType) -> Callable[[], _Edit]:
    """Resolve both sides of a patch without changing anything; the result writes it."""
    if patch.kind == "env":
        return _prepare_env(patch, module)
    owner: Any = module
    for name in patch.path[:-1]:
        owner = vars(owner).get(name)
        if not isinstance(owner, type):
            raise _apply_error(patch, f"a class {name}", repr(owner))
    if patch.kind == "publish":
        return _prepare_publish(patch, owner)
    name = patch.path[-1]
    # Only what the owner defines itself has an original to give back; the anchor was taken there too.
    if name not in vars(owner):
        raise _apply_error(patch, f"{name} in {owner!r}", "no such attribute of its own")
    original = vars(owner)[name]
    replacement = resolve(patch.replacement)
    if patch.factory:
        replacement = replacement(original)
    if patch.kind == "attribute":
        if isinstance(original, staticmethod | classmethod) and not isinstance(replacement, staticmethod | classmethod):
            replacement = type(original)(replacement)
        return _setter(patch, owner, name, replacement, original)
    return _prepare_oot(patch, original, replacement)


def _setter(patch: Patch, owner: Any, name: str, value: Any, original: Any) -> Callable[[], _Edit]:
    def write() -> _Edit:
        setattr(owner, name, value)
        return _Edit(patch, lambda: vars(owner).get(name) is value, lambda: setattr(owner, name, original))

    return write


def _prepare_publish(patch: Patch, owner: Any) -> Callable[[], _Edit]:
    name = patch.path[-1]
    value = resolve(patch.replacement)
    if name in vars(owner):
        raise _apply_error(patch, "a name that is free", repr(vars(owner)[name]))

    def undo() -> None:
        if name in vars(owner):
            delattr(owner, name)

    def write() -> _Edit:
        setattr(owner, name, value)
        return _Edit(patch, lambda: vars(owner).get(name) is value, undo)

    return write


def _prepare_env(patch: Patch, module: ModuleType) -> Callable[[], _Edit]:
    name = patch.path[-1]
    getter = resolve(patch.replacement)
    variables: dict[str, Any] = module.environment_variables
    if name in variables:
        raise _apply_error(patch, "a variable that vLLM does not know", "one that it defines")

    def write() -> _Edit:
        variables[name] = getter
        return _Edit(patch, lambda: variables.get(name) is getter, lambda: variables.pop(name, None) and None)

    return write


def _prepare_oot(patch: Patch, original: Any, replacement: Any) -> Callable[[], _Edit]:
    name = patch.path[-1]
    # vLLM creates the instance with the in-tree __new__, and Python runs __init__ only on a subclass of it.
    if not (isinstance(replacement, type) and isinstance(original, type) and issubclass(replacement, original)):
        raise _apply_error(patch, f"a subclass of {name}", repr(replacement))
    custom_op = importlib.import_module("vllm.model_executor.custom_op")
    base = custom_op.CustomOp if patch.kind == "oot_custom_op" else custom_op.PluggableLayer
    registry: dict[str, Any] = custom_op.op_registry_oot
    if name in registry:
        raise _apply_error(patch, "a class that nobody has replaced out of tree", repr(registry[name]))

    def write() -> _Edit:
        base.register_oot(name=name)(replacement)
        return _Edit(patch, lambda: registry.get(name) is replacement, lambda: registry.pop(name, None) and None)

    return write


def _apply_error(patch: Patch, expected: str, found: str) -> HookError:
    blocker = Blocker(patch.target, expected, found, "Another plugin may have edited vLLM; remove it.")
    return HookError("a hook does not fit the module that vLLM imported", [blocker])


if __name__ == "__main__":
    from .ledger import main

    sys.exit(main())
