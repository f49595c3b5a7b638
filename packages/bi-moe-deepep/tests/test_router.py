from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_moe_deepep import router_gate_logits, select_experts

ULP = 2.0**-23


def logits(num_tokens: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)) * 4


def scores(x: torch.Tensor) -> torch.Tensor:
    """Unbiased scores in the order of the experts, as the op has them."""
    num_experts = x.shape[1]
    table = torch.arange(num_experts)[None]
    token_ids = torch.zeros(len(x), dtype=torch.int64)
    return select_experts(x, top_k=num_experts, token_ids=token_ids, tid2eid=table, renormalize=False)[0]


def test_scores_are_sqrtsoftplus() -> None:
    x = torch.linspace(-80.0, 88.0, 65_537).view(1, -1)
    exact = torch.log1p(torch.exp(x.double())).sqrt()
    # exp 1 ulp, log1p 3, addition 1/2; the square root halves relative errors and adds 1/2.
    assert bool(((scores(x).double() - exact).abs() <= 2.75 * ULP * exact).all())


def test_scores_at_the_ends() -> None:
    x = torch.tensor([[torch.inf, -torch.inf, 0.0, -0.0, 3e38, -3e38, torch.nan, 1000.0]])
    have = scores(x)[0]
    assert have[0] == torch.inf
    assert have[1] == have[5] == 0.0
    assert have[2] == have[3]
    assert math.isclose(float(have[2]), math.sqrt(math.log(2.0)), rel_tol=3 * ULP)
    assert math.isclose(float(have[4]), math.sqrt(3e38), rel_tol=3 * ULP)
    assert have[6].isnan()
    assert math.isclose(float(have[7]), math.sqrt(1000.0), rel_tol=3 * ULP)


def by_sorting(biased: list[float], top_k: int) -> list[int]:
    def key(expert: int) -> tuple[bool, float, int]:
        nan = math.isnan(biased[expert])
        return (nan, 0.0 if nan else -biased[expert], expert)

    return sorted(range(len(biased)), key=key)[:top_k]


VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan, 1.0 + ULP, -200.0])


@settings(max_examples=60)
@given(st.data())
def test_ties_and_odd_values(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 12))
    top_k = data.draw(st.integers(1, num_experts))
    row = st.lists(VALUES, min_size=num_experts, max_size=num_experts)
    x = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=5)))
    bias = torch.tensor(data.draw(row))
    biased = scores(x) + bias
    _, ids = select_experts(x, top_k=top_k, bias=bias)
    assert ids.tolist() == [by_sorting(values, top_k) for values in biased.tolist()]


def test_ties_go_to_the_lower_expert_and_slots_descend() -> None:
    x = torch.tensor([[1.0, 3.0, 1.0, 3.0, 2.0, 1.0]])
    _, ids = select_experts(x, top_k=4)
    assert ids.tolist() == [[1, 3, 4, 0]]


def test_many_experts() -> None:
    x, bias = logits(64, 256), torch.randn(256, generator=torch.Generator().manual_seed(1))
    weights, ids = select_experts(x, top_k=6, bias=bias)
    assert ids.dtype == torch.int32
    biased = scores(x) + bias
    assert ids.tolist() == [by_sorting(values, 6) for values in biased.tolist()]
    assert weights.dtype == torch.float32


def test_weights_are_unbiased_scores_renormalised_in_slot_order() -> None:
    x, bias = logits(33, 16), torch.linspace(-3, 3, 16)
    weights, ids = select_experts(x, top_k=5, bias=bias, routed_scaling_factor=1.5)
    chosen = scores(x).gather(1, ids.long())
    total = (((chosen[:, 0] + chosen[:, 1]) + chosen[:, 2]) + chosen[:, 3]) + chosen[:, 4]
    assert_bitwise_equal(weights, chosen / (total[:, None] + 1e-20) * 1.5)
    plain, same = select_experts(x, top_k=5, bias=bias, renormalize=False, routed_scaling_factor=1.5)
    assert_bitwise_equal(same, ids)
    assert_bitwise_equal(plain, chosen * 1.5)


def test_all_scores_zero_gives_zero_weights() -> None:
    weights, ids = select_experts(torch.full((1, 4), -torch.inf), top_k=2)
    assert_bitwise_equal(weights, torch.zeros(1, 2))
    assert ids.tolist() == [[0, 1]]


def test_nan_is_chosen_last_and_stays_with_its_token() -> None:
    x = torch.tensor([[torch.nan, -torch.inf, torch.nan, 1.0], [4.0, 3.0, 2.0, 1.0]])
    weights, ids = select_experts(x, top_k=2)
    assert ids.tolist() == [[3, 1], [0, 1]]
    assert bool(torch.isfinite(weights).all())
    weights, ids = select_experts(x, top_k=4)
    assert ids.tolist() == [[3, 1, 0, 2], [0, 1, 2, 3]]
    assert weights[0].view(torch.int32).tolist() == [0x7FC00000] * 4
    assert bool(torch.isfinite(weights[1]).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash_layers(dtype: torch.dtype) -> None:
    table = torch.tensor([[3, 1], [0, 2], [2, 3]], dtype=dtype)
    token_ids = torch.tensor([2, 0, 2, 1], dtype=dtype)
    x = logits(4, 4)
    weights, ids = select_experts(x, top_k=2, token_ids=token_ids, tid2eid=table)
    assert ids.tolist() == [[2, 3], [3, 1], [2, 3], [0, 2]]
    chosen = scores(x).gather(1, ids.long())
    assert_bitwise_equal(weights, chosen / (chosen[:, :1] + chosen[:, 1:] + 1e-20))


def test_b59_logits_in_bfloat16_would_have_chosen_other_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 128, generator=generator).bfloat16()
    weight = (torch.randn(256, 128, generator=generator) * 128**-0.5).bfloat16()
    gate = router_gate_logits(x, weight)
    assert gate.dtype == torch.float32
    _, ids = select_experts(gate, top_k=6)
    _, rounded = select_experts(gate.bfloat16().float(), top_k=6)
    changed = (ids.sort(1).values != rounded.sort(1).values).any(1)
    assert int(changed.sum()) > 0
    with pytest.raises(ArgumentError, match=r"^logits: expected dtype float32, got bfloat16"):
        select_experts(gate.bfloat16(), top_k=6)


def test_gate_logits_lie_within_the_error_of_one_accumulation() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 256, generator=generator).bfloat16()
    weight = torch.randn(16, 256, generator=generator).bfloat16()
    exact = x.double() @ weight.double().mT
    bound = 256 * 2.0**-24 * (x.double().abs() @ weight.double().abs().mT)
    assert bool(((router_gate_logits(x, weight).double() - exact).abs() <= bound).all())
    out = torch.empty(7, 16)
    assert router_gate_logits(x, weight, out=out) is out


def test_empty() -> None:
    weights, ids = select_experts(torch.zeros(0, 4), top_k=2)
    assert weights.shape == ids.shape == (0, 2)
    none = torch.zeros(0, dtype=torch.int64)
    weights, ids = select_experts(torch.zeros(0, 4), top_k=2, token_ids=none, tid2eid=torch.zeros(3, 2).long())
    assert weights.shape == ids.shape == (0, 2)


TABLE, TOKENS = torch.tensor([[0, 1], [2, 3], [1, 9], [-1, 0]]), torch.tensor([0, 1, 0])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 5}, "top_k"),
        ({"bias": torch.zeros(3)}, "bias"),
        ({"bias": torch.zeros(4).bfloat16()}, "bias"),
        ({"token_ids": TOKENS}, "tid2eid"),
        ({"tid2eid": TABLE}, "tid2eid"),
        ({"bias": torch.zeros(4), "token_ids": TOKENS, "tid2eid": TABLE}, "bias"),
        ({"token_ids": TOKENS[:2], "tid2eid": TABLE}, "token_ids"),
        ({"token_ids": TOKENS.float(), "tid2eid": TABLE}, "token_ids"),
        ({"token_ids": TOKENS, "tid2eid": TABLE[:, :1]}, "tid2eid"),
        ({"token_ids": torch.tensor([0, 4, 0]), "tid2eid": TABLE}, "token_ids"),
        ({"token_ids": torch.tensor([0, -1, 0]), "tid2eid": TABLE}, "token_ids"),
        ({"token_ids": torch.tensor([0, 1, 2]), "tid2eid": TABLE}, "tid2eid"),
        ({"token_ids": torch.tensor([3, 1, 0]), "tid2eid": TABLE}, "tid2eid"),
        ({"out_weights": torch.zeros(3, 3)}, "out_weights"),
        ({"out_ids": torch.zeros(3, 2, dtype=torch.int64)}, "out_ids"),
    ],
)
def test_bad_input_writes_nothing(change: dict[str, object], name: str) -> None:
    out_weights, out_ids = torch.full((3, 2), 7.0), torch.full((3, 2), 77, dtype=torch.int32)
    arguments: dict[str, object] = {"top_k": 2, "out_weights": out_weights, "out_ids": out_ids} | change
    with pytest.raises(ArgumentError, match=f"^{name}: expected .* got "):
        select_experts(logits(3, 4), **arguments)  # type: ignore[arg-type]
    assert_bitwise_equal(out_weights, torch.full((3, 2), 7.0))
    assert_bitwise_equal(out_ids, torch.full((3, 2), 77, dtype=torch.int32))


def test_entries_of_the_table_that_no_token_uses_are_not_looked_at() -> None:
    _, ids = select_experts(logits(3, 4), top_k=2, token_ids=TOKENS, tid2eid=TABLE)
    assert ids.tolist() == [[0, 1], [2, 3], [0, 1]]
