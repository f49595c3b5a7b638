"""The bits of an expert layer in 2 and 4 gloo processes, for every distribution and capacity, are those of one."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bi_kernels.testing import assert_bitwise_equal, first_difference

WORKER = Path(__file__).with_name("torch_ranks.py")


@pytest.mark.parametrize("world_size", [2, 4])
def test_b64_result_is_independent_of_ep_size_capacity_and_empty_ranks(world_size: int, tmp_path: Path) -> None:
    worker = runpy.run_path(str(WORKER))
    command = [sys.executable, str(WORKER), str(tmp_path), str(world_size)]
    ranks = [subprocess.Popen([*command, str(rank), "equal_bits"]) for rank in range(world_size)]
    assert [rank.wait(300) for rank in ranks] == [0] * world_size
    by_rank = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]
    results = {name: torch.cat([found[name] for found in by_rank]) for name in by_rank[0]}
    want = worker["without_dispatch"]()
    twin = results.pop("twin")
    assert len(results) > 8
    for name, have in results.items():
        assert_bitwise_equal(have, want, name)
    # The twin adds bfloat16 sums of the ranks, as a reduce-scatter does.
    assert first_difference(twin, want) is not None
