/* SPDX-License-Identifier: Apache-2.0 */
/* What a job that transfers a file needs in addition to its ring (routes/ring.h).
 *
 * The ring moves the transfer in chunks, each of which occupies one slot. A chunk is
 * one run of the file or a few short ones (cut.c), and each of these runs is called a
 * piece here. A chunk is moved in two halves. The file's half is done by the workers,
 * who read or write parts of the chunk (calls.c). The device's half copies between the
 * page-locked memory of the slot and the device (file.c). The halves of different
 * chunks overlap. For example, the device copies one chunk while the workers read the
 * next. A chunk of host memory has no device's half. The workers move its bytes between
 * the file and the user's memory, so its slot needs no memory.
 *
 * Example: `fromfile` of 1 GiB into a device buffer. The workers read chunks of 8 MiB
 * in parts of 1 MiB, or of 2 MiB past the page cache, and each chunk is copied to the
 * device as soon as all of its parts have been read. If a part fails, the failure
 * nearest to the beginning of the file is kept, and nothing new is begun.
 *
 * The thread that runs the job makes all calls of the runtime, and workers see only
 * tasks.
 * Locks: `lock` guards the failure. */
#pragma once

#include "transfer/engine/job.h"
#include "transfer/file/file.h"

/* Sizes of what is moved at a time. */
enum {
    CM_FILE_SPAN_NBYTES = 32 << 20, /* of a chunk that is read straight to the user's
                                       host memory */
    CM_FILE_WRITE_NBYTES = 4 << 20, /* of a chunk that is written from host memory */
    CM_FILE_DIRECT_PART_NBYTES = 2 << 20, /* of one read or write past the page cache */
    CM_FILE_PIECE_COUNT = 64,
    CM_FILE_NOT_TRIED = -2,
#if defined(__aarch64__)
    CM_FILE_PAGE_NBYTES = 64 << 10, /* of a page of the kernel's cache, at most */
#else
    CM_FILE_PAGE_NBYTES = 4 << 10,
#endif
};

/* A run of the file within a chunk. The job's thread writes pieces and chunks; workers
 * read them while their task is posted. */
typedef struct cm_file_piece {
    /* Where the piece begins in the chunk. `at` and `offset` have the same remainder
     * when they are divided by CM_FILE_PAGE_NBYTES, because reads and writes past the
     * page cache need memory that is aligned as the file is. */
    uint64_t at;
    uint64_t nbytes;
    uint64_t offset;      /* where the piece begins in the file */
    char *host;           /* NULL if the bytes go to or from the chunk's own memory */
    cm_address address;   /* the device's address; 0 if the memory is the host's */
    uint64_t range_index; /* the index of its range in the request */
} cm_file_piece;

/* The contents of a slot of the ring. The workers do the file's half of moving it. If
 * the user's memory is on a device, that device does the other half, and between the
 * halves the bytes lie in memory of the slot, aligned to a page. */
typedef struct cm_file_chunk {
    struct cm_file_job *file;
    int device; /* where the user's memory is; -1 for the host */
    /* It has one piece, whose memory `layout` describes, beginning at the piece's
     * `host` or `address`. */
    bool is_strided;
    bool is_direct; /* its whole pages go past the page cache */
    bool is_cold;   /* the page cache does not seem to have its bytes */
    /* The host's memory is not aligned as the file's pages are, so direct reads and
     * writes go by way of memory that is. */
    bool bounces;
    uint32_t piece_count;
    uint64_t nbytes; /* the bytes up to the end of the last piece */
    char *memory;    /* the slot's memory, if it has any */
    cm_file_piece pieces[CM_FILE_PIECE_COUNT];
    cm_layout layout; /* the user's memory on one side, packed bytes on the other */
} cm_file_chunk;

/* Where the next chunk of a file begins. */
typedef struct cm_file_cursor {
    uint64_t range; /* the index of the range, in the request */
    /* The range has begun, and `cut` has the rest of it. */
    bool has_begun;
    cm_layout layout; /* what `cut` cuts */
    cm_cut cut;
} cm_file_cursor;

/* What a job knows about one of its files. */
typedef struct cm_file_state {
    uint64_t first_range; /* the index of its first range, in the request */
    uint64_t end_range;   /* one past its last range */
    cm_file_cursor cursor;
    bool had_size; /* the size of the file was known when the system was last asked for
                      it */
    int direct_fd; /* owned; -1 if there is none; CM_FILE_NOT_TRIED until somebody has
                      tried to open one */
    atomic_bool direct_refused; /* the file system has refused a direct read or write */
} cm_file_state;

typedef struct cm_file_job {
    const cm_file_request *request; /* borrowed */
    cm_job *job;                    /* borrowed, NULL until the job is planned */
    cm_file_state files[CM_FILE_MAX];
    uint32_t turn; /* the file of the next chunk */
    bool at_host; /* the next chunk is of host memory; the ranges of devices, which come
                     first, are all cut */
    bool has_host_end; /* at least one range is of host memory */
    uint64_t nbytes;   /* the bytes of all ranges */
    cm_mutex lock;
    /* Under lock: the failure nearest to the beginning of the first file that
     * failed. */
    cm_file_failure failure;
    /* Owned. What only a transfer in the background needs (save.h). It is NULL if a
     * caller waits for the transfer, and then the caller destroys the cm_file_job. */
    struct cm_file_save *save;
    cm_file_chunk chunks[CM_SLOT_MAX];
} cm_file_job;

/* Return the number of the file of a piece. */
static inline uint32_t
cm_file_of(const cm_file_job *file, const cm_file_piece *piece)
{
    return file->request->ranges[piece->range_index].file;
}

/* True if one of the ranges has failed. Then nothing more needs to be moved. */
static inline bool
cm_file_has_failed(const cm_file_job *file)
{
    return atomic_load(&file->job->lost_error) != 0;
}

/* file.c: make the state of the transfer that `request` asks for. It borrows the
 * request.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_file_job_create(const cm_file_request *request,
                                          cm_file_job **out);
/* Free it, and set `failure` to what went wrong with the file. */
void cm_file_job_destroy(cm_file_job *file, cm_file_failure *failure);
/* Free the state of a transfer in the background, and its `save`. If there is no
 * `save`, this does nothing, because the caller that waits for the transfer frees its
 * state. */
void cm_file_job_drop(cm_file_job *file);
/* Return the device of the first range that has bytes on a device, or -1 if all bytes
 * are in host memory. */
int cm_file_first_device(const cm_file_request *request);
/* Plan the job of a file, after checking that a file to be read is long enough, that
 * each range has memory, and that none of the request's streams is being captured.
 * Fails: CM_ESYSTEM, CM_EINVALID, CM_ECAPTURING. */
CM_NODISCARD cm_status cm_file_plan(cm_job *job);

/* cut.c: go on to the next file in turn, and in it to the next range that has bytes.
 * Returns false if there is none left in any file. */
bool cm_file_find_next(cm_file_job *file);
/* Describe the next chunk.
 * Fails: CM_EINVALID, CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_file_cut_next(cm_file_job *file, cm_file_chunk *chunk);

/* calls.c: post the reading or writing of a chunk. */
void cm_file_post(cm_file_chunk *chunk, cm_task_group *group, cm_copy_task *task);
/* Return how many bytes the file has, or UINT64_MAX if its size is not known, as that
 * of a pipe is not. */
uint64_t cm_file_size(int fd);
/* Open another descriptor of a file that goes past the page cache. Returns -1 if that
 * fails. */
int cm_file_open_direct(const cm_file_job *file, uint32_t index);
/* True if most pages of these bytes of a file are in the page cache, or if that is not
 * known. */
bool cm_file_is_cached(const cm_file_job *file, uint32_t index, uint64_t offset,
                       uint64_t nbytes);
/* Find where a page begins in the memory of a slot, which has two more pages than its
 * bytes need. */
static inline char *
cm_file_align(void *memory)
{
    uintptr_t mask = CM_FILE_PAGE_NBYTES - 1;
    return (char *)memory + ((0 - (uintptr_t)memory) & mask);
}
