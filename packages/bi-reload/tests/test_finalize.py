from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from bi_kernels.runtime.errors import ReloadError
from bi_kernels.testing import assert_bitwise_equal
from bi_reload import (
    AddressLedger,
    AddressMovedError,
    LayerwiseReload,
    TensorSpec,
    finalize_weights_after_layerwise_reload,
    load_attn_sink_,
    refresh_mhc_broadcast_,
    require_servable,
    weight_fingerprint,
)
from bi_reload.addresses import reachable_tensors

HEADS, PADDED, HIDDEN = 12, 16, 4


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Router(nn.Module):
    """Weights of which another tensor is derived by the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = frozen(torch.zeros(6))
        self.weight = frozen(torch.zeros(6, HIDDEN, dtype=torch.bfloat16))
        self.register_buffer("tid2eid", torch.zeros(5, 2, dtype=torch.int64))
        self.register_buffer("steps", torch.tensor([0.018798828125]), persistent=False)
        self.negated = torch.zeros(6)
        self.refreshes = 0

    def refresh_derived_weights_(self) -> Iterable[str]:
        self.refreshes += 1
        torch.neg(self.bias, out=self.negated)
        return ["negated"]


class Layer(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.hc_attn_fn = frozen(torch.zeros(24, 4 * HIDDEN))
        self.hc_attn_fn_broadcast = torch.zeros(24, HIDDEN) if first else None
        self.attn_sink = frozen(torch.full((PADDED,), -math.inf))
        self.attn_sink.weight_loader = lambda param, loaded: load_attn_sink_(param, loaded, num_heads=HEADS)  # type: ignore[attr-defined]
        self.weight = frozen(torch.zeros(8, 8, dtype=torch.float8_e4m3fn))
        self.weight_scale_inv = frozen(torch.zeros(1, 1))
        self.router = Router()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(first=True), Layer(first=False)])
        self.head = nn.Linear(HIDDEN, 3, bias=False).requires_grad_(False)


def update(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    tensors = {"head.weight": torch.randn(3, HIDDEN, generator=g)}
    for i in range(2):
        tensors |= {
            f"layers.{i}.hc_attn_fn": torch.randn(24, 4 * HIDDEN, generator=g),
            f"layers.{i}.attn_sink": torch.randn(HEADS, generator=g),
            f"layers.{i}.weight": torch.randn(8, 8, generator=g).to(torch.float8_e4m3fn),
            f"layers.{i}.weight_scale_inv": torch.rand(1, 1, generator=g),
            f"layers.{i}.router.bias": torch.randn(6, generator=g) + 3,
            f"layers.{i}.router.weight": torch.randn(6, HIDDEN, generator=g).bfloat16(),
            f"layers.{i}.router.tid2eid": torch.randint(6, (5, 2), generator=g),
        }
    return tensors


def manifest(tensors: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    return {name: TensorSpec.of(tensor) for name, tensor in (tensors or update(0)).items()}


def load(model: nn.Module, tensors: dict[str, torch.Tensor], *, order: int = 0) -> Any:
    """One whole reload, in three buckets of an awkward order."""
    names = list(tensors)
    shuffled = [names[i] for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(order)).tolist()]
    reload = LayerwiseReload(model, manifest(tensors))
    reload.begin()
    for bucket in (shuffled[:1], shuffled[1:11], shuffled[11:]):
        reload.load_bucket({name: tensors[name] for name in bucket})
    return reload.finish(fingerprints=True)


def everything(model: Model) -> dict[str, torch.Tensor]:
    """Every tensor of the model by the name the ledger has for it, cloned."""
    return {name: tensor.detach().clone() for name, tensor in reachable_tensors(model)}


def assert_same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert_bitwise_equal(have[name], tensor, name)


def test_a_reload_loads_everything_in_place() -> None:
    model = Model()
    ledger = AddressLedger().record(model)
    tensors = update(1)
    report = load(model, tensors)
    ledger.verify(model)
    for i, layer in enumerate(model.layers):
        assert_bitwise_equal(layer.attn_sink[:HEADS], tensors[f"layers.{i}.attn_sink"])
        assert (layer.attn_sink[HEADS:] == -math.inf).all()
        assert_bitwise_equal(layer.router.negated, -tensors[f"layers.{i}.router.bias"])
        assert layer.router.steps.item() == 0.018798828125  # B73: a non-persistent buffer is nobody's to load
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        if not name.endswith("attn_sink"):
            assert_bitwise_equal(live[name].detach(), tensor, name)
    want = torch.empty(24, HIDDEN)
    refresh_mhc_broadcast_(want, tensors["layers.0.hc_attn_fn"])
    assert_bitwise_equal(model.layers[0].hc_attn_fn_broadcast, want)
    assert report.refreshed == ("layers.0.hc_attn_fn_broadcast", "layers.0.router.negated", "layers.1.router.negated")
    assert report.moved == ()
    assert report.tensors_checked == len(ledger)
    require_servable(model)


def test_fingerprints_are_equal_on_both_sides() -> None:
    tensors = update(1)
    report = load(Model(), tensors)
    sent = weight_fingerprint({n: t for n, t in tensors.items() if not n.endswith("attn_sink")})  # sinks are padded
    assert sent.items() <= report.fingerprints.items()
    assert "layers.0.hc_attn_fn_broadcast" in report.fingerprints
    assert load(Model(), tensors, order=3).fingerprints == report.fingerprints
    assert load(Model(), update(2)).fingerprints["head.weight"] != report.fingerprints["head.weight"]


def test_the_same_weights_again_change_no_byte() -> None:
    """B79: A -> A."""
    model = Model()
    load(model, update(1))
    before = everything(model)
    load(model, update(1), order=5)
    assert_same(everything(model), before)


def test_back_to_the_old_weights_and_warm_equals_cold() -> None:
    """B79: A -> B -> A, and warm B equals cold B."""
    warm, cold = Model(), Model()
    ledger = AddressLedger().record(warm)
    load(warm, update(1))
    a = everything(warm)
    load(warm, update(2), order=1)
    load(cold, update(2), order=2)
    assert_same(everything(warm), everything(cold))
    load(warm, update(1), order=3)
    assert_same(everything(warm), a)
    ledger.verify(warm)


def test_derived_weights_are_refreshed_once_after_the_last_bucket() -> None:
    """B69: two buckets, the projection in the second."""
    model = Model()
    tensors = update(1)
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    last = "layers.0.hc_attn_fn"
    reload.load_bucket({n: t for n, t in tensors.items() if n != last})
    assert model.layers[0].router.refreshes == 0
    with pytest.raises(ReloadError, match="still open"):
        finalize_weights_after_layerwise_reload(model)
    reload.load_bucket({last: tensors[last]})
    assert (model.layers[0].hc_attn_fn_broadcast == 0).all()
    reload.finish()
    assert model.layers[0].router.refreshes == 1
    assert (model.layers[0].hc_attn_fn_broadcast != 0).any()


def test_one_object_serves_many_updates() -> None:
    model = Model()
    reload = LayerwiseReload(model, manifest())
    for seed in (1, 2):
        reload.begin()
        reload.load_bucket(update(seed))
        reload.finish()
    other = Model()
    load(other, update(2))
    assert everything(model).keys() == everything(other).keys()
    assert_bitwise_equal(model.layers[0].hc_attn_fn_broadcast, other.layers[0].hc_attn_fn_broadcast)


def test_manifest_may_be_plain_pairs_and_keep_names() -> None:
    model = Model()
    tensors = update(1)
    del tensors["head.weight"]
    reload = LayerwiseReload(model, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, keep=["head.weight"])
    before = model.head.weight.detach().clone()
    reload.begin()
    reload.load_bucket({})
    reload.load_bucket(tensors)
    reload.finish()
    assert_bitwise_equal(model.head.weight.detach(), before)


def test_kernel_layout_goes_past_the_loader() -> None:
    model = Model()
    tensors = update(1)
    for i in range(2):
        tensors[f"layers.{i}.attn_sink"] = torch.randn(PADDED)
    specs = {name: TensorSpec.of(tensor, "kernel") for name, tensor in tensors.items()}
    reload = LayerwiseReload(model, specs)
    reload.begin()
    reload.load_bucket(tensors)
    reload.finish()
    assert_bitwise_equal(model.layers[1].attn_sink.detach(), tensors["layers.1.attn_sink"])
    wrong = specs | {"layers.1.attn_sink": TensorSpec(torch.float32, (HEADS,), "kernel")}
    with pytest.raises(ReloadError, match=r"layers\.1\.attn_sink: expected the live tensor's shape"):
        LayerwiseReload(model, wrong).begin()


def _loaded(seed: int = 1) -> tuple[Model, dict[str, torch.Tensor]]:
    model = Model()
    load(model, update(seed))
    return model, everything(model)


def test_begin_lists_everything_that_does_not_fit() -> None:
    """B72, B81, B83, B84 against the live model, before anything is written."""
    model, before = _loaded()
    specs = manifest()
    specs["layers.7.weight"] = specs["layers.0.weight"]
    specs["layers.0.router.steps"] = TensorSpec(torch.float32, (1,))
    specs["layers.0.router.bias"] = TensorSpec(torch.bfloat16, (6,))
    specs["head.weight"] = TensorSpec(torch.float32, (HIDDEN, 3))
    del specs["layers.1.weight"], specs["layers.1.router.tid2eid"]
    reload = LayerwiseReload(model, specs, keep=["nothing"])
    with pytest.raises(ReloadError) as caught:
        reload.begin()
    text = str(caught.value)
    assert "(7)" in text
    assert "layers.7.weight: unknown" in text
    assert "layers.0.router.steps: unknown" in text
    assert "nothing: unknown" in text
    assert "layers.0.router.bias: expected the live tensor's dtype (float32[6]), got bfloat16[6]" in text
    assert "head.weight: expected the live tensor's shape" in text
    assert "layers.1.weight: missing from the manifest (64 elements" in text
    assert "layers.1.router.tid2eid: missing" in text
    assert_same(everything(model), before)
    require_servable(model)
    with pytest.raises(ReloadError, match="begin"):
        reload.load_bucket({})


def test_begin_refuses_destinations_without_memory() -> None:
    """B84: a source that was disposed of after absorption; B69: a layer still on the meta device."""
    model = Model()
    model.head.weight.data = torch.empty(0)
    model.layers[0].weight_scale_inv = frozen(torch.zeros(1, 1, device="meta"))
    model.layers[1].attn_sink.data = torch.empty(0)
    with pytest.raises(ReloadError) as caught:
        LayerwiseReload(model, manifest()).begin()
    assert "head.weight: the live tensor has 0 elements" in str(caught.value)
    assert "layers.1.attn_sink: the live tensor has 0 elements" in str(caught.value)
    assert "layers.0.weight_scale_inv: the live tensor is on the meta device" in str(caught.value)


def test_one_tensor_under_two_names_is_sent_once() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "head": nn.Linear(4, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    spec = TensorSpec(torch.float32, (3, 4))
    with pytest.raises(ReloadError, match=r"embed\.weight and head\.weight: one tensor under two names"):
        LayerwiseReload(model, {"embed.weight": spec, "head.weight": spec}).begin()
    for name in ("embed.weight", "head.weight"):
        reload = LayerwiseReload(model, {name: spec})
        reload.begin()
        reload.load_bucket({name: torch.full((3, 4), 2.0)})
        reload.finish()


def test_nested_and_repeated_begin_are_refused() -> None:
    """B77: begin once per update, not once per bucket."""
    model = Model()
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    reload.load_bucket({"head.weight": update(1)["head.weight"]})
    with pytest.raises(ReloadError, match="not once per bucket"):
        reload.begin()
    with pytest.raises(ReloadError, match="not once per bucket"):
        LayerwiseReload(model, manifest()).begin()
    rest = {n: t for n, t in update(1).items() if n != "head.weight"}
    reload.load_bucket(rest)  # the open reload has lost nothing
    reload.finish()
    with pytest.raises(ReloadError, match=r"finish: .*closed"):
        reload.finish()
    with pytest.raises(ReloadError, match=r"load_bucket: .*closed"):
        reload.load_bucket(rest)
    with pytest.raises(ReloadError, match=r"abort: .*closed"):
        reload.abort()


BAD_BUCKETS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"layers.7.weight": torch.zeros(8, 8)}, r"layers\.7\.weight: unknown, not in the manifest"),
    "bias in bfloat16": (
        {"layers.0.router.bias": torch.zeros(6).bfloat16()},
        r"layers\.0\.router\.bias: expected float32\[6\], got bfloat16\[6\]",
    ),
    "shape": ({"head.weight": torch.zeros(HIDDEN, 3)}, r"head\.weight: expected float32\[3, 4\], got float32\[4, 3\]"),
    "sparse": ({"head.weight": torch.zeros(3, HIDDEN).to_sparse()}, r"head\.weight: expected .*sparse"),
    "meta": ({"head.weight": torch.zeros(3, HIDDEN, device="meta")}, r"head\.weight: is on the meta device"),
    "no tensor": ({"head.weight": [1.0]}, r"head\.weight: expected a tensor, got list"),
    "twice": ({"layers.0.attn_sink": torch.zeros(HEADS)}, r"layers\.0\.attn_sink: came before"),
}


@pytest.mark.parametrize("case", BAD_BUCKETS)
def test_a_bad_bucket_writes_nothing_and_the_reload_goes_on(case: str) -> None:
    model, _ = _loaded()
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    tensors = update(2)
    reload.load_bucket({"layers.0.attn_sink": tensors.pop("layers.0.attn_sink")})
    before = everything(model)
    bad, message = BAD_BUCKETS[case]
    good = {"layers.1.weight": tensors["layers.1.weight"]}  # first, so that only checking everything first keeps it out
    with pytest.raises(ReloadError, match=message):
        reload.load_bucket(good | bad)
    assert_same(everything(model), before)
    reload.load_bucket(tensors)
    reload.finish()
    cold = Model()
    load(cold, update(2))
    for name, tensor in cold.named_parameters():
        assert_bitwise_equal(dict(model.named_parameters())[name].detach(), tensor.detach(), name)


def test_every_fault_of_a_bucket_is_listed() -> None:
    reload = LayerwiseReload(Model(), manifest())
    reload.begin()
    with pytest.raises(ReloadError) as caught:
        reload.load_bucket({"x": torch.zeros(1), "y": torch.zeros(1), "head.weight": torch.zeros(1)})
    assert "(3)" in str(caught.value)
    assert all(f"  {name}: " in str(caught.value) for name in ("x", "y", "head.weight"))


def test_a_bucket_that_changed_on_its_way_is_refused() -> None:
    model, tensors = Model(), update(1)
    prints = weight_fingerprint(tensors)
    reload = LayerwiseReload(model, {n: TensorSpec.of(t, fingerprint=prints[n]) for n, t in tensors.items()})
    reload.begin()
    before = weight_fingerprint(dict(model.named_parameters()))
    damaged = tensors["head.weight"].clone()
    damaged.view(torch.int32)[1, 2] ^= 1
    with pytest.raises(ReloadError, match=r"head\.weight: its bytes changed on their way"):
        reload.load_bucket(tensors | {"head.weight": damaged})
    assert weight_fingerprint(dict(model.named_parameters())) == before
    reload.load_bucket(tensors)
    reload.finish()
    require_servable(model)


def test_a_bucket_of_the_models_own_memory_is_refused() -> None:
    model, before = _loaded()
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    own = model.layers[1].hc_attn_fn.data
    with pytest.raises(ReloadError, match=r"layers\.0\.hc_attn_fn: shares memory with the model's own layers\.1"):
        reload.load_bucket({"layers.0.hc_attn_fn": own})
    assert_same(everything(model), before)


def test_destinations_that_moved_or_left_since_begin_are_refused() -> None:
    """B81: the kernel's set-up replaced a parameter behind the reload's back."""
    model = Model()
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    old, kept = model.head.weight, model.head.weight.clone()
    model.head.weight = frozen(torch.zeros(3, HIDDEN))
    del model.layers[0].weight_scale_inv
    tensors = update(1)
    with pytest.raises(ReloadError) as caught:
        reload.load_bucket({n: tensors[n] for n in ("head.weight", "layers.0.weight_scale_inv")})
    assert "head.weight: the live tensor moved since begin" in str(caught.value)
    assert "layers.0.weight_scale_inv: is gone from the model since begin" in str(caught.value)
    assert_bitwise_equal(old, kept)
    assert (model.head.weight == 0).all()


def test_missing_tensors_are_listed_per_module_and_can_still_be_sent() -> None:
    """B71, B83."""
    model = Model()
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    tensors = update(1)
    late = ["layers.0.attn_sink", "layers.0.weight", "layers.1.router.bias", "head.weight"]
    reload.load_bucket({n: t for n, t in tensors.items() if n not in late})
    with pytest.raises(ReloadError) as caught:
        reload.finish()
    text = str(caught.value)
    assert "4 did not come" in text
    assert "layers.0: 2 tensors, 76 elements: attn_sink, weight" in text
    assert "layers.1.router: 1 tensors, 6 elements: bias" in text
    assert "head: 1 tensors, 12 elements: weight" in text
    assert model.layers[0].router.refreshes == 0
    with pytest.raises(ReloadError, match="must not be served"):
        require_servable(model)
    reload.load_bucket({name: tensors[name] for name in late})
    reload.finish()
    require_servable(model)


def test_a_half_finished_reload_is_not_servable_until_a_whole_one_succeeds() -> None:
    model, _ = _loaded()
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    with pytest.raises(ReloadError, match="in progress"):
        require_servable(model)
    reload.load_bucket({"head.weight": update(2)["head.weight"]})
    reload.abort()
    with pytest.raises(ReloadError, match=r"must not be served: .*half-way"):
        require_servable(model)
    untouched = LayerwiseReload(model, manifest())
    untouched.begin()
    untouched.abort()
    with pytest.raises(ReloadError, match=r"must not be served: .*half-way"):
        require_servable(model)  # an abort without harm does not heal
    load(model, update(2))
    require_servable(model)


def test_nothing_may_be_kept_after_a_failed_reload() -> None:
    model, _ = _loaded()
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    reload.load_bucket({"head.weight": update(2)["head.weight"]})
    reload.abort()
    tensors = update(1)
    del tensors["head.weight"]
    with pytest.raises(ReloadError, match=r"head\.weight: may not be kept"):
        LayerwiseReload(model, manifest(tensors), keep=["head.weight"]).begin()
    with pytest.raises(ReloadError, match="must not be served"):
        require_servable(model)


def test_an_abort_before_the_first_write_leaves_the_model_servable() -> None:
    model, before = _loaded()
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    reload.abort()
    assert_same(everything(model), before)
    require_servable(model)
    require_servable(nn.Linear(1, 1))


@pytest.mark.parametrize("wrote", [False, True])
def test_a_reload_whose_object_is_gone_counts_as_aborted(wrote: bool) -> None:
    model, _ = _loaded()
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    if wrote:
        reload.load_bucket({"head.weight": update(2)["head.weight"]})
    del reload
    gc.collect()
    if wrote:
        with pytest.raises(ReloadError, match=r"must not be served: .*dropped half-way"):
            require_servable(model)
    else:
        require_servable(model)
    load(model, update(2))
    require_servable(model)


def test_a_failing_loader_ends_the_reload() -> None:
    model, _ = _loaded()

    def fail(param: torch.Tensor, loaded: torch.Tensor) -> None:
        raise IndexError("shard 3 of 2")

    loader = model.layers[1].attn_sink.weight_loader
    model.layers[1].attn_sink.weight_loader = fail
    reload = LayerwiseReload(model, manifest())
    reload.begin()
    with pytest.raises(
        ReloadError, match=r"layers\.1\.attn_sink could not be written: shard 3 of 2.*not servable"
    ) as caught:
        reload.load_bucket(update(2))
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(ReloadError, match="closed"):
        reload.finish()
    with pytest.raises(ReloadError, match="must not be served"):
        require_servable(model)
    model.layers[1].attn_sink.weight_loader = loader
    load(model, update(2))
    require_servable(model)


def test_loaders_that_allocate_are_caught() -> None:
    model = Model()

    def move(param: torch.Tensor, loaded: torch.Tensor) -> None:
        param.data = loaded.clone()

    def replace(param: torch.Tensor, loaded: torch.Tensor) -> None:
        model.layers[0].weight = frozen(loaded.clone())

    for loader, message in ((move, "moved it"), (replace, r"replaced layers\.0\.weight")):
        model.layers[0].weight.weight_loader = loader
        reload = LayerwiseReload(model, manifest())
        reload.begin()
        with pytest.raises(ReloadError, match=message):
            reload.load_bucket(update(1))
        with pytest.raises(ReloadError, match="must not be served"):
            require_servable(model)


def test_a_derived_weight_that_moves_is_named() -> None:
    """B76: the broadcast was right, and captured graphs read the old one."""
    model = Model()

    def refresh() -> Iterable[str]:
        model.layers[1].router.negated = -model.layers[1].router.bias
        return ["negated"]

    model.layers[1].router.refresh_derived_weights_ = refresh
    with pytest.raises(AddressMovedError, match=r"layers\.1\.router\.negated: moved"):
        load(model, update(1))
    with pytest.raises(ReloadError, match=r"(?s)must not be served: .*layers\.1\.router\.negated"):
        require_servable(model)


def test_a_ledger_from_capture_is_what_counts() -> None:
    model = Model()
    captured = AddressLedger().record(model)
    load(model, update(1))
    reload = LayerwiseReload(model, manifest(), ledger=captured)
    reload.begin()
    reload.load_bucket(update(2))
    assert reload.finish().tensors_checked == len(captured)
    before = everything(model)
    model.layers[0].router.negated = torch.zeros(6)
    with pytest.raises(ReloadError, match=r"layers\.0\.router\.negated: moved"):
        reload.begin()  # a ledger of its own, recorded now, would have called this a match
    assert_same(
        {n: t for n, t in everything(model).items() if "layers.0.router.negated" not in n},
        {n: t for n, t in before.items() if "layers.0.router.negated" not in n},
    )


def test_a_refresh_that_fails_leaves_the_model_unservable() -> None:
    model = Model()
    model.layers[0].router.refresh_derived_weights_ = lambda: ["nothing"]
    with pytest.raises(ReloadError, match="expected names of tensors, got 'nothing'"):
        load(model, update(1))
    with pytest.raises(ReloadError, match="must not be served"):
        require_servable(model)


def test_finalize_alone_is_idempotent() -> None:
    model, before = _loaded()
    for _ in range(2):
        report = finalize_weights_after_layerwise_reload(model)
        assert "layers.0.hc_attn_fn_broadcast" in report.refreshed
        assert report.fingerprints == {}
        assert_same(everything(model), before)


def test_finalize_refreshes_after_another_loader() -> None:
    """B68, as where an engine drives the reload itself."""
    model, _ = _loaded()
    ledger = AddressLedger().record(model)
    new = torch.randn(24, 4 * HIDDEN)
    model.layers[0].hc_attn_fn.copy_(new)
    finalize_weights_after_layerwise_reload(model)
    want = torch.empty(24, HIDDEN)
    refresh_mhc_broadcast_(want, new)
    assert_bitwise_equal(model.layers[0].hc_attn_fn_broadcast, want)
    ledger.verify(model)


def test_finalize_refuses_meta_tensors_and_writes_nothing() -> None:
    model, before = _loaded()
    model.layers[0].hc_attn_fn.copy_(torch.randn(24, 4 * HIDDEN))
    model.layers[1].hc_attn_fn = frozen(torch.zeros(24, 4 * HIDDEN, device="meta"))
    model.lazy = {"cache": torch.zeros(1, device="meta")}
    with pytest.raises(ReloadError) as caught:
        finalize_weights_after_layerwise_reload(model)
    assert "layers.1.hc_attn_fn: on the meta device" in str(caught.value)
    assert "lazy['cache']: on the meta device" in str(caught.value)
    assert_bitwise_equal(model.layers[0].hc_attn_fn_broadcast, before["layers.0.hc_attn_fn_broadcast"])


def test_a_reload_does_not_keep_the_model_alive() -> None:
    model = Model()
    load(model, update(1))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
