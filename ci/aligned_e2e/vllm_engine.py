"""One vLLM engine in one process: serves schedules of the same requests and writes what it drew, bit by bit.

``python -m aligned_e2e.vllm_engine ENGINE --weights DIR --output FILE``, with ENGINE one of :data:`ENGINES` and the
environment that :mod:`aligned_e2e.h200` sets. ``DIR/a`` and ``DIR/b`` are two checkpoints. The engine core must run in
this process, because its runner is watched: ``VLLM_ENABLE_V1_MULTIPROCESSING=0``. vLLM is imported only when an engine
is started, so that the tables and the requests are there without it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import random
import shlex
import struct
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "COMMON",
    "ENGINES",
    "FIRST",
    "GRAPH_SIZES",
    "MAX_MODEL_LEN",
    "QUICK",
    "Engine",
    "PromptSpec",
    "Schedule",
    "Watch",
    "command_line",
    "digests_of_rows",
    "header",
    "main",
    "make_prompts",
    "prompts_of",
    "serve",
    "start",
    "write_json",
]

MAX_MODEL_LEN = 8192
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 48, 64]
PACKAGES = ("bi-kernels", "bi-sparse-attn", "bi-moe-deepep", "bi-reload")


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the requests reach an engine.

    Attributes:
        name: For the report.
        order_seed: Shuffles them; None keeps their order.
        at_once: So many at a time; None all.
        recompute: The requests are finished sequences, and their prompt logprobs are what counts: those of the
            engine's ``own`` first schedule, or of the ``first`` schedule of all (:data:`FIRST`).
        preempt_every: After so many steps every running request loses its pages, over and over.
        weights: Which checkpoint; another one than before is reloaded in place.
        idle: On several ranks: only rank 0 has requests. Otherwise they are dealt out.
    """

    name: str
    order_seed: int | None = None
    at_once: int | None = None
    recompute: Literal["", "own", "first"] = ""
    preempt_every: int = 0
    weights: Literal["a", "b", "heads32"] = "a"
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """Settings of one engine, and the schedules that it serves one after the other.

    Attributes:
        settings: Arguments of ``vllm.LLM`` that differ from :data:`COMMON`.
        schedules: Served in this order.
        environment: Variables of its processes beside the common ones.
        hooks: ``ours``: the four plug-ins, with the flag on. ``none``: the flag is on and vLLM is stock. ``inert``: the
            flag is off. ``absent``: the flag is off and the packages cannot be imported.
        requests: So many of them, from the first.
        max_tokens: Drawn after each.
        longest: Prompts are cut to this length.
        ranks: Processes with a GPU each, data and expert parallel.
    """

    settings: dict[str, Any]
    schedules: tuple[Schedule, ...]
    environment: dict[str, str] = field(default_factory=dict)
    hooks: Literal["ours", "none", "inert", "absent"] = "ours"
    requests: int = 48
    max_tokens: int = 52
    longest: int = MAX_MODEL_LEN
    ranks: int = 1


COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 64,
    # Only looked at when an engine starts. With kv_cache_memory_bytes nothing is measured, so that engines can share a
    # GPU: a measurement fails when a neighbour frees memory meanwhile.
    "gpu_memory_utilization": 0.06,
    "kv_cache_memory_bytes": 2 << 30,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "seed": 0,
    "compilation_config": {"cudagraph_capture_sizes": GRAPH_SIZES},
}

_PAIR: dict[str, Any] = {"distributed_executor_backend": "uni", "enable_expert_parallel": True}
_PAIR_SIZE: dict[str, Any] = {"requests": 24, "ranks": 2}
_OFF: dict[str, Any] = {"requests": 16, "max_tokens": 16, "longest": 1000}
_SMALL: dict[str, Any] = {"requests": 24, "max_tokens": 32}

FIRST = "graphs"
"""The engine whose first schedule all others are compared with, and whose tokens the actors recompute."""

# Those that last long, or compile what no cache has, come first: they are started in this order.
ENGINES: dict[str, Engine] = {
    FIRST: Engine(
        {},
        (
            Schedule("together"),
            Schedule("together, shuffled", order_seed=1),
            Schedule("five at a time", order_seed=2, at_once=5),
            Schedule("alone", at_once=1),
        ),
    ),
    # vLLM pads 32 heads to the 64 of its kernels. Rollout and actor a are one process here.
    "32 heads": Engine(
        {},
        (
            Schedule("32 heads", weights="heads32"),
            Schedule("32 heads, five at a time", order_seed=7, at_once=5, weights="heads32"),
            Schedule("32 heads, recomputed", recompute="own", weights="heads32"),
        ),
        **_SMALL,
    ),
    "stock": Engine(
        {},
        (Schedule("stock"), Schedule("stock, recomputed", recompute="own")),
        # Its attention is left in the pieces of captured graphs otherwise, as the engine runs in this process.
        environment={"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
        hooks="none",
    ),
    "off": Engine(
        {"enforce_eager": True}, (Schedule("off"), Schedule("off, again")), hooks="inert", **_OFF
    ),
    "actor": Engine(
        {"enforce_eager": True, "max_num_batched_tokens": 2048}, (Schedule("actor a", recompute="first"),)
    ),
    "prefix cache": Engine(
        {"enable_prefix_caching": True, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 6 << 30},
        (Schedule("prefix cache, cold", order_seed=4), Schedule("prefix cache, warm", order_seed=5)),
    ),
    "small budget": Engine(
        {"enforce_eager": True, "max_num_batched_tokens": 160, "max_num_seqs": 32}, (Schedule("small budget, eager"),)
    ),
    "preempted": Engine(
        # Some twenty pages a request: too few for all of them, twice what the longest needs in one step.
        {"max_num_batched_tokens": 1024, "num_gpu_blocks_override": 900},
        (Schedule("preempted", order_seed=6, preempt_every=80),),
    ),
    "reload": Engine(
        {},
        (Schedule("reload: A"), Schedule("reload: B after A", weights="b"), Schedule("reload: A again")),
        **_SMALL,
    ),
    "off, without us": Engine(
        {"enforce_eager": True}, (Schedule("without us"), Schedule("without us, again")), hooks="absent", **_OFF
    ),
    "piecewise": Engine(
        {
            "max_num_batched_tokens": 512,
            "compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [*GRAPH_SIZES, 256, 512]},
        },
        (Schedule("piecewise graphs", order_seed=3),),
    ),
    "reload, cold": Engine({}, (Schedule("reload: B cold", weights="b"),), **_SMALL),
    "two GPUs, NCCL": Engine(
        _PAIR | {"all2all_backend": "allgather_reducescatter"},
        (Schedule("EP 2, NCCL"), Schedule("DP 2, one rank idle, NCCL", idle=True)),
        environment={"BI_EP_TRANSPORT": "nccl"},
        **_PAIR_SIZE,
    ),
    "two GPUs, DeepEP": Engine(
        _PAIR | {"all2all_backend": "deepep_low_latency"},
        (Schedule("EP 2, DeepEP low latency"), Schedule("DP 2, one rank idle, DeepEP low latency", idle=True)),
        **_PAIR_SIZE,
    ),
}  # fmt: skip

QUICK = {
    "quick": Engine({}, (Schedule("quick"), Schedule("quick, recomputed", recompute="own")), requests=12, max_tokens=16)
}
"""``quick_alignment_test``: one engine, which recomputes what it has drawn."""


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One request: token ids, how many to draw after them, and the seed that they are drawn with."""

    name: str
    tokens: tuple[int, ...]
    max_tokens: int
    seed: int


# Around every boundary: pages of 64 and 256, the window of 128, and 4 * index_topk = 2048, past which top-k selects.
_LENGTHS = (1, 2, 5, 31, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 400, 511, 700, 1023, 1300, 2040, 2047, 2048,
            2049, 2500, 3100, 4097, 5200, 7900)  # fmt: skip


def make_prompts(vocab_size: int, *, count: int, max_tokens: int) -> list[PromptSpec]:
    """Random prompts of :data:`_LENGTHS` in turn, but for three of each eight.

    One has 2,600 tokens or more and repeats its first half, so that compressed keys, and with them index scores, tie
    exactly where top-k selects; two have 900 or more and begin alike over 600, which a prefix cache can share.
    """
    prompts = []
    common = random.Random(0).choices(range(2, vocab_size), k=600)
    for i in range(count):
        repeats, shares = i % 8 == 3, i % 8 in (5, 6)
        length = max(_LENGTHS[i % len(_LENGTHS)], 2600 * repeats, 900 * shares)
        length = min(length, MAX_MODEL_LEN - max_tokens - 1)
        tokens = random.Random(1000 + i).choices(range(2, vocab_size), k=length)
        if repeats:
            tokens = (tokens[: (length + 1) // 2] * 2)[:length]
        elif shares:
            tokens[: len(common)] = common
        prompts.append(PromptSpec(f"r{i:02d}", tuple(tokens), max_tokens, seed=2000 + i))
    return prompts


def prompts_of(engine: Engine, vocab_size: int) -> list[PromptSpec]:
    """The requests of an engine; the first ones of any engine are the same but for what is drawn and cut."""
    prompts = make_prompts(vocab_size, count=engine.requests, max_tokens=engine.max_tokens)
    return [PromptSpec(p.name, p.tokens[: engine.longest], p.max_tokens, p.seed) for p in prompts]


def digests_of_rows(logits: Any) -> list[int]:
    """64-bit digest of each row of logits, by the tracer's rule."""
    from bi_kernels.testing.trace import row_digests

    return [int(digest) for digest in row_digests(logits).tolist()]


def _hashes_of_rows(logits: Any) -> list[int]:
    """The same for processes that cannot import us."""
    import torch

    rows = logits.contiguous().view(torch.uint8).cpu().numpy()
    return [int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little", signed=True)
            for row in rows]  # fmt: skip


class Watch:
    """What the runner and the scheduler of an engine in this process did, and digests of all logits that count.

    Attributes:
        counts: Steps, replays by kind, preemptions and so on, since the last :meth:`clear`.
        digests: By request id as vLLM's outputs name it, then by the number of tokens that were seen before the logits.
        contradictions: Rows that were computed twice, with other bits.
        preempt_every: See :class:`Schedule`.
    """

    def __init__(self, llm: Any, digest: Any = digests_of_rows) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self.worker = core.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        self.counts: Counter[str] = Counter()
        self.digests: dict[str, dict[int, int]] = {}
        self.contradictions: list[str] = []
        self.preempt_every = 0
        self._digest = digest
        self._schedules = 0
        self._prompt_rows: list[list[int]] | None = None
        self._watch_sampling()
        self._watch_prompt_logprobs()
        self._watch_graphs()
        self._watch_scheduler(core.scheduler)

    def clear(self) -> None:
        """Forget what was seen."""
        self.counts.clear()
        self.digests.clear()
        self.contradictions.clear()
        self._schedules = 0

    def _keep(self, request: str, seen: int, digest: int) -> None:
        name = request.rpartition("-")[0]  # vLLM appends a random part to the id that it was given
        if self.digests.setdefault(name, {}).setdefault(seen, digest) != digest:
            self.contradictions.append(f"request {name}, after {seen} tokens")

    def _watch_sampling(self) -> None:
        runner, sample = self.runner, self.runner.sample_tokens

        def sample_tokens(grammar_output: Any) -> Any:
            state = runner.execute_model_state
            if state is not None and state.logits is not None:
                scheduled = state.scheduler_output.num_scheduled_tokens
                batch = runner.input_batch
                digests = self._digest(state.logits)
                for row, request in enumerate(batch.req_ids[: len(digests)]):
                    seen = int(batch.num_computed_tokens_cpu[row]) + scheduled[request]
                    if seen < len(runner.requests[request].prompt_token_ids):
                        self.counts["prefill_splits"] += 1
                        continue  # mid-prompt: nothing is drawn from this row
                    self._keep(request, seen, digests[row])
                self.counts["steps"] += 1
                self.counts["largest_batch"] = max(self.counts["largest_batch"], len(scheduled))
            return sample(grammar_output)

        runner.sample_tokens = sample_tokens

    def _watch_prompt_logprobs(self) -> None:
        """Prompt logprobs come from one more call of the head per request and step."""
        runner, model = self.runner, self.runner.get_model()
        compute, collect = model.compute_logits, runner._get_prompt_logprobs_dict

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if self._prompt_rows is not None:
                self._prompt_rows.append(self._digest(logits))
            return logits

        def prompt_logprobs(hidden_states: Any, scheduled: dict[str, int]) -> Any:
            calls = []
            for request in (name for name in runner.num_prompt_logprobs if name in scheduled):
                state = runner.requests[request]
                left = len(state.prompt_token_ids) - 1 - state.num_computed_tokens
                if min(scheduled[request], left) > 0:
                    calls.append((request, state.num_computed_tokens))
            self._prompt_rows = []
            try:
                result = collect(hidden_states, scheduled)
                for (request, start), rows in zip(calls, self._prompt_rows, strict=True):
                    for i, digest in enumerate(rows):
                        self._keep(request, start + i + 1, digest)
            finally:
                self._prompt_rows = None
            return result

        model.compute_logits = compute_logits
        runner._get_prompt_logprobs_dict = prompt_logprobs

    def _watch_graphs(self) -> None:
        dispatcher, dispatch = self.runner.cudagraph_dispatcher, self.runner.cudagraph_dispatcher.dispatch

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = dispatch(*args, **kwargs)
            self.counts[f"graph_{result[0].name.lower()}"] += 1
            return result

        dispatcher.dispatch = counted

    def _watch_scheduler(self, scheduler: Any) -> None:
        preempt, schedule = scheduler._preempt_request, scheduler.schedule

        def preempted(*args: Any, **kwargs: Any) -> Any:
            self.counts["preemptions"] += 1
            return preempt(*args, **kwargs)

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            self._schedules += 1
            if self.preempt_every and self._schedules % self.preempt_every == 0:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            return schedule(*args, **kwargs)

        scheduler._preempt_request = preempted
        scheduler.schedule = scheduled


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def serve(
    llm: Any,
    watch: Watch,
    schedule: Schedule,
    prompts: Sequence[PromptSpec],
    drawn: dict[str, list[int]],
    *,
    index_topk: int = 512,
    rank: int = 0,
    ranks: int = 1,
) -> dict[str, Any]:
    """Run one schedule. ``drawn`` has tokens by request, for a schedule that recomputes."""
    from vllm import RequestOutput, SamplingParams

    order = list(prompts) if ranks == 1 else list(prompts[rank::ranks])
    if schedule.idle:
        order = list(prompts) if rank == 0 else []
    if schedule.order_seed is not None:
        random.Random(schedule.order_seed).shuffle(order)
    watch.clear()
    watch.preempt_every = schedule.preempt_every
    started = time.monotonic()
    rows: dict[str, Any] = {}
    step = schedule.at_once or max(1, len(order))
    if not order:  # this rank has nothing to do but to join the others' steps, until they are done
        llm._run_engine(output_type=RequestOutput, use_tqdm=False)
    for at in range(0, len(order), step):
        batch = order[at : at + step]
        parameters = [
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
            if schedule.recompute
            else SamplingParams(
                max_tokens=p.max_tokens, temperature=1.0, seed=p.seed, logprobs=0, ignore_eos=True, detokenize=False
            )
            for p in batch
        ]
        inputs = [{"prompt_token_ids": [*p.tokens, *(drawn[p.name] if schedule.recompute else ())]} for p in batch]
        for prompt, output in zip(batch, llm.generate(inputs, parameters, use_tqdm=False), strict=True):
            watch.counts["cached_tokens"] += output.num_cached_tokens or 0
            if schedule.recompute:
                tokens = drawn[prompt.name]
                entries = output.prompt_logprobs[len(prompt.tokens) :]
            else:
                tokens = list(output.outputs[0].token_ids)
                entries = output.outputs[0].logprobs
            seen = watch.digests[output.request_id]
            digests = [seen[len(prompt.tokens) + i] for i in range(len(tokens))]
            logprobs = [_bits(entry[token].logprob) for token, entry in zip(tokens, entries, strict=True)]
            rows[prompt.name] = {"tokens": tokens, "logprobs": logprobs, "digests": digests}
            past = len(prompt.tokens) + len(tokens) - 4 * index_topk
            watch.counts["tokens_past_top_k"] += max(0, min(len(tokens), past))
    return {
        "schedule": schedule.name,
        "seconds": round(time.monotonic() - started, 1),
        "did": dict(watch.counts),
        "contradictions": watch.contradictions[:20],
        "requests": rows,
    }


def start(checkpoint: pathlib.Path, settings: dict[str, Any]) -> Any:
    """A ``vllm.LLM`` with :data:`COMMON` and ``settings``.

    Without vLLM's warm-up of kernels: it compiles for minutes what no request here calls. What is called compiles when
    the graphs are captured, or with the first request.
    """
    from vllm import LLM
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as LLM does; before it, that is, before what the next line imports
    from vllm.v1.worker import gpu_worker

    gpu_worker.kernel_warmup = lambda worker: None
    return LLM(model=str(checkpoint), **(COMMON | settings))


def command_line() -> str:
    """The command of this process, without the folder that its interpreter lies in."""
    return shlex.join([pathlib.Path(sys.executable).name, *sys.orig_argv[1:]])


def header(
    part: str, started: float, *, hooks: str = "ours", attestation: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What every record begins with: what ran, where, and by which code.

    Args:
        part: Name of the part.
        started: ``time.monotonic()`` of when it began.
        hooks: As of :class:`Engine`. ``ours`` demands that all four hooks are active in this process.
        attestation: Of the process that the record speaks for, where that is not this one.

    Raises:
        AttestationError: A hook is not active, or something else holds the place of one of its edits.
    """
    import torch

    if attestation is None and hooks != "absent":
        import bi_kernels as bk

        attestation = json.loads(bk.attest(required=PACKAGES if hooks == "ours" else ()).to_json())
    return {
        "part": part,
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus": int(os.environ.get("BI_E2E_GPUS", "0")),  # of the machine; this process may see fewer
        "versions": {"python": sys.version.split()[0], "cuda": torch.version.cuda} | _versions(),
        "attestation": attestation,
    }


def _versions() -> dict[str, str]:
    found = {}
    others = ("torch", "vllm", "triton", "tilelang", "nvidia-cutlass-dsl", "tokenspeed-deepep")
    for name in (*others, *PACKAGES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write_json(path: pathlib.Path, record: Any) -> None:
    """Write a file that is either whole or not there: others wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(record) + "\n", encoding="utf-8")
    draft.replace(path)


def _wait_for(path: pathlib.Path) -> Any:
    """The contents of a file that a process beside this one is going to write."""
    failed = path.with_suffix(".failed")
    while not path.is_file():
        if failed.is_file():
            raise SystemExit(f"{path}: expected the tokens of engine {FIRST}, which has failed.")
        time.sleep(0.5)
    return json.loads(path.read_text(encoding="utf-8"))


def _prepare(engine: Engine, rank: int) -> None:
    """Before vLLM is imported: what no environment variable of :mod:`aligned_e2e.h200` can do."""
    if engine.hooks == "absent" and importlib.util.find_spec("bi_kernels") is not None:
        raise SystemExit("expected an import path without bi_kernels, found it. Set PYTHONPATH to vLLM alone.")
    if engine.settings.get("all2all_backend") == "deepep_low_latency":
        # DeepEP's wheel is linked to NVSHMEM without saying where it is.
        with contextlib.suppress(ModuleNotFoundError):
            for folder in importlib.import_module("nvidia.nvshmem").__path__:
                for library in pathlib.Path(folder, "lib").glob("libnvshmem_host.so*"):
                    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class _Reloads:
    """The weights of an engine, and what reloading them did."""

    def __init__(self, watch: Watch, weights: pathlib.Path, loaded: str) -> None:
        from bi_reload import AddressLedger

        self.worker, self.weights, self.loaded = watch.worker, weights, loaded
        self.ledger = AddressLedger().record(self.worker.get_model())
        self.record: dict[str, Any] = {"tensors": len(self.ledger), "moved": [], "seconds": [], "fingerprints": []}

    def to(self, weights: str) -> None:
        import torch

        from bi_reload import vllm_reload

        if weights != self.loaded:
            torch.cuda.synchronize()
            started = time.monotonic()
            self.worker.reload_weights(weights_path=str(self.weights / weights))
            torch.cuda.synchronize()
            self.record["seconds"].append(round(time.monotonic() - started, 2))
            self.loaded = weights
        fingerprints = vllm_reload.live_fingerprints(self.worker)
        text = json.dumps(fingerprints, sort_keys=True)
        self.record["fingerprints"].append([weights, hashlib.sha256(text.encode()).hexdigest()])
        self.record["moved"] = [str(difference) for difference in self.ledger.diff(self.worker.get_model())][:60]


def main(argv: Sequence[str] | None = None) -> int:
    """Start one engine, serve its schedules, write the record."""
    engines = ENGINES | QUICK
    parser = argparse.ArgumentParser(prog="aligned_e2e.vllm_engine", description=__doc__)
    parser.add_argument("engine", choices=engines)
    parser.add_argument("--weights", type=pathlib.Path, required=True, help="folder of the checkpoints a and b")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--drawn", type=pathlib.Path, help="the record of the first schedule of all")
    parser.add_argument("--rank", type=int, default=0)
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    engine, rank = engines[arguments.engine], arguments.rank
    first = engine.schedules[0]
    config = json.loads((arguments.weights / first.weights / "config.json").read_text())
    prompts = prompts_of(engine, config["vocab_size"])
    _prepare(engine, rank)

    llm = start(arguments.weights / first.weights, engine.settings)
    start_seconds = round(time.monotonic() - started, 1)
    print(f"== started in {start_seconds} s", flush=True)
    schedules: list[dict[str, Any]] = []
    record = header(arguments.engine, started, hooks=engine.hooks) | {
        "engine": arguments.engine,
        "rank": rank,
        "settings": COMMON | engine.settings,
        "start_seconds": start_seconds,
        "schedules": schedules,
    }
    watch = Watch(llm, digests_of_rows if engine.hooks in ("ours", "none") else _hashes_of_rows)
    reloads = None
    if arguments.engine.startswith("reload"):
        reloads = _Reloads(watch, arguments.weights, first.weights)
        record["reload"] = reloads.record
    for schedule in engine.schedules:
        if reloads is not None:
            reloads.to(schedule.weights)
        drawn: dict[str, list[int]] = {}
        if schedule.recompute:
            source = schedules if schedule.recompute == "own" else _wait_for(arguments.drawn)["schedules"]
            drawn = {name: row["tokens"] for name, row in source[0]["requests"].items()}
        schedules.append(
            serve(llm, watch, schedule, prompts, drawn, index_topk=config["index_topk"], rank=rank, ranks=engine.ranks)
        )
        if arguments.engine == FIRST and schedule is first:
            write_json(arguments.drawn, {"schedules": schedules})
        print(f"== {schedule.name}: {schedules[-1]['seconds']} s, {schedules[-1]['did']}", flush=True)
        record["seconds"] = round(time.monotonic() - started, 1)
        write_json(arguments.output.with_suffix(".partial"), record)  # to look at, should a later schedule hang
    arguments.output.with_suffix(".partial").replace(arguments.output)
    # Nothing is left to be done, and a process that tears down CUDA beside others takes its time.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
