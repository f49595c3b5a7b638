"""Hypothesis strategies for the inputs where bits go wrong: ties, signed zeros, NaN, edges of formats, awkward splits.

Tensors are drawn as lists of bit patterns or of table entries, so that a failing example shrinks to something that
can be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

__all__ = ["float_tensors", "partitions", "shapes", "tied_scores", "ue8m0_scales"]

# Of each format: the integers that hold its bits, and in magnitude 1, the smallest normal number, and all exponent
# bits set: the infinity, or the NaN of a format that has none.
_BITS = {
    torch.float32: (torch.int32, 0x3F800000, 0x00800000, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x3F80, 0x0080, 0x7F80),
    torch.float8_e4m3fn: (torch.uint8, 0x38, 0x08, 0x7F),
}


def shapes(dims: int, *, min_side: int = 0, max_side: int = 8) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with ``dims`` dimensions; empty ones too, unless ``min_side`` is above 0."""
    return st.tuples(*[st.integers(min_side, max_side)] * dims)


@st.composite
def float_tensors(
    draw: st.DrawFn, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, *, finite: bool = True
) -> torch.Tensor:
    """Tensors of arbitrary bit patterns: subnormals, both zeros, the largest numbers.

    Args:
        draw: Given by hypothesis.
        shape: Shape of the tensor.
        dtype: float32, bfloat16 or float8_e4m3fn.
        finite: Leave out NaN and infinities.
    """
    integer, one, normal, non_finite = _BITS[dtype]
    width = torch.iinfo(integer).bits
    largest = non_finite - 1 if finite else 2 ** (width - 1) - 1
    edges = st.sampled_from([0, 1, normal - 1, normal, one, non_finite - 1, *([] if finite else [non_finite, largest])])
    # -2**(width - 1) is the sign bit of two's complement.
    sign = st.sampled_from([0, -(2 ** (width - 1))])
    signed = st.builds(int.__add__, st.integers(0, largest) | edges, sign)
    drawn = draw(st.lists(signed, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(drawn, dtype=torch.int64).to(integer).view(dtype).reshape(tuple(shape))


@st.composite
def tied_scores(draw: st.DrawFn, shape: Sequence[int], *, levels: int = 4, special: bool = True) -> torch.Tensor:
    """float32 scores with few distinct values, hence many exact ties.

    Args:
        draw: Given by hypothesis.
        shape: Shape of the tensor.
        levels: Number of ordinary values.
        special: Add NaN, both infinities and both zeros.
    """
    table = [float(level) for level in range(1, levels + 1)]
    if special:
        table += [math.nan, math.inf, -math.inf, 0.0, -0.0]
    drawn = draw(st.lists(st.sampled_from(table), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(drawn, dtype=torch.float32).reshape(tuple(shape))


@st.composite
def ue8m0_scales(draw: st.DrawFn, shape: Sequence[int], *, nan: bool = True) -> torch.Tensor:
    """float32 tensors of what UE8M0 can hold: powers of two from ``2**-127`` to ``2**127``, and NaN."""
    exponents = st.integers(-127, 128 if nan else 127)
    drawn = draw(st.lists(exponents, min_size=math.prod(shape), max_size=math.prod(shape)))
    values = [math.nan if exponent == 128 else 2.0**exponent for exponent in drawn]
    return torch.tensor(values, dtype=torch.float32).reshape(tuple(shape))


@st.composite
def partitions(draw: st.DrawFn, total: int, *, allow_empty: bool = False) -> list[int]:
    """Lists of lengths that add up to ``total``: chunks, buckets, slices, requests of a batch."""
    lengths = []
    left = total
    while left:
        length = draw(st.integers(0 if allow_empty else 1, left))
        lengths.append(length)
        left -= length
    return lengths
