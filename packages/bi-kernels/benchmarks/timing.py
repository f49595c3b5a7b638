"""What the benchmarks share: graph replay, medians taken by turns, and the copy that bandwidth is compared with."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

__all__ = ["COPY_BYTES", "capture", "copy_timer", "machine", "medians", "record", "run_cases", "write_records"]

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


def record(
    op: str,
    shape: Sequence[int],
    *,
    moved: int,
    ours_us: float,
    copy_us: float,
    bitwise: bool,
    stock: str | None = None,
    stock_us: float | None = None,
    **more: object,
) -> dict[str, object]:
    """One line of ``results/*.jsonl``.

    Args:
        op: Name of the op.
        shape: What the op was called on.
        moved: Bytes read and written by ours, each counted once.
        ours_us: Microseconds of ours.
        copy_us: Of :func:`copy_timer`'s copy in the same run.
        bitwise: Whether the results of this run were equal, bit for bit, to what the benchmark compares them with.
        stock: Name of the kernel that ours stands for, or None.
        stock_us: Its microseconds; None where it was not measured.
        more: Further fields.
    """
    gb_s = moved / ours_us / 1e3
    return {
        "op": op,
        "shape": list(shape),
        **more,
        "stock": stock,
        "stock_us": None if stock_us is None else round(stock_us, 2),
        "ours_us": round(ours_us, 2),
        "ratio": None if stock_us is None else round(stock_us / ours_us, 3),
        "gb_s": round(gb_s, 1),
        "percent_of_copy": round(100 * gb_s / (2 * COPY_BYTES / copy_us / 1e3), 1),
        "bitwise": bitwise,
        **machine(),
    }


def run_cases(
    description: str | None, cases: Iterable[Sequence[object]], bench: Callable[..., dict[str, object]]
) -> None:
    """A benchmark's command line: print ``bench(*case, copy)`` of every case, and write the records to ``--out``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of these ops")
    args = parser.parse_args()
    copy = copy_timer()
    records = []
    for case in cases:
        records.append(bench(*case, copy))
        print(json.dumps(records[-1]), flush=True)
    write_records(args.out, records)
