/* SPDX-License-Identifier: Apache-2.0 */
/* The pool as a whole: its life, its check, other devices, counters and listing. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "pool/private.h"
#include "pool/scope.h"

/* Where blocks are as long as pages, they also start on one. */
#define LARGE_HOST_NBYTES (UINT64_C(64) << 10)
#define LARGE_DEVICE_NBYTES (UINT64_C(1) << 20)

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

static cm_status
init(cm_pool *pool, cm_runtime *rt, const cm_pool_config *config)
{
    CM_TRY(cm_mutex_init(&pool->gate));
    cm_status status = cm_cond_init(&pool->gate_moved);
    if (!cm_is_ok(status)) {
        cm_mutex_fini(&pool->gate);
        return status;
    }
    bool is_host = config->kind == CM_KIND_PINNED || config->kind == CM_KIND_MAPPED;
    cm_fast_lock_init(&pool->lock);
    cm_fast_lock_allow_leaning(&pool->lock);
    atomic_init(&pool->holds, 1);
    atomic_init(&pool->lost_count, 0);
    pool->rt = rt;
    pool->config = *config;
    cm_budget_init(&pool->budget, UINT64_MAX, config->budget);
    pool->config.budget = &pool->budget;
    pool->align = is_host ? 64 : 512;
    pool->large = is_host ? LARGE_HOST_NBYTES : LARGE_DEVICE_NBYTES;
    cm_heap_init(&pool->heap);
    cm_list_init(&pool->in_flight);
    cm_list_init(&pool->polled);
    cm_list_init(&pool->fork_node);
    pool->slot_count = 1;
    pool->done[0] = UINT64_MAX;
    return cm_ok();
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
    cm_status status = init(pool, rt, &final);
    if (!cm_is_ok(status)) {
        free(pool);
        return status;
    }
    *out = pool;
    return cm_ok();
}

cm_pool *
cm_pool_hold(cm_pool *pool)
{
    atomic_fetch_add_explicit(&pool->holds, 1, memory_order_relaxed);
    return pool;
}

void
cm_pool_release(cm_pool *pool)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return; /* the lock may be held for ever there */
    }
    uint64_t holds = atomic_load_explicit(&pool->holds, memory_order_relaxed);
    while (holds > 1) { /* others remain: nothing ends, and the lock keeps its lean */
        if (atomic_compare_exchange_weak_explicit(&pool->holds, &holds, holds - 1,
                                                  memory_order_release,
                                                  memory_order_relaxed)) {
            return;
        }
    }
    cm_fast_lock_take(&pool->lock);
    (void)atomic_fetch_sub_explicit(&pool->holds, 1, memory_order_acq_rel);
    bool unused = cm_pool_is_unused_locked(pool);
    cm_fast_lock_give(&pool->lock);
    if (unused) {
        cm_pool_destroy(pool);
    }
}

/* -- ending ----------------------------------------------------------------------------- */

/* What waits for a graph, or could not be waited for, goes back as well. */
static void
abandon_flights(cm_pool *pool)
{
    cm_list *node;
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    while ((node = cm_list_pop_front(&pool->in_flight)) != NULL) {
        cm_flight *flight = CM_LIST_ENTRY(node, cm_flight, node);
        cm_flight_clear(pool, flight);
        (void)cm_heap_give(&pool->heap, flight->span, 0, 0, &view);
        free(flight);
    }
    pool->counters.in_flight_count = 0;
    pool->counters.in_flight_nbytes = 0;
}

/* What is not given back now never will be: a failure is met by a second try. */
static bool
enter_at_last(const cm_pool *pool, cm_scope *scope)
{
    cm_status status = cm_scope_enter(pool->rt, pool->config.device, scope);
    if (!cm_is_ok(status)) {
        status = cm_scope_enter(pool->rt, pool->config.device, scope);
    }
    return cm_is_ok(status);
}

void
cm_pool_destroy(cm_pool *pool)
{
    cm_pool_unwatch_forks(pool); /* nothing lives: what follows is without the lock */
    cm_status waited = cm_pool_poll(pool, CM_POLL_WAIT, false);
    if (!cm_is_ok(waited)) { /* giving back does not wait for all kinds: try again */
        cm_status again = cm_pool_poll(pool, CM_POLL_WAIT, false);
        (void)again; /* nobody is left to tell */
    }
    cm_pool_drop_slots(pool, true);
    cm_scope scope;
    if (pool->source != NULL && enter_at_last(pool, &scope)) {
        abandon_flights(pool);
        for (int attempt = 0; attempt < 2 && pool->heap.free_nbytes > 0; attempt++) {
            uint64_t released_nbytes = 0;
            cm_status refused = cm_pool_release_chunks(pool, 0, &released_nbytes);
            (void)refused; /* tried twice */
        }
        pool->source->ops->destroy(pool->source);
        cm_scope_leave(&scope);
    }
    cm_budget_refund(pool->config.budget, pool->counters.reserved_nbytes);
    cm_heap_fini(&pool->heap);
    cm_cond_fini(&pool->gate_moved);
    cm_mutex_fini(&pool->gate);
    free(pool);
}

const cm_pool_config *
cm_pool_get_config(const cm_pool *pool)
{
    return &pool->config;
}

/* -- checking --------------------------------------------------------------------------- */

/* Bytes and spans in each state. False: one is late for a stream that was forgotten. */
static bool
add_up(const cm_pool *pool, uint64_t nbytes[6], uint64_t count[6])
{
    const cm_list *arenas = &pool->heap.arenas;
    for (const cm_list *n = arenas->next; n != arenas; n = n->next) {
        const cm_arena *arena = CM_LIST_ENTRY(n, cm_arena, node);
        for (const cm_heap_span *s = arena->first; s != NULL; s = s->next) {
            nbytes[s->state] += s->block.nbytes;
            count[s->state]++;
            if (s->epoch > pool->done[s->tag] && pool->epochs[s->tag].stream == NULL) {
                return false;
            }
        }
    }
    return true;
}

static bool
check_locked(const cm_pool *pool)
{
    const cm_pool_counters *c = &pool->counters;
    uint64_t nbytes[6] = {0};
    uint64_t count[6] = {0};
    if (!add_up(pool, nbytes, count)) {
        return false;
    }
    uint64_t held = nbytes[CM_SPAN_LIVE] + nbytes[CM_SPAN_FLIGHT] + nbytes[CM_SPAN_FREE]
                    + nbytes[CM_SPAN_READY];
    bool settled = count[CM_SPAN_BUSY] == 0 && !pool->growing;
    for (uint32_t i = 1; i < pool->slot_count; i++) {
        if (pool->done[i] > pool->epochs[i].epoch) {
            return false;
        }
    }
    return cm_heap_check(&pool->heap) && c->live_count == count[CM_SPAN_LIVE]
           && c->live_nbytes == nbytes[CM_SPAN_LIVE]
           && c->in_flight_nbytes == nbytes[CM_SPAN_FLIGHT]
           && c->in_flight_count == count[CM_SPAN_FLIGHT]
           && (!settled || c->reserved_nbytes == held)
           && c->hit_count + c->miss_count == c->allocation_count
           && c->requested_nbytes <= c->live_nbytes
           && c->peak_live_nbytes >= c->live_nbytes
           && c->peak_reserved_nbytes >= c->reserved_nbytes
           && c->peak_in_flight_nbytes >= c->in_flight_nbytes
           && c->peak_cached_nbytes >= pool->heap.free_nbytes
           && c->peak_waste_nbytes >= c->live_nbytes - c->requested_nbytes
           && (cm_list_is_empty(&pool->polled) || pool->polling);
}

bool
cm_pool_check(cm_pool *pool)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return true;
    }
    /* The flags have a lock of their own; a stale look at them only makes the check
     * milder. */
    cm_fast_lock_take(&pool->lock);
    bool good = check_locked(pool);
    cm_fast_lock_give(&pool->lock);
    return good;
}

uint64_t
cm_pool_room(cm_pool *pool)
{
    uint64_t left = cm_budget_left(cm_budget_tightest(pool->config.budget));
    if (left == UINT64_MAX) {
        return left;
    }
    cm_fast_lock_take(&pool->lock);
    uint64_t room = left + pool->heap.free_nbytes;
    cm_fast_lock_give(&pool->lock);
    return room;
}

/* -- peers --------------------------------------------------------------------------------- */
/* A chunk is opened for the peers that have a context by then, and here for those that
 * got one later. */

/* The other devices that this process has a context on: none is made for this. */
static uint64_t
others_in_use(const cm_pool *pool)
{
    const cm_runtime *rt = pool->rt;
    uint64_t devices = 0;
    for (int d = 0; d < rt->device_count && d < CM_MAX_DEVICES; d++) {
        bool used = d != pool->config.device
                    && atomic_load_explicit(&rt->primary[d], memory_order_relaxed) != 0;
        devices |= used ? UINT64_C(1) << d : 0;
    }
    return devices;
}

/* By the grower, who alone changes what is where; inside a cm_scope. */
static cm_status
admit(cm_pool *pool)
{
    const cm_arena *range = pool->range;
    uint64_t count = range->nbytes / range->granule;
    cm_status first = cm_ok();
    for (uint64_t i = 0; i < count;) {
        cm_chunk *chunk = range->chunk_at[i];
        if (chunk != NULL) {
            cm_status status = pool->source->ops->admit_peers(pool->source, chunk);
            first = cm_is_ok(first) ? status : first;
        }
        i += chunk != NULL ? chunk->nbytes / range->granule : 1;
    }
    return first;
}

cm_status
cm_pool_admit_peers(cm_pool *pool)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    uint64_t others = others_in_use(pool);
    if (pool->config.kind != CM_KIND_DEVICE || (others & ~pool->admitted) == 0) {
        return cm_ok(); /* and waits for nobody */
    }
    cm_status status = cm_ok();
    cm_pool_begin_growing(pool);
    bool any = pool->range != NULL && (others & pool->source->peers) != 0;
    if (any && (others & ~pool->admitted) != 0) {
        cm_scope scope;
        status = cm_scope_enter(pool->rt, pool->config.device, &scope);
        if (cm_is_ok(status)) {
            status = admit(pool);
            cm_scope_leave(&scope);
        }
    }
    if (cm_is_ok(status)) {
        pool->admitted |= others; /* what comes now is opened to them at once */
    }
    cm_pool_end_growing(pool);
    return status;
}

/* -- counters and peaks -------------------------------------------------------------------- */

/* What is reserved and nobody's: free, or for a moment on its way between the heap and
 * the runtime. */
static uint64_t
cached_nbytes(const cm_pool_counters *c)
{
    uint64_t used_nbytes = c->live_nbytes + c->in_flight_nbytes;
    /* Less only where the lock is not held, in a forked child. */
    return c->reserved_nbytes > used_nbytes ? c->reserved_nbytes - used_nbytes : 0;
}

static void
raise_to(uint64_t *peak, uint64_t value)
{
    *peak = value > *peak ? value : *peak;
}

static void
read_locked(cm_pool *pool, cm_pool_counters *out)
{
    /* What was told once counts, whatever it was on its way to. */
    raise_to(&pool->counters.peak_cached_nbytes, cached_nbytes(&pool->counters));
    *out = pool->counters;
    out->cached_nbytes = cached_nbytes(&pool->counters);
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    cm_heap_runs runs = cm_heap_count_runs(&pool->heap, &view);
    out->cached_count = runs.count;
    out->largest_free_nbytes = runs.largest_nbytes;
    out->split_count = pool->heap.split_count;
    out->merge_count = pool->heap.merge_count;
    out->segment_count = pool->heap.arena_count;
}

static void
raise_peaks(cm_pool_peaks *peaks, const cm_pool_counters *c)
{
    raise_to(&peaks->live_nbytes, c->peak_live_nbytes);
    raise_to(&peaks->requested_nbytes, c->peak_requested_nbytes);
    raise_to(&peaks->waste_nbytes, c->peak_waste_nbytes);
    raise_to(&peaks->cached_nbytes, c->peak_cached_nbytes);
    raise_to(&peaks->in_flight_nbytes, c->peak_in_flight_nbytes);
    raise_to(&peaks->reserved_nbytes, c->peak_reserved_nbytes);
}

static void
write_peaks(const cm_pool_peaks *peaks, cm_pool_counters *out)
{
    raise_to(&out->peak_live_nbytes, peaks->live_nbytes);
    raise_to(&out->peak_requested_nbytes, peaks->requested_nbytes);
    raise_to(&out->peak_waste_nbytes, peaks->waste_nbytes);
    raise_to(&out->peak_cached_nbytes, peaks->cached_nbytes);
    raise_to(&out->peak_in_flight_nbytes, peaks->in_flight_nbytes);
    raise_to(&out->peak_reserved_nbytes, peaks->reserved_nbytes);
}

/* The counters' own peaks start again from what is now. */
static void
begin_peaks_locked(cm_pool *pool)
{
    cm_pool_counters *c = &pool->counters;
    c->peak_live_nbytes = c->live_nbytes;
    c->peak_requested_nbytes = c->requested_nbytes;
    c->peak_waste_nbytes = c->live_nbytes - c->requested_nbytes;
    c->peak_in_flight_nbytes = c->in_flight_nbytes;
    c->peak_cached_nbytes = pool->heap.free_nbytes;
    c->peak_reserved_nbytes = c->reserved_nbytes;
}

void
cm_pool_read(cm_pool *pool, cm_pool_counters *out)
{
    bool forked = cm_runtime_is_forked(pool->rt); /* the lock may be held for ever there
                                                   */
    if (!forked) {
        cm_fast_lock_take(&pool->lock);
    }
    read_locked(pool, out);
    write_peaks(&pool->peaks_before, out);
    if (!forked) {
        cm_fast_lock_give(&pool->lock);
    }
    out->lost_count = atomic_load(&pool->lost_count);
}

void
cm_pool_read_window(cm_pool *pool, cm_pool_counters *out)
{
    if (cm_runtime_is_forked(pool->rt)) {
        cm_pool_read(pool, out);
        return;
    }
    cm_fast_lock_take(&pool->lock);
    read_locked(pool, out);
    write_peaks(&pool->window_peaks, out);
    raise_peaks(&pool->peaks_before, &pool->counters);
    pool->window_peaks = (cm_pool_peaks){0};
    begin_peaks_locked(pool);
    cm_fast_lock_give(&pool->lock);
    out->lost_count = atomic_load(&pool->lost_count);
}

void
cm_pool_reset_peaks(cm_pool *pool)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return;
    }
    cm_fast_lock_take(&pool->lock);
    raise_peaks(&pool->window_peaks, &pool->counters);
    pool->peaks_before = (cm_pool_peaks){0};
    begin_peaks_locked(pool);
    cm_fast_lock_give(&pool->lock);
}

/* -- listing ------------------------------------------------------------------------------- */

static uint64_t
count_spans_locked(const cm_pool *pool)
{
    uint64_t count = 0;
    const cm_list *arenas = &pool->heap.arenas;
    for (const cm_list *n = arenas->next; n != arenas; n = n->next) {
        for (const cm_heap_span *s = CM_LIST_ENTRY(n, cm_arena, node)->first; s;
             s = s->next) {
            count++;
        }
    }
    return count;
}

static cm_block_state
state_of(const cm_heap_span *span)
{
    switch (span->state) {
    case CM_SPAN_LIVE:
        return CM_BLOCK_LIVE;
    case CM_SPAN_FLIGHT:
        return CM_BLOCK_IN_FLIGHT;
    case CM_SPAN_FREE:
    case CM_SPAN_READY:
    case CM_SPAN_BUSY:
        return CM_BLOCK_CACHED;
    case CM_SPAN_GAP:
        break;
    }
    return CM_BLOCK_GAP;
}

/* The end of what was written: free memory in fewer rows than there are spans. */
static cm_block_row *
write_rows_locked(const cm_pool *pool, cm_block_row *rows)
{
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    uint32_t segment = 0;
    const cm_list *arenas = &pool->heap.arenas;
    for (const cm_list *n = arenas->next; n != arenas; n = n->next, segment++) {
        for (const cm_heap_span *s = CM_LIST_ENTRY(n, cm_arena, node)->first; s;
             s = s->next) {
            bool held = s->state == CM_SPAN_LIVE || s->state == CM_SPAN_FLIGHT;
            cm_block_row *row = rows++;
            *row = (cm_block_row){segment, s->block.address, s->block.nbytes,
                                  held ? s->requested_nbytes : 0, state_of(s)};
            if (cm_span_is_free(s)) {
                s = cm_heap_follow_run(s, &view, &row->nbytes);
            }
        }
    }
    return rows;
}

cm_status
cm_pool_list(cm_pool *pool, cm_block_row **out, uint64_t *count)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_fast_lock_take(&pool->lock);
    uint64_t room = count_spans_locked(pool);
    cm_fast_lock_give(&pool->lock);
    for (;;) { /* until the room found still does when the lock is held again */
        cm_block_row *rows = calloc(room + 64, sizeof(*rows));
        if (rows == NULL) {
            return cm_fail(CM_ENOMEM, (room + 64) * sizeof(*rows));
        }
        room += 64;
        cm_fast_lock_take(&pool->lock);
        uint64_t now = count_spans_locked(pool);
        bool enough = now <= room;
        if (enough) {
            *count = (uint64_t)(write_rows_locked(pool, rows) - rows);
        }
        cm_fast_lock_give(&pool->lock);
        if (enough) {
            *out = rows;
            return cm_ok();
        }
        free(rows);
        room = now;
    }
}
