from __future__ import annotations

import math

import pytest
import torch

from bi_kernels.runtime.errors import ArgumentError, ReloadError
from bi_kernels.testing import assert_bitwise_equal
from bi_reload import mhc_pre, mhc_pre_broadcast, refresh_mhc_broadcast_


def test_refresh_in_place() -> None:
    """B68: 24 rows, four streams, hidden 4."""
    fn = torch.randn(24, 16)
    dst = torch.full((24, 4), math.nan)
    address = dst.data_ptr()
    refresh_mhc_broadcast_(dst, fn)
    fn.copy_(torch.randn(24, 16))
    refresh_mhc_broadcast_(dst, fn)
    assert dst.data_ptr() == address
    for row in range(24):
        for column in range(4):
            total = torch.tensor(0.0)
            for stream in range(4):
                total = total + fn[row, 4 * stream + column]
            assert_bitwise_equal(dst[row, column], total)


def test_summed_ascending() -> None:
    fn = torch.tensor([[2.0**24, 1.0, 1.0, -(2.0**24)]])
    dst = torch.empty(1, 1)
    refresh_mhc_broadcast_(dst, fn)
    assert dst.item() == 0.0  # pairs would give 2, another order 1


def test_broadcast_form_means_the_same() -> None:
    hidden = 128  # small integers: every sum is exact, so both forms must give the same bits
    fn, scale, base = torch.randint(-3, 4, (24, 4 * hidden)).float(), torch.full((3,), 0.01), torch.randn(24)
    dst = torch.empty(24, hidden)
    refresh_mhc_broadcast_(dst, fn)
    x = torch.randint(-3, 4, (5, hidden)).bfloat16()
    settings = {"norm_weight": None, "rms_eps": 1e-6, "hc_eps": 1e-6, "norm_eps": 1e-6}
    short = mhc_pre_broadcast(x, dst, scale, base, **settings)  # type: ignore[arg-type]
    full = mhc_pre(short.residual, fn, scale, base, **settings)  # type: ignore[arg-type]
    for have, want in zip(short[:3], full, strict=True):
        assert_bitwise_equal(have, want)


def test_nan_has_one_pattern_and_parameters_work() -> None:
    fn = torch.nn.Parameter(torch.randn(2, 16))
    with torch.no_grad():
        fn.view(torch.int32)[0, 5] = 0x7F812345
    dst = torch.empty(2, 4)
    refresh_mhc_broadcast_(dst, fn)
    assert dst.view(torch.int32)[0, 1].item() == 0x7FC00000
    assert dst[1].isfinite().all()


@pytest.mark.parametrize(
    ("dst", "fn"),
    [
        (torch.full((24, 4), -7.0).double(), torch.randn(24, 16)),
        (torch.full((24, 4), -7.0), torch.randn(24, 16).bfloat16()),
        (torch.full((24, 4), -7.0), torch.randn(24, 17)),
        (torch.full((23, 4), -7.0), torch.randn(24, 16)),
        (torch.full((96,), -7.0), torch.randn(24, 16)),
        (torch.full((24, 1), -7.0).expand(24, 4), torch.randn(24, 16)),
    ],
)
def test_bad_input_writes_nothing(dst: torch.Tensor, fn: torch.Tensor) -> None:
    with pytest.raises(ArgumentError):
        refresh_mhc_broadcast_(dst, fn)
    assert (dst == -7.0).all()


def test_overlap_is_refused() -> None:
    fn = torch.randn(24, 16)
    before = fn.clone()
    with pytest.raises(ArgumentError, match="memory apart from fn"):
        refresh_mhc_broadcast_(fn.view(96, 4)[:24], fn)
    assert_bitwise_equal(fn, before)


def test_meta_tensors_are_refused() -> None:
    """B69: refreshed while the projection is still on the meta device."""
    dst = torch.full((24, 4), -7.0)
    with pytest.raises(ReloadError, match=r"fn.*meta.*after the last bucket"):
        refresh_mhc_broadcast_(dst, torch.randn(24, 16, device="meta"))
    assert (dst == -7.0).all()
    with pytest.raises(ReloadError, match=r"dst.*meta"):
        refresh_mhc_broadcast_(dst.to("meta"), torch.randn(24, 16))
