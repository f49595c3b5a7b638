"""The expert classes over stand-ins for vLLM's modules that have the references' arithmetic: rows, padding, order."""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bi_kernels import Arch, ArgumentError, ScaleFormat, fused_silu_mul_per_token_group_quant, per_block_quant_fp8
from bi_kernels import per_token_group_quant_fp8 as quantise
from bi_kernels.testing import assert_bitwise_equal, first_difference
from bi_moe_deepep import combine_ordered, expert_mlp, fp8_gemm, select_experts, stage_tokens, vllm_experts

MOE = "vllm.model_executor.layers.fused_moe"
EXPERTS, TOP_K, HIDDEN, INTER, LIMIT, ALIGN = 5, 2, 256, 128, 4.0, 128
CEIL = ScaleFormat.FLOAT32_CEIL_UE8M0
GENERATOR = torch.Generator().manual_seed(0)


class MoEActivation(enum.Enum):
    SILU = 1


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [per_block_quant_fp8(torch.randn(n, k, generator=GENERATOR) / 8, scale_format=CEIL) for _ in range(EXPERTS)]
    return torch.stack([q for q, _ in parts]), torch.stack([s for _, s in parts])


W = (*weight(2 * INTER, HIDDEN), *weight(HIDDEN, INTER))


def permute(aq: Any, aq_scale: Any, topk_ids: Any, local_num_experts: int, **others: Any) -> tuple[Any, ...]:
    """Rows grouped by expert and padded, in an order within the expert that says nothing; padding is NaN."""
    rows = others["aq_out"].shape[0]
    out = others["aq_out"].view(torch.uint8).fill_(0x7F)
    scales = torch.full((rows, aq_scale.shape[1]), torch.nan)
    owners = torch.full((rows,), -1, dtype=torch.int32)
    places = torch.full(topk_ids.shape, 12345678, dtype=torch.int32)
    row = 0
    for expert in range(local_num_experts):
        chosen = (topk_ids == expert).nonzero()
        for token, slot in chosen[torch.randperm(len(chosen))].tolist():
            out[row], scales[row] = aq.view(torch.uint8)[token], aq_scale[token]
            owners[row], places[token, slot] = expert, row
            row += 1
        row = -(-row // ALIGN) * ALIGN
    return others["aq_out"], scales, owners, places, ALIGN


def aligned(M: int, num_topk: int, local_num_experts: int, **others: Any) -> tuple[int, int]:
    return -(-(M * num_topk + local_num_experts * (ALIGN - 1)) // ALIGN) * ALIGN, ALIGN


def resize(workspace: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return workspace.flatten()[: torch.Size(shape).numel()].view(shape)


def contiguous(a: Any, b: Any, out: torch.Tensor, owners: torch.Tensor) -> None:
    before = out.clone()
    fp8_gemm.m_grouped_fp8_gemm_nt_contiguous(*a, *b, owners, out=out)
    out[owners < 0] = before[owners < 0]  # DeepGEMM does not look at nobody's rows; the reference clears them


def masked(a: Any, b: Any, out: torch.Tensor, counts: torch.Tensor, expected_m: int) -> None:
    HINTS.append(expected_m)
    fp8_gemm.m_grouped_fp8_gemm_nt_masked(*a, *b, counts, out=out)


HINTS: list[int] = []


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Any], type[Any]]]:
    class Base:
        mxfp8 = False
        block_shape = (128, 128)
        w1_scale, w2_scale = W[1], W[3]
        quant_config = SimpleNamespace(gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=LIMIT)

        def apply(self) -> None:
            raise AssertionError("the stock method")

        def moe_problem_size(self, a1: torch.Tensor, w1: torch.Tensor, w2: Any, ids: Any) -> tuple[int, ...]:
            return w1.shape[0], a1.shape[1], w1.shape[1], w1.shape[2], ids.shape[1]

    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.utils": {},
        "vllm.utils.deep_gemm": {
            "m_grouped_fp8_gemm_nt_contiguous": contiguous,
            "fp8_m_grouped_gemm_nt_masked": masked,
            "mk_alignment_scope": lambda rows: contextlib.nullcontext(),
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        MOE: {},
        f"{MOE}.deep_gemm_utils": {"compute_aligned_M_and_alignment": aligned, "deepgemm_moe_permute": permute},
        f"{MOE}.experts": {},
        f"{MOE}.experts.batched_deep_gemm_moe": {"BatchedDeepGemmExperts": type("Batched", (Base,), {})},
        f"{MOE}.experts.deep_gemm_moe": {"DeepGemmExperts": type("Contiguous", (Base,), {})},
        f"{MOE}.utils": {"_resize_cache": resize},
    }
    for name, content in contents.items():
        made = types.ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
    fused = functools.partial(fused_silu_mul_per_token_group_quant, arch=Arch.SM90)
    for where in ("bi_moe_deepep.vllm_experts", "bi_kernels.vllm_experts"):
        monkeypatch.setattr(f"{where}.fused_silu_mul_per_token_group_quant", fused)
        monkeypatch.setattr(f"{where}.deep_gemm_scale_format", lambda device: CEIL)
    HINTS.clear()
    vllm_experts.expert_classes.cache_clear()
    yield vllm_experts.expert_classes()
    vllm_experts.expert_classes.cache_clear()


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(count, HIDDEN, generator=GENERATOR).bfloat16() * 8
    topk_weights, ids = select_experts(torch.randn(count, EXPERTS, generator=GENERATOR), top_k=TOP_K)
    return x, topk_weights, ids


def run(cls: type[Any], x: torch.Tensor, topk_weights: torch.Tensor, ids: torch.Tensor, **changes: Any) -> torch.Tensor:
    q, s = quantise(x, scale_format=CEIL)
    rows, _ = aligned(len(x), TOP_K, EXPERTS)
    workspaces = [torch.full((rows, width), torch.nan).bfloat16() for width in (HIDDEN, 2 * INTER)]
    output = torch.empty_like(x)
    given: dict[str, Any] = {
        "output": output,
        "hidden_states": q,
        "w1": W[0],
        "w2": W[2],
        "topk_weights": topk_weights,
        "topk_ids": ids,
        "activation": MoEActivation.SILU,
        "global_num_experts": EXPERTS,
        "expert_map": None,
        "a1q_scale": s,
        "a2_scale": None,
        "workspace13": workspaces[0],
        "workspace2": workspaces[1],
        "expert_tokens_meta": None,
        "apply_router_weight_on_input": False,
    }
    cls().apply(**(given | changes))
    return output


def wanted(x: torch.Tensor, topk_weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    staged = stage_tokens(x, ids, num_experts=EXPERTS, capacity=max(len(x), 1))
    rows = expert_mlp(staged.x, staged.counts, *W, arch=Arch.SM90, clamp_limit=LIMIT)
    return combine_ordered(rows, staged.slots, topk_weights)


@pytest.fixture(params=["packed", "contiguous"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of the experts on this rank, for every number of tokens."""
    monkeypatch.setattr(vllm_experts, "PACKED_TOKENS", sys.maxsize if request.param == "packed" else -1)
    return str(request.param)


@pytest.mark.parametrize("count", [1, 2, 64, 129, 300], ids=lambda n: f"M={n}")
def test_experts_have_the_specified_bits(classes: tuple[type[Any], type[Any]], layout: str, count: int) -> None:
    tokens = batch(count)
    have = run(classes[0], *tokens)
    assert_bitwise_equal(have, wanted(*tokens))
    assert have.float().abs().max() > 0.01


def test_the_number_of_tokens_chooses_the_layout(
    classes: tuple[type[Any], type[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    packing = vllm_experts.pack_tokens

    def counted(q: torch.Tensor, *arguments: Any, **given: Any) -> Any:
        seen.append(len(q))
        return packing(q, *arguments, **given)

    monkeypatch.setattr(vllm_experts, "pack_tokens", counted)
    monkeypatch.setattr(vllm_experts, "PACKED_TOKENS", 8)
    x, topk_weights, ids = batch(9)
    every = run(classes[0], x, topk_weights, ids)
    assert seen == []
    assert_bitwise_equal(run(classes[0], x[:8], topk_weights[:8], ids[:8]), every[:8])
    assert seen == [8]


def test_all_tokens_on_the_same_experts(classes: tuple[type[Any], type[Any]], layout: str) -> None:
    x, topk_weights, ids = batch(130)
    ids[:] = torch.tensor([4, 1])
    assert_bitwise_equal(run(classes[0], x, topk_weights, ids), wanted(x, topk_weights, ids))


def test_only_rows_that_are_tokens_are_activated(
    classes: tuple[type[Any], type[Any]], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    fused = vllm_experts.fused_silu_mul_per_token_group_quant

    def counted(x: torch.Tensor, **given: Any) -> Any:
        seen.append(int((given["m_indices"] >= 0).sum()))
        return fused(x, **given)

    monkeypatch.setattr(vllm_experts, "fused_silu_mul_per_token_group_quant", counted)
    run(classes[0], *batch(64))
    assert seen == [64 * TOP_K]


def test_slots_that_are_not_routed_are_skipped(classes: tuple[type[Any], type[Any]], layout: str) -> None:
    x, topk_weights, ids = batch(40)
    ids[3:7] = -1
    ids[9, 0] = -1
    assert_bitwise_equal(run(classes[0], x, topk_weights, ids), wanted(x, topk_weights, ids))


def test_another_order_of_slots_is_noticed(classes: tuple[type[Any], type[Any]], layout: str) -> None:
    x, topk_weights, ids = batch(300)
    have = run(classes[0], x, topk_weights, ids)
    topk_weights = topk_weights.flip(1).contiguous() * 1.0009765625
    assert first_difference(run(classes[0], x, topk_weights, ids.flip(1).contiguous()), have) is not None


@pytest.mark.parametrize(
    ("change", "name"),
    [({"apply_router_weight_on_input": True}, "apply_router_weight_on_input"), ({"expert_map": "map"}, "expert_map")],
    ids=str,
)
def test_what_the_class_does_not_do_is_refused(
    classes: tuple[type[Any], type[Any]], change: dict[str, Any], name: str
) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        run(classes[0], *batch(2), **change)


def test_b55_batched_experts_have_one_hint_whatever_the_load(classes: tuple[type[Any], type[Any]]) -> None:
    x, topk_weights, ids = batch(40)
    want = wanted(x, topk_weights, ids)
    capacity = 64
    for count in (1, 16, 40):
        part = stage_tokens(x[:count], ids[:count], num_experts=EXPERTS, capacity=capacity)
        output = torch.zeros(EXPERTS, capacity, HIDDEN, dtype=torch.bfloat16)
        workspace = torch.zeros(EXPERTS, capacity, 2 * INTER, dtype=torch.bfloat16)
        q, s = quantise(part.x, scale_format=CEIL)
        classes[1]().apply(
            output, q, W[0], W[2], topk_weights, ids, MoEActivation.SILU, EXPERTS, None, s, None, workspace, workspace,
            SimpleNamespace(expert_num_tokens=part.counts), False,
        )  # fmt: skip
        assert_bitwise_equal(combine_ordered(output, part.slots, topk_weights[:count]), want[:count])
    assert set(HINTS) == {-(-capacity * TOP_K // EXPERTS)}


def test_both_classes_claim_batch_invariance(classes: tuple[type[Any], type[Any]]) -> None:
    assert all(cls._supports_batch_invariance() for cls in classes)
