"""Time a whole reload inside a real vLLM engine, with the hooks and without them, by turns in one process.

    PYTHONPATH=packages/bi-kernels/benchmarks python packages/bi-reload/benchmarks/bench_reload.py \
        --checkpoint DIR --out results/h200.jsonl

One JSON line per source of the weights (``device``: tensors that lie on the GPU, as a transfer brings them; ``disk``:
safetensors in the page cache): op, shape (layers, hidden size, experts), source, bytes, stock, stock_us, ours_us, ratio
(stock / ours), gb_s (bytes of the checkpoint over our time), percent_of_copy, bitwise (fingerprints of all live weights
are the same after each of our reloads). Needs vLLM 0.26 and VLLM_ENABLE_V1_MULTIPROCESSING=0, VLLM_BATCH_INVARIANT=1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from timing import COPY_BYTES, copy_timer, machine, medians, write_records

from bi_kernels.runtime import hooks
from bi_reload import vllm_reload
from bi_reload.vllm_hook import PLAN

ROUNDS = 3
SOURCES = ("device", "disk")


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


def plan() -> hooks.HookPlan:
    """The hook's table as the running engine has it: with every patch, ready or not."""
    return dataclasses.replace(
        PLAN, patches=tuple(dataclasses.replace(patch, ready=True, needs="") for patch in PLAN.patches)
    )


def without_hooks(worker: Any, run: Callable[[], object]) -> float:
    """Time ``run`` on vLLM's own functions, and put back what they move."""
    model = worker.get_model()
    layer = model.model.layers[0]
    broadcast = layer.hc_attn_fn_broadcast
    hooks.deactivate(plan())
    try:
        return seconds(run)
    finally:
        layer.hc_attn_fn_broadcast = broadcast
        hooks.activate(plan())


def measure(
    worker: Any, checkpoint: Path, *, sources: tuple[str, ...] = SOURCES, rounds: int = ROUNDS
) -> list[dict[str, object]]:
    """One record per source; the engine must have reloaded once, so that everything is compiled."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = dict(stored(checkpoint))
    total = sum(tensor.nbytes for tensor in tensors.values())
    copy_us = medians(copy_timer())[0]
    runs: dict[str, Callable[[], object]] = {
        "device": lambda: worker.reload_weights(weights_iterator=iter(tensors.items())),
        "disk": lambda: worker.reload_weights(weights_path=str(checkpoint)),
    }
    records: list[dict[str, object]] = []
    for source in sources:
        ours, stock, prints = [], [], []
        for _ in range(rounds):
            stock.append(without_hooks(worker, runs[source]))
            ours.append(seconds(runs[source]))
            prints.append(vllm_reload.live_fingerprints(worker))
        ours_s, stock_s = statistics.median(ours), statistics.median(stock)
        records.append(
            {
                "op": "reload",
                "shape": [config["num_hidden_layers"], config["hidden_size"], config["n_routed_experts"]],
                "source": source,
                "bytes": total,
                "tensors": len(tensors),
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
    return records


def main() -> None:
    """Start the engine, time, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ["VLLM_PLUGINS"] = "bi_kernels"  # the entry point of bi-reload refuses while a patch is not ready
    hooks.activate(plan())
    from vllm import LLM

    llm = LLM(
        model=str(arguments.checkpoint), skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype="fp8",
        max_model_len=1024, max_num_batched_tokens=1024, max_num_seqs=16, kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.5, async_scheduling=False, compilation_config={"cudagraph_capture_sizes": [1]},
    )  # fmt: skip
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    worker.reload_weights(weights_path=str(arguments.checkpoint))
    write_records(arguments.out, measure(worker, arguments.checkpoint))


if __name__ == "__main__":
    main()
