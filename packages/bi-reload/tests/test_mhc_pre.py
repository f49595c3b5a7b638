from __future__ import annotations

import math
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_reload import MhcPre, mhc_num_splits, mhc_pre, mhc_pre_broadcast
from bi_reload.reference.mhc_pre import reciprocal_rms

U = 2.0**-24  # unit roundoff of float32


def _f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]  # type: ignore[no-any-return]


Weights = Callable[..., Any]
Settings = dict[str, float]


@pytest.mark.parametrize("hidden", [128, 320, 1024])
@pytest.mark.parametrize("iters", [1, 2, 20])
def test_within_bound_of_float64(
    oracle: ModuleType, mhc_weights: Weights, mhc_settings: Settings, hidden: int, iters: int
) -> None:
    residual = torch.randn(21, 4, hidden).bfloat16()
    weights = mhc_weights(4 * hidden)
    result = mhc_pre(residual, *weights, norm_weight=None, sinkhorn_iters=iters, **mhc_settings)
    flat = residual.flatten(1)
    oracle.check_gates(result, residual, oracle.gates(flat, *weights, iters, oracle.reference_error(flat, weights.fn)))


@pytest.mark.parametrize("hidden", [128, 192, 1024])
def test_broadcast_within_bound_of_float64(
    oracle: ModuleType, mhc_weights: Weights, mhc_settings: Settings, hidden: int
) -> None:
    x = torch.randn(21, hidden).bfloat16()
    weights = mhc_weights(hidden)
    result = mhc_pre_broadcast(x, *weights, norm_weight=None, **mhc_settings)
    assert_bitwise_equal(result.residual, x[:, None].repeat(1, 4, 1))
    gates = oracle.gates(x, *weights, 20, oracle.reference_error(x, weights.fn))
    oracle.check_gates(result, result.residual, gates)


def test_comb_is_doubly_stochastic(mhc_weights: Weights, mhc_settings: Settings) -> None:
    residual = torch.randn(9, 4, 128).bfloat16()
    comb = mhc_pre(residual, *mhc_weights(512), norm_weight=None, **mhc_settings).comb_mix.double()
    assert (comb > 0).all()
    assert ((comb.sum(1) - 1).abs() < 4 * 1e-6 + 8 * U).all()  # the last step divides columns by their sum plus eps


def test_norm_is_that_of_the_rounded_value(oracle: ModuleType, mhc_weights: Weights, mhc_settings: Settings) -> None:
    residual = torch.randn(21, 4, 320).bfloat16()
    weight = torch.randn(320).bfloat16()
    weights = mhc_weights(1280)
    plain = mhc_pre(residual, *weights, norm_weight=None, **mhc_settings)
    fused = mhc_pre(residual, *weights, norm_weight=weight, **mhc_settings)
    assert_bitwise_equal(fused.post_mix, plain.post_mix)
    assert_bitwise_equal(fused.comb_mix, plain.comb_mix)
    oracle.check_norm(plain.layer_input, fused.layer_input, weight, math.ceil(math.log2(320)))


@pytest.mark.parametrize(
    ("k", "splits"), [(128, 2), (2048, 2), (4096, 4), (7168, 7), (8192, 8), (16384, 16), (28672, 28)]
)
def test_num_splits(k: int, splits: int) -> None:
    assert mhc_num_splits(k) == splits


@pytest.mark.parametrize("k", [0, 64, 100, -128])
def test_num_splits_refuses(k: int) -> None:
    with pytest.raises(ArgumentError, match="multiple of 64"):
        mhc_num_splits(k)


def test_every_step_of_the_root_mean_square_is_rounded_once() -> None:
    sums = torch.rand(4000) * 5000
    for value, have in zip(sums.tolist(), reciprocal_rms(sums, 7168, 1e-6).tolist(), strict=True):
        # Python's float64 results are correctly rounded; rounding each of these again, to float32, is innocuous.
        mean = _f32(_f32(value / 7168) + _f32(1e-6))
        assert have == _f32(1.0 / _f32(math.sqrt(mean)))


def test_empty_batch(mhc_weights: Weights, mhc_settings: Settings) -> None:
    weight = torch.ones(128, dtype=torch.bfloat16)
    result = mhc_pre(torch.empty(0, 4, 128).bfloat16(), *mhc_weights(512), norm_weight=weight, **mhc_settings)
    assert [tuple(t.shape) for t in result] == [(0, 128), (0, 4), (0, 4, 4)]
    x = torch.empty(0, 128).bfloat16()
    broadcast = mhc_pre_broadcast(x, *mhc_weights(128), norm_weight=weight, **mhc_settings)
    assert tuple(broadcast.residual.shape) == (0, 4, 128)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_tokens_stay_alone(mhc_weights: Weights, mhc_settings: Settings, poison: float) -> None:
    residual = torch.randn(5, 4, 128).bfloat16()
    weight = torch.ones(128, dtype=torch.bfloat16)
    clean = mhc_pre(residual, *mhc_weights(512), norm_weight=weight, **mhc_settings)
    dirty = residual.clone()
    dirty[2, 1, 7], dirty[2, 3, 9] = poison, -poison
    result = mhc_pre(dirty, *mhc_weights(512), norm_weight=weight, **mhc_settings)
    for have, want in zip(result, clean, strict=True):
        keep = torch.tensor([0, 1, 3, 4])
        assert_bitwise_equal(have[keep], want[keep])
    nan32 = torch.full((4,), math.nan)
    assert_bitwise_equal(result.post_mix[2], nan32)
    assert_bitwise_equal(result.comb_mix[2], nan32.expand(4, 4))
    assert_bitwise_equal(result.layer_input[2], torch.full((128,), math.nan, dtype=torch.bfloat16))


def _buffers(tokens: int, hidden: int, value: float = -7.0) -> MhcPre:
    return MhcPre(
        torch.full((tokens, hidden), value, dtype=torch.bfloat16),
        torch.full((tokens, 4), value),
        torch.full((tokens, 4, 4), value),
    )


def test_writes_to_the_callers_buffers(mhc_weights: Weights, mhc_settings: Settings) -> None:
    residual = torch.randn(3, 4, 128).bfloat16()
    out = _buffers(3, 128)
    result = mhc_pre(residual, *mhc_weights(512), norm_weight=None, out=out, **mhc_settings)
    fresh = mhc_pre(residual, *mhc_weights(512), norm_weight=None, **mhc_settings)
    for have, want, mine in zip(result, fresh, out, strict=True):
        assert have is mine
        assert_bitwise_equal(have, want)


BAD = {
    "residual dtype": {"residual": torch.zeros(3, 4, 128)},
    "residual rank": {"residual": torch.zeros(3, 512).bfloat16()},
    "residual streams": {"residual": torch.zeros(3, 2, 128).bfloat16()},
    "residual stride": {"residual": torch.zeros(3, 4, 256).bfloat16()[..., ::2]},
    "hidden": {"residual": torch.zeros(3, 4, 100).bfloat16(), "fn": torch.zeros(24, 400), "norm_weight": None},
    "fn dtype": {"fn": torch.zeros(24, 512).bfloat16()},
    "fn shape": {"fn": torch.zeros(24, 511)},
    "fn device": {"fn": torch.zeros(24, 512, device="meta")},
    "scale": {"scale": torch.zeros(1)},
    "base": {"base": torch.zeros(23)},
    "norm_weight": {"norm_weight": torch.ones(128)},
    "rms_eps": {"rms_eps": -1e-6},
    "hc_eps": {"hc_eps": math.nan},
    "norm_eps": {"norm_eps": 1.0},
    "sinkhorn_iters": {"sinkhorn_iters": 0},
    "post_mult": {"post_mult": math.inf},
    "out shape": {"out": _buffers(4, 128)},
    "out type": {"out": tuple(_buffers(3, 128))},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_writes_nothing(mhc_weights: Weights, mhc_settings: Settings, case: str) -> None:
    fn, scale, base = mhc_weights(512)
    good: dict[str, Any] = {"residual": torch.randn(3, 4, 128).bfloat16(), "fn": fn, "scale": scale, "base": base}
    good |= {"norm_weight": torch.ones(128, dtype=torch.bfloat16), "out": _buffers(3, 128), **mhc_settings}
    arguments = good | BAD[case]
    with pytest.raises(ArgumentError):
        mhc_pre(**arguments)
    for tensor in arguments["out"]:
        assert_bitwise_equal(tensor, torch.full_like(tensor, -7.0))


def test_bad_broadcast_input(mhc_weights: Weights, mhc_settings: Settings) -> None:
    x = torch.randn(3, 128).bfloat16()
    weights = mhc_weights(128)
    with pytest.raises(ArgumentError, match=r"x: expected shape"):
        mhc_pre_broadcast(x[:, None], *weights, norm_weight=None, **mhc_settings)
    with pytest.raises(ArgumentError, match="fn_broadcast"):
        mhc_pre_broadcast(x, *mhc_weights(512), norm_weight=None, **mhc_settings)
    short = x[:, :64].contiguous()
    with pytest.raises(ArgumentError, match="multiple of 64"):
        mhc_pre_broadcast(short, *mhc_weights(64), norm_weight=None, **mhc_settings)
    with pytest.raises(ArgumentError, match="MhcPreBroadcast"):
        mhc_pre_broadcast(x, *weights, norm_weight=None, out=_buffers(3, 128), **mhc_settings)  # type: ignore[arg-type]


def test_output_may_not_overlap(mhc_weights: Weights, mhc_settings: Settings) -> None:
    residual = torch.randn(3, 4, 128).bfloat16()
    before = residual.clone()
    out = _buffers(3, 128)._replace(layer_input=residual.view(12, 128)[:3])
    with pytest.raises(ArgumentError, match="memory apart from residual"):
        mhc_pre(residual, *mhc_weights(512), norm_weight=None, out=out, **mhc_settings)
    assert_bitwise_equal(residual, before)
    shared = torch.zeros(80)
    out = _buffers(3, 128)._replace(post_mix=shared[:12].view(3, 4), comb_mix=shared[8:56].view(3, 4, 4))
    with pytest.raises(ArgumentError, match="memory apart from post_mix"):
        mhc_pre(residual, *mhc_weights(512), norm_weight=None, out=out, **mhc_settings)
