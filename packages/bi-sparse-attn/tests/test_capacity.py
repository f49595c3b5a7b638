"""Sizes from the model's limits."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from bi_kernels import ArgumentError
from bi_sparse_attn import SparseCapacity

LIMITS = {"max_model_len": 1_048_576, "window_size": 128, "index_topk": 512, "max_num_batched_tokens": 8192}


@pytest.mark.parametrize(
    ("ratio", "topk_width", "combined_width", "compressed_rows"),
    [(0, 0, 128, 0), (1, 0, 128, 0), (4, 512, 640, 262_144), (128, 8192, 8320, 8192)],
)
def test_sizes_of_a_real_deployment(ratio: int, topk_width: int, combined_width: int, compressed_rows: int) -> None:
    capacity = SparseCapacity.from_model(compress_ratio=ratio, **LIMITS)
    assert capacity.topk_width == topk_width
    assert capacity.c128_width == 8192
    assert capacity.combined_width == combined_width
    assert capacity.compressed_rows == compressed_rows
    assert capacity.gather_rows == 128 + 8192
    assert capacity.workspace_rows == compressed_rows + 128 + 8192


@pytest.mark.parametrize(
    ("ratio", "max_model_len", "slice_tokens", "requests"),
    [
        (0, 1_048_576, 128, 63),
        (4, 1_048_576, 128, 1),
        (128, 1_048_576, 48, 31),
        (4, 131_072, 128, 12),
        (0, 1024, 128, 63),
    ],
)
def test_what_is_gathered_at_once_is_bounded(ratio: int, max_model_len: int, slice_tokens: int, requests: int) -> None:
    capacity = SparseCapacity.from_model(**(LIMITS | {"max_model_len": max_model_len}), compress_ratio=ratio)
    assert capacity.decode_slice_tokens == slice_tokens
    assert capacity.prefill_requests == requests
    assert capacity.decode_slice_tokens * capacity.combined_width <= 2**19
    assert capacity.prefill_requests * capacity.workspace_rows <= 2**19


@pytest.mark.parametrize(("max_model_len", "width"), [(1, 128), (16_384, 128), (16_385, 256), (40_000, 384)])
def test_c128_width_rounds_up_twice(max_model_len: int, width: int) -> None:
    capacity = SparseCapacity.from_model(**(LIMITS | {"max_model_len": max_model_len}), compress_ratio=128)
    assert capacity.c128_width == width
    assert capacity.compressed_rows == -(-max_model_len // 128)


def test_nothing_of_a_batch_can_enter() -> None:
    """Invariance as a property of the signature."""
    parameters = set(inspect.signature(SparseCapacity.from_model).parameters)
    assert parameters == {*LIMITS, "compress_ratio"}
    public = {name for name in vars(SparseCapacity) if not name.startswith("_")} - {*LIMITS, "compress_ratio"}
    assert {n for n in public if not isinstance(vars(SparseCapacity)[n], property)} == {"from_model"}


def test_it_is_frozen() -> None:
    capacity = SparseCapacity.from_model(compress_ratio=4, **LIMITS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        capacity.index_topk = 7  # type: ignore[misc]


@pytest.mark.parametrize("change", [{"compress_ratio": 8}, *({name: 0} for name in LIMITS)], ids=str)
def test_bad_limits_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(change))):
        SparseCapacity.from_model(**({"compress_ratio": 4} | LIMITS | change))
