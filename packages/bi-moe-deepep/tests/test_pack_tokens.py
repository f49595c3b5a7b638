from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import PackedTokens, pack_tokens

FP8 = torch.float8_e4m3fn


def tokens(count: int, hidden: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of every kind, NaN too, and scales."""
    generator = torch.Generator().manual_seed(count)
    codes = torch.randint(0, 256, (count, hidden), generator=generator, dtype=torch.uint8)
    return codes.view(FP8), torch.randn(count, hidden // 128, generator=generator)


def poisoned(rows: int, tokens: int, top_k: int, experts: int, hidden: int = 256) -> PackedTokens:
    return PackedTokens(
        torch.full((rows, hidden), 7, dtype=torch.uint8).view(FP8),
        torch.full((rows, hidden // 128), 7.0),
        torch.full((experts + 1,), 77, dtype=torch.int32),
        torch.full((rows,), 77, dtype=torch.int32),
        torch.full((tokens, top_k), 77, dtype=torch.int32),
    )


def one_by_one(q: torch.Tensor, s: torch.Tensor, ids: list[list[int]], top_k: int, experts: int) -> PackedTokens:
    """Packing as a loop over experts, tokens and slots."""
    out, row = poisoned(len(ids) * top_k, len(ids), top_k, experts), 0
    out.m_indices.fill_(-1), out.slots.fill_(-1)
    for expert in range(experts):
        out.offsets[expert] = row
        for token, chosen in enumerate(ids):
            for slot, found in enumerate(chosen):
                if found == expert:
                    out.q.view(torch.uint8)[row], out.s[row] = q.view(torch.uint8)[token], s[token]
                    out.m_indices[row], out.slots[token, slot] = expert, row
                    row += 1
    out.offsets[experts] = row
    return out


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    experts, top_k = draw(st.integers(1, 9)), draw(st.integers(1, 10))
    row = st.lists(st.integers(-2, experts - 1), min_size=top_k, max_size=top_k)
    return experts, top_k, draw(st.lists(row, max_size=30))


@settings(max_examples=60)
@given(routings())
def test_is_a_loop_over_experts_tokens_and_slots(routing: tuple[int, int, list[list[int]]]) -> None:
    experts, top_k, ids = routing
    q, s = tokens(len(ids))
    out = poisoned(len(ids) * top_k, len(ids), top_k, experts)
    have = pack_tokens(q, s, torch.tensor(ids).view(len(ids), top_k).long(), num_experts=experts, out=out)
    for name, got, want in zip(PackedTokens._fields, have, one_by_one(q, s, ids, top_k, experts), strict=True):
        assert_bitwise_equal(got, want, name)


def test_int32_and_int64_ids_agree_and_strides_do_not_matter() -> None:
    (q, s), ids = tokens(5), torch.tensor([[0, 3], [3, 1], [-1, -1], [2, 3], [3, 0]])
    packed = pack_tokens(q, s, ids, num_experts=4)
    other = pack_tokens(q, s.mT.contiguous().mT, ids.int(), num_experts=4)
    used = int(packed.offsets[-1])
    assert used == 8
    for have, want in zip(other, packed, strict=True):
        assert_bitwise_equal(*(part[:used] if part.shape[0] == 10 else part for part in (have, want)))


def test_layout_is_what_a_product_reads_fast() -> None:
    (q, s), ids = tokens(7), torch.zeros(7, 1, dtype=torch.int32)
    packed = pack_tokens(q, s, ids, num_experts=1)
    assert packed.s.stride() == (1, 8)
    out = PackedTokens.empty(q, ids, num_experts=1, packed_q=torch.empty_like(q))
    assert pack_tokens(q, s, ids, num_experts=1, out=out).q is out.q


def test_empty() -> None:
    packed = pack_tokens(*tokens(0), torch.zeros(0, 2, dtype=torch.int32), num_experts=3)
    assert packed.q.shape == (0, 256)
    assert packed.offsets.tolist() == [0, 0, 0, 0]
    assert packed.slots.shape == (0, 2)


def test_an_expert_that_does_not_exist_writes_nothing() -> None:
    out = poisoned(4, 2, 2, 4)
    with pytest.raises(ArgumentError, match=r"^topk_ids: .*got 4 for token 1"):
        pack_tokens(*tokens(2), torch.tensor([[0, 1], [1, 4]]), num_experts=4, out=out)
    for have, want in zip(out, poisoned(4, 2, 2, 4), strict=True):
        assert_bitwise_equal(have, want)


def test_bad_arguments() -> None:
    (q, s), ids = tokens(2), torch.zeros(2, 1, dtype=torch.int32)
    for name, arguments in {
        "q": (q.float(), s, ids),
        "s": (q, s.double(), ids),
        "topk_ids": (q, s, ids.float()),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            pack_tokens(*arguments, num_experts=4)
    with pytest.raises(ArgumentError, match=r"^q: .*128"):
        pack_tokens(q[:, :64], s[:, :0], ids, num_experts=4)
    with pytest.raises(ArgumentError, match=r"^s: "):
        pack_tokens(q, s[:, :1], ids, num_experts=4)
    with pytest.raises(ArgumentError, match=r"^topk_ids: "):
        pack_tokens(q, s, ids[:1], num_experts=4)
    with pytest.raises(ArgumentError, match=r"^num_experts: "):
        pack_tokens(q, s, ids, num_experts=0)
    good = poisoned(2, 2, 1, 4)
    for name, out in {
        "out.q": good._replace(q=good.q[:1]),
        "out.s": good._replace(s=good.s[:, :1].expand(2, 2)),
        "out.offsets": good._replace(offsets=good.offsets[:4]),
        "out.m_indices": good._replace(m_indices=good.m_indices.long()),
        "out.slots": good._replace(slots=good.slots.T),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            pack_tokens(q, s, ids, num_experts=4, out=out)
    for have, want in zip(good, poisoned(2, 2, 1, 4), strict=True):
        assert_bitwise_equal(have, want)
