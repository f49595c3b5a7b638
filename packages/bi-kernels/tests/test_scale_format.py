"""UE8M0 arithmetic, packing, layouts, and who chooses a format."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bi_kernels.arch import Arch, detect_arch
from bi_kernels.runtime.errors import ArgumentError, UnsupportedArchError
from bi_kernels.scale_format import (
    ScaleFormat,
    allocate_scales,
    ceil_to_ue8m0,
    pack_ue8m0,
    scale_format_for,
    unpack_ue8m0,
)
from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect
from bi_kernels.testing.strategies import shapes, ue8m0_scales

POWERS = torch.tensor([2.0**e for e in range(-127, 128)])  # every number that UE8M0 has, in float32
INF = torch.tensor(math.inf)
ZERO = torch.tensor(0.0)


def test_ceil_keeps_every_power_of_two() -> None:
    assert_bitwise_equal(ceil_to_ue8m0(POWERS), POWERS)


def test_ceil_of_every_upper_neighbour_is_the_next_power() -> None:
    # B05: log2, ceil, exp2 send 245 of these back to the power that they lie above.
    above = torch.nextafter(POWERS, INF)
    want = torch.cat([POWERS[1:], torch.tensor([math.nan])])
    assert_bitwise_equal(ceil_to_ue8m0(above), want)
    through_floats = torch.exp2(torch.ceil(torch.log2(above)))
    assert (through_floats[1:-1] != want[1:-1]).sum() > 200, "the case must tell the two rules apart"


def test_ceil_of_every_lower_neighbour_is_the_power() -> None:
    assert_bitwise_equal(ceil_to_ue8m0(torch.nextafter(POWERS, ZERO)), POWERS)


def test_ceil_ends() -> None:
    x = torch.tensor([0.0, -0.0, 2.0**-149, 3.4e38, math.inf, math.nan, -1.0, -math.inf, -(2.0**-149)])
    nan = math.nan
    want = torch.tensor([2.0**-127, 2.0**-127, 2.0**-127, nan, nan, nan, nan, nan, nan])
    assert_bitwise_equal(ceil_to_ue8m0(x), want)


def test_pack_unpack_every_byte() -> None:
    codes = torch.arange(256, dtype=torch.int32)
    words = codes[0::4] | (codes[1::4] << 8) | (codes[2::4] << 16) | (codes[3::4] << 24)
    scales = unpack_ue8m0(words, 256)
    assert_bitwise_equal(scales, torch.cat([POWERS, torch.tensor([math.nan])]))
    assert_bitwise_equal(pack_ue8m0(scales), words)


def test_pack_layout_low_byte_first_and_zero_padding() -> None:
    scales = torch.tensor([[1.0, 2.0, 4.0, 2.0**127, 0.5]])  # bytes 7f 80 81 fe, 7e 00 00 00
    packed = pack_ue8m0(scales)
    assert packed.dtype == torch.int32
    assert [word & 0xFFFFFFFF for word in packed[0].tolist()] == [0xFE81807F, 0x0000007E]


@given(shapes(2, max_side=9).flatmap(lambda shape: ue8m0_scales(shape)))
def test_pack_unpack_round_trip(scales: torch.Tensor) -> None:
    packed = pack_ue8m0(scales)
    assert packed.shape == (scales.shape[0], -(-scales.shape[1] // 4))
    assert_bitwise_equal(unpack_ue8m0(packed, scales.shape[1]), scales)
    strided = packed.T.contiguous().T  # column-major, as the GEMMs have it
    assert_bitwise_equal(unpack_ue8m0(strided, scales.shape[1]), scales)


@pytest.mark.parametrize("bad", [3.0, 0.0, -1.0, math.inf, 2.0**-128, torch.finfo(torch.float32).max])
def test_pack_refuses_what_is_no_power_of_two(bad: float) -> None:
    with pytest.raises(ArgumentError, match=r"powers of two.*at \(1, 2\).*ceil_to_ue8m0"):
        pack_ue8m0(torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, bad]]))


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="float32"):
        ceil_to_ue8m0(torch.ones(2, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="float32"):
        pack_ue8m0(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match="dimension"):
        pack_ue8m0(torch.tensor(1.0))
    with pytest.raises(ArgumentError, match="int32"):
        unpack_ue8m0(torch.ones(2), 8)
    for wrong in (4, 9, -1):
        with pytest.raises(ArgumentError, match="fills 2 words"):
            unpack_ue8m0(torch.zeros(3, 2, dtype=torch.int32), wrong)


@pytest.mark.parametrize("scale_format", ScaleFormat)
@pytest.mark.parametrize(("tokens", "aligned"), [((5,), 8), ((8,), 8), ((1,), 4), ((0,), 0), ((3, 6), 8), ((2, 4), 4)])
def test_allocate_scales(tokens: tuple[int, ...], aligned: int, scale_format: ScaleFormat) -> None:
    scales = allocate_scales(tokens, 9, scale_format)
    columns = 3 if scale_format is ScaleFormat.UE8M0 else 9
    assert scales.shape == (*tokens, columns)
    assert scales.dtype == (torch.int32 if scale_format is ScaleFormat.UE8M0 else torch.float32)
    if scales.numel():
        assert scales.stride()[-2:] == (1, aligned)
        assert len(tokens) == 1 or scales.stride(0) == aligned * columns


def test_formats_and_their_values_in_the_schemas() -> None:
    assert {f.name: f.value for f in ScaleFormat} == {"FLOAT32": 0, "FLOAT32_CEIL_UE8M0": 1, "UE8M0": 2}


def test_format_is_chosen_from_the_arch_and_never_guessed() -> None:
    assert scale_format_for(Arch.SM90) is ScaleFormat.FLOAT32_CEIL_UE8M0
    assert scale_format_for(Arch.SM100) is ScaleFormat.UE8M0
    for wrong in (None, 90, "sm90"):
        with pytest.raises(ArgumentError, match="arch"):
            scale_format_for(wrong)  # type: ignore[arg-type]
    assert [Arch.from_capability(9, 0), Arch.from_capability(10, 0), Arch.from_capability(10, 3)] == [
        Arch.SM90,
        Arch.SM100,
        Arch.SM100,
    ]
    for capability in ((8, 0), (8, 9), (12, 0), (11, 0), (9, 1)):
        with pytest.raises(UnsupportedArchError, match=f"{capability[0]}.{capability[1]}"):
            Arch.from_capability(*capability)
    with pytest.raises(UnsupportedArchError, match="arch="):
        detect_arch(torch.device("cpu"))


def test_no_gpu_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    # B08: a driver without a GPU answered "Hopper" for Blackwell workers.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedArchError, match="no GPU"):
        detect_arch()


def test_pack_is_row_invariant() -> None:
    rows = torch.exp2(torch.randint(-20, 20, (3, 10)).float())

    def pack(scales: torch.Tensor) -> torch.Tensor:
        return pack_ue8m0(ceil_to_ue8m0(scales.abs()))

    assert_batch_invariant(pack, rows, batch_sizes=(1, 2, 5, 64))
    must_detect(lambda s: pack(s.abs().amax(0, keepdim=True).expand_as(s)), rows, batch_sizes=(1, 2, 5, 64))


@given(st.integers(-126, 126), st.floats(1.0, 2.0, width=32, exclude_max=True))
def test_ceil_bounds(exponent: int, mantissa: float) -> None:
    x = torch.tensor([mantissa * 2.0**exponent])
    raised = ceil_to_ue8m0(x)
    assert x <= raised < 2 * x
    assert math.frexp(raised.item())[0] == 0.5
