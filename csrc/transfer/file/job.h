/* SPDX-License-Identifier: Apache-2.0 */
/* One file transfer being made: a row of chunks, each a run of the file (or a few), in
 * turn with the file, the host and the device. All runtime calls are made by the thread
 * that runs the job; the workers see the tasks alone. Locks: `lock`, over the failure. */
#ifndef CM_TRANSFER_FILE_JOB_H
#define CM_TRANSFER_FILE_JOB_H

#include "transfer/engine/job.h"
#include "transfer/file/file.h"

/* What is moved at a time is one run of the file, or a few short ones. Plain data;
 * the thread that runs the job writes it, and the workers read it while a task is
 * posted. */
enum {
    CM_FILE_SPAN_NBYTES = 32 << 20,       /* of a chunk that is moved in place */
    CM_FILE_DIRECT_PART_NBYTES = 2 << 20, /* of one call past the page cache */
    CM_FILE_PIECE_COUNT = 64,
#if defined(__aarch64__)
    CM_FILE_PAGE_NBYTES = 64 << 10, /* of the kernel's cache, at most */
#else
    CM_FILE_PAGE_NBYTES = 4 << 10,
#endif
};

/* A run of the file within a chunk. */
typedef struct cm_file_piece {
    uint64_t at; /* its place in the chunk: as far from a page's beginning as `offset`
                  */
    uint64_t nbytes;
    uint64_t offset;
    char *host;         /* NULL: it lies in the chunk's own memory */
    cm_address address; /* of the device; 0: in the chunk's layout, or `host` */
    uint64_t range_index;
} cm_file_piece;

/* Its bytes pass the file's half, by the workers, and where a device is its end the
 * device's, by way of memory that begins at a page. */
typedef struct cm_file_chunk {
    struct cm_file_job *job;
    cm_copy_task task;
    int device;      /* whose memory; -1: the host's */
    bool is_strided; /* one piece, whose memory `layout` describes from `host` or
                        `address` on */
    bool is_direct;  /* past the page cache, as far as its pages are whole */
    bool is_cold;    /* else: not in it, as far as is known */
    bool bounces;    /* the host's memory does not lie as the file's pages do */
    uint32_t piece_count;
    uint64_t nbytes;  /* up to the end of the last piece */
    char *memory;     /* a device's; stays from chunk to chunk, as do the next */
    cm_block *pinned; /* owned; page-locked, */
    void *plain;      /* or ordinary where there is none */
    uint64_t event;   /* lent; of event_device */
    int event_device;
    cm_file_piece pieces[CM_FILE_PIECE_COUNT];
    char *host; /* of element 0, as is the next; is_strided */
    cm_address address;
    cm_layout layout; /* the user's memory on its side, packed on the other */
} cm_file_chunk;

/* Where the next chunk begins. */
typedef struct cm_file_cursor {
    uint64_t range;
    uint64_t done; /* of a range in one run */
    bool in_region;
    cm_layout layout; /* of a range in many runs, which is cut */
    cm_cut cut;
    uint64_t stretch; /* of the file, that was last asked about; 0: none */
    bool is_cold;     /* they are not in the page cache */
} cm_file_cursor;

/* Chunks are used in turn and indices count up for ever, as in a cm_ring: `begun`
 * have work posted or queued, `passed` of those are through with the first half (the
 * file's when reading), `ended` with both. */
typedef struct cm_file_job {
    cm_engine *engine; /* borrowed */
    const cm_file_request *request;
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
    bool in_flight;  /* after the end of the call still */
    bool lost_track; /* waiting failed: nobody knows what still runs */
    uint32_t memory_count;
    bool memory_is_full; /* no more is to be had */
    cm_mutex lock;
    atomic_bool failed;
    cm_file_failure failure; /* under lock: the one nearest to the beginning */
    cm_file_chunk chunks[CM_SLOT_MAX];
} cm_file_job;

/* Whose memory; -1: the host's. */
static inline int
cm_file_range_device(const cm_file_range *range)
{
    return cm_kind_is_on_device(range->kind) || range->host == NULL ? range->device
                                                                    : -1;
}

/* cut.c: the next chunk, described; false when all ranges are through. Fails:
 * CM_EINVALID, CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_file_cut_next(cm_file_job *job, cm_file_chunk *chunk,
                                        bool *out);
void cm_file_close_direct(cm_file_job *job);

/* calls.c: post the reading or writing of a chunk. */
void cm_file_post(cm_file_chunk *chunk);
/* Bytes the file has; UINT64_MAX where it does not say. */
uint64_t cm_file_size(int fd);
/* Another descriptor of the file, past the page cache; -1: there is none. */
int cm_file_open_direct(const cm_file_job *job);
/* Are most pages of it in the page cache? True where that is not known. */
bool cm_file_is_cached(const cm_file_job *job, uint64_t offset, uint64_t nbytes);
/* Tell the hook. */
bool cm_file_enter(const cm_file_job *job, cm_file_call call, uint64_t *nbytes);
/* Memory of so many bytes and two pages has a page's beginning here. */
static inline char *
cm_file_align(void *memory)
{
    uintptr_t mask = CM_FILE_PAGE_NBYTES - 1;
    return (char *)memory + ((0 - (uintptr_t)memory) & mask);
}

#endif
