"""The attention class on a layer in small: refusals, workspace, projections, and the class that vLLM gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_attention import HEADS, PREFIX, FakeLayer, config, eager_break_during_capture, forward_context

from bi_kernels import ArgumentError, fixed_order_mm
from bi_kernels.arch import Arch
from bi_kernels.runtime.errors import HookError
from bi_kernels.testing import assert_bitwise_equal
from bi_sparse_attn import SparseCapacity
from bi_sparse_attn.vllm_attention import _PrefillStep, batch_invariant_class, select_attention_class


def layer(ratio=4, **changes):
    settings = config(ratio)
    vars(settings).update(changes)
    return batch_invariant_class(FakeLayer)(settings, PREFIX)


def test_the_class_is_a_subclass_of_vllms_choice(fake_vllm):
    chosen = select_attention_class(lambda vllm_config: FakeLayer)(None)
    assert issubclass(chosen, FakeLayer)
    assert chosen is batch_invariant_class(FakeLayer)
    assert layer().capacity == SparseCapacity.from_model(
        max_model_len=1024, compress_ratio=4, window_size=128, index_topk=64, max_num_batched_tokens=512
    )


def test_attention_breaks_a_piecewise_graph_whenever_vllm_was_imported(fake_vllm, monkeypatch):
    """vLLM's decorator leaves the method as it is where its switch comes after the import."""
    stock = FakeLayer.attention_impl
    chosen = select_attention_class(lambda vllm_config: FakeLayer)(None)
    assert chosen.attention_impl.__wrapped__ is stock
    assert FakeLayer.attention_impl is stock

    class Decorated(FakeLayer):
        attention_impl = eager_break_during_capture(stock)

    monkeypatch.setattr("vllm.models.deepseek_v4.nvidia.flashmla.DeepseekV4FlashMLAAttention", Decorated)
    chosen = select_attention_class(lambda vllm_config: Decorated)(None)
    assert chosen.attention_impl is Decorated.attention_impl  # broken once, not twice


def test_another_backend_is_refused(fake_vllm):
    class DeepseekV4FlashInferMLAAttention:
        pass

    with pytest.raises(HookError, match=r"FlashMLA's.*found DeepseekV4FlashInferMLAAttention"):
        select_attention_class(lambda vllm_config: DeepseekV4FlashInferMLAAttention)(None)


def test_another_cache_format_is_refused(fake_vllm):
    with pytest.raises(ArgumentError, match="kv_cache_dtype: expected 'fp8_ds_mla', got bfloat16"):
        layer(kv_cache_dtype="bfloat16")


@pytest.mark.parametrize("arch", Arch)
def test_the_output_projection_has_the_format_of_its_architecture(fake_vllm, monkeypatch, arch):
    monkeypatch.setattr("bi_sparse_attn.vllm_attention.detect_arch", lambda: arch)
    formats = {Arch.SM90: ((1, 128, 128), False), Arch.SM100: ((1, 1, 128), True)}
    layer(o_proj=formats[arch])
    for wrong in ({Arch.SM90: formats[Arch.SM100], Arch.SM100: formats[Arch.SM90]}[arch], ((1, 128, 128), True)):
        with pytest.raises(ArgumentError, match="output projection"):
            layer(o_proj=wrong)


def test_micro_batches_are_refused(fake_vllm):
    q = torch.zeros((1, HEADS, 512), dtype=torch.bfloat16)
    with forward_context([{}, {}]), pytest.raises(ArgumentError, match="attn_metadata: expected one dict"):
        layer().forward_mqa(q, q, torch.zeros(1, dtype=torch.int64), torch.empty_like(q))


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_the_dummy_run_reserves_the_largest_workspace(fake_vllm, ratio):
    mine = layer(ratio)
    q = torch.full((3, HEADS, 512), 7.0).bfloat16()
    with forward_context(None):
        mine.forward_mqa(q, q, torch.zeros(3, dtype=torch.int64), q)
    assert not q.any()
    # At least one slice of decode rows, and one request's rows.
    capacity = mine.capacity
    rows = max(capacity.decode_slice_tokens * capacity.combined_width, capacity.workspace_rows)
    assert fake_vllm.bytes >= rows * 1024


def test_kv_scores_and_head_weights_are_fixed_order_products(fake_vllm):
    generator = torch.Generator().manual_seed(1)

    def linear(rows):
        weight = torch.randn((rows, 128), generator=generator).bfloat16()
        return SimpleNamespace(weight=weight)

    mine = layer()
    mine.fused_wqa_wkv = lambda x: (x + 1, None)
    mine.compressor = SimpleNamespace(fused_wkv_wgate=linear(64))
    x = torch.randn((5, 128), generator=generator).bfloat16()
    projected, score, index_score, weights = mine.attn_gemm_parallel_execute(x)
    assert index_score is None
    assert weights is None
    assert_bitwise_equal(projected, x + 1)
    assert_bitwise_equal(score, fixed_order_mm(x, mine.compressor.fused_wkv_wgate.weight))
    mine.indexer = SimpleNamespace(weights_proj=linear(16), compressor=SimpleNamespace(fused_wkv_wgate=linear(32)))
    _, score, index_score, weights = mine.attn_gemm_parallel_execute(x)
    assert score.dtype == index_score.dtype == torch.float32
    assert_bitwise_equal(index_score, fixed_order_mm(x, mine.indexer.compressor.fused_wkv_wgate.weight))
    # vLLM's kernels read bfloat16 head weights: rounded once, after the float32 sum.
    assert_bitwise_equal(weights, fixed_order_mm(x, mine.indexer.weights_proj.weight).bfloat16())


def test_the_layers_of_a_step_share_its_places_and_have_areas_of_their_own(fake_vllm):
    window = SimpleNamespace(
        num_decodes=1,
        num_prefills=3,
        num_decode_tokens=1,
        query_start_loc_cpu=torch.tensor([0, 1, 3, 6, 8]),
        token_to_req_indices=torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 0], dtype=torch.int32),  # the last one is padding
        prefill_seq_lens=torch.tensor([2, 203, 52], dtype=torch.int32),
        prefill_gather_lens=torch.tensor([2, 130, 52], dtype=torch.int32),
    )
    step = _PrefillStep.of(window)
    assert _PrefillStep.of(window) is step
    assert step.bounds == [0, 2, 5, 7]
    assert step.gather_starts.tolist() == [0, 0, 73, 73, 73, 0, 0]
    places = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    rows = {ratio: layer(ratio).capacity.workspace_rows for ratio in (4, 128)}
    assert rows[4] != rows[128]
    for ratio, capacity in ((ratio, layer(ratio).capacity) for ratio in (4, 128, 4)):
        assert torch.equal(step.row_offsets(capacity), places % capacity.prefill_requests * rows[ratio])
