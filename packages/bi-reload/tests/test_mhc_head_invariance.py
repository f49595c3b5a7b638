from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect
from bi_reload import mhc_head
from bi_reload.reference.mhc_pre import collapse_streams, prenorm_projection, reciprocal_rms

SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 1000)
EPS = {"rms_eps": 1e-6, "hc_eps": 1e-6}
Weights = Callable[..., Any]


def test_mhc_head(mhc_weights: Weights) -> None:
    weights = mhc_weights(512, 4, 1)
    rows = torch.randn(3, 4, 128).bfloat16()
    assert_batch_invariant(
        lambda residual: mhc_head(residual, *weights, **EPS), rows, batch_sizes=SIZES, neighbours=("random", "nan")
    )


def test_permuted_tokens_give_permuted_bits(mhc_weights: Weights) -> None:
    weights = mhc_weights(4096, 4, 1)
    residual = torch.randn(129, 4, 1024).bfloat16()
    order = torch.randperm(129)
    assert_bitwise_equal(mhc_head(residual[order], *weights, **EPS), mhc_head(residual, *weights, **EPS)[order])


def test_twin_split_by_tokens_is_detected(mhc_weights: Weights) -> None:
    fn, scale, base = mhc_weights(16384, 4, 1)

    def twin(residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = residual.flatten(1)
        projection, squares = prenorm_projection(flat, fn, 64 if len(flat) <= 128 else 44)
        gates = torch.sigmoid(projection * reciprocal_rms(squares, 16384, 1e-6)[:, None] * scale + base)
        return gates, collapse_streams(gates.t(), list(residual.unbind(1)))

    must_detect(twin, torch.randn(1, 4, 4096).bfloat16(), batch_sizes=(129,), positions=(128,), neighbours=("zero",))
