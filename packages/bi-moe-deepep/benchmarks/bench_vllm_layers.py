"""Time the aligned expert layer and router of DeepSeek-V4-Flash against vLLM's own, in one run and by turns.

    PYTHONPATH=packages/bi-kernels/benchmarks python packages/bi-moe-deepep/benchmarks/bench_vllm_layers.py --out F

Needs vLLM 0.26, unhooked. ``experts``: vLLM's modular kernel (quantise, permute, two products, activation, add) with
the stock DeepGEMM experts and with the aligned subclass. ``router``: stock is what ``GateLinear`` runs for that number
of tokens. One JSON line per number of tokens, in the format of bi-kernels' ``h200.jsonl``; graphs, medians.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import capture, machine, medians, write_records

from bi_moe_deepep import router_gate_logits, select_experts
from bi_moe_deepep.vllm_experts import expert_classes

EXPERTS, TOP_K, HIDDEN, INTER, LIMIT = 256, 6, 4096, 2048, 10.0
TOKENS = (1, 16, 64, 256, 1024, 4096)


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of every expert."""
    codes = torch.empty(EXPERTS, n, k, dtype=torch.float8_e4m3fn, device="cuda")
    for part in codes.split(16):
        part.copy_(torch.randn(part.shape, device="cuda").mul_(64))
    return codes, torch.exp2(torch.randint(-14, -11, (EXPERTS, n // 128, k // 128), device="cuda").float())


def kernels() -> list[Callable[..., Any]]:
    """The layer with the stock experts, and with the aligned ones."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, make_fp8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.prepare_finalize import make_moe_prepare_and_finalize_no_dp_ep
    from vllm.utils import deep_gemm
    from vllm.v1.worker.workspace import init_workspace_manager

    deep_gemm._lazy_init()
    init_workspace_manager(torch.device("cuda", 0))
    (w1, s1), (w2, s2) = weight(2 * INTER, HIDDEN), weight(HIDDEN, INTER)
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
    quant = make_fp8_moe_quant_config(
        Fp8MoeBackend.DEEPGEMM, s1, s2, None, None, block_shape=[128, 128], swiglu_limit=LIMIT
    )
    made = []
    for cls in (DeepGemmExperts, expert_classes()[0]):
        kernel = mk.FusedMoEKernel(make_moe_prepare_and_finalize_no_dp_ep(False), cls(config, quant))

        def apply(
            x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, kernel: mk.FusedMoEKernel = kernel
        ) -> torch.Tensor:
            return kernel.apply(x, w1, w2, weights, ids, MoEActivation.SILU, EXPERTS, None, False)

        made.append(apply)
    return made


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


def bench_experts(apply: list[Callable[..., Any]], tokens: int) -> dict[str, object]:
    """The layer; uniform routing."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    weights, ids = select_experts(torch.randn(tokens, EXPERTS, device="cuda"), top_k=TOP_K)
    stock, ours = (run(x, weights, ids).clone() for run in apply)
    equal = float((stock == ours).all(1).float().mean())
    stock_us, ours_us = medians(*(capture(lambda run=run: run(x, weights, ids), 10) for run in apply))
    return record("experts", [tokens, TOP_K, HIDDEN, INTER], "DeepGemmExperts", stock_us, ours_us, rows_equal=equal)


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


def main() -> None:
    """Bench both and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="put the records here, in place of older ones of these ops")
    args = parser.parse_args()
    os.environ.pop("VLLM_BATCH_INVARIANT", None)
    records = []
    apply = kernels()
    for run in (bench_router, lambda tokens: bench_experts(apply, tokens)):
        for tokens in TOKENS:
            records.append(run(tokens))
            print(json.dumps(records[-1]), flush=True)
            write_records(args.out, records)


if __name__ == "__main__":
    main()
