"""The selector against a plain-Python oracle, and the reported bugs (B numbers) as tests."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_bitwise_equal, num_threads
from bi_sparse_attn import fill_row_ranges_, top_k_per_row_prefill
from bi_sparse_attn.reference import top_k_per_row as reference

NAN, INF = math.nan, math.inf


def oracle(row: list[float], start: int, end: int, top_k: int) -> list[int]:
    """Python's floats compare +0.0 and -0.0 equal, and sorted() is stable: exactly the total order."""
    candidates = [column for column in range(start, end) if not math.isnan(row[column])]
    best = sorted(candidates, key=lambda column: -row[column])[:top_k]
    return [column - start for column in sorted(best)] + [-1] * (top_k - len(best))


def select(rows: list[list[float]], starts: list[int], ends: list[int], top_k: int) -> list[list[int]]:
    logits = torch.tensor(rows, dtype=torch.float32).reshape(len(starts), -1)
    return top_k_per_row_prefill(logits, ints(starts), ints(ends), top_k).tolist()


def ints(values: list[int] | range) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def full_range(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    return torch.zeros(rows, dtype=torch.int32), torch.full((rows,), columns, dtype=torch.int32)


def levels(rows: int, columns: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count, (rows, columns), generator=generator).float()


TINY = struct.unpack("<f", struct.pack("<I", 1))[0]
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, TINY, -TINY, INF, -INF, NAN, 3.4028234663852886e38]),
    st.floats(width=32),
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[int], int]:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(0, 24))
    cell = st.sampled_from([0.0, -0.0, 1.0, NAN]) if draw(st.booleans()) else VALUES
    logits = [draw(st.lists(cell, min_size=columns, max_size=columns)) for _ in range(rows)]
    bounds = st.integers(0, columns)
    return (
        logits,
        [draw(bounds) for _ in range(rows)],
        [draw(bounds) for _ in range(rows)],
        draw(st.integers(0, 30)),
    )


@settings(max_examples=300)
@given(problems())
def test_equals_the_oracle(problem: tuple[list[list[float]], list[int], list[int], int]) -> None:
    rows, starts, ends, top_k = problem
    assert select(rows, starts, ends, top_k) == [oracle(*row, top_k) for row in zip(rows, starts, ends, strict=True)]


def test_plateau_of_both_zeros_is_cut_by_index() -> None:
    assert select([[-0.0, 0.0, -0.0, 0.0, 1.0, -1.0]], [0], [6], 3) == [[0, 1, 4]]


def test_minus_infinity_is_an_ordinary_lowest_score() -> None:
    assert select([[-INF, NAN, -INF, 0.0]], [0], [4], 3) == [[0, 2, 3]]


def test_every_float_in_a_row_keeps_its_order() -> None:
    """All exponents, both signs, and neighbours of each power of two, in random places."""
    exponents = torch.arange(0, 255, dtype=torch.int32) << 23
    bits = torch.cat([exponents, exponents + 1, exponents[1:] - 1]).unique()
    values = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    values = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))].unsqueeze(0)
    for top_k in (1, 7, 500, values.shape[1]):
        got = top_k_per_row_prefill(values, *full_range(values), top_k)
        assert got[0].tolist() == oracle(values[0].tolist(), 0, values.shape[1], top_k)


def test_b26_same_answer_on_both_sides_of_64_rows() -> None:
    logits = levels(65, 8192, 8, seed=26)
    many = top_k_per_row_prefill(logits, *full_range(logits), 512)
    few = top_k_per_row_prefill(logits[:64], *full_range(logits[:64]), 512)
    assert_bitwise_equal(many[:64], few)
    assert many[0].tolist() == oracle(logits[0].tolist(), 0, 8192, 512)


def test_b27_ties_at_the_kth_score_go_to_the_lowest_index() -> None:
    logits = levels(2, 32768, 16, seed=27)
    first = top_k_per_row_prefill(logits, *full_range(logits), 2048)
    assert first[0].tolist() == oracle(logits[0].tolist(), 0, 32768, 2048)
    for _ in range(10):
        assert_bitwise_equal(top_k_per_row_prefill(logits, *full_range(logits), 2048), first)


def test_b28_order_is_ascending_every_time() -> None:
    logits = torch.randperm(4096, generator=torch.Generator().manual_seed(28)).float().unsqueeze(0)
    first = top_k_per_row_prefill(logits, *full_range(logits), 512)
    assert bool((first[0, 1:] > first[0, :-1]).all())
    for _ in range(20):
        assert_bitwise_equal(top_k_per_row_prefill(logits, *full_range(logits), 512), first)


def test_b29_indices_are_relative_to_the_row_start() -> None:
    row = [9.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0, -INF, NAN]
    assert select([row], [2], [8], 3) == [[0, 1, 2]]
    assert select([row], [5], [7], 4) == [[0, 1, -1, -1]]
    starts, ends = [2, 5, 0, 8, 4, 9], [8, 7, 9, 9, 4, 2]
    assert select([row] * 6, starts, ends, 4) == [oracle(row, s, e, 4) for s, e in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("share", [0.83, 0.99, 1.0])
def test_b30_nan_is_never_selected(share: float) -> None:
    generator = torch.Generator().manual_seed(30)
    logits = torch.randn(3, 4096, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < share] = NAN
    starts, ends = ints([0, 17, 4000]), ints([4096, 4001, 4096])
    got = top_k_per_row_prefill(logits, starts, ends, 512)
    for row, start, end, indices in zip(logits.tolist(), starts.tolist(), ends.tolist(), got.tolist(), strict=True):
        assert indices == oracle(row, start, end, 512)


def test_b32_thread_count_does_not_matter() -> None:
    logits = levels(40, 3000, 5, seed=32)
    with num_threads(1):
        one = top_k_per_row_prefill(logits, *full_range(logits), 64)
    with num_threads(2):
        assert_bitwise_equal(top_k_per_row_prefill(logits, *full_range(logits), 64), one)


def test_b36_out_is_returned_and_its_storage_kept() -> None:
    logits = levels(4, 64, 3, seed=36)
    buffer = torch.full((6, 20), 77, dtype=torch.int32)
    out = buffer[1:5, :16]
    for _ in range(2):
        got = top_k_per_row_prefill(logits, *full_range(logits), 8, out=out)
        assert got is out
        assert got.data_ptr() == buffer[1:].data_ptr()
    assert_bitwise_equal(out[:, :8], top_k_per_row_prefill(logits, *full_range(logits), 8))
    assert bool((out[:, 8:] == -1).all()), "columns past top_k are filled"
    assert bool((buffer[:, 16:] == 77).all())
    assert bool((buffer[[0, 5]] == 77).all())


def test_a_million_columns() -> None:
    logits = levels(1, 1_000_000, 1000, seed=6)
    got = top_k_per_row_prefill(logits, ints([3]), ints([999_999]), 2048)
    assert got[0].tolist() == oracle(logits[0].tolist(), 3, 999_999, 2048)


@pytest.mark.parametrize("columns", [1, 5, 127, 4097])
def test_strides_do_not_matter(columns: int) -> None:
    logits = levels(5, columns + 3, 4, seed=columns)
    view = logits[:, 2 : 2 + columns]  # row stride columns + 3, start not aligned
    expected = top_k_per_row_prefill(view.contiguous(), *full_range(view), 16)
    assert_bitwise_equal(top_k_per_row_prefill(view, *full_range(view), 16), expected)
    assert_bitwise_equal(top_k_per_row_prefill(view.T.contiguous().T, *full_range(view), 16), expected)


def test_place_and_surroundings_of_a_range_do_not_matter() -> None:
    """The request's offset in a packed batch, the padded width and whatever else is in the row."""
    scores = levels(1, 300, 6, seed=1)
    expected = top_k_per_row_prefill(scores, *full_range(scores), 40)
    for offset, width in ((0, 300), (1, 512), (513, 1000), (700, 1001)):
        logits = torch.full((1, width), INF)
        logits[:, offset : offset + 300] = scores
        got = top_k_per_row_prefill(logits, ints([offset]), ints([offset + 300]), 40)
        assert_bitwise_equal(got, expected, f"offset={offset} width={width}")


def test_row_tiles_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = levels(9, 33, 3, seed=2)
    starts, ends = ints(range(9)), ints(range(33, 24, -1))
    expected = top_k_per_row_prefill(logits, starts, ends, 7)
    for elements in (1, 66, 100):
        monkeypatch.setattr(reference, "_TILE_ELEMENTS", elements)
        assert_bitwise_equal(top_k_per_row_prefill(logits, starts, ends, 7), expected)


@pytest.mark.parametrize(("rows", "columns", "top_k"), [(0, 8, 4), (3, 0, 4), (3, 8, 0), (0, 0, 0)])
def test_empty_batches_and_rows(rows: int, columns: int, top_k: int) -> None:
    logits = torch.zeros(rows, columns)
    got = top_k_per_row_prefill(logits, *full_range(logits), top_k)
    assert got.tolist() == [([0, 1, 2, 3] if columns else [-1] * 4)[:top_k]] * rows


def bad_inputs() -> dict[str, dict[str, object]]:
    return {
        "logits dtype": {"logits": torch.zeros(2, 8, dtype=torch.bfloat16)},
        "logits shape": {"logits": torch.zeros(8)},
        "starts dtype": {"row_starts": torch.zeros(2, dtype=torch.int64)},
        "starts shape": {"row_starts": ints([0])},
        "starts negative": {"row_starts": ints([0, -1])},
        "starts device": {"row_starts": torch.zeros(2, dtype=torch.int32, device="meta")},
        "ends shape": {"row_ends": ints([8, 8, 8])},
        "ends past the columns": {"row_ends": ints([8, 9])},
        "top_k negative": {"top_k": -1},
        "b37 out narrower than top_k is not resized": {"top_k": 5},
        "out dtype": {"out": torch.full((2, 4), 7, dtype=torch.int64)},
        "out overlaps": {"out": torch.full((1, 4), 7, dtype=torch.int32).expand(2, 4)},
        "out rows": {"out": torch.full((3, 4), 7, dtype=torch.int32)},
        "not a tensor": {"logits": [[1.0]]},
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input_is_refused_and_nothing_is_written(case: str) -> None:
    arguments: dict[str, object] = {
        "logits": torch.zeros(2, 8),
        "row_starts": ints([0, 0]),
        "row_ends": ints([8, 8]),
        "top_k": 4,
        "out": torch.full((2, 4), 7, dtype=torch.int32),
    } | bad_inputs()[case]
    with pytest.raises(ArgumentError, match=r"expected .* got"):
        top_k_per_row_prefill(**arguments)  # type: ignore[arg-type]
    assert bool((arguments["out"] == 7).all())  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ratio", [0, 1, 4, 128])
def test_fill_row_ranges_fills_the_whole_buffer_in_place(ratio: int, dtype: torch.dtype) -> None:
    starts, ends = torch.full((7,), 9, dtype=torch.int32), torch.full((7,), 9, dtype=torch.int32)
    positions = [0, 3, -1, 127, 1000]
    addresses = starts.data_ptr(), ends.data_ptr()
    fill_row_ranges_(starts, ends, torch.tensor(positions, dtype=dtype), compress_ratio=ratio)
    assert starts.tolist() == [0] * 7
    assert ends.tolist() == [(p + 1) // ratio if ratio > 1 and p >= 0 else 0 for p in positions] + [0, 0]
    assert (starts.data_ptr(), ends.data_ptr()) == addresses


@pytest.mark.parametrize(
    "change",
    [
        {"compress_ratio": 8},
        {"positions": torch.zeros(3, dtype=torch.int64)},
        {"positions": torch.zeros(2)},
        {"row_starts": torch.full((3,), 9, dtype=torch.int32)},
    ],
    ids=["ratio", "capacity", "dtype", "shape"],
)
def test_fill_row_ranges_refuses_bad_input(change: dict[str, object]) -> None:
    starts, ends = torch.full((2,), 9, dtype=torch.int32), torch.full((2,), 9, dtype=torch.int32)
    arguments = {"row_starts": starts, "row_ends": ends, "positions": torch.zeros(1).long(), "compress_ratio": 4}
    with pytest.raises(ArgumentError, match="expected"):
        fill_row_ranges_(**(arguments | change))  # type: ignore[arg-type]
    assert starts.tolist() == ends.tolist() == [9, 9]
