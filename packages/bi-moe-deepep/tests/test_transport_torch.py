"""Expert parallelism over torch.distributed, in real gloo processes: what it refuses, and who is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("torch_ranks.py")


def run(program: str, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """What ``program`` returned on each rank."""
    command = [sys.executable, str(WORKER), str(folder), str(world_size)]
    ranks = [subprocess.Popen([*command, str(rank), program]) for rank in range(world_size)]
    assert [rank.wait(300) for rank in ranks] == [0] * world_size
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("refusals", 2, tmp_path_factory.mktemp("ranks"))


def test_b48_ranks_that_disagree_about_capacity_are_refused_before_the_first_dispatch(
    refused: list[dict[str, Any]],
) -> None:
    for name in ("capacity", "dispatcher"):
        words = refused[0][name]
        assert words == refused[1][name]
        assert words.startswith("CapacityError: dispatch: expected the same constants on every rank")
        assert "capacity 128 on rank 0, 256 on rank 1" in words


def test_b49_more_tokens_than_capacity_is_refused_on_every_rank(refused: list[dict[str, Any]]) -> None:
    assert refused[0]["over"] == refused[1]["over"]
    assert refused[0]["over"].startswith(
        "CapacityError: num_tokens: expected at most the capacity of 8, got 9 on rank 1. Nothing was dispatched."
    )
    assert [found["staged"] for found in refused] == ["no error: True"] * 2


def test_a_corrupt_count_stops_every_rank(refused: list[dict[str, Any]]) -> None:
    assert refused[0]["corrupt"] == refused[1]["corrupt"]
    assert refused[0]["corrupt"].startswith("TransportError: received counts: expected ")
    assert "for expert 5 on rank 1" in refused[0]["corrupt"]


def test_ranks_that_make_different_calls_are_told(refused: list[dict[str, Any]]) -> None:
    assert refused[0]["calls"] == refused[1]["calls"]
    assert "got low_latency_dispatch on rank 0, all_gather_ints on rank 1" in refused[0]["calls"]


def test_a_failed_group_stays_failed(refused: list[dict[str, Any]]) -> None:
    for found in refused:
        assert found["after"].startswith("TransportError: all_gather_ints: the group failed before (collective: ")
        assert found["after"].endswith("Make a new group.")


def test_numbers_of_different_length(refused: list[dict[str, Any]]) -> None:
    assert [found["ints"] for found in refused] == [[(0,), (0, 1)]] * 2
    assert refused[0]["alone"] == [(7,)]


def test_groups_of_other_ranks_do_not_mix(refused: list[dict[str, Any]]) -> None:
    assert refused[0]["control"].startswith("ArgumentError: control_group: expected the ranks of group in their order")


def test_watchdog(tmp_path: Path) -> None:
    found, _ = run("absent_rank", 2, tmp_path)
    assert found["words"].startswith("TransportError: all_gather_ints: expected all 2 ranks within 0.5 s, got ")
    assert found["seconds"] < 1.4
