from __future__ import annotations

import dataclasses
import importlib
import json

import pytest
import torch
from fake_vllm import patch

import bi_kernels
from bi_kernels.runtime import attest as module
from bi_kernels.runtime import hooks, packages
from bi_kernels.runtime.attest import Attestation, attest, compare
from bi_kernels.runtime.errors import AttestationError, UnsupportedArchError


@pytest.fixture
def only_fake(world, monkeypatch):
    """The fake package is the whole set of packages."""
    for owner in (hooks, packages, module):
        monkeypatch.setattr(owner, "PACKAGES", {"bi-fake": "bi_fake"})
    return world


def test_without_a_gpu(clean_environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    record = attest()
    assert (record.arch, record.scale_format) == (None, None)
    assert record.packages["bi-kernels"] == bi_kernels.__version__
    assert record.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert set(record.packages) == set(packages.PACKAGES)
    assert record.native["bi_kernels"]["sha256"] is None or len(record.native["bi_kernels"]["sha256"]) == 64
    assert record.environment == {}


def test_an_unsupported_gpu_is_not_attested_as_another_one(clean_environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    with pytest.raises(UnsupportedArchError):
        attest()


def test_a_missing_package_is_never_aligned(clean_environment, monkeypatch):
    monkeypatch.setattr(packages, "PACKAGES", {"bi-kernels": "bi_kernels", "bi-ghost": "bi_ghost"})
    monkeypatch.setattr(module, "PACKAGES", packages.PACKAGES)
    record = attest()
    assert record.packages["bi-ghost"] is None
    assert record.aligned is False
    monkeypatch.setattr(packages, "PACKAGES", {"bi-kernels": "bi_kernels"})
    monkeypatch.setattr(module, "PACKAGES", packages.PACKAGES)
    assert attest().aligned is True


def test_a_partial_run_says_so_and_is_never_aligned(only_fake, monkeypatch):
    assert attest().aligned is True
    monkeypatch.setenv("BI_PARTIAL", "1")
    record = attest()
    assert (record.partial, record.aligned) == (True, False)
    assert record.environment["BI_PARTIAL"] == "1"


def test_vllm_without_our_hooks_is_not_aligned(only_fake):
    plan = only_fake.plan(patch("vllm.ops:top_k"))
    importlib.import_module("vllm.ops")
    assert attest().aligned is False
    with pytest.raises(AttestationError, match="the hooks of bi-fake are not active"):
        attest(required=["bi-fake"])
    hooks.activate(plan)
    record = attest(required=["bi-fake"])
    assert record.aligned is True
    assert record.hooks == {"bi-fake": {"version": "0.1.0", "vllm": "0.26.0", "patches": ["vllm.ops:top_k"]}}


def test_every_missing_requirement_is_named(clean_environment):
    with pytest.raises(AttestationError) as raised:
        attest(required=["bi-kernels", "bi-ghost", "bi-spectre"])
    assert "bi-ghost is not installed; bi-spectre is not installed" in str(raised.value)


def test_an_overwritten_edit_is_not_attested(only_fake):
    hooks.activate(only_fake.plan(patch("vllm.ops:top_k")))
    importlib.import_module("vllm.ops").top_k = len
    with pytest.raises(AttestationError, match=r"vllm\.ops:top_k no longer holds its replacement"):
        attest()


def test_the_digest_follows_every_field_and_nothing_else(clean_environment):
    record = attest()
    assert record.digest == attest().digest
    assert len(record.digest) == 64
    changed = {
        "schema": 2,
        "aligned": not record.aligned,
        "partial": not record.partial,
        "packages": {},
        "versions": {},
        "hooks": {"x": {}},
        "native": {},
        "arch": "SM90",
        "scale_format": "UE8M0",
        "environment": {"A": "1"},
    }
    assert set(changed) == {field.name for field in dataclasses.fields(record)}
    digests = {dataclasses.replace(record, **{name: value}).digest for name, value in changed.items()}
    assert len(digests | {record.digest}) == len(changed) + 1


def test_the_place_of_the_install_is_not_part_of_the_record(clean_environment):
    assert str(packages.package_directories("bi_kernels")[0]) not in attest().to_json()


def test_json_round_trip(clean_environment):
    record = attest()
    text = record.to_json()
    assert json.loads(text)["digest"] == record.digest
    again = Attestation.from_json(text)
    assert again == record
    compare(record, again)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"digest": "0"}', "null"])
def test_something_else_than_a_record_is_refused(text):
    with pytest.raises(AttestationError, match="expected a record of layout"):
        Attestation.from_json(text)


def test_a_record_that_was_changed_on_its_way_is_refused(clean_environment):
    text = attest().to_json().replace('"arch":null', '"arch":"SM90"')
    with pytest.raises(AttestationError, match="was changed on its way"):
        Attestation.from_json(text)


def test_compare_lists_every_difference(clean_environment):
    mine = attest()
    theirs = dataclasses.replace(
        mine,
        arch="SM100",
        environment={"BI_EP_TRANSPORT": "nccl"},
        packages={**mine.packages, "bi-kernels": "9.9.9"},
    )
    with pytest.raises(AttestationError) as raised:
        compare(mine, theirs)
    text = str(raised.value)
    assert f'packages.bi-kernels: "{bi_kernels.__version__}" here, "9.9.9" there' in text
    assert '"SM100" there' in text
    assert 'environment.BI_EP_TRANSPORT: absent here, "nccl" there' in text
    assert "versions" not in text
