"""The compiled cache ops equal the reference byte for byte. Needs a GPU; the reference runs on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect
from bi_sparse_attn import (
    combine_topk_swa,
    gather_decode_kv,
    gather_index_k,
    gather_kv,
    index_k_block_bytes,
    kv_block_bytes,
    quantize_and_insert_index_k_,
    quantize_and_insert_kv_,
)
from bi_sparse_attn._ops import _OPS

pytestmark = pytest.mark.gpu

BLOCK = 64


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=generator(seed), dtype=torch.int32).byte()


def random_slots(*shape: int, slots: int, seed: int, none: float = 0.1) -> torch.Tensor:
    found = torch.randint(slots, shape, generator=generator(seed))
    return torch.where(torch.rand(shape, generator=generator(seed + 1)) < none, -1, found)


def both(run: Callable[..., None], *tensors: torch.Tensor | None) -> tuple[tuple[torch.Tensor | None, ...], ...]:
    """``run`` on copies of the tensors on the CPU and on the GPU; both sets of copies, on the CPU."""
    here = tuple(None if t is None else t.clone() for t in tensors)
    there = tuple(None if t is None else t.cuda() for t in tensors)
    run(*here)
    run(*there)
    return here, tuple(None if t is None else t.cpu() for t in there)


def check(run: Callable[..., None], *tensors: torch.Tensor | None) -> None:
    """Every tensor, outputs with their old contents among them, is the same afterwards."""
    for here, there in zip(*both(run, *tensors), strict=True):
        if here is not None:
            assert_bitwise_equal(there, here)


def test_every_code_with_every_exponent() -> None:
    cache = torch.zeros(1, kv_block_bytes(256), dtype=torch.uint8)
    data = cache[0, : 256 * 576].view(256, 576)
    data[:, :256] = torch.arange(256, dtype=torch.uint8)
    data[:, 256:448] = torch.arange(192, dtype=torch.uint8)
    cache[0, 256 * 576 : 256 * 584].view(256, 8)[:, :7] = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    out = torch.full((256, 512), 7.0, dtype=torch.bfloat16)
    check(lambda c, s, o: gather_kv(c, s, block_size=256, out=o), cache, torch.arange(256), out)


# 24 bytes past the page's padding: rows then start at multiples of 8 bytes only.
@pytest.mark.parametrize("page", [kv_block_bytes(BLOCK), BLOCK * 584 + 24], ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 5000])
def test_gather_of_random_bytes(page: int, count: int) -> None:
    cache = random_bytes(40, page, seed=1)
    slots = random_slots(count, slots=40 * BLOCK, seed=2)
    out = torch.full((count, 640), 7.0, dtype=torch.bfloat16)
    check(lambda c, s, o: gather_kv(c, s, block_size=BLOCK, out=o[:, 64:576]), cache, slots, out)


def kv_rows(rows: int, seed: int) -> torch.Tensor:
    """Groups of every scale, some zero, with NaN and infinities in a few."""
    x = torch.randn(rows, 512, generator=generator(seed))
    x *= 2.0 ** torch.randint(-140, 120, (rows, 8), generator=generator(seed + 1)).repeat_interleave(64, 1)
    bad = torch.rand(rows, 512, generator=generator(seed + 2))
    x = torch.where(bad < 3e-4, torch.tensor([math.nan, math.inf, -math.inf])[torch.arange(512) % 3], x)
    x[::7, :64], x[1::7, 64:128] = 0.0, -0.0
    return x.bfloat16()


def every_amax() -> torch.Tensor:
    """All bfloat16 bit patterns, each as the largest of a group that holds smaller values of both signs too."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    fractions = torch.linspace(-1, 1, 64)
    groups = (bits.float().unsqueeze(1) * fractions).bfloat16()
    groups[:, 63] = bits
    groups = torch.cat([groups, groups[:5]])  # to whole rows of 7 groups
    rows = groups.view(-1, 448)
    return torch.cat([rows, rows[:, :64]], 1)


@pytest.mark.parametrize("rows", [every_amax, lambda: kv_rows(3000, seed=3)], ids=["every amax", "random"])
def test_insert_kv(rows: Callable[[], torch.Tensor]) -> None:
    kv = rows()
    blocks = -(-len(kv) // BLOCK) + 1
    cache = random_bytes(blocks, kv_block_bytes(BLOCK), seed=4)
    slots = torch.randperm(blocks * BLOCK, generator=generator(5))[: len(kv)]
    slots[::11] = -1
    check(lambda c, k, s: quantize_and_insert_kv_(c, k, s, block_size=BLOCK), cache, kv, slots)
    wide = torch.zeros(len(kv), 1025, dtype=torch.bfloat16)
    wide[:, 1::2] = kv
    check(lambda c, k, s: quantize_and_insert_kv_(c, k[:, 1::2], s, block_size=BLOCK), cache, wide, slots)


@pytest.mark.parametrize("block_size", [1, 64])
def test_index_keys(block_size: int) -> None:
    k = torch.cat([every_amax()[:, :128], kv_rows(3000, seed=6)[:, :128]])
    blocks = -(-len(k) // block_size) + 1
    cache = random_bytes(blocks, index_k_block_bytes(block_size), seed=7)
    slots = torch.randperm(blocks * block_size, generator=generator(8))[: len(k)]
    slots[::13] = -1
    check(lambda c, x, s: quantize_and_insert_index_k_(c, x, s, block_size=block_size), cache, k, slots)
    q = torch.zeros(len(k), 128, dtype=torch.float8_e4m3fn)
    scale = torch.full((len(k),), 7.0)

    def gather(c: torch.Tensor, s: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
        gather_index_k(c, s, block_size=block_size, out_q=q, out_scale=scale)

    check(gather, cache, slots, q, scale)


def decode_slots(tokens: int, columns: int, slots: int, seed: int) -> torch.Tensor:
    """Rows with any number of slots, then -1; the last token is padding."""
    found = torch.randint(slots, (tokens, columns), generator=generator(seed))
    lengths = torch.randint(columns + 1, (tokens, 1), generator=generator(seed + 1))
    lengths[:1] = columns
    lengths[-1:] = 0
    return torch.where(torch.arange(columns) < lengths, found, -1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "window", "width"),
    [(1, 512, 128, 640), (37, 512, 128, 640), (5, 0, 128, 128), (9, 1153, 128, 1408), (3, 40, 17, 61), (4, 8, 0, 8),
     (0, 8, 8, 128), (300, 64, 128, 256)],
    ids=str,
)  # fmt: skip
def test_decode_gather(tokens: int, top_k: int, window: int, width: int, dtype: torch.dtype) -> None:
    compressed = random_bytes(30, kv_block_bytes(BLOCK), seed=9) if top_k else None
    cache = random_bytes(20, kv_block_bytes(BLOCK // 2), seed=10)
    arguments = (
        *(compressed, cache),
        decode_slots(tokens, top_k, 30 * BLOCK, seed=11).to(dtype),
        decode_slots(tokens, window, 20 * BLOCK // 2, seed=13).to(dtype),
        torch.full((tokens, width, 512), 7.0, dtype=torch.bfloat16),
        torch.full((tokens, width + 3), 77, dtype=torch.int32),
        torch.full((tokens,), 77, dtype=torch.int32),
    )

    def run(c: torch.Tensor | None, w: torch.Tensor, *rest: torch.Tensor) -> None:
        compressed_slots, window_slots, out, indices, lengths = rest
        gather_decode_kv(
            *(c, w, compressed_slots, window_slots),
            compressed_block_size=BLOCK,
            window_block_size=BLOCK // 2,
            out=out,
            out_indices=indices[:, 2 : 2 + width],
            out_lengths=lengths,
        )

    check(run, *arguments)


def test_decode_lists_the_rows_of_prefill_in_its_order() -> None:
    """Rows of a workspace filled as prefill does, by its index list; rows gathered as decode does: the same bytes."""
    context, ratio, window, top_k = 3000, 4, 128, 512
    compressed_cache = random_bytes(12, kv_block_bytes(BLOCK), seed=15).cuda()
    window_cache = random_bytes(47, kv_block_bytes(BLOCK), seed=16).cuda()
    entries = torch.arange(context // ratio).cuda()
    compressed = gather_kv(compressed_cache, entries, block_size=BLOCK)
    rows = gather_kv(window_cache, torch.arange(context).cuda(), block_size=BLOCK)
    workspace = torch.cat([compressed, rows])
    positions = torch.tensor([0, 3, 130, 2047, 2999], dtype=torch.int32)
    topk = torch.full((len(positions), top_k), -1, dtype=torch.int32)
    for row, position in zip(topk, positions.tolist(), strict=True):
        count = min((position + 1) // ratio, top_k)
        row[:count] = torch.randperm((position + 1) // ratio, generator=generator(17))[:count].sort().values
    window_slots = positions.unsqueeze(1) - window + 1 + torch.arange(window, dtype=torch.int32)
    window_slots = torch.where(window_slots >= 0, window_slots, 2**30).sort(1).values
    window_slots = torch.where(window_slots < 2**30, window_slots, -1).int()
    lists, lengths = combine_topk_swa(
        topk.cuda(), positions.cuda(), torch.zeros_like(positions).cuda(),
        compress_ratio=ratio, window_size=window, compressed_rows=len(entries),
    )  # fmt: skip
    decode = gather_decode_kv(
        compressed_cache, window_cache, topk.cuda(), window_slots.cuda(),
        compressed_block_size=BLOCK, window_block_size=BLOCK,
    )  # fmt: skip
    assert_bitwise_equal(decode.lengths, lengths)
    flat = decode.workspace.flatten(0, 1)
    for prefill, own, length in zip(lists, decode.indices, lengths.tolist(), strict=True):
        assert_bitwise_equal(flat[own[:length].long()], workspace[prefill[:length].long()])


def own_rows(compressed_slots: torch.Tensor, window_slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cache = random_bytes(30, kv_block_bytes(BLOCK), seed=18).cuda()
    found = gather_decode_kv(
        *(cache, cache, compressed_slots, window_slots), compressed_block_size=BLOCK, window_block_size=BLOCK
    )
    return found.workspace, found.lengths


def rows_at_the_longest_neighbours_offset(
    compressed_slots: torch.Tensor, window_slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The window where the longest list of the batch ends: another order of addition for the shorter ones."""
    workspace, lengths = own_rows(compressed_slots, window_slots)
    shift = (compressed_slots >= 0).sum(1).max() - (compressed_slots >= 0).sum(1)
    column = torch.arange(workspace.shape[1], device=workspace.device) - shift.unsqueeze(1)
    return torch.gather(workspace, 1, column.clamp(min=0).unsqueeze(2).expand_as(workspace)), lengths


def test_decode_gather_is_batch_invariant() -> None:
    slots = (decode_slots(4, 70, 30 * BLOCK, seed=19).cuda(), decode_slots(4, 20, 30 * BLOCK, seed=21).cuda())
    options = {"batch_sizes": (1, 2, 33, 129), "neighbours": ("random",)}
    assert_batch_invariant(own_rows, slots, **options)
    must_detect(rows_at_the_longest_neighbours_offset, slots, **options)


def test_graphs_replay_on_new_slots() -> None:
    cache = random_bytes(30, kv_block_bytes(BLOCK), seed=23).cuda()
    compressed, window = (decode_slots(40, n, 30 * BLOCK, seed=24).cuda() for n in (512, 128))
    out = torch.zeros(40, 640, 512, dtype=torch.bfloat16, device="cuda")
    indices = torch.zeros(40, 640, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(40, dtype=torch.int32, device="cuda")
    options = {"compressed_block_size": BLOCK, "window_block_size": BLOCK}
    outputs = {"out": out, "out_indices": indices, "out_lengths": lengths}
    gather_decode_kv(cache, cache, compressed, window, **options, **outputs)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        gather_decode_kv(cache, cache, compressed, window, **options, **outputs)
    for seed in (26, 28):
        compressed.copy_(decode_slots(40, 512, 30 * BLOCK, seed=seed))
        window.copy_(decode_slots(40, 128, 30 * BLOCK, seed=seed + 9))
        out.zero_()
        graph.replay()
        for got, want in zip(
            (out, indices, lengths),
            gather_decode_kv(cache, cache, compressed, window, out=torch.zeros_like(out), **options),
            strict=True,
        ):
            assert_bitwise_equal(got, want)


@pytest.mark.parametrize("name", ["gather_kv", "quantize_and_insert_kv", "gather_decode_kv"])
def test_opcheck(name: str) -> None:
    cache = random_bytes(2, kv_block_bytes(4), seed=30).cuda()
    slots = torch.tensor([3, -1, 0]).cuda()
    rows = torch.zeros(3, 512, dtype=torch.bfloat16, device="cuda")
    small = torch.zeros(1, 128, dtype=torch.int32, device="cuda")
    arguments = {
        "gather_kv": (cache, slots, rows, 4),
        "quantize_and_insert_kv": (cache, rows, slots, 4),
        "gather_decode_kv": (
            *(None, cache, slots[:0].view(1, 0), slots[:1].view(1, 1)),
            *(torch.zeros(1, 128, 512, dtype=torch.bfloat16, device="cuda"), small, small[:, 0].clone(), 4, 4),
        ),
    }[name]
    torch.library.opcheck(_OPS[name], arguments, test_utils=("test_schema", "test_faketensor"))


def test_misaligned_pages_and_rows_are_refused() -> None:
    """By the wrapper, and by the op itself."""
    cache = torch.zeros(2, 4 * 584 + 4, dtype=torch.uint8, device="cuda")
    slots = torch.tensor([0, 1], device="cuda")
    memory = torch.full((2, 516), 7.0, dtype=torch.bfloat16, device="cuda")
    for page, out in ((cache, memory[:, :512]), (cache[:, :2336].contiguous(), memory[:, 1:513])):
        with pytest.raises(ArgumentError, match=r"expected rows that start at multiples of (8|16) bytes"):
            gather_kv(page, slots, block_size=4, out=out)
        with pytest.raises(RuntimeError, match="rows that start at multiples of"):
            _OPS["gather_kv"](page, slots, out, 4)
    with pytest.raises(RuntimeError, match="expected pages of"):
        _OPS["gather_kv"](cache, slots, memory[:, :512], 5)
    assert bool((memory == 7).all())
