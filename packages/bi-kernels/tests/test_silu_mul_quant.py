"""SiLU, multiply and quantisation: exhaustive over gates, both archs, contiguous and masked, three scale formats."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from bi_kernels.arch import Arch
from bi_kernels.group_quant import dequantize, per_token_group_quant_fp8
from bi_kernels.reference.numerics import exp
from bi_kernels.runtime.errors import ArgumentError, UnsupportedArchError
from bi_kernels.scale_format import ScaleFormat, allocate_scales, scale_format_for, unpack_ue8m0
from bi_kernels.silu_mul_quant import fused_silu_mul_per_token_group_quant, group_offsets, silu_and_mul
from bi_kernels.testing import assert_bitwise_equal, bit_view

INT32_MAX = 2**31 - 1
ARCHS = pytest.mark.parametrize("arch", Arch)
FORMATS = pytest.mark.parametrize("scale_format", ScaleFormat)


def every_gate() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def pair(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat([gate, up], -1)


def random_input(*tokens: int, hidden: int = 256) -> torch.Tensor:
    return (torch.randn(*tokens, 2 * hidden) * 6).bfloat16()


# ---- the activation


@ARCHS
def test_silu_of_every_bfloat16_against_float64(arch: Arch) -> None:
    gate = every_gate()
    y = silu_and_mul(pair(gate.unsqueeze(-1), torch.ones(65536, 1).bfloat16()), arch=arch).squeeze(-1)
    finite = torch.isfinite(gate)
    assert (bit_view(y[~finite]) == 0x7FC0).all()
    gate, y = gate[finite].double(), y[finite].double()
    truth = gate / (1 + (-gate).exp())
    # float32: 2**-23 for exp, 2**-24 each for the addition and the division: 2**-22. Then half a unit in the last
    # place of bfloat16, which is 2**-133 among its subnormals.
    inside = gate >= -88.72
    half_unit = torch.exp2((torch.frexp(torch.maximum(y.abs(), truth.abs())).exponent.clamp(min=-125) - 9).double())
    bound = 2.0**-22 * truth.abs() + half_unit
    assert ((y - truth).abs() <= bound)[inside].all()
    assert (bit_view(y[~inside]) == bit_view(torch.tensor(-0.0).double())).all()
    assert (truth[~inside].abs() < 2.7e-37).all()


@ARCHS
@pytest.mark.parametrize("clamp_limit", [None, 10.0, 7.3])
def test_every_gate_with_several_ups_follows_the_chain(
    oracle: ModuleType, arch: Arch, clamp_limit: float | None
) -> None:
    gate = every_gate()
    gate = gate[torch.isfinite(gate) & (gate.abs() < 1e30)]
    for up in (0.0, -0.0, 1.0, -1.0078125, 3.3, 9.9375, -12.0, 1e-30, 1e6):
        u = torch.full_like(gate, up)
        y = silu_and_mul(pair(gate.unsqueeze(-1), u.unsqueeze(-1)), clamp_limit=clamp_limit, arch=arch).squeeze(-1)
        g64, u64 = gate.double(), u.double()
        if clamp_limit is not None:
            limit = oracle.float32(clamp_limit)
            g64 = torch.where(g64 > limit, limit, g64)
            u64 = torch.where(u64 > limit, limit, torch.where(u64 < -limit, -limit, u64))
        if arch is Arch.SM90:
            g64, u64 = oracle.bfloat16(g64).double(), oracle.bfloat16(u64).double()
        u64 = torch.where(u64 == 0, 0.0, u64)  # vLLM adds up's bias of 0, so that -0 becomes +0
        g32 = g64.float()
        silu = (g32.double() / (1.0 + exp(-g32)).double()).float()  # IEEE float32, by way of float64
        if arch is Arch.SM90:
            want = oracle.bfloat16(oracle.bfloat16(silu.double()).double() * u64)
        else:
            want = oracle.bfloat16((silu.double() * u64).float().double())
        assert_bitwise_equal(y, want, f"up {up}")


def test_archs_differ() -> None:
    x = random_input(50)
    different = bit_view(silu_and_mul(x, arch=Arch.SM90)) != bit_view(silu_and_mul(x, arch=Arch.SM100))
    assert different.any(), "the rounding of SiLU must show"


@ARCHS
def test_clamp_of_deepseek_v4(arch: Arch) -> None:
    # B14: before SiLU; up on both sides, gate from above only.
    gate = torch.tensor([-50.0, -12.0, 12.0, 50.0]).bfloat16()
    up = torch.tensor([15.0, -15.0, 15.0, -15.0]).bfloat16()
    y = silu_and_mul(pair(gate, up), clamp_limit=10.0, arch=arch).double()
    # SM90 rounds to bfloat16 twice, 2**-8 each.
    want = torch.tensor([-9.64e-20, 7.373e-04, 99.99546, -99.99546], dtype=torch.float64)
    assert ((y - want).abs() <= 2.0**-7 * want.abs()).all()
    # With a limit of 2 a clamp after SiLU would give 4, not 3.52.
    y = silu_and_mul(pair(gate, up), clamp_limit=2.0, arch=arch).double()
    assert abs(y[2].item() - 2 * 2 / (1 + math.exp(-2))) < 0.02


@ARCHS
def test_no_clamp_is_no_clamp(arch: Arch) -> None:
    x = random_input(4)
    assert_bitwise_equal(silu_and_mul(x, clamp_limit=1e30, arch=arch), silu_and_mul(x, arch=arch))


# ---- the fused op


@ARCHS
@FORMATS
@pytest.mark.parametrize("clamp_limit", [None, 10.0])
def test_fused_equals_activation_then_quantiser(
    oracle: ModuleType, arch: Arch, scale_format: ScaleFormat, clamp_limit: float | None
) -> None:
    x = random_input(37, hidden=640)
    x[3] = 0
    x[4, ::3] *= 2.0**100
    q, s = fused_silu_mul_per_token_group_quant(x, arch=arch, scale_format=scale_format, clamp_limit=clamp_limit)
    y = silu_and_mul(x, clamp_limit=clamp_limit, arch=arch)
    want_q, want_s = per_token_group_quant_fp8(y, scale_format=scale_format)
    assert_bitwise_equal(q, want_q)
    assert_bitwise_equal(s, want_s)
    y = y[torch.isfinite(y).all(-1)]
    codes, scales = oracle.quantise_rows(
        y.float().unflatten(-1, (-1, 128)), ceil=scale_format is not ScaleFormat.FLOAT32
    )
    kept = torch.isfinite(silu_and_mul(x, clamp_limit=clamp_limit, arch=arch)).all(-1)
    assert_bitwise_equal(q[kept], codes.flatten(-2))
    got = unpack_ue8m0(s, 5) if s.dtype == torch.int32 else s.contiguous()
    assert_bitwise_equal(got[kept], scales)


@ARCHS
def test_default_format_follows_the_arch(arch: Arch) -> None:
    x = random_input(3)
    q, s = fused_silu_mul_per_token_group_quant(x, arch=arch)
    want_q, want_s = fused_silu_mul_per_token_group_quant(x, arch=arch, scale_format=scale_format_for(arch))
    assert_bitwise_equal(q, want_q)
    assert_bitwise_equal(s, want_s)
    back = dequantize(q, s)
    assert (back - silu_and_mul(x, arch=arch).float()).abs().max() <= 2.0**-4 * back.abs().max()


@ARCHS
@FORMATS
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("clamp_limit", [None, 10.0])
def test_non_finite_poisons_its_group_only(
    arch: Arch, scale_format: ScaleFormat, poison: float, half: int, clamp_limit: float | None
) -> None:
    # B11. A clamp alone would turn the infinity into 10.
    clean = random_input(2, 3, hidden=640)
    x = clean.clone()
    x[1, 2, half * 640 + 300] = poison
    arguments = {"arch": arch, "scale_format": scale_format, "clamp_limit": clamp_limit}
    masked_m = torch.tensor([3, 3], dtype=torch.int32)
    q, s = fused_silu_mul_per_token_group_quant(x, masked_m=masked_m, **arguments)
    q_flat, s_flat = fused_silu_mul_per_token_group_quant(x.view(6, -1), **arguments)
    assert_bitwise_equal(q.view(6, -1), q_flat, "masked and contiguous")
    assert_bitwise_equal(s.reshape(6, -1), s_flat, "masked and contiguous")
    q_clean, s_clean = fused_silu_mul_per_token_group_quant(clean.view(6, -1), **arguments)
    scales, scales_clean = (unpack_ue8m0(t, 5) if t.dtype == torch.int32 else t.contiguous() for t in (s_flat, s_clean))
    assert (bit_view(q_flat[5, 256:384]) == 0x7F).all()
    assert bit_view(scales[5, 2]).item() == 0x7FC00000
    q_flat[5, 256:384] = q_clean[5, 256:384]
    scales[5, 2] = scales_clean[5, 2]
    assert_bitwise_equal(q_flat, q_clean)
    assert_bitwise_equal(scales, scales_clean)


@ARCHS
def test_overflowing_product_is_non_finite_too(arch: Arch) -> None:
    x = torch.full((1, 256), 1e30).bfloat16()
    q, s = fused_silu_mul_per_token_group_quant(x, arch=arch, scale_format=ScaleFormat.FLOAT32)
    assert s.isnan().all()
    assert (bit_view(q) == 0x7F).all()


@ARCHS
@FORMATS
@pytest.mark.parametrize("counts", [[0, 5, 3, 1], [0, 0, 0, 0], [5, 5, 5, 5]])
def test_masked_rows_are_neither_read_nor_written(arch: Arch, scale_format: ScaleFormat, counts: list[int]) -> None:
    x = random_input(4, 5)
    arguments = {"arch": arch, "scale_format": scale_format, "clamp_limit": 10.0}
    want_q, want_s = fused_silu_mul_per_token_group_quant(x, **arguments)
    masked_m = torch.tensor(counts, dtype=torch.int32)
    live = torch.arange(5) < masked_m.unsqueeze(-1)
    x[~live] = math.nan  # poison in
    out_q = torch.full((4, 5, 256), 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn)  # and a pattern out
    columns = scale_format.columns(2)
    memory = torch.full((4, columns, 8), 0x55, dtype=torch.int32)
    out_s = memory.view(scale_format.dtype).mT[:, :5]
    fused_silu_mul_per_token_group_quant(x, masked_m=masked_m, out_q=out_q, out_s=out_s, **arguments)
    assert_bitwise_equal(out_q[live], want_q[live])
    assert_bitwise_equal(out_s[live], want_s[live])
    assert (bit_view(out_q[~live]) == 0x55).all()
    assert (bit_view(out_s[~live]) == 0x55).all()
    assert (memory[:, :, 5:] == 0x55).all()


@ARCHS
@FORMATS
def test_nobodys_rows_are_neither_read_nor_written(arch: Arch, scale_format: ScaleFormat) -> None:
    x = random_input(7)
    arguments = {"arch": arch, "scale_format": scale_format, "clamp_limit": 10.0}
    want_q, want_s = fused_silu_mul_per_token_group_quant(x, **arguments)
    m_indices = torch.tensor([3, -1, 0, -7, 0, 2, -1], dtype=torch.int32)
    live = m_indices >= 0
    x[~live] = math.nan  # poison in
    out_q = torch.full((7, 256), 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn)  # and a pattern out
    out_s = torch.full((scale_format.columns(2), 7), 0x55, dtype=torch.int32).view(scale_format.dtype).mT
    fused_silu_mul_per_token_group_quant(x, m_indices=m_indices, out_q=out_q, out_s=out_s, **arguments)
    assert_bitwise_equal(out_q[live], want_q[live])
    assert_bitwise_equal(out_s[live], want_s[live])
    assert (bit_view(out_q[~live]) == 0x55).all()
    assert (bit_view(out_s[~live]) == 0x55).all()


@FORMATS
def test_empty_input_and_layouts(scale_format: ScaleFormat) -> None:
    for tokens in ((0,), (0, 4), (3, 0), (0, 0)):
        masked_m = torch.zeros(tokens[0], dtype=torch.int32) if len(tokens) == 2 else None
        q, s = fused_silu_mul_per_token_group_quant(
            torch.empty(*tokens, 512).bfloat16(), masked_m=masked_m, arch=Arch.SM90, scale_format=scale_format
        )
        assert q.shape == (*tokens, 256)
        assert s.shape == (*tokens, scale_format.columns(2))
    x = random_input(3, 7)
    q, s = fused_silu_mul_per_token_group_quant(x, arch=Arch.SM90, scale_format=scale_format)
    assert s.stride() == allocate_scales((3, 7), 2, scale_format).stride()
    out_q = torch.empty(3, 7, 300, dtype=torch.float8_e4m3fn)[..., :256]
    out_s = torch.empty(3, 7, scale_format.columns(2), dtype=scale_format.dtype)  # row-major
    wide = torch.zeros(3, 9, 600).bfloat16()
    wide[:, :7, 8:520] = x
    got = fused_silu_mul_per_token_group_quant(
        wide[:, :7, 8:520], arch=Arch.SM90, scale_format=scale_format, out_q=out_q, out_s=out_s
    )
    assert got[0] is out_q
    assert got[1] is out_s
    assert_bitwise_equal(out_q, q)
    assert_bitwise_equal(out_s, s)


# ---- offsets beyond 2**31, without the memory


@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [
        pytest.param(61_682, 17_408, id="B01"),
        pytest.param(524_416, 2048, id="B02"),
        pytest.param(1_048_577, 2048, id="B03"),
        pytest.param(40_000_000, 7168, id="groups"),
    ],
)
@FORMATS
def test_offsets_of_huge_contiguous_input(tokens: int, hidden: int, scale_format: ScaleFormat) -> None:
    x = torch.empty(tokens, 2 * hidden, dtype=torch.bfloat16, device="meta")
    q, s = fused_silu_mul_per_token_group_quant(x, arch=Arch.SM90, scale_format=scale_format)
    token, group = tokens - 1, hidden // 128 - 1
    offsets = group_offsets(x, q, s, token=token, group=group)
    # The oracle is torch's own arithmetic for views, in int64.
    assert offsets.gate == x[token, group * 128 :].storage_offset()
    assert offsets.up == x[token, hidden + group * 128 :].storage_offset()
    assert offsets.code == q[token, group * 128 :].storage_offset()
    column, byte = divmod(group, 4) if scale_format is ScaleFormat.UE8M0 else (group, 0)
    assert offsets.scale == s[token, column:].storage_offset()
    assert offsets.scale_byte == byte
    assert offsets.up > INT32_MAX
    if tokens > 1_000_000:
        assert offsets.code > INT32_MAX
        assert q.numel() > INT32_MAX
    if tokens > 10_000_000 and scale_format is not ScaleFormat.UE8M0:
        assert offsets.scale > INT32_MAX


def test_first_row_past_int32() -> None:
    x = torch.empty(61_682, 34_816, dtype=torch.bfloat16, device="meta")
    q, s = fused_silu_mul_per_token_group_quant(x, arch=Arch.SM100)
    assert group_offsets(x, q, s, token=61_680, group=0).gate <= INT32_MAX
    assert group_offsets(x, q, s, token=61_681, group=0).gate > INT32_MAX


@FORMATS
def test_offsets_of_huge_masked_input(scale_format: ScaleFormat) -> None:
    x = torch.empty(64, 16_384, 4096, dtype=torch.bfloat16, device="meta")
    masked_m = torch.empty(64, dtype=torch.int32, device="meta")
    q, s = fused_silu_mul_per_token_group_quant(x, masked_m=masked_m, arch=Arch.SM90, scale_format=scale_format)
    offsets = group_offsets(x, q, s, token=16_383, group=15, expert=63)
    assert offsets.gate == x[63, 16_383, 1920:].storage_offset()
    assert offsets.code == q[63, 16_383, 1920:].storage_offset()
    column = 3 if scale_format is ScaleFormat.UE8M0 else 15
    assert offsets.scale == s[63, 16_383, column:].storage_offset()
    assert offsets.gate > INT32_MAX


# ---- bad input


def meta_like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t, device="meta")


OWNERS = torch.tensor([0, 1, -1, 1, 0], dtype=torch.int32)
X2, X3 = torch.ones(5, 512).bfloat16(), torch.ones(3, 5, 512).bfloat16()
COUNTS = torch.tensor([1, 5, 0], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": X3.float()}, "x: expected dtype bfloat16, got float32"),
        ({"x": X3[..., :384]}, "I a multiple of 128"),
        ({"x": X3[0, 0], "masked_m": None}, "I a multiple of 128"),
        ({"x": X3.unsqueeze(0)}, "I a multiple of 128"),
        ({"x": torch.ones(3, 512, 5).bfloat16().mT}, "x: expected stride 1"),
        ({"x": X2}, "masked_m: expected None"),
        ({"masked_m": COUNTS.long()}, "masked_m: expected dtype int32"),
        ({"masked_m": COUNTS[:2]}, r"masked_m: expected shape \(3\)"),
        ({"masked_m": COUNTS.repeat(2)[::2]}, "masked_m: expected contiguous"),
        ({"masked_m": meta_like(COUNTS)}, "masked_m: expected device cpu"),
        ({"masked_m": COUNTS + 1}, "masked_m: expected values from 0 to 5, got values from 1 to 6"),
        ({"masked_m": COUNTS - 1}, "got values from -1 to 4"),
        ({"m_indices": OWNERS}, "m_indices: expected None, as x is"),
        ({"x": X2, "masked_m": None, "m_indices": OWNERS.long()}, "m_indices: expected dtype int32"),
        ({"x": X2, "masked_m": None, "m_indices": OWNERS[:4]}, r"m_indices: expected shape \(5\)"),
        ({"x": X2, "masked_m": None, "m_indices": OWNERS.repeat(2)[::2]}, "m_indices: expected contiguous"),
        ({"x": X2, "masked_m": None, "m_indices": meta_like(OWNERS)}, "m_indices: expected device cpu"),
        ({"clamp_limit": 0.0}, "clamp_limit: expected a positive number"),
        ({"clamp_limit": -10.0}, "clamp_limit"),
        ({"clamp_limit": math.nan}, "clamp_limit"),
        ({"clamp_limit": math.inf}, "clamp_limit"),
        ({"group_size": 64}, "group_size: expected 128"),
        ({"arch": 90}, "arch: expected Arch.SM90"),
        ({"scale_format": "ue8m0"}, "scale_format: expected a ScaleFormat"),
        ({"out_q": torch.empty(3, 5, 256)}, "out_q: expected dtype float8_e4m3fn"),
        ({"out_q": torch.empty(3, 5, 512, dtype=torch.float8_e4m3fn)}, r"out_q: expected shape \(3, 5, 256\)"),
        ({"out_q": torch.empty(3, 5, 256, dtype=torch.float8_e4m3fn, device="meta")}, "out_q: expected device cpu"),
        ({"out_s": torch.empty(3, 5, 2, dtype=torch.int32)}, "out_s: expected dtype float32"),
        ({"out_s": torch.empty(3, 5, 1)}, r"out_s: expected shape \(3, 5, 2\)"),
        ({"out_s": torch.empty(3, 1, 2).expand(3, 5, 2)}, "out_s: expected elements that do not overlap"),
        ({"scale_format": ScaleFormat.UE8M0}, "out_s: expected dtype int32"),
    ],
)
def test_bad_arguments_write_nothing(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "x": X3,
        "masked_m": COUNTS,
        "arch": Arch.SM90,
        "out_q": torch.full((3, 5, 256), 3.0).to(torch.float8_e4m3fn),
        "out_s": torch.full((3, 5, 2), 3.0),
    } | changes
    with pytest.raises(ArgumentError, match=message):
        fused_silu_mul_per_token_group_quant(arguments.pop("x"), **arguments)
    for name in {"out_q", "out_s"} - set(changes):
        assert (arguments[name].float() == 3.0).all()


def test_cpu_tensors_do_not_guess_an_arch() -> None:
    with pytest.raises(UnsupportedArchError, match=r"arch=Arch\.SM90"):
        fused_silu_mul_per_token_group_quant(X2)


def test_bad_arguments_of_the_activation() -> None:
    for arguments, message in (
        ({"x": X2.float()}, "bfloat16"),
        ({"x": X2[:, :3]}, "even last dimension"),
        ({"x": X2, "clamp_limit": 0.0}, "clamp_limit"),
        ({"x": X2, "arch": None}, "arch"),
    ):
        with pytest.raises(ArgumentError, match=message):
            silu_and_mul(arguments.pop("x"), **({"arch": Arch.SM90} | arguments))
