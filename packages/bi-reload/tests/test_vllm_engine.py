"""A real vLLM 0.26 engine with captured graphs: A, B, A, B with the bits of a cold start and no address moved.

The roles of ``reload_engine.py`` run in processes of their own, at once, on two generated checkpoints that differ in
their seed; ``BI_RELOAD_RECORDS`` names a folder with records of an earlier run. Needs ``ci/`` on the import path.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

LIMIT = int(os.environ.get("BI_RELOAD_LIMIT", "400"))  # seconds for all engines together
MINUS_INFINITY = -(1 << 23)  # its bits as an int32
SCRIPT = Path(__file__).with_name("reload_engine.py")
ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    "BI_PARTIAL": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
}


def play(tmp_path_factory: pytest.TempPathFactory, *roles: str, heads: int) -> dict[str, Any]:
    """The records of ``roles``, on two checkpoints with ``heads`` attention heads."""
    given = os.environ.get("BI_RELOAD_RECORDS")
    folder = Path(given) if given else tmp_path_factory.mktemp("records")
    if not given:
        from aligned_e2e.vllm_checkpoint import SIZES, write_checkpoint

        size = dataclasses.replace(SIZES["tiny"], num_heads=heads)
        for name, seed in (("a", 1), ("b", 2)):
            write_checkpoint(folder / name, size, seed=seed, device="cuda")
        running = []
        for role in roles:
            command = [sys.executable, str(SCRIPT), role, "--output", str(folder / f"{role}.json")]
            command += ["--a", str(folder / "a"), "--b", str(folder / "b")]
            with (folder / f"{role}.log").open("w") as log:
                environment = os.environ | ENVIRONMENT
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + LIMIT
        try:
            for process, role in zip(running, roles, strict=True):
                status = process.wait(max(1, deadline - time.monotonic()))
                assert status == 0, (folder / f"{role}.log").read_text()[-4000:]
        finally:
            for process in running:
                process.kill()
    return {role: json.loads((folder / f"{role}.json").read_text()) for role in roles}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return play(tmp_path_factory, "warm", "cold", "stock", heads=64)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One engine whose 32 heads vLLM pads to 64."""
    return play(tmp_path_factory, "padded", heads=32)["padded"]


def assert_same(one: Any, other: Any) -> None:
    assert "error" not in one, one["error"]
    assert "error" not in other, other["error"]
    for what in ("tokens", "logprobs", "prompt_logprobs", "logits"):
        different = sum(a != b for a, b in zip(one[what], other[what], strict=True))
        assert not different, f"{what}: {different} of {len(one[what])} differ"


@pytest.mark.parametrize("again", ["A again", "A repeated"])
def test_the_old_weights_come_back(records: Any, again: str) -> None:
    assert_same(records["warm"]["A"], records["warm"][again])


@pytest.mark.parametrize("way", ["B", "B repeated", "B in kernel format", "B after the failure"])
def test_warm_equals_cold_in_every_logprob(records: Any, way: str) -> None:
    assert_same(records["cold"]["B"], records["warm"][way])


def test_the_two_checkpoints_differ(records: Any) -> None:
    """Otherwise everything above would hold for a reload that does nothing."""
    a, b = records["warm"]["A"], records["warm"]["B"]
    assert all(one != other for one, other in zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True) if one)
    before, after = records["warm"]["fingerprints of A"], records["warm"]["fingerprints of B"]
    assert not [name for name in before if before[name] == after[name]]


@pytest.mark.parametrize("when", ["after B", "after A", "at the end", "after the failure"])
def test_no_address_moved(records: Any, when: str) -> None:
    found = records["warm"][f"addresses {when}"]
    assert found["tensors"] > 100
    assert found["count"] == 0, "\n".join(found["moved"])


def test_fingerprints_are_equal_on_both_sides(records: Any) -> None:
    warm, cold = records["warm"], records["cold"]
    assert warm["fingerprints of B"] == cold["fingerprints of B"] == warm["fingerprints of B again"]
    assert warm["fingerprints of A"] == warm["fingerprints of A again"]
    assert warm["sinks"] == cold["sinks"]
    assert warm["announced"] > 100  # taken on a CPU, compared on the GPU while the buckets came
    assert "error" not in warm["reload A in buckets"]


def test_a_failed_reload_is_not_served(records: Any) -> None:
    warm = records["warm"]
    assert warm["failed reload"]["error"].startswith("ConnectionError")
    assert warm["serving after it"]["error"].startswith("ReloadError: the model must not be served")
    assert "error" not in warm["whole reload after it"]


def test_the_finaliser_refreshed_the_broadcast(records: Any) -> None:
    assert records["warm"]["report"]["refreshed"] == ["model.layers.0.hc_attn_fn_broadcast"]


def test_stock_keeps_old_sinks_and_moves_the_broadcast(records: Any) -> None:
    """The twin: without the hooks the same reload does what they are for."""
    stock = records["stock"]
    assert stock["sinks"] == stock["sinks before"] != records["cold"]["sinks"]
    assert any("hc_attn_fn_broadcast: moved" in line for line in stock["addresses after B"]["moved"])


def test_padded_heads_come_back(padded: Any) -> None:
    assert_same(padded["A"], padded["A again"])
    assert padded["A"]["logits"] != padded["B"]["logits"]


@pytest.mark.parametrize("when", ["after B", "after A again"])
def test_no_address_moved_with_padded_heads(padded: Any, when: str) -> None:
    assert padded["captured"]
    found = padded[f"addresses {when}"]
    assert found["tensors"] > 100
    assert found["count"] == 0, "\n".join(found["moved"])


@pytest.mark.parametrize("checkpoint", ["A", "B", "A again"])
def test_padded_sinks_are_minus_infinity(padded: Any, checkpoint: str) -> None:
    """A padding head has no key: its sink must not be zero, and must survive every reload."""
    sinks, stored = padded[f"sinks of {checkpoint}"], padded[f"stored sinks of {checkpoint}"]
    assert len(stored) == 4
    assert sinks == {name: bits + [MINUS_INFINITY] * 32 for name, bits in stored.items()}
