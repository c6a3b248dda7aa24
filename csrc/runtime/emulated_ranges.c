/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/emulated_ranges.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"

/* Index of the first span that ends after `address`. */
static size_t
lower_bound(const cm_emulated_memory *memory, uint64_t address)
{
    size_t low = 0;
    size_t high = memory->span_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (memory->spans[middle].end <= address) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

static void
insert_span(cm_emulated_memory *memory, cm_emulated_span span)
{
    size_t index = lower_bound(memory, span.start);
    memmove(&memory->spans[index + 1], &memory->spans[index],
            (memory->span_count - index) * sizeof(span));
    memory->spans[index] = span;
    memory->span_count++;
}

bool
cm_emulated_ranges_insert_locked(cm_emulated_memory *memory, cm_emulated_range *range)
{
    if (memory->span_capacity - memory->span_count < 2) {
        size_t capacity = 2 * memory->span_capacity + 16;
        cm_emulated_span *spans = realloc(memory->spans, capacity * sizeof(*spans));
        if (spans == NULL) {
            return false;
        }
        memory->spans = spans;
        memory->span_capacity = capacity;
    }
    uint64_t host = (uint64_t)(uintptr_t)range->host;
    bool same = host == range->address;
    if (range->host != NULL) {
        insert_span(memory, (cm_emulated_span){host, host + range->nbytes, range, true,
                                               same, true});
    }
    if (!same) {
        insert_span(memory,
                    (cm_emulated_span){range->address, range->address + range->nbytes,
                                       range, range->host == NULL, true, false});
    }
    return true;
}

void
cm_emulated_ranges_remove_locked(cm_emulated_memory *memory,
                                 const cm_emulated_range *range)
{
    size_t kept = 0;
    for (size_t i = 0; i < memory->span_count; i++) {
        if (memory->spans[i].range != range) {
            memory->spans[kept++] = memory->spans[i];
        }
    }
    memory->span_count = kept;
}

cm_emulated_span *
cm_emulated_ranges_find_locked(cm_emulated_memory *memory, uint64_t address)
{
    size_t index = lower_bound(memory, address);
    if (index == memory->span_count || memory->spans[index].start > address) {
        return NULL;
    }
    return &memory->spans[index];
}

bool
cm_emulated_ranges_touch_locked(cm_emulated_memory *memory, uint64_t address,
                                uint64_t nbytes)
{
    size_t index = lower_bound(memory, address);
    return index < memory->span_count
           && (memory->spans[index].start <= address
               || memory->spans[index].start - address < nbytes);
}

void
cm_emulated_ranges_place(const cm_emulated_range *range, uint64_t offset,
                         bool by_device, cm_emulated_place *out)
{
    *out = (cm_emulated_place){
        .kind = range->kind,
        .device = range->device,
        .flags = range->flags,
        .access = UINT64_MAX,
        .address = range->address + offset,
        .host = range->host != NULL ? range->host + offset : NULL,
        .bytes = range->bytes + offset,
        .by_device = by_device,
    };
}

/* True when [address, address + nbytes) touches memory that was freed. */
static bool
is_freed_locked(const cm_emulated_memory *memory, uint64_t address, uint64_t nbytes)
{
    for (int i = 0; i < CM_EMULATED_FREED_COUNT; i++) {
        const cm_emulated_pages *pages = &memory->freed[i];
        uint64_t base = (uint64_t)(uintptr_t)pages->base;
        if (base != 0 && address < base + pages->nbytes
            && (address >= base || base - address < nbytes)) {
            return true;
        }
    }
    return false;
}

/* Where [address, address + nbytes) lies, and *out (with its span) when inside. */
static cm_emulated_reach
reach_locked(cm_emulated_memory *memory, uint64_t address, uint64_t nbytes,
             cm_emulated_span **span, cm_emulated_place *out)
{
    uint64_t end;
    if (address == 0 || !cm_add_u64(address, nbytes, &end)) {
        return CM_EMULATED_BROKEN;
    }
    *span = cm_emulated_ranges_find_locked(memory, address);
    if (*span == NULL) {
        return cm_emulated_ranges_touch_locked(memory, address, nbytes)
                       || is_freed_locked(memory, address, nbytes)
                   ? CM_EMULATED_BROKEN
                   : CM_EMULATED_UNKNOWN;
    }
    if (nbytes > (*span)->end - address) {
        return CM_EMULATED_BROKEN;
    }
    const cm_emulated_range *range = (*span)->range;
    uint64_t offset = address - (*span)->start;
    cm_emulated_ranges_place(range, offset, (*span)->by_device, out);
    if (range->kind == CM_EMULATED_DEVICE) {
        out->access = memory->guests[range->device] | UINT64_C(1) << range->device;
    }
    if (range->kind == CM_EMULATED_VIRTUAL) {
        out->is_mapped = true;
        if (!cm_emulated_virtual_place_locked(range, offset, nbytes, out)) {
            return CM_EMULATED_BROKEN;
        }
    }
    return CM_EMULATED_INSIDE;
}

cm_emulated_reach
cm_emulated_memory_find(cm_emulated_memory *memory, uint64_t address, uint64_t nbytes,
                        cm_emulated_place *out)
{
    cm_emulated_span *span;
    cm_mutex_lock(&memory->lock);
    cm_emulated_reach reach = reach_locked(memory, address, nbytes, &span, out);
    cm_mutex_unlock(&memory->lock);
    return reach;
}

uint64_t
cm_emulated_memory_stamp(cm_emulated_memory *memory)
{
    cm_mutex_lock(&memory->lock);
    uint64_t stamp = memory->serial;
    cm_mutex_unlock(&memory->lock);
    return stamp;
}

static bool
may_touch(const cm_emulated_place *place, int device)
{
    if (device == CM_EMULATED_ANY) {
        return place->access != 0;
    }
    return place->by_device && (place->access >> device & 1) != 0;
}

int32_t
cm_emulated_memory_pin(cm_emulated_memory *memory, uint64_t address, uint64_t nbytes,
                       int device, uint64_t stamp, cm_emulated_place *out,
                       cm_emulated_pin *pin)
{
    cm_emulated_span *span;
    cm_mutex_lock(&memory->lock);
    bool good = reach_locked(memory, address, nbytes, &span, out) == CM_EMULATED_INSIDE
                && may_touch(out, device);
    if (good) {
        cm_emulated_range *range = span->range;
        *pin = (cm_emulated_pin){range, address - span->start, nbytes};
        if (range->kind == CM_EMULATED_VIRTUAL) {
            good = cm_emulated_virtual_pin_locked(pin, stamp);
        }
        else {
            range->pins++;
        }
    }
    if (!good) {
        *pin = (cm_emulated_pin){.range = NULL};
    }
    cm_mutex_unlock(&memory->lock);
    return good ? 0 : CM_CUDA_ILLEGAL_ADDRESS;
}

int32_t
cm_emulated_memory_unpin(cm_emulated_memory *memory, const cm_emulated_pin *pin)
{
    if (pin->range == NULL) {
        return 0;
    }
    bool good = true;
    bool idle;
    cm_mutex_lock(&memory->lock);
    if (pin->range->kind == CM_EMULATED_VIRTUAL) {
        good = cm_emulated_virtual_unpin_locked(pin, &idle);
    }
    else {
        idle = --pin->range->pins == 0;
    }
    if (idle) {
        cm_cond_signal_all(&memory->unpinned);
    }
    cm_mutex_unlock(&memory->lock);
    return good ? 0 : CM_CUDA_ILLEGAL_ADDRESS;
}
