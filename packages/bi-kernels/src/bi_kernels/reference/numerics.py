"""Arithmetic whose bits do not depend on the machine, the batch or the thread count.

The references are specifications, so they may not inherit bits from whatever BLAS, vector width or libm happens to
be installed. Everything here is made of IEEE additions, multiplications and divisions applied element
by element (each correctly rounded, hence the same bits in a vector lane and in a scalar tail), plus one matrix
product whose result is correctly rounded, so that the order in which a BLAS adds cannot show.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence

import torch

__all__ = [
    "canonical_nan",
    "exp",
    "exp_f64",
    "fma",
    "log",
    "log1p",
    "mm_rn",
    "sigmoid",
    "sqrt",
    "to_bf16",
    "to_e4m3",
    "tree_sum",
    "unsettled",
]

_F64_UNIT = 2.0**-53  # unit roundoff of float64
_SMALLEST_NORMAL = 2.0**-126  # of float32
_SMALLEST_NORMAL_BITS = (1023 - 126) << 52  # as float64
_F64_MAGNITUDE = 2**63 - 1  # every bit but the sign
_BLOCK = 1 << 16  # elements: their float64 temporaries fit a second-level cache

# ln 2 = _LN2_HI + _LN2_LO; _LN2_HI has 12 significant bits, so n * _LN2_HI is exact in float32 for |n| < 4096.
_LN2_HI = 0.693359375
_LN2_LO = -2.1219444005469058e-4  # not log(2) - _LN2_HI, whose last bits are the rounding of log(2)
_LOG2E = 1.0 / math.log(2.0)


def canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """``x`` with every NaN replaced by the positive quiet NaN without payload: float32 0x7fc00000, bfloat16 0x7fc0.

    Which NaN an operation passes on differs between processors, and in torch even between casts.
    """
    return torch.nan_to_num(x, nan=math.nan, posinf=math.inf, neginf=-math.inf)  # ten times as fast as torch.where


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16, to nearest even; any shape. NaN is 0x7fc0 (torch's cast on the CPU gives 0xffff)."""
    return canonical_nan(x.bfloat16())


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Clamp float32 to +-448 and round to float8_e4m3fn, to nearest even; any shape. NaN is 0x7f.

    The clamp is not left to torch's cast: above 464 it gives NaN in older releases and 448 in newer ones. Nor is the
    NaN, whose sign the cast keeps.
    """
    return canonical_nan(x).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """Float32 fused multiply-add: ``a * b + c`` with one rounding, as the GPU's ``__fmaf_rn``.

    Args:
        a: float32, any shape.
        b: float32 tensor that broadcasts with ``a``, or a number (rounded to float32 first).
        c: Like ``b``.

    Returns:
        float32. Bit-equal to a hardware fma, subnormal results included; which NaN comes out is not defined.
    """
    p = a.double() * _as_f64(b, a)  # exact: 24 + 24 bits fit 53
    addend = _as_f64(c, a)
    s = p + addend
    # Rounding twice, to float64 and then to float32, goes wrong only where the first rounding lands on the middle of
    # two float32. Among the subnormals that may be any pattern of bits; zero is exact.
    if _has_middle(s) or _has_subnormal(s):
        doubtful = _is_middle(s) | ((s.abs() < _SMALLEST_NORMAL) & (s != 0))
        p, addend, found = p.expand_as(s)[doubtful], addend.expand_as(s)[doubtful], s[doubtful]
        s[doubtful] = _round_to_odd(found, _two_sum_error(p, addend, found))
    return s.float()


def _fma_normal(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """:func:`fma` of flat float64 tensors that hold float32 numbers, where no inexact result can be subnormal."""
    s = torch.addcmul(c, a, b)  # a * b is exact, so it does not matter whether this fuses
    if _has_middle(s):
        middle = _is_middle(s).nonzero()[:, 0]
        found, p, addend = s[middle], (a * b)[middle], c.expand_as(s)[middle]
        s[middle] = _round_to_odd(found, _two_sum_error(p, addend, found))
    return s.float()


def _horner(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """``p = fma(p, x, c)`` for each coefficient, from the highest; no intermediate result may be subnormal."""
    x64 = x.double()
    p, sums = torch.full_like(x, coefficients[0]), []
    for coefficient in coefficients[1:]:
        # The product is exact, so that the addition makes the only rounding before the one to float32.
        sums.append(p.double().mul_(x64).add_(_f32(coefficient)))
        p = sums[-1].float()
    if _has_middle(torch.cat(sums)):
        p = torch.full_like(x, coefficients[0])
        for coefficient in coefficients[1:]:
            p = _fma_normal(p.double(), x64, _as_f64(coefficient, x))
    return p


def _is_middle(s: torch.Tensor) -> torch.Tensor:
    """Where a float64 lies halfway between two normal float32: 1000... below the 24th bit of the significand."""
    return (s.view(torch.int64) & 0x1FFFFFFF) == 0x10000000


def _has_middle(s: torch.Tensor) -> bool:
    """Whether :func:`_is_middle` holds anywhere, in a few fast passes: rarely does it."""
    rest = (s.view(torch.int64) & 0x1FFFFFFF).bitwise_xor_(0x10000000)
    return rest.numel() > 0 and not bool(rest.min())


def _has_subnormal(s: torch.Tensor) -> bool:
    """Whether a float64 other than zero lies below the normal float32 numbers."""
    magnitude = s.view(torch.int64) & _F64_MAGNITUDE
    # Less one, zero becomes the greatest of all.
    rest = magnitude.sub_(1).bitwise_and_(_F64_MAGNITUDE)
    return rest.numel() > 0 and int(rest.min()) < _SMALLEST_NORMAL_BITS - 1


def _in_blocks(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Run an elementwise function on flat pieces that stay in the cache: same bits, a third of the time."""

    @functools.wraps(fn)
    def blocked(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        if len(flat) <= _BLOCK or x.device.type != "cpu":
            return fn(flat).view(x.shape)
        return torch.cat([fn(flat[i : i + _BLOCK]) for i in range(0, len(flat), _BLOCK)]).view(x.shape)

    return blocked


@_in_blocks
def exp(x: torch.Tensor) -> torch.Tensor:
    """Float32 exponential, written out in fma so that a CUDA kernel can repeat it bit for bit.

    ``x = n ln 2 + r`` with ``|r| <= ln(2) / 2``; the Taylor polynomial of degree 7 leaves ``r**8 / 8! < 2**-27``.
    The scaling by ``2**n`` is done in two exact-or-once-rounded steps, so subnormal results are rounded once.

    Args:
        x: float32, any shape.

    Returns:
        float32; +inf above 88.73, +0 below -104, NaN (0x7fc00000) for NaN. Within 1 ulp of the true value elsewhere.
    """
    # Clamping first keeps n in int range; 89 overflows to inf and -105 underflows to 0 by themselves.
    clamped = torch.clamp(x, -105.0, 89.0)
    n = torch.round(clamped * _f32(_LOG2E))
    # The product is exact, so that this is an fma too; the next one's results are multiples of 2**-36, or x itself.
    r = clamped - n * _LN2_HI
    r = _fma_normal(n.double(), _as_f64(-_LN2_LO, x), r.double())
    p = _horner(r, (1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0))
    n = torch.nan_to_num(n, nan=0.0).to(torch.int32)
    half = n >> 1
    scaled = (p * _pow2(half)) * _pow2(n - half)
    return canonical_nan(scaled)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Float32 logistic function ``1 / (1 + exp(-x))``; ``x`` float32, any shape."""
    return 1.0 / (1.0 + exp(-x))


@_in_blocks
def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Float32 square root, correctly rounded, as the GPU's ``__fsqrt_rn``; any shape.

    torch's own on the CPU is off by one unit for a fifth of all values, and not for the same ones in a short tensor:
    its bits would depend on the batch. Its float64 root may be off by a unit too, 2**-52, but the root of a float32
    lies at least 2**-51 from the middle of two others, relative to its size, so that rounding it gives the right one.
    """
    return torch.sqrt(x.double()).float()


@_in_blocks
def log1p(u: torch.Tensor) -> torch.Tensor:
    """Float32 ``ln(1 + u)`` for ``0 <= u <= 1``, written out in fma.

    With ``s = u / (2 + u)`` it is ``2 atanh(s)``; ``s <= 1/3`` and eight odd terms leave less than ``2**-28``.

    Args:
        u: float32 in [0, 1], any shape.

    Returns:
        float32, within 3 ulp of the true value; NaN (0x7fc00000) for NaN.
    """
    s = u / (2.0 + u)
    q = s * s
    p = _horner(q, (1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0))
    return canonical_nan(2.0 * fma(p * q, s, s))


@_in_blocks
def log(x: torch.Tensor) -> torch.Tensor:
    """Float32 natural logarithm, written out in fma.

    ``x = 2**e m`` with ``m`` in [sqrt(1/2), sqrt(2)); ``ln m`` by the series of :func:`log1p`'s atanh.

    Args:
        x: float32, any shape.

    Returns:
        float32, within 3 ulp of the true value; -inf for either zero, +inf for +inf, NaN (0x7fc00000) for NaN and
        negative numbers.
    """
    # Subnormals are brought into the normal range, exactly, and the exponent is put right afterwards.
    subnormal = x < _SMALLEST_NORMAL
    bits = torch.where(subnormal, x * 2.0**24, x).view(torch.int32)
    # Subtracting the bits of sqrt(1/2) puts the exponent step where m leaves [sqrt(1/2), sqrt(2)).
    e = (bits - 0x3F3504F3) >> 23
    m = (bits - (e << 23)).view(torch.float32)
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    p = _horner(q, (1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0))
    ln_m = 2.0 * fma(p * q, s, s)
    n = torch.where(subnormal, e - 24, e).float()
    result = fma(n, _LN2_HI, fma(n, _LN2_LO, ln_m))
    result = torch.where((x > 0) & (x < math.inf), result, torch.where(x == 0, -math.inf, x))
    return torch.where((x >= 0), result, math.nan)


@_in_blocks
def exp_f64(x: torch.Tensor) -> torch.Tensor:
    """Float64 exponential from IEEE multiplications and additions only, for ``x <= 0``.

    For references of bounded ops, which no kernel repeats bit for bit: cheaper than :func:`exp` and closer to the
    truth (Taylor polynomial of degree 13, ``r**14 / 14! < 2**-57``).

    Args:
        x: float64, any shape, not above 0. -inf and everything below -708 give +0; NaN gives NaN.
    """
    clamped = torch.clamp(x, -709.0, 0.0)
    n = torch.round(clamped * _LOG2E)
    r = (clamped - n * _LN2_HI) - n * _LN2_LO
    p = torch.full_like(r, 1.0 / math.factorial(13))
    for k in range(12, -1, -1):
        p.mul_(r).add_(1.0 / math.factorial(k))  # two roundings
    n = torch.nan_to_num(n, nan=0.0).to(torch.int64)
    p.mul_(n.add_(1023).bitwise_left_shift_(52).view(torch.float64))
    return canonical_nan(p.mul_(torch.ge(x, -708.0, out=torch.empty_like(p))))  # by 1 or 0: faster than torch.where


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by repeated halving: element ``i`` is added to ``i + ceil(n / 2)``.

    Args:
        x: ``(..., n)``, float32 or float64, ``n >= 1``.

    Returns:
        ``(...)``, same dtype.

    Invariance:
        The tree depends on ``n`` alone; each node is one IEEE addition. (``torch.sum`` splits one long row over
        threads, so its bits depend on the thread count and on how many rows there are.)
    """
    n = x.shape[-1]
    while n > 1:
        half = (n + 1) // 2
        if n % 2:
            head = x[..., :half].clone()
            head[..., : n - half] += x[..., half:n]
        else:
            head = x[..., :half] + x[..., half:n]
        x, n = head, half
    return x[..., 0]


def mm_rn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product ``a @ b.mT`` whose every element is the exact dot product, rounded once to float32.

    A correctly rounded result has no order of summation, hence no dependence on tiles, threads or BLAS. It is found
    by Ziv's method: products of float32 operands are exact in float64, a float64 product of any order lies within
    ``K 2**-53 |a| |b|`` of the truth, and nearly always both ends of that interval round to the same float32. The
    few elements where they do not are summed again with twice the bits, and those that even this leaves open (exact
    ties, cancellation to almost nothing) exactly.

    Args:
        a: ``(..., M, K)``, float32, bfloat16, float16 or float8; any strides.
        b: ``(..., N, K)``, likewise; leading dimensions broadcast with ``a``'s.

    Returns:
        ``(..., M, N)`` float32. Zero results are +0. An element with NaN, or with infinities of both signs, is the
        NaN 0x7fc00000.

    Invariance:
        Element ``(i, j)`` is a function of ``a[i]`` and ``b[j]`` alone.
    """
    a64, b64 = a.double(), b.double()
    k = a.shape[-1]
    s = a64 @ b64.mT
    if k == 0:
        return s.float()
    norm_a = torch.linalg.vector_norm(a64, dim=-1)
    norm_b = torch.linalg.vector_norm(b64, dim=-1)
    # k + 8 instead of k - 1 covers the rounding of the norms and of s +- bound themselves.
    where = unsettled(s, (k + 8) * _F64_UNIT * norm_a, norm_b)
    if len(where[0]) * k > a.numel() + b.numel():
        # Sums of short operands (float8, small integers) often are exact ties, but exact in float64 as well: partial
        # sums are multiples of the two grains' product and below the norms' product, and 53 bits hold them.
        row, column = where[:-1], (*where[:-2], where[-1])
        lead = s.shape[:-2]
        norms, grains = (
            of_a.expand(*lead, a.shape[-2])[row] * of_b.expand(*lead, b.shape[-2])[column]
            for of_a, of_b in ((norm_a, norm_b), (_grain(a, a64), _grain(b, b64)))
        )
        open_still = (norms >= grains * 2.0**52).nonzero()[:, 0]
        where = tuple(index[open_still] for index in where)
    if len(where[0]):
        rows = a.expand(*s.shape[:-1], k)
        cols = b.expand(*s.shape[:-2], *b.shape[-2:])
        for piece in zip(*(index.split(max(1, 4 * _BLOCK // k)) for index in where), strict=True):
            s[piece] = _settle(rows[piece[:-1]], cols[(*piece[:-2], piece[-1])])
    return _canonical(s)


def unsettled(s: torch.Tensor, bound_a: torch.Tensor, bound_b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where rounding a float64 to float32 could go either way, within ``bound_a[..., i] * bound_b[..., j]`` of it.

    Args:
        s: ``(..., M, N)`` float64.
        bound_a: ``(..., M)`` float64, not negative.
        bound_b: ``(..., N)`` float64, not negative.

    Returns:
        Indices, as ``nonzero(as_tuple=True)`` gives them. Elements that are not finite are not among them.
    """
    rows, columns = bound_a.unsqueeze(-1), bound_b.unsqueeze(-2)
    gap = torch.addcmul(s, rows, columns).float()
    gap -= torch.addcmul(s, rows, columns, value=-1.0).float()
    # Comparisons are slow, sums are not: look closely only at rows with a gap (or with a NaN, from infinities).
    some = gap.sum(-1).nonzero(as_tuple=True)
    open_rows = ((gap[some] != 0) & torch.isfinite(s[some])).nonzero(as_tuple=True)
    return (*(index[open_rows[0]] for index in some), open_rows[1])


def _grain(x: torch.Tensor, x64: torch.Tensor) -> torch.Tensor:
    """Per row of ``x``, a power of two of which every element is a multiple."""
    smallest = torch.where(x64 == 0, math.inf, x64.abs()).amin(-1).clamp(max=2.0**200)
    significand_bits = 1 - round(math.log2(torch.finfo(x.dtype).eps))
    # From the bits: torch.ldexp goes through a float32 power, which under- and overflows here. No float32 is
    # subnormal as float64; NaN is of no account, its row is not finite.
    exponent = (smallest.view(torch.int64) >> 52) - (significand_bits - 1)
    return (exponent << 52).view(torch.float64)


def _settle(rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Exact dot products ``(n, K) . (n, K) -> (n,)``, rounded so that one more rounding, to float32, is correct.

    Each product is cut in two at ``step``, chosen so that the high parts, multiples of it, add up without error in
    any order. The low parts, at most half a ``step``, do so too where their own grain is coarse enough; elsewhere
    their sum errs by at most ``K u`` of its magnitude, ``K step / 2``. (Half of it again covers the roundings of
    high + low +- bound.) What this leaves open is added exactly.
    """
    rows64, cols64 = rows.double(), cols.double()
    grain = _grain(rows, rows64) * _grain(cols, cols64)
    products = rows64 * cols64
    k = products.shape[-1]
    largest = products.abs().amax(-1)
    # 2**exponent > largest, and k <= 2**bits: sums of high parts stay below 2**(exponent + bits + 1) = step 2**53.
    bits = max(1, (k - 1).bit_length())
    exponent = (largest.view(torch.int64) >> 52) + 1
    step = ((exponent + (bits + 1 - 53)).clamp(min=1) << 52).view(torch.float64)
    # Adding 1.5 * 2**52 steps leaves no room below one step, so that the addition rounds to a multiple of it.
    shifter = (step * (1.5 * 2.0**52)).unsqueeze(-1)
    high = (products + shifter) - shifter
    low_sum = (products - high).sum(-1)
    high_sum = high.sum(-1)
    bound = torch.where(step * k <= grain * 2.0**53, 0.0, (0.75 * k * k * _F64_UNIT) * step)
    ends = [low_sum - bound, low_sum + bound]
    below, above = (_round_to_odd(h := high_sum + end, _two_sum_error(high_sum, end, h)) for end in ends)
    for i in (below.float() != above.float()).nonzero()[:, 0].tolist():
        below[i] = _exact_sum(products[i].tolist())
    return below


def _exact_sum(products: list[float]) -> float:
    """The exact sum, rounded to odd in float64, so that one more rounding to float32 is the correct one."""
    total = math.fsum(products)
    rest = math.fsum([*products, -total])
    if rest and not struct.unpack("<q", struct.pack("<d", total))[0] & 1:
        total = math.nextafter(total, math.copysign(math.inf, rest))
    return total


def _two_sum_error(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Knuth: what rounding dropped from the float64 sum ``s = a + b``, exactly."""
    t = s - a
    return (a - (s - t)) + (b - t)


def _round_to_odd(s: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """``s + error``, in float64, rounded to odd: a later rounding to float32 sees on which side of a tie it lies."""
    bits = s.view(torch.int64)
    inexact = (error != 0) & torch.isfinite(s) & ((bits & 1) == 0)
    away = (error > 0) == (s > 0)
    return torch.where(inexact, torch.where(away, bits + 1, bits - 1), bits).view(torch.float64)


def _canonical(s: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32, with one zero and one NaN."""
    return canonical_nan(s.float() + 0.0)  # -0 + 0 = +0


def _as_f64(value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.double()
    return torch.full((), _f32(value), dtype=torch.float64, device=like.device)


def _f32(value: float) -> float:
    """The float32 nearest to a Python number, as a Python number."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _pow2(n: torch.Tensor) -> torch.Tensor:
    """``2.0**n`` for int32 ``n`` in [-126, 127], from its bits."""
    return ((n + 127) << 23).view(torch.float32)
