"""Hook engine: verify everything, report every failure together, then edit vLLM, or leave it as it was.

A package describes its edits as data (:class:`HookPlan`) and its entry point calls :func:`activate`. Import-light:
nothing here imports torch or vLLM until the switch is on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import Blocker

__all__ = [
    "SUPPORTED_VLLM",
    "HookPlan",
    "HookRecord",
    "Patch",
    "activate",
    "active_records",
    "deactivate",
    "require_all_packages",
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
    """

    package: str
    import_name: str
    patches: tuple[Patch, ...]
    vllm: tuple[str, ...] = SUPPORTED_VLLM
    requires_native: tuple[str, ...] = ()
    contracts: tuple[str, ...] = ()


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


def activate(plan: HookPlan) -> HookRecord | None:
    """Apply ``plan`` to vLLM, or do nothing when the switch is off."""
    raise NotImplementedError


def deactivate(plan: HookPlan) -> None:
    """Undo :func:`activate`: every name gets its original object back."""
    raise NotImplementedError


def active_records() -> dict[str, HookRecord]:
    """Records of the active plans by package."""
    raise NotImplementedError


def require_all_packages() -> list[Blocker]:
    """One blocker per package of the four that is not installed; none when ``BI_PARTIAL=1``."""
    raise NotImplementedError
