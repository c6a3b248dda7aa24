/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/emulated_memory.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"
#include "base/thread.h"
#include "runtime/emulated_ranges.h"

/* Host and managed memory together may be this many times one device's memory. */
enum { HOST_FACTOR = 4 };

/* Dead addresses kept taken at most; there are only so many under ThreadSanitizer. */
#define FREED_NBYTES (UINT64_C(64) << 30)

cm_status
cm_emulated_memory_create(int device_count, uint64_t memory_nbytes,
                          cm_emulated_memory **out)
{
    cm_emulated_memory *memory = calloc(1, sizeof(*memory));
    if (memory == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*memory));
    }
    memory->store.fd = -1;
    memory->device_count = device_count;
    memory->limit_nbytes = memory_nbytes;
    if (!cm_mul_u64(memory_nbytes, HOST_FACTOR, &memory->host_limit_nbytes)) {
        memory->host_limit_nbytes = UINT64_MAX;
    }
    cm_status status = cm_mutex_init(&memory->lock);
    if (!cm_is_ok(status)) {
        free(memory);
        return status;
    }
    status = cm_cond_init(&memory->unpinned);
    if (!cm_is_ok(status)) {
        cm_mutex_fini(&memory->lock);
        free(memory);
        return status;
    }
    *out = memory;
    return cm_ok();
}

static void
range_free(cm_emulated_range *range)
{
    cm_emulated_pages_unmap(&range->user);
    cm_emulated_pages_unmap(&range->alias);
    free(range->mappings);
    free(range->resident);
    free(range->wished);
    free(range);
}

void
cm_emulated_memory_destroy(cm_emulated_memory *memory)
{
    cm_emulated_virtual_fini(memory);
    for (size_t i = 0; i < memory->span_count; i++) {
        cm_emulated_range *range = memory->spans[i].range;
        if (memory->spans[i].is_first) {
            range_free(range);
        }
    }
    for (int i = 0; i < CM_EMULATED_FREED_COUNT; i++) {
        cm_emulated_pages_unmap(&memory->freed[i]);
    }
    free(memory->spans);
    cm_cond_fini(&memory->unpinned);
    cm_mutex_fini(&memory->lock);
    free(memory);
}

/* Take `nbytes` from the budget that the kind draws on. */
static bool
budget_take_locked(cm_emulated_memory *memory, cm_emulated_kind kind, int device,
                   uint64_t nbytes)
{
    bool on_device = kind == CM_EMULATED_DEVICE;
    uint64_t *used =
        on_device ? &memory->used_nbytes[device] : &memory->host_used_nbytes;
    uint64_t limit = on_device ? memory->limit_nbytes : memory->host_limit_nbytes;
    if (nbytes > limit - *used) {
        return false;
    }
    *used += nbytes;
    return true;
}

static void
budget_give_locked(cm_emulated_memory *memory, const cm_emulated_range *range)
{
    if (range->kind == CM_EMULATED_DEVICE) {
        memory->used_nbytes[range->device] -= range->budget_nbytes;
    }
    else {
        memory->host_used_nbytes -= range->budget_nbytes;
    }
}

/* Where the pages of a managed range are, by page of its mapping. */
static bool
range_init_pages(cm_emulated_range *range)
{
    range->page_count = range->alias.nbytes / cm_emulated_page_nbytes();
    range->resident = malloc(range->page_count);
    range->wished = malloc(range->page_count);
    if (range->resident == NULL || range->wished == NULL) {
        return false;
    }
    memset(range->resident, CM_HOST_LOCATION, range->page_count);
    memset(range->wished, CM_NO_LOCATION, range->page_count);
    return true;
}

static bool
range_map(cm_emulated_range *range, uint64_t nbytes)
{
    if (!cm_emulated_pages_map(nbytes, true, &range->alias)) {
        return false;
    }
    range->bytes = range->alias.start;
    range->nbytes = nbytes;
    bool hidden = range->kind == CM_EMULATED_DEVICE;
    /* In a forked child the driver's host memory is the parent's own, and managed
     * memory is not there. */
    if (range->kind == CM_EMULATED_HOST && !cm_emulated_pages_share(&range->alias)) {
        return false;
    }
    if (range->kind == CM_EMULATED_MANAGED) {
        cm_emulated_pages_leave_out(range->alias.base, range->alias.nbytes);
    }
    if (!hidden) {
        range->host = range->alias.start;
    }
    /* Devices see write-combined memory elsewhere, as some real machines do. */
    if (hidden
        || (range->kind == CM_EMULATED_HOST
            && (range->flags & CM_HOST_ALLOC_WRITE_COMBINED) != 0)) {
        if (!cm_emulated_pages_map(nbytes, false, &range->user)) {
            return false;
        }
        range->address = (uint64_t)(uintptr_t)range->user.start;
    }
    else {
        range->address = (uint64_t)(uintptr_t)range->alias.start;
    }
    return range->kind != CM_EMULATED_MANAGED || range_init_pages(range);
}

static void
give_up_locked(cm_emulated_memory *memory, unsigned index)
{
    cm_emulated_pages *slot = &memory->freed[index];
    cm_emulated_pages_unmap(slot);
    memory->freed_nbytes -= slot->nbytes;
    *slot = (cm_emulated_pages){.base = NULL};
}

/* Keep the dead addresses taken for a while; the oldest are given up. */
static void
bury_locked(cm_emulated_memory *memory, const cm_emulated_pages *pages)
{
    if (pages->base == NULL) {
        return;
    }
    cm_emulated_pages_kill(pages);
    unsigned next = (memory->freed_index + 1) % CM_EMULATED_FREED_COUNT;
    give_up_locked(memory, memory->freed_index);
    memory->freed[memory->freed_index] = *pages;
    memory->freed_index = next;
    memory->freed_nbytes += pages->nbytes;
    for (unsigned i = 0;
         memory->freed_nbytes > FREED_NBYTES && i < CM_EMULATED_FREED_COUNT - 1; i++) {
        give_up_locked(memory, (next + i) % CM_EMULATED_FREED_COUNT);
    }
}

void
cm_emulated_ranges_retire_locked(cm_emulated_memory *memory, cm_emulated_range *range)
{
    cm_emulated_ranges_remove_locked(memory, range);
    while (range->pins != 0) {
        cm_cond_wait(&memory->unpinned, &memory->lock);
    }
    memory->counts[range->kind]--;
    if (range->kind < CM_EMULATED_REGISTERED) {
        memory->live_nbytes -= range->nbytes;
        budget_give_locked(memory, range);
    }
    bury_locked(memory, &range->alias);
    bury_locked(memory, &range->user);
    free(range->mappings);
    free(range->resident);
    free(range->wished);
    range->is_gone = true;
    if (range->waiting == 0) {
        free(range);
    }
}

/* Registrations that lie where fresh memory was just mapped: their memory was unmapped
 * by its owner without a word, so they are worth nothing. */
void
cm_emulated_ranges_drop_stale_locked(cm_emulated_memory *memory,
                                     const cm_emulated_range *fresh)
{
    const cm_emulated_pages *both[] = {&fresh->user, &fresh->alias};
    for (int i = 0; i < 2; i++) {
        uint64_t end = (uint64_t)(uintptr_t)both[i]->base + both[i]->nbytes;
        for (size_t at = 0; both[i]->base != NULL && at < memory->span_count;) {
            cm_emulated_span *span = &memory->spans[at];
            if (span->range->kind == CM_EMULATED_REGISTERED && span->start < end
                && span->end > (uint64_t)(uintptr_t)both[i]->base) {
                cm_emulated_ranges_retire_locked(memory, span->range);
                at = 0;
            }
            else {
                at++;
            }
        }
    }
}

int32_t
cm_emulated_memory_alloc(cm_emulated_memory *memory, cm_emulated_kind kind, int device,
                         unsigned flags, uint64_t nbytes, cm_emulated_place *out)
{
    uint64_t budget;
    if (!cm_round_up_u64(nbytes, 256, &budget)) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    cm_mutex_lock(&memory->lock);
    bool good = budget_take_locked(memory, kind, device, budget);
    cm_mutex_unlock(&memory->lock);
    if (!good) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    cm_emulated_range *range = calloc(1, sizeof(*range));
    good = range != NULL;
    if (good) {
        range->kind = kind;
        range->device = device;
        range->flags = flags;
        good = range_map(range, nbytes);
    }
    cm_mutex_lock(&memory->lock);
    if (good) {
        range->budget_nbytes = budget;
        cm_emulated_ranges_drop_stale_locked(memory, range);
        good = cm_emulated_ranges_insert_locked(memory, range);
    }
    if (good) {
        memory->live_nbytes += nbytes;
        memory->counts[kind]++;
        cm_emulated_ranges_place(range, 0, true, out);
    }
    else {
        cm_emulated_range given = {
            .kind = kind, .device = device, .budget_nbytes = budget};
        budget_give_locked(memory, &given);
    }
    cm_mutex_unlock(&memory->lock);
    if (!good && range != NULL) {
        range_free(range);
    }
    return good ? 0 : CM_CUDA_OUT_OF_MEMORY;
}

int32_t
cm_emulated_memory_free(cm_emulated_memory *memory, uint64_t address, unsigned kinds)
{
    int32_t code = CM_CUDA_INVALID_VALUE;
    cm_mutex_lock(&memory->lock);
    const cm_emulated_span *span = cm_emulated_ranges_find_locked(memory, address);
    if (span != NULL && span->start == address && span->is_first
        && (kinds & (1u << span->range->kind)) != 0) {
        cm_emulated_ranges_retire_locked(memory, span->range);
        code = 0;
    }
    cm_mutex_unlock(&memory->lock);
    return code;
}

/* Register whole pages, as the driver does. */
int32_t
cm_emulated_memory_register(cm_emulated_memory *memory, int device, void *host,
                            uint64_t nbytes, unsigned flags)
{
    uint64_t page = cm_emulated_page_nbytes();
    uint64_t exact = (uint64_t)(uintptr_t)host;
    uint64_t end;
    if (host == NULL || nbytes == 0 || !cm_add_u64(exact, nbytes, &end)
        || !cm_round_up_u64(end, page, &end)) {
        return CM_CUDA_INVALID_VALUE;
    }
    uint64_t start = exact & ~(page - 1);
    bool read_only = (flags & CM_REGISTER_READ_ONLY) != 0;
    cm_emulated_range *range = calloc(1, sizeof(*range));
    if (range == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *range = (cm_emulated_range){
        .kind = CM_EMULATED_REGISTERED,
        .device = device,
        .flags = flags,
        .host = (unsigned char *)host - (exact - start),
        .bytes = (unsigned char *)host - (exact - start),
        .nbytes = end - start,
        .registered = exact,
    };
    cm_mutex_lock(&memory->lock);
    bool taken = cm_emulated_ranges_touch_locked(memory, start, end - start);
    cm_mutex_unlock(&memory->lock);
    int32_t code = 0;
    if (taken) {
        code = CM_CUDA_ALREADY_REGISTERED;
    }
    else if (!cm_emulated_pages_are_mapped(start, end, !read_only)) {
        code = CM_CUDA_INVALID_VALUE;
    }
    else if (!cm_emulated_pages_map(end - start, false, &range->user)) {
        code = CM_CUDA_OUT_OF_MEMORY;
    }
    else {
        range->address = (uint64_t)(uintptr_t)range->user.start;
        cm_mutex_lock(&memory->lock);
        if (cm_emulated_ranges_touch_locked(memory, start, end - start)) {
            code = CM_CUDA_ALREADY_REGISTERED;
        }
        else {
            cm_emulated_ranges_drop_stale_locked(memory, range);
            if (cm_emulated_ranges_insert_locked(memory, range)) {
                memory->counts[CM_EMULATED_REGISTERED]++;
            }
            else {
                code = CM_CUDA_OUT_OF_MEMORY;
            }
        }
        cm_mutex_unlock(&memory->lock);
    }
    if (code != 0) {
        range_free(range);
    }
    return code;
}

cm_emulated_range *
cm_emulated_memory_hold(cm_emulated_memory *memory, const cm_emulated_place *place)
{
    cm_emulated_range *range = NULL;
    if (place->kind != CM_EMULATED_REGISTERED) {
        return NULL;
    }
    cm_mutex_lock(&memory->lock);
    const cm_emulated_span *span =
        cm_emulated_ranges_find_locked(memory, place->address);
    if (span != NULL && span->range->kind == CM_EMULATED_REGISTERED) {
        range = span->range;
        range->waiting++;
    }
    cm_mutex_unlock(&memory->lock);
    return range;
}

void
cm_emulated_memory_let_go(cm_emulated_memory *memory, cm_emulated_range *range)
{
    if (range == NULL) {
        return;
    }
    cm_mutex_lock(&memory->lock);
    if (--range->waiting == 0) {
        if (range->is_gone) {
            free(range);
        }
        cm_cond_signal_all(&memory->unpinned);
    }
    cm_mutex_unlock(&memory->lock);
}

/* The registration that began with the address, or NULL. */
static cm_emulated_range *
find_registered_locked(cm_emulated_memory *memory, uint64_t address)
{
    const cm_emulated_span *span = cm_emulated_ranges_find_locked(memory, address);
    return span != NULL && span->range->kind == CM_EMULATED_REGISTERED
                   && span->range->registered == address
               ? span->range
               : NULL;
}

int32_t
cm_emulated_memory_unregister(cm_emulated_memory *memory, const void *host)
{
    uint64_t address = (uint64_t)(uintptr_t)host;
    cm_mutex_lock(&memory->lock);
    cm_emulated_range *range = find_registered_locked(memory, address);
    while (range != NULL && range->waiting != 0) {
        cm_cond_wait(&memory->unpinned, &memory->lock);
        range = find_registered_locked(memory, address);
    }
    bool found = range != NULL;
    if (found) {
        cm_emulated_ranges_retire_locked(memory, range);
    }
    cm_mutex_unlock(&memory->lock);
    return found ? 0 : CM_CUDA_NOT_REGISTERED;
}

void
cm_emulated_memory_reset(cm_emulated_memory *memory, int device)
{
    cm_mutex_lock(&memory->lock);
    cm_emulated_virtual_reset_locked(memory, device);
    memory->guests[device] = 0;
    for (int i = 0; i < CM_MAX_DEVICES; i++) {
        memory->guests[i] &= ~(UINT64_C(1) << device);
    }
    for (size_t i = 0; i < memory->span_count;) {
        cm_emulated_range *range = memory->spans[i].range;
        if (range->device == device) {
            cm_emulated_ranges_retire_locked(memory, range);
            i = 0; /* waiting for pins lets others change the table */
        }
        else {
            i++;
        }
    }
    cm_mutex_unlock(&memory->lock);
}

bool
cm_emulated_memory_enable_peer(cm_emulated_memory *memory, int device, int peer)
{
    uint64_t guest = UINT64_C(1) << device;
    cm_mutex_lock(&memory->lock);
    bool is_new = (memory->guests[peer] & guest) == 0;
    memory->guests[peer] |= guest;
    cm_mutex_unlock(&memory->lock);
    return is_new;
}

uint64_t
cm_emulated_memory_used(cm_emulated_memory *memory, int device)
{
    cm_mutex_lock(&memory->lock);
    uint64_t used = memory->used_nbytes[device];
    cm_mutex_unlock(&memory->lock);
    return used;
}

void
cm_emulated_memory_read(cm_emulated_memory *memory, cm_emulated_counts *out)
{
    cm_mutex_lock(&memory->lock);
    out->host_allocs = memory->counts[CM_EMULATED_HOST];
    out->registrations = memory->counts[CM_EMULATED_REGISTERED];
    out->device_allocs = memory->counts[CM_EMULATED_DEVICE];
    out->managed_allocs = memory->counts[CM_EMULATED_MANAGED];
    out->physical_allocs = memory->physical_count;
    out->address_ranges = memory->counts[CM_EMULATED_VIRTUAL];
    out->mappings = memory->mapping_count;
    out->live_nbytes = memory->live_nbytes;
    cm_mutex_unlock(&memory->lock);
}
