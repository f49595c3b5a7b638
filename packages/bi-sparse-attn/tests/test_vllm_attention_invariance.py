"""A token's attention output, whatever the batch, the path, the chunks, the padding and the slices: equal bytes."""

from __future__ import annotations

import pytest
import torch
from fake_attention import PREFIX, Engine, FakeLayer, config, forward_context, make_request

from bi_kernels.testing import assert_bitwise_equal
from bi_sparse_attn import vllm_attention
from bi_sparse_attn.vllm_attention import batch_invariant_class

LENGTHS = {"short": 3, "window": 129, "long": 391, "other": 300}
RATIOS = (0, 4, 128)


@pytest.fixture(params=RATIOS, ids=lambda ratio: f"ratio={ratio}")
def engine(request, fake_vllm):
    return make_engine(request.param, fake_vllm)


def make_engine(ratio, workspace):
    requests = {name: make_request(n, ratio, 64, seed) for seed, (name, n) in enumerate(LENGTHS.items())}
    buffer = torch.zeros((512, 64), dtype=torch.int32)
    layer = batch_invariant_class(FakeLayer)(config(ratio), PREFIX, topk_indices_buffer=buffer)
    empty = torch.zeros((1, 2, 512), dtype=torch.bfloat16)
    with forward_context(None):
        layer.forward_mqa(empty, empty, torch.zeros(1, dtype=torch.int64), empty)
    workspace.locked = True
    return Engine(layer, requests)


def compare(got, want):
    for key, row in got.items():
        assert_bitwise_equal(row, want[key], str(key))


def sample(name):
    """Positions of a request at which every kind of list occurs: first tokens, full window, last token."""
    n = LENGTHS[name]
    return sorted({0, n // 2, max(0, n - 130), n - 2, n - 1})


def whole(engine, name):
    """Reference: the last tokens prefilled alone; earlier ones in the chunks that end with them."""
    wanted = {}
    for position in sample(name):
        start = max(0, position - 1)
        wanted |= engine.run((name, start, max(position + 1, start + 2)))
    return wanted


def test_decode_equals_prefill(engine):
    for name in LENGTHS:
        want = whole(engine, name)
        for position in sample(name):
            compare(engine.run((name, position, position + 1)), want)


def test_neighbours_and_place_in_the_batch_do_not_matter(engine):
    alone = engine.run(("long", 390, 391)) | engine.run(("other", 290, 300))
    for batch in (
        [("short", 2, 3), ("long", 390, 391)],
        [("long", 390, 391), ("window", 128, 129), ("short", 0, 1)],
        [("short", 0, 1), ("long", 390, 391), ("window", 0, 40), ("other", 290, 300)],
        [("other", 290, 300), ("window", 1, 3)],
    ):
        got = engine.run(*batch)
        compare({key: got[key] for key in got.keys() & alone.keys()}, alone)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 127, 128, 129])
def test_chunks_do_not_matter(engine, chunk):
    want = engine.run(("window", 0, 129))
    got = {}
    for start in range(0, 129, chunk):
        if start in (0, 126, 127, 128) or chunk > 5:
            got |= engine.run(("window", start, min(start + chunk, 129)))
    compare(got, want)


def test_padding_tokens_do_not_matter_and_are_zero(engine):
    alone = engine.run(("long", 390, 391)) | engine.run(("short", 1, 2))
    compare(engine.run(("long", 390, 391), ("short", 1, 2), padding=6), alone)


def test_slices_do_not_matter(engine, monkeypatch):
    batch = [(name, position, position + 1) for name in ("long", "other") for position in sample(name)]
    want = engine.run(*batch)
    monkeypatch.setattr(type(engine.layer.capacity), "decode_slice_tokens", 3)
    compare(engine.run(*batch), want)


def test_how_many_requests_are_prefilled_side_by_side_does_not_matter(engine, monkeypatch):
    batch = [("short", 1, 2), ("short", 0, 3), ("window", 100, 129), ("long", 380, 391), ("other", 290, 300)]
    want = engine.run(*batch)
    for count in (1, 2, 3):
        monkeypatch.setattr(type(engine.layer.capacity), "prefill_requests", count)
        compare(engine.run(*batch), want)


def test_the_comparison_sees_vllms_own_decode_order(fake_vllm, monkeypatch):
    """The window before the compressed entries, as in vLLM's decode kernel: other bits, so order is tested."""
    engine = make_engine(4, fake_vllm)
    want = engine.run(("long", 385, 391))
    gather = vllm_attention.gather_decode_kv

    def window_first(*args, **kwargs):
        result = gather(*args, **kwargs)
        for row, length in zip(result.indices, result.lengths.tolist(), strict=True):
            row[:length] = row[:length].roll(128)
        return result

    monkeypatch.setattr(vllm_attention, "gather_decode_kv", window_first)
    with pytest.raises(AssertionError):
        compare(engine.run(("long", 390, 391)), want)


def test_the_comparison_sees_a_neighbours_entry(fake_vllm, monkeypatch):
    """Block tables by place in the slice instead of by request: right for one token alone, wrong among others."""
    engine = make_engine(4, fake_vllm)
    alone = engine.run(("long", 390, 391))
    fill = vllm_attention.fill_decode_slots_

    def by_slice(compressed, window, topk, positions, requests, *args, **kwargs):
        fill(compressed, window, topk, positions, torch.zeros_like(requests), *args, **kwargs)

    monkeypatch.setattr(vllm_attention, "fill_decode_slots_", by_slice)
    compare(engine.run(("long", 390, 391)), alone)
    with pytest.raises(AssertionError):
        compare({("long", 390): engine.run(("short", 0, 1), ("long", 390, 391))["long", 390]}, alone)
