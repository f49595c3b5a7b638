from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from fake_vllm import patch

from bi_kernels.runtime import hooks, packages
from bi_kernels.runtime.errors import HookError
from bi_kernels.runtime.hooks import HookPlan, Patch, activate, active_records, deactivate
from bi_kernels.runtime.native import NativeLibrary

TOP_K = "vllm.ops:top_k"


def blockers_of(plan):
    with pytest.raises(HookError) as raised:
        activate(plan)
    return [str(blocker) for blocker in raised.value.blockers]


def imported(name):
    return importlib.import_module(name)


# --- off -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "0"])
def test_off_every_symbol_keeps_its_identity(world, monkeypatch, value):
    if value is None:
        monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    else:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    ops = imported("vllm.ops")
    before = dict(vars(ops)), dict(vars(ops.Model))
    finders = list(sys.meta_path)
    assert activate(world.plan(patch(TOP_K), patch("vllm.ops:Model.forward"))) is None
    assert (dict(vars(ops)), dict(vars(ops.Model))) == before
    assert sys.meta_path == finders
    assert active_records() == {}


def test_off_even_a_plan_that_could_not_be_applied_is_silent(world, monkeypatch):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    assert activate(world.plan(patch("vllm.gone:x", ready=False, needs="everything"), vllm=("9.9",))) is None


@pytest.mark.parametrize("value", ["", "0"])
def test_off_register_imports_neither_vllm_nor_torch(world, value):
    code = f"""
import os, sys
os.environ.pop("VLLM_BATCH_INVARIANT", None)
if {value!r}:
    os.environ["VLLM_BATCH_INVARIANT"] = {value!r}
from bi_kernels.runtime.hooks import HookPlan, Patch, activate
plan = HookPlan(package="bi-fake", import_name="bi_fake", requires_native=("bi_fake::op",), patches=(
    Patch(target="vllm.ops:top_k", replacement="bi_fake.impl:ours", why="w", upstream="u", remove_when="r"),))
def register():
    activate(plan)
register()
assert "vllm" not in sys.modules and "torch" not in sys.modules and "bi_fake" not in sys.modules
"""
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# --- on --------------------------------------------------------------------------------------------------------------


def test_on_replaces_what_is_imported_already(world):
    ops = imported("vllm.ops")
    record = activate(world.plan(patch(TOP_K), patch("vllm.ops:Model.forward")))
    assert ops.top_k(0) == "ours"
    assert ops.Model().forward() == "ours"
    assert record == active_records()["bi-fake"]
    assert (record.version, record.vllm) == ("0.1.0", "0.26.0")
    assert record.patches == ("vllm.ops:Model.forward", "vllm.ops:top_k")


def test_on_does_not_import_vllm_and_patches_it_when_it_is_imported(world):
    activate(world.plan(patch(TOP_K), patch("vllm.models.deepseek_v4.model:mhc")))
    assert "vllm" not in sys.modules
    assert imported("vllm.ops").top_k(0) == "ours"
    model = imported("vllm.models.deepseek_v4.model")
    assert model.mhc(0) == "ours"
    assert model.AT_IMPORT == "stock"  # the module itself ran on the originals


def test_a_lazily_patched_module_looks_as_if_loaded_without_us(world):
    activate(world.plan(patch(TOP_K)))
    ops = imported("vllm.ops")
    assert type(ops.__loader__).__name__ == type(ops.__spec__.loader).__name__ == "SourceFileLoader"
    assert ops.__file__ == str(world.root / "vllm" / "ops.py")


def test_a_reloaded_module_is_patched_again(world):
    plan = world.plan(patch(TOP_K))
    ops = imported("vllm.ops")
    activate(plan)
    importlib.reload(ops)
    assert ops.top_k(0) == "ours"
    stock = hooks._ACTIVE["bi-fake"].edits["vllm.ops"][0]
    assert stock.stands()
    deactivate(plan)
    assert ops.top_k(0) == "stock"


def test_an_error_while_a_module_is_patched_fails_its_import(world):
    plan = world.plan(patch(TOP_K, "broken", factory=True))
    activate(plan)
    with pytest.raises(RuntimeError, match="the factory broke"):
        imported("vllm.ops")
    assert "vllm.ops" not in sys.modules
    with pytest.raises(RuntimeError, match="the factory broke"):
        imported("vllm.ops")


def test_deactivate_gives_every_original_back(world):
    targets = (TOP_K, "vllm.ops:Model.forward", "vllm.ops:Model.fixed", "vllm.ops:Model.made", "vllm.ops:provided")
    plan = world.plan(*(patch(target) for target in targets))
    ops = imported("vllm.ops")
    before = dict(vars(ops)), dict(vars(ops.Model))
    finders = list(sys.meta_path)
    activate(plan)
    assert vars(ops) != before[0]
    deactivate(plan)
    assert (dict(vars(ops)), dict(vars(ops.Model))) == before
    assert all(vars(ops)[name] is value for name, value in before[0].items())
    assert sys.meta_path == finders
    assert active_records() == {}
    deactivate(plan)  # nothing to do


def test_deactivate_takes_back_what_landed_lazily(world):
    plan = world.plan(patch(TOP_K))
    activate(plan)
    ops = imported("vllm.ops")
    deactivate(plan)
    assert ops.top_k(0) == "stock"


def test_twice_is_once(world):
    plan = world.plan(patch(TOP_K, "factory", factory=True))
    ops = imported("vllm.ops")
    first = activate(plan)
    replaced = ops.top_k
    assert activate(plan) is first
    assert ops.top_k is replaced
    assert ops.top_k(0) == "ours around stock"


def test_static_and_class_methods_stay_what_they_are(world):
    ops = imported("vllm.ops")
    activate(world.plan(patch("vllm.ops:Model.fixed"), patch("vllm.ops:Model.made")))
    assert ops.Model.fixed(0) == ops.Model().fixed(0) == "ours"
    assert ops.Model.made() == "ours"
    assert isinstance(vars(ops.Model)["fixed"], staticmethod)


def test_a_name_that_the_consumer_imported_is_patched_there_only(world):
    ops, provider = imported("vllm.ops"), imported("vllm.provider")
    activate(world.plan(patch("vllm.ops:provided")))
    assert ops.provided(0) == "ours"
    assert provider.provided(0) == "stock"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("kind", "name", "method"), [("oot_custom_op", "Indexer", "select"), ("oot_pluggable_layer", "Gate", "forward")]
)
def test_out_of_tree_classes_are_registered_and_unregistered(world, kind, name, method, early):
    plan = world.plan(patch(f"vllm.layers:{name}", "subclass", factory=True, kind=kind))
    if early:
        imported("vllm.layers")
    activate(plan)
    registry = imported("vllm.model_executor.custom_op").op_registry_oot
    in_tree = getattr(imported("vllm.layers"), name)
    assert issubclass(registry[name], in_tree)
    assert getattr(registry[name](), method)() == "ours"
    deactivate(plan)
    assert registry == {}


def test_an_out_of_tree_class_must_derive_from_the_in_tree_one(world):
    imported("vllm.layers")
    plan = world.plan(patch("vllm.layers:Gate", "not_a_subclass", factory=True, kind="oot_pluggable_layer"))
    assert "a subclass of Gate" in blockers_of(plan)[0]


def test_an_out_of_tree_class_of_somebody_else_is_left_alone(world):
    imported("vllm.layers")
    registry = imported("vllm.model_executor.custom_op").op_registry_oot
    registry["Gate"] = dict
    plan = world.plan(patch("vllm.layers:Gate", "subclass", factory=True, kind="oot_pluggable_layer"))
    assert "nobody has replaced" in blockers_of(plan)[0]
    assert registry == {"Gate": dict}


def test_an_environment_variable_becomes_known_to_vllm(world):
    plan = world.plan(patch("vllm.envs:VLLM_DS4_DECODE_KERNEL", kind="env"))
    envs = imported("vllm.envs")
    activate(plan)
    assert envs.VLLM_DS4_DECODE_KERNEL == "ours"
    deactivate(plan)
    assert set(envs.environment_variables) == {"VLLM_KNOWN"}


def test_a_variable_that_vllm_knows_is_refused(world):
    assert "name that vLLM now defines itself" in blockers_of(world.plan(patch("vllm.envs:VLLM_KNOWN", kind="env")))[0]


def test_publish_adds_a_name_and_takes_it_away(world):
    plan = world.plan(patch("vllm.ops:supports_batch_invariance", kind="publish"))
    activate(plan)
    ops = imported("vllm.ops")
    assert ops.supports_batch_invariance() == "ours"
    deactivate(plan)
    assert not hasattr(ops, "supports_batch_invariance")


def test_publish_refuses_a_name_that_exists_upstream(world):
    assert "a name that is free" in blockers_of(world.plan(patch(TOP_K, kind="publish")))[0]


def test_publish_refuses_a_name_that_somebody_added(world):
    ops = imported("vllm.ops")
    ops.fresh = 1
    assert "a name that is free" in blockers_of(world.plan(patch("vllm.ops:fresh", kind="publish")))[0]
    assert ops.fresh == 1


def test_patches_of_another_release_are_left_out(world):
    plan = world.plan(patch(TOP_K), patch("vllm.ops:only_in_0_33", versions=("0.33",)))
    assert activate(plan).patches == (TOP_K,)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_without_vllm(world, monkeypatch):
    plan = world.plan(patch(TOP_K))
    monkeypatch.setattr(hooks, "distribution_version", lambda name: None)
    assert blockers_of(plan) == ["vllm: expected 0.26.x or 0.33.x; found not installed. Install vllm 0.26.0."]


@pytest.mark.parametrize("version", ["0.27.0", "0.2.6", "1.26.0", "0.260.0"])
def test_an_unknown_version(world, monkeypatch, version):
    plan = world.plan(patch(TOP_K))
    monkeypatch.setattr(hooks, "distribution_version", lambda name: version)
    assert f"expected 0.26.x or 0.33.x; found {version}" in blockers_of(plan)[0]


def test_a_version_without_anchors_on_record(world):
    assert "expected a record for vLLM 0.26.0; found none" in blockers_of(world.plan(patch(TOP_K), anchored=False))[0]


def test_a_moved_anchor(world):
    plan = world.plan(patch(TOP_K))
    path = world.root / "vllm" / "ops.py"
    path.write_text(path.read_text().replace('def top_k(x):\n    return "stock"', 'def top_k(x):\n    return "other"'))
    assert blockers_of(plan)[0].startswith("bi-fake: vllm.ops:top_k: expected the source text of vLLM 0.26.0")
    assert imported("vllm.ops").top_k(0) == "other"


def test_a_moved_anchor_of_something_that_is_only_relied_on(world):
    plan = world.plan(patch(TOP_K, relies_on=("vllm.provider:provided",)))
    path = world.root / "vllm" / "provider.py"
    path.write_text(path.read_text().replace("(x)", "(x, y)"))
    assert blockers_of(plan)[0].startswith("bi-fake: vllm.provider:provided")


def test_a_missing_target(world):
    assert "no such name in this vLLM" in blockers_of(world.plan(patch("vllm.ops:absent")))[0]


def test_a_missing_native_op(world):
    NativeLibrary(package="bi-fake", import_name="bi_fake", namespace="bi_fake", ops=("op",))
    found = blockers_of(world.plan(patch(TOP_K), requires_native=("bi_fake::op", "nobody::op")))
    assert found[0].startswith("native library of bi-fake")
    assert [line.split(":  ")[0].split(": expected")[0] for line in found[-2:]] == ["bi_fake::op", "nobody::op"]


def test_a_patch_that_is_not_ready_names_what_it_needs(world):
    (found,) = blockers_of(world.plan(patch(TOP_K, "not_written_yet", ready=False, needs="bi_fake::op on a GPU")))
    assert found.startswith("bi-fake: vllm.ops:top_k: expected bi_fake::op on a GPU")


@pytest.mark.parametrize(
    ("replacement", "words"),
    [("bi_fake.impl:absent", "no absent in"), ("bi_fake.nowhere:x", "no module"), ("gone:x", "no module gone")],
)
def test_a_replacement_that_does_not_exist(world, replacement, words):
    ledger = {"why": "w", "upstream": "u", "remove_when": "r"}
    plan = world.plan(Patch(target=TOP_K, replacement=replacement, **ledger))
    assert words in blockers_of(plan)[0]
    assert "bi_fake.impl" not in sys.modules  # looked at, not imported


def test_a_contract_that_does_not_hold_and_one_that_breaks(world):
    world.write(
        {
            "bi_fake/contracts.py": """
                from bi_kernels.runtime.probe import Contract, Finding

                OLD = Contract(name="deep_gemm", expected="2.5", remedy="Get it.", static=lambda: Finding(False, "1.0"))
                BROKEN = Contract(name="deep_ep", expected="x", remedy="y", static=lambda: 1 / 0)
                GOOD = Contract(name="flash_mla", expected="x", remedy="y", static=lambda: Finding(True, "fine"))
                """
        }
    )
    names = [f"bi_fake.contracts:{name}" for name in ("OLD", "BROKEN", "GOOD", "ABSENT")]
    found = blockers_of(world.plan(patch(TOP_K), contracts=tuple(names)))
    assert found[0] == "deep_gemm: expected 2.5; found 1.0. Get it."
    assert "ZeroDivisionError" in found[1]
    assert "ABSENT" in found[2]
    assert len(found) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_USE_DEEP_GEMM_E8M0", "0"),
        ("VLLM_USE_DEEP_GEMM", "0"),
        ("VLLM_DS4_DECODE_KERNEL", "upstream"),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "0"),
        ("VLLM_USE_V2_MODEL_RUNNER", "1"),
        ("VLLM_PLUGINS", "bi_reload"),
        ("VLLM_PLUGINS", ""),
        ("BI_EP_TRANSPORT", "deepep_v2"),
        ("BI_PARTIAL", "maybe"),
        ("VLLM_USE_DEEP_GEMM_E8M0", "no"),
    ],
)
def test_a_refused_setting(world, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    (found,) = blockers_of(world.plan(patch(TOP_K)))
    assert found.startswith(f"{name}: ")
    assert repr(value) in found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_USE_DEEP_GEMM_E8M0", "1"),
        ("VLLM_DS4_DECODE_KERNEL", "sparse"),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "1"),
        ("VLLM_PLUGINS", "bi_kernels,bi_sparse_attn,bi_moe_deepep,bi_reload,other"),
        ("BI_EP_TRANSPORT", "nccl"),
        ("BI_PARTIAL", "1"),
    ],
)
def test_an_accepted_setting(world, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert activate(world.plan(patch(TOP_K))) is not None


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(TOP_K, TOP_K), ("vllm.ops:Model", "vllm.ops:Model.forward"), ("vllm.ops:Model.forward", "vllm.ops:Model")],
)
def test_two_plans_on_one_target_collide_and_both_are_named(world, mine, theirs):
    first = world.plan(patch(theirs, "factory", factory=True), package="bi-other")
    second = world.plan(patch(mine))
    world.plan(*first.patches, *(p for p in second.patches if mine != theirs))  # anchors of both
    activate(first)
    (found,) = blockers_of(second)
    assert "bi-fake" in found
    assert f"bi-other edits {theirs}" in found
    deactivate(first)
    assert activate(second) is not None


def test_neighbouring_names_do_not_collide(world):
    first = world.plan(patch("vllm.ops:Model.forward"), package="bi-other")
    activate(first)
    assert activate(world.plan(patch("vllm.ops:Model.fixed"))) is not None


def test_every_failure_comes_in_one_error(world, monkeypatch):
    first = world.plan(patch(TOP_K), package="bi-other")
    activate(first)
    plan = world.plan(
        patch(TOP_K),
        patch("vllm.ops:absent"),
        patch("vllm.ops:Model.forward", "absent"),
        patch("vllm.ops:Model.made", ready=False, needs="a kernel"),
        patch("vllm.ops:WIDTH", kind="publish"),
        requires_native=("nobody::op",),
        contracts=("bi_fake.nowhere:X",),
    )
    monkeypatch.setenv("VLLM_DS4_DECODE_KERNEL", "upstream")
    path = world.root / "vllm" / "ops.py"
    path.write_text(path.read_text().replace("def made(cls):", "def made(cls, x):"))
    found = blockers_of(plan)
    for words in (
        "VLLM_DS4_DECODE_KERNEL",
        "no such name in this vLLM",
        "bi-other edits",
        "no absent in",
        "expected a kernel",
        "text that differs",
        "a name that is free",
        "nobody::op",
        "bi_fake.nowhere",
    ):
        assert any(words in line for line in found), (words, found)
    assert len(found) == 9


def test_the_other_packages_blockers_are_named_in_the_same_error(world, monkeypatch):
    world.write(
        {
            "bi_second/__init__.py": "",
            "bi_second/_version.py": "__version__ = '0.1.0'",
            "bi_second/vllm_hook.py": """
                from bi_kernels.runtime.hooks import HookPlan, Patch

                PLAN = HookPlan(package="bi-second", import_name="bi_second", patches=(
                    Patch(target="vllm.ops:WIDTH", replacement="bi_second:x", why="w", upstream="u", remove_when="r",
                          ready=False, needs="a second kernel"),))
                """,
            "bi_third/__init__.py": "",
            "bi_third/_version.py": "__version__ = '0.1.0'",
            "bi_third/vllm_hook.py": "raise ImportError('broken')",
        }
    )
    fakes = {"bi-fake": "bi_fake", "bi-second": "bi_second", "bi-third": "bi_third"}
    monkeypatch.setattr(hooks, "PACKAGES", fakes)
    monkeypatch.setattr(packages, "PACKAGES", fakes)
    found = blockers_of(world.plan(patch(TOP_K, ready=False, needs="a first kernel")))
    assert any("a first kernel" in line for line in found)
    assert any("a second kernel" in line for line in found)
    assert any(line.startswith("bi-third: expected a hook module that imports") for line in found)
    for name in [name for name in sys.modules if name.startswith(("bi_second", "bi_third"))]:
        del sys.modules[name]


# --- roll-back -------------------------------------------------------------------------------------------------------


def test_a_half_failed_apply_rolls_back(world):
    ops, provider = imported("vllm.ops"), imported("vllm.provider")
    before = dict(vars(ops)), dict(vars(ops.Model)), dict(vars(provider))
    finders = list(sys.meta_path)
    plan = world.plan(
        patch("vllm.provider:provided"),
        patch("vllm.models.deepseek_v4.model:mhc"),
        patch("vllm.ops:fresh", kind="publish"),
        patch("vllm.ops:Model.forward"),
        patch(TOP_K, "broken", factory=True),
    )
    with pytest.raises(RuntimeError, match="the factory broke"):
        activate(plan)
    assert (dict(vars(ops)), dict(vars(ops.Model)), dict(vars(provider))) == before
    assert sys.meta_path == finders
    assert active_records() == {}
    assert imported("vllm.models.deepseek_v4.model").mhc(0) == "stock"


def test_a_write_that_fails_rolls_back_the_writes_before_it(world, monkeypatch):
    layers = imported("vllm.layers")
    custom_op = imported("vllm.model_executor.custom_op")

    def fail(cls, _decorated=None, name=None):
        raise AssertionError("Duplicate op name")

    plan = world.plan(
        patch("vllm.layers:Indexer.select"),
        patch("vllm.layers:Gate", "subclass", factory=True, kind="oot_pluggable_layer"),
    )
    monkeypatch.setattr(custom_op.PluggableLayer, "register_oot", classmethod(fail))
    with pytest.raises(AssertionError, match="Duplicate op name"):
        activate(plan)
    assert layers.Indexer().select() == "stock"
    assert active_records() == {}


def test_another_copy_of_vllm_on_the_path_is_refused(world, tmp_path, monkeypatch):
    plan = world.plan(patch(TOP_K))
    shadow = tmp_path / "shadow"
    (shadow / "vllm").mkdir(parents=True)
    (shadow / "vllm" / "__init__.py").write_text("")
    for name in ("ops.py", "provider.py"):
        (shadow / "vllm" / name).write_text((world.root / "vllm" / name).read_text())
    monkeypatch.syspath_prepend(str(shadow))
    imported("vllm.ops")
    assert "the file whose anchors were verified" in blockers_of(plan)[0]


def test_a_replacement_that_imports_the_model_early_is_refused(world):
    world.write({"bi_fake/eager.py": "import vllm.models.deepseek_v4.model\n\n\ndef ours(x):\n    return 'ours'\n"})
    ops = imported("vllm.ops")
    ledger = {"why": "w", "upstream": "u", "remove_when": "r"}
    plan = world.plan(Patch(target=TOP_K, replacement="bi_fake.eager:ours", **ledger))
    assert "not to import vllm.models.deepseek_v4" in blockers_of(plan)[0]
    assert ops.top_k(0) == "stock"


def test_a_replacement_that_imports_a_further_target_gets_it_patched(world):
    world.write({"bi_fake/chain.py": "import vllm.provider\n\n\ndef ours(x):\n    return vllm.provider.provided(x)\n"})
    layers = imported("vllm.layers")
    ledger = {"why": "w", "upstream": "u", "remove_when": "r"}
    plan = world.plan(
        Patch(target="vllm.layers:Indexer.select", replacement="bi_fake.chain:ours", **ledger),
        patch("vllm.provider:provided"),
    )
    activate(plan)
    assert layers.Indexer().select() == "ours"


# --- all or nothing --------------------------------------------------------------------------------------------------


def test_missing_packages_are_named_unless_partial(clean_environment, monkeypatch):
    monkeypatch.setitem(packages.PACKAGES, "bi-ghost", "bi_ghost")
    found = hooks.require_all_packages()
    assert "bi-ghost" in [blocker.subject for blocker in found]
    assert "bi-kernels" not in [blocker.subject for blocker in found]
    monkeypatch.setenv("BI_PARTIAL", "1")
    assert hooks.require_all_packages() == []


def test_a_model_is_refused_while_a_plugin_is_inactive_or_overwritten(world, monkeypatch):
    for module in (hooks, packages):
        monkeypatch.setattr(module, "PACKAGES", {"bi-fake": "bi_fake"})
    plan = world.plan(patch(TOP_K))

    def found():
        return [str(blocker) for blocker in hooks.model_hook_blockers()]

    assert "not activated" in "".join(found())
    activate(plan)
    assert hooks.active_plans() == (plan,)
    assert found() == []
    ops = imported("vllm.ops")
    ours, ops.top_k = ops.top_k, len
    assert hooks.overwritten() == (TOP_K,)
    assert "another object" in "".join(found())
    ops.top_k = ours
    assert found() == []
    monkeypatch.setattr(packages, "PACKAGES", {"bi-fake": "bi_fake", "bi-ghost": "bi_ghost"})
    assert "bi-ghost: expected all four packages" in "".join(found())


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"target": "vllm.ops.top_k"},
        {"target": "vllm.ops:"},
        {"replacement": "bi_fake.impl"},
        {"kind": "monkey"},
        {"ready": False},
    ],
)
def test_a_malformed_patch_is_refused_at_construction(bad):
    good = {"target": TOP_K, "replacement": "bi_fake.impl:ours", "why": "w", "upstream": "u", "remove_when": "r"}
    with pytest.raises(ValueError, match=r"expected|must say"):
        Patch(**{**good, **bad})


def test_a_plan_that_edits_a_target_twice_is_refused_at_construction():
    with pytest.raises(ValueError, match=r"patched twice on vLLM 0\.26: vllm\.ops:top_k"):
        HookPlan(package="bi-fake", import_name="bi_fake", patches=(patch(TOP_K), patch(TOP_K, versions=("0.26",))))
    apart = (patch(TOP_K, versions=("0.26",)), patch(TOP_K, versions=("0.33",)))
    assert HookPlan(package="bi-fake", import_name="bi_fake", patches=apart).patches_for("0.33.0") == apart[1:]
