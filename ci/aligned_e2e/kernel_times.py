"""GPU time by layer and op, and host time by op, out of a profiler's trace.

A trace (Chrome's format, as torch.profiler writes it) holds the ranges that the host was in, the launches it made, and
the kernels these became. A kernel belongs to the innermost range that its launch was made in. Kernels of several
streams overlap, and a kernel that was launched early waits inside its own duration; so an instant counts once, for the
kernel that began first, and times add up to the time in which the GPU was busy. Host time, too, counts once, for the
innermost range.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "FLASH_RATIOS",
    "FLASH_VOCABULARY",
    "HEAD_OPS",
    "LAYER_TYPES",
    "WAITING",
    "Kernel",
    "OpTime",
    "Profile",
    "busy_us",
    "compare_layers",
    "compare_ops",
    "compare_parts",
    "host_times",
    "host_us",
    "kernels",
    "label",
    "launches",
    "layer_times",
    "op_times",
    "overhead_percent",
    "relabel",
]

FLASH_RATIOS = (0, 0, *(4 if i % 2 == 0 else 128 for i in range(41)))
"""Compress ratio of each layer of DeepSeek-V4-Flash: two with the window only, then 4 and 128 by turns."""

FLASH_VOCABULARY = 129280

LAYER_TYPES = {0: "window only", 4: "C4", 128: "C128"}
HEAD_OPS = ("lm_head", "log_softmax", "sampling")
"""What comes after the model's forward, and grows with the vocabulary."""

WAITING = "waiting for the GPU"
"""Name of the host time inside of ranges in which the host does nothing but wait."""

_PREFIX = "cost"
_OTHER = "other"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a trace.

    Attributes:
        start: Microseconds.
        end: Microseconds.
        name: Its name.
        layer: Index of the layer that launched it; None outside of the layers.
        op: Name of the op that launched it, ``other`` outside of every range.
    """

    start: float
    end: float
    name: str
    layer: int | None
    op: str


@dataclass(frozen=True, slots=True)
class OpTime:
    """GPU time of one kernel in one op of one layer, per step.

    Attributes:
        layer: Index of the layer; None outside of the layers.
        op: Name of the op, ``other`` outside of every range.
        kernel: Name of the kernel.
        us: Microseconds per step.
        calls: Launches per step.
    """

    layer: int | None
    op: str
    kernel: str
    us: float
    calls: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profiler saw of a workload on one side.

    Attributes:
        times: GPU time, per step.
        host: Microseconds of the host by op, per step, under the profiler, which slows it down; empty where graphs were
            replayed.
        experts: Distinct experts that the tokens of a step chose in a layer, the mean over layers.
    """

    times: list[OpTime]
    host: dict[str, float]
    experts: float


def label(op: str, layer: int | None = None) -> str:
    """Name of the range of ``op``, from which :func:`kernels` knows it again."""
    return f"{_PREFIX}|{'' if layer is None else layer}|{op}"


def kernels(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """The kernels, copies and fills of a trace by their start, each with the range that its launch was made in.

    Args:
        events: ``traceEvents`` of the trace.
    """
    ranges: list[tuple[float, float, str]] = []
    launched: dict[int, float] = {}
    found: list[tuple[float, float, str, int]] = []
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X":
            continue
        start, end, name = float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"])
        if category == "user_annotation" and name.startswith(f"{_PREFIX}|"):
            ranges.append((start, end, name))
        elif category in _LAUNCHES and "correlation" in event.get("args", {}):
            launched[int(event["args"]["correlation"])] = start
        elif category in _KERNELS:
            found.append((start, end, name, int(event.get("args", {}).get("correlation", -1))))
    owners = _innermost(ranges, launched)
    return [Kernel(start, end, name, *_parse(owners.get(launch))) for start, end, name, launch in sorted(found)]


def host_times(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """Host time of each op per step, without that of the ranges inside of its own, and without waiting for the GPU.

    Args:
        events: ``traceEvents`` of ``steps`` steps.
        steps: See ``events``.
    """
    threads: defaultdict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        category, name = event.get("cat"), str(event.get("name"))
        if event.get("ph") != "X":
            continue
        span = (float(event["ts"]), -float(event["dur"]))
        if category == "user_annotation" and name.startswith(f"{_PREFIX}|"):
            threads[event.get("tid")].append((*span, _parse(name)[1]))
        elif category in _LAUNCHES and "Synchronize" in name:
            threads[event.get("tid")].append((*span, WAITING))
    own: defaultdict[str, float] = defaultdict(float)
    for spans in threads.values():
        opened: list[tuple[float, str]] = []
        for start, negative_us, op in sorted(spans):
            while opened and opened[-1][0] <= start:
                opened.pop()
            if not opened and op == WAITING:  # between steps
                continue
            own[op] -= negative_us
            if opened:
                own[opened[-1][1]] += negative_us
            opened.append((start - negative_us, op))
    return {op: us / steps for op, us in own.items()}


def relabel(graph: Sequence[Kernel], eager: Sequence[Kernel], graph_steps: int, eager_steps: int) -> list[Kernel]:
    """Give the kernels of replayed graphs the ranges of the same kernels in eager steps.

    A graph's launch says nothing about layers. But a step launches the same kernels either way, so that the n-th kernel
    of a name is the n-th of that name in the other. Names that occur another number of times in a step stay ``other``.
    What a replayed step launches outside of its graph (the head, the sampler) has ranges of its own and keeps them, and
    takes no part in the counting: router, compressors and lm_head may share one kernel.

    Args:
        graph: Kernels of ``graph_steps`` replayed steps.
        eager: Kernels of ``eager_steps`` eager ones, of the same work.
        graph_steps: See ``graph``.
        eager_steps: See ``eager``.
    """
    ranges: defaultdict[str, list[tuple[int | None, str]]] = defaultdict(list)
    named = {(kernel.layer, kernel.op) for kernel in graph if kernel.op != _OTHER}
    for kernel in eager:
        if (kernel.layer, kernel.op) not in named:
            ranges[kernel.name].append((kernel.layer, kernel.op))
    total = Counter(kernel.name for kernel in graph if kernel.op == _OTHER)
    seen: Counter[str] = Counter()
    result = []
    for kernel in graph:
        if kernel.op != _OTHER:
            result.append(kernel)
            continue
        known = ranges[kernel.name]
        if len(known) * graph_steps == total[kernel.name] * eager_steps and len(known) % eager_steps == 0:
            layer, op = known[seen[kernel.name] % (len(known) // eager_steps)]
            kernel = replace(kernel, layer=layer, op=op)
        seen[kernel.name] += 1
        result.append(kernel)
    return result


def op_times(found: Sequence[Kernel], steps: int) -> list[OpTime]:
    """GPU time per step.

    Args:
        found: Kernels of ``steps`` steps, by their start.
        steps: See ``found``.
    """
    us: defaultdict[tuple[int | None, str, str], float] = defaultdict(float)
    calls: defaultdict[tuple[int | None, str, str], int] = defaultdict(int)
    busy_until = float("-inf")
    for kernel in found:
        key = (kernel.layer, kernel.op, kernel.name)
        us[key] += max(0.0, kernel.end - max(kernel.start, busy_until))
        calls[key] += 1
        busy_until = max(busy_until, kernel.end)
    return [OpTime(*key, us=us[key] / steps, calls=calls[key] / steps) for key in us]


def layer_times(times: Iterable[OpTime], ratios: Sequence[int]) -> dict[str, float]:
    """Microseconds of one layer of each type, the mean over the layers of that type.

    Args:
        times: Of one step.
        ratios: Compress ratio of each layer of the model that was measured.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for time in times:
        if time.layer is not None:
            total[LAYER_TYPES[ratios[time.layer]]] += time.us
    counts = [LAYER_TYPES[ratio] for ratio in ratios]
    return {name: total[name] / counts.count(name) for name in LAYER_TYPES.values() if name in counts}


def busy_us(times: Iterable[OpTime]) -> float:
    """Microseconds in which the GPU was busy with the model's forward: all but the head, sampling and ``other``."""
    return sum(time.us for time in times if _is_forward(time.op))


def launches(times: Iterable[OpTime]) -> float:
    """Kernels, copies and fills of the model's forward."""
    return sum(time.calls for time in times if _is_forward(time.op))


def host_us(host: Mapping[str, float]) -> float:
    """Microseconds in which the host was busy with the model's forward, by :attr:`Profile.host`."""
    return sum(us for op, us in host.items() if _is_forward(op) and op != WAITING)


def _is_forward(op: str) -> bool:
    return op not in (*HEAD_OPS, _OTHER)


def compare_parts(stock: Iterable[OpTime], aligned: Iterable[OpTime]) -> list[dict[str, Any]]:
    """The record's ``parts``: all layers together, and every op outside of them."""
    parts: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, times in enumerate((stock, aligned)):
        for time in times:
            parts["layers" if time.layer is not None else time.op][side] += time.us
    return [{"part": name, "stock_us": round(us[0], 1), "aligned_us": round(us[1], 1)} for name, us in parts.items()]


def compare_layers(stock: Mapping[str, float], aligned: Mapping[str, float]) -> list[dict[str, Any]]:
    """The record's ``layers``: a row for each layer type that both sides have."""
    return [
        {"layer_type": name, "stock_us": round(stock[name], 2), "aligned_us": round(aligned[name], 2)}
        for name in LAYER_TYPES.values()
        if name in stock and name in aligned
    ]


def compare_ops(stock: Profile, aligned: Profile, *, longest: int = 8) -> list[dict[str, Any]]:
    """The record's ``ops``: a row for each op, all layers together, the largest excess first.

    Args:
        stock: Of stock.
        aligned: With the hooks.
        longest: So many kernels of each side are listed by name.
    """
    sides, rows = (stock, aligned), []
    named = [op for side in sides for op in (*(time.op for time in side.times), *side.host)]
    for op in dict.fromkeys(named):
        mine = [[time for time in side.times if time.op == op] for side in sides]
        us = [round(sum(time.us for time in times), 2) for times in mine]
        calls = [round(sum(time.calls for time in times), 1) for times in mine]
        host = [round(side.host.get(op, 0.0), 1) if side.host else None for side in sides]
        rows.append(
            {
                "op": op,
                "stock_us": us[0],
                "aligned_us": us[1],
                "stock_host_us": host[0],
                "aligned_host_us": host[1],
                "calls": calls[1],
                "stock_calls": calls[0],
                "stock_kernels": _longest(mine[0], longest),
                "aligned_kernels": _longest(mine[1], longest),
            }
        )
    return sorted(rows, key=lambda row: row["stock_us"] - row["aligned_us"])


def overhead_percent(stock_seconds: float, aligned_seconds: float) -> float:
    """How much longer aligned takes for the same work; negative if it is faster."""
    return round(100 * (aligned_seconds / stock_seconds - 1), 2)


def _innermost(ranges: list[tuple[float, float, str]], launched: Mapping[int, float]) -> dict[int, str | None]:
    """Innermost range of each launch; ranges of one thread either nest or follow each other."""
    ranges = sorted(ranges, key=lambda item: (item[0], -item[1]))
    owners: dict[int, str | None] = {}
    opened: list[tuple[float, float, str]] = []
    at = 0
    for correlation, time in sorted(launched.items(), key=lambda item: item[1]):
        while at < len(ranges) and ranges[at][0] <= time:
            opened.append(ranges[at])
            at += 1
        while opened and opened[-1][1] < time:
            opened.pop()
        # A closed range may still lie below an open one that began later.
        owners[correlation] = next((name for _, end, name in reversed(opened) if end >= time), None)
    return owners


def _parse(name: str | None) -> tuple[int | None, str]:
    if name is None:
        return None, _OTHER
    _, layer, op = name.split("|")
    return int(layer) if layer else None, op


def _longest(times: Iterable[OpTime], count: int) -> list[list[Any]]:
    """``[kernel, microseconds, calls]`` of the longest kernels, all layers together."""
    us: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, float] = defaultdict(float)
    for time in times:
        us[time.kernel[:100]] += time.us
        calls[time.kernel[:100]] += time.calls
    return [[name, round(us[name], 2), round(calls[name], 1)] for name in sorted(us, key=lambda n: -us[n])[:count]]
