from __future__ import annotations

import json
import textwrap
import zipfile

import pytest
from fake_vllm import VLLM, patch

from bi_kernels.runtime import anchors
from bi_kernels.runtime.anchors import (
    InstalledSource,
    Source,
    WheelSource,
    anchored_targets,
    check_plan,
    fingerprint,
    target_text,
)
from bi_kernels.runtime.errors import HookError
from bi_kernels.runtime.hooks import HookPlan


class Texts(Source):
    """Modules given as a dictionary."""

    def __init__(self, **modules):
        super().__init__()
        self.version = "0.26.0"
        self.files = {f"{name.replace('.', '/')}.py": text for name, text in modules.items()}

    def read(self, path):
        return self.files.get(path)


SOURCE = '''\
import os.path as where
from typing import overload
from pkg.provider import thing, other as renamed

CONSTANT = 1
a, (b, *rest) = 1, (2, 3)
annotated: int = (
    4
)


@overload
def twice(x: int) -> int: ...
@overload
def twice(x: str) -> str: ...
def twice(x):
    return x


if CONSTANT:
    def conditional():
        return 1
else:
    def conditional():
        return 2

try:
    import missing
except ImportError:
    missing = None


@decorate(
    "arguments"
)
class Outer:
    """Doc."""

    FIELD = 3

    @property
    def value(self):
        return 1

    @value.setter
    def value(self, new):
        pass

    async def run(self):
        def nested():
            pass

    class Inner:
        def deep(self):
            return "a
b"
'''.replace('"a\nb"', "'''a\n\fb'''")

PROVIDER = "def thing():\n    return 1\n\n\nfrom pkg.deeper import other\n"
DEEPER = "def other():\n    return 2\n"


@pytest.fixture
def source():
    return Texts(**{"pkg.mod": SOURCE, "pkg.provider": PROVIDER, "pkg.deeper": DEEPER})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CONSTANT", "CONSTANT = 1"),
        ("a", "a, (b, *rest) = 1, (2, 3)"),
        ("rest", "a, (b, *rest) = 1, (2, 3)"),
        ("annotated", "annotated: int = (\n    4\n)"),
        (
            "twice",
            "@overload\ndef twice(x: int) -> int: ...\n@overload\ndef twice(x: str) -> str: ...\n"
            "def twice(x):\n    return x",
        ),
        ("conditional", "    def conditional():\n        return 1\n    def conditional():\n        return 2"),
        ("missing", "import missing\n    missing = None"),
        ("where", "import os.path as where"),
        ("Outer.FIELD", "    FIELD = 3"),
        (
            "Outer.value",
            "    @property\n    def value(self):\n        return 1\n"
            "    @value.setter\n    def value(self, new):\n        pass",
        ),
        ("Outer.run", "    async def run(self):\n        def nested():\n            pass"),
        ("Outer.Inner.deep", "        def deep(self):\n            return '''a\n\fb'''"),
        ("thing", "from pkg.provider import thing\ndef thing():\n    return 1"),
        (
            "renamed",
            "from pkg.provider import other as renamed\nfrom pkg.deeper import other\ndef other():\n    return 2",
        ),
        ("nested", None),
        ("Outer.nested", None),
        ("Outer.FIELD.x", None),
        ("twice.x", None),
        ("absent", None),
        ("where.join", None),
    ],
)
def test_the_text_of_a_target(source, name, text):
    assert target_text(source, f"pkg.mod:{name}") == text


def test_a_decorated_class_starts_at_its_decorator(source):
    assert target_text(source, "pkg.mod:Outer").startswith('@decorate(\n    "arguments"\n)\nclass Outer:')


def test_a_missing_or_broken_module_has_no_text(source):
    source.files["pkg/broken.py"] = "def x(:\n"
    assert target_text(source, "pkg.gone:x") is None
    assert target_text(source, "pkg.broken:x") is None


def test_relative_imports_and_reexports_are_followed():
    source = Texts(**{"pkg.sub.mod": "from ..base import f\nfrom . import g\n", "pkg.base": "def f(): pass\n"})
    source.files["pkg/sub/__init__.py"] = "from .impl import g\n"
    source.files["pkg/sub/impl.py"] = "def g(): pass\n"
    assert target_text(source, "pkg.sub.mod:f") == "from pkg.base import f\ndef f(): pass"
    assert target_text(source, "pkg.sub.mod:g") == "from pkg.sub import g\nfrom pkg.sub.impl import g\ndef g(): pass"


def test_a_class_reached_through_an_import_is_the_providers():
    source = Texts(**{"pkg.mod": "from pkg.base import C\n", "pkg.base": "class C:\n    def f(self): pass\n"})
    assert target_text(source, "pkg.mod:C.f") == "    def f(self): pass"


def test_circular_imports_end():
    source = Texts(**{"pkg.a": "from pkg.b import x\n", "pkg.b": "from pkg.a import x\n"})
    assert "from pkg.b import x" in target_text(source, "pkg.a:x")


def test_a_changed_provider_changes_the_consumers_anchor(source):
    before = fingerprint(target_text(source, "pkg.mod:renamed"))
    changed = Texts(**{"pkg.mod": SOURCE, "pkg.provider": PROVIDER, "pkg.deeper": DEEPER.replace("2", "3")})
    assert fingerprint(target_text(changed, "pkg.mod:renamed")) != before


def test_line_endings_do_not_matter(source):
    crlf = Texts(**{"pkg.mod": anchors._decode(SOURCE.replace("\n", "\r\n").encode())})
    assert target_text(crlf, "pkg.mod:twice") == target_text(source, "pkg.mod:twice")


def test_defines():
    assert anchors.defines("from x import a as b\nclass C: pass\n", "b")
    assert anchors.defines("if 1:\n    def f(): pass\n", "f")
    assert not anchors.defines("from x import a as b\n", "a")


def test_what_a_kind_relies_on_is_anchored_too():
    def plan(*patches):
        return HookPlan(package="bi-fake", import_name="bi_fake", patches=patches)

    oot = plan(patch("vllm.layers:Gate", kind="oot_pluggable_layer"))
    assert "vllm.model_executor.custom_op:PluggableLayer.register_oot" in anchored_targets(oot, "0.26.0")
    assert anchored_targets(plan(patch("vllm.envs:NEW", kind="env")), "0.26.0") == ("vllm.envs:__getattr__",)
    assert anchored_targets(plan(patch("vllm.ops:fresh", kind="publish")), "0.26.0") == ()
    elsewhere = plan(patch("vllm.ops:top_k", versions=("0.33",)))
    assert anchored_targets(elsewhere, "0.26.0") == ()
    assert anchored_targets(elsewhere, "0.33.1") == ("vllm.ops:top_k",)


def test_the_installed_source_and_the_wheel_agree(world, tmp_path):
    wheel = make_wheel(tmp_path)
    installed, zipped = InstalledSource(), WheelSource(wheel)
    assert installed.version == zipped.version == "0.26.0"
    for target in ("vllm.ops:top_k", "vllm.ops:provided", "vllm.layers:Gate.forward", "vllm.ops:absent"):
        assert target_text(installed, target) == target_text(zipped, target)


def make_wheel(directory, version="0.26.0", changes=None):
    path = directory / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**VLLM, **(changes or {})}.items():
            archive.writestr(name, textwrap.dedent(text))
        archive.writestr(
            f"vllm-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
    return path


def test_every_state_is_reported_and_nothing_raises(world):
    plan = world.plan(
        patch("vllm.ops:top_k"),
        patch("vllm.ops:Model"),
        patch("vllm.ops:absent"),
        patch("vllm.gone:x"),
        patch("vllm.ops:WIDTH", kind="publish"),
        patch("vllm.ops:fresh", kind="publish"),
        patch("vllm.gone:fresh", kind="publish"),
        patch("vllm.envs:VLLM_KNOWN", kind="env"),
        patch("vllm.envs:VLLM_NEW", kind="env"),
        patch("vllm.gone:VLLM_NEW", kind="env"),
    )
    recorded = {"vllm.ops:top_k": "0" * 64, "vllm.envs:__getattr__": "unused"}
    recorded["vllm.envs:__getattr__"] = fingerprint(target_text(InstalledSource(), "vllm.envs:__getattr__"))
    assert {check.target: check.state for check in check_plan(plan, InstalledSource(), recorded)} == {
        "vllm.ops:top_k": "moved",
        "vllm.ops:Model": "unrecorded",
        "vllm.ops:absent": "missing",
        "vllm.gone:x": "missing",
        "vllm.ops:WIDTH": "occupied",
        "vllm.ops:fresh": "ok",
        "vllm.gone:fresh": "missing",
        "vllm.envs:__getattr__": "ok",
        "vllm.envs:VLLM_KNOWN": "occupied",
        "vllm.envs:VLLM_NEW": "ok",
        "vllm.gone:VLLM_NEW": "missing",
    }


HOOK = """
    from bi_kernels.runtime.hooks import HookPlan, Patch

    PLAN = HookPlan(package="bi-fake", import_name="bi_fake", patches=(
        Patch(target="vllm.ops:top_k", replacement="bi_fake.impl:ours", why="w", upstream="u", remove_when="r"),
        Patch(target="vllm.ops:fresh", replacement="bi_fake.impl:ours", kind="publish",
              why="w", upstream="u", remove_when="r"),
    ))
    """


@pytest.fixture
def only_fake(world, monkeypatch):
    world.write({"bi_fake/vllm_hook.py": HOOK})
    monkeypatch.setattr(anchors, "PACKAGES", {"bi-fake": "bi_fake"})
    return world


def test_the_command_line_records_then_checks_a_wheel(only_fake, tmp_path, capsys):
    wheel = make_wheel(tmp_path)
    arguments = ["--wheel", str(wheel), "--package", "bi-fake"]
    assert anchors.main(arguments) == 1
    assert "unrecorded" in capsys.readouterr().out
    assert anchors.main([*arguments, "--write"]) == 0
    record = json.loads((only_fake.root / "bi_fake" / "anchors" / "vllm-0.26.0.json").read_text())
    assert (record["package"], record["vllm"], list(record["targets"])) == ("bi-fake", "0.26.0", ["vllm.ops:top_k"])
    assert anchors.main(arguments) == 0
    assert "moved" not in capsys.readouterr().out
    assert anchors.main(["--installed"]) == 0

    changed = {"vllm/ops.py": VLLM["vllm/ops.py"].replace("def top_k(x)", "def top_k(x, y)")}
    assert anchors.main(["--wheel", str(make_wheel(tmp_path, changes=changed))]) == 1
    assert "moved" in capsys.readouterr().out

    gone = {"vllm/ops.py": "fresh = 1\n"}
    assert anchors.main(["--wheel", str(make_wheel(tmp_path, changes=gone))]) == 1
    printed = capsys.readouterr().out
    assert "missing" in printed
    assert "occupied" in printed


def test_a_release_with_a_missing_target_fails_even_when_recording(only_fake, tmp_path):
    wheel = make_wheel(tmp_path, changes={"vllm/ops.py": ""})
    assert anchors.main(["--wheel", str(wheel), "--write"]) == 1


def test_a_package_that_is_not_installed_fails_the_check(only_fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(anchors, "PACKAGES", {"bi-ghost": "bi_ghost"})
    assert anchors.main(["--wheel", str(make_wheel(tmp_path))]) == 1
    assert "not installed" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"no zip", "other"])
def test_a_file_that_is_no_vllm_wheel_is_named(tmp_path, capsys, content):
    path = tmp_path / "x.whl"
    if content == "other":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other-1.0.dist-info/METADATA", "Version: 1.0\n")
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as raised:
        anchors.main(["--wheel", str(path)])
    assert raised.value.code == 2
    assert "cannot read the wheel" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{", '{"targets": 3}', '{"targets": {"a": 1}}', "[" * 100_000])
def test_damaged_anchors_are_not_the_same_as_none(content, tmp_path, monkeypatch):
    path = tmp_path / "vllm-0.26.0.json"
    path.write_text(content, encoding="utf-8")
    monkeypatch.setattr(anchors, "anchors_file", lambda *_: path)
    with pytest.raises(HookError, match=r"vllm-0\.26\.0\.json: expected recorded anchors"):
        anchors.load_anchors("bi_kernels", "0.26.0")
