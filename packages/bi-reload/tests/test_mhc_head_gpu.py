"""The compiled head reduction: rows that see nothing but themselves, within the derived bound. Needs a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, bit_view, must_detect
from bi_reload import _ops, mhc_head

pytestmark = pytest.mark.gpu

HIDDEN = (2048, 4096, 7168)
TOKENS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 1000, 2048, 2049, 5000)
EPS = {"rms_eps": 1e-6, "hc_eps": 1e-6}

by_hidden = pytest.mark.parametrize("hidden", HIDDEN, ids=lambda h: f"H={h}")


@pytest.fixture
def weights(mhc_weights: Any) -> Any:
    return lambda hidden: [t.cuda() for t in mhc_weights(4 * hidden, 4, 1)]


def streams(tokens: int, hidden: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(tokens)
    return torch.randn(tokens, 4, hidden, device="cuda", generator=generator).bfloat16()


@by_hidden
def test_every_number_of_tokens_and_permutation_gives_the_same_bits(weights, hidden):
    x, w = streams(5000, hidden), weights(hidden)
    every = mhc_head(x, *w, **EPS)
    for tokens in TOKENS:
        for first in {0, 5000 - tokens}:
            rows = slice(first, first + tokens)
            assert_bitwise_equal(mhc_head(x[rows], *w, **EPS), every[rows], f"T={tokens} from {first}")
    for seed in range(3):
        order = torch.randperm(5000, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        assert_bitwise_equal(mhc_head(x[order], *w, **EPS), every[order])


def test_batch_invariance_and_its_twin(weights):
    w, rows = weights(2048), streams(3, 2048)
    rows[2, 1, 5] = torch.nan
    sizes = (2, 16, 17, 33, 129)
    assert_batch_invariant(lambda x: mhc_head(x, *w, **EPS), rows, batch_sizes=sizes)

    def twin(x: torch.Tensor) -> torch.Tensor:
        parts = zip(*(t.float().tensor_split(32 if len(x) <= 64 else 8, 1) for t in (x.flatten(1), w[0])), strict=True)
        return torch.stack([torch.stack([(a * v).sum(1) for v in b], 1) for a, b in parts]).sum(0)

    must_detect(twin, rows[:2], batch_sizes=sizes, neighbours=("zero",))


@pytest.mark.parametrize("hidden", [64, 320, *HIDDEN], ids=lambda h: f"H={h}")
def test_equals_the_reference_where_the_projection_is_exact(mhc_weights, hidden):
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randint(-3, 4, (37, 4, hidden), generator=generator).bfloat16()
    fn = torch.randint(-8, 9, (4, 4 * hidden), generator=generator).float()
    _, scale, base = mhc_weights(4 * hidden, 4, 1)
    arguments = (x, fn, scale * 0.2, base)
    assert_bitwise_equal(mhc_head(*(t.cuda() for t in arguments), **EPS).cpu(), mhc_head(*arguments, **EPS))


@by_hidden
def test_within_bound_of_float64(oracle: ModuleType, weights, hidden):
    for tokens in (5, 70, 2100):
        x, (fn, scale, base) = streams(tokens, hidden), weights(hidden)
        error = oracle.kernel_error(x.flatten(1), fn)
        oracle.check_head(mhc_head(x, fn, scale, base, **EPS), x, fn, scale, base, error)


def test_graphs_buffers_and_nan(weights):
    x, w = streams(40, 2048), weights(2048)
    memory = torch.full((40 * 2048 + 64,), 7.0, device="cuda").bfloat16()
    out = memory[32:-32].view(40, 2048)
    mhc_head(x, *w, **EPS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert mhc_head(x, *w, out=out, **EPS) is out
    for seed in (1, 2):
        x.copy_(streams(40 + seed, 2048)[:40])
        x[3, 2, 1] = torch.nan
        graph.replay()
        assert_bitwise_equal(out, mhc_head(x, *w, **EPS))
        assert (bit_view(out[3]) == 0x7FC0).all()
        assert (bit_view(out[[2, 4]]) != 0x7FC0).all()
    assert (memory[:32] == 7.0).all()
    assert (memory[-32:] == 7.0).all()
    assert mhc_head(x[:0], *w, **EPS).shape == (0, 2048)


def test_opcheck_and_refusals(weights):
    x, w = streams(8, 2048), weights(2048)
    out = torch.empty(8, 2048, device="cuda").bfloat16()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(_ops.mhc_head, (x, *w, 1e-6, 1e-6, out), test_utils=tests)
    with pytest.raises(RuntimeError, match="memory apart from residual"):
        _ops.mhc_head(x, *w, 1e-6, 1e-6, x.view(-1, 2048)[:8])
    with pytest.raises(RuntimeError, match="hidden size: expected a multiple of 64"):
        _ops.mhc_head(x[..., :100].contiguous(), *w, 1e-6, 1e-6, out[:, :100].contiguous())
