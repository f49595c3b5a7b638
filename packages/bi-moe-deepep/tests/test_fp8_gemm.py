from __future__ import annotations

import pytest
import torch

from bi_kernels import ArgumentError, ScaleFormat, ceil_to_ue8m0, pack_ue8m0, per_token_group_quant_fp8
from bi_kernels.reference.numerics import fma
from bi_kernels.testing import assert_bitwise_equal, num_threads
from bi_moe_deepep import fp8_gemm_nt, m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked

U32, U16 = 2.0**-24, 2.0**-8  # unit roundoffs of float32 and bfloat16


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random e4m3 codes: every finite one is as likely as any other."""
    finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    choice = torch.randint(len(finite), shape, generator=torch.Generator().manual_seed(seed))
    return finite[choice].view(torch.float8_e4m3fn)


def scales(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2.0**-6 + 2.0**-9


def by_integers(q: torch.Tensor, s: torch.Tensor, wq: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
    """The documented rule with the block sums in 64-bit integers, float32 result."""
    units_q = (q.double() * 2**9).long()
    units_w = (wq.double() * 2**9).long()
    acc = torch.zeros(q.shape[0], wq.shape[0])
    for group in range(q.shape[1] // 128):
        block = slice(128 * group, 128 * group + 128)
        total = (units_q[:, None, block] * units_w[None, :, block]).sum(-1)  # integers: any order
        part = (total.double() * 2.0**-18).float()  # exact in float64, since below 2**53
        column_scale = ws[:, group].repeat_interleave(128)[: wq.shape[0]]
        acc = acc + part * (s[:, group, None] * column_scale[None, :])
    return acc


@pytest.mark.parametrize("n", [128, 130, 7])
def test_is_the_documented_rule(n: int) -> None:
    q, wq = codes(5, 384), codes(n, 384, seed=2)
    s, ws = scales(5, 3), scales((n + 127) // 128, 3, seed=3)
    want = by_integers(q, s, wq, ws)
    assert_bitwise_equal(fp8_gemm_nt(q, s, wq, ws, out_dtype=torch.float32), want)
    assert_bitwise_equal(fp8_gemm_nt(q, s, wq, ws), want.bfloat16())


def test_largest_sums_are_exact() -> None:
    q = torch.full((2, 256), 448.0).to(torch.float8_e4m3fn)
    q[:, ::2] = torch.full((2, 128), 2.0**-9).to(torch.float8_e4m3fn)
    s = ws = torch.ones(2, 2)
    want = by_integers(q, s, q, ws[:1])
    assert_bitwise_equal(fp8_gemm_nt(q, s, q, ws[:1], out_dtype=torch.float32), want)


def test_fused_multiply_add_gives_the_same_with_power_of_two_scales() -> None:
    q, wq = codes(9, 512), codes(64, 512, seed=2)
    s, ws = ceil_to_ue8m0(scales(9, 4)), ceil_to_ue8m0(scales(1, 4, seed=3))
    acc = torch.zeros(9, 64)
    for group in range(4):
        block = slice(128 * group, 128 * group + 128)
        part = (q.double()[:, block] @ wq.double()[:, block].mT).float()
        acc = fma(part, s[:, group, None] * ws[:, group], acc)
    assert_bitwise_equal(fp8_gemm_nt(q, s, wq, ws, out_dtype=torch.float32), acc)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_error_bound(out_dtype: torch.dtype) -> None:
    groups = 16
    q, wq = codes(17, 128 * groups), codes(128, 128 * groups, seed=2)
    s, ws = scales(17, groups), scales(1, groups, seed=3)
    a = q.double() * s.double().repeat_interleave(128, 1)
    b = wq.double() * ws.double().repeat_interleave(128, 1)
    exact, magnitude = a @ b.mT, a.abs() @ b.abs().mT
    # Each block's part, scale product and product round once, then there are at most `groups` additions.
    bound = (groups + 3) * U32 * 1.01 * magnitude
    if out_dtype == torch.bfloat16:
        bound = bound + U16 * (exact.abs() + bound)
    error = (fp8_gemm_nt(q, s, wq, ws, out_dtype=out_dtype).double() - exact).abs()
    assert bool((error <= bound).all())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True], ids=["float32", "ue8m0"])
def test_three_layouts_give_the_same_rows(packed: bool, out_dtype: torch.dtype) -> None:
    num_experts, rows, n, k = 3, 6, 130, 640
    q, wq = codes(num_experts, rows, k), codes(num_experts, n, k, seed=2)
    s, ws = ceil_to_ue8m0(scales(num_experts, rows, 5)), scales(num_experts, 2, 5, seed=3)
    given = pack_ue8m0(s) if packed else s
    counts = torch.tensor([6, 0, 3], dtype=torch.int32)
    masked = m_grouped_fp8_gemm_nt_masked(q, given, wq, ws, counts, out_dtype=out_dtype)

    order = torch.tensor([[0, 3], [2, 1], [0, 0], [2, 2], [0, 5], [2, 0], [0, 1]])  # experts mixed, any order
    m_indices = order[:, 0].int()
    rows_of = (order[:, 0], order[:, 1])
    contiguous = m_grouped_fp8_gemm_nt_contiguous(q[rows_of], given[rows_of], wq, ws, m_indices, out_dtype=out_dtype)
    for number, (expert, row) in enumerate(order.tolist()):
        dense = fp8_gemm_nt(q[expert], s[expert], wq[expert], ws[expert], out_dtype=out_dtype)[row]
        assert_bitwise_equal(masked[expert, row], dense, "masked")
        assert_bitwise_equal(contiguous[number], dense, "contiguous")


@pytest.mark.parametrize("max_m", [8, 16, 32, 64, 128])
def test_b56_masked_is_right_for_small_max_m(max_m: int) -> None:
    q, s = codes(4, max_m, 256), scales(4, max_m, 2)
    wq, ws = codes(4, 128, 256, seed=2), scales(4, 1, 2, seed=3)
    counts = torch.tensor([max_m, 1, max_m // 2, max_m - 1], dtype=torch.int32)
    out = m_grouped_fp8_gemm_nt_masked(q, s, wq, ws, counts, out_dtype=torch.float32)
    for expert, count in enumerate(counts.tolist()):
        assert_bitwise_equal(out[expert, :count], by_integers(q[expert], s[expert], wq[expert], ws[expert])[:count])


def test_rows_without_tokens() -> None:
    q, s = codes(2, 4, 128), scales(2, 4, 1)
    wq, ws = codes(2, 32, 128, seed=2), scales(2, 1, 1, seed=3)
    counts = torch.tensor([1, 4], dtype=torch.int32)
    out = torch.full((2, 4, 32), 7.0)
    m_grouped_fp8_gemm_nt_masked(q, s, wq, ws, counts, out=out)
    assert_bitwise_equal(out[0, 1:], torch.full((3, 32), 7.0), "past the count: untouched")
    fresh = m_grouped_fp8_gemm_nt_masked(q, s, wq, ws, counts)
    assert_bitwise_equal(fresh[0, 1:], torch.zeros(3, 32, dtype=torch.bfloat16), "past the count, fresh: zero")

    m_indices = torch.tensor([1, -1, 0, -1], dtype=torch.int32)
    out = torch.full((4, 32), torch.nan)
    m_grouped_fp8_gemm_nt_contiguous(q[0], s[0], wq, ws, m_indices, out=out)
    assert_bitwise_equal(out[1::2], torch.zeros(2, 32), "padding rows")


def test_empty() -> None:
    wq, ws = codes(2, 32, 128), scales(2, 1, 1)
    none = torch.zeros(0, dtype=torch.int32)
    assert fp8_gemm_nt(codes(0, 128), scales(0, 1), wq[0], ws[0]).shape == (0, 32)
    assert m_grouped_fp8_gemm_nt_contiguous(codes(0, 128), scales(0, 1), wq, ws, none).shape == (0, 32)
    zero = torch.zeros(2, dtype=torch.int32)
    assert m_grouped_fp8_gemm_nt_masked(codes(2, 0, 128), scales(2, 0, 1), wq, ws, zero).shape == (2, 0, 32)


def test_nan_stays_in_its_row() -> None:
    q, s = codes(3, 256), scales(3, 2)
    wq, ws = codes(128, 256, seed=2), scales(1, 2, seed=3)
    clean = fp8_gemm_nt(q, s, wq, ws)
    q.view(torch.uint8)[1, 200] = 0xFF
    out = fp8_gemm_nt(q, s, wq, ws)
    assert_bitwise_equal(out[::2], clean[::2])
    assert_bitwise_equal(out[1].view(torch.int16), torch.full((128,), 0x7FC0, dtype=torch.int16))


def test_scales_of_the_quantiser_with_their_strides() -> None:
    x = torch.randn(5, 640, generator=torch.Generator().manual_seed(0)).bfloat16()
    wq, ws = codes(128, 640, seed=2), scales(1, 5, seed=3)
    results = []
    for scale_format in (ScaleFormat.FLOAT32_CEIL_UE8M0, ScaleFormat.UE8M0):
        q, s = per_token_group_quant_fp8(x, scale_format=scale_format)
        assert s.stride() == (1, 8)  # column-major
        results += [fp8_gemm_nt(q, s, wq, ws), fp8_gemm_nt(q, s.contiguous(), wq, ws)]
    for result in results[1:]:
        assert_bitwise_equal(result, results[0])


def test_thread_count_does_not_show() -> None:
    q, wq = codes(130, 512), codes(256, 512, seed=2)
    s, ws = scales(130, 4), scales(2, 4, seed=3)
    with num_threads(1):
        one = fp8_gemm_nt(q, s, wq, ws, out_dtype=torch.float32)
    with num_threads(2):
        assert_bitwise_equal(fp8_gemm_nt(q, s, wq, ws, out_dtype=torch.float32), one)


Q, S, WQ, WS = codes(4, 256), scales(4, 2), codes(128, 256, seed=2), scales(1, 2, seed=3)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"q": Q.float()}, "q"),
        ({"q": Q[:, :128]}, "q"),
        ({"q": codes(256, 4).mT}, "q"),
        ({"q": [1.0]}, "q"),
        ({"s": S[:, :1]}, "s"),
        ({"s": S.double()}, "s"),
        ({"s": S.int()}, "s"),
        ({"wq": WQ[None]}, "wq"),
        ({"wq": codes(128, 100)}, "wq"),
        ({"wq": WQ.bfloat16()}, "wq"),
        ({"ws": WS.mT}, "ws"),
        ({"ws": WS.bfloat16()}, "ws"),
    ],
)
def test_bad_input_writes_nothing(change: dict[str, object], name: str) -> None:
    out = torch.full((4, 128), 7.0)
    arguments: dict[str, object] = {"q": Q, "s": S, "wq": WQ, "ws": WS} | change
    with pytest.raises(ArgumentError, match=f"^{name}: expected .* got "):
        fp8_gemm_nt(*arguments.values(), out=out)  # type: ignore[arg-type]
    assert_bitwise_equal(out, torch.full((4, 128), 7.0))


def test_bad_output_and_row_maps() -> None:
    wq, ws = WQ.expand(2, 128, 256), WS.expand(2, 1, 2)
    for out in (torch.empty(4, 127), torch.empty(4, 128, dtype=torch.float16), torch.empty(4, 128, device="meta")):
        with pytest.raises(ArgumentError, match=r"^out: "):
            fp8_gemm_nt(Q, S, WQ, WS, out=out)
    with pytest.raises(ArgumentError, match=r"^out_dtype: "):
        fp8_gemm_nt(Q, S, WQ, WS, out_dtype=torch.float16)

    out = torch.full((4, 128), 7.0)
    for bad in ([0, 0, 0, 2], [-2, 0, 0, 0]):
        with pytest.raises(ArgumentError, match=r"^m_indices: "):
            m_grouped_fp8_gemm_nt_contiguous(Q, S, wq, ws, torch.tensor(bad, dtype=torch.int32), out=out)
    for indices in (torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(ArgumentError, match=r"^m_indices: "):
            m_grouped_fp8_gemm_nt_contiguous(Q, S, wq, ws, indices, out=out)
    assert_bitwise_equal(out, torch.full((4, 128), 7.0))

    out = torch.full((2, 2, 128), 7.0)
    for counts in ([0, 3], [-1, 2]):
        with pytest.raises(ArgumentError, match=r"^masked_m: "):
            m_grouped_fp8_gemm_nt_masked(
                Q.view(2, 2, 256), S.view(2, 2, 2), wq, ws, torch.tensor(counts, dtype=torch.int32), out=out
            )
    with pytest.raises(ArgumentError, match=r"^q: "):
        m_grouped_fp8_gemm_nt_masked(
            Q.view(1, 4, 256), S.view(1, 4, 2), wq, ws, torch.zeros(2, dtype=torch.int32), out=out
        )
    assert_bitwise_equal(out, torch.full((2, 2, 128), 7.0))
