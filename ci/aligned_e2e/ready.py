"""Patches that nobody has run yet, run all the same: a switch of this harness, which no package knows.

A hook refuses to start while one of its patches is not ``ready``, and a patch becomes ready by a run inside vLLM. With
``BI_E2E_ASSUME_READY=1`` the plans of the installed packages are replaced by copies whose patches all count as ready,
before vLLM loads its plug-ins. ``assume_ready/sitecustomize.py`` does that in every Python process below the run,
because vLLM inspects a model's class in a process of its own, which loads the plug-ins too. A record says which patches
were assumed, and so does the report. Everything else (anchors, native kernels, settings) is verified as always.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
import pathlib
from typing import Any

__all__ = ["FOLDER", "VARIABLE", "assume_ready"]

VARIABLE = "BI_E2E_ASSUME_READY"
FOLDER = pathlib.Path(__file__).parent / "assume_ready"
"""Goes to the front of PYTHONPATH where the switch is on."""

_PACKAGES = ("bi_kernels", "bi_sparse_attn", "bi_moe_deepep", "bi_reload")
_RELEASE = "0.26"


@functools.cache
def assume_ready() -> tuple[str, ...]:
    """Replace the plans if the switch is on. Returns the targets of the patches that were not ready."""
    if os.environ.get(VARIABLE) != "1":
        return ()
    assumed = []
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            continue
        hook: Any = importlib.import_module(f"{package}.vllm_hook")
        waiting = [patch for patch in hook.PLAN.patches if not patch.ready and _RELEASE in patch.versions]
        patches = tuple(
            dataclasses.replace(patch, ready=True) if patch in waiting else patch for patch in hook.PLAN.patches
        )
        hook.PLAN = dataclasses.replace(hook.PLAN, patches=patches)
        assumed += [patch.target for patch in waiting]
    return tuple(assumed)
