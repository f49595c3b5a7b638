"""Argument checks shared by the public wrappers. They read metadata only: no host sync, no data access.

An eager step of a model makes a hundred of them per layer while the GPU waits, so what holds is found out by comparing
a few attributes; generators, sorting and messages come after that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import ArgumentError

__all__ = ["check_output", "check_rows_aligned", "check_tensor", "check_value"]

Dim = int | str | None


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    shape: Sequence[Dim] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
    last_dim_contiguous: bool = False,
    disjoint: bool = False,
) -> None:
    """Raise :class:`ArgumentError` unless ``tensor`` is a tensor with strides, and as described.

    Args:
        name: The parameter's name, for the message.
        tensor: The tensor to look at.
        dtype: One allowed dtype, or several.
        shape: One entry per dimension: an int must match; a string or None matches anything (the string is shown).
        device: Required device.
        contiguous: Require row-major memory without gaps.
        last_dim_contiguous: Require stride 1 in the last dimension only.
        disjoint: Require memory of its own for every element: in an expanded output the last write would win.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, "a torch.Tensor", type(tensor).__name__, "Pass a tensor.")
    if tensor.layout != torch.strided:
        raise ArgumentError(name, "a strided tensor", str(tensor.layout), "Convert it with .to_dense().")
    if dtype is not None:
        have = tensor.dtype
        if have is not dtype and (isinstance(dtype, torch.dtype) or have not in dtype):
            allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
            want = " or ".join(str(d).removeprefix("torch.") for d in allowed)
            raise ArgumentError(name, f"dtype {want}", str(have).removeprefix("torch."), "Convert it before the call.")
    if shape is not None and not _fits(tensor.shape, shape):
        want = "(" + ", ".join("*" if d is None else str(d) for d in shape) + ")"
        raise ArgumentError(name, f"shape {want}", str(tuple(tensor.shape)), "Reshape or reallocate it.")
    if device is not None and tensor.device != device:
        raise ArgumentError(name, f"device {device}", str(tensor.device), "Move it before the call.")
    if contiguous and not tensor.is_contiguous():
        raise ArgumentError(name, "contiguous memory", f"strides {tensor.stride()}", "Call .contiguous() on it.")
    if last_dim_contiguous and not tensor.is_contiguous() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(
            name, "stride 1 in the last dimension", f"strides {tensor.stride()}", "Call .contiguous() on it."
        )
    if disjoint and _may_overlap(tensor):
        raise ArgumentError(name, "elements that do not overlap", f"strides {tensor.stride()}", "Allocate it.")


def _fits(sizes: Sequence[int], shape: Sequence[Dim]) -> bool:
    if len(sizes) != len(shape):
        return False
    for have, want in zip(sizes, shape):  # noqa: B905, SIM110  # a keyword and a generator cost as much as the rest
        if have != want and isinstance(want, int):
            return False
    return True


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory (an expanded tensor, a sliding window)."""
    if tensor.is_contiguous():
        return False
    reach = 0  # of all dimensions with a smaller stride
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += (size - 1) * stride
    return False


def check_output(
    name: str,
    out: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[Dim],
    device: torch.device,
    *,
    last_dim_contiguous: bool = False,
) -> None:
    """Raise :class:`ArgumentError` unless ``out`` can take the result: also its elements must not share memory."""
    check_tensor(
        name, out, dtype=dtype, shape=shape, device=device, last_dim_contiguous=last_dim_contiguous, disjoint=True
    )


def check_value(name: str, ok: bool, expected: str, found: object, remedy: str) -> None:
    """Raise :class:`ArgumentError` for parameter ``name`` unless ``ok``."""
    if not ok:
        raise ArgumentError(name, expected, str(found), remedy)


def check_rows_aligned(name: str, tensor: torch.Tensor, size: int) -> None:
    """Raise :class:`ArgumentError` unless every row of ``tensor`` starts at a multiple of ``size`` bytes.

    Looks at offset and strides, not at the address, which a fake tensor does not have. Allocators align the memory
    itself by far more; a kernel that needs it checks the address again.
    """
    width, strides = tensor.element_size(), tensor.stride()
    aligned = tensor.storage_offset() * width % size == 0
    for stride, length in zip(strides[:-1], tensor.shape, strict=False):
        aligned &= length <= 1 or stride * width % size == 0
    if not aligned and tensor.numel():
        raise ArgumentError(
            name,
            f"rows that start at multiples of {size} bytes",
            f"offset {tensor.storage_offset()} and strides {strides}",
            "Call .contiguous() on it, or allocate it anew.",
        )
