/* SPDX-License-Identifier: Apache-2.0 */
/* One file transfer being made: a row of chunks, each a run of the file (or a few), in
 * turn with the file, the host and the device. All runtime calls are made by the thread
 * that runs the job; the workers see the tasks alone. Locks: `lock`, over the failure. */
#ifndef CM_TRANSFER_FILE_JOB_H
#define CM_TRANSFER_FILE_JOB_H

#include "transfer/engine/job.h"
#include "transfer/file/chunk.h"

/* Page-locked, or ordinary where there is none. */
typedef struct cm_file_memory {
    char *host;       /* begins at a page */
    cm_block *pinned; /* owned, as is the next */
    void *plain;
    bool taken;
} cm_file_memory;

/* Chunks are used in turn and indices count up for ever, as in a cm_staging: `begun`
 * have work posted or queued, `passed` of those are through with the first half (the
 * file's when reading), `ended` with both. */
typedef struct cm_file_job {
    cm_engine *engine; /* borrowed */
    const cm_file_request *request;
    const cm_file_calls *calls;
    cm_tuning tuning;
    cm_task_group group;
    cm_file_cursor cursor;
    bool has_cut; /* the chunk at `begun` is cut and waits for memory */
    uint64_t begun;
    uint64_t passed;
    uint64_t ended;
    uint64_t asked_ns;
    uint64_t nbytes;                         /* of all ranges */
    bool had_size;                           /* the file, when it was last asked */
    int direct_fd;                           /* owned; -1: none */
    bool was_opened;                         /* or tried */
    atomic_bool direct_refused;              /* by the file system */
    cm_stream *streams[CM_MAX_DEVICES];      /* held; of devices that are ends */
    cm_stream *lent[CM_MAX_DEVICES];         /* those of them that are the engine's */
    bool has_queued[CM_MAX_DEVICES];         /* the stream may be working for us */
    cm_block *device_blocks[CM_MAX_DEVICES]; /* owned: packed bytes of one chunk */
    bool has_host_end;
    bool has_device_end;
    bool in_flight;  /* after the end of the call still */
    bool lost_track; /* waiting failed: nobody knows what still runs */
    uint32_t memory_count;
    bool memory_is_full; /* no more is to be had */
    uint64_t memory_nbytes;
    cm_file_memory memories[CM_SLOT_MAX];
    cm_mutex lock;
    atomic_bool failed;
    cm_file_failure failure; /* under lock: the one nearest to the beginning */
    cm_file_chunk chunks[CM_SLOT_MAX];
} cm_file_job;

/* What the chunk has, from its beginning on. */
static inline char *
cm_file_chunk_memory(const cm_file_chunk *chunk)
{
    return chunk->job->memories[chunk->memory].host;
}

/* cut.c: the next chunk, described; false when all ranges are through. Fails:
 * CM_EINVALID, CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_file_cut_next(cm_file_job *job, cm_file_chunk *chunk,
                                        bool *out);
/* True when cm_file_cut_next would answer false. */
bool cm_file_is_cut(cm_file_job *job);

/* direct.c: set is_direct and is_cold of a chunk that begins with `nbytes` at
 * `offset` of the file. Looks at that, or opens it again, now and then. */
void cm_file_look_at_cache(cm_file_job *job, cm_file_chunk *chunk, uint64_t offset,
                           uint64_t nbytes);
/* Tell the system what the chunk reads soon, if it has to be. */
void cm_file_advise(cm_file_chunk *chunk);
void cm_file_close_direct(cm_file_job *job);

/* part.c: post the reading or writing of a chunk. */
void cm_file_post(cm_file_chunk *chunk);

/* memory.c: a memory for the chunk; *out false: none now. Fails: CM_ENOMEM, the
 * pinned pool where it is not short. */
CM_NODISCARD cm_status cm_file_take_memory(cm_file_job *job, cm_file_chunk *chunk,
                                           bool *out);
void cm_file_give_memory(cm_file_chunk *chunk);
void cm_file_free_memory(cm_file_job *job);

/* device.c: queue the device's part of a chunk and record its event. */
CM_NODISCARD cm_status cm_file_send(cm_file_chunk *chunk);
CM_NODISCARD cm_status cm_file_fetch(cm_file_chunk *chunk);
/* Look whether, or wait until, that is over. Fails: event_query, CM_ECANCELLED. */
CM_NODISCARD cm_status cm_file_look(cm_file_chunk *chunk, bool *out);
CM_NODISCARD cm_status cm_file_wait_event(cm_file_job *job, int device, uint64_t event);
/* Asks now and then whether to go on. Fails: CM_ECANCELLED. */
CM_NODISCARD cm_status cm_file_ask(cm_file_job *job);

/* order.c: streams, what comes first, and the end. */
CM_NODISCARD cm_status cm_file_begin_order(cm_file_job *job);
/* Nothing of a failed transfer is in flight, or behind a ticket. Drops the keeps,
 * unless that has them. */
void cm_file_end_order(cm_file_job *job, cm_status status);
void cm_file_drop_keeps(const cm_file_request *request);

#endif
