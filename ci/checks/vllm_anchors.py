"""Anchors of the four hooks against one vLLM release, read from its wheel without installing or importing it.

Prints a table and exits 1 if any target is missing, has moved, or has no anchor. Without ``--wheel`` the wheel of
``--vllm`` is downloaded once (about 0.3 GB) and kept::

    python ci/checks/vllm_anchors.py --vllm 0.26.0
    python ci/checks/vllm_anchors.py --wheel vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from bi_kernels.runtime import anchors

ROOT = Path(__file__).resolve().parents[2]


def fetch(version: str, cache: Path) -> Path:
    """The wheel of vLLM ``version`` in ``cache``, downloaded by pip if it is not there yet."""
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob(f"vllm-{version}-*.whl")):
        # Only Linux wheels hold the CUDA model code; naming the platform lets other systems check them too.
        platform = ["--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:"]
        download = ["-m", "pip", "download", "-q", "--no-deps", *platform, "--dest", str(cache), f"vllm=={version}"]
        subprocess.run([sys.executable, *download], check=True)
    (wheel,) = cache.glob(f"vllm-{version}-*.whl")
    return wheel


def main(argv: Sequence[str] | None = None) -> int:
    """Find the wheel, make sure that it is the release asked for, and check all four packages against it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--vllm", metavar="VERSION", help="release to check; with --wheel, what the wheel must be")
    parser.add_argument("--wheel", type=Path, help="a wheel file that is already here")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "vllm-wheels", help="where downloads are kept")
    arguments = parser.parse_args(argv)
    if arguments.wheel is None and arguments.vllm is None:
        parser.error("name a release with --vllm or a file with --wheel")
    wheel = arguments.wheel or fetch(arguments.vllm, arguments.cache)
    try:
        found = anchors.WheelSource(wheel).version
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        parser.error(f"cannot read the wheel: {error}")
    if found != (arguments.vllm or found):
        parser.error(f"{wheel.name}: expected vLLM {arguments.vllm}, got {found}")
    return anchors.main(["--wheel", str(wheel)])


if __name__ == "__main__":
    sys.exit(main())
