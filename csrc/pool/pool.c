/* SPDX-License-Identifier: Apache-2.0 */
/* The pool as a whole: its life, its cache, taking blocks back and reading the
 * counters. Handing out is pool_alloc.c. */
#include <stdlib.h>

#include "pool/pool_private.h"
#include "pool/scope.h"

/* Ready blocks kept for reuse: this many bytes or a quarter of what is live. */
#define CACHE_MIN_NBYTES (UINT64_C(64) << 20)

static bool
is_config_valid(const cm_runtime *rt, const cm_pool_config *config)
{
    unsigned flags = config->flags;
    if (config->device < 0 || config->device >= rt->device_count) {
        return false;
    }
    switch (config->kind) {
    case CM_KIND_PINNED:
    case CM_KIND_MAPPED:
        return flags <= (CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_MAPPED
                         | CM_HOST_ALLOC_WRITE_COMBINED);
    case CM_KIND_MANAGED:
        return flags == CM_MANAGED_GLOBAL || flags == CM_MANAGED_HOST;
    case CM_KIND_DEVICE:
        return flags == 0;
    case CM_KIND_PAGEABLE:
    case CM_KIND_COUNT:
        break;
    }
    return false;
}

cm_status
cm_pool_create(cm_runtime *rt, const cm_pool_config *config, cm_pool **out)
{
    cm_pool_config final = *config;
    if (final.kind == CM_KIND_MAPPED) {
        final.flags |= CM_HOST_ALLOC_MAPPED;
    }
    if (!is_config_valid(rt, &final)) {
        return cm_fail(CM_EINVALID, (uint64_t) final.flags);
    }
    cm_pool *pool = calloc(1, sizeof(*pool));
    if (pool == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*pool));
    }
    cm_status status = cm_mutex_init(&pool->lock);
    if (!cm_is_ok(status)) {
        free(pool);
        return status;
    }
    status = cm_cond_init(&pool->poll_ended);
    if (!cm_is_ok(status)) {
        cm_mutex_fini(&pool->lock);
        free(pool);
        return status;
    }
    atomic_init(&pool->refs, 1);
    atomic_init(&pool->lost_count, 0);
    pool->rt = rt;
    pool->config = final;
    cm_list_init(&pool->live);
    cm_list_init(&pool->in_flight);
    cm_list_init(&pool->polled);
    cm_list_init(&pool->cached);
    *out = pool;
    return cm_ok();
}

cm_pool *
cm_pool_hold(cm_pool *pool)
{
    atomic_fetch_add_explicit(&pool->refs, 1, memory_order_relaxed);
    return pool;
}

/* Give the entries, which no list of the pool holds, back to the runtime. Those that it
 * refuses become cached again, so that nothing is lost and a later try may succeed. */
static cm_status
give_back(cm_pool *pool, cm_list *entries, uint64_t *released_nbytes)
{
    if (cm_list_is_empty(entries)) {
        return cm_ok();
    }
    cm_list refused;
    cm_list_init(&refused);
    cm_scope scope;
    cm_status first = cm_scope_enter(pool->rt, pool->config.device, &scope);
    if (cm_is_ok(first)) {
        cm_list *node;
        while ((node = cm_list_pop_front(entries)) != NULL) {
            cm_pool_entry *entry = cm_pool_entry_of(node);
            cm_pool_entry_clear(pool, entry);
            cm_status status = cm_pool_memory_free(pool, &entry->block);
            if (cm_is_ok(status)) {
                *released_nbytes += entry->block.nbytes;
                free(entry);
            }
            else {
                atomic_fetch_add(&pool->lost_count, 1);
                first = cm_is_ok(first) ? status : first;
                cm_list_push_back(&refused, node);
            }
        }
        cm_scope_leave(&scope);
    }
    else {
        cm_list_splice_back(&refused, entries);
    }
    cm_mutex_lock(&pool->lock);
    for (cm_list *n = refused.next; n != &refused; n = n->next) {
        pool->counters.cached_count++;
        pool->counters.cached_nbytes += cm_pool_entry_of(n)->block.nbytes;
    }
    cm_list_splice_back(&pool->cached, &refused);
    cm_mutex_unlock(&pool->lock);
    return first;
}

/* Move the oldest cached blocks to `out` until at most `keep_nbytes` are cached. */
static void
take_surplus_locked(cm_pool *pool, uint64_t keep_nbytes, cm_list *out)
{
    while (pool->counters.cached_nbytes > keep_nbytes) {
        cm_list *node = cm_list_pop_front(&pool->cached);
        pool->counters.cached_count--;
        pool->counters.cached_nbytes -= cm_pool_entry_of(node)->block.nbytes;
        cm_list_push_back(out, node);
    }
}

uint64_t
cm_pool_cache_limit_locked(const cm_pool *pool)
{
    uint64_t quarter = pool->counters.live_nbytes / 4;
    return quarter > CACHE_MIN_NBYTES ? quarter : CACHE_MIN_NBYTES;
}

void
cm_pool_drop_surplus(cm_pool *pool)
{
    cm_list surplus;
    cm_list_init(&surplus);
    cm_mutex_lock(&pool->lock);
    take_surplus_locked(pool, cm_pool_cache_limit_locked(pool), &surplus);
    cm_mutex_unlock(&pool->lock);
    uint64_t released_nbytes = 0;
    cm_status refused = give_back(pool, &surplus, &released_nbytes);
    (void)refused; /* counted as lost; the blocks are cached again and trim() will tell
                    */
}

/* Everything is idle or may be taken for idle: give it all back and end. */
static void
destroy(cm_pool *pool)
{
    cm_status waited = cm_pool_poll(pool, CM_POLL_WAIT, false);
    (void)waited; /* giving back waits too: the runtime's frees are synchronous */
    cm_list_splice_back(&pool->cached, &pool->in_flight);
    for (int attempt = 0; attempt < 2 && !cm_list_is_empty(&pool->cached); attempt++) {
        cm_list all;
        cm_list_init(&all);
        cm_list_splice_back(&all, &pool->cached);
        uint64_t released_nbytes = 0;
        cm_status refused = give_back(pool, &all, &released_nbytes);
        (void)refused; /* tried twice; there is nobody left to tell */
    }
    cm_list *node;
    while ((node = cm_list_pop_front(&pool->cached)) != NULL) {
        free(cm_pool_entry_of(node));
    }
    cm_cond_fini(&pool->poll_ended);
    cm_mutex_fini(&pool->lock);
    free(pool);
}

void
cm_pool_release(cm_pool *pool)
{
    if (atomic_fetch_sub_explicit(&pool->refs, 1, memory_order_acq_rel) == 1
        && !cm_runtime_is_forked(pool->rt)) {
        destroy(pool);
    }
}

void
cm_pool_free(cm_pool *pool, cm_block *block, cm_stream *const *uses, uint32_t use_count,
             unsigned flags)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return;
    }
    cm_pool_entry *entry = (cm_pool_entry *)(void *)block;
    cm_pool_entry_record(pool, entry, uses, use_count, flags);
    cm_pool_counters *c = &pool->counters;
    cm_mutex_lock(&pool->lock);
    cm_list_remove(&entry->node);
    c->live_count--;
    c->live_nbytes -= entry->block.nbytes;
    if (cm_pool_entry_is_idle(entry)) {
        cm_list_push_back(&pool->cached, &entry->node);
        c->cached_count++;
        c->cached_nbytes += entry->block.nbytes;
    }
    else {
        cm_list_push_back(&pool->in_flight, &entry->node);
        c->in_flight_count++;
        c->in_flight_nbytes += entry->block.nbytes;
    }
    cm_mutex_unlock(&pool->lock);
    CM_POOL_DEBUG_CHECK(pool);
    cm_pool_release(pool);
}

cm_status
cm_pool_trim(cm_pool *pool, bool wait, uint64_t *released_nbytes)
{
    *released_nbytes = 0;
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_status first = cm_pool_poll(pool, wait ? CM_POLL_WAIT : CM_POLL_LOOK, true);
    cm_list all;
    cm_list_init(&all);
    cm_mutex_lock(&pool->lock);
    take_surplus_locked(pool, 0, &all);
    cm_mutex_unlock(&pool->lock);
    cm_status status = give_back(pool, &all, released_nbytes);
    CM_POOL_DEBUG_CHECK(pool);
    return cm_is_ok(first) ? status : first;
}

void
cm_pool_read(cm_pool *pool, cm_pool_counters *out)
{
    bool forked = cm_runtime_is_forked(pool->rt); /* the lock may be held for ever there
                                                   */
    if (!forked) {
        cm_mutex_lock(&pool->lock);
    }
    *out = pool->counters;
    if (!forked) {
        cm_mutex_unlock(&pool->lock);
    }
    out->reserved_nbytes =
        out->live_nbytes + out->in_flight_nbytes + out->cached_nbytes;
    out->lost_count = atomic_load(&pool->lost_count);
}

const cm_pool_config *
cm_pool_get_config(const cm_pool *pool)
{
    return &pool->config;
}

static void
add_up(const cm_list *list, uint64_t *count, uint64_t *nbytes)
{
    for (cm_list *n = list->next; n != list; n = n->next) {
        *count += 1;
        *nbytes += cm_pool_entry_of(n)->block.nbytes;
    }
}

static bool
are_idle(const cm_list *list, bool idle)
{
    for (cm_list *n = list->next; n != list; n = n->next) {
        if (cm_pool_entry_is_idle(cm_pool_entry_of(n)) != idle) {
            return false;
        }
    }
    return true;
}

bool
cm_pool_check(cm_pool *pool)
{
    uint64_t live[2] = {0, 0};
    uint64_t in_flight[2] = {0, 0};
    uint64_t cached[2] = {0, 0};
    if (cm_runtime_is_forked(pool->rt)) {
        return true;
    }
    const cm_pool_counters *c = &pool->counters;
    cm_mutex_lock(&pool->lock);
    add_up(&pool->live, &live[0], &live[1]);
    add_up(&pool->in_flight, &in_flight[0], &in_flight[1]);
    add_up(&pool->polled, &in_flight[0], &in_flight[1]);
    add_up(&pool->cached, &cached[0], &cached[1]);
    bool good = c->live_count == live[0] && c->live_nbytes == live[1]
                && c->in_flight_count == in_flight[0]
                && c->in_flight_nbytes == in_flight[1] && c->cached_count == cached[0]
                && c->cached_nbytes == cached[1] && c->hit_count <= c->allocation_count
                && c->live_nbytes <= c->peak_live_nbytes
                && (cm_list_is_empty(&pool->polled) || pool->polling)
                && are_idle(&pool->in_flight, false) && are_idle(&pool->cached, true);
    cm_mutex_unlock(&pool->lock);
    return good;
}
