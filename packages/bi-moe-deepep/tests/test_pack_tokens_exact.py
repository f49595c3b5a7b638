"""The compiled packing equals the reference bit for bit. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import PackedTokens, pack_tokens
from bi_moe_deepep.reference import pack_tokens as reference

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn


def routing(tokens: int, experts: int, top_k: int, skew: float = 0.0) -> torch.Tensor:
    """Distinct experts per token; with skew most tokens name the same few."""
    scores = torch.rand(tokens, experts) + skew * torch.linspace(1, 0, experts)
    return scores.argsort(1, descending=True)[:, :top_k].int()


def codes(tokens: int, hidden: int) -> torch.Tensor:
    """Of every kind, NaN too."""
    return torch.randint(0, 256, (tokens, hidden), dtype=torch.uint8).view(FP8)


def filled(ids: torch.Tensor, hidden: int, experts: int) -> PackedTokens:
    """Outputs whose every element is known, so that one that should not be written shows."""
    return PackedTokens(
        torch.full((ids.numel(), hidden), 7, dtype=torch.uint8).view(FP8),
        torch.full((ids.numel(), hidden // 128), 7.0),
        torch.full((experts + 1,), 7, dtype=torch.int32),
        torch.full((ids.numel(),), 7, dtype=torch.int32),
        torch.full(ids.shape, 7, dtype=torch.int32),
    )


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """On the GPU with its strides, which ``cuda()`` keeps only without gaps."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return memory.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def check(q: torch.Tensor, s: torch.Tensor, ids: torch.Tensor, experts: int) -> None:
    out = filled(ids, q.shape[1], experts)
    scales = torch.full((out.s.shape[1], len(out.s) + 4), 7.0, device="cuda").mT[: len(out.s)]
    device = PackedTokens(*(part.cuda() for part in out))._replace(s=scales)
    got = pack_tokens(moved(q), moved(s), moved(ids), num_experts=experts, out=device)
    want = reference.pack_tokens(q, s, ids, num_experts=experts, out=out)
    for name, have, expected in zip(PackedTokens._fields[::-1], reversed(got), reversed(want), strict=True):
        assert_bitwise_equal(have.cpu(), expected, name)


# Both sides of the number of slots up to which one launch does it: 4096.
@pytest.mark.parametrize(
    "tokens", [0, 1, 2, 31, 32, 33, 255, 256, 257, 512, 682, 683, 1366, 2048], ids=lambda t: f"T={t}"
)
@pytest.mark.parametrize("skew", [0.0, 1.0, 10.0], ids=lambda s: f"skew={s}")
def test_equals_the_reference(tokens: int, skew: float) -> None:
    for experts, top_k in ((8, 3), (64, 6), (256, 6), (385, 8), (7, 7)):
        q, s, ids = codes(tokens, 256), torch.randn(tokens, 2), routing(tokens, experts, top_k, skew)
        check(q, s, ids, experts)
        ids[torch.rand(ids.shape) < 0.2] = -1
        check(q, s.mT.contiguous().mT, ids.long(), experts)


@pytest.mark.parametrize("top_k", [1, 8, 9, 17], ids=lambda k: f"k={k}")
@pytest.mark.parametrize("tokens", [40, 900, 5000], ids=lambda t: f"T={t}")
def test_more_slots_than_one_pass_counts(tokens: int, top_k: int) -> None:
    check(codes(tokens, 128), torch.randn(tokens, 1), routing(tokens, 40, top_k), 40)


@pytest.mark.parametrize("tokens", [70, 1100], ids=lambda t: f"T={t}")
def test_experts_named_twice_none_at_all_and_strided_rows(tokens: int) -> None:
    wide = codes(tokens, 1040)
    ids = torch.randint(-3, 5, (tokens, 20), dtype=torch.int32)
    check(wide[:, 16:], torch.randn(tokens, 16)[:, ::2], ids[:, 4:13], 5)
    check(wide[:, :1024], torch.randn(tokens, 8), torch.full((tokens, 6), -1), 5)
    check(wide[:, :1024], torch.randn(1, 8).expand(tokens, 8), torch.full((tokens, 6), 4), 5)


@pytest.mark.parametrize("hidden", [128, 4096, 7168], ids=lambda h: f"H={h}")
@pytest.mark.parametrize("tokens", [130, 800], ids=lambda t: f"T={t}")
def test_hidden_sizes(tokens: int, hidden: int) -> None:
    scales = torch.randint(-(1 << 31), 1 << 31, (tokens, hidden // 128), dtype=torch.int32).view(torch.float32)
    check(codes(tokens, hidden), scales, routing(tokens, 32, 6), 32)


@pytest.mark.parametrize("tokens", [48, 1000], ids=lambda t: f"T={t}")
def test_every_call_gives_the_same_bits_and_graphs_replay(tokens: int) -> None:
    q, s, ids = codes(tokens, 512).cuda(), torch.randn(tokens, 4).cuda(), routing(tokens, 64, 6).cuda()
    out = pack_tokens(q, s, ids, num_experts=64)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        pack_tokens(q, s, ids, num_experts=64, out=out)
    for _ in range(3):
        q.view(torch.uint8).copy_(codes(tokens, 512).view(torch.uint8)), ids.copy_(routing(tokens, 64, 6))
        want = [pack_tokens(q, s, ids, num_experts=64) for _ in range(3)]
        for part in out:
            part.zero_()
        graph.replay()
        for other in want:
            for have, expected in zip(out, other, strict=True):
                assert_bitwise_equal(have, expected)


def test_experts_that_do_not_exist_are_nobodys() -> None:
    ids = torch.tensor([[0, 9], [-5, 1], [1, 0], [2, 2]], dtype=torch.int32, device="cuda")
    packed = pack_tokens(codes(4, 128).cuda(), torch.ones(4, 1, device="cuda"), ids, num_experts=3)
    assert packed.slots.tolist() == [[0, -1], [-1, 2], [3, 1], [4, 5]]
    assert packed.offsets.tolist() == [0, 2, 4, 6]
    assert packed.m_indices.tolist() == [0, 0, 1, 1, 2, 2, -1, -1]


def test_opcheck() -> None:
    q, s, ids = codes(9, 128).cuda(), torch.ones(9, 1, device="cuda"), routing(9, 8, 3).cuda()
    out = PackedTokens.empty(q, ids, num_experts=8)
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # allclose lacks float8
    torch.library.opcheck(torch.ops.bi_moe_deepep.pack_tokens.default, (*out, q, s, ids), test_utils=utils)


def test_what_a_kernel_cannot_take_is_refused() -> None:
    wide, s, ids = codes(9, 272).cuda(), torch.ones(9, 2, device="cuda"), routing(9, 8, 3).cuda()
    for bad in (wide[:, 8:264], codes(9, 264).cuda()[:, :256], codes(256, 9).cuda().mT):
        with pytest.raises(ArgumentError, match=r"^q: expected rows of a multiple of 8 elements"):
            pack_tokens(bad, s, ids, num_experts=8)
    with pytest.raises(ArgumentError, match=r"^topk_ids: expected stride 1"):
        pack_tokens(wide[:, :256], s, ids.mT.contiguous().mT, num_experts=8)
