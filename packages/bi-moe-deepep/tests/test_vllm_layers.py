"""The hooks inside a real vLLM 0.26 on a Hopper GPU, with the layers of DeepSeek-V4-Flash in their real sizes."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bi_kernels.testing import assert_bitwise_equal, first_difference
from bi_moe_deepep import ExpertCapacity, InProcessTransport, Transport, select_experts

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings

EXPERTS, TOP_K, HIDDEN, INTER, LIMIT = 256, 6, 4096, 2048, 10.0
TOKENS = 8192
FLASH = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTER,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """This package's patches and bi-kernels' finished ones, and a configuration of a DeepSeek-V4 on one rank."""
    os.environ.update(VLLM_BATCH_INVARIANT="1", VLLM_USE_FLASHINFER_SAMPLER="0", BI_PARTIAL="1")
    from bi_kernels.runtime import hooks
    from bi_kernels.vllm_hook import PLAN as KERNELS
    from bi_moe_deepep.vllm_hook import PLAN

    plans = (KERNELS, PLAN)
    for plan in plans:
        hooks.activate(plan)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.utils import deep_gemm
    from vllm.v1.worker.workspace import init_workspace_manager

    deep_gemm._lazy_init()
    deep_gemm.DeepGemmQuantScaleFMT.init_oracle_cache()
    config = VllmConfig()
    with set_current_vllm_config(config):
        store = tmp_path_factory.mktemp("rendezvous") / "store"  # no port: tests run side by side
        init_distributed_environment(1, 0, f"file://{store}", 0, "nccl")
        initialize_model_parallel(1, 1)
        config.model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="deepseek_v4", **FLASH))
        init_workspace_manager(torch.device("cuda", 0))
        yield config
    for plan in reversed(plans):
        hooks.deactivate(plan)


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(EXPERTS, n, k, dtype=torch.float8_e4m3fn, device="cuda")
    for part in codes.split(16):
        part.copy_(torch.randn(part.shape, device="cuda").mul_(64))
    powers = torch.randint(-14, -11, (EXPERTS, n // 128, k // 128), device="cuda")
    return codes, torch.exp2(powers.float())


@pytest.fixture(scope="module")
def weights() -> Weights:
    return (*weight(2 * INTER, HIDDEN), *weight(HIDDEN, INTER))


def routing(count: int, skew: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(count, EXPERTS, device="cuda") + skew * torch.linspace(1, 0, EXPERTS, device="cuda")
    topk_weights, ids = select_experts(logits, top_k=TOP_K, routed_scaling_factor=1.5)
    return topk_weights, ids


def moe_config(**changes: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    settings: dict[str, Any] = {
        "num_experts": EXPERTS,
        "experts_per_token": TOP_K,
        "hidden_dim": HIDDEN,
        "intermediate_size": INTER,
        "num_local_experts": EXPERTS,
        "num_logical_experts": EXPERTS,
        "activation": MoEActivation.SILU,
        "device": "cuda",
        "routing_method": RoutingMethodType.DeepseekV4,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.bfloat16,
        "max_num_tokens": TOKENS,
        "swiglu_limit": LIMIT,
    }
    return FusedMoEConfig(**(settings | changes))


def quant_config(backend: Any, w: Weights) -> Any:
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import make_fp8_moe_quant_config

    return make_fp8_moe_quant_config(backend, w[1], w[3], None, None, block_shape=[128, 128], swiglu_limit=LIMIT)


@pytest.fixture(scope="module")
def layer(vllm_config: Any, weights: Weights) -> Callable[..., torch.Tensor]:
    """The expert layer as vLLM builds and calls it: selected, made and applied by its own functions."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import make_fp8_moe_kernel
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

    config = moe_config()
    backend, cls = fp8.select_fp8_moe_backend(config, kFp8Static128BlockSym, kFp8Dynamic128Sym)
    assert (backend.name, cls.__name__) == ("DEEPGEMM", "BatchInvariantDeepGemmExperts")
    kernel = make_fp8_moe_kernel(quant_config(backend, weights), config, cls, backend)

    def apply(x: torch.Tensor, topk_weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return kernel.apply(
            x, weights[0], weights[2], topk_weights, ids, MoEActivation.SILU, EXPERTS, None, False
        )  # fmt: skip

    return apply


def test_the_patches_are_in_place(vllm_config: Any) -> None:
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization import fp8
    from vllm.utils import deep_gemm

    from bi_kernels.runtime import hooks
    from bi_moe_deepep import deep_gemm as ours

    assert op_registry_oot["GateLinear"].__module__ == "bi_moe_deepep.vllm_router"
    for function in (
        fp8.select_fp8_moe_backend,
        oracle.maybe_make_prepare_finalize,
        modular_kernel.FusedMoEKernelModularImpl.apply,
    ):
        assert function.__code__.co_filename.endswith(("vllm_experts.py", "vllm_dispatch.py"))
    assert deep_gemm.supports_deep_gemm_batch_invariance is ours.supports_deep_gemm_batch_invariance
    assert set(hooks.active_records()) == {"bi-kernels", "bi-moe-deepep"}


def test_smoke_one_call_of_each_product(vllm_config: Any) -> None:
    """First, because a kernel that hangs should do so in a test with little in it. Also says what compiling takes."""
    from bi_moe_deepep.deep_gemm_proof import DeepGemmShapes, deep_gemm_self_tests, load_products

    shapes = DeepGemmShapes(dense=((512, 2048),), experts=((512, 2048),))
    for test in deep_gemm_self_tests(load_products(), shapes):
        started = time.monotonic()
        rows = test.rows(2, torch.device("cuda", 0))
        out = test.op(*rows)
        torch.cuda.synchronize()
        assert isinstance(out, torch.Tensor)
        assert torch.isfinite(out).all()
        print(f"{test.name}: first call {time.monotonic() - started:.1f} s", flush=True)


def test_gate_has_one_order_for_every_number_of_tokens(vllm_config: Any) -> None:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    with torch.device("cuda"):
        gate = GateLinear(HIDDEN, EXPERTS, out_dtype=torch.float32, params_dtype=torch.bfloat16, prefix="gate")
    gate.weight.data.copy_(torch.randn(EXPERTS, HIDDEN, device="cuda") / 64)
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    every, bias = gate(x)
    assert bias is None
    assert every.dtype == torch.float32
    for count in (1, 2, 15, 16, 17, 32, 33, 64, 256, 257, 1024, 4096):
        assert_bitwise_equal(gate(x[:count])[0], every[:count], f"M={count}")
    # The twin: the stock layer changes kernels with the number of tokens.
    stock = type(gate).__mro__[1]
    assert stock.__name__ == "GateLinear"
    theirs = [stock.forward(gate, x[:count])[0] for count in (16, TOKENS)]
    assert first_difference(theirs[0], theirs[1][:16]) is not None


def test_gates_of_other_models_are_vllms_own(vllm_config: Any) -> None:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    hf_config = vllm_config.model_config.hf_config
    hf_config.model_type = "deepseek_v3"
    with torch.device("cuda"):
        gate = GateLinear(HIDDEN, EXPERTS, out_dtype=torch.float32, params_dtype=torch.bfloat16, prefix="gate")
    hf_config.model_type = "deepseek_v4"
    assert type(gate) is GateLinear


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_vllms_choice_of_experts_is_by_row_and_ties_go_to_the_lower_expert(vllm_config: Any, biased: bool) -> None:
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import fused_topk_bias

    bias = torch.randn(EXPERTS, device="cuda") * 0.01 if biased else torch.zeros(EXPERTS, device="cuda")
    hidden = torch.empty(TOKENS, 1, device="cuda")
    for logits in (
        torch.randn(TOKENS, EXPERTS, device="cuda"),
        torch.randint(-2, 3, (TOKENS, EXPERTS), device="cuda").float(),
    ):
        every = fused_topk_bias(hidden, logits, "sqrtsoftplus", bias, TOP_K, True, routed_scaling_factor=1.5)
        for count in (1, 2, 17, 64, 1000):
            few = fused_topk_bias(
                hidden[:count], logits[:count], "sqrtsoftplus", bias, TOP_K, True, routed_scaling_factor=1.5
            )
            for have, want in zip(few, every, strict=True):
                assert_bitwise_equal(have, want[:count])
        weights, ids = select_experts(logits, top_k=TOP_K, bias=bias, routed_scaling_factor=1.5)
        same = (ids == every[1]).all(1)
        # Scores in their last bits may change places; equal logits with equal bias may not.
        assert same.float().mean() > (0.999 if biased else 0.9999)
        assert (weights[same] - every[0][same]).abs().max() < 1e-6


@pytest.mark.parametrize("skew", [0.0, 4.0, 30.0], ids=lambda s: f"skew={s}")
def test_expert_layer_has_the_same_bits_for_every_number_of_tokens(layer: Any, skew: float) -> None:
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    topk_weights, ids = routing(TOKENS, skew)
    every = layer(x, topk_weights, ids).clone()
    assert every.float().std() > 1e-3
    for count in (1, 2, 16, 17, 64, 128, 129, 257, 1024, 4096, 8192):
        for first in {0, min(3001, TOKENS - count)}:
            part = slice(first, first + count)
            some = layer(x[part], topk_weights[part], ids[part])
            assert_bitwise_equal(some, every[part], f"M={count} from {first}, skew {skew}")
    # The twin adds the slots in another order where there are more than 16 tokens.
    flipped = layer(x, topk_weights.flip(1).contiguous(), ids.flip(1).contiguous())
    assert first_difference(flipped[:16], layer(x[:16], topk_weights[:16], ids[:16])) is not None


def test_neighbours_and_their_values_do_not_matter(layer: Any) -> None:
    x = torch.randn(300, HIDDEN, device="cuda").bfloat16()
    topk_weights, ids = routing(300, 4.0)
    alone = layer(x[7:8], topk_weights[7:8], ids[7:8]).clone()
    for value in (0.0, 3e38, torch.nan):
        other = torch.full_like(x, value)
        other[7] = x[7]
        assert_bitwise_equal(layer(other, topk_weights, ids)[7:8], alone, f"neighbours {value}")


@pytest.mark.parametrize("limit", [1 << 30, -1], ids=["packed", "contiguous"])
@pytest.mark.parametrize("count", [1, 64, 1000], ids=lambda n: f"M={n}")
def test_expert_layer_in_a_graph(layer: Any, count: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bi_moe_deepep.vllm_experts.PACKED_TOKENS", limit)
    x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
    topk_weights, ids = routing(count, 0.0)
    layer(x, topk_weights, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, topk_weights, ids)
    for seed in range(3):
        x.copy_(torch.randn(count, HIDDEN, device="cuda"))
        new_weights, new_ids = routing(count, float(seed))
        topk_weights.copy_(new_weights), ids.copy_(new_ids)
        graph.replay()
        replayed = out.clone()
        assert_bitwise_equal(replayed, layer(x, topk_weights, ids))


def both_layouts(
    layer: Any, monkeypatch: pytest.MonkeyPatch, *tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output with packed rows and with DeepGEMM's padded ones, whatever the number of tokens."""
    outputs = []
    for limit in (1 << 30, -1):
        monkeypatch.setattr("bi_moe_deepep.vllm_experts.PACKED_TOKENS", limit)
        outputs.append(layer(*tokens).clone())
    return outputs[0], outputs[1]


@pytest.mark.parametrize("skew", [0.0, 4.0, 30.0], ids=lambda s: f"skew={s}")
def test_packed_rows_have_the_bits_of_padded_ones(layer: Any, skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    topk_weights, ids = routing(TOKENS, skew)
    for count in (1, 2, 7, 8, 9, 16, 31, 33, 64, 127, 128, 129, 256, 500, 682, 683, 1024, 2047, 2048, 4096, 8192):
        packed, padded = both_layouts(layer, monkeypatch, x[:count], topk_weights[:count], ids[:count])
        assert_bitwise_equal(packed, padded, f"M={count}, skew {skew}")
    assert packed.float().std() > 1e-3


@pytest.mark.parametrize("count", [2, 5, 64, 129, 1024, 2048], ids=lambda n: f"M={n}")
def test_packed_rows_of_one_set_of_experts_and_of_slots_without_any(
    layer: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
    topk_weights, ids = routing(count, 0.0)
    same = torch.tensor([255, 0, 17, 3, 128, 64], dtype=ids.dtype, device="cuda").expand(count, TOP_K).contiguous()
    some = torch.where(torch.rand(ids.shape, device="cuda") < 0.3, -1, ids)
    some[count // 2] = -1
    for chosen in (some, same):
        packed, padded = both_layouts(layer, monkeypatch, x, topk_weights, chosen)
        assert_bitwise_equal(packed, padded)
        assert packed[count // 2].any() == (chosen is same)
    # The twin: one slot of one token has another weight.
    topk_weights[0, -1] *= 1.0625
    assert first_difference(both_layouts(layer, monkeypatch, x, topk_weights, same)[1], packed) is not None


@pytest.mark.parametrize(
    ("shares", "tokens_per_rank"),
    [([150, 150], 64), ([300, 0], 192), ([75, 75, 75, 75], 64), ([1, 0, 299, 0], 128)],
    ids=str,
)
def test_staged_ranks_have_the_bits_of_one_rank(
    layer: Any, weights: Weights, shares: list[int], tokens_per_rank: int
) -> None:
    """Masked against contiguous, EP 2 and 4 against 1: vLLM's kernel with our apply, over simulated ranks."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    from bi_moe_deepep.vllm_dispatch import Staging, _prepare_finalize_class
    from bi_moe_deepep.vllm_experts import expert_classes

    world, count = len(shares), sum(shares)
    x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
    topk_weights, ids = routing(count, 4.0)
    want = layer(x, topk_weights, ids).clone()
    capacity = ExpertCapacity(num_experts=EXPERTS, top_k=TOP_K, world_size=world, tokens_per_rank=tokens_per_rank)
    batched = expert_classes()[1]

    def program(transport: Transport) -> torch.Tensor:
        mine: Any = tuple(part.chunk(world)[transport.rank] for part in weights)
        config = moe_config(num_local_experts=EXPERTS // world)
        experts = batched(config, quant_config(Fp8MoeBackend.BATCHED_DEEPGEMM, mine), tokens_per_rank, world)
        assert experts.estimate_expected_m(EXPERTS, world * tokens_per_rank, TOP_K) == capacity.expected_m
        staging = Staging(transport, capacity)
        # Every simulated rank has the same number of slices, as real ones have from the step's agreement.
        staging_dispatcher = staging.dispatcher
        staging.dispatcher = lambda tokens, capturing: staging_dispatcher(max(shares), capturing=capturing)  # type: ignore[method-assign, assignment, misc]
        impl = mk.FusedMoEKernelModularImpl(_prepare_finalize_class()(staging), experts)
        fused = impl._fused_experts
        impl._fused_experts = lambda **given: fused(**given).clone()  # simulated ranks share one workspace
        part = [tensor.split(shares)[transport.rank] for tensor in (x, ids, topk_weights)]
        return impl.apply(part[0], mine[0], mine[2], part[1], part[2], MoEActivation.SILU, EXPERTS)

    have = torch.cat(InProcessTransport(world).run(program))
    assert_bitwise_equal(have, want, f"{shares}, {tokens_per_rank} per slice")


def test_what_v4_cannot_have_is_refused_and_others_keep_theirs(vllm_config: Any) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.quantization import fp8, mxfp4
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

    from bi_kernels import ContractError, UnsupportedArchError

    keys = kFp8Static128BlockSym, kFp8Dynamic128Sym
    parallel = dataclasses.replace(FusedMoEParallelConfig.make_no_parallel(), tp_size=2)
    with pytest.raises(ContractError, match="tensor parallel size: expected 1; found 2"):
        fp8.select_fp8_moe_backend(moe_config(moe_parallel_config=parallel), *keys)
    with pytest.raises(UnsupportedArchError, match="FP4 experts"):
        mxfp4.select_deepseek_v4_mxfp4_moe_backend(moe_config())
    hf_config = vllm_config.model_config.hf_config
    hf_config.model_type = "deepseek_v3"
    try:
        backend, cls = fp8.select_fp8_moe_backend(moe_config(swiglu_limit=None), *keys)
    finally:
        hf_config.model_type = "deepseek_v4"
    assert (backend.name, cls.__name__) == ("TRITON", "TritonExperts")


def test_deep_gemm_is_proven_on_the_shapes_of_v4_flash(vllm_config: Any) -> None:
    from vllm.utils.deep_gemm import enable_deep_gemm_batch_invariance, supports_deep_gemm_batch_invariance

    from bi_moe_deepep.deep_gemm_proof import V4_FLASH, deep_gemm_self_tests, load_products, prove_deep_gemm

    started = time.monotonic()
    reports = prove_deep_gemm(V4_FLASH)
    cold = time.monotonic() - started
    started = time.monotonic()
    assert supports_deep_gemm_batch_invariance()
    warm = time.monotonic() - started
    assert not supports_deep_gemm_batch_invariance(fp4_contiguous=True)
    enable_deep_gemm_batch_invariance()
    shapes = [test.shape_key for test in deep_gemm_self_tests(load_products(), V4_FLASH)]
    matrix = [
        {"test": report.name, "shape": shape, "comparisons": report.comparisons, "found": report.found}
        for report, shape in zip(reports, shapes, strict=True)
    ]
    record = {"seconds": round(cold, 1), "seconds_again": round(warm, 2), "matrix": matrix}
    Path(os.environ.get("OUT", "."), "deep_gemm.json").write_text(json.dumps(record, indent=1))
    assert len(reports) == 14
