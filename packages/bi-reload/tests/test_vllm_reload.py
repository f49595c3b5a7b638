"""The reload hooks on a vLLM in small: whole updates keep addresses and bits, all else is refused with the list."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_layerwise as fake
import pytest
import torch
from torch import nn

from bi_kernels.runtime.errors import ArgumentError, ReloadError
from bi_kernels.testing import assert_bitwise_equal
from bi_reload import AddressLedger, AddressMovedError, vllm_reload, weight_fingerprint
from bi_reload.addresses import main as addresses_command
from bi_reload.reference.mhc_broadcast import mhc_broadcast


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch)


@pytest.fixture
def finalized(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Every call of the model's finaliser."""
    calls: list[nn.Module] = []
    method = fake.ForCausalLM.finalize_weights_after_layerwise_reload  # type: ignore[attr-defined]

    def counted(self: nn.Module) -> Any:
        calls.append(self)
        return method(self)

    monkeypatch.setattr(fake.ForCausalLM, "finalize_weights_after_layerwise_reload", counted)
    return calls


def everything(worker: fake.Worker) -> dict[str, torch.Tensor]:
    """All that a forward pass reads."""
    model: Any = worker.model
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors["broadcast"] = model.model.layers[0].hc_attn_fn_broadcast
    for i, layer in enumerate(model.model.layers):
        kernel = layer.experts.quant_method.kernel
        tensors |= {f"{i}.kernel.scale": kernel.scale, f"{i}.kernel.derived": kernel.derived}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def assert_equals_cold(worker: fake.Worker, seed: int) -> None:
    cold = everything(fake.start(seed))
    warm = everything(worker)
    assert warm.keys() == cold.keys()
    for name, tensor in warm.items():
        assert_bitwise_equal(tensor, cold[name], name)


def from_iterator(worker: fake.Worker, seed: int) -> None:
    worker.reload_weights(weights_iterator=iter(fake.checkpoint(seed).items()))


def in_buckets(worker: fake.Worker, seed: int, size: int = 1) -> None:
    worker.start_weight_update()
    items = list(fake.checkpoint(seed).items())[::-1]  # hc_attn_fn of layer 0 comes late
    for at in range(0, len(items), size):
        worker.update_weights(items[at : at + size])
    worker.finish_weight_update()


def in_kernel_format(worker: fake.Worker, seed: int) -> None:
    cold = {name: p.detach().clone() for name, p in fake.start(seed).model.named_parameters()}
    worker.reload_weights(weights_iterator=iter(cold.items()), is_checkpoint_format=False)


@pytest.mark.parametrize("send", [from_iterator, in_buckets, in_kernel_format])
def test_a_whole_update_keeps_addresses_and_equals_a_cold_start(send: Any, finalized: list[nn.Module]) -> None:
    """B66, B68, B69, B75, B79: A, B, A and A again; the finaliser once per update, after the last bucket."""
    worker = fake.start(1)
    ledger = AddressLedger().record(worker.model)
    for done, seed in enumerate((2, 1, 1), 1):
        send(worker, seed)
        assert len(finalized) == done
        if send is in_kernel_format:  # helpers that are derived from weights are not part of this format
            assert_bitwise_equal(
                everything(worker)["broadcast"], mhc_broadcast(fake.checkpoint(seed)["layers.0.hc_attn_fn"])
            )
        else:
            assert_equals_cold(worker, seed)
        ledger.verify(worker.model)
        report = vllm_reload.reload_report(worker)
        assert report is not None
        assert report.refreshed == ("model.layers.0.hc_attn_fn_broadcast",)
        assert worker.execute_model(None) == "tokens"
    sink = worker.model.get_parameter("model.layers.1.attn.attn_sink")
    assert_bitwise_equal(sink[: fake.HEADS].detach(), fake.checkpoint(1)["layers.1.attn.attn_sink"])
    assert (sink[fake.HEADS :] == -math.inf).all()
    assert worker.model.get_buffer("model.layers.0.attn.table").item() == 0.018798828125  # B73


def test_without_the_hooks_the_same_update_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: vLLM's own functions keep the old sinks and move the broadcast."""
    worker = fake.start(1)
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, fake.RELOAD, fake)
    ledger = AddressLedger().record(worker.model)
    old = everything(worker)["model.layers.0.attn.attn_sink"].clone()
    items = list(fake.checkpoint(2).items())
    worker.start_weight_update()
    worker.update_weights(items)
    worker.finish_weight_update()
    assert_bitwise_equal(everything(worker)["model.layers.0.attn.attn_sink"], old)
    moved = {difference.name for difference in ledger.diff(worker.model)}
    assert "model.layers.0.hc_attn_fn_broadcast" in moved
    assert "model.layers.0.experts.quant_method.kernel.derived" in moved


def changed(seed: int = 2, **changes: Any) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = fake.checkpoint(seed)
    for name, change in changes.items():
        name = name.replace("__", ".")
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors.get(name))
    return iter(tensors.items())


def bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16()


FAULTS = {
    "unknown name": ({"layers__7__hc_attn_fn": lambda _: torch.zeros(1)}, ["layers.7.hc_attn_fn: unknown"]),
    "missing name": ({"layers__1__experts__scale": None}, ["layers.1.experts.scale: missing, 3 elements"]),
    "missing sinks": ({"layers__0__attn__attn_sink": None}, ["layers.0.attn.attn_sink: missing, 12 elements"]),
    "sinks cast on the wire (B72)": ({"layers__1__attn__attn_sink": bf16}, ["float32[12], got bfloat16[12]"]),
    "mHC cast on the wire": ({"layers__0__hc_attn_fn": bf16}, ["layers.0.hc_attn_fn: expected float32[24, 16]"]),
    "kernel layout in checkpoint format (B81)": (
        {"layers__0__experts__weight": lambda t: t.t()},
        ["layers.0.experts.weight: expected bfloat16[3, 4], got bfloat16[4, 3]"],
    ),
    "source disposed (B84)": ({"head__weight": lambda t: t[:0]}, ["head.weight: expected bfloat16[6, 4]"]),
    "meta": ({"head__weight": lambda t: t.to("meta")}, ["head.weight: is on the meta device"]),
    "several, all listed (B83)": (
        {"layers__0__hc_attn_fn": bf16, "extra": lambda _: torch.zeros(1)},
        ["layers.0.hc_attn_fn: expected", "extra: unknown"],
    ),
}


@pytest.mark.parametrize(("changes", "words"), FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("bucketed", [False, True], ids=["iterator", "buckets"])
def test_what_does_not_fit_is_refused_and_the_engine_with_it(changes: Any, words: list[str], bucketed: bool) -> None:
    worker = fake.start(1)
    ledger = AddressLedger().record(worker.model)

    def send() -> None:
        if bucketed:
            worker.start_weight_update()
            worker.update_weights(changed(**changes))
            worker.finish_weight_update()
        else:
            worker.reload_weights(weights_iterator=changed(**changes))

    with pytest.raises(ReloadError) as caught:
        send()
    for word in words:
        assert word in str(caught.value)
    steps = worker.steps
    if "head__weight" not in changes:  # otherwise the first tensor was refused, and nothing was written
        with pytest.raises(ReloadError, match="must not be served: a reload failed"):
            worker.execute_model(None)
        assert worker.steps == steps
    else:
        worker.execute_model(None)
        assert_equals_cold(worker, 1)
    ledger.verify(worker.model)
    from_iterator(worker, 2)
    assert worker.execute_model(None) == "tokens"
    assert_equals_cold(worker, 2)
    ledger.verify(worker.model)


def test_lifecycle_half_finished_nested_and_repeated() -> None:
    """B77."""
    worker = fake.start(1)
    items = list(fake.checkpoint(2).items())
    worker.start_weight_update()
    with pytest.raises(ReloadError, match="no open update"):
        worker.start_weight_update()
    with pytest.raises(ReloadError, match="no open update"):
        worker.reload_weights(weights_iterator=iter(items))
    worker.update_weights(items[:4])
    with pytest.raises(ReloadError, match="in progress"):
        worker.execute_model(None)
    with pytest.raises(ReloadError, match=r"came before"):
        worker.update_weights(items[2:])
    with pytest.raises(RuntimeError, match="not active"):
        worker.finish_weight_update()
    with pytest.raises(ReloadError, match="must not be served"):
        worker.execute_model(None)
    in_buckets(worker, 2, size=3)
    assert_equals_cold(worker, 2)


def test_half_finished_update_can_be_started_again() -> None:
    worker = fake.start(1)
    worker.start_weight_update()
    worker.update_weights(list(fake.checkpoint(2).items())[:5])
    with pytest.raises(ReloadError, match=r"the update is not whole \(4\)"):
        worker.finish_weight_update()
    assert worker.weight_transfer_engine.resets == 1
    with pytest.raises(ReloadError, match="must not be served"):
        worker.execute_model(None)
    in_buckets(worker, 2)
    assert_equals_cold(worker, 2)


def test_a_stream_that_breaks_leaves_the_engine_refusing() -> None:
    worker = fake.start(1)

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(fake.checkpoint(2).items())[:6]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        worker.reload_weights(weights_iterator=breaking())
    with pytest.raises(ReloadError, match="the trainer is gone"):
        worker.execute_model(None)
    from_iterator(worker, 1)
    assert_equals_cold(worker, 1)


def test_begun_again_by_somebody_else_half_way() -> None:
    """B71, B77: layers that were opened twice lack elements although every name came."""
    worker = fake.start(1)
    items = list(fake.checkpoint(2).items())
    worker.start_weight_update()
    worker.update_weights(items[:5])
    fake.initialize(worker.model)
    worker.update_weights(items[5:])
    with pytest.raises(
        ReloadError, match=r"model\.layers\.0\.experts: 15 of 15 elements did not come \(weight, scale\)"
    ):
        worker.finish_weight_update()
    from_iterator(worker, 2)
    assert_equals_cold(worker, 2)


def test_loading_past_the_reload_is_refused() -> None:
    """B81: the parameters have the kernels' layout by now."""
    worker = fake.start(1)
    with pytest.raises(ReloadError, match="open layerwise reload"):
        worker.model.load_weights(fake.checkpoint(2).items())  # type: ignore[operator]
    assert_equals_cold(worker, 1)


def test_vllms_own_functions_without_the_worker(finalized: list[nn.Module]) -> None:
    """A framework may call them itself; it gets the same checks."""
    worker = fake.start(1)
    layerwise = vllm_reload._layerwise()
    fake.initialize(worker.model)
    for item in fake.checkpoint(2).items():
        worker.model.load_weights([item])  # type: ignore[operator]
    layerwise.finalize_layerwise_processing(worker.model, None)
    assert len(finalized) == 1
    assert_equals_cold(worker, 2)
    fake.initialize(worker.model)
    worker.model.load_weights(list(fake.checkpoint(1).items())[:3])  # type: ignore[operator]
    with pytest.raises(ReloadError, match=r"not whole \(6\)"):
        layerwise.finalize_layerwise_processing(worker.model, None)
    with pytest.raises(ReloadError, match="must not be served"):
        worker.execute_model(None)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda w: w | {"nowhere": torch.zeros(1)}, "nowhere: unknown"),
        (lambda w: {k: v for k, v in w.items() if "sink" not in k}, "attn_sink: missing, 16 elements"),
        (lambda w: w | {"lm_head.weight": w["lm_head.weight"].float()}, "got float32[6, 4]"),
        (lambda w: w | {"lm_head.weight": w["lm_head.weight"].to("meta")}, "on the meta device"),
    ],
)
def test_kernel_format_is_checked(change: Any, word: str) -> None:
    worker = fake.start(1)
    weights = {name: p.detach().clone() for name, p in fake.start(2).model.named_parameters()}
    with pytest.raises(ReloadError) as caught:
        worker.reload_weights(weights_iterator=iter(change(weights).items()), is_checkpoint_format=False)
    assert word in str(caught.value)
    with pytest.raises(ReloadError, match="expected an iterator"):
        worker.reload_weights(is_checkpoint_format=False)


def test_a_destination_whose_memory_was_given_away() -> None:
    """B84."""
    worker = fake.start(1)
    weights = {name: p.detach().clone() for name, p in fake.start(2).model.named_parameters()}
    worker.model.get_parameter("lm_head.weight").data = torch.zeros(0, fake.HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(ReloadError, match=r"lm_head\.weight: the live tensor has 0 elements"):
        worker.reload_weights(weights_iterator=iter(weights.items()), is_checkpoint_format=False)


def test_a_tensor_that_moved_since_capture_is_named() -> None:
    """B75, B76: graphs read the old address, so that the update must not count as whole."""
    worker = fake.start(1)
    held = worker.model.model.layers[0].hc_attn_fn_broadcast  # type: ignore[union-attr, index]
    worker.model.model.layers[0].hc_attn_fn_broadcast = held.clone()  # type: ignore[union-attr, index]
    with pytest.raises(AddressMovedError, match="hc_attn_fn_broadcast: moved"):
        from_iterator(worker, 2)
    with pytest.raises(ReloadError, match="must not be served"):
        worker.execute_model(None)


def test_a_helper_of_another_shape_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = fake.start(1)

    class Wider(fake.Kernel):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__(layer)
            self.derived = torch.zeros(3, 3)

    monkeypatch.setattr(fake, "Kernel", Wider)
    with pytest.raises(AddressMovedError, match=r"experts\.quant_method\.kernel\.derived: moved and shape"):
        from_iterator(worker, 2)


def test_an_engine_that_writes_past_the_reload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = fake.start(1)
    monkeypatch.setattr(fake.Engine, "layerwise", False)
    with pytest.raises(ReloadError, match="Engine: expected a transfer engine that reloads layer by layer"):
        worker.start_weight_update()
    assert not worker._weight_update_active
    assert worker.execute_model(None) == "tokens"


def test_another_model_keeps_vllms_own_lifecycle() -> None:
    worker = fake.Worker(nn.Linear(2, 2, bias=False).requires_grad_(False))
    assert worker.compile_or_warm_up_model() == "times"
    worker.reload_weights(weights_iterator=iter({"weight": torch.ones(2, 2)}.items()), is_checkpoint_format=False)
    assert_bitwise_equal(worker.model.get_parameter("weight").detach(), torch.ones(2, 2))
    assert worker.execute_model(None) == "tokens"
    assert vllm_reload._STATE not in vars(worker.model)


def test_fingerprints_tell_updates_apart() -> None:
    one, two = fake.start(1), fake.start(2)
    assert vllm_reload.live_fingerprints(one) != vllm_reload.live_fingerprints(two)
    from_iterator(one, 2)
    assert vllm_reload.live_fingerprints(one) == vllm_reload.live_fingerprints(two)
    assert "model.layers.0.hc_attn_fn_broadcast" in vllm_reload.live_fingerprints(one)


def test_announced_fingerprints_find_what_changed_on_the_way() -> None:
    """B83: equal on both sides, tensor by tensor, and only for the update that they were announced for."""
    worker = fake.start(1)
    sent = weight_fingerprint(fake.checkpoint(2))
    vllm_reload.announce_fingerprints(worker, sent)
    in_buckets(worker, 2)
    assert_equals_cold(worker, 2)
    vllm_reload.announce_fingerprints(worker, sent)
    name = "layers.1.experts.weight"
    flipped = fake.checkpoint(2)[name].view(torch.int16) ^ 1
    changes = {name.replace(".", "__"): lambda _: flipped.view(torch.bfloat16)}
    with pytest.raises(ReloadError, match=rf"{name}: expected fingerprint 0x.*changed on the way"):
        worker.reload_weights(weights_iterator=changed(**changes))
    from_iterator(worker, 1)
    assert_equals_cold(worker, 1)


def test_ledgers_of_a_worker_are_saved(tmp_path: Path) -> None:
    worker = fake.start(1)
    before, after = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    vllm_reload.save_addresses(worker, before, captured=True)
    in_buckets(worker, 2)
    vllm_reload.save_addresses(worker, after)
    assert addresses_command([before, after]) == 0
    with pytest.raises(ReloadError, match="Warm up first"):
        vllm_reload.save_addresses(fake.Worker(fake.ForCausalLM()), before, captured=True)


def sink_model(kind: str) -> Any:
    model = fake.InnerModel()
    if kind == "mtp":
        model._rewrite_spec_layer_name = lambda layer, name: name.replace(f"model.layers.{layer}.", "layers.1.")
    elif kind == "dspark":
        model._remap_dspark_name = lambda name: name.replace("mtp.0.", "layers.1.") if "mtp." in name else None
    return model


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_sinks_of_draft_models_take_the_same_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sink_model(kind)
    sinks = torch.randn(fake.HEADS)
    monkeypatch.setattr(fake.InnerModel, "config", None, raising=False)
    loaded = model.load_weights([("mtp.0.attn.attn_sink", sinks)])
    assert loaded == {"layers.1.attn.attn_sink"}
    assert_bitwise_equal(model.layers[1].attn.attn_sink[: fake.HEADS].detach(), sinks)
    assert (model.layers[1].attn.attn_sink[fake.HEADS :] == -math.inf).all()


def test_sinks_of_a_rank_and_of_a_wrong_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    distributed = sys.modules["vllm.distributed"]
    monkeypatch.setattr(distributed, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(distributed, "get_tensor_model_parallel_rank", lambda: 1)
    model = fake.InnerModel()
    sinks = torch.randn(fake.HEADS)
    model.load_weights([("layers.0.attn.attn_sink", sinks)])
    assert_bitwise_equal(model.layers[0].attn.attn_sink[:6].detach(), sinks[6:])
    assert (model.layers[0].attn.attn_sink[6:] == -math.inf).all()
    with pytest.raises(ArgumentError, match="loaded"):
        model.load_weights([("layers.0.attn.attn_sink", sinks.bfloat16())])
    with pytest.raises(ReloadError, match="no"):
        model.load_weights([("layers.9.attn.attn_sink", sinks)])
