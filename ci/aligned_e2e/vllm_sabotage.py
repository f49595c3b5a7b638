"""Sabotage inside vLLM: one hook at a time is switched off in a real engine, and must be missed.

``python -m aligned_e2e.vllm_sabotage --checkpoint DIR --parts DIR --jobs N [NAME ...]``. Each has a process and an
eager engine of its own, which serves a few requests in small chunks and recomputes them as prompts in one step; both
are traced (:mod:`aligned_e2e.vllm_probe`). A healthy engine does the same, and the same reload, which must pass there;
so does stock vLLM with its own batch-invariant mode, to show where it parts.
The switches exist in this harness only: the plan of a package loses patches before vLLM loads its plug-ins, or one
function of its hook is replaced. Records lie in ``DIR/sabotage`` and are kept, so that a call goes on where the last
one ended; what is found goes to ``DIR/sabotage.json``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, TextIO

import torch

from bi_kernels import ScaleFormat
from bi_kernels.runtime.errors import BatchInvarianceError
from bi_kernels.testing.trace import Trace, first_divergence

from .h200 import ENVIRONMENT, end_process
from .vllm_engine import COMMON, header
from .vllm_probe import first_partings, switch_plans, watch_engine
from .vllm_report import record_of

__all__ = [
    "HEALTHY",
    "SABOTAGES",
    "STOCK",
    "Finding",
    "Sabotage",
    "judge",
    "main",
    "make_requests",
    "parse",
    "perturbed",
]

By = Literal["bits", "refusal", "plan", "attestation"]
Swap = tuple[str, Callable[[Any], Any]]

PART = "sabotage"
HEALTHY, STOCK = "healthy", "stock"
SETTINGS: dict[str, Any] = COMMON | {
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,
}
_CHUNK = 640  # tokens of a prompt in one step of the rollout; recomputed, all prompts fit into one step
_DRAWN = 12
_LENGTHS = (2700, 700, 300, 140)  # past 4 * index_topk, and never below the window: decode has whole blocks of keys

_MODEL = "vllm.models.deepseek_v4.nvidia.model"
_MOE = "vllm.model_executor.layers.fused_moe"
_EXPERTS = f"{_MOE}.experts"


@dataclasses.dataclass(frozen=True, slots=True)
class Sabotage:
    """One hook that is off, and what must happen.

    Attributes:
        name: What goes wrong.
        hook: What is off.
        off: Targets of the patches that are not applied.
        swaps: Functions and methods of the packages' hooks, ``"package.module:name"``, and what makes the replacement
            of each.
        expected: ``bits``: rows differ between the rollout and its recomputation, or from the healthy engine's, and
            the tracer finds the place. ``refusal``: a typed error. The arithmetic of one Hopper GPU is the same, and
            what differs is, for ``plan``, the recorded geometry, for ``attestation`` the record of applied patches.
        layer: Where the first row must differ; None where no single layer can be named beforehand.
        op: Likewise; the start of the op's name.
        reloads: The engine reloads other weights instead of serving.
    """

    name: str
    hook: str
    off: tuple[str, ...] = ()
    swaps: tuple[Swap, ...] = ()
    expected: By = "bits"
    layer: int | None = None
    op: str | None = None
    reloads: bool = False

    @property
    def serves(self) -> bool:
        """Whether it needs an engine."""
        return self.expected != "attestation"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What became of one sabotage; the fields of a report's ``sabotages``.

    Attributes:
        name: Of the sabotage.
        hook: What was off.
        expected: How it had to be caught.
        caught: Whether it was, in that way and at that place.
        by: By what; None if nothing noticed.
        located_layer: Where the first row differs.
        located_op: Likewise.
        detail: The words of what caught it.
    """

    name: str
    hook: str
    expected: By
    caught: bool
    by: By | None
    located_layer: int | None
    located_op: str | None
    detail: str


# -- what runs instead of a function of a hook ------------------------------------------------------------------------


def _newest_first(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Decode walks its list backwards."""

    def gather_decode_kv(*args: Any, **options: Any) -> Any:
        gathered = gather(*args, **options)
        for row, length in zip(gathered.indices, gathered.lengths.tolist(), strict=True):
            row[:length] = row[:length].flip(0)
        return gathered

    return gather_decode_kv


def _by_cublas(score: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The compressors' product as vLLM has it."""
    return lambda hidden, compressor: torch.mm(hidden, compressor.fused_wkv_wgate.weight.T, out_dtype=torch.float32)


def _exact_scales(scale_format: Callable[..., ScaleFormat]) -> Callable[..., ScaleFormat]:
    """Activations of the experts quantised by scales that are no powers of two."""
    return lambda device: ScaleFormat.FLOAT32


def _last_slot_first(combine: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Experts' rows added in the order of another expert layout."""

    def combine_ordered(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, **options: Any) -> torch.Tensor:
        return combine(rows, slots.flip(1).contiguous(), weights.flip(1).contiguous(), **options)

    return combine_ordered


def _slices_of_the_step(decode: Callable[..., None]) -> Callable[..., None]:
    """Decode gathers as many tokens at once as the step has, where it should be the deployment's constant."""

    def of_the_step(self: Any, q: torch.Tensor, *args: Any) -> None:
        whole = self.capacity
        names = ("compress_ratio", "combined_width", "topk_width", "window_size")
        slices = {"decode_slice_tokens": min(len(q), whole.decode_slice_tokens)}
        self.capacity = SimpleNamespace(**{name: getattr(whole, name) for name in names}, **slices)
        try:
            decode(self, q, *args)
        finally:
            self.capacity = whole

    return of_the_step


_ATTENTION = f"{_MODEL}:_select_dsv4_attn_cls"
_MHC = tuple(
    f"{_MODEL}:{name}_tilelang"
    for name in ("mhc_pre_broadcast", "mhc_pre", "mhc_fused_post_pre", "mhc_post", "hc_head_fused_kernel")
)
_SPLIT = "vllm.model_executor.kernels.mhc.tilelang_kernels:compute_num_split"

# Those that compile most come first: they are started in this order.
SABOTAGES = (
    Sabotage(
        "mHC: vLLM's own, split by tokens",
        "bi-reload: mHC of the model, constant split",
        off=(*_MHC, _SPLIT),
        layer=0,
        op="mhc_pre",
    ),
    Sabotage(
        "attention: decode by another kernel",
        "bi-sparse-attn: attention class",
        off=(_ATTENTION,),
        layer=0,
        op="sparse_mla",
    ),
    Sabotage(
        "top-k: entries as they arrive",
        "bi-sparse-attn: SparseAttnIndexer",
        off=("vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer",),
        layer=1,
        op="top_k",
    ),
    Sabotage(
        "decode: KV newest first",
        "bi-sparse-attn: order of a decode token's own rows",
        swaps=(("bi_sparse_attn.vllm_attention:gather_decode_kv", _newest_first),),
        layer=0,
        op="sparse_mla",
    ),
    Sabotage(
        "compressor: projection by cuBLAS",
        "bi-sparse-attn: kv_score by the fixed-order product",
        swaps=(("bi_sparse_attn.vllm_attention:_kv_score", _by_cublas),),
        layer=1,
        op="kv_score",
    ),
    Sabotage(
        "router: gate by tokens in the step",
        "bi-moe-deepep: GateLinear",
        off=(f"{_MOE}.router.gate_linear:GateLinear",),
        layer=0,
        op="router logits",
    ),
    Sabotage(
        "experts: vLLM's choice of backend",
        "bi-moe-deepep: select_fp8_moe_backend",
        off=("vllm.model_executor.layers.quantization.fp8:select_fp8_moe_backend",),
        layer=0,
        op="routed experts",
    ),
    Sabotage(
        "experts: scales that are no powers of two",
        "bi-kernels: scale format of the fused activation and quantiser",
        swaps=(("bi_moe_deepep.vllm_experts:deep_gemm_scale_format", _exact_scales),),
        layer=0,
        op="routed experts",
    ),
    Sabotage(
        "experts: last slot added first",
        "bi-moe-deepep: ordered combine",
        swaps=(("bi_moe_deepep.vllm_experts:combine_ordered", _last_slot_first),),
        op="routed experts",  # the order shows in few roundings to bfloat16, anywhere
    ),
    Sabotage(
        "lm_head: vLLM's own linear",
        "bi-kernels: LogitsProcessor",
        off=("vllm.model_executor.layers.logits_processor:LogitsProcessor",),
        layer=4,  # after the last; as invariant as ours, and not what a trainer computes
        op="logits",
    ),
    Sabotage(
        "reload: sinks past the loader",
        "bi-reload: attn_sink loader",
        off=(f"{_MODEL}:DeepseekV4Model.load_weights",),
        expected="refusal",
        reloads=True,
    ),
    Sabotage(
        "reload: mHC broadcast at a new address",
        "bi-reload: refresh of the broadcast weight in place",
        off=(f"{_MODEL}:DeepseekV4Model.finalize_mhc_broadcast_weights",),
        expected="refusal",
        reloads=True,
    ),
    Sabotage(
        "decode: slices as large as the step",
        "bi-sparse-attn: constant slices of decode tokens",
        swaps=(("bi_sparse_attn.vllm_attention:BatchInvariantAttention._decode", _slices_of_the_step),),
        expected="plan",
    ),
    # On one Hopper GPU with the packages' experts nothing asks these; a deployment without them must still be told.
    Sabotage(
        "experts: stock activation of DeepGEMM's class",
        "bi-kernels: DeepGemmExperts._act_mul_quant",
        off=(f"{_EXPERTS}.deep_gemm_moe:DeepGemmExperts._act_mul_quant",),
        expected="attestation",
    ),
    Sabotage(
        "experts: stock masked layout",
        "bi-kernels: BatchedDeepGemmExperts.apply",
        off=(f"{_EXPERTS}.batched_deep_gemm_moe:BatchedDeepGemmExperts.apply",),
        expected="attestation",
    ),
    Sabotage(
        "experts: dispatch that is not staged",
        "bi-moe-deepep: prepare_finalize and FusedMoEKernelModularImpl.apply",
        off=(
            f"{_MOE}.oracle.fp8:maybe_make_prepare_finalize",
            f"{_MOE}.modular_kernel:FusedMoEKernelModularImpl.apply",
        ),
        expected="attestation",
    ),
    Sabotage(
        "mHC: split of vLLM's own functions",
        "bi-reload: compute_num_split",
        off=(_SPLIT,),
        expected="attestation",
    ),
    Sabotage(
        "reload: any bucket counts as a checkpoint",
        "bi-reload: checked load_weights",
        off=(f"{_MODEL}:DeepseekV4ForCausalLM.load_weights",),
        expected="attestation",
    ),
)
"""Names say first where, then what."""
_BY_NAME = {sabotage.name: sabotage for sabotage in SABOTAGES}


# -- one process -------------------------------------------------------------------------------------------------------


def make_requests(vocab_size: int) -> dict[str, list[int]]:
    """Prompts by name. The first repeats its first half, where top-k selects."""
    prompts = {}
    for length in _LENGTHS:
        tokens = random.Random(length).choices(range(2, vocab_size), k=length)
        if length == max(_LENGTHS):
            tokens = (tokens[: length // 2] * 2)[:length]
        prompts[f"of {length}"] = tokens
    return prompts


def perturbed(checkpoint: pathlib.Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors, with other sinks and, in layer 0, another mHC weight."""
    from safetensors import safe_open

    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                tensor = stored.get_tensor(name)
                if name.endswith("attn_sink"):
                    tensor = tensor + 1
                elif name == "layers.0.hc_attn_fn":
                    tensor = tensor * 1.25
                yield name, tensor


def apply_swaps(swaps: Sequence[Swap]) -> None:
    """Replace functions of the packages' hooks, in this process.

    Raises:
        AttributeError: There is no such function.
    """
    for reference, make in swaps:
        name, _, path = reference.partition(":")
        *owners, attribute = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(name))
        setattr(owner, attribute, make(getattr(owner, attribute)))


def _play(name: str, checkpoint: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Start with one hook off, or with all of them on or off, and see what comes of it."""
    started = time.monotonic()
    sabotage = _BY_NAME.get(name)
    if sabotage is not None and not sabotage.serves:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        return header(PART, started, hooks="none")

    from vllm import LLM
    from vllm.v1.worker import gpu_worker

    gpu_worker.kernel_warmup = lambda worker: None  # it compiles for minutes what no request here calls
    llm = LLM(model=str(checkpoint), **SETTINGS)
    start_seconds = round(time.monotonic() - started, 1)
    print(f"== started in {start_seconds} s", flush=True)
    record = header(PART, started, hooks="none" if name == STOCK else "ours")
    found: dict[str, Any] = {"start_seconds": start_seconds}
    if sabotage is None or not sabotage.reloads:
        vocab_size = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        found |= _serve_and_recompute(llm, make_requests(vocab_size), folder)
    if name == HEALTHY or (sabotage is not None and sabotage.reloads):
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        try:
            worker.reload_weights(weights_iterator=perturbed(checkpoint))
            found["refusal"] = None
        except Exception as error:
            if name != HEALTHY and not isinstance(error, BatchInvarianceError):
                raise  # only a typed error is a refusal; the healthy engine keeps what it has shown before
            found["refusal"] = f"{type(error).__name__}: {error}"
    return record | found | {"seconds": round(time.monotonic() - started, 1)}


def _serve_and_recompute(llm: Any, prompts: Mapping[str, list[int]], folder: pathlib.Path) -> dict[str, Any]:
    """A rollout in chunks, then its sequences as prompts in one step; traces of both go to ``folder``."""
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    common: dict[str, Any] = {"detokenize": False}
    with watch_engine(core.model_executor.driver_worker.worker.model_runner) as probe:
        core.scheduler.scheduler_config.long_prefill_token_threshold = _CHUNK
        parameters = [
            SamplingParams(max_tokens=_DRAWN, temperature=1.0, seed=i, logprobs=0, ignore_eos=True, **common)
            for i in range(len(prompts))
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts.values()], parameters, use_tqdm=False)
        rollout = probe.finish(_names(outputs, prompts, probe.seen))
        drawn = [list(output.outputs[0].token_ids) for output in outputs]
        logprobs = [_bits(tokens, output.outputs[0].logprobs) for tokens, output in zip(drawn, outputs, strict=True)]

        core.scheduler.scheduler_config.long_prefill_token_threshold = 0
        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, **common)
        inputs = [{"prompt_token_ids": [*p, *tokens]} for p, tokens in zip(prompts.values(), drawn, strict=True)]
        outputs = llm.generate(inputs, parameters, use_tqdm=False)
        recomputation = probe.finish(_names(outputs, prompts, probe.seen))
        again = [_bits(tokens, output.prompt_logprobs[-_DRAWN:]) for tokens, output in zip(drawn, outputs, strict=True)]
    for name, trace in (("rollout", rollout), ("recomputation", recomputation)):
        trace.save(folder / f"{name}.json")
    divergence = first_divergence(rollout, recomputation)
    pairs = [pair for mine, theirs in zip(logprobs, again, strict=True) for pair in zip(mine, theirs, strict=True)]
    return {
        "tokens_compared": len(pairs),
        "tokens_different": sum(mine != theirs for mine, theirs in pairs),
        "divergence": None if divergence is None else dataclasses.asdict(divergence),
        "partings": first_partings(rollout, recomputation),
        "plan": {
            name: sorted(rollout.plan.get(name, set()) | recomputation.plan.get(name, set()))
            for name in sorted(rollout.plan.keys() | recomputation.plan.keys())
        },
        "contradictions": [*rollout.contradictions, *recomputation.contradictions][:20],
    }


def _names(outputs: Sequence[Any], prompts: Mapping[str, Any], seen: Sequence[str]) -> dict[str, str]:
    """Our names by those of the runner, which are vLLM's with a random part after a hyphen."""
    ours = {output.request_id: name for output, name in zip(outputs, prompts, strict=True)}
    return {request: ours[request.rpartition("-")[0]] for request in seen if request.rpartition("-")[0] in ours}


def _bits(tokens: Sequence[int], entries: Sequence[Any]) -> list[int]:
    """Bits of the logprobs of ``tokens``."""
    return [
        int(struct.unpack("<i", struct.pack("<f", entry[token].logprob))[0])
        for token, entry in zip(tokens, entries, strict=True)
    ]


# -- all of them -------------------------------------------------------------------------------------------------------


def judge(sabotage: Sabotage, folder: pathlib.Path) -> Finding:
    """Who noticed, from the records of the sabotaged and of the healthy process below ``folder``."""

    def finding(by: By | None, detail: str, place: Mapping[str, Any] | None = None) -> Finding:
        layer, op = (place["layer"], place["op"]) if place is not None else (None, None)
        fits = sabotage.expected != "bits" or (
            op is not None and op.startswith(sabotage.op or "") and sabotage.layer in (None, layer)
        )
        caught = by == sabotage.expected and fits
        return Finding(sabotage.name, sabotage.hook, sabotage.expected, caught, by, layer, op, detail)

    mine, healthy = folder / _slug(sabotage.name), folder / HEALTHY
    if not (mine / "record.json").is_file():
        return finding(None, "not run, or failed: see its log")
    if not (healthy / "record.json").is_file():
        return finding(None, "nothing to compare with: the healthy engine has no record")
    record, control = (json.loads((p / "record.json").read_text(encoding="utf-8")) for p in (mine, healthy))
    if record.get("refusal"):
        if control["refusal"]:
            return finding(None, f"the healthy engine refuses as well: {control['refusal'].splitlines()[0]}")
        return finding("refusal", record["refusal"].splitlines()[0])
    if sabotage.serves and not sabotage.reloads:
        if (place := record["divergence"]) is not None:
            tokens = f"{record['tokens_different']} of {record['tokens_compared']} logprobs differ"
            return finding("bits", f"{tokens} from its own recomputation; {_place(place)}", place)
        pair = Trace.load(mine / "rollout.json"), Trace.load(healthy / "recomputation.json")
        if (other := first_divergence(*pair)) is not None:
            place = dataclasses.asdict(other)
            return finding("bits", f"equal to its recomputation, not to the healthy engine's; {_place(place)}", place)
    if (difference := _plan_difference(record, control)) is not None:
        return finding("plan", difference)
    applied = [{t for hook in r["attestation"]["hooks"].values() for t in hook["patches"]} for r in (record, control)]
    missing = applied[1] - applied[0]
    if missing and missing == set(sabotage.off):
        return finding("attestation", f"patches missing: {', '.join(sorted(missing))}")
    return finding(None, "nobody noticed")


def _place(place: Mapping[str, Any]) -> str:
    return (
        f"first at layer {place['layer']}, {place['op']}, request {place['request']}, position {place['position']}, "
        f"{place['tokens_different']} of {place['tokens_compared']} rows of it"
    )


def _plan_difference(record: Mapping[str, Any], control: Mapping[str, Any]) -> str | None:
    """The first geometry that is another one than the healthy engine's; names of one side only are fine."""
    mine, healthy = record.get("plan", {}), control["plan"]
    for name in sorted(mine.keys() & healthy.keys()):
        if mine[name] != healthy[name]:
            return f"{name}: {', '.join(mine[name])} against {', '.join(healthy[name])}"
    return None


def _control_problem(folder: pathlib.Path) -> str | None:
    """What is wrong with the healthy engine: its own rollout must equal its recomputation, its reload must pass."""
    record = folder / HEALTHY / "record.json"
    if not record.is_file():
        return "not run, or failed: see its log"
    control = json.loads(record.read_text(encoding="utf-8"))
    if control["divergence"] is not None or control["tokens_different"]:
        place = "" if control["divergence"] is None else f"; {_place(control['divergence'])}"
        return f"{control['tokens_different']} of {control['tokens_compared']} logprobs differ{place}"
    if control["contradictions"]:
        return f"rows came twice, with other bits: {control['contradictions']}"
    if moving := [f"{name}: {', '.join(values)}" for name, values in control["plan"].items() if len(values) > 1]:
        return f"its geometry follows the batch: {'; '.join(moving)}"
    return f"its reload was refused: {control['refusal'].splitlines()[0]}" if control["refusal"] else None


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _run_limited(command: Sequence[str], log: TextIO, seconds: float) -> None:
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        log.write(f"== ended after {seconds} s\n")
        log.flush()
    finally:
        end_process(process)


def _run(name: str, arguments: argparse.Namespace) -> tuple[str, bool]:
    """One process; whether there is a record after it."""
    folder = arguments.parts / "sabotage" / _slug(name)
    record = folder / "record.json"
    if record.is_file():
        return name, True
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "aligned_e2e.vllm_sabotage", name, "--play"]
    command += ["--checkpoint", str(arguments.checkpoint), "--parts", str(arguments.parts)]
    log = folder / "log.txt"
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        _run_limited(command, stream, arguments.seconds)
    print(f"{time.monotonic() - started:6.1f} s  {name}{'' if record.is_file() else ': FAILED'}", flush=True)
    if not record.is_file():
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        print("\n".join(f"    {line[:400]}" for line in tail), flush=True)
    return name, record.is_file()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's arguments. What is found goes, unless told otherwise, where :mod:`aligned_e2e.h200` waits for it.

    Raises:
        SystemExit: They are none.
    """
    parser = argparse.ArgumentParser(prog="aligned_e2e.vllm_sabotage", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of SABOTAGES, or how one begins; default: all")
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--parts", type=pathlib.Path, help="where the records go; default: the folder of OUTPUT")
    parser.add_argument("--output", type=pathlib.Path, help="what is found; default: PARTS/sabotage.json")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time; about 8 GiB of GPU memory each")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of one process")
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.parts is None and arguments.output is None:
        parser.error("one of --parts and --output is needed")
    arguments.parts = arguments.parts or arguments.output.parent
    arguments.output = arguments.output or record_of(arguments.parts, PART)
    arguments.chosen = [s for s in SABOTAGES if not arguments.names or s.name.startswith(tuple(arguments.names))]
    if not arguments.chosen and not arguments.play:
        parser.error(f"no sabotage begins with {', '.join(arguments.names)}; there are: {'; '.join(_BY_NAME)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run sabotages side by side and say who noticed; exit code 1 unless each was caught as declared."""
    arguments = parse(argv)
    if arguments.play:
        return _main_of_one(arguments.names[0], arguments)
    chosen: list[Sabotage] = arguments.chosen
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        names = [HEALTHY, *([] if arguments.names else [STOCK]), *(sabotage.name for sabotage in chosen)]
        list(pool.map(lambda name: _run(name, arguments), names))

    folder = arguments.parts / "sabotage"
    problem = _control_problem(folder)
    findings = [judge(sabotage, folder) for sabotage in chosen]
    print(f"{HEALTHY}: {problem or 'equal to its recomputation, reload accepted'}")
    for finding in findings:
        verdict = "caught" if finding.caught else "NOT CAUGHT AS DECLARED"
        print(f"{verdict}: {finding.name} (expected {finding.expected}, by {finding.by}): {finding.detail}")
    control, stock = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for path in (folder / name / "record.json" for name in (HEALTHY, STOCK))
    )
    if not control:
        return 1  # without it nothing was shown, and a record would say that something was
    record = {
        **header(PART, started, attestation=control["attestation"]),
        "healthy_problem": problem,
        "sabotages": [dataclasses.asdict(finding) for finding in findings],
        "stock": {
            "tokens": stock.get("tokens_compared"),
            "tokens_different": stock.get("tokens_different"),
            "divergence": stock.get("partings"),
        },
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if problem is None and all(finding.caught for finding in findings) else 1


def _main_of_one(name: str, arguments: argparse.Namespace) -> int:
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    sabotage = _BY_NAME.get(name)
    if name == STOCK:
        os.environ["VLLM_PLUGINS"] = "none"
    else:
        switch_plans(frozenset(sabotage.off if sabotage is not None else ()))
        apply_swaps(sabotage.swaps if sabotage is not None else ())
    folder = arguments.parts / "sabotage" / _slug(name)
    record = _play(name, arguments.checkpoint, folder)
    (folder / "record.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # nothing is left to be done, and a process that tears down CUDA beside others takes its time


if __name__ == "__main__":
    raise SystemExit(main())
