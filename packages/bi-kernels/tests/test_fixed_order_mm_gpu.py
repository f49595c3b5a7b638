"""The compiled matrix product: rows that see nothing but themselves, within the derived bound. Needs a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from bi_kernels import fixed_order_mm
from bi_kernels._ops import fixed_order_mm as op
from bi_kernels.fixed_order_mm import CUDA_K
from bi_kernels.reference.fixed_order_mm import error_bound
from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.testing import (
    assert_batch_invariant,
    assert_bitwise_equal,
    bit_view,
    few_multiprocessors,
    must_detect,
)

pytestmark = pytest.mark.gpu

# Routers, compressors, indexers; odd and even numbers of tiles of 64 and of 128 columns; vocabularies, V4's the last.
SMALL_N = (64, 128, 192, 256, 320, 384, 512, 1024, 2048)
WIDE_N = (8192, 8512, 8576, 32_768, 129_280)
by_n = pytest.mark.parametrize("n", SMALL_N, ids=lambda n: f"N={n}")
by_wide_n = pytest.mark.parametrize("n", WIDE_N, ids=lambda n: f"N={n}")
by_k = pytest.mark.parametrize("k", CUDA_K, ids=lambda k: f"K={k}")
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

# Both sides of every number of rows at which some N changes its tiles or how they are shared.
ROWS = (
    1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 48, 49, 63, 64, 65, 127, 128, 129, 192, 193, 255, 256, 257, 320, 321, 384,
    385, 511, 512, 513, 704, 705, 768, 769, 832, 833, 1023, 1024, 1025, 1408, 1409, 1664, 1665, 2047, 2048, 2049, 2112,
    2113, 2816, 2817, 3000, 4096, 4097, 4224, 4225, 8448, 8449,
)  # fmt: skip


def operands(m, n, k, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(m, k, device="cuda", generator=generator)
    weight = torch.randn(n, k, device="cuda", generator=generator)
    return x.bfloat16(), (weight / k**0.5).bfloat16()


@by_n
@by_k
def test_every_number_of_rows_gives_the_same_bits(n, k):
    x, weight = operands(9600, n, k)
    every = fixed_order_mm(x, weight)
    for m in ROWS:
        for first in (0, 1100):
            rows = x[first : first + m]
            assert_bitwise_equal(fixed_order_mm(rows, weight), every[first : first + m], f"M={m} from {first}")


@by_wide_n
@by_k
def test_every_number_of_rows_gives_the_same_bits_of_a_vocabulary(n, k):
    x, weight = operands(4200, n, k)
    every = fixed_order_mm(x, weight)
    for m in (1, 7, 8, 9, 32, 33, 64, 65, 128, 129, 1024, 1025, 4097):
        for first in (0, 100):
            got = fixed_order_mm(x[first : first + m], weight)
            assert_bitwise_equal(got, every[first : first + m], f"M={m} from {first}")


@by_k
def test_every_number_of_columns_gives_the_same_bits(k):
    x, weight = operands(1100, max(WIDE_N), k)
    for m in (1, 40, 100, 1100):
        every = fixed_order_mm(x[:m], weight)
        for n in (*SMALL_N, *WIDE_N):
            for first in (0, max(WIDE_N) - n):
                got = fixed_order_mm(x[:m], weight[first : first + n])
                assert_bitwise_equal(got, every[:, first : first + n].contiguous(), f"M={m}, N={n} from {first}")


@pytest.mark.large
@by_dtype
def test_past_two_to_the_31_elements(dtype):
    m, n = 17_000, 129_280
    x, weight = operands(m, n, 2048)
    out = torch.full((m, n), torch.nan, dtype=dtype, device="cuda")
    assert out.numel() > 1 << 31
    fixed_order_mm(x, weight, out_dtype=dtype, out=out)
    for first in (0, 8000, 16_600, m - 300):
        assert_bitwise_equal(out[first : first + 300], fixed_order_mm(x[first : first + 300], weight, out_dtype=dtype))
    assert torch.stack([rows.isnan().any() for rows in out.split(1000)]).logical_not().all()


@pytest.mark.parametrize("count", [8, 24, 100])
def test_the_number_of_multiprocessors_does_not_show(count):
    for n, k in ((64, 4096), (256, 4096), (1024, 7168), (2048, 2048), (8512, 4096), (32_768, 4096)):
        x, weight = operands(3000, n, k)
        every = {m: fixed_order_mm(x[:m], weight) for m in (1, 65, 500, 3000)}
        with few_multiprocessors(count) as found:
            few = {m: fixed_order_mm(x[:m], weight) for m in every}
        assert count <= found < torch.cuda.get_device_properties(0).multi_processor_count
        for m, expected in every.items():
            assert_bitwise_equal(few[m], expected, f"{found} multiprocessors, M={m}")


@pytest.mark.parametrize(("n", "k"), [(64, 4096), (256, 4096), (384, 7168), (2048, 2048), (32_768, 4096)], ids=str)
@by_dtype
def test_batch_invariance(n, k, dtype):
    x, weight = operands(3, n, k)
    assert_batch_invariant(lambda rows: fixed_order_mm(rows, weight, out_dtype=dtype), x)


@pytest.mark.parametrize("n", [64, 256, 8192], ids=lambda n: f"N={n}")
def test_a_split_that_follows_the_rows_is_detected(n):
    x, weight = operands(3, n, 4096)

    def dependent(rows):
        pieces = 1 if len(rows) < 32 else 4
        parts = zip(rows.float().chunk(pieces, 1), weight.float().chunk(pieces, 1), strict=True)
        return torch.stack([(a.unsqueeze(1) * b).sum(-1) for a, b in parts]).sum(0)

    must_detect(dependent, x, batch_sizes=(2, 33), neighbours=("zero",))


@by_n
@by_k
@by_dtype
def test_within_the_bound_of_float64(n, k, dtype):
    for m, seed in ((5, 1), (200, 2), (2100, 3), (9000, 4)):
        x, weight = operands(m, n, k, seed)
        got = fixed_order_mm(x, weight, out_dtype=dtype)
        error = (got.double() - x.double() @ weight.double().T).abs()
        assert (error <= error_bound(x, weight, out_dtype=dtype)).all()


@by_wide_n
@by_dtype
def test_a_vocabulary_is_within_the_bound_of_float64(n, dtype):
    for m, seed in ((1, 1), (40, 2), (100, 3), (1100, 4)):
        x, weight = operands(m, n, 4096, seed)
        got = fixed_order_mm(x, weight, out_dtype=dtype)
        for first in range(0, n, 16_384):  # the oracle takes eight bytes an element
            some = slice(first, first + 16_384)
            error = (got[:, some].double() - x.double() @ weight[some].double().T).abs()
            assert (error <= error_bound(x, weight[some], out_dtype=dtype)).all()


def test_bound_holds_where_sums_cancel_and_for_wide_ranges():
    x, weight = operands(70, 256, 4096)
    weight[:, 2048:], x[:, 2048:] = -weight[:, :2048], x[:, :2048]
    got = fixed_order_mm(x, weight)
    assert (got.double().abs() <= error_bound(x, weight)).all()
    x, weight = operands(70, 256, 4096)
    x *= 2.0 ** torch.randint(-60, 30, x.shape, device="cuda")
    error = (fixed_order_mm(x, weight).double() - x.double() @ weight.double().T).abs()
    assert (error <= error_bound(x, weight)).all()


@pytest.mark.parametrize("n", [*SMALL_N, *WIDE_N], ids=lambda n: f"N={n}")
def test_bf16_is_the_float32_result_rounded_once(n):
    for m in (3, 300, 2500):
        x, weight = operands(m, n, 4096)
        want = fixed_order_mm(x, weight).bfloat16()
        assert_bitwise_equal(fixed_order_mm(x, weight, out_dtype=torch.bfloat16), want)


@pytest.mark.parametrize("m", [4, 200, 600, 4096], ids=lambda m: f"M={m}")
def test_non_finite_stays_in_its_row(m):
    x, weight = operands(m, 512, 4096)
    clean = fixed_order_mm(x, weight)
    x[0, 5], x[1, 4095], x[2, 100], x[2, 4000] = torch.nan, torch.inf, torch.inf, torch.inf
    got = fixed_order_mm(x, weight)
    assert (bit_view(got[0]) == 0x7FC00000).all()
    assert (torch.isinf(got[1]) | torch.isnan(got[1])).all()
    assert_bitwise_equal(got[3:], clean[3:])
    bf16 = fixed_order_mm(x, weight, out_dtype=torch.bfloat16)
    assert (bit_view(bf16[0]) == 0x7FC0).all()
    assert (bit_view(fixed_order_mm(torch.zeros_like(x), -weight.abs())) == 0).all()


@by_dtype
def test_strides_and_nothing_else_is_written(dtype):
    for m in (1, 5, 300, 1500):
        x, weight = operands(m, 512, 2048)
        wide_x, wide_w = (
            torch.full((m, 2064), torch.nan, device="cuda").bfloat16(),
            torch.zeros(512, 4096, device="cuda"),
        )
        wide_x[:, 8:2056], wide_w = x, wide_w.bfloat16()
        wide_w[:, 1024:3072] = weight
        memory = torch.full((m + 2, 520), 7.0, dtype=dtype, device="cuda")
        got = fixed_order_mm(wide_x[:, 8:2056], wide_w[:, 1024:3072], out_dtype=dtype, out=memory[1 : m + 1, 4:516])
        assert got.data_ptr() == memory[1, 4:].data_ptr()
        assert_bitwise_equal(got.contiguous(), fixed_order_mm(x, weight, out_dtype=dtype))
        got.fill_(7.0)
        assert (memory == 7.0).all()


def test_no_rows():
    x, weight = operands(1, 256, 4096)
    assert fixed_order_mm(x[:0], weight).shape == (0, 256)
    torch.cuda.synchronize()


def test_every_call_gives_the_same_bits_and_graphs_replay():
    x, weight = operands(1024, 1024, 4096)
    for m in (1, 64, 200, 1024):
        out = torch.empty(m, 1024, device="cuda")
        first = fixed_order_mm(x[:m], weight)
        for _ in range(30):
            assert_bitwise_equal(fixed_order_mm(x[:m], weight), first)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            fixed_order_mm(x[:m], weight, out=out)
        for seed in (1, 2):
            x.copy_(operands(1024, 1024, 4096, seed)[0])
            out.fill_(torch.nan)
            graph.replay()
            assert_bitwise_equal(out, fixed_order_mm(x[:m], weight))


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 40, 100, 256, 512, 1024, 2048, 4096], ids=lambda m: f"M={m}")
def test_overlapping_launches_wait_for_what_they_touch(m):
    # A launch may begin before the one before it has ended. Here each reads, as x or as weight, what that one writes,
    # or overwrites what that one reads. With these numbers of rows every configuration comes before another.
    square, head = operands(1, 4096, 4096)[1], operands(1, 16_384, 4096)[1]
    x, first_weight = operands(m, 256, 4096, 1)

    def chain(between):
        a, b, v = x.clone(), torch.empty_like(x), first_weight.clone()
        c, of_head = (torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for n in (2048, 16_384))
        logits = torch.empty(3, 2, m, 256, device="cuda")
        for some in logits:
            for rows, weight, out in (
                (a, square, b),
                (a, head, of_head),
                (b, square, a),
                (first_weight, square, v),
                (a, v, some[0]),
                (square[:256], square, v),
                (b, square[:2048], c),
                (c, v[:, 2048:], some[1]),
            ):
                fixed_order_mm(rows, weight, out_dtype=out.dtype, out=out)
                between()
        return logits, of_head, a, b

    expected = chain(torch.cuda.synchronize)
    for _ in range(5):
        for got, want in zip(chain(lambda: None), expected, strict=True):
            assert_bitwise_equal(got, want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain(lambda: None)
    for _ in range(5):
        for result in results:
            result.zero_()
        graph.replay()
        for got, want in zip(results, expected, strict=True):
            assert_bitwise_equal(got, want)


def test_opcheck():
    x, weight = operands(8, 256, 2048)
    torch.library.opcheck(
        op, (x, weight, torch.empty(8, 256, device="cuda")), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("n", "k", "match"),
    [
        (288, 4096, "weight: expected N a positive multiple of 64"),
        (129_281, 4096, "weight: expected N a positive multiple of 64"),
        (0, 4096, "weight: expected N a positive multiple of 64"),
        (256, 8192, "x: expected K one of"),
    ],
    ids=str,
)
def test_other_shapes_are_refused(n, k, match):
    x, weight = operands(4, n, k)
    out = torch.full((4, n), 3.0, device="cuda")
    with pytest.raises(ArgumentError, match=match):
        fixed_order_mm(x, weight, out=out)
    with pytest.raises(RuntimeError, match="expected"):
        op(x, weight, out)
    assert (out == 3.0).all()


def test_overlapping_rows_are_refused():
    x, weight = operands(4, 256, 4096)
    with pytest.raises(ArgumentError, match="x: expected elements that do not overlap"):
        fixed_order_mm(x[:1].expand(4, -1), weight)
    with pytest.raises(ArgumentError, match="weight: expected elements that do not overlap"):
        fixed_order_mm(x, weight[:1].expand(256, -1))


def test_misaligned_rows_are_refused():
    x, weight = operands(4, 256, 4096)
    memory = torch.zeros(4, 4100, device="cuda").bfloat16()
    for tensors in ((memory[:, 1:4097], weight), (memory[:, :4096], weight)):
        with pytest.raises(ArgumentError, match="x: expected rows that start at multiples of 16 bytes"):
            fixed_order_mm(*tensors)
    with pytest.raises(ArgumentError, match="out: expected rows that start"):
        fixed_order_mm(x, weight, out=torch.zeros(4, 257, device="cuda")[:, 1:])
