"""Slot lists of decode tokens against a plain-Python oracle, and bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_kernels import ArgumentError
from bi_sparse_attn import fill_decode_slots_

TABLE = torch.tensor([[7, 3, 11, 0, 5, 2], [1, 4, 6, 8, 9, 10]], dtype=torch.int32)


def run(topk, positions, requests, is_token, *, k=0, ratio=0, block=1, window=4, window_block=2, table=TABLE):
    tokens = len(positions)
    compressed, recent = torch.full((tokens, k), 77), torch.full((tokens, window), 77)
    fill_decode_slots_(
        compressed,
        recent,
        topk,
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(requests, dtype=torch.int32),
        torch.tensor(is_token, dtype=torch.bool),
        table if k else None,
        table,
        compress_ratio=ratio,
        compressed_block_size=block,
        window_block_size=window_block,
    )
    return compressed.tolist(), recent.tolist()


def slots(entries, request, block, width):
    found = [int(TABLE[request, entry // block]) * block + entry % block for entry in entries]
    return found + [-1] * (width - len(found))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 1), st.booleans()), max_size=5), st.data())
def test_equals_the_oracle(tokens, data):
    positions, requests, alive = ([t[i] for t in tokens] for i in range(3))
    block, window_block = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([2, 3, 5]))
    k = data.draw(st.integers(1, 4))
    chosen = [data.draw(st.lists(st.integers(0, 5), max_size=k, unique=True).map(sorted)) for _ in tokens]
    topk = torch.tensor([c + [-1] * (k - len(c)) for c in chosen], dtype=torch.int32).reshape(len(tokens), k)
    got = run(topk, positions, requests, alive, k=k, ratio=4, block=block, window_block=window_block)
    for i, position in enumerate(positions):
        recent = range(max(0, position - 3), position + 1)
        assert got[0][i] == slots(chosen[i] if alive[i] else [], requests[i], block, k)
        assert got[1][i] == slots(recent if alive[i] else [], requests[i], window_block, 4)


def test_without_a_selection_every_complete_group_is_listed():
    compressed, _ = run(None, [0, 126, 127, 383], [0, 1, 0, 1], [True] * 4, k=4, ratio=128, block=2, window_block=128)
    assert compressed == [slots(range(n), r, 2, 4) for n, r in ((0, 0), (0, 1), (1, 0), (3, 1))]


def test_padding_tokens_get_nothing_whatever_they_hold():
    topk = torch.tensor([[5, 9999]], dtype=torch.int32)
    got = run(topk, [10**9], [12345], [False], k=2, ratio=4, block=2)
    assert got == ([[-1, -1]], [[-1] * 4])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"window": 3}, "window_slots: expected a power of two"),
        ({"ratio": 0}, "compressed_slots: expected no columns"),
        ({"ratio": 5}, "compress_ratio"),
        ({"block": 0}, "compressed_block_size"),
        ({"window_block": 0}, "window_block_size"),
        ({"table": TABLE.long()}, "window_table"),
        ({"topk": torch.zeros((1, 3), dtype=torch.int32)}, "topk_indices"),
    ],
    ids=str,
)
def test_bad_input_is_refused(change, match):
    topk = change.pop("topk", torch.zeros((1, 2), dtype=torch.int32))
    with pytest.raises(ArgumentError, match=match):
        run(topk, [3], [0], [True], **({"k": 2, "ratio": 4} | change))


def test_entries_need_a_table():
    outputs = torch.zeros((1, 2), dtype=torch.int64), torch.zeros((1, 4), dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="compressed_table: expected a block table"):
        fill_decode_slots_(
            *outputs, None, one, one.int(), one.bool(), None, TABLE,
            compress_ratio=4, compressed_block_size=2, window_block_size=2,
        )  # fmt: skip
