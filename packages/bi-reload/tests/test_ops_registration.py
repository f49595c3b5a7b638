from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bi_kernels.runtime.errors import NativeLibraryError
from bi_kernels.runtime.native import require_native
from bi_reload import _ops, mhc_head, mhc_post, mhc_pre, mhc_pre_broadcast

HIDDEN = 128


def _pre(weights: Callable[..., Any], tokens: int, norm: bool) -> tuple[Any, ...]:
    fn, scale, base = weights(4 * HIDDEN)
    residual = torch.randn(tokens, 4, HIDDEN).bfloat16()
    norm_weight = torch.ones(HIDDEN, dtype=torch.bfloat16) if norm else None
    outputs = (torch.empty_like(residual[:, 0]), torch.empty(tokens, 4), torch.empty(tokens, 4, 4))
    return residual, fn, scale, base, norm_weight, 1e-6, 1e-6, 1e-6, 3, 2.0, *outputs


@pytest.mark.parametrize("tokens", [1, 3])  # opcheck itself cannot clone an empty tensor
@pytest.mark.parametrize("norm", [False, True])
def test_mhc_pre(mhc_weights: Callable[..., Any], tokens: int, norm: bool) -> None:
    torch.library.opcheck(_ops.mhc_pre, _pre(mhc_weights, tokens, norm))


def test_mhc_pre_broadcast(mhc_weights: Callable[..., Any]) -> None:
    residual, fn, *rest = _pre(mhc_weights, 3, True)
    x, fn = residual[:, 0].contiguous(), fn[:, :HIDDEN].contiguous()
    torch.library.opcheck(_ops.mhc_pre_broadcast, (x, fn, *rest, torch.empty_like(residual)))


def test_mhc_post() -> None:
    residual = torch.randn(3, 4, HIDDEN).bfloat16()
    arguments = (residual[:, 0].contiguous(), residual, torch.rand(3, 4), torch.rand(3, 4, 4))
    torch.library.opcheck(_ops.mhc_post, (*arguments, torch.empty_like(residual)))


def test_mhc_head(mhc_weights: Callable[..., Any]) -> None:
    residual = torch.randn(3, 4, HIDDEN).bfloat16()
    weights = mhc_weights(4 * HIDDEN, 4, 1)
    torch.library.opcheck(_ops.mhc_head, (residual, *weights, 1e-6, 1e-6, torch.empty_like(residual[:, 0])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_padded_copy(dtype: torch.dtype) -> None:
    torch.library.opcheck(_ops.padded_copy_, (torch.zeros(5, 2, dtype=dtype), torch.ones(3, 2, dtype=dtype), -1))


def test_fingerprint() -> None:
    data = torch.arange(21, dtype=torch.uint8)
    torch.library.opcheck(_ops.fingerprint, (data, torch.zeros(1, dtype=torch.int64)))


def test_missing_kernels_are_refused_by_name() -> None:
    ops = [f"bi_reload::{name}" for name in _ops.__all__]
    with pytest.raises(NativeLibraryError) as caught:
        require_native(*ops)
    for op in ops:
        assert op in str(caught.value)


def test_no_op_makes_its_results_require_a_gradient(mhc_weights: Callable[..., Any]) -> None:
    weights = [torch.nn.Parameter(t) for t in mhc_weights(4 * HIDDEN)]
    residual = torch.randn(2, 4, HIDDEN).bfloat16().requires_grad_()
    settings = {"norm_weight": None, "rms_eps": 1e-6, "hc_eps": 1e-6, "norm_eps": 1e-6}
    pre = mhc_pre(residual, *weights, **settings)
    broadcast = mhc_pre_broadcast(
        residual[:, 0].contiguous(), weights[0][:, :HIDDEN].contiguous(), *weights[1:], **settings
    )
    post = mhc_post(residual[:, 0].contiguous(), residual, pre.post_mix, pre.comb_mix)
    head = mhc_head(residual, weights[0][:4], weights[1][:1], weights[2][:4], rms_eps=1e-6, hc_eps=1e-6)
    assert not any(t.requires_grad for t in (*pre, *broadcast, post, head))
