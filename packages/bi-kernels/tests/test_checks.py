"""Checks of strides and addresses: by metadata alone, so that they work on fake tensors too."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from bi_kernels import ArgumentError
from bi_kernels.runtime.checks import check_rows_aligned, check_tensor

MEMORY = torch.zeros(4, 4100).bfloat16()


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    ("view", "aligned"),
    [
        (lambda x: x[:, :4096].contiguous(), True),
        (lambda x: x[:, :4096], False),  # rows of 8,200 bytes
        (lambda x: x[:1, :4096], True),  # one row
        (lambda x: x[:1, 1:4097], False),  # two bytes into the memory
        (lambda x: x[:1, 8:4096], True),
        (lambda x: x[:0, 1:], True),  # nothing to read
        (lambda x: x.view(2, 2, 4100)[:, :1, :64], True),  # experts 16,400 bytes apart
        (lambda x: x.view(2, 2, 4100)[:, :, :64], False),
    ],
    ids=["whole", "rows", "row", "offset", "aligned-offset", "empty", "experts", "experts-and-rows"],
)
def test_rows_start_at_multiples_of_sixteen_bytes(view, aligned, fake):
    x = view(MEMORY)
    if fake:
        with FakeTensorMode() as mode:
            x = view(mode.from_tensor(MEMORY))
    if aligned:
        check_rows_aligned("x", x, 16)
    else:
        with pytest.raises(ArgumentError, match="x: expected rows that start at multiples of 16 bytes, got offset"):
            check_rows_aligned("x", x, 16)


@pytest.mark.parametrize("shape", [(4, 3), (1, 3), (3,)])
def test_only_an_output_whose_elements_share_memory_is_refused(shape: tuple[int, ...]) -> None:
    whole = torch.zeros(shape)
    for fine in (whole, whole.mT if whole.dim() > 1 else whole[::2], whole[:0], whole[:1].expand(1, *shape[1:])):
        check_tensor("out", fine, disjoint=True)
    with pytest.raises(ArgumentError, match="do not overlap"):
        check_tensor("out", whole.unsqueeze(0).expand(2, *shape), disjoint=True)
    with pytest.raises(ArgumentError, match="do not overlap"):
        check_tensor("out", torch.zeros(9).as_strided((4, 3), (2, 1)), disjoint=True)


def test_a_tensor_without_strides_is_refused() -> None:
    with pytest.raises(ArgumentError, match="strided"):
        check_tensor("x", torch.eye(3).to_sparse())
