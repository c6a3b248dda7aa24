/* SPDX-License-Identifier: Apache-2.0 */
/* What a `with` block makes current in its context: streams, pools and devices.
 *
 * What is current is a chain in a context variable: None, or a pair of the innermost
 * block and the chain outside of it. A chain is never changed, since contexts share it:
 * asyncio copies the context for each task, and a task may outlive the block that it
 * was started in. A block that ends in the middle of a chain has the links inside of it
 * made anew.
 *
 * Blocks end in any order, as those of generators do that are closed late, and one
 * object may be entered by many threads and tasks at a time. So each block knows the
 * frame that entered it and the token of the context that it did so in. Nearly all end
 * where they began, with all around them as it was: the variable is set back, and the
 * block goes. A block that ends in another context than it began in is an error, and
 * then over everywhere. One that ended at home is still current in contexts that were
 * copied inside of it, as with any context variable. GIL. */
#pragma once

#include <stdbool.h>

#include "base/list.h"
#include "python/python.h"

typedef struct cm_override {
    /* Owned; module.c visits the first CM_OVERRIDE_OBJECTS of them. */
    PyObject *variable; /* contextvars.ContextVar */
    PyObject *getter;   /* its get(), set() and reset(), looked up once */
    PyObject *setter;
    PyObject *resetter;
    PyObject *block_type; /* cm_block_type_new()'s */
    cm_list entered; /* blocks that may be in a chain, the last one last; not owned */
} cm_override;

enum { CM_OVERRIDE_OBJECTS = 5 };

/* No context has anything entered: skips the lookup. */
static inline bool
cm_override_is_empty(const cm_override *override)
{
    return cm_list_is_empty(&override->entered);
}

/* The type of blocks, which Python code never sees. New reference. */
PyObject *cm_block_type_new(PyObject *module);
/* Make the variable. 0, or -1 with an exception; what there is goes with the state. */
int cm_override_init(cm_override *override, PyObject *block_type, const char *name);
/* Before its memory goes: blocks that contexts still have leave the list. */
void cm_override_fini(cm_override *override);
/* The chain of this context, or None. New reference; NULL with an exception. */
PyObject *cm_override_read(const cm_override *override);
/* The next object outwards, borrowed from the chain that *at began at; NULL at its end,
 * or where *at is NULL. */
PyObject *cm_override_step(PyObject **at);
/* Make `object` current until the matching exit; they nest. `object`, or NULL. */
PyObject *cm_override_enter(cm_override *override, PyObject *object);
/* End the block of `object`, a `what`, that this frame entered, or else the innermost
 * of this context. RuntimeError where there is none, and where the block was entered in
 * another context: it is over there as well then. None, or NULL. */
PyObject *cm_override_exit(cm_override *override, PyObject *object, const char *what);
