"""One process, one vLLM engine, one role in the proof of the reload; what it saw goes to a JSON record.

    python reload_engine.py ROLE --a DIR --b DIR --output FILE

``warm`` starts on checkpoint A with captured graphs and goes A, B, A, B by every way that weights can come, then
through a failed update; ``cold`` starts on B; ``stock`` does the first reload without the hooks; ``padded`` goes A, B,
A from disk, on checkpoints with fewer heads than the attention kernels know, so that vLLM pads them. A and B come from
``ci/aligned_e2e/vllm_checkpoint.py``. The engine core runs in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``); the
record is written after every step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LENGTHS = (1, 5, 17, 33, 64, 129, 257, 400)  # contexts stay below 512 entries, where no top-k selects
NEW_TOKENS = 16
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 2 << 30,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "seed": 0,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
}


class Engine:
    """An engine and its record."""

    def __init__(self, directory: Path, record: dict[str, Any], output: Path) -> None:
        from vllm import LLM

        self.record, self.output = record, output
        started = time.monotonic()
        self.llm = LLM(model=str(directory), **SETTINGS)
        self.record["start_seconds"] = round(time.monotonic() - started, 1)
        core = self.llm.llm_engine.engine_core.engine_core
        self.worker = core.model_executor.driver_worker.worker
        self.model = self.worker.get_model()
        self.vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
        self.logits: list[int] = []
        self._watch_logits()

    def _watch_logits(self) -> None:
        """Digest every row of logits, whole, as it leaves the model."""
        import torch

        compute, rows = self.model.compute_logits, self.logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            bits = logits.float().contiguous().view(torch.int32).long() + 1
            keys = (torch.arange(bits.shape[1], device=bits.device) + 1) * -7046029254386353131
            rows.extend((bits * ((keys ^ (keys >> 29)) | 1)).sum(1).tolist())
            return logits

        self.model.compute_logits = compute_logits

    def generate(self) -> dict[str, Any]:
        """Serve the same requests in the same batches: tokens, bits of logprobs, digests of logits."""
        from vllm import SamplingParams

        prompts = [
            {"prompt_token_ids": random.Random(length).choices(range(2, self.vocab), k=length)} for length in LENGTHS
        ]
        parameters = SamplingParams(
            temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=1, detokenize=False
        )
        self.logits.clear()
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "logprobs": [_bits(output.outputs[0].logprobs) for output in outputs],
            "prompt_logprobs": [_bits((output.prompt_logprobs or [])[1:]) for output in outputs],
            "logits": list(self.logits),
        }

    def step(self, name: str, run: Callable[[], Any]) -> None:
        """Run one step, record its result or its error, go on."""
        started = time.monotonic()
        try:
            self.record[name] = run()
        except Exception as error:
            self.record[name] = {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc()[-3000:],
            }
            print(f"{name}: {traceback.format_exc()}", flush=True)
        print(f"== {name}: {time.monotonic() - started:.1f} s", flush=True)
        self.output.write_text(json.dumps(self.record) + "\n", encoding="utf-8")


class BucketEngine:
    """A transfer engine inside this process: buckets are handed over as they are, by vLLM's own layerwise functions."""

    def __init__(self, worker: Any) -> None:
        self.model, self.model_config = worker.get_model(), worker.model_config

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, bucket: Any) -> None:
        self.model.load_weights(bucket)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def reset_weight_update_target(self) -> None:
        """There is only one model."""

    def shutdown(self) -> None:
        """Nothing is open."""


def _bits(positions: Any) -> list[list[list[int]]]:
    """Token id and logprob bits of every entry of every position."""
    return [
        sorted([token, struct.unpack("<i", struct.pack("<f", entry.logprob))[0]] for token, entry in position.items())
        for position in positions
    ]


def tensors_of(directory: Path, device: str) -> Iterator[tuple[str, Any]]:
    """A checkpoint's tensors, file by file."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt", device=device) as stored:
            for name in stored.keys():  # noqa: SIM118
                yield name, stored.get_tensor(name)


def differences(ledger: Any, model: Any) -> dict[str, Any]:
    """How many tensors the ledger knows, and each that is not where it was."""
    found = [str(difference) for difference in ledger.diff(model)]
    return {"tensors": len(ledger), "moved": found[:60], "count": len(found)}


def warm(engine: Engine, a: Path, b: Path) -> None:
    """A, B, A, B, by every way that weights can come; then a failure, and a whole update after it."""
    import torch

    from bi_reload import AddressLedger, vllm_reload, weight_fingerprint

    worker, model, record, step = engine.worker, engine.model, engine.record, engine.step
    captured = vllm_reload._served(model).captured
    ledger = captured if captured is not None else AddressLedger().record(model)
    total = sum(file.stat().st_size for file in b.glob("*.safetensors"))

    def timed(run: Callable[[], None]) -> dict[str, Any]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return {"seconds": round(seconds, 3), "gb_s": round(total / seconds / 1e9, 3)}

    def in_buckets(directory: Path, size: int = 100) -> None:
        worker.weight_transfer_engine = BucketEngine(worker)
        items = list(tensors_of(directory, "cuda"))[::-1]  # the mHC weights of layer 0 come late
        small = {name: tensor.cpu() for name, tensor in items if tensor.nbytes < 1 << 16}
        vllm_reload.announce_fingerprints(worker, weight_fingerprint(small))  # taken on the other side's device
        record["announced"] = len(small)
        worker.start_weight_update()
        for at in range(0, len(items), size):
            worker.update_weights(items[at : at + size])
        worker.finish_weight_update()

    def from_disk(directory: Path) -> None:
        worker.reload_weights(weights_path=str(directory))

    def report() -> Any:
        made = vllm_reload.reload_report(worker)
        return None if made is None else {"refreshed": list(made.refreshed), "checked": made.tensors_checked}

    step("addresses after capture", lambda: differences(ledger, model))
    step("A", engine.generate)
    step("A repeated", engine.generate)
    step("addresses after serving", lambda: differences(ledger, model))
    step("fingerprints of A", lambda: vllm_reload.live_fingerprints(worker))
    step("reload B from disk", lambda: timed(lambda: from_disk(b)))
    step("report", report)
    step("addresses after B", lambda: differences(ledger, model))
    step("fingerprints of B", lambda: vllm_reload.live_fingerprints(worker))
    step("B", engine.generate)
    step("B repeated", engine.generate)
    kernel_format = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step("reload A in buckets", lambda: timed(lambda: in_buckets(a)))
    step("addresses after A", lambda: differences(ledger, model))
    step("fingerprints of A again", lambda: vllm_reload.live_fingerprints(worker))
    step("A again", engine.generate)
    step(
        "reload B in kernel format",
        lambda: timed(
            lambda: worker.reload_weights(weights_iterator=iter(kernel_format.items()), is_checkpoint_format=False)
        ),
    )
    step("B in kernel format", engine.generate)
    step("reload B on B", lambda: timed(lambda: from_disk(b)))
    step("addresses at the end", lambda: differences(ledger, model))
    step("fingerprints of B again", lambda: vllm_reload.live_fingerprints(worker))

    def broken() -> Iterator[tuple[str, Any]]:
        items = list(tensors_of(a, "cuda"))
        yield from items[: len(items) // 2]
        raise ConnectionError("the trainer is gone")

    step("failed reload", lambda: worker.reload_weights(weights_iterator=broken()))
    step("serving after it", engine.generate)

    def abort() -> int:
        ids = list(engine.llm.llm_engine.output_processor.request_states)
        engine.llm.llm_engine.abort_request(ids, internal=True)
        return len(ids)

    step("aborted", abort)
    step("addresses after the failure", lambda: differences(ledger, model))
    step("whole reload after it", lambda: timed(lambda: from_disk(b)))
    step("B after the failure", engine.generate)
    record["sinks"] = sinks(model)


def padded(engine: Engine, a: Path, b: Path) -> None:
    """A, B, A from disk, and what lies in the padding of every sink after each."""
    from bi_reload import vllm_reload

    captured = vllm_reload._served(engine.model).captured

    def sinks_of(directory: Path) -> dict[str, list[int]]:
        import torch

        stored = {f"model.{n}": t for n, t in tensors_of(directory, "cpu") if n.endswith("attn_sink")}
        return {name: tensor.view(torch.int32).tolist() for name, tensor in stored.items()}

    engine.record["captured"] = captured is not None
    for name, directory in (("A", a), ("B", b), ("A again", a)):
        if name != "A":
            engine.step(f"reload {name}", lambda where=directory: engine.worker.reload_weights(weights_path=str(where)))
            engine.step(f"addresses after {name}", lambda: differences(captured, engine.model))
        engine.step(f"sinks of {name}", lambda: sinks(engine.model))
        engine.record[f"stored sinks of {name}"] = sinks_of(directory)
        engine.step(name, engine.generate)


def cold(engine: Engine, a: Path, b: Path) -> None:
    """An engine that never knew other weights."""
    from bi_reload import vllm_reload

    engine.step("B", engine.generate)
    engine.step("B repeated", engine.generate)
    engine.step("fingerprints of B", lambda: vllm_reload.live_fingerprints(engine.worker))
    engine.record["sinks"] = sinks(engine.model)


def stock(engine: Engine, a: Path, b: Path) -> None:
    """vLLM without the hooks: what the reload does to addresses and sinks."""
    from bi_reload import AddressLedger

    ledger = AddressLedger().record(engine.model)
    engine.step("A", engine.generate)
    engine.step("A repeated", engine.generate)
    engine.record["sinks before"] = sinks(engine.model)
    engine.step("reload B from disk", lambda: engine.worker.reload_weights(weights_path=str(b)))
    engine.step("addresses after B", lambda: differences(ledger, engine.model))
    engine.record["sinks"] = sinks(engine.model)
    engine.step("B", engine.generate)


def sinks(model: Any) -> dict[str, list[int]]:
    """Bits of every attention sink, padding included."""
    import torch

    return {n: p.detach().view(torch.int32).tolist() for n, p in model.named_parameters() if n.endswith("attn_sink")}


ROLES = {"warm": warm, "cold": cold, "stock": stock, "padded": padded}


def main() -> int:
    """Play one role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--a", type=Path)
    parser.add_argument("--b", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if arguments.role == "stock":
        os.environ["VLLM_PLUGINS"] = "none"
    record: dict[str, Any] = {"role": arguments.role}
    engine = Engine(arguments.b if arguments.role == "cold" else arguments.a, record, arguments.output)
    ROLES[arguments.role](engine, arguments.a, arguments.b)
    arguments.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
