"""Check that every version is written once and agrees everywhere.

    python ci/checks/versions.py [WHEELS]

For each package: ``_version.py`` equals the top heading of CHANGELOG.md; ranges on sibling packages admit the siblings'
own versions, and vLLM and the libraries that it bundles are no dependencies; ``wheel.cmake = false`` stands in
pyproject.toml exactly as long as csrc/ has no ``.cu`` file. A folder of wheels holds one wheel of that version,
whose build_info.json says the same. Exit code 1 lists every fault.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

# On PyPI the last three are abandoned uploads, not the libraries of those names; vLLM is found at run time.
FORBIDDEN = {"vllm", "deep-gemm", "deep-ep", "flash-mla"}
PACKAGES = Path(__file__).resolve().parents[2] / "packages"


def source_version(package: Path) -> Version:
    """The version in the package's ``_version.py``."""
    file = package / "src" / package.name.replace("-", "_") / "_version.py"
    found = re.search(r'^__version__ = "([^"]+)"$', file.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f'{file}: expected a line __version__ = "..."')
    return Version(found[1])


def changelog_faults(package: Path, version: Version) -> list[str]:
    """Compare with the first version heading (``## [1.2.3] ...`` or ``## 1.2.3 ...``) of CHANGELOG.md."""
    file = package / "CHANGELOG.md"
    if not file.is_file():
        return [f"{package.name}: no CHANGELOG.md"]
    found = re.search(r"^## \[?v?(\d[^\]\s]*)", file.read_text(), re.MULTILINE)
    if found is None:
        return [f"{package.name}: CHANGELOG.md has no version heading"]
    if Version(found[1]) != version:
        return [f"{package.name}: _version.py says {version}, CHANGELOG.md {found[1]}"]
    return []


def project_faults(package: Path, versions: dict[str, Version]) -> list[str]:
    """Sibling ranges, and whether the build runs CMake if and only if there is something to compile."""
    project = tomllib.loads((package / "pyproject.toml").read_text())
    faults = []
    for line in project["project"]["dependencies"]:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) in FORBIDDEN:
            faults.append(f"{package.name}: depends on {requirement.name}, which must be found at run time")
        sibling = versions.get(canonicalize_name(requirement.name))
        if sibling is not None and not requirement.specifier.contains(sibling):
            faults.append(f"{package.name}: needs {line}, but {requirement.name} here is {sibling}")
    pure = project["tool"]["scikit-build"]["wheel"].get("cmake") is False
    kernels = any((package / "csrc").glob("*.cu"))
    if pure == kernels:
        state = "has kernels" if kernels else "has no kernel"
        faults.append(f"{package.name}: csrc/ {state}, but wheel.cmake is {'false' if pure else 'true'}")
    return faults


def wheel_faults(package: Path, version: Version, folder: Path) -> list[str]:
    """Name and build info of the package's wheel in ``folder``."""
    wheels = [w for w in folder.glob("*.whl") if parse_wheel_filename(w.name)[0] == canonicalize_name(package.name)]
    if len(wheels) != 1:
        return [f"{package.name}: expected one wheel in {folder}, found {len(wheels)}"]
    faults = []
    if parse_wheel_filename(wheels[0].name)[1] != version:
        faults.append(f"{package.name}: _version.py says {version}, the wheel is {wheels[0].name}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        for name in wheel.namelist():
            if name.endswith("/build_info.json"):
                info = json.loads(wheel.read(name))
                if (info["package"], Version(info["version"])) != (package.name, version):
                    faults.append(f"{package.name}: its library was built as {info['package']} {info['version']}")
    return faults


def main() -> int:
    """Check the four packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="?", type=Path, help="folder with one wheel per package")
    args = parser.parse_args()
    packages = sorted(p.parent for p in PACKAGES.glob("*/pyproject.toml"))
    versions = {p.name: source_version(p) for p in packages}
    faults = []
    for package in packages:
        faults += changelog_faults(package, versions[package.name]) + project_faults(package, versions)
        if args.wheels is not None:
            faults += wheel_faults(package, versions[package.name], args.wheels)
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    if not faults:
        print(", ".join(f"{name} {version}" for name, version in versions.items()) + ": consistent")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
