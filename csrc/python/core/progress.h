/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the argument progress= of functions that wait until bytes are moved. The
 * argument is a callable that is told how many bytes are done, or True for a bar, which
 * the Python package draws. The GIL is held throughout. */
#pragma once

#include "python/core/state.h"

typedef struct cm_progress {
    /* Owned. It is called with the bytes done and the bytes in all; NULL if nobody
     * wants to know. */
    PyObject *report;
} cm_progress;

/* Read the argument. NULL, None and False mean that nobody wants to know, True means a
 * bar with the title `title`, and anything else must be a callable. Returns 0, or -1
 * with TypeError or ImportError. */
int cm_progress_open(PyObject *object, const char *title, cm_progress *out);
/* Report how far the copy is. Returns 0, or -1 with what the callable raised. */
int cm_progress_report(const cm_progress *progress, uint64_t done, uint64_t total);
/* Close the bar, if there is one. An exception that is set stays set. Returns 0, or -1
 * if an exception is set. */
int cm_progress_close(cm_progress *progress);
