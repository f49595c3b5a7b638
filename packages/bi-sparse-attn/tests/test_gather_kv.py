"""The byte formats of the caches, quantisation, dequantisation, and the decode gather."""

from __future__ import annotations

import math

import pytest
import torch

from bi_kernels import ArgumentError
from bi_kernels.testing import assert_bitwise_equal
from bi_sparse_attn import (
    combine_topk_swa,
    gather_decode_kv,
    gather_index_k,
    gather_kv,
    index_k_block_bytes,
    kv_block_bytes,
    quantize_and_insert_index_k_,
    quantize_and_insert_kv_,
)

BLOCK = 64
E4M3 = [float(x) for x in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()]  # codes 0..126


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def new_cache(blocks: int, block_bytes: int, fill: int = 0xA5) -> torch.Tensor:
    return torch.full((blocks, block_bytes), fill, dtype=torch.uint8)


def kv_entry(cache: torch.Tensor, slot: int, block_size: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scale bytes of a slot, from the format's description."""
    block, entry = divmod(slot, block_size)
    scales = block_size * 576 + entry * 8
    return cache[block, entry * 576 : entry * 576 + 576], cache[block, scales : scales + 8]


def scale_of(amax: float) -> float:
    """Smallest power of two that brings ``max(amax, 1e-4)`` to at most 448: by comparison, without logarithms."""
    floored = max(amax, float(torch.tensor(1e-4)))
    power = 2.0**-127
    while 448.0 * power < floored:
        power *= 2.0
    return power


def nearest_code(value: float) -> int:
    """E4M3 code nearest to ``value``, ties to the even code, by search."""
    magnitude = min(range(127), key=lambda code: (abs(E4M3[code] - abs(value)), code & 1))
    return magnitude | (0x80 if math.copysign(1.0, value) < 0 else 0)


@pytest.mark.parametrize(("block_size", "block_bytes"), [(1, 1152), (2, 1728), (64, 37_440), (576, 576 * 584)])
def test_pages_are_padded_to_576_bytes(block_size: int, block_bytes: int) -> None:
    assert kv_block_bytes(block_size) == block_bytes
    assert index_k_block_bytes(block_size) == 132 * block_size


def test_bytes_of_an_entry() -> None:
    kv = randn(3, 512, seed=1)
    kv[1, 64:128] = 0
    kv[2, 0] = -448.0
    cache = new_cache(3, kv_block_bytes(BLOCK))
    slots = [70, 0, 191]
    assert quantize_and_insert_kv_(cache, kv, torch.tensor(slots), block_size=BLOCK) is cache
    for row, slot in zip(kv, slots, strict=True):
        data, scales = kv_entry(cache, slot)
        for group in range(7):
            values = row[64 * group : 64 * group + 64].float()
            scale = scale_of(float(values.abs().max()))
            assert int(scales[group]) == math.log2(scale) + 127
            assert data[64 * group : 64 * group + 64].tolist() == [nearest_code(v / scale) for v in values.tolist()]
        assert int(scales[7]) == 0
        assert_bitwise_equal(data[448:].view(torch.bfloat16), row[448:])


def test_inserting_touches_nothing_else() -> None:
    before = torch.randint(256, (3, kv_block_bytes(BLOCK)), generator=torch.Generator().manual_seed(2)).byte()
    cache = before.clone()
    slots = torch.tensor([5, -1, 130, 64])
    quantize_and_insert_kv_(cache, randn(4, 512), slots, block_size=BLOCK)
    for slot in (5, 130, 64):
        for now, then in zip(kv_entry(cache, slot), kv_entry(before, slot), strict=True):
            then.copy_(now)
    assert_bitwise_equal(cache, before)


def test_every_finite_bfloat16_quantises_as_by_search() -> None:
    """All magnitudes as a group's maximum: exponent, code and the value that comes back."""
    values = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    rows = -(-len(values) // 7)
    groups = torch.zeros(rows * 7, 64, dtype=torch.bfloat16)
    groups[: len(values), 9] = -values
    kv = torch.cat([groups.view(rows, 448), torch.zeros(rows, 64, dtype=torch.bfloat16)], dim=1)
    cache = new_cache(-(-rows // BLOCK), kv_block_bytes(BLOCK))
    slots = torch.arange(rows)
    quantize_and_insert_kv_(cache, kv, slots, block_size=BLOCK)
    entries = cache[:, : BLOCK * 584]
    codes = entries[:, : BLOCK * 576].reshape(-1, 576)[:rows, :448].reshape(-1, 64)[: len(values), 9]
    exponents = entries[:, BLOCK * 576 :].reshape(-1, 8)[:rows, :7].reshape(-1)[: len(values)]
    wide = values.double()
    floored = wide.clamp(min=float(torch.tensor(1e-4)))
    scale = torch.exp2(exponents.double() - 127)  # exact in float64
    assert bool((448 * scale >= floored).all())
    assert bool((448 * scale / 2 < floored).all()), "the next smaller power would not do"
    table = torch.tensor(E4M3, dtype=torch.float64)
    scaled = (wide / scale).clamp(max=448.0)
    above = torch.searchsorted(table, scaled).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - scaled, scaled - table[below]
    nearest = torch.where(up < down, above, torch.where(up > down, below, torch.where(above % 2 == 0, above, below)))
    assert_bitwise_equal(codes, (nearest | 0x80).byte())
    back = gather_kv(cache, slots, block_size=BLOCK)[:, :448].reshape(-1, 64)[: len(values), 9]
    assert_bitwise_equal(back, (-(table[nearest] * scale)).bfloat16())
    normal = (wide >= 2.0**-126) & (wide <= 2.0**127)  # beyond, the nearest code may stand for 2**128
    assert bool((back.double() == -(table[nearest] * scale))[normal].all()), "the product, not its rounding"


def test_every_code_with_every_exponent_comes_back_exactly() -> None:
    """256 codes x 256 exponents: the product in float64, rounded once; NaN for the codes and the byte that say so."""
    cache = new_cache(1, kv_block_bytes(256), fill=0)
    for exponent in range(256):
        data, scales = kv_entry(cache, exponent, block_size=256)
        data[:256] = torch.arange(256, dtype=torch.uint8)
        scales[:7] = exponent
    got = gather_kv(cache, torch.arange(256), block_size=256)
    codes = torch.tensor([*E4M3, math.nan, *(-x for x in E4M3), math.nan], dtype=torch.float64)
    exact = torch.exp2(torch.arange(256, dtype=torch.float64) - 127).unsqueeze(1) * codes
    exact[255] = math.nan
    expected = torch.where(torch.isnan(exact), torch.tensor(math.nan), exact.float()).bfloat16()
    assert_bitwise_equal(got[:, :256], torch.where(torch.isnan(expected), torch.tensor(math.nan).bfloat16(), expected))
    assert bool((got[:, 256:] == 0)[:255].all())
    inside = (exact.abs() >= 2.0**-126) & (exact.abs() <= 2.0**127)
    assert bool((got[:, :256].double() == exact)[inside].all()), "no rounding in the normal range"
    # Code 8 is 2**-6. Below 2**-126 bfloat16 counts in steps of 2**-133: 3/8, 4/8, 5/8 and 12/8 steps, ties to even.
    assert [float(got[0, code]) / 2.0**-133 for code in (3, 4, 5, 12)] == [0.0, 0.0, 1.0, 2.0]
    assert bool(torch.isinf(got[254, 64:127]).all()), "2**127 times 2 and more is out of range"


def test_non_finite_groups_are_nan_and_others_are_not() -> None:
    kv = randn(3, 512, seed=4)
    clean = kv.clone()
    kv[0, 3], kv[1, 130], kv[2, 447] = math.nan, math.inf, -math.inf
    cache, reference = (new_cache(1, kv_block_bytes(BLOCK)) for _ in range(2))
    quantize_and_insert_kv_(cache, kv, torch.arange(3), block_size=BLOCK)
    quantize_and_insert_kv_(reference, clean, torch.arange(3), block_size=BLOCK)
    for row, group in ((0, 0), (1, 2), (2, 6)):
        data, scales = kv_entry(cache, row)
        channels = slice(64 * group, 64 * group + 64)
        assert data[channels].tolist() == [0x7F] * 64
        assert int(scales[group]) == 255
        assert_bitwise_equal(
            gather_kv(cache, torch.tensor([row]), block_size=BLOCK)[0, channels],
            torch.full((64,), math.nan, dtype=torch.bfloat16),
        )
        expected_data, expected_scales = kv_entry(reference, row)
        expected_data[channels] = 0x7F
        expected_scales[group] = 255
    assert_bitwise_equal(cache, reference)


def test_gather_reads_in_the_order_of_slots_and_zeroes_skipped_rows() -> None:
    kv = randn(100, 512, seed=5)
    cache = new_cache(2, kv_block_bytes(BLOCK))
    quantize_and_insert_kv_(cache, kv, torch.arange(100), block_size=BLOCK)
    every = gather_kv(cache, torch.arange(100), block_size=BLOCK)
    slots = torch.tensor([7, -1, 99, 7, 63, 64])
    out = torch.full((6, 512), 9.0, dtype=torch.bfloat16)
    assert gather_kv(cache, slots, block_size=BLOCK, out=out) is out
    assert_bitwise_equal(out, torch.where((slots >= 0).unsqueeze(1), every[slots], torch.zeros_like(out)))


def test_pages_may_lie_apart() -> None:
    """vLLM hands out views whose pages have a stride of their own."""
    memory = new_cache(1, 5 * 40_000)
    cache = memory.view(5, 40_000)[1:, 100 : 100 + BLOCK * 584]
    kv, slots = randn(4, 512, seed=6), torch.tensor([0, 63, 130, 255])
    quantize_and_insert_kv_(cache, kv, slots, block_size=BLOCK)
    plain = quantize_and_insert_kv_(new_cache(4, kv_block_bytes(BLOCK)), kv, slots, block_size=BLOCK)
    assert_bitwise_equal(cache, plain[:, : BLOCK * 584])
    assert_bitwise_equal(gather_kv(cache, slots, block_size=BLOCK), gather_kv(plain, slots, block_size=BLOCK))


def test_index_keys_round_trip_through_their_page() -> None:
    k = randn(5, 128, seed=7) * torch.tensor([1.0, 300.0, 2.0**-20, 0.0, 1.0]).bfloat16().unsqueeze(1)
    k[4, 5] = math.inf
    cache = new_cache(2, index_k_block_bytes(BLOCK))
    slots = torch.tensor([3, 64, 127, 0, 70])
    assert quantize_and_insert_index_k_(cache, k, slots, block_size=BLOCK) is cache
    asked = torch.tensor([64, 3, -1, 127, 0, 70])
    out_q, out_scale = torch.empty(6, 128, dtype=torch.float8_e4m3fn), torch.empty(6)
    got = gather_index_k(cache, asked, block_size=BLOCK, out_q=out_q, out_scale=out_scale)
    assert got[0] is out_q
    assert got[1] is out_scale
    for i, row in enumerate([1, 0, None, 2, 3]):
        codes = out_q[i].view(torch.uint8).tolist()
        if row is None:
            assert codes == [0] * 128
            assert float(out_scale[i]) == 0.0
            continue
        scale = scale_of(float(k[row].float().abs().max()))
        assert float(out_scale[i]) == scale
        assert codes == [nearest_code(v / scale) for v in k[row].float().tolist()]
        block, entry = divmod(int(asked[i]), BLOCK)
        assert cache[block, 128 * entry : 128 * entry + 128].tolist() == codes
        where = BLOCK * 128 + 4 * entry
        assert float(cache[block, where : where + 4].view(torch.float32)) == scale
    assert out_q[5].view(torch.uint8).tolist() == [0x7F] * 128
    assert math.isnan(float(out_scale[5]))
    untouched = new_cache(2, index_k_block_bytes(BLOCK)) == cache
    assert int((~untouched).sum()) <= 5 * 132


class Request:
    """One sequence in paged caches with scattered slots, and both ways to its K rows."""

    def __init__(self, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        entries = tokens // 4
        self.compressed_slots = torch.randperm(4 * BLOCK, generator=generator)[:entries]
        self.window_slots = torch.randperm(8 * BLOCK, generator=generator)[:tokens]
        self.compressed_cache = new_cache(4, kv_block_bytes(BLOCK))
        self.window_cache = new_cache(8, kv_block_bytes(BLOCK))
        compressed, window = randn(entries, 512, seed=seed + 1), randn(tokens, 512, seed=seed + 2)
        quantize_and_insert_kv_(self.compressed_cache, compressed, self.compressed_slots, block_size=BLOCK)
        quantize_and_insert_kv_(self.window_cache, window, self.window_slots, block_size=BLOCK)


@pytest.mark.parametrize("window", [16, 128])
def test_decode_sees_the_rows_of_prefill_in_the_same_order(window: int) -> None:
    request, top_k, rows = Request(400, seed=11), 24, 110
    generator = torch.Generator().manual_seed(12)
    positions = torch.tensor([0, 3, 4, 15, 127, 128, 399, -1])
    gather_start = 0
    picked = [sorted(torch.randperm((p + 1) // 4, generator=generator)[:top_k].tolist()) for p in positions.tolist()]
    entries = torch.tensor([row + [-1] * (top_k - len(row)) for row in picked], dtype=torch.int32)

    workspace = torch.full((rows + 400, 512), math.nan, dtype=torch.bfloat16)
    compressed = gather_kv(request.compressed_cache, request.compressed_slots, block_size=BLOCK)
    workspace[: len(compressed)] = compressed
    workspace[rows:] = gather_kv(request.window_cache, request.window_slots, block_size=BLOCK)
    prefill, lengths = combine_topk_swa(
        entries,
        positions,
        torch.full_like(positions, gather_start),
        compress_ratio=4,
        window_size=window,
        compressed_rows=rows,
    )

    compressed_slots = torch.where(entries >= 0, request.compressed_slots[entries.clamp(min=0)], -1)
    span = (positions - window + 1).clamp(min=0).unsqueeze(1) + torch.arange(window)
    window_slots = torch.where(
        span <= positions.unsqueeze(1), request.window_slots[span.clamp(max=399)], torch.tensor(-1)
    )
    out = torch.full((8, prefill.shape[1], 512), math.nan, dtype=torch.bfloat16)
    decode = gather_decode_kv(
        request.compressed_cache,
        request.window_cache,
        compressed_slots,
        window_slots,
        compressed_block_size=BLOCK,
        window_block_size=BLOCK,
        out=out,
    )
    assert decode.workspace is out
    assert_bitwise_equal(decode.lengths, lengths)
    for token, length in enumerate(lengths.tolist()):
        rows_of_decode = decode.workspace.flatten(0, 1)[decode.indices[token, :length]]
        assert_bitwise_equal(rows_of_decode, workspace[prefill[token, :length]], f"token {token}")
        assert decode.indices[token, length:].tolist() == [-1] * (prefill.shape[1] - length)
        assert bool(torch.isnan(out[token, length:]).all()), "rows past the length are left as they are"


def test_window_only_layers_have_no_compressed_cache() -> None:
    request = Request(20, seed=13)
    window_slots = request.window_slots.view(2, 10)
    none = torch.empty(2, 0, dtype=torch.int64)
    sizes = {"compressed_block_size": BLOCK, "window_block_size": BLOCK}
    got = gather_decode_kv(None, request.window_cache, none, window_slots, **sizes)
    assert got.workspace.shape == (2, 128, 512)
    assert got.lengths.tolist() == [10, 10]
    expected = gather_kv(request.window_cache, request.window_slots, block_size=BLOCK)
    assert_bitwise_equal(got.workspace[:, :10].reshape(20, 512), expected)
    with pytest.raises(ArgumentError, match="compressed_cache"):
        gather_decode_kv(None, request.window_cache, window_slots, window_slots, **sizes)


def test_empty_batches() -> None:
    cache, none = new_cache(1, kv_block_bytes(BLOCK)), torch.empty(0, dtype=torch.int64)
    before = cache.clone()
    quantize_and_insert_kv_(cache, randn(0, 512), none, block_size=BLOCK)
    quantize_and_insert_index_k_(cache, randn(0, 128), none, block_size=BLOCK)
    assert_bitwise_equal(cache, before)
    assert gather_kv(cache, none, block_size=BLOCK).shape == (0, 512)
    assert gather_index_k(cache, none, block_size=BLOCK)[0].shape == (0, 128)
    lists = none.view(0, 1)
    decode = gather_decode_kv(cache, cache, lists, lists, compressed_block_size=BLOCK, window_block_size=BLOCK)
    assert decode.workspace.shape == (0, 128, 512)


SLOTS = {
    "slot out of range": torch.tensor([0, 128]),
    "slot below -1": torch.tensor([0, -2]),
    "slots dtype": torch.tensor([0, 1], dtype=torch.int32),
    "slots shape": torch.tensor([[0, 1]]),
    "slots device": torch.zeros(2, dtype=torch.int64, device="meta"),
}
INSERT = {
    **{case: {"slots": slots} for case, slots in SLOTS.items()},
    "slot twice": {"slots": torch.tensor([5, 5])},
    "row count": {"slots": torch.tensor([0, 1, 2])},
    "rows dtype": {"rows": torch.zeros(2, 512)},
    "rows width": {"rows": randn(2, 511)},
    "block_size": {"block_size": 0},
    "block_size too large for the page": {"block_size": 65},
    "cache dtype": {"cache": torch.zeros(2, 37_440, dtype=torch.int8)},
    "cache shape": {"cache": torch.zeros(2 * 37_440, dtype=torch.uint8)},
    "cache overlaps": {"cache": torch.full((1, 37_440), 0xA5, dtype=torch.uint8).expand(2, 37_440)},
    "cache stride": {"cache": torch.full((37_440, 2), 0xA5, dtype=torch.uint8).T},
}


@pytest.mark.parametrize("width", [512, 128])
@pytest.mark.parametrize("case", INSERT)
def test_bad_inserts_are_refused_and_nothing_is_written(case: str, width: int) -> None:
    entry_bytes = {512: kv_block_bytes(BLOCK), 128: index_k_block_bytes(BLOCK)}[width]
    arguments = {
        "cache": new_cache(2, entry_bytes),
        "rows": randn(2, width),
        "slots": torch.tensor([0, 1]),
        "block_size": BLOCK,
    } | INSERT[case]
    before = arguments["cache"].clone()
    insert = {512: quantize_and_insert_kv_, 128: quantize_and_insert_index_k_}[width]
    if case == "rows dtype":
        arguments["rows"] = torch.zeros(2, width)
    with pytest.raises(ArgumentError, match=r"expected .* got"):
        insert(arguments["cache"], arguments["rows"], arguments["slots"], block_size=arguments["block_size"])
    assert_bitwise_equal(arguments["cache"], before)


GATHER = {
    **{case: {"slots": slots} for case, slots in SLOTS.items() if case != "slots shape"},
    "slots shape": {"slots": torch.tensor([[0], [1]])},
    "block_size": {"block_size": -1},
    "block_size too large for the page": {"block_size": 65},
    "cache dtype": {"cache": torch.zeros(2, 37_440, dtype=torch.int8)},
    "out dtype": {"out": torch.full((2, 512), 7.0)},
    "out overlaps": {"out": torch.full((1, 512), 7.0, dtype=torch.bfloat16).expand(2, 512)},
    "out shape": {"out": torch.full((3, 512), 7.0, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("case", GATHER)
def test_bad_gathers_are_refused_and_nothing_is_written(case: str) -> None:
    arguments = {
        "cache": new_cache(2, kv_block_bytes(BLOCK)),
        "slots": torch.tensor([0, 1]),
        "block_size": BLOCK,
        "out": torch.full((2, 512), 7.0, dtype=torch.bfloat16),
    } | GATHER[case]
    with pytest.raises(ArgumentError, match=r"expected .* got"):
        gather_kv(**arguments)
    assert bool((arguments["out"] == 7).all())


@pytest.mark.parametrize("case", [*SLOTS, "out_q", "out_scale"])
def test_bad_index_gathers_are_refused_and_nothing_is_written(case: str) -> None:
    out_q = torch.full((2, 128), 7.0).to(torch.float8_e4m3fn)
    out_scale = torch.full((2,), 7.0)
    arguments = {"slots": SLOTS.get(case, torch.tensor([0, 1])), "out_q": out_q, "out_scale": out_scale} | {
        "out_q": {"out_q": out_q.float()},
        "out_scale": {"out_scale": torch.full((3,), 7.0)},
    }.get(case, {})
    with pytest.raises(ArgumentError, match=r"expected .* got"):
        gather_index_k(new_cache(2, index_k_block_bytes(BLOCK)), block_size=BLOCK, **arguments)
    assert bool((out_q.float() == 7).all())
    assert bool((out_scale == 7).all())


@pytest.mark.parametrize(
    "change",
    [
        {"compressed_slots": torch.tensor([[-1, 0]])},
        {"compressed_slots": torch.tensor([[0, 128]])},
        {"window_slots": torch.tensor([[0, 128]])},
        {"window_slots": torch.tensor([[-1, 1]])},
        {"window_slots": torch.tensor([[0, -2]])},
        {"window_slots": torch.tensor([[0], [1]])},
        {"window_slots": torch.tensor([[0]], dtype=torch.int32)},
        {"window_block_size": 65},
        {"compressed_block_size": 0},
        {"out": torch.full((1, 3, 512), 7.0, dtype=torch.bfloat16)},
        {"out": torch.full((1, 512, 4), 7.0, dtype=torch.bfloat16).mT},
        {"out_indices": torch.full((1, 5), 7, dtype=torch.int32)},
        {"out_lengths": torch.full((1,), 7, dtype=torch.int64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_bad_decode_gathers_are_refused_and_nothing_is_written(change: dict[str, object]) -> None:
    cache = new_cache(2, kv_block_bytes(BLOCK), fill=0)
    outputs = {
        "out": torch.full((1, 4, 512), 7.0, dtype=torch.bfloat16),
        "out_indices": torch.full((1, 4), 7, dtype=torch.int32),
        "out_lengths": torch.full((1,), 7, dtype=torch.int32),
    }
    arguments = {
        "compressed_slots": torch.tensor([[0, 1]]),
        "window_slots": torch.tensor([[2, 3]]),
        "compressed_block_size": BLOCK,
        "window_block_size": BLOCK,
        **outputs,
        **change,
    }
    slots = (arguments.pop("compressed_slots"), arguments.pop("window_slots"))
    with pytest.raises(ArgumentError, match=r"expected .* got"):
        gather_decode_kv(cache, cache, *slots, **arguments)  # type: ignore[arg-type]
    for name in outputs:
        assert bool((arguments.get(name, outputs[name]) == 7).all()), name  # type: ignore[union-attr]
