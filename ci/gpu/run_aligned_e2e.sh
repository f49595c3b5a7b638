#!/usr/bin/env bash
# aligned_e2e on a GPU host without nox: profile h200 (or h100) in real vLLM 0.26, from installed wheels.
#
#   ci/gpu/run_aligned_e2e.sh WHEEL... [-- ARGUMENT...]     e.g. -- --quick, -- --only reload --only "reload, cold"
#
# WHEEL... are CUDA wheels of the four packages; vLLM is importable already. ARGUMENT... go to python -m aligned_e2e.
# Everything ends within $LIMIT seconds (default 570), engines that are not done included, and comes to $OUT (default
# build/gpu): report.json, report.html, records.tar.gz (records and logs), caches.tar.xz if $PACK_CACHES is set.
# Called again it goes on where it stopped: records are kept in $WORK (default build/aligned_e2e/vllm), and $RECORDS
# names a records.tar.gz of another machine. $CACHES names a caches.tar.xz: a cold start compiles for minutes.
# $SUITES=1 first runs the packages' GPU tests, side by side. $PROFILE: h200 or h100.
set -uo pipefail
began=$SECONDS
root=$(cd "$(dirname "$0")/../.." && pwd)
wheels=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    wheels+=("$(realpath "$1")")
    shift
done
[ "${1:-}" = -- ] && shift
limit=${LIMIT:-570}
OUT=$(realpath -m "${OUT:-build/gpu}")
WORK=$(realpath -m "${WORK:-$root/build/aligned_e2e/vllm}")
RECORDS=${RECORDS:+$(realpath "$RECORDS")}
CACHES=${CACHES:+$(realpath "$CACHES")}
mkdir -p "$OUT" "$WORK/parts"
site=$(mktemp -d)
python=${PYTHON:-python3}

pack() {
    # Traces are judged where they are made: a hundred megabytes, and their findings are in sabotage.json.
    tar -C "$WORK" -czf "$OUT/records.tar.gz" --exclude 'sabotage/*/rollout.json' --exclude 'sabotage/*/recomputation.json' parts
    if [ -n "${PACK_CACHES:-}" ]; then
        local caches=() folder
        for folder in "$HOME"/{.triton,.tilelang,.cache/vllm,.cache/torch,.deep_gemm} /tmp/*/cutlass_python_cache; do
            [ -d "$folder" ] && caches+=("${folder#/}")
        done
        timeout 60 tar -C / --exclude '*.lock' -cJf "$OUT/caches.tar.xz" "${caches[@]}"
    fi
    rm -rf "$site"
}
trap pack EXIT

[ -n "$RECORDS" ] && tar -C "$WORK" --skip-old-files -xzf "$RECORDS"
[ -n "$CACHES" ] && tar -C / -xJf "$CACHES"
if [ ${#wheels[@]} -gt 0 ]; then
    "$python" -m pip install -q --no-deps --no-index --no-compile --target "$site" "${wheels[@]}" || exit 1
fi
export PYTHONPATH="$site:$root/ci${PYTHONPATH:+:$PYTHONPATH}" PYTHONFAULTHANDLER=1
unset BI_PARTIAL VLLM_PLUGINS

# A fresh install may have no bytecode, and then a dozen engines that start at once compile the same modules each.
# As a module: compileall's worker processes import the main one by its name or path, and a script on stdin has neither.
mapfile -t folders < <("$python" - <<'PY'
import importlib.util

found = [importlib.util.find_spec(name) for name in ("vllm", "tilelang", "cutlass")]
print(*(path for spec in found if spec for path in spec.submodule_search_locations or ()), sep="\n")
PY
)
timeout 60 "$python" -m compileall -qq -j 0 "$site" "${folders[@]}"

{
    date -u '+%F %T'
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    "$python" - <<'PY'
import importlib.metadata
import sys

from bi_kernels.runtime.packages import PACKAGES, distribution_version, installed_version

print("python", sys.version.split()[0])
for name in ("torch", "vllm", "triton"):
    print(name, distribution_version(name))
for package in PACKAGES:
    print(package, installed_version(package))
found = importlib.metadata.entry_points(group="vllm.general_plugins")
print("plug-ins:", ", ".join(sorted(point.name for point in found)))
PY
} 2>&1 | tee "$OUT/host.txt"

status=0
if [ -n "${SUITES:-}" ]; then
    # Side by side, with one thread each: a thread per core for the small references would starve what else runs here.
    declare -A suites=()
    for package in bi-kernels bi-sparse-attn bi-moe-deepep bi-reload; do
        (cd "$root" && OMP_NUM_THREADS=1 timeout -k 5 "${SUITES_LIMIT:-240}" "$python" -X faulthandler -m pytest \
            -p no:cacheprovider -p no:benchmark -q -m "gpu and not vllm" \
            --junitxml "$WORK/parts/suite-$package.xml" "packages/$package/tests") >"$OUT/suite-$package.txt" 2>&1 &
        suites[$package]=$!
    done
    for package in "${!suites[@]}"; do
        wait "${suites[$package]}" || status=$?
        echo "== suite of $package: $(tail -n 1 "$OUT/suite-$package.txt")"
    done
fi

echo "== aligned_e2e"
left=$((limit - (SECONDS - began) - 25)) # for packing
timeout -k 5 $((left + 15)) "$python" -m aligned_e2e --profile "${PROFILE:-h200}" --work "$WORK" --output "$OUT/report.json" \
    --deadline "$left" "$@" || status=$?
exit $status
