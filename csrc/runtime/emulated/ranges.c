/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/emulated/ranges.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"

/* Dead addresses kept taken at most; there are only so many under ThreadSanitizer. */
#define FREED_NBYTES (UINT64_C(64) << 30)

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

static void
drop_stale(cm_emulated *emulated, const cm_emulated_pages *fresh)
{
    cm_emulated_memory *memory = &emulated->memory;
    uint64_t start = (uint64_t)(uintptr_t)fresh->base;
    for (size_t i = 0; fresh->base != NULL && i < memory->span_count;) {
        const cm_emulated_span *span = &memory->spans[i++];
        if (span->range->kind == CM_EMULATED_REGISTERED
            && span->start < start + fresh->nbytes && span->end > start) {
            cm_emulated_range_retire(emulated, span->range);
            i = 0; /* waiting for pins lets others change the table */
        }
    }
}

bool
cm_emulated_range_insert(cm_emulated *emulated, cm_emulated_range *range)
{
    cm_emulated_memory *memory = &emulated->memory;
    drop_stale(emulated, &range->user);
    drop_stale(emulated, &range->alias);
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
        insert_span(memory,
                    (cm_emulated_span){host, host + range->nbytes, range, true, same});
    }
    if (!same) {
        insert_span(memory,
                    (cm_emulated_span){range->address, range->address + range->nbytes,
                                       range, range->host == NULL, true});
    }
    memory->counts[range->kind]++;
    return true;
}

static void
free_tables(cm_emulated_range *range)
{
    free(range->mappings);
    free(range->resident);
    free(range->wished);
}

void
cm_emulated_range_free(cm_emulated_range *range)
{
    cm_emulated_pages_unmap(&range->user);
    cm_emulated_pages_unmap(&range->alias);
    free_tables(range);
    free(range);
}

void
cm_emulated_ranges_fini(cm_emulated_memory *memory)
{
    for (size_t i = 0; i < memory->span_count; i++) {
        cm_emulated_range *range = memory->spans[i].range;
        if (memory->spans[i].is_first) {
            cm_emulated_range_free(range);
        }
    }
    for (int i = 0; i < CM_EMULATED_FREED_COUNT; i++) {
        cm_emulated_pages_unmap(&memory->freed[i]);
    }
    free(memory->spans);
}

const cm_emulated_span *
cm_emulated_span_find(const cm_emulated_memory *memory, uint64_t address)
{
    size_t index = lower_bound(memory, address);
    if (index == memory->span_count || memory->spans[index].start > address) {
        return NULL;
    }
    return &memory->spans[index];
}

cm_emulated_range *
cm_emulated_range_find(const cm_emulated_memory *memory, cm_emulated_kind kind,
                       uint64_t address, uint64_t nbytes)
{
    const cm_emulated_span *span = cm_emulated_span_find(memory, address);
    return nbytes != 0 && span != NULL && span->range->kind == kind
                   && nbytes <= span->end - address
               ? span->range
               : NULL;
}

/* True when [address, address + nbytes) touches memory that was freed. */
static bool
is_freed(const cm_emulated_memory *memory, uint64_t address, uint64_t nbytes)
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

bool
cm_emulated_ranges_touch(const cm_emulated_memory *memory, uint64_t address,
                         uint64_t nbytes, bool or_freed)
{
    size_t index = lower_bound(memory, address);
    return (index < memory->span_count
            && (memory->spans[index].start <= address
                || memory->spans[index].start - address < nbytes))
           || (or_freed && is_freed(memory, address, nbytes));
}

void
cm_emulated_range_refund(cm_emulated_memory *memory, const cm_emulated_range *range)
{
    if (range->kind == CM_EMULATED_DEVICE) {
        memory->used_nbytes[range->device] -= range->budget_nbytes;
    }
    else {
        memory->host_used_nbytes -= range->budget_nbytes;
    }
}

static void
give_up(cm_emulated_memory *memory, unsigned index)
{
    cm_emulated_pages *slot = &memory->freed[index];
    cm_emulated_pages_unmap(slot);
    memory->freed_nbytes -= slot->nbytes;
    *slot = (cm_emulated_pages){.base = NULL};
}

/* Keep the dead addresses taken for a while; the oldest are given up. */
static void
defer(cm_emulated_memory *memory, const cm_emulated_pages *pages)
{
    if (pages->base == NULL) {
        return;
    }
    cm_emulated_pages_kill(pages);
    unsigned next = (memory->freed_index + 1) % CM_EMULATED_FREED_COUNT;
    give_up(memory, memory->freed_index);
    memory->freed[memory->freed_index] = *pages;
    memory->freed_index = next;
    memory->freed_nbytes += pages->nbytes;
    for (unsigned i = 0;
         memory->freed_nbytes > FREED_NBYTES && i < CM_EMULATED_FREED_COUNT - 1; i++) {
        give_up(memory, (next + i) % CM_EMULATED_FREED_COUNT);
    }
}

void
cm_emulated_range_retire(cm_emulated *emulated, cm_emulated_range *range)
{
    cm_emulated_memory *memory = &emulated->memory;
    size_t kept = 0;
    for (size_t i = 0; i < memory->span_count; i++) {
        if (memory->spans[i].range != range) {
            memory->spans[kept++] = memory->spans[i];
        }
    }
    memory->span_count = kept;
    while (range->pins != 0) {
        cm_cond_wait(&emulated->changed, &emulated->lock);
    }
    memory->counts[range->kind]--;
    if (range->kind < CM_EMULATED_REGISTERED) {
        memory->live_nbytes -= range->nbytes;
        cm_emulated_range_refund(memory, range);
    }
    defer(memory, &range->alias);
    defer(memory, &range->user);
    free_tables(range);
    range->is_gone = true;
    if (range->waiting == 0) {
        free(range);
    }
}
