"""The tracer inside vLLM 0.26: a digest of every row that every op of a DeepSeek-V4 returns, by request and position.

Nothing of vLLM or of the packages is edited for it: modules get forward hooks, methods and the model module's mHC
functions a wrapper, for as long as a block runs. Digests are made where the rows are and stay there until
:meth:`ModelProbe.finish`, which writes a :class:`bi_kernels.testing.trace.Trace` that ``bi-bisect`` reads. A replayed
CUDA graph calls no Python, so that a watched engine must be eager. vLLM is imported inside the functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bi_kernels.runtime.packages import PACKAGES
from bi_kernels.testing.trace import Rows, Trace, row_digests

__all__ = ["ModelProbe", "first_partings", "switch_plans", "watch_engine"]

_MODEL = "vllm.models.deepseek_v4.nvidia.model"
_ATTENTION = "bi_sparse_attn.vllm_attention"


def switch_plans(off: frozenset[str]) -> None:
    """Let the four packages apply all their patches but those in ``off``.

    Must come before vLLM loads its plug-ins in this process; that in which vLLM looks at a model's class has all of
    them. A switch of the test harness: the packages have none, and a record of their patches (``bk.attest()``) lists
    what was applied.

    Args:
        off: Targets of patches.

    Raises:
        ValueError: No patch has one of these targets.
    """
    left = set(off)
    for import_name in PACKAGES.values():
        module: Any = importlib.import_module(f"{import_name}.vllm_hook")
        left -= {patch.target for patch in module.PLAN.patches}
        module.PLAN = dataclasses.replace(
            module.PLAN, patches=tuple(patch for patch in module.PLAN.patches if patch.target not in off)
        )
    if left:
        raise ValueError(f"switch_plans: expected targets of patches, got {', '.join(sorted(left))}. Look into PLAN.")


def first_partings(a: Trace, b: Trace) -> list[tuple[int, str, float]]:
    """Where the tokens of two traces part: for each op, the share of all parting tokens that differ there first.

    Args:
        a: Its order of the ops counts.
        b: The same requests.

    Returns:
        Layer, op and share, in the order of the forward pass; ops where no token parts are left out.
    """
    parted: set[tuple[str, int]] = set()
    counts: list[tuple[int, str, int]] = []
    for layer, op in sorted(a.ops, key=lambda entry: entry[0]):  # stable: the order within a layer is that of the calls
        mine, theirs = a.digests(layer, op), b.digests(layer, op)
        here = {key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key]} - parted
        if here:
            counts.append((layer, op, len(here)))
            parted |= here
    return [(layer, op, count / len(parted)) for layer, op, count in counts]


@dataclasses.dataclass(slots=True)
class _Step:
    """One forward pass: whose rows, what came out of each op, and the tensor that logits are taken from."""

    requests: list[str]
    bounds: torch.Tensor
    positions: torch.Tensor
    entries: list[tuple[int, str, torch.Tensor, torch.Tensor | None]] = dataclasses.field(default_factory=list)
    hidden: torch.Tensor | None = None

    def rows(self) -> Rows:
        counts = self.bounds.diff()
        return Rows(self.requests, torch.repeat_interleave(torch.arange(len(counts)), counts), self.positions.cpu())


class ModelProbe:
    """Hooks on one ``DeepseekV4ForCausalLM``.

    Ops, in the order of a layer: ``mhc_pre, attention`` with its ``post_mix`` and ``comb_mix``, ``qr_kv``,
    ``kv_score``, ``index kv_score``, ``index weights``, ``kv``, ``q``, ``index q``, ``top_k``, ``sparse_mla``,
    ``output projection``, ``mhc_post, attention``, ``mhc_pre, ffn``, ``router logits``, ``shared expert``, ``selected
    experts``, ``expert weights``, ``routed experts``, ``mhc_post, ffn``. Layer -1 has ``embedding``, the one after the
    last ``mhc_head``, ``hidden`` and ``logits``. The trace's plan has the buffers that attention asks for: nothing but
    the model and the deployment may decide their shapes.

    Args:
        model: The model, not wrapped for CUDA graphs.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = list(model.model.layers)
        self._layer, self._site = -1, "attention"
        self._steps: list[_Step] = []
        self._step: _Step | None = None
        self._running = False
        self._plan: dict[str, set[str]] = {}

    def begin(self, requests: Sequence[str], bounds: Sequence[int], positions: torch.Tensor) -> None:
        """A forward pass starts.

        Args:
            requests: Names, in the order of their rows.
            bounds: Where each one's rows start, and where the last one's end.
            positions: ``(rows,)`` int64, position of each row in its request.
        """
        self._step = _Step(list(requests), torch.tensor([int(bound) for bound in bounds]), positions.clone())
        self._steps.append(self._step)
        self._running = True

    def end(self, hidden: torch.Tensor) -> None:
        """The forward pass has returned ``hidden``; only logits follow."""
        self._running = False
        if self._step is not None:
            self._step.hidden = hidden

    @property
    def seen(self) -> list[str]:
        """Names of all requests since the last :meth:`finish`."""
        return list(dict.fromkeys(name for step in self._steps for name in step.requests))

    def finish(self, names: Mapping[str, str] | None = None) -> Trace:
        """Everything since the last call, as a trace.

        The digest of a row's digest stands for the row: equal exactly where the digests are.

        Args:
            names: Names for the trace by names of the steps; others are left out. None keeps all as they are.
        """
        trace = Trace()
        for step in self._steps:
            rows = step.rows()
            keep = torch.tensor([names is None or name in names for name in step.requests])[rows.request]
            if names is not None:
                rows = Rows([names.get(name, name) for name in step.requests], rows.request, rows.position)
            for layer, op, digests, which in step.entries:
                mine, kept = (rows, keep) if which is None else (rows.take(which), keep[which])
                if kept.any():
                    trace.record(op, digests.cpu()[kept], layer=layer, rows=mine.take(kept))
        trace.plan, self._plan = self._plan, {}
        self._steps.clear()
        self._step = None
        return trace

    @contextlib.contextmanager
    def attached(self) -> Iterator[ModelProbe]:
        """Have the hooks inside the block."""
        with contextlib.ExitStack() as stack:
            outer = self._model.model
            after = len(self._layers)
            stack.enter_context(_output(outer.embed_tokens, lambda out, args: self._keep(-1, "embedding", out)))
            stack.enter_context(_output(outer.norm, lambda out, args: self._keep(after, "hidden", out)))
            stack.enter_context(_wrapped(self._model, "compute_logits", self._after_logits))
            for number, layer in enumerate(self._layers):
                self._attach_layer(stack, number, layer)
            module = importlib.import_module(_MODEL)
            for name, callback in (
                ("mhc_pre_broadcast_tilelang", self._after_pre_broadcast),
                ("mhc_pre_tilelang", self._after_pre),
                ("mhc_fused_post_pre_tilelang", self._after_post_pre),
                ("mhc_post_tilelang", lambda out, args: self._keep(after - 1, "mhc_post, ffn", out)),
                ("hc_head_fused_kernel_tilelang", lambda out, args: self._keep(after, "mhc_head", out)),
            ):
                stack.enter_context(_wrapped(module, name, callback))
            attention = importlib.import_module(_ATTENTION)
            for name in ("_prefill_buffers", "_decode_buffers"):
                stack.enter_context(_wrapped(attention, name, functools.partial(self._after_buffers, name.strip("_"))))
            yield self

    def _attach_layer(self, stack: contextlib.ExitStack, number: int, layer: Any) -> None:
        attention, ffn = layer.attn, layer.ffn

        def keep(op: str) -> Callable[[Any, Any], None]:
            return lambda out, args: self._keep(number, op, out)

        def enter(*args: Any) -> None:
            self._layer, self._site = number, "attention"

        def after_attention(out: Any, args: Any) -> None:
            self._keep(number, "output projection", out)
            self._site = "ffn"

        def after_projections(out: Any, args: Any) -> None:
            for op, tensor in zip(("qr_kv", "kv_score", "index kv_score", "index weights"), out, strict=True):
                self._keep(number, op, tensor)

        def after_insert(out: Any, args: Any) -> None:
            self._keep(number, "kv", args[1])
            self._keep(number, "q", out[:, : attention.n_local_heads])

        def after_selection(out: Any, args: Any) -> None:
            self._keep(number, "index q", args[1])
            self._keep(number, "top_k", out[: args[0].shape[0]])

        def after_experts(out: Any, args: Any) -> None:
            self._keep(number, "expert weights", out[0])
            self._keep(number, "selected experts", out[1])

        handle = layer.register_forward_pre_hook(enter)
        stack.callback(handle.remove)
        stack.enter_context(_wrapped(attention, "attn_gemm_parallel_execute", after_projections))
        stack.enter_context(_wrapped(attention, "_fused_qnorm_rope_kv_insert", after_insert))
        if attention.indexer is not None:
            stack.enter_context(_output(attention.indexer.indexer_op, after_selection))
        stack.enter_context(
            _wrapped(
                attention,
                "forward_mqa",
                lambda out, args: self._keep(number, "sparse_mla", args[3][:, : attention.n_local_heads]),
            )
        )
        stack.enter_context(_output(attention, after_attention))
        stack.enter_context(_output(ffn.gate, lambda out, args: self._keep(number, "router logits", out[0])))
        if ffn.shared_experts is not None:
            stack.enter_context(_output(ffn.shared_experts, keep("shared expert")))
        stack.enter_context(_wrapped(ffn.experts.router, "select_experts", after_experts))
        stack.enter_context(_wrapped(ffn.experts.routed_experts, "forward_modular", keep("routed experts")))

    def _after_buffers(self, name: str, out: Sequence[tuple[tuple[int, ...], torch.dtype]], args: Any) -> None:
        if self._running:
            shapes = " ".join("x".join(map(str, shape)) for shape, _ in out)
            self._plan.setdefault(f"{name} of compress ratio {args[0].compress_ratio}", set()).add(shapes)

    def _after_pre_broadcast(self, out: Any, args: Any) -> None:
        self._keep_mixed(out[3], out[1], out[2])

    def _after_pre(self, out: Any, args: Any) -> None:
        self._keep_mixed(out[2], out[0], out[1])

    def _after_post_pre(self, out: Any, args: Any) -> None:
        if self._site == "attention":  # of this layer: before it stands the post of the layer before
            self._keep(self._layer - 1, "mhc_post, ffn", out[0])
        else:
            self._keep(self._layer, "mhc_post, attention", out[0])
        self._keep_mixed(out[3], out[1], out[2])

    def _keep_mixed(self, layer_input: torch.Tensor, post_mix: torch.Tensor, comb_mix: torch.Tensor) -> None:
        self._keep(self._layer, f"mhc_pre, {self._site}", layer_input)
        self._keep(self._layer, f"mhc_pre post_mix, {self._site}", post_mix)
        self._keep(self._layer, f"mhc_pre comb_mix, {self._site}", comb_mix)

    def _after_logits(self, out: torch.Tensor, args: Any) -> None:
        """Logits are made of all rows of a prompt, as a view of the hidden states, or of each request's last row."""
        step = self._step
        if step is None or step.hidden is None:
            return
        hidden, source = args[0], step.hidden
        if hidden.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            first = (hidden.storage_offset() - source.storage_offset()) // source.stride(0)
            rows = torch.arange(first, first + len(hidden))
        else:
            rows = step.bounds[1:] - 1
        self.keep_logits(out, rows)

    def keep_logits(self, logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep logits of ``rows``, places among the rows of the last forward pass, on the CPU."""
        if self._step is not None:
            self._step.entries.append((len(self._layers), "logits", row_digests(logits), rows))

    def _keep(self, layer: int, op: str, tensor: torch.Tensor | None) -> None:
        if self._running and self._step is not None and tensor is not None:
            # Rows beyond the step's own are those of a buffer, or padding.
            self._step.entries.append((layer, op, row_digests(tensor[: len(self._step.positions)]), None))


@contextlib.contextmanager
def watch_engine(runner: Any) -> Iterator[ModelProbe]:
    """Attach a probe to the model runner of an eager engine in this process.

    Requests have the names that the runner knows: those of vLLM with a random part after the last hyphen.

    Args:
        runner: vLLM's ``GPUModelRunner``.

    Raises:
        ValueError: The engine replays CUDA graphs, which call no hooks.
    """
    if not runner.model_config.enforce_eager:
        raise ValueError("watch_engine: expected an eager engine, got CUDA graphs. Start it with enforce_eager=True.")
    probe = ModelProbe(runner.get_model())
    forward = runner._model_forward

    def model_forward(*args: Any, **kwargs: Any) -> Any:
        count = runner.input_batch.num_reqs
        bounds = runner.query_start_loc.np[: count + 1].tolist()
        probe.begin(runner.input_batch.req_ids[:count], bounds, kwargs["positions"][: bounds[-1]])
        hidden = forward(*args, **kwargs)
        probe.end(hidden)
        return hidden

    with probe.attached(), _overridden(runner, "_model_forward", model_forward):
        yield probe


@contextlib.contextmanager
def _overridden(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of one object inside the block; a method of its class shows again after it."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _wrapped(
    owner: Any, name: str, after: Callable[[Any, tuple[Any, ...]], None]
) -> contextlib.AbstractContextManager[None]:
    """Call ``after(result, arguments)`` whenever a function or method returns, inside the block."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        after(result, args)
        return result

    return _overridden(owner, name, call)


@contextlib.contextmanager
def _output(module: Any, after: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call ``after(output, arguments)`` whenever a module returns, inside the block."""
    handle = module.register_forward_hook(lambda module, args, out: after(out, args))
    try:
        yield
    finally:
        handle.remove()
