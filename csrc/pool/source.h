/* SPDX-License-Identifier: Apache-2.0 */
/* Where a pool's memory comes from, one chunk at a time. A source knows how memory of
 * its kind is made, placed and given back; it keeps no list of its chunks and decides
 * nothing: sizes, places and limits are the pool's.
 * Locks: none. A pool makes one call at a time; every call may wait in the runtime and
 * is made inside a cm_scope of the source's device, without the pool's lock. */
#pragma once

#include "base/machine.h"
#include "pool/pool.h"

/* One piece of physical memory, wholly usable. */
typedef struct cm_chunk {
    void *host;         /* NULL for device memory */
    cm_address address; /* for the device */
    uint64_t nbytes;    /* a multiple of the source's granule */
    uint64_t handle;    /* the source's own: what close and move need; 0 on a placed one
                           that was closed in part: it can be closed, but not moved */
} cm_chunk;

typedef struct cm_source cm_source;

typedef struct cm_source_ops {
    /* Make `nbytes` (a multiple of the granule) usable. A placed source puts them at
     * base + offset, which no open chunk overlaps; the others wherever they like.
     * Fails: the operation that failed; nothing is left behind. */
    cm_status (*open_chunk)(cm_source *source, uint64_t offset, uint64_t nbytes,
                            cm_chunk *out);
    /* Give it back. The host has seen all work on it complete. Fails: the operation;
     * the chunk is then still there and usable, if perhaps not to be moved. */
    cm_status (*close_chunk)(cm_source *source, cm_chunk *chunk);
    /* Placed sources: the same memory at base + offset instead, with what it holds
     * undefined; the old place is empty then. Fails: as above; the chunk is where it
     * was and usable, or, with address 0, could not be put back and is closed. NULL
     * where a source cannot. */
    cm_status (*move_chunk)(cm_source *source, cm_chunk *chunk, uint64_t offset);
    /* Let the peers that have a context by now use an open chunk, too. Fails: the
     * operation. NULL where there is nothing to do. */
    cm_status (*admit_peers)(cm_source *source, const cm_chunk *chunk);
    /* After the last chunk was closed. */
    void (*destroy)(cm_source *source);
} cm_source_ops;

/* Embedded first in each implementation's own struct; set once by its open function. */
struct cm_source {
    const cm_source_ops *ops; /* borrowed, static */
    cm_runtime *rt;           /* borrowed */
    cm_pool_config config;    /* what it says of memory is the source's */
    uint64_t granule; /* sizes and offsets of chunks are multiples; a power of 2 */
    uint64_t peers;   /* by device index: whom admit_peers() is for */
    bool is_placed;   /* chunks lie in one range of addresses, neighbours join up */
    cm_address base;  /* of that range */
    uint64_t range_nbytes;
    uint64_t most_nbytes; /* that can ever have memory at a time: the device's all */
};

/* The source for `config` on this machine and driver: the first of those below that
 * can be had. Inside a cm_scope. Fails: CM_ENOMEM; CM_EINVALID; the device's calls. */
CM_NODISCARD cm_status cm_source_open(cm_runtime *rt, const cm_pool_config *config,
                                      cm_source **out);

/* What tests replace of the machine. All of it zero or NULL: as it is. */
typedef struct cm_host_world {
    const char *root;         /* of /proc and /sys; borrowed */
    cm_numa_find *find_nodes; /* says where pages are */
    unsigned thread_count;    /* that populate a chunk, however small it is */
    bool can_not_bind;        /* the kernel refuses mbind */
    bool can_not_populate;    /* the kernel has no MADV_POPULATE_WRITE */
} cm_host_world;

/* Device memory mapped on demand; or each chunk by itself, of any kind: populated and
 * registered host memory where that can be had, in a world that is copied, else an
 * allocation of the runtime. Fail: CM_ENOTSUP where it cannot be had; as
 * cm_source_open. */
CM_NODISCARD cm_status cm_source_vmm_open(cm_runtime *rt, const cm_pool_config *config,
                                          cm_source **out);
CM_NODISCARD cm_status cm_source_segments_open(cm_runtime *rt,
                                               const cm_pool_config *config,
                                               const cm_host_world *world,
                                               cm_source **out);
