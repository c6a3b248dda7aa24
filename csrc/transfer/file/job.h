/* SPDX-License-Identifier: Apache-2.0 */
/* One file transfer being made: what a job has beside its ring, of which each piece is
 * a chunk: a run of the file, or a few. All runtime calls are made by the thread
 * that runs the job; the workers see the tasks alone. Locks: `lock`, over the failure. */
#pragma once

#include "transfer/engine/job.h"
#include "transfer/file/file.h"

/* What is moved at a time is one run of the file, or a few short ones. Plain data;
 * the job's thread writes it, the workers read it while a task is posted. */
enum {
    CM_FILE_SPAN_NBYTES = 32 << 20,       /* of a chunk that is moved in place */
    CM_FILE_DIRECT_PART_NBYTES = 2 << 20, /* of one call past the page cache */
    CM_FILE_PIECE_COUNT = 64,
    CM_FILE_NOT_TRIED = -2,
#if defined(__aarch64__)
    CM_FILE_PAGE_NBYTES = 64 << 10, /* of the kernel's cache, at most */
#else
    CM_FILE_PAGE_NBYTES = 4 << 10,
#endif
};

/* A run of the file within a chunk. */
typedef struct cm_file_piece {
    uint64_t at; /* in the chunk, as far from a page's beginning as `offset` */
    uint64_t nbytes;
    uint64_t offset;
    char *host;         /* NULL: it lies in the chunk's own memory */
    cm_address address; /* of the device; 0: in the chunk's layout, or `host` */
    uint64_t range_index;
} cm_file_piece;

/* What lies in a slot. Its bytes pass the file's half, by the workers, and where a
 * device is its end the device's, by way of memory that begins at a page. */
typedef struct cm_file_chunk {
    struct cm_file_job *file;
    int device;      /* whose memory; -1: the host's */
    bool is_strided; /* one piece, whose memory `layout` describes from its `host` or
                        `address` on */
    bool is_direct;  /* past the page cache, as far as its pages are whole */
    bool is_cold;    /* else: not in it, as far as is known */
    bool bounces;    /* the host's memory does not lie as the file's pages do */
    uint32_t piece_count;
    uint64_t nbytes; /* up to the end of the last piece */
    char *memory;    /* the slot's, if it has any */
    cm_file_piece pieces[CM_FILE_PIECE_COUNT];
    cm_layout layout; /* the user's memory on its side, packed on the other */
} cm_file_chunk;

/* Where the next chunk begins. */
typedef struct cm_file_cursor {
    bool at_host; /* ranges of the host come after those of devices */
    uint64_t range;
    bool has_begun;   /* that one: what is left of it is that of the cut */
    cm_layout layout; /* which is cut */
    cm_cut cut;
} cm_file_cursor;

typedef struct cm_file_job {
    const cm_file_request *request; /* borrowed */
    cm_job *job;                    /* borrowed, from its plan on */
    cm_file_cursor cursor;
    uint64_t nbytes;            /* of all ranges */
    bool has_host_end;          /* one at least of them is the host's */
    bool had_size;              /* the file, when it was last asked */
    int direct_fd;              /* owned; -1: none; CM_FILE_NOT_TRIED */
    atomic_bool direct_refused; /* by the file system */
    cm_mutex lock;
    cm_file_failure failure; /* under lock: the one nearest to the beginning */
    cm_file_chunk chunks[CM_SLOT_MAX];
} cm_file_job;

/* Has one of the ranges failed? Then nothing more needs to be moved. */
static inline bool
cm_file_has_failed(const cm_file_job *file)
{
    return atomic_load(&file->job->lost_error) != 0;
}

/* file.c: of a call that has begun. Fails: CM_ENOMEM, CM_ESYSTEM. */
CM_NODISCARD cm_status cm_file_job_create(const cm_file_request *request,
                                          cm_file_job **out);
/* What was wrong with the file is told. */
void cm_file_job_destroy(cm_file_job *file, cm_file_failure *failure);
/* Device whose memory is the first end of the ranges; -1: it is the host's alone. */
int cm_file_first_device(const cm_file_request *request);
/* The plan of such a job; after a look whether the file is long enough, and the streams
 * fit. Fails: CM_ESYSTEM, CM_EINVALID, CM_ECAPTURING. */
CM_NODISCARD cm_status cm_file_plan(cm_job *job);

/* cut.c: go on to the next range that has bytes; false: all are through. */
bool cm_file_find_next(cm_file_job *file);
/* The next chunk, described. Fails: CM_EINVALID, CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_file_cut_next(cm_file_job *file, cm_file_chunk *chunk);

/* calls.c: post the reading or writing of a chunk. */
void cm_file_post(cm_file_chunk *chunk, cm_task_group *group, cm_copy_task *task);
/* Bytes the file has; UINT64_MAX where it does not say. */
uint64_t cm_file_size(int fd);
/* Another descriptor of the file, past the page cache; -1: there is none. */
int cm_file_open_direct(const cm_file_job *file);
/* Are most pages of it in the page cache? True where that is not known. */
bool cm_file_is_cached(const cm_file_job *file, uint64_t offset, uint64_t nbytes);
/* Memory of so many bytes and two pages has a page's beginning here. */
static inline char *
cm_file_align(void *memory)
{
    uintptr_t mask = CM_FILE_PAGE_NBYTES - 1;
    return (char *)memory + ((0 - (uintptr_t)memory) & mask);
}
