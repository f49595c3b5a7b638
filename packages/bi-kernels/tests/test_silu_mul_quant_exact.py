"""The compiled kernel equals the reference bit for bit. Needs a GPU.

The reference runs on CUDA tensors here, so that 10**8 values take seconds; the first test shows that its bits there are
those of the CPU.
"""

from __future__ import annotations

import pytest
import torch

from bi_kernels import Arch, ArgumentError, ScaleFormat, detect_arch, fused_silu_mul_per_token_group_quant
from bi_kernels._ops import fused_silu_mul_per_token_group_quant as op
from bi_kernels.reference import silu_mul_quant as reference
from bi_kernels.scale_format import allocate_scales
from bi_kernels.testing import assert_batch_invariant, assert_bitwise_equal, bit_view, few_multiprocessors

pytestmark = pytest.mark.gpu

FORMATS = list(ScaleFormat)
LIMITS = [None, 10.0, 7.013]  # the last is no bfloat16
by_format = pytest.mark.parametrize("scale_format", FORMATS, ids=lambda f: f.name)
by_limit = pytest.mark.parametrize("limit", LIMITS, ids=lambda v: f"limit={v}")


@pytest.fixture(scope="module")
def arch():
    return detect_arch(torch.device("cuda"))


def outputs(x, scale_format, fill=0xAB):
    """Outputs whose every byte is known, so that a byte that should not be written shows."""
    *tokens, width = x.shape
    q = torch.full((*tokens, width // 2), fill, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn)
    s = allocate_scales(tuple(tokens), width // 256, scale_format, device=x.device)
    s.fill_(-1431655766)
    return q, s


def native(x, scale_format, limit, masked_m=None, m_indices=None):
    q, s = outputs(x, scale_format)
    fused_silu_mul_per_token_group_quant(
        x,
        masked_m=masked_m,
        m_indices=m_indices,
        clamp_limit=limit,
        scale_format=scale_format,
        out_q=q,
        out_s=s,
    )
    return q, s


def expected(x, scale_format, limit, arch, masked_m=None, m_indices=None):
    q, s = outputs(x, scale_format)
    reference.fused_silu_mul_per_token_group_quant(
        x,
        masked_m=masked_m,
        m_indices=m_indices,
        clamp_limit=limit,
        scale_format=scale_format,
        arch=arch,
        out_q=q,
        out_s=s,
    )
    return q, s


def check(x, scale_format, limit, arch, masked_m=None, m_indices=None, label=""):
    got = native(x, scale_format, limit, masked_m, m_indices)
    want = expected(x, scale_format, limit, arch, masked_m, m_indices)
    assert_bitwise_equal(got[0], want[0], f"codes {label}")
    assert_bitwise_equal(got[1], want[1], f"scales {label}")


def every_bf16():
    return torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)


def gate_and_up(gate, up):
    """Rows of 128 outputs from flat values, the rest of the last row zero."""
    rows = -(-gate.numel() // 128)
    halves = torch.zeros((2, rows * 128), dtype=torch.bfloat16, device="cuda")
    for half, values in zip(halves, (gate, up), strict=True):
        half[: values.numel()] = values.to(torch.bfloat16)
    return halves.view(2, rows, 128).transpose(0, 1).reshape(rows, 256)


def random_rows(rows, intermediate, scale=1.0):
    return (torch.randn(rows, 2 * intermediate, device="cuda") * scale).bfloat16()


@by_format
@by_limit
def test_reference_has_the_same_bits_on_both_devices(scale_format, limit):
    values = every_bf16()
    x = gate_and_up(values, values.flip(0))
    for arch in Arch:
        for got, want in zip(
            expected(x, scale_format, limit, arch), expected(x.cpu(), scale_format, limit, arch), strict=True
        ):
            assert_bitwise_equal(got.cpu(), want, arch.name)


@by_format
@by_limit
def test_every_gate(arch, scale_format, limit):
    values = every_bf16()
    for up in (1.0, -1.0, 0.0, -0.0, 0.333984375, 2.0**-130, 3e38, torch.inf, torch.nan):
        check(gate_and_up(values, torch.full_like(values, up)), scale_format, limit, arch, label=f"up={up}")


@by_format
@by_limit
def test_every_up(arch, scale_format, limit):
    values = every_bf16()
    for gate in (32.0, -0.0, 0.5, -86.0, -86.5, -90.0, 2.0**-120, -torch.inf, torch.inf, torch.nan):
        check(gate_and_up(torch.full_like(values, gate), values), scale_format, limit, arch, label=f"gate={gate}")


@by_format
def test_every_tie_of_e4m3(arch, scale_format):
    # SiLU(32) is 32, so up is the quotient itself once 448 pins the scale to 32: 8.5, 17, 168 and all other ties.
    up = every_bf16()
    up = up[up.abs() <= 448]
    up = torch.cat([torch.cat([part, part.new_full((128 - len(part),), 448.0)]) for part in up.split(127)])
    check(gate_and_up(torch.full_like(up, 32.0), up), scale_format, None, arch)


@by_format
def test_every_amax(arch, scale_format):
    # One group per value: the value as the largest, and 127 fractions of it.
    amax = every_bf16()[:0x7F80]
    up = (amax.float().unsqueeze(-1) * torch.linspace(1, -1, 128, device="cuda")).bfloat16()
    check(torch.cat([torch.full_like(up, 32.0), up], -1), scale_format, None, arch)


@by_format
@by_limit
def test_random_pairs_of_all_bit_patterns(arch, scale_format, limit):
    for intermediate in (128, 2048, 7168):
        bits = torch.randint(-(1 << 15), 1 << 15, (4096, 2 * intermediate), device="cuda")
        x = bits.to(torch.int16).view(torch.bfloat16)
        check(x, scale_format, limit, arch, label="any")  # nearly all groups hold a NaN
        check(torch.where(torch.isfinite(x), x, 1.0), scale_format, limit, arch, label="finite")


@by_format
@by_limit
@pytest.mark.parametrize("intermediate", [128, 384, 640, 1536, 2048, 4224, 7168], ids=lambda v: f"I={v}")
def test_random(arch, scale_format, limit, intermediate):
    for scale in (0.02, 1.0, 12.0, 200.0):
        check(
            random_rows((1 << 21) // intermediate + 3, intermediate, scale), scale_format, limit, arch, label=str(scale)
        )


def test_a_hundred_million_values(arch):
    for scale in (0.5, 3.0):
        check(random_rows(24576, 2048, scale), ScaleFormat.FLOAT32_CEIL_UE8M0, 10.0, arch)


@by_format
@by_limit
def test_masked_equals_contiguous_and_touches_nothing_else(arch, scale_format, limit):
    counts = [0, 1, 200, 199, 7, 128]
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
    x = random_rows(len(counts) * 200, 1536, 4.0).view(len(counts), 200, 3072)
    for expert, count in enumerate(counts):
        x[expert, count:] = torch.nan  # reading these would show
    check(x, scale_format, limit, arch, masked_m)
    q, s = native(x, scale_format, limit, masked_m)
    untouched = outputs(x, scale_format)
    for expert, count in enumerate(counts):
        alone = native(x[expert, :count], scale_format, limit)
        for got, rows, blank in zip((q, s), alone, untouched, strict=True):
            assert_bitwise_equal(got[expert, :count].contiguous(), rows.contiguous(), f"expert {expert}")
            assert_bitwise_equal(
                got[expert, count:].contiguous(), blank[expert, count:].contiguous(), f"expert {expert}"
            )


@by_format
@by_limit
@pytest.mark.parametrize("intermediate", [640, 2048, 7168], ids=lambda v: f"I={v}")
def test_nobodys_rows_are_neither_read_nor_written(arch, scale_format, limit, intermediate):
    x = random_rows(1000, intermediate, 4.0)
    m_indices = torch.randint(-3, 4, (1000,), dtype=torch.int32, device="cuda")
    x[m_indices < 0] = torch.nan  # reading these would show
    check(x, scale_format, limit, arch, m_indices=m_indices)
    rows = native(x[m_indices >= 0], scale_format, limit)
    for got, want in zip(native(x, scale_format, limit, m_indices=m_indices), rows, strict=True):
        assert_bitwise_equal(bit_view(got)[m_indices >= 0], bit_view(want).contiguous())
    check(x, scale_format, limit, arch, m_indices=torch.full_like(m_indices, -1))


@by_format
def test_experts_without_a_mask(arch, scale_format):
    check(random_rows(5 * 130, 512).view(5, 130, 1024), scale_format, 10.0, arch)


@by_format
def test_masked_counts_past_the_capacity_are_the_capacity(arch, scale_format):
    x = random_rows(3 * 40, 256).view(3, 40, 512)
    masked_m = torch.tensor([41, -1, 1 << 30], dtype=torch.int32, device="cuda")
    limits = torch.tensor([40, 0, 40], dtype=torch.int32, device="cuda")
    got, want = native(x, scale_format, None, masked_m), expected(x, scale_format, None, arch, limits)
    for a, b in zip(got, want, strict=True):
        assert_bitwise_equal(a, b)


@by_format
def test_any_strides(arch, scale_format):
    wide = random_rows(77, 1024)
    x = wide[::2, 256:1280]  # rows start at multiples of 512 bytes
    columns = scale_format.columns(4)
    q_memory = torch.zeros((39, 1024), dtype=torch.uint8, device="cuda")
    s_memory = torch.zeros((columns, 3, 39, 2), dtype=scale_format.dtype, device="cuda")
    q, s = q_memory.view(torch.float8_e4m3fn)[:, 128:640], s_memory[:, 1, :, 1].T
    fused_silu_mul_per_token_group_quant(x, scale_format=scale_format, out_q=q, out_s=s)
    want = expected(x, scale_format, None, arch)
    assert_bitwise_equal(q.contiguous(), want[0].contiguous())
    assert_bitwise_equal(s.contiguous(), want[1].contiguous())
    q.view(torch.uint8).zero_(), s.zero_()
    assert not q_memory.any()
    assert not s_memory.any()


@by_format
@pytest.mark.parametrize("shape", [(0, 512), (0, 4, 512), (4, 0, 512), (3, 0)], ids=str)
def test_empty(scale_format, shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    q, s = fused_silu_mul_per_token_group_quant(x, scale_format=scale_format)
    assert q.shape == (*shape[:-1], shape[-1] // 2)
    assert s.numel() == 0
    torch.cuda.synchronize()


@by_format
@pytest.mark.parametrize("limit", [None, 10.0], ids=lambda v: f"limit={v}")
def test_batch_invariance(scale_format, limit):
    rows = random_rows(3, 640, 5.0)
    assert_batch_invariant(
        lambda x: fused_silu_mul_per_token_group_quant(x, clamp_limit=limit, scale_format=scale_format), rows
    )


@by_format
def test_graph_replay(arch, scale_format):
    x = random_rows(4 * 96, 2048).view(4, 96, 4096)
    masked_m = torch.tensor([96, 3, 0, 50], dtype=torch.int32, device="cuda")
    q, s = outputs(x, scale_format)

    def run():
        fused_silu_mul_per_token_group_quant(
            x, masked_m=masked_m, clamp_limit=10.0, scale_format=scale_format, out_q=q, out_s=s
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for counts in ([96, 3, 0, 50], [1, 96, 96, 0], [0, 0, 0, 0]):
        x.copy_(random_rows(4 * 96, 2048, 3.0).view_as(x))
        masked_m.copy_(torch.tensor(counts, dtype=torch.int32))
        for out, blank in zip((q, s), outputs(x, scale_format), strict=True):
            out.copy_(blank)
        graph.replay()
        want = expected(x, scale_format, 10.0, arch, masked_m)
        assert_bitwise_equal(q, want[0], str(counts))
        assert_bitwise_equal(s, want[1], str(counts))


def test_every_call_gives_the_same_bits(arch):
    x = random_rows(1024, 2048)
    first = native(x, ScaleFormat.UE8M0, 10.0)
    for _ in range(50):
        for a, b in zip(native(x, ScaleFormat.UE8M0, 10.0), first, strict=True):
            assert_bitwise_equal(a, b)


def test_opcheck_and_inputs_stay(arch):
    # opcheck's test_schema multiplies float8 tensors, for which torch has no CUDA kernel: what it would see of
    # undeclared mutation is compared here.
    x = random_rows(3 * 8, 512).view(3, 8, 1024)
    masked_m = torch.tensor([8, 0, 5], dtype=torch.int32, device="cuda")
    for scale_format in FORMATS:
        args = (x, masked_m, None, 10.0, 128, scale_format.value, arch.value, *outputs(x, scale_format))
        before = x.clone(), masked_m.clone()
        torch.library.opcheck(op, args, test_utils=("test_faketensor",))
        assert op(*args) is None
        for now, then in zip((x, masked_m), before, strict=True):
            assert_bitwise_equal(now, then)


@pytest.mark.large
@by_format
@pytest.mark.parametrize(("rows", "intermediate"), [(524416, 2048), (1048577, 2048), (61682, 17408)], ids=str)
def test_past_two_to_the_31_elements(scale_format, rows, intermediate):
    x = torch.empty((rows, 2 * intermediate), dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 1 << 31
    for part in x.split(65536):
        part.normal_()
    q, s = fused_silu_mul_per_token_group_quant(x, clamp_limit=10.0, scale_format=scale_format)
    for start in range(0, rows, 65536):
        part = fused_silu_mul_per_token_group_quant(
            x[start : start + 65536], clamp_limit=10.0, scale_format=scale_format
        )
        assert_bitwise_equal(q[start : start + 65536], part[0].contiguous(), f"rows from {start}")
        assert_bitwise_equal(s[start : start + 65536].contiguous(), part[1].contiguous(), f"rows from {start}")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"arch": 0}, "arch: expected the architecture"),
        ({"group_size": 64}, "group_size: expected 128, got 64"),
        ({"scale_format": 3}, "scale_format"),
        ({"clamp_limit": -1.0}, "clamp_limit: expected a positive number"),
        ({"x": torch.zeros(4, 512)}, "x: expected"),
        ({"x": torch.zeros(4, 500, dtype=torch.bfloat16)}, "multiple of 256"),
        ({"out_q": torch.zeros(4, 256, dtype=torch.uint8)}, "out_q: expected dtype float8_e4m3fn"),
        ({"out_s": torch.zeros(4, 2, dtype=torch.int32)}, "out_s: expected dtype float32"),
        ({"out_s": torch.zeros(4, 1)}, "out_s: expected size 2"),
        ({"masked_m": torch.zeros(4, dtype=torch.int32)}, "masked_m: expected none"),
        ({"m_indices": torch.zeros(4, dtype=torch.int64)}, "m_indices: expected"),
        ({"m_indices": torch.zeros(3, dtype=torch.int32)}, "m_indices: expected size 4"),
        (
            {"m_indices": lambda: torch.zeros(8, dtype=torch.int32, device="cuda")[::2]},
            "m_indices: expected contiguous",
        ),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_direct_calls_are_checked_and_write_nothing(arch, change, match):
    x = random_rows(4, 256)
    q, s = outputs(x, ScaleFormat.FLOAT32)
    args = {
        "x": x, "masked_m": None, "m_indices": None, "clamp_limit": None, "group_size": 128, "scale_format": 0,
        "arch": arch.value, "out_q": q, "out_s": s,
    }  # fmt: skip
    for name, value in change.items():  # a copy to the GPU would be contiguous
        args[name] = value.cuda() if isinstance(value, torch.Tensor) else value() if callable(value) else value
    before = [t.clone() for t in (q, s)]
    with pytest.raises(RuntimeError, match=match):
        op(*args.values())
    torch.cuda.synchronize()
    for now, then in zip((q, s), before, strict=True):
        assert_bitwise_equal(now, then)


@pytest.mark.parametrize("count", [8, 100])
def test_the_number_of_multiprocessors_does_not_show(arch, count):
    x = random_rows(3000, 2048)
    expected = fused_silu_mul_per_token_group_quant(x)
    with few_multiprocessors(count):
        few = fused_silu_mul_per_token_group_quant(x)
    for got, want in zip(few, expected, strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.parametrize("offset", [1, 4], ids=lambda v: f"offset={v}")
def test_misaligned_rows_are_refused(arch, offset):
    memory = random_rows(4, 512)
    x = memory[:, offset : offset + 512]
    q, s = outputs(x, ScaleFormat.FLOAT32)
    with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        op(x, None, None, None, 128, 0, arch.value, q, s)
    with pytest.raises(ArgumentError, match="x: expected rows that start at multiples of 16 bytes"):
        fused_silu_mul_per_token_group_quant(x, out_q=q, out_s=s)
    codes = torch.empty(4, 260, dtype=torch.float8_e4m3fn, device="cuda")[:, :256]
    with pytest.raises(ArgumentError, match="out_q: expected rows that start at multiples of 8 bytes"):
        fused_silu_mul_per_token_group_quant(x.contiguous(), out_q=codes)
