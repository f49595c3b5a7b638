"""What the build promises: recorded, without fast math, with a geometry that cannot see the batch."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest

from bi_kernels import launch
from bi_kernels._version import __version__

PACKAGE = Path(__file__).parents[1]
KEYS = {"package", "version", "torch_target", "archs", "nvcc", "flags", "sources_sha256", "compiler"}
FAST_MATH = re.compile(r"fast.?math|ftz=true|prec-(div|sqrt)=false|fmad=true")


def installed() -> Path:
    spec = importlib.util.find_spec("bi_kernels")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def test_library_and_build_info_come_together_and_agree_with_the_package():
    info_file = installed() / "build_info.json"
    assert info_file.is_file() == (installed() / "_C.so").is_file()
    if info_file.is_file():
        info = json.loads(info_file.read_text())
        assert set(info) == KEYS
        assert (info["package"], info["version"], info["torch_target"]) == ("bi-kernels", __version__, "2.10")
        assert info["archs"]
        assert set(info["archs"]) <= {"90a", "100f"}
        assert re.fullmatch(r"[0-9a-f]{64}", info["sources_sha256"])
        assert all(info[key] for key in ("nvcc", "compiler"))
        assert "-fmad=false" in info["flags"]
        assert not FAST_MATH.search(" ".join(info["flags"]))


def test_build_rules_have_no_fast_math_and_no_ptx():
    rules = re.sub(r"#.*", "", (PACKAGE / "cmake" / "BiExtension.cmake").read_text())
    assert "-fmad=false" in rules
    assert not FAST_MATH.search(rules)
    assert re.findall(r"-gencode=\S+", rules) == ['-gencode=arch=compute_${arch},code=sm_${arch}")']


def test_kernels_name_every_rounding():
    """Divisions, square roots and exponentials go through bi/numerics.cuh, where each has its rounding in its name."""
    inexact = re.compile(
        r"__(fdividef|expf|logf|powf|frcp\w*|fsqrt\w*)\b|\b(expf?|exp2f?|logf?|log2f?|powf?|rsqrtf?)\("
    )
    for source in sorted((PACKAGE / "csrc").rglob("*.cu*")):
        code = re.sub(r"//.*", "", source.read_text())
        assert not inexact.search(code), source.name


def test_kernel_headers_do_not_include_torch():
    for header in sorted((PACKAGE / "csrc").rglob("*.cuh")):
        assert "torch" not in re.sub(r"//.*", "", header.read_text()), header.name


def test_geometry_has_no_batch_parameter():
    assert list(inspect.signature(launch.silu_mul_quant_plan).parameters) == ["intermediate"]


@pytest.mark.parametrize(
    ("intermediate", "plan"),
    [
        (128, (4, 1, 32)),
        (512, (4, 1, 32)),
        (640, (8, 1, 64)),
        (1536, (12, 1, 96)),
        (2048, (16, 1, 128)),
        (4096, (32, 1, 256)),
        (4224, (20, 2, 160)),
        (7168, (28, 2, 224)),
        (17408, (28, 5, 224)),
    ],
    ids=lambda value: f"intermediate={value}" if isinstance(value, int) else "",
)
def test_geometry(intermediate, plan):
    found = launch.silu_mul_quant_plan(intermediate)
    assert (found.groups_per_block, found.blocks_per_row, found.threads) == plan


def test_geometry_covers_every_group_once():
    for groups in range(1, 513):
        plan = launch.silu_mul_quant_plan(groups * 128)
        assert plan.groups_per_block * (plan.blocks_per_row - 1) < groups <= plan.groups_per_block * plan.blocks_per_row
        assert plan.threads == plan.groups_per_block * launch.LANES_PER_GROUP <= 256
        assert plan.threads % 32 == 0


@pytest.mark.parametrize("intermediate", [0, -128, 100, 129])
def test_geometry_refuses_ragged_rows(intermediate):
    with pytest.raises(ValueError, match="multiple of 128"):
        launch.silu_mul_quant_plan(intermediate)


def test_geometry_constants_are_those_of_the_kernel():
    header = (PACKAGE / "csrc" / "include" / "bi" / "launch.cuh").read_text()
    constants = dict(re.findall(r"constexpr int k(\w+) = (\d+);", header))
    assert int(constants["GroupSize"]) == launch.GROUP_SIZE
    assert int(constants["LanesPerGroup"]) == launch.LANES_PER_GROUP
    assert int(constants["GroupsPerWarp"]) == launch.GROUPS_PER_WARP
    assert int(constants["MaxGroupsPerBlock"]) == launch.MAX_GROUPS_PER_BLOCK
