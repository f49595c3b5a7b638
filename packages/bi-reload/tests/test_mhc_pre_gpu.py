"""The compiled mHC ops before a layer: rows that see nothing but themselves, within the derived bound. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, bit_view, must_detect
from bi_reload import MhcPre, MhcPreBroadcast, _ops, mhc_num_splits, mhc_post, mhc_pre, mhc_pre_broadcast
from bi_reload.reference import mhc_pre as reference

pytestmark = pytest.mark.gpu

HIDDEN = (2048, 4096, 7168)
TOKENS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 1000, 2048, 2049, 5000)
SETTINGS = {"rms_eps": 1e-6, "hc_eps": 1e-6, "norm_eps": 1e-6}

by_hidden = pytest.mark.parametrize("hidden", HIDDEN, ids=lambda h: f"H={h}")
by_form = pytest.mark.parametrize("form", ["streams", "broadcast"])

Form = tuple[Callable[..., Any], torch.Tensor]


@pytest.fixture
def problem(mhc_weights: Callable[..., Any]) -> Callable[..., Form]:
    """``(call, x)``: the op in one of its forms, with weights, on the GPU; ``call(x)`` gives a tuple."""

    def make(form: str, tokens: int, hidden: int, *, norm: bool = True, **settings: Any) -> Form:
        generator = torch.Generator("cuda").manual_seed(tokens + hidden)
        shape = (tokens, 4, hidden) if form == "streams" else (tokens, hidden)
        x = torch.randn(shape, device="cuda", generator=generator).bfloat16()
        weights = [t.cuda() for t in mhc_weights(4 * hidden if form == "streams" else hidden)]
        norm_weight = torch.randn(hidden, device="cuda", generator=generator).bfloat16() if norm else None
        op = mhc_pre if form == "streams" else mhc_pre_broadcast

        def call(rows: torch.Tensor, **more: Any) -> tuple[torch.Tensor, ...]:
            return op(rows, *weights, norm_weight=norm_weight, **(SETTINGS | settings | more))

        call.weights, call.norm_weight = weights, norm_weight  # type: ignore[attr-defined]
        return call, x

    return make


def assert_same(have: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], label: str = "") -> None:
    for number, (a, b) in enumerate(zip(have, want, strict=True)):
        if not torch.equal(bit_view(a), bit_view(b)):  # stays on the GPU
            assert_bitwise_equal(a, b, f"{label} output {number}")


@by_form
@by_hidden
def test_every_number_of_tokens_gives_the_same_bits(problem, form, hidden):
    call, x = problem(form, 5000, hidden)
    every = call(x)
    for tokens in TOKENS:
        for first in {0, 777 % (5001 - tokens), 5000 - tokens}:
            rows = slice(first, first + tokens)
            assert_same(call(x[rows]), tuple(t[rows] for t in every), f"T={tokens} from {first}")


@by_form
@by_hidden
def test_every_position_gives_the_same_bits(problem, form, hidden):
    for tokens in (17, 130):
        call, x = problem(form, tokens, hidden)
        want = call(x)
        for shift in range(1, tokens):
            have = call(x.roll(shift, 0))
            assert_same(have, tuple(t.roll(shift, 0) for t in want), f"T={tokens} shifted by {shift}")


@by_form
@by_hidden
@pytest.mark.parametrize("tokens", [33, 129, 257, 2049, 5000])
def test_permuted_tokens_give_permuted_bits(problem, form, hidden, tokens):
    call, x = problem(form, tokens, hidden)
    want = call(x)
    for seed in range(3):
        order = torch.randperm(tokens, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        assert_same(call(x[order]), tuple(t[order] for t in want))


@by_form
def test_batch_invariance_among_hostile_neighbours(problem, form):
    call, x = problem(form, 3, 2048)
    x[2].view(-1)[5] = torch.nan
    assert_batch_invariant(call, x, batch_sizes=(2, 16, 17, 33, 65, 129))


def upstream_num_splits(tokens: int, k: int, multiprocessors: int = 132) -> int:
    """vLLM's rule: as many pieces as fill the GPU at this batch size."""
    return max(min(multiprocessors // -(-tokens // 64), k // 64 // 4), 1)


def test_twin_split_by_tokens_is_detected(problem):
    call, x = problem("streams", 1, 4096, norm=False)
    fn = call.weights[0]

    def twin(residual: torch.Tensor) -> torch.Tensor:
        flat = residual.flatten(1).float()
        pieces = upstream_num_splits(len(flat), flat.shape[1])
        parts = zip(flat.tensor_split(pieces, 1), fn.tensor_split(pieces, 1), strict=True)
        return torch.stack([torch.stack([(a * w).sum(1) for w in b], 1) for a, b in parts]).sum(0)

    options: dict[str, Any] = {"positions": (64,), "neighbours": ("zero",)}
    must_detect(twin, x, batch_sizes=(129,), **options)
    assert_batch_invariant(call, x, batch_sizes=(129,), **options)


def test_twin_that_skips_the_rounding_up_to_16_tokens_is_detected(problem):
    call, residual = problem("streams", 3, 2048, norm=False)
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(3, 2048, device="cuda", generator=generator).bfloat16()
    post = torch.rand(3, 4, device="cuda", generator=generator) * 2
    comb = torch.softmax(torch.randn(3, 4, 4, device="cuda", generator=generator), -1)
    layer = (x, residual, post, comb)

    def explicit(*layer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        streams = mhc_post(*layer)
        return streams, *call(streams)

    def twin(x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        unrounded = post[:, :, None] * x[:, None].float()
        for j in range(4):
            unrounded = unrounded + comb[:, j, :, None] * residual[:, j, None].float()
        if len(x) > 16:
            unrounded = unrounded.bfloat16().float()
        return unrounded

    options: dict[str, Any] = {"batch_sizes": (15, 16, 17, 65), "neighbours": ("random",)}
    must_detect(twin, layer, **options)
    assert_batch_invariant(explicit, layer, **options)


def exact_sums(form: str, tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights of small integers: every sum of them is exact in float32, in any order."""
    k = 4 * hidden if form == "streams" else hidden
    generator = torch.Generator().manual_seed(k)
    x = torch.randint(-3, 4, (tokens, k), generator=generator).bfloat16()
    fn = torch.randint(-8, 9, (24, k), generator=generator).float()
    return x.view(tokens, 4, hidden) if form == "streams" else x, fn


@by_form
@pytest.mark.parametrize("hidden", [128, 192, 320, 1984, *HIDDEN], ids=lambda h: f"H={h}")
def test_equals_the_reference_where_the_projection_is_exact(mhc_weights, form, hidden):
    """Gates, Sinkhorn and mix repeat the reference bit for bit; only the projection's order of summation is free."""
    x, fn = exact_sums(form, 37, hidden)
    _, scale, base = mhc_weights(hidden)
    scale = scale * 0.2
    op = mhc_pre if form == "streams" else mhc_pre_broadcast
    for iters, post_mult in ((1, 1.0), (2, 2.0), (20, 2.0)):
        settings = {"norm_weight": None, "sinkhorn_iters": iters, "post_mult": post_mult, **SETTINGS}
        want = op(x, fn, scale, base, **settings)
        have = op(x.cuda(), fn.cuda(), scale.cuda(), base.cuda(), **settings)
        for field, value in have._asdict().items():
            assert_bitwise_equal(value.cpu(), getattr(want, field), field)


def test_gates_far_out_equal_the_reference(mhc_weights):
    """Saturated and underflowing gates: exp at both of its ends, subnormal results included."""
    x, fn = exact_sums("streams", 64, 128)
    base = torch.linspace(-110, 110, 24)
    for scale in (0.01, 3.0, 40.0):
        weights = (fn, torch.full((3,), scale), base)
        want = mhc_pre(x, *weights, norm_weight=None, **SETTINGS)
        have = mhc_pre(x.cuda(), *(t.cuda() for t in weights), norm_weight=None, **SETTINGS)
        for field, value in have._asdict().items():
            assert_bitwise_equal(value.cpu(), getattr(want, field), field)


def test_all_bits_of_a_weight_count():
    """One-hot rows: the product is one weight, of which the kernel multiplies three parts."""
    hidden = 128
    fn = torch.randn(24, 4 * hidden, generator=torch.Generator().manual_seed(0))
    x = torch.eye(4 * hidden).bfloat16().view(-1, 4, hidden)
    scale, base = torch.full((3,), 0.1), torch.zeros(24)
    want = mhc_pre(x, fn, scale, base, norm_weight=None, **SETTINGS)
    have = mhc_pre(x.cuda(), fn.cuda(), scale.cuda(), base.cuda(), norm_weight=None, **SETTINGS)
    for field, value in have._asdict().items():
        assert_bitwise_equal(value.cpu(), getattr(want, field), field)


@by_form
@by_hidden
def test_within_bound_of_float64(oracle: ModuleType, problem, form, hidden):
    for tokens, iters in ((5, 20), (70, 1), (2100, 20)):
        call, x = problem(form, tokens, hidden, norm=False, sinkhorn_iters=iters)
        result = call(x)
        flat = x.flatten(1)
        gates = oracle.gates(flat, *call.weights, iters, oracle.kernel_error(flat, call.weights[0]))
        streams = x if form == "streams" else result.residual
        oracle.check_gates(result, streams, gates)
    if form == "broadcast":
        assert_bitwise_equal(result.residual, x[:, None].repeat(1, 4, 1))


@by_form
@by_hidden
def test_norm_is_that_of_the_rounded_value(oracle: ModuleType, problem, form, hidden):
    call, x = problem(form, 300, hidden)
    op = mhc_pre if form == "streams" else mhc_pre_broadcast
    plain = op(x, *call.weights, norm_weight=None, **SETTINGS)
    fused = call(x)
    assert_same(fused[1:], plain[1:])
    # 16 in a thread, 5 in a warp, 31 among warps.
    oracle.check_norm(plain.layer_input, fused.layer_input, call.norm_weight, 52)


def test_bound_holds_where_sums_cancel_and_for_wide_ranges(oracle: ModuleType, mhc_weights):
    fn, scale, base = (t.cuda() for t in mhc_weights(8192))
    x = torch.randn(40, 4, 2048, device="cuda").bfloat16()
    fn[:, 4096:], x[:, 2:] = -fn[:, :4096], x[:, :2]
    wide = (x * 2.0 ** torch.randint(-40, 20, x.shape, device="cuda")).bfloat16()
    for rows in (x, wide):
        flat = rows.flatten(1)
        result = mhc_pre(rows, fn, scale, base, norm_weight=None, **SETTINGS)
        gates = oracle.gates(flat, fn, scale, base, 20, oracle.kernel_error(flat, fn))
        oracle.check_gates(result, rows, gates)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("tokens", [5, 40, 3000])
def test_non_finite_tokens_stay_alone(problem, poison, tokens):
    call, x = problem("streams", tokens, 2048)
    clean = call(x)
    x[2, 1, 7], x[2, 3, 9], x[4, 0, 0] = poison, -poison, poison
    have = call(x)
    keep = torch.tensor([i for i in range(tokens) if i not in (2, 4)], device="cuda")
    assert_same(tuple(t[keep] for t in have), tuple(t[keep] for t in clean))
    for row in (2, 4):
        assert (bit_view(have.layer_input[row]) == 0x7FC0).all()
        assert (bit_view(have.post_mix[row]) == 0x7FC00000).all()
        assert (bit_view(have.comb_mix[row]) == 0x7FC00000).all()


@by_form
@pytest.mark.parametrize("tokens", [1, 19, 300])
def test_writes_to_the_callers_buffers_and_nothing_else(problem, form, tokens):
    call, x = problem(form, tokens, 2048)
    want = call(x)
    memory = [torch.full((t.numel() + 64,), 7.0, dtype=t.dtype, device="cuda") for t in want]
    views = [m[32:-32].view(t.shape) for m, t in zip(memory, want, strict=True)]
    before = [t.clone() for t in (x, *call.weights, call.norm_weight)]
    have = call(x, out=(MhcPre if form == "streams" else MhcPreBroadcast)(*views))
    assert all(a is b for a, b in zip(have, views, strict=True))
    assert_same(have, want)
    for m in memory:
        assert (m[:32] == 7.0).all()
        assert (m[-32:] == 7.0).all()
    assert_same(tuple(before), (x, *call.weights, call.norm_weight))


@by_form
def test_every_call_gives_the_same_bits_and_graphs_replay(problem, form):
    for tokens in (1, 33, 2049):
        call, x = problem(form, tokens, 2048)
        out = call(x)
        for _ in range(20):
            assert_same(call(x), out)
        buffers = type(out)(*(torch.empty_like(t) for t in out))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(x, out=buffers)
        for seed in (1, 2):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            for buffer in buffers:
                buffer.fill_(torch.nan)
            graph.replay()
            assert_same(buffers, call(x))


def test_a_chain_of_layers_equals_one_op_at_a_time(problem, mhc_weights):
    """Kernels start while their predecessors end; none may read what is still being written."""
    for tokens in (1, 16, 200, 3000):
        call, streams = problem("streams", tokens, 4096)

        def chain(streams: torch.Tensor, wait: Callable[[], None], call: Any = call) -> list[torch.Tensor]:
            results = []
            for _ in range(12):
                layer_input, post, comb = call(streams)
                wait()
                streams = mhc_post(layer_input, streams, post, comb)
                wait()
                results += [layer_input, post, comb, streams]
            return results

        slow = chain(streams, torch.cuda.synchronize)
        for _ in range(3):
            assert_same(tuple(chain(streams, lambda: None)), tuple(slow))
        static = streams.clone()
        other = torch.cuda.Stream()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # A copy and a join of two streams are predecessors too.
            static.copy_(streams)
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                scaled = static * 1.0
            torch.cuda.current_stream().wait_stream(other)
            captured = chain(scaled, lambda: None)
        for _ in range(3):
            for t in captured:
                t.fill_(torch.nan)
            graph.replay()
            assert_same(tuple(captured), tuple(slow))


def test_no_tokens(problem):
    for form in ("streams", "broadcast"):
        call, x = problem(form, 1, 2048)
        assert [len(t) for t in call(x[:0])] == [0] * (3 if form == "streams" else 4)
    torch.cuda.synchronize()


def test_opcheck(problem):
    call, x = problem("streams", 8, 2048)
    fixed = (*call.weights, call.norm_weight, 1e-6, 1e-6, 1e-6, 20, 2.0)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(_ops.mhc_pre, (x, *fixed, *(torch.empty_like(t) for t in call(x))), test_utils=tests)
    call, x = problem("broadcast", 8, 2048)
    fixed = (*call.weights, call.norm_weight, 1e-6, 1e-6, 1e-6, 20, 2.0)
    out = (torch.empty_like(t) for t in call(x))
    torch.library.opcheck(_ops.mhc_pre_broadcast, (x, *fixed, *out), test_utils=tests)


def test_the_op_refuses_what_its_kernel_cannot_do(problem):
    call, x = problem("streams", 3, 2048)
    out = [torch.full_like(t, 3.0) for t in call(x)]
    fixed = (None, 1e-6, 1e-6, 1e-6, 20, 2.0)
    fn, scale, base = call.weights
    odd = torch.zeros(x.numel() + 1, device="cuda").bfloat16()[1:].view_as(x)
    shared = torch.zeros(80, device="cuda")
    cases = {
        "residual: expected memory that starts at a multiple of 16": ((odd, fn, scale, base, *fixed, *out)),
        "fn: expected size 8192": ((x, fn[:, :4096].contiguous(), scale, base, *fixed, *out)),
        "scale: expected device": ((x, fn, scale.cpu(), base, *fixed, *out)),
        "memory apart from residual": ((x, fn, scale, base, *fixed, x.view(-1, 2048)[:3], *out[1:])),
        "memory apart from post_mix": (
            (x, fn, scale, base, *fixed, out[0], shared[:12].view(3, 4), shared[8:56].view(3, 4, 4))
        ),
        "sinkhorn_iters": ((x, fn, scale, base, None, 1e-6, 1e-6, 1e-6, 0, 2.0, *out)),
    }
    for match, arguments in cases.items():
        with pytest.raises(RuntimeError, match=match):
            _ops.mhc_pre(*arguments)
    assert all((t == 3.0).all() for t in out)


def test_split_is_the_reference_s(mhc_weights):
    """A sum whose order shows: neighbours on both sides of a border, each of which is lost unless they meet."""
    k = 4 * 2048
    width = k // mhc_num_splits(k)
    fn = torch.zeros(24, k)
    fn[:, 0], fn[:, 2 * width - 1], fn[:, 2 * width] = 2.0**24, 1.0, 1.0
    x = torch.ones(2, 4, 2048).bfloat16()
    projection, squares = reference.prenorm_projection(x.flatten(1), fn, mhc_num_splits(k))
    assert projection[0, 0].item() == 2.0**24
    scale, base = torch.ones(3), -(projection[0] * reference.reciprocal_rms(squares, k, 1e-6)[0])  # logits of 0, not 2
    want = mhc_pre(x, fn, scale, base, norm_weight=None, **SETTINGS)
    have = mhc_pre(x.cuda(), fn.cuda(), scale.cuda(), base.cuda(), norm_weight=None, **SETTINGS)
    for field, value in have._asdict().items():
        assert_bitwise_equal(value.cpu(), getattr(want, field), field)
