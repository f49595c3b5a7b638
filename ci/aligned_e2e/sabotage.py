"""Deliberate faults, one at a time: each must make the comparison fail, and the tracer must say where.

A check that passes proves little until it has been seen to fail. Every fault is planted on the rollout's side only,
at the seam where the real thing would go wrong, and the run is compared with a healthy one. Those that cannot change
bits here (the reference's experts do not mind how they are staged, say) must be caught by something else that a run
records, and the table says by what.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import bi_kernels as bk
import bi_moe_deepep as moe
import bi_reload as reload
import bi_sparse_attn as sparse
from bi_kernels.runtime.attest import Attestation
from bi_kernels.runtime.attest import compare as compare_attestations
from bi_kernels.runtime.errors import AttestationError, BatchInvarianceError
from bi_kernels.testing.trace import Trace, first_divergence, plan_differences, recording
from bi_moe_deepep import dispatch
from bi_reload import finalize
from bi_reload.reference import mhc_pre as mhc_reference

from . import model
from .actor import recompute_logprobs
from .config import Deployment, ModelConfig
from .findings import CaughtBy, Finding
from .model import DeepseekV4
from .prompts import load_book, make_requests
from .replaced import Package, replaced
from .report import compare
from .rollout import Schedule
from .sides import OLD_SEED, Served, Sides, make_engine, serve_on

__all__ = ["SABOTAGES", "Healthy", "Sabotage", "commit", "healthy_run", "run_all", "save_traces", "small_sides"]

Plant = Callable[[], AbstractContextManager[None]]

_FEW = 8  # rows: fewer in a step are decode, more are prefill
_SCHEDULE = Schedule("sabotaged", max_num_seqs=4, max_num_batched_tokens=512)


@dataclass(frozen=True, slots=True)
class Sabotage:
    """One fault and what must happen.

    Attributes:
        name: What goes wrong.
        plant: Context in which a rollout has the fault.
        caught_by: ``bits``: the comparison of logprobs. ``trace``: rows that differ though no logprob does. ``plan``:
            the recorded geometry. ``refusal``: a typed error before anything is computed. ``fingerprint``: that of the
            weights. ``attestation``: the record of what decides the bits in a process.
        layer: Where the tracer must find it; None where no row differs.
        op: Likewise.
    """

    name: str
    plant: Plant
    caught_by: CaughtBy = "bits"
    layer: int | None = None
    op: str | None = None


@dataclass(frozen=True, slots=True)
class Healthy:
    """A run without a fault, made once and compared with every faulty one.

    Attributes:
        sides: What both sides agree on.
        weights: The checkpoint.
        served: Its tokens and logprobs, equal to the actor's.
        trace: What its ops returned.
        fingerprints: Of its weights.
        attestation: Of its process.
    """

    sides: Sides
    weights: dict[str, torch.Tensor]
    served: Served
    trace: Trace
    fingerprints: dict[str, int]
    attestation: Attestation


def small_sides(vocab_size: int, book: list[int]) -> Sides:
    """A model in which a hundred tokens reach everything: top-k that selects, a C128 entry, the activation's clamp."""
    config = ModelConfig(vocab_size=vocab_size, index_topk=16, swiglu_limit=1.0)
    return Sides(config, Deployment(expert_capacity=128), make_requests(book, (3, 90, 140), 4))


def healthy_run(sides: Sides) -> Healthy:
    """Serve, recompute with the actor, and keep what later runs are compared with.

    Raises:
        ValueError: The two differ, so that no fault could be told from that.
    """
    weights = sides.checkpoint(OLD_SEED)
    with recording(Trace()) as trace:
        served, fingerprints = _serve(sides, weights)
    sequences = {request.name: (request.prompt, served.tokens[request.name]) for request in sides.requests}
    with recording(Trace()) as actor:
        rows = recompute_logprobs(DeepseekV4(sides.config, sides.deployment, weights), sides.deployment, sequences)
    digests = [digest.tolist() for _, digest in rows]
    if digests != list(served.digests.values()) or first_divergence(trace, actor) or plan_differences(trace, trace):
        raise ValueError("sabotage: expected a healthy run to equal its actor, got a difference. Look at that first.")
    return Healthy(sides, weights, served, trace, fingerprints, bk.attest())


def commit(sabotage: Sabotage, healthy: Healthy) -> Finding:
    """Run with one fault and see who notices."""
    refusal = None
    with recording(Trace()) as trace, sabotage.plant():
        try:
            served, fingerprints = _serve(healthy.sides, healthy.weights)
            attestation = bk.attest()
        except BatchInvarianceError as error:
            refusal = f"{type(error).__name__}: {error}"
    divergence = first_divergence(healthy.trace, trace)
    place: tuple[int | None, str | None]
    place = (divergence.layer, divergence.op) if divergence is not None else (None, None)
    if refusal is not None:
        return _finding(sabotage, "refusal", place, refusal)
    wanted = healthy.served
    comparison = compare(sabotage.name, served, wanted.tokens, wanted.logprobs, wanted.digests)
    if comparison.first_difference is not None:
        return _finding(sabotage, "bits", place, comparison.first_difference)
    if divergence is not None:
        detail = f"{divergence.tokens_different} of {divergence.tokens_compared} tokens, no logprob among them"
        return _finding(sabotage, "trace", place, detail)
    if plans := plan_differences(healthy.trace, trace):
        return _finding(sabotage, "plan", place, plans[0])
    changed = sorted(name for name, value in fingerprints.items() if healthy.fingerprints[name] != value)
    if changed:
        return _finding(sabotage, "fingerprint", place, ", ".join(changed))
    try:
        compare_attestations(healthy.attestation, attestation)
    except AttestationError as error:
        return _finding(sabotage, "attestation", place, str(error))
    return _finding(sabotage, None, place, "nobody noticed")


def run_all(vocab_size: int, book: list[int]) -> list[Finding]:
    """Every sabotage against one healthy run, in this process."""
    torch.set_num_threads(1)
    healthy = healthy_run(small_sides(vocab_size, book))
    return [commit(sabotage, healthy) for sabotage in SABOTAGES]


def save_traces(sabotage: Sabotage, sides: Sides, folder: Path) -> tuple[Path, Path]:
    """Write the traces of a healthy run and of one with the fault, as ``bi-bisect`` reads them.

    The values of the op where the fault must show are kept, so that it can show them.
    """
    torch.set_num_threads(1)
    weights = sides.checkpoint(OLD_SEED)
    paths = folder / "healthy.json", folder / "sabotaged.json"
    for path, plant in zip(paths, (contextlib.nullcontext, sabotage.plant), strict=True):
        with recording(Trace(lambda layer, op: (layer, op) == (sabotage.layer, sabotage.op))) as trace, plant():
            _serve(sides, weights)
        trace.save(path)
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m aligned_e2e.sabotage NAME FOLDER``: traces of a healthy run and of one with that fault."""
    parser = argparse.ArgumentParser(prog="aligned_e2e.sabotage", description=main.__doc__)
    parser.add_argument("name", choices=[s.name for s in SABOTAGES], metavar="NAME", help="of SABOTAGES")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where healthy.json and sabotaged.json go")
    arguments = parser.parse_args(argv)
    (sabotage,) = (s for s in SABOTAGES if s.name == arguments.name)
    vocabulary, book = load_book()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    save_traces(sabotage, small_sides(vocabulary.size, book), arguments.folder)
    return 0


def _finding(sabotage: Sabotage, by: CaughtBy | None, place: tuple[int | None, str | None], detail: str) -> Finding:
    layer, op = place
    as_expected = (by, layer, op) == (sabotage.caught_by, sabotage.layer, sabotage.op)
    return Finding(sabotage.name, as_expected, by, layer, op, detail.splitlines()[0])


def _serve(sides: Sides, weights: dict[str, torch.Tensor]) -> tuple[Served, dict[str, int]]:
    """A rollout whose weights have come through a reload, as a rollout's have."""
    rollout = DeepseekV4(sides.config, sides.deployment, {name: torch.zeros_like(t) for name, t in weights.items()})
    update = reload.LayerwiseReload(rollout, {name: reload.TensorSpec.of(t) for name, t in weights.items()})
    update.begin()
    update.load_bucket(weights)
    update.finish()
    served = serve_on(make_engine(sides, rollout, _SCHEDULE), sides.requests)
    return served, reload.weight_fingerprint(dict(rollout.named_parameters()))


# -- the faults: what a rollout runs instead --------------------------------------------------------------------------


def _swap(package: ModuleType, **functions: Callable[..., Any]) -> Plant:
    """Other functions of a package in the model."""
    (name,) = (name for name, value in vars(model).items() if value is package)
    return lambda: replaced(model, **{name: Package(package, **functions)})


def _selector(select: Callable[..., torch.Tensor]) -> Plant:
    return _swap(sparse, top_k_per_row_prefill=select)


def _ties_to_the_last(
    logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, top_k: int, *, out: torch.Tensor
) -> torch.Tensor:
    """Of equal scores the later entry wins: what an arrival order may do. The right order otherwise."""
    columns, count = logits.shape[1], (ends - starts)[:, None]
    mirrored = sparse.top_k_per_row_prefill(logits.flip(1), columns - ends, columns - starts, top_k)
    back = torch.where(mirrored >= 0, count - 1 - mirrored, columns).sort(1).values
    return out.copy_(torch.where(back == columns, -1, back))


def _unsorted(rows_below: int) -> Callable[..., torch.Tensor]:
    """The right entries in another order, where a step has fewer rows than this."""

    def select(
        logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, top_k: int, *, out: torch.Tensor
    ) -> torch.Tensor:
        sparse.top_k_per_row_prefill(logits, starts, ends, top_k, out=out)
        if len(out) < rows_below:
            for row in out:
                row[row >= 0] = row[row >= 0].flip(0)
        return out

    return select


def _newest_first(*args: Any, **options: Any) -> Any:
    """Decode walks its list backwards."""
    gathered = sparse.gather_decode_kv(*args, **options)
    for row, length in zip(gathered.indices, gathered.lengths.tolist(), strict=True):
        row[:length] = row[:length].flip(0)
    return gathered


def _other_kernel(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, *, sm_scale: float, out: torch.Tensor, **options: Any
) -> None:
    """Decode by a kernel with blocks of its own: softmax over the whole list at once."""
    if len(q) >= _FEW:
        sparse.sparse_mla_fwd(q, kv, indices, sm_scale=sm_scale, out=out, **options)
        return
    for i, (row, length) in enumerate(zip(indices.long(), options["topk_length"].tolist(), strict=True)):
        rows = kv[row[:length]].float()
        scores = torch.cat([q[i].float() @ rows.mT * sm_scale, options["attn_sink"][:, None]], 1)
        out[i] = (scores.softmax(1)[:, :-1] @ rows).bfloat16()


def _split_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """K in one piece, or in two for few rows."""
    if len(x) >= _FEW:
        return bk.fixed_order_mm(x, weight)
    first, second = (bk.fixed_order_mm(a, b) for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True))
    return first + second


def _mhc_split_by_rows() -> AbstractContextManager[None]:
    """The projection of mHC in as many pieces as there are rows to fill the machine with."""
    projection = mhc_reference.prenorm_projection

    def split(x: torch.Tensor, fn: torch.Tensor, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        return projection(x, fn, num_splits if len(x) >= _FEW else 1)

    return replaced(mhc_reference, prenorm_projection=split)


def _combine_as_they_arrive() -> AbstractContextManager[None]:
    """Experts' rows added to a bfloat16 result as they arrive, here the last top-k slot first."""

    def combine(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(slots), rows.shape[-1], dtype=torch.bfloat16)
        for slot, weight in zip(slots.flip(1).unbind(1), weights.flip(1).unbind(1), strict=True):
            total += (rows.flatten(0, 1)[slot] * weight[:, None]).bfloat16()
        return total

    return replaced(dispatch, combine_ordered=combine)


def _quantised_on_the_way() -> AbstractContextManager[None]:
    """Tokens dispatched in FP8 with the transport's own float32 scales."""
    stage = moe.stage_tokens

    def staged(x: torch.Tensor, ids: torch.Tensor, **options: Any) -> Any:
        codes, scales = bk.per_token_group_quant_fp8(x, scale_format=bk.ScaleFormat.FLOAT32)
        return stage(bk.dequantize(codes, scales).bfloat16(), ids, **options)

    return replaced(dispatch, stage_tokens=staged)


def _bf16_router(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Router logits that were stored in bfloat16."""
    return moe.router_gate_logits(x, weight).bfloat16().float()


def _capacity_of_the_batch(bucket_tokens: int, *, capacity: int) -> moe.SlicePlan:
    """Slices as large as the batch needs: the same rows in other shapes."""
    return moe.plan_slices(bucket_tokens, capacity=max(1, bucket_tokens))


def _grouped_prefill() -> AbstractContextManager[None]:
    """Every second prefill shares its chunk with another request and gets half of it."""
    calls = 0

    def plan(query_lens: list[int], *, chunk_tokens: int) -> list[sparse.Chunk]:
        nonlocal calls
        calls += 1
        return sparse.plan_prefill_chunks(query_lens, chunk_tokens=chunk_tokens if calls % 2 else 16)

    return replaced(model, sparse=Package(sparse, plan_prefill_chunks=plan))


def _late_scale(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes made with the exact scale, and the scale rounded up to a power of two afterwards."""
    codes, scales = bk.per_token_group_quant_fp8(x, **options | {"scale_format": bk.ScaleFormat.FLOAT32})
    return codes, bk.ceil_to_ue8m0(scales)


def _clamp_after_silu(x: torch.Tensor, *, clamp_limit: float, arch: bk.Arch) -> torch.Tensor:
    """The limit applied to SiLU's result."""
    gate, up = x.chunk(2, -1)
    silu = bk.silu_and_mul(torch.cat([gate, torch.ones_like(up)], -1), arch=arch)
    return (silu.float().clamp(max=clamp_limit) * up.float().clamp(-clamp_limit, clamp_limit)).bfloat16()


def _no_refresh() -> AbstractContextManager[None]:
    """A reload that leaves layer 0's broadcast weight as it was."""
    return replaced(finalize, refresh_mhc_broadcast_=lambda dst, fn: dst)


def _sinks(pad: float, keep: float) -> Plant:
    """A sink loader that pads with ``pad`` and scales what it loads by ``keep``."""

    def load(param: torch.Tensor, loaded: torch.Tensor, *, num_heads: int) -> None:
        param.fill_(pad)
        param[:num_heads] = loaded * keep

    return lambda: replaced(model, reload=Package(reload, load_attn_sink_=load))


def _lost_kv(cache: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, *, block_size: int) -> torch.Tensor:
    """A drawn token's KV that is not stored."""
    if len(kv) < _FEW and block_size == Deployment().window_page:
        slots = torch.full_like(slots, -1)
    return sparse.quantize_and_insert_kv_(cache, kv, slots, block_size=block_size)


@contextlib.contextmanager
def _other_transport() -> Iterator[None]:
    """A process with another expert-parallel transport: the same sums, another library that makes them."""
    before = os.environ.get("BI_EP_TRANSPORT")
    os.environ["BI_EP_TRANSPORT"] = "nccl"
    try:
        yield
    finally:
        if before is None:
            del os.environ["BI_EP_TRANSPORT"]
        else:
            os.environ["BI_EP_TRANSPORT"] = before


SABOTAGES = (
    Sabotage("top-k: ties to whoever comes last", _selector(_ties_to_the_last), layer=1, op="top_k"),
    Sabotage("top-k: indices unsorted in prefill", _selector(_unsorted(10**9)), "refusal", 1, "top_k"),
    Sabotage("top-k: indices unsorted in decode", _selector(_unsorted(_FEW)), "trace", 1, "top_k"),
    Sabotage("decode: KV newest first", _swap(sparse, gather_decode_kv=_newest_first), layer=0, op="sparse_mla"),
    Sabotage("decode: another attention kernel", _swap(sparse, sparse_mla_fwd=_other_kernel), layer=0, op="sparse_mla"),
    Sabotage("decode: KV of a token lost", _swap(sparse, quantize_and_insert_kv_=_lost_kv), "refusal", 0, "sparse_mla"),
    Sabotage("projections: K split by rows", _swap(bk, fixed_order_mm=_split_by_rows), layer=4, op="logits"),
    Sabotage("mHC: K split by rows", _mhc_split_by_rows, layer=0, op="mhc_pre comb_mix, attention"),
    Sabotage("experts: combined in arrival order", _combine_as_they_arrive, layer=0, op="routed experts"),
    Sabotage("experts: quantised by the transport", _quantised_on_the_way, layer=0, op="routed experts"),
    Sabotage("experts: capacity from the batch", _swap(moe, plan_slices=_capacity_of_the_batch), "plan"),
    Sabotage("experts: another transport", _other_transport, "attestation"),
    Sabotage("router: logits in bfloat16", _swap(moe, router_gate_logits=_bf16_router), layer=0, op="router logits"),
    Sabotage("prefill: plan grouped over requests", _grouped_prefill, "plan"),
    Sabotage("quantiser: scale rounded late", _swap(bk, per_token_group_quant_fp8=_late_scale), layer=0, op="q"),
    Sabotage("activation: clamp after SiLU", _swap(bk, silu_and_mul=_clamp_after_silu), layer=0, op="shared expert"),
    Sabotage("reload: mHC broadcast stale", _no_refresh, layer=0, op="mhc_pre, attention"),
    Sabotage("reload: sinks padded with zero", _sinks(pad=0.0, keep=1.0), "fingerprint"),
    Sabotage("reload: sinks left at zero", _sinks(pad=-torch.inf, keep=0.0), layer=0, op="sparse_mla"),
)  # fmt: skip
"""Names say first where, then what."""


if __name__ == "__main__":
    sys.exit(main())
