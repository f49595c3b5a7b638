"""Profiles ``h100`` and ``h200``: real vLLM, real kernels, generated checkpoints. One subprocess for each engine.

Engines run side by side on one GPU, each with a time limit and a log of its own. A record that is there is kept, so
that a run can be spread over several invocations: a GPU host may only lend itself for minutes at a time. Without nox
the same steps are plain commands, see ``ci/gpu/run_aligned_e2e.sh``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import importlib.util
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from .vllm_engine import ENGINES, FIRST, QUICK, Engine
from .vllm_report import DRAWN, EXTRA_PARTS, merge, merge_quick, print_report, record_of, write_page, write_report

__all__ = [
    "CHECKPOINTS",
    "ENVIRONMENT",
    "Job",
    "add_arguments",
    "end_process",
    "environment_of",
    "gpu_count",
    "jobs_of",
    "run",
    "run_jobs",
]

ENVIRONMENT: dict[str, str] = {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # compiles for minutes what a run of this size never calls
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "2",  # engines share the cores
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # a part that is ended prints where it stood
    # A machine of several tenants may not offer multicast over NVLink.
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""What every engine's process gets."""

CHECKPOINTS: dict[str, tuple[str, ...]] = {
    "a": ("--seed", "1"),
    "b": ("--seed", "2"),
    "heads32": ("--seed", "3", "--heads", "32"),
}
"""Folders of the checkpoints of size ``tiny``, and what makes each."""

_REMOVED = ("BI_PARTIAL", "VLLM_PLUGINS", "BI_EP_TRANSPORT")
_FLAG = "VLLM_BATCH_INVARIANT"


@dataclass(frozen=True, slots=True)
class Job:
    """One part: a subprocess for each rank.

    Attributes:
        name: Of the part.
        commands: One per rank.
        environments: One per rank, whole.
        records: What must be there afterwards.
        limit: Seconds.
        leaves: Files that it writes while it runs, and others wait for.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    environments: tuple[Mapping[str, str], ...]
    records: tuple[pathlib.Path, ...]
    limit: float
    leaves: tuple[pathlib.Path, ...] = ()


def environment_of(hooks: str = "ours", extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of one process, for an :class:`Engine` with such ``hooks``.

    Plug-ins are found by vLLM itself, so that nothing here may choose among them.
    """
    found = {name: value for name, value in os.environ.items() if name not in _REMOVED}
    found |= ENVIRONMENT | dict(extra or {})
    paths = [path for path in found.get("PYTHONPATH", "").split(os.pathsep) if path]
    if hooks == "none":
        found["VLLM_PLUGINS"] = "none"
    if hooks in ("inert", "absent"):
        del found[_FLAG]
    if hooks == "absent":
        paths = [path for path in paths if not pathlib.Path(path, "bi_kernels").is_dir()]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    found["BI_E2E_GPUS"] = str(gpu_count())
    return found


def python_of(hooks: str) -> str:
    """The interpreter: for a process without us, where we are installed in a virtual environment, its parent."""
    found = importlib.util.find_spec("bi_kernels") if hooks == "absent" else None
    inside = found is not None and sys.prefix != sys.base_prefix and str(found.origin).startswith(sys.prefix)
    return str(getattr(sys, "_base_executable", sys.executable)) if inside else sys.executable


@functools.cache
def gpu_count() -> int:
    """GPUs of this machine, without initialising any; 0 where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def jobs_of(
    engines: Mapping[str, Engine], weights: pathlib.Path, parts: pathlib.Path, *, limit: float, gpus: int
) -> list[Job]:
    """A job for each engine that this machine has enough GPUs for; engines of one rank take turns with the GPUs."""
    jobs = []
    for number, (name, engine) in enumerate(engines.items()):
        if engine.ranks > max(1, gpus):
            continue
        command = [python_of(engine.hooks), "-m", "aligned_e2e.vllm_engine", name, "--weights", str(weights)]
        command += ["--drawn", str(parts / DRAWN)]
        extra: list[dict[str, str]] = [dict(engine.environment) for _ in range(engine.ranks)]
        if engine.ranks > 1:
            port = str(_free_port())
            for rank, variables in enumerate(extra):
                variables |= {"VLLM_DP_SIZE": str(engine.ranks), "VLLM_DP_RANK": str(rank)}
                variables |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
        elif gpus > 1:
            extra[0]["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        records = [record_of(parts, name, rank) for rank in range(engine.ranks)]
        jobs.append(
            Job(
                name,
                tuple((*command, "--output", str(records[r]), "--rank", str(r)) for r in range(engine.ranks)),
                tuple(environment_of(engine.hooks, variables) for variables in extra),
                tuple(records),
                limit,
                leaves=(parts / DRAWN,) if name == FIRST else (),
            )
        )
    return jobs


def extra_jobs(
    names: Sequence[str], weights: pathlib.Path, parts: pathlib.Path, *, at_once: int, limit: float
) -> list[Job]:
    """Jobs of the parts that modules of their own run, as far as those modules are there."""
    jobs = []
    for name in names:
        part = EXTRA_PARTS[name]
        module = f"{__package__}.{part.module}"
        if importlib.util.find_spec(module) is not None:
            command = (sys.executable, "-m", module, *part.arguments(weights, parts, at_once, limit))
            jobs.append(Job(name, (command,), (environment_of(part.hooks),), (record_of(parts, name),), limit))
    return jobs


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, with what it has started, if it still runs.

    It is asked first, so that Python's fault handler prints every thread's stack to its log. From a timer inside the
    process that would not be safe: the handler then reads frames that a running thread is changing.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(slots=True)
class _Running:
    """Processes to end when the run ends, whatever ends it."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            end_process(process)


def run_jobs(jobs: Sequence[Job], *, at_once: int, deadline: float, say: Callable[[str], None]) -> list[str]:
    """Run the jobs whose records are not whole, so many at once, in order. Returns the names of those that failed.

    Args:
        jobs: What to run.
        at_once: Number of jobs.
        deadline: ``time.monotonic()`` by which everything has ended, finished or not.
        say: Called with each line of news.
    """
    running = _Running()
    waiting = [job for job in jobs if not all(map(_is_whole, job.records))]
    for job in waiting:
        for path in job.leaves:  # others wait for them, and must not meet those of an older run
            path.unlink(missing_ok=True)
            path.with_suffix(".failed").unlink(missing_ok=True)
    with concurrent.futures.ThreadPoolExecutor(max(1, at_once)) as pool:
        try:
            outcomes = list(pool.map(lambda job: _run_job(job, running, deadline, say), waiting))
        except BaseException:
            running.end(running.processes)
            raise
    return [job.name for job, fine in zip(waiting, outcomes, strict=True) if not fine]


def _is_whole(record: pathlib.Path) -> bool:
    """A part that failed may have recorded some of what it did."""
    return record.is_file() and not record.with_suffix(".failed").is_file()


def _run_job(job: Job, running: _Running, deadline: float, say: Callable[[str], None]) -> bool:
    started = time.monotonic()
    if started >= deadline:
        say(f"{job.name}: no time left, not started")
        return False
    end = min(started + job.limit, deadline)
    processes = []
    for command, environment, record in zip(job.commands, job.environments, job.records, strict=True):
        record.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".json", ".partial", ".failed"):
            record.with_suffix(suffix).unlink(missing_ok=True)
        with record.with_suffix(".log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )  # fmt: skip
    running.processes += processes
    say(f"{job.name}: started")
    while None in (codes := [process.poll() for process in processes]):
        if time.monotonic() > end or any(codes):  # the other rank would wait for one that failed
            running.end(processes)
        time.sleep(0.2)
    seconds = time.monotonic() - started
    if not any(codes) and all(record.is_file() for record in job.records):
        say(f"{job.name}: done after {seconds:.0f} s")
        for line in job.records[0].with_suffix(".log").read_text(errors="replace").splitlines():
            if line.startswith("== "):  # what a part says about itself
                say(f"    {line[3:]}")
        return True
    said = ", ".join(map(str, codes))
    say(f"{job.name}: FAILED after {seconds:.0f} s, exit codes {said} (-9: past its time limit, or the other's fault)")
    for path in (*job.records, *job.leaves):
        path.with_suffix(".failed").touch()
    for record in job.records:
        for line in _last_lines(record.with_suffix(".log")):
            say(f"    {line}")
    return False


def _last_lines(log: pathlib.Path, count: int = 40) -> list[str]:
    """The end of a log, without vLLM's progress bars."""
    lines = log.read_text(errors="replace").splitlines()
    return [line[:300] for line in lines if line.strip() and "it/s]" not in line][-count:]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the profiles that run vLLM."""
    group = parser.add_argument_group("profiles h100 and h200")
    group.add_argument("--work", type=pathlib.Path, default=pathlib.Path("build") / "aligned_e2e" / "vllm",
                       help="checkpoints and records (parts); kept between invocations")  # fmt: skip
    group.add_argument("--parts", type=pathlib.Path, help="where the records are, if not in WORK/parts")
    group.add_argument("--quick", action="store_true", help="quick_alignment_test: one engine, a minute when warm")
    group.add_argument("--merge", action="store_true", help="start nothing, put the records together")
    group.add_argument("--only", action="append", default=[], metavar="PART", help="run only this part; repeatable")
    group.add_argument("--skip", action="append", default=[], metavar="PART", help="do not run this part; repeatable")
    group.add_argument("--jobs", type=int, default=6, help="engines side by side; 7 to 12 GiB of GPU memory each")
    group.add_argument("--limit", type=float, default=540, help="seconds for a part")
    group.add_argument("--deadline", type=float, default=1e9, help="seconds for the whole invocation")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Run what is missing, merge what is there, write the report. 0: aligned, 1: not aligned, or not whole."""
    begun = time.monotonic()
    weights: pathlib.Path = arguments.work
    parts: pathlib.Path = arguments.parts or weights / "parts"
    gpus = gpu_count()

    def say(line: str) -> None:
        console.print(f"{time.monotonic() - begun:6.1f} s  {line}", markup=False, highlight=False, soft_wrap=True)

    if not arguments.merge:
        if not gpus:
            console.print(f"profile {arguments.profile}: expected a GPU and vLLM 0.26.0, found no GPU.", markup=False)
            return 2
        engines = QUICK if arguments.quick else ENGINES
        known = [*engines, *EXTRA_PARTS]
        unknown = [name for name in (*arguments.only, *arguments.skip) if name not in known]
        if unknown:
            console.print(f"parts: expected some of {'; '.join(known)}; got {'; '.join(unknown)}", markup=False)
            return 2
        wanted = set(arguments.only or (engines if arguments.quick else known)) - set(arguments.skip)
        chosen = {name: engine for name, engine in engines.items() if name in wanted}
        extra = [name for name in EXTRA_PARTS if name in wanted]
        needed = {schedule.weights for engine in chosen.values() for schedule in engine.schedules}
        _make_checkpoints(weights, needed | {name for part in extra for name in EXTRA_PARTS[part].weights}, say)
        if arguments.quick:  # it is asked for again where something has changed
            for name in engines:
                record_of(parts, name).unlink(missing_ok=True)
        deadline = begun + arguments.deadline
        jobs = jobs_of(chosen, weights, parts, limit=arguments.limit, gpus=gpus)
        for group in _groups(extra):
            limit = min(arguments.limit, deadline - time.monotonic())
            many = [name for name in group if EXTRA_PARTS[name].many]
            # A part that starts engines itself gets its share of them, and takes the place of one.
            alone = not jobs and group == many
            share = arguments.jobs if alone else max(1, round(0.4 * arguments.jobs))
            first = [*many, *(name for name in group if name not in many)]  # these last long
            jobs = extra_jobs(first, weights, parts, at_once=share, limit=limit) + jobs
            at_once = arguments.jobs if alone or not many else max(2, arguments.jobs - share + 1)
            run_jobs(jobs, at_once=at_once, deadline=deadline, say=say)
            jobs = []
    if arguments.quick:
        report = merge_quick(parts, profile=arguments.profile)
    else:
        report = merge(parts, profile=arguments.profile, gpus=gpus)
    report["seconds"] = round(time.monotonic() - begun, 1)
    write_report(arguments.output, report)
    print_report(report, console)
    console.print(f"report: {arguments.output}", markup=False)
    write_page(arguments.output)
    return 1 if report["failures"] else 0


def _groups(extra: Sequence[str]) -> list[list[str]]:
    """Parts that may run beside the engines, and then, one after the other, those that may not."""
    groups = [[name for name in extra if not EXTRA_PARTS[name].alone]]
    return groups + [[name] for name in extra if EXTRA_PARTS[name].alone]


def _make_checkpoints(weights: pathlib.Path, names: Collection[str], say: Callable[[str], None]) -> None:
    """The checkpoints of these names, side by side, as far as they are not there."""
    writing = {}
    for name in sorted(names):
        if not (weights / name / "model.safetensors.index.json").is_file():  # written last
            command = [sys.executable, "-m", "aligned_e2e.vllm_checkpoint", str(weights / name), "--size", "tiny"]
            writing[name] = subprocess.Popen([*command, *CHECKPOINTS[name], "--device", "cuda"])
    for name, process in writing.items():
        if process.wait(timeout=180):
            raise subprocess.CalledProcessError(process.returncode, process.args)
        say(f"checkpoint {name} written")
