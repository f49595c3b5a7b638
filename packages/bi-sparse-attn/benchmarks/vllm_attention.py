"""Time attention of a DeepSeek-V4 layer in vLLM 0.26 under the hooks, against vLLM's own.

    python packages/bi-sparse-attn/benchmarks/vllm_attention.py --out results/vllm/h200.jsonl

Both sides are the layers' own methods, on the same caches, metadata and queries of 64 heads. Decode is replayed from
CUDA graphs, vLLM's with its tile plan made beforehand. Prefill is launched eagerly, as it is served, on a stream that
is still busy while the host launches, so that the times are the GPU's; ``stock_idle_us`` and ``ours_idle_us`` are the
same calls on an idle stream, the host's time included. One JSON line per shape: op (``decode_attention``: layer kind,
batch, context; ``prefill_attention``: layer kind, requests, tokens each), stock_us, ours_us, ratio (stock / ours), gb_s
(cache bytes that the lists name), percent_of_copy, bitwise (whether the last tokens of three requests, prefilled alone,
have the bits that they have in the batch). Prefill comes first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bi-kernels" / "benchmarks"))
from timing import COPY_BYTES, capture, copy_timer, machine, medians, write_records

from bi_sparse_attn import SparseCapacity, kv_block_bytes
from bi_sparse_attn.vllm_attention import batch_invariant_class

HEADS, WINDOW, TOP_K, MAX_LEN, MAX_TOKENS, PAGES = 64, 128, 512, 131_072, 4096, 16_384
BUSY = 8_000_000  # cycles, 4 ms: longer than the host needs for the launches of a call
KINDS = {"c4": 4, "c128": 128, "swa": 1}
DECODE = [(kind, batch, context) for kind in KINDS for context in (2048, 16_384, 65_536, 131_072)
          for batch in (1, 8, 32, 128, 256) if kind != "swa" or context == 2048]  # fmt: skip
PREFILL = [
    (kind, requests, tokens) for kind in KINDS for requests, tokens in ((1, 4096), (4, 1024), (8, 512), (32, 128))
]


class Layer:
    """What the methods of either side read of vLLM's layer."""

    PREFILL_CHUNK_SIZE = 4

    def __init__(self, kind: str) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.compress_ratio = KINDS[kind]
        self.capacity = SparseCapacity.from_model(
            max_model_len=MAX_LEN,
            compress_ratio=self.compress_ratio,
            window_size=WINDOW,
            index_topk=TOP_K,
            max_num_batched_tokens=MAX_TOKENS,
        )
        self.prefix, self.scale, self.window_size = "layer", 512**-0.5, WINDOW
        self.attn_sink = torch.linspace(-1, 1, HEADS, device="cuda")
        self.topk_indices_buffer = torch.zeros((MAX_TOKENS, TOP_K), dtype=torch.int32, device="cuda")
        self.swa_cache_layer = SimpleNamespace(prefix="layer.swa", kv_cache=_cache(64, generator))
        self.kv_cache = _cache(256 // self.compress_ratio, generator) if self.compress_ratio > 1 else None


def _cache(block: int, generator: torch.Generator) -> torch.Tensor:
    memory = torch.zeros((PAGES, kv_block_bytes(block)), dtype=torch.uint8, device="cuda")
    data = memory[:, : block * 576].view(PAGES, block, 576)
    data[:, :, :448].random_(0, 0x7F, generator=generator)
    rope = torch.randn((PAGES, block, 64), generator=generator, device="cuda").bfloat16()
    data[:, :, 448:].copy_(rope.view(torch.uint8).view(PAGES, block, 128))
    memory[:, block * 576 : block * 584] = 127 - 8
    return memory[:, : block * 584].view(PAGES, block, 584)


def batch_of(layer: Any, lens: list[int], contexts: list[int]) -> tuple[dict[str, Any], torch.Tensor]:
    """Metadata as vLLM's builders make it, and positions. Every request has ``lens`` new tokens at its end."""
    from vllm.models.deepseek_v4.sparse_mla import build_c128a_topk_metadata
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
    from vllm.v1.attention.ops.flashmla import get_mla_metadata

    generator = torch.Generator("cuda").manual_seed(1)
    requests, total, decode = len(lens), sum(lens), max(lens) == 1
    starts = torch.tensor([0, *lens]).cumsum(0)
    position = torch.cat([torch.arange(c - n, c) for n, c in zip(lens, contexts, strict=True)]).cuda()
    table = torch.randint(PAGES, (requests, MAX_LEN // 64), generator=generator, device="cuda", dtype=torch.int32)
    owner = torch.repeat_interleave(torch.arange(requests), torch.tensor(lens)).int().cuda()
    recent = (position.unsqueeze(1) - WINDOW + 1).clamp(min=0) + torch.arange(WINDOW, device="cuda")
    slots = table[owner.long()].gather(1, (recent // 64).clamp(max=table.shape[1] - 1)).long() * 64 + recent % 64
    window = DeepseekSparseSWAMetadata(
        block_table=table,
        slot_mapping=torch.zeros(total, dtype=torch.int64, device="cuda"),
        block_size=64,
        query_start_loc=starts.int().cuda(),
        query_start_loc_cpu=starts.int(),
        is_valid_token=torch.ones(total, dtype=torch.bool, device="cuda"),
        token_to_req_indices=owner,
        decode_swa_indices=torch.where(recent <= position.unsqueeze(1), slots, -1).int().unsqueeze(1),
        decode_swa_lens=(position + 1).clamp(max=WINDOW).int(),
        num_decodes=requests if decode else 0,
        num_prefills=0 if decode else requests,
        num_decode_tokens=total if decode else 0,
        num_prefill_tokens=0 if decode else total,
        prefill_seq_lens=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        prefill_seq_lens_cpu=torch.tensor(contexts, dtype=torch.int32),
        prefill_gather_lens=torch.tensor(
            [n + min(c - n, WINDOW - 1) for n, c in zip(lens, contexts, strict=True)], dtype=torch.int32, device="cuda"
        ),
        prefill_query_lens_cpu=torch.tensor(lens, dtype=torch.int32),
        prefill_window_size=WINDOW,
        prefill_max_model_len=MAX_LEN,
        prefill_max_num_batched_tokens=MAX_TOKENS,
        **{f"tile_sched_{kind}": get_mla_metadata()[0] for kind in ("swaonly", "c4a", "c128a")},
    )
    metadata: dict[str, Any] = {"layer.swa": window}
    if layer.compress_ratio == 4:
        layer.topk_indices_buffer.fill_(-1)
        for row, at in zip(layer.topk_indices_buffer, position.tolist(), strict=False):
            found = torch.randperm((at + 1) // 4, generator=generator, device="cuda")[:TOP_K].sort().values
            row[: len(found)] = found
    if layer.compress_ratio > 1:
        width, rows = layer.capacity.c128_width, max(total, 1)
        buffers = [torch.zeros((rows, width), dtype=torch.int32, device="cuda") for _ in range(2)]
        counts = torch.zeros(rows, dtype=torch.int32, device="cuda")
        listed = build_c128a_topk_metadata(
            position, 128, total if decode else 0, owner, table, 2, window.slot_mapping, buffers[0], counts, buffers[1],
            max_compressed_tokens=width,
        ) if layer.compress_ratio == 128 else (None, None, None)  # fmt: skip
        metadata["layer"] = SimpleNamespace(
            block_table=table,
            block_size=256,
            c128a_global_decode_topk_indices=None if listed[0] is None else listed[0].unsqueeze(1),
            c128a_decode_topk_lens=listed[1],
            c128a_prefill_topk_indices=listed[2],
        )
    return metadata, position


def sides(
    kind: str, lens: list[int], contexts: list[int]
) -> tuple[Callable[[], None], Callable[[], None], torch.Tensor, Any, torch.Tensor, torch.Tensor]:
    """The layer's attention of a batch: vLLM's, ours, our output, the layer, the queries and their positions."""
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention as Stock

    ours = object.__new__(batch_invariant_class(type(f"Layer{kind}", (Layer,), {})))
    Layer.__init__(ours, kind)
    metadata, position = batch_of(ours, lens, contexts)
    window, compressed = metadata["layer.swa"], metadata.get("layer")
    q = torch.randn(
        (len(position), HEADS, 512), generator=torch.Generator("cuda").manual_seed(2), device="cuda"
    ).bfloat16()
    theirs, mine = torch.empty_like(q), torch.empty_like(q)

    def stock() -> None:
        if window.num_decodes:
            Stock._forward_decode(
                ours, q, ours.kv_cache, window, compressed, swa_only=ours.compress_ratio <= 1, output=theirs
            )
        else:
            Stock._forward_prefill(
                ours, q, position, ours.kv_cache, ours.swa_cache_layer.kv_cache, theirs, compressed, window
            )

    def hooked() -> None:
        path = ours._decode if window.num_decodes else ours._prefill
        path(q, position, mine, compressed, window)

    return stock, hooked, mine, ours, q, position


def alone_is_equal(kind: str, lens: list[int], contexts: list[int]) -> bool:
    """Whether the last tokens of up to three requests, prefilled alone, have the bits that they have in the batch."""
    _, hooked, mine, layer, q, position = sides(kind, lens, contexts)
    hooked()
    batch = mine.clone()
    metadata, _ = batch_of(layer, lens, contexts)
    window, compressed = metadata["layer.swa"], metadata.get("layer")
    ends = window.query_start_loc_cpu[1:].tolist()
    for request in sorted({0, len(lens) // 2, len(lens) - 1}):
        row = slice(ends[request] - 1, ends[request])
        one = SimpleNamespace(**vars(window))
        one.num_decodes, one.num_prefills, one.num_decode_tokens = 0, 1, 0
        one.query_start_loc_cpu = torch.tensor([0, 1])
        one.block_table = window.block_table[request : request + 1]
        one.prefill_seq_lens = window.prefill_seq_lens[request : request + 1]
        one.prefill_gather_lens = one.prefill_seq_lens.clamp(max=WINDOW)
        entry = None
        if compressed is not None:
            entry = SimpleNamespace(**vars(compressed))
            entry.block_table = compressed.block_table[request : request + 1]
            listed = torch.full((1, layer.capacity.c128_width), -1, dtype=torch.int32, device="cuda")
            count = (int(position[row]) + 1) // 128
            listed[0, :count] = torch.arange(count, device="cuda")
            entry.c128a_prefill_topk_indices = listed
        first = layer.topk_indices_buffer[0].clone()
        layer.topk_indices_buffer[0] = layer.topk_indices_buffer[row.start].clone()
        out = torch.empty_like(q[row])
        layer._prefill(q[row], position[row], out, entry, one)
        layer.topk_indices_buffer[0] = first
        if not torch.equal(out.view(torch.int16), batch[row].view(torch.int16)):
            return False
    return True


def eager(run: Callable[[], None], busy: int = 0) -> Callable[[], float]:
    """Microseconds of one call with its launches, on a stream that is kept busy for ``busy`` cycles before."""

    def timed() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if busy:
            torch.cuda._sleep(busy)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    return timed


def bench(op: str, shape: tuple[str, int, int], copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    kind, requests, size = shape
    lens, contexts = ([1] * requests, [size] * requests) if op == "decode_attention" else ([size] * requests,) * 2
    stock, hooked, _, layer, _, position = sides(kind, lens, contexts)
    more: dict[str, float] = {}
    if op == "decode_attention":
        stock_us, ours_us, copy_us = medians(capture(stock, 10), capture(hooked, 10), copy)
    else:
        timers = [eager(run, busy) for busy in (BUSY, 0) for run in (stock, hooked)]
        stock_us, ours_us, *idle, copy_us = medians(*timers, copy)
        more = {"stock_idle_us": round(idle[0], 2), "ours_idle_us": round(idle[1], 2)}
    entries = {"c4": (position + 1) // 4, "c128": (position + 1) // 128, "swa": position * 0}[kind]
    listed = int((entries.clamp(max=layer.capacity.topk_width) + (position + 1).clamp(max=WINDOW)).sum())
    gb_s = listed * 584 / ours_us / 1e3
    return {
        "op": op,
        "shape": [kind, requests, size],
        "stock": "flash_mla_with_kvcache" if op == "decode_attention" else "grouped flash_mla_sparse_fwd",
        "stock_us": round(stock_us, 2),
        "ours_us": round(ours_us, 2),
        "ratio": round(stock_us / ours_us, 3),
        **more,
        "gb_s": round(gb_s, 1),
        "percent_of_copy": round(100 * gb_s / (2 * COPY_BYTES / copy_us / 1e3), 1),
        "bitwise": alone_is_equal(kind, lens, contexts),
        **machine(),
    }


def main() -> None:
    """Bench every shape and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of these ops")
    args = parser.parse_args()
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cuda"))
    copy = copy_timer()
    for op, shapes in (("prefill_attention", PREFILL), ("decode_attention", DECODE)):
        records = []
        for shape in shapes:
            records.append(bench(op, shape, copy))
            print(json.dumps(records[-1]), flush=True)
            write_records(args.out, records)  # what a time limit cuts off is then only what is missing


if __name__ == "__main__":
    main()
