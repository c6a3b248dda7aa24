/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps the memory of the emulated device.
 *
 * Ranges
 * ------
 * Each allocation and registration is a range (cm_emulated_range). Its first byte has
 * up to three addresses:
 *
 *   address   its address for devices
 *   host      its address for the host; NULL for device memory
 *   bytes     where the emulator keeps it
 *
 * Device memory has an `address` in a mapping without access (`user`), so that a host
 * that touches it crashes, and its `bytes` in another (`alias`). Registered memory has
 * its bytes where the host has them, and an address of its own for devices.
 * Devices see write-combined memory at another address than the host, too. A range
 * whose host and device addresses differ has two entries in the table `ranges`. The key
 * of one is the address at which the range ends for the host, and the key of the other
 * is the address at which it ends for devices.
 *
 * Freed ranges
 * ------------
 * A freed range becomes untouchable at once, but its addresses stay reserved for a
 * while (bury()). At most 256 ranges or 64 GiB of addresses are kept, and the oldest go
 * first. A copy that comes too late then finds a FREED range and fails with code 700.
 * Otherwise it might find other memory at these addresses and silently overwrite that.
 *
 * Freeing waits until executing work has finished with the range (`user_count`).
 * Unregistering also waits for copies that are queued (`waiting`), as the driver does.
 *
 * Mapped memory
 * -------------
 * Reserved addresses are a VIRTUAL range. Physical memory (cm_emulated_physical) has
 * bytes of its own. These are mapped a second time into the range's `alias`, so that
 * neighbours form one run of bytes. Each mapping is a range in the table `mapped` and
 * gets a new `serial`. Work notes the newest serial when it is queued (its stamp). If
 * the work then finds a mapping with a later serial, the work was meant for an earlier
 * mapping at the same place, and fails.
 *
 * Example: chunk 1 is mapped at X (serial 5), a copy to X is queued (stamp 5) behind a
 * shut gate, chunk 1 is unmapped, and chunk 2 is mapped at X (serial 6). When the gate
 * opens, the copy fails with code 700 instead of writing to chunk 2. */
#include "runtime/emulated/private.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked_math.h"
#include "base/machine.h"

enum {
    HOST_FACTOR = 4, /* host and managed memory get this many times a device's */
    HOST_FLAGS = CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_MAPPED
        | CM_HOST_ALLOC_WRITE_COMBINED,
    REGISTER_FLAGS = CM_REGISTER_PORTABLE | CM_REGISTER_MAPPED | CM_REGISTER_READ_ONLY,
    DISCARDED = 0xdb, /* discarded bytes hold this */
};

/* How many freed addresses and ranges are kept at most. ThreadSanitizer leaves a
 * process few addresses. */
#define FREED_NBYTES (UINT64_C(64) << 30)
#define FREED_COUNT 256

/* Physical memory of a device. It has no address of its own. */
struct cm_emulated_physical {
    int device; /* first, as tables expect */
    /* The handle is gone; the memory is freed once it is not mapped. */
    bool is_released;
    bool is_mapped;
    uint64_t nbytes;
    unsigned char *bytes; /* owned */
};

static uint64_t
address_of(const void *pointer)
{
    return (uint64_t)(uintptr_t)pointer;
}

/* ---- the tables of ranges -------------------------------------------------------- */

/* A range whose address for devices differs from that for the host is in the table
 * twice. */
static bool
is_twice(const cm_emulated_range *range)
{
    return range->host != NULL && address_of(range->host) != range->address;
}

/* Return the address at which the range of an entry begins. Like the entry's key, it is
 * an address for the host or one for devices. */
static uint64_t
start_at(const cm_emulated_table *table, size_t index)
{
    const cm_emulated_range *range = table->entries[index].object;
    return table->entries[index].key - range->nbytes;
}

/* True if the range of that entry has a byte in [address, address + nbytes). */
static bool
is_touched(const cm_emulated_table *table, size_t index, uint64_t address,
           uint64_t nbytes)
{
    return index < table->count
           && (start_at(table, index) <= address
               || start_at(table, index) - address < nbytes);
}

/* The head of a `for` over all entries whose range has a byte in [address, address +
 * nbytes). */
#define EACH_TOUCHED(table, address, nbytes, index)                                    \
    size_t index = cm_emulated_table_above(table, address);                            \
    is_touched(table, index, address, nbytes);                                         \
    index++

/* Return the first range that has a byte in [address, address + nbytes), or NULL. */
static cm_emulated_range *
range_touched(const cm_emulated_table *table, uint64_t address, uint64_t nbytes)
{
    size_t index = cm_emulated_table_above(table, address);
    return is_touched(table, index, address, nbytes) ? table->entries[index].object
                                                     : NULL;
}

/* Return the range of that kind in which [address, address + nbytes) lies, or NULL. */
static cm_emulated_range *
range_find(const cm_emulated_memory *memory, cm_emulated_kind kind, uint64_t address,
           uint64_t nbytes)
{
    size_t index = cm_emulated_table_above(&memory->ranges, address);
    cm_emulated_range *range = range_touched(&memory->ranges, address, 1);
    return nbytes != 0 && range != NULL && range->kind == kind
                   && nbytes <= memory->ranges.entries[index].key - address
               ? range
               : NULL;
}

/* Free what a range owns. */
static void
drop_parts(const cm_emulated_range *range)
{
    /* If there is no such mapping, munmap() fails and does nothing. */
    (void)munmap(range->user.base, range->user.nbytes);
    (void)munmap(range->alias.base, range->alias.nbytes);
    free(range->pages);
}

/* Take the range out of the table and free it. */
static void
range_free(cm_emulated_memory *memory, cm_emulated_range *range)
{
    memory->counts[range->kind]--;
    (void)cm_emulated_table_remove(&memory->ranges, range->address + range->nbytes);
    if (is_twice(range)) {
        (void)cm_emulated_table_remove(&memory->ranges,
                                       address_of(range->host) + range->nbytes);
    }
    drop_parts(range);
    free(range);
}

static void range_retire(cm_emulated *emulated, cm_emulated_range *range);

/* Forget registrations at addresses where memory was just mapped. Their owner must have
 * unmapped the registered memory without unregistering it. */
static void
drop_stale(cm_emulated *emulated, const cm_emulated_pages *fresh)
{
    const cm_emulated_table *ranges = &emulated->memory.ranges;
    uint64_t start = address_of(fresh->base);
    cm_emulated_range *stale;
    while ((stale = range_touched(ranges, start, fresh->nbytes)) != NULL
           && stale->kind == CM_EMULATED_REGISTERED) {
        range_retire(emulated, stale);
    }
}

/* Make a range from the draft. `is_good` says whether its memory could be allocated. If
 * no range is made, this frees what the draft owns. */
static int32_t
range_insert(cm_emulated *emulated, const cm_emulated_range *draft, bool is_good)
{
    cm_emulated_memory *memory = &emulated->memory;
    cm_emulated_table *ranges = &memory->ranges;
    uint64_t end = draft->address + draft->nbytes;
    cm_emulated_range *range = is_good ? malloc(sizeof(*range)) : NULL;
    if (range != NULL) {
        *range = *draft;
        drop_stale(emulated, &range->user);
        drop_stale(emulated, &range->alias);
        if (cm_emulated_table_add(ranges, end, range)) {
            if (!is_twice(range)
                || cm_emulated_table_add(
                    ranges, address_of(range->host) + range->nbytes, range)) {
                memory->counts[range->kind]++;
                return 0;
            }
            (void)cm_emulated_table_remove(ranges, end);
        }
    }
    drop_parts(draft);
    free(range);
    return CM_CUDA_OUT_OF_MEMORY;
}

/* Keep a freed range, whose bytes are gone, for a while. The oldest freed ranges are
 * given up, unless a copy still holds them. */
static void
bury(cm_emulated_memory *memory, cm_emulated_range *range)
{
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
        range_free(memory, oldest);
    }
}

/* End a range: let no more work in, wait for work that is executing, and make the bytes
 * untouchable. Registered bytes belong to the code that registered them, so these stay,
 * and only the host's address is forgotten. */
static void
range_retire(cm_emulated *emulated, cm_emulated_range *range)
{
    cm_emulated_memory *memory = &emulated->memory;
    cm_emulated_table *ranges = &memory->ranges;
    if (range->kind == CM_EMULATED_REGISTERED) {
        (void)cm_emulated_table_remove(ranges, address_of(range->host) + range->nbytes);
        range->host = NULL;
    }
    memory->counts[range->kind]--;
    memory->counts[CM_EMULATED_FREED]++;
    range->kind = CM_EMULATED_FREED;
    range->device = -1;
    while (range->user_count != 0) {
        cm_cond_wait(&emulated->changed, &emulated->lock);
    }
    if (range->used_nbytes != NULL) {
        *range->used_nbytes -= range->nbytes;
    }
    cm_emulated_pages_kill(range->alias.base, range->alias.nbytes);
    cm_emulated_pages_kill(range->user.base, range->user.nbytes);
    /* Callers may also know the address of the bytes themselves
     * (cm_runtime_host_alias()). The range is entered under that address too, so that
     * a late use of it finds a freed range. */
    if (range->host == NULL && range->alias.base != NULL
        && cm_emulated_table_add(ranges, address_of(range->alias.start) + range->nbytes,
                                 range)) {
        range->host = range->alias.start;
    }
    bury(memory, range);
}

/* ---- looking up and pinning ------------------------------------------------------ */

/* Return the devices that may touch the range, as bits. */
static uint64_t
access_to(const cm_emulated_memory *memory, const cm_emulated_range *range)
{
    if (range->kind != CM_EMULATED_DEVICE) {
        return UINT64_MAX;
    }
    return range->physical != NULL
               ? range->access
               : memory->peers[range->device] | UINT64_C(1) << range->device;
}

cm_emulated_found
cm_emulated_find(const cm_emulated *emulated, uint64_t address, uint64_t nbytes,
                 cm_emulated_place *out)
{
    const cm_emulated_memory *memory = &emulated->memory;
    const cm_emulated_table *table = &memory->ranges;
    uint64_t most = nbytes + (nbytes == 0);
    uint64_t end;
    if (address == 0 || !cm_add_u64(address, most, &end)) {
        return CM_EMULATED_BROKEN;
    }
    cm_emulated_range *range = range_touched(table, address, most);
    if (range == NULL) {
        return CM_EMULATED_UNKNOWN;
    }
    if (range->kind == CM_EMULATED_VIRTUAL) {
        table = &memory->mapped;
        range = range_touched(table, address, most);
    }
    size_t first = cm_emulated_table_above(table, address);
    if (range == NULL || start_at(table, first) > address) {
        return CM_EMULATED_BROKEN;
    }
    uint64_t offset = address - start_at(table, first);
    *out = (cm_emulated_place){
        .range = range,
        .table = table,
        .nbytes = most,
        .kind = range->kind,
        .device = range->device,
        .access = UINT64_MAX,
        .address = range->address + offset,
        .host = range->host != NULL ? range->host + offset : NULL,
        .bytes = range->bytes + offset,
        .by_device = address == range->address + offset,
    };
    /* Mappings side by side count as one range. */
    uint64_t reached = address;
    for (EACH_TOUCHED(table, address, most, i)) {
        const cm_emulated_range *each = table->entries[i].object;
        if (each->kind == CM_EMULATED_FREED || start_at(table, i) > reached
            || (i != first && each->physical == NULL)) {
            return CM_EMULATED_BROKEN;
        }
        reached = table->entries[i].key;
        out->access &= access_to(memory, each);
        out->serial = each->serial > out->serial ? each->serial : out->serial;
    }
    return reached >= end ? CM_EMULATED_INSIDE : CM_EMULATED_BROKEN;
}

/* The head of a `for` over all pages of a managed range that have a byte in [address,
 * address + nbytes). */
#define EACH_PAGE(range, address, nbytes, page)                                        \
    cm_emulated_page *page = page_at(range, address),                                  \
                     *page##_last = page_at(range, (address) + (nbytes) - 1);          \
    page <= page##_last;                                                               \
    page++

static cm_emulated_page *
page_at(const cm_emulated_range *range, cm_address address)
{
    return &range->pages[(address - address_of(range->alias.base)) / cm_page_nbytes()];
}

/* Move pages to a location. A page with the advice "read mostly" gets a copy there, and
 * still counts as being on the host. */
static void
move_pages(const cm_emulated_range *range, cm_address address, uint64_t nbytes,
           int location)
{
    for (EACH_PAGE(range, address, nbytes, page)) {
        if (!page->read_mostly || page->resident != CM_HOST_LOCATION) {
            page->resident = (signed char)location;
        }
    }
}

/* Keep the memory at one end of the job alive until release_end(). */
static int32_t
hold_end(cm_emulated *emulated, const cm_emulated_job *job, const cm_emulated_end *end,
         cm_emulated_place *out)
{
    cm_emulated_place place;
    int device = job->device;
    if (end->is_plain || end->nbytes == 0) {
        *out = (cm_emulated_place){.kind = CM_EMULATED_HOST,
                                   .bytes = (unsigned char *)(uintptr_t)end->address};
        return 0;
    }
    if (cm_emulated_find(emulated, end->address, end->nbytes, &place)
        != CM_EMULATED_INSIDE) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    bool good = device == CM_EMULATED_ANY
                    ? place.access != 0
                    : place.by_device && (place.access >> device & 1) != 0;
    if (!good || place.serial > job->stamp) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    for (EACH_TOUCHED(place.table, place.address, place.nbytes, i)) {
        ((cm_emulated_range *)place.table->entries[i].object)->user_count++;
    }
    if (place.kind == CM_EMULATED_MANAGED && device != CM_EMULATED_ANY) {
        move_pages(place.range, end->address, end->nbytes, device);
    }
    *out = place;
    return 0;
}

/* Let go of the memory that hold_end() kept. Returns `code`, or CM_CUDA_ILLEGAL_ADDRESS
 * if `code` is 0 and the memory was unmapped during the work. */
static int32_t
release_end(cm_emulated *emulated, const cm_emulated_place *place, int32_t code)
{
    if (place->range == NULL) {
        return code;
    }
    for (EACH_TOUCHED(place->table, place->address, place->nbytes, i)) {
        cm_emulated_range *each = place->table->entries[i].object;
        bool is_unmapped = each->kind == CM_EMULATED_FREED && each->physical != NULL;
        each->user_count--;
        code = code == 0 && is_unmapped ? CM_CUDA_ILLEGAL_ADDRESS : code;
    }
    cm_cond_signal_all(&emulated->changed);
    return code;
}

int32_t
cm_emulated_touch(cm_emulated *emulated, cm_emulated_job *job)
{
    cm_emulated_place to, from;
    CM_TRY_CODE(hold_end(emulated, job, &job->dst, &to));
    int32_t code = hold_end(emulated, job, &job->src, &from);
    if (code == 0) {
        cm_mutex_unlock(&emulated->lock);
        job->touch(job, to.bytes, from.bytes);
        cm_mutex_lock(&emulated->lock);
        code = release_end(emulated, &from, code);
    }
    return release_end(emulated, &to, code);
}

/* ---- allocation ------------------------------------------------------------------ */

/* Make the pages of a managed range, one for each page of its mapping. */
static bool
init_pages(cm_emulated_range *range)
{
    size_t count = range->alias.nbytes / cm_page_nbytes();
    range->pages = malloc(count * sizeof(*range->pages));
    for (size_t i = 0; range->pages != NULL && i < count; i++) {
        range->pages[i] = (cm_emulated_page){.resident = CM_HOST_LOCATION,
                                             .last_prefetch = CM_NO_LOCATION,
                                             .preferred = CM_NO_LOCATION};
    }
    return range->pages != NULL;
}

static bool
range_map(cm_emulated_range *range)
{
    /* A forked child shares the driver's host memory with its parent, and does not have
     * managed memory. */
    int sharing = range->kind == CM_EMULATED_HOST ? MAP_SHARED : MAP_PRIVATE;
    bool is_hidden = range->kind == CM_EMULATED_DEVICE;
    /* Devices see write-combined memory at another address, as on some real
     * machines. */
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
    (void)madvise(range->alias.base, range->alias.nbytes, MADV_DONTFORK);
    return init_pages(range);
}

static int32_t
alloc(cm_emulated *emulated, cm_emulated_kind kind, unsigned flags, uint64_t nbytes,
      cm_emulated_range *out)
{
    cm_emulated_memory *memory = &emulated->memory;
    bool on_device = kind == CM_EMULATED_DEVICE;
    int device = cm_emulated_self(emulated)->device;
    uint64_t *used =
        on_device ? &memory->used_nbytes[device] : &memory->host_used_nbytes;
    uint64_t limit = emulated->config.memory_nbytes;
    if (!on_device && !cm_mul_u64(limit, HOST_FACTOR, &limit)) {
        limit = UINT64_MAX;
    }
    if (nbytes > limit - *used) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *out = (cm_emulated_range){
        .kind = kind,
        .device = device,
        .flags = flags,
        .nbytes = nbytes,
        .used_nbytes = used,
    };
    *used += nbytes;
    int32_t code = range_insert(emulated, out, range_map(out));
    *used -= code != 0 ? nbytes : 0;
    return code;
}

/* Free the range that begins at `address`, if its kind is in the mask of bits 1 <<
 * kind. */
static int32_t
release(cm_emulated *emulated, uint64_t address, unsigned kinds)
{
    if (address == 0) {
        return 0; /* freeing NULL is allowed */
    }
    cm_emulated_range *range = range_touched(&emulated->memory.ranges, address, 1);
    if (range == NULL || (kinds & (1u << range->kind)) == 0
        || address
               != (range->host != NULL ? address_of(range->host) : range->address)) {
        return CM_CUDA_INVALID_VALUE;
    }
    range_retire(emulated, range);
    return 0;
}

int32_t
cm_emulated_op_host_alloc(cm_emulated *emulated, uint64_t nbytes, unsigned flags,
                          void **out)
{
    if ((flags & ~(unsigned)HOST_FLAGS) != 0 || nbytes == 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_range range;
    CM_TRY_CODE(alloc(emulated, CM_EMULATED_HOST, flags, nbytes, &range));
    *out = range.host;
    return 0;
}

int32_t
cm_emulated_op_host_free(cm_emulated *emulated, void *host)
{
    return release(emulated, address_of(host), 1u << CM_EMULATED_HOST);
}

int32_t
cm_emulated_op_device_alloc(cm_emulated *emulated, uint64_t nbytes, cm_address *out)
{
    cm_emulated_range range;
    if (nbytes == 0) {
        *out = 0;
        return 0;
    }
    CM_TRY_CODE(alloc(emulated, CM_EMULATED_DEVICE, 0, nbytes, &range));
    *out = range.address;
    return 0;
}

int32_t
cm_emulated_op_managed_alloc(cm_emulated *emulated, uint64_t nbytes, unsigned flags,
                             cm_address *out)
{
    if (nbytes == 0 || (flags != CM_MANAGED_GLOBAL && flags != CM_MANAGED_HOST)) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_range range;
    CM_TRY_CODE(alloc(emulated, CM_EMULATED_MANAGED, flags, nbytes, &range));
    *out = range.address;
    return 0;
}

int32_t
cm_emulated_op_device_free(cm_emulated *emulated, cm_address address)
{
    return release(emulated, address,
                   (1u << CM_EMULATED_DEVICE) | (1u << CM_EMULATED_MANAGED));
}

/* ---- registered memory ----------------------------------------------------------- */

/* Register whole pages, as the driver does. */
int32_t
cm_emulated_op_host_register(cm_emulated *emulated, void *host, uint64_t nbytes,
                             unsigned flags)
{
    uint64_t page = cm_page_nbytes();
    uint64_t exact = address_of(host);
    uint64_t start = exact & ~(page - 1);
    uint64_t end;
    if ((flags & ~(unsigned)REGISTER_FLAGS) != 0 || host == NULL || nbytes == 0
        || !cm_add_u64(exact, nbytes, &end) || !cm_round_up_u64(end, page, &end)) {
        return CM_CUDA_INVALID_VALUE;
    }
    const cm_emulated_range *other =
        range_touched(&emulated->memory.ranges, start, end - start);
    if (other != NULL && other->kind != CM_EMULATED_FREED) {
        return CM_CUDA_ALREADY_REGISTERED;
    }
    if (!cm_emulated_pages_are_mapped(start, end,
                                      (flags & CM_REGISTER_READ_ONLY) == 0)) {
        return CM_CUDA_INVALID_VALUE;
    }
    unsigned char *first = (unsigned char *)host - (exact - start);
    cm_emulated_range range = {
        .kind = CM_EMULATED_REGISTERED,
        .device = cm_emulated_self(emulated)->device,
        .flags = flags,
        .host = first,
        .bytes = first,
        .nbytes = end - start,
        .registered = exact,
    };
    bool is_good = cm_emulated_pages_map(range.nbytes, 0, &range.user);
    range.address = address_of(range.user.start);
    return range_insert(emulated, &range, is_good);
}

/* Blocks while copies of the memory are queued. */
int32_t
cm_emulated_op_host_unregister(cm_emulated *emulated, void *host)
{
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

/* ---- questions about an address -------------------------------------------------- */

int32_t
cm_emulated_op_host_device_address(cm_emulated *emulated, void *host, cm_address *out)
{
    cm_emulated_place place;
    if (cm_emulated_find(emulated, address_of(host), 1, &place) != CM_EMULATED_INSIDE
        || place.host != host
        || (place.kind != CM_EMULATED_HOST && place.kind != CM_EMULATED_REGISTERED)) {
        return CM_CUDA_INVALID_VALUE;
    }
    *out = place.address;
    return 0;
}

int32_t
cm_emulated_op_pointer_attributes(cm_emulated *emulated, cm_address address,
                                  cm_pointer_info *out)
{
    cm_emulated_place place;
    if (cm_emulated_find(emulated, address, 1, &place) != CM_EMULATED_INSIDE) {
        *out = (cm_pointer_info){
            .kind = CM_KIND_PAGEABLE,
            .device = -1,
            .host_address = (void *)(uintptr_t)address,
        };
        return 0;
    }
    bool in_reach = (place.access >> cm_emulated_self(emulated)->device & 1) != 0;
    *out = (cm_pointer_info){
        .kind =
            place.kind == CM_EMULATED_REGISTERED ? CM_KIND_PINNED : (cm_kind)place.kind,
        .device = place.device,
        .device_address = in_reach ? place.address : 0,
        .host_address = place.host,
    };
    return 0;
}

int32_t
cm_emulated_op_pointer_access(cm_emulated *emulated, cm_address address, int *out)
{
    cm_emulated_place place;
    if (cm_emulated_find(emulated, address, 1, &place) != CM_EMULATED_INSIDE) {
        return CM_CUDA_INVALID_VALUE;
    }
    bool may = (place.access >> cm_emulated_self(emulated)->device & 1) != 0;
    *out = may ? CM_ACCESS_READ_WRITE : 0;
    return 0;
}

int32_t
cm_emulated_op_memory_info(cm_emulated *emulated, uint64_t *free_nbytes,
                           uint64_t *total_nbytes)
{
    int device = cm_emulated_self(emulated)->device;
    *total_nbytes = emulated->config.memory_nbytes;
    *free_nbytes = *total_nbytes - emulated->memory.used_nbytes[device];
    return 0;
}

int32_t
cm_emulated_op_peer_can_access(cm_emulated *emulated, int device, int peer, int *out)
{
    if (!cm_emulated_is_device(emulated, device)
        || !cm_emulated_is_device(emulated, peer)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    *out = device != peer && !emulated->config.apart;
    return 0;
}

/* Let the current device use memory that is allocated on `peer`, but not memory that is
 * mapped there on demand. */
int32_t
cm_emulated_op_peer_enable(cm_emulated *emulated, int peer)
{
    cm_emulated_thread *self = cm_emulated_self(emulated);
    if (!cm_emulated_is_device(emulated, peer) || peer == self->device) {
        return CM_CUDA_INVALID_DEVICE;
    }
    if (emulated->config.apart) {
        return CM_CUDA_PEER_UNSUPPORTED;
    }
    uint64_t guest = UINT64_C(1) << self->device;
    uint64_t *peers = &emulated->memory.peers[peer];
    if ((*peers & guest) != 0) {
        return CM_CUDA_PEER_ENABLED;
    }
    *peers |= guest;
    return 0;
}

/* ---- managed memory: where its pages are, and the advice about them --------------- */

typedef struct page_work {
    cm_emulated_job base; /* first */
    cm_address address;
    uint64_t nbytes;
    int location;
    bool discards; /* discard the bytes; else the pages move to the location */
} page_work;

static cm_emulated_range *
find_managed(const cm_emulated *emulated, cm_address address, uint64_t nbytes)
{
    return range_find(&emulated->memory, CM_EMULATED_MANAGED, address, nbytes);
}

static int32_t
page_run(cm_emulated *emulated, cm_emulated_job *base)
{
    const page_work *job = (const page_work *)base;
    const cm_emulated_range *range = find_managed(emulated, job->address, job->nbytes);
    if (range == NULL) {
        return CM_CUDA_ILLEGAL_ADDRESS;
    }
    if (!job->discards) {
        move_pages(range, job->address, job->nbytes, job->location);
        return 0;
    }
    /* Discard whole pages, even those of which the call named only a part. Callers have
     * to allow for that. */
    uint64_t page_nbytes = cm_page_nbytes();
    for (EACH_PAGE(range, job->address, job->nbytes, page)) {
        uint64_t offset = (uint64_t)(page - range->pages) * page_nbytes;
        memset(range->alias.base + offset, DISCARDED, page_nbytes);
    }
    return 0;
}

/* Return 0 if a prefetch or an advice may name the location, else the code to fail
 * with. */
static int32_t
check_location(const cm_emulated *emulated, int location)
{
    bool in_turn = emulated->config.in_turn;
    bool exists = location == CM_HOST_LOCATION
                  || (cm_emulated_is_device(emulated, location) && !in_turn);
    if (location <= CM_NUMA_LOCATION(0)) {
        int node = CM_NUMA_LOCATION(location);
        if (emulated->base.driver_version < 12020) {
            return CM_CUDA_NOT_SUPPORTED;
        }
        exists = node < CM_NUMA_MAX_NODES && (cm_numa_read_nodes("") >> node & 1) != 0;
    }
    return exists ? 0 : CM_CUDA_INVALID_DEVICE;
}

static int32_t
submit_pages(cm_emulated *emulated, page_work job, uint64_t stream)
{
    bool capturing = false;
    CM_TRY_CODE(cm_emulated_op_stream_is_capturing(emulated, stream, &capturing));
    if (capturing) {
        return CM_CUDA_CAPTURE_UNSUPPORTED; /* a graph has no such node */
    }
    CM_TRY_CODE(check_location(emulated, job.location));
    if (emulated->config.in_turn) {
        return CM_CUDA_INVALID_DEVICE; /* the stream's device is the wrong one */
    }
    const cm_emulated_range *range = find_managed(emulated, job.address, job.nbytes);
    if (range == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (!job.discards) {
        for (EACH_PAGE(range, job.address, job.nbytes, page)) {
            page->last_prefetch = (signed char)job.location;
        }
    }
    job.base.run = page_run;
    return cm_emulated_submit(emulated, stream, &job.base, sizeof(job), false);
}

int32_t
cm_emulated_op_prefetch_async(cm_emulated *emulated, cm_address address,
                              uint64_t nbytes, int location, uint64_t stream)
{
    const page_work job = {.address = address, .nbytes = nbytes, .location = location};
    return submit_pages(emulated, job, stream);
}

static int32_t
submit_batch(cm_emulated *emulated, const cm_address *addresses, const uint64_t *nbytes,
             uint64_t count, page_work job, uint64_t stream)
{
    if (stream <= CM_STREAM_LEGACY || count == 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    for (uint64_t i = 0; i < count; i++) {
        job.address = addresses[i];
        job.nbytes = nbytes[i];
        CM_TRY_CODE(submit_pages(emulated, job, stream));
    }
    return 0;
}

int32_t
cm_emulated_op_prefetch_batch_async(cm_emulated *emulated, const cm_address *addresses,
                                    const uint64_t *nbytes, uint64_t count,
                                    int location, uint64_t stream)
{
    const page_work job = {.location = location};
    return submit_batch(emulated, addresses, nbytes, count, job, stream);
}

int32_t
cm_emulated_op_discard_batch_async(cm_emulated *emulated, const cm_address *addresses,
                                   const uint64_t *nbytes, uint64_t count,
                                   uint64_t stream)
{
    const page_work job = {.location = CM_HOST_LOCATION, .discards = true};
    return submit_batch(emulated, addresses, nbytes, count, job, stream);
}

int32_t
cm_emulated_op_advise(cm_emulated *emulated, cm_address address, uint64_t nbytes,
                      int advice, int location)
{
    const cm_emulated_range *range = find_managed(emulated, address, nbytes);
    if (range == NULL || advice < CM_ADVISE_READ_MOSTLY
        || advice > CM_ADVISE_NOT_ACCESSED_BY) {
        return CM_CUDA_INVALID_VALUE;
    }
    /* There are two kinds of advice for each attribute: one sets it, the next clears
     * it. */
    int attribute = (advice + 1) / 2;
    bool sets = advice % 2 != 0;
    if (advice == CM_ADVISE_PREFERRED || attribute == CM_RANGE_ACCESSED_BY) {
        CM_TRY_CODE(check_location(emulated, location));
    }
    if (attribute == CM_RANGE_ACCESSED_BY && location < CM_HOST_LOCATION) {
        return CM_CUDA_INVALID_DEVICE; /* a NUMA node accesses nothing */
    }
    uint64_t accessor = UINT64_C(1) << ((unsigned)(location + 1) & 63);
    for (EACH_PAGE(range, address, nbytes, page)) {
        switch (attribute) {
        case CM_RANGE_READ_MOSTLY:
            page->read_mostly = sets;
            break;
        case CM_RANGE_PREFERRED:
            page->preferred = (signed char)(sets ? location : CM_NO_LOCATION);
            break;
        default:
            page->accessed_by = (page->accessed_by & ~accessor) | (sets ? accessor : 0);
        }
    }
    return 0;
}

int32_t
cm_emulated_op_range_attribute(cm_emulated *emulated, cm_address address,
                               uint64_t nbytes, int attribute, int *out, int count)
{
    const cm_emulated_range *range = find_managed(emulated, address, nbytes);
    if (range == NULL || attribute < CM_RANGE_READ_MOSTLY
        || attribute > CM_RANGE_PREFETCHED || count < 1) {
        return CM_CUDA_INVALID_VALUE;
    }
    cm_emulated_page all = *page_at(range, address);
    for (EACH_PAGE(range, address, nbytes, page)) {
        all.read_mostly = all.read_mostly && page->read_mostly;
        all.accessed_by &= page->accessed_by;
        all.preferred =
            page->preferred == all.preferred ? all.preferred : CM_NO_LOCATION;
        all.last_prefetch = page->last_prefetch == all.last_prefetch ? all.last_prefetch
                                                                     : CM_NO_LOCATION;
    }
    switch (attribute) {
    case CM_RANGE_READ_MOSTLY:
        *out = all.read_mostly;
        break;
    case CM_RANGE_PREFERRED:
        *out = all.preferred;
        break;
    default:
        *out = all.last_prefetch;
    }
    int device = CM_HOST_LOCATION;
    for (int i = 0; attribute == CM_RANGE_ACCESSED_BY && i < count; i++) {
        while (device < emulated->base.device_count
               && (all.accessed_by >> (device + 1) & 1) == 0) {
            device++;
        }
        out[i] = device < emulated->base.device_count ? device++ : CM_NO_LOCATION;
    }
    return 0;
}

cm_status
cm_emulated_host_pages(cm_runtime *rt, cm_address address, uint64_t nbytes,
                       uint64_t *out)
{
    cm_emulated *emulated = cm_emulated_of(rt);
    cm_mutex_lock(&emulated->lock);
    const cm_emulated_range *range = find_managed(emulated, address, nbytes);
    *out = 0;
    if (range != NULL) {
        for (EACH_PAGE(range, address, nbytes, page)) {
            *out += page->resident == CM_HOST_LOCATION;
        }
    }
    cm_mutex_unlock(&emulated->lock);
    return cm_fail(range != NULL ? CM_OK : CM_CUDA_INVALID_VALUE, address);
}

/* ---- device memory mapped on demand ---------------------------------------------- */

/* A reserved range consists of two mappings of the host, both without access. Physical
 * memory consists of bytes that are mapped into the second of them, so that
 * neighbouring chunks form one run of bytes. */

/* Find what is mapped at [address, address + nbytes). Returns true if mappings cover
 * exactly these addresses. */
static bool
find_whole(const cm_emulated *emulated, cm_address address, uint64_t nbytes,
           cm_emulated_place *out)
{
    return nbytes != 0
           && cm_emulated_find(emulated, address, nbytes, out) == CM_EMULATED_INSIDE
           && out->range->physical != NULL && out->range->address == address
           && cm_emulated_table_find(out->table, address + nbytes) != NULL;
}

/* Free physical memory if it has neither a handle nor a mapping any more. Until then it
 * counts against the device's memory. */
static void
free_if_unused(cm_emulated_memory *memory, cm_emulated_physical *physical)
{
    if (physical->is_released && !physical->is_mapped) {
        (void)munmap(physical->bytes, physical->nbytes);
        memory->used_nbytes[physical->device] -= physical->nbytes;
        memory->physical_count--;
        free(physical);
    }
}

int32_t
cm_emulated_op_physical_granularity(cm_emulated *emulated, int device, unsigned flags,
                                    uint64_t *out)
{
    if (!cm_emulated_is_device(emulated, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    if ((flags & ~(unsigned)CM_PHYSICAL_RDMA) != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    *out = CM_EMULATED_GRANULARITY;
    return 0;
}

int32_t
cm_emulated_op_physical_create(cm_emulated *emulated, uint64_t nbytes, int device,
                               unsigned flags, uint64_t *out)
{
    cm_emulated_memory *memory = &emulated->memory;
    if (!cm_emulated_is_device(emulated, device)) {
        return CM_CUDA_INVALID_DEVICE;
    }
    CM_TRY_CODE(emulated->streams.faults[device]);
    if ((flags & ~(unsigned)CM_PHYSICAL_RDMA) != 0 || nbytes == 0
        || nbytes % CM_EMULATED_GRANULARITY != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (nbytes > emulated->config.memory_nbytes - memory->used_nbytes[device]) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    uint64_t handle = cm_emulated_new_handle(emulated);
    cm_emulated_physical *physical =
        cm_emulated_table_new(&memory->physicals, handle, sizeof(*physical));
    unsigned char *bytes = physical != NULL ? cm_emulated_bytes_new(nbytes) : NULL;
    if (bytes == NULL) {
        /* If there was no memory even for the object, this frees NULL. */
        free(cm_emulated_table_remove(&memory->physicals, handle));
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *physical =
        (cm_emulated_physical){.device = device, .nbytes = nbytes, .bytes = bytes};
    memory->used_nbytes[device] += nbytes;
    memory->physical_count++;
    *out = handle;
    return 0;
}

int32_t
cm_emulated_op_physical_release(cm_emulated *emulated, uint64_t handle)
{
    cm_emulated_memory *memory = &emulated->memory;
    cm_emulated_physical *physical =
        cm_emulated_table_remove(&memory->physicals, handle);
    if (physical == NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    physical->is_released = true;
    free_if_unused(memory, physical);
    return 0;
}

int32_t
cm_emulated_op_address_reserve(cm_emulated *emulated, uint64_t nbytes, cm_address *out)
{
    if (nbytes == 0 || nbytes % CM_EMULATED_GRANULARITY != 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    const uint64_t slack = CM_EMULATED_GRANULARITY - 1;
    cm_emulated_range range = {
        .kind = CM_EMULATED_VIRTUAL, .device = -1, .nbytes = nbytes};
    bool is_good = cm_emulated_pages_map(nbytes, 0, &range.alias)
                   && cm_emulated_pages_map(nbytes + slack, 0, &range.user);
    range.bytes = range.alias.start;
    range.address = (address_of(range.user.start) + slack) & ~slack;
    CM_TRY_CODE(range_insert(emulated, &range, is_good));
    *out = range.address;
    return 0;
}

int32_t
cm_emulated_op_address_free(cm_emulated *emulated, cm_address address, uint64_t nbytes)
{
    cm_emulated_memory *memory = &emulated->memory;
    cm_emulated_range *range = range_find(memory, CM_EMULATED_VIRTUAL, address, nbytes);
    if (range == NULL || range->address != address || range->nbytes != nbytes
        || range_touched(&memory->mapped, address, nbytes) != NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    range_retire(emulated, range);
    return 0;
}

int32_t
cm_emulated_op_address_map(cm_emulated *emulated, cm_address address, uint64_t nbytes,
                           uint64_t handle)
{
    cm_emulated_memory *memory = &emulated->memory;
    cm_emulated_physical *physical = cm_emulated_table_find(&memory->physicals, handle);
    const cm_emulated_range *in =
        range_find(memory, CM_EMULATED_VIRTUAL, address, nbytes);
    if (physical == NULL || in == NULL || address % CM_EMULATED_GRANULARITY != 0
        || nbytes % CM_EMULATED_GRANULARITY != 0
        || range_touched(&memory->mapped, address, nbytes) != NULL) {
        return CM_CUDA_INVALID_VALUE;
    }
    /* A handle can be mapped only as a whole. We also refuse to map it in a second
     * place: on driver 580, RDMA memory that was mapped twice could not be opened to
     * further devices, so cumem never does that. */
    if (nbytes != physical->nbytes || physical->is_mapped) {
        return CM_CUDA_NOT_SUPPORTED;
    }
    unsigned char *bytes = in->bytes + (address - in->address);
    cm_emulated_range *made =
        cm_emulated_table_new(&memory->mapped, address + nbytes, sizeof(*made));
    if (made == NULL || !cm_emulated_bytes_map(physical->bytes, nbytes, bytes)) {
        free(cm_emulated_table_remove(&memory->mapped, address + nbytes));
        return CM_CUDA_OUT_OF_MEMORY;
    }
    *made = (cm_emulated_range){
        .kind = CM_EMULATED_DEVICE,
        .device = physical->device,
        .address = address,
        .bytes = bytes,
        .nbytes = nbytes,
        .physical = physical,
        .serial = ++memory->serial,
    };
    physical->is_mapped = true;
    return 0;
}

/* Unmaps [address, address + nbytes), all of which must be mapped. It waits until work
 * that is using these bytes has ended, and such work then fails. */
int32_t
cm_emulated_op_address_unmap(cm_emulated *emulated, cm_address address, uint64_t nbytes)
{
    cm_emulated_memory *memory = &emulated->memory;
    cm_emulated_place place;
    if (!find_whole(emulated, address, nbytes, &place)) {
        return CM_CUDA_INVALID_VALUE;
    }
    for (EACH_TOUCHED(&memory->mapped, address, nbytes, i)) {
        cm_emulated_range *each = memory->mapped.entries[i].object;
        each->kind = CM_EMULATED_FREED;
        each->device = -1;
    }
    /* While we wait, others may map and unmap, but not in the part that we have not
     * reached yet. */
    for (cm_address end = address + nbytes; address < end;) {
        cm_emulated_range *gone = range_touched(&memory->mapped, address, 1);
        cm_emulated_physical *physical = gone->physical;
        while (gone->user_count != 0) {
            cm_cond_wait(&emulated->changed, &emulated->lock);
        }
        cm_emulated_pages_kill(gone->bytes, gone->nbytes);
        address += gone->nbytes;
        free(cm_emulated_table_remove(&memory->mapped, address));
        physical->is_mapped = false;
        free_if_unused(memory, physical);
    }
    return 0;
}

int32_t
cm_emulated_op_address_set_access(cm_emulated *emulated, cm_address address,
                                  uint64_t nbytes, const int *devices, int device_count)
{
    if (devices == NULL || device_count <= 0) {
        return CM_CUDA_INVALID_VALUE;
    }
    uint64_t mask = 0;
    for (int i = 0; i < device_count; i++) {
        if (!cm_emulated_is_device(emulated, devices[i])) {
            return CM_CUDA_INVALID_DEVICE;
        }
        mask |= UINT64_C(1) << devices[i];
    }
    cm_emulated_place place;
    if (!find_whole(emulated, address, nbytes, &place)) {
        return CM_CUDA_INVALID_VALUE;
    }
    if (mprotect(place.bytes, nbytes, PROT_READ | PROT_WRITE) != 0) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    for (EACH_TOUCHED(place.table, address, nbytes, i)) {
        ((cm_emulated_range *)place.table->entries[i].object)->access |= mask;
    }
    return 0;
}

/* ---- the end of a device and of everything --------------------------------------- */

void
cm_emulated_memory_reset(cm_emulated *emulated, int device)
{
    cm_emulated_memory *memory = &emulated->memory;
    const cm_emulated_entry *left;
    while ((left = cm_emulated_table_of_device(&memory->mapped, device)) != NULL) {
        const cm_emulated_range *range = left->object;
        (void)cm_emulated_op_address_unmap(emulated, range->address, range->nbytes);
    }
    while ((left = cm_emulated_table_of_device(&memory->physicals, device)) != NULL) {
        (void)cm_emulated_op_physical_release(emulated, left->key);
    }
    memory->peers[device] = 0;
    for (int i = 0; i < CM_MAX_DEVICES; i++) {
        memory->peers[i] &= ~(UINT64_C(1) << device);
    }
    while ((left = cm_emulated_table_of_device(&memory->ranges, device)) != NULL) {
        range_retire(emulated, left->object);
    }
}

void
cm_emulated_memory_fini(cm_emulated *emulated)
{
    cm_emulated_memory *memory = &emulated->memory;
    while (memory->ranges.count != 0) {
        range_free(memory, memory->ranges.entries[0].object);
    }
    free(memory->ranges.entries);
    free(memory->mapped.entries);
    free(memory->physicals.entries);
}
