/* SPDX-License-Identifier: Apache-2.0 */
/* progress= of functions that wait for bytes: whom to tell how far they are. The
 * package draws the bars. GIL held throughout. */
#pragma once

#include "python/core/state.h"

typedef struct cm_progress {
    PyObject *tell; /* owned: called with bytes done and in all; NULL: nobody */
} cm_progress;

/* NULL, None and False: nobody. True: a bar that is called `title`. Else a callable. 0,
 * or -1 with TypeError or ImportError. */
int cm_progress_open(PyObject *object, const char *title, cm_progress *out);
/* 0, or -1 with what the callable raised. */
int cm_progress_tell(const cm_progress *progress, uint64_t done, uint64_t total);
/* With or without an exception set, which stays. 0, or -1 with one. */
int cm_progress_close(cm_progress *progress);
