/* SPDX-License-Identifier: Apache-2.0 */
/* Makes exceptions from statuses. This is the only place that makes CudaError and
 * OutOfMemoryError. All functions need the GIL. */
#pragma once

#include "python/core/state.h"

/* Set the exception for a failed status, and return NULL. `doing` (may be NULL) becomes
 * a note of the exception, such as "while growing the pinned pool". Never replaces a
 * pending exception. */
PyObject *cm_py_raise(cm_state *state, cm_status status, const char *doing);
/* Do the same as cm_py_raise(), but return -1. */
int cm_py_raise_int(cm_state *state, cm_status status, const char *doing);
/* Take over `answer`, and return it. If the status is a failure, return NULL with its
 * exception instead. */
PyObject *cm_py_answer(cm_state *state, cm_status status, const char *doing,
                       PyObject *answer);
/* Return 0, or -1 with its exception if the status is a failure. */
static inline int
cm_py_check(cm_state *state, cm_status status, const char *doing)
{
    return cm_is_ok(status) ? 0 : cm_py_raise_int(state, status, doing);
}

/* Clear the exception of something that may fail without harm, if there is one. Returns
 * 0, or -1 if the exception stays because it is not an Exception (a KeyboardInterrupt,
 * for instance). */
static inline int
cm_error_forgive(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* The pending exception, which is put aside while code runs that must not see it. */
typedef struct cm_kept_error {
    PyObject *type;
    PyObject *value;
    PyObject *traceback;
} cm_kept_error;

static inline cm_kept_error
cm_error_keep(void)
{
    cm_kept_error kept;
    PyErr_Fetch(&kept.type, &kept.value, &kept.traceback);
    return kept;
}

static inline void
cm_error_restore(cm_kept_error kept)
{
    PyErr_Restore(kept.type, kept.value, kept.traceback);
}

/* Report a failure by sys.unraisablehook, for places where nothing can be raised.
 * `where` (borrowed, may be NULL) is the object that the hook gets. The codes 4, 709
 * and 35, by which the runtime says that it is unloading, are not reported. Keeps a
 * pending exception. */
void cm_py_report(cm_state *state, cm_status status, PyObject *where);

/* Make the exception of a failed status, with its attributes and the note `doing`,
 * without setting it. Returns a new reference, or NULL with another exception. */
PyObject *cm_py_exception_new(cm_state *state, cm_status status, const char *doing);

/* Load cumem/base/errors.py, if it is not loaded yet. Opening the runtime calls this,
 * so that errors can still be raised at exit, when nothing can be imported. An error
 * that comes earlier calls it too. Returns 0, or -1 with an exception. */
int cm_errors_load(cm_state *state);
