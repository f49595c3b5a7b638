"""Promises that the repository makes about itself: commands, files, stems, docstrings."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ("bi-kernels", "bi-sparse-attn", "bi-moe-deepep", "bi-reload")


def test_readme_has_the_two_commands() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert "python3 -m pip install nox && nox -s aligned_e2e\n" in blocks
    assert "python3 -m pip install nox && nox -t cpu\n" in blocks


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_every_part(package: str) -> None:
    folder, name = ROOT / "packages" / package, package.replace("-", "_")
    files = ("pyproject.toml", "CMakeLists.txt", "README.md", "CHANGELOG.md", "UPSTREAM.md", "LICENSE")
    source = [f"src/{name}/{part}" for part in ("_version.py", "_ops.py", "vllm_hook.py", "py.typed")]
    anchors = [f"src/{name}/anchors/vllm-{version}.json" for version in ("0.26.0", "0.33.0")]
    missing = [
        part for part in (*files, *source, *anchors, "csrc", "tests", "benchmarks") if not (folder / part).exists()
    ]
    assert not missing


@pytest.mark.parametrize("package", PACKAGES)
def test_every_kernel_has_its_stem_everywhere(package: str) -> None:
    folder, name = ROOT / "packages" / package, package.replace("-", "_")
    for kernel in folder.glob("csrc/*.cu"):
        stem = kernel.stem
        for part in (f"src/{name}/{stem}.py", f"src/{name}/reference/{stem}.py", f"benchmarks/bench_{stem}.py"):
            assert (folder / part).is_file(), f"{stem} has no {part}"
        assert list(folder.glob(f"tests/test_{stem}*.py")), f"{stem} has no tests"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_say_what_they_promise(package: str) -> None:
    module = importlib.import_module(package.replace("-", "_"))
    for export in module.__all__:
        value = getattr(module, export)
        if inspect.isfunction(value):
            assert value.__doc__, f"{export} has no docstring"
            if "exact op" in value.__doc__.lower() or "bounded op" in value.__doc__.lower():
                assert "Invariance:" in value.__doc__, f"{export} is an op without an invariance clause"


def test_packages_import_neither_torch_nor_vllm() -> None:
    names = [p.replace("-", "_") for p in PACKAGES]
    code = "import sys\n" + "".join(f"import {n}, {n}.vllm_hook\n{n}.vllm_hook.register()\n" for n in names)
    code += "raise SystemExit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
