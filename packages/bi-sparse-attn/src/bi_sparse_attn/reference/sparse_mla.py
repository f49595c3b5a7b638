"""Reference of sparse MLA: blocks of 64 list entries in order, a running maximum, P rounded to bfloat16."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bi_kernels.reference.numerics import canonical_nan, exp, exp_f64, log, mm_rn, to_bf16, tree_sum

__all__ = ["SparseMlaOutput", "sparse_mla_fwd"]

_BLOCK = 64  # list entries that share one running maximum: part of the arithmetic
_TOKEN_TILE = 128  # tokens worked on together: bounds memory, no part of the arithmetic
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
    max_logits = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    lse = torch.empty_like(max_logits)
    column = torch.arange(indices.shape[1], device=q.device)
    valid = (indices >= 0) & (indices < kv.shape[0])
    if topk_length is not None:
        valid &= column < topk_length.unsqueeze(1)
    for first in range(0, tokens, _TOKEN_TILE):
        part = slice(first, first + _TOKEN_TILE)
        acc, den, m = _attend(q[part], kv, indices[part].long(), valid[part], sm_scale)
        total = den if attn_sink is None else den + exp(attn_sink - m)
        empty = m == -torch.inf
        out[part] = torch.where(empty.unsqueeze(-1), 0.0, to_bf16(acc / total.unsqueeze(-1)))
        max_logits[part] = canonical_nan(m)
        lse[part] = torch.where(empty, torch.inf, canonical_nan(m + log(den)))
    return SparseMlaOutput(out, max_logits, lse)


def _attend(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, valid: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(acc, den, m)`` after every block of the tokens' lists."""
    acc = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    m = torch.full(q.shape[:2], -torch.inf, device=q.device)
    den = torch.zeros_like(m)
    for first in range(0, indices.shape[1], _BLOCK):
        ok = valid[:, first : first + _BLOCK]
        if not bool(ok.any()):
            continue  # m, den and acc would come out as they are: alpha is 1 and every p is 0
        block = _Block(kv, indices[:, first : first + _BLOCK], ok)
        s = block.scores(q) * torch.tensor(sm_scale, dtype=torch.float32) + 0.0  # -0 + 0 = +0: max() may return either
        s = torch.where(ok.unsqueeze(1), s, -torch.inf)
        new_m = torch.maximum(m, s.amax(-1))
        shift = torch.where(new_m == -torch.inf, 0.0, new_m).unsqueeze(-1)
        # One call for alpha and P: exp works element by element.
        powers = exp_f64((torch.cat([m.unsqueeze(-1), s], dim=2) - shift).double()).float()
        alpha, p = powers[..., :1], powers[..., 1:]
        den = den * alpha.squeeze(-1) + tree_sum(p)
        acc = acc * alpha + block.weighted_sum(p.bfloat16())
        m = new_m
    return acc, den, m


class _Block:
    """The K rows (which are the V rows) of one block of list entries, laid out in whichever of two ways is cheaper.

    Where tokens share rows (prefill) the distinct rows are multiplied with all queries at once, and P is spread over
    them. Where they do not (decode) every token multiplies its own rows. Either way gives correctly rounded dot
    products of the same numbers, up to terms that are exactly zero. So the choice, which the batch decides, cannot
    show.
    """

    def __init__(self, kv: torch.Tensor, indices: torch.Tensor, ok: torch.Tensor) -> None:
        rows, column = torch.unique(torch.where(ok, indices, indices[ok][0]), return_inverse=True)
        self.rows = kv[rows]
        # 0 * inf is NaN: a row that is not finite must not meet the zero weights of tokens that do not list it.
        self.shared = _SHARING * rows.shape[0] <= indices.numel() and bool(torch.isfinite(self.rows).all())
        self.column = column.unsqueeze(1)
        if not self.shared:
            self.rows = self.rows[column]
            self.rows[~ok] = 0
        self.rows64 = self.rows.double()

    def scores(self, q: torch.Tensor) -> torch.Tensor:
        """Dot products of ``q`` ``(tokens, heads, 512)`` with the entries' rows: ``(tokens, heads, entries)``."""
        if not self.shared:
            return _mm_rn(q, _grain(q), self.rows, self.rows64)
        q = q.flatten(0, 1)
        dots = _mm_rn(q, _grain(q), self.rows, self.rows64).view(self.column.shape[0], -1, self.rows.shape[0])
        return torch.gather(dots, 2, self.column.expand(-1, dots.shape[1], -1))

    def weighted_sum(self, p: torch.Tensor) -> torch.Tensor:
        """Sum of the rows with bfloat16 weights ``p`` ``(tokens, heads, entries)``: ``(tokens, heads, 512)``."""
        if not self.shared:
            return _mm_rn(p, _grain(p), self.rows.mT, self.rows64.mT)
        # A list that names a row several times adds equal 8-bit weights to each other: exact in float32, in any order.
        spread = torch.zeros((*p.shape[:2], self.rows.shape[0]), dtype=torch.float32, device=p.device)
        spread.scatter_add_(2, self.column.expand(p.shape), p.float())
        weights, grain = spread.flatten(0, 1), _grain(p).flatten(0, 1)
        return _mm_rn(weights, grain, self.rows.mT, self.rows64.mT).view(*p.shape[:2], -1)


def _mm_rn(a: torch.Tensor, grain: torch.Tensor, b: torch.Tensor, b64: torch.Tensor) -> torch.Tensor:
    """``numerics.mm_rn(a, b)``, bit for bit, for bfloat16 ``b`` whose float64 copy ``b64`` is at hand.

    The two are equal because both are correctly rounded. The bounds are cheaper here: ``sum_i |a_i b_i|`` is at most
    ``sum_i |a_i| max_i |b_i|``, and extremes are found on the bits. What they leave unsettled goes to ``mm_rn``.

    Args:
        a: ``(..., M, K)``.
        grain: ``(..., M)`` float64, powers of two of which the elements of a row are multiples.
        b: ``(..., N, K)`` bfloat16.
        b64: ``b.double()``.
    """
    a64 = a.double()
    s = a64 @ b64.mT
    k = a.shape[-1]
    total = a64.abs().sum(-1).unsqueeze(-1) * _magnitude(b).amax(-1).view(torch.bfloat16).double().unsqueeze(-2)
    # Partial sums are multiples of the product of the grains. Where 53 bits hold them, s is exact.
    exact = total < (grain.unsqueeze(-1) * _grain(b).unsqueeze(-2)) * 2.0**52
    bound = torch.where(exact, 0.0, (k + 8) * _F64_UNIT * total)
    result = s.float() + 0.0  # -0 + 0 = +0
    unsettled = ((s - bound).float() != (s + bound).float()) & torch.isfinite(s)
    if bool(unsettled.any()):
        where = torch.nonzero(unsettled, as_tuple=True)
        pairs = mm_rn(a[where[:-1]].unsqueeze(-2), b[(*where[:-2], where[-1])].unsqueeze(-2))
        result[where] = pairs.flatten()
    return canonical_nan(result)


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """Bits of ``|x|`` as int16, which order as the magnitudes do; ``x`` bfloat16."""
    return x.view(torch.int16) & 0x7FFF


def _grain(x: torch.Tensor) -> torch.Tensor:
    """Per row of bfloat16 ``x``, the unit of the last bit of its smallest non-zero element, as float64."""
    smallest = ((_magnitude(x) - 1) & 0x7FFF).amin(-1)  # less one, so that zeros come last
    exponent = ((smallest.long() + 1) >> 7).clamp(min=1, max=254)
    return ((exponent - (127 + 7) + 1023) << 52).view(torch.float64)
