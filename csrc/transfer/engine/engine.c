/* SPDX-License-Identifier: Apache-2.0 */
/* Creates the engine, begins and ends the calls that use it, keeps the pools that
 * copies take their staging memory from, and finds out facts about the ends of a copy.
 * run/job_threads.c closes the engine. */
#include <stdlib.h>

#include "base/machine.h"
#include "transfer/engine/job.h"

cm_status
cm_engine_create(cm_runtime *rt, cm_registry *registry, cm_relief *relief,
                 void *relief_argument, cm_engine **out)
{
    cm_engine *engine = calloc(1, sizeof(*engine));
    CM_TRY(cm_allocated(engine != NULL, sizeof(*engine)));
    atomic_init(&engine->refs, 1);
    engine->rt = rt;
    engine->registry = registry;
    engine->relief = relief;
    engine->relief_argument = relief_argument;
    cm_tuning_init(&engine->tuning);
    cm_tuning_resolve(&engine->tuning, cm_usable_cpu_count());
    engine->drain_ns = CM_DRAIN_NS;
    engine->peers.rt = rt;
    cm_list_init(&engine->watched);
    cm_list_init(&engine->unread);
    cm_list_init(&engine->going_on);
    cm_list_init(&engine->short_jobs);
    cm_list_init(&engine->long_jobs);
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        for (int i = 0; i < CM_LANES_OF_LINK; i++) {
            cm_list_init(&engine->lanes[device][i].waiting);
        }
    }
    engine->kernels.rt = rt;
    cm_cond_init(&engine->changed);
    cm_cond_init(&engine->work);
    cm_cond_init(&engine->watch);
    cm_workers_init(&engine->workers);
    *out = engine;
    return cm_ok();
}

const cm_copy_counts *
cm_engine_counts(const cm_engine *engine)
{
    return &engine->counts;
}

void
cm_engine_count_route(cm_engine *engine, const cm_route_row *row)
{
    unsigned index = row == NULL ? 0 : row->index;
    atomic_fetch_add_explicit(&engine->counts.routes.of[index], 1,
                              memory_order_relaxed);
}

void
cm_engine_release(cm_engine *engine)
{
    if (atomic_fetch_sub_explicit(&engine->refs, 1, memory_order_acq_rel) == 1) {
        free(engine);
    }
}

bool
cm_engine_is_forked(const cm_engine *engine)
{
    return !atomic_load(&engine->over) && cm_runtime_is_forked(engine->rt);
}

cm_status
cm_engine_begin_call(cm_engine *engine, cm_tuning *tuning)
{
    if (cm_engine_is_forked(engine)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_mutex_lock(&engine->lock);
    bool closed = engine->closed;
    *tuning = engine->tuning;
    engine->caller_count += !closed;
    cm_mutex_unlock(&engine->lock);
    return closed ? cm_fail(CM_ECLOSED, 0) : cm_ok();
}

void
cm_engine_end_call(cm_engine *engine)
{
    cm_mutex_lock(&engine->lock);
    engine->caller_count--;
    if (engine->caller_count == 0 && engine->closed) {
        cm_cond_signal_all(&engine->changed);
    }
    cm_mutex_unlock(&engine->lock);
}

void
cm_engine_set_pool(cm_engine *engine, int device, cm_pool *pool, cm_pool *lender)
{
    cm_pool **slot = device < 0 ? &engine->pinned_pool : &engine->device_pools[device];
    cm_mutex_lock(&engine->lock);
    if (*slot == NULL) {
        *slot = cm_pool_hold(pool);
        engine->lenders[device + 1] = lender;
    }
    cm_mutex_unlock(&engine->lock);
}

/* Handle the `status` of an allocation that was made in a caller's thread. If the
 * allocation failed for lack of memory and the engine has a relief callback, let the
 * callback allocate again, and return the callback's outcome; otherwise return
 * `status`. The callback may make another device current in this thread, so this
 * function makes the previous device current again. */
static cm_status
relieve(cm_engine *engine, cm_pool *pool, uint64_t nbytes, cm_stream *stream,
        cm_status status, cm_block **out)
{
    uint64_t context;
    if (!cm_pool_is_short(status) || engine->relief == NULL
        || !cm_is_ok(cm_rt_context_get(engine->rt, &context))) {
        return status;
    }
    status = engine->relief(engine->relief_argument, pool, nbytes, stream, status, out);
    cm_status back = cm_rt_context_set(engine->rt, context);
    if (cm_is_ok(status) && !cm_is_ok(back)) {
        cm_pool_free(pool, *out, &stream, 1, 0);
        *out = NULL;
        return back;
    }
    return status;
}

cm_status
cm_engine_alloc(cm_engine *engine, int device, uint64_t nbytes, cm_stream *stream,
                const cm_wait_hooks *hooks, cm_block **out)
{
    cm_pool *pool = device < 0 ? engine->pinned_pool : engine->device_pools[device];
    cm_pool *lender = engine->lenders[device + 1];
    cm_status status = cm_pool_alloc(pool, nbytes, stream, NULL, out);
    if (lender != NULL && cm_pool_is_short(status)) {
        status = cm_pool_alloc(lender, nbytes, stream, hooks, out);
    }
    if (hooks != NULL && cm_pool_is_short(status)) {
        status = cm_pool_alloc(pool, nbytes, stream, hooks, out);
    }
    if (hooks == NULL || hooks->interrupted == NULL) {
        return status;
    }
    return relieve(engine, pool, nbytes, stream, status, out);
}

cm_status
cm_engine_set_tuning(cm_engine *engine, const cm_tuning *tuning)
{
    if (cm_engine_is_forked(engine)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_tuning resolved = *tuning;
    cm_tuning_resolve(&resolved, cm_usable_cpu_count());
    cm_mutex_lock(&engine->lock);
    engine->tuning = resolved;
    cm_mutex_unlock(&engine->lock);
    return cm_ok();
}

void
cm_engine_deny_peers(cm_engine *engine, bool denied)
{
    atomic_store(&engine->peers.denied, denied);
}

/* Return the facts about the `nbytes` of host memory that begin at `host`. */
static cm_end_facts
facts_of_host(cm_engine *engine, const char *host, cm_kind kind, uint64_t nbytes)
{
    cm_end_facts facts = {.locked = !cm_kind_is_pageable(kind), .whole = true};
    if (nbytes > 0) {
        bool locked = false;
        facts.whole =
            cm_registry_run_nbytes(engine->registry, host, nbytes, &locked) == nbytes;
        facts.locked = facts.locked || (facts.whole && locked);
    }
    return facts;
}

cm_end_facts
cm_engine_facts_of_end(cm_engine *engine, const cm_piece_end *end, uint64_t nbytes)
{
    return cm_piece_end_is_on_device(end)
               ? (cm_end_facts){.locked = true, .whole = true}
               : facts_of_host(engine, end->host, end->kind, nbytes);
}

cm_end_facts
cm_engine_facts_of(cm_engine *engine, const cm_region *region)
{
    int64_t low = 0;
    int64_t high = 0;
    if (cm_region_is_on_device(region)) {
        return (cm_end_facts){.locked = true, .whole = true};
    }
    /* If the bounds of the region overflow, the failure is ignored here, because the
     * copy is refused anyway when it is planned. */
    cm_ignore(cm_region_bounds(region, &low, &high));
    return facts_of_host(engine, (const char *)region->host + low, region->kind,
                         (uint64_t)(high - low));
}
