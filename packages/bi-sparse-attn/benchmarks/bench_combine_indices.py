"""Time the index lists of prefill, compressed entries and window in one launch, against a plain copy.

    python packages/bi-sparse-attn/benchmarks/bench_combine_indices.py --out results/h200.jsonl

One JSON line per number of tokens: op, shape (tokens, entries, window), ours_us, gb_s (bytes read and written),
percent_of_copy, bitwise (compared with the reference in this run). Replayed from CUDA graphs, by turns with the copy.
Stock is null: vLLM's kernel derives positions and starts from prefix sums of the whole batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bi-kernels" / "benchmarks"))
from timing import capture, medians, record, run_cases

from bi_kernels.testing import first_difference
from bi_sparse_attn import combine_topk_swa
from bi_sparse_attn.reference import combine_indices as reference

ENTRIES, WINDOW, COMPRESSED = 512, 128, 4096
TOKENS = (1, 64, 512, 4096)


def bench(tokens: int, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    positions = torch.arange(COMPRESSED * 4 - tokens, COMPRESSED * 4, dtype=torch.int32, device="cuda")
    starts = torch.zeros_like(positions)
    entries = torch.rand(tokens, COMPRESSED - tokens // 4, device="cuda").topk(ENTRIES).indices.sort(1).values.int()
    arguments = {"compress_ratio": 4, "window_size": WINDOW, "compressed_rows": COMPRESSED}
    indices, lengths = combine_topk_swa(entries, positions, starts, **arguments)

    def ours() -> None:
        combine_topk_swa(entries, positions, starts, out_indices=indices, out_lengths=lengths, **arguments)

    moved = 4 * (entries.numel() + indices.numel() + 3 * tokens)
    ours_us, copy_us = medians(capture(ours, 200), copy)
    want = reference.combine_topk_swa(
        entries.cpu(),
        positions.cpu(),
        starts.cpu(),
        out_indices=torch.empty_like(indices, device="cpu"),
        out_lengths=torch.empty_like(lengths, device="cpu"),
        **arguments,
    )
    return record(
        "combine_indices",
        [tokens, ENTRIES, WINDOW],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=all(first_difference(a.cpu(), b) is None for a, b in zip((indices, lengths), want, strict=True)),
    )


if __name__ == "__main__":
    run_cases(__doc__, ((tokens,) for tokens in TOKENS), bench)
