"""Index lists against a plain-Python oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_kernels import ArgumentError, CapacityError
from bi_kernels.testing import assert_bitwise_equal
from bi_sparse_attn import SparseCapacity, c128_indices, combine_topk_swa


def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def padded(entries: list[int], width: int) -> list[int]:
    return entries + [-1] * (width - len(entries))


def oracle(entries: list[int], position: int, gather_start: int, window: int, rows: int, offset: int) -> list[int]:
    if position < 0:
        return []
    positions = range(max(0, position - window + 1), position + 1)
    return [offset + entry for entry in entries] + [offset + rows + p - gather_start for p in positions]


@st.composite
def tokens(draw: st.DrawFn, ratio: int, window: int, k: int, rows: int) -> tuple[list[int], int, int]:
    position = draw(st.integers(-1, ratio * rows))
    visible = range(min((position + 1) // ratio, rows)) if ratio > 1 else range(0)
    entries = sorted(draw(st.permutations(visible))[: draw(st.integers(0, k))])
    return entries, position, draw(st.integers(0, max(0, position - window + 1)))


@settings(max_examples=60)
@given(st.data(), st.sampled_from([0, 4, 128]), st.sampled_from([1, 8, 128]), st.integers(0, 6), st.integers(0, 1000))
def test_equals_the_oracle(data: st.DataObject, ratio: int, window: int, k: int, offset: int) -> None:
    batch = data.draw(st.lists(tokens(ratio, window, k, 12), max_size=5))
    indices, lengths = combine_topk_swa(
        ints([padded(entries, k) for entries, _, _ in batch]).reshape(len(batch), k),
        ints([position for _, position, _ in batch], torch.int64),
        ints([start for _, _, start in batch]),
        compress_ratio=ratio,
        window_size=window,
        compressed_rows=12,
        row_offset=offset,
    )
    expected = [oracle(*token, window, 12, offset) for token in batch]
    assert lengths.tolist() == [len(row) for row in expected]
    assert indices.tolist() == [padded(row, -(-(k + window) // 128) * 128) for row in expected]


def test_row_offsets_by_token_equal_one_call_for_each() -> None:
    topk, positions, starts = ints([[0, 4], [1, -1], [-1, -1]]), ints([700, 40, 3]), ints([500, 0, 0])
    constants = {"compress_ratio": 4, "window_size": 8, "compressed_rows": 200}
    offsets = ints([5000, 0, 9000], torch.int64)
    together = combine_topk_swa(topk, positions, starts, row_offset=offsets, **constants)
    for i, offset in enumerate(offsets.tolist()):
        one = slice(i, i + 1)
        alone = combine_topk_swa(topk[one], positions[one], starts[one], row_offset=offset, **constants)
        for got, want in zip(together, alone, strict=True):
            assert_bitwise_equal(got[one], want)
    with pytest.raises(ArgumentError, match="row_offset"):
        combine_topk_swa(topk, positions, starts, row_offset=offsets[:2], **constants)


def test_b39_order_of_decode_and_prefill_tokens_does_not_matter() -> None:
    """Requests of 1, 17 and 1 tokens in one call: every token's lists equal those of its solo run."""
    generator = torch.Generator().manual_seed(39)
    positions = [900, *range(300, 317), 41]
    gather_starts = [900 - 127] + [300 - 127] * 17 + [0]
    entries = [sorted(torch.randperm((p + 1) // 4, generator=generator)[:64].tolist()) for p in positions]
    topk = ints([padded(row, 64) for row in entries])
    constants = {"compress_ratio": 4, "window_size": 128, "compressed_rows": 256, "row_offset": 5}
    indices, lengths = combine_topk_swa(topk, ints(positions), ints(gather_starts), **constants)
    c128 = c128_indices(ints(positions), width=128)
    swa, swa_lengths = combine_topk_swa(topk[:, :0], ints(positions), ints(gather_starts), **constants)
    for t in range(len(positions)):
        one = slice(t, t + 1)
        solo = (ints(positions[one]), ints(gather_starts[one]))
        for got, want in (
            ((indices[one], lengths[one]), combine_topk_swa(topk[one], *solo, **constants)),
            ((swa[one], swa_lengths[one]), combine_topk_swa(topk[one, :0], *solo, **constants)),
            ((c128[one],), (c128_indices(solo[0], width=128),)),
        ):
            for a, b in zip(got, want, strict=True):
                assert_bitwise_equal(a, b, f"token {t}")


def test_padding_tokens_are_empty_whatever_their_row_holds() -> None:
    stale = ints([[5, 3, -1, 9], [0, 1, -1, -1]])
    constants = {"compress_ratio": 4, "window_size": 4, "compressed_rows": 8}
    indices, lengths = combine_topk_swa(stale, ints([-1, 9]), ints([0, 6]), **constants)
    assert lengths.tolist() == [0, 6]
    assert indices[0].tolist() == [-1] * 128
    assert indices[1, :7].tolist() == [0, 1, 8, 9, 10, 11, -1]


def test_wider_outputs_are_filled_and_returned() -> None:
    out_indices, out_lengths = torch.full((1, 300), 7, dtype=torch.int32), torch.full((1,), 7, dtype=torch.int32)
    constants = {"compress_ratio": 4, "window_size": 2, "compressed_rows": 3}
    got = combine_topk_swa(
        ints([[0, -1]]), ints([5]), ints([4]), out_indices=out_indices, out_lengths=out_lengths, **constants
    )
    assert got[0] is out_indices
    assert got[1] is out_lengths
    assert out_indices.tolist() == [padded([0, 3, 4], 300)]
    assert out_lengths.tolist() == [3]


def test_rows_fit_the_capacity_of_the_longest_request() -> None:
    capacity = SparseCapacity.from_model(
        max_model_len=500, compress_ratio=4, window_size=128, index_topk=64, max_num_batched_tokens=32
    )
    positions = torch.arange(468, 500)
    entries = torch.arange(53, 117, dtype=torch.int32).expand(32, 64)
    indices, lengths = combine_topk_swa(
        entries,
        positions,
        torch.full((32,), 468 - 127),
        compress_ratio=4,
        window_size=128,
        compressed_rows=capacity.compressed_rows,
    )
    assert indices.shape == (32, capacity.combined_width)
    assert int(indices.max()) < capacity.workspace_rows
    assert lengths.tolist() == [192] * 32


def test_empty_batch() -> None:
    indices, lengths = combine_topk_swa(
        torch.empty(0, 4, dtype=torch.int32), ints([]), ints([]), compress_ratio=4, window_size=128, compressed_rows=1
    )
    assert indices.shape == (0, 256)
    assert lengths.shape == (0,)
    assert c128_indices(ints([]), width=128).shape == (0, 128)


def test_c128_lists_every_complete_group() -> None:
    positions = [-1, 0, 126, 127, 128, 255, 383, 500]
    out = torch.full((8, 5), 7, dtype=torch.int32)
    got = c128_indices(ints(positions), width=5, out=out)
    assert got is out
    assert got.tolist() == [padded(list(range((p + 1) // 128)), 5) for p in positions]
    assert_bitwise_equal(c128_indices(ints(positions, torch.int64), width=5), got)


def bad_inputs() -> dict[str, dict[str, object]]:
    return {
        "topk dtype": {"topk_indices": ints([[0, 1, -1, -1]] * 2, torch.int64)},
        "topk shape": {"topk_indices": ints([0, 1])},
        "positions dtype": {"positions": torch.tensor([9.0, 20.0])},
        "positions shape": {"positions": ints([9])},
        "gather_starts shape": {"gather_starts": ints([0, 0, 0])},
        "gather_starts device": {"gather_starts": torch.zeros(2, dtype=torch.int32, device="meta")},
        "gather_starts after the window": {"gather_starts": ints([0, 18])},
        "ratio": {"compress_ratio": 3},
        "window": {"window_size": 0},
        "compressed_rows": {"compressed_rows": -1},
        "row_offset": {"row_offset": -1},
        "unsorted entries": {"topk_indices": ints([[0, 1, -1, -1], [3, 1, -1, -1]])},
        "repeated entries": {"topk_indices": ints([[0, 1, -1, -1], [1, 1, -1, -1]])},
        "hole": {"topk_indices": ints([[0, 1, -1, -1], [0, -1, 1, -1]])},
        "entry below -1": {"topk_indices": ints([[0, 1, -1, -1], [0, 1, 2, -2]])},
        "entry in the future": {"topk_indices": ints([[0, 2, -1, -1], [0, 1, -1, -1]])},
        "entry past compressed_rows": {"topk_indices": ints([[0, 1, -1, -1], [0, 4, -1, -1]]), "compressed_rows": 4},
        "out_indices narrow": {"out_indices": torch.full((2, 7), 7, dtype=torch.int32)},
        "out_indices dtype": {"out_indices": torch.full((2, 8), 7, dtype=torch.int64)},
        "out_indices overlaps": {"out_indices": torch.full((1, 8), 7, dtype=torch.int32).expand(2, 8)},
        "out_lengths shape": {"out_lengths": torch.full((3,), 7, dtype=torch.int32)},
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input_is_refused_and_nothing_is_written(case: str) -> None:
    arguments: dict[str, object] = {
        "topk_indices": ints([[0, 1, -1, -1]] * 2),
        "positions": ints([9, 20]),
        "gather_starts": ints([0, 0]),
        "compress_ratio": 4,
        "window_size": 4,
        "compressed_rows": 8,
        "out_indices": torch.full((2, 8), 7, dtype=torch.int32),
        "out_lengths": torch.full((2,), 7, dtype=torch.int32),
    } | bad_inputs()[case]
    with pytest.raises(ArgumentError, match=r"expected .* got"):
        combine_topk_swa(**arguments)  # type: ignore[arg-type]
    assert bool((arguments["out_indices"] == 7).all())  # type: ignore[attr-defined]
    assert bool((arguments["out_lengths"] == 7).all())  # type: ignore[attr-defined]


def test_c128_refuses_what_does_not_fit() -> None:
    out = torch.full((2, 2), 7, dtype=torch.int32)
    with pytest.raises(CapacityError, match=r"at most 2 .* got 3"):
        c128_indices(ints([0, 383]), width=2, out=out)
    for positions, width in ((torch.zeros(2), 2), (ints([[0, 1]]), 2), (ints([0, 1]), -1), (ints([0, 1]), 3)):
        with pytest.raises(ArgumentError, match="expected"):
            c128_indices(positions, width=width, out=out)
    assert out.tolist() == [[7, 7]] * 2
