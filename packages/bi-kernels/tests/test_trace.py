from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bi_kernels.testing import trace as module
from bi_kernels.testing.trace import (
    Rows,
    Trace,
    TraceError,
    first_divergence,
    main,
    note_plan,
    plan_differences,
    probe,
    recording,
    row_digests,
)


def rows(*tokens: tuple[str, int]) -> Rows:
    names = list(dict.fromkeys(name for name, _ in tokens))
    return Rows(names, torch.tensor([names.index(n) for n, _ in tokens]), torch.tensor([p for _, p in tokens]))


TOKENS = [("a", 0), ("a", 1), ("b", 0), ("a", 2), ("b", 1)]


def forward(tokens: list[tuple[str, int]], fault: tuple[int, str, str, int] | None = None) -> None:
    """Two layers of two ops whose rows are functions of the token; one row may be off by one bit."""
    for layer in (0, 1):
        for op in ("first", "second"):
            value = torch.tensor([[hash_of(name, p) + layer, p] for name, p in tokens], dtype=torch.float32)
            for i, (name, p) in enumerate(tokens):
                # As a real fault does: from that token and that op on, in this request alone.
                if fault is not None and name == fault[2] and p >= fault[3] and (layer, op) >= fault[:2]:
                    value[i, 1] = torch.nextafter(value[i, 1], torch.tensor(9e9))
            probe(op, value, layer=layer, rows=lambda: rows(*tokens))


def hash_of(name: str, position: int) -> int:
    return ord(name) * 100 + position


def traced(*batches: list[tuple[str, int]], fault=None, keep=None) -> Trace:
    with recording(Trace(keep)) as trace:
        for batch in batches:
            forward(batch, fault)
    return trace


def test_off_it_asks_for_nothing() -> None:
    def never() -> Rows:
        raise AssertionError("rows() was called without a trace")

    probe("op", torch.zeros(1, 1), layer=0, rows=never)
    with recording(Trace()):
        pass
    probe("op", torch.zeros(1, 1), layer=0, rows=never)
    assert module._active is None


def test_batching_does_not_show() -> None:
    one = traced(TOKENS)
    other = traced([TOKENS[2], TOKENS[0]], [TOKENS[1]], [TOKENS[4], TOKENS[3]])
    assert first_divergence(one, other) is None


@pytest.mark.parametrize("fault", [(0, "second", "a", 1), (1, "first", "b", 0), (0, "first", "a", 2)])
def test_first_token_and_first_op_are_named(fault: tuple[int, str, str, int]) -> None:
    found = first_divergence(traced(TOKENS), traced(TOKENS[::-1], fault=fault, keep=lambda layer, op: True))
    assert found is not None
    assert (found.layer, found.op, found.request, found.position) == fault
    assert found.values == ()  # one side kept none


def test_values_are_shown_where_both_kept_them() -> None:
    keep = lambda layer, op: (layer, op) == (1, "first")  # noqa: E731
    found = first_divergence(traced(TOKENS, keep=keep), traced(TOKENS, fault=(1, "first", "b", 1), keep=keep))
    assert found is not None
    one = torch.tensor(1.0)
    bits = [int(t.view(torch.int32)) for t in (one, torch.nextafter(one, torch.tensor(9e9)))]
    assert found.values == ((1, *bits),)


def test_a_row_that_contradicts_itself_is_kept() -> None:
    with recording(Trace()) as trace:
        forward(TOKENS)
        forward(TOKENS[:2])
        assert trace.contradictions == []
        forward(TOKENS[:2], fault=(1, "second", "a", 1))
    assert trace.contradictions == [(1, "second", "a", 1)]


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(TraceError, match="none in common"):
        first_divergence(traced([("a", 0)]), traced([("b", 0)]))


def test_sign_of_zero_and_nan_payload_count() -> None:
    zeros = torch.tensor([[0.0, -0.0], [-0.0, 0.0], [0.0, 0.0]])
    assert len(set(row_digests(zeros).tolist())) == 3
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).unsqueeze(1)
    assert len(set(row_digests(nans).tolist())) == 2


@given(st.integers(0, 255), st.integers(0, 2**16 - 1), st.integers(0, 15))
def test_one_flipped_bit_changes_the_digest(index: int, value: int, bit: int) -> None:
    row = torch.arange(256, dtype=torch.int32).to(torch.int16)
    row[index] = torch.tensor(value, dtype=torch.int32).to(torch.int16)
    other = row.clone()
    other[index] = torch.tensor(value ^ 1 << bit, dtype=torch.int32).to(torch.int16)
    digests = row_digests(torch.stack([row, other]).view(torch.bfloat16))
    assert digests[0] != digests[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn], ids=str)
def test_digests_are_the_same_in_parts(dtype, monkeypatch):
    tensor = (torch.randn(7, 3, 11, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    whole = row_digests(tensor)
    monkeypatch.setattr(module, "_AT_ONCE", 100)  # several parts, the last one shorter
    assert torch.equal(row_digests(tensor), whole)
    assert torch.equal(row_digests(tensor[::2]), whole[::2])
    # One number's digest, worked out: (bits + 1) times the odd constant of index 0.
    mixed = -7046029254386353131
    mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
    mixed = (mixed + 2**63) % 2**64 - 2**63
    want = (41 + 1) * ((mixed ^ (mixed >> 29)) | 1)
    assert row_digests(torch.tensor([41])).tolist() == [(want + 2**63) % 2**64 - 2**63]


def test_a_plan_that_follows_the_batch_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note_plan("capacity", 1)  # nobody records
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path, capacities in zip(paths, ((128, 128), (128,), (128, 17)), strict=True):
        with recording(Trace()) as trace:
            forward(TOKENS)
            for capacity in capacities:
                note_plan("capacity", capacity)
            note_plan(f"chunks of {len(capacities)} rows", [1])
        trace.save(path)
    a, b, c = (Trace.load(path) for path in paths)
    assert plan_differences(a, b) == []
    assert plan_differences(a, c) == ["capacity: 128 against 128, 17"]
    assert plan_differences(c, c) == ["capacity: 128, 17 against 128, 17"]
    assert main([str(paths[0]), str(paths[1])]) == 0
    assert main([str(paths[0]), str(paths[2])]) == 1
    assert "plan differs: capacity" in capsys.readouterr().out


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = lambda layer, op: True  # noqa: E731
    paths = [str(tmp_path / name) for name in ("a.json", "b.json", "c.json")]
    for path, fault in zip(paths, (None, None, (1, "first", "a", 1)), strict=True):
        traced(TOKENS, fault=fault, keep=keep).save(path)
    assert main(paths[:2]) == 0
    assert main([paths[0], paths[2], "--json", str(tmp_path / "found.json")]) == 1
    found = json.loads((tmp_path / "found.json").read_text())["divergence"]
    assert (found["layer"], found["op"], found["request"], found["position"]) == (1, "first", "a", 1)
    assert "layer 1, first, request a, position 1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("content", ["", "{}", '{"format": 1}', '{"format": 2, "requests": 3}', "[1, 2]", "\x00\xff"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    traced(TOKENS).save(good)
    bad.write_text(content, encoding="utf-8")
    with pytest.raises(TraceError):
        Trace.load(bad)
    assert main([str(good), str(bad)]) == 2
    assert "bi-bisect" in capsys.readouterr().out
