"""Reference of sparse MLA: blocks of 64 list entries in order, a running maximum, P rounded to bfloat16."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from bi_kernels.reference.numerics import canonical_nan, exp, exp_f64, log, mm_rn, to_bf16, tree_sum

__all__ = ["SparseMlaOutput", "sparse_mla_fwd"]

_BLOCK = 64  # list entries that share one running maximum: part of the arithmetic
_SHARED_TILE = 128  # tokens worked on together where they share rows: no part of the arithmetic
_OWN_ENTRIES = 4096  # list entries of tokens that do not: their rows in float64 stay in the last-level cache
_SHARING = 4  # entries per distinct row from which on it pays to multiply rows once for all tokens
_F64_UNIT = 2.0**-53


class SparseMlaOutput(NamedTuple):
    """What :func:`bi_sparse_attn.sparse_mla_fwd` returns.

    Attributes:
        out: ``(tokens, heads, 512)`` bfloat16.
        max_logits: ``(tokens, heads)`` float32, the greatest scaled score; -inf without a valid entry.
        lse: ``(tokens, heads)`` float32, natural log of the sum of exponentials, sink left out; +inf without a valid
            entry.
    """

    out: torch.Tensor
    max_logits: torch.Tensor
    lse: torch.Tensor


def sparse_mla_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> SparseMlaOutput:
    """See :func:`bi_sparse_attn.sparse_mla_fwd`: bounded op, this is the specification of the reference's own bits.

    For a token and a head, with m = -inf, den = 0, acc = 0 and the list in blocks of 64 entries, in float32::

        s_j   = dot(q, k_j) * sm_scale               one rounding each
        m'    = max(m, max_j s_j)
        p_j   = exp(s_j - m')                        0 for an invalid entry; base e, rounded once
        alpha = exp(m - m')
        den   = den * alpha + sum_j p_j              multiply, then add; sum by a fixed tree; p_j not yet rounded
        acc   = acc * alpha + dot(bf16(p), v)        multiply, then add; one rounding of the dot product
        m     = m'

    and at the end ``out = bf16(acc / (den + exp(attn_sink - m)))``, ``lse = m + log(den)``.
    """
    tokens, heads, _ = q.shape
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    acc = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    m = torch.full((tokens, heads), -torch.inf, device=q.device)
    den = torch.zeros_like(m)
    column = torch.arange(indices.shape[1], device=q.device)
    valid = (indices >= 0) & (indices < kv.shape[0])
    if topk_length is not None:
        valid &= column < topk_length.unsqueeze(1)
    for first in range(0, tokens, _SHARED_TILE):
        tile = slice(first, min(first + _SHARED_TILE, tokens))
        # Past the last valid entry m, den and acc stay as they are: alpha is 1 and every p is 0.
        used = valid[tile].any(0).nonzero()
        if not len(used):
            continue
        width = (int(used[-1]) // _BLOCK + 1) * _BLOCK
        indices_here, ok = indices[tile, :width].long(), valid[tile, :width]
        rows, place = _distinct(indices_here, ok, kv.shape[0])
        # 0 * inf is NaN: a row that is not finite must not meet the zero weights of tokens that do not list it.
        shared = None
        if _SHARING * len(rows) <= int(ok.sum()):
            shared = _SharedEntries(q[tile], kv.index_select(0, rows), place, ok)
        if shared is not None and shared.finite:
            _attend(shared, ok, sm_scale, acc[tile], den[tile], m[tile])
            continue
        step = max(1, _OWN_ENTRIES // width)
        for start in range(0, len(ok), step):
            part = slice(start, start + step)
            own = _OwnEntries(q[tile][part], kv, indices_here[part], ok[part])
            _attend(own, ok[part], sm_scale, acc[tile][part], den[tile][part], m[tile][part])
    total = den if attn_sink is None else den + exp(attn_sink - m)
    empty = m == -torch.inf
    out.copy_(to_bf16(acc.div_(total.unsqueeze(-1))).masked_fill_(empty.unsqueeze(-1), 0.0))
    lse = torch.where(empty, torch.inf, canonical_nan(m + log(den)))
    return SparseMlaOutput(out, canonical_nan(m), lse)


def _attend(
    entries: _Entries, ok: torch.Tensor, sm_scale: float, acc: torch.Tensor, den: torch.Tensor, m: torch.Tensor
) -> None:
    """Take the blocks of the tokens' lists into ``acc``, ``den`` and ``m``, which are as at the start."""
    s = entries.scores().mul_(torch.tensor(sm_scale, dtype=torch.float32)).add_(0.0)  # -0 + 0 = +0: as for max()
    if not bool(ok.all()):
        s = torch.where(ok.unsqueeze(1), s, -torch.inf)
    blocks = s.unflatten(2, (-1, _BLOCK))
    # Only acc and den need the blocks one after the other.
    running = list(itertools.accumulate(blocks.amax(-1).unbind(-1), torch.maximum))
    after = torch.stack(running, -1)
    before = torch.stack([m, *running[:-1]], -1)
    shift = torch.where(after == -torch.inf, 0.0, after).unsqueeze(-1)
    # One call for alpha and P: exp works element by element.
    powers = exp_f64((torch.cat([before.unsqueeze(-1), blocks], -1) - shift).double()).float()
    alpha, p = powers[..., 0], powers[..., 1:]
    sums = tree_sum(p)
    for n, weighted in enumerate(entries.weighted_sums(p.bfloat16())):
        den.mul_(alpha[..., n]).add_(sums[..., n])
        acc.mul_(alpha[..., n, None]).add_(weighted)
    m.copy_(running[-1])


def _distinct(indices: torch.Tensor, ok: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows below ``count`` that ``ok`` entries name, ascending, and where among them each entry's row is."""
    used = torch.zeros(count + 1, dtype=torch.int64, device=indices.device)
    used[torch.where(ok, indices, count)] = 1
    used[count] = 0
    rows = used.nonzero()[:, 0]
    # An entry that is not valid stands for some row that is there; its weight is zero.
    return rows, ((used.cumsum(0) - 1).clamp_(min=0)[indices.clamp(0, count)]).masked_fill_(~ok, 0)


class _Entries(Protocol):
    """The K rows (which are the V rows) of some tokens' lists, laid out in whichever of two ways is cheaper.

    Where tokens share rows (prefill) the distinct rows are multiplied with all queries at once, and P is spread over
    them. Where they do not (decode) every token multiplies its own rows. Either way gives correctly rounded dot
    products of the same numbers, up to terms that are exactly zero. So the choice, which the batch decides, cannot
    show.
    """

    def scores(self) -> torch.Tensor:
        """Dot products of the queries with the entries' rows: ``(tokens, heads, entries)``."""

    def weighted_sums(self, p: torch.Tensor) -> Iterator[torch.Tensor]:
        """Sums of each block's rows with bfloat16 weights ``p`` ``(tokens, heads, blocks, 64)``.

        Yields:
            ``(tokens, heads, 512)`` float32 for each block.
        """


class _SharedEntries:
    """:class:`_Entries` of tokens that share ``rows`` ``(n, 512)``; ``place`` says which of them an entry is."""

    def __init__(self, q: torch.Tensor, rows: torch.Tensor, place: torch.Tensor, ok: torch.Tensor) -> None:
        self._q, self._rows, self._rows64, self._place, self._ok = q, rows, rows.double(), place, ok
        self._extent = _Extent.of(rows)
        self.finite = self._extent.finite()

    def scores(self) -> torch.Tensor:
        q = self._q.flatten(0, 1)
        dots = _mm_rn(q, _Extent.of(q), self._rows, self._rows64, self._extent).view(*self._q.shape[:2], -1)
        return torch.gather(dots, 2, self._place.unsqueeze(1).expand(-1, dots.shape[1], -1))

    def weighted_sums(self, p: torch.Tensor) -> Iterator[torch.Tensor]:
        lists = zip(p.unbind(2), self._place.split(_BLOCK, 1), self._ok.split(_BLOCK, 1), strict=True)
        for weights, place, ok in lists:
            some, place = _distinct(place, ok, len(self._rows))
            if not len(some):
                yield torch.zeros(())
                continue
            # A list that names a row several times adds equal 8-bit weights: exact in float32, in any order.
            spread = torch.zeros((*weights.shape[:2], len(some)), dtype=torch.float32, device=p.device)
            spread.scatter_add_(2, place.unsqueeze(1).expand(weights.shape), weights.float())
            # Adding them neither makes the grain finer nor reaches beyond entries times the greatest.
            extent = _Extent.of(weights.flatten(0, 1))
            rows, rows64 = self._rows.index_select(0, some), self._rows64.index_select(0, some)
            sums = _mm_rn(spread.flatten(0, 1), extent, rows.mT, rows64.mT, self._extent.over_rows(), terms=_BLOCK)
            yield sums.view(*weights.shape[:2], -1)


class _OwnEntries:
    """:class:`_Entries` of tokens each of which has rows of its own."""

    def __init__(self, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, ok: torch.Tensor) -> None:
        self._q = q
        self._rows = kv.index_select(0, torch.where(ok, indices, 0).flatten()).view(*ok.shape, -1)
        self._extent = _Extent.of(self._rows)
        if not self._extent.finite():
            # 0 * inf is NaN, and an entry that is not valid stands for some row that is there.
            self._rows[~ok] = 0
            self._extent = _Extent.of(self._rows)
        self._rows64 = self._rows.double()

    def scores(self) -> torch.Tensor:
        return _mm_rn(self._q, _Extent.of(self._q), self._rows, self._rows64, self._extent)

    def weighted_sums(self, p: torch.Tensor) -> Iterator[torch.Tensor]:
        tokens, _, blocks, _ = p.shape
        weights = p.transpose(1, 2).flatten(0, 1)
        rows, rows64 = (x.unflatten(1, (blocks, _BLOCK)).flatten(0, 1).mT for x in (self._rows, self._rows64))
        extent = _Extent(*(x.view(tokens * blocks, _BLOCK) for x in self._extent)).over_rows()
        sums = _mm_rn(weights, _Extent.of(weights), rows, rows64, extent)
        yield from sums.view(tokens, blocks, *sums.shape[1:]).unbind(1)


class _Extent(NamedTuple):
    """What bounds the products of rows of bfloat16.

    Attributes:
        largest: ``(..., rows)`` float64, the greatest magnitude.
        grain: ``(..., rows)`` float64, a power of two of which every element is a multiple.
    """

    largest: torch.Tensor
    grain: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> _Extent:
        """Of every row of ``x`` ``(..., rows, n)``, from the bits, which order as the magnitudes do."""
        magnitude = x.view(torch.int16) & 0x7FFF
        largest = magnitude.amax(-1).view(torch.bfloat16).double()
        smallest = magnitude.sub_(1).bitwise_and_(0x7FFF).amin(-1)  # but zero: less one, zeros come last
        # The unit of the last bit of the smallest.
        exponent = ((smallest.long() + 1) >> 7).clamp(min=1, max=254)
        return cls(largest, ((exponent - (127 + 7) + 1023) << 52).view(torch.float64))

    def finite(self) -> bool:
        """Whether every element is finite."""
        return math.isfinite(float(self.largest.max())) if self.largest.numel() else True

    def over_rows(self) -> _Extent:
        """One extent, ``(..., 1)``, for every column of the same matrix."""
        return _Extent(self.largest.amax(-1, keepdim=True), self.grain.amin(-1, keepdim=True))


def _mm_rn(
    a: torch.Tensor, of_a: _Extent, b: torch.Tensor, b64: torch.Tensor, of_b: _Extent, *, terms: int | None = None
) -> torch.Tensor:
    """``numerics.mm_rn(a, b)``, bit for bit, for bfloat16 ``b`` whose float64 copy ``b64`` is at hand.

    The two are equal because both are correctly rounded. This one knows beforehand that nearly all sums are exact in
    float64: partial sums are multiples of the product of the grains, below the number of terms times the product of
    the greatest, and 53 bits hold them. Pairs for which that is not certain are looked at again.

    Args:
        a: ``(..., M, K)``.
        of_a: Its rows' extents.
        b: ``(..., N, K)`` bfloat16.
        b64: ``b.double()``.
        of_b: Its rows' extents, or one for all.
        terms: How many magnitudes up to ``of_a.largest`` a row of ``a`` adds up to at most; None for ``K``.
    """
    s = a.double() @ b64.mT
    result = s.float().add_(0.0)  # -0 + 0 = +0
    sum_a = of_a.largest * (terms or a.shape[-1])
    span_a, span_b = sum_a / of_a.grain, of_b.largest / of_b.grain
    spans = span_a.unsqueeze(-1) * span_b.unsqueeze(-2)
    if spans.numel() == 0 or bool(spans.max() < 2.0**52):
        return result
    where = (~(spans < 2.0**52)).expand_as(s).nonzero(as_tuple=True)
    left, right = where[:-1], (*where[:-2], where[-1])
    # Against the order of summation: K units of the sum of magnitudes, and a few more for the bounds themselves.
    largest_b = of_b.largest.expand(*s.shape[:-2], s.shape[-1])
    found, bound = s[where], (a.shape[-1] + 8) * _F64_UNIT * sum_a[left] * largest_b[right]
    unsettled = (((found - bound).float() != (found + bound).float()) & torch.isfinite(found)).nonzero()[:, 0]
    if len(unsettled):
        left, right = (tuple(index[unsettled] for index in side) for side in (left, right))
        result[(*left, right[-1])] = mm_rn(a[left].unsqueeze(-2), b[right].unsqueeze(-2)).flatten()
    return canonical_nan(result)
