"""The selector's CUDA source on a CPU, for hosts without a GPU: the same text, its warps, blocks and clusters emulated.

Arithmetic, barriers and the order of output are those of csrc/top_k_per_row.cuh. How threads interleave is random, and
a deadlock or a warp that parts ways at an intrinsic is an error. test_top_k_per_row_exact.py runs the compiled kernel.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from bi_kernels.testing import assert_bitwise_equal
from bi_sparse_attn import top_k_per_row_prefill

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("c++")
SHARED_HEADERS = HERE.parents[1] / "bi-kernels" / "csrc" / "include"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler; test_top_k_per_row_exact.py needs none")


def build(folder: Path, header: str | None = None) -> ctypes.CDLL:
    """Compile the kernel for the host; ``header``: a changed source, for a test of the emulation itself."""
    include = HERE.parent / "csrc"
    if header is not None:
        include = folder
        (folder / "top_k_per_row.cuh").write_text(header)
    path = folder / "top_k.so"
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    flags += [f"-I{where}" for where in (include, HERE, SHARED_HEADERS)]
    subprocess.run([COMPILER, *flags, str(HERE / "host_top_k.cpp"), "-o", str(path)], check=True)
    library = ctypes.CDLL(os.fspath(path))
    library.top_k_per_row.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("host"))


def run(
    *tensors: torch.Tensor, library: ctypes.CDLL, top_k: int, split: int, held: int = 0
) -> tuple[str, torch.Tensor]:
    """What went wrong, and the output; two of its columns are more than ``top_k``."""
    rows, columns = tensors[0].shape
    out = torch.full((rows, top_k + 2), 77, dtype=torch.int32)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (*tensors, out))
    sizes = (ctypes.c_int64(n) for n in (rows, columns, top_k, top_k + 2))
    error = library.top_k_per_row(*pointers, *sizes, split, held, ctypes.c_uint32(1))
    return error.decode(), out


def scores(kind: str, columns: int) -> torch.Tensor:
    """Two rows: one of every way through the kernel, see test_top_k_per_row_exact.py."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(2, columns, generator=generator)
    u = torch.rand(2, columns, generator=generator)
    levels = torch.randint(2**20, (2, columns), generator=generator, dtype=torch.int32)
    return {
        "normal": x,
        "relu": torch.where(u < 0.05, x, torch.where(u < 0.5, 0.0, -0.0)),
        "constant": torch.full_like(x, -3.5),
        "mostly nan": torch.where(u < 0.99, math.nan, x),
        "one bin": (levels + 0x3F800000).view(torch.float32),
    }[kind].contiguous()


@pytest.mark.parametrize("kind", ["normal", "relu", "constant", "mostly nan", "one bin"])
@pytest.mark.parametrize(
    ("columns", "top_k", "split", "held"),
    [(100, 128, 1, 0), (3001, 64, 2, 0), (6001, 512, 1, 0), (8192, 512, 1, 0), (8195, 512, 1, 0), (9001, 512, 2, 0),
     (9001, 3000, 2, 0), (9001, 2048, 4, 0), (9001, 512, 2, 300), (12_345, 64, 8, 0)],
    ids=str,
)  # fmt: skip
def test_equals_the_reference(library: ctypes.CDLL, kind: str, columns: int, top_k: int, split: int, held: int) -> None:
    logits = scores(kind, columns)
    starts, ends = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([columns, columns - 1], dtype=torch.int32)
    error, out = run(logits, starts, ends, library=library, top_k=top_k, split=split, held=held)
    assert error == ""
    want = torch.full_like(out, 78)
    top_k_per_row_prefill(logits, starts, ends, top_k, out=want)
    assert_bitwise_equal(out, want)


def test_the_emulation_sees_lanes_that_part_ways(tmp_path: Path) -> None:
    """A shuffle behind a condition that only some lanes meet: on a GPU the warp would wait for ever."""
    source = (HERE.parent / "csrc" / "top_k_per_row.cuh").read_text()
    broken = source.replace("digit == its;", "digit == __shfl_sync(~0u, digit, leader);")
    assert broken != source
    logits = scores("mostly nan", 9001)
    bounds = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([9001, 9001], dtype=torch.int32)
    error, _ = run(logits, *bounds, library=build(tmp_path, broken), top_k=64, split=1)
    assert error.startswith("lanes of a warp at lines")


@pytest.mark.parametrize(
    ("rows", "columns", "split"),
    [
        (1, 4096, 1),
        (1, 8192, 1),
        (300, 16_384, 1),
        (1, 32_768, 8),
        (64, 32_768, 2),
        (33, 32_768, 4),
        (256, 32_768, 2),
        (256, 131_072, 8),
    ],
    ids=str,
)
def test_blocks_per_row(library: ctypes.CDLL, rows: int, columns: int, split: int) -> None:
    """Rows that one block holds share none; few long ones share many. The bits are those of the tests above."""
    assert library.top_k_split(ctypes.c_int64(rows), ctypes.c_int64(columns), 132) == split
