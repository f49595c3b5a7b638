from __future__ import annotations

import torch

from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect
from bi_reload import mhc_post

SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 1000)


def _rows(tokens: int) -> tuple[torch.Tensor, ...]:
    x, residual = torch.randn(tokens, 61).bfloat16(), torch.randn(tokens, 4, 61).bfloat16()
    return x, residual, torch.rand(tokens, 4) * 2, torch.softmax(torch.randn(tokens, 4, 4), -1)


def test_mhc_post() -> None:
    rows = _rows(4)
    rows[0][3] = torch.nan  # NaN rows too: a vector lane and a scalar tail must write the same NaN
    assert_batch_invariant(mhc_post, rows, batch_sizes=SIZES)


def test_permuted_tokens_give_permuted_bits() -> None:
    rows = _rows(257)
    order = torch.randperm(257)
    assert_bitwise_equal(mhc_post(*(t[order] for t in rows)), mhc_post(*rows)[order])


def test_twin_that_rounds_the_layer_first_above_16_tokens_is_detected() -> None:
    def twin(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        total = post[:, :, None] * x[:, None].float()
        if len(x) > 16:
            total = total.bfloat16().float()
        for j in range(4):
            total = total + comb[:, j, :, None] * residual[:, j, None].float()
        return total.bfloat16()

    assert must_detect(twin, _rows(4), batch_sizes=(15, 16, 17)).batch_size == 17
