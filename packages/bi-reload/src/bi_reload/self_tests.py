"""mHC on a model's real shapes, run by the model check and by bi-doctor before the first forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from bi_kernels.runtime.native import libraries
from bi_kernels.runtime.probe import SelfTest

from . import mhc_head, mhc_post, mhc_pre, mhc_pre_broadcast

if TYPE_CHECKING:
    from bi_kernels.runtime.probe import Op

__all__ = ["self_tests"]


def self_tests(config: Any) -> tuple[SelfTest, ...]:
    """The four mHC ops on the shapes of a model with ``config`` (its ``hf_config``): each op and its twin.

    The twin of each op first divides its rows by the largest value of the batch, which is how one scale for a whole
    batch couples requests.
    """
    hidden = config.hidden_size
    settings = {"rms_eps": config.rms_norm_eps, "hc_eps": config.hc_eps}
    pre = {**settings, "norm_eps": config.rms_norm_eps, "sinkhorn_iters": config.hc_sinkhorn_iters}

    def run_pre(residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = _weights(24, 4 * hidden, 3, residual.device)
        return mhc_pre(residual, *weights, norm_weight=_norm(hidden, residual.device), **pre)

    def run_broadcast(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = _weights(24, hidden, 3, x.device)
        return mhc_pre_broadcast(x, *weights, norm_weight=_norm(hidden, x.device), **pre)

    def run_head(residual: torch.Tensor) -> torch.Tensor:
        return mhc_head(residual, *_weights(4, 4 * hidden, 1, residual.device), **settings)

    def post_rows(rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        gates = (_normal(device, rows, 4).float(), _normal(device, rows, 4, 4).float())
        return _normal(device, rows, hidden), _normal(device, rows, 4, hidden), *gates

    def streams(rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        return (_normal(device, rows, 4, hidden),)

    return (
        _test("mhc_pre", hidden, run_pre, streams),
        _test("mhc_pre_broadcast", hidden, run_broadcast, lambda rows, device: (_normal(device, rows, hidden),)),
        _test("mhc_post", hidden, mhc_post, post_rows),
        _test("mhc_head", hidden, run_head, streams),
    )


def _test(name: str, hidden: int, op: Op, rows: Callable[[int, torch.device], tuple[torch.Tensor, ...]]) -> SelfTest:
    def by_batch(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        return op((x / x.float().abs().amax()).bfloat16(), *rest)

    return SelfTest(
        name=f"bi_reload.{name}",
        op=op,
        control=by_batch,
        rows=rows,
        build=lambda: str(libraries()["bi_reload"].describe()["sha256"]),
        shape_key=f"H={hidden}",
        remedy="Reinstall bi-reload, and report this with bi-doctor's output.",
    )


@functools.cache
def _weights(rows: int, k: int, scales: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # The dtype is named: while vLLM builds a model, torch's default is the model's.
    g, float32 = torch.Generator(device).manual_seed(k), torch.float32
    fn = torch.randn(rows, k, generator=g, device=device, dtype=float32) * k**-0.5
    base = torch.randn(rows, generator=g, device=device, dtype=float32) * 0.5
    return fn, torch.ones(scales, device=device, dtype=float32), base


@functools.cache
def _norm(hidden: int, device: torch.device) -> torch.Tensor:
    return torch.ones(hidden, dtype=torch.bfloat16, device=device)


def _normal(device: torch.device, *shape: int) -> torch.Tensor:
    g = torch.Generator(device).manual_seed(len(shape))
    return torch.randn(*shape, generator=g, device=device, dtype=torch.float32).bfloat16()
