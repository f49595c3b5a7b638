"""A real vLLM engine in this process, and a digest of every attention layer's tensors by request and position.

Also runs where another package's hooks are missing: what they own is made batch-invariant by the shortest means, so
that attention meets equal inputs. vLLM is imported inside the functions.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

OPS = ("hidden_states", "q", "attention", "output")
ENVIRONMENT = {
    "BI_PARTIAL": "1",
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
MAX_MODEL_LEN = 20_480
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64]


def make_prompt(tag: int, length: int, *, repeat: int = 0) -> list[int]:
    """Random token ids after ``tag``, by which the request is known; ``repeat``: a span that occurs over and over."""
    generator = torch.Generator().manual_seed(tag)
    tokens = torch.randint(1000, 8192, (length,), generator=generator).tolist()
    if repeat:
        tokens = (tokens[:repeat] * (length // repeat + 1))[:length]
    return [tag, *tokens[1:]]


@dataclasses.dataclass
class Run:
    """What came of a batch.

    Attributes:
        tokens: Generated ids by tag.
        logprobs: Their logprobs by tag; or those of the whole prompt, with None first.
        digests: By tag: ``(layers, ops, positions)`` int64, -1 where a position was not computed.
        modes: How many steps ran in which graph mode.
    """

    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    logprobs: dict[int, list[float | None]] = dataclasses.field(default_factory=dict)
    digests: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    modes: dict[str, int] = dataclasses.field(default_factory=dict)


def differences(one: Run, other: Run) -> tuple[list[str], int]:
    """Where attention gave other bits for the same inputs; and how many (layer, op, position) were compared.

    A layer's output at a position is a function of its hidden states up to there, so that it is held against the other
    run's only as far as those are equal.
    """
    found, compared = [], 0
    for tag in sorted(one.digests.keys() & other.digests.keys()):
        mine, theirs = one.digests[tag], other.digests[tag]
        length = min(mine.shape[2], theirs.shape[2])
        mine, theirs = mine[:, :, :length], theirs[:, :, :length]
        both = ((mine != -1) & (theirs != -1)).all(1).all(0)
        unequal = (mine != theirs) & both
        for layer in range(mine.shape[0]):
            inputs = unequal[layer, 0].nonzero()
            stop = int(inputs[0]) if len(inputs) else length
            compared += int(both[:stop].sum()) * (len(OPS) - 1)
            for op in range(1, len(OPS)):
                where = unequal[layer, op, :stop].nonzero()[:, 0].tolist()
                if where:
                    found.append(
                        f"request {tag}, layer {layer}, {OPS[op]}: {len(where)} of {stop} positions with equal inputs "
                        f"differ, first {where[:8]}"
                    )
            if stop < length:
                found.append(f"(request {tag}, layer {layer}: hidden states differ from position {stop} on)")
    return found, compared


class Engine:
    """vLLM with the package's hooks, on the checkpoint in ``path``. CUDA graphs come with :meth:`capture`."""

    def __init__(self, path: str, **settings: Any) -> None:
        os.environ.update(ENVIRONMENT)
        from bi_kernels.runtime import hooks
        from bi_sparse_attn.vllm_hook import PLAN

        # Also the hooks that are not ready because nobody has run this yet.
        patches = tuple(dataclasses.replace(p, ready=True, needs="") for p in PLAN.patches_for("0.26.0"))
        hooks.activate(dataclasses.replace(PLAN, patches=patches))
        if len(hooks.active_records()) == 1:
            os.environ["VLLM_PLUGINS"] = "none"  # the other packages, if installed, cannot start on their own
            _stand_in_for_other_packages()
        from vllm import LLM
        from vllm.v1.worker import gpu_model_runner, gpu_worker

        gpu_worker.kernel_warmup = lambda worker: None  # of many shapes, most of which no test meets
        runner_class = gpu_model_runner.GPUModelRunner
        self._capture, runner_class.capture_model = runner_class.capture_model, lambda runner: 0
        runner_class.profile_cudagraph_memory = lambda runner: 0
        self.llm = LLM(
            model=path,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            kv_cache_dtype="fp8",
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=1024,
            max_num_seqs=64,
            gpu_memory_utilization=0.25,  # checked at start, though the next line decides
            kv_cache_memory_bytes=8 << 30,
            enable_prefix_caching=False,
            async_scheduling=False,
            seed=0,
            compilation_config={"cudagraph_capture_sizes": GRAPH_SIZES},
            **settings,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.eager = True
        self._modes: dict[str, int] = {}
        self._steps: list[Any] = []
        self._watch()

    def capture(self) -> None:
        """Capture the graphs that vLLM would have captured at start, attention's digests included."""
        from vllm.config import set_current_vllm_config

        self.eager = False
        with torch.inference_mode(), set_current_vllm_config(self.runner.vllm_config):
            self._capture(self.runner)

    def run(
        self, prompts: list[list[int]], *, max_tokens: int = 1, chunk: int = 0, prompt_logprobs: bool = False
    ) -> Run:
        """Serve ``prompts`` at once, prefilled in chunks of at most ``chunk`` tokens."""
        from vllm import SamplingParams

        self.scheduler.scheduler_config.long_prefill_token_threshold = chunk
        self._steps.clear()
        self._modes.clear()
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0 if prompt_logprobs else None,
        )
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        run = Run(modes=dict(self._modes))
        for prompt, output in zip(prompts, outputs, strict=True):
            tag = prompt[0]
            run.tokens[tag] = list(output.outputs[0].token_ids)
            entries = output.prompt_logprobs if prompt_logprobs else output.outputs[0].logprobs
            tokens = prompt if prompt_logprobs else run.tokens[tag]
            run.logprobs[tag] = [e and e[t].logprob for e, t in zip(entries, tokens, strict=True)]
        run.digests = self._digests()
        return run

    def _digests(self) -> dict[int, torch.Tensor]:
        layers, found = len(self.layers), {}
        for tags, bounds, positions, digests in self._steps:
            positions, digests = positions.cpu(), digests.cpu()
            for tag, start, stop in zip(tags, bounds, bounds[1:], strict=False):
                where = positions[start:stop]
                table = found.setdefault(tag, torch.full((layers, len(OPS), MAX_MODEL_LEN), -1))
                table[:, :, where] = digests[:, :, start:stop]
        lengths = {tag: int((table[0, 0] != -1).nonzero().max()) + 1 for tag, table in found.items()}
        return {tag: table[:, :, : lengths[tag]] for tag, table in found.items()}

    def _watch(self) -> None:
        runner = self.runner
        self.layers = [module for module in runner.get_model().modules() if hasattr(module, "swa_cache_layer")]
        capacity = runner.max_num_tokens
        # Written inside the graphs, read after each step.
        self._now = torch.zeros((len(self.layers), len(OPS), capacity), dtype=torch.int64, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        self._odd = torch.randint(-(2**62), 2**62, (2**15,), generator=generator, device="cuda") * 2 + 1
        for number, layer in enumerate(self.layers):
            self._watch_layer(number, layer)
        forward, dispatch = runner._model_forward, runner.cudagraph_dispatcher.dispatch

        def model_forward(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            self._keep(kwargs["positions"])
            return result

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            from vllm.config import CUDAGraphMode

            if self.eager:
                kwargs["valid_modes"] = {CUDAGraphMode.NONE}
                kwargs.pop("invalid_modes", None)
            result = dispatch(*args, **kwargs)
            self._modes[result[0].name] = self._modes.get(result[0].name, 0) + 1
            return result

        runner._model_forward = model_forward
        runner.cudagraph_dispatcher.dispatch = dispatched

    def _watch_layer(self, number: int, layer: Any) -> None:
        mqa = layer.forward_mqa

        def forward_mqa(q: Any, kv: Any, positions: Any, output: Any) -> None:
            mqa(q, kv, positions, output)
            self._digest(number, 1, q)
            self._digest(number, 2, output)

        layer.forward_mqa = forward_mqa
        layer.register_forward_pre_hook(lambda module, args: self._digest(number, 0, args[1]))
        layer.register_forward_hook(lambda module, args, out: self._digest(number, 3, out))

    def _digest(self, layer: int, op: int, tensor: torch.Tensor) -> None:
        """Integer sums of (bits + 1) times an odd number by place: of no order, and never -1 by accident of zeros."""
        bits = tensor.flatten(1).view(torch.int16)
        for start in range(0, len(bits), 128):
            part = bits[start : start + 128].long() + 1
            self._now[layer, op, start : start + len(part)].copy_((part * self._odd[: part.shape[1]]).sum(1))

    def _keep(self, positions: torch.Tensor) -> None:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return
        requests = self.runner.input_batch.req_ids
        bounds = metadata[self.layers[0].swa_cache_layer.prefix].query_start_loc_cpu[: len(requests) + 1].tolist()
        tags = [self.runner.requests[request].prompt_token_ids[0] for request in requests]
        self._steps.append((tags, bounds, positions[: bounds[-1]].clone(), self._now[:, :, : bounds[-1]].clone()))


def _stand_in_for_other_packages() -> None:
    """MHC post, then pre, with a constant split; gate logits from the fixed-order product."""
    from vllm.model_executor.kernels.mhc import tilelang_kernels
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.models.deepseek_v4.nvidia import model

    from bi_kernels import fixed_order_mm

    def post_then_pre(x: Any, residual: Any, post: Any, comb: Any, *rest: Any, n_splits: int, tile_n: int, **norm: Any):
        residual = model.mhc_post_tilelang(x, residual, post, comb)
        return (residual, *model.mhc_pre_tilelang(residual, *rest, **norm))

    tilelang_kernels.compute_num_split = lambda block_k, k, grid_size: max(1, min(16, -(-k // block_k) // 4))
    model.mhc_fused_post_pre_tilelang = post_then_pre
    GateLinear.forward = lambda gate, x: (fixed_order_mm(x, gate.weight), None)
