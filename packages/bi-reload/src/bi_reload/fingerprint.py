"""Fingerprints of weights, computed where the weights are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from bi_kernels.runtime.checks import check_tensor, check_value
from bi_kernels.runtime.errors import ReloadError
from bi_kernels.runtime.native import require_native

from . import _ops
from .reference.fingerprint import finish

__all__ = ["weight_fingerprint"]


def weight_fingerprint(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A 64-bit fingerprint of each tensor's name, dtype, shape and bytes. An *exact op*: equal on every device.

    For finding what a transfer lost or a loader skipped: compare the dicts of both sides. It is no signature; who wants
    to forge a collision can.

    The tensor's elements in row-major order are a string of little-endian 64-bit words (the last one padded with zero
    bytes). Their sum of ``mix(word + position key)`` modulo 2**64 is bound to a hash of name, dtype and shape. ``mix``
    is a bijection: a change confined to one word, say one flipped bit, always changes the result. -0.0 and +0.0
    differ, and so do two NaNs with different payloads.

    Args:
        tensors: Name to tensor: any dtype, any strides, any device, empty ones too.

    Returns:
        Name to an int in [0, 2**64), in the order of ``tensors``.

    Raises:
        ArgumentError: A name is not a string, a value is not a strided tensor.
        ReloadError: A tensor is on the meta device, so it has no bytes.
        NativeLibraryError: CUDA tensors, and no kernel for them.

    Source:
        design.md, table of packages.

    Invariance:
        A function of name, dtype, shape and elements alone: not of strides, addresses, device, threads, chunks, or of
        the other tensors. Integer addition has no order.
    """
    for name, tensor in tensors.items():
        check_value("tensors", isinstance(name, str), "names that are strings", repr(name), "Use state_dict names.")
        check_tensor(name, tensor)
        check_value(name, tensor.layout == torch.strided, "a strided tensor", tensor.layout, "Convert it.")
        if tensor.is_meta:
            raise ReloadError(f"{name}: expected real memory, got a meta tensor. Take the fingerprint after loading.")
    if any(tensor.device.type == "cuda" for tensor in tensors.values()):
        require_native("bi_reload::fingerprint")

    # One transfer per device at the end, instead of one host sync per tensor.
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(name)
    sums: dict[str, int] = {}
    for device, names in by_device.items():
        out = torch.empty(len(names), dtype=torch.int64, device=device)
        for i, name in enumerate(names):
            _ops.fingerprint(_as_bytes(tensors[name]), out[i : i + 1])
        sums |= zip(names, out.tolist(), strict=True)
    return {name: finish(sums[name], _header(name, tensor)) for name, tensor in tensors.items()}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _header(name: str, tensor: torch.Tensor) -> int:
    text = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
