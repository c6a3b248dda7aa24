# SPDX-License-Identifier: Apache-2.0
# Every tool runs from the active environment: PYTHON=... picks another.
PYTHON ?= python3
CC := gcc
SAN ?= address,undefined
# One for each set of operations that a driver may have, less that of the suite's own runs.
DRIVERS ?= 12.0 12.6 12.8
PYTEST_ARGS ?=
# The files in which a test has a marker, and those in which all have it. pyproject.toml says
# what each marker means.
marked = $(shell grep -lE 'pytest\.mark\.$1\b' tests/*/test_*.py)
all_marked = $(shell grep -lE '^[^@]*pytest\.mark\.$1\b' tests/*/test_*.py)
comma := ,

SOURCES := $(sort $(wildcard csrc/*/*.c csrc/*/*/*.c))
HEADERS := $(sort $(wildcard csrc/*/*.h csrc/*/*/*.h tests/c/*.h))
CUDA_SOURCES := csrc/runtime/cuda.c
PYTHON_SOURCES := $(wildcard csrc/python/*/*.c)
# The core without CUDA and Python: it is what the C tests link.
CORE_SOURCES := $(filter-out $(CUDA_SOURCES) $(PYTHON_SOURCES),$(SOURCES))
C_TESTS := $(sort $(wildcard tests/c/test_*.c tests/c/stress_*.c))
C_TEXTS := $(SOURCES) $(HEADERS) $(wildcard tests/c/*.c benchmarks/*.c)

WARNINGS := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes \
	-Wconversion -Wundef -Werror
C_FLAGS := -std=c17 -D_GNU_SOURCE -fvisibility=hidden -Icsrc -Ibuild
LIMITED := -DPy_LIMITED_API=0x030B0000
MADE := build/docstrings.h build/ptx.h build/gil_checks.h
CUDA12 := -isystem build/cuda12/nvidia/cuda_runtime/include \
	-isystem build/cuda12/nvidia/cu13/include
CUDA13 := -isystem build/cuda13/nvidia/cu13/include
PYTHON_FLAGS = -DNPY_TARGET_VERSION=NPY_1_22_API_VERSION \
	-DNPY_NO_DEPRECATED_API=NPY_1_22_API_VERSION $(shell $(PYTHON) -c 'import numpy, \
	sysconfig; print("-isystem", sysconfig.get_path("include"), "-isystem", \
	numpy.get_include())')

.DEFAULT_GOAL := help
.PHONY: help build test test-all asan debug check check-c check-cuda warnings lint style tidy \
	format types examples check-aarch64 c-programs mutants stale docs bench gpu pythons \
	trace clean

help: ## list the targets
	@awk -F ':[^#]*## ' '/^[a-z0-9-]+:.*## / {printf "  %-15s%s\n", $$1, $$2}' Makefile

build: ## install cumem in place, with what tests and lint need
	$(PYTHON) -m pip install -e '.[test,lint]'

test: ## run the suite on the emulated device
	$(PYTHON) -m pytest $(PYTEST_ARGS)

test-all: ## run what depends on it with the emulated driver at each of DRIVERS
	@rc=0; for driver in $(DRIVERS); do echo "== emulated driver $$driver"; \
	CUMEM_EMULATED_DRIVER=$$driver $(PYTHON) -m pytest -q -m by_driver \
	$(call marked,by_driver) $(PYTEST_ARGS) || rc=1; done; exit $$rc

check: lint types examples warnings check-cuda test ## all that a change must pass here
	$(MAKE) check-c SAN=address,undefined
	$(MAKE) check-c SAN=thread

# ---- C tests under sanitizers -----------------------------------------------------------

SAN_DIR := build/c-$(subst $(comma),-,$(SAN))
SAN_FLAGS := -O1 -g1 -fno-omit-frame-pointer -fsanitize=$(SAN) -DCM_DEBUG=1
CORE_OBJECTS := $(CORE_SOURCES:%.c=$(SAN_DIR)/%.o)
C_PROGRAMS := $(C_TESTS:%.c=$(SAN_DIR)/%)
# ThreadSanitizer needs its addresses free, which randomisation may take.
FIXED := $(if $(filter thread,$(SAN)),$(shell setarch $$(uname -m) -R true 2>&- \
	&& echo setarch $$(uname -m) -R))

$(SAN_DIR)/csrc/%.o: csrc/%.c $(HEADERS) $(MADE)
	@mkdir -p $(@D)
	@echo '  CC $@'
	@$(CC) $(C_FLAGS) $(WARNINGS) $(SAN_FLAGS) -c -o $@ $<

$(SAN_DIR)/libcore.a: $(CORE_OBJECTS)
	@rm -f $@
	@$(AR) rc $@ $^

$(SAN_DIR)/tests/c/%: tests/c/%.c $(SAN_DIR)/libcore.a $(HEADERS)
	@mkdir -p $(@D)
	@echo '  CC $@'
	@$(CC) $(C_FLAGS) $(WARNINGS) $(SAN_FLAGS) -o $@ $(filter %.c,$^) \
	$(SAN_DIR)/libcore.a -lpthread -lm

# The stresses of the pool with its event check left out: they must fail.
BROKEN := $(addprefix $(SAN_DIR)/tests/c/broken_,pool pool_model pool_threads)
$(BROKEN): $(SAN_DIR)/tests/c/broken_%: tests/c/stress_%.c csrc/pool/in_flight.c \
		$(SAN_DIR)/libcore.a
	@echo '  CC $@'
	@$(CC) $(C_FLAGS) $(WARNINGS) $(SAN_FLAGS) -DCM_TEST_SKIP_EVENTS -o $@ \
	$(filter %.c,$^) $(SAN_DIR)/libcore.a -lpthread -lm

# What random operations are held against.
MODEL := $(wildcard tests/c/order_*.c) tests/c/pool_model.c tests/c/pool_random.c
MODELLED := pool_model pool_threads
$(MODELLED:%=$(SAN_DIR)/tests/c/stress_%) $(MODELLED:%=$(SAN_DIR)/tests/c/broken_%): $(MODEL)

c-programs: $(C_PROGRAMS)

# One try of broken_pool in two sees nothing.
TRIES := $(shell seq 20)

# That the stresses see what they are for is shown once, without ThreadSanitizer.
TRIED := $(if $(filter thread,$(SAN)),,$(BROKEN))

check-c: $(C_PROGRAMS) $(TRIED) ## run the C tests under SAN=address,undefined or SAN=thread
	@rc=0; for program in $(TRIED); do echo "== $$program must fail"; caught=0; \
	for try in $(TRIES); do timeout 300 $(FIXED) $$program >/dev/null 2>&1 || { caught=1; break; }; \
	done; if [ $$caught = 0 ]; then echo "it did not, $$try times"; rc=1; fi; done; \
	printf '%s\n' $(C_PROGRAMS) | UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	TSAN_OPTIONS=halt_on_error=1 xargs -P 2 -n 1 sh -c 'said=$$(timeout 300 $(FIXED) "$$0" \
	2>&1); rc=$$?; printf "== %s\n%s\n" "$$0" "$$said"; exit $$rc' || rc=1; exit $$rc

mutants: build/cuda12/.stamp ## put faults into the C sources: the tests must see each
	$(PYTHON) tests/mutants/run.py --json benchmarks/results/mutants.json

# ---- the extension under sanitizers -----------------------------------------------------

# Beside the tree, which keeps its extension. Python's objects come from malloc, so that they
# are watched too. Signals are left to Python: tests let a child die of one. 256 MiB of freed
# memory are kept to see who still uses it.
ASAN := build/asan
ASAN_FLAGS = -O1 -g -fPIC -fno-omit-frame-pointer -fsanitize=address,undefined \
	-DCM_DEBUG=1 $(CUDA12) $(PYTHON_FLAGS) $(LIMITED)
ASAN_RUN := PYTHONPATH=$(CURDIR)/$(ASAN) PYTHONSAFEPATH=1 PYTHONMALLOC=malloc \
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:handle_segv=0:handle_sigbus=0:handle_abort=0:quarantine_size_mb=256 \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

$(ASAN)/csrc/%.o: csrc/%.c $(HEADERS) $(MADE) build/cuda12/.stamp
	@mkdir -p $(@D)
	@echo '  CC $@'
	@$(CC) $(C_FLAGS) $(WARNINGS) $(ASAN_FLAGS) -c -o $@ $<

$(ASAN)/cumem/_core.abi3.so: $(SOURCES:%.c=$(ASAN)/%.o)
	@mkdir -p $(@D)
	@$(CC) -shared -fsanitize=address,undefined -Wl,--exclude-libs,ALL -o $@ $^ \
	build/cuda12/nvidia/cuda_runtime/lib/libcudart_static.a -ldl -lrt -lpthread

asan: $(ASAN)/cumem/_core.abi3.so ## run the suite on an extension with AddressSanitizer
	@ln -sfn $(filter-out %.so %__pycache__,$(wildcard $(CURDIR)/cumem/*)) $(ASAN)/cumem
	$(ASAN_RUN) $(PYTHON) $(or $(ASAN_SCRIPT),-m pytest $(PYTEST_ARGS))

# ---- the extension with its checks ------------------------------------------------------

# Beside the tree's own as well. What a build without them does not see: calls of Python
# without the GIL (csrc/python/python.h), and invariants that no longer hold.
CHECKED := build/debug
CHECKED_FLAGS = -O0 -g1 -fPIC -DCM_DEBUG=1 $(CUDA12) $(PYTHON_FLAGS) $(LIMITED)

$(CHECKED)/csrc/%.o: csrc/%.c $(HEADERS) $(MADE) build/cuda12/.stamp
	@mkdir -p $(@D)
	@$(CC) $(C_FLAGS) $(WARNINGS) $(CHECKED_FLAGS) -c -o $@ $<

$(CHECKED)/cumem/_core.abi3.so: $(SOURCES:%.c=$(CHECKED)/%.o)
	@mkdir -p $(@D)
	@$(CC) -shared -Wl,--exclude-libs,ALL -o $@ $^ \
	build/cuda12/nvidia/cuda_runtime/lib/libcudart_static.a -ldl -lrt -lpthread

debug: $(CHECKED)/cumem/_core.abi3.so ## run some of the suite on an extension with checks
	@ln -sfn $(filter-out %.so %__pycache__,$(wildcard $(CURDIR)/cumem/*)) $(CHECKED)/cumem
	PYTHONPATH=$(CURDIR)/$(CHECKED) PYTHONSAFEPATH=1 $(PYTHON) -m pytest \
	-q $(or $(PYTEST_ARGS),-m checked $(call marked,checked))

# ---- compilers and linters --------------------------------------------------------------

build/cuda12/.stamp:
	$(PYTHON) -m pip install -q --no-deps --upgrade --target build/cuda12 \
	'nvidia-cuda-runtime-cu12==12.9.*' 'nvidia-cuda-crt==13.*'
	@touch $@

build/cuda13/.stamp:
	$(PYTHON) -m pip install -q --no-deps --upgrade --target build/cuda13 \
	'nvidia-cuda-runtime==13.*' 'nvidia-cuda-crt==13.*'
	@touch $@

check-cuda: build/cuda12/.stamp build/cuda13/.stamp ## compile cuda.c with CUDA 12 and 13
	@set -e; for file in $(CUDA_SOURCES); do \
	$(CC) $(C_FLAGS) $(WARNINGS) -O2 $(CUDA12) -c -o /dev/null $$file; \
	$(CC) $(C_FLAGS) $(WARNINGS) -O2 $(CUDA13) -c -o /dev/null $$file; done

$(MADE): csrc/headers.py csrc/base/dtypes.h cumem/_core.pyi \
		$(wildcard csrc/transfer/device/*.ptx)
	@$(PYTHON) $< $(@D)

warnings: $(MADE) ## compile csrc/python with warnings as errors, limited API and full API
	@printf '%s\n' $(PYTHON_SOURCES) | xargs -P 2 -n 1 sh -ec 'for api in $(LIMITED) ""; do \
	$(CC) $(C_FLAGS) $(WARNINGS) $(PYTHON_FLAGS) $$api -O2 -c -o /dev/null "$$0"; done'

# Paths longer than that take ten times as long and find what cannot be.
SHORT_PATHS := -Xclang -analyzer-config -Xclang max-nodes=20000

lint: style tidy ## clang-format, ruff, mypy and clang-tidy; changes nothing

style:
	@rc=0; clang-format --dry-run --Werror $(C_TEXTS) || rc=1; ruff check . || rc=1; \
	ruff format --check . || rc=1; $(PYTHON) -m mypy || rc=1; exit $$rc

tidy: build/cuda12/.stamp $(MADE)
	@printf '%s\n' $(SOURCES) | xargs -P 2 -n 8 sh -c 'clang-tidy --quiet \
	--warnings-as-errors="*" "$$@" -- $(C_FLAGS) $(CUDA12) $(PYTHON_FLAGS) $(LIMITED) \
	$(SHORT_PATHS)' sh

format: ## rewrite the sources in the house style
	clang-format -i $(C_TEXTS)
	ruff check --fix .
	ruff format .

types: ## compare the stubs with the extension
	$(PYTHON) -m mypy.stubtest cumem._core --ignore-disjoint-bases \
	--mypy-config-file pyproject.toml --allowlist tests/stubtest-allow.txt

examples: ## check the types of all examples of the documents, with mypy and pyright
	$(PYTHON) tests/isolated/example_types.py

# ---- aarch64 ----------------------------------------------------------------------------

# From Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static. QEMU 7.2
# leaves MADV_WIPEONFORK out and says it did it: what needs it, ARM_EXCEPT, may fail.
ARM := build/aarch64
ARM_RUN := qemu-aarch64-static -L /usr/aarch64-linux-gnu
ARM_EXCEPT := forked_child|wiped_by_fork
ARM_TOOLS := CC=aarch64-linux-gnu-gcc AR=aarch64-linux-gnu-ar
# Debian's pyconfig.h asks for the target's own; here it says the same for both.
ARM_BESIDE = $(shell $(PYTHON) -c 'import os, sysconfig as s; print(os.path.join( \
	os.path.dirname(s.get_path("include")), s.get_config_var("MULTIARCH") or "none"))')

check-aarch64: ## compile all C for aarch64, warnings as errors; its C tests under QEMU
	@mkdir -p $(ARM)/include
	@ln -sfn '$(ARM_BESIDE)' $(ARM)/include/aarch64-linux-gnu
	@C_INCLUDE_PATH=$(ARM)/include $(MAKE) -s check-cuda warnings $(ARM_TOOLS)
	@$(MAKE) -s c-programs $(ARM_TOOLS) SAN_DIR=$(ARM) SAN_FLAGS='-O2 -DCM_DEBUG=1'
	@rc=0; for program in $(C_TESTS:%.c=$(ARM)/%); do echo "== $$program"; \
	timeout 600 $(ARM_RUN) $$program >$(ARM)/log; status=$$?; cat $(ARM)/log; \
	[ $$status -eq 0 ] || { [ $$status -eq 1 ] && grep -q FAILED $(ARM)/log && \
	! grep FAILED $(ARM)/log | grep -qvE '$(ARM_EXCEPT)'; } || rc=1; done; exit $$rc

# ---- figures, other machines, other Pythons ---------------------------------------------

stale: ## list figures of the docs that are older than the code that they are about
	$(PYTHON) benchmarks/results.py

# The variable: Material says at each build that MkDocs 2 will be another program. With -q
# warnings would be no errors.
docs: ## build the documentation site into build/site, warnings as errors
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

# TRACE_ARGS="--call fill" lists the functions of one, TRACE_ARGS="--json FILE" keeps them.
trace: build/cuda12/.stamp ## count the files that calls of users pass, on an own build
	$(PYTHON) benchmarks/trace_calls.py $(TRACE_ARGS)

bench: ## measure this machine
	$(PYTHON) -m cumem bench

# OLD="COMMIT ...": wheels of those, too, for `benchmarks/gpu_run.sh versions`.
gpu: ## build the wheel that benchmarks/gpu_run.sh installs, into .gpu/
	rm -rf .gpu
	$(PYTHON) -m pip wheel -q --no-deps -w .gpu .
	@git describe --always --dirty --abbrev=12 >.gpu/commit
	@set -e; for old in $(OLD); do mkdir -p .gpu/old/$$old/tree; \
	git archive $$old | tar -x -C .gpu/old/$$old/tree; \
	$(PYTHON) -m pip wheel -q --no-deps -w .gpu/old/$$old .gpu/old/$$old/tree; \
	rm -rf .gpu/old/$$old/tree; done
	@ls .gpu

# The suite is copied away from cumem/, so that it meets the wheel and not the sources.
pythons: ## test one wheel on each CPython >= 3.11 on PATH or of pyenv
	rm -rf build/pythons
	$(PYTHON) -m pip wheel -q --no-deps -w build/pythons/wheel .
	mkdir build/pythons/suite
	cp -r $(wildcard tests notebooks docs benchmarks csrc *.md LICENSE pyproject.toml mkdocs.yml) \
	build/pythons/suite
	PYTHON='$(PYTHON)' PACKAGING='-m packaging $(call marked,packaging)' \
	.ci/pythons build/pythons -m 'not any_python' \
	$(addprefix --ignore=,$(call all_marked,any_python)) $(PYTEST_ARGS)

clean: ## remove everything that was built
	rm -rf build dist .gpu *.egg-info cumem/*.so .pytest_cache .mypy_cache .ruff_cache \
	.hypothesis
	find cumem tests -name __pycache__ -prune -exec rm -rf {} +
