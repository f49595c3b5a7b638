"""One small call of every kernel, for compute-sanitizer: ``ci/gpu/sanitize.sh bi-reload``. Needs a GPU.

What the results are equal to is computed on the CPU, so that the tool sees little but our kernels.
"""

from __future__ import annotations

import math

import pytest
import torch

from bi_kernels.testing import assert_bitwise_equal
from bi_reload import mhc_head, mhc_post, mhc_pre, mhc_pre_broadcast, padded_copy_, weight_fingerprint

pytestmark = pytest.mark.gpu

EPS = {"rms_eps": 1e-6, "hc_eps": 1e-6}


# Tokens: part of a tile, a tile per thread block, more tiles than a block's stages hold. Hidden: unequal pieces, whole
# ones.
@pytest.mark.parametrize(("tokens", "hidden"), [(3, 192), (3, 320), (200, 320), (3, 2048), (200, 2048), (1700, 2048)])
@pytest.mark.parametrize("broadcast", [False, True])
def test_mhc_pre(tokens, hidden, broadcast):
    k = hidden if broadcast else 4 * hidden
    x = torch.randint(-3, 4, (tokens, k)).bfloat16()  # exact sums: equal bits on both devices
    x = x if broadcast else x.view(tokens, 4, hidden)
    weights = (torch.randint(-8, 9, (24, k)).float(), torch.full((3,), 0.1), torch.randn(24))
    op = mhc_pre_broadcast if broadcast else mhc_pre
    settings = {"norm_eps": 1e-6, "sinkhorn_iters": 3, **EPS}
    want = op(x, *weights, norm_weight=None, **settings)
    have = op(x.cuda(), *(t.cuda() for t in weights), norm_weight=None, **settings)
    for a, b in zip(have, want, strict=True):
        assert_bitwise_equal(a.cpu(), b)
    norm_weight = torch.ones(hidden).bfloat16().cuda()
    fused = op(x.cuda(), *(t.cuda() for t in weights), norm_weight=norm_weight, **settings)
    assert_bitwise_equal(fused.comb_mix.cpu(), want.comb_mix)


@pytest.mark.parametrize("tokens", [3, 1200])
def test_mhc_head(tokens):
    x = torch.randint(-3, 4, (tokens, 4, 320)).bfloat16()
    weights = (torch.randint(-8, 9, (4, 1280)).float(), torch.full((1,), 0.1), torch.randn(4))
    have = mhc_head(x.cuda(), *(t.cuda() for t in weights), **EPS)
    assert_bitwise_equal(have.cpu(), mhc_head(x, *weights, **EPS))


@pytest.mark.parametrize("hidden", [37, 1032])
def test_mhc_post(hidden):
    x, residual = torch.randn(5, hidden).bfloat16(), torch.randn(5, 4, hidden).bfloat16()
    layer = (x, residual, torch.rand(5, 4), torch.rand(5, 4, 4))
    assert_bitwise_equal(mhc_post(*(t.cuda() for t in layer)).cpu(), mhc_post(*layer))


def test_padded_copy_and_fingerprint():
    for dtype in (torch.int8, torch.bfloat16, torch.float32, torch.float64):
        dst, src = torch.zeros(300, 7, dtype=dtype), torch.ones(100, 7, dtype=dtype)
        mine = dst.cuda()
        padded_copy_(dst, src, pad_value=-2)
        padded_copy_(mine, src.cuda(), pad_value=-2)
        assert_bitwise_equal(mine.cpu(), dst)
    data = torch.randint(256, (100_003,), dtype=torch.uint8)
    mine = data.cuda()
    for start in (0, 5):
        assert weight_fingerprint({"w": mine[start:]}) == weight_fingerprint({"w": data[start:]})
    assert not math.isnan(dst.sum().item())
