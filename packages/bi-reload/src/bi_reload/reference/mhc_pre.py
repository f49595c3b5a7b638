"""Specification of ``bi_reload::mhc_pre`` and ``bi_reload::mhc_pre_broadcast``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bi_kernels.reference.numerics import canonical_nan, exp, mm_rn, sqrt, to_bf16, tree_sum
from bi_kernels.runtime.checks import check_value

__all__ = [
    "BLOCK_K",
    "HC_MULT",
    "MhcPre",
    "MhcPreBroadcast",
    "collapse_streams",
    "mhc_num_splits",
    "mhc_pre",
    "mhc_pre_broadcast",
    "mix_and_collapse",
    "prenorm_projection",
    "projection_error_bound",
    "reciprocal_rms",
    "squares_relative_error",
]

HC_MULT = 4
"""Residual streams of DeepSeek-V4."""

BLOCK_K = 64
"""Granularity of the split of K."""

_PIECE_BLOCKS = 16  # what one thread block of the kernel takes, a warp per block
_ROWS = 64  # rows per tile: keeps the float64 copies of a tile in cache. Rows are independent, so it moves no bit.


class MhcPre(NamedTuple):
    """Result of :func:`mhc_pre`.

    Attributes:
        layer_input: ``(T, H)`` bfloat16, what the attention or the feed-forward reads.
        post_mix: ``(T, 4)`` float32, weight of the layer's output in each stream.
        comb_mix: ``(T, 4, 4)`` float32, ``[j, k]`` = weight of old stream j in new stream k.
    """

    layer_input: torch.Tensor
    post_mix: torch.Tensor
    comb_mix: torch.Tensor


class MhcPreBroadcast(NamedTuple):
    """Result of :func:`mhc_pre_broadcast`: as :class:`MhcPre`, and the streams that it starts.

    Attributes:
        layer_input: ``(T, H)`` bfloat16.
        post_mix: ``(T, 4)`` float32.
        comb_mix: ``(T, 4, 4)`` float32.
        residual: ``(T, 4, H)`` bfloat16, ``x`` in every stream.
    """

    layer_input: torch.Tensor
    post_mix: torch.Tensor
    comb_mix: torch.Tensor
    residual: torch.Tensor


def mhc_num_splits(k: int) -> int:
    """Number of pieces that the pre-norm projection cuts its sum into.

    Args:
        k: Length of the sum, a multiple of 64, at least 128: ``4 * hidden``, or ``hidden`` for the broadcast form.

    Returns:
        One per 1024, rounded up, so that no piece is longer; at least 2: one piece is about 7 times slower on a GPU.

    Raises:
        ArgumentError: ``k`` is not such a number.

    Invariance:
        A function of ``k`` alone: neither the number of tokens nor that of the GPU's multiprocessors is asked.
    """
    check_value(
        "k", k >= 2 * BLOCK_K and k % BLOCK_K == 0, "a multiple of 64, at least 128", k, "Use a hidden size that fits."
    )
    return max(2, -(-k // (_PIECE_BLOCKS * BLOCK_K)))


def prenorm_projection(x: torch.Tensor, fn: torch.Tensor, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Project rows and sum their squares, both over the same split of K.

    K is cut at multiples of 64; where the blocks do not divide evenly the first pieces are one block longer. Each
    piece of the projection is the exact dot product rounded once; each piece of the sum of squares is a fixed tree.
    Pieces are added ascending in float32.

    Args:
        x: ``(T, K)`` bfloat16.
        fn: ``(N, K)`` float32.
        num_splits: Number of pieces, at most ``K // 64``.

    Returns:
        ``(T, N)`` float32 and ``(T,)`` float32.
    """
    num_tokens, k = x.shape
    projection = torch.empty(num_tokens, fn.shape[0])
    sum_squares = torch.empty(num_tokens)
    for start in range(0, num_tokens, _ROWS):
        rows = x[start : start + _ROWS]
        products: list[torch.Tensor] = []
        squares: list[torch.Tensor] = []
        for offset, width, count in _split_groups(k, num_splits):
            piece = slice(offset, offset + width * count)
            pieces = rows[:, piece].reshape(len(rows), count, width)
            products += mm_rn(pieces.transpose(0, 1), fn[:, piece].reshape(-1, count, width).transpose(0, 1)).unbind(0)
            squares += tree_sum(pieces.float().square()).unbind(1)  # squares of bfloat16 values are exact
        projection[start : start + _ROWS] = _add_ascending(products)
        sum_squares[start : start + _ROWS] = _add_ascending(squares)
    return projection, sum_squares


def projection_error_bound(x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """How far any implementation's product may be from the exact one, elementwise.

    The CUDA kernel cuts a weight into three bfloat16 numbers whose magnitudes add up to its own, and sums a block's 3 *
    64 products in a matrix unit that rounds or truncates to float32 (as for ``bi_kernels``' ``fixed_order_mm``: at most
    ``2**-23`` of the sum of magnitudes per addition), then up to 16 blocks, then the pieces. What the cut drops of a
    tiny weight is below ``2**-133``. The reference's pieces are rounded once, so it stays within this too.

    Args:
        x: ``(T, K)`` bfloat16, any device.
        fn: ``(N, K)`` float32.

    Returns:
        ``(T, N)`` float64.
    """
    size, k = x.double().abs(), x.shape[1]
    additions = 3 * BLOCK_K + _PIECE_BLOCKS + mhc_num_splits(k)
    return additions * 2.0**-23 * (size @ fn.double().abs().mT) + size.sum(1, keepdim=True) * 2.0**-133 + k * 2.0**-149


def squares_relative_error(k: int) -> float:
    """How far, relative to it, any implementation's sum of ``k`` squares may be from the exact sum of a token.

    Roundings that one square passes: in the reference a tree over a piece, then the pieces; in the CUDA kernel 16 in a
    lane, 2 among four lanes, 15 among warps, then the pieces.
    """
    return (16 + 2 + 15 + mhc_num_splits(k)) * 2.0**-24


def reciprocal_rms(sum_squares: torch.Tensor, count: int, eps: float) -> torch.Tensor:
    """``1 / sqrt(sum_squares / count + eps)`` in float32, each step rounded once."""
    return 1.0 / sqrt(sum_squares / count + eps)


def collapse_streams(pre: torch.Tensor, streams: list[torch.Tensor]) -> torch.Tensor:
    """Sum of ``pre[j] * streams[j]``, j ascending, multiply then add in float32, rounded once to bfloat16.

    Args:
        pre: ``(4, T)`` float32.
        streams: Four ``(T, H)`` bfloat16.
    """
    return to_bf16(_add_ascending([weight[:, None] * row.float() for weight, row in zip(pre, streams, strict=True)]))


def mix_and_collapse(
    streams: list[torch.Tensor],
    projection: torch.Tensor,
    inverse_rms: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None,
    hc_eps: float,
    norm_eps: float,
    sinkhorn_iters: int,
    post_mult: float,
) -> MhcPre:
    """Everything after the projection: gates, Sinkhorn, weighted sum of the streams, optional RMSNorm.

    Tokens are the last dimension until the gates are done: 24 contiguous rows make the 4-term sums few torch calls.
    """
    group = torch.tensor([0] * 4 + [1] * 4 + [2] * 16)
    logits = (projection * inverse_rms[:, None]).t().contiguous() * scale[group, None] + base[:, None]
    comb = logits[8:].view(HC_MULT, HC_MULT, -1)  # [old stream, new stream, token]
    shifted = comb - comb.amax(1, keepdim=True)
    # One exponential for the gates' sigmoids (1 / (1 + exp(-x))) and the softmax: it is most of the torch calls.
    exponentials = exp(torch.cat([-logits[:8], shifted.flatten(0, 1)]))
    gates = 1.0 / (1.0 + exponentials[:8])
    pre, post = gates[:4] + hc_eps, gates[4:] * post_mult

    comb = exponentials[8:].view(comb.shape)
    # In place, on views that stay: these are most of the torch calls.
    by_column, by_row = comb.unbind(1), comb.unbind(0)
    total = torch.empty_like(by_row[0])
    comb.div_(_add_ascending_(by_column, total).unsqueeze(1)).add_(hc_eps)
    comb.div_(_add_ascending_(by_row, total).add_(hc_eps))
    for _ in range(sinkhorn_iters - 1):
        comb.div_(_add_ascending_(by_column, total).add_(hc_eps).unsqueeze(1))
        comb.div_(_add_ascending_(by_row, total).add_(hc_eps))

    layer_input = collapse_streams(pre, streams)
    if norm_weight is not None:
        value = layer_input.float()
        inverse = reciprocal_rms(tree_sum(value * value), value.shape[-1], norm_eps)
        layer_input = to_bf16((value * inverse[:, None]) * norm_weight.float())
    return MhcPre(layer_input, canonical_nan(post.t().contiguous()), canonical_nan(comb.permute(2, 0, 1).contiguous()))


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    sinkhorn_iters: int = 20,
    post_mult: float = 2.0,
) -> MhcPre:
    """As :func:`bi_reload.mhc_pre`, which says what each argument is.

    Invariance:
        Row ``i`` of every result is a function of ``residual[i]`` and the weights alone.
    """
    k = residual.shape[1] * residual.shape[2]
    projection, sum_squares = prenorm_projection(residual.reshape(-1, k), fn, mhc_num_splits(k))
    return mix_and_collapse(
        list(residual.unbind(1)),
        projection,
        reciprocal_rms(sum_squares, k, rms_eps),
        scale,
        base,
        norm_weight=norm_weight,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
        sinkhorn_iters=sinkhorn_iters,
        post_mult=post_mult,
    )


def mhc_pre_broadcast(
    x: torch.Tensor,
    fn_broadcast: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    hc_eps: float,
    norm_eps: float,
    sinkhorn_iters: int = 20,
    post_mult: float = 2.0,
) -> MhcPreBroadcast:
    """As :func:`bi_reload.mhc_pre_broadcast`, which says what each argument is.

    Invariance:
        Row ``i`` of every result is a function of ``x[i]`` and the weights alone.
    """
    k = x.shape[1]
    projection, sum_squares = prenorm_projection(x, fn_broadcast, mhc_num_splits(k))
    mixed = mix_and_collapse(
        [x] * HC_MULT,
        projection,
        reciprocal_rms(sum_squares, k, rms_eps),
        scale,
        base,
        norm_weight=norm_weight,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
        sinkhorn_iters=sinkhorn_iters,
        post_mult=post_mult,
    )
    return MhcPreBroadcast(*mixed, residual=x[:, None].expand(-1, HC_MULT, -1).contiguous())


def _split_groups(k: int, num_splits: int) -> list[tuple[int, int, int]]:
    """``(offset, width, count)`` of the longer and of the shorter pieces."""
    blocks, longer = divmod(k // BLOCK_K, num_splits)
    width = blocks * BLOCK_K
    groups = [
        (0, width + BLOCK_K, longer),
        (longer * (width + BLOCK_K), width, num_splits - longer),
    ]
    return [group for group in groups if group[2]]


def _add_ascending_(terms: tuple[torch.Tensor, ...], total: torch.Tensor) -> torch.Tensor:
    """Write the sum of four terms to ``total``, ascending."""
    first, second, third, fourth = terms
    return torch.add(first, second, out=total).add_(third).add_(fourth)


def _add_ascending(terms: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
