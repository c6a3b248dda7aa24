/* SPDX-License-Identifier: Apache-2.0 */
/* A source is where a pool's memory comes from, one chunk at a time. It knows how
 * memory of its kind is made, placed and given back. It keeps no list of its chunks and
 * decides nothing: sizes, places and limits are the pool's.
 * Locks: none. A pool makes one call at a time. Each call may wait in the runtime, and
 * is made inside a cm_scope of the source's device, without the pool's lock. */
#pragma once

#include "base/machine.h"
#include "pool/pool.h"

/* One piece of physical memory, all of it usable. */
typedef struct cm_chunk {
    void *host;         /* NULL for device memory */
    cm_address address; /* the address for the device */
    uint64_t nbytes;    /* a multiple of the source's granule */
    /* The source's own value, which closing and moving need. 0 in a placed chunk whose
     * closing failed half-way: it can be closed, but no longer moved. */
    uint64_t handle;
} cm_chunk;

typedef struct cm_source cm_source;

typedef struct cm_source_ops {
    /* Make a chunk of `nbytes` (a multiple of the granule). A placed source puts it at
     * base + offset, where no open chunk may be; others put it wherever they like.
     * Fails: the operation that failed; nothing is left behind. */
    cm_status (*open_chunk)(cm_source *source, uint64_t offset, uint64_t nbytes,
                            cm_chunk *out);
    /* Give a chunk back. The host has seen all work on it end.
     * Fails: the operation that failed; the chunk is then still there and usable,
     * though perhaps it can no longer be moved. */
    cm_status (*close_chunk)(cm_source *source, cm_chunk *chunk);
    /* Move a chunk of a placed source to base + offset: the same memory, with undefined
     * contents. The old place is empty then. NULL where a source cannot move.
     * Fails: the operation that failed. The chunk is still where it was and usable; or,
     * if its address is 0 now, it could not be put back and is closed. */
    cm_status (*move_chunk)(cm_source *source, cm_chunk *chunk, uint64_t offset);
    /* Give the peers that have a context by now access to an open chunk. NULL where
     * there is nothing to do.
     * Fails: the operation that failed. */
    cm_status (*admit_peers)(cm_source *source, const cm_chunk *chunk);
    /* Free the source, after the last chunk was closed. */
    void (*destroy)(cm_source *source);
} cm_source_ops;

/* The common part, which each implementation embeds first in a struct of its own. Its
 * open function sets it once. */
struct cm_source {
    const cm_source_ops *ops; /* borrowed, static */
    cm_runtime *rt;           /* borrowed */
    cm_pool_config config;    /* the source uses only what it says about memory */
    /* Sizes and offsets of chunks are multiples of it; a power of 2. */
    uint64_t granule;
    uint64_t peers;  /* bits by device index: the peers that may get access */
    bool is_placed;  /* chunks lie in one range of addresses, where neighbours join */
    cm_address base; /* where that range begins */
    uint64_t range_nbytes;
    /* All memory of the device, of which open chunks cannot have more. Only set for a
     * placed source. */
    uint64_t most_nbytes;
};

/* Open the source for `config` on this machine and driver: the first of those below
 * that can be had. Called inside a cm_scope.
 * Fails: CM_ENOMEM; CM_EINVALID; as the calls that ask the device. */
CM_NODISCARD cm_status cm_source_open(cm_runtime *rt, const cm_pool_config *config,
                                      cm_source **out);

/* The parts of the machine that tests replace. If all of it is zero or NULL, the
 * machine is taken as it is. */
typedef struct cm_host_world {
    const char *root;         /* where /proc and /sys are; borrowed */
    cm_numa_find *find_nodes; /* tells on which nodes pages are */
    /* How many threads populate a chunk, however small it is. */
    unsigned thread_count;
    bool can_not_bind;     /* the kernel refuses mbind */
    bool can_not_populate; /* the kernel has no MADV_POPULATE_WRITE */
} cm_host_world;

/* The two sources. The first maps device memory on demand. The second makes chunks of
 * any kind of memory, each on its own. Where possible, a chunk of page-locked memory is
 * host memory that is populated and then registered. Any other chunk is an allocation
 * of the runtime. `world` is copied.
 * Fails: CM_ENOTSUP where that source cannot be had; as cm_source_open(). */
CM_NODISCARD cm_status cm_source_vmm_open(cm_runtime *rt, const cm_pool_config *config,
                                          cm_source **out);
CM_NODISCARD cm_status cm_source_segments_open(cm_runtime *rt,
                                               const cm_pool_config *config,
                                               const cm_host_world *world,
                                               cm_source **out);
