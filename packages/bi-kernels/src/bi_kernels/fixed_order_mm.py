"""Matrix products with an order of summation that is a function of K alone."""

from __future__ import annotations

import torch

from . import _ops
from .arch import Arch, detect_arch
from .reference import fixed_order_mm as reference
from .runtime.checks import check_output, check_rows_aligned, check_tensor, check_value
from .runtime.errors import UnsupportedArchError
from .runtime.native import require_native

__all__ = ["CUDA_K", "CUDA_N", "fixed_order_mm", "split_k"]

CUDA_N = range(64, 1 << 31, 64)
"""Columns that the CUDA kernel takes: every multiple of 64, which is how vLLM pads vocabularies."""
CUDA_K = (2048, 4096, 7168)
"""Row lengths that the CUDA kernel takes."""


def split_k(k: int) -> int:
    """Into how many pieces K is cut: one per 256, at most 8.

    Without a split a projection to a few hundred columns keeps a few of a GPU's cores busy, however long K is. The
    number of rows and of cores must not decide about it, as that would make them part of the result.

    Args:
        k: Length of the rows, a positive multiple of 64.

    Raises:
        ArgumentError: Not a positive multiple of 64.
    """
    check_value("k", k > 0 and k % 64 == 0, "a positive multiple of 64", k, "Pad K with zeros.")
    return reference.split_k(k)


def fixed_order_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T``, rows of which depend neither on other rows nor on how many there are.

    *Bounded op*: K is cut into ``split_k(K)`` pieces at multiples of 64, each piece is summed in an order that
    depends on its length alone, and the pieces are added in ascending order in float32. How a matrix unit sums a
    piece cannot be repeated on a CPU; the reference's pieces are exact sums, rounded once. With ``u = 2**-24``, S
    pieces and exact partial sums ``p``, the reference errs by at most ``((1 + u)**S - 1) sum |p|``; every
    implementation stays within :func:`bi_kernels.reference.fixed_order_mm.error_bound`.

    For router gates and both compressors' ``kv_score``, which need float32 results: ``torch.mm`` picks its algorithm
    from M. To bfloat16 for the indexer's ``weights_proj``, whose 64 columns vLLM's batch-invariant linear computes in
    one block, however long K is, and for the ``lm_head``, whose weights that linear reads at a third of the memory's
    speed. A trainer must compute these with this function, or its logits are others.

    Args:
        x: ``(M, K)``, bfloat16, last dim contiguous; M may be 0, K is a positive multiple of 64; on a GPU one of
            :data:`CUDA_K`, rows starting at multiples of 16 bytes and not overlapping.
        weight: ``(N, K)``, bfloat16, last dim contiguous; on a GPU N is in :data:`CUDA_N`, rows likewise.
        out_dtype: float32, or bfloat16: rounded once from the float32 result.
        out: ``(M, N)``, ``out_dtype``, last dim contiguous, or None to allocate. Must not overlap the inputs.

    Returns:
        ``(M, N)``: ``out``. NaN is 0x7fc00000 (bfloat16 0x7fc0); a float32 zero is +0, a bfloat16 one has the sign of
            the float32 sum that was rounded to it.

    Raises:
        ArgumentError: Wrong dtype, shape, stride or device. Nothing was written.
        NativeLibraryError: ``x`` is on a GPU and the compiled kernel is missing.
        UnsupportedArchError: ``x`` is on a GPU other than Hopper: the kernel's matrix instructions are Hopper's.

    Invariance:
        Row ``i`` of the result depends on row ``i`` of ``x`` and on ``weight`` alone, bit for bit; element ``i, j`` on
        these and on row ``j`` of ``weight``, so that a part of the columns has the bits that it has among all.

    Source: preview-pr.txt, *Router gate logits use a common FP32 path*; vLLM ``router/gate_linear.py`` and
    ``models/deepseek_v4/attention.py`` (``kv_score``), ``logits_processor.py: LogitsProcessor._apply_head``; design.md,
    *Small projections with fp32 output*.
    """
    check_tensor("x", x, dtype=torch.bfloat16, shape=("M", "K"), last_dim_contiguous=True)
    k = x.shape[1]
    check_value("x", k > 0 and k % 64 == 0, "K a positive multiple of 64", f"K = {k}", "Pad K with zeros.")
    check_tensor("weight", weight, dtype=torch.bfloat16, shape=("N", k), device=x.device, last_dim_contiguous=True)
    if x.is_cuda:
        n = weight.shape[0]
        check_value("weight", n in CUDA_N, "N a positive multiple of 64 on a GPU", f"N = {n}", "Pad N with zeros.")
        check_value(
            "x",
            k in CUDA_K,
            f"K one of {CUDA_K} on a GPU",
            f"K = {k}",
            "The kernel was validated for these only; add the shape to its tests first.",
        )
    check_value(
        "out_dtype",
        out_dtype in (torch.float32, torch.bfloat16),
        "torch.float32 or torch.bfloat16",
        out_dtype,
        "Convert the result afterwards.",
    )
    shape = (x.shape[0], weight.shape[0])
    if out is not None:
        check_output("out", out, out_dtype, shape, x.device, last_dim_contiguous=True)
    if x.is_cuda:
        require_native("bi_kernels::fixed_order_mm")
        _check_cuda(x, weight, out)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=x.device)
    _ops.fixed_order_mm(x, weight, out)
    return out


def _check_cuda(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> None:
    """What the kernel needs beyond what the reference needs."""
    if detect_arch(x.device) is not Arch.SM90:
        raise UnsupportedArchError(
            "fixed_order_mm: expected a GPU of compute capability 9.0, got another one. The kernel is built on "
            "Hopper's matrix instructions, and no other has been validated. Run on Hopper."
        )
    for name, tensor in (("x", x), ("weight", weight)):
        check_tensor(name, tensor, disjoint=True)  # a tensor map's strides are at least what they step over
        check_rows_aligned(name, tensor, 16)
    if out is not None:
        check_rows_aligned("out", out, 2 * out.element_size())
