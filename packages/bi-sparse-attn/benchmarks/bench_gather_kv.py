"""Time the decode gather against a plain copy.

    python packages/bi-sparse-attn/benchmarks/bench_gather_kv.py --out results/h200.jsonl

One JSON line per shape (tokens, compressed entries): op, shape, ours_us, gb_s (bytes read and written),
percent_of_copy, bitwise (compared with the reference in this run). The window has 128 entries. Replayed from CUDA
graphs, by turns with the copy. Stock is null: no kernel of vLLM does this step, its decode attention reads the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bi-kernels" / "benchmarks"))
from timing import capture, medians, record, run_cases

from bi_kernels.testing import first_difference
from bi_sparse_attn import gather_decode_kv, kv_block_bytes
from bi_sparse_attn.reference import gather_kv as reference

WINDOW = 128
SHAPES = tuple((tokens, entries) for entries in (512, 0) for tokens in (1, 8, 32, 64, 128, 256))


def bench(tokens: int, entries: int, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    blocks = 4096
    cache = torch.randint(256, (blocks, kv_block_bytes(64)), device="cuda", dtype=torch.int32).byte()
    slots = torch.randint(blocks * 64, (tokens, entries + WINDOW), device="cuda", dtype=torch.int32)
    compressed, window = slots[:, :entries].contiguous(), slots[:, entries:].contiguous()
    width = entries + WINDOW
    out = torch.zeros(tokens, width, 512, dtype=torch.bfloat16, device="cuda")
    indices = torch.zeros(tokens, width, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    sizes = {"compressed_block_size": 64, "window_block_size": 64}
    outputs = {"out": out, "out_indices": indices, "out_lengths": lengths}

    def ours() -> None:
        gather_decode_kv(cache, cache, compressed, window, **sizes, **outputs)

    moved = tokens * width * (584 + 1024 + 4 + 4)
    ours_us, copy_us = medians(capture(ours, 50), copy)
    some = slice(0, min(tokens, 8))
    want = reference.gather_decode_kv(cache, cache, compressed[some], window[some], **sizes)
    return record(
        "gather_decode_kv",
        [tokens, entries],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=first_difference(out[some], want.workspace[:, :width]) is None,
    )


if __name__ == "__main__":
    run_cases(__doc__, SHAPES, bench)
