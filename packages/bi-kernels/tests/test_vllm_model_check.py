"""The check before a model is built: all blockers at once, nothing built, self-tests that can fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bi_kernels import HookError, vllm_model_check
from bi_kernels.runtime import probe
from bi_kernels.runtime.errors import Blocker
from bi_kernels.runtime.hooks import HookPlan
from bi_kernels.testing.hooks import plain_config

CONFIG = SimpleNamespace(
    expert_dtype="fp8",
    hidden_size=2048,
    n_routed_experts=256,
    moe_intermediate_size=256,
    index_n_heads=64,
    vocab_size=1000,
)
CONTRACT = probe.Contract(name="library", expected="equal bits", remedy="Upgrade.", static=lambda: FINDING[0])
FINDING = [probe.Finding(True, "equal")]


def by_row(x):
    return x * 2


def by_batch(x):
    return x * len(x)


def case(op):
    return probe.SelfTest(
        name="op", op=op, control=by_batch if op is not by_batch else lambda x: x + len(x),
        rows=lambda n, device: (torch.arange(n * 4.0).view(n, 4),),
        build=lambda: "1", shape_key="H=4", remedy="Reinstall.",
    )  # fmt: skip


TESTS = [case(by_row)]


def of_model(config):
    assert config.hidden_size == 2048
    return tuple(TESTS)


@pytest.fixture
def model(monkeypatch):
    """A model class under the check, on a fake Hopper GPU, with one active plan of a contract and a self-test."""
    plan = HookPlan(
        package="bi-fake", import_name="bi_fake", patches=(),
        contracts=(f"{__name__}:CONTRACT",), self_tests=(f"{__name__}:of_model",),
    )  # fmt: skip
    monkeypatch.setattr(vllm_model_check, "model_hook_blockers", list)
    monkeypatch.setattr(vllm_model_check, "active_plans", lambda: (plan,))
    monkeypatch.setattr(vllm_model_check, "resolve", lambda name: globals()[name.partition(":")[2]])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *args: SimpleNamespace(type="cpu"))
    probe.clear_cache()

    class Model:
        built = False

        def __init__(self, *, vllm_config, prefix=""):
            self.built, self.prefix = True, prefix

    Model.__init__ = vllm_model_check.checked_init(Model.__init__)
    yield Model
    probe.clear_cache()


def config(**changes):
    return plain_config(model_config__hf_config=CONFIG, **changes)


def test_a_model_that_is_aligned_is_built(model):
    import inspect

    built = model(vllm_config=config(), prefix="p")
    assert (built.built, built.prefix) == (True, "p")
    # vLLM decides by the signature how to call a model class.
    assert list(inspect.signature(model).parameters) == ["vllm_config", "prefix"]


def test_every_blocker_at_once_and_nothing_built(model, monkeypatch):
    hook = Blocker("bi-x", "its hooks to be active", "inactive", "Look in the log.")
    monkeypatch.setattr(vllm_model_check, "model_hook_blockers", lambda: [hook])
    FINDING[0] = probe.Finding(False, "other bits")
    TESTS[0] = case(by_batch)
    new = object.__new__(model)
    try:
        with pytest.raises(HookError) as error:
            new.__init__(vllm_config=config(lora_config=SimpleNamespace(max_lora_rank=8)))
    finally:
        FINDING[0], TESTS[0] = probe.Finding(True, "equal"), case(by_row)
    subjects = [blocker.subject for blocker in error.value.blockers]
    assert subjects == ["bi-x", "LoRA (enable_lora)", "library", "op"]
    assert not new.built


def test_a_self_test_that_breaks_is_a_blocker(model, monkeypatch):
    monkeypatch.setitem(globals(), "TESTS", [case(lambda x: 1 / 0)])
    (blocker,) = vllm_model_check.model_blockers(config())
    assert "ZeroDivisionError" in blocker.found
    assert blocker.subject == "self-test op [H=4]"


def test_self_tests_see_torchs_own_default_dtype(model, monkeypatch):
    seen = []

    def op(x):
        seen.append(torch.zeros(1).dtype)
        return x * 2

    monkeypatch.setitem(globals(), "TESTS", [case(op)])
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it builds a model
    try:
        assert vllm_model_check.model_blockers(config()) == []
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(seen) == {torch.float32}


def test_on_another_gpu_nothing_is_run(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    monkeypatch.setitem(globals(), "TESTS", [case(lambda x: 1 / 0)])
    (blocker,) = vllm_model_check.model_blockers(config())
    assert "got 12.0" in blocker.found


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [2048, 4096, 7168])
def test_our_ops_pass_on_the_models_shapes_and_their_twins_do_not(hidden):
    shapes = SimpleNamespace(
        hidden_size=hidden, n_routed_experts=256, moe_intermediate_size=2048, index_n_heads=64, vocab_size=129_280
    )
    found = vllm_model_check.self_tests(shapes)
    assert len(found) == 8
    for test in found:  # run_self_test raises where the twin goes unnoticed
        report = probe.run_self_test(test, device=torch.device("cuda", 0))
        assert report.ok, report
        assert report.comparisons > (30 if "log_softmax" in test.name else 100)  # its batches are few and wide
