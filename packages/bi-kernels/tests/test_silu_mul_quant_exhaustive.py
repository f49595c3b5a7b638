"""Every pair of bfloat16 (gate, up), 2**32 of them, through the compiled kernel. Needs a GPU.

A row holds one gate, and all 65,536 ups in the order of their bits: a group's 128 ups share an exponent, so that its
codes show every bit of their products. With 65,536 rows that is every pair. Chunks keep it in a few GiB.
"""

from __future__ import annotations

import pytest
import torch

from bi_kernels import Arch, ScaleFormat, detect_arch, fused_silu_mul_per_token_group_quant
from bi_kernels.reference.group_quant import quantize_groups
from bi_kernels.reference.silu_mul_quant import silu_and_mul
from bi_kernels.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

ROWS = 1024  # per chunk


def every_bf16():
    return torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)


def chunks():
    """``(gates, x)``: a column of gates, and the input in which each meets every up."""
    values = every_bf16()
    x = torch.empty((ROWS, 2, 1 << 16), dtype=torch.bfloat16, device="cuda")
    x[:, 1] = values
    for gates in values.split(ROWS):
        x[:, 0] = gates.unsqueeze(-1)
        yield gates, x.view(ROWS, -1)


@pytest.mark.parametrize("limit", [None, 10.0], ids=lambda v: f"limit={v}")
@pytest.mark.parametrize("scale_format", [ScaleFormat.FLOAT32, ScaleFormat.FLOAT32_CEIL_UE8M0], ids=lambda f: f.name)
def test_every_pair_equals_the_reference(scale_format, limit):
    assert detect_arch(torch.device("cuda")) is Arch.SM90, "the product below is Hopper's: both factors are bfloat16"
    ups = every_bf16()
    seen = 0
    for gates, x in chunks():
        q, s = fused_silu_mul_per_token_group_quant(x, clamp_limit=limit, scale_format=scale_format)
        # The activation of each gate by the reference, and its definition of the product: one multiplication of two
        # bfloat16 numbers in float32, rounded to bfloat16.
        ones = torch.ones_like(gates)
        silu = silu_and_mul(torch.stack([gates, ones], -1), clamp_limit=limit, arch=Arch.SM90)
        up = ups.float() if limit is None else ups.float().clamp(-limit, limit)
        up = torch.where(torch.isfinite(ups), up + 0.0, torch.nan)
        y = (silu.float() * up).bfloat16()
        want_q, want_s = quantize_groups(y.float().view(ROWS, 512, 128), scale_format)
        assert_bitwise_equal(s.contiguous(), want_s, f"scales of gates from {gates[0].item()}")
        assert_bitwise_equal(q, want_q.view(ROWS, -1), f"codes of gates from {gates[0].item()}")
        seen += q.numel()
    assert seen == 1 << 32


def test_the_product_above_is_the_references():
    """The shortcut (each gate's SiLU once) against the reference on whole pairs, where both are cheap."""
    values = every_bf16()
    generator = torch.Generator("cuda").manual_seed(0)
    for limit in (None, 10.0):
        up = values[torch.randperm(1 << 16, device="cuda", generator=generator)]
        want = silu_and_mul(torch.cat([values, up]).view(1, -1), clamp_limit=limit, arch=Arch.SM90)[0]
        silu = silu_and_mul(torch.stack([values, torch.ones_like(values)], -1), clamp_limit=limit, arch=Arch.SM90)
        clamped = up.float() if limit is None else up.float().clamp(-limit, limit)
        got = (silu[:, 0].float() * torch.where(torch.isfinite(up), clamped + 0.0, torch.nan)).bfloat16()
        nan = torch.isnan(want)
        assert torch.equal(nan, torch.isnan(got))
        assert_bitwise_equal(got[~nan], want[~nan])
