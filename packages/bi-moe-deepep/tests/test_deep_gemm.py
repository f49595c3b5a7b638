from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bi_kernels import ContractError
from bi_kernels.runtime.probe import contracts
from bi_moe_deepep import (
    enable_deep_gemm_batch_invariance,
    probe_deep_gemm,
    supports_deep_gemm_batch_invariance,
)
from bi_moe_deepep.deep_gemm import DEEP_GEMM

PRODUCTS = ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is searched first; the real libraries, if any, are out of sight."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return tmp_path


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


def test_fails_closed_even_with_a_build_that_looks_right(site: Path) -> None:
    install(site / "deep_gemm", *PRODUCTS, "set_batch_invariant")
    assert not supports_deep_gemm_batch_invariance()
    assert not supports_deep_gemm_batch_invariance(fp4_contiguous=True)
    with pytest.raises(ContractError, match="proven on this GPU"):
        enable_deep_gemm_batch_invariance()


def test_doctor_finds_the_contract() -> None:
    assert contracts()["deep_gemm"] is DEEP_GEMM
