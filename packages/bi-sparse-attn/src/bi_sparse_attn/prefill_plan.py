"""Prefill chunks: one request each, of sizes that no neighbour can change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bi_kernels.runtime.checks import check_value

__all__ = ["Chunk", "plan_prefill_chunks"]


class Chunk(NamedTuple):
    """A run of one request's new tokens.

    Attributes:
        request: The request's place in the batch.
        start: First token of the chunk, counted from the request's first new token.
        stop: One past the last.
    """

    request: int
    start: int
    stop: int


def plan_prefill_chunks(query_lens: Sequence[int], *, chunk_tokens: int) -> list[Chunk]:
    """Cut every request's new tokens into chunks of ``chunk_tokens``, the last one shorter.

    Source: the ``get_prefill_chunk_plan`` of vLLM's DeepSeek-V4 sliding-window metadata, which fills a batch-local area
    with several requests; here no chunk ever holds two.

    Args:
        query_lens: New tokens per request, in batch order. Empty requests get no chunk.
        chunk_tokens: Most tokens in one chunk; a constant of the deployment.

    Returns:
        The chunks in batch order, each request's in token order.

    Raises:
        ArgumentError: ``chunk_tokens`` is not positive or a length is negative.

    Invariance:
        ``(start, stop)`` of a request's chunks depend on its own length and ``chunk_tokens`` alone.
    """
    check_value("chunk_tokens", chunk_tokens > 0, "a positive int", chunk_tokens, "Pass the deployment's chunk size.")
    for request, length in enumerate(query_lens):
        check_value(
            f"query_lens[{request}]", length >= 0, "a length of at least 0", length, "Pass new tokens per request."
        )
    return [
        Chunk(request, start, min(start + chunk_tokens, length))
        for request, length in enumerate(query_lens)
        for start in range(0, length, chunk_tokens)
    ]
