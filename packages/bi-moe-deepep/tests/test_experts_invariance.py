from __future__ import annotations

import torch

from bi_kernels import Arch, ScaleFormat, per_block_quant_fp8
from bi_kernels.testing import assert_batch_invariant, must_detect
from bi_moe_deepep import expert_mlp, expert_mlp_contiguous

GENERATOR = torch.Generator().manual_seed(0)
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 2, 256, 128
SIZES = (1, 2, 17, 65)
X = torch.randn(3, HIDDEN, generator=GENERATOR).bfloat16()
EXPERT = torch.tensor([0, 1, 1], dtype=torch.int32)


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [
        per_block_quant_fp8(torch.randn(n, k, generator=GENERATOR) / 16, scale_format=ScaleFormat.FLOAT32_CEIL_UE8M0)
        for _ in range(NUM_EXPERTS)
    ]
    return torch.stack([q for q, _ in parts]), torch.stack([s for _, s in parts])


W = (*weight(2 * INTERMEDIATE, HIDDEN), *weight(HIDDEN, INTERMEDIATE))


def masked(x: torch.Tensor, arch: Arch = Arch.SM90) -> torch.Tensor:
    """All rows with expert 1, whose neighbour holds the same rows in reverse."""
    counts = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
    return expert_mlp(torch.stack([x.flip(0), x]), counts, *W, arch=arch, clamp_limit=10.0)[1]


def contiguous(x: torch.Tensor, m_indices: torch.Tensor) -> torch.Tensor:
    return expert_mlp_contiguous(x, m_indices, *W, arch=Arch.SM100, clamp_limit=10.0)


def activation_chosen_from_the_batch(x: torch.Tensor) -> torch.Tensor:
    """Batch-dependent on purpose: few rows get the other architecture's rounding."""
    return masked(x, Arch.SM90 if len(x) >= 17 else Arch.SM100)


def test_masked_rows_do_not_depend_on_the_batch() -> None:
    assert_batch_invariant(masked, X, batch_sizes=SIZES)


def test_contiguous_rows_do_not_depend_on_the_batch() -> None:
    assert_batch_invariant(contiguous, (X, EXPERT), batch_sizes=SIZES)


def test_an_activation_chosen_from_the_batch_is_noticed() -> None:
    must_detect(activation_chosen_from_the_batch, X, batch_sizes=SIZES)
