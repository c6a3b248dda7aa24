/* SPDX-License-Identifier: Apache-2.0 */
/* The world of the C tests of the engine has two emulated devices with everything that
 * a copy needs, and memory of every kind whose bytes the test can look at. A test that
 * shuts the gate of a stream holds back the work that is queued on it from then on. A
 * keep is an object that a copy holds until it is over and then drops; the tests count
 * how often that happens. */
#pragma once

#include <unistd.h>

#include "open_emulated.h"
#include "transfer/engine/engine.h"

enum { WORLD_DEVICES = 2 };

/* Everything that a copy needs: the engine with its runtime and registry, and for each
 * device a pool and a stream. */
typedef struct world {
    cm_runtime *rt;
    cm_registry *registry;
    cm_engine *engine;
    cm_pool *pinned;
    cm_pool *device[WORLD_DEVICES];
    cm_stream *streams[WORLD_DEVICES];
} world;

/* A piece of memory of one kind. */
typedef struct memory {
    cm_kind kind;
    int device;
    uint64_t nbytes;
    void *host;
    cm_address address;
    unsigned char *bytes; /* where the test itself reads and writes the memory */
} memory;

/* Open a world whose page-locked pool has the configuration `pinned`. */
CM_UNUSED static void
open_world_with(world *w, const cm_pool_config *pinned)
{
    w->rt = open_emulated(13000, WORLD_DEVICES, UINT64_C(256) << 20);
    MUST(cm_registry_create(w->rt, NULL, &w->registry));
    MUST(cm_engine_create(w->rt, w->registry, NULL, NULL, &w->engine));
    MUST(cm_pool_create(w->rt, pinned, &w->pinned));
    cm_engine_set_pool(w->engine, -1, w->pinned, NULL);
    for (int device = 0; device < WORLD_DEVICES; device++) {
        cm_pool_config on_device = {
            .kind = CM_KIND_DEVICE, .device = device, .numa_node = -1};
        MUST(cm_pool_create(w->rt, &on_device, &w->device[device]));
        cm_engine_set_pool(w->engine, device, w->device[device], NULL);
        MUST(cm_stream_create(w->rt, device, CM_STREAM_NON_BLOCKING, 0,
                              &w->streams[device]));
    }
}

/* Open a world with an ordinary page-locked pool. */
CM_UNUSED static void
open_world(world *w)
{
    cm_pool_config config = {
        .kind = CM_KIND_PINNED, .flags = CM_HOST_ALLOC_PORTABLE, .numa_node = -1};
    open_world_with(w, &config);
}

/* Wait for the streams, close everything, and check that nothing is left. */
CM_UNUSED static void
close_world(world *w)
{
    cm_faults_plan(w->rt, CM_OP_none, 0, 0, false);
    for (int device = 0; device < WORLD_DEVICES; device++) {
        MUST(cm_rt_stream_synchronize(w->rt, w->streams[device]->handle));
    }
    MUST(cm_engine_close(w->engine));
    for (int device = 0; device < WORLD_DEVICES; device++) {
        CHECK(cm_pool_check(w->device[device]));
        cm_pool_release(w->device[device]);
        cm_stream_release(w->streams[device]);
    }
    cm_pool_release(w->pinned);
    MUST(cm_registry_close(w->registry));
    close_emulated(w->rt);
}

/* Allocate memory of any kind directly from the runtime, or for CM_KIND_PAGEABLE from
 * malloc(). */
CM_UNUSED static memory
take_memory(world *w, cm_kind kind, int device, uint64_t nbytes)
{
    memory m = {.kind = kind, .device = device, .nbytes = nbytes};
    cm_device_guard guard;
    MUST(cm_device_enter(w->rt, device, &guard));
    switch (kind) {
    case CM_KIND_PAGEABLE:
        m.host = malloc(nbytes);
        m.device = -1;
        break;
    case CM_KIND_MANAGED:
        MUST(cm_rt_managed_alloc(w->rt, nbytes, CM_MANAGED_GLOBAL, &m.address));
        m.host = (void *)(uintptr_t)m.address;
        break;
    case CM_KIND_DEVICE:
        MUST(cm_rt_device_alloc(w->rt, nbytes, &m.address));
        break;
    default:
        MUST(
            cm_rt_host_alloc(w->rt, nbytes,
                             CM_HOST_ALLOC_PORTABLE
                                 | (kind == CM_KIND_MAPPED ? CM_HOST_ALLOC_MAPPED : 0u),
                             &m.host));
        MUST(cm_rt_host_device_address(w->rt, m.host, &m.address));
    }
    cm_device_leave(w->rt, &guard);
    m.bytes = m.host;
    if (kind == CM_KIND_DEVICE) {
        m.bytes = cm_runtime_host_alias(w->rt, m.address, nbytes);
    }
    return m;
}

/* Fill the region with copies of the element at `value`. If `out` is not NULL it gets
 * the outcome of the fill. */
CM_UNUSED static cm_status
fill(world *w, const cm_region *dst, const void *value, cm_stream *stream,
     bool blocking, cm_ticket_info *out)
{
    cm_copy_request request = {.dst = *dst,
                               .src = {.host = (void *)(uintptr_t)value,
                                       .kind = CM_KIND_PAGEABLE,
                                       .device = -1,
                                       .itemsize = dst->itemsize},
                               .is_fill = true,
                               .stream = stream,
                               .blocking = blocking};
    cm_ticket *ticket;
    CM_TRY(cm_region_broadcast(dst, &request.src));
    CM_TRY(cm_engine_copy(w->engine, &request, &ticket));
    if (out != NULL) {
        cm_ticket_query(ticket, out);
    }
    cm_ticket_release(ticket);
    return cm_ok();
}

/* Free what take_memory() has allocated. */
CM_UNUSED static void
give_memory(world *w, memory *m)
{
    cm_device_guard guard;
    MUST(cm_device_enter(w->rt, m->device < 0 ? 0 : m->device, &guard));
    switch (m->kind) {
    case CM_KIND_PAGEABLE:
        free(m->host);
        break;
    case CM_KIND_MANAGED:
    case CM_KIND_DEVICE:
        MUST(cm_rt_device_free(w->rt, m->address));
        break;
    default:
        MUST(cm_rt_host_free(w->rt, m->host));
    }
    cm_device_leave(w->rt, &guard);
}

/* Describe the memory from `offset` on as a region without dimensions. */
CM_UNUSED static cm_region
region_at(const memory *m, uint64_t offset)
{
    cm_region region = {.kind = m->kind, .device = m->device, .itemsize = 1};
    region.host = m->host == NULL ? NULL : (char *)m->host + offset;
    region.address = m->address == 0 ? 0 : m->address + offset;
    return region;
}

/* Describe `count` elements that begin at `offset` and are `stride` bytes apart as a
 * region with one dimension. */
CM_UNUSED static cm_region
row(const memory *m, uint64_t offset, int64_t count, int64_t stride, int64_t itemsize)
{
    cm_region region = region_at(m, offset);
    region.ndim = 1;
    region.itemsize = itemsize;
    region.shape[0] = count;
    region.strides[0] = stride;
    return region;
}

/* Fill the memory with a pattern that depends on `seed` and in which neighbouring bytes
 * differ. */
CM_UNUSED CHECK_UNWATCHED static void
number_bytes(memory *m, unsigned seed)
{
    for (uint64_t i = 0; i < m->nbytes; i++) {
        m->bytes[i] = (unsigned char)((i * 7 + (i >> 8) * 13 + seed) % 251);
    }
}

/* Return how many elements of `itemsize` bytes are equal, from the first on. The
 * strides are in bytes. */
CM_UNUSED CHECK_UNWATCHED static int64_t
count_equal(const unsigned char *a, int64_t a_stride, const unsigned char *b,
            int64_t b_stride, int64_t itemsize, int64_t count)
{
    int64_t i = 0;
    for (; i < count; i++) {
        for (int64_t k = 0; k < itemsize; k++) {
            if (a[i * a_stride + k] != b[i * b_stride + k]) {
                return i;
            }
        }
    }
    return i;
}

/* Shut the gate of a stream. */
CM_UNUSED static void
shut(world *w, const cm_stream *stream)
{
    MUST(cm_emulated_gate_close(w->rt, stream->handle));
}

/* Open the gate of a stream. */
CM_UNUSED static void
unshut(world *w, const cm_stream *stream)
{
    MUST(cm_emulated_gate_open(w->rt, stream->handle));
}

/* Open a temporary file, which has no name any more, and write `nbytes` bytes at
 * `offset`. */
CM_UNUSED static void
open_file(int *fd, const unsigned char *content, uint64_t nbytes, uint64_t offset)
{
    char path[] = "/tmp/cumem-test-XXXXXX";
    *fd = mkstemp(path);
    CHECK(*fd >= 0);
    (void)unlink(path);
    CHECK_EQ(pwrite(*fd, content, nbytes, (off_t)offset), nbytes);
}

/* A function for cm_keep.drop that counts its calls. */
CM_UNUSED static void
count_drop(void *object)
{
    atomic_fetch_add((atomic_int *)object, 1);
}
