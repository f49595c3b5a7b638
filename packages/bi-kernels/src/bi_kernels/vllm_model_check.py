"""The check before a DeepSeek-V4 model is built: what ``register()`` could not know yet.

Imported only after vLLM has imported the model's module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .fixed_order_mm import fixed_order_mm
from .log_softmax import log_softmax
from .runtime import probe
from .runtime.errors import Blocker, HookError
from .runtime.hooks import active_plans, model_hook_blockers
from .runtime.native import libraries
from .runtime.packages import resolve
from .runtime.settings import config_blockers
from .silu_mul_quant import fused_silu_mul_per_token_group_quant

__all__ = ["checked_init", "model_blockers", "self_tests"]

_PROJECTIONS = (512, 1024, 2048)
"""Columns of both compressors' ``kv_score``, and of those of an indexer."""


def checked_init(original: Callable[..., None]) -> Callable[..., None]:
    """``DeepseekV4ForCausalLM.__init__`` that builds nothing unless all of aligned mode holds.

    Raises (the new method):
        HookError: Lists everything that :func:`model_blockers` found. No layer was built, no weight allocated.

    Source: design.md, *The contract*.
    """

    @functools.wraps(original)
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        blockers = model_blockers(vllm_config)
        if blockers:
            raise HookError("DeepSeek-V4 cannot be built in aligned mode", blockers)
        original(self, vllm_config=vllm_config, prefix=prefix)

    return __init__


def model_blockers(vllm_config: Any) -> list[Blocker]:
    """Everything that stands against this model on this GPU, cheapest first, all of it at once.

    Packages and hooks; the configuration; then, unless the GPU itself is refused, each active package's contracts with
    third-party libraries and its self-tests on the model's real shapes. Outcomes of self-tests are cached by device,
    library build and shape, so the next model of the process starts at once.
    """
    blockers = model_hook_blockers() + config_blockers(vllm_config)
    if not any(_is_gpu_refusal(blocker) for blocker in blockers):
        # vLLM builds a model with bfloat16 as torch's default dtype, which a self-test must not inherit.
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            blockers += [proof for proof in _proofs(vllm_config.model_config.hf_config) if proof not in blockers]
        finally:
            torch.set_default_dtype(dtype)
    return blockers


def self_tests(config: Any) -> tuple[probe.SelfTest, ...]:
    """This package's ops on the shapes of a model with ``config`` (its ``hf_config``): each op and its twin."""
    hidden, experts, inter = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    vocabulary = -(-config.vocab_size // 64) * 64  # as vLLM pads it
    return (
        *(_projection(n, hidden, torch.float32) for n in sorted({*_PROJECTIONS, experts})),
        *(_projection(n, hidden, torch.bfloat16) for n in (config.index_n_heads, vocabulary)),
        _activation(inter),
        _logprobs(config.vocab_size),
    )


def _is_gpu_refusal(blocker: Blocker) -> bool:
    from .vllm_hook import GPU_REFUSAL

    return blocker.subject == GPU_REFUSAL.feature


def _proofs(config: Any) -> Iterator[Blocker]:
    device = torch.device("cuda", torch.cuda.current_device())
    for plan in active_plans():
        for reference in plan.contracts:
            yield from resolve(reference).probe().blockers
        for reference in plan.self_tests:
            for test in resolve(reference)(config):
                yield from _self_test_blockers(test, device)


def _self_test_blockers(test: probe.SelfTest, device: torch.device) -> tuple[Blocker, ...]:
    subject = f"self-test {test.name} [{test.shape_key}]"
    try:
        return probe.run_self_test(test, device=device).blockers
    except Exception as error:  # a test that breaks has not shown what it must show
        found = f"{type(error).__name__}: {error}"
        return (Blocker(subject, "row bits that do not depend on the batch", found, test.remedy),)


def _build() -> str:
    return str(libraries()["bi_kernels"].describe()["sha256"])


def _projection(n: int, k: int, dtype: torch.dtype) -> probe.SelfTest:
    @functools.cache
    def weight() -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(n)
        return torch.randn(n, k, generator=generator, device="cuda", dtype=torch.bfloat16)

    def by_batch(x: torch.Tensor) -> torch.Tensor:
        # One pass over K for a single row, two halves added for more: how GEMM libraries split K by M. Some columns
        # show it, and all those of a vocabulary would take gigabytes in float32.
        some = weight()[:2048].float()
        if len(x) == 1:
            return (x.float() @ some.T).to(dtype)
        half = k // 2
        left, right = (x[:, :half].float(), x[:, half:].float())
        # Each half is rounded, or the last rounding of a bfloat16 result would hide what the split did.
        return (left @ some[:, :half].T).to(dtype) + (right @ some[:, half:].T).to(dtype)

    return probe.SelfTest(
        name="bi_kernels.fixed_order_mm",
        op=lambda x: fixed_order_mm(x, weight(), out_dtype=dtype),
        control=by_batch,
        rows=lambda rows, device: (_normal(rows, k, device),),
        build=_build,
        shape_key=f"N={n},K={k},{dtype}",
        remedy="Reinstall bi-kernels, and report this with bi-doctor's output.",
    )


def _activation(inter: int) -> probe.SelfTest:
    def op(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_silu_mul_per_token_group_quant(x)

    return probe.SelfTest(
        name="bi_kernels.fused_silu_mul_per_token_group_quant",
        op=op,
        control=lambda x: op((x / x.float().abs().amax()).bfloat16()),  # one scale for the whole batch
        rows=lambda rows, device: (_normal(rows, 2 * inter, device),),
        build=_build,
        shape_key=f"I={inter}",
        remedy="Reinstall bi-kernels, and report this with bi-doctor's output.",
    )


def _logprobs(vocabulary: int) -> probe.SelfTest:
    def by_batch(x: torch.Tensor) -> torch.Tensor:
        shifted = x - x.amax()  # of the batch: mathematically the shift is free
        return shifted - shifted.exp().sum(-1, keepdim=True).log()

    return probe.SelfTest(
        name="bi_kernels.log_softmax",
        op=log_softmax,
        control=by_batch,
        rows=lambda rows, device: (_normal(rows, vocabulary, device).float() * 3,),
        build=_build,
        shape_key=f"V={vocabulary}",
        remedy="Reinstall bi-kernels, and report this with bi-doctor's output.",
        batch_sizes=(1, 2, 3, 17),
    )


def _normal(rows: int, width: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(rows)
    return torch.randn(rows, width, generator=generator, device=device, dtype=torch.float32).bfloat16()
