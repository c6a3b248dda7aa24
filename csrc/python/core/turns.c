/* SPDX-License-Identifier: Apache-2.0 */
#include "python/core/turns.h"

#include <unistd.h>

#include "python/core/errors.h"

enum {
    USUAL_US = 5000, /* how long Python's turns are if nobody says otherwise */
    SHORT_US = 499,  /* no program is likely to choose this length itself */
};

/* Return the length of turns, or -1 if Python does not say. */
static long
get_turn_us(void)
{
    PyObject *get = PySys_GetObject("getswitchinterval"); /* borrowed */
    PyObject *seconds = get == NULL ? NULL : PyObject_CallNoArgs(get);
    double value = seconds == NULL ? -1 : PyFloat_AsDouble(seconds);
    Py_XDECREF(seconds);
    PyErr_Clear();
    return value < 0 ? -1 : (long)(value * 1e6 + 0.5);
}

/* Change the length of turns to `to`, but only if it is `from` now. */
static void
change_turn_us(long from, long to)
{
    cm_kept_error kept = cm_error_keep();
    PyObject *set = PySys_GetObject("setswitchinterval"); /* borrowed */
    if (set != NULL && get_turn_us() == from) {
        Py_XDECREF(PyObject_CallFunction(set, "d", (double)to / 1e6));
    }
    PyErr_Clear();
    cm_error_restore(kept);
}

bool
cm_turns_shorten(cm_turns *turns)
{
    if (turns->call_count > 0 && turns->process != getpid()) {
        turns->call_count = 0;
        change_turn_us(SHORT_US, USUAL_US);
    }
    if (!turns->is_contested) {
        return false;
    }
    if (turns->call_count++ == 0) {
        turns->process = getpid();
        change_turn_us(USUAL_US, SHORT_US);
    }
    return true;
}

void
cm_turns_restore(cm_turns *turns)
{
    if (--turns->call_count == 0) {
        change_turn_us(SHORT_US, USUAL_US);
    }
}
