"""Router and expert hooks against stand-ins for vLLM's modules: who gets what, and what is refused with which words."""

from __future__ import annotations

import enum
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bi_kernels import Arch, ArgumentError, ContractError, UnsupportedArchError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import router_gate_logits, vllm_experts
from bi_moe_deepep.deep_gemm_proof import V4_FLASH
from bi_moe_deepep.vllm_model import deep_gemm_shapes
from bi_moe_deepep.vllm_router import gate_linear_class

MOE = "vllm.model_executor.layers.fused_moe"


class GateLinear(torch.nn.Module):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        out_dtype: torch.dtype | None = None,
        params_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(output_size, input_size).to(params_dtype), requires_grad=False)
        self.out_dtype = out_dtype

    def forward(self, x: torch.Tensor) -> tuple[str, None]:
        return "stock", None


class Format(enum.Enum):
    Standard = 1
    BatchedExperts = 2


class Backend(enum.Enum):
    DEEPGEMM = 1
    BATCHED_DEEPGEMM = 2


def module(name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The Hugging Face configuration of the model that is being built."""
    config = SimpleNamespace(model_type="deepseek_v4")
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", MOE, f"{MOE}.oracle"):
        monkeypatch.setitem(sys.modules, name, module(name))
    for made in (
        module("vllm.config", get_current_vllm_config_or_none=lambda: vllm_config),
        module(f"{MOE}.modular_kernel", FusedMoEActivationFormat=Format),
        module(f"{MOE}.oracle.fp8", Fp8MoeBackend=Backend),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return config


def test_v4_gates_have_one_path_for_every_number_of_tokens(model: SimpleNamespace) -> None:
    gate = gate_linear_class(GateLinear)(2048, 256, out_dtype=torch.float32)
    x = torch.randn(40, 2048).bfloat16()
    whole, bias = gate(x)
    assert bias is None
    assert whole.dtype == torch.float32
    for count in (1, 16, 17):
        assert_bitwise_equal(gate(x[:count])[0], router_gate_logits(x, gate.weight)[:count])
    assert isinstance(gate, GateLinear)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"bias": True}, "bias"),
        ({"out_dtype": torch.bfloat16}, "out_dtype"),
        ({"out_dtype": None}, "out_dtype"),
        ({"params_dtype": torch.float32}, "gate weight"),
        ({"output_size": 300}, "gate"),
        ({"input_size": 1024}, "gate"),
    ],
    ids=str,
)
def test_gates_that_cannot_be_aligned_are_refused(model: SimpleNamespace, change: dict[str, Any], name: str) -> None:
    arguments = {"input_size": 2048, "output_size": 256, "out_dtype": torch.float32} | change
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        gate_linear_class(GateLinear)(**arguments)


def test_gates_of_other_models_are_vllms_own(model: SimpleNamespace) -> None:
    model.model_type = "deepseek_v3"
    gate = gate_linear_class(GateLinear)(1000, 7, bias=True)
    assert type(gate) is GateLinear
    assert gate(torch.zeros(1, 1000)) == ("stock", None)


def parallel(**changes: Any) -> SimpleNamespace:
    settings: dict[str, Any] = {
        "tp_size": 1,
        "pcp_size": 1,
        "sp_size": 1,
        "ep_size": 1,
        "enable_eplb": False,
        "all2all_backend": "allgather_reducescatter",
        "use_all2all_kernels": False,
    }
    return SimpleNamespace(**(settings | changes))


def config(moe_parallel_config: SimpleNamespace | None = None, **changes: Any) -> SimpleNamespace:
    settings: dict[str, Any] = {
        "moe_backend": "auto",
        "is_lora_enabled": False,
        "hidden_dim": 4096,
        "intermediate_size_per_partition": 2048,
        "moe_parallel_config": moe_parallel_config or parallel(),
    }
    return SimpleNamespace(**(settings | changes))


class Experts:
    supported: tuple[bool, str | None] = True, None
    asked: Format

    @staticmethod
    def is_supported_config(cls: type[Experts], *arguments: Any) -> tuple[bool, str | None]:
        cls.asked = arguments[-1]
        return cls.supported


@pytest.fixture
def experts(model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> tuple[type[Experts], type[Experts]]:
    """A Hopper GPU whose DeepGEMM has passed, and the two classes."""
    classes = type("Contiguous", (Experts,), {}), type("Batched", (Experts,), {})
    monkeypatch.setattr(vllm_experts, "expert_classes", lambda: classes)
    monkeypatch.setattr(vllm_experts, "_proof", lambda hidden, intermediate: [])
    monkeypatch.setattr(vllm_experts, "detect_arch", lambda device: Arch.SM90)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("BI_EP_TRANSPORT", raising=False)
    return classes


def stock(*arguments: Any) -> str:
    return "stock"


def test_v4_takes_deep_gemm(experts: tuple[type[Experts], type[Experts]], monkeypatch: pytest.MonkeyPatch) -> None:
    select = vllm_experts.select_fp8_backend(stock)
    alone = config()
    assert select(alone, "w", "a") == (Backend.DEEPGEMM, experts[0])
    assert experts[0].asked is Format.Standard
    staged = parallel(ep_size=2, use_all2all_kernels=True, all2all_backend="deepep_low_latency")
    one_of_two = config(staged)
    assert select(one_of_two, "w", "a") == (Backend.BATCHED_DEEPGEMM, experts[1])
    assert experts[1].asked is Format.BatchedExperts
    # What a reload finds when it makes the kernel again, with no current configuration.
    assert [getattr(layer, vllm_experts.STAGED) for layer in (alone, one_of_two)] == [False, True]
    monkeypatch.setenv("BI_EP_TRANSPORT", "nccl")
    staged.all2all_backend = "allgather_reducescatter"
    assert select(config(staged), "w", "a", False) == (Backend.BATCHED_DEEPGEMM, experts[1])


def test_other_models_keep_vllms_choice(experts: tuple[type[Experts], type[Experts]], model: SimpleNamespace) -> None:
    model.model_type = "qwen3_moe"
    other = config(parallel(tp_size=8))
    assert vllm_experts.select_fp8_backend(stock)(other, "w", "a") == "stock"
    assert not hasattr(other, vllm_experts.STAGED)
    assert vllm_experts.select_mxfp4_backend(stock)(config()) == "stock"


def test_everything_that_stands_against_it_is_listed_at_once(
    experts: tuple[type[Experts], type[Experts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BI_EP_TRANSPORT", "mpi")
    monkeypatch.setattr(vllm_experts, "detect_arch", lambda device: Arch.SM100)
    experts[1].supported = False, "kernel does not support LoRA"
    bad = config(
        parallel(tp_size=2, pcp_size=2, sp_size=2, ep_size=4, enable_eplb=True, use_all2all_kernels=True),
        moe_backend="triton",
        is_lora_enabled=True,
        hidden_dim=4000,
        intermediate_size_per_partition=100,
    )
    with pytest.raises(ContractError) as caught:
        vllm_experts.select_fp8_backend(stock)(bad, "w", "a")
    assert [blocker.subject.rpartition(": ")[2] for blocker in caught.value.blockers] == [
        "moe_backend",
        "tensor parallel size",
        "context parallel size",
        "sequence parallel size",
        "enable_eplb",
        "enable_lora",
        "BI_EP_TRANSPORT",
        "all2all_backend",
        "width of an expert",
        "hidden_size",
        "GPU",
        "DeepGEMM experts",
    ]


def test_experts_shared_by_tensor_parallel_ranks_are_refused(experts: tuple[type[Experts], type[Experts]]) -> None:
    with pytest.raises(ContractError, match="expert parallel size: expected data parallel = expert parallel; found 2"):
        vllm_experts.select_fp8_backend(stock)(config(parallel(ep_size=2)), "w", "a")


def test_what_the_proof_found_stops_the_model(
    experts: tuple[type[Experts], type[Experts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = vllm_experts._blocker("deep_gemm.m_grouped_masked", "equal bits", "position 3 of 33 differs", "Replace it.")
    monkeypatch.setattr(vllm_experts, "_proof", lambda hidden, intermediate: [found] * (hidden == 4096))
    with pytest.raises(ContractError, match="position 3 of 33 differs"):
        vllm_experts.select_fp8_backend(stock)(config(), "w", "a")


def test_deep_gemm_is_proven_on_the_models_own_shapes(model: SimpleNamespace) -> None:
    vars(model).update(
        hidden_size=2048,
        moe_intermediate_size=256,
        num_attention_heads=64,
        head_dim=512,
        q_lora_rank=512,
        o_groups=8,
        o_lora_rank=256,
        index_n_heads=64,
        index_head_dim=128,
    )
    shapes = deep_gemm_shapes()
    assert shapes.experts == ((512, 2048), (2048, 256))
    assert shapes.dense == (*shapes.experts, (1024, 2048), (32768, 512), (2048, 2048), (8192, 512))
    model.model_type = "qwen3_moe"
    assert deep_gemm_shapes() is V4_FLASH


def test_fp4_experts_are_refused_by_name(model: SimpleNamespace) -> None:
    with pytest.raises(UnsupportedArchError, match="FP4 experts: expected expert_dtype fp8, got fp4"):
        vllm_experts.select_mxfp4_backend(stock)(config())
