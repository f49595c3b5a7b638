"""The ops of the namespace ``bi_kernels``: schemas, and the references as CPU implementations.

Ops write into their last arguments and return nothing, so that their fake has nothing to do and CUDA graphs see
stable addresses. Checks and allocation are in the public wrappers.
"""

from __future__ import annotations

import torch

from .arch import Arch
from .reference import fixed_order_mm as _fixed_order_mm
from .reference import group_quant as _group_quant
from .reference import log_softmax as _log_softmax
from .reference import silu_mul_quant as _silu_mul_quant
from .runtime.library import define_op
from .scale_format import ScaleFormat

__all__ = ["fixed_order_mm", "fused_silu_mul_per_token_group_quant", "log_softmax", "per_token_group_quant"]


def _cpu_fused_silu_mul_per_token_group_quant(
    x: torch.Tensor,
    masked_m: torch.Tensor | None,
    m_indices: torch.Tensor | None,
    clamp_limit: float | None,
    group_size: int,
    scale_format: int,
    arch: int,
    out_q: torch.Tensor,
    out_s: torch.Tensor,
) -> None:
    _silu_mul_quant.fused_silu_mul_per_token_group_quant(
        x,
        masked_m=masked_m,
        m_indices=m_indices,
        clamp_limit=clamp_limit,
        group_size=group_size,
        scale_format=ScaleFormat(scale_format),
        arch=Arch(arch),
        out_q=out_q,
        out_s=out_s,
    )


def _cpu_per_token_group_quant(
    x: torch.Tensor,
    masked_m: torch.Tensor | None,
    group_size: int,
    scale_format: int,
    out_q: torch.Tensor,
    out_s: torch.Tensor,
) -> None:
    _group_quant.per_token_group_quant_fp8(
        x,
        masked_m=masked_m,
        group_size=group_size,
        scale_format=ScaleFormat(scale_format),
        out_q=out_q,
        out_s=out_s,
    )


def _cpu_fixed_order_mm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    _fixed_order_mm.fixed_order_mm(x, weight, out_dtype=out.dtype, out=out)


def _cpu_log_softmax(logits: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_log_softmax.log_softmax(logits))


fused_silu_mul_per_token_group_quant = define_op(
    "bi_kernels",
    "fused_silu_mul_per_token_group_quant(Tensor x, Tensor? masked_m, Tensor? m_indices, float? clamp_limit, "
    "int group_size, int scale_format, int arch, Tensor(a!) out_q, Tensor(b!) out_s) -> ()",
    cpu=_cpu_fused_silu_mul_per_token_group_quant,
)
per_token_group_quant = define_op(
    "bi_kernels",
    "per_token_group_quant(Tensor x, Tensor? masked_m, int group_size, int scale_format, Tensor(a!) out_q, "
    "Tensor(b!) out_s) -> ()",
    cpu=_cpu_per_token_group_quant,
)
fixed_order_mm = define_op(
    "bi_kernels", "fixed_order_mm(Tensor x, Tensor weight, Tensor(a!) out) -> ()", cpu=_cpu_fixed_order_mm
)
log_softmax = define_op(
    "bi_kernels", "log_softmax(Tensor logits, Tensor(a!) scratch, Tensor(b!) out) -> ()", cpu=_cpu_log_softmax
)
