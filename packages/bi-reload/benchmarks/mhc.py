"""Time explicit mHC against vLLM's, which fuses post and pre; ``bench_mhc_*.py`` are the ops of one kernel.

python packages/bi-reload/benchmarks/mhc.py --out results/h200.jsonl

One JSON line per op and shape (T, H). The op of the goal is ``mhc_post_pre``: what stands between two layers, ours as
two explicit ops, vLLM's as ``mhc_fused_post_pre_tilelang``; the others are its parts and the ends of the model. ratio
is stock / ours; gb_s counts the bytes that every implementation must move; without vLLM stock is null. Replayed from
CUDA graphs, stock, ours and the copy by turns, medians; inputs and weights of up to some tens of MB stay in the L2
cache, for all alike. bitwise: every row equals the same row of a call with 4096 tokens, compared in this run;
precision: the largest difference of ``post_mix`` to float64, ours and stock's. constant_split_us, of ``mhc_pre``:
vLLM's own function with DeepGEMM's TF32 product cut into as many pieces for every T, by number of pieces: as many as
ours, and as many as vLLM's of one token. ``--compile`` only has vLLM's kernels compiled, some seconds each, so that
several processes can share that work.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bi-kernels" / "benchmarks"))
from timing import capture, copy_timer, medians, record, write_records

from bi_kernels.testing import bit_view
from bi_reload import MhcPre, MhcPreBroadcast, mhc_head, mhc_num_splits, mhc_post, mhc_pre, mhc_pre_broadcast

HIDDEN = (4096, 2048, 7168)
TOKENS = (1, 8, 16, 32, 128, 1024, 4096)
MOST = max(TOKENS)
OPS = ("mhc_post_pre", "mhc_pre", "mhc_pre_broadcast", "mhc_post", "mhc_head")
EPS = {"rms_eps": 1e-6, "hc_eps": 1e-6}

Tensors = tuple[torch.Tensor, ...]


class Site(NamedTuple):
    """Weights of one mHC site, and a layer's output with the streams before it."""

    fn: torch.Tensor
    fn_broadcast: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor
    head: Tensors
    x: torch.Tensor
    residual: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor

    def rows(self, tokens: int) -> Site:
        """The same weights with fewer tokens."""
        rows = {name: getattr(self, name)[:tokens] for name in ("x", "residual", "post", "comb")}
        return self._replace(**rows)


def make_site(hidden: int) -> Site:
    """Random numbers of the size that a trained model has."""
    g = torch.Generator("cuda").manual_seed(hidden)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=g)

    fn = randn(24, 4 * hidden) * (4 * hidden) ** -0.5
    return Site(
        fn=fn,
        fn_broadcast=fn.view(24, 4, hidden).sum(1),
        scale=torch.ones(3, device="cuda"),
        base=randn(24),
        norm_weight=randn(hidden).bfloat16(),
        head=(fn[:4].contiguous(), torch.ones(1, device="cuda"), randn(4)),
        x=randn(MOST, hidden).bfloat16(),
        residual=randn(MOST, 4, hidden).bfloat16(),
        post=torch.rand(MOST, 4, device="cuda", generator=g) * 2,
        comb=torch.softmax(randn(MOST, 4, 4), -1),
    )


def ours(op: str, s: Site) -> Callable[[], Tensors]:
    """A call of our op into buffers of its own."""
    pre_settings = {"norm_weight": s.norm_weight, "norm_eps": 1e-6, **EPS}
    streams = torch.empty_like(s.residual)
    pre_out = MhcPre(torch.empty_like(s.x), torch.empty_like(s.post), torch.empty_like(s.comb))
    broadcast_out = MhcPreBroadcast(*pre_out, residual=streams)

    def post() -> Tensors:
        return (mhc_post(s.x, s.residual, s.post, s.comb, out=streams),)

    def post_pre() -> Tensors:
        post()
        return (streams, *mhc_pre(streams, s.fn, s.scale, s.base, out=pre_out, **pre_settings))

    return {
        "mhc_post_pre": post_pre,
        "mhc_post": post,
        "mhc_pre": lambda: mhc_pre(s.residual, s.fn, s.scale, s.base, out=pre_out, **pre_settings),
        "mhc_pre_broadcast": lambda: mhc_pre_broadcast(
            s.x, s.fn_broadcast, s.scale, s.base, out=broadcast_out, **pre_settings
        ),
        "mhc_head": lambda: (mhc_head(s.residual, *s.head, out=pre_out.layer_input, **EPS),),
    }[op]


def stock(op: str, s: Site) -> tuple[str | None, Callable[[], Tensors] | None]:
    """Name and call of vLLM's; results in the order of ours."""
    if importlib.util.find_spec("vllm") is None:
        return None, None
    from vllm.model_executor.kernels.mhc import tilelang as vllm_mhc

    post = s.post.unsqueeze(-1)
    settings = (s.scale, s.base, 1e-6, 1e-6, 1e-6, 2.0, 20)
    norm = {"norm_weight": s.norm_weight, "norm_eps": 1e-6}

    def ordered(results: Tensors) -> Tensors:
        post_mix, comb_mix, layer_input, *residual = results
        return (layer_input, post_mix.squeeze(-1), comb_mix, *residual)

    def fused() -> Tensors:
        streams, *rest = vllm_mhc.mhc_fused_post_pre_tilelang(
            s.x, s.residual, post, s.comb, s.fn, *settings, n_splits=1, tile_n=1, **norm
        )
        return (streams, *ordered(tuple(rest)))

    return {
        "mhc_post_pre": ("mhc_fused_post_pre_tilelang", fused),
        "mhc_post": ("mhc_post_tilelang", lambda: (vllm_mhc.mhc_post_tilelang(s.x, s.residual, post, s.comb),)),
        "mhc_pre": (
            "mhc_pre_tilelang",
            lambda: ordered(vllm_mhc.mhc_pre_tilelang(s.residual, s.fn, *settings, **norm)),
        ),
        "mhc_pre_broadcast": (
            "mhc_pre_broadcast_tilelang",
            lambda: vllm_mhc.mhc_pre_broadcast_tilelang(s.x, s.fn, *settings, fn_broadcast=s.fn_broadcast, **norm),
        ),
        "mhc_head": (
            "hc_head_fused_kernel_tilelang",
            lambda: (vllm_mhc.hc_head_fused_kernel_tilelang(s.residual, *s.head, 1e-6, 1e-6),),
        ),
    }[op]


def constant_splits(op: str, k: int, call: Callable[[], Tensors] | None) -> dict[int, Callable[[], Tensors]]:
    """``call``, vLLM's ``mhc_pre``, with a split that does not see T: what the hook could have called instead."""
    if op != "mhc_pre" or call is None:
        return {}
    from vllm.model_executor.kernels.mhc import tilelang_kernels

    def cut(pieces: int) -> Callable[[], Tensors]:
        def constant() -> Tensors:
            with unittest.mock.patch.object(tilelang_kernels, "compute_num_split", return_value=pieces):
                return call()

        return constant

    one_token = tilelang_kernels.compute_num_split(64, k, 1)
    return {pieces: cut(pieces) for pieces in (mhc_num_splits(k), one_token)}


def bytes_moved(op: str, tokens: int, hidden: int) -> int:
    """What any implementation must read and write of rows and weights; gates are not counted."""
    row = 2 * hidden
    rows = {
        "mhc_post": 1 + 4 + 4,
        "mhc_post_pre": 1 + 4 + 4 + 1,
        "mhc_pre": 4 + 1,
        "mhc_pre_broadcast": 1 + 1 + 4,
        "mhc_head": 4 + 1,
    }
    weights = {"mhc_post": 0, "mhc_post_pre": 96, "mhc_pre": 96, "mhc_pre_broadcast": 24, "mhc_head": 16}
    return rows[op] * row * tokens + weights[op] * 4 * hidden


def precision(s: Site, post_mix: torch.Tensor, streams: torch.Tensor) -> float:
    """Largest difference of ``post_mix`` to float64, taken from the streams that it was computed of."""
    x = streams.flatten(1).double()
    inverse = 1 / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
    logits = (x @ s.fn[4:8].double().T) * inverse * s.scale[1].double() + s.base[4:8].double()
    return float((post_mix.double() - 2 * torch.sigmoid(logits)).abs().max())


def bench(op: str, every: Tensors, site: Site, tokens: int, copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    s = site.rows(tokens)
    hidden = s.x.shape[1]
    call, (name, stock_call) = ours(op, s), stock(op, s)
    constant = constant_splits(op, s.fn.shape[1], stock_call)
    moved = bytes_moved(op, tokens, hidden)
    launches = max(4, min(100, (1 << 30) // moved))
    others = [stock_call] if stock_call is not None else []
    timers = [capture(each, launches) for each in (call, *others, *constant.values())]
    copy_us, ours_us, *others_us = medians(copy, *timers)
    results = call()
    more: dict[str, object] = {}
    if op == "mhc_post_pre":
        more["precision"] = precision(s, results[2], results[0])
        if stock_call is not None:
            theirs = stock_call()
            more["stock_precision"] = precision(s, theirs[2], theirs[0])
    if constant:
        more["constant_split_us"] = {n: round(us, 2) for n, us in zip(constant, others_us[1:], strict=True)}
    return record(
        op,
        [tokens, hidden],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=all(torch.equal(bit_view(a), bit_view(b[:tokens])) for a, b in zip(results, every, strict=True)),
        stock=name,
        stock_us=others_us[0] if others_us else None,
        **more,
    )


def main(*ops: str) -> None:
    """Bench every shape of ``ops`` and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of these ops")
    parser.add_argument("--ops", nargs="+", choices=ops, default=ops)
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--compile", action="store_true", help="only have vLLM's kernels compiled into their caches")
    args = parser.parse_args()
    if args.compile:
        for hidden in args.hidden:
            site = make_site(hidden)
            for tokens in args.tokens:
                for op in args.ops:
                    s = site.rows(tokens)
                    call = stock(op, s)[1]
                    for each in (call, *constant_splits(op, s.fn.shape[1], call).values()):
                        each()  # type: ignore[misc]
        torch.cuda.synchronize()
        return
    copy = copy_timer()
    records = []
    for hidden in args.hidden:
        site = make_site(hidden)
        for op in args.ops:
            every = tuple(t.clone() for t in ours(op, site)())
            for tokens in args.tokens:
                records.append(bench(op, every, site, tokens, copy))
                print(json.dumps(records[-1]), flush=True)
        write_records(args.out, records)


if __name__ == "__main__":
    main(*OPS)
