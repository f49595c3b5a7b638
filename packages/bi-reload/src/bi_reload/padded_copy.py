"""Copy into a longer buffer and fill the rest, at fixed addresses."""

from __future__ import annotations

import math

import torch

from bi_kernels.runtime.checks import check_tensor, check_value
from bi_kernels.runtime.errors import ArgumentError, ReloadError
from bi_kernels.runtime.native import require_native

from . import _ops
from ._memory import refuse_overlap
from .reference.padded_copy import BITS_DTYPE

__all__ = ["padded_copy_"]


def padded_copy_(dst: torch.Tensor, src: torch.Tensor, *, pad_value: float) -> None:
    """Copy ``src`` into the first rows of ``dst`` and ``pad_value`` into every element of the rest. An *exact op*.

    Args:
        dst: ``(N, ...)``, any dtype of 1, 2, 4 or 8 bytes, any strides, no two elements at one address. It
            keeps its address.
        src: ``(n, ...)`` with ``n <= N``; same dtype, trailing shape and device; apart from ``dst`` in memory (their
            address ranges may not even interleave). ``n = 0`` fills all of ``dst``.
        pad_value: Rounded to dst's dtype. Infinities need a dtype that has them; integer dtypes need an integer in
            range.

    Raises:
        ArgumentError: An argument is not as described. Nothing was written.
        ReloadError: ``dst`` or ``src`` is on the meta device: a copy into it would be silently lost.
        NativeLibraryError: CUDA tensors, and no kernel for them.
        RuntimeError: CUDA tensors of more than 8 dimensions.

    Source:
        design.md, table of packages; the -inf tail of vLLM's ``attn_sink``.

    Invariance:
        Row ``i`` of ``dst`` is a function of row ``i`` of ``src`` alone; bits are moved, never computed.
    """
    check_tensor("dst", dst)
    check_tensor("src", src)
    for name, tensor in (("dst", dst), ("src", src)):
        check_value(name, tensor.layout == torch.strided, "a strided tensor", tensor.layout, "Convert it.")
        if tensor.is_meta:
            raise ReloadError(f"{name}: expected real memory, got a meta tensor. Materialise it before the copy.")
    check_value("dst", dst.dim() > 0, "at least one dimension", tuple(dst.shape), "Pass dst[None] instead.")
    check_value(
        "dst", dst.element_size() in BITS_DTYPE, "elements of 1, 2, 4 or 8 bytes", dst.dtype, "Use torch.view_as_real."
    )
    check_tensor("src", src, dtype=dst.dtype, shape=("rows", *dst.shape[1:]), device=dst.device)
    check_value(
        "src",
        src.shape[0] <= dst.shape[0],
        f"at most {dst.shape[0]} rows",
        src.shape[0],
        "Allocate dst for the largest src.",
    )
    pad_bits = _bits(pad_value, dst.dtype)
    refuse_overlap({"dst": dst}, {"src": src})
    if dst.device.type == "cuda":
        require_native("bi_reload::padded_copy_")
    bits = BITS_DTYPE[dst.element_size()]  # the compiled library cannot name every dtype
    _ops.padded_copy_(dst.detach().view(bits), src.detach().view(bits), pad_bits)


def _bits(pad_value: float, dtype: torch.dtype) -> int:
    """The padding element's bits as a signed integer."""
    advice = "Choose a padding value of this dtype."
    if dtype.is_floating_point:
        try:
            element = torch.tensor([pad_value], dtype=torch.float64).to(dtype)
        except NotImplementedError as error:  # float4_e2m1fn_x2: two numbers per element
            raise ArgumentError("dst", "a dtype of one number per element", str(dtype), "View it as uint8.") from error
        wrong = math.isinf(float(pad_value)) and not bool(torch.isinf(element.double()))
        check_value("pad_value", not wrong, f"a value of {dtype}, which has no infinity", pad_value, advice)
    elif dtype.is_complex:
        element = torch.tensor([pad_value], dtype=dtype)
    elif dtype == torch.bool:
        check_value("pad_value", pad_value in (0, 1), "0 or 1", pad_value, advice)
        element = torch.tensor([bool(pad_value)])
    else:
        info = torch.iinfo(dtype)
        ok = math.isfinite(pad_value) and pad_value == int(pad_value) and info.min <= pad_value <= info.max
        check_value("pad_value", ok, f"an integer in [{info.min}, {info.max}]", pad_value, advice)
        element = torch.tensor([int(pad_value)], dtype=dtype)
    return int(element.view(BITS_DTYPE[element.element_size()]))
