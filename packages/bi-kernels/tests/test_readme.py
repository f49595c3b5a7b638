"""README.md: its example runs as written, and its tables are those of the recorded results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from bi_kernels.testing.hooks import run_python

PACKAGE = Path(__file__).parents[1]


def test_example_runs_as_written():
    (example,) = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.S)
    assert 10 <= sum(bool(line.strip()) for line in example.splitlines()) <= 15
    assert run_python(example, CUDA_VISIBLE_DEVICES="") == "torch.float8_e4m3fn (5, 4) (9, 256)\n"


def test_tables_are_generated_from_the_results():
    done = subprocess.run([sys.executable, str(PACKAGE / "benchmarks" / "tables.py"), "--check"])
    assert done.returncode == 0, "run python packages/bi-kernels/benchmarks/tables.py"
