"""The fuzz targets on what hypothesis makes of bytes: random ones, and damaged copies of good files.

``nox -s fuzz`` runs the same targets for longer, guided by coverage.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.targets import SEEDS, TARGETS

KEYS = st.sampled_from(
    [
        "format", "requests", "ops", "values", "contradictions", "plan", "tensors", "targets", "digest", "failures",
        "schedules", "tokens_compared", "version", "archs", "torch_target", "file", "fingerprint", "a", "b", "shape",
    ]
)  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=2100))
def test_any_bytes(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000], ids=["empty", "[", "{", "1"])
def test_bytes_that_parsers_dislike(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("name", SEEDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_copies(name: str, data: st.DataObject) -> None:
    good = SEEDS[name]()
    TARGETS[name](good)
    at = data.draw(st.integers(0, len(good) - 1))
    length = data.draw(st.integers(0, 4))
    TARGETS[name](good[:at] + data.draw(st.binary(max_size=4)) + good[at + length :])


@pytest.mark.parametrize("name", sorted(SEEDS.keys() - {"bucket", "checkpoint_shard"}))
@settings(max_examples=40, deadline=None)
@given(
    document=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
        max_leaves=12,
    )
)
def test_other_documents(name: str, document: object) -> None:
    TARGETS[name](json.dumps(document).encode())
