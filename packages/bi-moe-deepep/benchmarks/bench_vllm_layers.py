"""Time the aligned expert layer and router of DeepSeek-V4-Flash against vLLM's own, in one run and by turns.

    PYTHONPATH=packages/bi-kernels/benchmarks python packages/bi-moe-deepep/benchmarks/bench_vllm_layers.py --out F

Needs vLLM 0.26, unhooked. ``experts``: vLLM's modular kernel (quantise, sort, two products, activation, add) with its
DeepGEMM experts, with its Triton experts (what it takes on Hopper unless told otherwise), and with the aligned ones;
``stock`` is the faster of the first two. The aligned ones are timed in both of their layouts, ``ours`` being the one
that serving takes for that number of tokens. ``router``: stock is what ``GateLinear`` runs for that number of tokens.
One JSON line per number of tokens, in the format of bi-kernels' ``h200.jsonl``; graphs, medians.

Kernels are compiled first, in processes beside each other; ``--compile`` is one of those.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from timing import capture, machine, medians, write_records

from bi_kernels.testing import first_difference
from bi_moe_deepep import router_gate_logits, select_experts, vllm_experts

EXPERTS, TOP_K, HIDDEN, INTER, LIMIT = 256, 6, 4096, 2048, 10.0
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 2304, 2560, 4096)
# Triton and DeepGEMM have a kernel for each few numbers of tokens: of those that share one, only the first compiles it.
COMPILED_TOGETHER = ((1, 2048), (8, 1024), (16, 512), (32, 256), (64, 128), (2304,), (2560,), (4096,))
COMPILE_SECONDS = 90
DEEP_GEMM, TRITON = "DeepGemmExperts", "TritonExperts"
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def weight(n: int, k: int, filled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of every expert; zeros where only kernels are wanted."""
    codes = torch.zeros(EXPERTS, n, k, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    for part in codes.split(16) if filled else ():
        part.copy_(torch.randn(part.shape, device="cuda").mul_(64))
    return codes, torch.exp2(torch.randint(-14, -11, (EXPERTS, n // 128, k // 128), device="cuda").float())


def layers(filled: bool = True) -> tuple[dict[str, Layer], Layer]:
    """The layer with each of vLLM's experts, and with the aligned ones."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, make_fp8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.prepare_finalize import make_moe_prepare_and_finalize_no_dp_ep
    from vllm.utils import deep_gemm
    from vllm.v1.worker.workspace import init_workspace_manager

    deep_gemm._lazy_init()
    deep_gemm.DeepGemmQuantScaleFMT.init_oracle_cache()
    init_workspace_manager(torch.device("cuda", 0))
    (w1, s1), (w2, s2) = weight(2 * INTER, HIDDEN, filled), weight(HIDDEN, INTER, filled)
    config = FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN,
        intermediate_size=INTER,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.SILU,
        device="cuda",
        routing_method=RoutingMethodType.DeepseekV4,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        max_num_tokens=max(TOKENS),
        swiglu_limit=LIMIT,
    )

    def layer(cls: Any, backend: Any) -> Layer:
        quant = make_fp8_moe_quant_config(backend, s1, s2, None, None, block_shape=[128, 128], swiglu_limit=LIMIT)
        kernel = mk.FusedMoEKernel(make_moe_prepare_and_finalize_no_dp_ep(False), cls(config, quant))
        return lambda x, weights, ids: kernel.apply(x, w1, w2, weights, ids, MoEActivation.SILU, EXPERTS, None, False)

    stock = {
        DEEP_GEMM: layer(DeepGemmExperts, Fp8MoeBackend.DEEPGEMM),
        TRITON: layer(TritonExperts, Fp8MoeBackend.TRITON),
    }
    return stock, layer(vllm_experts.expert_classes()[0], Fp8MoeBackend.DEEPGEMM)


def in_layout(packed: bool, ours: Layer) -> Layer:
    """The aligned layer in one of its layouts, whatever the number of tokens."""

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        before, vllm_experts.PACKED_TOKENS = vllm_experts.PACKED_TOKENS, sys.maxsize if packed else -1
        try:
            return ours(x, weights, ids)
        finally:
            vllm_experts.PACKED_TOKENS = before

    return run


def record(op: str, shape: list[int], stock: str, stock_us: float, ours_us: float, **more: object) -> dict[str, object]:
    """One line."""
    return {
        "op": op,
        "shape": shape,
        "stock": stock,
        "stock_us": round(stock_us, 2),
        "ours_us": round(ours_us, 2),
        "ratio": round(stock_us / ours_us, 3),
        **more,
        **machine(),
    }


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, and a uniform choice of experts."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    return x, *select_experts(torch.randn(tokens, EXPERTS, device="cuda"), top_k=TOP_K)


def bench_experts(stock: dict[str, Layer], ours: Layer, tokens: int) -> dict[str, object]:
    """The layer; uniform routing."""
    given = routed(tokens)
    every = {**stock, "packed": in_layout(True, ours), "contiguous": in_layout(False, ours)}
    outputs = {name: run(*given).clone() for name, run in every.items()}
    timers = [capture(lambda run=run: run(*given), 10) for run in every.values()]
    times = dict(zip(every, medians(*timers), strict=True))
    layout = "packed" if tokens <= vllm_experts.PACKED_TOKENS else "contiguous"
    name = min(stock, key=times.__getitem__)
    return record(
        "experts",
        [tokens, TOP_K, HIDDEN, INTER],
        name,
        times[name],
        times[layout],
        deep_gemm_us=round(times[DEEP_GEMM], 2),
        triton_us=round(times[TRITON], 2),
        layout=layout,
        packed_us=round(times["packed"], 2),
        contiguous_us=round(times["contiguous"], 2),
        layouts_equal=first_difference(outputs["packed"], outputs["contiguous"]) is None,
        rows_equal=float((outputs[DEEP_GEMM] == outputs[layout]).all(1).float().mean()),
    )


def stock_gate(x: torch.Tensor, weight: torch.Tensor) -> tuple[str, Callable[[], object]]:
    """What ``GateLinear.forward`` calls for this input."""
    from vllm.model_executor.kernels.linear.cute_dsl.ll_bf16 import is_available, ll_bf16_gemm

    if len(x) <= 16 and is_available():
        return "ll_bf16_gemm", lambda: ll_bf16_gemm(x, weight)
    return "torch.mm", lambda: torch.mm(x, weight.T, out_dtype=torch.float32)


def bench_router(tokens: int) -> dict[str, object]:
    """The gate's product."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    weight = (torch.randn(EXPERTS, HIDDEN, device="cuda") / 64).bfloat16()
    out = torch.empty(tokens, EXPERTS, device="cuda")
    name, stock = stock_gate(x, weight)
    ours_us, stock_us = medians(capture(lambda: router_gate_logits(x, weight, out=out), 100), capture(stock, 100))
    return record("router", [tokens, EXPERTS, HIDDEN], name, stock_us, ours_us)


def compile_kernels(tokens: list[int]) -> None:
    """One call of every layer per number of tokens, for the caches on disk."""
    stock, ours = layers(filled=False)
    for count in tokens:
        given = routed(count)
        for run in (*stock.values(), in_layout(True, ours), in_layout(False, ours)):
            run(*given)
    torch.cuda.synchronize()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Processes that compile beside what is done meanwhile, and have ended afterwards."""
    started = time.monotonic()
    env = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # each would start a pool as large as the machine
    made = [
        subprocess.Popen([sys.executable, __file__, "--compile", *map(str, tokens)], stdout=subprocess.DEVNULL, env=env)
        for tokens in COMPILED_TOGETHER
    ]
    try:
        yield
        for process in made:
            with contextlib.suppress(subprocess.TimeoutExpired):  # what is missing is compiled again, in turn
                process.wait(max(0.0, started + COMPILE_SECONDS - time.monotonic()))
        print(f"compiled in {time.monotonic() - started:.0f} s, exits {[p.poll() for p in made]}", file=sys.stderr)
    finally:
        for process in made:
            process.kill()


def main() -> None:
    """Bench both and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of these ops")
    parser.add_argument("--compile", type=int, nargs="+", metavar="TOKENS", help="only compile kernels for these")
    args = parser.parse_args()
    os.environ.pop("VLLM_BATCH_INVARIANT", None)
    with compiling() if args.compile is None else contextlib.nullcontext():
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            if args.compile is not None:
                compile_kernels(args.compile)
                return
            stock, ours = layers()
    records = []
    with set_current_vllm_config(VllmConfig()):
        for run in (bench_router, lambda tokens: bench_experts(stock, ours, tokens)):
            for tokens in TOKENS:
                records.append(run(tokens))
                print(json.dumps(records[-1]), flush=True)
                write_records(args.out, records)


if __name__ == "__main__":
    main()
