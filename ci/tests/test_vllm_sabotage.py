"""Sabotages inside vLLM, without vLLM: that each switch is there, and that records are judged as they must be."""

from __future__ import annotations

import importlib
import json
import operator
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import bi_kernels as bk
from aligned_e2e import h200, vllm_sabotage
from aligned_e2e.vllm_sabotage import HEALTHY, SABOTAGES, STOCK, Sabotage, judge, make_requests, perturbed
from bi_kernels.runtime.packages import PACKAGES
from bi_kernels.testing.trace import Rows, Trace
from bi_sparse_attn import SparseCapacity, vllm_attention

PLANS = [importlib.import_module(f"{name}.vllm_hook").PLAN for name in PACKAGES.values()]
APPLIED = {plan.package: {"patches": sorted(p.target for p in plan.patches_for("0.26.0"))} for plan in PLANS}
OPS = ("mhc_pre, attention", "sparse_mla", "router logits", "routed experts")


def test_every_switch_is_one_of_the_packages():
    targets = {patch.target for plan in PLANS for patch in plan.patches_for("0.26.0")}
    for sabotage in SABOTAGES:
        assert set(sabotage.off) <= targets, sabotage.name
        for reference, _ in sabotage.swaps:
            module, _, path = reference.partition(":")
            assert callable(operator.attrgetter(path)(importlib.import_module(module)))
        assert bool(sabotage.off) != bool(sabotage.swaps)
        assert sabotage.expected in ("attestation", "plan") or sabotage.reloads or sabotage.op
    names = [sabotage.name for sabotage in SABOTAGES]
    assert len({vllm_sabotage._slug(name) for name in [*names, HEALTHY, STOCK]}) == len(names) + 2
    assert sum(sabotage.serves for sabotage in SABOTAGES) >= 8
    assert {sabotage.expected for sabotage in SABOTAGES} == {"bits", "refusal", "plan", "attestation"}


def test_swaps_replace_and_change(monkeypatch):
    module = SimpleNamespace(double=lambda x: 2 * x)
    monkeypatch.setattr(vllm_sabotage.importlib, "import_module", {"there": module}.__getitem__)
    vllm_sabotage.apply_swaps([("there:double", lambda original: lambda x: original(x) + 1)])
    assert module.double(3) == 7
    module.Layer = type("Layer", (), {"size": lambda self: 1})
    vllm_sabotage.apply_swaps([("there:Layer.size", lambda original: lambda self: original(self) + 1)])
    assert module.Layer().size() == 2
    with pytest.raises(AttributeError):
        vllm_sabotage.apply_swaps([("there:triple", lambda original: original)])


def test_what_the_swaps_put_in_place():
    gathered = SimpleNamespace(indices=torch.tensor([[0, 1, 2, -1], [4, 5, -1, -1]]), lengths=torch.tensor([3, 2]))
    assert vllm_sabotage._newest_first(lambda *args: gathered)().indices.tolist() == [[2, 1, 0, -1], [5, 4, -1, -1]]
    assert vllm_sabotage._exact_scales(bk.scale_format_for)("cuda") is bk.ScaleFormat.FLOAT32
    combine = vllm_sabotage._last_slot_first(lambda rows, slots, weights: (slots.tolist(), weights.tolist()))
    assert combine(None, torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.25]])) == ([[2, 1]], [[0.25, 0.5]])


def test_slices_of_the_step_are_what_the_buffers_show():
    capacity = SparseCapacity.from_model(
        max_model_len=4096, compress_ratio=4, window_size=128, index_topk=512, max_num_batched_tokens=4096
    )
    layer, seen = SimpleNamespace(capacity=capacity), []

    def decode(self, q, *args):
        seen.append(vllm_attention._decode_buffers(self.capacity))

    for count in (1, 3, 1000):
        vllm_sabotage._slices_of_the_step(decode)(layer, torch.zeros(count), None)
    healthy = vllm_attention._decode_buffers(layer.capacity)
    assert [specs[0][0][0] for specs in seen] == [1, 3, capacity.decode_slice_tokens]
    assert [[(shape[1:], dtype) for shape, dtype in specs] for specs in seen] == [
        [(shape[1:], dtype) for shape, dtype in healthy]
    ] * 3
    assert seen[-1] == healthy


def test_requests_reach_past_top_k_and_fill_the_window():
    prompts = make_requests(8192)
    assert prompts == make_requests(8192)
    lengths = [len(tokens) for tokens in prompts.values()]
    assert max(lengths) > 4 * 512 + 128
    assert min(lengths) > 128
    assert max(lengths) > vllm_sabotage._CHUNK > 128
    assert sum(lengths) + len(lengths) * vllm_sabotage._DRAWN <= vllm_sabotage.SETTINGS["max_num_batched_tokens"]
    longest = max(prompts.values(), key=len)
    assert longest[: len(longest) // 2] == longest[len(longest) // 2 :]


def test_the_reloaded_weights_differ_where_they_must(tmp_path):
    tensors = {"layers.0.attn.attn_sink": torch.zeros(2), "layers.0.hc_attn_fn": torch.ones(2), "norm": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in perturbed(tmp_path)} == {
        "layers.0.attn.attn_sink": [1.0, 1.0],
        "layers.0.hc_attn_fn": [1.25, 1.25],
        "norm": [1.0],
    }


# -- judging -----------------------------------------------------------------------------------------------------------


def trace_of(**changed):
    """A trace of three tokens; ``changed`` has other rows for an op, from the second token on."""
    trace = Trace()
    rows = Rows(["r"], torch.zeros(3, dtype=torch.int64), torch.arange(3))
    for layer in range(2):
        for op in OPS:
            values = torch.ones(3, 4)
            if changed.get("op") == op and changed["layer"] == layer:
                values[1:] = 2.0
            trace.record(op, values, layer=layer, rows=rows)
    return trace


CONSTANT = {"decode_buffers of compress ratio 4": ["128x640x512"]}


def write(
    folder, name, *, rollout=None, recomputation=None, off=(), refusal=None, serves=True, reloads=True, plan=CONSTANT
):
    """What one process leaves behind."""
    target = folder / vllm_sabotage._slug(name)
    target.mkdir(parents=True)
    hooks = {
        package: {"patches": [target for target in hook["patches"] if target not in off]}
        for package, hook in APPLIED.items()
    }
    record = {"attestation": {"hooks": hooks, "packages": {}, "versions": {}, "digest": "d"}}
    if serves:
        traces = rollout or trace_of(), recomputation or trace_of()
        divergence = vllm_sabotage.first_divergence(*traces)
        for file, trace in zip(("rollout", "recomputation"), traces, strict=True):
            trace.save(target / f"{file}.json")
        record |= {
            "divergence": None if divergence is None else vllm_sabotage.dataclasses.asdict(divergence),
            "partings": vllm_sabotage.first_partings(*traces),
            "tokens_compared": 48,
            "tokens_different": 0 if divergence is None else 5,
            "contradictions": [],
            "plan": plan,
        }
    if reloads:
        record["refusal"] = refusal
    (target / "record.json").write_text(json.dumps(record))


TARGETS = tuple(APPLIED["bi-reload"]["patches"][:2])
BITS = Sabotage("it", "hook", off=TARGETS, layer=1, op="router")


def test_a_rollout_unlike_its_recomputation_is_caught_and_located(tmp_path):
    write(tmp_path, HEALTHY)
    write(tmp_path, "it", rollout=trace_of(layer=1, op="router logits"), off=TARGETS)
    finding = judge(BITS, tmp_path)
    assert (finding.caught, finding.by, finding.located_layer, finding.located_op) == (True, "bits", 1, "router logits")
    assert "5 of 48 logprobs" in finding.detail
    assert "request r, position 1" in finding.detail


@pytest.mark.parametrize(("layer", "op"), [(0, "router logits"), (1, "sparse_mla")])
def test_the_wrong_place_is_not_caught(tmp_path, layer, op):
    write(tmp_path, HEALTHY)
    write(tmp_path, "it", rollout=trace_of(layer=layer, op=op), off=TARGETS)
    finding = judge(BITS, tmp_path)
    assert (finding.caught, finding.by, finding.located_layer, finding.located_op) == (False, "bits", layer, op)


def test_another_arithmetic_is_caught_against_the_healthy_engine(tmp_path):
    write(tmp_path, HEALTHY)
    other = {"layer": 1, "op": "router logits"}
    write(tmp_path, "it", rollout=trace_of(**other), recomputation=trace_of(**other), off=TARGETS)
    finding = judge(BITS, tmp_path)
    assert (finding.caught, finding.by, finding.located_layer) == (True, "bits", 1)
    assert "not to the healthy" in finding.detail


def test_equal_bits_leave_only_the_attestation(tmp_path):
    write(tmp_path, HEALTHY)
    write(tmp_path, "it", off=TARGETS)
    finding = judge(BITS, tmp_path)
    assert (finding.caught, finding.by, finding.located_op) == (False, "attestation", None)


def test_another_geometry_is_caught_though_no_bit_differs(tmp_path):
    sabotage = Sabotage("it", "hook", swaps=(("module:function", lambda original: original),), expected="plan")
    write(tmp_path, HEALTHY)
    write(tmp_path, "it", plan={"decode_buffers of compress ratio 4": ["2x640x512", "3x640x512"]})
    finding = judge(sabotage, tmp_path)
    assert (finding.caught, finding.by, finding.located_op) == (True, "plan", None)
    assert finding.detail == "decode_buffers of compress ratio 4: 2x640x512, 3x640x512 against 128x640x512"
    for name, plan in (("same", CONSTANT), ("other", {"prefill_buffers of compress ratio 4": ["1"]})):
        write(tmp_path / name, HEALTHY)
        write(tmp_path / name, "it", plan=plan)
        assert not judge(sabotage, tmp_path / name).caught


def test_an_attestation_must_lack_what_is_off_and_nothing_else(tmp_path):
    sabotage = Sabotage("it", "hook", off=TARGETS, expected="attestation")
    write(tmp_path, HEALTHY)
    write(tmp_path, "it", off=TARGETS, serves=False, reloads=False)
    finding = judge(sabotage, tmp_path)
    assert (finding.caught, finding.by) == (True, "attestation")
    assert TARGETS[0] in finding.detail
    less = Sabotage("it", "hook", off=TARGETS[:1], expected="attestation")
    assert (judge(less, tmp_path).caught, judge(less, tmp_path).by) == (False, None)


def test_a_refusal_counts_only_if_the_healthy_engine_reloads(tmp_path):
    sabotage = Sabotage("it", "hook", off=TARGETS, expected="refusal", reloads=True)
    for name, refusal in (("good", None), ("bad", "ReloadError: also here")):
        write(tmp_path / name, HEALTHY, refusal=refusal)
        write(tmp_path / name, "it", off=TARGETS, serves=False, refusal="ReloadError: no\nlist")
    good, bad = judge(sabotage, tmp_path / "good"), judge(sabotage, tmp_path / "bad")
    assert (good.caught, good.by, good.detail) == (True, "refusal", "ReloadError: no")
    assert (bad.caught, bad.by) == (False, None)
    write(tmp_path / "silent", HEALTHY)
    write(tmp_path / "silent", "it", off=TARGETS, serves=False)
    assert not judge(sabotage, tmp_path / "silent").caught


def test_what_did_not_run_is_not_caught(tmp_path):
    assert "not run" in judge(BITS, tmp_path).detail
    write(tmp_path, "it", rollout=trace_of(layer=1, op="router logits"))
    finding = judge(BITS, tmp_path)
    assert not finding.caught
    assert "healthy engine has no record" in finding.detail


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, None),
        ({"rollout": trace_of(layer=0, op="sparse_mla")}, "layer 0, sparse_mla"),
        ({"refusal": "ReloadError: no"}, "reload was refused"),
        ({"plan": {"decode_buffers": ["2x4", "3x4"]}}, "geometry follows the batch: decode_buffers: 2x4, 3x4"),
    ],
)
def test_the_healthy_engine_must_be_healthy(tmp_path, content, problem):
    assert vllm_sabotage._control_problem(tmp_path) == "not run, or failed: see its log"
    write(tmp_path, HEALTHY, **content)
    found = vllm_sabotage._control_problem(tmp_path)
    assert found is None if problem is None else problem in found


def waited_for(tmp_path):
    """Where the runner waits for the record, and where its command line has it written."""
    (job,) = h200.extra_jobs(["sabotage"], tmp_path / "weights", tmp_path / "parts", at_once=2, limit=100.0)
    (command,), (record,) = job.commands, job.records
    assert command[1:3] == ("-m", "aligned_e2e.vllm_sabotage")
    return record, vllm_sabotage.parse(command[3:]).output


def test_the_record_is_where_the_runner_waits_for_it(tmp_path, monkeypatch):
    record, output = waited_for(tmp_path)
    assert record == output == tmp_path / "parts" / "sabotage.json"
    monkeypatch.setattr(vllm_sabotage, "PART", "sabotages")  # a part of another name, which the runner does not know
    record, output = waited_for(tmp_path)
    assert record != output


def test_main_runs_judges_and_keeps_records(tmp_path, monkeypatch, capsys):
    sabotages = (BITS, Sabotage("other", "hook", off=TARGETS, expected="attestation"))
    monkeypatch.setattr(vllm_sabotage, "SABOTAGES", sabotages)
    played = []

    def run(command, log, seconds):
        played.append(command[3])
        name = command[3]
        if name == "it":
            write(tmp_path / "sabotage" / "made", name, rollout=trace_of(layer=1, op="router logits"), off=TARGETS)
        elif name == "other":
            write(tmp_path / "sabotage" / "made", name, off=TARGETS, serves=False, reloads=False)
        elif name == STOCK:
            write(tmp_path / "sabotage" / "made", name, rollout=trace_of(layer=0, op="sparse_mla"))
        else:
            write(tmp_path / "sabotage" / "made", name)
        made = tmp_path / "sabotage" / "made" / vllm_sabotage._slug(name)
        for file in made.iterdir():
            file.rename(tmp_path / "sabotage" / vllm_sabotage._slug(name) / file.name)

    monkeypatch.setattr(vllm_sabotage, "_run_limited", run)
    arguments = ["--checkpoint", "nowhere", "--parts", str(tmp_path), "--jobs", "2"]
    assert vllm_sabotage.main(arguments) == 0
    assert set(played) == {HEALTHY, STOCK, "it", "other"}
    record = json.loads((tmp_path / "sabotage.json").read_text())
    assert [finding["caught"] for finding in record["sabotages"]] == [True, True]
    assert set(record["sabotages"][0]) == {
        "name", "hook", "expected", "caught", "by", "located_layer", "located_op", "detail"
    }  # fmt: skip
    assert record["healthy_problem"] is None
    assert record["stock"] == {"tokens": 48, "tokens_different": 5, "divergence": [[0, "sparse_mla", 1.0]]}
    assert vllm_sabotage.main([*arguments, "oth"]) == 0
    assert len(played) == 4  # all records were there
    assert "caught: other" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        vllm_sabotage.main([*arguments, "nothing of that name"])


def test_a_process_that_fails_shows_its_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vllm_sabotage, "SABOTAGES", (BITS,))

    run = vllm_sabotage._run_limited

    def hang(command, log, seconds):
        run([sys.executable, "-u", "-c", "import time; print('the reason'); time.sleep(60)"], log, seconds)

    monkeypatch.setattr(vllm_sabotage, "_run_limited", hang)
    arguments = ["--checkpoint", "nowhere", "--output", str(tmp_path / "found.json"), "--seconds", "1", "it"]
    assert vllm_sabotage.main(arguments) == 1
    assert not (tmp_path / "found.json").exists()  # nothing to be judged by
    shown = capsys.readouterr().out
    assert "the reason" in shown
    assert "ended after" in shown
