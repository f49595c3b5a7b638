"""The arithmetic that the references are made of, against exact fractions and float64."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_kernels.reference import numerics
from bi_kernels.testing import assert_bitwise_equal, bit_view, num_threads
from bi_kernels.testing.strategies import float_tensors

NAN_BITS = 0x7FC00000


def all_bfloat16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def nearest_float32(value: Fraction) -> float:
    """Round to nearest even, from the definition: the tests' own rounding, which shares nothing with the code."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1, -127)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    steps, rest = divmod(magnitude, unit)
    if rest > unit / 2 or (rest == unit / 2 and steps % 2):
        steps += 1
    rounded = steps * unit
    result = math.inf if rounded >= Fraction(2) ** 128 else float(rounded)
    return math.copysign(result, -1.0 if value < 0 else 1.0)


def ulp(reference: torch.Tensor) -> torch.Tensor:
    """Distance between float32 neighbours at float64 numbers."""
    exponent = torch.frexp(reference).exponent.clamp(min=-125) - 24
    return torch.exp2(exponent.double())


# ---- fma


def check_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    got = numerics.fma(a, b, c)
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    want = torch.tensor([nearest_float32(v) for v in exact])
    # The sign of an exact zero is IEEE's, which Fraction does not know.
    want = torch.where(torch.tensor([v == 0 for v in exact]), got.abs().neg().where(got.signbit(), got.abs()), want)
    assert_bitwise_equal(got, want)


def test_fma_random_and_cancelling() -> None:
    a, b = torch.randn(3000), torch.randn(3000)
    near = (-(a.double() * b.double())).float() * (1 + torch.randint(-2, 3, (3000,)) * 2.0**-23)
    check_fma(a, b, torch.cat([torch.randn(1000), near[1000:]]))


def test_fma_where_two_roundings_would_differ_from_one() -> None:
    # 1 + 2**-24 is the middle of two float32; the product's tail, far below float64's last bit, decides.
    one = torch.ones(4)
    tail = torch.tensor([2.0**-70, -(2.0**-70), 2.0**-70, -(2.0**-70)])
    b = torch.tensor([1 + 2.0**-23, 1 + 2.0**-23, 1.0, 1.0]) * 2.0**-24
    # a * b + c with a * b = 2**-24 (1 + ...) and c = 1: written so that each operand is a float32.
    check_fma(one, b, one)
    # (1 + 2**-12)(1 + 2**-12) = 1 + 2**-11 + 2**-24: a tie, then moved by c.
    a = torch.full((4,), 1 + 2.0**-12)
    check_fma(a, a, tail)
    naive = (a.double() * a.double() + tail.double()).float()
    assert (bit_view(numerics.fma(a, a, tail)) != bit_view(naive)).any(), "the example must tell the two apart"


def test_fma_subnormal_overflow_and_zero() -> None:
    tiny, huge = 2.0**-149, torch.finfo(torch.float32).max
    a = torch.tensor([tiny, 2.0**-75, 3 * 2.0**-76, -(2.0**-75), 2.0**-100, huge, huge, 1 + 2.0**-23, -0.0, 0.0])
    b = torch.tensor([0.5, 2.0**-75, 2.0**-75, 2.0**-75, 2.0**-100, 1.0, 2.0, 2.0**-127, 1.0, 5.0])
    c = torch.tensor([0.0, 0.0, tiny, tiny, tiny, 2.0**103, -huge, 3 * tiny, 0.0, -0.0])
    check_fma(a, b, c)
    assert math.copysign(1, numerics.fma(torch.tensor(-0.0), 1.0, -0.0).item()) == -1


def test_fma_non_finite_and_broadcast() -> None:
    inf, nan = math.inf, math.nan
    got = numerics.fma(torch.tensor([inf, inf, 0.0, nan, 1.0]), torch.tensor([1.0, 1.0, inf, 1.0, 1.0]), 0.0)
    assert got[:2].tolist() == [inf, inf]
    assert got[2:4].isnan().all()
    assert numerics.fma(torch.tensor(inf), 1.0, torch.tensor(-inf)).isnan()
    assert numerics.fma(torch.ones(2, 1), torch.ones(3), torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2
    assert numerics.fma(torch.tensor(3.0), 2.0, 1.0).item() == 7.0
    assert numerics.fma(torch.empty(0), 2.0, 1.0).shape == (0,)


@settings(max_examples=60)
@given(st.data())
def test_fma_any_bits(data: st.DataObject) -> None:
    check_fma(*(data.draw(float_tensors((6,), torch.float32)) for _ in range(3)))


# ---- exp, log, log1p, sigmoid, exp_f64


def chain_exp(x: float) -> float:
    """The exponential's chain in exact fractions, one rounding where the docstring says one."""

    def rn(value: Fraction) -> Fraction:
        return Fraction(nearest_float32(value))

    ln2_hi, ln2_lo = rn(Fraction(0.693359375)), rn(Fraction(-2.1219444005469058e-4))
    v = Fraction(x)
    n = round(rn(v * rn(Fraction(1 / math.log(2)))))
    r = rn(v - n * ln2_hi)
    r = rn(r - n * ln2_lo)
    p = rn(Fraction(1 / 5040))
    for inverse_factorial in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = rn(p * r + rn(Fraction(inverse_factorial)))
    half = n >> 1
    return nearest_float32(rn(p * Fraction(2) ** half) * Fraction(2) ** (n - half))


def test_exp_is_the_documented_chain() -> None:
    x = torch.cat([torch.randn(300) * 30, torch.linspace(-104.5, -87, 40), torch.randn(60) * 1e-3, torch.zeros(1)])
    x = torch.cat([x, torch.randn(100).bfloat16().float()])  # short significands: here exact ties do occur
    assert_bitwise_equal(numerics.exp(x), torch.tensor([chain_exp(v) for v in x.tolist()]))


def test_exp_error_below_one_ulp_on_all_bfloat16_and_many_floats() -> None:
    x = torch.cat([all_bfloat16().float(), torch.linspace(-104, 88.72, 300_001), torch.randn(100_000)])
    x = x[(x >= -104) & (x <= 88.72)]
    truth = x.double().exp()
    assert ((numerics.exp(x).double() - truth).abs() <= ulp(truth)).all()


def test_exp_ends() -> None:
    x = torch.tensor([math.inf, 1e38, 88.73, -104.0, -1e38, -math.inf, 0.0, -0.0, math.nan, -math.nan])
    want = torch.tensor([math.inf, math.inf, math.inf, 0.0, 0.0, 0.0, 1.0, 1.0, math.nan, math.nan])
    assert_bitwise_equal(numerics.exp(x), want)
    assert torch.isfinite(numerics.exp(torch.tensor([88.72])))
    assert numerics.exp(torch.tensor([-103.2])).item() == 2.0**-149


def test_log_error_and_ends() -> None:
    x = torch.cat([torch.logspace(-37.9, 38.5, 200_001), torch.linspace(0.5, 2.0, 200_001), all_bfloat16().float()])
    x = x[(x > 0) & torch.isfinite(x)]
    truth = x.double().log()
    assert ((numerics.log(x).double() - truth).abs() <= 3 * ulp(truth)).all()
    ends = torch.tensor([0.0, -0.0, math.inf, math.nan, -1.0, -math.inf, 1.0])
    want = torch.tensor([-math.inf, -math.inf, math.inf, math.nan, math.nan, math.nan, 0.0])
    assert_bitwise_equal(numerics.log(ends), want)


def test_log1p_error_and_ends() -> None:
    u = torch.cat([torch.linspace(0, 1, 200_001), torch.logspace(-44, 0, 50_001)])
    truth = u.double().log1p()
    assert ((numerics.log1p(u).double() - truth).abs() <= 3 * ulp(truth)).all()
    assert_bitwise_equal(numerics.log1p(torch.tensor([0.0, math.nan])), torch.tensor([0.0, math.nan]))


def test_sigmoid_error_and_ends() -> None:
    x = torch.linspace(-80, 80, 100_001)
    truth = 1 / (1 + (-x.double()).exp())
    assert ((numerics.sigmoid(x).double() - truth).abs() <= 3 * ulp(truth)).all()
    ends = torch.tensor([math.inf, -math.inf, 0.0, math.nan])
    assert_bitwise_equal(numerics.sigmoid(ends), torch.tensor([1.0, 0.0, 0.5, math.nan]))


@pytest.mark.parametrize("size", [1, 3, 7, 8, 16, 17, 1000, 30_011])
def test_sqrt_is_correctly_rounded_in_tensors_of_any_length(size: int) -> None:
    x = torch.cat([torch.rand(20_000) * 100, torch.logspace(-44, 38, 10_011)])[:size]
    want = [struct.pack("<f", math.sqrt(v)) for v in x.tolist()]  # math.sqrt is IEEE's, rounded once more
    assert numerics.sqrt(x).view(torch.uint8).tolist() == list(b"".join(want))


def test_sqrt_against_integers() -> None:
    for v in torch.rand(2000).add(1e-3).tolist():
        root = numerics.sqrt(torch.tensor([v])).item()
        below, above = math.nextafter(root, 0.0), math.nextafter(root, 2.0)
        half = 2.0**-25 * 2.0 ** math.frexp(root)[1]  # half a unit of float32
        assert below < root < above
        assert Fraction(root - half) ** 2 < Fraction(v) < Fraction(root + half) ** 2


def test_sqrt_ends() -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -1.0, math.nan, 2.0**-149])
    want = torch.tensor([0.0, -0.0, math.inf, math.nan, math.nan, 2.0**-75 * math.sqrt(2)])
    assert_bitwise_equal(numerics.canonical_nan(numerics.sqrt(x)), want)


def test_exp_f64_error_and_ends() -> None:
    x = -torch.cat([torch.linspace(0, 700, 100_001), torch.rand(50_000)]).double()
    truth = x.exp()
    assert ((numerics.exp_f64(x) - truth).abs() <= 4 * 2.0**-53 * truth).all()
    ends = torch.tensor([-math.inf, -1e300, -708.5, 0.0, math.nan], dtype=torch.float64)
    want = torch.tensor([0.0, 0.0, 0.0, 1.0, math.nan], dtype=torch.float64)
    assert_bitwise_equal(numerics.exp_f64(ends), want)


@pytest.mark.parametrize("name", ["exp", "log", "log1p", "sigmoid", "exp_f64"])
def test_elementwise_bits_do_not_depend_on_shape_strides_or_threads(name: str) -> None:
    fn = getattr(numerics, name)
    dtype = torch.float64 if name == "exp_f64" else torch.float32
    x = torch.rand(150_000, dtype=dtype) * (-1 if name == "exp_f64" else 1)
    whole = fn(x)
    assert_bitwise_equal(torch.stack([fn(v) for v in x[:9]]), whole[:9])  # no dimension at all
    assert_bitwise_equal(fn(x[1:1001]), whole[1:1001])
    assert_bitwise_equal(fn(x.view(300, 500).T), whole.view(300, 500).T)
    assert_bitwise_equal(fn(x[::7]), whole[::7])
    assert fn(x[:0]).shape == (0,)
    for count in (1, 2):
        with num_threads(count):
            assert_bitwise_equal(fn(x), whole)


# ---- casts


def test_to_bf16_nearest_even_and_one_nan_in_every_lane() -> None:
    low = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (torch.arange(65536).unsqueeze(-1) << 16) + low
    x = bits.flatten().to(torch.int32).view(torch.float32)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # the textbook rounding, on integers
    want = torch.where(torch.isnan(x), 0x7FC0, up.flatten() & 0xFFFF).to(torch.int16).view(torch.bfloat16)
    assert_bitwise_equal(numerics.to_bf16(x), want)
    for length in (1, 3, 8, 15, 16, 17, 33):
        nans = torch.full((length,), -1, dtype=torch.int32).view(torch.float32)
        assert set(bit_view(numerics.to_bf16(nans)).tolist()) == {0x7FC0}
        assert set(bit_view(numerics.to_bf16(nans.repeat(2)[::2])).tolist()) == {0x7FC0}


def test_to_e4m3_nearest_even_saturating_and_one_nan() -> None:
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    assert values[-1] == 448
    for sign in (1.0, -1.0):
        assert_bitwise_equal(numerics.to_e4m3(sign * values), (sign * values).to(torch.float8_e4m3fn))
        middle = sign * (values[1:] + values[:-1]) / 2
        even = torch.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
        offset = 128 if sign < 0 else 0
        assert (bit_view(numerics.to_e4m3(middle)) == even + offset).all()
        zero, far = torch.tensor(0.0), torch.tensor(sign * 1e9)
        assert (bit_view(numerics.to_e4m3(torch.nextafter(middle, zero))) == codes[:-1] + offset).all()
        assert (bit_view(numerics.to_e4m3(torch.nextafter(middle, far))) == codes[1:] + offset).all()
    past = torch.tensor([448.0, 464.0, 464.1, 480.0, 3e38, math.inf, math.nan, -math.nan, -449.0, -math.inf, -0.0])
    want = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7F, 0x7F, 0xFE, 0xFE, 0x80]
    assert bit_view(numerics.to_e4m3(past)).tolist() == want


def test_canonical_nan() -> None:
    x = torch.tensor([-1, 0x7F800001, 0x7FC12345, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert bit_view(numerics.canonical_nan(x)).tolist() == [NAN_BITS] * 3 + [0x3F800000]


# ---- tree_sum


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 129])
def test_tree_sum_is_the_documented_tree(n: int) -> None:
    x = torch.randn(4, n)

    def tree(row: list[torch.Tensor]) -> torch.Tensor:
        while len(row) > 1:
            half = (len(row) + 1) // 2
            row = [row[i] + row[i + half] if i + half < len(row) else row[i] for i in range(half)]
        return row[0]

    kept = x.clone()
    assert_bitwise_equal(numerics.tree_sum(x), torch.stack([tree(list(row)) for row in x]))
    assert_bitwise_equal(x, kept, "the argument is not touched")


def test_tree_sum_threads_and_rows() -> None:
    x = torch.randn(3, 200_000)
    whole = numerics.tree_sum(x)
    for count in (1, 2):
        with num_threads(count):
            assert_bitwise_equal(numerics.tree_sum(x[1]), whole[1])


# ---- mm_rn


def exact_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = [[Fraction(v) for v in row] for row in a.float().tolist()]
    cols = [[Fraction(v) for v in row] for row in b.float().tolist()]
    dots = [[nearest_float32(sum(map(Fraction.__mul__, r, c), Fraction(0))) for c in cols] for r in rows]
    return torch.tensor(dots) + 0.0  # a negative sum that underflows is +0 too


@pytest.mark.parametrize("k", [1, 2, 7, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float16])
def test_mm_rn_is_correctly_rounded(dtype: torch.dtype, k: int) -> None:
    spread = torch.exp2(torch.randint(-4, 5, (6, k)).double())
    a, b = (torch.randn(6, k).double() * spread).to(dtype), torch.randn(5, k).to(dtype)
    assert_bitwise_equal(numerics.mm_rn(a, b), exact_mm(a, b))


def test_mm_rn_mixed_dtypes() -> None:
    a, b = torch.randn(4, 96).bfloat16(), torch.randn(3, 96)
    assert_bitwise_equal(numerics.mm_rn(a, b), exact_mm(a, b))


def test_mm_rn_wide_range_and_cancellation() -> None:
    k = 96
    a, b = torch.randn(12, k), torch.randn(10, k)
    a *= torch.exp2(torch.randint(-60, 61, (12, k)).float())
    a[1, ::2] = -a[1, 1::2]  # with equal neighbours in b: exact zeros
    b[1, ::2] = b[1, 1::2]
    a[2], b[2] = 2.0**-140, 2.0**-140  # products far below float32
    a[3] = 0.0
    a[4], b[4] = 1e38, 1e38  # overflow
    a[5, :3] = torch.tensor([2.0**60, 2.0**-60, -(2.0**60)])
    got = numerics.mm_rn(a, b)
    assert_bitwise_equal(got, exact_mm(a, b))
    assert got[1, 1] == 0
    assert not torch.signbit(got[got == 0]).any()


def test_mm_rn_ties_to_even_and_tails_beyond_float64() -> None:
    # One row each: a float32 midpoint, then the midpoint plus or minus something that float64 cannot see beside it.
    tail = 2.0**-100
    a = torch.tensor([[1.0, 2.0**-24, 0, 0], [1 + 2.0**-23, 2.0**-24, 0, 0], [1.0, 2.0**-24, tail, 0]])
    a = torch.cat([a, a[2:] * torch.tensor([1.0, 1.0, -1.0, 1.0]), -a])
    b = torch.ones(1, 4)
    want = torch.tensor([1.0, 1 + 2.0**-22, 1 + 2.0**-23, 1.0])
    assert_bitwise_equal(numerics.mm_rn(a, b), torch.cat([want, -want[:3]]).unsqueeze(-1))


def test_mm_rn_many_exact_ties() -> None:
    # Small integers times 2**-12 beside 2**12: sums need 25 bits and more, so that half of them are ties.
    a = torch.randint(-3, 4, (20, 32)).float() * 2.0**-12
    a[:, 0] = 2.0**12
    b = torch.randint(-3, 4, (20, 32)).float()
    b[:, 0] = 1
    assert_bitwise_equal(numerics.mm_rn(a, b), exact_mm(a, b))


def test_mm_rn_non_finite() -> None:
    inf, nan = math.inf, math.nan
    a = torch.tensor([[inf, 1.0], [inf, -inf], [nan, 1.0], [inf, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    b = torch.tensor([[1.0, 1.0], [0.0, 0.0], [-1.0, inf]])
    want = torch.tensor([[inf, nan, nan], [nan, nan, -inf], [nan] * 3, [inf, nan, nan], [2, 0, inf], [-1, 0, nan]])
    got = numerics.mm_rn(a, b)
    assert_bitwise_equal(got, want)


def test_mm_rn_shapes() -> None:
    a, b = torch.randn(3, 4, 16), torch.randn(5, 16)
    batched = numerics.mm_rn(a, b)
    assert batched.shape == (3, 4, 5)
    assert_bitwise_equal(batched[2], numerics.mm_rn(a[2], b))
    per_batch = torch.randn(3, 5, 16)
    assert_bitwise_equal(numerics.mm_rn(a, per_batch)[1], numerics.mm_rn(a[1], per_batch[1]))
    assert_bitwise_equal(numerics.mm_rn(a, per_batch)[1], exact_mm(a[1], per_batch[1]))
    assert_bitwise_equal(numerics.mm_rn(a[0].T.contiguous().T, b), batched[0])
    assert_bitwise_equal(numerics.mm_rn(a[:, ::2, 1::3], b[:, 1::3])[0], exact_mm(a[0, ::2, 1::3], b[:, 1::3]))
    assert numerics.mm_rn(torch.randn(0, 16), b).shape == (0, 5)
    assert numerics.mm_rn(a[0], torch.randn(0, 16)).shape == (4, 0)
    assert_bitwise_equal(numerics.mm_rn(torch.randn(2, 0), torch.randn(3, 0)), torch.zeros(2, 3))


@settings(max_examples=40)
@given(st.data())
def test_mm_rn_any_bits(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 5))
    a, b = (data.draw(float_tensors((2, k), torch.float32)) for _ in range(2))
    assert_bitwise_equal(numerics.mm_rn(a, b), exact_mm(a, b))


def test_mm_rn_rows_alone_among_others_and_on_any_thread_count() -> None:
    a, b = torch.randn(150, 512).bfloat16(), torch.randn(70, 512).bfloat16()
    whole = numerics.mm_rn(a, b)
    for count in (1, 2):
        with num_threads(count):
            for start, stop in ((0, 1), (7, 8), (3, 40), (149, 150), (0, 150)):
                assert_bitwise_equal(numerics.mm_rn(a[start:stop], b), whole[start:stop])
    assert_bitwise_equal(numerics.mm_rn(b, a).T, whole)
