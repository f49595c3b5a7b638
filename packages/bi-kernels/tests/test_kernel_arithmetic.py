"""The CUDA sources' arithmetic against the references, over whole domains and without a GPU.

The headers in csrc/include/bi compile for the host too. What only a GPU has (its approximate reciprocal) is replaced by
every value that it may return.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bi_kernels import Arch, ScaleFormat, log_softmax, silu_and_mul
from bi_kernels.launch import silu_mul_quant_plan
from bi_kernels.reference.group_quant import quantize_groups
from bi_kernels.reference.numerics import exp, log
from bi_kernels.testing import assert_bitwise_equal

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("c++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler; test_silu_mul_quant_exact.py needs none")


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    path = tmp_path_factory.mktemp("host") / "arithmetic.so"
    command = [COMPILER, "-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    command += [
        f"-I{HERE.parent / 'csrc' / 'include'}",
        f"-I{HERE.parent / 'csrc'}",
        str(HERE / "host_arithmetic.cpp"),
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(path))


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def kernel_silu_mul(lib, gate, up, limit, arch):
    y = torch.empty_like(gate)
    pairs = ctypes.c_int64(gate.numel() // 2)
    lib.silu_mul_pairs(arch.value, pointer(gate), pointer(up), ctypes.c_float(limit or 0.0), pointer(y), pairs)
    return y


def all_bf16():
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("limit", [None, 10.0, 7.013], ids=lambda v: f"limit={v}")
@pytest.mark.parametrize("arch", list(Arch), ids=lambda a: a.name)
def test_every_gate_and_every_up_give_the_reference_bits(lib, arch, limit):
    values = all_bf16()
    values = values[torch.isfinite(values)]  # otherwise the kernel marks the whole group, whatever the product
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
    ones = torch.ones_like(values)
    # -90 takes the exact division, -86.5 is the first that must, -86 the last that need not.
    for gate, up in ((values, ones), (values, shuffled), (ones * -90, values), (ones * -86.5, values), (ones, values)):
        want = silu_and_mul(torch.stack([gate, up], -1), clamp_limit=limit, arch=arch).squeeze(-1)
        got = kernel_silu_mul(lib, gate, up, limit, arch)
        # Hopper's kernel rounds a subnormal product once, torch twice: a unit of 2**-133 that no scale or code can see.
        tiny = (
            (want.abs() < 2.0**-126) & (got.abs() <= 2.0**-126) if arch is Arch.SM90 else torch.zeros(len(got)).bool()
        )
        assert_bitwise_equal(got.masked_fill(tiny, 0.0), want.masked_fill(tiny, 0.0))
        assert ((got.double() - want.double()).abs()[tiny] <= 2.0**-133).all()
        assert torch.equal(torch.signbit(got), torch.signbit(want))


@pytest.mark.parametrize("ulps", [-2, -1, 1, 2], ids=lambda v: f"ulps={v}")
def test_hopper_quotient_does_not_see_the_reciprocals_error(lib, ulps):
    gate = all_bf16()
    up = torch.ones_like(gate)
    finite = torch.isfinite(gate)
    want = kernel_silu_mul(lib, gate, up, None, Arch.SM90)
    lib.set_reciprocal_error(ulps)
    try:
        assert_bitwise_equal(kernel_silu_mul(lib, gate, up, None, Arch.SM90)[finite], want[finite])
    finally:
        lib.set_reciprocal_error(0)


def test_nonfinite_input_stays_nonfinite_without_a_clamp(lib):
    for arch in Arch:
        for bad in (torch.nan, torch.inf, -torch.inf):
            for gate, up in ((bad, 0.0), (bad, 1.0), (0.0, bad), (-90.0, bad), (1.0, bad)):
                pair = [torch.full((2,), v, dtype=torch.bfloat16) for v in (gate, up)]
                assert not torch.isfinite(kernel_silu_mul(lib, *pair, None, arch)).any(), (arch, gate, up)


def test_scale_of_every_amax(lib):
    amax = all_bf16()[:0x7F80].float()
    for scale_format in (ScaleFormat.FLOAT32, ScaleFormat.FLOAT32_CEIL_UE8M0):
        scale = torch.empty_like(amax)
        ceil = int(scale_format is not ScaleFormat.FLOAT32)
        lib.group_scales(ceil, pointer(amax), pointer(scale), ctypes.c_int64(amax.numel()))
        assert_bitwise_equal(scale, quantize_groups(amax.unsqueeze(-1), scale_format)[1], scale_format.name)


def test_multiplying_by_the_inverse_scale_is_dividing(lib):
    v = all_bf16()
    v = v[torch.isfinite(v)]
    for exponent in range(-33, 121):
        scale = 2.0**exponent
        out = torch.empty(v.numel(), dtype=torch.float32)
        lib.scaled_pairs(pointer(v), ctypes.c_float(scale), pointer(out), ctypes.c_int64(v.numel() // 2))
        want = v.float() / torch.tensor(scale)
        seen = want.abs() >= 2.0**-126  # what lies below has the code 0, whose smallest neighbour is 2**-9
        assert_bitwise_equal(out[seen], want[seen], f"scale=2**{exponent}")
        assert (out[~seen].abs() <= 2.0**-126).all()
        assert torch.equal(torch.signbit(out), torch.signbit(want))


def test_one_plus_exp(lib):
    # Every 4093rd float32 (a prime, so all mantissas and exponents take part), and the neighbours of the thresholds.
    bits = torch.arange(0, 1 << 32, 4093, dtype=torch.int64)
    edges = torch.tensor([-80.0, 0.0, 88.0, 88.72284, 89.0, -104.0]).view(torch.int32).long()
    bits = torch.cat([bits, (edges.unsqueeze(-1) + torch.arange(-64, 65)).flatten() & 0xFFFFFFFF])
    v = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    v = v[~torch.isnan(v)].contiguous()
    out = torch.empty_like(v)
    lib.one_plus_exp(pointer(v), pointer(out), ctypes.c_int64(v.numel()))
    assert_bitwise_equal(out, 1.0 + exp(v))


def test_exp_and_log_of_the_log_softmax(lib):
    # Every 1021st negative float32, and every 509th from 1 to infinity.
    v = (torch.arange(1 << 31, (1 << 31) + 0x7F800001, 1021) - (1 << 32)).to(torch.int32).view(torch.float32)
    for values, function, want in (
        (torch.cat([v, torch.tensor([0.0, -torch.inf])]), lib.exp_negative, exp),
        (torch.arange(0x3F800000, 0x7F800000, 509, dtype=torch.int32).view(torch.float32), lib.log_from_one, log),
    ):
        out = torch.empty_like(values)
        function(pointer(values), pointer(out), ctypes.c_int64(values.numel()))
        assert_bitwise_equal(out, want(values))


@pytest.mark.parametrize("columns", [1, 2, 3, 31, 32, 33, 63, 100, 1000, 4097, 8192, 8193, 129_280, 151_936, 262_144])
def test_log_softmax_has_the_reference_bits(lib, columns):
    nodes = torch.empty(-(-columns // 32))
    for scale, special in ((3.0, 0.0), (40.0, -torch.inf), (3.0, torch.nan), (1.0, torch.inf)):
        x = torch.randn(1, columns) * scale
        x[0, columns // 3] = special
        out = torch.empty_like(x)
        lib.log_softmax_row(pointer(x), pointer(nodes), pointer(out), ctypes.c_int(columns))
        assert_bitwise_equal(out, log_softmax(x), f"{special}")


def test_geometry_is_the_python_one(lib):
    for groups in range(1, 513):
        plan = (ctypes.c_int * 4)()
        lib.silu_mul_quant_plan(groups, plan)
        want = silu_mul_quant_plan(groups * 128)
        assert tuple(plan) == (
            want.groups_per_block,
            want.blocks_per_row,
            want.threads,
            want.expert_row_blocks,
        )
