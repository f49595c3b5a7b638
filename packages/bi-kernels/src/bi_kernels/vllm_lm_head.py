"""DeepSeek-V4's logits on the fixed-order product: what the hook registers in place of vLLM's ``LogitsProcessor``.

Imported only after vLLM has imported the module that is edited.
"""

from __future__ import annotations

from typing import Any

import torch

from .fixed_order_mm import fixed_order_mm
from .runtime.checks import check_value

__all__ = ["logits_processor_class"]


def logits_processor_class(original: type[Any]) -> type[Any]:
    """A ``LogitsProcessor`` whose product with the ``lm_head`` is :func:`bi_kernels.fixed_order_mm`.

    Whatever leads to logits goes through it: sampled rows, prompt logprobs, and a trainer that calls the model's
    ``compute_logits``. What follows the product is vLLM's: columns of other ranks, padding, scale and soft cap, the
    sampler's cast to float32. Processors of other models are turned back into the original class at the end of their
    construction.

    Raises (the new class):
        ArgumentError: Another ``head_dtype`` than the hidden states', which must be bfloat16; a bias; a quantised
            head; or a shape that the kernel does not take.
        NativeLibraryError: The compiled kernel is missing.

    Invariance (the product):
        Row ``i`` of the logits depends on row ``i`` of the hidden states and on the weight alone, bit for bit.

    Source: vLLM ``logits_processor.py: LogitsProcessor._apply_head``; design.md, *Small projections with fp32 output*.
    """

    class BatchInvariantLogitsProcessor(original):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not _is_deepseek_v4():
                self.__class__ = original

        def _apply_head(
            self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None
        ) -> torch.Tensor:
            check_value(
                "head_dtype",
                self.head_dtype in (None, torch.bfloat16),
                "the model's own, torch.bfloat16",
                self.head_dtype,
                "Leave it unset.",
            )
            check_value("embedding_bias", embedding_bias is None, "None", "a bias", "DeepSeek-V4's head has none.")
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            logits = fixed_order_mm(rows, lm_head.weight, out_dtype=torch.bfloat16)
            return logits.view(*hidden_states.shape[:-1], logits.shape[-1])

    return BatchInvariantLogitsProcessor


def _is_deepseek_v4() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    model = getattr(get_current_vllm_config_or_none(), "model_config", None)
    return getattr(getattr(model, "hf_config", None), "model_type", None) == "deepseek_v4"
