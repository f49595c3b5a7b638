"""Indexer scores: the reference's own bits, and the derived bound against float64."""

from __future__ import annotations

import math

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_sparse_attn import mqa_logits, top_k_per_row_prefill

E4M3 = torch.float8_e4m3fn


def problem(tokens: int = 7, heads: int = 5, keys: int = 40, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(tokens, heads, 128, generator=generator).to(E4M3),
        "k": torch.randn(keys, 128, generator=generator).to(E4M3),
        "k_scale": torch.exp2(torch.randint(-9, 3, (keys,), generator=generator).float()),
        "weights": torch.randn(tokens, heads, generator=generator),
        "row_starts": torch.zeros(tokens, dtype=torch.int32),
        "row_ends": torch.full((tokens,), keys, dtype=torch.int32),
    }


def test_order_and_roundings_are_as_written() -> None:
    """Element by element in Python: one rounding for the dot product, then multiply, then add, heads ascending."""
    inputs = problem(tokens=2, heads=3, keys=4)
    got = mqa_logits(**inputs)

    def f32(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float64).float())

    for t in range(2):
        for n in range(4):
            score = 0.0
            for h in range(3):
                products = (inputs["q"][t, h].double() * inputs["k"][n].double()).tolist()
                relu = max(f32(math.fsum(products)), 0.0)
                score = f32(score + f32(relu * float(inputs["weights"][t, h])))
            assert float(got[t, n]) == f32(score * float(inputs["k_scale"][n]))


def test_within_the_bound_of_float64() -> None:
    """Head h's term is rounded twice (dot, product) and at most ``heads`` times in the sum; the scale once more."""
    inputs = problem(tokens=20, heads=16, keys=100)
    got = mqa_logits(**inputs).double()
    dots = torch.einsum("tha,na->thn", inputs["q"].double(), inputs["k"].double()).clamp(min=0)
    terms = dots * inputs["weights"].double().unsqueeze(2)
    scale = inputs["k_scale"].double()
    unit = 2.0**-24
    bound = 1.01 * unit * (16 + 3) * terms.abs().sum(1) * scale
    assert bool(((got - terms.sum(1) * scale).abs() <= bound).all())


def test_largest_codes_are_summed_exactly() -> None:
    """448 * 448 * 127 and one smallest product: 43 bits, which only an exact sum before the rounding keeps apart."""
    inputs = problem(tokens=1, heads=1, keys=2)
    inputs["q"] = torch.full((1, 1, 128), 448.0).to(E4M3)
    k = torch.full((2, 128), 448.0)
    k[:, 64:] = -448.0
    k[1, 127] = 2.0**-9
    inputs["k"] = k.to(E4M3)
    inputs["weights"] = torch.ones(1, 1)
    inputs["k_scale"] = torch.ones(2)
    assert mqa_logits(**inputs).tolist() == [[0.0, float(torch.tensor(448 * 448 + 448 * 2.0**-9).float())]]


def test_outside_a_range_is_minus_infinity() -> None:
    inputs = problem(tokens=3, keys=6)
    whole = mqa_logits(**inputs)
    inputs["row_starts"] = torch.tensor([0, 2, 4], dtype=torch.int32)
    inputs["row_ends"] = torch.tensor([6, 5, 4], dtype=torch.int32)
    column = torch.arange(6)
    inside = (column >= inputs["row_starts"].unsqueeze(1)) & (column < inputs["row_ends"].unsqueeze(1))
    assert_bitwise_equal(mqa_logits(**inputs), torch.where(inside, whole, -math.inf))


def test_a_packed_key_buffer_gives_every_request_its_own_scores() -> None:
    """Prefill of one request against its own keys, and among others' keys at an offset: same scores, same selection."""
    own = problem(tokens=6, keys=50, seed=1)
    others = problem(tokens=6, keys=33, seed=2)
    packed = own | {name: torch.cat([others[name].float(), own[name].float()]) for name in ("k", "k_scale")}
    packed["k"] = packed["k"].to(E4M3)
    packed["row_starts"] = own["row_starts"] + 33
    packed["row_ends"] = own["row_ends"] + 33
    alone, among = mqa_logits(**own), mqa_logits(**packed)
    assert_bitwise_equal(among[:, 33:].contiguous(), alone)
    selected = [
        top_k_per_row_prefill(scores, rows["row_starts"], rows["row_ends"], 9)
        for scores, rows in ((alone, own), (among, packed))
    ]
    assert_bitwise_equal(*selected)


def test_nan_operands_give_nan_there_only_and_are_not_selected() -> None:
    inputs = problem(tokens=2, keys=5)
    clean = mqa_logits(**inputs)
    inputs["k"].view(torch.uint8)[3, 7] = 0xFF
    inputs["q"].view(torch.uint8)[1, 0, 0] = 0x7F
    expected = clean.clone()
    expected[:, 3] = math.nan
    expected[1] = math.nan
    got = mqa_logits(**inputs)
    assert_bitwise_equal(got, expected)
    assert top_k_per_row_prefill(got, inputs["row_starts"], inputs["row_ends"], 5).tolist() == [
        [0, 1, 2, 4, -1],
        [-1] * 5,
    ]


@pytest.mark.parametrize(("tokens", "heads", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_dimensions(tokens: int, heads: int, keys: int) -> None:
    assert_bitwise_equal(mqa_logits(**problem(tokens, heads, keys)), torch.zeros(tokens, keys))


def test_out_is_returned() -> None:
    inputs = problem()
    out = torch.full((7, 40), 5.0)
    assert mqa_logits(**inputs, out=out) is out
    assert_bitwise_equal(out, mqa_logits(**inputs))


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(7, 5, 128)},
        {"q": torch.zeros(7, 5, 64).to(E4M3)},
        {"k": torch.zeros(40, 127).to(E4M3)},
        {"k": torch.zeros(40, 128)},
        {"k_scale": torch.zeros(41)},
        {"k_scale": torch.zeros(40, dtype=torch.float64)},
        {"weights": torch.zeros(7, 4)},
        {"weights": torch.zeros(7, 5, dtype=torch.bfloat16)},
        {"row_starts": torch.zeros(7)},
        {"row_ends": torch.zeros(6, dtype=torch.int32)},
        {"row_ends": torch.zeros(7, dtype=torch.int32, device="meta")},
        {"out": torch.full((7, 41), 5.0)},
        {"out": torch.full((1, 40), 5.0).expand(7, 40)},
        {"out": torch.full((7, 40), 5.0, dtype=torch.float64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_bad_input_is_refused_and_nothing_is_written(change: dict[str, torch.Tensor]) -> None:
    inputs = problem() | {"out": torch.full((7, 40), 5.0)} | change
    with pytest.raises(ArgumentError, match=r"expected .* got"):
        mqa_logits(**inputs)
    assert bool((inputs["out"] == 5).all())
