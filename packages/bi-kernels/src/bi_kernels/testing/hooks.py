"""What every package's hook table must satisfy, as tests to inherit, and the stand-in for vLLM that they run against.

The stand-in has every module, class and function that a plan names, and nothing behind them: enough to see whether a
hook leaves them alone. Whether they are the real ones is what the anchors say.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from bi_kernels.runtime.anchors import anchored_targets, anchors_file, defines, load_plan
from bi_kernels.runtime.hooks import HookPlan, Patch
from bi_kernels.runtime.packages import PACKAGES, distribution_version, module_file, public_version

if TYPE_CHECKING:
    import pytest

__all__ = ["RELEASES", "HookTableTests", "plain_config", "run_python", "write_stand_in"]

RELEASES = ("0.26.0", "0.33.0")
"""The vLLM releases that anchors are recorded for, one per supported prefix."""

_BLOCK_TORCH_AND_VLLM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Blocker())
"""

_SNAPSHOT = """
import importlib, sys

def snapshot(targets):
    found = {}
    for target in targets:
        module, _, path = target.partition(":")
        owner = importlib.import_module(module)
        *classes, name = path.split(".")
        for part in classes:
            owner = vars(owner)[part]
        found[target] = vars(owner).get(name)
    variables = dict(sys.modules["vllm.envs"].environment_variables) if "vllm.envs" in sys.modules else {}
    return found, variables

def same(one, other):
    return one[1] == other[1] and one[0].keys() == other[0].keys() and all(one[0][k] is other[0][k] for k in one[0])
"""


def run_python(code: str, **environ: str) -> str:
    """Run ``code`` in a fresh interpreter with this one's import path; returns what it printed.

    Args:
        code: Python source; dedented.
        environ: Environment variables on top of this process's, in which the switches are unset. ``PYTHONPATH``
            comes before this interpreter's path.

    Raises:
        AssertionError: It ended with an error, whose text is in the message.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "BI_"))}
    path = [environ.pop("PYTHONPATH", ""), *sys.path]
    clean["PYTHONPATH"] = os.pathsep.join(entry for entry in path if entry)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**clean, **environ}, capture_output=True, text=True
    )
    if done.returncode:
        raise AssertionError(f"exit status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def write_stand_in(root: Path, plan: HookPlan, version: str) -> tuple[str, ...]:
    """Write an importable ``vllm`` of ``version`` below ``root``, with everything that ``plan`` edits or relies on.

    Returns:
        The targets that can be imported and compared: all but those that must not exist upstream.
    """
    tree: dict[str, dict[str, set[str]]] = {"vllm": {}, "vllm.envs": {}}
    targets = anchored_targets(plan, version)
    owners = [f"{p.module}:{'.'.join(p.path[:-1])}" for p in plan.patches_for(version) if p.kind == "publish"]
    for target in (*targets, *owners):
        module, _, path = target.partition(":")
        head, _, attribute = path.partition(".")
        names = tree.setdefault(module, {})
        if head:
            names.setdefault(head, set()).update({attribute} - {""})
    for module in list(tree):
        parts = module.split(".")
        for depth in range(1, len(parts)):
            tree.setdefault(".".join(parts[:depth]), {})
    for module, names in tree.items():
        stem = root.joinpath(*module.split("."))
        is_package = any(other.startswith(f"{module}.") for other in tree)
        file = stem / "__init__.py" if is_package else stem.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_stub(names) + ("\nenvironment_variables = {}\n" if module == "vllm.envs" else ""))
    metadata = root / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return targets


def plain_config(**changes: Any) -> SimpleNamespace:
    """Of a ``VllmConfig`` what refusals look at, for an aligned run on one GPU; ``section__name=value`` changes it."""
    sections: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_expert_parallel": False,
            "enable_eplb": False,
            "use_ubatching": False,
            "all2all_backend": "allgather_reducescatter",
        },
        "model_config": {"head_dtype": "torch.bfloat16", "hf_config": SimpleNamespace(expert_dtype="fp8")},
        "cache_config": {"cache_dtype": "fp8_ds_mla"},
        "attention_config": {"use_fp4_indexer_cache": False, "backend": None},
        "kernel_config": {"moe_backend": "auto"},
        "scheduler_config": {"disable_hybrid_kv_cache_manager": None},
        "load_config": {"load_format": "auto"},
    }
    plain: dict[str, Any] = {"lora_config": None, "speculative_config": None}
    for name, value in changes.items():
        section, _, entry = name.partition("__")
        if entry:
            sections[section][entry] = value
        else:
            plain[section] = value
    return SimpleNamespace(**plain, **{name: SimpleNamespace(**entries) for name, entries in sections.items()})


def _stub(names: dict[str, set[str]]) -> str:
    function = "def {0}(*args, **kwargs):\n    raise AttributeError('{0}')\n"
    lines = []
    for name, attributes in sorted(names.items()):
        if not attributes and not name[0].isupper():
            lines.append(function.format(name))
            continue
        body = "".join(textwrap.indent(function.format(attribute), "    ") for attribute in sorted(attributes))
        lines.append(f"class {name}:\n{body or '    pass'}\n")
    return "\n".join(lines)


class HookTableTests:
    """What every table must satisfy. Inherit and set the attributes.

    Attributes:
        hook: The package's ``vllm_hook`` module.
        asks: By refused feature what asks for it: arguments of :func:`plain_config`, or the GPU's ``capability``.
    """

    hook: ClassVar[ModuleType]
    asks: ClassVar[dict[str, dict[str, Any]]]

    @property
    def plan(self) -> HookPlan:
        """The package's plan."""
        plan: HookPlan = self.hook.PLAN
        return plan

    def test_imports_where_torch_and_vllm_do_not(self) -> None:
        """An entry module that raises at import is logged and dropped by vLLM, and stock vLLM runs with the flag on."""
        run_python(_BLOCK_TORCH_AND_VLLM + f"import {self.hook.__name__}")

    def test_off_imports_nothing(self) -> None:
        """Unset or 0: register() imports neither vLLM nor torch."""
        code = f"""
            import sys
            from {self.plan.import_name} import vllm_hook
            assert vllm_hook.register() is None
            assert not {{"torch", "vllm"}} & set(sys.modules)
        """
        run_python(code)
        run_python(code, VLLM_BATCH_INVARIANT="0")

    def test_off_leaves_every_symbol(self, tmp_path: Path) -> None:
        """Unset: every symbol that the plan would edit keeps its identity, and no name is added."""
        for version in RELEASES:
            root = tmp_path / version
            targets = write_stand_in(root, self.plan, version)
            code = f"""
                targets = {[*targets, *self._published(version)]!r}
                before = snapshot(targets)
                from {self.plan.import_name} import vllm_hook
                vllm_hook.register()
                assert same(before, snapshot(targets))
            """
            run_python(_SNAPSHOT + textwrap.dedent(code), PYTHONPATH=str(root))

    def test_on_refuses_everything_at_once(self, tmp_path: Path) -> None:
        """The flag on: one error with every patch that is not ready, its need and its remedy, and vLLM untouched.

        With this environment's vLLM, or its absence as one more blocker, then with each release's stand-in. The check
        does not import vLLM. BI_PARTIAL=1 forgives absent packages when a model is built; it opens no gate here.
        """
        cases = {version: write_stand_in(tmp_path / version, self.plan, version) for version in RELEASES}
        targets = {str(tmp_path / v): [*known, *self._published(v)] for v, known in cases.items()}
        code = f"""
            import json, os
            from bi_kernels.runtime.errors import HookError
            from {self.plan.import_name} import vllm_hook

            def refused():
                try:
                    vllm_hook.register()
                except HookError as error:
                    return str(error)
                raise SystemExit("register() did not raise")

            messages = [refused()]
            for root, targets in {targets!r}.items():
                sys.path.insert(0, root)
                messages.append(refused())
                assert "vllm" not in sys.modules
                before = snapshot(targets)
                os.environ["BI_PARTIAL"] = "1"
                assert refused() == messages[-1]
                assert same(before, snapshot(targets))
                del os.environ["BI_PARTIAL"]
                for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
                    del sys.modules[name]
            print(json.dumps(messages))
        """
        printed = run_python(_SNAPSHOT + textwrap.dedent(code), VLLM_BATCH_INVARIANT="1")
        installed = public_version(distribution_version("vllm") or "")
        for version, message in zip((installed, *RELEASES), json.loads(printed), strict=True):
            assert bool(version) != ("vllm: expected" in message), message
            for patch in self._patches(version or RELEASES[0]):  # without vLLM: the release to install
                start = f"{self.plan.package}: {patch.target}: expected {patch.needs};"
                line = next((line for line in message.splitlines() if start in line), "")
                assert patch.ready or line.endswith("or unset VLLM_BATCH_INVARIANT."), f"{start} not in:\n{message}"

    def test_ledger_is_complete(self) -> None:
        """Every patch says why it exists, where it belongs and when it goes; only existing replacements are ready."""
        for patch in self.plan.patches:
            assert all((patch.why, patch.upstream, patch.remove_when)), f"{patch.target}: empty ledger field"
            assert set(patch.versions) <= set(self.plan.vllm), f"{patch.target}: {patch.versions}"
            module, _, name = patch.replacement.partition(":")
            assert module.startswith(f"{self.plan.import_name}."), f"{patch.target}: {patch.replacement}"
            assert patch.ready != bool(patch.needs), f"{patch.target}: ready={patch.ready}, needs {patch.needs!r}"
            path = module_file(module)
            exists = path is not None and defines(path.read_text(encoding="utf-8"), name)
            assert exists or not patch.ready, f"{patch.target}: no {patch.replacement}"
        for version in RELEASES:
            assert self._patches(version), f"nothing is patched on {version}"

    def test_no_other_package_edits_the_same(self) -> None:
        """Targets of the installed packages never overlap, so that any subset can be activated in any order."""
        others = [other for package in PACKAGES if package != self.plan.package and (other := load_plan(package))]
        for version in RELEASES:
            for patch, other, theirs in ((p, o, t) for p in self._patches(version) for o in others for t in o.patches):
                shorter = min(len(patch.path), len(theirs.path))
                overlap = patch.module == theirs.module and patch.path[:shorter] == theirs.path[:shorter]
                assert not overlap, f"{patch.target} here, {theirs.target} in {other.package}"

    def test_anchors_match_the_table(self) -> None:
        """Every target of every patch has an anchor for each release that it names, and no anchor is left over."""
        for version in RELEASES:
            path = anchors_file(self.plan.import_name, version)
            assert path is not None, f"{self.plan.package} is not installed"
            record = json.loads(path.read_text(encoding="utf-8"))
            assert record["package"] == self.plan.package, path
            assert record["vllm"] == version, path
            recorded, named = set(record["targets"]), set(anchored_targets(self.plan, version))
            assert recorded == named, f"{path}: without anchor {named - recorded}, left over {recorded - named}"
            for target, anchor in record["targets"].items():
                assert re.fullmatch("[0-9a-f]{64}", anchor), f"{path}: {target}: {anchor}"
            assert {p.name for p in path.parent.iterdir()} == {f"vllm-{release}.json" for release in RELEASES}

    def test_refused_settings(self) -> None:
        """Refusals are owned by the package that lists them, say why, and are listed once."""
        refused = self.hook.REFUSED_SETTINGS
        assert all(entry.feature and entry.reason for entry in refused), refused
        assert {entry.owner for entry in refused} == {self.plan.package}, refused
        assert len({entry.feature for entry in refused}) == len(refused), refused

    def test_what_is_refused_is_found_in_a_configuration(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A plain aligned configuration asks for nothing refused, and each of :attr:`asks` for just that one."""
        refused = {entry.feature: entry.found for entry in self.hook.REFUSED_SETTINGS if entry.found is not None}
        assert set(self.asks) == set(refused)
        for asked, changes in ((None, {}), *self.asks.items()):
            capability = changes.get("capability", (9, 0))
            monkeypatch.setattr("torch.cuda.is_available", lambda: True)
            monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None, found=capability: found)
            config = plain_config(**{name: value for name, value in changes.items() if name != "capability"})
            assert [name for name, found in refused.items() if found(config)] == [asked] * (asked is not None), changes

    def _patches(self, version: str) -> list[Patch]:
        return list(self.plan.patches_for(version))

    def _published(self, version: str) -> list[str]:
        return [patch.target for patch in self._patches(version) if patch.kind == "publish"]
