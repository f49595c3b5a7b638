"""padded_copy_, fingerprint and the broadcast's refresh on the GPU equal the reference bit for bit. Needs a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from bi_kernels.testing import assert_bitwise_equal
from bi_reload import _ops, load_attn_sink_, padded_copy_, refresh_mhc_broadcast_, weight_fingerprint

pytestmark = pytest.mark.gpu

DTYPES = {
    torch.float32: -math.inf,
    torch.float64: 0.1,
    torch.bfloat16: -math.inf,
    torch.float16: math.nan,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e8m0fnu: 0.5,
    torch.int8: -128,
    torch.uint8: 255,
    torch.int32: -1,
    torch.int64: -(2**63),
    torch.bool: 1,
    torch.complex64: 2.0,
}


def random_bytes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "total"), [(0, 3), (3, 3), (3, 700), (700, 1000)], ids=str)
def test_padded_copy(dtype, rows, total):
    src, dst = random_bytes(dtype, rows, 6), random_bytes(dtype, total, 6)
    mine = dst.cuda()
    padded_copy_(dst, src, pad_value=DTYPES[dtype])
    padded_copy_(mine, src.cuda(), pad_value=DTYPES[dtype])
    assert_bitwise_equal(as_bytes(mine), as_bytes(dst))


def test_padded_copy_of_any_strides_writes_nothing_else():
    memory = torch.zeros(40, 30, 5, device="cuda")
    want = memory.cpu()
    src = torch.randn(5, 4, 9, device="cuda")
    for target, source in ((memory, src), (want, src.cpu())):
        dst = target[3:33:3, ::7, 1:4].permute(1, 2, 0)  # (5, 3, 10)
        padded_copy_(dst, source[:, :3].flip(2)[:2].repeat(1, 1, 2)[..., :10], pad_value=-2.5)
    assert_bitwise_equal(memory.cpu(), want)


def test_padded_copy_in_a_graph_and_refusals():
    dst, src = torch.zeros(8, device="cuda"), torch.randn(5, device="cuda")
    padded_copy_(dst, src, pad_value=-math.inf)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        padded_copy_(dst, src, pad_value=-math.inf)
    src.copy_(torch.arange(5.0))
    dst.zero_()
    graph.replay()
    assert dst.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, *[-math.inf] * 3]
    with pytest.raises(RuntimeError, match="memory apart from src"):
        _ops.padded_copy_(dst, dst[2:4], 0)
    with pytest.raises(RuntimeError, match="at most 8 rows"):
        _ops.padded_copy_(dst, torch.zeros(9, device="cuda"), 0)
    torch.library.opcheck(_ops.padded_copy_, (dst, src, 3), test_utils=("test_schema", "test_faketensor"))


def test_attention_sinks_are_padded_on_the_gpu():
    param, loaded = torch.zeros(64, device="cuda"), torch.randn(128)
    address = param.data_ptr()
    load_attn_sink_(param, loaded.cuda(), first_head=32, num_heads=48)
    want = torch.zeros(64)
    load_attn_sink_(want, loaded, first_head=32, num_heads=48)
    assert_bitwise_equal(param.cpu(), want)
    assert param.data_ptr() == address


SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 4095, 4096, 4097, 65536 * 8 + 21, 5_000_003)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("start", [0, 8, 1, 3])
def test_fingerprint_equals_the_cpu_s(size, start):
    data = torch.randint(256, (size + start,), dtype=torch.uint8)
    want = weight_fingerprint({"w": data[start:].clone()})
    assert weight_fingerprint({"w": data.cuda()[start:]}) == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_fingerprint_of_any_tensor(dtype):
    tensor = random_bytes(dtype, 300, 40)
    sides = [{"a": t, "b": t.t(), "c": t[3:, 5:], "d": t[:0], "e": t[0, 0]} for t in (tensor, tensor.cuda())]
    assert weight_fingerprint(sides[0]) == weight_fingerprint(sides[1])


def test_one_flipped_bit_changes_the_fingerprint():
    tensor = torch.randn(1000, 1000, device="cuda").bfloat16()
    before = weight_fingerprint({"w": tensor})
    assert all(weight_fingerprint({"w": tensor}) == before for _ in range(20))  # blocks end in any order
    tensor.view(torch.int16)[777, 3] ^= 16
    assert weight_fingerprint({"w": tensor}) != before


def test_fingerprint_in_a_graph_and_refusals():
    data, out = torch.zeros(1000, dtype=torch.uint8, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _ops.fingerprint(data, out)
    data.random_()
    want = torch.zeros(1, dtype=torch.int64)
    _ops.fingerprint(data.cpu(), want)
    for _ in range(2):
        graph.replay()
        assert out.item() == want.item()
    with pytest.raises(RuntimeError, match="memory apart from data"):
        _ops.fingerprint(data, data[8:16].view(torch.int64))
    torch.library.opcheck(_ops.fingerprint, (data, out), test_utils=("test_schema", "test_faketensor"))


def test_broadcast_refresh_equals_the_cpu_s_at_the_same_address():
    fn = torch.randint(-(2**31), 2**31, (24, 4 * 4096)).int().view(torch.float32)  # every kind of number
    dst, mine = torch.zeros(24, 4096), torch.zeros(24, 4096, device="cuda")
    address = mine.data_ptr()
    refresh_mhc_broadcast_(dst, fn)
    refresh_mhc_broadcast_(mine, fn.cuda())
    assert_bitwise_equal(mine.cpu(), dst)
    assert mine.data_ptr() == address
