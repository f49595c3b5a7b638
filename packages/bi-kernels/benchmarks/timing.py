"""What the benchmarks share: graph replay, medians taken by turns, and the copy that bandwidth is compared with."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

__all__ = ["COPY_BYTES", "capture", "copy_timer", "machine", "medians", "write_records"]

ROUNDS = 25
COPY_BYTES = 1 << 30


def capture(run: Callable[[], object], launches: int) -> Callable[[], float]:
    """A function that replays ``launches`` calls of ``run`` from one graph and returns microseconds per call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()

    def replay() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / launches

    replay.run = run  # type: ignore[attr-defined]  # a graph does not keep its tensors alive
    return replay


def medians(*timers: Callable[[], float]) -> list[float]:
    """Median of each timer, taken by turns, so that clocks and temperature are the same for all."""
    for timer in timers:
        timer(), timer()
    rounds = [[timer() for timer in timers] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def copy_timer() -> Callable[[], float]:
    """A timer of a device-to-device copy of ``COPY_BYTES``, which moves twice as many.

    By a kernel, and not in a graph: there a copy becomes a memcpy node, which runs at about two thirds of the speed.
    """
    source = torch.randint(-(1 << 31), 1 << 31, (COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)

    def copy() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            target.copy_(source)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / 4

    return copy


def machine() -> dict[str, str]:
    """The GPU and torch, for every record."""
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


def write_records(path: Path | None, records: Iterable[dict[str, object]]) -> None:
    """Replace the records of the same ops in ``path``, and keep the others."""
    records = list(records)
    if path is None:
        return
    mine = {record["op"] for record in records}
    old = path.read_text().splitlines() if path.is_file() else []
    kept = [line for line in old if json.loads(line)["op"] not in mine]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in [*kept, *map(json.dumps, records)]))
