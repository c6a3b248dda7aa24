# SPDX-License-Identifier: Apache-2.0
# Builds the C tests with the sanitizers of SAN. Each kind of build has a folder of its own. The
# Makefile includes this.
comma := ,
SAN_DIR := build/c-$(subst $(comma),-,$(SAN))
SAN_FLAGS := -O1 -g1 -fno-omit-frame-pointer -fsanitize=$(SAN) -DCM_DEBUG=1
# The C tests link the core without CUDA and Python.
CORE_SOURCES := $(filter-out csrc/runtime/cuda.c csrc/python/%,$(SOURCES))
# ThreadSanitizer has nothing to find where one thread makes all calls.
ALONE := $(addprefix tests/c/,stress_plan test_convert test_file_maps test_heap test_heap_model \
	test_host_copy test_numa test_plan test_pool_place test_region test_rows test_rows_kernel)
C_PROGRAMS := $(addprefix $(SAN_DIR)/,$(filter-out $(if $(filter thread,$(SAN)),$(ALONE)), \
	$(C_TESTS:%.c=%)))
# Stresses of the pool that are built without its event check. They must fail, which shows that
# the stresses find what they are for. They are run once, without ThreadSanitizer.
BROKEN := $(addprefix $(SAN_DIR)/tests/c/broken_,pool pool_model pool_threads)
TRIED := $(if $(filter thread,$(SAN)),,$(BROKEN))

$(SAN_DIR)/csrc/%.o: csrc/%.c $(HEADERS) $(MADE)
	@mkdir -p $(@D) && echo '  CC $@'
	@$(CC) $(C_FLAGS) $(WARNINGS) $(SAN_FLAGS) -c -o $@ $<

$(SAN_DIR)/libcore.a: $(CORE_SOURCES:%.c=$(SAN_DIR)/%.o)
	@rm -f $@ && $(AR) rc $@ $^

# A program is linked from all C files that it depends on and from what it needs of the core.
define link
@mkdir -p $(@D) && echo '  CC $@'
@$(CC) $(C_FLAGS) $(WARNINGS) $(SAN_FLAGS) $(SKIPPED) -o $@ $(filter %.c,$^) \
	$(SAN_DIR)/libcore.a -lpthread -lm
endef

$(SAN_DIR)/tests/c/%: tests/c/%.c $(SAN_DIR)/libcore.a $(HEADERS)
	$(link)

$(BROKEN): private SKIPPED := -DCM_TEST_SKIP_EVENTS
$(BROKEN): $(SAN_DIR)/tests/c/broken_%: tests/c/stress_%.c csrc/pool/in_flight.c \
		$(SAN_DIR)/libcore.a $(HEADERS)
	$(link)

# These programs also contain the models that random operations are compared with.
MODELLED := $(foreach how,stress broken,$(addprefix $(SAN_DIR)/tests/c/$(how)_pool_,model threads))
$(MODELLED): $(wildcard tests/c/order_*.c) tests/c/pool_model.c tests/c/pool_random.c
