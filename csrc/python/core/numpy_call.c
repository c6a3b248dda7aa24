/* SPDX-License-Identifier: Apache-2.0 */
/* Looks for calls of NumPy's on the C stack. numpy_call.h explains the idea. */
#include "python/core/numpy_call.h"

#include <link.h>
#include <unwind.h>

#include "python/core/numpy_bridge.h"

/* The most frames that are looked at. From a function of ours to the outermost of
 * NumPy's there are 13 with NumPy 2.4 and CPython 3.11. A call that is further away is
 * not found. */
enum { FRAMES_MAX = 40 };

/* -- whose code is it? ----------------------------------------------------------------- */

typedef struct code_range {
    uintptr_t low;
    uintptr_t high; /* equal to `low` if the range was not found */
} code_range;

/* The shared objects of the process, which are never unloaded. Guarded by the GIL. */
static struct objects {
    bool is_known;
    code_range numpy;
    code_range python;
    code_range own;
} objects;

static bool
contains(code_range range, uintptr_t address)
{
    return range.low <= address && address < range.high;
}

/* Return the range of addresses at which a loaded object is mapped. */
static code_range
range_of(const struct dl_phdr_info *object)
{
    code_range range = {UINTPTR_MAX, 0};
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &object->dlpi_phdr[i];
        uintptr_t low = (uintptr_t)(object->dlpi_addr + header->p_vaddr);
        if (header->p_type == PT_LOAD) {
            range.low = low < range.low ? low : range.low;
            range.high =
                low + header->p_memsz > range.high ? low + header->p_memsz : range.high;
        }
    }
    return range;
}

/* The address of a function in each of the three objects. */
typedef struct landmarks {
    uintptr_t numpy;
    uintptr_t python;
    uintptr_t own;
} landmarks;

static int
look_at_object(struct dl_phdr_info *object, size_t size CM_UNUSED, void *argument)
{
    const landmarks *known = argument;
    code_range range = range_of(object);
    if (contains(range, known->numpy)) {
        objects.numpy = range;
    }
    if (contains(range, known->python)) {
        objects.python = range;
    }
    if (contains(range, known->own)) {
        objects.own = range;
    }
    return 0;
}

static void
find_objects(void)
{
    landmarks known = {.numpy = cm_numpy_code(),
                       .python = (uintptr_t)&PyMemoryView_FromObject,
                       .own = (uintptr_t)&cm_numpy_call_now};
    (void)dl_iterate_phdr(look_at_object, &known);
    objects.is_known = true;
}

/* -- the stack ------------------------------------------------------------------------- */

typedef struct walk {
    const cm_numpy_call *sought; /* NULL to find the call that is running now */
    cm_numpy_call found;
    int count;
} walk;

static _Unwind_Reason_Code
visit(struct _Unwind_Context *context, void *argument)
{
    walk *state = argument;
    /* This is an address within the call instruction, since the return address lies
     * behind it. */
    uintptr_t place = (uintptr_t)_Unwind_GetIP(context) - 1;
    bool is_numpy = contains(objects.numpy, place);
    bool is_passing = contains(objects.python, place) || contains(objects.own, place);
    if (state->count++ == FRAMES_MAX || (!is_numpy && !is_passing)) {
        return _URC_NORMAL_STOP; /* other code might do anything with the memory */
    }
    if (!is_numpy) {
        bool is_past = state->sought == NULL && state->found.frame != 0;
        return is_past ? _URC_NORMAL_STOP : _URC_NO_REASON;
    }
    cm_numpy_call here = {.frame = (uintptr_t)_Unwind_GetCFA(context),
                          .function = (uintptr_t)_Unwind_GetRegionStart(context)};
    if (state->sought == NULL) {
        state->found = here; /* the last one found is the outermost */
        return _URC_NO_REASON;
    }
    if (here.frame == state->sought->frame
        && here.function == state->sought->function) {
        state->found = here;
        return _URC_NORMAL_STOP;
    }
    return _URC_NO_REASON;
}

cm_numpy_call
cm_numpy_call_now(void)
{
    walk state = {.sought = NULL};
    if (!objects.is_known) {
        find_objects();
    }
    (void)_Unwind_Backtrace(visit, &state);
    if (state.found.frame != 0) {
        state.found.moment = cm_moment_now();
    }
    return state.found;
}

bool
cm_numpy_call_lasts(const cm_numpy_call *call)
{
    walk state = {.sought = call};
    if (call->frame == 0 || !cm_moment_lasts(&call->moment)) {
        return false;
    }
    (void)_Unwind_Backtrace(visit, &state);
    return state.found.frame != 0;
}
