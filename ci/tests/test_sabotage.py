"""Every sabotage is caught as the table says, and a fault that nobody planted is not."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

import bi_sparse_attn as sparse
from aligned_e2e import model
from aligned_e2e.prompts import load_book
from aligned_e2e.replaced import Package, replaced
from aligned_e2e.sabotage import SABOTAGES, Healthy, Sabotage, commit, healthy_run, save_traces, small_sides
from bi_kernels.testing.trace import main as bi_bisect


@pytest.fixture(scope="module")
def healthy() -> Healthy:
    vocabulary, book = load_book()
    return healthy_run(small_sides(vocabulary.size, book))


def test_there_are_enough_and_every_kind_of_proof_is_used() -> None:
    assert len({s.name for s in SABOTAGES}) == len(SABOTAGES) >= 12
    assert {s.caught_by for s in SABOTAGES} == {"bits", "trace", "plan", "refusal", "fingerprint", "attestation"}


@pytest.mark.parametrize("fault", SABOTAGES, ids=lambda s: re.sub(r"\W+", "-", s.name))
def test_sabotage_is_caught_and_located(fault: Sabotage, healthy: Healthy) -> None:
    finding = commit(fault, healthy)
    assert finding.caught, finding
    if fault.caught_by in {"bits", "trace"}:
        assert finding.located_op is not None


def test_demonstration_in_the_readme(
    healthy: Healthy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (name,) = re.findall(r'^PYTHONPATH=ci python -m aligned_e2e.sabotage "(.*)" traces$', readme, re.M)
    (shown,) = re.findall(r"```text\n(.*?)```", readme, re.S)
    (fault,) = (s for s in SABOTAGES if s.name == name)
    monkeypatch.setenv("COLUMNS", "80")
    assert bi_bisect([str(path) for path in save_traces(fault, healthy.sides, tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_without_a_fault_nobody_complains(healthy: Healthy) -> None:
    finding = commit(Sabotage("none", contextlib.nullcontext), healthy)
    assert finding.caught_by is None
    assert not finding.caught


def test_a_fault_in_another_place_than_expected_does_not_count(healthy: Healthy) -> None:
    router = next(s for s in SABOTAGES if s.name.startswith("router"))
    finding = commit(Sabotage("moved", router.plant, layer=1, op="router logits"), healthy)
    assert finding.located_layer == 0
    assert not finding.caught


def test_replaced_puts_back_what_it_took_and_refuses_names_that_do_not_exist() -> None:
    before = model.sparse

    def fail() -> None:
        with replaced(model, sparse=Package(sparse)):
            assert model.sparse is not before
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert model.sparse is before
    with pytest.raises(AttributeError), replaced(model, spars=1):
        pass
