"""The compiled grouped product: DeepGEMM's bits, rows that see nothing but themselves. Needs a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, few_multiprocessors, must_detect
from bi_moe_deepep import m_grouped_fp8_gemm_nt_offsets
from bi_moe_deepep.reference import fp8_gemm as reference

pytestmark = pytest.mark.gpu

SHAPES = ((4096, 4096), (4096, 2048))  # (N, K) of DeepSeek-V4-Flash's experts
COUNTS = (0, 1, 2, 7, 8, 9, 15, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200)


def codes(generator: torch.Generator, *shape: int, largest: int = 0x7E) -> torch.Tensor:
    """Random finite e4m3 codes."""
    code = torch.randint(0, largest + 1, shape, generator=generator, device="cuda", dtype=torch.uint8)
    sign = torch.randint(0, 2, shape, generator=generator, device="cuda", dtype=torch.uint8)
    return (code + 0x80 * sign).view(torch.float8_e4m3fn)


def scales(generator: torch.Generator, *shape: int, power: bool = False) -> torch.Tensor:
    if power:
        return torch.exp2(torch.randint(-14, -8, shape, generator=generator, device="cuda").float())
    return torch.rand(shape, generator=generator, device="cuda") * 2.0**-6 + 2.0**-9


class Case:
    """Operands with this many rows per expert."""

    def __init__(self, n: int, k: int, counts: list[int], *, seed: int = 0, power: bool = False) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.counts, rows, experts = counts, sum(counts), len(counts)
        self.q, self.s = codes(generator, rows, k), scales(generator, rows, k // 128, power=power)
        self.wq = codes(generator, experts, n, k)
        self.ws = scales(generator, experts, (n + 127) // 128, k // 128, power=power)
        self.offsets = table(counts)

    def run(self) -> torch.Tensor:
        return m_grouped_fp8_gemm_nt_offsets(self.q, self.s, self.wq, self.ws, self.offsets)


def table(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int().cuda()


def take(q: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``q[index]``, which torch lacks for float8."""
    return q.view(torch.uint8)[index].view(q.dtype)


@pytest.mark.parametrize(
    ("n", "k"), [(64, 128), (192, 384), (128, 128), (256, 640), (384, 7168), (128, 16384)], ids=str
)
def test_small_integers_give_the_references_bits(n: int, k: int) -> None:
    """Sums that every adder has room for: a wrong element shows where an index is wrong."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    for counts in ([1], [0, 3, 0, 9, 17, 0, 40, 1], [70, 0, 129, 5], [8, 8, 8], [300]):
        rows, experts = sum(counts), len(counts)
        q = torch.randint(-2, 3, (rows + 3, k), generator=generator, device="cuda").float().to(torch.float8_e4m3fn)
        wq = torch.randint(-2, 3, (experts, n, k), generator=generator, device="cuda").float().to(torch.float8_e4m3fn)
        s = scales(generator, rows + 3, k // 128, power=True)
        ws = scales(generator, experts, (n + 127) // 128, k // 128, power=True)
        want = torch.full((rows + 3, n), 7.0, dtype=torch.bfloat16)
        reference.m_grouped_fp8_gemm_nt_offsets(q.cpu(), s.cpu(), wq.cpu(), ws.cpu(), table(counts).cpu(), out=want)
        for strided in (s, s.mT.contiguous().mT):
            out = torch.full((rows + 3, n), 7.0, dtype=torch.bfloat16, device="cuda")
            m_grouped_fp8_gemm_nt_offsets(q, strided, wq, ws, table(counts), out=out)
            assert_bitwise_equal(out.cpu(), want, f"rows {counts}, the last three untouched")


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
def test_error_bound(n: int, k: int) -> None:
    case = Case(n, k, [0, 40, 3, 1])
    out, first = case.run().double(), 0
    for expert, count in enumerate(case.counts):
        rows = slice(first, first + count)
        q, s, wq, ws = case.q[rows], case.s[rows], case.wq[expert], case.ws[expert]
        a = q.double() * s.double().repeat_interleave(128, 1)
        b = wq.double() * ws.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        error = (out[rows] - a @ b.mT).abs()
        assert bool((error <= reference.offsets_error_bound(q, s, wq, ws)).all()), f"expert {expert}"
        first += count


def test_rows_do_not_depend_on_the_batch() -> None:
    case = Case(256, 512, [5, 5, 5])

    def every(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """All rows are the second expert's."""
        return m_grouped_fp8_gemm_nt_offsets(q, s, case.wq, case.ws, table([0, len(q), 0]))

    def shifted(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Behind a first expert whose rows move them to any place in a box of eight."""
        before = len(q) % 11
        q, s = (
            torch.cat([t[:1].view(torch.uint8).expand(before, -1), t.view(torch.uint8)]).view(t.dtype) for t in (q, s)
        )
        return m_grouped_fp8_gemm_nt_offsets(q, s, case.wq, case.ws, table([before, len(q) - before, 0]))[before:]

    def split_by_rows(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Batch-dependent on purpose: for few rows K is cut in two, and each half rounded."""
        if len(q) >= 16:
            return every(q, s)
        halves = []
        for columns, groups in ((slice(0, 256), slice(0, 2)), (slice(256, 512), slice(2, 4))):
            wq = case.wq.view(torch.uint8)[..., columns].contiguous().view(q.dtype)
            part = q.view(torch.uint8)[:, columns].contiguous().view(q.dtype)
            ws, offsets = case.ws[..., groups], table([0, len(q), 0])
            halves.append(m_grouped_fp8_gemm_nt_offsets(part, s[:, groups], wq, ws, offsets))
        return halves[0] + halves[1]

    rows = case.q[:5], case.s[:5]
    sizes = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 129, 300)
    assert_batch_invariant(every, rows, batch_sizes=sizes)
    assert_batch_invariant(shifted, rows, batch_sizes=sizes)
    must_detect(split_by_rows, rows, batch_sizes=sizes)


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
def test_any_grouping_gives_a_row_its_bits(n: int, k: int) -> None:
    pool = Case(n, k, [24] * 6)
    alone = torch.cat([
        m_grouped_fp8_gemm_nt_offsets(
            pool.q[i : i + 1], pool.s[i : i + 1], pool.wq, pool.ws, table([int(e == i // 24) for e in range(6)])
        )
        for i in range(len(pool.q))
    ])  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for trial in range(15):
        most = (3, 20, 70, 300, 2000)[trial % 5]
        counts = torch.randint(0, most, (6,), generator=generator)
        counts[trial % 6] = 0
        counts[(trial + 1) % 6] = most
        index = torch.cat([24 * e + torch.randint(0, 24, (int(c),), generator=generator) for e, c in enumerate(counts)])
        index = index.cuda()
        out = m_grouped_fp8_gemm_nt_offsets(
            take(pool.q, index), pool.s[index], pool.wq, pool.ws, table(counts.tolist())
        )
        assert_bitwise_equal(out, alone[index], f"rows {counts.tolist()}")


def test_the_number_of_multiprocessors_does_not_show() -> None:
    cases = [Case(256, 512, counts) for counts in ([1, 0, 2], [30, 9, 0], [900, 2000, 1500])]
    every = [case.run() for case in cases]
    with few_multiprocessors(8):
        few = [case.run() for case in cases]
    for have, want in zip(few, every, strict=True):
        assert_bitwise_equal(have, want)


def test_many_experts_and_graphs() -> None:
    counts = [3 * (e % 5 == 0) for e in range(1024)]
    case = Case(128, 256, counts)
    want = case.run()
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros_like(want)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        m_grouped_fp8_gemm_nt_offsets(case.q, case.s, case.wq, case.ws, case.offsets, out=out)
    graph.replay()
    assert_bitwise_equal(out, want)
    case.offsets.copy_(table([0, len(want), *[0] * 1022]))  # the graph reads the offsets of its replay
    want = case.run()
    graph.replay()
    assert_bitwise_equal(out, want)


def test_offsets_that_lie_reach_nothing_outside() -> None:
    case = Case(128, 256, [9, 9])
    out = torch.full((18, 128), 7.0, dtype=torch.bfloat16, device="cuda")
    for lies in ([0, 1000, 2000], [-5, 4, 99], [0, 9, 3]):
        offsets = torch.tensor(lies, dtype=torch.int32, device="cuda")
        m_grouped_fp8_gemm_nt_offsets(case.q, case.s, case.wq, case.ws, offsets, out=out)
    torch.cuda.synchronize()


def test_what_the_kernel_cannot_take_is_refused() -> None:
    case = Case(128, 256, [3, 4])
    narrow = torch.zeros(2, 96, 256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    gaps = torch.zeros(2, 160, 256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)[:, :128]
    for wq in (narrow, gaps):
        with pytest.raises(ArgumentError, match=r"^wq: "):
            m_grouped_fp8_gemm_nt_offsets(case.q, case.s, wq, case.ws, case.offsets)
    shifted = torch.zeros(7, 264, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)[:, 4:260]
    with pytest.raises(ArgumentError, match=r"^q: expected rows that start at multiples of 16 bytes"):
        m_grouped_fp8_gemm_nt_offsets(shifted, case.s, case.wq, case.ws, case.offsets)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # vLLM's imports
@pytest.mark.parametrize("power", [False, True], ids=["any scales", "powers of two"])
@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
def test_bits_are_deep_gemms(n: int, k: int, power: bool) -> None:
    import vllm.utils.deep_gemm  # noqa: F401  # its cache of compiled kernels

    from bi_moe_deepep.deep_gemm import mk_alignment
    from bi_moe_deepep.deep_gemm_proof import load_products

    products = load_products()
    for seed in range(3):
        choice = torch.randint(0, len(COUNTS), (16,), generator=torch.Generator().manual_seed(seed))
        counts = [COUNTS[i] for i in choice]
        if seed == 2:
            counts[:4] = [1100] * 4  # many rows get other tiles
        case = Case(n, k, counts, seed=seed, power=power)
        out = case.run()
        room = 1152 if seed == 2 else 256
        q = torch.zeros((16, room, k), dtype=torch.uint8, device="cuda")
        s = torch.ones((16, k // 128, room), device="cuda").mT
        owner = torch.full((16, room), -1, dtype=torch.int32, device="cuda")
        for e, (start, stop) in enumerate(zip(case.offsets[:-1].tolist(), case.offsets[1:].tolist(), strict=True)):
            q[e, : stop - start] = case.q.view(torch.uint8)[start:stop]
            s[e, : stop - start] = case.s[start:stop]
            owner[e, : stop - start] = e
        rows = owner.flatten() >= 0
        fp8 = q.view(torch.float8_e4m3fn)
        with mk_alignment(products.module):
            wide = torch.zeros((16 * room, n), dtype=torch.bfloat16, device="cuda")
            flat = s.flatten(0, 1).mT.contiguous().mT
            products.contiguous((fp8.flatten(0, 1), flat), (case.wq, case.ws), wide, owner.flatten())
            assert_bitwise_equal(out, wide[rows], f"contiguous, rows {case.counts}")
            wide = torch.zeros((16, room, n), dtype=torch.bfloat16, device="cuda")
            products.masked(
                (fp8, s), (case.wq, case.ws), wide, torch.tensor(counts, dtype=torch.int32, device="cuda"), 64
            )
            assert_bitwise_equal(out, wide.flatten(0, 1)[rows], f"masked, rows {case.counts}")
