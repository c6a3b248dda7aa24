/* SPDX-License-Identifier: Apache-2.0 */
/* What a `with` block makes current in its context: streams and pools, each a chain of
 * links (object, outer chain or None, witness) in a context variable. Leaving a block
 * needs no token then, so one object may be entered by many threads and tasks. GIL. */
#ifndef CM_PYTHON_OVERRIDE_H
#define CM_PYTHON_OVERRIDE_H

#include <stdbool.h>

#include "python/python.h"

typedef struct cm_override {
    PyObject *variable; /* owned: contextvars.ContextVar */
    PyObject *getter;   /* owned: its get(), looked up once and asked often */
    PyObject *witness;  /* owned: held by every link, in whatever context it lives on */
    Py_ssize_t unheld;  /* its count of references while there is no link */
} cm_override;

/* No context has anything entered: skips the lookup. */
static inline bool
cm_override_is_empty(const cm_override *override)
{
    return Py_REFCNT(override->witness) == override->unheld;
}

/* Make the variable. 0, or -1 with an exception; what there is goes with the state. */
int cm_override_init(cm_override *override, const char *name);
/* The chain of this context: a link or None. New reference; NULL with an exception. */
PyObject *cm_override_read(const cm_override *override);
/* Make `object` current until the matching exit; they nest. 0 or -1. */
int cm_override_enter(cm_override *override, PyObject *object);
/* RuntimeError when `object`, a `what`, is not the one entered last. 0 or -1. */
int cm_override_exit(cm_override *override, PyObject *object, const char *what);

#endif
