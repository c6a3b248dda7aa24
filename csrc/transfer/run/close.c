/* SPDX-License-Identifier: Apache-2.0 */
/* The end of an engine: waits for all that it has under way, then gives everything
 * back. */
#include "transfer/run/run.h"

static void
wait_for_all(cm_engine *engine)
{
    for (;;) {
        cm_mutex_lock(&engine->lock);
        cm_ticket *ticket = NULL;
        cm_list *list = engine->watched_count > 0 ? &engine->watched : &engine->pending;
        if (!cm_list_is_empty(list)) {
            ticket = cm_ticket_hold(CM_LIST_ENTRY(list->next, cm_ticket, node));
        }
        cm_mutex_unlock(&engine->lock);
        if (ticket == NULL) {
            return;
        }
        (void)!cm_is_ok(cm_ticket_depend(ticket, NULL, UINT64_MAX));
        cm_ticket_release(ticket);
    }
}

/* False: there are transfers again. */
static bool
wait_for_callers(cm_engine *engine)
{
    cm_mutex_lock(&engine->lock);
    while (engine->caller_count > 0) {
        cm_cond_wait(&engine->changed, &engine->lock);
    }
    bool none = engine->pending_count == 0;
    cm_mutex_unlock(&engine->lock);
    return none;
}

cm_status
cm_engine_close(cm_engine *engine)
{
    if (cm_engine_is_forked(engine)) {
        return cm_ok(); /* its threads and its lock are the parent's: all of it leaks */
    }
    cm_mutex_lock(&engine->lock);
    engine->closed = true;
    cm_mutex_unlock(&engine->lock);
    do { /* a call that began before may leave a transfer behind */
        wait_for_all(engine);
    } while (!wait_for_callers(engine));
    cm_engine_join_workers(engine);
    cm_engine_join_watcher(engine);
    cm_workers_fini(&engine->workers);
    cm_status first = cm_ok();
    cm_status status;
    while (!cm_is_ok(status = cm_engine_take_unread(engine))) {
        first = cm_is_ok(first) ? status : first;
    }
    status = cm_kernels_fini(&engine->kernels);
    first = cm_is_ok(first) ? status : first;
    status = cm_kernels_fini(&engine->tables);
    first = cm_is_ok(first) ? status : first;
    status = cm_cache_fini(engine);
    first = cm_is_ok(first) ? status : first;
    if (engine->pinned_pool != NULL) {
        cm_pool_release(engine->pinned_pool);
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        if (engine->device_pools[device] != NULL) {
            cm_pool_release(engine->device_pools[device]);
        }
    }
    while (!cm_is_ok(status = cm_engine_end_unread(engine))) {
        first = cm_is_ok(first) ? status : first;
    }
    cm_engine_release(engine);
    return first;
}
