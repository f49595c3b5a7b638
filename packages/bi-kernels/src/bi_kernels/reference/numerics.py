"""Arithmetic whose bits do not depend on the machine, the batch or the thread count.

The references are specifications, so they may not inherit bits from whatever BLAS, vector width or libm happens to
be installed. Everything here is made of IEEE additions, multiplications, divisions and square roots applied element
by element (each correctly rounded, hence the same bits in a vector lane and in a scalar tail), plus one matrix
product whose result is correctly rounded, so that the order in which a BLAS adds cannot show.
"""

from __future__ import annotations

import math
import struct

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
    "to_bf16",
    "to_e4m3",
    "tree_sum",
]

_F64_UNIT = 2.0**-53  # unit roundoff of float64

# ln 2 = _LN2_HI + _LN2_LO; _LN2_HI has 12 significant bits, so n * _LN2_HI is exact in float32 for |n| < 4096.
_LN2_HI = 0.693359375
_LN2_LO = -2.1219444005469058e-4  # not log(2) - _LN2_HI, whose last bits are the rounding of log(2)
_LOG2E = 1.0 / math.log(2.0)


def canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """``x`` with every NaN replaced by the positive quiet NaN without payload: float32 0x7fc00000, bfloat16 0x7fc0.

    Which NaN an operation passes on differs between processors, and in torch even between casts.
    """
    return torch.where(torch.isnan(x), torch.full((), math.nan, dtype=x.dtype, device=x.device), x)


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16, to nearest even; any shape. NaN is 0x7fc0 (torch's cast on the CPU gives 0xffff)."""
    return canonical_nan(x.bfloat16())


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Clamp float32 to +-448 and round to float8_e4m3fn, to nearest even; any shape. NaN is 0x7f.

    The clamp is not left to torch's cast: above 464 it gives NaN in older releases and 448 in newer ones. Nor is the
    NaN, whose sign the cast keeps.
    """
    codes = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isnan(x), 0x7F, codes).view(torch.float8_e4m3fn)


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """Float32 fused multiply-add: ``a * b + c`` with one rounding, as the GPU's ``__fmaf_rn``.

    Args:
        a: float32, any shape.
        b: float32 tensor that broadcasts with ``a``, or a number (rounded to float32 first).
        c: Like ``b``.

    Returns:
        float32. Bit-equal to a hardware fma, subnormal results included.
    """
    p = a.double() * _as_f64(b, a)  # exact: 24 + 24 bits fit 53
    addend = _as_f64(c, a)
    s = p + addend
    # Knuth's TwoSum: err is exactly what rounding to float64 dropped.
    t = s - p
    err = (p - (s - t)) + (addend - t)
    # Round s to odd, so that the second rounding, to float32, sees on which side of a tie the sum lies.
    bits = s.view(torch.int64)
    inexact = (err != 0) & torch.isfinite(s) & ((bits & 1) == 0)
    away = (err > 0) == (s > 0)
    odd = torch.where(away, bits + 1, bits - 1)
    return torch.where(inexact, odd, bits).view(torch.float64).float()


def exp(x: torch.Tensor) -> torch.Tensor:
    """Float32 exponential, written out in fma so that a CUDA kernel can repeat it bit for bit.

    ``x = n ln 2 + r`` with ``|r| <= ln(2) / 2``; the Taylor polynomial of degree 7 leaves ``r**8 / 8! < 2**-27``.
    The scaling by ``2**n`` is done in two exact-or-once-rounded steps, so subnormal results are rounded once.

    Args:
        x: float32, any shape.

    Returns:
        float32; +inf above 88.73, +0 below -104, NaN for NaN. Within 1 ulp of the true value elsewhere.
    """
    # Clamping first keeps n in int range; 89 overflows to inf and -105 underflows to 0 by themselves.
    clamped = torch.clamp(x, -105.0, 89.0)
    n = torch.round(clamped * _f32(_LOG2E))
    r = fma(n, -_LN2_HI, clamped)
    r = fma(n, -_LN2_LO, r)
    p = torch.full_like(r, 1.0 / 5040.0)
    for inverse_factorial in (1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0):
        p = fma(p, r, inverse_factorial)
    n = torch.where(torch.isnan(n), torch.zeros_like(n), n).to(torch.int32)
    half = n >> 1
    scaled = (p * _pow2(half)) * _pow2(n - half)
    return torch.where(torch.isnan(x), x, scaled)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Float32 logistic function ``1 / (1 + exp(-x))``; ``x`` float32, any shape."""
    return 1.0 / (1.0 + exp(-x))


def log1p(u: torch.Tensor) -> torch.Tensor:
    """Float32 ``ln(1 + u)`` for ``0 <= u <= 1``, written out in fma.

    With ``s = u / (2 + u)`` it is ``2 atanh(s)``; ``s <= 1/3`` and eight odd terms leave less than ``2**-28``.

    Args:
        u: float32 in [0, 1], any shape. NaN gives NaN.
    """
    s = u / (2.0 + u)
    q = s * s
    p = torch.full_like(s, 1.0 / 15.0)
    for k in (13.0, 11.0, 9.0, 7.0, 5.0, 3.0):
        p = fma(p, q, 1.0 / k)
    return 2.0 * fma(p * q, s, s)


def log(x: torch.Tensor) -> torch.Tensor:
    """Float32 natural logarithm of positive normal ``x``, written out in fma; ``x`` float32, any shape.

    ``x = 2**e m`` with ``m`` in [sqrt(1/2), sqrt(2)); ``ln m`` by the series of :func:`log1p`'s atanh.
    """
    bits = x.view(torch.int32)
    # Subtracting the bits of sqrt(1/2) puts the exponent step where m leaves [sqrt(1/2), sqrt(2)).
    e = (bits - 0x3F3504F3) >> 23
    m = (bits - (e << 23)).view(torch.float32)
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    p = torch.full_like(s, 1.0 / 11.0)
    for k in (9.0, 7.0, 5.0, 3.0):
        p = fma(p, q, 1.0 / k)
    ln_m = 2.0 * fma(p * q, s, s)
    n = e.float()
    return fma(n, _LN2_HI, fma(n, _LN2_LO, ln_m))


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
        p = p * r + 1.0 / math.factorial(k)
    n = torch.where(torch.isnan(n), torch.zeros_like(n), n).to(torch.int64)
    scaled = p * ((n + 1023) << 52).view(torch.float64)
    return torch.where(torch.isnan(x), x, torch.where(x < -708.0, torch.zeros_like(x), scaled))


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
        head = x[..., :half].clone()
        head[..., : n - half] += x[..., half:n]
        x, n = head, half
    return x[..., 0]


def mm_rn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product ``a @ b.mT`` whose every element is the exact dot product, rounded once to float32.

    A correctly rounded result has no order of summation, hence no dependence on tiles, threads or BLAS. It is found
    by Ziv's method: products of float32 operands are exact in float64, a float64 product of any order lies within
    ``K 2**-53 |a| |b|`` of the truth, and nearly always both ends of that interval round to the same float32. The
    few elements where they do not are summed exactly.

    Args:
        a: ``(..., M, K)``, float32, bfloat16, float16 or float8.
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
    norm_a = a64.square().sum(-1).sqrt().unsqueeze(-1)
    norm_b = b64.square().sum(-1).sqrt().unsqueeze(-2)
    # k + 8 instead of k - 1 covers the rounding of the norms and of s +- bound themselves.
    bound = ((k + 8) * _F64_UNIT * norm_a) * norm_b
    # Partial sums are multiples of grain_a * grain_b, below norm_a * norm_b. Where 53 bits hold them the sum is exact
    # already; without this test short bfloat16 operands, whose sums often are exact ties, would all look unsettled.
    grain = _grain(a, a64).unsqueeze(-1) * _grain(b, b64).unsqueeze(-2)
    bound = torch.where(norm_a * norm_b < grain * 2.0**52, 0.0, bound)
    low, high = (s - bound).float(), (s + bound).float()
    unsettled = (low != high) & torch.isfinite(s)
    if not bool(unsettled.any()):
        return _canonical(s)
    result = s.clone()
    where = unsettled.nonzero(as_tuple=True)
    rows = a64.expand(*s.shape[:-1], k)[where[:-1]]
    cols = b64.expand(*s.shape[:-2], *b64.shape[-2:])[(*where[:-2], where[-1])]
    result[where] = torch.tensor([_exact_sum(p) for p in (rows * cols).tolist()], dtype=torch.float64)
    return _canonical(result)


def _grain(x: torch.Tensor, x64: torch.Tensor) -> torch.Tensor:
    """Per row of ``x``, a power of two of which every element is a multiple."""
    smallest = torch.where(x64 == 0, math.inf, x64.abs()).amin(-1).clamp(max=2.0**200)
    significand_bits = 1 - round(math.log2(torch.finfo(x.dtype).eps))
    return torch.ldexp(torch.ones_like(smallest), torch.frexp(smallest).exponent - significand_bits)


def _exact_sum(products: list[float]) -> float:
    """The exact sum, rounded to odd in float64, so that one more rounding to float32 is the correct one."""
    total = math.fsum(products)
    rest = math.fsum([*products, -total])
    if rest and not struct.unpack("<q", struct.pack("<d", total))[0] & 1:
        total = math.nextafter(total, math.copysign(math.inf, rest))
    return total


def _canonical(s: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32, with one zero and one NaN."""
    rounded = s.float() + 0.0  # -0 + 0 = +0
    return torch.where(torch.isnan(rounded), torch.full_like(rounded, math.nan), rounded)


def _as_f64(value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.double()
    return torch.full((), _f32(value), dtype=torch.float64, device=like.device)


def _f32(value: float) -> float:
    """The float32 nearest to a Python number, as a Python number."""
    return float(torch.tensor(value, dtype=torch.float32))


def _pow2(n: torch.Tensor) -> torch.Tensor:
    """``2.0**n`` for int32 ``n`` in [-126, 127], from its bits."""
    return ((n + 127) << 23).view(torch.float32)
