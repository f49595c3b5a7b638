"""One vLLM engine that measures when it is told to; a process that :mod:`aligned_e2e.vllm_cost` starts.

Several live on one GPU at once and only one works at a time, so that all see the same clocks and temperature. The
engine core runs in this process, because its runner is timed. vLLM is imported only where it is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import importlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .kernel_times import Profile, host_times, kernels, label, op_times, relabel
from .shared_layers import Sharing, check_memory, check_shared, weight_bytes
from .vllm_engine import header

__all__ = ["SETTINGS", "CostEngine", "activate_untested", "compile_mhc", "compile_product", "main", "serve"]

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "max_model_len": 16384,
    # Room for 8,192 tokens of prompts beside 128 requests that decode.
    "max_num_batched_tokens": 8192 + 128,
    "max_num_seqs": 128,
    # Three engines share the GPU, and each is told the size of its cache.
    "gpu_memory_utilization": 0.2,
    # A block of 43 layers takes 1.04 MB. 128 requests of 2,100 to 3,200 tokens hold 13 + 6 + 3 + 17 each (compressed
    # keys, windows, states of C4 and of C128), 5 GB, and 8,192 tokens of prompts another 3,360, 3.5 GB.
    "kv_cache_memory_bytes": 10 << 30,
    "enable_prefix_caching": False,
    "seed": 0,
    "compilation_config": {"cudagraph_capture_sizes": [1, 8, 32, 128]},
}
"""Arguments of ``vllm.LLM``, the same for every engine. Scheduling is as vLLM has it by default, asynchronous."""

TOKENS_OF_A_STEP = (1, 8, 32, 128, 1024, 2048, 2080, 8192)
"""Numbers of tokens in a step of the workloads. Others would cost stock vLLM some ten seconds of compiling each."""

_LONG = 4000  # tokens that a decoding request may draw, more than any run does
_VOCABULARY_START = 2


def activate_untested() -> None:
    """Turn the hooks of all four packages on in this process, without contracts and self-tests.

    This process measures time, and those would compile for minutes. Processes that vLLM starts for a look at the model
    class load no plug-ins.

    Raises:
        RuntimeError: A package's hooks did not become active.
    """
    from bi_kernels.runtime import hooks
    from bi_kernels.runtime.packages import PACKAGES

    for import_name in PACKAGES.values():
        module: Any = importlib.import_module(f"{import_name}.vllm_hook")
        module.PLAN = dataclasses.replace(module.PLAN, contracts=(), self_tests=())
    proof: Any = importlib.import_module("bi_moe_deepep.deep_gemm_proof")
    proof.prove_deep_gemm = lambda *args, **kwargs: ()  # before the experts' hook takes the name from there
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    inactive = sorted(set(PACKAGES) - set(hooks.active_records()))
    if inactive:
        raise RuntimeError(f"hooks: expected all four packages active, got none of {', '.join(inactive)}")
    os.environ["VLLM_PLUGINS"] = "none"


class CostEngine:
    """An engine, the requests that it is decoding, and measurements of its steps.

    Args:
        checkpoint: Of the model.
        settings: What differs from :data:`SETTINGS`.
        aligned: Whether :func:`activate_untested` was called.
    """

    def __init__(self, checkpoint: str, settings: dict[str, Any], *, aligned: bool) -> None:
        from vllm import LLM
        from vllm.v1.worker import gpu_worker

        # It compiles for hundreds of shapes; those of the workloads run before they are timed.
        gpu_worker.kernel_warmup = lambda worker: None
        self.started = started = time.monotonic()
        self.sharing = Sharing.of(checkpoint)
        with contextlib.ExitStack() as shared:
            if self.sharing is not None:
                module = importlib.import_module("vllm.models.deepseek_v4.nvidia.model")
                shared.enter_context(self.sharing.installed(module))
            self.llm = LLM(model=checkpoint, **(SETTINGS | settings))
        self.start_seconds = round(time.monotonic() - started, 1)
        self.aligned = aligned
        self.engine = self.llm.llm_engine
        self.runner = self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.model = self.runner.get_model()
        self.vocabulary = int(self.model.config.vocab_size)
        self.running: list[str] = []
        self.modes: Counter[str] = Counter()
        self._eager = False
        self._layer: int | None = None
        self._forwards: list[tuple[Any, Any]] = []
        self._random = random.Random(0)
        self._number = 0
        self._watch()

    def describe(self) -> dict[str, Any]:
        """What was started: versions, expert kernels, layer types, memory; and, with the hooks, the attestation.

        Raises:
            SharingError: Layers do not share their weights as the checkpoint asks for.
        """
        import torch

        allocated, weights = torch.cuda.memory_allocated(), weight_bytes(self.model)
        if self.sharing is not None:
            check_shared(self._layers(), self.sharing)
            check_memory(allocated, weights, SETTINGS["kv_cache_memory_bytes"])
        free, total = torch.cuda.mem_get_info()
        method = self._layers()[0].ffn.experts.routed_experts.quant_method
        found = {
            "start_seconds": self.start_seconds,
            "vocabulary": self.vocabulary,
            "layers": len(self._layers()),
            "shared": self.sharing is not None,
            "ratios": [0 if layer.attn.compress_ratio == 1 else layer.attn.compress_ratio for layer in self._layers()],
            "experts": f"{getattr(method, 'fp8_backend', None)}, {getattr(method, 'experts_cls', None)}",
            "attention": type(self._layers()[0].attn).__name__,
            "async_scheduling": self.engine.vllm_config.scheduler_config.async_scheduling,
            "gpu_gib": round((total - free) / 2**30, 1),
            "allocated_gib": round(allocated / 2**30, 1),
            "weights_gib": round(weights / 2**30, 1),
        }
        if self.aligned:
            os.environ.pop("VLLM_PLUGINS", None)  # it was for vLLM's own processes, and is part of the attestation
            found["header"] = header("cost", self.started, hooks="inert")  # contracts and self-tests were left out
        return found

    def copy_gb_s(self) -> float:
        """Bandwidth of a device-to-device copy, bytes read and written."""
        import torch

        timing: Any = importlib.import_module("timing")  # packages/bi-kernels/benchmarks
        timer = timing.copy_timer()
        us = statistics.median(timer() for _ in range(5))
        del timer
        torch.cuda.empty_cache()
        return float(round(2 * timing.COPY_BYTES / us / 1e3, 1))

    def fill(self, count: int, length: int) -> int:
        """Have ``count`` requests decoding, by prompts of ``length`` tokens, as many a step as give 8,192 tokens."""
        waiting: set[str] = set()
        while len(self.running) < count:
            group = min(max(1, 8192 // length), count - len(self.running))
            names = [self._add(self._tokens(length), _LONG) for _ in range(group)]
            self.running += names
            waiting |= set(names)
            self._step(waiting, finished=False)
        self._step_until(waiting, finished=False)
        return len(self.running)

    def keep(self, count: int) -> int:
        """Abort all but the first ``count`` requests."""
        self.engine.abort_request(self.running[count:])
        del self.running[count:]
        self.engine.step()
        return len(self.running)

    def measure(self, kind: str, batch: int, length: int, steps: int, warm: int = 0) -> dict[str, Any]:
        """Run ``steps`` steps and time them.

        The clock runs from a GPU that has done everything to the next such moment. With asynchronous scheduling the
        outputs of a step are handled during the next, so that as many are handled as steps were launched.

        Args:
            kind: ``decode``: a token for each of the ``batch`` running requests. ``prefill``: ``batch`` new prompts in
                one step. ``mixed``: a token for each running request and one new prompt.
            batch: See ``kind``.
            length: Tokens of a new prompt.
            steps: Number of steps.
            warm: Steps before them that are not timed: this engine has slept while others had the GPU.

        Returns:
            ``tokens``, ``seconds`` (of the whole steps, new requests included), ``forward_us`` (GPU time of the model's
            forward alone, per step), ``forwards`` (per step; 1 unless prompts were cut) and ``modes`` (steps by graph
            mode).
        """
        import torch

        if kind != "prefill" and len(self.running) != batch:
            raise RuntimeError(f"{kind}: expected {batch} running requests, got {len(self.running)}")
        new = {"decode": 0, "prefill": batch, "mixed": 1}[kind]
        prompts = [[self._tokens(length) for _ in range(new)] for _ in range(warm + steps)]
        waiting: set[str] = set()
        gc.collect()
        gc.disable()
        try:
            for number, group in enumerate(prompts):
                if number == warm:
                    torch.cuda.synchronize()
                    self._forwards.clear()
                    self.modes.clear()
                    started = time.perf_counter()
                waiting |= {self._add(tokens, 1) for tokens in group}
                self._step(waiting, finished=True)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        finally:
            gc.enable()
        us = [1e3 * start.elapsed_time(end) for start, end in self._forwards]
        found = {
            "tokens": steps * (new * length + (0 if kind == "prefill" else batch)),
            "seconds": seconds,
            "forward_us": sum(us) / steps,
            "forwards": len(us) / steps,
            "modes": dict(self.modes),
        }
        self._step_until(waiting, finished=True)
        return found

    def profile(self, kind: str, batch: int, length: int, steps: int) -> Profile:
        """GPU time by layer and op, and host time by op, per step; arguments as for :meth:`measure`.

        Eager steps tell which layer and op a kernel is of. Where the workload runs in graphs, its times are those of
        replayed steps, which overlap and follow each other as in service.
        """
        graphs = "NONE" not in self.measure(kind, batch, length, 1)["modes"]
        self._eager = True
        try:
            experts = self._experts(kind, batch, length)
            eager_steps = 1 if graphs else steps
            events = self._trace(kind, batch, length, eager_steps)
        finally:
            self._eager = False
        found = kernels(events)
        if not graphs:
            return Profile(op_times(found, steps), host_times(events, steps), experts)
        replayed = kernels(self._trace(kind, batch, length, steps))
        if 2 * len(replayed) * eager_steps > len(found) * steps:  # not every driver lets a profiler see into graphs
            return Profile(op_times(relabel(replayed, found, steps, eager_steps), steps), {}, experts)
        return Profile(op_times(found, eager_steps), {}, experts)

    def _experts(self, kind: str, batch: int, length: int) -> float:
        """Distinct experts of an eager step's tokens in a layer, the mean over layers."""
        chosen: list[Any] = []

        def noted(select: Callable[..., Any]) -> Callable[..., Any]:
            def noting(*args: Any, **kwargs: Any) -> Any:
                result = select(*args, **kwargs)
                chosen.append(result[1].clone())
                return result

            return noting

        routers = {id(router): router for router in (layer.ffn.experts.router for layer in self._layers())}
        with contextlib.ExitStack() as undo:
            for router in routers.values():
                _wrap(undo, router, "select_experts", noted)
            self.measure(kind, batch, length, 1)
        first = chosen[: len(self._layers())]  # those after it are of steps in which prompts have ended
        return round(statistics.mean(len(ids.unique()) for ids in first), 1)

    def _trace(self, kind: str, batch: int, length: int, steps: int) -> list[dict[str, Any]]:
        """Events of a profiler's trace, with ranges."""
        from torch.profiler import ProfilerActivity, profile

        with self._ranges(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            self.measure(kind, batch, length, steps)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            trace.export_chrome_trace(str(path))
            events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
            return events

    def _layers(self) -> list[Any]:
        return list(self.model.model.layers)

    def _tokens(self, length: int) -> list[int]:
        return self._random.choices(range(_VOCABULARY_START, self.vocabulary), k=length)

    def _add(self, tokens: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = f"r{self._number}"
        self._number += 1
        parameters = SamplingParams(
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(name, {"type": "token", "prompt_token_ids": tokens}, parameters)
        return name

    def _step(self, waiting: set[str], *, finished: bool) -> None:
        """Step once; takes out of ``waiting`` who has finished or, without ``finished``, has drawn a token."""
        waiting -= {output.request_id for output in self.engine.step() if output.finished or not finished}

    def _step_until(self, waiting: set[str], *, finished: bool) -> None:
        """Step until nobody is left waiting."""
        for _ in range(64):
            if not waiting:
                return
            self._step(waiting, finished=finished)
        raise RuntimeError(f"no end of {sorted(waiting)} after 64 steps")

    def _watch(self) -> None:
        """Time every forward of the model between CUDA events, and count graph modes."""
        import torch

        forward, dispatch = self.runner._model_forward, self.runner.cudagraph_dispatcher.dispatch

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = forward(*args, **kwargs)
            end.record()
            self._forwards.append((start, end))
            return result

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            if self._eager:
                from vllm.config import CUDAGraphMode

                kwargs |= {"valid_modes": {CUDAGraphMode.NONE}, "invalid_modes": None}
            result = dispatch(*args, **kwargs)
            self.modes[result[0].name] += 1
            return result

        self.runner._model_forward = timed
        self.runner.cudagraph_dispatcher.dispatch = dispatched

    @contextlib.contextmanager
    def _ranges(self) -> Iterator[None]:
        """Name what the host is in, for the trace. Inside of a range that is named, the innermost counts.

        Layers may share modules, so that a module's range takes the layer that the host is in when it is called.
        """
        model, sampler = self.model, self.runner.sampler
        wrapped = [
            (model.model, "forward", "mHC head"),  # what is left of it: the last post and the head
            (model.model.embed_tokens, "forward", "embedding"),
            (model.model.norm, "forward", "final norm"),
            (model.logits_processor, "forward", "lm_head"),
            (sampler, "forward", "sampling"),
            (sampler, "compute_logprobs", "log_softmax"),
        ]
        for layer in self._layers():
            experts = layer.ffn.experts
            wrapped += [
                (layer.attn, "forward", "attention: norms, q, KV insert"),
                (layer.attn, "attn_gemm_parallel_execute", "attention: input projections"),
                (layer.attn, "forward_mqa", "attention: sparse MLA"),
                (layer.attn, "_o_proj", "attention: output projection"),
                (layer.ffn, "forward", "experts"),
                (layer.ffn.gate, "forward", "router"),
                (experts.router, "select_experts", "router"),
                (layer.ffn.shared_experts, "forward", "shared experts"),
            ]
            if layer.attn.compressor is not None:
                wrapped.append((layer.attn.compressor, "forward", "compressor"))
            if layer.attn.indexer is not None:
                wrapped.append((layer.attn.indexer, "forward", "indexer"))
        once = {(id(owner), attribute): (owner, attribute, op) for owner, attribute, op in wrapped}
        with contextlib.ExitStack() as undo:
            for owner, attribute, op in once.values():
                _wrap(undo, owner, attribute, functools.partial(self._in_range, op=op))
            for index, layer in enumerate(self._layers()):
                _wrap(undo, layer, "forward", functools.partial(self._in_range, op="mHC", layer=index))
            yield

    def _in_range(self, function: Callable[..., Any], op: str, layer: int | None = None) -> Callable[..., Any]:
        """``function`` in a range of ``op``: of the layer that it is called in, or with ``layer`` a layer itself."""
        from torch.profiler import record_function

        @functools.wraps(function)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            outer = self._layer
            self._layer = outer if layer is None else layer
            try:
                with record_function(label(op, self._layer)):
                    return function(*args, **kwargs)
            finally:
                self._layer = outer

        return ranged


def _wrap(undo: contextlib.ExitStack, owner: Any, attribute: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of one object, until ``undo`` ends."""
    undo.callback(_restore, owner, attribute, owner.__dict__.get(attribute))
    setattr(owner, attribute, wrapper(getattr(owner, attribute)))


def _restore(owner: Any, attribute: str, own: Any) -> None:
    """Give an object back the attribute that it had itself, or its class's."""
    if own is None:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, own)


def serve(connection: Connection, make_engine: Callable[..., Any]) -> None:
    """Answer commands until ``stop`` or until nobody is there.

    A command is ``(name, arguments)``: ``start`` makes the engine, ``waited`` asks for the seconds spent waiting for
    commands since then, and those of any core meanwhile; every other one is a method of the engine. The answer is
    ``("ok", result)`` or ``("error", message)``.
    """
    engine = None
    waited = {"seconds": 0.0, "core_seconds": 0.0}
    while True:
        before = time.monotonic(), time.process_time()
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        if name == "stop":
            return
        started = time.monotonic()
        if engine is not None:
            waited["seconds"] += started - before[0]
            waited["core_seconds"] += time.process_time() - before[1]
        try:
            if name == "waited":
                answer: tuple[str, Any] = ("ok", dict(waited))
            elif name == "start":
                engine = make_engine(**arguments)
                answer = ("ok", engine.describe())
            else:
                answer = ("ok", getattr(engine, name)(**arguments))
        except Exception as error:
            traceback.print_exc()
            answer = ("error", f"{name}: {type(error).__name__}: {error}"[:2000])
        print(f"== {name} {arguments}: {answer[0]}, {time.monotonic() - started:.2f} s", flush=True)
        connection.send(answer)


def compile_product(n: int, k: int, experts: int) -> None:
    """Have DeepGEMM compile what it picks for a weight of ``(n, k)`` and the workloads' tokens, into its cache.

    Args:
        n: Rows of the weight.
        k: Length of the sum.
        experts: 0: a linear layer. Otherwise a grouped product of so many experts, six rows a token.
    """
    import torch
    from vllm.utils import deep_gemm

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)

    def scales(rows: int) -> torch.Tensor:
        return torch.ones(k // 128, -(-rows // 4) * 4, device="cuda").mT[:rows]

    groups = max(experts, 1)
    weight, weight_scale = zeros(groups, n, k), torch.ones(groups, -(-n // 128), k // 128, device="cuda")
    for tokens in (*TOKENS_OF_A_STEP, SETTINGS["max_num_batched_tokens"]):
        if not experts:
            out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")
            deep_gemm.fp8_gemm_nt((zeros(tokens, k), scales(tokens)), (weight[0], weight_scale[0]), out)
            continue
        rows = -(-(6 * tokens + min(6 * tokens, experts) * 127) // 128) * 128
        owners = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
        out = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        pair = (zeros(rows, k), scales(rows))
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(pair, (weight, weight_scale), out, owners)
    torch.cuda.synchronize()


def compile_mhc(hidden: int, tokens: int) -> None:
    """Have vLLM's own mHC functions compiled for ``tokens`` tokens, into their caches."""
    import torch
    from vllm.model_executor.kernels.mhc import tilelang as mhc

    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    streams = torch.zeros(tokens, 4, hidden, dtype=torch.bfloat16, device="cuda")
    post, comb = torch.zeros(tokens, 4, 1, device="cuda"), torch.zeros(tokens, 4, 4, device="cuda")
    fn = torch.zeros(24, 4 * hidden, device="cuda")
    settings = (torch.ones(3, device="cuda"), torch.zeros(24, device="cuda"), 1e-6, 1e-6, 1e-6, 2.0, 20)
    norm = {"norm_weight": torch.ones(hidden, dtype=torch.bfloat16, device="cuda"), "norm_eps": 1e-6}
    mhc.mhc_fused_post_pre_tilelang(x, streams, post, comb, fn, *settings, n_splits=1, tile_n=1, **norm)
    mhc.mhc_pre_broadcast_tilelang(x, fn, *settings, fn_broadcast=fn[:, :hidden].contiguous(), **norm)
    mhc.mhc_post_tilelang(x, streams, post, comb)
    mhc.hc_head_fused_kernel_tilelang(streams, fn[:4].contiguous(), settings[0][:1], settings[1][:4], 1e-6, 1e-6)
    torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve on a connection, or compile kernels ahead of the engines."""
    parser = argparse.ArgumentParser(prog="aligned_e2e.vllm_cost_engine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve")
    serving.add_argument("--fd", type=int, required=True, help="file descriptor of the connection, inherited")
    serving.add_argument("--aligned", action="store_true")
    product = commands.add_parser("product")
    product.add_argument("numbers", type=int, nargs=3, metavar=("N", "K", "EXPERTS"))
    streams = commands.add_parser("mhc")
    streams.add_argument("numbers", type=int, nargs=2, metavar=("HIDDEN", "TOKENS"))
    arguments = parser.parse_args(argv)
    if arguments.command != "serve":
        if arguments.command == "product":
            compile_product(*arguments.numbers)
        else:
            compile_mhc(*arguments.numbers)
        return 0
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # whoever waits in vain asks for the stacks
    connection = Connection(arguments.fd)
    try:
        if arguments.aligned:
            activate_untested()
        import vllm.entrypoints.llm  # noqa: F401  # seconds that pass while the checkpoint is written
    except Exception as error:
        traceback.print_exc()
        connection.send(("error", f"import: {type(error).__name__}: {error}"[:2000]))
        return 1
    connection.send(("ok", None))
    serve(connection, functools.partial(CostEngine, aligned=arguments.aligned))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
