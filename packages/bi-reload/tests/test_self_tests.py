"""What the model check runs: on the reference every op passes and every twin is found."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from bi_kernels.runtime import probe
from bi_reload import self_tests
from bi_reload.vllm_hook import PLAN


def of_model(hidden: int) -> tuple[probe.SelfTest, ...]:
    config = SimpleNamespace(hidden_size=hidden, rms_norm_eps=1e-6, hc_eps=1e-6, hc_sinkhorn_iters=20)
    return self_tests.self_tests(config)


def test_the_plan_names_them() -> None:
    assert PLAN.self_tests == ("bi_reload.self_tests:self_tests",)


@pytest.mark.parametrize("index", range(4))
def test_ops_pass_and_twins_do_not(index: int) -> None:
    test = dataclasses.replace(of_model(128)[index], batch_sizes=(1, 2, 17), build=lambda: "reference")
    self_tests._weights.cache_clear()
    torch.set_default_dtype(torch.bfloat16)  # as it is while vLLM builds a model
    try:
        report = probe.run_self_test(test, device=torch.device("cpu"))  # raises where the twin goes unnoticed
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.ok, report


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [2048, 4096, 7168])
def test_kernels_pass_on_the_models_shapes(hidden: int) -> None:
    for test in of_model(hidden):
        report = probe.run_self_test(test, device=torch.device("cuda", 0))
        assert report.ok, report


def test_names_are_those_of_the_ops() -> None:
    assert [test.name for test in of_model(128)] == [
        "bi_reload.mhc_pre",
        "bi_reload.mhc_pre_broadcast",
        "bi_reload.mhc_post",
        "bi_reload.mhc_head",
    ]
