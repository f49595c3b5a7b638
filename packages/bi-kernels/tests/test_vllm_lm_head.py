"""Which logits become ours, with stand-ins for vLLM's layers. What they are: test_fixed_order_mm*, test_vllm_layers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bi_kernels import vllm_lm_head
from bi_kernels.fixed_order_mm import fixed_order_mm
from bi_kernels.runtime.errors import ArgumentError
from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, must_detect

HIDDEN, VOCABULARY = 256, 192


class LogitsProcessor:
    """Of vLLM's class what the replacement meets: its construction, and the product with everything after it."""

    def __init__(self, vocab_size, *, soft_cap=None, head_dtype=torch.bfloat16):
        self.vocab_size, self.soft_cap, self.head_dtype = vocab_size, soft_cap, head_dtype

    def __call__(self, lm_head, hidden_states, embedding_bias=None):
        logits = self._apply_head(lm_head, hidden_states, embedding_bias)[..., : self.vocab_size]
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    def _apply_head(self, lm_head, hidden_states, embedding_bias):
        return hidden_states @ lm_head.weight.T


@pytest.fixture
def build(monkeypatch):
    """Makes a processor as vLLM does while it builds a model of ``model_type``."""
    found = SimpleNamespace(config=None)
    module = ModuleType("vllm.config")
    module.get_current_vllm_config_or_none = lambda: found.config
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", module)
    ours = vllm_lm_head.logits_processor_class(LogitsProcessor)

    def build(model_type="deepseek_v4", **arguments):
        hf_config = SimpleNamespace(model_type=model_type)
        found.config = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config))
        processor = ours(VOCABULARY - 2, **arguments)
        found.config = None  # as when the model runs
        return processor

    return build


def head(dtype=torch.bfloat16):
    return SimpleNamespace(weight=torch.randn(VOCABULARY, HIDDEN).to(dtype))


def hidden(*shape):
    return torch.randn(*shape, HIDDEN).bfloat16()


def test_logits_of_v4_are_the_fixed_order_product_for_every_number_of_rows(build):
    processor, lm_head = build(), head()
    x = hidden(70)
    want = fixed_order_mm(x, lm_head.weight, out_dtype=torch.bfloat16)[:, : VOCABULARY - 2]
    for rows in (0, 1, 32, 70):
        got = processor(lm_head, x[:rows])
        assert got.dtype == torch.bfloat16
        assert_bitwise_equal(got.contiguous(), want[:rows].contiguous())
    assert_bitwise_equal(processor(lm_head, x.view(7, 10, HIDDEN)).reshape(70, -1), want.contiguous())


def test_what_follows_the_product_is_vllms(build):
    lm_head, x = head(), hidden(3)
    plain = build()(lm_head, x)
    assert_bitwise_equal(build(soft_cap=0.5)(lm_head, x), torch.tanh(plain / 0.5) * 0.5)


def test_rows_are_independent_and_a_blas_is_caught(build):
    processor, lm_head = build(), head()
    assert_batch_invariant(lambda x: processor(lm_head, x), hidden(3), batch_sizes=(1, 2, 17, 65))

    def by_batch(x):
        halves = zip(x.float().chunk(2, 1), lm_head.weight.float().chunk(2, 1), strict=True)
        products = [(a @ b.T).bfloat16() for a, b in halves]
        return sum(products) if len(x) > 1 else (x.float() @ lm_head.weight.float().T).bfloat16()

    must_detect(by_batch, hidden(3), batch_sizes=(1, 2, 17))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama", None])
def test_other_models_keep_vllms_class(build, model_type):
    assert type(build(model_type)) is LogitsProcessor


def test_without_a_configuration_it_is_vllms_class(build):
    build()
    assert type(vllm_lm_head.logits_processor_class(LogitsProcessor)(VOCABULARY)) is LogitsProcessor


@pytest.mark.parametrize(
    ("arguments", "weight", "bias", "match"),
    [
        ({"head_dtype": torch.float32}, torch.bfloat16, None, "head_dtype: expected the model's own"),
        ({}, torch.bfloat16, torch.zeros(VOCABULARY), "embedding_bias: expected None, got a bias"),
        ({}, torch.float32, None, "weight: expected dtype bfloat16"),
    ],
    ids=str,
)
def test_another_head_is_refused(build, arguments, weight, bias, match):
    with pytest.raises(ArgumentError, match=match):
        build(**arguments)(head(weight), hidden(2), bias)
