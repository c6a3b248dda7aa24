/* SPDX-License-Identifier: Apache-2.0 */
/* The argument progress= of functions that wait for bytes: it says to whom is reported
 * how far they are. The package draws the bars. The GIL is held throughout. */
#pragma once

#include "python/core/state.h"

typedef struct cm_progress {
    /* owned: called with the bytes done and the bytes in all; NULL if nobody asked for
     * it. */
    PyObject *report;
} cm_progress;

/* Read the argument. NULL, None and False mean that nobody wants it; True means a bar
 * that is called `title`; anything else is a callable. Returns 0, or -1 with TypeError
 * or ImportError. */
int cm_progress_open(PyObject *object, const char *title, cm_progress *out);
/* Report how far the copy is. Returns 0, or -1 with what the callable raised. */
int cm_progress_report(const cm_progress *progress, uint64_t done, uint64_t total);
/* End it. An exception that is set stays set. 0, or -1 if an exception is set. */
int cm_progress_close(cm_progress *progress);
