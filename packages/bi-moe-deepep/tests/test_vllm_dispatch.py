"""The dispatch hooks against stand-ins for vLLM's modules, with real slices over simulated ranks."""

from __future__ import annotations

import enum
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import ExpertCapacity, InProcessTransport, StagedDispatcher, Transport, vllm_dispatch
from bi_moe_deepep.vllm_dispatch import Staging, make_fp8_prepare_finalize, staged_apply
from bi_moe_deepep.vllm_experts import STAGED

MOE = "vllm.model_executor.layers.fused_moe"
EXPERTS, TOP_K, HIDDEN = 4, 2, 16


class Format(enum.Enum):
    BatchedExperts = 2


class Base:
    pass


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the stand-ins say; change it to change the deployment."""
    state = SimpleNamespace(tokens=None, handles=[])
    group = SimpleNamespace(world_size=2, device_group="device", cpu_group="cpu")

    def context() -> SimpleNamespace:
        return SimpleNamespace(dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(state.tokens)))

    def handle(arguments: dict[str, int]) -> str:
        state.handles.append(arguments)
        return "buffer"

    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {"get_ep_group": lambda: group},
        "vllm.forward_context": {
            "get_forward_context": context,
            "is_forward_context_available": lambda: state.tokens is not None,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        MOE: {},
        f"{MOE}.all2all_utils": {"get_ep_all2all_manager": lambda: SimpleNamespace(get_handle=handle)},
        f"{MOE}.modular_kernel": {
            "ExpertTokensMetadata": SimpleNamespace,
            "FusedMoEActivationFormat": Format,
            "FusedMoEPrepareAndFinalizeModular": Base,
        },
        f"{MOE}.utils": {
            "moe_kernel_quantize_input": lambda x, *others: (x, None),
            "normalize_batched_scales_shape": lambda scales, experts: scales,
        },
    }
    for name, content in modules.items():
        made = types.ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
    sys.modules[MOE].modular_kernel = sys.modules[f"{MOE}.modular_kernel"]  # type: ignore[attr-defined]
    vllm_dispatch._prepare_finalize_class.cache_clear()
    monkeypatch.setattr(vllm_dispatch, "TorchTransport", lambda *groups, **options: ("torch", groups, options))
    monkeypatch.setattr(vllm_dispatch, "DeepEPTransport", lambda buffer, numbers: ("deepep", buffer, numbers))
    return state


def moe(max_num_tokens: int = 1024, **marks: bool) -> SimpleNamespace:
    """Of a layer whose experts :func:`select_fp8_backend` has chosen, or another with other marks."""
    sizes = {"num_experts": 256, "experts_per_token": 6, "hidden_dim": 4096, "max_num_tokens": max_num_tokens}
    return SimpleNamespace(**sizes, **(marks or {STAGED: True}))


def stock(*arguments: Any, **keywords: Any) -> tuple[Any, ...]:
    return "stock", arguments, keywords


def test_nccl_takes_the_groups_own_communicators(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BI_EP_TRANSPORT", "nccl")
    made = make_fp8_prepare_finalize(stock)(moe(), "quant", None, allow_new_interface=True, use_monolithic=False)
    transport = ("torch", ("device",), {"control_group": "cpu", "timeout": 300.0, "verify": False})
    assert made.staging.transport == transport
    assert (made.max_num_tokens_per_rank(), made.num_dispatchers()) == (256, 2)
    assert made.activation_format is Format.BatchedExperts
    assert made.output_is_reduced()
    assert not made.supports_async()
    assert vllm.handles == []


def test_deepep_gets_a_buffer_for_one_slice(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BI_EP_TRANSPORT", raising=False)
    made = make_fp8_prepare_finalize(stock)(moe(max_num_tokens=100), "quant")
    assert made.staging.transport == ("deepep", "buffer", ("torch", ("cpu",), {"timeout": 300.0}))
    assert vllm.handles == [
        {
            "max_num_tokens_per_dp_rank": 128,
            "token_hidden_size": 4096,
            "num_ep_ranks": 2,
            "num_global_experts": 256,
            "num_local_experts": 128,
        }
    ]


def test_everything_else_is_vllms_own(vllm: SimpleNamespace) -> None:
    make = make_fp8_prepare_finalize(stock)
    for layer in (moe(**{STAGED: False}), moe(of_another_model=True)):
        arguments = layer, "quant", None
        assert make(*arguments, use_monolithic=True) == ("stock", arguments, {"use_monolithic": True})


def test_experts_in_another_order_are_refused(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BI_EP_TRANSPORT", "nccl")
    natural = torch.arange(256)
    make_fp8_prepare_finalize(stock)(moe(), "quant", (natural, natural, natural[:128]))
    with pytest.raises(ArgumentError, match="expert placement: expected linear"):
        make_fp8_prepare_finalize(stock)(moe(), "quant", (natural.flip(0), natural, natural[:128]))


def kernel(transport: Transport, calls: list[tuple[int, ...]], capacity: int) -> SimpleNamespace:
    """A layer whose expert ``e`` multiplies by ``e + 1.5``."""
    local = EXPERTS // transport.world_size
    factor = (torch.arange(local) + transport.rank * local + 1.5).bfloat16().view(-1, 1, 1)

    def fused_experts(**given: Any) -> torch.Tensor:
        calls.append(tuple(given["a1q"].shape))
        assert given["expert_map"] is None
        assert given["expert_tokens_meta"].expert_num_tokens.dtype == torch.int32
        return given["a1q"] * factor

    sizes = ExpertCapacity(num_experts=EXPERTS, top_k=TOP_K, world_size=transport.world_size, tokens_per_rank=capacity)
    config = SimpleNamespace(quant_dtype=None, per_act_token_quant=False, block_shape=[128, 128])
    return SimpleNamespace(
        prepare_finalize=SimpleNamespace(staging=Staging(transport, sizes)),
        fused_experts=SimpleNamespace(quant_config=config),
        _fused_experts=fused_experts,
    )


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].int()
    return x, ids, torch.rand(count, TOP_K, generator=generator)


def test_b47_b49_slices_follow_the_largest_rank_and_the_bits_follow_nothing(vllm: SimpleNamespace) -> None:
    batches = [tokens(21, 0), tokens(0, 1)]
    vllm.tokens = [21, 0]
    apply = staged_apply(stock)
    shapes: list[tuple[int, ...]] = []

    def program(transport: Transport) -> torch.Tensor:
        layer = kernel(transport, shapes, 8)
        x, ids, weights = batches[transport.rank]
        w1 = torch.empty(EXPERTS // transport.world_size, 2, 2)
        routed = [apply(layer, x, w1, w1, ids, weights, "silu", shared_experts="never called") for _ in range(2)]
        assert_bitwise_equal(*routed)  # the call that looks at the data, and the one that does not
        return routed[0]

    split = InProcessTransport(2).run(program)
    assert shapes == [(2, 16, HIDDEN)] * (2 * 2 * 3)
    assert split[1].shape == (0, HIDDEN)
    vllm.tokens = None
    batches = batches[:1]

    def whole(transport: Transport) -> torch.Tensor:
        layer = kernel(transport, [], 64)
        x, ids, weights = batches[0]
        return apply(layer, x, torch.empty(EXPERTS, 2, 2), None, ids, weights, activation="silu")

    assert_bitwise_equal(split[0], InProcessTransport(1).run(whole)[0])


def test_layers_without_staging_are_vllms_own(vllm: SimpleNamespace) -> None:
    layer = SimpleNamespace(prepare_finalize=object())
    assert staged_apply(stock)(layer, 1, 2, 3, 4, 5, 6, shared_experts=7) == (
        "stock",
        (layer, 1, 2, 3, 4, 5, 6),
        {"shared_experts": 7},
    )


def test_weights_on_the_input_are_refused(vllm: SimpleNamespace) -> None:
    def program(transport: Transport) -> None:
        x, ids, weights = tokens(2, 0)
        staged_apply(stock)(kernel(transport, [], 8), x, x, x, ids, weights, "silu", apply_router_weight_on_input=True)

    with pytest.raises(ArgumentError, match="apply_router_weight_on_input: expected False"):
        InProcessTransport(1).run(program)


def test_only_the_first_call_of_a_bucket_makes_the_host_wait() -> None:
    def program(transport: Transport) -> list[bool]:
        staging = Staging(
            transport, ExpertCapacity(num_experts=4, top_k=2, world_size=transport.world_size, tokens_per_rank=8)
        )
        made: list[StagedDispatcher] = [
            staging.dispatcher(5, capturing=False),
            staging.dispatcher(8, capturing=False),
            staging.dispatcher(9, capturing=True),
            staging.dispatcher(16, capturing=False),
            staging.dispatcher(0, capturing=False),
        ]
        assert made[1] is made[4]
        assert made[2] is made[3]
        return [dispatcher._verify for dispatcher in made]

    assert InProcessTransport(1).run(program) == [[True, False, False, False, False]]
