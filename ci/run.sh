#!/usr/bin/env bash
# What CI runs on a clean checkout. Needs Python 3.11 and a C++ compiler; nvcc 13 where CUDA kernels are to be built.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m pip install -q nox
python3 -m nox -t cpu
