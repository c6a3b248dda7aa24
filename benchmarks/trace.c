/* SPDX-License-Identifier: Apache-2.0 */
/* Notes which functions run, in order. `make trace` adds this file to the extension.
 *
 * GCC calls __cyg_profile_func_enter() and __cyg_profile_func_exit() at both ends of
 * each function that is compiled with -finstrument-functions. They write a row into one
 * array that all threads share. benchmarks/trace_calls.py begins and ends a trace by
 * ctypes, adds rows for the functions of Python, and finds the names that belong to the
 * addresses.
 *
 * Nothing here is part of the wheel. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

/* These functions must not be instrumented themselves, or each would call itself. */
#define QUIET __attribute__((no_instrument_function))
#define SHOWN __attribute__((no_instrument_function, visibility("default")))

typedef enum cm_trace_kind {
    CM_TRACE_ENTER,
    CM_TRACE_EXIT,
    CM_TRACE_ENTER_PYTHON,
    CM_TRACE_EXIT_PYTHON,
} cm_trace_kind;

typedef struct cm_trace_row {
    uint64_t what; /* the offset of a function of C in the library, or a number of
                    * trace_calls.py for a function of Python */
    uint32_t thread;
    uint32_t kind;
} cm_trace_row;

static cm_trace_row *rows;
static uint64_t capacity;
static uint64_t base; /* where the library is mapped */
static _Atomic uint64_t row_count;
static _Atomic uint32_t thread_count;
static _Atomic bool is_on;
static _Thread_local uint32_t thread_number;
static _Thread_local bool is_hushed;

QUIET static void
note(cm_trace_kind kind, uint64_t what)
{
    if (!atomic_load_explicit(&is_on, memory_order_acquire) || is_hushed) {
        return;
    }
    if (thread_number == 0) {
        thread_number = atomic_fetch_add(&thread_count, 1) + 1;
    }
    /* What does not fit is counted, and trace_calls.py refuses the trace. */
    uint64_t index = atomic_fetch_add(&row_count, 1);
    if (index < capacity) {
        rows[index] = (cm_trace_row){what, thread_number, kind};
    }
}

/* Hidden, so that the linker binds them here: the C library has empty ones by these
 * names, which would be found first. */
QUIET void __cyg_profile_func_enter(void *function, void *site);
QUIET void __cyg_profile_func_exit(void *function, void *site);
SHOWN bool cm_trace_open(uint64_t most);
SHOWN void cm_trace_begin(void);
SHOWN uint64_t cm_trace_end(void);
SHOWN const cm_trace_row *cm_trace_rows(void);
SHOWN void cm_trace_hush(bool hushed);
SHOWN void cm_trace_note(uint32_t kind, uint64_t what);

void
__cyg_profile_func_enter(void *function, void *site)
{
    (void)site;
    note(CM_TRACE_ENTER, (uint64_t)(uintptr_t)function - base);
}

void
__cyg_profile_func_exit(void *function, void *site)
{
    (void)site;
    note(CM_TRACE_EXIT, (uint64_t)(uintptr_t)function - base);
}

/* Make room for `most` rows, once for the process. Returns false if there is not enough
 * memory. */
bool
cm_trace_open(uint64_t most)
{
    Dl_info found;
    rows = calloc(most, sizeof(*rows));
    if (rows == NULL || dladdr((void *)&rows, &found) == 0) {
        return false;
    }
    base = (uint64_t)(uintptr_t)found.dli_fbase;
    capacity = most;
    return true;
}

/* Begin a trace of all threads. The thread that calls this first gets number 1. */
void
cm_trace_begin(void)
{
    atomic_store(&row_count, 0);
    if (thread_number == 0) {
        thread_number = atomic_fetch_add(&thread_count, 1) + 1;
    }
    atomic_store_explicit(&is_on, true, memory_order_release);
}

/* End the trace. Returns how many rows there were, of which only `most` were kept. */
uint64_t
cm_trace_end(void)
{
    atomic_store_explicit(&is_on, false, memory_order_release);
    return atomic_load(&row_count);
}

const cm_trace_row *
cm_trace_rows(void)
{
    return rows;
}

/* Leave the calling thread out of the trace while others go on, or take it in again. */
void
cm_trace_hush(bool hushed)
{
    is_hushed = hushed;
}

/* Add a row for a function of Python. */
void
cm_trace_note(uint32_t kind, uint64_t what)
{
    note((cm_trace_kind)kind, what);
}
