"""vLLM 0.26 on two GPUs: the bits of one engine, over NCCL and over DeepEP, and a rank without requests waits for none.

Each rank is a process of ``vllm_expert_parallel.py``, on one generated checkpoint. ``run_vllm.sh bi-moe-deepep
dispatch`` runs this; it needs the wheels of all four packages and ``ci/`` on the import path, and covers DeepEP where
``deep_ep`` is installed. With ``$OUT`` set, ``expert_parallel.json`` there says what was compared.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

LIMIT = int(os.environ.get("BI_EP_LIMIT", "390"))  # seconds for all engines
WARM = 120  # of them for engines that find everything compiled
SCRIPT = Path(__file__).with_name("vllm_expert_parallel.py")
program = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "OMP_NUM_THREADS": "2",
}
ENGINES = ("nccl", "deepep") if importlib.util.find_spec("deep_ep") is not None else ("nccl",)
NAMES = {"nccl": "TorchTransport", "deepep": "DeepEPTransport"}
Records = dict[str, list[dict[str, Any]]]


def environments(transport: str) -> list[dict[str, str]]:
    """The environment of each rank; ``alone`` has one."""
    plain = {name: value for name, value in os.environ.items() if name not in ("BI_PARTIAL", "BI_EP_TRANSPORT")}
    if "deepep" in ENGINES:  # its wheel is linked to NVSHMEM without saying where that is
        folders = [f"{place}/lib" for place in importlib.import_module("nvidia.nvshmem").__path__]
        plain["LD_LIBRARY_PATH"] = os.pathsep.join([*folders, *filter(None, [plain.get("LD_LIBRARY_PATH")])])
    if transport == "alone":
        return [plain | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "0"}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
    group |= {"BI_EP_TRANSPORT": "nccl"} if transport == "nccl" else {}
    return [plain | ENVIRONMENT | group | {"VLLM_DP_RANK": str(rank)} for rank in range(2)]


def run(transports: tuple[str, ...], checkpoint: Path, folder: Path, end: float) -> dict[str, str]:
    """Run these engines at once, until ``end`` at most. Returns what became of each that failed."""
    ranks: dict[str, list[tuple[subprocess.Popen[bytes], Path]]] = {}
    for transport in transports:
        for rank, environment in enumerate(environments(transport)):
            output = folder / f"{transport}{rank}.json"
            command = [sys.executable, str(SCRIPT), "--checkpoint", str(checkpoint), "--output", str(output)]
            with output.with_suffix(".log").open("w") as log:
                process = subprocess.Popen(
                    command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            ranks.setdefault(transport, []).append((process, output))
    running = set(transports)
    while running:
        time.sleep(0.2)
        for transport in tuple(running):
            codes = [process.poll() for process, _ in ranks[transport]]
            if time.monotonic() > end or any(codes):  # the other rank would wait for one that failed
                for process, _ in ranks[transport]:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)  # each was started in a session of its own
                        process.wait()
            if None not in codes:
                running.discard(transport)
    return {
        transport: "\n".join(
            f"-- {output.stem}: exit {process.returncode}\n{output.with_suffix('.log').read_text()[-6000:]}"
            for process, output in mine
        )
        for transport, mine in ranks.items()
        if any(process.returncode for process, _ in mine)
    }


def difference(one: Records, other: Records, transport: str, name: str) -> list[str]:
    """Requests whose tokens, logprobs or prompt logprobs differ from those of one engine."""
    want = one["alone"][0]["rounds"]["alone"]["requests"]
    have: dict[str, Any] = {}
    for record in other[transport]:
        have |= record["rounds"][name]["requests"]
    assert want.keys() == have.keys()
    return [
        f"{request}: {what}" for request in want for what in want[request] if want[request][what] != have[request][what]
    ]


def row_differences(one: Records, other: Records, transport: str, name: str) -> dict[str, tuple[int, int]]:
    """By expert layer: rows that went in with equal bits, and how many of them came out with others."""
    found = {}
    for layer, rows in one["alone"][0]["rounds"]["alone"]["rows"].items():
        want = dict(map(tuple, rows))
        have = [pair for record in other[transport] for pair in record["rounds"][name]["rows"][layer]]
        common = [(want[key], out) for key, out in have if key in want]
        found[layer] = len(common), sum(a != b for a, b in common)
    return found


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Records, dict[str, str]]:
    """Records by transport, and what became of those without."""
    from aligned_e2e.vllm_checkpoint import SIZES, write_checkpoint

    folder = tmp_path_factory.mktemp("expert_parallel")
    write_checkpoint(folder / "checkpoint", SIZES["tiny"], seed=1, device="cuda")
    failed: dict[str, str] = {}
    # DeepEP's kernels give up on a rank that compiles for too long: it comes when everything is compiled.
    end = time.monotonic() + LIMIT
    failed |= run(("alone", "nccl"), folder / "checkpoint", folder, end - WARM * len(ENGINES[1:]))
    failed |= run(ENGINES[1:], folder / "checkpoint", folder, end)
    records = {
        transport: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{transport}?.json"))]
        for transport in ("alone", *ENGINES)
        if transport not in failed
    }
    summary: dict[str, Any] = {"failed": failed}
    for transport in (t for t in ENGINES if t in records and "alone" in records):
        for name in ("shared", "one idle"):
            summary[f"{transport}, {name}"] = {
                "requests": len(program.LENGTHS),
                "different": difference(records, records, transport, name),
                "rows by layer": row_differences(records, records, transport, name),
                "seconds": [record["rounds"][name]["seconds"] for record in records[transport]],
            }
    for transport, mine in records.items():
        summary[transport] = {"start_seconds": [r["start_seconds"] for r in mine], "staged": mine[0]["staged"]}
    print(json.dumps(summary, indent=1))
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "expert_parallel.json").write_text(json.dumps(summary, indent=1) + "\n")
    return records, failed


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.two_gpus
@pytest.mark.filterwarnings("ignore")
class TestTwoGpus:
    @pytest.mark.parametrize("transport", ENGINES)
    def test_engines_ran_to_their_end(self, engines: Any, transport: str) -> None:
        """Within the limit: also the round in which one rank has no requests."""
        records, failed = engines
        assert not failed.get("alone"), failed["alone"]
        assert not failed.get(transport), failed[transport]
        staged = records[transport][0]["staged"]
        assert staged["transports"] == [NAMES[transport]]
        assert staged["layers"] == 4
        assert {1, 4} <= set(staged["slices"])
        assert records["alone"][0]["staged"]["transports"] == []

    @pytest.mark.parametrize("name", ["shared", "one idle"])
    @pytest.mark.parametrize("transport", ENGINES)
    def test_two_ranks_have_the_bits_of_one(self, engines: Any, transport: str, name: str) -> None:
        records, _ = engines
        assert difference(records, records, transport, name) == []

    @pytest.mark.parametrize("name", ["shared", "one idle"])
    @pytest.mark.parametrize("transport", ENGINES)
    def test_every_expert_layer_gives_equal_rows(self, engines: Any, transport: str, name: str) -> None:
        """Says which layer a difference begins in."""
        records, _ = engines
        found = row_differences(records, records, transport, name)
        assert len(found) == 4
        assert all(common > sum(program.LENGTHS) // 2 and different == 0 for common, different in found.values()), found


def test_ranks_share_all_requests() -> None:
    whole = program.requests_of(0, 1, 100, idle=False)
    assert [len(tokens) for tokens in whole.values()] == list(program.LENGTHS)
    shares = [program.requests_of(rank, 2, 100, idle=False) for rank in range(2)]
    assert shares[0] | shares[1] == whole
    assert all(shares)
    assert [program.requests_of(rank, 2, 100, idle=True) for rank in range(2)] == [whole, {}]


def test_layers_are_compared_by_what_went_in() -> None:
    def kernel(factor: float) -> SimpleNamespace:
        apply = lambda hidden_states, topk_ids, topk_weights: hidden_states * factor  # noqa: E731
        return SimpleNamespace(impl=SimpleNamespace(apply=apply), prepare_finalize=SimpleNamespace())

    def records(factor: float, rows: list[int]) -> list[dict[str, Any]]:
        model = torch.nn.Module()
        model.experts = torch.nn.Module()
        model.experts.quant_method = SimpleNamespace(moe_kernel=kernel(factor))
        layers = program.ExpertLayers(model)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))[rows]
        model.experts.quant_method.moe_kernel.impl.apply(
            hidden_states=x, topk_ids=torch.tensor(rows).view(-1, 1), topk_weights=torch.ones(len(rows), 1)
        )
        return [{"rounds": {"alone": {"rows": layers.take()}}}]

    one = {"alone": records(2.0, [0, 1, 2, 3])}
    assert row_differences(one, {"t": records(2.0, [3, 5, 1])}, "t", "alone") == {"experts": (2, 0)}
    assert row_differences(one, {"t": records(2.5, [3, 5, 1])}, "t", "alone") == {"experts": (2, 2)}
