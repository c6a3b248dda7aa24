/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes between ranges of one file and memory of any kind: reads and writes are shared
 * out among the engine's threads, straight where the host may touch the memory, else
 * through page-locked chunks while the device copies others. Knows open descriptors, no
 * names. Locks: the engine's, and one per call for its first failure. */
#pragma once

#include <stdatomic.h>

#include "transfer/engine/engine.h"

/* What tests make of calls on files, and what they count. Any thread; all but the
 * counters and `is_shut` changes while no call is under way. */
typedef struct cm_file_faults {
    uint64_t nth;           /* read or write that fails, by `count`; 0: none */
    uint64_t most;          /* bytes that one moves; 0: all */
    uint64_t held;          /* from this on they wait while it is shut; 0: none */
    _Atomic uint64_t count; /* reads and writes so far */
    _Atomic uint64_t direct_count;  /* those past the page cache */
    _Atomic uint64_t advised_count; /* announcements */
    int error;                      /* of the nth: errno; 0: it moves nothing */
    bool is_on;                     /* else all of it is ignored */
    bool repeat;                    /* later ones than the nth fail too */
    bool is_cold;                   /* nothing is in the page cache */
    bool no_direct;                 /* there is no descriptor past it */
    atomic_bool is_shut;
} cm_file_faults;

/* One run of the file and its place in memory. */
typedef struct cm_file_range {
    uint64_t offset; /* in the file */
    uint64_t nbytes;
    void *host; /* as in cm_region, of the lowest byte; not used with a region */
    cm_address address;
    cm_kind kind;
    int device;
    bool is_file;            /* the memory is a mapped file's: its pages may be gone */
    const cm_region *region; /* borrowed: memory in more than one run, taken in C order;
                                NULL: it is one */
} cm_file_range;

/* The range at `offset` for all of `region`, which is borrowed if it is no single run.
 * Fails: CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_file_range_init(cm_file_range *range, uint64_t offset,
                                          const cm_region *region);

/* Whose memory; -1: the host's. */
static inline int
cm_file_range_device(const cm_file_range *range)
{
    return cm_kind_is_on_device(range->kind) || range->host == NULL ? range->device
                                                                    : -1;
}

/* What was wrong with the file. */
typedef struct cm_file_failure {
    int error; /* errno; 0: the file ends at `offset`, or no failure of the file's */
    bool at_end;
    uint64_t offset;      /* where in the file */
    uint64_t range_index; /* in which range */
} cm_file_failure;

/* Past the page cache, where the file system lets us: what is long and not in it. */
typedef enum cm_file_direct {
    CM_FILE_DIRECT_AUTO, /* when reading, much */
    CM_FILE_DIRECT_NEVER,
    CM_FILE_DIRECT_ALWAYS,
} cm_file_direct;

typedef struct cm_file_request {
    int fd;
    bool writes;
    cm_file_direct direct;
    const cm_file_range *ranges; /* borrowed */
    uint64_t range_count;
    /* For work of each device, borrowed; NULL: a stream of the engine's own. */
    cm_stream *streams[CM_MAX_DEVICES];
    cm_copy_request copy;   /* what comes first, what is kept alive, who is asked; it
                               has no ends and no stream, and blocks */
    cm_file_faults *faults; /* borrowed; NULL: none */
} cm_file_request;

/* run/request.c: read all ranges, or write them, in any order. Blocks until all of it
 * is there. On failure some of it may have been read or written, and nothing is in
 * flight: but when interrupted, copies that a stream has been given end behind the
 * keep, while the file is let go of at once. `failure` is written.
 * Fails: any runtime call, the pools; CM_ESYSTEM, with `failure` set, when the file
 * refused or ended; CM_EINVALID (a target whose elements overlap); CM_EOVERFLOW,
 * CM_ENOMEM, CM_ECAPTURING, CM_ECLOSED, CM_EFORKED, CM_ECANCELLED. */
CM_NODISCARD cm_status cm_engine_transfer_file(cm_engine *engine,
                                               const cm_file_request *request,
                                               cm_file_failure *failure);
