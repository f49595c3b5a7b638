"""Chunks of one request each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bi_kernels import ArgumentError
from bi_sparse_attn import Chunk, plan_prefill_chunks

LENGTHS = st.lists(st.integers(0, 50), max_size=8)


def plan_by_area(query_lens: list[int], *, chunk_tokens: int) -> list[Chunk]:
    """Batch-dependent on purpose: chunks share one budget, so a request's first chunk takes what is left of it."""
    chunks, left = [], chunk_tokens
    for request, length in enumerate(query_lens):
        start = 0
        while start < length:
            stop = min(start + left, length)
            chunks.append(Chunk(request, start, stop))
            left = left - (stop - start) or chunk_tokens
            start = stop
    return chunks


def neighbours_matter(plan: object, query_lens: list[int], chunk_tokens: int) -> bool:
    together = plan(query_lens, chunk_tokens=chunk_tokens)  # type: ignore[operator]
    alone = [
        [chunk._replace(request=request) for chunk in plan([length], chunk_tokens=chunk_tokens)]  # type: ignore[operator]
        for request, length in enumerate(query_lens)
    ]
    return together != [chunk for chunks in alone for chunk in chunks]


@given(LENGTHS, st.integers(1, 20))
def test_chunks_cover_every_request_in_order_and_ignore_neighbours(query_lens: list[int], chunk_tokens: int) -> None:
    chunks = plan_prefill_chunks(query_lens, chunk_tokens=chunk_tokens)
    tokens = [(c.request, token) for c in chunks for token in range(c.start, c.stop)]
    assert tokens == [(request, token) for request, length in enumerate(query_lens) for token in range(length)]
    assert all(0 < c.stop - c.start <= chunk_tokens for c in chunks)
    assert not neighbours_matter(plan_prefill_chunks, query_lens, chunk_tokens)


def test_the_check_sees_a_plan_that_fills_a_shared_area() -> None:
    assert neighbours_matter(plan_by_area, [7, 20], 8)


def test_example() -> None:
    assert plan_prefill_chunks([5, 0, 8, 9], chunk_tokens=4) == [
        Chunk(0, 0, 4), Chunk(0, 4, 5), Chunk(2, 0, 4), Chunk(2, 4, 8), Chunk(3, 0, 4), Chunk(3, 4, 8), Chunk(3, 8, 9),
    ]  # fmt: skip


def test_no_requests() -> None:
    assert plan_prefill_chunks([], chunk_tokens=4) == []


@pytest.mark.parametrize(("query_lens", "chunk_tokens"), [([3], 0), ([3], -1), ([3, -1], 4)])
def test_bad_input_is_refused(query_lens: list[int], chunk_tokens: int) -> None:
    with pytest.raises(ArgumentError, match="expected"):
        plan_prefill_chunks(query_lens, chunk_tokens=chunk_tokens)
