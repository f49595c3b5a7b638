"""The actor side: one packed forward over finished sequences, with its own loop and its own pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import bi_kernels as bk
from bi_kernels.testing.trace import row_digests

from .config import Deployment
from .model import DeepseekV4
from .paged import Batch, BlockTables, Caches

__all__ = ["recompute_logprobs"]


def recompute_logprobs(
    model: DeepseekV4, deployment: Deployment, sequences: Mapping[str, tuple[Sequence[int], Sequence[int]]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logprobs of the response tokens, as a trainer computes them.

    Args:
        model: The actor's own model.
        deployment: Page sizes and capacities.
        sequences: Prompt and response of each sequence, by name.

    Returns:
        Per sequence, the logprobs, ``(len(response),)`` float32, and the digests of the logits they came from,
        ``(len(response),)`` int64.
    """
    parts: list[tuple[BlockTables, int, int]] = []
    tokens: list[int] = []
    rows: list[int] = []  # whose hidden states predict a response token
    targets: list[int] = []
    lengths: list[int] = []
    pages = blocks = 0
    for prompt, response in sequences.values():
        inputs = [*prompt, *response][:-1]  # the last token predicts nothing that was drawn
        tables = BlockTables()
        more_pages, more_blocks = tables.missing(len(inputs), deployment)
        tables.window = list(range(pages, pages + more_pages))
        tables.blocks = list(range(blocks, blocks + more_blocks))
        pages, blocks = pages + more_pages, blocks + more_blocks
        first = len(tokens) + len(prompt) - 1
        rows += range(first, first + len(response))
        targets += response
        lengths.append(len(response))
        tokens += inputs
        parts.append((tables, 0, len(inputs)))
    caches = Caches(model.config, deployment, window_pages=pages, blocks=blocks)
    batch = Batch(parts, deployment, names=list(sequences))
    hidden = model(torch.tensor(tokens), batch, caches)
    logprobs, digests = [], []
    for some, wanted in zip(torch.tensor(rows).split(256), torch.tensor(targets).split(256), strict=True):
        logits = model.logits(hidden, some, batch)
        logprobs.append(bk.selected_logprobs(logits, wanted))
        digests.append(row_digests(logits))
    return list(zip(torch.cat(logprobs).split(lengths), torch.cat(digests).split(lengths), strict=True))
