/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/emulated/private.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked_math.h"
#include "base/machine.h"

enum {
    HOST_FACTOR = 4, /* host and managed memory together: so many times a device's */
    HOST_FLAGS = CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_MAPPED
        | CM_HOST_ALLOC_WRITE_COMBINED,
    REGISTER_FLAGS = CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED | CM_REGISTER_IO_MEMORY
        | CM_REGISTER_READ_ONLY,
    PHYSICAL_FLAGS = CM_PHYSICAL_RDMA | CM_PHYSICAL_SHAREABLE,
};

/* Dead addresses kept taken at most; there are only so many under ThreadSanitizer. */
#define FREED_NBYTES (UINT64_C(64) << 30)
#define FREED_COUNT 256

/* Device memory without an address of its own. */
typedef struct physical_memory {
    int device;
    bool is_released; /* the handle is gone; freed with the last place */
    bool is_closed;   /* was in two places and left one: no device is let in later, as
                         memory for RDMA behaves on a real device (driver 580) */
    unsigned places;  /* mappings of it */
    uint64_t nbytes;
    unsigned char *bytes; /* owned */
} physical_memory;

typedef struct mapped_memory {
    uint64_t offset; /* from the start of the range */
    uint64_t nbytes;
    physical_memory *physical;
    uint64_t serial; /* of when it was made; see cm_emulated_memory */
    uint64_t access; /* by device index */
    unsigned pins;   /* executing work */
    bool is_leaving; /* being unmapped: not there for anyone else */
} mapped_memory;

static uint64_t
address_of(const void *pointer)
{
    return (uint64_t)(uintptr_t)pointer;
}

/* ---- the table of ranges --------------------------------------------------------- */

/* A range that devices see elsewhere than the host does is in the table twice. */
static bool
is_twice(const cm_emulated_range *range)
{
    return range->host != NULL && address_of(range->host) != range->address;
}

/* The range that holds the address, and where it starts there; or NULL. */
static cm_emulated_range *
range_at(const cm_emulated_memory *memory, uint64_t address, uint64_t *start)
{
    size_t index = cm_emulated_table_above(&memory->ranges, address);
    if (index == memory->ranges.count) {
        return NULL;
    }
    cm_emulated_range *range = memory->ranges.entries[index].object;
    *start = memory->ranges.entries[index].key - range->nbytes;
    return *start <= address ? range : NULL;
}

/* The first range that has a byte in [address, address + nbytes), or NULL. */
static const cm_emulated_range *
range_touched(const cm_emulated_memory *memory, uint64_t address, uint64_t nbytes)
{
    size_t index = cm_emulated_table_above(&memory->ranges, address);
    if (index == memory->ranges.count) {
        return NULL;
    }
    const cm_emulated_range *range = memory->ranges.entries[index].object;
    uint64_t start = memory->ranges.entries[index].key - range->nbytes;
    return start <= address || start - address < nbytes ? range : NULL;
}

/* The range of that kind in which [address, address + nbytes) lies, or NULL. */
static cm_emulated_range *
range_find(const cm_emulated_memory *memory, cm_emulated_kind kind, uint64_t address,
           uint64_t nbytes)
{
    uint64_t start;
    cm_emulated_range *range = range_at(memory, address, &start);
    return nbytes != 0 && range != NULL && range->kind == kind
                   && nbytes <= range->nbytes - (address - start)
               ? range
               : NULL;
}

static void range_retire(cm_emulated *emulated, cm_emulated_range *range);

static void
drop_stale(cm_emulated *emulated, const cm_emulated_pages *fresh)
{
    const cm_emulated_table *ranges = &emulated->memory.ranges;
    uint64_t start = address_of(fresh->base);
    for (size_t i = 0; fresh->base != NULL && i < ranges->count;) {
        const cm_emulated_entry each = ranges->entries[i++];
        cm_emulated_range *range = each.object;
        if (range->kind == CM_EMULATED_REGISTERED
            && each.key - range->nbytes < start + fresh->nbytes && each.key > start) {
            range_retire(emulated, range);
            i = 0; /* waiting for pins lets others change the table */
        }
    }
}

static void
take_out(cm_emulated_memory *memory, const cm_emulated_range *range)
{
    memory->counts[range->kind]--;
    (void)cm_emulated_table_remove(&memory->ranges, range->address + range->nbytes);
    if (is_twice(range)) {
        (void)cm_emulated_table_remove(&memory->ranges,
                                       address_of(range->host) + range->nbytes);
    }
}

/* False: out of memory. */
static bool
put_in(cm_emulated_memory *memory, cm_emulated_range *range)
{
    cm_emulated_table *ranges = &memory->ranges;
    uint64_t end = range->address + range->nbytes;
    if (!cm_emulated_table_add(ranges, end, range)) {
        return false;
    }
    if (is_twice(range)
        && !cm_emulated_table_add(ranges, address_of(range->host) + range->nbytes,
                                  range)) {
        (void)cm_emulated_table_remove(ranges, end);
        return false;
    }
    memory->counts[range->kind]++;
    return true;
}

/* Note a range that was made; registrations that lie where its memory was just mapped
 * are forgotten: their owner unmapped theirs without a word. False: out of memory. */
static bool
range_insert(cm_emulated *emulated, cm_emulated_range *range)
{
    drop_stale(emulated, &range->user);
    drop_stale(emulated, &range->alias);
    return put_in(&emulated->memory, range);
}

/* Free a range that is not in the table. */
static void
range_free(cm_emulated_range *range)
{
    (void)munmap(range->user.base, range->user.nbytes); /* or there is none */
    (void)munmap(range->alias.base, range->alias.nbytes);
    cm_emulated_table_fini(&range->mappings);
    free(range->resident);
    free(range->wished);
    free(range);
}

/* Keep a range whose bytes are gone for a while; the oldest are given up, but not what
 * a copy still holds. */
static void
bury(cm_emulated_memory *memory, cm_emulated_range *range)
{
    range->kind = CM_EMULATED_FREED;
    range->device = -1;
    range->host = range->alias.start; /* callers may have that address too */
    if (!put_in(memory, range)) {
        return; /* never freed: its addresses at least stay taken */
    }
    cm_list_push_back(&memory->freed, &range->node);
    memory->freed_nbytes += range->user.nbytes + range->alias.nbytes;
    for (;;) {
        cm_emulated_range *oldest =
            CM_LIST_ENTRY(memory->freed.next, cm_emulated_range, node);
        if (oldest == range || oldest->waiting != 0
            || (memory->counts[CM_EMULATED_FREED] <= FREED_COUNT
                && memory->freed_nbytes <= FREED_NBYTES)) {
            return;
        }
        memory->freed_nbytes -= oldest->user.nbytes + oldest->alias.nbytes;
        cm_list_remove(&oldest->node);
        take_out(memory, oldest);
        range_free(oldest);
    }
}

/* Take the range out, wait for executing work and kill its bytes. */
static void
range_retire(cm_emulated *emulated, cm_emulated_range *range)
{
    cm_emulated_memory *memory = &emulated->memory;
    take_out(memory, range);
    while (range->pins != 0) {
        cm_cond_wait(&emulated->changed, &emulated->lock);
    }
    if (range->budget != NULL) {
        memory->live_nbytes -= range->nbytes;
        *range->budget -= range->budget_nbytes;
    }
    cm_emulated_pages_kill(range->alias.base, range->alias.nbytes);
    cm_emulated_pages_kill(range->user.base, range->user.nbytes);
    bury(memory, range);
}

void
cm_emulated_memory_init(cm_emulated *emulated)
{
    cm_emulated_memory *memory = &emulated->memory;
    if (!cm_mul_u64(emulated->config.memory_nbytes, HOST_FACTOR,
                    &memory->host_limit_nbytes)) {
        memory->host_limit_nbytes = UINT64_MAX;
    }
    cm_list_init(&memory->freed);
}

/* ---- looking up and pinning ------------------------------------------------------ */

/* The first mapping in the range that ends above `offset`, or NULL. */
static mapped_memory *
mapping_above(const cm_emulated_range *range, uint64_t offset)
{
    size_t index = cm_emulated_table_above(&range->mappings, offset);
    return index < range->mappings.count ? range->mappings.entries[index].object : NULL;
}

/* Each that has a byte in [from, to) of the range `in`; none if that is of another
 * kind. */
#define EACH_MAPPING(in, from, to, each)                                               \
    mapped_memory *each = mapping_above(in, from);                                     \
    each != NULL && each->offset < (to);                                               \
    each = mapping_above(in, each->offset + each->nbytes)

/* What is mapped there; false when part of it is not, or is being unmapped. */
static bool
find_mappings(cm_emulated_place *place)
{
    const mapped_memory *first = mapping_above(place->range, place->offset);
    uint64_t end = place->offset + place->nbytes + (place->nbytes == 0);
    uint64_t reached = place->offset;
    for (EACH_MAPPING(place->range, place->offset, end, each)) {
        if (each->is_leaving || each->offset > reached) {
            return false;
        }
        reached = each->offset + each->nbytes;
        place->access &= each->access;
    }
    if (reached < end) {
        return false;
    }
    place->kind = CM_EMULATED_DEVICE;
    place->device = first->physical->device;
    return true;
}

cm_emulated_found
cm_emulated_find(const cm_emulated *emulated, uint64_t address, uint64_t nbytes,
                 cm_emulated_place *out)
{
    const cm_emulated_memory *memory = &emulated->memory;
    uint64_t start, end;
    if (address == 0 || !cm_add_u64(address, nbytes, &end)) {
        return CM_EMULATED_BROKEN;
    }
    cm_emulated_range *range = range_at(memory, address, &start);
    if (range == NULL) {
        return range_touched(memory, address, nbytes) != NULL ? CM_EMULATED_BROKEN
                                                              : CM_EMULATED_UNKNOWN;
    }
    uint64_t offset = address - start;
    if (nbytes > range->nbytes - offset || range->kind == CM_EMULATED_FREED) {
        return CM_EMULATED_BROKEN;
    }
    *out = (cm_emulated_place){
        .range = range,
        .offset = offset,
        .nbytes = nbytes,
        .kind = range->kind,
        .device = range->device,
        .access = UINT64_MAX,
        .address = range->address + offset,
        .host = range->host != NULL ? range->host + offset : NULL,
        .bytes = range->bytes + offset,
        .by_device = start == range->address,
    };
    if (range->kind == CM_EMULATED_DEVICE) {
        out->access = memory->guests[range->device] | UINT64_C(1) << range->device;
    }
    return range->kind != CM_EMULATED_VIRTUAL || find_mappings(out)
               ? CM_EMULATED_INSIDE
               : CM_EMULATED_BROKEN;
}

/* The pages of a managed range under [address, address + nbytes), `pages` being one of
 * what it knows of each; how many in *count. */
static signed char *
find_pages(signed char *pages, const cm_emulated_range *range, cm_address address,
           uint64_t nbytes, size_t *count)
{
    uint64_t page = cm_page_nbytes();
    uint64_t offset = address - address_of(range->alias.base);
    *count = (offset % page + nbytes - 1) / page + 1;
    return pages + offset / page;
}

static void
set_pages(signed char *pages, const cm_emulated_range *range, cm_address address,
          uint64_t nbytes, int location)
{
    size_t count;
    signed char *first = find_pages(pages, range, address, nbytes, &count);
    memset(first, location, count);
}

/* Keep what is at one end of the job from going away, until unpin. */
static int32_t
pin(cm_emulated *emulated, const cm_emulated_job *job, const cm_emulated_end *end,
    cm_emulated_place *out)
{
    cm_emulated_place place;
    int device = job->device;
    if (end->is_plain || end->nbytes == 0) {
        *out = (cm_emulated_place){.bytes = (unsigned char *)(uintptr_t)end->address};
        return 0;
    }
    if (cm_emulated_find(emulated, end->address, end->nbytes, &place)
        != CM_EMULATED_INSIDE) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    bool good = device == CM_EMULATED_ANY
                    ? place.access != 0
                    : place.by_device && (place.access >> device & 1) != 0;
    uint64_t stop = place.offset + place.nbytes;
    for (EACH_MAPPING(place.range, place.offset, stop, each)) {
        good = good && each->serial <= job->stamp;
    }
    if (!good) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    for (EACH_MAPPING(place.range, place.offset, stop, each)) {
        each->pins++;
    }
    place.range->pins++;
    if (place.kind == CM_EMULATED_MANAGED && device != CM_EMULATED_ANY) {
        set_pages(place.range->resident, place.range, end->address, end->nbytes,
                  device);
    }
    *out = place;
    return 0;
}

/* `code`, or if that is 0 CM_CUDA_ILLEGAL_ADDRESS when the memory was unmapped under
 * the work. */
static int32_t
unpin(cm_emulated *emulated, const cm_emulated_place *place, int32_t code)
{
    if (place->range == NULL) {
        return code;
    }
    uint64_t end = place->offset + place->nbytes;
    for (EACH_MAPPING(place->range, place->offset, end, each)) {
        each->pins--;
        code = code == 0 && each->is_leaving ? CM_CUDA_ILLEGAL_ADDRESS : code;
    }
    place->range->pins--;
    cm_cond_signal_all(&emulated->changed);
    return code;
}

int32_t
cm_emulated_touch(cm_emulated *emulated, cm_emulated_job *job,
                  const cm_emulated_end *dst, const cm_emulated_end *src,
                  void (*touch)(cm_emulated_job *job, unsigned char *dst,
                                const unsigned char *src))
{
    cm_emulated_place to, from;
    CM_TRY_CODE(pin(emulated, job, dst, &to));
    int32_t code = pin(emulated, job, src, &from);
    if (code == 0) {
        cm_mutex_unlock(&emulated->lock);
        touch(job, to.bytes, from.bytes);
        cm_mutex_lock(&emulated->lock);
        code = unpin(emulated, &from, code);
    }
    return unpin(emulated, &to, code);
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
    if (range != NULL && --range->waiting == 0) {
        cm_cond_signal_all(&emulated->changed);
    }
}

/* ---- allocation ------------------------------------------------------------------ */

/* Where the pages of a managed range are, by page of its mapping. */
static bool
range_init_pages(cm_emulated_range *range)
{
    size_t count = range->alias.nbytes / cm_page_nbytes();
    range->resident = malloc(count);
    range->wished = malloc(count);
    if (range->resident == NULL || range->wished == NULL) {
        return false;
    }
    memset(range->resident, CM_HOST_LOCATION, count);
    memset(range->wished, CM_NO_LOCATION, count);
    return true;
}

static bool
range_map(cm_emulated_range *range)
{
    /* In a forked child the driver's host memory is the parent's own, and managed
     * memory is not there. */
    int sharing = range->kind == CM_EMULATED_HOST ? MAP_SHARED : MAP_PRIVATE;
    bool is_hidden = range->kind == CM_EMULATED_DEVICE;
    /* Devices see write-combined memory elsewhere, as some real machines do. */
    bool is_elsewhere = is_hidden
                        || (range->kind == CM_EMULATED_HOST
                            && (range->flags & CM_HOST_ALLOC_WRITE_COMBINED) != 0);
    if (!cm_emulated_pages_map(range->nbytes, sharing, &range->alias)
        || (is_elsewhere && !cm_emulated_pages_map(range->nbytes, 0, &range->user))) {
        return false;
    }
    range->bytes = range->alias.start;
    range->host = is_hidden ? NULL : range->alias.start;
    range->address = address_of(is_elsewhere ? range->user.start : range->alias.start);
    if (range->kind != CM_EMULATED_MANAGED) {
        return true;
    }
    cm_emulated_pages_leave_out(range->alias.base, range->alias.nbytes);
    return range_init_pages(range);
}

static int32_t
alloc(cm_runtime *rt, cm_emulated_kind kind, unsigned flags, uint64_t nbytes,
      const cm_emulated_range **out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_memory *memory = &emulated->memory;
    bool on_device = kind == CM_EMULATED_DEVICE;
    int device = cm_emulated_self(rt)->device;
    uint64_t *used =
        on_device ? &memory->used_nbytes[device] : &memory->host_used_nbytes;
    uint64_t limit =
        on_device ? emulated->config.memory_nbytes : memory->host_limit_nbytes;
    uint64_t budget;
    if (!cm_round_up_u64(nbytes, 256, &budget) || budget > limit - *used) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    cm_emulated_range *range = calloc(1, sizeof(*range));
    if (range == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    range->kind = kind;
    range->device = device;
    range->flags = flags;
    range->nbytes = nbytes;
    range->budget = used;
    range->budget_nbytes = budget;
    *used += budget;
    if (!range_map(range) || !range_insert(emulated, range)) {
        *used -= budget;
        range_free(range);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    memory->live_nbytes += nbytes;
    *out = range;
    return 0;
}

/* `address` must be the start of a range of one of the kinds in the mask 1 << kind. */
static int32_t
release(cm_runtime *rt, uint64_t address, unsigned kinds)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    if (address == 0) {
        return 0; /* freeing nothing is allowed */
    }
    uint64_t start;
    cm_emulated_range *range = range_at(&emulated->memory, address, &start);
    if (range == NULL || start != address || (kinds & (1u << range->kind)) == 0
        || (range->host != NULL && start != address_of(range->host))) {
        return CM_CUDA_INVALID_VALUE;
    }
    range_retire(emulated, range);
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
    return release(rt, address_of(host), 1u << CM_EMULATED_HOST);
}

int32_t
cm_emulated_op_device_alloc(cm_runtime *rt, uint64_t nbytes, cm_address *out)
{
    const cm_emulated_range *range;
    if (nbytes == 0) {
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
    uint64_t start = address_of(range->host);
    const cm_emulated_range *other =
        range_touched(&emulated->memory, start, end - start);
    if (other != NULL && other->kind != CM_EMULATED_FREED) {
        return CM_CUDA_ALREADY_REGISTERED;
    }
    if (!cm_emulated_pages_are_mapped(start, end,
                                      (range->flags & CM_REGISTER_READ_ONLY) == 0)) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (!cm_emulated_pages_map(end - start, 0, &range->user)) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    range->address = address_of(range->user.start);
    return range_insert(emulated, range) ? 0 : CM_CUDA_OUT_OF_MEMORY;
}

/* Registers whole pages, as the driver does. */
int32_t
cm_emulated_op_host_register(cm_runtime *rt, void *host, uint64_t nbytes,
                             unsigned flags)
{
    uint64_t page = cm_page_nbytes();
    uint64_t exact = address_of(host);
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
    range->device = cm_emulated_self(rt)->device;
    range->flags = flags;
    range->host = (unsigned char *)host - (exact & (page - 1));
    range->bytes = range->host;
    range->nbytes = end - (exact & ~(page - 1));
    range->registered = exact;
    int32_t code = register_pages(cm_emulated_of(rt), range, end);
    if (code != 0) {
        range_free(range);
    }
    return code;
}

/* Blocks: while copies of it are queued. */
int32_t
cm_emulated_op_host_unregister(cm_runtime *rt, void *host)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    uint64_t address = address_of(host);
    if (host == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    for (;;) {
        cm_emulated_range *range =
            range_find(&emulated->memory, CM_EMULATED_REGISTERED, address, 1);
        if (range == NULL || range->registered != address) {
            return CM_CUDA_NOT_REGISTERED;
        }
        if (range->waiting == 0) {
            range_retire(emulated, range);
            return 0;
        }
        cm_cond_wait(&emulated->changed, &emulated->lock);
    }
}

/* ---- what is known of an address ------------------------------------------------- */

int32_t
cm_emulated_op_host_device_address(cm_runtime *rt, void *host, cm_address *out)
{
    cm_emulated_place place;
    if (cm_emulated_find(cm_emulated_of(rt), address_of(host), 1, &place)
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
    cm_emulated_thread *self = cm_emulated_self(rt);
    cm_emulated_place place;
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
    cm_emulated_place place;
    if (cm_emulated_find(cm_emulated_of(rt), address, 1, &place)
        != CM_EMULATED_INSIDE) {
        return CM_CUDA_INVALID_VALUE;
    }
    bool may = (place.access >> cm_emulated_self(rt)->device & 1) != 0;
    *out = may ? CM_ACCESS_READ_WRITE : 0;
    return 0;
}

int32_t
cm_emulated_op_memory_info(cm_runtime *rt, uint64_t *free_nbytes,
                           uint64_t *total_nbytes)
{
    const cm_emulated *emulated = cm_emulated_of(rt);
    int device = cm_emulated_self(rt)->device;
    *total_nbytes = emulated->config.memory_nbytes;
    *free_nbytes = *total_nbytes - emulated->memory.used_nbytes[device];
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
    cm_emulated_thread *self = cm_emulated_self(rt);
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
    const cm_emulated_range *range =
        range_find(&emulated->memory, CM_EMULATED_MANAGED, job->address, job->nbytes);
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
    int of_stream;
    CM_TRY_CODE(cm_emulated_op_stream_get_device(rt, stream, &of_stream));
    if (device < CM_HOST_LOCATION || device >= rt->device_count) {
        return CM_CUDA_INVALID_DEVICE;
    }
    const cm_emulated_range *range =
        range_find(&emulated->memory, CM_EMULATED_MANAGED, address, nbytes);
    if (range == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    set_pages(range->wished, range, address, nbytes, device);
    prefetch job = {{.run = prefetch_run}, address, nbytes, device};
    return cm_emulated_submit(rt, stream, &job.base, sizeof(job), false);
}

int32_t
cm_emulated_op_prefetch_location(cm_runtime *rt, cm_address address, uint64_t nbytes,
                                 int *out)
{
    size_t count;
    const cm_emulated_range *range =
        range_find(&cm_emulated_of(rt)->memory, CM_EMULATED_MANAGED, address, nbytes);
    if (range == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    const signed char *pages =
        find_pages(range->wished, range, address, nbytes, &count);
    *out = memcmp(pages, pages + 1, count - 1) == 0 ? pages[0] : CM_NO_LOCATION;
    return 0;
}

cm_status
cm_emulated_host_pages(cm_runtime *rt, cm_address address, uint64_t nbytes,
                       uint64_t *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    size_t count = 0;
    cm_mutex_lock(&emulated->lock);
    const cm_emulated_range *range =
        range_find(&emulated->memory, CM_EMULATED_MANAGED, address, nbytes);
    const signed char *pages =
        range != NULL ? find_pages(range->resident, range, address, nbytes, &count)
                      : NULL;
    *out = 0;
    for (size_t i = 0; i < count; i++) {
        *out += pages[i] == CM_HOST_LOCATION;
    }
    cm_mutex_unlock(&emulated->lock);
    return cm_fail(range != NULL ? CM_OK : CM_CUDA_INVALID_VALUE, address);
}

/* ---- device memory mapped on demand ---------------------------------------------- */

/* A reserved range is two mappings of the host's without access; physical memory is
 * bytes put into the second of them, so that neighbours are one run of bytes and one
 * piece at two places shows the same ones. */

static bool
is_granular(uint64_t n)
{
    return (n & (CM_EMULATED_GRANULARITY - 1)) == 0;
}

/* The mappings under a stretch of addresses, if it covers them to their ends. */
static bool
find_whole(const cm_emulated *emulated, cm_address address, uint64_t nbytes,
           cm_emulated_place *out)
{
    if (nbytes == 0
        || cm_emulated_find(emulated, address, nbytes, out) != CM_EMULATED_INSIDE
        || out->range->kind != CM_EMULATED_VIRTUAL) {
        return false;
    }
    uint64_t end = out->offset + nbytes;
    const mapped_memory *last = mapping_above(out->range, end - 1);
    return mapping_above(out->range, out->offset)->offset == out->offset
           && last->offset + last->nbytes == end;
}

/* Free it if neither a handle nor a place is left; until then it counts against the
 * device's size. */
static void
settle(cm_emulated_memory *memory, physical_memory *physical)
{
    if (physical->is_released && physical->places == 0) {
        (void)munmap(physical->bytes, physical->nbytes);
        memory->used_nbytes[physical->device] -= physical->nbytes;
        memory->live_nbytes -= physical->nbytes;
        memory->physical_count--;
        free(physical);
    }
}

int32_t
cm_emulated_op_physical_granularity(cm_runtime *rt, int device, unsigned flags,
                                    uint64_t *out)
{
    if (!cm_emulated_is_device(rt, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    if ((flags & ~(unsigned)PHYSICAL_FLAGS) != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    *out = CM_EMULATED_GRANULARITY;
    return 0;
}

int32_t
cm_emulated_op_physical_create(cm_runtime *rt, uint64_t nbytes, int device,
                               unsigned flags, uint64_t *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_emulated_memory *memory = &emulated->memory;
    if (!cm_emulated_is_device(rt, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    CM_TRY_CODE(emulated->streams.faults[device]);
    if ((flags & ~(unsigned)PHYSICAL_FLAGS) != 0 || nbytes == 0
        || !is_granular(nbytes)) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (nbytes > emulated->config.memory_nbytes - memory->used_nbytes[device]) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    physical_memory *physical = calloc(1, sizeof(*physical));
    unsigned char *bytes = physical != NULL ? cm_emulated_bytes_new(nbytes) : NULL;
    uint64_t handle = 0x50000000 + 8 * memory->next_physical;
    if (bytes == NULL || !cm_emulated_table_add(&memory->physicals, handle, physical)) {
        if (bytes != NULL) {
            (void)munmap(bytes, nbytes);
        }
        free(physical);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *physical = (physical_memory){.device = device, .nbytes = nbytes, .bytes = bytes};
    memory->next_physical++;
    memory->used_nbytes[device] += nbytes;
    memory->live_nbytes += nbytes;
    memory->physical_count++;
    *out = handle;
    return 0;
}

int32_t
cm_emulated_op_physical_release(cm_runtime *rt, uint64_t handle)
{
    cm_emulated_memory *memory = &cm_emulated_of(rt)->memory;
    physical_memory *physical = cm_emulated_table_remove(&memory->physicals, handle);
    if (physical == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    physical->is_released = true;
    settle(memory, physical);
    return 0;
}

int32_t
cm_emulated_op_address_reserve(cm_runtime *rt, uint64_t nbytes, cm_address *out)
{
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
    bool good = cm_emulated_pages_map(with_slack, 0, &range->user)
                && cm_emulated_pages_map(nbytes, 0, &range->alias);
    range->bytes = range->alias.start;
    range->address = (address_of(range->user.start) + CM_EMULATED_GRANULARITY - 1)
                     & ~(CM_EMULATED_GRANULARITY - 1);
    if (!good || !range_insert(cm_emulated_of(rt), range)) {
        range_free(range);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *out = range->address;
    return 0;
}

int32_t
cm_emulated_op_address_free(cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    cm_emulated_memory *memory = &cm_emulated_of(rt)->memory;
    cm_emulated_range *range = range_find(memory, CM_EMULATED_VIRTUAL, address, nbytes);
    if (range == NULL || range->address != address || range->nbytes != nbytes
        || range->mappings.count != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    range_retire(cm_emulated_of(rt), range);
    return 0;
}

int32_t
cm_emulated_op_address_map(cm_runtime *rt, cm_address address, uint64_t nbytes,
                           uint64_t handle)
{
    cm_emulated_memory *memory = &cm_emulated_of(rt)->memory;
    physical_memory *physical = cm_emulated_table_find(&memory->physicals, handle);
    cm_emulated_range *range = range_find(memory, CM_EMULATED_VIRTUAL, address, nbytes);
    if (physical == NULL || range == NULL || !is_granular(address)
        || !is_granular(nbytes)) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (nbytes != physical->nbytes) {
        return CM_CUDA_NOT_SUPPORTED; /* part of a handle, as on a real device */
    }
    uint64_t offset = address - range->address;
    uint64_t end = offset + nbytes;
    const mapped_memory *next = mapping_above(range, offset);
    if (next != NULL && next->offset < end) {
        return CM_CUDA_INVALID_VALUE; /* something is there */
    }
    mapped_memory *made = calloc(1, sizeof(*made));
    if (made == NULL || !cm_emulated_table_add(&range->mappings, end, made)) {
        free(made);
        return CM_CUDA_OUT_OF_MEMORY;
    }
    if (!cm_emulated_bytes_map(physical->bytes, nbytes, range->bytes + offset)) {
        free(cm_emulated_table_remove(&range->mappings, end));
        return CM_CUDA_OUT_OF_MEMORY;
    }
    made->offset = offset;
    made->nbytes = nbytes;
    made->physical = physical;
    made->serial = ++memory->serial;
    memory->mapping_count++;
    physical->places++;
    return 0;
}

/* Unmap [offset, end) of the range, all of it mapped, once no work is there, which
 * fails for it. */
static void
unmap(cm_emulated *emulated, cm_emulated_range *range, uint64_t offset, uint64_t end)
{
    cm_emulated_memory *memory = &emulated->memory;
    for (EACH_MAPPING(range, offset, end, each)) {
        each->is_leaving = true;
    }
    /* While we wait others may map and unmap, but nothing where we have yet to come. */
    while (offset < end) {
        mapped_memory *gone = mapping_above(range, offset);
        while (gone->pins != 0) {
            cm_cond_wait(&emulated->changed, &emulated->lock);
        }
        cm_emulated_pages_kill(range->bytes + offset, gone->nbytes);
        offset += gone->nbytes;
        (void)cm_emulated_table_remove(&range->mappings, offset);
        memory->mapping_count--;
        gone->physical->places--;
        gone->physical->is_closed = gone->physical->places > 0;
        settle(memory, gone->physical);
        free(gone);
    }
}

int32_t
cm_emulated_op_address_unmap(cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    cm_emulated_place place;
    if (!find_whole(cm_emulated_of(rt), address, nbytes, &place)) {
        return CM_CUDA_INVALID_VALUE;
    }
    unmap(cm_emulated_of(rt), place.range, place.offset, place.offset + nbytes);
    return 0;
}

int32_t
cm_emulated_op_address_set_access(cm_runtime *rt, cm_address address, uint64_t nbytes,
                                  const int *devices, int device_count)
{
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
    cm_emulated_place place;
    if (!find_whole(cm_emulated_of(rt), address, nbytes, &place)) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (!cm_emulated_bytes_show(place.bytes, nbytes)) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    for (EACH_MAPPING(place.range, place.offset, place.offset + nbytes, each)) {
        bool adds = each->access != 0 && (mask & ~each->access) != 0;
        if (adds && each->physical->is_closed) {
            return CM_CUDA_INVALID_VALUE;
        }
        each->access |= mask;
    }
    return 0;
}

/* ---- the end of a device and of everything --------------------------------------- */

/* Unmap one mapping of the device in any range; false: there is none. */
static bool
unmap_one(cm_emulated *emulated, int device)
{
    const cm_emulated_table *ranges = &emulated->memory.ranges;
    for (size_t i = 0; i < ranges->count; i++) {
        cm_emulated_range *range = ranges->entries[i].object;
        for (size_t k = 0; k < range->mappings.count; k++) {
            const mapped_memory *each = range->mappings.entries[k].object;
            if (each->physical->device == device && !each->is_leaving) {
                unmap(emulated, range, each->offset, each->offset + each->nbytes);
                return true;
            }
        }
    }
    return false;
}

/* Drop what the device has mapped on demand, wherever. */
static void
reset_virtual(cm_emulated *emulated, int device)
{
    cm_emulated_memory *memory = &emulated->memory;
    while (unmap_one(emulated, device)) {
    }
    cm_emulated_table *physicals = &memory->physicals;
    for (size_t i = physicals->count; i-- > 0;) {
        physical_memory *physical = physicals->entries[i].object;
        if (physical->device == device) {
            (void)cm_emulated_table_remove(physicals, physicals->entries[i].key);
            physical->is_released = true;
            settle(memory, physical);
        }
    }
}

void
cm_emulated_memory_reset(cm_emulated *emulated, int device)
{
    cm_emulated_memory *memory = &emulated->memory;
    reset_virtual(emulated, device);
    memory->guests[device] = 0;
    for (int i = 0; i < CM_MAX_DEVICES; i++) {
        memory->guests[i] &= ~(UINT64_C(1) << device);
    }
    for (size_t i = 0; i < memory->ranges.count;) {
        cm_emulated_range *range = memory->ranges.entries[i++].object;
        if (range->device == device) {
            range_retire(emulated, range);
            i = 0; /* waiting for pins lets others change the table */
        }
    }
}

void
cm_emulated_memory_fini(cm_emulated *emulated)
{
    cm_emulated_memory *memory = &emulated->memory;
    for (int device = 0; device < emulated->base.device_count; device++) {
        reset_virtual(emulated, device);
    }
    while (memory->ranges.count != 0) {
        cm_emulated_range *range = memory->ranges.entries[0].object;
        take_out(memory, range);
        range_free(range);
    }
    cm_emulated_table_fini(&memory->ranges);
    cm_emulated_table_fini(&memory->physicals);
}
