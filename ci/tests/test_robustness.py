"""Damage on the way: nothing wrong is served, and the error names the cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bi_reload as reload
from aligned_e2e.__main__ import main
from aligned_e2e.model import DeepseekV4
from aligned_e2e.prompts import load_book
from aligned_e2e.report import Report, ReportError, check_report, compare
from aligned_e2e.rollout import Schedule
from aligned_e2e.sabotage import small_sides
from aligned_e2e.shards import load_checkpoint, require_weights, save_checkpoint
from aligned_e2e.sides import NEW_SEED, OLD_SEED, Sides, make_engine, serve_on
from bi_kernels.runtime.errors import ReloadError

SCHEDULE = Schedule("small", max_num_seqs=2, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def sides() -> Sides:
    vocabulary, book = load_book()
    whole = small_sides(vocabulary.size, book)
    return replace(whole, requests=whole.requests[:1])


@pytest.fixture
def folder(sides: Sides, tmp_path: Path) -> Path:
    for name, seed in (("old", OLD_SEED), ("new", NEW_SEED)):
        save_checkpoint(tmp_path / name, sides.checkpoint(seed), shards=3)
    return tmp_path


# ---- a rollout killed in the middle of a reload; its weights live in memory that outlives it, as under CUDA IPC


def shared_model(sides: Sides, weights: dict[str, torch.Tensor], memory: Path) -> DeepseekV4:
    """A model whose weights lie in a file that other processes map; what the file holds already stays."""
    model = DeepseekV4(sides.config, sides.deployment, weights)
    fresh = not memory.exists()
    sizes = [-(-p.numel() * p.element_size() // 64) * 64 for p in model.parameters()]
    mapped = torch.from_file(str(memory), shared=True, size=sum(sizes), dtype=torch.uint8)
    for piece, parameter in zip(mapped.split(sizes), model.parameters(), strict=True):
        view = piece[: parameter.numel() * parameter.element_size()].view(parameter.dtype).view(parameter.shape)
        if fresh:
            view.copy_(parameter.detach())
        parameter.data = view
    return model


def begin_update(model: DeepseekV4, weights: dict[str, torch.Tensor]) -> reload.LayerwiseReload:
    prints = reload.weight_fingerprint(weights)
    manifest = {n: reload.TensorSpec.of(t, fingerprint=prints[n]) for n, t in weights.items()}
    update = reload.LayerwiseReload(model, manifest)
    update.begin()
    return update


def rollout_process(folder: Path, step: str) -> None:
    """What the processes below run. One line of JSON on stdout for each thing that happened."""
    torch.set_num_threads(1)
    vocabulary, book = load_book()
    whole = small_sides(vocabulary.size, book)
    sides = replace(whole, requests=whole.requests[:1])
    model = shared_model(sides, load_checkpoint(folder / "old"), folder / "memory")
    new = load_checkpoint(folder / "new")
    names = sorted(new)

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    if step == "first":
        require_weights(model, folder / "old")
        update = begin_update(model, new)
        update.load_bucket({name: new[name] for name in names[: len(names) // 2]})
        say(half=True)
        sys.stdin.read()  # until it is killed
    try:
        require_weights(model, folder / "new")
    except ReloadError as error:
        say(refused=str(error))
    update = begin_update(model, new)
    update.load_bucket(new)
    update.finish()
    require_weights(model, folder / "new")
    served = serve_on(make_engine(sides, model, SCHEDULE), sides.requests)
    say(tokens=served.tokens, logprobs=served.logprobs)


def start(folder: Path, step: str) -> subprocess.Popen[str]:
    code = "import sys, pathlib, test_robustness as t; t.rollout_process(pathlib.Path(sys.argv[1]), sys.argv[2])"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(folder), step]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_rollout_killed_in_the_middle_of_a_reload_starts_again(folder: Path, sides: Sides) -> None:
    with start(folder, "first") as first:
        assert first.stdout is not None
        assert json.loads(first.stdout.readline()) == {"half": True}
        first.kill()
    assert first.returncode < 0
    with start(folder, "again") as again:
        out, _ = again.communicate(timeout=300)
    assert again.returncode == 0
    refused, served = map(json.loads, out.splitlines())
    # Half of the names are the new weights already: only the others are named.
    assert "embed.weight" not in refused["refused"]
    assert "norm.weight: has other bytes than weights-" in refused["refused"]
    model = DeepseekV4(sides.config, sides.deployment, sides.checkpoint(NEW_SEED))
    want = serve_on(make_engine(sides, model, SCHEDULE), sides.requests)
    assert served == {"tokens": want.tokens, "logprobs": want.logprobs}


# ---- a damaged bucket


def test_a_damaged_bucket_is_refused_and_the_old_weights_are_served_on(sides: Sides) -> None:
    model = sides.model(OLD_SEED)
    want = serve_on(make_engine(sides, model, SCHEDULE), sides.requests)
    new = sides.checkpoint(NEW_SEED)
    update = begin_update(model, new)
    damaged = {n: t.clone() for n, t in new.items()}
    damaged["layers.2.attn.wkv.weight"].view(torch.uint8)[7, 9] ^= 4
    with pytest.raises(ReloadError, match=r"layers\.2\.attn\.wkv\.weight: its bytes changed on their way"):
        update.load_bucket(damaged)
    with pytest.raises(ReloadError, match="did not come"):
        update.finish()
    update.abort()  # nothing was written: the old weights are whole
    assert serve_on(make_engine(sides, model, SCHEDULE), sides.requests).logprobs == want.logprobs


# ---- damaged checkpoints


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def other_version(path: Path) -> None:
    path.write_bytes((path.parents[1] / "new" / path.name).read_bytes())


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit, other_version, Path.unlink])
def test_a_damaged_shard_is_named(damage: Callable[[Path], None], folder: Path) -> None:
    assert len(load_checkpoint(folder / "old")) > 80
    damage(folder / "old" / "weights-01.safetensors")
    with pytest.raises(ReloadError, match=r"weights-01\.safetensors: ") as caught:
        load_checkpoint(folder / "old")
    assert "weights-00" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 3}', '{"a": {"file": "b", "fingerprint": "no"}}'])
def test_a_damaged_index_is_named(content: str, folder: Path) -> None:
    (folder / "old" / "index.json").write_text(content, encoding="utf-8")
    with pytest.raises(ReloadError, match=r"index\.json: expected the index"):
        load_checkpoint(folder / "old")


# ---- damaged reports


@pytest.fixture
def report(sides: Sides, tmp_path: Path) -> Path:
    served = serve_on(make_engine(sides, sides.model(OLD_SEED), SCHEDULE), sides.requests)
    row = compare("small", served, served.tokens, served.logprobs, served.digests)
    path = tmp_path / "report.json"
    Report("cpu", {}, {}, {}, {}, schedules=[row]).write(path)
    return path


def test_an_untouched_report_is_believed(report: Path) -> None:
    assert check_report(report) == []
    assert main(["--check", str(report)]) == 0


def test_a_changed_report_is_not_believed(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = report.read_text(encoding="utf-8")
    report.write_text(text.replace('"tokens_different": 0', '"tokens_different": 1'), encoding="utf-8")
    with pytest.raises(ReportError, match="other contents"):
        check_report(report)
    assert main(["--check", str(report)]) == 2
    assert "report.json" in "".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("keep", [0, 1, 100, -20])
def test_a_report_that_was_cut_off_is_not_believed(keep: int, report: Path) -> None:
    report.write_bytes(report.read_bytes()[:keep])
    with pytest.raises(ReportError, match=r"report\.json: expected a report"):
        check_report(report)


def test_a_report_of_failures_or_of_nothing_is_no_success(report: Path) -> None:
    Report("cpu", {}, {}, {}, {}, coverage={"preemptions": 0}).write(report)
    assert check_report(report) == ["vacuous: preemptions is 0", "nothing was compared"]
    assert main(["--check", str(report)]) == 1
