#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs everything that needs a real GPU, on a machine where nothing can be downloaded. It needs a
# driver, Python, NumPy, pytest and hypothesis, and uses other libraries if they are installed.
# Run `make gpu` where packages can be downloaded, bring .gpu/ along, and then run
#
#     benchmarks/gpu_run.sh [tests | bench | ceilings | calls | transfer | threads |
#                            cores | many | rows | rows_beside | rows_kernel |
#                            casting | pipelines | managed |
#                            loading | offloading | saving | sleeping | spilling | doors |
#                            cupy_pool | numpy_pinned |
#                            numpy_tests | training | files | safetensors | two |
#                            current | views |
#                            interop | fork | notebooks | recording | epoch | doctor |
#                            sanitizer | stress | stress_transfers | torture |
#                            rows_random | corruption | pools | versions | links | all]...
#
# Results go to ${OUT:-/tmp}. PYTEST_ARGS can have arguments of pytest. TRACES names the folder of
# the allocation traces that `pools` replays, and FILES the folder for the files that `files`
# reads, which need 4 GiB, and those that `saving` writes. SLEEPING_PARTS has the parts of
# `sleeping` beyond its first, such as "cases,large,turns,training". `versions` and `links` compare
# this build with each wheel that `make gpu OLD="COMMIT ..."` built, and `recording` compares it with
# the first of them.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-/tmp}
PYTHON=${PYTHON:-python3}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failed=()

# Installs the wheel, and copies the suite to a folder without cumem/, which would hide the wheel.
# The core for tests, which has hooks, lies in the suite (tests/support/core.py). Benchmarks use
# the wheel's own core, unless they need a hook.
install() {
    local wheel
    wheel=$(echo .gpu/cumem-*.whl)
    "$PYTHON" -m pip install -q --no-index --no-deps --target "$work/site" "$wheel" ||
        "$PYTHON" -m zipfile -e "$wheel" "$work/site" || return 1
    "$PYTHON" -m compileall -q "$work/site" # as every installation by pip does
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
    export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1 CUMEM_BACKEND=cuda
    mkdir -p tests/core && cp .gpu/core/_core*.so tests/core || return 1
    mkdir "$work/suite"
    cp -r tests docs notebooks benchmarks pyproject.toml README.md "$work/suite"
    mkdir "$work/suite/csrc" && cp csrc/README.md "$work/suite/csrc"
    CUMEM_COMMIT=$(cat .gpu/commit) && export CUMEM_COMMIT
    "$PYTHON" -c 'import cumem; print("cumem from", cumem.__file__)'
    "$PYTHON" -m cumem info
}

run_tests() {
    # A setting of a plug-in that is not here would be an error under --strict-config.
    "$PYTHON" -c 'import pytest_timeout' 2>/dev/null ||
        sed -i '/^timeout/d' "$work/suite/pyproject.toml"
    # shellcheck disable=SC2086
    (cd "$work/suite" && env -u CUMEM_BACKEND "$PYTHON" -m pytest -m gpu -p no:cacheprovider \
        --junitxml="$OUT/tests.xml" ${PYTEST_ARGS:-}) 2>&1 | tee "$OUT/tests.log"
}

run_bench() {
    "$PYTHON" -m cumem bench --json "$OUT/bench.json" --plot "$OUT/bench.png" |
        tee "$OUT/bench.txt"
}

run_ceilings() {
    local cuda=${CUDA_HOME:-/usr/local/cuda}
    local compiler=(nvcc -O2)
    command -v nvcc >/dev/null || compiler=(gcc -O2 -std=c17 -D_GNU_SOURCE
        "-I$cuda/include" "-L$cuda/lib64" "-Wl,-rpath,$cuda/lib64")
    "${compiler[@]}" benchmarks/ceilings.c -o "$work/ceilings" -lcudart &&
        "$work/ceilings" | tee "$OUT/ceilings.jsonl"
}

run_calls() {
    "$PYTHON" benchmarks/driver_calls.py --json "$OUT/driver-calls.json"
}

run_transfer() {
    "$PYTHON" benchmarks/transfer.py --json "$OUT/transfer.json"
}

run_threads() {
    "$PYTHON" benchmarks/threads.py --json "$OUT/threads.json"
}

run_current() {
    "$PYTHON" benchmarks/current_device.py --json "$OUT/current-device.json" &&
        CUDA_VISIBLE_DEVICES=0 "$PYTHON" benchmarks/current_device.py \
            --json "$OUT/current-device-one.json"
}

run_views() {
    "$PYTHON" benchmarks/views.py --json "$OUT/views.json"
}

run_cores() {
    taskset -c 0-1 "$PYTHON" benchmarks/transfer.py --brief \
        --json "$OUT/transfer-2-cores.json" &&
        taskset -c 0-3 "$PYTHON" benchmarks/transfer.py --brief \
            --json "$OUT/transfer-4-cores.json"
}

run_many() {
    "$PYTHON" benchmarks/many.py --json "$OUT/many.json"
}

run_rows() {
    "$PYTHON" benchmarks/rows.py --json "$OUT/rows.json"
}

run_rows_beside() {
    "$PYTHON" benchmarks/rows_beside.py --json "$OUT/rows-beside.json"
}

run_rows_kernel() {
    "$PYTHON" benchmarks/rows_kernel.py --json "$OUT/rows-kernel.json"
}

run_doors() {
    XLA_PYTHON_CLIENT_PREALLOCATE=false "$PYTHON" benchmarks/doors.py \
        --json "$OUT/doors.json"
}

run_casting() {
    "$PYTHON" benchmarks/casting.py --json "$OUT/casting.json"
}

run_managed() {
    "$PYTHON" benchmarks/managed.py --json "$OUT/managed.json"
}

has() {
    "$PYTHON" -c "import $1" 2>/dev/null && return
    echo "left out: it needs $2"
    return 1
}

run_loading() {
    has torch PyTorch || return 0
    "$PYTHON" benchmarks/loading.py --dir "${FILES:-/tmp}" --json "$OUT/loading.json"
}

run_offloading() {
    "$PYTHON" benchmarks/offloading.py --json "$OUT/offloading.json"
}

run_saving() {
    has torch PyTorch || return 0
    "$PYTHON" benchmarks/saving_behind.py --folder "${FILES:-/tmp}" \
        --json "$OUT/saving-behind.json"
}

run_sleeping() {
    "$PYTHON" benchmarks/sleeping.py --folder "${FILES:-/tmp}" --graphs "${GRAPHS:-0}" \
        --parts "${SLEEPING_PARTS:-cases}" --json "$OUT/sleeping.json"
}

run_spilling() {
    "$PYTHON" benchmarks/spilling.py --json "$OUT/spilling.json"
}

run_cupy_pool() {
    has cupy CuPy || return 0
    "$PYTHON" benchmarks/cupy_pool.py --json "$OUT/cupy-pool.json"
}

run_numpy_pinned() {
    has torch PyTorch || return 0
    "$PYTHON" benchmarks/numpy_pinned.py --json "$OUT/numpy-pinned.json"
}

# Runs NumPy's own tests of making, copying, resizing, pickling and reading arrays, all of which
# are in pinned memory.
run_numpy_tests() {
    local modules=()
    mapfile -t modules < <(printf 'numpy._core.tests.test_%s\n' multiarray numeric \
        array_coercion array_interface indexing item_selection shape_base dtype records api \
        mem_overlap mem_policy nditer umath ufunc scalar_ctors einsum strings datetime \
        regression && printf 'numpy.lib.tests.test_%s\n' io format stride_tricks)
    PYTHONPATH="$work/suite/tests:$PYTHONPATH" "$PYTHON" benchmarks/record.py \
        --json "$OUT/numpy-tests.json" -- "$PYTHON" -m pytest -q -c /dev/null \
        --rootdir="$work" -W ignore -p support.numpy_hook -p no:cacheprovider \
        --pyargs "${modules[@]}"
}

run_training() {
    has torch PyTorch || return 0
    "$PYTHON" benchmarks/training.py --json "$OUT/training.json"
}

run_pipelines() {
    "$PYTHON" benchmarks/pipelines.py --folder "${FILES:-/tmp}" --json "$OUT/pipelines.json"
}

run_files() {
    "$PYTHON" benchmarks/files.py --dir "${FILES:-/tmp}" --json "$OUT/files.json"
}

run_safetensors() {
    "$PYTHON" benchmarks/safetensors_files.py --json "$OUT/safetensors.json"
}

run_two() {
    "$PYTHON" benchmarks/two_gpus.py --json "$OUT/two-gpus.json"
}

run_interop() {
    "$PYTHON" benchmarks/interop.py --json "$OUT/interop.json"
}

run_recording() {
    local old options=()
    for old in .gpu/old/*/cumem-*.whl; do
        [[ ! -e $old || -e $work/before ]] && continue
        "$PYTHON" -m zipfile -e "$old" "$work/before"
        options=(--before "$work/before")
    done
    "$PYTHON" benchmarks/recording.py --json "$OUT/recording.json" "${options[@]}"
}

run_epoch() {
    has torch PyTorch || return 0
    "$PYTHON" tests/isolated/record_epoch.py "$OUT/epoch"
}

# doctor NAME COMMAND...: runs the doctor under that command. What it says goes to a file. The
# troubles that it names are shown, and do not count as a failure.
doctor() {
    local said=$OUT/doctor-$1.txt
    printf -- '-- %s: ' "$1"
    "${@:2}" "$PYTHON" -m cumem doctor >"$said" 2>&1
    (($? < 2)) && tail -n 1 "$said" && grep -E '^ *(problem|note) ' "$said"
}

# Runs the doctor on the machine as it is, and with troubles that it must name.
run_doctor() {
    local no_huge_pages='import ctypes, os, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
os.execvp(sys.argv[1], sys.argv[1:])'
    "$PYTHON" -m cumem doctor --json >"$OUT/doctor.json"
    doctor as-it-is env
    doctor two-cores taskset -c 0,1 &&
        doctor memlock bash -c 'ulimit -l 64; exec "$@"' - &&
        doctor no-huge-pages "$PYTHON" -c "$no_huge_pages" &&
        doctor no-device env -u CUMEM_BACKEND CUDA_VISIBLE_DEVICES= &&
        doctor wrong-device env CUDA_VISIBLE_DEVICES=0,7
}

run_fork() {
    "$PYTHON" benchmarks/fork.py --json "$OUT/fork.json"
}

# Jupyter's parts are wheels in .gpu/jupyter, made for the Python of this machine by
#     pip download --only-binary :all: -d .gpu/jupyter nbclient nbformat ipykernel matplotlib
# The wheel of NumPy may be left out.
run_notebooks() {
    "$PYTHON" -m pip install -q --no-index --no-deps --target "$work/jupyter" \
        .gpu/jupyter/*.whl && cp -r notebooks "$OUT/notebooks" || return 1
    PYTHONPATH="$PYTHONPATH:$work/jupyter" JUPYTER_PATH="$work/jupyter/share/jupyter" \
        "$PYTHON" "$OUT/notebooks/execute.py"
}

run_sanitizer() {
    local check=(compute-sanitizer --leak-check full --error-exitcode 99 "$PYTHON"
        tests/isolated/copy_everything.py)
    "${check[@]}" 2>&1 | tee "$OUT/sanitizer.log" || return 1
    echo "== a planted leak must be reported"
    if "${check[@]}" --plant-leak >"$OUT/sanitizer-planted.log" 2>&1; then
        echo "the planted leak was not reported"
        return 1
    fi
    grep "LEAK SUMMARY" "$OUT/sanitizer-planted.log"
    grep -q "LEAK SUMMARY: 4096 bytes leaked in 1 alloc" "$OUT/sanitizer-planted.log"
}

run_stress() {
    "$PYTHON" tests/isolated/stress_pools.py --seconds "${STRESS_SECONDS:-60}" \
        --json "$OUT/stress.json"
}

run_stress_transfers() {
    local check=("$PYTHON" tests/isolated/stress_transfers.py
        --seconds "${STRESS_SECONDS:-60}")
    "${check[@]}" --json "$OUT/stress-transfers.json" || return 1
    "${check[@]}" --faults --json "$OUT/stress-transfers-faults.json"
}

run_torture() {
    "$PYTHON" tests/isolated/torture.py --seconds "${TORTURE_SECONDS:-300}" \
        --json "$OUT/torture.json"
}

run_rows_random() {
    "$PYTHON" tests/isolated/rows_random.py --cases "${ROWS_CASES:-100000}" \
        --backend cuda --json "$OUT/rows-random.json"
}

run_corruption() {
    "$PYTHON" tests/isolated/corruption_hunt.py --seconds "${HUNT_SECONDS:-180}" \
        --json "$OUT/corruption.json"
}

run_pools() {
    "$PYTHON" benchmarks/pools.py --json "$OUT/pools.json" --commit "$CUMEM_COMMIT" \
        ${TRACES:+--traces "$TRACES"}
}

# compare NAME: runs the script of that name for each of the older wheels and this build.
compare() {
    local folder name
    for folder in .gpu/old/*/; do
        name=$(basename "$folder")
        "$PYTHON" "benchmarks/$1.py" "$folder"cumem-*.whl .gpu/cumem-*.whl \
            --names "$name" "$CUMEM_COMMIT" --json "$OUT/$1-$name.json" || return 1
    done
}

run_versions() {
    compare versions
}

run_links() {
    compare links
}

install || {
    echo "GPU RUN FAILED: the wheel in .gpu/ could not be installed"
    exit 1
}
steps=("${@:-all}")
if [[ ${steps[*]} == all ]]; then
    steps=(ceilings calls views transfer threads cores many rows rows_beside rows_kernel
        casting pipelines managed loading offloading saving sleeping spilling doors
        cupy_pool numpy_pinned numpy_tests
        training files safetensors bench tests
        interop fork recording epoch doctor sanitizer stress stress_transfers torture rows_random
        corruption)
fi
for name in "${steps[@]}"; do
    printf '\n======== %s\n' "$name"
    if declare -F "run_$name" >/dev/null; then
        start=$SECONDS
        "run_$name" || failed+=("$name")
        echo "-- $name took $((SECONDS - start)) s"
    else
        echo "unknown step '$name'"
        failed+=("$name")
    fi
done
if ((${#failed[@]})); then
    echo "GPU RUN FAILED: ${failed[*]}"
    exit 1
fi
echo "GPU RUN PASSED: ${steps[*]}"
