"""The compiled log-softmax equals the reference bit for bit. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from bi_kernels import log_softmax, selected_logprobs
from bi_kernels._ops import log_softmax as op
from bi_kernels.log_softmax import CUDA_COLUMNS
from bi_kernels.reference import log_softmax as reference
from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, few_multiprocessors, must_detect

pytestmark = pytest.mark.gpu

V4 = 129_280


def check(logits: torch.Tensor, label: str = "") -> None:
    assert_bitwise_equal(log_softmax(logits.cuda()).cpu(), reference.log_softmax(logits), label)


@pytest.mark.parametrize(
    "columns",
    [1, 2, 3, 31, 32, 33, 100, 1000, 4097, 8191, 8192, 8193, V4, 151_936, CUDA_COLUMNS],
    ids=lambda v: f"V={v}",
)
def test_equals_the_reference(columns: int) -> None:
    for rows, scale in ((1, 3.0), (5, 40.0), (3, 0.01)):
        check(torch.randn(rows, columns) * scale, f"{rows} rows, {scale}")


def test_non_finite_rows_and_extreme_spread() -> None:
    for columns in (40, 9000, V4):
        logits = torch.randn(7, columns) * 5
        logits[0, columns // 2] = torch.nan
        logits[1, columns - 1] = torch.inf
        logits[2, ::3] = -torch.inf
        logits[3] = -torch.inf
        logits[4] = -torch.inf
        logits[4, 7] = -3e38
        logits[5, 5] = 3e38
        logits[6] = -0.0
        check(logits, f"V={columns}")


def test_all_bit_patterns() -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (20, 20_000)).to(torch.int32).view(torch.float32)
    check(torch.where(torch.isnan(bits) | (bits == torch.inf), 1.0, bits))


def test_batch_invariance_and_its_twin() -> None:
    rows = torch.randn(3, V4, device="cuda") * 4
    assert_batch_invariant(log_softmax, rows, batch_sizes=(1, 2, 3, 17, 65, 257))

    def shifted_by_the_batch(logits: torch.Tensor) -> torch.Tensor:
        shifted = logits - logits.nan_to_num(0.0, 0.0, 0.0).amax()
        return shifted - shifted.exp().sum(-1, keepdim=True).log()

    must_detect(shifted_by_the_batch, rows, batch_sizes=(1, 2, 17))


def test_selected_logprobs_are_among_them() -> None:
    logits = torch.randn(9, V4, device="cuda") * 3
    ids = torch.randint(V4, (9,), device="cuda")
    assert_bitwise_equal(selected_logprobs(logits, ids), log_softmax(logits).gather(-1, ids.unsqueeze(-1)).squeeze(-1))


def test_strides_graphs_and_nothing_else_is_written() -> None:
    wide = torch.randn(33, 5000, device="cuda")
    logits = wide[::3, 7:4242]
    want = reference.log_softmax(logits.cpu())
    assert_bitwise_equal(log_softmax(logits).cpu(), want)
    assert_bitwise_equal(log_softmax(logits.T.contiguous().T).cpu(), want)
    nodes = -(-4235 // 32)
    memory, scratch = torch.full((13, 4300), 7.0, device="cuda"), torch.full((11, 40 + nodes), 7.0, device="cuda")
    out = memory[1:12, 5:4240]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        op(logits, scratch[:, 1 : 33 + nodes], out)
    for _ in range(3):
        wide.copy_(torch.randn_like(wide))
        graph.replay()
        assert_bitwise_equal(out.contiguous(), log_softmax(logits))
    out.fill_(7.0)
    scratch[:, 1 : 33 + nodes] = 7.0
    assert (memory == 7.0).all()
    assert (scratch == 7.0).all()
    assert log_softmax(logits[:0]).shape == (0, 4235)


def test_the_number_of_multiprocessors_does_not_show() -> None:
    logits = torch.randn(40, V4, device="cuda")
    want = log_softmax(logits)
    with few_multiprocessors(8):
        assert_bitwise_equal(log_softmax(logits), want)


def test_rows_past_two_to_the_31_elements() -> None:
    logits = torch.randn(1, V4, device="cuda").expand(16_700, V4)
    got = log_softmax(logits)
    assert got.numel() > 1 << 31
    assert_bitwise_equal(got[-1:], log_softmax(logits[:1]))
    assert_bitwise_equal(got[16_640:16_641], got[:1])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="logits: expected at most 262144 columns on a GPU"):
        log_softmax(torch.zeros(1, CUDA_COLUMNS + 1, device="cuda"))
    logits, out = torch.zeros(2, 70, device="cuda"), torch.full((2, 70), 7.0, device="cuda")
    scratch = torch.empty(2, 35, device="cuda")
    for bad in ((logits.bfloat16(), scratch, out), (logits, scratch[:, 1:], out), (logits, scratch, out[:, 1:]),
                (logits[:, ::2], scratch[:, :34], out[:, :35])):  # fmt: skip
        with pytest.raises(RuntimeError, match="expected"):
            op(*bad)
    assert (out == 7.0).all()


def test_opcheck() -> None:
    logits, scratch, out = (torch.zeros(2, n, device="cuda") for n in (70, 35, 70))
    torch.library.opcheck(op, (logits, scratch, out), test_utils=("test_schema", "test_faketensor"))
