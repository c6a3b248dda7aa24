# SPDX-License-Identifier: Apache-2.0
# Every tool runs from the active environment; PYTHON=... picks another one. Steps that are
# longer than a few commands are scripts in .ci/.
PYTHON ?= python3
CC := gcc
SAN ?= address,undefined
# One driver for each set of operations that drivers have, except the one that `make test` uses.
DRIVERS ?= 12.0 12.6 12.8
PYTEST_ARGS ?=
PYTEST := $(PYTHON) -m pytest

SOURCES := $(sort $(wildcard csrc/*/*.c csrc/*/*/*.c))
HEADERS := $(sort $(wildcard csrc/*/*.h csrc/*/*/*.h tests/c/*.h))
C_TESTS := $(sort $(wildcard tests/c/test_*.c tests/c/stress_*.c))
C_TEXTS := $(SOURCES) $(HEADERS) $(wildcard tests/c/*.c benchmarks/*.c)
MADE := build/docstrings.h build/structseqs.h build/ptx.h build/gil_checks.h

WARNINGS := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes \
	-Wconversion -Wundef -Werror
C_FLAGS := -std=c17 -D_GNU_SOURCE -fvisibility=hidden -Icsrc -Ibuild
LIMITED := -DPy_LIMITED_API=0x030B0000
CUDA12 := -isystem build/cuda12/nvidia/cuda_runtime/include \
	-isystem build/cuda12/nvidia/cu13/include
CUDA13 := -isystem build/cuda13/nvidia/cu13/include
PYTHON_FLAGS = -DNPY_TARGET_VERSION=NPY_1_22_API_VERSION \
	-DNPY_NO_DEPRECATED_API=NPY_1_22_API_VERSION $(shell $(PYTHON) -c 'import numpy, \
	sysconfig; print("-isystem", sysconfig.get_path("include"), "-isystem", \
	numpy.get_include())')

.DEFAULT_GOAL := help
.PHONY: help build check test test-all asan debug mutants check-c c-programs check-aarch64 lint \
	style tidy clang-format ruff mypy format types examples check-cuda warnings pythons \
	stale docs trace bench gpu clean

help: ## list the targets
	@awk -F ':[^#]*## ' '/^[a-z0-9-]+:.*## / {printf "  %-15s%s\n", $$1, $$2}' Makefile

build: ## install cumem in place, with what tests and lint need
	$(PYTHON) -m pip install -e '.[test,lint]'

check: lint types examples warnings check-cuda test ## all that a change must pass here
	$(MAKE) check-c SAN=address,undefined
	$(MAKE) check-c SAN=thread

# ---- tests; pyproject.toml says what each marker means ----------------------------------

test: ## run the suite on the emulated device
	$(PYTEST) $(PYTEST_ARGS)

# The files with tests that have a marker. Collecting the tests of all files takes longer than
# most of these runs.
marked = $(shell grep -lw 'mark[.]$(1)' tests/*/test_*.py)

test-all: $(DRIVERS:%=driver-%) ## run tests that depend on the driver, with each of DRIVERS emulated

driver-%:
	CUMEM_EMULATED_DRIVER=$* $(PYTEST) -q -m by_driver \
	$(or $(PYTEST_ARGS),$(call marked,by_driver))

debug: build/cuda12/.stamp ## run some of the suite on an extension with checks
	CUMEM_DEBUG=1 .ci/beside build/debug -m pytest -q \
	$(or $(PYTEST_ARGS),-m checked $(call marked,checked))

asan: build/cuda12/.stamp ## run the suite on an extension with AddressSanitizer
	CUMEM_DEBUG=1 CUMEM_SANITIZE=address,undefined .ci/beside build/asan \
	$(or $(ASAN_SCRIPT),-m pytest $(PYTEST_ARGS))

pythons: ## test one wheel on each CPython >= 3.11 on PATH or of pyenv
	PYTHON='$(PYTHON)' .ci/pythons build/pythons $(PYTEST_ARGS)

mutants: build/cuda12/.stamp ## put faults into the C sources, each of which tests must notice
	$(PYTHON) tests/mutants/run.py --json benchmarks/results/mutants.json

# ---- C tests under sanitizers -----------------------------------------------------------

include tests/c/programs.mk

check-c: $(C_PROGRAMS) $(TRIED) ## run the C tests under SAN=address,undefined or SAN=thread
	@.ci/c-tests '$(TRIED)' $(C_PROGRAMS)

c-programs: $(C_PROGRAMS)

check-aarch64: ## compile all C for aarch64, warnings as errors; its C tests under QEMU
	PYTHON='$(PYTHON)' .ci/aarch64 build/aarch64 $(C_TESTS:%.c=%)

# ---- compilers and linters --------------------------------------------------------------

lint: style tidy ## clang-format, ruff, mypy and clang-tidy; changes nothing

style: clang-format ruff mypy # these need no build; `make -k` runs all of them in any case

clang-format:
	clang-format --dry-run --Werror $(C_TEXTS)

ruff:
	ruff check . && ruff format --check .

mypy:
	$(PYTHON) -m mypy

# With a larger max-nodes the analysis takes ten times as long, and all that it finds in addition
# are paths that cannot happen.
tidy: build/cuda12/.stamp $(MADE)
	@printf '%s\n' $(SOURCES) | xargs -P 2 -n 8 sh -c 'clang-tidy --quiet \
	--warnings-as-errors="*" "$$@" -- $(C_FLAGS) $(CUDA12) $(PYTHON_FLAGS) $(LIMITED) \
	-Xclang -analyzer-config -Xclang max-nodes=20000' sh

format: ## rewrite the sources in the house style
	clang-format -i $(C_TEXTS)
	ruff check --fix .
	ruff format .

types: ## compare the stubs with the extension
	$(PYTHON) -m mypy.stubtest cumem._core --ignore-disjoint-bases \
	--mypy-config-file pyproject.toml --allowlist tests/stubtest-allow.txt

examples: ## check the types of all examples of the documents, with mypy and pyright
	$(PYTHON) tests/isolated/example_types.py

check-cuda: build/cuda12/.stamp build/cuda13/.stamp ## compile cuda.c with CUDA 12 and 13
	$(CC) $(C_FLAGS) $(WARNINGS) -O2 $(CUDA12) -c -o /dev/null csrc/runtime/cuda.c
	$(CC) $(C_FLAGS) $(WARNINGS) -O2 $(CUDA13) -c -o /dev/null csrc/runtime/cuda.c

# The APIs differ in macros and inline functions of Python's headers, and nearly all that these can
# make wrong is found without optimizing. The optimizer's warnings come from the API that is shipped.
warnings: $(MADE) ## compile csrc/python with warnings as errors, limited API and full API
	@printf '%s\n' $(filter csrc/python/%,$(SOURCES)) | xargs -P 2 -n 1 sh -ec 'for how in \
	"$(LIMITED) -O2" -O0; do $(CC) $(C_FLAGS) $(WARNINGS) $(PYTHON_FLAGS) $$how \
	-c -o /dev/null "$$0"; done'

$(MADE): csrc/headers.py csrc/base/dtypes.h cumem/_core.pyi csrc/python/module/testing.pyi \
		$(wildcard csrc/transfer/device/*.ptx)
	@$(PYTHON) $< $(@D)

build/cuda12/.stamp: WHEELS := 'nvidia-cuda-runtime-cu12==12.9.*' 'nvidia-cuda-crt==13.*'
build/cuda13/.stamp: WHEELS := 'nvidia-cuda-runtime==13.*' 'nvidia-cuda-crt==13.*'
build/cuda%/.stamp:
	$(PYTHON) -m pip install -q --no-deps --upgrade --target $(@D) $(WHEELS)
	@touch $@

# ---- figures, documents, other machines -------------------------------------------------

stale: ## list figures of the docs that are older than the code that they are about
	$(PYTHON) benchmarks/results.py

# The variable silences a message of Material about MkDocs 2, which appears at each build. Do not
# add -q, because MkDocs would then no longer treat warnings as errors.
docs: ## build the documentation site into build/site, warnings as errors
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

# TRACE_ARGS="--call fill" lists the functions of one call, TRACE_ARGS="--json FILE" keeps all.
trace: build/cuda12/.stamp ## count the files that users' calls go through, in a special build
	$(PYTHON) benchmarks/trace_calls.py $(TRACE_ARGS)

bench: ## measure this machine
	$(PYTHON) -m cumem bench

# OLD="COMMIT ..." also builds wheels of those commits, for `benchmarks/gpu_run.sh versions`.
gpu: ## build the wheel that benchmarks/gpu_run.sh installs, into .gpu/
	PYTHON='$(PYTHON)' .ci/gpu-wheels .gpu $(OLD)

clean: ## remove everything that was built
	rm -rf build dist .gpu *.egg-info cumem/*.so tests/core .pytest_cache .mypy_cache .ruff_cache \
	.hypothesis
	find cumem tests -name __pycache__ -prune -exec rm -rf {} +
