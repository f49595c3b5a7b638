from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bi_kernels.runtime.errors import ArgumentError, ReloadError
from bi_kernels.testing import num_threads
from bi_reload import weight_fingerprint
from bi_reload.reference import fingerprint as reference

MASK = (1 << 64) - 1


def one(tensor: torch.Tensor, name: str = "w") -> int:
    return weight_fingerprint({name: tensor})[name]


def scalar_word_sum(data: bytes) -> int:
    """The specification once more, in Python integers."""
    padded = data + bytes(-len(data) % 8)
    total = 0
    for i in range(len(padded) // 8):
        z = int.from_bytes(padded[8 * i : 8 * i + 8], "little") + (i + 1) * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        total += z ^ z >> 31
    return total & MASK


@given(st.binary(max_size=100))
def test_words_against_python_integers(data: bytes) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert reference.word_sum(tensor).item() & MASK == scalar_word_sum(data)


@given(st.integers(1, 70), st.data())
def test_one_flipped_bit_changes_it(size: int, data: Any) -> None:
    bits = data.draw(st.binary(min_size=size, max_size=size))
    flip = data.draw(st.integers(0, 8 * size - 1))
    tensor = torch.tensor(list(bits), dtype=torch.uint8)
    changed = tensor.clone()
    changed[flip // 8] ^= 1 << flip % 8
    assert one(tensor) != one(changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_every_bit_of_a_tensor(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 5, dtype=dtype)
    seen = {one(tensor)}
    bits = 1 if dtype == torch.bool else 8
    data = tensor.view(torch.uint8)
    for byte in range(data.numel()):
        for bit in range(bits):
            data.view(-1)[byte] = 1 << bit
            seen.add(one(tensor))
            data.view(-1)[byte] = 0
    assert len(seen) == 1 + data.numel() * bits


def test_position_name_dtype_and_shape_count() -> None:
    w = torch.tensor([1.0, 2.0, 0.0, 0.0])
    prints = [
        one(w),
        one(w.flip(0)),
        one(w.roll(2)),
        one(w.view(2, 2)),
        one(w.view(torch.int32)),
        one(w, "v"),
        one(w[:3]),
        one(w.view(4, 1)),
        one(torch.cat([w, torch.zeros(1)])),
    ]
    assert len(set(prints)) == len(prints)
    assert all(0 <= value <= MASK for value in prints)


def test_zero_signs_and_nan_payloads_count() -> None:
    assert one(torch.tensor([0.0])) != one(torch.tensor([-0.0]))
    payloads = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert len({one(payload) for payload in payloads}) == 4


def test_strides_threads_and_neighbours_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(67, 45)
    want = one(w)
    assert one(w.t().contiguous().t()) == want
    wide = torch.randn(67, 91)
    wide[:, ::2].copy_(torch.zeros(67, 46))
    wide[:, :90:2] = w
    assert one(wide[:, :90:2]) == want
    memory = torch.zeros(w.numel() * 4 + 3, dtype=torch.uint8)
    memory[3:] = w.view(-1).view(torch.uint8)
    assert reference.word_sum(memory[3:]).item() == reference.word_sum(w.view(-1).view(torch.uint8)).item()
    others = {"a": torch.randn(3), "w": w, "b": torch.zeros(0)}
    assert weight_fingerprint(others)["w"] == want
    assert list(weight_fingerprint(dict(reversed(others.items())))) == ["b", "w", "a"]
    with num_threads(3):
        assert one(w) == want
    monkeypatch.setattr(reference, "_CHUNK", 7)
    assert one(w) == want


def test_longer_than_a_chunk() -> None:
    data = torch.randint(256, (8 * (1 << 16) + 21,), dtype=torch.uint8)  # position keys go on across the border
    assert reference.word_sum(data).item() & MASK == scalar_word_sum(bytes(data.tolist()))


def test_empty_scalar_and_parameter() -> None:
    assert one(torch.zeros(0)) != one(torch.zeros(0, 3))
    assert one(torch.tensor(1.0)) != one(torch.tensor([1.0]))
    assert one(torch.nn.Parameter(torch.ones(3))) == one(torch.ones(3))
    assert one(torch.ones(3, dtype=torch.cdouble)) != one(torch.ones(3, dtype=torch.cdouble) * 1j)
    assert weight_fingerprint({}) == {}


def test_known_value() -> None:
    """Pins the definition: both sides of a transfer may run different versions of this package."""
    assert one(torch.arange(6.0).view(2, 3), "layers.0.weight") == KNOWN


KNOWN = 12369730684789307425


def test_bad_input() -> None:
    with pytest.raises(ReloadError, match=r"w: .*meta"):
        one(torch.zeros(3, device="meta"))
    with pytest.raises(ArgumentError, match="strided"):
        one(torch.eye(3).to_sparse())
    with pytest.raises(ArgumentError, match="strings"):
        weight_fingerprint({1: torch.zeros(1)})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="got float"):
        weight_fingerprint({"w": math.pi})  # type: ignore[dict-item]
