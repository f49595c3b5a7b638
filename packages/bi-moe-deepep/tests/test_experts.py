from __future__ import annotations

import pytest
import torch

from bi_kernels import (
    Arch,
    ArgumentError,
    ScaleFormat,
    UnsupportedArchError,
    dequantize,
    fused_silu_mul_per_token_group_quant,
    per_block_quant_fp8,
    per_token_group_quant_fp8,
    scale_format_for,
)
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import expert_mlp, expert_mlp_contiguous, fp8_gemm_nt

NUM_EXPERTS, ROWS, HIDDEN, INTERMEDIATE = 3, 5, 256, 128
ARCHS = pytest.mark.parametrize("arch", list(Arch), ids=lambda arch: arch.name)
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    parts: list[torch.Tensor] = []
    for n, k in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)):
        quantised = [
            per_block_quant_fp8(
                torch.randn(n, k, generator=generator) * k**-0.5, scale_format=ScaleFormat.FLOAT32_CEIL_UE8M0
            )
            for _ in range(NUM_EXPERTS)
        ]
        parts += [torch.stack([q for q, _ in quantised]), torch.stack([s for _, s in quantised])]
    w13, s13, w2, s2 = parts
    return w13, s13, w2, s2


W = weights()
X = (torch.randn(NUM_EXPERTS, ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)) * 2).bfloat16()
COUNTS = torch.tensor([5, 0, 2], dtype=torch.int32)


@ARCHS
@pytest.mark.parametrize("clamp_limit", [None, 0.5])
def test_is_the_chain_of_its_parts(arch: Arch, clamp_limit: float | None) -> None:
    w13, s13, w2, s2 = W
    out = expert_mlp(X, COUNTS, *W, arch=arch, clamp_limit=clamp_limit)
    for expert, count in enumerate(COUNTS.tolist()):
        q, s = per_token_group_quant_fp8(X[expert, :count], scale_format=scale_format_for(arch))
        hidden = fp8_gemm_nt(q, s, w13[expert], s13[expert])
        q, s = fused_silu_mul_per_token_group_quant(hidden, clamp_limit=clamp_limit, arch=arch)
        assert_bitwise_equal(out[expert, :count], fp8_gemm_nt(q, s, w2[expert], s2[expert]), f"expert {expert}")


@ARCHS
def test_contiguous_gives_the_same_rows(arch: Arch) -> None:
    masked = expert_mlp(X, COUNTS, *W, arch=arch, clamp_limit=10.0)
    m_indices = torch.tensor([2, 0, -1, 0, 2], dtype=torch.int32)
    row = torch.tensor([1, 4, 0, 0, 0])
    x = X[m_indices.clamp(min=0).long(), row]
    out = expert_mlp_contiguous(x, m_indices, *W, arch=arch, clamp_limit=10.0)
    for number, expert in enumerate(m_indices.tolist()):
        want = torch.zeros(HIDDEN, dtype=torch.bfloat16) if expert < 0 else masked[expert, row[number]]
        assert_bitwise_equal(out[number], want, f"row {number}")


@ARCHS
def test_lies_near_the_network_in_float64(arch: Arch) -> None:
    """Not a bound of one op: a check that gate, up and the four scales are where they belong."""
    w13, s13, w2, s2 = (part.double() for part in W)

    def scaled(w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return w * s.repeat_interleave(128, -2).repeat_interleave(128, -1)

    gate, up = (X.double() @ scaled(w13, s13).mT).chunk(2, -1)
    want = (gate / (1 + torch.exp(-gate)) * up) @ scaled(w2, s2).mT
    out = expert_mlp(X, torch.full((3,), ROWS, dtype=torch.int32), *W, arch=arch).double()
    # Two quantisations to e4m3 with relative errors up to 2**-4 (and scales rounded up): a few percent in norm.
    assert float((out - want).norm() / want.norm()) < 0.06


def test_b53_scales_have_the_archs_format_and_shape() -> None:
    x = torch.zeros(2, 64, 1024, dtype=torch.bfloat16)
    _, s = per_token_group_quant_fp8(x, scale_format=scale_format_for(Arch.SM100))
    assert (s.dtype, s.shape) == (torch.int32, (2, 64, 1024 // 512))
    _, s = per_token_group_quant_fp8(x, scale_format=scale_format_for(Arch.SM90))
    assert (s.dtype, s.shape) == (torch.float32, (2, 64, 1024 // 128))
    q, s = per_token_group_quant_fp8(X[0], scale_format=ScaleFormat.UE8M0)
    back = dequantize(q, s)  # bytes, not float32 re-rounded: they are powers of two by construction
    assert bool(((back - X[0].float()).abs() <= 2.0**-4 * X[0].float().abs() + 2.0**-9).all())


def test_rows_past_the_counts() -> None:
    out = torch.full_like(X, 7.0)
    assert expert_mlp(X, COUNTS, *W, arch=Arch.SM90, out=out) is out
    assert_bitwise_equal(out[1], torch.full_like(X[1], 7.0), "untouched")
    assert_bitwise_equal(out[2, 2:], torch.full_like(X[2, 2:], 7.0), "untouched")
    fresh = expert_mlp(X, COUNTS, *W, arch=Arch.SM90)
    assert_bitwise_equal(fresh[2, 2:], torch.zeros_like(X[2, 2:]), "fresh: zero")
    assert_bitwise_equal(fresh[0], out[0])


def test_empty() -> None:
    none = torch.zeros(3, dtype=torch.int32)
    assert expert_mlp(X[:, :0], none, *W, arch=Arch.SM90).shape == (3, 0, HIDDEN)
    assert_bitwise_equal(expert_mlp(X, none, *W, arch=Arch.SM90), torch.zeros_like(X))
    assert expert_mlp_contiguous(X[0, :0], none[:0], *W, arch=Arch.SM90).shape == (0, HIDDEN)


def test_cpu_tensors_have_no_arch_to_detect() -> None:
    with pytest.raises(UnsupportedArchError, match="arch="):
        expert_mlp(X, COUNTS, *W)


def test_bad_input_writes_nothing() -> None:
    w13, s13, w2, s2 = W
    out = torch.full_like(X, 7.0)
    for name, arguments in {
        "x": (X.float(), COUNTS, *W),
        "counts": (X, COUNTS.long(), *W),
        "masked_m": (X, COUNTS + 1, *W),
        "w13": (X, COUNTS, w13[:, :, :128], s13, w2, s2),
        "w2": (X, COUNTS, w13, s13, w2[:, :, :64], s2),
        "ws": (X, COUNTS, w13, s13[:, :1], w2, s2),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name}: expected .* got "):
            expert_mlp(*arguments, arch=Arch.SM90, out=out)
    with pytest.raises(ArgumentError, match=r"^w13: .*even"):
        expert_mlp(X, COUNTS, w13[:, :-1], s13, w2, s2, arch=Arch.SM90, out=out)
    with pytest.raises(ArgumentError, match=r"^x: .*contiguous"):
        expert_mlp(X.transpose(0, 1).contiguous().transpose(0, 1), COUNTS, *W, arch=Arch.SM90, out=out)
    assert_bitwise_equal(out, torch.full_like(X, 7.0))
    with pytest.raises(ArgumentError, match=r"^out: "):
        expert_mlp(X, COUNTS, *W, arch=Arch.SM90, out=out[:, :1])
    with pytest.raises(ArgumentError, match=r"^m_indices: "):
        expert_mlp_contiguous(X[0], torch.full((ROWS,), 3, dtype=torch.int32), *W, arch=Arch.SM90, out=out[0])
    assert_bitwise_equal(out, torch.full_like(X, 7.0))
