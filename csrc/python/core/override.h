/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps track of the streams, pools and devices that `with` blocks make current in
 * their contexts.
 *
 * Chains
 * ------
 * A context variable holds a chain: None, or a pair of the innermost block and the
 * chain outside of it. The object of the innermost block is the current one. A chain is
 * never changed, since contexts share it: asyncio copies the context for each task, and
 * a task may outlive the block that it was started in. If a block ends in the middle of
 * a chain, the links inside of it are made anew.
 *
 *   with a:            chain = (a, None)
 *       with b:        chain = (b, (a, None))
 *           a ends     chain = (b, None)         b's link is made anew
 *
 * Ends
 * ----
 * Blocks end in any order, for example those of generators that are closed late, and
 * one object may be entered by many threads and tasks at a time. So each block knows
 * the frame that entered it, and the token that the context variable gave for it.
 * Nearly all blocks end in the context where they began, while the chain outside of
 * them is as it was. Then the variable is set back by the token, and the block is gone.
 * To end a block in another context than its own is an error, and the block is then
 * over everywhere. A block that has ended in its own context is still current in
 * contexts that were copied inside of it, as with any context variable. All functions
 * need the GIL. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "python/python.h"

typedef struct cm_override {
    /* Owned; module.c visits the first CM_OVERRIDE_OBJECTS of these. */
    PyObject *variable; /* a contextvars.ContextVar */
    PyObject *getter;   /* its get(), set() and reset(), looked up once */
    PyObject *setter;
    PyObject *resetter;
    PyObject *block_type; /* made by cm_block_type_new() */
    cm_list entered; /* blocks that may be in a chain, the newest last; not owned */
    uint32_t *block_count; /* borrowed: counts the blocks in `entered` and, as the state
                              has one number for all, those of its other overrides */
} cm_override;

enum { CM_OVERRIDE_OBJECTS = 5 };

/* True if no block of this override is active in any context, so that nothing has to be
 * looked up. Calls ask cm_state_has_blocks() first. */
static inline bool
cm_override_is_empty(const cm_override *override)
{
    return cm_list_is_empty(&override->entered);
}

/* Make the type of blocks, which Python code never sees. Returns a new reference, or
 * NULL with an exception. */
PyObject *cm_block_type_new(PyObject *module);
/* Make the variable. `block_count` is borrowed. Returns 0, or -1 with an exception; the
 * state then frees what was made by then. */
int cm_override_init(cm_override *override, PyObject *block_type, const char *name,
                     uint32_t *block_count);
/* Take the blocks that contexts still have out of the list, before its memory goes. */
void cm_override_fini(cm_override *override);
/* Read the chain of this context, which may be None. Returns a new reference, or NULL
 * with an exception. */
PyObject *cm_override_read(const cm_override *override);
/* Step through a chain from the innermost block outwards. This returns the object of
 * the next block that has not ended, and moves *at behind that block. The object is
 * borrowed from the chain that *at began with. Returns NULL at the end of the chain, or
 * if *at is NULL. */
PyObject *cm_override_step(PyObject **at);
/* Make `object` current until the matching exit; blocks nest. Returns `object`, or NULL
 * with an exception. */
PyObject *cm_override_enter(cm_override *override, PyObject *object);
/* End the block of `object` that this frame entered, or else the innermost one of
 * `object` in this context. `what` says in errors what sort of object it is. Returns
 * None, or NULL with an exception. That is a RuntimeError if there is no such block, or
 * if it was entered in another context; in the latter case the block is over there as
 * well. */
PyObject *cm_override_exit(cm_override *override, PyObject *object, const char *what);
