/* SPDX-License-Identifier: Apache-2.0 */
/* This source makes device memory that is mapped on demand. One range of addresses is
 * reserved for the life of the source, and physical memory is put into it chunk by
 * chunk. So neighbouring chunks form one stretch of memory, and a chunk can be moved to
 * where it is needed.
 *
 * What it costs on an H200 (driver 580): reserving 1 TiB takes 15 us. Opening a chunk
 * of up to 256 MiB takes about 30 us whatever its size: 8-10 us to create it, less than
 * 1 us to map it and 20 us to set the access. One call for several chunks does not set
 * the access any faster. Closing a chunk takes 14 us to unmap it and 9-20 us to release
 * the memory (45 us for 128 MiB, 300 us for 1 GiB). A handle stands for the physical
 * memory of one chunk, and the driver cannot map only a part of it. So a chunk can be
 * moved and closed only as a whole. */
#include <stdatomic.h>
#include <stdlib.h>

#include "base/checked_math.h"
#include "pool/source.h"
#include "runtime/scope.h"

/* Addresses cost nothing until something is mapped, so the range is several times as
 * long as the memory, which leaves room for gaps between chunks. */
enum { RANGE_FACTOR = 8 };

typedef struct vmm_source {
    cm_source base; /* first, so that a cm_source pointer can be cast to this */
    unsigned flags; /* flags for physical_create */
    /* The addresses that the driver has reserved. The driver aligns them to its own
     * granule only, so the range of the source begins at the first of these addresses
     * that is a multiple of the source's granule. */
    cm_address reserved;
    uint64_t reserved_nbytes;
} vmm_source;

/* Open the chunk to the source's own device and to those peers that have a context by
 * now. Opening it to another peer would make a context on a GPU that nobody uses. */
static cm_status
grant(cm_source *source, const cm_chunk *chunk)
{
    cm_runtime *rt = source->rt;
    int devices[CM_MAX_DEVICES];
    int count = 0;
    devices[count++] = source->config.device;
    for (int i = 0; i < rt->device_count; i++) {
        if ((source->peers >> i & 1) != 0
            && atomic_load_explicit(&rt->primary[i], memory_order_relaxed) != 0) {
            devices[count++] = i;
        }
    }
    return cm_rt_address_set_access(rt, chunk->address, chunk->nbytes, devices, count);
}

/* Map the memory of a chunk at the chunk's address and make it usable. If this fails,
 * the memory is not mapped. */
static cm_status
place(cm_source *source, const cm_chunk *chunk)
{
    cm_runtime *rt = source->rt;
    CM_TRY(cm_rt_address_map(rt, chunk->address, chunk->nbytes, chunk->handle));
    cm_status status = grant(source, chunk);
    if (!cm_is_ok(status)) {
        (void)CM_TRY_TWICE(cm_rt_address_unmap(rt, chunk->address, chunk->nbytes));
    }
    return status;
}

static cm_status
open_chunk(cm_source *base, uint64_t offset, uint64_t nbytes, cm_chunk *out)
{
    cm_chunk made = {.address = base->base + offset, .nbytes = nbytes};
    CM_TRY(cm_rt_physical_create(base->rt, nbytes, base->config.device,
                                 ((const vmm_source *)base)->flags, &made.handle));
    cm_status status = place(base, &made);
    if (!cm_is_ok(status)) {
        (void)CM_TRY_TWICE(cm_rt_physical_release(base->rt, made.handle));
        return status;
    }
    *out = made;
    return status;
}

/* Release the handle first, since mapped memory lives on without its handle. So after a
 * failure at either step the chunk is still usable, and closing it again does the
 * rest. */
static cm_status
close_chunk(cm_source *base, cm_chunk *chunk)
{
    if (chunk->handle != 0) {
        CM_TRY(cm_scope_accept_gone(cm_rt_physical_release(base->rt, chunk->handle)));
        chunk->handle = 0;
    }
    if (!chunk->is_unmapped) {
        CM_TRY(cm_scope_accept_gone(
            cm_rt_address_unmap(base->rt, chunk->address, chunk->nbytes)));
    }
    *chunk = (cm_chunk){.nbytes = 0};
    return cm_ok();
}

static cm_status
unmap_chunk(cm_source *base, cm_chunk *chunk)
{
    CM_TRY(cm_scope_accept_gone(
        cm_rt_address_unmap(base->rt, chunk->address, chunk->nbytes)));
    chunk->is_unmapped = true;
    return cm_ok();
}

static cm_status
drop_chunk(cm_source *base, cm_chunk *chunk)
{
    if (chunk->handle != 0) {
        CM_TRY(cm_scope_accept_gone(cm_rt_physical_release(base->rt, chunk->handle)));
        chunk->handle = 0;
    }
    return cm_ok();
}

/* Map a chunk again. It gets the memory of its handle or, if the handle is 0, new
 * memory. After a failure the chunk is as it was.
 * Fails: physical_create; as place(). */
static cm_status
map_chunk(cm_source *base, cm_chunk *chunk)
{
    cm_chunk mapped = *chunk;
    mapped.is_unmapped = false;
    bool is_new = chunk->handle == 0;
    if (is_new) {
        CM_TRY(cm_rt_physical_create(base->rt, chunk->nbytes, base->config.device,
                                     ((const vmm_source *)base)->flags,
                                     &mapped.handle));
    }
    cm_status status = place(base, &mapped);
    if (cm_is_ok(status)) {
        *chunk = mapped;
    }
    else if (is_new) {
        (void)CM_TRY_TWICE(cm_rt_physical_release(base->rt, mapped.handle));
    }
    return status;
}

/* Unmap the memory from its old place before mapping it at the new one, so that it is
 * never mapped at two places at the same time. Once memory for RDMA has been mapped at
 * two places, it cannot be opened to devices that get a context later (driver 580). */
static cm_status
move_chunk(cm_source *base, cm_chunk *chunk, uint64_t offset)
{
    if (chunk->handle == 0) {
        return cm_fail(CM_EBUSY, chunk->address); /* closing it has failed half-way */
    }
    cm_chunk moved = *chunk;
    moved.address = base->base + offset;
    CM_TRY(cm_rt_address_unmap(base->rt, chunk->address, chunk->nbytes));
    cm_status status = place(base, &moved);
    if (cm_is_ok(status)) {
        *chunk = moved;
    }
    else if (!cm_is_ok(place(base, chunk))) {
        (void)CM_TRY_TWICE(cm_rt_physical_release(base->rt, chunk->handle));
        *chunk = (cm_chunk){.nbytes = chunk->nbytes};
    }
    return status;
}

static void
destroy(cm_source *base)
{
    /* If the driver refuses twice, only addresses are lost. */
    const vmm_source *source = (const vmm_source *)base;
    (void)CM_TRY_TWICE(
        cm_rt_address_free(base->rt, source->reserved, source->reserved_nbytes));
    free(base);
}

static const cm_source_ops vmm_ops = {
    .open_chunk = open_chunk,
    .close_chunk = close_chunk,
    .move_chunk = move_chunk,
    .unmap_chunk = unmap_chunk,
    .drop_chunk = drop_chunk,
    .map_chunk = map_chunk,
    .admit_peers = grant,
    .destroy = destroy,
};

static cm_status
find_peers(vmm_source *source)
{
    cm_runtime *rt = source->base.rt;
    int device = source->base.config.device;
    for (int i = 0; i < rt->device_count; i++) {
        int can = 0;
        if (i != device) {
            CM_TRY(cm_rt_peer_can_access(rt, i, device, &can));
        }
        source->base.peers |= can != 0 ? UINT64_C(1) << i : 0;
    }
    return cm_ok();
}

/* Reserve a range of addresses that is RANGE_FACTOR times as long as the device's
 * memory. If the driver refuses, halve the range and try again, until it is only as
 * long as the memory. */
static cm_status
reserve(vmm_source *source, uint64_t driver_granule)
{
    cm_source *base = &source->base;
    uint64_t free_nbytes, total_nbytes, nbytes;
    uint64_t slack = base->granule - driver_granule;
    CM_TRY(cm_rt_memory_info(base->rt, &free_nbytes, &total_nbytes));
    uint64_t least = total_nbytes & ~(base->granule - 1);
    base->most_nbytes = total_nbytes;
    if (least == 0) {
        /* The device has less than one granule. */
        return cm_fail(CM_ENOTSUP, total_nbytes);
    }
    cm_status status = cm_fail(CM_EOVERFLOW, least);
    for (uint64_t factor = RANGE_FACTOR; factor >= 1; factor /= 2) {
        if (cm_mul_u64(least, factor, &nbytes)
            && cm_add_u64(nbytes, slack, &source->reserved_nbytes)) {
            status = cm_rt_address_reserve(base->rt, source->reserved_nbytes,
                                           &source->reserved);
        }
        if (cm_is_ok(status)) {
            base->base = cm_round_up_to(source->reserved, base->granule);
            base->range_nbytes = nbytes;
            break;
        }
    }
    return status;
}

/* Ask the device what its memory can do, and reserve the addresses.
 * Fails: CM_ENOTSUP if the device cannot map memory on demand; as the calls that ask it
 *        and as reserve(). */
static cm_status
init(vmm_source *source)
{
    cm_source *base = &source->base;
    cm_runtime *rt = base->rt;
    int device = base->config.device;
    int has_vmm = 0;
    int has_rdma = 0;
    CM_TRY(cm_rt_device_attribute(rt, CM_ATTRIBUTE_virtual_memory_management, device,
                                  &has_vmm));
    if (has_vmm == 0) {
        return cm_fail(CM_ENOTSUP, (uint64_t)device);
    }
    CM_TRY(cm_rt_device_attribute(rt, CM_ATTRIBUTE_virtual_memory_rdma, device,
                                  &has_rdma));
    source->flags = has_rdma != 0 ? CM_PHYSICAL_RDMA : 0;
    uint64_t granule;
    CM_TRY(cm_rt_physical_granularity(rt, device, source->flags, &granule));
    if (!cm_is_power_of_two(granule)) {
        return cm_fail(CM_ENOTSUP, granule);
    }
    bool is_longer = base->config.granule_nbytes > granule;
    base->granule = is_longer ? base->config.granule_nbytes : granule;
    CM_TRY(find_peers(source));
    return reserve(source, granule);
}

cm_status
cm_source_vmm_open(cm_runtime *rt, const cm_pool_config *config, cm_source **out)
{
    if (!cm_kind_is_on_device(config->kind) || config->segments == CM_SEGMENTS_PLAIN) {
        return cm_fail(CM_ENOTSUP, (uint64_t)config->kind);
    }
    vmm_source *source = calloc(1, sizeof(*source));
    CM_TRY(cm_allocated(source != NULL, sizeof(*source)));
    source->base = (cm_source){
        .ops = &vmm_ops,
        .rt = rt,
        .config = *config,
        .is_placed = true,
    };
    cm_status status = init(source);
    if (!cm_is_ok(status)) {
        free(source);
        return status;
    }
    *out = &source->base;
    return status;
}
