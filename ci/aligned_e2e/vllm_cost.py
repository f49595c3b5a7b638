"""What aligned mode costs: stock vLLM against the four hooks, by turns, on one GPU.

``python -m aligned_e2e.vllm_cost --checkpoint DIR --parts DIR [--limit SECONDS]``. Stock is vLLM with the flag off and
no plug-in, once with its own choice of expert kernels and once with DeepGEMM's. A workload has two baselines: for
tokens/s the side with more of them, for GPU time the side whose forward takes less of it; they may be different sides,
because the tokens/s of steps without graphs may be bound by the host. The model has all 43 layers of DeepSeek-V4-Flash,
which share the weights of a few (:mod:`aligned_e2e.shared_layers`). All engines live at once and only one works at a
time, while the others sleep; a workload goes around them many times, forwards and backwards, in short turns of which
the first steps do not count. Medians are reported, and how far turns were apart; the overhead is the median over pairs
of neighbouring turns, which drift together. Then each side runs a few steps under a profiler, which gives GPU time by
layer type and op and, of steps without graphs, host time by op. ``--size slice`` measures four layers instead.

The checkpoint is generated if it is not there, while the kernels that need minutes to compile in one process are
compiled in many. ``PARTS/cost.json`` is written after every workload, so that whatever was measured before ``--limit``
is kept. Exit code 0: everything was measured; 1: something is missing, and ``not_run`` says what.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from .kernel_times import (
    Profile,
    busy_us,
    compare_layers,
    compare_ops,
    compare_parts,
    host_us,
    launches,
    layer_times,
    overhead_percent,
)
from .vllm_cost_engine import SETTINGS, TOKENS_OF_A_STEP
from .vllm_engine import command_line

__all__ = ["SIDES", "WORKLOADS", "Child", "Clock", "Side", "SideError", "Workload", "main", "measure_all", "summarise"]


@dataclass(frozen=True, slots=True)
class Side:
    """One engine of the comparison.

    Attributes:
        aligned: Whether the hooks are on.
        settings: Arguments of ``vllm.LLM`` beside the common ones.
        environment: Variables of its process beside the common ones.
    """

    aligned: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: {"VLLM_PLUGINS": "none"})


SIDES = {
    "stock": Side(),
    "stock deep_gemm": Side(settings={"moe_backend": "deep_gemm"}),
    "aligned": Side(aligned=True, environment={"VLLM_BATCH_INVARIANT": "1"}),
}
_ALIGNED = "aligned"

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_UNSET = ("BI_PARTIAL", "VLLM_BATCH_INVARIANT", "VLLM_PLUGINS")


@dataclass(frozen=True, slots=True)
class Workload:
    """One line of the table.

    Attributes:
        name: For the report.
        kind: ``decode``, ``prefill`` or ``mixed``, as :meth:`CostEngine.measure` has them.
        batch: Requests that decode, or prompts of one step.
        length: Tokens of a new prompt; 0 for none.
        steps: Steps of one turn.
        warm: Steps before them that do not count.
        profiled: Whether the profiler looks at it too.
        share: Of the time for turns, beside those of the others: what the host decides about needs more of them.
    """

    name: str
    kind: str
    batch: int
    length: int
    steps: int
    warm: int = 1
    profiled: bool = False
    share: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        """For the engine."""
        return {"kind": self.kind, "batch": self.batch, "length": self.length}


CONTEXT = 2100
"""Tokens of the prompts behind which requests decode: past 4 x index_topk = 2,048, so that C4 layers select. Three are
prefilled in a step. Longer ones would take more of the time than all that is measured."""

# Largest batch first: one filling serves all, and requests are dropped on the way down.
WORKLOADS = (
    Workload("decode", "decode", 128, 0, 6, warm=2, profiled=True),
    Workload("decode", "decode", 32, 0, 8, warm=2, profiled=True),
    Workload("mixed: one 2k prompt a step", "mixed", 32, 2048, 2, profiled=True, share=3),
    Workload("decode", "decode", 8, 0, 16, warm=3, profiled=True),
    Workload("decode", "decode", 1, 0, 24, warm=4, profiled=True),
    Workload("prefill 1k", "prefill", 1, 1024, 3, profiled=True, share=3),
    Workload("prefill 1k", "prefill", 8, 1024, 2),
    Workload("prefill 8k", "prefill", 1, 8192, 2, profiled=True, share=2),  # its turns are the longest
)
_MAIN = ("decode", 32)  # whose profile is the record's ``layers`` and ``ops``

ROUNDS = 24  # as far as the time goes; even, so that each side goes first as often as last
_FEWEST = 4
_PROFILE = 9.0  # seconds that are kept for the profile of a workload
_MEASURING = 170.0  # seconds that are kept for measuring when an engine does not get ready,
_MEASURING_SHARE = 0.45  # or this share of all, if that is less: a short run measures the first workloads
_PROFILED_STEPS = 4  # an eager step of 43 layers makes some ten thousand events
_TURN = 90.0  # no answer takes longer than that, but a start
_HEAD_START = 45.0  # of those that compile: an engine loads weights for about as long before it needs them


class SideError(Exception):
    """An engine failed, or did not answer in time.

    Attributes:
        alive: Whether it said so itself, and can go on.
    """

    def __init__(self, message: str, *, alive: bool = False) -> None:
        super().__init__(message)
        self.alive = alive


class Clock:
    """Seconds since the start, and up to the limit."""

    def __init__(self, limit: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._start = now()
        self._limit = limit

    def spent(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    def left(self) -> float:
        """Seconds up to the limit."""
        return self._limit - self.spent()

    def left_to_start(self) -> float:
        """Seconds up to the moment from which measuring needs what is left."""
        return self.left() - min(_MEASURING, _MEASURING_SHARE * self._limit)


class Engine(Protocol):
    """What the measurement asks of a side."""

    def ask(self, name: str, timeout: float, **arguments: Any) -> Any:
        """The engine's answer; raises SideError."""


class Child:
    """An engine's process, and the connection to it."""

    def __init__(self, name: str, side: Side, log: Path) -> None:
        self.name, self.log = name, log
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "aligned_e2e.vllm_cost_engine", "serve", "--fd", str(theirs.fileno())]
        with log.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                [*command, *(["--aligned"] if side.aligned else [])],
                env=_environment(side.environment),
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        self.connection: Connection = ours

    def send(self, name: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        with contextlib.suppress(BrokenPipeError):  # its death is found when its answer is asked for
            self.connection.send((name, arguments))

    def receive(self, timeout: float) -> Any:
        """The next answer.

        Raises:
            SideError: There is none; the process is ended.
        """
        try:
            if not self.connection.poll(max(0.0, timeout)):
                with contextlib.suppress(ProcessLookupError):
                    self.process.send_signal(signal.SIGUSR1)  # it writes its stacks to its log
                time.sleep(1)
                self.end()
                raise SideError(f"{self.name}: no answer in time; {self.log} ends with\n{self.tail()}")
            state, answer = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)  # for its own exit code
            self.end()
            code = self.process.returncode
            raise SideError(f"{self.name}: ended, exit code {code}; {self.log} ends with\n{self.tail()}") from error
        if state != "ok":
            raise SideError(f"{self.name}: {answer}; {self.log} ends with\n{self.tail()}", alive=True)
        return answer

    def ask(self, name: str, timeout: float, **arguments: Any) -> Any:
        """A command and its answer."""
        self.send(name, **arguments)
        return self.receive(timeout)

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(line[-400:] for line in self.log.read_text(errors="replace").splitlines()[-lines:])

    def end(self) -> None:
        """End the process, which may be busy."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def measure_all(engines: dict[str, Engine], clock: Clock, record: dict[str, Any], save: Callable[[], None]) -> None:
    """Every workload on every side, by turns that go forwards and backwards; a side that fails is dropped.

    Args:
        engines: By side; changed when one fails.
        clock: Nothing is begun that has no time left.
        record: Gets ``cost``, ``profiles`` and the rest, and a line in ``not_run`` for what is missing.
        save: Called after every workload.
    """

    def each(what: str, name: str, sides: Sequence[str] = tuple(SIDES), **arguments: Any) -> dict[str, Any]:
        answers = {}
        for side in [side for side in sides if side in engines]:
            try:
                answers[side] = engines[side].ask(name, min(_TURN, clock.left()), **arguments)
            except SideError as error:
                record["not_run"].append({"what": f"{what} on {side}", "why": str(error)})
                print(error, flush=True)
                if not (error.alive and name == "profile"):  # in another step, requests may be left behind
                    del engines[side]
        return answers

    def copy() -> None:
        record["copy_gb_s"] += each("copy", "copy_gb_s", list(engines)[:1]).values()

    copy()
    for workload in WORKLOADS:
        what = f"{workload.name}, batch {workload.batch}"
        if not engines or clock.left() < 10:
            record["not_run"].append({"what": what, "why": "no time left" if engines else "no engine left"})
            continue
        if workload is WORKLOADS[0]:
            each("filling", "fill", count=workload.batch, length=CONTEXT)
        elif workload.kind != "mixed":
            each("dropping requests", "keep", count=workload.batch if workload.kind == "decode" else 0)
        each(what, "measure", **workload.arguments, steps=2)  # compiles what is new
        turns: dict[str, list[dict[str, Any]]] = {side: [] for side in engines}
        until = clock.spent() + share_of(workload, clock.left())
        arguments = workload.arguments | {"steps": workload.steps, "warm": workload.warm}
        began = clock.spent()
        for done in range(ROUNDS):
            if done % 2 == 0:
                two_rounds, began = clock.spent() - began, clock.spent()
                if done >= _FEWEST and began + two_rounds > until:
                    break
            order = tuple(SIDES) if done % 2 == 0 else tuple(SIDES)[::-1]
            for side, turn in each(what, "measure", order, **arguments).items():
                turns[side].append(turn)
        row = cost_row(workload, turns)
        record["cost"].append(row)
        _print_row(clock, row)
        save()
        if not workload.profiled:
            continue
        found: dict[str, Profile] = {}
        if clock.left() > _PROFILE:
            arguments = workload.arguments | {"steps": min(_PROFILED_STEPS, workload.steps)}
            found = each(f"profile of {what}", "profile", **arguments)
        if _ALIGNED not in found or len(found) < 2:
            record["not_run"].append({"what": f"profile of {what}", "why": "no time left, or a side is missing"})
            continue
        _add_profile(workload, row, found, record)
        save()
    if clock.left() > 5:
        copy()
        record["waited"] = each("waiting", "waited")


def share_of(workload: Workload, left: float) -> float:
    """Seconds for the turns of a workload, of those that are left for it and all that come after it."""
    after = WORKLOADS[WORKLOADS.index(workload) :]
    profiles = _PROFILE * sum(other.profiled for other in after)
    return max(0.0, left - profiles) * workload.share / sum(other.share for other in after)


def cost_row(workload: Workload, turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """A line of ``cost``, each of whose two figures has a baseline of its own; None where a side failed.

    ``stock_baseline``, with the most tokens/s: ``overhead_percent`` is the median over rounds, in which both sides had
    a turn, since two medians of drifting series say less. ``forward_baseline``, with the least GPU time of a forward:
    ``forward_overhead_percent`` is of medians, since GPU time does not drift with the host.
    """
    speed = {
        side: statistics.median(turn["tokens"] / turn["seconds"] for turn in side_turns)
        for side, side_turns in turns.items()
        if side_turns
    }
    forward = {side: statistics.median(t["forward_us"] for t in turns[side]) for side in speed}
    stock = max((side for side in speed if side != _ALIGNED), key=lambda side: speed[side], default=None)
    least = min((side for side in forward if side != _ALIGNED), key=lambda side: forward[side], default=None)
    both = stock is not None and _ALIGNED in speed
    rates = {side: [turn["tokens"] / turn["seconds"] for turn in turns[side]] for side in speed}
    pairs = zip(rates[stock], rates[_ALIGNED], strict=False) if stock and both else ()
    by_round = [100 * (theirs / ours - 1) for theirs, ours in pairs]
    return {
        "workload": workload.name,
        "batch": workload.batch,
        "stock_tok_s": round(speed[stock], 1) if stock else None,
        "aligned_tok_s": round(speed[_ALIGNED], 1) if _ALIGNED in speed else None,
        "overhead_percent": round(statistics.median(by_round), 2) if by_round else None,
        "stock_baseline": stock,
        "forward_baseline": least,
        "stock_forward_us": round(forward[least], 1) if least else None,
        "aligned_forward_us": round(forward[_ALIGNED], 1) if _ALIGNED in forward else None,
        "forward_overhead_percent": overhead_percent(forward[least], forward[_ALIGNED]) if least and both else None,
        "forward_us": {side: round(us, 1) for side, us in forward.items()},
        "stock_spread": _spread(rates[stock]) if stock else None,
        "aligned_spread": _spread(rates[_ALIGNED]) if _ALIGNED in rates else None,
        "overhead_spread": _spread(by_round) if by_round else None,
        "turns": {
            side: [round(turn["tokens"] / turn["seconds"], 1) for turn in side_turns]
            for side, side_turns in turns.items()
        },
        "modes": {side: side_turns[-1]["modes"] for side, side_turns in turns.items() if side_turns},
        "forwards": {side: side_turns[-1]["forwards"] for side, side_turns in turns.items() if side_turns},
    }


def _spread(values: Sequence[float]) -> list[float]:
    """Least, median and most."""
    return [round(value, 2) for value in (min(values), statistics.median(values), max(values))]


def _add_profile(
    workload: Workload, row: Mapping[str, Any], found: Mapping[str, Profile], record: dict[str, Any]
) -> None:
    """The profile of a workload, against the stock side with the least GPU time of a forward of those that have one."""
    us, ratios = row["forward_us"], record["cost_model"]["ratios"]
    stock = min((side for side in found if side != _ALIGNED), key=lambda side: us[side])
    profile: dict[str, Any] = {
        "workload": workload.name,
        "batch": workload.batch,
        "forward_baseline": stock,
        "stock_forward_us": us[stock],
        "aligned_forward_us": us[_ALIGNED],
        "forward_us": {side: us[side] for side in found},
        "sides": {side: _side(us[side], profile) for side, profile in found.items()},
        "layers_us": {
            side: {name: round(t, 2) for name, t in layer_times(profile.times, ratios).items()}
            for side, profile in found.items()
        },
    }
    profile |= summarise(found[stock], found[_ALIGNED], ratios)
    record["profiles"].append(profile)
    if (workload.name, workload.batch) == _MAIN or not record["layers"]:
        record |= {name: profile[name] for name in ("layers", "ops")}
    print(f"    against {stock}: {json.dumps(profile['layers'])}\n    {json.dumps(profile['sides'])}")
    for op in profile["ops"]:
        host = "" if op["stock_host_us"] is None else f"  host {op['stock_host_us']:9.1f}  {op['aligned_host_us']:9.1f}"
        print(f"    {op['op']:34} stock {op['stock_us']:9.1f} us  aligned {op['aligned_us']:9.1f} us{host}", flush=True)


def _side(forward_us: float, profile: Profile) -> dict[str, Any]:
    """One side of a profile. Where the GPU is busy for less than the forward takes, it has waited for the host."""
    busy = busy_us(profile.times)
    return {
        "forward_us": forward_us,
        "busy_us": round(busy, 1),
        "busy_percent": round(100 * busy / forward_us, 1),
        "launches": round(launches(profile.times), 1),
        "host_us": round(host_us(profile.host), 1) if profile.host else None,
        "experts": profile.experts,
    }


def summarise(stock: Profile, aligned: Profile, ratios: Sequence[int]) -> dict[str, Any]:
    """``layers``, ``parts`` and ``ops`` of one profiled workload.

    Args:
        stock: The baseline.
        aligned: With the hooks.
        ratios: Compress ratio of each layer.
    """
    return {
        "layers": compare_layers(layer_times(stock.times, ratios), layer_times(aligned.times, ratios)),
        "parts": compare_parts(stock.times, aligned.times),
        "ops": compare_ops(stock, aligned),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Start the engines, measure, write the record."""
    parser = argparse.ArgumentParser(prog="aligned_e2e.vllm_cost", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="generated there unless it is complete")
    parser.add_argument("--parts", type=Path, required=True, help="where cost.json and the logs go")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for everything")
    parser.add_argument("--size", default="flash", help="of a checkpoint that is generated")
    arguments = parser.parse_args(argv)
    clock = Clock(arguments.limit - 10)  # the last seconds are for ending the engines
    parts: Path = arguments.parts
    parts.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "part": "cost",
        "command": command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": SETTINGS,
        "context": CONTEXT,
        "sides": {},
        "copy_gb_s": [],
        "cost": [],
        "layers": [],
        "ops": [],
        "profiles": [],
        "left_out": "contracts and self-tests of the hooks",
        "not_run": [],
    }

    def save() -> None:
        record["seconds"] = round(clock.spent(), 1)
        text = json.dumps(record) + "\n"
        (parts / "cost.json.new").write_text(text, encoding="utf-8")
        (parts / "cost.json.new").replace(parts / "cost.json")

    save()
    children: dict[str, Child] = {}
    others: dict[str, subprocess.Popen[bytes]] = {}
    try:
        children = {name: Child(name, side, parts / f"cost-{_file(name)}.log") for name, side in SIDES.items()}
        prepare(arguments.checkpoint, arguments.size, parts, clock, others)
        start(children, arguments.checkpoint, clock, record)
        record["not_compiled_ahead"] = [name for name, process in others.items() if process.poll() != 0]
        print(f"[{clock.spent():5.0f} s] not compiled ahead: {record['not_compiled_ahead']}", flush=True)
        save()
        engines: dict[str, Engine] = dict(children)
        measure_all(engines, clock, record, save)
    except SideError as error:
        record["not_run"].append({"what": "cost", "why": str(error)})
        print(error, flush=True)
    finally:
        for process in others.values():
            _end(process)
        for child in children.values():
            child.end()
        save()
    for missing in record["not_run"]:
        print(f"NOT RUN {missing['what']}: {missing['why'].splitlines()[0]}", flush=True)
    print(f"{parts / 'cost.json'}: {clock.spent():.0f} s")
    return 1 if record["not_run"] else 0


def prepare(
    checkpoint: Path, size: str, parts: Path, clock: Clock, processes: dict[str, subprocess.Popen[bytes]]
) -> None:
    """Generate the checkpoint and compile ahead; returns as soon as it is there and engines are worth starting.

    Raises:
        SideError: There is no checkpoint.
    """
    generator = None
    if not (checkpoint / "model.safetensors.index.json").is_file():
        command = ["aligned_e2e.vllm_checkpoint", str(checkpoint), "--size", size, "--device", "cuda", "--jobs", "6"]
        generator = _start(command, parts / "cost-checkpoint.log")
        processes["checkpoint"] = generator
    compilers = {" ".join(job[1:]): _start(job, parts / f"cost-compile-{'-'.join(job[1:])}.log") for job in _jobs()}
    processes |= compilers
    if generator is not None:
        try:
            code = generator.wait(timeout=max(1.0, clock.left_to_start()))
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            log = (parts / "cost-checkpoint.log").read_text(errors="replace")[-2000:]
            raise SideError(f"checkpoint: exit code {code} after {clock.spent():.0f} s\n{log}")
        print(f"[{clock.spent():5.0f} s] checkpoint generated", flush=True)
    while clock.spent() < _HEAD_START and any(process.poll() is None for process in compilers.values()):
        time.sleep(0.5)


def start(children: dict[str, Child], checkpoint: Path, clock: Clock, record: dict[str, Any]) -> None:
    """Start all engines side by side; those that are not ready in time are dropped.

    Raises:
        SideError: Stock or aligned is missing, so that there is nothing to compare.
    """
    waiting = dict(children)
    imported: set[str] = set()
    while waiting:
        connections = [child.connection for child in waiting.values()]
        ready = wait(connections, timeout=max(0.0, clock.left_to_start()))
        for name, child in tuple(waiting.items()):
            if ready and child.connection not in ready:
                continue
            try:
                answer = child.receive(0)
            except SideError as error:
                record["not_run"].append({"what": f"start of {name}", "why": str(error)})
                print(error, flush=True)
                child.end()  # its memory is for the others
                del waiting[name], children[name]
                continue
            if name not in imported:
                imported.add(name)
                child.send("start", checkpoint=str(checkpoint), settings=dict(SIDES[name].settings))
                continue
            del waiting[name]
            shown = {key: value for key, value in answer.items() if key != "header"}
            print(f"[{clock.spent():5.0f} s] {name} is ready: {json.dumps(shown)}", flush=True)
            told = ("start_seconds", "experts", "attention", "async_scheduling", "gpu_gib", "allocated_gib")
            record["sides"][name] = {key: answer[key] for key in told}
            record["cost_model"] = {
                key: answer[key] for key in ("layers", "shared", "ratios", "vocabulary", "weights_gib")
            }
            if "header" in answer:
                about = answer["header"]
                record |= {key: about[key] for key in ("gpu", "gpus", "versions", "attestation")}
        if _ALIGNED not in children or len(children) < 2:
            raise SideError(f"nothing to compare: {', '.join(children) or 'no engine'} alone is left")


def _jobs() -> list[list[str]]:
    """Commands that compile what an engine of V4-Flash's shapes would compile one after another."""
    engine = "aligned_e2e.vllm_cost_engine"
    products = ((1536, 4096, 0), (32768, 1024, 0), (4096, 8192, 0), (8192, 1024, 0), (4096, 4096, 0), (4096, 2048, 0),
                (4096, 4096, 256), (4096, 2048, 256))  # fmt: skip
    tokens = [t for t in TOKENS_OF_A_STEP if t != 128 and t != 2080]  # compiled as 32 and 2,048 are
    return [[engine, "product", *map(str, shape)] for shape in products] + [
        [engine, "mhc", "4096", str(count)] for count in tokens
    ]


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("w", encoding="utf-8") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env=_environment({"VLLM_PLUGINS": "none"}),
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
    benchmarks = Path(__file__).resolve().parents[2] / "packages" / "bi-kernels" / "benchmarks"
    ci = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ci), str(benchmarks)]))
    return {"CUDA_VISIBLE_DEVICES": "0"} | inherited | _ENVIRONMENT | {"PYTHONPATH": path} | dict(more)


def _print_row(clock: Clock, row: Mapping[str, Any]) -> None:
    print(
        f"[{clock.spent():5.0f} s] {row['workload']:28} batch {row['batch']:3}: {row['stock_baseline']} "
        f"{row['stock_tok_s']} tok/s, aligned {row['aligned_tok_s']} tok/s, {row['overhead_percent']} % slower; "
        f"forward {row['forward_us']} us, {row['forward_overhead_percent']} % against {row['forward_baseline']}; "
        f"{row['modes']}",
        flush=True,
    )


def _file(name: str) -> str:
    return name.replace(" ", "-").replace("_", "-")


if __name__ == "__main__":
    raise SystemExit(main())
