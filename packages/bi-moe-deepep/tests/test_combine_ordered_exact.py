"""The compiled combine equals the reference bit for bit. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, first_difference, must_detect
from bi_moe_deepep import combine_ordered
from bi_moe_deepep.reference import combine_ordered as reference

pytestmark = pytest.mark.gpu

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batch(tokens: int, top_k: int, hidden: int, experts: int = 8, capacity: int = 64, scale: float = 1.0) -> Batch:
    rows = (torch.randn(experts, capacity, hidden) * scale).bfloat16()
    slots = torch.randint(-1, experts * capacity, (tokens, top_k), dtype=torch.int32)
    return rows, slots, torch.randn(tokens, top_k)


def check(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        got = combine_ordered(rows.cuda(), slots.cuda(), weights.cuda(), out_dtype=dtype)
        want = reference.combine_ordered(rows, slots, weights, out_dtype=dtype)
        assert_bitwise_equal(got.cpu(), want, str(dtype))


@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 9, 17], ids=lambda k: f"k={k}")
@pytest.mark.parametrize("hidden", [8, 2048, 2056, 4096, 7168], ids=lambda h: f"H={h}")
def test_equals_the_reference(top_k: int, hidden: int) -> None:
    for tokens, scale in ((0, 1.0), (1, 1.0), (130, 1e-3), (130, 300.0)):
        check(*batch(tokens, top_k, hidden, scale=scale))


def test_all_bit_patterns() -> None:
    bits = torch.randint(-(1 << 15), 1 << 15, (8, 64, 4096)).to(torch.int16)
    _, slots, weights = batch(512, 6, 4096)
    check(bits.view(torch.bfloat16), slots, weights)
    patterns = torch.randint(-(1 << 31), 1 << 31, (512, 6)).to(torch.int32).view(torch.float32)
    check(bits.view(torch.bfloat16), slots, patterns)
    finite = torch.where(torch.isfinite(bits.view(torch.bfloat16)), bits.view(torch.bfloat16), 0.0)
    check(finite, slots, torch.where(torch.isfinite(patterns), patterns, 1.0))


def test_subnormal_sums_and_signed_zeros() -> None:
    rows, slots, weights = batch(200, 6, 512)
    check(rows * 2.0**-120, slots, weights * 2.0**-20)
    check(torch.where(rows > 0, -0.0, rows).bfloat16(), slots, torch.where(weights > 0, -0.0, weights))


@pytest.mark.parametrize("top_k", [1, 6, 9], ids=lambda k: f"k={k}")
def test_slots_of_negative_ids_are_skipped(top_k: int) -> None:
    rows, slots, weights = batch(300, top_k, 2048)
    ids = torch.randint(-2, 8, (300, top_k), dtype=torch.int32)
    slots[ids < 0] = torch.randint(-(1 << 31), 1 << 31, (int((ids < 0).sum()),)).to(torch.int32)  # nobody's memory
    weights[ids < 0] = torch.nan
    for dtype in (torch.bfloat16, torch.float32):
        got = combine_ordered(rows.cuda(), slots.cuda(), weights.cuda(), topk_ids=ids.cuda(), out_dtype=dtype)
        want = reference.combine_ordered(rows, slots, weights, topk_ids=ids, out_dtype=dtype)
        assert_bitwise_equal(got.cpu(), want, str(dtype))


def test_slots_in_another_order_are_noticed() -> None:
    rows, slots, weights = (part.cuda() for part in batch(300, 6, 4096))
    forward = combine_ordered(rows, slots, weights, out_dtype=torch.float32)
    backward = combine_ordered(rows, slots.flip(1).contiguous(), weights.flip(1).contiguous(), out_dtype=torch.float32)
    assert first_difference(forward, backward) is not None


def test_batch_invariance_and_its_twin() -> None:
    rows, slots, weights = (part.cuda() for part in batch(3, 6, 1024))
    assert_batch_invariant(lambda s, w: combine_ordered(rows, s, w), (slots, weights))

    def dependent(s: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        flip = len(s) > 16
        s, w = (s.flip(1).contiguous(), w.flip(1).contiguous()) if flip else (s, w)
        return combine_ordered(rows, s, w, out_dtype=torch.float32)

    must_detect(dependent, (slots, weights), batch_sizes=(2, 33), neighbours=("random",))


def test_graphs_replay_and_only_the_output_is_written() -> None:
    rows, slots, weights = (part.cuda() for part in batch(100, 6, 512))
    memory = torch.full((102, 528), 7.0, dtype=torch.bfloat16, device="cuda")
    out = memory[1:101, 8:520]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        combine_ordered(rows, slots, weights, out=out)
    for _ in range(3):
        rows.copy_(torch.randn_like(rows)), weights.copy_(torch.randn_like(weights))
        graph.replay()
        assert_bitwise_equal(out.contiguous(), combine_ordered(rows, slots, weights))
    out.fill_(7.0)
    assert (memory == 7.0).all()


def test_opcheck() -> None:
    rows, slots, weights = (part.cuda() for part in batch(5, 3, 64))
    out = torch.empty(5, 64, dtype=torch.bfloat16, device="cuda")
    for ids in (None, torch.zeros_like(slots)):
        torch.library.opcheck(torch.ops.bi_moe_deepep.combine_ordered.default, (out, rows, slots, weights, ids))


def test_slots_outside_are_skipped_and_odd_memory_is_refused() -> None:
    rows, slots, weights = (part.cuda() for part in batch(4, 2, 16))
    slots[:] = torch.tensor([[3, 512], [10**9, 3], [-7, 3], [3, -1]], dtype=torch.int32)
    weights[:] = 2.0
    got = combine_ordered(rows, slots, weights)
    for row in got:
        assert_bitwise_equal(row, rows[0, 3] * 2)
    with pytest.raises(ArgumentError, match=r"^expert_out: expected contiguous"):
        combine_ordered(rows[:, :, :8], slots, weights)
    with pytest.raises(ArgumentError, match=r"^expert_out: expected rows of a multiple of 8"):
        combine_ordered(rows[:, :, :12].contiguous(), slots, weights)
