"""One small call of every kernel, for compute-sanitizer: ``ci/gpu/sanitize.sh bi-kernels``. Needs a GPU.

What the results are equal to is computed on the CPU, so that the tool sees little but our kernels.
"""

from __future__ import annotations

import pytest
import torch

from bi_kernels import Arch, ScaleFormat, fixed_order_mm, fused_silu_mul_per_token_group_quant, log_softmax
from bi_kernels.reference.fixed_order_mm import error_bound
from bi_kernels.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("scale_format", list(ScaleFormat), ids=lambda f: f.name)
@pytest.mark.parametrize("limit", [None, 10.0], ids=lambda v: f"limit={v}")
def test_fused_op(scale_format, limit):
    x = (torch.randn(3, 5, 2 * 640) * 30).bfloat16()
    masked_m = torch.tensor([5, 0, 3], dtype=torch.int32)
    arguments = {"clamp_limit": limit, "scale_format": scale_format}
    want = fused_silu_mul_per_token_group_quant(x, arch=Arch.SM90, **arguments)
    got = fused_silu_mul_per_token_group_quant(x.cuda(), masked_m=masked_m.cuda(), **arguments)
    whole = fused_silu_mul_per_token_group_quant(x[0].cuda(), **arguments)
    m_indices = torch.tensor([1, -1, 0, -1, 2], dtype=torch.int32)
    some = fused_silu_mul_per_token_group_quant(x[0].cuda(), m_indices=m_indices.cuda(), **arguments)
    for i, count in enumerate(masked_m.tolist()):
        for a, b in zip(got, want, strict=True):
            assert_bitwise_equal(a[i, :count].cpu().contiguous(), b[i, :count].contiguous())
    for a, part, b in zip(whole, some, want, strict=True):
        assert_bitwise_equal(a.cpu().contiguous(), b[0].contiguous())
        # Rows of no expert are never written, and the tool minds whoever copies them.
        assert_bitwise_equal(part[::2].cpu().contiguous(), b[0, ::2].contiguous())


# Each set of tiles: with all its rows, and with few, of which not every warp has any.
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 256, 2048), (70, 64, 2048), (600, 64, 4096), (200, 256, 2048), (20, 2048, 2048), (40, 2048, 2048),
     (250, 1024, 4096), (1000, 512, 2048), (40, 8512, 2048), (1, 8576, 2048), (40, 8704, 2048), (2200, 256, 2048),
     (300, 2048, 2048), (8500, 64, 2048), (520, 2048, 2048), (3000, 384, 2048), (1100, 8448, 2048)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fixed_order_mm(m, n, k, dtype):
    x, weight = torch.randn(m, k).bfloat16(), (torch.randn(n, k) / k**0.5).bfloat16()
    got = fixed_order_mm(x.cuda(), weight.cuda(), out_dtype=dtype).cpu()
    some = torch.tensor(sorted({0, m // 2, m - 1}))
    error = (got[some].double() - x[some].double() @ weight.double().T).abs()
    assert (error <= error_bound(x[some], weight, out_dtype=dtype)).all()


@pytest.mark.parametrize("columns", [1, 70, 8192, 20_001], ids=lambda v: f"V={v}")
def test_log_softmax(columns):
    logits = torch.randn(3, columns)
    assert_bitwise_equal(log_softmax(logits.cuda()).cpu(), log_softmax(logits))
