#!/usr/bin/env bash
# What CI runs on a clean checkout: the README's test command. Needs Python 3.11 and a C++ compiler, and nvcc 13 where
# CUDA kernels are to be built.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
(python3 -m pip install -q nox && python3 -m nox -t cpu) 2>&1 | tee "$log"
# nox has the last word above; end with pytest's.
grep -E '^[0-9]+ passed' "$log" | tail -n 1
