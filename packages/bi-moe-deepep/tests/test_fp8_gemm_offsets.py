from __future__ import annotations

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_offsets
from bi_moe_deepep.reference.fp8_gemm import offsets_error_bound

GENERATOR = torch.Generator().manual_seed(0)
FINITE = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


def codes(*shape: int) -> torch.Tensor:
    return FINITE[torch.randint(len(FINITE), shape, generator=GENERATOR)].view(torch.float8_e4m3fn)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=GENERATOR) * 2.0**-6 + 2.0**-9


def table(*counts: int) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


WQ, WS = codes(4, 130, 256), scales(4, 2, 2)
Q, S = codes(12, 256), scales(12, 2)


@pytest.mark.parametrize(
    "counts", [(12, 0, 0, 0), (0, 0, 0, 12), (3, 0, 7, 2), (1, 1, 1, 1), (0, 5, 0, 4), (0, 0, 0, 0)]
)
def test_rows_are_those_of_the_contiguous_layout(counts: tuple[int, ...]) -> None:
    rows = sum(counts)
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(counts)).int()
    want = torch.full((12, 130), 7.0, dtype=torch.bfloat16)
    want[:rows] = m_grouped_fp8_gemm_nt_contiguous(Q[:rows], S[:rows], WQ, WS, owner)
    for s in (S, S.mT.contiguous().mT):
        out = torch.full((12, 130), 7.0, dtype=torch.bfloat16)
        assert m_grouped_fp8_gemm_nt_offsets(Q, s, WQ, WS, table(*counts), out=out) is out
        assert_bitwise_equal(out, want, "rows past the last expert's are left untouched")
    assert_bitwise_equal(m_grouped_fp8_gemm_nt_offsets(Q, S, WQ, WS, table(*counts))[:rows], want[:rows])


def test_no_rows() -> None:
    assert m_grouped_fp8_gemm_nt_offsets(Q[:0], S[:0], WQ, WS, table(0, 0, 0, 0)).shape == (0, 130)


def test_error_bound_holds_and_is_no_wish() -> None:
    out = m_grouped_fp8_gemm_nt_offsets(Q, S, WQ[:1], WS[:1], table(12)).double()
    a = Q.double() * S.double().repeat_interleave(128, 1)
    b = WQ[0].double() * WS[0].double().repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)
    bound = offsets_error_bound(Q, S, WQ[0], WS[0])
    assert bool(((out - a @ b.mT).abs() <= bound).all())
    assert bool((bound < 0.05 * (a.abs() @ b.abs().mT)).all())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"q": Q.bfloat16()}, "q"),
        ({"q": Q[:, :128]}, "q"),
        ({"s": S[:4]}, "s"),
        ({"s": S.double()}, "s"),
        ({"s": torch.zeros(12, 1, dtype=torch.int32)}, "s"),  # packed scales are DeepGEMM's on Blackwell
        ({"wq": WQ[0]}, "wq"),
        ({"wq": codes(4, 130, 200)}, "wq"),
        ({"ws": WS[:, :1]}, "ws"),
        ({"ws": WS.bfloat16()}, "ws"),
        ({"offsets": table(3, 0, 7)}, "offsets"),
        ({"offsets": table(3, 0, 7, 2).long()}, "offsets"),
        ({"offsets": table(3, 0, 7, 3)}, "offsets"),
        ({"offsets": table(3, 0, 7, -2)}, "offsets"),
        ({"offsets": table(3, 0, 7, 2) + 1}, "offsets"),
        ({"out": torch.full((12, 130), 7.0)}, "out"),
        ({"out": torch.full((11, 130), 7.0, dtype=torch.bfloat16)}, "out"),
        ({"out": torch.full((130, 12), 7.0, dtype=torch.bfloat16).mT}, "out"),
    ],
)
def test_bad_input_writes_nothing(change: dict[str, torch.Tensor], name: str) -> None:
    out = torch.full((12, 130), 7.0, dtype=torch.bfloat16)
    arguments = {"q": Q, "s": S, "wq": WQ, "ws": WS, "offsets": table(3, 0, 7, 2), "out": out} | change
    with pytest.raises(ArgumentError, match=f"^{name}: expected .* got "):
        m_grouped_fp8_gemm_nt_offsets(**arguments)
    for written in (out, arguments["out"]):
        assert bool((written == 7.0).all())
