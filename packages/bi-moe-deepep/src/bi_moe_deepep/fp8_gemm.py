"""Block-scaled FP8 GEMMs: DeepGEMM's three layouts (dense, contiguous groups, masked groups), one without padding.

They are *bounded ops*: on a GPU three of the products are DeepGEMM's (matrix units), held to the contract in
:mod:`bi_moe_deepep.deep_gemm`, and the fourth is a kernel that repeats DeepGEMM's arithmetic on Hopper; the reference
says what that contract must provide. Its rule for one output element:
for each block of 128 along K, ascending, ``part`` is the exact sum of the block's products rounded to float32, and
``acc = acc + part * (s_act * s_weight)``, each operation rounded to float32; one rounding to the output dtype. Scales
that are powers of two (both formats in use) make the two products exact, so that a fused multiply-add gives the same.
"""

from __future__ import annotations

import torch

from bi_kernels.arch import Arch, detect_arch
from bi_kernels.runtime.checks import check_rows_aligned, check_tensor, check_value
from bi_kernels.runtime.errors import UnsupportedArchError

from ._ops import launch

__all__ = [
    "fp8_gemm_nt",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_offsets",
]

_BLOCK = 128
_OUT_DTYPES = (torch.bfloat16, torch.float32)
_CUDA_EXPERTS = 1024  # of which a block of the kernel keeps a table
_CUDA_K = 16384  # whose scales leave a block of the kernel enough shared memory


def fp8_gemm_nt(
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dense product ``(q * s) @ (wq * ws).T`` of block-scaled operands. Bounded op.

    Args:
        q: ``(M, K)``, float8_e4m3fn, last dim contiguous, K a multiple of 128. M may be 0.
        s: Scales of ``q`` per token and group of 128, any strides: ``(M, K / 128)`` float32, or
            ``(M, ceil(K / 512))`` int32 with four UE8M0 bytes each.
        wq: ``(N, K)``, float8_e4m3fn, last dim contiguous.
        ws: ``(ceil(N / 128), K / 128)``, float32: scales of 128 x 128 blocks of ``wq``.
        out_dtype: bfloat16 or float32; ignored when ``out`` is given.
        out: ``(M, N)``, bfloat16 or float32, written and returned.

    Returns:
        ``(M, N)``. A NaN among the codes or scales of row ``i`` makes row ``i`` NaN, and no other.

    Raises:
        ArgumentError: A dtype, shape, stride or device does not fit. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel provides the op.

    Source: DeepGEMM's ``fp8_gemm_nt``; ``vllm.utils.deep_gemm.fp8_gemm_nt``.

    Invariance:
        Row ``i`` depends on row ``i`` of ``q`` and ``s`` and on the weights alone, bit for bit, and is the row that
        the two grouped layouts give for the same expert.
    """
    _check_operands(q, s, wq, ws, rows=("M",), experts=())
    out = _output(out, (q.shape[0], wq.shape[0]), out_dtype, q)
    launch("fp8_gemm_nt", out, q, s, wq, ws)
    return out


def m_grouped_fp8_gemm_nt_contiguous(
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    m_indices: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grouped product over rows that name their expert. Bounded op.

    Args:
        q: ``(M, K)``, float8_e4m3fn, last dim contiguous, K a multiple of 128.
        s: As in :func:`fp8_gemm_nt`.
        wq: ``(E, N, K)``, float8_e4m3fn, last dim contiguous.
        ws: ``(E, ceil(N / 128), K / 128)``, float32.
        m_indices: ``(M,)``, int32: each row's expert, or -1 for a padding row. The reference takes them in any order;
            a DeepGEMM kernel wants each expert's rows together and padded to 128.
        out_dtype: bfloat16 or float32; ignored when ``out`` is given.
        out: ``(M, N)``, bfloat16 or float32, written and returned.

    Returns:
        ``(M, N)``; padding rows are +0.

    Raises:
        ArgumentError: A dtype, shape, stride or device does not fit, or an expert does not exist. Nothing was
            written.
        NativeLibraryError: CUDA tensors, and no kernel provides the op.

    Source: DeepGEMM's ``m_grouped_fp8_gemm_nt_contiguous``.

    Invariance:
        Row ``i`` depends on row ``i`` of ``q``, ``s`` and ``m_indices`` and on that expert's weights alone, bit for
        bit.
    """
    _check_operands(q, s, wq, ws, rows=("M",), experts=("E",))
    check_tensor("m_indices", m_indices, dtype=torch.int32, shape=(q.shape[0],), device=q.device)
    out = _output(out, (q.shape[0], wq.shape[1]), out_dtype, q)
    launch("m_grouped_fp8_gemm_nt_contiguous", out, q, s, wq, ws, m_indices)
    return out


def m_grouped_fp8_gemm_nt_masked(
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grouped product over a fixed number of rows per expert, of which the first ``masked_m[e]`` count. Bounded op.

    Args:
        q: ``(E, T, K)``, float8_e4m3fn, last dim contiguous, K a multiple of 128.
        s: ``(E, T, K / 128)`` float32 or ``(E, T, ceil(K / 512))`` int32, any strides.
        wq: ``(E, N, K)``, float8_e4m3fn, last dim contiguous.
        ws: ``(E, ceil(N / 128), K / 128)``, float32.
        masked_m: ``(E,)``, int32, each from 0 to T.
        out_dtype: bfloat16 or float32; ignored when ``out`` is given.
        out: ``(E, T, N)``, bfloat16 or float32, written and returned.

    Returns:
        ``(E, T, N)``. Rows at or past ``masked_m[e]`` are left untouched; without ``out`` they are zero.

    Raises:
        ArgumentError: A dtype, shape, stride or device does not fit, or a count exceeds T. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel provides the op.

    Source: DeepGEMM's ``m_grouped_fp8_gemm_nt_masked``. It has no ``expected_m``: a hint that moved bits would break
    the contract, so it is a constant of the deployment (:attr:`bi_moe_deepep.ExpertCapacity.expected_m`).

    Invariance:
        Row ``(e, i)`` depends on row ``(e, i)`` of ``q`` and ``s`` and on expert ``e``'s weights alone, bit for bit,
        whatever the counts are.
    """
    _check_operands(q, s, wq, ws, rows=("E", "T"), experts=("E",))
    check_tensor("masked_m", masked_m, dtype=torch.int32, shape=(wq.shape[0],), device=q.device)
    shape = (*q.shape[:2], wq.shape[1])
    if out is None and out_dtype in _OUT_DTYPES:
        out = torch.zeros(shape, dtype=out_dtype, device=q.device)
    out = _output(out, shape, out_dtype, q)
    launch("m_grouped_fp8_gemm_nt_masked", out, q, s, wq, ws, masked_m)
    return out


def m_grouped_fp8_gemm_nt_offsets(
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grouped product over rows that are sorted by expert and not padded. Bounded op.

    DeepGEMM pads each expert's rows to 128, and a step of few tokens then computes mostly padding. Here an expert's
    rows start anywhere, and such a step takes as long as reading the weights of the experts that have rows.

    Args:
        q: ``(R, K)``, float8_e4m3fn, last dim contiguous, K a multiple of 128; on a GPU rows start at multiples of
            16 bytes.
        s: ``(R, K / 128)``, float32, any strides.
        wq: ``(E, N, K)``, float8_e4m3fn, last dim contiguous; on a GPU no gaps between experts, rows aligned likewise,
            N a multiple of 64, K at most 16384, at most 1024 experts.
        ws: ``(E, ceil(N / 128), K / 128)``, float32, any strides.
        offsets: ``(E + 1,)``, int32, ascending from 0 to at most R: expert ``e`` has the rows from ``offsets[e]`` up to
            ``offsets[e + 1]``. A kernel does not look whether it is so; it neither reads nor writes past row R.
        out: ``(R, N)``, bfloat16, last dim contiguous, written and returned.

    Returns:
        ``(R, N)`` bfloat16. Rows at or past ``offsets[E]`` are left untouched. NaN is the device's: 0x7fff on a GPU, as
        in DeepGEMM.

    Raises:
        ArgumentError: A dtype, shape, stride or device does not fit, or (on a CPU) offsets are no such list. Nothing
            was written.
        NativeLibraryError: CUDA tensors, and the compiled kernel is missing.
        UnsupportedArchError: A GPU other than Hopper: the kernel's matrix instructions are Hopper's.

    Source: DeepGEMM's ``m_grouped_fp8_gemm_nt_contiguous`` and ``sm90_fp8_gemm_1d2d``.

    Invariance:
        Row ``i`` depends on row ``i`` of ``q`` and ``s`` and on its expert's weights alone, bit for bit; on Hopper it
        is the row that DeepGEMM's products give with float32 scales.
    """
    _check_operands(q, s, wq, ws, rows=("R",), experts=("E",))
    check_tensor("s", s, dtype=torch.float32)
    check_tensor("offsets", offsets, dtype=torch.int32, shape=(wq.shape[0] + 1,), device=q.device)
    shape = (q.shape[0], wq.shape[1])
    if out is not None:
        check_tensor(
            "out", out, dtype=torch.bfloat16, shape=shape, device=q.device, last_dim_contiguous=True, disjoint=True
        )
    if q.is_cuda:
        _check_cuda(q, wq, offsets, out)
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=q.device)
    launch("m_grouped_fp8_gemm_nt_offsets", out, q, s, wq, ws, offsets)
    return out


def _check_cuda(q: torch.Tensor, wq: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor | None) -> None:
    """What the kernel needs beyond what the reference needs."""
    if detect_arch(q.device) is not Arch.SM90:
        raise UnsupportedArchError(
            "m_grouped_fp8_gemm_nt_offsets: expected a GPU of compute capability 9.0, got another one. The kernel is "
            "built on Hopper's matrix instructions, and no other has been validated. Run on Hopper."
        )
    experts, n, k = wq.shape
    remedy = "The kernel takes no other; use DeepGEMM's contiguous product."
    check_value("wq", n > 0 and n % 64 == 0, "N a positive multiple of 64 on a GPU", f"N = {n}", remedy)
    check_value("wq", 0 < experts <= _CUDA_EXPERTS, f"1 to {_CUDA_EXPERTS} experts on a GPU", experts, remedy)
    check_value("wq", 0 < k <= _CUDA_K, f"K from 128 to {_CUDA_K} on a GPU", f"K = {k}", remedy)
    gaps = experts > 1 and wq.stride(0) != n * wq.stride(1)
    check_value("wq", not gaps, "experts without gaps between them", f"strides {wq.stride()}", "Make it contiguous.")
    check_value("offsets", offsets.is_contiguous(), "contiguous memory", f"stride {offsets.stride()}", "Copy it.")
    check_rows_aligned("q", q, 16)
    check_rows_aligned("wq", wq, 16)
    if out is not None:
        check_rows_aligned("out", out, 4)


def _check_operands(
    q: torch.Tensor,
    s: torch.Tensor,
    wq: torch.Tensor,
    ws: torch.Tensor,
    *,
    rows: tuple[str, ...],
    experts: tuple[str, ...],
) -> None:
    fp8 = torch.float8_e4m3fn
    check_tensor("wq", wq, dtype=fp8, shape=(*experts, "N", "K"), last_dim_contiguous=True)
    *num_experts, n, k = wq.shape
    check_value("wq", k % _BLOCK == 0, f"K in multiples of {_BLOCK}", k, "Pad the weight's last dimension.")
    check_tensor("q", q, dtype=fp8, shape=(*rows, k), device=wq.device, last_dim_contiguous=True)
    if len(rows) == 2:
        check_tensor("q", q, shape=(*num_experts, "T", k))
    groups = k // _BLOCK
    blocks = (n + _BLOCK - 1) // _BLOCK
    check_tensor("ws", ws, dtype=torch.float32, shape=(*num_experts, blocks, groups), device=wq.device)
    check_tensor("s", s, dtype=(torch.float32, torch.int32), device=wq.device)
    width = (groups + 3) // 4 if s.dtype == torch.int32 else groups
    check_tensor("s", s, shape=(*q.shape[:-1], width))


def _output(out: torch.Tensor | None, shape: tuple[int, ...], out_dtype: torch.dtype, q: torch.Tensor) -> torch.Tensor:
    if out is not None:
        check_tensor("out", out, dtype=_OUT_DTYPES, shape=shape, device=q.device, disjoint=True)
        return out
    check_value("out_dtype", out_dtype in _OUT_DTYPES, "bfloat16 or float32", out_dtype, "Convert afterwards.")
    return torch.empty(shape, dtype=out_dtype, device=q.device)
