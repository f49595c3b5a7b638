"""Contracts of third-party libraries, and the engine that tests an op's batch invariance bit by bit at start-up.

A :class:`Contract` says what a library must provide. A :class:`SelfTest` runs an op on a row alone, at several
positions, among several kinds of neighbours and at several batch sizes, and compares bytes. It also runs a twin that is
batch-dependent on purpose: a test that does not notice its twin proves nothing, so that is an error too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .errors import Blocker, ContractError

if TYPE_CHECKING:
    import torch

    Op = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]

__all__ = [
    "NEIGHBOURS",
    "Contract",
    "ContractReport",
    "Finding",
    "SelfTest",
    "SelfTestReport",
    "clear_cache",
    "run_self_test",
]

NEIGHBOURS = ("random", "zero", "huge", "nan")
"""Kinds of rows that the row under test is put among."""

_REPORTS: dict[tuple[str, str, str, str], SelfTestReport] = {}
_LOCK = threading.RLock()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe saw.

    Attributes:
        ok: Whether the requirement is met.
        found: What is there, in words.
    """

    ok: bool
    found: str


@dataclass(frozen=True, slots=True)
class ContractReport:
    """Outcome of probing a contract.

    Attributes:
        contract: Name of the contract.
        ok: Whether it holds.
        found: What is there, in words.
        blockers: Empty if it holds.
    """

    contract: str
    ok: bool
    found: str
    blockers: tuple[Blocker, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What a third-party library must provide.

    Attributes:
        name: Name, e.g. ``"deep_gemm"``.
        expected: The requirement, in words.
        remedy: What to do if it is not met.
        static: Looks at files, versions and symbols only; must not initialise CUDA, for it runs inside
            ``register()``. None if there is nothing to see statically.
        dynamic: Runs the library on the GPU, when a model is built. None if there is nothing to run.
    """

    name: str
    expected: str
    remedy: str
    static: Callable[[], Finding] | None = None
    dynamic: Callable[[], Finding] | None = None

    def __post_init__(self) -> None:
        if self.static is None and self.dynamic is None:
            raise TypeError(f"contract {self.name}: give it a static or a dynamic probe")

    def static_blockers(self) -> tuple[Blocker, ...]:
        """What the static probe has against the library."""
        return self._run(self.static).blockers if self.static is not None else ()

    def probe(self) -> ContractReport:
        """Run the static probe, then, if it is satisfied, the dynamic one."""
        report: ContractReport | None = None
        for probe in (self.static, self.dynamic):
            if probe is not None and (report is None or report.ok):
                report = self._run(probe)
        assert report is not None  # by construction there is a probe
        return report

    def require(self) -> ContractReport:
        """:meth:`probe`, raising :class:`ContractError` unless it holds."""
        report = self.probe()
        if not report.ok:
            raise ContractError(f"contract {self.name} does not hold", report.blockers)
        return report

    def _run(self, probe: Callable[[], Finding]) -> ContractReport:
        try:
            finding = probe()
        except Exception as error:  # a probe that breaks has not shown what it must show
            finding = Finding(False, f"the probe failed: {type(error).__name__}: {error}")
        blockers = () if finding.ok else (Blocker(self.name, self.expected, finding.found, self.remedy),)
        return ContractReport(self.name, finding.ok, finding.found, blockers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """A bitwise test that row ``i`` of an op's outputs depends on row ``i`` of its inputs alone.

    Attributes:
        name: Name, e.g. ``"deep_gemm.fp8_gemm_nt"``.
        op: The op: takes row tensors (rows first), returns a tensor or several with as many rows.
        control: A twin of ``op`` that is batch-dependent on purpose. Mandatory.
        rows: ``rows(n, device)`` makes the row tensors of ``n`` rows. Always the same ones for the same ``n``.
        build: Returns the identity of the library's build, e.g. its sha256 or version.
        shape_key: Names what the kernel choice depends on besides the batch, e.g. ``"N=4096,K=7168"``.
        remedy: What to do if the op turns out batch-dependent.
        batch_sizes: Batch sizes; put in both sides of every threshold of the library.
        neighbours: Kinds of neighbours, of :data:`NEIGHBOURS`. ``zero``, ``huge`` and ``nan`` overwrite only
            floating-point inputs, for integer ones are indices.
    """

    name: str
    op: Op
    control: Op
    rows: Callable[[int, torch.device], tuple[torch.Tensor, ...]]
    build: Callable[[], str]
    shape_key: str
    remedy: str
    batch_sizes: tuple[int, ...] = (1, 2, 3, 16, 17, 33, 64, 65, 129, 257)
    neighbours: tuple[str, ...] = NEIGHBOURS

    def __post_init__(self) -> None:
        if not callable(self.control) or self.control is self.op:
            raise TypeError(f"self-test {self.name}: control must be a batch-dependent twin of the op")
        unknown = set(self.neighbours) - set(NEIGHBOURS)
        if unknown or not self.neighbours:
            raise TypeError(f"self-test {self.name}: neighbours must be some of {NEIGHBOURS}, got {self.neighbours}")
        if max(self.batch_sizes, default=0) < 2 or min(self.batch_sizes) < 1:
            raise TypeError(f"self-test {self.name}: batch_sizes must be positive, one of them at least 2")


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """Outcome of a self-test.

    Attributes:
        name: The self-test.
        ok: Whether every compared row had the same bytes.
        comparisons: How many rows were compared.
        found: The first difference, or how many rows were equal.
        blockers: Empty if ``ok``.
    """

    name: str
    ok: bool
    comparisons: int
    found: str
    blockers: tuple[Blocker, ...] = field(default=())


def clear_cache() -> None:
    """Forget the outcomes of self-tests, so that the next call runs them."""
    with _LOCK:
        _REPORTS.clear()


def run_self_test(test: SelfTest, *, device: torch.device) -> SelfTestReport:
    """Run ``test``, or return what it found earlier on the same device, build and shape.

    Args:
        test: The test.
        device: Where to run it.

    Raises:
        ContractError: The negative control was not noticed, so the test cannot tell.
    """
    key = (test.name, test.shape_key, _device_name(device), test.build())
    with _LOCK:
        if key not in _REPORTS:
            difference, _ = _first_difference(test, test.control, device)
            if difference is None:
                raise ContractError(
                    f"self-test {test.name} cannot tell",
                    [
                        Blocker(
                            test.name,
                            "its batch-dependent twin to be noticed",
                            f"no difference on {_device_name(device)} for {test.shape_key}",
                            "Give it batch sizes and rows on which the twin shows.",
                        )
                    ],
                )
            difference, comparisons = _first_difference(test, test.op, device)
            found = difference or f"{comparisons} rows with equal bytes"
            expected = "row bits that do not depend on the batch"
            blockers = () if difference is None else (Blocker(test.name, expected, difference, test.remedy),)
            _REPORTS[key] = SelfTestReport(test.name, difference is None, comparisons, found, blockers)
        return _REPORTS[key]


def _device_name(device: torch.device) -> str:
    import torch

    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"


def _first_difference(test: SelfTest, op: Op, device: torch.device) -> tuple[str | None, int]:
    """The first difference in words, or None, and the number of rows compared."""
    largest = max(test.batch_sizes)
    pool = test.rows(largest + 1, device)  # the last row is the one under test, and never its own neighbour
    mine = tuple(tensor[largest:] for tensor in pool)
    alone = _outputs(op, mine)
    comparisons = 0
    for kind in test.neighbours:
        neighbours = tuple(_overwritten(tensor[:largest], kind) for tensor in pool)
        for size in test.batch_sizes:
            for position in sorted({0, size // 2, size - 1}):
                batch = tuple(tensor[:size].clone() for tensor in neighbours)
                for tensor, row in zip(batch, mine, strict=True):
                    tensor[position : position + 1] = row
                for index, (got, want) in enumerate(zip(_outputs(op, batch), alone, strict=True)):
                    comparisons += 1
                    where = _differing_byte(got[position], want[0])
                    if where is not None:
                        return (
                            f"output {index} of a row at position {position} of {size} among {kind} rows "
                            f"differs from the row alone ({where})"
                        ), comparisons
    return None, comparisons


def _outputs(op: Op, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    result = op(*rows)
    return result if isinstance(result, tuple) else (result,)


def _overwritten(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    import torch

    if kind == "random" or not tensor.is_floating_point():
        return tensor
    value = {"zero": 0.0, "huge": torch.finfo(tensor.dtype).max, "nan": float("nan")}[kind]
    return torch.full(tensor.shape, value, dtype=torch.float32, device=tensor.device).to(tensor.dtype)


def _differing_byte(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Where the bytes of two rows differ, in words, or None. Bytes, because NaN != NaN and -0.0 == +0.0."""
    import torch

    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)} against {want.dtype} {tuple(want.shape)}"
    got_bytes, want_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (got, want))
    different = (got_bytes != want_bytes).nonzero()
    if different.numel() == 0:
        return None
    element = int(different[0]) // got.element_size()
    return (
        f"first at element {element}: {got.reshape(-1)[element].item()!r} against {want.reshape(-1)[element].item()!r}"
    )
