"""vLLM's mHC functions on the explicit ops: vLLM's arguments and shapes, the ops' bits, and no path that follows T."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect
from bi_reload import mhc_head as head_op
from bi_reload import mhc_num_splits, vllm_mhc
from bi_reload import mhc_post as post_op
from bi_reload import mhc_pre as pre_op
from bi_reload import mhc_pre_broadcast as broadcast_op

H = 128
SETTINGS = (1e-6, 1e-5, 1e-5, 2.0, 3)  # rms_eps, hc_pre_eps, hc_sinkhorn_eps, post_mult, repeats
OURS = {"rms_eps": 1e-6, "hc_eps": 1e-5, "sinkhorn_iters": 3, "post_mult": 2.0, "norm_eps": 1e-4}


@pytest.fixture
def parts(mhc_weights: Callable[..., Any]) -> Any:
    w = mhc_weights(4 * H)
    norm = (1 + torch.randn(H) * 0.1).bfloat16()
    return (w.fn, w.scale, w.base), norm


def streams(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 4, H).bfloat16()


def gates(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, 4, 1), torch.rand(tokens, 4, 4)


@pytest.mark.parametrize("outer", [(3,), (2, 3), (0,)])
def test_pre_has_vllms_shapes_and_the_ops_bits(parts: Any, outer: tuple[int, ...]) -> None:
    weights, norm = parts
    residual = torch.randn(*outer, 4, H).bfloat16()
    post, comb, x = vllm_mhc.mhc_pre(residual, *weights, *SETTINGS, norm_weight=norm, norm_eps=1e-4)
    assert (post.shape, comb.shape, x.shape) == ((*outer, 4, 1), (*outer, 4, 4), (*outer, H))
    want = pre_op(residual.view(-1, 4, H), *weights, norm_weight=norm, **OURS)
    for got, expected in zip((x, post, comb), want, strict=True):
        assert_bitwise_equal(got.reshape(expected.shape), expected)


def test_broadcast_returns_the_residual_first(parts: Any, mhc_weights: Callable[..., Any]) -> None:
    (fn, scale, base), norm = parts
    x, wide = torch.randn(5, H).bfloat16(), mhc_weights(H).fn
    residual, post, comb, y = vllm_mhc.mhc_pre_broadcast(
        x, fn, scale, base, *SETTINGS, norm_weight=norm, norm_eps=1e-4, fn_broadcast=wide
    )
    want = broadcast_op(x, wide, scale, base, norm_weight=norm, **OURS)
    assert post.shape == (5, 4, 1)
    assert_bitwise_equal(residual, want.residual)
    assert_bitwise_equal(post.squeeze(-1), want.post_mix)
    assert_bitwise_equal(comb, want.comb_mix)
    assert_bitwise_equal(y, want.layer_input)
    with pytest.raises(ArgumentError, match=r"fn_broadcast.*Load weights first"):
        vllm_mhc.mhc_pre_broadcast(x, fn, scale, base, *SETTINGS, norm_weight=norm)


@pytest.mark.parametrize("tokens", [1, 16, 17, 32, 33])
def test_fused_is_post_then_pre_at_every_count(parts: Any, tokens: int) -> None:
    """B18: vLLM changes path above 16 tokens on 0.26 and above 32 on 0.33."""
    weights, norm = parts
    x, residual, (post, comb) = torch.randn(tokens, H).bfloat16(), streams(tokens), gates(tokens)
    got = vllm_mhc.mhc_fused_post_pre(
        x, residual, post, comb, *weights, *SETTINGS, n_splits=1, tile_n=1, norm_weight=norm, norm_eps=1e-4
    )
    after = post_op(x, residual, post.squeeze(-1), comb)
    assert_bitwise_equal(vllm_mhc.mhc_post(x, residual, post, comb), after)
    want = pre_op(after, *weights, norm_weight=norm, **OURS)
    assert_bitwise_equal(got[0], after)
    assert_bitwise_equal(got[1].squeeze(-1), want.post_mix)
    assert_bitwise_equal(got[2], want.comb_mix)
    assert_bitwise_equal(got[3], want.layer_input)


def test_fused_does_not_follow_the_batch(parts: Any) -> None:
    """And the twin, which takes the unrounded residual for few tokens as vLLM's fused kernel does, is found."""
    weights, norm = parts
    rows = (torch.randn(40, H).bfloat16(), streams(40), *gates(40))

    def run(x: Any, residual: Any, post: Any, comb: Any) -> Any:
        return vllm_mhc.mhc_fused_post_pre(x, residual, post, comb, *weights, *SETTINGS, norm_weight=norm)

    def by_count(x: Any, residual: Any, post: Any, comb: Any) -> Any:
        after, *rest = run(x, residual, post, comb)
        if len(x) > 16:
            return after, *rest
        exact = post * x[:, None].float() + torch.einsum("tjk,tjh->tkh", comb, residual.float())
        scale = exact.square().mean((1, 2), keepdim=True) / after.float().square().mean((1, 2), keepdim=True)
        return after, rest[0] * scale, rest[1] * scale, rest[2]

    sizes = (1, 2, 16, 17, 33)
    assert_batch_invariant(run, rows, batch_sizes=sizes)
    must_detect(by_count, rows, batch_sizes=sizes)


def test_head(mhc_weights: Callable[..., Any]) -> None:
    w = mhc_weights(4 * H, rows=4, scales=1)
    x = streams(3)
    assert_bitwise_equal(
        vllm_mhc.hc_head_fused_kernel(x, w.fn, w.scale, w.base, 1e-6, 1e-5),
        head_op(x, w.fn, w.scale, w.base, rms_eps=1e-6, hc_eps=1e-5),
    )


def test_two_eps_are_refused(parts: Any) -> None:
    weights, _ = parts
    with pytest.raises(ArgumentError, match="hc_sinkhorn_eps"):
        vllm_mhc.mhc_pre(streams(2), *weights, 1e-6, 1e-6, 1e-5, 2.0, 3)
    post, comb = gates(2)
    with pytest.raises(ArgumentError, match="hc_sinkhorn_eps"):
        vllm_mhc.mhc_fused_post_pre(streams(2)[:, 0], streams(2), post, comb, *weights, 1e-6, 1e-6, 1e-5, 2.0, 3)


def test_split_follows_the_length_alone() -> None:
    """B17: neither tokens nor multiprocessors are asked; vLLM's own is not called."""

    def theirs(*_: object) -> int:
        raise AssertionError("vLLM's split was asked")

    split = vllm_mhc.constant_num_split(theirs)
    for k in (2048, 8192, 16384, 28672):
        assert {split(64, k, grid) for grid in (1, 2, 3, 16, 79)} == {mhc_num_splits(k)}
    with pytest.raises(ArgumentError, match="length of the sum"):
        split(64, None, 1)
