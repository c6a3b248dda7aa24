/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/emulated/memory.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"
#include "runtime/emulated/ranges.h"
#include "runtime/emulated/stream.h"
#include "runtime/emulated/virtual.h"

enum {
    HOST_FACTOR = 4, /* host and managed memory together: so many times a device's */
    HOST_FLAGS = CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_MAPPED
        | CM_HOST_ALLOC_WRITE_COMBINED,
    REGISTER_FLAGS = CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED | CM_REGISTER_IO_MEMORY
        | CM_REGISTER_READ_ONLY,
};

void
cm_emulated_memory_init(cm_emulated *emulated)
{
    cm_emulated_memory *memory = &emulated->memory;
    memory->store.fd = -1;
    if (!cm_mul_u64(emulated->config.memory_nbytes, HOST_FACTOR,
                    &memory->host_limit_nbytes)) {
        memory->host_limit_nbytes = UINT64_MAX;
    }
}

void
cm_emulated_memory_fini(cm_emulated *emulated)
{
    cm_emulated_virtual_fini(emulated);
    cm_emulated_ranges_fini(&emulated->memory);
}

void
cm_emulated_memory_reset(cm_emulated *emulated, int device)
{
    cm_emulated_memory *memory = &emulated->memory;
    cm_emulated_virtual_reset(emulated, device);
    memory->guests[device] = 0;
    for (int i = 0; i < CM_MAX_DEVICES; i++) {
        memory->guests[i] &= ~(UINT64_C(1) << device);
    }
    for (size_t i = 0; i < memory->span_count;) {
        cm_emulated_range *range = memory->spans[i++].range;
        if (range->device == device) {
            cm_emulated_range_retire(emulated, range);
            i = 0; /* waiting for pins lets others change the table */
        }
    }
}

/* ---- looking up and pinning ------------------------------------------------------ */

cm_emulated_peer_access
cm_emulated_find(const cm_emulated *emulated, uint64_t address, uint64_t nbytes,
                 cm_emulated_place *out)
{
    const cm_emulated_memory *memory = &emulated->memory;
    uint64_t end;
    if (address == 0 || !cm_add_u64(address, nbytes, &end)) {
        return CM_EMULATED_BROKEN;
    }
    const cm_emulated_span *span = cm_emulated_span_find(memory, address);
    if (span == NULL) {
        return cm_emulated_ranges_touch(memory, address, nbytes, true)
                   ? CM_EMULATED_BROKEN
                   : CM_EMULATED_UNKNOWN;
    }
    if (nbytes > span->end - address) {
        return CM_EMULATED_BROKEN;
    }
    cm_emulated_range *range = span->range;
    uint64_t offset = address - span->start;
    *out = (cm_emulated_place){
        .range = range,
        .offset = offset,
        .kind = range->kind,
        .device = range->device,
        .flags = range->flags,
        .access = UINT64_MAX,
        .address = range->address + offset,
        .host = range->host != NULL ? range->host + offset : NULL,
        .bytes = range->bytes + offset,
        .by_device = span->by_device,
    };
    if (range->kind == CM_EMULATED_DEVICE) {
        out->access = memory->guests[range->device] | UINT64_C(1) << range->device;
    }
    if (range->kind == CM_EMULATED_VIRTUAL) {
        size_t first, last;
        if (!cm_emulated_mappings_find(range, offset, nbytes, &first, &last)) {
            return CM_EMULATED_BROKEN;
        }
        out->is_mapped = true;
        out->kind = CM_EMULATED_DEVICE;
        out->device = range->mappings[first].physical->device;
        for (size_t i = first; i < last; i++) {
            out->access &= range->mappings[i].access;
        }
    }
    return CM_EMULATED_INSIDE;
}

/* The pages [*first, *end) of a managed range under [address, address + nbytes). */
static void
find_pages(const cm_emulated_range *range, cm_address address, uint64_t nbytes,
           size_t *first, size_t *end)
{
    uint64_t page = cm_emulated_page_nbytes();
    uint64_t offset = address - (uint64_t)(uintptr_t)range->alias.base;
    *first = offset / page;
    *end = (offset + nbytes - 1) / page + 1;
}

static void
set_pages(signed char *pages, const cm_emulated_range *range, cm_address address,
          uint64_t nbytes, int location)
{
    size_t first, end;
    find_pages(range, address, nbytes, &first, &end);
    memset(pages + first, location, end - first);
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
cm_emulated_pin_range(cm_emulated *emulated, uint64_t address, uint64_t nbytes,
                      int device, uint64_t stamp, cm_emulated_pin *pin)
{
    cm_emulated_place place;
    if (cm_emulated_find(emulated, address, nbytes, &place) != CM_EMULATED_INSIDE
        || !may_touch(&place, device)) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    cm_emulated_range *range = place.range;
    if (!place.is_mapped) {
        range->pins++;
    }
    else if (!cm_emulated_mappings_pin(range, place.offset, nbytes, stamp)) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    if (place.kind == CM_EMULATED_MANAGED && device != CM_EMULATED_ANY) {
        set_pages(range->resident, range, address, nbytes, device);
    }
    *pin = (cm_emulated_pin){range, place.offset, nbytes, place.bytes};
    return 0;
}

int32_t
cm_emulated_unpin(cm_emulated *emulated, const cm_emulated_pin *pin, int32_t code)
{
    bool good = true;
    if (pin->range == NULL) {
        return code;
    }
    if (pin->range->kind == CM_EMULATED_VIRTUAL) {
        good = cm_emulated_mappings_unpin(pin->range, pin->offset, pin->nbytes);
    }
    else {
        pin->range->pins--;
    }
    cm_cond_signal_all(&emulated->changed);
    return code == 0 && !good ? CM_CUDA_ILLEGAL_ADDRESS : code;
}

cm_emulated_range *
cm_emulated_hold(const cm_emulated_place *place)
{
    if (place->kind != CM_EMULATED_REGISTERED) {
        return NULL;
    }
    place->range->waiting++;
    return place->range;
}

void
cm_emulated_let_go(cm_emulated *emulated, cm_emulated_range *range)
{
    if (range == NULL || --range->waiting != 0) {
        return;
    }
    if (range->is_gone) {
        free(range);
    }
    cm_cond_signal_all(&emulated->changed);
}

/* ---- allocation ------------------------------------------------------------------ */

/* Take `nbytes` from the budget that the kind draws on. */
static bool
take_budget(cm_emulated *emulated, cm_emulated_range *range, uint64_t nbytes)
{
    cm_emulated_memory *memory = &emulated->memory;
    bool on_device = range->kind == CM_EMULATED_DEVICE;
    uint64_t *used =
        on_device ? &memory->used_nbytes[range->device] : &memory->host_used_nbytes;
    uint64_t limit =
        on_device ? emulated->config.memory_nbytes : memory->host_limit_nbytes;
    if (nbytes > limit - *used) {
        return false;
    }
    *used += nbytes;
    range->budget_nbytes = nbytes;
    return true;
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
range_map(cm_emulated_range *range)
{
    if (!cm_emulated_pages_map(range->nbytes, true, &range->alias)) {
        return false;
    }
    range->bytes = range->alias.start;
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
        if (!cm_emulated_pages_map(range->nbytes, false, &range->user)) {
            return false;
        }
        range->address = (uint64_t)(uintptr_t)range->user.start;
    }
    else {
        range->address = (uint64_t)(uintptr_t)range->alias.start;
    }
    return range->kind != CM_EMULATED_MANAGED || range_init_pages(range);
}

static int32_t
alloc(cm_runtime *rt, cm_emulated_kind kind, unsigned flags, uint64_t nbytes,
      const cm_emulated_range **out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    uint64_t budget;
    CM_TRY_CODE(cm_emulated_enter_healthy(rt, &self));
    cm_emulated_range *range = calloc(1, sizeof(*range));
    if (range == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    range->kind = kind;
    range->device = self->device;
    range->flags = flags;
    range->nbytes = nbytes;
    if (!cm_round_up_u64(nbytes, 256, &budget) || !take_budget(emulated, range, budget)
        || !range_map(range) || !cm_emulated_range_insert(emulated, range)) {
        cm_emulated_range_refund(&emulated->memory, range);
        cm_emulated_range_free(range);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    emulated->memory.live_nbytes += nbytes;
    *out = range;
    return 0;
}

/* `address` must be the start of a range of one of the kinds in the mask 1 << kind. */
static int32_t
release(cm_runtime *rt, uint64_t address, unsigned kinds)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter_unsafe(rt, &self));
    if (address == 0) {
        return 0; /* freeing nothing is allowed */
    }
    const cm_emulated_span *span = cm_emulated_span_find(&emulated->memory, address);
    if (span == NULL || span->start != address || !span->is_first
        || (kinds & (1u << span->range->kind)) == 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_range_retire(emulated, span->range);
    return 0;
}

int32_t
cm_emulated_op_host_alloc(cm_runtime *rt, uint64_t nbytes, unsigned flags, void **out)
{
    if ((flags & ~(unsigned)HOST_FLAGS) != 0 || nbytes == 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    const cm_emulated_range *range;
    CM_TRY_CODE(alloc(rt, CM_EMULATED_HOST, flags, nbytes, &range));
    *out = range->host;
    return 0;
}

int32_t
cm_emulated_op_host_free(cm_runtime *rt, void *host)
{
    return release(rt, (uint64_t)(uintptr_t)host, 1u << CM_EMULATED_HOST);
}

int32_t
cm_emulated_op_device_alloc(cm_runtime *rt, uint64_t nbytes, cm_address *out)
{
    const cm_emulated_range *range;
    if (nbytes == 0) {
        cm_emulated_thread *self;
        CM_TRY_CODE(cm_emulated_enter_healthy(rt, &self));
        *out = 0;
        return 0;
    }
    CM_TRY_CODE(alloc(rt, CM_EMULATED_DEVICE, 0, nbytes, &range));
    *out = range->address;
    return 0;
}

int32_t
cm_emulated_op_managed_alloc(cm_runtime *rt, uint64_t nbytes, unsigned flags,
                             cm_address *out)
{
    if (nbytes == 0 || (flags != CM_MANAGED_GLOBAL && flags != CM_MANAGED_HOST)) {
        return CM_CUDA_INVALID_VALUE;
    }
    const cm_emulated_range *range;
    CM_TRY_CODE(alloc(rt, CM_EMULATED_MANAGED, flags, nbytes, &range));
    *out = range->address;
    return 0;
}

int32_t
cm_emulated_op_device_free(cm_runtime *rt, cm_address address)
{
    return release(rt, address,
                   (1u << CM_EMULATED_DEVICE) | (1u << CM_EMULATED_MANAGED));
}

/* ---- registered memory ----------------------------------------------------------- */

/* Make a range of the pages [start, end), which the host has. */
static int32_t
register_pages(cm_emulated *emulated, cm_emulated_range *range, uint64_t end)
{
    uint64_t start = (uint64_t)(uintptr_t)range->host;
    if (cm_emulated_ranges_touch(&emulated->memory, start, end - start, false)) {
        return CM_CUDA_ALREADY_REGISTERED;
    }
    if (!cm_emulated_pages_are_mapped(start, end,
                                      (range->flags & CM_REGISTER_READ_ONLY) == 0)) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (!cm_emulated_pages_map(end - start, false, &range->user)) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    range->address = (uint64_t)(uintptr_t)range->user.start;
    return cm_emulated_range_insert(emulated, range) ? 0 : CM_CUDA_OUT_OF_MEMORY;
}

/* Registers whole pages, as the driver does. */
int32_t
cm_emulated_op_host_register(cm_runtime *rt, void *host, uint64_t nbytes,
                             unsigned flags)
{
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter_healthy(rt, &self));
    uint64_t page = cm_emulated_page_nbytes();
    uint64_t exact = (uint64_t)(uintptr_t)host;
    uint64_t end;
    if ((flags & ~(unsigned)REGISTER_FLAGS) != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    if ((flags & CM_REGISTER_IO_MEMORY) != 0) {
        return CM_CUDA_NOT_SUPPORTED; /* no memory here belongs to another device */
    }
    if (host == NULL || nbytes == 0 || !cm_add_u64(exact, nbytes, &end)
        || !cm_round_up_u64(end, page, &end)) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_range *range = calloc(1, sizeof(*range));
    if (range == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    range->kind = CM_EMULATED_REGISTERED;
    range->device = self->device;
    range->flags = flags;
    range->host = (unsigned char *)host - (exact & (page - 1));
    range->bytes = range->host;
    range->nbytes = end - (exact & ~(page - 1));
    range->registered = exact;
    int32_t code = register_pages(cm_emulated_of(rt), range, end);
    if (code != 0) {
        cm_emulated_range_free(range);
    }
    return code;
}

/* Blocks: while copies of it are queued. */
int32_t
cm_emulated_op_host_unregister(cm_runtime *rt, void *host)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    uint64_t address = (uint64_t)(uintptr_t)host;
    CM_TRY_CODE(cm_emulated_enter_unsafe(rt, &self));
    if (host == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    for (;;) {
        cm_emulated_range *range = cm_emulated_range_find(
            &emulated->memory, CM_EMULATED_REGISTERED, address, 1);
        if (range == NULL || range->registered != address) {
            return CM_CUDA_NOT_REGISTERED;
        }
        if (range->waiting == 0) {
            cm_emulated_range_retire(emulated, range);
            return 0;
        }
        cm_cond_wait(&emulated->changed, &emulated->lock);
    }
}

/* ---- what is known of an address ------------------------------------------------- */

int32_t
cm_emulated_op_host_device_address(cm_runtime *rt, void *host, cm_address *out)
{
    cm_emulated_thread *self;
    cm_emulated_place place;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    if (cm_emulated_find(cm_emulated_of(rt), (uint64_t)(uintptr_t)host, 1, &place)
            != CM_EMULATED_INSIDE
        || place.host != host
        || (place.kind != CM_EMULATED_HOST && place.kind != CM_EMULATED_REGISTERED)) {
        return CM_CUDA_INVALID_VALUE;
    }
    *out = place.address;
    return 0;
}

int32_t
cm_emulated_op_pointer_attributes(cm_runtime *rt, cm_address address,
                                  cm_pointer_info *out)
{
    static const cm_kind kinds[] = {
        [CM_EMULATED_DEVICE] = CM_KIND_DEVICE,
        [CM_EMULATED_MANAGED] = CM_KIND_MANAGED,
        [CM_EMULATED_HOST] = CM_KIND_PINNED,
        [CM_EMULATED_REGISTERED] = CM_KIND_PINNED,
    };
    cm_emulated_thread *self;
    cm_emulated_place place;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    if (cm_emulated_find(cm_emulated_of(rt), address, 1, &place)
        != CM_EMULATED_INSIDE) {
        *out = (cm_pointer_info){
            .kind = CM_KIND_PAGEABLE,
            .device = -1,
            .host_address = (void *)(uintptr_t)address,
        };
        return 0;
    }
    bool in_reach =
        place.kind != CM_EMULATED_DEVICE || (place.access >> self->device & 1) != 0;
    *out = (cm_pointer_info){
        .kind = kinds[place.kind],
        .device = place.device,
        .device_address = in_reach ? place.address : 0,
        .host_address = place.host,
    };
    return 0;
}

int32_t
cm_emulated_op_pointer_access(cm_runtime *rt, cm_address address, int *out)
{
    cm_emulated_thread *self;
    cm_emulated_place place;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    if (cm_emulated_find(cm_emulated_of(rt), address, 1, &place)
        != CM_EMULATED_INSIDE) {
        return CM_CUDA_INVALID_VALUE;
    }
    bool may = (place.access >> self->device & 1) != 0;
    *out = may ? CM_ACCESS_READ | CM_ACCESS_WRITE : 0;
    return 0;
}

int32_t
cm_emulated_op_memory_info(cm_runtime *rt, uint64_t *free_nbytes,
                           uint64_t *total_nbytes)
{
    const cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    *total_nbytes = emulated->config.memory_nbytes;
    *free_nbytes = *total_nbytes - emulated->memory.used_nbytes[self->device];
    return 0;
}

int32_t
cm_emulated_op_peer_can_access(cm_runtime *rt, int device, int peer, int *out)
{
    if (!cm_emulated_is_device(rt, device) || !cm_emulated_is_device(rt, peer)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    *out = device != peer && !cm_emulated_of(rt)->config.apart;
    return 0;
}

/* But for what is mapped there. */
int32_t
cm_emulated_op_peer_enable(cm_runtime *rt, int peer)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    CM_TRY_CODE(cm_emulated_enter_unsafe(rt, &self));
    if (!cm_emulated_is_device(rt, peer) || peer == self->device) {
        return CM_CUDA_INVALID_DEVICE;
    }
    if (emulated->config.apart) {
        return CM_CUDA_PEER_UNSUPPORTED;
    }
    uint64_t guest = UINT64_C(1) << self->device;
    uint64_t *guests = &emulated->memory.guests[peer];
    if ((*guests & guest) != 0) {
        return CM_CUDA_PEER_ENABLED;
    }
    *guests |= guest;
    return 0;
}

/* ---- managed memory: where its pages are, and where they were asked to be -------- */

typedef struct prefetch {
    cm_emulated_job base; /* first */
    cm_address address;
    uint64_t nbytes;
    int location;
} prefetch;

static int32_t
prefetch_run(cm_emulated *emulated, cm_emulated_job *base)
{
    const prefetch *job = (const prefetch *)base;
    const cm_emulated_range *range = cm_emulated_range_find(
        &emulated->memory, CM_EMULATED_MANAGED, job->address, job->nbytes);
    if (range == NULL) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    set_pages(range->resident, range, job->address, job->nbytes, job->location);
    return 0;
}

int32_t
cm_emulated_op_prefetch_async(cm_runtime *rt, cm_address address, uint64_t nbytes,
                              int device, uint64_t stream)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_thread *self;
    int of_stream;
    CM_TRY_CODE(cm_emulated_enter_stream(rt, stream, &self, &of_stream));
    if (device < CM_HOST_LOCATION || device >= rt->device_count) {
        return CM_CUDA_INVALID_DEVICE;
    }
    const cm_emulated_range *range =
        cm_emulated_range_find(&emulated->memory, CM_EMULATED_MANAGED, address, nbytes);
    if (range == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    prefetch *job = malloc(sizeof(*job));
    if (job == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    set_pages(range->wished, range, address, nbytes, device);
    *job = (prefetch){{prefetch_run, cm_emulated_job_free}, address, nbytes, device};
    return cm_emulated_submit(emulated, self, stream, &job->base, false);
}

int32_t
cm_emulated_op_prefetch_location(cm_runtime *rt, cm_address address, uint64_t nbytes,
                                 int *out)
{
    cm_emulated_thread *self;
    size_t first, end;
    CM_TRY_CODE(cm_emulated_enter(rt, &self));
    const cm_emulated_range *range = cm_emulated_range_find(
        &cm_emulated_of(rt)->memory, CM_EMULATED_MANAGED, address, nbytes);
    if (range == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    find_pages(range, address, nbytes, &first, &end);
    *out = range->wished[first];
    for (size_t i = first; i < end; i++) {
        if (range->wished[i] != *out) {
            *out = CM_NO_LOCATION;
        }
    }
    return 0;
}

int32_t
cm_emulated_count_host_pages(const cm_emulated *emulated, cm_address address,
                             uint64_t nbytes, uint64_t *out)
{
    size_t first, end;
    const cm_emulated_range *range =
        cm_emulated_range_find(&emulated->memory, CM_EMULATED_MANAGED, address, nbytes);
    if (range == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    find_pages(range, address, nbytes, &first, &end);
    *out = 0;
    for (size_t i = first; i < end; i++) {
        *out += range->resident[i] == CM_HOST_LOCATION;
    }
    return 0;
}
