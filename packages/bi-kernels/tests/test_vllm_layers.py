"""The hook inside a real vLLM 0.26 on a Hopper GPU: its expert layers on the fused op, and what they are equal to."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's own warnings

LIMIT = 10.0
EXPERTS, CAPACITY, HIDDEN, INTER = 4, 128, 512, 512


@pytest.fixture(scope="module")
def hooked():
    """The plan's finished patches, activated in this process before vLLM's modules are imported, as a plug-in would."""
    os.environ.update(VLLM_BATCH_INVARIANT="1", VLLM_USE_FLASHINFER_SAMPLER="0", BI_PARTIAL="1")
    from bi_kernels.runtime import hooks
    from bi_kernels.vllm_hook import PLAN

    record = hooks.activate(PLAN)
    from vllm.utils import deep_gemm

    deep_gemm._lazy_init()
    deep_gemm.DeepGemmQuantScaleFMT.init_oracle_cache()
    assert deep_gemm.DeepGemmQuantScaleFMT.from_oracle().name == "FLOAT32_CEIL_UE8M0"
    yield record
    hooks.deactivate(PLAN)


@pytest.fixture(scope="module")
def v4_config(hooked, tmp_path_factory):
    """vLLM as it is while it builds a DeepSeek-V4 on one rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    config = VllmConfig()
    with set_current_vllm_config(config):
        store = tmp_path_factory.mktemp("rendezvous") / "store"  # no port: tests run side by side
        init_distributed_environment(1, 0, f"file://{store}", 0, "nccl")
        initialize_model_parallel(1, 1)
        hf_config = SimpleNamespace(model_type="deepseek_v4")
        config.model_config = SimpleNamespace(hf_config=hf_config, head_dtype=torch.bfloat16)
        yield config


@pytest.fixture(scope="module")
def lm_head(v4_config):
    """A processor of logits and a head, for a vocabulary that vLLM pads to that of V4."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    with torch.device("cuda"):
        processor = LogitsProcessor(129_250)
        head = ParallelLMHead(129_250, 4096, params_dtype=torch.bfloat16, prefix="lm_head")
    assert head.weight.shape == (129_280, 4096)
    head.weight.data.normal_().mul_(2.0**-6)
    return processor, head


def unfused(x, limit=LIMIT):
    """vLLM's own chain, which shared experts keep: activation to bfloat16, then the dense layers' quantiser."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    act = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    if limit is None:
        torch.ops._C.silu_and_mul(act, x)
    else:
        torch.ops._C.silu_and_mul_with_clamp(act, x, limit, 1.0, 0.0)
    return per_token_group_quant_fp8(act, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=True)


def quant_config(limit=LIMIT, **scales):
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    one = torch.ones(1, device="cuda")
    return fp8_w8a8_moe_quant_config(
        scales.get("w1", one), scales.get("w2", one), block_shape=[128, 128], gemm1_clamp_limit=limit
    )


def bare(cls, config, **attributes):
    """An instance with what the patched methods look at: a real constructor wants a parallel state."""
    experts = object.__new__(cls)
    experts.quant_config = config
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


def contiguous_experts(limit=LIMIT):
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts

    return bare(DeepGemmExperts, quant_config(limit), mxfp8=False, gemm1_clamp_limit=limit)


def silu():
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return MoEActivation.SILU


def equal(got, want, label=""):
    from bi_kernels.testing import assert_bitwise_equal

    assert_bitwise_equal(got.contiguous(), want.contiguous(), label)


def test_the_patches_are_in_place(hooked):
    from vllm.model_executor.layers.fused_moe.experts import batched_deep_gemm_moe, deep_gemm_moe
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    from bi_kernels import vllm_publish

    assert deep_gemm_moe.DeepGemmExperts._act_mul_quant.__module__ == "bi_kernels.vllm_experts"
    assert batched_deep_gemm_moe.BatchedDeepGemmExperts.apply.__module__ == "bi_kernels.vllm_experts"
    for name in vllm_publish.__all__:
        assert getattr(fp8_utils, name) is getattr(vllm_publish, name)
    assert fp8_utils.is_batch_invariant_quant_kernel_enabled()
    fp8_utils.require_batch_invariant_quant_kernel()
    assert len(hooked.patches) == 9


def test_batch_invariant_log_softmax_is_ours(hooked):
    from vllm.model_executor.layers.batch_invariant import _log_softmax_batch_invariant

    from bi_kernels import log_softmax

    logits = torch.randn(5, 129_280, device="cuda") * 3
    equal(_log_softmax_batch_invariant(logits, -1, False), log_softmax(logits))
    equal(_log_softmax_batch_invariant(logits.bfloat16(), 1, True), log_softmax(logits.bfloat16().float()))


def test_logits_are_the_fixed_order_product(lm_head):
    from vllm.models.deepseek_v4.nvidia.model import DeepseekV4ForCausalLM

    from bi_kernels import fixed_order_mm

    processor, head = lm_head
    model = SimpleNamespace(logits_processor=processor, lm_head=head)
    x = torch.randn(2100, 4096, device="cuda").bfloat16()
    want = fixed_order_mm(x, head.weight, out_dtype=torch.bfloat16)[:, :129_250]
    for rows in (1, 8, 32, 33, 64, 65, 128, 256, 1025, 2100):
        # What vLLM's runner calls for sampled rows and for prompt logprobs, and what a trainer calls.
        logits = DeepseekV4ForCausalLM.compute_logits(model, x[:rows])
        assert logits.dtype == torch.bfloat16
        equal(logits, want[:rows], f"{rows} rows")


def test_logits_of_a_row_do_not_depend_on_the_batch(lm_head):
    from bi_kernels.testing import assert_batch_invariant, must_detect

    processor, head = lm_head
    x = torch.randn(3, 4096, device="cuda").bfloat16()
    assert_batch_invariant(lambda rows: processor(head, rows), x, batch_sizes=(1, 2, 17, 32, 33, 64, 65, 129))

    def by_batch(rows):
        halves = zip(rows.float().chunk(min(2, len(rows)), 1), head.weight.chunk(min(2, len(rows)), 1), strict=True)
        return sum((a @ b[:2048].float().T).bfloat16() for a, b in halves)

    must_detect(by_batch, x, batch_sizes=(2, 17), neighbours=("zero",))


def test_another_model_keeps_vllms_logits(v4_config):
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    v4_config.model_config.hf_config.model_type = "deepseek_v3"
    try:
        assert type(LogitsProcessor(1000)) is LogitsProcessor
    finally:
        v4_config.model_config.hf_config.model_type = "deepseek_v4"
    assert type(LogitsProcessor(1000)).__module__ == "bi_kernels.vllm_lm_head"


def test_a_model_is_checked_before_it_is_built(hooked):
    from vllm.models.deepseek_v4.nvidia.model import DeepseekV4ForCausalLM

    from bi_kernels import HookError, vllm_model_check
    from bi_kernels.testing.hooks import plain_config

    shapes = SimpleNamespace(
        expert_dtype="fp8",
        hidden_size=4096,
        n_routed_experts=256,
        moe_intermediate_size=2048,
        index_n_heads=64,
        vocab_size=129_280,
    )
    config = plain_config(model_config__hf_config=shapes)
    assert vllm_model_check.model_blockers(config) == []
    config.lora_config = SimpleNamespace(max_lora_rank=8)
    config.model_config.head_dtype = torch.float32
    with pytest.raises(HookError, match=r"(?s)LoRA.*float32 head"):
        DeepseekV4ForCausalLM(vllm_config=config)


@pytest.mark.parametrize("limit", [None, LIMIT], ids=lambda v: f"limit={v}")
def test_contiguous_experts_equal_the_unfused_chain(hooked, limit):
    experts = contiguous_experts(limit)
    for rows in (128, 384, 4096):
        x = (torch.randn(rows, 2 * 2048, device="cuda") * 4).bfloat16()
        out = torch.empty(rows, 2048, dtype=torch.float8_e4m3fn, device="cuda")
        q, s = experts._act_mul_quant(x, out, silu())
        assert q.data_ptr() == out.data_ptr()
        assert s.stride() == (1, rows)
        want_q, want_s = unfused(x, limit)
        equal(q, want_q), equal(s, want_s)


def test_published_callable_equals_the_unfused_chain(hooked):
    from vllm.model_executor.layers.quantization.utils.fp8_utils import (
        fused_silu_mul_per_token_group_quant_fp8 as fused,
    )

    x = (torch.randn(300, 2 * 1024, device="cuda") * 4).bfloat16()
    want_q, want_s = unfused(x)
    for arguments in (
        {"clamp_limit": LIMIT},
        {"swiglu_limit": LIMIT, "use_ue8m0": True},
        {"clamp_limit": LIMIT, "round_scale": True},
    ):
        q, s = fused(x, **arguments)
        equal(q, want_q), equal(s, want_s)
    with pytest.raises(ValueError, match="clamp_limit: expected one limit"):
        fused(x, clamp_limit=10.0, swiglu_limit=7.0)


def test_batched_experts_equal_gemm_chain_gemm(hooked):
    from vllm.model_executor.layers.fused_moe.experts.batched_deep_gemm_moe import BatchedDeepGemmExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata
    from vllm.utils.deep_gemm import fp8_m_grouped_gemm_nt_masked, per_block_cast_to_fp8

    def weights(n, k):
        parts = [
            per_block_cast_to_fp8(torch.randn(n, k, device="cuda") / k**0.5, use_ue8m0=True) for _ in range(EXPERTS)
        ]
        return torch.stack([q for q, _ in parts]), torch.stack([s for _, s in parts])

    w1, s1 = weights(2 * INTER, HIDDEN)
    w2, s2 = weights(HIDDEN, INTER)
    hidden = (torch.randn(EXPERTS * CAPACITY, HIDDEN, device="cuda") * 30).bfloat16()
    from bi_kernels import ScaleFormat, per_token_group_quant_fp8

    a1, a1s = (t.cuda() for t in per_token_group_quant_fp8(hidden.cpu(), scale_format=ScaleFormat.FLOAT32_CEIL_UE8M0))
    a1 = a1.view(EXPERTS, CAPACITY, HIDDEN)
    a1s = a1s.view(EXPERTS, CAPACITY, -1).mT.contiguous().mT
    counts = torch.tensor([128, 0, 1, 77], dtype=torch.int32, device="cuda")
    experts = bare(BatchedDeepGemmExperts, quant_config(w1=s1, w2=s2), max_num_tokens=CAPACITY, num_dispatchers=1)
    experts.estimate_expected_m = lambda **kwargs: CAPACITY
    output = torch.full((EXPERTS, CAPACITY, HIDDEN), 7.0, dtype=torch.bfloat16, device="cuda")
    workspace = torch.empty(EXPERTS * CAPACITY * 2 * INTER, dtype=torch.bfloat16, device="cuda")
    top_k = torch.zeros(CAPACITY, 6, dtype=torch.int64, device="cuda")
    experts.apply(
        output, a1, w1, w2, top_k.float(), top_k, silu(), EXPERTS, None, a1s, None, workspace, workspace,
        ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None), False,
    )  # fmt: skip

    gate_up = torch.zeros(EXPERTS, CAPACITY, 2 * INTER, dtype=torch.bfloat16, device="cuda")
    fp8_m_grouped_gemm_nt_masked((a1, a1s), (w1, s1), gate_up, counts, CAPACITY)
    # Every group of the clamped model must differ from the unclamped one somewhere, or the clamp is not tested.
    assert (gate_up.abs() > LIMIT).any()
    q, s = unfused(gate_up.view(-1, 2 * INTER))
    want = torch.zeros_like(output)
    s = s.reshape(EXPERTS, CAPACITY, -1).mT.contiguous().mT
    fp8_m_grouped_gemm_nt_masked((q.view(EXPERTS, CAPACITY, INTER), s), (w2, s2), want, counts, CAPACITY)
    for expert, count in enumerate(counts.tolist()):
        equal(output[expert, :count], want[expert, :count], f"expert {expert}")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"gemm1_alpha": 1.7}, "gemm1_alpha: expected 1"),
        ({"gemm1_beta": 1.0}, "gemm1_beta: expected 0"),
        ({"block_shape": [64, 64]}, "block_shape"),
    ],
    ids=str,
)
def test_what_the_op_does_not_compute_is_refused(hooked, change, match):
    experts = contiguous_experts()
    config = SimpleNamespace(gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=LIMIT, block_shape=[128, 128])
    experts.quant_config = SimpleNamespace(**(vars(config) | change))
    x = torch.zeros(128, 512, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(128, 256, dtype=torch.float8_e4m3fn, device="cuda")
    with pytest.raises(ValueError, match=match):
        experts._act_mul_quant(x, out, silu())


def test_other_activations_mxfp8_scales_and_fp4_are_refused(hooked, monkeypatch):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmFP4Experts
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT

    from bi_kernels import UnsupportedArchError

    experts = contiguous_experts()
    x = torch.zeros(128, 512, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(128, 256, dtype=torch.float8_e4m3fn, device="cuda")
    with pytest.raises(ValueError, match=r"activation: expected MoEActivation\.SILU"):
        experts._act_mul_quant(x, out, MoEActivation.SWIGLUSTEP)
    with pytest.raises(ValueError, match="x: expected dtype bfloat16"):
        experts._act_mul_quant(x.half(), out, silu())
    experts.mxfp8 = True
    with pytest.raises(ValueError, match="mxfp8"):
        experts._act_mul_quant(x, out, silu())
    experts.mxfp8 = False
    monkeypatch.setattr(DeepGemmQuantScaleFMT, "_oracle_cache", DeepGemmQuantScaleFMT.FLOAT32)
    with pytest.raises(ValueError, match="scale format: expected FLOAT32_CEIL_UE8M0, got FLOAT32"):
        experts._act_mul_quant(x, out, silu())
    with pytest.raises(UnsupportedArchError, match="FP4 experts"):
        DeepGemmFP4Experts._act_mul_quant(None, x, out, silu())


@pytest.mark.parametrize("limit", [None, LIMIT], ids=lambda v: f"limit={v}")
def test_shared_experts_chain_has_the_same_bits_on_every_finite_pair(hooked, limit):
    """All 2**32 pairs of bfloat16: routed experts on the fused op, shared experts on vLLM's chain, one arithmetic."""
    from bi_kernels import ScaleFormat, fused_silu_mul_per_token_group_quant
    from bi_kernels.testing import assert_bitwise_equal

    values = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    finite = torch.isfinite(values)
    x = torch.empty((1024, 2, 1 << 16), dtype=torch.bfloat16, device="cuda")
    x[:, 1] = torch.where(finite, values, 1.0)
    for gates in torch.where(finite, values, 1.0).split(1024):
        x[:, 0] = gates.unsqueeze(-1)
        rows = x.view(1024, -1)
        q, s = fused_silu_mul_per_token_group_quant(
            rows, clamp_limit=limit, scale_format=ScaleFormat.FLOAT32_CEIL_UE8M0
        )
        want_q, want_s = unfused(rows, limit)
        # Without a clamp products overflow to infinity: non-finite, where the two differ by design.
        kept = torch.isfinite(s)
        assert_bitwise_equal(s[kept], want_s[kept], f"scales of gates from {gates[0].item()}")
        codes = kept.repeat_interleave(128, -1)
        assert_bitwise_equal(
            q.view(torch.uint8)[codes], want_q.view(torch.uint8)[codes], f"codes from {gates[0].item()}"
        )
        assert limit is None or kept.all()
