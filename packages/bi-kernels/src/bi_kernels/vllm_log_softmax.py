"""vLLM's batch-invariant log-softmax with a row's work shared among blocks.

Imported only after vLLM has imported the module that is edited.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .log_softmax import CUDA_COLUMNS
from .log_softmax import log_softmax as log_softmax_of_rows

__all__ = ["log_softmax"]


def log_softmax(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The ``log_softmax`` of vLLM's batch-invariant mode, for the float32 logits of its sampler and of a trainer.

    The same function in another order of summation, which its columns alone decide. Other dtypes, other dimensions,
    other devices and rows beyond :data:`bi_kernels.log_softmax.CUDA_COLUMNS` stay vLLM's.

    Invariance (the new function):
        Row ``i`` of the result depends on row ``i`` of ``input`` alone, bit for bit.

    Source: vLLM ``batch_invariant.py: log_softmax``; design.md, *Logprobs*.
    """

    @functools.wraps(original)
    def batch_invariant(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
        ours = input.is_cuda and input.dtype == torch.float32 and dim in (-1, input.dim() - 1)
        if not ours or not 0 < input.shape[-1] <= CUDA_COLUMNS:
            return original(input, dim=dim)
        return log_softmax_of_rows(input.reshape(-1, input.shape[-1])).view(input.shape)

    return batch_invariant
