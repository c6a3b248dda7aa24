/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a pool: its counters, and the peaks of as many spans of time as are asked
 * for. */
#include "pool/pool_private.h"

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
