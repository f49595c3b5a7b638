from __future__ import annotations

import torch

from bi_kernels.testing import QUICK_BATCH_SIZES, assert_batch_invariant, must_detect
from bi_moe_deepep import router_gate_logits, select_experts

GENERATOR = torch.Generator().manual_seed(0)
NUM_EXPERTS, HIDDEN, TOP_K = 64, 256, 6
X = torch.randn(5, HIDDEN, generator=GENERATOR).bfloat16()
WEIGHT = (torch.randn(NUM_EXPERTS, HIDDEN, generator=GENERATOR) / 16).bfloat16()
BIAS = torch.randn(NUM_EXPERTS, generator=GENERATOR)
TABLE = torch.stack([torch.randperm(NUM_EXPERTS, generator=GENERATOR)[:TOP_K] for _ in range(32)])
TOKEN_IDS = torch.randint(32, (5,), generator=GENERATOR)
LOGITS = torch.randn(5, NUM_EXPERTS, generator=GENERATOR)
LOGITS[0, :8] = 1.0  # ties


def routed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = router_gate_logits(x, WEIGHT)
    return (logits, *select_experts(logits, top_k=TOP_K, bias=BIAS, routed_scaling_factor=1.5))


def hashed(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return select_experts(logits, top_k=TOP_K, token_ids=token_ids, tid2eid=TABLE)


def selected(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return select_experts(logits, top_k=TOP_K, bias=BIAS)


def low_latency_gemm_up_to_16_tokens(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Batch-dependent on purpose, as a router that has a fast path for few tokens: another order of summation."""
    if len(x) > 16:
        return routed(x)
    half = HIDDEN // 2
    logits = router_gate_logits(x[:, :half].contiguous(), WEIGHT[:, :half].contiguous())
    logits = logits + router_gate_logits(x[:, half:].contiguous(), WEIGHT[:, half:].contiguous())
    return (logits, *select_experts(logits, top_k=TOP_K, bias=BIAS, routed_scaling_factor=1.5))


def logits_kept_in_bfloat16_for_many_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Batch-dependent on purpose."""
    return selected(logits.bfloat16().float() if len(logits) > 16 else logits)


def test_routing_does_not_depend_on_the_batch() -> None:
    assert_batch_invariant(routed, X, batch_sizes=QUICK_BATCH_SIZES)


def test_selection_does_not_depend_on_the_batch() -> None:
    assert_batch_invariant(selected, LOGITS, batch_sizes=(*QUICK_BATCH_SIZES, 257))


def test_hash_layers_do_not_depend_on_the_batch() -> None:
    assert_batch_invariant(hashed, (LOGITS, TOKEN_IDS), batch_sizes=QUICK_BATCH_SIZES)


def test_paths_that_depend_on_the_batch_are_noticed() -> None:
    must_detect(low_latency_gemm_up_to_16_tokens, X, batch_sizes=QUICK_BATCH_SIZES)
    must_detect(logits_kept_in_bfloat16_for_many_tokens, LOGITS)
