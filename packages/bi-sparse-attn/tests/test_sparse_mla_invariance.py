"""A token's attention alone and among neighbours, bit for bit."""

from __future__ import annotations

import torch

from bi_kernels.testing import assert_batch_invariant, must_detect
from bi_sparse_attn import sparse_mla_fwd

ROWS, SCALE = 160, 512**-0.5
SIZES = (2, 17, 129)
GENERATOR = torch.Generator().manual_seed(0)
KV = torch.randn(ROWS, 512, generator=GENERATOR).bfloat16()
SINK = torch.tensor([0.5, -2.0])


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(5, 2, 512, generator=GENERATOR).bfloat16()
    indices = torch.stack([torch.randperm(ROWS, generator=GENERATOR)[:128].sort().values for _ in range(5)]).int()
    lengths = torch.tensor([128, 100, 65, 3, 0], dtype=torch.int32)
    return q, indices, lengths


def attend(q: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return sparse_mla_fwd(q, KV, indices, sm_scale=SCALE, attn_sink=SINK, topk_length=lengths)


def attend_split_by_batch(q: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Split-KV: few tokens are cut into parts that are merged afterwards, as a decode kernel's planner does (B33)."""
    if len(q) > 16:
        return attend(q, indices, lengths)[0]
    parts = [
        sparse_mla_fwd(q, KV, torch.nn.functional.pad(half, (0, 64), value=-1), sm_scale=SCALE, topk_length=length)
        for half, length in ((indices[:, :64], lengths.clamp(max=64)), (indices[:, 64:], (lengths - 64).clamp(min=0)))
    ]
    logs = torch.stack([torch.where(part.max_logits == -torch.inf, -torch.inf, part.lse) for part in parts])
    weights = torch.exp(logs - torch.logsumexp(torch.cat([logs, SINK.expand(1, len(q), 2)]), 0))
    merged = sum(w.unsqueeze(-1) * part.out.float() for w, part in zip(weights, parts, strict=True))
    return torch.as_tensor(merged).bfloat16()


def test_attention_is_batch_invariant() -> None:
    assert_batch_invariant(attend, rows(), batch_sizes=SIZES)


def test_the_driver_sees_a_split_that_follows_the_batch() -> None:
    must_detect(attend_split_by_batch, rows(), batch_sizes=SIZES)
