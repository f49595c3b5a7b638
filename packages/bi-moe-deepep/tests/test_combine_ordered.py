from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_bitwise_equal, first_difference
from bi_moe_deepep import combine_ordered, stage_tokens


def to_float32(exact: Fraction) -> Fraction:
    """Round to the nearest float32, ties to even. Fractions have no rounding of their own to be confused with."""
    if not exact:
        return exact
    exponent = max(abs(exact).numerator.bit_length() - abs(exact).denominator.bit_length(), -126)
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(exact / unit) * unit  # round() takes ties to even


def by_fractions(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``acc = fma(weight, row, acc)`` over ``rows [k, hidden]``, in exact arithmetic with one rounding each."""
    sums = []
    for column in range(rows.shape[1]):
        acc = Fraction(0)
        for weight, value in zip(weights.tolist(), rows[:, column].tolist(), strict=True):
            acc = to_float32(Fraction(weight) * Fraction(value) + acc)
        sums.append(float(acc))
    return torch.tensor(sums)


def case(num_tokens: int, hidden: int, top_k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    expert_out = torch.randn(4, num_tokens, hidden, generator=generator).bfloat16()
    slots = torch.randint(4 * num_tokens, (num_tokens, top_k), generator=generator).int()
    return expert_out, slots, torch.rand(num_tokens, top_k, generator=generator)


def test_is_an_exact_fma_chain_in_slot_order() -> None:
    expert_out, slots, weights = case(6, 24, 5)
    out = combine_ordered(expert_out, slots, weights, out_dtype=torch.float32)
    rows = expert_out.flatten(0, 1)
    for token in range(6):
        want = by_fractions(rows[slots[token].long()], weights[token])
        assert_bitwise_equal(out[token], want, f"token {token}")
    assert_bitwise_equal(combine_ordered(expert_out, slots, weights), out.bfloat16())


def test_a_multiplication_rounded_by_itself_would_show() -> None:
    expert_out, slots, weights = case(6, 64, 5)
    acc = torch.zeros(6, 64)
    for slot in range(5):
        acc = acc + weights[:, slot, None] * expert_out.flatten(0, 1)[slots[:, slot].long()].float()
    out = combine_ordered(expert_out, slots, weights, out_dtype=torch.float32)
    assert first_difference(acc, out) is not None


def test_b54_order_of_slots_shows_before_the_cast() -> None:
    expert_out, _, weights = case(1, 4096, 6)
    expert_out = torch.randn(6, 1, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots = torch.arange(6, dtype=torch.int32)[None]
    other = torch.tensor([3, 0, 5, 1, 4, 2])

    def combined(order: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return combine_ordered(
            expert_out, slots[:, order].contiguous(), weights[:, order].contiguous(), out_dtype=dtype
        )

    in_order = torch.arange(6)
    difference = first_difference(combined(other, torch.float32), combined(in_order, torch.float32))
    assert difference is not None
    assert difference.count > 1000  # so a wrong order cannot pass a comparison before the cast ...
    cast = first_difference(combined(other, torch.bfloat16), combined(in_order, torch.bfloat16))
    assert cast is None or cast.count < difference.count / 50  # ... while the cast hides nearly all of it
    assert_bitwise_equal(combined(in_order, torch.float32), combined(in_order, torch.float32))


def test_skipped_slots() -> None:
    expert_out, slots, weights = case(3, 8, 4)
    slots[0] = -1
    slots[1, 1:3] = -1
    weights[1, 1:3] = torch.nan  # not looked at
    out = combine_ordered(expert_out, slots, weights, out_dtype=torch.float32)
    assert_bitwise_equal(out[0], torch.zeros(8), "a token without slots")
    kept = combine_ordered(
        expert_out, slots[:, ::3].contiguous(), weights[:, ::3].contiguous(), out_dtype=torch.float32
    )
    assert_bitwise_equal(out[1], kept[1])


def test_slots_of_negative_ids_are_skipped_whatever_they_hold() -> None:
    expert_out, slots, weights = case(3, 8, 4)
    ids = torch.tensor([[-1, -1, -1, -1], [0, -1, -9, 3], [0, 1, 2, 3]], dtype=torch.int32)
    cleared = torch.where(ids >= 0, slots, -1)
    want = combine_ordered(expert_out, cleared, weights, out_dtype=torch.float32)
    slots[ids < 0] = 12345678  # as memory that nobody wrote
    weights[ids < 0] = torch.nan
    assert_bitwise_equal(combine_ordered(expert_out, slots, weights, topk_ids=ids, out_dtype=torch.float32), want)
    cleared[2, 1] = -1
    want = combine_ordered(expert_out, cleared, weights)
    slots[2, 1] = -1  # either is enough
    assert_bitwise_equal(combine_ordered(expert_out, slots, weights, topk_ids=ids), want)


def test_negative_zero_and_nan() -> None:
    expert_out = torch.tensor([[-0.0, torch.nan, torch.inf]], dtype=torch.bfloat16).view(1, 1, 3)
    slots, weights = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    bits = combine_ordered(expert_out, slots, weights).view(torch.int16)[0].tolist()
    assert bits == [0x0000, 0x7FC0, 0x7F80]  # from +0, so -0 does not survive
    bits = combine_ordered(expert_out, slots, -weights, out_dtype=torch.float32).view(torch.int32)[0].tolist()
    assert bits[:2] == [0, 0x7FC00000]


def test_takes_back_what_was_staged() -> None:
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[t % 4, (t + 1) % 4] for t in range(7)])
    staged = stage_tokens(x, ids, num_experts=4, capacity=7)
    weights = torch.tensor([1.0, 0.0]).expand(7, 2).contiguous()
    assert_bitwise_equal(combine_ordered(staged.x, staged.slots, weights), x)


def test_empty() -> None:
    expert_out, slots, weights = case(2, 8, 3)
    assert combine_ordered(expert_out, slots[:0], weights[:0]).shape == (0, 8)
    assert_bitwise_equal(
        combine_ordered(expert_out, slots[:, :0], weights[:, :0]), torch.zeros(2, 8, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("value", [-2, 8])
def test_slots_outside_write_nothing(value: int) -> None:
    expert_out, slots, weights = case(2, 8, 3)
    slots[1, 2] = value
    out = torch.full((2, 8), 7.0, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=f"^slots: .*got {value} for token 1, slot 2"):
        combine_ordered(expert_out, slots, weights, out=out)
    assert_bitwise_equal(out, torch.full((2, 8), 7.0, dtype=torch.bfloat16))


def test_bad_arguments() -> None:
    expert_out, slots, weights = case(2, 8, 3)
    for name, arguments in {
        "expert_out": (expert_out.float(), slots, weights),
        "slots": (expert_out, slots.long(), weights),
        "topk_weights": (expert_out, slots, weights.bfloat16()),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{name}: expected .* got "):
            combine_ordered(*arguments)
    with pytest.raises(ArgumentError, match=r"^topk_weights: "):
        combine_ordered(expert_out, slots, weights[:, :2])
    for ids in (slots.long(), slots[:, :2]):
        with pytest.raises(ArgumentError, match=r"^topk_ids: expected .* got "):
            combine_ordered(expert_out, slots, weights, topk_ids=ids)
    with pytest.raises(ArgumentError, match=r"^out: "):
        combine_ordered(expert_out, slots, weights, out=torch.empty(2, 9, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match=r"^out_dtype: "):
        combine_ordered(expert_out, slots, weights, out_dtype=torch.float16)
