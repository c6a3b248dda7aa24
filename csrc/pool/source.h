/* SPDX-License-Identifier: Apache-2.0 */
/* A source makes the memory of a pool, one chunk at a time. It knows how memory of its
 * kind is made, placed and given back. It keeps no list of its chunks and decides
 * nothing: the pool chooses sizes and places, and obeys the limits.
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
    /* A value of the source, which the source needs to close and move the chunk. In a
     * placed source (see `is_placed`) the handle is 0 if closing the chunk has failed
     * half-way. Such a chunk can be closed, but no longer moved. */
    uint64_t handle;
    /* Nothing is mapped at the chunk's addresses, because the pool sleeps (sleep.c).
     * Such a chunk has memory only as long as it has a handle. */
    bool is_unmapped;
} cm_chunk;

/* True if the chunk takes memory of the device, mapped or not. */
static inline bool
cm_chunk_has_memory(const cm_chunk *chunk)
{
    return !chunk->is_unmapped || chunk->handle != 0;
}

typedef struct cm_source cm_source;

typedef struct cm_source_ops {
    /* Make a chunk of `nbytes` (a multiple of the granule). A placed source (see
     * `is_placed`) puts the chunk at base + offset, where there must be no open chunk.
     * Other sources ignore the offset.
     * Fails: the operation that failed; then there is no chunk. */
    cm_status (*open_chunk)(cm_source *source, uint64_t offset, uint64_t nbytes,
                            cm_chunk *out);
    /* Give a chunk back to the runtime. The host has already made sure that all work on
     * the chunk has ended.
     * Fails: the operation that failed; then the chunk is still usable, though perhaps
     *        it can no longer be moved. */
    cm_status (*close_chunk)(cm_source *source, cm_chunk *chunk);
    /* Move the memory of a chunk of a placed source to base + offset. Nothing is mapped
     * at the chunk's old place afterwards, and the contents of the memory are
     * undefined. The pointer is NULL in a source that cannot move chunks.
     * Fails: the operation that failed. If the chunk's address is 0 afterwards, the
     *        chunk could not be put back and is closed. Otherwise it is still where it
     *        was, and usable. */
    cm_status (*move_chunk)(cm_source *source, cm_chunk *chunk, uint64_t offset);
    /* Take the memory of a chunk away from the chunk's addresses, but keep the memory.
     * The host has already made sure that all work on the chunk has ended. This pointer
     * and the next two are NULL in a source that cannot unmap a chunk.
     * Fails: the operation that failed; then the chunk is still usable. */
    cm_status (*unmap_chunk)(cm_source *source, cm_chunk *chunk);
    /* Give the memory of an unmapped chunk back to the runtime. The chunk keeps its
     * addresses. Does nothing if the memory has gone back already.
     * Fails: the operation that failed; then the chunk still has its memory. */
    cm_status (*drop_chunk)(cm_source *source, cm_chunk *chunk);
    /* Make an unmapped chunk usable again, with the memory that it has kept or else
     * with new memory, whose contents are undefined.
     * Fails: the operation that failed; then the chunk is as it was. */
    cm_status (*map_chunk)(cm_source *source, cm_chunk *chunk);
    /* Open a chunk to those other devices (peers) that have a context by now. The
     * pointer is NULL in a source that has nothing to do here.
     * Fails: the operation that failed. */
    cm_status (*admit_peers)(cm_source *source, const cm_chunk *chunk);
    /* Expect that the next `count` chunks will have `nbytes` each, and prepare each of
     * them while the one before is made. A count of 0 ends the preparing, and memory
     * that was prepared is given back. The caller may still ask for other chunks at any
     * time. The pointer is NULL in a source that cannot prepare anything. */
    void (*expect)(cm_source *source, uint64_t nbytes, uint64_t count);
    /* Free the source, after the last chunk was closed. */
    void (*destroy)(cm_source *source);
} cm_source_ops;

/* The common part of all sources. Each implementation has it as the first member of its
 * own struct, and sets it once, when the source is opened. */
struct cm_source {
    const cm_source_ops *ops; /* borrowed, static */
    cm_runtime *rt;           /* borrowed */
    cm_pool_config config; /* a copy; the source reads only the members about memory */
    /* Sizes and offsets of chunks are multiples of this power of 2. */
    uint64_t granule;
    uint64_t peers;  /* bits of the devices that can reach this memory */
    bool is_placed;  /* all chunks lie in one range, so that neighbours can join */
    cm_address base; /* where that range begins */
    uint64_t range_nbytes; /* the length of that range */
    /* In a placed source, the size of the whole device's memory. A pool cannot grow
     * beyond this size. */
    uint64_t most_nbytes;
};

/* Open one of the two sources below for `config`. If the config, the device and the
 * driver allow it, this is the source that maps device memory on demand, and otherwise
 * the source that makes each chunk separately (a segment). Called inside a cm_scope.
 * Fails: CM_ENOMEM; CM_EINVALID; as the calls that ask the device. */
CM_NODISCARD cm_status cm_source_open(cm_runtime *rt, const cm_pool_config *config,
                                      cm_source **out);

/* The parts of the machine that tests replace. A struct of zeros means the machine as
 * it is. */
typedef struct cm_host_world {
    const char *root;         /* where /proc and /sys are; borrowed */
    cm_numa_find *find_nodes; /* finds out on which nodes pages are */
    /* How many threads populate a chunk, however small it is. */
    unsigned thread_count;
    bool can_not_bind;     /* the kernel refuses mbind */
    bool can_not_populate; /* the kernel has no MADV_POPULATE_WRITE */
} cm_host_world;

/* These functions open the two sources. The source of cm_source_vmm_open() maps device
 * memory on demand. The source of cm_source_segments_open() makes memory of any kind.
 * Each of its chunks is a segment, which is made separately. If possible, this source
 * makes host memory by populating a mapping and then registering it. All other chunks
 * are allocations of the runtime. `world` is copied.
 * Fails: CM_ENOTSUP if that source is not possible here; as cm_source_open(). */
CM_NODISCARD cm_status cm_source_vmm_open(cm_runtime *rt, const cm_pool_config *config,
                                          cm_source **out);
CM_NODISCARD cm_status cm_source_segments_open(cm_runtime *rt,
                                               const cm_pool_config *config,
                                               const cm_host_world *world,
                                               cm_source **out);
