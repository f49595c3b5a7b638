"""Actor (b): vLLM's modules called the way a training framework calls them, without vLLM's engine or scheduler.

``python -m aligned_e2e.vllm_trainer --checkpoint DIR --drawn RECORD --output FILE``. The model is built in this process
on the rollout's checkpoint, with the same plug-ins. Whole sequences, prompt and drawn tokens, are packed side by side
and go through one forward call each time, under a forward context whose metadata vLLM's own builders make; then the
head, and vLLM's batch-invariant log-softmax. What is written has the form of an engine's record
(:mod:`aligned_e2e.vllm_engine`): bits of the logprob and a digest of the logits of the whole vocabulary for every drawn
token. vLLM is imported only when a model is built.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bi_kernels.testing.trace import Trace, row_digests

from .h200 import ENVIRONMENT
from .vllm_engine import COMMON, header, make_prompts
from .vllm_probe import ModelProbe

__all__ = [
    "SETTINGS",
    "PackedModel",
    "Recomputed",
    "Sample",
    "main",
    "pack",
    "read_drawn",
    "read_samples",
    "recompute",
]

SETTINGS: dict[str, Any] = COMMON | {
    "enforce_eager": True,
    "max_num_batched_tokens": 8192,  # of one forward call; the longest sequence has 7,952
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 4 << 30,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What a trainer gets of one request: its prompt and what the rollout drew after it."""

    name: str
    prompt: tuple[int, ...]
    drawn: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole sample."""
        return self.prompt + self.drawn


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputed:
    """For each drawn token of one sequence: bits of its logprob, digest of the logits it was drawn from."""

    logprobs: list[int]
    digests: list[int]


def pack(
    samples: Sequence[Sample], *, max_tokens: int, max_sequences: int, block_sizes: Sequence[int], blocks: int
) -> Iterator[list[Sample]]:
    """Cut sequences, in their order, into forward calls.

    Args:
        samples: All of them.
        max_tokens: Rows of one call.
        max_sequences: Sequences of one call.
        block_sizes: Tokens in a block, by cache group; a sequence keeps all of its blocks in each group.
        blocks: Blocks that the groups share.

    Raises:
        ValueError: A sequence fits into no call.
    """
    batch: list[Sample] = []
    tokens = used = 0
    for sample in samples:
        length = len(sample.tokens)
        needs = sum(-(-length // size) for size in block_sizes)
        if length > max_tokens or needs > blocks:
            raise ValueError(
                f"{sample.name}: expected at most {max_tokens} tokens and {blocks} blocks, got {length} and {needs}. "
                "Raise max_num_batched_tokens or kv_cache_memory_bytes."
            )
        if batch and (tokens + length > max_tokens or used + needs > blocks or len(batch) == max_sequences):
            yield batch
            batch, tokens, used = [], 0, 0
        batch.append(sample)
        tokens, used = tokens + length, used + needs
    if batch:
        yield batch


class PackedModel:
    """The model and its caches, and one forward call over packed sequences.

    Args:
        checkpoint: Directory of the checkpoint.
        settings: Arguments of vLLM's ``EngineArgs``.
    """

    def __init__(self, checkpoint: pathlib.Path, settings: Mapping[str, Any] = SETTINGS) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.plugins import load_general_plugins
        from vllm.utils.network_utils import get_distributed_init_method, get_open_port
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.worker.gpu_worker import Worker

        load_general_plugins()
        self.config = EngineArgs(model=str(checkpoint), **settings).create_engine_config()
        with set_current_vllm_config(self.config):
            worker = Worker(
                vllm_config=self.config,
                local_rank=0,
                rank=0,
                distributed_init_method=get_distributed_init_method("127.0.0.1", get_open_port()),
                is_driver_worker=True,
            )
            worker.init_device()  # a world of one rank, and vLLM's batch-invariant mode before the first cuBLAS handle
        worker.load_model()
        current_platform.update_block_size_for_backend(self.config)
        register_all_kvcache_specs(self.config)
        memory = worker.determine_available_memory()  # its dummy run reserves the attention workspace
        (cache,) = get_kv_cache_configs(self.config, [worker.get_kv_cache_spec()], [memory])
        # As vLLM's core leaves it for the metadata builders: the smallest block of any group.
        self.config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in cache.kv_cache_groups)
        with set_current_vllm_config(self.config):
            worker.initialize_from_config(cache)
        self.runner = worker.model_runner
        self.model = self.runner.get_model()
        self.probe = ModelProbe(self.model)
        self._groups = self.runner.kv_cache_config.kv_cache_groups
        self._blocks = self.runner.kv_cache_config.num_blocks - 1  # block 0 is nobody's
        self._calls = 0

    def batches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Sequences by forward call."""
        return pack(
            samples,
            max_tokens=self.config.scheduler_config.max_num_batched_tokens,
            max_sequences=self.config.scheduler_config.max_num_seqs,
            block_sizes=[group.kv_cache_spec.block_size for group in self._groups],
            blocks=self._blocks,
        )

    @torch.inference_mode()
    def recompute(self, batch: Sequence[Sample]) -> list[Recomputed]:
        """One forward call over whole sequences, and what it says about their drawn tokens."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.sample.sampler import Sampler

        device = self.runner.device
        lengths = [len(sample.tokens) for sample in batch]
        bounds = [0, *itertools.accumulate(lengths)]
        input_ids = torch.tensor([t for s in batch for t in s.tokens], dtype=torch.int32, device=device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        metadata, slots = self._metadata(lengths, bounds, positions)
        self.probe.begin([sample.name for sample in batch], bounds, positions)
        with set_forward_context(metadata, self.config, num_tokens=bounds[-1], slot_mapping=slots):
            hidden = self.model(input_ids=input_ids, positions=positions)
        self.probe.end(hidden)

        # Row p - 1 of a prompt of p tokens predicts the first drawn token.
        rows = torch.cat(
            [
                torch.arange(len(sample.drawn)) + start + len(sample.prompt) - 1
                for start, sample in zip(bounds, batch, strict=False)
            ]
        )
        # A call of the model's own method is not traced: these rows are a copy, whose places only we know.
        logits = type(self.model).compute_logits(self.model, hidden[rows.to(device)])
        self.probe.keep_logits(logits, rows)
        drawn = torch.tensor([token for sample in batch for token in sample.drawn], device=device)
        logprobs = Sampler.compute_logprobs(logits).gather(1, drawn[:, None]).squeeze(1)
        counts = [len(sample.drawn) for sample in batch]
        bits = logprobs.view(torch.int32).cpu().split(counts)
        digests = row_digests(logits).cpu().split(counts)
        return [Recomputed(*(part.tolist() for part in parts)) for parts in zip(bits, digests, strict=True)]

    def _metadata(
        self, lengths: Sequence[int], bounds: Sequence[int], positions: torch.Tensor
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Attention metadata and slots by layer, of sequences that are nowhere in the caches yet."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        device, count = positions.device, len(lengths)
        starts = torch.tensor(bounds, dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        starts_on_device = starts.to(device)
        tables = self.runner.input_batch.block_table
        for row, blocks in enumerate(self._choose_blocks(lengths)):
            tables.add_row(blocks, row)
        tables.commit_block_table(count)
        tables.compute_slot_mapping(count, starts_on_device, positions)
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        for index, (group, attention_groups) in enumerate(zip(self._groups, self.runner.attn_groups, strict=True)):
            table = tables[index]
            common = CommonAttentionMetadata(
                query_start_loc=starts_on_device,
                query_start_loc_cpu=starts,
                seq_lens=seq_lens.to(device),
                _seq_lens_cpu=seq_lens,
                _num_computed_tokens_cpu=torch.zeros(count, dtype=torch.int32),
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=count,
                num_actual_tokens=bounds[-1],
                max_query_len=max(lengths),
                max_seq_len=max(lengths),
                block_table_tensor=table.get_device_tensor(count),
                slot_mapping=table.slot_mapping.gpu[: bounds[-1]],
                causal=True,
                is_prefilling=torch.ones(count, dtype=torch.bool),
                positions=positions,
            )
            slots |= dict.fromkeys(group.layer_names, common.slot_mapping)
            for attention_group in attention_groups:
                builder = attention_group.get_metadata_builder()
                built = builder.build(common_prefix_len=0, common_attn_metadata=common)
                metadata |= dict.fromkeys(attention_group.layer_names, built)
        return metadata, slots

    def _choose_blocks(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], ...]]:
        """Blocks of each sequence in each group, anywhere in the cache: other ones in every call."""
        sizes = [group.kv_cache_spec.block_size for group in self._groups]
        needs = [[-(-length // size) for size in sizes] for length in lengths]
        self._calls += 1
        free = iter(random.Random(self._calls).sample(range(1, self._blocks + 1), sum(map(sum, needs))))
        for counts in needs:
            yield tuple(list(itertools.islice(free, count)) for count in counts)


def recompute(
    model: PackedModel, samples: Sequence[Sample], traced: Sequence[str] = ()
) -> tuple[dict[str, Any], Trace]:
    """All sequences, shuffled and packed: a schedule as an engine records it, and the trace of some of them."""
    order = list(samples)
    random.Random(11).shuffle(order)
    started = time.monotonic()
    rows: dict[str, Any] = {}
    sizes: list[tuple[int, int]] = []
    with model.probe.attached() if traced else contextlib.nullcontext():
        _forward(model, [sample for sample in order if sample.name in traced], rows, sizes)
    trace = model.probe.finish()
    _forward(model, [sample for sample in order if sample.name not in traced], rows, sizes)
    model.probe.finish({})
    return {
        "schedule": "actor b: packed sequences, no engine",
        "seconds": round(time.monotonic() - started, 1),
        "did": {
            "forward_calls": len(sizes),
            "largest_call": max(tokens for tokens, _ in sizes),
            "most_sequences": max(count for _, count in sizes),
            "rows": sum(tokens for tokens, _ in sizes),
        },
        "requests": {sample.name: rows[sample.name] for sample in samples},
    }, trace


def _forward(model: PackedModel, samples: Sequence[Sample], rows: dict[str, Any], sizes: list[tuple[int, int]]) -> None:
    for batch in model.batches(samples):
        sizes.append((sum(len(sample.tokens) for sample in batch), len(batch)))
        for sample, result in zip(batch, model.recompute(batch), strict=True):
            rows[sample.name] = {"tokens": list(sample.drawn)} | dataclasses.asdict(result)


def main(argv: Sequence[str] | None = None) -> int:
    """Recompute what an engine drew, write the record."""
    parser = argparse.ArgumentParser(prog="aligned_e2e.vllm_trainer", description=__doc__)
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument(
        "--drawn",
        type=pathlib.Path,
        required=True,
        help="an engine's record, whose first schedule is recomputed, or tokens by request; waited for",
    )
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--trace", type=pathlib.Path, help="write the trace of some requests here, for bi-bisect")
    parser.add_argument("--traced", nargs="*", metavar="NAME", help="which; default: the first four")
    arguments = parser.parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    started = time.monotonic()
    model = PackedModel(arguments.checkpoint)
    start_seconds = round(time.monotonic() - started, 1)
    config = json.loads((arguments.checkpoint / "config.json").read_text(encoding="utf-8"))
    samples = read_samples(config["vocab_size"], read_drawn(arguments.drawn))
    traced: Sequence[str] = ()
    if arguments.trace is not None:
        traced = arguments.traced or [sample.name for sample in samples[:4]]
    schedule, trace = recompute(model, samples, traced)
    record = header("trainer", started) | {
        "engine": "trainer",
        "settings": SETTINGS,
        "start_seconds": start_seconds,
        "schedules": [schedule],
    }
    for path in (arguments.output, arguments.trace):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if arguments.trace is not None:
        trace.save(arguments.trace)
    arguments.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return 0


def read_drawn(path: pathlib.Path, *, seconds: float = 300.0) -> dict[str, list[int]]:
    """Drawn tokens by request, from an engine's record or a file of nothing else, which an engine may yet write.

    Raises:
        TimeoutError: Nobody wrote it.
    """
    started = time.monotonic()
    while not path.is_file():
        if time.monotonic() - started > seconds:
            raise TimeoutError(f"{path}: expected an engine's record within {seconds:.0f} s. Run the engine first.")
        time.sleep(0.5)
    record = json.loads(path.read_text(encoding="utf-8"))
    if "schedules" in record:
        return {name: row["tokens"] for name, row in record["schedules"][0]["requests"].items()}
    return {name: list(tokens) for name, tokens in record.items()}


def read_samples(vocab_size: int, drawn: Mapping[str, Sequence[int]]) -> list[Sample]:
    """Prompts of a rollout, which are made anew, with what it drew after them."""
    prompts = make_prompts(vocab_size, count=len(drawn), max_tokens=max(map(len, drawn.values())))
    return [Sample(prompt.name, prompt.tokens, tuple(drawn[prompt.name])) for prompt in prompts]


if __name__ == "__main__":
    raise SystemExit(main())
