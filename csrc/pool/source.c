/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the source of a pool (source.h), and implements the source of segments. The
 * source of segments makes every chunk separately, in one of two ways. Either the
 * runtime allocates the chunk or, for host memory, the source maps huge pages, lets
 * several threads populate them, and then registers them. Populating and registering
 * takes a fraction of the time of cudaHostAlloc. Each chunk that is made in this way is
 * one mapping, and one call registers it. No copy may cross the edge of a registration,
 * so neighbouring chunks never join. If the system cannot register so many bytes by one
 * call, the runtime allocates the chunk instead.
 *
 * Populating a chunk takes about as long as registering it. So a caller that is going
 * to ask for many chunks of one size says so (`expect` in source.h). Then, while the
 * runtime registers one chunk, threads populate the next one. */
#include "pool/source.h"

#include <stdlib.h>

#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "base/machine.h"
#include "base/thread.h"
#include "pool/registry.h"
#include "runtime/scope.h"

enum {
    /* The driver maps device and managed memory in pages of 2 MiB, so a smaller request
     * occupies a whole page. */
    DEVICE_GRANULE = 2 << 20,
    /* A multiple of every page size (4 to 64 KiB), since the driver locks whole
     * pages. */
    HOST_GRANULE = 64 << 10,
    /* values of chunk.handle: who made the memory */
    MADE_BY_US = 0,
    MADE_BY_RUNTIME = 1,
};

/* A mapping that a thread populates for a chunk that is expected. */
typedef struct prepared {
    cm_thread thread;
    char *start;
    uint64_t nbytes;  /* 0 if no mapping is prepared */
    cm_status status; /* whether the mapping could be populated; set when the thread has
                         ended */
} prepared;

/* A source of segments. is_exact implies node >= 0. */
typedef struct segment_source {
    cm_source base; /* first, so that a cm_source pointer can be cast to this */
    cm_host_world world;
    /* We make and populate host memory. If not set, the runtime makes every chunk. */
    bool populates;
    int node;                 /* where pages should be; CM_NUMA_NO_NODE for anywhere */
    bool is_exact;            /* the user named the node, so no other will do */
    prepared next;            /* the chunk that is likely to be asked for next */
    uint64_t expected_nbytes; /* of each chunk that is expected */
    uint64_t expected_count;  /* how many are expected after the prepared one */
} segment_source;

static bool
is_host(const cm_source *source)
{
    return cm_kind_is_page_locked(source->config.kind);
}

/* Keep memory out of forked children, if the pool wants that (see fork.c). */
static void
leave_out(const cm_source *source, void *start, uint64_t nbytes)
{
    switch (source->config.fork) {
    case CM_FORK_COPY:
        (void)cm_host_hide(start, nbytes);
        break;
    case CM_FORK_OMIT:
        cm_host_omit(start, nbytes);
        break;
    case CM_FORK_SHARE:
        break;
    }
}

/* -- one allocation of the runtime ------------------------------------------------------- */

/* Let the runtime allocate a chunk of page-locked host memory.
 * Fails: host_alloc, host_device_address. */
static cm_status
open_plain_host(cm_source *source, uint64_t nbytes, cm_chunk *out)
{
    cm_runtime *rt = source->rt;
    unsigned flags = source->config.flags;
    void *host = NULL;
    CM_TRY(cm_rt_host_alloc(rt, nbytes, flags, &host));
    cm_address address = (cm_address)(uintptr_t)host;
    /* Only memory of these two sorts may have another address on the device. */
    if ((flags & (CM_HOST_ALLOC_MAPPED | CM_HOST_ALLOC_WRITE_COMBINED)) != 0) {
        cm_status status = cm_rt_host_device_address(rt, host, &address);
        if (!cm_is_ok(status)) {
            /* The caller reports the first failure. */
            cm_ignore(cm_rt_host_free(rt, host));
            return status;
        }
    }
    leave_out(source, host, nbytes);
    *out = (cm_chunk){
        .host = host, .address = address, .nbytes = nbytes, .handle = MADE_BY_RUNTIME};
    return cm_ok();
}

/* Let the runtime allocate a chunk of the source's kind.
 * Fails: as the call that allocates; host_device_address. */
static cm_status
open_plain(cm_source *source, uint64_t nbytes, cm_chunk *out)
{
    cm_address address = 0;
    if (is_host(source)) {
        return open_plain_host(source, nbytes, out);
    }
    if (cm_kind_migrates(source->config.kind)) {
        CM_TRY(cm_rt_managed_alloc(source->rt, nbytes, source->config.flags, &address));
        *out = (cm_chunk){.host = (void *)(uintptr_t)address,
                          .address = address,
                          .nbytes = nbytes,
                          .handle = MADE_BY_RUNTIME};
        return cm_ok();
    }
    CM_TRY(cm_rt_device_alloc(source->rt, nbytes, &address));
    *out = (cm_chunk){
        .host = NULL, .address = address, .nbytes = nbytes, .handle = MADE_BY_RUNTIME};
    return cm_ok();
}

/* -- populated host memory --------------------------------------------------------------- */

/* Populate the pages of a fresh mapping, on the node where they should be. */
static cm_status
populate(const segment_source *self, char *start, uint64_t nbytes)
{
    cm_cpus cpus;
    cm_populate populate = {
        .start = start,
        .nbytes = nbytes,
        .thread_count = self->world.thread_count,
        .can_not_populate = self->world.can_not_populate,
    };
    leave_out(&self->base, start, nbytes);
    if (self->node != CM_NUMA_NO_NODE) {
        cm_populate_on_node(&populate, self->world.root, self->node,
                            !self->world.can_not_bind, &cpus);
    }
    CM_TRY(cm_populate_run(&populate));
    if (self->is_exact) {
        uint64_t elsewhere =
            cm_numa_elsewhere(self->world.find_nodes, start, nbytes, self->node);
        return elsewhere == 0 ? cm_ok() : cm_fail(CM_ENUMA, elsewhere);
    }
    return cm_ok();
}

/* Map fresh memory, unless the process would then use more than it may. Returns
 * CM_EHOSTMEMORY in that case. */
static cm_status
map_fresh(const segment_source *self, uint64_t nbytes, char **out)
{
    cm_host_memory memory;
    cm_host_memory_read(self->world.root, &memory);
    if (nbytes > memory.available_nbytes) { /* else the kernel would kill the process */
        return cm_fail(CM_EHOSTMEMORY, memory.available_nbytes);
    }
    bool is_shared = self->base.config.fork == CM_FORK_SHARE;
    /* The mapping fails only if the kernel does not overcommit memory. */
    if (!cm_is_ok(cm_host_map_as(nbytes, is_shared, out))) {
        return cm_fail(CM_EHOSTMEMORY, memory.available_nbytes);
    }
    return cm_ok();
}

static void *
populate_next(void *context)
{
    segment_source *self = context;
    self->next.status = populate(self, self->next.start, self->next.nbytes);
    return NULL;
}

/* Begin to populate the next one of the expected chunks. If no memory can be mapped or
 * no thread can be started now, nothing is prepared. Then the call that asks for the
 * chunk populates it, and reports what is wrong. */
static void
prepare_next(segment_source *self)
{
    uint64_t nbytes = self->expected_nbytes;
    if (self->expected_count == 0 || self->next.nbytes != 0
        || !cm_is_ok(map_fresh(self, nbytes, &self->next.start))) {
        return;
    }
    self->next.nbytes = nbytes;
    if (cm_is_ok(cm_thread_start(&self->next.thread, populate_next, self))) {
        self->expected_count--;
        return;
    }
    self->next.nbytes = 0;
    cm_host_unmap(self->next.start, nbytes);
}

/* Give back the mapping that was prepared. A forked child leaves it alone, since the
 * thread that populates it exists only in the parent. */
static void
forget_next(segment_source *self)
{
    if (self->next.nbytes != 0 && !cm_runtime_is_forked(self->base.rt)) {
        cm_thread_join(self->next.thread);
        cm_host_unmap(self->next.start, self->next.nbytes);
    }
    self->next.nbytes = 0;
}

static void
expect_segments(cm_source *source, uint64_t nbytes, uint64_t count)
{
    segment_source *self = (segment_source *)source;
    forget_next(self);
    self->expected_nbytes = cm_round_up_to(nbytes, source->granule);
    self->expected_count = self->populates ? count : 0;
    prepare_next(self);
}

/* Find populated memory for a chunk. If a mapping of this size was prepared, take that
 * mapping and begin to prepare the next one. Otherwise map fresh memory and populate
 * it. */
static cm_status
map_populated(segment_source *self, uint64_t nbytes, char **out)
{
    if (self->next.nbytes != nbytes) {
        CM_TRY(map_fresh(self, nbytes, out));
        return populate(self, *out, nbytes);
    }
    cm_thread_join(self->next.thread);
    cm_status status = self->next.status;
    *out = self->next.start;
    self->next.nbytes = 0;
    prepare_next(self);
    return status;
}

/* Make a chunk of host memory that is populated and then registered. After a failure no
 * memory is left, unless the driver refuses to unregister it.
 * Fails: as map_populated(); host_register, host_device_address. */
static cm_status
open_populated(segment_source *self, uint64_t nbytes, cm_chunk *out)
{
    cm_runtime *rt = self->base.rt;
    char *start = NULL;
    cm_address address = 0;
    cm_status status = map_populated(self, nbytes, &start);
    if (start == NULL) {
        return status;
    }
    bool registered = false;
    if (cm_is_ok(status)) {
        /* The memory is always made portable and mapped, whatever the flags ask for.
         * The registry does the same with memory that it locks. */
        status = cm_rt_host_register(rt, start, nbytes,
                                     CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED);
        registered = cm_is_ok(status);
    }
    if (registered) {
        status = cm_rt_host_device_address(rt, start, &address);
    }
    if (cm_is_ok(status)) {
        *out = (cm_chunk){
            .host = start, .address = address, .nbytes = nbytes, .handle = MADE_BY_US};
        return status;
    }
    /* If the driver refuses to unregister the memory, it stays mapped, so that no other
     * memory gets its addresses. */
    if (!registered
        || cm_is_ok(cm_scope_accept_gone(cm_rt_host_unregister(rt, start)))) {
        cm_host_unmap(start, nbytes);
    }
    return status;
}

/* -- segments --------------------------------------------------------------------------- */

/* Make a chunk as cm_source_ops says. If the system cannot register the memory, the
 * runtime allocates the chunk instead. But if children are to share the memory, or if
 * the user named a node, memory of the runtime cannot serve, and the call fails. */
static cm_status
open_segment(cm_source *source, uint64_t offset, uint64_t nbytes, cm_chunk *out)
{
    segment_source *self = (segment_source *)source;
    (void)offset;
    if (self->populates) {
        cm_status status = open_populated(self, nbytes, out);
        /* The system may be unable to register any memory, or this much at once. */
        bool may_fall_back =
            status.code == CM_CUDA_NOT_SUPPORTED
            || (status.op == CM_OP_host_register && nbytes > CM_REGISTER_MAX_NBYTES);
        bool must = self->is_exact || source->config.fork == CM_FORK_SHARE;
        if (must || !may_fall_back) {
            return status;
        }
    }
    return open_plain(source, nbytes, out);
}

static cm_status
close_segment(cm_source *source, cm_chunk *chunk)
{
    cm_runtime *rt = source->rt;
    bool by_us = chunk->handle == MADE_BY_US;
    if (by_us) {
        CM_TRY(cm_scope_accept_gone(cm_rt_host_unregister(rt, chunk->host)));
        cm_host_unmap(chunk->host, chunk->nbytes);
    }
    else if (is_host(source)) {
        CM_TRY(cm_scope_accept_gone(cm_rt_host_free(rt, chunk->host)));
    }
    else {
        CM_TRY(cm_scope_accept_gone(cm_rt_device_free(rt, chunk->address)));
    }
    *chunk = (cm_chunk){.host = NULL};
    return cm_ok();
}

static void
destroy(cm_source *source)
{
    forget_next((segment_source *)source);
    free(source);
}

static const cm_source_ops segment_ops = {.open_chunk = open_segment,
                                          .close_chunk = close_segment,
                                          .expect = expect_segments,
                                          .destroy = destroy};

/* Choose the node on which pages will be populated: the one to which the device is
 * attached. If that node is not known or is not one of `nodes`, choose none.
 * Fails: device_describe. */
static cm_status
find_nearest(segment_source *self, uint64_t nodes)
{
    cm_device_info info;
    CM_TRY(cm_rt_device_describe(self->base.rt, self->base.config.device, &info));
    int node = cm_numa_read_nearest(self->world.root, info.pci_bus_id);
    if (node >= 0 && (nodes >> node & 1) != 0) {
        self->node = node;
    }
    return cm_ok();
}

/* Choose how host memory is made.
 * Fails: CM_EINVALID if the node does not exist; CM_ENOTSUP if only the runtime could
 *        make the memory, and either children are to share it or the user named one of
 *        several nodes; and as the calls that ask the device. */
static cm_status
choose_way(segment_source *self)
{
    const cm_pool_config *config = &self->base.config;
    int node = config->numa_node;
    uint64_t nodes = cm_numa_read_nodes(self->world.root);
    self->node = node;
    self->is_exact = node != CM_NUMA_NO_NODE;
    if (self->is_exact
        && (node < 0 || node >= CM_NUMA_MAX_NODES || (nodes >> node & 1) == 0)) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)node);
    }
    int can_register = 0;
    /* Ordinary memory cannot be made write-combined afterwards. */
    if (config->segments != CM_SEGMENTS_PLAIN
        && (config->flags & CM_HOST_ALLOC_WRITE_COMBINED) == 0) {
        /* If `nodes` has more than one bit, the machine has several nodes to choose
         * from. */
        if (!self->is_exact && !cm_is_power_of_two(nodes)) {
            CM_TRY(find_nearest(self, nodes));
        }
        CM_TRY(cm_rt_device_attribute(self->base.rt,
                                      CM_ATTRIBUTE_host_register_supported,
                                      config->device, &can_register));
    }
    self->populates = can_register != 0;
    if (config->fork == CM_FORK_SHARE && !self->populates) {
        /* The runtime's own memory cannot be mapped as shared. */
        return cm_fail(CM_ENOTSUP, 0);
    }
    self->base.granule = self->populates ? CM_HUGE_PAGE_NBYTES : HOST_GRANULE;
    /* The runtime does not let us choose a node. So if the user named a node, memory of
     * the runtime can serve only if the machine has no other node. (is_exact is tested
     * first: if it is not set, `node` is CM_NUMA_NO_NODE, and shifting by -1 is
     * undefined.) */
    if (self->is_exact && !self->populates && nodes != UINT64_C(1) << node) {
        return cm_fail(CM_ENOTSUP, (uint64_t)node);
    }
    return cm_ok();
}

cm_status
cm_source_segments_open(cm_runtime *rt, const cm_pool_config *config,
                        const cm_host_world *world, cm_source **out)
{
    segment_source *self = calloc(1, sizeof(*self));
    CM_TRY(cm_allocated(self != NULL, sizeof(*self)));
    self->base = (cm_source){
        .ops = &segment_ops, .rt = rt, .config = *config, .granule = DEVICE_GRANULE};
    self->world = *world;
    if (self->world.find_nodes == NULL) {
        self->world.find_nodes = cm_numa_find_nodes;
    }
    cm_status status = is_host(&self->base) ? choose_way(self) : cm_ok();
    if (!cm_is_ok(status)) {
        free(self);
        return status;
    }
    *out = &self->base;
    return status;
}

cm_status
cm_source_open(cm_runtime *rt, const cm_pool_config *config, cm_source **out)
{
    static const cm_host_world here = {.root = NULL};
    cm_status status = cm_source_vmm_open(rt, config, out);
    return status.code == CM_ENOTSUP ? cm_source_segments_open(rt, config, &here, out)
                                     : status;
}
