"""The mHC hooks inside vLLM 0.26's own modules on a Hopper GPU."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

COUNTS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 1000, 2048, 2049, 5000)
SETTINGS = (1e-6, 1e-6, 1e-6, 2.0, 20)
HIDDEN = (2048, 4096)


@pytest.fixture(scope="module")
def hooked() -> Any:
    os.environ.update(VLLM_BATCH_INVARIANT="1", VLLM_USE_FLASHINFER_SAMPLER="0", BI_PARTIAL="1")
    from bi_kernels.runtime import hooks
    from bi_reload.vllm_hook import PLAN

    # Ready or not: this is where the patches become so.
    plan = dataclasses.replace(PLAN, patches=tuple(dataclasses.replace(p, ready=True, needs="") for p in PLAN.patches))
    yield hooks.activate(plan)
    hooks.deactivate(plan)


def weights(hidden: int, rows: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator("cuda").manual_seed(hidden)
    k = 4 * hidden
    fn = torch.randn(rows, k, generator=g, device="cuda") * k**-0.5
    return fn, torch.ones(3, device="cuda"), torch.randn(rows, generator=g, device="cuda") * 0.5


def equal(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    from bi_kernels.testing import assert_bitwise_equal

    assert_bitwise_equal(got.contiguous(), want.contiguous(), label)


def test_every_module_looks_up_the_explicit_ops(hooked: Any) -> None:
    import importlib

    from bi_reload import vllm_mhc

    for module, names in {
        "model": ("mhc_pre", "mhc_pre_broadcast", "mhc_fused_post_pre", "mhc_post", "hc_head_fused_kernel"),
        "mtp": ("mhc_post", "hc_head_fused_kernel"),
        "dspark": ("mhc_post", "hc_head_fused_kernel"),
    }.items():
        theirs = importlib.import_module(f"vllm.models.deepseek_v4.nvidia.{module}")
        for name in names:
            assert getattr(theirs, f"{name}_tilelang") is getattr(vllm_mhc, name), (module, name)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_one_path_for_every_count(hooked: Any, hidden: int) -> None:
    """Any count, any position, any permutation: the bits of a token are its own."""
    from vllm.models.deepseek_v4.nvidia import model

    fn, scale, base = weights(hidden)
    g = torch.Generator("cuda").manual_seed(1)
    residual = torch.randn(5000, 4, hidden, generator=g, device="cuda").bfloat16()
    x = torch.randn(5000, hidden, generator=g, device="cuda").bfloat16()
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    wide, narrow = fn[:, :hidden].contiguous(), fn[:4].contiguous()
    post, comb, _ = model.mhc_pre_tilelang(residual, fn, scale, base, *SETTINGS, norm_weight=norm)

    def fused(rows: Any) -> Any:
        return model.mhc_fused_post_pre_tilelang(
            x[rows].contiguous(), residual[rows].contiguous(), post[rows].contiguous(), comb[rows].contiguous(),
            fn, scale, base, *SETTINGS, n_splits=1, tile_n=1, norm_weight=norm,
        )  # fmt: skip

    def first(rows: Any) -> Any:
        return model.mhc_pre_broadcast_tilelang(
            x[rows].contiguous(), fn, scale, base, *SETTINGS, norm_weight=norm, fn_broadcast=wide
        )

    def head(rows: Any) -> Any:
        return (
            model.hc_head_fused_kernel_tilelang(residual[rows].contiguous(), narrow, scale[:1], base[:4], 1e-6, 1e-6),
        )

    for run in (fused, first, head):
        whole = run(slice(None))
        for count in COUNTS:
            for start in {0, 5000 - count}:
                for i, (got, want) in enumerate(zip(run(slice(start, start + count)), whole, strict=True)):
                    equal(got, want[start : start + count], f"{run.__name__}, {count} tokens at {start}, result {i}")
        order = torch.randperm(5000, generator=g, device="cuda")
        for i, (got, want) in enumerate(zip(run(order), whole, strict=True)):
            equal(got, want[order], f"{run.__name__}, permuted, result {i}")


@pytest.mark.parametrize("hidden", HIDDEN)
def test_vllms_own_functions_take_the_constant_split(hooked: Any, hidden: int) -> None:
    """A trainer may call them directly: with a split of K alone they are row-invariant too."""
    from vllm.model_executor.kernels.mhc import tilelang

    fn, scale, base = weights(hidden)
    g = torch.Generator("cuda").manual_seed(2)
    residual = torch.randn(5000, 4, hidden, generator=g, device="cuda").bfloat16()
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def stock(rows: torch.Tensor) -> Any:
        return tilelang.mhc_pre_tilelang(rows.contiguous(), fn, scale, base, *SETTINGS, norm_weight=norm)

    whole = stock(residual)
    for count in COUNTS:
        for got, want in zip(stock(residual[:count]), whole, strict=True):
            equal(got, want[:count], f"{count} tokens")


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_split_that_follows_the_grid_is_found(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin, B17: multiprocessors divided by blocks of tokens, so that 5,000 tokens and 129 do not agree."""
    from vllm.model_executor.kernels.mhc import tilelang, tilelang_kernels

    def by_grid(block_k: int, k: int, grid_size: int) -> int:
        return max(1, min(132 // grid_size, k // block_k // 4))

    monkeypatch.setattr(tilelang_kernels, "compute_num_split", by_grid)
    fn, scale, base = weights(hidden)
    residual = torch.randn(5000, 4, hidden, device="cuda").bfloat16()
    many = tilelang.mhc_pre_tilelang(residual, fn, scale, base, *SETTINGS)[0]
    few = tilelang.mhc_pre_tilelang(residual[:129].contiguous(), fn, scale, base, *SETTINGS)[0]
    assert not torch.equal(few, many[:129])
