"""What must hold where one package is installed alone (with bi-kernels, which the others need).

Runs in an environment without vLLM: the package imports, its hook is inert with the flag unset and refuses with it
set, and doctor names what is absent.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys

PACKAGES = ("bi-kernels", "bi-sparse-attn", "bi-moe-deepep", "bi-reload")

_INERT = """
import importlib.metadata, sys
(point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name={name!r})
point.load()()
assert "torch" not in sys.modules and "vllm" not in sys.modules, "the inert hook imported torch or vllm"
"""

_REFUSES = """
import importlib.metadata
from bi_kernels.runtime.errors import HookError
(point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name={name!r})
try:
    point.load()()
except HookError as error:
    assert "vllm" in str(error), error
else:
    raise SystemExit("register() did not refuse without vLLM")
"""


def main(package: str) -> int:
    """Check the environment this runs in; returns the exit code."""
    name = package.replace("-", "_")
    alone = {"bi-kernels", package}
    found = {p for p in PACKAGES if _installed(p)}
    if found != alone:
        print(f"expected exactly {sorted(alone)} to be installed, found {sorted(found)}")
        return 1
    module = importlib.import_module(name)
    for export in module.__all__:
        getattr(module, export)
    off = {k: v for k, v in os.environ.items() if k != "VLLM_BATCH_INVARIANT"}
    on = off | {"VLLM_BATCH_INVARIANT": "1"}
    subprocess.run([sys.executable, "-c", _INERT.format(name=name)], env=off, check=True)
    subprocess.run([sys.executable, "-c", _REFUSES.format(name=name)], env=on, check=True)
    doctor = subprocess.run(["bi-doctor"], env=on | {"COLUMNS": "200"}, capture_output=True, text=True, check=False)
    print(doctor.stdout)
    missing = [p for p in PACKAGES if p not in alone and p not in doctor.stdout]
    if doctor.returncode != 1 or missing:
        print(f"doctor: expected exit code 1 and a row for each of {missing}, got {doctor.returncode}")
        print(doctor.stderr)
        return 1
    print(f"{package} alone: imports, is inert, refuses, and doctor names what is absent")
    return 0


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
