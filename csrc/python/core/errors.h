/* SPDX-License-Identifier: Apache-2.0 */
/* From a status to an exception: the only place that makes CudaError and
 * OutOfMemoryError. All functions need the GIL. */
#pragma once

#include "python/core/state.h"

/* Set the exception for a failed status and return NULL. `doing` (may be NULL) becomes
 * a note: "while growing the pinned pool". Never overwrites a pending exception. */
PyObject *cm_py_raise(cm_state *state, cm_status status, const char *doing);
/* The same, for functions that answer -1. */
int cm_py_raise_int(cm_state *state, cm_status status, const char *doing);
/* `answer`, which it takes over, or where the status failed NULL with its exception. */
PyObject *cm_py_answer(cm_state *state, cm_status status, const char *doing,
                       PyObject *answer);
/* 0, or where the status failed -1 with its exception. */
static inline int
cm_py_check(cm_state *state, cm_status status, const char *doing)
{
    return cm_is_ok(status) ? 0 : cm_py_raise_int(state, status, doing);
}

/* The pending exception, put aside while code runs that must not see it. */
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

/* Where nothing can be raised: the unraisable hook, with `where` (borrowed, may be
 * NULL) as its object; success when the runtime is unloading (4, 709, 35). Keeps a
 * pending exception. */
void cm_py_report(cm_state *state, cm_status status, PyObject *where);

/* The exception of a failed status with its attributes; `doing` as above. New
 * reference; NULL with another exception. */
PyObject *cm_py_exception_new(cm_state *state, cm_status status, const char *doing);

/* What cumem/errors.py does: loaded when the runtime is opened, so that errors can be
 * raised at exit too, when nothing can be imported; by the first error if that is
 * earlier. 0 or -1. */
int cm_errors_load(cm_state *state);
