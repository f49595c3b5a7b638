"""The proof of a DeepGEMM's products, run on stand-ins that have the references' arithmetic, or not quite."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch

from bi_kernels import ContractError
from bi_kernels.runtime import probe
from bi_moe_deepep import deep_gemm_proof, fp8_gemm
from bi_moe_deepep.deep_gemm_proof import DeepGemmShapes, Products, deep_gemm_self_tests, prove_deep_gemm

CPU = torch.device("cpu")
SHAPES = DeepGemmShapes(dense=((128, 256),), experts=((64, 256),))
Pair = tuple[torch.Tensor, torch.Tensor]


def dense(a: Pair, b: Pair, out: torch.Tensor) -> None:
    fp8_gemm.fp8_gemm_nt(*a, *b, out=out)


def contiguous(a: Pair, b: Pair, out: torch.Tensor, m_indices: torch.Tensor) -> None:
    fp8_gemm.m_grouped_fp8_gemm_nt_contiguous(*a, *b, m_indices, out=out)


def masked(a: Pair, b: Pair, out: torch.Tensor, counts: torch.Tensor, expected_m: int) -> None:
    fp8_gemm.m_grouped_fp8_gemm_nt_masked(*a, *b, counts, out=out)


def products(name: str, **changes: Callable[..., None]) -> Products:
    module = types.ModuleType("deep_gemm")
    return Products(module, name, *({"dense": dense, "contiguous": contiguous, "masked": masked} | changes).values())


@pytest.fixture(autouse=True)
def _fresh() -> None:
    probe.clear_cache()


def test_the_specified_arithmetic_passes_and_is_remembered() -> None:
    calls = []

    def counted(*arguments: object) -> None:
        calls.append(1)
        dense(*arguments)  # type: ignore[arg-type]

    good = products("good", dense=counted)
    reports = prove_deep_gemm(SHAPES, device=CPU, products=good)
    assert [report.name for report in reports] == [
        "deep_gemm.fp8_gemm_nt",
        "deep_gemm.m_grouped_contiguous",
        "deep_gemm.m_grouped_masked",
        "deep_gemm.m_grouped_layouts",
        "deep_gemm.m_grouped_packed",
    ]
    assert all(report.ok and report.comparisons > 40 for report in reports)
    ran = len(calls)
    assert ran > 40
    assert prove_deep_gemm(SHAPES, device=CPU, products=good) == reports
    assert len(calls) == ran


def test_another_build_is_proven_again() -> None:
    prove_deep_gemm(SHAPES, device=CPU, products=products("one"))

    def refuse(*arguments: object) -> None:
        raise RuntimeError("asked again")

    with pytest.raises(RuntimeError, match="asked again"):
        prove_deep_gemm(SHAPES, device=CPU, products=products("two", dense=refuse))


def test_a_dense_product_that_follows_the_rows_is_named() -> None:
    def dependent(a: Pair, b: Pair, out: torch.Tensor) -> None:
        dense(a, b, out)
        if len(out) > 32:
            out.mul_(1.0078125)

    with pytest.raises(ContractError, match=r"fp8_gemm_nt: .*position 0 of 33 among random rows differs"):
        prove_deep_gemm(SHAPES, device=CPU, products=products("dense", dense=dependent))


def test_a_masked_product_that_follows_expected_m_is_named() -> None:
    def dependent(a: Pair, b: Pair, out: torch.Tensor, counts: torch.Tensor, expected_m: int) -> None:
        masked(a, b, out, counts, expected_m)
        if expected_m > 64:
            out.mul_(1.0078125)

    with pytest.raises(ContractError) as caught:
        prove_deep_gemm(SHAPES, device=CPU, products=products("masked", masked=dependent))
    names = {blocker.subject for blocker in caught.value.blockers}
    assert names == {"deep_gemm.m_grouped_masked", "deep_gemm.m_grouped_layouts"}


def test_layouts_that_differ_are_named() -> None:
    def other(a: Pair, b: Pair, out: torch.Tensor, m_indices: torch.Tensor) -> None:
        contiguous(a, b, out, m_indices)
        out.mul_(1.0078125)

    with pytest.raises(ContractError) as caught:
        prove_deep_gemm(SHAPES, device=CPU, products=products("layouts", contiguous=other))
    names = ["deep_gemm.m_grouped_layouts", "deep_gemm.m_grouped_packed"]
    assert [blocker.subject for blocker in caught.value.blockers] == names


@pytest.mark.parametrize("rows", [1, 8, 64, 128])
def test_a_packed_product_that_is_not_the_contiguous_one_is_named(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: torch.Tensor) -> torch.Tensor:
        """One bit of one row, of an expert that the row under test is not of."""
        out = fp8_gemm.m_grouped_fp8_gemm_nt_offsets(*arguments)
        start, stop = arguments[4][-2:].tolist()
        if stop - start == rows:
            out.view(torch.int16)[stop - 1, 3] ^= 1
        return out

    monkeypatch.setattr(deep_gemm_proof, "m_grouped_fp8_gemm_nt_offsets", other)
    with pytest.raises(ContractError, match=r"m_grouped_packed: .* differs") as caught:
        prove_deep_gemm(SHAPES, device=CPU, products=products(f"packed {rows}"))
    assert [blocker.subject for blocker in caught.value.blockers] == ["deep_gemm.m_grouped_packed"]


def test_a_packed_product_that_differs_everywhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: torch.Tensor) -> torch.Tensor:
        return fp8_gemm.m_grouped_fp8_gemm_nt_offsets(*arguments).mul_(1.0078125)

    monkeypatch.setattr(deep_gemm_proof, "m_grouped_fp8_gemm_nt_offsets", other)
    with pytest.raises(ContractError, match="m_grouped_packed: "):
        prove_deep_gemm(SHAPES, device=CPU, products=products("packed"))


def test_a_proof_that_cannot_tell_is_an_error() -> None:
    def nothing(*arguments: torch.Tensor | Pair | int) -> None:
        out = arguments[2]
        assert isinstance(out, torch.Tensor)
        out.zero_()

    with pytest.raises(ContractError, match="cannot tell"):
        prove_deep_gemm(SHAPES, device=CPU, products=products("zero", dense=nothing))


def test_alignment_is_held_at_128_and_put_back() -> None:
    state = [64]
    module = types.ModuleType("deep_gemm")
    module.get_mk_alignment_for_contiguous_layout = lambda: state[-1]  # type: ignore[attr-defined]
    module.set_mk_alignment_for_contiguous_layout = state.append  # type: ignore[attr-defined]
    good = products("aligned")
    prove_deep_gemm(SHAPES, device=CPU, products=Products(module, "aligned", good.dense, good.contiguous, good.masked))
    assert state == [64, 128, 64]
    module.set_mk_alignment_for_contiguous_layout = lambda value: None  # type: ignore[attr-defined]
    with pytest.raises(ContractError, match="alignment of the contiguous layout: expected 128; found 64"):
        prove_deep_gemm(
            SHAPES, device=CPU, products=Products(module, "stuck", good.dense, good.contiguous, good.masked)
        )


def test_shapes_of_v4_flash() -> None:
    flash = DeepGemmShapes.from_model(
        hidden=4096, intermediate=2048, heads=64, q_lora=1024, o_groups=8, o_lora=1024, index_heads=64
    )
    assert flash.experts == ((4096, 4096), (4096, 2048))
    assert flash.dense == ((4096, 4096), (4096, 2048), (1536, 4096), (32768, 1024), (4096, 8192), (8192, 1024))
    assert DeepGemmShapes.from_model(hidden=2048, intermediate=256).dense == ((512, 2048), (2048, 256))
    tests = deep_gemm_self_tests(products("names"), flash)
    assert len(tests) == 6 + 2 * 4
    assert len({(test.name, test.shape_key) for test in tests}) == len(tests)
