"""mHC in float64, with bounds on the float32 ops' errors. Any device. The tests get it as a fixture.

Forward error analysis; every constant counts roundings.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from bi_reload import MhcPre, MhcPreBroadcast, mhc_num_splits
from bi_reload.reference.mhc_pre import projection_error_bound, squares_relative_error

U = 2.0**-24  # unit roundoff of float32
U_BF16 = 2.0**-8
SECOND_ORDER = 1.001  # the bounds drop products of roundoffs


class ProjectionError(NamedTuple):
    """Bounds on the product's error, ``(T, N)``, and on the relative one of the sum of squares."""

    product: torch.Tensor
    squares: float


def reference_error(x: torch.Tensor, fn: torch.Tensor) -> ProjectionError:
    """Of the reference: pieces rounded once, squares in a tree."""
    k = x.shape[1]
    splits = mhc_num_splits(k)
    depth = math.ceil(math.log2(k / splits + 64))
    return ProjectionError(splits * U * (x.double().abs() @ fn.double().abs().T), (depth + splits) * U)


def kernel_error(x: torch.Tensor, fn: torch.Tensor) -> ProjectionError:
    """Of any implementation."""
    return ProjectionError(projection_error_bound(x, fn), squares_relative_error(x.shape[1]))


def logits(
    flat: torch.Tensor, fn: torch.Tensor, factor: torch.Tensor, base: torch.Tensor, error: ProjectionError
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(T, N)`` logits and their bound."""
    x, w = flat.double(), fn.double()
    inverse = 1 / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
    mixes = (x @ w.T) * inverse
    # Under the root: the sum, its division and eps. Then root, inverse and product.
    mix_error = error.product * inverse + mixes.abs() * ((error.squares + 2 * U) / 2 + 3 * U)
    value = mixes * factor + base.double()
    return value, factor * mix_error + U * (mixes * factor).abs() + U * value.abs()


def gates(
    flat: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    iters: int,
    error: ProjectionError,
) -> Any:
    """pre, post and comb, each ``(value, bound)``.

    Sinkhorn: with comb = diag(r) A diag(c), one half-step maps c to 1 / (A^T r + ...), which is monotone and
    homogeneous, so it does not expand max |log(c / c')|. Errors of the 2 * iters - 1 half-steps (three additions, eps,
    its addition, a division: 6 roundings) therefore add up, and reach an element through A, r and c: a factor of 3.
    """
    factor = scale.double().repeat_interleave(torch.tensor([4, 4, 16], device=scale.device))
    value, value_error = logits(flat, fn, factor, base, error)
    gate = torch.sigmoid(value[:, :8])
    gate_error = value_error[:, :8] / 4 + 4 * U * gate
    pre, post = gate[:, :4] + 1e-6, gate[:, 4:] * 2
    pre_error, post_error = gate_error[:, :4] + U * pre, gate_error[:, 4:] * 2 + U * post

    comb_logits = value[:, 8:].unflatten(1, (4, 4))
    comb = torch.softmax(comb_logits, -1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    spread = comb_logits.amax((1, 2)) - comb_logits.amin((1, 2))
    start = 2 * (2 * value_error[:, 8:].amax(1) + U * spread + 2 * U) + 5 * U
    comb_error = comb * (3 * (start + (2 * iters - 1) * 6 * U))[:, None, None]
    bounds = [SECOND_ORDER * e for e in (pre_error, post_error, comb_error)]
    return list(zip((pre, post, comb), bounds, strict=True))


def check_mix(result: torch.Tensor, streams: torch.Tensor, pre: torch.Tensor, pre_error: torch.Tensor) -> None:
    """The mixed streams before any norm."""
    value = (pre[:, :, None] * streams.double()).sum(1)
    error = ((pre_error + pre * 4 * U)[:, :, None] * streams.double().abs()).sum(1)
    rounding = U_BF16 * (value.abs() + error)
    assert ((result.double() - value).abs() <= SECOND_ORDER * (error + rounding)).all()


def check_gates(result: MhcPre | MhcPreBroadcast, streams: torch.Tensor, gates: Any) -> None:
    (pre, pre_error), (post, post_error), (comb, comb_error) = gates
    assert ((result.post_mix.double() - post).abs() <= post_error).all()
    assert ((result.comb_mix.double() - comb).abs() <= comb_error).all()
    check_mix(result.layer_input, streams, pre, pre_error)


def check_norm(plain: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor, depth: float) -> None:
    """``normed`` is the RMSNorm of ``plain``; a square passes at most ``depth`` roundings on its way to the sum."""
    y = plain.double()
    want = y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    roundings = (depth + 2) / 2 + 4  # sum, division and eps under a root; root, inverse, products
    assert ((normed.double() - want).abs() <= want.abs() * SECOND_ORDER * (U_BF16 + roundings * U)).all()


def check_head(
    result: torch.Tensor,
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    error: ProjectionError,
) -> None:
    value, value_error = logits(residual.flatten(1), fn, scale.double(), base, error)
    pre = torch.sigmoid(value) + 1e-6
    check_mix(result, residual, pre, SECOND_ORDER * (value_error / 4 + 5 * U * pre))
