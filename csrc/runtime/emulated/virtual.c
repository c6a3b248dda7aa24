/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory mapped on demand on the emulated device. A reserved range is two
 * mappings of the host's without access; physical memory is a piece of the store, put
 * into the second of them, so that neighbours are one run of bytes and one piece at two
 * places shows the same ones. */
#include "runtime/emulated/virtual.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"
#include "runtime/emulated/ranges.h"
#include "runtime/emulated/stream.h"

enum { PHYSICAL_FLAGS = CM_PHYSICAL_RDMA | CM_PHYSICAL_SHAREABLE };

static bool
is_granular(uint64_t n)
{
    return (n & (CM_EMULATED_GRANULARITY - 1)) == 0;
}

/* ---- what is mapped where -------------------------------------------------------- */

/* Index of the first mapping that ends after `offset`. */
static size_t
lower_bound(const cm_emulated_range *range, uint64_t offset)
{
    size_t low = 0;
    size_t high = range->mapping_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const cm_emulated_mapping *each = &range->mappings[middle];
        if (each->offset + each->nbytes <= offset) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

bool
cm_emulated_mappings_find(const cm_emulated_range *range, uint64_t offset,
                          uint64_t nbytes, size_t *first, size_t *end)
{
    size_t index = lower_bound(range, offset);
    uint64_t reached = offset;
    *first = index;
    do {
        if (index == range->mapping_count || range->mappings[index].is_leaving
            || range->mappings[index].offset > reached) {
            return false;
        }
        reached = range->mappings[index].offset + range->mappings[index].nbytes;
        index++;
    } while (reached < offset + nbytes);
    *end = index;
    return true;
}

bool
cm_emulated_mappings_pin(cm_emulated_range *range, uint64_t offset, uint64_t nbytes,
                         uint64_t stamp)
{
    size_t first, end;
    bool good = cm_emulated_mappings_find(range, offset, nbytes, &first, &end);
    for (size_t i = first; good && i < end; i++) {
        good = range->mappings[i].serial <= stamp;
    }
    for (size_t i = first; good && i < end; i++) {
        range->mappings[i].pins++;
    }
    return good;
}

bool
cm_emulated_mappings_unpin(cm_emulated_range *range, uint64_t offset, uint64_t nbytes)
{
    bool good = true;
    for (size_t i = lower_bound(range, offset);
         i < range->mapping_count && range->mappings[i].offset < offset + nbytes; i++) {
        range->mappings[i].pins--;
        good = good && !range->mappings[i].is_leaving;
    }
    return good;
}

/* The mappings under a span of addresses, if it covers them to their ends. */
static cm_emulated_range *
find_whole(const cm_emulated_memory *memory, cm_address address, uint64_t nbytes,
           size_t *first, size_t *end)
{
    cm_emulated_range *range =
        cm_emulated_range_find(memory, CM_EMULATED_VIRTUAL, address, nbytes);
    if (range == NULL
        || !cm_emulated_mappings_find(range, address - range->address, nbytes, first,
                                      end)) {
        return NULL;
    }
    uint64_t offset = address - range->address;
    const cm_emulated_mapping *last = &range->mappings[*end - 1];
    return range->mappings[*first].offset == offset
                   && last->offset + last->nbytes == offset + nbytes
               ? range
               : NULL;
}

/* As on a real device none of these calls makes or needs a context. What stands before
 * each: a device at all, and no capture that forbids it. */
static int32_t
enter(cm_runtime *rt, cm_emulated_memory **memory)
{
    cm_emulated_thread *self;
    if (rt->device_count == 0) {
        return CM_CUDA_NO_DEVICE;
    }
    CM_TRY_CODE(cm_emulated_self(rt, &self));
    *memory = &cm_emulated_of(rt)->memory;
    return cm_emulated_is_forbidden(cm_emulated_of(rt), self)
               ? CM_CUDA_CAPTURE_UNSUPPORTED
               : 0;
}

/* ---- memory without an address --------------------------------------------------- */

/* Pieces of the store, counted against the device's size from the handle's making until
 * neither it nor a place is left. */

static void
count(cm_emulated_memory *memory, const cm_emulated_physical *physical, bool on)
{
    uint64_t nbytes = on ? physical->nbytes : 0 - physical->nbytes;
    memory->used_nbytes[physical->device] += nbytes;
    memory->live_nbytes += nbytes;
    memory->physical_count += on ? 1 : UINT64_MAX;
}

/* Free it if neither a handle nor a place is left. */
static void
settle(cm_emulated_memory *memory, cm_emulated_physical *physical)
{
    if (physical->is_released && physical->places == 0) {
        cm_emulated_store_drop(&memory->store, physical->offset, physical->nbytes);
        count(memory, physical, false);
        free(physical);
    }
}

int32_t
cm_emulated_op_physical_granularity(cm_runtime *rt, int device, unsigned flags,
                                    uint64_t *out)
{
    if (rt->device_count == 0) {
        return CM_CUDA_NO_DEVICE;
    }
    if (!cm_emulated_is_device(rt, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    if ((flags & ~(unsigned)PHYSICAL_FLAGS) != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    *out = CM_EMULATED_GRANULARITY;
    return 0;
}

static int32_t
create(cm_emulated *emulated, cm_emulated_physical *physical, uint64_t *out)
{
    cm_emulated_memory *memory = &emulated->memory;
    uint64_t nbytes = physical->nbytes;
    uint64_t left =
        emulated->config.memory_nbytes - memory->used_nbytes[physical->device];
    if (nbytes > left
        || !cm_emulated_store_grow(&memory->store, nbytes, &physical->offset)) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    uint64_t handle = 0x50000000 + 8 * memory->next_physical;
    if (!cm_emulated_store_poison(&memory->store, physical->offset, nbytes)
        || !cm_emulated_handles_add(&memory->physicals, handle, physical)) {
        cm_emulated_store_drop(&memory->store, physical->offset, nbytes);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    memory->next_physical++;
    count(memory, physical, true);
    *out = handle;
    return 0;
}

int32_t
cm_emulated_op_physical_create(cm_runtime *rt, uint64_t nbytes, int device,
                               unsigned flags, uint64_t *out)
{
    cm_emulated_memory *memory;
    CM_TRY_CODE(enter(rt, &memory));
    if (!cm_emulated_is_device(rt, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    CM_TRY_CODE(cm_emulated_of(rt)->streams.faults[device]);
    if ((flags & ~(unsigned)PHYSICAL_FLAGS) != 0 || nbytes == 0
        || !is_granular(nbytes)) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_physical *physical = calloc(1, sizeof(*physical));
    if (physical == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    physical->device = device;
    physical->nbytes = nbytes;
    int32_t code = create(cm_emulated_of(rt), physical, out);
    if (code != 0) {
        free(physical);
    }
    return code;
}

int32_t
cm_emulated_op_physical_release(cm_runtime *rt, uint64_t handle)
{
    cm_emulated_memory *memory;
    CM_TRY_CODE(enter(rt, &memory));
    cm_emulated_physical *physical =
        cm_emulated_handles_remove(&memory->physicals, handle);
    if (physical == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    physical->is_released = true;
    settle(memory, physical);
    return 0;
}

/* ---- ranges of addresses --------------------------------------------------------- */

int32_t
cm_emulated_op_address_reserve(cm_runtime *rt, uint64_t nbytes, cm_address *out)
{
    cm_emulated_memory *memory;
    CM_TRY_CODE(enter(rt, &memory));
    uint64_t with_slack;
    if (nbytes == 0 || !is_granular(nbytes)) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_range *range = calloc(1, sizeof(*range));
    if (range == NULL || !cm_add_u64(nbytes, CM_EMULATED_GRANULARITY, &with_slack)) {
        free(range);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    range->kind = CM_EMULATED_VIRTUAL;
    range->device = -1;
    range->nbytes = nbytes;
    bool good = cm_emulated_pages_map(with_slack, false, &range->user)
                && cm_emulated_pages_map(nbytes, false, &range->alias);
    range->bytes = range->alias.start;
    range->address =
        ((uint64_t)(uintptr_t)range->user.start + CM_EMULATED_GRANULARITY - 1)
        & ~(CM_EMULATED_GRANULARITY - 1);
    if (!good || !cm_emulated_range_insert(cm_emulated_of(rt), range)) {
        cm_emulated_range_free(range);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *out = range->address;
    return 0;
}

int32_t
cm_emulated_op_address_free(cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    cm_emulated_memory *memory;
    CM_TRY_CODE(enter(rt, &memory));
    cm_emulated_range *range =
        cm_emulated_range_find(memory, CM_EMULATED_VIRTUAL, address, nbytes);
    if (range == NULL || range->address != address || range->nbytes != nbytes
        || range->mapping_count != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_range_retire(cm_emulated_of(rt), range);
    return 0;
}

/* ---- the one put at the other ---------------------------------------------------- */

static bool
mappings_reserve(cm_emulated_range *range)
{
    if (range->mapping_count < range->mapping_capacity) {
        return true;
    }
    size_t capacity = 2 * range->mapping_capacity + 16;
    cm_emulated_mapping *mappings =
        realloc(range->mappings, capacity * sizeof(*mappings));
    if (mappings == NULL) {
        return false;
    }
    range->mappings = mappings;
    range->mapping_capacity = capacity;
    return true;
}

int32_t
cm_emulated_op_address_map(cm_runtime *rt, cm_address address, uint64_t nbytes,
                           uint64_t handle)
{
    cm_emulated_memory *memory;
    CM_TRY_CODE(enter(rt, &memory));
    cm_emulated_physical *physical =
        cm_emulated_handles_find(&memory->physicals, handle);
    cm_emulated_range *range =
        cm_emulated_range_find(memory, CM_EMULATED_VIRTUAL, address, nbytes);
    if (physical == NULL || range == NULL || !is_granular(address)
        || !is_granular(nbytes)) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (nbytes != physical->nbytes) {
        return CM_CUDA_NOT_SUPPORTED; /* part of a handle, as on a real device */
    }
    uint64_t offset = address - range->address;
    size_t index = lower_bound(range, offset);
    if (index < range->mapping_count
        && range->mappings[index].offset < offset + nbytes) {
        return CM_CUDA_INVALID_VALUE; /* something is there */
    }
    if (!mappings_reserve(range)
        || !cm_emulated_store_map(&memory->store, physical->offset, nbytes,
                                  range->bytes + offset)) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    memmove(&range->mappings[index + 1], &range->mappings[index],
            (range->mapping_count - index) * sizeof(range->mappings[0]));
    range->mappings[index] = (cm_emulated_mapping){
        .offset = offset,
        .nbytes = nbytes,
        .physical = physical,
        .serial = ++memory->serial,
    };
    range->mapping_count++;
    memory->mapping_count++;
    physical->places++;
    return 0;
}

/* Unmap the mappings [first, end) once no work is there, which fails for it. */
static void
unmap(cm_emulated *emulated, cm_emulated_range *range, size_t first, size_t end)
{
    cm_emulated_memory *memory = &emulated->memory;
    uint64_t stop = range->mappings[end - 1].offset + range->mappings[end - 1].nbytes;
    uint64_t offset = range->mappings[first].offset;
    for (size_t i = first; i < end; i++) {
        range->mappings[i].is_leaving = true;
    }
    size_t i = first;
    while (i < range->mapping_count && range->mappings[i].offset < stop) {
        const cm_emulated_mapping gone = range->mappings[i];
        if (!gone.is_leaving) {
            i++; /* came while we waited */
            continue;
        }
        if (gone.pins != 0) {
            cm_cond_wait(&emulated->changed, &emulated->lock);
            i = lower_bound(range, offset);
            continue;
        }
        cm_emulated_store_unmap(range->bytes + gone.offset, gone.nbytes);
        range->mapping_count--;
        memmove(&range->mappings[i], &range->mappings[i + 1],
                (range->mapping_count - i) * sizeof(range->mappings[0]));
        memory->mapping_count--;
        gone.physical->places--;
        gone.physical->is_closed = gone.physical->places > 0;
        settle(memory, gone.physical);
    }
}

int32_t
cm_emulated_op_address_unmap(cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    cm_emulated_memory *memory;
    size_t first, end;
    CM_TRY_CODE(enter(rt, &memory));
    cm_emulated_range *range = find_whole(memory, address, nbytes, &first, &end);
    if (range == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    unmap(cm_emulated_of(rt), range, first, end);
    return 0;
}

int32_t
cm_emulated_op_address_set_access(cm_runtime *rt, cm_address address, uint64_t nbytes,
                                  const int *devices, int device_count)
{
    cm_emulated_memory *memory;
    CM_TRY_CODE(enter(rt, &memory));
    if (devices == NULL || device_count <= 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    uint64_t mask = 0;
    for (int i = 0; i < device_count; i++) {
        if (!cm_emulated_is_device(rt, devices[i])) {
            return CM_CUDA_INVALID_DEVICE;
        }
        mask |= UINT64_C(1) << devices[i];
    }
    size_t first, end;
    cm_emulated_range *range = find_whole(memory, address, nbytes, &first, &end);
    if (range == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (!cm_emulated_store_show(range->bytes + (address - range->address), nbytes)) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    for (size_t i = first; i < end; i++) {
        cm_emulated_mapping *mapping = &range->mappings[i];
        bool adds = mapping->access != 0 && (mask & ~mapping->access) != 0;
        if (adds && mapping->physical->is_closed) {
            return CM_CUDA_INVALID_VALUE;
        }
        mapping->access |= mask;
    }
    return 0;
}

/* ---- the end of a device and of everything --------------------------------------- */

/* Unmap one mapping of the device in any range; false: there is none. */
static bool
unmap_one(cm_emulated *emulated, int device)
{
    const cm_emulated_memory *memory = &emulated->memory;
    for (size_t i = 0; i < memory->span_count; i++) {
        cm_emulated_range *range = memory->spans[i].range;
        for (size_t k = 0; k < range->mapping_count; k++) {
            if (range->mappings[k].physical->device == device
                && !range->mappings[k].is_leaving) {
                unmap(emulated, range, k, k + 1);
                return true;
            }
        }
    }
    return false;
}

void
cm_emulated_virtual_reset(cm_emulated *emulated, int device)
{
    cm_emulated_memory *memory = &emulated->memory;
    while (unmap_one(emulated, device)) {
    }
    size_t kept = 0;
    for (size_t i = 0; i < memory->physicals.count; i++) {
        cm_emulated_physical *physical = memory->physicals.items[i].object;
        if (physical->device == device) {
            physical->is_released = true;
            settle(memory, physical);
        }
        else {
            memory->physicals.items[kept++] = memory->physicals.items[i];
        }
    }
    memory->physicals.count = kept;
}

void
cm_emulated_virtual_fini(cm_emulated *emulated)
{
    for (int device = 0; device < emulated->base.device_count; device++) {
        cm_emulated_virtual_reset(emulated, device);
    }
    cm_emulated_handles_fini(&emulated->memory.physicals);
    cm_emulated_store_close(&emulated->memory.store);
}
