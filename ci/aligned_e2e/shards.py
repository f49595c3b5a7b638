"""Checkpoints on disk: safetensors shards, and an index with every tensor's fingerprint.

A file that was cut off, overwritten or mixed up with another version must never be served, and the error names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import bi_reload as reload
from bi_kernels.runtime.errors import ReloadError

__all__ = ["load_checkpoint", "require_weights", "save_checkpoint"]

_INDEX = "index.json"


def save_checkpoint(folder: Path, checkpoint: Mapping[str, torch.Tensor], *, shards: int) -> None:
    """Write a checkpoint as so many shards. The index comes last: without it there is no checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    prints = reload.weight_fingerprint(checkpoint)
    index: dict[str, dict[str, Any]] = {}
    for number in range(shards):
        file = f"weights-{number:02}.safetensors"
        names = sorted(checkpoint)[number::shards]
        save_file({name: checkpoint[name].contiguous() for name in names}, folder / file)
        index |= {name: {"file": file, "fingerprint": f"{prints[name]:016x}"} for name in names}
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def load_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Read a checkpoint back, every tensor checked.

    Raises:
        ReloadError: The index or a shard is missing or damaged, a tensor is not in its shard, or its bytes are not
            those that were saved. Every problem is named, with its file.
    """
    index = _read_index(folder)
    problems: list[str] = []
    checkpoint: dict[str, torch.Tensor] = {}
    for file in sorted({file for file, _ in index.values()}):
        try:
            tensors = load_file(folder / file)
        except (OSError, SafetensorError) as error:
            problems.append(f"{file}: cannot be read ({error})")
            continue
        wanted = [name for name, (place, _) in index.items() if place == file]
        problems += [f"{file}: {name} is missing" for name in wanted if name not in tensors]
        found = {name: tensors[name] for name in wanted if name in tensors}
        for name, value in reload.weight_fingerprint(found).items():
            if value != index[name][1]:
                problems.append(f"{file}: {name} has other bytes than the index says")
        checkpoint |= found
    _raise(folder, problems)
    return checkpoint


def require_weights(model: torch.nn.Module, folder: Path) -> None:
    """Refuse a model whose weights are not those of a checkpoint, as after a reload that was killed half-way.

    Raises:
        ReloadError: Names every tensor that differs.
    """
    index, saved = _read_index(folder), load_checkpoint(folder)
    live = dict(model.named_parameters())
    problems = [f"{name}: not a weight of the model" for name in index if name not in live]
    # A padded parameter is compared in the length that the checkpoint has: its padding has no bytes there.
    views = {n: t if t.shape == saved[n].shape else t[: len(saved[n])] for n, t in live.items() if n in saved}
    for name, value in reload.weight_fingerprint(views).items():
        if value != index[name][1]:
            problems.append(f"{name}: has other bytes than {index[name][0]}")
    _raise(folder, problems)


def _read_index(folder: Path) -> dict[str, tuple[str, int]]:
    """File and fingerprint of each tensor."""
    path = folder / _INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): (Path(entry["file"]).name, int(entry["fingerprint"], 16)) for name, entry in index.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ReloadError(
            f"{path}: expected the index of a checkpoint, got something else ({error}). Save the checkpoint again."
        ) from error


def _raise(folder: Path, problems: list[str]) -> None:
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ReloadError(f"{folder}: expected the checkpoint of its index, got\n{listed}\nNothing may be served.")
