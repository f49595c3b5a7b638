from __future__ import annotations

import torch

from bi_kernels import ScaleFormat, per_block_quant_fp8, per_token_group_quant_fp8
from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, must_detect
from bi_moe_deepep import fp8_gemm_nt, m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked

GENERATOR = torch.Generator().manual_seed(0)
K, N, NUM_EXPERTS = 512, 32, 3
FORMAT = ScaleFormat.FLOAT32_CEIL_UE8M0
Q, S = per_token_group_quant_fp8(torch.randn(5, K, generator=GENERATOR).bfloat16(), scale_format=FORMAT)
WEIGHTS = [per_block_quant_fp8(torch.randn(N, K, generator=GENERATOR), scale_format=FORMAT) for _ in range(NUM_EXPERTS)]
WQ, WS = (torch.stack(parts) for parts in zip(*WEIGHTS, strict=True))
EXPERT = torch.tensor([0, 2, 1, 2, 0], dtype=torch.int32)


def dense(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return fp8_gemm_nt(q, s, WQ[0], WS[0], out_dtype=torch.float32)


def contiguous(q: torch.Tensor, s: torch.Tensor, m_indices: torch.Tensor) -> torch.Tensor:
    return m_grouped_fp8_gemm_nt_contiguous(q, s, WQ, WS, m_indices, out_dtype=torch.float32)


def masked(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """All rows in expert 1; expert 0 is empty, expert 2 has them in reverse and must not matter."""
    q3 = torch.stack([q.view(torch.uint8)] * 2 + [q.view(torch.uint8).flip(0)]).view(q.dtype)
    counts = torch.tensor([0, len(q), max(len(q) - 1, 0)], dtype=torch.int32)
    return m_grouped_fp8_gemm_nt_masked(q3, torch.stack([s, s, s.flip(0)]), WQ, WS, counts, out_dtype=torch.float32)[1]


def split_k_by_m(q: torch.Tensor, s: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Batch-dependent on purpose: many rows fill a GPU, few do not, and so K is split for the few."""
    if len(q) >= 64:
        return dense(q, s)
    half = K // 2
    return fp8_gemm_nt(
        q[:, :half].contiguous(), s[:, :2], WQ[0, :, :half].contiguous(), WS[0, :, :2], out_dtype=torch.float32
    ) + fp8_gemm_nt(
        q[:, half:].contiguous(), s[:, 2:], WQ[0, :, half:].contiguous(), WS[0, :, 2:], out_dtype=torch.float32
    )


def test_dense_rows_do_not_depend_on_the_batch() -> None:
    assert_batch_invariant(dense, (Q, S), batch_sizes=(*QUICK_BATCH_SIZES, 257))


def test_contiguous_rows_do_not_depend_on_the_batch() -> None:
    assert_batch_invariant(contiguous, (Q, S, EXPERT), batch_sizes=QUICK_BATCH_SIZES)


def test_masked_rows_do_not_depend_on_the_batch_nor_on_the_counts() -> None:
    assert_batch_invariant(masked, (Q, S), batch_sizes=QUICK_BATCH_SIZES)


def test_a_split_chosen_from_m_is_noticed() -> None:
    must_detect(split_k_by_m, (Q, S))
    must_detect(split_k_by_m, (Q, S, EXPERT), batch_sizes=QUICK_BATCH_SIZES)
