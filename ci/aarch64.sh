#!/usr/bin/env bash
# Build, audit, test and load the four CUDA libraries on this host: the recipe of docs/aarch64.md. No GPU is needed.
#
# Needs Python 3.11 or newer with venv, a C++ compiler and nvcc. Wheels go to build/wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
uname -m
nvcc --version | tail -n 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/python" -m pip install -q nox
BI_BUILD_CUDA=on "$work/bin/python" -m nox -s build artifacts subset tests
"$work/bin/python" -m pip install -q build/wheels/*.whl # brings torch; on aarch64 it must be a CUDA build
"$work/bin/python" ci/checks/load.py
