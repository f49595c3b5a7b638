"""Reference of the log-softmax that rollout and trainer share."""

from __future__ import annotations

import torch

from .numerics import canonical_nan, exp, log, tree_sum

__all__ = ["log_softmax", "selected_logprobs"]


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """See :func:`bi_kernels.log_softmax`."""
    largest, log_sum = _normaliser(logits)
    return canonical_nan((logits - largest) - log_sum)


def selected_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """See :func:`bi_kernels.selected_logprobs`."""
    largest, log_sum = _normaliser(logits)
    # Gathering first and subtracting afterwards are the same two subtractions on the same numbers.
    return canonical_nan((logits.gather(-1, token_ids.long().unsqueeze(-1)) - largest) - log_sum).squeeze(-1)


def _normaliser(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = logits.amax(-1, keepdim=True)
    return largest, log(tree_sum(exp(logits - largest))).unsqueeze(-1)
