"""Which DeepGEMM is installed, and whether its products may be called batch-invariant.

A build with ``set_batch_invariant`` has the switch thrown and read back. Every build, on a GPU whose arithmetic nobody
has to switch (Hopper), must pass the bitwise self-test of :mod:`bi_moe_deepep.deep_gemm_proof`. Where neither holds
the answer is no. The library is found without importing it: an import asserts CUDA_HOME and initialises the JIT.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from bi_kernels.runtime.errors import Blocker, ContractError
from bi_kernels.runtime.packages import package_directories
from bi_kernels.runtime.probe import Contract, Finding

__all__ = [
    "DEEP_GEMM",
    "PRODUCTS",
    "DeepGemmBuild",
    "enable_deep_gemm_batch_invariance",
    "mk_alignment",
    "probe_deep_gemm",
    "supports_deep_gemm_batch_invariance",
]

_SWITCH = "set_batch_invariant"
_ALIGNMENT = "set_mk_alignment_for_contiguous_layout"
_ROWS_PER_BLOCK = 128
PRODUCTS = (
    ("fp8_gemm_nt", "fp8_fp4_gemm_nt"),
    ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
    ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked"),
)
"""The three products whose arithmetic bi_moe_deepep.fp8_gemm specifies, each under the names it has had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepGemmBuild:
    """A DeepGEMM found on disk.

    Attributes:
        module: The name that vLLM would import it by.
        directory: Where it lies.
        version: Its ``__version__``, or ``"unknown"``.
        sha256: Digest of its extension libraries, in the order of their names.
        has_switch: Whether it has ``set_batch_invariant`` (a fork).
        missing: Names of required functions that it does not have.
    """

    module: str
    directory: Path
    version: str
    sha256: str
    has_switch: bool
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module} {self.version} at {self.directory} (sha256 {self.sha256[:12]})"


def probe_deep_gemm() -> DeepGemmBuild | None:
    """The DeepGEMM that vLLM would use, or None. Reads files; imports nothing and touches no GPU.

    Any distribution that installs the top-level name ``deep_gemm`` takes precedence over the one that vLLM brings, as
    it does in ``vllm.utils.deep_gemm``.
    """
    candidates = [("deep_gemm", path) for path in package_directories("deep_gemm")]
    candidates += [
        ("vllm.third_party.deep_gemm", path / "third_party" / "deep_gemm") for path in package_directories("vllm")
    ]
    for module, directory in candidates:
        init = directory / "__init__.py"
        if init.is_file():
            python = init.read_text(encoding="utf-8", errors="replace")
            libraries = [path.read_bytes() for path in sorted(directory.glob("_C*.so"))]
            version = re.search(r"""^__version__\s*=\s*["']([^"']+)""", python, re.MULTILINE)

            def has(name: str, python: str = python, libraries: list[bytes] = libraries) -> bool:
                # With the end of the C string: fp8_gemm_nt is also the beginning of longer names.
                in_python = re.search(rf"\b{name}\b", python) is not None
                return in_python or any(f"{name}\0".encode() in library for library in libraries)

            missing = tuple(names[0] for names in PRODUCTS if not any(map(has, names)))
            if not libraries:
                missing = ("_C*.so", *missing)
            if not has(_SWITCH) and not has(_ALIGNMENT):
                missing += (_ALIGNMENT,)
            return DeepGemmBuild(
                module=module,
                directory=directory,
                version=version[1] if version else "unknown",
                sha256=hashlib.sha256(b"".join(libraries)).hexdigest(),
                has_switch=has(_SWITCH),
                missing=missing,
            )
    return None


def _static() -> Finding:
    build = probe_deep_gemm()
    if build is None:
        return Finding(False, "no deep_gemm and no vllm.third_party.deep_gemm")
    if build.missing:
        return Finding(False, f"{build} without {', '.join(build.missing)}")
    return Finding(True, f"{build}, {'with' if build.has_switch else 'without'} {_SWITCH}")


def _dynamic() -> Finding:
    import torch

    from bi_kernels.arch import Arch, detect_arch

    from .deep_gemm_proof import load_products, prove_deep_gemm
    from .vllm_model import deep_gemm_shapes

    build = probe_deep_gemm()
    if not torch.cuda.is_available():
        return Finding(False, f"{build}, and no GPU to prove it on")
    products = load_products(build)
    if build is not None and build.has_switch:
        switched: contextlib.AbstractContextManager[None] = _switched(
            products.module
        )  # thrown, read back, and put back: asking changes nothing
    elif detect_arch(torch.device("cuda", torch.cuda.current_device())) is Arch.SM90:
        switched = contextlib.nullcontext()
    else:
        return Finding(False, f"{build} without {_SWITCH}, on a GPU where tiles follow the rows; only Hopper's do not")
    with switched:
        reports = prove_deep_gemm(deep_gemm_shapes(), products=products)
    rows = sum(report.comparisons for report in reports)
    return Finding(True, f"{build}: {len(reports)} self-tests, {rows} rows with equal bytes")


@contextlib.contextmanager
def mk_alignment(module: ModuleType) -> Iterator[None]:
    """Hold the rows per block of DeepGEMM's contiguous layout at 128, and put back what was there.

    Raises:
        ContractError: The library took the number and reports another.
    """
    get, put = (getattr(module, f"{verb}_mk_alignment_for_contiguous_layout", None) for verb in ("get", "set"))
    if get is None or put is None:
        yield  # builds from before there was a choice
        return
    before = get()
    put(_ROWS_PER_BLOCK)
    try:
        _must_be("alignment of the contiguous layout", _ROWS_PER_BLOCK, get())
        yield
    finally:
        put(before)


@contextlib.contextmanager
def _switched(module: ModuleType) -> Iterator[None]:
    get, put = module.get_batch_invariant, module.set_batch_invariant
    before = get()
    put(True)
    try:
        _must_be("set_batch_invariant(True), read back", True, get())
        yield
    finally:
        put(before)


def _must_be(subject: str, expected: object, found: object) -> None:
    if found != expected:
        blocker = Blocker(f"deep_gemm: {subject}", str(expected), str(found), DEEP_GEMM.remedy)
        raise ContractError("DeepGEMM does not keep what it was told", [blocker])


DEEP_GEMM = Contract(
    name="deep_gemm",
    expected="FP8 products (dense, contiguous, masked) whose rows do not depend on the batch, proven on this GPU",
    remedy="Use the DeepGEMM of vLLM's wheel on Hopper, or a build with set_batch_invariant; or unset "
    "VLLM_BATCH_INVARIANT.",
    static=_static,
    dynamic=_dynamic,
)


def supports_deep_gemm_batch_invariance(*, fp4_contiguous: bool = False) -> bool:
    """Whether the installed DeepGEMM keeps a row's bits whatever the batch.

    Args:
        fp4_contiguous: Ask about FP8 x FP4 contiguous products too, which are refused.

    Source: the name and signature that trainers look for in ``vllm.utils.deep_gemm``.
    """
    return not fp4_contiguous and DEEP_GEMM.probe().ok


def enable_deep_gemm_batch_invariance() -> None:
    """Put DeepGEMM into its batch-invariant mode for the rest of the process, or raise; never half-way.

    Throws the build's switch where it has one, holds the alignment at 128, and reads both back. Call it before kernels
    are warmed up or captured.

    Raises:
        ContractError: What stands against it. Nothing was changed.

    Source: the name and signature that trainers look for in ``vllm.utils.deep_gemm``.
    """
    DEEP_GEMM.require()
    from .deep_gemm_proof import load_products

    module = load_products().module
    # The probe has thrown and read both, so that neither fails now.
    if hasattr(module, _SWITCH):
        module.set_batch_invariant(True)
    if hasattr(module, _ALIGNMENT):
        module.set_mk_alignment_for_contiguous_layout(_ROWS_PER_BLOCK)
