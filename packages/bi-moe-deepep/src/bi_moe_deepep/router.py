"""Router: gate logits in float32, and the choice of experts from them."""

from __future__ import annotations

import torch

from bi_kernels import fixed_order_mm
from bi_kernels.runtime.checks import check_tensor, check_value

from ._ops import launch

__all__ = ["router_gate_logits", "select_experts"]

_INDEX_DTYPES = (torch.int32, torch.int64)


def router_gate_logits(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Gate logits ``x @ weight.T``, never narrower than float32. Bounded op.

    A bfloat16 result would put many experts on exactly equal scores and so change which are chosen.

    Args:
        x: ``(num_tokens, hidden)``, bfloat16.
        weight: ``(num_experts, hidden)``, bfloat16.
        out: ``(num_tokens, num_experts)``, float32, written and returned.

    Returns:
        ``(num_tokens, num_experts)``, float32.

    Raises:
        ArgumentError: A dtype, shape or device does not fit. Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel provides ``bi_kernels::fixed_order_mm``.

    Source: ``vllm...router.gate_linear.GateLinear``; design.md, "Small projections with fp32 output".

    Invariance:
        Row ``i`` depends on row ``i`` of ``x`` and on ``weight`` alone, bit for bit; one path for every token count.
    """
    return fixed_order_mm(x, weight, out_dtype=torch.float32, out=out)


def select_experts(
    logits: torch.Tensor,
    *,
    top_k: int,
    bias: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    out_weights: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token and their weights, by DeepSeek-V4's sqrtsoftplus rule. Exact op.

    ``score = sqrt(max(x, 0) + log1p(exp(-|x|)))`` in float32 with the written-out ``exp`` and ``log1p`` of
    ``bi_kernels.reference.numerics``. Without a table the experts are the ``top_k`` greatest by ``score + bias``
    (float32), equal scores to the lower expert (+0 equals -0), slots in descending order. With a table (hash
    layers) they are ``tid2eid[token_id]`` in table order. Weights come from the scores without bias: divided by their
    sum plus 1e-20, added in slot order, then multiplied by ``routed_scaling_factor``.

    NaN logits: an expert whose biased score is NaN ranks below -inf, lower expert first, so it is chosen only when
    fewer than ``top_k`` others remain; its weight is NaN (0x7fc00000), and with ``renormalize`` so are the others of
    that token. Other tokens do not notice.

    Args:
        logits: ``(num_tokens, num_experts)``, float32. No narrower dtype is accepted. On a GPU at most 512 experts.
        top_k: Slots per token, at most ``num_experts``.
        bias: ``(num_experts,)``, float32, or None. For the choice only.
        token_ids: ``(num_tokens,)``, int32 or int64: rows of ``tid2eid``. Given with the table, and not with a bias.
        tid2eid: ``(vocab, top_k)``, int32 or int64: experts by token id.
        renormalize: Divide the weights by their sum.
        routed_scaling_factor: Rounded to float32, last factor of every weight.
        out_weights: ``(num_tokens, top_k)``, float32, written and returned.
        out_ids: ``(num_tokens, top_k)``, int32, written and returned.

    Returns:
        ``(weights, ids)``: ``(num_tokens, top_k)`` float32 and int32.

    Raises:
        ArgumentError: A dtype, shape, device or value does not fit; a token id lies outside the table or the table
            names an expert that does not exist (data is looked at on the CPU only; on a GPU such a slot gets expert -1
            and a NaN weight). Nothing was written.
        NativeLibraryError: CUDA tensors, and no kernel provides the op.

    Source: ``vllm...router.fused_topk_bias_router.fused_topk_bias`` with ``scoring_func="sqrtsoftplus"``, whose
    kernels differ among themselves in the last bits; design.md, "expert selection from given logits".

    Invariance:
        Row ``i`` of both outputs depends on row ``i`` of ``logits`` and ``token_ids``, on ``bias`` and on the table
        alone, bit for bit.
    """
    check_tensor("logits", logits, dtype=torch.float32, shape=("num_tokens", "num_experts"))
    num_tokens, num_experts = logits.shape
    check_value("top_k", 1 <= top_k <= num_experts, f"1 to {num_experts}", top_k, "Use the model's top_k.")
    check_value(
        "tid2eid",
        (token_ids is None) == (tid2eid is None),
        "token_ids and tid2eid together",
        "only one of them",
        "Hash layers need both, other layers neither.",
    )
    if bias is not None:
        check_value("bias", tid2eid is None, "no bias in a hash layer", "both", "The table decides alone.")
        check_tensor("bias", bias, dtype=torch.float32, shape=(num_experts,), device=logits.device)
    if token_ids is not None and tid2eid is not None:
        check_tensor("token_ids", token_ids, dtype=_INDEX_DTYPES, shape=(num_tokens,), device=logits.device)
        check_tensor("tid2eid", tid2eid, dtype=_INDEX_DTYPES, shape=("vocab", top_k), device=logits.device)
    shape = (num_tokens, top_k)
    if out_weights is None:
        out_weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if out_ids is None:
        out_ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    check_tensor("out_weights", out_weights, dtype=torch.float32, shape=shape, device=logits.device, disjoint=True)
    check_tensor("out_ids", out_ids, dtype=torch.int32, shape=shape, device=logits.device, disjoint=True)
    if logits.is_cuda:
        check_value("logits", num_experts <= 512, "at most 512 experts on a GPU", num_experts, "Use the CPU.")
    launch(
        "select_experts",
        out_weights,
        out_ids,
        logits,
        bias,
        token_ids,
        tid2eid,
        renormalize,
        float(routed_scaling_factor),
    )
    return out_weights, out_ids
