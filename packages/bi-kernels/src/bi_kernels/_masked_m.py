"""The check of ``masked_m``, which the ops with an expert-masked layout share."""

from __future__ import annotations

import torch

from .runtime.checks import check_tensor, check_value

__all__ = ["check_masked_m"]


def check_masked_m(masked_m: torch.Tensor, x: torch.Tensor, columns: str) -> None:
    """Raise :class:`ArgumentError` unless ``masked_m`` counts rows of ``x`` ``(E, T, columns)``."""
    check_value("masked_m", x.dim() == 3, f"None, as x is (M, {columns})", "a tensor", f"Pass x as (E, T, {columns}).")
    experts, capacity = x.shape[:2]
    check_tensor("masked_m", masked_m, dtype=torch.int32, shape=(experts,), device=x.device, contiguous=True)
    if masked_m.device.type == "cpu" and experts:
        low, high = (int(v) for v in masked_m.aminmax())
        check_value(
            "masked_m",
            low >= 0 and high <= capacity,
            f"values from 0 to {capacity}",
            f"values from {low} to {high}",
            "Raise the expert capacity, or split the batch into slices.",
        )
