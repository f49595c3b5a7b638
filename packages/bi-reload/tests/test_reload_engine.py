"""The engine proof's own script, played through on vLLM in small: what it records there is what it must prove."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_layerwise as fake
import pytest
import torch

from bi_reload import AddressLedger


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("reload_engine", Path(__file__).with_name("reload_engine.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fake.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        module, "tensors_of", lambda directory, device: iter(fake.checkpoint(int(directory.name)).items())
    )
    reload_weights = fake.Worker.reload_weights

    def from_disk(self: Any, weights_iterator: Any = None, weights_path: Any = None, **other: Any) -> None:
        tensors = weights_iterator if weights_path is None else module.tensors_of(Path(weights_path), "cpu")
        reload_weights(self, weights_iterator=tensors, **other)

    monkeypatch.setattr(fake.Worker, "reload_weights", from_disk)
    return module


def play(script: ModuleType, role: str, folder: Path) -> dict[str, Any]:
    a, b = folder / "1", folder / "2"
    for directory in (a, b):
        directory.mkdir(exist_ok=True)
    engine = object.__new__(script.Engine)
    engine.record, engine.output = {}, folder / f"{role}.json"
    engine.worker = fake.start(2 if role == "cold" else 1)
    engine.worker.model_config = None
    engine.model = engine.worker.model
    engine.llm = SimpleNamespace(
        llm_engine=SimpleNamespace(
            output_processor=SimpleNamespace(request_states={}), abort_request=lambda ids, internal: None
        )
    )

    def generate() -> dict[str, Any]:
        engine.worker.execute_model(None)
        bits = [int(tensor.detach().float().nan_to_num(neginf=0.0).sum() * 1e6) for tensor in engine.model.parameters()]
        return {what: [bits] for what in ("tokens", "logprobs", "prompt_logprobs", "logits")}

    engine.generate = generate
    script.ROLES[role](engine, a, b)
    return dict(engine.record)


def test_warm_and_cold_on_vllm_in_small(script: ModuleType, tmp_path: Path) -> None:
    layerwise: Any = sys.modules["vllm.model_executor.model_loader.reload"]
    layerwise.initialize_layerwise_reload = fake.initialize
    layerwise.finalize_layerwise_reload = lambda model, config: layerwise.layerwise.finalize_layerwise_processing(
        model, config
    )
    warm, cold = play(script, "warm", tmp_path), play(script, "cold", tmp_path)
    for name, step in warm.items():
        failed = isinstance(step, dict) and "error" in step
        assert failed == (name in ("failed reload", "serving after it")), (name, step)
        if name.startswith("addresses"):
            assert (step["count"], step["moved"]) == (0, [])
    for again in ("B", "B repeated", "B in kernel format", "B after the failure"):
        assert warm[again] == cold["B"], again
    assert warm["A"] == warm["A repeated"] == warm["A again"] != warm["B"]
    assert warm["fingerprints of B"] == warm["fingerprints of B again"] == cold["fingerprints of B"]
    assert warm["failed reload"]["error"].startswith("ConnectionError")
    assert warm["serving after it"]["error"].startswith("ReloadError: the model must not be served")
    assert warm["sinks"] == cold["sinks"]
    assert (tmp_path / "warm.json").is_file()


def test_differences_are_counted_and_named(script: ModuleType) -> None:
    tensors = {"kept": torch.zeros(1), "moved": torch.zeros(1)}
    ledger = AddressLedger().record(tensors)
    found = script.differences(ledger, tensors | {"moved": torch.zeros(1)})
    assert (found["tensors"], found["count"]) == (2, 1)
    assert found["moved"][0].startswith("moved: moved")
