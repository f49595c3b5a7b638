"""Precision policies of the small model: its real rounding, or float32 throughout.

The policy changes what numbers are rounded to and nothing else: which rows meet which, masks, top-k, index lists,
mHC, expert selection and staging are the packages' own code either way. It exists so that an independent model can
be compared with this one to more digits than FP8 leaves, see :mod:`aligned_e2e.oracle`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import bi_kernels as bk
import bi_moe_deepep as moe
import bi_reload as reload
import bi_sparse_attn as sparse
from bi_kernels.group_quant import dequantize_blocks
from bi_kernels.reference import silu_mul_quant
from bi_moe_deepep.reference import combine_ordered, stage_tokens
from bi_reload.reference import mhc_head, mhc_post, mhc_pre
from bi_sparse_attn.reference import mqa_logits

from . import layers, model, paged
from .replaced import Package, replaced

__all__ = ["float32"]

_BYTES = 4  # of a float32 in a page


@contextlib.contextmanager
def float32() -> Iterator[None]:
    """Inside the block the model's activations, caches and dequantised weights are float32, and nothing is quantised.

    For recomputation on one expert-parallel rank. Models must be built, and pages allocated, inside the block.
    """
    with contextlib.ExitStack() as stack:
        for module in (silu_mul_quant, mhc_pre, mhc_post):
            stack.enter_context(replaced(module, to_bf16=_same))
        stack.enter_context(replaced(layers, rounded=_same))
        stack.enter_context(replaced(paged, kv_block_bytes=_kv_bytes, index_k_block_bytes=_index_bytes))
        stack.enter_context(replaced(model, rounded=_same, bk=_BK, moe=_MOE, reload=_RELOAD, sparse=_SPARSE))
        yield


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.float() @ b.float().mT


def _not_quantised(x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.float(), torch.ones(*x.shape[:-1], x.shape[-1] // 128)


def _block_mm(x: torch.Tensor, _: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _mm(x, dequantize_blocks(weight, scale))


def _kv_bytes(block_size: int) -> int:
    return _BYTES * 512 * block_size


def _index_bytes(block_size: int) -> int:
    return _BYTES * 128 * block_size


def _insert(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, *, block_size: int) -> torch.Tensor:
    cache.view(torch.float32).view(-1, rows.shape[1])[slots] = rows
    return cache


def _gather(width: int) -> Callable[..., torch.Tensor]:
    def gather(cache: torch.Tensor, slots: torch.Tensor, *, block_size: int) -> torch.Tensor:
        return cache.view(torch.float32).view(-1, width)[slots]

    return gather


def _gather_index_k(cache: torch.Tensor, slots: torch.Tensor, *, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _gather(128)(cache, slots, block_size=block_size), torch.ones(len(slots))


def _attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    attn_sink: torch.Tensor,
    topk_length: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Softmax attention over the listed rows, with the sink in the denominator."""
    listed = torch.zeros(len(q), len(kv) + 1, dtype=torch.bool).scatter_(1, indices.long() % (len(kv) + 1), True)
    scores = torch.einsum("thd,nd->thn", q, kv) * sm_scale
    scores = scores.masked_fill(~listed[:, None, :-1], -torch.inf)
    sink = attn_sink[None, :, None].expand(len(q), -1, 1)
    out.copy_(torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ kv)


class _Dispatcher:
    """The staged dispatch and the ordered combine by their references, on one rank and in one slice."""

    def __init__(self, transport: moe.Transport, *, num_experts: int, capacity: int, num_slices: int) -> None:
        self._num_experts, self._capacity = num_experts, capacity * num_slices

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, None]:
        staged = stage_tokens.stage_tokens(x, ids, num_experts=self._num_experts, capacity=self._capacity)
        rows = experts(staged.x, staged.counts)
        combined = combine_ordered.combine_ordered(rows, staged.slots, weights, out_dtype=torch.float32)
        return combined, None


def _expert_mlp(
    x: torch.Tensor,
    counts: torch.Tensor,
    w13: torch.Tensor,
    s13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    *,
    arch: bk.Arch,
    clamp_limit: float | None,
) -> torch.Tensor:
    hidden = torch.stack([_block_mm(rows, rows, *weight) for rows, *weight in zip(x, w13, s13, strict=True)])
    hidden = silu_mul_quant.silu_and_mul(hidden, clamp_limit=clamp_limit, arch=arch)
    return torch.stack([_block_mm(rows, rows, *weight) for rows, *weight in zip(hidden, w2, s2, strict=True)])


def _first_mhc_pre(x: torch.Tensor, *weights: torch.Tensor, **options: Any) -> mhc_pre.MhcPreBroadcast:
    return mhc_pre.mhc_pre_broadcast(x.float(), *weights, **options)  # the residual takes the embedding's dtype


_BK = Package(
    bk, per_token_group_quant_fp8=_not_quantised, fixed_order_mm=_mm, silu_and_mul=silu_mul_quant.silu_and_mul
)
_MOE = Package(moe, fp8_gemm_nt=_block_mm, router_gate_logits=_mm, StagedDispatcher=_Dispatcher, expert_mlp=_expert_mlp)
_RELOAD = Package(
    reload,
    mhc_pre=mhc_pre.mhc_pre,
    mhc_pre_broadcast=_first_mhc_pre,
    mhc_post=mhc_post.mhc_post,
    mhc_head=mhc_head.mhc_head,
)
_SPARSE = Package(
    sparse,
    quantize_and_insert_kv_=_insert,
    gather_kv=_gather(512),
    quantize_and_insert_index_k_=_insert,
    gather_index_k=_gather_index_k,
    mqa_logits=mqa_logits.mqa_logits,
    sparse_mla_fwd=_attention,
)
