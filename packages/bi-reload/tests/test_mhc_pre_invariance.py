from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect, num_threads
from bi_reload import MhcPre, mhc_post, mhc_pre, mhc_pre_broadcast
from bi_reload.reference.mhc_pre import mix_and_collapse, prenorm_projection, reciprocal_rms

SIZES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 1000)

Weights = Callable[..., Any]
Settings = dict[str, float]


@pytest.mark.parametrize("norm", [False, True])
def test_mhc_pre(mhc_weights: Weights, mhc_settings: Settings, norm: bool) -> None:
    weights = mhc_weights(512)
    norm_weight = torch.randn(128).bfloat16() if norm else None
    neighbours = ("huge", "nan") if norm else ("random", "zero")
    assert_batch_invariant(
        lambda residual: mhc_pre(residual, *weights, norm_weight=norm_weight, **mhc_settings),
        torch.randn(3, 4, 128).bfloat16(),
        batch_sizes=SIZES,
        neighbours=neighbours,
    )


def test_mhc_pre_broadcast_with_unequal_pieces(mhc_weights: Weights, mhc_settings: Settings) -> None:
    weights = mhc_weights(192)  # three blocks of 64 in two pieces
    norm_weight = torch.randn(192).bfloat16()
    assert_batch_invariant(
        lambda x: mhc_pre_broadcast(x, *weights, norm_weight=norm_weight, **mhc_settings),
        torch.randn(3, 192).bfloat16(),
        batch_sizes=SIZES,
        neighbours=("random",),
    )


@pytest.mark.parametrize("tokens", [17, 129, 257])
def test_permuted_tokens_give_permuted_bits(mhc_weights: Weights, mhc_settings: Settings, tokens: int) -> None:
    weights = mhc_weights(4096)
    residual = torch.randn(tokens, 4, 1024).bfloat16()
    order = torch.randperm(tokens)
    straight = mhc_pre(residual, *weights, norm_weight=None, **mhc_settings)
    permuted = mhc_pre(residual[order], *weights, norm_weight=None, **mhc_settings)
    for have, want in zip(permuted, straight, strict=True):
        assert_bitwise_equal(have, want[order])


def test_thread_count(mhc_weights: Weights, mhc_settings: Settings) -> None:
    weights = mhc_weights(4096)
    residual = torch.randn(129, 4, 1024).bfloat16()
    norm_weight = torch.randn(1024).bfloat16()
    results = []
    for threads in (1, 2, 3):
        with num_threads(threads):
            results.append(mhc_pre(residual, *weights, norm_weight=norm_weight, **mhc_settings))
    for other in results[1:]:
        for have, want in zip(other, results[0], strict=True):
            assert_bitwise_equal(have, want)


def upstream_num_splits(tokens: int, k: int, multiprocessors: int = 132) -> int:
    """The rule that this package replaces: as many pieces as fill the GPU at this batch size."""
    return max(min(multiprocessors // -(-tokens // 64), k // 64 // 4), 1)


def test_upstream_rule_is_the_one_reported() -> None:
    tokens = (64, 128, 129, 256, 257, 500, 1000, 5000)
    assert [upstream_num_splits(t, 16384) for t in tokens] == [64, 64, 44, 33, 26, 16, 8, 1]


@pytest.fixture
def split_by_tokens(mhc_weights: Weights) -> Callable[[torch.Tensor], MhcPre]:
    """As mhc_pre, but cutting the sum by the number of tokens."""
    fn, scale, base = mhc_weights(16384)

    def twin(residual: torch.Tensor) -> MhcPre:
        flat = residual.flatten(1)
        projection, squares = prenorm_projection(flat, fn, upstream_num_splits(*flat.shape))
        rms = reciprocal_rms(squares, flat.shape[1], 1e-6)
        return mix_and_collapse(
            list(residual.unbind(1)),
            projection,
            rms,
            scale,
            base,
            norm_weight=None,
            hc_eps=1e-6,
            norm_eps=1e-6,
            sinkhorn_iters=20,
            post_mult=2.0,
        )

    return twin


@pytest.mark.parametrize("tokens", [129, 257, 1000])
def test_twin_split_by_tokens_is_detected(split_by_tokens: Callable[..., Any], tokens: int) -> None:
    rows = torch.randn(1, 4, 4096).bfloat16()
    must_detect(split_by_tokens, rows, batch_sizes=(tokens,), positions=(64,), neighbours=("zero",))


def test_twin_split_by_tokens_hides_up_to_128_tokens(split_by_tokens: Callable[..., Any]) -> None:
    rows = torch.randn(1, 4, 4096).bfloat16()
    assert_batch_invariant(split_by_tokens, rows, batch_sizes=(128,), positions=(64,), neighbours=("zero",))


def _layer_rows(tokens: int, hidden: int) -> tuple[torch.Tensor, ...]:
    x, residual = torch.randn(tokens, hidden).bfloat16(), torch.randn(tokens, 4, hidden).bfloat16()
    return x, residual, torch.rand(tokens, 4) * 2, torch.softmax(torch.randn(tokens, 4, 4), -1)


def test_post_then_pre(mhc_weights: Weights, mhc_settings: Settings) -> None:
    weights = mhc_weights(512)

    def explicit(*layer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        residual = mhc_post(*layer)
        return residual, *mhc_pre(residual, *weights, norm_weight=None, **mhc_settings)

    assert_batch_invariant(explicit, _layer_rows(3, 128), batch_sizes=(15, 16, 17, 65), neighbours=("random", "nan"))


@pytest.fixture
def fused_up_to_16_tokens(mhc_weights: Weights) -> Callable[..., tuple[torch.Tensor, ...]]:
    """As post then pre, but up to 16 tokens with the squares of the streams before they are rounded to bfloat16."""
    fn, scale, base = mhc_weights(512)

    def twin(
        x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        streams = mhc_post(x, residual, post, comb)
        projection, squares = prenorm_projection(streams.flatten(1), fn, 2)
        if len(x) <= 16:
            unrounded = post[:, :, None] * x[:, None].float() + (comb[..., None] * residual[:, :, None].float()).sum(1)
            squares = unrounded.square().flatten(1).sum(1)
        gates = mix_and_collapse(
            list(streams.unbind(1)),
            projection,
            reciprocal_rms(squares, 512, 1e-6),
            scale,
            base,
            norm_weight=None,
            hc_eps=1e-6,
            norm_eps=1e-6,
            sinkhorn_iters=20,
            post_mult=2.0,
        )
        return gates.post_mix, gates.comb_mix

    return twin


def test_twin_fused_up_to_16_tokens_is_detected(fused_up_to_16_tokens: Callable[..., Any]) -> None:
    rows = _layer_rows(3, 128)
    error = must_detect(fused_up_to_16_tokens, rows, batch_sizes=(17,), neighbours=("random",))
    assert error.batch_size == 17
