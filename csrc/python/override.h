/* SPDX-License-Identifier: Apache-2.0 */
/* What a `with` block makes current in its context: streams and pools, each a chain of
 * pairs (object, outer chain or None) in a context variable. Leaving a block needs no
 * token then, so one object may be entered by many threads and tasks. GIL. */
#ifndef CM_PYTHON_OVERRIDE_H
#define CM_PYTHON_OVERRIDE_H

#include "python/python.h"

typedef struct cm_override {
    PyObject *variable; /* owned: contextvars.ContextVar */
    PyObject *getter;   /* owned: its get(), looked up once and asked often */
    Py_ssize_t count;   /* 0: nobody ever entered one; skips the lookup. Never back:
                           copied contexts keep the chain */
} cm_override;

/* Make the variable. 0, or -1 with an exception; what there is goes with the state. */
int cm_override_init(cm_override *override, const char *name);
/* The chain of this context: a pair or None. New reference; NULL with an exception. */
PyObject *cm_override_read(const cm_override *override);
/* Make `object` current until the matching exit; they nest. 0 or -1. */
int cm_override_enter(cm_override *override, PyObject *object);
/* RuntimeError when `object`, a `what`, is not the one entered last. 0 or -1. */
int cm_override_exit(cm_override *override, PyObject *object, const char *what);

#endif
