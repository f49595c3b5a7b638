"""The bitwise proof that a DeepGEMM's FP8 products do not look at the batch: self-tests on a model's real (N, K).

DeepGEMM picks tiles from the number of rows and from ``expected_m``, on Hopper never the order of a sum. That is tested
here, on the device and the build that will run, before the first forward. It compiles a kernel for each tile that it
meets, some fifty for a DeepSeek-V4, all of which serving needs too: minutes the first time, seconds from the cache.

The packed product is this package's own. It has DeepGEMM's bits or is not used, and that is tested here as well: every
row against the contiguous product.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from bi_kernels import ScaleFormat, per_token_group_quant_fp8
from bi_kernels.runtime.errors import Blocker, ContractError
from bi_kernels.runtime.probe import SelfTest, SelfTestReport, run_self_test

from .deep_gemm import PRODUCTS, DeepGemmBuild, mk_alignment, probe_deep_gemm
from .fp8_gemm import m_grouped_fp8_gemm_nt_offsets
from .pack_tokens import pack_tokens

__all__ = ["V4_FLASH", "DeepGemmShapes", "Products", "deep_gemm_self_tests", "load_products", "prove_deep_gemm"]

_BLOCK = 128
_TEST_EXPERTS = 4  # as many as show the grouping; a model's 256 would cost memory and prove nothing more
# Both sides of the numbers of rows at which a Hopper build changes its tiles.
_ROWS = (1, 2, 16, 17, 33, 64, 65, 129, 257)
# Both sides of the rows of an expert at which the packed kernel changes its tile; eight times as many are a batch, of
# which one expert has five eighths and each of three others an eighth.
_PACKED_ROWS = tuple(8 * rows for rows in (1, 7, 8, 9, 63, 64, 65, 127, 128, 129))
_REMEDY = "Use vLLM's own DeepGEMM, or a build with set_batch_invariant; or unset VLLM_BATCH_INVARIANT."

Product = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepGemmShapes:
    """The ``(N, K)`` of a model's FP8 weights, whose kernels are built apart.

    Attributes:
        dense: Of linear layers.
        experts: Of one expert's two weights.
    """

    dense: tuple[tuple[int, int], ...] = ()
    experts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_model(
        cls,
        *,
        hidden: int,
        intermediate: int,
        heads: int = 0,
        head_dim: int = 512,
        q_lora: int = 0,
        o_groups: int = 0,
        o_lora: int = 0,
        index_heads: int = 0,
        index_head_dim: int = 128,
    ) -> DeepGemmShapes:
        """Shapes of a DeepSeek-V4. Parts whose sizes are 0 are left out.

        Args:
            hidden: Width of the model.
            intermediate: Width of one expert.
            heads: Attention heads of one rank.
            head_dim: Width of a head and of the compressed KV.
            q_lora: Rank of the query projection.
            o_groups: Groups of the output projection.
            o_lora: Rank of one such group.
            index_heads: Heads of the indexer.
            index_head_dim: Width of one.
        """
        experts = ((2 * intermediate, hidden), (hidden, intermediate))
        dense = [
            *experts,  # the shared experts
            (q_lora + head_dim, hidden) if q_lora else None,
            (heads * head_dim, q_lora) if heads else None,
            (hidden, o_groups * o_lora) if o_groups else None,
            (index_heads * index_head_dim, q_lora) if index_heads else None,
        ]
        return cls(dense=tuple(dict.fromkeys(shape for shape in dense if shape is not None)), experts=experts)


V4_FLASH = DeepGemmShapes.from_model(
    hidden=4096, intermediate=2048, heads=64, q_lora=1024, o_groups=8, o_lora=1024, index_heads=64
)


@dataclass(frozen=True, slots=True)
class Products:
    """The three products of one build, ready to call.

    Attributes:
        module: The imported library.
        build: Its identity, for the cache.
        dense: ``fp8_gemm_nt((q, s), (w, ws), out)``.
        contiguous: ``m_grouped_fp8_gemm_nt_contiguous((q, s), (w, ws), out, m_indices)``.
        masked: ``m_grouped_fp8_gemm_nt_masked((q, s), (w, ws), out, masked_m, expected_m)``.
    """

    module: ModuleType
    build: str
    dense: Product
    contiguous: Product
    masked: Product


def load_products(build: DeepGemmBuild | None = None) -> Products:
    """Import the DeepGEMM that vLLM would use.

    Args:
        build: What :func:`probe_deep_gemm` found; None probes now.

    Raises:
        ContractError: There is none, or it lacks a product.
    """
    build = build or probe_deep_gemm()
    if build is None or build.missing:
        found = "none" if build is None else f"{build} without {', '.join(build.missing)}"
        raise ContractError(
            "DeepGEMM cannot be used", [Blocker("deep_gemm", "a build with its three FP8 products", found, _REMEDY)]
        )
    wrappers = sys.modules.get("vllm.utils.deep_gemm")
    if wrappers is not None:
        wrappers._lazy_init()  # so that what is compiled here goes into the cache that vLLM reads
    module = importlib.import_module(build.module)
    named = [next(getattr(module, name) for name in names if hasattr(module, name)) for names in PRODUCTS]
    return Products(module, build.sha256, *named)


def deep_gemm_self_tests(products: Products, shapes: DeepGemmShapes) -> tuple[SelfTest, ...]:
    """Self-tests for :func:`bi_kernels.runtime.probe.run_self_test`, one per product and shape.

    Per shape of ``experts``: the contiguous product, the masked product with an ``expected_m`` that follows the number
    of rows as stock vLLM's does, and a third that takes another of the three layouts for another number of rows, so
    that a row has one set of bits in all of them.

    Args:
        products: The build.
        shapes: ``(N, K)``; K a multiple of 128, N of 64.
    """
    tests = [_self_test("fp8_gemm_nt", products, _Dense(products, n, k), n, k) for n, k in dict.fromkeys(shapes.dense)]
    for n, k in dict.fromkeys(shapes.experts):
        for layout in ("contiguous", "masked", "layouts"):
            tests.append(_self_test(f"m_grouped_{layout}", products, _Grouped(products, n, k, layout), n, k))
        tests.append(_self_test("m_grouped_packed", products, _Packed(products, n, k), n, k, _PACKED_ROWS))
    return tuple(tests)


def prove_deep_gemm(
    shapes: DeepGemmShapes = V4_FLASH, *, device: torch.device | None = None, products: Products | None = None
) -> tuple[SelfTestReport, ...]:
    """Run the self-tests; what was shown before on this device and build is not run again.

    Args:
        shapes: The model's; the default is DeepSeek-V4-Flash on one rank.
        device: Where; None is the current GPU.
        products: The build; None is the one that vLLM would use.

    Returns:
        The reports, all of them good.

    Raises:
        ContractError: Names every product and shape whose rows depend on the batch, with the first difference; or a
            self-test did not notice its twin.
        NativeLibraryError: A GPU, and this package's kernels are missing.
    """
    products = products or load_products()
    device = device or torch.device("cuda", torch.cuda.current_device())
    with mk_alignment(products.module):
        reports = tuple(run_self_test(test, device=device) for test in deep_gemm_self_tests(products, shapes))
    blockers = [blocker for report in reports for blocker in report.blockers]
    if blockers:
        raise ContractError("this DeepGEMM is not batch-invariant on this GPU", blockers)
    return reports


def _self_test(
    name: str, products: Products, op: _Dense, n: int, k: int, batch_sizes: tuple[int, ...] = _ROWS
) -> SelfTest:
    return SelfTest(
        name=f"deep_gemm.{name}",
        op=op,
        control=op.twin,
        rows=op.rows,
        build=lambda: products.build,
        shape_key=f"N={n},K={k}",
        remedy=_REMEDY,
        batch_sizes=batch_sizes,
        neighbours=("random", "nan"),
    )


class _Dense:
    """``fp8_gemm_nt`` with one weight, as an op on rows."""

    def __init__(self, products: Products, n: int, k: int) -> None:
        self.products, self.n, self.k = products, n, k
        self._weights: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def weights(self, device: torch.device, experts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """``(E, N, K)`` codes and ``(E, N / 128, K / 128)`` scales."""
        if device not in self._weights:
            generator = torch.Generator(device).manual_seed(self.n + self.k)
            shape = (experts, self.n, self.k)
            codes = torch.randn(shape, generator=generator, device=device).mul_(64).to(torch.float8_e4m3fn)
            blocks = (experts, -(-self.n // _BLOCK), self.k // _BLOCK)
            powers = torch.randint(-14, -8, blocks, generator=generator, device=device)
            self._weights[device] = codes, torch.exp2(powers.float())
        return self._weights[device]

    def rows(self, count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator(device).manual_seed(count)
        x = torch.randn((count, self.k), generator=generator, device=device).bfloat16()
        return _quantise(x)

    def __call__(self, q: torch.Tensor, s: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        w, ws = self.weights(q.device)
        out = torch.empty((len(q), self.n), dtype=torch.bfloat16, device=q.device)
        self.products.dense((q, _column_major(s)), (w[0], ws[0]), out)
        return out

    def twin(self, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Batch-dependent on purpose: more than 16 rows are summed in two halves of K, each rounded by itself.

        The halves are made by zeroing codes, so that no further kernel has to be compiled.
        """
        if len(q) <= 16:
            return self(q, *others)
        left, right = q.clone(), q.clone()
        left.view(torch.uint8)[:, self.k // 2 :] = 0
        right.view(torch.uint8)[:, : self.k // 2] = 0
        return self(left, *others) + self(right, *others)


class _Grouped(_Dense):
    """A grouped product, as an op on rows that name their expert."""

    def __init__(self, products: Products, n: int, k: int, layout: str) -> None:
        super().__init__(products, n, k)
        self.layout = layout

    def weights(self, device: torch.device, experts: int = _TEST_EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
        return super().weights(device, experts)

    def rows(self, count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        # Skewed: the first expert has half of the rows.
        expert = (torch.arange(count, device=device) % (2 * _TEST_EXPERTS) - _TEST_EXPERTS).clamp(min=0)
        return (*super().rows(count, device), expert.to(torch.int32))

    def __call__(self, q: torch.Tensor, s: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        (expert,) = others
        w, ws = self.weights(q.device)
        count = len(q)
        layout = ("dense", "contiguous", "masked")[count % 3] if self.layout == "layouts" else self.layout
        places = [(expert == e).nonzero()[:, 0] for e in range(_TEST_EXPERTS)]
        out = torch.empty((count, self.n), dtype=torch.bfloat16, device=q.device)
        if layout == "dense":
            for e, rows in enumerate(places):
                if len(rows):
                    part = out.new_empty((len(rows), self.n))
                    self.products.dense(
                        (q.view(torch.uint8)[rows].view(q.dtype), _column_major(s[rows])), (w[e], ws[e]), part
                    )
                    out[rows] = part
            return out
        return self.spread(q, s, expert, layout, room=-(-max(count, 1) // _BLOCK) * _BLOCK)

    def spread(self, q: torch.Tensor, s: torch.Tensor, expert: torch.Tensor, layout: str, *, room: int) -> torch.Tensor:
        """By a layout with padding: each expert's rows start at a multiple of ``room``, rows between are nobody's."""
        count = len(q)
        w, ws = self.weights(q.device)
        places = [(expert == e).nonzero()[:, 0] for e in range(_TEST_EXPERTS)]
        out = torch.empty((count, self.n), dtype=torch.bfloat16, device=q.device)
        wide_q = q.new_zeros((_TEST_EXPERTS, room, q.shape[1]), dtype=torch.uint8).view(q.dtype)
        wide_s = s.new_ones((_TEST_EXPERTS, room, s.shape[1]))
        owner = torch.full((_TEST_EXPERTS, room), -1, dtype=torch.int32, device=q.device)
        for e, rows in enumerate(places):
            wide_q.view(torch.uint8)[e, : len(rows)] = q.view(torch.uint8)[rows]
            wide_s[e, : len(rows)] = s[rows]
            owner[e, : len(rows)] = e
        wide = torch.zeros((_TEST_EXPERTS, room, self.n), dtype=torch.bfloat16, device=q.device)
        if layout == "contiguous":
            pair = wide_q.flatten(0, 1), _column_major(wide_s.flatten(0, 1))
            self.products.contiguous(pair, (w, ws), wide.flatten(0, 1), owner.flatten())
        else:
            counts = torch.tensor([len(rows) for rows in places], dtype=torch.int32, device=q.device)
            self.products.masked((wide_q, _column_major(wide_s)), (w, ws), wide, counts, count)
        for e, rows in enumerate(places):
            out[rows] = wide[e, : len(rows)]
        return out


class _Packed(_Grouped):
    """The packed product, as an op on rows that name their expert; a row alone is the contiguous product's.

    Behind a row's elements is one more: how many rows of the whole batch are not the contiguous product's. So any row
    that differs is noticed, and not only the row under test.
    """

    def __init__(self, products: Products, n: int, k: int) -> None:
        super().__init__(products, n, k, "packed")

    def __call__(self, q: torch.Tensor, s: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        (expert,) = others
        return self.compared(q, s, expert, self.packed(q, s, expert))

    def packed(self, q: torch.Tensor, s: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        rows = pack_tokens(q, s, expert[:, None], num_experts=_TEST_EXPERTS)
        return m_grouped_fp8_gemm_nt_offsets(rows.q, rows.s, *self.weights(q.device), rows.offsets)[rows.slots[:, 0]]

    def compared(self, q: torch.Tensor, s: torch.Tensor, expert: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        # One room for all batches, so that one kernel is compiled.
        want = self.spread(q, s, expert, "contiguous", room=-(-max(_PACKED_ROWS) // _BLOCK) * _BLOCK)
        different = (packed.view(torch.int16) != want.view(torch.int16)).any(1).sum()
        rows = want if len(q) == 1 else packed
        return torch.cat((rows, different.to(rows.dtype).expand(len(q), 1)), 1)

    def twin(self, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Batch-dependent on purpose: the last row of the last expert is another one where that has more than 64.

        The row under test is another expert's, so that only the comparison of all rows shows it.
        """
        s, expert = others
        packed = self.packed(q, s, expert)
        mine = (expert == _TEST_EXPERTS - 1).nonzero()[:, 0]
        if len(mine) > 64:
            packed.view(torch.int16)[mine[-1]] += 1
        return self.compared(q, s, expert, packed)


def _column_major(s: torch.Tensor) -> torch.Tensor:
    """Scales as the kernels load them: rows contiguous, padded to a multiple of 4."""
    *experts, rows, groups = s.shape
    padded = s.new_zeros((*experts, groups, -(-rows // 4) * 4))
    padded[..., :rows] = s.mT
    return padded.mT[..., :rows, :]


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales by the specified quantiser, whose reference runs on any device through the CPU."""
    q, s = per_token_group_quant_fp8(x.cpu(), scale_format=ScaleFormat.FLOAT32_CEIL_UE8M0)
    return q.to(x.device), s.contiguous().to(x.device)
