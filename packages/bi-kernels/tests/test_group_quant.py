"""The FP8 quantiser against its definition, exhaustively where the domain is small."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from bi_kernels.group_quant import dequantize, dequantize_blocks, per_block_quant_fp8, per_token_group_quant_fp8
from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.scale_format import ScaleFormat, pack_ue8m0, unpack_ue8m0
from bi_kernels.testing import assert_bitwise_equal, bit_view

F32, CEIL, UE8M0 = ScaleFormat.FLOAT32, ScaleFormat.FLOAT32_CEIL_UE8M0, ScaleFormat.UE8M0
FORMATS = pytest.mark.parametrize("scale_format", ScaleFormat)


def float_scales(s: torch.Tensor, num_groups: int) -> torch.Tensor:
    return unpack_ue8m0(s, num_groups) if s.dtype == torch.int32 else s.contiguous()


def check(oracle: ModuleType, x: torch.Tensor, scale_format: ScaleFormat) -> None:
    q, s = per_token_group_quant_fp8(x, scale_format=scale_format)
    groups = x.float().unflatten(-1, (-1, 128))
    codes, scales = oracle.quantise_rows(groups, ceil=scale_format is not F32)
    assert_bitwise_equal(float_scales(s, scales.shape[-1]), scales, "scales")
    assert_bitwise_equal(q, codes.flatten(-2), "codes")


@FORMATS
def test_random_rows(oracle: ModuleType, scale_format: ScaleFormat) -> None:
    x = torch.randn(40, 1152) * torch.exp2(torch.randint(-30, 30, (40, 9)).float()).repeat_interleave(128, 1)
    check(oracle, x.bfloat16(), scale_format)


@FORMATS
def test_every_positive_bfloat16_as_amax(oracle: ModuleType, scale_format: ScaleFormat) -> None:
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)  # zero, subnormals, ..., the largest
    x = torch.zeros(len(amax), 128, dtype=torch.bfloat16)
    x[:, 5] = -amax
    x[:, 1] = (amax.float() / 3).bfloat16()
    x[:, 77] = (amax.float() * 0.8125).bfloat16()
    check(oracle, x, scale_format)


@FORMATS
def test_zero_and_tiny_groups(oracle: ModuleType, scale_format: ScaleFormat) -> None:
    x = torch.zeros(3, 128).bfloat16()
    x[1] = -0.0
    x[2] = 1e-11
    q, s = per_token_group_quant_fp8(x, scale_format=scale_format)
    expected = oracle.float32(oracle.float32(1e-10) / 448) if scale_format is F32 else 2.0**-33
    assert float_scales(s, 1).tolist() == [[expected]] * 3
    assert bit_view(q)[:, 0].tolist() == [0x00, 0x80, int(bit_view(q)[2, 0])]
    check(oracle, x, scale_format)


def test_ties_and_the_reciprocal(oracle: ModuleType) -> None:
    # B10: with amax 448 the scale is 1, and 168, 8.5 and 17 lie exactly between two codes.
    x = torch.zeros(1, 128).bfloat16()
    x[0, :6] = torch.tensor([448.0, 168.0, 8.5, 17.0, -168.0, 0.0009765625])
    q, s = per_token_group_quant_fp8(x, scale_format=F32)
    assert s.item() == 1.0
    assert q[0, :6].float().tolist() == [448.0, 160.0, 8.0, 16.0, -160.0, 0.0]
    # Multiplying by the reciprocal moves some quotients across a tie.
    x = torch.randn(400, 128).bfloat16()
    check(oracle, x, F32)
    q, s = per_token_group_quant_fp8(x, scale_format=F32)
    by_reciprocal = (x.float() * (1.0 / s)).to(torch.float8_e4m3fn)
    assert (bit_view(by_reciprocal) != bit_view(q)).any(), "the data must tell the two apart"


@FORMATS
def test_masked_rows_are_neither_read_nor_written(scale_format: ScaleFormat) -> None:
    x = torch.randn(3, 5, 256).bfloat16()
    counts = torch.tensor([2, 0, 5], dtype=torch.int32)
    inside = torch.arange(5) < counts.unsqueeze(1)
    expected_q, expected_s = per_token_group_quant_fp8(x, scale_format=scale_format)
    q, s = bit_view(expected_q).clone().fill_(0x55).view(torch.float8_e4m3fn), torch.full_like(expected_s, 7)
    x[~inside] = math.nan
    got = per_token_group_quant_fp8(x, masked_m=counts, scale_format=scale_format, out_q=q, out_s=s)
    assert got[0] is q
    assert_bitwise_equal(bit_view(q)[inside], bit_view(expected_q)[inside])
    assert_bitwise_equal(s[inside], expected_s[inside])
    assert bool((bit_view(q)[~inside] == 0x55).all())
    assert bool((s[~inside] == 7).all())
    for wrong in (counts.long(), counts[:2], torch.tensor([0, 6, 0], dtype=torch.int32)):
        with pytest.raises(ArgumentError, match="masked_m"):
            per_token_group_quant_fp8(x, masked_m=wrong, scale_format=scale_format)
    with pytest.raises(ArgumentError, match="masked_m"):
        per_token_group_quant_fp8(x[0], masked_m=counts, scale_format=scale_format)


@FORMATS
def test_all_256_codes_round_trip(scale_format: ScaleFormat) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    x = torch.cat([finite, finite[-2:]]).float().bfloat16().view(1, 256)  # every code is a bfloat16; amax 448 twice
    q, s = per_token_group_quant_fp8(x, scale_format=scale_format)
    assert float_scales(s, 2).tolist() == [[1.0, 1.0]]
    assert_bitwise_equal(q[0, :254], finite)
    assert_bitwise_equal(dequantize(q, s), x.float())
    again, _ = per_token_group_quant_fp8(dequantize(q, s).bfloat16(), scale_format=scale_format)
    assert_bitwise_equal(again, q)


def test_dequantize_every_code_times_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).expand(256, 256).contiguous()
    scales = torch.tensor([2.0**e for e in range(-127, 128)] + [math.nan]).unsqueeze(-1).expand(256, 2)
    exact = codes.double() * scales[:, :1].double()
    want = exact.float()
    want[want.isnan()] = math.nan
    assert_bitwise_equal(dequantize(codes, scales), want)
    assert_bitwise_equal(dequantize(codes, pack_ue8m0(scales.contiguous())), want)


def test_codes_use_the_rounded_scale() -> None:
    # B06: quantising with the exact scale and then rounding the scale is an order of magnitude worse.
    x = torch.randn(4096, 128).bfloat16()
    q, s = per_token_group_quant_fp8(x, scale_format=CEIL)
    q_exact, s_exact = per_token_group_quant_fp8(x, scale_format=F32)
    rms = (dequantize(q, s) - x.float()).square().mean().sqrt()
    rms_mixed = (dequantize(q_exact, s) - x.float()).square().mean().sqrt()
    assert rms < 0.03
    assert rms_mixed / rms > 10
    ratio = s / s_exact
    assert ratio.min() >= 1
    assert ratio.max() < 2


@FORMATS
@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_non_finite_poisons_its_group_only(scale_format: ScaleFormat, poison: float) -> None:
    clean = torch.randn(6, 640).bfloat16()
    x = clean.clone()
    x[2, 128 + 127] = poison
    x[4, 512] = poison
    q, s = per_token_group_quant_fp8(x, scale_format=scale_format)
    q_clean, s_clean = per_token_group_quant_fp8(clean, scale_format=scale_format)
    scales, scales_clean = float_scales(s, 5), float_scales(s_clean, 5)
    for row, group in ((2, 1), (4, 4)):
        assert (bit_view(q[row].view(5, 128)[group]) == 0x7F).all()
        assert bit_view(scales[row, group]).item() == 0x7FC00000
        if scale_format is UE8M0:
            assert s[row, group // 4].item() >> 8 * (group % 4) & 0xFF == 0xFF
        q.view(6, 5, 128)[row, group] = q_clean.view(6, 5, 128)[row, group]
        scales[row, group] = scales_clean[row, group]
    assert_bitwise_equal(q, q_clean)
    assert_bitwise_equal(scales, scales_clean)
    assert dequantize(*per_token_group_quant_fp8(x, scale_format=scale_format))[2, 128:256].isnan().all()


def test_formats_agree() -> None:
    x = torch.randn(7, 1152).bfloat16()
    q_ceil, s_ceil = per_token_group_quant_fp8(x, scale_format=CEIL)
    q_packed, s_packed = per_token_group_quant_fp8(x, scale_format=UE8M0)
    assert_bitwise_equal(q_packed, q_ceil)
    assert_bitwise_equal(s_packed, pack_ue8m0(s_ceil.contiguous()))
    assert_bitwise_equal(dequantize(q_packed, s_packed), dequantize(q_ceil, s_ceil))


@FORMATS
def test_shapes_and_caller_owned_outputs(scale_format: ScaleFormat) -> None:
    x = torch.randn(2, 5, 640).bfloat16()
    q, s = per_token_group_quant_fp8(x, scale_format=scale_format)
    columns = scale_format.columns(5)
    assert s.stride() == (8 * columns, 1, 8)
    # Pad rows of the aligned layout are never written.
    memory = torch.full((2, columns, 8), 77, dtype=scale_format.dtype)
    out_q, out_s = torch.empty_like(q), memory.mT[:, :5]
    got = per_token_group_quant_fp8(x, scale_format=scale_format, out_q=out_q, out_s=out_s)
    assert got[0] is out_q
    assert got[1] is out_s
    assert_bitwise_equal(out_q, q)
    assert_bitwise_equal(out_s, s)
    assert (memory[:, :, 5:] == 77).all()
    # Row-major scales, gaps between rows of codes and of x.
    out_s = torch.empty(2, 5, columns, dtype=scale_format.dtype)
    out_q = torch.empty(2, 5, 700, dtype=torch.float8_e4m3fn)[..., :640]
    wide = torch.zeros(2, 5, 1000).bfloat16()
    wide[..., 100:740] = x
    per_token_group_quant_fp8(wide[..., 100:740], scale_format=scale_format, out_q=out_q, out_s=out_s)
    assert_bitwise_equal(out_q, q)
    assert_bitwise_equal(out_s, s)
    one_q, one_s = per_token_group_quant_fp8(x[1, 2], scale_format=scale_format)
    assert_bitwise_equal(one_q, q[1, 2])
    assert_bitwise_equal(one_s, s[1, 2])
    for shape in ((0, 640), (3, 0), (0, 4, 128), (2, 0, 128)):
        q, s = per_token_group_quant_fp8(torch.empty(shape).bfloat16(), scale_format=scale_format)
        assert q.shape == shape
        assert s.shape == (*shape[:-1], scale_format.columns(shape[-1] // 128))


@FORMATS
def test_blocks(oracle: ModuleType, scale_format: ScaleFormat) -> None:
    w = torch.randn(300, 200) * torch.exp2(torch.randint(-9, 9, (300, 1)).float())
    w[130, 150] = math.nan
    q, s = per_block_quant_fp8(w, scale_format=scale_format)
    assert q.is_contiguous()
    assert s.shape == (3, 2)
    assert s.dtype == torch.float32
    for i in range(3):
        for j in range(2):
            here = (slice(128 * i, min(300, 128 * i + 128)), slice(128 * j, min(200, 128 * j + 128)))
            block = w[here]
            codes, scale = oracle.quantise_rows(block.reshape(1, -1), ceil=scale_format is not F32)
            assert_bitwise_equal(q[here], codes.view(block.shape))
            assert_bitwise_equal(s[i, j], scale[0])
    back = dequantize_blocks(q, s)
    assert back[128:256, 128:].isnan().all()
    assert (back - w).abs().nan_to_num().max() <= 0.5 * 32 * s.nan_to_num().max()
    assert_bitwise_equal(per_block_quant_fp8(w.bfloat16(), scale_format=scale_format)[1].isnan(), s.isnan())
    q, s = per_block_quant_fp8(torch.empty(0, 256), scale_format=scale_format)
    assert (q.shape, s.shape) == ((0, 256), (0, 2))


def test_requantising_power_of_two_weights_changes_nothing() -> None:
    q, s = per_block_quant_fp8(torch.randn(256, 256), scale_format=CEIL)
    again, s_again = per_block_quant_fp8(dequantize_blocks(q, s), scale_format=CEIL)
    assert_bitwise_equal(dequantize_blocks(again, s_again), dequantize_blocks(q, s))


GOOD_Q = torch.empty(4, 256, dtype=torch.float8_e4m3fn)
GOOD_S = torch.empty(4, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4, 256)}, "x: expected dtype bfloat16, got float32"),
        ({"x": torch.zeros(4, 200).bfloat16()}, "multiple of 128"),
        ({"x": torch.tensor(1.0).bfloat16()}, "multiple of 128"),
        ({"x": torch.zeros(256, 4).bfloat16().T}, "stride 1"),
        ({"group_size": 64}, "group_size: expected 128"),
        ({"scale_format": 1}, "scale_format: expected a ScaleFormat"),
        ({"out_q": torch.empty(4, 256)}, "out_q: expected dtype float8_e4m3fn"),
        ({"out_q": GOOD_Q[:3]}, r"out_q: expected shape \(4, 256\)"),
        ({"out_q": torch.empty(256, 4, dtype=torch.float8_e4m3fn).T}, "out_q: expected stride 1"),
        ({"out_q": GOOD_Q[:1].expand(4, 256)}, "out_q: expected elements that do not overlap"),
        ({"out_s": GOOD_S.int()}, "out_s: expected dtype float32"),
        ({"out_s": torch.empty(4, 3)}, r"out_s: expected shape \(4, 2\)"),
        ({"out_s": torch.empty(4, 1).expand(4, 2)}, "out_s: expected elements that do not overlap"),
        ({"out_s": torch.empty(4, 2, device="meta")}, "out_s: expected device cpu"),
        ({"scale_format": UE8M0, "out_s": GOOD_S}, "out_s: expected dtype int32"),
    ],
)
def test_bad_arguments_write_nothing(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "x": torch.ones(4, 256).bfloat16(),
        "scale_format": F32,
        "out_q": torch.full((4, 256), 3.0).to(torch.float8_e4m3fn),
        "out_s": torch.full((4, 2), 3.0),
    } | changes
    with pytest.raises(ArgumentError, match=message):
        per_token_group_quant_fp8(arguments.pop("x"), **arguments)  # type: ignore[arg-type]
    for name in {"out_q", "out_s"} - set(changes):
        assert (arguments[name].float() == 3.0).all()  # type: ignore[attr-defined]


def test_bad_arguments_of_the_others() -> None:
    q, s = torch.zeros(4, 256).to(torch.float8_e4m3fn), torch.ones(4, 2)
    for arguments, message in (
        ((q.float(), s), "q: expected dtype"),
        ((q, s.double()), "s: expected dtype"),
        ((q, s[:, :1]), "s: expected shape"),
        ((q, s.int()), r"s: expected shape \(4, 1\)"),
        ((q, s, 96), "multiple of 96"),
        ((q, s, 0), "positive"),
    ):
        with pytest.raises(ArgumentError, match=message):
            dequantize(*arguments)
    with pytest.raises(ArgumentError, match="w: expected dtype"):
        per_block_quant_fp8(q, scale_format=F32)
    with pytest.raises(ArgumentError, match="w: expected shape"):
        per_block_quant_fp8(torch.zeros(2, 3, 4), scale_format=F32)
    with pytest.raises(ArgumentError, match="block: expected 128"):
        per_block_quant_fp8(torch.zeros(2, 3), block=64, scale_format=F32)
    with pytest.raises(ArgumentError, match="s: expected shape"):
        dequantize_blocks(q, s)
    with pytest.raises(ArgumentError, match="positive"):
        dequantize_blocks(q, s, 0)
