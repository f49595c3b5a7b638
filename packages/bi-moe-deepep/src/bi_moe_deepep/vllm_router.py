"""vLLM's router gate on the fixed-order product: what the hook registers in place of ``GateLinear``.

Imported only after vLLM has imported the module that is edited.
"""

from __future__ import annotations

from typing import Any

import torch

from bi_kernels.fixed_order_mm import CUDA_K, CUDA_N
from bi_kernels.runtime.checks import check_tensor, check_value

from .router import router_gate_logits
from .vllm_model import is_deepseek_v4

__all__ = ["gate_linear_class"]


def gate_linear_class(original: type[Any]) -> type[Any]:
    """A ``GateLinear`` whose logits have one order of summation for every number of tokens, in float32.

    Layers of other models are turned back into the original class at the end of their construction.

    Raises (the new class):
        ArgumentError: A DeepSeek-V4 gate has a bias, another dtype than bfloat16 weights and float32 logits, or a shape
            that the kernel was not validated for; or its input is not bfloat16.
        NativeLibraryError: The compiled kernel is missing.

    Invariance (``forward``):
        Row ``i`` of the logits depends on row ``i`` of ``x`` and on the weight alone, bit for bit.

    Source: preview-pr.txt, *Router gate logits use a common FP32 path*; vLLM ``router/gate_linear.py``.
    """

    class BatchInvariantGateLinear(original):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, bias: bool = False, *args: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, bias, *args, **kwargs)
            if not is_deepseek_v4():
                self.__class__ = original
                return
            check_value("bias", not bias, "a gate without bias", bias, "The bias of V4 is for the choice only.")
            check_tensor("gate weight", self.weight, dtype=torch.bfloat16)
            check_value(
                "out_dtype",
                self.out_dtype == torch.float32,
                "float32 logits",
                self.out_dtype,
                "bfloat16 logits put experts on equal scores and change which are chosen.",
            )
            check_value(
                "gate",
                output_size in CUDA_N,
                "a number of experts that is a multiple of 64",
                output_size,
                "No other has tiles.",
            )
            check_value("gate", input_size in CUDA_K, f"a width among {CUDA_K}", input_size, "Add it to the tests.")

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return router_gate_logits(x, self.weight), None

    return BatchInvariantGateLinear
