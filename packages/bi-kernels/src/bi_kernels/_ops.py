"""The ops of the namespace ``bi_kernels``: schemas, and the references as CPU implementations.

Ops write into their last arguments and return nothing, so that their fake has nothing to do and CUDA graphs see
stable addresses. Checks and allocation are in the public wrappers.
"""

from __future__ import annotations

import torch

from .reference import group_quant
from .runtime.library import define_op
from .scale_format import ScaleFormat

__all__ = ["per_token_group_quant"]


def _per_token_group_quant(
    x: torch.Tensor, group_size: int, scale_format: int, out_q: torch.Tensor, out_s: torch.Tensor
) -> None:
    group_quant.per_token_group_quant_fp8(
        x, group_size=group_size, scale_format=ScaleFormat(scale_format), out_q=out_q, out_s=out_s
    )


per_token_group_quant = define_op(
    "bi_kernels",
    "per_token_group_quant(Tensor x, int group_size, int scale_format, Tensor(a!) out_q, Tensor(b!) out_s) -> ()",
    cpu=_per_token_group_quant,
)
