from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bi_kernels import Arch, ContractError
from bi_kernels.runtime.packages import resolve
from bi_kernels.runtime.probe import SelfTestReport
from bi_moe_deepep import (
    deep_gemm_proof,
    enable_deep_gemm_batch_invariance,
    probe_deep_gemm,
    supports_deep_gemm_batch_invariance,
)
from bi_moe_deepep.deep_gemm import DEEP_GEMM
from bi_moe_deepep.vllm_hook import PLAN

PRODUCTS = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that is searched first; the real libraries, if any, are out of sight."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    yield tmp_path
    sys.modules.pop("deep_gemm", None)


def install(directory: Path, *symbols: str, version: str = "2.5.0") -> None:
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text(f"raise SystemExit('imported')\n__version__ = '{version}'\n")
    (directory / "_C.so").write_bytes(b"\x7fELF" + b"".join(f"\0{symbol}\0".encode() for symbol in symbols))


def test_nothing_installed(site: Path) -> None:
    assert probe_deep_gemm() is None
    assert not supports_deep_gemm_batch_invariance()
    with pytest.raises(ContractError, match="no deep_gemm and no vllm"):
        enable_deep_gemm_batch_invariance()


def test_finds_the_copy_inside_vllm_without_importing_it(site: Path) -> None:
    install(site / "vllm")
    install(site / "vllm" / "third_party" / "deep_gemm", *PRODUCTS, "set_mk_alignment_for_contiguous_layout")
    build = probe_deep_gemm()
    assert build is not None
    assert (build.module, build.version) == ("vllm.third_party.deep_gemm", "2.5.0")
    assert not build.missing
    assert not build.has_switch
    assert len(build.sha256) == 64
    assert DEEP_GEMM.static_blockers() == ()


def test_a_top_level_deep_gemm_takes_precedence_as_in_vllm(site: Path) -> None:
    install(site / "vllm")
    install(site / "vllm" / "third_party" / "deep_gemm", *PRODUCTS)
    install(site / "deep_gemm", *PRODUCTS, "set_batch_invariant", version="0.2")
    build = probe_deep_gemm()
    assert build is not None
    assert (build.module, build.version, build.has_switch, build.missing) == ("deep_gemm", "0.2", True, ())


def test_says_what_is_missing(site: Path) -> None:
    install(site / "deep_gemm", "fp8_gemm_nt_skip_head_mid", *PRODUCTS[1:], "set_batch_invariant")
    build = probe_deep_gemm()
    assert build is not None
    assert build.missing == ("fp8_gemm_nt",)  # a longer name that begins so does not count
    (blocker,) = DEEP_GEMM.static_blockers()
    assert "without fp8_gemm_nt" in blocker.found
    (site / "deep_gemm" / "_C.so").unlink()
    build = probe_deep_gemm()
    assert build is not None
    assert build.missing == ("_C*.so", *PRODUCTS, "set_mk_alignment_for_contiguous_layout")


def test_without_a_gpu_it_is_not_proven(site: Path) -> None:
    install(site / "deep_gemm", *PRODUCTS, "set_batch_invariant")
    assert not supports_deep_gemm_batch_invariance()
    assert not supports_deep_gemm_batch_invariance(fp4_contiguous=True)
    with pytest.raises(ContractError, match="no GPU to prove it on"):
        enable_deep_gemm_batch_invariance()


FORK = """
state = {"invariant": False, "alignment": 64}
def get_batch_invariant(): return state["invariant"]
def set_batch_invariant(on): state["invariant"] = on
def get_mk_alignment_for_contiguous_layout(): return state["alignment"]
def set_mk_alignment_for_contiguous_layout(rows): state["alignment"] = rows
def fp8_gemm_nt(*a): pass
m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_masked = fp8_gemm_nt
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A GPU that is said to be there, and the state of the library each time that it was to be proven."""
    seen: list[dict[str, object]] = []

    def prove(
        shapes: deep_gemm_proof.DeepGemmShapes, *, products: deep_gemm_proof.Products
    ) -> tuple[SelfTestReport, ...]:
        assert shapes is deep_gemm_proof.V4_FLASH  # no vLLM is building a model here
        seen.append(dict(products.module.state))
        return (SelfTestReport("deep_gemm.fp8_gemm_nt", True, 48, "48 rows with equal bytes"),)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("bi_kernels.arch.detect_arch", lambda device: Arch.SM90)
    monkeypatch.setattr(deep_gemm_proof, "prove_deep_gemm", prove)
    return seen


def fork(site: Path, source: str = FORK) -> None:
    install(site / "deep_gemm", *PRODUCTS, "set_batch_invariant")
    (site / "deep_gemm" / "__init__.py").write_text(source)


def test_a_forks_switch_is_thrown_read_back_and_put_back(site: Path, gpu: list[dict[str, object]]) -> None:
    fork(site)
    assert supports_deep_gemm_batch_invariance()
    import deep_gemm

    assert deep_gemm.state == {"invariant": False, "alignment": 64}  # asking changes nothing
    assert gpu == [{"invariant": True, "alignment": 64}]
    enable_deep_gemm_batch_invariance()
    assert deep_gemm.state == {"invariant": True, "alignment": 128}


def test_a_switch_that_does_not_stick_is_refused(site: Path, gpu: list[dict[str, object]]) -> None:
    fork(site, FORK.replace('state["invariant"] = on', "pass"))
    assert not supports_deep_gemm_batch_invariance()
    with pytest.raises(ContractError, match=r"read back: expected True; found False"):
        enable_deep_gemm_batch_invariance()
    assert gpu == []


def test_without_a_switch_only_hopper_can_be_proven(
    site: Path, gpu: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site / "deep_gemm", *PRODUCTS, "set_mk_alignment_for_contiguous_layout")
    (site / "deep_gemm" / "__init__.py").write_text(FORK.replace("_batch_invariant", "_other"))
    assert supports_deep_gemm_batch_invariance()
    monkeypatch.setattr("bi_kernels.arch.detect_arch", lambda device: Arch.SM100)
    assert not supports_deep_gemm_batch_invariance()
    with pytest.raises(ContractError, match="only Hopper's do not"):
        enable_deep_gemm_batch_invariance()


def test_doctor_finds_the_contract() -> None:
    assert [resolve(name) for name in PLAN.contracts] == [DEEP_GEMM]
