"""Time the fused activation and quantisation against the kernels that it replaces, and against a plain copy.

    python packages/bi-kernels/benchmarks/bench_silu_mul_quant.py --out results/h200.jsonl

One JSON line per shape: op, shape, stock, stock_us, ours_us, ratio (stock / ours), gb_s (bytes read and written by
ours), percent_of_copy, bitwise (all codes and scales compared with the reference in this run). Everything is replayed
from CUDA graphs, stock, ours and the copy by turns, and the median is taken. Without vLLM stock is null.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from timing import capture, medians, record, run_cases

from bi_kernels import ScaleFormat, detect_arch, fused_silu_mul_per_token_group_quant, scale_format_for
from bi_kernels.reference import silu_mul_quant as reference
from bi_kernels.scale_format import allocate_scales
from bi_kernels.testing import first_difference

CONTIGUOUS = (
    (1, 2048), (16, 2048), (128, 2048), (1024, 2048), (8192, 2048), (49152, 2048), (131072, 2048),
    (128, 7168), (8192, 7168),
)  # fmt: skip
MASKED = ((8, 32, 2048), (32, 128, 2048), (32, 1024, 2048), (256, 128, 7168))
LIMIT = 10.0


def equals_reference(
    x: torch.Tensor, masked_m: torch.Tensor | None, q: torch.Tensor, s: torch.Tensor, scale_format: ScaleFormat
) -> bool:
    """Compare all outputs with the reference, 8,192 rows at a time."""
    arch = detect_arch(x.device)
    parts = [slice(i, i + 8192) for i in range(0, x.shape[0], 8192)] if x.dim() == 2 else [*range(x.shape[0])]
    for part in parts:
        rows = x[part] if masked_m is None else x[part, : int(masked_m[part])]
        want_q = torch.empty((*rows.shape[:-1], rows.shape[-1] // 2), dtype=q.dtype, device=x.device)
        want_s = torch.empty((*rows.shape[:-1], s.shape[-1]), dtype=s.dtype, device=x.device)
        reference.fused_silu_mul_per_token_group_quant(
            rows, clamp_limit=LIMIT, scale_format=scale_format, arch=arch, out_q=want_q, out_s=want_s
        )
        for got, want in ((q, want_q), (s, want_s)):
            mine = got[part] if masked_m is None else got[part, : int(masked_m[part])]
            if first_difference(mine.contiguous(), want) is not None:
                return False
    return True


def stock_kernel(x: torch.Tensor, masked_m: torch.Tensor | None) -> tuple[str | None, Callable[[], object] | None]:
    """Name and call of vLLM's Hopper kernel for this input; None without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None, None
    if masked_m is None:
        if x.shape[0] % 128:
            return None, None  # the stock kernel takes multiples of 128 rows only
        from vllm.model_executor.layers.quantization.utils.fp8_utils import (
            silu_mul_per_token_group_quant_fp8_colmajor as colmajor,
        )

        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=torch.float8_e4m3fn, device=x.device)
        return "silu_mul_per_token_group_quant_fp8_colmajor", lambda: colmajor(
            x, output=out, use_ue8m0=True, clamp_limit=LIMIT
        )
    from vllm.model_executor.layers.fused_moe.experts.batched_deep_gemm_moe import (
        persistent_masked_m_silu_mul_quant as masked,
    )

    return "persistent_masked_m_silu_mul_quant", lambda: masked(x, masked_m)


def bench(shape: tuple[int, ...], copy: Callable[[], float]) -> dict[str, object]:
    """One record."""
    intermediate = shape[-1]
    x = (torch.randn((*shape[:-1], 2 * intermediate), device="cuda", dtype=torch.bfloat16) * 3).contiguous()
    experts = shape[0] if len(shape) == 3 else None
    masked_m = None if experts is None else torch.full((experts,), shape[1], dtype=torch.int32, device="cuda")
    scale_format = scale_format_for(detect_arch(x.device))
    groups = intermediate // 128
    q = torch.empty((*shape[:-1], intermediate), dtype=torch.float8_e4m3fn, device="cuda")
    s = allocate_scales(shape[:-1], groups, scale_format, device="cuda")

    def ours() -> None:
        fused_silu_mul_per_token_group_quant(
            x, masked_m=masked_m, clamp_limit=LIMIT, scale_format=scale_format, out_q=q, out_s=s
        )

    rows = x.numel() // x.shape[-1]
    moved = x.numel() * 2 + q.numel() + rows * scale_format.columns(groups) * 4
    launches = max(2, min(200, (1 << 31) // moved))
    name, stock = stock_kernel(x, masked_m)
    timers = [capture(ours, launches), copy] + ([capture(stock, launches)] if stock is not None else [])
    ours_us, copy_us, *stock_us = medians(*timers)
    return record(
        "silu_mul_quant_contiguous" if masked_m is None else "silu_mul_quant_masked",
        list(shape),
        moved=moved,
        ours_us=ours_us,
        copy_us=copy_us,
        bitwise=equals_reference(x, masked_m, q, s, scale_format),
        stock=name,
        stock_us=stock_us[0] if stock_us else None,
        scale_format=scale_format.name,
    )


if __name__ == "__main__":
    run_cases(__doc__, ((shape,) for shape in CONTIGUOUS + MASKED), bench)
