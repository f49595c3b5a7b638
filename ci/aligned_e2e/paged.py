"""Paged storage: the caches of every layer in the real byte formats, block pools, and the batch that indexes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bi_kernels.testing.trace import Rows, row_digests
from bi_sparse_attn import index_k_block_bytes, kv_block_bytes

from .config import Deployment, ModelConfig

__all__ = [
    "Batch",
    "BlockManager",
    "BlockPool",
    "BlockTables",
    "CachedBlock",
    "Caches",
    "LayerCache",
    "Segment",
    "prefix_key",
]


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
        self._block = deployment.block
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

    def digest(self, block: int, pages: Sequence[int]) -> int:
        """Digest of every byte that a block and its window pages hold, in all layers."""
        digests = []
        for layer in self.layers:
            rows = slice(block * self._block, (block + 1) * self._block)
            parts = [*layer.window[list(pages)], layer.compressed[block : block + 1], layer.index_k[block : block + 1]]
            parts += [layer.state[rows], layer.index_state[rows]]
            digests += [row_digests(part.reshape(1, -1).view(torch.int64)) for part in parts if part.numel()]
        return int(row_digests(torch.cat(digests).unsqueeze(0)))


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
class CachedBlock:
    """A full block that requests with the same prefix share.

    Attributes:
        key: What it is found by: :func:`prefix_key`.
        block: The block: compressed entries, index keys and compressor input of its tokens.
        pages: The window pages of the same tokens.
        digest: Of every byte of both, when the block was published.
        users: Requests whose tables name it.
    """

    key: tuple[int, ...]
    block: int
    pages: tuple[int, ...]
    digest: int
    users: int = 0


def prefix_key(tokens: Sequence[int], block: int, end: int) -> tuple[int, ...]:
    """What a block that ends at ``end`` is known by: the whole prefix, for its contents depend on nothing less.

    Args:
        tokens: The request's tokens.
        block: Tokens of a block.
        end: Position after the block's last token.
    """
    return tuple(tokens[:end])


@dataclass(slots=True)
class BlockTables:
    """One request's pages: windows of 64 tokens, blocks of 256. The first blocks may be shared ones."""

    window: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    shared: list[CachedBlock] = field(default_factory=list)

    def missing(self, tokens: int, deployment: Deployment) -> tuple[int, int]:
        """How many window pages and blocks are missing to hold ``tokens`` tokens."""
        return (
            max(0, -(-tokens // deployment.window_page) - len(self.window)),
            max(0, -(-tokens // deployment.block) - len(self.blocks)),
        )


class BlockManager:
    """Physical pages: handed out, shared by requests with the same prefix, and taken back.

    Only full blocks are shared, and nothing writes to them again: a request continues behind its last shared block.
    Blocks that nobody uses stay known, until their space is needed; then the one unused for longest goes first.

    Args:
        deployment: Page sizes.
        blocks: Blocks in the pool; there are window pages for as many tokens.
        seed: Order in which pages are handed out.
        digest: Digest of a block and its pages (:meth:`Caches.digest`), or None to share nothing.
    """

    def __init__(
        self, deployment: Deployment, blocks: int, seed: int, digest: Callable[[int, Sequence[int]], int] | None
    ) -> None:
        self._deployment = deployment
        self._pages_per_block = deployment.block // deployment.window_page
        self._blocks = BlockPool(blocks, seed)
        self._pages = BlockPool(blocks * self._pages_per_block, seed + 1)
        self._digest = digest
        self._cache: dict[tuple[int, ...], CachedBlock] = {}  # least recently used first
        self.evictions = 0
        self.blocks_checked = 0
        self.blocks_changed = 0

    def describe_free(self) -> str:
        """What is free, for an error."""
        return f"{len(self._pages)} pages and {len(self._blocks)} blocks"

    def share(self, tables: BlockTables, tokens: Sequence[int]) -> int:
        """Put the known blocks of a prefix into empty tables. Returns how many tokens need not be computed.

        One token is always left: its logits are wanted.
        """
        size = self._deployment.block
        for end in range(size, len(tokens), size):
            key = prefix_key(tokens, size, end)
            entry = self._cache.get(key)
            if entry is None:
                break
            self._cache[key] = self._cache.pop(key)
            entry.users += 1
            tables.shared.append(entry)
            tables.blocks.append(entry.block)
            tables.window += entry.pages
        return len(tables.shared) * size

    def reserve(self, tables: BlockTables, tokens: int) -> bool:
        """Extend tables to hold so many tokens; False, and nothing happens, where there is no room."""
        pages, blocks = tables.missing(tokens, self._deployment)
        idle = [key for key, entry in self._cache.items() if not entry.users]
        lacking = max(blocks - len(self._blocks), -(-(pages - len(self._pages)) // self._pages_per_block))
        if lacking > len(idle):
            return False
        for key in idle[: max(0, lacking)]:
            entry = self._cache.pop(key)
            self._check(entry)
            self._blocks.give_back([entry.block])
            self._pages.give_back(entry.pages)
            self.evictions += 1
        tables.window += self._pages.take(pages)
        tables.blocks += self._blocks.take(blocks)
        return True

    def publish(self, tables: BlockTables, tokens: Sequence[int], computed: int) -> None:
        """Make known the blocks that the first ``computed`` tokens of a request have filled."""
        if self._digest is None:
            return
        size = self._deployment.block
        for n in range(len(tables.shared), computed // size):
            key = prefix_key(tokens, size, (n + 1) * size)
            if key in self._cache:
                return  # another request has computed the same meanwhile: this copy stays private
            first = n * self._pages_per_block
            pages = tuple(tables.window[first : first + self._pages_per_block])
            entry = CachedBlock(key, tables.blocks[n], pages, self._digest(tables.blocks[n], pages), users=1)
            self._cache[key] = entry
            tables.shared.append(entry)

    def release(self, tables: BlockTables) -> None:
        """Take a request's pages back. Shared blocks stay known; the last of a prefix becomes the oldest."""
        for entry in reversed(tables.shared):
            entry.users -= 1
            self._cache[entry.key] = self._cache.pop(entry.key)
        own = len(tables.shared)
        self._blocks.give_back(tables.blocks[own:])
        self._pages.give_back(tables.window[own * self._pages_per_block :])
        tables.window, tables.blocks, tables.shared = [], [], []

    def forget(self) -> None:
        """Share nothing that was computed before now: the weights have changed. No request may be running."""
        for entry in self._cache.values():
            self._blocks.give_back([entry.block])
            self._pages.give_back(entry.pages)
        self._cache.clear()

    def check(self) -> None:
        """Look whether the shared blocks still hold what they held when they were published."""
        for entry in self._cache.values():
            self._check(entry)

    def _check(self, entry: CachedBlock) -> None:
        if self._digest is not None:
            self.blocks_checked += 1
            self.blocks_changed += self._digest(entry.block, entry.pages) != entry.digest


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
        bucket: Rows of the largest batch of any expert-parallel rank; None if this is the only one.
    """

    def __init__(
        self,
        parts: Sequence[tuple[BlockTables, int, int]],
        deployment: Deployment,
        *,
        names: Sequence[str],
        decode_requests: int = 0,
        bucket: int | None = None,
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
        self.bucket = row if bucket is None else bucket
        self.num_decode = decode_requests
        self._window = _table([part[0].window for part in parts])
        self._blocks = _table([part[0].blocks for part in parts])
        # Of every row, and the same in all layers.
        self.row_window_slots = self.window_slots(self.request, self.positions)
        self.row_state_slots = self.state_slots(self.request, self.positions)

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
