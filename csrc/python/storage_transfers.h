/* SPDX-License-Identifier: Apache-2.0 */
/* The transfers that a storage remembers, so that those that come later wait for them.
 */
#ifndef CM_PYTHON_STORAGE_TRANSFERS_H
#define CM_PYTHON_STORAGE_TRANSFERS_H

#include "transfer/engine.h"
#include "transfer/handle.h"

struct cm_storage;

/* What a transfer does to a storage: bytes from its first on, gaps included. */
typedef struct cm_extent {
    uint64_t low;
    uint64_t high;
    bool writes;
} cm_extent;

#define CM_EXTENT_ALL(writes) ((cm_extent){0, UINT64_MAX, (writes)})

/* A transfer that a storage remembers, finished perhaps. */
typedef struct cm_writer {
    cm_ticket *ticket; /* held */
    cm_extent extent;
    uint64_t number; /* in the order in which they came */
    bool covered;    /* whoever would have to wait for it waits for a later one, which
                        waits for it */
} cm_writer;

/* Must what does that come after it? */
static inline bool
cm_writer_is_in_the_way(const cm_writer *writer, cm_extent extent)
{
    return (writer->extent.writes || extent.writes) && writer->extent.low < extent.high
           && extent.low < writer->extent.high;
}

/* Where `region`, of its memory, lies in it. */
cm_extent cm_storage_extent(const struct cm_storage *storage, const cm_region *region,
                            bool writes);
/* Remember an unfinished transfer of it, which came after all that were in the way when
 * writer_total was `seen` (0: none). 0, or -1. GIL held. */
int cm_storage_add_writer(struct cm_storage *storage, cm_ticket *ticket,
                          cm_extent extent, uint64_t seen);
/* Wait (GIL released) until no transfer uses it, whoever asked for that. 0, or -1 with
 * what a signal handler raised. */
int cm_storage_wait_transfers(struct cm_storage *storage);

#endif
