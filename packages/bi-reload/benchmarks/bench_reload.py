"""Time a whole reload inside real vLLM engines, one with the hooks and one without them, by turns on one GPU.

    PYTHONPATH=packages/bi-kernels/benchmarks python packages/bi-reload/benchmarks/bench_reload.py \
        --checkpoint DIR --out results/h200.jsonl

One JSON line per source of the weights (``device``: tensors that lie on the GPU, as a transfer brings them; ``disk``:
safetensors in the page cache): op, shape (layers, hidden size, experts), source, bytes, stock, stock_us, ours_us, ratio
(stock / ours), gb_s (bytes of the checkpoint over our time), percent_of_copy, bitwise (fingerprints of all live weights
are the same after each of our reloads). Each engine is a process; the one that waits does nothing. Needs vLLM 0.26,
VLLM_ENABLE_V1_MULTIPROCESSING=0, VLLM_BATCH_INVARIANT=1, and BI_PARTIAL=1 where not all four packages are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
from timing import COPY_BYTES, copy_timer, machine, medians, write_records

ROUNDS = 3
SOURCES = ("device", "disk")
START_LIMIT = 240  # seconds until an engine stands and has reloaded once from each source
RELOAD_LIMIT = 60


def stored(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a checkpoint, on the GPU."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt", device="cuda") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def seconds(run: Callable[[], object]) -> float:
    """Wall-clock time, the GPU's work included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def engine_main(connection: Connection, checkpoint: Path, *, hooked: bool) -> None:
    """One engine: says what the checkpoint holds, then answers each source with seconds and fingerprints."""
    from vllm import LLM

    llm = LLM(
        model=str(checkpoint), skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype="fp8",
        max_model_len=1024, max_num_batched_tokens=1024, max_num_seqs=16, kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.2, enable_prefix_caching=False, async_scheduling=False,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
    )  # fmt: skip
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    tensors = dict(stored(checkpoint))
    runs: dict[str, Callable[[], object]] = {
        "device": lambda: worker.reload_weights(weights_iterator=iter(tensors.items())),
        "disk": lambda: worker.reload_weights(weights_path=str(checkpoint)),
    }
    first = {source: round(seconds(runs[source]), 2) for source in SOURCES}  # what compiles does so here
    print(f"== hooked {hooked}: first reloads {first}", flush=True)
    connection.send((len(tensors), sum(tensor.nbytes for tensor in tensors.values())))
    while True:
        took = seconds(runs[connection.recv()])
        connection.send((took, fingerprints(worker) if hooked else None))


def fingerprints(worker: Any) -> dict[str, int]:
    """Of every weight, as the kernels read it."""
    from bi_reload import vllm_reload

    return vllm_reload.live_fingerprints(worker)


def answer(connection: Connection, limit: float) -> Any:
    """What an engine sends; ends the benchmark if nothing comes in time, or the process is gone."""
    if not connection.poll(limit):
        raise SystemExit(f"an engine did not answer within {limit} s")
    try:
        return connection.recv()
    except EOFError:
        raise SystemExit("an engine ended; its error is above") from None


def measure(engines: dict[str, Connection], checkpoint: Path, out: Path | None) -> None:
    """One record per source."""
    config = json.loads((checkpoint / "config.json").read_text())
    ((tensors, total),) = {answer(connection, START_LIMIT) for connection in engines.values()}
    copy_us = medians(copy_timer())[0]
    records: list[dict[str, object]] = []
    for source in SOURCES:
        times: dict[str, list[float]] = {name: [] for name in engines}
        prints = []
        for _ in range(ROUNDS):
            for name, connection in engines.items():
                connection.send(source)
                took, found = answer(connection, RELOAD_LIMIT)
                times[name].append(took)
                prints += [found] if found is not None else []
        print(f"== {source}: {times}", flush=True)
        ours_s, stock_s = statistics.median(times["ours"]), statistics.median(times["stock"])
        records.append(
            {
                "op": "reload",
                "shape": [config["num_hidden_layers"], config["hidden_size"], config["n_routed_experts"]],
                "source": source,
                "bytes": total,
                "tensors": tensors,
                "stock": "Worker.reload_weights",
                "stock_us": round(stock_s * 1e6),
                "ours_us": round(ours_s * 1e6),
                "ratio": round(stock_s / ours_s, 3),
                "gb_s": round(total / ours_s / 1e9, 2),
                "percent_of_copy": round(100 * (2 * total / ours_s) / (2 * COPY_BYTES / (copy_us * 1e-6)), 2),
                "bitwise": all(found == prints[0] for found in prints),
                **machine(),
            }
        )
        print(json.dumps(records[-1]), flush=True)
        write_records(out, records)


def main() -> None:
    """Start the engines, wait until nothing else is measured, time, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of this op")
    parser.add_argument("--hold", type=Path, help="once the engines stand, timing waits until this file is gone")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fd is not None:
        hooked = os.environ.get("VLLM_PLUGINS") != "none"
        engine_main(Connection(arguments.fd), arguments.checkpoint, hooked=hooked)
        return
    engines: dict[str, Connection] = {}
    started = []
    try:
        for name, environment in (("stock", {"VLLM_PLUGINS": "none"}), ("ours", {})):
            engines[name], theirs = Pipe()
            fd = theirs.fileno()
            command = [sys.executable, __file__, "--checkpoint", str(arguments.checkpoint), "--fd", str(fd)]
            started.append(subprocess.Popen(command, env=os.environ | environment, pass_fds=[fd]))
            theirs.close()
        for connection in engines.values():
            if not connection.poll(START_LIMIT):
                raise SystemExit(f"an engine did not stand within {START_LIMIT} s")
        print("== engines stand", flush=True)
        while arguments.hold is not None and arguments.hold.exists():
            time.sleep(0.1)
        measure(engines, arguments.checkpoint, arguments.out)
    finally:
        for process in started:
            process.kill()


if __name__ == "__main__":
    main()
