"""Staged dispatch on real GPUs of one host: that its bits are those of one rank, and what a slice costs.

    export PYTHONPATH=packages/bi-kernels/benchmarks
    python packages/bi-moe-deepep/benchmarks/bench_dispatch.py --ranks 2 --out results/h200-x2.jsonl

Starts one process per GPU. Over NCCL (``TorchTransport``), and over DeepEP's low-latency mode where ``deep_ep`` is
installed, it runs the layer for several distributions of the tokens, one of them with an empty rank, with and without
a CUDA graph, and compares every row with one rank's result on the CPU. Then one slice is timed. One JSON line per
transport and number of tokens: ``dispatch_us`` and ``combine_us`` are medians on rank 0, ``received_bytes`` what a rank
gets in one slice. Ends with 1 if a bit differs. With ``--ranks 1`` one rank exchanges with itself over NCCL: what
staging, the collectives' launches and the ordered combine cost before anything crosses a link.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from timing import machine, write_records

from bi_kernels.testing import first_difference
from bi_moe_deepep import (
    DeepEPTransport,
    StagedDispatcher,
    TorchTransport,
    Transport,
    TransportError,
    combine_ordered,
    plan_slices,
    select_experts,
    stage_tokens,
)

EXPERTS, TOP_K, HIDDEN, TOKENS, CAPACITY = 256, 6, 4096, 600, 128
ROUNDS = 25
LIMIT = 130  # seconds for the ranks


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, experts and weights: the same in every process, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weights, ids = select_experts(torch.randn(TOKENS, EXPERTS, generator=generator), top_k=TOP_K)
    return x, ids, weights


def expert_factors() -> torch.Tensor:
    """Stand-ins for experts: each multiplies by its own number, so that a token at a wrong expert shows."""
    return (1.0 + torch.arange(EXPERTS) / 64).bfloat16().view(-1, 1, 1)


def one_rank() -> torch.Tensor:
    """The layer without dispatch."""
    x, ids, weights = data()
    staged = stage_tokens(x, ids, num_experts=EXPERTS, capacity=TOKENS)
    return combine_ordered(staged.x * expert_factors(), staged.slots, weights)


def distributions(ranks: int) -> list[list[int]]:
    """Tokens of each rank."""
    even = [TOKENS // ranks] * ranks
    return [even, [TOKENS] + [0] * (ranks - 1), [0] * (ranks - 1) + [TOKENS], [1] * (ranks - 1) + [TOKENS - ranks + 1]]


def deepep(numbers: TorchTransport) -> DeepEPTransport:
    """A buffer for slices of the capacity."""
    nvshmem = importlib.util.find_spec("nvidia.nvshmem")
    for place in nvshmem.submodule_search_locations if nvshmem is not None else ():
        ctypes.CDLL(str(Path(place) / "lib" / "libnvshmem_host.so.3"), mode=ctypes.RTLD_GLOBAL)
    import deep_ep

    ranks = dist.get_world_size()
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(CAPACITY, HIDDEN, ranks, EXPERTS)
    buffer = deep_ep.Buffer(
        dist.group.WORLD,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS // ranks,
        allow_nvlink_for_low_latency_mode=True,
    )
    return DeepEPTransport(buffer, numbers)


def layer(transport: Transport, shares: list[int], capacity: int, *, graph: bool = False) -> torch.Tensor:
    """This rank's tokens through the layer."""
    mine = [part.split(shares)[transport.rank].cuda() for part in data()]
    factors = expert_factors().chunk(transport.world_size)[transport.rank].cuda()
    dispatcher = StagedDispatcher(
        transport,
        num_experts=EXPERTS,
        capacity=capacity,
        num_slices=plan_slices(max(shares), capacity=capacity).num_slices,
        verify=not graph,
    )

    def run() -> torch.Tensor:
        return dispatcher.run(*mine, experts=lambda x, counts: x * factors)[0]

    out = run()
    if graph:
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            out = run()
        out.zero_()
        captured.replay()
    torch.cuda.synchronize()
    return out.cpu()


def median_us(run: Callable[[], Any]) -> float:
    """Median of one call; all ranks make it together."""
    times = []
    for _ in range(ROUNDS + 3):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3)
    return statistics.median(times[3:])


def slice_times(transport: Transport, tokens: int) -> dict[str, object]:
    """One slice with ``tokens`` tokens on every rank."""
    x, ids, weights = (part[:tokens].cuda() for part in data())
    received = transport.low_latency_dispatch(x, ids, CAPACITY, EXPERTS)
    ranks = transport.world_size
    dispatch_us = median_us(lambda: transport.low_latency_dispatch(x, ids, CAPACITY, EXPERTS))
    received = transport.low_latency_dispatch(x, ids, CAPACITY, EXPERTS)
    combine_us = median_us(lambda: transport.low_latency_combine(received.x, ids, weights, received.handle))
    by_row = isinstance(transport, DeepEPTransport)
    local = EXPERTS // ranks
    mine = int(((ids // local == transport.rank) & (ids >= 0)).sum()) * ranks if by_row else CAPACITY * ranks
    back = tokens * TOP_K if by_row else CAPACITY * TOP_K * ranks
    return {
        "op": "dispatch_deepep" if by_row else "dispatch_torch",
        "shape": [tokens, CAPACITY, TOP_K, HIDDEN],
        "ranks": ranks,
        "dispatch_us": round(dispatch_us, 1),
        "combine_us": round(combine_us, 1),
        "received_bytes": (mine + back) * HIDDEN * 2,
        **machine(),
    }


def rank_main(folder: Path, ranks: int, rank: int) -> NoReturn:
    """One process: results to ``<rank>.pt``, times of rank 0 to ``times.json``, after each transport."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/store",
        world_size=ranks,
        rank=rank,
        device_id=torch.device("cuda", rank),
    )
    control = dist.new_group(backend="gloo")
    checking, quick = (TorchTransport(control_group=control, timeout=30, verify=verify) for verify in (True, False))
    found: dict[str, Any] = {}

    def write() -> None:
        torch.save(found, folder / f"{rank}.pt")
        if rank == 0:
            (folder / "times.json").write_text(json.dumps(times))

    for shares in distributions(ranks):
        for capacity in (64, CAPACITY):
            found[f"nccl {shares} {capacity}"] = layer(checking, shares, capacity)
    even = distributions(ranks)[0]
    found[f"nccl {even} graph"] = layer(quick, even, CAPACITY, graph=True)
    times = [slice_times(quick, tokens) for tokens in (1, 16, CAPACITY)]
    write()
    print(f"rank {rank}: nccl done", flush=True)
    if ranks > 1 and importlib.util.find_spec("deep_ep") is not None:
        library = deepep(TorchTransport(control, timeout=30))
        for shares in distributions(ranks):
            found[f"deepep {shares} {CAPACITY}"] = layer(library, shares, CAPACITY)
        found[f"deepep {even} graph"] = layer(library, even, CAPACITY, graph=True)
        times += [slice_times(library, tokens) for tokens in (1, 16, CAPACITY)]
        write()
        print(f"rank {rank}: deepep done", flush=True)
    # Last, because the group is of no use afterwards: a rank that does not come is noticed, not waited for.
    if rank == 0 and ranks > 1:
        lonely = TorchTransport(control_group=control, timeout=1.0)
        try:
            layer(lonely, even, CAPACITY)
        except TransportError as error:
            print(f"watchdog: {error}", flush=True)
    os._exit(0)  # the destructors of a buffer and of a group may wait for ranks that are gone


def main() -> int:
    """Start the ranks, compare, write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of these ops")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args.folder, args.ranks, args.rank)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--ranks", str(args.ranks), "--folder", name, "--rank"]
        started = [subprocess.Popen([*command, str(rank)]) for rank in range(args.ranks)]
        end = time.monotonic() + LIMIT
        while any(rank.poll() is None for rank in started):
            failed = any(rank.poll() for rank in started)
            if failed or time.monotonic() > end:  # the others would wait for one that failed
                for rank in started:
                    rank.kill()
            time.sleep(0.1)
        ended = [rank.wait() for rank in started]
        print(f"exit codes {ended} (-9: past {LIMIT} s, or the other's fault)", flush=True)
        by_rank = [torch.load(folder / f"{rank}.pt") for rank in range(args.ranks)]
        records = json.loads((folder / "times.json").read_text())
    want = one_rank()
    different = sum(map(bool, ended))
    for key in by_rank[0]:
        difference = first_difference(torch.cat([found[key] for found in by_rank]), want)
        different += difference is not None
        print(f"{key}: {difference or 'equal'}", flush=True)
    for record in records:
        transport = "deepep" if record["op"] == "dispatch_deepep" else "nccl"
        record["bitwise"] = all(
            first_difference(torch.cat([found[key] for found in by_rank]), want) is None
            for key in by_rank[0]
            if key.startswith(transport)
        )
        print(json.dumps(record), flush=True)
    write_records(args.out, records)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
