"""Sparse MLA: derived bound against float64, what may not show in the bits, and what must."""

from __future__ import annotations

import math

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.reference.numerics import exp, mm_rn
from bi_kernels.testing import assert_bitwise_equal, first_difference, num_threads
from bi_sparse_attn import SparseMlaOutput, sparse_mla_fwd
from bi_sparse_attn.reference import sparse_mla as reference

SCALE = 512**-0.5


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def lists(lengths: list[int], rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Ascending random rows, -1 at the end."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for token, length in enumerate(lengths):
        indices[token, :length] = torch.randperm(rows, generator=generator)[:length].sort().values.int()
    return indices


def assert_same(actual: SparseMlaOutput, expected: SparseMlaOutput, label: str = "") -> None:
    for name in SparseMlaOutput._fields:
        assert_bitwise_equal(getattr(actual, name), getattr(expected, name), f"{label} {name}")


def float64_attention(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float, sink: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """``(out, max, lse, sum of w |v| / denominator, greatest |score|)`` in float64."""
    valid = (indices >= 0).unsqueeze(1)
    rows = kv.double()[indices.clamp(min=0).long()]
    scores = torch.einsum("thd,tad->tha", q.double(), rows) * float(torch.tensor(scale, dtype=torch.float32))
    scores = torch.where(valid, scores, -math.inf)
    top = scores.amax(-1)
    weights = torch.exp(scores - top.unsqueeze(-1))
    lse = top + torch.log(weights.sum(-1))
    denominator = weights.sum(-1) if sink is None else weights.sum(-1) + torch.exp(sink.double() - top)
    out = torch.einsum("tha,tad->thd", weights, rows) / denominator.unsqueeze(-1)
    spread = torch.einsum("tha,tad->thd", weights, rows.abs()) / denominator.unsqueeze(-1)
    return out, top, lse, spread, torch.where(valid, scores.abs(), 0.0).amax(-1)


@pytest.mark.parametrize("sink", [None, torch.tensor([0.0, -math.inf, 3.0, 20.0])], ids=["no sink", "sink"])
@pytest.mark.parametrize("magnitude", [1.0, 8.0])
def test_within_the_bound_of_float64(magnitude: float, sink: torch.Tensor | None) -> None:
    """The bound, with u = 2**-24 for float32 and 2**-8 for bfloat16, S the greatest |score|, B the number of blocks.

    A score is rounded twice: 2 u S in absolute terms, and as much in the maximum: 4 u S relative in a weight.
    ``s - m`` is rounded once, at most u 2 S; so is each of the alphas' arguments, which together also move by at most
    2 S, hence 4 u S more. exp, its rounding and the rounding of the sums add u each: at most 4 per block and 16 once.
    The same holds for the denominator, whose sink term also has |sink - m| u. P's rounding adds 2**-8 to the
    numerator, relative to the sum of w |v|, and the result's rounding 2**-8 relative to itself.
    """
    lengths = [1, 63, 64, 65, 190, 256]
    q, kv = (randn(6, 4, 512, seed=1).float() * magnitude).bfloat16(), randn(500, 512, seed=2)
    indices = lists(lengths, 500, 256)
    got = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE, attn_sink=sink)
    out, top, lse, spread, greatest = float64_attention(q, kv, indices, SCALE, sink)
    unit, blocks = 2.0**-24, 4
    far = torch.zeros(4) if sink is None else torch.where(torch.isinf(sink), 0.0, sink)
    relative = unit * (8 * greatest + 4 * blocks + 16 + (far - top).abs())
    bound = 1.01 * ((2.0**-8 + 2 * relative).unsqueeze(-1) * spread + 2.0**-8 * out.abs())
    error = (got.out.double() - out).abs()
    assert bool((error <= bound).all())
    assert float((error / bound).max()) > 0.05, "a bound that nothing comes near says nothing"
    assert bool(((got.max_logits - top).abs() <= 1.01 * 2 * unit * greatest).all())
    assert bool(((got.lse - lse).abs() <= 1.01 * (relative + 4 * unit * (lse.abs() + 1))).all())


def test_one_entry_is_returned_as_it_is() -> None:
    q, kv = randn(1, 2, 512), randn(9, 512, seed=1)
    got = sparse_mla_fwd(q, kv, lists([1], 9, 128), sm_scale=SCALE)
    index = int(lists([1], 9, 128)[0, 0])
    assert_bitwise_equal(got.out, kv[index].expand(1, 2, 512).contiguous())
    assert_bitwise_equal(got.lse, got.max_logits)


def test_a_sink_scales_the_output_only() -> None:
    q, kv, indices = randn(3, 4, 512), randn(200, 512, seed=1), lists([150, 3, 64], 200, 256)
    plain = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE)
    none = torch.full((4,), -math.inf)
    assert_same(sparse_mla_fwd(q, kv, indices, sm_scale=SCALE, attn_sink=none), plain, "-inf is no sink")
    mixed = torch.tensor([-math.inf, 0.0, 5.0, 300.0])
    got = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE, attn_sink=mixed)
    assert_bitwise_equal(got.lse, plain.lse)
    assert_bitwise_equal(got.max_logits, plain.max_logits)
    assert_bitwise_equal(got.out[:, 0], plain.out[:, 0])
    assert bool((got.out[:, 2].abs() < plain.out[:, 2].abs()).float().mean() > 0.9)
    assert bool((got.out[:, 3] == 0).all())


def test_tokens_without_a_valid_entry() -> None:
    q, kv = randn(4, 2, 512), randn(50, 512, seed=1)
    indices = lists([0, 20, 20, 20], 50, 128)
    indices[3, :20] = torch.tensor([50, 2**31 - 1, -7, -1] * 5, dtype=torch.int32)
    lengths = torch.tensor([5, 0, 20, 128], dtype=torch.int32)
    for sink in (None, torch.tensor([1.0, -math.inf])):
        got = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE, topk_length=lengths, attn_sink=sink)
        for token in (0, 1, 3):
            assert_bitwise_equal(got.out[token], torch.zeros(2, 512, dtype=torch.bfloat16))
            assert got.lse[token].tolist() == [math.inf] * 2
            assert got.max_logits[token].tolist() == [-math.inf] * 2
        assert bool(torch.isfinite(got.lse[2]).all())


def test_no_rows_and_no_tokens() -> None:
    got = sparse_mla_fwd(randn(2, 3, 512), randn(0, 512), lists([0, 0], 1, 128), sm_scale=SCALE)
    assert_bitwise_equal(got.out, torch.zeros(2, 3, 512, dtype=torch.bfloat16))
    got = sparse_mla_fwd(randn(0, 3, 512), randn(5, 512), lists([], 1, 128), sm_scale=SCALE)
    assert [tuple(t.shape) for t in got] == [(0, 3, 512), (0, 3), (0, 3)]
    got = sparse_mla_fwd(randn(2, 3, 512), randn(5, 512), lists([0, 0], 1, 0), sm_scale=SCALE)
    assert got.lse.tolist() == [[math.inf] * 3] * 2


def test_topk_length_cuts_as_minus_one_does() -> None:
    q, kv = randn(3, 2, 512), randn(300, 512, seed=1)
    full = lists([256, 256, 256], 300, 256)
    lengths = torch.tensor([70, 128, 500], dtype=torch.int32)
    cut = torch.where(torch.arange(256) < lengths.unsqueeze(1), full, -1)
    assert_same(
        sparse_mla_fwd(q, kv, full, sm_scale=SCALE, topk_length=lengths), sparse_mla_fwd(q, kv, cut, sm_scale=SCALE)
    )


def test_padded_width_does_not_matter() -> None:
    q, kv, indices = randn(3, 2, 512), randn(300, 512, seed=1), lists([128, 70, 0], 300, 128)
    expected = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE)
    for width in (256, 640, 1408):
        wide = torch.nn.functional.pad(indices, (0, width - 128), value=-1)
        assert_same(sparse_mla_fwd(q, kv, wide, sm_scale=SCALE), expected, f"width={width}")


def test_addresses_do_not_matter() -> None:
    """The same ordered rows at other places in a larger workspace, next to rows of NaN that nobody lists."""
    q, kv, indices = randn(5, 2, 512), randn(200, 512, seed=1), lists([150, 1, 64, 65, 128], 200, 256)
    expected = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE)
    place = torch.randperm(1000, generator=torch.Generator().manual_seed(2))[:200]
    workspace = torch.full((1000, 512), math.nan, dtype=torch.bfloat16)
    workspace[place] = kv
    moved = torch.where(indices >= 0, place[indices.clamp(min=0).long()].int(), -1)
    assert_same(sparse_mla_fwd(q, workspace, moved, sm_scale=SCALE), expected, "scattered")
    compact = torch.full((5 * 256, 512), math.inf, dtype=torch.bfloat16)
    own = torch.arange(5 * 256, dtype=torch.int32).view(5, 256)
    compact[own[indices >= 0].long()] = kv[indices[indices >= 0].long()]
    decode = sparse_mla_fwd(q, compact, torch.where(indices >= 0, own, -1), sm_scale=SCALE)
    assert_same(decode, expected, "B45: every token's own compact rows, as in decode")


def test_order_of_the_list_does_matter() -> None:
    """Teeth: were the list summed in another order, the tests above would not pass by luck."""
    q, kv, indices = randn(4, 4, 512), randn(300, 512, seed=1), lists([256] * 4, 300, 256)
    forward = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE).out
    backward = sparse_mla_fwd(q, kv, indices.flip(1).contiguous(), sm_scale=SCALE).out
    difference = first_difference(backward, forward)
    assert difference is not None
    assert difference.count > 10


def test_entries_repeat_and_holes_are_skipped_in_place() -> None:
    q, kv = randn(40, 2, 512), randn(30, 512, seed=1)
    indices = lists([30] * 40, 30, 128)
    indices[:, 40:45] = 7
    indices[1, 3] = -1
    got = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE)
    out, _, lse, _, _ = float64_attention(q, kv, indices, SCALE, None)
    assert float((got.lse - lse).abs().max()) < 2.0**-18
    assert float((got.out - out).abs().max()) < 2.0**-6


def routes(monkeypatch: pytest.MonkeyPatch, *arguments: torch.Tensor, **options: object) -> list[SparseMlaOutput]:
    """The op with its rows laid out as it likes, then always shared by tokens, then never."""
    results = [reference.sparse_mla_fwd(*arguments, sm_scale=SCALE, **options)]  # type: ignore[arg-type]
    for factor in (0, 2**62):
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_SHARING", factor)
            results.append(reference.sparse_mla_fwd(*arguments, sm_scale=SCALE, **options))  # type: ignore[arg-type]
    return results


def test_layout_of_the_rows_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [256, 3, 0, 100, 64, 129, *[200] * 34]
    q, kv, indices = randn(40, 4, 512), randn(90, 512, seed=1), lists(lengths, 256, 256)
    indices = torch.where(indices >= 0, indices % 95, -1)  # repeats, and some rows that do not exist
    q[3] *= 40  # one entry takes all the weight: P far below bfloat16's normal range
    kv[:30, :300] *= 2.0**-12
    free, shared, own = routes(monkeypatch, q, kv, indices, attn_sink=torch.randn(4))
    assert_same(shared, free, "shared")
    assert_same(own, free, "own")
    kv[17, 5] = math.inf
    kv[18] = math.nan
    free, shared, own = routes(monkeypatch, q, kv, indices)
    assert_same(shared, free, "shared, not finite")
    assert_same(own, free, "own, not finite")


def test_what_is_not_finite_stays_with_the_tokens_that_list_it() -> None:
    q, kv, indices = randn(30, 2, 512), randn(64, 512, seed=1), lists([20] * 30, 60, 128)
    expected = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE)
    kv[60] = math.nan
    kv[61] = math.inf
    indices[4, 20], indices[9, 20] = 60, 61
    q[11] = math.nan
    got = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE)
    clean = [t for t in range(30) if t not in (4, 9, 11)]
    assert_same(SparseMlaOutput(*(x[clean] for x in got)), SparseMlaOutput(*(x[clean] for x in expected)))
    nan = torch.full((2, 512), math.nan, dtype=torch.bfloat16)
    for token in (4, 9, 11):
        assert_bitwise_equal(got.out[token], nan, f"token {token}")
        assert bool(torch.isnan(got.lse[token]).all())


def test_tiles_and_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv, indices = randn(37, 2, 512), randn(100, 512, seed=1), lists([90] * 37, 100, 128)
    expected = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE)
    for tile, threads in ((1, 1), (5, 2), (36, 1), (128, 1)):
        monkeypatch.setattr(reference, "_SHARED_TILE", tile)
        monkeypatch.setattr(reference, "_OWN_ENTRIES", tile * 100)
        with num_threads(threads):
            assert_same(sparse_mla_fwd(q, kv, indices, sm_scale=SCALE), expected, f"tile={tile} threads={threads}")


@pytest.mark.parametrize("k", [1, 3, 64, 512])
def test_the_cheap_product_equals_the_correctly_rounded_one(k: int) -> None:
    """Random, tied, cancelling, tiny and huge operands; a float32 left side as the shared layout has it."""
    generator = torch.Generator().manual_seed(k)
    spread = torch.exp2(torch.randint(-40, 20, (24, k), generator=generator).double())
    cases = [
        (randn(24, k, seed=k), randn(30, k, seed=k + 1)),
        (torch.randint(-3, 4, (24, k), generator=generator).bfloat16(), randn(30, k, seed=2)),
        ((randn(24, k, seed=3).double() * spread).bfloat16(), randn(30, k, seed=4)),
        ((randn(24, k, seed=5).double() * 2.0**-130).bfloat16(), randn(30, k, seed=6) * 2.0**-20),
        ((randn(24, k, seed=7).double() * 2.0**100).bfloat16(), (randn(30, k, seed=8).double() * 2.0**26).bfloat16()),
    ]
    a, b = randn(24, k, seed=9), randn(30, k, seed=10)
    a[:, k // 2 :], b[:, k // 2 :] = a[:, : k - k // 2].clone(), -b[:, : k - k // 2].clone()
    cases.append((a, b))
    for number, (a, b) in enumerate(cases):
        expected = mm_rn(a, b)
        of_a, of_b = reference._Extent.of(a), reference._Extent.of(b)
        assert_bitwise_equal(reference._mm_rn(a, of_a, b, b.double(), of_b), expected, f"case {number}")
        wide = reference._mm_rn(a.float(), of_a, b, b.double(), of_b.over_rows())
        assert_bitwise_equal(wide, expected, f"case {number}, float32")
        column = reference._mm_rn(b, of_b, a, a.double(), of_a)
        assert_bitwise_equal(column, expected.mT.contiguous(), f"case {number}, the other way")


def test_grain_divides_every_element() -> None:
    x = (randn(50, 40).double() * torch.exp2(torch.arange(50.0) * 5 - 130).double().unsqueeze(1)).bfloat16()
    x[:, 3] = 0
    x[7] = 0
    grain = reference._Extent.of(x).grain
    multiple = x.double() / grain.unsqueeze(1)
    assert bool((multiple == multiple.round()).all())
    smallest = torch.where(x == 0, math.inf, x.double().abs()).amin(1) / grain
    normal = torch.where(x == 0, math.inf, x.double().abs()).amin(1) >= 2.0**-126
    assert bool((smallest < 256)[normal & torch.isfinite(smallest)].all()), "no finer than needed"


def test_out_is_returned_and_its_storage_kept() -> None:
    q, kv, indices = randn(3, 2, 512), randn(30, 512, seed=1), lists([30, 2, 0], 30, 128)
    memory = torch.full((3, 4, 512), 9.0, dtype=torch.bfloat16)
    out = memory[:, 1:3]
    got = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE, out=out)
    assert got.out is out
    assert_bitwise_equal(out.contiguous(), sparse_mla_fwd(q, kv, indices, sm_scale=SCALE).out)
    assert bool((memory[:, [0, 3]] == 9).all())


def test_b46_identical_requests_get_identical_results() -> None:
    q, kv, indices = randn(1, 2, 512), randn(300, 512, seed=1), lists([200], 300, 256)
    one = sparse_mla_fwd(q, kv, indices, sm_scale=SCALE)
    eight = sparse_mla_fwd(q.repeat(8, 1, 1), kv, indices.repeat(8, 1), sm_scale=SCALE)
    for token in range(8):
        assert_same(SparseMlaOutput(*(x[token : token + 1] for x in eight)), one, f"request {token}")


def test_the_denominator_uses_p_before_its_rounding() -> None:
    """Two entries, the second with p = exp(-1): the rule, in numbers."""
    kv = torch.zeros(2, 512, dtype=torch.bfloat16)
    kv[0, 0], kv[1, 1] = 1.0, 1.0
    q = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    q[0, 0, 0] = 1.0
    got = sparse_mla_fwd(q, kv, lists([2], 2, 128), sm_scale=1.0)
    p = exp(torch.tensor([-1.0]))
    rounded = p.bfloat16().float()
    assert float(rounded) != float(p)
    assert got.out[0, 0, :2].tolist() == [
        float((1.0 / (1.0 + p)).bfloat16()),
        float((rounded / (1.0 + p)).bfloat16()),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(2, 3, 512)},
        {"q": randn(2, 3, 256)},
        {"q": randn(2, 512)},
        {"q": randn(2, 512, 512).transpose(1, 2)[:, :3]},
        {"kv": torch.zeros(9, 512)},
        {"kv": randn(9, 1, 512)},
        {"kv": randn(512, 9).T},
        {"kv": torch.zeros(9, 512, dtype=torch.bfloat16, device="meta")},
        {"indices": torch.zeros(2, 128, dtype=torch.int64)},
        {"indices": torch.zeros(3, 128, dtype=torch.int32)},
        {"indices": torch.zeros(2, 64, dtype=torch.int32)},
        {"attn_sink": torch.zeros(4)},
        {"attn_sink": torch.zeros(3, dtype=torch.bfloat16)},
        {"topk_length": torch.zeros(2, dtype=torch.int64)},
        {"topk_length": torch.zeros(3, dtype=torch.int32)},
        {"out": torch.full((2, 3, 512), 9.0)},
        {"out": torch.full((1, 3, 512), 9.0, dtype=torch.bfloat16).expand(2, 3, 512)},
        {"out": torch.full((2, 4, 512), 9.0, dtype=torch.bfloat16)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_bad_input_is_refused_and_nothing_is_written(change: dict[str, torch.Tensor]) -> None:
    arguments = {
        "q": randn(2, 3, 512),
        "kv": randn(9, 512),
        "indices": lists([3, 2], 9, 128),
        "out": torch.full((2, 3, 512), 9.0, dtype=torch.bfloat16),
    } | change
    with pytest.raises(ArgumentError, match=r"expected .* got"):
        sparse_mla_fwd(**arguments, sm_scale=SCALE)  # type: ignore[arg-type]
    assert bool((arguments["out"] == 9).all())
