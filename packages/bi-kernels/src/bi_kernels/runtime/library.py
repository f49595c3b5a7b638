"""Declare a custom op in Python: schema, fake, and the reference as its CPU implementation.

A compiled library adds only the CUDA kernels. Hence every install has the op, CPU tensors run the reference, and a
CUDA tensor without the library has no kernel at all: the dispatcher itself fails closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import Blocker, ContractError

__all__ = ["define_op", "has_cuda_kernel"]

# torch.library removes what a Library registered when the object dies, so they are kept for the process's life.
_FRAGMENTS: list[torch.library.Library] = []


def define_op(
    namespace: str, schema: str, *, cpu: Callable[..., Any], fake: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Define ``namespace::<schema>`` with a CPU implementation and a fake, or adopt an equal definition.

    A fork may have registered an op of the same name already. An equal schema is adopted; another one is refused,
    because redefining it would silently change what the fork's callers get.

    Args:
        namespace: Op namespace, e.g. ``"bi_kernels"``.
        schema: Schema with the op's name, e.g. ``"padded_copy(Tensor(a!) dst, Tensor src, float pad) -> ()"``.
        cpu: Implementation for CPU tensors: the reference.
        fake: Shape-only implementation; None for ops that only write to their arguments.

    Returns:
        The callable ``torch.ops.<namespace>.<name>.default``.

    Raises:
        ContractError: An op of this name exists with another schema.
    """
    name = schema.split("(", 1)[0].strip()
    fragment = torch.library.Library(namespace, "FRAGMENT")
    existing = getattr(getattr(torch.ops, namespace), name, None)
    if existing is not None:
        have = existing.default._schema
        want = torch._C.parse_schema(f"{namespace}::{schema}")
        if str(have) != str(want):
            raise ContractError(
                "an op exists with another schema",
                [Blocker(f"{namespace}::{name}", str(want), str(have), "Uninstall the library that defines it.")],
            )
    else:
        fragment.define(schema)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", "CPU"):
        # Ops have no backward. Without this, one called with parameters would record its own reference's graph.
        fragment.impl(name, torch.no_grad()(cpu), "CPU")
    torch.library.register_fake(f"{namespace}::{name}", fake or _writes_only, lib=fragment, allow_override=True)
    _FRAGMENTS.append(fragment)
    return getattr(getattr(torch.ops, namespace), name).default  # type: ignore[no-any-return]


def has_cuda_kernel(op: str) -> bool:
    """Whether ``op`` (``"namespace::name"``) has a kernel for CUDA tensors in this process."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA"))


def _writes_only(*args: Any, **kwargs: Any) -> None:
    """Fake of an op whose results are its arguments: shapes do not change."""
