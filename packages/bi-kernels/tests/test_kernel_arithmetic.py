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

from bi_kernels import Arch, ScaleFormat, silu_and_mul
from bi_kernels.launch import silu_mul_quant_plan
from bi_kernels.reference.group_quant import quantize_groups
from bi_kernels.reference.numerics import exp
from bi_kernels.testing import assert_bitwise_equal

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("c++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler; test_silu_mul_quant_exact.py needs none")


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    path = tmp_path_factory.mktemp("host") / "arithmetic.so"
    command = [COMPILER, "-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    command += [f"-I{HERE.parent / 'csrc' / 'include'}", str(HERE / "host_arithmetic.cpp"), "-o", str(path)]
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
        assert_bitwise_equal(kernel_silu_mul(lib, gate, up, limit, arch), want)


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
    v = v[torch.isfinite(v)].float()
    for exponent in range(-33, 121):
        scale = 2.0**exponent
        out = torch.empty_like(v)
        lib.scaled_by_inverse(pointer(v), ctypes.c_float(scale), pointer(out), ctypes.c_int64(v.numel()))
        assert_bitwise_equal(out, v / torch.tensor(scale), f"scale=2**{exponent}")


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


def test_geometry_is_the_python_one(lib):
    for groups in range(1, 513):
        plan = (ctypes.c_int * 3)()
        lib.silu_mul_quant_plan(groups, plan)
        want = silu_mul_quant_plan(groups * 128)
        assert tuple(plan) == (want.groups_per_block, want.blocks_per_row, want.threads)
