/* SPDX-License-Identifier: Apache-2.0 */
/* What a `with` block makes current in its context: streams and pools, each a chain of
 * blocks in a context variable, from the innermost outwards. The blocks themselves are
 * cumem/extension/blocks.py's. GIL. */
#pragma once

#include <stdbool.h>

#include "python/python.h"

typedef struct cm_override {
    /* owned; module.c visits all of them */
    PyObject *variable; /* contextvars.ContextVar */
    PyObject *getter;   /* its get(), looked up once and asked often */
    PyObject *entered;  /* dict, of weak references to blocks that are not over */
} cm_override;

/* No context has anything entered: skips the lookup. */
static inline bool
cm_override_is_empty(const cm_override *override)
{
    return override->entered == NULL || PyDict_Size(override->entered) == 0;
}

/* Make the variable. 0, or -1 with an exception; what there is goes with the state. */
int cm_override_init(cm_override *override, const char *name);
/* The chain of this context, or None. New reference; NULL with an exception. */
PyObject *cm_override_read(const cm_override *override);
/* The next object outwards, borrowed from the chain that *at began at; NULL at its end,
 * or where *at is NULL. */
PyObject *cm_override_step(PyObject **at);
/* Make `object` current until the matching exit; they nest. `object`, or NULL. */
PyObject *cm_override_enter(const cm_override *override, PyObject *object);
/* End the block of `object`, a `what`, that this frame entered, or else the innermost
 * of this context. RuntimeError where there is none, and where the block was entered in
 * another context: it is over there as well then. None, or NULL. */
PyObject *cm_override_exit(const cm_override *override, PyObject *object,
                           const char *what);
