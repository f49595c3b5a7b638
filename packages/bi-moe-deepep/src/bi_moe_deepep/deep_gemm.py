"""Which DeepGEMM is installed, and whether its products may be called batch-invariant.

In this version the answer to the second question is no: a build with ``set_batch_invariant`` must have the switch
thrown and read back, any other build must pass a bitwise self-test on the model's own (N, K) on the GPU, and neither
is written yet. What is here finds the library without importing it (an import asserts CUDA_HOME and initialises the
JIT) and fails closed.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from bi_kernels.runtime.packages import package_directories
from bi_kernels.runtime.probe import Contract, Finding, register_contract

__all__ = [
    "DEEP_GEMM",
    "DeepGemmBuild",
    "enable_deep_gemm_batch_invariance",
    "probe_deep_gemm",
    "supports_deep_gemm_batch_invariance",
]

_SWITCH = "set_batch_invariant"
_ALIGNMENT = "set_mk_alignment_for_contiguous_layout"
# The three products whose arithmetic bi_moe_deepep.fp8_gemm specifies, each under the names it has had.
_PRODUCTS = (
    ("fp8_gemm_nt", "fp8_fp4_gemm_nt"),
    ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_contiguous"),
    ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_fp4_gemm_nt_masked"),
)


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

            missing = tuple(names[0] for names in _PRODUCTS if not any(map(has, names)))
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
    return Finding(False, f"{_static().found}; the proof on this GPU is not part of this version of bi-moe-deepep")


DEEP_GEMM = register_contract(
    Contract(
        name="deep_gemm",
        expected="FP8 products (dense, contiguous, masked) whose rows do not depend on the batch, proven on this GPU",
        remedy="Install a DeepGEMM (vLLM's wheel brings one) and a bi-moe-deepep that can prove it, or unset "
        "VLLM_BATCH_INVARIANT.",
        static=_static,
        dynamic=_dynamic,
    )
)


def supports_deep_gemm_batch_invariance(*, fp4_contiguous: bool = False) -> bool:
    """Whether the installed DeepGEMM keeps a row's bits whatever the batch.

    Args:
        fp4_contiguous: Ask about FP8 x FP4 contiguous products too, which are refused.

    Source: the name and signature that trainers look for in ``vllm.utils.deep_gemm``.
    """
    return not fp4_contiguous and DEEP_GEMM.probe().ok


def enable_deep_gemm_batch_invariance() -> None:
    """Put DeepGEMM into its batch-invariant mode, or raise; never half-way.

    Raises:
        ContractError: What stands against it.

    Source: the name and signature that trainers look for in ``vllm.utils.deep_gemm``.
    """
    DEEP_GEMM.require()
