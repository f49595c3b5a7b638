"""The Triton kernel gives the reference's slots, eager and in a graph replayed after other inputs."""

from __future__ import annotations

import pytest
import torch

from bi_kernels.testing import assert_bitwise_equal
from bi_sparse_attn import fill_decode_slots_
from bi_sparse_attn.reference import decode_slots as reference

pytestmark = pytest.mark.gpu

LAYERS = {
    "c4": (4, 512, 64, True),
    "c128": (128, 128, 2, False),
    "c128 long": (128, 8320, 2, False),
    "swa": (0, 0, 1, False),
}


def inputs(layer: str, tokens: int, seed: int) -> tuple[torch.Tensor | None, ...]:
    ratio, k, _, selects = LAYERS[layer]
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, 60_000, (tokens,), generator=generator)
    requests = torch.randint(0, 9, (tokens,), generator=generator, dtype=torch.int32)
    alive = torch.rand(tokens, generator=generator) > 0.2
    topk = None
    if selects:
        topk = torch.full((tokens, k), -1, dtype=torch.int32)
        for row, position in zip(topk, positions.tolist(), strict=True):
            count = min((position + 1) // ratio, k)
            row[:count] = torch.randperm((position + 1) // ratio, generator=generator)[:count].sort().values.int()
    window_table = torch.randint(0, 2**20, (9, 1000), generator=generator, dtype=torch.int32)
    table = torch.randint(0, 2**20, (9, 1000), generator=generator, dtype=torch.int32) if k else None
    return topk, positions, requests, alive, table, window_table


def outputs(layer: str, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.full((tokens, width), 77, device=device) for width in (LAYERS[layer][1], 128))


def constants(layer: str) -> dict[str, int]:
    return {"compress_ratio": LAYERS[layer][0], "compressed_block_size": LAYERS[layer][2], "window_block_size": 64}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("tokens", [1, 2, 17, 128])
def test_kernel_equals_reference(layer: str, tokens: int) -> None:
    arguments = inputs(layer, tokens, tokens)
    want = outputs(layer, tokens, "cpu")
    reference.fill_decode_slots_(*want, *arguments, **constants(layer))
    got = outputs(layer, tokens, "cuda")
    fill_decode_slots_(*got, *(a if a is None else a.cuda() for a in arguments), **constants(layer))
    for mine, theirs in zip(got, want, strict=True):
        assert_bitwise_equal(mine.cpu(), theirs)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_replayed_graph_equals_reference(layer: str) -> None:
    static = [a if a is None else a.cuda() for a in inputs(layer, 33, 1)]
    got = outputs(layer, 33, "cuda")
    fill_decode_slots_(*got, *static, **constants(layer))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_decode_slots_(*got, *static, **constants(layer))
    for seed in (2, 3):
        arguments = inputs(layer, 33, seed)
        for buffer, values in zip(static, arguments, strict=True):
            if buffer is not None:
                buffer.copy_(values)
        graph.replay()
        want = outputs(layer, 33, "cpu")
        reference.fill_decode_slots_(*want, *arguments, **constants(layer))
        for mine, theirs in zip(got, want, strict=True):
            assert_bitwise_equal(mine.cpu(), theirs)
