/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of a storage and shutdown.c share: the parts of a storage, taken out
 * of it under the GIL so that giving them back may wait without it. */
#ifndef CM_PYTHON_STORAGE_H
#define CM_PYTHON_STORAGE_H

#include "python/objects.h"

typedef struct cm_storage_remains {
    cm_runtime *runtime; /* borrowed */
    cm_pool *pool;       /* the rest: owned, any may be NULL */
    cm_block *block;
    cm_registration *registration;
    PyObject *foreign;
    void (*foreign_drop)(void *argument);
    void *foreign_argument;
    cm_stream **uses; /* or &first_use: not to be moved */
    cm_stream *first_use;
    uint32_t use_count;
    cm_writer *writers;
    uint32_t writer_count;
    bool fence;
    bool captured;
    bool unlocks; /* pages are unlocked with it */
    int device;   /* whose work a fence means */
} cm_storage_remains;

/* A new storage's first stream, which needs no memory. */
static inline void
cm_storage_set_first_use(cm_storage *storage, cm_stream *stream)
{
    bool lent = stream == storage->state->default_streams[stream->device];
    storage->first_use = lent ? stream : cm_stream_hold(stream);
    storage->first_is_lent = lent;
    storage->uses = &storage->first_use;
    storage->use_count = storage->use_capacity = 1;
    storage->lasting_count = 1;
}

/* Move everything out of `storage`. GIL. */
void cm_storage_detach(cm_storage *storage, cm_storage_remains *out);
/* Give back what needs no Python; must not hold the GIL where it may wait. In a forked
 * child all of it is leaked. Waits for the streams that use registered memory. Fails:
 * host_unregister or such a wait (everything is gone all the same). */
CM_NODISCARD cm_status cm_storage_remains_free(cm_storage_remains *remains);
/* Then, with the GIL, let go of the foreign owner. */
void cm_storage_remains_bury(cm_storage_remains *remains);
/* Both, with the GIL, which is released where that may wait. */
CM_NODISCARD cm_status cm_storage_remains_give(cm_state *state,
                                               cm_storage_remains *remains);
/* What most storages end with: a block that goes back without a call of the runtime,
 * and nothing else. False: nothing was done. GIL. */
bool cm_storage_try_give_back(cm_storage *storage);
/* Detach and give. Failures go to the unraisable hook: for where nobody is there to
 * raise to. GIL. */
void cm_storage_give_back(cm_storage *storage);
/* Give the bytes of a closed storage back if nothing holds it any more. GIL. */
void cm_storage_end_if_idle(cm_storage *storage);
/* True when giving back may make runtime calls: release the GIL for it. */
bool cm_storage_remains_may_wait(const cm_storage_remains *remains);

#endif
