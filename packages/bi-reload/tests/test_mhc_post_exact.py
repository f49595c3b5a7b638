"""The compiled mhc_post equals the reference on every input. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect
from bi_reload import _ops, mhc_post
from bi_reload.reference.mhc_post import mhc_post as reference

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 1000, 2048, 2049, 5000)


def inputs(tokens: int, hidden: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, hidden, device="cuda", generator=g).bfloat16()
    residual = torch.randn(tokens, 4, hidden, device="cuda", generator=g).bfloat16()
    post = torch.rand(tokens, 4, device="cuda", generator=g) * 2
    return x, residual, post, torch.softmax(torch.randn(tokens, 4, 4, device="cuda", generator=g), -1)


def random_bits(tokens: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """Every kind of number: subnormals, infinities and NaN with payloads among them."""
    g = torch.Generator().manual_seed(hidden)
    words = [torch.randint(-(2**15), 2**15, (tokens, n, hidden), generator=g).short() for n in (1, 4)]
    floats = [torch.randint(-(2**31), 2**31, (tokens, n), generator=g).int() for n in (4, 16)]
    x, residual = words[0][:, 0].contiguous().view(torch.bfloat16), words[1].view(torch.bfloat16)
    return x, residual, floats[0].view(torch.float32), floats[1].view(torch.float32).view(tokens, 4, 4)


@pytest.mark.parametrize("hidden", [1, 8, 37, 61, 2048, 4096, 7168], ids=lambda h: f"H={h}")
def test_equals_the_reference_on_the_cpu(hidden):
    for arguments in (random_bits(40, hidden), tuple(t.cpu() for t in inputs(40, hidden))):
        have = mhc_post(*(t.cuda() for t in arguments)).cpu()
        assert_bitwise_equal(have, mhc_post(*arguments))


@pytest.mark.parametrize("hidden", [2048, 4096, 7168], ids=lambda h: f"H={h}")
def test_every_number_of_tokens_equals_the_reference(hidden):
    # On the GPU the reference is torch's elementwise kernels: IEEE operations, so the same bits as on the CPU.
    every = inputs(5000, hidden)
    want = reference(*every)
    for tokens in TOKENS:
        for first in {0, 5000 - tokens}:
            rows = tuple(t[first : first + tokens] for t in every)
            assert_bitwise_equal(mhc_post(*rows), want[first : first + tokens], f"T={tokens} from {first}")
    order = torch.randperm(5000, device="cuda")
    assert_bitwise_equal(mhc_post(*(t[order] for t in every)), want[order])


def test_batch_invariance_and_its_twin():
    rows = inputs(3, 136)
    rows[0][2, 5] = torch.nan
    assert_batch_invariant(mhc_post, rows, batch_sizes=(2, 16, 17, 33, 129))

    def twin(x, residual, post, comb):
        total = post[:, :, None] * x[:, None].float()
        if len(x) > 16:
            total = total.bfloat16().float()
        for j in range(4):
            total = total + comb[:, j, :, None] * residual[:, j, None].float()
        return total.bfloat16()

    assert must_detect(twin, rows, batch_sizes=(15, 16, 17), neighbours=("zero",)).batch_size == 17


def test_rows_that_are_no_whole_vectors_or_start_anywhere():
    x, residual, post, comb = inputs(5, 64)
    want = mhc_post(x, residual, post, comb)
    memory = torch.full((residual.numel() + 3,), 7.0, device="cuda").bfloat16()
    out = memory[1:-2].view_as(residual)
    assert mhc_post(x, residual, post, comb, out=out) is out
    assert_bitwise_equal(out, want)
    out.fill_(7.0)
    assert (memory == 7.0).all()


def test_graphs_replay():
    layer = inputs(33, 4096)
    out = torch.empty_like(layer[1])
    mhc_post(*layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mhc_post(*layer, out=out)
    for seed in (1, 2):
        for mine, new in zip(layer, inputs(33, 4096, seed), strict=True):
            mine.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        assert_bitwise_equal(out, reference(*layer))


def test_opcheck_and_refusals():
    layer = inputs(4, 64)
    out = torch.full_like(layer[1], 3.0)
    torch.library.opcheck(_ops.mhc_post, (*layer, out.clone()), test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(RuntimeError, match="memory apart from residual"):
        _ops.mhc_post(*layer, layer[1])
    with pytest.raises(RuntimeError, match="comb_mix: expected size 4"):
        _ops.mhc_post(*layer[:3], layer[3][:3].contiguous(), out)
    assert (out == 3.0).all()
    assert mhc_post(*inputs(0, 64)).shape == (0, 4, 64)
