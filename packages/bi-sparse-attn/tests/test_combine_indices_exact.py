"""The compiled index fillers equal the reference. Needs a GPU; the reference runs on the CPU."""

from __future__ import annotations

import pytest
import torch

from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect
from bi_sparse_attn import c128_indices, combine_topk_swa
from bi_sparse_attn._ops import _OPS

pytestmark = pytest.mark.gpu

CONSTANTS = {"compress_ratio": 4, "window_size": 128, "compressed_rows": 5000, "row_offset": 1_000_000}


def tokens(count: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions from padding to 20,000, entries that a token can see, and gather starts before its window."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(20_000, (count,), generator=generator)
    positions[::5] %= 600
    positions[2::9] = -1
    topk = torch.full((count, top_k), -1, dtype=torch.int32)
    for row, position in zip(topk, positions.tolist(), strict=True):
        visible = (position + 1) // 4
        chosen = torch.randperm(visible, generator=generator)[:top_k].sort().values
        row[: len(chosen)] = chosen
    topk[2::9] = 77  # what an earlier step left in a padding token's row
    starts = ((positions - 127).clamp(min=0) * torch.rand(count, generator=generator)).long()
    return topk, positions, starts


@pytest.mark.parametrize("count", [0, 1, 300])
@pytest.mark.parametrize("top_k", [0, 1, 512, 1000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_combined_lists(count: int, top_k: int, dtype: torch.dtype) -> None:
    topk, positions, starts = tokens(count, top_k, seed=1)
    positions, starts = positions.to(dtype), starts.to(dtype)
    want = combine_topk_swa(topk, positions, starts, **CONSTANTS)
    got = combine_topk_swa(topk.cuda(), positions.cuda(), starts.cuda(), **CONSTANTS)
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a.cpu(), b)
    memory = torch.full((count, 3000), 77, dtype=torch.int32, device="cuda")
    wide = topk.new_zeros(count, 2 * top_k).cuda()
    wide[:, ::2] = topk
    combine_topk_swa(wide[:, ::2], positions.cuda(), starts.cuda(), **CONSTANTS, out_indices=memory[:, 1:2801:2])
    width = want[0].shape[1]
    assert_bitwise_equal(memory[:, 1 : 2 * width : 2].cpu(), want[0])
    assert bool((memory[:, 2 * width + 1 : 2801 : 2] == -1).all())
    assert bool((memory[:, ::2] == 77).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_offsets_by_token(dtype: torch.dtype) -> None:
    inputs = tokens(300, 512, seed=7)
    constants = CONSTANTS | {"row_offset": (torch.arange(300) * 7919 % 1_000_003).to(dtype)}
    want = combine_topk_swa(*inputs, **constants)
    got = combine_topk_swa(*(t.cuda() for t in inputs), **(constants | {"row_offset": constants["row_offset"].cuda()}))
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a.cpu(), b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [0, 128, 8192])
def test_c128_lists(width: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([-1, 0, 126, 127, 128, 255, 128 * width - 1], dtype=dtype).clamp(max=128 * width + 126)
    want = c128_indices(positions, width=width)
    assert_bitwise_equal(c128_indices(positions.cuda(), width=width).cpu(), want)
    strided = torch.stack([positions, positions], 1)[:, 1].cuda()
    memory = torch.full((len(positions), 2 * width + 1), 77, dtype=torch.int32, device="cuda")
    c128_indices(strided, width=width, out=memory[:, 1::2])
    assert_bitwise_equal(memory[:, 1::2].cpu(), want)
    assert bool((memory[:, ::2] == 77).all())


def rows(topk: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (*combine_topk_swa(topk, positions, starts, **CONSTANTS), c128_indices(positions, width=256))


def width_of_the_batch(topk: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """C128 lists as wide as the longest sequence of the batch needs, padded with zeros: what vLLM 0.33 does."""
    lists = rows(topk, positions, starts)
    longest = int((positions.max() + 1) // 128)
    lists[2][:, longest:] = 0
    return lists


def test_batch_invariance() -> None:
    inputs = tuple(t.cuda() for t in tokens(6, 512, seed=2))
    options = {"batch_sizes": (1, 2, 33, 129, 513), "neighbours": ("random",)}
    assert_batch_invariant(rows, inputs, **options)
    must_detect(width_of_the_batch, inputs, **options)


def test_graphs_replay_on_new_positions() -> None:
    topk, positions, starts = (t.cuda() for t in tokens(70, 512, seed=3))
    out = torch.empty(70, 640, dtype=torch.int32, device="cuda")
    lengths, c128 = torch.empty_like(out[:, 0]), torch.empty(70, 256, dtype=torch.int32, device="cuda")

    def run() -> None:
        combine_topk_swa(topk, positions, starts, **CONSTANTS, out_indices=out, out_lengths=lengths)
        c128_indices(positions, width=256, out=c128)

    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    for seed in (4, 5):
        new = tokens(70, 512, seed)
        for buffer, values in zip((topk, positions, starts), new, strict=True):
            buffer.copy_(values)
        graph.replay()
        for got, want in zip((out, lengths, c128), rows(*new), strict=True):
            assert_bitwise_equal(got.cpu(), want)


def test_opcheck() -> None:
    topk, positions, starts = (t.cuda() for t in tokens(3, 8, seed=6))
    out = torch.zeros(3, 256, dtype=torch.int32, device="cuda")
    for name, arguments in (
        ("combine_topk_swa", (topk, positions, starts, None, out, out[:, 0].clone(), 4, 128, 5000, 0)),
        ("c128_indices", (positions, out)),
    ):
        torch.library.opcheck(_OPS[name], arguments, test_utils=("test_schema", "test_faketensor"))
