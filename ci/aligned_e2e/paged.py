"""Paged storage: the caches of every layer in the real byte formats, block pools, and the batch that indexes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bi_kernels.testing.trace import Rows
from bi_sparse_attn import index_k_block_bytes, kv_block_bytes

from .config import Deployment, ModelConfig

__all__ = ["Batch", "BlockPool", "BlockTables", "Caches", "LayerCache", "Segment"]


@dataclass(slots=True)
class LayerCache:
    """The pages of one layer. Parts that it does not have hold nothing.

    Attributes:
        window: ``(window_pages, bytes)`` uint8, ``fp8_ds_mla`` pages of every token's own KV.
        compressed: ``(blocks, bytes)`` uint8, ``fp8_ds_mla`` pages of the compressed entries.
        index_k: ``(blocks, bytes)`` uint8, pages of the indexer's keys.
        state: ``(blocks * block, 2 * width)`` float32, compressor input of every token: values, then scores.
        index_state: Likewise for the indexer's compressor.
    """

    window: torch.Tensor
    compressed: torch.Tensor
    index_k: torch.Tensor
    state: torch.Tensor
    index_state: torch.Tensor


class Caches:
    """All layers' pages for one side. Poisoned at first, so that reading an unwritten page shows."""

    def __init__(self, config: ModelConfig, deployment: Deployment, *, window_pages: int, blocks: int) -> None:
        self.layers: list[LayerCache] = []
        tokens = blocks * deployment.block

        def pages(count: int, size: int) -> torch.Tensor:
            return torch.full((count, size), 0xFF, dtype=torch.uint8)

        def states(width: int) -> torch.Tensor:
            return torch.full((tokens if width else 0, 2 * width), float("nan"))

        for layer, ratio in enumerate(config.compress_ratios):
            entries = deployment.block // ratio if ratio else 0
            indexed = ratio == 4
            self.layers.append(
                LayerCache(
                    window=pages(window_pages, kv_block_bytes(deployment.window_page)),
                    compressed=pages(blocks, kv_block_bytes(entries)) if ratio else pages(0, 0),
                    index_k=pages(blocks, index_k_block_bytes(entries)) if indexed else pages(0, 0),
                    state=states(config.overlap(layer) * config.head_dim if ratio else 0),
                    index_state=states(2 * config.index_head_dim if indexed else 0),
                )
            )


class BlockPool:
    """Free list of physical blocks, handed out in an order that a seed decides, so that addresses differ by run."""

    def __init__(self, count: int, seed: int) -> None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        self._free: list[int] = [int(i) for i in order]

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` blocks. The caller has checked that there are as many."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks to the pool."""
        self._free.extend(blocks)


@dataclass(slots=True)
class BlockTables:
    """One request's pages: windows of 64 tokens, blocks of 256."""

    window: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def missing(self, tokens: int, deployment: Deployment) -> tuple[int, int]:
        """How many window pages and blocks are missing to hold ``tokens`` tokens."""
        return (
            max(0, -(-tokens // deployment.window_page) - len(self.window)),
            max(0, -(-tokens // deployment.block) - len(self.blocks)),
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a batch that are consecutive tokens of one request."""

    request: int
    first_row: int
    rows: int
    start: int

    @property
    def stop(self) -> int:
        """Position after the last one."""
        return self.start + self.rows


class Batch:
    """The rows of one forward call: which request and position each is, and where its pages are.

    Args:
        parts: Per request: its pages, the position of its first row, and how many rows it has.
        names: Names of the requests, for traces.
        deployment: Page sizes.
        decode_requests: The first so many parts are single generated tokens and take the decode path.
    """

    def __init__(
        self,
        parts: Sequence[tuple[BlockTables, int, int]],
        deployment: Deployment,
        *,
        names: Sequence[str],
        decode_requests: int = 0,
    ) -> None:
        self.deployment = deployment
        self.names = tuple(names)
        self.segments: list[Segment] = []
        requests, positions, row = [], [], 0
        for i, (_, start, rows) in enumerate(parts):
            self.segments.append(Segment(i, row, rows, start))
            requests.append(torch.full((rows,), i))
            positions.append(torch.arange(start, start + rows))
            row += rows
        self.request = torch.cat(requests)
        self.positions = torch.cat(positions)
        self.num_rows = row
        self.num_decode = decode_requests
        self._window = _table([part[0].window for part in parts])
        self._blocks = _table([part[0].blocks for part in parts])

    @property
    def prefill_segments(self) -> list[Segment]:
        """Segments that take the prefill path."""
        return self.segments[self.num_decode :]

    def rows(self) -> Rows:
        """Whose rows they are, for traces."""
        return Rows(self.names, self.request, self.positions)

    def window_slots(self, request: torch.Tensor | int, positions: torch.Tensor) -> torch.Tensor:
        """Slot of each position in the window pages; -1 for negative positions."""
        return _slots(self._window, request, positions, self.deployment.window_page)

    def state_slots(self, request: torch.Tensor | int, positions: torch.Tensor) -> torch.Tensor:
        """Row of each position in the compressor states; -1 for negative positions."""
        return _slots(self._blocks, request, positions, self.deployment.block)

    def entry_slots(self, request: torch.Tensor | int, entries: torch.Tensor, ratio: int) -> torch.Tensor:
        """Slot of each compressed entry; -1 for negative entries."""
        return _slots(self._blocks, request, entries, self.deployment.block // ratio)


def _table(rows: list[list[int]]) -> torch.Tensor:
    width = max((len(r) for r in rows), default=0)
    return torch.tensor([r + [-1] * (width - len(r)) for r in rows], dtype=torch.int64).reshape(len(rows), width)


def _slots(table: torch.Tensor, request: torch.Tensor | int, index: torch.Tensor, page: int) -> torch.Tensor:
    valid = index >= 0
    safe = torch.where(valid, index, 0)
    rows = torch.as_tensor(request)
    block = table[rows.expand(safe.shape) if rows.dim() == 0 else rows, safe // page]
    return torch.where(valid, block * page + safe % page, -1)
