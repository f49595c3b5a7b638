from __future__ import annotations

import pytest
import torch

from bi_kernels.runtime import probe
from bi_kernels.runtime.errors import ContractError
from bi_kernels.runtime.probe import Contract, Finding, SelfTest, run_self_test

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("clean_environment")


def rows(count, device):
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(count, 8, generator=generator).to(torch.bfloat16)
    return values.to(device), torch.randint(0, 9, (count,), generator=generator, dtype=torch.int32).to(device)


def invariant(x, index):
    return x.float() * 2, index + 1


def leaks_from_neighbours(x, index):
    return x.float() * 2 + x.float().sum(0) * 0.5, index + 1


def self_test(op=invariant, control=leaks_from_neighbours, **changes):
    settings = {"name": "t", "rows": rows, "build": lambda: "b", "shape_key": "H=8", "remedy": "Use another one."}
    return SelfTest(op=op, control=control, **{**settings, **changes})


def test_an_invariant_op_passes():
    report = run_self_test(self_test(), device=CPU)
    assert report.ok
    assert report.blockers == ()
    assert report.comparisons > 100
    assert f"{report.comparisons} rows with equal bytes" == report.found


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (lambda x, i: leaks_from_neighbours(x, i), "among random rows"),
        (lambda x, i: (x + (len(x) > 64), i), "of 65 among random rows"),
        (lambda x, i: (x + torch.arange(len(x))[:, None] // 100, i), "position 128 of 129"),
        (lambda x, i: (x, i + i.max()), "output 1"),
        (lambda x, i: x.float() + 0.0 * x.float().amax(0), "among nan rows"),
        (lambda x, i: torch.where(x[:1] == 0, -0.0, 0.0) * x.float() * 0, "among zero rows"),
        (lambda x, i: x.float() if len(x) == 1 else x.double(), "torch.float64"),
    ],
)
def test_every_kind_of_batch_dependence_is_found(op, words):
    report = run_self_test(self_test(op=op), device=CPU)
    assert not report.ok
    assert words in report.found
    assert report.blockers[0].remedy == "Use another one."


def test_without_its_neighbours_a_nan_leak_would_not_show():
    leak = self_test(op=lambda x, i: x.float() + 0.0 * x.float().amax(0), neighbours=("random",))
    assert run_self_test(leak, device=CPU).ok


def test_a_control_that_is_not_noticed_is_an_error():
    with pytest.raises(ContractError, match="cannot tell"):
        run_self_test(self_test(control=lambda x, i: (x, i)), device=CPU)


def test_a_self_test_without_a_control_cannot_be_made():
    with pytest.raises(TypeError, match="control"):
        SelfTest(name="t", op=invariant, rows=rows, build=str, shape_key="", remedy="")
    for control in (None, invariant):
        with pytest.raises(TypeError, match="control must be a batch-dependent twin"):
            self_test(control=control)


@pytest.mark.parametrize(
    "bad",
    [{"neighbours": ("odd",)}, {"neighbours": ()}, {"batch_sizes": (1,)}, {"batch_sizes": ()}, {"batch_sizes": (0, 4)}],
)
def test_a_self_test_that_would_compare_nothing_cannot_be_made(bad):
    with pytest.raises(TypeError, match=r"self-test t: (neighbours|batch_sizes) must be"):
        self_test(**bad)


def test_outcomes_are_cached_per_build_and_shape():
    calls = []

    def op(x, index):
        calls.append(1)
        return x, index

    first = run_self_test(self_test(op=op), device=CPU)
    ran = len(calls)
    assert run_self_test(self_test(op=op), device=CPU) is first
    assert len(calls) == ran
    run_self_test(self_test(op=op, build=lambda: "another"), device=CPU)
    assert len(calls) == 2 * ran
    run_self_test(self_test(op=op, shape_key="H=16"), device=CPU)
    assert len(calls) == 3 * ran
    probe.clear_cache()
    run_self_test(self_test(op=op), device=CPU)
    assert len(calls) == 4 * ran


def contract(**changes):
    return Contract(**{"name": "deep_gemm", "expected": "2.5", "remedy": "Upgrade it.", **changes})


def test_a_contract_that_holds():
    held = contract(static=lambda: Finding(True, "2.5.0"), dynamic=lambda: Finding(True, "equal bits"))
    assert held.static_blockers() == ()
    report = held.require()
    assert (report.ok, report.found, report.blockers) == (True, "equal bits", ())


def test_a_contract_that_fails_statically_runs_nothing():
    report = contract(static=lambda: Finding(False, "1.0"), dynamic=lambda: 1 / 0).probe()
    assert (report.ok, report.found) == (False, "1.0")
    assert str(report.blockers[0]) == "deep_gemm: expected 2.5; found 1.0. Upgrade it."


def test_a_contract_that_fails_dynamically_raises_a_typed_error():
    with pytest.raises(ContractError, match="other bits"):
        contract(static=lambda: Finding(True, "2.5"), dynamic=lambda: Finding(False, "other bits")).require()


def test_a_probe_that_breaks_is_a_contract_that_does_not_hold():
    report = contract(dynamic=lambda: 1 / 0).probe()
    assert not report.ok
    assert "ZeroDivisionError" in report.found


def test_a_contract_needs_a_probe():
    with pytest.raises(TypeError, match="static or a dynamic probe"):
        contract()
