"""``python -m fuzz [TARGET ...] [--seconds N]``: coverage-guided fuzzing of byte inputs with atheris.

Every target runs in a process of its own. Exit code 0: none failed; the crashing input of one that did is left beside.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Run targets one after the other."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=int, default=20, help="for each target")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)

    import atheris

    with atheris.instrument_imports(include=["aligned_e2e", "bi_kernels", "bi_reload", "bi_sparse_attn"]):
        from .targets import SEEDS, TARGETS

    if not arguments.here:
        failed = []
        for name in arguments.targets or TARGETS:
            command = [sys.executable, "-m", "fuzz", name, "--seconds", str(arguments.seconds), "--here"]
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
        print(f"failed: {', '.join(failed)}" if failed else "no target failed")
        return int(bool(failed))

    (name,) = arguments.targets
    with tempfile.TemporaryDirectory() as corpus:
        if name in SEEDS:
            (Path(corpus) / "seed").write_bytes(SEEDS[name]())
        options = [f"-max_total_time={arguments.seconds}", "-max_len=8192", "-verbosity=0", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *options, corpus], TARGETS[name])
        atheris.Fuzz()  # ends the process
    return 0


if __name__ == "__main__":
    sys.exit(main())
