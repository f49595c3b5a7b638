"""One small call of every kernel, for compute-sanitizer: ``ci/gpu/sanitize.sh bi-moe-deepep``. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import (
    combine_ordered,
    m_grouped_fp8_gemm_nt_offsets,
    pack_tokens,
    select_experts,
    stage_tokens,
)
from bi_moe_deepep.reference import fp8_gemm as gemm_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 70, 1100], ids=lambda t: f"T={t}")
@pytest.mark.parametrize(("experts", "top_k"), [(8, 3), (100, 9)], ids=str)
def test_router_staging_and_combine(tokens: int, experts: int, top_k: int) -> None:
    logits, x = torch.randn(tokens, experts), torch.randn(tokens, 136).bfloat16()
    want = select_experts(logits, top_k=top_k)
    weights, ids = select_experts(logits.cuda(), top_k=top_k)
    assert_bitwise_equal(ids.cpu(), want[1])
    arguments = {"num_experts": experts, "capacity": tokens, "first_expert": 2, "num_local_experts": 5}
    staged_want = stage_tokens(x, want[1], **arguments)
    staged = stage_tokens(x.cuda(), ids, **arguments)
    assert_bitwise_equal(staged.x.cpu(), staged_want.x)
    for dtype in (torch.bfloat16, torch.float32):
        got = combine_ordered(staged.x, staged.slots, weights, out_dtype=dtype)
        assert_bitwise_equal(got.cpu(), combine_ordered(staged_want.x, staged_want.slots, want[0], out_dtype=dtype))


def test_hash_layer() -> None:
    table, ids = torch.rand(50, 16).argsort(1)[:, :4], torch.randint(0, 50, (33,))
    logits = torch.randn(33, 16)
    weights, _ = select_experts(logits.cuda(), top_k=4, token_ids=ids.cuda(), tid2eid=table.cuda())
    assert_bitwise_equal(weights.cpu(), select_experts(logits, top_k=4, token_ids=ids, tid2eid=table)[0])


@pytest.mark.parametrize("tokens", [1, 70, 1100], ids=lambda t: f"T={t}")
@pytest.mark.parametrize(("experts", "top_k"), [(8, 3), (100, 9)], ids=str)
def test_packing(tokens: int, experts: int, top_k: int) -> None:
    q, s = torch.randn(tokens, 384).to(torch.float8_e4m3fn), torch.randn(tokens, 3)
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k].int()
    ids[::3, 1] = -1
    packed = pack_tokens(q.cuda(), s.cuda(), ids.cuda(), num_experts=experts)
    want = pack_tokens(q, s, ids, num_experts=experts)
    used = int(want.offsets[-1])
    for have, expected in zip(packed[2:], want[2:], strict=True):
        assert_bitwise_equal(have.cpu(), expected)
    assert_bitwise_equal(packed.q[:used].cpu(), want.q[:used])
    assert_bitwise_equal(packed.s[:used].cpu(), want.s[:used])


@pytest.mark.parametrize("counts", [(2, 0, 1), (0, 20, 5), (33, 0, 0), (2000, 129, 2500)], ids=str)
@pytest.mark.parametrize(("n", "k"), [(192, 256), (128, 384)], ids=str)
def test_grouped_product(n: int, k: int, counts: tuple[int, ...]) -> None:
    rows = sum(counts) + 1
    q, wq = (torch.randint(-2, 3, shape).to(torch.float8_e4m3fn) for shape in ((rows, k), (3, n, k)))
    s, ws = (
        torch.randint(-3, 4, shape).float().exp2() for shape in ((rows, k // 128), (3, (n + 127) // 128, k // 128))
    )
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    out = torch.full((rows, n), 7.0, dtype=torch.bfloat16)
    got = m_grouped_fp8_gemm_nt_offsets(q.cuda(), s.cuda(), wq.cuda(), ws.cuda(), offsets.cuda(), out=out.cuda())
    want = gemm_reference.m_grouped_fp8_gemm_nt_offsets(q, s, wq, ws, offsets, out=out)
    assert_bitwise_equal(got.cpu(), want)
