"""The compiled choice of experts equals the reference bit for bit. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect
from bi_moe_deepep import select_experts
from bi_moe_deepep.reference import router as reference

pytestmark = pytest.mark.gpu


def check(logits: torch.Tensor, top_k: int, **options: object) -> None:
    on_gpu = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    got = select_experts(logits.cuda(), top_k=top_k, **on_gpu)  # type: ignore[arg-type]
    want = reference.select_experts(logits, top_k=top_k, **options)  # type: ignore[arg-type]
    for name, have, expected in zip(("ids", "weights"), reversed(got), reversed(want), strict=True):
        assert_bitwise_equal(have.cpu(), expected, name)


@pytest.mark.parametrize("experts", [1, 4, 31, 33, 256, 384, 512], ids=lambda e: f"E={e}")
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 1000], ids=lambda t: f"T={t}")
def test_equals_the_reference(experts: int, tokens: int) -> None:
    for top_k in {1, min(6, experts), min(8, experts)}:
        logits = torch.randn(tokens, experts) * 4
        check(logits, top_k)
        check(logits, top_k, bias=torch.randn(experts), routed_scaling_factor=2.5)
        check(logits, top_k, renormalize=False, routed_scaling_factor=1.3)


def test_any_bit_pattern() -> None:
    logits = torch.randint(-(1 << 31), 1 << 31, (4000, 256)).to(torch.int32).view(torch.float32)
    check(logits, 6)
    check(logits, 6, bias=logits[17].clone())
    check(torch.where(torch.isfinite(logits), logits, 0.0), 8)
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32).view(256, 256)
    check(every, 6)


def test_ties_go_to_the_lower_expert() -> None:
    logits = torch.randint(-2, 3, (500, 256)).float()
    logits = torch.where(logits == 0, torch.where(torch.rand(500, 256) > 0.5, -0.0, 0.0), logits)
    check(logits, 6)
    check(torch.zeros(3, 256), 6, bias=torch.zeros(256))
    check(torch.full((2, 256), -torch.inf), 6)
    check(torch.full((2, 256), torch.nan), 6)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_hash_layers(dtype: torch.dtype) -> None:
    table = torch.rand(1000, 256).argsort(1)[:, :6].to(dtype)
    check(torch.randn(300, 256), 6, token_ids=torch.randint(0, 1000, (300,), dtype=dtype), tid2eid=table)


def test_token_ids_outside_the_table_touch_nothing_else() -> None:
    table = torch.rand(10, 8).argsort(1)[:, :2]
    ids = torch.tensor([3, -1, 10, 2**40, 3])
    logits = torch.randn(5, 8)
    weights, experts = select_experts(logits.cuda(), top_k=2, token_ids=ids.cuda(), tid2eid=table.cuda())
    assert (experts[1:4] == -1).all()
    assert torch.isnan(weights[1:4]).all()
    for row in (0, 4):
        want = reference.select_experts(logits[row : row + 1], top_k=2, token_ids=ids[:1], tid2eid=table)
        assert_bitwise_equal(weights[row : row + 1].cpu(), want[0])
        assert_bitwise_equal(experts[row : row + 1].cpu(), want[1])


def test_batch_invariance_and_its_twin() -> None:
    logits, bias = torch.randn(3, 256, device="cuda"), torch.randn(256, device="cuda")
    assert_batch_invariant(lambda rows: select_experts(rows, top_k=6, bias=bias), logits)

    def dependent(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return select_experts(rows, top_k=6, bias=bias * (1 + 1e-3 * len(rows)))

    must_detect(dependent, logits, batch_sizes=(2, 513), neighbours=("random",))


def test_graphs_strides_and_opcheck() -> None:
    wide = torch.randn(64, 600, device="cuda")
    logits, bias = wide[:, 10:522:2], torch.randn(256, device="cuda")
    weights, ids = torch.empty(64, 6, device="cuda"), torch.empty(64, 6, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        select_experts(logits, top_k=6, bias=bias, out_weights=weights, out_ids=ids)
    for _ in range(3):
        wide.copy_(torch.randn_like(wide))
        graph.replay()
        want = select_experts(logits.contiguous(), top_k=6, bias=bias)
        assert_bitwise_equal(weights, want[0]), assert_bitwise_equal(ids, want[1])
    op = torch.ops.bi_moe_deepep.select_experts.default
    torch.library.opcheck(op, (weights, ids, logits.contiguous(), bias, None, None, True, 1.5))
