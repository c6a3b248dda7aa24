/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory mapped on demand on the emulated device. A reserved range is two
 * mappings of the host's without access; physical memory is a piece of the store, put
 * into the second of them, so that neighbours are one run of bytes and one piece at two
 * places shows the same ones. */
#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"
#include "runtime/emulated_ranges.h"

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

/* The mappings [*first, *end) under [offset, offset + nbytes); false when there is a
 * hole. */
static bool
find_run(const cm_emulated_range *range, uint64_t offset, uint64_t nbytes,
         size_t *first, size_t *end)
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

/* The same for mappings that are covered to their ends. */
static cm_emulated_range *
find_whole_locked(cm_emulated_memory *memory, cm_address address, uint64_t nbytes,
                  size_t *first, size_t *end)
{
    const cm_emulated_span *span = cm_emulated_ranges_find_locked(memory, address);
    if (nbytes == 0 || span == NULL || span->range->kind != CM_EMULATED_VIRTUAL
        || nbytes > span->end - address) {
        return NULL;
    }
    cm_emulated_range *range = span->range;
    uint64_t offset = address - span->start;
    if (!find_run(range, offset, nbytes, first, end)) {
        return NULL;
    }
    const cm_emulated_mapping *last = &range->mappings[*end - 1];
    return range->mappings[*first].offset == offset
                   && last->offset + last->nbytes == offset + nbytes
               ? range
               : NULL;
}

bool
cm_emulated_virtual_place_locked(const cm_emulated_range *range, uint64_t offset,
                                 uint64_t nbytes, cm_emulated_place *out)
{
    size_t first, end;
    if (!find_run(range, offset, nbytes, &first, &end)) {
        return false;
    }
    out->kind = CM_EMULATED_DEVICE;
    out->device = range->mappings[first].physical->device;
    for (size_t i = first; i < end; i++) {
        out->access &= range->mappings[i].access;
    }
    return true;
}

bool
cm_emulated_virtual_pin_locked(const cm_emulated_pin *pin, uint64_t stamp)
{
    cm_emulated_range *range = pin->range;
    size_t first, end;
    bool good = find_run(range, pin->offset, pin->nbytes, &first, &end);
    for (size_t i = first; good && i < end; i++) {
        good = range->mappings[i].serial <= stamp;
    }
    for (size_t i = first; good && i < end; i++) {
        range->mappings[i].pins++;
    }
    return good;
}

bool
cm_emulated_virtual_unpin_locked(const cm_emulated_pin *pin, bool *idle)
{
    cm_emulated_range *range = pin->range;
    bool good = true;
    *idle = false;
    for (size_t i = lower_bound(range, pin->offset);
         i < range->mapping_count
         && range->mappings[i].offset < pin->offset + pin->nbytes;
         i++) {
        range->mappings[i].pins--;
        *idle = *idle || range->mappings[i].pins == 0;
        good = good && !range->mappings[i].is_leaving;
    }
    return good;
}

/* ---- ranges of addresses --------------------------------------------------------- */

int32_t
cm_emulated_memory_reserve(cm_emulated_memory *memory, uint64_t nbytes, cm_address *out)
{
    uint64_t with_slack;
    if (nbytes == 0 || !cm_emulated_is_granular(nbytes)) {
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
    if (good) {
        range->bytes = range->alias.start;
        range->address =
            ((uint64_t)(uintptr_t)range->user.start + CM_EMULATED_GRANULARITY - 1)
            & ~(CM_EMULATED_GRANULARITY - 1);
        cm_mutex_lock(&memory->lock);
        cm_emulated_ranges_drop_stale_locked(memory, range);
        good = cm_emulated_ranges_insert_locked(memory, range);
        memory->counts[CM_EMULATED_VIRTUAL] += good;
        *out = good ? range->address : *out;
        cm_mutex_unlock(&memory->lock);
    }
    if (!good) {
        cm_emulated_pages_unmap(&range->user);
        cm_emulated_pages_unmap(&range->alias);
        free(range);
    }
    return good ? 0 : CM_CUDA_OUT_OF_MEMORY;
}

int32_t
cm_emulated_memory_unreserve(cm_emulated_memory *memory, cm_address address,
                             uint64_t nbytes)
{
    cm_mutex_lock(&memory->lock);
    const cm_emulated_span *span = cm_emulated_ranges_find_locked(memory, address);
    bool good = span != NULL && span->range->kind == CM_EMULATED_VIRTUAL
                && span->start == address && span->end - span->start == nbytes
                && span->range->mapping_count == 0;
    if (good) {
        cm_emulated_ranges_retire_locked(memory, span->range);
    }
    cm_mutex_unlock(&memory->lock);
    return good ? 0 : CM_CUDA_INVALID_VALUE;
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

static int32_t
map_locked(cm_emulated_memory *memory, cm_emulated_range *range, uint64_t offset,
           cm_emulated_physical *physical)
{
    uint64_t nbytes = physical->nbytes;
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

int32_t
cm_emulated_memory_map(cm_emulated_memory *memory, cm_address address, uint64_t nbytes,
                       uint64_t handle)
{
    int32_t code = CM_CUDA_INVALID_VALUE;
    cm_mutex_lock(&memory->lock);
    cm_emulated_physical *physical =
        cm_emulated_handles_find(&memory->physicals, handle);
    const cm_emulated_span *span = cm_emulated_ranges_find_locked(memory, address);
    if (physical != NULL && nbytes != 0 && cm_emulated_is_granular(address)
        && cm_emulated_is_granular(nbytes) && span != NULL
        && span->range->kind == CM_EMULATED_VIRTUAL && nbytes <= span->end - address) {
        code = nbytes != physical->nbytes /* part of a handle, as on a real device */
                   ? CM_CUDA_NOT_SUPPORTED
                   : map_locked(memory, span->range, address - span->start, physical);
    }
    cm_mutex_unlock(&memory->lock);
    return code;
}

/* Take out what is leaving under [offset, offset + nbytes), once no work is there. */
static void
leave_locked(cm_emulated_memory *memory, cm_emulated_range *range, uint64_t offset,
             uint64_t nbytes)
{
    size_t i = lower_bound(range, offset);
    while (i < range->mapping_count && range->mappings[i].offset < offset + nbytes) {
        const cm_emulated_mapping gone = range->mappings[i];
        if (!gone.is_leaving) {
            i++; /* came while we waited */
            continue;
        }
        if (gone.pins != 0) {
            cm_cond_wait(&memory->unpinned, &memory->lock);
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
        cm_emulated_physical_settle_locked(memory, gone.physical);
    }
}

int32_t
cm_emulated_memory_unmap(cm_emulated_memory *memory, cm_address address,
                         uint64_t nbytes)
{
    size_t first = 0;
    size_t end = 0;
    cm_mutex_lock(&memory->lock);
    cm_emulated_range *range = find_whole_locked(memory, address, nbytes, &first, &end);
    if (range != NULL) {
        for (size_t i = first; i < end; i++) {
            range->mappings[i].is_leaving = true;
        }
        leave_locked(memory, range, address - range->address, nbytes);
    }
    cm_mutex_unlock(&memory->lock);
    return range != NULL ? 0 : CM_CUDA_INVALID_VALUE;
}

int32_t
cm_emulated_memory_set_access(cm_emulated_memory *memory, cm_address address,
                              uint64_t nbytes, uint64_t devices)
{
    int32_t code = 0;
    size_t first = 0;
    size_t end = 0;
    cm_mutex_lock(&memory->lock);
    cm_emulated_range *range = find_whole_locked(memory, address, nbytes, &first, &end);
    if (range == NULL) {
        code = CM_CUDA_INVALID_VALUE;
    }
    else if (!cm_emulated_store_show(range->bytes + (address - range->address),
                                     nbytes)) {
        code = CM_CUDA_OUT_OF_MEMORY;
    }
    for (size_t i = first; code == 0 && i < end; i++) {
        cm_emulated_mapping *mapping = &range->mappings[i];
        bool adds = mapping->access != 0 && (devices & ~mapping->access) != 0;
        code = adds && mapping->physical->is_closed ? CM_CUDA_INVALID_VALUE : 0;
        mapping->access |= code == 0 ? devices : 0;
    }
    cm_mutex_unlock(&memory->lock);
    return code;
}

/* ---- the end of a device and of everything --------------------------------------- */

/* A mapping of the device in any range, not leaving yet. */
static const cm_emulated_mapping *
find_mapping_of_locked(const cm_emulated_memory *memory, int device,
                       cm_emulated_range **out)
{
    for (size_t i = 0; i < memory->span_count; i++) {
        cm_emulated_range *range = memory->spans[i].range;
        for (size_t k = 0; k < range->mapping_count; k++) {
            if (range->mappings[k].physical->device == device
                && !range->mappings[k].is_leaving) {
                *out = range;
                return &range->mappings[k];
            }
        }
    }
    return NULL;
}

void
cm_emulated_virtual_reset_locked(cm_emulated_memory *memory, int device)
{
    cm_emulated_range *range;
    const cm_emulated_mapping *each;
    while ((each = find_mapping_of_locked(memory, device, &range)) != NULL) {
        uint64_t offset = each->offset;
        range->mappings[each - range->mappings].is_leaving = true;
        leave_locked(memory, range, offset, each->nbytes);
    }
    cm_emulated_physical_reset_locked(memory, device);
}

void
cm_emulated_virtual_fini(cm_emulated_memory *memory)
{
    for (int device = 0; device < memory->device_count; device++) {
        cm_emulated_virtual_reset_locked(memory, device);
    }
    cm_emulated_handles_fini(&memory->physicals);
    cm_emulated_store_close(&memory->store);
}
