"""A row's selection alone and among neighbours, bit for bit."""

from __future__ import annotations

import torch

from bi_kernels.testing import assert_batch_invariant, must_detect
from bi_sparse_attn import top_k_per_row_prefill

TOP_K = 24


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plateaus of zeros, as relu gives them, wider than what is selected; a range of its own per row."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.clamp(torch.randint(-8, 3, (6, 160), generator=generator), min=0).float()
    starts = torch.tensor([0, 1, 5, 60, 100, 7], dtype=torch.int32)
    ends = torch.tensor([160, 120, 160, 150, 110, 7], dtype=torch.int32)
    return logits, starts, ends


def select(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return top_k_per_row_prefill(logits, starts, ends, TOP_K)


def select_by_row_count(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Two selectors, each correct up to ties, chosen by the number of rows: what stock dispatch does (B26)."""
    if logits.shape[0] <= 32:
        return select(logits, starts, ends)
    columns = logits.shape[1]
    found = top_k_per_row_prefill(logits.flip(1), columns - ends, columns - starts, TOP_K)
    last = (ends - starts).unsqueeze(1) - 1
    return torch.where(found >= 0, last - found, -1)


def test_selection_is_batch_invariant() -> None:
    assert_batch_invariant(select, rows())


def test_the_driver_sees_a_selector_chosen_by_row_count() -> None:
    error = must_detect(select_by_row_count, rows())
    assert error.batch_size > 32
