/* SPDX-License-Identifier: Apache-2.0 */
/* Handing out: from the cache, from what is in flight, else from the runtime. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "pool/pool_private.h"
#include "pool/scope.h"

#define PAGE_NBYTES UINT64_C(4096)

static cm_status
round_size(const cm_pool *pool, uint64_t nbytes, uint64_t *out)
{
    if (nbytes == 0) {
        return cm_fail(CM_EINVALID, nbytes);
    }
    bool is_host =
        pool->config.kind == CM_KIND_PINNED || pool->config.kind == CM_KIND_MAPPED;
    uint64_t step = nbytes > PAGE_NBYTES ? PAGE_NBYTES : is_host ? 64 : 512;
    if (!cm_round_up_u64(nbytes, step, out) || *out > INT64_MAX) {
        return cm_fail(CM_EOVERFLOW, nbytes);
    }
    return cm_ok();
}

/* Count `entry`, which is in no list, as handed out. */
static void
hand_out_locked(cm_pool *pool, cm_pool_entry *entry, bool hit)
{
    cm_pool_counters *c = &pool->counters;
    cm_list_push_back(&pool->live, &entry->node);
    c->live_count++;
    c->live_nbytes += entry->block.nbytes;
    if (c->live_nbytes > c->peak_live_nbytes) {
        c->peak_live_nbytes = c->live_nbytes;
    }
    c->allocation_count++;
    c->hit_count += hit ? 1 : 0;
}

/* A ready block of exactly `size` bytes, the youngest; NULL if there is none. */
static cm_pool_entry *
take_cached(cm_pool *pool, uint64_t size)
{
    cm_pool_entry *found = NULL;
    cm_mutex_lock(&pool->lock);
    for (cm_list *n = pool->cached.prev; n != &pool->cached; n = n->prev) {
        if (cm_pool_entry_of(n)->block.nbytes == size) {
            found = cm_pool_entry_of(n);
            cm_list_remove(n);
            pool->counters.cached_count--;
            pool->counters.cached_nbytes -= size;
            hand_out_locked(pool, found, true);
            break;
        }
    }
    cm_mutex_unlock(&pool->lock);
    return found;
}

/* A device block still in flight whose only user is the very stream that wants it now,
 * so that the stream's own order protects it; NULL if there is none. */
static cm_pool_entry *
take_same_stream(cm_pool *pool, uint64_t size, const cm_stream *stream)
{
    cm_scope scope; /* first: whoever takes an entry must be able to drop its events */
    if (!cm_is_ok(cm_scope_enter(pool->rt, pool->config.device, &scope))) {
        return NULL;
    }
    cm_pool_entry *found = NULL;
    cm_mutex_lock(&pool->lock);
    for (cm_list *n = pool->in_flight.prev; n != &pool->in_flight; n = n->prev) {
        cm_pool_entry *entry = cm_pool_entry_of(n);
        if (entry->block.nbytes == size && cm_pool_entry_is_ordered_on(entry, stream)) {
            found = entry;
            cm_list_remove(n);
            pool->counters.in_flight_count--;
            pool->counters.in_flight_nbytes -= size;
            hand_out_locked(pool, found, true);
            break;
        }
    }
    cm_mutex_unlock(&pool->lock);
    if (found != NULL) {
        cm_pool_entry_clear(pool, found);
    }
    cm_scope_leave(&scope);
    return found;
}

static bool
has_in_flight(cm_pool *pool)
{
    cm_mutex_lock(&pool->lock);
    bool some = !cm_list_is_empty(&pool->in_flight);
    cm_mutex_unlock(&pool->lock);
    return some;
}

/* Have freed blocks that wait for a fence grown past `limit_nbytes`? */
static bool
is_fence_due(cm_pool *pool, uint64_t limit_nbytes)
{
    uint64_t due_nbytes = 0;
    cm_mutex_lock(&pool->lock);
    for (cm_list *n = pool->in_flight.next; n != &pool->in_flight; n = n->next) {
        const cm_pool_entry *entry = cm_pool_entry_of(n);
        due_nbytes += entry->fence_devices != 0 ? entry->block.nbytes : 0;
    }
    cm_mutex_unlock(&pool->lock);
    return due_nbytes > limit_nbytes;
}

/* Without context events, blocks with fences would pile up until memory runs out: true
 * when they have grown past what the cache may hold. */
static bool
is_sync_due(cm_pool *pool)
{
    cm_mutex_lock(&pool->lock);
    uint64_t limit_nbytes = cm_pool_cache_limit_locked(pool);
    cm_mutex_unlock(&pool->lock);
    return is_fence_due(pool, limit_nbytes);
}

/* A stream that cannot be asked counts as capturing: nothing is then waited for. */
static bool
is_capturing(cm_pool *pool, const cm_stream *stream)
{
    cm_scope scope;
    if (stream == NULL) {
        return false;
    }
    if (!cm_is_ok(cm_scope_enter(pool->rt, stream->device, &scope))) {
        return true;
    }
    bool capturing = true;
    cm_status status = cm_rt_stream_is_capturing(pool->rt, stream->handle, &capturing);
    cm_scope_leave(&scope);
    return !cm_is_ok(status) || capturing;
}

/* A block among those in flight that may be had now; NULL if there is none. */
static cm_pool_entry *
take_in_flight(cm_pool *pool, uint64_t size, const cm_stream *stream, bool capturing)
{
    cm_pool_entry *entry = NULL;
    if (!has_in_flight(pool)) {
        return NULL;
    }
    if (pool->config.kind == CM_KIND_DEVICE && stream != NULL && !capturing) {
        entry = take_same_stream(pool, size, stream);
    }
    for (int mode = CM_POLL_LOOK; entry == NULL && mode <= CM_POLL_SYNC; mode++) {
        if (mode == CM_POLL_SYNC && (capturing || !is_sync_due(pool))) {
            break;
        }
        cm_status status = cm_pool_poll(
            pool, (cm_poll_mode)mode,
            !capturing && is_fence_due(pool, pool->config.fence_limit_nbytes));
        (void)status; /* what could not be waited for stays in flight */
        entry = take_cached(pool, size);
    }
    return entry;
}

static cm_status
alloc_memory(cm_pool *pool, uint64_t size, cm_block *out)
{
    cm_scope scope;
    CM_TRY(cm_scope_enter(pool->rt, pool->config.device, &scope));
    cm_status status = cm_pool_memory_alloc(pool, size, out);
    cm_scope_leave(&scope);
    return status;
}

/* A new block from the runtime; on out-of-memory after giving back all that can be. */
static cm_status
alloc_new(cm_pool *pool, uint64_t size, bool capturing, cm_pool_entry **out)
{
    cm_pool_entry *entry = calloc(1, sizeof(*entry));
    if (entry == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*entry));
    }
    cm_status status = alloc_memory(pool, size, &entry->block);
    if (status.code == CM_CUDA_OUT_OF_MEMORY) {
        uint64_t released_nbytes = 0;
        cm_status trimmed = cm_pool_trim(pool, !capturing, &released_nbytes);
        (void)trimmed; /* the retry's own answer is what the caller needs */
        status = alloc_memory(pool, size, &entry->block);
    }
    if (!cm_is_ok(status)) {
        free(entry);
        return status;
    }
    cm_mutex_lock(&pool->lock);
    hand_out_locked(pool, entry, false);
    cm_mutex_unlock(&pool->lock);
    *out = entry;
    return cm_ok();
}

cm_status
cm_pool_alloc(cm_pool *pool, uint64_t nbytes, cm_stream *stream, cm_block **out)
{
    uint64_t size = 0;
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, nbytes);
    }
    CM_TRY(round_size(pool, nbytes, &size));
    cm_pool_entry *entry = take_cached(pool, size);
    if (entry == NULL) {
        bool capturing = is_capturing(pool, stream);
        entry = take_in_flight(pool, size, stream, capturing);
        cm_pool_drop_surplus(pool);
        if (entry == NULL) {
            CM_TRY(alloc_new(pool, size, capturing, &entry));
        }
    }
    else {
        cm_pool_drop_surplus(pool);
    }
    (void)cm_pool_hold(pool);
    CM_POOL_DEBUG_CHECK(pool);
    *out = &entry->block;
    return cm_ok();
}
