"""Load the compiled libraries of all four packages in this process, and say what each was built from. Needs no GPU.

    python ci/checks/load.py

Exit code 1 if one of them cannot be loaded, or lacks a kernel that it declares; every reason is printed.
"""

from __future__ import annotations

import importlib
import platform

from bi_kernels.runtime.native import NativeLibrary
from bi_kernels.runtime.packages import PACKAGES


def main() -> int:
    """Load everything; a line for each library, and one for each reason against it."""
    print(f"{platform.machine()}, {platform.platform()}")
    failed = False
    for package, import_name in PACKAGES.items():
        library: NativeLibrary = importlib.import_module(f"{import_name}._native").NATIVE
        blockers = library.blockers()
        description = library.describe()
        print(f"{package}: {'refused' if blockers else 'loaded'}, nvcc {description['nvcc']}, {description['sha256']}")
        for blocker in blockers:
            print(f"  {blocker}")
        failed |= bool(blockers)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
