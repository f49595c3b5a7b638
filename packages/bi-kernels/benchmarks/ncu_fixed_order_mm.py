"""One launch per shape for Nsight Compute: what limits ``fixed_order_mm`` where it misses its goals, and cuBLAS there.

    run=packages/bi-kernels/benchmarks/ncu_fixed_order_mm.py
    ncu --clock-control none --csv --metrics $(python3 $run --metrics) python3 $run | python3 $run --read

Per shape our kernel, then those of plain ``torch.mm``.
"""

from __future__ import annotations

import csv
import sys

SHAPES = [
    (1024, 512, 4096),
    (1024, 1024, 7168),
    (128, 1024, 2048),
    (1024, 384, 7168),
    (4096, 384, 7168),
    (16, 256, 4096),
]
METRICS = {
    "gpu__time_duration.sum": "ns",
    "launch__grid_size": "blocks",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM %",
    "lts__t_bytes.sum": "L2 bytes",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2 %",
    "dram__bytes.sum": "DRAM bytes",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
}


def launch() -> None:
    import torch

    from bi_kernels import fixed_order_mm

    for m, n, k in SHAPES:
        x, weight = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
        torch.cuda.synchronize()
        fixed_order_mm(x, weight)
        torch.mm(x, weight.T, out_dtype=torch.float32)
    torch.cuda.synchronize()


def read() -> None:
    lines = [line for line in sys.stdin if line.startswith('"')]
    kernels: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(lines):
        entry = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        entry[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}"
    wanted = [
        k for k in kernels.values() if any(word in k["kernel"] for word in ("fixed_order", "gemm", "cublas", "nvjet"))
    ]
    print("shapes (M, N, K), in this order, ours and then cuBLAS:", *SHAPES)
    for entry in wanted:
        print(entry["kernel"][:60], "; ".join(f"{short}: {entry.get(name, '?')}" for name, short in METRICS.items()))


if __name__ == "__main__":
    if "--metrics" in sys.argv:
        print(",".join(METRICS))
    elif "--read" in sys.argv:
        read()
    else:
        launch()
