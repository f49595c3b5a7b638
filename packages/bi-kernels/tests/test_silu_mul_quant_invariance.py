"""A row's codes and scales do not depend on the other rows, contiguous or masked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bi_kernels.arch import Arch
from bi_kernels.scale_format import ScaleFormat
from bi_kernels.silu_mul_quant import fused_silu_mul_per_token_group_quant, silu_and_mul
from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, assert_bitwise_equal, must_detect, num_threads

VARIANTS = pytest.mark.parametrize(
    ("arch", "scale_format"),
    [
        (Arch.SM90, ScaleFormat.FLOAT32),
        (Arch.SM90, ScaleFormat.FLOAT32_CEIL_UE8M0),
        (Arch.SM100, ScaleFormat.UE8M0),
    ],
)


def rows() -> torch.Tensor:
    x = (torch.randn(3, 512) * 5).bfloat16()
    x[1, 300] = torch.nan
    return x


def masked(x: torch.Tensor, count: int, capacity: int, **arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``(n, 2 I)`` rows as the one live expert among three, padded with NaN up to the capacity."""
    staged = torch.full((3, capacity, x.shape[1]), torch.nan).bfloat16()
    staged[1, : len(x)] = x
    masked_m = torch.tensor([0, count, 0], dtype=torch.int32)
    q, s = fused_silu_mul_per_token_group_quant(staged, masked_m=masked_m, **arguments)
    return q[1, : len(x)], s[1, : len(x)]


@VARIANTS
def test_contiguous_rows_are_independent(arch: Arch, scale_format: ScaleFormat) -> None:
    def fused(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_silu_mul_per_token_group_quant(x, arch=arch, scale_format=scale_format, clamp_limit=10.0)

    sizes = (1, 2, 3, 15, 16, 17, 63, 64, 65, 129, 257)
    assert_batch_invariant(fused, rows(), batch_sizes=sizes)


@VARIANTS
def test_masked_rows_are_independent_and_equal_contiguous_ones(arch: Arch, scale_format: ScaleFormat) -> None:
    arguments = {"arch": arch, "scale_format": scale_format, "clamp_limit": 10.0}
    assert_batch_invariant(lambda x: masked(x, len(x), len(x) + 3, **arguments), rows(), batch_sizes=QUICK_BATCH_SIZES)
    x = rows()
    for capacity in (3, 4, 64):
        q, s = masked(x, 3, capacity, **arguments)
        want_q, want_s = fused_silu_mul_per_token_group_quant(x, **arguments)
        assert_bitwise_equal(q, want_q)
        assert_bitwise_equal(s, want_s)


@VARIANTS
def test_rows_among_nobodys_rows_are_independent(arch: Arch, scale_format: ScaleFormat) -> None:
    arguments = {"arch": arch, "scale_format": scale_format, "clamp_limit": 10.0}

    def fused(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spread = torch.full((2 * len(x) + 1, x.shape[1]), torch.nan).bfloat16()
        spread[1::2] = x
        m_indices = torch.full((len(spread),), -1, dtype=torch.int32)
        m_indices[1::2] = 3
        q, s = fused_silu_mul_per_token_group_quant(spread, m_indices=m_indices, **arguments)
        return q[1::2], s[1::2]

    assert_batch_invariant(fused, rows(), batch_sizes=QUICK_BATCH_SIZES)
    x = rows()
    for got, want in zip(fused(x), fused_silu_mul_per_token_group_quant(x, **arguments), strict=True):
        assert_bitwise_equal(got.contiguous(), want.contiguous())


def split_by_batch(x: torch.Tensor) -> torch.Tensor:
    # What a kernel does that unrolls exp differently above some size: same mathematics, other bits.
    gate, up = x.float().chunk(2, -1)
    sigmoid = torch.sigmoid(gate) if len(x) > 16 else 1 / (1 + torch.exp(-gate))
    return gate * sigmoid * up


def scale_per_tensor(x: torch.Tensor) -> torch.Tensor:
    y = silu_and_mul(x, arch=Arch.SM90).float().nan_to_num()
    return (y / (y.abs().amax() / 448)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("twin", [split_by_batch, scale_per_tensor])
def test_twins_are_caught(twin: Callable[[torch.Tensor], torch.Tensor]) -> None:
    must_detect(twin, rows(), batch_sizes=QUICK_BATCH_SIZES)


@pytest.mark.parametrize("arch", Arch)
def test_threads(arch: Arch) -> None:
    x = (torch.randn(200, 1024) * 5).bfloat16()
    q, s = fused_silu_mul_per_token_group_quant(x, arch=arch)
    for count in (1, 2):
        with num_threads(count):
            again_q, again_s = fused_silu_mul_per_token_group_quant(x, arch=arch)
        assert_bitwise_equal(again_q, q)
        assert_bitwise_equal(again_s, s)
