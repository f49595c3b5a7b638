"""One process, one vLLM engine, one rank of an expert-parallel group; what it drew goes to a JSON record.

    python vllm_expert_parallel.py --checkpoint DIR --output FILE

Alone it is the engine that the others are compared with. With vLLM's ``VLLM_DP_SIZE``, ``VLLM_DP_RANK`` and
``VLLM_DP_MASTER_IP``/``_PORT`` it is one of several: over NCCL with ``BI_EP_TRANSPORT=nccl``, else over DeepEP. First
the ranks share the requests, then rank 0 has all of them and the others none. The engine core runs in this process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``). DIR comes from ``ci/aligned_e2e/vllm_checkpoint.py``; all four packages are
installed, since batches differ between the ranks. Where DeepEP is installed vLLM imports it, in another process too, so
NVSHMEM's folder is on ``LD_LIBRARY_PATH``. Stacks are dumped every minute, and the record is written after every round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("bi-kernels", "bi-sparse-attn", "bi-moe-deepep", "bi-reload")
LENGTHS = (1000, 1, 700, 5, 257, 17, 129, 64, 400, 33)  # up to four slices of 256 tokens in a step
NEW_TOKENS = 16
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.06,  # nothing is measured where the cache's size is given, so engines can share a GPU
    "kv_cache_memory_bytes": 2 << 30,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "seed": 0,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
}


def parallel_settings(transport: str) -> dict[str, Any]:
    """Settings of an engine that is one of several."""
    backend = "allgather_reducescatter" if transport == "nccl" else "deepep_low_latency"
    return {"enable_expert_parallel": True, "all2all_backend": backend, "distributed_executor_backend": "uni"}


def requests_of(rank: int, ranks: int, vocab: int, *, idle: bool) -> dict[str, list[int]]:
    """Token ids of this rank's requests by name: dealt out, or all of them on rank 0."""
    prompts = {str(n): random.Random(n).choices(range(2, vocab), k=n) for n in LENGTHS}
    if idle:
        return prompts if rank == 0 else {}
    return dict(list(prompts.items())[rank::ranks])


def bits(positions: Sequence[Any]) -> list[list[list[int]]]:
    """Token id and logprob bits of every entry of every position."""
    return [
        sorted([token, struct.unpack("<i", struct.pack("<f", entry.logprob))[0]] for token, entry in position.items())
        for position in positions
    ]


class ExpertLayers:
    """Digests of what every expert layer was given and gave, row by row, in steps that are no graph's."""

    def __init__(self, model: Any) -> None:
        self.rows: dict[str, list[Any]] = {}
        self.staging: dict[str, Any] = {}
        for name, module in model.named_modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                self.rows[name] = []
                self.staging[name] = getattr(kernel.prepare_finalize, "staging", None)
                kernel.impl.apply = self._watched(kernel.impl.apply, self.rows[name])

    @staticmethod
    def _watched(apply: Callable[..., Any], rows: list[Any]) -> Callable[..., Any]:
        import torch

        from bi_kernels.testing.trace import row_digests

        def watched(**given: Any) -> Any:
            key = 0
            for factor, name in ((1, "hidden_states"), (3, "topk_ids"), (5, "topk_weights")):
                key = key + factor * row_digests(given[name])
            out = apply(**given)
            rows.append(torch.stack([key, row_digests(out)], 1))
            return out

        return watched

    def take(self) -> dict[str, list[list[int]]]:
        """Pairs of input and output digests by layer, each once, since the last call."""
        taken = {}
        for name, rows in self.rows.items():
            taken[name] = sorted({tuple(pair) for part in rows for pair in part.tolist()})
            rows.clear()
        return taken

    def described(self) -> dict[str, Any]:
        """How the layers were staged."""
        found = [staging for staging in self.staging.values() if staging is not None]
        return {
            "layers": len(self.rows),
            "transports": sorted({type(staging.transport).__name__ for staging in found}),
            "slices": sorted({slices for staging in found for slices in staging._dispatchers}),
            "tokens_per_slice": sorted({staging.capacity.tokens_per_rank for staging in found}),
        }


def serve(llm: Any, layers: ExpertLayers, prompts: dict[str, list[int]]) -> dict[str, Any]:
    """Serve these requests together, or none of them while others serve theirs."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, prompt_logprobs=1, detokenize=False
    )
    layers.take()
    started = time.monotonic()
    inputs = [{"prompt_token_ids": tokens} for tokens in prompts.values()]
    outputs = llm.generate(inputs, parameters, use_tqdm=False) if inputs else []
    while not inputs and llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return {
        "seconds": round(time.monotonic() - started, 1),
        "requests": {
            name: {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": bits(output.outputs[0].logprobs),
                "prompt_logprobs": bits((output.prompt_logprobs or [])[1:]),
            }
            for name, output in zip(prompts, outputs, strict=True)
        },
        "rows": layers.take(),
    }


def main() -> int:
    """Start the engine, serve the rounds, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    started = time.monotonic()
    rank, ranks = int(os.environ.get("VLLM_DP_RANK", "0")), int(os.environ.get("VLLM_DP_SIZE", "1"))

    from vllm import LLM
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # before anything else of vLLM is imported, as LLM does
    from vllm.v1.worker import gpu_worker

    gpu_worker.kernel_warmup = lambda worker: None  # compiles for minutes what no request here calls
    settings = SETTINGS | (parallel_settings(os.environ.get("BI_EP_TRANSPORT", "")) if ranks > 1 else {})
    llm = LLM(model=str(arguments.checkpoint), **settings)
    record: dict[str, Any] = {
        "rank": rank,
        "ranks": ranks,
        "start_seconds": round(time.monotonic() - started, 1),
        "rounds": {},
    }
    print(f"== started in {record['start_seconds']} s", flush=True)

    import bi_kernels as bk

    record["attestation"] = json.loads(bk.attest(required=PACKAGES).to_json())
    layers = ExpertLayers(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model())
    vocab = json.loads((arguments.checkpoint / "config.json").read_text())["vocab_size"]
    for name, idle in {"shared": False, "one idle": True}.items() if ranks > 1 else {"alone": False}.items():
        served = serve(llm, layers, requests_of(rank, ranks, vocab, idle=idle))
        record["rounds"][name] = served
        record["staged"] = layers.described()
        print(f"== {name}: {served['seconds']} s, {record['staged']}", flush=True)
        arguments.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # DeepEP's and NCCL's destructors wait for ranks that may be gone


if __name__ == "__main__":
    raise SystemExit(main())
