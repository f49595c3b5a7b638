"""Environment settings that aligned mode depends on, and the features it refuses for now.

Static: read from the environment alone, in processes that must not initialise CUDA and do not know the model yet.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import Blocker
from .mode import PARTIAL, SWITCH
from .packages import PACKAGES, distribution_version, installed_version, module_file, public_version, release_prefix

__all__ = ["SETTINGS", "Refusal", "config_blockers", "environment_blockers", "refusals", "setting_blocker"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A feature that is refused when a DeepSeek-V4 model is built.

    Attributes:
        feature: What is refused.
        reason: Why.
        owner: Distribution name of the package that refuses it, in ``REFUSED_SETTINGS`` of its ``vllm_hook``.
        found: Given a ``VllmConfig``, the setting that asks for the feature, in words, or None. None instead of a
            function: no setting asks for it, and a hook refuses the call itself.
    """

    feature: str
    reason: str
    owner: str
    found: Callable[[Any], str | None] | None = None


def refusals() -> tuple[Refusal, ...]:
    """``REFUSED_SETTINGS`` of every installed package, judged when a model is built because they depend on it."""
    return tuple(
        refusal
        for import_name in PACKAGES.values()
        if module_file(f"{import_name}.vllm_hook") is not None
        for refusal in importlib.import_module(f"{import_name}.vllm_hook").REFUSED_SETTINGS
    )


def config_blockers(vllm_config: Any) -> list[Blocker]:
    """What ``vllm_config`` (a ``VllmConfig``) asks for that an installed package refuses; all of it at once."""
    return [
        Blocker(refusal.feature, "not asked for", found, f"Leave it off ({refusal.owner}): {refusal.reason}.")
        for refusal in refusals()
        if refusal.found is not None and (found := refusal.found(vllm_config)) is not None
    ]


def environment_blockers() -> list[Blocker]:
    """Settings of this process's environment with which aligned mode is refused."""
    return [blocker for name in SETTINGS if (blocker := setting_blocker(name)) is not None]


def setting_blocker(name: str) -> Blocker | None:
    """Why the current value of environment variable ``name`` (one of :data:`SETTINGS`) is refused, or None."""
    value = os.environ.get(name)
    expected, remedy = SETTINGS[name]
    return None if _CHECKS[name](value) else Blocker(name, expected, _shown(value), remedy)


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)


def _is_not_zero(value: str | None) -> bool:
    if value is None:
        return True
    try:
        return bool(int(value))
    except ValueError:
        return False


def _is_integer_or_unset(value: str | None) -> bool:
    try:
        int(value or "0")
    except ValueError:
        return False
    return True


def _plugins_include_us(value: str | None) -> bool:
    if value is None:
        return True
    allowed = value.split(",")
    installed = (name for package, name in PACKAGES.items() if installed_version(package) is not None)
    return all(name in allowed for name in installed)


def _sampler_can_run(value: str | None) -> bool:
    return value == "0" or distribution_version("vllm") is None or importlib.util.find_spec("flashinfer") is not None


def _runner_is_the_tested_one(value: str | None) -> bool:
    prefix = release_prefix(public_version(distribution_version("vllm") or ""))
    # On 0.26 the second runner was never tested; on 0.33 it is the default, and leaving it skips a refusal of vLLM's.
    refused = {"0.26": ("1", "true"), "0.33": ("0", "false")}.get(prefix, ())
    return (value or "").lower() not in refused


SETTINGS = {
    SWITCH: ("an integer", "Set it to 1 for aligned mode, to 0 or nothing for stock vLLM."),
    PARTIAL: ("0, 1 or unset", "Unset it; BI_PARTIAL=1 is for work on one package and never counts as aligned."),
    "VLLM_PLUGINS": (
        "unset, or a list with every installed one of " + ", ".join(PACKAGES.values()),
        "Unset it, or add the missing names: vLLM leaves out a plugin that is not listed, without a message.",
    ),
    "VLLM_DS4_DECODE_KERNEL": ("'sparse' or unset", "Unset it: other decode kernels differ from prefill in bits."),
    "VLLM_USE_DEEP_GEMM": ("1 or unset", "Unset it: the FP8 projections and the indexer need DeepGEMM."),
    "VLLM_USE_DEEP_GEMM_E8M0": (
        "1 or unset",
        "Unset it: without power-of-two scales the expert kernel depends on the number of tokens.",
    ),
    "VLLM_USE_BREAKABLE_CUDAGRAPH": ("1 or unset", "Unset it: 0 brings back compilation with other fusions."),
    "VLLM_USE_V2_MODEL_RUNNER": (
        "the default of this vLLM version",
        "Unset it: the other model runner was not tested, or skips a check of vLLM's own.",
    ),
    "VLLM_USE_FLASHINFER_SAMPLER": ("0 where flashinfer is not installed", "Set it to 0, or install flashinfer."),
    "BI_EP_TRANSPORT": ("'nccl' or unset (DeepEP low latency)", "Unset it or set it to nccl."),
}
"""Environment variable to what is accepted, and what to do otherwise. All that aligned mode looks at."""

_CHECKS: dict[str, Callable[[str | None], bool]] = {
    SWITCH: _is_integer_or_unset,
    PARTIAL: lambda value: value in (None, "0", "1"),
    "VLLM_PLUGINS": _plugins_include_us,
    "VLLM_DS4_DECODE_KERNEL": lambda value: value in (None, "sparse"),
    "VLLM_USE_DEEP_GEMM": _is_not_zero,
    "VLLM_USE_DEEP_GEMM_E8M0": _is_not_zero,
    "VLLM_USE_BREAKABLE_CUDAGRAPH": lambda value: value in (None, "1"),
    "VLLM_USE_V2_MODEL_RUNNER": _runner_is_the_tested_one,
    "VLLM_USE_FLASHINFER_SAMPLER": _sampler_can_run,
    "BI_EP_TRANSPORT": lambda value: value in (None, "nccl"),
}
