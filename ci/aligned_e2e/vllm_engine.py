"""One vLLM engine in one process: serves schedules of the same requests and writes what it drew, bit by bit.

``python -m aligned_e2e.vllm_engine ENGINE --checkpoint DIR --output FILE``, with ENGINE one of :data:`ENGINES` and the
environment that ci/README.md lists. The engine core must run in this process, because its runner is watched:
``VLLM_ENABLE_V1_MULTIPROCESSING=0``. vLLM is imported only when an engine is started, so that the tables and the
requests are there without it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ENGINES", "Engine", "PromptSpec", "Schedule", "main", "make_prompts"]

MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the requests reach an engine.

    Attributes:
        name: For the report.
        order_seed: Shuffles them; None keeps their order.
        at_once: So many at a time; None all.
        recompute: The requests are the finished sequences of another engine, and their prompt logprobs are what counts:
            the actor.
    """

    name: str
    order_seed: int | None = None
    at_once: int | None = None
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """Settings of one engine, and the schedules that it serves one after the other.

    Attributes:
        settings: Arguments of ``vllm.LLM`` that differ from :data:`COMMON`.
        schedules: Served in this order.
        environment: Variables of its process beside the common ones.
    """

    settings: dict[str, Any]
    schedules: tuple[Schedule, ...]
    environment: dict[str, str] = field(default_factory=dict)


COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 64,
    "gpu_memory_utilization": 0.6,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "seed": 0,
}
ENGINES: dict[str, Engine] = {
    "graphs": Engine(
        {},
        (
            Schedule("together"),
            Schedule("together again, shuffled", order_seed=1),
            Schedule("five at a time", order_seed=2, at_once=5),
        ),
    ),
    "actor": Engine(
        {"enforce_eager": True, "max_num_batched_tokens": 2048}, (Schedule("actor: prompt logprobs", recompute=True),)
    ),
    "eager, small budget": Engine(
        {"enforce_eager": True, "max_num_batched_tokens": 160, "max_num_seqs": 32}, (Schedule("small budget, eager"),)
    ),
    "piecewise": Engine(
        {"compilation_config": {"cudagraph_mode": "PIECEWISE"}, "max_num_batched_tokens": 1024},
        (Schedule("piecewise graphs", order_seed=3),),
    ),
    "prefix cache": Engine(
        {"enable_prefix_caching": True},
        (Schedule("prefix cache, cold", order_seed=4), Schedule("prefix cache, warm", order_seed=5)),
    ),
    "preempted": Engine({"num_gpu_blocks_override": 420}, (Schedule("preempted", order_seed=6),)),
}


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


class _Watch:
    """What the runner and the scheduler of an engine in this process did, and digests of the logits it sampled from."""

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.counts: Counter[str] = Counter()
        self.digests: dict[str, dict[int, int]] = {}
        self._watch_sampling()
        self._watch_graphs()
        self._watch_preemption(core.scheduler)

    def _watch_sampling(self) -> None:
        from bi_kernels.testing.trace import row_digests

        runner, sample = self.runner, self.runner.sample_tokens

        def sample_tokens(grammar_output: Any) -> Any:
            state = runner.execute_model_state
            if state is not None and state.logits is not None:
                scheduled = state.scheduler_output.num_scheduled_tokens
                batch = runner.input_batch
                digests = row_digests(state.logits).tolist()
                for row, request in enumerate(batch.req_ids[: len(digests)]):
                    seen = int(batch.num_computed_tokens_cpu[row]) + scheduled[request]
                    if seen < len(runner.requests[request].prompt_token_ids):
                        self.counts["prefill_splits"] += 1
                        continue  # mid-prompt: nothing is drawn from this row
                    # vLLM appends a random part to the id it was given.
                    self.digests.setdefault(request.rpartition("-")[0], {})[seen] = digests[row]
                self.counts["steps"] += 1
                self.counts["largest_batch"] = max(self.counts["largest_batch"], len(scheduled))
            return sample(grammar_output)

        runner.sample_tokens = sample_tokens

    def _watch_graphs(self) -> None:
        dispatcher, dispatch = self.runner.cudagraph_dispatcher, self.runner.cudagraph_dispatcher.dispatch

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = dispatch(*args, **kwargs)
            self.counts[f"graph_{result[0].name.lower()}"] += 1
            return result

        dispatcher.dispatch = counted

    def _watch_preemption(self, scheduler: Any) -> None:
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts["preemptions"] += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def serve(
    llm: Any, watch: _Watch, schedule: Schedule, prompts: Sequence[PromptSpec], drawn: dict[str, list[int]]
) -> dict[str, Any]:
    """Run one schedule. ``drawn`` has the tokens of another engine, by request, for an actor to recompute."""
    from vllm import SamplingParams

    order = list(prompts)
    if schedule.order_seed is not None:
        random.Random(schedule.order_seed).shuffle(order)
    watch.counts.clear()
    watch.digests.clear()
    started = time.monotonic()
    rows: dict[str, Any] = {}
    step = schedule.at_once or len(order)
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
                digests = None
            else:
                tokens = list(output.outputs[0].token_ids)
                entries = output.outputs[0].logprobs
                seen = watch.digests[output.request_id]
                digests = [seen[len(prompt.tokens) + i] for i in range(len(tokens))]
            logprobs = [_bits(entry[token].logprob) for token, entry in zip(tokens, entries, strict=True)]
            rows[prompt.name] = {"tokens": tokens, "logprobs": logprobs, "digests": digests}
    return {
        "schedule": schedule.name,
        "seconds": round(time.monotonic() - started, 1),
        "did": dict(watch.counts),
        "requests": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Start one engine, serve its schedules, write the record."""
    parser = argparse.ArgumentParser(prog="aligned_e2e.vllm_engine", description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--drawn", type=pathlib.Path, help="record whose first schedule an actor recomputes")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=52)
    arguments = parser.parse_args(argv)
    engine = ENGINES[arguments.engine]
    config = json.loads((arguments.checkpoint / "config.json").read_text())
    prompts = make_prompts(config["vocab_size"], count=arguments.requests, max_tokens=arguments.max_tokens)
    drawn = {}
    if arguments.drawn is not None:
        first = json.loads(arguments.drawn.read_text())["schedules"][0]
        drawn = {name: row["tokens"] for name, row in first["requests"].items()}

    from vllm import LLM

    import bi_kernels as bk

    started = time.monotonic()
    llm = LLM(model=str(arguments.checkpoint), **(COMMON | engine.settings))
    start_seconds = round(time.monotonic() - started, 1)
    watch = _Watch(llm)
    record = {
        "engine": arguments.engine,
        "settings": COMMON | engine.settings,
        "start_seconds": start_seconds,
        "attestation": json.loads(bk.attest().to_json()),
        "schedules": [serve(llm, watch, schedule, prompts, drawn) for schedule in engine.schedules],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
