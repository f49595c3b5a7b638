from __future__ import annotations

import collections
import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bi_kernels.runtime.errors import ArgumentError, ReloadError
from bi_reload import AddressLedger, AddressMovedError
from bi_reload.addresses import main


@dataclass
class Plan:
    lengths: torch.Tensor


class Slotted:
    __slots__ = ("unset", "workspace")

    def __init__(self) -> None:
        self.workspace = torch.zeros(2)


class Engine:
    def __init__(self) -> None:
        self.buffer = torch.zeros(3)
        self.engine = self  # a cycle

    @property
    def computed(self) -> torch.Tensor:
        raise AssertionError("the ledger must not evaluate properties")

    def run(self) -> None: ...


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)
        self.plain = torch.zeros(4)
        self.cache: dict[Any, Any] = {"c4": [torch.zeros(1), (torch.zeros(1),)], 7: torch.zeros(1)}
        self.plan = Plan(torch.zeros(5))
        self.slotted = Slotted()
        self.engine = Engine()
        self.queue = collections.deque([torch.zeros(1)])
        self.partial = functools.partial(print, torch.zeros(1), end=torch.zeros(1))
        self.callback = Engine().run
        self.layers[0].weight.scale = torch.zeros(1)  # type: ignore[assignment]
        self.alias = self.plain


def test_reaches_everything() -> None:
    assert set(AddressLedger().record(Model()).entries) == {
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "kept",
        "scratch",
        "plain",
        "alias",
        "cache['c4'][0]",
        "cache['c4'][1][0]",
        "cache[7]",
        "plan.lengths",
        "slotted.workspace",
        "engine.buffer",
        "queue[0]",
        "partial.args[0]",
        "partial.keywords['end']",
        "callback.__self__.buffer",
        "layers.0.weight.scale",
    }


def test_records_what_a_graph_sees() -> None:
    base = torch.zeros(6, 4, dtype=torch.bfloat16)
    entry = AddressLedger().record({"view": base[1:, ::2]}).entries["view"]
    assert (entry.data_ptr, entry.storage_ptr) == (base.data_ptr() + 8, base.data_ptr())
    assert (entry.shape, entry.stride, entry.dtype, entry.device, entry.is_meta) == (
        (5, 2),
        (4, 2),
        "bfloat16",
        "cpu",
        False,
    )


def test_writing_in_place_is_no_difference() -> None:
    model = Model()
    ledger = AddressLedger().record(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.plain.fill_(1)
    assert ledger.diff(model) == []
    ledger.verify(model)


def test_names_every_tensor_that_changed() -> None:
    """B75: nothing that moved may stay unnamed."""
    model = Model()
    ledger = AddressLedger().record(model)
    held = [model.plain, model.plan.lengths, model.engine.buffer, model.kept]  # so that no address is reused
    model.plain = torch.zeros(4)
    model.plan.lengths = torch.zeros(6)
    model.engine.buffer = torch.zeros(3, dtype=torch.int32)
    model.kept = torch.zeros(2, device="meta")
    model.cache["lazy"] = torch.zeros(1)
    del model.cache[7]
    model.layers[1].weight.data = model.layers[1].weight.data.t()
    with pytest.raises(AddressMovedError) as caught:
        ledger.verify(model)
    kinds = {difference.name: difference.kind for difference in caught.value.differences}
    assert kinds == {
        "plain": "moved",
        "plan.lengths": "moved and shape",
        "engine.buffer": "moved and dtype",
        "kept": "moved and device and meta",
        "cache['lazy']": "appeared",
        "cache[7]": "disappeared",
        "layers.1.weight": "stride",
    }
    for name in kinds:
        assert name in str(caught.value)
    assert isinstance(caught.value, ReloadError)
    assert len(held) == 4


def test_changed_strides_at_one_address() -> None:
    tensors = {"w": torch.zeros(2, 3)}
    ledger = AddressLedger().record(tensors)
    tensors["w"] = tensors["w"].view(3, 2).t()
    assert [(d.name, d.kind) for d in ledger.diff(tensors)] == [("w", "stride")]


def test_a_sparse_tensor_is_refused_and_the_record_kept() -> None:
    ledger = AddressLedger().record({"w": torch.zeros(1)})
    with pytest.raises(ArgumentError, match=r"inner.*strided"):
        ledger.record({"inner": torch.eye(2).to_sparse()})
    assert list(ledger.entries) == ["w"]


def test_deep_nesting_needs_no_recursion() -> None:
    root: list[Any] = [torch.zeros(1)]
    for _ in range(5000):
        root = [root]
    assert len(AddressLedger().record(root)) == 1


def test_saved_ledgers_come_back(tmp_path: Path) -> None:
    model = Model()
    ledger = AddressLedger().record(model)
    ledger.save(tmp_path / "a.json")
    again = AddressLedger.load(tmp_path / "a.json")
    assert again.entries == ledger.entries
    again.verify(model)


def test_command_prints_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"kept": torch.zeros(1), "moved": torch.zeros(1)}
    before = str(tmp_path / "a.json")
    AddressLedger().record(tensors).save(before)
    after = str(tmp_path / "b.json")
    AddressLedger().record(tensors | {"moved": torch.zeros(1)}).save(after)
    assert main([before, after]) == 1
    printed = capsys.readouterr().out
    assert "moved: moved (float32[1]" in printed
    assert "1 differences; 2 tensors before, 2 after" in printed
    done = subprocess.run([sys.executable, "-m", "bi_reload.addresses", before, before], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0 differences; 2 tensors before, 2 after\n")


ENTRY = {
    "data_ptr": 1,
    "storage_ptr": 1,
    "shape": [1],
    "stride": [1],
    "dtype": "int8",
    "device": "cpu",
    "is_meta": False,
}
HEAD = {"format": "bi-reload address ledger 1"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": "another", "tensors": {}}),
        json.dumps(HEAD | {"tensors": {"w": {}}}),
        json.dumps(HEAD | {"tensors": {"w": ENTRY | {"shape": 3}}}),
        json.dumps(HEAD | {"tensors": [1]}),
    ],
)
def test_command_refuses_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    AddressLedger({}).save(good)
    bad.write_text(text)
    assert main([str(good), str(bad)]) == 2
    assert "AddressLedger.save" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), str(good)]) == 2
