"""The compiled selector equals the reference bit for bit, however it splits its rows. Needs a GPU.

The reference runs on CUDA tensors here, so that a million rows take seconds; the first test shows that its bits there
are those of the CPU.
"""

from __future__ import annotations

import math

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect
from bi_sparse_attn import top_k_per_row_prefill
from bi_sparse_attn._ops import _OPS
from bi_sparse_attn.reference import top_k_per_row as reference

pytestmark = pytest.mark.gpu

# Rows of the kinds that take another way through the kernel: scores that a list of candidates holds, plateaus that it
# does not hold, all keys in one bin, every bit pattern.
KINDS = ("normal", "levels", "relu", "constant", "nan", "mostly nan", "ascending", "descending", "bits", "one bin")
LENGTHS = (1, 5, 100, 511, 512, 513, 1000, 4096, 4097, 8191, 8192, 8193, 12000, 16384, 16385, 32768, 65539, 131072)


def scores(kind: str, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    shape = (rows, columns)

    def rand() -> torch.Tensor:
        return torch.rand(shape, device="cuda", generator=generator)

    def randn() -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device="cuda", generator=generator)

    match kind:
        case "normal":
            return randn() * 2.0 ** integers(-20, 20)[:, :1]
        case "levels":
            return integers(0, 8).float()
        case "relu":  # both zeros, and few others
            return torch.where(rand() < 0.05, randn(), torch.where(rand() < 0.5, 0.0, -0.0))
        case "constant":
            return torch.full(shape, -3.5, device="cuda")
        case "nan":
            return torch.where(rand() < 0.3, math.nan, randn())
        case "mostly nan":
            return torch.where(rand() < 0.99, math.nan, randn())
        case "ascending":
            return torch.arange(columns, device="cuda").float().expand(shape).contiguous()
        case "descending":
            return -torch.arange(columns, device="cuda").float().expand(shape).contiguous()
        case "bits":
            return integers(-(2**31), 2**31).int().view(torch.float32)
        case "one bin":  # the first digit of all keys is the same, then the second
            return (integers(0, 2**20) + 0x3F800000).int().view(torch.float32)
    raise ValueError(kind)


def mixed(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Rows of every kind, one after the other."""
    generator = torch.Generator("cuda").manual_seed(seed)
    each = -(-rows // len(KINDS))
    parts = torch.stack([scores(kind, each, columns, generator) for kind in KINDS], 1)
    return parts.flatten(0, 1)[:rows].contiguous()


def ranges(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of the rows whole, the others from anywhere to anywhere; some of those are empty."""
    generator = torch.Generator("cuda").manual_seed(seed)
    bounds = torch.randint(0, columns + 1, (2, rows), device="cuda", generator=generator, dtype=torch.int32)
    whole = torch.rand(rows, device="cuda", generator=generator) < 0.5
    return torch.where(whole, 0, bounds[0]), torch.where(whole, columns, bounds[1])


def full(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    return starts, torch.full_like(starts, logits.shape[1])


def check(
    logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, top_k: int, label: str = "", extra: int = 0
) -> None:
    out = torch.full((len(logits), top_k + extra), 77, dtype=torch.int32, device="cuda")
    want = torch.full_like(out, 78)
    top_k_per_row_prefill(logits, starts, ends, top_k, out=out)
    reference.top_k_per_row_prefill(logits, starts, ends, top_k, out=want)
    assert_bitwise_equal(out, want, label)


def test_the_reference_has_the_same_bits_on_both_devices() -> None:
    logits = mixed(40, 3000, seed=1)
    starts, ends = ranges(40, 3000, seed=2)
    there = reference.top_k_per_row_prefill(logits, starts, ends, 512)
    here = reference.top_k_per_row_prefill(logits.cpu(), starts.cpu(), ends.cpu(), 512)
    assert_bitwise_equal(there.cpu(), here)


# One number of rows for each split: a cluster of 8, 4 and 2 blocks, and one block where the row allows.
@pytest.mark.parametrize("rows", [10, 33, 50, 200], ids=lambda n: f"rows={n}")
@pytest.mark.parametrize("top_k", [1, 512, 2048, 3000], ids=lambda k: f"k={k}")
def test_every_length_and_split(rows: int, top_k: int) -> None:
    for columns in LENGTHS:
        logits = mixed(rows, columns, seed=columns)
        check(logits, *ranges(rows, columns, seed=columns + rows), top_k, f"columns={columns}", extra=columns % 3)


@pytest.mark.parametrize(
    ("rows", "columns", "top_k"),
    [(1_000, 7, 3), (500_000, 64, 16), (400_000, 640, 512), (60_000, 3000, 512), (30_000, 5000, 512),
     (10_000, 10_000, 2048), (4_000, 20_000, 512)],
    ids=str,
)  # fmt: skip
def test_a_million_rows(rows: int, columns: int, top_k: int) -> None:
    part = min(rows, 2**26 // columns)
    for seed, first in enumerate(range(0, rows, part)):
        count = min(part, rows - first)
        logits = mixed(count, columns, seed)
        check(logits, *ranges(count, columns, seed + 1), top_k, f"rows from {first}")


@pytest.mark.parametrize("columns", [262_144, 400_003, 1_000_000], ids=lambda c: f"columns={c}")
@pytest.mark.parametrize("top_k", [512, 2048, 100_000], ids=lambda k: f"k={k}")
def test_rows_that_do_not_fit_on_chip(columns: int, top_k: int) -> None:
    logits = mixed(len(KINDS), columns, seed=columns)
    check(logits, *full(logits), top_k)
    check(logits, *ranges(len(KINDS), columns, seed=1), top_k)


def test_one_row_of_a_million_columns() -> None:
    for kind in KINDS:
        logits = scores(kind, 1, 1_000_000, torch.Generator("cuda").manual_seed(4))
        check(logits, *full(logits), 2048, kind)


@pytest.mark.parametrize("columns", [100, 4095, 6001, 20_003])
def test_strides_and_alignment_do_not_matter(columns: int) -> None:
    logits = mixed(20, columns + 9, seed=columns)
    starts, ends = ranges(20, columns, seed=5)
    for offset in range(5):
        view = logits[:, offset : offset + columns]
        check(view, starts, ends, 512, f"offset {offset}")
    check(view.T.contiguous().T, starts, ends, 512, "column major")
    check(logits[::2, 1::2], starts[:10] // 2, ends[:10] // 2, 512, "every other row and column")
    wide = torch.stack([starts, ends], 1)
    check(view, wide[:, 0], wide[:, 1], 512, "strided ranges")


def test_out_may_have_any_strides_and_nothing_else_is_written() -> None:
    logits = mixed(20, 5000, seed=6)
    starts, ends = ranges(20, 5000, seed=7)
    want = reference.top_k_per_row_prefill(logits, starts, ends, 100)
    memory = torch.full((22, 310), 77, dtype=torch.int32, device="cuda")
    out = memory[1:21, 3:303:3]
    assert top_k_per_row_prefill(logits, starts, ends, 100, out=out) is out
    assert_bitwise_equal(out.contiguous(), want)
    out.fill_(77)
    assert bool((memory == 77).all())
    turned = torch.full((100, 20), 77, dtype=torch.int32, device="cuda").T
    assert_bitwise_equal(top_k_per_row_prefill(logits, starts, ends, 100, out=turned).contiguous(), want)


def test_the_place_of_a_range_does_not_matter() -> None:
    values = mixed(10, 9000, seed=8)
    want = top_k_per_row_prefill(values, *full(values), 512)
    for offset, width in ((0, 9000), (1, 20_000), (513, 9513), (70_002, 131_072)):
        logits = torch.full((10, width), math.inf, device="cuda")
        logits[:, offset : offset + 9000] = values
        starts = torch.full((10,), offset, dtype=torch.int32, device="cuda")
        assert_bitwise_equal(top_k_per_row_prefill(logits, starts, starts + 9000, 512), want, f"offset={offset}")


@pytest.mark.parametrize(("rows", "columns", "top_k"), [(0, 8, 4), (3, 0, 4), (3, 8, 0), (0, 0, 0), (300, 8, 20)])
def test_empty_batches_and_rows(rows: int, columns: int, top_k: int) -> None:
    logits = torch.zeros(rows, columns, device="cuda")
    got = top_k_per_row_prefill(logits, *full(logits), top_k)
    row = (list(range(columns)) + [-1] * top_k)[:top_k]
    assert got.tolist() == [row] * rows


# Neighbours bring the batch from 8 blocks per row to one, and the rows are of kinds that need each way.
BATCHES = (1, 2, 3, 16, 17, 33, 65, 129, 133, 257)


def invariance_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.cat([scores(k, 1, 9000, torch.Generator("cuda").manual_seed(9)) for k in ("normal", "relu", "nan")])
    starts = torch.tensor([0, 5, 100], dtype=torch.int32, device="cuda")
    return logits, starts, torch.tensor([9000, 8999, 9000], dtype=torch.int32, device="cuda")


def select(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return top_k_per_row_prefill(logits, starts, ends, 512)


def select_ties_by_row_count(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Two selectors, each correct up to ties, chosen by the number of rows: what stock dispatch does."""
    if len(logits) <= 32:
        return select(logits, starts, ends)
    columns = logits.shape[1]
    found = top_k_per_row_prefill(logits.flip(1), columns - ends, columns - starts, 512)
    return torch.where(found >= 0, (ends - starts).unsqueeze(1) - 1 - found, -1)


def select_in_order_of_score(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The right set in ``torch.topk``'s order, for large batches."""
    if len(logits) <= 32:
        return select(logits, starts, ends)
    column = torch.arange(logits.shape[1], device="cuda")
    allowed = (column >= starts.unsqueeze(1)) & (column < ends.unsqueeze(1)) & ~torch.isnan(logits)
    return torch.topk(torch.where(allowed, logits, -math.inf), 512, dim=1).indices.int() - starts.unsqueeze(1)


def test_batch_invariance() -> None:
    assert_batch_invariant(select, invariance_rows(), batch_sizes=BATCHES)


@pytest.mark.parametrize("twin", [select_ties_by_row_count, select_in_order_of_score])
def test_the_driver_sees_a_selector_chosen_by_row_count(twin: object) -> None:
    assert must_detect(twin, invariance_rows(), batch_sizes=BATCHES).batch_size > 32  # type: ignore[arg-type]


def test_every_call_gives_the_same_bits() -> None:
    for rows, columns in ((3, 131_072), (70, 20_000), (300, 6000)):
        logits = mixed(rows, columns, seed=10)
        bounds = ranges(rows, columns, seed=11)
        first = top_k_per_row_prefill(logits, *bounds, 512)
        for _ in range(20):
            assert_bitwise_equal(top_k_per_row_prefill(logits, *bounds, 512), first)


@pytest.mark.parametrize(("rows", "columns"), [(1, 131_072), (8, 40_000), (200, 8192)], ids=str)
def test_graphs_replay_on_new_data(rows: int, columns: int) -> None:
    logits, (starts, ends) = mixed(rows, columns, seed=12), ranges(rows, columns, seed=13)
    out = torch.empty(rows, 512, dtype=torch.int32, device="cuda")
    top_k_per_row_prefill(logits, starts, ends, 512, out=out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        top_k_per_row_prefill(logits, starts, ends, 512, out=out)
    for seed in (14, 15, 16):
        logits.copy_(mixed(rows, columns, seed))
        for buffer, values in zip((starts, ends), ranges(rows, columns, seed), strict=True):
            buffer.copy_(values)
        out.fill_(77)
        graph.replay()
        assert_bitwise_equal(out, reference.top_k_per_row_prefill(logits, starts, ends, 512), f"seed {seed}")


def test_opcheck() -> None:
    logits = mixed(4, 100, seed=17)
    arguments = (logits, *full(logits), torch.zeros(4, 16, dtype=torch.int32, device="cuda"), 16)
    torch.library.opcheck(_OPS["top_k_per_row_prefill"], arguments, test_utils=("test_schema", "test_faketensor"))


def test_bad_input_is_refused_and_nothing_is_written() -> None:
    logits = torch.zeros(2, 8, device="cuda")
    starts, ends = full(logits)
    out = torch.full((2, 4), 7, dtype=torch.int32, device="cuda")
    op = _OPS["top_k_per_row_prefill"]
    for bad in (
        (logits.double(), starts, ends, out, 4),
        (logits, starts.long(), ends, out, 4),
        (logits, starts, ends[:1], out, 4),
        (logits, starts, ends, out, 5),
        (logits, starts, ends, out, -1),
        (logits, starts, ends, out[:1], 4),
    ):
        with pytest.raises(RuntimeError, match="expected"):
            op(*bad)
    with pytest.raises(ArgumentError, match="row_ends: expected device"):
        top_k_per_row_prefill(logits, starts, ends.cpu(), 4, out=out)
    assert bool((out == 7).all())
