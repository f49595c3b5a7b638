"""Time the grouped FP8 product without padding against DeepGEMM's contiguous one, on DeepSeek-V4-Flash's experts.

    PYTHONPATH=packages/bi-kernels/benchmarks python packages/bi-moe-deepep/benchmarks/bench_fp8_gemm.py --out F

One JSON line per number of tokens and weight, (N, K): 256 experts, top 6, random routing, several routings by turns so
that no weights wait in the L2 cache. Bytes are the weights of experts with rows once, the rows, and the result.
DeepGEMM gets the layout and the scales that vLLM gives it: every expert padded to 128 rows; scales by rows for the
first product, by columns for the second. ``bitwise``: every row equals DeepGEMM's, or (with ``--no-deep-gemm``, which
needs no vLLM) its own when no others are there. Replayed from CUDA graphs by turns with the copy; medians.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from timing import capture, copy_timer, medians, record, write_records

from bi_kernels.testing import first_difference
from bi_moe_deepep import m_grouped_fp8_gemm_nt_offsets

EXPERTS, TOP_K, BLOCK = 256, 6, 128
WEIGHTS = ((4096, 4096), (4096, 2048))
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 2304, 2560, 4096)
SETS = 4
Route = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def codes(*shape: int) -> torch.Tensor:
    """Random finite e4m3 codes of moderate size."""
    small = torch.randint(0, 0x60, shape, dtype=torch.uint8, device="cuda")
    sign = torch.randint(0, 2, shape, dtype=torch.uint8, device="cuda")
    return small.add_(sign.mul_(0x80)).view(torch.float8_e4m3fn)


def powers(*shape: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-14, -8, shape, device="cuda").float())


def route(tokens: int, k: int) -> Route:
    """Rows, their scales (by columns, as the quantiser leaves them) and offsets of one random routing."""
    chosen = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :TOP_K]
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32, device="cuda")
    offsets[1:] = counts.cumsum(0)
    rows = tokens * TOP_K
    return codes(rows, k), powers(k // BLOCK, -(-rows // 4) * 4).mT[:rows], offsets


def padded(routed: Route, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in DeepGEMM's contiguous layout, with vLLM's number of rows, and where the rows are."""
    q, s, offsets = routed
    counts = (offsets[1:] - offsets[:-1]).long()
    rows = len(q) + min(len(q), EXPERTS) * (BLOCK - 1)
    rows = -(-rows // BLOCK) * BLOCK
    wide = (counts + BLOCK - 1) // BLOCK * BLOCK
    expert = torch.repeat_interleave(torch.arange(EXPERTS, device="cuda"), counts)
    place = (wide.cumsum(0) - wide - offsets[:-1])[expert] + torch.arange(len(q), device="cuda")
    wide_q = torch.zeros((rows, k), dtype=torch.uint8, device="cuda")
    wide_q[place] = q.view(torch.uint8)
    wide_s = torch.ones((rows, k // BLOCK), device="cuda")
    wide_s[place] = s
    if k != WEIGHTS[0][1]:
        wide_s = wide_s.mT.contiguous().mT
    owner = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    owner[place] = expert.int()
    return wide_q.view(q.dtype), wide_s, owner, place


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def alone(routed: Route, wq: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
    """Every expert's rows by themselves."""
    q, s, offsets = routed
    parts = []
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        if start < stop:
            own = torch.tensor([0] * (expert + 1) + [stop - start] * (EXPERTS - expert), dtype=torch.int32)
            parts.append(m_grouped_fp8_gemm_nt_offsets(q[start:stop], s[start:stop], wq, ws, own.cuda()))
    return torch.cat(parts)


def bench(
    tokens: int, weight: tuple[torch.Tensor, torch.Tensor], deep_gemm: Callable[..., object] | None, copy: Callable
) -> dict[str, object]:
    """One record."""
    wq, ws = weight
    _, n, k = wq.shape
    routes = [route(tokens, k) for _ in range(SETS)]
    outs = [torch.empty(len(q), n, dtype=torch.bfloat16, device="cuda") for q, _, _ in routes]
    calls = [
        lambda r=r, o=o: m_grouped_fp8_gemm_nt_offsets(r[0], r[1], wq, ws, r[2], out=o)
        for r, o in zip(routes, outs, strict=True)
    ]
    active = sum(int((r[2][1:] > r[2][:-1]).sum()) for r in routes) / SETS
    rows = tokens * TOP_K
    moved = int(active * n * k) + rows * (k + k // BLOCK * 4 + n * 2)
    launches = SETS * max(1, min(8, (1 << 30) // moved))

    timers = [capture(in_turn(calls), launches), copy]
    if deep_gemm is None:
        want = [alone(r, wq, ws) for r in routes]
    else:
        wides = [padded(r, k) for r in routes]
        wide_outs = [torch.empty(len(w[0]), n, dtype=torch.bfloat16, device="cuda") for w in wides]
        stock = [
            lambda w=w, o=o: deep_gemm((w[0], w[1]), (wq, ws), o, w[2]) for w, o in zip(wides, wide_outs, strict=True)
        ]
        timers.append(capture(in_turn(stock), launches))
        for call in stock:
            call()
        want = [out[w[3]] for w, out in zip(wides, wide_outs, strict=True)]
    for out, call in zip(outs, calls, strict=True):
        out.fill_(torch.nan)
        call()
    bitwise = all(first_difference(have, expected) is None for have, expected in zip(outs, want, strict=True))
    ours_us, copy_us, *stock_us = medians(*timers)
    return record(
        "m_grouped_fp8_gemm_nt_offsets",
        [tokens, n, k],
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=bitwise,
        stock="DeepGEMM, contiguous" if deep_gemm is not None else None,
        stock_us=stock_us[0] if stock_us else None,
        active=active,
        weights_gb_s=round(active * n * k / ours_us / 1e3, 1),
        copy_gb_s=round(2 * (1 << 30) / copy_us / 1e3, 1),
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of this op")
    parser.add_argument("--no-deep-gemm", action="store_true", help="time our kernel alone")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        deep_gemm = None
        if not args.no_deep_gemm:
            import vllm.utils.deep_gemm  # noqa: F401  # its cache of compiled kernels

            from bi_moe_deepep.deep_gemm import mk_alignment
            from bi_moe_deepep.deep_gemm_proof import load_products

            products = load_products()
            stack.enter_context(mk_alignment(products.module))
            deep_gemm = products.contiguous
        copy, records = copy_timer(), []
        for n, k in WEIGHTS:
            weight = codes(EXPERTS, n, k), powers(EXPERTS, n // BLOCK, k // BLOCK)
            for tokens in args.tokens:
                records.append(bench(tokens, weight, deep_gemm, copy))
                print(json.dumps(records[-1]), flush=True)
    write_records(args.out, records)


if __name__ == "__main__":
    main()
