/* SPDX-License-Identifier: Apache-2.0 */
/* What a file transfer moves at a time: one run of the file, or a few short ones. Plain
 * data; whoever runs the job writes it, and the workers read it while a task is
 * posted.
 */
#ifndef CM_TRANSFER_FILE_CHUNK_H
#define CM_TRANSFER_FILE_CHUNK_H

#include "transfer/file/file.h"
#include "transfer/host/workers.h"

enum {
    CM_FILE_SPAN_NBYTES = 32 << 20,       /* of a chunk that is moved in place */
    CM_FILE_DIRECT_PART_NBYTES = 2 << 20, /* of one call past the page cache */
    CM_FILE_PIECE_COUNT = 64,
    CM_FILE_PLAIN_COUNT = 8, /* memories, where no device is an end */
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

typedef struct cm_file_chunk {
    struct cm_file_job *job;
    cm_copy_task task;
    int device;      /* whose memory; -1: the host's */
    bool is_strided; /* one piece, whose memory `layout` describes from `host` or
                        `address` on */
    bool is_direct;  /* past the page cache, as far as its pages are whole */
    bool is_cold;    /* else: not in it, as far as is known */
    bool has_memory;
    uint32_t piece_count;
    uint64_t nbytes; /* up to the end of the last piece */
    uint64_t event;  /* lent; of event_device */
    int event_device;
    uint32_t memory; /* which, if has_memory */
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

#endif
