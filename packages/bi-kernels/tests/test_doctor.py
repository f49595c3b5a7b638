from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

from bi_kernels.runtime import anchors, doctor, hooks, native, packages, settings
from bi_kernels.runtime.doctor import diagnose, main
from bi_kernels.runtime.native import NativeLibrary

OURS = ("bi-kernels", "bi-sparse-attn", "bi-moe-deepep", "bi-reload")


def rows_of(section):
    return {row.name: row for row in diagnose() if row.section == section}


def test_on_nothing_it_names_everything_and_exits_with_one():
    """No vLLM and no torch: a finder hides them, whatever this environment has."""
    code = """
import importlib.metadata, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "triton", "bi_sparse_attn", "bi_moe_deepep", "bi_reload"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
version = importlib.metadata.version
def hidden(name):
    if name in ("torch", "vllm", "triton"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = hidden
from bi_kernels.runtime.doctor import main
sys.exit(main(sys.argv[1:]))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "BI_"))}
    environment["PYTHONPATH"] = ":".join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", code, "--json"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert report["ready"] is False
    rows = {row["name"]: row for row in report["rows"]}
    for name in ("torch", "triton", "vllm", "bi-sparse-attn", "bi-moe-deepep", "bi-reload"):
        assert (rows[name]["status"], rows[name]["found"]) == ("blocked", "not installed"), name
    assert rows["bi-kernels"]["status"] == "ok"
    assert rows["GPU"]["status"] == "blocked"
    assert rows["VLLM_BATCH_INVARIANT"]["status"] == "blocked"
    assert not any("the check failed" in row["found"] for row in report["rows"])
    assert all(row["remedy"] for row in report["rows"] if row["status"] == "blocked")


def test_the_table_is_printed(clean_environment, capsys):
    assert main([]) == 1
    printed = capsys.readouterr().out
    for words in ("bi-doctor", "VLLM_USE_DEEP_GEMM_E8M0", "library of bi-kernels", "aligned mode cannot start"):
        assert words in printed


@pytest.mark.parametrize("name", list(settings.SETTINGS))
def test_every_setting_has_a_row(clean_environment, name):
    assert name in rows_of("setting")


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("VLLM_BATCH_INVARIANT", "1", "ok"),
        ("VLLM_BATCH_INVARIANT", "0", "blocked"),
        ("VLLM_BATCH_INVARIANT", "yes", "blocked"),
        ("BI_PARTIAL", "1", "blocked"),
        ("VLLM_USE_DEEP_GEMM_E8M0", "0", "blocked"),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "0", "blocked"),
        ("VLLM_PLUGINS", "someone_else", "blocked"),
        ("VLLM_DS4_DECODE_KERNEL", "sparse", "ok"),
    ],
)
def test_a_setting_is_judged(clean_environment, monkeypatch, name, value, status):
    monkeypatch.setenv(name, value)
    row = rows_of("setting")[name]
    assert row.status == status
    assert repr(value) in row.found


def test_the_sampler_is_refused_only_where_it_cannot_run(world, monkeypatch):
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    find_spec = settings.importlib.util.find_spec
    monkeypatch.setattr(
        settings.importlib.util, "find_spec", lambda n, *a: None if n == "flashinfer" else find_spec(n, *a)
    )
    assert settings.setting_blocker(name) is None
    monkeypatch.delenv(name)
    assert settings.setting_blocker(name) is not None


HOOK = """
    from bi_kernels.runtime.hooks import HookPlan, Patch
    from bi_kernels.runtime.settings import Refusal

    LEDGER = {"why": "w", "upstream": "u", "remove_when": "r"}
    REFUSED_SETTINGS = (Refusal("a feature", "a reason", "bi-fake"),)
    PLAN = HookPlan(package="bi-fake", import_name="bi_fake", patches=(
        Patch(target="vllm.ops:top_k", replacement="bi_fake.impl:ours", **LEDGER,
              relies_on=("vllm.provider:provided",)),
        Patch(target="vllm.ops:Model.forward", replacement="bi_fake.impl:ours", **LEDGER),
    ), requires_native=("bi_fake::op",), contracts=("bi_fake.contracts:GOOD",),
        self_tests=("bi_fake.selftests:of_model",))
    """
SELF_TESTS = """
    import torch
    from bi_kernels.runtime.probe import SelfTest

    def of_model(config):
        return (SelfTest(
            name="t",
            op=lambda x: x + 1,
            control=lambda x: x * x.sum(0),
            rows=lambda count, device: (torch.arange(1.0, count + 1)[:, None],),
            build=str,
            shape_key=f"H={config.hidden_size}",
            remedy="Use another.",
        ),)
    """
CONTRACTS = """
    from bi_kernels.runtime.probe import Contract, Finding

    GOOD = Contract(name="deep_gemm", expected="2.5", remedy="Upgrade.", static=lambda: Finding(True, "2.5.0"))
    """


@pytest.fixture
def ready(world, monkeypatch):
    """A world in which aligned mode could start: a GPU, a library, hooks and a contract, all of them fake."""
    world.write({"bi_fake/vllm_hook.py": HOOK, "bi_fake/contracts.py": CONTRACTS, "bi_fake/selftests.py": SELF_TESTS})
    for owner in (doctor, hooks, packages, settings, anchors):
        monkeypatch.setattr(owner, "PACKAGES", {"bi-fake": "bi_fake"})
    world.plan(*importlib.import_module("bi_fake.vllm_hook").PLAN.patches)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    version = doctor.distribution_version
    monkeypatch.setattr(doctor, "distribution_version", lambda name: "3.6" if name == "triton" else version(name))
    library = NativeLibrary(package="bi-fake", import_name="bi_fake", namespace="bi_fake", ops=("op",))
    monkeypatch.setattr(native, "_LIBRARIES", {"bi_fake": library})
    library._loaded_from = world.root / "bi_fake" / "_C.so"
    library._loaded_from.write_bytes(b"x")
    library._loaded_from.with_name("build_info.json").write_text('{"archs": ["90a"], "version": "0.1.0"}')
    monkeypatch.setattr(native, "_has_cuda_kernel", lambda op: op == "bi_fake::op")
    return world


def test_ready_exits_with_zero(ready, capsys):
    assert main(["--json"]) == 0, [row for row in diagnose() if row.status == "blocked"]
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is True
    found = {(row["section"], row["name"]): row["status"] for row in report["rows"]}
    for key in (
        ("version", "bi-fake"),
        ("version", "GPU"),
        ("hook", "bi-fake: vllm.ops:top_k"),
        ("hook", "bi-fake: vllm.ops:Model.forward"),
        ("native", "library of bi-fake"),
        ("native", "bi_fake::op"),
        ("contract", "deep_gemm"),
        ("self-test", "t [H=4096]"),
    ):
        assert found[key] == "ok", key
    assert found["refused", "a feature"] == "refused"
    assert "vllm" not in sys.modules


def blocked(section):
    return {row.name: row.found for row in diagnose() if row.status == "blocked" and row.section == section}


def test_a_moved_anchor_blocks_its_row_alone(ready):
    path = ready.root / "vllm" / "ops.py"
    path.write_text(path.read_text().replace("def top_k(x)", "def top_k(x, y)"))
    assert list(blocked("hook")) == ["bi-fake: vllm.ops:top_k"]


def test_what_a_patch_relies_on_has_a_row_when_it_moved(ready):
    path = ready.root / "vllm" / "provider.py"
    path.write_text(path.read_text().replace("(x)", "(x, y)"))
    assert list(blocked("hook")) == ["bi-fake: vllm.provider:provided"]


def test_a_missing_kernel_blocks_its_row(ready, monkeypatch):
    monkeypatch.setattr(native, "_has_cuda_kernel", lambda op: False)
    assert "bi_fake::op" in blocked("native")
    assert blocked("hook") == {}


def test_a_library_for_another_gpu_is_blocked(ready, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert blocked("native") == {"library of bi-fake": "compute capability 10.0"}


def test_an_unsupported_gpu_is_blocked(ready, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert "got 12.0" in blocked("version")["GPU"]


def test_a_contract_that_needs_a_gpu_is_not_taken_on_trust(ready, monkeypatch):
    ready.write({"bi_fake/contracts.py": CONTRACTS.replace("static=", "dynamic=")})
    assert blocked("contract") == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert blocked("contract") == {"deep_gemm": "no GPU to prove it on"}


def test_a_self_test_has_a_row(ready, monkeypatch, tmp_path, capsys):
    ready.write({"bi_fake/selftests.py": SELF_TESTS.replace("x + 1", "x + x.sum(0)")})
    assert "differs from the row alone" in blocked("self-test")["t [H=4096]"]
    model = tmp_path / "config.json"
    model.write_text('{"hidden_size": 8}')
    assert main(["--json", "--model", str(model)]) == 1
    assert "t [H=8]" in capsys.readouterr().out
    model.write_text("[]")
    with pytest.raises(SystemExit):
        main(["--model", str(model)])
    assert "--model: expected a readable config.json" in capsys.readouterr().err
    monkeypatch.setattr(sys.modules["bi_fake.selftests"], "of_model", None)
    assert "not callable" in blocked("self-test")["bi_fake.selftests:of_model"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert blocked("self-test") == {"bi_fake.selftests:of_model": "no GPU to run it on"}


@pytest.mark.parametrize(
    ("owner", "name", "section"),
    [
        (doctor, "_gpu_row", "version"),
        (doctor, "setting_blocker", "setting"),
        (hooks, "patch_blockers", "hook"),
        (native, "op_blockers", "native"),
        (doctor, "resolve", "contract"),
        (doctor, "refusals", "refused"),
        (doctor, "module_file", "native"),
    ],
)
def test_a_check_that_breaks_is_a_blocked_row(ready, monkeypatch, owner, name, section):
    def broken(*args, **kwargs):
        raise RuntimeError("out of order")

    monkeypatch.setattr(owner, name, broken)
    rows = diagnose()
    assert any("RuntimeError: out of order" in row.found and row.section == section for row in rows)
    assert {row.section for row in rows} >= {"version", "setting", "hook"}
    assert main(["--json"]) == 1


def test_a_hook_module_that_does_not_import_is_a_blocked_row(ready):
    ready.write({"bi_fake/vllm_hook.py": "raise ImportError('broken')\n"})
    sys.modules.pop("bi_fake.vllm_hook")
    assert "broken" in blocked("hook")["bi-fake"]


def test_the_script_is_callable():
    assert callable(main)
    done = subprocess.run(
        [sys.executable, "-m", "bi_kernels.runtime.doctor", "--help"],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "bi-doctor" in done.stdout
