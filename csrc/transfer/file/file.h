/* SPDX-License-Identifier: Apache-2.0 */
/* Moves bytes between ranges of files and memory of any kind. Reads and writes are
 * shared out among the engine's threads. If the host may touch the memory, the bytes go
 * straight to it. Otherwise they go in chunks through page-locked memory, and while the
 * host reads or writes one chunk the device copies another one. Callers pass open
 * descriptors. Only a file that is written in the background needs names, because it
 * can get its final name when it is complete.
 * Locks: the lock of the engine. Each call also has a lock of its own, which guards the
 * call's first failure.
 *
 * Several files
 * -------------
 * Linux lets one thread at a time write to a file through the page cache: write() holds
 * a lock of the file while it copies. More threads would not write one file faster, as
 * all but one of them would spin until they get that lock. But several threads can
 * write one file each. So a call that writes has as many threads as files, and takes
 * its chunks from the files in turn. Reads take no such lock, and neither do writes
 * that go past the page cache, so all threads share them.
 *
 * Checksums
 * ---------
 * A call that writes may also make the checksums that ZIP archives have (base/crc32.h).
 * Each range of a file that the call writes (cm_file_range) belongs to one of these
 * checksums, and several ranges may belong to the same one. The thread that writes a
 * chunk first reads it for the checksum, which brings it into the caches. Such a call
 * has two threads for each file, so that one of them can read a chunk while the other
 * writes one. */
#pragma once

#include <stdatomic.h>

#include "transfer/engine/engine.h"

/* Lets tests change what reads and writes do, and count them. Any thread may use it.
 * Everything but the counters and `is_shut` may change only while no call is under
 * way. */
typedef struct cm_file_faults {
    /* Which read or write fails, as `count` counts them; 0 if none does. */
    uint64_t nth;
    uint64_t most; /* the most bytes that one read or write moves; 0 for no limit */
    /* Reads and writes that have this number or a higher one wait while `is_shut` is
     * set; 0 if none waits. */
    uint64_t held;
    _Atomic uint64_t count;         /* reads and writes so far */
    _Atomic uint64_t direct_count;  /* reads and writes that went past the page cache */
    _Atomic uint64_t advised_count; /* how often the system was told what will be
                                       read */
    /* The errno with which the read or write `nth` fails; 0 if it succeeds but moves no
     * bytes. */
    int error;
    bool is_on;   /* if not set, everything here is ignored */
    bool repeat;  /* the reads and writes after the nth fail as well */
    bool is_cold; /* the page cache counts as empty */
    /* A file cannot be opened for reads and writes that go past the page cache. */
    bool no_direct;
    atomic_bool is_shut;
} cm_file_faults;

/* One run of bytes of a file, and the memory that it is read to or written from. */
typedef struct cm_file_range {
    uint32_t file;   /* the index of the file in its request */
    uint64_t offset; /* in the file */
    uint64_t nbytes;
    /* The addresses of the lowest byte, for the host and for the device. As in
     * cm_region, `host` is NULL if the host may not touch the memory, and `address` is
     * 0 if the device cannot reach it. */
    void *host;
    cm_address address;
    cm_kind kind;
    int device;
    /* The memory is a mapping of a file, whose pages are gone if that file was cut
     * short. */
    bool is_file;
    /* Borrowed; NULL if the memory is a single run. Otherwise the region describes the
     * memory, whose elements are read or written in C order, and `host` and `address`
     * are not used. */
    const cm_region *region;
    /* A call that makes checksums uses these two members. The first is the index of the
     * checksum that the range belongs to, and the second is how many bytes of later
     * ranges belong to the same checksum. */
    uint64_t checksum_index;
    uint64_t nbytes_behind;
} cm_file_range;

/* Describe the bytes of a transfer between `region` and the first file of a request. In
 * the file they begin at `offset`. The range borrows the region unless the region is a
 * single run.
 * Fails: CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_file_range_init(cm_file_range *range, uint64_t offset,
                                          const cm_region *region);

/* Return the device whose memory the range has, or -1 if it has memory of the host. */
static inline int
cm_file_range_device(const cm_file_range *range)
{
    return cm_kind_is_on_device(range->kind) || range->host == NULL ? range->device
                                                                    : -1;
}

/* What went wrong with the file. */
typedef struct cm_file_failure {
    /* The errno; 0 if the file ends at `offset`, or if the file did not fail. */
    int error;
    bool at_end;          /* the file has ended at `offset` */
    uint64_t offset;      /* the place in the file */
    uint64_t range_index; /* the range that has this place */
} cm_file_failure;

/* Says when reads and writes go past the page cache, if the file system allows that. */
typedef enum cm_file_direct {
    CM_FILE_DIRECT_AUTO, /* only long reads do, if the page cache does not have their
                            bytes */
    CM_FILE_DIRECT_NEVER,
    CM_FILE_DIRECT_ALWAYS,
} cm_file_direct;

/* The most files of one request. More files than threads would not be faster. */
enum { CM_FILE_MAX = CM_THREAD_MAX };

typedef struct cm_file_request {
    int fds[CM_FILE_MAX]; /* borrowed */
    uint32_t file_count;
    bool writes;
    cm_file_direct direct;
    const cm_file_range *ranges; /* borrowed; the ranges of a file are neighbours */
    uint64_t range_count;
    /* Borrowed. streams[i] is the stream for the work of device i; NULL for a stream of
     * the engine's own. */
    cm_stream *streams[CM_MAX_DEVICES];
    /* Says what comes first, what is kept alive, and who is asked whether to go on.
     * This copy request has neither ends nor a stream, and it blocks. */
    cm_copy_request copy;
    /* Borrowed, or NULL. Before the call each checksum has the value that it would have
     * if all bytes of its ranges were zero. The call then adds to the checksum what
     * each byte that it writes contributes. */
    _Atomic uint32_t *checksums;
    cm_file_faults *faults; /* borrowed; may be NULL */
} cm_file_request;

/* Says where a file lies while it is written in the background, and what becomes of it
 * afterwards. Both names are absolute, since the process may change its folder
 * meanwhile. */
typedef struct cm_file_place {
    const char *temporary; /* the file's name while it is written */
    const char *target;    /* the name that the file gets when it is complete */
    uint32_t mode;         /* the permissions that the file gets when it is complete */
} cm_file_place;

/* Read all ranges of the request, or write them, in any order (run/request.c). It
 * blocks until all bytes have been moved, and sets `failure`.
 *
 * After a failure some bytes may have been read or written, and nothing is in flight.
 * After an interruption, copies that a stream has been given may still be in flight;
 * the request's keeps are dropped once those copies have ended. The file is not used
 * any more in either case.
 * Fails: any call of the runtime; the pools; CM_ESYSTEM, with `failure` set, if the
 * file refused or ended; CM_EINVALID (a target whose elements overlap); CM_EOVERFLOW,
 * CM_ENOMEM, CM_ECAPTURING, CM_ECLOSED, CM_EFORKED, CM_ECANCELLED. */
CM_NODISCARD cm_status cm_engine_transfer_file(cm_engine *engine,
                                               const cm_file_request *request,
                                               cm_file_failure *failure);
/* Begin to write all ranges of the request in the background (save.h). The request has
 * only one file. After the call the engine borrows nothing from the request any more,
 * except the objects that `request->copy` keeps alive. The request must not name
 * streams: the work of the devices goes on streams of the engine, and `copy.after` says
 * what comes first.
 *
 * If `place` is not NULL, the file gets its permissions when all bytes are written, is
 * flushed to the disk, and takes the name of the target. Then the folder of the target
 * is flushed too. The call takes over the temporary file: if the transfer fails or is
 * cancelled, the file is removed, and the target stays as it was. There must be at
 * least one byte to write.
 *
 * The caller owns *out. The transfer fails as cm_engine_transfer_file() does, and with
 * CM_ESYSTEM and its errno if the file cannot be flushed or renamed.
 * Fails: CM_ESYSTEM, CM_ENOMEM, CM_ETHREAD, CM_ECAPTURING, CM_ECLOSED, CM_EFORKED,
 * CM_EINVALID. */
CM_NODISCARD cm_status cm_engine_write_file(cm_engine *engine,
                                            const cm_file_request *request,
                                            const cm_file_place *place,
                                            cm_ticket **out);
