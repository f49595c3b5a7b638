"""The compiled staging equals the reference bit for bit. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from bi_kernels import ArgumentError, CapacityError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import StagedTokens, stage_tokens
from bi_moe_deepep.reference import stage_tokens as reference

pytestmark = pytest.mark.gpu


def routing(tokens: int, experts: int, top_k: int, skew: float = 0.0) -> torch.Tensor:
    """Distinct experts per token; with skew most tokens name the same few."""
    scores = torch.rand(tokens, experts) + skew * torch.linspace(1, 0, experts)
    return scores.argsort(1, descending=True)[:, :top_k].int()


def filled(experts: int, capacity: int, hidden: int, shape: torch.Size) -> StagedTokens:
    """Outputs whose every element is known, so that one that should not be written shows."""
    return StagedTokens(
        torch.full((experts, capacity, hidden), 7.0, dtype=torch.bfloat16),
        torch.full((experts,), 7, dtype=torch.int32),
        torch.full(shape, 7, dtype=torch.int32),
    )


def check(x: torch.Tensor, ids: torch.Tensor, experts: int, capacity: int, first: int, local: int) -> None:
    out = filled(local, capacity, x.shape[1], ids.shape)
    device = StagedTokens(*(part.cuda() for part in out))
    arguments = {"num_experts": experts, "capacity": capacity, "first_expert": first, "num_local_experts": local}
    got = stage_tokens(x.cuda(), ids.cuda(), out=device, **arguments)
    want = reference.stage_tokens(x, ids, out=out, **arguments)
    for name, have, expected in zip(("slots", "counts", "x"), reversed(got), reversed(want), strict=True):
        assert_bitwise_equal(have.cpu(), expected, name)


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 1023, 1024, 1025, 2500], ids=lambda t: f"T={t}")
@pytest.mark.parametrize("skew", [0.0, 1.0, 10.0], ids=lambda s: f"skew={s}")
def test_equals_the_reference(tokens: int, skew: float) -> None:
    for experts, top_k, first, local in ((8, 3, 0, 8), (64, 6, 16, 16), (256, 6, 128, 128), (384, 8, 380, 4)):
        ids = routing(tokens, experts, top_k, skew)
        x = torch.randn(tokens, 128).bfloat16()
        check(x, ids, experts, max(tokens, 1), first, local)
        check(x, ids.long(), experts, tokens + 5, first, local)


def test_unrouted_slots_and_strided_rows() -> None:
    ids = routing(300, 16, 4)
    ids[::3] = -1
    ids[1::3, 2] = -1
    wide = torch.randn(300, 264).bfloat16()
    check(wide[:, 8:], ids, 16, 300, 0, 16)
    both = torch.zeros(300, 12, dtype=torch.int32)
    both[:, 4:8] = ids
    check(wide[:, :256], both[:, 4:8], 16, 400, 3, 5)


@pytest.mark.parametrize("hidden", [8, 2048, 4096, 7168], ids=lambda h: f"H={h}")
def test_hidden_sizes(hidden: int) -> None:
    bits = torch.randint(-(1 << 15), 1 << 15, (130, hidden)).to(torch.int16)
    check(bits.view(torch.bfloat16), routing(130, 32, 6), 32, 256, 8, 16)


def test_every_call_gives_the_same_bits_and_graphs_replay() -> None:
    x, ids = torch.randn(600, 512, device="cuda").bfloat16(), routing(600, 64, 6).cuda()
    arguments = {"num_experts": 64, "capacity": 640}
    out = stage_tokens(x, ids, **arguments)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        stage_tokens(x, ids, out=out, **arguments)
    for _ in range(5):
        x.copy_(torch.randn_like(x)), ids.copy_(routing(600, 64, 6))
        want = [stage_tokens(x, ids, **arguments) for _ in range(3)]
        for part in out:
            part.zero_()
        graph.replay()
        for other in want:
            for have, expected in zip(out, other, strict=True):
                assert_bitwise_equal(have, expected)


def test_rows_do_not_depend_on_what_other_tokens_hold() -> None:
    x, ids = torch.randn(200, 256, device="cuda").bfloat16(), routing(200, 32, 6).cuda()
    first = stage_tokens(x, ids, num_experts=32, capacity=200)
    x[1::2] = torch.nan
    second = stage_tokens(x, ids, num_experts=32, capacity=200)
    for staged in (first, second):
        flat = staged.x.flatten(0, 1)
        for slot in range(6):
            assert_bitwise_equal(flat[staged.slots[::2, slot].long()], x[::2])
    assert_bitwise_equal(first.slots, second.slots)


def test_opcheck() -> None:
    x, ids = torch.randn(9, 64, device="cuda").bfloat16(), routing(9, 8, 3).cuda()
    out = StagedTokens(*(part.cuda() for part in filled(4, 16, 64, ids.shape)))
    torch.library.opcheck(torch.ops.bi_moe_deepep.stage_tokens.default, (*out, x, ids, 8, 2))


def test_what_a_kernel_cannot_take_is_refused() -> None:
    x, ids = torch.zeros(9, 64, device="cuda").bfloat16(), routing(9, 8, 3).cuda()
    with pytest.raises(CapacityError, match="expected room for all 9 tokens in one expert, got 8 rows"):
        stage_tokens(x, ids, num_experts=8, capacity=8)
    for bad in (x[:, 1:9], x[:, :63], torch.zeros(9, 68, device="cuda").bfloat16()[:, :64]):
        with pytest.raises(ArgumentError, match=r"^x: expected rows of a multiple of 8 elements"):
            stage_tokens(bad, ids, num_experts=8, capacity=9)


def test_experts_that_do_not_exist_are_nobodys() -> None:
    ids = torch.tensor([[0, 9], [-5, 1], [1, 0], [2, 2]], dtype=torch.int32, device="cuda")
    x = torch.arange(32.0, device="cuda").view(4, 8).bfloat16()
    staged = stage_tokens(x, ids, num_experts=3, capacity=4)
    assert staged.slots.tolist() == [[0, -1], [-1, 4], [5, 1], [8, 8]]
    assert staged.counts.tolist() == [2, 2, 1]
